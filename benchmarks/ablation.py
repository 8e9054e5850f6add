"""`bench.py recipes`: the recipes on the user's shards, nanochat beside them; a recipe's ideas."""
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
from benchmarks.timing import BENCH, print_table
from runtime.cli import UserError
from runtime.flags import parse_flags
from train_gpt2 import RECIPES

SHARES = {"speedrun": 3, "frontier": 10}            # also run for 1/3 and 1/10 of the steps
RATES = 1e-3, 2e-3, 4e-3                            # of the others, which warm up
NEVER = dict.fromkeys(("hellaswag_every", "sample_every", "checkpoint_every"), 0)


def train(flags: dict, idea: str = "", seed: int = 0) -> Curve:
    """A run of train_gpt2.py with `flags`, {name: value}, without `idea` of its recipe.

    The last loss of a run that diverges is nan. UserError with its message if it fails otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(BENCH), "train", idea, f"--seed={seed}", f"--out={folder}/log"]
        command += [f"--{name}={value}" for name, value in (NEVER | flags).items()]
        env = dict(os.environ)
        if flags["device"] == "cpu":
            env["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, env=env)

        diverged = "gradient norm" in done.stderr           # the message of a loss that is not finite
        if done.returncode and not diverged:
            raise UserError(done.stderr.strip().split("\n")[-1])
        curve = read_curve(f"{folder}/log")
        if done.returncode:
            curve = replace(curve, points=[*curve.points, (0, 0.0, math.nan)])
        return curve


def train_without(idea: str, argv: list[str]) -> int:
    """`python bench.py train IDEA FLAGS`, which `train` starts: train_gpt2.py without that idea."""
    given = parse_flags(train_gpt2.Config, RECIPES, train_gpt2.PRESETS, "", argv)
    if idea:
        ABLATIONS[given["recipe"]][idea](setattr)
    return train_gpt2.main(argv)


def recipe_runs(args, base, steps: int, tokens: int, peer: Nanochat | None) -> dict:
    """{(run, what sets it apart from others of this name): seed -> its Curve}: every recipe at each size;
    with --ideas, --recipe with all of them and without each."""
    runs = {}
    for size in args.size:
        for recipe in [args.recipe] if args.ideas else RECIPES:
            short = max(1, steps // SHARES.get(recipe, 1))
            flags = dict(data=args.path, recipe=recipe, block_size=base.T, total_batch_size=tokens,
                         val_tokens=64 * tokens, device=base.device, dtype=base.dtype,
                         **shape_of(replace(base, recipe=recipe, size=size)))
            for n in dict.fromkeys([short] if args.ideas else [steps, short]):
                own, name = flags | dict(max_steps=n, val_every=n // 8 or 1), f"{recipe} {size}, {n} steps"
                runs |= {(name, ""): partial(train, own)} if recipe in SHARES else {
                    (name, f", --max_lr {rate}"): partial(
                        train, own | dict(max_lr=rate, warmup_steps=n // 15)) for rate in RATES}
                for idea in ABLATIONS[recipe] if args.ideas else ():
                    runs[name, f", without {idea}"] = partial(train, own, idea)
        for n in (2, 4, 8) if peer else ():
            runs[f"nanochat {size}", f", {n} times its rates"] = partial(
                peer.train, own | dict(max_steps=steps), n)
    return runs


def train_all(runs: dict, turns: int, at_once: int) -> dict:
    """{name: [Curve of each seed]}; nanochat draws its seed itself."""
    jobs = [(key, seed) for seed in range(turns) for key in runs if not seed or "nanochat" not in key[0]]

    def job(key, seed):
        curve = replace(runs[key](seed=seed), name=key[0])
        tqdm.write(f"{''.join(key)}, seed {seed}: {curve.points[-1][2]:.4f}")
        return key, curve
    with ThreadPoolExecutor(at_once) as pool:
        found = list(tqdm(pool.map(job, *zip(*jobs, strict=True)), "trained", len(jobs), unit=" runs"))
    return {key: [curve for of, curve in found if of == key] for key in runs}


def recipes_table(args, base) -> list[dict]:
    """On the user's shards. MB of text and bits per byte compare tokenizers, too."""
    steps, tokens = args.steps or 300, (args.batch_size or 16) * base.T
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    if args.ideas != (args.recipe in ABLATIONS) or args.ideas and args.nanochat:
        raise UserError(f"--ideas goes with --recipe {' or '.join(ABLATIONS)}, and without --nanochat")
    size = bytes_a_token(args.path, 64 * tokens)
    with tempfile.TemporaryDirectory() as folder:
        peer = Nanochat(args.nanochat, folder, args.path, base, 64 * tokens) if args.nanochat else None
        runs = recipe_runs(args, base, steps, tokens, peer)
        curves = train_all(runs, args.turns, os.cpu_count() if base.device == "cpu" else 1)   # a thread each
    mean = {key: statistics.mean(curve.points[-1][2] for curve in found) for key, found in curves.items()}
    rows = []
    for (name, what), found in curves.items():
        last, loss, end = found[0].last, mean[name, what], [curve.points[-1][2] for curve in found]
        rows.append({"run": name + what, "MB of text": last["tokens"] * size / 1e6,
                     "s a step": last["seconds"] / max(1, last["step"]),     # 0: it diverged at once
                     "validation loss": f"{loss:.3f}", "bits per byte": f"{loss / math.log(2) / size:.4f}",
                     "seeds differ by": f"{max(end) - min(end):.3f}" if end[1:] else ""})
        if args.ideas:
            rows[-1]["the idea brings"] = f"{loss - mean[name, '']:+.3f}"
    print(f"{tokens:,} tokens a step, means of {args.turns} seed(s)")
    print_table(rows)
    if args.plot:           # the first seed's, at the best rate
        best = {key[0]: curves[key][0] for key in sorted(
            curves, key=lambda key: (math.isnan(mean[key]), mean[key]), reverse=True)}
        plot_runs(args.plot, [*best.values()], size)
    return rows
