"""`bench.py recipes`: gpt2 and a faster recipe on the user's shards, and that recipe's ablations."""
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.pictures import plot_curves
from benchmarks.timing import BENCH, print_table, progress
from runtime.cli import UserError
from runtime.log import read_log
from runtime.progress import counted

# {recipe: {idea: (file; a line of it; the line without the idea; and so on)}}. To measure an
# idea, a copy of the project with the other lines is trained.
ABLATIONS = {
    "speedrun": {
        "rotary positions (none instead)": (
            "runtime/language_model.py", "return angles.cos().to(dtype), angles.sin().to(dtype)",
            "return torch.ones_like(angles).to(dtype), torch.zeros_like(angles).to(dtype)"),
        "QK-norm": (
            "speedrun.py", "q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)",
            "q, k = rotate(q, *rotary), rotate(k, *rotary)"),
        "value residual": (
            "speedrun.py", "v = (1 - self.lamb) * v + self.lamb * v1", "v = v + 0 * self.lamb"),
        "embedding shortcut x0": (
            "speedrun.py", "x = self.lambdas[0] * x + self.lambdas[1] * x0", "x = self.lambdas[0] * x"),
        "ReLU squared (GELU instead)": (
            "speedrun.py", "F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))"),
        "projections and head start at zero (normal, 0.02)": (
            "speedrun.py", """                p.zero_()
            elif name.endswith("wte.weight"):""", """                p.normal_(0.0, 0.02)
            elif name.endswith("wte.weight"):"""),
        "norm after the embedding": (
            "speedrun.py", "x = x0 = norm(self.transformer.wte(idx).to(dtype))",
            "x = x0 = self.transformer.wte(idx).to(dtype)"),
        "softcap": ("speedrun.py", "softcap = 30.0", "softcap = 0.0"),
        "Muon (Adam at a tenth of its rate)": (
            "speedrun.py",
            "Muon([(n, p) for n, p in blocks if p.dim() == 2], max_lr, weight_decay=weight_decay,\n"
            "                           dtype=dtype)",
            "torch.optim.Adam([(n, p) for n, p in blocks if p.dim() == 2], 0.1 * max_lr, betas=(0.9, 0.95), "
            "fused=True)"),
        "momentum warm-up": (
            "speedrun.py", "return first + (last - first) * min(1.0, step / (0.154 * config.max_steps))",
            "return last"),
        "constant rate, then linear (cosine instead)": (
            "speedrun.py",
            "left = min(1.0, max(0, config.max_steps - step) / (config.cooldown * config.max_steps))",
            "left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.max_steps)))"),
        "head's rate by width (0.002 instead)": (
            "speedrun.py", "0.1 * max_lr * 768 / self.config.n_embd", "0.1 * max_lr"),
    },
    "frontier": {
        "several updates a step (one instead)": (
            "train_gpt2.py", "dict(max_steps=1750, updates_per_step=4)", "dict(max_steps=1750)"),
        "late keys": ("frontier.py", "offset_keys(k, begins)", "k",
                      "block.attn.c_k.weight[late:] = block.attn.c_q.weight[late:]", "pass"),
        "start of the late keys as the queries": (
            "frontier.py", "block.attn.c_k.weight[late:] = block.attn.c_q.weight[late:]", "pass"),
        "head tied to the embedding": (
            "frontier.py",
            "self.lm_head.weight = self.transformer.wte.weight ",
            "self.lm_head.weight = nn.Parameter(torch.zeros_like(self.transformer.wte.weight)) ",
            '"bigram.weight", "stem.weight")', '"bigram.weight", "stem.weight", "lm_head.weight")',
            '"transformer.stem.weight", "transformer.bigram.weight"))',
            '"transformer.stem.weight", "transformer.bigram.weight"))\n'
            '        wte.append(("lm_head.weight", params.pop("lm_head.weight")))',
            "return self.transformer.stem(self.stems).add_(self.lm_head.weight)",
            "return self.lm_head.weight"),
        "eps of the embedding (1e-8 instead)": ("frontier.py", '"eps": 0.1 / tokens', '"eps": 1e-8'),
        "rows for stems": (
            "frontier.py", "+ self.transformer.stem(self.stems[tokens])",
            "+ 0 * self.transformer.stem(self.stems[tokens])",
            "self.transformer.stem(self.stems).add_", "(0 * self.transformer.stem(self.stems)).add_"),
        "bigram table": (
            "frontier.py", "return norm(x + pair.to(dtype))", "return norm(x + 0 * pair.to(dtype))"),
        "bigram table's rate (ten times as high instead)": (
            "frontier.py", '"lr": 1.5 * max_lr', '"lr": 15 * max_lr'),
        "Adam's beta1 of 0.7 (speedrun's 0.9 instead)": (
            "frontier.py", "betas=(0.7, 0.95)", "betas=(0.9, 0.95)"),
        "Muon's momentum of 0.80 to 0.85 (speedrun's 0.85 to 0.95 instead)": (
            "frontier.py", "momentum=(0.80, 0.85)", "momentum=(0.85, 0.95)"),
        "softcap of 15 (speedrun's 30 instead)": ("frontier.py", "softcap = 15.0", "softcap = 30.0"),
    },
}
# steps of gpt2's run for one of the recipe's, and evaluations of gpt2's run
SHARE, EVALUATIONS = {"speedrun": 3, "frontier": 10}, {"speedrun": 12, "frontier": 10}
FRACTION = {"speedrun": "a third", "frontier": "a tenth"}


def ablated_source(recipe, idea):
    """(file, its text without the idea). Each of the idea's lines must occur exactly once."""
    file, *lines = ABLATIONS[recipe][idea]
    text = (BENCH.parent / file).read_text(encoding="utf-8")
    for line, replacement in zip(lines[::2], lines[1::2], strict=True):
        assert text.count(line) == 1, f"{idea}: {file} holds {line!r} {text.count(line)} times"
        text = text.replace(line, replacement)
    return file, text


def validation_curve(flags, idea=None, threads=None):
    """{tokens: validation loss} of a run of train_gpt2.py with these flags, without `idea`.

    A run that diverged has nan from there on. UserError with its message if the run failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        for name in ("runtime", "assets"):
            shutil.copytree(BENCH.with_name(name), folder / name)
        if idea:
            file, text = ablated_source(flags[flags.index("--recipe") + 1], idea)
            (folder / file).write_text(text, encoding="utf-8")
        command = [sys.executable, folder / "train_gpt2.py", *map(str, flags), "--out", folder / "log"]
        result = subprocess.run(command, capture_output=True, text=True,
                                env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
        diverged = "gradient norm" in result.stderr             # the message of a non-finite loss
        if result.returncode and not diverged:
            raise UserError(result.stderr.strip().split("\n")[-1])
        losses = {step: value for step, kind, value in read_log(folder / "log" / "log.txt") if kind == "val"}
        names = "--val_every", "--max_steps", "--total_batch_size"
        every, steps, tokens = (int(flags[flags.index(name) + 1]) for name in names)
        return {step * tokens: losses.get(step, math.nan) for step in (*range(0, steps, every), steps)}


def recipe_runs(args, recipe, base, shape, steps, tokens):
    """{(kind, value): flags of train_gpt2.py}: ("gpt2", rate), (recipe, steps) and ("without", idea).

    gpt2 runs `steps` steps at three rates, the recipe its share of them and all, and the share without each
    idea.
    """
    common = ["--data", args.path, "--n_layer", shape["n_layer"], "--n_embd", shape["n_embd"],
              "--block_size", base.T, "--total_batch_size", tokens, "--batch_size", "auto",
              "--val_tokens", 32768, "--val_every", steps // EVALUATIONS[recipe], "--device", base.device,
              "--dtype", base.dtype, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0,
              "--resume", "never", "--no_plot"]
    gpt2 = [*common, "--n_head", shape["n_head"], "--max_steps", steps, "--warmup_steps", steps // 15]
    other = [*common, "--recipe", recipe, "--n_head", max(1, shape["n_embd"] // 128), "--max_steps"]
    runs = {("gpt2", rate): [*gpt2, "--max_lr", rate] for rate in (1e-3, 2e-3, 4e-3)}
    runs |= {(recipe, n): [*other, n] for n in (steps // SHARE[recipe], steps)}
    if args.no_ideas:
        return runs
    return runs | {("without", idea): [*other, steps // SHARE[recipe]] for idea in ABLATIONS[recipe]}


def train_all(runs, seeds, cuda):
    """{key of runs: [validation curve of each seed]}. A CPU of n cores trains n at a time, a thread each."""
    from tqdm import tqdm
    jobs = [(seed, key) for seed in seeds for key in runs]

    def train(job):
        seed, (kind, value) = job
        curve = validation_curve([*runs[kind, value], "--seed", seed], value if kind == "without" else None,
                                 None if cuda else 1)
        with tqdm.external_write_mode():        # not into the bar
            print(f"{kind} {value}, seed {seed}: {list(curve.values())[-1]:.4f}", flush=True)
        task.update()
        return curve
    with progress("trained", len(jobs), "runs") as task:
        with ThreadPoolExecutor(1 if cuda else os.cpu_count()) as pool:
            curves = list(pool.map(train, jobs))
    return {key: curves[i::len(runs)] for i, key in enumerate(runs)}


def mean_loss(curves, tokens):
    """Over the seeds, after `tokens`."""
    return statistics.mean(curve[tokens] for curve in curves)


def loss_range(curves, tokens):
    losses = [curve[tokens] for curve in curves]
    return max(losses) - min(losses)


def recipe_rows(curves, best, budgets):
    """A row for each run of a whole recipe: its mean losses at those token budgets that it evaluates."""
    rows = []
    for kind, value in curves:
        if kind == "without":
            continue
        seeds = curves[kind, value]
        name = f"{kind}, --max_lr {value}" if isinstance(value, float) else f"{kind}, {value} steps"
        reached = [tokens for tokens in budgets if tokens in seeds[0]]
        rows.append({"recipe": f"{name} (the best)" if (kind, value) == best else name}
                    | {f"{tokens / 1e6:.2f}M tokens": f"{mean_loss(seeds, tokens):.3f}" for tokens in reached}
                    | {"seeds differ by": f"{loss_range(seeds, reached[-1]):.3f}"})
    return [{column: row.get(column, "") for column in rows[0]} for row in rows]


def ablation_rows(recipe, curves, baseline, tokens):
    """A row for each idea: the mean loss after `tokens` without it, and how far above `baseline` that is."""
    return [{f"{recipe} without": idea, "validation loss": f"{mean_loss(seeds, tokens):.3f}",
             "the idea brings": f"{mean_loss(seeds, tokens) - baseline:+.3f}",
             "seeds differ by": f"{loss_range(seeds, tokens):.3f}"}
            for (kind, idea), seeds in curves.items() if kind == "without"]


def recipes_table(args, base, shape):
    """gpt2 at the best of three rates against another recipe (--recipe, or speedrun) in a share of the steps,
    and that recipe's ablations.

    Trains, prints and plots; returns the rows. `shape`: n_layer, n_head, n_embd. UserError without shards or
    with --steps of which there are no such shares.
    """
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    recipe = args.recipe if args.recipe in ABLATIONS else "speedrun"        # gpt2 is what it is compared with
    if args.only_ideas and (args.no_ideas or args.plot):
        raise UserError("--only_ideas prints the ablations alone: leave --no_ideas and --plot out")
    if recipe == "frontier" and (args.batch_size or 4) % 4:
        raise UserError(f"--batch_size {args.batch_size}: frontier needs a multiple of 4 sequences a step")
    share, steps, tokens = SHARE[recipe], args.steps or 300, (args.batch_size or 16) * base.T
    if steps % EVALUATIONS[recipe]:
        raise UserError(f"--steps {steps}: give a multiple of {EVALUATIONS[recipe]}, of which {recipe} then "
                        f"takes {FRACTION[recipe]}")
    short = recipe, steps // share
    runs = recipe_runs(args, recipe, base, shape, steps, tokens)
    if args.only_ideas:
        runs = {key: flags for key, flags in runs.items() if key == short or key[0] == "without"}
    curves = train_all(runs, range(args.turns), base.device.startswith("cuda"))

    title = f"{shape['n_layer']} layers of width {shape['n_embd']}"
    loss = mean_loss(curves[short], short[1] * tokens)
    print(f"validation loss of {args.size or 'small'} ({title}), {tokens:,} tokens a step, "
          f"means of {counted(args.turns, 'seed')}")
    rows = []
    if not args.only_ideas:
        rows, best = compare_with_gpt2(recipe, curves, steps, tokens, loss)
        if args.plot:
            plot_curves(args.plot, {f"gpt2, --max_lr {best[1]}": curves[best][0],
                                    f"{recipe}, the same tokens": curves[recipe, steps][0],
                                    f"{recipe}, {FRACTION[recipe]}": curves[short][0]},
                        f"{title}, {tokens:,} tokens a step")
    if ablations := ablation_rows(recipe, curves, loss, short[1] * tokens):
        print(f"{recipe} after {short[1]} steps: {loss:.3f}, seeds differ by "
              f"{loss_range(curves[short], short[1] * tokens):.3f}")
        print_table(ablations)
    return rows + ablations


def compare_with_gpt2(recipe, curves, steps, tokens, loss):
    """Prints the table of whole runs, and whether the recipe's `loss` after its share of the tokens is below
    gpt2's after all. Returns its rows and the key of gpt2's best run."""
    share = SHARE[recipe]
    budgets = sorted({n * (steps // share) * tokens for n in (1, share // 2 + 1, share)})
    means = {key: mean_loss(curves[key], budgets[-1]) for key in curves if key[0] == "gpt2"}
    best = min(means, key=lambda key: (math.isnan(means[key]), means[key]))
    rows = recipe_rows(curves, best, budgets)
    print_table(rows)
    print(f"after {FRACTION[recipe]} of the tokens {recipe} is at {loss:.3f}, gpt2 after all of them at "
          f"{means[best]:.3f}: {'reached' if loss <= means[best] else 'NOT reached'}")
    return rows, best
