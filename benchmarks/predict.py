"""bench.py predict: step times of a GPU that is not there, from counted work and data sheets (a roofline).

The work is counted on the stand-in GPU (tests/null_gpu/count.py, which writes assets/counts.json): each
matrix product with its shape, each fused attention, the bytes of all other kernels, the launches. A kernel's
time is the longer of FLOPs / (peak x share) and bytes / (bandwidth x share). A step's is the sum of its
kernels', or the host's time to launch them if that is longer (Williams et al. 2009,
doi:10.1145/1498765.1498785).

Two shares are fitted, to the first two rungs of the lecture's ladder, whose model and GPU are known. Every
other published time is predicted with the same shares, and its error printed.
"""
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tables import ladder_settings
from benchmarks.timing import GB, Setting, print_table
from frontier import updates_of_run
from runtime.device import PEAK_TFLOPS
from train_gpt2 import RECIPES, Config

COUNTS = Path(__file__).resolve().parent.parent / "assets" / "counts.json"
T = 1024                                # tokens a sequence, in all that is counted
STEP = 2**19                            # tokens a step of gpt2 and speedrun
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class GPU:
    """NVIDIA's data sheets and white papers. TFLOP/s are dense: half of those given 'with sparsity'."""
    name: str
    fp32: float                         # TFLOP/s without tensor cores
    tf32: float
    bf16: float                         # accumulated in fp32
    bandwidth: float                    # TB/s
    memory: float                       # GiB that CUDA reports
    link: float                         # GB/s to the other GPUs, each way


GPUS = {
    "A100": GPU("A100 SXM 80 GB", 19.5, 156, PEAK_TFLOPS["A100-(SXM4|PCIE)-(40|80)GB"], 2.039, 79.2, 300),
    "A100-PCIe": GPU("A100 PCIe 40 GB", 19.5, 156, PEAK_TFLOPS["A100-(SXM4|PCIE)-(40|80)GB"], 1.555, 39.4,
                     32),
    "H100": GPU("H100 SXM 80 GB", 66.9, 494.7, PEAK_TFLOPS["H100 80GB HBM3"], 3.35, 79.2, 450),
    "H200": GPU("H200 SXM 141 GB", 66.9, 494.7, PEAK_TFLOPS["H200"], 4.8, 139.8, 450),
    # no NVLink: PCIe 4.0 x16
    "4090": GPU("GeForce RTX 4090", 82.6, 82.6, PEAK_TFLOPS["RTX 4090"], 1.008, 23.6, 32),
}


@dataclass(frozen=True)
class Shares:
    """What kernels attain of the data sheet, and the cost of a launch: the same for all GPUs and models."""
    products: float                     # matrix products, of the peak: fitted
    memory: float                       # all else, of the bandwidth: fitted
    # Fused attention, of the peak, where a causal mask halves the FLOPs. FlashAttention-2 attains 50-73% on
    # an A100, the first one 25-40% (arXiv:2307.08691): the lower ends, because T = 1024 is short and heads of
    # 64 are narrow. On an H100 the second attains 35% and the third 1.5 to 2 times that (arXiv:2407.08608),
    # and cuDNN's, which torch takes there, is assumed to be like the third.
    attention: float = 0.5
    attention_1: float = 0.25           # FlashAttention 1; for the efficient kernel nothing is published
    link: float = 0.8                   # NCCL's large all-reduces, as nccl-tests report them: 230 of 300 GB/s
    launch: float = 10e-6               # seconds of the host an operator, dispatch and autograd included


@dataclass(frozen=True)
class Work:
    """What runs: names in counts.json of a forward and backward, and of the optimizer's step."""
    counts: str
    step: str
    B: int = 16                         # sequences a micro-batch
    tf32: bool = True
    gpus: int = 1
    micro_steps: int = 1
    updates: float = 1                  # of the optimizer a step; where that changes, the run's mean
    flash1: bool = False                # torch 2.0 and 2.1 have FlashAttention 1


@dataclass(frozen=True)
class Published:
    """A published time of a step, and what is predicted in its place."""
    source: str
    name: str
    ms: float
    gpu: str
    work: Work


def lecture(name, ms, counts, tf32=True):
    return Published("lecture", name, ms, "A100", Work(f"lecture {counts}", "step lecture", tf32=tf32))


def blog(name, ms, counts):
    return Published("PyTorch's blog", name, ms, "A100",
                     Work(f"nanogpt {counts}", "step nanogpt", 12, flash1=True))


def eight(source, name, ms, gpu, counts, step):
    """Of 524,288 tokens on eight GPUs, 64 sequences each."""
    return Published(source, name, ms, gpu, Work(counts, step, 64, gpus=8))


# The lecture: build-nanogpt, A100 SXM, 16 x 1024. The blog: nanoGPT at its defaults of that commit, 12 x
# 1024, without biases (pytorch.org/blog/accelerating-large-language-models). Tokens/s are turned into ms.
PUBLISHED = [
    lecture("fp32", 1000, "fp32 naive 50257", tf32=False),
    lecture("TF32", 333, "fp32 naive 50257"),
    lecture("bf16", 300, "bf16 naive 50257"),
    lecture("torch.compile", 130, "compile naive 50257"),
    lecture("flash", 96, "compile flash 50257"),
    lecture("vocabulary 50304", 93, "compile flash"),
    blog("baseline", 143, "compile naive 50257"),
    blog("SDPA math", 134, "compile math 50257"),
    blog("efficient", 119, "compile efficient 50257"),
    blog("flash", 113, "compile flash 50257"),
    blog("flash, padded vocabulary", 87, "compile flash"),
    eight("llm.c", "8 x H100", 140, "H100", "gpt2 compile auto", "step fused"),
    Published("llm.c", "A100 PCIe, 145k tokens/s", 65536 / 145, "A100-PCIe",
              Work("gpt2 compile flash", "step fused", 32, micro_steps=2)),
    eight("build-nanogpt", "8 x A100, 137k tokens/s each", 65536 / 137, "A100", "lecture compile flash",
          "step fused"),
    *(eight("modded-nanogpt", f"{name}, 8 x H100", ms, "H100", "speedrun compile auto", "step speedrun")
      for name, ms in (("record 5", 179), ("record 7", 142), ("record 10", 145),
                       ("optimisation track", 147))),
]
FITTED = PUBLISHED[:2]                  # to their times, the shares; to no others


def work_of(s: Setting) -> Work:
    """The work of a rung of bench.py ladder, by its name in counts.json."""
    precision = "compile" if s.compile else {"float32": "fp32", "bfloat16": "bf16"}[s.dtype]
    vocabulary = "" if s.vocab_size == 50304 else f" {s.vocab_size}"
    return Work(f"gpt2 {precision} {s.attention}{vocabulary}", "step fused" if s.fused else "step foreach",
                s.B, s.tf32)


LADDER = [(name, work_of(s)) for name, s, _ in ladder_settings(Setting(device="cuda", compile=True))]


# -----------------------------------------------------------------------------
# the roofline

def flops_of(products) -> float:
    """FLOPs of [dtype, batch, m, n, k, times] lists."""
    return sum(2 * batch * m * n * k * times for _, batch, m, n, k, times in products)


def attention_cost(which, B, heads, length, head_dim, dtype):
    """(FLOPs, bytes) of one causal fused attention. Its forward makes two products of T x T, its backward
    five (arXiv:2307.08691, section 4.1), of which the mask leaves half. q, k, v, y and gradients move."""
    products, moved = (2, 4) if which == "forward" else (5, 8)
    return (products * 2 * B * heads * length**2 * head_dim / 2,
            moved * B * heads * length * head_dim * BYTES[dtype])


def parts(counts, gpu: GPU, shares: Shares, work: Work) -> np.ndarray:
    """Seconds on the GPU of one entry of counts.json: (3,) of products, fused attention, all else."""
    peak = {"float32": (gpu.tf32 if work.tf32 else gpu.fp32) * 1e12, "bfloat16": gpu.bf16 * 1e12}
    bandwidth = gpu.bandwidth * 1e12 * shares.memory
    products = attention = 0.0
    for dtype, batch, m, n, k, times in counts["products"]:
        moved = batch * (m * k + k * n + m * n) * BYTES[dtype]
        compute = 2 * batch * m * n * k / (peak[dtype] * shares.products)
        products += times * max(compute, moved / bandwidth)
    for kernel, which, dtype, *shape, times in counts["attention"]:
        flops, moved = attention_cost(which, *shape, dtype)
        slow = kernel == "efficient" or work.flash1
        compute = flops / (peak[dtype] * (shares.attention_1 if slow else shares.attention))
        attention += times * max(compute, moved / bandwidth)
    return np.array([products, attention, counts["bytes"] / bandwidth])


def at_micro_batch(entry: dict, B: int, value) -> float:
    """value(counts) at B sequences: linear through the two micro-batches that were counted."""
    if str(B) in entry:
        return value(entry[str(B)])
    (b1, low), (b2, high) = sorted((int(b), value(counts)) for b, counts in entry.items())
    return low + (high - low) * (B - b1) / (b2 - b1)


def exposed_all_reduce(parameters: float, gpu: GPU, shares: Shares, gpus: int, backward: float) -> float:
    """Seconds of the gradients' ring all-reduce that the backward does not hide. Each GPU sends 2 (n-1)/n of
    the fp32 gradients. DDP's buckets are thirds (runtime/device.py). The last third, the embedding's, is
    complete only when the backward ends."""
    whole = 2 * (gpus - 1) / gpus * 4 * parameters / (gpu.link * GB * shares.link)
    return max(whole / 3, whole - backward)


def predict(work: Work, gpu: GPU, shares: Shares, counts: dict) -> dict[str, float]:
    """Seconds of an optimizer step: {products, attention, other, optimizer, all-reduce, host, step}."""
    micro, step = counts[work.counts], counts[work.step]["step"]
    seconds = at_micro_batch(micro, work.B, lambda c: parts(c, gpu, shares, work))
    result = dict(zip(("products", "attention", "other"), work.micro_steps * seconds, strict=True))
    # Muon's; each GPU orthogonalises its share of the matrices
    step = step | {"products": [[*shape, times / work.gpus] for *shape, times in step["products"]]}
    result["optimizer"] = work.updates * parts(step, gpu, shares, work).sum()
    result["all-reduce"] = work.updates * exposed_all_reduce(step["parameters"], gpu, shares, work.gpus,
                                                              backward=2 / 3 * seconds.sum())
    # no more for a larger micro-batch, whose kernels are only larger
    launches = work.micro_steps * micro[max(micro, key=int)]["launches"] + work.updates * step["launches"]
    busy = sum(result.values())
    result["host"] = launches * shares.launch
    return result | {"launches": launches, "step": max(busy, result["host"])}


# -----------------------------------------------------------------------------
# the fit

def bisect(f, low: float = 0.01, high: float = 10) -> float:
    """x with f(x) = 0, for a decreasing f."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return (low + high) / 2


def fit(counts: dict, rows: list[Published]) -> Shares:
    """Shares with which both rows, the same work without and with TF32, take their published times."""
    slow, fast = rows

    def error(row, products, memory):
        return predict(row.work, GPUS[row.gpu], Shares(products, memory), counts)["step"] - row.ms / 1e3

    def memory_for(products):
        return bisect(lambda memory: error(fast, products, memory))
    products = bisect(lambda products: error(slow, products, memory_for(products)))
    return Shares(products, memory_for(products))


# -----------------------------------------------------------------------------
# tables

def load_counts() -> dict:
    return json.loads(COUNTS.read_text(encoding="utf-8"))["counts"]


def ladder_rows(gpu: GPU, shares: Shares, counts: dict) -> list[dict]:
    """The rungs of bench.py ladder: one micro-batch a step."""
    rows = []
    for name, work in LADDER:
        micro, step = counts[work.counts], counts[work.step]["step"]
        t = predict(work, gpu, shares, counts)
        products = at_micro_batch(micro, work.B, lambda c: flops_of(c["products"])) / 1e12
        fused = at_micro_batch(micro, work.B, lambda c: sum(
            a[-1] * attention_cost(a[1], *a[3:-1], a[2])[0] for a in c["attention"])) / 1e12
        dtype = next(iter(micro.values()))["products"][0][0]
        precision = {"float32": "TF32" if work.tf32 else "fp32", "bfloat16": "bf16"}[dtype]
        moved = at_micro_batch(micro, work.B, lambda c: c["bytes"]) + step["bytes"]
        reserved = memory_of(work, counts) / 2**30
        fits = reserved < gpu.memory
        rows.append({"rung": name, "TFLOP": f"{products + fused:.1f} {precision}", "GB": moved / GB,
                     "launches": t["launches"], "GiB": reserved, "products ms": 1e3 * t["products"],
                     "attention ms": 1e3 * t["attention"], "other ms": 1e3 * (t["other"] + t["optimizer"]),
                     "host ms": 1e3 * t["host"],
                     "predicted ms": 1e3 * t["step"] if fits else "out of memory",
                     "tokens/s": work.B * T / t["step"] if fits else ""})
    return rows


def check_rows(shares: Shares, counts: dict) -> list[dict]:
    """Every published row with its prediction and error."""
    rows = []
    for row in PUBLISHED:
        ms = 1e3 * predict(row.work, GPUS[row.gpu], shares, counts)["step"]
        rows.append({"published": f"{row.source}: {row.name}", "GPU": row.gpu, "ms": round(row.ms),
                     "predicted ms": round(ms),
                     "error": "fitted" if row in FITTED else f"{ms / row.ms - 1:+.0%}"})
    return rows


def summary(rows: list[dict]) -> str:
    """The errors of check_rows, of which each published row has one but those fitted."""
    errors = [r["predicted ms"] / r["ms"] - 1 for r in rows if r["error"] != "fitted"]
    middle = statistics.median(map(abs, errors))
    return (f"{len(errors)} rows were not fitted: an error of {middle:.0%} in the median, from "
            f"{min(errors):+.0%} to {max(errors):+.0%}; {sum(e < 0 for e in errors)} are predicted too fast")


def memory_of(work: Work, counts: dict) -> float:
    """Bytes that a step reserves: the counted peak and the moments, and 5% that the allocator splits off
    (docs/speed.md, GPU memory: 23.2 of 22.1 GiB)."""
    peak = at_micro_batch(counts[work.counts], work.B, lambda c: c["memory"])
    return 1.05 * (peak + counts[work.step]["step"]["memory"])


def defaults_of(recipe: str) -> Config:
    return Config(**RECIPES[recipe].defaults)


def recipe_work(recipe: str, gpu: GPU, gpus: int, counts: dict) -> Work:
    """A step of STEP tokens, with the micro-batch that --batch_size auto would take."""
    kernel = "auto" if gpu.bf16 > 800 else "flash"          # cuDNN's attention is chosen on Hopper only
    step = "step fused" if recipe == "gpt2" else f"step {recipe}"           # the optimizers' counts
    updates = RECIPES[recipe].automatic(defaults_of(recipe))["updates_per_step"]
    B = STEP // T // gpus // updates
    while True:
        work = Work(f"{recipe} compile {kernel}", step, B, gpus=gpus, micro_steps=STEP // T // gpus // B,
                    updates=updates_of_run(1, updates))
        if memory_of(work, counts) <= 0.9 * gpu.memory * 2**30:
            return work
        B //= 2


def recipe_rows(gpu: GPU, shares: Shares, counts: dict) -> list[dict]:
    """The recipes on one and on eight GPUs: micro-batch, tokens/s, hours."""
    rows = []
    for recipe in RECIPES:
        for gpus in (1, 8):
            work = recipe_work(recipe, gpu, gpus, counts)
            t = predict(work, gpu, shares, counts)
            rows.append({"recipe": recipe, "GPUs": f"{gpus} x {gpu.name}", "micro-batch": f"{work.B} x {T}",
                         "GiB": memory_of(work, counts) / 2**30, "predicted ms": 1e3 * t["step"],
                         "all-reduce ms": 1e3 * t["all-reduce"], "tokens/s": STEP / t["step"],
                         "hours": defaults_of(recipe).max_steps * t["step"] / 3600})
    return rows


def predict_table(args, base) -> list[dict]:
    """The tables for --gpu."""
    gpu, counts = GPUS[args.gpu], load_counts()
    shares = fit(counts, FITTED)
    print(f"bench.py predict: {gpu.name}. PREDICTED, not measured: work counted on a stand-in GPU, and the "
          f"data sheet ({gpu.fp32:g}, {gpu.tf32:g} and {gpu.bf16:g} TFLOP/s in fp32, TF32 and bf16, "
          f"{gpu.bandwidth:g} TB/s)\nfitted to the first two rows of the check: matrix products attain "
          f"{shares.products:.0%} of the peak, all else {shares.memory:.0%} of the bandwidth; stated: fused "
          f"attention {shares.attention:.0%} of the peak (torch 2.0's {shares.attention_1:.0%}), the links "
          f"{shares.link:.0%}, {shares.launch * 1e6:g} us of the host a launch")
    check, recipes = check_rows(shares, counts), recipe_rows(gpu, shares, counts)
    tables = {f"GPT-2 124M, 16 x {T} tokens a step on one {gpu.name}": ladder_rows(gpu, shares, counts),
              "The check: published times, and what the same shares predict": check,
              "The recipes, 524,288 tokens a step. all-reduce: what the backward does not hide. hours: gpt2\n"
              "10 billion tokens, speedrun 1.7 billion, frontier 1.3 billion (an estimate), without\n"
              "evaluations. A frontier step is the mean of the run's thirds, of 4, 2 and 1 updates": recipes}
    for title, rows in tables.items():
        print(f"\n{title}")
        print_table(rows)
        if rows is check:
            print(summary(check))
    return [row for rows in tables.values() for row in rows]
