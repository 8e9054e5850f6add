"""What bench.py's tables share: timing, workers in subprocesses, printing.

A Setting says what is measured. A worker measures it in a subprocess and prints a dict as JSON. `measure`
starts the subprocesses in turn and merges what they print.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.cli import UserError, brief_error
from runtime.device import device_name, is_out_of_memory
from runtime.kernels import ATTENTION, check_attention
from runtime.tokenizer import VOCAB_SIZE

BENCH = Path(__file__).resolve().parent.parent / "bench.py"
GB = 1e9


@dataclass
class Setting:
    """What one row of a table is measured with."""
    what: str = "step"              # a key of steps.WORKERS
    device: str = "cpu"
    recipe: str = "gpt2"
    size: str = "gpt2"
    B: int = 16                     # sequences a micro-step of one process
    T: int = 1024
    dtype: str = "bfloat16"
    tf32: bool = True
    compile: bool = False
    attention: str = "auto"
    vocab_size: int = 50304
    loss_chunk: int | None = None   # tokens whose logits are in memory at a time; 0: all; None: as trained
    fused: bool = True              # AdamW in one kernel
    tune_memory: bool = True        # glibc keeps freed memory
    warmup: int = 2
    steps: int = 10
    processes: int = 1
    memory_gb: float = 0            # limit of the GPU's memory; 0: none
    peer: str = ""                  # folder of another train_gpt2.py: build-nanogpt's, or one with a bench.py


# -----------------------------------------------------------------------------
# measuring, in the worker's process

def time_steps(step, s):
    """(seconds of the first s.warmup calls, which may compile; [seconds] of each of the next s.steps)."""
    cuda = s.device.startswith("cuda")

    def timestamp():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)        # the GPU's clock: no waiting between steps
        event.record()
        return event

    start = time.perf_counter()
    for _ in range(s.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
    warmup_seconds = time.perf_counter() - start
    times = [timestamp()]
    for _ in range(s.steps):
        step()
        times.append(timestamp())
    if cuda:
        torch.cuda.synchronize()
    return warmup_seconds, [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(times)]


def random_tokens(n):
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


def run_worker(workers, setting):
    """`python bench.py work JSON`: prints what the setting's worker measured, a dict, as the last line.

    Of several processes rank 0 prints, and any rank that fails. A failed rank's exit code makes torchrun end
    the others, which would otherwise wait for it in a collective.
    """
    s = Setting(**json.loads(setting))
    try:
        result = workers[s.what](s)
    except Exception as error:
        result = {"failed": "out of memory" if is_out_of_memory(error) else brief_error(error)}
    if "failed" in result or int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    os._exit("failed" in result)            # does not wait for the loader's thread or for other processes


# -----------------------------------------------------------------------------
# starting workers

def run_in_subprocess(s):
    """The dict that the worker of `s` prints in a new process, in a folder of its own, or {"failed": reason}.
    Another checkout of this project is measured by its own bench.py, which may not know all settings."""
    bench = BENCH
    if s.peer and (theirs := Path(s.peer) / "bench.py").exists():
        bench, s = theirs, replace(s, peer="")
    changed = {name: value for name, value in asdict(s).items() if value != getattr(Setting, name)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.processes}"]
    launcher = [sys.executable, *(torchrun if s.processes > 1 else [])]
    threads = max(1, torch.get_num_threads() // s.processes)
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([*launcher, str(bench), "work", json.dumps(changed)], capture_output=True,
                                text=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"')]
    failed = [answer for answer in answers if "failed" in answer]       # also one after rank 0 has printed
    if answers and (failed or not result.returncode):
        return (failed or answers)[0]
    # killed by the kernel; the second is how torchrun reports it
    if result.returncode == -9 or "Signal 9 (SIGKILL)" in result.stderr:
        return {"failed": "out of memory"}
    return {"failed": (result.stderr.strip().split("\n")[-1] or f"exit code {result.returncode}")[:200]}


def progress(jobs, what, unit, total=None):
    """The jobs, with a bar on stderr once they take more than ten seconds."""
    return tqdm(jobs, what, total, unit=f" {unit}", delay=10, file=sys.stderr)


def take_turns(run, jobs, turns, what="measured", unit="settings"):
    """{name: job} -> {name: what run(job) measured}, dicts, over `turns`. Lists are joined, of numbers the
    largest is kept. A job that returned {"failed": reason} is not run again."""
    results = {name: {} for name in jobs}
    for name, job in progress(turns * list(jobs.items()), what, unit):
        result = results[name]
        for key, new in ({} if "failed" in result else run(job)).items():
            old = result.get(key)
            result[key] = new if old is None else old + new if isinstance(new, list) else max(old, new)
    return results


def measure(settings, turns):
    """{name: Setting} -> {name: what its worker measured}."""
    return take_turns(run_in_subprocess, settings, turns)


def median_ms(result):
    return statistics.median(result["seconds"]) * 1e3


def supported_kernels(s):
    """(attention kernels that run with s.device and s.dtype, ["name (reason)"] of the others)."""
    supported, missing = [], []
    for kernel in ATTENTION:
        try:
            check_attention(kernel, s.device, getattr(torch, s.dtype), 64)
            supported.append(kernel)
        except UserError as error:
            missing.append(f"{kernel} ({str(error).split('(', 1)[-1].rsplit(')', 1)[0].split('. ')[0]})")
    return supported, missing


def find_largest(s, B, memory_gb):
    """The largest micro-batch up to B that runs in `memory_gb`, in steps of 3%; or why a run failed."""
    while B > 0 and (failed := run_in_subprocess(replace(s, B=B, memory_gb=memory_gb)).get("failed")):
        if failed != "out of memory":
            return failed
        B = min(B - 1, int(0.97 * B))
    return B


# -----------------------------------------------------------------------------
# printing

def rows_of(column, results, cells):
    """A row for each of {name: result}: its name and `cells(name, result)`, or why it failed."""
    return [{column: f"{name}: {r['failed']}"} if "failed" in r else {column: name} | cells(name, r)
            for name, r in results.items()]


def print_table(rows, lists=None):
    """Prints dicts as a table in Markdown, and below it each list of {title: names} that is not empty."""
    def cell(value):
        if value is None:
            return "n/a"
        if isinstance(value, str):
            return value
        return f"{value:.2f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"
    columns = max(rows, key=len)                            # the row of a failure has fewer
    lines = [list(columns), *([cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print()
    for first, *others in lines:
        print(f"| {' | '.join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])} |")
    print(flush=True)
    for title, names in (lists or {}).items():
        if names:
            print(f"{title}: " + "; ".join(names))


def machine(device):
    threads = "" if device.startswith("cuda") else f" ({torch.get_num_threads()} threads)"
    return f"{device_name(device)}{threads}, torch {torch.__version__}, {date.today()}"
