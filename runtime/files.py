"""Atomic writes, errors of files as UserErrors, digests, an output folder's lock and checkpoints."""
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

# what a run writes into --out beside its checkpoints and TensorBoard's files
RUN_FILES = ("log.txt", "metrics.csv", "loss.png", "console.log", "status.json", "wandb_id", "trace.json")
LOCK_NAME = ".train_gpt2.lock"
# seconds to wait for a process of this machine (one that was killed loses its lock once its memory is freed),
# and for one that cannot be looked at, on another machine
LOCK_PATIENCE = 3, 20
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


def is_redirected_to(path: Path) -> bool:
    """Whether stdout or stderr go into this file: `python train_gpt2.py > log/console.log`."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return True
    return False


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """[(step, path)] of the checkpoints in `out`, oldest first. Each is complete (written atomically)."""
    return sorted((int(m[1]), path) for path in Path(out).glob("checkpoint_*.pt")
                  if (m := re.fullmatch(r"checkpoint_([0-9]{6}|[1-9][0-9]{6,})\.pt", path.name)))


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:06d}.pt"


def models_in(folder: Path) -> list[Path]:
    """What --model takes in a folder: folders of runs and in the Hugging Face format, then files, the newest
    checkpoint first."""
    with suppress(OSError):
        paths = sorted(folder.iterdir())
        return ([p for p in paths if os.path.isdir(p) and (checkpoints(p) or is_huggingface(p))]
                + [p for p in reversed(paths) if p.suffix in (".pt", ".pth") and os.path.isfile(p)])
    return []


def is_huggingface(folder: Path) -> bool:
    """Whether a folder is read in the Hugging Face format."""
    return os.path.exists(folder / "config.json")


def what_is_in(folder: Path, most: int = 6) -> str:
    """For a message: 'log has log/a and log/b: give one of these'; '' if there is no model in it."""
    found = [str(p) for p in models_in(folder)]
    if len(found) < 2:
        return f"{folder} has {found[0]}: give that" if found else ""
    *first, last = found[:most] + [f"{len(found) - most} more"] * (len(found) > most)
    return f"{folder} has {', '.join(first)} and {last}: give one of these"


def what_is_there(path: str | Path) -> str:
    """Of a path that is not there, what is in the nearest folder above it; '' if that is the working
    directory."""
    folder = next((p for p in Path(path).parents if os.path.isdir(p)), Path())
    if folder in (Path(), Path(folder.anchor)):
        return ""
    return what_is_in(folder) or f"{folder} is there, and has no model"


@contextmanager
def writable(path: str | Path, begun: bool = False):
    """Around writes to a file or folder: raises an OSError, of which replace_file may have made a RunError,
    as one line with cause and remedy. That is a UserError, because another folder should have been given; but
    a RunError if the disk is full, or if the work has `begun`: there are earlier files to resume from."""
    try:
        yield
    except (OSError, RuntimeError, RunError) as error:          # torch.save makes it a RuntimeError
        cause = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
        if not cause:
            raise
        if not begun and cause.errno not in NO_ROOM:
            raise UserError(f"{path} cannot be written ({brief_error(cause)}): choose another "
                            f"folder") from None
        if isinstance(error, RunError):
            raise
        remedy = ("make room, or " if cause.errno in NO_ROOM else
                  "make its folder writable, or " if cause.errno in NOT_ALLOWED else "")
        raise RunError(f"cannot write {path} ({brief_error(cause)}): {remedy}choose another folder; earlier "
                       "files are intact, and the same command resumes from them") from None


@contextmanager
def readable(what: str | Path, remedy: str, errors: type | tuple = Exception,
             problem: str = "cannot be read"):
    """Around the reading of a file that may be damaged or hostile: raises any of `errors` as the UserError
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


def holder(path: Path) -> int | None:
    """Id of another process of this machine that has this file open, where /proc tells."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):                   # it has ended, or belongs to another user
            if link.parts[2] != str(os.getpid()) and os.path.samefile(link, path):
                return int(link.parts[2])


@contextmanager
def output_lock(config, process):
    """Locks --out until this process ends, however it ends: two runs would overwrite each other's files.
    Creates the folder, and removes it again if nothing was written. Only rank 0 locks, and not for
    --dry_run."""
    if config.dry_run or not process.is_master:
        yield
        return
    out = Path(config.out).absolute()
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    path = out / LOCK_NAME
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        path.touch()
    from filelock import FileLock                 # torch requires it
    lock = FileLock(path)                         # the system's own: it ends with a process that is killed
    try:
        if not _acquire(lock, 0):
            process.print0(f"another run is writing to {out}: waiting to see whether it ends ...")
            pid = holder(path)
            if not _acquire(lock, LOCK_PATIENCE[pid is None]):
                where = f"process {pid} of this machine" if pid else "another run"
                raise UserError(f"--out {out}: {where} is writing there; wait for its end, or choose another "
                                f"folder")
        yield
    finally:
        if _acquire(lock, 0):                     # else another run has it, and the file is its
            with suppress(OSError):               # on Windows an open file
                path.unlink()
        lock.release(force=True)
        for folder in made:
            with suppress(OSError):               # not empty
                folder.rmdir()


def _acquire(lock, seconds):
    """Whether no other run has the lock, after at most so many seconds."""
    from filelock import Timeout
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    except OSError:                               # some network file systems have no locks
        pass
    return True
