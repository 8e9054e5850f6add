"""Benchmarks: how fast a training step is, and how the losses of runs compare.

    python bench.py ladder              a training step, made faster one flag at a time
    python bench.py peer CLONE          our step in turn with that of a clone of build-nanogpt
    python bench.py compare OUT ...     the losses of runs (--out folders) and of .csv curves

A row of `ladder` and `peer` is a run in a process of its own, so that no row inherits memory or
compiled code from another. They are measured in turn, because the speed of a shared machine changes
within minutes. Both also take flags of train_gpt2.py, which all rows then have.

Curves whose names differ in their seed alone, as "gpt2_seed_0" and "gpt2_seed_1", are one variant:
one row of the table, one colour of the picture. Two variants are compared seed by seed.
"""
import csv
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from config import FLAGS
from runtime import hardware
from runtime.cli import FlagParser, RunError, UserError, check_range, run_command, user_path
from runtime.console import clock
from runtime.files import read_text, reading, replace_file
from runtime.metrics import read_metrics
from runtime.plots import new_figure, short_count
from runtime.shards import write_shard
from runtime.tokenizer import VOCAB_SIZE

SCRIPT = Path(__file__).resolve().parent / "train_gpt2.py"
USERS_ENVIRONMENT = dict(os.environ)        # choose_device adds settings of ours to it
WARMUP = 2                                  # steps that do not count: they allocate, and compile


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
    seconds: list[float]        # of each step, without the warm-up
    tokens: int                 # of a step
    printed: str


def parse_timed(command: str, clone: str | None, words: list[str]):
    """The arguments of ladder or peer, and the flags {name: value} of the runs that it times."""
    parser = FlagParser(
        prog=f"bench.py {command}", epilog="Other flags are those of train_gpt2.py.")
    if clone:
        parser.add_argument("clone", type=user_path, help=clone)
    parser.add_argument("--steps", type=int,
                        help="Timed steps in a turn (default 4, on CUDA 20).")
    parser.add_argument("--turns", type=int, default=2,
                        help="How often all is measured (default 2).")
    args, others = parser.parse_known_args(words)
    check_range("turns", args.turns, 1, 1000)
    if args.steps is not None:
        check_range("steps", args.steps, 1, 2**40)

    given = FLAGS.parse("", others)
    args.dtype_is_typed = "dtype" in given
    device = hardware.choose_device(given.get("device", "auto"))
    on_gpu = device.startswith("cuda")
    B, T, steps = 4, 256, 4
    if on_gpu:
        B, T, steps = 16, 1024, 20

    flags = dict(block_size=T, batch_size=B, compile=on_gpu) | given
    flags["device"] = device
    flags["dtype"] = hardware.choose_dtype(given.get("dtype", "auto"), device)
    flags["max_steps"] = WARMUP + (args.steps or steps)
    flags.setdefault("sequence_length", flags["block_size"])
    flags.setdefault("total_batch_size", flags["batch_size"] * flags["sequence_length"])
    flags |= dict(val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)
    return args, flags


def print_machine(flags: dict) -> None:
    name = hardware.device_name(flags["device"])
    threads = torch.get_num_threads()
    print(f"{name}, {threads} threads, torch {torch.__version__}, {date.today()}", flush=True)


def write_tokens(folder: str, flags: dict) -> str:
    """Shards of random tokens for these runs, where build-nanogpt's script looks for them, too."""
    data = Path(folder, "edu_fineweb10B")
    data.mkdir()
    # Four times the batch: the highest rung of the ladder on a GPU has as much.
    count = 4 * flags["max_steps"] * flags["total_batch_size"] + 1
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, count, dtype=np.uint16)
    for split in ("train", "val"):
        write_shard(data / f"random_{split}_000001.npy", tokens)
    return str(data)


def execute(words: list, folder: str) -> str:
    """Runs a Python script in `folder`. Returns what it printed. RunError if it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder,
                          env=USERS_ENVIRONMENT)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(lines[-1][:200])
    return done.stdout


def time_run(flags: dict, folder: str) -> Timing:
    """A run of train_gpt2.py with these flags."""
    out = tempfile.mkdtemp(dir=folder)
    flags = flags | dict(out=out)
    words = [f"--{name}={value}" for name, value in flags.items()]
    printed = execute([SCRIPT, *words], folder)

    tokens = flags["total_batch_size"]
    rows = read_metrics(Path(out, "metrics.csv"))[WARMUP:]
    seconds = [tokens / row["tokens_per_second"] for row in rows]
    return Timing(seconds, tokens, printed)


def step_cells(timings: list[Timing]) -> dict:
    """Those of all turns: the median step, and the largest peak of the memory."""
    step = median_step(timings)
    peaks = [float(re.search(r"peak memory (\S+) GB", turn.printed)[1]) for turn in timings]
    cells = {
        "ms per step": f"{step * 1e3:,.1f}",
        "tokens/s": f"{timings[0].tokens / step:,.0f}",
        "peak GB": f"{max(peaks):.1f}",
    }
    mfu = re.findall(r"mfu (\d+%)", timings[0].printed)         # of each step, where it is known
    if mfu:
        cells["MFU"] = mfu[-1]
    return cells


def median_step(timings: list[Timing]) -> float:
    return median(seconds for turn in timings for seconds in turn.seconds)


# --------------------------------------------------------------------- bench.py ladder

def ladder_rungs(flags: dict, dtype_is_typed: bool = False) -> dict[str, dict]:
    """{what the table calls a rung: the flags that it adds}; `flags` are those of the highest."""
    on_gpu = flags["device"].startswith("cuda")
    rungs = {
        "float32, textbook attention, vocabulary 50257, eager": dict(
            dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257),
    }
    if on_gpu:
        rungs["+ TF32"] = dict(tf32=True)
    if flags["dtype"] != "float32":
        rungs[f"+ {flags['dtype']} autocast"] = dict(dtype=flags["dtype"])
    if flags["compile"]:
        rungs["+ torch.compile"] = dict(compile=True)
    rungs["+ attention auto (on a GPU: SDPA's flash attention)"] = dict(attention="auto")
    rungs["+ vocabulary 50304"] = dict(vocab_size=50304)
    if on_gpu:
        larger = {name: 4 * flags[name] for name in ("batch_size", "total_batch_size")}
        rungs[f"+ micro-batch {larger['batch_size']}"] = larger

    # A CPU may have bfloat16, and 'auto' choose float32, because it is faster there.
    has_both = flags["device"] == "cpu" and hardware.bfloat16_of_cpu() in hardware.SLOW_BFLOAT16
    if has_both and flags["dtype"] == "float32" and not dtype_is_typed:
        rungs["+ bfloat16 autocast, which 'auto' leaves out here"] = dict(dtype="bfloat16")
    return rungs


def ladder(words: list[str]) -> None:
    args, flags = parse_timed("ladder", None, words)
    rungs = ladder_rungs(flags, args.dtype_is_typed)
    timings = {name: [] for name in rungs}
    print_machine(flags)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags["data"] = write_tokens(folder, flags)
        for _ in range(args.turns):
            # A rung stands on those below it that could run.
            below = dict(flags)
            for name, added in rungs.items():
                try:
                    timings[name].append(time_run(below | added, folder))
                    below |= added
                except RunError as error:
                    print(f"not measured: {name}: {error}", flush=True)
    print_table(ladder_rows({name: found for name, found in timings.items() if found}))
    print("a gain below 1.1x may be noise")


def ladder_rows(timings: dict[str, list[Timing]]) -> list[dict]:
    rows = []
    rates = []                          # tokens per second
    for name, turns in timings.items():
        rate = turns[0].tokens / median_step(turns)
        rates.append(rate)
        below = rates[max(0, len(rates) - 2)]
        gains = {
            "gain": f"{rate / below:.2f}x",
            "in all": f"{rate / rates[0]:.2f}x",
        }
        rows.append({"rung": name} | step_cells(turns) | gains)
    return rows


# --------------------------------------------------------------------- bench.py peer

# build-nanogpt's script gets no HellaSwag and no tokenizer, whose files it would download: a step
# needs neither. At its end it says how much memory it took, as our runs do.
BEFORE_THE_SCRIPT = """
import sys, types, tiktoken
sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
tiktoken.get_encoding = lambda name: None
"""
AFTER_THE_SCRIPT = f"""
sys.path.append({str(SCRIPT.parent)!r})
from runtime.hardware import peak_memory
print(f"peak memory {{peak_memory(device) / 1e9:.1f}} GB")
"""


def peers_script(path: Path, flags: dict, dtype: str, compiles: bool) -> str:
    """build-nanogpt's train_gpt2.py with the numbers of our run. UserError for another script."""
    ours = FLAGS.merge(flags)
    shape = (f"block_size={ours.block_size}, n_layer={ours.n_layer}, n_head={ours.n_head}, "
             f"n_embd={ours.n_embd}")
    changes = {
        r"^total_batch_size = \d+": f"total_batch_size = {ours.total_batch_size}",
        r"^B = \d+": f"B = {ours.batch_size}",
        r"^T = \d+": f"T = {ours.sequence_length}",
        r"GPTConfig\(vocab_size=50304": f"GPTConfig(vocab_size=50304, {shape}",
        r"^use_compile = \w+": f"use_compile = {compiles}",
        r"^device_type = ": f"device = {ours.device!r}\ndevice_type = ",
        r"dtype=torch\.bfloat16": f"dtype=torch.{dtype}, enabled={dtype != 'float32'}",
        # It evaluates at step 0, and every 250 steps: step 1 again and again is training alone.
        r"^for step in range\(max_steps\)": f"for step in [1] * {ours.max_steps}",
    }
    text = read_text(path)
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count == 0:
            raise UserError(f"{path} is not that of build-nanogpt: git clone it from GitHub, and "
                            "name its folder")
    return BEFORE_THE_SCRIPT + text + AFTER_THE_SCRIPT


def time_peer(script: str, tokens: int, folder: str) -> Timing:
    path = Path(folder, "train_gpt2.py")
    path.write_text(script, encoding="utf-8")
    printed = execute([path], folder)
    seconds = [float(ms) / 1e3 for ms in re.findall(r"dt: ([\d.]+)ms", printed)]
    return Timing(seconds[WARMUP:], tokens, printed)


def peer(words: list[str]) -> None:
    args, flags = parse_timed("peer", "The folder of a git clone of build-nanogpt.", words)
    path = Path(args.clone, "train_gpt2.py")
    dtype = flags["dtype"]
    scripts = {"build-nanogpt, as shipped": peers_script(path, flags, "bfloat16", compiles=False)}
    if dtype != "bfloat16":
        scripts[f"build-nanogpt, {dtype}"] = peers_script(path, flags, dtype, compiles=False)
    if flags["compile"]:
        scripts["build-nanogpt, torch.compile"] = peers_script(path, flags, dtype, compiles=True)

    timings = {"ours": []} | {name: [] for name in scripts}
    print_machine(flags)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags["data"] = write_tokens(folder, flags)
        for _ in range(args.turns):
            timings["ours"].append(time_run(flags, folder))
            for name, script in scripts.items():
                timings[name].append(time_peer(script, flags["total_batch_size"], folder))

    rows = []
    for name, turns in timings.items():
        ratio = median_step(turns) / median_step(timings["ours"])
        rows.append({"step": name} | step_cells(turns) | {"time against ours": f"{ratio:.2f}x"})
    print_table(rows)


# --------------------------------------------------------------------- bench.py compare: reading

@dataclass
class Curve:
    """The validations of a run, or of a curve in a file."""
    name: str
    tokens: list[float] = field(default_factory=list)       # of training before each validation
    seconds: list[float] = field(default_factory=list)      # nan in a file without them, as tokens
    losses: list[float] = field(default_factory=list)
    val_tokens: int | None = None                           # of each validation, of a run

    @property
    def xs(self) -> list[float]:
        """The tokens, or the seconds of a curve whose tokens are not known."""
        return self.tokens if math.isfinite(self.tokens[-1]) else self.seconds


def read_curves(source: str) -> list[Curve]:
    """The curve of a run's --out folder, or those of a .csv file. UserError if there is none."""
    path = Path(source)
    remedy = "choose the --out folder of a run, or a .csv with the columns tokens and loss"
    with reading(path, remedy):
        if path.is_dir():
            curves = [curve_of_run(source, read_metrics(path / "metrics.csv", remedy))]
        else:
            curves = parse_curves(source, read_text(path))
        if not any(curve.losses for curve in curves):
            raise ValueError("it has no validation loss")
    return curves


def curve_of_run(name: str, metrics) -> Curve:
    """The validations in a metrics.csv."""
    measured = {}
    for axis in ("tokens", "seconds", "val_tokens"):
        measured[axis] = [x for x, _ in metrics.measured("val", over=axis)]
    losses = [loss for _, loss in metrics.measured("val")]
    val_tokens = measured["val_tokens"][-1] if losses else None
    return Curve(name, measured["tokens"], measured["seconds"], losses, val_tokens)


def parse_curves(source: str, text: str) -> list[Curve]:
    """The curves in the text of a .csv file. KeyError or ValueError if it is none.

    Its columns are `loss`, and `tokens`, `seconds` or both. A column `run` tells several curves
    apart. A line that begins with # is a comment.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    curves = {}
    for row in csv.DictReader(lines):
        name = row.get("run", source)
        curve = curves.setdefault(name, Curve(name))
        curve.tokens.append(float(row.get("tokens", "nan")))
        curve.seconds.append(float(row.get("seconds", "nan")))
        curve.losses.append(float(row["loss"]))

    for curve in curves.values():
        grows = (np.diff(curve.xs) > 0).all()
        if not grows or not np.isfinite(curve.xs + curve.losses).all():
            raise ValueError(f"{curve.name} has no growing numbers of tokens with a loss for each")
    return list(curves.values())


def variants(curves: list[Curve]) -> dict[str, dict[str, Curve]]:
    """{name without the seed: {seed: curve}}. UserError for two curves of the same name."""
    found = {}
    for curve in curves:
        name, seed = re.fullmatch(r"(.*?)(?:,?[ _]seed[ _](\d+))?", curve.name).groups()
        if seed in found.setdefault(name, {}):
            raise UserError(f"two curves are called {curve.name}: give one of them another name")
        found[name][seed] = curve
    return found


# --------------------------------------------------------------------- bench.py compare: the table

def three_digits(n: float) -> str:
    """'1.23M'."""
    return short_count(float(f"{n:.3g}"))


def spread(numbers: list[float], form: str) -> str:
    """Their mean, and of several the smallest and the largest: '6.592 (6.558 to 6.616)'."""
    text = format(mean(numbers), form)
    if len(numbers) > 1:
        text += f" ({min(numbers):{form}} to {max(numbers):{form}})"
    return text


def where_it_reaches(target: float, xs: list[float], losses: list[float]) -> float:
    """Where on the axis the loss was first at `target`, linear between validations; else nan."""
    for i, loss in enumerate(losses):
        if loss <= target:
            before = max(0, i - 1)
            return np.interp(target, (loss, losses[before]), (xs[i], xs[before])).item()
    return math.nan


def variant_row(name: str, by_seed: dict[str, Curve], first: dict[str, Curve]) -> dict:
    """The row of a variant, which says how it stands to the first one."""
    curves = list(by_seed.values())
    tokens = curves[0].tokens[-1]
    seconds = mean(curve.seconds[-1] for curve in curves)
    row = {
        "run": name,
        "tokens": three_digits(tokens) if math.isfinite(tokens) else "",
        "time": clock(seconds) if math.isfinite(seconds) else "",
        "val loss": spread([curve.losses[-1] for curve in curves], ".3f"),
        "lowest": f"{mean(min(curve.losses) for curve in curves):.3f}",
    }
    if by_seed is first:
        return row

    # A seed that the first one does not have is compared with its first curve.
    any_first = next(iter(first.values()))
    pairs = [(curve, first.get(seed, any_first)) for seed, curve in by_seed.items()]
    for curve, other in pairs:
        known = None not in (curve.val_tokens, other.val_tokens)
        if known and curve.val_tokens != other.val_tokens:
            return row | {"against the first": "measured on other tokens"}
    return row | compared(pairs)


def compared(pairs: list[tuple[Curve, Curve]]) -> dict:
    """The cells that compare a variant with the first one: [(its curve, the first's), ...].

    Its loss at the newest validation that the first one reaches, and when it had the first one's
    final loss; linear between validations, but not from the new model's on, whose loss falls far
    faster. Both are over time where a curve has no tokens.
    """
    axis, form = "tokens", three_digits
    if any(math.isnan(curve.tokens[-1]) for pair in pairs for curve in pair):
        axis, form = "seconds", clock

    differences, shares = [], []
    for curve, first in pairs:
        xs, first_xs = getattr(curve, axis), getattr(first, axis)
        begin = min((x for x in first_xs if x > 0), default=math.inf)
        at = max((x for x in xs if begin <= x <= first_xs[-1]), default=math.nan)
        loss, first_loss = np.interp(at, xs, curve.losses), np.interp(at, first_xs, first.losses)
        differences.append(loss - first_loss)
        shares.append(where_it_reaches(first.losses[-1], xs, curve.losses) / first_xs[-1])

    cells = {}
    if math.isfinite(mean(differences)):
        cells["against the first"] = f"{spread(differences, '+.3f')} at {form(at)}"
    if math.isfinite(mean(shares)):
        reached = mean(shares) * first_xs[-1]
        cells["the first's end after"] = f"{form(reached)} ({mean(shares):.0%})"
    return cells


# --------------------------------------------------------------------- bench.py compare: a picture

def plot_variants(path: str, found: dict[str, dict[str, Curve]], title: str) -> None:
    """Validation loss against tokens, and against the time of training, where they are known.

    `found` is what `variants` returns. A dashed line is the final loss of the first one: where
    another meets it, one can read how many tokens and how much time that one needed. `path` ends in
    .png, .svg or .pdf.
    """
    curves = [curve for by_seed in found.values() for curve in by_seed.values()]
    known = []
    for axis in ("tokens", "seconds"):
        if any(math.isfinite(getattr(curve, axis)[-1]) for curve in curves):
            known.append(axis)
    figure = new_figure(figsize=(6 * len(known), 4.5))
    figure.suptitle(title)
    panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, known, strict=True):
        draw_panel(panel, axis, found)

    # The first tenth of a run is cut off: its fall would hide how the runs differ later.
    highest = max(np.interp(0.1 * curve.xs[-1], curve.xs, curve.losses) for curve in curves)
    lowest = min(min(curve.losses) for curve in curves)
    panels[0].set_ylim(lowest - 0.05, highest + 0.05)
    panels[0].set_ylabel("validation loss")
    panels[0].legend(fontsize=8)
    ending = Path(path).suffix[1:]
    replace_file(path, lambda file: figure.savefig(file, format=ending, dpi=130))


def draw_panel(panel, axis: str, found: dict[str, dict[str, Curve]]) -> None:
    """Draws the variants over "tokens" or "seconds", each in one colour."""
    for i, (name, by_seed) in enumerate(found.items()):
        for curve in by_seed.values():
            xs = getattr(curve, axis)
            panel.plot(xs, curve.losses, f"C{i % 10}", marker="o", markersize=3)
        panel.lines[-1].set_label(name)             # of all seeds together
    name, by_seed = next(iter(found.items()))
    end = mean(curve.losses[-1] for curve in by_seed.values())
    panel.axhline(end, color="grey", linestyle="--", linewidth=0.8, zorder=0,
                  label=f"{name} at its end: {end:.2f}")
    panel.set(xlabel=f"{axis} of training", xlim=(0, None))
    panel.grid(alpha=0.3)
    panel.xaxis.set_major_formatter(short_count)


# --------------------------------------------------------------------- the commands

def compare(argv: list[str]) -> None:
    parser = FlagParser(prog="bench.py compare")
    parser.add_argument("curves", type=user_path, nargs="+",
                        help="The --out folder of a run, or a .csv file of curves.")
    parser.add_argument("--plot", type=user_path, metavar="FILE",
                        help="Draw the curves: .png, .svg or .pdf.")
    parser.add_argument("--title", default="", help="The title of the picture.")
    args = parser.parse_args(argv)
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot} is no picture: choose a .png, .svg or .pdf")

    found = variants([curve for source in args.curves for curve in read_curves(source)])
    first = next(iter(found.values()))
    print_table([variant_row(name, by_seed, first) for name, by_seed in found.items()])
    if args.plot:
        plot_variants(args.plot, found, args.title)
        print(f"saved {args.plot}")


def main(argv: list[str] | None = None) -> None:
    if argv is None:
        argv = sys.argv[1:]
    commands = {"ladder": ladder, "peer": peer, "compare": compare}
    if not argv or argv[0].startswith("-"):
        FlagParser(prog="bench.py", description=__doc__).parse_args(argv or ["--help"])

    command, *words = argv
    if command not in commands:
        raise UserError(f"bench.py has no command {command}: choose {', '.join(commands)}")
    commands[command](words)


if __name__ == "__main__":
    run_command(main)
