"""Files of text -> documents, one reader a format.

A reader is a generator of texts (str, or UTF-8 in memoryviews) in the order of the file. It cuts the file
into tasks of about `task` bytes, and gives only the texts of those for which `mine(number of the task)`: so
several commands share a file (--part), and which text is whose depends on nothing but the file.
"""
import csv
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.cli import UserError, safe_repr
from runtime.files import readable

MAX_ROWS = 1 << 14              # of a task, however short they are
MAX_DOCUMENT = 10**9            # characters in memory: a small .gz or .zst can unpack to one endless line
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)
PACKED = {".gz": "gzip", ".zst": "zstd"}
Texts = Iterator[str | memoryview]


def charset_of(data: bytes) -> str:
    """The encoding, by iconv's name, in which bytes that are no UTF-8 text are probably written. '' if these
    are damaged UTF-8, or of a script that cannot be told."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    if data.count(0) > len(data) // 10:           # ASCII in UTF-16 is valid UTF-8, with a NUL a letter
        return "UTF-16LE" if data[1::2].count(0) > data[::2].count(0) else "UTF-16BE"
    text, high = data.decode(errors="replace"), sum(byte >= 0x80 for byte in data)
    bad = text.count("\ufffd")
    if sum(ord(char) >= 0x80 for char in text) > 2 * bad or high > 0.3 * len(data):
        return ""
    # Latin-1 has control characters where Windows has quotation marks and dashes
    return "WINDOWS-1252" if any(0x80 <= byte < 0xA0 for byte in data) else "LATIN1"


def not_utf8(path: Path, data: bytes) -> UserError:
    """The error of a file in another encoding, of which `data` is a piece."""
    name, old = charset_of(data), shlex.quote(str(path))
    if not name:
        return UserError(f"--input {path} is not UTF-8, or damaged: repair it, or if it is in another "
                         f"encoding, convert it (iconv -f ITS_ENCODING -t UTF-8), or leave it out")
    new = shlex.quote(str(path.with_name(f"{path.stem}.utf8{path.suffix}")))
    packed = path.suffix.lower() in PACKED
    return UserError(f"--input {path} is not UTF-8 but, it seems, {name}: " + (
        "unpack it, convert it with iconv" if packed else f"`iconv -f {name} -t UTF-8 {old} > {new}`") +
        ", and give the new file in its place")


@contextmanager
def checked(path: Path) -> Iterator[None]:
    """Around the reading of an input file: its errors are UserErrors."""
    with readable(f"--input {path}", "repair it (as UTF-8 text) or leave it out",
                  (OSError, ValueError, NotImplementedError)):       # pyarrow's errors derive from these
        try:
            yield
        except csv.Error as error:
            raise ValueError(f"as a table: {error}") from None
        except UnicodeDecodeError as error:
            raise not_utf8(path, error.object[max(0, error.start - 1000):error.end + 1000]) from None


def open_bytes(path: Path):
    """A binary file, decompressed if its name ends in .gz or .zst."""
    import pyarrow
    return pyarrow.input_stream(str(path), compression=PACKED.get(path.suffix.lower()))


def open_text(path: Path, newline: str = "\n") -> io.TextIOWrapper:
    """As UTF-8, line ends as in the file. A byte-order mark is not part of the text."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def read_txt(path: Path, task: int, mine: Callable, field: str = "", piece_size: int = 1 << 18) -> Texts:
    """A file as one document, and one task, in pieces: memory stays small.

    A piece ends after a character that is not white space and before a space or line end. Such a cut
    cannot change the tokens: no alternative of GPT-2's pattern matches across it or looks ahead past it.
    """
    if not mine(0):
        return
    parts = []                                    # the text since the last cut
    with open_text(path) as file:
        while block := file.read(piece_size):
            last = parts[-1][-1] if parts else ""         # the cut may come right after it
            if cut := LAST_CUT.match(last + block):
                end = cut.end() - len(last)
                yield "".join([*parts, block[:end]])
                parts, block = [], block[end:]
            parts.append(block)
            if sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError(f"more than {MAX_DOCUMENT:,} characters without the end of a word")
    if parts:
        yield "".join(parts)


def no_such_column(path: Path, where: str, field: str, names: Iterable[str]) -> UserError:
    """The error of a file without the column `field`. `where`: the line. `names`: of the columns it has."""
    return UserError(f"--input {path}{where}: no column {safe_repr(field)}, only "
                     f"{', '.join(names)[:200] or 'nothing'}: name the right one with --text_field")


def read_jsonl(path: Path, task: int, mine: Callable, field: str) -> Texts:
    """A document a line: {"text": "..."} if `field` is text. Empty lines are skipped. A task is the lines
    whose last bytes are in the same block of `task` bytes of the file."""
    with io.BufferedReader(open_bytes(path), 1 << 20) as file:
        end, block, i = 0, 0, 0                   # of the line before
        lines = iter(lambda: file.readline(MAX_DOCUMENT), b"")
        for number, line in enumerate(lines, 1):
            if len(line) == MAX_DOCUMENT:
                raise ValueError(f"line {number} has {MAX_DOCUMENT:,} bytes or more")
            end += len(line)
            if (end - 1) // task > block and number > 1:
                i += 1
            block = (end - 1) // task
            if mine(i) and (text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip()):
                yield document_of(text, field, path, number)


def document_of(line: str, field: str, path: Path, number: int) -> str:
    """The document in line `number` of a .jsonl file."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict) and field not in row:
        raise no_such_column(path, f", line {number}", field, row)
    if not isinstance(row, dict) or not isinstance(row[field], str):
        raise ValueError(f'line {number} is not JSON of the form {{"{safe_repr(field)}": "..."}}')
    return row[field]


def read_csv(path: Path, task: int, mine: Callable, field: str) -> Texts:
    """A document a row. The first row names the columns, which tabs separate if the name ends in .tsv."""
    csv.field_size_limit(MAX_DOCUMENT)
    with open_text(path, newline="") as file:     # as csv asks for it
        rows = csv.reader(file, delimiter="\t" if kind_of(path) == ".tsv" else ",", strict=True)
        names = next(rows, None)
        if names is None:                         # an empty file
            return
        if field not in names:
            raise no_such_column(path, "", field, names)
        column, size, count, i = names.index(field), 0, 0, 0          # of the task
        for row in filter(None, rows):            # without empty lines
            if len(row) != len(names):
                raise ValueError(f"the row in line {rows.line_num} has {len(row)} cells, and the first row "
                                 f"{len(names)}")
            if size >= task or count == MAX_ROWS:
                size, count, i = 0, 0, i + 1
            size += len(row[column])
            count += 1
            if mine(i):
                yield row[column]


def read_parquet(path: Path, task: int, mine: Callable, field: str) -> Texts:
    """A document a row. A task is some rows of a row group, by the sizes that the file's end states."""
    import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        if field not in file.schema_arrow.names:
            raise no_such_column(path, "", field, file.schema_arrow.names)
        i = 0
        for index in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(index)
            columns = (group.column(j) for j in range(group.num_columns))
            there = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
            # in tasks of equal size, up to half as much again as asked for
            rows = max(1, min(MAX_ROWS, math.ceil(group.num_rows / max(1, round(there / task)))))
            tasks = [mine(i + k) for k in range(math.ceil(group.num_rows / rows))]
            i += len(tasks)
            if any(tasks):
                texts = read_row_group(file, index, field)
                yield from (text for row, text in enumerate(texts) if tasks[row // rows])


def read_row_group(file, index: int, field: str) -> Texts:
    number, total = 0, file.metadata.row_group(index).num_rows
    # 16 rows at a time: a dictionary-encoded column of half a kilobyte can repeat a huge document
    for batch in file.iter_batches(batch_size=16, row_groups=[index], columns=[field], use_threads=False):
        number += len(batch)
        if number > total:
            break
        yield from texts_of_column(batch.column(0), field)
    if number != total:
        raise ValueError(f"its row group {index} has {number} rows, not {total} as the file's end states")


def texts_of_column(rows, field: str) -> list[memoryview]:
    """The strings of a pyarrow array as UTF-8, not copied."""
    import pyarrow
    if pyarrow.types.is_dictionary(rows.type):
        rows = rows.dictionary_decode()
    if rows.null_count or rows.type not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"its column {safe_repr(field)} holds something that is not a string")
    rows = rows.cast(pyarrow.large_string())
    rows.validate(full=True)                      # as UTF-8
    _, ends, text = rows.buffers()
    ends = np.frombuffer(ends, np.int64)[rows.offset:rows.offset + len(rows) + 1].tolist()
    text = memoryview(text or b"")
    return [text[first:end] for first, end in pairwise(ends)]


READERS = {".txt": read_txt, ".text": read_txt, ".md": read_txt, ".jsonl": read_jsonl, ".csv": read_csv,
           ".tsv": read_csv, ".parquet": read_parquet}


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read, in lower case: .txt of a.TXT and a.txt.gz. '' for none."""
    packed = path.suffix.lower() in PACKED
    kind = (path.with_suffix("") if packed else path).suffix.lower()
    return kind if kind in READERS and not (packed and kind == ".parquet") else ""
