"""Shards on disk: what is written, what is no data, and a shard that changes under a run. Damaged and hostile
ones are in test_hostile.py."""
import numpy as np
import pytest
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from test_text import FAST

from runtime.cli import UserError
from runtime.dataloader import TokenDataset, digest
from runtime.shards import list_shards, open_shard, read_shard, write_parts, write_shard


def test_a_shard_is_written_as_its_tokens_come_in_either_format(tmp_path):
    parts = [np.arange(n, dtype=np.uint16)[::step] for n, step in ((5, 1), (1, 1), (0, 1), (900, 3))]
    for name in ("a_val_000000.npy", "a_val_000000.bin"):
        write_parts(tmp_path / name, 5 + 1 + 300, iter(parts))
        assert read_shard(tmp_path / name).tolist() == np.concatenate(parts).tolist()
    assert np.load(tmp_path / "a_val_000000.npy").dtype == np.uint16
    data = (tmp_path / "a_val_000000.bin").read_bytes()           # llm.c's
    assert np.frombuffer(data[:1024], "<i4").tolist() == [20240520, 1, 306] + [0] * 253
    assert np.frombuffer(data[1024:], "<u2").tolist() == np.concatenate(parts).tolist()


@pytest.mark.filterwarnings("ignore")         # numpy evaluates what is left of the header
@FAST
@given(st.sampled_from(["npy", "bin"]), st.integers(0, 127), st.binary(min_size=1, max_size=6))
def test_any_damage_to_a_header_is_a_users_mistake_or_none(tmp_path, kind, at, junk):
    path = tmp_path / f"x_train_000000.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    data = path.read_bytes()
    path.write_bytes(data[:at] + junk + data[at + len(junk):])
    try:
        assert open_shard(path).dtype == np.uint16
    except UserError:
        pass


def test_the_shards_of_a_split_are_listed_in_order_and_a_folder_without_any_is_refused(tmp_path):
    names = ["b_train_000002.npy", "a_train_000003.bin", "train_000001.npy", "b_val_000000.npy"]
    for name in (*names, "train.npy", "b_train_000001.npy.tmp", "b_train_x.npy", "btrain_000001.npy"):
        (tmp_path / name).touch()
    found = [path.name for path in list_shards(tmp_path, "train")]
    assert found == sorted(names[:3]) and [path.name for path in list_shards(tmp_path, "val")] == names[3:]
    refused(lambda: list_shards(tmp_path / "missing", "train"), tmp_path / "missing")
    (tmp_path / names[3]).unlink()
    refused(lambda: list_shards(tmp_path, "val"), tmp_path, "python fineweb.py")


def test_too_little_text_is_refused(tmp_path):
    refused(lambda: TokenDataset([np.arange(8, dtype=np.uint16)] * 3, 8), "--sequence_length")
    assert TokenDataset([np.arange(9, dtype=np.uint16)], 8).total == 1


@pytest.mark.parametrize("vocab_size, last", [(50257, 50256), (50304, 50256), (256, 255)])
def test_ids_that_the_model_does_not_have_are_refused(vocab_size, last):
    """The vocabulary's padding is none of its ids."""
    tokens = np.array([1, 2, last], dtype=np.uint16)
    TokenDataset([tokens], 2, vocab_size=vocab_size)
    said = refused(lambda: TokenDataset([tokens + 1], 2, vocab_size=vocab_size), last + 1, last)
    assert ("--vocab_size" in said) == (vocab_size < 50257), "more rows do not make more of GPT-2's tokens"


def test_an_id_behind_what_is_looked_at_first_is_found_when_the_shard_is_read(tmp_path):
    tokens = np.zeros(1_100_000, dtype=np.uint16)
    tokens[1_090_000] = 50300
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    windows = TokenDataset(list_shards(tmp_path, "train"), 1024, vocab_size=50257)
    refused(lambda: windows.read(0, 1), "x_train_000001.npy", 50300)


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize("change", [(1, 101), (0, 50), (0, 101), None, "gone"], ids=str)
def test_a_shard_that_changes_under_the_run_is_noticed_when_it_is_read(change, kind, tmp_path):
    path = tmp_path / f"x_train_000001.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    windows = TokenDataset([path], 5)
    if change is None:
        path.write_bytes(path.read_bytes()[:-7])
    elif change == "gone":
        path.unlink()
    else:                                         # another token, shorter, longer
        write_shard(path, np.arange(*change, dtype=np.uint16))
    refused(lambda: windows.read(0, 1), path)


@pytest.mark.parametrize("n", [1, 100, 70_000, 1 << 20])
def test_a_digest_tells_shards_apart_by_their_ends_and_by_the_length_of_short_ones(n):
    """The first and the last 65,536 tokens."""
    tokens = np.arange(n + 1, dtype=np.uint16)
    seen = {digest(tokens), digest(tokens[:-1])}
    for at in {0, min(n, 65_535), max(0, n - 65_535), n}:
        changed = tokens.copy()
        changed[at] ^= 1
        seen.add(digest(changed))
    assert len(seen) == 2 + len({0, min(n, 65_535), max(0, n - 65_535), n})
