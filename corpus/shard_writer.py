"""A stream of tokens -> shards in a folder, and the manifests by which a killed run resumes."""
import errno
import json
import math
import os
import re
from collections import deque
from pathlib import Path

import numpy as np

from corpus.encoding import Tokens
from corpus.sources import DAMAGED_CURSOR, TASK, difference
from runtime.cli import UserError, safe_repr
from runtime.files import read_text, readable, remove_leftovers, replace_file, writable
from runtime.shards import SHARD_NAME, open_shard, write_shard
from runtime.tokenizer import EOT

VAL_SEED = 1337                 # draws the validation tokens
PART_NAME = re.compile(r"_p\d+of\d+(?=_|\.json$)")


def part_name(part: tuple[int, int] | None) -> str:
    """'_p03of16' of (3, 16): these sort by number. '' without parts."""
    return f"_p{part[0]:0{len(str(part[1] - 1))}d}of{part[1]}" if part else ""


def share(total: int, part: tuple[int, int]) -> int:
    """What part (i, n) has of `total`: the shares of all parts sum to it."""
    return total // part[1] + (part[0] < total % part[1])


def draw_validation(starts: np.ndarray, total: int, count: int, seed: int) -> np.ndarray:
    """Which `count` of `total` tokens are for validation, of documents that begin at `starts` (1-D): the
    [begin, end] of pieces, in their order (n, 2).

    Documents come at random by `seed`, until there are enough tokens. Of many (if `count` has room for eight
    of their mean length) each is taken whole, up to an eighth of `count`; of few, each gives its share of
    `count`, 256 tokens at least. A piece of a document is from a place at random.
    """
    lengths = np.diff(starts, append=total)
    many = count // 8 >= total / len(starts)
    most = np.maximum(-(-lengths * count // total), count // 8 if many else 256)
    random = np.random.Philox(seed).random_raw(len(starts)) >> 1          # the same in every release of NumPy
    order = np.argsort(random, kind="stable")
    sizes = np.minimum(lengths, most)[order]
    sizes = np.minimum(sizes, count - (np.cumsum(sizes) - sizes))         # the last one is cut
    order, sizes = order[sizes > 0], sizes[sizes > 0]
    free = lengths[order] - sizes
    # not from a document's first token on: training has its beginning
    begins = starts[order] + np.minimum(1 + random[order].astype(np.int64) % np.maximum(free, 1), free)
    by_place = np.argsort(begins)
    return np.stack([begins, begins + sizes], axis=1)[by_place]


def divide(parts: list[np.ndarray], pieces: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(`pieces` (n, 2) of the tokens of `parts`, the rest of them), as views."""
    inside, outside, edges, at = [], [], pieces.reshape(-1), 0
    for part in parts:
        first, last = np.searchsorted(edges, [at, at + len(part)], side="right")      # those at `at` are past
        for i, piece in enumerate(np.split(part, edges[first:last] - at), first):
            (inside if i % 2 else outside).append(piece)
        at += len(part)
    return inside, outside


class ShardWriter:
    """Cuts a stream of tokens into shards; manifest.json records where in the source each shard ends.

    Shard 0 is validation: the first `val_tokens`, or with `val_seed` so many that draw_validation takes from
    those of the first two shards. `settings` (source, tokenizer, sizes, format) determine every byte of the
    shards. Files are written atomically. After a kill the same command reads the manifest, resumes
    after the last complete shard, and ends with the same bytes.

    `part` (i, n): this is number i of n commands that write into one folder. Each has names, a manifest and
    a share of max_tokens of its own. Only number 0 makes a validation shard.

    `val_is_guess`: val_tokens is from an estimate of the text's size, and of a text that ends with the first
    shards at most a tenth is taken.
    """

    def __init__(self, out: Path, prefix: str, settings: dict, part: tuple[int, int] | None = None,
                 val_seed: int | None = None, val_is_guess: bool = False):
        self.out, self.prefix = out, prefix + part_name(part)
        self.path = out / f"manifest{part_name(part)}.json"
        self.settings, self.max_tokens = {"version": 1, **settings}, settings["max_tokens"] or math.inf
        if part:
            # what a part has depends on the size of a task
            self.settings |= {"parts": part[1], "part": part[0], "task": TASK}
            self.max_tokens = share(settings["max_tokens"], part) if settings["max_tokens"] else math.inf
        self.has_validation, self.val_is_guess = not part or part[0] == 0, val_is_guess
        if self.has_validation and val_seed is not None:
            self.settings["val_seed"] = val_seed
        # in the file a cursor is a `mark`, and a document a `unit`: those of earlier versions are read
        self.manifest = {**self.settings, "complete": False, "tokens": 0, "mark": None, "shards": []}
        self.document, self.offset, self.total = 0, 0, 0        # next: token `offset` of document `document`
        self.cursors = deque()                                  # (document, state) after the last shard's
        self.parts = []                                         # of the next shard
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            self._begin()
            self.space_left = self._space()
            if not self.manifest["complete"]:
                if not os.access(out, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                remove_leftovers(out, rf"{re.escape(self.prefix)}_(train|val)_\d+\.(npy|bin)|"
                                      rf"{re.escape(self.path.name)}")

    def _begin(self):
        is_new = not self.path.exists()
        for path in self.out.iterdir() if is_new else ():
            of_part = PART_NAME.search(path.name)
            if SHARD_NAME.match(path.name) and not (manifest := self.out / (
                    f"manifest{of_part[0] if of_part else ''}.json")).exists():
                raise UserError(f"{self.out} already holds shards without a {manifest.name}: choose another "
                                f"--out")
        if not is_new:
            self._resume()
            self._check_others()                  # before this command's settings replace those of an earlier
        if not self.manifest["shards"]:
            self._save()                          # first: a kill must not leave shard 0 without a manifest
        try:
            self._check_others()                  # after it: of two commands at once, one sees the other
        except UserError:
            if is_new:
                self.path.unlink()
            raise

    def _resume(self):
        """Reads the manifest of an earlier run. UserError if it is damaged or has other settings."""
        with readable(self.path, f"choose another --out, or remove {self.out} to start again"):
            found = json.loads(read_text(self.path, errors="strict"))
            if "pretokenized" in found:
                raise UserError(f"{self.out} holds fetched shards of {safe_repr(found['pretokenized'])}: "
                                f"choose another --out")
            shards = [(self.out / Path(s["file"]).name, s["tokens"], s["end"]["unit"], s["end"]["token"])
                      for s in found["shards"]]
            numbers = [(found["mark"] or [0])[0], *(n for shard in shards for n in shard[1:])]
            if not all(type(n) is int and n >= 0 for n in numbers) or type(found["complete"]) is not bool:
                raise ValueError("`mark`, `complete` or a number of a shard is wrong")
            ends = [shard[2:] for shard in shards]
            if ends != sorted(set(ends)):
                raise ValueError("a shard ends before the one before it")
        # unlisted shards: it was killed between them and its manifest
        if not shards and not self._unlisted():
            return
        if "val_seed" not in found:
            self.settings.pop("val_seed", None)   # begun by an earlier version
        self._compare(found, self.out)
        for path, tokens, self.document, self.offset in shards:
            if len(open_shard(path)) != tokens:
                raise UserError(f"{path} is not the shard that {self.path.name} describes: remove {self.out}")
            self.total += tokens
        self.manifest = found

    def _unlisted(self):
        """Whether the folder has shards of this command, or of one with the same manifest, while it lists
        none."""
        own = PART_NAME.search(self.path.name)
        return any(SHARD_NAME.match(path.name) and (found and found[0]) == (own and own[0])
                   for path in self.out.iterdir() for found in [PART_NAME.search(path.name)])

    def _compare(self, found, what, but=()):
        """UserError if a setting in the manifest `found` differs from ours."""
        for key, value in self.settings.items():
            if key not in but and (before := found.get(key)) != value:
                name = "number of parts" if key == "parts" else key
                raise UserError(f"{what} was begun with another {name} ({difference(before, value)}): "
                                f"give the same again, or choose another --out")

    def _check_others(self):
        """UserError if the folder also holds a whole corpus, or parts of another."""
        for path in sorted(self.out.glob("manifest*.json")):
            is_part = PART_NAME.search(path.name)
            if path == self.path or not (is_part or path.name == "manifest.json"):
                continue
            found = read_manifest(path)
            if not (is_part and "part" in self.settings):
                unused = f", or remove {path.name}, which lists no shard, if its command does not run"
                raise UserError(f"{self.out} holds {'parts (--part)' if is_part else 'shards without parts'} "
                                f"of {path.name}: choose another --out"
                                f"{unused * bool(found and found.get('shards') == [])}")
            if found:
                self._compare(found, path, but=["part", "val_seed"])

    def add(self, batch: Tokens) -> None:
        """Appends the next documents, up to max_tokens. Writes a full shard when more tokens come."""
        tokens, lengths, cursors = batch
        self.cursors.extend((self.document + n, state) for n, state in cursors)
        if not lengths:
            return
        first, at, ends = self.document, self.offset, np.cumsum(lengths)
        if at > lengths[0]:
            raise UserError(DAMAGED_CURSOR)
        while at < len(tokens) and self.total < self.max_tokens:
            if self.space_left == 0:
                self._move(first, at, ends)
                self._write()
            n = min(self.space_left, self.max_tokens - self.total, len(tokens) - at)
            self.parts.append(tokens[at:at + n])
            at += n
            self.total += n
            self.space_left -= n
        self._move(first, at, ends)

    def _move(self, first, at, ends):
        """To token `at` of documents from number `first` on, which end at `ends`."""
        i = int(np.searchsorted(ends, at, side="right"))
        self.document, self.offset = first + i, at - int(ends[i - 1] if i else 0)

    def _space(self):
        """Tokens to collect before the next write."""
        if not self.has_validation or self.manifest["shards"]:
            return self.settings["shard_size"]
        return self.settings["val_tokens"] + ("val_seed" in self.settings) * self.settings["shard_size"]

    def finish(self) -> None:
        """Writes the last shard. A corpus that fits into the validation shard is split 1 : 9 instead."""
        if self.has_validation and not self.manifest["shards"] and self.total < 20:
            raise UserError(f"only {self.total} tokens of text, too few for a training and a validation "
                            f"shard: give more text")
        if self.parts:
            self._write(is_last=True)
        self.manifest |= {"complete": True, "mark": None}
        self._save()

    def _write(self, is_last=False):
        """Writes the collected tokens as the next shard, or as the first two, then the manifest."""
        end_of_all, seed = {"unit": self.document, "token": self.offset}, self.settings.get("val_seed")
        while self.cursors and self.cursors[0][0] <= self.document:
            self.manifest["mark"] = self.cursors.popleft()
        if self.has_validation and not self.manifest["shards"] and (is_last or seed is not None):
            val, train = self._divide(seed, is_last)
            size = self.settings["shard_size"]
            if sum(map(len, train)) > size:
                train = np.concatenate(train)
                shards = [val, *([train[at:at + size]] for at in range(0, len(train), size))]
            else:
                shards = [val, train]
            # the manifest gets all of these or none: only the last one's end is where a run goes on
            for i, parts in enumerate(shards[:-1]):
                self._write_shard(parts, {"unit": 0, "token": i})
            self.parts = shards[-1]
        self._write_shard(self.parts, end_of_all)
        self.manifest["tokens"] = self.total
        self._save()
        self.parts, self.space_left = [], self._space()

    def _divide(self, seed, is_last):
        """The collected tokens: those for validation, those for training."""
        ends = np.cumsum([len(part) for part in self.parts])
        starts = np.concatenate([np.flatnonzero(part == EOT) + end - len(part)
                                 for part, end in zip(self.parts, ends, strict=True)])
        total, val = int(ends[-1]), self.settings["val_tokens"]
        if self.val_is_guess and is_last and seed is not None:
            val = min(val, max(total // 10, min(20, total // 2)))
        val = val if val < total else total // 10
        pieces = np.array([[0, val]]) if seed is None else draw_validation(starts, total, val, seed)
        return divide(self.parts, pieces)

    def _write_shard(self, parts, end):
        index = len(self.manifest["shards"]) + (not self.has_validation)
        split = "train" if index else "val"
        name = f"{self.prefix}_{split}_{index:06d}.{self.settings['format']}"
        sha256 = write_shard(self.out / name, *parts)
        self.manifest["shards"].append({"file": name, "split": split, "tokens": sum(map(len, parts)),
                                        "sha256": sha256, "end": end})

    def forget_if_empty(self) -> None:
        """Removes the manifest if there is no shard: it would bind the folder to its settings."""
        # a shard can be there before the manifest lists it: then the same command goes on
        if not self.manifest["shards"] and not self._unlisted():
            self.path.unlink(missing_ok=True)

    def _save(self):
        replace_file(self.path, lambda file: file.write(json.dumps(self.manifest, indent=1).encode()))


def read_manifest(path: Path) -> dict | None:
    """The manifest of another part, None if it is gone. UserError if it is damaged."""
    with readable(path, "run the command of that part again, or choose another --out"):
        try:
            found = json.loads(read_text(path, errors="strict"))
        except FileNotFoundError:
            return None
        if not isinstance(found, dict):
            raise ValueError("it is not a manifest")
        return found


def complete_parts(out: Path, count: int) -> int:
    """How many of `count` parts are complete in a folder."""
    manifests = (read_manifest(out / f"manifest{part_name((i, count))}.json") for i in range(count))
    return sum(found["complete"] is True for found in manifests if found and "complete" in found)
