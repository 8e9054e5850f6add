"""What happens once in weeks: saves that are slow or fail behind the training's back, a GPU's run that is one
step ahead of its log, restarts by torchrun, file systems without locks or fsync, overflows of float16, pipes
that are read while the run goes on."""
import errno
import functools
import json
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from helpers import BYTES, ENV, command, forked, logged, newest, refused, run, same_end, train
from runtime.files import checkpoints, replace_file, writing
from test_printed import FLOPS, Clock, is_model, printed, replace_everywhere, step_lines, table, takes_time

QUICK = [*BYTES, "--batch_size", 8, "--device", "cpu", "--val_every", 0]     # one micro-step a step


@pytest.fixture
def hooked():
    """hooked(hook) calls hook(module, inputs, output) after each forward of a whole model."""
    handles = []
    yield lambda hook: handles.append(register_module_forward_hook(
        lambda module, inputs, output: hook(module, inputs, output) if is_model(module) else None))
    for handle in handles:
        handle.remove()


def training(hook):
    """The hook of forwards that are trained, called with their number and output."""
    seen = []

    def numbered(module, inputs, output):
        if torch.is_grad_enabled():
            seen.append(module)
            return hook(len(seen) - 1, output)
    return numbered


def saves(monkeypatch, instead):
    """From now on torch.save calls instead(step, save, content, file)."""
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file, **how: instead(
        content["step"], save, content, file))


# ----------------------------------------------------------------------------- a GPU is one step ahead

class LikeAGpu(str):
    """A device that is torch's "cpu", and a GPU to all that our code asks of it."""
    name = "cuda:77"

    def startswith(self, *words):
        return self.name.startswith(*words)

    def __eq__(self, other):
        return self.name == other

    def __ne__(self, other):
        return self.name != other

    def __hash__(self):
        return hash(self.name)


@pytest.fixture
def gpu(monkeypatch):
    """Runs in this process go the ways of a GPU, which is an A100 with 80 GB, on the CPU."""
    replace_everywhere(monkeypatch.setattr, "choose_device", lambda *args: LikeAGpu("cpu"))
    replace_everywhere(monkeypatch.setattr, "mark_time", lambda device: time.perf_counter())
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name, value in dict(set_device=None, empty_cache=None, get_device_name="NVIDIA A100-SXM4-80GB",
                            max_memory_reserved=12_288_000_000, mem_get_info=(7e10, 8e10)).items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return ["--no_compile"]


class Timeline:
    """Of a device that does one step after the other, each in seconds(step), while the CPU goes on."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.free, self.begun, self.answered = clock, seconds, 0.0, 0, []

    def mark_time(self, device):
        """As runtime.device.mark_time: when all that the device was given is done."""
        return max(self.free, self.clock.now)

    def copy_later(self, tensor):
        """As runtime.device.copy_later: the numbers of the step that was begun last, once it is done."""
        step, numbers = self.begun, tensor.tolist()
        self.free = done = max(self.free, self.clock.now) + self.seconds(step)
        self.begun += 1

        def answer():
            self.clock.now = max(self.clock.now, done)
            self.answered.append(step)
            return numbers
        return answer


def test_a_gpus_steps_are_logged_one_step_later_but_all_before_a_save_and_an_evaluation(
        gpu, hooked, byte_data, tmp_path, monkeypatch):
    """Each with its own time, and the A100's share of its peak."""
    clock, events = Clock().install(monkeypatch.setattr), []
    base = 256 * FLOPS / 0.8 / 312e12               # seconds of a step at 80% of the peak
    device = Timeline(clock, lambda step: base * (1 + step % 3))
    replace_everywhere(monkeypatch.setattr, "copy_later", device.copy_later)
    replace_everywhere(monkeypatch.setattr, "mark_time", device.mark_time)
    hooked(lambda *_: events.append((torch.is_grad_enabled(), len(device.answered))))
    waits = takes_time(clock, lambda n: 0.0, evaluation=100.0)
    saves(monkeypatch, lambda step, save, content, file: events.append((step, len(device.answered)))
          or save(content, file))
    try:
        text = printed("--data", byte_data, *QUICK, *gpu, "--max_steps", 6, "--val_every", 3, "--val_tokens",
                       256, "--checkpoint_every", 4, "--out", tmp_path)
    finally:
        waits.remove()
    # (is it trained, steps answered before it): evaluations of steps 0, 3 and 6, steps 0 to 5
    assert [event for event in events if type(event[0]) is bool] == [
        (False, 0), (True, 0), (True, 0), (True, 1), (False, 3), (True, 3), (True, 4), (True, 4), (False, 6)]
    assert [event for event in events if type(event[0]) is int] == [(4, 4), (6, 6)]
    lines = step_lines(text)
    assert list(lines) == list(logged(tmp_path)) == [0, 1, 2, 3, 4, 5]
    for step, row in enumerate(table(tmp_path)[:6]):
        share = 0.8 / (1 + step % 3)
        assert row["tokens_per_second"] == pytest.approx(share * 312e12 / FLOPS, rel=1e-3)
        assert f"mfu {share:.0%}" in lines[step]
    assert "peak memory 12.3 GB" in text and "NVIDIA A100-SXM4-80GB" in text


def test_a_stopped_gpu_run_has_logged_and_saved_its_last_step(gpu, hooked, byte_data, tmp_path):
    hooked(training(lambda n, output: n == 4 and signal.raise_signal(signal.SIGTERM) or None))
    text = printed("--data", byte_data, *QUICK, *gpu, "--checkpoint_every", 100, "--out", tmp_path)
    assert list(logged(tmp_path)) == [0, 1, 2, 3, 4] and newest(tmp_path) == 5
    assert "SIGTERM after 5 of 40" in text


def test_a_gpus_loss_that_is_not_finite_is_seen_before_the_save(gpu, hooked, byte_data, tmp_path,
                                                                monkeypatch):
    """The gradient is finite, and so are the weights. The save before is still being written then; the same
    command resumes from it."""
    seen, never = threading.Event(), threading.Event()

    def slow(step, save, content, file):
        assert seen.wait(20), "a save holds up the training"
        never.wait(0.2)
        save(content, file)
    saves(monkeypatch, slow)

    def not_finite(n, output):
        if n == 3:
            seen.set()
            return None, output[1] + torch.tensor(torch.nan)
    hooked(training(not_finite))
    refused(lambda: train("--data", byte_data, *QUICK, *gpu, "--checkpoint_every", 2, "--out", tmp_path),
            "step 3", "nan", "checkpoint_000002.pt", failed=True)
    assert [step for step, _ in checkpoints(tmp_path)] == [2] and list(logged(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize("full", [False, True], ids=["slow", "slow and then full"])
def test_a_run_waits_for_its_last_save_and_fails_with_it(full, gpu, hooked, byte_data, tmp_path, monkeypatch):
    """The save begins before the last evaluation, and ends after it."""
    evaluated, ended, trained = threading.Event(), threading.Event(), []

    def slow(step, save, content, file):
        assert evaluated.wait(20), "a save holds up the training"
        ended.wait(0.2)                 # of a run that waits all of it, and then it is not set
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, file)
    saves(monkeypatch, slow)

    def last_evaluation(*_):
        if torch.is_grad_enabled():
            trained.append(1)
        elif len(trained) == 3:
            evaluated.set()
    hooked(last_evaluation)
    flags = ["--data", byte_data, *QUICK, *gpu, "--max_steps", 3, "--val_every", 3, "--val_tokens", 256,
             "--out", tmp_path]
    try:
        if full:
            refused(lambda: train(*flags), "checkpoint_000003.pt", "make room", failed=True)
        else:
            text = printed(*flags)
            assert newest(tmp_path) == 3 and f"best checkpoint: {tmp_path}/checkpoint_000003.pt" in text
            assert text.index("saved ") < text.index("done: 3 steps")
    finally:
        ended.set()
    assert not list(tmp_path.glob("*.tmp")) and list(logged(tmp_path, "val")) == [0, 3]


def test_a_save_that_failed_in_the_background_ends_the_run_at_the_next_save(gpu, byte_data, tmp_path,
                                                                            monkeypatch):
    def fails(step, save, content, file):
        raise OSError(errno.EIO, "Input/output error")
    saves(monkeypatch, fails)
    refused(lambda: train("--data", byte_data, *QUICK, *gpu, "--checkpoint_every", 3, "--out", tmp_path),
            "checkpoint_000003.pt", "Input/output error", failed=True)
    assert list(logged(tmp_path)) == [0, 1, 2, 3, 4, 5] and not checkpoints(tmp_path)


# ----------------------------------------------------------------------------- stops and losses

def test_a_signal_during_a_save_stops_after_it_and_the_resume_ends_alike(byte_data, tmp_path, monkeypatch):
    flags = ["--data", byte_data, *BYTES, "--max_steps", 12, "--val_every", 6, "--checkpoint_every", 6,
             "--out"]
    train(*flags, tmp_path / "whole")

    def struck(step, save, content, file):
        save(content, file)
        os.kill(os.getpid(), signal.SIGUSR1)
    with monkeypatch.context() as patch:
        saves(patch, struck)
        text = printed(*flags, tmp_path / "log")
    assert "SIGUSR1 after 6 of 12" in text and text.count("saved ") == 1
    assert newest(tmp_path / "log") == 6 and list(logged(tmp_path / "log", "val")) == [0]
    train(*flags, tmp_path / "log")
    same_end(tmp_path / "log", tmp_path / "whole", 12)


def test_a_validation_loss_that_is_not_finite_ends_the_run_and_is_not_logged(hooked, byte_data, tmp_path):
    steps = []
    hooked(lambda module, inputs, output: steps.append(1) if torch.is_grad_enabled() else
           (None, output[1] * (torch.inf if len(steps) == 4 else 1)))
    refused(lambda: train("--data", byte_data, *QUICK, "--val_every", 2, "--val_tokens", 256,
                          "--checkpoint_every", 4, "--out", tmp_path),
            "step 4", "inf", "checkpoint_000004.pt", failed=True)
    assert list(logged(tmp_path, "val")) == [0, 2] and newest(tmp_path) == 4


def bad_gradient(bad):
    """The gradients of step n are not finite where bad(n)."""
    return training(lambda n, output: bad(n) and output[1].register_hook(
        lambda gradient: gradient * torch.nan) and None or None)


def test_float16_may_overflow_25_times_in_a_row_and_a_finite_step_begins_anew(hooked, byte_data, tmp_path):
    hooked(bad_gradient(lambda n: n not in (25, 51)))
    refused(lambda: train("--data", byte_data, *QUICK, "--n_layer", 1, "--dtype", "float16", "--max_steps",
                          200, "--checkpoint_every", 0, "--out", tmp_path), "step 77", "nan", failed=True)
    assert list(logged(tmp_path)) == list(range(77))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_end_at_the_first_gradient_that_is_not_finite(dtype, hooked, byte_data, tmp_path):
    hooked(bad_gradient(lambda n: n == 3))
    refused(lambda: train("--data", byte_data, *QUICK, "--dtype", dtype, "--checkpoint_every", 0, "--out",
                          tmp_path), "step 3", "nan", failed=True)
    assert list(logged(tmp_path)) == [0, 1, 2]


# ----------------------------------------------------------------------------- pipes

def reads_its_own_pipe(path):
    """stdout is a pipe from now on, and what has come out of it when a step begins is noted in `path`."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    sys.stdout, came = open(writer, "w", encoding="utf-8"), []

    def look(module, inputs, output):
        if is_model(module):
            with open(reader, "rb", buffering=0, closefd=False) as pipe:
                came.append((pipe.read() or b"").decode())
            path.write_text(json.dumps(came))
    register_module_forward_hook(look)


def test_each_line_reaches_a_pipe_as_soon_as_its_step_has_ended(byte_data, tmp_path):
    """`| tee`: not when a buffer of some kilobytes is full."""
    run("--data", byte_data, *QUICK, "--max_steps", 4, "--checkpoint_every", 0, "--out", tmp_path / "log",
        before=[functools.partial(reads_its_own_pipe, tmp_path / "came")])
    header, *steps = json.loads((tmp_path / "came").read_text())
    assert "256 tokens per step" in header and "loss" not in header.splitlines()[-1]
    assert [text[:12] for text in steps] == ["step     0 |", "step     1 |", "step     2 |"]
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in steps)


# ----------------------------------------------------------------------------- torchrun's restarts

@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_after_a_restart_by_torchrun_a_run_goes_on_with_its_own_jobs_checkpoint_alone(
        resume, byte_data, tmp_path, monkeypatch):
    """--resume never and --resume PATH are of the first start."""
    other = tmp_path / "other"
    flags = ["--data", byte_data, *QUICK, "--max_steps", 4, "--checkpoint_every", 2]
    train(*flags, "--checkpoint_every", 1, "--max_steps", 1, "--out", other)
    given = ["--resume", other if resume == "PATH" else resume]
    begins = {"never": 0, "PATH": 1}[resume]

    def start(job, restarts, out="log"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        text = printed(*flags, *given, "--dry_run", "--out", tmp_path / out)
        return next((int(line.split(" at step ")[1].split()[0]) for line in text.splitlines()
                     if line.startswith("resuming")), 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    train(*flags, *given, "--max_steps", 2, "--out", tmp_path / "log")
    assert newest(tmp_path / "log") == 2
    assert start("mine", 1) == start("mine", 3) == 2
    assert start("mine", 0) == start("another", 1) == start("mine", 1, out="empty") == begins
    # a job that is not torchrun's has no id
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert ("at step 2 of" in printed(*flags, *given, "--dry_run", "--out", tmp_path / "log")) is False


def test_ranks_that_are_restarted_do_not_meet_the_dead_ones(byte_data, tmp_path):
    """torchrun's store still has the addresses that these gave."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**ENV, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a"}
    call = command("train_gpt2.py", "--data", byte_data, *QUICK, "--batch_size", 4, "--max_steps", 2,
                   "--checkpoint_every", 0, "--out", tmp_path)
    keys = [store.num_keys()]
    for count in ("0", "1"):
        ends = forked(call, call, envs=[env | {"TORCHELASTIC_RESTART_COUNT": count, "RANK": rank,
                                               "LOCAL_RANK": rank} for rank in "01"])
        assert [code for code, *_ in ends] == [0, 0], ends
        keys.append(store.num_keys())
    assert keys[0] < keys[1] < keys[2], "each start has keys of its own"


# ----------------------------------------------------------------------------- file systems

@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO], ids=errno.errorcode.get)
def test_a_file_system_without_locks_will_do_and_one_that_fails_is_told(number, byte_data, tmp_path,
                                                                        monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", flock)
    flags = ["--data", byte_data, *QUICK, "--max_steps", 1, "--out", tmp_path / "log"]
    if number == errno.ENOLCK:
        train(*flags)
        assert newest(tmp_path / "log") == 1
    else:
        refused(lambda: train(*flags), tmp_path / "log", os.strerror(number))
        assert not (tmp_path / "log/log.txt").exists()


def test_a_lock_that_a_killed_process_still_holds_is_waited_for(byte_data, tmp_path, monkeypatch):
    fcntl, tries = pytest.importorskip("fcntl"), []
    flock = fcntl.flock

    def held_at_first(descriptor, how):
        tries.append(how)
        if len(tries) < 4:                  # two come at once
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        flock(descriptor, how)
    monkeypatch.setattr(fcntl, "flock", held_at_first)
    train("--data", byte_data, *QUICK, "--max_steps", 1, "--out", tmp_path / "log")
    assert newest(tmp_path / "log") == 1 and len(tries) > 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_each_kind_of_a_full_disk_is_told_as_one_even_before_the_work_has_begun(number, tmp_path):
    """Another folder on the same disk would not help, and the same command is right once there is room."""
    def full(file):
        raise OSError(number, os.strerror(number))

    def write():
        with writing(tmp_path):
            replace_file(tmp_path / "a.bin", full)
    refused(write, tmp_path / "a.bin", "make room", failed=True)
    assert not os.listdir(tmp_path)


def test_checkpoints_are_ordered_by_their_steps_beyond_a_million_too(tmp_path):
    theirs = ["checkpoint_0000001.pt", "checkpoint_12345.pt", "checkpoint_000001.pt.tmp",
              "checkpoint_best.pt", "a_checkpoint_000001.pt", "checkpoint_-00001.pt"]
    for name in (*theirs, "checkpoint_1000000.pt", "checkpoint_999999.pt", "checkpoint_000250.pt"):
        (tmp_path / name).touch()
    assert [(step, path.name) for step, path in checkpoints(tmp_path)] == [
        (step, f"checkpoint_{step:06d}.pt") for step in (250, 999_999, 1_000_000)]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_then(tmp_path, monkeypatch):
    """And its temporary name is in the same folder: a file cannot be renamed into another file system."""
    events, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else
                      os.fstat(descriptor).st_size)
        fsync(descriptor)

    def noted_replace(old, new):
        assert os.path.dirname(old) == os.path.dirname(new) == str(tmp_path) and str(os.getpid()) in str(old)
        events.append("name")
        replace(old, new)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    replace_file(tmp_path / "a.bin", lambda file: file.write(bytes(100)))
    assert events == [100, "name", "folder"] and os.listdir(tmp_path) == ["a.bin"]


def test_a_checkpoint_is_written_when_the_log_of_its_steps_is_on_the_disk(byte_data, tmp_path, monkeypatch):
    """After a loss of power a run that resumes would have a hole in its log."""
    fsync, on_disk = os.fsync, []

    def noted(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        on_disk.append((name, (tmp_path / "log.txt").read_text().count("\n")))
        fsync(descriptor)
    flags = ["--data", byte_data, *QUICK, "--max_steps", 4, "--checkpoint_every", 2, "--out", tmp_path]
    train(*flags, "--max_steps", 1)                     # so that log.txt is there
    monkeypatch.setattr(os, "fsync", noted)
    train(*flags)
    first = next(i for i, (name, _) in enumerate(on_disk) if name.startswith("checkpoint_000002"))
    assert {("log.txt", 2), ("metrics.csv", 2)} <= {*on_disk[:first]}


def test_a_file_system_that_knows_no_fsync_will_do(byte_data, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(os, "fsync", fsync)
    train("--data", byte_data, *QUICK, "--max_steps", 1, "--out", tmp_path)
    assert newest(tmp_path) == 1
