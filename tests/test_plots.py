"""The pictures: what is drawn in them, and by whom. The layout was looked at."""
import math
import os
import subprocess
import sys
import types

import matplotlib.figure
import numpy as np
import pytest
from helpers import ENV, ROOT, script

from runtime import plots
from runtime.console import Record
from runtime.plots import PUBLISHED, Drawing, plot_run
from runtime.shards import write_shard

LLM_C, OPENAI = PUBLISHED["val"][1], PUBLISHED["hella"][1]


def falling(folder, steps, first=10.8, last=3.4, every=10, hella=()):
    """The record of a run of 100 tokens a step, whose loss falls evenly."""
    folder.mkdir(exist_ok=True)
    record = Record(folder, 0, 100)
    for step in range(steps + 1):
        loss = first + (last - first) * step / steps
        if step % every == 0:
            record.evaluation(step, "val", loss)
        if step in hella:
            record.evaluation(step, "hella", hella[step])
        if step < steps:
            record.train(step, loss, 1.0, 1e-3, 0.5)
    record.close()


def drawn(folder, monkeypatch, published=("val", "hella")):
    """{label of the y axis: {label: points}} of the picture that plot_run draws."""
    figures, savefig = [], matplotlib.figure.Figure.savefig
    with monkeypatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig",
                      lambda figure, file, **how: figures.append(figure) or savefig(figure, file, **how))
        plot_run(folder, "gpt2", published)
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    return {panel.get_ylabel(): {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
            for panel in figures[0].axes}, figures[0]


def test_losses_and_hellaswag_are_drawn_against_tokens_and_step_0_has_a_place(tmp_path, monkeypatch):
    falling(tmp_path, 200, hella={0: 0.25, 200: 0.26})
    panels, figure = drawn(tmp_path, monkeypatch)
    losses, hella = panels["loss, nats a token"], panels["HellaSwag accuracy (acc_norm)"]
    assert losses["validation loss"][:2] == [[0, 10.8], [1000, pytest.approx(10.43)]]
    assert len(losses["training loss"]) == 200 and losses["training loss"][0] == [0, 10.8]
    assert hella["HellaSwag, acc_norm"] == [[0, 0.25], [20_000, 0.26]]
    for panel in figure.axes:
        assert panel.get_xlim()[0] == 0 and panel.get_xlabel() == "tokens"


@pytest.mark.parametrize(("last", "hella", "shown"), [
    (3.5, 0.29, [LLM_C, OPENAI]), (3.2, 0.3, [LLM_C, OPENAI]), (7.0, 0.251, []), (3.2, 0.251, [LLM_C])])
def test_published_results_are_shown_where_asked_for_and_near(last, hella, shown, tmp_path, monkeypatch):
    falling(tmp_path, 20, last=last, hella={0: 0.25, 20: hella})

    def lines(*published):
        panels, figure = drawn(tmp_path, monkeypatch, published)
        for panel, values in zip(figure.axes, ((10.8, last), (0.25, hella)), strict=True):
            low, high = panel.get_ylim()
            assert abs(values[0] - values[1]) > 0.6 * (high - low), "the run's own curve is not squashed"
        return [name for panel in panels.values() for name in panel if name in (LLM_C, OPENAI)]
    assert lines("val", "hella") == shown and lines() == []
    assert lines("val") == [name for name in shown if name == LLM_C]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("events", [[("val", 5.0)], [("val", 0.0)], [("hella", 0.0)],
                                    [("hella", 0.25), ("val", math.inf)]])
def test_a_record_with_hardly_anything_in_it_is_drawn(events, tmp_path, monkeypatch):
    record = Record(tmp_path, 0, 100)
    for kind, value in events:
        record.evaluation(0, kind, value)
    record.close()
    drawn(tmp_path, monkeypatch)


def config(out, data="nowhere", vocab_size=50304, hellaswag_data=""):
    return types.SimpleNamespace(out=out, data=data, vocab_size=vocab_size, hellaswag_data=hellaswag_data,
                                 recipe="gpt2", n_layer=2, n_embd=32)


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.setattr(Drawing, "process", None)


@pytest.mark.parametrize(("name", "vocab_size", "hellaswag_data", "published"), [
    ("edufineweb", 50304, "", ["val", "hella"]), ("finewebedu", 50257, "", ["val", "hella"]),
    ("fineweb", 50304, "own.jsonl", ["val"]), ("fineweb", 256, "", ["hella"]),
    ("text", 50304, "", ["hella"]), ("notfineweb", 50304, "own.jsonl", [])])
def test_fineweb_is_recognised_by_the_names_of_its_shards(name, vocab_size, hellaswag_data, published,
                                                          drawing, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **how: begun.append(argv))
    (tmp_path / f"{name}_val_000000.npy").touch()
    plots.draw(config(tmp_path / "log", tmp_path, vocab_size, hellaswag_data))
    assert begun[0][-2 - len(published):] == [tmp_path / "log", "gpt2, 2 layers of width 32", *published]


def test_a_process_of_its_own_draws_the_picture_without_torch_home_or_the_working_directory(
        drawing, tmp_path, monkeypatch, capfd):
    for path in ("here/json.py", "path/torch.py"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("raise ValueError('imported')")
    (tmp_path / "home").touch()                 # a file: not even root can make a folder in it
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path / "here")
    falling(tmp_path / "here", 20)
    plots.draw(config("."))
    if hasattr(os, "getsid"):
        assert os.getsid(Drawing.process.pid) == Drawing.process.pid, "Ctrl-C does not reach it"
    plots.finish()
    assert (tmp_path / "here/loss.png").read_bytes()[:4] == b"\x89PNG"
    assert capfd.readouterr() == ("", "")
    result = subprocess.run([sys.executable, "-P", "-c", "import runtime.plots; runtime.plots.new_figure()"],
                            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b""), "bench.py's pictures"


def test_a_run_draws_its_picture(tmp_path):
    """The real command, on a text that is not FineWeb's."""
    for kind in ("train", "val"):
        write_shard(tmp_path / f"text_{kind}_000000.npy", np.arange(999, dtype=np.uint16) % 64)
    done = script("train_gpt2.py", "--data", tmp_path, "--out", tmp_path / "log", "--n_layer", 1,
                  "--n_head", 1, "--n_embd", 16, "--block_size", 16, "--vocab_size", 64, "--val_tokens", 64,
                  "--total_batch_size", 64, "--max_steps", 2, "--val_every", 1, "--hellaswag_every", 0,
                  "--sample_every", 0, "--checkpoint_every", 0, "--device", "cpu", "--dtype", "float32",
                  env=ENV | {"DRAW": "1"})
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (tmp_path / "log/loss.png").read_bytes()[:4] == b"\x89PNG"


class Child:
    """Stands in for the process that draws: it ends when it is waited for, or never."""
    ended, ends = None, True

    def poll(self):
        return self.ended

    def wait(self, patience):
        if not self.ends:
            raise subprocess.TimeoutExpired("", patience)
        self.ended = 0
        return 0


def test_one_picture_at_a_time_and_the_last_shows_the_end_of_the_run(drawing, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **how: begun.append(Child()) or begun[-1])
    for _ in range(5):
        plots.draw(config(tmp_path))
    assert len(begun) == 1
    plots.draw(config(tmp_path), wait=True)
    plots.finish()
    assert [child.ended for child in begun] == [0, 0], "the last one is drawn after the one before"
    plots.draw(config(tmp_path))
    begun[2].ends = False
    plots.finish()                              # and nobody waits for ever
    assert len(begun) == 3


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_last(drawing, tmp_path, monkeypatch, capfd):
    (tmp_path / "matplotlib.py").write_text("import sys\nraise ImportError('no pictures\\nhere')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    falling(tmp_path / "log", 2)
    for _ in range(2):
        plots.draw(config(tmp_path / "log"))
        plots.finish()
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1 and f"{tmp_path}/log/loss.png" in err and "no pictures" in err
