"""Shards -> micro-batches.

The tokens of a step are a pure function of the shards, the seed, the step and the batch schedule:
the same for any number of ranks, any micro-batch and after any resume.
"""
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from runtime.cli import RunError, UserError
from runtime.files import is_there, reading
from runtime.recipe import BatchSchedule
from runtime.shards import count_tokens, list_shards, read_shard, unfinished
from runtime.tokenizer import EOT, VOCAB_SIZE, encode, token_lengths, tokenizer

INPUT_TXT = Path(__file__).resolve().parent.parent / "input.txt"
DEPTH = 8               # micro-batches read ahead: loading the next shard takes about a second
DIGEST_TOKENS = 65_536  # of each end of a shard
SAMPLE_TOKENS = 1 << 20
LARGEST_IN_MEMORY = 2**27       # tokens, 268 MB: of a longer shard each sequence is read by itself
CHARACTERS_PER_TOKEN = 20       # more than any English text needs
PROMPT_TOKENS = 24              # at most, of a prompt that the validation shards give


def stable_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on `key` alone, in every release of NumPy."""
    # Generator.permutation may change between releases (NEP 19), the raw stream of Philox may not.
    generator = np.random.Philox(np.random.SeedSequence(key))
    return np.argsort(generator.random_raw(n), kind="stable")


def digest(first: np.ndarray, last: np.ndarray) -> str:
    """16 hexadecimal digits that tell shards apart: of the SHA-256 of their two ends.

    `first` begins and `last` ends like the shard.
    """
    ends = np.concatenate((first[:DIGEST_TOKENS], last[-DIGEST_TOKENS:]))
    return hashlib.sha256(ends).hexdigest()[:16]


class TokenDataset:
    """The sequences of a list of shards, numbered across epochs: each comes once per epoch.

    A shard is a path or a 1-D uint16 array. Shard i has (len_i - 1) // T sequences of T tokens; the
    last target needs one token more. Without `shuffle` the sequences come in the order of the
    files. With it, each epoch permutes the shards, and the sequences of every shard, by the seed.

    One shard is in memory, and two while the next one is read. Of one that is longer than
    LARGEST_IN_MEMORY, such as nanoGPT's 18 GB of OpenWebText, each sequence is read from the disk
    when its turn comes. UserError for too little text, and for a shard that is damaged, has ids
    that the model lacks, or changes its length or ends during the run.
    """

    def __init__(
        self,
        shards: list[Path | np.ndarray],
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = False,
        vocab_size: int = VOCAB_SIZE,
    ):
        self.shards = list(shards)
        self.T = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.vocab_end = min(vocab_size, VOCAB_SIZE)    # the first id that must not occur

        self.names = []
        for shard in self.shards:
            self.names.append("the text" if isinstance(shard, np.ndarray) else str(shard))
        self.fingerprint = [self._fingerprint(i) for i in range(len(self.shards))]

        # How many sequences each shard has, and all of them.
        self.counts = [(length - 1) // self.T for _, length, _ in self.fingerprint]
        self.total = sum(self.counts)
        self.backward = 0       # sequences before this number are read from end to start
        if self.total == 0:
            raise UserError(f"{self.names[0]} has too few tokens (found {self.fingerprint[0][1]}, "
                            f"expected at least {self.T + 1} for a sequence and its last target): "
                            "make shards of more text, or lower --sequence_length")

        # A micro-batch takes only a few rows: keep the shard that is being read.
        self._plan = lru_cache(1)(self._plan)

    @property
    def backward_tokens(self) -> int:
        """How many tokens, the first ones of a run, are read from end to start."""
        return self.backward * self.T

    def _fingerprint(self, i):
        """[name, number of tokens, digest] of shard i."""
        shard = self.shards[i]
        if isinstance(shard, np.ndarray):
            length, first, last = len(shard), shard, shard
        else:
            try:
                length = count_tokens(shard)
            except FileNotFoundError:
                raise RunError(f"{shard} was listed and is not there: check the disk or the mount; "
                               "the same command goes on") from None
            first = read_shard(shard, 0, SAMPLE_TOKENS)
            last = read_shard(shard, max(0, length - DIGEST_TOKENS))
        self._check_ids(i, first[:SAMPLE_TOKENS])       # _open has all of them checked
        return [Path(self.names[i]).name, length, digest(first, last)]

    def occurrences(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs: int64 (vocab_size,). Reads all shards."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for shard in self.shards:
            tokens = shard if isinstance(shard, np.ndarray) else read_shard(shard)
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def _check_ids(self, i, tokens):
        largest = tokens.max(initial=0)
        if largest >= self.vocab_end:
            whose = "GPT-2's"
            remedy = "make the shard again with GPT-2's tokenizer"
            if self.vocab_end < VOCAB_SIZE:
                whose = "the model's"
                remedy += ", or raise --vocab_size"
            raise UserError(f"{self.names[i]} contains token {largest}, but {whose} largest token "
                            f"is {self.vocab_end - 1}: {remedy}")

    def _order(self, n, *key):
        if not self.shuffle:
            return np.arange(n)
        return stable_permutation(n, self.seed, *key)

    def _plan(self, epoch, i):
        """(tokens_of, begin, order): how shard i is read in this epoch.

        tokens_of(first, count) are tokens of the shard. Its sequence number n begins at token
        begin + n T. `order` is that of the sequences.
        """
        tokens_of = self._open(i)
        if self._fingerprint(i) != self.fingerprint[i]:
            raise self._changed(i)

        # Later epochs cut the shard at other tokens, so that the model does not learn fixed pieces
        # by heart.
        begin = 0
        if epoch > 0:
            begin = int(self._order(self.T, epoch, i)[0])
        return tokens_of, begin, self._order(self.counts[i], epoch, i)

    def _changed(self, i) -> UserError:
        return UserError(f"{self.names[i]} changed during the run: restore the file, then run the "
                         "same command again")

    def _open(self, i) -> Callable[[int, int], np.ndarray]:
        """A function (first, count) -> tokens of shard i, whose ids are checked."""
        shard = self.shards[i]
        _, length, _ = self.fingerprint[i]
        if not isinstance(shard, np.ndarray) and length > LARGEST_IN_MEMORY:
            def from_disk(first, count):
                tokens = read_shard(shard, first, count)
                if len(tokens) < min(count, length - first):
                    raise self._changed(i)
                self._check_ids(i, tokens)
                return tokens
            return from_disk

        tokens = shard if isinstance(shard, np.ndarray) else read_shard(shard)
        self._check_ids(i, tokens)
        return lambda first, count: tokens[first:first + count]

    def read(self, first: int, count: int) -> np.ndarray:
        """Sequences number `first` to `first + count - 1`: uint16 (count, T+1).

        Each row has T inputs and, one token later, T targets.
        """
        rows = []
        backward = max(0, self.backward - first)
        while count > 0:
            # Locate the sequence `first`: its epoch, its shard, its row there.
            epoch, position = divmod(first, self.total)
            shard_order = self._order(len(self.shards), epoch)
            ends = np.cumsum(np.array(self.counts)[shard_order])
            slot = np.searchsorted(ends, position, side="right")
            shard = int(shard_order[slot])
            first_row = position - (ends[slot] - self.counts[shard])

            # Take sequences from there to the shard's last one, at most `count`.
            tokens_of, begin, order = self._plan(epoch, shard)
            numbers = order[first_row:][:count]
            for number in numbers:
                row = tokens_of(begin + self.T * number, self.T + 1)
                missing = self.T + 1 - len(row)
                if missing > 0:         # the shard's end is followed by its beginning
                    row = np.concatenate((row, tokens_of(0, missing)))
                rows.append(row)
            first += len(numbers)
            count -= len(numbers)

        rows = np.stack(rows)
        rows[:backward] = rows[:backward, ::-1].copy()
        return rows


def micro_batches(
    dataset: TokenDataset,
    schedule: BatchSchedule,
    B: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[np.ndarray]:
    """Yields a rank's micro-batches of `first_step` and all later steps: uint16 (B, T+1)."""
    for step in itertools.count(first_step):
        first = schedule.tokens_before(step) // dataset.T
        end = first + schedule.tokens(step) // dataset.T

        # The ranks take turns: of each B world_size sequences, rank r has the B from number r B on.
        for first_row in range(first + rank * B, end, world_size * B):
            yield dataset.read(first_row, B)


def read_ahead(batches: Iterator[np.ndarray], pin: bool) -> Iterator[torch.Tensor]:
    """The same batches as int32 tensors, made by a thread that is DEPTH of them ahead.

    With `pin` they are in pinned memory, so that copying them to a GPU overlaps with its work.
    """
    def load():
        rows = torch.from_numpy(next(batches).astype(np.int32))
        if pin:
            rows = rows.pin_memory()
        return rows

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
    rows = torch.as_tensor(rows, dtype=torch.int32)

    # From other than pinned memory a Mac's GPU may copy later than the memory is used again (torch
    # before 2.13).
    rows = rows.to(device, non_blocking=rows.is_pinned()).long()

    # Not contiguous(): it would return a single row as it is, with the stride of T+1 tokens, for
    # which torch.compile would compile the model again.
    x = rows[:, :-1].clone(memory_format=torch.contiguous_format)
    y = rows[:, 1:].clone(memory_format=torch.contiguous_format)
    return x, y


class TrainLoader:
    """The micro-batches of this rank, B sequences each, from `first_step` on."""

    def __init__(
        self, dataset: TokenDataset, schedule: BatchSchedule, B: int, first_step: int, process
    ):
        self.dataset = dataset
        self.schedule = schedule
        self.B = B
        self.device = process.device
        self.tokens_of_micro_step = B * dataset.T * process.world_size          # of all ranks

        batches = micro_batches(
            dataset, schedule, B, first_step, process.rank, process.world_size)
        self.batches = read_ahead(batches, pin=process.on_gpu)

    def micro_steps(self, step: int) -> int:
        """How many micro-batches each rank computes in this step."""
        return self.schedule.tokens(step) // self.tokens_of_micro_step

    def tokens_of_step(self, step: int) -> torch.Tensor:
        """All tokens of a step, on all ranks: int64 (sequences, T+1)."""
        T = self.dataset.T
        first, count = self.schedule.tokens_before(step) // T, self.schedule.tokens(step) // T
        return torch.from_numpy(self.dataset.read(first, count).astype(np.int64))

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs x and targets y of the next micro-batch, int64 (B, T) each, on the device."""
        return to_device(next(self.batches), self.device)

    def close(self) -> None:
        self.batches.close()


@dataclass
class Data:
    """What a run reads."""
    train: TokenDataset | None              # None with --eval_only
    val: TokenDataset | None = None         # None without validations
    val_count: int = 0                      # sequences of one validation, the first ones of `val`
    unfinished: str = ""                    # a warning, if the shards are not all there yet

    def fingerprints(self) -> dict[str, list]:
        """{split: [name, tokens, digest] of each shard}."""
        splits = {"train": self.train, "val": self.val}
        return {name: split.fingerprint for name, split in splits.items() if split}

    def record(self) -> dict:
        """What a checkpoint records of the data."""
        return {**self.fingerprints(), "backward_tokens": self.train.backward_tokens}

    @cached_property
    def bits_per_byte(self) -> float:
        """The factor from a validation loss in nats per token to bits per byte of the text.

        Bits per byte can be compared between tokenizers. nan if the tokens are not GPT-2's. The
        loss has the cost of each <|endoftext|>, too, which nanochat and lm-evaluation-harness leave
        out: of documents of 120 tokens ours are 2% more.
        """
        if not self.val or self.val.vocab_end < VOCAB_SIZE:
            return math.nan
        targets = self.val.read(0, self.val_count)[:, 1:]
        num_bytes = token_lengths()[targets].sum().item()       # <|endoftext|> has none
        return targets.size / (math.log(2) * max(1, num_bytes))

    def choose_prompt(self, config) -> str:
        """--sample_prompt, or if that is "auto" the first line of the validation shards.

        "" if the tokens are not GPT-2's, because no text can be written in them.
        """
        if config.vocab_size < VOCAB_SIZE:
            return ""
        if config.sample_prompt == "auto":
            return self.first_line()
        return config.sample_prompt

    def first_line(self) -> str:
        """The first line of the validation shards that is not blank, to begin samples with.

        It has its line end, because training has seen lines with theirs. Of a long line it is the
        first PROMPT_TOKENS tokens. "" without validation shards.
        """
        if not self.val:
            return ""
        tokens = self.val.read(0, 1)[0]
        for document in np.split(tokens, np.flatnonzero(tokens == EOT)):
            text = tokenizer().decode(document[document != EOT].tolist())
            for line in text.splitlines(keepends=True):
                if line.strip():
                    # A cut may divide a character: "ignore" leaves out what it has of it.
                    start = encode(line)[:PROMPT_TOKENS].tolist()
                    return tokenizer().decode(start, errors="ignore")
        return ""


class ValBatches:
    """The batches of a validation that a rank computes: x and y, int64 (B, T), on its device."""

    def __init__(self, data: Data, B: int, process):
        self.data = data
        self.B = B
        self.device = process.device
        self.firsts = range(process.rank * B, data.val_count, process.world_size * B)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in self.firsts:
            # The last batch has as many rows as the others, for the sake of the compiler. The
            # targets of those beyond the end are ignored.
            x, y = to_device(self.data.val.read(first, self.B), self.device)
            y[self.data.val_count - first:] = -1
            yield x, y


def read_data(config) -> Data:
    """The data of a run: the shards of --data, or with --overfit one batch of input.txt."""
    T, vocab_size = config.sequence_length, config.vocab_size
    if config.overfit:
        return Data(TokenDataset(
            [overfit_tokens(config.total_batch_size)], T, vocab_size=vocab_size))

    check_vocabulary(config)
    train = None
    if not config.eval_only:
        train_shards = list_shards(config.data, "train")
        train = TokenDataset(train_shards, T, config.seed, config.shuffle, vocab_size)
    if not config.val_every and not config.eval_only:
        return Data(train, unfinished=unfinished(config.data))

    val = TokenDataset(list_shards(config.data, "val"), T, vocab_size=vocab_size)
    val_count = max(1, config.val_tokens // T)
    return Data(train, val, min(val.total, val_count), unfinished(config.data))


def check_vocabulary(config) -> None:
    """UserError for the tokens of nanoGPT's characters, say, and a model that takes GPT-2's."""
    # Such a folder has a meta.pkl that names the characters. It is not opened: a pickle can run
    # code.
    meta = Path(config.data, "meta.pkl")
    if config.vocab_size >= VOCAB_SIZE and is_there(meta):
        remedy = ("give the number of their tokens, such as --vocab_size 65 for nanoGPT's "
                  "shakespeare_char, with --hellaswag_every 0; or make shards of GPT-2's tokens "
                  "with `python fineweb.py --input YOUR_TEXT`")
        if config.eval_only or config.init != "scratch":
            remedy = "name a model that was trained on these tokens with --init"
        raise UserError(f"{meta} says that the shards beside it are not GPT-2's tokens: {remedy}")


def open_data(config, process) -> Data:
    """read_data. UserError if the ranks have different data; names of files may differ."""
    with process.together():
        data = read_data(config)
    contents = {}
    for split, shards in data.fingerprints().items():
        for i, (_, *content) in enumerate(shards):
            contents[f"{split} shard {i} of --data"] = str(content)
    process.require_same(contents, "copy the same shards to every machine")

    if data.unfinished:
        process.print0(data.unfinished)
    return data


def overfit_tokens(batch_tokens: int) -> np.ndarray:
    """The beginning of input.txt: so many tokens that an epoch is one batch."""
    with reading(INPUT_TXT, "restore the file with `git checkout -- input.txt`"):
        text = INPUT_TXT.read_text(encoding="utf-8")
    count = batch_tokens + 1                    # the last target is one more
    return encode(text[:CHARACTERS_PER_TOKEN * count])[:count]
