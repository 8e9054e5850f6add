"""A stream of tokens -> shards in a folder, and the manifests by which a killed run resumes."""
import errno
import hashlib
import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from corpus.encoding import Tokens
from corpus.sources import DAMAGED_CURSOR, TASK, difference
from runtime.cli import UserError, safe_repr
from runtime.files import read_text, readable, remove_leftovers, replace_file, writable
from runtime.shards import MANIFEST_NAME, SHARD_NAME, open_shard, write_shard
from runtime.tokenizer import EOT

VAL_SEED = 1337                 # draws the validation tokens
DAMAGED = "choose another --out, or remove {} to start again"


def part_name(part: tuple[int, int] | None) -> str:
    """'_p03of16' of (3, 16): these sort by number. '' without parts."""
    return f"_p{part[0]:0{len(str(part[1] - 1))}d}of{part[1]}" if part else ""


def manifest_of(shard: Path) -> Path:
    """The manifest that lists a shard, or is to list it."""
    found = re.search(r"_p\d+of\d+(?=_)", shard.name)
    return shard.with_name(f"manifest{found[0] if found else ''}.json")


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifests(out: Path) -> dict[str, dict]:
    """{name: content} of the manifests in a folder. UserError if one is damaged."""
    manifests = {}
    with writable(out):
        for path in sorted(out.glob("manifest*.json")):
            if MANIFEST_NAME.fullmatch(path.name):
                # suppress: the command of another part may just have removed its own
                with readable(path, DAMAGED.format(out)), suppress(FileNotFoundError):
                    manifests[path.name] = json.loads(read_text(path, errors="strict"))
                    if not isinstance(manifests[path.name], dict):
                        raise ValueError("it is not a manifest")
    return manifests


def write_manifest(path: Path, content: dict) -> None:
    replace_file(path, lambda file: file.write(json.dumps(content, indent=1).encode()))


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


def cut(parts: list[np.ndarray], edges: np.ndarray) -> list[list[np.ndarray]]:
    """`parts` one after the other (1-D), cut at the places `edges`: the pieces, each as views in a list."""
    pieces, at = [[] for _ in range(len(edges) + 1)], 0
    for part in parts:
        first, last = np.searchsorted(edges, [at, at + len(part)], side="right")      # those at `at` are past
        for i, view in enumerate(np.split(part, edges[first:last] - at), first):
            pieces[i].append(view)
        at += len(part)
    return pieces


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
        self.has_validation, self.val_is_guess = not part or part[0] == 0, val_is_guess
        most = settings["max_tokens"]
        self.max_tokens = share(most, part or (0, 1)) if most else math.inf
        settings = {"version": 1, **settings}
        if part:                                  # what a part has depends on the size of a task
            settings |= {"parts": part[1], "part": part[0], "task": TASK}
        if self.has_validation and val_seed is not None:
            settings["val_seed"] = val_seed
        # in the file a cursor is a `mark`, and a document a `unit`: those of earlier versions are read
        self.manifest = {**settings, "complete": False, "tokens": 0, "mark": None, "shards": []}
        self.document, self.offset, self.total = 0, 0, 0        # next: token `offset` of document `document`
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            self._begin(settings)
            if not self.manifest["complete"]:
                if not os.access(out, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                remove_leftovers(out, rf"{re.escape(self.prefix)}_(train|val)_\d+\.(npy|bin)|"
                                      rf"{re.escape(self.path.name)}")
        self._make_space()

    def _begin(self, settings):
        """Writes the manifest if there is none: a kill must not leave shard 0 without. Then resumes from it.
        UserError if the folder holds anything but shards of these settings."""
        if not self.path.exists():
            for path in self.out.iterdir():
                if SHARD_NAME.match(path.name) and not (manifest := manifest_of(path)).exists():
                    raise UserError(f"{self.out} already holds shards without a {manifest.name}: choose "
                                    f"another --out")
            write_manifest(self.path, self.manifest)
        manifests = read_manifests(self.out)      # after it: of two commands at once, one sees the other
        for name, found in manifests.items():
            if "pretokenized" in found:
                raise UserError(f"{self.out} holds fetched shards of {safe_repr(found['pretokenized'])}: "
                                f"choose another --out")
            if name != self.path.name and not ("parts" in settings and "parts" in found):
                kind = "parts (--part)" if "parts" in found else "shards without parts"
                raise UserError(f"{self.out} holds {kind} of {name}: choose another --out")
            for key, value in settings.items():
                # the number is each part's own; val_seed is part 0's, and earlier versions had none
                if key == "part" or key == "val_seed" and key not in found:
                    continue
                if found.get(key) != value:
                    words = "number of parts" if key == "parts" else key
                    raise UserError(f"{self.out} was begun with another {words} "
                                    f"({difference(found.get(key), value)}): give the same again, or choose "
                                    f"another --out")
        self._resume(manifests.get(self.path.name, self.manifest))

    def _resume(self, found):
        """Resumes after the shards that the manifest `found` lists. UserError if it is damaged."""
        with readable(self.path, DAMAGED.format(self.out)):
            shards = [(self.out / Path(s["file"]).name, s["tokens"], s["end"]["unit"], s["end"]["token"])
                      for s in found["shards"]]
            numbers = [(found["mark"] or [0])[0], *(n for shard in shards for n in shard[1:])]
            if not all(type(n) is int and n >= 0 for n in numbers) or type(found["complete"]) is not bool:
                raise ValueError("`mark`, `complete` or a number of a shard is wrong")
            ends = [shard[2:] for shard in shards]
            if ends != sorted(set(ends)):
                raise ValueError("a shard ends before the one before it")
        for path, tokens, self.document, self.offset in shards:
            if len(open_shard(path)) != tokens:
                raise UserError(f"{path} is not the shard that {self.path.name} describes: remove {self.out}")
            self.total += tokens
        self.manifest = found

    def add(self, batch: Tokens) -> None:
        """Appends the next documents, up to max_tokens. Writes a full shard when more tokens come."""
        tokens, lengths, cursors = batch
        first, at, ends = self.document, self.offset, np.cumsum(lengths)
        if at > lengths[0]:
            raise UserError(DAMAGED_CURSOR)
        while True:
            done = int(np.searchsorted(ends, at, side="right"))
            self.document, self.offset = first + done, at - int(ends[done - 1] if done else 0)
            for n, state in cursors:
                if n <= done:                     # the last of these is written with the shard
                    self.manifest["mark"] = first + n, state
            if at == len(tokens) or self.total >= self.max_tokens:
                return
            if self.space == 0:
                self._write()
            n = min(self.space, self.max_tokens - self.total, len(tokens) - at)
            self.parts.append(tokens[at:at + n])
            at, self.total, self.space = at + n, self.total + n, self.space - n

    def finish(self) -> None:
        """Writes the last shard. A corpus that fits into the validation shard is split 1 : 9 instead."""
        if self._is_first() and self.total < 20:
            raise UserError(f"only {self.total} tokens of text, too few for a training and a validation "
                            f"shard: give more text")
        if self.parts:
            self._write(is_last=True)
        self.manifest |= {"complete": True, "mark": None}
        write_manifest(self.path, self.manifest)

    def _is_first(self):
        return self.has_validation and not self.manifest["shards"]

    def _make_space(self):
        """`space`: tokens until the next write, of which `parts` are collected."""
        self.parts, self.space = [], self.manifest["shard_size"]
        if self._is_first():
            self.space = self.manifest["val_tokens"] + (self.space if "val_seed" in self.manifest else 0)

    def _write(self, is_last=False):
        """Writes the collected tokens as the next shard, or as the first ones, then the manifest."""
        manifest, new = self.manifest, []
        first = len(manifest["shards"]) + (not self.has_validation)
        divides = self._is_first() and (is_last or "val_seed" in manifest)
        for i, parts in enumerate(self._divide(is_last) if divides else [self.parts]):
            split = "train" if first + i else "val"
            name = f"{self.prefix}_{split}_{first + i:06d}.{manifest['format']}"
            write_shard(self.out / name, *parts)
            new.append({"file": name, "split": split, "tokens": sum(map(len, parts)),
                        "sha256": file_sha256(self.out / name), "end": {"unit": 0, "token": i}})
        # the manifest gets all of these or none: only the last one's end is where a run resumes
        new[-1]["end"] = {"unit": self.document, "token": self.offset}
        manifest["shards"] += new
        manifest["tokens"] = self.total
        write_manifest(self.path, manifest)
        self._make_space()

    def _divide(self, is_last):
        """The first shards: of the collected tokens those for validation, then those for training."""
        val, size, seed = (self.manifest.get(key) for key in ("val_tokens", "shard_size", "val_seed"))
        if self.val_is_guess and is_last and seed is not None:
            val = min(val, max(self.total // 10, min(20, self.total // 2)))
        val = val if val < self.total else self.total // 10
        if seed is None:
            edges = np.array([0, val])
        else:
            ends = np.cumsum([len(part) for part in self.parts])
            starts = np.concatenate([np.flatnonzero(part == EOT) + end - len(part)
                                     for part, end in zip(self.parts, ends, strict=True)])
            edges = draw_validation(starts, self.total, val, seed).reshape(-1)
        pieces = cut(self.parts, edges)
        val, train = ([view for piece in pieces[i::2] for view in piece] for i in (1, 0))
        return [val, *cut(train, np.arange(size, sum(map(len, train)), size))]
