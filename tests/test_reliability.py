"""Nothing is lost: kills, restarts by torchrun, full disks, machines that differ, and what a resume takes and
refuses. Signals: test_stopping.py."""
import functools
import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import (BYTES, command, die_in_write, limit_file_size, logged, newest, on_ranks, refused, run,
                     same_end, site, striking, torchrun, train)

from recipes import load_model
from runtime.checkpoint import Saver
from runtime.cli import RunError
from runtime.console import Record, read_metrics
from runtime.files import checkpoints, lock_folder, replace_file
from runtime.shards import write_shard
from runtime.weights import read_checkpoint

pytest.importorskip("fcntl")                # Windows has no such kills
RECIPES = pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])


# ----------------------------------------------------------------------------- kills and restarts

@RECIPES
def test_killed_at_random_moments_it_ends_bit_for_bit_as_the_run_that_was_not(recipe, byte_data, whole,
                                                                              tmp_path):
    """SIGKILL and SIGTERM in turn, over shard edges and an epoch's; before the first checkpoint, too."""
    dice, out = random.Random(7), tmp_path / "log"
    flags = ["--data", byte_data, *BYTES, "--recipe", recipe, "--out", out]
    for i, first in enumerate((0, 8, 16, 24, 32)):
        step, item = first + dice.randrange(8), 0 if recipe == "frontier" else dice.randrange(4)
        name, code = (("SIGKILL", -9), ("SIGTERM", 0))[i % 2]
        result = run(*flags, before=striking(f"step {step}", name, item=item), code=code)
        assert len(result.stderr.splitlines()) == i % 2
        assert (f"stopped by {name} after {step} of 40 steps" in result.stdout) == i % 2
        assert i % 2 == 0 or newest(out) == step
    run(*flags)
    same_end(out, whole(recipe))
    # and once more: nothing is left to do, and what is not given comes from the checkpoint
    assert "done: 40 steps" in run("--data", byte_data, "--out", out).stdout
    same_end(out, whole(recipe))


@pytest.mark.parametrize("n, cut", [(1, True), (3, False), (4, False), (5, True), (6, False), (11, True)])
def test_killed_in_a_write_it_ends_bit_for_bit_as_the_run_that_was_not(n, cut, byte_data, whole, tmp_path):
    """1 to 4: metrics.csv and log.txt as the run begins; then checkpoints."""
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    run(*flags, before=[functools.partial(die_in_write, n, cut)], code=-9)
    assert bool(list(tmp_path.glob("*.tmp"))) == n % 2
    run(*flags)
    same_end(tmp_path, whole())


@RECIPES
def test_a_run_goes_on_with_other_processes_and_micro_batches_as_it_would_have_gone(recipe, byte_data, whole,
                                                                                    tmp_path):
    flags = ["--data", byte_data, *BYTES, "--recipe", recipe, "--out", tmp_path / "log"]
    run(*flags, before=striking("step 23", "SIGKILL"), code=-9)
    shown = run(*flags, "--batch_size", 1, processes=2).stdout
    assert "checkpoint_000020.pt at step 20" in shown and "= 1 x 32 x " in shown
    a, b = logged(whole(recipe)), logged(tmp_path / "log")
    assert a.keys() == b.keys()
    assert max(abs(a[step] - b[step]) for step in a) < (1e-4 if recipe == "gpt2" else 2e-3)


def test_torchrun_brings_a_run_back_of_which_a_rank_is_killed(byte_data, whole, tmp_path):
    """It ends as if nothing had happened, and bit for bit as with the moments on each rank. --resume never is
    of the first start, in a folder that has the run of another job."""
    shutil.copytree(whole(), tmp_path / "log")
    done = torchrun("--data", byte_data, *BYTES, "--shard_optimizer", "--resume", "never", "--out",
                    tmp_path / "log", options=["--standalone", "--nproc_per_node=2", "--max_restarts=1"],
                    env=site(tmp_path / "site",
                             "import helpers\nhelpers.strike('step 27', 'SIGKILL', rank=1)"))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"resuming from .*/checkpoint_(\d+)\.pt", done.stdout) == ["000020"]
    same_end(tmp_path / "log", whole(processes=2))
    same_end(tmp_path / "log/previous_1", whole())


def test_two_machines_train_together(byte_data, whole, tmp_path):
    """Two agents of torchrun over loopback, each with a process of its own; they meet at a store of ours.
    Each has its own copy of the data."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
               f"--rdzv_endpoint=127.0.0.1:{store.port}", "--rdzv_conf=is_host=0", "--local_addr=127.0.0.1"]
    copy = shutil.copytree(byte_data, tmp_path / "copy")
    with ThreadPoolExecutor(2) as agents:
        ends = list(agents.map(lambda data: torchrun("--data", data, *BYTES, "--out", tmp_path / "log",
                                                     options=options), (byte_data, copy)))
    assert [done.returncode for done in ends] == [0, 0], ends
    same_end(tmp_path / "log", whole(processes=2))


# ----------------------------------------------------------------------------- ranks that differ

def unlike():
    """Rank 1's CPU computes in bfloat16, as far as torch knows."""
    native = os.environ["RANK"] == "1"
    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: native


@pytest.mark.parametrize("what, said", [
    ("flags", "--batch_size"), ("hardware", "--dtype"), ("content", "train shard 1"), ("data", "data"),
    ("out", "share")])
def test_machines_that_differ_are_told_so_once_before_the_first_step(what, said, byte_data, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        shutil.copytree(byte_data, folder / "data")
    common = ["--data", "data", *BYTES, "--max_steps", 4, "--out", "log"]
    if what == "hardware":
        common += ["--dtype", "auto"]
    elif what == "content":
        write_shard(folders[1] / "data/text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
    elif what == "data":
        shutil.rmtree(folders[1] / "data")
    elif what == "out":
        run(*common, "--checkpoint_every", 1, cwd=folders[0])
    calls = [command("train_gpt2.py", *common, *["--batch_size", 4] * (what == "flags" and rank))
             for rank in range(2)]
    ends = on_ranks(*calls, cwds=folders, before=[unlike] if what == "hardware" else [])
    assert [code for code, *_ in ends] == [2, 2], ends
    lines = "".join(stderr for *_, stderr in ends).splitlines()
    assert len(lines) == 1 and "process 1" in lines[0] and said in lines[0], lines
    assert what == "out" or not any((folder / "log").exists() for folder in folders)


def drift():
    """One weight of rank 1 changes by itself in its third forward."""
    from torch.nn.modules.module import register_module_forward_hook
    forwards = []

    def after(module, inputs, output):
        if type(module).__name__ == "GPT" and torch.is_grad_enabled():
            forwards.append(module)
            if len(forwards) == 3 and os.environ["RANK"] == "1":
                module.lm_head.weight.data[7, 7] += 1e-4
    register_module_forward_hook(after)


def test_weights_that_drifted_apart_end_the_run_at_a_save_in_one_line(byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--val_every", 0, "--out", tmp_path, processes=2,
                 before=[drift], code=1)
    assert len(result.stderr.splitlines()) == 1 and "drifted" in result.stderr
    assert len(logged(tmp_path)) == 10 and not checkpoints(tmp_path)


# ----------------------------------------------------------------------------- the disk

def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_nothing_but_that_checkpoint(byte_data, whole,
                                                                                             tmp_path):
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    run(*flags, "--max_steps", 20)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}
    limit = limit_file_size(min(map(len, before.values())) // 2)
    refused(lambda: run(*flags, code=1, before=[limit]), "checkpoint_000030.pt", "make room", failed=True)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*checkpoint*")} == before
    run(*flags)
    assert logged(tmp_path).keys() == logged(whole()).keys() and newest(tmp_path) == 40


def test_what_goes_wrong_in_the_background_is_raised_at_the_next_look(tmp_path):
    saver = Saver(tmp_path / "missing", 1, True, lambda line: None)
    saver.write({"step": 1, "model": {}, "optimizers": {}}, Record(tmp_path, 0, (100).__mul__))
    refused(saver.finish, "missing", failed=True)


def test_a_write_error_that_torch_hides_is_told_as_what_it_was(tmp_path):
    """torch.save raises its own RuntimeError while it handles the OSError of the file."""
    def write(file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")            # noqa: B904
    refused(lambda: replace_file(tmp_path / "a.pt", write), "a.pt", "No space left", failed=True)
    with pytest.raises(RuntimeError, match="another") as caught:
        replace_file(tmp_path / "a.pt", lambda file: (_ for _ in ()).throw(RuntimeError("another")))
    assert type(caught.value) is not RunError and not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- what a resume takes and refuses

def resumes(*flags):
    """A call in this process that goes as far as the header."""
    return lambda: train(*flags, "--dry_run")


SHARDS = {
    "replaced": lambda path, tokens: np.save(path, tokens[::-1].copy()),
    "one token": lambda path, tokens: np.save(path, np.where(np.arange(len(tokens)) == 700, 9, tokens)),
    "shortened": lambda path, tokens: np.save(path, tokens[:-40]),
    "one more": lambda path, tokens: np.save(path.with_name("text_train_000004.npy"), tokens),
    "one less": lambda path, tokens: path.unlink(),
    "in another order": lambda path, tokens: path.rename(path.with_name("text_train_000004.npy")),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_other_data_than_the_runs_is_refused(kind, byte_data, whole, tmp_path):
    shutil.copytree(byte_data, tmp_path / "data")
    path = tmp_path / "data/text_train_000002.npy"
    SHARDS[kind](path, np.load(path).astype(np.uint16))
    refused(resumes("--data", tmp_path / "data", "--out", whole(), "--max_steps", 200), whole(), "--init")


def test_the_same_data_in_another_folder_and_format_is_the_same_data(byte_data, whole, tmp_path):
    for path in byte_data.iterdir():
        write_shard(tmp_path / path.with_suffix(".bin").name, np.load(path))
    resumes("--data", tmp_path, "--out", whole())()


def test_a_second_run_in_the_same_folder_is_refused(byte_data, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.files.LOCK_PATIENCE", 0.1)
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path / "log", "--max_steps", 2]
    first = lock_folder(tmp_path / "log")
    refused(lambda: train(*flags), tmp_path / "log")
    assert [path.name for path in (tmp_path / "log").iterdir()] == [".train_gpt2.lock"]
    first.release()

    def locked_after_a_save(out):           # by a run that ends while this one is set up
        shutil.copy(checkpoints(whole())[0][1], out)
        return lock_folder(out)
    with monkeypatch.context() as patch:
        patch.setattr("runtime.checkpoint.lock_folder", locked_after_a_save)
        refused(lambda: train(*flags, "--max_steps", 40), tmp_path / "log", failed=True)
    assert len(list((tmp_path / "log").iterdir())) == 2
    train(*flags, "--max_steps", 40)


def test_what_is_auto_is_decided_anew_on_a_resume_and_the_data_come_from_the_checkpoint(byte_data, tmp_path):
    run("--data", byte_data, *BYTES, "--max_steps", 10, "--max_lr", 1e-3, "--out", tmp_path)
    run("--out", tmp_path, "--max_lr", 5e-5, "--max_steps", 20)         # below the old tenth
    config = read_checkpoint(tmp_path / "checkpoint_000020.pt")["config"]
    assert config["min_lr"] == config["sequence_length"] == "auto" and config["data"] == str(byte_data)
    assert 5e-6 <= read_metrics(tmp_path / "metrics.csv")[19]["lr"] < 6e-6
    refused(resumes("--out", tmp_path, "--data", tmp_path / "nowhere"), tmp_path / "nowhere")


def test_a_resume_with_another_init_preset_or_fixed_flag_is_refused(byte_data, whole, tmp_path):
    """The shape of the checkpoint would win, without a word."""
    run("--data", byte_data, *BYTES, "--max_steps", 10, "--init", whole(), "--out", tmp_path / "tuned")
    again = ["--data", byte_data, "--out", tmp_path / "tuned"]
    resumes(*again, "--init", whole())()
    # the weights' shape wins over that of a preset, and the same command resumes
    resumes(*again, "--init", whole(), "--preset", "gpt2-medium")()
    for flags in (["--init", whole() / "best"], ["--preset", "gpt2-medium"], ["--n_layer", 3], ["--seed", 1],
                  ["--no_shuffle"], ["--max_steps", 9]):
        refused(resumes(*again, *flags), flags[0].replace("no_", "").replace("preset", "n_"), "checkpoint_")


def test_resume_takes_a_runs_folder_and_refuses_another_path(byte_data, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    resumes("--data", byte_data, "--out", "other", "--resume", whole())()
    assert f"{whole()}/checkpoint_000040.pt at step 40 of 40" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for given in ("nowhere", "empty", "empty/checkpoint_000777.pt", "gpt2"):
        refused(resumes("--data", byte_data, "--resume", given), given)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(byte_data, whole, tmp_path):
    out = tmp_path / "log"
    shutil.copytree(whole(), out)
    step, older = checkpoints(out)[0]
    (out / "checkpoint_000777.pt.123.tmp").write_bytes(b"left by a kill")
    (out / "notes.tmp").write_text("mine")
    assert f"at step {step} of 40" in run("--data", byte_data, "--batch_size", 2, "--out", out, "--resume",
                                               older).stdout
    for name in ("checkpoint_000040.pt", "log.txt"):
        assert (out / "previous_1" / name).read_bytes() == (whole() / name).read_bytes()
    (out / "notes.tmp").unlink()
    same_end(out, whole())


def test_going_on_from_another_folders_checkpoint_leaves_that_folder_alone(byte_data, whole, tmp_path):
    before = {path: path.is_file() and path.read_bytes() for path in whole().iterdir()}
    run("--data", byte_data, "--batch_size", 2, "--out", tmp_path, "--resume", checkpoints(whole())[0][1])
    assert {path: path.is_file() and path.read_bytes() for path in whole().iterdir()} == before
    assert logged(tmp_path)[39] == logged(whole())[39]


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "weights only": lambda path: torch.save({"model": load_model(path).state_dict(), "model_config": {},
                                             "recipe": "gpt2"}, path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_refused_and_the_older_one_named(kind, byte_data, whole, tmp_path):
    """Never passed over in silence: that would run steps again without a word."""
    shutil.copytree(whole(), tmp_path / "log")
    DAMAGES[kind](tmp_path / "log/checkpoint_000040.pt")
    refused(resumes("--data", byte_data, "--out", tmp_path / "log"), "checkpoint_000040.pt",
            "checkpoint_000030.pt")
