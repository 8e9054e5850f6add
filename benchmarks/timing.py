"""What the tables share: a Setting says what one line is measured with, `measure` measures several in turn,
each in a process of its own, and `print_table` prints what was found."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.cli import UserError, brief_error
from runtime.device import is_out_of_memory
from runtime.tokenizer import VOCAB_SIZE

BENCH = Path(__file__).resolve().parent.parent / "bench.py"


@dataclass
class Setting:
    """What one line of a table is measured with. `bench.py work` of another checkout is sent the fields that
    differ from these defaults: a name or a default that changes cannot be measured there."""
    what: str = "step"              # a key of steps.WORKERS
    device: str = "cpu"
    recipe: str = "gpt2"
    size: str = "gpt2"
    B: int = 16                     # sequences in a micro-batch
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
    peer: str = ""                  # folder of another train_gpt2.py: build-nanogpt's, or one with a bench.py


def time_steps(step, s: Setting) -> tuple[float, list[float]]:
    """(seconds of the first s.warmup calls, which may compile; seconds of each of the next s.steps)."""
    kind = s.device.split(":")[0]
    wait = getattr(torch, kind).synchronize         # on a CPU nothing

    def now():
        if kind == "cuda":          # the GPU's clock: it never waits for the CPU between steps
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        wait()                      # on a Mac, as training does after each step there
        return time.perf_counter()

    began = time.perf_counter()
    for _ in range(s.warmup):
        step()
    wait()
    warmup_seconds = time.perf_counter() - began
    times = [now()]
    for _ in range(s.steps):
        step()
        times.append(now())
    wait()
    return warmup_seconds, [a.elapsed_time(b) / 1e3 if kind == "cuda" else b - a for a, b in pairwise(times)]


def random_tokens(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


def run_worker(workers: dict, setting: str) -> None:
    """`python bench.py work JSON`: prints what the setting's worker measured, a dict, as JSON."""
    s = Setting(**json.loads(setting))
    try:
        result = workers[s.what](s)
    except Exception as error:
        result = {"failed": "out of memory" if is_out_of_memory(error) else
                  str(error)[:200] if isinstance(error, UserError) else brief_error(error)}
    print(json.dumps(result), flush=True)
    os._exit(0)                     # does not wait for the loader's thread


def run_in_subprocess(s: Setting) -> dict:
    """What the worker of `s` finds in a new process, or {"failed": reason}."""
    bench = BENCH
    if s.peer and (theirs := Path(s.peer) / "bench.py").exists():
        bench, s = theirs, replace(s, peer="")
    changed = {name: value for name, value in asdict(s).items() if value != getattr(Setting, name)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, str(bench), "work", json.dumps(changed)], capture_output=True,
                              text=True, cwd=folder)
    for line in done.stdout.splitlines():
        if line.startswith('{"'):
            return json.loads(line)
    killed = "out of memory" if done.returncode == -9 else f"exit code {done.returncode}"    # by the kernel
    return {"failed": done.stderr.strip().split("\n")[-1][:200] or killed}


def take_turns(run, jobs: dict, turns: int, what: str = "measured", unit: str = "settings") -> dict:
    """{name: job} -> {name: what run(job) measured}, dicts, over `turns`. Lists are joined, of numbers the
    largest is kept. A job that returned {"failed": reason} is not run again."""
    results = {name: {} for name in jobs}
    for name, job in tqdm(turns * list(jobs.items()), what, unit=f" {unit}", delay=10):
        result = results[name]
        for key, new in ({} if "failed" in result else run(job)).items():
            old = result.get(key)
            result[key] = new if old is None else old + new if isinstance(new, list) else max(old, new)
    return results


def measure(settings: dict, turns: int) -> dict:
    """{name: Setting, or a str: why it is left out} -> {name: what its worker measured, or {"failed": why}}.
    Turn by turn: the speed of a shared machine changes within minutes, and a ratio of medians much less."""
    return take_turns(lambda s: {"failed": s} if isinstance(s, str) else run_in_subprocess(s),
                      settings, turns)


def median_ms(result: dict) -> float:
    return statistics.median(result["seconds"]) * 1e3


def ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}x" if a and b else "n/a"


def rows_of(column: str, results: dict, cells) -> list[dict]:
    """A row for each of {name: result}: its name and `cells(name, result)`, or why it failed."""
    return [{column: name} | ({"failed": r["failed"]} if "failed" in r else cells(name, r))
            for name, r in results.items()]


def cell_text(value) -> str:
    if isinstance(value, str | None):
        return "n/a" if value is None else value
    return f"{value:.2f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"


def print_table(rows: list[dict], formats: dict | None = None) -> None:
    """A table in Markdown of rows, {column: value}, and below it those that failed, each with its reason.
    `formats`: {column: value -> text}, where that is not cell_text."""
    shown = [row for row in rows if "failed" not in row]
    columns = list(dict.fromkeys(name for row in shown for name in row))
    lines = [columns, *([(formats or {}).get(name, cell_text)(row[name]) if name in row else ""
                         for name in columns] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print()
    for first, *others in lines if shown else ():
        print(f"| {' | '.join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])} |")
    for row in rows:
        if "failed" in row:
            print(f"not measured: {next(iter(row.values()))}: {row['failed'][:120]}")
    print(flush=True)
