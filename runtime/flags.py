"""Reads, merges, completes and checks the flags of train_gpt2.py, which config.py has."""
import argparse
import dataclasses
import os
import textwrap
from collections.abc import Callable
from itertools import groupby

from runtime.checkpoint import Start, model_shape, reading_run_state
from runtime.cli import FlagParser, UserError, check_range, is_rank_0, unexpected, user_path
from runtime.hardware import choose_dtype
from runtime.recipe import Recipe
from runtime.tokenizer import VOCAB_SIZE


def flag(default, group, help, **metadata):
    """A field of a Config dataclass that is also a flag. `metadata`:

    word: what may stand in place of a number, as "auto"
    choices: the only values
    smallest, largest: the range of a number, if it is not 0 to 2^40, or 0 to 1e38 of a float
    is_path: whether it is a path, in which ~ means the home folder
    bare: the value of the flag without one
    fixed: the value cannot change when a run resumes
    per_run: the value is not taken from the checkpoint
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": help, **metadata})


@dataclasses.dataclass(frozen=True)
class FlagTable:
    """All that gives a flag its value, but for the command line and a checkpoint."""
    Config: type                        # a dataclass: each of its fields is a flag
    recipes: dict[str, Recipe]
    presets: dict                       # {name: presets.Preset}
    overfit: object                     # the Preset of --overfit

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
                    check_field(f, given[f.name])
        except UserError:
            # All ranks have this command line: rank 0 prints what is wrong with it.
            if not is_rank_0():
                raise SystemExit(2) from None
            raise
        return given

    def resolve(self, given: dict, start: Start, process) -> tuple:
        """The flags as asked, some of them "auto", and the `config` that the run uses.

        `given`, {flag: value}, is the command line. Checkpoints record the flags as asked, so that
        a resume decides anew what "auto" means, but for the dtype on a CPU. UserError if the
        command line or the preset contradicts the run that resumes or the model of --init.
        """
        shape = {}
        if start.model:
            shape = model_shape(start.model)
        if given.get("eval_only"):
            if start.model is None:
                raise UserError("--eval_only needs a model: name it with --init, or its run with "
                                "--out")
            given = {"recipe": start.model.recipe, **given}
        recorded = self.recorded(start)
        flags = self.merge(given, recorded, shape)
        if start.path:
            check_step(start, flags)
            check_fixed_flags(start, recorded, self.wanted(given, shape))
        elif start.model:
            self.check_init(given, flags, start.model)
        self.check(flags)

        # First what the recipe says, then what holds for all recipes.
        config = dataclasses.replace(flags)             # a copy
        set_automatic(config, sequence_length=config.block_size)
        if config.overfit and "min_lr" not in given:
            config.min_lr = config.max_lr                       # a constant rate
        if config.overfit and "max_steps" not in given:
            # In a narrower model a step of the same rate changes the logits less.
            config.max_steps = round(config.max_steps * max(1, self.Config.n_embd / config.n_embd))
        set_automatic(config, **self.recipes[config.recipe].automatic(config))
        set_automatic(config, min_lr=config.max_lr / 10)
        config.dtype = choose_dtype(config.dtype, process.device, start.dtype)
        if config.eval_only:
            set_automatic(config, compile=False)                # one evaluation would not repay it
        return flags, config

    def merge(self, given: dict, recorded: dict | None = None, shape: dict | None = None):
        """A Config, in which some flags are still "auto", by the order that its docstring has.

        All are {flag: value}: `given` is the command line, `recorded` is from a checkpoint, `shape`
        from the model of --init or of the checkpoint.
        """
        preset = self.preset_of(given)
        others = (recorded or {}) | given | (shape or {})
        name = (preset | others).get("recipe", self.Config.recipe)
        recipe = self.recipes[name]
        return self.Config(**recipe.defaults | preset | recipe.rates | others)

    def preset_of(self, given: dict) -> dict:
        """{flag: value} of the preset. --overfit is one with a name of its own."""
        if given.get("overfit"):
            return self.overfit.flags
        flags = self.presets[given.get("preset", self.Config.preset)].flags
        if given.get("eval_only"):
            # The model is there, and says its recipe and shape: those of the preset do not count.
            flags = {name: value for name, value in flags.items() if name not in self.fixed()}
        return flags

    def fixed(self) -> set[str]:
        """The flags that cannot change when a run resumes."""
        return {f.name for f in dataclasses.fields(self.Config) if f.metadata.get("fixed")}

    # ------------------------------------------------------------------------- runs that resume

    def recorded(self, start: Start) -> dict:
        """{flag: value} in the checkpoint, without those that are `per_run`; {} for a new run.

        UserError for a value of another type. Ranges are checked later, with those of all flags.
        """
        if start.path is None:
            return {}
        recorded = {}
        with reading_run_state(start.path, start.remedy):
            values = start.flags
            for f in dataclasses.fields(self.Config):
                if f.name not in values or f.metadata.get("per_run"):
                    continue
                value = values[f.name]
                recorded[f.name] = value
                if isinstance(value, str) and value == f.metadata.get("word"):
                    continue
                choices = f.metadata.get("choices")
                if type(value) is not f.type or (choices and value not in choices):
                    raise unexpected(f"its --{f.name}", f"a valid {f.type.__name__}", value)
        return recorded | model_shape(start.model)

    def wanted(self, given: dict, shape: dict) -> dict:
        """{flag: value} that the command asks for, to compare with a checkpoint's `fixed` flags."""
        wanted = self.preset_of(given) | given
        if wanted.get("init", "scratch") != "scratch":
            # A run that began from --init has the shape of that model, whatever the preset says.
            for name in shape.keys() - given.keys():
                wanted.pop(name, None)
        fixed = self.fixed()
        if given.get("eval_only"):
            fixed = {"recipe", *shape}          # nothing is trained: only the model has to be that
        return {name: value for name, value in wanted.items() if name in fixed}

    # ------------------------------------------------------------------------- mistakes

    def check_init(self, given: dict, flags, model) -> None:
        """UserError if the model of --init has another recipe, or another shape than is given."""
        if type(model) is not self.recipes[flags.recipe].model:
            raise UserError(f"--recipe {flags.recipe} contradicts --init {flags.init}, whose model "
                            f"has the recipe {model.recipe}: use --recipe {model.recipe}")
        for name, value in model_shape(model).items():
            if given.get(name, value) != value:
                raise UserError(f"--{name} {given[name]} contradicts --init {flags.init}, whose "
                                f"model has {value}: use --{name} {value}, or leave the flag out")

    def check(self, config) -> None:
        """UserError for values that no run can have."""
        for f in dataclasses.fields(config):
            check_field(f, getattr(config, f.name))
        check_recipe_flags(config, self.recipes)
        check_model_flags(config)

        recipe_of_preset = self.presets[config.preset].flags.get("recipe", config.recipe)
        if recipe_of_preset != config.recipe and not config.eval_only:
            raise UserError(f"--preset {config.preset} is for --recipe {recipe_of_preset}, not for "
                            f"{config.recipe}: leave --recipe out, or choose another --preset")
        if config.min_lr != "auto" and config.min_lr > config.max_lr:
            raise UserError(f"--min_lr {config.min_lr} must not be above --max_lr {config.max_lr}: "
                            "lower --min_lr or raise --max_lr")

        # It has no validation shards, and writes nothing.
        if config.overfit:
            usual = self.Config(**self.overfit.flags)
            for name in ("preset", "resume", "out", "val_every", "checkpoint_every", "eval_only"):
                if getattr(config, name) != getattr(usual, name):
                    raise UserError(f"--overfit cannot be combined with --{name}: leave it out")


def set_automatic(config, **values) -> None:
    """Gives the flags that are still "auto" these values."""
    for name, value in values.items():
        if getattr(config, name) == "auto":
            setattr(config, name, value)


def check_ranks_agree(config, process) -> None:
    """UserError if the flags of the ranks differ, or what their hardware made of "auto"."""
    values = dict(vars(config))
    for name in ("data", "hellaswag_data", "out", "device", "wandb"):
        del values[name]
    process.require_same({f"--{name}": value for name, value in values.items()})


# ----------------------------------------------------------------------------- the command line

def add_flag(group, f: dataclasses.Field, recipes: dict[str, Recipe]) -> None:
    # SUPPRESS leaves a flag that was not given out of the result.
    options = dict(default=argparse.SUPPRESS, help=help_text(f, recipes))

    if f.type is bool:
        # As in nanoGPT it may be written as --compile=False, too.
        group.add_argument(f"--{f.name}", nargs="?", const=True, type=true_or_false,
                           metavar="BOOL", **options)
        if f.default is not False:
            options["help"] = f"Turn --{f.name} off."
            group.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", **options)
    elif "choices" in f.metadata:
        group.add_argument(f"--{f.name}", choices=f.metadata["choices"], **options)
    else:
        parse = value_parser(f.type, f.metadata.get("word"))
        options.update(type=parse, metavar=parse.__name__.upper())
        if f.metadata.get("is_path"):
            # An empty path is a mistake, but where it is the default.
            options.update(type=user_path if f.default else os.path.expanduser, metavar="PATH")
        if "bare" in f.metadata:
            options.update(nargs="?", const=f.metadata["bare"])
        group.add_argument(f"--{f.name}", **options)


def true_or_false(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text == "True"


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


def describe_presets(presets: dict, recipes: dict[str, Recipe]) -> str:
    """The presets' part of --help."""
    lines = [
        "presets:",
        "  Flags on the command line override a preset. So do the learning rates of some recipes:",
    ]
    for name, recipe in recipes.items():
        if recipe.rates:
            lines.append(wrapped_flags({"recipe": name} | recipe.rates))

    for name, preset in presets.items():
        lines.append(f"  {name}: {preset.purpose}")
        if preset.flags:
            lines.append(wrapped_flags(preset.flags))
    return "\n".join(lines)


def wrapped_flags(values: dict) -> str:
    """{flag: value} as one types them into a shell, in indented lines."""
    text = " ".join(f"--{flag}={value}" for flag, value in values.items())
    return textwrap.indent(textwrap.fill(text, 94), " " * 6)


# ----------------------------------------------------------------------------- mistakes

def check_field(f: dataclasses.Field, value) -> None:
    """UserError if the value of a flag that is a number is out of its range."""
    largest = {int: 2**40, float: 1e38}
    if f.type in largest and value != f.metadata.get("word"):
        check_range(f.name, value, f.metadata.get("smallest", 0),
                    f.metadata.get("largest", largest[f.type]), f.metadata["help"])


def check_step(start: Start, config) -> None:
    """UserError for a run that resumes beyond its end."""
    if start.step > config.max_steps:
        raise UserError(f"{start.path} is at step {start.step}, beyond --max_steps "
                        f"{config.max_steps}: raise --max_steps, or go back to an earlier "
                        "checkpoint with --resume and another --out")


def check_fixed_flags(start: Start, recorded: dict, wanted: dict) -> None:
    """UserError for a `fixed` flag that the command wants otherwise than the checkpoint has it."""
    for name, value in wanted.items():
        if name not in recorded:
            continue
        if name == "init" and start.has_same_init:
            continue                            # the same weights by another path
        meant = recorded[name]
        if name == "sequence_length" and meant == "auto":
            meant = recorded["block_size"]
        if value not in (recorded[name], meant):
            raise UserError(f"{start.path} was trained with --{name} {recorded[name]}, not "
                            f"{value}: set --{name} to {recorded[name]}, or start a new run with "
                            "another --out")


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
    if config.vocab_size < VOCAB_SIZE and not config.eval_only:
        tokens = f"the tokens of --vocab_size {config.vocab_size} are not GPT-2's {VOCAB_SIZE}"
        if config.hellaswag_every:
            raise UserError(f"HellaSwag is text, and {tokens}: raise --vocab_size, or turn it off "
                            "with --hellaswag_every 0")
        prompts = ("", "auto", type(config).sample_prompt)
        if config.sample_every and config.sample_prompt not in prompts:
            raise UserError(f"--sample_prompt is text, and {tokens}: leave the flag out")

    length = config.sequence_length
    if length != "auto" and length > config.block_size:
        remedy = "lower --sequence_length"
        if config.init == "scratch" and not config.eval_only:
            remedy += " or raise --block_size"
        raise UserError(f"--sequence_length {length} must not be above --block_size "
                        f"{config.block_size}: {remedy}")
