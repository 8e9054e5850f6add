"""Nothing lost, in real processes: kills, restarts by torchrun, full disks, changed data, machines that
differ. Signals: test_stopping.py."""
import os
import random
import re
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ENV, ROOT, Live, command, limit_file_size, logged, run

import runtime.files
import train_gpt2
from model import load_model
from runtime.checkpoint import Saver
from runtime.cli import RunError, UserError
from runtime.console import Record, read_metrics
from runtime.files import checkpoints, replace_file
from runtime.shards import write_shard
from runtime.weights import read_checkpoint

pytest.importorskip("fcntl")                # Windows has no such kills

# Bytes instead of GPT-2's tokens: 60 steps take half a second. 36 steps are an epoch, of three shards of odd
# lengths.
BYTES = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--vocab_size", "256",
         "--dtype", "float32", "--total_batch_size", "256", "--max_steps", "60", "--warmup_steps", "5",
         "--hellaswag_every", "0", "--val_every", "20", "--val_tokens", "1000", "--sample_every", "0",
         "--checkpoint_every", "10", "--keep_checkpoints", "2"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tokens = np.frombuffer((ROOT / "input.txt").read_bytes()[:12_001], dtype=np.uint8).astype(np.uint16)
    for i, (a, b) in enumerate(((0, 2500), (2500, 6000), (6000, 7517), (7517, 12001))):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


def undisturbed(data, folder, *flags, **how):
    run("--data", data, *BYTES, *flags, "--out", folder / "log", **how)
    return folder / "log"


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The run that nobody disturbs."""
    return undisturbed(data, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def whole_of_two(data, tmp_path_factory):
    """That of two processes."""
    return undisturbed(data, tmp_path_factory.mktemp("two"), "--max_steps", 40, processes=2)


@pytest.fixture(scope="session")
def whole_speedrun(data, tmp_path_factory):
    return undisturbed(data, tmp_path_factory.mktemp("speedrun"), "--recipe", "speedrun", "--max_steps", 40)


@pytest.fixture(scope="session")
def whole_frontier(data, tmp_path_factory):
    return undisturbed(data, tmp_path_factory.mktemp("frontier"), "--recipe", "frontier", "--max_steps", 40)


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
    assert a["model"].keys() == b["model"].keys() and len(a["optimizers"]) > 10
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    assert a["optimizers"].keys() == b["optimizers"].keys()
    for name, state in a["optimizers"].items():
        assert all(torch.equal(tensor, b["optimizers"][name][key]) for key, tensor in state.items()), name
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
def machines(live, tmp_path):
    """machines(flags, flags, ...) are the ends of ranks that find each other without torchrun, each with
    flags and a working directory of its own."""
    def start(*flags, folders=None, **how):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {**ENV, "WORLD_SIZE": str(len(flags)), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [live(*own, env=env | {"RANK": str(rank)}, cwd=folders and folders[rank], **how)
                 for rank, own in enumerate(flags)]
        return [it.end() for it in ranks]
    return start


# -----------------------------------------------------------------------------
# kills and restarts

def test_killed_at_random_moments_it_ends_bit_for_bit_as_the_run_that_was_not(data, recipe_and_whole,
                                                                              tmp_path, live):
    """SIGKILL and SIGTERM in turn, over shard edges and epochs; before the first step too."""
    recipe, steps, whole = recipe_and_whole
    dice = random.Random(7)
    flags = ["--data", data, *BYTES, "--recipe", recipe, "--max_steps", steps, "--out", tmp_path / "log"]
    for i, first in enumerate((0, 13, 25, 32, 45)[:5 if recipe == "gpt2" else 4]):
        # in the steps from `step` up to `last`, at which it waits for the signal
        step = first + dice.randrange(3)
        last = step + dice.randrange(1, 5)
        it = live(*flags, hold=[step, last])
        it.stands_before(step)
        it.go_on(step)
        it.process.send_signal((signal.SIGKILL, signal.SIGTERM)[i % 2])
        it.go_on(last)
        code, stdout, stderr = it.end()
        assert code == (-signal.SIGKILL, 0)[i % 2] and len(stderr.splitlines()) == i % 2, stderr
        assert ("stopped by SIGTERM" in stdout and "the same command resumes" in stdout) == i % 2
    run(*flags)
    same_end(tmp_path / "log", whole, steps)
    # and once more: nothing is left to do, and what is not given comes from the checkpoint
    assert f"done: {steps} steps" in run("--data", data, "--out", tmp_path / "log").stdout
    same_end(tmp_path / "log", whole, steps)


def test_a_run_goes_on_with_other_processes_and_micro_batches_as_it_would_have_gone(data, recipe_and_whole,
                                                                                    tmp_path, live):
    recipe, steps, whole = recipe_and_whole
    flags = ["--data", data, *BYTES, "--recipe", recipe, "--max_steps", steps, "--out", tmp_path / "log"]
    it = live(*flags, "--batch_size", 4, hold=[33])
    it.stands_before(33)
    it.kill()
    shown = run(*flags, "--batch_size", 1, processes=2).stdout
    assert "checkpoint_000030.pt at step 30" in shown and "= 1 x 32 x " in shown
    a, b = logged(whole), logged(tmp_path / "log")
    assert a.keys() == b.keys()
    assert max(abs(a[step] - b[step]) for step in a) < (1e-4 if recipe == "gpt2" else 2e-3)


def test_torchrun_brings_a_run_back_whose_ranks_are_killed(data, whole, whole_of_two, tmp_path, live):
    """--max_restarts: rank 1 is killed before the first checkpoint, rank 0 after it. It ends as if nothing
    had happened, and bit for bit as with the moments on each rank. --resume never is of the first start, in
    a folder that has the run of another job."""
    shutil.copytree(whole, tmp_path / "log")
    it = live("--data", data, *BYTES, "--max_steps", 40, "--shard_optimizer", "--resume", "never", "--out",
              tmp_path / "log", processes=2, torchrun=["--standalone", "--max_restarts=3"], hold=[4, 27])
    for step, victim in ((4, 1), (27, 0)):
        os.kill(it.stands_before(step, (0, 1))[victim], signal.SIGKILL)
        it.go_on(step)
    code, stdout, stderr = it.end()
    assert code == 0, stderr
    assert re.findall(r"resuming from .*/checkpoint_(\d+)\.pt", stdout) == ["000020"]
    same_end(tmp_path / "log", whole_of_two, 40)
    same_end(tmp_path / "log/previous_1", whole)


@pytest.fixture
def two_agents(live):
    """Two agents of torchrun over loopback, each with a process of its own. They meet at a store of ours."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(*flags, **how):
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
                    "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{store.port}", "--rdzv_conf=is_host=0",
                    "--local_addr=127.0.0.1"]
        argv = [sys.executable, *torchrun, str(ROOT / "train_gpt2.py"), *map(str, flags)]
        return [live(argv=argv, **how) for _ in range(2)]
    return start


def test_two_machines_train_together(data, whole_of_two, tmp_path, two_agents):
    for agent in two_agents("--data", data, *BYTES, "--max_steps", 40, "--out", tmp_path / "log"):
        code, stdout, stderr = agent.end()
        assert code == 0, stdout + stderr
    same_end(tmp_path / "log", whole_of_two, 40)


# -----------------------------------------------------------------------------
# ranks that differ

# rank 1's CPU computes in bfloat16, as far as torch knows
UNLIKE = """
import os, torch
native = os.environ["RANK"] == "1"
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: native
"""


@pytest.mark.parametrize("what, said", [
    ("flags", "--batch_size"), ("hardware", "--dtype is bfloat16 here, and float32 on process 0"),
    ("content", "content of --data"), ("data", "there is no data"), ("out", "that all machines share")])
def test_machines_that_differ_are_told_so_once_before_the_first_step(what, said, data, tmp_path, machines):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(data, folder / "data")
    common = ["--data", "data", *BYTES, "--max_steps", 4, "--out", "log"]
    flags = [[*common, "--batch_size", 2] if what == "flags" else common, common]
    if what == "content":
        write_shard(folders[1] / "data/text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
    elif what == "data":
        shutil.rmtree(folders[1] / "data")
    elif what == "out":
        run(*common, cwd=folders[0])
    elif what == "hardware":
        flags = [[*common, "--dtype", "auto"]] * 2
    ends = machines(*flags, folders=folders, patch=UNLIKE if what == "hardware" else "")
    assert [code for code, *_ in ends] == [2, 2], ends
    lines = "".join(stderr for *_, stderr in ends).splitlines()
    assert len(lines) == 1 and lines[0].startswith("train_gpt2.py: process 1: ") and said in lines[0], lines
    assert what == "out" or not any((folder / "log").exists() for folder in folders)


# one weight of rank 1 changes by itself in its third step
DRIFTS = """
import os, torch
from torch.nn.modules.module import register_module_forward_hook
forwards = []

def after(module, inputs, output):
    if type(module).__name__ == "GPT" and torch.is_grad_enabled():
        forwards.append(module)
        if len(forwards) == 3 and os.environ["RANK"] == "1":
            module.lm_head.weight.data[7, 7] += 1e-4
register_module_forward_hook(after)
"""


def test_weights_that_drifted_apart_end_the_run_at_a_save_in_one_line(data, tmp_path, machines):
    flags = ["--data", data, *BYTES, "--val_every", 0, "--out", tmp_path / "log"]
    ends = machines(flags, flags, patch=DRIFTS)
    assert [code for code, *_ in ends] == [1, 1], ends
    lines = "".join(stderr for *_, stderr in ends).splitlines()
    assert len(lines) == 1 and "drifted apart" in lines[0], lines
    assert len(logged(tmp_path / "log")) == 10 and not checkpoints(tmp_path / "log")


# -----------------------------------------------------------------------------
# the disk

def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_nothing_but_that_checkpoint(data, whole,
                                                                                             tmp_path):
    out = tmp_path / "log"
    flags = ["--data", data, *BYTES, "--out", out]
    run(*flags, "--max_steps", 20)
    before = {path.name: path.read_bytes() for path in out.glob("*.pt")}
    size = min(map(len, before.values()))
    result = run(*flags, code=1, preexec_fn=limit_file_size(size // 2))
    said = r"train_gpt2.py: cannot write .*checkpoint_000030.pt \(File too large\): make room.*\n"
    assert re.fullmatch(said, result.stderr)
    assert {path.name: path.read_bytes() for path in out.glob("*checkpoint*")} == before
    for path in (out / "checkpoint_000020.pt", out / "log.txt", out / "metrics.csv"):
        assert path.stat().st_size
    run(*flags)
    assert logged(out).keys() == logged(whole).keys() and newest(out) == 60


def test_what_goes_wrong_in_the_background_is_raised_at_the_next_look(tmp_path):
    saver = Saver(tmp_path / "missing", 1, True, lambda line: None)
    saver.write({"step": 1, "model": {}, "optimizers": {}}, Record(tmp_path, 0, 100))
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


# -----------------------------------------------------------------------------
# what a resume takes and refuses

def resume(*flags):
    """In this process, and only as far as its header: 0, or a UserError."""
    return train_gpt2.main([str(flag) for flag in (*flags, "--dry_run")])


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


@pytest.mark.parametrize("kind", ["replaced", "one token", "shortened", "one more", "one less",
                                  "in another order"])
def test_other_data_than_the_runs_is_refused(kind, data, whole, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shards_changed(kind, tmp_path / "data")
    with pytest.raises(UserError, match="other shards than .*--init"):
        resume("--data", tmp_path / "data", "--out", whole, "--max_steps", 200)


def test_the_same_data_in_another_folder_and_format_is_the_same_data(data, whole, tmp_path):
    for path in data.iterdir():
        write_shard(tmp_path / path.with_suffix(".bin").name, np.load(path))
    assert resume("--data", tmp_path, "--out", whole) == 0


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(data, tmp_path, live, monkeypatch):
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log", "--max_steps", 12]
    it = live(*flags, hold=[11])
    it.stands_before(11)
    monkeypatch.setattr(runtime.files, "LOCK_PATIENCE", 0.1)
    before = {path: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    with pytest.raises(UserError, match="another run is writing there"):
        train_gpt2.main(list(map(str, flags)))
    assert before == {path: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    it.go_on(11)
    assert it.end()[0] == 0 and newest(tmp_path / "log") == 12
    run(*flags, "--max_steps", 13)                                          # free again


def test_what_is_auto_is_decided_anew_on_a_resume_and_the_data_come_from_the_checkpoint(data, tmp_path):
    run("--data", data, *BYTES, "--max_steps", 10, "--max_lr", 1e-3, "--out", tmp_path / "log")
    run("--out", tmp_path / "log", "--max_lr", 5e-5, "--max_steps", 20)         # below the old tenth
    config = read_checkpoint(tmp_path / "log/checkpoint_000020.pt")["config"]
    assert config["min_lr"] == config["sequence_length"] == "auto" and config["data"] == str(data)
    assert 5e-6 <= read_metrics(tmp_path / "log/metrics.csv")[19]["lr"] < 6e-6
    with pytest.raises(UserError, match="there is no data in .*nowhere"):
        resume("--out", tmp_path / "log", "--data", tmp_path / "nowhere")


def test_a_resume_with_another_init_preset_or_fixed_flag_is_refused(data, whole, tmp_path):
    """The shape of the checkpoint would win, without a word."""
    run("--data", data, *BYTES, "--max_steps", 10, "--init", whole, "--out", tmp_path / "tuned")
    again = ["--data", data, "--out", tmp_path / "tuned"]
    assert resume(*again, "--init", whole) == 0
    # the weights' shape wins over that of a preset, and the same command resumes
    assert resume(*again, "--init", whole, "--preset", "gpt2-medium") == 0
    for flags, said in ((["--init", whole / "best"], f"--init {whole}, not {whole / 'best'}"),
                        (["--preset", "gpt2-medium"], r"--n_\w+ \d+, not \d+"),
                        (["--n_layer", 3], "--n_layer 2, not 3"), (["--no_shuffle"], "--shuffle True, not"),
                        (["--seed", 1], "--seed 1337, not 1"), (["--max_steps", 9], "--max_steps 9")):
        with pytest.raises(UserError, match=said):
            resume(*again, *flags)


def test_resume_takes_a_runs_folder_and_refuses_another_path(data, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert resume("--data", data, "--out", "other", "--resume", whole) == 0
    assert f"resuming from {whole}/checkpoint_000060.pt at step 60 of 60" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for given in ("nowhere", "empty", "empty/checkpoint_000777.pt", "gpt2"):
        with pytest.raises(UserError, match=f"{given} "):
            resume("--data", data, "--resume", given)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(data, whole, tmp_path):
    out = tmp_path / "log"
    shutil.copytree(whole, out)
    step, older = checkpoints(out)[0]
    (out / "checkpoint_000777.pt.123.tmp").write_bytes(b"left by a kill")
    (out / "notes.tmp").write_text("mine")
    assert f"at step {step} of 60" in run("--data", data, "--out", out, "--resume", older).stdout
    for name in ("checkpoint_000060.pt", "log.txt"):
        assert (out / "previous_1" / name).read_bytes() == (whole / name).read_bytes()
    (out / "notes.tmp").unlink()
    same_end(out, whole)


def test_going_on_from_another_folders_checkpoint_leaves_that_folder_alone(data, whole, tmp_path):
    before = {path: path.is_file() and path.read_bytes() for path in whole.iterdir()}
    run("--data", data, "--out", tmp_path / "log", "--resume", checkpoints(whole)[0][1])
    assert {path: path.is_file() and path.read_bytes() for path in whole.iterdir()} == before
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
    remedy = "remove it, and the same command resumes from checkpoint_000050.pt"
    with pytest.raises(UserError, match=f"checkpoint_000060.pt.*{remedy}"):
        resume("--data", data, "--out", tmp_path / "log")
