"""bench.py recipes."""
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.benchmark import BENCH, print_table
from runtime.cli import UserError
from runtime.log import read_log
from runtime.plots import plot_curves

# Each idea of the speedrun recipe is a line of the code. To measure it, copies of the scripts train with another line there.
ABLATIONS = {
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


def ablated_source(idea):
    """The text of the idea's file without it. The line must be there exactly once."""
    file, line, instead = ABLATIONS[idea]
    text = BENCH.with_name(file).read_text(encoding="utf-8")
    assert text.count(line) == 1, f"{idea}: {file} holds its line {text.count(line)} times"
    return file, text.replace(line, instead)


def validation_curve(flags, idea=None, threads=None):
    """{tokens: validation loss} of a run of train_gpt2.py with these flags, without `idea`; nan from where it was not finite."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        for name in ("runtime", "assets"):
            shutil.copytree(BENCH.with_name(name), folder / name)
        if idea:
            file, text = ablated_source(idea)
            (folder / file).write_text(text, encoding="utf-8")
        command = [sys.executable, str(folder / "train_gpt2.py"), *map(str, flags), "--out", str(folder / "log")]
        result = subprocess.run(command, capture_output=True, text=True,
                                env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
        diverged = "gradient norm" in result.stderr             # the one line of a loss that is not finite
        if result.returncode and not diverged:
            raise UserError(result.stderr.strip().split("\n")[-1])
        losses = {step: value for step, kind, value in read_log(folder / "log" / "log.txt") if kind == "val"}
        names = "--val_every", "--max_steps", "--total_batch_size"
        every, steps, tokens = (int(flags[flags.index(name) + 1]) for name in names)
        return {step * tokens: losses.get(step, math.nan) for step in (*range(0, steps, every), steps)}


def recipes_table(args, base, shape):
    """The gpt2 recipe at three rates, the best of them against speedrun in a third of the steps, and speedrun without each of
    its ideas. A CPU of n cores makes n runs at a time, of a thread each."""
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    cuda = base.device.startswith("cuda")
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
    runs |= {("without", idea): runs["speedrun", short] for idea in (ABLATIONS if not args.no_ideas else [])}
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
