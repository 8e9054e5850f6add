"""Stopping: signals at any moment to one process or several, closed terminals and pipes, Ctrl-C. What is
killed: test_reliability.py."""
# ruff: noqa: F401, F811   pytest finds the fixtures of test_reliability by their names
import os
import pty
import signal
import subprocess
import sys

import pytest
from helpers import ENV, HANG, ROOT, hellaswag_file, logged, run, train
from test_reliability import BYTES, data, live, newest, same_end, whole, whole_of_two

from runtime.files import checkpoints
from runtime.ranks import Process

SIGNALS = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"


@pytest.fixture
def stopped(live):
    """stopped(step, flags, name) sends a run a signal before `step`, and gives its (exit code, stdout,
    stderr)."""
    def stop(step, flags, name, to=os.kill, processes=1):
        it = live(*flags, hold=[step], processes=processes)
        it.stands_before(step, range(processes))
        to(it.process.pid, signal.Signals[name])
        it.until(lambda: f"{name}: " in it.stderr())        # torchrun passes it on when it comes to that
        it.go_on(step)
        return it.end()
    return stop


def site(folder, code):
    """The environment of processes that run these lines first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {**ENV, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_stops_one_process_within_its_step_and_the_resume_repeats_that(name, data, whole, tmp_path,
                                                                               stopped):
    """Eight micro-steps a step, and it comes in the first."""
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    code, stdout, stderr = stopped(13, [*flags, "--batch_size", 1], name)
    assert code == 0 and f"stopped by {name} after 13 of 60 steps" in stdout
    assert len(stderr.splitlines()) == 1
    assert newest(tmp_path / "log") == 13 and max(logged(tmp_path / "log")) == 12
    if name == "SIGTERM":               # with other micro-batches it is the same to rounding
        run(*flags)
        assert logged(tmp_path / "log") == pytest.approx(logged(whole), abs=1e-4)


@pytest.mark.parametrize("look", range(1, 22))
def test_whichever_look_at_the_flag_sees_a_signal_all_steps_are_saved(look, data, tmp_path, monkeypatch):
    looks = iter(range(1, 10**6))
    monkeypatch.setattr(Process, "stop", property(lambda process: next(looks) >= look))
    train("--data", data, *BYTES, "--batch_size", 4, "--max_steps", 4, "--val_every", 2, "--checkpoint_every",
          3, "--out", tmp_path)
    steps = list(logged(tmp_path))
    assert newest(tmp_path) == len(steps) if steps else not checkpoints(tmp_path)


def test_a_signal_to_all_of_several_processes_is_agreed_on_saved_and_gone_on_from(data, whole_of_two,
                                                                                  tmp_path, stopped):
    """The moments shared out at first, and not later; the run that nobody disturbs has them on each."""
    flags = ["--data", data, *BYTES, "--max_steps", 40, "--out", tmp_path / "cut"]
    # to the group, as a terminal sends it: torchrun sends it on
    _, stdout, _ = stopped(13, [*flags, "--shard_optimizer"], "SIGINT", os.killpg, processes=2)
    assert newest(tmp_path / "cut") == 14 and "stopped by SIGINT after 14 of 40" in stdout
    # to torchrun alone, as Slurm's --signal=TERM sends it
    stopped(25, flags, "SIGTERM", processes=2)
    assert newest(tmp_path / "cut") == 26
    run(*flags, processes=2)
    same_end(tmp_path / "cut", whole_of_two, 40)


# `rank` gets a signal in an evaluation, from itself, when `when` holds: of `calls` of the whole model, say
EVALUATING = """
import os, signal, torch
from torch.nn.modules.module import register_module_forward_hook

def text(path):
    return open(path).read() if os.path.exists(path) else ""

def after(module, inputs, output):
    global calls, done
    if os.environ.get("RANK", "0") == "{rank}" and not torch.is_grad_enabled() and not done:
        calls += type(module).__name__ == "GPT"
        done = {when}
        if done:
            os.kill(os.getpid(), signal.{name})
calls, done = 0, False
register_module_forward_hook(after)
"""


@pytest.mark.parametrize("name, processes", [("SIGKILL", 1), ("SIGTERM", 1), ("SIGTERM", 2)])
def test_what_stops_in_a_validation_has_saved_and_the_resume_validates(name, processes, data, whole,
                                                                       whole_of_two, tmp_path):
    """The one of step 20: its checkpoint is there. A validation has four batches on each process."""
    out = tmp_path / "log"
    flags = ["--data", data, *BYTES, "--out", out, "--max_steps", 60 if processes == 1 else 40]
    env = site(tmp_path / "site", EVALUATING.format(rank=processes - 1, when="calls == 6", name=name))
    run(*flags, env=env, processes=processes, code=-signal.SIGKILL if name == "SIGKILL" else 0)
    assert newest(out) == 20 and list(logged(out, "val")) == [0] and max(logged(out)) == 19
    run(*flags, processes=processes)
    same_end(out, *((whole,) if processes == 1 else (whole_of_two, 40)))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_what_stops_between_two_evaluations_of_a_step_makes_the_second_alone(name, data, tmp_path):
    """In HellaSwag, when the validation loss is recorded."""
    flags = ["--data", data, *BYTES, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16, "--max_steps", 6,
             "--val_every", 3, "--checkpoint_every", 3, "--hellaswag_every", 3, "--hellaswag_data",
             hellaswag_file(tmp_path / "h.jsonl")]
    run(*flags, "--out", tmp_path / "whole")
    out = tmp_path / "log"
    env = site(tmp_path / "site", EVALUATING.format(
        rank=0, when=f"'3 val' in text({str(out / 'log.txt')!r})", name=name))
    run(*flags, "--out", out, env=env, code=-signal.SIGKILL if name == "SIGKILL" else 0)
    assert list(logged(out, "val")) == [0, 3] and list(logged(out, "hella")) == [0]
    shown = run(*flags, "--out", out).stdout
    assert shown.count("validation loss") == 1 + shown.count("best checkpoint")
    same_end(out, tmp_path / "whole", 6)


@pytest.mark.parametrize(("first", "second", "torchrun", "ends"), [
    ("SIGINT", "SIGINT", False, 130), ("SIGTERM", "SIGTERM", False, 143), ("SIGUSR1", "SIGTERM", False, None),
    ("SIGTERM", "SIGTERM", True, None)])
def test_a_second_signal_ends_at_once_but_not_after_slurms_warning_or_under_torchrun(
        first, second, torchrun, ends, data, tmp_path, live):
    """torchrun passes each one on, and ends its ranks itself."""
    env = {**ENV, "TORCHELASTIC_RUN_ID": "1"} if torchrun else ENV
    it = live("--data", data, *BYTES, "--out", tmp_path / "log", hold=[1], env=env)
    it.stands_before(1)                                 # in the midst of a step, which never ends
    it.process.send_signal(signal.Signals[first])
    it.until(lambda: f"{first}: " in it.stderr())
    it.process.send_signal(signal.Signals[second])
    if not ends:
        it.go_on(1)
    code, stdout, stderr = it.end()
    assert code == (ends or 0)
    assert bool(checkpoints(tmp_path / "log")) == ("stopped by" in stdout) == (not ends)


def test_a_pipe_that_closes_stops_the_run_which_saves_first(data, whole, tmp_path, live):
    """`| head` that has enough."""
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    it = live(*flags, hold=[13], stdout=subprocess.PIPE)
    it.stands_before(13)
    it.process.stdout.close()
    it.go_on(13)
    code, _, stderr = it.end()
    assert (code, stderr) == (0, "")
    assert 13 <= newest(tmp_path / "log") < 60
    run(*flags)
    same_end(tmp_path / "log", whole)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_run_which_saves_but_not_one_under_nohup(nohup, data, tmp_path, live):
    screen, theirs = pty.openpty()
    # the tests may run under nohup themselves
    told = signal.SIG_IGN if nohup else signal.SIG_DFL
    it = live("--data", data, *BYTES, "--max_steps", 30, "--out", tmp_path / "log", hold=[13], stdout=theirs,
              stderr=theirs, preexec_fn=lambda: signal.signal(signal.SIGHUP, told))
    os.close(theirs)
    it.stands_before(13)
    os.close(screen)
    it.process.send_signal(signal.SIGHUP)
    it.go_on(13)
    assert it.process.wait(HANG) == 0
    assert newest(tmp_path / "log") in ([30] if nohup else range(13, 30))


# sitecustomize.py: Ctrl-C (which a shell's `&` would ignore) when the output folder is locked, the last thing
# before the first step, and when Python takes down its modules
AT_THE_LOCK = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def hook(event, args, pressed=[]):
    if event == "fcntl.flock" and not pressed:
        pressed.append(True)
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(hook)
"""
IN_FINALIZATION = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
class Module:
    def __del__(self, write=os.write, press=signal.raise_signal, number=signal.SIGINT):
        write(1, b"finalization\\n")
        press(number)
freed = Module()
"""


def test_ctrl_c_before_the_first_step_is_one_line(data, tmp_path):
    result = run("--data", data, *BYTES, "--out", tmp_path / "log", env=site(tmp_path / "site", AT_THE_LOCK),
                 code=130)
    assert result.stderr == "train_gpt2.py: stopped by Ctrl-C\n"


def test_ctrl_c_in_pythons_finalization_changes_no_exit_code(tmp_path):
    result = subprocess.run([sys.executable, ROOT / "fineweb.py", "--bogus"], capture_output=True, text=True,
                            timeout=HANG, env=site(tmp_path / "site", IN_FINALIZATION))
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "finalization\n", 1)
