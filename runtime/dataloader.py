"""Shards -> micro-batches. The tokens of a step are a pure function of (shards, seed, step, total_batch_size,
sequence_length): the same for any number of ranks, micro-batch and resume, without a state to save."""
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from runtime.cli import UserError
from runtime.files import readable
from runtime.shards import list_shards, open_shard, read_shard
from runtime.tokenizer import VOCAB_SIZE, encode, token_lengths

INPUT_TXT = Path(__file__).resolve().parent.parent / "input.txt"
DEPTH = 8                   # micro-batches read ahead: loading the next shard takes about a second


def stable_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) by `key` alone, in every release of NumPy: Generator.permutation may change
    (NEP 19), the raw stream of Philox may not."""
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(n), kind="stable")


def digest(tokens: np.ndarray) -> str:
    """16 hexadecimal digits of the SHA-256 of the first and the last 65,536 tokens; tells shards apart."""
    return hashlib.sha256(np.concatenate((tokens[:1 << 16], tokens[-(1 << 16):]))).hexdigest()[:16]


class TokenDataset:
    """The sequences of a list of shards (paths, or 1-D uint16 arrays), numbered across epochs.

    Shard i has (len_i - 1) // T sequences of T tokens (the last target needs one token more). Each comes
    once an epoch, in the files' order, or with `shuffle` permuted anew each epoch by the seed: the shards,
    and the sequences within each. After the first epoch these begin at another token, too (a shard's end is
    followed by its beginning), as pieces that never change are learnt by heart. One shard is in memory, two
    while the next is read, three after the first epoch. UserError for too little text, and for a shard that
    is damaged, has ids from `vocab_size` or 50257 on, or changes during the run."""

    def __init__(self, shards: list[Path | np.ndarray], sequence_length: int, seed: int = 0,
                 shuffle: bool = False, vocab_size: int = VOCAB_SIZE):
        self.shards, self.T, self.end = list(shards), sequence_length, min(vocab_size, VOCAB_SIZE)
        self.names = ["the text" if isinstance(shard, np.ndarray) else str(shard) for shard in self.shards]
        self.fingerprint = [self._fingerprint(i) for i in range(len(self.shards))]
        self.counts = [(length - 1) // self.T for _, length, _ in self.fingerprint]
        self.total = sum(self.counts)
        if self.total == 0:
            raise UserError(f"{self.names[0]}: too few tokens for one sequence of {self.T} and its target: "
                            "give more text or a smaller --sequence_length")
        self._order = lambda n, *key: stable_permutation(n, seed, *key) if shuffle else np.arange(n)
        self._sequences = lru_cache(1)(self._sequences)         # of the shard that is being read

    def _fingerprint(self, i):
        """[name, number of tokens, digest] of shard i."""
        tokens = self.shards[i] if isinstance(self.shards[i], np.ndarray) else open_shard(self.shards[i])
        self._checked(i, tokens[:1 << 20])                      # all of them when they are read
        return [Path(self.names[i]).name, len(tokens), digest(tokens)]

    def _checked(self, i, tokens):
        if (largest := tokens.max(initial=0)) >= self.end:
            raise UserError(f"{self.names[i]} holds token {largest}, the model's end at {self.end - 1}: it "
                            "is damaged, or of another tokenizer than GPT-2's, or --vocab_size is too small")
        return tokens

    def _sequences(self, epoch, i):
        """Reads shard i: its sequences as rows (count_i, T+1), and their order in an epoch."""
        shard = self.shards[i]
        tokens = shard if isinstance(shard, np.ndarray) else read_shard(shard)
        if [len(tokens), digest(tokens)] != self.fingerprint[i][1:]:
            raise UserError(f"{self.names[i]} changed during the run: restore it, then run the same command")
        tokens = np.roll(tokens, -self._order(self.T, epoch, i)[0]) if epoch else tokens
        rows = np.lib.stride_tricks.sliding_window_view(self._checked(i, tokens), self.T + 1)   # no copy
        return rows[::self.T], self._order(self.counts[i], epoch, i)

    def read(self, first: int, count: int) -> np.ndarray:
        """Sequences number `first` to `first + count - 1`, each with its last target: uint16 (count, T+1)."""
        parts = []
        while count:
            epoch, position = divmod(first, self.total)
            order = self._order(len(self.shards), epoch)                # of the shards
            ends = np.cumsum(np.array(self.counts)[order])              # of their sequences, in the epoch
            slot = np.searchsorted(ends, position, side="right")
            rows, row_order = self._sequences(epoch, int(order[slot]))
            parts.append(rows[row_order[position - ends[slot]:][:count]])       # those left of this shard
            first, count = first + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)


def updates_of_step(step: int, config) -> int:
    """Optimizer updates of a step: --updates_per_step, half as many after a third of the steps, a quarter
    after two, but at least one. So the batch of an update grows over the run, as in record 46."""
    return max(1, config.updates_per_step >> min(2, 3 * step // config.max_steps))


def divide_update(config, updates: int, ranks: int, batch_size: int) -> tuple[int, int]:
    """(B, n): each rank's sequences of one of a step's equal `updates`, as n micro-batches of B sequences, at
    most `batch_size`. UserError if they do not divide."""
    total_batch_size, T = config.total_batch_size, config.sequence_length
    unit = T * updates * ranks
    rows, rest = divmod(total_batch_size, unit)
    if rest or not rows:
        near = " or ".join(str(n * unit) for n in (rows, rows + 1) if n)
        raise UserError(f"--total_batch_size {total_batch_size} does not divide into sequences of {T} "
                        f"tokens, {ranks} process(es), {updates} update(s) a step: give {near}")
    B = next(d for d in range(max(1, min(rows, batch_size)), 0, -1) if rows % d == 0)
    return B, rows // B


def micro_batches(dataset: TokenDataset, config, batch_size: int, step: int = 0, rank: int = 0,
                  ranks: int = 1) -> Iterator[np.ndarray]:
    """Yields a rank's micro-batches of at most batch_size sequences from `step` on, indefinitely: uint16 (B,
    T+1), the last target included. Step s has the sequences [s N, (s + 1) N) of the dataset, where N =
    total_batch_size / T; of its m-th micro-batches rank r has the B from number s N + (m ranks + r) B on."""
    N = config.total_batch_size // config.sequence_length
    for s in itertools.count(step):
        updates = updates_of_step(s, config)
        B, n = divide_update(config, updates, ranks, batch_size)
        for m in range(updates * n):
            yield dataset.read(s * N + (m * ranks + rank) * B, B)


def read_ahead(batches: Iterator[np.ndarray], pin: bool) -> Iterator[torch.Tensor]:
    """The same as int32 tensors, made by a thread that is DEPTH ahead; pinned, so that their copy to a GPU
    overlaps with its work."""
    def load():
        rows = torch.from_numpy(next(batches).astype(np.int32))
        return rows.pin_memory() if pin else rows
    pool = ThreadPoolExecutor(1, "read ahead")
    try:
        ahead = deque(pool.submit(load) for _ in range(DEPTH))
        while True:
            ahead.append(pool.submit(load))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def to_device(rows, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens (B, T+1) -> inputs x and targets y, int64 (B, T) each, on `device`."""
    rows = torch.as_tensor(rows, dtype=torch.int32).to(device, non_blocking=True).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True)
class Data:
    """What a run reads."""
    train: TokenDataset
    val: TokenDataset | None
    val_count: int              # sequences of one validation, the first of `val`

    def fingerprints(self) -> dict[str, list]:
        """{split: [name, tokens, digest] of each shard}."""
        return {"train": self.train.fingerprint} | ({"val": self.val.fingerprint} if self.val else {})

    @cached_property
    def bits_per_byte(self) -> float:
        """Of a loss of one nat a token, over the bytes of the validation targets (<|endoftext|> has none). It
        compares tokenizers and texts. nan where tokens are not GPT-2's."""
        if not self.val or self.val.end < VOCAB_SIZE:
            return math.nan
        targets = self.val.read(0, self.val_count)[:, 1:]
        return targets.size / (math.log(2) * max(1, token_lengths()[targets].sum().item()))


def open_data(config) -> Data:
    """What a completed train_gpt2.Config reads: one batch of input.txt, or the shards of --data."""
    T, vocab_size = config.sequence_length, config.vocab_size
    if config.overfit:
        with readable(INPUT_TXT, "restore it with `git checkout -- input.txt`"):
            text = INPUT_TXT.read_text(encoding="utf-8")
        need = config.total_batch_size + 1
        tokens = encode(text[:20 * need])[:need]        # one epoch is one batch: 4 sequences of 32 tokens
        return Data(TokenDataset([tokens], T, vocab_size=vocab_size), None, 0)
    train = TokenDataset(list_shards(config.data, "train"), T, config.seed, config.shuffle, vocab_size)
    if not config.val_every:
        return Data(train, None, 0)
    val = TokenDataset(list_shards(config.data, "val"), T, vocab_size=vocab_size)
    return Data(train, val, min(val.total, max(1, config.val_tokens // T)))
