"""Atomic writes, errors of files as one line, digests, the lock of an output folder."""
import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from runtime.cli import NO_ROOM, RunError, UserError, brief_error, refusal

LOCK_PATIENCE = 5.0         # seconds: a killed process keeps its lock until its memory has been freed


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: it is complete or absent, even after a loss of power.

    `write(file)` fills the temporary file PATH.PID.tmp. RunError if the disk is full, or if the
    folder cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path, begun=True):
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                sync(file.fileno())
            os.replace(temporary, path)
            if os.name != "nt":
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    sync(folder)                    # makes the rename durable
                finally:
                    os.close(folder)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


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


def read_text(path: str | Path, max_bytes: int = 1 << 28, errors: str = "replace") -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`. `errors` is that of bytes.decode.

    OSError or ValueError for anything else: a device or a pipe may have no end.
    """
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is not a regular file")
    if info.st_size > max_bytes:
        raise ValueError(f"expected at most {max_bytes:,} bytes, found {info.st_size:,}")
    return Path(path).read_bytes().decode("utf-8-sig", errors=errors)


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """[(step, path)] of the checkpoints in `out`, oldest first. Each of these files is complete.

    An absent folder has none. OSError if the folder cannot be read: it may hold some.
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
    saved = []
    with suppress(OSError):
        saved = checkpoints(out)
    if not saved:
        return "No checkpoint has been saved yet: the same command starts from the beginning"
    _, newest = saved[-1]
    return f"The same command, without --resume, resumes from {newest.name}"


@contextmanager
def writing(path: str | Path, begun: bool = False):
    """Around writes to a file or folder: turns an OSError into one line with cause and remedy.

    Before the work has `begun` it becomes a UserError: choose another folder. Afterwards, and if the
    disk is full, it becomes a RunError: what was written before is there to resume from.
    """
    try:
        yield
    except (OSError, RuntimeError, RunError) as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        is_full = cause.errno in NO_ROOM
        if isinstance(error, RunError) and (begun or is_full):
            raise                               # replace_file has named the file already

        why = brief_error(cause)
        if not begun and not is_full:
            raise UserError(f"{path} cannot be written ({why}): choose another folder") from None
        remedy = "make the folder writable"
        if is_full:
            remedy = "make room on the disk"
        raise RunError(f"{path} cannot be written ({why}): {remedy}, or choose another folder. "
                       "Earlier files are intact, and the same command resumes") from None


def os_error_behind(error: BaseException | None) -> OSError | None:
    """torch.save raises an error of its own while it handles the OSError of the file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def run_can_continue(out: str | Path):
    """Around a run's steps: turns what the system refuses about a path into a RunError.

    Its message says how the run in `out` is continued.
    """
    try:
        yield
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise RunError(f"{refused}. {what_resumes(out)}") from None


@contextmanager
def reading(
    what: str | Path,
    remedy: str,
    errors: type | tuple = Exception,
    problem: str = "cannot be read",
):
    """Around the reading of a file that may be damaged or hostile.

    Any of `errors`, also a ValueError that our reader raises, becomes the UserError "`what`
    `problem` (cause): `remedy`". A UserError or RunError passes through, and so does a missing
    package, of which run_command has more to say.
    """
    try:
        yield
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except errors as error:
        raise UserError(f"{what} {problem} ({brief_error(error)}): {remedy}") from None


def lock_folder(out: str | Path, name: str = ".train_gpt2.lock"):
    """Creates the folder and locks it by the file `name`, until the lock is released or this process
    ends.

    UserError if another run has the lock. None if the file system has no locks.
    """
    from filelock import FileLock, Timeout          # torch requires it

    lock = FileLock(Path(out) / name, timeout=LOCK_PATIENCE)
    with writing(out):
        try:
            lock.acquire()                          # makes the folder, too
            return lock
        except Timeout:
            raise UserError(f"--out {out} is in use by another run: wait for the end of that run, "
                            "or choose another --out") from None
        except OSError as error:
            # Some network file systems have no locks.
            if error.errno == errno.ENOLCK:
                return None
            raise
