"""Text -> token shards, or FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --dataset roneneldan/TinyStories  any text dataset of the Hugging Face hub
    python fineweb.py --pretokenized 9          FineWeb's published tokens, 9 x 100M -> fineweb10B/
    python fineweb.py --verify edu_fineweb10B   are all shards of a folder as they were written?

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`; or with --format bin the .bin of llm.c and modded-nanogpt.

Validation is the beginning of the text: a tenth of it, at most 10 million tokens; of FineWeb,
which is shuffled, the first shard. A run that was killed is continued by the same command.
"""
# first, because it refuses an old Python in one line
from runtime.cli import FlagParser, UserError, print_error, run_command

import argparse
import os
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

from runtime.files import writable
from runtime.shards import (
    ShardWriter, file_sha256, list_shards, open_shard, read_manifest, shard_names, write_manifest)
from runtime.sources import FINEWEB, FINEWEB_EDU, HubDataset, LocalFiles, hub_errors, hub_names
from runtime.text import TEXT_FILES, Layout, kind_of, read_rows
from runtime.tokenizer import BPE_SHA256, Encoder

MANIFEST_VERSION = 4            # of the manifest, and of the rule for validation
MOST_VALIDATION = 10_000_000    # tokens, if no flag says otherwise
LEAST_TEXT = 200                # tokens of which a tenth is worth anything
TEMPORARY = "a temporary file"  # for messages
PRETOKENIZED = "kjj0/fineweb10B-gpt2"
# --block_size of these presets. A table here, because to import runtime/presets.py may load torch.
BLOCK_SIZES = {"shakespeare": 128, "small": 256, "gpt2": 1024}


# ----------------------------------------------------------------------------- flags

# The flags that determine the bytes of the shards, beside the text itself: the manifest records
# them.
RECORDED = [
    "text_field", "separator", "tsv_quotes", "shard_size", "val_tokens", "max_tokens", "format"]
TEXT_FLAGS = {*RECORDED, "out", "workers", "encoder"}
# Which flags can be combined with each of these: they say what the command is to do.
COMBINED_WITH = {
    "verify": set(),
    "pretokenized": {"out"},
    "input": {"val_input", *TEXT_FLAGS},
    "dataset": {"name", "split", *TEXT_FLAGS},
}
UNLIMITED = 2**60               # tokens, or files: more than there are
LARGEST = {
    "shard_size": 2**30, "val_tokens": 2**30, "max_tokens": UNLIMITED, "workers": 256,
    "pretokenized": 103}
DEFAULTS = {
    "val_input": [], "split": "train", "text_field": "text", "separator": "", "tsv_quotes": False,
    "shard_size": 100_000_000, "format": "npy", "encoder": "auto"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags. UserError for those that do not go together, and for numbers out of range."""
    # Until the combinations are checked, None tells a flag that was not given.
    args = make_parser().parse_args(argv)
    given = {name for name, value in vars(args).items() if value is not None}
    check_combination(given)

    for name in sorted(given & LARGEST.keys()):
        value = getattr(args, name)
        if not 1 <= value <= LARGEST[name]:
            raise UserError(f"--{name} {value} is out of range: give 1 to {LARGEST[name]}")
    # A folder named after the text would be a guess, and may exist.
    if args.input and not args.out:
        raise UserError("--input needs --out: give the output folder of the shards")
    if args.val_tokens and args.val_input:
        raise UserError("--val_tokens cannot be combined with --val_input: leave one of them out")
    if args.val_tokens and args.max_tokens and args.val_tokens >= args.max_tokens:
        raise UserError(f"--val_tokens {args.val_tokens} must be less than --max_tokens "
                        f"{args.max_tokens}, which counts them, too: give fewer")

    # Now the others get their defaults.
    for name, value in DEFAULTS.items():
        if name not in given:
            setattr(args, name, value)
    if args.workers is None:
        args.workers = available_cores()
    if not given & {"input", "dataset", "pretokenized", "verify"}:
        args.dataset = FINEWEB_EDU
        args.name = "sample-10BT"
    if args.out is None and args.pretokenized:
        args.out = "fineweb10B"
    elif args.out is None and args.dataset:
        _, args.out = hub_names(args.dataset, args.name, args.split)
    return args


def make_parser() -> FlagParser:
    parser = FlagParser(prog="fineweb.py", description=__doc__)

    def flag(name, help, **how):
        parser.add_argument(name, help=help, **how)

    flag("--dataset", "text dataset of the Hugging Face hub (default FineWeb-Edu)",
         metavar="OWNER/NAME")
    flag("--name", "configuration of --dataset, where it has several", metavar="CONFIG")
    flag("--split", "split of --dataset (default train)")
    flag("--input",
         "your own text: files, folders and globs of .txt or .md (a file is a document), .jsonl, "
         ".ndjson or .json (a line is one), .csv, .tsv or .parquet (a row is one), also .txt.gz, "
         ".jsonl.zst and so on", nargs="+", action="extend", metavar="PATH")
    flag("--val_input",
         "other files, which are for validation in place of the beginning of --input",
         nargs="+", action="extend", metavar="PATH")
    flag("--text_field", "column or field that holds the text (default text)", metavar="NAME")
    flag("--separator",
         "what stands between the documents of a .txt or .md, as in --separator "
         "'<|endoftext|>' (default: a file is one document)", metavar="TEXT")
    flag("--tsv_quotes",
         "cells of a .tsv may stand in quotation marks, as in a .csv (default: a quotation mark "
         "is text)", action="store_true", default=None)
    flag("--pretokenized", "fetch the first N published training shards, of 200 MB each",
         type=int, metavar="N")
    flag("--out", "output folder (default edu_fineweb10B, or --dataset's name; required with "
         "--input)")
    flag("--shard_size", "tokens of a shard (default 100000000)", type=int)
    flag("--val_tokens",
         "how many tokens from the beginning of the text are for validation (default: a tenth, "
         "at most 10000000; of FineWeb the first shard)", type=int)
    flag("--max_tokens", "stop after so many tokens, validation included (default: no limit)",
         type=int)
    flag("--workers", "threads that encode (default: one for each core)", type=int)
    flag("--encoder",
         "what encodes: auto is gigatoken where it is installed, else tiktoken, which is the "
         "reference and much slower (default auto)", choices=["auto", "gigatoken", "tiktoken"])
    flag("--format", "NumPy's files or llm.c's (default npy)", choices=["npy", "bin"])
    flag("--verify", "compare all shards of a folder with the SHA-256 in its manifest",
         metavar="DIR")
    return parser


def check_combination(given: set[str]) -> None:
    """UserError for a given flag that does nothing beside the others."""
    for main_flag, others in COMBINED_WITH.items():
        if main_flag in given:
            # The first of them says what the command is to do, and all other flags belong to it.
            for name in sorted(given - others - {main_flag}):
                raise UserError(f"--{name} cannot be combined with --{main_flag}: leave one of "
                                f"them out")
            return

    # Without any of them the text is FineWeb-Edu.
    for name in sorted(given - TEXT_FLAGS):
        needed = "--dataset"
        if name == "val_input":
            needed = "--input"
        raise UserError(f"--{name} needs {needed}: give that, too")


def available_cores() -> int:
    """The cores that this process may use: in a Slurm job fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    cores = os.cpu_count()
    return cores if cores else 1


# ----------------------------------------------------------------------------- text -> tokens

# What goes from the encoders to the shards: (the number of a file, the next of its tokens).
Rows = Iterator[tuple[int, np.ndarray]]


def read_documents(files: Iterable, layout: Layout, mark: bytes) -> Iterator[tuple[int, bytes]]:
    """(the number of a file, a row of its documents) of all `files`, as read_rows has them.

    A line on stderr tells once of a .txt or .md with <|endoftext|> in it, if --separator is not
    given; and of a --separator that divides none of them."""
    told = False                # whether the line about <|endoftext|> has been printed
    first = None                # the number of the first file
    most_documents = 0          # in one .txt or .md
    for number, path, name in files:
        if first is None:
            first = number

        documents = 0           # that have begun in this file
        for row in read_rows(path, layout, mark, name):
            if kind_of(path) in TEXT_FILES:
                documents += row.count(mark)
                most_documents = max(most_documents, documents)
                if b"<|endoftext|>" in row and not layout.separator and not told:
                    told = True
                    print_error(f"{name} has <|endoftext|> in it, which is read as text like any "
                                f"other: if documents stand between it, give --separator "
                                f"'<|endoftext|>' and another --out")
            yield number, row

    # A run that continues after a kill does not see all files, and so cannot tell.
    if layout.separator and most_documents == 1 and first == 0:
        print_error(f"--separator {layout.separator!r} is found in no .txt or .md: each was read "
                    f"as one document")


def encode_files(files: Iterable, layout: Layout, encoder: Encoder, threads: int) -> Rows:
    """(the number of a file, the next of its tokens, 1-D uint16): about a megabyte of text at a
    time, in the order of the text. Threads encode some rows ahead."""
    rows = read_documents(files, layout, encoder.separator)
    waiting = deque()           # of (number, future tokens)
    pool = ThreadPoolExecutor(threads)

    try:
        for number, row in rows:
            waiting.append((number, pool.submit(encoder.encode, row)))

            # The reader is faster than the encoders: more rows would only fill the memory.
            if len(waiting) > 4 * threads:
                oldest, future = waiting.popleft()
                yield oldest, future.result()

        while waiting:
            oldest, future = waiting.popleft()
            yield oldest, future.result()
    finally:
        # Where the run ends early, nobody waits for what the threads still do.
        pool.shutdown(wait=False, cancel_futures=True)


# ----------------------------------------------------------------------------- tokens -> shards

class TokenStream:
    """The tokens of a text from a cursor on, which is (the number of a file, how many of its
    tokens are done).

    `rows` are those of encode_files, from the beginning of that file on."""

    def __init__(self, rows: Rows, cursor: tuple[int, int], progress: tqdm):
        self.rows = rows
        self.cursor = cursor
        self.progress = progress
        self.skip = cursor[1]                     # tokens that an earlier run has written
        self.waiting = np.empty(0, dtype=np.uint16)         # the rest of a row

    def next_file(self) -> int | None:
        """The number of the file that has the next token; None at the end of the text."""
        while len(self.waiting) == 0:
            row = next(self.rows, None)
            if row is None:
                return None
            file, tokens = row

            # Tokens are counted anew in each file.
            if file != self.cursor[0]:
                self.cursor = (file, 0)
                self.skip = 0

            self.waiting = tokens[self.skip:]
            self.skip = max(0, self.skip - len(tokens))
        return self.cursor[0]

    def take(self, count: int, end_file: int) -> Iterator[np.ndarray]:
        """Yields the next `count` tokens in parts; fewer if the files before number `end_file`
        have no more."""
        while count > 0:
            file = self.next_file()
            if file is None or file >= end_file:
                return

            part = self.waiting[:count]
            self.waiting = self.waiting[len(part):]
            count -= len(part)
            self.cursor = (file, self.cursor[1] + len(part))
            self.progress.update(len(part))
            yield part


def write_shards(args: argparse.Namespace, source, layout: Layout, out: Path) -> None:
    """Tokenizes the text of `source` into the shards of `out`, from where an earlier run of the
    command was stopped. UserError for a text that is too short to be divided, and as of
    ShardWriter."""
    recorded = {name: getattr(args, name) for name in RECORDED}
    tokenizer = {"name": "gpt2", **BPE_SHA256}
    settings = {"version": MANIFEST_VERSION, **source.settings, "tokenizer": tokenizer, **recorded}
    writer = ShardWriter(out, source.prefix, settings)
    if writer.manifest["complete"]:
        return

    encoder = Encoder(args.encoder)
    if encoder.gigatoken is None and args.encoder == "auto":
        print("tiktoken encodes, slowly, because gigatoken is not installed: pip install gigatoken")
    progress = tqdm(total=args.max_tokens, initial=sum(writer.tokens.values()), unit="tok",
                    unit_scale=True, desc=str(out), disable=None)

    # Files before the one of the cursor are done, and are not even fetched.
    first_file, _ = writer.cursor
    files = source.files(first_file)
    with progress, closing(encode_files(files, layout, encoder, args.workers)) as rows:
        rows = choose_validation(writer, rows)
        stream = TokenStream(rows, writer.cursor, progress)
        while True:
            file = stream.next_file()
            if file is None or tokens_left(writer) == 0:
                break

            # One shard a turn. If the run is killed meanwhile, the next one begins with this shard.
            split, count, end_file = next_shard(writer, file)
            if split == "train" and writer.tokens["val"] == 0:
                raise UserError("--val_input has no text for validation: give files that have some")
            writer.write(split, stream, stream.take(count, end_file))
        writer.finish()
    shutil.rmtree(out / ".download", ignore_errors=True)


def tokens_left(writer: ShardWriter) -> int:
    """How many more tokens --max_tokens allows."""
    limit = writer.manifest["max_tokens"]
    if limit is None:
        limit = UNLIMITED
    return limit - sum(writer.tokens.values())


def next_shard(writer: ShardWriter, file: int) -> tuple[str, int, int]:
    """(split, number of tokens, number of the file before which it ends) of the shard that begins
    with a token of `file`. This is the whole rule: validation has the files of --val_input, or
    without that flag the first `validation` tokens of the text, and training has the others."""
    val_files = len(writer.manifest.get("val_input", []))
    count = min(writer.manifest["shard_size"], tokens_left(writer))
    if file < val_files:
        return "val", count, val_files
    missing = writer.manifest["validation"] - writer.tokens["val"]
    if missing > 0:
        return "val", min(count, missing), UNLIMITED
    return "train", count, UNLIMITED


def choose_validation(writer: ShardWriter, rows: Rows) -> Rows:
    """Sets the number of validation tokens in the manifest, if no earlier run did. Returns all
    `rows`."""
    settings = writer.manifest
    if settings["validation"] is not None:
        return rows

    # Whole files are for validation, and so nothing of the others.
    if settings.get("val_input"):
        settings["validation"] = 0
        return rows
    if settings["val_tokens"] is not None:
        settings["validation"] = settings["val_tokens"]
        return rows

    # Of FineWeb it is the first shard, as in build-nanogpt.
    if settings.get("dataset") in FINEWEB:
        settings["validation"] = settings["shard_size"]
        if settings["max_tokens"] is not None:
            tenth = max(1, settings["max_tokens"] // 10)
            settings["validation"] = min(settings["shard_size"], tenth)
        return rows

    # To know a tenth of the text, its tokens are counted, as many as the tenth can be a tenth of.
    most = min(10 * MOST_VALIDATION, tokens_left(writer))
    count, rows = look_ahead(rows, most)
    if count < LEAST_TEXT:
        raise UserError(f"the text has only {count} tokens (at least {LEAST_TEXT} are needed): "
                        f"give more text")
    settings["validation"] = count // 10
    return rows


def look_ahead(rows: Rows, most: int) -> tuple[int, Rows]:
    """(how many tokens the rows have, but `most` at most, and all of the rows). Those that have
    been counted are in a temporary file meanwhile: 200 MB at most, which would be too much of the
    memory."""
    with writable(TEMPORARY, begun=True):
        spool = tempfile.TemporaryFile()
    lengths = []                # (number of the file, tokens) of each row in the spool
    count = 0
    for file, tokens in rows:
        with writable(TEMPORARY, begun=True):
            spool.write(tokens)
            spool.flush()
        lengths.append((file, len(tokens)))
        count += len(tokens)
        if count >= most:
            break

    def all_rows():
        with spool:
            spool.seek(0)
            for file, length in lengths:
                yield file, np.frombuffer(spool.read(2 * length), dtype=np.uint16)
        yield from rows

    return min(count, most), all_rows()


# ---------------------------------------------------------------------------- published shards

def fetch_published(count: int, out: Path) -> None:
    """--pretokenized: fetches those shards that `out` lacks, the one for validation and the first
    `count` for training, and verifies them all."""
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, count + 1)]
    present = set(shard_names(out))
    if present and read_manifest(out).get("pretokenized") != PRETOKENIZED:
        raise UserError(f"{out} holds shards of another source than {PRETOKENIZED}: choose "
                        f"another --out")

    missing = [name for name in names if name not in present]
    if missing:
        with writable(out, begun=True), hub_errors(PRETOKENIZED) as hub:
            infos = hub.HfApi().get_paths_info(PRETOKENIZED, names, repo_type="dataset")
            shards = [{"file": info.path, "sha256": info.lfs.sha256} for info in infos]
            out.mkdir(parents=True, exist_ok=True)

            # The manifest comes first, so that after a kill the shards are known as these.
            write_manifest(out, {"pretokenized": PRETOKENIZED, "shards": shards})
            for name in missing:
                hub.hf_hub_download(PRETOKENIZED, name, repo_type="dataset", local_dir=out)
    verify(out)


def verify(folder: Path) -> None:
    """--verify: UserError names the shards that are not as the manifest in `folder` records
    them."""
    recorded = {}               # {name of a shard: its SHA-256}
    for shard in read_manifest(folder).get("shards", []):
        if shard.get("sha256"):
            recorded[shard["file"]] = shard["sha256"]
    if not recorded:
        raise UserError(f"{folder} has no manifest.json with the SHA-256 of a shard: check the "
                        f"path")

    bad = []
    for name, sha256 in tqdm(recorded.items(), disable=None):
        path = folder / name
        if not path.is_file() or file_sha256(path) != sha256:
            bad.append(name)

    if bad:
        raise UserError(f"{folder}: {len(bad)} of {len(recorded)} shards are damaged or missing, "
                        f"{', '.join(bad)}: restore them, or remove the folder and make it again")
    # Shards that were put there by hand, say, are no mistake.
    unknown = [name for name in shard_names(folder) if name not in recorded]
    line = f"{folder}: {len(recorded)} shards are as they were written"
    if unknown:
        line += f"; not checked, because the manifest does not list them: {', '.join(unknown)}"
    print(line)


# ----------------------------------------------------------------------------- the command

def next_command(out: Path, val: list[int], train: list[int]) -> str:
    """The command that trains on shards of so many tokens, as a shell reads it."""
    # `small` trains on 33M tokens: with less than a quarter of that a text would be read over
    # four times.
    if sum(train) < 8_200_000:
        preset = "shakespeare"
    elif sum(train) < 1_000_000_000:
        preset = "small"
    else:
        preset = "gpt2"

    # A sequence and its last target must fit into a shard of either split. Batches divide by
    # powers of two.
    longest = min(max(val), max(train)) - 1
    block_size = BLOCK_SIZES[preset]
    while block_size > longest:
        block_size //= 2

    # Below this a model learns letters at best.
    if block_size < 16:
        return (f"{out}: the shards are too short to train on: make longer ones of more text, in "
                f"another --out")
    data = shlex.quote(str(out))
    log = f"log/{out.resolve().name}"
    if log == "log/":           # of shards in the root folder
        log = "log/data"
    log = shlex.quote(log)
    command = f"next: python train_gpt2.py --preset {preset} --data {data} --out {log}"
    if block_size < BLOCK_SIZES[preset]:
        command += f" --block_size {block_size}"
    return command


def print_summary(out: Path) -> None:
    """What the folder has, and the command that comes next."""
    val = [len(open_shard(path)) for path in list_shards(out, "val")]
    train = [len(open_shard(path)) for path in list_shards(out, "train")]
    print(f"{out}: {len(val) + len(train)} shards complete, {sum(val):,} tokens for validation and "
          f"{sum(train):,} for training")
    print(next_command(out, val, train))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.verify is not None:
        verify(Path(args.verify))
        return

    out = Path(args.out)
    layout = Layout(args.text_field, args.separator, args.tsv_quotes)
    if args.pretokenized is not None:
        fetch_published(args.pretokenized, out)
    elif args.input is not None:
        source = LocalFiles(args.input, args.val_input, layout)
        write_shards(args, source, layout, out)
    else:
        source = HubDataset(args.dataset, args.name, args.split, layout, out)
        write_shards(args, source, layout, out)
    print_summary(out)


if __name__ == "__main__":
    run_command(main)
