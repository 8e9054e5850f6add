"""runtime/output.py: what a run writes into --out, and what it leaves alone there."""
import errno
import functools
import os
import re
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    BYTES,
    contents,
    limit_file_size,
    logged,
    refused,
    run,
    same_end,
    saved,
    saved_steps,
    striking,
    train,
)
from peers import make_model

import runtime.output
import train_gpt2
from config import Config
from recipes import load_model
from runtime import lock
from runtime.checkpoint import Start
from runtime.cli import RunError, UserError
from runtime.files import checkpoints
from runtime.lock import lock_folder
from runtime.metrics import HEADER, read_metrics
from runtime.output import Output
from runtime.ranks import Process
from runtime.recipe import BatchSchedule

SHORT = [*BYTES, "--max_steps", 4, "--val_every", 0, "--device", "cpu", "--batch_size", 8,
         "--checkpoint_every", 2, "--keep_checkpoints", "all"]
LOCK = ".train_gpt2.lock"
GAIN = "transformer.ln_f.weight"


@pytest.fixture(scope="module")
def a_run(byte_data, tmp_path_factory):
    """The folder of a run of 4 steps, with checkpoints of steps 2 and 4. Nobody writes there."""
    out = tmp_path_factory.mktemp("a_run") / "log"
    train("--data", byte_data, *SHORT, "--out", out)
    return out


@pytest.fixture
def a_copy(a_run, tmp_path):
    return shutil.copytree(a_run, tmp_path / "log")


def open_output(out, step=0, device="cpu", **flags):
    """The Output of a run with these flags, which begins at a step."""
    config = Config(out=str(out), **flags)
    output = Output(config, Process(device=device), BatchSchedule(256, 100))
    output.open(Start(step=step))
    return output


def content_of(step, weights, moments, others=None):
    return {"model": weights, "optimizers": moments, "others": others or {}, "step": step}


# ----------------------------------------------------------------------- which files

def test_a_run_without_evaluations_writes_its_metrics_and_checkpoints(a_run):
    assert set(contents(a_run)) == {
        LOCK, "metrics.csv", "checkpoint_000002.pt", "checkpoint_000004.pt"}


def test_a_dry_run_writes_nothing_into_a_runs_folder(byte_data, a_copy):
    before = contents(a_copy)
    train("--data", byte_data, *SHORT, "--out", a_copy, "--dry_run")
    assert contents(a_copy) == before


def test_a_rank_other_than_0_does_not_even_make_the_folder(tmp_path):
    config = Config(out=str(tmp_path / "log"))
    output = Output(config, Process(1, 1, 2), BatchSchedule(1, 100))
    output.open(Start())
    with output:
        output.add(0, train=1.0)
    assert not (tmp_path / "log").exists()


def test_temporary_files_of_killed_runs_are_removed_and_foreign_files_stay(byte_data, a_copy):
    foreign = {"thesis.tmp", "checkpoint_best.pt", "checkpoint_1.pt.old.tmp", "notes.txt",
               "best/model.pt"}
    (a_copy / "best").mkdir()
    (a_copy / "checkpoint_000009.pt.tmp").mkdir()
    for name in foreign:
        (a_copy / name).write_text("mine")
    for name in ("checkpoint_000777.pt.123.tmp", "metrics.csv.9.tmp", "loss.png.7.tmp"):
        (a_copy / name).write_text("half")

    train("--data", byte_data, *SHORT, "--out", a_copy, "--max_steps", 5)

    found = contents(a_copy)
    assert found.keys() - {LOCK, "metrics.csv"} == foreign | {
        f"checkpoint_{step:06d}.pt" for step in (2, 4, 5)}
    assert all(found[name] == b"mine" for name in foreign)
    assert (a_copy / "checkpoint_000009.pt.tmp").is_dir()


def test_a_new_run_keeps_the_files_of_one_without_a_checkpoint_under_other_names(
        byte_data, tmp_path, capsys):
    for name in ("metrics.csv", "loss.png", "wandb_id", "notes.txt"):
        (tmp_path / name).write_text(f"{name} of the first")
    for number in (1, 2):
        capsys.readouterr()
        train("--data", byte_data, *SHORT, "--checkpoint_every", 0, "--out", tmp_path)
        assert f"metrics_{number}.csv" in capsys.readouterr().out

    found = contents(tmp_path)
    for name, other in (("metrics.csv", "metrics_1.csv"), ("loss.png", "loss_1.png"),
                        ("wandb_id", "wandb_id_1"), ("notes.txt", "notes.txt")):
        assert found[other].decode() == f"{name} of the first"
    assert found.keys() == {
        LOCK, "metrics.csv", "metrics_1.csv", "metrics_2.csv", "loss_1.png", "wandb_id_1",
        "notes.txt"}
    assert list(logged(tmp_path)) == [0, 1, 2, 3]


def test_files_that_are_set_aside_get_a_number_that_is_free_for_all_of_them(byte_data, tmp_path):
    for name in ("metrics.csv", "loss.png", "loss_1.png"):
        (tmp_path / name).write_text(name)
    train("--data", byte_data, *SHORT, "--checkpoint_every", 0, "--out", tmp_path)
    found = contents(tmp_path)
    assert found["metrics_2.csv"] == b"metrics.csv"
    assert found["loss_2.png"] == b"loss.png"
    assert found["loss_1.png"] == b"loss_1.png"


# ----------------------------------------------------------------------- the lock

def test_a_run_is_not_disturbed_by_one_that_starts_in_its_folder(byte_data, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_PATIENCE", 0.1)
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    train_step = train_gpt2.train_step
    lines = []

    def second_run(step, *arguments):
        if step == 2:
            monkeypatch.setattr(train_gpt2, "train_step", train_step)
            lines.append(refused(lambda: train(*flags, "--max_steps", 9), f"--out {tmp_path}"))
        return train_step(step, *arguments)

    monkeypatch.setattr(train_gpt2, "train_step", second_run)
    train(*flags)
    assert len(lines) == 1
    assert list(logged(tmp_path)) == [0, 1, 2, 3]
    assert saved_steps(tmp_path) == [2, 4]


def test_a_run_whose_folder_got_a_checkpoint_meanwhile_does_not_begin(a_copy):
    """It was to begin anew, and another run has ended there while it was set up."""
    before = contents(a_copy)
    with pytest.raises(RunError, match="another run has just ended"):
        open_output(a_copy)
    assert contents(a_copy) == before


def test_the_lock_ends_with_the_run_also_with_one_that_failed(byte_data, tmp_path, monkeypatch):
    locks = []

    def noted_lock(*arguments):
        locks.append(lock_folder(*arguments))
        return locks[-1]

    monkeypatch.setattr(runtime.output, "lock_folder", noted_lock)
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path, "--val_every", 4]
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, "validation_loss", lambda *arguments: float("nan"))
        refused(lambda: train(*flags), "step 0", "nan", failed=True)
    train(*flags)
    assert [lock.closed for lock in locks] == [True, True]


# ----------------------------------------------------------------------- metrics.csv

def test_the_evaluations_and_the_training_of_a_step_share_a_row(tmp_path):
    with open_output(tmp_path, val_every=1) as output:
        output.add(0, val=5.5, val_tokens=640, hella=0.25)
        output.add(0, train=5.25, norm=1.5, lr=1e-3, tokens_per_second=512.0)
        output.add(1, train=5.0, norm=1.25, lr=2e-3, tokens_per_second=256.0)
        output.add(2, val=4.5, val_tokens=640)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        HEADER,
        "0,0,0.000,5.250000,5.500000,0.250000,0.001,1.5000,512,640",
        "1,256,0.500,5.000000,,,0.002,1.2500,256,",
        "2,512,1.500,,4.500000,,,,,640",
    ]


def test_each_row_is_in_the_file_when_its_step_is_logged(tmp_path):
    with open_output(tmp_path) as output:
        for step in range(3):
            output.add(step, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=1.0)
            assert list(logged(tmp_path)) == list(range(step + 1))


def test_a_resume_keeps_the_rows_before_its_step_and_the_seconds_go_on(byte_data, a_copy):
    (a_copy / "checkpoint_000004.pt").unlink()
    before = read_metrics(a_copy / "metrics.csv")
    train("--data", byte_data, *SHORT, "--out", a_copy)
    after = read_metrics(a_copy / "metrics.csv")
    assert after[:2] == before[:2]
    assert [row["step"] for row in after] == [0, 1, 2, 3]
    for a, b in zip(after, after[1:], strict=False):
        took = 256 / a["tokens_per_second"]
        assert b["seconds"] == pytest.approx(a["seconds"] + took, abs=2e-3)


def without_val_tokens(text):
    """A metrics.csv as versions wrote it that did not have the last column."""
    return "".join(line.rpartition(",")[0] + "\n" for line in text.splitlines())


@pytest.mark.parametrize("change", [without_val_tokens, lambda text: "a note\nof mine\n"])
def test_a_metrics_csv_of_another_kind_is_refused_and_stays(change, byte_data, a_copy):
    """With all checkpoints: the best of them would not be known without its losses."""
    path = a_copy / "metrics.csv"
    path.write_text(change(path.read_text()))
    before = contents(a_copy)
    line = refused(lambda: train("--data", byte_data, *SHORT, "--out", a_copy, "--max_steps", 5,
                                 "--keep_checkpoints", 1), path, "version", "--out")
    assert "remove" not in line
    assert contents(a_copy) == before


def test_a_run_that_goes_on_without_its_metrics_begins_them_at_its_step(byte_data, a_copy):
    (a_copy / "metrics.csv").unlink()
    train("--data", byte_data, *SHORT, "--out", a_copy, "--max_steps", 5)
    assert list(logged(a_copy)) == [4]


def test_an_evaluation_is_in_the_file_with_its_steps_training_or_before_the_next_checkpoint(
        tmp_path, model_state):
    """So a kill leaves no half of a row, and a checkpoint no evaluation that is lost."""
    with open_output(tmp_path) as output:
        output.add(0, val=5.5)
        assert logged(tmp_path, "val") == {}
        output.add(0, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=1.0)
        assert logged(tmp_path, "val") == {0: 5.5}
        output.add(1, val=4.5)
        output.save(1, content_of(1, *model_state))
        assert logged(tmp_path, "val") == {0: 5.5, 1: 4.5}


def test_a_resume_evaluates_again_but_does_not_save_again_and_each_step_has_one_row(
        byte_data, tmp_path, capsys):
    flags = ["--data", byte_data, *SHORT, "--val_every", 1, "--out", tmp_path]
    train(*flags, "--max_steps", 2)
    losses = logged(tmp_path, "val")
    when = (tmp_path / "checkpoint_000002.pt").stat().st_mtime_ns
    capsys.readouterr()

    train(*flags, "--max_steps", 3)

    assert capsys.readouterr().out.count("| validation loss: ") == 2        # of steps 2 and 3
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.csv")] == [0, 1, 2, 3]
    assert logged(tmp_path, "val").items() > losses.items()
    assert (tmp_path / "checkpoint_000002.pt").stat().st_mtime_ns == when


def test_a_row_that_was_written_before_a_checkpoint_of_its_step_is_completed(
        tmp_path, model_state):
    with open_output(tmp_path) as output:
        output.add(0, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)
        output.add(1, val=4.5, val_tokens=640)
        output.save(1, content_of(1, *model_state))
        output.add(1, train=4.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)
        output.add(2, train=3.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1:] == [
        "0,0,0.000,5.000000,,,0.001,1.0000,256,",
        "1,256,1.000,4.000000,4.500000,,0.001,1.0000,256,640",
        "2,512,2.000,3.000000,,,0.001,1.0000,256,",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_metrics_csv_is_closed_from_a_checkpoint_to_the_next_row(tmp_path, model_state):
    """rclone uploads a file when it is closed."""
    def is_open():
        numbers = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        paths = [os.readlink(number) for number in numbers if os.path.lexists(number)]
        return str(tmp_path / "metrics.csv") in paths

    with open_output(tmp_path) as output:
        output.add(0, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)
        assert is_open()
        output.save(1, content_of(1, *model_state))
        assert not is_open()
        output.add(1, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)
        assert is_open()


def test_a_metrics_csv_that_is_gone_is_not_begun_anew_by_its_run(tmp_path, model_state):
    """As where its mount has ended."""
    def lose_it():
        with open_output(tmp_path) as output:
            output.save(1, content_of(1, *model_state))
            (tmp_path / "metrics.csv").unlink()
            output.add(1, train=5.0, norm=1.0, lr=1e-3, tokens_per_second=256.0)

    refused(lose_it, tmp_path / "metrics.csv", failed=True)
    assert not (tmp_path / "metrics.csv").exists()


# ----------------------------------------------------------------------- which checkpoints stay

VALIDATING = [*SHORT, "--max_steps", 6, "--val_every", 1]       # at each step


def give_losses(losses):
    """From now on the validations have these losses, one after the other."""
    given = iter(losses)
    train_gpt2.validation_loss = lambda *arguments: next(given)


@pytest.fixture
def with_losses(byte_data, tmp_path, monkeypatch):
    """with_losses(losses of all validations, *flags): a run.

    Returns the steps with a checkpoint.
    """
    monkeypatch.setattr(train_gpt2, "validation_loss", None)        # and put back at the end

    def train_with(losses, *flags):
        give_losses(losses)
        train("--data", byte_data, *VALIDATING, "--out", tmp_path / "log", *flags)
        return saved_steps(tmp_path / "log")
    return train_with


BEST_BETWEEN = [9.0, 8.0, 8.5, 7.0, 7.5, 6.0, 6.5]          # at the steps 1, 3 and 5


@pytest.mark.parametrize("keep, steps", [(1, [5, 6]), (2, [4, 5, 6]), ("all", [2, 4, 5, 6])])
def test_the_weights_of_the_lowest_loss_have_a_file_beside_the_newest(
        keep, steps, with_losses, capsys):
    """It replaces the best before it."""
    assert with_losses(BEST_BETWEEN, "--keep_checkpoints", keep) == steps
    saved_files = re.findall(r"saved \S*checkpoint_0*(\d+)\.pt", capsys.readouterr().out)
    assert saved_files == ["1", "2", "3", "4", "5", "6"]


def test_the_file_of_the_lowest_loss_has_the_weights_of_its_step(with_losses, byte_data, tmp_path):
    with_losses(BEST_BETWEEN, "--checkpoint_every", 100)
    train("--data", byte_data, *SHORT, "--out", tmp_path / "whole", "--max_steps", 6,
          "--checkpoint_every", 1)
    expected = saved(tmp_path / "whole", 5)["model"]
    for name, tensor in load_model(tmp_path / "log/best").state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("losses, every, steps", [
    ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], 1, [1, 2, 3, 4, 5, 6]),       # each step has one
    ([9.0, 8.0, 7.0, 7.0, 9.0, 8.0, 9.0], 4, [2, 4, 6]),                # an equal loss is not lower
    ([1.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], 4, [4, 6]),                   # the first one is the best
    ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], 0, []),
])
def test_nothing_more_is_saved_than_the_periods_and_the_lowest_loss_ask_for(
        losses, every, steps, with_losses, capsys):
    assert with_losses(losses, "--checkpoint_every", every) == steps
    text = capsys.readouterr().out
    for step in steps:
        assert text.count(f"checkpoint_{step:06d}.pt in ") == 1


def test_two_processes_save_the_lowest_loss_together(byte_data, tmp_path):
    run("--data", byte_data, *SHORT, "--batch_size", 4, "--out", tmp_path, "--val_every", 3,
        "--checkpoint_every", 100, "--max_steps", 5, processes=2)
    losses = logged(tmp_path, "val")
    assert losses[0] > losses[3] > losses[5]
    assert saved_steps(tmp_path) == [3, 5]


def test_a_run_that_is_killed_behind_its_best_checkpoint_knows_it_and_ends_like_a_whole_one(
        byte_data, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--val_every", 3, "--checkpoint_every", 100,
             "--max_steps", 5]
    train(*flags, "--out", tmp_path / "whole")
    run(*flags, "--out", tmp_path / "log", code=-9, before=striking("step 3", "SIGKILL"))
    assert list(logged(tmp_path / "log", "val")) == [0, 3]
    load_model(tmp_path / "log/best")

    train(*flags, "--out", tmp_path / "log")
    same_end(tmp_path / "log", tmp_path / "whole", step=5)
    assert saved_steps(tmp_path / "log") == [3, 5]


@pytest.mark.parametrize("keep, killed_in, steps", [(2, 5, [4, 5, 6]), ("all", 3, [2, 4, 5, 6])])
def test_a_run_that_is_killed_behind_its_best_checkpoint_keeps_those_of_a_whole_one(
        keep, killed_in, steps, with_losses, byte_data, tmp_path):
    flags = ["--keep_checkpoints", keep]
    run("--data", byte_data, *VALIDATING, *flags, "--out", tmp_path / "log", code=-9, before=[
        functools.partial(give_losses, BEST_BETWEEN),
        *striking(f"step {killed_in}", "SIGKILL")])
    assert with_losses(BEST_BETWEEN[killed_in:], *flags) == steps


def test_losses_on_other_tokens_are_not_compared_after_a_resume(
        with_losses, byte_data, tmp_path, capsys):
    with_losses([9.0, 1.0, 1.5], "--max_steps", 2, "--val_tokens", 32)
    steps = with_losses([8.0, 7.0, 6.0, 7.5, 7.0], "--val_tokens", 64, "--keep_checkpoints", 1)

    assert steps == [4, 6]
    assert "best checkpoint: " + str(tmp_path / "log/checkpoint_000004.pt") in (
        capsys.readouterr().out)
    assert logged(tmp_path / "log", "val_tokens") == {0: 32, 1: 32} | dict.fromkeys(range(2, 7), 64)


def test_checkpoints_whose_losses_are_not_known_stay(with_losses, byte_data, tmp_path, capsys):
    with_losses([9.0, 1.0, 2.0, 3.0, 4.0], "--max_steps", 4, "--checkpoint_every", 1)
    (tmp_path / "log/metrics.csv").unlink()
    capsys.readouterr()

    flags = ["--keep_checkpoints", 1, "--checkpoint_every", 1]
    steps = with_losses([5.0, 4.5, 5.5], *flags)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().out.count("no metrics.csv") == 1

    steps = with_losses([5.5, 5.0, 4.0], *flags, "--max_steps", 8)
    assert steps == [1, 2, 3, 4, 5, 8]
    assert "no metrics.csv" not in capsys.readouterr().out


# ----------------------------------------------------------------------- a save

@pytest.fixture
def model_state():
    """(weights, moments) as a checkpoint has them."""
    weights = {name: p.detach() for name, p in make_model().named_parameters()}
    moments = {name: {"exp_avg": torch.zeros_like(p), "step": torch.tensor(3.0)}
               for name, p in weights.items()}
    return weights, moments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("spoilt, words", [
    ("a weight", [GAIN]), ("a moment", [GAIN, "exp_avg"]), ("in a list", [GAIN, "factors"])])
def test_what_is_not_finite_is_not_saved(device, number, spoilt, words, model_state, tmp_path):
    """Neither at once nor in the background, as on a GPU."""
    weights, moments = model_state
    factors = moments[GAIN]["factors"] = [torch.zeros(2, 2), torch.zeros(3, 3)]
    others = {"plateau": {"best": torch.inf}}       # of these it is no mistake
    with open_output(tmp_path, device=device, keep_checkpoints=1) as output:
        output.save(1, content_of(1, weights, moments, others))
        output.finish_save()
        tensors = {"a weight": weights[GAIN], "a moment": moments[GAIN]["exp_avg"],
                   "in a list": factors[1]}
        tensors[spoilt][2] = number

        def save():
            output.save(2, content_of(2, weights, moments, others))
            output.finish_save()
        refused(save, *words, "step 2", "checkpoint_000002.pt", failed=True)
    assert set(contents(tmp_path)) == {LOCK, "metrics.csv", "checkpoint_000001.pt"}


def test_a_save_in_the_background_does_not_hold_up_the_training(
        model_state, tmp_path, monkeypatch):
    may_end = threading.Event()
    save = torch.save

    def slow_save(content, file):
        assert may_end.wait(20)
        save(content, file)

    monkeypatch.setattr(torch, "save", slow_save)
    with open_output(tmp_path, device="cuda") as output:
        output.save(1, content_of(1, *model_state))
        assert saved_steps(tmp_path) == []
        may_end.set()
    assert saved_steps(tmp_path) == [1]


@pytest.mark.parametrize("look", ["the next save", "the end"])
def test_a_save_that_fails_in_the_background_is_told_at_the_next_look(
        look, model_state, tmp_path, monkeypatch):
    def fail(content, file):
        raise OSError(5, "Input/output error")

    def save_twice():
        with open_output(tmp_path, device="cuda") as output:
            output.save(1, content_of(1, *model_state))
            if look == "the next save":
                output.save(2, content_of(2, *model_state))
                pytest.fail("it was not told")

    monkeypatch.setattr(torch, "save", fail)
    refused(save_twice, "Input/output error", tmp_path / "checkpoint_000001.pt", failed=True)
    assert set(contents(tmp_path)) == {LOCK, "metrics.csv"}


def test_the_error_of_a_run_is_told_rather_than_that_of_its_last_save(
        model_state, tmp_path, monkeypatch):
    def fail(content, file):
        raise OSError(5, "Input/output error")

    def fail_twice():
        with open_output(tmp_path, device="cuda") as output:
            output.save(1, content_of(1, *model_state))
            raise RunError("the loss is nan")

    monkeypatch.setattr(torch, "save", fail)
    assert "Input/output" not in refused(fail_twice, "the loss is nan", failed=True)


def test_a_disk_that_is_full_while_a_row_is_written_is_told_with_the_files_name(
        byte_data, tmp_path):
    result = run("--data", byte_data, *SHORT, "--out", tmp_path, "--checkpoint_every", 0,
                 "--max_steps", 20, before=[limit_file_size(1000)], code=1)
    refused(lambda: result, tmp_path / "metrics.csv", "too large", failed=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_metrics_are_on_the_disk_before_the_checkpoint_that_continues_them(
        byte_data, tmp_path, monkeypatch):
    """Else a loss of power could leave a hole in them."""
    fsync = os.fsync
    synced = []

    def note(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        lines = 0
        if (tmp_path / "metrics.csv").exists():
            lines = len(logged(tmp_path))
        synced.append((name.split(".")[0], lines))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    train("--data", byte_data, *SHORT, "--max_steps", 2, "--out", tmp_path)
    assert synced.index(("metrics", 2)) < synced.index(("checkpoint_000002", 2))


@pytest.mark.parametrize("size", [1000, 60_000])       # of which torch.save hides the error at one
def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_that_checkpoint_alone(
        size, byte_data, a_copy):
    """torch.save may hide the system's error behind one of its own."""
    flags = ["--data", byte_data, *SHORT, "--out", a_copy, "--max_steps", 6]
    before = contents(a_copy)

    result = run(*flags, before=[limit_file_size(size)], code=1)

    refused(lambda: result, a_copy / "checkpoint_000006.pt", "too large",
            "resumes from checkpoint_000004.pt", failed=True)
    after = contents(a_copy)
    assert after.keys() == before.keys()
    for name in ("checkpoint_000002.pt", "checkpoint_000004.pt"):
        assert after[name] == before[name]
    train(*flags)
    assert saved_steps(a_copy) == [2, 4, 6]
    assert list(logged(a_copy)) == [0, 1, 2, 3, 4, 5]


# ----------------------------------------------------------------------- disks that go away

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def make_unreadable(path):
    """Puts something in a file's place that the system cannot read (EIO)."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@LINUX
@pytest.mark.parametrize("name", [
    "log/checkpoint_000004.pt", "log/metrics.csv", "data/text_train_000002.npy",
    "data/text_val_000000.npy",
])
def test_a_file_that_cannot_be_read_is_the_systems_error_and_none_to_remove(
        name, a_run, byte_data, tmp_path):
    shutil.copytree(a_run, tmp_path / "log")
    shutil.copytree(byte_data, tmp_path / "data")
    make_unreadable(tmp_path / name)

    result = run("--data", tmp_path / "data", *SHORT, "--out", tmp_path / "log", "--max_steps", 6,
                 "--val_every", 2, code=1)

    line = refused(lambda: result, tmp_path / name, "Input/output error", "the mount", failed=True)
    assert "remove" not in line


@LINUX
def test_a_shard_that_cannot_be_read_any_more_ends_the_run_with_what_resumes(byte_data, tmp_path):
    """It is read in the second epoch."""
    data = shutil.copytree(byte_data, tmp_path / "data")
    for name in ("text_train_000002.npy", "text_train_000003.npy"):
        (data / name).unlink()
    lose_it = functools.partial(make_unreadable, data / "text_train_000001.npy")

    result = run("--data", data, *SHORT, "--out", tmp_path / "log", "--max_steps", 100,
                 before=striking("step 5", call=lose_it), code=1)

    refused(lambda: result, "text_train_000001.npy", "Input/output error", "checkpoint_0000",
            failed=True)


def test_the_error_of_a_run_is_told_where_what_resumes_cannot_be_found_out(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))

    def lose_the_disk():
        with open_output(tmp_path):
            monkeypatch.setattr(os, "listdir", fail)
            raise RunError("the loss is nan")

    line = refused(lose_the_disk, "the loss is nan", tmp_path, "not connected", failed=True)
    assert "from the beginning" not in line


# ----------------------------------------------------------------------- how a run ends

def test_a_run_that_fails_says_what_resumes(byte_data, tmp_path, monkeypatch):
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, "validation_loss", lambda *arguments: float("inf"))
        told = refused(lambda: train(*flags, "--val_every", 2), "step 0", "inf", failed=True)
        assert "from the beginning" in told
        train(*flags)
        refused(lambda: train(*flags, "--max_steps", 6, "--val_every", 6), "step 6", "inf",
                "checkpoint_000006.pt", failed=True)


def test_a_users_mistake_that_ends_a_run_stays_one_and_says_how_to_go_on(tmp_path):
    with pytest.raises(UserError, match="too large.*from the beginning"):
        with open_output(tmp_path):
            raise UserError("the batch is too large")


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
        byte_data, tmp_path, monkeypatch):
    train_step = train_gpt2.train_step

    def nan_in_step_3(step, *arguments):
        numbers = train_step(step, *arguments)
        if step == 3:
            numbers[0] = torch.nan
        return numbers

    monkeypatch.setattr(train_gpt2, "train_step", nan_in_step_3)
    refused(lambda: train("--data", byte_data, *SHORT, "--out", tmp_path), "step 3", "nan",
            "--max_lr", "checkpoint_000002.pt", failed=True)
    assert saved_steps(tmp_path) == [2]
    assert list(logged(tmp_path)) == [0, 1, 2]


# ----------------------------------------------------------------------- Weights & Biases

def test_a_resume_goes_on_with_the_wandb_run_and_a_new_run_has_another(
        byte_data, tmp_path, monkeypatch):
    ids = []
    fake = SimpleNamespace(
        init=lambda **options: ids.append(options["id"]),
        log=lambda values, step: None,
        finish=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = ["--data", byte_data, *SHORT, "--wandb"]
    train(*flags, "--out", tmp_path / "a", "--max_steps", 2)
    train(*flags, "--out", tmp_path / "a")
    train(*flags, "--out", tmp_path / "b", "--resume", tmp_path / "a")
    train(*flags, "--out", tmp_path / "c", "--checkpoint_every", 0)
    train(*flags, "--out", tmp_path / "c", "--checkpoint_every", 0)

    first, again, elsewhere, without, anew = ids
    assert first == again == (tmp_path / "a/wandb_id").read_text()
    assert len({first, elsewhere, without, anew}) == 4
    assert (tmp_path / "c/wandb_id_1").read_text() == without


def test_without_a_login_at_wandb_the_run_does_not_begin(byte_data, tmp_path, monkeypatch, capsys):
    class UsageError(Exception):
        pass

    def init(**options):
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    fake = SimpleNamespace(init=init, errors=SimpleNamespace(UsageError=UsageError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = ["--data", byte_data, *SHORT, "--wandb", "--out", tmp_path / "log"]
    refused(lambda: train(*flags), "--wandb", "wandb login")
    assert not checkpoints(tmp_path / "log")
