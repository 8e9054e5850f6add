"""runtime/metrics.py: the rows of metrics.csv, written and read, and the lowest loss in them."""
import math
import tracemalloc

import pytest

from config import Config
from runtime.checkpoint import Start
from runtime.cli import UserError
from runtime.console import StepLog
from runtime.metrics import FORMATS, HEADER, Metrics, read_metrics
from runtime.output import Output
from runtime.ranks import Process
from runtime.recipe import BatchSchedule

LINE = "1,100,2.000,3.666667,5.000000,0.250000,0.0333333,1.5000,1.23457e+08,640"
ROW = {
    "step": 1,
    "tokens": 100,
    "seconds": 2.0,
    "train": 3.666667,
    "val": 5.0,
    "hella": 0.25,
    "lr": 0.0333333,
    "norm": 1.5,
    "tokens_per_second": 1.23457e8,
    "val_tokens": 640,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def steps_in(metrics):
    return [row["step"] for row in metrics]


def test_the_columns_are_those_of_the_contract():
    assert HEADER == (
        "step,tokens,seconds,train,val,hella,lr,norm,tokens_per_second,val_tokens")


def test_the_rows_of_a_file_are_numbers_and_none_where_a_cell_is_empty(path):
    path.write_text(f"{HEADER}\n{LINE}\n2,10000000000000,4.500,0.000000,,,,nan,,\n")

    metrics = read_metrics(path)

    empty = dict.fromkeys(FORMATS)
    assert list(metrics) == [
        ROW, empty | {"step": 2, "tokens": 10**13, "seconds": 4.5, "train": 0.0}]
    assert type(metrics[0]["step"]) is type(metrics[0]["tokens"]) is int
    assert metrics[-1] == metrics[1]
    assert metrics[:1] == [ROW]


@pytest.mark.parametrize("cut", ["2,200", "2,200,4.000,,,,,,,", "2"])
def test_a_line_that_a_crash_has_cut_off_is_left_out(cut, path):
    path.write_text(f"{HEADER}\n{LINE}\n{cut}")
    assert steps_in(read_metrics(path)) == [1]


def test_a_record_that_has_only_begun_has_no_rows(path):
    path.write_text(f"{HEADER}\n")
    assert list(read_metrics(path)) == []


def test_of_two_rows_of_a_step_the_last_one_counts(path):
    """s3fs ignores a truncate behind writes that are not synced."""
    lines = ["0,0,0,5.0,,,,,,", "1,100,1,,4.5,,,,,8", "1,100,1,4.0,4.5,,,,,8", "2,200,2,3.0,,,,,,"]
    path.write_text("\n".join([HEADER, *lines, ""]))

    metrics = read_metrics(path)

    assert steps_in(metrics) == [0, 1, 2]
    assert metrics[1]["train"] == 4.0


@pytest.mark.parametrize("text", [
    "",
    "a note\n",
    "step,loss\n1,2\n",
    f"{HEADER}\na note\n",
    f"{HEADER}\n1,2,3,4\n",
    f"{HEADER}\n0,0,0,4.0,,,0.1,1.0,50,,6\n",
    f"{HEADER}\n,0,0,4.0,,,0.1,1.0,50,\n",
    f"{HEADER}\n0,0,,4.0,,,0.1,1.0,50,\n",
    f"{HEADER}\n1.5,0,0,4.0,,,0.1,1.0,50,\n",
    f"{HEADER}\n{'9' * 5000},0,0,4.0,,,0.1,1.0,50,\n",
    "\0\xff\n",
], ids=[
    "empty", "a note", "other header", "no number", "short", "long", "no step", "no seconds",
    "not an integer", "too many digits", "binary",
])
def test_a_damaged_or_foreign_file_is_a_mistake_that_names_it_and_the_remedy(text, path):
    path.write_text(text)
    with pytest.raises(UserError, match="do this") as error:
        read_metrics(path, "do this")

    assert str(path) in str(error.value)


@pytest.mark.parametrize("line, number", [("7,2,3,4", 4), ("7,0,0,4.0,,,0.1,1.0,50,,6", 11)])
def test_a_row_with_another_number_of_cells_is_told_as_that(line, number, path):
    path.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(UserError, match=f"step 7 has {number} cells"):
        read_metrics(path)


def test_what_the_system_says_of_a_file_stays(path):
    with pytest.raises(FileNotFoundError):
        read_metrics(path)


def test_a_step_takes_about_100_bytes_of_memory(tmp_path):
    """With what the console remembers of it."""
    output = Output(Config(out=str(tmp_path)), Process(), BatchSchedule(256, 10_000))
    log = StepLog(Process(1, 1, 2), BatchSchedule(256, 10_000), 1000)
    cells = {"train": 4.0, "norm": 1.0, "lr": 1e-3, "tokens_per_second": 1e6}
    output.open(Start())
    with output:
        output.add(0, **cells)
        log.step(0, 4.0, 1.0, 1e-3, 0.25)
        tracemalloc.start()
        for step in range(1, 1001):
            output.add(step, val=5.0, val_tokens=640, **cells)
            log.step(step, 4.0, 1.0, 1e-3, 0.25)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert 50 < size / 1000 < 150


# ----------------------------------------------------------------------- the lowest loss

def metrics_with(losses, val_tokens=None):
    metrics = Metrics()
    for step, loss in enumerate(losses):
        metrics.add_row()
        metrics.set("step", step)
        metrics.set("tokens", 100 * step)
        if loss is not None:
            metrics.set("val", loss)
            metrics.set("val_tokens", (val_tokens or {}).get(step, 640))
    return metrics


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
    assert metrics_with(losses).lowest(steps) == expected


def test_losses_on_other_tokens_than_the_last_one_are_not_compared_with_it():
    metrics = metrics_with([1.0, 0.5, None, 4.0, 5.0], val_tokens={0: 8, 1: 8})

    assert metrics.lowest() == (4.0, 3)
    assert metrics.measured("val") == [(300, 4.0), (400, 5.0)]
    assert metrics.measured("val", over="step") == [(3, 4.0), (4, 5.0)]
