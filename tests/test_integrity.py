"""What a week of training rests on: damage is refused where it is read and never saved, and nothing that is
not ours is wiped."""
import errno
import os
import random
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hellaswag_file, limit_file_size, run

import bench
import fineweb
import hellaswag
import model
import runtime.checkpoint
import sample
import train_gpt2
from model import GPT, GPTConfig, load_model
from runtime.checkpoint import Saver
from runtime.cli import RunError, UserError
from runtime.distributed import Process
from runtime.files import checkpoints, readable, replace_file
from runtime.integrity import fault_of
from runtime.resume import nonfinite_error
from runtime.shards import write_shard
from runtime.weights import read_checkpoint

TINY = ["--n_layer", "1", "--n_head", "1", "--n_embd", "8", "--block_size", "8", "--vocab_size", "96",
        "--dtype", "float32", "--device", "cpu", "--total_batch_size", "32", "--warmup_steps", "1",
        "--val_tokens", "16", "--sample_every", "0", "--hellaswag_every", "0", "--no_plot"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with `data` and `log`, a run of 6 steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "data").mkdir()
    for i, split in enumerate(("val", "train")):
        write_shard(folder / "data" / f"x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
    run("--data", folder / "data", "--out", folder / "log", *TINY, "--max_steps", 6, "--checkpoint_every", 2,
        "--keep_checkpoints", 0)
    return folder


@pytest.fixture
def log(finished, tmp_path):
    """A copy of that run's folder."""
    return shutil.copytree(finished / "log", tmp_path / "log")


def train(finished, out, *flags):
    """The same command in this process; its signal handlers stay those of pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt2.StopSignals, "install", lambda signals: signals)
        return train_gpt2.train(["--data", str(finished / "data"), "--out", str(out), *TINY,
                                 *map(str, flags)])


def flip(path, position, bit=3):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def same(a, b):
    """Whether two checkpoints hold the same values, bit for bit."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# -----------------------------------------------------------------------------
# a flipped bit

def test_a_flipped_bit_in_any_record_of_a_checkpoint_is_refused(finished, tmp_path):
    good, path = finished / "log/checkpoint_000006.pt", tmp_path / "a.pt"
    with zipfile.ZipFile(good) as archive:
        records = [info for info in archive.infolist() if info.file_size]
    reader = torch._C.PyTorchFileReader(str(good))
    assert len(records) > 40
    for info in records:
        shutil.copy(good, path)
        flip(path, reader.get_record_offset(info.filename.partition("/")[2]) + info.file_size // 2)
        with pytest.raises(UserError, match="a.pt cannot be read.*checksum: bits have changed"):
            read_checkpoint(path)


def test_a_flipped_bit_anywhere_is_refused_or_changes_no_value(finished, tmp_path):
    """Names and lengths in the zip's own lists, and the bytes between records that nothing reads."""
    good, path, dice, refusals = finished / "log/checkpoint_000006.pt", tmp_path / "a.pt", random.Random(3), 0
    before = read_checkpoint(good)
    for _ in range(60):
        shutil.copy(good, path)
        flip(path, dice.randrange(good.stat().st_size), dice.randrange(8))
        try:
            assert same(read_checkpoint(path), before)
        except UserError:
            refusals += 1
    assert refusals > 10


def test_a_run_does_not_resume_from_a_flipped_bit_and_names_the_checkpoint_before(finished, log):
    newest = log / "checkpoint_000006.pt"
    flip(newest, newest.stat().st_size // 2)
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    result = run("--data", finished / "data", "--out", log, "--max_steps", 8, code=2)
    assert re.fullmatch(r"train_gpt2.py: .*checkpoint_000006.pt cannot be read.*bits have changed.*remove "
                        r"it, and the same command resumes from checkpoint_000004.pt\n", result.stderr)
    assert before == {path.name: path.read_bytes() for path in log.iterdir()}


def test_a_checkpoint_that_the_disk_changed_is_noticed_before_older_ones_are_removed(tmp_path, monkeypatch):
    tiny = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path), keep_checkpoints=1)
    state = train_gpt2.make_state(config, tiny, tiny.configure_optimizers(1e-3, 0.1), Process())
    saver = Saver(config, {}, None, Process())
    saver.save(state)

    def failing(path, write):
        replace_file(path, write)
        flip(Path(path), Path(path).stat().st_size // 2)
    monkeypatch.setattr(runtime.checkpoint, "replace_file", failing)
    state.step = 1
    with pytest.raises(RunError, match="checkpoint_000001.pt cannot be read as it was written.*the "
                       "checkpoints of other steps are still there"):
        saver.save(state)
    assert [step for step, _ in checkpoints(tmp_path)] == [0]


def test_an_export_with_a_flipped_bit_is_refused_and_a_changed_one_not_replaced(tmp_path):
    GPT(GPTConfig(block_size=8, vocab_size=50304, n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path)
    load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    flip(weights, weights.stat().st_size - 100)
    with pytest.raises(UserError, match="model.safetensors does not match SHA256SUMS: it was damaged"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="holds other files than an earlier export .model.safetensors"):
        model.main(["export", "gpt2", str(tmp_path)])
    (tmp_path / "SHA256SUMS").unlink()
    load_model(tmp_path)
    with pytest.raises(UserError, match="holds other files than an earlier export .config.json"):
        model.main(["export", "gpt2", str(tmp_path)])


# -----------------------------------------------------------------------------
# numbers that no training makes

def poisoned(path, where):
    content = read_checkpoint(path)
    content = {**content, "model": {k: v.clone() for k, v in content["model"].items()}}
    moments = content["optimizers"][0]["state"][3]
    for key in moments:
        moments[key] = moments[key].clone()
    if where == "weight":
        content["model"]["transformer.ln_f.weight"][2] = float("nan")
    elif where == "huge weight":
        content["model"]["transformer.h.0.mlp.c_fc.bias"][3] = 3e38
    elif where == "best":
        content["best"] = (0.5, 999)
    elif where == "validation loss":
        content["val_loss"] = float("nan")
    elif where == "no optimizers":
        content["optimizers"] = []
    elif where in ("a late step", "a huge step"):
        content["step"] = 2**41 if where == "a late step" else 10**400
    else:
        key, value = where
        moments[key].view(-1)[0] = value
    replace_file(path, lambda file: torch.save(content, file))          # it is mapped into memory


@pytest.mark.parametrize(("where", "said"), [
    ("weight", "transformer.ln_f.weight holds NaN numbers"),
    (("exp_avg", float("nan")), "exp_avg of transformer.* holds NaN"),
    (("exp_avg", float("inf")), "exp_avg of transformer.* holds infinite"),
    (("exp_avg_sq", -1e-3), "exp_avg_sq of transformer.* holds negative"),
    (("step", -1.0), "has made -1.0 updates"), (("step", 2.5), "has made 2.5 updates"),
    (("step", 1e9), "has made 1000000000.0 updates"),
    ("best", "its best is none that a run has at step 6"), ("validation loss", "its val_loss is none"),
    ("no optimizers", "it holds 0 optimizers instead of 1"),
    ("a late step", "its step is none that a run has"), ("a huge step", "its step is none that a run has")])
def test_a_checkpoint_with_numbers_that_no_training_makes_is_refused(where, said, finished, log):
    poisoned(log / "checkpoint_000006.pt", where)
    with pytest.raises(UserError, match=f"checkpoint_000006.pt.*{said}.*remove it, and the same command "
                       "resumes from checkpoint_000004.pt"):
        train(finished, log, "--max_steps", 8)


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_what_is_not_finite_is_not_saved(what, tmp_path):
    tiny = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path))
    state = train_gpt2.make_state(config, tiny, tiny.configure_optimizers(1e-3, 0.1), Process())
    for p in tiny.parameters():
        p.grad = torch.ones_like(p)
    state.optimizers[0].step()
    saver = Saver(config, {}, None, Process())
    saver.save(state)
    p, state.step = tiny.transformer.ln_f.weight, 1
    with torch.no_grad():
        (p if what == "weight" else state.optimizers[0].state[p]["exp_avg_sq"])[2] = float("inf")
    with pytest.raises(RunError, match="transformer.ln_f.weight holds infinite numbers: checkpoint_000001.pt "
                       "is not saved. The same command resumes from checkpoint_000000.pt"):
        saver.save(state)
    assert [step for step, _ in checkpoints(tmp_path)] == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_faults_are_told_apart(dtype):
    finite = torch.tensor([[0.0, -3.0], [1.0, 2.0]], dtype=dtype)
    assert fault_of(finite) is None and fault_of(finite, -3) is None and fault_of(finite, 0) == "negative"
    for value, fault in ((float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "infinite")):
        finite[1, 0] = value
        assert fault_of(finite) == fault


def test_after_a_bad_first_step_of_a_resume_the_checkpoint_before_is_named(finished, log):
    poisoned(log / "checkpoint_000006.pt", "huge weight")           # finite, what follows from it is not
    with pytest.raises(RunError, match="step 6: loss nan.*first step since .*checkpoint_000006.pt, which may "
                       "be damaged: remove it, and the same command resumes from checkpoint_000004.pt"):
        train(finished, log, "--max_steps", 8)
    assert [step for step, _ in checkpoints(log)] == [2, 4, 6]


def test_what_is_said_of_a_bad_step_is_true(tmp_path):
    tiny = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path))
    state = train_gpt2.make_state(config, tiny, tiny.configure_optimizers(1e-3, 0.1), Process())
    assert re.match("x. Each such update was skipped and changed no weight: lower --max_lr.* There is no "
                    "checkpoint", str(nonfinite_error("x", state, config, 5)))
    with torch.no_grad():
        tiny.transformer.ln_f.weight[0] = float("nan")
    (tmp_path / "checkpoint_000003.pt").touch()
    assert str(nonfinite_error("x", state, config, 5)) == (
        "x. transformer.ln_f.weight holds NaN numbers, since an earlier update. The same command resumes "
        "from checkpoint_000003.pt")


def test_a_validation_loss_that_is_not_finite_ends_the_run(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: float("nan"))
    with pytest.raises(RunError, match="step 0: val loss nan. The weights are finite, but too large: "
                       "lower --max_lr or lengthen --warmup_steps. There is no checkpoint yet: "
                       "the same command starts again$"):
        train(finished, tmp_path / "log", "--max_steps", 2)
    assert not checkpoints(tmp_path / "log")


def test_no_command_uses_a_model_with_numbers_that_are_not_finite(finished, tmp_path):
    path = shutil.copy(finished / "log/checkpoint_000006.pt", tmp_path / "a.pt")
    poisoned(path, "weight")
    questions = hellaswag_file(tmp_path / "q.jsonl")
    for command, *argv in ((sample.main, "--model", path, "--temperature", "0"),
                           (hellaswag.main, "--model", path, "--data", questions),
                           (model.main, "export", path, tmp_path / "exported")):
        with pytest.raises(UserError, match="transformer.ln_f.weight holds NaN numbers"):
            command([*map(str, argv)])
    with pytest.raises(UserError, match="transformer.ln_f.weight holds NaN numbers"):
        train(finished, tmp_path / "log", "--init", path, "--max_steps", 1)


# -----------------------------------------------------------------------------
# what is not ours

def test_a_log_without_checkpoints_is_moved_and_not_wiped(finished, log):
    for _, path in checkpoints(log):
        path.unlink()
    (log / "loss.png").write_bytes(b"a picture of someone")
    before = {path.name: path.read_bytes() for path in log.iterdir()}
    train(finished, log, "--max_steps", 1, "--checkpoint_every", 0)
    moved = {path.name: path.read_bytes() for path in (log / "previous_1").iterdir()}
    assert moved == before and {"log.txt", "metrics.csv", "loss.png"} <= before.keys()
    assert not (log / "loss.png").exists() and (log / "log.txt").read_text().startswith("0 val ")


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


COMMANDS = {
    "train": (train_gpt2.train, "--out="), "train data": (train_gpt2.train, "--data", ""),
    "train init": (train_gpt2.train, "--init", ""), "train resume": (train_gpt2.train, "--resume", ""),
    "sample": (sample.main, "--model", ""), "hellaswag": (hellaswag.main, "--model="),
    "hellaswag data": (hellaswag.main, "--data", ""), "export": (model.main, "export", "gpt2", ""),
    "export from": (model.main, "export", "", "x"), "fineweb": (fineweb.main, "--input", "a", "--out", ""),
    "fineweb input": (fineweb.main, "--input", "a", "", "--out", "x"),
    "bench json": (bench.main, "ladder", "--json", ""), "bench plot": (bench.main, "ladder", "--plot="),
    "bench path": (bench.main, "compare", "")}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_path_is_a_mistake(name, tmp_path, monkeypatch):
    """That of an unset variable of the shell: it would be the working directory."""
    monkeypatch.chdir(tmp_path)
    command, *argv = COMMANDS[name]
    with pytest.raises(UserError, match=" is empty: give a value"):
        command(argv)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_a_line_of_the_log_is_told_in_one_line(finished, tmp_path):
    result = run("--data", finished / "data", "--out", tmp_path / "log", *TINY, "--max_steps", 100,
                 "--checkpoint_every", 0, "--val_every", 0, code=1, preexec_fn=limit_file_size(500))
    said = r"train_gpt2.py: cannot write .*(log.txt|metrics.csv) \(File too large\): make room.*\n"
    assert re.fullmatch(said, result.stderr), result.stderr


@pytest.mark.parametrize(("number", "said"), [
    (errno.EINVAL, None), (errno.ENOTSUP, None), (errno.EIO, "choose another folder"),
    (errno.EROFS, "make its folder writable, or choose"), (errno.ENOSPC, "make room, or choose")])
def test_a_file_system_without_fsync_will_do_and_a_failing_one_is_told(number, said, finished, tmp_path,
                                                                       monkeypatch):
    def fsync(descriptor):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", fsync)
    if said is None:
        assert train(finished, tmp_path / "log", "--max_steps", 2, "--checkpoint_every", 2) == 0
        assert [step for step, _ in checkpoints(tmp_path / "log")] == [2]
        return
    with pytest.raises(RunError, match=f"cannot write .*a.json.*: {said}"):
        replace_file(tmp_path / "a.json", lambda file: file.write(b"{}"))
    assert not list(tmp_path.iterdir())
    with pytest.raises((RunError, UserError), match="cannot (write|be written)"):
        train(finished, tmp_path / "log", "--max_steps", 2, "--checkpoint_every", 2)


def test_the_best_checkpoint_is_one_whose_own_loss_was_measured(finished, tmp_path, monkeypatch):
    """Checkpoints at 3, 6 and 7, validations at 0, 2, 4, 6 and 7: that of step 2 is the lowest."""
    losses = iter([4.0, 1.0, 3.0, 2.0, 2.5])
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(losses))
    train(finished, tmp_path, "--max_steps", 7, "--val_every", 2, "--checkpoint_every", 3)
    best = [read_checkpoint(path)["best"] for _, path in checkpoints(tmp_path)]
    assert best == [None, (2.0, 6), (2.0, 6)]


def test_only_checkpoints_that_the_run_has_written_are_removed(finished, log, capsys):
    """Not a copy under another name, nor one from elsewhere, nor one that its owner protects."""
    theirs = [log / "checkpoint_2.pt", log / "checkpoint_000001.pt", log / "checkpoint_000003.pt"]
    for path in theirs[:2]:
        shutil.copy(log / "checkpoint_000002.pt", path)
    theirs[2].mkdir()
    train(finished, log, "--max_steps", 8, "--checkpoint_every", 1, "--keep_checkpoints", 1, "--val_every", 0)
    assert all(path.exists() for path in theirs)
    best = read_checkpoint(log / "checkpoint_000008.pt")["best"][1]
    assert {step for step, _ in checkpoints(log)} == {1, 3, best, 8}


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(finished, log, capsys, monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: exec("raise PermissionError(1, 'no')"))
    train(finished, log, "--max_steps", 8, "--checkpoint_every", 4, "--keep_checkpoints", 1, "--val_every", 0)
    assert "warning: checkpoint_000002.pt is not removed (no)" in capsys.readouterr().out


def test_sums_of_another_program_are_read_or_left_alone(tmp_path):
    GPT(GPTConfig(block_size=8, vocab_size=50304, n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path)
    sums = {name: digest for digest, name in map(str.split, (tmp_path / "SHA256SUMS").open())}
    lines = [f"{sums['config.json'].upper()} *config.json", "", "# made by hand", f"{'0' * 64}  thesis.pdf"]
    (tmp_path / "SHA256SUMS").write_text("\n".join(lines))
    load_model(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ./model.safetensors\n")
    with pytest.raises(UserError, match="model.safetensors does not match"):
        load_model(tmp_path)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/SHA256SUMS").write_text(f"{'0' * 64}  thesis.pdf\n")
    with pytest.raises(UserError, match="holds other files than an earlier export .SHA256SUMS"):
        model.main(["export", "gpt2", str(tmp_path / "alone")])


def test_a_file_that_was_saved_without_checksums_is_read(finished, tmp_path):
    content = read_checkpoint(finished / "log/checkpoint_000006.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(read_checkpoint(tmp_path / "a.pt"), content)


@pytest.mark.parametrize(("raised", "said"), [
    (PermissionError(1, "Forbidden"), "a cannot be read (Forbidden): make it readable, or b"),
    (IsADirectoryError(21, "Is a directory"), "a cannot be read (Is a directory): b"),
    (ValueError("c\nd"), "a cannot be read (c d): b"), (KeyError("c"), "a cannot be read (KeyError: 'c'): b"),
    (UserError("c"), "c"), (RunError("c"), "c")])
def test_what_is_wrong_with_a_file_is_one_line_with_cause_and_remedy(raised, said):
    with pytest.raises((UserError, RunError)) as caught, readable("a", "b"):
        raise raised
    assert str(caught.value) == said
