"""Timing in processes of their own."""
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import types
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

from runtime.tokenizer import VOCAB_SIZE

BENCH = Path(__file__).resolve().parent.parent / "bench.py"
GB = 1e9

@dataclass
class Setting:
    """What a line of a table is measured with."""
    what: str = "step"              # one of WORKERS
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
    loss_chunk: int = -1
    fused: bool = True              # AdamW in one kernel
    tune_memory: bool = True        # glibc keeps freed memory
    warmup: int = 2
    steps: int = 10
    processes: int = 1
    memory_gb: float = 0            # what the GPU pretends to have; 0: all
    peer: str = ""                  # folder of build-nanogpt's train_gpt2.py


def time_steps(step, s):
    """(seconds of the first s.warmup calls with all that they compile, [seconds of each of the next s.steps])."""
    cuda = s.device.startswith("cuda")

    def stamp():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)        # the GPU's own clock: the CPU does not wait between steps
        event.record()
        return event

    start = time.perf_counter()
    for _ in range(s.warmup):
        step()
    if cuda:
        torch.cuda.synchronize()
    warmup_seconds = time.perf_counter() - start
    stamps = [stamp()]
    for _ in range(s.steps):
        step()
        stamps.append(stamp())
    if cuda:
        torch.cuda.synchronize()
    return warmup_seconds, [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in zip(stamps, stamps[1:], strict=False)]


def peak_memory(device):
    """Most bytes in use so far: torch's on the GPU, the whole process's on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def random_tokens(n):
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


class PlainAdamW(torch.optim.AdamW):
    """torch's default for the device, which cannot pass over a step that is not finite."""

    def step(self, closure=None):
        self.found_inf = None
        return super().step(closure)


def peers_step(s, shape):
    """The same of build-nanogpt's script: its definitions as they are, its step without the gradient accumulation."""
    path = Path(s.peer) / "train_gpt2.py" if Path(s.peer).is_dir() else Path(s.peer)
    definitions = path.read_text(encoding="utf-8").split("\nimport tiktoken")[0]        # then come data, run and prints
    sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
    script = types.ModuleType("peer")
    sys.modules["peer"] = script
    script.__dict__["master_process"] = False
    exec(compile(definitions, str(path), "exec"), script.__dict__)
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    device_type = s.device.split(":")[0]
    raw = script.GPT(script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **shape)).to(s.device)
    model = torch.compile(raw) if s.compile else raw
    optimizer = raw.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=device_type)
    tokens = torch.from_numpy(random_tokens(s.B * s.T + 1).astype(np.int64))

    def step():
        optimizer.zero_grad()
        x, y = tokens[:-1].view(s.B, s.T).to(s.device), tokens[1:].view(s.B, s.T).to(s.device)
        with torch.autocast(device_type=device_type, dtype=torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 6e-4
        optimizer.step()
        return loss.item()
    return step, raw


def matmul_seconds(s, shape, repeats=5):
    """[seconds] of the matrix products of a step and nothing else: of the linear layers and the head (2 N C FLOPs a weight),
    and of attention (6 of 2 B T^2 C a layer), forward and backward, in the step's dtype. Each layer has weights of its own,
    as in the step, so that they do not come from the cache."""
    layers, heads, C = (shape[name] for name in ("n_layer", "n_head", "n_embd"))
    N, hs = s.B * s.T, C // heads

    def random(*shape):
        return torch.randn(shape, device=s.device).to(getattr(torch, s.dtype))

    weights = [random(n, k) for _ in range(layers) for n, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    weights.append(random(s.vocab_size, C))
    tall = {width: random(N, width) for width in (C, 3 * C, 4 * C, s.vocab_size)}
    q, p = random(s.B * heads, s.T, hs), random(s.B * heads, s.T, s.T)

    def products():
        for w in weights:
            x, g = tall[w.size(1)], tall[w.size(0)]
            x @ w.t(), g @ w, g.t() @ x                                 # y, dx, dw
        for _ in range(layers):
            q @ q.transpose(1, 2), q @ q.transpose(1, 2)                # scores, dp
            p @ q, p.transpose(1, 2) @ q, p @ q, p.transpose(1, 2) @ q  # y, dv, dq, dk
    return time_steps(products, replace(s, warmup=2, steps=repeats))[1]


def rss_and_peak():
    """(bytes of this process in memory, the most since the last call)."""
    status = Path("/proc/self/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")           # begins a new peak
    return now, most


def run_in_subprocess(s):
    """The dict that `s` gives when it is measured in a new process, or {"failed": why}."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.processes}"] if s.processes > 1 else []
    threads = max(1, torch.get_num_threads() // s.processes)
    result = subprocess.run([sys.executable, *launcher, str(BENCH), "work", json.dumps(asdict(s))], capture_output=True,
                            text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    told = []
    for line in result.stdout.split("\n"):
        with contextlib.suppress(ValueError):
            told.append(json.loads(line))
    told = [answer for answer in told if isinstance(answer, dict)]
    failed = [answer for answer in told if "failed" in answer]          # one process can fail after the first has answered
    if told and (failed or not result.returncode):
        return (failed or told)[0]
    if result.returncode == -9 or "Signal 9 (SIGKILL)" in result.stderr:        # by the kernel; the second is torchrun's report
        return {"failed": "out of memory"}
    return {"failed": (result.stderr.strip().split("\n")[-1] or f"exit code {result.returncode}")[:200]}


def measure(settings, turns):
    """One dict a setting: in turn, `turns` times over; lists grow, of numbers the largest counts."""
    merged = [{} for _ in settings]
    for turn in range(turns):
        for i, (s, result) in enumerate(zip(settings, merged, strict=True)):
            if sys.stderr.isatty():
                print(f"\r{turn * len(settings) + i + 1} of {turns * len(settings)} ...", end="", file=sys.stderr, flush=True)
            if "failed" not in result:
                for name, value in run_in_subprocess(s).items():
                    before = result.get(name)
                    both_numbers = isinstance(before, int | float) and isinstance(value, int | float)
                    result[name] = value if before is None else before + value if isinstance(value, list) else (
                        max(before, value) if both_numbers else value)
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return merged


def median_ms(result):
    return statistics.median(result["seconds"]) * 1e3


def print_table(rows):
    """Dicts as a table in Markdown, which the README takes as it is."""
    def cell(value):
        return "n/a" if value is None else value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 100 else (
            f"{value:.2f}" if isinstance(value, float) else str(value))
    columns = max(rows, key=len)                            # a line that failed has fewer
    lines = [list(columns), *([cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print()
    for line in lines:
        print("| " + " | ".join(text.ljust(w) if i == 0 else text.rjust(w)
                                for i, (text, w) in enumerate(zip(line, widths, strict=True))) + " |")
    print(flush=True)


def machine(device):
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {date.today()}"
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), torch {torch.__version__}, {date.today()}"


def largest_fit(memory, memory_of_twice, B, gigabytes):
    """(bytes a sequence, the largest micro-batch in `gigabytes`) from the peaks of micro-batches B and 2 B."""
    each = max(1.0, (memory_of_twice - memory) / B)
    return each, max(0, int(B + (gigabytes * GB - memory) / each))


def find_largest(s, B, memory_gb):
    """The largest micro-batch not above about `B` that runs where the GPU has `memory_gb`."""
    while B > 0 and (failed := run_in_subprocess(replace(s, B=B, memory_gb=memory_gb)).get("failed")):
        if failed != "out of memory":
            return failed
        B = min(B - 1, int(0.97 * B))
    return B
