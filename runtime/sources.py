"""Readers of text: a dataset of the Hugging Face hub, and files on disk.

`documents(start, cursor)` of a source yields (text, starts_document) in a fixed order, from document
number `start` on. `cursors` collects (number, state) pairs: given one of them as `cursor`, a source need
not read again what came before it. A large .txt file comes in several pieces. Each of them is numbered,
and only the first starts a document.
"""
import glob
import hashlib
import io
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from runtime.cli import UserError, safe_repr
from runtime.files import readable
from runtime.hub import need_hub, wait_to_retry

CURSOR_EVERY = 1000             # documents between two cursors of a stream
DAMAGED_CURSOR = "the manifest.json of an earlier run is damaged: choose another --out"
TEXT_FIELD = "text"             # FineWeb's column, and the default of --text_field
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars
MAX_DOCUMENT = 10**9            # characters in memory: a small .gz or .zst can unpack to one endless line
COMPRESSION = {".gz": 3, ".zst": 3, ".parquet": 2}        # bytes of text a byte of the file, about
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)


class HubSource:
    """A dataset of the Hugging Face hub, streamed: its files are not stored on disk.

    `description`: what the manifest records of the source. `expected`: about how many tokens it has.
    """

    def __init__(self, repo: str, name: str):
        self.repo, self.name, self.cursors = repo, name, deque()
        self.description = {"repo": repo, "name": name}
        self.expected = int(re.findall(r"\d+", name)[0]) * 10**9

    def documents(self, start: int = 0, cursor: list | None = None) -> Iterator[tuple[str, bool]]:
        """(text, True) of each document. A dropped connection is retried from the last cursor."""
        if cursor and not (len(cursor) == 2 and isinstance(cursor[1], dict)):
            raise UserError(DAMAGED_CURSOR)
        need_hub(self.repo)
        from datasets import load_dataset
        failures = 0
        while True:
            try:
                stream = load_dataset(self.repo, name=self.name, split="train", streaming=True)
                number, state = cursor or (0, None)
                if state:
                    stream.load_state_dict(state)
                for document in stream:
                    if not isinstance(document.get("text"), str):
                        raise UserError(f"{self.repo}: document {number} has no string `text`")
                    number += 1
                    if number > start:
                        yield document["text"], True
                        start, failures = number, 0
                    if number % CURSOR_EVERY == 0 and hasattr(stream, "state_dict"):
                        cursor = number, stream.state_dict()
                        self.cursors.append(cursor)
                return
            except UserError:
                raise
            except Exception as error:            # network errors come in the classes of many libraries
                wait_to_retry(error, failures, self.repo,
                              f"cannot read {self.repo} from the Hugging Face hub",
                              final=())           # even 403: a stream's signed links expire
                failures += 1


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

    def __init__(self, patterns: list[str], text_field: str = TEXT_FIELD):
        self.paths, self.readers, self.cursors = [], [], deque()
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
            if kind not in READERS:
                raise UserError(f"--input {path}: give .txt, .jsonl or .parquet files, the first two also as "
                                f".gz or .zst")
            self.readers.append(partial(READERS[kind], path))
            if kind != ".txt":
                self.readers[-1] = partial(self.readers[-1], field=text_field)
                if text_field != TEXT_FIELD:      # which manifests of earlier versions do not name
                    self.description["text_field"] = text_field
            with readable(f"--input {path}", "give a file you may read, or leave it out", OSError):
                size, ends = path.stat().st_size, sha256_of_ends(path)
            self.description["files"].append({"name": path.name, "bytes": size, "sha256_of_ends": ends})
            self.expected += int(size * COMPRESSION.get(path.suffix, 1) / BYTES_PER_TOKEN)

    def documents(self, start: int = 0, cursor: list | None = None) -> Iterator[tuple[str, bool]]:
        """A cursor's state is the index of a file. Raises UserError for a file that cannot be read."""
        cursor = cursor or (0, 0)
        if [type(n) for n in cursor] != [int, int] or cursor[1] not in range(len(self.paths)):
            raise UserError(DAMAGED_CURSOR)
        number, first_file = cursor
        for i in range(first_file, len(self.paths)):
            self.cursors.append((number, i))
            with readable(f"--input {self.paths[i]}", "repair it (as UTF-8 text) or leave it out",
                          (OSError, ValueError, NotImplementedError)):    # pyarrow's errors derive from these
                for document in self.readers[i]():
                    number += 1
                    if number > start:
                        yield document


def sha256_of_ends(path: Path, size: int = 1 << 16) -> str:
    """SHA-256 of a file's first and last 64 KiB: notices another file of the same name, at no cost."""
    with open(path, "rb") as file:
        head = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(head + file.read(size)).hexdigest()


def open_text(path: Path) -> io.TextIOWrapper:
    """A UTF-8 text file with its line ends as they are, decompressed if its name ends in .gz or .zst."""
    import pyarrow
    return io.TextIOWrapper(pyarrow.input_stream(str(path)), encoding="utf-8", newline="\n")


def read_txt(path: Path, piece_size: int = 1 << 18) -> Iterator[tuple[str, bool]]:
    """A file as one document in pieces, so that several workers share it and memory stays small.

    A piece ends after a character that is not white space and before a space or line end. Such a cut
    cannot change the tokens: no alternative of GPT-2's pattern matches across it or looks ahead past it.
    """
    parts, first = [], True                       # the text since the last cut
    with open_text(path) as file:
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


def read_jsonl(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    """One document a line: {"text": "..."} if `field` is text; empty lines are skipped."""
    with open_text(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), ""), 1):
            if len(line) == MAX_DOCUMENT:
                raise ValueError(f"line {number} has {MAX_DOCUMENT:,} characters or more")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and field not in row:
                raise no_such_column(path, f", line {number}", field, row)
            if not isinstance(row, dict) or not isinstance(row[field], str):
                raise ValueError(f'line {number} is not JSON of the form {{"{safe_repr(field)}": "..."}}')
            yield row[field], True


def read_parquet(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    """One document a row: column `field`."""
    import pyarrow.parquet
    table = pyarrow.parquet.ParquetFile(path)
    if field not in table.schema_arrow.names:
        raise no_such_column(path, "", field, table.schema_arrow.names)
    # 16 rows at a time: a dictionary-encoded column of half a kilobyte can repeat one huge document
    for batch in table.iter_batches(batch_size=16, columns=[field]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise ValueError(f"its column {safe_repr(field)} holds something that is not a string")
            yield text, True


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
