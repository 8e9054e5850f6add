"""Optimizer state that the ranks share out: --shard_optimizer, and Muon's by itself."""
import functools
import os

import pytest
import torch
import torch.distributed as dist

from helpers import on_ranks
from recipes import MODELS
from runtime.optimizers import broadcast_updates, shard_matrices


def three_steps(recipe, sharded, out):
    """Of whose rows each rank has its own. Saves the weights and the moments that this rank has."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS[recipe](MODELS[recipe].Config(24, 96, 2, 2, 32))
    more = {"gpt2": [], "speedrun": [torch.float32], "frontier": [torch.float32, 512]}[recipe]
    optimizers = model.configure_optimizers(0.02, 0.1, *more)
    owner = shard_matrices(optimizers, rank, ranks) if sharded else {}
    for _ in range(3):
        model.zero_grad()
        idx = torch.randint(96, (ranks, 24))
        model(idx[rank:rank + 1], idx[rank:rank + 1])[1].backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        for optimizer in optimizers:
            optimizer.step()
        broadcast_updates(owner)
    names = {p: name for name, p in model.named_parameters()}
    if recipe != "gpt2":            # whom a save asks for them
        muon = optimizers[1]
        assert {p for p in muon.owner if muon.owner[p] == rank} == set(muon.state)
    held = [{names[p]: state for p, state in optimizer.state.items()} for optimizer in optimizers]
    torch.save((dict(model.named_parameters()), held), f"{out}.{rank}")
    dist.barrier()
    os._exit(0)                     # without the interpreter's finalization, in which gloo can crash


@pytest.mark.parametrize("recipe, ranks", [("gpt2", 2), ("speedrun", 2), ("frontier", 3)])
def test_a_sharded_run_is_bit_for_bit_the_one_that_is_not(recipe, ranks, tmp_path):
    results = {}
    for sharded in (False, True):
        found = on_ranks(*[functools.partial(three_steps, recipe, sharded, tmp_path / str(sharded))] * ranks)
        assert [code for code, _, _ in found] == [0] * ranks, found
        results[sharded] = [torch.load(f"{tmp_path / str(sharded)}.{rank}") for rank in range(ranks)]
    whole = results[False][0]
    for weights, _ in results[True] + results[False]:
        assert all(torch.equal(weights[name], p) for name, p in whole[0].items())
    for sharded, runs in results.items():
        for i, states in enumerate(zip(*(held for _, held in runs), strict=True)):
            names = set.union(*map(set, states))
            shared = {name for name in names if whole[0][name].dim() >= 2 and (sharded or i == 1)}
            assert all(names - shared <= set(state) for state in states)
            assert sum(len(shared & set(state)) for state in states) == len(shared)     # each on one rank
            assert all(shared & set(state) for state in states) or len(shared) < ranks
            for state in states if i == 0 else ():              # all are there without the flag
                assert all(torch.equal(state[name][key], whole[1][0][name][key])
                           for name in state for key in state[name])
