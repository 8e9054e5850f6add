"""What a run tells: log.txt, metrics.csv, the console, progress."""
import csv
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from helpers import ENV, HANG, ROOT, logged, run

from benchmarks.timing import random_tokens
from runtime.cli import UserError
from runtime.checkpoint import Saver
from runtime.console import Band, brief_time, print_results, step_line
from runtime.distributed import Process
from runtime.log import COLUMNS, ConsoleLog, Log, read_metrics, recorded
from runtime.progress import Progress, duration
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from train_gpt2 import Config, train
import runtime.progress

SMALL = ["--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--dtype", "float32",
         "--vocab_size", 256, "--hellaswag_every", 0, "--sample_every", 0, "--total_batch_size", 128]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    for i in range(2):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", random_tokens(5000) % 256)
    return folder


def test_metrics_csv_has_a_row_a_step_with_what_log_txt_has(shards, tmp_path):
    run("--data", shards, *SMALL, "--max_steps", 7, "--val_every", 3, "--out", tmp_path)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["step"] for row in rows] == list("01234567")
    assert [int(row["tokens"]) for row in rows] == [128 * step for step in range(8)]
    for kind in ("train", "val"):
        assert {int(row["step"]): float(row[kind]) for row in rows if row[kind]} == logged(tmp_path, kind)
    assert rows[7]["train"] == rows[7]["lr"] == rows[7]["tokens_per_second"] == rows[1]["hella"] == ""
    for row, after in zip(rows, rows[1:], strict=False):        # the time of a step is that of its tokens/s
        seconds = float(after["seconds"]) - float(row["seconds"])
        assert seconds == pytest.approx(128 / float(row["tokens_per_second"]), abs=0.002)
        assert float(row["norm"]) > 0
    assert [row["seconds"] for row in read_metrics(tmp_path / "metrics.csv")] == [float(row["seconds"])
                                                                                  for row in rows]


def test_metrics_csv_goes_on_where_the_checkpoint_is_and_a_damaged_one_hinders_nobody(tmp_path):
    config = Config(out=str(tmp_path), total_batch_size=100)
    log = Log(config, 0, -1)
    for step in range(4):
        log.evaluation(step, "val", 5.0 - step)
        log.step(step, 4.0 - step, 1.0, 0.1, seconds=2.0)
    log.close()
    (tmp_path / "metrics.csv").open("a").write("damaged,,\n1,2,3,4\n4,400,8.0,1.0")
    with pytest.raises(ValueError, match="line 6 is none of a run's metrics"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "other.csv").write_text(",".join(COLUMNS) + "\n" + "1" * 200_000 + ",\n")
    with pytest.raises(ValueError, match="line 2 is none of a run's metrics"):
        read_metrics(tmp_path / "other.csv")
    log = Log(config, 2, 2)                     # its evaluation was made before the checkpoint was written
    log.step(2, 1.5, 1.0, 0.1, seconds=3.0)
    log.evaluation(3, "hella", 0.25)
    log.close()
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["step"], row["seconds"], row["train"], row["val"], row["hella"]) for row in rows] == [
        (0, 0, 4, 5, None), (1, 2, 3, 4, None), (2, 4, 1.5, 3, None), (3, 7, None, None, 0.25)]
    log = Log(config, 0, -1)                    # another run in the same folder
    log.close()
    assert read_metrics(tmp_path / "metrics.csv") == []


@pytest.mark.parametrize("step", [0, 19072, 600000])
@pytest.mark.parametrize(("loss", "norm"), [(10.8412, 12.345), (3.2, 0.312)])
@pytest.mark.parametrize("dt", [0.0931, 0.5, 3.021, 700.0])
@pytest.mark.parametrize("rate", [99.0, 175_980.0, 14_000_000.0])
@pytest.mark.parametrize("mfu", [None, 0.412])
def test_a_step_line_fits_100_columns(step, loss, norm, dt, rate, mfu):
    for left in (12, 5000, 170_000, 1.4e7):
        line = step_line(step, loss, norm, 4.2e-6, dt, rate, mfu, left)
        assert len(line) <= 100, line
        assert re.fullmatch(r"step +\d+ \| loss: [0-9.]+ \| lr 4\.20e-06 \| norm: [0-9.]{4} \| "
                            r"dt: [0-9.]+m?s \| tok/sec: [0-9,]+k?( \| mfu 41%)?( \| \d+[smhd]( left)?)?",
                            line)
        usual = loss < 10 and step < 1e5 and rate < 1e7 and left < 1e7
        assert ("mfu" in line) == bool(mfu)
        assert not usual or re.search(r"\d[smhd]( left)?$", line)


def test_a_step_line_is_that_of_the_contract():
    assert step_line(5, 6.0372, 2.05, 4.2e-6, 0.0931, 175_980, None, 5000) == (
        "step     5 | loss: 6.0372 | lr 4.20e-06 | norm: 2.05 | dt: 93.1ms | tok/sec: 175,980 | 83m left")
    assert [brief_time(s) for s in (3, 99, 100, 5999, 6001, 172_000, 1.5e7)] == [
        "3s", "99s", "2m", "100m", "2h", "48h", "174d"]


def test_log_every_thins_the_console_alone_and_the_end_tells_the_speed(shards, tmp_path):
    result = run("--data", shards, *SMALL, "--max_steps", 8, "--val_every", 4, "--log_every", 3, "--out",
                 tmp_path, env=ENV | {"PYTHONWARNINGS": "error::ResourceWarning"})
    assert re.findall(r"step +(\d+) \| loss", result.stdout) == ["0", "3", "6", "7"]
    assert re.findall(r"step +(\d+) \| validation loss: \d", result.stdout) == ["0", "4", "8"]
    assert set(logged(tmp_path)) == set(range(8)) and not result.stderr         # no file is left open
    assert re.search(r"median step [0-9.,]+ ms, [0-9,]+ tokens/s, peak memory \d+\.\d GB\ndone: 8 steps",
                     result.stdout)


def test_a_validation_says_its_bits_per_byte_on_any_number_of_ranks(tmp_path):
    """The bytes are those of the predicted tokens of what is validated: not of each shard's first token, nor
    of what is left of the two shards."""
    flags, text, targets = [flag for flag in SMALL if flag not in ("--vocab_size", 256)], b"", 0
    for i in range(3):
        tokens = encode((ROOT / "input.txt").read_text(encoding="utf-8")[5000 * i:5000 * (i + 1)] + " café")
        tokens[10 * (i + 1)] = EOT
        write_shard(tmp_path / f"text_{'val' if i else 'train'}_{i:06d}.npy", tokens)
        rows = (len(tokens) - 1) // 32 if i == 1 else 7 if i == 2 else 0
        targets += 32 * rows
        text += tokenizer().decode_bytes([token for token in tokens[1:32 * rows + 1] if token != EOT])
    flags += ["--data", tmp_path, "--max_steps", 2, "--val_every", 1, "--checkpoint_every", 2, "--val_tokens",
              targets]
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        shown = run(*flags, "--out", out, processes=ranks).stdout
        for step, loss in logged(out, "val").items():
            bits = loss / math.log(2) * targets / len(text)
            told = re.search(rf"step +{step} \| validation loss: {loss:.4f} \((.*) bits per byte\)\n", shown)
            assert float(told[1]) == pytest.approx(bits, abs=2e-4) and 1 < bits < 8
        assert shown.count(f"validation loss {loss:.4f} ({told[1]} bits per byte)\n") == 1, "in the summary"


def test_other_tokens_than_gpt2s_have_no_bits_per_byte(shards, tmp_path):
    assert "bits" not in run("--data", shards, *SMALL, "--max_steps", 1, "--out", tmp_path).stdout


LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d \S+ "             # time and host


def told(out):
    """console.log without time and host, and status.json."""
    lines = (out / "console.log").read_text().splitlines()
    assert all(re.match(LINE, line) for line in lines)
    return [re.sub(LINE, "", line, count=1) for line in lines], json.loads((out / "status.json").read_text())


def test_console_log_holds_what_the_console_showed_and_status_json_where_the_run_is(shards, tmp_path):
    flags = ["--data", shards, *SMALL, "--val_every", 2, "--checkpoint_every", 2, "--out", tmp_path]
    before = []
    for steps in (4, 6):
        shown = run(*flags, "--max_steps", steps).stdout.splitlines()
        lines, status = told(tmp_path)
        start, *rest = lines[len(before):]
        assert re.fullmatch(rf"process {status['pid']}: .*train_gpt2.py .* --max_steps {steps}", start)
        assert rest == shown and lines[:len(before)] == before
        assert (status["state"], status["step"], status["max_steps"]) == ("done", steps, steps)
        assert status["checkpoint"] == str(tmp_path / f"checkpoint_{steps:06d}.pt")
        assert status["val_loss"] == pytest.approx(logged(tmp_path, "val")[steps], abs=1e-6)
        assert status["loss"] == pytest.approx(logged(tmp_path)[steps - 1], abs=1e-6)
        assert status["machine"] and lines[len(before) + 1].startswith(status["machine"])
        assert status["command"].endswith(f" --max_steps {steps}") and ROOT.name not in status["command"]
        assert re.fullmatch(r"[0-9a-f]{16}, 156 x 32", status["data"]["val"])
        before = lines
    assert not list(tmp_path.glob("*.tmp"))
    with pytest.raises(UserError, match="checkpoint_000006.pt is at step 6, beyond --max_steps 2: give more "
                                        "steps, or --resume an earlier checkpoint"):
        train([*map(str, flags), "--max_steps", "2"])
    assert told(tmp_path) == (lines, status), "a mistake in the flags is none of the run's"


def test_how_a_run_failed_is_in_console_log_and_status_json(tmp_path):
    for error, message, last in ((UserError("no more\nmemory"), "no more memory", r"\S+: no more memory"),
                                 (ValueError("a bug"), "ValueError: a bug", "ValueError: a bug")):
        process = Process()
        with pytest.raises(type(error)), recorded(process):
            process.print0("the header")
            assert not (tmp_path / "console.log").exists()
            process.console.open(Config(out=str(tmp_path)), 5)
            process.console.update(loss=float("nan"))
            process.print0("two\nlines")
            raise error
        lines, status = told(tmp_path)
        assert lines[1:4] == ["the header", "two", "lines"] and re.fullmatch(last, lines[-1])
        assert (status["state"], status["message"], status["step"]) == ("failed", message, 5)
        assert status["loss"] is None and json.loads(json.dumps(status, allow_nan=False))
        (tmp_path / "console.log").unlink()
    with pytest.raises(UserError), recorded(Process()):         # before --out is this run's
        raise UserError("no such data")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    other = Process(rank=1)
    with recorded(other):
        assert other.console is None


def test_status_json_is_replaced_once_a_second_and_at_once_for_an_evaluation_and_the_end(tmp_path,
                                                                                        monkeypatch):
    console, written, replace = ConsoleLog(Process()), [], os.replace

    def seen(new, old):
        written.append(tuple(json.loads(new.read_text())[name] for name in ("step", "state")))
        assert old == tmp_path / "status.json"
        replace(new, old)
    monkeypatch.setattr(os, "replace", seen)
    monkeypatch.setattr(ConsoleLog, "EVERY", 1e6)
    console.open(Config(out=str(tmp_path)), 0)
    for step in range(1, 5):
        console.update(step=step)
        console("a step")
    console.update(at_once=True)
    console("an evaluation")
    console("a step")
    console.end("done")
    monkeypatch.setattr(ConsoleLog, "EVERY", 0.0)
    console.update(at_once=True)
    for step in range(5, 7):
        console.update(step=step)
        console("a slow step")
    console.close()
    assert written == [(0, "running"), (4, "running"), (4, "done"), (5, "done"), (6, "done")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
def test_a_record_that_cannot_be_written_is_one_warning_and_ends_nothing(tmp_path, capsys):
    os.symlink("/dev/full", tmp_path / "console.log")
    (tmp_path / "status.json").mkdir()
    process = Process()
    with recorded(process):
        process.console.open(Config(out=str(tmp_path)), 0)
        process.print0("a step")
        process.console.end("done")
    assert capsys.readouterr().out == (f"warning: {tmp_path}/console.log cannot be written (No space left on "
                                       "device); the run continues\na step\n")
    assert sorted(os.listdir(tmp_path)) == ["console.log", "status.json"]


@pytest.mark.parametrize(("best", "val_loss", "kept", "line"), [
    ((8.12344, 75), 9.93, (75, 100), "validation has risen since step 75 (8.1234 -> 9.9300): the best "
                                     "checkpoint is {}/checkpoint_000075.pt"),
    ((8.12344, 75), 9.93, (100,), "validation has risen since step 75 (8.1234 -> 9.9300), and the checkpoint "
                                  "of that step is gone"),
    ((8.12344, 100), 8.12344, (75, 100), "best checkpoint: {}/checkpoint_000100.pt, validation loss 8.1234 "
                                     "(4.0617 bits per byte)"),
    ((8.12344, 75), 8.12344, (100,), None), (None, None, (100,), None)])
def test_the_best_checkpoint_is_named_and_offered_and_whether_validation_has_risen_since(
        best, val_loss, kept, line, tmp_path, capsys):
    for step in kept:
        (tmp_path / f"checkpoint_{step:06d}.pt").touch()
    (tmp_path / "loss.png").touch()
    begun = 0 if best else 100                  # all steps had been made before
    state = SimpleNamespace(best=best, val_loss=val_loss, step=100, begun=begun)
    config = Config(out=str(tmp_path))
    print_results(SimpleNamespace(config=config, state=state, process=Process(),
                                  data=SimpleNamespace(bits_per_byte=0.5),
                                  saver=Saver(config, {}, None, Process())))
    offered = best[1] if best and best[1] in kept else 100
    assert capsys.readouterr().out.splitlines() == [
        f"done: 100 steps; in {tmp_path}: log.txt, metrics.csv, loss.png, checkpoints",
        f"look at: {tmp_path}/loss.png, the losses" + (", and at the samples above" if best else ""),
        *([line.format(tmp_path)] if line else []),
        f"next: python sample.py --model {tmp_path}/checkpoint_{offered:06d}.pt"]


def test_the_end_of_a_run_names_the_curve_of_its_preset_where_there_is_one(tmp_path, capsys):
    for preset in ("shakespeare", "small"):
        config = Config(preset=preset, out=str(tmp_path))
        print_results(SimpleNamespace(config=config, state=SimpleNamespace(best=None, val_loss=None, step=1),
                                      process=Process(), saver=Saver(config, {}, None, Process())))
        named = capsys.readouterr().out.count(f"python bench.py compare {tmp_path} assets/{preset}.csv\n")
        assert named == (ROOT / f"assets/{preset}.csv").is_file() == (preset == "shakespeare")


def test_a_value_far_above_its_band_is_said_once_in_64_steps():
    band, said = Band("loss"), []
    losses = [10.0 - 0.2 * step for step in range(20)] + [3.2 + 0.01 * (step % 28) for step in range(180)]
    losses[25] = 30.0                           # too early to tell
    losses[120], losses[121], losses[150] = 7.9112, 8.0, 20.0
    losses[195] = math.inf                      # others tell of those
    for step, loss in enumerate(losses):
        said += [line] if (line := band.add(step, loss)) else []
    assert said == ["step 120: loss 7.9112 is far above those of the last 64 steps (3.2000 to 3.4700)"]
    assert "step 200:" in band.add(200, 100.0) and not band.add(201, 1000.0)


def test_work_that_takes_long_shows_a_line_now_and_then_and_short_work_nothing(monkeypatch):
    lines = []
    progress = Progress(lines.append)
    for _ in progress.over("short", range(3), "batches"):
        pass
    assert not lines
    monkeypatch.setattr(runtime.progress, "QUIET", 0.3)
    with progress("outer"), progress("validation", 4, "batches") as task:
        task.update()
        deadline = time.monotonic() + HANG
        while len(lines) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.fullmatch(r"validation: 1 of 4 batches, [0-9.]+ s so far", lines[-1])
    with progress("x"):                 # one that takes long because of many short ones within shows too
        count = len(lines)
        while len(lines) == count and time.monotonic() < deadline:
            with progress("y"):
                time.sleep(0.05)
    assert re.fullmatch(r"x: [0-9.]+ s so far", lines[-1])
    other = Progress(lines.append, enabled=False)               # another rank
    count = len(lines)
    with other("unseen"):
        time.sleep(1)
    assert len(lines) == count and other.thread is None
    assert [duration(s) for s in (0.3, 45, 3000, 20_000, 1.4e7)] == ["0.3 s", "45 s", "50 min", "5.6 hours",
                                                                     "162 days"]


def test_on_a_terminal_it_is_a_bar_that_goes_away_again():
    code = (f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
            "import runtime.progress as p; p.QUIET = 0.2\n"
            "with p.Progress()('validation', 4, 'batches') as task:\n"
            "    task.update(3); end = time.monotonic() + 600\n"
            "    progress = [o for o in __import__('gc').get_objects() if isinstance(o, p.Progress)][0]\n"
            "    while not progress.shown and time.monotonic() < end: time.sleep(0.01)\n"
            "    time.sleep(0.5)\n"
            "with progress('loading'):\n"
            "    while not progress.shown and time.monotonic() < end: time.sleep(0.01)\n")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:                                     # the end, as Linux tells it
        pass
    assert process.wait(timeout=HANG) == 0 and process.stdout.read() == b""
    assert b"validation:  75%" in shown and b"3/4" in shown and b"loading: 00:0" in shown
    assert shown.endswith(b"\r\033[K")


def test_a_slow_micro_step_of_a_real_run_shows_progress(shards, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "import runtime.progress\nfrom runtime.dataloader import TokenLoader\ndel sys.path[0]\n"
        "runtime.progress.QUIET, real = 0.2, TokenLoader.next_batch\n"
        "TokenLoader.next_batch = lambda *args: (time.sleep(1.0), real(*args))[1]\n")
    result = run("--data", shards, *SMALL, "--max_steps", 1, "--batch_size", 2, "--val_every", 0, "--out",
                 tmp_path / "log", env=ENV | {"PYTHONPATH": str(tmp_path)})
    assert re.search(r"\nstep 0: [01] of 2 micro-steps, [0-9.]+ s so far\n", result.stdout)
    assert not result.stderr
