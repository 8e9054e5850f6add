"""Both ends of the token shards: text -> shards (the command), shards -> batches (the loader).

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`. With --format bin it is llm.c's and modded-nanogpt's
file instead: 256 int32 (magic 20240520, version 1, token count), then the tokens.
"""
import argparse
import bisect
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import queue
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


def whole_number(text):
    """'100000', '100_000' or '1e5' -> 100000, for flags."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def run_command(main, is_master=lambda: True):
    """Runs `main()` as a command: UserError -> one line and exit 2, RunError -> one line and exit 1."""
    try:
        sys.exit(main() or 0)
    except (UserError, RunError) as error:
        if is_master():
            print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:                       # `... | head` closed the pipe: not worth a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


# -----------------------------------------------------------------------------
# the tokenizer

def checked_asset(name):
    """Path of one of GPT-2's two BPE files in assets/, after a look at its hash."""
    path = ASSETS / name
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != BPE_SHA256[name]:
        raise UserError(f"{path} is missing or is not GPT-2's file: restore it with `git checkout -- assets`")
    return path


@functools.cache
def tokenizer():
    """GPT-2's byte-level BPE as a tiktoken Encoding, built from assets/ without a network.

    Equal to `tiktoken.get_encoding("gpt2")`, which downloads the same two files.
    Radford et al. 2019, section 2.2.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    # encoder.json spells bytes as printable characters: the printable ones of Latin-1 stand for
    # themselves, the other 68 for the code points from 256 on. Its ids are the merge ranks.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    encoder = json.loads(checked_asset("encoder.json").read_text(encoding="utf-8"))
    special = {"<|endoftext|>": encoder.pop("<|endoftext|>")}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in encoder.items()}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special,
                             explicit_n_vocab=VOCAB_SIZE)


def encode(text):
    """GPT-2 tokens of `text` as uint16; `<|endoftext|>` inside the text is ordinary text."""
    try:
        return tokenizer().encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except UnicodeEncodeError:                    # lone surrogates: encode_ordinary replaces them
        return np.array(tokenizer().encode_ordinary(text), dtype=np.uint16)


# -----------------------------------------------------------------------------
# shard files

SHARD_NAME = re.compile(r"(?:^|.*_)(train|val)_\d+\.(npy|bin)$")


def replace_file(path, write):
    """Writes a file whole or not at all: `write(file)` fills a temporary one, fsync, os.replace."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name != "nt":                           # make the rename itself durable
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_shard(path, tokens):
    """Writes 1-D uint16 `tokens` as .npy or .bin, by the name's ending."""
    def write(file):
        if str(path).endswith(".bin"):
            header = np.zeros(BIN_HEADER, dtype="<i4")
            header[:3] = BIN_MAGIC, BIN_VERSION, len(tokens)
            file.write(header.tobytes())
            file.write(tokens.astype("<u2", copy=False).tobytes())
        else:
            np.save(file, tokens)
    replace_file(path, write)


def open_shard(path):
    """Tokens of a .npy or .bin shard as a read-only memory map, 1-D uint16.

    Raises UserError if the file is not a whole shard; nothing in it is ever unpickled.
    """
    path = Path(path)
    try:
        if path.suffix == ".bin":
            header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
            if len(header) < BIN_HEADER or header[0] != BIN_MAGIC or header[1] != BIN_VERSION:
                raise UserError(f"{path} does not start with llm.c's header (magic {BIN_MAGIC}, version "
                                f"{BIN_VERSION}): make the shard again, or remove the file from the folder")
            count, there = int(header[2]), (path.stat().st_size - 4 * BIN_HEADER) // 2
            if count != there or count <= 0:
                raise UserError(f"{path} promises {count:,} tokens and holds {there:,}: it was cut off; "
                                f"copy or make it again")
            return np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER, shape=(count,))
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: make shards with `python fineweb.py`") from None
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise UserError(f"{path} is not a whole .npy shard ({error}): copy or make it again") from None
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
        found = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive of arrays"
        raise UserError(f"{path} holds {found} instead of a 1-D uint16 array of tokens: "
                        f"make shards with `python fineweb.py`")
    return tokens


def list_shards(folder, split):
    """Sorted paths of a folder's shards of `split` ('train' or 'val')."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no data in {folder}: `python fineweb.py` makes edu_fineweb10B, and "
                        f"`python fineweb.py --input YOUR_TEXT --out {folder}` makes shards of your own text")
    paths = sorted(p for p in folder.iterdir() if (m := SHARD_NAME.match(p.name)) and m[1] == split)
    if not paths:
        raise UserError(f"{folder} holds no *_{split}_000000.npy or .bin shard: "
                        f"make them with `python fineweb.py --input YOUR_TEXT --out {folder}`")
    return paths


# -----------------------------------------------------------------------------
# writing, 1: where text comes from. A source yields units (text, starts_document) in a fixed order.
# `marks` holds (unit number, state) pairs from which reading can start again without what came before.

RETRIES = 8                     # waits of 1, 2, 4 ... 128 s: about four minutes without the network
MARK_EVERY = 1000               # units between two states of a stream


class HubSource:
    """A dataset of the Hugging Face hub, streamed: what is read is not stored a second time on disk."""

    def __init__(self, repo, name):
        self.repo, self.name = repo, name
        self.marks = deque()

    def describe(self):
        return {"repo": self.repo, "name": self.name}

    def units(self, start=0, mark=None):
        mark = mark or (0, None)
        failures = 0
        while True:
            try:
                for document in self._stream(start, mark):
                    yield document["text"], True
                    start += 1
                    failures = 0
                return
            except (KeyError, TypeError):
                raise UserError(f"{self.repo} has no column of strings named `text`") from None
            except Exception as error:            # the network's errors are of many libraries' classes
                failures += 1
                if failures > RETRIES:
                    raise RunError(f"cannot read {self.repo} ({self.name}) from the Hugging Face hub: {error}. Run "
                                   f"the same command again to go on, or give text of your own by --input") from None
                print(f"{self.repo}: {error}; trying again in {2 ** (failures - 1)} s", file=sys.stderr)
                time.sleep(2 ** (failures - 1))
                mark = self.marks[-1] if self.marks else mark

    def _stream(self, start, mark):
        from datasets import load_dataset
        stream = load_dataset(self.repo, name=self.name, split="train", streaming=True)
        unit, state = mark
        if state is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(state)
        else:
            unit = 0
        for document in stream:
            if unit >= start:
                yield document
            unit += 1
            if unit % MARK_EVERY == 0 and hasattr(stream, "state_dict"):
                self.marks.append((unit, stream.state_dict()))


class LocalSource:
    """Files on disk: .txt (one document a file), .jsonl and .parquet (field `text`), also .gz and .zst."""

    KINDS = (".txt", ".jsonl", ".parquet")

    def __init__(self, patterns):
        self.paths = []
        for pattern in patterns:
            found = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(
                os.path.join(pattern, "*") if os.path.isdir(pattern) else pattern, recursive=True)))
            if not found:
                raise UserError(f"--input {pattern}: no such file")
            self.paths += [Path(path) for path in found]
        for path in self.paths:
            if self.kind(path) not in self.KINDS:
                raise UserError(f"--input {path}: only .txt, .jsonl and .parquet, also .gz or .zst of the first two")
            if path.stat().st_size == 0:
                raise UserError(f"--input {path} is empty: give a file that holds text")
        self.marks = deque()

    @staticmethod
    def kind(path):
        packed = path.suffix in (".gz", ".zst")
        kind = (path.with_suffix("") if packed else path).suffix
        return "" if packed and kind == ".parquet" else kind

    def describe(self):
        return {"files": [{"name": path.name, "bytes": path.stat().st_size, "sha256_of_ends": ends_sha256(path)}
                          for path in self.paths]}

    def estimated_tokens(self):
        packing = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}
        return int(sum(p.stat().st_size * packing.get(p.suffix, 1.0) for p in self.paths) / BYTES_PER_TOKEN)

    def units(self, start=0, mark=None):
        unit, file_index = mark or (0, 0)
        for i in range(file_index, len(self.paths)):
            self.marks.append((unit, i))
            read = {".txt": self._txt, ".jsonl": self._jsonl, ".parquet": self._parquet}[self.kind(self.paths[i])]
            try:
                for item in read(self.paths[i]):
                    if unit >= start:
                        yield item
                    unit += 1
            except UserError:
                raise
            except UnicodeDecodeError:
                raise UserError(f"--input {self.paths[i]} is not UTF-8 text: convert it first") from None
            except (OSError, ValueError) as error:      # pyarrow's errors derive from these
                raise UserError(f"--input {self.paths[i]} cannot be read ({error}): "
                                f"copy it again or leave it out") from None

    @staticmethod
    def _open(path):
        if path.suffix in (".gz", ".zst"):
            import pyarrow
            raw = pyarrow.input_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}[path.suffix])
        else:
            raw = open(path, "rb")
        return io.TextIOWrapper(raw, encoding="utf-8", newline="")

    def _txt(self, path, piece_size=1 << 18):
        """A file as one document in pieces, so that several workers share it and memory stays small.

        A cut between "\\n" and two non-spaces around it cannot change the tokens: GPT-2's pattern
        makes such a newline a piece of its own, at the end of a text as in its middle.
        """
        pieces, size, first = [], 0, True
        with self._open(path) as file:
            for line in file:
                safe = pieces and not line[0].isspace() and len(pieces[-1]) > 1 and not pieces[-1][-2].isspace()
                if size >= piece_size and safe:
                    yield "".join(pieces), first
                    pieces, size, first = [], 0, False
                pieces.append(line)
                size += len(line)
        if pieces:
            yield "".join(pieces), first

    def _jsonl(self, path):
        with self._open(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    document = json.loads(line)
                    text = document["text"]
                except (ValueError, RecursionError):
                    raise UserError(f"--input {path}, line {number}: not JSON; mend or remove the line") from None
                except (KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise UserError(f'--input {path}, line {number}: no string field "text"; '
                                    f'each line must be {{"text": "..."}}')
                yield text, True

    def _parquet(self, path):
        import pyarrow.parquet
        table = pyarrow.parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            raise UserError(f"--input {path} has no column `text` (it has: {', '.join(table.schema_arrow.names)})")
        for batch in table.iter_batches(batch_size=1024, columns=["text"]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise UserError(f"--input {path}: column `text` holds something that is not a string")
                yield text, True


def ends_sha256(path, size=1 << 16):
    """Hash of a file's first and last 64 KiB: notices another file of the same name, however large."""
    with open(path, "rb") as file:
        head = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(head + file.read(size)).hexdigest()


# -----------------------------------------------------------------------------
# writing, 2: units -> tokens on several threads. tiktoken releases the GIL, so threads scale like
# processes (2 cores: 17 -> 34 MB/s), copy nothing between them, and need no main guard anywhere.

def encode_units(units):
    """Tokens of a list of units as one uint16 array, and the number of tokens of each unit."""
    encoded = [encode(text) for text, _ in units]
    parts = [part for (_, starts), tokens in zip(units, encoded, strict=True)
             for part in ((np.array([EOT], np.uint16), tokens) if starts else (tokens,))]
    return np.concatenate(parts), np.array([len(t) + starts for (_, starts), t in zip(units, encoded, strict=True)])


def encode_stream(units, workers, chunk=1 << 18):
    """Results of `encode_units` over chunks of about 256k characters, in the order of `units`."""
    def chunks():
        batch, size = [], 0
        for unit in units:
            batch.append(unit)
            size += len(unit[0])
            if size >= chunk:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    tokenizer()                                   # built once, before the threads ask for it
    pending = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for batch in chunks():
                pending.append(pool.submit(encode_units, batch))
                if len(pending) > 2 * workers:    # bounds memory, keeps every worker busy
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


# -----------------------------------------------------------------------------
# writing, 3: tokens -> shards, and a manifest from which an interrupted run goes on

@dataclass
class ShardWriter:
    """Cuts a token stream into shards and records in manifest.json where each ends in the source.

    Shard 0 is validation. Files appear whole or not at all; after a kill the same command reads
    the manifest, goes on after the last whole shard, and ends with the same bytes.
    """
    out: Path
    prefix: str
    settings: dict              # source, tokenizer, sizes, format: what decides every byte of the shards
    val_tokens: int
    shard_size: int
    source: object

    def __post_init__(self):
        self.manifest = {"version": 1, **self.settings, "complete": False, "tokens": 0, "shards": []}
        self.path = self.out / "manifest.json"
        if self.path.exists():
            self._take_up()
        elif self.out.is_dir() and any(SHARD_NAME.match(p.name) for p in self.out.iterdir()):
            raise UserError(f"{self.out} already holds shards without a manifest.json: choose another --out")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            for stale in self.out.glob("*.tmp"):
                stale.unlink()
        except OSError as error:
            raise UserError(f"--out {self.out} cannot be written ({error.strerror}): choose another folder") from None
        self.unit, self.offset = 0, 0             # what is written ends after `offset` tokens of unit `unit`
        self.buffer, self.filled = np.empty(self.capacity(), dtype=np.uint16), 0
        if self.manifest["shards"]:
            self.unit, self.offset = self.manifest["shards"][-1]["end"]["unit"], self.manifest["shards"][-1]["end"]["token"]

    def _take_up(self):
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            shards = [(s["file"], int(s["tokens"]), int(s["end"]["unit"]), int(s["end"]["token"])) for s in found["shards"]]
            found["complete"], found["mark"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{self.path} is damaged: choose another --out, or remove {self.out} to start again") from None
        for key, value in self.settings.items():
            if found.get(key) != value:
                raise UserError(f"{self.out} was begun with another {key} ({json.dumps(found.get(key))[:200]} instead of "
                                f"{json.dumps(value)[:200]}): give the same again, or choose another --out")
        for name, tokens, _, _ in shards:
            if Path(name).name != name or len(open_shard(self.out / name)) != tokens:
                raise UserError(f"{self.out / name} is not the shard that manifest.json describes: remove {self.out}")
        self.manifest = found

    @property
    def mark(self):
        return tuple(self.manifest["mark"]) if self.manifest.get("mark") else None

    def capacity(self):
        return self.shard_size if self.manifest["shards"] else self.val_tokens

    def add(self, tokens, lengths):
        """Appends the tokens of the next units (`lengths` tokens each), writing each shard that fills."""
        ends, taken = np.cumsum(lengths), 0
        first_unit, first_offset = self.unit, self.offset
        while taken < len(tokens):
            count = min(len(self.buffer) - self.filled, len(tokens) - taken)
            self.buffer[self.filled:self.filled + count] = tokens[taken:taken + count]
            self.filled += count
            taken += count
            done = int(np.searchsorted(ends, taken, side="right"))       # units that are wholly taken
            self.unit = first_unit + done
            self.offset = taken - (int(ends[done - 1]) if done else 0) + (0 if done else first_offset)
            if self.filled == len(self.buffer):
                self.write()

    def write(self):
        """Writes what the buffer holds as the next shard, then the manifest."""
        index = len(self.manifest["shards"])
        split = "train" if index else "val"
        name = f"{self.prefix}_{split}_{index:06d}.{self.settings['format']}"
        write_shard(self.out / name, self.buffer[:self.filled])
        while len(self.source.marks) > 1 and self.source.marks[1][0] <= self.unit:
            self.source.marks.popleft()
        if self.source.marks and self.source.marks[0][0] <= self.unit:
            self.manifest["mark"] = self.source.marks[0]
        self.manifest["shards"].append({"file": name, "split": split, "tokens": self.filled,
                                        "end": {"unit": self.unit, "token": self.offset}})
        self.manifest["tokens"] += self.filled
        self.save_manifest()
        self.buffer, self.filled = np.empty(self.capacity(), dtype=np.uint16), 0

    def finish(self):
        """Writes the rest; a corpus that ended inside the validation shard is divided 1 : 9."""
        if not self.manifest["shards"]:
            if self.filled < 20:
                raise UserError(f"only {self.filled} tokens of text: too few for a training and a validation shard")
            rest = self.buffer[self.filled // 10:self.filled].copy()
            unit, self.filled = self.unit, self.filled // 10
            self.write()
            self.unit, self.buffer[:len(rest)], self.filled = unit, rest, len(rest)
        if self.filled:
            self.write()
        if len(self.manifest["shards"]) < 2:
            raise UserError("the text ends with the validation shard and nothing is left to train on: "
                            "give more text, or a smaller --val_tokens")
        self.manifest["complete"] = True
        self.save_manifest()

    def save_manifest(self):
        self.manifest.setdefault("mark", None)
        replace_file(self.path, lambda file: file.write(json.dumps(self.manifest, indent=1).encode()))


def prepare(source, out, prefix, val_tokens, shard_size, max_tokens, workers, file_format, expected):
    """Tokenizes `source` into shards in folder `out`; returns the manifest (see ShardWriter)."""
    from tqdm import tqdm
    settings = {"source": source.describe(), "tokenizer": {"name": "gpt2", **BPE_SHA256}, "format": file_format,
                "shard_size": shard_size, "val_tokens": val_tokens, "max_tokens": max_tokens}
    writer = ShardWriter(Path(out), prefix, settings, val_tokens, shard_size, source)
    if writer.manifest["complete"]:
        return writer.manifest
    done, skip = writer.manifest["tokens"], writer.offset
    writer.offset = 0
    left = max_tokens - done if max_tokens else math.inf
    if done:
        print(f"going on after {len(writer.manifest['shards'])} whole shards ({done:,} tokens)")
    with tqdm(total=expected, initial=done, unit="tok", unit_scale=True, desc=str(out), disable=None) as bar:
        for tokens, lengths in encode_stream(source.units(writer.unit, writer.mark), workers):
            if skip:                              # the unit in which the last whole shard ended
                cut = min(skip, len(tokens))
                tokens, lengths, writer.offset, skip = tokens[cut:], lengths.copy(), writer.offset + cut, skip - cut
                lengths[0] -= cut
            if len(tokens) > left:
                tokens = tokens[:left]
            writer.add(tokens, lengths)
            bar.update(len(tokens))
            left -= len(tokens)
            if left <= 0:
                break
    writer.finish()
    return writer.manifest


FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}


def parse_args(argv=None):
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    parser.add_argument("--variant", choices=list(FINEWEB), default="edu",
                        help="FineWeb-Edu or FineWeb itself (default edu)")
    parser.add_argument("--sample", choices=["10BT", "100BT"], default="10BT",
                        help="which sample of it, in tokens (default 10BT)")
    parser.add_argument("--input", action="append", metavar="PATH_OR_GLOB",
                        help="text of your own instead, repeatable: .txt (one document a file), .jsonl or .parquet "
                             "(field or column `text`), .txt.gz, .jsonl.zst ...")
    parser.add_argument("--out", help="folder for the shards (default edu_fineweb10B and the like; needed with --input)")
    parser.add_argument("--shard_size", type=whole_number, default=100_000_000, help="tokens a shard (default 100000000)")
    parser.add_argument("--val_tokens", type=whole_number,
                        help="tokens of the validation shard, which come first (default: one shard, "
                             "but at most about a tenth of the text)")
    parser.add_argument("--max_tokens", type=whole_number, help="stop after so many tokens, validation included")
    parser.add_argument("--workers", type=whole_number, default=os.cpu_count() or 1,
                        help="threads that tokenize (default: one a core)")
    parser.add_argument("--format", choices=["npy", "bin"], default="npy",
                        help="numpy's files, or llm.c's and modded-nanogpt's (default npy)")
    args = parser.parse_args(argv)
    for name in ("shard_size", "val_tokens", "max_tokens", "workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.input and not args.out:
        raise UserError("--input needs --out: name the folder that the shards go into")
    if args.max_tokens and args.val_tokens and args.val_tokens >= args.max_tokens:
        raise UserError(f"--val_tokens {args.val_tokens} leaves nothing of --max_tokens {args.max_tokens} to train on")
    if args.out and os.path.exists(args.out) and not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is a file: name a folder")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.input:
        source, prefix, out = LocalSource(args.input), "text", args.out
        expected = source.estimated_tokens()
    else:
        repo, prefix, folder = FINEWEB[args.variant]
        source, out = HubSource(repo, f"sample-{args.sample}"), args.out or folder + args.sample[:-1]
        expected = int(float(args.sample[:-2]) * 1e9)
    expected = min(expected, args.max_tokens or expected)
    val_tokens = args.val_tokens or max(1, min(args.shard_size, expected // 10))
    start = time.perf_counter()
    manifest = prepare(source, out, prefix, val_tokens, args.shard_size, args.max_tokens, args.workers,
                       args.format, expected)
    seconds = time.perf_counter() - start
    val = manifest["shards"][0]["tokens"]
    print(f"{out}: {len(manifest['shards'])} shards, {val:,} tokens for validation and "
          f"{manifest['tokens'] - val:,} for training, after {seconds:.1f} s\n"
          f"next: python train_gpt2.py --data {out}")


# -----------------------------------------------------------------------------
# reading: shards -> batches. "Global step decides everything": which tokens a step sees is a pure
# function of (shards, seed, step, total_batch_size, sequence_length), so that any number of
# processes, any micro-batch and any resume see the same ones, and a loader has no state to save.

def stable_permutation(n, *key):
    """A permutation of range(n) that depends on `key` alone, in every release of numpy.

    Generator.permutation may change between releases (NEP 19); the raw stream of Philox may not.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(n), kind="stable")


class Windows:
    """The T-token windows of a list of shards as one endless sequence, epoch after epoch.

    Shard i has (len_i - 1) // T windows (the last target needs one token more); each comes once an
    epoch. With `shuffle` the shards, and the windows within each, are permuted anew each epoch by
    the seed; without, the order is the files'. `shards`: paths, or 1-D uint16 arrays.
    One shard is resident, as uint16. Raises UserError for a shard that is damaged, or too short
    to give a window, or holds ids at or above `vocab_size`.
    """

    def __init__(self, shards, sequence_length, seed=0, shuffle=False, vocab_size=None):
        self.shards, self.T, self.seed, self.shuffle, self.vocab_size = list(shards), sequence_length, seed, shuffle, vocab_size
        self.lengths = [len(self._open(shard)) for shard in self.shards]
        self.counts = [(length - 1) // self.T for length in self.lengths]
        self.total = sum(self.counts)
        if self.total == 0:
            raise UserError(f"{self._name(0)}: {sum(self.lengths):,} tokens are too few for one sequence of "
                            f"{self.T} tokens and its target: give more text or a smaller --sequence_length")
        self._epoch, self._resident = None, None

    @staticmethod
    def _open(shard):
        return shard if isinstance(shard, np.ndarray) else open_shard(shard)

    def _name(self, i):
        return "the text" if isinstance(self.shards[i], np.ndarray) else str(self.shards[i])

    def _load_epoch(self, epoch):
        n = len(self.shards)
        self._order = stable_permutation(n, self.seed, epoch) if self.shuffle else np.arange(n)
        self._edges = [0, *itertools.accumulate(self.counts[i] for i in self._order)]
        self._epoch = epoch

    def _load_shard(self, epoch, i):
        """Makes shard i resident: its tokens and the order of its windows in this epoch."""
        tokens = np.array(self._open(self.shards[i]))
        if len(tokens) != self.lengths[i]:
            raise UserError(f"{self._name(i)} changed during the run: {self.lengths[i]:,} tokens at the start, "
                            f"{len(tokens):,} now")
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            raise UserError(f"{self._name(i)} holds token {int(tokens.max())}, and the model's vocabulary has "
                            f"{self.vocab_size}: these are not GPT-2's tokens, or --vocab_size is too small")
        order = stable_permutation(self.counts[i], self.seed, epoch, i) if self.shuffle else np.arange(self.counts[i])
        rows = np.lib.stride_tricks.sliding_window_view(tokens, self.T + 1)[::self.T]    # (windows, T+1), no copy
        self._resident = (epoch, i, rows, order)

    def read(self, first, count):
        """Windows `first` to `first + count` of the endless sequence: uint16 (count, T+1)."""
        out = np.empty((count, self.T + 1), dtype=np.uint16)
        row = 0
        while row < count:
            epoch, position = divmod(first + row, self.total)
            if epoch != self._epoch:
                self._load_epoch(epoch)
            slot = bisect.bisect_right(self._edges, position) - 1
            i, local = int(self._order[slot]), position - self._edges[slot]
            if self._resident is None or self._resident[:2] != (epoch, i):
                self._load_shard(epoch, i)
            _, _, rows, order = self._resident
            n = min(count - row, self.counts[i] - local)
            out[row:row + n] = rows[order[local:local + n]]
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

    def __init__(self, windows, total_batch_size, batch_size, rank=0, world_size=1, device="cpu"):
        assert total_batch_size % (batch_size * windows.T * world_size) == 0
        self.windows, self.B, self.rank, self.world_size, self.device = windows, batch_size, rank, world_size, device
        self.rows_per_step = total_batch_size // windows.T
        self.micro_steps = self.rows_per_step // (batch_size * world_size)
        self._thread = None

    def rows(self, step, micro_step):
        """uint16 (B, T+1): a pure function of the two numbers and of what the loader was made with."""
        return self.windows.read(step * self.rows_per_step + (micro_step * self.world_size + self.rank) * self.B, self.B)

    def start(self, step):
        """Begins reading ahead at (step, micro-step 0)."""
        self._queue, self._stop = queue.Queue(self.DEPTH), threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(step,), daemon=True)
        self._thread.start()

    def _read_ahead(self, step):
        def put(item):
            while not self._stop.is_set():
                try:
                    return self._queue.put(item, timeout=0.1)
                except queue.Full:
                    pass
        try:
            import torch
            while not self._stop.is_set():
                for micro_step in range(self.micro_steps):
                    rows = torch.from_numpy(self.rows(step, micro_step).astype(np.int32))
                    # the caching host allocator reuses a pinned block only after its copy has ended
                    put(rows.pin_memory() if str(self.device).startswith("cuda") else rows)
                step += 1
        except BaseException as error:            # shown where the training loop asks for the batch
            put(error)

    def next_batch(self):
        """x, y of the next micro-step: int64 (B, T) on the device."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return to_device(item, self.device)

    def close(self):
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None


if __name__ == "__main__":
    run_command(main)
