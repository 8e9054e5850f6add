"""Errors, flags and exit codes, the same for every command of this project."""
import sys

# Every script imports this module before all others, so that an old Python ends in one line instead
# of with a traceback of whatever it lacks. An old Python has to be able to compile this whole file.
if sys.version_info < (3, 11):  # noqa: UP036
    print("this project needs Python 3.11 or newer, found {}.{}: use a newer Python".format(
        *sys.version_info), file=sys.stderr)
    raise SystemExit(2)

import argparse
import atexit
import errno
import importlib
import os
import re
import signal
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

__version__ = "0.1.0"       # of the project; CHANGELOG.md says what changed
FREE_TEXTS = ("prompt", "sample_prompt")        # flags whose text may be anything
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OUR_PACKAGES = ("runtime", "benchmarks")        # which no pip installs


class UserError(Exception):
    """An error the user can fix: the message names the cause and the remedy (exit code 2)."""


class RunError(Exception):
    """The run itself failed (exit code 1)."""


class PrintError(OSError):
    """What a command prints cannot be written: the reader of its pipe has ended, or the disk is full."""


@contextmanager
def printed_by(this_rank: bool):
    """Around code in which all ranks raise the same error: the one with `this_rank` prints it."""
    try:
        yield
    except (UserError, RunError) as error:
        error.printed_here = this_rank
        raise


# ----------------------------------------------------------------------------- flags

class FlagParser(argparse.ArgumentParser):
    """argparse with the rules of this project.

    - Its errors are UserErrors.
    - Flags may be written with dashes (--max-steps), but not abbreviated.
    - Switches may be written as in nanoGPT (--compile=False).
    - Texts are UTF-8 and not empty, as an unset variable of the shell is, except FREE_TEXTS.
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
        words = self._plain_switches(words)

        # Intermixed, because bench.py's commands take words after their flags.
        found = self.parse_intermixed_args(words, namespace)
        for name, value in vars(found).items():
            if value == self.get_default(name):
                continue
            flag = name
            if f"--{name}" in " ".join(words):
                flag = f"--{name}"
            texts = value if isinstance(value, list) else [value]
            for text in texts:
                if isinstance(text, str):
                    self._check_text(flag, name, text)
        return found

    def _plain_switches(self, words):
        """Rewrites `--compile=False` and `--compile False` as --no_compile, and True as --compile.

        A switch that has no such counterpart is dropped with its False: it is off by default.
        """
        result = []
        for word in words:
            switch, _, value = word.partition("=")
            if word in ("True", "False") and result and self._is_switch(result[-1]):
                switch, value = result.pop(), word

            opposite = "--no_" + switch[2:]
            if not self._is_switch(switch) or value not in ("True", "False"):
                result.append(word)
            elif value == "True":
                result.append(switch)
            elif self._is_switch(opposite, False):
                result.append(opposite)
        return result

    def _is_switch(self, word, const=True):
        """Whether this is a flag without a value, which means `const`."""
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs == 0 and action.const is const

    def _check_text(self, flag, name, text):
        """UserError for an empty text, a NUL byte, or bytes that are not UTF-8."""
        if text == "" and name not in FREE_TEXTS:
            self.error(f"{flag} is empty: choose a value (is a variable of the shell unset?)")
        if "\0" in text and name not in FREE_TEXTS:
            self.error(f"{flag} {text!r} contains a NUL byte: choose another value")
        # sys.argv holds bytes that are not UTF-8 as surrogates. A checkpoint, manifest or log with
        # one could not be read again. The prompt of sample.py stands in none of these.
        if name != "prompt" and text != text.encode(errors="replace").decode():
            self.error(f"{flag} {text!r} contains bytes that are not UTF-8: choose another value")

    def error(self, message):
        if re.search(r"unrecognized arguments: .*\.py\b", message):
            message = (f"{message} (nanoGPT's configuration files are not supported): use flags "
                       "or a --preset instead")
        raise UserError(f"{message} (see {self.prog} --help)")


def with_underscores(name: re.Match) -> str:
    """--max-steps -> --max_steps."""
    return "--" + name[0][2:].replace("-", "_")


def import_package(name: str):
    """The module `name`, of a package that not every command needs. UserError if it is missing."""
    package = name.partition(".")[0]
    missing = None
    try:
        module = importlib.import_module(name)
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.origin is None:        # a folder of that name, as wandb makes one
            missing = package
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]         # may be one that the package needs
    if missing is None:
        return module
    raise UserError(f"the package {missing} is not installed: pip install {missing}")


# ----------------------------------------------------------------------------- what is printed

class Printer:
    """A command's sys.stdout. Its errors become PrintErrors, unlike those of a file.

    It keeps the last one, because argparse, for one, passes over it.
    """

    def __init__(self, stream):
        self.stream = stream
        self.failure = None

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with self._as_print_error():
            return self.stream.write(text)

    def flush(self):
        with self._as_print_error():
            self.stream.flush()

    @contextmanager
    def _as_print_error(self):
        try:
            yield
        except OSError as error:
            self.failure = PrintError(error.errno, error.strerror)
            raise self.failure from None


def open_standard_streams() -> None:
    """Makes closed streams (`>&-`) the null device.

    Otherwise the next file that is opened, a checkpoint say, would have the number of stdout or
    stderr, and any library that prints would write into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)              # takes the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def silence(stream) -> None:
    """Sends what is printed to `stream` from now on to the null device."""
    if isinstance(stream, Printer):
        stream.failure = None
    with suppress(OSError, ValueError, AttributeError):         # not every stream has a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def print_error(error: Exception | str) -> None:
    """One line on stderr, without control characters: a message may quote an untrusted file."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    write_to_stderr(f"{Path(sys.argv[0]).name}: {text}\n")


def write_to_stderr(text: str) -> None:
    """Writes it, as far as anything can be written there."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:                             # the terminal is closed, or the disk is full
        silence(sys.stderr)


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

    # A plain ValueError is one of ours: it says what is wrong with a file.
    if type(error) in (ValueError, UserError, RunError):
        return text
    return f"{type(error).__name__}: {text}"


def refusal(error: OSError) -> UserError | RunError | None:
    """What the system refused about a path, as one line; None if `error` is about no path."""
    if not isinstance(error.filename, str | bytes) or isinstance(error, PrintError):
        return None
    path = os.fsdecode(error.filename)
    if error.errno in NO_ROOM:
        return RunError(f"{path} cannot be written ({error.strerror}): make room on the disk")
    return UserError(f"{path} cannot be used ({error.strerror}): check the path and its permissions")


def flag(default, group, help, **metadata):
    """A field of a Config dataclass that is also a flag. `metadata`:

    word: what may stand in place of a number, as "auto"
    choices: the only values
    above: 0 if the value cannot be 0 itself
    most: the largest value, if it is not 2^40, or 1e38 of a float
    fixed: the value cannot change when a run resumes
    per_run: the value is not taken from the checkpoint
    """
    return field(default=default, metadata={"group": group, "help": help, **metadata})


# ----------------------------------------------------------------------------- a command

command_is_running = False          # inside run_command, which ends several ranks in its own way


def run_command(main: Callable[[], int | None]) -> None:
    """Runs `main()` as a command, and ends the process with its exit code.

    A UserError becomes one line and 2, a RunError one line and 1, Ctrl-C one line and 130, and what
    cannot be printed one line and 1.
    """
    global command_is_running
    open_standard_streams()
    stdout = sys.stdout
    if hasattr(stdout, "reconfigure"):                  # a notebook's has none
        stdout.reconfigure(errors="replace")            # not every terminal can print every sampled token
    sys.stdout = Printer(stdout)
    command_is_running = True
    try:
        code = finish_output(sys.stdout, exit_code(main))
    finally:
        command_is_running = False
        sys.stdout = stdout

    # Several ranks end without Python's finalization, which gloo's threads can abort (pytorch issue
    # 190489). They do not destroy their process group either: its destructor holds the GIL while it
    # waits for a thread that may wait for the GIL.
    if in_process_group():
        os._exit(code)

    # During Python's exit Ctrl-C would only change the exit code. It is not ignored before that,
    # because a notebook that runs a script by %run goes on.
    atexit.register(ignore_ctrl_c)
    sys.exit(code)


def exit_code(main: Callable[[], int | None]) -> int:
    """Runs `main()`. Prints why it failed, if it did. The exit code."""
    try:
        return main() or 0
    except SystemExit as error:                         # of --help and --version
        return error.code or 0
    except (UserError, RunError) as error:
        return report(error)
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        return 130
    except PrintError:                                  # finish_output tells it
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OUR_PACKAGES:
            return report_bug()
        return report(UserError(f"the package {package} is not installed: pip install {package}"))
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            return report_bug()
        return report(refused)
    except Exception:
        return report_bug()


def report(error: UserError | RunError) -> int:
    """Prints the error, unless another rank does. The exit code."""
    if getattr(error, "printed_here", True):
        print_error(error)
    if isinstance(error, UserError):
        return 2
    return 1


def report_bug() -> int:
    write_to_stderr(traceback.format_exc())
    return 1


def finish_output(stdout: Printer, code: int) -> int:
    """Writes what is still in the buffers, so that Python's finalization has nothing to complain of.

    Returns the exit code, which is not 0 if something could not be printed.
    """
    with suppress(PrintError):
        stdout.flush()
    failure = stdout.failure
    if failure is not None:
        silence(stdout)
        code = code or 1
        if failure.errno != errno.EPIPE:                # `... | head` has read enough
            print_error(f"the output cannot be printed ({failure.strerror}): make room on the "
                        "disk, or redirect the output elsewhere")
    write_to_stderr("")                                 # flushes
    return code


def in_process_group() -> bool:
    """Whether this process is one of several ranks; without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
