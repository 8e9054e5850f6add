"""Files on disk as a source of text. The other source is corpus/hub_source.py.

`read(start, cursor)` of a source yields Pieces of the text, about a batch's or smaller, in a fixed order. The
first document of the first one has number `start`. A large .txt file comes in several pieces. Each of them
counts as a document, and only the first starts one.

With `part=(i, n)` a source is the i-th of n parts of the text. Every document is in exactly one part.
"""
import glob
import hashlib
import os
import shlex
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from corpus.readers import READERS, checked, kind_of, not_utf8, open_bytes, read_txt
from runtime.cli import UserError, safe_repr
from runtime.files import readable

TASK = 1 << 22                  # bytes: about FineWeb's row group. With --part it decides which text is whose
DAMAGED_CURSOR = "the manifest.json of an earlier run is damaged: choose another --out"
TEXT_FIELD = "text"             # FineWeb's column, and the default of --text_field
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars
KINDS = ".txt, .text, .md, .jsonl, .csv, .tsv (also as .gz or .zst) and .parquet"
UNPACKED = {".gz": 3, ".zst": 3, ".parquet": 2}           # bytes of text a byte of the file, about


class Piece(NamedTuple):
    """Successive documents: str, or UTF-8 in memoryviews. `begins`: False if they go on with the one before.

    `cursor`: the source's state before them, or None. Given ["number of documents before", state], a source
    need not read again what came before.
    """
    texts: list
    begins: bool = True
    cursor: object = None


def in_words(setting: object) -> str:
    """A setting of a manifest, which may be damaged: "100", "none", "3 files, first a.txt"."""
    if not isinstance(setting, dict):
        return "none" if setting is None else safe_repr(setting)
    others = "".join(f", {key} {safe_repr(setting[key])}" for key in ("split", "text_field", "revision")
                     if key in setting)
    if "repo" in setting:
        name = f", {safe_repr(setting['name'])}" if "name" in setting else ""
        return safe_repr(setting["repo"]) + name + others
    if not (files := files_of(setting)):
        return safe_repr(setting)
    first = safe_repr(files[0].get("name"))
    return (f"1 file, {first}" if len(files) == 1 else f"{len(files)} files, first {first}") + others


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
            if old == {key: value for key, value in new.items() if key != "byte_order_mark"}:
                return f"{names[0]} begins with a byte-order mark, which earlier versions made a token of"
            return f"{names[0]} instead of {names[1]}" if names[0] != names[1] else f"{names[0]} has changed"
    return "its contents have changed"


class LocalSource:
    """Files on disk, of the KINDS.

    `patterns`: paths, folders or globs. Raises UserError for one without files, for a file that is named and
    of no kind, and for one that is not UTF-8, as far as its beginning tells. `description`: what the manifest
    records. `expected`: about how many tokens there are. `notes`: lines that a user should see. `shuffled`:
    whether the first tokens are as good as any for validation.
    """
    shuffled = False

    def __init__(self, patterns: list[str], text_field: str = TEXT_FIELD, part: tuple[int, int] = (0, 1)):
        self.field, self.part, self.notes = text_field, part, []
        self.paths = [path for pattern in patterns for path in self._find(pattern)]
        self.readers = [READERS[kind_of(path)] for path in self.paths]
        self.description = {"files": [describe(path) for path in self.paths]}
        if text_field != TEXT_FIELD and {*self.readers} != {read_txt}:      # earlier manifests do not name it
            self.description["text_field"] = text_field
        sizes = (file["bytes"] * UNPACKED.get(path.suffix.lower(), 1)
                 for path, file in zip(self.paths, self.description["files"], strict=True))
        self.expected = sum(int(size / BYTES_PER_TOKEN) for size in sizes) // part[1]
        self._look()

    def _find(self, pattern):
        """The files of a path, folder or glob. Notes what is not read."""
        if os.path.isfile(pattern):
            if not kind_of(Path(pattern)):
                raise UserError(f"--input {pattern}: give {KINDS} files, or a folder, in which others are "
                                f"skipped")
            return [Path(pattern)]
        every = os.path.join(glob.escape(pattern), "*") if os.path.isdir(pattern) else pattern
        found = [Path(path) for path in sorted(glob.glob(every, recursive=True))]
        files = [path for path in found if not path.is_dir()]
        others = [path for path in files if not (kind_of(path) and path.is_file())]
        folders = [path for path in found if path.is_dir()] if every != pattern else []
        kinds = ", ".join(sorted({path.suffix or path.name for path in others})[:8])
        count = f"{len(others)} of {len(files)} files"
        skipped = [f"{count} ({kinds}; text is in {KINDS} files)"] if others else []
        if folders:
            skipped.append(f"the folders in it, which --input {shlex.quote(f'{every}*')} would read too")
        if len(others) == len(files):
            raise UserError(f"--input {pattern}: " + (f"nothing to read, only {' and '.join(skipped)}"
                                                      if skipped else "there is no file, check the path"))
        self.notes += [f"--input {pattern}: skipped {' and '.join(skipped)}"] if skipped else []
        return [path for path in files if path not in others]

    def _look(self):
        """Looks at the beginning of each file: its encoding, a byte-order mark, line ends."""
        dos = []
        for path, reader, file in zip(self.paths, self.readers, self.description["files"], strict=True):
            head = beginning(path)
            if head.count(0) > len(head) // 10:   # ASCII in UTF-16 is valid UTF-8, with a NUL a letter
                raise not_utf8(path, head)
            try:
                getincrementaldecoder("utf-8")().decode(head)
            except UnicodeDecodeError as error:
                raise not_utf8(path, head[max(0, error.start - 1000):error.end + 1000]) from None
            if head.startswith(BOM_UTF8):
                file["byte_order_mark"] = "left out"      # earlier versions made a token of it
            dos += [path] if reader == read_txt and b"\r\n" in head else []
        if repeated := len(self.paths) - len({*self.paths}):
            self.notes.append(f"--input: {repeated} files are given more than once, and read as often")
        if dos:
            self.notes.append(f"--input: {len(dos)} of {len(self.paths)} files, first {dos[0]}, have "
                              f"Windows line ends (CRLF). They stay, and a model learns to write them: make "
                              f"them LF with `dos2unix FILE`")

    def read(self, start: int = 0, cursor: list | None = None) -> Iterator[Piece]:
        """A cursor's state is the index of a file. Raises UserError for a file that cannot be read."""
        cursor = cursor or (0, 0)
        if [type(n) for n in cursor] != [int, int] or cursor[1] not in range(len(self.paths)):
            raise UserError(DAMAGED_CURSOR)
        number, first_file = cursor
        for i in range(first_file, len(self.paths)):
            path, reader, state, begins = self.paths[i], self.readers[i], i, True
            with checked(path):
                for texts in reader(path, TASK, lambda task, i=i: self._is_ours(i + task), self.field):
                    skip = max(0, min(len(texts), start - number))
                    number += len(texts)
                    if texts[skip:]:
                        yield Piece(texts[skip:], begins, None if skip else state)
                    if texts:
                        state, begins = None, reader != read_txt

    def _is_ours(self, number):
        return number % self.part[1] == self.part[0]


def beginning(path: Path) -> bytes:
    """The first 64 KiB of a file's text, before it is decoded; of .parquet nothing."""
    if kind_of(path) == ".parquet":
        return b""
    with checked(path), open_bytes(path) as file:
        return file.read(1 << 16)


def describe(path: Path, size: int = 1 << 16) -> dict:
    """For the manifest. The SHA-256 of a file's first and last 64 KiB notices another of its name, at no
    cost."""
    with readable(f"--input {path}", "give a file you may read, or leave it out", OSError):
        with open(path, "rb") as file:
            head, total = file.read(size), path.stat().st_size
            file.seek(max(0, total - size))
            return {"name": path.name, "bytes": total,
                    "sha256_of_ends": hashlib.sha256(head + file.read(size)).hexdigest()}
