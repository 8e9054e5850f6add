"""Files of text -> documents, in UTF-8.

Memory stays small, whatever the size of a file: about a megabyte of it is read at a time. A
reader here takes the path of a file and yields pairs: (whether a document begins, its text or
the next piece of it).
"""
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import import_package, safe_repr
from runtime.files import readable
from runtime.tokenizer import LAST_CUT, replace_surrogates

BLOCK = 1 << 20                 # bytes, or characters of a .txt, that are read and encoded at once
# Characters of a document in memory. A small .gz or .zst can unpack to one endless line.
MAX_DOCUMENT = 10**9
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
Pieces = Iterator[tuple[bool, bytes | memoryview]]


@dataclass(frozen=True)
class Layout:
    """Where documents stand in a file: the flags --text_field, --separator and --tsv_quotes."""
    text_field: str = "text"
    separator: str = ""         # between the documents of a .txt; empty: the file is one document
    tsv_quotes: bool = False


def open_bytes(path: Path) -> io.BufferedReader:
    """A binary file behind its byte-order mark, decompressed if its name ends in .gz or .zst."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression:
        stream = import_package("pyarrow").input_stream(str(path), compression=compression)
    else:
        stream = io.FileIO(path)
    file = io.BufferedReader(stream, BLOCK)

    # The byte-order mark of UTF-8, which Windows likes to write, is no part of the text.
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


# ----------------------------------------------------------------------------- .txt, .md

def read_text_file(path: Path, layout: Layout) -> Pieces:
    """The documents of a .txt or .md. A long one comes in pieces of about a BLOCK, cut where
    LAST_CUT allows, so that the pieces have the tokens of the whole. ValueError for a gigabyte
    without such a place."""
    begins = True               # whether the next piece is the first one of its document
    parts = []                  # the document's text since the last cut
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="\n") as file:
        for text, ends in split_documents(text_blocks(file), layout.separator):
            parts.append(text)
            if sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError("it has a gigabyte without the end of a word")

            if ends:
                piece = "".join(parts)
                parts = []
            else:
                cut = last_cut(parts)
                if cut is None:
                    continue
                piece = "".join([*parts[:-1], text[:cut]])
                parts = [text[cut:]]

            if layout.separator:
                piece = without_line_ends(piece, begins, ends)
            if piece:
                yield begins, piece.encode()
            begins = ends


def text_blocks(file: io.TextIOWrapper) -> Iterator[str]:
    """The text of a file, a BLOCK of characters at a time."""
    while True:
        block = file.read(BLOCK)
        if not block:
            return

        # UTF-16 of plain English is valid UTF-8, too: each other character of it is NUL.
        if block.count("\0") > len(block) // 10:
            raise ValueError("it is UTF-16")
        yield block


def split_documents(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool]]:
    """(the next text of a document, whether the document ends behind it), of the text in
    `blocks`."""
    rest = ""
    for block in blocks:
        rest += block
        if separator:
            *ended, rest = rest.split(separator)
            for text in ended:
                yield text, True

        # A separator may begin in the last characters of this block, and end in the next one.
        decided = len(rest) - max(0, len(separator) - 1)
        if decided > 0:
            yield rest[:decided], False
            rest = rest[decided:]
    yield rest, True


def last_cut(parts: list[str]) -> int | None:
    """The last index in the last of `parts` at which their joined text can be cut; None if there
    is none."""
    # The text can be cut between two parts, too. Then the character before the cut is in the part
    # before.
    before = ""
    if len(parts) > 1:
        before = parts[-2][-1:]
    match = LAST_CUT.match(before + parts[-1])
    if match is None:
        return None
    return match.end() - len(before)


def without_line_ends(piece: str, begins: bool, ends: bool) -> str:
    """A piece of a document between separators. Line ends beside a separator belong to the
    layout, so they are left out where the document `begins` or `ends` with the piece. White space
    alone is no document."""
    if begins:
        piece = piece.lstrip("\r\n")
    if ends:
        piece = piece.rstrip("\r\n")
    if begins and not piece.strip():
        return ""
    return piece


# ----------------------------------------------------------------------------- .jsonl

def read_jsonl(path: Path, layout: Layout) -> Pieces:
    """A document a line. Python's json is as fast as pyarrow's, and an error of it can be told by
    its line."""
    with open_bytes(path) as file:
        for number, line in numbered_lines(file):
            if not line.isspace():
                yield True, text_of_json(line, f"line {number}", layout.text_field)


def numbered_lines(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """(its number from 1 on, a line), of which at most MAX_DOCUMENT bytes are read."""
    number = 0
    while True:
        line = file.readline(MAX_DOCUMENT)
        if not line:
            return
        number += 1
        yield number, line


def text_of_json(line: bytes, where: str, field: str) -> bytes:
    """The text of a line of JSON; null is an empty one. ValueError, with `where` the line is, for
    no text."""
    if line.lstrip()[:1] == b"[":
        raise ValueError(f"{where} begins a JSON array: write one object a line, as `jq -c "
                         f"'.[]'` does")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON object: write one a line, each with its text as "
                         f"{safe_repr(field)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object, but {safe_repr(row)}")
    if field not in row:
        raise ValueError(f"{where} has no {missing_field(field, row)}")

    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text as {safe_repr(field)}, but {safe_repr(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # JSON can escape half of a character, which UTF-8 does not have.
        return replace_surrogates(text).encode()


def missing_field(field: str, names: Iterable[str]) -> str:
    """The end of a message: which field is missing, the first ones that there are, and what to
    do."""
    found = ", ".join(safe_repr(name)[:20] for name in [*names][:4])
    return f"{safe_repr(field)[:20]}: give --text_field one of its names ({found})"


# ----------------------------------------------------------------------------- .csv, .tsv

def read_csv(path: Path, layout: Layout) -> Pieces:
    """A document a row of a .csv or .tsv, whose first row names the columns."""
    delimiter = ","
    quoting = csv.QUOTE_MINIMAL
    if kind_of(path) == ".tsv":
        delimiter = "\t"
        if not layout.tsv_quotes:
            # A quotation mark is text like any other.
            quoting = csv.QUOTE_NONE
    csv.field_size_limit(MAX_DOCUMENT)

    header = None
    column = None               # the index of the one that holds the text
    with open_bytes(path) as file:
        rows = csv.reader(decoded_lines(file), delimiter=delimiter, quoting=quoting, strict=True)
        for number, row in numbered_rows(rows):
            if header is None:
                header = row
                if layout.text_field not in header:
                    raise ValueError(
                        f"line {number} has no column {missing_field(layout.text_field, header)}")
                column = header.index(layout.text_field)
                continue

            if len(row) != len(header):
                hint = ""
                if quoting == csv.QUOTE_NONE and '"' in "".join(row):
                    hint = ": --tsv_quotes is for quoted cells"
                raise ValueError(f"line {number} has {len(row)} cells, and the first row has "
                                 f"{len(header)}"
                                 + hint)
            yield True, row[column].encode()


def numbered_rows(rows) -> Iterator[tuple[int, list[str]]]:
    """(the number of the line where it begins, the row) of a csv.reader, without empty lines."""
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"line {number}: {error}") from None
        if row is None:
            return
        if row:
            yield number, row


def decoded_lines(file: io.BufferedReader) -> Iterator[str]:
    """The lines of a file of text. ValueError names the one that cannot be read."""
    for number, line in numbered_lines(file):
        if len(line) == MAX_DOCUMENT:
            raise ValueError(f"line {number} has a gigabyte without an end")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8: {error.reason}") from None
        if "\r" in text.removesuffix("\r\n"):
            # Old Macs end their lines with \r alone, at which readline does not stop.
            yield from re.findall(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+", text)
        else:
            yield text


# ----------------------------------------------------------------------------- .parquet

def read_parquet(path: Path, layout: Layout) -> Pieces:
    """A document a row, as a view of pyarrow's memory; null is an empty one."""
    pyarrow = import_package("pyarrow")
    parquet = import_package("pyarrow.parquet")

    # Without its default pre_buffer=True reading takes half of the CPU time, as fewer pages are
    # touched.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
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
    # they begin and end in it.
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
    ".csv": read_csv, ".tsv": read_csv,
    ".parquet": read_parquet,
}
TEXT_FILES = {kind for kind, reader in READERS.items() if reader == read_text_file}


def kind_of(path: str | Path) -> str:
    """The suffix that says how a file is read, in lower case: .txt of a.TXT and of a.txt.gz.
    Empty for a file that no reader takes."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in READERS:
        return ""

    # Of a .parquet pyarrow reads the end first, which a compressed file does not give away.
    if compressed and suffixes[-1] == ".parquet":
        return ""
    return suffixes[-1]


def read_rows(path: Path, layout: Layout, mark: bytes, name: str) -> Iterator[bytes]:
    """The documents of a file with `mark` before each, joined to rows of about a BLOCK of bytes.
    UserError, which calls the file `name`, if it cannot be read."""
    reader = READERS[kind_of(path)]
    parts = []
    size = 0

    # pyarrow's errors are derived from these.
    errors = (OSError, ValueError, NotImplementedError)
    with readable(name, "repair it (as UTF-8 text), or leave it out", errors):
        for begins, text in reader(path, layout):
            if begins:
                parts.append(mark)
            parts.append(text)

            # One more for each document, so that many empty ones fill a row, too.
            size += len(text) + 1
            if size >= BLOCK:
                yield b"".join(parts)
                parts = []
                size = 0
        if parts:
            yield b"".join(parts)
