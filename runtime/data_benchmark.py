"""`bench.py data`: the loader's and the tokenizer's tokens a second."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from runtime.benchmark import BENCH, measure, print_table, progress, random_tokens, rows_of
from runtime.dataloader import INPUT_TXT, TokenDataset, TokenLoader, to_device
from runtime.shards import write_shard
from runtime.tokenizer import VOCAB_SIZE


def measure_loader(s):
    """Tokens/s of TokenLoader on one thread, a rate an epoch of four unequal shards, hashing included."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"x_train_{i}.{s.size}" for i in range(4)]
        for i, path in enumerate(shards):
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
        dataset = TokenDataset(shards, s.T, 1337, s.recipe == "shuffled", VOCAB_SIZE)
        loader = TokenLoader(dataset, s.B * s.T, s.B)
        rates = []
        for epoch in range(s.steps):
            start, steps = time.perf_counter(), dataset.total // s.B
            for step in range(steps * epoch, steps * (epoch + 1)):
                to_device(loader.rows(step, 0), "cpu")
            rates.append(steps * s.B * s.T / (time.perf_counter() - start))
    return {"rates": rates}


def time_fineweb(worker_counts, turns):
    """A dict for each number of workers: {"seconds": [of whole runs of fineweb.py on 30 copies of input.txt],
    "tokens": of a run}, or {"failed": reason}."""
    results = [{"seconds": []} for _ in worker_counts]
    jobs = turns * list(zip(worker_counts, results, strict=True))
    with tempfile.TemporaryDirectory() as folder, progress("timed fineweb.py", len(jobs), "runs") as task:
        text = Path(folder) / "text.jsonl"
        speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
        documents = ["\n\n".join(speeches[i:i + 30]) for i in range(0, len(speeches), 30)]
        text.write_text("".join(json.dumps({"text": f"{i} {document}"}) + "\n"
                                for i in range(30) for document in documents))
        for i, (n, result) in enumerate(jobs):
            out, start = Path(folder) / f"out{i}", time.perf_counter()
            run = subprocess.run([sys.executable, str(BENCH.with_name("fineweb.py")), "--input", str(text),
                                  "--workers", str(n), "--out", str(out)], capture_output=True, text=True)
            result["seconds"].append(time.perf_counter() - start)
            if run.returncode:
                result["failed"] = run.stderr.strip().split("\n")[-1][:200]
            else:
                result["tokens"] = json.loads((out / "manifest.json").read_text())["tokens"]
            task.update()
    return results


def data_table(args, base):
    """The loader by file format and order; fineweb.py by its workers."""
    kinds = [("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled")]
    results = measure([replace(base, what="loader", size=kind, recipe=order, B=16, T=1024, steps=3)
                       for kind, order in kinds], args.turns)
    rows = rows_of("what", [f"loader, one thread: .{kind} {order}" for kind, order in kinds], results,
                   lambda _, r: {"million tokens/s": statistics.median(r["rates"]) / 1e6})
    workers = sorted({1, 2, os.cpu_count() or 1})
    results = time_fineweb(workers, args.turns)
    size = f"{max(r.get('tokens', 0) for r in results) / 1e6:.1f} million tokens, whole process"
    rows += rows_of("what", [f"fineweb.py, {n} worker(s), {size}" for n in workers], results,
                    lambda _, r: {"million tokens/s": r["tokens"] / statistics.median(r["seconds"]) / 1e6})
    print_table(rows)
    return rows
