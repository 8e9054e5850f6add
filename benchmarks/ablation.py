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

from benchmarks.pictures import plot_losses
from benchmarks.steps import described, shape_of
from benchmarks.timing import BENCH, print_table, progress
from runtime.cli import UserError
from runtime.console import counted, read_metrics

# {recipe: {idea: (a line of the code; the line without the idea; and so on)}}. To measure an idea, a copy of
# the project with the other lines is trained.
ABLATIONS = {
    "speedrun": {
        "rotary positions (none instead)": (
            "return angles.cos().to(dtype), angles.sin().to(dtype)",
            "return torch.ones_like(angles).to(dtype), torch.zeros_like(angles).to(dtype)"),
        "QK-norm": (
            "q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)",
            "q, k = rotate(q, *rotary), rotate(k, *rotary)"),
        "value residual": ("v = (1 - self.lamb) * v + self.lamb * v1", "v = v + 0 * self.lamb"),
        "embedding shortcut x0": (
            "x = self.lambdas[0] * x + self.lambdas[1] * x0", "x = self.lambdas[0] * x"),
        "ReLU squared (GELU instead)": ("F.relu(self.c_fc(x)).square()", "F.gelu(self.c_fc(x))"),
        "projections and head start at zero (normal, 0.02)": (
            'p.zero_()\n            elif name.endswith("wte.weight"):',
            'p.normal_(0.0, 0.02)\n            elif name.endswith("wte.weight"):'),
        "norm after the embedding": (
            "x = x0 = norm(self.transformer.wte(idx).to(dtype))",
            "x = x0 = self.transformer.wte(idx).to(dtype)"),
        "softcap": ("softcap = 30.0", "softcap = 0.0"),
        "Muon (Adam at a tenth of its rate)": (
            "Muon([(n, p) for n, p in blocks if p.dim() == 2], max_lr, weight_decay=weight_decay,\n"
            "                           dtype=dtype)",
            "torch.optim.Adam([(n, p) for n, p in blocks if p.dim() == 2], 0.1 * max_lr, betas=(0.9, 0.95), "
            "fused=True)"),
        "momentum warm-up": (
            "return first + (last - first) * min(1.0, step / (0.154 * config.max_steps))", "return last"),
        "constant rate, then linear (cosine instead)": (
            "left = min(1.0, max(0, config.max_steps - step) / (config.cooldown * config.max_steps))",
            "left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.max_steps)))"),
        "head's rate by width (0.002 instead)": ("0.1 * max_lr * 768 / self.config.n_embd", "0.1 * max_lr"),
    },
    "frontier": {
        "several updates a step (one instead)": (
            "dict(max_steps=2500)", "dict(max_steps=2500, updates_per_step=1)"),
        "late keys": (
            "offset_keys(k, begins)", "k",
            "block.attn.c_k.weight[late:] = block.attn.c_q.weight[late:]", "pass"),
        "start of the late keys as the queries": (
            "block.attn.c_k.weight[late:] = block.attn.c_q.weight[late:]", "pass"),
        "head tied to the embedding": (
            "self.lm_head.weight = self.transformer.wte.weight ",
            "self.lm_head.weight = nn.Parameter(torch.zeros_like(self.transformer.wte.weight)) ",
            '"bigram.weight", "stem.weight")', '"bigram.weight", "stem.weight", "lm_head.weight")',
            '"transformer.stem.weight", "transformer.bigram.weight"))',
            '"transformer.stem.weight", "transformer.bigram.weight"))\n'
            '        wte.append(("lm_head.weight", params.pop("lm_head.weight")))',
            "return self.transformer.stem(self.stems).add_(self.lm_head.weight)",
            "return self.lm_head.weight"),
        "eps of the embedding (1e-8 instead)": ('"eps": 0.1 / tokens', '"eps": 1e-8'),
        "rows for stems": (
            "+ self.transformer.stem(self.stems[tokens])", "+ 0 * self.transformer.stem(self.stems[tokens])",
            "self.transformer.stem(self.stems).add_", "(0 * self.transformer.stem(self.stems)).add_"),
        "bigram table": ("return norm(x + pair.to(dtype))", "return norm(x + 0 * pair.to(dtype))"),
        "bigram table's rate (ten times as high instead)": ('"lr": 1.5 * max_lr', '"lr": 15 * max_lr'),
        "Adam's beta1 of 0.7 (speedrun's 0.9 instead)": ("betas=(0.7, 0.95)", "betas=(0.9, 0.95)"),
        "Muon's momentum of 0.80 to 0.85 (speedrun's 0.85 to 0.95 instead)": (
            "return min(speedrun.muon_momentum(step, config, 0.80, last), back)",
            "return speedrun.muon_momentum(step, config)"),
        "softcap of 15 (speedrun's 30 instead)": ("softcap = 15.0", "softcap = 30.0"),
    },
}
# steps of gpt2's run for one of the recipe's, and evaluations of gpt2's run
SHARE, EVALUATIONS = {"speedrun": 3, "frontier": 10}, {"speedrun": 12, "frontier": 10}
FRACTION = {"speedrun": "a third", "frontier": "a tenth"}


def ablated_source(recipe, idea):
    """(file, its text without the idea). Each of the idea's lines must occur in it exactly once."""
    lines = ABLATIONS[recipe][idea]
    for file in (f"{recipe}.py", "runtime/language_model.py", "train_gpt2.py"):
        text = (BENCH.parent / file).read_text(encoding="utf-8")
        if lines[0] in text:
            break
    for line, replacement in zip(lines[::2], lines[1::2], strict=True):
        assert text.count(line) == 1, f"{idea}: {file} holds {line!r} {text.count(line)} times"
        text = text.replace(line, replacement)
    return file, text


def validation_curve(flags, idea=None, threads=None):
    """{tokens: validation loss} of a run of train_gpt2.py with these flags, {name: value}, without `idea`.

    A run that diverged has nan from there on. UserError with its message if the run failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in BENCH.parent.glob("*.py"):
            shutil.copy(path, folder)
        for name in ("runtime", "assets"):
            shutil.copytree(BENCH.with_name(name), folder / name)
        if idea:
            file, text = ablated_source(flags["recipe"], idea)
            (folder / file).write_text(text, encoding="utf-8")
        given = flags | dict(hellaswag_every=0, sample_every=0, checkpoint_every=0, out=folder / "log")
        command = [sys.executable, folder / "train_gpt2.py",
                   *(f"--{name}={value}" for name, value in given.items())]
        result = subprocess.run(command, capture_output=True, text=True,
                                env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
        diverged = "gradient norm" in result.stderr             # the message of a non-finite loss
        if result.returncode and not diverged:
            raise UserError(result.stderr.strip().split("\n")[-1])
        losses = {row["step"]: row["val"] for row in read_metrics(folder / "log" / "metrics.csv")}
    steps = *range(0, flags["max_steps"], flags["val_every"]), flags["max_steps"]
    found = {step: math.nan if losses.get(step) is None else losses[step] for step in steps}
    return {step * flags["total_batch_size"]: loss for step, loss in found.items()}


def recipe_runs(args, recipe, base, steps, tokens):
    """{(kind, value): flags of train_gpt2.py}: ("gpt2", rate), (recipe, steps) and ("without", idea).

    gpt2 runs `steps` steps at three rates, the recipe its share of them and all, and the share without each
    idea.
    """
    common = dict(data=args.path, block_size=base.T, total_batch_size=tokens, batch_size="auto",
                  val_tokens=32768, val_every=steps // EVALUATIONS[recipe], max_steps=steps,
                  device=base.device, dtype=base.dtype)
    gpt2 = common | shape_of(replace(base, recipe="gpt2")) | dict(warmup_steps=steps // 15)
    other = common | shape_of(replace(base, recipe=recipe)) | dict(recipe=recipe)
    short = other | dict(max_steps=steps // SHARE[recipe])
    runs = {("gpt2", rate): gpt2 | dict(max_lr=rate) for rate in (1e-3, 2e-3, 4e-3)}
    runs |= {(recipe, flags["max_steps"]): flags for flags in (short, other)}
    if args.only_ideas:
        runs = {(recipe, short["max_steps"]): short}
    if not args.no_ideas:
        runs |= {("without", idea): short for idea in ABLATIONS[recipe]}
    return runs


def train_all(runs, seeds, cuda):
    """{key of runs: [validation curve of each seed]}. A CPU of n cores trains n at a time, a thread each."""
    from tqdm import tqdm
    jobs = [(seed, key) for seed in seeds for key in runs]

    def train(job):
        seed, (kind, value) = job
        curve = validation_curve(runs[kind, value] | {"seed": seed}, value if kind == "without" else None,
                                 None if cuda else 1)
        with tqdm.external_write_mode():        # not into the bar
            print(f"{kind} {value}, seed {seed}: {last_loss(curve):.4f}", flush=True)
        return curve
    with ThreadPoolExecutor(1 if cuda else os.cpu_count()) as pool:
        curves = list(progress(pool.map(train, jobs), "trained", "runs", len(jobs)))
    return {key: curves[i::len(runs)] for i, key in enumerate(runs)}


def last_loss(curve):
    return list(curve.values())[-1]


def mean_loss(curves):
    """Over the seeds, at the end."""
    return statistics.mean(map(last_loss, curves))


def loss_range(curves):
    losses = list(map(last_loss, curves))
    return f"{max(losses) - min(losses):.3f}"


def recipe_rows(curves, best, budgets):
    """A row for each run of a whole recipe: its mean losses at those token budgets that it evaluates."""
    rows = []
    for (kind, value), seeds in curves.items():
        if kind == "without":
            continue
        name = f"{kind}, --max_lr {value}" if isinstance(value, float) else f"{kind}, {value} steps"
        row = {"recipe": f"{name} (the best)" if (kind, value) == best else name}
        for tokens in budgets:
            losses = [curve[tokens] for curve in seeds if tokens in curve]
            row[f"{tokens / 1e6:.2f}M tokens"] = f"{statistics.mean(losses):.3f}" if losses else ""
        rows.append(row | {"seeds differ by": loss_range(seeds)})
    return rows


def compare_with_gpt2(recipe, curves, short, tokens):
    """Prints the table of whole runs, and whether the recipe's loss after `short` steps is below gpt2's after
    all of them. Returns its rows and the key of gpt2's best run."""
    means = {key: mean_loss(seeds) for key, seeds in curves.items() if key[0] == "gpt2"}
    best = min(means, key=lambda key: (math.isnan(means[key]), means[key]))
    share, loss = SHARE[recipe], mean_loss(curves[recipe, short])
    rows = recipe_rows(curves, best, [n * short * tokens for n in (1, share // 2 + 1, share)])
    print_table(rows)
    print(f"after {FRACTION[recipe]} of the tokens {recipe} is at {loss:.3f}, gpt2 after all of them at "
          f"{means[best]:.3f}: {'reached' if loss <= means[best] else 'NOT reached'}")
    return rows, best


def compare_ideas(recipe, curves, short):
    """Prints, and returns, a row for each idea: the mean loss without it, and how far that is above the
    recipe's."""
    baseline = curves[recipe, short]
    loss = mean_loss(baseline)
    rows = [{f"{recipe} without": idea, "validation loss": f"{mean_loss(seeds):.3f}",
             "the idea brings": f"{mean_loss(seeds) - loss:+.3f}", "seeds differ by": loss_range(seeds)}
            for (kind, idea), seeds in curves.items() if kind == "without"]
    print(f"{recipe} after {short} steps: {loss:.3f}, seeds differ by {loss_range(baseline)}")
    print_table(rows)
    return rows


def recipes_table(args, base):
    """gpt2 at the best of three rates against another recipe (--recipe, or speedrun) in a share of the steps,
    and that recipe's ablations. UserError without shards or with --steps of which there are no such shares.
    """
    if not args.path:
        raise UserError("bench.py recipes needs a folder of shards: python fineweb.py --input ... --out DATA")
    recipe = args.recipe if args.recipe in ABLATIONS else "speedrun"        # gpt2 is what it is compared with
    if args.only_ideas and (args.no_ideas or args.plot):
        raise UserError("--only_ideas prints the ablations alone: leave --no_ideas and --plot out")
    if recipe == "frontier" and (args.batch_size or 4) % 4:
        raise UserError(f"--batch_size {args.batch_size}: frontier needs a multiple of 4 sequences a step")
    steps, tokens = args.steps or 300, (args.batch_size or 16) * base.T
    if steps % EVALUATIONS[recipe]:
        raise UserError(f"--steps {steps}: give a multiple of {EVALUATIONS[recipe]}, of which {recipe} then "
                        f"takes {FRACTION[recipe]}")
    curves = train_all(recipe_runs(args, recipe, base, steps, tokens), range(args.turns),
                       base.device.startswith("cuda"))

    title, short, rows = f"{described(base.size)}, {tokens:,} tokens a step", steps // SHARE[recipe], []
    print(f"validation loss of {title}, means of {counted(args.turns, 'seed')}")
    if not args.only_ideas:
        rows, best = compare_with_gpt2(recipe, curves, short, tokens)
        if args.plot:
            names = {best: f"gpt2, --max_lr {best[1]}", (recipe, steps): f"{recipe}, the same tokens",
                     (recipe, short): f"{recipe}, {FRACTION[recipe]}"}
            # of the first seed, without the loss before the first step
            drawn = {name: zip(*list(curves[key][0].items())[1:], strict=True) for key, name in names.items()}
            plot_losses(args.plot, {"tokens": drawn}, title, reference=last_loss(curves[best][0]))
    return rows if args.no_ideas else rows + compare_ideas(recipe, curves, short)
