"""What a run tells: the console's line, metrics.csv and log.txt, Weights & Biases."""
import csv
import math
import os
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from helpers import ENV, ROOT, limit_file_size, logged, run

from runtime.cli import UserError
from runtime.console import COLUMNS, Record, clock, counted, lowest, read_metrics, step_line
from runtime.shards import write_shard

SMALL = ["--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--dtype", "float32",
         "--vocab_size", 256, "--hellaswag_every", 0, "--sample_every", 0, "--total_batch_size", 128]


def record(out, steps, first=0, **how):
    """The Record of steps `first` to `steps` of a run that validates at each even one."""
    it = Record(out, first, 100, **how)
    for step in range(first, steps):
        if step % 2 == 0 and it.value(step, "val") is None:
            it.evaluation(step, "val", 5.0 - step / 8)
            it.evaluation(step, "hella", 0.25 + step / 100)
        it.train(step, 4.0 - step / 3, norm=1.5, lr=0.1 / 3, seconds=2.0)
    return it


def texts(out):
    return (out / "metrics.csv").read_text(), (out / "log.txt").read_text()


def test_a_run_writes_a_row_a_step_and_a_line_an_event(tmp_path):
    for i, split in enumerate(("val", "train")):
        write_shard(tmp_path / f"text_{split}_{i:06d}.npy", np.arange(5000, dtype=np.uint16) % 251)
    run("--data", tmp_path, *SMALL, "--max_steps", 5, "--val_every", 3, "--out", tmp_path / "log")
    with open(tmp_path / "log/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["step"] for row in rows] == list("012345")
    assert [int(row["tokens"]) for row in rows] == [128 * step for step in range(6)]
    for kind, steps in (("train", [0, 1, 2, 3, 4]), ("val", [0, 3, 5])):
        assert {int(row["step"]): float(row[kind]) for row in rows if row[kind]} == logged(
            tmp_path / "log", kind)
        assert list(logged(tmp_path / "log", kind)) == steps
    for row, after in zip(rows, rows[1:], strict=False):        # the time of a step is that of its tokens/s
        seconds = float(after["seconds"]) - float(row["seconds"])
        assert seconds == pytest.approx(128 / float(row["tokens_per_second"]), abs=0.002)


def test_the_two_files_and_what_is_read_of_them(tmp_path):
    it = record(tmp_path, 3)
    assert texts(tmp_path) == (
        "step,tokens,seconds,train,val,hella,lr,norm,tokens_per_second\n"
        "0,0,0.000,4.000000,5.000000,0.250000,0.0333333,1.5000,50\n"
        "1,100,2.000,3.666667,,,0.0333333,1.5000,50\n"
        "2,200,4.000,3.333333,4.750000,0.270000,0.0333333,1.5000,50\n",
        "0 val 5.000000\n0 hella 0.250000\n0 train 4.000000\n1 train 3.666667\n"
        "2 val 4.750000\n2 hella 0.270000\n2 train 3.333333\n")
    it.evaluation(3, "val", math.nan)           # at the end: a row without the cells of a step
    it.sync()
    it.close()
    assert texts(tmp_path)[0].splitlines()[-1] == "3,300,6.000,,nan,,,,"
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows[1] == dict(step=1, tokens=100, seconds=2.0, train=3.666667, val=None, hella=None,
                           lr=0.0333333, norm=1.5, tokens_per_second=50.0)
    assert [row["train"] for row in rows] == [row["train"] for row in it.rows], "as it is read again"


def test_an_evaluation_is_written_at_once_and_its_row_completed_in_place(tmp_path):
    it = record(tmp_path, 2)
    before = texts(tmp_path)[0]
    it.evaluation(2, "val", 4.5)
    assert texts(tmp_path)[0] == before + "2,200,4.000,,4.500000,,,,\n"
    it.evaluation(2, "hella", 0.3)
    assert texts(tmp_path)[0] == before + "2,200,4.000,,4.500000,0.300000,,,\n"
    it.train(2, 3.0, 1.0, 0.1, 2.0)
    assert texts(tmp_path)[0] == before + "2,200,4.000,3.000000,4.500000,0.300000,0.1,1.0000,50\n"
    assert it.value(2, "val") == 4.5 and it.value(1, "val") is it.value(3, "val") is None


@pytest.mark.parametrize("killed", [(), ("metrics.csv",), ("metrics.csv", "log.txt")],
                         ids=["after a line", "in a row", "in a row and a line"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_resume_cuts_what_happens_again_and_ends_with_the_same_bytes(step, killed, tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        record(tmp_path / name, 6 if name == "whole" else 5)
    for name in killed:
        path = tmp_path / "killed" / name
        os.truncate(path, path.stat().st_size - 9)
    again = record(tmp_path / "killed", 6, first=step)
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")
    assert again.seconds == pytest.approx(12)


def test_of_the_row_of_the_first_step_only_evaluations_stay_and_step_0_begins_empty(tmp_path):
    record(tmp_path, 4)
    it = Record(tmp_path, 2, 100)
    assert it.value(2, "val") == 4.75 and it.value(2, "train") is None and it.value(3, "train") is None
    assert texts(tmp_path)[1].endswith("1 train 3.666667\n2 val 4.750000\n2 hella 0.270000\n")
    Record(tmp_path, 0, 100)
    assert texts(tmp_path) == (",".join(COLUMNS) + "\n", "")


def test_a_real_kill_in_a_row_leaves_a_record_that_is_resumed(tmp_path):
    """Between the two calls of the system that complete a row in place."""
    code = f"""if True:
        import os, signal, sys; sys.path.insert(0, {str(ROOT)!r})
        from runtime.console import Record
        it = Record({str(tmp_path)!r}, 0, 100)
        it.train(0, 4.0, 1.0, 0.1, 2.0)
        it.evaluation(1, "val", 5.0)
        class Killed:
            def __getattr__(self, name):
                return getattr(table, name)
            def write(self, line):
                table.write(line[:-9]); table.flush(); os.kill(os.getpid(), signal.SIGKILL)
        it.table, table = Killed(), it.table
        it.train(1, 4.0, 1.0, 0.1, 2.0)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not texts(tmp_path)[0].endswith("\n")
    it = Record(tmp_path, 1, 100)
    assert [row["step"] for row in it.rows] == [0] and it.value(1, "val") is None
    assert texts(tmp_path)[1] == "0 train 4.000000\n"


def test_the_best_is_the_lowest_validation_loss_and_the_earliest_of_equals(tmp_path):
    it = Record(tmp_path, 0, 100)
    assert it.best() is None
    for step, loss in enumerate((5.0, 4.0, math.nan, 4.0, 4.5)):
        it.evaluation(step, "val", loss)
    it.evaluation(5, "hella", 0.1)
    assert it.best() == lowest(read_metrics(tmp_path / "metrics.csv")) == (4.0, 1)
    assert it.best([2, 3, 4, 5]) == (4.0, 3) and it.best({0: "a path", 4: "another"}) == (4.5, 4)
    assert it.best([2, 5, 9]) is it.best([]) is None


HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize("text", [
    "a note\n", f"{HEADER}\na note\n", f"{HEADER}\n1,2,3,4\n", f"{HEADER}\n0,0,,4.0,,,0.1,1.0,50\n",
    f"{HEADER}\n1,0,0,4.0,,,0.1,1.0,50\n1,0,0,4.0,,,0.1,1.0,50\n", f"{HEADER}\n-1,0,0,4.0,,,0.1,1.0,50\n",
    f"{HEADER}\n{'9' * 200_000},0,0,4.0,,,0.1,1.0,50\n", f"{HEADER}\n0,0,0,4.0,,,0.1,1.0,50,6\n",
    "\0\xff\n" * 9, None])
def test_a_damaged_or_foreign_metrics_csv_is_a_users_mistake_that_names_it(text, tmp_path):
    path = tmp_path / "metrics.csv"
    path.mkdir() if text is None else path.write_text(text)
    for read in (lambda: read_metrics(path), lambda: Record(tmp_path, 3, 100)):
        with pytest.raises(UserError, match=re.escape(str(path))):
            read()
    assert text is None or path.read_text() == text, "nothing was cut"


def test_a_full_disk_is_exit_1_in_one_line_and_closing_raises_nothing(tmp_path):
    code = f"""if True:
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from runtime.cli import run_command
        from runtime.console import Record
        def main():
            it = Record({str(tmp_path)!r}, 0, 100)
            try:
                for step in range(99):
                    it.train(step, 4.0, 1.0, 0.1, 2.0)
            finally:
                it.close()
        run_command(main)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            preexec_fn=limit_file_size(500))
    assert result.returncode == 1 and str(tmp_path) in result.stderr and result.stderr.count("\n") == 1
    steps = [row["step"] for row in Record(tmp_path, 99, 100).rows]
    assert steps == list(range(len(steps))) and 5 < len(steps) < 15


def test_wandb_is_given_the_events_and_knows_a_resumed_run_by_its_id(tmp_path, monkeypatch):
    begun, told = [], []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda **how: begun.append(how), log=lambda values, step: told.append((step, values)),
        finish=lambda: told.append("end")))
    record(tmp_path, 2, config={"n_layer": 2}, wandb=True).close()
    assert begun[0] | {"id": ""} == dict(project="gpt2", name=tmp_path.name, config={"n_layer": 2}, id="",
                                         resume="allow")
    more = dict(norm=1.5, lr=0.1 / 3, tokens_per_second=50.0)
    assert told == [(0, {"val": 5.0}), (0, {"hella": 0.25}), (0, {"train": 4.0} | more),
                    (1, {"train": pytest.approx(11 / 3)} | more), "end"]
    for step in (1, 0):                         # the same run, and another in the same folder
        Record(tmp_path, step, 100, {}, wandb=True).close()
    ids = [how["id"] for how in begun]
    assert ids[0] == ids[1] != ids[2] and (tmp_path / "wandb_id").read_text() == f"{ids[2]}\n"
    (tmp_path / "wandb_id").write_text("../damaged")
    with pytest.raises(UserError, match="wandb_id"):
        Record(tmp_path, 1, 100, {}, wandb=True)


def test_a_record_needs_neither_torch_nor_wandb(tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom runtime.console import Record\n"
            f"Record({str(tmp_path)!r}, 0, 100).train(0, 1.0, 1.0, 1.0, 1.0)\n"
            "assert not {'torch', 'wandb', 'matplotlib'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], env=ENV).returncode == 0


def test_a_step_line_is_that_of_the_contract():
    assert step_line(5, 6.0372, 2.05, 4.2e-6, 0.0931, 175_980, None, 5000) == (
        "step     5 | loss: 6.0372 | lr 4.20e-06 | norm: 2.05 | dt: 93.1ms | tok/sec: 175,980 | "
        "1:23:20 left")
    assert step_line(19072, 3.2, 12.345, 6e-5, 12.34, 14_000_000.0, 0.412, 0) == (
        "step 19072 | loss: 3.2000 | lr 6.00e-05 | norm: 12.35 | dt: 12,340.0ms | tok/sec: 14,000,000 | "
        "mfu 41% | 0:00:00 left")


def test_times_and_counts_in_words():
    assert [clock(s) for s in (0.3, 5000, 1e5, 1e99)] == ["0:00:00", "1:23:20", "1 day, 3:46:40",
                                                          "115740 days, 17:46:40"]
    assert [counted(n, "process") for n in (1, 8)] == ["1 process", "8 processes"]
