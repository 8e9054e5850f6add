"""Whole runs that are killed, resumed, made longer or shared out otherwise lose nothing.

Signals are in test_signals.py, the rules of --resume in test_checkpoint.py, torchrun's restarts in
test_machines.py.
"""
import functools
import os
import re
import select
import shutil
import signal
import socket
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import (
    BYTES,
    HANG,
    command,
    dying,
    forked,
    kill_parent,
    logged,
    newest,
    on_ranks,
    refused,
    run,
    same_end,
    saved,
    saved_steps,
    strike,
    striking,
    train,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import train_gpt2
from recipes import RECIPES
from runtime import hardware
from runtime.language_model import LanguageModel
from runtime.recipe import BatchSchedule
from runtime.shards import write_shard

pytest.importorskip("fcntl")                # Windows has no such kills


# Steps have two micro-batches, and 20 of them are an epoch. frontier's batch, a quarter at first,
# is twice as large from step 14 on, and whole from step 21 on.
RUN = [*BYTES, "--max_steps", 24, "--val_every", 12, "--checkpoint_every", 6]


@pytest.fixture(scope="module")
def data(byte_data, tmp_path_factory):
    """The shards without the last one."""
    folder = tmp_path_factory.mktemp("data")
    for path in byte_data.glob("*_00000[012].npy"):
        shutil.copy(path, folder)
    return folder


# The same for three processes: of two numbers the sum has one order only, and two processes would
# not show that ranks add in another order.
RUN_OF_THREE = [*RUN, "--total_batch_size", 384, "--batch_size", 2]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """whole(recipe, processes) is the folder of a run, of 1 or 3, that nobody disturbs."""
    @functools.cache
    def make(recipe="gpt2", processes=1):
        flags = RUN if processes == 1 else RUN_OF_THREE
        out = tmp_path_factory.mktemp("whole") / "log"
        run("--data", data, *flags, "--recipe", recipe, "--out", out, processes=processes)
        return out
    return make


# ----------------------------------------------------------------------- kills

# (step, number of the micro-batch, signal): before the first checkpoint, in the middle of a step,
# and in the second epoch
# frontier's optimizers are those of speedrun, and its batch grows besides.
KILLED = [recipe for recipe in RECIPES if recipe != "speedrun"]
KILLS = [(2, 0, "SIGKILL"), (8, 1, "SIGTERM"), (10, 0, "SIGKILL"), (17, 1, "SIGTERM"),
         (22, 1, "SIGKILL")]


@pytest.mark.parametrize("recipe", KILLED)
def test_killed_before_any_micro_batch_a_run_ends_bit_for_bit_as_one_that_was_not(
        recipe, data, whole, tmp_path):
    flags = ["--data", data, *RUN, "--recipe", recipe, "--out", tmp_path]
    kills = KILLS if recipe == "gpt2" else KILLS[2:]
    for step, micro_batch, name in kills:
        if recipe == "frontier" and step < 21:
            micro_batch = 0                 # its first steps have one
        before = striking(f"step {step}", name, item=micro_batch)
        if name == "SIGKILL":
            run(*flags, before=before, code=-9)
        else:
            result = run(*flags, before=before)
            assert f"stopped by SIGTERM after {step} of 24 steps" in result.stdout
            assert newest(tmp_path) == step

    assert "checkpoint_000018.pt at step 18" in run(*flags).stdout
    same_end(tmp_path, whole(recipe), 24)


def test_a_run_that_is_done_takes_its_flags_from_its_checkpoint_and_does_nothing(whole, tmp_path):
    out = shutil.copytree(whole(), tmp_path / "log")
    assert "done: 24 steps" in run("--out", out).stdout
    same_end(out, whole(), 24)


def test_three_processes_that_were_killed_end_bit_for_bit_as_three_that_were_not(
        data, whole, tmp_path):
    flags = ["--data", data, *RUN_OF_THREE, "--recipe", "frontier", "--out", tmp_path]
    kill_all = []
    for rank in range(3):
        kill_all += striking("step 8", "SIGKILL", rank=rank)
    run(*flags, "--shard_optimizer", processes=3, before=kill_all, code=-9)
    assert newest(tmp_path) == 6

    # Several processes finish the step in which the signal came.
    run(*flags, processes=3, before=striking("step 15", "SIGTERM", rank=1))
    assert newest(tmp_path) == 16
    run(*flags, "--shard_optimizer", processes=3)
    same_end(tmp_path, whole("frontier", processes=3), 24)


def round_otherwise():
    """For `before`: processes other than 0 round the weights and moments of each step otherwise."""
    @torch.no_grad()
    def after_step(optimizer, args, kwargs):
        if dist.get_rank() == 0:
            return
        for p, state in optimizer.state.items():
            for tensor in (p, *state.values()):
                tensor.mul_(1 + 1e-6)

    register_optimizer_step_post_hook(after_step)


def test_processes_that_round_otherwise_go_on_and_resume_with_the_weights_of_the_first(
        data, tmp_path):
    flags = ["--data", data, *RUN_OF_THREE, "--max_steps", 12, "--val_every", 0]
    text = run(*flags, "--out", tmp_path / "whole", processes=3, before=[round_otherwise]).stdout
    assert text.count("round differently") == 1

    kill_all = []
    for rank in range(3):
        kill_all += striking("step 8", "SIGKILL", rank=rank)
    flags += ["--out", tmp_path / "killed"]
    run(*flags, processes=3, before=[round_otherwise, *kill_all], code=-9)
    run(*flags, processes=3, before=[round_otherwise])
    same_end(tmp_path / "killed", tmp_path / "whole", 12)


TWELVE_STEPS = [*BYTES, "--max_steps", 12, "--val_every", 6, "--checkpoint_every", 4]


@pytest.fixture(scope="module")
def twelve_steps(byte_data, tmp_path_factory):
    """The folder of a short run that nobody disturbs."""
    out = tmp_path_factory.mktemp("twelve") / "log"
    run("--data", byte_data, *TWELVE_STEPS, "--out", out)
    return out


# The first atomic write is that of metrics.csv, and the others are those of the checkpoints.
@pytest.mark.parametrize("moment", ["1 half", "1 after", "2 half", "2 after", "3 half"])
def test_killed_in_an_atomic_write_a_run_ends_bit_for_bit_as_one_that_was_not(
        moment, twelve_steps, byte_data, tmp_path):
    flags = ["--data", byte_data, *TWELVE_STEPS, "--out", tmp_path]
    run(*flags, before=dying(moment), code=-9)
    has_temporary_file = bool(list(tmp_path.glob("*.tmp")))
    has_checkpoint = bool(saved_steps(tmp_path))
    text = run(*flags).stdout

    assert has_temporary_file == (not moment.endswith("after"))
    assert has_checkpoint == (moment in ("2 after", "3 half"))
    assert ("resuming from" in text) == has_checkpoint
    same_end(tmp_path, twelve_steps, step=12)


def launch_three_ranks(flags, pipe):
    """As torchrun, starts the ranks and has their store, until one of them kills it in step 8."""
    os.open(pipe, os.O_WRONLY)                  # until the last of these processes has ended
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update({
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
    })
    for rank in range(3):
        if os.fork() == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            strike("step 8", call=kill_parent)
            command("train_gpt2.py", *flags)()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent died")
def test_when_torchrun_is_killed_its_ranks_save_and_end(data, whole, tmp_path):
    flags = ["--data", data, *RUN_OF_THREE, "--out", tmp_path / "log"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    [(code, _, _)] = forked(functools.partial(launch_three_ranks, flags, pipe))
    ended, _, _ = select.select([reader], [], [], HANG)     # until nobody can write any more
    os.close(reader)

    assert code == -9
    assert ended, "the ranks hang"
    assert newest(tmp_path / "log") == 9        # they finish the step in which the signal came
    run(*flags, processes=3)
    same_end(tmp_path / "log", whole(processes=3), 24)


# ----------------------------------------------------------------------- more processes, more steps

@pytest.mark.parametrize("recipe", KILLED)
def test_a_run_goes_on_with_other_processes_and_micro_batches_as_it_would_have_gone(
        recipe, data, whole, tmp_path):
    flags = ["--data", data, *RUN, "--recipe", recipe, "--out", tmp_path]
    run(*flags, before=striking("step 15", "SIGKILL"), code=-9)
    text = run(*flags, "--batch_size", 2, processes=2).stdout
    assert "checkpoint_000012.pt at step 12" in text
    assert "= 2 x 32 x 2 micro-steps" in text

    tolerance = 1e-4
    if recipe != "gpt2":
        tolerance = 2e-3            # Muon's iteration enlarges what rounding changes
    assert logged(tmp_path) == pytest.approx(logged(whole(recipe)), abs=tolerance)


FRONTIER = [*BYTES, "--recipe", "frontier", "--device", "cpu", "--n_layer", 1, "--val_every", 0,
            "--no_shuffle", "--checkpoint_every", 1, "--keep_checkpoints", "all"]


@pytest.fixture(scope="module")
def six_steps(byte_data, tmp_path_factory):
    """The folder of a short run of frontier, whose first steps have a quarter of the batch."""
    out = tmp_path_factory.mktemp("frontier") / "log"
    train("--data", byte_data, *FRONTIER, "--max_steps", 6, "--out", out)
    assert logged(out, "tokens")[1] == 64
    return out


def test_a_longer_run_of_frontier_has_a_batch_of_its_own_which_more_processes_can_share(
        six_steps, byte_data, tmp_path):
    """Of 6 steps the first have 64 tokens: two sequences, too few for four processes.

    Of 60 steps all have 256.
    """
    flags = ["--data", byte_data, *FRONTIER, "--max_steps", 60]
    losses = []
    for processes in (1, 4):
        out = shutil.copytree(six_steps, tmp_path / str(processes))
        text = run(*flags, "--out", out, processes=processes,
                   before=striking("step 9", "SIGTERM")).stdout         # it spares the other steps
        assert " at step 6 of 60" in text
        losses.append(logged(out))
        counts = logged(out, "tokens")
        assert counts[7] - counts[6] == 256
        assert f"60 steps = {counts[6] + 54 * 256:,} tokens" in text
    for step in (6, 7, 8):
        assert losses[0][step] == pytest.approx(losses[1][step], abs=1e-3)


@pytest.fixture
def longer(six_steps, byte_data, tmp_path):
    """The folder of a run of 9 steps that begins with the first three of `six_steps`."""
    train("--data", byte_data, *FRONTIER, "--max_steps", 9, "--out", tmp_path / "longer",
          "--cooldown", 1, "--min_lr", 0, "--max_lr", 1e-3, "--warmup_steps", 0,
          "--checkpoint_every", 0, "--resume", six_steps / "checkpoint_000003.pt")
    return tmp_path / "longer"


def test_a_run_that_is_made_longer_goes_on_with_the_next_tokens(six_steps, byte_data, request):
    batches = []

    def watch(module, inputs):
        if isinstance(module, LanguageModel) and torch.is_grad_enabled():
            batches.append(inputs[0])

    hook = register_module_forward_pre_hook(watch)
    try:
        out = request.getfixturevalue("longer")
    finally:
        hook.remove()

    before = logged(six_steps, "tokens")[3]
    tokens = np.load(byte_data / "text_train_000001.npy").astype(np.int64)
    assert torch.cat(batches).flatten().tolist()[:256] == tokens[before:before + 256].tolist()
    assert logged(out, "tokens")[3] == before
    assert saved(six_steps, 3)["tokens"] == before


def test_the_rate_of_a_run_that_is_made_longer_is_that_of_its_new_length(longer):
    """With --cooldown 1 and --min_lr 0 it falls to 0 linearly, over the tokens of such a run."""
    rates = logged(longer, "lr")
    schedule = BatchSchedule(256, 9, (2, 1, 1))
    for step in range(3, 9):
        assert rates[step] == pytest.approx(1e-3 * (1 - schedule.progress(step)), rel=1e-4)


# ----------------------------------------------------------------------- two machines

def use_cpus(*kinds):
    """For `before`: each rank has such a CPU, as bfloat16_of_cpu calls it."""
    own_kind = kinds[int(os.environ["RANK"])]
    hardware.bfloat16_of_cpu = lambda: own_kind


@pytest.fixture
def two_machines(byte_data, tmp_path):
    """The working directories of two ranks, each with the shards in `data`."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(byte_data, folder / "data")
    return folders


def told_by_two_machines(folders, flags, second_flags=(), before=(), code=2):
    """The only line on stderr of two ranks that are refused, with this exit code."""
    calls = [command("train_gpt2.py", *flags), command("train_gpt2.py", *flags, *second_flags)]
    results = on_ranks(*calls, cwds=folders, before=before)
    assert [result[0] for result in results] == [code, code], results
    [line] = "".join(stderr for _, _, stderr in results).splitlines()
    assert "process 1" in line
    return line


SAME = ["--data", "data", *BYTES, "--max_steps", 4, "--out", "log"]


@pytest.mark.parametrize("flags", [
    ["--batch_size", 2], ["--recipe", "speedrun"], ["--init", "log"], ["--dtype", "bfloat16"],
])
def test_ranks_with_other_flags_are_told_so_once_before_the_first_step(flags, two_machines):
    line = told_by_two_machines(two_machines, SAME, second_flags=flags)
    assert flags[0] in line
    assert not (two_machines[0] / "log").exists()


def test_a_rank_whose_cpu_cannot_do_what_rank_0_does_ends_all(two_machines):
    line = told_by_two_machines(
        two_machines, [*SAME, "--dtype", "auto"],
        before=[functools.partial(use_cpus, "AMX", "no bfloat16")])
    assert "--dtype" in line


@pytest.mark.parametrize("kinds, dtype, other", [
    (["AMX", "Intel's AVX512-BF16"], "bfloat16", "float32"),
    (["no bfloat16", "AMX"], "float32", "bfloat16"),
    (["no bfloat16", "Intel's AVX512-BF16"], "float32", None),
])
def test_a_rank_whose_cpu_is_faster_otherwise_computes_as_rank_0_does(
        kinds, dtype, other, two_machines):
    call = command("train_gpt2.py", *SAME, "--dtype", "auto")
    results = on_ranks(
        call, call, cwds=two_machines, before=[functools.partial(use_cpus, *kinds)])
    assert [code for code, _, _ in results] == [0, 0], results

    text = results[0][1]
    assert f"), {dtype} (" in text
    told = re.findall(r"process 0 has chosen (\w+) .*process 1 .* (\w+)\n", text)
    expected = []
    if other:
        expected.append((dtype, other))
    assert told == expected


@pytest.mark.parametrize("flags, said", [
    ([], "bfloat16 as before"),
    (["--dtype", "float32"], "float32 (bfloat16 before)"),
])
def test_a_run_keeps_its_dtype_on_another_cpu_unless_one_is_typed(
        flags, said, byte_data, tmp_path, monkeypatch, capsys):
    run_flags = ["--data", byte_data, *BYTES, "--dtype", "auto", "--out", tmp_path]
    monkeypatch.setattr(hardware, "bfloat16_of_cpu", lambda: "AMX")
    train(*run_flags, "--max_steps", 2)
    assert "), bfloat16 (" in capsys.readouterr().out

    monkeypatch.setattr(hardware, "bfloat16_of_cpu", lambda: "Intel's AVX512-BF16")
    train(*run_flags, "--max_steps", 4, *flags)
    assert f"), {said}, torch" in capsys.readouterr().out


def test_ranks_whose_shards_differ_are_told_so(two_machines):
    shard = two_machines[1] / "data/text_train_000002.npy"
    write_shard(shard, np.zeros_like(np.load(shard)))       # of the same length
    assert "train shard 1" in told_by_two_machines(two_machines, SAME)


def test_a_rank_without_the_data_is_told(two_machines):
    shutil.rmtree(two_machines[1] / "data")
    assert "data has no shards" in told_by_two_machines(two_machines, SAME)


def test_a_rank_without_the_checkpoint_is_told(two_machines):
    run(*SAME, "--checkpoint_every", 1, "--max_steps", 1, cwd=two_machines[0])
    assert "checkpoint_000001.pt" in told_by_two_machines(two_machines, SAME, code=1)


def test_ranks_may_have_paths_of_their_own_and_only_rank_0_writes(two_machines):
    (two_machines[1] / "data").rename(two_machines[1] / "copy")
    other = ["--data", "copy", "--out", "other", "--hellaswag_data", "x.jsonl", "--wandb"]
    flags = [*SAME, "--checkpoint_every", 4]
    calls = [command("train_gpt2.py", *flags), command("train_gpt2.py", *flags, *other)]
    results = on_ranks(*calls, cwds=two_machines)
    assert [code for code, _, _ in results] == [0, 0], results
    assert saved_steps(two_machines[0] / "log") == [4]
    assert [path.name for path in two_machines[1].iterdir()] == ["copy"]


# ----------------------------------------------------------------------- data that change

def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def replace_tokens(path):
    np.save(path, np.load(path)[::-1].copy())


@pytest.mark.parametrize("damage", [truncate, replace_tokens])
def test_a_run_whose_shards_change_ends_and_continues_once_they_are_restored(
        damage, data, whole, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(data, tmp_path / "data")
    shards = sorted(copy.glob("*_train_*"))
    intact = [path.read_bytes() for path in shards]
    train_step = train_gpt2.train_step

    def damaging(step, *arguments):
        if step == 8:
            for path in shards:
                damage(path)
        return train_step(step, *arguments)

    flags = ["--data", copy, *RUN, "--out", tmp_path / "log", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, "train_step", damaging)
        refused(lambda: train(*flags), "text_train_", "checkpoint_000012.pt")

    for path, content in zip(shards, intact, strict=True):
        path.write_bytes(content)
    train(*flags)
    assert "checkpoint_000012.pt at step 12" in capsys.readouterr().out
    same_end(tmp_path / "log", whole(), 24)
