"""Errors, flags and exit codes, the same for every command of this project."""
import argparse
import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

__version__ = "0.1.0"       # of the project; CHANGELOG.md says what changed
# What recipes.load_model reads.
MODEL_HELP = ("A checkpoint (of this project or another GPT-2's), the folder of a run (its newest "
              "checkpoint), FOLDER/best (the checkpoint with the lowest validation loss), a folder "
              "in the Hugging Face format, or a name on the Hugging Face hub")

# What the system says of a path that was typed wrongly, or that is not for this user.
WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
              errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS)
# What it says where something else than the disk fails, or than the connection to it.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class UserError(Exception):
    """An error the user can fix: the message names the cause and the remedy (exit code 2)."""


class RunError(Exception):
    """The run itself failed, or the system did (exit code 1)."""


def error_of_the_system(error: OSError) -> UserError | RunError:
    """What the system says, as an error of ours: of a path that is wrong, or of a disk that fails.

    With a file's name an error is about that file: whoever reads or writes one puts the name in.
    """
    if error.filename is None or error.errno in NO_ROOM:
        return RunError(str(error))
    if error.errno in WRONG_PATH:
        return UserError(f"{error.filename} cannot be used ({error.strerror}): check the path")
    return RunError(f"{error}: check the disk or the mount; the same command goes on")


# ----------------------------------------------------------------------------- flags

def check_range(
    name: str, value: float, smallest: float, largest: float, meaning: str = ""
) -> None:
    """UserError, with the flag's `meaning`, unless the number of --`name` is in this range."""
    if not smallest <= value <= largest:
        if meaning:
            meaning = f" ({meaning})"
        raise UserError(f"--{name} {value} is out of range: choose a number from {smallest} to "
                        f"{largest}{meaning}")


def user_path(text: str) -> str:
    """The type of a flag that takes a path. A shell leaves ~ as it is behind =, and in quotes."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty (is a variable of the shell not set?)")
    return os.path.expanduser(text)


class FlagParser(argparse.ArgumentParser):
    """argparse with the rules of this project.

    - Its errors are UserErrors.
    - Flags may be written with dashes (--max-steps), but not abbreviated.
    - The error of an unknown flag names the nearest one.
    """

    def __init__(self, **kwargs):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def parse_args(self, args=None, namespace=None):
        if args is None:
            args = sys.argv[1:]
        words = [re.sub(r"^--[\w-]+(?==|\Z)", with_underscores, word) for word in args]
        return super().parse_args(words, namespace)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (--\w+)", message)
        if unknown:
            for nearest in difflib.get_close_matches(unknown[1], self._option_string_actions, 1):
                message += f": use {nearest}"
        raise UserError(f"{message} (see {self.prog} --help)")


def with_underscores(name: re.Match) -> str:
    """--max-steps -> --max_steps."""
    return "--" + name[0][2:].replace("-", "_")


# ----------------------------------------------------------------------------- messages

def print_error(error: Exception | str) -> None:
    """One line on stderr, without control characters: a message may quote an untrusted file."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    try:
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)             # a warning must not end a run because a disk is full


def discard(stream) -> None:
    """From now on what is printed to the stream goes nowhere, like what is still in its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def safe_repr(value: object) -> str:
    """A value from an untrusted file, for a message."""
    if isinstance(value, str | int | float | None):
        return str(value)[:40]
    return f"a {type(value).__name__}"          # str() of a nested container may never end


def unexpected(what: str, expected: object, found: object) -> ValueError:
    """The error of a file that is not as it should be: "WHAT: expected X, found Y"."""
    return ValueError(f"{what}: expected {safe_repr(expected)}, found {safe_repr(found)}")


def brief_error(error: Exception) -> str:
    """What an error says, in 200 characters."""
    if getattr(error, "strerror", None):
        return error.strerror                   # an OSError's: the words of the system

    # Before these words torch says how to load the file unsafely.
    text = str(error).split("WeightsUnpickler error:")[-1]
    text = " ".join(text.split())[:200]

    if type(error) is KeyError:
        return f"it has no {text}"
    # A plain ValueError is one of ours: it says what is wrong with a file.
    if type(error) in (ValueError, UserError, RunError):
        return text
    return f"{type(error).__name__}: {text}"


# ----------------------------------------------------------------------------- a command

def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main()` as a command, and ends the process with its exit code.

    What the user or the system did wrong becomes one line on stderr. Its exit code is 2 for a
    mistake of the user's, 1 for a run that failed, and 130 for Ctrl-C. Anything else is a bug,
    with a traceback.
    """
    sys.stdout.reconfigure(errors="replace")    # not every terminal can print every sampled token
    try:
        code = returned_code(main)
        sys.stdout.flush()
    except (UserError, RunError) as error:
        print_error(own_mistake(error))
        code = exit_code(error)
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        code = 130
    except ModuleNotFoundError as error:
        print_error(f"{error}: pip install {error.name}")
        code = 2
    except OSError as error:
        told = error_of_the_system(error)
        code = exit_code(told)
        if not isinstance(error, BrokenPipeError):              # `... | head` has read enough
            print_error(own_mistake(told))
        if error.filename is None:                              # stdout takes no more
            discard(sys.stdout)
    except Exception:
        code = 1
        if not several_ranks():                 # a bug
            raise
        traceback.print_exc()

    # Several ranks end without Python's finalization, which gloo's threads can abort (pytorch issue
    # 190489), and without the destructor of the process group, which can wait for ever.
    if several_ranks():
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def returned_code(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except SystemExit as error:                 # of --help, and of Process.fail
        return error.code or 0


def exit_code(error: UserError | RunError) -> int:
    if isinstance(error, UserError):
        return 2
    return 1


def several_ranks() -> bool:
    """Whether torchrun has started several processes. A RANK left in a shell says nothing."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def is_rank_0() -> bool:
    return not several_ranks() or os.environ.get("RANK", "0") == "0"


def own_mistake(error: Exception) -> str:
    """The message of an error that only this rank has, with its rank."""
    if is_rank_0():
        return str(error)
    return f"process {os.environ['RANK']}: {error}"
