"""Files of text -> documents, UTF-8 as bytes or memoryviews. Memory stays small: a .txt or .md comes in
pieces, and of the others a megabyte or so is read at a time."""
import csv
import hashlib
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
from runtime.tokenizer import LAST_CUT

BLOCK = 1 << 20                 # bytes, or of .txt characters, that are read, and then encoded, at once
MAX_DOCUMENT = 10**9            # characters in memory: a small .gz or .zst can unpack to one endless line
PACKED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Layout:
    """Where documents stand in a file: the flags --text_field, --separator and --tsv_quotes."""
    text_field: str = "text"
    separator: str = ""         # what stands between the documents of a .txt; none: the file is one document
    tsv_quotes: bool = False


# What a reader yields: whether a document begins, and its text or the next piece of its text.
Pieces = Iterator[tuple[bool, bytes | memoryview]]


def open_bytes(path: Path) -> io.BufferedReader:
    """A binary file, decompressed if its name ends in .gz or .zst, without a byte-order mark."""
    packed = PACKED.get(path.suffix.lower())
    if packed:
        stream = import_package("pyarrow").input_stream(str(path), compression=packed)
    else:
        stream = io.FileIO(path)
    file = io.BufferedReader(stream, BLOCK)
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


def read_text_file(path: Path, layout: Layout) -> Pieces:
    """The documents of a .txt or .md. A long one comes in pieces of about a BLOCK that have the tokens of the
    whole (LAST_CUT)."""
    begins, parts = True, []                      # parts: the text since the last cut
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="\n") as file:
        for text, ends in split_documents(text_blocks(file), layout.separator):
            parts.append(text)
            if sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError("it has a gigabyte without the end of a word")
            end = len(text) if ends else last_cut(parts)
            if end is None:
                continue
            piece = "".join([*parts[:-1], text[:end]])
            parts = [] if ends else [text[end:]]
            if layout.separator:
                piece = without_line_ends(piece, begins, ends)
            if piece:
                yield begins, piece.encode()
            begins = ends


def text_blocks(file: io.TextIOWrapper) -> Iterator[str]:
    """The text of a file, a BLOCK at a time."""
    while block := file.read(BLOCK):
        if block.count("\0") > len(block) // 10:
            raise ValueError("it is UTF-16")
        yield block


def split_documents(blocks: Iterable[str], separator: str) -> Iterator[tuple[str, bool]]:
    """(the next text, whether its document ends behind it)."""
    rest = ""
    for block in blocks:
        rest += block
        if separator:
            *ended, rest = rest.split(separator)
            yield from ((text, True) for text in ended)
        # a separator may begin in the last characters of a block
        decided = len(rest) - max(0, len(separator) - 1)
        if decided > 0:
            yield rest[:decided], False
            rest = rest[decided:]
    yield rest, True


def last_cut(parts: list[str]) -> int | None:
    """Where in the last of `parts` their text may be cut, None for nowhere."""
    before = parts[-2][-1:] if len(parts) > 1 else ""     # the cut may come right after it
    cut = LAST_CUT.match(before + parts[-1])
    return cut.end() - len(before) if cut else None


def without_line_ends(piece: str, begins: bool, ends: bool) -> str:
    """Of a document between separators: line ends at its beginning and end belong to the layout, and white
    space alone is no document."""
    if begins:
        piece = piece.lstrip("\r\n")
    if ends:
        piece = piece.rstrip("\r\n")
    if begins and not piece.strip():
        return ""
    return piece


def read_jsonl(path: Path, layout: Layout) -> Pieces:
    """A document a line; null is an empty one. Python's json is as fast as pyarrow's, and knows the line."""
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), b""), 1):
            if not line.isspace():
                yield True, text_of_json(line, f"line {number}", layout.text_field)


def text_of_json(line: bytes, where: str, field: str) -> bytes:
    """The text in a line of JSON. ValueError, which says `where` that is, if there is none."""
    if line.lstrip()[:1] == b"[":
        raise ValueError(f"{where} begins a JSON array: write one object a line, as `jq -c '.[]'` does")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON object: write one a line, each with its text as "
                         f"{safe_repr(field)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object, but {safe_repr(row)}")
    if field not in row:
        raise ValueError(f"{where} has no {no_such_field(field, row)}")
    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text as {safe_repr(field)}, but {safe_repr(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError:                    # lone surrogates: U+FFFD instead, as tiktoken has it
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def no_such_field(field: str, names: Iterable[str]) -> str:
    """For a message: the field that there is not, and the first of those that there are."""
    found = ", ".join(safe_repr(name)[:20] for name in [*names][:4])
    return f"{safe_repr(field)[:20]}: give --text_field one of its names ({found})"


def read_csv(path: Path, layout: Layout) -> Pieces:
    """A document a row. The first row names the columns, which tabs separate if the name ends in .tsv. There
    a quotation mark is text, unless --tsv_quotes is given."""
    delimiter, quoting = ",", csv.QUOTE_MINIMAL
    if kind_of(path) == ".tsv":
        delimiter, quoting = "\t", csv.QUOTE_MINIMAL if layout.tsv_quotes else csv.QUOTE_NONE
    csv.field_size_limit(MAX_DOCUMENT)
    field, header = layout.text_field, None
    with open_bytes(path) as file:
        rows = csv.reader(decoded_lines(file), delimiter=delimiter, quoting=quoting, strict=True)
        for number, row in numbered_rows(rows):
            if header is None:
                header = row
                if field not in header:
                    raise ValueError(f"line {number} has no column {no_such_field(field, header)}")
                column = header.index(field)
            elif len(row) != len(header):
                unquoted = quoting == csv.QUOTE_NONE and '"' in "".join(row)
                raise ValueError(f"line {number} has {len(row)} cells, and the first row has {len(header)}"
                                 + (": --tsv_quotes is for quoted cells" if unquoted else ""))
            else:
                yield True, row[column].encode()


def numbered_rows(rows) -> Iterator[tuple[int, list[str]]]:
    """(the line where it begins, the row) of a csv.reader, without empty lines."""
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
    for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), b""), 1):
        if len(line) == MAX_DOCUMENT:
            raise ValueError(f"line {number} has a gigabyte without an end")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8: {error.reason}") from None
        if "\r" in text.removesuffix("\r\n"):
            yield from re.findall(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+", text)         # line ends of old Macs
        else:
            yield text


def read_parquet(path: Path, layout: Layout) -> Pieces:
    """A document a row, not copied; null is an empty one."""
    pyarrow, parquet, field = import_package("pyarrow"), import_package("pyarrow.parquet"), layout.text_field
    kinds = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    # pre_buffer would double the CPU time, by page faults
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        if field not in file.schema_arrow.names:
            raise ValueError(f"it has no column {no_such_field(field, file.schema_arrow.names)}")
        # 64 rows at a time: half a kilobyte of a dictionary-encoded column can repeat a huge document
        for batch in file.iter_batches(batch_size=64, columns=[field], use_threads=False):
            rows = batch.column(0)
            rows = rows.dictionary_decode() if pyarrow.types.is_dictionary(rows.type) else rows
            if rows.type not in kinds:
                raise ValueError(f"its column {safe_repr(field)} holds {rows.type}, which is not text")
            rows = rows.cast(pyarrow.large_string())
            rows = rows.fill_null("") if rows.null_count else rows
            rows.validate(full=True)              # as UTF-8
            _, ends, text = rows.buffers()
            ends, text = np.frombuffer(ends, np.int64)[rows.offset:][:len(rows) + 1], memoryview(text or b"")
            yield from ((True, text[first:end]) for first, end in pairwise(ends.tolist()))


READERS = {".txt": read_text_file, ".text": read_text_file, ".md": read_text_file, ".jsonl": read_jsonl,
           ".ndjson": read_jsonl, ".json": read_jsonl, ".csv": read_csv, ".tsv": read_csv,
           ".parquet": read_parquet}
TEXT_FILES = {kind for kind, reader in READERS.items() if reader == read_text_file}


def kind_of(path: str | Path) -> str:
    """The suffix that says how a file is read, in lower case: .txt of a.TXT and a.txt.gz. '' for none."""
    *_, before, last = "", "", *(suffix.lower() for suffix in Path(path).suffixes)
    kind = before if last in PACKED else last
    return kind if kind in READERS and (kind, last in PACKED) != (".parquet", True) else ""


def describe(path: Path) -> dict:
    """What a manifest says of a file: the SHA-256 of its ends tells it from another of its name and size."""
    with readable(path, "make it readable, or leave it out"), open(path, "rb") as file:
        head, size = file.read(1 << 16), path.stat().st_size
        file.seek(max(0, size - (1 << 16)))
        sha256 = hashlib.sha256(head + file.read()).hexdigest()
        return {"name": path.name, "bytes": size, "sha256_of_ends": sha256}


def read_rows(path: Path, layout: Layout, mark: bytes, name: str) -> Iterator[bytes]:
    """The documents of a file, about a BLOCK at a time, with `mark` before each. UserError, which calls the
    file `name`, if it cannot be read."""
    reader, parts, size = READERS[kind_of(path)], [], 0
    with readable(name, "repair it (as UTF-8 text), or leave it out",
                  (OSError, ValueError, NotImplementedError)):                  # pyarrow's derive from these
        for begins, text in reader(path, layout):
            if begins:
                parts.append(mark)
            parts.append(text)
            size += len(text) + 1
            if size >= BLOCK:
                yield b"".join(parts)
                parts, size = [], 0
        if parts:
            yield b"".join(parts)
