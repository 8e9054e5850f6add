"""What a resumed run takes from its checkpoint and what from its flags, what a checkpoint may not forget,
which one it is, and that nobody else writes there. Kills, damage and other data: test_reliability.py."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

import train_gpt2
from helpers import ENV, command, forked, logged, on_ranks, refused, run, script, train
from model import GPT, GPTConfig
from recipes import MODELS, fresh_model, load_model
from peers import TINY as SHAPE
from peers import nanogpt_checkpoint, plain_gpt2, tokens
from runtime.cli import RunError, UserError
from runtime.files import checkpoints
from runtime.shards import write_shard
from test_flags import QUIET, SAVED, STILL, TINY, T, fake_wandb, go, worse_and_worse    # noqa: F401, a fixture
from train_gpt2 import Config

# What becomes of each flag on a resume.
FIXED = set("shuffle recipe init n_layer n_head n_embd block_size vocab_size total_batch_size "
            "sequence_length seed".split())
PER_RUN = set("preset dry_run batch_size device compile recompute shard_optimizer out resume wandb".split())
KEPT = set("data val_tokens hellaswag_data max_steps warmup_steps max_lr min_lr cooldown "
           "weight_decay grad_clip dtype tf32 attention val_every hellaswag_every sample_every sample_prompt "
           "checkpoint_every keep_checkpoints".split())


def test_each_flag_is_fixed_kept_or_of_the_run_alone():
    """--overfit is none of them: it has no checkpoint."""
    assert FIXED | KEPT | PER_RUN | {"overfit"} == {field.name for field in fields(Config)}
    assert len(FIXED) + len(KEPT) + len(PER_RUN) + 1 == len(fields(Config))


def as_flags(values):
    """{name: value} as a command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words += [f"--{name}" if value else f"--no_{name}"]
        else:
            words += [f"--{name}", value]
    return words


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb([], []))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)


def save_start(path, moved=False, **shape):
    """A checkpoint to start from, of fresh weights, or of such that have `moved`."""
    model = fresh_model(replace(Config(), **shape))
    for p in model.parameters() if moved else ():
        p.data += 0.1 * torch.randn_like(p)
    torch.save({"model": model.state_dict(), "model_config": vars(model.config), "recipe": shape["recipe"]},
               path)
    return path


@pytest.fixture(scope="module")
def asked(byte_data, tmp_path_factory):
    """Flags, each with another value than its default: what is fixed or kept, and what is of the run."""
    folder = tmp_path_factory.mktemp("asked")
    shape = dict(recipe="speedrun", n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256)
    return shape | dict(
        init=str(save_start(folder / "start.pt", **shape)), sequence_length=12, total_batch_size=96,
        data=str(shutil.copytree(byte_data, folder / "data")), shuffle=False, val_tokens=33,
        hellaswag_data="examples.jsonl",
        seed=5, max_steps=3, warmup_steps=1, max_lr=0.011, min_lr=0.001, cooldown=0.4,
        weight_decay=0.03, grad_clip=0.7, dtype="bfloat16", tf32=False, attention="naive", val_every=3,
        hellaswag_every=0, sample_every=0, sample_prompt="To be", checkpoint_every=1, keep_checkpoints="all")


OF_THE_RUN = dict(preset="small", batch_size=2, device="cpu", compile=True, recompute=True,
                  shard_optimizer=True, resume="never", wandb=True)


@pytest.fixture
def log(asked, tmp_path, wandb, monkeypatch):
    """The folder of a run that was asked for all that, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    train(*as_flags(asked), *as_flags(OF_THE_RUN), "--out", tmp_path / "log")
    assert asked.keys() == FIXED | KEPT and OF_THE_RUN.keys() == PER_RUN - {"dry_run", "out"}
    return tmp_path / "log"


def config_of(out):
    """The flags as asked, of the newest checkpoint."""
    return torch.load(checkpoints(out)[-1][1], weights_only=True)["config"]


def test_a_resume_takes_from_the_checkpoint_what_is_not_given_but_what_is_of_the_run(log, asked):
    """A preset does not give it: its values are defaults."""
    at_first, defaults = config_of(log), vars(Config())
    assert {name: at_first[name] for name in asked} == asked
    assert all(asked[name] != defaults[name] for name in asked)
    for preset in ({}, {"preset": "small"}):
        (log / "checkpoint_000003.pt").unlink()
        # the preset's values of what is fixed are refused, and so is sampling with this vocabulary
        again = {name: asked[name] for name in (*FIXED, "sample_every", "hellaswag_every") if preset}
        train("--out", log, *as_flags(preset), *as_flags(again))
        resumed = config_of(log)
        assert {name: resumed[name] for name in FIXED | KEPT} == asked
        expected = {name: defaults[name] for name in PER_RUN} | {"out": str(log)} | preset
        assert {name: resumed[name] for name in PER_RUN} == expected


def test_a_resume_takes_what_is_given(log, asked, byte_data):
    other = dict(
        data=str(byte_data), val_tokens=40, hellaswag_data="others.jsonl", max_steps=4,
        warmup_steps=2, max_lr=0.012, min_lr=0.002, cooldown=0.5, weight_decay=0.04, grad_clip=0.8,
        dtype="float32", tf32=True, attention="math", val_every=4, sample_prompt="Or not", checkpoint_every=4,
        keep_checkpoints=2)
    # hellaswag_every and sample_every can only be 0 with this vocabulary
    assert other.keys() == KEPT - {"hellaswag_every", "sample_every"}
    of_the_run = dict(OF_THE_RUN, batch_size=1, resume="auto")
    del of_the_run["preset"]
    train(*as_flags(other), *as_flags(of_the_run), "--recipe", "speedrun", "--out", log)
    assert {name: config_of(log)[name] for name in other} == other
    assert {name: config_of(log)[name] for name in of_the_run} == of_the_run
    assert {name: config_of(log)[name] for name in FIXED} == {name: asked[name] for name in FIXED}
    assert [step for step, _ in checkpoints(log)] == [3, 4]


OTHERS = dict(shuffle=True, recipe="frontier", init="scratch", n_layer=3, n_head=4, n_embd=32, block_size=24,
              vocab_size=300, total_batch_size=192, sequence_length=8, seed=6)

# a flag is first looked at beside the defaults of those that are not given
NEEDS = dict(n_embd=dict(n_head=2),
             vocab_size=dict(sample_every=0, hellaswag_every=0))


def test_a_resume_with_another_value_of_what_is_fixed_is_refused_and_with_the_same_one_is_not(log, asked,
                                                                                              capsys):
    assert OTHERS.keys() == FIXED
    before = {path: path.read_bytes() for path in log.iterdir()}
    for name, value in OTHERS.items():
        given = as_flags({name: value} | NEEDS.get(name, {}))
        said = refused(lambda given=given: train("--out", log, *given), f"--{name}",
                       log / "checkpoint_000003.pt", asked[name])
        assert f"not {value}:" in said
    assert {path: path.read_bytes() for path in log.iterdir()} == before
    train("--out", log, *as_flags({name: asked[name] for name in FIXED}), *as_flags(NEEDS["vocab_size"]),
          "--dry_run")
    assert "at step 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_what_auto_has_become_may_be_spelt_out_on_a_resume(recipe, go):
    found = go(*SAVED, "--recipe", recipe)
    refused(lambda: go("--recipe", recipe, "--sequence_length", T // 2, out=found.out), "--sequence_length")
    refused(lambda: go("--recipe", recipe, "--n_layer", 1, out=found.out), "--n_layer")
    assert not go("--recipe", recipe, "--sequence_length", "auto", out=found.out).trained()


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_what_a_flag_contradicts_is_the_runs_flags_and_not_the_defaults(recipe, go):
    """--cooldown, which speedrun has and the default recipe has not, given alone when the run resumes."""
    begun = go(*SAVED, "--recipe", recipe)
    again = functools.partial(go, "--cooldown", 0.9, "--max_steps", 4, out=begun.out,
                              given=["--device", "cpu"])
    if recipe == "gpt2":
        refused(again, "--cooldown", "--recipe gpt2")
    else:
        assert again().trained() and begun.saved()["recipe"] == "speedrun"


# ----------------------------------------------------------------------------- ranks that were given others

# {flag: what rank 1 is given}, rank 0 the value of `usual`
UNLIKE = dict(
    preset="small", dry_run=True, shuffle=False, val_tokens=99, recipe="speedrun", n_layer=3,
    n_head=1, n_embd=32, block_size=32, vocab_size=300, total_batch_size=16 * T, batch_size=1,
    sequence_length=T // 2, max_steps=9, warmup_steps=1, max_lr=1e-5, min_lr=1e-5,
    weight_decay=0.2, grad_clip=0.5, seed=6, dtype="bfloat16", tf32=False, compile=True, attention="math",
    recompute=True, shard_optimizer=True, val_every=7, sample_prompt="Or not", checkpoint_every=7,
    keep_checkpoints=7, resume="never",
    cooldown=0.5, overfit=True, hellaswag_every=3, sample_every=3)
WITH = dict(cooldown=["--recipe", "speedrun"], overfit=["--block_size", 32],
            hellaswag_every=["--vocab_size", 50304], sample_every=["--vocab_size", 50304])
MAY_DIFFER = {"data", "hellaswag_data", "out", "device", "wandb"}


def main_on_this_rank(attempts, path):
    """For each of the attempts, (flags of rank 0, flags of rank 1): what main raises, to path.RANK. The ranks
    meet and make their process group only once."""
    begin, rank, said = dist.init_process_group, int(os.environ["RANK"]), []
    dist.init_process_group = lambda *args, **how: dist.is_initialized() or begin(*args, **how)
    dist.destroy_process_group = lambda: None
    meet = functools.cache(lambda rendezvous: next(rendezvous("env://")))
    dist.rendezvous = lambda *args, rendezvous=dist.rendezvous, **how: iter([meet(rendezvous)])
    for flags in attempts:
        try:
            said.append(f"taken, {train_gpt2.main(flags[rank])}")
        except UserError as error:
            said.append(str(error))
    with open(f"{path}.{rank}", "w") as file:
        json.dump(said, file)
    dist.barrier()
    os._exit(0)                 # without the interpreter's finalization, in which gloo can crash


def on_two_ranks(attempts, path):
    """What main raised on rank 0 and on rank 1, for each attempt."""
    attempts = [[[str(flag) for flag in flags] for flags in attempt] for attempt in attempts]
    ends = on_ranks(*[functools.partial(main_on_this_rank, attempts, path)] * 2)
    assert [code for code, *_ in ends] == [0, 0], ends
    return list(zip(*(json.loads(path.with_name(f"{path.name}.{rank}").read_text()) for rank in range(2)),
                    strict=True))


def test_ranks_that_were_given_another_value_of_a_flag_are_refused(byte_data, tmp_path):
    """Of each flag but those that name what a machine has."""
    usual = ["--data", byte_data, *TINY, *QUIET, "--out", tmp_path / "log", "--batch_size", 2]
    attempts = {}
    for name, value in UNLIKE.items():
        first = [*usual, *WITH.get(name, [])]
        attempts[name] = first, [*first, *as_flags({name: value})]
    starts = [tmp_path / f"{i}.pt" for i in range(2)]
    for path in starts:
        save_start(path, recipe="gpt2", n_layer=2, n_head=2, n_embd=16, block_size=T, vocab_size=256)
    attempts["init"] = [*usual, "--init", starts[0]], [*usual, "--init", starts[1]]
    attempts["init "] = usual, [*usual, "--init", starts[1]]
    attempts["n_head "] = usual, [*usual, "--n_head", 3]        # which is a mistake even alone
    assert {name.strip() for name in attempts} | MAY_DIFFER == {field.name for field in fields(Config)}
    found = on_two_ranks([*attempts.values()], tmp_path / "said")
    for name, (first, second) in zip(attempts, found, strict=True):
        assert first == second and "process 1: " in first and f"--{name.strip()} " in first, (name, first)
    assert not (tmp_path / "log").exists()


def wandb_is_there():
    sys.modules["wandb"] = fake_wandb([], [])


def test_ranks_may_be_given_other_names_of_what_their_machine_has(byte_data, tmp_path):
    """Rank 1 has another --out, too, and writes nothing."""
    usual = [*TINY, *QUIET, "--max_steps", 1, "--checkpoint_every", 1]
    first = ["--data", byte_data, *usual, "--out", tmp_path / "first"]
    second = ["--data", shutil.copytree(byte_data, tmp_path / "copy"), *usual, "--out", tmp_path / "second",
              "--hellaswag_data", "there.jsonl", "--device", "auto", "--wandb"]
    calls = [command("train_gpt2.py", *flags) for flags in (first, second)]
    ends = on_ranks(*calls, env=ENV | {"CUDA_VISIBLE_DEVICES": ""}, before=[wandb_is_there])
    assert [code for code, *_ in ends] == [0, 0], ends
    assert (tmp_path / "first/checkpoint_000001.pt").exists() and not (tmp_path / "second").exists()


# ----------------------------------------------------------------------------- a checkpoint that forgets

def goes_on_as(whole, go, step, *flags):
    """A run that goes on from the checkpoint of a step of another one, which has them all, logs the same
    losses and ends with the same weights and moments."""
    out, last = whole.out.with_name(f"{whole.out.name} from {step}"), max(dict(checkpoints(whole.out)))
    found = go("--resume", whole.out / f"checkpoint_{step:06d}.pt", *flags, given=["--device", "cpu"],
               out=out, data=config_of(whole.out)["data"])
    assert len(found.trained()) and f" at step {step} of " in found.text
    expected = {s: loss for s, loss in logged(whole.out).items() if s >= step}
    assert logged(out) == expected and max(expected) == last - 1
    a, b = (torch.load(folder / f"checkpoint_{last:06d}.pt") for folder in (out, whole.out))
    for kind in ("model", "optimizers"):
        assert a[kind].keys() == b[kind].keys()
        for name, value in a[kind].items():
            pairs = [(value, b[kind][name])] if kind == "model" else zip(
                value.values(), b[kind][name].values(), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs), name
    kept = "model_config", "recipe", "data", "scaler", "step", "job"
    assert {name: a[name] for name in kept} == {name: b[name] for name in kept}
    return a


def test_the_exact_gelu_of_a_nanogpt_stays_that_of_the_runs_that_begin_with_it(go, tmp_path):
    torch.manual_seed(0)
    fresh = GPT(GPTConfig(**SHAPE)).state_dict()
    weights = {name: p + 0.2 * torch.randn_like(p) for name, p in fresh.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    torch.save(nanogpt_checkpoint(weights), tmp_path / "ckpt.pt")
    shape = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
    ids = np.arange(900, dtype=np.uint16) % SHAPE["vocab_size"]
    for split in ("train", "val"):
        write_shard(tmp_path / f"x_{split}_000000.npy", ids)
    whole = go(*SAVED, *STILL, "--data", tmp_path, "--total_batch_size", 96, *shape, "--sequence_length", 24,
               "--init", tmp_path / "ckpt.pt")
    saved = goes_on_as(whole, go, 1)
    assert saved["model_config"]["gelu"] == "none"
    idx = tokens(2, 9)
    for folder in (whole.out, whole.out.with_name(f"{whole.out.name} from 1")):
        found, expected = load_model(folder)(idx)[0], plain_gpt2(weights, SHAPE["n_head"], idx, gelu="none")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, plain_gpt2(weights, SHAPE["n_head"], idx), rtol=1e-4, atol=1e-4)


def test_the_best_step_may_have_no_checkpoint(go):
    """The loss rises from the first step on: the best checkpoint is the best of those that there are."""
    flags = [*worse_and_worse(go.folder), "--max_steps", 6, "--val_every", 1]
    for every, keep, saved in ((2, 1, [2, 6]), (2, "all", [2, 4, 6]), (6, 1, [6]), (0, 1, [])):
        found = go(*flags, "--checkpoint_every", every, "--keep_checkpoints", keep)
        losses = logged(found.out, "val")
        assert min(losses, key=losses.get) == 0
        assert [step for step, _ in checkpoints(found.out)] == saved
        lines = [line for line in found.text.splitlines() if line.startswith(("best", "next"))]
        if not saved:
            assert not lines
            refused(lambda found=found: load_model(found.out / "best"), found.out)
            continue
        path = found.out / f"checkpoint_{saved[0]:06d}.pt"
        both = f"{losses[saved[0]]:.4f}, {losses[0]:.4f}"
        _, worse = lines[0].split(f"{path}, validation loss {both} at step 0")
        assert "--max_lr" in worse
        assert lines[1].endswith(f"--model {found.out}/best")
        weights = load_model(found.out / "best").state_dict()
        assert all(torch.equal(weights[name], p) for name, p in torch.load(path)["model"].items())


def test_a_resumed_run_still_knows_its_best_checkpoint(go):
    flags = [*worse_and_worse(go.folder), "--val_every", 1, "--checkpoint_every", 1, "--keep_checkpoints", 1]
    go(*flags, "--max_steps", 3, out=go.folder / "log")
    found = go(*flags, "--max_steps", 6, out=go.folder / "log")
    assert [step for step, _ in checkpoints(found.out)] == [1, 6] and "checkpoint_000001.pt, " in found.text


def test_a_run_without_a_validation_continues_with_its_newest(go):
    found = go(*SAVED)
    assert "best" not in found.text and found.text.endswith(f"--model {found.out}\n")


@pytest.mark.parametrize("recipe", MODELS)
def test_moments_and_schedules_go_on_where_they_were(recipe, go):
    """From each of the checkpoints, with a rate that changes in each step, in float32 bit for bit."""
    whole = go(*SAVED, "--recipe", recipe, "--max_steps", 4, "--warmup_steps", 2, "--max_lr", 0.01)
    for step in (1, 3):
        saved = goes_on_as(whole, go, step)
    assert saved["step"] == 4 and saved["recipe"] == recipe and saved["job"] == ""
    assert saved["config"]["min_lr"] == ("auto" if recipe != "speedrun" else 0.0)


def test_float16s_scale_goes_on_where_it_was(go):
    whole = go(*SAVED, "--dtype", "float16")
    saved = goes_on_as(whole, go, 2)
    assert saved["scaler"]["scale"] == 65536 and saved["scaler"]["_growth_tracker"] == 3


def test_a_restart_by_torchrun_goes_on_with_its_own_job_alone(go, monkeypatch):
    """Whatever --resume says, which the first start followed. Another job's checkpoint is none of its."""
    other = go(*SAVED)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    for first, resume in enumerate(("never", other.out / "checkpoint_000001.pt")):
        out = shutil.copytree(other.out, go.folder / f"log {first}")
        flags = ["--resume", resume, *SAVED, "--max_steps", 2]
        for restart, begins in (("0", first), ("1", 2)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
            found = go(*flags, out=out)
            assert len(found.trained()) == 2 - begins, (resume, restart)
            assert (f" at step {begins} of 2" in found.text) == (begins > 0)
            assert found.saved()["job"] == "mine"
        shutil.rmtree(out)
        shutil.copytree(other.out, out)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert len(go(*flags, out=out).trained()) == 2 - first, "there is only another job's"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert len(go(*SAVED, "--max_steps", 4, out=other.out).trained()) == 1, "auto takes any"


# ----------------------------------------------------------------------------- which checkpoint

def renumbered(path, step, **config):
    """A copy of a checkpoint, as if of another step."""
    content = torch.load(path, weights_only=True)
    content["step"], content["config"] = step, content["config"] | config
    torch.save(content, path.with_name(f"checkpoint_{step:06d}.pt"))


def test_the_newest_checkpoint_is_that_of_the_highest_number(go):
    """Not by the names' order, nor by the files' time; other names are not ours."""
    out = go(*SAVED, "--max_steps", 2, "--checkpoint_every", 2).out
    for step in (1_000_000, 999_999):
        renumbered(out / "checkpoint_000002.pt", step, max_steps=1_000_003)
    for name in ("checkpoint_0000007.pt", "checkpoint_9.pt", "checkpoint_best.pt", "checkpoint_12345.pt",
                 "checkpoint_2000000.pt.bak", "checkpoint_02000000.pt", "my_checkpoint_3000000.pt"):
        (out / name).write_text("mine")
    assert [step for step, _ in checkpoints(out)] == [2, 999_999, 1_000_000]
    text = go("--max_steps", 1_000_003, "--dry_run", out=out).text
    assert f"{out}/checkpoint_1000000.pt at step 1000000 of 1000003" in text
    found = go("--max_steps", 1_000_002, "--checkpoint_every", 1, "--keep_checkpoints", 2, out=out)
    assert [step for step, _ in checkpoints(out)] == [1_000_001, 1_000_002]
    assert (out / "checkpoint_1000002.pt").exists() and (out / "checkpoint_12345.pt").exists()
    assert list(logged(out))[-2:] == [1_000_000, 1_000_001] and "previous" not in found.text


def test_a_resume_through_another_name_of_out_leaves_its_files_where_they_are(go, monkeypatch):
    """A link to the folder, and a relative path: the same run, of which nothing is moved."""
    out = go(*SAVED, "--max_steps", 2).out
    (go.folder / "link").symlink_to(out)
    monkeypatch.chdir(go.folder)
    go("--resume", "link/checkpoint_000002.pt", *SAVED, "--max_steps", 3, out=out)
    go("--resume", out / "checkpoint_000003.pt", *SAVED, "--max_steps", 4, out=Path("link"))
    go("--resume", f"{out.name}/../{out.name}/checkpoint_000004.pt", *SAVED, "--max_steps", 5, out=out)
    assert [step for step, _ in checkpoints(out)] == [1, 2, 3, 4, 5] and list(logged(out)) == [0, 1, 2, 3, 4]
    assert not list(out.glob("previous*"))


def test_what_is_moved_is_counted_and_goes_to_the_next_number_that_is_free(go):
    out = go(*SAVED).out                        # three checkpoints and two logs
    (out / "previous_1").symlink_to("nowhere")
    (out / "previous_2").write_text("mine")
    (out / "previous_4").mkdir()
    text = go("--resume", out / "checkpoint_000002.pt", *SAVED, out=out).text
    assert f"3 files of an earlier run in {out} are now in {out}/previous_3\n" in text
    names = {path.name for path in (out / "previous_3").iterdir()}
    assert names == {"checkpoint_000003.pt", "log.txt", "metrics.csv"}
    assert list(logged(out)) == list(logged(out / "previous_3")) == [0, 1, 2], "the log goes on"
    text = go("--resume", "never", *QUIET, out=out).text
    assert f"5 files of an earlier run in {out} are now in {out}/previous_5\n" in text
    assert {path.name for path in out.iterdir()} == {
        ".train_gpt2.lock", "log.txt", "metrics.csv", *(f"previous_{i}" for i in range(1, 6))}
    (out / "metrics.csv").unlink()
    text = go("--resume", "never", *QUIET, out=out).text
    assert f"1 file of an earlier run in {out} is now in {out}/previous_6\n" in text


def test_more_steps_than_max_steps_are_refused_and_as_many_are_none_to_do(go):
    out = go(*SAVED).out
    before = {path: path.read_bytes() for path in out.iterdir()}
    refused(lambda: go("--max_steps", 2, out=out), out / "checkpoint_000003.pt", "--max_steps 2", "step 3")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert not go("--max_steps", 3, out=out).trained() and len(go("--max_steps", 4, out=out).trained()) == 1


def test_what_was_evaluated_and_saved_before_a_resume_is_not_again(go):
    """The step at which a run ended, or was stopped, has its checkpoint, validation and samples."""
    flags = ["--val_every", 1, "--checkpoint_every", 2]
    out = go(*flags, "--max_steps", 2).out
    time = (out / "checkpoint_000002.pt").stat().st_mtime_ns
    found = go(*flags, "--max_steps", 3, out=out)
    assert found.text.count("validation loss: ") == 1 and list(logged(out, "val")) == [0, 1, 2, 3]
    assert (out / "checkpoint_000002.pt").stat().st_mtime_ns == time
    again = go(*flags, "--max_steps", 3, out=out)
    assert "validation loss: " not in again.text and not again.forwards and "saved" not in again.text


def test_a_run_that_is_stopped_saves_unless_it_is_to_save_nothing(go):
    """In the first of the two micro-steps of its second step, which is dropped."""
    for every, saved in ((9, [1]), (0, [])):
        forwards = []

        def stop(module, inputs, forwards=forwards):
            if type(module) is GPT:
                forwards.append(module)
                if len(forwards) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        hook = register_module_forward_pre_hook(stop)
        try:
            found = go("--batch_size", 2, "--checkpoint_every", every)
        finally:
            hook.remove()
        assert "stopped by SIGTERM after 1 of 3" in found.text and list(logged(found.out)) == [0]
        assert [step for step, _ in checkpoints(found.out)] == saved


# ----------------------------------------------------------------------------- the lock

def first_run(flags, reached, go_on):
    """A run that stands still in its second step, from when it is seen there until it is let go on."""
    from runtime.ranks import Process
    watch = Process.watch

    def watched(process, label, items):
        if label == "step 1":
            os.close(os.open(reached, os.O_WRONLY))     # opens when the other run does
            os.close(os.open(go_on, os.O_RDONLY))
        return watch(process, label, items)
    Process.watch = watched
    command("train_gpt2.py", *flags)()


def second_run(flags, reached, go_on):
    """A run that starts when the first one is in its second step; then that one may go on."""
    from runtime import files
    files.LOCK_PATIENCE = 0.1
    os.close(os.open(reached, os.O_RDONLY))
    try:
        command("train_gpt2.py", *flags)()
    finally:
        os.close(os.open(go_on, os.O_WRONLY))


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_trains(byte_data, tmp_path):
    out, pipes = tmp_path / "log", [tmp_path / "reached", tmp_path / "go_on"]
    for pipe in pipes:
        os.mkfifo(pipe)
    flags = ["--data", byte_data, *TINY, *QUIET, *SAVED, "--out", out]
    (first, *_), second = forked(functools.partial(first_run, flags, *pipes), functools.partial(
        second_run, [*flags, "--max_steps", 9, "--resume", "never"], *pipes))
    assert first == 0
    refused(lambda: subprocess.CompletedProcess([], *second), f"--out {out}")
    assert list(logged(out)) == [0, 1, 2] and not list(out.glob("previous*"))
    assert "at step 3" in run(*flags).stdout, "the lock has ended with the process"


def test_the_lock_ends_with_the_run_and_not_with_the_process(go, monkeypatch):
    """In a notebook, also after a run that failed, whose error is kept."""
    monkeypatch.setattr("runtime.files.LOCK_PATIENCE", 0.1)
    out, errors = go.folder / "log", []
    go(*SAVED, out=out)
    script("train_gpt2.py", "--out", out, "--device", "cpu", "--max_steps", 4).check_returncode()
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: float("nan"))
    for steps in (5, 6):
        try:
            go("--max_steps", steps, "--val_every", steps, out=out)
        except RunError as error:
            errors.append(error)
    assert [re.search(r"step (\d+)", str(error))[1] for error in errors] == ["5", "6"]
    script("train_gpt2.py", "--out", out, "--device", "cpu", "--max_steps", 7).check_returncode()
