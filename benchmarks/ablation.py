"""`bench.py recipes`: the recipes, and nanochat, on the user's shards; ideas of a recipe."""
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from tqdm import tqdm

import train_gpt2
from benchmarks.compare import Curve, plot_runs, read_curve
from benchmarks.ideas import ABLATIONS
from benchmarks.nanochat import Nanochat, bytes_a_token
from benchmarks.steps import shape_of
from benchmarks.timing import BENCH, Setting, print_table
from runtime.cli import UserError
from runtime.flags import parse_flags
from train_gpt2 import RECIPES

# These recipes also train for a part of the steps: 1/3 and 1/10.
SHORTER = {"speedrun": 3, "frontier": 10}

# The other recipes train at each of these learning rates, after a warm-up.
RATES = (1e-3, 2e-3, 4e-3)

# nanochat trains at these multiples of its own learning rates.
NANOCHAT_RATES = (2, 4, 8)


# ---------------------------------------------------------------------- one run

def train(flags: dict, idea: str = "", seed: int = 0) -> Curve:
    """A run of train_gpt2.py with `flags`, {name: value}, without `idea` of its recipe.

    The last loss of a run that diverges is nan. UserError with its message if it fails otherwise.
    """
    flags = flags | {"hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0}
    env = dict(os.environ)
    if flags["device"] == "cpu":
        env["OMP_NUM_THREADS"] = "1"            # runs on a CPU share it, a thread for each

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/log"
        command = [sys.executable, str(BENCH), "train", idea, f"--seed={seed}", f"--out={out}"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode == 0:
            return read_curve(out)

        # train_gpt2.py ends with this message when a loss or a gradient is not finite.
        diverged = "gradient norm" in done.stderr
        if not diverged:
            raise UserError(done.stderr.strip().split("\n")[-1])
        curve = read_curve(out)
        return replace(curve, points=[*curve.points, (0, 0.0, math.nan)])


def train_without(idea: str, argv: list[str]) -> int:
    """`python bench.py train IDEA FLAGS`, which `train` starts: train_gpt2.py without that idea."""
    given = parse_flags(train_gpt2.Config, RECIPES, train_gpt2.PRESETS, "", argv)
    if idea:
        leave_out = ABLATIONS[given["recipe"]][idea]
        leave_out(setattr)
    return train_gpt2.main(argv)


# ---------------------------------------------------------------------- all runs
# A run's key is (name, variant): the recipe, size and number of steps, and what sets it apart from
# others of this name, as its learning rate. It may train several times, with other seeds.

def flags_of(s: Setting, data: str, tokens: int, max_steps: int) -> dict:
    """The flags of train_gpt2.py for a run with that many tokens per step."""
    return dict(
        data=data,
        recipe=s.recipe,
        block_size=s.T,
        total_batch_size=tokens,
        val_tokens=64 * tokens,
        device=s.device,
        dtype=s.dtype,
        max_steps=max_steps,
        val_every=max(1, max_steps // 8),
        **shape_of(s),
    )


def lengths(recipe: str, steps: int, ideas: bool) -> list[int]:
    """For how many steps a recipe trains; with --ideas only for the smaller number."""
    shorter = max(1, steps // SHORTER.get(recipe, 1))
    if ideas or shorter == steps:
        return [shorter]
    return [steps, shorter]


def recipe_runs(args, base: Setting, steps: int, tokens: int, peer: Nanochat | None) -> dict:
    """{key: a function that takes `seed` and returns the run's Curve}

    Every recipe at each size; with --ideas only --recipe, with all of its ideas and without each.
    """
    recipes = list(RECIPES)
    if args.ideas:
        recipes = [args.recipe]

    runs = {}
    for size in args.size:
        for recipe in recipes:
            setting = replace(base, recipe=recipe, size=size)
            for max_steps in lengths(recipe, steps, args.ideas):
                name = f"{recipe} {size}, {max_steps} steps"
                flags = flags_of(setting, args.path, tokens, max_steps)
                if recipe in SHORTER:
                    runs[name, ""] = partial(train, flags)
                else:
                    flags["warmup_steps"] = max_steps // 15
                    for rate in RATES:
                        runs[name, f", --max_lr {rate}"] = partial(train, flags | {"max_lr": rate})
                if args.ideas:
                    for idea in ABLATIONS[recipe]:
                        runs[name, f", without {idea}"] = partial(train, flags, idea)

        if peer:
            # nanochat takes shape, batch and length from our flags, the same for all recipes.
            flags = flags_of(replace(base, size=size), args.path, tokens, steps)
            for multiple in NANOCHAT_RATES:
                variant = f", {multiple} times its rates"
                runs[f"nanochat {size}", variant] = partial(peer.train, flags, multiple)
    return runs


def train_all(runs: dict, seeds: int, at_once: int) -> dict:
    """{key: [the Curve of each seed]}"""
    jobs = []
    for seed in range(seeds):
        for key in runs:
            name, variant = key
            if seed > 0 and name.startswith("nanochat"):
                continue                        # it draws its seed itself
            jobs.append((key, seed))

    def run(job):
        key, seed = job
        name, variant = key
        curve = replace(runs[key](seed=seed), name=name)
        final_loss = curve.points[-1][2]
        tqdm.write(f"{name}{variant}, seed {seed}: {final_loss:.4f}")
        return curve

    curves = {key: [] for key in runs}
    with ThreadPoolExecutor(at_once) as pool:
        trained = tqdm(pool.map(run, jobs), "trained", len(jobs), unit=" runs")
        for (key, _), curve in zip(jobs, trained, strict=True):
            curves[key].append(curve)
    return curves


# ---------------------------------------------------------------------- the table

def final_losses(curves: list[Curve]) -> list[float]:
    return [curve.points[-1][2] for curve in curves]


def row_of(key: tuple, curves: list[Curve], loss: float, bytes_per_token: float) -> dict:
    """A run's row. `loss` is the mean of the final losses of its curves, one for each seed."""
    name, variant = key
    last = curves[0].last
    spread = ""
    if len(curves) > 1:
        losses = final_losses(curves)
        spread = f"{max(losses) - min(losses):.3f}"
    return {
        "run": name + variant,
        "MB of text": last["tokens"] * bytes_per_token / 1e6,
        "s per step": last["seconds"] / max(1, last["step"]),             # 0: it diverged at once
        "validation loss": f"{loss:.3f}",
        "bits per byte": f"{loss / math.log(2) / bytes_per_token:.4f}",
        "seeds differ by": spread,
    }


def best_of_each_name(curves: dict, means: dict) -> list[Curve]:
    """For each name the first seed's Curve of the variant with the lowest mean loss."""
    best = {}
    for key in sorted(curves, key=lambda key: (math.isnan(means[key]), means[key])):
        name, variant = key
        best.setdefault(name, curves[key][0])
    return list(best.values())


def recipes_table(args, base: Setting) -> list[dict]:
    """Prints and returns the rows. MB of text and bits per byte compare tokenizers, too."""
    steps = args.steps or 300
    sequences = args.batch_size or 16
    tokens = sequences * base.T
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: make DATA with `python "
                        "fineweb.py --input YOUR_TEXT --out DATA`, and name it")
    if args.ideas != (args.recipe in ABLATIONS) or args.ideas and args.nanochat:
        raise UserError("--ideas and --recipe do not fit together: use --ideas with --recipe "
                        f"{' or '.join(ABLATIONS)}, and without --nanochat")

    at_once = 1
    if base.device == "cpu":
        at_once = os.cpu_count()
    bytes_per_token = bytes_a_token(args.path, 64 * tokens)
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        if args.nanochat:
            peer = Nanochat(args.nanochat, folder, args.path, base, 64 * tokens)
        runs = recipe_runs(args, base, steps, tokens, peer)
        curves = train_all(runs, args.turns, at_once)

    means = {key: statistics.mean(final_losses(of_key)) for key, of_key in curves.items()}
    rows = []
    for key, of_key in curves.items():
        row = row_of(key, of_key, means[key], bytes_per_token)
        if args.ideas:
            name, variant = key
            row["the idea brings"] = f"{means[key] - means[name, '']:+.3f}"
        rows.append(row)

    print(f"{tokens:,} tokens per step, means of {args.turns} seed(s)")
    print_table(rows)
    if args.plot:
        plot_runs(args.plot, best_of_each_name(curves, means), bytes_per_token)
    return rows
