"""What the tables share: a Setting says what one row is measured with, `measure` measures several in
turn, each in a process of its own, and `print_table` prints what was found."""
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.processes import run_process, why_it_failed
from runtime.cli import UserError, brief_error
from runtime.device import is_out_of_memory
from runtime.tokenizer import VOCAB_SIZE

BENCH = Path(__file__).resolve().parent.parent / "bench.py"


@dataclass
class Setting:
    """What one row of a table is measured with.

    `bench.py work` of another checkout is sent the fields that differ from these defaults: if a name
    or a default changes, that checkout can no longer be measured.
    """
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
    loss_chunk: int | None = None   # tokens whose logits are in memory; 0: all; None: as trained
    fused: bool = True              # AdamW in one kernel
    tune_memory: bool = True        # glibc keeps freed memory
    warmup: int = 2
    steps: int = 10
    peer: str = ""                  # folder of build-nanogpt, or of a checkout that has a bench.py


# ---------------------------------------------------------------------- in the process that measures

def time_steps(step: Callable, s: Setting) -> tuple[float, list[float]]:
    """Calls step(). Returns the seconds of the first s.warmup calls together, which may compile, and
    of each of the next s.steps."""
    kind = s.device.split(":")[0]
    wait = getattr(torch, kind).synchronize         # on a CPU it does nothing

    began = time.perf_counter()
    for _ in range(s.warmup):
        step()
    wait()
    warmup_seconds = time.perf_counter() - began

    if kind == "cuda":
        return warmup_seconds, time_on_gpu(step, s.steps)

    times = [time.perf_counter()]
    for _ in range(s.steps):
        step()
        wait()                      # on a Mac, as training does after each step there
        times.append(time.perf_counter())
    return warmup_seconds, [after - before for before, after in pairwise(times)]


def time_on_gpu(step: Callable, steps: int) -> list[float]:
    """Seconds of each call of step(), by the GPU's clock: it never waits for the CPU between steps."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def random_tokens(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


def run_worker(workers: dict, setting: str) -> None:
    """`python bench.py work JSON`: prints what the setting's worker measured, a dict, as JSON."""
    s = Setting(**json.loads(setting))
    try:
        result = workers[s.what](s)
    except Exception as error:
        reason = brief_error(error)
        if is_out_of_memory(error):
            reason = "out of memory"
        elif isinstance(error, UserError):
            reason = str(error)[:200]
        result = {"failed": reason}
    print(json.dumps(result), flush=True)
    os._exit(0)                     # without waiting for the thread of the loader


# ---------------------------------------------------------------------- in the process of the table

def run_in_subprocess(s: Setting) -> dict:
    """What the worker of `s` finds in a new process, or {"failed": reason}."""
    bench = BENCH
    if s.peer:
        peers_bench = Path(s.peer) / "bench.py"
        if peers_bench.exists():
            bench = peers_bench
            s = replace(s, peer="")

    changed = {}
    for name, value in asdict(s).items():
        if value != getattr(Setting, name):
            changed[name] = value

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # torch.compile keeps what it compiles. In a folder of their own all processes have to
        # compile, so that "start s" does not depend on what ran before.
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        command = [sys.executable, str(bench), "work", json.dumps(changed)]
        done = run_process(command, cwd=folder, env=os.environ | caches)

    for line in done.stdout.splitlines():
        if line.startswith('{"'):           # the script of a peer may print other lines
            return json.loads(line)
    return {"failed": why_it_failed(done)}


def take_turns(
    run: Callable, jobs: dict, turns: int, what: str = "measured", unit: str = "settings"
) -> dict:
    """{name: job} -> {name: what run(job) measured, a dict}, over `turns`.

    Lists of all turns are joined, and of numbers the largest is kept. A job that returned
    {"failed": reason} is not run again. `what` and `unit` are for the progress bar.
    """
    results = {name: {} for name in jobs}
    for name, job in tqdm(turns * list(jobs.items()), what, unit=f" {unit}", delay=10):
        result = results[name]
        if "failed" in result:
            continue
        for key, value in run(job).items():
            if key not in result:
                result[key] = value
            elif isinstance(value, list):
                result[key] = result[key] + value
            else:
                result[key] = max(result[key], value)
    return results


def measure_once(s: Setting | str) -> dict:
    """What the worker of a setting finds; {"failed": s} for a str, which says why it is left out."""
    if isinstance(s, str):
        return {"failed": s}
    return run_in_subprocess(s)


def measure(settings: dict, turns: int) -> dict:
    """{name: Setting, or a str} -> {name: what measure_once found in all turns}.

    Turn by turn, because the speed of a shared machine changes within minutes, and then that of all
    settings does.
    """
    return take_turns(measure_once, settings, turns)


# ---------------------------------------------------------------------- the table

def median_ms(result: dict) -> float:
    return statistics.median(result["seconds"]) * 1e3


def ratio(a: float | None, b: float | None) -> str:
    if not a or not b:
        return "n/a"
    return f"{a / b:.2f}x"


def rows_of(column: str, results: dict, cells: Callable) -> list[dict]:
    """A row for each of {name: result}: its name in `column`, and cells(name, result), a dict; or
    why it failed."""
    rows = []
    for name, result in results.items():
        row = {column: name}
        if "failed" in result:
            row["failed"] = result["failed"]
        else:
            row.update(cells(name, result))
        rows.append(row)
    return rows


def cell_text(value) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def print_table(rows: list[dict], formats: dict | None = None) -> None:
    """Prints rows, {column: value}, as a table in Markdown; below it those that failed, and why.

    `formats`: {column: value -> text}, where that is not cell_text.
    """
    if formats is None:
        formats = {}
    shown = [row for row in rows if "failed" not in row]
    columns = list(dict.fromkeys(name for row in shown for name in row))

    lines = [columns]
    for row in shown:
        line = []
        for name in columns:
            cell = ""
            if name in row:
                as_text = formats.get(name, cell_text)
                cell = as_text(row[name])
            line.append(cell)
        lines.append(line)

    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print()
    if shown:
        for name, *numbers in lines:
            cells = [name.ljust(widths[0])]
            cells += [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            print(f"| {' | '.join(cells)} |")
    for row in rows:
        if "failed" in row:
            name = next(iter(row.values()))
            print(f"not measured: {name}: {row['failed'][:120]}")
    print(flush=True)
