"""The lock of a folder, so that two runs do not write into it at once."""
import errno
import time
from pathlib import Path
from typing import BinaryIO

from runtime.cli import UserError, print_error

RUN_LOCK = ".train_gpt2.lock"       # in --out
# Seconds: a killed process keeps its lock until its memory is freed, and a server that of a machine
# that was lost for up to a minute.
LOCK_PATIENCE = 90.0
TOLD_AFTER = 2.0
# What the system says where a file system has no locks.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)


def lock_folder(out: str | Path, name: str = RUN_LOCK) -> BinaryIO:
    """Makes the folder, and locks it until the returned file is closed or the process ends.

    UserError if another process keeps the lock for LOCK_PATIENCE seconds. Windows and some network
    file systems have no locks: there the folder is not locked.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    file = open(Path(out) / name, "ab")
    began = time.monotonic()
    told = False
    while not try_lock(file):
        waited = time.monotonic() - began
        if waited > LOCK_PATIENCE:
            raise UserError(f"--out {out} is in use by another run: wait for its end, or choose "
                            "another --out")
        if waited > TOLD_AFTER and not told:
            print_error(f"waiting up to {LOCK_PATIENCE:.0f} s, because another run has the lock of "
                        f"{out}")
            told = True
        time.sleep(0.1)
    return file


def try_lock(file: BinaryIO) -> bool:
    """Whether this process has the lock now. True, too, where the file system has no locks."""
    try:
        import fcntl
    except ImportError:                             # Windows
        return True

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            error.filename = file.name
            raise
    return True
