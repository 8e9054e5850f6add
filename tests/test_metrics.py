"""runtime/metrics.py: the rows of metrics.csv, written and read, and the lowest loss in them."""
import math

import pytest

from runtime.cli import UserError
from runtime.metrics import FORMATS, HEADER, lowest, read_metrics, row_line

EMPTY = dict.fromkeys(FORMATS)
ROW = {
    "step": 1,
    "tokens": 100,
    "seconds": 2.0,
    "train": 3.6666666,
    "val": 5.0,
    "hella": 0.25,
    "lr": 0.1 / 3,
    "norm": 1.5,
    "tokens_per_second": 123456789.0,
}


def test_the_columns_are_those_of_the_contract():
    assert HEADER == "step,tokens,seconds,train,val,hella,lr,norm,tokens_per_second"


@pytest.mark.parametrize("row, line", [
    (ROW, "1,100,2.000,3.666667,5.000000,0.250000,0.0333333,1.5000,1.23457e+08"),
    (EMPTY | {"step": 2, "tokens": 200, "seconds": 4}, "2,200,4.000,,,,,,"),
    (EMPTY | {"step": 3, "tokens": 300, "seconds": 6, "val": math.nan}, "3,300,6.000,,nan,,,,"),
    (EMPTY | {"step": 4, "tokens": 10**13, "seconds": 8, "train": 0.0},
     "4,10000000000000,8.000,0.000000,,,,,"),
])
def test_a_row_has_the_digits_that_a_reader_needs_and_empty_cells(row, line):
    assert row_line(row) == line


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "metrics.csv"
    second = EMPTY | {"step": 2, "tokens": 200, "seconds": 4.5, "val": 4.25}
    path.write_text(f"{HEADER}\n{row_line(ROW)}\n{row_line(second)}\n")

    rows = read_metrics(path)

    rounded = {"train": 3.666667, "lr": 0.0333333, "tokens_per_second": 1.23457e8}
    assert rows == [ROW | rounded, second]
    assert type(rows[0]["step"]) is type(rows[0]["tokens"]) is int


@pytest.mark.parametrize("cut", ["2,200", "2,200,4.000,,,,,,", "2"])
def test_a_line_that_a_crash_has_cut_off_is_left_out(cut, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEADER}\n{row_line(ROW)}\n{cut}")
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_record_that_has_only_begun_has_no_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{HEADER}\n")
    assert read_metrics(path) == []


@pytest.mark.parametrize("text", [
    "",
    "a note\n",
    "step,loss\n1,2\n",
    f"{HEADER}\na note\n",
    f"{HEADER}\n1,2,3,4\n",
    f"{HEADER}\n0,0,0,4.0,,,0.1,1.0,50,6\n",
    f"{HEADER}\n,0,0,4.0,,,0.1,1.0,50\n",
    f"{HEADER}\n1.5,0,0,4.0,,,0.1,1.0,50\n",
    f"{HEADER}\n{'9' * 5000},0,0,4.0,,,0.1,1.0,50\n",
    "\0\xff\n",
], ids=[
    "empty", "a note", "other header", "no number", "short", "long", "no step", "not an integer",
    "too many digits", "binary",
])
def test_a_damaged_or_foreign_file_is_a_mistake_that_names_it_and_the_remedy(text, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="do this") as error:
        read_metrics(path, "do this")

    assert str(path) in str(error.value)


def test_what_the_system_says_of_a_file_stays(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "metrics.csv")


# ----------------------------------------------------------------------- the lowest loss

def rows_with_losses(losses):
    return [EMPTY | {"step": step, "val": loss} for step, loss in enumerate(losses)]


@pytest.mark.parametrize("losses, steps, expected", [
    ([], None, None),
    ([None], None, None),
    ([5.0, 4.0, 3.0], None, (3.0, 2)),
    ([5.0, 4.0, None, 4.0, 4.5], None, (4.0, 1)),           # the earliest of equal ones
    ([5.0, math.nan, -math.inf, math.inf], None, (5.0, 0)),
    ([math.nan], None, None),
    ([5.0, 4.0, math.nan, 4.0, 4.5], [2, 3, 4], (4.0, 3)),
    ([5.0, 4.0, 4.5], {0: "a path", 2: "a path"}, (4.5, 2)),
    ([5.0, 4.0], [], None),
    ([5.0, None], [1, 9], None),
])
def test_the_lowest_loss_is_finite_and_of_one_of_the_steps(losses, steps, expected):
    assert lowest(rows_with_losses(losses), steps) == expected
