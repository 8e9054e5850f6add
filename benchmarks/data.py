"""`bench.py data`: the loader's tokens per second; fineweb.py, and the one of a clone of build-nanogpt."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import replace
from itertools import islice
from pathlib import Path

from benchmarks.timing import BENCH, measure, print_table, random_tokens, rows_of, take_turns
from runtime.cli import UserError
from runtime.dataloader import INPUT_TXT, TokenDataset, micro_batches, to_device
from runtime.recipe import BatchSchedule
from runtime.shards import open_shard, write_shard
from runtime.tokenizer import EOT, VOCAB_SIZE, token_bytes


def measure_loader(s):
    """Tokens/s of micro_batches on one thread, a rate per epoch of four unequal shards, hashing included."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"x_train_{i}.{s.size}" for i in range(4)]
        for i, path in enumerate(shards):
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
        dataset = TokenDataset(shards, s.T, 1337, s.recipe == "shuffled", VOCAB_SIZE)
        batches, rates = micro_batches(dataset, BatchSchedule(s.B * s.T, 1), s.B), []
        for _ in range(s.steps):
            start, steps = time.perf_counter(), dataset.total // s.B
            for rows in islice(batches, steps):
                to_device(rows, "cpu")
            rates.append(steps * s.B * s.T / (time.perf_counter() - start))
    return {"rates": rates}


COPIES = 47                     # of input.txt: 52 MB
OURS, PEER = "fineweb.py", "build-nanogpt's pool"


def write_texts(folder):
    """{format: its file} of copies of input.txt in documents of 30 speeches, and the bytes of their text."""
    import pyarrow.parquet
    speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
    places = range(0, len(speeches), 30)
    documents = [f"{i} " + "\n\n".join(speeches[at:at + 30]) for i in range(COPIES) for at in places]
    files = {kind: Path(folder) / f"text.{kind}" for kind in ("parquet", "jsonl")}
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), files["parquet"], row_group_size=1000)
    files["jsonl"].write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return files, sum(len(text.encode()) for text in documents)


def run_peer(text: str, repeats: str, out: str, folder: str) -> None:
    """The fineweb.py of a clone of build-nanogpt in `folder`, unchanged, with a process per core, on so many
    times the rows of the .parquet file `text`. Its tokenizer is tiktoken's GPT-2, from assets/ and not from
    the network."""
    import pyarrow.parquet
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    encoder = tiktoken.Encoding("gpt2", explicit_n_vocab=EOT + 1, pat_str=r50k_pat_str,
                                mergeable_ranks=token_bytes(), special_tokens={"<|endoftext|>": EOT})
    tiktoken.get_encoding = lambda name: encoder
    script = sys.modules["peer"] = types.ModuleType("peer")           # where its workers find `tokenize`
    script.__file__ = str(Path(out) / "fineweb.py")       # its shards go beside it
    rows = (row for _ in range(int(repeats))
            for batch in pyarrow.parquet.ParquetFile(text).iter_batches() for row in batch.to_pylist())
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows)
    cores = os.cpu_count()
    os.cpu_count = lambda: 2 * cores                      # it takes half of them
    source = (Path(folder) / "fineweb.py").read_text(encoding="utf-8")
    exec(compile(source, "build-nanogpt/fineweb.py", "exec"), script.__dict__)


def time_fineweb(jobs, turns, peer=None):
    """Whole processes, in turn. `jobs`: {name: (OURS or PEER, format of the text, how often it is read)}.
    `peer`: the folder of a clone of build-nanogpt. {name: {"seconds": [...] and "cpu": [...] (of all its
    threads and processes), "tokens": of a run, "bytes": of its text}, or {"failed": reason}}."""
    with tempfile.TemporaryDirectory() as folder:
        files, size = write_texts(folder)

        def run(job):
            what, kind, repeats = job
            with tempfile.TemporaryDirectory(dir=folder) as out:
                argv = [str(BENCH.with_name("fineweb.py")), "--out", out, "--input"]
                for i in range(repeats):
                    # A hard link, because fineweb.py reads a file once, however often it is named.
                    os.link(files[kind], Path(out) / f"{i}.{kind}")
                    argv.append(f"{out}/{i}.{kind}")
                if what == PEER:
                    argv = ["-m", "benchmarks.data", str(files[kind]), str(repeats), out, str(peer)]
                getattr(os, "sync", int)()        # of the run before
                start, before = time.perf_counter(), os.times()
                done = subprocess.run([sys.executable, *argv], cwd=BENCH.parent, text=True,
                                      capture_output=True)
                seconds, cpu = time.perf_counter() - start, sum(os.times()[2:4]) - sum(before[2:4])
                if done.returncode:
                    return {"failed": (done.stderr.strip() or "?").split("\n")[-1][:200]}
                tokens = sum(len(open_shard(path)) for path in Path(out).rglob("*.npy"))
                return {"seconds": [seconds], "cpu": [cpu], "tokens": tokens, "bytes": size * repeats}
        return take_turns(run, jobs, turns, "timed fineweb.py", "runs")


def fineweb_rows(jobs, results):
    def cells(name, r):
        median, (*_, repeats) = statistics.median(r["seconds"]), jobs[name]
        row = {"s": median, "slowest": max(r["seconds"]), "CPU s": statistics.median(r["cpu"]),
               "million tokens": r["tokens"] / 1e6, "MB of text/s": r["bytes"] / median / 1e6}
        for other, (what, *_, times) in jobs.items():
            if what == PEER and times == repeats and "seconds" in results[other]:
                row["against the pool"] = f"{statistics.median(results[other]['seconds']) / median:.2f}x"
        return row
    return rows_of("what", results, cells)


def data_table(args, base):
    """The loader by file format and order; fineweb.py and the peer's."""
    if args.path and not (Path(args.path) / "fineweb.py").is_file():
        raise UserError(f"{args.path}/fineweb.py does not exist: git clone build-nanogpt, and name it")
    results = measure({f"loader, one thread: .{kind} {order}":
                       replace(base, what="loader", size=kind, recipe=order, B=16, T=1024, steps=3)
                       for kind, order in (("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled"))},
                      args.turns)
    rows = rows_of("what", results, lambda _, r: {"million tokens/s": statistics.median(r["rates"]) / 1e6})
    print_table(rows)
    whats = [(OURS, "parquet"), (OURS, "jsonl"), *([(PEER, "parquet")] if args.path else [])]
    jobs = {f"{what}, {COPIES * repeats} copies of input.txt, .{kind}": (what, kind, repeats)
            for repeats in ([args.steps] if args.steps else (1, 8)) for what, kind in whats}   # 52 and 420 MB
    peer = args.path and Path(args.path).resolve()
    print_table(more := fineweb_rows(jobs, time_fineweb(jobs, args.turns, peer)))
    return rows + more


if __name__ == "__main__":
    run_peer(*sys.argv[1:])
