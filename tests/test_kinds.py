"""runtime/kinds.py: what a file is by its first bytes, where reading it has failed."""
import gzip

import pytest

from runtime.cli import UserError
from runtime.kinds import first_bytes_tell, kind_by_first_bytes


@pytest.mark.parametrize("name, data, word", [
    ("a.txt", gzip.compress(b"words", mtime=0), "gunzip"),
    ("a.txt", b"\x28\xb5\x2f\xfd and more", "zst"),
    ("a.txt", b"BZh91AY", "bz2"),
    ("a.csv", b"PAR1 and more", "parquet"),
    ("a.jsonl", b"ARROW1\0\0", "arrow"),
    ("a.txt", b"PK\x03\x04 and more", "zip"),
    ("a.txt", "words".encode("utf-16"), "UTF-16"),
    ("a.pt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("part-000-00000.npy", b"\x01\x00\x02\x00", "OLMo")])
def test_the_first_bytes_say_what_a_file_is_and_what_to_do(name, data, word, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert word in kind_by_first_bytes(tmp_path / name)


@pytest.mark.parametrize("name, data", [
    ("a.txt.gz", gzip.compress(b"words", mtime=0)), ("a.parquet", b"PAR1 and more"),
    ("A.PARQUET", b"PAR1 and more"),
    ("a.pt", b"PK\x03\x04 and more"), ("a.pth", b"PK\x03\x04 and more"),
    ("a.bin", b"PK\x03\x04 and more"), ("a.npz", b"PK\x03\x04 and more"),
    ("a.npy", b"\x93NUMPY and more"), ("a.txt", b"words"), ("a.txt", b"")])
def test_nothing_is_said_of_a_file_that_is_what_its_name_says(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert kind_by_first_bytes(tmp_path / name) == ""


def test_a_failed_reading_is_told_by_the_first_bytes(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="a.pt.*git lfs pull"), first_bytes_tell(path):
        raise RuntimeError("no such archive")


def test_a_failed_reading_of_a_file_of_its_kind_keeps_its_error(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(RuntimeError, match="no such archive"), first_bytes_tell(path):
        raise RuntimeError("no such archive")


def test_the_error_of_the_system_about_a_path_is_kept(tmp_path):
    with pytest.raises(FileNotFoundError), first_bytes_tell(tmp_path / "a.pt"):
        open(tmp_path / "a.pt")
