"""Text -> token shards, or FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --dataset roneneldan/TinyStories  any text dataset of the Hugging Face hub
    python fineweb.py --pretokenized 9                  FineWeb's published tokens, 9 x 100M -> fineweb10B/
    python fineweb.py --part 3/16                       the fourth of 16 commands that share the work
    python fineweb.py --verify edu_fineweb10B           are all shards of a folder as they were written?

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`. With --format bin it is llm.c's and modded-nanogpt's
file instead: 256 int32 (magic 20240520, version 1, token count), then the tokens.
"""
import argparse
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path

from corpus.encoding import encode_stream, gigatoken
from corpus.hub import REPO_NAME
from corpus.hub_source import FINEWEB, HubSource, default_names
from corpus.progress import Progress
from corpus.published import PRETOKENIZED, fetch_shards
from corpus.shard_writer import VAL_SEED, ShardWriter, manifest_of, part_name, read_manifests, share
from corpus.sources import TEXT_FIELD, LocalSource
from corpus.verify import verify
from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.presets import PRESETS
from runtime.shards import OWN_TEXT, SHARD_NAME, list_shards, open_shard
from runtime.tokenizer import BPE_SHA256

MOST_WORKERS = 256              # or four a core
SHORTEST = 16                   # tokens of a sequence that is worth training on


@contextmanager
def no_trace(out: Path, manifest: str) -> Iterator[None]:
    """Around all that writes to `out`: if it fails before the first shard, what it made there, a manifest of
    this name and folders, is removed again. What was there before stays as it is."""
    path, cache = out / manifest, out / ".cache"  # of huggingface_hub, which resumes .incomplete files
    made = [folder for folder in (out.absolute(), *out.absolute().parents) if not os.path.exists(folder)]
    is_new = not os.path.exists(path)
    try:
        yield
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):
            shards = (found for found in out.iterdir() if SHARD_NAME.match(found.name))
            begun = any(manifest_of(shard) == path for shard in shards) or any(cache.rglob("*.incomplete"))
            if is_new and not begun:
                path.unlink(missing_ok=True)
                if made:
                    shutil.rmtree(cache, ignore_errors=True)
        for folder in made:
            with suppress(OSError):               # not empty
                folder.rmdir()
        raise


def preset_for(tokens: int) -> str:
    """The preset of train_gpt2.py (runtime/presets.py) that suits so many training tokens."""
    # small has 33M tokens, and over less than a quarter of that it would make more than 4 epochs
    return "shakespeare" if tokens < 8_200_000 else "small" if tokens < 1_000_000_000 else "gpt2"


def print_summary(out: Path, done: str, start: float) -> None:
    """The last two lines: what is in `out`, and the command that trains on it."""
    val, train = ([len(open_shard(path)) for path in list_shards(out, split)] for split in ("val", "train"))
    why, last = next_command(out, val, train)
    print(f"{out}: {done}, {sum(val):,} tokens for validation and {sum(train):,} for training, "
          f"after {time.perf_counter() - start:.1f} s{why}\n{last}")


def next_command(out: Path, val: list[int], train: list[int]) -> tuple[str, str]:
    """(why the command is not the preset's alone, or '', the command that trains on shards of so many tokens,
    as a shell reads it). It has the flags that shards too short for the preset's sequences need; for those
    with which nothing sensible runs there is a line that says so instead."""
    preset = preset_for(sum(train))
    T = block_size = PRESETS[preset][1].get("block_size", 1024)
    # of each split the longest power of two that a shard has room for with its target: it divides the batch
    fits, fits_val = (min(T, 1 << (max(lengths) - 1).bit_length() >> 1) for lengths in (train, val))
    # by default validation has a tenth; a far smaller one, which was asked for, shortens no sequence
    T = min(fits, fits_val) if 20 * sum(val) >= sum(train) else fits
    if T < SHORTEST:
        return "", (f"{out}: too short to train on: validation and training each need a shard of at least "
                    f"{SHORTEST + 1} tokens. Give more text, and another --out")
    flags = (f" --block_size {T}" if T < block_size else "") + (" --val_every 0" if T > fits_val else "")
    why = f"; a split is too short for sequences of {block_size} tokens, hence{flags}" if flags else ""
    name = (out if out.name.strip(".") else out.resolve()).name or "data"         # of `..`, of the root
    return why, (f"next: python train_gpt2.py --preset {preset} --data {shlex.quote(str(out))} "
                 f"--out {shlex.quote(f'log/{name}')}{flags}")


# flags that go together with the first of them
TEXT_FLAGS = {"--text_field", "--out", "--shard_size", "--val_tokens", "--max_tokens", "--workers", "--part",
              "--format"}
ALLOWED = {"verify": {"--verify"}, "pretokenized": {"--pretokenized", "--variant", "--sample", "--out"},
           "dataset": {"--dataset", "--name", "--split", *TEXT_FLAGS}, "input": {"--input", *TEXT_FLAGS}}


def parse_part(text: str) -> tuple[int, int]:
    """'3/16' -> (3, 16)."""
    part = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not part or int(part[1]) >= int(part[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1, as 0/16 or 15/16")
    return int(part[1]), int(part[2])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags. UserError for those that do not go together."""
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    flag = parser.add_argument
    flag("--variant", choices=[*FINEWEB], help="default edu (FineWeb-Edu); with --pretokenized classic")
    flag("--sample", choices=["10BT", "100BT"], default="10BT", help="sample of it, in tokens (default 10BT)")
    flag("--dataset", metavar="OWNER/NAME", help="a text dataset of the Hugging Face hub instead, streamed: "
         "--variant edu is --dataset HuggingFaceFW/fineweb-edu --name sample-10BT")
    flag("--name", metavar="CONFIG", help="configuration of --dataset, where it has several")
    flag("--split", help="split of --dataset (default train)")
    flag("--input", nargs="+", action="extend", metavar="PATH_OR_GLOB",
         help="your own text instead: files, folders or globs, one or several: .txt, .md (one document a "
              "file), .jsonl, .csv, .tsv or .parquet, also .txt.gz, .jsonl.zst ...")
    flag("--text_field", metavar="NAME", default=TEXT_FIELD, help="column that holds the text (default text)")
    flag("--pretokenized", type=parse_int, metavar="N",
         help="published tokens instead: the validation and the first N training shards, of 200 MB each")
    flag("--out", help="output folder (default edu_fineweb10B, or --dataset's name; required with --input)")
    flag("--shard_size", type=parse_int, default=100_000_000, help="tokens per shard (default 100000000)")
    flag("--val_tokens", type=parse_int, help="tokens of shard 0 (default shard_size, at most a tenth): "
         "FineWeb's first, of your own text documents at random")
    flag("--max_tokens", type=parse_int, help="stop after so many, validation included (default: no limit)")
    flag("--workers", type=parse_int, help="threads that tokenise (default: one a core)")
    flag("--part", type=parse_part, metavar="I/N", help="of N commands, which write into one folder and may "
         "run at once on several machines, this is number I, from 0 to N-1")
    flag("--verify", metavar="DIR", help="reads all shards of a folder and compares each with the SHA-256 in "
         "its manifest: exit code 2 if one differs")
    flag("--format", choices=["npy", "bin"], default="npy", help="NumPy's files or llm.c's (default npy)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}    # their default values too
    for name, allowed in ALLOWED.items():
        if getattr(args, name) is not None and (others := given - allowed):
            raise UserError(f"{min(others)} cannot be combined with --{name}: leave one of the two out")
    if args.pretokenized is not None:
        complete_pretokenized_flags(args)
    elif args.verify is None:
        complete_text_flags(args)
    return args


def complete_pretokenized_flags(args: argparse.Namespace) -> None:
    """Sets the flags whose defaults depend on others. UserError if no such tokens are published."""
    args.variant = args.variant or "classic"
    if (args.variant, args.sample) not in PRETOKENIZED:
        raise UserError(f"no tokens of --variant {args.variant} --sample {args.sample} are published: "
                        f"leave --sample out")
    _, prefix, published = PRETOKENIZED[args.variant, args.sample]
    if not 1 <= args.pretokenized <= published:
        raise UserError(f"--pretokenized {args.pretokenized}: give 1 to {published} training shards")
    args.out = Path(args.out or prefix + args.sample[:-1])


def complete_text_flags(args: argparse.Namespace) -> None:
    """Sets the flags whose defaults depend on others. UserError for numbers out of range and for flags that
    contradict each other."""
    if args.dataset and not REPO_NAME.fullmatch(args.dataset):
        raise UserError(f"--dataset {args.dataset} is not OWNER/NAME, as roneneldan/TinyStories")
    if not args.dataset and (args.name or args.split):
        raise UserError(f"--{'name' if args.name else 'split'} needs --dataset: give OWNER/NAME")
    for name in ("shard_size", "val_tokens", "max_tokens", "workers"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if (args.workers or 0) > (most := max(MOST_WORKERS, 4 * (os.cpu_count() or 1))):
        raise UserError(f"--workers {args.workers}: must be at most {most} here")
    if args.input and not args.out:
        raise UserError("--input needs --out: give the output folder of the shards")
    if args.text_field != TEXT_FIELD and not (args.input or args.dataset):
        raise UserError(f"--text_field {args.text_field} needs --input or --dataset")
    parts = args.part[1] if args.part else 1
    if args.max_tokens and (args.val_tokens or 0) >= share(args.max_tokens, (0, parts)):
        most = f"{args.max_tokens} / {parts} parts" if args.part else args.max_tokens
        raise UserError(f"--val_tokens {args.val_tokens} leaves nothing of --max_tokens {most} to train on: "
                        f"give less of the first or more of the second")
    args.variant, args.split = args.variant or "edu", args.split or "train"
    if not args.dataset:
        args.dataset, args.name = FINEWEB[args.variant][0], f"sample-{args.sample}"
    args.out = Path(args.out or default_names(args.dataset, args.name, args.split)[1])


def available_cores() -> int:
    """Cores that this process may run on: those of its Slurm job or container, not of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_shards(args: argparse.Namespace, source: HubSource | LocalSource, prefix: str) -> None:
    """Tokenizes `source` into shards. Resumes where an earlier run of the command stopped."""
    out, n = args.out, args.part[1] if args.part else 1
    expected = min(source.expected, share(args.max_tokens, (0, n)) if args.max_tokens else math.inf)
    settings = {"source": source.description, "tokenizer": {"name": "gpt2", **BPE_SHA256},
                "format": args.format, "shard_size": args.shard_size, "max_tokens": args.max_tokens,
                "val_tokens": args.val_tokens or int(min(args.shard_size, max(20, expected / 10)))}
    start = time.perf_counter()
    for note in source.notes:
        print(note)
    writer = ShardWriter(out, prefix, settings, args.part, None if source.shuffled else VAL_SEED,
                         val_is_guess=not args.val_tokens)
    shards = writer.manifest["shards"]
    if shards:
        print(f"{out}: {len(shards)} shards, {writer.total:,} tokens, are there already")
    if not writer.manifest["complete"]:
        tokenize_into(writer, source, expected, args.workers)
    done = f"{len(shards)} shards complete"
    if args.part:
        done = f"{len(shards)} shards, {writer.total:,} tokens, of part {args.part[0]}/{n} complete"
        complete = sum(found.get("complete") is True for found in read_manifests(out).values())
        if complete < n:
            return print(f"{out}: {done}, after {time.perf_counter() - start:.1f} s\n{complete} of {n} parts "
                         f"are complete: when all are, the last line is the command that trains on them")
        done += f", all {n} parts complete"
    print_summary(out, done, start)


def tokenize_into(writer: ShardWriter, source: HubSource | LocalSource, expected: float,
                  threads: int | None) -> None:
    """Writes what `writer` lacks of `source`, which has about `expected` tokens."""
    from tqdm import tqdm
    out, threads = str(writer.out), threads or available_cores()
    if not gigatoken(threads):
        print(f"{out}: tiktoken does the work, slowly: gigatoken is not installed (pip install gigatoken)")
    pieces = source.read(writer.document, writer.manifest["mark"])
    with closing(encode_stream(pieces, threads)) as stream:
        with Progress()(f"{out}: waiting for the first text"):                # of the hub: maybe a minute
            first = list(islice(stream, 1))
        log = Progress(enabled=not sys.stderr.isatty())                       # on a terminal there is the bar
        total = expected if expected < math.inf else None
        with (tqdm(total=total, initial=writer.total, unit="tok", unit_scale=True, desc=out,
                   disable=None) as bar, log(out, total, "tokens (estimated)") as task):
            for tokens in chain(first, stream):
                writer.add(tokens)
                bar.update(writer.total - bar.n)
                task.done = writer.total
                if writer.total >= writer.max_tokens:
                    break
        writer.finish()


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse_args(argv)
    if args.verify is not None:
        return verify(Path(args.verify))
    part = args.part or (0, 1)
    with no_trace(args.out, f"manifest{part_name(args.part)}.json"):
        if args.pretokenized is not None:
            start, (repo, prefix, _) = time.perf_counter(), PRETOKENIZED[args.variant, args.sample]
            print_summary(args.out, fetch_shards(repo, prefix, args.pretokenized, args.out), start)
        elif args.input:
            write_shards(args, LocalSource(args.input, args.text_field, part), OWN_TEXT)
        else:
            source = HubSource(args.dataset, args.name, part, args.split, args.text_field)
            with Progress()(f"{args.out}: waiting for the hub"):
                source.pin(args.out)
            write_shards(args, source, default_names(args.dataset, args.name, args.split)[0])


if __name__ == "__main__":
    run_command(main)
