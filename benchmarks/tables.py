"""The tables of `bench.py` about steps, attention, memory, HellaSwag and scaling."""
import os
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.pictures import plot_ladder
from benchmarks.steps import described
from benchmarks.timing import (GB, find_largest, machine, measure, median_ms, print_table, rows_of,
                               supported_kernels)
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.cli import UserError


def ratio(a, b, times=1):
    """How many times as long `a` took as `b`, as text; None if one of them failed."""
    return None if "failed" in a or "failed" in b else f"{times * median_ms(a) / median_ms(b):.2f}x"


def ladder_settings(base):
    """Yields (name, setting, None) for each row of the ladder, or (name, None, reason) for one left out.

    A setting includes the changes of the rows before it.
    """
    cuda = base.device.startswith("cuda")
    s = replace(base, dtype="float32", tf32=not cuda, compile=False, attention="naive", vocab_size=50257,
                fused=False, loss_chunk=None if cuda else 0, tune_memory=cuda)
    yield "float32, textbook attention, vocabulary 50257, eager, plain AdamW", s, None
    for name, change, left_out in [
            ("+ TF32", dict(tf32=True), None if cuda else "TF32 is a format of NVIDIA's GPUs"),
            (f"+ {base.dtype} autocast", dict(dtype=base.dtype),
             None if base.dtype != "float32" else "no 16-bit products in this hardware"),
            ("+ torch.compile", dict(compile=True), None if base.compile else "on a CPU by --compile only"),
            ("+ SDPA's flash attention", dict(attention="flash"), None),
            ("+ vocabulary 50304", dict(vocab_size=50304), None),
            ("+ fused AdamW", dict(fused=True), None),
            *([] if cuda else [("+ freed memory kept (mallopt)", dict(tune_memory=True), None),
                               ("+ loss in tiles that stay in the cache", dict(loss_chunk=None), None)]),
            ("+ attention kernel of choice (auto)", dict(attention="auto"), None),
            (f"+ micro-batch {4 * base.B}", dict(B=4 * base.B),
             None if cuda else "1,024 tokens keep a CPU busy")]:
        s = s if left_out else replace(s, **change)
        yield name, None if left_out else s, left_out


def ladder(args, base):
    rungs = list(ladder_settings(base))
    settings = {name: s for name, s, _ in rungs if s}
    name, last = list(settings.items())[-1]
    results = measure(settings | {"matmul": replace(last, what="matmul")}, args.turns)
    step, matmul = results[name], results.pop("matmul")
    rates = []                                              # tokens/s of the rungs so far

    def cells(name, result):
        rates.append(settings[name].B * base.T / statistics.median(result["seconds"]))
        peak, gain = result["peak_flops"], rates[-1] / rates[max(0, len(rates) - 2)]
        # a shared machine's own speed changes by as much
        noise = ", noise" * (len(rates) > 1 and abs(gain - 1) < 0.1 and base.device == "cpu")
        return {"ms a step": median_ms(result), "tokens/s": rates[-1],
                "MFU": f"{rates[-1] * result['flops_per_token'] / peak:.1%}" if peak else "n/a",
                "peak GB": result["memory"] / GB, "start s": result["warmup_seconds"],
                "gain": f"{gain:.2f}x{noise}", "in all": f"{rates[-1] / rates[0]:.2f}x"}
    rows = rows_of("rung", results, cells)
    print_table(rows, {"left out": [f"{name[2:]} ({reason})" for name, s, reason in rungs if not s]})
    if "failed" in matmul:
        print(f"the matrix products of the last rung's step alone: {matmul['failed']}")
    elif "failed" not in step:
        print(f"the matrix products of the last rung's step alone take {median_ms(matmul):,.0f} ms: it runs "
              f"at {median_ms(matmul) / median_ms(step):.0%} of what they allow")
    if args.plot:
        plot_ladder(args.plot, rows, machine(base.device))
    return rows


def attention_table(args, base):
    kernels, missing = supported_kernels(base)
    results = measure({name: replace(base, what="attention", attention=name) for name in kernels}, args.turns)
    rows = rows_of("kernel", results, lambda kernel, r: {
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
    settings = {(kernel, chunk): replace(base, attention=kernel, loss_chunk=chunk, warmup=1, steps=1)
                for kernel in kernels if kernel != "auto"           # which is one of the others
                for chunk in (0, 8192 if cuda else 2048)}
    small, large = (measure({key: replace(s, B=B) for key, s in settings.items()}, 1)
                    for B in (base.B, 2 * base.B))
    rows = []
    for key, s in settings.items():
        a, b = small[key], large[key]
        logits = f"{s.loss_chunk:,} tokens" if s.loss_chunk else "all"
        row = {"attention": s.attention, "logits in memory": logits}
        if "failed" in a or "failed" in b:
            rows.append(row | {f"GB at {base.B}": a.get("failed") or b.get("failed")})
            continue
        sequence = max(1.0, (b["memory"] - a["memory"]) / base.B)             # bytes
        fits = {g: max(0, int(base.B + (g * GB - a["memory"]) / sequence))
                for g in sorted({8, 12, 24, 80, args.memory_gb})}
        if cuda and args.memory_gb <= torch.cuda.mem_get_info()[1] / GB:
            fits[args.memory_gb] = find_largest(s, fits[args.memory_gb], args.memory_gb)
        rows.append(row | {f"GB at {base.B}": a["memory"] / GB, f"at {2 * base.B}": b["memory"] / GB,
                           "MB a sequence": sequence / 1e6}
                    | {f"fit {g:g} GB": n for g, n in fits.items()})
    print(f"peak memory, and sequences of {base.T} tokens that fit, {base.size}, {base.dtype}, "
          f"{'torch.compile' if base.compile else 'eager'}; measured at micro-batches {base.B} and "
          f"{2 * base.B}, the rest follows from the two"
          f"{f', but {args.memory_gb:g} GB was tried' if cuda else ''}")
    print_table(rows, {"not on this machine": missing})
    return rows


def hellaswag_table(args, base):
    n = args.steps or (2000 if base.device.startswith("cuda") else 100)
    results = measure({B: replace(base, what="hellaswag", B=B, steps=n) for B in (4, 16, 32, 64, 128)},
                      args.turns)
    rows = rows_of("rows a forward", results, lambda B, r: {                # four rows are one example
        "examples/s": n / median_ms(r) * 1e3, "gain": ratio(results[4], r),
        "10,042 examples, s": 10042 / n * median_ms(r) / 1e3})
    print(f"{n} made-up examples of HellaSwag's lengths, model {described(base.size)}, {base.dtype}")
    print_table(rows)
    return rows


def scaling_table(args, base):
    """Measured: the same micro-batch on more processes. Then the estimates."""
    limit = torch.cuda.device_count() if base.device.startswith("cuda") else os.cpu_count()
    results = measure({n: replace(base, processes=n) for n in (1, 2, 4, 8) if n <= limit}, args.turns)
    rows = rows_of("processes", results, lambda n, r: {
        "tokens a step": n * base.B * base.T, "ms a step": median_ms(r),
        "tokens/s": n * base.B * base.T / median_ms(r) * 1e3, "against one": ratio(results[1], r, n)})
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
    """Of build-nanogpt; or of another checkout of this project, by its own bench.py."""
    script = Path(args.path or "build-nanogpt") / "train_gpt2.py"
    if not script.is_file():
        raise UserError(f"{script} is not there: git clone build-nanogpt from GitHub, and give its folder")
    peer = replace(base, peer=str(script.parent.resolve()))
    if script.with_name("bench.py").exists():
        settings = {str(script.parent): peer, "ours, as shipped": base}
    else:
        settings = {"build-nanogpt, as shipped": replace(peer, compile=False),
                    "build-nanogpt, torch.compile": replace(peer, compile=True),
                    "ours, as shipped": base, "its matrix products alone": replace(base, what="matmul")}
    results = measure(settings, args.turns)
    rows = rows_of("step", results, lambda _, r: {
        "ms": median_ms(r), "tokens/s": base.B * base.T / median_ms(r) * 1e3}
        | ({"peak GB": r["memory"] / GB, "start s": r["warmup_seconds"]} if "memory" in r else {})
        | {"time against ours": ratio(r, results["ours, as shipped"])})
    print_table(rows)
    return rows
