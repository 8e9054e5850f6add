"""Text -> tokens, in the order of the text: gigatoken encodes, and tiktoken is the reference.

gigatoken (Rust) is some 30 times as fast as tiktoken. It gets many documents as one text,
with <|endoftext|> before each: what it returns is then what the shards hold. Documents in which the two can
differ go to tiktoken, and so does all text where gigatoken is not installed.
"""
import functools
import json
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np

from corpus.sources import Piece
from runtime.cli import RunError, UserError
from runtime.tokenizer import EOT, checked_asset, encode

START = b"<|endoftext|>"
BATCH = 1 << 19                 # bytes of text, about, that are encoded at once: memory in caches, used again
AHEAD = 256                     # batches encoded in advance: while a shard is written, encoding continues
COMPARED_FIRST, ONE_IN = 100_000, 1000    # bytes, and then the share of the text, that tiktoken encodes too
MOST_COMPARED = 1 << 19         # bytes of a document that is compared
# What Unicode 17 made letters: gigatoken knows, tiktoken does not yet. They may differ before 's, 're ...
NEW_LETTERS = """88f-88f c5c-c5c cdc-cdc a7ce-a7cf a7d2-a7d2 a7d4-a7d4 a7f1-a7f1 10940-10959 10ec5-10ec7
    11db0-11ddb 11de0-11de9 16ea0-16eb8 16ebb-16ed3 16ff2-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2
    1e6c0-1e6de 1e6e0-1e6e2 1e6e4-1e6e5 1e6e7-1e6ed 1e6f0-1e6f4 1e6fe-1e6ff 2b73a-2b73f 2cea2-2cead
    323b0-33479"""


class Tokens(NamedTuple):
    """Of successive documents: all their tokens (1-D uint16), with <|endoftext|> before each, and the number
    of each one's. `cursors`: (n, the source's state before the n-th of them)."""
    tokens: np.ndarray
    lengths: list[int]
    cursors: list[tuple[int, object]]


@functools.cache
def new_letters() -> dict[int, np.ndarray]:
    """{first byte in UTF-8: which values of the next two (256 x the second + the third) make it new}."""
    tables = defaultdict(lambda: np.zeros(1 << 16, dtype=bool))
    for first, last in (piece.split("-") for piece in NEW_LETTERS.split()):
        for code in range(int(first, 16), int(last, 16) + 1):
            lead, second, third, *_ = chr(code).encode()
            tables[lead][256 * second + third] = True
    return tables


def has_new_letter(text: bytes) -> bool:
    """Of UTF-8. Not by a regular expression: that takes at least four times as long."""
    data = np.frombuffer(text, dtype=np.uint8)
    for lead, table in new_letters().items():
        if lead in text:
            at = np.flatnonzero(data == lead)
            if table[data[at + 1].astype(np.uint16) << 8 | data[at + 2]].any():
                return True
    return False


def utf8(text: str | memoryview) -> bytes | memoryview:
    """U+FFFD for lone surrogates, as tiktoken has it."""
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def rows_of(texts: list) -> Iterator[bytes | str]:
    """The documents `texts`: many in one row of bytes, with <|endoftext|> before each, for gigatoken; a str
    for each in which the tokens may differ, because it holds a new letter or <|endoftext|>, which is ordinary
    text there. Those are found by halves."""
    row = START + START.join(map(utf8, texts))
    if row.count(START) == len(texts) and not has_new_letter(row):
        yield row
    elif len(texts) > 1:
        yield from rows_of(texts[:len(texts) // 2])
        yield from rows_of(texts[len(texts) // 2:])
    else:
        yield row[len(START):].decode()


def read_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """What was read before an error of the source comes before it."""
    batch, size = [], 0
    try:
        for piece in pieces:
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    except (UserError, RunError):
        if batch:
            yield batch
        raise
    if batch:
        yield batch


@functools.cache
def gigatoken(threads: int) -> Callable[[bytes], np.ndarray] | None:
    """The function that encodes UTF-8, from assets/; None where gigatoken is missing. Text up to a megabyte
    is encoded on the calling thread, longer text on `threads` of gigatoken's own, of which the first use in
    a process decides on the number."""
    try:
        from gigatoken.gigatoken_rs import PadTruncate, load_hf_json
    except ImportError:
        return None
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    vocabulary, merges = (checked_asset(name).read_text(encoding="utf-8")
                          for name in ("encoder.json", "vocab.bpe"))
    # a tokenizer.json, of which gigatoken reads as much
    tokenizer = load_hf_json(json.dumps({
        "added_tokens": [{"id": EOT, "content": START.decode(), "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": json.loads(vocabulary), "merges": merges.split("\n")[1:-1]}}))

    def run(row):
        padded, lengths = tokenizer.encode_batch_padded([row], PadTruncate(0))
        return padded[0, :lengths[0]]

    return run


def encode_batch(batch: list[Piece], compared: int, run: Callable[[bytes], np.ndarray] | None) -> Tokens:
    """Its tokens by `run`, or where that is None by tiktoken. RunError where one of the first `compared`
    pieces has other tokens than tiktoken's."""
    texts = [piece.text for piece in batch]
    parts = []
    for row in rows_of(texts) if run else (str(utf8(text), "utf-8") for text in texts):
        parts += [run(row)] if isinstance(row, bytes) else [[EOT], encode(row)]
    tokens = np.concatenate(parts, dtype=np.uint16, casting="unsafe")
    first = np.flatnonzero(tokens == EOT)
    lengths = np.diff(first, append=len(tokens))
    compare(texts[:compared], np.split(tokens, first[1:compared + 1]))
    further = np.array([not piece.begins for piece in batch])
    if further.any():                             # np.delete is slow, even if there is nothing to delete
        tokens, lengths = np.delete(tokens, first[further]), lengths - further
    return Tokens(tokens, lengths.tolist(), [(n, piece.cursor) for n, piece in enumerate(batch)
                                             if piece.cursor is not None])


def compare(texts: list, tokens: list[np.ndarray]) -> None:
    """RunError where the tokens of a document, after <|endoftext|>, are not tiktoken's."""
    for text, found in zip(texts, tokens, strict=False):
        text = str(utf8(text), "utf-8")
        if not np.array_equal(found[1:], encode(text)):
            raise RunError("gigatoken's tokens are not tiktoken's for the document that begins with "
                           f"{text[:60]!r}: uninstall gigatoken, and run the same command again")


def ahead(items: Iterator, most: int) -> Iterator:
    """The items, which a thread makes, up to `most` in advance. An error comes in its place."""
    ready, free, stopped = queue.SimpleQueue(), threading.Semaphore(most), []

    def work():
        try:
            with closing(items):
                while free.acquire() and not stopped and (item := next(items, None)) is not None:
                    ready.put(item)
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=work, daemon=True, name="ahead")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
            free.release()
    finally:
        stopped.append(True)
        free.release()
        thread.join(1)              # it may wait for the network: then it ends with the process


def encode_stream(pieces: Iterable[Piece], threads: int = 1) -> Iterator[Tokens]:
    """The tokens of `pieces` in their order. Reading (one thread), encoding (so many), and the use of the
    tokens run at once."""
    run, waiting = gigatoken(threads), threading.Semaphore(2 * threads)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def submitted():
        seen, compared = 0, -COMPARED_FIRST       # bytes
        for batch in read_batches(pieces):
            sizes, n = [len(piece.text) for piece in batch], 0
            seen += sum(sizes)
            while compared * ONE_IN <= seen and n < len(batch) and sizes[n] <= MOST_COMPARED:
                compared, n = compared + sizes[n], n + 1
            waiting.acquire()                     # text that waits needs memory that is not in caches
            future = pool.submit(encode_batch, batch, n, run)
            future.add_done_callback(lambda _: waiting.release())
            yield future

    try:
        with closing(ahead(submitted(), AHEAD)) as futures:
            for future in futures:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
