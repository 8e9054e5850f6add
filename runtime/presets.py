"""The flags of train_gpt2.py, read into its Config and checked; the defaults of recipes and --preset."""
import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Collection
from itertools import groupby

from runtime.cli import FlagParser, UserError, import_package
from runtime.dataloader import divide_update
from runtime.tokenizer import VOCAB_SIZE

# name: (what it gives and takes, {flag: value})
PRESETS = {
    # one epoch: in a second one the validation loss rises again. Warm-up and rate are for gpt2 only
    "shakespeare": ("a first run on input.txt: frontier, 35M parameters, 0.3M tokens; minutes on a CPU", dict(
        recipe="frontier", data="data/shakespeare", out="log/shakespeare", n_layer=4, n_head=2, n_embd=256,
        block_size=128, total_batch_size=2048, max_steps=150, warmup_steps=15, max_lr=2e-3, val_every=25,
        hellaswag_every=0, sample_every=75, checkpoint_every=75, sample_prompt="\n")),
    "small": ("30M parameters, 33M tokens; an evening on a CPU, minutes on a GPU", dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, total_batch_size=16384, max_steps=2000,
        warmup_steps=100, max_lr=1e-3, val_tokens=524288, val_every=200, hellaswag_every=0, sample_every=500,
        sample_prompt="\n", checkpoint_every=200)),
    # GPT-3's learning rates and batches (Brown et al. 2020, arXiv:2005.14165, table 2.1); of its XL batch of
    # 1M tokens half as many steps make the same 10 billion tokens
    "gpt2": ("the defaults: GPT-2 124M, 10B tokens; this and larger ones are for GPUs", {}),
    "gpt2-medium": ("350M parameters, 10B tokens", dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4)),
    "gpt2-large": ("774M parameters, 10B tokens", dict(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4)),
    "gpt2-xl": ("1.6B parameters, 10B tokens", dict(
        n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, total_batch_size=1048576, max_steps=9536,
        warmup_steps=358)),
    # measured in docs/finetuning.md
    "finetune": ("from weights (--init) to your own text: 1.2M tokens, the best checkpoint kept", dict(
        init="gpt2", out="log/finetune", total_batch_size=8192, max_steps=150, warmup_steps=15, max_lr=1e-4,
        val_tokens=524288, val_every=25, hellaswag_every=0, sample_every=50, checkpoint_every=25,
        sample_prompt="\n", keep_checkpoints=1)),
}
# --overfit, the lecture's sanity run: 50 steps on one batch, at a constant rate. It writes nothing
OVERFIT = dict(vocab_size=50257, total_batch_size=4 * 32, sequence_length=32, shuffle=False, max_steps=50,
               warmup_steps=0, val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0,
               updates_per_step=1, resume="never")


def choose_defaults(given: dict, recipes: dict[str, dict]) -> dict:
    """Defaults for the flags not `given`: of the recipe, of --preset, of --overfit; the later ones win. Only
    learning rates and warm-up are the recipe's own, where it has any: those of a preset are for AdamW."""
    preset = PRESETS[given.get("preset", "gpt2")][1]
    recipe = recipes[given.get("recipe", preset.get("recipe", "gpt2"))]
    if given.get("overfit"):
        rate = recipe.get("max_lr", 3e-4)           # AdamW's
        return recipe | OVERFIT | {"max_lr": rate, "min_lr": given.get("max_lr", rate)}
    rates = {name: recipe[name] for name in ("max_lr", "min_lr", "warmup_steps") if name in recipe}
    return recipe | preset | rates


def value_parser(kind: type, word: str | None) -> Callable:
    """For argparse: text -> a value of this kind, or `word` as it is. Help and errors show its name."""
    def parse(text):
        return text if text == word else kind(text)
    parse.__name__ = f"{word}|{kind.__name__}" if word else kind.__name__
    return parse


def read_flags(Config: type, recipes: dict[str, dict], description: str, argv: list[str] | None) -> tuple:
    """Command line -> (Config, names of the fields given as flags). Each field of Config is a flag.
    `recipes`: each one's own defaults."""
    presets = (f"  {name}: {what}\n" + textwrap.indent(textwrap.fill(" ".join(
        f"--{flag}={value}" for flag, value in values.items()).replace("\n", r"$'\n'"), 94), " " * 6)
        for name, (what, values) in PRESETS.items())
    parser = FlagParser(prog="train_gpt2.py", usage="%(prog)s [flags]", description=description,
                        epilog="\n".join(["presets (max_lr and warmup_steps for gpt2 only):", *presets]))
    for title, fields in groupby(dataclasses.fields(Config), lambda f: f.metadata["group"]):
        group = parser.add_argument_group(title)
        for f in fields:
            help = f.metadata["help"]
            others = "".join(f"; {recipe}: {own[f.name]}" for recipe, own in recipes.items()
                             if own.get(f.name, f.default) != f.default)
            if f.default not in (None, False, ""):
                help += f" (default {'on' if f.default is True else f.default}{others})"
            if f.type is bool:
                how = dict(action="store_true")
            elif choices := f.metadata.get("choices"):
                how = dict(choices=choices)
            else:
                parse = value_parser(f.type, f.metadata.get("word"))
                how = dict(type=parse, metavar=parse.__name__.upper())
            group.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=help, **how)
            if f.type is bool and f.default is not False:
                group.add_argument(f"--no_{f.name}", dest=f.name, action="store_false",
                                   default=argparse.SUPPRESS, help=f"without --{f.name}")
    given = vars(parser.parse_args(argv))         # SUPPRESS: without the flags that were not given
    config = Config(**choose_defaults(given, recipes) | given)
    check_flags(config, set(given))
    return config, set(given)


def check_flags(config, explicit_flags: Collection[str] = ()) -> None:
    """UserError for what can be checked on the flags alone; those that are `auto` pass."""
    for f in dataclasses.fields(config):
        value, meta = getattr(config, f.name), f.metadata
        above, most = meta.get("above"), meta.get("most", 2**40 if f.type is int else 1e38)
        if f.type in (int, float) and value != meta.get("word") and not (
                0 <= value <= most and value != above):
            least = "from 0 on" if above is None else "above 0"
            raise UserError(f"--{f.name} {value}: give a number {least}, at most {most:g} ({meta['help']})")
        if f.name in explicit_flags and config.recipe not in meta.get("recipes", [config.recipe]):
            raise UserError(f"--{f.name} does not apply to --recipe {config.recipe}: leave it out")
    c, text = config, config.sample_every or config.hellaswag_every
    for mistake, made in {
            f"--min_lr {c.min_lr}: give at most --max_lr": c.min_lr != "auto" and c.min_lr > c.max_lr,
            f"--n_embd {c.n_embd} does not divide into --n_head {c.n_head} heads: give another number of "
            "heads": c.n_embd % c.n_head != 0,
            f"--vocab_size {c.vocab_size} is smaller than GPT-2's {VOCAB_SIZE}, which samples and HellaSwag "
            "need: give --sample_every 0 --hellaswag_every 0": c.vocab_size < VOCAB_SIZE and text,
            f"--updates_per_step {c.updates_per_step}: give a power of two":
                c.updates_per_step != "auto" and c.updates_per_step.bit_count() != 1,
            "--overfit is a run of its own, without validation: leave --preset and --val_every out":
                c.overfit and (c.preset != "gpt2" or c.val_every)}.items():
        if made:
            raise UserError(mistake)
    if config.wandb:
        import_package("wandb")
    for name, length in (("sequence_length", c.sequence_length), ("window", c.window)):
        if length != "auto" and length > c.block_size:
            raise UserError(f"--{name} {length} is longer than --block_size {c.block_size}: shorten the one "
                            "or raise the other")


def check_complete(config, process) -> None:
    """UserError unless the ranks have the same completed config, and it can run here."""
    check_flags(dataclasses.replace(config, window=config.window or "auto"))
    process.require_same({f"--{name}": value for name, value in vars(config).items()
                          if name not in ("data", "hellaswag_data", "out", "device", "wandb")})
    divide_update(config, config.updates_per_step, process.world_size, 1)
