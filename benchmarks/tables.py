"""The tables of `bench.py` about the step: ladder, attention, peer."""
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import Setting, measure, median_ms, print_table, ratio, rows_of
from model import ATTENTION
from runtime.cli import UserError


def step_cells(s: Setting, result: dict) -> dict:
    return {"ms per step": median_ms(result), "tokens/s": s.B * s.T / median_ms(result) * 1e3,
            "peak GB": result["memory"] / 1e9, "start s": result["warmup_seconds"]}


def ladder_rungs(base: Setting) -> dict:
    """{rung: its Setting, which has the changes of the rungs before it, or why it is left out}."""
    kind = base.device.split(":")[0]
    s = replace(base, dtype="float32", tf32=kind != "cuda", compile=False, attention="naive",
                vocab_size=50257, fused=False, loss_chunk=0 if kind == "cpu" else None,
                tune_memory=kind != "cpu")
    rungs = {"float32, textbook attention, vocabulary 50257, eager, plain AdamW": s}
    for name, change, why_not in [
            ("TF32", dict(tf32=True), kind != "cuda" and "only NVIDIA's GPUs have this format"),
            (f"{base.dtype} autocast", dict(dtype=base.dtype),
             base.dtype == "float32" and "the hardware has no 16-bit products, or --dtype is float32"),
            ("torch.compile", dict(compile=True), not base.compile and "only with --compile"),
            ("SDPA's flash attention", dict(attention="flash"), kind == "mps" and "Metal has its own"),
            ("vocabulary 50304", dict(vocab_size=50304), False),
            ("fused AdamW", dict(fused=True), False),
            ("freed memory kept (mallopt)", dict(tune_memory=True), kind != "cpu" and "for CPUs"),
            ("loss in tiles that stay in the cache", dict(loss_chunk=None), kind != "cpu" and "for CPUs"),
            ("attention kernel of choice (auto)", dict(attention="auto"), False),
            (f"micro-batch {4 * base.B}", dict(B=4 * base.B), kind != "cuda" and "for large GPUs")]:
        s = s if why_not else replace(s, **change)
        rungs[f"+ {name}"] = why_not or s
    return rungs


def ladder(args, base: Setting) -> list[dict]:
    rungs = ladder_rungs(base)
    results = measure(rungs, args.turns)
    rows = rows_of("rung", results, lambda rung, r: step_cells(rungs[rung], r))
    measured = [row for row in rows if "failed" not in row]
    peak = max((r.get("peak_flops", 0) for r in results.values()), default=0)       # of the 16-bit rungs
    for row, before in zip(measured, measured[:1] + measured, strict=False):
        row["MFU"] = f"{row['tokens/s'] * results[row['rung']]['flops_per_token'] / peak:.1%}"
        row["gain"] = ratio(row["tokens/s"], before["tokens/s"])
        row["in all"] = ratio(row["tokens/s"], measured[0]["tokens/s"])
    print_table(rows)
    print(f"MFU is the share of {peak / 1e12:.2f} TFLOP/s (from the data sheet, or measured on the MLP's "
          "products); a gain below 1.1x may be noise")
    return rows


def attention_table(args, base: Setting) -> list[dict]:
    settings = {kernel: replace(base, what="attention", attention=kernel) for kernel in ATTENTION}
    rows = rows_of("kernel", measure(settings, args.turns), lambda kernel, r: {
        "forward + backward ms": median_ms(r), "error of y": f"{r['error_forward']:.1e}",
        "largest error of dq, dk, dv": f"{r['error_backward']:.1e}"})
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; errors are |x - x64| / |x64|")
    print_table(rows)
    return rows


def peer_table(args, base: Setting) -> list[dict]:
    """Our step and that of build-nanogpt; or of another checkout of this project, by its own bench.py."""
    script = Path(args.path or "build-nanogpt") / "train_gpt2.py"
    if not script.is_file():
        raise UserError(f"{script} does not exist: git clone build-nanogpt from GitHub, and name its folder")
    peer = replace(base, peer=str(script.parent.resolve()))
    settings = {"ours": base} | (
        {str(script.parent): peer} if script.with_name("bench.py").exists() else
        {"build-nanogpt, as shipped": replace(peer, compile=False),
         "build-nanogpt, torch.compile": replace(peer, compile=True)})
    results = measure(settings, args.turns)
    ours = None if "failed" in results["ours"] else median_ms(results["ours"])
    rows = rows_of("step", results, lambda name, r: step_cells(settings[name], r) | {
        "time against ours": ratio(median_ms(r), ours)})
    print_table(rows)
    return rows
