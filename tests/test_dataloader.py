"""Shards -> micro-batches: each token once an epoch, the same for any ranks, batch and resume."""
import itertools
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime.dataloader
from runtime.cli import UserError
from runtime.dataloader import (
    TokenDataset, digest, micro_batches, read_ahead, stable_permutation, to_device)
from runtime.device import largest_divisor
from runtime.recipe import BatchSchedule
from runtime.shards import list_shards, open_shard, read_shard, write_shard

# The same examples in every run, and no look at the clock.
FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))


@st.composite
def loaders(draw):
    """Arguments of TokenDataset: numbered tokens in shards of any lengths, T, a seed, shuffle."""
    T = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    lengths.append(draw(st.integers(T + 1, 60)))                # one of them is long enough
    edges = np.cumsum([0, *lengths])
    shards = []
    for start, end in itertools.pairwise(edges):
        shards.append(np.arange(start, end, dtype=np.uint16))
    seed = draw(st.integers(0, 2**40))
    shuffle = draw(st.booleans())
    return shards, T, seed, shuffle


def schedule_of(tokens, growth=1, steps=10**9):
    """The schedule of a run whose first batch is `growth` times as small."""
    doublings = {1: (1, 1, 1), 2: (2, 1, 1), 4: (4, 2, 1)}
    return BatchSchedule(tokens, steps, doublings[growth])


# ------------------------------------------------------------------------- an epoch

def cut(tokens, T):
    """The sequences of T tokens, and the last target, of some tokens."""
    sequences = []
    for start in range(0, len(tokens) - T, T):
        sequences.append(tokens[start:start + T + 1].tolist())
    return sequences


@FAST
@given(loaders())
def test_without_shuffling_the_sequences_come_in_the_order_of_the_tokens(loader):
    shards, T, seed, _ = loader
    dataset = TokenDataset(shards, T, seed, False)
    expected = []
    for shard in shards:
        expected += cut(shard, T)
    assert dataset.read(0, dataset.total).tolist() == expected
    assert dataset.read(dataset.total, dataset.total).tolist() == expected


@FAST
@given(loaders(), st.integers(0, 3))
def test_shuffled_sequences_come_exactly_once_an_epoch_shard_by_shard(loader, epoch):
    shards, T, seed, _ = loader
    dataset = TokenDataset(shards, T, seed, True)
    rows = dataset.read(epoch * dataset.total, dataset.total)
    assert rows.dtype == np.uint16

    for shard in shards:
        found = sorted(row.tolist() for row in rows if row[0] in shard)

        # A later epoch cuts the shard at any of the first T tokens.
        possible = [sorted(cut(shard, T))]
        if epoch > 0:
            for offset in range(1, T):
                possible.append(sorted(cut(np.roll(shard, -offset), T)))
        assert found in possible


@FAST
@given(loaders(), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)), max_size=8))
def test_wherever_the_reading_begins_it_reads_the_same(loader, places):
    whole = TokenDataset(*loader).read(0, 250)
    dataset = TokenDataset(*loader)
    for first, count in places:
        assert dataset.read(first, count).tolist() == whole[first:first + count].tolist()


def test_the_order_of_a_run_is_the_same_in_every_release():
    # A change would let resumed runs see other tokens than they were begun with.
    assert stable_permutation(10, 1337).tolist() == [0, 8, 3, 1, 2, 5, 9, 7, 6, 4]
    assert stable_permutation(6, 7, 1, 2).tolist() == [3, 4, 1, 5, 2, 0]

    shards = []
    for start, end in ((0, 13), (100, 109), (200, 217)):
        shards.append(np.arange(start, end, dtype=np.uint16))
    first_tokens = TokenDataset(shards, 4, 42, True).read(0, 18)[:, 0].tolist()
    assert first_tokens == [
        0, 4, 8, 104, 100, 212, 208, 204, 200, 205, 213, 209, 201, 11, 3, 7, 105, 101]


# ------------------------------------------------------------------------- steps

@FAST
@given(loaders(), st.integers(0, 40), st.sampled_from([
    (1, 12), (2, 6), (3, 4), (12, 1), (6, 1), (2, 2), (1, 1)]))
def test_a_steps_global_batch_is_the_same_for_any_processes_and_micro_batch(loader, step, split):
    B, ranks = split
    T = loader[1]
    expected = TokenDataset(*loader).read(step * 12, 12)

    schedule = schedule_of(12 * T)
    of_ranks = []
    for rank in range(ranks):
        dataset = TokenDataset(*loader)
        of_ranks.append(micro_batches(dataset, schedule, B, step, rank, ranks))

    rows = []
    for _ in range(12 // (B * ranks)):
        for batches in of_ranks:
            rows.append(next(batches))
    assert np.concatenate(rows).tolist() == expected.tolist()


@pytest.mark.parametrize("share, most, B", [
    (48, 48, 48), (48, 20, 16), (24, 99, 24), (16, 1, 1), (6, 4, 3)])
def test_a_share_of_a_step_is_divided_into_the_largest_micro_batches(share, most, B):
    assert largest_divisor(share, most) == B


@pytest.mark.parametrize("growth, steps, sizes", [
    (1, 5, [16] * 5), (2, 8, [8] * 4 + [16] * 4), (4, 7, [4] * 4 + [8] * 2 + [16]),
    (4, 14, [4] * 8 + [8] * 4 + [16] * 2), (4, 10, [4] * 6 + [8] * 3 + [16]), (4, 1, [4]),
    (2, 3, [8, 8, 16])])
def test_the_batch_doubles_after_each_third_of_the_tokens_until_it_is_whole(growth, steps, sizes):
    schedule = schedule_of(16, growth, steps)
    tokens = 0
    for step, size in enumerate(sizes):
        assert schedule.tokens_before(step) == tokens
        assert schedule.tokens(step) == size
        tokens += size

    # And behind the last step.
    assert schedule.tokens_before(steps) == tokens
    assert schedule.tokens(steps + 99) == 16
    assert schedule.progress(0) == 0
    assert schedule.progress(steps) == 1


@pytest.fixture
def numbered():
    """A dataset of sequences of 5 tokens."""
    return TokenDataset([np.arange(2000, dtype=np.uint16)], 5, 1, True)


def rows_of(batches, count):
    """The first rows of some micro-batches."""
    rows = itertools.chain.from_iterable(batch.tolist() for batch in batches)
    return list(itertools.islice(rows, count))


def test_a_run_goes_on_where_it_was_in_the_data_when_its_schedule_changes(numbered):
    begun = schedule_of(80, 4, 7)
    longer = schedule_of(80, 4, 21)
    longer.resume(5, begun.tokens_before(5))

    assert longer.tokens_before(5) == begun.tokens_before(5) == 24 * 5
    assert longer.tokens(5) == 4 * 5
    found = rows_of(micro_batches(numbered, longer, 2, 5), 30)
    assert found == numbered.read(24, 30).tolist()


@pytest.mark.parametrize("growth, steps", [(1, 3), (4, 10**9), (4, 3)])
def test_all_sequences_come_in_order_however_the_batch_grows(growth, steps, numbered):
    batches = micro_batches(numbered, schedule_of(5 * 48, growth, steps), 4)
    assert rows_of(batches, 144) == numbered.read(0, 144).tolist()


# ------------------------------------------------------------------------- files

@pytest.mark.parametrize("ending", ["npy", "bin"])
def test_files_are_read_as_arrays_are_and_once_an_epoch(ending, tmp_path, monkeypatch):
    shards = []
    for length in (100, 37, 5, 64):
        shard = stable_permutation(length, length).astype(np.uint16)
        write_shard(tmp_path / f"x_train_{len(shards):06d}.{ending}", shard)
        shards.append(shard)
    paths = list_shards(tmp_path, "train")
    files = TokenDataset(paths, 7, 3, True)
    arrays = TokenDataset(shards, 7, 3, True)

    opened = []

    def noted(path):
        opened.append(path)
        return read_shard(path)

    monkeypatch.setattr(runtime.dataloader, "read_shard", noted)
    for i in range(files.total):
        assert files.read(i, 1).tolist() == arrays.read(i, 1).tolist()
    assert sorted(opened) == [paths[0], paths[1], paths[3]], "the third is too short"


def test_build_nanogpts_folder_is_read_without_being_told(tmp_path):
    for name in ("edufineweb_train_000002", "edufineweb_train_000001", "edufineweb_val_000000"):
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16))
    names = [path.name for path in list_shards(tmp_path, "train")]
    assert names == ["edufineweb_train_000001.npy", "edufineweb_train_000002.npy"]


def test_modded_nanogpts_folder_is_read_without_being_told(tmp_path):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = [20240520, 1, 50]
    tokens = np.arange(50, dtype=np.uint16)
    (tmp_path / "fineweb_train_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())
    [path] = list_shards(tmp_path, "train")
    assert open_shard(path).tolist() == tokens.tolist()


def test_one_shard_is_resident_as_uint16_and_no_wider(tmp_path):
    n = 1_000_000
    for i in range(3):
        write_shard(tmp_path / f"x_train_{i:06d}.npy", np.zeros(n, dtype=np.uint16))
    dataset = TokenDataset(list_shards(tmp_path, "train"), 1024, 0, True, vocab_size=50257)

    tracemalloc.start()
    try:
        for i in range(6):
            dataset.read(i * 500, 8)
            held, peak = tracemalloc.get_traced_memory()
            assert held < 2 * n * 1.3               # one shard, two bytes a token
            assert peak < 2 * n * 2.4               # the next comes while the last is let go
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------- what is refused

def test_too_little_text_is_refused():
    with pytest.raises(UserError, match="--sequence_length"):
        TokenDataset([np.arange(8, dtype=np.uint16)] * 3, 8)
    assert TokenDataset([np.arange(9, dtype=np.uint16)], 8).total == 1


@pytest.mark.parametrize("vocab_size, last", [(50257, 50256), (50304, 50256), (256, 255)])
def test_a_token_that_the_model_does_not_have_is_refused(vocab_size, last):
    # The padding of the vocabulary is no token.
    tokens = np.array([1, 2, last], dtype=np.uint16)
    TokenDataset([tokens], 2, vocab_size=vocab_size)
    with pytest.raises(UserError, match=str(last + 1)):
        TokenDataset([tokens + 1], 2, vocab_size=vocab_size)


def test_a_token_behind_what_is_looked_at_first_is_found_when_the_shard_is_read(tmp_path):
    tokens = np.zeros(1_100_000, dtype=np.uint16)
    tokens[1_090_000] = 50300
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    dataset = TokenDataset(list_shards(tmp_path, "train"), 1024, vocab_size=50257)
    with pytest.raises(UserError, match="x_train_000001.npy.*50300"):
        dataset.read(0, 1)


@pytest.mark.parametrize("ending", ["npy", "bin"])
@pytest.mark.parametrize("changed", [range(1, 101), range(50), range(101)], ids=str)
def test_a_shard_that_changes_under_the_run_is_noticed_when_it_is_read(changed, ending, tmp_path):
    path = tmp_path / f"x_train_000001.{ending}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    dataset = TokenDataset([path], 5)
    write_shard(path, np.array(changed, dtype=np.uint16))
    with pytest.raises(UserError, match=path.name):
        dataset.read(0, 1)


@pytest.mark.parametrize("ending", ["npy", "bin"])
def test_a_shard_that_is_cut_off_under_the_run_is_noticed_when_it_is_read(ending, tmp_path):
    path = tmp_path / f"x_train_000001.{ending}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    dataset = TokenDataset([path], 5)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=path.name):
        dataset.read(0, 1)


@pytest.mark.parametrize("n", [1, 100, 70_000, 1 << 20])
def test_a_digest_tells_shards_apart_by_their_ends_and_by_the_length_of_short_ones(n):
    tokens = np.arange(n + 1, dtype=np.uint16)
    digests = [digest(tokens), digest(tokens[:-1])]
    places = {0, min(n, 65_535), max(0, n - 65_535), n}         # 65,536 tokens of each end count
    for place in places:
        changed = tokens.copy()
        changed[place] ^= 1
        digests.append(digest(changed))
    assert len(set(digests)) == 2 + len(places)


# ------------------------------------------------------------------------- reading ahead

def batches_of(shards, step=0):
    """Three micro-batches a step, of 2 sequences of 5 tokens."""
    dataset = TokenDataset(shards, 5, 1, True, vocab_size=50257)
    return micro_batches(dataset, schedule_of(5 * 2 * 3), 2, step)


SHARD = np.arange(200, dtype=np.uint16)


def readers():
    """The threads that read ahead; there may be others, which are not ours."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]


@pytest.mark.parametrize("step", [0, 17])
def test_batches_read_ahead_are_the_same_and_their_targets_are_one_token_on(step):
    shards = [SHARD[:90], SHARD[90:123] + 40_000, SHARD[123:194]]
    ahead = read_ahead(batches_of(shards, step), pin=False)
    plain = batches_of(shards, step)
    for _ in range(30):
        x, y = to_device(next(ahead), "cpu")
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (2, 5)
        assert x.is_contiguous() and y.is_contiguous()
        expected = next(plain)
        assert x.tolist() == expected[:, :-1].tolist()
        assert y.tolist() == expected[:, 1:].tolist()
    ahead.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_reach_a_gpu():
    ahead = read_ahead(batches_of([SHARD]), pin=True)
    x, y = to_device(next(ahead), "cuda")
    assert x.device.type == y.device.type == "cuda"
    assert x.tolist() == next(batches_of([SHARD]))[:, :-1].tolist()
    ahead.close()


def test_reading_runs_eight_micro_batches_ahead_and_no_further():
    # To load the next shard takes about a second, and the end waits for what has been begun.
    made = []
    all_are_there = threading.Event()

    def noted():
        for rows in batches_of([SHARD]):
            made.append(rows)
            if len(made) > 8:
                all_are_there.set()
            yield rows

    ahead = read_ahead(noted(), pin=False)
    next(ahead)
    assert all_are_there.wait(60)
    ahead.close()
    assert len(made) == 9


def test_the_thread_that_reads_ahead_ends_with_the_reading():
    ahead = read_ahead(batches_of([SHARD]), pin=False)
    next(ahead)
    assert len(readers()) == 1
    ahead.close()
    assert readers() == []


def test_for_a_gpu_batches_are_pinned_so_that_their_copy_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows + 1)
    ahead = read_ahead(batches_of([SHARD]), pin=True)
    assert next(ahead).tolist() == (next(batches_of([SHARD])) + 1).tolist()
    ahead.close()


def test_what_goes_wrong_on_the_reading_thread_is_raised_where_the_batch_is_asked_for():
    shards = [np.arange(60, dtype=np.uint16), np.full(60, 50, dtype=np.uint16)]
    dataset = TokenDataset(shards, 5, vocab_size=50257)
    shards[1][:] = 60
    ahead = read_ahead(micro_batches(dataset, schedule_of(10), 2), pin=False)
    for _ in range(5):
        next(ahead)
    with pytest.raises(UserError, match="changed"):
        for _ in range(3):
            next(ahead)
    assert readers() == []
