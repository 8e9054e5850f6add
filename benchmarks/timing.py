"""What bench.py's tables share: timing, workers in subprocesses, build-nanogpt's step, printing.

A Setting says what is measured. A worker measures it in a subprocess and prints a dict as JSON. `measure`
starts the subprocesses in turn and merges what they print.
"""
import contextlib
import json
import os
import platform
import re
import stat
import statistics
import subprocess
import sys
import time
import traceback
import types
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

from runtime.attention import ATTENTION, attention, check_attention, document_window_mask
from runtime.cli import UserError
from runtime.device import is_out_of_memory
from runtime.files import read_text
from runtime.progress import Progress
from runtime.tokenizer import VOCAB_SIZE

BENCH = Path(__file__).resolve().parent.parent / "bench.py"
GB = 1e9
progress = Progress()


@dataclass
class Setting:
    """What one row of a table is measured with."""
    what: str = "step"              # a key of bench.WORKERS
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
    memory_gb: float = 0            # limit of the GPU's memory; 0: none
    peer: str = ""                  # folder of build-nanogpt's train_gpt2.py


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
    pairs = zip(times, times[1:], strict=False)
    return warmup_seconds, [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairs]


def rss_and_peak():
    """(resident bytes of this process, their peak since the last call)."""
    status = Path("/proc/self/status").read_text()
    rss, peak = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")           # resets the peak
    return rss, peak


def random_tokens(n):
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


class PlainAdamW(torch.optim.AdamW):
    """torch's default AdamW for the device. Unlike the fused one it cannot skip a non-finite step."""

    def step(self, closure=None):
        self.found_inf = None
        return super().step(closure)


def peers_step(s, shape):
    """(a function that does one optimizer step as build-nanogpt's script does it, the model).

    The script's definitions are executed unchanged. Its step is repeated here, without gradient accumulation.
    """
    path = Path(s.peer) / "train_gpt2.py"
    # from this import on, the script loads data and trains
    definitions = path.read_text(encoding="utf-8").split("\nimport tiktoken")[0]
    sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
    script = types.ModuleType("peer")
    sys.modules["peer"] = script
    script.master_process = False
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
    """[seconds] of a step's matrix products alone, forward and backward, in the step's dtype.

    With N = B T tokens: three products of 2 N n k FLOPs for each (n, k) weight of the linear layers and the
    head, and six of 2 B T^2 C FLOPs for each layer's attention. Each layer has its own weights, as in the
    step, so that they do not come from the cache.
    """
    layers, heads, C = (shape[name] for name in ("n_layer", "n_head", "n_embd"))
    N, hs = s.B * s.T, C // heads

    def random(*shape):
        return torch.randn(shape, device=s.device).to(getattr(torch, s.dtype))

    weights = [random(n, k) for _ in range(layers) for n, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    weights.append(random(s.vocab_size, C))
    activations = {width: random(N, width) for width in (C, 3 * C, 4 * C, s.vocab_size)}
    q, p = random(s.B * heads, s.T, hs), random(s.B * heads, s.T, s.T)

    def products():
        for w in weights:
            x, dy = activations[w.size(1)], activations[w.size(0)]
            x @ w.t(), dy @ w, dy.t() @ x                               # y, dx, dw
        for _ in range(layers):
            q @ q.transpose(1, 2), q @ q.transpose(1, 2)                # scores, dp
            p @ q, p.transpose(1, 2) @ q, p @ q, p.transpose(1, 2) @ q  # y, dv, dq, dk
    return time_steps(products, replace(s, warmup=2, steps=repeats))[1]


def attention_and_gradients(q, k, v, dy, kernel, mask=None):
    """y, dq, dk, dv, each (B, T, heads, head_dim)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attention(q, k, v, kernel, mask)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


def attention_costs(s, heads, head_dim, device):
    """Seconds and peak bytes of one layer's attention, forward and backward, and its errors.

    An error is |x - x64| / |x64| against the naive kernel in float64: of y, and the largest of dq, dk and dv.
    """
    dtype, cuda = getattr(torch, s.dtype), device.startswith("cuda")
    torch.manual_seed(0)

    def inputs(B):
        shape = B, s.T, heads, head_dim
        return [torch.randn(shape, device=device).to(dtype) for _ in range(4)]

    def causal_mask(B, T):
        """For flex, which needs a mask: one document and a window of T. A model makes it once a forward."""
        if s.attention != "flex":
            return None
        tokens = torch.zeros(B, T, dtype=torch.int64, device=device)
        return document_window_mask(tokens, T, torch.tensor(T, device=device), as_blocks=True)

    # the first call loads libraries
    attention_and_gradients(*(t[:, :64] for t in inputs(1)), s.attention, causal_mask(1, 64))
    tensors, mask = inputs(s.B), causal_mask(s.B, s.T)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else rss_and_peak()[0]
    attention_and_gradients(*tensors, s.attention, mask)
    peak = torch.cuda.max_memory_allocated() if cuda else rss_and_peak()[1]
    _, seconds = time_steps(lambda: attention_and_gradients(*tensors, s.attention, mask), s)
    tensors = inputs(1)
    actual = attention_and_gradients(*tensors, s.attention, causal_mask(1, s.T))
    expected = attention_and_gradients(*(t.double() for t in tensors), "naive")
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, expected, strict=True)]
    return {"seconds": seconds, "memory": peak - before,
            "error_forward": errors[0], "error_backward": max(errors[1:])}


def run_worker(workers, setting):
    """`python bench.py work JSON`: prints what the setting's worker measured, a dict, as the last line.

    Of several processes rank 0 prints, and any rank that fails. A failed rank's exit code makes torchrun end
    the others, which would otherwise wait for it in a collective.
    """
    s = Setting(**json.loads(setting))
    try:
        result = workers[s.what](s)
    except Exception as error:
        if is_out_of_memory(error):
            result = {"failed": "out of memory"}
        else:
            traceback.print_exc()
            result = {"failed": (str(error).strip() or repr(error)).split("\n")[-1][:200]}
    if "failed" in result or int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit("failed" in result)            # does not wait for the loader's thread or for other processes


# -----------------------------------------------------------------------------
# starting workers

def run_in_subprocess(s):
    """The dict that the worker of `s` prints in a new process, or {"failed": reason}."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.processes}"]
    launcher = [sys.executable, *(torchrun if s.processes > 1 else [])]
    threads = max(1, torch.get_num_threads() // s.processes)
    result = subprocess.run([*launcher, str(BENCH), "work", json.dumps(asdict(s))], capture_output=True,
                            text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    answers = []
    for line in result.stdout.split("\n"):
        with contextlib.suppress(ValueError):
            answers.append(json.loads(line))
    answers = [answer for answer in answers if isinstance(answer, dict)]
    failed = [answer for answer in answers if "failed" in answer]       # also one after rank 0 has printed
    if answers and (failed or not result.returncode):
        return (failed or answers)[0]
    # killed by the kernel; the second is how torchrun reports it
    if result.returncode == -9 or "Signal 9 (SIGKILL)" in result.stderr:
        return {"failed": "out of memory"}
    return {"failed": (result.stderr.strip().split("\n")[-1] or f"exit code {result.returncode}")[:200]}


def merge(old, new):
    """A measured value over two turns: lists are joined, of two numbers the larger is kept."""
    if old is None:
        return new
    if isinstance(new, list):
        return old + new
    return max(old, new) if isinstance(old, int | float) and isinstance(new, int | float) else new


def measure(settings, turns):
    """One dict a setting, merged over `turns`. A turn runs every setting that has not failed yet."""
    results = [{} for _ in settings]
    jobs = turns * list(zip(settings, results, strict=True))
    with progress("measured", len(jobs), "settings") as task:
        for s, result in jobs:
            if "failed" not in result:
                for name, value in run_in_subprocess(s).items():
                    result[name] = merge(result.get(name), value)
            task.update()
    return results


def median_ms(result):
    return statistics.median(result["seconds"]) * 1e3


def supported_kernels(s):
    """(attention kernels that run with s.device and s.dtype, ["name (reason)"] of the others)."""
    supported, missing = [], []
    for kernel in ATTENTION:
        try:
            check_attention(kernel, s.device, getattr(torch, s.dtype), 64, masked=kernel == "flex")
            supported.append(kernel)
        except UserError as error:
            missing.append(f"{kernel} ({str(error).split('(', 1)[-1].rsplit(')', 1)[0].split('. ')[0]})")
    return supported, missing


def bytes_per_sequence(memory, memory_of_twice, B):
    """From the peak bytes of micro-batches B and 2 B."""
    return max(1.0, (memory_of_twice - memory) / B)


def predict_largest(memory, memory_of_twice, B, gigabytes):
    """The largest micro-batch in `gigabytes`, extrapolated from the peak bytes of micro-batches B and 2 B."""
    return max(0, int(B + (gigabytes * GB - memory) / bytes_per_sequence(memory, memory_of_twice, B)))


def find_largest(s, B, memory_gb):
    """The largest micro-batch up to B that runs in `memory_gb`, in steps of 3%; or why a run failed."""
    while B > 0 and (failed := run_in_subprocess(replace(s, B=B, memory_gb=memory_gb)).get("failed")):
        if failed != "out of memory":
            return failed
        B = min(B - 1, int(0.97 * B))
    return B


# -----------------------------------------------------------------------------
# printing

def rows_of(column, names, results, cells):
    """A row for each result: its name and `cells(name, result)`, or why it failed."""
    return [{column: f"{name}: {r['failed']}"} if "failed" in r else {column: name} | cells(name, r)
            for name, r in zip(names, results, strict=True)]


def print_table(rows, lists=None):
    """Prints dicts as a table in Markdown, and below it each list of {title: names} that is not empty."""
    def cell(value):
        if value is None:
            return "n/a"
        if isinstance(value, str):
            return value
        if abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.2f}" if isinstance(value, float) else str(value)
    columns = max(rows, key=len)                            # the row of a failure has fewer
    lines = [list(columns), *([cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print()
    for line in lines:
        print("| " + " | ".join(text.ljust(w) if i == 0 else text.rjust(w)
                                for i, (text, w) in enumerate(zip(line, widths, strict=True))) + " |")
    print(flush=True)
    for title, names in (lists or {}).items():
        if names:
            print(f"{title}: " + "; ".join(names))


def check_outputs(json_path, plot_path):
    """Before anything is measured: UserError unless --json and --plot, where given, can be written, and
    replace nothing but an earlier result."""
    for flag, path, kind, is_ours in (("--json", json_path, "result of bench.py", is_result),
                                      ("--plot", plot_path, "PNG picture", is_png)):
        if path is None:
            continue
        path, folder = Path(path), Path(path).absolute().parent
        try:
            if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(f"{flag} {path}: {folder} is no folder that can be written: choose another")
            # lstat: a link would itself be replaced
            ours = stat.S_ISREG(os.lstat(path).st_mode) and is_ours(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            ours = False
        if not ours:
            raise UserError(f"{flag} {path}: what is there is no earlier {kind}, and is not replaced: choose "
                            f"another path")
    if json_path and plot_path and os.path.realpath(json_path) == os.path.realpath(plot_path):
        raise UserError(f"--json and --plot are both {json_path}: give two paths")


def is_result(path):
    found = json.loads(read_text(path))
    return isinstance(found, dict) and {"table", "rows"} <= found.keys()


def is_png(path):
    with open(path, "rb") as file:
        return file.read(8) == b"\x89PNG\r\n\x1a\n"


def machine(device):
    name = (torch.cuda.get_device_name(device) if device.startswith("cuda") else
            f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)")
    return f"{name}, torch {torch.__version__}, {date.today()}"
