"""Where text comes from."""
import glob
import hashlib
import io
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from runtime.cli import UserError
from runtime.files import corrupt_if_fails
from runtime.hub import need_hub, wait_to_retry

CURSOR_EVERY = 1000               # documents between two states of a stream
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars
MAX_DOCUMENT = 10**9            # characters held at once: a few kilobytes of .gz or .zst unpack to a line without an end
COMPRESSION = {".gz": 3, ".zst": 3, ".parquet": 2}   # about how many bytes of text a byte of the file holds
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)


class HubSource:
    """A dataset of the Hugging Face hub, streamed: what is read is not stored a second time on disk."""

    def __init__(self, repo, name):
        self.repo, self.name, self.cursors = repo, name, deque()
        self.description, self.expected = {"repo": repo, "name": name}, int(re.findall(r"\d+", name)[0]) * 10**9

    def documents(self, start=0, cursor=None):
        need_hub(f"{self.repo} ({self.name})")
        from datasets import load_dataset
        failures = 0
        while True:
            try:
                stream = load_dataset(self.repo, name=self.name, split="train", streaming=True)
                number, state = cursor or (0, None)
                if state:
                    stream.load_state_dict(state)
                for document in stream:
                    if not isinstance(document.get("text"), str):
                        raise UserError(f"{self.repo}: document {number} has no string `text`")
                    number += 1
                    if number > start:
                        yield document["text"], True
                        start, failures = number, 0
                    if number % CURSOR_EVERY == 0 and hasattr(stream, "state_dict"):
                        cursor = number, stream.state_dict()
                        self.cursors.append(cursor)
                return
            except UserError:
                raise
            except Exception as error:            # network errors come in the classes of many libraries
                wait_to_retry(error, failures, self.repo,
                              f"cannot read {self.repo} ({self.name}) from the Hugging Face hub")
                failures += 1


class LocalSource:
    """Files on disk: .txt (one document a file), .jsonl and .parquet (field `text`), also .gz and .zst."""

    def __init__(self, patterns):
        self.paths, self.readers, self.cursors = [], [], deque()
        self.description, self.expected = {"files": []}, 0        # what is read, and about how many tokens it holds
        for pattern in patterns:
            every = os.path.join(pattern, "*") if os.path.isdir(pattern) else pattern
            found = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(every, recursive=True)))
            if not found:
                raise UserError(f"--input {pattern}: no such file")
            self.paths += map(Path, found)
        for path in self.paths:
            kind = (path.with_suffix("") if path.suffix in (".gz", ".zst") else path).suffix
            if kind not in READERS:
                raise UserError(f"--input {path}: only .txt, .jsonl and .parquet, also .gz or .zst of the first two")
            self.readers.append(READERS[kind])
            with corrupt_if_fails(f"--input {path}", "give a file you may read, or leave it out", OSError):
                size, ends = path.stat().st_size, sha256_of_ends(path)
            self.description["files"].append({"name": path.name, "bytes": size, "sha256_of_ends": ends})
            self.expected += int(size * COMPRESSION.get(path.suffix, 1) / BYTES_PER_TOKEN)

    def documents(self, start=0, cursor=None):
        cursor = cursor or (0, 0)
        if [type(n) for n in cursor] != [int, int] or cursor[1] not in range(len(self.paths)):
            raise UserError("the manifest.json of an earlier run is damaged: choose another --out")
        number, first_file = cursor
        for i in range(first_file, len(self.paths)):
            self.cursors.append((number, i))
            with corrupt_if_fails(f"--input {self.paths[i]}", "repair it (text must be UTF-8) or leave it out",
                                  (OSError, ValueError, NotImplementedError)):       # pyarrow's errors derive from these
                for document in self.readers[i](self.paths[i]):
                    number += 1
                    if number > start:
                        yield document


def sha256_of_ends(path: Path, size: int = 1 << 16) -> str:
    """SHA-256 of a file's first and last 64 KiB: tells another file of the same name apart, however large it is."""
    with open(path, "rb") as file:
        head = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(head + file.read(size)).hexdigest()


def open_text(path: Path) -> io.TextIOWrapper:
    """A text file, unpacked if its name ends in .gz or .zst, as UTF-8 with its line ends as they are."""
    import pyarrow
    return io.TextIOWrapper(pyarrow.input_stream(str(path)), encoding="utf-8", newline="\n")


def read_txt(path: Path, piece_size: int = 1 << 18) -> Iterator[tuple[str, bool]]:
    """A file as one document in pieces, so that several workers share it and memory stays small.

    A cut between a character and the white space after it cannot change the tokens: no alternative
    of GPT-2's pattern goes on from the one to the other, or looks that far.
    """
    parts, first = [], True                       # the text since the last cut
    with open_text(path) as file:
        while block := file.read(piece_size):
            last = parts[-1][-1] if parts else ""         # a cut can come right after it, not before
            if cut := LAST_CUT.match(last + block):
                end = cut.end() - len(last)
                yield "".join([*parts, block[:end]]), first
                parts, block, first = [], block[end:], False
            parts.append(block)
            if sum(map(len, parts)) > MAX_DOCUMENT:
                raise ValueError(f"it goes on for more than {MAX_DOCUMENT:,} characters without a word's end")
    if parts:
        yield "".join(parts), first


def read_jsonl(path: Path) -> Iterator[tuple[str, bool]]:
    """One document a line: {"text": "..."}; empty lines are passed over."""
    with open_text(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT), ""), 1):
            if len(line) == MAX_DOCUMENT:
                raise ValueError(f"line {number} is not shorter than {MAX_DOCUMENT:,} characters")
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, LookupError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f'line {number} is not JSON of the form {{"text": "..."}}')
            yield text, True


def read_parquet(path: Path) -> Iterator[tuple[str, bool]]:
    """One document a row: column `text`."""
    import pyarrow.parquet
    table = pyarrow.parquet.ParquetFile(path)
    if "text" not in table.schema_arrow.names:
        raise ValueError(f"it has no column `text`, but {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(batch_size=16, columns=["text"]):     # 16, since half a kilobyte can repeat a huge document
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise ValueError("its column `text` holds something that is not a string")
            yield text, True


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
