"""What is not finite is neither saved nor resumed from, what is not ours is not wiped, and what a file system
refuses is told in one line."""
import errno
import importlib
import os
import re
import shutil

import numpy as np
import pytest
import torch

import helpers
import train_gpt2
from helpers import ROOT, run
from model import GPT, GPTConfig
from runtime.checkpoint import Saver
from runtime.cli import RunError, UserError
from runtime.console import Record
from runtime.files import checkpoints, readable, replace_file
from runtime.shards import write_shard
from runtime.weights import read_checkpoint

TINY = ["--n_layer", "1", "--n_head", "1", "--n_embd", "8", "--block_size", "8", "--vocab_size", "96",
        "--dtype", "float32", "--device", "cpu", "--total_batch_size", "32", "--warmup_steps", "1",
        "--val_tokens", "16", "--sample_every", "0", "--hellaswag_every", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with `data` and `log`, a run of 6 steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "data").mkdir()
    for i, split in enumerate(("val", "train")):
        write_shard(folder / "data" / f"x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
    run("--data", folder / "data", "--out", folder / "log", *TINY, "--max_steps", 6, "--checkpoint_every", 2,
        "--keep_checkpoints", "all")
    return folder


@pytest.fixture
def log(finished, tmp_path):
    """A copy of that run's folder."""
    return shutil.copytree(finished / "log", tmp_path / "log")


def train(finished, out, *flags):
    helpers.train("--data", finished / "data", "--out", out, *TINY, *flags)


# -----------------------------------------------------------------------------
# numbers

@pytest.mark.parametrize(("kind", "key", "value", "said"), [
    ("model", None, np.nan, "transformer.ln_f.weight holds numbers that are not finite"),
    ("optimizers", "exp_avg", np.nan, "its optimizer's exp_avg of transformer.ln_f.weight does not fit"),
    ("optimizers", "exp_avg_sq", np.inf, "its optimizer's exp_avg_sq of transformer.ln_f.weight does not")])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused(kind, key, value, said, finished, log):
    path, name = log / "checkpoint_000006.pt", "transformer.ln_f.weight"
    content = read_checkpoint(path)
    tensor = content[kind][name][key] if key else content[kind][name]
    damaged = tensor.clone()
    damaged[2] = value
    content[kind][name] = content[kind][name] | {key: damaged} if key else damaged
    replace_file(path, lambda file: torch.save(content, file))          # it is mapped into memory
    before = {path: path.read_bytes() for path in log.iterdir()}
    with pytest.raises(UserError, match=f"checkpoint_000006.pt.*{said}.*remove it, and the same command "
                       "resumes from checkpoint_000004.pt"):
        train(finished, log, "--max_steps", 8)
    assert before == {path: path.read_bytes() for path in log.iterdir()}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("what", ["weight", "moment"])
def test_what_is_not_finite_is_not_saved(what, background, tmp_path):
    tiny = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    weights = {name: p.detach().clone() for name, p in tiny.named_parameters()}
    moments = {name: {"exp_avg_sq": torch.zeros_like(p)} for name, p in weights.items()}
    saver, record = Saver(tmp_path, 1, background, print), Record(tmp_path, 0, 32)
    content = {"model": weights, "optimizers": moments, "step": 0}
    saver.write(content, record)
    saver.finish()
    name = "transformer.ln_f.weight"
    (weights[name] if what == "weight" else moments[name]["exp_avg_sq"])[2] = float("inf")
    with pytest.raises(RunError, match=f"after step 1, .*{name} is not finite: checkpoint_000001.pt is not "
                       "saved. The same command resumes from checkpoint_000000.pt"):
        saver.write(content | {"step": 1}, record)
        saver.finish()
    assert [step for step, _ in checkpoints(tmp_path)] == [0]


def test_a_validation_loss_that_is_not_finite_ends_the_run_at_a_saved_step(finished, log, monkeypatch):
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda run: float("nan"))
    with pytest.raises(RunError, match="step 8: validation loss nan. The same command resumes from "
                       "checkpoint_000008.pt"):
        train(finished, log, "--max_steps", 8, "--val_every", 8)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_the_lines_of_the_docs_read_a_checkpoint_with_torch_alone(recipe, finished, tmp_path, monkeypatch):
    train(finished, tmp_path / "log", "--recipe", recipe, "--dtype", "bfloat16", "--max_steps", 3,
          "--val_every", 0, "--checkpoint_every", 3)
    (tmp_path / "log/checkpoint_000003.pt").rename(tmp_path / "log/checkpoint_000250.pt")
    text = (ROOT / "docs/formats.md").read_text().split("## Checkpoints")[1]
    lines, found = re.search(r"```python\n(.*?)```", text, re.S)[1], {}
    assert re.findall("import.*", lines) == ["import torch"]
    monkeypatch.chdir(tmp_path)
    exec(lines, found)
    weights, moments, said = found["weights"], found["moments"], {}
    assert all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights.values())
    for name, state in moments.items():
        for key, tensor in state.items():
            shape = () if key == "step" else weights[name].shape
            assert tensor.dtype == torch.float32 and tensor.shape == shape, name
        said.setdefault(" ".join(sorted(state)), []).append(name)
    tied = weights.keys() - moments.keys()
    assert tied == ({"lm_head.weight"} if recipe != "speedrun" else set())
    assert all(weights[name].data_ptr() == weights["transformer.wte.weight"].data_ptr() for name in tied)
    assert said.keys() == {"exp_avg exp_avg_sq step", "momentum_buffer"} - (
        {"momentum_buffer"} if recipe == "gpt2" else set())
    in_adam = "transformer.h.0.attn.c_attn.weight" in said["exp_avg exp_avg_sq step"]
    assert in_adam == (recipe == "gpt2")


# -----------------------------------------------------------------------------
# what is not ours

def test_another_runs_files_are_moved_by_their_names_and_nothing_else_is_touched(finished, log):
    (log / "loss.png").write_bytes(b"a picture of someone")
    (log / "checkpoint_best.pt").write_bytes(b"a name that no run gives")
    (log / "thesis").mkdir()
    before = {path.name: path.read_bytes() for path in log.iterdir() if path.is_file()}
    theirs = {"checkpoint_best.pt", ".train_gpt2.lock"}
    assert {"log.txt", "metrics.csv", "loss.png"} <= before.keys()
    for number in (1, 2):
        train(finished, log, "--max_steps", 1, "--checkpoint_every", 0, "--resume", "never")
        moved = {path.name: path.read_bytes() for path in (log / "previous_1").iterdir()}
        assert moved == {name: data for name, data in before.items() if name not in theirs}
        assert {path.name for path in log.iterdir()} == theirs | {
            "thesis", "log.txt", "metrics.csv", *(f"previous_{i}" for i in range(1, number + 1))}
        assert (log / "log.txt").read_text().startswith("0 val ")
    assert {path.name for path in (log / "previous_2").iterdir()} == {"log.txt", "metrics.csv"}
    assert (log / "checkpoint_best.pt").read_bytes() == before["checkpoint_best.pt"]


def test_only_temporary_files_of_our_own_are_removed(finished, tmp_path):
    out = tmp_path / "log"
    (out / "folder.tmp").mkdir(parents=True)
    (out / "checkpoint_000009.pt.tmp").mkdir()
    theirs = [out / name for name in ("thesis.tmp", "log.txt.backup.tmp", "checkpoint_1.pt.old.tmp")]
    ours = [out / name for name in ("checkpoint_000777.pt.123.tmp", "log.txt.tmp", "metrics.csv.9.tmp")]
    for path in theirs + ours:
        path.write_text("x")
    train(finished, out, "--max_steps", 1, "--checkpoint_every", 0)
    assert all(path.exists() for path in theirs) and not any(path.exists() for path in ours)
    assert (out / "folder.tmp").is_dir() and (out / "checkpoint_000009.pt.tmp").is_dir()


EMPTY = [["train_gpt2", "--out="], ["train_gpt2", "--data", ""], ["train_gpt2", "--init", ""],
         ["train_gpt2", "--resume", ""], ["sample", "--model", ""], ["hellaswag", "--model="],
         ["hellaswag", "--data", ""], ["model", "export", "gpt2", ""], ["model", "export", "", "x"],
         ["fineweb", "--input", "a", "--out", ""], ["fineweb", "--input", "a", "", "--out", "x"],
         ["bench", "ladder", "--json", ""], ["bench", "ladder", "--plot="], ["bench", "compare", ""]]


@pytest.mark.parametrize("argv", EMPTY, ids=" ".join)
def test_an_empty_path_is_a_mistake(argv, tmp_path, monkeypatch):
    """That of an unset variable of the shell: it would be the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=" is empty: give a value"):
        importlib.import_module(argv[0]).main(argv[1:])
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# what a file system refuses

@pytest.mark.parametrize(("number", "said"), [
    (errno.EINVAL, None), (errno.ENOTSUP, None), (errno.EIO, "choose another folder"),
    (errno.EROFS, "make its folder writable, or choose"), (errno.ENOSPC, "make room, or choose")])
def test_a_file_system_without_fsync_will_do_and_a_failing_one_is_told(number, said, finished, tmp_path,
                                                                       monkeypatch):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", fsync)
    if said is None:
        train(finished, tmp_path / "log", "--max_steps", 2, "--checkpoint_every", 2)
        assert [step for step, _ in checkpoints(tmp_path / "log")] == [2]
        return
    with pytest.raises(RunError, match=f"cannot write .*a.json.*: {said}"):
        replace_file(tmp_path / "a.json", lambda file: file.write(b"{}"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match="cannot write"):
        train(finished, tmp_path / "log", "--max_steps", 2, "--checkpoint_every", 2)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_mistake(finished, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written .*: choose another folder"):
        train(finished, tmp_path / "log", "--max_steps", 1)


@pytest.mark.parametrize(("raised", "said"), [
    (PermissionError(1, "Forbidden"), "a cannot be read (Forbidden): make it readable, or b"),
    (IsADirectoryError(21, "Is a directory"), "a cannot be read (Is a directory): b"),
    (ValueError("c\nd"), "a cannot be read (c d): b"), (KeyError("c"), "a cannot be read (KeyError: 'c'): b"),
    (UserError("c"), "c"), (RunError("c"), "c")])
def test_what_is_wrong_with_a_file_is_one_line_with_cause_and_remedy(raised, said):
    with pytest.raises((UserError, RunError)) as caught, readable("a", "b"):
        raise raised
    assert str(caught.value) == said
