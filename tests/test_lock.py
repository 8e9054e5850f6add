"""runtime/lock.py: a folder has one run at a time, also where the system has no locks."""
import errno
import os
import sys

import pytest

from runtime import lock
from runtime.cli import UserError
from runtime.lock import lock_folder


@pytest.fixture
def flock(monkeypatch):
    """A list of errors. flock raises them, one at each call, before it works."""
    fcntl = pytest.importorskip("fcntl")
    real_flock = fcntl.flock
    errors = []

    def flock(file, how):
        if errors:
            raise errors.pop(0)
        real_flock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    return errors


def test_a_folder_has_one_run_at_a_time_and_the_next_one_says_that_it_waits(
        tmp_path, monkeypatch, capsys):
    pytest.importorskip("fcntl")
    monkeypatch.setattr(lock, "LOCK_PATIENCE", 0.3)
    monkeypatch.setattr(lock, "TOLD_AFTER", 0.0)
    out = tmp_path / "a" / "log"

    first = lock_folder(out)
    with pytest.raises(UserError, match=f"{out}.*another --out"):
        lock_folder(out)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(out) in told
    first.close()

    lock_folder(out).close()


def test_a_lock_that_a_lost_machine_still_holds_is_waited_for(flock, tmp_path, monkeypatch):
    """A server frees it after up to a minute."""
    waited = []
    monkeypatch.setattr(lock.time, "sleep", waited.append)
    monkeypatch.setattr(lock.time, "monotonic", lambda: sum(waited))
    flock.extend([BlockingIOError(errno.EWOULDBLOCK, "busy")] * 601)
    lock_folder(tmp_path).close()

    assert sum(waited) > 60


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK])
def test_a_file_system_without_locks_will_do(number, flock, tmp_path):
    flock.append(OSError(number, os.strerror(number)))
    lock_folder(tmp_path / "log").close()

    assert (tmp_path / "log").is_dir()
    assert not flock


def test_a_system_without_locks_will_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)         # as on Windows
    lock_folder(tmp_path / "log").close()
    assert (tmp_path / "log").is_dir()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_lock_that_fails_for_the_disk_is_the_systems_error(number, flock, tmp_path):
    flock.append(OSError(number, os.strerror(number)))
    with pytest.raises(OSError) as raised:
        lock_folder(tmp_path)
    assert raised.value.filename == str(tmp_path / lock.RUN_LOCK)
