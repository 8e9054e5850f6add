"""Benchmarks. A row of a table is a run of train_gpt2.py with some flags, or several of them.

    python bench.py ladder            a training step, made faster one optimisation at a time
    python bench.py peer PATH         our step beside that of build-nanogpt; PATH is a clone of it
    python bench.py profile           where the time of a step goes, kernel by kernel
    python bench.py recipes DATA      trains every recipe, or one and its variants, on shards
    python bench.py compare OUT ...   the losses of runs (--out folders) and of .csv curves

All but `compare` also take flags of train_gpt2.py, which each of their runs then has. Where no flag
makes the difference between two rows, a name in the code is replaced: see STEP and IDEAS. The
figures are those of the run itself, in its metrics.csv and its last lines.

Each run has a process of its own, so that no row inherits memory or compiled code from another. The
rows are measured in turn, because the speed of a shared machine changes within minutes.
"""
import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import config
import frontier
import model
import speedrun
import train_gpt2
from recipes import RECIPES
from runtime import hardware
from runtime.cli import FlagParser, RunError, UserError, run_command, user_path
from runtime.curves import Curve, plot_variants, read_curves, variant_row, variants
from runtime.flags import add_flag, check_field
from runtime.metrics import read_metrics
from runtime.optimizers import CombinedOptimizer
from runtime.recipe import BatchSchedule
from runtime.shards import write_shard
from runtime.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent
USERS_ENVIRONMENT = dict(os.environ)        # hardware.choose_device adds to it
QUIET = dict(val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)
WARMUP = 2                                  # steps that do not count: they allocate, and compile
PROFILED_STEPS = 3


# --------------------------------------------------------------------- what no flag changes

def default_optimizers(model, optimizers, *others):
    """The optimizers as torch makes them by default, which is without the fused kernel."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"] = None
    return CombinedOptimizer(model, optimizers, *others)


def loss_of_all_logits(x, weight, targets, chunk, softcap, counts):
    logits = F.linear(x, weight).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    return losses.detach(), losses.sum() / (targets >= 0).sum()


def same_batch_in_every_step(recipe, config, world_size):
    return BatchSchedule(config.total_batch_size, config.max_steps)


# {what a timed step has: (where a name is, the name, what stands there instead)}
STEP = {
    "plain AdamW": (train_gpt2, "CombinedOptimizer", default_optimizers),
    "freed memory is given back": (hardware, "tune_malloc", lambda: None),
    "all logits at once": (model, "chunked_cross_entropy", loss_of_all_logits),
    "no growing batch": (train_gpt2, "make_batch_schedule", same_batch_in_every_step),
}


def relu_squared(self, x):
    return self.c_proj(F.relu(self.c_fc(x)).square())


def gelu(self, x):
    return self.c_proj(F.gelu(self.c_fc(x)))


def adam(params, lr, **others):
    return torch.optim.Adam(params, 0.1 * lr, betas=(0.9, 0.95), fused=True)


def cosine(step, progress, config):
    lowest = config.min_lr / config.max_lr
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))


# {recipe: {a variant of it: as in STEP}}. CONTRIBUTING.md, "Compare two variants", adds one.
IDEAS = {
    "gpt2": {
        "ReLU squared for GELU": (model.MLP, "forward", relu_squared),
    },
    "speedrun": {
        "no rotary positions": (
            speedrun.SpeedrunAttention, "norm_and_rotate", lambda self, x, _: speedrun.norm(x)),
        "no QK-norm": (
            speedrun.SpeedrunAttention, "norm_and_rotate",
            lambda self, x, rotary: speedrun.rotate(x, *rotary)),
        "GELU for ReLU squared": (speedrun.SpeedrunMLP, "forward", gelu),
        "no softcap": (speedrun.SpeedrunGPT, "softcap", 0.0),
        "Adam at a tenth of the rate for Muon": (speedrun, "Muon", adam),
        "momentum 0.95 from the start": (
            speedrun.RECIPE, "momentum", lambda progress, config: 0.95),
        "cosine for constant and then linear": (speedrun.RECIPE, "lr_scale", cosine),
    },
    "frontier": {
        "no shifted keys": (frontier, "first_shifted_head", lambda n_head: n_head),
        "shifted keys start at random": (
            frontier.FrontierGPT, "init_weights", speedrun.ModernLanguageModel.init_weights),
        "a pointer that copies nothing": (frontier, "SENTINEL", 60.0),
        "no rows for stems and forms": (frontier, "stem_and_form", lambda text: ("", ())),
        "speedrun's momentum": (frontier.RECIPE, "momentum", speedrun.muon_momentum),
        "softcap 30 for 15": (frontier.FrontierGPT, "softcap", 30.0),
    },
}


def replace_name(group: str, key: str) -> None:
    """From now on this process trains with what STEP (group "step") or IDEAS has there."""
    owner, name, replacement = ({"step": STEP} | IDEAS)[group][key]
    setattr(owner, name, replacement)


# --------------------------------------------------------------------- runs

@dataclass(frozen=True)
class Run:
    """A run of train_gpt2.py in a process of its own."""
    flags: dict                             # {flag: value}
    replaced: tuple = ()                    # (group, key) of each name that is replaced

    def command(self, **flags) -> list[str]:
        """The command of the run with these flags, too."""
        script = str(ROOT / "bench.py")
        return [script, "run", json.dumps(self.replaced), *words_of(self.flags | flags)]


def words_of(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def run_here(replaced: str, *words: str) -> int:
    """`python bench.py run REPLACED FLAGS`, which is not for users: the process of a Run."""
    for group, key in json.loads(replaced):
        replace_name(group, key)
    return train_gpt2.main(list(words))


def execute(command: list[str], **options) -> str:
    """Runs a Python script, and returns what it printed. RunError if it fails."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    if done.returncode == 0:
        return done.stdout
    if done.returncode == -9:
        raise RunError("killed by SIGKILL, as Linux does where memory runs out")
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0 or not lines:
        raise RunError(f"exit code {done.returncode}")
    raise RunError(lines[-1][:200])


def in_turn(measure: Callable, names: list[str], turns: int) -> dict[str, list]:
    """{name: what measure(name, turn) returns, a list}: all names in turn 0, then all in turn 1.

    A name for which it raises a RunError is told, and left out from then on. RunError if nothing
    could be measured.
    """
    results = {name: [] for name in names}
    failed = set()
    for turn, name in tqdm(list(itertools.product(range(turns), names)), unit=" runs", delay=10):
        if name in failed:
            continue
        try:
            results[name].append(measure(name, turn))
        except RunError as error:
            tqdm.write(f"not measured: {name}: {error}")
            failed.add(name)

    results = {name: found for name, found in results.items() if found}
    if not results:
        raise RunError("nothing could be measured")
    return results


# --------------------------------------------------------------------- tables

def print_machine(device: str) -> None:
    threads = ""
    if device == "cpu":
        threads = f" ({torch.get_num_threads()} threads)"
    name = hardware.device_name(device)
    print(f"{name}{threads}, torch {torch.__version__}, {date.today()}", flush=True)


def print_table(rows: list[dict]) -> None:
    """Prints rows, {column: text}, as a table in Markdown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns]
    for row in rows:
        lines.append([row.get(name, "") for name in columns])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])

    print()
    for name, *numbers in lines:
        cells = [name.ljust(widths[0])]
        for number, width in zip(numbers, widths[1:], strict=True):
            cells.append(number.rjust(width))
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


# --------------------------------------------------------------------- the time of a step

@dataclass
class Timing:
    """What a process tells of its steps."""
    tokens: int                             # of a step
    seconds: list[float]                    # of each step
    whole: float                            # seconds from its start to its end
    printed: str


def timed_flags(steps: int | None, given: dict, B: int = 16) -> dict:
    """The flags of a run whose steps are timed: `given` on the command line, and the others.

    `steps` of them are timed, and `B` sequences are a step on CUDA.
    """
    device = hardware.choose_device(given.get("device", "auto"))
    on_gpu = device.startswith("cuda")
    T = 1024
    if device == "cpu":
        T = 256
    if not on_gpu:
        B = 4
    if steps is None:
        steps = 20 if on_gpu else 4

    flags = dict(block_size=T, batch_size=B, compile=on_gpu) | given
    flags["device"] = device
    flags["dtype"] = hardware.choose_dtype(given.get("dtype", "auto"), device)
    flags["max_steps"] = WARMUP + steps
    flags.setdefault("sequence_length", flags["block_size"])
    flags.setdefault("total_batch_size", flags["batch_size"] * flags["sequence_length"])
    return QUIET | flags


def write_tokens(folder: str, count: int) -> str:
    """Shards of random tokens in `folder`, under the name by which build-nanogpt looks for them."""
    data = Path(folder, "edu_fineweb10B")
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, count, dtype=np.uint16)
    for split in ("train", "val"):
        write_shard(data / f"random_{split}_000000.npy", tokens)
    return str(data)


def time_script(command: list[str], folder: str) -> tuple[str, float]:
    """Runs a Python script in `folder`. Returns what it printed, and the seconds that it took."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        # torch.compile keeps what it compiles. In a folder of their own all processes have to
        # compile, so that "start s" does not depend on what ran before.
        env = USERS_ENVIRONMENT | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        began = time.perf_counter()
        printed = execute(command, cwd=folder, env=env)
        return printed, time.perf_counter() - began


def time_run(run: Run, folder: str) -> Timing:
    out = tempfile.mkdtemp(dir=folder)
    printed, whole = time_script(run.command(out=out), folder)
    tokens = run.flags["total_batch_size"]
    rows = read_metrics(Path(out, "metrics.csv"))
    return Timing(tokens, [tokens / row["tokens_per_second"] for row in rows], whole, printed)


def median_step(timings: list[Timing]) -> float:
    """Seconds, of all turns and without the warm-up."""
    return median(seconds for timing in timings for seconds in timing.seconds[WARMUP:])


def timing_cells(timings: list[Timing]) -> dict:
    """Those of all turns: the median step, the largest peak of the memory, the longest start."""
    step = median_step(timings)
    peaks = [float(re.search(r"peak memory (\S+) GB", t.printed)[1]) for t in timings]
    starts = [timing.whole - sum(timing.seconds[WARMUP:]) for timing in timings]
    cells = {
        "ms per step": f"{step * 1e3:,.1f}",
        "tokens/s": f"{timings[0].tokens / step:,.0f}",
        "peak GB": f"{max(peaks):.1f}",
        "start s": f"{max(starts):.1f}",
    }
    mfu = re.findall(r"mfu (\d+%)", timings[0].printed)     # of each step, where it is known
    if mfu:
        cells["MFU"] = mfu[-1]
    return cells


# --------------------------------------------------------------------- bench.py ladder

def ladder_rungs(flags: dict) -> dict[str, tuple[dict, str]]:
    """{what the table calls a rung: (the flags that it adds, the key of STEP that goes)}.

    `flags` are those of the highest rung.
    """
    on_cpu = flags["device"] == "cpu"
    on_gpu = flags["device"].startswith("cuda")
    rungs = {
        "float32, textbook attention, vocabulary 50257, eager, plain AdamW": (dict(
            dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257), ""),
    }
    if on_gpu:
        rungs["+ TF32"] = dict(tf32=True), ""
    if flags["dtype"] != "float32":
        rungs[f"+ {flags['dtype']} autocast"] = dict(dtype=flags["dtype"]), ""
    if flags["compile"]:
        rungs["+ torch.compile"] = dict(compile=True), ""
    rungs["+ attention auto (on a GPU: SDPA's flash attention)"] = dict(attention="auto"), ""
    rungs["+ vocabulary 50304"] = dict(vocab_size=50304), ""
    rungs["+ fused AdamW"] = {}, "plain AdamW"
    if on_cpu:
        rungs["+ freed memory kept (mallopt)"] = {}, "freed memory is given back"
    if on_cpu and not flags["compile"]:     # a compiler fuses logits and loss
        rungs["+ loss in tiles that stay in the cache"] = {}, "all logits at once"
    if on_gpu:
        larger = {name: 4 * flags[name] for name in ("batch_size", "total_batch_size")}
        rungs[f"+ micro-batch {larger['batch_size']}"] = larger, ""
    return rungs


def ladder(args, given: dict) -> None:
    flags = timed_flags(args.steps, given)
    rungs = ladder_rungs(flags)
    runs = {}

    def climb(name, turn):
        """In the first turn a rung stands on the newest one that could run."""
        nonlocal highest
        if turn == 0:
            added, goes = rungs[name]
            replaced = tuple(pair for pair in highest.replaced if pair != ("step", goes))
            runs[name] = Run(highest.flags | added, replaced)
        timing = time_run(runs[name], folder)
        highest = runs[name]
        return timing

    print_machine(flags["device"])
    with tempfile.TemporaryDirectory() as folder:
        flags["data"] = write_tokens(
            folder, 4 * flags["max_steps"] * flags["total_batch_size"] + 1)
        lowest, _ = next(iter(rungs.values()))
        highest = Run(flags | lowest, tuple(("step", key) for key in STEP))
        results = in_turn(climb, list(rungs), args.turns)
    print_table(ladder_rows(results))
    print("a gain below 1.1x may be noise")


def ladder_rows(results: dict[str, list[Timing]]) -> list[dict]:
    rows = []
    rates = []                              # tokens per second
    for name, timings in results.items():
        rates.append(timings[0].tokens / median_step(timings))
        gain, in_all = rates[-1] / rates[max(0, len(rates) - 2)], rates[-1] / rates[0]
        rows.append({"rung": name} | timing_cells(timings)
                    | {"gain": f"{gain:.2f}x", "in all": f"{in_all:.2f}x"})
    return rows


# --------------------------------------------------------------------- bench.py peer

# What stands before and after build-nanogpt's script. It gets no HellaSwag and no tokenizer, whose
# files it would download: a step needs neither.
BEFORE_THE_SCRIPT = """
import sys, types, tiktoken
sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
tiktoken.get_encoding = lambda name: None
"""
AFTER_THE_SCRIPT = f"""
sys.path.append({str(ROOT)!r})
from runtime.hardware import peak_memory
print(f"peak memory {{peak_memory(device) / 1e9:.1f}} GB")
"""


def peers_script(path: Path, flags: dict, compiles: bool) -> str:
    """build-nanogpt's train_gpt2.py with the numbers of our run. UserError for another script."""
    ours = config.FLAGS.merge(flags)
    shape = (f"block_size={ours.block_size}, n_layer={ours.n_layer}, n_head={ours.n_head}, "
             f"n_embd={ours.n_embd}")
    dtype = f"torch.{ours.dtype}, enabled={ours.dtype != 'float32'}"
    changes = {
        r"^total_batch_size = \d+": f"total_batch_size = {ours.total_batch_size}",
        r"^B = \d+": f"B = {ours.batch_size}",
        r"^T = \d+": f"T = {ours.sequence_length}",
        r"GPTConfig\(vocab_size=50304": f"GPTConfig(vocab_size=50304, {shape}",
        r"^use_compile = \w+": f"use_compile = {compiles}",
        r"^device_type = ": f"device = {ours.device!r}\ndevice_type = ",
        r"dtype=torch\.bfloat16": f"dtype={dtype}",
        # It evaluates at step 0, and every 250 steps: step 1 again and again is training alone.
        r"^for step in range\(max_steps\)": f"for step in [1] * {ours.max_steps}",
    }
    text = path.read_text(encoding="utf-8")
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count == 0:
            raise UserError(f"{path} is not that of build-nanogpt: git clone it from GitHub, and "
                            "name its folder")
    return BEFORE_THE_SCRIPT + text + AFTER_THE_SCRIPT


def time_peer(script: str, tokens: int, folder: str) -> Timing:
    path = Path(folder, "train_gpt2.py")
    path.write_text(script, encoding="utf-8")
    printed, whole = time_script([str(path)], folder)
    milliseconds = re.findall(r"dt: ([\d.]+)ms", printed)
    return Timing(tokens, [float(ms) / 1e3 for ms in milliseconds], whole, printed)


def peer(args, given: dict) -> None:
    flags = timed_flags(args.steps, given)
    path = Path(args.clone, "train_gpt2.py")
    scripts = {"build-nanogpt, as shipped": peers_script(path, flags, False)}
    if flags["compile"]:
        scripts["build-nanogpt, torch.compile"] = peers_script(path, flags, True)

    def measure(name, turn):
        if name == "ours":
            return time_run(Run(flags), folder)
        return time_peer(scripts[name], flags["total_batch_size"], folder)

    print_machine(flags["device"])
    with tempfile.TemporaryDirectory() as folder:
        flags["data"] = write_tokens(
            folder, (flags["max_steps"] + 1) * flags["total_batch_size"] + 1)
        results = in_turn(measure, ["ours", *scripts], args.turns)

    rows = []
    for name, timings in results.items():
        row = {"step": name} | timing_cells(timings)
        if "ours" in results:
            ratio = median_step(timings) / median_step(results["ours"])
            row["time against ours"] = f"{ratio:.2f}x"
        rows.append(row)
    print_table(rows)


# --------------------------------------------------------------------- bench.py profile

# {kind of kernel: what its name holds}. The first kind that fits counts. On a GPU these are names
# of kernels, on a CPU of torch's operators. A Triton kernel is named after all operators that the
# compiler fused into it: one with the loss in it, or with the softcap of the logits (tanh or
# sigmoid), counts as loss, and one that only casts as a cast. The products by which Muon makes
# matrices orthogonal count as matrix products.
KERNELS = {
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
    """The key of KERNELS to which a kernel belongs."""
    return next(kind for kind, pattern in KERNELS.items()
                if re.search(pattern, name, re.IGNORECASE))


def profile(args, given: dict) -> None:
    """A run in this process: some steps are timed, and torch's profiler watches the last ones."""
    flags = timed_flags(args.steps, given, B=64)
    timed = flags["max_steps"]
    flags["max_steps"] = timed + 1 + PROFILED_STEPS
    plan = torch.profiler.schedule(wait=timed, warmup=1, active=PROFILED_STEPS)
    train_step = train_gpt2.train_step

    def watched(step, run):
        numbers = train_step(step, run)
        if run.process.on_gpu and step >= timed:
            torch.cuda.synchronize()        # the kernels of a step end in it
        profiler.step()
        return numbers

    replace_name("step", "no growing batch")
    with tempfile.TemporaryDirectory() as folder, torch.profiler.profile(schedule=plan) as profiler:
        flags["data"] = write_tokens(folder, flags["max_steps"] * flags["total_batch_size"] + 1)
        train_gpt2.train_step = watched
        train_gpt2.main(words_of(flags | dict(out=f"{folder}/out")))
        rows = read_metrics(f"{folder}/out/metrics.csv")[WARMUP:timed]

    rate = median(row["tokens_per_second"] for row in rows)
    step_ms = flags["total_batch_size"] / rate * 1e3
    print(f"{step_ms:.1f} ms a step without the profiler, {rate:,.0f} tokens/s")
    print_kernels(kernels_of(profiler.key_averages(), flags["device"]), step_ms)


def kernels_of(events: list, device: str) -> list[tuple[float, float, str]]:
    """[(ms, calls, name)] of a step: on a GPU of its kernels, the longest first.

    On a CPU these are torch's operators without what they call.
    """
    on_gpu = device.startswith("cuda")
    kernels = []
    for event in events:
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        spans_others = event.is_user_annotation or event.key.startswith("ProfilerStep")
        if is_kernel != on_gpu or spans_others:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(
            (microseconds / 1e3 / PROFILED_STEPS, event.count / PROFILED_STEPS, event.key))
    return sorted(kernels, reverse=True)


def print_kernels(kernels: list[tuple[float, float, str]], step_ms: float) -> None:
    """Tables of the kinds of kernels and of the longest kernels."""
    if not kernels:
        print("the profiler saw no kernels: it needs CUPTI, and the right to read GPU counters")
        return

    ms_of_kind = dict.fromkeys(KERNELS, 0.0)
    for ms, _, name in kernels:
        ms_of_kind[kind_of(name)] += ms
    ms_of_kind["idle (no kernel runs)"] = max(0.0, step_ms - sum(ms_of_kind.values()))
    print_table([
        {"kind": kind, "ms a step": f"{ms:.2f}", "share": f"{ms / step_ms:.1%}"}
        for kind, ms in ms_of_kind.items()
    ])

    rows = []
    for ms, calls, name in kernels[:20]:
        short = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)[:90]
        rows.append({"kernel": short, "kind": kind_of(name), "calls a step": f"{calls:.1f}",
                     "ms a step": f"{ms:.2f}"})
    print_table(rows)


# --------------------------------------------------------------------- bench.py recipes, compare

def flags_of_recipe(recipe: str, args, given: dict) -> dict:
    """By default 300 steps of 4,096 tokens, and 4 layers of width 256."""
    flags = QUIET | dict(
        recipe=recipe, data=args.shards, n_layer=4, n_embd=256, block_size=256,
        total_batch_size=4096, max_steps=300, val_tokens=args.val_tokens) | given
    flags["val_every"] = max(1, flags["max_steps"] // 8)

    # The heads of the modern recipes are 128 wide: six at GPT-2's size.
    head_width = 128 if "n_head" in RECIPES[recipe].defaults else 64
    flags.setdefault("n_head", max(1, flags["n_embd"] // head_width))

    # The defaults are for GPT-2's size. This rate was the best of three at 4 layers of width 256.
    if "max_lr" not in RECIPES[recipe].rates:
        flags.setdefault("max_lr", 2e-3)
    if "warmup_steps" not in RECIPES[recipe].rates:
        flags.setdefault("warmup_steps", flags["max_steps"] // 15)
    return flags


def recipes(args, given: dict) -> None:
    runs = {}
    for recipe in [given["recipe"]] if "recipe" in given else RECIPES:
        run = Run(flags_of_recipe(recipe, args, given))
        runs[recipe] = run
        for idea in IDEAS.get(recipe, {}):
            if args.ideas is not None and args.ideas in idea:
                runs[f"{recipe}: {idea}"] = replace(run, replaced=((recipe, idea),))

    def train(name, seed):
        named = f"{name}, seed {seed}"
        out = str(Path(args.out, re.sub(r"\W+", "_", named)))
        tqdm.write(f"training {named} in {out}")
        execute(runs[name].command(seed=seed, out=out))
        [curve] = read_curves(out)
        return replace(curve, name=named)

    if args.ideas and not any(run.replaced for run in runs.values()):
        names = [idea for recipe in runs for idea in IDEAS.get(recipe, {})]
        raise UserError(f"no variant has {args.ideas!r} in its name: choose among "
                        f"{', '.join(names)}, or add it to IDEAS")

    results = in_turn(train, list(runs), args.seeds)
    show_curves(args, [curve for curves in results.values() for curve in curves])


def compare(args, given: dict) -> None:
    show_curves(args, [curve for source in args.curves for curve in read_curves(source)])


def show_curves(args, curves: list[Curve]) -> None:
    found = variants(curves)
    first = next(iter(found.values()))
    print_table([variant_row(name, by_seed, first) for name, by_seed in found.items()])
    if args.plot:
        plot_variants(args.plot, found, args.title)
        print(f"saved {args.plot}")


# --------------------------------------------------------------------- the commands and their flags

def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range (expected at least 1)")
    return int(text)


def picture(text: str) -> str:
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is no picture (expected .png, .svg or .pdf)")
    return user_path(text)


OWN_FLAGS = {
    "clone": dict(type=user_path, help="The folder of a clone of build-nanogpt."),
    "curves": dict(type=user_path, nargs="+",
                   help="The --out folder of a run, or a .csv file of curves."),
    "shards": dict(type=user_path, help="A folder of shards, as fineweb.py makes it."),
    "--steps": dict(type=at_least_one, help="Timed steps in a turn (default 4, on CUDA 20)."),
    "--turns": dict(type=at_least_one, default=2, help="How often all is measured (default 2)."),
    "--seeds": dict(type=at_least_one, default=3, help="How often all is trained, with the seeds "
                    "0, 1, ... (default 3)."),
    "--ideas": dict(nargs="?", const="", metavar="TEXT", help="Also train the variants of IDEAS in "
                    "bench.py: all, or those with TEXT in their name."),
    "--val_tokens": dict(type=at_least_one, default=262144, help="The number of tokens in a "
                         "validation (default 262144)."),
    "--out": dict(type=user_path, default="log/recipes", help="The folder of the runs, each in a "
                  "folder of its own (default log/recipes)."),
    "--plot": dict(type=picture, metavar="FILE", help="Draw the curves: .png, .svg or .pdf."),
    "--title": dict(default="", help="The title of the picture."),
}

# Of the flags of train_gpt2.py its runs here may have these, but for those that a command sets:
# {command: (the function that prints its table, its own flags, flags that it does not take)}.
SHARED = [f for f in fields(config.Config)
          if f.metadata["group"] in (config.MODEL, config.BATCH, config.OPTIM, config.SPEED)]
COMMANDS = {
    "ladder": (ladder, ["--steps", "--turns"],
               ["init", "max_steps", "tf32", "attention", "vocab_size"]),
    "peer": (peer, ["clone", "--steps", "--turns"], ["init", "max_steps", "recipe", "vocab_size"]),
    "profile": (profile, ["--steps"], ["init", "max_steps"]),
    "recipes": (recipes, ["shards", "--seeds", "--ideas", "--val_tokens", "--out", "--plot",
                          "--title"], ["seed"]),
    "compare": (compare, ["curves", "--plot", "--title"], [f.name for f in SHARED]),
}


def parse_args(command: str, words: list[str]) -> tuple[argparse.Namespace, dict]:
    """The command's own flags, and {flag: value} of train_gpt2.py's."""
    parser = FlagParser(prog=f"bench.py {command}")
    _, own, not_taken = COMMANDS[command]
    for name in own:
        parser.add_argument(name, **OWN_FLAGS[name])
    group = parser.add_argument_group(
        "flags of train_gpt2.py, for all runs",
        "The defaults below are train_gpt2.py's. bench.py has smaller ones: see docs/speed.md and "
        "CONTRIBUTING.md.")
    taken = [f for f in SHARED if f.name not in not_taken]
    for f in taken:
        add_flag(group, f, RECIPES)

    args = parser.parse_args(words)
    given = {}
    for f in taken:
        if hasattr(args, f.name):
            given[f.name] = getattr(args, f.name)
            check_field(f, given[f.name])
    return args, given


def main(argv: list[str] | None = None) -> int | None:
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        argv = ["--help"]
    if argv[0].startswith("-"):
        FlagParser(prog="bench.py", description=__doc__).parse_args(argv)

    command, *words = argv
    if command == "run":
        return run_here(*words)
    if command not in COMMANDS:
        raise UserError(f"bench.py has no command {command}: choose {', '.join(COMMANDS)}")
    print_result, _, _ = COMMANDS[command]
    print_result(*parse_args(command, words))


if __name__ == "__main__":
    run_command(main)
