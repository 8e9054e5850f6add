"""The flags of train_gpt2.py: how the command line is read, which of several sources wins, and
which values no run can have."""
import argparse
import dataclasses
import textwrap
from collections.abc import Callable
from itertools import groupby

from runtime.cli import FlagParser, UserError, is_rank_0
from runtime.recipe import Recipe
from runtime.tokenizer import VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named set of defaults."""
    purpose: str            # for --help
    flags: dict             # {flag: value}


@dataclasses.dataclass(frozen=True)
class FlagTable:
    """All that gives a flag its value, but for the command line and a checkpoint."""
    Config: type                        # a dataclass: each of its fields is a flag
    recipes: dict[str, Recipe]
    presets: dict[str, Preset]
    overfit: dict                       # {flag: value} of --overfit, which is a run of its own

    def parse(self, description: str, argv: list[str] | None) -> dict:
        """{name: value} of the flags on the command line."""
        parser = FlagParser(
            prog="train_gpt2.py",
            usage="%(prog)s [flags]",
            description=description,
            epilog=describe_presets(self.presets, self.recipes),
        )
        for title, fields in groupby(
            dataclasses.fields(self.Config), lambda f: f.metadata["group"]
        ):
            group = parser.add_argument_group(title)
            for f in fields:
                add_flag(group, f, self.recipes)
        # torch.distributed.launch and deepspeed add it; the environment says the same.
        parser.add_argument("--local_rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

        try:
            given = vars(parser.parse_args(argv))
            given.pop("local_rank", None)
            for f in dataclasses.fields(self.Config):
                if f.name in given:
                    check_range(f, given[f.name])
        except UserError:
            # All ranks have this command line: rank 0 prints what is wrong with it.
            if not is_rank_0():
                raise SystemExit(2) from None
            raise
        return given

    def merge(self, given: dict, start):
        """A Config in which some flags are still "auto". Of these sources a later one wins:

        1. the default in Config
        2. the recipe's default (Recipe.defaults)
        3. the preset, or --overfit, which is a run of its own
        4. the recipe's learning rates (Recipe.rates): those of the presets are for AdamW
        5. a resumed run's checkpoint, except for flags that are `per_run`
        6. the command line: `given`, {flag: value}
        7. the shape of the model that was loaded
        """
        preset = self.presets[given.get("preset", "gpt2")].flags
        if given.get("overfit"):
            preset = self.overfit
        recipe = self.recipes[(preset | start.recorded | given).get("recipe", "gpt2")]

        values = recipe.defaults | preset | recipe.rates                    # 2, 3, 4
        if given.get("overfit"):
            values["min_lr"] = given.get("max_lr", values["max_lr"])        # a constant rate
        values.update(start.recorded)                                       # 5
        values.update(given)                                                # 6
        values.update(start.shape)                                          # 7
        return self.Config(**values)                                        # 1, for all others

    def wanted(self, given: dict, start, flags) -> dict:
        """{flag: value} that the command asks for, to compare with a checkpoint's `fixed` flags."""
        wanted = self.presets[flags.preset].flags | given
        if wanted.get("init", "scratch") != "scratch":
            # A run that began from --init has the shape of that model. The shape in a preset, which
            # --init overrode then, is no contradiction now; a typed one is.
            for name in start.shape.keys() - given.keys():
                wanted.pop(name, None)
        return wanted

    def check(self, config) -> None:
        """UserError for values that no run can have."""
        for f in dataclasses.fields(config):
            check_range(f, getattr(config, f.name))
        check_recipe_flags(config, self.recipes)
        check_model_flags(config)

        if config.min_lr != "auto" and config.min_lr > config.max_lr:
            raise UserError(f"--min_lr {config.min_lr} must not be above --max_lr {config.max_lr}: "
                            "lower --min_lr or raise --max_lr")

        has_preset = config.preset != "gpt2"
        resumes = config.resume != "auto"
        if config.overfit and (has_preset or resumes or config.val_every):
            raise UserError("--overfit cannot be combined with --preset, --resume or --val_every: "
                            "leave them out")


def set_automatic(config, **values) -> None:
    """Gives the flags that are still "auto" these values."""
    for name, value in values.items():
        if getattr(config, name) == "auto":
            setattr(config, name, value)


def check_ranks_agree(flags, config, process) -> None:
    """UserError if the flags of the ranks differ, or what their hardware made of "auto"."""
    # Each GPU may find another --batch_size auto; the smallest will be taken.
    values = vars(config) | {"batch_size": flags.batch_size}
    for name in ("data", "hellaswag_data", "out", "device", "wandb"):
        del values[name]
    process.require_same({f"--{name}": value for name, value in values.items()})


# ----------------------------------------------------------------------------- the command line

def add_flag(group, f: dataclasses.Field, recipes: dict[str, Recipe]) -> None:
    # SUPPRESS leaves a flag that was not given out of the result.
    options = dict(default=argparse.SUPPRESS, help=help_text(f, recipes))

    if f.type is bool:
        group.add_argument(f"--{f.name}", action="store_true", **options)
        if f.default is not False:
            options["help"] = f"Turn --{f.name} off."
            group.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", **options)
    elif "choices" in f.metadata:
        group.add_argument(f"--{f.name}", choices=f.metadata["choices"], **options)
    else:
        parse = value_parser(f.type, f.metadata.get("word"))
        group.add_argument(f"--{f.name}", type=parse, metavar=parse.__name__.upper(), **options)


def value_parser(kind: type, word: str | None) -> Callable:
    """A function that argparse calls: text -> a value of this kind, or `word` as it is."""
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
    if f.default is False or f.default == "":
        return f.metadata["help"]

    default = f.default
    if default is True:
        default = "on"
    defaults = [f"default {default}"]
    for name, recipe in recipes.items():
        of_recipe = (recipe.defaults | recipe.rates).get(f.name, f.default)
        if of_recipe != f.default:
            defaults.append(f"{name}: {of_recipe}")
    return f"{f.metadata['help']} ({'; '.join(defaults)})"


def describe_presets(presets: dict[str, Preset], recipes: dict[str, Recipe]) -> str:
    """The presets' part of --help, without the values that a preset's recipe overrides."""
    lines = [
        "presets:",
        "  Flags on the command line override a preset. So do the learning rates of some recipes:",
    ]
    for name, recipe in recipes.items():
        if recipe.rates:
            lines.append(wrapped_flags({"recipe": name} | recipe.rates))

    for name, preset in presets.items():
        overridden = {}
        if "recipe" in preset.flags:
            overridden = recipes[preset.flags["recipe"]].rates
        lines.append(f"  {name}: {preset.purpose}")
        shown = {flag: value for flag, value in preset.flags.items() if flag not in overridden}
        if shown:
            lines.append(wrapped_flags(shown))
    return "\n".join(lines)


def wrapped_flags(values: dict) -> str:
    """{flag: value} as one types them into a shell, in indented lines."""
    text = " ".join(f"--{flag}={value}" for flag, value in values.items())
    return textwrap.indent(textwrap.fill(text.replace("\n", r"$'\n'"), 94), " " * 6)


# ----------------------------------------------------------------------------- mistakes

def check_range(f: dataclasses.Field, value) -> None:
    if f.type not in (int, float) or value == f.metadata.get("word"):
        return

    largest = f.metadata.get("largest", 2**40 if f.type is int else 1e38)
    if f.metadata.get("above") == 0:
        allowed = f"above 0 and at most {largest}"
        is_valid = 0 < value <= largest
    else:
        allowed = f"from 0 to {largest}"
        is_valid = 0 <= value <= largest
    if not is_valid:
        raise UserError(f"--{f.name} {value} is out of range: choose a number {allowed} "
                        f"(--help says: {f.metadata['help']})")


def check_recipe_flags(config, recipes: dict[str, Recipe]) -> None:
    """UserError for a flag that another recipe has, but not this one."""
    own_flags = recipes[config.recipe].own_flags
    for recipe in recipes.values():
        for name in recipe.own_flags:
            default = getattr(type(config), name)
            if name not in own_flags and getattr(config, name) != default:
                raise UserError(f"--{name} does not apply to --recipe {config.recipe}: leave the "
                                "flag out")


def check_model_flags(config) -> None:
    if config.vocab_size < VOCAB_SIZE and (config.sample_every or config.hellaswag_every):
        raise UserError(f"--vocab_size {config.vocab_size} must be at least {VOCAB_SIZE} (GPT-2's "
                        "tokens) for samples and HellaSwag: raise --vocab_size, or turn both off "
                        "with --sample_every 0 --hellaswag_every 0")

    length = config.sequence_length
    if length != "auto" and length > config.block_size:
        raise UserError(f"--sequence_length {length} must not be above --block_size "
                        f"{config.block_size}: lower --sequence_length or raise --block_size")
