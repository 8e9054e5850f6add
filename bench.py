"""Benchmarks of this machine. Each command has flags of its own: python bench.py ladder --help

    python bench.py ladder          a training step, made faster one optimisation at a time
    python bench.py attention       the time and the error of every attention kernel
    python bench.py profile         where the time of a training step goes, kernel by kernel
    python bench.py peer PATH       our step beside that of build-nanogpt, of which PATH is a clone
    python bench.py data [PATH]     the loader and fineweb.py, beside build-nanogpt's fineweb.py
    python bench.py recipes DATA    trains every recipe on a folder of shards, or one without its ideas
    python bench.py compare OUT ... the losses of runs (--out folders) and of .csv curves

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a process of its
own, so that no row inherits memory or compiled code from another. The rows are measured in turn,
--turns times, because the speed of a shared machine changes within minutes. A row shows the median of
its times, the largest peak of its memory and its longest start.
"""
import argparse
import csv
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from tqdm import tqdm

import frontier
import speedrun
import train_gpt2
from model import ATTENTION, GPT2_SIZES, attention
from runtime.cli import FlagParser, RunError, UserError, brief_error, print_error, run_command
from runtime.console import clock
from runtime.dataloader import INPUT_TXT, TokenDataset, micro_batches
from runtime.device import (
    choose_device,
    choose_dtype,
    device_name,
    is_out_of_memory,
    peak_flops,
    peak_memory,
)
from runtime.files import read_text, reading, replace_file
from runtime.plots import new_figure, short_count
from runtime.recipe import BatchSchedule
from runtime.shards import open_shard, write_shard
from runtime.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent


# ----------------------------------------------------------------------------- what a row is

@dataclass
class Setting:
    """What one row of a table is measured with."""
    worker: str = "step"            # a key of WORKERS
    device: str = "cpu"
    recipe: str = "gpt2"
    size: str = "gpt2"              # a key of GPT2_SIZES, or layers x width
    B: int = 16                     # sequences in a micro-batch, which is the whole batch
    T: int = 1024
    dtype: str = "bfloat16"
    tf32: bool = True
    compile: bool = False
    attention: str = "auto"
    vocab_size: int = 50304
    fused: bool = True              # AdamW in one kernel
    loss_in_tiles: bool = True      # where training computes it so
    tune_malloc: bool = True        # on a CPU: freed memory is kept
    warmup: int = 2                 # steps
    steps: int = 10
    peer: str = ""                  # the folder of build-nanogpt


def shape_of(s: Setting) -> dict:
    """n_layer, n_embd and n_head of a size of GPT-2, or of one such as '4x256'."""
    if s.size in GPT2_SIZES:
        shape = dict(GPT2_SIZES[s.size])
    else:
        layers, width = s.size.split("x")
        shape = {"n_layer": int(layers), "n_embd": int(width)}

    # The heads of the modern recipes are 128 wide: six at GPT-2's size.
    head_width = 64
    if "n_head" in train_gpt2.RECIPES[s.recipe].defaults:
        head_width = 128
    shape["n_head"] = max(1, shape["n_embd"] // head_width)
    return shape


def random_tokens(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


# ----------------------------------------------------------------------------- our step, and a peer's

def our_step(s: Setting) -> tuple[Callable, torch.nn.Module]:
    """(a function that does one step as train_gpt2.py does it, the model).

    Writes into the current folder, and changes train_gpt2: it is for a process of its own.
    """
    Path("data").mkdir()
    write_shard("data/x_train_000000.npy", random_tokens(20 * s.B * s.T + 1))
    flags = dict(
        data="data", out="out", recipe=s.recipe, vocab_size=s.vocab_size, block_size=s.T,
        total_batch_size=s.B * s.T, batch_size=s.B, device=s.device, dtype=s.dtype, tf32=s.tf32,
        compile=s.compile, attention=s.attention, val_every=0, hellaswag_every=0, sample_every=0,
        checkpoint_every=0, **shape_of(s))

    if not s.tune_malloc:
        train_gpt2.tune_malloc = lambda: None
    process = train_gpt2.start_process(s.device)
    _, config = train_gpt2.resolve_config(flags, train_gpt2.Start(), process)
    train_gpt2.use_tf32(config, process)
    model = train_gpt2.make_model(config, train_gpt2.Start(), process.device)
    if not s.loss_in_tiles:
        model.loss_chunk = 0
    state = train_gpt2.make_train_state(config, model, process)
    for group in state.optimizer.groups():
        if not s.fused and "fused" in group:
            group["fused"] = None           # torch's default for the device

    # Every step has B x T tokens, also of a recipe whose batch grows over the run.
    schedule = BatchSchedule(config.total_batch_size, config.max_steps)
    data = train_gpt2.open_data(config)
    loader = train_gpt2.TrainLoader(data.train, schedule, s.B, 0, process)
    numbers = itertools.count()

    def step():
        number = next(numbers)
        train_gpt2.set_schedules(number, config, schedule, state)
        train_gpt2.train_step(number, config, process, loader, state)
    return step, state.model


def load_script(path: Path) -> types.ModuleType:
    """build-nanogpt's train_gpt2.py, as far as it only defines."""
    # From this import on, the script loads data and trains.
    definitions = path.read_text(encoding="utf-8").split("\nimport tiktoken")[0]
    sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
    script = types.ModuleType("peer")
    sys.modules["peer"] = script            # where its dataclass looks for itself
    script.master_process = False           # it prints nothing
    exec(compile(definitions, str(path), "exec"), script.__dict__)
    return script


def peers_step(s: Setting) -> tuple[Callable, torch.nn.Module]:
    """(a function that does one optimizer step as build-nanogpt's script does it, the model).

    The script's definitions are executed unchanged. Its step is repeated here, without gradient
    accumulation.
    """
    script = load_script(Path(s.peer) / "train_gpt2.py")
    device_type = s.device.split(":")[0]
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")

    shape = shape_of(replace(s, recipe="gpt2"))
    raw_model = script.GPT(script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **shape))
    raw_model.to(s.device)
    model = raw_model
    if s.compile:
        model = torch.compile(raw_model)
    optimizer = raw_model.configure_optimizers(
        weight_decay=0.1, learning_rate=6e-4, device_type=device_type)
    tokens = torch.from_numpy(random_tokens(s.B * s.T + 1).astype(np.int64))

    def step():
        optimizer.zero_grad()
        x = tokens[:-1].view(s.B, s.T).to(s.device)
        y = tokens[1:].view(s.B, s.T).to(s.device)
        with torch.autocast(device_type, dtype, enabled=s.dtype != "float32"):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
        optimizer.step()
        return loss.item()
    return step, raw_model


# ----------------------------------------------------------------------------- time and memory of a step

def wait_for(device: str) -> None:
    """Waits until the device has done what it was given. A CPU always has."""
    getattr(torch, device.split(":")[0]).synchronize()


def time_steps(step: Callable, s: Setting) -> tuple[float, list[float]]:
    """Calls step(). Returns the seconds of the first s.warmup calls together, which may compile, and
    of each of the next s.steps."""
    began = time.perf_counter()
    for _ in range(s.warmup):
        step()
    wait_for(s.device)
    warmup_seconds = time.perf_counter() - began

    if s.device.startswith("cuda"):
        # By the GPU's own clock, because it should not wait for the CPU between two steps.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(s.steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        wait_for(s.device)
        pairs = itertools.pairwise(events)
        return warmup_seconds, [before.elapsed_time(after) / 1e3 for before, after in pairs]

    times = [time.perf_counter()]
    for _ in range(s.steps):
        step()
        wait_for(s.device)              # on a Mac, as training does after each step there
        times.append(time.perf_counter())
    return warmup_seconds, [after - before for before, after in itertools.pairwise(times)]


def product_rate(s: Setting) -> float:
    """FLOP/s of the kind of product that most of a step is, (B T, C) x (C, 4 C), in its dtype."""
    C = shape_of(s)["n_embd"]
    dtype = getattr(torch, s.dtype)
    x = torch.randn(s.B * s.T, C, device=s.device, dtype=dtype)
    w = torch.randn(C, 4 * C, device=s.device, dtype=dtype)
    _, seconds = time_steps(lambda: x @ w, replace(s, warmup=10, steps=50))
    return 2 * x.numel() * w.size(1) / statistics.median(seconds)


def measure(step: Callable, model: torch.nn.Module, s: Setting) -> dict:
    """Seconds of each step and of the warm-up; peak memory in bytes; of ours also what MFU needs."""
    warmup_seconds, seconds = time_steps(step, s)
    memory = peak_memory(s.device)
    if s.device == "mps":
        memory = torch.mps.driver_allocated_memory()        # what Metal has given, which torch keeps

    found = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": memory}
    if not s.peer:
        found["flops_per_token"] = model.flops_per_token(s.T)
        found["peak_flops"] = peak_flops(s.device) or product_rate(s)
    return found


def measure_step(s: Setting) -> dict:
    if s.peer:
        step, model = peers_step(s)
    else:
        step, model = our_step(s)
    return measure(step, model, s)


# ----------------------------------------------------------------------------- kernels of a step

PROFILED_STEPS = 3

# {kind of kernel: what its name holds}. The first kind that fits counts. On a GPU these are names of
# kernels, on a CPU of torch's operators. A Triton kernel is named after all operators that the compiler
# fused into it: one with the loss in it, or with the tanh of its softcap, counts as loss, and one that
# only casts as a cast. The products by which Muon makes a matrix orthogonal are matrix products.
KINDS = {
    "loss": r"log_?softmax|nll_?loss|logsumexp|cross_?entropy|tanh",
    "attention": r"^(?!triton_).*(sdpa|flash|fmha|scaled_dot_product|softmax)",
    "optimizer": r"multi_tensor|adam|_foreach|newton",
    "matrix products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|split_?k|triton_tem_|"
                       r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn_linear)\b",
    "copies and casts": r"memcpy|memset|copy_kernel|FillFunctor|CatArray|"
                        r"aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_)$|"
                        r"fused(_+(to_copy|copy|clone|t|transpose|permute|view|unsafe_view|expand))+_\d+$",
    "elementwise and norms": r"^triton_|elementwise|norm|reduce_kernel|gelu|relu|"
                             r"aten::(add|sub|mul|div|pow|neg|rsqrt|sum|mean)",
    "other": "",
}


def kind_of(name: str) -> str:
    """The key of KINDS to which a kernel belongs."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    raise AssertionError("the last pattern fits every name")


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end): kernels may run at the same time."""
    length = 0.0
    covered_until = -math.inf
    for start, end in sorted(intervals):
        if end > covered_until:
            length += end - max(start, covered_until)
            covered_until = end
    return length


def profile_steps(step: Callable, device: str) -> dict:
    """{"kernels": {name: [calls, ms]}, "busy_ms": ms in which any of them runs}, for one step.

    On a GPU these are its kernels, on a CPU torch's operators without what they call.
    """
    on_gpu = device.startswith("cuda")
    activities, device_type = [ProfilerActivity.CPU], DeviceType.CPU
    if on_gpu:
        activities, device_type = [ProfilerActivity.CPU, ProfilerActivity.CUDA], DeviceType.CUDA

    # The first profile starts the profiler, which takes seconds: it is thrown away.
    for steps in (1, PROFILED_STEPS):
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps):
                step()
            wait_for(device)

    kernels = {}
    intervals = []
    for event in profiler.events():
        if event.device_type != device_type or event.is_user_annotation:
            continue                            # an annotation spans the kernels inside
        microseconds = event.self_cpu_time_total
        if on_gpu:
            microseconds = event.time_range.elapsed_us()
            intervals.append((event.time_range.start, event.time_range.end))
        calls, ms = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = calls + 1 / PROFILED_STEPS, ms + microseconds / 1e3 / PROFILED_STEPS

    busy_ms = sum(ms for _, ms in kernels.values())
    if on_gpu:
        busy_ms = covered(intervals) / 1e3 / PROFILED_STEPS
    return {"kernels": kernels, "busy_ms": busy_ms}


def measure_profile(s: Setting) -> dict:
    """What `measure` finds without the profiler, and then what profile_steps finds."""
    step, model = our_step(s)
    return measure(step, model, s) | profile_steps(step, s.device)


# ----------------------------------------------------------------------------- attention and the loader

def attention_and_gradients(kernel: str, q, k, v, dy) -> tuple:
    """y, dq, dk, dv, each (B, T, heads, head_dim)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attention(q, k, v, kernel)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


def measure_attention(s: Setting) -> dict:
    """Seconds of one layer's attention, forward and backward; and its errors.

    An error is |x - x64| / |x64|, where x64 is the formula's value in float64: that of y, and the
    largest of dq, dk and dv.
    """
    choose_device(s.device)             # sets up CUDA's allocator
    torch.set_float32_matmul_precision("high")
    model_shape = shape_of(s)
    heads = model_shape["n_head"]
    shape = (s.B, s.T, heads, model_shape["n_embd"] // heads)
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=s.device).to(dtype) for _ in range(4)]      # q, k, v and dy
    _, seconds = time_steps(lambda: attention_and_gradients(s.attention, *tensors), s)

    # On the CPU, because Metal has no float64; one sequence is enough.
    tensors = [t[:1] for t in tensors]
    found = attention_and_gradients(s.attention, *tensors)
    exact = attention_and_gradients("naive", *(t.cpu().double() for t in tensors))
    errors = []
    for x, x64 in zip(found, exact, strict=True):
        errors.append(((x.cpu().double() - x64).norm() / x64.norm()).item())
    return {"seconds": seconds, "error_forward": errors[0], "error_backward": max(errors[1:])}


def measure_loader(s: Setting) -> dict:
    """Seconds in which the loader reads each batch of B x T tokens from shuffled shards, on one thread."""
    paths = []
    for i in range(4):
        paths.append(Path(f"x_train_{i}.npy"))
        write_shard(paths[-1], random_tokens(4_000_000))
    dataset = TokenDataset(paths, s.T, 1337, True, VOCAB_SIZE)
    batches = micro_batches(dataset, BatchSchedule(s.B * s.T, s.steps), s.B)
    _, seconds = time_steps(lambda: next(batches), s)
    return {"seconds": seconds}


# ----------------------------------------------------------------------------- one process for each row

WORKERS = {
    "step": measure_step,
    "profile": measure_profile,
    "attention": measure_attention,
    "loader": measure_loader,
}


def work(setting: str) -> None:
    """`python bench.py work JSON`: prints what the setting's worker measured, a dict, as JSON."""
    s = Setting(**json.loads(setting))
    try:
        result = WORKERS[s.worker](s)
    except Exception as error:
        reason = brief_error(error)
        if is_out_of_memory(error):
            reason = "out of memory"
        result = {"failed": reason}
    print(json.dumps(result), flush=True)
    os._exit(0)                     # without waiting for the thread of the loader


def run_in_subprocess(s: Setting) -> dict:
    """What the worker of `s` finds in a new process, or {"failed": reason}."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # torch.compile keeps what it compiles. In a folder of their own all processes have to
        # compile, so that "start s" does not depend on what ran before.
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        command = [sys.executable, str(ROOT / "bench.py"), "work", json.dumps(asdict(s))]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | caches, capture_output=True, text=True)

    for line in done.stdout.splitlines():
        if line.startswith('{"'):           # the script of a peer may print other lines
            return json.loads(line)
    return {"failed": why_it_failed(done)}


def why_it_failed(done: subprocess.CompletedProcess) -> str:
    """The signal that killed a process, or else the last line that it wrote to stderr."""
    if done.returncode == -9:
        return "killed by SIGKILL, as Linux does where memory runs out"
    lines = done.stderr.strip().splitlines()
    if lines and done.returncode > 0:
        return lines[-1][:200]
    return f"exit code {done.returncode}"


def take_turns(run: Callable, jobs: dict, turns: int) -> dict:
    """{name: job} -> {name: what run(job) measured, a dict}, over `turns`.

    Lists of all turns are joined, and of numbers the largest is kept. A job that returned
    {"failed": reason} is not run again.
    """
    results = {name: {} for name in jobs}
    for name, job in tqdm(turns * list(jobs.items()), "measured", unit=" rows", delay=10):
        result = results[name]
        if "failed" in result:
            continue
        for key, value in run(job).items():
            if isinstance(value, list):
                result[key] = result.get(key, []) + value
            elif isinstance(value, str):
                result[key] = value
            else:
                result[key] = max(result.get(key, 0), value)
    return results


# ----------------------------------------------------------------------------- what a table looks like

def median_ms(result: dict) -> float:
    return statistics.median(result["seconds"]) * 1e3


def ratio(a: float, b: float | None) -> str:
    if not b:
        return "n/a"
    return f"{a / b:.2f}x"


def cell_text(value) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def print_table(rows: list[dict]) -> None:
    """Prints rows, {column: value}, as a table in Markdown; below it those that failed, and why."""
    measured = [row for row in rows if "failed" not in row]
    columns = list(dict.fromkeys(name for row in measured for name in row))
    lines = [columns]
    for row in measured:
        lines.append([cell_text(row.get(name)) for name in columns])

    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    print()
    if measured:
        for name, *numbers in lines:
            cells = [name.ljust(widths[0])]
            for number, width in zip(numbers, widths[1:], strict=True):
                cells.append(number.rjust(width))
            print(f"| {' | '.join(cells)} |")
    for row in rows:
        if "failed" in row:
            name = next(iter(row.values()))
            print(f"not measured: {name}: {row['failed'][:120]}")
    print(flush=True)


def rows_of(column: str, results: dict, cells: Callable) -> list[dict]:
    """A row for each of {name: result}: its name in `column`, and cells(name, result), a dict; or
    why it failed."""
    rows = []
    for name, result in results.items():
        if "failed" in result:
            rows.append({column: name, "failed": result["failed"]})
        else:
            rows.append({column: name, **cells(name, result)})
    return rows


def step_cells(s: Setting, result: dict) -> dict:
    ms = median_ms(result)
    return {
        "ms per step": ms,
        "tokens/s": s.B * s.T / ms * 1e3,
        "peak GB": result["memory"] / 1e9,
        "start s": result["warmup_seconds"],
    }


# ----------------------------------------------------------------------------- bench.py ladder

@dataclass
class Rung:
    """One optimisation more than the last rung below it that could run."""
    change: dict                        # of the setting of that rung
    left_out: str = ""                  # why this device leaves the rung out
    setting: Setting | None = None      # with which it was measured


def needs(condition: bool, otherwise: str) -> str:
    """Rung.left_out of a rung that needs this condition."""
    if condition:
        return ""
    return otherwise


def ladder_rungs(base: Setting) -> dict[str, Rung]:
    """{what the table calls it: the rung}, from the bottom to the top."""
    kind = base.device.split(":")[0]
    on_cpu = kind == "cpu"
    on_gpu = kind == "cuda"
    has_16_bit = base.dtype != "float32"

    nothing = dict(dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257,
                   fused=False, loss_in_tiles=False, tune_malloc=False)
    rungs = {}
    rungs["float32, textbook attention, vocabulary 50257, eager, plain AdamW"] = Rung(nothing)
    rungs["+ TF32"] = Rung(
        {"tf32": True}, needs(on_gpu, "only NVIDIA's GPUs have this format"))
    rungs[f"+ {base.dtype} autocast"] = Rung(
        {"dtype": base.dtype},
        needs(has_16_bit, "the hardware has no 16-bit products, or --dtype is float32"))
    rungs["+ torch.compile"] = Rung(
        {"compile": True}, needs(base.compile, "only with --compile"))
    rungs["+ SDPA's flash attention"] = Rung(
        {"attention": "flash"}, needs(kind != "mps", "Metal has its own"))
    rungs["+ vocabulary 50304"] = Rung({"vocab_size": 50304})
    rungs["+ fused AdamW"] = Rung({"fused": True})
    rungs["+ freed memory kept (mallopt)"] = Rung(
        {"tune_malloc": True}, needs(on_cpu, "for CPUs"))
    # A compiler fuses the logits with the loss: train_gpt2.py makes no tiles there.
    rungs["+ loss in tiles that stay in the cache"] = Rung(
        {"loss_in_tiles": True},
        needs(on_cpu and not base.compile, "for CPUs, where nothing is compiled"))
    rungs["+ attention kernel of choice (auto)"] = Rung({"attention": "auto"})
    rungs[f"+ micro-batch {4 * base.B}"] = Rung(
        {"B": 4 * base.B}, needs(on_gpu, "for large GPUs"))
    return rungs


def measure_ladder(rungs: dict[str, Rung], base: Setting, turns: int) -> dict:
    """{rung: what was measured, or {"failed": why}}. Notes the setting of each rung in it."""
    highest = base                      # the setting of the last rung that could run

    def run(rung):
        nonlocal highest
        if rung.left_out:
            return {"failed": rung.left_out}
        # The first turn decides: what cannot run here is not part of the rungs above.
        if rung.setting is None:
            rung.setting = replace(highest, **rung.change)
        result = run_in_subprocess(rung.setting)
        if "failed" not in result:
            highest = rung.setting
        return result

    return take_turns(run, rungs, turns)


def ladder(args) -> None:
    base = setting_of(args)
    print_machine(base)
    rungs = ladder_rungs(base)
    results = measure_ladder(rungs, base, args.turns)
    rows = rows_of("rung", results, lambda name, result: step_cells(rungs[name].setting, result))

    # On a CPU each rung measures the peak, in its own dtype: the highest is that of 16 bits.
    peak = max(result.get("peak_flops", 0) for result in results.values())
    measured = [row for row in rows if "failed" not in row]
    before = None
    for row in measured:
        if before is None:
            before = row
        flops = row["tokens/s"] * results[row["rung"]]["flops_per_token"]
        row["MFU"] = f"{flops / peak:.1%}"
        row["gain"] = ratio(row["tokens/s"], before["tokens/s"])
        row["in all"] = ratio(row["tokens/s"], measured[0]["tokens/s"])
        before = row

    print_table(rows)
    print(f"MFU is the share of {peak / 1e12:.2f} TFLOP/s (from the data sheet, or measured on the "
          "MLP's products); a gain below 1.1x may be noise")


# ----------------------------------------------------------------------------- bench.py attention, peer

def attention_table(args) -> None:
    base = setting_of(args)
    print_machine(base)
    settings = {}
    for kernel in ATTENTION:
        settings[kernel] = replace(base, worker="attention", attention=kernel)
    results = take_turns(run_in_subprocess, settings, args.turns)

    def cells(kernel, result):
        return {
            "forward + backward ms": median_ms(result),
            "error of y": f"{result['error_forward']:.1e}",
            "largest error of dq, dk, dv": f"{result['error_backward']:.1e}",
        }

    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; "
          "errors are |x - x64| / |x64|")
    print_table(rows_of("kernel", results, cells))


def peer_table(args) -> None:
    script = Path(args.path) / "train_gpt2.py"
    if "\nimport tiktoken" not in script.read_text(encoding="utf-8"):
        raise UserError(f"{script} is not that of build-nanogpt: git clone it from GitHub, and name "
                        "its folder")
    base = setting_of(args)
    print_machine(base)
    peer = replace(base, peer=str(script.parent.resolve()))
    settings = {
        "ours": base,
        "build-nanogpt, as shipped": replace(peer, compile=False),
        "build-nanogpt, torch.compile": replace(peer, compile=True),
    }
    if not base.compile:
        del settings["build-nanogpt, torch.compile"]
    results = take_turns(run_in_subprocess, settings, args.turns)

    our_ms = None
    if "failed" not in results["ours"]:
        our_ms = median_ms(results["ours"])

    def cells(name, result):
        row = step_cells(settings[name], result)
        row["time against ours"] = ratio(median_ms(result), our_ms)
        return row

    print_table(rows_of("step", results, cells))


# ----------------------------------------------------------------------------- bench.py profile

def profile(args) -> None:
    s = replace(setting_of(args), worker="profile")
    print_machine(s)
    how = "eager"
    if s.compile:
        how = "compiled"
    print(f"recipe {s.recipe}, size {s.size}, {s.B} x {s.T} tokens a step, {s.dtype}, {how}")
    result = run_in_subprocess(s)
    if "failed" in result:
        raise RunError(f"the step cannot be measured: {result['failed']}")

    ms = median_ms(result)
    tokens_per_second = s.B * s.T / ms * 1e3
    mfu = tokens_per_second * result["flops_per_token"] / result["peak_flops"]
    print(f"{ms:.1f} ms a step without the profiler, {tokens_per_second:,.0f} tokens/s, MFU {mfu:.1%}, "
          f"peak memory {result['memory'] / 1e9:.2f} GB")
    kernels = result["kernels"]
    if not kernels:
        print("the profiler saw no kernels: it needs CUPTI, and the right to read the GPU's counters")
        return

    print_table(rows_of_kinds(kernels, ms, result["busy_ms"], s.device))
    print_table(rows_of_kernels(kernels, 20))


def rows_of_kinds(kernels: dict, step_ms: float, busy_ms: float, device: str) -> list[dict]:
    """A row for each kind of kernel, and one for the time of the step in which none runs.

    All rows together may be more than the step, where kernels run at the same time.
    """
    ms_of_kind = dict.fromkeys(KINDS, 0.0)
    for name, (_, ms) in kernels.items():
        ms_of_kind[kind_of(name)] += ms
    rest = "idle"
    if device == "cpu":
        rest = "outside of operators"
    ms_of_kind[rest] = max(0.0, step_ms - busy_ms)

    rows = []
    for kind, ms in ms_of_kind.items():
        rows.append({"kind": kind, "ms a step": ms, "share": f"{ms / step_ms:.1%}"})
    return rows


def rows_of_kernels(kernels: dict, count: int) -> list[dict]:
    """The longest kernels, by their time in a step."""
    rows = []
    longest = sorted(kernels.items(), key=lambda item: item[1][1], reverse=True)
    for name, (calls, ms) in longest[:count]:
        short = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)[:90]
        rows.append({"kernel": short, "kind": kind_of(name), "calls a step": calls, "ms a step": ms})
    return rows


# ----------------------------------------------------------------------------- bench.py data

# Before build-nanogpt's fineweb.py, which then runs unchanged. In place of what it would ask for it
# gets the rows of our file, GPT-2's tokenizer from assets/, and a process for every core, where it
# starts one for half of them. Its processes are forks, as they are where it was written.
POOL_BEGINS_WITH = """
import multiprocessing, os, sys, types
sys.path.append({root!r})
import pyarrow.parquet, tiktoken
from runtime.tokenizer import tokenizer

def rows():
    for batch in pyarrow.parquet.ParquetFile({text!r}).iter_batches():
        yield from batch.to_pylist()

multiprocessing.set_start_method("fork")
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows())
tiktoken.get_encoding = lambda name: tokenizer()
os.cpu_count = lambda: 2 * len(os.sched_getaffinity(0))
"""


def write_text(path: Path, copies: int) -> int:
    """Writes copies of input.txt into a .parquet file. Returns the bytes of the text.

    A document is 30 speeches with the number of its copy before them, so that no two are equal.
    """
    import pyarrow
    import pyarrow.parquet

    speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
    text_bytes = 0
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])) as file:
        for i in range(copies):
            documents = []
            for at in range(0, len(speeches), 30):
                documents.append(f"{i} " + "\n\n".join(speeches[at:at + 30]))
            file.write_table(pyarrow.table({"text": documents}))
            text_bytes += sum(len(text.encode()) for text in documents)
    return text_bytes


def time_tokenizing(program: str, text: Path) -> dict:
    """The seconds of a whole process that turns `text` into shards, and the tokens in these.

    `program`: the path of a fineweb.py, ours or build-nanogpt's.
    """
    with tempfile.TemporaryDirectory(dir=text.parent) as out:
        command = [sys.executable, program, "--input", str(text), "--out", out]
        if program != str(ROOT / "fineweb.py"):
            # The script writes its shards beside itself.
            begin = POOL_BEGINS_WITH.format(root=str(ROOT), text=str(text))
            script = Path(out) / "pool.py"
            script.write_text(begin + Path(program).read_text(encoding="utf-8"), encoding="utf-8")
            command = [sys.executable, str(script)]

        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            return {"failed": why_it_failed(done)}
        tokens = sum(len(open_shard(path)) for path in Path(out).rglob("*.npy"))
    return {"seconds": [seconds], "tokens": tokens}


def data_table(args) -> None:
    print_machine(Setting())
    loader = Setting(worker="loader", B=16, T=1024, warmup=10, steps=500)
    results = take_turns(run_in_subprocess, {"loader, one thread, .npy shuffled": loader}, args.turns)

    def loader_cells(name, result):
        # The mean, because the first batches of a shard wait for its shuffling.
        seconds = statistics.mean(result["seconds"])
        return {"million tokens/s": loader.B * loader.T / seconds / 1e6}

    print_table(rows_of("what", results, loader_cells))

    programs = {"fineweb.py": str(ROOT / "fineweb.py")}
    if args.path:
        programs["build-nanogpt's fineweb.py, a process per core"] = str(Path(args.path) / "fineweb.py")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.parquet"
        text_bytes = write_text(text, args.copies)
        results = take_turns(lambda program: time_tokenizing(program, text), programs, args.turns)

    def cells(name, result):
        seconds = statistics.median(result["seconds"])
        return {
            "s": seconds,
            "slowest": max(result["seconds"]),
            "MB of text/s": text_bytes / 1e6 / seconds,
            "million tokens/s": result["tokens"] / 1e6 / seconds,
        }

    print(f"{text_bytes / 1e6:.0f} MB of text, {args.copies} copies of input.txt, by whole commands")
    print_table(rows_of("what", results, cells))


# ----------------------------------------------------------------------------- bench.py compare

# The columns in which a loss may stand: in a run's metrics.csv, and in the .csv of a curve.
LOSS_COLUMNS = ("val", "loss", "validation_loss")


@dataclass
class Curve:
    """The validations of a run, or of a curve in a file."""
    name: str
    tokens: list[float]         # of training before each validation
    seconds: list[float]        # nan in a file without them
    losses: list[float]         # nats per token


def read_curves(source: str) -> list[Curve]:
    """The curve of a run's --out folder, or those of a .csv file. UserError if there is none."""
    path = Path(source)
    if path.is_dir():
        path = path / "metrics.csv"
    remedy = "choose the --out folder of a run, or a .csv with the columns tokens and loss"
    with reading(path, remedy, (ValueError, csv.Error)):
        text = read_text(path)
        if path.name == "metrics.csv":
            text = text[:text.rfind("\n") + 1]      # the last line may not be complete yet
        return parse_curves(source, text)


def parse_curves(source: str, text: str) -> list[Curve]:
    """The curves in the text of a .csv file. ValueError if it is none.

    Its columns are tokens, a loss, and perhaps seconds; the first two are tokens and loss, if it has
    no header. A column `run` tells several curves apart. A line that begins with # is a comment.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and lines[0][0].isdigit():
        lines.insert(0, "tokens,loss")

    curves = {}
    for row in csv.DictReader(lines):
        cells = {name.strip().lower(): cell for name, cell in row.items() if name}
        loss = [cells[name] for name in LOSS_COLUMNS if cells.get(name)]
        if not loss:
            continue                                # a step without a validation
        name = cells.get("run") or source
        curve = curves.setdefault(name, Curve(name, [], [], []))
        curve.tokens.append(float(cells.get("tokens") or "nan"))
        curve.seconds.append(float(cells.get("seconds") or "nan"))
        curve.losses.append(float(loss[0]))

    for curve in curves.values():
        if not np.isfinite(curve.tokens + curve.losses).all() or (np.diff(curve.tokens) <= 0).any():
            raise ValueError(f"{curve.name} has no growing numbers of tokens with a loss for each")
    if not curves:
        raise ValueError("it has no validation loss yet")
    return list(curves.values())


def tokens_to_reach(target: float, curve: Curve) -> float | None:
    """After how many tokens the loss was first at `target`, linear between validations. None: never."""
    for i, loss in enumerate(curve.losses):
        if loss <= target:
            before = max(0, i - 1)
            return np.interp(
                target, (loss, curve.losses[before]), (curve.tokens[i], curve.tokens[before])).item()
    return None


def curve_row(curve: Curve) -> dict:
    row = {"run": curve.name, "tokens": short_count(float(f"{curve.tokens[-1]:.3g}")), "time": ""}
    if math.isfinite(curve.seconds[-1]):
        row["time"] = clock(curve.seconds[-1])
    row["final val loss"] = f"{curve.losses[-1]:.4f}"
    row["lowest"] = f"{min(curve.losses):.4f}"
    return row


def pair_row(curve: Curve, other: Curve) -> dict:
    """How a curve stands to another.

    At its newest validation that the other reaches: the difference of their losses. And after how
    many tokens the other had its final loss. Linear between validations.
    """
    row = {"run": curve.name, "against": other.name}
    both = [i for i, n in enumerate(curve.tokens) if other.tokens[0] <= n <= other.tokens[-1]]
    if both:
        tokens, loss = curve.tokens[both[-1]], curve.losses[both[-1]]
        others_loss = np.interp(tokens, other.tokens, other.losses).item()
        row["at tokens"] = short_count(float(f"{tokens:.3g}"))
        row["val loss"] = f"{loss:.4f}"
        row["the other's"] = f"{others_loss:.4f}"
        row["difference"] = f"{loss - others_loss:+.4f}"

    row["reached after"] = "-"
    reached = tokens_to_reach(curve.losses[-1], other)
    if reached is not None:
        share = reached / curve.tokens[-1]
        row["reached after"] = f"{short_count(float(f'{reached:.3g}'))} ({share:.0%})"
    return row


def compare(args) -> None:
    curves = []
    for source in dict.fromkeys(args.paths):
        curves += read_curves(source)
    print_table([curve_row(curve) for curve in curves])

    pairs = [pair_row(*pair) for pair in itertools.permutations(curves, 2)]
    if pairs:
        print("each pair at the newest validation that both reached; 'reached after' is when the "
              "other run had this run's final val loss")
        print_table(pairs)
    if args.plot:
        plot_curves(args.plot, curves, args.title)


def plot_curves(path: str, curves: list[Curve], title: str) -> None:
    """Two panels: validation loss against tokens, and against the time of training.

    A dashed line is the final loss of the first curve: where another curve meets it, one can read
    how many tokens and how much time that one needed.
    """
    unit, length = "minutes", 60
    if np.nanmax([0, *(curve.seconds[-1] for curve in curves)]) >= 2 * 3600:
        unit, length = "hours", 3600

    figure = new_figure(figsize=(12, 4.5))
    figure.suptitle(title.replace("$", r"\$"))              # no formula
    panels = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        # A leading underscore would hide the curve from the legend.
        label = " " + curve.name.replace("$", r"\$")
        xs = curve.tokens, np.array(curve.seconds) / length
        for panel, x in zip(panels, xs, strict=True):
            panel.plot(x, curve.losses, marker="o", markersize=3, label=label)

    end = curves[0].losses[-1]
    for panel, x_label in zip(panels, ("tokens", unit), strict=True):
        panel.axhline(end, color="grey", linestyle="--", linewidth=0.8, zorder=0,
                      label=f" the first one's end: {end:.2f}")
        panel.set(xlabel=f"{x_label} of training", xlim=(0, None))
        panel.grid(alpha=0.3)

    # The first tenth of a run is cut off: its fall would hide how the runs differ later.
    highest = max(np.interp(0.1 * curve.tokens[-1], curve.tokens, curve.losses) for curve in curves)
    lowest = min(min(curve.losses) for curve in curves)
    panels[0].set_ylim(lowest - 0.05, highest + 0.05)
    panels[0].set_ylabel("validation loss, nats per token")
    panels[0].xaxis.set_major_formatter(short_count)
    panels[0].legend(fontsize=8)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))
    print(f"saved {path}")


# ----------------------------------------------------------------------------- bench.py recipes

# {recipe: {an idea: what train_gpt2.py runs with in its place}}. Each function puts something else in
# the place of one name, in a process of its own: see train_without.

def no_rotary_positions():
    speedrun.rotate = lambda x, cos, sin: x


def no_qk_norm():
    speedrun.qk_norm = lambda x: x


def no_norm_of_embedding():
    speedrun.SpeedrunGPT.embed = lambda self, tokens, T, dtype: (
        self.transformer.wte(tokens[:, -T:]).to(dtype))


def gelu():
    speedrun.SpeedrunMLP.forward = lambda self, x: self.c_proj(F.gelu(self.c_fc(x)))


def no_softcap():
    speedrun.SpeedrunGPT.softcap = 0.0


def adam():
    speedrun.Muon = lambda params, lr, **others: torch.optim.Adam(
        params, 0.1 * lr, betas=(0.9, 0.95), fused=True)


def constant_momentum():
    speedrun.RECIPE.momentum = lambda progress, config: 0.95


def cosine():
    def lr_scale(step, progress, config):
        lowest = config.min_lr / config.max_lr
        return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    speedrun.RECIPE.lr_scale = lr_scale


def ordinary_start():
    frontier.FrontierGPT.init_weights = speedrun.ModernLanguageModel.init_weights


def no_shifted_keys():
    frontier.shift_keys = lambda k, starts: k
    ordinary_start()                    # without them their start makes no sense either


def no_stems():
    original = frontier.stem_and_form
    frontier.stem_and_form = lambda text: ("the same of all", original(text)[1])


def no_forms():
    original = frontier.stem_and_form
    frontier.stem_and_form = lambda text: (original(text)[0], ())


def speedruns_momentum():
    frontier.RECIPE.momentum = speedrun.muon_momentum


def speedruns_softcap():
    frontier.FrontierGPT.softcap = 30.0


IDEAS = {
    "speedrun": {
        "rotary positions": no_rotary_positions,
        "QK-norm": no_qk_norm,
        "norm after the embedding": no_norm_of_embedding,
        "ReLU squared (GELU instead)": gelu,
        "softcap": no_softcap,
        "Muon (Adam at a tenth of its rate)": adam,
        "momentum warm-up": constant_momentum,
        "constant rate, then linear (cosine instead)": cosine,
    },
    "frontier": {
        "shifted keys": no_shifted_keys,
        "start of the shifted keys as the queries": ordinary_start,
        "rows for stems": no_stems,
        "rows for forms": no_forms,
        "Muon's momentum of 0.80 to 0.85 (speedrun's instead)": speedruns_momentum,
        "softcap of 15 (30 instead)": speedruns_softcap,
    },
}


def train_without(recipe: str, idea: str, argv: list[str]) -> int:
    """`python bench.py without RECIPE IDEA FLAGS`: train_gpt2.py with something else for that idea."""
    IDEAS[recipe][idea]()
    return train_gpt2.main(["--recipe", recipe, *argv])


def commands_of_runs(args) -> dict[str, list[str]]:
    """{what the table calls a run: its command, without seed and folder}."""
    recipes = list(train_gpt2.RECIPES)
    if args.recipe:
        recipes = [args.recipe]

    commands = {}
    for recipe in recipes:
        shape = shape_of(Setting(recipe=recipe, size=args.size))
        tokens = args.batch_size * args.sequence_length
        flags = dict(
            data=args.path, block_size=args.sequence_length, total_batch_size=tokens,
            max_steps=args.steps, val_every=max(1, args.steps // 8), val_tokens=64 * tokens,
            hellaswag_every=0, sample_every=0, checkpoint_every=0, **shape)
        if not train_gpt2.RECIPES[recipe].rates:
            # Config's are for GPT-2's size. This rate was the best of three at 4x256.
            flags.update(max_lr=2e-3, warmup_steps=args.steps // 15)

        words = [f"--{name}={value}" for name, value in flags.items()]
        commands[recipe] = [sys.executable, str(ROOT / "train_gpt2.py"), f"--recipe={recipe}", *words]
        if args.ideas:
            for idea in IDEAS[recipe]:
                without = [sys.executable, str(ROOT / "bench.py"), "without", recipe, idea]
                commands[f"{recipe} without {idea}"] = [*without, *words]
    return commands


def recipes_table(args) -> None:
    if args.ideas and args.recipe not in IDEAS:
        raise UserError(f"--ideas needs a recipe that has some: add --recipe {' or '.join(IDEAS)}")

    commands = commands_of_runs(args)
    curves = {name: [] for name in commands}
    for seed, (name, command) in itertools.product(range(args.turns), commands.items()):
        out = Path(args.out) / re.sub(r"\W+", "_", f"{name} {seed}")
        done = subprocess.run(
            [*command, f"--seed={seed}", f"--out={out}"], capture_output=True, text=True)
        if done.returncode != 0:
            print_error(f"{name}, seed {seed}: {why_it_failed(done)}")
            continue
        [curve] = read_curves(str(out))
        curves[name].append(replace(curve, name=name))
        print(f"{name}, seed {seed}: {curve.losses[-1]:.4f}", flush=True)

    print_table(rows_of_runs(curves))
    print(f"the losses of each run: python bench.py compare {args.out}/*")
    drawn = [of_name[0] for of_name in curves.values() if of_name]
    if args.plot and drawn:
        plot_curves(args.plot, drawn, args.title)


def rows_of_runs(curves: dict[str, list[Curve]]) -> list[dict]:
    """A row for each {name: its curve for every seed}: the mean, also against that of the first row."""
    rows = []
    first_mean = None
    for name, of_name in curves.items():
        if not of_name:
            rows.append({"run": name, "failed": "it ended with the error above"})
            continue
        losses = [curve.losses[-1] for curve in of_name]
        mean = statistics.mean(losses)
        if first_mean is None:
            first_mean = mean
        rows.append({
            "run": name,
            "seeds": len(losses),
            "tokens": of_name[0].tokens[-1],
            "s": statistics.mean(curve.seconds[-1] for curve in of_name),
            "validation loss": f"{mean:.3f}",
            "seeds differ by": f"{max(losses) - min(losses):.3f}",
            "against the first": f"{mean - first_mean:+.3f}",
        })
    return rows


# ----------------------------------------------------------------------------- flags

def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range (expected at least 1)")
    return int(text)


def model_size(text: str) -> str:
    if text not in GPT2_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is unknown (expected {', '.join(GPT2_SIZES)}, or "
                                         "layers x width, such as 4x256)")
    return text


def png_file(text: str) -> str:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text} does not end with .png")
    return text


def add_step_flags(add: Callable) -> None:
    add("--device", default="auto", help="The device: cuda, mps or cpu. 'auto' means the first of "
        "these that is available (default auto).")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="The number format of matrix products. 'auto' means bfloat16 where the hardware has "
        "it (default auto).")
    add("--recipe", default="gpt2", choices=list(train_gpt2.RECIPES), help="The recipe (default gpt2).")
    add("--size", default="gpt2", type=model_size, help="A size of GPT-2, or layers x width (default "
        "gpt2).")
    add("--batch_size", type=at_least_one, help="The number of sequences in a step (default 16 on "
        "CUDA, of profile 64; else 4).")
    add("--sequence_length", type=at_least_one, help="The number of tokens in a sequence (default "
        "1024, or 256 on a CPU).")
    add("--steps", type=at_least_one, help="The number of timed steps per turn (default 20 on CUDA, "
        "else 4; of attention 50).")


def make_parser(command: str) -> FlagParser:
    parser = FlagParser(prog=f"bench.py {command}")
    add = parser.add_argument
    if command in ("ladder", "attention", "peer", "profile"):
        add_step_flags(add)
    if command in ("ladder", "peer", "profile"):
        add("--compile", action="store_true", default=None,
            help="Use torch.compile (default: only on CUDA).")
        add("--no_compile", dest="compile", action="store_false", default=None,
            help="Turn --compile off.")
    if command in ("ladder", "attention", "peer", "data"):
        add("--turns", type=at_least_one, default=2,
            help="How many times everything is measured (default 2).")
    if command == "peer":
        add("path", help="The folder of `git clone https://github.com/karpathy/build-nanogpt`.")
    if command == "data":
        add("path", nargs="?", help="The folder of a clone of build-nanogpt.")
        add("--copies", type=at_least_one, default=47, help="How many copies of input.txt, of 1.1 MB "
            "each, are tokenized (default 47).")
    if command == "compare":
        add("paths", nargs="+", help="The --out folders of runs, and .csv files with the columns "
            "tokens and loss.")
    if command == "recipes":
        add_flags_of_recipes(add)
    if command in ("compare", "recipes"):
        add("--plot", type=png_file, metavar="FILE.png", help="Draw the curves.")
        add("--title", default="", help="The title of the picture.")
    return parser


def add_flags_of_recipes(add: Callable) -> None:
    add("path", help="A folder of shards, made by `python fineweb.py --input YOUR_TEXT --out DATA`.")
    add("--recipe", choices=list(train_gpt2.RECIPES), help="Only this recipe (default: each).")
    add("--ideas", action="store_true", help="Also train --recipe without each of its ideas.")
    add("--size", default="4x256", type=model_size, help="A size of GPT-2, or layers x width "
        "(default 4x256).")
    add("--steps", type=at_least_one, default=300, help="The number of steps (default 300).")
    add("--batch_size", type=at_least_one, default=16, help="The number of sequences in a step "
        "(default 16; frontier's first steps have fewer).")
    add("--sequence_length", type=at_least_one, default=256, help="The number of tokens in a sequence "
        "(default 256).")
    add("--turns", type=at_least_one, default=2, help="How many times each run trains, with another "
        "seed each time (default 2).")
    add("--out", default="log/recipes", help="The folder of the runs, one folder each (default "
        "log/recipes).")


def setting_of(args) -> Setting:
    """The Setting of the flags, with the defaults of the device where there is no flag."""
    # choose_device sets a variable for the allocator of CUDA. Our processes set it again; that of a
    # peer must have the user's own environment.
    before = dict(os.environ)
    device = choose_device(args.device)
    os.environ.clear()
    os.environ.update(before)

    s = Setting(device=device, recipe=args.recipe, size=args.size, B=4, T=1024, steps=4,
                dtype=choose_dtype(args.dtype, device))
    if device == "cpu":
        s.T = 256
    if device.startswith("cuda"):
        s.B = 16
        s.compile = True
        s.warmup = 3
        s.steps = 20
        if args.command == "profile":
            s.B = 64
    if args.command == "attention":
        s.steps = 50                    # one layer takes milliseconds: a median needs more of them

    s.B = args.batch_size or s.B
    s.T = args.sequence_length or s.T
    s.steps = args.steps or s.steps
    if getattr(args, "compile", None) is not None:
        s.compile = args.compile
    return s


def print_machine(s: Setting) -> None:
    threads = ""
    if s.device == "cpu":
        threads = f" ({torch.get_num_threads()} threads)"
    print(f"{device_name(s.device)}{threads}, torch {torch.__version__}, {date.today()}", flush=True)


# {name: the function that prints its table}
COMMANDS = {
    "ladder": ladder,
    "attention": attention_table,
    "profile": profile,
    "peer": peer_table,
    "data": data_table,
    "recipes": recipes_table,
    "compare": compare,
}


def main(argv: list[str] | None = None) -> int | None:
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0].startswith("-"):
        FlagParser(prog="bench.py", description=__doc__).parse_args(argv or ["--help"])

    command, *words = argv
    # Two commands that are not for users: the tables start them, each in a process of its own.
    if command == "work":
        return work(words[0])
    if command == "without":
        return train_without(*words[:2], words[2:])
    if command not in COMMANDS:
        raise UserError(f"bench.py has no command {command}: choose {', '.join(COMMANDS)}")
    args = make_parser(command).parse_args(words)
    args.command = command
    COMMANDS[command](args)


if __name__ == "__main__":
    run_command(main)
