"""runtime/plots.py: what is drawn into OUT/loss.png, when, and that no run ends by it."""
import math
import sys
from types import SimpleNamespace

import matplotlib.figure
import pytest
from helpers import BYTES, logged, train
from peers import metrics_of

from config import Config
from runtime.checkpoint import Start
from runtime.output import Output
from runtime.plots import plot_run, short_count
from runtime.ranks import Process
from runtime.recipe import BatchSchedule


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """In the tests of other files no run draws one: conftest.py."""
    monkeypatch.setattr("runtime.output.plot_run", plot_run)


def make_metrics(train=(), val=(), hella=()):
    """The metrics of a run with these numbers, at steps of 100 tokens."""
    rows = []
    for step in range(max(len(train), len(val), len(hella))):
        row = {"tokens": 100 * step, "val_tokens": 640}
        for column, numbers in (("train", train), ("val", val), ("hella", hella)):
            if step < len(numbers):
                row[column] = numbers[step]
        rows.append(row)
    return metrics_of(rows)


@pytest.fixture
def figures(monkeypatch):
    """A list of the figures that are saved from now on."""
    saved = []
    savefig = matplotlib.figure.Figure.savefig

    def noted_savefig(figure, file, **options):
        saved.append(figure)
        savefig(figure, file, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", noted_savefig)
    return saved


def points(figure):
    """{label of a curve: [[tokens, value]]}, with None where two points are not joined."""
    found = {}
    for panel in figure.axes:
        for line in panel.lines:
            xy = line.get_xydata().tolist()
            found[line.get_label()] = [None if math.isnan(y) else [x, y] for x, y in xy]
    return found


# ----------------------------------------------------------------------- what is drawn

def test_losses_and_hellaswag_are_drawn_against_tokens(tmp_path, figures):
    losses = [10.8, 9, 8, math.nan]
    metrics = make_metrics(train=losses, val=[10.9, None, 7], hella=[0.25, None, None, 0.26])

    plot_run(metrics, tmp_path / "loss.png", "a title")

    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert points(figures[0]) == {
        "training loss": [[0, 10.8], [100, 9], [200, 8]],
        "validation loss": [[0, 10.9], [200, 7]],
        "HellaSwag, acc_norm": [[0, 0.25], [300, 0.26]],
    }
    assert figures[0].get_suptitle() == "a title"


def test_losses_share_a_panel_and_both_axes_say_what_they_are(tmp_path, figures):
    plot_run(make_metrics(train=[10.8], val=[10.9], hella=[0.25]), tmp_path / "loss.png", "")

    losses, hellaswag = figures[0].axes
    assert len(losses.lines) == 2
    assert "loss" in losses.get_ylabel()
    assert "acc_norm" in hellaswag.get_ylabel()
    for panel in (losses, hellaswag):
        assert panel.get_xlabel() == "tokens"
        assert panel.get_xlim()[0] == 0
        assert panel.xaxis.get_major_formatter()(10e9) == "10B"


def test_a_long_run_has_a_running_mean_over_its_pale_single_steps(tmp_path, figures):
    losses = [4.0, 6.0, 5.0] * 25
    plot_run(make_metrics(train=losses), tmp_path / "loss.png", "")

    steps, mean = figures[0].axes[0].lines
    assert steps.get_ydata().tolist() == losses
    assert mean.get_label() == "training loss, mean of 3 steps"
    assert mean.get_ydata().tolist() == pytest.approx([5.0] * 74 + [5.5])
    assert steps.get_alpha() < 0.5 and steps.get_linewidth() < mean.get_linewidth()


def test_the_mean_is_of_the_steps_around_a_step_and_at_the_ends_of_those_that_are_there(
        tmp_path, figures):
    plot_run(make_metrics(train=[8.0] + [0.0] * 48 + [4.0]), tmp_path / "loss.png", "")
    mean = figures[0].axes[0].lines[1].get_ydata().tolist()
    assert mean == [8.0, 4.0] + [0.0] * 47 + [2.0]


def test_what_is_read_backwards_is_shaded_labelled_and_not_joined_to_the_rest(tmp_path, figures):
    """Steps of 100 tokens, of which 60 are read backwards. The loss jumps from 4 to 7 there."""
    val = [9.0] + [None] * 69 + [6.0] + [None] * 29 + [5.0]
    metrics = make_metrics(train=[4.0] * 60 + [7.0] * 60, val=val)
    plot_run(metrics, tmp_path / "loss.png", "", 6000)

    [panel] = figures[0].axes
    steps, mean, validation = panel.lines
    for line, name in ((steps, "steps"), (mean, "mean")):
        values = line.get_ydata().tolist()
        assert values[:60] == [4.0] * 60, name
        assert math.isnan(values[60]), name
        assert values[61:] == [7.0] * 60, name
    assert validation.get_xydata().tolist() == [[7000, 6.0], [10000, 5.0]]

    [shaded] = panel.patches
    assert (shaded.get_x(), shaded.get_width()) == (0, 6000)
    backwards, forwards = panel.texts
    assert "backwards" in backwards.get_text() and "forwards" in forwards.get_text()
    assert 0 < backwards.get_position()[0] < 6000 < forwards.get_position()[0]


def test_a_run_that_is_still_before_the_turn_is_drawn(tmp_path, figures):
    """It has a validation at step 0, of which nothing can be seen yet."""
    plot_run(make_metrics(val=[9.0]), tmp_path / "loss.png", "", 6000)
    assert figures == []

    plot_run(make_metrics(train=[8.0, 7.0], val=[9.0]), tmp_path / "loss.png", "", 6000)
    assert points(figures[0]) == {"training loss": [[0, 8.0], [100, 7.0]]}


def test_a_run_that_reads_forwards_has_no_shade(tmp_path, figures):
    plot_run(make_metrics(train=[8.0, 7.0]), tmp_path / "loss.png", "")
    [panel] = figures[0].axes
    assert list(panel.patches) == list(panel.texts) == []


def test_the_fall_in_the_first_twentieth_is_cut_off(tmp_path, figures):
    """And no later loss."""
    losses = [10.8, 9.5, 8.0, *[6.0] * 36, 7.0, 5.0]
    plot_run(make_metrics(train=losses, val=[10.9], hella=[0.9, 0.1]), tmp_path / "loss.png", "")
    plot_run(make_metrics(train=losses[2:]), tmp_path / "loss.png", "")
    plot_run(make_metrics(val=[10.9]), tmp_path / "loss.png", "")

    bounds = [figure.axes[0].get_ylim() for figure in figures]
    assert 8.0 < bounds[0][1] < 9.0, "the third of 41 steps is at a twentieth"
    assert 7.0 < bounds[1][1] < 8.0
    assert bounds[0][0] < 5.0
    assert bounds[2][0] < 10.9 < bounds[2][1]
    assert figures[0].axes[1].get_ylim()[1] > 0.9


def test_single_steps_that_jump_do_not_shrink_the_rest(tmp_path, figures):
    losses = [5.0] * 100
    losses[50] = 9.0
    plot_run(make_metrics(train=losses), tmp_path / "loss.png", "")
    assert 6.0 < figures[0].axes[0].get_ylim()[1] < 7.0


@pytest.mark.parametrize("n, text", [
    (0, "0"),
    (999, "999"),
    (1000, "1k"),
    (250e3, "250k"),
    (1.2e6, "1.2M"),
    (1e9, "1B"),
    (10e9, "10B"),
])
def test_tokens_are_told_in_thousands_millions_and_billions(n, text):
    assert short_count(n) == text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("columns", [{"val": [5.0]}, {"hella": [0.0], "val": [math.inf]}], ids=str)
def test_a_record_with_one_number_is_drawn(columns, tmp_path):
    plot_run(make_metrics(**columns), tmp_path / "loss.png", "")
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("columns", [{}, {"val": [math.nan]}, {"train": [None]}], ids=str)
def test_a_record_without_numbers_is_not_drawn(columns, tmp_path):
    plot_run(make_metrics(**columns), tmp_path / "loss.png", "")
    assert not (tmp_path / "loss.png").exists()


# ----------------------------------------------------------------------- when it is drawn

@pytest.fixture
def output(tmp_path):
    """An Output with one evaluation."""
    output = Output(Config(out=str(tmp_path / "log")), Process(), BatchSchedule(100, 100))
    output.open(Start())
    output.add(0, val=5.0, val_tokens=640)
    with output:
        yield output


@pytest.fixture
def now(monkeypatch):
    """A clock: `now.time` is what it shows."""
    clock = SimpleNamespace(time=1000.0)
    monkeypatch.setattr("runtime.output.time.monotonic", lambda: clock.time)
    return clock


def test_a_picture_is_drawn_at_most_once_a_minute_and_at_the_end(output, now, monkeypatch):
    def note(metrics, path, *others):
        drawn.append((now.time, path))

    drawn = []
    monkeypatch.setattr("runtime.output.plot_run", note)

    for seconds in (1000.0, 1030.0, 1059.0, 1061.0):
        now.time = seconds
        output.draw_losses(last=False)
    now.time = 1100.0
    output.draw_losses(last=True)

    path = output.out / "loss.png"
    assert drawn == [(1000.0, path), (1061.0, path), (1100.0, path)]


def test_a_picture_that_fails_is_a_warning_and_is_tried_again(output, now, monkeypatch, capsys):
    failures = []

    def fail(metrics, path, *others):
        failures.append(path)
        raise OverflowError("too many ticks")

    monkeypatch.setattr("runtime.output.plot_run", fail)
    for seconds in (1000.0, 1061.0):
        now.time = seconds
        output.draw_losses(last=False)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(failures) == 2
    for line in lines:
        assert "warning" in line
        assert f"{output.out}/loss.png" in line
        assert "too many ticks" in line


def test_without_matplotlib_it_is_one_warning_that_names_the_package(
    output, now, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output.draw_losses(last=False)
    now.time = 1061.0
    output.draw_losses(last=False)
    output.draw_losses(last=True)

    [line] = capsys.readouterr().err.splitlines()
    assert "matplotlib" in line


# ----------------------------------------------------------------------- of a run

def test_the_last_picture_has_the_whole_run_after_a_resume_too(
    byte_data, tmp_path, figures, now
):
    flags = ["--data", byte_data, *BYTES, "--n_layer", 1, "--val_every", 2, "--out", tmp_path]
    train(*flags, "--max_steps", 3, "--checkpoint_every", 2)
    train(*flags, "--max_steps", 5)

    assert len(figures) == 4, "at steps 0 and 3, and at 4 and 5 of the resumed run"
    for figure, steps in ((figures[1], 3), (figures[3], 5)):
        curves = points(figure)
        losses = logged(tmp_path)
        assert curves["training loss"] == [[256 * step, losses[step]] for step in range(steps)]
        assert curves["validation loss"][-1] == [256 * steps, logged(tmp_path, "val")[steps]]
