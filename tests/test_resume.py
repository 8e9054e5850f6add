"""What a resumed run takes from its checkpoint and what from its flags, what a checkpoint may not forget, which
checkpoint it is, and that nobody else writes there. Kills, damage and other data: test_reliability.py."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import functools
import itertools
import json
import os
import shutil
import sys
import types
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.distributed as dist

import train_gpt2
from helpers import command, forked, logged, on_ranks, refused, run, script, strike, train
from model import GPT, MODELS, GPTConfig, fresh_model, load_model
from peers import TINY as SHAPE
from peers import nanogpt_checkpoint, plain_gpt2, tokens
from runtime.cli import RunError, UserError
from runtime.files import checkpoints
from test_flags import QUIET, SAVED, STILL, TINY, T, go, sevens         # noqa: F401, a fixture
from train_gpt2 import Config

# What becomes of each flag on a resume.
FIXED = set("shuffle recipe init n_layer n_head n_embd block_size vocab_size window total_batch_size "
            "sequence_length seed".split())
PER_RUN = set("preset dry_run batch_size device compile recompute shard_optimizer out resume wandb".split())
KEPT = set("data val_tokens hellaswag_data updates_per_step max_steps warmup_steps max_lr min_lr cooldown "
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
    """A package that does nothing."""
    fake = types.ModuleType("wandb")
    fake.__spec__, fake.init = ModuleSpec("wandb", None), lambda **how: None
    fake.log, fake.finish = lambda values, step: None, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", fake)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)


def save_start(path, **shape):
    model = fresh_model(replace(Config(), **shape))
    torch.save({"model": model.state_dict(), "model_config": vars(model.config), "recipe": shape["recipe"]}, path)
    return path


@pytest.fixture(scope="module")
def asked(byte_data, tmp_path_factory):
    """Flags, each with another value than its default: what is fixed or kept, and what is of the run."""
    folder = tmp_path_factory.mktemp("asked")
    shape = dict(recipe="speedrun", n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256, window=12)
    return shape | dict(
        init=str(save_start(folder / "start.pt", **shape)), data=str(shutil.copytree(byte_data, folder / "data")),
        shuffle=False, val_tokens=33, hellaswag_data="examples.jsonl", total_batch_size=96, sequence_length=12,
        seed=5, updates_per_step=2, max_steps=3, warmup_steps=1, max_lr=0.011, min_lr=0.001, cooldown=0.4,
        weight_decay=0.03, grad_clip=0.7, dtype="bfloat16", tf32=False, attention="naive", val_every=3,
        hellaswag_every=0, sample_every=0, sample_prompt="To be", checkpoint_every=1, keep_checkpoints="all")


OF_THE_RUN = dict(preset="small", batch_size=2, device="cpu", compile=True, recompute=True, shard_optimizer=True,
                  resume="never", wandb=True)


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
    at_first, defaults = config_of(log), vars(Config())
    assert {name: at_first[name] for name in asked} == asked
    assert all(asked[name] != defaults[name] for name in asked)
    (log / "checkpoint_000003.pt").unlink()
    train("--out", log)
    resumed = config_of(log)
    assert {name: resumed[name] for name in FIXED | KEPT} == asked
    expected = {name: defaults[name] for name in PER_RUN - {"out"}} | {"out": str(log)}
    assert {name: resumed[name] for name in PER_RUN} == expected


def test_a_resume_takes_what_is_given_and_a_preset_gives_nothing_that_may_change(log, asked, byte_data):
    other = dict(
        data=str(byte_data), val_tokens=40, hellaswag_data="others.jsonl", updates_per_step=1, max_steps=4,
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
              vocab_size=300, window=11, total_batch_size=192, sequence_length=8, seed=6)

# a flag is first looked at beside the defaults of those that are not given
NEEDS = dict(n_embd=dict(n_head=2), window=dict(recipe="speedrun"),
             vocab_size=dict(sample_every=0, hellaswag_every=0))


def test_a_resume_with_another_value_of_what_is_fixed_is_refused_and_with_the_same_one_is_not(log, asked, capsys):
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
    """A window of 0 cannot be given; sequence_length and window are those of the model or its block_size."""
    found = go(*SAVED, "--recipe", recipe)
    refused(lambda: go("--recipe", recipe, "--sequence_length", T // 2, out=found.out), "--sequence_length")
    refused(lambda: go("--recipe", recipe, "--n_layer", 1, out=found.out), "--n_layer")
    if recipe == "speedrun":
        refused(lambda: go("--recipe", recipe, "--window", T, out=found.out), "--window")
    assert not go("--recipe", recipe, "--sequence_length", "auto", out=found.out).trained()


# ----------------------------------------------------------------------------- ranks that were given others

# {flag: what rank 1 is given}, rank 0 the value of `usual`
UNLIKE = dict(
    preset="small", dry_run=True, shuffle=False, val_tokens=99, recipe="speedrun", n_layer=3,
    n_head=1, n_embd=32, block_size=32, vocab_size=300, total_batch_size=16 * T, batch_size=1,
    sequence_length=T // 2, updates_per_step=2, max_steps=9, warmup_steps=1, max_lr=1e-5, min_lr=1e-5,
    weight_decay=0.2, grad_clip=0.5, seed=6, dtype="bfloat16", tf32=False, compile=True, attention="math",
    recompute=True, shard_optimizer=True, val_every=7, sample_prompt="Or not", checkpoint_every=7,
    keep_checkpoints=7, resume="never",
    window=8, cooldown=0.5, overfit=True, hellaswag_every=3, sample_every=3)
WITH = dict(window=["--recipe", "speedrun"], cooldown=["--recipe", "speedrun"], overfit=["--block_size", 32],
            hellaswag_every=["--vocab_size", 50304], sample_every=["--vocab_size", 50304])
MAY_DIFFER = {"data", "hellaswag_data", "out", "device", "wandb"}


def main_on_this_rank(attempts, path):
    """For each of the attempts, (flags of rank 0, flags of rank 1): what main raises, to path.RANK. The ranks
    meet and make their process group only once."""
    begin, rank, said = dist.init_process_group, int(os.environ["RANK"]), []
    dist.init_process_group = lambda *args, **how: dist.is_initialized() or begin(*args, **how)
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
    assert {name.strip() for name in attempts} | MAY_DIFFER == {field.name for field in fields(Config)}
    found = on_two_ranks([*attempts.values()], tmp_path / "said")
    for name, (first, second) in zip(attempts, found, strict=True):
        assert first == second and "process 1: " in first and f"--{name.strip()} " in first, (name, first, second)
    assert not (tmp_path / "log").exists()
