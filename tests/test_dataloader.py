"""runtime/dataloader.py: a token once an epoch, the same for any ranks, micro-batch and resume."""
import itertools
import math
import tempfile
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config import Config
from runtime import dataloader
from runtime.cli import UserError
from runtime.dataloader import (
    Data,
    TokenDataset,
    TrainLoader,
    micro_batches,
    open_data,
    read_data,
    read_ahead,
    stable_permutation,
    to_device,
)
from runtime.ranks import Process
from runtime.recipe import BatchSchedule
from runtime.shards import list_shards, read_shard, write_shard
from runtime.tokenizer import EOT, encode, tokenizer

# The same examples in every run, and no look at the clock.
FAST = settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck))
FOREVER = 10**9                 # steps


def numbered_shards(*lengths):
    """Shards of these lengths, in which each token is its own place in the text."""
    shards = []
    first = 0
    for length in lengths:
        shards.append(np.arange(first, first + length, dtype=np.uint16))
        first += length
    return shards


@st.composite
def readings(draw):
    """(shards, T, seed, shuffle) of a TokenDataset that has at least one sequence."""
    T = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    lengths[0] += T
    return numbered_shards(*lengths), T, draw(st.integers(0, 2**40)), draw(st.booleans())


# ----------------------------------------------------------------------- one epoch after the other

@FAST
@given(readings())
def test_the_first_epoch_has_each_sequence_of_each_shard_once(reading):
    shards, T, _, shuffle = reading
    expected = []
    for shard in shards:
        for i in range(0, len(shard) - T, T):
            expected.append(shard[i:i + T + 1].tolist())

    dataset = TokenDataset(*reading)
    rows = dataset.read(0, dataset.total)

    assert rows.dtype == np.uint16
    if shuffle:
        assert sorted(rows.tolist()) == expected
    else:
        assert rows.tolist() == expected


def cuts(shard, T):
    """The sorted sequences of a shard that is cut from its first, second, ... T-th token on."""
    for shift in range(T):
        moved = np.roll(shard, -shift)
        yield sorted(moved[i:i + T + 1].tolist() for i in range(0, len(shard) - T, T))


@FAST
@given(readings(), st.integers(1, 3))
def test_a_later_epoch_has_each_sequence_once_of_shards_that_are_cut_elsewhere(reading, epoch):
    shards, T, _, _ = reading
    dataset = TokenDataset(*reading)
    rows = dataset.read(epoch * dataset.total, dataset.total).tolist()
    for shard in shards:
        of_shard = sorted(row for row in rows if row[0] in shard)
        assert of_shard in list(cuts(shard, T))


def test_shuffled_epochs_differ_in_their_order_and_in_their_cuts():
    dataset = TokenDataset(numbered_shards(400, 300), 8, 5, shuffle=True)
    epochs = []
    for epoch in range(3):
        epochs.append(dataset.read(epoch * dataset.total, dataset.total).tolist())
    places = [{row[0] % 8 for row in epoch if row[0] < 400} for epoch in epochs]
    assert places[0] == {0}
    assert places[1] != places[2]

    orders = [[row[0] // 8 for row in epoch] for epoch in epochs]       # whatever their cuts
    assert orders[0] != orders[1]
    assert orders[1] != orders[2]


def test_epochs_that_are_not_shuffled_are_the_same():
    dataset = TokenDataset(numbered_shards(40, 30), 8)
    once = dataset.read(0, dataset.total).tolist()
    again = dataset.read(dataset.total, dataset.total).tolist()
    assert once == again


@FAST
@given(readings(), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)), max_size=8))
def test_a_sequence_is_the_same_wherever_the_reading_begins(reading, places):
    whole = TokenDataset(*reading).read(0, 250)
    dataset = TokenDataset(*reading)
    for first, count in places:
        assert dataset.read(first, count).tolist() == whole[first:first + count].tolist()


def test_the_order_of_a_run_is_the_same_in_every_release():
    """A change would let resumed runs see other tokens than they were begun with."""
    assert stable_permutation(10, 1337).tolist() == [0, 8, 3, 1, 2, 5, 9, 7, 6, 4]
    assert stable_permutation(6, 7, 1, 2).tolist() == [3, 4, 1, 5, 2, 0]

    ranges = ((0, 13), (100, 109), (200, 217))
    shards = [np.arange(first, end, dtype=np.uint16) for first, end in ranges]
    first_tokens = TokenDataset(shards, 4, 42, True).read(0, 18)[:, 0].tolist()
    assert first_tokens == [
        0, 4, 8, 104, 100, 212, 208, 204, 200, 205, 213, 209, 201, 11, 3, 7, 105, 101]


def test_another_seed_is_another_order():
    orders = [TokenDataset(numbered_shards(400), 4, seed, True).read(0, 99) for seed in (1, 1, 2)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


@pytest.mark.parametrize("first, count", [(0, 6), (3, 6), (7, 5), (12, 3)])
def test_the_sequences_before_a_number_are_read_backwards(first, count):
    """Also where the number is within a read, or in a later epoch."""
    forwards = TokenDataset(numbered_shards(33), 4, 1, True)
    dataset = TokenDataset(numbered_shards(33), 4, 1, True)
    dataset.backward = 10
    expected = []
    for number, row in enumerate(forwards.read(first, count).tolist(), start=first):
        expected.append(row[::-1] if number < 10 else row)
    assert dataset.read(first, count).tolist() == expected


def test_the_tokens_of_all_shards_are_counted(tmp_path):
    first = np.array([1, 1, 3, 1, 3, 0, 0, 1], dtype=np.uint16)
    second = np.array([5, 3, 3, 3, 3, 3, 3, 3], dtype=np.uint16)
    write_shard(tmp_path / "text_train_000001.npy", first)
    dataset = TokenDataset([tmp_path / "text_train_000001.npy", second], 4)
    assert dataset.occurrences(6).tolist() == [2, 4, 0, 9, 0, 1]


# ----------------------------------------------------------------- steps, ranks, micro-batches

@FAST
@given(readings(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 40))
def test_the_ranks_share_each_step_whatever_their_number_and_micro_batch(
        reading, B, world_size, micro_steps, step):
    """The sequences of a step are those of one process that takes them at once."""
    N = B * world_size * micro_steps
    schedule = BatchSchedule(N * reading[1], FOREVER)
    expected = TokenDataset(*reading).read(step * N, N)

    of_ranks = []
    for rank in range(world_size):
        dataset = TokenDataset(*reading)
        of_ranks.append(micro_batches(dataset, schedule, B, step, rank, world_size))
    rows = []
    for _ in range(micro_steps):
        for batches in of_ranks:
            rows.append(next(batches))

    assert np.concatenate(rows).tolist() == expected.tolist()


@pytest.mark.parametrize("divisors, steps", [((1, 1, 1), 3), ((4, 2, 1), FOREVER), ((4, 2, 1), 3)])
def test_all_sequences_come_in_order_however_the_batch_grows(divisors, steps):
    T = 5
    B = 4
    n = 3 * 48                          # sequences
    dataset = TokenDataset(numbered_shards(2000), T, 1, True)
    schedule = BatchSchedule(48 * T, steps, divisors)

    batches = micro_batches(dataset, schedule, B)
    rows = np.concatenate(list(itertools.islice(batches, n // B)))

    assert rows.tolist() == dataset.read(0, n).tolist()


def test_a_resumed_run_goes_on_where_it_was_in_the_data_though_its_schedule_changes():
    T = 5
    dataset = TokenDataset(numbered_shards(2000), T, 1, True)
    shorter = BatchSchedule(16 * T, 7, (4, 2, 1))
    longer = BatchSchedule(16 * T, 21, (4, 2, 1))
    longer.resume(5, shorter.tokens_before(5))

    batches = micro_batches(dataset, longer, 2, first_step=5)
    rows = np.concatenate(list(itertools.islice(batches, 15)))

    first = 4 * 4 + 8                   # the sequences of the shorter run's first five steps
    assert rows.tolist() == dataset.read(first, 30).tolist()


def test_a_loader_counts_its_micro_steps_and_begins_at_its_first_step():
    T = 5
    dataset = TokenDataset(numbered_shards(2000), T, 1, True)
    schedule = BatchSchedule(16 * T, 7, (4, 2, 1))
    process = SimpleNamespace(rank=1, world_size=2, device="cpu", on_gpu=False)

    loader = TrainLoader(dataset, schedule, 2, 4, process)
    x, y = loader.next_batch()
    loader.close()

    assert [loader.micro_steps(step) for step in range(7)] == [1] * 4 + [2] * 2 + [4]
    expected = dataset.read(16 + 2, 2)          # after four steps of 4, and the two rows of rank 0
    assert x.tolist() == expected[:, :-1].tolist()
    assert y.tolist() == expected[:, 1:].tolist()
    assert loader.tokens_of_step(4).tolist() == dataset.read(16, 8).tolist()    # of both ranks


# ----------------------------------------------------------------------- to the device

def test_targets_are_one_token_on():
    rows = numbered_shards(100)[0].reshape(4, 25) + 60_000
    x, y = to_device(rows, "cpu")
    assert x.tolist() == rows[:, :-1].tolist()
    assert y.tolist() == rows[:, 1:].tolist()
    assert x.dtype == y.dtype == torch.int64


@pytest.mark.parametrize("B", [1, 2])
def test_batches_have_the_strides_of_a_whole_tensor(B):
    """A single row, too: with other strides torch.compile would compile the model again."""
    x, y = to_device(np.zeros((B, 25), dtype=np.uint16), "cpu")
    assert x.stride() == y.stride() == (24, 1)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_only_pinned_memory_is_copied_while_the_program_goes_on(is_pinned, monkeypatch):
    how = []
    copy = torch.Tensor.to

    def remember(rows, device, non_blocking=False):
        how.append(non_blocking)
        return copy(rows, device)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda rows: is_pinned)
    monkeypatch.setattr(torch.Tensor, "to", remember)
    to_device(torch.zeros(2, 5, dtype=torch.int32), "cpu")
    assert how == [is_pinned]


def batches_of(shards):
    """Micro-batches of two sequences of five tokens, three a step."""
    dataset = TokenDataset(shards, 5, 1, True)
    return micro_batches(dataset, BatchSchedule(3 * 2 * 5, FOREVER), 2)


def readers():
    """The threads that read ahead. There may be others, which are not ours."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("read ahead")]


def test_reading_ahead_changes_no_batch_and_its_thread_ends_with_it():
    shards = numbered_shards(90, 33, 71)
    ahead = read_ahead(batches_of(shards), pin=False)
    for plain, rows in zip(itertools.islice(batches_of(shards), 30), ahead, strict=False):
        assert rows.tolist() == plain.tolist()
    assert len(readers()) == 1
    ahead.close()
    assert readers() == []


def test_reading_runs_eight_micro_batches_ahead_and_no_further():
    """To load the next shard takes about a second; and at its end it waits for what has begun."""
    seen = []
    all_are_there = threading.Event()

    def batches():
        for rows in batches_of(numbered_shards(200)):
            seen.append(rows)
            if len(seen) > 8:
                all_are_there.set()
            yield rows

    ahead = read_ahead(batches(), pin=False)
    next(ahead)
    assert all_are_there.wait(60)
    ahead.close()
    assert len(seen) == 9


def test_for_a_gpu_batches_are_pinned(monkeypatch):
    """A copy from pinned memory waits for nothing. Here "pinned" numbers are larger by one."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: rows + 1)
    plain = next(batches_of(numbered_shards(200)))
    ahead = read_ahead(batches_of(numbered_shards(200)), pin=True)
    pinned = next(ahead)
    ahead.close()
    assert pinned.tolist() == (plain + 1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_batches_are_the_same_on_a_gpu():
    shards = numbered_shards(90, 33, 71)
    ahead = read_ahead(batches_of(shards), pin=True)
    for plain, rows in zip(itertools.islice(batches_of(shards), 30), ahead, strict=False):
        x, y = to_device(rows, "cuda")
        assert x.is_cuda
        assert x.stride() == y.stride() == (5, 1)
        assert torch.cat([x, y[:, -1:]], dim=1).tolist() == plain.tolist()
    ahead.close()


# ----------------------------------------------------------------------- shards

@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_files_have_the_rows_of_arrays_and_each_is_read_once_an_epoch(kind, tmp_path, monkeypatch):
    shards = [stable_permutation(n, n).astype(np.uint16) for n in (100, 37, 5, 64)]
    for i, shard in enumerate(shards):
        write_shard(tmp_path / f"x_train_{i:06d}.{kind}", shard)
    paths = list_shards(tmp_path, "train")
    opened = []

    def read_and_remember(path, *part):
        if not part:                            # not for a fingerprint
            opened.append(path)
        return read_shard(path, *part)

    monkeypatch.setattr(dataloader, "read_shard", read_and_remember)
    files = TokenDataset(paths, 7, 3, True)
    arrays = TokenDataset(shards, 7, 3, True)
    for i in range(files.total):
        assert files.read(i, 1).tolist() == arrays.read(i, 1).tolist()

    assert sorted(opened) == [paths[0], paths[1], paths[3]], "the third has no sequence"


@pytest.mark.parametrize("most_in_memory, shards", [(2**27, 2), (999_999, 0)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_two_shards_are_in_memory_while_the_next_is_read_and_nothing_of_large_ones(
        epoch, most_in_memory, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "LARGEST_IN_MEMORY", most_in_memory)
    monkeypatch.setattr(dataloader, "SAMPLE_TOKENS", 1000)
    n = 1_000_000
    for i in range(3):
        write_shard(tmp_path / f"x_train_{i:06d}.npy", np.zeros(n, dtype=np.uint16))
    dataset = TokenDataset(list_shards(tmp_path, "train"), 1024, 0, True)
    bytes_of_shard = 2 * n
    stable_permutation(1, 0)            # NumPy imports numpy.random here

    tracemalloc.start()
    try:
        for i in range(6):
            dataset.read(epoch * dataset.total + i * 500, 8)
            held, peak = tracemalloc.get_traced_memory()
            assert held < (shards / 2 + 0.3) * bytes_of_shard
            assert peak < (shards + 0.4) * bytes_of_shard
    finally:
        tracemalloc.stop()


@FAST
@given(readings())
def test_large_shards_that_are_read_by_sequences_have_those_of_small_ones(reading):
    """In all epochs, shuffled or not: also where a sequence goes on at the shard's beginning."""
    shards, *others = reading
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for i, shard in enumerate(shards):
            write_shard(Path(folder, f"x_train_{i:06d}.bin"), shard)
        patch.setattr(dataloader, "LARGEST_IN_MEMORY", 10)
        large = TokenDataset(list_shards(folder, "train"), *others)
        small = TokenDataset(*reading)
        n = 3 * small.total
        assert large.read(0, n).tolist() == small.read(0, n).tolist()


@pytest.mark.parametrize("change, problem", [
    ("token", "token 300"), ("end", "changed during"), ("cut", "changed during")])
def test_of_a_large_shard_each_sequence_is_checked_and_in_each_epoch_both_ends(
        change, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "LARGEST_IN_MEMORY", 10)
    monkeypatch.setattr(dataloader, "SAMPLE_TOKENS", 10)
    monkeypatch.setattr(dataloader, "DIGEST_TOKENS", 10)
    tokens = np.arange(100, dtype=np.uint16)
    if change == "token":
        tokens[50] = 300
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    dataset = TokenDataset(list_shards(tmp_path, "train"), 8, vocab_size=256)
    assert dataset.read(5, 1).tolist() == [list(range(40, 48)) + [tokens[48]]]

    if change == "end":
        tokens[95] += 1
        write_shard(tmp_path / "x_train_000001.npy", tokens)
    if change == "cut":                         # in the middle of its epoch
        monkeypatch.setattr(dataloader, "read_shard", lambda path, first, count: tokens[:5])
    with pytest.raises(UserError, match=f"x_train_000001.npy.*{problem}"):
        dataset.read(6, dataset.total)


def test_too_little_text_for_a_sequence_is_refused():
    assert TokenDataset(numbered_shards(9), 8).total == 1
    with pytest.raises(UserError, match="found 8, expected at least 9"):
        TokenDataset(numbered_shards(8), 8)


@pytest.mark.parametrize("vocab_size, token, can_be_raised", [
    (256, 256, True), (50_304, 50_257, False)])
def test_a_token_that_the_model_does_not_have_is_refused(
        vocab_size, token, can_be_raised, tmp_path):
    """The rows beyond GPT-2's 50,257 tokens are padding: a larger --vocab_size would not help."""
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = token - 1
    TokenDataset([tokens], 8, vocab_size=vocab_size)

    tokens[50] = token
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    with pytest.raises(UserError, match=f"x_train_000001.npy.* {token}.*tokenizer") as caught:
        TokenDataset(list_shards(tmp_path, "train"), 8, vocab_size=vocab_size)
    assert ("--vocab_size" in str(caught.value)) == can_be_raised


def test_a_foreign_token_late_in_a_shard_is_found_when_it_is_read(monkeypatch):
    monkeypatch.setattr(dataloader, "SAMPLE_TOKENS", 10)
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 300
    dataset = TokenDataset([tokens], 8, vocab_size=256)
    with pytest.raises(UserError, match="contains token 300"):
        dataset.read(0, 1)


@pytest.mark.parametrize("place", [0, -1])
def test_a_shard_that_changes_during_the_run_is_refused_where_a_batch_is_asked_for(place):
    shards = numbered_shards(60, 60)
    ahead = read_ahead(batches_of(shards), pin=False)
    for shard in shards:
        shard[place] += 1
    with pytest.raises(UserError, match="changed during the run"):
        for _ in range(20):
            next(ahead)
    assert readers() == []


# ----------------------------------------------------------------------- the data of a run

def write_folder(folder, train, val):
    write_shard(folder / "text_train_000001.npy", train)
    write_shard(folder / "text_val_000000.npy", val)
    return folder


def flags(folder, **more):
    values = {"data": str(folder), "seed": 3, "sequence_length": 8, "val_tokens": 80,
              "total_batch_size": 32}
    return Config(**values | more)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, *numbered_shards(400, 101))


@pytest.mark.parametrize("val_tokens, sequences", [(1, 1), (7, 1), (17, 2), (10**6, 12)])
def test_a_validation_has_at_least_one_sequence_and_at_most_all(val_tokens, sequences, folder):
    assert read_data(flags(folder, val_tokens=val_tokens)).val_count == sequences


def test_validation_is_the_beginning_of_its_shards_whatever_the_seed(folder):
    for seed in (1, 2):
        data = read_data(flags(folder, seed=seed))
        assert data.val.read(0, 2).tolist() == [list(range(400, 409)), list(range(408, 417))]


@pytest.mark.parametrize("more, remedy", [
    ({}, "--vocab_size"), ({"eval_only": True, "init": "gpt2"}, "--init"),
    ({"eval_only": True}, "--init"), ({"init": "gpt2"}, "--init")])
def test_tokens_beside_nanogpts_meta_pkl_are_not_gpt2s(more, remedy, folder):
    """The file is not opened: a pickle can run code."""
    (folder / "meta.pkl").write_bytes(b"no pickle")
    refused(lambda: read_data(flags(folder, **more)), "meta.pkl", remedy)
    write_folder(folder, *(shard % 65 for shard in numbered_shards(400, 101)))
    assert read_data(flags(folder, vocab_size=65, **more)).val.vocab_end == 65


def test_a_run_without_validation_needs_no_shards_for_it(folder):
    (folder / "text_val_000000.npy").unlink()
    data = read_data(flags(folder, val_every=0))
    assert data.val is None
    with pytest.raises(UserError):
        read_data(flags(folder))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_token_that_the_model_does_not_have_is_found_in_either_split(split, folder):
    write_shard(folder / f"text_{split}_000009.npy", np.full(20, 50_300, dtype=np.uint16))
    with pytest.raises(UserError, match=f"text_{split}_000009.npy"):
        read_data(flags(folder))


def test_the_sanity_runs_epoch_is_one_batch_of_the_beginning_of_input_txt():
    data = read_data(flags("nowhere", overfit=True, shuffle=False))
    assert data.train.total == 32 // 8
    assert data.val is None
    expected = encode((ROOT / "input.txt").read_text(encoding="utf-8")[:1000])[:33]
    rows = data.train.read(0, 4)
    assert rows[:, :-1].flatten().tolist() == expected[:-1].tolist()
    assert rows[:, 1:].flatten().tolist() == expected[1:].tolist()


def test_a_damaged_input_txt_can_be_restored_from_git(tmp_path, monkeypatch):
    path = tmp_path / "input.txt"
    path.write_bytes(b"\xff")
    monkeypatch.setattr(dataloader, "INPUT_TXT", path)
    with pytest.raises(UserError, match="input.txt.*git checkout"):
        read_data(flags("nowhere", overfit=True))


@pytest.mark.parametrize("place", [0, 399])
def test_a_fingerprint_tells_shards_apart_by_either_end(place, folder, monkeypatch):
    monkeypatch.setattr(dataloader, "DIGEST_TOKENS", 100)
    before = read_data(flags(folder)).fingerprints()
    tokens = numbered_shards(400)[0]
    tokens[place] += 1
    write_shard(folder / "text_train_000001.npy", tokens)
    after = read_data(flags(folder)).fingerprints()

    assert before["val"] == after["val"]
    [[name, length, digest]] = before["train"]
    [[same_name, same_length, other_digest]] = after["train"]
    assert (name, length) == (same_name, same_length) == ("text_train_000001.npy", 400)
    assert digest != other_digest


class AnotherRank(Process):
    """Rank 0 of two, whose other rank has these values."""

    def gather(self, value):
        if isinstance(value, dict):
            return [value, self.values_of_other]
        return [value]


def test_ranks_with_other_shards_are_refused(folder, tmp_path_factory):
    other = write_folder(tmp_path_factory.mktemp("other"), *numbered_shards(400, 99))
    contents = {}
    for split, shards in read_data(flags(other)).fingerprints().items():
        for i, (_, *content) in enumerate(shards):
            contents[f"{split} shard {i} of --data"] = str(content)

    process = AnotherRank(0, 0, 2)
    process.values_of_other = contents
    with pytest.raises(UserError, match="process 1: val shard 0 of --data"):
        open_data(flags(folder), process)


def test_a_folder_that_is_not_finished_has_a_warning_where_it_is_read(folder, capsys):
    open_data(flags(folder), Process())
    assert capsys.readouterr().out == ""

    (folder / "manifest.json").write_text('{"complete": false, "shards": []}')
    open_data(flags(folder), Process())
    assert str(folder) in capsys.readouterr().out

    open_data(flags(folder, overfit=True), Process())
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------- bits per byte

@pytest.mark.parametrize(
    "text", ["To be, or not to be: that is the question. ", "我们训练一个模型，"])
def test_bits_per_byte_count_the_bytes_of_the_targets_that_are_validated(text):
    """The first token is no target, and <|endoftext|> has no bytes."""
    tokens = [5, *encode(text * 9)[:30].tolist(), EOT, *encode(text).tolist()]
    bytes_of_targets = len(tokenizer().decode_bytes(tokens[1:31]))
    dataset = TokenDataset([np.array(tokens * 2, dtype=np.uint16)], 31)

    factor = Data(dataset, dataset, val_count=1).bits_per_byte

    assert factor == pytest.approx(31 / math.log(2) / bytes_of_targets)


def test_tokens_that_are_not_gpt2s_have_no_bits_per_byte():
    dataset = TokenDataset(numbered_shards(100), 8, vocab_size=256)
    assert math.isnan(Data(dataset, dataset, val_count=2).bits_per_byte)
    assert math.isnan(Data(dataset).bits_per_byte)


# ----------------------------------------------------------------------- the first line

def tokens_of(*documents):
    """Their tokens as fineweb.py writes them, each document behind an <|endoftext|>."""
    tokens = []
    for document in documents:
        tokens += [EOT, *encode(document).tolist()]
    return np.array(tokens, dtype=np.uint16)


@pytest.mark.parametrize("documents, line", [
    (["First Citizen:\nBefore we proceed any further"], "First Citizen:\n"),
    (["\n \n", "\n\nTitle\r\n\nText"], "Title\r\n"),
    (["One document", "Another"], "One document"),
    (["One of words" + " word" * 100], "One of words" + " word" * 21),
    (["话说天下大势，" * 9 + "\n"], "话说天下大势，话说天下大势"),     # a part of ， goes
    (["\n\n", " "], ""),
])
def test_the_first_line_of_the_validation_shards_begins_samples(documents, line):
    tokens = tokens_of(*documents)
    val = TokenDataset([tokens], len(tokens) - 1)
    assert Data(None, val).first_line() == line


def test_without_validation_shards_there_is_no_first_line():
    dataset = TokenDataset(numbered_shards(100), 8)
    assert Data(dataset).first_line() == ""


def test_no_prompt_can_be_written_in_tokens_that_are_not_gpt2s():
    config = flags("nowhere", vocab_size=256)
    assert Data(None).choose_prompt(config) == ""
    config.sample_prompt = "auto"
    dataset = TokenDataset(numbered_shards(100), 8, vocab_size=256)
    assert Data(dataset, dataset).choose_prompt(config) == ""

    config = flags("nowhere", vocab_size=50304)
    assert Data(None).choose_prompt(config) == config.sample_prompt
