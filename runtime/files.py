"""Atomic writes, errors of files as one line, digests, the lock of an output folder."""
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.cli import RunError, UserError, brief_error, causes

LOCK_NAME = ".train_gpt2.lock"
LOCK_PATIENCE = 5.0         # seconds: a killed process keeps its lock until its memory has been freed
NOT_ALLOWED = errno.EACCES, errno.EPERM, errno.EROFS
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: `write(file)` fills a temporary file, PATH.PID.tmp, then fsync and
    os.replace. Raises RunError where the disk is full or the folder cannot be written."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writable(path, begun=True):
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                sync(file.fileno())
            os.replace(temporary, path)
            if os.name != "nt":                   # makes the rename durable
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    sync(folder)
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
    """Removes what killed processes left of replace_file in `folder`, for files whose whole name matches the
    regular expression `names`. Nothing else that ends in .tmp."""
    for path in Path(folder).iterdir():
        if re.fullmatch(rf"({names})(\.\d+)?\.tmp", path.name) and path.is_file():
            path.unlink()


def read_text(path: str | Path, most: int = 1 << 28, errors: str = "replace") -> str:
    """The text of a regular file, UTF-8. OSError or ValueError for anything else: a device or a pipe may have
    no end, and more than `most` bytes are no file of ours. `errors`: of bytes.decode."""
    at_once = getattr(os, "O_NONBLOCK", 0)        # opening a named pipe would block forever
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} are read")
        return file.read().decode("utf-8-sig", errors=errors)


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """[(step, path)] of the checkpoints in `out`, oldest first. Each is complete (written atomically)."""
    return sorted((int(m[1]), path) for path in Path(out).glob("checkpoint_*.pt")
                  if (m := re.fullmatch(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,})\.pt", path.name)))


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:06d}.pt"


def is_huggingface(folder: Path) -> bool:
    """Whether a folder is read in the Hugging Face format."""
    return os.path.exists(folder / "config.json")


@contextmanager
def writable(path: str | Path, begun: bool = False):
    """Around writes to a file or folder: an OSError, of which replace_file may have made a RunError, becomes
    one line with cause and remedy. That is a UserError, because another folder should have been given; but a
    RunError if the disk is full, or if the work has `begun`: there are earlier files to resume from."""
    try:
        yield
    except (OSError, RuntimeError, RunError) as error:          # torch.save makes it a RuntimeError
        cause = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
        if not cause or isinstance(error, RunError) and begun:
            raise
        if not begun and cause.errno not in NO_ROOM:
            raise UserError(f"{path} cannot be written ({brief_error(cause)}): choose another "
                            f"folder") from None
        remedy = ("make room, or " if cause.errno in NO_ROOM else
                  "make its folder writable, or " if cause.errno in NOT_ALLOWED else "")
        raise RunError(f"cannot write {path} ({brief_error(cause)}): {remedy}choose another folder; earlier "
                       "files are intact, and the same command resumes from them") from None


@contextmanager
def readable(what: str | Path, remedy: str, errors: type | tuple = Exception,
             problem: str = "cannot be read"):
    """Around the reading of a file that may be damaged or hostile: any of `errors` becomes the UserError
    "`what` `problem` (cause): `remedy`". So a reader says what is wrong by a ValueError. A UserError or
    RunError passes through."""
    try:
        yield
    except (UserError, RunError):
        raise
    except errors as error:
        if getattr(error, "errno", None) in NOT_ALLOWED:
            remedy = f"make it readable, or {remedy}"
        raise UserError(f"{what} {problem} ({brief_error(error)}): {remedy}") from None


def fingerprint_blocks(values: np.ndarray) -> np.ndarray:
    """1-D `values` themselves, up to 8 million of them. Of a longer array (FineWeb's shards have 100 million)
    8 evenly spaced blocks of 131,072 values, the array's beginning and end included."""
    if len(values) <= 1 << 23:
        return np.asarray(values)
    starts = np.linspace(0, len(values) - 131072, 8, dtype=np.int64)
    return np.concatenate([values[start:start + 131072] for start in starts])


def digest(values: np.ndarray) -> str:
    """First 16 hexadecimal digits of the SHA-256 of fingerprint_blocks(values); tells shards apart."""
    return hashlib.sha256(np.ascontiguousarray(fingerprint_blocks(values))).hexdigest()[:16]


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_folder(out: str | Path):
    """Creates and locks a run's folder, for as long as what is returned lives: two runs would overwrite each
    other's files. The lock is the system's own, and ends with the process however that ends."""
    from filelock import FileLock, Timeout        # torch requires it
    with writable(out):
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / LOCK_NAME).touch()
    lock = FileLock(Path(out) / LOCK_NAME)
    try:
        lock.acquire(timeout=LOCK_PATIENCE)
    except Timeout:
        raise UserError(f"--out {out}: another run is writing there; wait for its end, or choose another "
                        "folder") from None
    except OSError:                               # some network file systems have no locks
        pass
    return lock
