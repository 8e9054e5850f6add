"""Nothing lost: kills, signals, restarts by torchrun, full disks, changed data, in real processes."""
import copy
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from helpers import ENV, ROOT, Live, command, limit_file_size, logged, run

from model import GPT, GPTConfig, load_model
from runtime.checkpoint import Saver, host_copy
from runtime.cli import RunError, UserError
from runtime.dataloader import TokenDataset
from runtime.distributed import Process
from runtime.files import checkpoints, replace_file
from runtime.console import read_metrics
from runtime.resume import choose_checkpoint, merge_config
from runtime.shards import write_shard
from runtime.signals import StopSignals
from runtime.weights import read_checkpoint
import runtime.files
import train_gpt2

pytest.importorskip("fcntl")                # Windows has no such kills

# Bytes instead of GPT-2's tokens: 60 steps take half a second. 36 steps are an epoch, of three shards of odd
# lengths.
BYTES = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--vocab_size", "256",
         "--dtype", "float32",
         "--total_batch_size", "256", "--max_steps", "60", "--warmup_steps", "5", "--hellaswag_every", "0",
         "--val_every", "20",
         "--val_tokens", "1000", "--sample_every", "0", "--checkpoint_every", "10", "--keep_checkpoints", "2"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tokens = np.frombuffer((ROOT / "input.txt").read_bytes()[:12_001], dtype=np.uint8).astype(np.uint16)
    for i, (a, b) in enumerate(((0, 2500), (2500, 6000), (6000, 7517), (7517, 12001))):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The run that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "log"
    run("--data", data, *BYTES, "--out", out)
    return out


@pytest.fixture(scope="session")
def whole_speedrun(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole_speedrun") / "log"
    run("--data", data, *BYTES, "--recipe", "speedrun", "--max_steps", 40, "--out", out)
    return out


@pytest.fixture(scope="session")
def whole_frontier(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole_frontier") / "log"
    run("--data", data, *BYTES, "--recipe", "frontier", "--max_steps", 40, "--out", out)
    return out


@pytest.fixture(params=["gpt2", "speedrun", "frontier"])
def recipe_and_whole(request):
    """A recipe, how many steps its run makes, and that run. Fewer where a step takes longer."""
    name = "whole" if request.param == "gpt2" else f"whole_{request.param}"
    return request.param, 60 if request.param == "gpt2" else 40, request.getfixturevalue(name)


def same_end(out, whole, step=60):
    """The log byte for byte, metrics.csv but for its times, weights and moments bit for bit, and nothing else
    in the folder."""
    assert (out / "log.txt").read_bytes() == (whole / "log.txt").read_bytes()
    rows = [[{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
             for row in read_metrics(folder / "metrics.csv")] for folder in (out, whole)]
    assert rows[0] == rows[1] and len(rows[0]) == step + 1
    a, b = (read_checkpoint(folder / f"checkpoint_{step:06d}.pt") for folder in (whole, out))
    assert a["model"].keys() == b["model"].keys() and all(torch.equal(a["model"][name], b["model"][name])
                                                          for name in a["model"])
    for before, after in zip(a["optimizers"], b["optimizers"], strict=True):
        for i, entry in before["state"].items():
            assert all(torch.equal(entry[key], after["state"][i][key]) for key in entry)
    assert not list(out.glob("*.tmp"))


def newest(out):
    return checkpoints(out)[-1][0]


@pytest.fixture
def live(tmp_path):
    """live(*flags, hold=steps) starts a run that stands still before those steps (helpers.Live); none
    outlives the test."""
    started = []

    def start(*flags, processes=1, torchrun=("--standalone",), argv=None, **how):
        argv = argv or command(*flags, processes=processes, torchrun=torchrun)
        started.append(Live(tmp_path / "live" / str(len(started)), argv, **how))
        return started[-1]
    yield start
    for process in started:
        process.kill()


@pytest.fixture
def stopped(live):
    """stopped(step, flags, number) sends a run a signal before `step`, and gives its (exit code, stdout,
    stderr)."""
    def stop(step, flags, number, to=os.kill, processes=1):
        it = live(*flags, hold=[step], processes=processes)
        it.stands_before(step, range(processes))
        to(it.process.pid, number)
        if number != signal.SIGKILL:            # torchrun passes it on when it comes to that
            it.until(lambda: f"{signal.Signals(number).name}: stopping at the next" in it.stdout())
        it.go_on(step)
        return it.end()
    return stop


def test_killed_at_random_moments_it_ends_bit_for_bit_as_the_run_that_was_not(data, recipe_and_whole,
                                                                              tmp_path, live):
    """SIGKILL and SIGTERM in turn, over shard edges and epochs; before the first step too."""
    recipe, steps, whole = recipe_and_whole
    dice = random.Random(7)
    flags = ["--data", data, *BYTES, "--recipe", recipe, "--max_steps", steps, "--out", tmp_path / "log"]
    for i, step in enumerate((0, 13, 30, 38, 47)[:5 if recipe == "gpt2" else 3]):
        # the second, so that it does not end before the signal is there
        it = live(*flags, hold=[step, step + 7])
        it.stands_before(step)
        it.go_on(step)
        time.sleep(dice.uniform(0, 0.05))               # somewhere in the steps up to there
        it.process.send_signal((signal.SIGKILL, signal.SIGTERM)[i % 2])
        it.go_on(step + 7)
        code, stdout, stderr = it.end()
        assert code == (-signal.SIGKILL, 0)[i % 2] and not stderr, stderr
        assert ("stopped by SIGTERM" in stdout and "the same command resumes" in stdout) == i % 2
    run(*flags)
    same_end(tmp_path / "log", whole, steps)
    # and once more: nothing is left to do, and what is not given comes from the checkpoint
    assert f"done: {steps} steps" in run("--data", data, "--out", tmp_path / "log").stdout
    same_end(tmp_path / "log", whole, steps)


def test_a_stop_saves_before_an_evaluation_that_is_due_and_the_next_run_makes_it(data, tmp_path, stopped):
    flags = ["--data", data, *BYTES, "--max_steps", 30, "--val_every", 1]
    run(*flags, "--out", tmp_path / "whole")
    code, stdout, _ = stopped(12, [*flags, "--out", tmp_path / "cut"], signal.SIGUSR1)
    assert code == 0
    at = checkpoints(tmp_path / "cut")[-1][0]
    assert 12 < at < 30 and max(logged(tmp_path / "cut", "val")) == at - 1
    run(*flags, "--out", tmp_path / "cut")
    same_end(tmp_path / "cut", tmp_path / "whole", 30)


@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_a_pipe_that_closes_stops_the_run_which_saves_first(number, data, whole, tmp_path, live):
    """`| head` that has enough; `| tee` that got the same Ctrl-C."""
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    it = live(*flags, hold=[13], stdout=subprocess.PIPE)
    it.stands_before(13)
    it.process.stdout.close()
    if number:
        it.process.send_signal(number)
        time.sleep(1.1)                 # the closed pipe, found later, is no second signal
    it.go_on(13)
    code, _, stderr = it.end()
    assert (code, stderr) == (0, "")
    assert 13 <= checkpoints(tmp_path / "log")[-1][0] < 60
    run(*flags)
    same_end(tmp_path / "log", whole)


AT_THE_END = """
import atexit, os
if "RANK" in os.environ:
    def left(what, path=os.environ["ENDS"], rank=os.environ["RANK"], open=os.open, create=os.O_CREAT):
        open(f"{path}/{what}.{rank}", create)
    class Finalized:
        def __del__(self, left=left):
            left("finalization")
    alive = Finalized()
    atexit.register(left, "atexit")
"""


@pytest.fixture(scope="session")
def whole_of_two(data, tmp_path_factory):
    """The run of two processes that nobody disturbs, and what they left at their ends."""
    folder = tmp_path_factory.mktemp("whole_of_two")
    folder.joinpath("sitecustomize.py").write_text(AT_THE_END)
    run("--data", data, *BYTES, "--max_steps", 40, "--out", folder / "log", processes=2,
        cold=True, env={**ENV, "PYTHONPATH": str(folder), "ENDS": str(folder)})
    return folder / "log", sorted(path.name for path in folder.glob("*.*[0-9]"))


def test_processes_do_what_is_registered_for_the_end_and_leave_before_pythons_finalization(whole_of_two):
    """In which a gloo thread may abort the process."""
    assert whole_of_two[1] == ["atexit.0", "atexit.1"]


def test_a_signal_to_all_of_several_processes_is_agreed_on_saved_and_gone_on_from(data, whole_of_two,
                                                                                  tmp_path, stopped):
    """The moments shared out at first, and not later; the run that nobody disturbs has them on each."""
    flags = ["--data", data, *BYTES, "--max_steps", 40, "--out", tmp_path / "cut"]
    # to the group, as a terminal sends it: torchrun sends it on
    stopped(13, [*flags, "--shard_optimizer"], signal.SIGINT, os.killpg, processes=2)
    assert 13 <= checkpoints(tmp_path / "cut")[-1][0] < 40
    # to torchrun alone, as Slurm's --signal=TERM sends it
    stopped(25, flags, signal.SIGTERM, processes=2)
    assert 25 <= checkpoints(tmp_path / "cut")[-1][0] < 40
    run(*flags, processes=2)
    same_end(tmp_path / "cut", whole_of_two[0], 40)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_stops_between_micro_steps_and_the_resume_repeats_the_whole_step(
        processes, data, tmp_path, stopped):
    """Four micro-steps a step or more: the signal comes within the first."""
    flags = ["--data", data, *BYTES, "--batch_size", 1, "--max_steps", 20, "--out", tmp_path / "cut"]
    code, stdout, _ = stopped(13, flags, signal.SIGTERM, os.killpg, processes)
    assert newest(tmp_path / "cut") == 13 and max(logged(tmp_path / "cut")) == 12
    assert "after 13 of 20 steps" in stdout and "a resume repeats what is unfinished" in stdout
    if processes == 1:
        run(*flags)
        run(*[tmp_path / "one" if flag == tmp_path / "cut" else flag for flag in flags])
        same_end(tmp_path / "cut", tmp_path / "one", 20)


def test_a_signal_during_evaluation_ends_it_and_the_resume_makes_the_whole_evaluation(data, whole, tmp_path,
                                                                                      monkeypatch):
    """In the middle of the validation at step 20, and at step 40 after it: log.txt has each once."""
    captured, read = [], TokenDataset.read
    monkeypatch.setattr(StopSignals, "install", lambda signals: captured.append(signals) or signals)
    reads, evaluate = [], train_gpt2.evaluate

    def reading(dataset, first, count):
        # not the thread that reads ahead for training
        if captured and captured[-1].process.evaluating and dataset is captured[-1].process.validated:
            reads.append(first)
            captured[-1].received = "SIGTERM" if len(reads) == 2 else captured[-1].received
        return read(dataset, first, count)

    def evaluating(run, due):
        run.process.evaluating = run.state.step == 20 and len(captured) == 1
        run.process.validated = run.data.val
        evaluate(run, due)
        run.process.evaluating = False
        if run.state.step == 40 and len(captured) == 2:
            run.signals.received = "SIGTERM"
    monkeypatch.setattr(Process, "evaluating", False, raising=False)
    monkeypatch.setattr(TokenDataset, "read", reading)
    monkeypatch.setattr(train_gpt2, "evaluate", evaluating)
    flags = ["--data", str(data), *BYTES, "--out", str(tmp_path / "log"), "--no_plot", "--batch_size", "2"]
    assert train_gpt2.train(flags) == 0 and len(reads) == 2
    assert newest(tmp_path / "log") == 20 and 20 not in logged(tmp_path / "log", "val")
    assert train_gpt2.train(flags) == 0 and newest(tmp_path / "log") == 40
    assert train_gpt2.train(flags) == 0
    before = [line.split()[:2] for line in (whole / "log.txt").read_text().splitlines()]
    after = [line.split()[:2] for line in (tmp_path / "log/log.txt").read_text().splitlines()]
    assert after == before
    a, b = (read_checkpoint(folder / "checkpoint_000060.pt")["best"] for folder in (whole, tmp_path / "log"))
    assert a[1] == b[1]


@pytest.mark.parametrize(("first", "second", "ends"), [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 143),
                                                       ("SIGUSR1", "SIGTERM", None)])
def test_a_second_signal_stops_at_once_but_not_after_slurms_warning(first, second, ends, data, tmp_path,
                                                                    live):
    it = live("--data", data, *BYTES, "--out", tmp_path / "log", hold=[1])
    it.stands_before(1)                                 # in the midst of a step, which never ends
    it.process.send_signal(signal.Signals[first])
    it.until(lambda: f"{first}: stopping at the next" in it.stdout())
    time.sleep(1.1)                                     # before that it counts as the same one, come twice
    it.process.send_signal(signal.Signals[second])
    if not ends:
        it.go_on(1)
    code, stdout, stderr = it.end()
    assert code == (ends or 0)
    assert bool(checkpoints(tmp_path / "log")) == ("stopped by" in stdout) == (not ends)


def test_a_run_goes_on_with_other_processes_and_micro_batches_as_it_would_have_gone(data, recipe_and_whole,
                                                                                    tmp_path, stopped):
    recipe, steps, whole = recipe_and_whole
    flags = ["--data", data, *BYTES, "--recipe", recipe, "--max_steps", steps, "--out", tmp_path / "log"]
    B = 2 if recipe == "frontier" else 4        # of a step's 8 sequences an update of it has 2
    stopped(33, [*flags, "--batch_size", B], signal.SIGKILL)
    assert "checkpoint_000030.pt at step 30" in run(*flags, "--batch_size", B // 2, processes=2).stdout
    a, b = logged(whole), logged(tmp_path / "log")
    assert a.keys() == b.keys() and max(abs(a[step] - b[step]) for step in a) < (1e-4 if recipe == "gpt2"
                                                                                 else 2e-3)


def test_torchrun_brings_a_run_back_whose_ranks_are_killed(data, whole_of_two, tmp_path, live):
    """--max_restarts: rank 0 is killed, then rank 1; it ends as if nothing had happened, and bit for bit as
    with the moments on each rank."""
    it = live("--data", data, *BYTES, "--max_steps", 40, "--shard_optimizer", "--out", tmp_path / "log",
              processes=2, torchrun=["--standalone", "--max_restarts=3"], hold=[14, 27])
    for step, victim in ((14, 0), (27, 1)):
        os.kill(it.stands_before(step, (0, 1))[victim], signal.SIGKILL)
        it.go_on(step)
    code, stdout, stderr = it.end()
    assert code == 0, stderr
    assert re.findall(r"resuming from .*/checkpoint_(\d+)\.pt", stdout) == ["000010", "000020"]
    same_end(tmp_path / "log", whole_of_two[0], 40)


def new_store():
    """What torchrun would keep for the processes of a run, on a port that nobody else can have taken
    meanwhile."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_process_that_is_left_says_once_that_another_was_killed(data, tmp_path, live):
    """Two processes without torchrun, which may end the one that is left before it has said its line."""
    jobs, stores = [], [new_store(), new_store()]
    for victim, store in enumerate(stores):
        env = {**ENV, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
               "TORCHELASTIC_USE_AGENT_STORE": "True"}
        jobs.append([live("--data", data, *BYTES, "--out", tmp_path / str(victim), hold=[14],
                          env=env | {"RANK": str(rank)})
                     for rank in (0, 1)])
    for victim, ranks in enumerate(jobs):
        for rank, it in enumerate(ranks):
            it.stands_before(14, [rank])
        os.kill(ranks[victim].process.pid, signal.SIGKILL)
        for it in ranks:
            it.go_on(14)
    for victim, ranks in enumerate(jobs):
        assert ranks[victim].end()[0] == -signal.SIGKILL
        code, _, stderr = ranks[1 - victim].end()
        assert code == 1 and [step for step, _ in checkpoints(tmp_path / str(victim))] == [10]
        who = "" if victim else "process 1: "
        assert re.fullmatch(rf"train_gpt2.py: {who}another process was killed, or its machine lost; .*\n",
                            stderr), stderr


def test_after_a_restart_by_torchrun_resume_never_or_a_path_is_not_obeyed_a_second_time(whole, tmp_path,
                                                                                        monkeypatch):
    shutil.copytree(whole, tmp_path / "log")
    newest = tmp_path / "log/checkpoint_000060.pt"

    def choice(resume, restarted):
        return choose_checkpoint(train_gpt2.Config(out=str(tmp_path / "log"), resume=resume), restarted)

    assert choice("never", False) is None and choice("a.pt",
                                                     False).name == "a.pt" and choice("auto", False) == newest
    assert choice("never", True) == choice("a.pt", True) == choice("auto", True) == newest
    # a checkpoint of before: not made by this command
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another job")
    assert choice("never", True) is None and choice("a.pt", True).name == "a.pt"


@pytest.fixture
def two_machines(live):
    """Two agents of torchrun over loopback, each with a process of its own and its own flags. They meet at
    a store of ours."""
    store = new_store()

    def start(flags, **how):
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
                    "--rdzv_id=test",
                    f"--rdzv_endpoint=127.0.0.1:{store.port}", "--rdzv_conf=is_host=0",
                    "--local_addr=127.0.0.1"]
        return [live(argv=[sys.executable, *torchrun, str(ROOT / "train_gpt2.py"), *map(str, own)], **how)
                for own in flags]
    return start


def test_two_machines_train_together(data, whole, tmp_path, two_machines):
    flags = ["--data", data, *BYTES, "--no_plot", "--out", tmp_path / "log"]
    for agent in two_machines([flags, flags]):
        code, stdout, stderr = agent.end()
        assert code == 0, stdout + stderr
    a, b = logged(whole), logged(tmp_path / "log")
    assert a.keys() == b.keys() and max(abs(a[step] - b[step]) for step in a) < 1e-4


@pytest.mark.parametrize("failure", ["other data", "no data", "changes under process 0", "changes under "
                                     "process 1"])
def test_a_machine_that_fails_ends_the_job_and_says_why_once(failure, data, tmp_path, two_machines):
    """With process 0 goes torchrun's store, in which the other would see that all was said."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(data, folder)
    if failure == "other data":
        write_shard(folders[1] / "text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
    elif failure == "no data":
        shutil.rmtree(folders[1])
    flags = [*BYTES, "--max_steps", 3000, "--val_every", 0, "--no_plot", "--out", tmp_path / "log"]
    agents = two_machines([["--data", folder, *flags] for folder in folders], hold=[12])
    said = {"other data": "another content of --data",
            "no data": "there is no data in"}.get(failure, "changed during the run")
    if "changes" in failure:
        rank = failure[-1]
        # which of the two becomes process 0 is torchrun's choice
        for agent, folder in zip(agents, folders, strict=True):
            stands, = agent.until(lambda agent=agent: list(agent.folder.glob("rank[01].12")))
            if stands.name == f"rank{rank}.12":
                write_shard(folder / "text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
        for agent in agents:
            agent.go_on(12)
    ends = [agent.end() for agent in agents]    # not after half an hour, the patience of a collective
    assert all(code for code, *_ in ends)
    output = "".join(stdout + stderr for _, stdout, stderr in ends)
    ours = [line for line in output.splitlines() if line.startswith("train_gpt2.py: ")]
    assert len(ours) == 1 and re.match(f"train_gpt2.py: .*{said}", ours[0]), output[-3000:]
    assert "changes" not in failure or ours[0].startswith("train_gpt2.py: process 1: ") == (rank == "1")


def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_nothing_but_that_checkpoint(data, whole,
                                                                                             tmp_path,
                                                                                             stopped):
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    stopped(25, flags, signal.SIGTERM)
    before = {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*.pt")}
    size = min(map(len, before.values()))
    result = run(*flags, code=1, preexec_fn=limit_file_size(size // 2))
    said = r"train_gpt2.py: cannot write .*checkpoint_0000\d0.pt \(File too large\): make room.*\n"
    assert re.fullmatch(said, result.stderr)
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*checkpoint*")} == before
    run(*flags)
    same_end(tmp_path / "log", whole)


def test_a_full_file_system_is_told_in_one_line(data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk],
                      capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        result = run("--data", data, *BYTES, "--out", disk / "log", "--keep_checkpoints", 0, code=1)
        kept = checkpoints(disk / "log")
        said = r"train_gpt2.py: cannot write .*\.pt \(No space left on device\): make room.*\n"
        assert re.fullmatch(said, result.stderr)
        assert kept and all(read_checkpoint(path)["step"] == step
                            for step, path in kept) and not list(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", disk])


def shards_changed(kind, folder):
    path = folder / "text_train_000002.npy"
    tokens = np.load(path)
    if kind == "replaced":
        np.save(path, tokens[::-1].copy())
    elif kind == "one token":
        tokens[len(tokens) // 2] += 1
        np.save(path, tokens)
    elif kind == "shortened":
        np.save(path, tokens[:-40])
    elif kind == "one more":
        np.save(folder / "text_train_000004.npy", tokens)
    elif kind == "one less":
        (folder / "text_train_000003.npy").unlink()
    elif kind == "in another order":
        (folder / "text_train_000001.npy").rename(folder / "text_train_000004.npy")
    elif kind == "validation":
        np.save(folder / "text_val_000000.npy", np.load(folder / "text_val_000000.npy")[:-40])


@pytest.mark.parametrize("kind", ["replaced", "one token", "shortened", "one more", "one less",
                                  "in another order", "validation"])
def test_other_data_than_the_runs_is_refused_with_both_described(kind, data, whole, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shutil.copytree(whole, tmp_path / "log")
    shards_changed(kind, tmp_path / "data")
    with pytest.raises(UserError, match=r"was trained on other \w+ shards: \d.*, and .* has .*differs was .* "
                       "and is .*--init"):
        train_gpt2.train(["--data", str(tmp_path / "data"), "--out", str(tmp_path / "log"), "--max_steps",
                          "200"])
    assert (tmp_path / "log/log.txt").read_bytes() == (whole / "log.txt").read_bytes()


def test_the_same_data_in_another_folder_and_format_is_the_same_data(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    (tmp_path / "data").mkdir()
    for path in data.iterdir():
        write_shard(tmp_path / "data" / path.with_suffix(".bin").name, np.load(path))
    assert "done: 60 steps" in run("--data", tmp_path / "data", "--out", tmp_path / "log").stdout


def test_a_second_run_in_the_same_folder_is_refused(data, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "log")
    monkeypatch.setattr(runtime.files, "LOCK_PATIENCE", (None, 0.1))
    monkeypatch.setattr(runtime.files, "holder", lambda path: None)
    with (FileLock(tmp_path / "log" / runtime.files.LOCK_NAME),
          pytest.raises(UserError, match="another run is writing there")):      # on another machine
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log")])
    assert (tmp_path / "log" / runtime.files.LOCK_NAME).exists()            # else a third run would begin
    with pytest.raises(UserError, match="--n_layer 2, not 3"):  # free again, and freed again after a mistake
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log"), "--n_layer", "3"])
    with pytest.raises(UserError, match="--n_layer 2, not 3"):
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log"), "--n_layer", "3"])


def test_a_second_run_of_the_same_machine_is_refused_soon_and_told_by_which_process(data, tmp_path, live):
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    it = live(*flags, hold=[1])
    it.stands_before(1)
    result = run(*flags, code=2)
    assert f"process {it.process.pid} of this machine is writing there" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and "another run is writing to" in result.stdout


def test_what_was_derived_is_derived_anew_on_a_resume_and_the_data_come_from_the_checkpoint(data, tmp_path):
    run("--data", data, *BYTES, "--max_steps", 10, "--max_lr", 1e-3, "--out", tmp_path / "log")
    run("--out", tmp_path / "log", "--max_lr", 5e-5, "--max_steps", 20)         # below the old tenth
    checkpoint = read_checkpoint(tmp_path / "log/checkpoint_000020.pt")
    assert checkpoint["config"]["min_lr"] == pytest.approx(5e-6)
    assert checkpoint["config"]["data"] == str(data)
    assert checkpoint["derived"] == ["sequence_length", "min_lr"]
    with pytest.raises(UserError, match="there is no data in .*nowhere"):
        train_gpt2.train(["--out", str(tmp_path / "log"), "--data", str(tmp_path / "nowhere")])


def nested(depth):
    return (nested(depth - 1),) * 2 if depth else ()


@pytest.mark.parametrize(("derived", "min_lr"), [
    (None, 6e-5), (["min_lr"], -1), ([], 6e-5), (["n_layer"], 6e-5), (["nothing"], 6e-5),
    ([["min_lr"]], 6e-5), ([nested(60)], 6e-5)])
def test_what_older_and_strange_checkpoints_say_of_derived_flags(derived, min_lr, whole):
    """`whole` was trained at 6e-4. To hash what is nested would never end."""
    checkpoint = read_checkpoint(whole / "checkpoint_000060.pt")
    del checkpoint["derived"]
    flags, given = train_gpt2.parse_flags(["--max_steps", "200"])
    more = {} if derived is None else {"derived": derived}
    config = merge_config(flags, given, checkpoint | more, Path("x"))
    assert (config.min_lr, config.n_layer) == (pytest.approx(min_lr), 2)
    with pytest.raises(UserError, match="x does not hold the state of a run"):
        merge_config(flags, given, checkpoint | {"derived": 3}, Path("x"))


def test_a_resume_with_another_init_or_preset_is_refused(data, whole, tmp_path):
    """The shape of the checkpoint would win, without a word."""
    run("--data", data, *BYTES, "--max_steps", 10, "--init", whole, "--out", tmp_path / "tuned")
    again = ["--data", str(data), "--out", str(tmp_path / "tuned")]
    assert "done: 10 steps" in run(*again, "--init", whole).stdout
    with pytest.raises(UserError, match=f"was trained with --init {whole}, not {whole / 'best'}"):
        train_gpt2.train([*again, "--init", str(whole / "best")])
    # the weights' shape wins over that of a preset, and the same command resumes
    merge_config(*train_gpt2.parse_flags([*again, "--preset", "gpt2-medium", "--init", str(whole)]),
                 read_checkpoint(tmp_path / "tuned/checkpoint_000010.pt"), Path("x"))
    with pytest.raises(UserError, match=r"was trained with --n_\w+ \d+, not \d+: give the same, or"):
        train_gpt2.train([*again, "--preset", "gpt2-medium"])


def test_samples_that_a_signal_interrupts_are_made_by_the_resumed_run(data, tmp_path, monkeypatch, capsys):
    captured, real = [], train_gpt2.print_samples
    monkeypatch.setattr(StopSignals, "install", lambda signals: captured.append(signals) or signals)

    def interrupted(*args, stop):
        if len(captured) == 1:
            captured[0].received = "SIGTERM"
        real(*args, stop=stop)
    monkeypatch.setattr(train_gpt2, "print_samples", interrupted)
    flags = ["--data", str(data), *BYTES, "--vocab_size", "50304", "--max_steps", "4", "--val_every", "0",
             "--sample_every", "2", "--checkpoint_every", "4", "--out", str(tmp_path / "log"), "--no_plot"]
    assert train_gpt2.train(flags) == 0
    assert "sample 0" not in capsys.readouterr().out and newest(tmp_path / "log") == 2
    assert train_gpt2.train(flags) == 0
    assert capsys.readouterr().out.count("sample 0: ") == 2 and newest(tmp_path / "log") == 4


def test_the_docs_list_the_flags_that_a_resume_takes_or_refuses():
    text = (ROOT / "docs/running.md").read_text()
    for kind, begin in (("fixed", "cannot change on resume"), ("per_run", "never taken from the checkpoint")):
        listed = set(re.findall(r"`--(\w+)`", text.split(begin)[1].split("\n- ")[0]))
        assert listed == {f.name for f in dataclasses.fields(train_gpt2.Config) if f.metadata.get(kind)}, kind


def test_resume_takes_a_runs_folder_and_of_another_path_tells_what_is_there(data, whole, tmp_path):
    result = run("--data", data, "--out", tmp_path / "other", "--resume", whole, "--dry_run")
    assert f"resuming from {whole}/checkpoint_000060.pt at step 60 of 60" in result.stdout
    (tmp_path / "log").mkdir()
    (tmp_path / "log/run").symlink_to(whole)
    for given, words in (("nowhere", "--resume nowhere is neither a checkpoint nor a run's folder here"),
                         ("log/nope", "log/nope is not there: log has log/run: give that"),
                         ("log", "log has log/run: give that"),
                         ("log/run/checkpoint_000777.pt", "_000777.pt is not a file: log/run has"),
                         ("gpt2", "start a new run from a model's weights by --init")):
        result = run("--data", data, "--resume", given, code=2, cwd=tmp_path)
        assert words in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    older = checkpoints(tmp_path / "log")[0]
    (tmp_path / "log/checkpoint_000777.pt.123.tmp").write_bytes(b"left by a kill")
    result = run("--data", data, "--out", tmp_path / "log", "--resume", older[1])
    assert f"at step {older[0]} of 60" in result.stdout and "are now in" in result.stdout
    for name in ("checkpoint_000060.pt", "log.txt"):
        assert (tmp_path / "log/previous_1" / name).read_bytes() == (whole / name).read_bytes()
    same_end(tmp_path / "log", whole)


def test_going_on_from_another_folders_checkpoint_leaves_that_folder_alone(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "theirs")
    older = checkpoints(tmp_path / "theirs")[0][1]
    run("--data", data, "--out", tmp_path / "log", "--resume", older)
    assert {p.name for p in (tmp_path / "theirs").iterdir()} == {p.name for p in whole.iterdir()}
    assert (tmp_path / "theirs/log.txt").read_bytes() == (whole / "log.txt").read_bytes()
    assert logged(tmp_path / "log")[59] == logged(whole)[59]


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "weights only": lambda path: torch.save({"model": load_model(path).state_dict(), "model_config": {},
                                             "recipe": "gpt2"}, path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_refused_and_the_older_one_named(kind, data, whole, tmp_path):
    """Never passed over in silence: that would run steps again without a word."""
    shutil.copytree(whole, tmp_path / "log")
    DAMAGES[kind](tmp_path / "log/checkpoint_000060.pt")
    with pytest.raises(UserError, match="checkpoint_000060.pt.*remove it, and the same command resumes from "
                       "checkpoint_000050"):
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log")])


def test_how_many_steps_were_passed_over_is_remembered(tmp_path):
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config, process = train_gpt2.Config(), Process()
    state = train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), process)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizers[0].step()
    state.step, state.skipped, state.evaluated, state.best = 5, 3, 5, (1.5, 4)
    content = state.state_dict(config, {}) | {"optimizers": [state.optimizers[0].state_dict()]}
    again = train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), process, content,
                                  tmp_path / "c.pt")
    assert (again.step, again.skipped, again.evaluated, again.best) == (5, 3, 5, (1.5, 4))


def test_a_checkpoint_written_in_the_background_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    """Weights that change while the thread writes do not reach the file, and the embedding is in it once."""
    model = GPT(GPTConfig(block_size=8, vocab_size=640, n_layer=1, n_head=1, n_embd=64))
    config = train_gpt2.Config(out=str(tmp_path), keep_checkpoints=1)
    state = train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), Process())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saver, may_write = Saver(config, {}, None, Process()), threading.Event()
    saver.background, state.step = True, 1
    write = saver._write
    monkeypatch.setattr(saver, "_write", lambda *args: may_write.wait() and write(*args))
    saver.save(state)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saver.finish(wait=False)
    assert not checkpoints(tmp_path)
    may_write.set()
    saver.finish()
    saved = read_checkpoint(tmp_path / "checkpoint_000001.pt")["model"]
    assert all(torch.equal(saved[name], before[name]) for name in before)
    assert saved["lm_head.weight"].data_ptr() == saved["transformer.wte.weight"].data_ptr()


def test_copies_for_the_background_are_whole_and_bring_nothing_else_into_the_file(tmp_path):
    large = torch.randn(50, 20)
    a, b = large[:3], torch.tensor(7, dtype=torch.int64)        # a part of another tensor's memory
    tree = {"tied": [a, a.detach()], "pair": (b, None), "large": large, "bits": large.bfloat16(), "n": 3}
    before = copy.deepcopy(tree)
    torch.save(host_copy(tree), tmp_path / "copied.pt")
    copied = host_copy(tree)
    for tensor in (large, b):
        tensor.zero_()
    for found in (copied, torch.load(tmp_path / "copied.pt", weights_only=True)):
        tensors = [*found["tied"], found["pair"][0], found["large"], found["bits"]]
        fresh = [*before["tied"], before["pair"][0], before["large"], before["bits"]]
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors, fresh, strict=True))
        assert found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        assert found["n"] == 3 and found["pair"][1] is None


def test_what_goes_wrong_in_the_background_is_raised_at_the_next_look(tmp_path):
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path / "missing"))
    saver = Saver(config, {}, None, Process())
    saver.background = True
    saver.save(train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), Process()))
    with pytest.raises(RunError, match="cannot write .*missing.*No such file"):
        saver.finish()


def test_a_write_error_that_torch_hides_is_told_as_what_it_was(tmp_path):
    """torch.save raises its own RuntimeError while it handles the OSError of the file."""
    def write(file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")            # noqa: B904

    with pytest.raises(RunError, match="cannot write .*a.pt .No space left on device"):
        replace_file(tmp_path / "a.pt", write)
    with pytest.raises(RuntimeError, match="another"):
        replace_file(tmp_path / "a.pt", lambda file: (_ for _ in ()).throw(RuntimeError("another")))
    assert not list(tmp_path.iterdir())
