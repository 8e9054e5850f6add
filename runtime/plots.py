"""Pictures: a run's losses, and bench.py's ladder and recipes. matplotlib is imported when one is drawn."""
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.files import replace_file
from runtime.log import read_log
from runtime.tokenizer import VOCAB_SIZE

# published figures of GPT-2 124M: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's
# weights on HellaSwag
BASELINES = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"),
             "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}


def save_figure(figure, path, dpi=130):
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def plot_log(config) -> None:
    """Draws OUT/loss.png from log.txt: losses and HellaSwag against tokens, beside BASELINES."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
    points = {"train": [], "val": [], "hella": []}
    for step, kind, value in read_log(Path(config.out) / "log.txt"):
        tokens = (step + (kind == "train")) * config.total_batch_size       # seen by the weights
        if tokens and kind in points and math.isfinite(value):
            points[kind].append((tokens, value))
    figure = Figure(figsize=(12 if points["hella"] else 7, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + bool(points["hella"]), squeeze=False)[0]
    thin = dict(color="#b8c4d6", linewidth=0.8)
    thick = dict(color="#1f4e9c", linewidth=1.8, marker="o", markersize=3)
    for kind, panel, style, label in (("train", panels[0], thin, "training loss"),
                                      ("val", panels[0], thick, "validation loss"),
                                      ("hella", panels[-1], thick, "HellaSwag, acc_norm")):
        if points[kind]:
            panel.plot(*zip(*points[kind], strict=True), label=label, **style)
            if kind in BASELINES and config.vocab_size >= VOCAB_SIZE:
                value, name = BASELINES[kind]
                panel.axhline(value, color="#c0392b", linestyle="--", linewidth=1, label=name)
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    panels[0].set_yscale("log")         # a power law is a straight line (arXiv:2001.08361)
    panels[0].yaxis.set_major_formatter(ScalarFormatter())
    panels[0].yaxis.set_minor_formatter(ScalarFormatter())
    panels[0].set_title(f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}", fontsize=9)
    save_figure(figure, Path(config.out) / "loss.png", dpi=110)


class LossPlotter:
    """Draws OUT/loss.png on a thread: all ranks would wait for it, half a second an evaluation."""

    def __init__(self, config, process):
        self.config, self.process = config, process
        self.thread, self.pending = ThreadPoolExecutor(1, "picture"), []

    def draw(self):
        """On rank 0. Cancels the pictures not begun: the new one shows what they would have shown."""
        self.pending = [picture for picture in self.pending if not picture.cancel()]
        self.pending.append(self.thread.submit(plot_log, self.config))

    def finish(self, wait=True):
        """Warns of pictures that failed. Waits for the others; wait=False leaves those for a later call."""
        while self.pending and (wait or self.pending[0].done()):
            try:
                self.pending.pop(0).result()
            except Exception as error:          # matplotlib raises all kinds; a picture must not end a run
                self.process.print0(f"warning: {self.config.out}/loss.png is not drawn ({error}); "
                                    "--no_plot does without it")

    def close(self):
        self.thread.shutdown(wait=False, cancel_futures=True)   # a run that failed draws no more


def plot_ladder(path, rows, title):
    """Bars of tokens/s by row of `bench.py ladder`; failed rows are left out."""
    from matplotlib.figure import Figure
    rows = [row for row in rows if isinstance(row.get("tokens/s"), float)][::-1]
    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in rows], [row["tokens/s"] for row in rows], color="#4878a8")
    axes.bar_label(bars, [f"{row['tokens/s']:,.0f} ({row['in all']})" for row in rows], padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("tokens/s")
    axes.set_title(f"GPT-2 124M, {title}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def plot_curves(path, curves, title):
    """Validation loss against tokens. `curves`: {name: {tokens: loss}}; a line marks the first one's end."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        points = [(tokens / 1e6, loss) for tokens, loss in curve.items() if tokens]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    final = list(next(iter(curves.values())).values())[-1]
    axes.axhline(final, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("validation loss")
    axes.set_title(title, fontsize=9)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
