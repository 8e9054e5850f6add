"""Benchmarks of this machine. Each command has flags of its own: python bench.py ladder --help

    python bench.py ladder          a training step, made faster one optimisation at a time
    python bench.py peer PATH       our step beside that of build-nanogpt, of which PATH is a clone
    python bench.py profile         where the time of a training step goes, kernel by kernel
    python bench.py attention       the time and the error of every attention kernel
    python bench.py data [PATH]     the loader and fineweb.py, beside build-nanogpt's fineweb.py
    python bench.py compare OUT ... the losses of runs (--out folders) and of .csv curves
    python bench.py recipes DATA    trains every recipe on a folder of shards, and compares them

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a process of
its own, so that no row inherits memory or compiled code from another. The rows are measured in
turn, --turns times, because the speed of a shared machine changes within minutes. A row shows the
median of its times, the largest peak of its memory and its longest start.
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
from collections.abc import Callable
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
from model import ATTENTION, attention
from presets import GPT2_SIZES
from runtime.checkpoint import Start
from runtime.cli import FlagParser, RunError, UserError, brief_error, print_error, run_command
from runtime.console import clock
from runtime.dataloader import INPUT_TXT, TokenDataset, TrainLoader, micro_batches, open_data
from runtime.hardware import (
    choose_device,
    choose_dtype,
    device_name,
    is_out_of_memory,
    peak_flops,
    peak_memory,
    tune_malloc,
)
from runtime.files import read_text, reading, replace_file
from runtime.plots import new_figure, short_count
from runtime.recipe import BatchSchedule
from runtime.shards import count_tokens, write_shard
from runtime.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent


# --------------------------------------------------------------------- one row, one process

@dataclass
class Setting:
    """What one row of a table is measured with."""
    worker: str = "step"            # a key of WORKERS
    device: str = "cpu"
    recipe: str = "gpt2"
    size: str = "gpt2"              # a key of GPT2_SIZES, or layers x width
    B: int = 16                     # sequences in a step
    T: int = 1024
    dtype: str = "bfloat16"
    tf32: bool = True
    compile: bool = False
    attention: str = "auto"
    vocab_size: int = 50304
    fused: bool = True              # AdamW in one kernel
    loss_in_tiles: bool = True      # where training computes it so
    tune_malloc: bool = True        # on a CPU: freed memory is kept
    warmup: int = 2                 # steps before the timed ones
    steps: int = 10
    peer: str = ""                  # the folder of build-nanogpt


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
    """The last line that a process wrote to stderr, unless a signal killed it."""
    if done.returncode == -9:
        return "killed by SIGKILL, as Linux does where memory runs out"
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0 or not lines:
        return f"exit code {done.returncode}"
    return lines[-1][:200]


def take_turns(run: Callable, jobs: dict, turns: int) -> dict:
    """{name: job} -> {name: what run(job) measured, a dict}, over `turns`.

    Lists of all turns are joined, and of numbers the largest is kept. A job that returned
    {"failed": reason} is left out of the result, and told. RunError if none remains.
    """
    results = {name: {} for name in jobs}
    for name, job in tqdm(turns * list(jobs.items()), "measured", unit=" rows", delay=10):
        if name not in results:
            continue
        found = run(job)
        if "failed" in found:
            tqdm.write(f"not measured: {name}: {found['failed']}")
            del results[name]
            continue

        result = results[name]
        for key, value in found.items():
            if isinstance(value, list):
                result[key] = result.get(key, []) + value
            else:
                result[key] = max(result.get(key, 0), value)
    if not results:
        raise RunError("nothing could be measured")
    return results


# --------------------------------------------------------------------- tables

def print_machine(device: str) -> None:
    threads = ""
    if device == "cpu":
        threads = f" ({torch.get_num_threads()} threads)"
    print(f"{device_name(device)}{threads}, torch {torch.__version__}, {date.today()}", flush=True)


def median_ms(result: dict) -> float:
    return statistics.median(result["seconds"]) * 1e3


def cell_text(value) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def print_table(rows: list[dict]) -> None:
    """Prints rows, {column: value}, as a table in Markdown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns]
    for row in rows:
        lines.append([cell_text(row.get(name)) for name in columns])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])

    print()
    for name, *numbers in lines:
        cells = [name.ljust(widths[0])]
        for number, width in zip(numbers, widths[1:], strict=True):
            cells.append(number.rjust(width))
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


# --------------------------------------------------------------------- our step, and its time

def shape_of(recipe: str, size: str) -> dict:
    """n_layer, n_embd and n_head of a size of GPT-2, or of one such as '4x256'."""
    if size in GPT2_SIZES:
        shape = dict(GPT2_SIZES[size])
    else:
        layers, width = size.split("x")
        shape = {"n_layer": int(layers), "n_embd": int(width)}

    # The heads of the modern recipes are 128 wide: six at GPT-2's size.
    head_width = 64
    if "n_head" in train_gpt2.RECIPES[recipe].defaults:
        head_width = 128
    shape["n_head"] = max(1, shape["n_embd"] // head_width)
    return shape


def random_tokens(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, n, dtype=np.uint16)


def our_step(s: Setting) -> tuple[Callable, torch.nn.Module]:
    """(a function that does one step as train_gpt2.py does it, the model).

    Writes into the current folder, and may change train_gpt2: it is for a process of its own.
    """
    Path("data").mkdir()
    write_shard("data/x_train_000000.npy", random_tokens(20 * s.B * s.T + 1))
    flags = dict(
        data="data", out="out", recipe=s.recipe, vocab_size=s.vocab_size, block_size=s.T,
        total_batch_size=s.B * s.T, batch_size=s.B, device=s.device, dtype=s.dtype, tf32=s.tf32,
        compile=s.compile, attention=s.attention, val_every=0, hellaswag_every=0, sample_every=0,
        checkpoint_every=0, **shape_of(s.recipe, s.size))

    if not s.tune_malloc:
        train_gpt2.device.tune_malloc = lambda: None
    process = train_gpt2.start_process(s.device)
    _, config = train_gpt2.FLAGS.resolve(flags, Start(), process)
    train_gpt2.use_tf32(config, process)
    model = train_gpt2.make_model(config, Start(), process.device)
    state = train_gpt2.make_train_state(config, model, process)
    if not s.loss_in_tiles:
        model.loss_chunk = 0
    for group in state.optimizer.groups():
        if not s.fused and "fused" in group:
            group["fused"] = None           # torch's default for the device

    # Every step has B x T tokens, also of a recipe whose batch grows over the run.
    schedule = BatchSchedule(config.total_batch_size, config.max_steps)
    data = open_data(config)
    loader = TrainLoader(data.train, schedule, s.B, 0, process)
    numbers = itertools.count()

    def step():
        number = next(numbers)
        train_gpt2.set_schedules(number, config, schedule, state)
        train_gpt2.train_step(number, config, process, loader, state)
    return step, state.model


def wait_for(device: str) -> None:
    """Waits until the device has done what it was given. A CPU always has."""
    getattr(torch, device.split(":")[0]).synchronize()


def time_steps(step: Callable, s: Setting) -> tuple[float, list[float]]:
    """Calls step(). Returns the seconds of the first s.warmup calls together, which may compile,
    and of each of the next s.steps."""
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
    C = shape_of(s.recipe, s.size)["n_embd"]
    dtype = getattr(torch, s.dtype)
    x = torch.randn(s.B * s.T, C, device=s.device, dtype=dtype)
    w = torch.randn(C, 4 * C, device=s.device, dtype=dtype)
    _, seconds = time_steps(lambda: x @ w, replace(s, warmup=10, steps=50))
    return 2 * x.numel() * w.size(1) / statistics.median(seconds)


def measure(step: Callable, model: torch.nn.Module, s: Setting) -> dict:
    """Tokens of a step; seconds of each one and of the warm-up; peak memory in bytes; of ours also
    what MFU needs."""
    warmup_seconds, seconds = time_steps(step, s)
    memory = peak_memory(s.device)
    if s.device == "mps":
        memory = torch.mps.driver_allocated_memory()        # what Metal has given

    found = {
        "tokens": s.B * s.T,
        "seconds": seconds,
        "warmup_seconds": warmup_seconds,
        "memory": memory,
    }
    if not s.peer:
        found["flops_per_token"] = model.flops_per_token(s.T)
        found["peak_flops"] = peak_flops(s.device)
        if found["peak_flops"] is None:
            found["peak_flops"] = product_rate(s)
    return found


def measure_step(s: Setting) -> dict:
    step, model = our_step(s)
    return measure(step, model, s)


def step_cells(result: dict) -> dict:
    ms = median_ms(result)
    return {
        "ms per step": ms,
        "tokens/s": result["tokens"] / ms * 1e3,
        "peak GB": result["memory"] / 1e9,
        "start s": result["warmup_seconds"],
    }


# --------------------------------------------------------------------- bench.py ladder

def ladder_rungs(base: Setting) -> dict[str, dict]:
    """{what the table calls a rung: what it changes in the Setting of the one below}, bottom up."""
    on_gpu = base.device.startswith("cuda")
    rungs = {
        "float32, textbook attention, vocabulary 50257, eager, plain AdamW": dict(
            dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257,
            fused=False, loss_in_tiles=False, tune_malloc=False),
    }
    if on_gpu:
        rungs["+ TF32"] = dict(tf32=True)
    if base.dtype != "float32":
        rungs[f"+ {base.dtype} autocast"] = dict(dtype=base.dtype)
    if base.compile:
        rungs["+ torch.compile"] = dict(compile=True)
    if base.device != "mps":                # Metal has its own
        rungs["+ SDPA's flash attention"] = dict(attention="flash")
    rungs["+ vocabulary 50304"] = dict(vocab_size=50304)
    rungs["+ fused AdamW"] = dict(fused=True)
    if base.device == "cpu":
        rungs["+ freed memory kept (mallopt)"] = dict(tune_malloc=True)
    if base.device == "cpu" and not base.compile:           # a compiler fuses logits and loss
        rungs["+ loss in tiles that stay in the cache"] = dict(loss_in_tiles=True)
    rungs["+ attention kernel of choice (auto)"] = dict(attention="auto")
    if on_gpu:
        rungs[f"+ micro-batch {4 * base.B}"] = dict(B=4 * base.B)
    return rungs


def ladder(args) -> None:
    base = setting_of(args)
    print_machine(base.device)
    rungs = ladder_rungs(base)
    lowest = next(iter(rungs.values()))
    highest = replace(base, **lowest)           # the setting of the newest rung that could run
    settings = {}

    def run(name):
        nonlocal highest
        if name not in settings:                # in the first turn
            settings[name] = replace(highest, **rungs[name])
        result = run_in_subprocess(settings[name])
        if "failed" not in result:
            highest = settings[name]
        return result

    results = take_turns(run, {name: name for name in rungs}, args.turns)

    # On a CPU each rung measures the peak, in its own dtype: the highest is that of 16 bits.
    peak = max(result["peak_flops"] for result in results.values())
    print_table(rows_of_ladder(results, peak))
    print(f"MFU is the share of {peak / 1e12:.2f} TFLOP/s (from the data sheet, or measured on the "
          "MLP's products); a gain below 1.1x may be noise")


def rows_of_ladder(results: dict[str, dict], peak_flops: float) -> list[dict]:
    rows = []
    for name, result in results.items():
        row = {"rung": name, **step_cells(result)}
        rows.append(row)
        rate = row["tokens/s"]
        below = rows[max(0, len(rows) - 2)]
        row["MFU"] = f"{rate * result['flops_per_token'] / peak_flops:.1%}"
        row["gain"] = f"{rate / below['tokens/s']:.2f}x"
        row["in all"] = f"{rate / rows[0]['tokens/s']:.2f}x"
    return rows


# --------------------------------------------------------------------- bench.py peer

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


def measure_peer(s: Setting) -> dict:
    """An optimizer step as build-nanogpt's script does it.

    The script's definitions are executed unchanged. Its step is repeated here, without gradient
    accumulation.
    """
    script = load_script(Path(s.peer) / "train_gpt2.py")
    device_type = s.device.split(":")[0]
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")

    shape = shape_of("gpt2", s.size)
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
    return measure(step, raw_model, s)


def peer(args) -> None:
    script = Path(args.clone) / "train_gpt2.py"
    if "\nimport tiktoken" not in script.read_text(encoding="utf-8"):
        raise UserError(f"{script} is not that of build-nanogpt: git clone it from GitHub, and "
                        "name its folder")
    base = setting_of(args)
    print_machine(base.device)

    shipped = replace(base, worker="peer", peer=str(script.parent.resolve()), compile=False)
    settings = {"ours": base, "build-nanogpt, as shipped": shipped}
    if base.compile:
        settings["build-nanogpt, torch.compile"] = replace(shipped, compile=True)
    results = take_turns(run_in_subprocess, settings, args.turns)

    rows = []
    for name, result in results.items():
        row = {"step": name, **step_cells(result)}
        if "ours" in results:
            row["time against ours"] = f"{median_ms(result) / median_ms(results['ours']):.2f}x"
        rows.append(row)
    print_table(rows)


# --------------------------------------------------------------------- bench.py profile

PROFILED_STEPS = 3

# {kind of kernel: what its name holds}. The first kind that fits counts. On a GPU these are names
# of kernels, on a CPU of torch's operators. A Triton kernel is named after all operators that the
# compiler fused into it: one with the loss in it, or with the softcap of the logits (tanh or
# sigmoid), counts as loss, and one that only casts as a cast. The products by which Muon makes
# matrices orthogonal count as matrix products.
KINDS = {
    "loss": r"log_?softmax|nll_?loss|logsumexp|cross_?entropy|tanh|sigmoid|exp2",
    "attention": r"^(?!triton_).*(sdpa|flash|fmha|scaled_dot_product|softmax)",
    "optimizer": r"multi_tensor|adam|_foreach|newton",
    "matrix products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|split_?k|triton_tem_|"
                       r"aten::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn_linear)\b",
    "copies and casts": r"memcpy|memset|copy_kernel|FillFunctor|CatArray|"
                        r"aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_)$|"
                        r"fused(_+(to_copy|copy|clone|t|transpose|permute|(unsafe_)?view))+_\d+$",
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
    """Calls step() within torch's profiler. Returns what kernels_of finds."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)

    # The first profile starts the profiler, which takes seconds: it is thrown away.
    for steps in (1, PROFILED_STEPS):
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps):
                step()
            wait_for(device)
    return kernels_of(profiler.events(), device)


def kernels_of(events: list, device: str) -> dict:
    """{"kernels": {name: [calls, ms]}, "busy_ms": ms in which any of them runs}, for one step.

    On a GPU these are its kernels, on a CPU torch's operators without what they call.
    """
    on_gpu = device.startswith("cuda")
    device_type = DeviceType.CPU
    if on_gpu:
        device_type = DeviceType.CUDA

    kernels = {}
    intervals = []
    for event in events:
        if event.device_type != device_type or event.is_user_annotation:
            continue                            # an annotation spans the kernels inside
        microseconds = event.self_cpu_time_total
        if on_gpu:
            microseconds = event.time_range.elapsed_us()
            intervals.append((event.time_range.start, event.time_range.end))
        calls, ms = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = calls + 1, ms + microseconds / 1e3

    busy_ms = sum(ms for _, ms in kernels.values())
    if on_gpu:
        busy_ms = covered(intervals) / 1e3
    for name, (calls, ms) in kernels.items():
        kernels[name] = calls / PROFILED_STEPS, ms / PROFILED_STEPS
    return {"kernels": kernels, "busy_ms": busy_ms / PROFILED_STEPS}


def measure_profile(s: Setting) -> dict:
    """What `measure` finds without the profiler, and then what profile_steps finds."""
    step, model = our_step(s)
    return measure(step, model, s) | profile_steps(step, s.device)


def profile(args) -> None:
    s = replace(setting_of(args), worker="profile")
    print_machine(s.device)
    how = "eager"
    if s.compile:
        how = "compiled"
    print(f"recipe {s.recipe}, size {s.size}, {s.B} x {s.T} tokens a step, {s.dtype}, {how}")
    result = run_in_subprocess(s)
    if "failed" in result:
        raise RunError(f"the step cannot be measured: {result['failed']}")

    ms = median_ms(result)
    rate = s.B * s.T / ms * 1e3
    mfu = rate * result["flops_per_token"] / result["peak_flops"]
    print(f"{ms:.1f} ms a step without the profiler, {rate:,.0f} tokens/s, MFU {mfu:.1%}, "
          f"peak memory {result['memory'] / 1e9:.2f} GB")
    if not result["kernels"]:
        print("the profiler saw no kernels: it needs CUPTI, and the right to read GPU counters")
        return
    print_table(rows_of_kinds(result["kernels"], ms, result["busy_ms"]))
    print_table(rows_of_kernels(result["kernels"], 20))


def rows_of_kinds(kernels: dict, step_ms: float, busy_ms: float) -> list[dict]:
    """A row for each kind of kernel, and one for the time of the step in which none runs.

    All rows together may be more than the step, where kernels run at the same time.
    """
    ms_of_kind = dict.fromkeys(KINDS, 0.0)
    for name, (_, ms) in kernels.items():
        ms_of_kind[kind_of(name)] += ms
    ms_of_kind["idle (no kernel runs)"] = max(0.0, step_ms - busy_ms)

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
        row = {"kernel": short, "kind": kind_of(name), "calls a step": calls, "ms a step": ms}
        rows.append(row)
    return rows


# --------------------------------------------------------------------- bench.py attention

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
    if s.device == "cpu":
        tune_malloc()
    elif s.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")          # TF32

    model_shape = shape_of(s.recipe, s.size)
    heads = model_shape["n_head"]
    shape = (s.B, s.T, heads, model_shape["n_embd"] // heads)
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=s.device).to(dtype) for _ in range(4)]     # q, k, v, dy
    _, seconds = time_steps(lambda: attention_and_gradients(s.attention, *tensors), s)

    # On the CPU, because Metal has no float64; one sequence is enough.
    tensors = [t[:1] for t in tensors]
    found = attention_and_gradients(s.attention, *tensors)
    exact = attention_and_gradients("naive", *(t.cpu().double() for t in tensors))
    errors = []
    for x, x64 in zip(found, exact, strict=True):
        errors.append(((x.cpu().double() - x64).norm() / x64.norm()).item())
    return {"seconds": seconds, "error_forward": errors[0], "error_backward": max(errors[1:])}


def attention_table(args) -> None:
    base = setting_of(args)
    print_machine(base.device)
    settings = {}
    for kernel in ATTENTION:
        settings[kernel] = replace(base, worker="attention", attention=kernel)
    results = take_turns(run_in_subprocess, settings, args.turns)

    rows = []
    for kernel, result in results.items():
        rows.append({
            "kernel": kernel,
            "forward + backward ms": median_ms(result),
            "error of y": f"{result['error_forward']:.1e}",
            "largest error of dq, dk, dv": f"{result['error_backward']:.1e}",
        })
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; errors are "
          "|x - x64| / |x64|")
    print_table(rows)


# --------------------------------------------------------------------- bench.py data

# This is put before build-nanogpt's fineweb.py, which then runs unchanged. In place of what it
# would ask for, it gets the rows of our file, GPT-2's tokenizer from assets/, and a process for
# every core, where it starts one for half of them. They are forks, which find its functions.
BEFORE_THE_PEERS_SCRIPT = """
import json, multiprocessing, os, sys, types
import tiktoken
sys.path.append({root!r})
from runtime.tokenizer import tokenizer

rows = (json.loads(line) for line in open({text!r}, encoding="utf-8"))
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows)
tiktoken.get_encoding = lambda name: tokenizer()
os.cpu_count = lambda: 2 * len(os.sched_getaffinity(0))
multiprocessing.set_start_method("fork")
"""


def measure_loader(s: Setting) -> dict:
    """Seconds in which one thread reads each batch of B x T tokens, from shards, shuffled."""
    paths = []
    for i in range(4):
        paths.append(Path(f"x_train_{i}.npy"))
        write_shard(paths[-1], random_tokens(4_000_000))
    dataset = TokenDataset(paths, s.T, 1337, True, VOCAB_SIZE)
    batches = micro_batches(dataset, BatchSchedule(s.B * s.T, s.steps), s.B)
    _, seconds = time_steps(lambda: next(batches), s)
    return {"seconds": seconds}


def write_text(path: Path, copies: int) -> None:
    """Copies of input.txt as JSON lines.

    A document is 30 speeches with the number of its copy before them, so that no two are equal.
    """
    speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
    with open(path, "w", encoding="utf-8") as file:
        for i in range(copies):
            for at in range(0, len(speeches), 30):
                text = f"{i} " + "\n\n".join(speeches[at:at + 30])
                file.write(json.dumps({"text": text}) + "\n")


def time_tokenizing(peers_script: str | None, text: Path) -> dict:
    """The seconds of a whole process that turns `text` into shards, and the tokens in these."""
    with tempfile.TemporaryDirectory(dir=text.parent) as out:
        command = [sys.executable, str(ROOT / "fineweb.py"), "--input", str(text), "--out", out]
        if peers_script:
            begin = BEFORE_THE_PEERS_SCRIPT.format(root=str(ROOT), text=str(text))
            script = Path(out) / "pool.py"      # it writes its shards into its own folder
            script.write_text(begin + peers_script, encoding="utf-8")
            command = [sys.executable, str(script)]

        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            return {"failed": why_it_failed(done)}
        tokens = sum(count_tokens(path) for path in Path(out).rglob("*.npy"))
    return {"seconds": [seconds], "tokens": tokens}


def data(args) -> None:
    print_machine("cpu")
    scripts = {"fineweb.py": None}
    if args.clone:
        script = Path(args.clone) / "fineweb.py"
        scripts["build-nanogpt's fineweb.py"] = script.read_text(encoding="utf-8")

    loader = Setting(worker="loader", warmup=10, steps=500)
    [result] = take_turns(run_in_subprocess, {"the loader": loader}, args.turns).values()
    # Not the median, because some batches wait for the next shard.
    seconds = statistics.mean(result["seconds"])
    rate = loader.B * loader.T / seconds / 1e6
    print(f"the loader reads {rate:.0f} million tokens/s from shuffled .npy shards, on one thread")

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_text(text, args.copies)
        megabytes = text.stat().st_size / 1e6
        results = take_turns(lambda script: time_tokenizing(script, text), scripts, args.turns)

    rows = []
    for name, result in results.items():
        seconds = median_ms(result) / 1e3
        rows.append({
            "whole command": name,
            "s": seconds,
            "MB of text/s": megabytes / seconds,
            "million tokens/s": result["tokens"] / 1e6 / seconds,
        })
    print(f"{megabytes:.0f} MB of JSON lines, {args.copies} copies of input.txt")
    print_table(rows)


# --------------------------------------------------------------------- bench.py compare

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
    with reading(path, remedy):
        text = read_text(path)
        if path.name == "metrics.csv":
            text = text[:text.rfind("\n") + 1]      # the last line may not be complete yet
        return parse_curves(source, text)


def parse_curves(source: str, text: str) -> list[Curve]:
    """The curves in the text of a .csv file. ValueError if it is none.

    Its columns are tokens, a loss, and perhaps seconds; without a header they are tokens and loss.
    A column `run` tells several curves apart. A line that begins with # is a comment.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and lines[0][0].isdigit():
        lines.insert(0, "tokens,loss")

    curves = {}
    for row in csv.DictReader(lines, restkey="others", restval="", skipinitialspace=True):
        cells = {name.lower(): cell for name, cell in row.items()}
        loss = [cells[name] for name in LOSS_COLUMNS if cells.get(name)]
        if not loss:
            continue                                # a step without a validation
        name = cells.get("run", source)
        curve = curves.setdefault(name, Curve(name, [], [], []))
        curve.tokens.append(float(cells.get("tokens", "nan")))
        curve.seconds.append(float(cells.get("seconds", "nan")))
        curve.losses.append(float(loss[0]))

    for curve in curves.values():
        grows = (np.diff(curve.tokens) > 0).all()
        if not grows or not np.isfinite(curve.tokens + curve.losses).all():
            raise ValueError(f"{curve.name} has no growing numbers of tokens with a loss for each")
    if not curves:
        raise ValueError("it has no validation loss yet")
    return list(curves.values())


def tokens_to_reach(target: float, curve: Curve) -> float | None:
    """After how many tokens the loss was first at `target`, linear between validations."""
    for i, loss in enumerate(curve.losses):
        if loss <= target:
            before = max(0, i - 1)
            losses = loss, curve.losses[before]
            return np.interp(target, losses, (curve.tokens[i], curve.tokens[before])).item()
    return None


def three_digits(n: float) -> str:
    """'1.23M'."""
    return short_count(float(f"{n:.3g}"))


def curve_row(curve: Curve, first: Curve) -> dict:
    """A curve, and how it stands to the first one: its loss at the newest validation that the first
    one reaches, and when it had the first one's final loss. Linear between validations."""
    row = {"run": curve.name, "tokens": three_digits(curve.tokens[-1]), "time": ""}
    if math.isfinite(curve.seconds[-1]):
        row["time"] = clock(curve.seconds[-1])
    row["val loss"] = f"{curve.losses[-1]:.4f}"
    row["lowest"] = f"{min(curve.losses):.4f}"

    if curve is first:
        return row
    both = [i for i, n in enumerate(curve.tokens) if first.tokens[0] <= n <= first.tokens[-1]]
    if both:
        at = curve.tokens[both[-1]]
        difference = curve.losses[both[-1]] - np.interp(at, first.tokens, first.losses)
        row["against the first"] = f"{difference:+.4f} at {three_digits(at)}"
    reached = tokens_to_reach(first.losses[-1], curve)
    if reached is not None:
        share = reached / first.tokens[-1]
        row["the first's end after"] = f"{three_digits(reached)} ({share:.0%})"
    return row


def show_curves(curves: list[Curve], plot: str | None, title: str) -> None:
    print_table([curve_row(curve, curves[0]) for curve in curves])
    if plot:
        plot_curves(plot, curves, title)


def compare(args) -> None:
    curves = []
    for source in args.curves:
        curves += read_curves(source)
    show_curves(curves, args.plot, args.title)


def plot_curves(path: str, curves: list[Curve], title: str) -> None:
    """Validation loss against tokens, and beside it against the time of training, if it is known.

    A dashed line is the final loss of the first curve: where another curve meets it, one can read
    how many tokens and how much time that one needed.
    """
    # What stands on the x axis of each panel. The .csv file of a curve may have no times.
    x_axes = {"tokens": [curve.tokens for curve in curves]}
    minutes = [np.array(curve.seconds) / 60 for curve in curves]
    if np.isfinite(np.concatenate(minutes)).any():
        x_axes["minutes"] = minutes

    figure = new_figure(figsize=(6 * len(x_axes), 4.5))
    figure.suptitle(title)
    panels = figure.subplots(1, len(x_axes), sharey=True, squeeze=False)[0]
    end = curves[0].losses[-1]
    for panel, (x_label, xs_of_curves) in zip(panels, x_axes.items(), strict=True):
        for curve, xs in zip(curves, xs_of_curves, strict=True):
            panel.plot(xs, curve.losses, marker="o", markersize=3, label=curve.name)
        panel.axhline(end, color="grey", linestyle="--", linewidth=0.8, zorder=0,
                      label=f"{curves[0].name} at its end: {end:.2f}")
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


# --------------------------------------------------------------------- bench.py recipes

def gelu_mlp(self, x):
    return self.c_proj(F.gelu(self.c_fc(x)))


def adam(params, lr, **others):
    return torch.optim.Adam(params, 0.1 * lr, betas=(0.9, 0.95), fused=True)


def cosine(step, progress, config):
    lowest = config.min_lr / config.max_lr
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))


# {recipe: {an idea: (where its name is, the name, what stands there in a run without the idea)}}
IDEAS = {
    "speedrun": {
        "rotary positions": (speedrun, "rotate", lambda x, cos, sin: x),
        "QK-norm": (speedrun, "qk_norm", lambda x: x),
        "ReLU squared (GELU instead)": (speedrun.SpeedrunMLP, "forward", gelu_mlp),
        "softcap": (speedrun.SpeedrunGPT, "softcap", 0.0),
        "Muon (Adam at a tenth of its rate)": (speedrun, "Muon", adam),
        "momentum warm-up": (speedrun.RECIPE, "momentum", lambda progress, config: 0.95),
        "constant rate, then linear (cosine instead)": (speedrun.RECIPE, "lr_scale", cosine),
    },
    "frontier": {
        "shifted keys": (frontier, "first_shifted_head", lambda n_head: n_head),
        "start of the shifted keys as the queries": (
            frontier.FrontierGPT, "init_weights", speedrun.ModernLanguageModel.init_weights),
        "rows for stems and forms": (frontier, "stem_and_form", lambda text: ("", ())),
        "Muon's momentum (speedrun's instead)": (
            frontier.RECIPE, "momentum", speedrun.muon_momentum),
        "softcap of 15 (30 instead)": (frontier.FrontierGPT, "softcap", 30.0),
    },
}


def train_without(recipe: str, idea: str, argv: list[str]) -> int:
    """`python bench.py without RECIPE IDEA FLAGS`: train_gpt2.py without that idea."""
    owner, name, replacement = IDEAS[recipe][idea]
    setattr(owner, name, replacement)
    return train_gpt2.main([f"--recipe={recipe}", *argv])


def commands_of_runs(args) -> dict[str, list[str]]:
    """{what the table calls a run: its command, without seed and folder}."""
    recipes = list(train_gpt2.RECIPES)
    if args.recipe:
        recipes = [args.recipe]
    steps = args.steps
    tokens = args.batch_size * args.sequence_length

    commands = {}
    for recipe in recipes:
        flags = dict(
            data=args.shards, block_size=args.sequence_length, total_batch_size=tokens,
            max_steps=steps, val_every=max(1, steps // 8), val_tokens=64 * tokens,
            hellaswag_every=0, sample_every=0, checkpoint_every=0, **shape_of(recipe, args.size))
        # Config's are for GPT-2's size. This rate was the best of three at 4x256.
        own_rates = train_gpt2.RECIPES[recipe].rates
        if "max_lr" not in own_rates:
            flags["max_lr"] = 2e-3
        if "warmup_steps" not in own_rates:
            flags["warmup_steps"] = steps // 15

        words = [f"--{name}={value}" for name, value in flags.items()]
        script = str(ROOT / "train_gpt2.py")
        commands[recipe] = [sys.executable, script, f"--recipe={recipe}", *words]
        if args.ideas:
            for idea in IDEAS[recipe]:
                without = [sys.executable, str(ROOT / "bench.py"), "without", recipe, idea]
                commands[f"{recipe} without {idea}"] = [*without, *words]
    return commands


def recipes(args) -> None:
    if args.ideas and args.recipe not in IDEAS:
        raise UserError(f"--ideas needs a recipe that has some: add --recipe {' or '.join(IDEAS)}")

    curves = []
    for name, command in commands_of_runs(args).items():
        for seed in range(args.turns):
            name_and_seed = f"{name}, seed {seed}"
            out = str(Path(args.out) / re.sub(r"\W+", "_", name_and_seed))
            print(f"training {name_and_seed} in {out}", flush=True)
            done = subprocess.run(
                [*command, f"--seed={seed}", f"--out={out}"], capture_output=True, text=True)
            if done.returncode != 0:
                print_error(f"{name_and_seed}: {why_it_failed(done)}")
                continue
            [curve] = read_curves(out)
            curves.append(replace(curve, name=name_and_seed))
    if not curves:
        raise RunError("no run has ended well")
    show_curves(curves, args.plot, args.title)


# --------------------------------------------------------------------- the commands and their flags

WORKERS = {
    "step": measure_step,
    "peer": measure_peer,
    "profile": measure_profile,
    "attention": measure_attention,
    "loader": measure_loader,
}

STEP_FLAGS = ["--device", "--dtype", "--recipe", "--size", "--batch_size", "--sequence_length",
              "--steps"]
COMPILE_FLAGS = ["--compile", "--no_compile"]
PLOT_FLAGS = ["--plot", "--title"]

# {command: (the function that prints its table, its flags)}
COMMANDS = {
    "ladder": (ladder, [*STEP_FLAGS, *COMPILE_FLAGS, "--turns"]),
    "peer": (peer, ["clone", *STEP_FLAGS, *COMPILE_FLAGS, "--turns"]),
    "profile": (profile, [*STEP_FLAGS, *COMPILE_FLAGS]),
    "attention": (attention_table, [*STEP_FLAGS, "--turns"]),
    "data": (data, ["clone", "--copies", "--turns"]),
    "compare": (compare, ["curves", *PLOT_FLAGS]),
    "recipes": (recipes, ["shards", "--recipe", "--size", "--batch_size", "--sequence_length",
                          "--steps", "--turns", "--ideas", "--out", *PLOT_FLAGS]),
}
DEFAULTS = {
    "peer": dict(clone="build-nanogpt"),
    "recipes": dict(size="4x256", batch_size=16, sequence_length=256, steps=300),
}


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range (expected at least 1)")
    return int(text)


def model_size(text: str) -> str:
    if text not in GPT2_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is unknown (expected {', '.join(GPT2_SIZES)}, or "
                                         "layers x width, such as 4x256)")
    return text


FLAGS = {
    "clone": dict(nargs="?", help="The folder of a clone of build-nanogpt (default of peer: "
                  "build-nanogpt)."),
    "curves": dict(nargs="+", help="An --out folder of a run, or a .csv file with the columns "
                   "tokens and loss."),
    "shards": dict(help="A folder of shards, as `python fineweb.py --input YOUR_TEXT --out DATA` "
                   "makes it."),
    "--device": dict(default="auto", help="The device: cuda, mps or cpu. 'auto' means the first of "
                     "these that is available (default auto)."),
    "--dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                    help="The number format of matrix products. 'auto' means bfloat16 where the "
                    "hardware has it (default auto)."),
    "--recipe": dict(choices=list(train_gpt2.RECIPES), help="The recipe (default gpt2, or of "
                     "recipes each)."),
    "--size": dict(type=model_size, help="A size of GPT-2, or layers x width (default gpt2, or of "
                   "recipes 4x256)."),
    "--batch_size": dict(type=at_least_one, help="The number of sequences in a step (default 4, on "
                         "CUDA 16, of profile on CUDA 64, of recipes 16)."),
    "--sequence_length": dict(type=at_least_one, help="The number of tokens in a sequence (default "
                              "1024; on a CPU, and of recipes, 256)."),
    "--steps": dict(type=at_least_one, help="The number of timed steps in a turn (default 4, on "
                    "CUDA 20, of attention 50), or of recipes the steps of a run (default 300)."),
    "--turns": dict(type=at_least_one, default=2, help="How many times everything is measured, or "
                    "of recipes trained, with another seed each time (default 2)."),
    "--compile": dict(action="store_true", default=None,
                      help="Use torch.compile (default: only on CUDA)."),
    "--no_compile": dict(action="store_false", default=None, dest="compile",
                         help="Do not use torch.compile."),
    "--copies": dict(type=at_least_one, default=47, help="How many copies of input.txt, of 1.1 MB "
                     "each, are tokenized (default 47)."),
    "--ideas": dict(action="store_true", help="Also train --recipe without each of its ideas."),
    "--out": dict(default="log/recipes", help="The folder of the runs, each in a folder of its own "
                  "(default log/recipes)."),
    "--plot": dict(metavar="FILE.png", help="Draw the curves."),
    "--title": dict(default="", help="The title of the picture."),
}


def parse_args(command: str, words: list[str]) -> argparse.Namespace:
    parser = FlagParser(prog=f"bench.py {command}")
    _, names = COMMANDS[command]
    for name in names:
        parser.add_argument(name, **FLAGS[name])
    parser.set_defaults(command=command, **DEFAULTS.get(command, {}))
    return parser.parse_args(words)


def setting_of(args) -> Setting:
    """The Setting of the flags, with the defaults of the device where there is no flag."""
    # choose_device sets a variable for the allocator of CUDA. Our processes set it again; that of a
    # peer must have the user's own environment.
    before = dict(os.environ)
    device = choose_device(args.device)
    os.environ.clear()
    os.environ.update(before)

    s = Setting(device=device, B=4, T=1024, steps=4, dtype=choose_dtype(args.dtype, device))
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

    given = vars(args)
    fields = {"recipe": "recipe", "size": "size", "batch_size": "B", "sequence_length": "T",
              "steps": "steps", "compile": "compile"}
    for name, field in fields.items():
        if given.get(name) is not None:
            setattr(s, field, given[name])
    return s


def main(argv: list[str] | None = None) -> int | None:
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        argv = ["--help"]
    if argv[0].startswith("-"):
        FlagParser(prog="bench.py", description=__doc__).parse_args(argv)

    command, *words = argv
    # Two commands that are not for users: the tables start them, each in a process of its own.
    if command == "work":
        return work(words[0])
    if command == "without":
        return train_without(words[0], words[1], words[2:])
    if command not in COMMANDS:
        raise UserError(f"bench.py has no command {command}: choose {', '.join(COMMANDS)}")

    print_result, _ = COMMANDS[command]
    print_result(parse_args(command, words))


if __name__ == "__main__":
    run_command(main)
