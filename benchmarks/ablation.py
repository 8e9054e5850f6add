"""`bench.py recipes`: the recipes, and nanochat, on the user's shards; ideas of a recipe."""
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

import train_gpt2
from benchmarks.compare import Curve, plot_runs, read_curve
from benchmarks.ideas import ABLATIONS, CONSTANT_BATCH
from benchmarks.nanochat import Nanochat, bytes_a_token, rounded_width
from benchmarks.processes import CHILDREN, run_process, why_it_failed
from benchmarks.steps import shape_of
from benchmarks.timing import BENCH, Setting, print_table
from fineweb import available_cores
from recipes import fresh_model
from runtime.cli import UserError
from runtime.flags import parse_flags
from runtime.ranks import Process
from runtime.recipe import BatchSchedule, make_batch_schedule
from train_gpt2 import RECIPES

# These recipes also train for a part of the steps: 1/3 and 1/10.
SHORTER = {"speedrun": 3, "frontier": 10}

# The other recipes train at each of these learning rates, after a warm-up.
RATES = (1e-3, 2e-3, 4e-3)

# nanochat trains at these multiples of its own learning rates.
NANOCHAT_RATES = (2, 4, 8)

# With these words train_gpt2.py ends a run whose loss or gradient is not finite: in check_finite,
# and in evaluate.
DIVERGED = ("gradient norm", "the validation loss at step")


# ---------------------------------------------------------------------- one run

def train(flags: dict, idea: str = "", seed: int = 0) -> Curve:
    """A run of train_gpt2.py with `flags`, {name: value}, without `idea` of its recipe.

    The last loss of a run that diverges is nan. UserError if it fails otherwise, or is stopped.
    """
    flags = flags | {"hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0}
    env = dict(os.environ)
    if flags["device"] == "cpu":
        env["OMP_NUM_THREADS"] = "1"            # runs on a CPU share it, a thread for each

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/log"
        command = [sys.executable, str(BENCH), "train", idea, f"--seed={seed}", f"--out={out}"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        done = run_process(command, env=env)

        diverged = done.returncode == 1 and any(words in done.stderr for words in DIVERGED)
        if done.returncode != 0 and not diverged:
            raise UserError(why_it_failed(done))
        curve = read_curve(out)

    if diverged:
        return replace(curve, points=[*curve.points, (0, 0.0, math.nan)])
    # A signal ends a run with exit code 0, too.
    if curve.last["step"] < flags["max_steps"]:
        raise UserError(f"it was stopped at step {curve.last['step']} of {flags['max_steps']}")
    return curve


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
    """The flags of train_gpt2.py for a run with at most that many tokens per step."""
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


def config_and_schedule(flags: dict) -> tuple[train_gpt2.Config, BatchSchedule]:
    """What train_gpt2.py makes of these flags."""
    process = Process(device=flags["device"])
    _, config = train_gpt2.resolve_config(flags, train_gpt2.Start(), process)
    return config, make_batch_schedule(RECIPES[config.recipe], config, world_size=1)


def flags_without(idea: str, flags: dict) -> dict:
    """The flags of a run without that idea, which has as many tokens as the run with it."""
    if idea != CONSTANT_BATCH:
        return flags
    _, schedule = config_and_schedule(flags)
    tokens = schedule.tokens_before(flags["max_steps"])
    return flags | {"max_steps": max(1, round(tokens / flags["total_batch_size"]))}


def check_run(name: str, flags: dict) -> None:
    """UserError if train_gpt2.py would refuse the flags of this run."""
    try:
        config, _ = config_and_schedule(flags)
        with torch.device("meta"):              # without memory
            fresh_model(config)
    except UserError as error:
        # What follows the colon is a remedy, by flags that bench.py does not have.
        reason = str(error).split(": ")[0]
        raise UserError(f"{name}: this run is not possible ({reason}): choose another --size, "
                        "--batch_size or --sequence_length") from None


def lengths(recipe: str, steps: int, ideas: bool) -> list[int]:
    """For how many steps a recipe trains; with --ideas only for the smaller number."""
    shorter = max(1, steps // SHORTER.get(recipe, 1))
    if ideas or shorter == steps:
        return [shorter]
    return [steps, shorter]


def recipe_runs(args, base: Setting, steps: int, tokens: int) -> dict[tuple, Callable]:
    """{key: a function that takes `seed` and returns the run's Curve}

    Every recipe at each size; with --ideas only --recipe, with all of its ideas and without each.
    UserError if one of the runs is not possible.
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
                check_run(name, flags)
                if recipe in SHORTER:
                    runs[name, ""] = partial(train, flags)
                else:
                    flags["warmup_steps"] = max_steps // 15
                    for rate in RATES:
                        runs[name, f", --max_lr {rate}"] = partial(train, flags | {"max_lr": rate})
                if args.ideas:
                    for idea in ABLATIONS[recipe]:
                        changed = flags_without(idea, flags)
                        runs[name, f", without {idea}"] = partial(train, changed, idea)
    return runs


def nanochat_runs(args, base: Setting, steps: int, tokens: int, peer: Nanochat) -> dict:
    """As recipe_runs: nanochat at each size."""
    runs = {}
    for size in args.size:
        # Shape, batch and length are those of our flags, which are the same for all recipes here.
        flags = flags_of(replace(base, size=size), args.path, tokens, steps)
        name = f"nanochat {size}"
        width = rounded_width(flags["n_embd"])
        if width != flags["n_embd"]:
            name += f" (its width is {width})"
        for multiple in NANOCHAT_RATES:
            runs[name, f", {multiple} times its rates"] = partial(peer.train, flags, size, multiple)
    return runs


def train_all(runs: dict, seeds: int, at_once: int) -> tuple[dict, dict]:
    """Returns {key: [the Curve of each seed]}, and {key: why it failed}: no key is in both."""
    jobs = []
    for seed in range(seeds):
        for key in runs:
            name, variant = key
            if seed > 0 and name.startswith("nanochat"):
                continue                        # its seed is always the same
            jobs.append((key, seed))
    failed = {}

    def run(job):
        key, seed = job
        name, variant = key
        if key in failed:                       # with another seed
            return None
        try:
            curve = replace(runs[key](seed=seed), name=name)
        except UserError as error:
            failed[key] = str(error)
            tqdm.write(f"{name}{variant}, seed {seed}: failed: {error}")
            return None
        final_loss = curve.points[-1][2]
        tqdm.write(f"{name}{variant}, seed {seed}: {final_loss:.4f}")
        return curve

    curves = {key: [] for key in runs}
    with ThreadPoolExecutor(at_once) as pool, CHILDREN:
        trained = tqdm(pool.map(run, jobs), "trained", len(jobs), unit=" runs")
        for (key, _), curve in zip(jobs, trained, strict=True):
            curves[key].append(curve)
    for key in failed:
        del curves[key]
    return curves, failed


# ---------------------------------------------------------------------- the table

def final_losses(curves: list[Curve]) -> list[float]:
    return [curve.points[-1][2] for curve in curves]


def row_of(key: tuple, curves: list[Curve], loss: float, bytes_per_token: float) -> dict:
    """A run's row. `loss` is the mean of the final losses of its curves, one for each seed."""
    name, variant = key
    tokens = sum(curve.last["tokens"] for curve in curves)
    seconds = sum(curve.last["seconds"] for curve in curves)
    tokens_per_second = None                    # it diverged at once
    if seconds > 0:
        tokens_per_second = tokens / seconds

    spread = ""
    if len(curves) > 1:
        losses = final_losses(curves)
        spread = f"{max(losses) - min(losses):.3f}"
    return {
        "run": name + variant,
        "seeds": len(curves),
        "MB of text": tokens / len(curves) * bytes_per_token / 1e6,
        "tokens/s": tokens_per_second,
        "validation loss": f"{loss:.3f}",
        "bits per byte": f"{loss / math.log(2) / bytes_per_token:.4f}",
        "seeds differ by": spread,
    }


def rows_of_runs(
    runs: dict, curves: dict, failed: dict, means: dict, bytes_per_token: float, ideas: bool
) -> list[dict]:
    """The rows of all runs, in their order. With `ideas` they also have what an idea brings."""
    rows = []
    for key in runs:
        name, variant = key
        if key in failed:
            rows.append({"run": name + variant, "failed": failed[key]})
            continue

        row = row_of(key, curves[key], means[key], bytes_per_token)
        if ideas:
            whole = (name, "")                  # the recipe with all of its ideas
            row["the idea brings"] = None
            if whole in means:
                row["the idea brings"] = f"{means[key] - means[whole]:+.3f}"
        rows.append(row)
    return rows


def best_of_each_name(curves: dict, means: dict) -> list[Curve]:
    """For each name the first seed's Curve of the variant with the lowest mean loss."""
    best = {}
    for key in sorted(curves, key=lambda key: (math.isnan(means[key]), means[key])):
        name, variant = key
        best.setdefault(name, curves[key][0])
    return list(best.values())


def check_args(args) -> None:
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: make DATA with `python "
                        "fineweb.py --input YOUR_TEXT --out DATA`, and name it")
    if args.ideas and args.recipe not in ABLATIONS:
        raise UserError("--ideas needs a recipe that has some: add --recipe "
                        f"{' or '.join(ABLATIONS)}")
    if args.ideas and args.nanochat:
        raise UserError("--ideas trains one recipe alone: leave out --nanochat")
    if args.recipe != "gpt2" and not args.ideas:
        raise UserError("without --ideas all recipes train: leave out --recipe")


def recipes_table(args, base: Setting) -> list[dict]:
    """Prints and returns the rows. MB of text and bits per byte compare tokenizers, too."""
    check_args(args)
    steps = args.steps or 300
    sequences = args.batch_size or 16
    tokens = sequences * base.T
    bytes_per_token = bytes_a_token(args.path, 64 * tokens)
    runs = recipe_runs(args, base, steps, tokens)

    at_once = 1
    if base.device == "cpu":
        at_once = available_cores()
    with tempfile.TemporaryDirectory() as folder:
        if args.nanochat:
            peer = Nanochat(args.nanochat, folder, args.path, base, 64 * tokens)
            runs |= nanochat_runs(args, base, steps, tokens, peer)
        curves, failed = train_all(runs, args.turns, at_once)

    means = {key: statistics.mean(final_losses(of_key)) for key, of_key in curves.items()}
    rows = rows_of_runs(runs, curves, failed, means, bytes_per_token, args.ideas)
    print(f"a row is the mean of its seeds; a step has at most {tokens:,} tokens (frontier's first "
          "ones have fewer); nanochat's tokens are counted as GPT-2's")
    print_table(rows)
    if args.plot and curves:
        plot_runs(args.plot, best_of_each_name(curves, means), args.title, bytes_per_token)
    return rows
