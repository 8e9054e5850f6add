"""What a run tells: the console's line, metrics.csv and log.txt, Weights & Biases."""
import importlib.machinery
import math
import os
import sys
import types

import numpy as np
import pytest
from helpers import BYTES, logged, refused, train

from runtime.console import HEADER, Record, clock, counted, lowest, read_metrics, step_line
from runtime.shards import write_shard


def record(out, steps, first=0, **how):
    """The Record of steps `first` to `steps` of a run that validates at each even one."""
    it = Record(out, first, (100).__mul__, **how)
    for step in range(first, steps):
        if step % 2 == 0 and not (it.rows and it.rows[-1]["step"] == step):
            it.add(step, "val", 5.0 - step / 8)
            it.add(step, "hella", 0.25 + step / 100)
        it.add(step, "train", 4.0 - step / 3, lr=0.1 / 3, norm=1.5, tokens_per_second=50.0)
    return it


def texts(out):
    return (out / "metrics.csv").read_text(), (out / "log.txt").read_text()


def test_a_run_writes_a_row_a_step_and_a_line_an_event(tmp_path):
    for split in ("val", "train"):
        write_shard(tmp_path / f"text_{split}_000000.npy", np.arange(5000, dtype=np.uint16) % 251)
    train("--data", tmp_path, "--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--dtype",
          "float32", "--vocab_size", 256, "--hellaswag_every", 0, "--sample_every", 0, "--device", "cpu",
          "--total_batch_size", 128, "--max_steps", 5, "--val_every", 3, "--out", tmp_path / "log")
    rows = read_metrics(tmp_path / "log/metrics.csv")
    assert [(row["step"], row["tokens"]) for row in rows] == [(step, 128 * step) for step in range(6)]
    for kind, steps in (("train", [0, 1, 2, 3, 4]), ("val", [0, 3, 5])):
        found = {row["step"]: row[kind] for row in rows if row[kind] is not None}
        assert found == logged(tmp_path / "log", kind) and list(found) == steps
    for row, after in zip(rows, rows[1:], strict=False):        # the time of a step is that of its tokens/s
        assert after["seconds"] - row["seconds"] == pytest.approx(128 / row["tokens_per_second"], abs=0.002)


def test_an_event_is_written_at_once_and_what_is_read_of_the_two_files(tmp_path):
    it = record(tmp_path, 2)
    for step, kind, value, more, row in (
            (2, "val", 4.5, {}, "2,200,4.000,,4.500000,,,,"),
            (2, "hella", 0.3, {}, "2,200,4.000,,4.500000,0.300000,,,"),
            (2, "train", 3.0, {"tokens_per_second": 1e8}, "2,200,4.000,3.000000,4.500000,0.300000,,,1e+08"),
            (3, "train", 2.0, {"tokens_per_second": 50.0}, "3,300,4.000,2.000000,,,,,50"),
            (4, "val", math.nan, {}, "4,400,6.000,,nan,,,,")):
        it.add(step, kind, value, **more)
        assert texts(tmp_path)[0].splitlines()[step + 1:] == [row]
    assert texts(tmp_path)[0].startswith(
        "step,tokens,seconds,train,val,hella,lr,norm,tokens_per_second\n"
        "0,0,0.000,4.000000,5.000000,0.250000,0.0333333,1.5000,50\n"
        "1,100,2.000,3.666667,,,0.0333333,1.5000,50\n2,")
    assert texts(tmp_path)[1].endswith("2 val 4.500000\n2 hella 0.300000\n2 train 3.000000\n"
                                       "3 train 2.000000\n4 val nan\n")
    it.close()
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows[1] == dict(step=1, tokens=100, seconds=2.0, train=3.666667, val=None, hella=None,
                           lr=0.0333333, norm=1.5, tokens_per_second=50.0)
    assert [row["train"] for row in rows] == [row["train"] for row in it.rows], "as it is read again"


@pytest.mark.parametrize("killed", [(), ("metrics.csv",), ("metrics.csv", "log.txt")],
                         ids=["after a line", "in a row", "in a row and a line"])
def test_a_resume_cuts_what_happens_again_and_ends_with_the_same_bytes(killed, tmp_path):
    record(tmp_path, 6)
    whole = texts(tmp_path)
    for step in (5, 4, 2, 1):
        record(tmp_path, 5)
        for name in killed:
            os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 9)
        assert record(tmp_path, 6, first=min(step, 5 - bool(killed))).seconds == pytest.approx(12)
        assert texts(tmp_path) == whole


def test_of_the_row_of_the_first_step_only_evaluations_stay_and_step_0_begins_empty(tmp_path):
    record(tmp_path, 4)
    Record(tmp_path, 2, (100).__mul__)
    assert texts(tmp_path)[0].endswith(",50\n2,200,4.000,,4.750000,0.270000,,,\n")
    assert texts(tmp_path)[1].endswith("1 train 3.666667\n2 val 4.750000\n2 hella 0.270000\n")
    Record(tmp_path, 0, (100).__mul__)
    assert texts(tmp_path) == (f"{HEADER}\n", "")


def test_a_kill_while_a_row_is_completed_leaves_it_out(tmp_path):
    it = record(tmp_path, 2)
    it.add(2, "val", 5.0)
    it.table, table = types.SimpleNamespace(tell=it.table.tell, truncate=it.table.truncate), it.table
    it.table.write = lambda line: table.write(line[:-9]) and table.flush() or 1 / 0
    with pytest.raises(ZeroDivisionError):
        it.add(2, "train", 4.0, lr=0.1)
    assert [row["step"] for row in Record(tmp_path, 2, (100).__mul__).rows] == [0, 1]


def test_the_best_is_the_lowest_validation_loss_and_the_earliest_of_equals(tmp_path):
    it = Record(tmp_path, 0, (100).__mul__)
    assert lowest(it.rows) is None
    for step, loss in enumerate((5.0, 4.0, math.nan, 4.0, 4.5, -math.inf)):
        it.add(step, "val", loss)
    it.add(6, "hella", 0.1)
    assert lowest(it.rows) == lowest(read_metrics(tmp_path / "metrics.csv")) == (4.0, 1)
    assert lowest(it.rows, [2, 3, 4, 5]) == (4.0, 3) and lowest(it.rows, {0: "a path", 4: ""}) == (4.5, 4)
    assert lowest(it.rows, [2, 6, 9]) is lowest(it.rows, []) is None


@pytest.mark.parametrize("text", [
    "a note\n", f"{HEADER}\na note\n", f"{HEADER}\n1,2,3,4\n", f"{HEADER}\n0,0,0,4.0,,,0.1,1.0,50,6\n",
    f"{HEADER}\n{'9' * 200_000},0,0,4.0,,,0.1,1.0,50\n", "\0\xff\n" * 9, None],
    ids="note no-number short long huge binary folder".split())
def test_a_damaged_or_foreign_metrics_csv_is_a_users_mistake_that_names_it(text, tmp_path):
    path = tmp_path / "metrics.csv"
    path.mkdir() if text is None else path.write_text(text)
    refused(lambda: Record(tmp_path, 3, (100).__mul__), path)
    assert text is None or path.read_text() == text, "nothing was cut"


def test_a_full_disk_is_exit_1_in_one_line_and_closing_raises_nothing(tmp_path):
    resource = pytest.importorskip("resource")                  # not on Windows
    it, (before, most) = Record(tmp_path, 0, (100).__mul__), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
    try:
        refused(lambda: [it.add(step, "train", 4.0, norm=1.0) for step in range(99)], tmp_path, failed=True)
        it.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    steps = [row["step"] for row in Record(tmp_path, 99, (100).__mul__).rows]
    assert steps == list(range(len(steps))) and 5 < len(steps) < 25


def test_wandb_is_given_the_events_and_knows_a_resumed_run_by_its_id(tmp_path, monkeypatch):
    begun, told = [], []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda **how: begun.append(how), log=lambda values, step: told.append((step, values)),
        finish=lambda: told.append("end")))
    record(tmp_path, 1, config={"n_layer": 2}, wandb=True).close()
    assert begun[0] | {"id": ""} == dict(project="gpt2", name=tmp_path.name, config={"n_layer": 2}, id="",
                                         resume="allow")
    assert told == [(0, {"val": 5.0}), (0, {"hella": 0.25}),
                    (0, dict(train=4.0, norm=1.5, lr=0.1 / 3, tokens_per_second=50.0)), "end"]
    for step in (1, 0):                         # the same run, and another in the same folder
        Record(tmp_path, step, (100).__mul__, {}, wandb=True).close()
    ids = [how["id"] for how in begun]
    assert ids[0] == ids[1] != ids[2] and (tmp_path / "wandb_id").read_text().strip() == ids[2]
    monkeypatch.setattr("wandb.init", lambda **how: 1 / 0)              # no login, for one
    refused(lambda: Record(tmp_path, 0, (100).__mul__, {}, wandb=True), "wandb login", "ZeroDivisionError")


def test_a_run_with_wandb_tells_it_its_flags_and_each_of_its_numbers_and_others_tell_nothing(tmp_path,
                                                                                              monkeypatch):
    wandb, begun, told = types.ModuleType("wandb"), [], []
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    wandb.init, wandb.finish = lambda **how: begun.append(how), lambda: told.append("end")
    wandb.log = lambda values, step: told.extend((step, kind, values[kind]) for kind in ("val", "train")
                                                 if kind in values)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for split in ("val", "train"):
        write_shard(tmp_path / f"text_{split}_000000.npy", np.arange(500, dtype=np.uint16) % 251)
    flags = ["--data", tmp_path, *BYTES, "--n_layer", 1, "--n_embd", 16, "--max_steps", 2, "--val_every", 2]
    train(*flags, "--out", tmp_path / "without")
    assert not begun and not told
    train(*flags, "--wandb", "--out", tmp_path / "with")
    assert begun[0]["config"]["n_embd"] == 16 and begun[0]["name"] == "with"
    lines = [line.split() for line in (tmp_path / "with/log.txt").read_text().splitlines()]
    expected = [(int(step), kind, pytest.approx(float(value), abs=1e-6)) for step, kind, value in lines]
    assert told == [*expected, "end"] and len(lines) == 4


def test_a_step_line_is_that_of_the_contract():
    assert step_line(5, 6.0372, 2.05, 4.2e-6, 0.0931, 175_980, None, 5000) == (
        "step     5 | loss: 6.0372 | lr 4.20e-06 | norm: 2.05 | dt: 93.1ms | tok/sec: 175,980 | "
        "1:23:20 left")
    assert step_line(19072, 3.2, 12.345, 6e-5, 12.34, 14_000_000.0, 0.412, 0).endswith(
        "dt: 12340.0ms | tok/sec: 14,000,000 | mfu 41% | 0:00:00 left")
    assert [clock(s) for s in (0.3, 1e5, 1e99)] == ["0:00:00", "1 day, 3:46:40", "115740 days, 17:46:40"]
    assert [counted(n, "process") for n in (1, 8)] == ["1 process", "8 processes"]
