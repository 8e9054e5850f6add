"""Pictures."""
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.files import replace_file
from runtime.log import read_log
from runtime.tokenizer import VOCAB_SIZE

# GPT-2 124M by others: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's weights on HellaSwag
BASELINES = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"), "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}


def plot_log(config) -> None:
    """OUT/loss.png: the losses of log.txt against tokens, and HellaSwag, beside what is published of GPT-2 124M."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
    points = {"train": [], "val": [], "hella": []}
    for step, kind, value in read_log(Path(config.out) / "log.txt"):
        tokens = (step + (kind == "train")) * config.total_batch_size           # that the weights have seen
        if tokens and kind in points and math.isfinite(value):
            points[kind].append((tokens, value))
    figure = Figure(figsize=(12 if points["hella"] else 7, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + bool(points["hella"]), squeeze=False)[0]
    for kind, panel, colour, label in (("train", panels[0], "#b8c4d6", "training loss"), ("val", panels[0], "#1f4e9c",
                                       "validation loss"), ("hella", panels[-1], "#1f4e9c", "HellaSwag, acc_norm")):
        if points[kind]:
            panel.plot(*zip(*points[kind], strict=True), color=colour, label=label, linewidth=0.8 if kind == "train" else 1.8,
                       marker=None if kind == "train" else "o", markersize=3)
            if kind in BASELINES and config.vocab_size >= VOCAB_SIZE:
                panel.axhline(BASELINES[kind][0], color="#c0392b", linestyle="--", linewidth=1, label=BASELINES[kind][1])
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
    replace_file(Path(config.out) / "loss.png", lambda file: figure.savefig(file, format="png", dpi=110))


class LossPlotter:
    """Has OUT/loss.png drawn on a thread: half a second at each evaluation, in which all processes would wait for the master."""

    def __init__(self, config, process):
        self.config, self.process = config, process
        self.thread, self.pending = ThreadPoolExecutor(1, "picture"), []

    def draw(self):
        """On the master. A picture that is asked for and not begun gives way to the new one, which shows what it would have."""
        self.pending = [*(picture for picture in self.pending if not picture.cancel()), self.thread.submit(plot_log, self.config)]

    def finish(self, wait=True):
        """Waits for the pictures, or with wait=False only looks. One that could not be drawn is a warning."""
        while self.pending and (wait or self.pending[0].done()):
            try:
                self.pending.pop(0).result()
            except Exception as error:          # matplotlib's of every kind: no picture is worth a run
                self.process.print0(f"warning: {self.config.out}/loss.png is not drawn ({error}); --no_plot does without it")

    def close(self):
        self.thread.shutdown(wait=False, cancel_futures=True)   # a run that has failed draws no more


def plot_ladder(path, rows, title):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = [row for row in rows if isinstance(row.get("tokens/s"), float)][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    bars = axes.barh([row["rung"] for row in rows], [row["tokens/s"] for row in rows], color="#4878a8")
    axes.bar_label(bars, [f"{row['tokens/s']:,.0f} ({row['in all']})" for row in rows], padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("tokens/s")
    axes.set_title(f"GPT-2 124M, {title}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


def plot_curves(path, curves, title):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        points = [(tokens / 1e6, loss) for tokens, loss in curve.items() if tokens]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    lowest = list(next(iter(curves.values())).values())[-1]
    axes.axhline(lowest, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("validation loss")
    axes.set_title(title, fontsize=9)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))
