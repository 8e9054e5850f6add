"""--preset and --overfit: named sets of defaults of train_gpt2.py, which flags override; and checks of flags."""
import dataclasses
import importlib.util
import math
import textwrap

import torch

from runtime.attention import check_attention
from runtime.checkpoint import flag_values
from runtime.cli import UserError
from runtime.dataloader import divide_update
from runtime.tokenizer import VOCAB_SIZE

# name: (what it gives and takes, {flag: value})
PRESETS = {
    # one epoch: in a second one the validation loss rises (docs/recipes.md). Warm-up and rate are gpt2's
    "shakespeare": (
        "a first run on input.txt: frontier, 35M parameters, 0.3M tokens; minutes on a CPU",
        dict(recipe="frontier", data="data/shakespeare", out="log/shakespeare", n_layer=4, n_head=2,
             n_embd=256, block_size=128, total_batch_size=2048, max_steps=150, warmup_steps=15, max_lr=2e-3,
             val_every=25, hellaswag_every=0, sample_every=75, checkpoint_every=75)),
    "small": (
        "30M parameters, 33M tokens; an evening on a CPU, minutes on a GPU",
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, total_batch_size=16384, max_steps=2000,
             warmup_steps=100, max_lr=1e-3, val_tokens=524288, val_every=200, hellaswag_every=0,
             sample_every=500, checkpoint_every=200)),
    # GPT-3's learning rates and batches (Brown et al. 2020, arXiv:2005.14165, table 2.1); of its XL batch of
    # 1M tokens half as many steps make the same 10 billion tokens
    "gpt2": ("GPT-2 124M, the defaults: 10 billion tokens; for GPUs", {}),
    "gpt2-medium": ("350M parameters, 10 billion tokens; for GPUs",
                    dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4)),
    "gpt2-large": ("774M parameters, 10 billion tokens; for GPUs",
                   dict(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4)),
    "gpt2-xl": ("1.6 billion parameters, 10 billion tokens; for GPUs",
                dict(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, total_batch_size=1048576,
                     max_steps=9536, warmup_steps=358)),
    # measured in docs/finetuning.md
    "finetune": ("from weights (--init) to your own text: 1.2M tokens, the best checkpoint kept",
                 dict(init="gpt2", out="log/finetune", total_batch_size=8192, max_steps=150, warmup_steps=15,
                      max_lr=1e-4, val_tokens=524288, val_every=25, hellaswag_every=0, sample_every=50,
                      checkpoint_every=25, keep_checkpoints=1)),
}

# --overfit, the lecture's sanity run: 50 AdamW steps on one batch, at a constant rate. It writes nothing
OVERFIT = dict(vocab_size=50257, total_batch_size=4 * 32, sequence_length=32, shuffle=False, max_steps=50,
               warmup_steps=0, max_lr=3e-4, min_lr=3e-4, val_every=0, hellaswag_every=0, sample_every=0,
               checkpoint_every=0, updates_per_step=1, resume="never")


def choose_defaults(given: dict, recipes: dict[str, dict]) -> dict:
    """Defaults for the flags not `given`: of the recipe, of --preset, of --overfit; the later ones win. Only
    learning rates and warm-up are the recipe's own, where it has any: those of a preset are for AdamW."""
    preset = PRESETS[given.get("preset", "gpt2")][1]
    recipe = recipes[given.get("recipe", preset.get("recipe", "gpt2"))]
    if given.get("overfit"):
        if "preset" in given:
            raise UserError("--overfit is a run of its own: leave --preset out")
        return recipe | OVERFIT
    return recipe | preset | {name: recipe[name] for name in ("max_lr", "min_lr", "warmup_steps")
                              if name in recipe}


def preset_notes() -> str:
    """The presets, for the help."""
    lines = ["presets:"]
    for name, (what, values) in PRESETS.items():
        # a flag and its value stay on one line: textwrap does not break at \0
        flags = " ".join(f"--{flag}\0{value}" for flag, value in values.items())
        lines += [f"  {name}: {what}", *textwrap.wrap(flags, 100, initial_indent=" " * 6,
                                                      subsequent_indent=" " * 6, break_on_hyphens=False)]
    return "\n".join(lines).replace("\0", " ") + "\n\n"


def check_flags(config, explicit_flags: set[str]) -> None:
    """UserError for what can be checked on the flags alone; those that are `auto` pass."""
    for f in dataclasses.fields(config):
        value, minimum = getattr(config, f.name), f.metadata.get("minimum", 0 if f.type is int else None)
        if value != f.metadata.get("word") and minimum is not None and not (
                minimum <= value < 2**f.metadata.get("bits", 40)):
            raise UserError(f"--{f.name} {value}: must be at least {minimum}, and below "
                            f"2^{f.metadata.get('bits', 40)}")
        if f.name in explicit_flags and config.recipe not in f.metadata.get("recipes", [config.recipe]):
            raise UserError(f"--{f.name} does not apply to --recipe {config.recipe}: leave it out")
    c, text = config, config.sample_every or config.hellaswag_every
    for right, what, remedy in (
            (0 < c.max_lr < math.inf, f"--max_lr {c.max_lr}", "give a number above 0"),
            (c.min_lr == "auto" or 0 <= c.min_lr <= c.max_lr, f"--min_lr {c.min_lr}", "give 0 to --max_lr"),
            (c.cooldown == "auto" or 0 < c.cooldown <= 1, f"--cooldown {c.cooldown}",
             "give a fraction of the steps, above 0 and up to 1"),
            (c.grad_clip > 0, f"--grad_clip {c.grad_clip}", "give a norm above 0, or inf for no clipping"),
            (c.n_embd % c.n_head == 0, f"--n_embd {c.n_embd} does not divide into --n_head {c.n_head} heads",
             "give another number of heads"),
            (c.vocab_size <= 65536, f"--vocab_size {c.vocab_size}", "give at most 65536: tokens are uint16"),
            (c.vocab_size >= VOCAB_SIZE or not text, f"--vocab_size {c.vocab_size} is smaller than GPT-2's "
             f"{VOCAB_SIZE}, which samples and HellaSwag need", "give --sample_every 0 --hellaswag_every 0"),
            (c.updates_per_step == "auto" or c.updates_per_step.bit_count() == 1,
             f"--updates_per_step {c.updates_per_step}", "give a power of two"),
            (not (c.overfit and c.val_every), "--overfit has no validation data", "leave --val_every out"),
            (not c.wandb or importlib.util.find_spec("wandb"), "--wandb needs the package wandb",
             "pip install wandb, or leave the flag out")):
        if not right:
            raise UserError(f"{what}: {remedy}")
    for name in ("sequence_length", "window"):
        if getattr(c, name) != "auto" and getattr(c, name) > c.block_size:
            raise UserError(f"--{name} {getattr(c, name)} is longer than --block_size {c.block_size}: shorten "
                            "the one or raise the other")


def check_complete(config, process) -> None:
    """UserError unless the ranks have the same completed config, and it can run here."""
    process.require_same(flag_values(config))
    divide_update(config.total_batch_size, config.sequence_length, config.updates_per_step, process.world_size, 1)
    check_attention(config.attention, process.device, getattr(torch, config.dtype),
                    config.n_embd // config.n_head, masked=config.window > 0)
