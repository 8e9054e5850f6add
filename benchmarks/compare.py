"""`bench.py compare`: the validation losses of several runs, against tokens and against time, beside curves
from files."""
import math

import numpy as np

from benchmarks.curves import Curve, finite, read_curve, save_curve
from benchmarks.timing import print_table
from runtime.cli import UserError
from runtime.console import clock
from runtime.files import replace_file
from runtime.plots import new_figure, short_count


def loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"              # JSON has no nan


def tokens_text(n: float | None) -> str:
    """'1.23M': three digits."""
    return "-" if n is None else short_count(float(f"{n:.3g}"))


FORMATS = {"tokens": tokens_text, "at tokens": tokens_text, "time": clock, "difference": "{:+.4f}".format,
           **dict.fromkeys(("final val loss", "lowest", "val loss", "the other's", "seeds"), loss_text)}


def tokens_to_reach(target: float, points: list[tuple]) -> float | None:
    """After how many tokens the loss was first at `target`, linear between validations. None: never."""
    points = finite(points)
    for (before, _, higher), (tokens, _, loss) in zip(points[:1] + points, points, strict=False):
        if loss <= target:
            return np.interp(target, (loss, higher), (tokens, before)).item()


def curve_row(curve: Curve) -> dict:
    final, lowest = curve.points[-1][2], min((loss for *_, loss in finite(curve.points)), default=None)
    trained = {"steps": curve.last["step"], "time": curve.last["seconds"]} if curve.is_run else {}
    return {"run": curve.name, "tokens": curve.last["tokens"], **trained,
            "final val loss": final if math.isfinite(final) else None, "lowest": lowest}


def pair_row(curve: Curve, other: Curve) -> dict:
    """How a curve stands to another: at its newest validation that the other reaches, the difference of their
    losses; and after how many tokens the other had its final loss. Linear between validations."""
    row = {"run": curve.name, "against": other.name}
    own, _, final = curve.points[-1]
    theirs = finite(other.points) or [(math.inf, 0.0, math.inf)]
    for tokens, _, loss in [at for at in finite(curve.points) if theirs[0][0] <= at[0] <= theirs[-1][0]][-1:]:
        there = np.interp(tokens, *np.array(theirs)[:, [0, 2]].T).item()
        row |= {"at tokens": tokens, "val loss": loss, "the other's": there, "difference": loss - there}
        if other.spreads:
            row["seeds"] = np.interp(tokens, [at for at, *_ in theirs], other.spreads).item()
    reached = tokens_to_reach(final, other.points)
    share = f" ({reached / own:.0%})" if reached is not None and own else ""
    return row | {"reached after": tokens_text(reached) + share}


def plot_runs(path: str, curves: list[Curve]) -> None:
    """Two panels: validation loss against tokens, and against the time of training."""
    longest = max(curve.last["seconds"] or 0 for curve in curves)
    unit, length = ("hours", 3600) if longest >= 2 * 3600 else ("minutes", 60)
    figure, shown = new_figure(figsize=(12, 4.5)), []
    panels = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        tokens, seconds, loss = np.reshape(finite(curve.points), (-1, 3)).T
        for panel, xs in zip(panels, (tokens, seconds / length), strict=True):
            panel.plot(xs, loss, marker="o", markersize=3, label=curve.name)
        if len(loss):   # a run's first tenth is cut off: its fall would hide how the runs differ later
            shown += [np.interp(0.1 * tokens[-1], tokens, loss), loss.min()]
    for panel, label in zip(panels, ("tokens", f"{unit} of training"), strict=True):
        panel.set(xlabel=label, xlim=(0, None))
        if shown:
            panel.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss, nats a token")
    panels[0].xaxis.set_major_formatter(short_count)
    panels[0].legend(fontsize=8)
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=130))
    print(f"saved {path}")


def compare_table(args, base) -> list[dict]:
    if not args.paths:
        raise UserError("bench.py compare needs the --out folders of runs: python bench.py compare log ...")
    curves = [read_curve(run) for run in dict.fromkeys(args.paths)]
    if args.curve:
        save_curve(args.curve, curves)
    rows, pairs = [curve_row(curve) for curve in curves], [
        pair_row(curve, other) for curve in curves for other in curves
        if curve is not other and (curve.is_run or other.is_run)]
    print_table(rows, FORMATS)
    if pairs:
        print("at the newest validation that both reach; reached after: the final val loss, by the other")
        print_table(pairs, FORMATS)
    if args.plot:
        plot_runs(args.plot, curves)
    return rows + pairs
