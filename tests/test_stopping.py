"""Stopping: signals at any moment to one process or several, closed terminals and pipes, Ctrl-C. What is
killed: test_reliability.py."""
import os
import pty
import signal
import subprocess
import sys

import pytest
from helpers import (BYTES, ENV, FORK, HANG, ROOT, command, hellaswag_file, logged, newest, run, same_end,
                     striking, train)

from runtime.files import checkpoints
from runtime.ranks import Process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_stops_one_process_within_its_step_and_the_resume_repeats_that(name, byte_data, whole,
                                                                               tmp_path):
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    result = run(*flags, before=striking("step 13", name, item=2))
    assert f"stopped by {name} after 13 of 40 steps" in result.stdout and result.stderr.count("\n") == 1
    assert "checkpoint_000013.pt" in result.stdout.splitlines()[-1]
    assert newest(tmp_path) == 13 and max(logged(tmp_path)) == 12
    if name == "SIGTERM":
        run(*flags)
        same_end(tmp_path, whole())


@pytest.mark.parametrize("look", range(1, 22))
def test_whichever_look_at_the_flag_sees_a_signal_all_steps_are_saved(look, byte_data, tmp_path, monkeypatch):
    looks = iter(range(1, 10**6))
    monkeypatch.setattr(Process, "asked_to_stop", property(lambda process: next(looks) >= look))
    train("--data", byte_data, *BYTES, "--batch_size", 4, "--max_steps", 4, "--val_every", 2,
          "--checkpoint_every", 3, "--out", tmp_path)
    steps = list(logged(tmp_path))
    assert newest(tmp_path) == len(steps) if steps else not checkpoints(tmp_path)


def test_a_signal_to_one_of_several_processes_stops_all_after_the_step(byte_data, whole, tmp_path):
    """The moments shared out at first, and not later; the run that nobody disturbs has them on each."""
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    told = run(*flags, "--shard_optimizer", processes=2, before=striking("step 13", "SIGINT", rank=1))
    assert newest(tmp_path) == 14 and "after 14 of 40" in told.stdout and not told.stderr
    told = run(*flags, processes=2, before=striking("step 25", "SIGTERM", item=1))
    assert newest(tmp_path) == 26 and "SIGTERM" in told.stderr and told.stderr.count("\n") == 1
    run(*flags, processes=2)
    same_end(tmp_path, whole(processes=2))


@pytest.mark.parametrize("name, processes", [("SIGKILL", 1), ("SIGTERM", 1), ("SIGTERM", 2)])
def test_what_stops_in_a_validation_has_saved_and_the_resume_validates(name, processes, byte_data, whole,
                                                                       tmp_path):
    """The one of step 20: its checkpoint is there. Several processes vote with the next step's loss."""
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    run(*flags, before=striking("validation", name, nth=2, item=2, rank=processes - 1), processes=processes,
        code=-signal.SIGKILL if name == "SIGKILL" else 0)
    assert newest(tmp_path) == (20 if processes == 1 else 21)
    assert max(logged(tmp_path)) == newest(tmp_path) - 1
    assert list(logged(tmp_path, "val")) == ([0] if processes == 1 else [0, 20])
    run(*flags, processes=processes)
    same_end(tmp_path, whole(processes=processes))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_what_stops_between_two_evaluations_of_a_step_makes_the_second_alone(name, byte_data, tmp_path):
    """In HellaSwag, when the validation loss is recorded."""
    flags = ["--data", byte_data, *BYTES, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16,
             "--max_steps", 6, "--val_every", 3, "--checkpoint_every", 3, "--hellaswag_every", 3,
             "--hellaswag_data", hellaswag_file(tmp_path / "h.jsonl")]
    run(*flags, "--out", tmp_path / "whole")
    out = tmp_path / "log"
    run(*flags, "--out", out, before=striking("HellaSwag", name, nth=2),
        code=-signal.SIGKILL if name == "SIGKILL" else 0)
    assert list(logged(out, "val")) == [0, 3] and list(logged(out, "hella")) == [0]
    shown = run(*flags, "--out", out).stdout
    assert shown.count("validation loss") == 1 + shown.count("best checkpoint")
    same_end(out, tmp_path / "whole", 6)


@pytest.mark.parametrize(("names", "torchrun", "code"), [
    (("SIGINT", "SIGINT"), False, 130), (("SIGTERM", "SIGTERM"), False, 143),
    (("SIGUSR1", "SIGTERM"), False, 0), (("SIGTERM", "SIGTERM"), True, 0),
    (("SIGUSR1", "SIGTERM", "SIGTERM"), False, 143)])
def test_a_second_signal_ends_at_once_but_not_after_slurms_warning_or_under_torchrun(names, torchrun, code,
                                                                                     byte_data, tmp_path):
    """torchrun passes each one on, and ends its ranks itself."""
    env = ENV | {"TORCHELASTIC_RUN_ID": "1"} if torchrun else ENV
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, env=env, code=code,
                 before=striking("step 1", *names, item=1))
    assert bool(checkpoints(tmp_path)) == ("stopped by" in result.stdout) == (code == 0)


# ----------------------------------------------------------------------------- terminals, pipes, Ctrl-C

def test_a_pipe_that_closes_stops_the_run_which_saves_first(byte_data, tmp_path):
    """`| head` that has enough."""
    flags = ["--data", byte_data, *BYTES, "--val_every", 0, "--max_steps", 10**6, "--out", tmp_path]
    process = subprocess.Popen([sys.executable, ROOT / "train_gpt2.py", *map(str, flags)], env=ENV, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    next(line for line in process.stdout if line.startswith("step     3 |"))
    process.stdout.close()
    assert (process.wait(HANG), process.stderr.read()) == (0, "")
    assert newest(tmp_path) >= 3
    process.stderr.close()


def on_a_terminal(path, sighup, flags):
    """What a forked process does: train_gpt2.py, whose output the terminal at `path` shows."""
    for descriptor in (1, 2):
        os.dup2(os.open(path, os.O_WRONLY | os.O_NOCTTY), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    signal.signal(signal.SIGHUP, sighup)
    os.environ["OMP_NUM_THREADS"] = "1"
    command("train_gpt2.py", *flags)()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_run_which_saves_but_not_one_under_nohup(nohup, byte_data, tmp_path):
    screen, theirs = pty.openpty()
    told = signal.SIG_IGN if nohup else signal.SIG_DFL          # the tests may run under nohup themselves
    flags = ["--data", byte_data, *BYTES, "--val_every", 0, "--max_steps", 40 if nohup else 10**6, "--out",
             tmp_path]
    process = FORK.Process(target=on_a_terminal, args=(os.ttyname(theirs), told, flags))
    process.start()
    with open(screen, "rb", buffering=0) as shown:
        seen = b""
        while b"step     3 |" not in seen:
            seen += shown.read(1000)
        os.close(theirs)
    os.kill(process.pid, signal.SIGHUP)
    process.join(HANG)
    assert process.exitcode == 0
    assert newest(tmp_path) == 40 if nohup else newest(tmp_path) >= 3


def press_at_the_lock():
    """Ctrl-C when the output folder is locked, the last thing before the first step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)        # which a shell's `&` would ignore

    pressed = []

    def hook(event, args):
        if event == "fcntl.flock" and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
    sys.addaudithook(hook)


def test_ctrl_c_before_the_first_step_is_one_line(byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, before=[press_at_the_lock], code=130)
    assert result.stderr.count("\n") == 1 and not checkpoints(tmp_path)
