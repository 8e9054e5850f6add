"""Files of text -> documents, in UTF-8.

Memory stays small, whatever the size of a file: about a megabyte of it is read at a time. A
reader here takes the path of a file and yields pairs: (whether a document begins, its text or
the next piece of it).
"""
import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import safe_repr
from runtime.files import reading
from runtime.tokenizer import LAST_CUT, replace_surrogates

BLOCK = 1 << 20                 # bytes, or characters of a .txt, that are read and encoded at once
# Characters of a document in memory. A small .gz or .zst can unpack to one endless line.
MAX_DOCUMENT = 10**9
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
Pieces = Iterator[tuple[bool, bytes | memoryview]]


@dataclass(frozen=True)
class Layout:
    """Where documents stand in a file: the flags --text_field and --separator."""
    text_field: str = "text"
    separator: str = ""         # between the documents of a .txt; empty: the file is one document


def open_bytes(path: Path) -> io.BufferedReader:
    """A binary file behind its byte-order mark, decompressed if its name ends in .gz or .zst."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression:
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression=compression)
    else:
        stream = io.FileIO(path)
    file = io.BufferedReader(stream, BLOCK)

    # The byte-order mark of UTF-8, which Windows likes to write, is no part of the text.
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


# ----------------------------------------------------------------------------- .txt, .md

def read_text_file(path: Path, layout: Layout) -> Pieces:
    """The documents of a .txt or .md. Line ends beside a separator belong to the layout, so they
    are left out, and white space alone between two of them is no document."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="\n") as file:
        for text, begins, ends in text_pieces(file, layout.separator):
            if layout.separator:
                if begins:
                    text = text.lstrip("\r\n")
                if ends:
                    text = text.rstrip("\r\n")
                if begins and not text.strip():
                    continue
            if text:
                yield begins, text.encode()


def text_pieces(file: io.TextIOWrapper, separator: str) -> Iterator[tuple[str, bool, bool]]:
    """(the next text, whether a document begins with it, whether one ends with it). A long
    document comes in pieces of about a BLOCK, cut where LAST_CUT allows, so that the pieces have
    the tokens of the whole. ValueError for a gigabyte without such a place."""
    text = ""
    begins = True
    for block in iter(partial(read_utf8, file), ""):
        # Before `start` there is no separator and no place for a cut: earlier turns have looked.
        start = max(0, len(text) - len(separator) - 1)
        text += block
        if separator and text.find(separator, start) >= 0:
            *ended, text = text.split(separator)
            start = 0
            for document in ended:
                yield document, begins, True
                begins = True

        # A separator may begin in the last characters.
        cut = LAST_CUT.match(text, start, len(text) - len(separator))
        if cut:
            yield text[:cut.end()], begins, False
            text = text[cut.end():]
            begins = False
        elif len(text) > MAX_DOCUMENT:
            raise ValueError("it has a gigabyte without the end of a word")
    yield text, begins, True


def read_utf8(file: io.TextIOWrapper) -> str:
    """The next BLOCK characters, "" at the end. ValueError for UTF-16, which Windows writes."""
    try:
        block = file.read(BLOCK)
    except UnicodeDecodeError as error:
        if error.start == 0 and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16, expected UTF-8") from None
        raise

    # Without that mark, UTF-16 of plain English is valid UTF-8: each other character is NUL.
    if block.count("\0") > len(block) // 10:
        raise ValueError("it is UTF-16, expected UTF-8")
    return block


# ----------------------------------------------------------------------------- .jsonl

def read_jsonl(path: Path, layout: Layout) -> Pieces:
    """Each line is a document. Python's json is as fast as pyarrow's, and its errors can name the
    line."""
    with open_bytes(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_DOCUMENT), b""), 1):
            if not line.isspace():
                yield True, text_of_json(line, f"line {number}", layout.text_field)


def text_of_json(line: bytes, where: str, field: str) -> bytes:
    """The text of a line of JSON; null is an empty one. ValueError, with `where` the line is, for
    no text."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object; write one object per line, as `jq -c "
                         f"'.[]'` does with an array")
    if field not in row:
        raise ValueError(f"{where} has no field {missing_field(field, row)}")

    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(f"field {safe_repr(field)} of {where} is not text: {safe_repr(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # JSON can escape half of a character, which UTF-8 does not have.
        return replace_surrogates(text).encode()


def missing_field(field: str, names: Iterable[str]) -> str:
    """The end of a message: the missing field, and the first of those that could be meant."""
    found = ", ".join(safe_repr(name)[:20] for name in [*names][:4])
    return f"{safe_repr(field)[:20]}; set --text_field to one of these: {found}"


# ----------------------------------------------------------------------------- .csv

def read_csv(path: Path, layout: Layout) -> Pieces:
    """Each row is a document. The first row names the columns."""
    csv.field_size_limit(MAX_DOCUMENT)

    header = None
    with open_bytes(path) as file:
        rows = csv.reader(csv_lines(file), strict=True)
        while True:
            number = rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise ValueError(f"line {number}: {error}") from None
            if row is None:
                return

            if header is None and row:
                header = row
                if layout.text_field not in header:
                    raise ValueError(
                        f"line {number} has no column {missing_field(layout.text_field, header)}")
            elif row:
                if len(row) != len(header):
                    raise ValueError(f"line {number} has {len(row)} cells, but the first row has "
                                     f"{len(header)}")
                yield True, row[header.index(layout.text_field)].encode()


def csv_lines(file: io.BufferedReader) -> Iterator[str]:
    """The lines of a file of text, also those of old Macs, which end with a carriage return.
    ValueError names the one that cannot be read."""
    # What is not UTF-8 becomes surrogates, which a line can be asked for.
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    for number, line in enumerate(iter(partial(text.readline, MAX_DOCUMENT), ""), 1):
        if len(line) == MAX_DOCUMENT:
            raise ValueError(f"line {number} is longer than a gigabyte")
        try:
            line.encode()
        except UnicodeEncodeError:
            raise ValueError(f"line {number} is not UTF-8") from None
        yield line


# ----------------------------------------------------------------------------- .parquet

def read_parquet(path: Path, layout: Layout) -> Pieces:
    """Each row is a document, a view of pyarrow's memory; null is an empty one."""
    import pyarrow
    import pyarrow.parquet

    # Without its default pre_buffer=True reading takes half of the CPU time, as fewer pages are
    # touched.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        names = file.schema_arrow.names
        if layout.text_field not in names:
            raise ValueError(f"it has no column {missing_field(layout.text_field, names)}")

        # Only 64 rows at a time: in a dictionary-encoded column half a kilobyte of file can stand
        # for many copies of a huge document.
        batches = file.iter_batches(batch_size=64, columns=[layout.text_field], use_threads=False)
        for batch in batches:
            yield from column_texts(pyarrow, batch.column(0), layout.text_field)


def column_texts(pyarrow, rows, field: str) -> Pieces:
    """The documents in some rows of the column `field`. ValueError if they are not text in
    UTF-8."""
    if pyarrow.types.is_dictionary(rows.type):
        rows = rows.dictionary_decode()
    if rows.type not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"its column {safe_repr(field)} holds {rows.type}, which is not text")
    rows = rows.cast(pyarrow.large_string())
    if rows.null_count:
        rows = rows.fill_null("")

    # A .parquet may claim to hold text and hold other bytes. This looks whether all of it is UTF-8.
    rows.validate(full=True)

    # Arrow has the texts of all rows in one buffer, and in another the len(rows) + 1 places where
    # they begin and end in it. With views of it, not copies, a whole run takes a fifth less time.
    _, offsets, text = rows.buffers()
    offsets = np.frombuffer(offsets, np.int64)[rows.offset:]
    offsets = offsets[:len(rows) + 1].tolist()
    text = memoryview(text or b"")
    for start, end in pairwise(offsets):
        yield True, text[start:end]


# ----------------------------------------------------------------------------- all of them

READERS = {
    ".txt": read_text_file, ".text": read_text_file, ".md": read_text_file,
    ".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
SUFFIXES = re.compile(r".*?[^/](\.\w+)(\.gz|\.zst)?", re.DOTALL)
TEXT_FILES = {kind for kind, reader in READERS.items() if reader == read_text_file}


def kind_of(path: str | Path) -> str:
    """The suffix that says how a file is read, in lower case: .txt of a.TXT and of a.txt.gz.
    Empty for a file that no reader takes."""
    match = SUFFIXES.fullmatch(str(path).lower())
    if match is None or match[1] not in READERS:
        return ""

    # Of a .parquet pyarrow reads the end first, which a compressed file does not give away.
    if match[1] == ".parquet" and match[2]:
        return ""
    return match[1]


def read_chunks(path: Path, layout: Layout, mark: bytes, name: str) -> Iterator[bytes]:
    """The documents of a file with `mark` before each, joined to chunks of about a BLOCK of
    bytes. UserError, which calls the file `name`, if it cannot be read."""
    reader = READERS[kind_of(path)]
    parts = []
    size = 0

    # pyarrow's errors are derived from these.
    errors = (OSError, ValueError, NotImplementedError)
    with reading(name, "repair the file (as UTF-8 text), or leave it out", errors):
        for begins, text in reader(path, layout):
            if begins:
                parts.append(mark)
            parts.append(text)

            # One more for each document, so that many empty ones fill a chunk, too.
            size += len(text) + 1
            if size >= BLOCK:
                yield b"".join(parts)
                parts = []
                size = 0
        if parts:
            yield b"".join(parts)
