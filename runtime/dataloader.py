"""Shards -> batches.

Which tokens a step sees is a pure function of (shards, seed, step, total_batch_size, sequence_length). So any
number of ranks, any micro-batch and any resume see the same ones, and the loader has no state to save.
"""
import bisect
import hashlib
import itertools
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from runtime.cli import UserError
from runtime.files import digest, fingerprint_blocks, readable
from runtime.shards import list_shards, open_shard, read_shard
from runtime.tokenizer import VOCAB_SIZE, encode, token_lengths

INPUT_TXT = Path(__file__).resolve().parent.parent / "input.txt"


def stable_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on `key` alone, in every release of NumPy: Generator.permutation
    may change between releases (NEP 19), the raw stream of Philox may not."""
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(n), kind="stable")


class TokenDataset:
    """The sequences of a list of shards, numbered across epochs.

    Shard i has (len_i - 1) // T sequences of T tokens (the last target needs one token more). Each comes
    once an epoch. With `shuffle`, the shards and the sequences within each shard are permuted anew each
    epoch, by the seed; without, the order is that of the files. `shards`: paths, or 1-D uint16 arrays. One
    shard is in memory at a time, as uint16.

    Raises UserError for too little text to make one sequence, and for a shard that is damaged, has ids at or
    above `vocab_size` or GPT-2's 50257, or changes during the run: at once where the fingerprint's blocks
    show it, else when the shard is read.
    """

    def __init__(self, shards: list[Path | np.ndarray], sequence_length: int, seed: int = 0,
                 shuffle: bool = False, vocab_size: int = VOCAB_SIZE):
        self.shards, self.T, self.end = list(shards), sequence_length, min(vocab_size, VOCAB_SIZE)
        self.names = ["the text" if isinstance(shard, np.ndarray) else str(shard) for shard in self.shards]
        self.fingerprint = [self._fingerprint(i) for i in range(len(self.shards))]
        self.lengths = [length for _, length, _ in self.fingerprint]
        self.counts = [(length - 1) // self.T for length in self.lengths]
        self.total = sum(self.counts)
        if self.total == 0:
            raise UserError(f"{self.names[0]}: {sum(self.lengths):,} tokens are too few for one sequence of "
                            f"{self.T} tokens and its target: give more text or a smaller --sequence_length")
        self._order = lambda n, *key: stable_permutation(n, seed, *key) if shuffle else np.arange(n)
        # kept for the epoch and the shard that are being read
        self._epoch, self._sequences = lru_cache(1)(self._epoch), lru_cache(1)(self._sequences)

    def _fingerprint(self, i):
        """[name, number of tokens, digest] of shard i."""
        tokens = self.shards[i] if isinstance(self.shards[i], np.ndarray) else open_shard(self.shards[i])
        sample = fingerprint_blocks(tokens)
        self._check_ids(i, sample)
        return [Path(self.names[i]).name, len(tokens), digest(sample)]

    def _check_ids(self, i, tokens):
        if (largest := tokens.max(initial=0)) >= self.end:
            raise UserError(f"{self.names[i]} holds token {largest}, and the model's tokens end at "
                            f"{self.end - 1}: it is damaged, or of another tokenizer than GPT-2's, or "
                            f"--vocab_size is too small")

    def _epoch(self, epoch):
        """The order of the shards in an epoch, and the numbers within it at which their sequences begin."""
        order = self._order(len(self.shards), epoch).tolist()
        return order, [0, *itertools.accumulate(self.counts[i] for i in order)]

    def _sequences(self, epoch, i):
        """Reads shard i: its sequences as rows (count_i, T+1), and their order in an epoch."""
        shard = self.shards[i]
        tokens = shard if isinstance(shard, np.ndarray) else read_shard(shard)
        if [len(tokens), digest(tokens)] != self.fingerprint[i][1:]:
            raise UserError(f"{self.names[i]} changed during the run: restore it, then run the same command")
        self._check_ids(i, tokens)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, self.T + 1)[::self.T]           # no copy
        return rows, self._order(self.counts[i], epoch, i)

    def read(self, first: int, count: int) -> np.ndarray:
        """Sequences number `first` to `first + count - 1`, each with its last target: uint16 (count, T+1)."""
        out = np.empty((count, self.T + 1), dtype=np.uint16)
        row = 0
        while row < count:
            epoch, position = divmod(first + row, self.total)
            order, begins = self._epoch(epoch)
            slot = bisect.bisect_right(begins, position) - 1
            i, local = order[slot], position - begins[slot]
            rows, row_order = self._sequences(epoch, i)
            n = min(count - row, self.counts[i] - local)
            out[row:row + n] = rows[row_order[local:local + n]]
            row += n
        return out


def to_device(rows, device):
    """Rows of tokens (B, T+1) -> inputs x and targets y, int64 (B, T) each, on `device`. On CUDA `rows` is a
    pinned tensor, and the copy overlaps with the GPU's work."""
    rows = torch.as_tensor(rows, dtype=torch.int32).to(device, non_blocking=True).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class TokenLoader:
    """Micro-batches of this rank, read ahead on a thread.

    Step s has the sequences [s N, (s+1) N) of the dataset, N = total_batch_size / T. In its micro-batch m,
    rank r gets B sequences, from number s N + (m world_size + r) B on. B fits the run's first updates, which
    are the smallest. Later ones may join several micro-batches, up to `joined_rows` sequences, because fewer
    and larger micro-steps cost less time on a CPU.
    """
    DEPTH = 8                   # micro-batches read ahead: loading the next shard takes about a second

    def __init__(self, dataset: TokenDataset, total_batch_size: int, batch_size: int, rank: int = 0,
                 world_size: int = 1, device: str = "cpu", joined_rows: int = 0):
        assert total_batch_size % (batch_size * dataset.T * world_size) == 0
        self.dataset, self.B, self.device = dataset, batch_size, device
        self.rank, self.world_size, self.joined_rows = rank, world_size, joined_rows
        self.rows_per_step = total_batch_size // dataset.T
        self.micro_batches = self.rows_per_step // (batch_size * world_size)     # of a step
        self._pools = []

    def divide(self, updates: int) -> tuple[int, int]:
        """(micro-steps of each of `updates` updates of a step, micro-batches joined in each micro-step)."""
        share = self.micro_batches // updates
        join = max(n for n in range(1, max(1, self.joined_rows // self.B) + 1) if share % n == 0)
        return share // join, join

    def largest(self, updates: int) -> int:
        """Sequences of the largest micro-step of a run of three steps or more, whose steps have `updates`
        updates in its first third, and a quarter of them in the last."""
        return self.B * self.divide(max(1, updates // 4))[1]

    def rows(self, step: int, m: int) -> np.ndarray:
        """This rank's sequences of micro-batch m of a step, uint16 (B, T+1)."""
        first = step * self.rows_per_step + (m * self.world_size + self.rank) * self.B
        return self.dataset.read(first, self.B)

    def _load(self, step, m):
        rows = torch.from_numpy(self.rows(step, m).astype(np.int32))
        # the caching host allocator reuses a pinned block only after its copy has ended
        return rows.pin_memory() if str(self.device).startswith("cuda") else rows

    def start(self, step: int) -> None:
        """Starts reading ahead at the first micro-batch of `step`."""
        if str(self.device).startswith("cuda"):
            # as many as can be in use at once, for torch to keep: to pin memory later makes the GPU wait
            shape = self.B, self.dataset.T + 1
            _ = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(self.DEPTH + 2)]
        self._pools = [reader := ThreadPoolExecutor(1, "read ahead")]
        self._reads = (reader.submit(self._load, s, m)
                       for s in itertools.count(step) for m in range(self.micro_batches))
        self._ahead = deque(itertools.islice(self._reads, self.DEPTH))

    def next_batch(self, count: int = 1):
        """x, y of the next `count` micro-batches, joined: int64 (count B, T) on the device. Raises the
        errors of the thread that reads."""
        self._ahead.extend(itertools.islice(self._reads, count))
        batches = [self._ahead.popleft().result() for _ in range(count)]
        return to_device(batches[0] if count == 1 else torch.cat(batches), self.device)

    def close(self):
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Data:
    """What a run reads."""
    train: TokenDataset
    val: TokenDataset | None
    val_count: int              # sequences of one validation, the first of `val`

    def fingerprints(self) -> dict[str, list]:
        return {"train": self.train.fingerprint} | ({"val": self.val.fingerprint} if self.val else {})

    def identity(self) -> dict[str, str]:
        """Of each split a digest of its shards' tokens, of `val` also how many are read, and in sequences of
        how many: where it is the same in two runs, their losses compare."""
        found = {split: hashlib.sha256(repr([shard[1:] for shard in shards]).encode()).hexdigest()[:16]
                 for split, shards in self.fingerprints().items()}
        return found | ({"val": f"{found['val']}, {self.val_count} x {self.val.T}"} if self.val else {})

    @cached_property
    def bits_per_byte(self) -> float:
        """Of a validation loss of one nat a token: what compares tokenizers and texts. The bytes are those of
        the predicted tokens; <|endoftext|>, whose loss counts, has none. nan where tokens are not GPT-2's."""
        if not self.val or self.val.end < VOCAB_SIZE:
            return math.nan
        targets = self.val.read(0, self.val_count)[:, 1:]
        return targets.size / (math.log(2) * max(1, token_lengths()[targets].sum().item()))


def find_shards(config) -> dict[str, list[Path]]:
    """{split: its shards} of those splits of --data that a run reads. UserError if one has none."""
    splits = () if config.overfit else ("train", "val") if config.val_every else ("train",)
    return {split: list_shards(config.data, split) for split in splits}


def open_data(config) -> Data:
    T, vocab_size = config.sequence_length, config.vocab_size
    if config.overfit:
        with readable(INPUT_TXT, "restore it with `git checkout -- input.txt`"):
            text = INPUT_TXT.read_text(encoding="utf-8")
        need = config.total_batch_size + 1
        tokens = encode(text[:20 * need])[:need]        # one epoch is one batch: 4 sequences of 32 tokens
        return Data(TokenDataset([tokens], T, vocab_size=vocab_size), None, 0)
    shards = find_shards(config)
    train = TokenDataset(shards["train"], T, config.seed, config.shuffle, vocab_size)
    val = TokenDataset(shards["val"], T, vocab_size=vocab_size) if config.val_every else None
    return Data(train, val, min(val.total, max(1, config.val_tokens // T)) if val else 0)
