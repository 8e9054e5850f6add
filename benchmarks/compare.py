"""`bench.py compare`: the validation losses of several runs, against tokens and against time, beside
curves from files."""
import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.timing import print_table
from runtime.cli import UserError
from runtime.console import clock, read_metrics
from runtime.files import read_text, reading, replace_file
from runtime.plots import new_figure, short_count


@dataclass
class Curve:
    """The validations of a run, or of a curve in a file, which has neither steps nor seconds."""
    name: str
    last: dict              # "step", "tokens" and "seconds": how far it has trained
    points: list[tuple[int, float, float]]          # (tokens, seconds, validation loss)
    is_run: bool = True


def finite(points: list[tuple]) -> list[tuple]:
    return [point for point in points if math.isfinite(point[2])]


# ---------------------------------------------------------------------- where curves come from

def read_curve(source: str) -> Curve:
    """From a run's --out folder, or a .csv file. UserError if there is no validation in it."""
    if source.lower().endswith(".csv") and not Path(source).is_dir():
        remedy = "choose a .csv with the columns tokens,loss, or the --out folder of a run"
        with reading(source, remedy, (OSError, ValueError, csv.Error)):
            return parse_csv(source, read_text(source))

    path = Path(source) / "metrics.csv"
    if not path.exists():
        raise UserError(f"{path} does not exist: choose the --out folder of a run that has begun")
    rows = read_metrics(path, "choose the --out folder of a run")
    points = []
    for row in rows:
        if row["val"] is not None:
            points.append((row["tokens"], row["seconds"], row["val"]))
    if not points:
        raise UserError(f"{path} has no validation loss yet: wait for the first, or train with "
                        "--val_every")
    return Curve(source, rows[-1], points)


def parse_csv(name: str, text: str) -> Curve:
    """Rows of tokens,loss with growing tokens. ValueError for others.

    A header may name the two, in any place among other columns. A line that begins with # is a
    comment.
    """
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            lines.append(line)

    header = "tokens,loss"
    if lines and lines[0].lstrip()[0] not in "+-.0123456789":
        header = lines.pop(0).lower()

    points = []
    tokens_before = -1
    for number, row in enumerate(csv.DictReader([header, *lines], skipinitialspace=True), 1):
        try:
            tokens, loss = float(row["tokens"]), float(row["loss"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its row {number} does not hold tokens and a loss") from None
        if not (0 <= tokens < 1e18 and 0 < loss < 1e4):
            raise ValueError(f"its row {number} holds {tokens:g} tokens and a loss of {loss:g}")
        if tokens <= tokens_before:
            raise ValueError(f"its row {number} has no more tokens than the one before")
        tokens_before = int(tokens)
        points.append((tokens_before, math.nan, loss))
    if not points:
        raise ValueError("it holds no loss")
    last = {"step": None, "tokens": tokens_before, "seconds": None}
    return Curve(name, last, points, is_run=False)


# ---------------------------------------------------------------------- the tables

def tokens_text(n: float | None) -> str:
    """'1.23M': three digits."""
    if n is None:
        return "-"
    return short_count(float(f"{n:.3g}"))


FORMATS = {
    "tokens": tokens_text,
    "at tokens": tokens_text,
    "time": clock,
    "final val loss": "{:.4f}".format,
    "lowest": "{:.4f}".format,
    "val loss": "{:.4f}".format,
    "the other's": "{:.4f}".format,
    "difference": "{:+.4f}".format,
}


def tokens_to_reach(target: float, points: list[tuple]) -> float | None:
    """After how many tokens the loss was first at `target`, linear between validations. None: never."""
    before = None
    for point in finite(points):
        tokens, _, loss = point
        if loss <= target:
            if before is None:              # already at the first validation
                return float(tokens)
            tokens_before, _, higher = before
            return np.interp(target, (loss, higher), (tokens, tokens_before)).item()
        before = point
    return None


def curve_row(curve: Curve) -> dict:
    row = {"run": curve.name, "tokens": curve.last["tokens"]}
    if curve.is_run:
        row["steps"] = curve.last["step"]
        row["time"] = curve.last["seconds"]
    row["final val loss"] = curve.points[-1][2]
    row["lowest"] = min((loss for *_, loss in finite(curve.points)), default=math.nan)
    return row


def pair_row(curve: Curve, other: Curve) -> dict:
    """How a curve stands to another.

    At its newest validation that the other reaches: the difference of their losses. And after how
    many tokens the other had its final loss. Linear between validations.
    """
    row = {"run": curve.name, "against": other.name}
    other_points = finite(other.points)
    common = []
    if other_points:
        first, last = other_points[0][0], other_points[-1][0]
        common = [point for point in finite(curve.points) if first <= point[0] <= last]
    if common:
        tokens, _, loss = common[-1]
        other_tokens, _, other_losses = zip(*other_points, strict=True)
        other_loss = np.interp(tokens, other_tokens, other_losses).item()
        row["at tokens"] = tokens
        row["val loss"] = loss
        row["the other's"] = other_loss
        row["difference"] = loss - other_loss

    own_tokens, _, final_loss = curve.points[-1]
    reached = tokens_to_reach(final_loss, other.points)
    row["reached after"] = tokens_text(reached)
    if reached is not None and own_tokens > 0:
        row["reached after"] += f" ({reached / own_tokens:.0%})"
    return row


def compare_table(args, base) -> list[dict]:
    """Prints and returns the rows of the runs, and of each pair of them."""
    if not args.paths:
        raise UserError("bench.py compare needs --out folders of runs: name them, as in `python "
                        "bench.py compare log/a log/b`")
    curves = [read_curve(path) for path in dict.fromkeys(args.paths)]
    rows = [curve_row(curve) for curve in curves]
    print_table(rows, FORMATS)

    pairs = []
    for curve in curves:
        for other in curves:
            if curve is not other and (curve.is_run or other.is_run):
                pairs.append(pair_row(curve, other))
    if pairs:
        print("each pair at the newest validation that both reached; 'reached after' is when the "
              "other run had this run's final val loss")
        print_table(pairs, FORMATS)

    if args.plot:
        plot_runs(args.plot, curves, args.title)
    return rows + pairs


# ---------------------------------------------------------------------- the picture

def not_tex(text: str) -> str:
    return text.replace("$", r"\$")


def label_of(curve: Curve) -> str:
    # A leading underscore would hide the curve from the legend.
    return " " + not_tex(curve.name)


def time_unit(curves: list[Curve]) -> tuple[str, int]:
    """The unit in which the longest run is read best, and its seconds."""
    longest = max(curve.last["seconds"] or 0 for curve in curves)
    if longest >= 2 * 3600:
        return "hours", 3600
    return "minutes", 60


def draw_level(panel, loss: float, label: str) -> None:
    panel.axhline(loss, color="grey", linestyle="--", linewidth=0.8, zorder=0, label=label)


def plot_runs(path: str, curves: list[Curve], title: str | None, bytes_per_token=0.0) -> None:
    """Two panels: validation loss against tokens, and against the time of training. With the bytes
    of text per token, one panel: bits per byte against bytes of text, which compares tokenizers, too.

    A dashed line is the final loss of the first curve: where another curve meets it, one can read
    how many tokens and how much time that one needed.
    """
    unit, length = time_unit(curves)
    x_labels = ["tokens of training", f"{unit} of training"]
    y_label = "validation loss, nats per token"
    if bytes_per_token:
        x_labels = ["bytes of text"]
        y_label = "bits per byte of validation text"

    figure = new_figure(figsize=(1 + 5.5 * len(x_labels), 4.5))
    if title:
        figure.suptitle(not_tex(title))
    panels = figure.subplots(1, len(x_labels), sharey=True, squeeze=False)[0]
    highest, lowest = -math.inf, math.inf           # what the panels show of the losses
    for curve in curves:
        tokens, seconds, loss = np.reshape(finite(curve.points), (-1, 3)).T
        if bytes_per_token:
            tokens = tokens * bytes_per_token
            loss = loss / math.log(2) / bytes_per_token

        for panel, xs in zip(panels, (tokens, seconds / length), strict=False):
            panel.plot(xs, loss, marker="o", markersize=3, label=label_of(curve))
            if curve is curves[0] and len(loss):
                draw_level(panel, loss[-1], f"{label_of(curve)} at its end: {loss[-1]:.2f}")

        # The first tenth of a run is cut off: its fall would hide how the runs differ later.
        if len(loss):
            highest = max(highest, np.interp(0.1 * tokens[-1], tokens, loss), loss.min())
            lowest = min(lowest, loss.min())

    for panel, x_label in zip(panels, x_labels, strict=True):
        panel.set(xlabel=x_label, xlim=(0, None))
        if lowest <= highest:
            panel.set_ylim(lowest - 0.05, highest + 0.05)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(y_label)
    panels[0].xaxis.set_major_formatter(short_count)
    panels[0].legend(fontsize=8)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))
    print(f"saved {path}")
