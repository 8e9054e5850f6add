"""`bench.py compare`: the validation losses of several runs, against tokens and against time, beside curves
from files."""
import math

import numpy as np

from benchmarks.curves import Curve, finite, read_curve, save_curve
from benchmarks.pictures import plot_losses
from benchmarks.timing import print_table
from runtime.cli import UserError
from runtime.console import clock
from runtime.plots import limits, short_count


def tokens_to_reach(target: float, points: list[tuple]) -> float | None:
    """After how many tokens the validation loss was first at `target`, linear between validations. None if
    it never was."""
    before = higher = None
    for tokens, _, loss in finite(points):
        if loss <= target:
            return tokens if before is None else np.interp(target, (loss, higher), (tokens, before)).item()
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
        rows.append({"run": curve.name, "steps": curve.last["step"], "tokens": curve.last["tokens"],
                     "seconds": curve.last["seconds"], "final_val": number(final), "final_val_tokens": own,
                     "lowest_val": number(min((loss for *_, loss in finite(curve.points)), default=math.nan)),
                     "to_reach_it": {name: None if tokens is None else
                                     {"tokens": round(tokens), "percent": 100 * tokens / own if own else None}
                                     for name, tokens in reached.items()}})
    return rows


def difference_rows(curves: list[Curve]) -> list[dict]:
    """A row for each run and each curve from a file that reaches as far as a validation of the run: how far
    the newest such one is from the curve, linear between its points."""
    rows = []
    for curve in (curve for curve in curves if not curve.is_run):
        at, _, losses = zip(*curve.points, strict=True)
        for run in (run for run in curves if run.is_run):
            within = [(tokens, loss) for tokens, _, loss in finite(run.points) if at[0] <= tokens <= at[-1]]
            if within:
                tokens, loss = within[-1]
                row = {"run": run.name, "curve": curve.name, "tokens": tokens, "val loss": loss,
                       "of the curve": np.interp(tokens, at, losses).item()}
                row["difference"] = loss - row["of the curve"]
                if curve.spreads:
                    row["its seeds"] = np.interp(tokens, at, curve.spreads).item()
                rows.append(row)
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

    print_table([{"run": row["run"], "steps": "" if row["steps"] is None else f"{row['steps']:,}",
                  "tokens": short_tokens(row["tokens"]),
                  "time": "" if row["seconds"] is None else clock(row["seconds"]),
                  "final val loss": loss_cell(row["final_val"]),
                  "lowest": loss_cell(row["lowest_val"])} for row in rows])
    if len(rows) > 1:
        print("tokens that the others needed to reach a run's final validation loss, in percent of its own:")
        print_table([{"to reach": row["run"], "val loss": loss_cell(row["final_val"]),
                      "own tokens": short_tokens(row["final_val_tokens"])}
                     | {other["run"]: reached_cell(row, other["run"]) for other in rows} for row in rows])


def plot_runs(path: str, curves: list[Curve]) -> None:
    """Two panels: validation loss against tokens, and against the time of training."""
    longest = max(curve.last["seconds"] or 0 for curve in curves)
    unit, length = ("hours", 3600) if longest >= 2 * 3600 else ("minutes", 60)
    by_tokens, by_time, shown = {}, {}, []
    for curve in curves:
        tokens, seconds, loss = np.reshape(finite(curve.points), (-1, 3)).T
        by_tokens[curve.name] = tokens, loss
        if curve.is_run:
            by_time[curve.name] = seconds / length, loss
        if len(loss):   # a run's first tenth is cut off: its fall would hide how the runs differ later
            shown += [np.interp(0.1 * tokens[-1], tokens, loss), loss.min()]
    plot_losses(path, {"tokens": by_tokens, f"{unit} of training": by_time},
                limits=limits(shown, 0.05) if shown else None)


def compare_table(args, base) -> list[dict]:
    if not args.paths:
        raise UserError("bench.py compare needs the --out folders of runs: python bench.py compare log ...")
    curves = [read_curve(run) for run in dict.fromkeys(args.paths)]
    if args.curve:
        save_curve(args.curve, curves)
    rows = compare_rows(curves)
    print_rows(rows)
    differences = difference_rows(curves)
    for row in rows:
        row["from_curves"] = [found for found in differences if found["run"] == row["run"]]
    if differences:
        print("at the run's newest validation within a curve; its seeds: how much the runs behind it differ:")
        print_table([{name: short_tokens(value) if name == "tokens" else
                      f"{value:+.4f}" if name == "difference" else
                      f"{value:.4f}" if isinstance(value, float) else value
                      for name, value in row.items()} for row in differences])
    if args.plot:
        plot_runs(args.plot, curves)
    for path in filter(None, (args.plot, args.curve)):
        print(f"saved {path}")
    return rows
