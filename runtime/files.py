"""Atomic writes, damaged files as one line, and the checkpoints of an output folder."""
import errno
import os
import re
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from runtime.cli import RunError, UserError, brief_error


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: it is complete or absent, even after a loss of power.

    `write(file)` fills the temporary file PATH.PID.tmp.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                sync(file.fileno())
            os.replace(temporary, path)
            if os.name != "nt":
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    sync(folder)                # makes the rename durable
                finally:
                    os.close(folder)
    finally:
        with suppress(OSError):                 # it is the disk's, whose first error says enough
            temporary.unlink()


@contextmanager
def naming(path: str | Path):
    """Gives the system's errors of read() and write() the file's name, as those of open() have."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync(descriptor: int) -> None:
    """fsync, where the file system has it: not all network file systems do."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def remove_leftovers(folder: str | Path, names: str) -> None:
    """Removes temporary files that killed calls of replace_file left, for files that match `names`.

    `names` is a regular expression.
    """
    for path in Path(folder).iterdir():
        if re.fullmatch(rf"({names})(\.\d+)?\.tmp", path.name) and path.is_file():
            path.unlink()


def read_text(path: str | Path, errors: str = "replace") -> str:
    """The UTF-8 text of a file, without a mark at its start. `errors` is that of bytes.decode."""
    return Path(path).read_bytes().decode("utf-8-sig", errors=errors)


def is_there(path: str | Path) -> bool:
    """Whether there is such a file or folder. OSError where the system cannot tell.

    os.path.exists says False then, as if nothing were on a disk that is away.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def reading(what: str | Path, remedy: str, problem: str = "cannot be read"):
    """Around code that takes apart what the file `what` holds, which may be damaged.

    An error in there, also a ValueError that our reader raises, becomes the UserError "`what`
    `problem` (cause): `remedy`". What could not be read is not damaged: an error of the system
    passes through, with the file's name. So does what Python says of a missing package.
    """
    try:
        yield
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except Exception as error:
        # Libraries raise OSErrors without a number for what is damaged. An EINVAL comes from a
        # damaged file's own numbers: a place before its beginning, say.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            with naming(what):
                raise
        raise UserError(f"{what} {problem} ({brief_error(error)}): {remedy}") from None


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """[(step, path)] of the checkpoints in `out`, oldest first. Each of these files is complete.

    An absent folder has none.
    """
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return []

    numbered = []
    for name in names:
        match = re.fullmatch(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,})\.pt", name)
        if match:
            numbered.append((int(match[1]), Path(out) / name))
    return sorted(numbered)


def what_resumes(out: str | Path) -> str:
    """What the same command does next in `out`, for the last line of a run that failed."""
    try:
        saved = checkpoints(out)
    except OSError as error:
        return f"{out} cannot be read now ({brief_error(error)})"
    if not saved:
        return "No checkpoint has been saved yet: the same command starts from the beginning"
    _, newest = saved[-1]
    return f"The same command resumes from {newest.name}"
