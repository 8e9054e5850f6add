"""OUT/loss.png, drawn from the rows of metrics.csv; and what bench.py's pictures share."""
import logging
import math
import time
from pathlib import Path

from runtime.cli import UserError, brief_error, import_package, print_error
from runtime.files import replace_file

PATIENCE = 60.0         # seconds between two pictures of a run
# column of metrics.csv: (label of the y axis, of the curve, its style)
EVALUATION = dict(color="#1f4e9c", marker="o", markersize=3)
CURVES = {"train": ("loss, nats a token", "training loss", dict(color="#d9822b", linewidth=0.6)),
          "val": ("loss, nats a token", "validation loss", EVALUATION),
          "hella": ("HellaSwag accuracy (acc_norm)", "HellaSwag, acc_norm", EVALUATION)}


def new_figure(**how):
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # a HOME that cannot be written, a font cache
    return import_package("matplotlib.figure").Figure(**how, layout="constrained")


def short_count(n: float, _position=None) -> str:
    """'250k', '1.2M', '10B': a number of tokens, at a tick."""
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= least:
            return f"{n / least:g}{unit}"
    return f"{n:g}"


def plot_run(rows: list[dict], path: Path, title: str) -> None:
    """Draws losses and HellaSwag of the rows of a metrics.csv against tokens; nothing without a number."""
    panels = {}                                                     # {label of the y axis: {column: points}}
    for kind, (label, *_) in CURVES.items():
        if points := [(row["tokens"], row[kind]) for row in rows
                      if row[kind] is not None and math.isfinite(row[kind])]:
            panels.setdefault(label, {})[kind] = points
    figure = new_figure(figsize=(6 * len(panels) + 1, 4.5))
    figure.suptitle(title, fontsize=9)
    for i, (label, curves) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(1, len(panels), i, xlabel="tokens", ylabel=label)
        for kind, points in curves.items():
            panel.plot(*zip(*points, strict=True), label=CURVES[kind][1], **CURVES[kind][2])
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(short_count)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    if panels:
        replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


def draw(record, title: str, last: bool) -> None:
    """OUT/loss.png of a Record, at most once in PATIENCE, and at the run's end; if that fails, a warning, or
    only one where matplotlib is not installed."""
    if record.picture_due == math.inf or time.monotonic() < record.picture_due and not last:
        return
    record.picture_due = time.monotonic() + PATIENCE
    try:
        plot_run(record.rows, record.out / "loss.png", title)
    except Exception as error:          # matplotlib raises all kinds
        print_error(f"warning: {record.out}/loss.png is not drawn ({brief_error(error)})")
        if isinstance(error, UserError):
            record.picture_due = math.inf
