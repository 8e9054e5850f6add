"""Shards -> micro-batches: each token once an epoch, the same for any ranks, micro-batch and resume."""
import itertools
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime.dataloader
from helpers import refused
from runtime.dataloader import TokenDataset, micro_batches, read_ahead, stable_permutation, to_device
from runtime.device import largest_divisor
from runtime.recipe import BatchSchedule
from runtime.shards import list_shards, open_shard, read_shard, write_shard

# the same examples in every run, and no look at the clock
FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))


@st.composite
def loaders(draw):
    """Numbered tokens in shards of any lengths, and how they are read."""
    T = draw(st.integers(1, 7))
    lengths = st.lists(st.integers(1, 60), min_size=1, max_size=5)
    lengths = draw(lengths.filter(lambda lengths: max(lengths) > T))
    edges = np.cumsum([0, *lengths])
    shards = [np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(edges)]
    return shards, T, draw(st.integers(0, 2**40)), draw(st.booleans())


def steps_of(tokens, growth=1, steps=10**9):
    """The schedule of a run; its first batch is `growth` times as small."""
    return BatchSchedule(tokens, steps, {1: (1, 1, 1), 2: (2, 1, 1), 4: (4, 2, 1)}[growth])


@FAST
@given(loaders(), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)), max_size=8))
def test_every_sequence_comes_exactly_once_an_epoch_wherever_the_reading_begins(loader, epoch, places):
    shards, T, _, shuffle = loader
    dataset, whole = TokenDataset(*loader), TokenDataset(*loader).read(0, 250)
    rows = dataset.read(epoch * dataset.total, dataset.total)
    assert rows.dtype == np.uint16
    got = sorted(rows.tolist()) if shuffle else rows.tolist()
    own = [[row for row in got if row[0] in shard] for shard in shards]
    assert got == list(itertools.chain(*own))
    for rows, shard in zip(own, shards, strict=True):   # a later epoch begins anywhere in the first T tokens
        cuts = [np.roll(shard, -shift) for shift in range(T if shuffle and epoch else 1)]
        assert rows in [sorted(cut[i:i + T + 1].tolist() for i in range(0, len(cut) - T, T)) for cut in cuts]
    for first, count in places:
        assert dataset.read(first, count).tolist() == whole[first:first + count].tolist()


@FAST
@given(loaders(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 40), st.data())
def test_a_steps_global_batch_is_the_same_for_any_processes_and_micro_batch(loader, B, ranks, micro_steps,
                                                                            step, data):
    N, T = B * ranks * micro_steps, loader[1]
    want = TokenDataset(*loader).read(step * N, N)
    divisors = [(b, w) for b in range(1, N + 1) for w in range(1, N + 1) if N % (b * w) == 0]
    for b, w in ((B, ranks), data.draw(st.sampled_from(divisors))):
        each = [micro_batches(TokenDataset(*loader), steps_of(N * T), b, step, rank, w) for rank in range(w)]
        rows = [next(batches) for _ in range(N // b // w) for batches in each]
        assert np.concatenate(rows).tolist() == want.tolist()


def test_a_share_of_a_step_is_divided_into_the_largest_micro_batches():
    found = [largest_divisor(share, most) for share, most in ((48, 48), (48, 20), (24, 99), (16, 1), (6, 4))]
    assert found == [48, 16, 24, 1, 3]


@pytest.mark.parametrize("growth, steps, sizes", [
    (1, 5, [16] * 5), (2, 8, [8] * 4 + [16] * 4), (4, 7, [4] * 4 + [8] * 2 + [16]),
    (4, 14, [4] * 8 + [8] * 4 + [16] * 2), (4, 10, [4] * 6 + [8] * 3 + [16]), (4, 1, [4]),
    (2, 3, [8, 8, 16])])
def test_the_batch_doubles_after_each_third_of_the_tokens_until_it_is_whole(growth, steps, sizes):
    schedule = steps_of(16, growth, steps)
    assert [schedule.tokens(step) for step in range(steps)] == sizes
    assert schedule.tokens(steps) == schedule.tokens(steps + 99) == 16
    before = [schedule.tokens_before(step) for step in range(steps + 1)]
    assert before == [sum(sizes[:step]) for step in range(steps + 1)]
    assert schedule.tokens_before(steps + 2) == sum(sizes) + 32
    assert [schedule.progress(step) for step in (0, steps)] == [0, 1]


def test_a_run_goes_on_where_it_was_in_the_data_when_its_schedule_changes():
    dataset = TokenDataset([np.arange(2000, dtype=np.uint16)], 5, 1, True)
    done, longer = steps_of(80, 4, 7), steps_of(80, 4, 21)
    longer.resume(5, done.tokens_before(5))
    assert longer.tokens_before(5) == done.tokens_before(5) == 5 * (4 * 4 + 8)
    assert longer.tokens(5) == 5 * 4 and longer.tokens_left(5) == longer.tokens_before(21) - 5 * 24
    want = dataset.read(24, 30).tolist()
    rows = itertools.chain.from_iterable(batch.tolist() for batch in micro_batches(dataset, longer, 2, 5))
    assert list(itertools.islice(rows, 30)) == want


def test_all_sequences_come_in_order_however_the_batch_grows():
    dataset = TokenDataset([np.arange(2000, dtype=np.uint16)], 5, 1, True)
    want = dataset.read(0, 3 * 48).tolist()
    for growth, steps in ((1, 3), (4, 10**9), (4, 3)):
        batches = micro_batches(dataset, steps_of(5 * 48, growth, steps), 4)
        rows = itertools.chain.from_iterable(batch.tolist() for batch in batches)
        assert list(itertools.islice(rows, len(want))) == want


def test_the_order_of_a_run_is_the_same_in_every_release():
    """Pinned: a change would let resumed runs see other tokens than they were begun with."""
    assert stable_permutation(10, 1337).tolist() == [0, 8, 3, 1, 2, 5, 9, 7, 6, 4]
    assert stable_permutation(6, 7, 1, 2).tolist() == [3, 4, 1, 5, 2, 0]
    shards = [np.arange(a, b, dtype=np.uint16) for a, b in ((0, 13), (100, 109), (200, 217))]
    first_tokens = TokenDataset(shards, 4, 42, True).read(0, 18)[:, 0].tolist()
    assert first_tokens == [0, 4, 8, 104, 100, 212, 208, 204, 200, 205, 213, 209, 201, 11, 3, 7, 105, 101]


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_files_and_arrays_read_the_same_and_a_file_once_an_epoch(kind, tmp_path, monkeypatch):
    shards, opened = [stable_permutation(n, n).astype(np.uint16) for n in (100, 37, 5, 64)], []
    for i, shard in enumerate(shards):
        write_shard(tmp_path / f"x_train_{i:06d}.{kind}", shard)
    paths = list_shards(tmp_path, "train")
    files, arrays = TokenDataset(paths, 7, 3, True), TokenDataset(shards, 7, 3, True)
    monkeypatch.setattr(runtime.dataloader, "read_shard",
                        lambda path: opened.append(path) or read_shard(path))
    for i in range(files.total):
        assert files.read(i, 1).tolist() == arrays.read(i, 1).tolist()
    assert sorted(opened) == [path for path, shard in zip(paths, shards, strict=True) if len(shard) > 7]


def test_folders_of_the_peers_are_read_without_being_told(tmp_path):
    for name in ("edufineweb_train_000002.npy", "edufineweb_train_000001.npy", "edufineweb_val_000000.npy"):
        np.save(tmp_path / name, np.arange(50, dtype=np.uint16))
    (tmp_path / "notes_train.txt").write_text("no shard")
    (tmp_path / "edufineweb_train_000003.npy.tmp").write_text("no shard either")
    assert [path.name[-10:] for path in list_shards(tmp_path, "train")] == ["000001.npy", "000002.npy"]
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 50              # modded-nanogpt's fineweb_train_000001.bin
    (tmp_path / "modded").mkdir()
    tokens = np.arange(50, dtype=np.uint16)
    (tmp_path / "modded/fineweb_train_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())
    assert open_shard(*list_shards(tmp_path / "modded", "train")).tolist() == list(range(50))


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
            assert held < 2 * n * 1.3                         # one shard, two bytes a token
            assert peak < 2 * n * 2.4                         # the next comes while the last is let go
    finally:
        tracemalloc.stop()


def readers():
    """The threads that read ahead; there may be others, which are not ours."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]


def batches_of(shards, step=0):
    """Three micro-batches a step, of 2 sequences of 5 tokens."""
    return micro_batches(TokenDataset(shards, 5, 1, True, vocab_size=50257), steps_of(5 * 2 * 3), 2, step)


@pytest.mark.parametrize("device, step", [("cpu", 0), ("cpu", 17), pytest.param(
    "cuda", 17, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])])
def test_batches_read_ahead_have_targets_one_token_on(device, step):
    shards = [np.arange(i * 100, i * 100 + n, dtype=np.uint16) + 40000 for i, n in enumerate((90, 33, 71))]
    ahead = read_ahead(batches_of(shards, step), pin=device == "cuda")
    for plain, rows in itertools.islice(zip(batches_of(shards, step), ahead, strict=False), 30):
        x, y = to_device(rows, device)
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (2, 5) and x.device.type == device
        assert x.is_contiguous() and y.is_contiguous() and (x[:, 1:] == y[:, :-1]).all()
        assert torch.cat([x, y[:, -1:]], dim=1).tolist() == plain.tolist()
    assert len(readers()) == 1
    ahead.close()
    assert not readers()


def test_reading_runs_eight_micro_batches_ahead_of_the_training_loop():
    """To load the next shard takes about a second. And no further: its end waits for what has been begun."""
    seen, all_are_there = [], threading.Event()

    def batches():
        for rows in batches_of([np.arange(200, dtype=np.uint16)]):
            seen.append(rows)
            if len(seen) > 8:
                all_are_there.set()
            yield rows
    ahead = read_ahead(batches(), pin=False)
    next(ahead)
    assert all_are_there.wait(60)
    ahead.close()
    assert len(seen) == 9


def test_for_a_gpu_batches_are_pinned_so_that_their_copy_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows + 1)
    ahead = read_ahead(batches_of([np.arange(200, dtype=np.uint16)]), pin=True)
    assert next(ahead).tolist() == (next(batches_of([np.arange(200, dtype=np.uint16)])) + 1).tolist()
    ahead.close()


def test_what_goes_wrong_on_the_reading_thread_is_raised_where_the_batch_is_asked_for():
    shards = [np.arange(60, dtype=np.uint16), np.full(60, 50, dtype=np.uint16)]
    dataset = TokenDataset(shards, 5, vocab_size=50257)
    shards[1][:] = 60
    ahead = read_ahead(micro_batches(dataset, steps_of(10), 2), pin=False)
    for _ in range(5):
        next(ahead)
    refused(lambda: [next(ahead) for _ in range(3)], "the text", "changed")
    assert not readers()
