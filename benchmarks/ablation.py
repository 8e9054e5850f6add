"""`bench.py recipes`: gpt2 and a faster recipe on the user's shards, and that recipe's ablations."""
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.compare import plot_runs, tokens_text
from benchmarks.curves import Curve, read_curve
from benchmarks.steps import shape_of
from benchmarks.timing import BENCH, print_table
from runtime.cli import UserError
from runtime.console import counted

# {recipe: {idea: (a piece of the code, the piece without the idea, and so on)}}. To measure an idea, a copy
# of the project with the other pieces is trained.
ABLATIONS = {
    "speedrun": {
        "rotary positions (none instead)": (
            "angles.cos().to(dtype), angles.sin()", "(0 * angles).cos().to(dtype), (0 * angles).sin()"),
        "QK-norm": ("rotate(norm(q), *rotary), rotate(norm(k), ", "rotate(q, *rotary), rotate(k, "),
        "value residual": ("(1 - self.lamb) * v + self.lamb * v1", "v + 0 * self.lamb"),
        "embedding shortcut x0": ("x + self.lambdas[1] * x0", "x"),
        "ReLU squared (GELU instead)": ("F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))"),
        "projections and head start at zero (normal, 0.02)": ("p.zero_()", "p.normal_(0.0, 0.02)"),
        "norm after the embedding": ("norm(self.transformer.wte(idx).to(dtype))",
                                     "self.transformer.wte(idx).to(dtype)"),
        "softcap": ("softcap = 30.0", "softcap = 0.0"),
        "Muon (Adam at a tenth of its rate)": (
            "from runtime.muon import Muon",
            "def Muon(p, lr, **_): return torch.optim.Adam(p, 0.1 * lr, betas=(0.9, 0.95), fused=True)"),
        "momentum warm-up": ("(last - first) * min(1.0, step / (0.154 * config.max_steps))", "last - first"),
        "constant rate, then linear (cosine instead)": (
            "min(1.0, max(0, config.max_steps - step) / (config.cooldown * config.max_steps))",
            "0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.max_steps)))"),
        "head's rate by width (0.002 instead)": ("0.1 * max_lr * 768 / self.config.n_embd", "0.1 * max_lr"),
    },
    "frontier": {
        "several updates a step (one instead)": ("max_steps=2500", "max_steps=2500, updates_per_step=1"),
        "late keys": ("offset_keys(k, begins)", "k", "c_q.weight[late:]", "c_k.weight[late:]"),
        "start of the late keys as the queries": ("c_q.weight[late:]", "c_k.weight[late:]"),
        "head tied to the embedding": (
            "self.lm_head.weight = self.transformer.wte.weight ",
            "self.lm_head.weight = nn.Parameter(torch.zeros_like(self.transformer.wte.weight)) ",
            '"stem.weight")', '"stem.weight", "lm_head.weight")',
            '"params": wte + stem', '"params": [*wte, *stem, ("lm_head.weight", params["lm_head.weight"])]',
            "if n not in dict(matrices)", 'if n not in dict(matrices) and n != "lm_head.weight"',
            "self.transformer.stem(self.stems).add_(self.lm_head.weight)", "self.lm_head.weight"),
        "eps of the embedding (1e-8 instead)": ("0.1 / tokens}", "1e-8}"),
        "rows for stems": (
            "self.transformer.stem(self.stems[tokens])", "0 * self.transformer.stem(self.stems[tokens])",
            "self.transformer.stem(self.stems).add_", "(0 * self.transformer.stem(self.stems)).add_"),
        "bigram table": ("pair.to(dtype)", "0 * pair.to(dtype)"),
        "bigram table's rate (ten times as high instead)": ("1.5 * max_lr", "15 * max_lr"),
        "Adam's beta1 of 0.7 (speedrun's 0.9 instead)": ("betas=(0.7,", "betas=(0.9,"),
        "Muon's momentum of 0.80 to 0.85 (speedrun's 0.85 to 0.95 instead)": (
            "step, config, 0.80, last), back", "step, config), 1"),
        "softcap of 15 (speedrun's 30 instead)": ("softcap = 15.0", "softcap = 30.0"),
    },
}
SHARES = {"speedrun": 3, "frontier": 10}            # steps of gpt2's run for one of the recipe's


def ablated_source(recipe: str, idea: str) -> tuple[str, str]:
    """(file, its text without the idea). Each of the idea's pieces must occur in it exactly once."""
    pieces = ABLATIONS[recipe][idea]
    for file in (f"{recipe}.py", "runtime/language_model.py", "train_gpt2.py"):
        text = (BENCH.parent / file).read_text(encoding="utf-8")
        if pieces[0] in text:
            break
    for piece, other in zip(pieces[::2], pieces[1::2], strict=True):
        assert text.count(piece) == 1, f"{idea}: {file} holds {piece!r} {text.count(piece)} times"
        text = text.replace(piece, other)
    return file, text


def train(flags: dict, idea: str | None = None) -> Curve:
    """A run of train_gpt2.py with `flags`, {name: value}, without `idea`. One that diverges has no losses
    from there on. UserError with its message if it fails otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        for name in ("runtime", "assets"):
            shutil.copytree(BENCH.with_name(name), Path(folder, name))
        if idea:
            file, text = ablated_source(flags["recipe"], idea)
            Path(folder, file).write_text(text, encoding="utf-8")
        given = flags | dict(hellaswag_every=0, sample_every=0, checkpoint_every=0, out=f"{folder}/log")
        command = [sys.executable, f"{folder}/train_gpt2.py", *(f"--{name}={given[name]}" for name in given)]
        one = {"OMP_NUM_THREADS": "1"} if flags["device"] == "cpu" else {}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | one)
        if done.returncode and "gradient norm" not in done.stderr:      # the message of a non-finite loss
            raise UserError(done.stderr.strip().split("\n")[-1])
        return read_curve(f"{folder}/log")


def recipe_runs(args, base, recipe: str, steps: int, tokens: int) -> dict:
    """{name: (flags of train_gpt2.py, idea or None)}: gpt2 at three rates, the recipe in as many steps, in
    its share of them, and that without each idea."""
    share = SHARES[recipe]
    common = dict(data=args.path, block_size=base.T, total_batch_size=tokens, batch_size="auto",
                  val_tokens=8 * tokens, val_every=steps // share // 2, max_steps=steps, device=base.device,
                  dtype=base.dtype)
    gpt2 = common | shape_of(replace(base, recipe="gpt2")) | dict(warmup_steps=steps // 15)
    whole = common | shape_of(replace(base, recipe=recipe)) | dict(recipe=recipe)
    short = whole | dict(max_steps=steps // share)
    runs = {f"gpt2, --max_lr {rate}": (gpt2 | dict(max_lr=rate), None) for rate in (1e-3, 2e-3, 4e-3)}
    runs[f"{recipe}, {steps} steps"] = whole, None
    runs = ({} if args.only_ideas else runs) | {f"{recipe}, {steps // share} steps": (short, None)}
    return runs | {f"without {idea}": (short, idea) for idea in ABLATIONS[recipe] if not args.no_ideas}


def train_all(runs: dict, turns: int, at_once: int) -> dict:
    """{name: [Curve of each seed]}."""
    def job(seed, name):
        curve = train(runs[name][0] | {"seed": seed}, runs[name][1])
        tqdm.write(f"{name}, seed {seed}: {curve.points[-1][2]:.4f}")
        return replace(curve, name=name)
    jobs = [(seed, name) for seed in range(turns) for name in runs]
    with ThreadPoolExecutor(at_once) as pool:
        curves = list(tqdm(pool.map(job, *zip(*jobs, strict=True)), "trained", len(jobs), unit=" runs"))
    return {name: curves[i::len(runs)] for i, name in enumerate(runs)}


def recipes_table(args, base) -> list[dict]:
    """gpt2 against --recipe, or speedrun, in a share of the steps, and that recipe's ablations."""
    recipe = args.recipe if args.recipe in ABLATIONS else "speedrun"        # gpt2 is what it is compared with
    share, steps, tokens = SHARES[recipe], args.steps or 300, (args.batch_size or 16) * base.T
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    if steps % (2 * share):
        raise UserError(f"--steps {steps}: give a multiple of {2 * share}; {recipe} takes 1/{share} of them")
    runs = recipe_runs(args, base, recipe, steps, tokens)
    at_once = os.cpu_count() if base.device == "cpu" else 1         # a thread each
    curves, short = train_all(runs, args.turns, at_once), f"{recipe}, {steps // share} steps"

    def losses(name, step):             # of each seed; nan after it has diverged
        found = [{at: loss for at, _, loss in curve.points} for curve in curves[name]]
        return [losses.get(step * tokens, math.nan) for losses in found]
    last = {name: losses(name, flags["max_steps"]) for name, (flags, _) in runs.items()}
    mean = {name: statistics.mean(found) for name, found in last.items()}
    rows = [{"validation loss": name} | {
        f"{tokens_text(n * tokens)} tokens": f"{statistics.mean(losses(name, n)):.3f}"
        for n in (steps // share, steps) if n <= flags["max_steps"]} | {
        "seeds differ by": f"{max(last[name]) - min(last[name]):.3f}",
        **({"the idea brings": f"{mean[name] - mean[short]:+.3f}"} if idea else {})}
        for name, (flags, idea) in runs.items()]
    print(f"{base.size}, {tokens:,} tokens a step, means of {counted(args.turns, 'seed')}")
    print_table(rows)
    if gpt2 := [name for name in runs if name.startswith("gpt2,")]:
        best = min(gpt2, key=lambda name: (math.isnan(mean[name]), mean[name]))
        print(f"{short}: {mean[short]:.3f}; {best}, {steps} steps: {mean[best]:.3f}: "
              f"{'reached' if mean[short] <= mean[best] else 'NOT reached'}")
    if args.plot:           # the first seed's
        plot_runs(args.plot, [seeds[0] for name, seeds in curves.items() if not runs[name][1]])
    return rows
