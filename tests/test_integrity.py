"""What is not finite is neither saved nor resumed from, what is not ours is not wiped, and what a file system
refuses is told in one line."""
import errno
import importlib
import os
import shlex

import numpy as np
import pytest
import torch

import helpers
import train_gpt2
from helpers import refused
from peers import make_model
from runtime.checkpoint import Saver
from runtime.console import Record
from runtime.files import checkpoints, replace_file
from runtime.shards import write_shard
from runtime.weights import read_checkpoint

TINY = ["--n_layer", "1", "--n_head", "1", "--n_embd", "8", "--block_size", "8", "--vocab_size", "96",
        "--dtype", "float32", "--device", "cpu", "--total_batch_size", "32", "--warmup_steps", "1",
        "--val_tokens", "16", "--sample_every", "0", "--hellaswag_every", "0"]
LN = "transformer.ln_f.weight"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("val_000000", "train_000001"):
        write_shard(folder / f"x_{name}.npy", np.arange(400, dtype=np.uint16) % 96)
    return folder


@pytest.fixture
def train(data):
    return lambda out, *flags: helpers.train("--data", data, "--out", out, *TINY, *flags)


@pytest.fixture
def log(train, tmp_path):
    """The folder of a run of 4 steps with checkpoints at 2 and 4."""
    train(tmp_path / "log", "--max_steps", 4, "--checkpoint_every", 2, "--keep_checkpoints", "all")
    return tmp_path / "log"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file()}


@pytest.mark.parametrize("kind, key", [("model", None), ("optimizers", "exp_avg"),
                                       ("optimizers", "exp_avg_sq")])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused_the_one_before_named(kind, key, log, train):
    path, value = log / "checkpoint_000004.pt", torch.zeros(8)
    content, value[2] = read_checkpoint(path), torch.inf if key == "exp_avg_sq" else torch.nan
    content[kind] = content[kind] | {LN: content[kind][LN] | {key: value} if key else value}
    replace_file(path, lambda file: torch.save(content, file))          # it is mapped into memory
    before = contents(log)
    refused(lambda: train(log, "--max_steps", 8), path.name, LN, "checkpoint_000002.pt")
    assert before == contents(log)


@pytest.mark.parametrize("kind, background", [("model", True), ("optimizers", True), ("model", False)])
def test_what_is_not_finite_is_not_saved(kind, background, tmp_path):
    weights = {name: p.detach().clone() for name, p in make_model().named_parameters()}
    moments = {name: {"exp_avg_sq": torch.zeros_like(p)} for name, p in weights.items()}
    saver, record = Saver(tmp_path, 1, background, print), Record(tmp_path, 0, (32).__mul__)

    def save(step):
        saver.write({"model": weights, "optimizers": moments, "step": step}, record)
        saver.finish()
    save(0)
    (weights[LN] if kind == "model" else moments[LN]["exp_avg_sq"])[2] = torch.inf
    refused(lambda: save(1), LN, "checkpoint_000001.pt", "checkpoint_000000.pt", failed=True)
    assert [step for step, _ in checkpoints(tmp_path)] == [0]


def test_a_validation_loss_that_is_not_finite_ends_the_run_at_a_saved_step(log, train, monkeypatch):
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: float("nan"))
    refused(lambda: train(log, "--max_steps", 8, "--val_every", 8), "nan", "checkpoint_000008.pt",
            failed=True)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_torch_alone_reads_a_checkpoint_of_float32_with_the_moments_of_the_docs(recipe, train, tmp_path):
    train(tmp_path, "--recipe", recipe, "--dtype", "bfloat16", "--max_steps", 2, "--checkpoint_every", 2)
    checkpoint = torch.load(tmp_path / "checkpoint_000002.pt", weights_only=True)
    weights, moments = checkpoint["model"], checkpoint["optimizers"]
    for name, state in moments.items():
        muon = recipe != "gpt2" and ".h." in name and weights[name].dim() == 2
        assert {*state} == ({"momentum_buffer"} if muon else {"exp_avg", "exp_avg_sq", "step"}), name
        for tensor in (weights[name], *(state[key] for key in state.keys() - {"step"})):
            assert tensor.dtype == torch.float32 and tensor.shape == weights[name].shape, name
    tied = weights.keys() - moments.keys()
    assert tied == ({"lm_head.weight"} if recipe != "speedrun" else set())
    assert all(weights[name].data_ptr() == weights["transformer.wte.weight"].data_ptr() for name in tied)


def test_another_runs_files_are_moved_by_their_names_and_nothing_else_is_touched(log, train):
    theirs = {"checkpoint_best.pt", "thesis.tmp", "checkpoint_1.pt.old.tmp", ".train_gpt2.lock"}
    for name in ("loss.png", "wandb_id", "checkpoint_best.pt", "thesis.tmp", "checkpoint_1.pt.old.tmp"):
        (log / name).write_text("of someone")
    before = contents(log)
    assert {"log.txt", "metrics.csv", "checkpoint_000002.pt", "wandb_id"} <= before.keys()
    for name in ("checkpoint_000777.pt.123.tmp", "log.txt.tmp", "metrics.csv.9.tmp"):       # ours: removed
        (log / name).write_text("half")
    for name in ("thesis", "checkpoint_000009.pt.tmp"):
        (log / name).mkdir()
    for number in (1, 2):
        train(log, "--max_steps", 1, "--checkpoint_every", 0, "--resume", "never")
        assert contents(log / "previous_1") == {name: x for name, x in before.items() if name not in theirs}
        assert {path.name for path in log.iterdir()} == theirs | {
            "thesis", "checkpoint_000009.pt.tmp", "log.txt", "metrics.csv",
            *(f"previous_{i}" for i in range(1, number + 1))}
        assert all((log / name).read_bytes() == before[name] for name in theirs)
    assert contents(log / "previous_2").keys() == {"log.txt", "metrics.csv"}


@pytest.mark.parametrize("line, word", [
    ("train_gpt2 --out=", "--out"), ("train_gpt2 --data ''", "--data"), ("train_gpt2 --init ''", "--init"),
    ("train_gpt2 --resume ''", "--resume"), ("sample --model ''", "--model"),
    ("hellaswag --data ''", "--data"), ("export gpt2 ''", "folder"), ("export '' x", "source"),
    ("fineweb --input a --out ''", "--out"), ("fineweb --input a '' --out x", "--input"),
    ("bench recipes --plot ''", "--plot"), ("bench compare ''", "")])
def test_an_empty_path_is_a_mistake(line, word, tmp_path, monkeypatch):
    """That of an unset variable of the shell: it would be the working directory."""
    monkeypatch.chdir(tmp_path)
    script, *flags = shlex.split(line)
    refused(lambda: importlib.import_module(script).main(flags), word, "empty")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.ENOSPC],
                         ids=errno.errorcode.get)
def test_a_file_system_without_fsync_will_do_and_a_failing_one_is_told(number, train, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))

    def run():
        train(tmp_path / "log", "--max_steps", 2, "--checkpoint_every", 2)
    monkeypatch.setattr(os, "fsync", fsync)
    if number in (errno.EINVAL, errno.ENOTSUP):
        run()
        assert [step for step, _ in checkpoints(tmp_path / "log")] == [2]
        return
    refused(lambda: replace_file(tmp_path / "a.json", lambda file: file.write(b"{}")), "a.json", failed=True)
    assert not list(tmp_path.iterdir())
    refused(run, tmp_path / "log", failed=True)
