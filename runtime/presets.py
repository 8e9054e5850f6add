"""The flags of train_gpt2.py: presets, how the command line is read, and what no run can have."""
import argparse
import dataclasses
import importlib.util
import textwrap
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from runtime.cli import FlagParser, UserError
from runtime.recipe import Recipe
from runtime.tokenizer import VOCAB_SIZE

# name: (what it is for, {flag: value})
PRESETS = {
    # One epoch of the text: in a second one the validation loss rises again. The warm-up and the
    # rate are those of gpt2, if --recipe gpt2 is given; frontier has its own.
    "shakespeare": ("a first run on input.txt: frontier, 35M parameters, 0.3M tokens; minutes on a CPU", dict(
        recipe="frontier", data="data/shakespeare", out="log/shakespeare",
        n_layer=4, n_head=2, n_embd=256, block_size=128,
        total_batch_size=2048, max_steps=200, warmup_steps=15, max_lr=2e-3,
        val_every=25, hellaswag_every=0, sample_every=100, sample_prompt="\n", checkpoint_every=100)),
    "small": ("30M parameters, 33M tokens; an evening on a CPU, minutes on a GPU", dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256,
        total_batch_size=16384, max_steps=2000, warmup_steps=100, max_lr=1e-3,
        val_tokens=524288, val_every=200, hellaswag_every=0,
        sample_every=500, sample_prompt="\n", checkpoint_every=200)),

    # GPT-3's learning rates and batches (Brown et al. 2020, arXiv:2005.14165, table 2.1). With XL's
    # batch of 1M tokens half as many steps make the same 10 billion tokens.
    "gpt2": ("the defaults: GPT-2 124M, 10B tokens; this and larger ones are for GPUs", {}),
    "gpt2-medium": ("350M parameters, 10B tokens", dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4)),
    "gpt2-large": ("774M parameters, 10B tokens", dict(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4)),
    "gpt2-xl": ("1.6B parameters, 10B tokens", dict(
        n_layer=48, n_head=25, n_embd=1600,
        total_batch_size=1048576, max_steps=9536, warmup_steps=358, max_lr=2e-4)),

    # Measured in docs/finetuning.md.
    "finetune": ("from weights (--init) to your own text: 1.2M tokens, the best checkpoint kept", dict(
        init="gpt2", out="log/finetune",
        total_batch_size=8192, max_steps=150, warmup_steps=15, max_lr=1e-4,
        val_tokens=524288, val_every=25, hellaswag_every=0,
        sample_every=50, sample_prompt="\n", checkpoint_every=25, keep_checkpoints=1)),
}

# --overfit is the lecture's sanity run: 50 steps on one batch, at a constant rate. It writes
# nothing.
OVERFIT = dict(
    vocab_size=50257, total_batch_size=4 * 32, initial_batch_size=4 * 32, sequence_length=32, shuffle=False,
    max_steps=50, warmup_steps=0, max_lr=3e-4, resume="never",
    val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)


# ----------------------------------------------------------------------------- the command line

def parse_flags(Config: type, recipes: dict[str, Recipe], description: str,
                argv: list[str] | None) -> dict:
    """{name: value} of the flags that stand on the command line. Every field of Config is a
    flag."""
    parser = FlagParser(prog="train_gpt2.py", usage="%(prog)s [flags]", description=description,
                        epilog=describe_presets())
    for title, fields in groupby(dataclasses.fields(Config), lambda f: f.metadata["group"]):
        group = parser.add_argument_group(title)
        for f in fields:
            add_flag(group, f, recipes)
    return vars(parser.parse_args(argv))


def add_flag(group, f: dataclasses.Field, recipes: dict[str, Recipe]) -> None:
    # SUPPRESS leaves a flag that was not given out of the result.
    options = dict(default=argparse.SUPPRESS, help=help_text(f, recipes))

    if f.type is bool:
        group.add_argument(f"--{f.name}", action="store_true", **options)
        if f.default is not False:
            options["help"] = f"without --{f.name}"
            group.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", **options)
    elif "choices" in f.metadata:
        group.add_argument(f"--{f.name}", choices=f.metadata["choices"], **options)
    else:
        parse = value_parser(f.type, f.metadata.get("word"))
        group.add_argument(f"--{f.name}", type=parse, metavar=parse.__name__.upper(), **options)


def value_parser(kind: type, word: str | None) -> Callable:
    """A function that argparse calls: text -> a value of this kind, or the word that may stand
    instead."""
    def parse(text):
        if text == word:
            return word
        return kind(text)

    # argparse shows the function's name in the help and in its errors.
    parse.__name__ = kind.__name__
    if word:
        parse.__name__ = f"{word}|{kind.__name__}"
    return parse


def help_text(f: dataclasses.Field, recipes: dict[str, Recipe]) -> str:
    """What the flag is, its default, and the recipes that have another."""
    if f.default in (False, ""):
        return f.metadata["help"]

    defaults = [f"default {'on' if f.default is True else f.default}"]
    for name, recipe in recipes.items():
        own = (recipe.defaults | recipe.rates).get(f.name, f.default)
        if own != f.default:
            defaults.append(f"{name}: {own}")
    return f"{f.metadata['help']} ({'; '.join(defaults)})"


def describe_presets() -> str:
    lines = ["presets (max_lr and warmup_steps for gpt2 only):"]
    for name, (purpose, values) in PRESETS.items():
        flags = " ".join(f"--{flag}={value}" for flag, value in values.items())
        flags = flags.replace("\n", r"$'\n'")           # as one types it into a shell
        lines.append(f"  {name}: {purpose}")
        lines.append(textwrap.indent(textwrap.fill(flags, 94), " " * 6))
    return "\n".join(lines)


# ----------------------------------------------------------------------------- mistakes

def check_flags(config, recipes: dict[str, Recipe], checkpoint: Path | None) -> None:
    """UserError for values that no run can have. `checkpoint`: where some of them may come from."""
    for f in dataclasses.fields(config):
        if f.type in (int, float):
            check_range(f, getattr(config, f.name))
    check_recipe_flags(config, recipes, checkpoint)
    check_model_flags(config)

    if config.min_lr != "auto" and config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr}: give at most --max_lr {config.max_lr}")

    if config.overfit and (config.preset != "gpt2" or config.val_every):
        raise UserError("--overfit is a run of its own, without validation: leave --preset and --val_every "
                        "out")

    if config.wandb and not importlib.util.find_spec("wandb"):
        raise UserError("--wandb needs the package wandb: pip install wandb, or leave the flag out")


def check_range(f: dataclasses.Field, value) -> None:
    if value == f.metadata.get("word"):
        return

    most = f.metadata.get("most", 2**40 if f.type is int else 1e38)
    if f.metadata.get("above") == 0:
        least, fits = "above 0", 0 < value <= most
    else:
        least, fits = "from 0 on", 0 <= value <= most
    if not fits:
        raise UserError(f"--{f.name} {value}: give a number {least}, at most {most:g}")


def check_recipe_flags(config, recipes: dict[str, Recipe], checkpoint: Path | None) -> None:
    """Some flags are for some recipes only."""
    for recipe in recipes.values():
        for name in recipe.own_flags:
            if name not in recipes[config.recipe].own_flags and getattr(config, name) != "auto":
                source = f"{checkpoint}: " if checkpoint else ""
                raise UserError(f"{source}--{name} does not apply to --recipe {config.recipe}: leave it out")


def check_model_flags(config) -> None:
    if config.n_embd % config.n_head != 0:
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: give "
                        "another number of heads")

    if config.vocab_size < VOCAB_SIZE and (config.sample_every or config.hellaswag_every):
        raise UserError(f"--vocab_size {config.vocab_size} is smaller than GPT-2's {VOCAB_SIZE}, which "
                        "samples and HellaSwag need: give --sample_every 0 --hellaswag_every 0")

    for name in ("sequence_length", "window"):
        length = getattr(config, name)
        if length != "auto" and length > config.block_size:
            raise UserError(f"--{name} {length} is longer than --block_size {config.block_size}: shorten the "
                            "one or raise the other")
