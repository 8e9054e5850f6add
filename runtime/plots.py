"""OUT/loss.png, drawn from metrics.csv by a process of its own; and what bench.py's pictures share."""
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.cli import brief_error
from runtime.console import read_metrics
from runtime.files import replace_file
from runtime.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent.parent
# published figures of GPT-2 124M: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's
# weights on HellaSwag
PUBLISHED = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"),
             "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}


def new_figure(**how):
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # a HOME that cannot be written, a font cache
    from matplotlib.figure import Figure
    return Figure(**how, layout="constrained")


def save_figure(figure, path, dpi=130):
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def short_count(n: float, _position=None) -> str:
    """'250k', '1.2M', '10B': a number of tokens, at a tick."""
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= least:
            return f"{n / least:g}{unit}"
    return f"{n:g}"


def limits(values: list[float], margin: float) -> tuple[float, float]:
    """The range of `values`, extended on both sides by the share `margin` of its height."""
    low, high = min(values), max(values)
    extra = margin * max(high - low, 1e-3)
    return low - extra, high + extra


def is_fineweb(folder: str | Path) -> bool:
    """Whether the shards in `folder` are named as those of FineWeb or FineWeb-Edu are."""
    return any(re.match(r"(edufineweb|finewebedu|fineweb)_val_", path.name)
               for path in Path(folder).glob("*_val_*"))


def published_for(config) -> list[str]:
    """The names in PUBLISHED that a run's figures can be compared with."""
    fineweb = config.vocab_size >= VOCAB_SIZE and is_fineweb(config.data)
    return ["val"] * fineweb + ["hella"] * (not config.hellaswag_data)


def mean_of(points: list[tuple], width: int) -> list[tuple]:
    """Centred moving average over `width` points."""
    xs, ys = zip(*points, strict=True)
    return list(zip(xs[width // 2:], np.convolve(ys, np.ones(width) / width, "valid"), strict=False))


def draw_panel(panel, label, curves, published) -> None:
    """Draws curves [(label, points, style)], and the line of `published` (value, label) only if it is in or
    near their range: it must never squash the run's own curves."""
    for name, points, style in curves:
        panel.plot(*zip(*points, strict=True), label=name, **style)
    low, high = limits([y for _, points, _ in curves for _, y in points], 1 / 3)
    if published and low <= published[0] <= high:
        panel.axhline(published[0], color="#c0392b", linestyle="--", linewidth=1, label=published[1])
    newest = max(1, *(x for _, points, _ in curves for x, _ in points))
    # linear up to about a hundredth of the run, so that step 0 has a place
    panel.set_xscale("symlog", linthresh=10 ** math.ceil(math.log10(newest / 100)))
    panel.set_xlim(0, 1.05 * newest)
    panel.xaxis.set_major_formatter(short_count)
    panel.set_xlabel("tokens")
    panel.set_ylabel(label)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def plot_run(out: Path, title: str, published: list[str]) -> None:
    """Draws OUT/loss.png: losses and HellaSwag against the tokens that the weights were trained on, beside
    those of PUBLISHED that are named."""
    train, val, hella = ([(row["tokens"], row[kind]) for row in read_metrics(out / "metrics.csv")
                          if row[kind] is not None and math.isfinite(row[kind])]
                         for kind in ("train", "val", "hella"))
    width = 2 * (len(train) // 100) + 1             # about 2% of the steps, odd
    raw, mean = dict(color="#f0cfa5", linewidth=0.6), dict(color="#d9822b", linewidth=1.2)
    evaluation = dict(color="#1f4e9c", linewidth=1.6, marker="o", markersize=3)
    losses = [("training loss", train, raw if width > 1 else mean),
              (f"training loss, mean of {width} steps", mean_of(train, width) if width > 1 else [], mean),
              ("validation loss", val, evaluation)]
    panels = [(label, drawn, name in published and PUBLISHED[name]) for label, curves, name in (
        ("loss, nats a token", losses, "val"),
        ("HellaSwag accuracy (acc_norm)", [("HellaSwag, acc_norm", hella, evaluation)], "hella"))
        if (drawn := [curve for curve in curves if curve[1]])]
    if not panels:
        return                                      # nothing yet
    figure = new_figure(figsize=(6 * len(panels) + 1, 4.5))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, *panel)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, out / "loss.png", dpi=110)


class Drawing:
    """The process that draws: a thread would share the interpreter with the training loop, and all ranks wait
    for that. At most one at a time, and none after one that failed and said why."""
    process, skipped = None, ()


def draw(out: str | Path, title: str, published: Collection[str] = ()) -> None:
    """Begins to draw OUT/loss.png, and returns at once. Skipped while the one before is being drawn."""
    code = Drawing.process.poll() if Drawing.process else 0
    Drawing.skipped = (out, title, published) if code is None else ()
    if code == 0:
        command = [sys.executable, "-W", "ignore", "-m", "runtime.plots", Path(out).resolve(), title]
        with suppress(OSError):         # no room for a process. A new session: Ctrl-C is not for it
            Drawing.process = subprocess.Popen(
                [*command, *published], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def finish(patience: float = 60) -> None:
    """At the end of a run: waits for the picture, and for one more where the last was skipped."""
    with suppress(subprocess.TimeoutExpired):
        while Drawing.process and Drawing.process.wait(patience) == 0 and Drawing.skipped:
            draw(*Drawing.skipped)


if __name__ == "__main__":              # python -m runtime.plots OUT TITLE [val] [hella]
    if hasattr(os, "nice"):             # not on Windows
        os.nice(19)
    try:
        plot_run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except Exception as error:          # matplotlib raises all kinds
        sys.exit(f"warning: {sys.argv[1]}/loss.png is not drawn ({brief_error(error)})")
