"""Optimizer state that the ranks share out: --shard_optimizer, and Muon's by itself."""
import dataclasses
import json

import numpy as np
import pytest
import torch
from helpers import ENV, ROOT, logged, run

from model import fresh_model
from runtime.distributed import Process
from runtime.forecast import count_model
from runtime.batch_size import oom_advice
from runtime.checkpoint import make_state
from runtime.dataloader import TokenDataset, TokenLoader
from runtime.shards import write_shard
from runtime.sharding import moment_bytes, owns
from runtime.weights import read_checkpoint
from train_gpt2 import RECIPES, Config

BYTES = ["--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--vocab_size", 256, "--dtype",
         "float32", "--warmup_steps", 2, "--hellaswag_every", 0, "--val_every", 0, "--sample_every", 0,
         "--checkpoint_every", 2, "--keep_checkpoints", 0, "--max_steps", 6, "--skip_nonfinite", 1]
# sitecustomize.py: update $OVERFLOWS has an infinite gradient; at a save a rank writes which moments it has
SITE = f"""
import json, math, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from runtime.checkpoint import Saver
del sys.path[0]
norm, save, calls = torch._foreach_norm, Saver.save, []

def overflowing(grads, *args):
    calls.append(1)
    if str(len(calls)) == os.environ["OVERFLOWS"]:
        grads[0].view(-1)[0] = math.inf
    return norm(grads, *args)

def telling(saver, state):
    held = [[name for group in optimizer.param_groups
             for name, p in zip(group["param_names"], group["params"]) if p in optimizer.state]
            for optimizer in state.optimizers]
    with open(os.path.join(saver.config.out, f"held.{{saver.process.rank}}"), "w") as file:
        json.dump(held, file)
    save(saver, state)

torch._foreach_norm, Saver.save = overflowing, telling
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tokens = np.frombuffer((ROOT / "input.txt").read_bytes()[:8000], dtype=np.uint8).astype(np.uint16)
    write_shard(folder / "text_val_000000.npy", tokens[:1000])
    write_shard(folder / "text_train_000001.npy", tokens[1000:])
    return folder


def same_state(a, b, step):
    """Weights and moments of two runs, bit for bit, and their losses."""
    assert logged(a) == logged(b)
    one, two = (read_checkpoint(out / f"checkpoint_{step:06d}.pt") for out in (a, b))
    assert one["model"].keys() == two["model"].keys()
    assert all(torch.equal(one["model"][name], two["model"][name]) for name in one["model"])
    for before, after in zip(one["optimizers"], two["optimizers"], strict=True):
        names = [name for group in before["param_groups"] for name in group["param_names"]]
        assert list(before["state"]) == list(after["state"]) == list(range(len(names)))
        assert all(torch.equal(before["state"][i][key], after["state"][i][key])
                   for i in before["state"] for key in before["state"][i])
    return one


def each_has_its_own(out, ranks, sharded, content):
    """Each rank has the moments of its own matrices only, and all of these together are all there are. Muon's
    are shared out without the flag."""
    held = [json.loads((out / f"held.{rank}").read_text()) for rank in range(ranks)]
    for number, saved in enumerate(content["optimizers"]):
        names = {name for group in saved["param_groups"] for name in group["param_names"]}
        shared = {name for name in names if content["model"][name].dim() >= 2 and (sharded or number == 1)}
        shares = [set(optimizers[number]) for optimizers in held]
        assert set.union(*shares) == names and all(names - shared <= share for share in shares)
        assert sum(len(share & shared) for share in shares) == len(shared)
        assert sum(bool(share & shared) for share in shares) == min(ranks, len(shared))


@pytest.mark.parametrize(("recipe", "ranks", "dtype"), [
    ("gpt2", 2, "float32"), ("gpt2", 3, "float16"), ("speedrun", 2, "float32"), ("frontier", 3, "float32")])
def test_a_sharded_run_is_bit_for_bit_the_one_that_is_not(recipe, ranks, dtype, data, tmp_path):
    """A skipped update included, clipping, and float16's scaler."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    env = {**ENV, "PYTHONPATH": str(tmp_path), "OVERFLOWS": "3"}
    outs = tmp_path / "--no_shard_optimizer", tmp_path / "--shard_optimizer"
    for out in outs:
        result = run("--data", data, *BYTES, "--recipe", recipe, "--dtype", dtype, "--total_batch_size",
                     ranks * 128, out.name, "--out", out, processes=ranks, env=env)
        assert ("skipped step" in result.stdout) == (dtype == "float32")
    content = same_state(*outs, 6)
    before = read_checkpoint(outs[1] / "checkpoint_000004.pt")["model"]
    assert not any(torch.equal(before[name], weights) for name, weights in content["model"].items()
                   if weights.dim() >= 2)
    for out in outs:
        each_has_its_own(out, ranks, out is outs[1], content)


def test_a_run_goes_on_sharded_or_not_on_another_number_of_ranks(data, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    flags = ["--data", data, *BYTES, "--recipe", "speedrun", "--total_batch_size", 256]
    run(*flags, "--out", tmp_path / "one")
    for out, ranks, origin, flag in (("whole", 2, "one/checkpoint_000002.pt", "--no_shard_optimizer"),
                                     ("sharded", 2, "one/checkpoint_000002.pt", "--shard_optimizer"),
                                     ("again", 1, "sharded/checkpoint_000004.pt", "--shard_optimizer")):
        result = run(*flags, flag, "--resume", tmp_path / origin, "--out", tmp_path / out, processes=ranks,
                     env={**ENV, "PYTHONPATH": str(tmp_path), "OVERFLOWS": "0"})
        assert f"resuming from {tmp_path / origin} at step {origin[-4]} of 6" in result.stdout
        assert logged(tmp_path / out)[5] == pytest.approx(logged(tmp_path / "one")[5], abs=1e-3)
    content = same_state(tmp_path / "whole", tmp_path / "sharded", 6)
    each_has_its_own(tmp_path / "whole", 2, False, content)
    each_has_its_own(tmp_path / "sharded", 2, True, content)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_the_share_of_a_rank_is_known_before_the_model_is_made(recipe, monkeypatch):
    """From below, by at most the moments of the largest parameter."""
    config = Config(recipe=recipe, n_layer=5, n_head=2, n_embd=32, block_size=64, vocab_size=512,
                    sequence_length=32, shard_optimizer=True)
    for ranks in (2, 3, 100):
        model, make = fresh_model(config), RECIPES[recipe].optimizers
        size, optimizers = count_model(config, fresh_model, make, ranks), make(model, config)
        adam, largest = optimizers[0], max(8 * p.numel() for p in model.parameters())
        make_state(config, model, optimizers, Process(world_size=ranks))
        muon = size.moments - sum(moment_bytes([adam]))
        shares = []
        for rank in range(ranks):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            shares.append(sum(moment_bytes([adam], owns)))
        assert size.held <= max(shares) + muon / ranks + 1
        assert largest <= size.held == size.sharded and max(shares) <= size.held + largest
        plain = count_model(dataclasses.replace(config, shard_optimizer=False), fresh_model, make, ranks)
        assert plain.sharded == size.sharded and plain.moments == size.moments
        assert plain.held == size.moments - muon + max(
            -(-muon // ranks), max(moment_bytes(optimizers[1:]), default=0))


def test_out_of_memory_on_several_ranks_names_the_flag():
    loader = TokenLoader(TokenDataset([np.zeros(1000, np.uint16)], 32), 64, 1, 0, 2)
    for shards in (False, True):
        advice = oom_advice(Config(shard_optimizer=shards), loader, "cuda:0")
        assert ("give --recompute, --shard_optimizer, --loss_chunk 1024, a shorter" in advice) != shards
