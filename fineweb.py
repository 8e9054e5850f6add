"""Text -> token shards, or FineWeb's published tokens.

    python fineweb.py                                   FineWeb-Edu, sample-10BT -> edu_fineweb10B/
    python fineweb.py --input input.txt --out data/shakespeare      any text of your own
    python fineweb.py --dataset roneneldan/TinyStories  any text dataset of the Hugging Face hub
    python fineweb.py --pretokenized 9                  FineWeb's published tokens, 9 x 100M -> fineweb10B/
    python fineweb.py --verify edu_fineweb10B           are all shards of a folder as they were written?

A shard is a 1-D array of uint16 GPT-2 tokens, each document preceded by <|endoftext|> (50256):
`*_train_000001.npy`, `*_val_000000.npy`; or with --format bin the .bin of llm.c and modded-nanogpt.
"""
# first, because it refuses an old Python in one line
from runtime.cli import (FlagParser, RunError, UserError, brief_error, import_package, print_error,
                         run_command)

import argparse
import glob
import os
import re
import shlex
import shutil
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from tqdm import tqdm

from runtime.files import NO_ROOM, writable
from runtime.shards import (ShardWriter, file_sha256, list_shards, open_shard, read_manifest, shard_names,
                            write_manifest)
from runtime.text import READERS, TEXT_FILES, Layout, describe, kind_of, read_rows
from runtime.tokenizer import BPE_SHA256, Encoder

# shuffled, so that their first tokens are for validation: prefix of the shards, folder
FINEWEB = {"HuggingFaceFW/fineweb-edu": ("edufineweb", "edu_fineweb"),
           "HuggingFaceFW/fineweb": ("fineweb", "fineweb")}
PRETOKENIZED = "kjj0/fineweb10B-gpt2"
VAL_BLOCK, VAL_BLOCKS, LEAST = 4096, 40, 200      # tokens of a block; a text's least blocks, and tokens
# --block_size of these presets. A table here, because to import runtime/presets.py may load torch
BLOCK_SIZES = {"shakespeare": 128, "small": 256, "gpt2": 1024}
TEXT_FLAGS = {"text_field", "separator", "tsv_quotes", "out", "shard_size", "val_tokens", "max_tokens",
              "workers", "format"}
ALLOWED = {"verify": {"verify"}, "pretokenized": {"pretokenized", "out"},   # flags that go with the first
           "input": {"input", "val_input", *TEXT_FLAGS}, "dataset": {"dataset", "name", "split", *TEXT_FLAGS}}
MOST = {"shard_size": 2**30, "val_tokens": 2**30, "max_tokens": 2**60, "workers": 256, "pretokenized": 103}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags. UserError for those that do not go together, and for numbers out of range."""
    parser = FlagParser(prog="fineweb.py", description=__doc__)
    flag = parser.add_argument
    flag("--dataset", metavar="OWNER/NAME", help="text dataset of the Hugging Face hub (default FineWeb-Edu)")
    flag("--name", metavar="CONFIG", help="configuration of --dataset, where it has several")
    flag("--split", help="split of --dataset (default train)")
    flag("--input", nargs="+", action="extend", metavar="PATH", help="your own text: files, folders, globs: "
         ".txt, .md (one document a file), .jsonl, .ndjson, .json (one a line), .csv, .tsv, .parquet, also "
         ".txt.gz, .jsonl.zst ...")
    flag("--val_input", nargs="+", action="extend", metavar="PATH", help="other files, for validation")
    flag("--text_field", metavar="NAME", help="column that holds the text (default text)")
    flag("--separator", metavar="TEXT", help="what stands between the documents of a .txt or .md, as in "
         "--separator '<|endoftext|>' (default: a file is one document)")
    flag("--tsv_quotes", action="store_true", default=None,
         help="cells of a .tsv may stand in quotation marks, as in a .csv (default: these are text)")
    flag("--pretokenized", type=int, metavar="N", help="fetches N published training shards of 200 MB")
    flag("--out", help="output folder (default edu_fineweb10B, or --dataset's name; required with --input)")
    flag("--shard_size", type=int, help="tokens per shard (default 100000000)")
    flag("--val_tokens", type=int, help="most for validation (default shard_size, or max_tokens / 10)")
    flag("--max_tokens", type=int, help="stop after so many, validation included (default: no limit)")
    flag("--workers", type=int, help="threads that encode (default: one a core)")
    flag("--verify", metavar="DIR", help="compares all shards of a folder with the sums in its manifest")
    flag("--format", choices=["npy", "bin"], help="NumPy's files or llm.c's (default npy)")
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value is not None}
    source = next((name for name in ALLOWED if name in given), None)
    for name in sorted(given - (ALLOWED[source] if source else TEXT_FLAGS)):
        raise UserError(f"--{name} cannot be combined with --{source}: leave one of them out" if source else
                        f"--{name} needs --{'input' if name == 'val_input' else 'dataset'}: give it")
    for name in sorted(given & MOST.keys()):
        if not 1 <= getattr(args, name) <= MOST[name]:
            raise UserError(f"--{name} {getattr(args, name)}: give 1 to {MOST[name]}")
    if args.input and not args.out:
        raise UserError("--input needs --out: give the output folder of the shards")
    if (args.val_tokens or 0) >= (args.max_tokens or 2**60) or args.val_tokens and args.val_input:
        raise UserError("--val_tokens must be less than --max_tokens, and does not go with --val_input")
    args.shard_size, args.split = args.shard_size or 100_000_000, args.split or "train"
    args.text_field, args.format = args.text_field or "text", args.format or "npy"
    args.separator, args.tsv_quotes = args.separator or "", bool(args.tsv_quotes)
    args.val_tokens = args.val_tokens or min(args.shard_size, -(-(args.max_tokens or 2**60) // 10))
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)   # of this Slurm job
    args.workers = args.workers or len(cores)
    return args


def local_source(args: argparse.Namespace) -> tuple[dict, str, Callable]:
    """(settings for the manifest, prefix of the shards, n -> (number, path, name) of the files from n on)."""
    sets = {flag: find_files(flag, getattr(args, flag) or ()) for flag in ("val_input", "input")}
    for path in {*map(os.path.realpath, sets["input"])} & {*map(os.path.realpath, sets["val_input"])}:
        raise UserError(f"{path} is both in --input and in --val_input: leave it out of one of them")
    files = [(path, f"--{flag} {path}") for flag, paths in sets.items() for path in paths]
    check_kinds(args, [path for path, _ in files])
    settings = {flag: [*map(describe, paths)] for flag, paths in sets.items()}
    return settings, "text", lambda first: ((n, *files[n]) for n in range(first, len(files)))


def check_kinds(args: argparse.Namespace, files: list) -> None:
    """UserError for a flag that is about a kind of file of which there is none."""
    kinds = {*map(kind_of, files)}
    if args.separator and not kinds & TEXT_FILES:
        raise UserError("--separator is for .txt and .md files, and there are none: leave it out")
    if args.tsv_quotes and ".tsv" not in kinds:
        raise UserError("--tsv_quotes is for .tsv files, and there are none: leave it out")


def find_files(flag: str, patterns: list[str]) -> list[Path]:
    """The files of paths, folders and globs, in order, without hidden ones. UserError for one without any of
    a known kind, and for a folder that cannot be read."""
    paths = []
    for pattern in patterns:
        try:
            found = list_files(pattern)
        except OSError as error:
            raise UserError(f"--{flag} {pattern}: {error.filename} cannot be read ({brief_error(error)}): "
                            f"make it readable, or leave it out") from None
        ours = [path for path in found if kind_of(path)]
        if not ours:
            raise UserError(f"--{flag} {pattern}: no {', '.join(READERS)} there: check it")
        paths += ours
    return paths


def list_files(pattern: str) -> list[Path]:
    """The sorted regular files that a path, folder or glob means. OSError if a folder on the way cannot be
    read: glob.glob would take it for an empty one."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISREG(os.stat(pattern).st_mode):
            return [Path(pattern)]
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "*")
    parts = Path(pattern).parts
    for i, part in enumerate(parts):
        through = os.path.join(*parts[:i], "**" if part == "**" else "") or "."
        for folder in filter(os.path.isdir, glob.glob(through, recursive=True)):
            os.stat(os.path.join(folder, "."))
            if re.search(r"[*?[]", part):         # else the folder need not be listed
                os.listdir(folder)
    return [Path(path) for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)]


def hub_source(args: argparse.Namespace) -> tuple[dict, str, Callable]:
    """As local_source, of --dataset, at the revision that a manifest in --out records, or the newest."""
    repo, split = args.dataset or "HuggingFaceFW/fineweb-edu", args.split
    name = args.name if args.dataset else "sample-10BT"
    words = "-".join(filter(None, [repo.rpartition("/")[2], name, split if split != "train" else ""]))
    prefix = folder = re.sub(r"[^A-Za-z0-9.]+", "-", words)[:100].strip("-.") or "hub"        # no underscores
    if repo in FINEWEB and split == "train" and (sample := re.fullmatch(r"sample-(\d+B)T", name or "")):
        prefix, folder = FINEWEB[repo][0], FINEWEB[repo][1] + sample[1]
    args.out = args.out or folder
    settings, found = {"dataset": repo, "name": name, "split": split}, read_manifest(Path(args.out))
    settings["revision"] = found.get("revision") if found.get("dataset") == repo else None
    if not settings["revision"]:
        with hub_errors(f"--dataset {repo}") as hub:
            settings["revision"] = hub.HfApi().dataset_info(repo, expand=["sha"]).sha
    return settings, prefix, lambda first: hub_files(args, settings, first)


@contextmanager
def hub_errors(what: str):
    """Around calls of the hub's libraries, whose errors come in many classes: they become ours. Gives
    huggingface_hub."""
    hub, errors = import_package("huggingface_hub"), import_package("huggingface_hub.errors")
    try:
        yield hub
    except ImportError as error:                  # what `datasets` needs for some datasets only
        raise UserError(f"{what} needs a package that is not installed ({brief_error(error)}): pip install "
                        f"{error.name or 'it'}") from None
    except Exception as error:
        if isinstance(error, UserError | RunError) or getattr(error, "errno", None) in NO_ROOM:
            raise                                 # a full disk: to `writable`
        brief, status = brief_error(error), getattr(getattr(error, "response", None), "status_code", None)
        # no such dataset, --name or --split (`brief` lists those that there are), or one that needs code
        ours = isinstance(error, ValueError | FileNotFoundError | errors.RepositoryNotFoundError)
        if status in (401, 403, 404) or "scripts" in brief or ours and not isinstance(
                error, errors.LocalEntryNotFoundError | errors.BadRequestError):
            raise UserError(f"{what} cannot be read ({brief}): check its name, --name and --split; if it is "
                            f"private or gated, accept its terms there, and `hf auth login`") from None
        raise RunError(f"{what} cannot be fetched from the Hugging Face hub ({brief}): run the same command "
                       f"again with a network, or give your own text with --input") from None


def list_hub_files(dataset: str, name: str | None, split: str, revision: str) -> list[str]:
    """The paths of the files of a split, in the dataset."""
    datasets = import_package("datasets")
    # if the hub does not answer, `datasets` takes what its cache has: hence an empty one. And with hf:// it
    # never takes a local folder OWNER/NAME
    with hub_errors(f"--dataset {dataset}"), tempfile.TemporaryDirectory() as empty:
        splits = datasets.load_dataset_builder(f"hf://datasets/{dataset}", name, cache_dir=empty,
                                               revision=revision).config.data_files or {}
        files = [url.partition(f"@{revision}/")[2] for url in splits.get(split, ())]
        if not files or not all(map(kind_of, files)):
            raise ValueError(f"of its splits ({', '.join(map(str, splits))}) {split} has no files, or others "
                             f"than {', '.join(READERS)}")
        return files


def hub_files(args: argparse.Namespace, settings: dict, first: int) -> Iterator[tuple[int, Path, str]]:
    """Files of a dataset, in OUT/.download while they are read; meanwhile the next one is fetched."""
    folder = Path(args.out) / ".download"
    dataset, revision, files = settings["dataset"], settings["revision"], list_hub_files(**settings)
    check_kinds(args, files)

    def begin(n):
        def fetch():
            try:
                with writable(folder, begun=True), hub_errors(f"{dataset}: {files[n]}") as hub:
                    future.set_result(hub.hf_hub_download(dataset, files[n], repo_type="dataset",
                                                          revision=revision, local_dir=folder))
            except BaseException as error:
                future.set_exception(error)
        future = Future()                         # of a daemon, which ends with the process
        threading.Thread(target=fetch, daemon=True).start()
        return future

    future = begin(first) if first < len(files) else None
    for n in range(first, len(files)):
        path, future = Path(future.result()), begin(n + 1) if n + 1 < len(files) else None
        yield n, path, f"{dataset}: {files[n]}"
        path.unlink()


def read_files(files: Iterable, layout: Layout, mark: bytes) -> Iterator[tuple[int, bytes]]:
    """(number of a file, the next of its documents), as read_rows has them. Says so once if a .txt or .md has
    <|endoftext|> in it and --separator was not given, or if that was given and divides none of them."""
    told, first, most_documents = False, None, 0  # most_documents: in one .txt or .md
    for number, path, name in files:
        first, documents = number if first is None else first, 0
        for row in read_rows(path, layout, mark, name):
            if kind_of(path) in TEXT_FILES:
                documents += row.count(mark)
                most_documents = max(most_documents, documents)
                if b"<|endoftext|>" in row and not layout.separator and not told:
                    print_error(f"{name} has <|endoftext|> in it, which is read as text like any other: if "
                                "documents stand between it, give --separator '<|endoftext|>', another --out")
                    told = True
            yield number, row
    # a run that was killed does not read the files before again
    if layout.separator and most_documents == 1 and first == 0:
        print_error(f"--separator {layout.separator!r} divides no .txt or .md: each was read as one document")


def encoded(files: Iterable, layout: Layout, threads: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number of a file, the next of its tokens): of a megabyte of text, which threads encode ahead."""
    encoder, waiting, pool = Encoder(), deque(), ThreadPoolExecutor(threads)
    if not encoder.gigatoken:
        print("tiktoken does the work, slowly: gigatoken is not installed (pip install gigatoken)")
    try:
        for number, row in read_files(files, layout, encoder.separator):
            waiting.append((number, pool.submit(encoder.encode, row)))
            if len(waiting) > 4 * threads:
                yield waiting[0][0], waiting.popleft()[1].result()
        yield from ((number, future.result()) for number, future in waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def next_split(settings: dict, file: int, val: int, train: int) -> tuple[tuple[str, int], str, int]:
    """Where the next token belongs: (step, split, for how many tokens that holds), by the tokens that the
    splits have. The shards of a step, (split, number), are written together."""
    size, block, most = (settings[key] for key in ("shard_size", "block", "val_tokens"))
    step, rest = ("train", train // size), size - train % size
    if file < len(settings.get("val_input", ())):
        return ("val", val // size), "val", size - val % size
    if settings.get("dataset") in FINEWEB and val < most:
        return ("val", 0), "val", most - val
    if not block:
        return step, "train", rest
    at = (val + train) % (10 * block)
    if at >= 9 * block and val < most:            # with the training tokens before it
        return ("train", (train - 1) // size), "val", min(10 * block - at, most - val)
    return step, "train", min(rest, (9 if at < 9 * block else 10) * block - at)


def cut(rows: Iterable, writer: ShardWriter) -> Iterator[tuple]:
    """The tokens, cut where another step or split begins: (step, split, tokens, cursor after them)."""
    val, train, most = writer.count("val"), writer.count("train"), writer.manifest["max_tokens"] or 2**60
    (file, skip), at = writer.cursor, 0
    for number, tokens in rows:
        file, at = number, (at if number == file else 0) + min(skip, len(tokens))
        tokens, skip = tokens[skip:], max(0, skip - len(tokens))
        while len(tokens) and val + train < most:
            step, split, n = next_split(writer.manifest, file, val, train)
            part = tokens[:min(n, most - val - train)]
            tokens, at = tokens[len(part):], at + len(part)
            val, train = (val + len(part), train) if split == "val" else (val, train + len(part))
            yield step, split, part, (file, at)
        if val + train == most:
            return


def write_shards(args: argparse.Namespace, settings: dict, prefix: str, files: Callable) -> None:
    """Tokenizes the files into shards, from where an earlier run of the command stopped."""
    settings = {"version": 3, **settings, "tokenizer": {"name": "gpt2", **BPE_SHA256},
                **{key: getattr(args, key) for key in sorted(TEXT_FLAGS - {"out", "workers"})}}
    writer = ShardWriter(Path(args.out), prefix, settings)
    if writer.manifest["complete"]:
        return
    layout = Layout(args.text_field, args.separator, args.tsv_quotes)
    with (closing(encoded(files(writer.cursor[0]), layout, args.workers)) as rows,
          tqdm(total=args.max_tokens, unit="tok", unit_scale=True, desc=args.out, disable=None) as bar):
        first, there = [], 0
        if not writer.manifest["shards"]:         # the blocks of a short text are smaller: look ahead
            while there < VAL_BLOCK * VAL_BLOCKS and (row := next(rows, None)):
                first.append(row)
                there += len(row[1])
            there = min(there, args.max_tokens or there)
            val_files = len(settings.get("val_input", ()))
            if there < LEAST or val_files and first[0][0] >= val_files:
                raise UserError(f"only {there} tokens of text, or none for validation: give more text")
            blocks = not val_files and settings.get("dataset") not in FINEWEB
            writer.manifest["block"] = blocks * min(VAL_BLOCK, there // VAL_BLOCKS)
        for (split, _), runs in groupby(cut(chain(first, rows), writer), lambda run: run[0]):
            write_step(writer, split, runs, bar)
        if not writer.count("train"):
            raise UserError("no text is left for training: give more, or more --max_tokens, in another --out")
        writer.record(writer.cursor, complete=True)
    shutil.rmtree(writer.out / ".download", ignore_errors=True)


def write_step(writer: ShardWriter, split: str, runs: Iterable, bar) -> None:
    """Writes a shard of `split`, and if validation has blocks between its tokens, a shard of those."""
    blocks, cursors = [], []

    def tokens():
        for _, kind, part, cursor in runs:
            bar.update(len(part))
            cursors[:] = [cursor]
            if kind == split:
                yield part
            else:
                blocks.append(part.copy())        # a view would keep its whole megabyte of text

    writer.write(split, tokens())
    if blocks:
        writer.write("val", blocks)
    writer.record(cursors[0])


def fetch_published(count: int, out: Path) -> None:
    """--pretokenized: the validation and the first `count` training shards, as far as `out` lacks them."""
    names = [f"fineweb_{'train' if i else 'val'}_{i:06d}.bin" for i in range(count + 1)]
    there = {*shard_names(out)}
    if there and read_manifest(out).get("pretokenized") != PRETOKENIZED:
        raise UserError(f"{out} holds shards of another source than {PRETOKENIZED}: choose another --out")
    if missing := [name for name in names if name not in there]:
        with writable(out, begun=True), hub_errors(PRETOKENIZED) as hub:
            infos = hub.HfApi().get_paths_info(PRETOKENIZED, names, repo_type="dataset")
            out.mkdir(parents=True, exist_ok=True)
            shards = [{"file": info.path, "sha256": info.lfs.sha256} for info in infos]
            write_manifest(out, {"pretokenized": PRETOKENIZED, "shards": shards})
            for name in missing:
                hub.hf_hub_download(PRETOKENIZED, name, repo_type="dataset", local_dir=out)
    verify(out)


def verify(folder: Path) -> None:
    """--verify: UserError names the shards that are not as the manifest in `folder` records them."""
    sums = dict.fromkeys(shard_names(folder), "")
    for shard in read_manifest(folder).get("shards", ()):
        sums[shard["file"]] = shard.get("sha256", "")
    bad = [name for name in tqdm(sums, disable=None) if sums[name] and not (
        (folder / name).is_file() and file_sha256(folder / name) == sums[name])]
    unknown = [name for name in sums if not sums[name]]
    if bad or len(unknown) == len(sums):
        raise UserError(f"{folder}: " + (f"{len(bad)} of {len(sums)} shards are damaged or missing, "
                        f"{', '.join(bad)}: restore them, or remove the rest and make them again" if bad else
                        "no manifest.json there has the SHA-256 of a shard: check the path"))
    print(f"{folder}: {len(sums) - len(unknown)} shards are as they were written"
          + (f"; not checked, in no manifest: {', '.join(unknown)}" if unknown else ""))


def next_command(out: Path, val: list[int], train: list[int]) -> str:
    """The command that trains on shards of so many tokens, as a shell reads it."""
    # small has 33M tokens, and over less than a quarter of that it would make more than 4 epochs
    preset = "shakespeare" if sum(train) < 8_200_000 else "small" if sum(train) < 1_000_000_000 else "gpt2"
    # the longest power of two for which both splits have a shard with room for it and its target
    T = min(BLOCK_SIZES[preset], 1 << (min(max(val), max(train)) - 1).bit_length() >> 1)
    if T < 16:
        return f"{out}: the shards are too short to train on: make longer ones of more text, in another --out"
    data, log = shlex.quote(str(out)), shlex.quote(f"log/{out.resolve().name or 'data'}")
    return (f"next: python train_gpt2.py --preset {preset} --data {data} --out {log}"
            + (f" --block_size {T}" if T < BLOCK_SIZES[preset] else ""))


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = parse_args(argv)
    if args.verify is not None:
        return verify(Path(args.verify))
    if args.pretokenized is not None:
        args.out = args.out or "fineweb10B"
        fetch_published(args.pretokenized, Path(args.out))
    else:
        write_shards(args, *(local_source(args) if args.input else hub_source(args)))
    out = Path(args.out)
    val, train = ([len(open_shard(path)) for path in list_shards(out, split)] for split in ("val", "train"))
    print(f"{out}: {len(val) + len(train)} shards complete, {sum(val):,} tokens for validation and "
          f"{sum(train):,} for training\n{next_command(out, val, train)}")


if __name__ == "__main__":
    run_command(main)
