"""Signals at any moment to one process or several, Ctrl-C, closed terminals and pipes: exit codes
and what is saved. What is killed without a warning is in test_resume.py."""
import re
import functools
import os
import pty
import signal
import sys

import pytest
import torch
from helpers import (
    BYTES,
    FORK,
    HANG,
    command,
    hellaswag_file,
    logged,
    newest,
    run,
    same_end,
    saved_steps,
    striking,
    train,
)

from runtime.ranks import Process

pytest.importorskip("fcntl")                # Windows has not all of these signals

SHORT = [*BYTES, "--max_steps", 8, "--val_every", 4, "--checkpoint_every", 4, "--batch_size", 2]


@pytest.fixture(scope="module")
def undisturbed(byte_data, tmp_path_factory):
    """undisturbed(processes) is the folder of a run of SHORT that ends by itself."""
    @functools.cache
    def make(processes):
        out = tmp_path_factory.mktemp("undisturbed") / "log"
        run("--data", byte_data, *SHORT, "--out", out, processes=processes)
        return out
    return make


# ----------------------------------------------------------------------- in a step

@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_stops_one_process_within_its_step_which_the_resume_repeats(
        name, byte_data, undisturbed, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    result = run(*flags, before=striking("step 6", name, item=2))
    assert f"stopped by {name} after 6 of 8 steps" in result.stdout
    assert "resumes from checkpoint_000006.pt" in result.stdout.splitlines()[-1]
    assert result.stderr == f"{name}: stopping\n"
    assert newest(tmp_path) == 6
    assert list(logged(tmp_path)) == list(range(6))

    if name == "SIGTERM":                       # the others end in the same way
        run(*flags)
        same_end(tmp_path, undisturbed(1), 8)


@pytest.mark.parametrize("look", range(1, 37, 5))
def test_whichever_look_at_the_signal_sees_it_all_finished_steps_are_saved(
        look, byte_data, tmp_path, monkeypatch):
    """The looks are before each micro-step and each batch of a validation, and after these."""
    looks = []

    def stop_requested(process):
        looks.append(process)
        return len(looks) >= look

    monkeypatch.setattr(Process, "stop_requested", stop_requested)
    train("--data", byte_data, *BYTES, "--batch_size", 4, "--max_steps", 4, "--val_every", 2,
          "--checkpoint_every", 3, "--out", tmp_path, "--device", "cpu")
    done = len(logged(tmp_path))
    if done == 0:
        assert saved_steps(tmp_path) == []
    else:
        assert newest(tmp_path) == done


def test_a_signal_in_the_last_validation_stops_the_run_and_the_resume_repeats_it(
        byte_data, undisturbed, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    result = run(*flags, before=striking("validation", "SIGTERM", nth=3))
    assert "stopped by SIGTERM after 8 of 8 steps" in result.stdout
    assert "done" not in result.stdout
    assert newest(tmp_path) == 8

    run(*flags)
    same_end(tmp_path, undisturbed(1), 8)


def test_a_signal_stops_an_overfit_which_writes_nothing(tmp_path):
    result = run("--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--device", "cpu",
                 "--max_steps", 50, cwd=tmp_path, before=striking("step 2", "SIGINT"))
    assert "stopped by SIGINT after 2 of 50 steps" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_signal_to_one_of_several_processes_stops_all_after_the_step(
        byte_data, undisturbed, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    result = run(*flags, "--shard_optimizer", processes=2,
                 before=striking("step 2", "SIGINT", rank=1))
    assert re.search(r"stopped by SIGINT \(process 1 on .+\) after 3 of 8 steps", result.stdout)
    assert result.stderr == ""
    assert newest(tmp_path) == 3

    result = run(*flags, processes=2, before=striking("step 5", "SIGTERM"))
    assert re.search(r"stopped by SIGTERM \(process 0 .* after 6 of 8 steps", result.stdout)
    assert result.stderr == "SIGTERM: stopping\n"
    assert newest(tmp_path) == 6

    run(*flags, processes=2)
    same_end(tmp_path, undisturbed(2), 8)


def test_a_signal_in_the_last_step_of_two_processes_is_answered(byte_data, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--max_steps", 4, "--val_every", 4, "--val_tokens", 256,
             "--checkpoint_every", 100, "--out", tmp_path]
    result = run(*flags, processes=2, before=striking("step 3", "SIGTERM"))
    assert re.search(r"stopped by SIGTERM \(process 0 .* after 4 of 4 steps", result.stdout)
    assert newest(tmp_path) == 4
    assert list(logged(tmp_path, "val")) == [0]

    run(*flags, processes=2)
    assert list(logged(tmp_path)) == [0, 1, 2, 3]
    assert list(logged(tmp_path, "val")) == [0, 4]


# ----------------------------------------------------------------------- in a save, an evaluation

@pytest.mark.parametrize("names", [["SIGUSR1"], ["SIGTERM", "SIGTERM"]])
def test_a_signal_in_a_save_stops_after_it(names, byte_data, tmp_path, monkeypatch, capsys):
    save = torch.save

    def struck(content, file):
        save(content, file)
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))

    flags = ["--data", byte_data, *BYTES, "--max_steps", 12, "--val_every", 6,
             "--checkpoint_every", 6, "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", struck)
        train(*flags, "--out", tmp_path / "log")
    text = capsys.readouterr().out
    assert f"stopped by {names[-1]} after 6 of 12 steps" in text
    assert text.count("saved ") == 1
    assert list(logged(tmp_path / "log", "val")) == [0]

    train(*flags, "--out", tmp_path / "log")
    train(*flags, "--out", tmp_path / "whole")
    same_end(tmp_path / "log", tmp_path / "whole", 12)


@pytest.mark.parametrize("name, processes, last, validated", [
    ("SIGKILL", 1, 4, [0]),
    ("SIGTERM", 1, 4, [0]),
    ("SIGTERM", 2, 5, [0, 4]),
])
def test_what_stops_in_a_validation_has_saved_and_the_resume_validates(
        name, processes, last, validated, byte_data, undisturbed, tmp_path):
    """Several processes finish the validation, and vote with the loss of the next step."""
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    code = 0
    if name == "SIGKILL":
        code = -signal.SIGKILL
    run(*flags, processes=processes, code=code,
        before=striking("validation", name, nth=2, item=2, rank=processes - 1))
    assert newest(tmp_path) == last
    assert list(logged(tmp_path)) == list(range(last))
    assert list(logged(tmp_path, "val")) == validated

    run(*flags, processes=processes)
    same_end(tmp_path, undisturbed(processes), 8)


@pytest.fixture(scope="module")
def evaluated(byte_data, tmp_path_factory):
    """(folder, flags) of a whole run that makes two evaluations at steps 0, 3 and 6."""
    folder = tmp_path_factory.mktemp("evaluated")
    examples = hellaswag_file(folder / "examples.jsonl", 2)
    flags = ["--data", byte_data, *BYTES, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16,
             "--val_tokens", 100, "--max_steps", 6, "--val_every", 3, "--checkpoint_every", 3,
             "--hellaswag_every", 3, "--hellaswag_data", examples]
    run(*flags, "--out", folder / "log")
    return folder / "log", flags


def test_what_stops_between_two_evaluations_of_a_step_makes_both_again(evaluated, tmp_path):
    expected, flags = evaluated
    run(*flags, "--out", tmp_path, before=striking("HellaSwag", "SIGTERM", nth=2))
    assert list(logged(tmp_path, "val")) == list(logged(tmp_path, "hella")) == [0]

    text = run(*flags, "--out", tmp_path).stdout
    assert text.count("| validation loss") == text.count("| HellaSwag accuracy") == 2
    same_end(tmp_path, expected, 6)


# ----------------------------------------------------------------------- a second signal, Ctrl-C

@pytest.mark.parametrize("names, code", [
    (["SIGINT", "SIGINT"], 130),
    (["SIGINT", "SIGTERM", "SIGINT"], 130),
    (["SIGUSR1", "SIGTERM"], 0),                # Slurm's warning, and then its end
    (["SIGHUP", "SIGHUP"], 0),
    (["SIGTERM", "SIGCONT", "SIGTERM"], 0),     # Slurm's end without a warning
])
def test_a_second_ctrl_c_ends_one_process_at_once_and_nothing_else_does(
        names, code, byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, code=code,
                 before=striking("step 1", *names, item=1))
    has_saved = saved_steps(tmp_path) == [1]
    assert has_saved == (code == 0)
    assert ("stopped by" in result.stdout) == (code == 0)


@pytest.mark.parametrize("what, nth, saved", [
    ("step 6", 1, [4, 6]),
    ("validation", 2, [4]),
    ("validation", 1, []),              # before the first step there is nothing to save
])
def test_two_sigterms_at_once_let_one_process_save(what, nth, saved, byte_data, tmp_path):
    """Slurm sends two within 0.1 s when it ends a job, and waits for 30 s."""
    result = run("--data", byte_data, *SHORT, "--out", tmp_path,
                 before=striking(what, "SIGTERM", "SIGTERM", nth=nth, item=1))
    assert "stopped by SIGTERM" in result.stdout
    assert saved_steps(tmp_path) == saved


def strike_when_the_folder_is_locked(event, arguments):
    if event == "fcntl.flock":
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def test_two_sigterms_in_the_start_of_a_resume_lose_nothing(byte_data, undisturbed, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--out", tmp_path]
    run(*flags, before=striking("step 6", "SIGTERM"))
    before = [functools.partial(sys.addaudithook, strike_when_the_folder_is_locked)]
    run(*flags, code=-signal.SIGTERM, before=before)
    assert newest(tmp_path) == 6

    run(*flags)
    same_end(tmp_path, undisturbed(1), 8)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_does_not_end_one_of_several_processes(name, byte_data, tmp_path):
    """torchrun passes the terminal's Ctrl-C on, so that it comes twice."""
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, processes=2,
                 before=striking("step 1", name, name))
    assert re.search(rf"stopped by {name} \(process 0 .* after 2 of 40 steps", result.stdout)
    assert saved_steps(tmp_path) == [2]


def press_ctrl_c_when_the_folder_is_locked():
    """The last moment before a run takes signals as wishes to stop."""
    def press(event, arguments):
        if event == "fcntl.flock":
            signal.raise_signal(signal.SIGINT)

    sys.addaudithook(press)


def test_ctrl_c_before_the_first_step_is_one_line_and_exit_code_130(byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, code=130,
                 before=[press_ctrl_c_when_the_folder_is_locked])
    assert result.stderr.count("\n") == 1
    assert "Ctrl-C" in result.stderr
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("flags, code", [
    (["--max_steps", 2], 0),
    (["--max_steps", 2, "--max_lr", 1e30, "--grad_clip", "inf", "--warmup_steps", 0], 1),
    (["--max_steps", 0], 2),
    (["--data", "nowhere"], 2),
])
def test_the_exit_code_of_a_run_says_how_it_ended(flags, code, byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--checkpoint_every", 1, "--out", tmp_path, *flags,
                 code=code)
    lines = result.stderr.splitlines()
    assert len(lines) == min(code, 1), lines


# ----------------------------------------------------------------------- terminals and pipes

def print_into_a_full_disk():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_run_whose_output_is_on_a_full_disk_goes_on_to_its_end(byte_data, tmp_path):
    result = run("--data", byte_data, *SHORT, "--out", tmp_path, before=[print_into_a_full_disk])
    assert result.stderr == ""
    assert newest(tmp_path) == 8


def print_into(path, when_it_closes, flags):
    """What a forked process does: train_gpt2.py, whose output goes to the terminal or the pipe."""
    for descriptor in (1, 2):
        os.dup2(os.open(path, os.O_WRONLY | os.O_NOCTTY), descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGHUP, when_it_closes)
    os.environ["OMP_NUM_THREADS"] = "1"
    command("train_gpt2.py", *flags)()


def start_and_read_until_step_3(reader, path, when_it_closes, *flags):
    process = FORK.Process(target=print_into, args=(path, when_it_closes, flags))
    process.start()
    shown = b""
    while b"step     3 |" not in shown:
        shown += os.read(reader, 1000)
    return process


def test_a_run_whose_pipe_is_closed_goes_on_to_its_end(byte_data, tmp_path):
    """As with `| head`: its record is in --out."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    process = start_and_read_until_step_3(
        reader, path, signal.SIG_DFL,
        "--data", byte_data, *SHORT, "--max_steps", 20, "--out", tmp_path / "log")
    os.close(reader)

    process.join(HANG)
    assert process.exitcode == 0
    assert newest(tmp_path / "log") == 20
    assert list(logged(tmp_path / "log")) == list(range(20))


@pytest.mark.parametrize("when_it_closes, max_steps", [
    (signal.SIG_DFL, 10**6),
    (signal.SIG_IGN, 20),                       # nohup
])
def test_a_closed_terminal_stops_a_run_which_saves_but_not_one_under_nohup(
        when_it_closes, max_steps, byte_data, tmp_path):
    screen, terminal = pty.openpty()
    process = start_and_read_until_step_3(
        screen, os.ttyname(terminal), when_it_closes,
        "--data", byte_data, *BYTES, "--val_every", 0, "--max_steps", max_steps, "--out", tmp_path)
    os.close(screen)
    os.close(terminal)
    os.kill(process.pid, signal.SIGHUP)         # as the system does

    process.join(HANG)
    assert process.exitcode == 0
    if when_it_closes == signal.SIG_IGN:
        assert newest(tmp_path) == 20
    else:
        assert 3 <= newest(tmp_path) < max_steps
