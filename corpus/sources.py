"""Sources of text: files on disk. The other one is corpus/hub_source.py.

`tasks(start, cursor, size)` of a source yields Tasks in a fixed order: pieces of the text of about `size`
characters, which corpus/encoding.py reads. The first document of the first task has number `start`. A large
.txt file comes in several pieces. Each of them counts as a document, and only the first starts one.

With `part=(i, n)` a source is the i-th of n parts of the text. Every document is in exactly one part.
"""
import glob
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from runtime.cli import UserError, safe_repr
from runtime.files import readable

TASK_SIZE = 1 << 19             # characters
LARGE_TASK = 1 << 22            # with --part, where it decides which text is whose: about FineWeb's row group
MAX_ROWS = 1 << 14              # of a task, however short they are
DAMAGED_CURSOR = "the manifest.json of an earlier run is damaged: choose another --out"
TEXT_FIELD = "text"             # FineWeb's column, and the default of --text_field
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars
MAX_DOCUMENT = 10**9            # characters in memory: a small .gz or .zst can unpack to one endless line
COMPRESSION = {".gz": 3, ".zst": 3, ".parquet": 2}        # bytes of text a byte of the file, about
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """A piece of the text. `read(skip)` yields (texts, start) of its documents but the first `skip`: a list
    of str, or of UTF-8 in memoryviews, and whether each starts a document.

    `cursor`: the source's state before this task, or None. Given ["number of documents before", state], a
    source need not read again what came before.
    """
    read: Callable[[int], Iterator[tuple[list, bool]]]
    skip: int = 0
    cursor: object = None


def given_texts(texts: list[str], start: bool, skip: int) -> Iterator[tuple[list[str], bool]]:
    """Reads a task that holds its text."""
    yield texts[skip:], start


def in_words(setting: object) -> str:
    """A setting of a manifest, which may be damaged: "100", "none", "3 files, first a.txt"."""
    if not isinstance(setting, dict):
        return "none" if setting is None else safe_repr(setting)
    if "repo" in setting:
        return f"{safe_repr(setting['repo'])}, {safe_repr(setting.get('name'))}"
    if not (files := files_of(setting)):
        return safe_repr(setting)
    field = f", text_field {safe_repr(setting['text_field'])}" if "text_field" in setting else ""
    first = safe_repr(files[0].get("name"))
    return (f"1 file, {first}" if len(files) == 1 else f"{len(files)} files, first {first}") + field


def files_of(setting):
    """The list of files in the description of a LocalSource; else, or if it is damaged, none."""
    files = setting.get("files") if isinstance(setting, dict) else None
    return files if isinstance(files, list) and all(isinstance(file, dict) for file in files) else []


def difference(found: object, ours: object) -> str:
    """How a setting in the manifest of an earlier run differs from ours, in words."""
    before, now = in_words(found), in_words(ours)
    if before != now:
        return f"{before}{',' * (', ' in before)} instead of {now}"
    for old, new in zip(files_of(found), files_of(ours), strict=False):
        if old != new:
            names = safe_repr(old.get("name")), safe_repr(new["name"])
            return f"{names[0]} instead of {names[1]}" if names[0] != names[1] else f"{names[0]} has changed"
    return "its contents have changed"


class LocalSource:
    """Files on disk: .txt (one document a file), .jsonl and .parquet (field `text_field`), also .gz and .zst.

    `patterns`: paths, folders or globs. Raises UserError for one without files, and for other formats.
    """

    def __init__(self, patterns: list[str], text_field: str = TEXT_FIELD, part: tuple[int, int] = (0, 1)):
        self.paths, self.plans, self.part = [], [], part
        self.description, self.expected = {"files": []}, 0        # as in HubSource
        for pattern in patterns:
            every = os.path.join(pattern, "*") if os.path.isdir(pattern) else pattern
            found = ([pattern] if os.path.isfile(pattern) else
                     sorted(filter(os.path.isfile, glob.glob(every, recursive=True))))
            if not found:
                raise UserError(f"--input {pattern}: no such file, check the path")
            self.paths += map(Path, found)
        for path in self.paths:
            kind = (path.with_suffix("") if path.suffix in (".gz", ".zst") else path).suffix
            if kind not in PLANS:
                raise UserError(f"--input {path}: give .txt, .jsonl or .parquet files, the first two also as "
                                f".gz or .zst")
            self.plans.append(partial(PLANS[kind], path))
            if kind != ".txt":
                self.plans[-1] = partial(self.plans[-1], field=text_field)
                if text_field != TEXT_FIELD:      # which manifests of earlier versions do not name
                    self.description["text_field"] = text_field
            with readable(f"--input {path}", "give a file you may read, or leave it out", OSError):
                size, ends = path.stat().st_size, sha256_of_ends(path)
            self.description["files"].append({"name": path.name, "bytes": size, "sha256_of_ends": ends})
            self.expected += int(size * COMPRESSION.get(path.suffix, 1) / BYTES_PER_TOKEN)
        self.expected //= part[1]

    def tasks(self, start: int = 0, cursor: list | None = None, size: int | None = None) -> Iterator[Task]:
        """A cursor's state is the index of a file. Raises UserError for a file that cannot be read."""
        cursor = cursor or (0, 0)
        if [type(n) for n in cursor] != [int, int] or cursor[1] not in range(len(self.paths)):
            raise UserError(DAMAGED_CURSOR)
        number, first_file = cursor
        for i in range(first_file, len(self.paths)):
            state = i
            for read, count in self._plan(i, size or TASK_SIZE):
                skip = 0
                if number < start:                # only then are documents counted before they are read
                    n = count()
                    skip = min(n, start - number)
                    number += skip
                    if skip == n:
                        state = None
                        continue
                yield Task(read, skip, None if skip else state)
                state = None

    def _plan(self, i, size):
        """(read, count) of the tasks of file i, as far as they are this part's."""
        index, parts = self.part
        if parts == 1:
            return self.plans[i](size)
        if self.plans[i].func is plan_txt:        # one document, which stays whole
            return self.plans[i](size) if i % parts == index else ()
        # which text is whose depends on the size of the tasks
        return (task for j, task in enumerate(self.plans[i](LARGE_TASK)) if (i + j) % parts == index)


def sha256_of_ends(path: Path, size: int = 1 << 16) -> str:
    """SHA-256 of a file's first and last 64 KiB: notices another file of the same name, at no cost."""
    with open(path, "rb") as file:
        head = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(head + file.read(size)).hexdigest()


def checked(path: Path):
    """Around the reading of an input file: its errors are UserErrors."""
    return readable(f"--input {path}", "repair it (as UTF-8 text) or leave it out",
                    (OSError, ValueError, NotImplementedError))           # pyarrow's errors derive from these


def open_bytes(path: Path):
    """A binary file, decompressed if its name ends in .gz or .zst."""
    import pyarrow
    return pyarrow.input_stream(str(path))


# A plan yields (read, count) for each task of a file: Task.read, and a function that returns the number of
# its documents.

def plan_txt(path: Path, size: int) -> Iterator[tuple[Callable, Callable]]:
    """A task a piece, whatever its `size`."""
    with checked(path):
        for piece, start in read_txt(path):
            yield partial(given_texts, [piece], start), lambda: 1


def read_txt(path: Path, piece_size: int = 1 << 18) -> Iterator[tuple[str, bool]]:
    """A file as one document in pieces, so that several threads share it and memory stays small.

    A piece ends after a character that is not white space and before a space or line end. Such a cut
    cannot change the tokens: no alternative of GPT-2's pattern matches across it or looks ahead past it.
    """
    parts, first = [], True                       # the text since the last cut
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="\n") as file:     # line ends as in it
        while block := file.read(piece_size):
            last = parts[-1][-1] if parts else ""         # the cut may come right after it
            if cut := LAST_CUT.match(last + block):
                end = cut.end() - len(last)
                yield "".join([*parts, block[:end]]), first
                parts, block, first = [], block[end:], False
            parts.append(block)
            if sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError(f"more than {MAX_DOCUMENT:,} characters without the end of a word")
    if parts:
        yield "".join(parts), first


def no_such_column(path: Path, where: str, field: str, names: Iterable[str]) -> UserError:
    """The error of a file without the column `field`. `where`: the line. `names`: of the columns it has."""
    return UserError(f"--input {path}{where}: no column {safe_repr(field)}, only "
                     f"{', '.join(names)[:200] or 'nothing'}: name the right one with --text_field")


def plan_jsonl(path: Path, size: int, field: str) -> Iterator[tuple[Callable, Callable]]:
    """A task some whole lines, as the bytes that they are in the file."""
    with checked(path), open_bytes(path) as file:
        number, parts, kept, data = 1, [], 0, file.read(size)     # number of the first line; since its start
        while data:
            following = file.read(size)
            if end := data.rfind(b"\n") + 1 if following else len(data):
                lines = b"".join([*parts, data[:end]])
                yield partial(read_lines, path, field, number, lines), partial(count_lines, lines)
                number += lines.count(b"\n")
                parts, kept = [], 0
            parts.append(data[end:])
            kept, data = kept + len(data) - end, following
            if kept >= MAX_DOCUMENT:
                raise ValueError(f"line {number} has {MAX_DOCUMENT:,} bytes or more")


def count_lines(lines: bytes) -> int:
    """The number of lines that are not empty."""
    return sum(bool(line.strip()) for line in lines.decode(errors="replace").split("\n"))


def read_lines(path: Path, field: str, number: int, lines: bytes,
               skip: int) -> Iterator[tuple[list[str], bool]]:
    """One document a line: {"text": "..."} if `field` is text; empty lines are skipped. The first line has
    this `number` in the file."""
    with checked(path):
        numbered = ((n, line) for n, line in enumerate(lines.decode().split("\n"), number) if line.strip())
        texts = []
        for n, line in islice(numbered, skip, None):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and field not in row:
                raise no_such_column(path, f", line {n}", field, row)
            if not isinstance(row, dict) or not isinstance(row[field], str):
                raise ValueError(f'line {n} is not JSON of the form {{"{safe_repr(field)}": "..."}}')
            texts.append(row[field])
    yield texts, True


def plan_parquet(path: Path, size: int, field: str) -> Iterator[tuple[Callable, Callable]]:
    """A task some rows of a row group, by the sizes that the file's end states."""
    import pyarrow.parquet
    with checked(path), pyarrow.parquet.ParquetFile(path) as file:
        if field not in file.schema_arrow.names:
            raise no_such_column(path, "", field, file.schema_arrow.names)
        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            columns = (group.column(j) for j in range(group.num_columns))
            there = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
            # in tasks of equal size, up to half as much again as asked for
            rows = max(1, min(MAX_ROWS, math.ceil(group.num_rows / max(1, round(there / size)))))
            reader = RowGroup(path, field, i)
            for first in range(0, group.num_rows, rows):
                n = min(rows, group.num_rows - first)
                yield partial(reader.read, first, n), partial(int, n)


class RowGroup:
    """The column `field` of row group `index`, read forwards: it need not be decoded anew for each task."""

    def __init__(self, path: Path, field: str, index: int):
        self.path, self.field, self.index = path, field, index
        self.batches, self.first, self.batch = None, 0, ()        # first: number of the batch's first row

    def read(self, first: int, count: int, skip: int) -> Iterator[tuple[list[memoryview], bool]]:
        """One document a row: rows `first` to `first + count`."""
        import pyarrow.parquet
        number, end = first + skip, first + count
        with checked(self.path):
            if self.batches is None or number < self.first:
                # 16 rows at a time: a dictionary-encoded column of half a kilobyte can repeat a huge document
                self.first, self.batch = 0, ()
                self.batches = pyarrow.parquet.ParquetFile(self.path).iter_batches(
                    batch_size=16, row_groups=[self.index], columns=[self.field], use_threads=False)
            while number < end:
                while number >= self.first + len(self.batch):
                    self.first += len(self.batch)
                    if (batch := next(self.batches, None)) is None:
                        raise ValueError(f"its row group {self.index} has fewer rows than the file's end "
                                         f"states")
                    self.batch = batch.column(0)
                texts = self.texts(number - self.first, end - number)
                number += len(texts)
                yield texts, True

    def texts(self, first, most):
        """Those of the batch from row `first` on, not copied."""
        import pyarrow
        rows = self.batch.slice(first, most)
        if pyarrow.types.is_dictionary(rows.type):
            rows = rows.dictionary_decode()
        if pyarrow.types.is_string_view(rows.type):
            rows = rows.cast(pyarrow.large_string())
        if rows.null_count or rows.type not in (pyarrow.string(), pyarrow.large_string()):
            raise ValueError(f"its column {safe_repr(self.field)} holds something that is not a string")
        rows.validate(full=True)                  # as UTF-8
        _, ends, text = rows.buffers()
        ends = np.frombuffer(ends, np.int32 if rows.type == pyarrow.string() else np.int64)
        ends, text = ends[rows.offset:rows.offset + len(rows) + 1].tolist(), memoryview(text or b"")
        return [text[first:end] for first, end in pairwise(ends)]


PLANS = {".txt": plan_txt, ".jsonl": plan_jsonl, ".parquet": plan_parquet}
