"""Turns text into token shards, or fetches FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      your own text
    python fineweb.py --dataset roneneldan/TinyStories  a text dataset on the Hugging Face hub
    python fineweb.py --pretokenized 17         FineWeb's published tokens, 17 x 100M -> fineweb10B/
    python fineweb.py --verify edu_fineweb10B   check the shards of a folder by their SHA-256

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`; or with --format bin the .bin of llm.c and modded-nanogpt.

The validation text is the first tenth of the text, and at most 10 million tokens. For FineWeb,
which is shuffled, the validation text is the first shard, or a tenth of --max_tokens if a tenth is
less. --val_tokens and --val_input choose another one, and --val_input alone makes shards to
evaluate on. After a kill the same command continues.
"""
import argparse
import math
import os
import re
import shlex
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from presets import length_that_fits, next_command
from runtime.cli import FlagParser, UserError, check_range, run_command, user_path
from runtime.files import remove_leftovers
from runtime.lock import lock_folder
from runtime.shards import (
    count_tokens, file_sha256, list_shards, manifest_to_continue, read_manifest, shard_names,
    unfinished, write_manifest, write_parts)
from runtime.sources import (
    DOWNLOAD, FINEWEB, FINEWEB_EDU, HubDataset, LocalFiles, hub_errors, hub_names)
from runtime.text import TextReader
from runtime.tokenizer import Encoder

LOCK = ".fineweb.lock"          # in the output folder
MANIFEST_VERSION = 5            # of the manifest, and of the rule for validation
MOST_VALIDATION = 10_000_000    # tokens, if no flag says otherwise
LEAST_TEXT = 200                # tokens: a shorter text is not divided, but refused
PRETOKENIZED = "kjj0/fineweb10B-gpt2"
PUBLISHED_SHARDS = 103          # for training, that it has


# ----------------------------------------------------------------------------- flags

# These flags determine the bytes of the shards, beside the text, and the manifest records them.
RECORDED = ["text_field", "separator", "shard_size", "val_tokens", "max_tokens", "format"]
TEXT_FLAGS = {*RECORDED, "out", "workers", "encoder"}
# {flag: the largest number}; the smallest is 1.
LARGEST = {"pretokenized": PUBLISHED_SHARDS, "shard_size": 2**30, "val_tokens": 2**30,
           "max_tokens": 2**60, "workers": 256}
# The first of these that is given says what the command is to do, with which others.
COMBINED_WITH = {
    "verify": set(),
    "pretokenized": {"out"},
    "input": {"val_input", "split", *TEXT_FLAGS},
    "dataset": {"name", "split", *TEXT_FLAGS},
    "val_input": {"split", *TEXT_FLAGS},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags. UserError for those that do not go together, and for numbers out of range."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, largest in LARGEST.items():
        if getattr(args, name) is not None:
            check_range(name, getattr(args, name), 1, largest)
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    check_combination(given)
    if not given & COMBINED_WITH.keys():
        args.dataset = FINEWEB_EDU
        if args.name is None:
            args.name = "sample-10BT"

    # A folder named after the text would be a guess, and may exist.
    if (args.input or args.val_input) and not args.out:
        raise UserError("--input and --val_input need --out: choose an output folder for the "
                        "shards")
    if args.val_tokens and args.val_input:
        raise UserError("--val_tokens cannot be combined with --val_input: leave one of them out")

    # Of FineWeb, which is shuffled, validation is the first shard, as in build-nanogpt.
    if args.dataset in FINEWEB and args.val_tokens is None:
        args.val_tokens = args.shard_size
        if args.max_tokens is not None:
            args.val_tokens = min(args.shard_size, max(2, args.max_tokens // 10))
    if args.out is None and args.pretokenized:
        args.out = "fineweb10B"
    elif args.out is None and args.dataset:
        _, args.out = hub_names(args.dataset, args.name, args.split)
    return args


def make_parser() -> FlagParser:
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    add_input_flags(parser.add_argument)
    add_output_flags(parser.add_argument)
    parser.add_argument("--verify", type=user_path, metavar="DIR",
                        help="Compare all shards of a folder with the SHA-256 in its manifest.")
    return parser


def add_input_flags(add: Callable) -> None:
    add("--dataset", metavar="OWNER/NAME",
        help="A text dataset on the Hugging Face hub (default FineWeb-Edu).")
    add("--name", metavar="CONFIG",
        help="The configuration of --dataset, where the dataset has several.")
    add("--split", default="train",
        help="The split of --dataset, or of a folder that save_to_disk has written (default "
             "train).")
    add("--input", nargs="+", action="extend", type=user_path, metavar="PATH", default=[],
        help="Your own text: files, folders and globs. Each .txt or .md is a document, as is each "
             "line of a .jsonl, .ndjson or .json, and each row of a .csv, .parquet or .arrow. All "
             "but the last two may be compressed (.gz, .zst, .bz2).")
    add("--val_input", nargs="+", action="extend", type=user_path, metavar="PATH", default=[],
        help="Files that are for validation, in place of the beginning of --input. Those of them "
             "that --input names, too, are not trained on. Without --input, the shards are for "
             "evaluation only.")
    add("--text_field", metavar="NAME", default="text",
        help="The column or field that holds the text (default text).")
    add("--separator", metavar="TEXT", default="",
        help="The text between the documents of a .txt or .md, as in --separator '<|endoftext|>' "
             "(default: each file is one document).")
    add("--pretokenized", type=int, metavar="N",
        help="Fetch the first N published training shards of FineWeb, of 200 MB each.")


def add_output_flags(add: Callable) -> None:
    add("--out", type=user_path,
        help="The output folder (default edu_fineweb10B, fineweb10B with --pretokenized, or a name "
             "after --dataset; required with --input and --val_input).")
    add("--shard_size", type=int, default=100_000_000,
        help="The number of tokens in a shard (default 100000000).")
    add("--val_tokens", type=int,
        help="How many tokens from the beginning of the text are for validation (default: a tenth "
             "of the text, at most 10000000; for FineWeb one shard, at most a tenth of "
             "--max_tokens).")
    add("--max_tokens", type=int,
        help="Stop after this number of tokens, validation included (default: no limit).")
    add("--workers", type=int, default=available_cores(),
        help="The number of threads that encode (default: one per core).")
    add("--encoder", choices=["auto", "gigatoken", "tiktoken"], default="auto",
        help="The program that encodes. 'auto' means gigatoken where it is installed, else "
             "tiktoken, which is the reference and much slower (default auto).")
    add("--format", choices=["npy", "bin"], default="npy",
        help="The format of the shards: NumPy's .npy or llm.c's .bin (default npy).")


def check_combination(given: Set[str]) -> None:
    """UserError for a given flag that does nothing beside the others."""
    # Without any of them the text is a dataset: FineWeb-Edu.
    main_flag = next((flag for flag in COMBINED_WITH if flag in given), "dataset")
    for name in sorted(given - COMBINED_WITH[main_flag] - {main_flag}):
        raise UserError(f"--{name} does not go with --{main_flag}: leave one of them out")


def available_cores() -> int:
    """The cores that this process may use: in a Slurm job fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


# ----------------------------------------------------------------------------- text -> tokens

def encode_files(
    files: Iterable, reader: TextReader, encoder: Encoder, threads: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """(the number of a file, the next chunk of its tokens, 1-D uint16), in the order of the text.
    A chunk is about a megabyte of text. Threads encode some of them ahead."""
    waiting = deque()           # of (number of a file, Future of tokens)
    with ThreadPoolExecutor(threads) as pool:
        for number, path in files:
            for chunk in reader.read_chunks(path):
                waiting.append((number, pool.submit(encoder.encode, chunk)))

                # The reader is faster than the encoders: more chunks would only fill the memory.
                if len(waiting) > 2 * threads:
                    oldest, tokens = waiting.popleft()
                    yield oldest, tokens.result()

        for oldest, tokens in waiting:
            yield oldest, tokens.result()


# ----------------------------------------------------------------------------- tokens -> shards

class Shards:
    """The shards of a folder, which are written as the tokens of the text are added.

    A place in the text is the number of tokens before it. The tokens before `written` are in
    shards, and those from there to `seen` wait in the memory: a shard at most, and at first ten
    times MOST_VALIDATION. A shard is written when its last token is there, and after it the
    manifest that lists it, with the cursor at its end: (the number of a file, how many of its
    tokens are done). A run that goes on after a kill reads that file from its beginning, and drops
    those tokens."""

    def __init__(self, out: Path, prefix: str, settings: dict):
        self.out = out
        self.prefix = prefix
        self.manifest = manifest_to_continue(out, settings)
        self.cursor = (0, 0)
        self.written = 0
        for shard in self.manifest["shards"]:
            self.cursor = tuple(shard["cursor"])
            self.written += shard["tokens"]

        self.seen = self.written
        file, done = self.cursor
        self.starts = {file: self.written - done}   # {number of a file: place of its first token}
        self.waiting = deque()                          # of arrays of tokens, 1-D uint16

    def add(self, file: int, tokens: np.ndarray) -> None:
        """Takes the next tokens of the text, which are in this file, up to --max_tokens."""
        if self.manifest["max_tokens"] is not None:
            tokens = tokens[:self.manifest["max_tokens"] - self.seen]
        self.starts.setdefault(file, self.seen)
        self.seen += len(tokens)
        self.waiting.append(tokens)
        self.write_ready(at_end=False)

    def count_validation(self, at_end: bool) -> float | None:
        """How many tokens, from the beginning of the text, are for validation. None as long as
        that is not known. This is the whole rule; parse_args sets --val_tokens for FineWeb."""
        settings = self.manifest
        if settings["validation"] is not None:              # decided by an earlier call or run
            return settings["validation"]
        if settings["val_tokens"] is not None:
            return settings["val_tokens"]
        if settings.get("input") == []:                     # --val_input alone: all of them
            return math.inf

        # The files of --val_input come first, and end where the others begin.
        val_files = len(settings.get("val_input", []))
        if val_files:
            for file, start in self.starts.items():
                if file >= val_files:
                    return start
            return self.seen if at_end else None

        # A tenth of the text. Of a long one the limit is known before its end.
        if not at_end and self.seen < 10 * MOST_VALIDATION:
            return None
        if self.seen < LEAST_TEXT:
            return 0
        return min(self.seen // 10, MOST_VALIDATION)

    def write_ready(self, at_end: bool) -> None:
        """Writes the shards that are whole, and at the end of the text the others, too."""
        validation = self.count_validation(at_end)
        if validation is None:
            return

        # Each token of a split but the first is a target.
        if validation == math.inf:
            too_short = at_end and self.seen < 2
        else:
            too_short = validation < 2 or (at_end and self.seen - validation < 2)
            self.manifest["validation"] = validation
        if too_short:
            raise UserError(f"{self.seen} tokens, {min(validation, self.seen)} of them for "
                            f"validation, are not enough for training and validation: add text "
                            f"to --input or --val_input, change --val_tokens or raise "
                            f"--max_tokens, and choose another --out")

        while self.written < self.seen:
            split = "train"
            end = self.written + self.manifest["shard_size"]
            if self.written < validation:
                split = "val"
                end = min(end, validation)
            if end > self.seen and not at_end:
                break
            self.write(split, min(end, self.seen) - self.written)

    def write(self, split: str, count: int) -> None:
        """Writes the next `count` tokens as a shard, and then the manifest. If a kill comes
        between the two, the shard is made again."""
        shards = self.manifest["shards"]
        number = sum(shard["split"] == split for shard in shards)

        # As in build-nanogpt, shard 0 is validation.
        if split == "train":
            number += 1
        path = self.out / f"{self.prefix}_{split}_{number:06d}.{self.manifest['format']}"

        # What killed runs of the command have left half-written would take room.
        leftovers = rf"{re.escape(self.prefix)}_(train|val)_\d+\.(npy|bin)|manifest\.json"
        remove_leftovers(self.out, leftovers)

        # So that a run which goes on after a kill finds the settings of the first shard.
        if not shards:
            write_manifest(self.out, self.manifest)
        write_parts(path, count, self.take(count))
        self.written += count

        # The file of the last written token. A file that starts at `written` is still to be read.
        file = max(file for file, start in self.starts.items() if start < self.written)
        shards.append({
            "file": path.name,
            "split": split,
            "tokens": count,
            "sha256": file_sha256(path),
            "cursor": (file, self.written - self.starts[file]),
        })
        write_manifest(self.out, self.manifest)

    def take(self, count: int) -> Iterator[np.ndarray]:
        """Yields the first `count` of the waiting tokens in parts, and forgets them."""
        while count > 0:
            part = self.waiting.popleft()
            if len(part) > count:
                self.waiting.appendleft(part[count:])
                part = part[:count]
            count -= len(part)
            yield part

    def finish(self) -> None:
        """Writes what still waits, after the last token of the text."""
        self.write_ready(at_end=True)
        self.manifest["complete"] = True
        write_manifest(self.out, self.manifest)


def write_shards(args: argparse.Namespace, source, out: Path) -> int:
    """Writes the shards of the text of `source`, from where an earlier run of the command was
    stopped. Returns how many rows without text it has left out. UserError for other settings than
    that run's, and for a text that is too short to be divided."""
    recorded = {name: getattr(args, name) for name in RECORDED}
    settings = {"version": MANIFEST_VERSION, **source.settings, **recorded}
    shards = Shards(out, source.prefix, settings)
    if shards.manifest["complete"]:
        return 0

    encoder = Encoder(args.encoder)
    if encoder.gigatoken is None and args.encoder == "auto":
        print("encoding slowly with tiktoken, because gigatoken is not installed: pip install "
              "gigatoken")

    # The files before this one are done, and are not even fetched.
    first, skip = shards.cursor
    progress = tqdm(total=args.max_tokens, initial=shards.starts[first], unit="tok",
                    unit_scale=True, desc=str(out), disable=None)
    reader = TextReader(args.text_field, args.separator, encoder.mark)
    chunks = encode_files(source.files(first), reader, encoder, args.workers)
    with progress, closing(chunks):
        for file, tokens in chunks:
            # An earlier run has written the first tokens of its file.
            done = min(skip, len(tokens))
            skip -= done
            progress.update(len(tokens))
            shards.add(file, tokens[done:])
            if shards.seen == args.max_tokens:
                break
    shards.finish()
    shutil.rmtree(out / DOWNLOAD, ignore_errors=True)
    return reader.empty_rows


# ---------------------------------------------------------------------------- published shards

def fetch_published(count: int, out: Path) -> None:
    """--pretokenized: fetches those shards that `out` lacks, the one for validation and the first
    `count` for training, and verifies them all."""
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(1, count + 1)]
    present = set(shard_names(out))
    if present and read_manifest(out).get("pretokenized") != PRETOKENIZED:
        raise UserError(f"{out} has shards of another source than {PRETOKENIZED}: choose another "
                        f"--out")

    missing = [name for name in names if name not in present]
    if missing:
        with hub_errors(PRETOKENIZED) as hub:
            known = sorted(present.union(names))        # also those of an earlier call
            infos = hub.HfApi().get_paths_info(PRETOKENIZED, known, repo_type="dataset")
            shards = [{"file": info.path, "sha256": info.lfs.sha256} for info in infos]

            # The manifest comes first, so that after a kill the shards are known as these.
            write_manifest(out, {"pretokenized": PRETOKENIZED, "shards": shards})
            for name in missing:
                hub.hf_hub_download(PRETOKENIZED, name, repo_type="dataset", local_dir=out)
    verify(out, names)


def verify(folder: Path, names: list[str] | None = None) -> None:
    """--verify: UserError names the shards that are not as the manifest in `folder` records
    them. `names` are those to look at; None: all that it records."""
    manifest = read_manifest(folder)
    # {name of a shard: its SHA-256}
    recorded = {shard["file"]: shard["sha256"] for shard in manifest.get("shards", [])}
    if not recorded:
        raise UserError(f"{folder} has no manifest.json with SHA-256 of shards: check the path")
    if names is None:
        names = list(recorded)

    bad = []
    for name in tqdm(names, disable=None):
        path = folder / name
        if not path.is_file() or file_sha256(path) != recorded.get(name):
            bad.append(name)

    if bad:
        raise UserError(f"{folder} has {len(bad)} damaged or missing shards out of {len(names)} "
                        f"({', '.join(bad)}): restore them, or remove the folder and make all "
                        f"shards again")
    line = f"{folder}: all {len(names)} shards match the manifest"
    if unfinished(folder):
        line += f"; {unfinished(folder)}"
    print(line)


# ----------------------------------------------------------------------------- the command

def print_summary(out: Path, empty_rows: int, val_only: bool) -> None:
    """What the folder has, what this call has left out, and the command that comes next."""
    val = [count_tokens(path) for path in list_shards(out, "val")]
    train = []
    if not val_only:
        train = [count_tokens(path) for path in list_shards(out, "train")]
    line = (f"{out}: {len(val) + len(train)} shards complete, {sum(val):,} tokens for validation "
            f"and {sum(train):,} for training")
    if empty_rows:
        line += f"; {empty_rows:,} rows without text were left out"
    print(line)
    if val_only:
        data = shlex.quote(str(out))
        command = f"next: python train_gpt2.py --eval_only --init gpt2 --data {data}"
        length = length_that_fits(1024, max(val))
        if length < 1024:
            command += f" --sequence_length {length}"
        print(command)
    else:
        print(next_command(out, val, train))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.verify is not None:
        verify(Path(args.verify))
        return

    out = Path(args.out)
    empty_rows = 0
    if args.pretokenized is not None:
        with locked(out):
            fetch_published(args.pretokenized, out)
    else:
        if args.input or args.val_input:
            source = LocalFiles(args, out)
        else:
            source = HubDataset(args.dataset, args.name, args.split, out)
        with locked(out):
            empty_rows = write_shards(args, source, out)
    print_summary(out, empty_rows, val_only=bool(args.val_input and not args.input))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Makes the output folder and locks it. If nothing has come into a new one, it is removed."""
    is_new = not out.exists()
    with lock_folder(out, LOCK):
        try:
            yield
        finally:
            if is_new and os.listdir(out) == [LOCK]:
                shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    run_command(main)
