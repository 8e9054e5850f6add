"""OUT/metrics.csv: one row for each step, with what it measured."""
import itertools
import math
import os
from array import array
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from runtime.files import is_there, naming, reading, replace_file, sync

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
REMEDY = "rename the file, or choose another --out"


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
            raise ValueError(f"its first line is another version's: expected {HEADER}, found "
                             f"{header[:80]!r}")
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


class MetricsFile(Metrics):
    """The metrics.csv that a run writes: its rows are in memory, too."""

    def __init__(self, path: Path, tokens_before: Callable[[int], int]):
        super().__init__()
        self.path = path
        self.tokens_before = tokens_before      # step -> the tokens of all steps before it
        self.file = None                # the file, where it is open for writing
        self.row = None                 # {column: text} of the last row, until it is in the file

    def continue_at(self, step: int) -> None:
        """Makes the file anew, with the rows that it has up to `step`. UserError if it is damaged.

        Of a row of `step` itself the evaluations stay: the step will be trained again.
        """
        lines = {}
        if step > 0 and is_there(self.path):
            with reading(self.path, REMEDY):
                lines = {s: line for s, line in read_lines(self.path).items() if s <= step}
                for line in lines.values():
                    self.add_line(line)

        if step in lines:
            for name in ("train", "lr", "norm", "tokens_per_second"):
                self.set(name, math.nan)
            lines[step] = line_of(self.last_row())
        text = "".join(f"{line}\n" for line in itertools.chain([HEADER], lines.values()))
        replace_file(self.path, lambda file: file.write(text.encode()))

    @property
    def seconds(self) -> float:
        """The time of all steps so far."""
        # The `seconds` of a row do not include its own step. If that was trained, its time is added
        # here: its tokens divided by its rate.
        if not self:
            return 0.0
        last = self[-1]
        rate = last["tokens_per_second"]
        if rate is None:
            return last["seconds"]
        tokens = self.tokens_before(last["step"] + 1) - self.tokens_before(last["step"])
        return last["seconds"] + tokens / rate

    def add(self, step: int, **cells: float) -> None:
        """Records cells of the row of `step`: those of its evaluations, then those of its training.

        The row is written when it has them all, so that a kill leaves no half of one; or before, if
        a checkpoint of the step is saved.
        """
        if self.has_row(step) and self.row is None:
            self.reopen_row()
        if not self.has_row(step):
            self.end_row()
            cells = dict(step=step, tokens=self.tokens_before(step), seconds=self.seconds) | cells
            self.add_row()
            self.row = {}
        for name, value in cells.items():
            self.row[name] = format(value, FORMATS[name])
            self.set(name, float(self.row[name]))
        if "train" in cells:
            self.end_row()

    def was_evaluated(self, step: int) -> bool:
        """Whether the last row is that of this step, and has its evaluations."""
        if not self.has_row(step):
            return False
        return self[-1]["val"] is not None or self[-1]["hella"] is not None

    def has_row(self, step: int) -> bool:
        """Whether the last row is that of this step."""
        return len(self) > 0 and self[-1]["step"] == step

    def is_lowest(self, step: int) -> bool:
        """Whether the validation loss of this step is the lowest of the run so far."""
        best = self.lowest()
        return best is not None and best[1] == step

    def end_row(self) -> None:
        """Writes the last row, if it is not in the file yet."""
        if self.row is None:
            return
        with naming(self.path):
            if self.file is None:
                # Not "a", which would begin a new file where the disk with this one is away.
                self.file = open(self.path, "r+", newline="\n")
                self.file.seek(0, os.SEEK_END)
            print(line_of(self.row), file=self.file, flush=True)
        self.row = None

    def last_row(self) -> dict[str, str]:
        """{column: text} of the cells of the last row that are not empty."""
        cells = self[-1].items()
        return {name: format(value, FORMATS[name]) for name, value in cells if value is not None}

    def reopen_row(self) -> None:
        """Takes the last row out of the file again, for what else its step measures."""
        # Not by a truncate, which not all file systems have: s3fs would keep both rows.
        self.close()
        self.row = self.last_row()
        with naming(self.path):
            text = self.path.read_bytes()
        end_of_others = text[:-1].rfind(b"\n") + 1
        replace_file(self.path, lambda file: file.write(text[:end_of_others]))

    def close(self) -> None:
        """Puts the file onto the disk. What mounts a bucket uploads a file when it is closed."""
        file, self.file = self.file, None
        if file:
            with naming(self.path), file:
                sync(file.fileno())
