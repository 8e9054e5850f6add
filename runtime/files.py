"""Atomic writes, digests, and the lock on an output folder."""
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.cli import RunError, UserError

try:
    import fcntl
except ImportError:             # Windows
    fcntl = None

LOCK_TIMEOUT = 20                   # seconds: a run that was just ended may still be saving


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file whole or not at all: `write(file)` fills a temporary one, fsync, os.replace."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:      # torch.save hides the first inside the second
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise RunError(f"cannot write {path}: {cause.strerror or cause}. Make room or give another folder; what was written "
                       f"before is whole, and the same command goes on from it") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name != "nt":                           # make the rename itself durable
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def fingerprint_blocks(values: np.ndarray) -> np.ndarray:
    """A 1-D array of up to 8 million values as it is; of a longer one (FineWeb's shards have 100 million) 8 evenly spaced
    blocks of 131,072 values, the first and the last among them."""
    if len(values) <= 1 << 23:
        return np.asarray(values)
    return np.concatenate([values[at:at + 131072] for at in np.linspace(0, len(values) - 131072, 8, dtype=np.int64)])


def digest(values: np.ndarray) -> str:
    """16 hexadecimal digits of the SHA-256 of fingerprint_blocks(values): another file, or an earlier one, has others."""
    return hashlib.sha256(np.ascontiguousarray(fingerprint_blocks(values))).hexdigest()[:16]


@contextmanager
def output_lock(out, process):
    """Locks the output folder for as long as this process lives, however it ends: two runs would write over each other.
    A folder that is made for it goes again if nothing was written."""
    if not process.is_master:
        yield
        return
    out = Path(out).absolute()
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        folder = os.open(out, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}): choose another folder") from None
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while fcntl:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"--out {out}: another run is writing there; wait for its end, or choose another "
                                    f"folder") from None
                time.sleep(0.5)
            except OSError:                     # some network file systems know no locks
                break
        yield
    finally:
        if fcntl:
            os.close(folder)
        for folder in made:
            with suppress(OSError):             # not empty
                folder.rmdir()
