"""OUT/loss.png, drawn from metrics.csv; and what the pictures of bench.py share with it."""
import logging
import math
from pathlib import Path

import numpy as np

from runtime.files import replace_file
from runtime.metrics import Metrics

TRAINING = "#d9822b"
EVALUATION = dict(color="#1f4e9c", marker="o", markersize=4)


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


def plot_run(metrics: Metrics, path: Path, title: str, backward_tokens: int = 0) -> None:
    """Draws the losses and HellaSwag of a run against tokens, into the .png `path`.

    `backward_tokens`: how many tokens, the first ones of the run, are read backwards. Draws nothing
    if there is no number to draw.
    """
    train = metrics.measured("train")
    # A validation in front of what is read backwards would be a dot far from all others.
    val = [(tokens, loss) for tokens, loss in metrics.measured("val") if tokens >= backward_tokens]
    hella = metrics.measured("hella")
    panels = []
    if train or val:
        panels.append("losses")
    if hella:
        panels.append("hella")
    if not panels:
        return

    # Losses and accuracies have different scales: one panel for each, side by side.
    figure = new_figure(figsize=(6 * len(panels) + 1, 4.5))
    figure.suptitle(title, fontsize=9)
    for i, name in enumerate(panels, 1):
        panel = figure.add_subplot(1, len(panels), i, xlabel="tokens")
        if name == "losses":
            draw_losses(panel, train, val, backward_tokens)
        else:
            panel.set_ylabel("HellaSwag accuracy (acc_norm)")
            panel.plot(*columns(hella), label="HellaSwag, acc_norm", **EVALUATION)
            panel.legend(fontsize=8, loc="lower right")

        panel.set_xlim(left=0)
        # 10B is easier to read than 1e10.
        panel.xaxis.set_major_formatter(short_count)
        panel.grid(alpha=0.3)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))


def draw_losses(panel, train: list, val: list, backward_tokens: int) -> None:
    """The two losses, [(tokens, loss)] each. What is read backwards is shaded, and labelled."""
    panel.set_ylabel("loss, nats per token")
    window = max(1, len(train) // 25)
    backward = [point for point in train if point[0] < backward_tokens]
    forward = train[len(backward):]

    # The loss jumps where the reading turns: neither the mean nor a line leads across.
    steps, means = [], []
    for part in (backward, forward):
        if part and steps:
            gap = (backward_tokens, math.nan)           # matplotlib draws no line to a nan
            steps.append(gap)
            means.append(gap)
        steps += part
        means += running_mean(part, window)

    name = "training loss"
    if window > 1:
        # A step has few sequences, and its loss jumps: it is pale behind the mean.
        name += f", mean of {window} steps"
        panel.plot(*columns(steps), color=TRAINING, alpha=0.3, linewidth=0.6)
    if means:
        panel.plot(*columns(means), label=name, color=TRAINING, linewidth=1.8)
    if val:
        panel.plot(*columns(val), label="validation loss", **EVALUATION)
    panel.set_ylim(top=highest_loss(means + val) + 0.2)
    panel.legend(fontsize=8, loc="lower left")

    if backward_tokens:
        panel.axvspan(0, backward_tokens, color="gray", alpha=0.15, linewidth=0)
        # x is in tokens, and y from 0 to 1.
        place = dict(ha="center", transform=panel.get_xaxis_transform())
        panel.text(backward_tokens / 2, 0.93, "read backwards", **place)
        if forward:
            last, _ = forward[-1]
            panel.text((backward_tokens + last) / 2, 0.93, "then forwards", **place)


def columns(points: list[tuple[float, float]]) -> tuple:
    """(the tokens, the values) of [(tokens, value)]."""
    return tuple(zip(*points, strict=True))


def running_mean(points: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """[(tokens, mean)] of `window` values around each one, and of fewer at the ends."""
    values = np.array([value for _, value in points])
    means = []
    for i, (tokens, _) in enumerate(points):
        first = max(0, i - window // 2)
        end = min(len(points), i - window // 2 + window)
        means.append((tokens, values[first:end].mean()))
    return means


def highest_loss(points: list[tuple[float, float]]) -> float:
    """Of [(tokens, loss)], without the first twentieth of the tokens.

    The fall there is so deep that no later difference could be seen beside it.
    """
    points = [(tokens, loss) for tokens, loss in points if math.isfinite(loss)]
    last = max(tokens for tokens, _ in points)
    return max(loss for tokens, loss in points if tokens >= last / 20)
