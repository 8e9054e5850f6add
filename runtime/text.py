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
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import print_error, safe_repr
from runtime.files import reading
from runtime.tokenizer import LAST_CUT, replace_surrogates

BLOCK = 1 << 20                 # bytes that are read and encoded at once
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
# These programs read more than pyarrow does: zeros behind the end, windows above 128 MiB.
PROGRAMS = {"gzip": "gunzip", "zstd": "zstd -d --long=31", "bz2": "bunzip2"}
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
            except (json.JSONDecodeError, UnicodeDecodeError):
                row = None
            except RecursionError:
                raise ValueError(f"line {number} has brackets in brackets, more than Python's "
                                 f"json reads") from None
            except ValueError:
                most = sys.get_int_max_str_digits()
                raise ValueError(f"line {number} has a number of more than {most:,} digits, which "
                                 f"Python's json does not read") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"line {number} is not a JSON object; one a line is expected: `jq -c .` writes "
                    f"objects so, and `jq -c '.[]'` those of an array")

            # Spark and BigQuery leave out a field that is null.
            if not seen:
                check_field(field, row, f"line {number}")
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
    """ValueError unless `where`, a part of a file, has one field or column of this name."""
    names = list(names)
    if names.count(field) > 1:
        raise ValueError(f"{where} has {field!r} {names.count(field)} times; rename the others")
    if field not in names:
        found = ", ".join(repr(name[:20]) for name in names[:4])
        raise ValueError(f"{where} has no {field!r} among {found}; choose its --text_field")


# ----------------------------------------------------------------------------- .csv

def read_csv(path: Path, field: str) -> Rows:
    """The first row names the columns."""
    csv.field_size_limit(2**31 - 1)
    header = None
    number = 1                  # of the line with which the next row begins
    with open_bytes(path) as file:
        rows = csv.reader(csv_lines(file, field), strict=True)
        try:
            for row in rows:
                if row and header is None:
                    header = row
                    check_field(field, header, f"does line {number} name the columns? It")
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


def csv_lines(file: io.BufferedReader, field: str) -> Iterator[str]:
    """The lines of a .csv. ValueError names the one that is not UTF-8."""
    for number, line in enumerate(file, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ValueError(f"line {number} is not UTF-8") from None
        if number == 1:
            text = text.removeprefix("\ufeff")
            check_first_line(text, field)

        # Inside a line it belongs to the text, but the csv module would end the row there.
        if "\r" in text:
            text = re.sub(r"\r(?!\n|\Z)", LONE_RETURN, text)
        yield text


def check_first_line(line: str, field: str) -> None:
    """ValueError for what Excel writes in many countries."""
    names = line.strip().replace('"', "").split(";")
    if line.startswith("sep=") or (len(names) > 1 and field in names):
        raise ValueError("semicolons stand between its columns, or its first line is Excel's sep=; "
                         "write commas, and no such line")


# ----------------------------------------------------------------------------- .parquet, .arrow

def read_parquet(path: Path, field: str) -> Rows:
    """The texts are views of pyarrow's memory; null is an empty one."""
    import pyarrow.parquet

    # Without its default pre_buffer=True reading takes half of the CPU time, as fewer pages are
    # touched. The CRC of a page, which Spark writes, is compared only where one asks for it.
    with pyarrow.parquet.ParquetFile(
        path, pre_buffer=False, buffer_size=BLOCK, page_checksum_verification=True,
    ) as file:
        check_field(field, file.schema_arrow.names, "it")

        # Only 64 rows at a time: in a dictionary-encoded column half a kilobyte of file can stand
        # for many copies of a huge document.
        batches = file.iter_batches(batch_size=64, columns=[field], use_threads=False)
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            yield from column_texts(batch.column(0), field)

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
        check_field(field, reader.schema.names, "it")

        for batch in batches:
            column = batch.column(field)
            for start in range(0, len(column), 64):
                yield from column_texts(column.slice(start, 64), field)


def column_texts(rows, field: str) -> Rows:
    """The texts of some rows, a pyarrow.Array, of the column `field`. ValueError if they are
    not text in UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(rows.type):
        rows = rows.dictionary_decode()
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null())
    if rows.type not in texts:
        raise ValueError(f"its column {field!r} holds {rows.type}, which is not text")
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
TABLES = {".parquet", ".arrow"}
KINDS = (*TEXT_FILES, *READERS)


def ending(path: str | Path) -> str:
    """What says how a file is read: the suffix in lower case, without that of a compression. It is
    .txt of a.TXT and of a.txt.gz."""
    path = Path(str(path).lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return path.suffix


class Escapes:
    """Looks for what a database writes in place of some signs."""

    def __init__(self):
        self.escaped = Counter()        # {a sign, or "null": how often it is escaped}
        self.plain = Counter()          # {a sign: how often it is not}

    def look_at(self, text: bytes) -> None:
        if text == rb"\N":
            self.escaped["null"] += 1
        for sign in (b"\n", b'"'):
            behind_backslash = text.count(b"\\" + sign)
            self.escaped[sign] += behind_backslash
            self.plain[sign] += text.count(sign) - behind_backslash

        # A line end may also be written out, as a backslash and an n.
        self.escaped[b"\n"] += text.count(rb"\n")

    def found(self) -> bool:
        """Whether a database has written the texts: then all signs of a kind are escaped."""
        return any(self.escaped[sign] and not self.plain[sign] for sign in self.escaped)


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
        compression = COMPRESSIONS.get(path.suffix.lower())
        remedy = "repair the file, convert it to UTF-8 (iconv), or leave it out"
        if compression:
            remedy = (f"fetch the file again, unpack it with `{PROGRAMS[compression]}` and "
                      f"repair it or convert it to UTF-8 (iconv), or leave it out")

        with reading(path, remedy):
            try:
                if ending(path) in READERS:
                    yield from self.read_rows(path)
                else:
                    yield from self.read_texts(path)
            except ValueError:
                # A bit that has flipped makes other letters, whose error comes before the error
                # of the checksum at the end of the file. That one says more.
                if compression:
                    read_to_its_end(path)
                raise

    def read_texts(self, path: Path) -> Pieces:
        """The pieces of a .txt or .md."""
        documents = 0
        windows = False         # whether its lines end as on Windows
        for begins, text in read_text_file(path, self.separator):
            if begins:
                documents += 1
            windows = windows or b"\r\n" in text
            if not self.separator and b"<|endoftext|>" in text:
                self.tell_once(
                    f"{path} contains <|endoftext|>, which is read as text: if it separates "
                    f"documents, add --separator '<|endoftext|>' and choose another --out")
            yield begins, text

        if self.separator and documents == 1:
            line = f"{path} is read as one document: check --separator {self.separator!r}"
            if "\\n" in self.separator:
                line += r" (a backslash and an n; a shell writes a line end as $'\n')"
            elif "\n" in self.separator and windows:
                line += r" (the lines of the file end with \r\n, in a shell $'\r\n')"
            self.tell_once(line)

    def read_rows(self, path: Path) -> Pieces:
        """The rows that have text."""
        kind = ending(path)
        escapes = Escapes()
        for text in READERS[kind](path, self.text_field):
            if not text:
                self.empty_rows += 1
                continue
            if kind not in TABLES:
                escapes.look_at(text)
            yield True, text

        if escapes.found():
            print_error(
                f"{path} seems to have a database's escapes (\\N for null, \\n for a line end, a "
                f"backslash before each line end or quotation mark), which are read as text: "
                f"export it with `FORMAT csv, HEADER`, or JSON with `psql -At`")

    def tell_once(self, line: str) -> None:
        if not self.told:
            self.told = True
            print_error(line)


def read_to_its_end(path: Path) -> None:
    """OSError if a compressed file is damaged."""
    with open_bytes(path) as file:
        while file.read(BLOCK):
            pass
