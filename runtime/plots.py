"""OUT/loss.png, drawn from metrics.csv; and what the pictures of bench.py share with it."""
import logging
import math
from pathlib import Path

from runtime.files import replace_file
from runtime.metrics import Metrics

EVALUATION = dict(color="#1f4e9c", marker="o", markersize=3)
# column of metrics.csv: (label of the y axis, name of the curve, its style)
CURVES = {
    "train": ("loss, nats per token", "training loss", dict(color="#d9822b", linewidth=0.6)),
    "val": ("loss, nats per token", "validation loss", EVALUATION),
    "hella": ("HellaSwag accuracy (acc_norm)", "HellaSwag, acc_norm", EVALUATION),
}


def new_figure(**how):
    # While it is imported, matplotlib warns of a HOME that it cannot write to, and says that it
    # caches the fonts.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    return Figure(**how, layout="constrained")


def short_count(n: float, _position=None) -> str:
    """A number of tokens, as beside a tick: '250k', '1.2M', '10B'. matplotlib gives the tick's
    position, too."""
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= least:
            return f"{n / least:g}{unit}"
    return f"{n:g}"


def plot_run(metrics: Metrics, path: Path, title: str) -> None:
    """Draws the losses and HellaSwag of a run against tokens, into the .png `path`.

    Draws nothing if there is no number among them.
    """
    # Curves with the same label of the y axis share a panel: {label: {column: points}}.
    panels = {}
    for column, (label, _, _) in CURVES.items():
        points = metrics.measured(column)
        if points:
            panels.setdefault(label, {})[column] = points
    if not panels:
        return

    # Losses and accuracies have different scales: one panel for each, side by side.
    figure = new_figure(figsize=(6 * len(panels) + 1, 4.5))
    figure.suptitle(title, fontsize=9)
    for i, (label, curves) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(1, len(panels), i, xlabel="tokens", ylabel=label)
        for column, points in curves.items():
            _, name, style = CURVES[column]
            if column == "val" and points[0][0] == 0:
                # The loss falls steeply at first: a straight line from step 0 to the next
                # validation would lie far above it. nan leaves the line out.
                points.insert(1, (0, math.nan))
            tokens, values = zip(*points, strict=True)
            panel.plot(tokens, values, label=name, **style)

        panel.set_xlim(left=0)
        if "hella" not in curves:
            panel.set_ylim(top=highest_loss(curves) + 0.2)

        # 10B is easier to read than 1e10.
        panel.xaxis.set_major_formatter(short_count)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


def highest_loss(curves: dict[str, list]) -> float:
    """Of {name: [(tokens, loss)]}, without the first twentieth of the tokens.

    The fall there is so deep that no later difference could be seen beside it.
    """
    last = max(points[-1][0] for points in curves.values())
    return max(loss for points in curves.values() for tokens, loss in points if tokens >= last / 20)
