"""Text -> token shards, or FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --pretokenized 9                  FineWeb's published tokens, 9 x 100M -> fineweb10B/
    python fineweb.py --part 3/16                       the fourth of 16 commands that share the work
    python fineweb.py --verify edu_fineweb10B           are all shards of a folder as they were written?

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`. With --format bin it is llm.c's and modded-nanogpt's
file instead: 256 int32 (magic 20240520, version 1, token count), then the tokens.
"""
if __name__ == "__main__":              # before the other imports: Ctrl-C
    from runtime.start import begin
    begin(torch=False)
import argparse
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path

from corpus.encoding import encode_stream, gigatoken
from corpus.shard_writer import VAL_SEED, ShardWriter, all_parts, share
from corpus.hub_source import HubSource
from corpus.sources import TEXT_FIELD, LocalSource
from runtime.cli import FlagParser, RunError, UserError, parse_int, run_command
from runtime.files import file_sha256, read_text, remove_leftovers, replace_file, writable
from runtime.hub import fetch_file, need_hub, published_sha256
from runtime.presets import PRESETS
from runtime.progress import Progress
from runtime.shards import SHARD_NAME, damage_of, is_whole, list_shards, open_shard, recorded_sums
from runtime.start import AFTER_CTRL_C
from runtime.tokenizer import BPE_SHA256

MOST_WORKERS = 256              # or four a core
SHORTEST = 16                   # tokens of a sequence that is worth training on
RESUMES = ["the same command resumes"]


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
    flags = f" --block_size {T}" * (T < block_size) + " --val_every 0" * (T > fits_val)
    why = f"; a split is too short for sequences of {block_size} tokens, hence{flags}" * bool(flags)
    name = (out if out.name.strip(".") else out.resolve()).name or "data"         # of `..`, of the root
    return why, (f"next: python train_gpt2.py --preset {preset} --data {shlex.quote(str(out))} "
                 f"--out {shlex.quote(f'log/{name}')}{flags}")


def check_source(out: Path, repo: str, prefix: str) -> None:
    """UserError if the shards in `out` are not from `repo`: by its manifest, without one by their names."""
    names = [path.name for path in out.glob("*") if SHARD_NAME.match(path.name)]
    try:
        found = json.loads(read_text(out / "manifest.json"))
        ours = isinstance(found, dict) and found.get("pretokenized") == repo
    except FileNotFoundError:
        ours = all(re.fullmatch(rf"{prefix}_(val|train)_\d{{6}}\.bin", name) for name in names)
    except (ValueError, RecursionError):
        ours = False
    if names and not ours:
        raise UserError(f"{out} holds shards of another source than {repo}: choose another --out")


def save_sums(out: Path, repo: str, sums: dict[str, str]) -> None:
    """Writes the manifest of fetched shards."""
    content = {"pretokenized": repo, "shards": [{"file": name, "sha256": sha256}
                                                for name, sha256 in sorted(sums.items())]}
    replace_file(out / "manifest.json", lambda file: file.write(json.dumps(content, indent=1).encode()))


def fetch_whole(repo: str, path: Path) -> str:
    """Downloads `path`. Its SHA-256, or '' if it is no shard or, by its SHA-256, not the file on the hub."""
    fetch_file(repo, path)
    sha256 = file_sha256(path) if is_whole(path) else ""
    if sha256 and published_sha256(path) not in (sha256, None):
        path.unlink()                             # else the next run would take it for whole
        return ""
    return sha256


def fetch_shards(repo: str, prefix: str, count: int, out: Path) -> None:
    """--pretokenized: downloads the validation shard and the first `count` training shards, as far as `out`
    lacks them, and records the SHA-256 of each in manifest.json. UserError if `out` holds shards of another
    source, RunError if a download fails."""
    start = time.perf_counter()
    paths = [out / f"{prefix}_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    with writable(out):
        check_source(out, repo, prefix)
    sums = {}
    if missing := [path for path in paths if not is_whole(path)]:
        need_hub(f"{len(missing)} of {len(paths)} files of {repo}")
        with writable(out):
            out.mkdir(parents=True, exist_ok=True)
            remove_leftovers(out, r"manifest\.json")
            sums = {name: sum for name, sum in recorded_sums(out).items() if out / name not in missing}
            save_sums(out, repo, sums)
    progress = Progress(enabled=not sys.stderr.isatty())          # on a terminal huggingface_hub has its bars
    with progress(f"{out}: fetching from {repo}", len(missing), "shards") as task:
        for path in missing:
            if sums:
                AFTER_CTRL_C[:] = RESUMES
            if not (sha256 := fetch_whole(repo, path) or fetch_whole(repo, path)):
                raise RunError(f"{path} came damaged from {repo} twice: run the same command again, or ask "
                               f"for fewer shards")
            sums[path.name] = sha256
            save_sums(out, repo, sums)
            task.update()
    print_summary(out, f"{len(missing)} of {len(paths)} shards fetched from {repo}", start)


FINEWEB = {"edu": ("HuggingFaceFW/fineweb-edu", "edufineweb", "edu_fineweb"),
           "classic": ("HuggingFaceFW/fineweb", "fineweb", "fineweb")}
FETCH_FLAGS = ("--pretokenized", "--variant", "--sample", "--out")


def refuse_others(flag: str, argv: list[str], allowed: Container[str]) -> None:
    """UserError for a flag that does not go with `flag`."""
    for word in argv:                             # not args: a flag may be given its default value
        if (name := word.partition("=")[0]).startswith("--") and name not in allowed:
            raise UserError(f"{name} has no meaning with {flag}: leave one of the two out")


def check_pretokenized(args: argparse.Namespace, argv: list[str]) -> None:
    """Raises UserError if the flags do not go with --pretokenized, or if no such tokens are published."""
    refuse_others("--pretokenized", argv, FETCH_FLAGS)
    if (args.variant, args.sample) not in PRETOKENIZED:
        raise UserError(f"no tokens of --variant {args.variant} --sample {args.sample} are published: "
                        f"leave --sample out")
    published = PRETOKENIZED[args.variant, args.sample][2]
    if args.pretokenized not in range(1, published + 1):
        raise UserError(f"--pretokenized {args.pretokenized}: give 1 to {published} training shards")


def verify(folder: Path) -> None:
    """--verify: reads all shards in `folder` and compares them with the SHA-256 in its manifests. UserError
    names those that differ or are missing."""
    start = time.perf_counter()
    if not os.path.isdir(folder):
        raise UserError(f"--verify {folder}: there is no such folder")
    found = {path.name: "" for path in folder.glob("*") if SHARD_NAME.match(path.name)}
    sums = dict(sorted((found | recorded_sums(folder)).items()))
    if not any(sums.values()):
        raise UserError(f"no shard in {folder} can be checked: no manifest in it has a SHA-256 (those of "
                        f"earlier versions have none)")
    bad, size = [], 0
    with Progress()(f"{folder}: checking", len(sums), "shards") as task:
        for name, sha256 in sums.items():
            if why := damage_of(folder / name, sha256):
                bad.append(f"{name} ({why})")
            elif sha256:
                size += (folder / name).stat().st_size
            task.update()
    unknown = ", ".join(name for name, sha256 in sums.items() if not sha256)
    unknown = f"not checked (no SHA-256 in its manifest): {unknown}" if unknown else ""
    if bad:
        raise UserError(f"{len(bad)} of {len(sums)} shards in {folder} are damaged or missing: "
                        f"{', '.join(bad)}. Restore them from a copy, or make them again: remove them "
                        f"(--pretokenized) or the folder, and run the command that made it"
                        f"{'; ' * bool(unknown)}{unknown}")
    print(f"{folder}: {sum(map(bool, sums.values()))} shards, {size / 1e6:,.1f} MB, are as they were "
          f"written, after {time.perf_counter() - start:.1f} s{bool(unknown) * chr(10)}{unknown}")


def parse_part(text: str) -> tuple[int, int]:
    """'3/16' -> (3, 16)."""
    part = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not part or int(part[1]) >= int(part[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N-1, as 0/16 or 15/16")
    return int(part[1]), int(part[2])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    flag = parser.add_argument
    flag("--variant", choices=[*FINEWEB], help="default edu (FineWeb-Edu); with --pretokenized classic")
    flag("--sample", choices=["10BT", "100BT"], default="10BT", help="sample of it, in tokens (default 10BT)")
    flag("--input", nargs="+", action="extend", metavar="PATH_OR_GLOB",
         help="your own text instead: files, folders or globs, one or several: .txt, .md (one document a "
              "file), .jsonl, .csv, .tsv or .parquet, also .txt.gz, .jsonl.zst ...")
    flag("--text_field", metavar="NAME", default=TEXT_FIELD, help="column of the others (default text)")
    flag("--pretokenized", type=parse_int, metavar="N",
         help="published tokens instead: the validation and the first N training shards, of 200 MB each")
    flag("--out", help="output folder (default edu_fineweb10B and the like; required with --input)")
    flag("--shard_size", type=parse_int, default=100_000_000, help="tokens per shard (default 100000000)")
    flag("--val_tokens", type=parse_int, help="tokens of shard 0 (default shard_size, at most a tenth): "
         "FineWeb's first, of your own text some of all documents")
    flag("--max_tokens", type=parse_int, help="stop after so many, validation included (default: no limit)")
    flag("--workers", type=parse_int, help="threads that tokenise (default: one a core)")
    flag("--part", type=parse_part, metavar="I/N", help="of N commands, which write into one folder and may "
         "run at once on several machines, this is number I, from 0 to N-1")
    flag("--verify", metavar="DIR", help="reads all shards of a folder and compares each with the SHA-256 in "
         "its manifest: exit code 2 if one differs")
    flag("--format", choices=["npy", "bin"], default="npy", help="NumPy's files or llm.c's (default npy)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.verify is not None:
        refuse_others("--verify", argv, ["--verify"])
        return args
    args.variant = args.variant or ("edu" if args.pretokenized is None else "classic")
    folder = FINEWEB[args.variant][2]
    if args.pretokenized is not None:
        check_pretokenized(args, argv)
        folder = PRETOKENIZED[args.variant, args.sample][1]
    check_flags(args)
    args.out = Path(args.out or folder + args.sample[:-1])
    return args


def check_flags(args: argparse.Namespace) -> None:
    """UserError for numbers out of range and for flags that contradict each other."""
    for name in ("shard_size", "val_tokens", "max_tokens", "workers"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if (args.workers or 0) > (most := max(MOST_WORKERS, 4 * (os.cpu_count() or 1))):
        raise UserError(f"--workers {args.workers}: must be at most {most} here: more threads than "
                        f"cores make nothing faster")
    if args.input and not args.out:
        raise UserError("--input needs --out: give the output folder of the shards")
    if args.text_field != TEXT_FIELD and not args.input:
        raise UserError(f"--text_field {args.text_field} needs --input: FineWeb's text is in {TEXT_FIELD}")
    if args.max_tokens and (args.val_tokens or 0) >= share(args.max_tokens, (0, (args.part or (0, 1))[1])):
        raise UserError(f"--val_tokens {args.val_tokens} leaves nothing of --max_tokens {args.max_tokens}"
                        f"{f' / {args.part[1]} parts' if args.part else ''} to train on: give less of the "
                        f"first or more of the second")


def available_cores() -> int:
    """Cores that this process may run on: those of its Slurm job or container, not of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_shards(args: argparse.Namespace, source: HubSource | LocalSource, prefix: str) -> None:
    """Tokenizes `source` into shards. Resumes where an earlier run of the command stopped."""
    out, n = args.out, args.part[1] if args.part else 1
    expected = min(source.expected, share(args.max_tokens, (0, n)) if args.max_tokens else math.inf)
    settings = {"source": source.description, "tokenizer": {"name": "gpt2", **BPE_SHA256},
                "format": args.format, "shard_size": args.shard_size, "max_tokens": args.max_tokens,
                "val_tokens": args.val_tokens or min(args.shard_size, max(20, expected // 10))}
    start = time.perf_counter()
    for note in source.notes:
        print(note)
    writer = ShardWriter(out, prefix, settings, args.part, None if source.shuffled else VAL_SEED)
    shards, there = writer.manifest["shards"], writer.total
    if there:
        print(f"{out}: {len(shards)} shards, {there:,} tokens, are there already")
    if not writer.manifest["complete"]:
        try:
            tokenize_into(writer, source, expected, args.workers)
        except (Exception, KeyboardInterrupt):
            writer.forget_if_empty()
            if shards:
                AFTER_CTRL_C[:] = RESUMES
            raise
    if not args.part:
        return print_summary(out, f"{len(shards)} shards complete", start)
    complete = all_parts(out, n)[0]
    done = f"{len(shards)} shards, {writer.total:,} tokens, of part {args.part[0]}/{n} complete"
    if complete == n:
        return print_summary(out, f"{done}, all {n} parts complete", start)
    print(f"{out}: {done}, after {time.perf_counter() - start:.1f} s\n{complete} of {n} parts are complete: "
          f"when all are, the last line is the command that trains on them")


def tokenize_into(writer: ShardWriter, source: HubSource | LocalSource, expected: int,
                  workers: int | None) -> None:
    """Writes what `writer` lacks of `source`, which has about `expected` tokens."""
    from tqdm import tqdm
    out, threads = str(writer.out), workers or available_cores()
    if not gigatoken(threads):
        print(f"{out}: tiktoken does the work, slowly: gigatoken is not installed (pip install gigatoken)")
    pieces = source.read(writer.document, writer.manifest["mark"])
    with closing(encode_stream(pieces, threads)) as stream:
        with Progress()(f"{out}: waiting for the first text"):                # of the hub: maybe a minute
            first = list(islice(stream, 1))
        log = Progress(enabled=not sys.stderr.isatty())                       # on a terminal there is the bar
        with (tqdm(total=expected, initial=writer.total, unit="tok", unit_scale=True, desc=out,
                   disable=None) as bar, log(out, expected, "tokens (estimated)") as task):
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
    with no_empty_folder(args.out):
        if args.pretokenized is not None:
            fetch_shards(*PRETOKENIZED[args.variant, args.sample][:2], args.pretokenized, args.out)
        elif args.input:
            write_shards(args, LocalSource(args.input, args.text_field, part), "text")
        else:
            repo, prefix, _ = FINEWEB[args.variant]
            write_shards(args, HubSource(repo, f"sample-{args.sample}", part), prefix)


if __name__ == "__main__":
    run_command(main)
