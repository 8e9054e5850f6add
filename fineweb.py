"""Both ends of the token shards: text -> shards (the command), shards -> batches (the loader).

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --pretokenized 9                  FineWeb's published tokens, 9 x 100M -> fineweb10B/

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`. With --format bin it is llm.c's and modded-nanogpt's
file instead: 256 int32 (magic 20240520, version 1, token count), then the tokens.
"""
import argparse
import bisect
import contextlib
import errno
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

ASSETS = Path(__file__).resolve().parent / "assets"
VOCAB_SIZE = 50257              # 50,000 merges + 256 bytes + <|endoftext|>
EOT = 50256                     # <|endoftext|>
BPE_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256     # llm.c, dev/data/data_common.py
BYTES_PER_TOKEN = 4.2           # English text under GPT-2's BPE; only for estimates and progress bars


# -----------------------------------------------------------------------------
# what every command of this project shares: one clear line for a mistake, flags with underscores

class UserError(Exception):
    """A mistake that the user can mend: the message names the cause and the remedy (exit code 2)."""


class RunError(Exception):
    """The run itself failed (exit code 1)."""


class FlagParser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors and whose flags cannot be abbreviated."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def whole_number(text: str) -> int:
    """'100000', '100_000' or '1e5' -> 100000, for flags."""
    for kind in (int, float):                     # int first: float would round what is above 2**53
        with contextlib.suppress(ValueError, OverflowError):
            if int(kind(text)) == kind(text):
                return int(kind(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def one_line(error: Exception | str) -> None:
    # a stranger's file can put escape codes into a message
    text = "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def shown(value: object) -> str:
    """A value of a stranger's file for a message. Not str() of a list: one that holds itself again and again never ends."""
    return str(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def run_command(main: Callable[[], int | None], is_master: Callable[[], bool] = lambda: True) -> None:
    """Runs `main()` as a command: UserError -> one line and exit 2, RunError -> one line and exit 1."""
    sys.stdout.reconfigure(errors="replace")      # a terminal or pipe that is not UTF-8 shows a sampled token as ?
    try:
        sys.exit(main() or 0)
    except (UserError, RunError) as error:
        if is_master():
            one_line(error)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:                       # `... | head` closed the pipe: not worth a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def reach_hub() -> bool:
    """Whether the Hugging Face hub answers. Where it does not, lets its libraries look into their caches only: they would
    try for half a minute, and print each attempt."""
    import huggingface_hub
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
    except Exception:                             # the network's errors are of many libraries' classes
        os.environ["HF_HUB_OFFLINE"] = "1"        # for what is imported only now
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return not huggingface_hub.constants.HF_HUB_OFFLINE


def need_hub(what: str) -> None:
    """RunError at once, rather than after minutes of retries, where no hub is in reach."""
    if not reach_hub():
        raise RunError(f"the Hugging Face hub is out of reach (or HF_HUB_OFFLINE is set), and {what} must come from there: run "
                       f"the same command again with a network, or give text of your own by --input")


# -----------------------------------------------------------------------------
# the tokenizer

def checked_asset(name: str) -> Path:
    """Path of one of GPT-2's two BPE files in assets/, after a look at its hash."""
    path = ASSETS / name
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != BPE_SHA256[name]:
        raise UserError(f"{path} is missing or is not GPT-2's file: restore it with `git checkout -- assets`")
    return path


@functools.cache
def tokenizer():
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) as a tiktoken Encoding, built from assets/.

    Equal to `tiktoken.get_encoding("gpt2")`, which downloads the same two files.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    # encoder.json spells bytes as printable characters: the printable ones of Latin-1 stand for
    # themselves, the other 68 for the code points from 256 on. Its ids are the merge ranks.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    encoder = json.loads(checked_asset("encoder.json").read_text(encoding="utf-8"))
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in encoder.items() if rank != EOT}
    return tiktoken.Encoding("gpt2", explicit_n_vocab=VOCAB_SIZE, pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": EOT})


def encode(text: str) -> np.ndarray:
    """GPT-2 tokens of `text` as uint16; `<|endoftext|>` inside the text is ordinary text."""
    try:
        return tokenizer().encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except UnicodeEncodeError:                    # lone surrogates: encode_ordinary replaces them
        return np.array(tokenizer().encode_ordinary(text), dtype=np.uint16)
    except ValueError as error:                   # the regular expression runs out of stack
        raise UserError(f"a document has too long a run of white space for tiktoken ({error}): shorten it") from None


# -----------------------------------------------------------------------------
# shard files

SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file whole or not at all: `write(file)` fills a temporary one, fsync, os.replace."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:      # torch.save hides the first inside the second
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise RunError(f"cannot write {path}: {cause.strerror or cause}. Make room or give another folder; what was written "
                       f"before is whole, and the same command goes on from it") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name != "nt":                           # make the rename itself durable
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes 1-D uint16 `tokens` as .npy or .bin, by the name's ending."""
    head = io.BytesIO()
    if Path(path).suffix == ".bin":
        head.write(np.array([BIN_MAGIC, BIN_VERSION, len(tokens)] + [0] * (BIN_HEADER - 3), dtype="<i4"))
    else:
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tokens))
    # not by np.save: with the disk full it can lose a file's last bytes without an error
    replace_file(path, lambda file: file.writelines((head.getvalue(), tokens)))


def open_shard(path: str | Path) -> np.memmap:
    """Tokens of a .npy or .bin shard as a read-only memory map, 1-D uint16. Raises UserError if the file is
    not a whole shard; nothing in it is ever unpickled."""
    path = Path(path)
    try:
        if not path.is_file():                    # a named pipe would never answer
            raise ValueError("it is no file")
        if path.suffix == ".bin":
            header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
            if len(header) < BIN_HEADER or (header[0], header[1]) != (BIN_MAGIC, BIN_VERSION):
                raise ValueError(f"it does not start with llm.c's header: magic {BIN_MAGIC}, version {BIN_VERSION}")
            if path.stat().st_size != 4 * BIN_HEADER + 2 * int(header[2]):
                raise ValueError(f"its size is not that of the {header[2]:,} tokens which its header promises")
            tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER)
        else:
            with warnings.catch_warnings(action="ignore"):        # a strange header's come beside the error
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(tokens, np.memmap) or tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"it holds {getattr(tokens, 'dtype', 'an archive')} {getattr(tokens, 'shape', '')}")
        if path.stat().st_size != tokens.offset + tokens.nbytes:
            raise ValueError(f"it goes on after the {len(tokens):,} tokens which its header promises")
    except Exception as error:                    # numpy's reader fails in many ways on a broken header
        reason = "it is no .npy, or holds pickled objects" if "pickle" in str(error) else str(error)[:200]
        raise UserError(f"{path} is not a whole shard, 1-D uint16 tokens ({reason}): copy or make it again") from None
    return tokens


def read_shard(path: str | Path) -> np.ndarray:
    """Tokens of a shard in memory. Not copied from the memory map: a file that is cut off meanwhile would kill the
    process there (SIGBUS), where a read comes back short."""
    tokens = open_shard(path)
    return np.fromfile(path, dtype="<u2", count=len(tokens), offset=tokens.offset)


def sample_of(values: np.ndarray) -> np.ndarray:
    """A 1-D array of up to 8 million values as it is; of a longer one (FineWeb's shards have 100 million) 8 evenly spaced
    blocks of 131,072 values, the first and the last among them."""
    if len(values) <= 1 << 23:
        return np.asarray(values)
    return np.concatenate([values[at:at + 131072] for at in np.linspace(0, len(values) - 131072, 8, dtype=np.int64)])


def digest(values: np.ndarray) -> str:
    """16 hexadecimal digits of the SHA-256 of sample_of(values): another file, or an earlier one, has others."""
    return hashlib.sha256(np.ascontiguousarray(sample_of(values))).hexdigest()[:16]


def list_shards(folder: str | Path, split: str) -> list[Path]:
    """Sorted paths of a folder's shards of `split` ('train' or 'val')."""
    if os.path.exists(folder) and not os.path.isdir(folder):       # os.path's questions raise nothing for a strange name
        raise UserError(f"{folder} is a file: give the folder of the shards")
    paths = Path(folder).glob("*") if os.path.isdir(folder) else ()
    paths = sorted(path for path in paths if (m := SHARD_NAME.match(path.name)) and m[1] == split)
    if not paths:
        raise UserError(f"there is no data in {folder}, no *_{split}_000000.npy or .bin: `python fineweb.py` makes "
                        f"edu_fineweb10B, with --pretokenized 9 it fetches fineweb10B, and with --input YOUR_TEXT --out "
                        f"{folder} it makes shards of your own text")
    return paths


# -----------------------------------------------------------------------------
# writing, 1: where text comes from. `units(start, mark)` yields (text, starts_document) in a fixed order,
# from unit `start` on. `marks` collects (unit, state) pairs: with the last one at or before `start`
# as `mark`, a source need not read again what came before.

RETRIES = 8                     # waits of 1, 2, 4 ... 128 s: about four minutes without the network
MARK_EVERY = 1000               # documents between two states of a stream


class HubSource:
    """A dataset of the Hugging Face hub, streamed: what is read is not stored a second time on disk."""

    def __init__(self, repo, name):
        self.repo, self.name, self.marks = repo, name, deque()
        self.description, self.expected = {"repo": repo, "name": name}, int(re.findall(r"\d+", name)[0]) * 10**9

    def units(self, start=0, mark=None):
        need_hub(f"{self.repo} ({self.name})")
        from datasets import load_dataset
        failures = 0
        while True:
            try:
                stream = load_dataset(self.repo, name=self.name, split="train", streaming=True)
                unit, state = mark or (0, None)
                if state:
                    stream.load_state_dict(state)
                for document in stream:
                    if not isinstance(document.get("text"), str):
                        raise UserError(f"{self.repo}: document {unit} has no string `text`")
                    unit += 1
                    if unit > start:
                        yield document["text"], True
                        start, failures = unit, 0
                    if unit % MARK_EVERY == 0 and hasattr(stream, "state_dict"):
                        mark = unit, stream.state_dict()
                        self.marks.append(mark)
                return
            except UserError:
                raise
            except Exception as error:            # the network's errors are of many libraries' classes
                failures += 1
                if failures > RETRIES:
                    raise RunError(f"cannot read {self.repo} ({self.name}) from the Hugging Face hub: {error}. Run "
                                   f"the same command again to go on, or give text of your own by --input") from None
                print(f"{self.repo}: {error}; trying again in {2 ** (failures - 1)} s", file=sys.stderr)
                time.sleep(2 ** (failures - 1))


class LocalSource:
    """Files on disk: .txt (one document a file), .jsonl and .parquet (field `text`), also .gz and .zst."""

    def __init__(self, patterns):
        self.paths, self.readers, self.marks = [], [], deque()
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
            size, end = path.stat().st_size, 1 << 16
            try:
                with open(path, "rb") as file:    # a hash of both ends notices another file of the same name, however large
                    ends = file.read(end)
                    file.seek(max(0, size - end))
                    ends = hashlib.sha256(ends + file.read(end)).hexdigest()
            except OSError as error:
                raise UserError(f"--input {path} cannot be read: {error.strerror}") from None
            self.description["files"].append({"name": path.name, "bytes": size, "sha256_of_ends": ends})
            self.expected += int(size * PACKING.get(path.suffix, 1) / BYTES_PER_TOKEN)

    def units(self, start=0, mark=None):
        mark = mark or (0, 0)
        if [type(n) for n in mark] != [int, int] or mark[1] not in range(len(self.paths)):
            raise UserError("the manifest.json of an earlier run is damaged: choose another --out")
        unit, first_file = mark
        for i in range(first_file, len(self.paths)):
            self.marks.append((unit, i))
            try:
                for item in self.readers[i](self.paths[i]):
                    unit += 1
                    if unit > start:
                        yield item
            except (OSError, ValueError, NotImplementedError) as error:      # pyarrow's errors derive from these
                raise UserError(f"--input {self.paths[i]} cannot be read ({error}): mend it (as UTF-8) or leave it out") from None


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


MAX_DOCUMENT = 10**9            # characters held at once: a few kilobytes of .gz or .zst unpack to a line without an end
PACKING = {".gz": 3, ".zst": 3, ".parquet": 2}   # about how many bytes of text a byte of the file holds
READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
LAST_CUT = re.compile(r".*\S(?=[ \n\r])", re.DOTALL)


# -----------------------------------------------------------------------------
# writing, 2: units -> tokens on several threads. tiktoken releases the GIL, so threads scale like
# processes (2 cores: 17 -> 34 MB/s), copy nothing between them, and need no main guard anywhere.

def encode_units(units: list[tuple[str, bool]]) -> list[np.ndarray]:
    """Tokens of each unit, uint16: <|endoftext|> first where a document starts."""
    return [np.concatenate(([EOT] * starts, encode(text)), dtype=np.uint16, casting="unsafe") for text, starts in units]


def encode_stream(units: Iterable[tuple[str, bool]], workers: int, chunk: int = 1 << 17) -> Iterator[np.ndarray]:
    """Tokens of one unit after the other, in their order; a thread takes about 128k characters at a time."""
    tokenizer()                                   # built once, before the threads ask for it
    batch, size, pending = [], 0, deque()
    with ThreadPoolExecutor(workers) as pool:
        for unit in units:
            batch.append(unit)
            size += len(unit[0])
            if size >= chunk:
                pending.append(pool.submit(encode_units, batch))
                batch, size = [], 0
            if len(pending) > 2 * workers:        # bounds memory, keeps every worker busy
                yield from pending.popleft().result()
        pending.append(pool.submit(encode_units, batch))
        while pending:
            yield from pending.popleft().result()


# -----------------------------------------------------------------------------
# writing, 3: tokens -> shards, and a manifest from which an interrupted run goes on

class ShardWriter:
    """Cuts a stream of tokens into shards, and records in manifest.json where each ends in the source.

    Shard 0 is validation. `settings` (source, tokenizer, sizes, format) decide every byte of the
    shards. Files appear whole or not at all; after a kill the same command takes the manifest up,
    goes on after the last whole shard, and ends with the same bytes.
    """

    def __init__(self, out, prefix, settings, marks):
        self.out, self.prefix, self.settings, self.marks = out, prefix, {"version": 1, **settings}, marks
        self.manifest = {**self.settings, "complete": False, "tokens": 0, "mark": None, "shards": []}
        self.path = out / "manifest.json"
        self.max_tokens = settings["max_tokens"] or math.inf
        self.unit, self.offset, self.total = 0, 0, 0      # taken: `total` tokens, up to token `offset` of unit `unit`
        self.parts, self.room = [], settings["val_tokens"]        # the next shard, and what it still takes
        try:
            out.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._take_up()
            elif any(SHARD_NAME.match(path.name) for path in out.iterdir()):
                raise UserError(f"{out} already holds shards without a manifest.json: choose another --out")
            if not self.manifest["shards"]:
                self._save()                      # a kill while shard 0 is written must not leave it without one
        except (OSError, RunError) as error:
            raise UserError(f"--out {out} cannot be written ({error}): choose another folder") from None

    def _take_up(self):
        """Makes the manifest that is there this run's, if it is whole and of the same settings."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if "pretokenized" in found:
                raise UserError(f"{self.out} holds fetched shards of {shown(found['pretokenized'])}: choose another --out")
            shards = [(self.out / Path(s["file"]).name, s["tokens"], s["end"]["unit"], s["end"]["token"])
                      for s in found["shards"]]
            numbers = [(found["mark"] or [0])[0], *(n for shard in shards for n in shard[1:])]
            if not all(type(n) is int and n >= 0 for n in numbers) or type(found["complete"]) is not bool:
                raise ValueError
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise UserError(f"{self.path} is damaged: choose another --out, or remove {self.out} to start again") from None
        if not shards:
            return
        for key, value in self.settings.items():
            if found.get(key) != value:
                raise UserError(f"{self.out} was begun with another {key} ({json.dumps(found.get(key))[:200]} instead of "
                                f"{json.dumps(value)[:200]}): give the same again, or choose another --out")
        for path, tokens, self.unit, self.offset in shards:
            if len(open_shard(path)) != tokens:
                raise UserError(f"{path} is not the shard that manifest.json describes: remove {self.out}")
            self.total += tokens
        self.manifest, self.room = found, self.settings["shard_size"]

    def add(self, tokens):
        """Appends the next unit's tokens (up to max_tokens). A full shard is written when more comes."""
        while self.offset < len(tokens) and self.total < self.max_tokens:
            if self.room == 0:
                self._write()
            part = tokens[self.offset:self.offset + min(self.room, self.max_tokens - self.total)]
            self.parts.append(part)
            self.offset += len(part)
            self.total += len(part)
            self.room -= len(part)
        if self.offset == len(tokens):
            self.unit, self.offset = self.unit + 1, 0

    def finish(self):
        """Writes the rest; a corpus that ends inside the validation shard is divided 1 : 9."""
        if not self.manifest["shards"]:
            if self.total < 20:
                raise UserError(f"only {self.total} tokens of text: too few for a training and a validation shard")
            units, self.parts, self.room, self.total, self.unit = self.parts, [], self.total // 10, 0, 0
            for tokens in units:
                self.add(tokens)
        if self.parts:
            self._write()
        self.manifest |= {"complete": True, "mark": None}
        self._save()

    def _write(self):
        """Writes what is gathered as the next shard, then the manifest."""
        index, tokens = len(self.manifest["shards"]), np.concatenate(self.parts)
        split = "train" if index else "val"
        name = f"{self.prefix}_{split}_{index:06d}.{self.settings['format']}"
        while self.marks and self.marks[0][0] <= self.unit:
            self.manifest["mark"] = self.marks.popleft()
        self.manifest["shards"].append({"file": name, "split": split, "tokens": len(tokens),
                                        "end": {"unit": self.unit, "token": self.offset}})
        self.manifest["tokens"] = self.total
        write_shard(self.out / name, tokens)
        self._save()
        self.parts, self.room = [], self.settings["shard_size"]

    def _save(self):
        replace_file(self.path, lambda file: file.write(json.dumps(self.manifest, indent=1).encode()))


# -----------------------------------------------------------------------------
# shards that others made: GPT-2's tokens of FineWeb as llm.c's files, which modded-nanogpt trains on

PRETOKENIZED = {("classic", "10BT"): ("kjj0/fineweb10B-gpt2", "fineweb", 103),       # dataset, prefix, training shards
                ("classic", "100BT"): ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
                ("edu", "10BT"): ("kjj0/finewebedu10B-gpt2", "finewebedu", 99)}
# the disk's and HTTP's errors that no waiting mends
HOPELESS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, 401, 403, 404}


def is_whole(path: Path) -> bool:
    try:
        return open_shard(path) is not None
    except UserError:
        return False


def fetch_file(repo: str, path: Path) -> None:
    """Fetches a file of a hub dataset to `path`; huggingface_hub goes on where an earlier call of it ended."""
    from huggingface_hub import hf_hub_download
    for failures in itertools.count():
        try:
            path.unlink(missing_ok=True)          # a file cut off later on passes there for what was fetched
            hf_hub_download(repo, path.name, repo_type="dataset", local_dir=path.parent)
            return
        except Exception as error:                # the network's errors are of many libraries' classes
            code = getattr(error, "errno", None) or getattr(getattr(error, "response", None), "status_code", None)
            if failures == RETRIES or code in HOPELESS:
                raise RunError(f"cannot fetch {path} from the Hugging Face hub, {repo}: {error}. Run the same command again "
                               f"to go on, or give text of your own by --input") from None
            one_line(f"{repo}: {error}; trying again in {2 ** failures} s")
            time.sleep(2 ** failures)


def fetch_shards(repo: str, prefix: str, count: int, out: Path) -> None:
    """The command with --pretokenized: the validation shard and the first `count` for training. What is there and whole
    is not fetched again; a folder with shards of another source is refused (UserError)."""
    start, manifest, ours = time.perf_counter(), out / "manifest.json", json.dumps({"pretokenized": repo}).encode()
    paths = [out / f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    try:
        names = [path.name for path in out.glob("*") if SHARD_NAME.match(path.name)]
        if names and not (manifest.read_bytes() == ours if manifest.exists() else
                          all(re.fullmatch(rf"{prefix}_(val|train)_\d{{6}}\.bin", name) for name in names)):
            raise UserError(f"{out} holds shards of another source than {repo}: choose another --out")
        if missing := [path for path in paths if not is_whole(path)]:
            need_hub(f"{len(missing)} of {len(paths)} files of {repo}")
            out.mkdir(parents=True, exist_ok=True)
            replace_file(manifest, lambda file: file.write(ours))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error}): choose another folder") from None
    for path in missing:
        fetch_file(repo, path)
        if not is_whole(path):
            fetch_file(repo, path)
        if not is_whole(path):
            raise RunError(f"{path} came damaged from {repo} twice: run the same command again, or ask for fewer shards")
    val, train = (sum(len(open_shard(path)) for path in list_shards(out, split)) for split in ("val", "train"))
    print(f"{out}: {len(missing)} of {len(paths)} shards fetched from {repo}, {val:,} tokens for validation and {train:,} for "
          f"training are there, after {time.perf_counter() - start:.1f} s\nnext: python train_gpt2.py --data {out}")


# -----------------------------------------------------------------------------
# the command

FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}
TEXT_FLAGS = ("--input", "--shard_size", "--val_tokens", "--max_tokens", "--workers", "--format")


def check_pretokenized(args: argparse.Namespace, argv: list[str]) -> None:
    for word in argv:                             # not by their values: one may be given its default
        if (name := word.partition("=")[0]) in TEXT_FLAGS:
            raise UserError(f"{name} has no meaning with --pretokenized, whose shards are made already: leave one of the two out")
    if (args.variant, args.sample) not in PRETOKENIZED:
        raise UserError(f"no tokens of --variant {args.variant} --sample {args.sample} are published: leave --sample out")
    published = PRETOKENIZED[args.variant, args.sample][2]
    if args.pretokenized not in range(1, published + 1):
        raise UserError(f"--pretokenized {args.pretokenized}: give a number of training shards, 1 to {published}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    flag = parser.add_argument
    flag("--variant", choices=list(FINEWEB), help="FineWeb-Edu or FineWeb itself (default edu; classic with --pretokenized)")
    flag("--sample", choices=["10BT", "100BT"], default="10BT", help="which sample of it, in tokens (default 10BT)")
    flag("--input", action="append", metavar="PATH_OR_GLOB",
         help="text of your own instead, repeatable: .txt (one document a file), .jsonl or .parquet (`text`), .txt.gz ...")
    flag("--pretokenized", type=whole_number, metavar="N",
         help="fetch published tokens instead: the validation shard and the first N for training, 100M tokens or 200 MB each")
    flag("--out", help="folder for the shards (default edu_fineweb10B and the like; needed with --input)")
    flag("--shard_size", type=whole_number, default=100_000_000, help="tokens a shard (default 100000000)")
    flag("--val_tokens", type=whole_number, help="validation tokens, shard 0 (default shard_size, at most a tenth of the text)")
    flag("--max_tokens", type=whole_number, help="stop after so many tokens, validation included")
    flag("--workers", type=whole_number, default=os.cpu_count() or 1, help="threads that tokenize (default: one a core)")
    flag("--format", choices=["npy", "bin"], default="npy", help="numpy's files, or llm.c's and modded-nanogpt's (default npy)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.variant = args.variant or ("edu" if args.pretokenized is None else "classic")
    if args.pretokenized is not None:
        check_pretokenized(args, argv)
    for name in ("shard_size", "val_tokens", "max_tokens", "workers"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.input and not args.out:
        raise UserError("--input needs --out: name the folder that the shards go into")
    if (args.val_tokens or 0) >= (args.max_tokens or math.inf):
        raise UserError(f"--val_tokens {args.val_tokens} leaves nothing of --max_tokens {args.max_tokens} to train on")
    return args


def main(argv: list[str] | None = None) -> None:
    """The command: from text to the shards of a folder, or on from where an earlier run stopped."""
    from tqdm import tqdm
    args = parse_args(argv)
    if args.pretokenized is not None:
        repo, prefix, _ = PRETOKENIZED[args.variant, args.sample]
        return fetch_shards(repo, prefix, args.pretokenized, Path(args.out or prefix + args.sample[:-1]))
    if args.input:
        source, prefix, out = LocalSource(args.input), "text", args.out
    else:
        repo, prefix, folder = FINEWEB[args.variant]
        source, out = HubSource(repo, f"sample-{args.sample}"), args.out or folder + args.sample[:-1]
    expected = min(source.expected, args.max_tokens or math.inf)
    settings = {"source": source.description, "tokenizer": {"name": "gpt2", **BPE_SHA256}, "format": args.format,
                "shard_size": args.shard_size, "max_tokens": args.max_tokens,
                "val_tokens": args.val_tokens or min(args.shard_size, max(20, expected // 10))}
    start = time.perf_counter()
    writer = ShardWriter(Path(out), prefix, settings, source.marks)
    shards, there = writer.manifest["shards"], writer.total
    if there:
        print(f"{out}: {len(shards)} shards, {there:,} tokens, are there already")
    if not writer.manifest["complete"]:
        with tqdm(total=expected, initial=there, unit="tok", unit_scale=True, desc=out, disable=None) as bar:
            for tokens in encode_stream(source.units(writer.unit, writer.manifest["mark"]), args.workers):
                writer.add(tokens)
                bar.update(writer.total - bar.n)
                if writer.total >= writer.max_tokens:
                    break
        writer.finish()
    val, seconds = shards[0]["tokens"], time.perf_counter() - start
    print(f"{out}: {len(shards)} shards complete, {val:,} tokens for validation and {writer.total - val:,} for training, "
          f"after {seconds:.1f} s\nnext: python train_gpt2.py --data {out}")


# -----------------------------------------------------------------------------
# reading: shards -> batches. "Global step decides everything": which tokens a step sees is a pure
# function of (shards, seed, step, total_batch_size, sequence_length), so that any number of
# processes, any micro-batch and any resume see the same ones, and a loader has no state to save.

def stable_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) that depends on `key` alone, in every release of numpy: Generator.permutation
    may change between releases (NEP 19), the raw stream of Philox may not."""
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(n), kind="stable")


class Windows:
    """The T-token windows of a list of shards as one endless sequence, epoch after epoch.

    Shard i has (len_i - 1) // T windows (the last target needs one token more); each comes once an
    epoch. With `shuffle` the shards, and the windows within each, are permuted anew each epoch by
    the seed; without, the order is the files'. `shards`: paths, or 1-D uint16 arrays.
    One shard is resident, as uint16. Raises UserError for a shard that is damaged, for too little
    text to give a window, for ids at or above `vocab_size` (at once where a sample shows them, at
    the latest when the shard is read), and for a shard that is no longer what it was at the start.
    """

    def __init__(self, shards: list[Path | np.ndarray], sequence_length: int, seed: int = 0, shuffle: bool = False,
                 vocab_size: int | None = None):
        self.shards, self.T, self.vocab_size = list(shards), sequence_length, vocab_size
        self.names = ["the text" if isinstance(shard, np.ndarray) else str(shard) for shard in self.shards]
        self.fingerprint = [self._look_at(i) for i in range(len(self.shards))]
        self.lengths = [length for _, length, _ in self.fingerprint]
        self.counts = [(length - 1) // self.T for length in self.lengths]
        self.total = sum(self.counts)
        if self.total == 0:
            raise UserError(f"{self.names[0]}: {sum(self.lengths):,} tokens are too few for one sequence of "
                            f"{self.T} tokens and its target: give more text or a smaller --sequence_length")
        self._order = (lambda n, *key: stable_permutation(n, seed, *key)) if shuffle else (lambda n, *_: np.arange(n))
        self._epoch, self._resident = None, None

    def _look_at(self, i):
        """[name, number of tokens, digest] of shard i."""
        tokens = self.shards[i] if isinstance(self.shards[i], np.ndarray) else open_shard(self.shards[i])
        sample = sample_of(tokens)
        self._check_ids(i, sample)
        return [Path(self.names[i]).name, len(tokens), digest(sample)]

    def _check_ids(self, i, tokens):
        if self.vocab_size is not None and len(tokens) and tokens.max() >= self.vocab_size:
            raise UserError(f"{self.names[i]} holds token {tokens.max()}, and the model's vocabulary has "
                            f"{self.vocab_size}: these are not GPT-2's tokens, or --vocab_size is too small")

    def _load_shard(self, i):
        """Makes shard i resident: its tokens as rows (windows, T+1), and the order of these in this epoch."""
        tokens = self.shards[i] if isinstance(self.shards[i], np.ndarray) else read_shard(self.shards[i])
        if [len(tokens), digest(tokens)] != self.fingerprint[i][1:]:
            raise UserError(f"{self.names[i]} changed during the run: bring back what it was, and the same command goes on")
        self._check_ids(i, tokens)
        self._rows = np.lib.stride_tricks.sliding_window_view(tokens, self.T + 1)[::self.T]      # no copy
        self._row_order, self._resident = self._order(self.counts[i], self._epoch, i), i

    def read(self, first: int, count: int) -> np.ndarray:
        """Windows `first` to `first + count` of the endless sequence: uint16 (count, T+1)."""
        out = np.empty((count, self.T + 1), dtype=np.uint16)
        row = 0
        while row < count:
            epoch, position = divmod(first + row, self.total)
            if epoch != self._epoch:
                self._epoch, self._resident, self._shard_order = epoch, None, self._order(len(self.shards), epoch)
                self._edges = [0, *itertools.accumulate(self.counts[i] for i in self._shard_order)]
            slot = bisect.bisect_right(self._edges, position) - 1
            i, local = int(self._shard_order[slot]), position - self._edges[slot]
            if i != self._resident:
                self._load_shard(i)
            n = min(count - row, self.counts[i] - local)
            out[row:row + n] = self._rows[self._row_order[local:local + n]]
            row += n
        return out


def to_device(rows, device):
    """Windows (B, T+1) -> inputs x and targets y, int64 (B, T) each, on `device`.

    On CUDA `rows` is a pinned tensor and the copy overlaps with what the GPU is doing.
    """
    import torch
    rows = rows if torch.is_tensor(rows) else torch.from_numpy(rows.astype(np.int32))
    rows = rows.to(device, non_blocking=True).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class TokenLoader:
    """Micro-batches of this rank, read ahead on a thread.

    Step s covers windows [s N, (s+1) N) of the endless sequence, N = total_batch_size / T; its
    micro-step m gives rank r the B windows from s N + (m world_size + r) B on.
    """
    DEPTH = 8                   # micro-batches read ahead: covers the second that a new shard takes to load

    def __init__(self, windows: Windows, total_batch_size: int, batch_size: int, rank: int = 0, world_size: int = 1,
                 device: str = "cpu"):
        assert total_batch_size % (batch_size * windows.T * world_size) == 0
        self.windows, self.B, self.rank, self.world_size, self.device = windows, batch_size, rank, world_size, device
        self.rows_per_step = total_batch_size // windows.T
        self.micro_steps = self.rows_per_step // (batch_size * world_size)
        self._thread = None

    def rows(self, step: int, micro_step: int) -> np.ndarray:
        """uint16 (B, T+1): a pure function of the two numbers and of what the loader was made with."""
        return self.windows.read(step * self.rows_per_step + (micro_step * self.world_size + self.rank) * self.B, self.B)

    def _load(self, step, micro_step):
        import torch
        rows = torch.from_numpy(self.rows(step, micro_step).astype(np.int32))
        # the caching host allocator reuses a pinned block only after its copy has ended
        return rows.pin_memory() if str(self.device).startswith("cuda") else rows

    def start(self, step: int) -> None:
        """Begins reading ahead at (step, micro-step 0)."""
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._reads = (self._thread.submit(self._load, s, m) for s in itertools.count(step) for m in range(self.micro_steps))
        self._ahead = deque(itertools.islice(self._reads, self.DEPTH))

    def next_batch(self):
        """x, y of the next micro-step: int64 (B, T) on the device. Raises what the thread met."""
        self._ahead.append(next(self._reads))
        return to_device(self._ahead.popleft().result(), self.device)

    def close(self):
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None


if __name__ == "__main__":
    run_command(main)
