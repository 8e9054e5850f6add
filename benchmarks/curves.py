"""Losses against tokens, for bench.py compare: of a run, and of a .csv file."""
import csv
import math
import re
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
    spreads: list[float] | None = None              # of a file: at each point, how much its runs differ

    @property
    def is_run(self) -> bool:
        return self.last["step"] is not None


def finite(points: list[tuple]) -> list[tuple]:
    return [point for point in points if math.isfinite(point[2])]


def read_curve(source: str) -> Curve:
    """A run's --out folder, or a .csv file -> Curve. UserError if the one has no validation yet, or the other
    is no curve."""
    if source.lower().endswith(".csv") and not Path(source).is_dir():
        with readable(source, "give a .csv with the columns tokens,loss, or the --out folder of a run",
                      (OSError, ValueError, csv.Error)):
            return parse_csv(source, read_text(source))
    path = Path(source) / "metrics.csv"
    if not path.exists():
        raise UserError(f"{path} is not there: give the --out folder of a run; every run writes one from its "
                        "first step on")
    rows = read_metrics(path, "give the --out folder of a run")
    points = [(row["tokens"], row["seconds"], row["val"]) for row in rows if row["val"] is not None]
    if not points:
        raise UserError(f"{path} has no validation loss yet: wait for the first, or train with --val_every")
    return Curve(source, rows[-1], points)


def parse_csv(name: str, text: str) -> Curve:
    """Rows of tokens,loss with growing tokens. A header may name the two, in any place among other columns;
    one named `spread` is Curve.spreads. A line that begins with # is a comment. ValueError for others."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    columns, first = ["tokens", "loss"], next(csv.reader(lines[:1]), [])
    if first and not re.match(r"\s*[-+.\d]", first[0]):
        columns, lines = [cell.strip().lower() for cell in first], lines[1:]
        if not {"tokens", "loss"} <= set(columns):
            raise ValueError("its header does not name tokens and loss")
    rows = []
    for number, cells in enumerate(csv.reader(lines), 1):
        cells = dict(zip(columns, cells, strict=False))
        try:
            tokens, loss, spread = (float(cells.get(name, "0" if name == "spread" else ""))
                                    for name in ("tokens", "loss", "spread"))
        except ValueError:
            raise ValueError(f"its row {number} does not hold tokens and a loss") from None
        if not (0 <= tokens < 1e18 and 0 < loss < 1e4 and 0 <= spread < 1e4):
            raise ValueError(f"its row {number} holds {tokens:g} tokens and a loss of {loss:g}")
        if rows and tokens <= rows[-1][0]:
            raise ValueError(f"its row {number} has no more tokens than the one before")
        rows.append((int(tokens), loss, spread))
    if not rows:
        raise ValueError("it holds no loss")
    return Curve(name, {"step": None, "tokens": rows[-1][0], "seconds": None},
                 [(tokens, math.nan, loss) for tokens, loss, _ in rows],
                 [spread for *_, spread in rows] if "spread" in columns else None)


def save_curve(path: str, curves: list[Curve]) -> None:
    """Writes what parse_csv reads: the mean validation loss of runs that differ by their seed, the largest
    difference between them."""
    losses = [{tokens: loss for tokens, _, loss in finite(curve.points)} for curve in curves]
    shared = sorted(set.intersection(*map(set, losses)))
    if not shared or not all(curve.is_run for curve in curves):
        raise UserError(f"--curve {path}: give runs of one command that differ by their --seed alone")
    lines = [f"# mean validation loss of {len(curves)} runs, and the largest difference between them",
             "tokens,loss,spread"]
    for tokens in shared:
        found = [run[tokens] for run in losses]
        lines.append(f"{tokens},{sum(found) / len(found):.4f},{max(found) - min(found):.4f}")
    replace_file(path, lambda file: file.write("".join(f"{line}\n" for line in lines).encode()))
