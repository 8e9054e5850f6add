"""`bench.py data`: the loader's and the tokenizer's tokens a second."""
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from benchmarks.timing import BENCH, measure, print_table, random_tokens, rows_of, take_turns
from runtime.cli import UserError
from runtime.console import counted
from runtime.dataloader import INPUT_TXT, TokenDataset, micro_batches, to_device
from runtime.shards import open_shard, write_shard
from runtime.tokenizer import VOCAB_SIZE


def measure_loader(s):
    """Tokens/s of micro_batches on one thread, a rate an epoch of four unequal shards, hashing included."""
    config = SimpleNamespace(total_batch_size=s.B * s.T, sequence_length=s.T, updates_per_step=1, max_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"x_train_{i}.{s.size}" for i in range(4)]
        for i, path in enumerate(shards):
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
        dataset = TokenDataset(shards, s.T, 1337, s.recipe == "shuffled", VOCAB_SIZE)
        batches, rates = micro_batches(dataset, config, s.B), []
        for _ in range(s.steps):
            start, steps = time.perf_counter(), dataset.total // s.B
            for rows in islice(batches, steps):
                to_device(rows, "cpu")
            rates.append(steps * s.B * s.T / (time.perf_counter() - start))
    return {"rates": rates}


COPIES = 47                     # of input.txt: 52 MB, of which --steps N takes N times as much
PEER, EMPTY = "build-nanogpt's pool", "fineweb.py without encoding"               # benchmarks/data_drivers.py


def write_text(path):
    """Copies of input.txt in documents of 30 speeches, 1,000 rows a row group, like FineWeb's. The number of
    bytes."""
    import pyarrow.parquet
    speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
    documents = ["\n\n".join(speeches[i:i + 30]) for i in range(0, len(speeches), 30)]
    documents = [f"{i} {document}" for i in range(COPIES) for document in documents]
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=1000)
    return sum(len(document.encode()) for document in documents)


def fineweb_command(what, workers, text, out, peer, repeats):
    """The command of a job of time_fineweb."""
    script, drivers = str(BENCH.with_name("fineweb.py")), [sys.executable, "-m", "benchmarks.data_drivers"]
    if what == PEER:
        return [*drivers, "peer", str(peer), str(text), str(repeats), str(out), str(workers)]
    run = [*drivers, "without_encoding", script] if what == EMPTY else [sys.executable, script]
    return [*run, "--workers", str(workers), "--out", str(out), "--input", *[str(text)] * repeats]


def time_fineweb(jobs, turns, peer=None, repeats=1):
    """Whole processes, in turn. `jobs`: {name: ("fineweb.py", PEER or EMPTY; number of workers)}. `peer`: the
    folder of a clone of build-nanogpt. `repeats`: how often they have the text. {name: {"seconds": [...],
    "tokens": of a run, "bytes": of its text}, or {"failed": reason}}."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.parquet"
        size = write_text(text) * repeats

        def run(job):
            with tempfile.TemporaryDirectory(dir=folder) as out:
                argv = fineweb_command(*job, text, out, peer, repeats)
                getattr(os, "sync", int)()        # what the run before left to the disk is not this one's
                start = time.perf_counter()
                done = subprocess.run(argv, capture_output=True, text=True, cwd=BENCH.parent)
                seconds = time.perf_counter() - start
                if done.returncode:
                    return {"failed": done.stderr.strip().split("\n")[-1][:200]}
                tokens = sum(len(open_shard(path)) for path in Path(out).rglob("*.npy"))
                return {"seconds": [seconds], "tokens": tokens, "bytes": size}
        return take_turns(run, jobs, turns, "timed fineweb.py", "runs")


def fineweb_rows(jobs, results):
    """Rows of the table; with the peer's job among them, how many times as fast (medians)."""
    peers = next((results[name] for name, (what, _) in jobs.items() if what == PEER), {})

    def cells(name, r):
        median = statistics.median(r["seconds"])
        row = {"million tokens/s": r["tokens"] / median / 1e6, "MB of text/s": r["bytes"] / median / 1e6,
               "s": median, "slowest": max(r["seconds"])}
        if "tokens" in peers:
            row["against the pool"] = f"{statistics.median(peers['seconds']) / median:.2f}x"
        return row
    return rows_of("what", results, cells)


def data_table(args, base):
    """The loader by file format and order; fineweb.py by its threads, the peer's, and without encoding."""
    if args.path and not (Path(args.path) / "fineweb.py").is_file():
        raise UserError(f"{args.path}/fineweb.py is not there: git clone build-nanogpt from GitHub, and give "
                        f"its folder")
    results = measure({f"loader, one thread: .{kind} {order}":
                       replace(base, what="loader", size=kind, recipe=order, B=16, T=1024, steps=3)
                       for kind, order in (("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled"))},
                      args.turns)
    rows = rows_of("what", results, lambda _, r: {"million tokens/s": statistics.median(r["rates"]) / 1e6})
    programs = [("fineweb.py", n) for n in sorted({1, 2, os.cpu_count() or 1})]
    programs += [(PEER, 2), (EMPTY, 1)] if args.path else [(EMPTY, 1)]
    jobs = {f"{what}, {counted(n, 'worker')}": (what, n) for what, n in programs}
    repeats, peer = args.steps or 1, args.path and Path(args.path).resolve()
    rows += fineweb_rows(jobs, time_fineweb(jobs, args.turns, peer, repeats))
    print(f"fineweb.py: whole processes, {COPIES * repeats} copies of input.txt, from .parquet")
    print_table(rows)
    return rows
