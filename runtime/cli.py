"""Errors, flags and exit codes, the same for every command of this project."""
import argparse
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

__version__ = "0.1.0"       # of the project; CHANGELOG.md says what changed
MAY_BE_EMPTY = "prompt", "sample_prompt"


class UserError(Exception):
    """An error the user can fix: the message names the cause and the remedy (exit code 2)."""


class RunError(Exception):
    """The run itself failed (exit code 1)."""


@contextmanager
def said_once(by: str = "RANK"):
    """Inside, all ranks raise the same error: the one whose environment variable `by` is 0 prints it."""
    try:
        yield
    except (UserError, RunError) as error:
        error.said_by = by
        raise


class FlagParser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, whose flags are taken with dashes too (--max-steps) and cannot be
    abbreviated, and whose texts, but for MAY_BE_EMPTY, cannot be empty, as an unset variable is."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def parse_args(self, args=None, namespace=None):
        words = [re.sub(r"^--[\w-]+(?==|\Z)", lambda name: "--" + name[0][2:].replace("-", "_"), word)
                 for word in (sys.argv[1:] if args is None else args)]
        args = self.parse_intermixed_args(words, namespace)     # `compare --plot FILE RUN RUN`, too
        for name, value in vars(args).items():
            empty = "" in (value if isinstance(value, list) else [value])
            if empty and value != self.get_default(name) and name not in MAY_BE_EMPTY:
                flag = f"--{name}" if f"--{name}" in " ".join(words) else name
                self.error(f"{flag} is empty: give a value (was a variable of the shell not set?)")
        return args

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def silence(stream) -> None:
    """From now on what is printed there goes nowhere: its pipe or terminal is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error(error: Exception | str) -> None:
    """One line on stderr, without control characters: a message may quote an untrusted file."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    with suppress(OSError):                       # the terminal is closed
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def safe_repr(value: object) -> str:
    """A value from an untrusted file, for a message. Of a container only the type: str() of a nested one may
    never end."""
    return str(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def unexpected(what: str, expected: object, found: object) -> ValueError:
    """The error of a file that is not as it should be: "WHAT: expected X, found Y"."""
    return ValueError(f"{what}: expected {safe_repr(expected)}, found {safe_repr(found)}")


def brief_error(error: Exception) -> str:
    """What an error says, in 200 characters: of an OSError the system's words, of a plain ValueError its text
    (so our readers say what is wrong with a file), of any other its class and text."""
    text = str(error).split("WeightsUnpickler error:")[-1]        # torch says before it how to run the code
    text = " ".join(text.split())[:200]
    return getattr(error, "strerror", None) or (
        text if type(error) is ValueError else f"{type(error).__name__}: {text}")


def flag(default, group, help, **metadata):
    """A field of a Config dataclass that is also a flag. `metadata`: `word` (taken in place of a number, as
    "auto"), `choices`, `above` (0: not 0 itself), `most` (if not 2^40; of a float 1e38), `fixed` (cannot
    change on resume), `per_run` (not taken from a checkpoint), `recipes` (those that it is for)."""
    return field(default=default, metadata={"group": group, "help": help, **metadata})


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main()` as a command: UserError -> one line and exit 2, RunError -> one line and exit 1, Ctrl-C
    -> one line and exit 130."""
    code = 0
    try:
        sys.stdout.reconfigure(errors="replace")    # not every terminal can print every sampled token
        code = main() or 0
    except (UserError, RunError) as error:
        code = 2 if isinstance(error, UserError) else 1
        if os.environ.get(getattr(error, "said_by", ""), "0") == "0":
            print_error(error)
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        code = 130
    except BrokenPipeError:                         # `... | head` closed the pipe: no traceback
        silence(sys.stdout)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Python's finalization would end by it, code or no code
    # No finalization of several ranks, and the process group is not destroyed: gloo's threads can abort it
    # (pytorch issue 190489), and its destructor, with the GIL, waits for a thread that may wait for the GIL.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
