"""Files on disk as a source of text. The other source is corpus/hub_source.py.

`read(start, cursor)` of a source yields its documents as Pieces in a fixed order, from number `start` on. A
large .txt file comes in several pieces: each of them counts as a document, and only the first begins one.
`description`: what the manifest records of it. `expected`: about how many tokens there are, math.inf if that
is unknown. `notes`: lines that a user should see. `shuffled`: whether the first tokens are as good as any for
validation.

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

from corpus.readers import READERS, checked, kind_of, not_utf8, open_bytes, read_parquet, read_txt
from runtime.cli import UserError, safe_repr

TASK = 1 << 22                  # bytes: about FineWeb's row group. With --part it decides which text is whose
DAMAGED_CURSOR = "the manifest.json of an earlier run is damaged: choose another --out"
TEXT_FIELD = "text"             # FineWeb's column, and the default of --text_field
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars
ENDS = 1 << 16                  # bytes of each end of a file that are looked at before anything is written
KINDS = ".txt, .text, .md, .jsonl, .csv, .tsv (also as .gz or .zst) and .parquet"


class Piece(NamedTuple):
    """A document: str, or UTF-8 in a memoryview. `begins`: False if it continues the one before.

    `cursor`: the source's state before it, or None. Given ["number of documents before", state], a source
    need not read again what came before.
    """
    text: str | memoryview
    begins: bool = True
    cursor: object = None


def text_bytes(name: str, size: int) -> int:
    """About how many bytes of text a file of `size` bytes holds."""
    return size * {".gz": 3, ".zst": 3, ".parquet": 2}.get(Path(name).suffix.lower(), 1)


def difference(found: object, ours: object) -> str:
    """Where a setting in the manifest of an earlier run, which may be damaged, first differs from ours:
    '2000 instead of 3000', 'files: a.txt: bytes: 7 instead of 8', 'repo: none instead of a/b'."""
    if isinstance(found, dict) and isinstance(ours, dict):
        key = next((key for key in {**ours, **found} if found.get(key) != ours.get(key)), "")
        return f"{safe_repr(key)}: {difference(found.get(key), ours.get(key))}"
    if isinstance(found, list) and isinstance(ours, list):            # of files
        if len(found) != len(ours):
            return f"{len(found)} instead of {len(ours)}"
        old, new = next(pair for pair in zip(found, ours, strict=True) if pair[0] != pair[1])
        return f"{new['name']}: {difference(old, new)}"
    return " instead of ".join("none" if value is None else safe_repr(value) for value in (found, ours))


class LocalSource:
    """Files on disk. `patterns`: paths, folders or globs. UserError for one without files of the KINDS, and
    for a file that is not UTF-8, as far as its beginning tells."""
    shuffled = False

    def __init__(self, patterns: list[str], text_field: str = TEXT_FIELD, part: tuple[int, int] = (0, 1)):
        self.field, self.part, self.notes, self.crlf = text_field, part, [], []
        self.paths = [path for pattern in patterns for path in self._find(pattern)]
        self.readers = [READERS[kind_of(path)] for path in self.paths]
        self.description = {"files": [*map(self._describe, self.paths, self.readers)]}
        if text_field != TEXT_FIELD and {*self.readers} != {read_txt}:      # earlier manifests do not name it
            self.description["text_field"] = text_field
        sizes = (text_bytes(file["name"], file["bytes"]) for file in self.description["files"])
        self.expected = sum(int(size / BYTES_PER_TOKEN) for size in sizes) // part[1]
        if self.crlf:
            self.notes.append(f"--input: {len(self.crlf)} of {len(self.paths)} files, first {self.crlf[0]}, "
                              f"have Windows line ends (CRLF). They stay, and a model learns to write them: "
                              f"make them LF with `dos2unix FILE`")

    def _find(self, pattern):
        """The files of a path, folder or glob. Notes what is not read."""
        is_folder = os.path.isdir(pattern)
        every = os.path.join(glob.escape(pattern), "*") if is_folder else pattern
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(every, recursive=True))
        files = [path for path in map(Path, found) if not path.is_dir()]
        ours = [path for path in files if kind_of(path) and path.is_file()]
        skipped = []
        if others := {*files}.difference(ours):
            kinds = ", ".join(sorted({path.suffix or path.name for path in others})[:8])
            skipped.append(f"{len(others)} of {len(files)} files ({kinds}; text is in {KINDS} files)")
        if is_folder and len(files) < len(found):
            skipped.append(f"the folders in it, which --input {shlex.quote(f'{every}*')} would read too")
        what = " and ".join(skipped)
        if not ours:
            why = f"nothing to read, only {what}" if skipped else "there is no file, check the path"
            raise UserError(f"--input {pattern}: {why}")
        if skipped:
            self.notes.append(f"--input {pattern}: skipped {what}")
        return ours

    def _describe(self, path, reader):
        """What the manifest says of a file: the SHA-256 of its ends notices another of its name, at no cost.
        UserError if its beginning is not UTF-8. Notes Windows line ends."""
        with checked(path):
            with open(path, "rb") as file:
                head, size = file.read(ENDS), path.stat().st_size
                file.seek(max(0, size - ENDS))
                sha256 = hashlib.sha256(head + file.read(ENDS)).hexdigest()
            found = {"name": path.name, "bytes": size, "sha256_of_ends": sha256}
            if reader == read_parquet:
                return found
            with open_bytes(path) as text:
                head = text.read(ENDS)
            if head.count(0) > len(head) // 10:   # ASCII in UTF-16 is valid UTF-8, with NULs
                raise not_utf8(path, head)
            getincrementaldecoder("utf-8")().decode(head)
        if head.startswith(BOM_UTF8):
            found["byte_order_mark"] = "left out"             # earlier versions made a token of it
        if reader == read_txt and b"\r\n" in head:
            self.crlf.append(path)
        return found

    def read(self, start: int = 0, cursor: list | None = None) -> Iterator[Piece]:
        """A cursor's state is the index of a file. Raises UserError for a file that cannot be read."""
        cursor = cursor or (0, 0)
        if [type(n) for n in cursor] != [int, int] or cursor[1] not in range(len(self.paths)):
            raise UserError(DAMAGED_CURSOR)
        (number, first_file), (part, count) = cursor, self.part
        for i in range(first_file, len(self.paths)):
            path, reader, is_first = self.paths[i], self.readers[i], True
            with checked(path):
                for text in reader(path, TASK, lambda task, i=i: (i + task) % count == part, self.field):
                    if number >= start:
                        yield Piece(text, is_first or reader != read_txt, i if is_first else None)
                    number, is_first = number + 1, False
