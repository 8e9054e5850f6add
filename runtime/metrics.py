"""OUT/metrics.csv: one row for each step, with what it measured."""
import math
from collections.abc import Collection
from pathlib import Path

from runtime.files import read_text, reading

# The columns, and how their numbers are written.
FORMATS = {
    "step": "d",
    "tokens": "d",
    "seconds": ".3f",
    "train": ".6f",
    "val": ".6f",
    "hella": ".6f",
    "lr": ".6g",
    "norm": ".4f",
    "tokens_per_second": ".6g",
}
HEADER = ",".join(FORMATS)


def read_metrics(
    path: str | Path, remedy: str = "remove the file, or choose another --out"
) -> list[dict]:
    """The complete rows of a metrics.csv, each {column: number, or None where the cell is empty}.

    UserError with `remedy` for a file of another kind.
    """
    with reading(path, remedy):
        complete, _, _ = read_text(path).rpartition("\n")       # a crash can cut off the last line
        header, *lines = complete.splitlines() or [""]
        if header != HEADER:
            raise ValueError(f"its first line: expected {HEADER}, found {header[:80]!r}")
        return [read_row(line) for line in lines]


def read_row(line: str) -> dict:
    row = {}
    for (name, form), cell in zip(FORMATS.items(), line.split(","), strict=True):
        if cell == "" and name not in ("step", "tokens", "seconds"):
            row[name] = None
        elif form == "d":
            row[name] = int(cell)
        else:
            row[name] = float(cell)
    return row


def as_written(name: str, value: float) -> float:
    """The value of a cell as it will be read again."""
    return float(format(value, FORMATS[name]))


def row_line(row: dict) -> str:
    cells = []
    for name, form in FORMATS.items():
        cell = ""
        if row[name] is not None:
            cell = format(row[name], form)
        cells.append(cell)
    return ",".join(cells)


def lowest(rows: list[dict], steps: Collection[int] | None = None) -> tuple[float, int] | None:
    """(validation loss, step) of the lowest loss, the earliest of equal ones; None without one.

    With `steps`, only the rows of these steps count.
    """
    losses = []
    for row in rows:
        if row["val"] is None or not math.isfinite(row["val"]):
            continue
        if steps is None or row["step"] in steps:
            losses.append((row["val"], row["step"]))
    return min(losses, default=None)
