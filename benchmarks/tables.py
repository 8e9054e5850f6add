"""The tables of `bench.py` about the step: ladder, attention, peer."""
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.timing import (
    Setting,
    measure,
    measure_once,
    median_ms,
    print_table,
    ratio,
    rows_of,
    take_turns,
)
from model import ATTENTION
from runtime.cli import UserError


def step_cells(s: Setting, result: dict) -> dict:
    ms = median_ms(result)
    return {
        "ms per step": ms,
        "tokens/s": s.B * s.T / ms * 1e3,
        "peak GB": result["memory"] / 1e9,
        "start s": result["warmup_seconds"],
    }


# ---------------------------------------------------------------------- ladder

@dataclass
class Rung:
    """One optimisation more than the last rung below it that could run."""
    change: dict                        # of the setting of that rung
    left_out: str = ""                  # why this device leaves the rung out
    setting: Setting | None = None      # with which it was measured


def first_setting(base: Setting) -> Setting:
    """The lowest rung: nothing is optimised."""
    kind = base.device.split(":")[0]
    loss_chunk = None
    if kind == "cpu":
        loss_chunk = 0
    return replace(
        base,
        dtype="float32",
        tf32=kind != "cuda",
        compile=False,
        attention="naive",
        vocab_size=50257,
        fused=False,
        loss_chunk=loss_chunk,
        tune_memory=kind != "cpu",
    )


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

    rungs = {}
    rungs["float32, textbook attention, vocabulary 50257, eager, plain AdamW"] = Rung({})
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
    rungs["+ freed memory kept (mallopt)"] = Rung({"tune_memory": True}, needs(on_cpu, "for CPUs"))

    # A compiler fuses the logits with the loss: train_gpt2.make_model makes no tiles there.
    rungs["+ loss in tiles that stay in the cache"] = Rung(
        {"loss_chunk": None},
        needs(on_cpu and not base.compile, "for CPUs, where nothing is compiled"))
    rungs["+ attention kernel of choice (auto)"] = Rung({"attention": "auto"})
    rungs[f"+ micro-batch {4 * base.B}"] = Rung(
        {"B": 4 * base.B}, needs(on_gpu, "for large GPUs"))
    return rungs


def measure_ladder(rungs: dict[str, Rung], base: Setting, turns: int) -> dict:
    """{rung: what was measured, or {"failed": why}}. Notes the setting of each rung in it."""
    highest = first_setting(base)       # of the rungs that could run

    def run(rung):
        nonlocal highest
        if rung.left_out:
            return {"failed": rung.left_out}
        # The first turn decides: what cannot run here is not part of the rungs above.
        if rung.setting is None:
            rung.setting = replace(highest, **rung.change)
        result = measure_once(rung.setting)
        if "failed" not in result:
            highest = rung.setting
        return result

    return take_turns(run, rungs, turns)


def ladder(args, base: Setting) -> list[dict]:
    rungs = ladder_rungs(base)
    results = measure_ladder(rungs, base, args.turns)
    rows = rows_of("rung", results, lambda name, result: step_cells(rungs[name].setting, result))

    # On a CPU each rung measures the peak, in its own dtype: the highest is that of 16 bits.
    peak = max((result.get("peak_flops", 0) for result in results.values()), default=0)
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
    return rows


# ---------------------------------------------------------------------- attention

def attention_table(args, base: Setting) -> list[dict]:
    settings = {kernel: replace(base, what="attention", attention=kernel) for kernel in ATTENTION}
    results = measure(settings, args.turns)

    def cells(kernel, result):
        return {
            "forward + backward ms": median_ms(result),
            "error of y": f"{result['error_forward']:.1e}",
            "largest error of dq, dk, dv": f"{result['error_backward']:.1e}",
        }

    rows = rows_of("kernel", results, cells)
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; "
          "errors are |x - x64| / |x64|")
    print_table(rows)
    return rows


# ---------------------------------------------------------------------- peer

def peer_table(args, base: Setting) -> list[dict]:
    """Our step and that of build-nanogpt, or of another checkout of this project, by its bench.py."""
    script = Path(args.path or "build-nanogpt") / "train_gpt2.py"
    if not script.is_file():
        raise UserError(f"{script} does not exist: git clone build-nanogpt from GitHub, and name its "
                        "folder")

    peer = replace(base, peer=str(script.parent.resolve()))
    settings = {"ours": base}
    if script.with_name("bench.py").exists():
        settings[str(script.parent)] = peer
    else:
        settings["build-nanogpt, as shipped"] = replace(peer, compile=False)
        settings["build-nanogpt, torch.compile"] = replace(peer, compile=True)
    results = measure(settings, args.turns)

    our_ms = None
    if "failed" not in results["ours"]:
        our_ms = median_ms(results["ours"])

    def cells(name, result):
        row = step_cells(settings[name], result)
        row["time against ours"] = ratio(median_ms(result), our_ms)
        return row

    rows = rows_of("step", results, cells)
    print_table(rows)
    return rows
