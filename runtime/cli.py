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
    """Inside, all ranks raise the same error: the one whose environment variable `by` is 0 prints
    it."""
    try:
        yield
    except (UserError, RunError) as error:
        error.said_by = by
        raise


class FlagParser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, whose flags are taken with dashes too (--max-steps) and
    cannot be abbreviated, and whose texts, but for MAY_BE_EMPTY, cannot be empty, as an unset
    variable is."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def parse_args(self, args=None, namespace=None):
        if args is None:
            args = sys.argv[1:]
        words = [re.sub(r"^--[\w-]+(?==|\Z)", with_underscores, word) for word in args]
        found = self.parse_intermixed_args(words, namespace)        # `compare --plot FILE RUN RUN`, too
        for name, value in vars(found).items():
            values = value if isinstance(value, list) else [value]
            if "" not in values or value == self.get_default(name) or name in MAY_BE_EMPTY:
                continue
            flag = f"--{name}" if f"--{name}" in " ".join(words) else name
            self.error(f"{flag} is empty: give a value (was a variable of the shell not set?)")
        return found

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def with_underscores(name: re.Match) -> str:
    """--max-steps -> --max_steps."""
    return "--" + name[0][2:].replace("-", "_")


def silence(stream) -> None:
    """From now on what is printed there goes nowhere: its pipe or terminal is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error(error: Exception | str) -> None:
    """One line on stderr, without control characters: a message may quote an untrusted file."""
    line = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else "?" for c in line)
    with suppress(OSError):                         # the terminal is closed
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def safe_repr(value: object) -> str:
    """A value from an untrusted file, for a message. Of a container only the type: str() of a
    nested one may never end."""
    if isinstance(value, str | int | float | None):
        return str(value)[:40]
    return f"a {type(value).__name__}"


def brief_error(error: Exception) -> str:
    """What an error says, in 200 characters. Of an OSError these are the system's words. A plain
    ValueError is one of ours, which say what is wrong with a file; of any other error the class is
    told, too."""
    if getattr(error, "strerror", None):
        return error.strerror
    text = str(error).split("WeightsUnpickler error:")[-1]      # torch says before it how to run the code
    text = " ".join(text.split())[:200]
    if type(error) is ValueError:
        return text
    return f"{type(error).__name__}: {text}"


def flag(default, group, help, **metadata):
    """A field of a Config dataclass that is also a flag. `metadata`:

    word: what may stand in place of a number, as "auto"
    choices: the only values
    above: 0 if the value cannot be 0 itself
    most: the largest value, if it is not 2^40, or of a float 1e38
    fixed: it cannot change when a run resumes
    per_run: it is not taken from the checkpoint
    """
    return field(default=default, metadata={"group": group, "help": help, **metadata})


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main()` as a command: UserError -> one line and exit 2, RunError -> one line and exit
    1, Ctrl-C -> one line and exit 130."""
    code = 0
    try:
        sys.stdout.reconfigure(errors="replace")    # not every terminal can print every sampled token
        code = main() or 0
    except (UserError, RunError) as error:
        code = 2 if isinstance(error, UserError) else 1
        # If all ranks raise the same, one of them says it (`said_once`).
        rank = os.environ.get(getattr(error, "said_by", ""), "0")
        if rank == "0":
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

    # A Ctrl-C during Python's finalization would change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Several ranks end without finalization, and the process group is not destroyed: gloo's threads
    # can abort it (pytorch issue 190489), and its destructor holds the GIL while it waits for a
    # thread that may wait for the GIL.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
