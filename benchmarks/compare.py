"""`bench.py compare`: the validation losses of several runs, against tokens and against time, beside curves
from files."""
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
    """A run's validations, and the last row of its metrics.csv: how far it has trained. One from a file has
    neither steps nor seconds."""
    name: str
    last: dict
    points: list[tuple[int, float, float]]          # (tokens, seconds, validation loss)
    is_run: bool = True


def finite(points: list[tuple]) -> list[tuple]:
    return [point for point in points if math.isfinite(point[2])]


def read_curve(source: str) -> Curve:
    """From a run's --out folder, or a .csv file. UserError for a run without validations, or no curve."""
    if source.lower().endswith(".csv") and not Path(source).is_dir():
        with reading(source, "choose a .csv with the columns tokens,loss, or the --out folder of a run",
                      (OSError, ValueError, csv.Error)):
            return parse_csv(source, read_text(source))
    path = Path(source) / "metrics.csv"
    if not path.exists():
        raise UserError(f"{path} does not exist: choose the --out folder of a run that has begun")
    rows = read_metrics(path, "choose the --out folder of a run")
    points = [(row["tokens"], row["seconds"], row["val"]) for row in rows if row["val"] is not None]
    if not points:
        raise UserError(f"{path} has no validation loss yet: wait for the first, or train with --val_every")
    return Curve(source, rows[-1], points)


def parse_csv(name: str, text: str) -> Curve:
    """Rows of tokens,loss with growing tokens. A header may name the two, in any place among other columns. A
    line that begins with # is a comment. ValueError for others."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")] or [""]
    header = ["tokens,loss" if lines[0].lstrip()[:1] in set("+-.0123456789") else lines.pop(0).lower()]
    rows = [(-1, math.nan, 0.0)]
    for number, row in enumerate(csv.DictReader(header + lines, skipinitialspace=True), 1):
        try:
            tokens, loss = float(row["tokens"]), float(row["loss"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its row {number} does not hold tokens and a loss") from None
        if not (0 <= tokens < 1e18 and 0 < loss < 1e4):
            raise ValueError(f"its row {number} holds {tokens:g} tokens and a loss of {loss:g}")
        if tokens <= rows[-1][0]:
            raise ValueError(f"its row {number} has no more tokens than the one before")
        rows.append((int(tokens), math.nan, loss))
    if not rows[1:]:
        raise ValueError("it holds no loss")
    return Curve(name, {"step": None, "tokens": rows[-1][0], "seconds": None}, rows[1:], False)


def tokens_text(n: float | None) -> str:
    """'1.23M': three digits."""
    return "-" if n is None else short_count(float(f"{n:.3g}"))


FORMATS = {"tokens": tokens_text, "at tokens": tokens_text, "time": clock, "difference": "{:+.4f}".format,
           **dict.fromkeys(("final val loss", "lowest", "val loss", "the other's"), "{:.4f}".format)}


def tokens_to_reach(target: float, points: list[tuple]) -> float | None:
    """After how many tokens the loss was first at `target`, linear between validations. None: never."""
    points = finite(points)
    for (before, _, higher), (tokens, _, loss) in zip(points[:1] + points, points, strict=False):
        if loss <= target:
            return np.interp(target, (loss, higher), (tokens, before)).item()


def curve_row(curve: Curve) -> dict:
    lowest = min((loss for *_, loss in finite(curve.points)), default=math.nan)
    trained = {"steps": curve.last["step"], "time": curve.last["seconds"]} if curve.is_run else {}
    return {"run": curve.name, "tokens": curve.last["tokens"], **trained,
            "final val loss": curve.points[-1][2], "lowest": lowest}


def pair_row(curve: Curve, other: Curve) -> dict:
    """How a curve stands to another: at its newest validation that the other reaches, the difference of their
    losses; and after how many tokens the other had its final loss. Linear between validations."""
    row = {"run": curve.name, "against": other.name}
    own, _, final = curve.points[-1]
    theirs = finite(other.points) or [(math.inf, 0.0, math.inf)]
    for tokens, _, loss in [at for at in finite(curve.points) if theirs[0][0] <= at[0] <= theirs[-1][0]][-1:]:
        there = np.interp(tokens, *np.array(theirs)[:, [0, 2]].T).item()
        row |= {"at tokens": tokens, "val loss": loss, "the other's": there, "difference": loss - there}
    reached = tokens_to_reach(final, other.points)
    share = f" ({reached / own:.0%})" if reached is not None and own else ""
    return row | {"reached after": tokens_text(reached) + share}


def label_of(curve: Curve) -> str:
    # A name must not be read as TeX, nor hide its curve by a leading underscore.
    return " " + curve.name.replace("$", r"\$")


def time_unit(curves: list[Curve]) -> tuple[str, int]:
    """The unit in which the longest run is read best, and its seconds."""
    longest = max(curve.last["seconds"] or 0 for curve in curves)
    if longest >= 2 * 3600:
        return "hours", 3600
    return "minutes", 60


def plot_runs(path: str, curves: list[Curve], bytes_per_token: float = 0) -> None:
    """Two panels: validation loss against tokens, and against the time of training. With the bytes of text
    per token, one panel: bits per byte against bytes of text, which compares tokenizers, too.

    A dashed line is the final loss of the first curve: where another curve meets it, one can read how many
    tokens and how much time that one needed.
    """
    unit, length = time_unit(curves)
    x_labels = ["tokens of training", f"{unit} of training"]
    y_label = "validation loss, nats per token"
    if bytes_per_token:
        x_labels = ["bytes of text"]
        y_label = "bits per byte of validation text"

    figure = new_figure(figsize=(1 + 5.5 * len(x_labels), 4.5))
    panels = figure.subplots(1, len(x_labels), sharey=True, squeeze=False)[0]
    highest, lowest = -math.inf, math.inf           # what the panels show of the losses
    for curve in curves:
        tokens, seconds, loss = np.reshape(finite(curve.points), (-1, 3)).T
        if bytes_per_token:
            tokens = tokens * bytes_per_token
            loss = loss / math.log(2) / bytes_per_token

        name = label_of(curve)
        for panel, xs in zip(panels, (tokens, seconds / length), strict=False):
            panel.plot(xs, loss, marker="o", markersize=3, label=name)
            if curve is curves[0] and len(loss):
                panel.axhline(loss[-1], color="grey", linestyle="--", linewidth=0.8, zorder=0,
                              label=f"{name} at its end: {loss[-1]:.2f}")

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


def compare_table(args, base) -> list[dict]:
    if not args.paths:
        raise UserError("bench.py compare needs --out folders of runs: name them, as in `python bench.py "
                        "compare log/a log/b`")
    curves = [read_curve(run) for run in dict.fromkeys(args.paths)]
    rows, pairs = [curve_row(curve) for curve in curves], [
        pair_row(curve, other) for curve in curves for other in curves
        if curve is not other and (curve.is_run or other.is_run)]
    print_table(rows, FORMATS)
    if pairs:
        print("each pair at the newest validation that both reached; 'reached after' is when the other run "
              "had this run's final val loss")
        print_table(pairs, FORMATS)
    if args.plot:
        plot_runs(args.plot, curves)
    return rows + pairs
