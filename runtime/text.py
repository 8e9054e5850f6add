"""Files of text -> documents, UTF-8 as bytes or memoryviews. Memory stays small: a .txt or .md is one
document, which comes in pieces, and of the others a megabyte or so is read at a time."""
import csv
import hashlib
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import safe_repr
from runtime.files import readable
from runtime.tokenizer import LAST_CUT

BLOCK = 1 << 20                 # bytes, or of .txt characters, that are read, and then encoded, at once
MAX_DOCUMENT = 10**9            # characters in memory: a small .gz or .zst can unpack to one endless line
PACKED = {".gz": "gzip", ".zst": "zstd"}


def open_bytes(path: Path) -> io.BufferedReader:
    """A binary file, decompressed if its name ends in .gz or .zst, without a byte-order mark."""
    import pyarrow
    packed = PACKED.get(path.suffix.lower())
    file = io.BufferedReader(pyarrow.input_stream(str(path), compression=packed), BLOCK)
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


def read_whole(path: Path, field: str) -> Iterator[bytes]:
    """A file as one document, in pieces of about a BLOCK that have the tokens of the whole (LAST_CUT)."""
    parts = []                                    # the text since the last cut
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="\n") as file:
        while block := file.read(BLOCK):
            if block.count("\0") > len(block) // 10 or sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError("it is UTF-16, or has a gigabyte without the end of a word")
            last = parts[-1][-1] if parts else ""         # the cut may come right after it
            if cut := LAST_CUT.match(last + block):
                end = cut.end() - len(last)
                yield "".join([*parts, block[:end]]).encode()
                parts, block = [], block[end:]
            parts.append(block)
    if text := "".join(parts):
        yield text.encode()


def read_jsonl(path: Path, field: str) -> Iterator[bytes]:
    """A document a line; null is an empty one. Python's json is as fast as pyarrow's, and knows the line."""
    with open_bytes(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), b""), 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
                yield b"" if row[field] is None else row[field].encode()
            except UnicodeEncodeError:            # lone surrogates: U+FFFD instead, as tiktoken has it
                yield row[field].encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"line {number} is no JSON object with text as {safe_repr(field)}") from None


def read_csv(path: Path, field: str) -> Iterator[bytes]:
    """A document a row. The first row names the columns, which tabs separate if the name ends in .tsv."""
    csv.field_size_limit(MAX_DOCUMENT)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t" if kind_of(path) == ".tsv" else ",", strict=True)
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"line {rows.line_num} has not as many cells as the first row")
            yield row[field].encode()


def read_parquet(path: Path, field: str) -> Iterator[memoryview]:
    """A document a row, not copied; null is an empty one."""
    import pyarrow.parquet
    kinds = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    # pre_buffer would double the CPU time, by page faults
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        file.schema_arrow.field(field)            # KeyError without it
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
            yield from (text[first:end] for first, end in pairwise(ends.tolist()))


READERS = {".txt": read_whole, ".text": read_whole, ".md": read_whole, ".jsonl": read_jsonl, ".csv": read_csv,
           ".tsv": read_csv, ".parquet": read_parquet}


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


def read_rows(path: Path, field: str, separator: bytes, name: str) -> Iterator[bytes]:
    """The documents of a file, about a BLOCK at a time, with `separator` before each. UserError, which calls
    the file `name`, if it cannot be read."""
    reader, texts, size, start = READERS[kind_of(path)], [], 0, [b""]
    with readable(name, "repair it (as UTF-8 text), or leave it out",
                  (OSError, ValueError, NotImplementedError, csv.Error)):       # pyarrow's derive from these
        try:
            for text in reader(path, field):
                texts.append(text)
                if (size := size + len(text) + 1) >= BLOCK or reader == read_whole:
                    yield separator.join(start + texts)
                    texts, size, start = [], 0, [] if reader == read_whole else start
        except KeyError:
            raise ValueError(f"no column {safe_repr(field)}: name the right one with --text_field") from None
        if texts:
            yield separator.join(start + texts)
