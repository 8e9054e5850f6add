"""`bench.py recipes`: the recipes on the user's shards, nanochat beside them; a recipe's ideas."""
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.compare import Curve, plot_runs, read_curve
from benchmarks.nanochat import Nanochat, bytes_a_token
from benchmarks.steps import shape_of
from benchmarks.timing import BENCH, print_table
from runtime.cli import UserError
from train_gpt2 import RECIPES

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
        "momentum warm-up": ("(last - first) * min(1.0, progress / 0.154)", "last - first"),
        "constant rate, then linear (cosine instead)": (
            "min(1.0, max(0.0, 1.0 - progress) / config.cooldown)",
            "0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))"),
        "head's rate by width (0.002 instead)": ("0.1 * max_lr * 768 / self.config.n_embd", "0.1 * max_lr"),
    },
    "frontier": {
        "a batch that grows (constant instead)": ("while divisor < 4:", "while divisor < 1:"),
        "late keys": ("offset_keys(k, begins)", "k", "c_q.weight[late:]", "c_k.weight[late:]"),
        "start of the late keys as the queries": ("c_q.weight[late:]", "c_k.weight[late:]"),
        "head tied to the embedding": (
            "self.lm_head.weight = self.transformer.wte.weight ",
            "self.lm_head.weight = nn.Parameter(torch.zeros_like(self.transformer.wte.weight)) ",
            '"part.weight")', '"part.weight", "lm_head.weight")',
            '"params": [wte, part]', '"params": [wte, part, ("lm_head.weight", params["lm_head.weight"])]',
            "if n not in dict(matrices)", 'if n not in dict(matrices) and n != "lm_head.weight"',
            "self.add_parts(self.lm_head.weight, self.parts)", "self.lm_head.weight"),
        "eps of the embedding (1e-8 instead)": ("0.1 / tokens}", "1e-8}"),
        "rows for stems": ("parts[i] = stem or i,", "parts[i] = (),"),
        "rows for forms": ("(text[:1] == ", "() and (text[:1] == "),
        "bigram table": ("pair.to(dtype)", "0 * pair.to(dtype)"),
        "bigram table's rate (ten times as high instead)": ("1.5 * max_lr", "15 * max_lr"),
        "Adam's beta1 of 0.7 (speedrun's 0.9 instead)": ("betas=(0.7,", "betas=(0.9,"),
        "Muon's momentum of 0.80 to 0.85 (speedrun's 0.85 to 0.95 instead)": (
            "config, 0.80, peak)", "config)", "min(rising, falling)", "rising"),
        "softcap of 15 (speedrun's 30 instead)": ("softcap = 15.0", "softcap = 30.0"),
    },
}
SHARES = {"speedrun": 3, "frontier": 10}            # also run for 1/3 and 1/10 of the steps
RATES = 1e-3, 2e-3, 4e-3                            # of the others, which warm up
NEVER = dict.fromkeys(("hellaswag_every", "sample_every", "checkpoint_every"), 0)


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


def train(flags: dict, idea: str = "", seed: int = 0) -> Curve:
    """A run of train_gpt2.py with `flags`, {name: value}, without `idea`. The last loss of one that diverges
    is nan. UserError with its message if it fails otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        for name in ("runtime", "assets"):
            shutil.copytree(BENCH.with_name(name), Path(folder, name))
        if idea:
            file, text = ablated_source(flags["recipe"], idea)
            Path(folder, file).write_text(text, encoding="utf-8")
        command = [sys.executable, f"{folder}/train_gpt2.py", f"--seed={seed}", f"--out={folder}/log",
                   *(f"--{name}={value}" for name, value in (NEVER | flags).items())]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (
            {"OMP_NUM_THREADS": "1"} if flags["device"] == "cpu" else {}))
        if done.returncode and "gradient norm" not in done.stderr:      # the message of a non-finite loss
            raise UserError(done.stderr.strip().split("\n")[-1])
        curve = read_curve(f"{folder}/log")
        return replace(curve, points=[*curve.points, *([(0, 0.0, math.nan)] if done.returncode else [])])


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
