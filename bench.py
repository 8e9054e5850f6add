"""Measures the figures of the docs on this machine: one table a command. About how long on two CPU cores:

    python bench.py ladder          8 min   from float32 and naive attention to the step that trains
    python bench.py operators       30 s    where the time of a step on a CPU goes
    python bench.py attention       1 min   every attention kernel: time, memory, and error against float64
    python bench.py memory          8 min   memory a sequence, the largest micro-batch, by kernel and loss
    python bench.py data [PATH]     1 min   tokens/s of the loader, of fineweb.py, of a clone of build-nanogpt
    python bench.py hellaswag       3 min   HellaSwag in batches against one example a forward
    python bench.py scaling         2 min   step time by processes; estimates by size, what GPUs exchange
    python bench.py peer PATH       4 min   our step and that of a clone of build-nanogpt, in turn
    python bench.py recipes DATA    hours   gpt2 and --recipe on a folder of shards, and ablations
    python bench.py compare OUT ... 5 s     runs of train_gpt2.py by their --out: loss by tokens and by time
    python bench.py predict         5 s     step times of a GPU that is not here (--gpu), from counted work

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a subprocess, so that
none inherits another's memory or compiled code. The table is measured --turns times, and a row shows the
median: the speed of a shared machine changes within minutes.
"""
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a sign of life
    from runtime.start import begin
    begin()
import difflib
import importlib.util
import json
import math
import os
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import hellaswag
import train_gpt2
from benchmarks.ablation import recipes_table
from benchmarks.compare import compare_table
from benchmarks.data import data_table, measure_loader
from benchmarks.operators import operator_seconds, operators_table
from benchmarks.predict import GPUS, predict_table
from benchmarks.timing import (GB, PlainAdamW, Setting, attention_costs, bytes_per_sequence, check_outputs,
                               find_largest, machine, matmul_seconds, measure, median_ms, peers_step,
                               predict_largest, print_table, random_tokens, rows_of, run_worker,
                               supported_kernels, time_steps)
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.checks import automatic_values
from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.dataloader import INPUT_TXT, TokenDataset, TokenLoader
from runtime.device import choose_device, choose_dtype, make_autocast, peak_flops, peak_memory
from runtime.distributed import StopSignals, setup_process
from runtime.files import replace_file
from runtime.plots import plot_ladder

SIZES = GPT2_SIZES | {"small": dict(n_layer=4, n_head=4, n_embd=256),       # for CPUs, and to try a command
                      "tiny": dict(n_layer=4, n_head=2, n_embd=128)}


# -----------------------------------------------------------------------------
# workers: each measures one Setting in a process of its own

def shape_of(s):
    """n_layer, n_head, n_embd."""
    heads = train_gpt2.RECIPES[s.recipe].defaults.get("n_head")
    return SIZES[s.size] | ({"n_head": heads} if heads and s.size == "gpt2" else {})


def our_step(s):
    """(a function that does one optimizer step of setting `s` as train_gpt2.py does it, the model)."""
    config = train_gpt2.Config(**train_gpt2.RECIPES[s.recipe].defaults | shape_of(s) | dict(
        recipe=s.recipe, total_batch_size=s.B * s.T * s.processes, batch_size=str(s.B), sequence_length=s.T,
        block_size=s.T, vocab_size=s.vocab_size, device=s.device, dtype=s.dtype, tf32=s.tf32,
        compile=s.compile, attention=s.attention, loss_chunk=s.loss_chunk, seed=0))
    process = setup_process(config, s.tune_memory)
    config = replace(config, **automatic_values(config, process.device))
    state, _, wrapped, autocast = train_gpt2.build_training(config, process)
    if not s.fused:
        state.optimizers = [PlainAdamW([{name: g[name] for name in ("params", "lr", "weight_decay")}
                                        for g in optimizer.param_groups], betas=(0.9, 0.95))
                            if isinstance(optimizer, torch.optim.Adam) else optimizer
                            for optimizer in state.optimizers]
    dataset = TokenDataset([random_tokens(20 * s.B * s.T * s.processes + 1)], s.T)
    loader = TokenLoader(dataset, config.total_batch_size, s.B, process.rank, process.world_size,
                         process.device)
    loader.start(0)
    return (lambda: train_gpt2.train_step(wrapped, state, loader, autocast, config.grad_clip, process,
                                           StopSignals(process)), state.model)


def measure_step(s):
    step, model = peers_step(s, SIZES[s.size]) if s.peer else our_step(s)
    if s.memory_gb:
        gpu = int(s.device.partition(":")[2] or 0)
        fraction = s.memory_gb * GB / torch.cuda.mem_get_info(gpu)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), gpu)
    warmup_seconds, seconds = time_steps(step, s)
    result = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": peak_memory(s.device)}
    if not s.peer:
        result |= {"flops_per_token": model.flops_per_token(s.T), "peak_flops": peak_flops(s.device)}
    return result


def measure_operators(s):
    return operator_seconds(our_step(s)[0], s)


def measure_matmul(s):
    setup_process(train_gpt2.Config(device=s.device, tf32=s.tf32))
    return {"seconds": matmul_seconds(s, shape_of(s))}


def measure_attention(s):
    device = setup_process(train_gpt2.Config(device=s.device)).device
    shape = shape_of(s)
    return attention_costs(s, shape["n_head"], shape["n_embd"] // shape["n_head"], device)


def synthetic_examples(n):
    """n examples in HellaSwag's format, from input.txt: contexts of 15 to 80 words, endings of 5 to 30."""
    rng = np.random.default_rng(0)
    words = INPUT_TXT.read_text(encoding="utf-8").split()

    def some(low, high):
        start = rng.integers(len(words) - high)
        return " ".join(words[start:start + rng.integers(low, high)])
    return [{"ctx": some(15, 80), "endings": [some(5, 30) for _ in range(4)], "label": int(rng.integers(4))}
            for _ in range(n)]


def measure_hellaswag(s):
    """Seconds of HellaSwag over s.steps examples, s.B rows a forward."""
    process = setup_process(train_gpt2.Config(device=s.device))
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, s.vocab_size, **SIZES[s.size])).to(process.device)
    batches = hellaswag.make_batches(synthetic_examples(s.steps), 1024, s.B)
    autocast = make_autocast(process.device, s.dtype)
    _, seconds = time_steps(lambda: hellaswag.evaluate(model, batches, process.device, autocast),
                            replace(s, warmup=1, steps=3))
    return {"seconds": seconds}


WORKERS = {"step": measure_step, "operators": measure_operators, "matmul": measure_matmul,
           "attention": measure_attention, "hellaswag": measure_hellaswag, "loader": measure_loader}


# -----------------------------------------------------------------------------
# tables

def ratio(a, b, times=1):
    """How many times as long `a` took as `b`, as text; None if one of them failed."""
    return None if "failed" in a or "failed" in b else f"{times * median_ms(a) / median_ms(b):.2f}x"


def ladder_settings(base, compiles):
    """Yields (name, setting, None) for each row of the ladder, or (name, None, reason) for one left out.

    A setting includes the changes of the rows before it.
    """
    cuda = base.device.startswith("cuda")
    s = replace(base, dtype="float32", tf32=not cuda, compile=False, attention="naive", vocab_size=50257,
                fused=False, loss_chunk=-1 if cuda else 0, tune_memory=cuda)
    yield "float32, textbook attention, vocabulary 50257, eager, plain AdamW", s, None
    for name, change, left_out in [
            ("+ TF32", dict(tf32=True), None if cuda else "TF32 is a format of NVIDIA's GPUs"),
            (f"+ {base.dtype} autocast", dict(dtype=base.dtype),
             None if base.dtype != "float32" else "no 16-bit products in this hardware"),
            ("+ torch.compile", dict(compile=True), None if compiles else "on a CPU by --compile only"),
            ("+ SDPA's flash attention", dict(attention="flash"), None),
            ("+ vocabulary 50304", dict(vocab_size=50304), None),
            ("+ fused AdamW", dict(fused=True), None),
            *([] if cuda else [("+ freed memory kept (mallopt)", dict(tune_memory=True), None),
                               ("+ loss in tiles that stay in the cache", dict(loss_chunk=-1), None)]),
            ("+ attention kernel of choice (auto)", dict(attention="auto"), None),
            (f"+ micro-batch {4 * base.B}", dict(B=4 * base.B),
             None if cuda else "1,024 tokens keep a CPU busy")]:
        s = s if left_out else replace(s, **change)
        yield name, None if left_out else s, left_out


def ladder(args, base):
    rungs = list(ladder_settings(base, base.compile))
    measured = [(name, s) for name, s, _ in rungs if s]
    settings = [s for _, s in measured]
    *results, matmul = measure([*settings, replace(settings[-1], what="matmul")], args.turns)
    rows, first, previous = [], None, None
    for (name, s), result in zip(measured, results, strict=True):
        if "failed" in result:
            rows.append({"rung": f"{name}: {result['failed']}"})
            continue
        rate = s.B * s.T / statistics.median(result["seconds"])
        peak, gain = result["peak_flops"], rate / (previous or rate)
        # a shared machine's own speed changes by as much
        noise = ", noise" * (previous is not None and abs(gain - 1) < 0.1 and base.device == "cpu")
        rows.append({"rung": name, "ms a step": median_ms(result), "tokens/s": rate,
                     "MFU": f"{rate * result['flops_per_token'] / peak:.1%}" if peak else "n/a",
                     "peak GB": result["memory"] / GB, "start s": result["warmup_seconds"],
                     "gain": f"{gain:.2f}x{noise}", "in all": f"{rate / (first or rate):.2f}x"})
        first, previous = first or rate, rate
    print_table(rows, {"left out": [f"{name[2:]} ({reason})" for name, s, reason in rungs if not s]})
    if "failed" in matmul:
        print(f"the matrix products of the last rung's step alone: {matmul['failed']}")
    elif "failed" not in results[-1]:
        print(f"the matrix products of the last rung's step alone take {median_ms(matmul):,.0f} ms: it runs "
              f"at {median_ms(matmul) / median_ms(results[-1]):.0%} of what they allow")
    if args.plot:
        plot_ladder(args.plot, rows, machine(base.device))
    return rows


def attention_table(args, base):
    kernels, missing = supported_kernels(base)
    results = measure([replace(base, what="attention", attention=name) for name in kernels], args.turns)
    rows = rows_of("kernel", kernels, results, lambda kernel, r: {
        "forward + backward ms": median_ms(r), "memory MB": r["memory"] / 1e6,
        "error of y": f"{r['error_forward']:.1e}",
        "largest error of dq, dk, dv": f"{r['error_backward']:.1e}"})
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; "
          "errors are |x - x64| / |x64| against float64")
    print_table(rows, {"not on this machine": missing})
    return rows


def memory_table(args, base):
    """Peaks at B and 2 B give bytes a sequence. On a GPU the largest micro-batch in --memory_gb is run."""
    cuda = base.device.startswith("cuda")
    kernels, missing = supported_kernels(base)
    # auto is one of the others; flex needs a mask
    settings = [replace(base, attention=kernel, loss_chunk=chunk, warmup=1, steps=1)
                for kernel in kernels if kernel not in ("auto", "flex")
                for chunk in (0, 8192 if cuda else 2048)]
    small, large = (measure([replace(s, B=B) for s in settings], 1) for B in (base.B, 2 * base.B))
    rows = []
    for s, a, b in zip(settings, small, large, strict=True):
        logits = f"{s.loss_chunk:,} tokens" if s.loss_chunk else "all"
        row = {"attention": s.attention, "logits in memory": logits}
        if "failed" in a or "failed" in b:
            rows.append(row | {f"GB at {base.B}": a.get("failed") or b.get("failed")})
            continue
        peaks = a["memory"], b["memory"], base.B
        fits = {g: predict_largest(*peaks, g) for g in sorted({8, 12, 24, 80, args.memory_gb})}
        if cuda and args.memory_gb <= torch.cuda.mem_get_info()[1] / GB:
            fits[args.memory_gb] = find_largest(s, fits[args.memory_gb], args.memory_gb)
        rows.append(row | {f"GB at {base.B}": a["memory"] / GB, f"at {2 * base.B}": b["memory"] / GB,
                           "MB a sequence": bytes_per_sequence(*peaks) / 1e6}
                    | {f"fit {g:g} GB": n for g, n in fits.items()})
    print(f"peak memory, and sequences of {base.T} tokens that fit, {base.size}, {base.dtype}, "
          f"{'torch.compile' if base.compile else 'eager'}; measured at micro-batches {base.B} and "
          f"{2 * base.B}, the rest follows from the two"
          f"{f', but {args.memory_gb:g} GB was tried' if cuda else ''}")
    print_table(rows, {"not on this machine": missing})
    return rows


def hellaswag_table(args, base):
    n = args.steps or (2000 if base.device.startswith("cuda") else 100)
    widths = (4, 16, 32, 64, 128)
    results = measure([replace(base, what="hellaswag", B=B, steps=n, size=args.size or "small")
                       for B in widths], args.turns)
    rows = rows_of("rows a forward", widths, results, lambda B, r: {         # four rows are one example
        "examples/s": n / median_ms(r) * 1e3, "gain": ratio(results[0], r),
        "10,042 examples, s": 10042 / n * median_ms(r) / 1e3})
    print(f"{n} made-up examples of HellaSwag's lengths, "
          f"model {args.size or 'small (4 layers of width 256)'}, {base.dtype}")
    print_table(rows)
    return rows


def scaling_table(args, base):
    """Measured: the same micro-batch on more processes. Then the estimates."""
    limit = torch.cuda.device_count() if base.device.startswith("cuda") else os.cpu_count()
    counts = [n for n in (1, 2, 4, 8) if n <= limit]
    results = measure([replace(base, processes=n) for n in counts], args.turns)
    rows = rows_of("processes", counts, results, lambda n, r: {
        "tokens a step": n * base.B * base.T, "ms a step": median_ms(r),
        "tokens/s": n * base.B * base.T / median_ms(r) * 1e3, "against one": ratio(results[0], r, n)})
    print_table(rows)
    estimates = [scaling_estimate(name) for name in GPT2_SIZES]
    print("state: weights, gradients, two moments in fp32. Tokens/s: at 40% of an H100's 989 TFLOP/s. Sent: "
          "a ring all-reduce over 8 GPUs, by NVLink (450 GB/s) or by a 400 Gb/s network; DDP sends while the "
          "backward goes on")
    print_table(estimates)
    return rows + estimates


def scaling_estimate(name):
    """A row for one size of GPT-2: parameters, FLOPs, state, and the gradients that 8 GPUs exchange."""
    with torch.device("meta"):
        model = GPT(GPTConfig(1024, 50304, **GPT2_SIZES[name]))
    parameters, flops = sum(p.numel() for p in model.parameters()), model.flops_per_token(1024)
    rate = 0.4 * 989e12 / flops
    sent = 2 * 7 / 8 * 4 * parameters           # bytes of fp32 gradients that each of 8 GPUs sends a step
    return {"on paper": name, "parameters": parameters, "GFLOP a token": flops / GB,
            "state GB": 16 * parameters / GB, "tokens/s a GPU": rate,
            "ms of 65,536 tokens": 65536 / rate * 1e3, "GB sent a GPU": sent / GB,
            "ms at 450 GB/s": sent / 450e9 * 1e3, "ms at 50 GB/s": sent / 50e9 * 1e3}


def peer_table(args, base):
    script = Path(args.path or "build-nanogpt") / "train_gpt2.py"
    if not script.is_file():
        raise UserError(f"{script} is not there: git clone build-nanogpt from GitHub, and give its folder")
    peer = replace(base, peer=str(script.parent.resolve()))
    settings = {"build-nanogpt, as shipped": replace(peer, compile=False),
                "build-nanogpt, torch.compile": replace(peer, compile=True),
                "ours, as shipped": base, "its matrix products alone": replace(base, what="matmul")}
    results = measure(list(settings.values()), args.turns)
    ours = results[2]
    rows = rows_of("step", settings, results, lambda _, r: {
        "ms": median_ms(r), "tokens/s": base.B * base.T / median_ms(r) * 1e3}
        | ({"peak GB": r["memory"] / GB, "start s": r["warmup_seconds"]} if "memory" in r else {})
        | {"time against ours": ratio(r, ours)})
    print_table(rows)
    return rows


TABLES = {"ladder": ladder, "attention": attention_table, "memory": memory_table, "data": data_table,
          "operators": operators_table, "hellaswag": hellaswag_table, "scaling": scaling_table,
          "peer": peer_table,
          "recipes": lambda args, base: recipes_table(args, base, SIZES[args.size or "small"]),
          "compare": lambda args, base: compare_table(args.paths, args.plot),
          "predict": lambda args, base: predict_table(args.gpu)}
ELSEWHERE = "compare", "predict"            # tables of runs on other machines


def table_name(text):
    if text not in TABLES:
        near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(text, TABLES, 1))
        raise UserError(f"there is no table {text!r}: {near}`python bench.py` lists them")
    return text


def parse_args(argv):
    parser = FlagParser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("table", type=table_name, help="one of those above")
    add("paths", nargs="*", metavar="path", help="for peer and data: the folder of build-nanogpt; for "
        "recipes: the shards; for compare: --out folders of runs")
    add("--device", default="auto", help="auto, cuda or cpu (default auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--recipe", default="gpt2", choices=list(train_gpt2.RECIPES))
    add("--size", choices=list(SIZES), help="default gpt2 (124M), but small for hellaswag and recipes")
    add("--batch_size", type=parse_int, help="sequences a micro-step (default 16 on CUDA, 4 on a CPU); "
        "for recipes: a step (default 16)")
    add("--sequence_length", type=parse_int, help="tokens (default 1024; 256 on a CPU, except for memory)")
    add("--steps", type=parse_int, help="timed steps a turn (default 20 on CUDA, 4 on a CPU); for recipes: "
        "steps of the gpt2 runs (default 300); for data: times 52 MB of text (default 1)")
    add("--turns", type=parse_int, help="how often the table is measured (default 1 on CUDA, 2 on a CPU); "
        "for recipes: number of seeds")
    add("--compile", action="store_true", default=None, help="torch.compile on a CPU too")
    add("--no_compile", dest="compile", action="store_false", help="eager on CUDA too")
    add("--gpu", default="H100", help=f"for predict: {', '.join(GPUS)} (default H100)")
    add("--memory_gb", type=float, default=80, help="for memory: GB of the GPU (default 80)")
    add("--no_ideas", action="store_true", help="for recipes: no ablations")
    add("--only_ideas", action="store_true", help="for recipes: nothing but the ablations")
    add("--json", metavar="FILE", help="save what was measured")
    add("--plot", metavar="FILE.png", help="for ladder, recipes and compare: a picture (by matplotlib)")
    args = parser.parse_args(argv)
    args.path = args.paths[0] if args.paths else None
    if len(args.paths) > 1 and args.table != "compare":
        raise UserError(f"bench.py {args.table} takes one path, not {len(args.paths)}")
    args.device = "cpu" if args.table in ELSEWHERE else choose_device(args.device)
    if args.device == "mps":
        raise UserError("bench.py measures on cuda or cpu: give --device cpu")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
    check_outputs(args.json, args.plot)
    for name in ("batch_size", "sequence_length", "steps", "turns", "memory_gb"):
        if (value := getattr(args, name)) is not None and not 1 <= value < math.inf:
            raise UserError(f"--{name} {value}: must be at least 1")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        return print(__doc__ + "\nThe flags: python bench.py --help")
    if argv[:1] == ["work"]:
        return run_worker(WORKERS, argv[1])
    args = parse_args(argv)
    cuda = args.device.startswith("cuda")
    args.turns = args.turns or (1 if cuda else 2)
    base = Setting(device=args.device, recipe=args.recipe, size=args.size or "gpt2",
                   dtype=choose_dtype(args.dtype, args.device), B=args.batch_size or (16 if cuda else 4),
                   T=args.sequence_length or (1024 if cuda or args.table == "memory" else 256),
                   compile=cuda if args.compile is None else args.compile,
                   warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))
    about = {} if args.table in ELSEWHERE else {
        "machine": machine(base.device), "setting": asdict(base), "turns": args.turns}
    if about:
        print(f"bench.py {args.table}: {about['machine']}", flush=True)
    rows = TABLES[args.table](args, base)
    if args.json:
        content = {"table": args.table, **about, "rows": rows}
        replace_file(args.json, lambda file: file.write(json.dumps(content, indent=1).encode()))


if __name__ == "__main__":
    run_command(main)
