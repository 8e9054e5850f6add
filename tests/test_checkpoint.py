"""runtime/checkpoint.py: where a run begins, what it takes from a checkpoint, what one holds."""
import errno
import os
import shutil
import zipfile
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    BYTES,
    contents,
    logged,
    refused,
    run,
    same_end,
    saved,
    saved_steps,
    train,
)
from peers import make_model, nanogpt_checkpoint, plain_gpt2, tokens
from torch.nn.modules.module import register_module_forward_hook

import export
import train_gpt2
from config import Config
from model import GPT
from recipes import RECIPES, fresh_model, load_model
from runtime.checkpoint import (
    find_start,
    host_copy,
    read_state,
    reference_losses,
    weights_digest,
)
from runtime.files import checkpoints, replace_file
from runtime.ranks import Process
from runtime.shards import write_shard

SHORT = [*BYTES, "--max_steps", 4, "--val_every", 0, "--device", "cpu",
         "--checkpoint_every", 1, "--keep_checkpoints", "all"]


@pytest.fixture(scope="module")
def a_run(byte_data, tmp_path_factory):
    """The folder of a run of 4 steps, with a checkpoint of each. Nobody writes there."""
    out = tmp_path_factory.mktemp("a_run") / "log"
    train("--data", byte_data, *SHORT, "--out", out)
    return out


@pytest.fixture
def a_copy(a_run, tmp_path):
    return shutil.copytree(a_run, tmp_path / "log")


@pytest.fixture
def header(byte_data, capsys):
    """header(*flags) is what a run with these flags prints before its first step."""
    def header(*flags):
        capsys.readouterr()
        train("--data", byte_data, *flags, "--dry_run")
        return capsys.readouterr().out

    return header


def change(path, function):
    """Saves a checkpoint again after function(content)."""
    content = torch.load(path, weights_only=True)
    function(content)
    replace_file(path, lambda file: torch.save(content, file))


# ----------------------------------------------------------------------- where a run begins

def test_without_a_checkpoint_a_run_is_new(header, tmp_path):
    assert "resuming" not in header(*SHORT, "--out", tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("mine")
    assert "resuming" not in header(*SHORT, "--out", tmp_path)


def test_the_newest_checkpoint_in_out_is_continued(header, a_run):
    assert f"resuming from {a_run}/checkpoint_000004.pt at step 4 of 4" in header("--out", a_run)


def test_the_newest_is_that_of_the_highest_step_and_other_names_are_not_ours(header, a_copy):
    for step in (999_999, 1_000_000):
        path = shutil.copy(a_copy / "checkpoint_000004.pt", a_copy / f"checkpoint_{step:06d}.pt")
        change(path, lambda content, step=step: content.update(step=step))
    for name in ("checkpoint_9.pt", "checkpoint_best.pt", "checkpoint_02000000.pt",
                 "checkpoint_2000000.pt.bak", "my_checkpoint_3000000.pt"):
        (a_copy / name).write_text("mine")

    text = header("--out", a_copy, "--max_steps", 1_000_003)
    assert f"{a_copy}/checkpoint_1000000.pt at step 1000000 of 1000003" in text


@pytest.mark.parametrize("name, step", [
    ("checkpoint_000002.pt", 2), ("", 4), ("../log/checkpoint_000003.pt", 3),
])
def test_resume_path_is_where_a_run_begins_whose_out_has_no_checkpoint(
        name, step, a_run, header, tmp_path):
    text = header("--out", tmp_path, "--resume", a_run / name)
    assert f" at step {step} of 4" in text
    assert "has begun" not in text


def test_a_run_that_began_elsewhere_leaves_that_folder_alone(byte_data, a_run, tmp_path):
    before = contents(a_run)
    flags = ["--data", byte_data, "--batch_size", 4, "--out", tmp_path / "log"]
    train(*flags, "--resume", a_run / "checkpoint_000002.pt")
    assert contents(a_run) == before
    assert list(logged(tmp_path / "log")) == [2, 3]
    assert logged(tmp_path / "log")[3] == logged(a_run)[3]


def test_where_out_has_checkpoints_the_newest_is_continued_and_a_line_says_so(
        a_run, a_copy, byte_data, capsys):
    """So a command with --resume PATH can be repeated, and torchrun can start it again."""
    (a_copy / "checkpoint_000004.pt").unlink()
    for step in (3, 4):
        first = a_run / "checkpoint_000002.pt"
        capsys.readouterr()
        train("--data", byte_data, "--out", a_copy, "--batch_size", 2, "--resume", first)
        text = capsys.readouterr().out
        assert f" at step {step} of 4" in text
        assert f"--resume {first} " in text and f"{a_copy} has begun" in text
    assert saved_steps(a_copy) == [1, 2, 3, 4]


def test_a_run_that_has_begun_goes_on_without_the_folder_that_resume_named(header, a_copy):
    gone = a_copy.parent / "gone"
    assert " at step 4 of 4" in header("--out", a_copy, "--resume", gone)
    refused(lambda: header("--out", a_copy.parent / "new", "--resume", gone), gone)


def test_a_path_in_out_is_refused_unless_it_is_the_newest(header, a_copy, monkeypatch):
    """Also through a link and by a relative path."""
    (a_copy.parent / "link").symlink_to(a_copy)
    monkeypatch.chdir(a_copy.parent)
    before = contents(a_copy)

    for folder in (a_copy, "log", "link", "log/../link"):
        older = f"{folder}/checkpoint_000002.pt"
        refused(lambda older=older: header("--out", a_copy, "--resume", older), older,
                "checkpoint_000004.pt", "to go back, add another --out")
        text = header("--out", "link", "--resume", f"{folder}/checkpoint_000004.pt")
        assert " at step 4 of 4" in text
        assert " at step 4 of 4" in header("--out", a_copy, "--resume", folder)
    assert contents(a_copy) == before


@pytest.mark.parametrize("given", ["nowhere", "empty", "empty/checkpoint_000777.pt", "gpt2", "."])
def test_a_resume_from_what_is_no_checkpoint_is_refused(given, header, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    refused(lambda: header("--resume", given), given)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_resume_from_an_exported_model_is_refused_with_the_flag_that_takes_it(header, tmp_path):
    make_model().save_pretrained(tmp_path / "exported")
    refused(lambda: header("--resume", tmp_path / "exported", "--out", tmp_path / "log"), "--init")


# ----------------------------------------------------------------------- --init

def test_a_model_of_init_has_to_have_the_recipe_and_the_shape_that_are_given(header, a_run):
    flags = ["--init", a_run, "--sample_every", 0, "--hellaswag_every", 0, "--vocab_size", 256]
    refused(lambda: header(*flags, "--recipe", "speedrun"), "--recipe speedrun", "--recipe gpt2")
    refused(lambda: header(*flags, "--n_layer", 3), "--n_layer 3", f"--init {a_run}", "--n_layer 2")
    assert "(2 layers, 2 heads, width 32," in header(
        *flags, "--preset", "small", "--total_batch_size", 256, "--n_layer", 2)


def test_the_exact_gelu_of_a_nanogpt_stays_that_of_the_runs_that_begin_with_it(
        byte_data, tmp_path):
    sizes = {"vocab_size": 256, "block_size": 32}
    weights = make_model(**sizes).state_dict()
    torch.save(nanogpt_checkpoint(weights, **sizes), tmp_path / "ckpt.pt")
    flags = ["--data", byte_data, "--init", tmp_path / "ckpt.pt", *SHORT, "--n_embd", 16,
             "--max_lr", 1e-12, "--weight_decay", 0]
    train(*flags, "--out", tmp_path / "log", "--max_steps", 1)
    train(*flags, "--out", tmp_path / "log", "--max_steps", 2)

    idx = tokens(2, 9)
    found, _ = load_model(tmp_path / "log")(idx)
    exact = plain_gpt2(weights, 2, idx, gelu="none")
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain_gpt2(weights, 2, idx), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------- flags on a resume

FIXED = {f.name: f for f in fields(Config) if f.metadata.get("fixed")}
PER_RUN = {f.name: f for f in fields(Config) if f.metadata.get("per_run")}
KEPT = {}           # what a resume takes from the checkpoint, and may change
for f in fields(Config):
    if f.name not in {*FIXED, *PER_RUN, "data", "overfit"}:         # --overfit has no checkpoint
        KEPT[f.name] = f


def another_value(f, value):
    """Of this flag. Of one that is "auto" a small number, and of others about the same."""
    if "choices" in f.metadata:
        choices = f.metadata["choices"]
        return choices[choices.index(value) - 1]
    if f.type is bool:
        return not value
    if value == f.metadata.get("word"):
        return f.type(1e-5)
    if f.type is int:
        return value + 1
    if f.type is float:
        return value / 2
    return f"another {value}"


# What a run is asked for: it is small, and each of its flags has another value than its default.
ASKED = {name: another_value(f, f.default) for name, f in KEPT.items()} | {
    "recipe": "speedrun", "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16,
    "vocab_size": 256, "sequence_length": 12, "total_batch_size": 96, "shuffle": False, "seed": 5,
    "max_steps": 3, "warmup_steps": 1, "val_every": 3, "hellaswag_every": 0, "sample_every": 0,
    "checkpoint_every": 1,
}
# With this vocabulary a run is not scored by HellaSwag, and a sample takes no prompt.
CHANGED = {name: another_value(f, ASKED[name]) for name, f in KEPT.items()} | {
    "hellaswag_every": 0, "sample_every": 0}


def as_flags(values):
    """{name: value} as a command line."""
    words = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no_{name}")
        else:
            words += [f"--{name}", value]
    return words


@pytest.fixture(scope="module")
def asked(byte_data, tmp_path_factory):
    """(folder of a run that was asked for ASKED, these flags with those of --init and --data)."""
    folder = tmp_path_factory.mktemp("asked")
    shape = {name: ASKED[name] for name in (
        "recipe", "n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    model = fresh_model(replace(Config(), **shape))
    torch.save({"model": model.state_dict(), "model_config": asdict(model.config),
                "recipe": "speedrun"}, folder / "start.pt")

    values = {**ASKED, "init": str(folder / "start.pt"), "data": str(byte_data)}
    train(*as_flags(values), "--preset", "small", "--batch_size", 2, "--device", "cpu",
          "--recompute", "--shard_optimizer", "--out", folder / "log")
    return folder / "log", values


@pytest.fixture
def log(asked, tmp_path):
    folder, _ = asked
    return shutil.copytree(folder, tmp_path / "log")


def test_what_decides_the_model_and_the_tokens_of_a_step_is_fixed():
    assert {
        "recipe", "init", "n_layer", "n_head", "n_embd", "block_size", "vocab_size",
        "total_batch_size", "sequence_length", "shuffle", "seed"} <= FIXED.keys()


def test_what_is_of_a_command_or_a_machine_is_not_taken_from_a_checkpoint():
    assert {
        "preset", "dry_run", "out", "resume", "wandb", "device", "batch_size", "compile",
        "recompute", "shard_optimizer"} <= PER_RUN.keys()


def test_a_resume_takes_what_is_not_given_from_the_checkpoint(log, asked):
    _, values = asked
    (log / "checkpoint_000003.pt").unlink()
    train("--out", log, "--device", "cpu")
    config = saved(log)["config"]
    assert {name: config[name] for name in values} == values
    for name in PER_RUN.keys() - {"out", "device"}:
        assert config[name] == getattr(Config(), name), name


def test_a_presets_values_do_not_win_over_those_of_a_checkpoint(log, asked):
    _, values = asked
    (log / "checkpoint_000003.pt").unlink()
    # What is fixed, and other in the preset, has to be given; nor can this vocabulary be sampled.
    given = {name: values[name] for name in (*FIXED, "sample_every", "hellaswag_every")}
    train("--out", log, "--preset", "small", *as_flags(given), "--device", "cpu")
    config = saved(log)["config"]
    assert {name: config[name] for name in values} == values


def test_a_resume_takes_what_is_given(log):
    train("--out", log, *as_flags(CHANGED), "--recipe", "speedrun", "--device", "cpu",
          "--batch_size", 1, "--recompute")
    config = saved(log)["config"]
    assert {name: config[name] for name in CHANGED} == CHANGED
    assert config["batch_size"] == 1 and config["recompute"] is True
    assert saved_steps(log)[-1] == 4


@pytest.mark.parametrize("name", sorted(FIXED.keys() - {"init"}))
def test_a_resume_with_another_value_of_what_is_fixed_is_refused(name, log, asked):
    _, values = asked
    other = another_value(FIXED[name], values[name])
    before = contents(log)
    refused(lambda: train("--out", log, *as_flags({name: other})), f"--{name}", values[name],
            f"not {other}", log / "checkpoint_000003.pt", "--out")
    assert contents(log) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_has_moved_takes_another_path_of_the_weights_it_began_with(
        is_there, log, asked, header, tmp_path):
    """And that of a file which is not there any more: nothing is read from it."""
    _, values = asked
    path = tmp_path / "moved" / "base.pt"
    if is_there:
        path.parent.mkdir()
        shutil.copy(values["init"], path)
    text = header("--out", log, "--init", path)
    assert "goes on from checkpoint_000003.pt; --init was read" in text
    assert "at step 3 of 3" in text

    # The next resume of what this one saves takes either path.
    train("--out", log, "--init", path, "--max_steps", 4)
    for init in (path, values["init"]):
        assert "at step 4 of 4" in header("--out", log, "--init", init)


def test_other_weights_than_those_the_run_began_with_are_refused(log, asked, tmp_path):
    _, values = asked
    content = torch.load(values["init"], weights_only=True)
    content["model"]["transformer.wte.weight"][0, 0] += 1
    torch.save(content, tmp_path / "other.pt")
    before = contents(log)
    for init in (tmp_path / "other.pt", "gpt2", "scratch"):
        refused(lambda init=init: train("--out", log, "--init", init), f"not {init}",
                f"set --init to {values['init']}", "--out")
    assert contents(log) == before


def test_a_run_records_a_digest_of_what_it_began_with_if_that_is_a_path(tmp_path, asked):
    _, values = asked
    digests = []
    for init in (values["init"], "owner/model"):
        flags = Config(init=init, out=str(tmp_path))
        start = find_start(flags, Process(), {}, lambda source: make_model())
        digests.append(start.init_digest)
    assert digests == [weights_digest(make_model()), None]


def test_what_a_run_began_with_by_a_name_of_the_hub_is_compared_by_its_name(log, asked, header):
    def by_name(content):
        content["config"]["init"] = "owner/model"
        content["init_digest"] = None

    _, values = asked
    change(log / "checkpoint_000003.pt", by_name)
    assert "at step 3 of 3" in header("--out", log, "--init", "owner/model")
    for init in (values["init"], "owner/other"):
        refused(lambda init=init: train("--out", log, "--init", init), "set --init to owner/model")


def test_a_resume_with_the_same_value_of_what_is_fixed_is_none_to_refuse(log, asked, capsys):
    _, values = asked
    given = {name: values[name] for name in (*FIXED, "sample_every", "hellaswag_every")}
    train("--out", log, *as_flags(given), "--dry_run")
    assert "at step 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_what_auto_has_become_may_be_given_on_a_resume(recipe, byte_data, header, tmp_path):
    train("--data", byte_data, *SHORT, "--max_steps", 1, "--recipe", recipe, "--out", tmp_path)
    again = ["--out", tmp_path, "--recipe", recipe]
    for length in ("auto", 32):
        assert " at step 1 of 1" in header(*again, "--sequence_length", length)
    refused(lambda: header(*again, "--sequence_length", 16), "--sequence_length auto", "not 16")


def test_what_is_auto_is_decided_anew_on_a_resume(byte_data, tmp_path):
    train("--data", byte_data, *SHORT, "--max_lr", 1e-3, "--max_steps", 2, "--out", tmp_path)
    train("--out", tmp_path, "--max_lr", 5e-5, "--max_steps", 20)       # below the old tenth
    assert saved(tmp_path)["config"]["min_lr"] == "auto"
    assert 5e-6 <= logged(tmp_path, "lr")[19] < 6e-6


def test_a_flag_of_the_runs_recipe_may_be_given_alone(asked, a_run, header):
    """--cooldown, which speedrun has, and gpt2, the default of --recipe, has not."""
    folder, _ = asked
    assert " at step 3 of 3" in header("--out", folder, "--cooldown", 0.9)
    refused(lambda: header("--out", a_run, "--cooldown", 0.9), "--cooldown", "--recipe gpt2")


def test_a_run_beyond_its_end_is_refused_and_at_its_end_has_nothing_to_do(a_copy, header):
    before = contents(a_copy)
    refused(lambda: header("--out", a_copy, "--max_steps", 3), a_copy / "checkpoint_000004.pt",
            "--max_steps 3", "step 4", "--resume", "--out")
    train("--out", a_copy, "--max_steps", 4)
    assert contents(a_copy) == before


def test_a_run_from_init_is_continued_by_the_same_command(byte_data, a_run, header, tmp_path):
    train("--data", byte_data, *SHORT, "--max_steps", 1, "--init", a_run, "--out", tmp_path)
    again = ["--out", tmp_path, "--max_steps", 1]
    assert " at step 1 of 1" in header(*again, "--init", a_run)
    refused(lambda: header(*again, "--init", a_run / "checkpoint_000001.pt"), "--init", a_run)
    refused(lambda: header(*again, "--init", a_run, "--n_layer", 3), "--n_layer 2", "not 3")
    # The shape of a preset, which --init overrode then, is no contradiction now.
    header(*again, "--init", a_run, "--preset", "gpt2-medium")
    refused(lambda: header(*again, "--preset", "gpt2-medium"), "--n_", "checkpoint_000001.pt")


# ----------------------------------------------------------------------- damage

def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def number_as_text(path):
    change(path, lambda content: content.update(step="4"))


def flag_of_no_choice(path):
    change(path, lambda content: content["config"].update(attention="flash"))


def without_moments(path):
    change(path, lambda content: content["optimizers"].pop("transformer.ln_f.weight"))


@pytest.mark.parametrize("damage", [
    flip_a_bit, number_as_text, flag_of_no_choice, without_moments])
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_named(damage, a_copy, header):
    """It is never passed over in silence, which would run steps again without a word."""
    damage(a_copy / "checkpoint_000004.pt")
    before = contents(a_copy)
    refused(lambda: header("--out", a_copy), a_copy / "checkpoint_000004.pt",
            "checkpoint_000003.pt")
    assert contents(a_copy) == before

    (a_copy / "checkpoint_000004.pt").unlink()
    assert " at step 3 of 4" in header("--out", a_copy)


def without_a_weight(content):
    del content["model"]["transformer.ln_f.weight"]


def without_optimizers(content):
    del content["optimizers"]


@pytest.mark.parametrize("older, word", [
    (without_a_weight, "transformer.ln_f.weight"), (without_optimizers, "optimizers")])
def test_a_checkpoint_of_another_version_is_called_that_and_is_not_to_be_removed(
        older, word, a_copy, header):
    change(a_copy / "checkpoint_000004.pt", older)
    line = refused(lambda: header("--out", a_copy), a_copy / "checkpoint_000004.pt", word,
                   "version that wrote it")
    assert "remove" not in line


def test_a_command_that_meets_a_flipped_bit_ends_with_exit_code_2(byte_data, a_copy):
    flip_a_bit(a_copy / "checkpoint_000004.pt")
    result = run("--data", byte_data, "--out", a_copy, code=2)
    refused(lambda: result, "checkpoint_000004.pt", "checkpoint_000003.pt")


@pytest.mark.parametrize("key, number", [
    ("weights", torch.nan), ("exp_avg", torch.inf), ("step", torch.nan)])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused(key, number, a_copy, header):
    name = "transformer.ln_f.weight"

    def spoil(content):
        if key == "weights":
            content["model"][name][2] = number
        elif key == "step":
            content["optimizers"][name]["step"].fill_(number)
        else:
            content["optimizers"][name][key][2] = number

    change(a_copy / "checkpoint_000004.pt", spoil)
    refused(lambda: header("--out", a_copy), "checkpoint_000004.pt", name, "checkpoint_000003.pt")


def test_the_only_checkpoint_that_is_damaged_is_refused_with_a_way_on(a_copy, header):
    for step in (1, 2, 3):
        (a_copy / f"checkpoint_{step:06d}.pt").unlink()
    flip_a_bit(a_copy / "checkpoint_000004.pt")
    refused(lambda: header("--out", a_copy), "checkpoint_000004.pt", "another --out")


@pytest.mark.parametrize("damage", [flip_a_bit, without_moments])
def test_of_a_damaged_checkpoint_that_resume_names_the_one_before_it_is_named(
        damage, a_copy, header, tmp_path):
    damage(a_copy / "checkpoint_000002.pt")
    start = ["--out", tmp_path / "new", "--resume"]
    error = refused(lambda: header(*start, a_copy / "checkpoint_000002.pt"),
                    a_copy / "checkpoint_000002.pt", f"--resume {a_copy / 'checkpoint_000001.pt'}")
    assert "remove" not in str(error)

    (a_copy / "checkpoint_000001.pt").unlink()
    refused(lambda: header(*start, a_copy / "checkpoint_000002.pt"),
            a_copy / "checkpoint_000002.pt", "another checkpoint with --resume")


def test_a_checkpoint_that_was_listed_and_is_not_there_is_the_disks_failure(a_copy, header):
    path = a_copy / "checkpoint_000005.pt"
    path.symlink_to(a_copy / "nowhere")             # as a mount with an old list of its files
    line = refused(lambda: header("--out", a_copy), path, "the mount", failed=True)
    assert "remove" not in line


def test_a_zip_that_cannot_be_read_to_its_end_is_not_called_damaged(a_copy, header, monkeypatch):
    def fail(path):
        hidden = zipfile.BadZipFile("File is not a zip file")
        hidden.__context__ = OSError(errno.EIO, "Input/output error")
        raise hidden

    monkeypatch.setattr(zipfile, "ZipFile", fail)
    path = a_copy / "checkpoint_000004.pt"
    line = refused(lambda: header("--out", a_copy), path, "Input/output error", failed=True)
    assert "remove" not in line


@pytest.mark.parametrize("flag", ["--out", "--resume", "--init"])
def test_a_mount_that_is_away_is_told_as_that(flag, header, tmp_path, monkeypatch):
    """os.path.exists says of it that it is not there."""
    stat, listdir = os.stat, os.listdir

    def away(call):
        def fail(path, *arguments, **options):
            if str(path).startswith(f"{tmp_path}/mount"):
                raise OSError(errno.ENOTCONN, "not connected", str(path))
            return call(path, *arguments, **options)
        return fail

    monkeypatch.setattr(os, "stat", away(stat))
    monkeypatch.setattr(os, "listdir", away(listdir))
    refused(lambda: header("--out", tmp_path / "log", flag, tmp_path / "mount/log"),
            tmp_path / "mount/log", "not connected", "the mount", failed=True)


# ----------------------------------------------------------------------- the data of a resume

def reverse(path):
    np.save(path, np.load(path)[::-1].copy())


def shorten(path):
    np.save(path, np.load(path)[:-40])


def rename_it_to_the_end(path):
    path.rename(path.with_name("text_train_000004.npy"))


@pytest.mark.parametrize("damage", [reverse, shorten, rename_it_to_the_end])
def test_other_data_than_the_runs_is_refused(damage, byte_data, a_run, header, tmp_path):
    data = shutil.copytree(byte_data, tmp_path / "data")
    damage(data / "text_train_000002.npy")
    refused(lambda: header("--data", data, "--out", a_run, "--max_steps", 9), a_run, "--init")


def test_other_validation_text_than_the_runs_is_refused(byte_data, header, tmp_path):
    """Its losses could not be compared with those before."""
    flags = ["--val_every", 2, "--out", tmp_path / "log"]
    train("--data", byte_data, *SHORT, *flags)
    data = shutil.copytree(byte_data, tmp_path / "data")
    shorten(data / "text_val_000000.npy")

    refused(lambda: header("--data", data, *flags, "--max_steps", 9), tmp_path / "log", "val")
    header("--data", data, *flags, "--max_steps", 9, "--val_every", 0)


def test_the_same_data_in_another_folder_and_format_is_the_same(
        byte_data, a_run, header, tmp_path):
    for path in byte_data.iterdir():
        write_shard(tmp_path / path.with_suffix(".bin").name, np.load(path))
    assert " at step 4 of 4" in header("--data", tmp_path, "--out", a_run)


def test_the_folder_of_the_data_is_that_of_the_checkpoint(a_run, tmp_path, capsys):
    train("--out", a_run, "--dry_run")
    assert " at step 4 of 4" in capsys.readouterr().out
    refused(lambda: train("--out", a_run, "--data", tmp_path / "nowhere", "--dry_run"),
            tmp_path / "nowhere")


# ----------------------------------------------------------------------- moments

def test_moments_are_copies_and_no_views_of_the_file():
    """The file is mapped into memory, and may change or be removed while the run goes on."""
    of_file = {"exp_avg": torch.ones(3), "step": torch.tensor(7.0), "betas": (0.9, 0.95)}
    state = read_state(of_file, "weight")
    of_file["exp_avg"].zero_()
    of_file["step"].zero_()
    assert state["exp_avg"].tolist() == [1, 1, 1]
    assert state["step"].item() == 7
    assert state["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("recipe", RECIPES)
def test_moments_and_schedules_go_on_where_they_were_bit_for_bit(recipe, byte_data, tmp_path):
    """With a rate that changes in each step, and a clipped norm."""
    flags = ["--data", byte_data, *SHORT, "--recipe", recipe, "--warmup_steps", 2]
    train(*flags, "--out", tmp_path / "whole")
    for step in (1, 3):
        path = tmp_path / f"whole/checkpoint_{step:06d}.pt"
        out = tmp_path / f"from {step}"
        train(*flags, "--resume", path, "--out", out)
        assert logged(out, "lr") == {s: logged(tmp_path / "whole", "lr")[s] for s in range(step, 4)}
        assert_same(saved(out), saved(tmp_path / "whole"))


def assert_same(a, b):
    """Two checkpoints are equal bit for bit, but for their flags."""
    if torch.is_tensor(a):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a.keys() - {"config"}:
            assert_same(a[name], b[name])
    else:
        assert a == b


def test_float16s_scale_goes_on_where_it_was(byte_data, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--dtype", "float16"]
    train(*flags, "--out", tmp_path / "whole")
    train(*flags, "--out", tmp_path / "log", "--resume",
          tmp_path / "whole/checkpoint_000003.pt")
    scaler = saved(tmp_path / "log")["scaler"]
    assert scaler == saved(tmp_path / "whole")["scaler"]
    assert scaler["scale"] == 65536
    assert scaler["_growth_tracker"] == 4


def test_a_run_in_float32_goes_on_in_float16_with_a_new_scale(byte_data, a_copy):
    train("--data", byte_data, *SHORT, "--max_steps", 5, "--dtype", "float16", "--out", a_copy)
    assert saved(a_copy, step=4)["scaler"] == {}
    assert saved(a_copy, step=5)["scaler"]["scale"] == 65536


def test_a_run_whose_first_step_overflowed_is_saved_without_moments_and_resumed(
        byte_data, tmp_path):
    flags = ["--data", byte_data, *SHORT, "--batch_size", 8, "--dtype", "float16",
             "--out", tmp_path]

    def overflow(module, inputs, output):
        if isinstance(module, GPT) and torch.is_grad_enabled():
            _, loss = output
            loss.register_hook(lambda gradient: gradient * torch.inf)

    hook = register_module_forward_hook(overflow)
    try:
        train(*flags, "--max_steps", 1)
    finally:
        hook.remove()
    assert saved(tmp_path)["scaler"]["scale"] == 32768
    assert not any(saved(tmp_path)["optimizers"].values())

    train(*flags, "--max_steps", 2)
    assert saved(tmp_path)["scaler"]["scale"] == 32768
    assert all(saved(tmp_path)["optimizers"].values())


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_float16_cannot_have_is_refused(scale, byte_data, tmp_path, header):
    flags = [*SHORT, "--dtype", "float16", "--out", tmp_path, "--max_steps", 1]
    train("--data", byte_data, *flags)
    change(tmp_path / "checkpoint_000001.pt",
           lambda content: content["scaler"].update(scale=scale))
    refused(lambda: header(*flags), "checkpoint_000001.pt", "scale")


def four_optimizers(model, config):
    """Each of them has a state of another shape, and a quarter of the parameters."""
    named = list(model.named_parameters())
    lr = config.max_lr
    return [
        torch.optim.RMSprop(named[0::4], lr=lr, momentum=0.9, centered=True),
        torch.optim.Adagrad(named[1::4], lr=lr),
        torch.optim.SGD(named[2::4], lr=lr, momentum=0.9),
        torch.optim.NAdam(named[3::4], lr=lr),
    ]


def train_with_four_optimizers():
    train_gpt2.GPT2 = replace(train_gpt2.GPT2, make_optimizers=four_optimizers)


@pytest.mark.parametrize("processes, flags", [(1, []), (2, ["--shard_optimizer"])])
def test_any_optimizer_of_torch_is_saved_and_resumed_bit_for_bit(
        processes, flags, byte_data, tmp_path):
    flags = ["--data", byte_data, *SHORT, *flags]
    how = {"processes": processes, "before": [train_with_four_optimizers]}
    run(*flags, "--out", tmp_path / "whole", **how)
    shutil.copytree(tmp_path / "whole", tmp_path / "log")
    for step in (3, 4):
        (tmp_path / f"log/checkpoint_{step:06d}.pt").unlink()

    run(*flags, "--out", tmp_path / "log", **how)

    same_end(tmp_path / "log", tmp_path / "whole", step=4)
    keys = [set(state) for state in saved(tmp_path / "log")["optimizers"].values()]
    assert {"square_avg", "grad_avg", "momentum_buffer", "step"} in keys
    assert {"sum", "step"} in keys
    assert {"momentum_buffer"} in keys
    assert {"exp_avg", "exp_avg_sq", "step", "mu_product"} in keys


class HalfMomentum(torch.optim.Optimizer):
    """Its momentum is bfloat16, and it counts its steps in an int64."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["average"].lerp_(p.grad.bfloat16(), 0.1)
                state["count"] += 1
                p.add_(state["average"].sign(), alpha=-group["lr"])


def train_with_half_momentum():
    train_gpt2.GPT2 = replace(
        train_gpt2.GPT2,
        make_optimizers=lambda model, config: [HalfMomentum(model.parameters(), 1e-3)],
    )


def test_a_resume_keeps_the_dtypes_of_the_optimizers_state(byte_data, tmp_path):
    how = {"before": [train_with_half_momentum]}
    run("--data", byte_data, *SHORT, "--out", tmp_path / "whole", **how)
    shutil.copytree(tmp_path / "whole", tmp_path / "log")
    for step in (3, 4):
        (tmp_path / f"log/checkpoint_{step:06d}.pt").unlink()

    run("--data", byte_data, *SHORT, "--out", tmp_path / "log", **how)

    same_end(tmp_path / "log", tmp_path / "whole", step=4)
    for state in saved(tmp_path / "log")["optimizers"].values():
        assert state["average"].dtype == torch.bfloat16
        assert state["count"].dtype == torch.int64


# ----------------------------------------------------------------------- what a checkpoint holds

@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_torch_alone_reads_a_checkpoint_with_float32_weights_and_moments(
        recipe, byte_data, tmp_path):
    train("--data", byte_data, *SHORT, "--recipe", recipe, "--dtype", "bfloat16", "--max_steps", 1,
          "--out", tmp_path)
    checkpoint = torch.load(tmp_path / "checkpoint_000001.pt", weights_only=True)
    assert {"model", "config", "recipe", "step", "optimizers"} <= checkpoint.keys()
    assert checkpoint["recipe"] == recipe and checkpoint["step"] == 1

    weights = checkpoint["model"]
    for name, state in checkpoint["optimizers"].items():
        is_muons = weights[name].dim() == 2 and (
            name.startswith("pointer.") or recipe != "gpt2" and ".h." in name)
        keys = {"exp_avg", "exp_avg_sq", "step"}
        if is_muons:
            keys = {"momentum_buffer"}
        assert set(state) == keys, name
        for tensor in (weights[name], *(state[key] for key in keys - {"step"})):
            assert tensor.dtype == torch.float32
            assert tensor.shape == weights[name].shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_tied_weights_are_one_tensor_in_a_checkpoint(recipe, byte_data, tmp_path):
    train("--data", byte_data, *SHORT, "--recipe", recipe, "--max_steps", 1, "--out", tmp_path)
    weights = torch.load(tmp_path / "checkpoint_000001.pt", weights_only=True)["model"]
    head = weights["lm_head.weight"].data_ptr()
    is_tied = head == weights["transformer.wte.weight"].data_ptr()
    model = fresh_model(Config(recipe=recipe, n_layer=1, n_head=1, n_embd=8))
    assert is_tied == (model.lm_head.weight is model.transformer.wte.weight)


def test_a_copy_for_the_cpu_keeps_what_is_there_and_ties():
    weight = torch.ones(3)
    copies = host_copy({"a": weight, "b": weight, "c": torch.zeros(3)})
    assert copies["a"] is copies["b"]
    assert copies["a"].data_ptr() == weight.data_ptr()
    assert copies["c"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_digest_that_compares_the_ranks_covers_each_parameter(recipe):
    model = make_model(cls=RECIPES[recipe].model)
    expected = weights_digest(model)
    for name, p in model.named_parameters():
        flat = p.data.flatten()
        for i in (0, flat.numel() - 1):
            value = flat[i].item()
            flat_view = p.data.view(-1)
            flat_view[i] += 1e-3
            assert weights_digest(model) != expected, name
            flat_view[i] = value
    assert weights_digest(model) == expected


def change_a_weight_of_rank_1(name):
    """One weight of rank 1 changes by itself in its third forward."""
    forwards = []

    def after(module, inputs, output):
        if isinstance(module, GPT) and torch.is_grad_enabled():
            forwards.append(module)
            if len(forwards) == 3 and torch.distributed.get_rank() == 1:
                module.get_parameter(name).data[7] += 1e-4

    register_module_forward_hook(after)


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.h.0.ln_1.bias"])
def test_weights_that_drifted_apart_end_the_run_at_a_save_in_one_line(name, byte_data, tmp_path):
    result = run("--data", byte_data, *BYTES, "--val_every", 0, "--max_steps", 6,
                 "--checkpoint_every", 3, "--out", tmp_path, processes=2, code=1,
                 before=[partial(change_a_weight_of_rank_1, name)])
    assert result.stderr.count("\n") == 1
    assert "drifted" in result.stderr and "process 1" in result.stderr
    assert len(logged(tmp_path)) == 3
    assert not checkpoints(tmp_path)


def test_a_run_that_goes_on_does_not_hold_the_file_that_it_came_from(
        byte_data, a_copy, monkeypatch):
    """It is mapped while it is read, and would else keep its disk space after it is removed."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    train_step = train_gpt2.train_step
    held = []

    def noted_step(*arguments):
        held.append(str(a_copy) in maps.read_text())
        return train_step(*arguments)

    monkeypatch.setattr(train_gpt2, "train_step", noted_step)
    train("--data", byte_data, "--out", a_copy, "--max_steps", 5)
    assert held == [False]


# ----------------------------------------------------------------------- a model's code

@pytest.fixture
def relu(monkeypatch):
    """relu(): from now on the MLPs of model.py have ReLU in place of GELU."""
    return lambda: monkeypatch.setattr(
        "model.MLP.forward", lambda mlp, x: mlp.c_proj(torch.relu(mlp.c_fc(x))))


def test_who_has_changed_the_code_since_is_told(relu, a_copy, byte_data, capsys):
    load_model(a_copy)
    assert not capsys.readouterr().err
    relu()

    load_model(a_copy)
    load_model(a_copy / "checkpoint_000001.pt")
    train("--data", byte_data, *SHORT, "--out", a_copy, "--max_steps", 5)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "checkpoint_000004.pt" in line] == lines[::2]
    assert "checkpoint_000001.pt" in lines[1]
    assert len(lines) == 3

    load_model(a_copy)                          # which the new code has saved
    assert not capsys.readouterr().err


def test_a_model_of_other_code_is_not_exported(relu, a_copy, tmp_path):
    relu()
    refused(lambda: export.main([str(a_copy), str(tmp_path / "exported")]), "checkpoint_000004.pt")
    assert not (tmp_path / "exported").exists()


def test_what_the_losses_of_a_models_code_are_computed_with_stays_as_it_was():
    model = fresh_model(Config(n_layer=1, n_head=1, n_embd=8, block_size=8)).train()
    torch.set_float32_matmul_precision("high")
    try:
        assert len(reference_losses(model)) == 8
        assert torch.get_float32_matmul_precision() == "high"
        assert model.training
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_model_that_cannot_compute_here_is_read_all_the_same(monkeypatch, a_run, capsys):
    def forward(model, idx, targets=None):
        raise RuntimeError("its kernel needs a GPU")

    monkeypatch.setattr(GPT, "forward", forward)
    load_model(a_run)
    assert not capsys.readouterr().err
