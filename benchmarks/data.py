"""`bench.py data`: the loader's tokens a second; fineweb.py, and the one of build-nanogpt."""
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from benchmarks.processes import run_process, why_it_failed
from benchmarks.timing import (
    BENCH, Setting, measure, print_table, random_tokens, rows_of, take_turns)
from fineweb import available_cores
from runtime.cli import UserError
from runtime.dataloader import INPUT_TXT, TokenDataset, micro_batches, to_device
from runtime.recipe import BatchSchedule
from runtime.shards import open_shard, write_shard
from runtime.tokenizer import VOCAB_SIZE


# ---------------------------------------------------------------------- the loader

def measure_loader(s: Setting) -> dict:
    """{"rates": the tokens a second of each of s.steps epochs} of micro_batches on one thread.

    An epoch is four shards of unequal length, in the format s.size, in the order s.recipe. The
    first epoch's time includes the check of their SHA-256.
    """
    with tempfile.TemporaryDirectory() as folder:
        shards = []
        for i in range(4):
            path = Path(folder) / f"x_train_{i}.{s.size}"
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
            shards.append(path)

        dataset = TokenDataset(shards, s.T, 1337, s.recipe == "shuffled", VOCAB_SIZE)
        batches = micro_batches(dataset, BatchSchedule(s.B * s.T, 1), s.B)
        steps = dataset.total // s.B            # of an epoch
        rates = []
        for _ in range(s.steps):
            start = time.perf_counter()
            for rows in islice(batches, steps):
                to_device(rows, "cpu")
            seconds = time.perf_counter() - start
            rates.append(steps * s.B * s.T / seconds)
    return {"rates": rates}


def loader_rows(base: Setting, turns: int) -> list[dict]:
    settings = {}
    for file_format, order in (("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled")):
        setting = replace(
            base, what="loader", size=file_format, recipe=order, B=16, T=1024, steps=3)
        settings[f"loader, one thread: .{file_format} {order}"] = setting

    def cells(name, result):
        return {"million tokens/s": statistics.median(result["rates"]) / 1e6}

    return rows_of("what", measure(settings, turns), cells)


# ---------------------------------------------------------------------- text to tokens

COPIES = 47                     # of input.txt: 52 MB
OURS = "fineweb.py"
POOL = "build-nanogpt's pool"


@dataclass
class Job:
    """One row of the table: a whole process that turns a file of text into shards."""
    program: str                # OURS or POOL
    kind: str                   # the format of the file: parquet or jsonl
    repeats: int                # how often the file is read


def write_texts(folder: str) -> tuple[dict[str, Path], int]:
    """({format: its file}, the bytes of the text), of copies of input.txt.

    A document is 30 speeches with the number of its copy before them, so that no two are equal.
    """
    import pyarrow
    import pyarrow.parquet

    speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
    documents = []
    for i in range(COPIES):
        for at in range(0, len(speeches), 30):
            documents.append(f"{i} " + "\n\n".join(speeches[at:at + 30]))

    files = {"parquet": Path(folder) / "text.parquet", "jsonl": Path(folder) / "text.jsonl"}
    table = pyarrow.table({"text": documents})
    pyarrow.parquet.write_table(table, files["parquet"], row_group_size=1000)
    with open(files["jsonl"], "w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    return files, sum(len(text.encode()) for text in documents)


def command_of(job: Job, text: Path, out: str, clone: Path | None) -> list[str]:
    """The command of a job that reads `text` and writes to the folder `out`."""
    if job.program == POOL:
        return [sys.executable, "-m", "benchmarks.pool", str(text), str(job.repeats), out,
                str(clone), str(available_cores())]

    # A hard link for each time, because fineweb.py reads a file once, however often it is named.
    links = []
    for i in range(job.repeats):
        link = f"{out}/{i}.{job.kind}"
        os.link(text, link)
        links.append(link)
    return [sys.executable, str(BENCH.with_name("fineweb.py")), "--out", out, "--input", *links]


def children_cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended, with their threads."""
    times = os.times()
    return times.children_user + times.children_system


def run_job(job: Job, text: Path, text_bytes: int, folder: str, clone: Path | None) -> dict:
    """The seconds of its process and the CPU seconds of all its threads and processes, in lists of
    one; the tokens in its shards; the bytes of the text. {"failed": reason} if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = command_of(job, text, out, clone)
        if hasattr(os, "sync"):
            os.sync()           # what the run before wrote is not written in this one's time

        cpu_before = children_cpu_seconds()
        start = time.perf_counter()
        done = run_process(command, cwd=BENCH.parent)
        seconds = time.perf_counter() - start
        cpu_seconds = children_cpu_seconds() - cpu_before

        if done.returncode != 0:
            return {"failed": why_it_failed(done)}
        tokens = sum(len(open_shard(path)) for path in Path(out).rglob("*.npy"))
    return {
        "seconds": [seconds],
        "cpu": [cpu_seconds],
        "tokens": tokens,
        "bytes": text_bytes * job.repeats,
    }


def time_fineweb(jobs: dict[str, Job], turns: int, clone: Path | None = None) -> dict:
    """{name: Job} -> {name: what run_job found, over `turns`}, whole processes, in turn.

    `clone` is the folder of build-nanogpt, for jobs whose program is POOL.
    """
    with tempfile.TemporaryDirectory() as folder:
        files, text_bytes = write_texts(folder)

        def run(job):
            return run_job(job, files[job.kind], text_bytes, folder, clone)

        return take_turns(run, jobs, turns, "timed fineweb.py", "runs")


def fineweb_rows(jobs: dict[str, Job], results: dict) -> list[dict]:
    # {how often the text is read: the median seconds of the pool}
    pool_seconds = {}
    for name, job in jobs.items():
        if job.program == POOL and "seconds" in results[name]:
            pool_seconds[job.repeats] = statistics.median(results[name]["seconds"])

    def cells(name, result):
        seconds = statistics.median(result["seconds"])
        row = {
            "s": seconds,
            "slowest": max(result["seconds"]),
            "CPU s": statistics.median(result["cpu"]),
            "million tokens": result["tokens"] / 1e6,
            "MB of text/s": result["bytes"] / 1e6 / seconds,
        }
        repeats = jobs[name].repeats
        if repeats in pool_seconds:
            row["against the pool"] = f"{pool_seconds[repeats] / seconds:.2f}x"
        return row

    return rows_of("what", results, cells)


def fineweb_jobs(args) -> dict[str, Job]:
    """52 and 420 MB of text, or as many copies of 52 MB as --steps says."""
    jobs = {}
    for repeats in [args.steps] if args.steps else [1, 8]:
        rows = [Job(OURS, "parquet", repeats), Job(OURS, "jsonl", repeats)]
        if args.path:
            rows.append(Job(POOL, "parquet", repeats))
        for job in rows:
            text = f"{COPIES * repeats} copies of input.txt, .{job.kind}"
            jobs[f"{job.program}, {text}"] = job
    return jobs


# ---------------------------------------------------------------------- both tables

def data_table(args, base: Setting) -> list[dict]:
    """Prints and returns the rows: the loader's, then those of fineweb.py and of the pool."""
    clone = None
    if args.path:
        clone = Path(args.path).resolve()
        if not (clone / "fineweb.py").is_file():
            raise UserError(f"{args.path}/fineweb.py does not exist: git clone build-nanogpt, and "
                            "name its folder")

    loader = loader_rows(base, args.turns)
    print_table(loader)

    jobs = fineweb_jobs(args)
    fineweb = fineweb_rows(jobs, time_fineweb(jobs, args.turns, clone))
    print_table(fineweb)
    return loader + fineweb
