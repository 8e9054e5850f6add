"""`bench.py compare`: the validation losses of several runs, against tokens and against time."""
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.timing import print_table
from runtime.cli import UserError
from runtime.files import readable
from runtime.log import read_metrics
from runtime.plots import limits, new_figure, save_figure, short_count
from runtime.progress import duration


@dataclass
class Curve:
    """A run's validations, and how far it has trained."""
    name: str
    steps: int
    tokens: int
    seconds: float
    points: list[tuple[int, float, float]]          # (tokens, seconds, validation loss)


def finite(points: list[tuple]) -> list[tuple]:
    return [point for point in points if math.isfinite(point[2])]


def read_curve(run: str) -> Curve:
    """A run's --out folder -> Curve. UserError if it has no metrics.csv or no validation in it."""
    path = Path(run) / "metrics.csv"
    if not path.exists():
        raise UserError(f"{path} is not there: give the --out folder of a run; every run writes one from its "
                        "first step on")
    with readable(path, "give the --out folder of a run", (OSError, ValueError)):
        rows = read_metrics(path)
    points = [(row["tokens"], row["seconds"], row["val"]) for row in rows if row["val"] is not None]
    if not points:
        raise UserError(f"{path} has no validation loss yet: wait for the first, or train with --val_every")
    return Curve(run, rows[-1]["step"], rows[-1]["tokens"], rows[-1]["seconds"], points)


def tokens_to_reach(target: float, points: list[tuple]) -> float | None:
    """After how many tokens the validation loss was first at `target`, linear between validations. None if
    it never was."""
    before = higher = None
    for tokens, _, loss in finite(points):
        if loss <= target and before is None:
            return tokens
        if loss <= target:
            return before + (tokens - before) * (higher - target) / (higher - loss)
        before, higher = tokens, loss
    return None


def compare_rows(curves: list[Curve]) -> list[dict]:
    """A row for each run; a loss that is not finite is None. `to_reach_it`: {another run: the tokens that it
    needed for this run's final validation loss, and those in percent of this run's; None if it never did}."""
    def number(loss):
        return loss if math.isfinite(loss) else None
    rows = []
    for curve in curves:
        own, _, final = curve.points[-1]
        reached = {other.name: tokens_to_reach(final, other.points) for other in curves if other is not curve}
        rows.append({"run": curve.name, "steps": curve.steps, "tokens": curve.tokens,
                     "seconds": curve.seconds, "final_val": number(final), "final_val_tokens": own,
                     "lowest_val": number(min((loss for *_, loss in finite(curve.points)), default=math.nan)),
                     "to_reach_it": {name: None if tokens is None else
                                     {"tokens": round(tokens), "percent": 100 * tokens / own if own else None}
                                     for name, tokens in reached.items()}})
    return rows


def short_tokens(n: float) -> str:
    """'1.23M': three digits."""
    return short_count(float(f"{n:.3g}"))


def print_rows(rows: list[dict]) -> None:
    """Prints a table of the runs, and, of several, one of the tokens that they needed."""
    def loss_cell(loss):
        return "not finite" if loss is None else f"{loss:.4f}"

    def reached_cell(row, name):
        if name == row["run"]:
            return ""
        if (reached := row["to_reach_it"][name]) is None:
            return "-"
        share = "" if reached["percent"] is None else f" ({reached['percent']:.0f}%)"
        return short_tokens(reached["tokens"]) + share

    print_table([{"run": row["run"], "steps": f"{row['steps']:,}", "tokens": short_tokens(row["tokens"]),
                  "time": duration(row["seconds"]), "final val loss": loss_cell(row["final_val"]),
                  "lowest": loss_cell(row["lowest_val"])} for row in rows])
    if len(rows) > 1:
        print("tokens that the others needed to reach a run's final validation loss, in percent of its own:")
        print_table([{"to reach": row["run"], "val loss": loss_cell(row["final_val"]),
                      "own tokens": short_tokens(row["final_val_tokens"])}
                     | {other["run"]: reached_cell(row, other["run"]) for other in rows} for row in rows])


def plot_runs(path: str, curves: list[Curve]) -> None:
    """Two panels: validation loss against tokens, and against the time of training."""
    figure = new_figure(figsize=(12, 4.5))
    panels = figure.subplots(1, 2, sharey=True)
    unit, length = ("hours", 3600) if max(curve.seconds for curve in curves) >= 2 * 3600 else ("minutes", 60)
    losses = []
    for curve in curves:
        tokens, seconds, loss = np.array(finite(curve.points)).reshape(-1, 3).T
        panels[0].plot(tokens, loss, marker="o", markersize=3, label=curve.name)
        panels[1].plot(seconds / length, loss, marker="o", markersize=3)
        if len(loss):   # a run's first tenth is cut off: its fall would hide how the runs differ later
            losses += [np.interp(0.1 * tokens[-1], tokens, loss), loss.min()]
    for panel, label in zip(panels, ("tokens", f"{unit} of training"), strict=True):
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    panels[0].xaxis.set_major_formatter(short_count)
    panels[0].set_ylabel("validation loss, nats a token")
    panels[0].legend(fontsize=8)
    if losses:
        panels[0].set_ylim(*limits(losses, 0.05))
    save_figure(figure, path)


def compare_table(runs: list[str], plot: str | None) -> list[dict]:
    """`bench.py compare`: prints runs, --out folders. Draws them if `plot` is given. Returns the rows."""
    if not runs:
        raise UserError("bench.py compare needs the --out folders of runs: python bench.py compare log ...")
    curves = [read_curve(run) for run in dict.fromkeys(runs)]
    rows = compare_rows(curves)
    print_rows(rows)
    if plot:
        plot_runs(plot, curves)
        print(f"saved {plot}")
    return rows
