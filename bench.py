"""Measures what the README claims, on the machine at hand: one table a command.

    python bench.py ladder          from fp32 and textbook attention to the step that trains, rung by rung
    python bench.py attention       every attention kernel: time, memory, and error against float64
    python bench.py memory          memory a sequence, and the largest micro-batch, by attention kernel and loss
    python bench.py data            tokens/s of the loader, and of fineweb.py by its workers
    python bench.py hellaswag       HellaSwag in batches against one example a forward
    python bench.py scaling         step time by processes; on paper: model sizes, and what GPUs must exchange
    python bench.py peer PATH       our step and that of a clone of build-nanogpt, in turn
    python bench.py recipes DATA    both recipes on a folder of shards: validation loss against tokens; what each idea brings

All that is timed is the code that trains (train_gpt2.train_step): there is no loop of its own here. Each line is measured in
a process of its own, so that none inherits another's memory or compiled code, and the whole table --turns times over:
shared machines change their speed within minutes, and medians over turns do not follow.
"""
import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

import fineweb
import hellaswag
import train_gpt2
from fineweb import FlagParser, TokenLoader, UserError, Windows, replace_file, run_command, whole_number, write_shard
from model import (ATTENTION, GPT, GPT2_SIZES, GPTConfig, attention, check_attention, choose_device, choose_dtype,
                   is_out_of_memory, look_back, make_autocast)

BENCH = Path(__file__).resolve()
GB = 1e9
SIZES = GPT2_SIZES | {"small": dict(n_layer=4, n_head=4, n_embd=256),       # to try a command, and for what a CPU can train
                      "tiny": dict(n_layer=4, n_head=2, n_embd=128)}


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
    keep_memory: bool = True        # glibc keeps freed memory
    warmup: int = 2
    steps: int = 10
    processes: int = 1
    memory_gb: float = 0            # what the GPU pretends to have; 0: all
    peer: str = ""                  # folder of build-nanogpt's train_gpt2.py


# -----------------------------------------------------------------------------
# inside a process of its own: what is measured, as a dict

def seconds_of(step, s):
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
    begun = time.perf_counter() - start
    stamps = [stamp()]
    for _ in range(s.steps):
        step()
        stamps.append(stamp())
    if cuda:
        torch.cuda.synchronize()
    return begun, [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in zip(stamps, stamps[1:], strict=False)]


def peak_memory(device):
    """Most bytes in use so far: torch's on the GPU, the whole process's on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def random_tokens(n):
    return np.random.default_rng(0).integers(0, fineweb.VOCAB_SIZE, n, dtype=np.uint16)


def shape_of(s):
    """n_layer, n_head, n_embd."""
    heads = train_gpt2.RECIPES[s.recipe].defaults.get("n_head")
    return SIZES[s.size] | ({"n_head": heads} if heads and s.size == "gpt2" else {})


class PlainAdamW(torch.optim.AdamW):
    """torch's default for the device, which cannot pass over a step that is not finite."""

    def step(self, closure=None):
        self.found_inf = None
        return super().step(closure)


def our_step(s):
    """(a function that does one optimizer step of setting `s` as train_gpt2.py does it, the model)."""
    config = train_gpt2.Config(**train_gpt2.RECIPES[s.recipe].defaults | shape_of(s) | dict(
        recipe=s.recipe, total_batch_size=s.B * s.T * s.processes, batch_size=str(s.B), sequence_length=s.T, block_size=s.T,
        vocab_size=s.vocab_size, device=s.device, dtype=s.dtype, tf32=s.tf32, compile=s.compile, attention=s.attention,
        loss_chunk=s.loss_chunk))
    if not s.keep_memory:
        train_gpt2.keep_freed_memory = lambda: None
    process = train_gpt2.setup_process(config)
    torch.manual_seed(0)
    config = train_gpt2.resolve(config, process.device)
    model = train_gpt2.place_model(config, train_gpt2.RECIPES[s.recipe].model(config), process.device)
    state = train_gpt2.make_state(config, model, None, None, process)
    if not s.fused:
        state.optimizers = [PlainAdamW([{name: g[name] for name in ("params", "lr", "weight_decay")}
                                        for g in optimizer.param_groups], betas=(0.9, 0.95))
                            if isinstance(optimizer, torch.optim.Adam) else optimizer for optimizer in state.optimizers]
    wrapped = train_gpt2.wrap_model(train_gpt2.compile_model(config, model, process), process)
    windows = Windows([random_tokens(20 * s.B * s.T * s.processes + 1)], s.T)
    loader = TokenLoader(windows, config.total_batch_size, s.B, process.rank, process.world_size, process.device)
    loader.start(0)
    autocast = make_autocast(process.device, s.dtype)
    return lambda: train_gpt2.train_step(wrapped, state, loader, autocast, config.grad_clip, process), model


def peers_step(s):
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
    raw = script.GPT(script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **SIZES[s.size])).to(s.device)
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


def matmul_seconds(s, repeats=5):
    """[seconds] of the matrix products of a step and nothing else: of the linear layers and the head (2 N C FLOPs a weight),
    and of attention (6 of 2 B T^2 C a layer), forward and backward, in the step's dtype. Each layer has weights of its own,
    as in the step, so that they do not come from the cache."""
    layers, heads, C = (shape_of(s)[name] for name in ("n_layer", "n_head", "n_embd"))
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
    return seconds_of(products, replace(s, warmup=2, steps=repeats))[1]


def measure_step(s):
    step, model = peers_step(s) if s.peer else our_step(s)
    if s.memory_gb:
        gpu = int(s.device.partition(":")[2] or 0)
        fraction = s.memory_gb * GB / torch.cuda.mem_get_info(gpu)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), gpu)
    begun, seconds = seconds_of(step, s)
    result = {"seconds": seconds, "begun": begun, "memory": peak_memory(s.device)}
    if not s.peer:
        result |= {"flops_per_token": model.flops_per_token(s.T), "peak_flops": train_gpt2.peak_flops(s.device)}
    return result


def measure_matmul(s):
    train_gpt2.setup_process(train_gpt2.Config(device=s.device, tf32=s.tf32))
    return {"seconds": matmul_seconds(s)}


def resident():
    """(bytes of this process in memory, the most since the last call)."""
    status = Path("/proc/self/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("VmRSS", "VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")           # begins a new peak
    return now, most


def measure_attention(s):
    """Time and memory of forward and backward, and the relative error of output and gradients against float64."""
    heads, hs = shape_of(s)["n_head"], shape_of(s)["n_embd"] // shape_of(s)["n_head"]
    process = train_gpt2.setup_process(train_gpt2.Config(device=s.device))
    dtype, cuda = getattr(torch, s.dtype), s.device.startswith("cuda")
    torch.manual_seed(0)

    def inputs(B):
        return [torch.randn(B, s.T, heads, hs, device=process.device).to(dtype).transpose(1, 2) for _ in range(4)]

    def mask_for(B, T):
        """For flex: one document, and a window as long as it is, which is the causal mask. A model makes it once a forward."""
        tokens, window = torch.zeros(B, T, dtype=torch.int64, device=process.device), torch.tensor(T, device=process.device)
        return look_back(tokens, T, window, as_blocks=True) if s.attention == "flex" else None

    def forward_and_backward(q, k, v, g, kernel, mask=None):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        y = attention(q, k, v, kernel, mask)
        y.backward(g)
        return y.detach(), q.grad, k.grad, v.grad

    forward_and_backward(*(t[:, :, :64] for t in inputs(1)), s.attention, mask_for(1, 64))         # loads libraries
    q, k, v, g = inputs(s.B)
    mask = mask_for(s.B, s.T)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else resident()[0]
    forward_and_backward(q, k, v, g, s.attention, mask)
    after = torch.cuda.max_memory_allocated() if cuda else resident()[1]
    _, seconds = seconds_of(lambda: forward_and_backward(q, k, v, g, s.attention, mask), s)
    small = inputs(1)
    found = forward_and_backward(*small, s.attention, mask_for(1, s.T))
    expected = forward_and_backward(*(t.double() for t in small), "naive")
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    return {"seconds": seconds, "memory": after - before, "error_forward": errors[0], "error_backward": max(errors[1:])}


def made_up_examples(n):
    """HellaSwag's form and about its lengths (contexts of 15 to 80 words, endings of 5 to 30), from input.txt."""
    rng = np.random.default_rng(0)
    words = train_gpt2.INPUT_TXT.read_text(encoding="utf-8").split()

    def some(low, high):
        start = rng.integers(len(words) - high)
        return " ".join(words[start:start + rng.integers(low, high)])
    return [{"ctx": some(15, 80), "endings": [some(5, 30) for _ in range(4)], "label": int(rng.integers(4))} for _ in range(n)]


def measure_hellaswag(s):
    """Seconds of HellaSwag over s.steps examples in forwards of s.B rows."""
    process = train_gpt2.setup_process(train_gpt2.Config(device=s.device))
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, s.vocab_size, **SIZES[s.size])).to(process.device)
    batches = hellaswag.make_batches(made_up_examples(s.steps), 1024, s.B)
    autocast = make_autocast(process.device, s.dtype)
    counts = []

    def evaluate():
        counts[:] = hellaswag.evaluate(model, batches, process.device, autocast)
    _, seconds = seconds_of(evaluate, replace(s, warmup=1, steps=3))
    return {"seconds": seconds, "correct": int(counts[0])}


def measure_loader(s):
    """Tokens/s of TokenLoader on one thread over one epoch of four shards of odd lengths, their edges and hashes included."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"x_train_{i}.{s.size}" for i in range(4)]
        for i, path in enumerate(shards):
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
        windows = Windows(shards, s.T, 1337, s.recipe == "shuffled", fineweb.VOCAB_SIZE)
        loader = TokenLoader(windows, s.B * s.T, s.B)
        rates = []
        for epoch in range(s.steps):
            start, steps = time.perf_counter(), windows.total // s.B
            for step in range(steps * epoch, steps * (epoch + 1)):
                fineweb.to_device(loader.rows(step, 0), "cpu")
            rates.append(steps * s.B * s.T / (time.perf_counter() - start))
    return {"rates": rates}


WORKERS = {"step": measure_step, "matmul": measure_matmul, "attention": measure_attention, "hellaswag": measure_hellaswag,
           "loader": measure_loader}


def work(setting):
    """What `python bench.py work JSON` does: prints the measured dict as its last line. Of several processes the first prints
    it, and any that fails: its exit code lets torchrun end the others, which would wait for it inside a collective."""
    s = Setting(**json.loads(setting))
    try:
        result = WORKERS[s.what](s)
    except Exception as error:
        if is_out_of_memory(error):
            result = {"failed": "out of memory"}
        else:
            traceback.print_exc()
            result = {"failed": (str(error).strip() or repr(error)).split("\n")[-1][:200]}
    if "failed" in result or int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit("failed" in result)            # without waiting for the loader's thread and the other processes


def in_own_process(s):
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


# -----------------------------------------------------------------------------
# the tables

def measure(settings, turns):
    """One dict a setting: in turn, `turns` times over; lists grow, of numbers the largest counts."""
    merged = [{} for _ in settings]
    for turn in range(turns):
        for i, (s, result) in enumerate(zip(settings, merged, strict=True)):
            if sys.stderr.isatty():
                print(f"\r{turn * len(settings) + i + 1} of {turns * len(settings)} ...", end="", file=sys.stderr, flush=True)
            if "failed" not in result:
                for name, value in in_own_process(s).items():
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


def rungs(base, compiles):
    """(name, setting, None), or (name, None, why it is left out on this device), each rung with those before it."""
    cuda = base.device.startswith("cuda")
    s = replace(base, dtype="float32", tf32=not cuda, attention="naive", vocab_size=50257, fused=False,
                loss_chunk=-1 if cuda else 0, keep_memory=cuda)
    yield "float32, textbook attention, vocabulary 50257, eager, plain AdamW", s, None
    if cuda:
        s = replace(s, tf32=True)
    yield "+ TF32", *((s, None) if cuda else (None, "TF32 is a format of NVIDIA's GPUs"))
    s = replace(s, dtype=base.dtype)
    yield (f"+ {base.dtype} autocast", *((s, None) if base.dtype != "float32" else (None, "no 16-bit products in this hardware")))
    if compiles:
        s = replace(s, compile=True)
    yield "+ torch.compile", *((s, None) if compiles else (None, "on a CPU by --compile only"))
    s = replace(s, attention="flash")
    yield "+ SDPA's flash attention", s, None
    s = replace(s, vocab_size=50304)
    yield "+ vocabulary 50304", s, None
    s = replace(s, fused=True)
    yield "+ fused AdamW", s, None
    if not cuda:
        s = replace(s, keep_memory=True)
        yield "+ freed memory kept (mallopt)", s, None
        s = replace(s, loss_chunk=-1)
        yield "+ loss in tiles that stay in the cache", s, None
    s = replace(s, attention="auto")
    yield "+ attention kernel of choice (auto)", s, None
    s = replace(s, B=4 * s.B)
    yield f"+ micro-batch {s.B}", *((s, None) if cuda else (None, "1,024 tokens keep a CPU busy"))


def ladder(args, base):
    walked = list(rungs(base, base.compile))
    measured = [(name, s) for name, s, _ in walked if s]
    results = measure([s for _, s in measured], args.turns)
    bounds = measure([replace(s, what="matmul") for _, s in measured[-1:]], args.turns)
    rows, first, before = [], None, None
    for (name, s), result in zip(measured, results, strict=True):
        if "failed" in result:
            rows.append({"rung": f"{name}: {result['failed']}"})
            continue
        rate = s.B * s.T / statistics.median(result["seconds"])
        peak = result["peak_flops"]
        rows.append({"rung": name, "ms a step": median_ms(result), "tokens/s": rate,
                     "MFU": f"{rate * result['flops_per_token'] / peak:.1%}" if peak else "n/a",
                     "peak GB": result["memory"] / GB, "start s": result["begun"],
                     "gain": f"{rate / (before or rate):.2f}x", "in all": f"{rate / (first or rate):.2f}x"})
        first, before = first or rate, rate
    print_table(rows)
    left_out = [f"{name[2:]} ({why})" for name, s, why in walked if not s]
    if left_out:
        print("left out: " + "; ".join(left_out))
    if "failed" not in results[-1] and "failed" not in bounds[0]:
        share = median_ms(bounds[0]) / median_ms(results[-1])
        print(f"the matrix products of the last rung's step alone take {median_ms(bounds[0]):,.0f} ms: it runs at {share:.0%} of "
              f"what they allow")
    if args.plot:
        plot_ladder(args.plot, rows, machine(base.device))
    return rows


def plot_ladder(path, rows, title):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = [row for row in rows if isinstance(row.get("tokens/s"), float)][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    bars = axes.barh([row["rung"] for row in rows], [row["tokens/s"] for row in rows], color="#4878a8")
    axes.bar_label(bars, [f"{row['tokens/s']:,.0f} ({row['in all']})" for row in rows], padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("tokens/s")
    axes.set_title(f"GPT-2 124M, {title}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


def kernels_here(base):
    """(kernels that run, ["name (reason)"] of those that do not)."""
    here, missing = [], []
    for kernel in ATTENTION:
        try:
            check_attention(kernel, base.device, getattr(torch, base.dtype), 64, masked=kernel == "flex")
            here.append(kernel)
        except UserError as error:
            missing.append(f"{kernel} ({str(error).split('(', 1)[-1].rsplit(')', 1)[0].split('. ')[0]})")
    return here, missing


def attention_table(args, base):
    here, missing = kernels_here(base)
    results = measure([replace(base, what="attention", attention=kernel) for kernel in here], args.turns)
    rows = [{"kernel": kernel, "forward + backward ms": median_ms(r), "memory MB": r["memory"] / 1e6,
             "error of y": f"{r['error_forward']:.1e}", "largest error of dq, dk, dv": f"{r['error_backward']:.1e}"}
            for kernel, r in zip(here, results, strict=True) if "failed" not in r]
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; errors are |x - x64| / |x64| against float64")
    print_table(rows)
    if missing:
        print("not on this machine: " + "; ".join(missing))
    return rows


def memory_table(args, base):
    """Two sizes give bytes a sequence and the rest; on a GPU the largest micro-batch is then tried in --memory_gb."""
    cuda = base.device.startswith("cuda")
    here, missing = kernels_here(base)
    here = [kernel for kernel in here if kernel not in ("auto", "flex")]        # the one is one of the others, the other masks
    settings = [replace(base, attention=kernel, loss_chunk=chunk, warmup=1, steps=1)
                for kernel in here for chunk in (0, 8192 if cuda else 2048)]
    small, large = (measure([replace(s, B=B) for s in settings], 1) for B in (base.B, 2 * base.B))
    gigabytes = sorted({8, 12, 24, 80, args.memory_gb})
    rows = []
    for s, a, b in zip(settings, small, large, strict=True):
        row = {"attention": s.attention, "logits in memory": f"{s.loss_chunk:,} tokens" if s.loss_chunk else "all"}
        if "failed" in a or "failed" in b:
            rows.append(row | {f"GB at {base.B}": a.get("failed") or b.get("failed")})
            continue
        fits = {g: largest_fit(a["memory"], b["memory"], base.B, g)[1] for g in gigabytes}
        if cuda and args.memory_gb <= torch.cuda.mem_get_info()[1] / GB:
            fits[args.memory_gb] = tried(s, fits[args.memory_gb], args.memory_gb)
        each, _ = largest_fit(a["memory"], b["memory"], base.B, 0)
        rows.append(row | {f"GB at {base.B}": a["memory"] / GB, f"at {2 * base.B}": b["memory"] / GB,
                           "MB a sequence": each / 1e6} | {f"fit {g:g} GB": n for g, n in fits.items()})
    print(f"peak memory, and sequences of {base.T} tokens that fit, {base.size}, {base.dtype}, "
          f"{'torch.compile' if base.compile else 'eager'}; measured at micro-batches {base.B} and {2 * base.B}, the rest "
          f"follows from the two{f', but {args.memory_gb:g} GB was tried' if cuda else ''}")
    print_table(rows)
    if missing:
        print("not on this machine: " + "; ".join(missing))
    return rows


def largest_fit(memory, memory_of_twice, B, gigabytes):
    """(bytes a sequence, the largest micro-batch in `gigabytes`) from the peaks of micro-batches B and 2 B."""
    each = max(1.0, (memory_of_twice - memory) / B)
    return each, max(0, int(B + (gigabytes * GB - memory) / each))


def tried(s, B, memory_gb):
    """The largest micro-batch not above about `B` that runs where the GPU has `memory_gb`."""
    while B > 0 and (failed := in_own_process(replace(s, B=B, memory_gb=memory_gb)).get("failed")):
        if failed != "out of memory":
            return failed
        B = min(B - 1, int(0.97 * B))
    return B


def data_table(args, base):
    """The loader by file format and order; fineweb.py on input.txt's speeches, 30 times over, by workers."""
    kinds = [("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled")]
    results = measure([replace(base, what="loader", size=kind, recipe=order, B=16, T=1024, steps=3) for kind, order in kinds],
                      args.turns)
    rows = [{"what": f"loader, one thread: .{kind} {order}", "million tokens/s": statistics.median(result["rates"]) / 1e6}
            for (kind, order), result in zip(kinds, results, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        speeches = train_gpt2.INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
        documents = ["\n\n".join(speeches[i:i + 30]) for i in range(0, len(speeches), 30)]
        text.write_text("".join(json.dumps({"text": f"{i} {d}"}) + "\n" for i in range(30) for d in documents))
        workers = sorted({1, 2, os.cpu_count() or 1})
        seconds = {n: [] for n in workers}
        for turn in range(args.turns):
            for n in workers:
                start = time.perf_counter()
                subprocess.run([sys.executable, str(BENCH.with_name("fineweb.py")), "--input", str(text), "--workers", str(n),
                                "--out", str(Path(folder) / f"out{n}_{turn}")], check=True, capture_output=True)
                seconds[n].append(time.perf_counter() - start)
        tokens = sum(shard["tokens"] for shard in json.loads((Path(folder) / "out1_0/manifest.json").read_text())["shards"])
    rows += [{"what": f"fineweb.py, {n} worker(s), {tokens / 1e6:.1f} million tokens, whole process",
              "million tokens/s": tokens / statistics.median(seconds[n]) / 1e6} for n in workers]
    print_table(rows)
    return rows


def hellaswag_table(args, base):
    n = args.steps or (2000 if base.device.startswith("cuda") else 100)
    widths = (4, 16, 32, 64, 128)
    results = measure([replace(base, what="hellaswag", B=B, steps=n, size=args.size or "small") for B in widths], args.turns)
    alone = median_ms(results[0])
    rows = [{"rows a forward": B, "examples/s": n / median_ms(r) * 1e3, "gain": f"{alone / median_ms(r):.2f}x",
             "10,042 examples, s": 10042 / n * median_ms(r) / 1e3} for B, r in zip(widths, results, strict=True)]
    print(f"{n} made-up examples of HellaSwag's lengths, model {args.size or 'small (4 layers of width 256)'}, {base.dtype}")
    print_table(rows)
    return rows


def scaling_table(args, base):
    """Measured: the same micro-batch on more processes. On paper: sizes, and the exchange of gradients."""
    counts = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if base.device.startswith("cuda") else os.cpu_count())]
    results = measure([replace(base, processes=n) for n in counts], args.turns)
    rows, alone = [], None
    for n, r in zip(counts, results, strict=True):
        if "failed" in r:
            rows.append({"processes": f"{n}: {r['failed']}"})
            continue
        rate = n * base.B * base.T / statistics.median(r["seconds"])
        alone = rate if n == 1 else alone
        rows.append({"processes": n, "tokens a step": n * base.B * base.T, "ms a step": median_ms(r), "tokens/s": rate,
                     "against one": f"{rate / alone:.2f}x" if alone else None})
    print_table(rows)
    paper = []
    for name, shape in GPT2_SIZES.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(1024, 50304, **shape))
        parameters, flops = sum(p.numel() for p in model.parameters()), model.flops_per_token(1024)
        tokens = 0.4 * 989e12 / flops
        ring = 2 * 7 / 8 * 4 * parameters                   # bytes each of 8 GPUs sends a step, fp32 gradients
        paper.append({"on paper": name, "parameters": parameters, "GFLOP a token": flops / GB, "state GB": 16 * parameters / GB,
                      "tokens/s a GPU": tokens, "ms of 65,536 tokens": 65536 / tokens * 1e3, "GB sent a GPU": ring / GB,
                      "ms at 450 GB/s": ring / 450e9 * 1e3, "ms at 50 GB/s": ring / 50e9 * 1e3})
    print("state: weights, gradients, two moments in fp32. Tokens/s: at 40% of an H100's 989 TFLOP/s. Sent: a ring all-reduce "
          "over 8 GPUs, by NVLink (450 GB/s) or by a 400 Gb/s network; DDP sends while the backward goes on")
    print_table(paper)
    return rows + paper


def peer_table(args, base):
    if not args.path:
        raise UserError("bench.py peer needs the path of a clone of build-nanogpt: git clone it, and give its folder")
    if not (Path(args.path) / "train_gpt2.py").is_file():
        raise UserError(f"{args.path}/train_gpt2.py is not there: give the folder of a clone of build-nanogpt")
    path = str(Path(args.path).resolve())
    contenders = {"build-nanogpt, as shipped": replace(base, peer=path, compile=False),
                  "build-nanogpt, torch.compile": replace(base, peer=path, compile=True), "ours, as shipped": base}
    results = measure(list(contenders.values()), args.turns)
    bound = measure([replace(base, what="matmul")], args.turns)[0]
    ours = median_ms(results[-1])
    rows = [{"step": name, "ms": median_ms(r), "tokens/s": base.B * base.T / median_ms(r) * 1e3, "peak GB": r["memory"] / GB,
             "start s": r["begun"], "time against ours": f"{median_ms(r) / ours:.2f}x"}
            for (name, r) in zip(contenders, results, strict=True) if "failed" not in r]
    rows.append({"step": "its matrix products alone", "ms": median_ms(bound),
                 "tokens/s": base.B * base.T / median_ms(bound) * 1e3, "time against ours": f"{median_ms(bound) / ours:.2f}x"})
    print_table(rows)
    return rows


# -----------------------------------------------------------------------------
# what the recipes learn: whole runs of train_gpt2.py on real text

# Each idea of the speedrun recipe is a line of the code. To measure it, copies of the scripts train with another line there.
IDEAS = {
    "rotary positions (none instead)": ("model.py", "rotary = angles.cos().to(dtype), angles.sin().to(dtype)",
                                        "rotary = torch.ones_like(angles).to(dtype), torch.zeros_like(angles).to(dtype)"),
    "QK-norm": ("model.py", "q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)",
                "q, k = rotate(q, *rotary), rotate(k, *rotary)"),
    "value residual": ("model.py", "v = (1 - self.lamb) * v + self.lamb * v1", "v = v + 0 * self.lamb"),
    "embedding shortcut x0": ("model.py", "x = self.lambdas[0] * x + self.lambdas[1] * x0", "x = self.lambdas[0] * x"),
    "ReLU squared (GELU instead)": ("model.py", "F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))"),
    "projections and head start at zero (normal, 0.02)": (
        "model.py", """                p.zero_()
            elif name.endswith("wte.weight"):""", """                p.normal_(0.0, 0.02)
            elif name.endswith("wte.weight"):"""),
    "norm after the embedding": ("model.py", "x = x0 = norm(self.transformer.wte(idx).to(dtype))",
                                 "x = x0 = self.transformer.wte(idx).to(dtype)"),
    "softcap": ("model.py", "softcap = 30.0", "softcap = 0.0"),
    "Muon (Adam at a tenth of its rate)": (
        "model.py", """Muon([(n, p) for n, p in blocks if p.dim() == 2], max_lr, weight_decay=weight_decay,
                           dtype=dtype)""",
        "torch.optim.Adam([(n, p) for n, p in blocks if p.dim() == 2], 0.1 * max_lr, betas=(0.9, 0.95), fused=True)"),
    "momentum warm-up": ("train_gpt2.py", "return 0.85 + 0.10 * min(1.0, step / (0.154 * config.max_steps))", "return 0.95"),
    "constant rate, then linear (cosine instead)": ("train_gpt2.py", "schedule=trapezoid,", "schedule=warmup_cosine,"),
    "head's rate by width (0.002 instead)": ("model.py", "0.1 * max_lr * 768 / self.config.n_embd", "0.1 * max_lr"),
}


def with_line(idea):
    """The text of the idea's file without it. The line must be there exactly once."""
    file, line, instead = IDEAS[idea]
    text = BENCH.with_name(file).read_text(encoding="utf-8")
    assert text.count(line) == 1, f"{idea}: {file} holds its line {text.count(line)} times"
    return file, text.replace(line, instead)


def validation_curve(flags, idea=None, threads=None):
    """{tokens: validation loss} of a run of train_gpt2.py with these flags, without `idea`; nan from where it was not finite."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        shutil.copytree(BENCH.with_name("assets"), folder / "assets")
        if idea:
            file, text = with_line(idea)
            (folder / file).write_text(text, encoding="utf-8")
        command = [sys.executable, str(folder / "train_gpt2.py"), *map(str, flags), "--out", str(folder / "log")]
        result = subprocess.run(command, capture_output=True, text=True,
                                env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
        diverged = "gradient norm" in result.stderr             # the one line of a loss that is not finite
        if result.returncode and not diverged:
            raise UserError(result.stderr.strip().split("\n")[-1])
        losses = {step: value for step, kind, value in train_gpt2.read_log(folder / "log" / "log.txt") if kind == "val"}
        names = "--val_every", "--max_steps", "--total_batch_size"
        every, steps, tokens = (int(flags[flags.index(name) + 1]) for name in names)
        return {step * tokens: losses.get(step, math.nan) for step in (*range(0, steps, every), steps)}


def recipes_table(args, base):
    """The gpt2 recipe at three rates, the best of them against speedrun in a third of the steps, and speedrun without each of
    its ideas. A CPU of n cores makes n runs at a time, of a thread each."""
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    cuda, shape = base.device.startswith("cuda"), SIZES[args.size or "small"]
    steps, tokens = args.steps or 300, (args.batch_size or 16) * base.T
    if steps % 12:
        raise UserError(f"--steps {steps}: give a multiple of 12, of which speedrun then takes a third")
    common = ["--data", args.path, "--n_layer", shape["n_layer"], "--n_embd", shape["n_embd"], "--block_size", base.T,
              "--total_batch_size", tokens, "--batch_size", args.batch_size or "auto", "--val_tokens", 32768,
              "--val_every", steps // 12, "--device", base.device, "--dtype", base.dtype, "--hellaswag_every", 0,
              "--sample_every", 0, "--checkpoint_every", 0, "--resume", "never", "--no_plot"]
    gpt2 = [*common, "--n_head", shape["n_head"], "--max_steps", steps, "--warmup_steps", steps // 15]
    speedrun = [*common, "--recipe", "speedrun", "--n_head", max(1, shape["n_embd"] // 128)]
    short, seeds = steps // 3, range(args.turns)
    runs = {("gpt2", rate): [*gpt2, "--max_lr", rate] for rate in (1e-3, 2e-3, 4e-3)}
    runs |= {("speedrun", short): [*speedrun, "--max_steps", short], ("speedrun", steps): [*speedrun, "--max_steps", steps]}
    runs |= {("without", idea): runs["speedrun", short] for idea in (IDEAS if not args.no_ideas else [])}
    jobs = [(key, seed) for seed in seeds for key in runs]
    workers = 1 if cuda else os.cpu_count()

    def do(job):
        (kind, value), seed = job
        curve = validation_curve([*runs[kind, value], "--seed", seed], value if kind == "without" else None,
                                 None if cuda else 1)
        print(f"{kind} {value}, seed {seed}: {list(curve.values())[-1]:.4f}", flush=True)
        return curve
    with ThreadPoolExecutor(workers) as pool:
        curves = dict(zip(jobs, pool.map(do, jobs), strict=True))

    def mean(key, at):
        return statistics.mean(curves[key, seed][at] for seed in seeds)

    def spread(key, at):
        values = [curves[key, seed][at] for seed in seeds]
        return max(values) - min(values)
    third, two, whole = short * tokens, 2 * short * tokens, steps * tokens
    best = min((key for key in runs if key[0] == "gpt2"), key=lambda key: (math.isnan(mean(key, whole)), mean(key, whole)))
    rows = []
    for key in runs:
        if key[0] != "without":
            name = f"gpt2, --max_lr {key[1]}{' (the best)' if key == best else ''}" if key[0] == "gpt2" else \
                f"speedrun, {key[1]} steps"
            ends = [at for at in (third, two, whole) if (key, seeds[0]) in curves and at in curves[key, seeds[0]]]
            rows.append({"recipe": name} | {f"{at / 1e6:.2f}M tokens": f"{mean(key, at):.3f}" for at in ends}
                        | {"seeds differ by": f"{spread(key, ends[-1]):.3f}"})
    goal, found = mean(best, whole), mean(("speedrun", short), third)
    rows = [{column: row.get(column, "") for column in rows[0]} for row in rows]
    print(f"validation loss of {args.size or 'small'} ({shape['n_layer']} layers of width {shape['n_embd']}), {tokens:,} tokens "
          f"a step, means of {args.turns} seed(s)")
    print_table(rows)
    print(f"after a third of the tokens speedrun is at {found:.3f}, gpt2 after all of them at {goal:.3f}: "
          f"{'reached' if found <= goal else 'NOT reached'}")
    ideas = [{"speedrun without": idea, "validation loss": mean(("without", idea), third),
              "the idea brings": f"{mean(('without', idea), third) - found:+.3f}",
              "seeds differ by": f"{spread(('without', idea), third):.3f}"} for kind, idea in runs if kind == "without"]
    if ideas:
        for row in ideas:
            row["validation loss"] = f"{row['validation loss']:.3f}"
        print_table(ideas)
    if args.plot:
        plot_curves(args.plot, {f"gpt2, --max_lr {best[1]}": curves[best, 0], "speedrun, the same tokens":
                                curves[("speedrun", steps), 0], "speedrun, a third": curves[("speedrun", short), 0]},
                    f"{shape['n_layer']} layers of width {shape['n_embd']}, {tokens:,} tokens a step")
    return rows + ideas


def plot_curves(path, curves, title):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        points = [(tokens / 1e6, loss) for tokens, loss in curve.items() if tokens]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    lowest = list(next(iter(curves.values())).values())[-1]
    axes.axhline(lowest, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("validation loss")
    axes.set_title(title, fontsize=9)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


# -----------------------------------------------------------------------------
# the command

TABLES = {"ladder": ladder, "attention": attention_table, "memory": memory_table, "data": data_table,
          "hellaswag": hellaswag_table, "scaling": scaling_table, "peer": peer_table, "recipes": recipes_table}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["work"]:
        return work(argv[1])
    parser = FlagParser(prog="bench.py", description=__doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("path", nargs="?", help="for peer: the folder of build-nanogpt; for recipes: the shards")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default auto)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--recipe", default="gpt2", choices=list(train_gpt2.RECIPES))
    parser.add_argument("--size", choices=list(SIZES), help="default gpt2 (124M), but for hellaswag and recipes small")
    parser.add_argument("--batch_size", type=whole_number, help="sequences a micro-step (default 16 on CUDA, 4 on a CPU)")
    parser.add_argument("--sequence_length", type=whole_number, help="tokens (default 1024; 256 on a CPU, but for memory)")
    parser.add_argument("--steps", type=whole_number, help="timed steps a turn (default 20 on CUDA, 4 on a CPU); for recipes: "
                        "of gpt2's runs (default 300)")
    parser.add_argument("--turns", type=whole_number, help="how often the table is measured (default 1 on CUDA, 2 on a CPU); "
                        "for recipes: seeds")
    parser.add_argument("--compile", action="store_true", default=None, help="torch.compile on a CPU too")
    parser.add_argument("--no_compile", dest="compile", action="store_false", help="eager on CUDA too")
    parser.add_argument("--memory_gb", type=float, default=80, help="for memory: what the GPU has (default 80)")
    parser.add_argument("--no_ideas", action="store_true", help="for recipes: without taking the ideas out one by one")
    parser.add_argument("--json", metavar="FILE", help="keep what was measured")
    parser.add_argument("--plot", metavar="FILE.png", help="for ladder and recipes: a picture (needs matplotlib)")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    if device == "mps":
        raise UserError("bench.py measures on cuda or cpu: give --device cpu")
    cuda = device.startswith("cuda")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
    for name in ("batch_size", "sequence_length", "steps", "turns"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    if not 0 < args.memory_gb < math.inf:
        raise UserError(f"--memory_gb {args.memory_gb}: must be above 0")
    args.turns = args.turns or (1 if cuda else 2)
    long = cuda or args.table == "memory"
    base = Setting(device=device, recipe=args.recipe, size=args.size or "gpt2", dtype=choose_dtype(args.dtype, device),
                   B=args.batch_size or (16 if cuda else 4),
                   T=args.sequence_length or (1024 if long else 256), compile=cuda if args.compile is None else args.compile,
                   warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))
    print(f"bench.py {args.table}: {machine(device)}", flush=True)
    rows = TABLES[args.table](args, base)
    if args.json:
        content = {"table": args.table, "machine": machine(device), "setting": asdict(base), "turns": args.turns, "rows": rows}
        replace_file(args.json, lambda file: file.write(json.dumps(content, indent=1).encode()))


if __name__ == "__main__":
    run_command(main)
