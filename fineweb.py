"""Text -> token shards, or FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --pretokenized 9                  FineWeb's published tokens, 9 x 100M -> fineweb10B/

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`. With --format bin it is llm.c's and modded-nanogpt's
file instead: 256 int32 (magic 20240520, version 1, token count), then the tokens.
"""
import argparse
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path

import numpy as np

from runtime.cli import FlagParser, RunError, UserError, parse_int, run_command, safe_repr
from runtime.files import readable, replace_file, writable
from runtime.hub import fetch_file, need_hub
from runtime.progress import Progress
from runtime.shards import SHARD_NAME, is_whole, list_shards, open_shard, write_shard
from runtime.sources import TEXT_FIELD, HubSource, LocalSource, difference
from runtime.tokenizer import BPE_SHA256, EOT, encode, tokenizer


def encode_documents(documents: list[tuple[str, bool]]) -> list[np.ndarray]:
    """1-D uint16 tokens of each (text, starts_document); <|endoftext|> first where a document starts."""
    return [np.concatenate(([EOT] * starts, encode(text)), dtype=np.uint16, casting="unsafe")
            for text, starts in documents]


def encode_stream(documents: Iterable[tuple[str, bool]], workers: int,
                  chunk: int = 1 << 17) -> Iterator[np.ndarray]:
    """encode_documents on `workers` threads, in the order of `documents`, about `chunk` characters a task.

    tiktoken releases the GIL, so threads scale like processes (2 cores: 17 -> 34 MB/s) and need no copies.
    """
    tokenizer()                                   # built once, before the threads use it
    batch, size, pending = [], 0, deque()
    with ThreadPoolExecutor(workers) as pool:
        for document in documents:
            batch.append(document)
            size += len(document[0])
            if size >= chunk:
                pending.append(pool.submit(encode_documents, batch))
                batch, size = [], 0
            if len(pending) > 2 * workers:        # bounds memory, keeps every worker busy
                yield from pending.popleft().result()
        pending.append(pool.submit(encode_documents, batch))
        while pending:
            yield from pending.popleft().result()


class ShardWriter:
    """Cuts a stream of tokens into shards; manifest.json records where in the source each shard ends.

    Shard 0 is validation. `settings` (source, tokenizer, sizes, format) determine every byte of the
    shards. Files are written atomically. After a kill the same command reads the manifest, resumes
    after the last complete shard, and ends with the same bytes. `cursors`: those of the source
    (runtime/sources.py); the manifest keeps the last one before the end of its last shard.
    """

    def __init__(self, out, prefix, settings, cursors):
        self.out, self.prefix, self.settings, self.cursors = out, prefix, {"version": 1, **settings}, cursors
        # in the file a cursor is a `mark`, and a document a `unit`: those of earlier versions are read
        self.manifest = {**self.settings, "complete": False, "tokens": 0, "mark": None, "shards": []}
        self.path = out / "manifest.json"
        self.max_tokens = settings["max_tokens"] or math.inf
        self.document, self.offset, self.total = 0, 0, 0        # next: token `offset` of document `document`
        self.parts, self.space_left = [], settings["val_tokens"]        # of the next shard
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._resume()
            elif any(SHARD_NAME.match(path.name) for path in out.iterdir()):
                raise UserError(f"{out} already holds shards without a manifest.json: choose another --out")
            if not self.manifest["shards"]:
                self._save()                      # first: a kill must not leave shard 0 without a manifest

    def _resume(self):
        """Reads the manifest of an earlier run. UserError if it is damaged or has other settings."""
        with readable(self.path, f"choose another --out, or remove {self.out} to start again"):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if "pretokenized" in found:
                raise UserError(f"{self.out} holds fetched shards of {safe_repr(found['pretokenized'])}: "
                                f"choose another --out")
            shards = [(self.out / Path(s["file"]).name, s["tokens"], s["end"]["unit"], s["end"]["token"])
                      for s in found["shards"]]
            numbers = [(found["mark"] or [0])[0], *(n for shard in shards for n in shard[1:])]
            if not all(type(n) is int and n >= 0 for n in numbers) or type(found["complete"]) is not bool:
                raise ValueError("`mark`, `complete` or a number of a shard is wrong")
        if not shards:
            return
        for key, value in self.settings.items():
            if (before := found.get(key)) != value:
                raise UserError(f"{self.out} was begun with another {key} ({difference(before, value)}): "
                                f"give the same again, or choose another --out")
        for path, tokens, self.document, self.offset in shards:
            if len(open_shard(path)) != tokens:
                raise UserError(f"{path} is not the shard that manifest.json describes: remove {self.out}")
            self.total += tokens
        self.manifest, self.space_left = found, self.settings["shard_size"]

    def add(self, tokens):
        """Appends the next document's tokens, up to max_tokens. Writes a full shard when more tokens come."""
        while self.offset < len(tokens) and self.total < self.max_tokens:
            if self.space_left == 0:
                self._write()
            part = tokens[self.offset:self.offset + min(self.space_left, self.max_tokens - self.total)]
            self.parts.append(part)
            self.offset += len(part)
            self.total += len(part)
            self.space_left -= len(part)
        if self.offset == len(tokens):
            self.document, self.offset = self.document + 1, 0

    def finish(self):
        """Writes the last shard. A corpus that fits into the validation shard is split 1 : 9 instead."""
        if not self.manifest["shards"]:
            if self.total < 20:
                raise UserError(f"only {self.total} tokens of text, too few for a training and a validation "
                                f"shard: give more text")
            parts, self.parts, self.space_left = self.parts, [], self.total // 10
            self.total, self.document = 0, 0
            for tokens in parts:
                self.add(tokens)
        if self.parts:
            self._write()
        self.manifest |= {"complete": True, "mark": None}
        self._save()

    def _write(self):
        """Writes the collected tokens as the next shard, then the manifest."""
        index, tokens = len(self.manifest["shards"]), np.concatenate(self.parts)
        split = "train" if index else "val"
        name = f"{self.prefix}_{split}_{index:06d}.{self.settings['format']}"
        while self.cursors and self.cursors[0][0] <= self.document:
            self.manifest["mark"] = self.cursors.popleft()
        self.manifest["shards"].append({"file": name, "split": split, "tokens": len(tokens),
                                        "end": {"unit": self.document, "token": self.offset}})
        self.manifest["tokens"] = self.total
        write_shard(self.out / name, tokens)
        self._save()
        self.parts, self.space_left = [], self.settings["shard_size"]

    def _save(self):
        replace_file(self.path, lambda file: file.write(json.dumps(self.manifest, indent=1).encode()))


@contextmanager
def no_empty_folder(out: Path) -> Iterator[None]:
    """Around all that writes to `out`: if it fails before the first shard, the folders that it made are
    removed again. A folder that was there before stays as it is."""
    made = [folder for folder in (out.absolute(), *out.absolute().parents) if not os.path.exists(folder)]
    try:
        yield
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):                   # huggingface_hub goes on with an .incomplete download
            if made and not any(SHARD_NAME.match(path.name) or path.suffix == ".incomplete"
                                for path in out.rglob("*")):
                shutil.rmtree(out / ".cache", ignore_errors=True)         # of huggingface_hub
                (out / "manifest.json").unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):               # not empty
                folder.rmdir()
        raise


# (variant, sample): dataset, prefix, number of training shards
PRETOKENIZED = {("classic", "10BT"): ("kjj0/fineweb10B-gpt2", "fineweb", 103),
                ("classic", "100BT"): ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
                ("edu", "10BT"): ("kjj0/finewebedu10B-gpt2", "finewebedu", 99)}


def preset_for(tokens: int) -> str:
    """The preset of train_gpt2.py (runtime/presets.py) that suits so many training tokens."""
    # small has 33M tokens, and over less than a quarter of that it would make more than 4 epochs
    return "shakespeare" if tokens < 8_200_000 else "small" if tokens < 1_000_000_000 else "gpt2"


def print_summary(out: Path, done: str, val: int, train: int, start: float) -> None:
    """The last two lines: what is in `out`, and the command that trains on it, as a shell reads it."""
    print(f"{out}: {done}, {val:,} tokens for validation and {train:,} for training, "
          f"after {time.perf_counter() - start:.1f} s\n"
          f"next: python train_gpt2.py --preset {preset_for(train)} --data {shlex.quote(str(out))} "
          f"--out {shlex.quote(f'log/{out.name}')}")


def fetch_shards(repo: str, prefix: str, count: int, out: Path) -> None:
    """--pretokenized: downloads the validation shard and the first `count` training shards, as far as `out`
    lacks them. UserError if `out` holds shards of another source, RunError if a download fails."""
    start = time.perf_counter()
    manifest, ours = out / "manifest.json", json.dumps({"pretokenized": repo}).encode()
    paths = [out / f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    with writable(out):
        names = [path.name for path in out.glob("*") if SHARD_NAME.match(path.name)]
        if names and not (manifest.read_bytes() == ours if manifest.exists() else
                          all(re.fullmatch(rf"{prefix}_(val|train)_\d{{6}}\.bin", name) for name in names)):
            raise UserError(f"{out} holds shards of another source than {repo}: choose another --out")
    if missing := [path for path in paths if not is_whole(path)]:
        need_hub(f"{len(missing)} of {len(paths)} files of {repo}")
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
        replace_file(manifest, lambda file: file.write(ours))
    progress = Progress(enabled=not sys.stderr.isatty())          # on a terminal huggingface_hub has its bars
    with progress(f"{out}: fetching from {repo}", len(missing), "shards") as task:
        for path in missing:
            fetch_file(repo, path)
            if not is_whole(path):
                fetch_file(repo, path)
            if not is_whole(path):
                raise RunError(f"{path} came damaged from {repo} twice: run the same command again, or ask "
                               f"for fewer shards")
            task.update()
    val, train = (sum(len(open_shard(path)) for path in list_shards(out, split))
                  for split in ("val", "train"))
    print_summary(out, f"{len(missing)} of {len(paths)} shards fetched from {repo}", val, train, start)


FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}
FETCH_FLAGS = ("--pretokenized", "--variant", "--sample", "--out")


def check_pretokenized(args: argparse.Namespace, argv: list[str]) -> None:
    """Raises UserError if the flags do not go with --pretokenized, or if no such tokens are published."""
    for word in argv:                             # not args: a flag may be given its default value
        if (name := word.partition("=")[0]).startswith("--") and name not in FETCH_FLAGS:
            raise UserError(f"{name} has no meaning with --pretokenized: leave one of the two out")
    if (args.variant, args.sample) not in PRETOKENIZED:
        raise UserError(f"no tokens of --variant {args.variant} --sample {args.sample} are published: "
                        f"leave --sample out")
    published = PRETOKENIZED[args.variant, args.sample][2]
    if args.pretokenized not in range(1, published + 1):
        raise UserError(f"--pretokenized {args.pretokenized}: give 1 to {published} training shards")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    flag = parser.add_argument
    flag("--variant", choices=[*FINEWEB], help="default edu (FineWeb-Edu); with --pretokenized classic")
    flag("--sample", choices=["10BT", "100BT"], default="10BT", help="sample of it, in tokens (default 10BT)")
    flag("--input", nargs="+", action="extend", metavar="PATH_OR_GLOB",
         help="your own text instead: files, folders or globs, one or several: .txt (one document a file), "
              ".jsonl or .parquet, also .txt.gz, .jsonl.zst ...")
    flag("--text_field", metavar="NAME", default=TEXT_FIELD, help="column of .jsonl, .parquet (default text)")
    flag("--pretokenized", type=parse_int, metavar="N",
         help="published tokens instead: the validation and the first N training shards, of 200 MB each")
    flag("--out", help="output folder (default edu_fineweb10B and the like; required with --input)")
    flag("--shard_size", type=parse_int, default=100_000_000, help="tokens per shard (default 100000000)")
    flag("--val_tokens", type=parse_int, help="tokens of shard 0 (default shard_size, at most a tenth)")
    flag("--max_tokens", type=parse_int, help="stop after so many, validation included (default: no limit)")
    flag("--workers", type=parse_int, default=os.cpu_count() or 1, help="threads (default: number of cores)")
    flag("--format", choices=["npy", "bin"], default="npy", help="NumPy's files or llm.c's (default npy)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.variant = args.variant or ("edu" if args.pretokenized is None else "classic")
    folder = FINEWEB[args.variant][2]
    if args.pretokenized is not None:
        check_pretokenized(args, argv)
        folder = PRETOKENIZED[args.variant, args.sample][1]
    for name in ("shard_size", "val_tokens", "max_tokens", "workers"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.input and not args.out:
        raise UserError("--input needs --out: give the output folder of the shards")
    if args.text_field != TEXT_FIELD and not args.input:
        raise UserError(f"--text_field {args.text_field} needs --input: FineWeb's text is in {TEXT_FIELD}")
    if (args.val_tokens or 0) >= (args.max_tokens or math.inf):
        raise UserError(f"--val_tokens {args.val_tokens} leaves nothing of --max_tokens {args.max_tokens} to "
                        f"train on: give less of the first or more of the second")
    args.out = Path(args.out or folder + args.sample[:-1])
    return args


def write_shards(args: argparse.Namespace, source: HubSource | LocalSource, prefix: str) -> None:
    """Tokenizes `source` into shards. Resumes where an earlier run of the command stopped."""
    from tqdm import tqdm
    out, expected = args.out, min(source.expected, args.max_tokens or math.inf)
    settings = {"source": source.description, "tokenizer": {"name": "gpt2", **BPE_SHA256},
                "format": args.format, "shard_size": args.shard_size, "max_tokens": args.max_tokens,
                "val_tokens": args.val_tokens or min(args.shard_size, max(20, expected // 10))}
    start = time.perf_counter()
    writer = ShardWriter(out, prefix, settings, source.cursors)
    shards, there = writer.manifest["shards"], writer.total
    if there:
        print(f"{out}: {len(shards)} shards, {there:,} tokens, are there already")
    if not writer.manifest["complete"]:
        stream = encode_stream(source.documents(writer.document, writer.manifest["mark"]), args.workers)
        with Progress()(f"{out}: waiting for the first text"):                # of the hub: maybe a minute
            first = list(islice(stream, 1))
        log = Progress(enabled=not sys.stderr.isatty())                       # on a terminal there is the bar
        with (tqdm(total=expected, initial=there, unit="tok", unit_scale=True, desc=str(out),
                   disable=None) as bar, log(str(out), expected, "tokens (estimated)") as task):
            for tokens in chain(first, stream):
                writer.add(tokens)
                bar.update(writer.total - bar.n)
                task.done = writer.total
                if writer.total >= writer.max_tokens:
                    break
        writer.finish()
    val = shards[0]["tokens"]
    print_summary(out, f"{len(shards)} shards complete", val, writer.total - val, start)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse_args(argv)
    with no_empty_folder(args.out):
        if args.pretokenized is not None:
            fetch_shards(*PRETOKENIZED[args.variant, args.sample][:2], args.pretokenized, args.out)
        elif args.input:
            write_shards(args, LocalSource(args.input, args.text_field), "text")
        else:
            repo, prefix, _ = FINEWEB[args.variant]
            write_shards(args, HubSource(repo, f"sample-{args.sample}"), prefix)


if __name__ == "__main__":
    run_command(main)
