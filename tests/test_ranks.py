"""runtime/ranks.py: what is printed, what ranks agree on, and how torchrun is understood."""
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from inspect import signature

import pytest
import torch
from helpers import BYTES, ENV, HANG, ROOT, command, forked, logged, on_ranks, train
from peers import make_model
from torch.nn.parallel import DistributedDataParallel as DDP

import train_gpt2
from runtime import machines, ranks
from runtime.cli import RunError, UserError, exit_code
from runtime.ranks import Process, ddp_options, read_process

LAUNCHER = re.compile("RANK|SIZE|TORCHELASTIC|MASTER|SLURM|PMI")       # variables of launchers


class OneOfTwo(Process):
    """One of two ranks that knows beforehand what the other one says."""

    def __init__(self, rank, *answers):
        super().__init__(rank=rank, world_size=2)
        self.answers = list(answers)        # of the other rank, to each question

    def gather(self, value):
        values = [value, self.answers.pop(0)]
        if self.rank == 1:
            values.reverse()
        return values


def add(a, b):
    return a + b


def together(process, function, *args):
    with process.together():
        return function(*args)


def fail(error):
    raise error


# ----------------------------------------------------------------------- printing

@pytest.mark.parametrize("world_size", [1, 2])
def test_only_rank_0_prints(world_size, capsys):
    Process(rank=0, world_size=world_size).print0("a line")
    Process(rank=1, world_size=world_size).print0("another")
    assert capsys.readouterr().out == "a line\n"


def test_a_line_reaches_a_pipe_at_once(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        Process().print0("step 0")
        assert os.read(reader, 100) == b"step 0\n"
    os.close(reader)


def open_console(kind):
    """A stream that takes nothing."""
    if kind == "on a full disk":
        return open("/dev/full", "w")
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
@pytest.mark.parametrize("kind", ["on a full disk", "a pipe that nobody reads"])
def test_a_run_whose_console_takes_nothing_goes_on(kind, byte_data, tmp_path, monkeypatch):
    with open_console(kind) as console:
        monkeypatch.setattr(sys, "stdout", console)
        train("--data", byte_data, *BYTES, "--max_steps", 3, "--out", tmp_path)
    assert list(logged(tmp_path)) == [0, 1, 2]


# ----------------------------------------------------------------------- agreeing

def test_a_process_alone_agrees_with_itself():
    process = Process()

    assert process.sum(1, 2.5) == [1, 2.5]
    assert process.gather("a") == ["a"]
    assert process.from_master("a") == "a"
    assert together(process, add, 1, 2) == 3
    assert process.rank0_first(add, 1, 2) == 3
    process.require_same({"--seed": 1})


def say_what_ranks_agree_on():
    """Prints, on each rank, what the methods of Process return."""
    process = train_gpt2.start_process("cpu")
    own = process.rank + 1
    found = {
        "sum": process.sum(own, 10 * own),
        "gather": process.gather(f"rank {process.rank}"),
        "from_master": process.from_master(own),
        "together": together(process, add, own, 100),
        "rank0_first": process.rank0_first(add, own, 100),
    }
    print(json.dumps(found))


def test_two_ranks_add_up_and_hear_each_other():
    results = on_ranks(say_what_ranks_agree_on, say_what_ranks_agree_on)

    for rank, (code, stdout, stderr) in enumerate(results):
        assert code == 0, stderr
        assert json.loads(stdout) == {
            "sum": [3, 30],
            "gather": ["rank 0", "rank 1"],
            "from_master": 1,
            "together": 101 + rank,
            "rank0_first": 101 + rank,
        }


@pytest.mark.parametrize("error", [UserError("wrong"), RunError("failed")], ids=repr)
def test_a_mistake_of_rank_0_is_printed_as_it_is(error):
    with pytest.raises(type(error), match=f"^{error}$"):
        together(OneOfTwo(0, None), fail, error)


@pytest.mark.parametrize("error", [UserError("wrong"), RunError("failed")], ids=repr)
def test_a_mistake_of_another_rank_is_printed_by_rank_0_and_names_the_rank(error):
    with pytest.raises(type(error), match=f"^process 1: {error}$"):
        together(OneOfTwo(0, error), add, 1, 2)


@pytest.mark.parametrize("own, others", [
    (UserError("wrong"), UserError("wrong")),
    (UserError("wrong"), None),
    (RunError("failed"), None),
])
def test_other_ranks_end_in_silence_with_the_same_exit_code(own, others, capsys):
    with pytest.raises(SystemExit) as ended:
        together(OneOfTwo(1, others), fail, own)

    assert ended.value.code == exit_code(own)
    assert capsys.readouterr().err == ""


def test_other_ranks_end_with_a_mistake_that_rank_0_has():
    with pytest.raises(SystemExit) as ended:
        together(OneOfTwo(1, UserError("wrong")), add, 1, 2)
    assert ended.value.code == 2


def test_what_the_system_refuses_to_one_rank_ends_all():
    with pytest.raises(UserError, match="private"):
        together(OneOfTwo(0, None), fail, PermissionError(13, "Permission denied", "private"))


def test_a_disk_that_fails_under_one_rank_ends_all_as_a_failure_of_the_system():
    with pytest.raises(RunError, match="a.npy"):
        together(OneOfTwo(0, None), fail, OSError(errno.EIO, "Input/output error", "a.npy"))


def test_rank_0_fills_the_caches_before_the_others_look():
    calls = []

    class Noting(OneOfTwo):
        def gather(self, value):
            calls.append("all ranks have come here")
            return super().gather(value)

    Noting(0, None, None).rank0_first(calls.append, "rank 0 works")
    Noting(1, None, None).rank0_first(calls.append, "rank 1 works")

    assert calls == [
        "rank 0 works", "all ranks have come here", "all ranks have come here",
        "all ranks have come here", "rank 1 works", "all ranks have come here"]


def test_values_that_differ_between_ranks_are_named_on_rank_0(capsys):
    with pytest.raises(UserError) as error:
        OneOfTwo(0, {"--seed": 2, "--tf32": True}).require_same({"--seed": 1, "--tf32": True})
    for word in ("process 1", "--seed", "2", "1 on process 0"):
        assert word in str(error.value)
    assert "--tf32" not in str(error.value)

    with pytest.raises(SystemExit) as ended:
        OneOfTwo(1, {"--seed": 1}).require_same({"--seed": 2})
    assert ended.value.code == 2


@pytest.mark.parametrize("of_master, of_other", [({"a": 1}, {}), ({}, {"a": 1})])
def test_a_value_that_one_rank_lacks_differs(of_master, of_other):
    with pytest.raises(RunError, match="a is.*drifted"):
        OneOfTwo(0, of_other).require_same(of_master, "drifted", RunError)


def test_values_that_are_the_same_pass():
    OneOfTwo(0, {"--seed": 1}).require_same({"--seed": 1})


# ----------------------------------------------------------------------- signals

@pytest.fixture
def handlers():
    """The signal handlers are put back after the test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)       # the tests may run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_leaves_a_note_and_one_line(name, handlers, capfd):
    process = Process()
    process.catch_signals()
    assert not process.stop_requested()
    assert signal.getsignal(signal.Signals[name]) == process.on_signal

    signal.raise_signal(signal.Signals[name])

    assert process.signal == name
    assert process.stop_requested()
    assert capfd.readouterr().err == f"{name}: stopping\n"


def test_one_of_several_ranks_does_not_stop_by_itself_and_rank_0_alone_says_so(handlers, capfd):
    process = Process(rank=1, world_size=2)
    process.catch_signals()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)         # torchrun passes it on a second time

    assert process.signal == "SIGTERM"
    assert not process.stop_requested()
    assert capfd.readouterr().err == ""


def test_a_signal_that_is_ignored_stays_so(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)            # by nohup
    Process().catch_signals()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bar_passes_on_what_it_counts(rank):
    assert list(Process(rank=rank).until_stopped("validation", range(5))) == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------- torchrun's variables

@pytest.fixture
def environment(monkeypatch):
    """environment("RANK=1 ...") sets torchrun's variables, and removes the others."""
    monkeypatch.setattr(ranks, "die_with_torchrun", lambda: None)       # it would last
    def set_variables(text):
        for name in filter(LAUNCHER.search, list(os.environ)):
            monkeypatch.delenv(name)
        for pair in text.split():
            monkeypatch.setenv(*pair.split("="))
    return set_variables


@pytest.mark.parametrize("left", [
    "",
    "RANK=1",
    "RANK=1 LOCAL_RANK=1",
    "RANK=x",
    "WORLD_SIZE= RANK=1",
    "WORLD_SIZE=1 RANK=3 LOCAL_RANK=3",
])
def test_a_process_alone_is_rank_0_whatever_another_job_has_left(left, environment):
    environment(left)
    assert read_process() == Process(rank=0, local_rank=0, world_size=1)


def test_torchruns_variables_are_a_rank(environment):
    environment("WORLD_SIZE=16 RANK=9 LOCAL_RANK=1")

    assert read_process() == Process(rank=9, local_rank=1, world_size=16)
    environment("WORLD_SIZE=2 RANK=1")
    assert read_process() == Process(rank=1, local_rank=0, world_size=2)


TORCHRUN = "LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a MASTER_ADDR=localhost MASTER_PORT=41007"
OPEN_MPI = "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_UNIVERSE_SIZE=2"
IN_A_JOB = "SLURM_JOB_ID=2 SLURM_NNODES=2 SLURM_NTASKS=2 SLURM_NPROCS=2 SLURM_JOB_NUM_NODES=2"


@pytest.mark.parametrize("found, rank, world_size", [
    # torchrun, and what starts it: torchx, `accelerate launch --multi_gpu`, `ray job submit`
    (f"WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 {TORCHRUN}", 1, 2),
    (f"WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 {TORCHRUN}", 0, 1),
    (f"WORLD_SIZE=4 RANK=3 LOCAL_RANK=1 {TORCHRUN} {IN_A_JOB} SLURM_STEP_NUM_TASKS=2 "
     "SLURM_PROCID=1", 3, 4),
    # deepspeed 0.19.8
    ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_SIZE=1 MASTER_ADDR=127.0.0.1", 1, 2),
    # `accelerate launch --cpu` 1.15.0 starts one process
    ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", 0, 1),
    # Slurm 22.05.8: a batch script of a job of two tasks; `srun --ntasks=1` in it
    (f"{IN_A_JOB} SLURM_PROCID=0", 0, 1),
    (f"{IN_A_JOB} SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", 0, 1),
    # Open MPI 4.1.4 and MPICH 4.0.2 with `-n 1`
    (f"OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 {OPEN_MPI}", 0, 1),
    ("PMI_SIZE=1 PMI_RANK=0", 0, 1),
    # runs of their own, as srun and mpirun start them, with WORLD_SIZE=1 in front of the command
    (f"WORLD_SIZE=1 {IN_A_JOB} SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=3", 0, 1),
    (f"WORLD_SIZE=1 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=3 {OPEN_MPI}", 0, 1),
])
def test_what_launchers_set_is_a_rank(found, rank, world_size, environment):
    environment(found)
    process = read_process()
    assert (process.rank, process.world_size) == (rank, world_size)


@pytest.mark.parametrize("launcher, size, rank", [
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),               # Slurm 22.05.8
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),     # Open MPI 4.1.4
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),                            # MPICH 4.0.2
])
def test_processes_that_would_train_alone_are_told_by_the_first_of_them(
        launcher, size, rank, environment):
    environment(f"{size}=8 {rank}=0 {IN_A_JOB}")
    with pytest.raises(UserError, match=f"{launcher} .* 8 .*torchrun.*WORLD_SIZE=1"):
        read_process()

    environment(f"{size}=8 {rank}=3 {IN_A_JOB}")
    with pytest.raises(SystemExit) as ended:
        read_process()
    assert ended.value.code == 2


def test_two_tasks_of_srun_write_nothing_and_print_one_line(byte_data, tmp_path):
    call = command("train_gpt2.py", "--data", byte_data, *BYTES, "--out", tmp_path / "log")
    envs = []
    for rank in range(2):
        envs.append({**ENV, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)})

    results = forked(call, call, envs=envs)

    assert [code for code, _, _ in results] == [2, 2], results
    assert [stderr.count("\n") for _, _, stderr in results] == [1, 0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left, name", [
    ("WORLD_SIZE=two", "WORLD_SIZE"),
    ("WORLD_SIZE=0", "WORLD_SIZE"),
    ("WORLD_SIZE=-1 RANK=0", "WORLD_SIZE"),
    ("WORLD_SIZE=2", "RANK"),
    ("WORLD_SIZE=2 RANK=x", "RANK"),
    ("WORLD_SIZE=2 RANK=2", "RANK"),
    ("WORLD_SIZE=2 RANK=-1", "RANK"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=x", "LOCAL_RANK"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=-1", "LOCAL_RANK"),
])
def test_variables_that_no_torchrun_has_set_are_named(left, name, environment):
    environment(left)
    with pytest.raises(UserError, match=f"{name}.*torchrun"):
        read_process()


def test_a_mistake_in_the_flags_is_printed_by_rank_0_alone(environment, capsys):
    environment("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=a")
    with pytest.raises(UserError, match="--n_head 0"):
        train("--n_head", 0)

    environment("WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=a")
    with pytest.raises(SystemExit) as ended:
        train("--n_head", 0)

    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", [
    ["--local_rank", "1"], ["--local-rank", "1"], ["--local_rank=1"], ["--local-rank=1"]])
def test_a_rank_among_the_flags_is_ignored(flags):
    """torch.distributed.launch and deepspeed put it there."""
    given = train_gpt2.FLAGS.parse("", ["--max_steps", "5", *flags])
    assert given == {"max_steps": 5}


@pytest.mark.parametrize("also, patience, words", [
    ("", 0.0, ["process 2", "10.0.0.7:29500", "3 other", "WORLD_SIZE"]),
    ("", 100.0, []),                                    # deepspeed sets all that is needed
    ("TORCHELASTIC_RUN_ID=none", 0.0, []),
])
def test_who_waits_long_without_torchrun_says_for_how_many_and_where(
        also, patience, words, environment, monkeypatch, capsys):
    def wait(*args, **options):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and patience == 0.0:
                thread.join(HANG)
        raise TimeoutError("nobody came")

    environment("WORLD_SIZE=4 RANK=2 MASTER_ADDR=10.0.0.7 MASTER_PORT=29500 " + also)
    monkeypatch.setattr(machines, "WAIT_TOLD_AFTER", patience)
    monkeypatch.setattr(torch.distributed, "rendezvous", wait)
    with pytest.raises(TimeoutError):
        train_gpt2.start_process("cpu")

    line = capsys.readouterr().err
    assert line.count("\n") == min(len(words), 1)
    for word in words:
        assert word in line


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_does_not_know_where_the_others_are_says_so(
        missing, environment, monkeypatch):
    environment("WORLD_SIZE=4 RANK=0 MASTER_ADDR=10.0.0.7 MASTER_PORT=29500")
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=f"{missing}.*torchrun"):
        train_gpt2.start_process("cpu")


def test_ranks_wait_an_hour_for_what_rank_0_downloads(environment, monkeypatch):
    given = {}
    environment("WORLD_SIZE=2 RANK=1 TORCHELASTIC_RUN_ID=none")
    monkeypatch.setattr(machines, "shared_store", lambda process, timeout: None)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **options: given.update(options))

    train_gpt2.start_process("cpu")

    assert given["timeout"] == timedelta(hours=1)


def test_torchrun_itself_starts_ranks_that_have_the_losses_of_one_process(byte_data, tmp_path):
    """The one run here that is not forked: its processes import all that they need."""
    flags = ["--data", byte_data, *BYTES, "--max_steps", 2, "--val_every", 0]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [*torchrun, ROOT / "train_gpt2.py", *flags, "--out", tmp_path / "two"]

    result = subprocess.run(
        [str(word) for word in words], env=ENV, capture_output=True, text=True, timeout=HANG)

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done: 2 steps") == 1
    train(*flags, "--out", tmp_path / "one")
    assert len(logged(tmp_path / "two")) == 2
    for column in ("train", "norm"):
        expected = logged(tmp_path / "one", column)
        assert logged(tmp_path / "two", column) == pytest.approx(expected, rel=2e-5)


# ----------------------------------------------------------------------- DDP

@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ddp_sends_no_buffers_and_gpus_do_not_wait_an_hour_in_a_step(device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "new_group", lambda timeout: timeout)
    options = ddp_options(make_model(), Process(device=device, world_size=2))

    if device == "cuda:1":
        assert options["device_ids"] == ["cuda:1"]
        assert options["process_group"] == timedelta(minutes=10)
    else:
        assert "device_ids" not in options
        assert "process_group" not in options
    buffers = options.get("broadcast_buffers", options.get("forward_sync_buffers"))
    assert buffers is False
    assert options.keys() <= signature(DDP).parameters.keys()
