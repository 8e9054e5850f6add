"""Pictures: a run's losses, and bench.py's ladder and recipes. matplotlib is imported when one is drawn."""
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime.files import read_text, replace_file
from runtime.log import read_log
from runtime.tokenizer import VOCAB_SIZE

# published figures of GPT-2 124M: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's
# weights on HellaSwag
BASELINES = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"),
             "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}
RAW = dict(color="#f0cfa5", linewidth=0.6)
SMOOTH = dict(color="#d9822b", linewidth=1.2)
EVALUATION = dict(color="#1f4e9c", linewidth=1.6, marker="o", markersize=3)


def save_figure(figure, path, dpi=130):
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def short_count(n: float, _position=None) -> str:
    """'250k', '1.2M', '10B': a number of tokens, at a tick."""
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= least:
            return f"{n / least:g}{unit}"
    return f"{n:g}"


def is_fineweb(folder: str | Path) -> bool:
    """Whether the shards in `folder` are those of FineWeb or FineWeb-Edu: by fineweb.py's manifest.json, or,
    without one, by their names. False if the folder is gone."""
    try:
        manifest = json.loads(read_text(Path(folder) / "manifest.json", errors="strict"))
        return "fineweb" in str(manifest.get("pretokenized") or manifest["source"].get("repo")).lower()
    except OSError:
        names = [path.name for path in Path(folder).glob("*_val_*")]
        return any(re.match(r"(edufineweb|finewebedu|fineweb)(_p\d+of\d+)?_val_", name) for name in names)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False                                # another project's manifest, or a damaged one


def smooth(values: list[float], width: int) -> np.ndarray:
    """Centred moving average over `width` values; over fewer at the start, where a loss falls fast, and at
    the end, where there are no more."""
    i, n = np.arange(len(values)), len(values)
    half = np.minimum(width // 2, i // 4)
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    first, last = i - half, np.minimum(i + half + 1, n)
    return (sums[last] - sums[first]) / (last - first)


def limits(values: list[float], margin: float) -> tuple[float, float]:
    """The range of `values`, extended on both sides by the share `margin` of its height."""
    low, high = min(values), max(values)
    extra = margin * max(high - low, 1e-3)
    return low - extra, high + extra


def draw_panel(panel, curves, log_scale, baseline, least_height=0.0):
    """Draws curves [(label, points, style)]. The y axis has their range, and the line of `baseline` (value,
    label) only if it is in or near it: it must never squash the run's own curves."""
    scale, inverse = (math.log, math.exp) if log_scale else (float, float)
    for label, points, style in curves:
        panel.plot(*zip(*points, strict=True), label=label, **style)
    ys = [scale(y) for _, points, _ in curves for _, y in points if y > 0 or not log_scale]
    if ys:
        ys.append(min(ys) + least_height)
        low, high = limits(ys, 1 / 3)
        if baseline and low <= scale(baseline[0]) <= high:
            panel.axhline(baseline[0], color="#c0392b", linestyle="--", linewidth=1, label=baseline[1])
            ys.append(scale(baseline[0]))
        panel.set_ylim(*map(inverse, limits(ys, 0.05)))
    if log_scale and ys:                # a power law is a straight line (arXiv:2001.08361)
        from matplotlib.ticker import ScalarFormatter
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(ScalarFormatter())


def loss_curves(events, tokens_a_step):
    """{kind: [(tokens that the weights were trained on, value)]} of a log's events, the finite ones."""
    points = {"train": [], "val": [], "hella": []}
    for step, kind, value in events:
        if kind in points and math.isfinite(value):
            points[kind].append((step * tokens_a_step, value))
    return points


def plot_log(config) -> None:
    """Draws OUT/loss.png from log.txt: losses and HellaSwag against tokens, beside BASELINES."""
    from matplotlib.figure import Figure
    points = loss_curves(read_log(Path(config.out) / "log.txt"), config.total_batch_size)
    train, hella = points["train"], points["hella"]
    figure = Figure(figsize=(12 if hella else 7, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + bool(hella), squeeze=False)[0]

    width = 2 * (len(train) // 100) + 1             # about 2% of the steps, odd
    averaged = list(zip((x for x, _ in train), smooth([y for _, y in train], width), strict=True))
    curves = [("training loss", train, RAW if width > 1 else SMOOTH),
              (f"training loss, mean of {width} steps", averaged if width > 1 else [], SMOOTH),
              ("validation loss", points["val"], EVALUATION)]
    is_published = config.vocab_size >= VOCAB_SIZE and is_fineweb(config.data)
    draw_panel(panels[0], [curve for curve in curves if curve[1]], True,
               BASELINES["val"] if is_published else None)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].set_title(f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}", fontsize=9)
    if hella:   # 0.02: the noise of 10,042 questions, 0.0045, must not fill the picture
        draw_panel(panels[1], [("HellaSwag, acc_norm", hella, EVALUATION)], False,
                   None if config.hellaswag_data else BASELINES["hella"], least_height=0.02)
        panels[1].set_ylabel("HellaSwag accuracy (acc_norm)")

    newest = max((x for curve in points.values() for x, _ in curve), default=0)
    newest = max(newest, config.total_batch_size)
    # logarithmic, but linear up to a power of ten, about a hundredth of the run, so that step 0 has a place
    linear = max(config.total_batch_size, 10 ** max(0, round(math.log10(newest / 100))))
    decades = [10 ** i for i in range(20) if linear <= 10 ** i <= 1.05 * newest]
    for panel in panels:
        panel.set_xscale("symlog", linthresh=linear, linscale=0.5, subs=range(2, 10))
        panel.set_xticks([0, *decades])
        panel.set_xlim(0, 1.05 * newest)
        panel.xaxis.set_major_formatter(short_count)
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
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
