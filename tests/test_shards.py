"""Shards on disk: what is no shard is refused by name, and nothing in it is ever run."""
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataloader import FAST

from runtime.cli import UserError
from runtime.dataloader import TokenDataset
from runtime.files import digest, fingerprint_blocks
from runtime.shards import list_shards, open_shard, read_shard, write_shard


def test_a_shard_is_written_as_its_tokens_come_in_either_format(tmp_path):
    parts = [np.arange(n, dtype=np.uint16)[::step] for n, step in ((5, 1), (1, 1), (0, 1), (900, 3))]
    for name in ("a_val_000000.npy", "a_val_000000.bin"):
        count = write_shard(tmp_path / name, *parts[:2], further=iter(parts[2:]))
        assert count == 5 + 1 + 300 and read_shard(tmp_path / name).tolist() == np.concatenate(parts).tolist()
    assert np.load(tmp_path / "a_val_000000.npy").dtype == np.uint16
    data = (tmp_path / "a_val_000000.bin").read_bytes()           # llm.c's
    assert np.frombuffer(data[:1024], "<i4").tolist() == [20240520, 1, 306] + [0] * 253
    assert np.frombuffer(data[1024:], "<u2").tolist() == np.concatenate(parts).tolist()


def save_pickle(path):
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pickle_was_run",)


def save_npz(path):
    np.savez(path.with_suffix(".npz"), np.arange(100, dtype=np.uint16))
    path.with_suffix(".npz").rename(path)


def change(path, function):
    path.write_bytes(function(path.read_bytes()))


DAMAGES = {
    "cut.npy": lambda path: change(path, lambda data: data[:-10]),
    "cut in the header.npy": lambda path: change(path, lambda data: data[:40]),
    "other magic.npy": lambda path: change(path, lambda data: b"\x00" + data[1:]),
    "header of nonsense.npy": lambda path: change(path,
                                                  lambda data: data[:10] + b"{'descr': ((((" + data[24:]),
    "int32.npy": lambda path: np.save(path, np.arange(100, dtype=np.int32)),
    "two-dimensional.npy": lambda path: np.save(path, np.zeros((10, 10), dtype=np.uint16)),
    "no tokens.npy": lambda path: np.save(path, np.zeros(0, dtype=np.uint16)),
    "pickle.npy": save_pickle,
    "bare pickle.npy": lambda path: path.write_bytes(pickle.dumps(Evil())),
    "npz.npy": save_npz,
    "zero bytes.npy": lambda path: change(path, lambda data: b""),
    "missing.npy": lambda path: path.unlink(),
    "cut.bin": lambda path: change(path, lambda data: data[:-10]),
    "too long.bin": lambda path: change(path, lambda data: data + b"\0"),
    "cut in the header.bin": lambda path: change(path, lambda data: data[:40]),
    "other magic.bin": lambda path: change(path, lambda data: b"\x00" + data[1:]),
    "other version.bin": lambda path: change(path, lambda data: data[:4] + b"\x09" + data[5:]),
    "negative count.bin": lambda path: change(path, lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:]),
    "no tokens.bin": lambda path: change(path, lambda data: data[:8] + bytes(4) + data[12:1024]),
    "zero bytes.bin": lambda path: change(path, lambda data: b""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_refused_by_name_and_never_unpickled(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"x_train_000000{Path(name).suffix}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    assert len(open_shard(path)) == 100
    DAMAGES[name](path)
    with pytest.raises(UserError, match="x_train_000000"):
        TokenDataset([path], 5)
    assert not Path("pickle_was_run").exists()


@pytest.mark.filterwarnings("ignore")         # numpy evaluates what is left of the header
@settings(FAST, max_examples=200)
@given(st.sampled_from(["npy", "bin"]), st.integers(0, 127), st.binary(min_size=1, max_size=6))
def test_any_damage_to_a_header_is_a_users_mistake_or_none(tmp_path, kind, at, junk):
    path = tmp_path / f"x_train_000000.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    change(path, lambda data: data[:at] + junk + data[at + len(junk):])
    try:
        assert open_shard(path).dtype == np.uint16
    except UserError:
        pass


def test_too_little_text_foreign_ids_and_missing_data_are_users_mistakes(tmp_path):
    with pytest.raises(UserError, match="--sequence_length"):
        TokenDataset([np.arange(8, dtype=np.uint16)] * 3, 8)
    assert TokenDataset([np.arange(9, dtype=np.uint16)], 8).total == 1
    with pytest.raises(UserError, match="holds token 50257"):
        TokenDataset([np.array([1, 2, 50257], dtype=np.uint16)], 2, vocab_size=50257)
    with pytest.raises(UserError, match="holds token 50257, and the model's tokens end at 50256"):
        TokenDataset([np.array([1, 2, 50257], dtype=np.uint16)], 2, vocab_size=50304)       # no padding's
    with pytest.raises(UserError, match="holds token 256, and the model's tokens end at 255"):
        TokenDataset([np.array([1, 2, 256], dtype=np.uint16)], 2, vocab_size=256)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="python fineweb.py"):
            list_shards(folder, "train")
    with pytest.raises(UserError, match="is a file"):
        list_shards(Path(__file__), "train")


def test_an_id_that_no_sample_of_a_large_shard_shows_is_found_when_the_shard_is_read(tmp_path):
    tokens = np.zeros(9_000_000, dtype=np.uint16)
    tokens[1_000_000] = 50300
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    windows = TokenDataset(list_shards(tmp_path, "train"), 1024, vocab_size=50257)
    with pytest.raises(UserError, match="x_train_000001.npy holds token 50300"):
        windows.read(0, 1)


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize("change", ["another token", "shorter", "longer", "cut off", "gone"])
def test_a_shard_that_changes_under_the_run_is_noticed_when_it_is_read(change, kind, tmp_path):
    path = tmp_path / f"x_train_000001.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    windows = TokenDataset([path], 5)
    if change == "cut off":
        path.write_bytes(path.read_bytes()[:-7])
    elif change == "gone":
        path.unlink()
    else:
        start, end = {"another token": (1, 101), "shorter": (0, 50), "longer": (0, 101)}[change]
        write_shard(path, np.arange(start, end, dtype=np.uint16))
    with pytest.raises(UserError, match="x_train_000001"):
        windows.read(0, 1)


@pytest.mark.parametrize("n", [100, 1 << 23, 100_000_000])
def test_a_fingerprint_tells_shards_apart_by_length_ends_and_blocks_between(n, tmp_path):
    tokens = np.zeros(n, dtype=np.uint16)
    seen = {digest(tokens)}
    for at in (0, n - 1, int(np.linspace(0, n - 131072, 8)[3]) if n > 1 << 23 else n // 2):
        tokens[at] += 1
        seen.add(digest(tokens))
    assert len(seen) == 4 and len(fingerprint_blocks(tokens)) <= 1 << 23
