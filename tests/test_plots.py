"""OUT/loss.png: what is drawn in it, when, and that no run ends by it. The layout was looked at."""
import math
import sys
import time
import types

import matplotlib.figure
import numpy as np
import pytest
from helpers import ENV, logged, run, train

from runtime import plots
from runtime.console import Record
from runtime.plots import plot_run
from runtime.shards import write_shard


def rows(**columns):
    """Rows of a metrics.csv: a column's numbers at steps of 100 tokens."""
    steps = range(max(map(len, columns.values()), default=0))
    return [dict(tokens=100 * step) | {kind: dict(enumerate(columns.get(kind, ()))).get(step)
                                       for kind in ("train", "val", "hella")} for step in steps]


@pytest.fixture
def figures(monkeypatch):
    """All that are saved from now on."""
    figures, savefig = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda figure, file, **how: figures.append(figure) or savefig(figure, file, **how))
    return figures


def points(figure):
    """{a curve's label: [(tokens, value)]}."""
    return {line.get_label(): [tuple(point) for point in line.get_xydata().tolist()]
            for panel in figure.axes for line in panel.lines}


def test_losses_and_hellaswag_are_drawn_against_tokens(tmp_path, figures):
    plot_run(rows(train=[10.8, 9, 8, math.nan], val=[10.9, None, 7], hella=[0.25, None, None, 0.26]),
             tmp_path / "loss.png", "a title")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    losses, hella = figures[0].axes
    assert [line.get_xydata().tolist() for panel in (losses, hella) for line in panel.lines] == [
        [[0, 10.8], [100, 9], [200, 8]], [[0, 10.9], [200, 7]], [[0, 0.25], [300, 0.26]]]
    assert [line.get_label() for line in losses.lines] == ["training loss", "validation loss"]
    assert "loss" in losses.get_ylabel() and "acc_norm" in hella.get_ylabel()
    assert [losses.xaxis.get_major_formatter()(n) for n in (0, 999, 1000, 250e3, 1.2e6, 1e9, 10e9)] == [
        "0", "999", "1k", "250k", "1.2M", "1B", "10B"]
    assert figures[0].get_suptitle() == "a title"
    assert all((panel.get_xlim()[0], panel.get_xlabel()) == (0, "tokens") for panel in (losses, hella))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("columns", [{}, dict(val=[5.0]), dict(hella=[0.0], val=[math.inf]),
                                     dict(val=[math.nan])], ids=str)
def test_a_record_with_hardly_anything_in_it_is_drawn_or_left(columns, tmp_path):
    plot_run(rows(**columns), tmp_path / "loss.png", "")
    assert (tmp_path / "loss.png").exists() == any(map(math.isfinite, sum(columns.values(), [])))


def test_a_picture_is_drawn_at_most_once_a_minute_and_at_the_end(tmp_path, monkeypatch):
    drawn, now, record = [], [1000.0], Record(tmp_path, 0, (100).__mul__)
    monkeypatch.setattr(plots, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(plots, "plot_run", lambda rows, path, title: drawn.append((now[0], path)))
    for now[0] in (1000.0, 1030.0, 1059.0, 1061.0, 1100.0):
        plots.draw(record, "", last=now[0] == 1100)
    assert drawn == [(at, tmp_path / "loss.png") for at in (1000.0, 1061.0, 1100.0)]


@pytest.fixture
def flags(tmp_path):
    for kind in ("train", "val"):
        write_shard(tmp_path / f"text_{kind}_000000.npy", np.arange(999, dtype=np.uint16) % 64)
    return ["--data", tmp_path, "--out", tmp_path / "log", "--n_layer", 1, "--n_head", 1, "--n_embd", 16,
            "--block_size", 16, "--vocab_size", 64, "--val_tokens", 64, "--total_batch_size", 64,
            "--max_steps", 2, "--val_every", 1, "--hellaswag_every", 0, "--sample_every", 0,
            "--checkpoint_every", 0, "--device", "cpu", "--dtype", "float32"]


def test_the_picture_has_the_whole_run_at_its_end_and_after_a_resume(flags, figures, tmp_path, monkeypatch):
    """It is drawn at the first evaluation, too, which has nothing of the training yet."""
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)              # no minute is over
    train(*flags, "--max_steps", 3, "--val_every", 2, "--checkpoint_every", 2)
    train(*flags, "--max_steps", 5, "--val_every", 2)
    assert len(figures) == 4, "at steps 0 and 3, and 4 and 5 of the resumed run"
    for figure, steps in ((figures[1], 3), (figures[3], 5)):
        found, losses = points(figure), [logged(tmp_path / "log", kind) for kind in ("train", "val")]
        assert found["training loss"] == [(64 * step, losses[0][step]) for step in range(steps)]
        assert found["validation loss"][-2:] == [(64 * step, losses[1][step]) for step in (steps - 1, steps)]
    train(*flags, "--resume", "never", "--val_every", 0)
    assert len(figures) == 4, "of a run without evaluations there is no picture"


def test_rank_0_draws_the_picture_and_needs_no_home_for_it(flags, tmp_path):
    """A file: not even root can make a folder in it."""
    (tmp_path / "home").touch()
    env = {k: v for k, v in ENV.items() if k not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    done = run(*flags, processes=2, env=env | {"DRAW": "1", "HOME": str(tmp_path / "home")})
    assert (tmp_path / "log/loss.png").read_bytes()[:4] == b"\x89PNG" and not done.stderr


def test_where_matplotlib_fails_a_run_warns_and_goes_on(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    train(*flags)
    out, err = capsys.readouterr()
    assert "done: 2 steps" in out and not (tmp_path / "log/loss.png").exists()
    assert all("warning" in line and f"{tmp_path}/log/loss.png" in line for line in err.splitlines()) and err
