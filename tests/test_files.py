"""runtime/files.py: atomic writes, damaged files and the checkpoints of a folder."""
import errno
import os
import sys

import pytest

from runtime.cli import RunError, UserError
from runtime.files import (
    checkpoints,
    is_there,
    read_text,
    reading,
    remove_leftovers,
    replace_file,
    sync,
    what_resumes,
)


def write_half_and_fail(file):
    file.write(b"half")
    raise RuntimeError("it failed")


# ----------------------------------------------------------------------- atomic writes

def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old and long")

    replace_file(path, lambda file: file.write(b"new"))

    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    with pytest.raises(RuntimeError, match="it failed"):
        replace_file(path, write_half_and_fail)

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(tmp_path, monkeypatch):
    events = []
    replace = os.replace

    def noted_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            events.append("folder is on the disk")
        else:
            events.append(f"{os.fstat(descriptor).st_size} bytes are on the disk")

    def noted_replace(old, new):
        # A file cannot be renamed into another file system.
        assert os.path.dirname(old) == os.path.dirname(new)
        # Two processes that write the same file must not share a temporary one.
        assert str(os.getpid()) in os.path.basename(old)
        events.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    replace_file(tmp_path / "a.bin", lambda file: file.write(bytes(100)))

    assert events == ["100 bytes are on the disk", "renamed", "folder is on the disk"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_fsync_will_do(number, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "a.bin", lambda file: file.write(b"new"))
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_an_fsync_that_fails_is_an_error(monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        sync(0)


def test_what_killed_writes_left_is_removed_and_nothing_else(tmp_path):
    leftovers = ["a_000001.pt.123.tmp", "a_000002.pt.tmp"]
    others = ["a_000001.pt", "b_000001.pt.123.tmp", "a_000001.pt.x.tmp", "my_a_000001.pt.1.tmp"]
    for name in leftovers + others:
        (tmp_path / name).touch()
    (tmp_path / "a_000003.pt.tmp").mkdir()

    remove_leftovers(tmp_path, r"a_\d+\.pt")

    assert sorted(os.listdir(tmp_path)) == sorted([*others, "a_000003.pt.tmp"])


# ----------------------------------------------------------------------- reading

def test_a_text_is_utf8_with_or_without_a_mark_at_its_start(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffcafé".encode() + b"\xff")

    assert read_text(path) == "café\ufffd"
    with pytest.raises(UnicodeDecodeError):
        read_text(path, errors="strict")


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("step"), OSError("bad"), EOFError()])
def test_what_a_damaged_file_raises_is_one_sentence_with_a_remedy(error):
    with pytest.raises(UserError, match=r"^a\.pt cannot be read \(.*\): make it again$"):
        with reading("a.pt", "make it again"):
            raise error


@pytest.mark.parametrize("error", [
    PermissionError(13, "Permission denied", "a.pt"),
    ModuleNotFoundError("No module named 'zstandard'", name="zstandard"),
    UserError("what is wrong: what to do"),
    RunError("failed"),
    KeyboardInterrupt(),
], ids=lambda error: type(error).__name__)
def test_what_says_enough_by_itself_passes_through(error):
    with pytest.raises(type(error)) as raised:
        with reading("a.pt", "make it again"):
            raise error

    assert raised.value is error


@pytest.mark.parametrize("number", [
    errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT])
def test_what_cannot_be_read_is_the_systems_error_with_the_files_name(number):
    with pytest.raises(OSError) as raised:
        with reading("a.pt", "make it again"):
            raise OSError(number, os.strerror(number))          # as of read(), which has no name

    assert raised.value.errno == number
    assert raised.value.filename == "a.pt"


def test_a_place_before_the_beginning_of_a_file_is_damage(tmp_path):
    """A damaged file's own numbers may send its reader there (EINVAL)."""
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="make it again"):
        with reading("a.pt", "make it again"), open(tmp_path / "a", "rb") as file:
            file.seek(-1)


def disk_is_away(path):
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))


def test_what_the_system_cannot_tell_is_not_absent(tmp_path, monkeypatch):
    assert is_there(tmp_path)
    assert not is_there(tmp_path / "a")
    (tmp_path / "a").touch()
    assert is_there(tmp_path / "a")
    assert not is_there(tmp_path / "a/b")           # a file has no files in it

    monkeypatch.setattr(os, "stat", disk_is_away)
    with pytest.raises(OSError, match="not connected"):
        is_there(tmp_path / "a")


# ----------------------------------------------------------------------- checkpoints

def test_checkpoints_are_ordered_by_their_steps_beyond_a_million_too(tmp_path):
    names = ["checkpoint_1000000.pt", "checkpoint_999999.pt", "checkpoint_000250.pt"]
    for name in names:
        (tmp_path / name).touch()

    found = [(step, path.name) for step, path in checkpoints(tmp_path)]

    assert found == [(250, names[2]), (999_999, names[1]), (1_000_000, names[0])]


@pytest.mark.parametrize("name", [
    "checkpoint_0000001.pt",
    "checkpoint_12345.pt",
    "checkpoint_000001.pt.tmp",
    "checkpoint_000001.pt.12.tmp",
    "checkpoint_best.pt",
    "._checkpoint_000001.pt",
    "a_checkpoint_000001.pt",
    "checkpoint_-00001.pt",
])
def test_what_a_run_does_not_call_so_is_no_checkpoint(name, tmp_path):
    (tmp_path / name).touch()
    assert checkpoints(tmp_path) == []


def test_a_folder_that_is_not_there_has_no_checkpoints_and_one_that_is_a_file_is_an_error(tmp_path):
    assert checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        checkpoints(tmp_path / "file")


def test_a_folder_on_a_disk_that_is_away_has_neither_checkpoints_nor_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", disk_is_away)

    with pytest.raises(OSError, match="not connected"):
        checkpoints(tmp_path)
    text = what_resumes(tmp_path)
    assert "from the beginning" not in text
    assert str(tmp_path) in text
    assert "not connected" in text


def test_a_failed_run_says_with_what_the_same_command_goes_on(tmp_path):
    assert "from the beginning" in what_resumes(tmp_path)
    for step in (7, 12):
        (tmp_path / f"checkpoint_{step:06d}.pt").touch()

    assert "checkpoint_000012.pt" in what_resumes(tmp_path)
