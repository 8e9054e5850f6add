"""Files of text -> documents, in UTF-8.

Memory stays small, whatever the size of a file: about a megabyte of it is read at a time. A
reader of rows takes the path of a file and the flag --text_field, and yields the text of each row.
The reader of plain text takes --separator, and yields a long document in pieces.
"""
import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import UserError, print_error, safe_repr
from runtime.files import reading
from runtime.tokenizer import LAST_CUT, replace_surrogates

BLOCK = 1 << 20                 # bytes that are read and encoded at once
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
LFS_POINTER = b"version https://git-lfs"
# Stands for a carriage return inside a line of a .csv. No text has this character: UTF-8 cannot
# write it.
LONE_RETURN = "\udc0d"
Rows = Iterator[bytes | memoryview]             # the text of each; empty where a row has none
Pieces = Iterator[tuple[bool, bytes | memoryview]]      # (whether a document begins, text of it)


def open_bytes(path: Path) -> io.BufferedReader:
    """A binary file, decompressed if its name says so. ValueError if its beginning shows that it
    is no text."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression:
        import pyarrow

        # pyarrow takes it for an empty text, but it is a download that has failed.
        if path.stat().st_size == 0:
            raise ValueError(f"it has 0 bytes, which is no {compression} file")
        stream = pyarrow.input_stream(str(path), compression=compression)
    else:
        stream = io.FileIO(path)
    file = io.BufferedReader(stream, BLOCK)

    # A pointer of git-lfs and the content of a tar would be read as text.
    problem = ""
    head = file.peek(512)
    if head.startswith(LFS_POINTER):
        problem = "it is a pointer of git-lfs; fetch the file itself with `git lfs pull`"
    elif head[257:262] == b"ustar":
        problem = "it is a tar archive; unpack it with `tar -xf`"
    if problem:
        file.close()
        raise ValueError(problem)
    return file


# ----------------------------------------------------------------------------- .txt, .md

def read_text_file(path: Path, separator: str) -> Pieces:
    """The documents of a .txt or .md, or without a separator the whole as one. Line ends beside a
    separator belong to the layout, so they are left out, and white space alone between two of them
    is no document."""
    with open_bytes(path) as file:
        for text, begins, ends in text_pieces(decoded(file), separator):
            if separator:
                if begins:
                    text = text.lstrip("\r\n")
                if ends:
                    text = text.rstrip("\r\n")
                if begins and not text.strip():
                    continue
            if text:
                yield begins, text.encode()


def text_pieces(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool, bool]]:
    """(the next text, whether a document begins with it, whether one ends with it). A long
    document comes in pieces of about a BLOCK, cut where LAST_CUT allows, so that the pieces have
    the tokens of the whole."""
    text = ""
    begins = True
    searched = 0                # In `text` no cut comes before this place, and no separator.
    for block in blocks:
        text += block           # Python appends in place, so that many blocks take linear time.
        if separator and text.find(separator, searched) >= 0:
            *ended, text = text.split(separator)
            searched = 0
            for document in ended:
                yield document, begins, True
                begins = True

        # The last characters may be the beginning of a separator: no cut among them.
        end = len(text) - len(separator)
        cut = LAST_CUT.match(text, searched, end)
        if cut:
            yield text[:cut.end()], begins, False
            text = text[cut.end():]
            begins = False
            searched = 0
        else:
            searched = max(0, end - 1)
    yield text, begins, True


def decoded(file: io.BufferedReader) -> Iterator[str]:
    """The characters of a file of UTF-8 in blocks. ValueError for other bytes, with their place
    in the (decompressed) file, and for UTF-16."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0                   # of the next block
    while True:
        # The decoder keeps the bytes of a character that the block before has cut.
        kept, _ = decoder.getstate()
        block = file.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {place - len(kept) + error.start} is not UTF-8") from None

        # UTF-16 of plain English is valid UTF-8, in which each other character is NUL.
        if text.count("\0") > len(text) // 10:
            raise ValueError("it is UTF-16, expected UTF-8")

        # The byte-order mark, which Windows likes to write, is no part of the text.
        if place == 0:
            text = text.removeprefix("\ufeff")
        yield text
        if not block:
            return
        place += len(block)


# ----------------------------------------------------------------------------- .jsonl

def read_jsonl(path: Path, field: str) -> Rows:
    """Each line is a row. Python's json is as fast as pyarrow's, and its errors can name the
    line."""
    seen = False                # whether a line has had the field
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(
                    f"line {number} is not a JSON object; one a line is expected: `jq -c .` writes "
                    f"objects so, and `jq -c '.[]'` those of an array")

            # Spark and BigQuery leave out a field that is null.
            if not seen:
                check_field(field, row, f"{path}: line {number}")
            seen = True
            text = row.get(field)
            if text is None:
                text = ""
            if not isinstance(text, str):
                raise ValueError(f"the field of line {number} is not text: {safe_repr(text)}")

            try:
                data = text.encode()
            except UnicodeEncodeError:
                # JSON can escape half of a character, which UTF-8 does not have.
                data = replace_surrogates(text).encode()
            yield data


def check_field(field: str, names: Iterable[str], where: str) -> None:
    """UserError unless `where`, a file or a place in it, has one field or column of this name."""
    names = list(names)
    if names.count(field) > 1:
        raise UserError(f"{where} has {field!r} {names.count(field)} times: rename the others")
    if field not in names:
        found = ", ".join(repr(name[:20]) for name in names[:4])
        raise UserError(f"{where} has no {field!r} among {found}: choose its --text_field")


# ----------------------------------------------------------------------------- .csv

def read_csv(path: Path, field: str) -> Rows:
    """The first row names the columns."""
    csv.field_size_limit(2**31 - 1)
    header = None
    number = 1                  # of the line with which the next row begins
    with open_bytes(path) as file:
        rows = csv.reader(csv_lines(file), strict=True)
        try:
            for row in rows:
                if row and header is None:
                    header = row
                    check_field(field, header, f"{path}: does line {number} name the columns? It")
                elif row:
                    if len(row) != len(header):
                        raise ValueError(f"line {number} has {len(row)} cells, but the first row "
                                         f"has {len(header)}")
                    text = row[header.index(field)]
                    yield text.replace(LONE_RETURN, "\r").encode()
                number = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(f"line {number}: {error}; a quotation mark in a quoted cell is "
                             f"doubled, not behind a backslash") from None


def csv_lines(file: io.BufferedReader) -> Iterator[str]:
    """The lines of a .csv. ValueError names the one that is not UTF-8."""
    for number, line in enumerate(file, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ValueError(f"line {number} is not UTF-8") from None
        if number == 1:
            text = text.removeprefix("\ufeff")

        # Inside a line it belongs to the text, but the csv module would end the row there.
        if "\r" in text:
            text = re.sub(r"\r(?!\n|\Z)", LONE_RETURN, text)
        yield text


# ----------------------------------------------------------------------------- .parquet, .arrow

def read_parquet(path: Path, field: str) -> Rows:
    """The texts are views of pyarrow's memory; null is an empty one."""
    import pyarrow.parquet

    # Without its default pre_buffer=True reading takes half of the CPU time, as fewer pages are
    # touched. The CRC of a page, which Spark writes, is compared only where one asks for it.
    with pyarrow.parquet.ParquetFile(
        path, pre_buffer=False, buffer_size=BLOCK, page_checksum_verification=True,
    ) as file:
        check_column(field, file.schema_arrow, path)

        # Only 64 rows at a time: in a dictionary-encoded column half a kilobyte of file can stand
        # for many copies of a huge document.
        batches = file.iter_batches(batch_size=64, columns=[field], use_threads=False)
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            yield from column_texts(batch.column(0))

        # A changed byte in the footer can make pyarrow read no rows at all, without an error.
        if rows != file.metadata.num_rows:
            raise ValueError(f"it has {rows} rows, expected {file.metadata.num_rows}")


def read_arrow(path: Path, field: str) -> Rows:
    """As read_parquet, of both formats that Arrow has: that of files, which polars and pandas
    (Feather) write, and the stream, which `datasets` writes."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(0)
            reader = pyarrow.ipc.open_stream(file)
            batches = reader
        check_column(field, reader.schema, path)

        for batch in batches:
            column = batch.column(field)
            for start in range(0, len(column), 64):
                yield from column_texts(column.slice(start, 64))


def check_column(field: str, schema, path: Path) -> None:
    """UserError unless a table with this pyarrow.Schema has one column `field`, of text."""
    import pyarrow

    check_field(field, schema.names, str(path))
    kind = schema.field(field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null())
    if kind not in texts:
        raise UserError(f"{path}: its column {field!r} holds {kind}, which is not text: write it "
                        f"as strings, or choose another --text_field")


def column_texts(rows) -> Rows:
    """The texts of some rows, a pyarrow.Array of strings. ValueError if they are not UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(rows.type):
        rows = rows.dictionary_decode()
    rows = rows.cast(pyarrow.large_string())
    if rows.null_count:
        rows = rows.fill_null("")

    # A file may claim to hold text and hold other bytes. This looks whether all of it is UTF-8.
    rows.validate(full=True)

    # Arrow has the texts of all rows in one buffer, and in another the len(rows) + 1 places where
    # they begin and end in it. With views of it, not copies, a whole run takes a fifth less time.
    _, offsets, text = rows.buffers()
    offsets = np.frombuffer(offsets, np.int64)[rows.offset:]
    offsets = offsets[:len(rows) + 1].tolist()
    if text is None:            # no row has any
        text = b""
    text = memoryview(text)
    for start, end in pairwise(offsets):
        yield text[start:end]


# ----------------------------------------------------------------------------- all of them

TEXT_FILES = (".txt", ".text", ".md")
READERS = {                     # of files of rows
    ".jsonl": read_jsonl, ".jsonlines": read_jsonl, ".ndjson": read_jsonl, ".json": read_jsonl,
    ".csv": read_csv, ".parquet": read_parquet, ".arrow": read_arrow,
}
KINDS = (*TEXT_FILES, *READERS)


def ending(path: str | Path) -> str:
    """What says how a file is read: the suffix in lower case, without that of a compression. It is
    .txt of a.TXT and of a.txt.gz."""
    path = Path(str(path).lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return path.suffix


class TextReader:
    """Reads files, as the two flags say, and tells what a user should know of their texts. `mark`
    stands before each document. `empty_rows` counts the rows without text: no documents."""

    def __init__(self, text_field: str, separator: str, mark: bytes):
        self.text_field = text_field
        self.separator = separator
        self.mark = mark
        self.empty_rows = 0
        self.told = False               # of <|endoftext|> or --separator

    def read_chunks(self, path: Path) -> Iterator[bytes]:
        """The documents of a file with `mark` before each, joined to chunks of about a BLOCK of
        bytes. UserError if it cannot be read."""
        parts = []
        size = 0
        for begins, text in self.read_documents(path):
            if begins:
                parts.append(self.mark)
                size += len(self.mark)
            parts.append(text)
            size += len(text)
            if size >= BLOCK:
                chunk = b"".join(parts)
                parts = []
                size = 0
                yield chunk
        if parts:
            yield b"".join(parts)

    def read_documents(self, path: Path) -> Pieces:
        """The pieces of the documents that are not empty."""
        remedy = "repair the file, unpack it or convert it to UTF-8 (iconv), or leave it out"
        with reading(path, remedy):
            if ending(path) in READERS:
                yield from self.read_rows(path)
            else:
                yield from self.read_texts(path)

    def read_texts(self, path: Path) -> Pieces:
        """The pieces of a .txt or .md."""
        documents = 0
        for begins, text in read_text_file(path, self.separator):
            if begins:
                documents += 1
            if not self.separator and b"<|endoftext|>" in text:
                self.tell_once(
                    f"{path} contains <|endoftext|>, which is read as text: if it separates "
                    f"documents, add --separator '<|endoftext|>' and choose another --out")
            yield begins, text

        if self.separator and documents == 1:
            self.tell_once(f"{path} is read as one document: check --separator "
                           f"{self.separator!r}")

    def read_rows(self, path: Path) -> Pieces:
        """The rows that have text."""
        for text in READERS[ending(path)](path, self.text_field):
            if text:
                yield True, text
            else:
                self.empty_rows += 1

    def tell_once(self, line: str) -> None:
        if not self.told:
            self.told = True
            print_error(line)
