"""Files of text -> documents, in UTF-8.

Memory stays small, whatever the size of a file: about a megabyte of it is read at a time. A
reader here takes the path of a file and the flag --text_field, or of plain text --separator. It
yields pairs: (whether a document begins, its text or the next piece of it).
"""
import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import UserError, brief_error, print_error, safe_repr
from runtime.kinds import LFS_POINTER, kind_by_first_bytes
from runtime.tokenizer import LAST_CUT, replace_surrogates

BLOCK = 1 << 20                 # bytes that are read and encoded at once
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
# They read more than pyarrow: windows above 128 MiB, and zeros behind the end.
PROGRAMS = {"gzip": "gunzip", "zstd": "zstd -d --long=31", "bz2": "bunzip2"}
# A carriage return inside a line of a .csv. UTF-8 has no such character, so that no text has it.
LONE_RETURN = "\udc0d"
ESCAPES = r"\N for null, \n for a line end, a backslash before each line end or quotation mark"
Pieces = Iterator[tuple[bool, bytes | memoryview]]


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

    # A tar would be read as text, and so would a pointer of git-lfs, which its first bytes tell.
    head = file.peek(512)
    if head.startswith(LFS_POINTER) or head[257:262] == b"ustar":
        file.close()
        raise ValueError("it is a tar archive; unpack it with `tar -xf`")
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
    for block in blocks:
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

def read_jsonl(path: Path, field: str) -> Pieces:
    """Each line is a document. Python's json is as fast as pyarrow's, and its errors can name the
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
                    f"line {number} is not a JSON object (one a line is expected: `jq -c .` writes "
                    f"objects so, and `jq -c '.[]'` those of an array)")

            # Spark and BigQuery leave out a field that is null.
            if not seen:
                check_field(field, row, f"line {number}")
            seen = True
            yield True, encode_json(row.get(field), f"line {number}")


def encode_json(text: str | None, where: str) -> bytes:
    """The bytes of a field of JSON; null is an empty text."""
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(f"the field of {where} is not text: {safe_repr(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # JSON can escape half of a character, which UTF-8 does not have.
        return replace_surrogates(text).encode()


def check_field(field: str, names: Iterable[str], where: str) -> None:
    """ValueError if `where`, a part of a file, has no field or column of this name."""
    if field not in names:
        found = ", ".join(repr(name[:20]) for name in [*names][:4])
        raise ValueError(f"{where} has no {field!r} among {found}; set --text_field to one of these")


# ----------------------------------------------------------------------------- .csv

def read_csv(path: Path, field: str) -> Pieces:
    """Each row is a document. The first row names the columns."""
    csv.field_size_limit(2**31 - 1)
    header = None
    number = 1                  # of the line with which the next row begins
    with open_bytes(path) as file:
        check_first_line(file.peek(BLOCK), field)
        rows = csv.reader(csv_lines(file), strict=True)
        try:
            for row in rows:
                if row and header is None:
                    header = row
                    check_field(field, header, f"line {number} (does it name the columns? If not, "
                                               f"add a line that does)")
                elif row:
                    if len(row) != len(header):
                        raise ValueError(f"line {number} has {len(row)} cells, but the first row "
                                         f"has {len(header)}")
                    text = row[header.index(field)]
                    yield True, text.replace(LONE_RETURN, "\r").encode()
                number = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(f"line {number}: {error}; a quotation mark in a quoted cell is "
                             f"doubled, not behind a backslash") from None


def check_first_line(head: bytes, field: str) -> None:
    """ValueError for columns that are divided by semicolons, as Excel does in many countries."""
    first_line = re.split(rb"[\r\n]", head, maxsplit=1)[0].decode("utf-8-sig", errors="replace")
    names = first_line.replace('"', "").split(";")
    if first_line.startswith("sep=") or (len(names) > 1 and field in names):
        raise ValueError("it is Excel's, with semicolons between the columns or a first line sep=: "
                         "write commas, and no such line")


def csv_lines(file: io.BufferedReader) -> Iterator[str]:
    """The lines of a .csv: they end as the first one does. ValueError names the one that is not
    UTF-8."""
    # Old Macs end a line with a carriage return alone. Elsewhere it is a part of the text, which
    # the csv module would take for a line end.
    first_end = re.search(rb"\r\n?|\n", file.peek(BLOCK))
    newline = "\n"
    if first_end and first_end[0] == b"\r":
        newline = "\r"

    # What is not UTF-8 becomes surrogates, which a line can be asked for.
    with io.TextIOWrapper(
        file, encoding="utf-8-sig", errors="surrogateescape", newline=newline,
    ) as text:
        for number, line in enumerate(text, 1):
            try:
                line.encode()
            except UnicodeEncodeError:
                raise ValueError(f"line {number} is not UTF-8") from None
            if newline == "\n" and "\r" in line:
                line = re.sub(r"\r(?!\n|\Z)", LONE_RETURN, line)
            yield line


# ----------------------------------------------------------------------------- .parquet, .arrow

def read_parquet(path: Path, field: str) -> Pieces:
    """Each row is a document, a view of pyarrow's memory; null is an empty one."""
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
        for batch in batches:
            yield from column_texts(batch.column(0), field)


def read_arrow(path: Path, field: str) -> Pieces:
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


def column_texts(rows, field: str) -> Pieces:
    """The documents in some rows, a pyarrow.Array, of the column `field`. ValueError if they are
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
    text = memoryview(text or b"")
    for start, end in pairwise(offsets):
        yield True, text[start:end]


# ----------------------------------------------------------------------------- all of them

READERS = {
    ".txt": read_text_file, ".text": read_text_file, ".md": read_text_file,
    ".jsonl": read_jsonl, ".jsonlines": read_jsonl, ".ndjson": read_jsonl, ".json": read_jsonl,
    ".csv": read_csv, ".parquet": read_parquet, ".arrow": read_arrow,
}
TEXT_FILES = {".txt", ".text", ".md"}
TABLES = {".parquet", ".arrow"}
WITH_ESCAPES = READERS.keys() - TEXT_FILES - TABLES     # if a database has written them


def kind_of(path: str | Path) -> str:
    """The suffix that says how a file is read, in lower case: .txt of a.TXT and of a.txt.gz.
    Empty for a file that no reader takes."""
    path = Path(str(path).lower())

    # Of tables pyarrow may read the end first, which a compressed file does not give away.
    if path.suffix in COMPRESSIONS and Path(path.stem).suffix not in TABLES:
        path = Path(path.stem)
    if path.suffix in READERS:
        return path.suffix
    return ""


class TextReader:
    """Reads files, as the two flags say, and tells what a user should know of their texts. `mark`
    stands before each document. `empty_rows` counts the rows without text: no documents."""

    def __init__(self, text_field: str, separator: str, mark: bytes):
        self.text_field = text_field
        self.separator = separator
        self.mark = mark
        self.empty_rows = 0
        self.told = False               # of <|endoftext|> or --separator

    def read_chunks(self, path: Path, name: str) -> Iterator[bytes]:
        """The documents of a file with `mark` before each, joined to chunks of about a BLOCK of
        bytes. UserError, which calls the file `name`, if it cannot be read."""
        parts = []
        size = 0
        for begins, text in self.read_documents(path, name):
            if begins:
                parts.append(self.mark)
                size += len(self.mark)
            parts.append(text)
            size += len(text)
            if size >= BLOCK:
                yield b"".join(parts)
                parts = []
                size = 0
        if parts:
            yield b"".join(parts)

    def read_documents(self, path: Path, name: str) -> Pieces:
        """The pieces of the documents that are not empty."""
        kind = kind_of(path)
        flag = self.text_field
        if kind in TEXT_FILES:
            flag = self.separator
        documents = 0
        escaped = Counter()         # {sign: how often it is behind a backslash}
        plain = Counter()           # {sign: how often it is not}
        try:
            for begins, text in READERS[kind](path, flag):
                if not text:
                    self.empty_rows += 1
                    continue
                documents += begins
                if kind in TEXT_FILES and not flag and b"<|endoftext|>" in text:
                    self.tell_once(
                        f"{name} contains <|endoftext|>, which is read as text: if it separates "
                        f"documents, add --separator '<|endoftext|>' and choose another --out")
                if kind in WITH_ESCAPES:
                    escaped["null"] += text == rb"\N"
                    escaped[b"\n"] += text.count(rb"\n")
                    for sign in (b"\n", b'"'):
                        count = text.count(b"\\" + sign)
                        escaped[sign] += count
                        plain[sign] += text.count(sign) - count
                yield begins, text
        except (OSError, ValueError, NotImplementedError) as error:
            # pyarrow's errors are derived from these. The system's name the path.
            if getattr(error, "filename", None):
                raise
            raise UserError(f"{name} {why_unreadable(path, error)}") from None

        if kind in TEXT_FILES and flag and documents == 1:
            self.tell_once(f"{name} is read as one document: check --separator {flag!r}")
        if any(escaped[sign] > 0 and plain[sign] == 0 for sign in escaped):
            print_error(f"{name} seems to have a database's escapes ({ESCAPES}), which are read "
                        f"as text: export it with `FORMAT csv, HEADER`, or JSON with `psql -At`")

    def tell_once(self, line: str) -> None:
        if not self.told:
            self.told = True
            print_error(line)


def why_unreadable(path: Path, error: Exception) -> str:
    """What to say of a file of text that a reader has failed with."""
    kind = kind_by_first_bytes(path)
    if kind:
        return f"is {kind}"

    # Behind a bit that has flipped come other letters, whose error comes before the checksum.
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression and isinstance(error, ValueError):
        try:
            with open_bytes(path) as file:
                while file.read(BLOCK):
                    pass
        except (OSError, ValueError) as damage:
            error = damage

    remedy = "repair the file (as UTF-8 text), or leave it out"
    if compression and isinstance(error, OSError):
        remedy = f"try `{PROGRAMS[compression]}`, or fetch the file again"
    return f"cannot be read ({brief_error(error)}): {remedy}"
