"""OUT/loss.png, drawn from metrics.csv by a process of its own; and what bench.py's pictures share."""
import logging
import math
import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from runtime.cli import brief_error
from runtime.console import read_metrics
from runtime.files import replace_file
from runtime.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).resolve().parent.parent
# column of metrics.csv: (label of the y axis, of the curve, its style)
EVALUATION = dict(color="#1f4e9c", marker="o", markersize=3)
CURVES = {"train": ("loss, nats a token", "training loss", dict(color="#d9822b", linewidth=0.6)),
          "val": ("loss, nats a token", "validation loss", EVALUATION),
          "hella": ("HellaSwag accuracy (acc_norm)", "HellaSwag, acc_norm", EVALUATION)}
# published figures of GPT-2 124M: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's
# weights on HellaSwag
PUBLISHED = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"),
             "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}


def new_figure(**how):
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # a HOME that cannot be written, a font cache
    from matplotlib.figure import Figure
    return Figure(**how, layout="constrained")


def save_figure(figure, path):
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


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


def plot_run(out: Path, title: str, published: Collection[str]) -> None:
    """Draws OUT/loss.png: losses and HellaSwag against the tokens that the weights were trained on, beside
    those of PUBLISHED that are named and near: they must never squash the run's own curves."""
    rows, panels = read_metrics(out / "metrics.csv"), {}            # {label of the y axis: {column: points}}
    for kind, (label, *_) in CURVES.items():
        if points := [(row["tokens"], row[kind]) for row in rows
                      if row[kind] is not None and math.isfinite(row[kind])]:
            panels.setdefault(label, {})[kind] = points
    figure = new_figure(figsize=(6 * len(panels) + 1, 4.5))
    figure.suptitle(title, fontsize=9)
    for i, (label, curves) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(1, len(panels), i, xlabel="tokens", ylabel=label)
        low, high = limits([y for points in curves.values() for _, y in points], 1 / 3)
        for kind, points in curves.items():
            panel.plot(*zip(*points, strict=True), label=CURVES[kind][1], **CURVES[kind][2])
            if kind in published and low <= PUBLISHED[kind][0] <= high:
                panel.axhline(PUBLISHED[kind][0], color="#c0392b", linestyle="--", label=PUBLISHED[kind][1])
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(short_count)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    if panels:
        save_figure(figure, out / "loss.png")


class Drawing:
    """The process that draws, if one has begun: a thread would share the interpreter with the training loop,
    and all ranks wait for that."""
    process = None


def draw(config, wait: bool = False) -> None:
    """Begins to draw OUT/loss.png of a train_gpt2.Config, beside published figures that are comparable, and
    returns at once. Not while the one before is being drawn, unless `wait`, and not after one that failed."""
    if wait:
        finish()
    if Drawing.process and Drawing.process.poll() != 0:
        return
    names = {path.name.partition("_val_")[0] for path in Path(config.data).glob("*_val_*")}
    fineweb = config.vocab_size >= VOCAB_SIZE and names & {"edufineweb", "finewebedu", "fineweb"}
    command = [sys.executable, "-W", "ignore", "-m", "runtime.plots", Path(config.out).resolve(),
               f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}",
               *["val"] * bool(fineweb), *["hella"] * (not config.hellaswag_data)]
    with suppress(OSError):             # no room for a process. A new session: Ctrl-C is not for it
        Drawing.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True)


def finish(patience: float = 60) -> None:
    """Waits for the picture that is being drawn."""
    with suppress(subprocess.TimeoutExpired):
        if Drawing.process:
            Drawing.process.wait(patience)


if __name__ == "__main__":              # python -m runtime.plots OUT TITLE [val] [hella]
    if hasattr(os, "nice"):             # not on Windows
        os.nice(19)
    try:
        plot_run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except Exception as error:          # matplotlib raises all kinds
        sys.exit(f"warning: {sys.argv[1]}/loss.png is not drawn ({brief_error(error)})")
