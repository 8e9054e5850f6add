"""Errors, flags and exit codes, the same for every command of this project."""
import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import field
from pathlib import Path


class UserError(Exception):
    """An error the user can fix: the message names the cause and the remedy (exit code 2)."""


class RunError(Exception):
    """The run itself failed (exit code 1)."""


def parse_int(text: str) -> int:
    """'100000', '100_000' or '1e5' -> 100000, for flags."""
    for kind in (int, float):                     # int first: float rounds above 2**53
        with contextlib.suppress(ValueError, OverflowError):
            if int(kind(text)) == kind(text):
                return int(kind(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


class FlagParser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors and whose flags cannot be abbreviated."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def print_error(error: Exception | str) -> None:
    """One line on stderr, without control characters: a message may quote an untrusted file."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def safe_repr(value: object) -> str:
    """A value from an untrusted file, for a message. Of a container only the type: str() of a nested one may
    never end."""
    return str(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def brief_error(error: Exception) -> str:
    """Class and first 200 characters of an error, for a message."""
    text = str(error).split("WeightsUnpickler error:")[-1]        # torch says before it how to run the code
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"


def flag(default, group, help, **metadata):
    """A field of a Config dataclass that is also a flag. `metadata`: `type` (if not the annotation),
    `choices`, `least` (lower bound; 0 for an int), `bits` (upper bound 2^bits; 40), `fixed` (cannot change on
    resume), `per_run` (never taken from a checkpoint), `only` (the recipes in which it has a meaning)."""
    return field(default=default, metadata={"group": group, "help": help, **metadata})


def parse_config(prog: str, Config: type, defaults: Callable[[dict], dict], description: str,
                 argv: list[str] | None = None) -> tuple:
    """Command line -> (Config, names of the fields that were given as flags). Each field of Config is a flag.
    `defaults`: given flags -> values of other fields that differ from Config's own defaults."""
    parser = FlagParser(prog=prog, usage=f"{prog} [flags]", description=description)
    group = None
    for f in dataclasses.fields(Config):
        name, kind, help = f.name, f.metadata.get("type", f.type), f.metadata["help"]
        if group is None or group.title != f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        if kind is bool:
            default = f"(default: {'--' if f.default else '--no_'}{name})" if f.default is not None else None
            group.add_argument(f"--{name}", dest=name, action="store_true", default=argparse.SUPPRESS,
                               help=help)
            group.add_argument(f"--no_{name}", dest=name, action="store_false", default=argparse.SUPPRESS,
                               help=default)
        else:
            group.add_argument(f"--{name}", default=argparse.SUPPRESS, choices=f.metadata.get("choices"),
                               metavar=None if "choices" in f.metadata else kind.__name__.upper(),
                               type=parse_int if kind is int else kind, help=f"{help} (default {f.default})")
    given = vars(parser.parse_args(argv))         # SUPPRESS: without the flags that were not given
    return Config(**defaults(given) | given), set(given)


def run_command(main: Callable[[], int | None], is_master: Callable[[], bool] = lambda: True) -> None:
    """Runs `main()` as a command: UserError -> one line and exit 2, RunError -> one line and exit 1.
    `is_master`: whether this process prints the line."""
    sys.stdout.reconfigure(errors="replace")      # not every terminal can print every sampled token
    try:
        sys.exit(main() or 0)
    except (UserError, RunError) as error:
        if is_master():
            print_error(error)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:                       # `... | head` closed the pipe: no traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
