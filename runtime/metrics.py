"""OUT/metrics.csv: one row for each step, with what it measured."""
import math
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path

from runtime.files import reading

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
    "val_tokens": "d",          # that `val` was measured on
}
HEADER = ",".join(FORMATS)
REMEDY = "remove the file, or choose another --out"


class Metrics(Sequence):
    """The rows of a metrics.csv in memory: 8 bytes for a cell, nan where it is empty.

    As a sequence its items are {column: number, or None where the cell is empty}.
    """

    def __init__(self):
        self.columns = {name: array("d") for name in FORMATS}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row = {}
        for name, form in FORMATS.items():
            value = self.columns[name][i]
            if math.isnan(value):
                value = None
            elif form == "d":
                value = int(value)
            row[name] = value
        return row

    def add_row(self) -> None:
        """Appends a row of empty cells."""
        for values in self.columns.values():
            values.append(math.nan)

    def set(self, name: str, value: float) -> None:
        """Sets a cell of the last row."""
        self.columns[name][-1] = value

    def add_line(self, line: str) -> None:
        """Appends a row as the file has it. ValueError if it is none."""
        cells = line.split(",")
        if len(cells) != len(FORMATS):
            raise ValueError(f"the row of step {cells[0][:20]} has {len(cells)} cells, expected "
                             f"{len(FORMATS)}")

        step, tokens, seconds, *measured = cells
        numbers = [int(step), int(tokens), float(seconds)]
        numbers += [float(cell) if cell else math.nan for cell in measured]
        for values, number in zip(self.columns.values(), numbers, strict=True):
            values.append(number)

    def measured(self, column: str, over: str = "tokens") -> list[tuple[float, float]]:
        """[(`over`, value)] of a column where it has a finite number, in the order of the steps.

        Validation losses can be compared if they were measured on the same tokens: of them only
        those on as many as the last one. --val_tokens can change when a run resumes.
        """
        rows = [i for i, value in enumerate(self.columns[column]) if math.isfinite(value)]
        if column == "val":
            val_tokens = self.columns["val_tokens"]
            rows = [i for i in rows if val_tokens[i] == val_tokens[rows[-1]]]
        return [(self.columns[over][i], self.columns[column][i]) for i in rows]

    def lowest(self, steps: Collection[int] | None = None) -> tuple[float, int] | None:
        """(validation loss, step) of the lowest loss, the earliest of equal ones; None without one.

        With `steps`, only the rows of these steps count.
        """
        losses = []
        for step, loss in self.measured("val", over="step"):
            if steps is None or step in steps:
                losses.append((loss, int(step)))
        return min(losses, default=None)


def line_of(cells: dict[str, str]) -> str:
    """The line of a row with these cells, {column: text}; the others are empty."""
    return ",".join(cells.get(name, "") for name in FORMATS)


def read_lines(path: str | Path) -> dict[int, str]:
    """{step: line} of the complete rows; of two rows of a step the last one. ValueError for a file
    of another kind."""
    # UTF-8 may begin with a mark. What is no UTF-8 is no number either.
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        header = file.readline().rstrip("\r\n")
        if header != HEADER:
            raise ValueError(f"its first line: expected {HEADER}, found {header[:80]!r}")
        lines = {}
        for line in file:
            if line.endswith("\n"):                 # a crash can cut off the last one
                line = line.rstrip("\r\n")
                lines[int(line.partition(",")[0])] = line
    return lines


def read_metrics(path: str | Path, remedy: str = REMEDY) -> Metrics:
    """The complete rows of a metrics.csv. UserError with `remedy` for a file of another kind."""
    metrics = Metrics()
    with reading(path, remedy):
        for line in read_lines(path).values():
            metrics.add_line(line)
    return metrics
