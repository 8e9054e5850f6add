"""Losses against tokens, for bench.py compare: of a run, and of a .csv file."""
import csv
import math
from dataclasses import dataclass
from pathlib import Path

from runtime.cli import UserError
from runtime.console import read_metrics
from runtime.files import read_text, readable, replace_file


@dataclass
class Curve:
    """A run's validations, and the last row of its metrics.csv: how far it has trained. One from a file has
    neither steps nor seconds."""
    name: str
    last: dict
    points: list[tuple[int, float, float]]          # (tokens, seconds, validation loss)
    is_run: bool = True
    spreads: list[float] | None = None              # of a file: at each point, how much its runs differ


def finite(points: list[tuple]) -> list[tuple]:
    return [point for point in points if math.isfinite(point[2])]


def read_curve(source: str) -> Curve:
    """From a run's --out folder, or a .csv file. UserError for a run without validations, or no curve."""
    if source.lower().endswith(".csv") and not Path(source).is_dir():
        with readable(source, "give a .csv with the columns tokens,loss, or the --out folder of a run",
                      (OSError, ValueError, csv.Error)):
            return parse_csv(source, read_text(source))
    path = Path(source) / "metrics.csv"
    if not path.exists():
        raise UserError(f"{path} is not there: give the --out folder of a run that has begun")
    rows = read_metrics(path, "give the --out folder of a run")
    points = [(row["tokens"], row["seconds"], row["val"]) for row in rows if row["val"] is not None]
    if not points:
        raise UserError(f"{path} has no validation loss yet: wait for the first, or train with --val_every")
    return Curve(source, rows[-1], points)


def parse_csv(name: str, text: str) -> Curve:
    """Rows of tokens,loss with growing tokens. A header may name the two, in any place among other columns;
    one named `spread` is Curve.spreads. A line that begins with # is a comment. ValueError for others."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")] or [""]
    header = ["tokens,loss" if lines[0].lstrip()[:1] in set("+-.0123456789") else lines.pop(0).lower()]
    rows = [(-1.0, 0.0, 0.0)]
    for number, row in enumerate(csv.DictReader(header + lines, skipinitialspace=True), 1):
        try:
            tokens, loss, spread = (float(({"spread": 0} | row)[key]) for key in ("tokens", "loss", "spread"))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its row {number} does not hold tokens and a loss") from None
        if not (0 <= tokens < 1e18 and 0 < loss < 1e4 and 0 <= spread < 1e4):
            raise ValueError(f"its row {number} holds {tokens:g} tokens and a loss of {loss:g}")
        if tokens <= rows[-1][0]:
            raise ValueError(f"its row {number} has no more tokens than the one before")
        rows.append((int(tokens), loss, spread))
    if not rows[1:]:
        raise ValueError("it holds no loss")
    return Curve(name, {"step": None, "tokens": rows[-1][0], "seconds": None},
                 [(tokens, math.nan, loss) for tokens, loss, _ in rows[1:]], False,
                 [spread for *_, spread in rows[1:]] if "spread" in header[0] else None)


def save_curve(path: str, curves: list[Curve]) -> None:
    """Writes what parse_csv reads: the mean validation loss of runs that differ by their seed, the largest
    difference between them."""
    runs = [{tokens: loss for tokens, _, loss in finite(curve.points)} for curve in curves]
    shared = {n: [run[n] for run in runs] for n in sorted(set.intersection(*map(set, runs)))}
    if not shared or not all(curve.is_run for curve in curves):
        raise UserError(f"--curve {path}: give runs of one command that differ by their --seed alone")
    lines = [f"# mean validation loss of {len(curves)} runs, and the largest difference between them",
             "tokens,loss,spread", *(f"{n},{sum(losses) / len(losses):.4f},{max(losses) - min(losses):.4f}"
                                     for n, losses in shared.items())]
    replace_file(path, lambda file: file.write("".join(f"{line}\n" for line in lines).encode()))
    print(f"saved {path}")
