"""Atomic writes, damaged files as one line, the checkpoints and the lock of an output folder."""
import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtime.cli import RunError, UserError, brief_error

LOCK_PATIENCE = 5.0         # seconds: a killed process keeps its lock until its memory is freed


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: it is complete or absent, even after a loss of power.

    `write(file)` fills the temporary file PATH.PID.tmp.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
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
    except OSError as error:
        # What a full disk says of a write names no file.
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
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


def read_text(path: str | Path, errors: str = "replace") -> str:
    """The UTF-8 text of a file, without a mark at its start. `errors` is that of bytes.decode."""
    return Path(path).read_bytes().decode("utf-8-sig", errors=errors)


@contextmanager
def reading(
    what: str | Path,
    remedy: str,
    errors: type | tuple = Exception,
    problem: str = "cannot be read",
):
    """Around code that takes apart what a file holds, which may be damaged.

    Any of `errors`, also a ValueError that our reader raises, becomes the UserError "`what`
    `problem` (cause): `remedy`". What the system says of a file by its name, and what Python says
    of a missing package, passes through.
    """
    try:
        yield
    except (UserError, RunError, ModuleNotFoundError):
        raise
    except errors as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise UserError(f"{what} {problem} ({brief_error(error)}): {remedy}") from None


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """[(step, path)] of the checkpoints in `out`, oldest first. Each of these files is complete.

    An absent folder has none.
    """
    if not os.path.exists(out):
        return []

    numbered = []
    for name in os.listdir(out):
        match = re.fullmatch(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,})\.pt", name)
        if match:
            numbered.append((int(match[1]), Path(out) / name))
    return sorted(numbered)


def what_resumes(out: str | Path) -> str:
    """What the same command does next in `out`, for the last line of a run that failed."""
    saved = checkpoints(out)
    if not saved:
        return "No checkpoint has been saved yet: the same command starts from the beginning"
    _, newest = saved[-1]
    return f"The same command resumes from {newest.name}"


def started_by_mpirun() -> bool:
    """Whether mpirun has started this process as one of several that know nothing of each other."""
    # Slurm's SLURM_NTASKS is no such sign: a batch script that starts one process has it, too.
    sizes = (os.environ.get("OMPI_COMM_WORLD_SIZE", "1"), os.environ.get("PMI_SIZE", "1"))
    return sizes != ("1", "1") and "WORLD_SIZE" not in os.environ


def lock_folder(out: str | Path, name: str = ".train_gpt2.lock"):
    """Makes the folder, and locks it until the returned file is closed or the process ends.

    UserError if another process has the lock. Windows and some network file systems have no locks:
    there the folder is not locked.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    file = open(Path(out) / name, "a")
    try:
        import fcntl
    except ImportError:                         # Windows
        return file

    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                remedy = "wait for the end of that run, or choose another --out"
                if started_by_mpirun():
                    remedy = ("mpirun has started several, each alone. To train on several devices "
                              "use torchrun instead")
                raise UserError(f"--out {out} is in use by another run: {remedy}") from None
            time.sleep(0.1)
        except OSError:                         # a file system without locks
            return file
