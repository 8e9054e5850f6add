"""runtime/optimizers.py: all optimizers of a model as one, and moments that the ranks share out."""
import functools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from peers import make_model, tokens

from recipes import RECIPES
from runtime.muon import Muon
from runtime.optimizers import CombinedOptimizer, shard_matrices
from runtime.ranks import Process


def optimizers_of(model):
    more = {"gpt2": [], "speedrun": [torch.float32], "frontier": [torch.float32, 512]}
    found = model.configure_optimizers(0.02, 0.1, *more[model.recipe])
    return [found] if model.recipe == "gpt2" else found


def make_combined(recipe="gpt2", process=None, shard=False):
    """(model, CombinedOptimizer)."""
    if process is None:
        process = Process()
    model = make_model(cls=RECIPES[recipe].model)
    return model, CombinedOptimizer(model, optimizers_of(model), process, shard)


# ----------------------------------------------------------------------- all optimizers as one

@pytest.mark.parametrize("recipe", RECIPES)
def test_the_optimizer_of_each_parameter_is_known(recipe):
    model, combined = make_combined(recipe)
    assert set(combined.optimizer_of) == set(model.parameters())
    for optimizer in combined.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert combined.optimizer_of[p] is optimizer


def test_a_parameter_without_an_optimizer_is_a_mistake():
    model = make_model()
    forgetful = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with pytest.raises(AssertionError, match="no optimizer"):
        CombinedOptimizer(model, [forgetful], Process())


def test_a_parameter_with_two_optimizers_is_a_mistake():
    model = make_model()
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(AssertionError, match="two optimizers"):
        CombinedOptimizer(model, both, Process())


def test_each_group_remembers_its_peak_rate():
    _, combined = make_combined("speedrun")
    for group in combined.groups():
        assert group["initial_lr"] == group["lr"]
    assert len(combined.groups()) == sum(len(one.param_groups) for one in combined.optimizers)


def test_a_step_is_one_of_each_optimizer():
    model, combined = make_combined("speedrun")
    alike = make_model(cls=RECIPES["speedrun"].model)
    apart = optimizers_of(alike)
    for one in (model, alike):
        one(tokens(2, 24), tokens(2, 24))[1].backward()

    combined.step()
    for optimizer in apart:
        optimizer.step()

    for p, q in zip(model.parameters(), alike.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.attn.c_q.weight"])
def test_where_one_gradient_overflows_no_optimizer_steps(name):
    """speedrun's embedding is Adam's, and the matrices of its blocks are Muon's."""
    model, combined = make_combined("speedrun")
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    _, loss = model(tokens(2, 24), tokens(2, 24))
    scaler.scale(loss).backward()
    dict(model.named_parameters())[name].grad[0, 0] = torch.inf

    scaler.unscale_(combined)
    scaler.step(combined)
    scaler.update()

    assert scaler.get_scale() == 2**15
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    for optimizer in combined.optimizers:
        assert len(optimizer.state) == 0


# ----------------------------------------------------------------------- who has which moments

def test_the_matrices_are_shared_out_evenly_and_alike_on_all_ranks():
    owners = []
    held = []
    for rank in range(3):
        model = make_model(vocab_size=64, n_layer=3)
        optimizers = optimizers_of(model)
        owner = shard_matrices(optimizers, rank, 3)
        names = {p: name for name, p in model.named_parameters()}
        owners.append({names[p]: rank for p, rank in owner.items()})
        held.append([names[p] for group in optimizers[0].param_groups for p in group["params"]])

    assert owners[0] == owners[1] == owners[2]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    loads = [0, 0, 0]
    for name, rank in owners[0].items():
        loads[rank] += sizes[name]
    assert max(loads) - min(loads) <= max(sizes[name] for name in owners[0])
    for name, p in model.named_parameters():
        holders = [rank for rank in range(3) if name in held[rank]]
        if p.dim() >= 2:
            assert holders == [owners[0][name]]
        else:
            assert holders == [0, 1, 2]


def test_the_largest_matrices_are_given_out_first():
    """Else the rank that gets the embedding last would have far more than the others."""
    model = make_model(vocab_size=4096)
    owner = shard_matrices(optimizers_of(model), 0, 2)
    embedding = model.transformer.wte.weight
    assert list(owner)[0] is embedding
    others = [rank for p, rank in owner.items() if p is not embedding]
    assert set(others) == {1 - owner[embedding]}


def test_muon_shares_out_its_matrices_itself():
    model, combined = make_combined("speedrun", Process(0, 0, 2), shard=True)
    for p in combined.sharded:
        assert not isinstance(combined.optimizer_of[p], Muon)


@pytest.mark.parametrize("world_size, shard", [(1, True), (2, False)])
def test_one_rank_and_a_run_without_the_flag_share_nothing(world_size, shard):
    model, combined = make_combined(process=Process(0, 0, world_size), shard=shard)
    assert combined.owner == {}
    assert all(combined.holds(p) for p in model.parameters())


def test_a_rank_looks_for_overflows_in_all_gradients():
    """Also in those whose update another rank computes: all have to skip the same steps."""
    model, combined = make_combined(process=Process(1, 1, 2), shard=True)
    assert combined.param_groups == [{"params": list(model.parameters())}]


def test_the_bytes_of_the_moments_are_those_of_this_ranks_parameters():
    model, combined = make_combined()
    assert combined.bytes_to_allocate() == sum(2 * 4 * p.numel() for p in model.parameters())

    of_ranks = []
    for rank in range(2):
        _, combined = make_combined(process=Process(rank, rank, 2), shard=True)
        of_ranks.append(combined.bytes_to_allocate())
    matrices = sum(8 * p.numel() for p in model.parameters() if p.dim() >= 2)
    others = sum(8 * p.numel() for p in model.parameters() if p.dim() < 2)
    assert sum(of_ranks) == matrices + 2 * others
    assert max(of_ranks) < 0.7 * (matrices + others)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_step_allocates_the_moments_that_were_counted(recipe):
    model, combined = make_combined(recipe)
    counted = combined.bytes_to_allocate()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    combined.step()

    moments = 0
    for optimizer in combined.optimizers:
        for state in optimizer.state.values():
            moments += sum(t.nbytes for t in state.values() if torch.is_tensor(t) and t.dim() > 0)
    assert moments == pytest.approx(counted, rel=0.01)      # without those of single numbers
    assert combined.bytes_to_allocate() == 0


# ----------------------------------------------------------------------- on several ranks

def train_three_steps(recipe, sharded, process):
    """{"weights": {name: tensor}, "states": {name: state}, "held": names} of this rank."""
    model, combined = make_combined(recipe, process, sharded)
    for step in range(3):
        model.zero_grad()
        rows = tokens(process.world_size, 24, seed=step)
        own = rows[process.rank:process.rank + 1]
        model(own, own)[1].backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        combined.step()

    states = {}
    held = []
    for name, p in model.named_parameters():
        state = combined.optimizer_of[p].state
        if p in state:
            states[name] = state[p]
        if combined.holds(p):
            held.append(name)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"weights": weights, "states": states, "held": held}


def train_on_a_rank(recipe, folder):
    """Saves the results of a run that is sharded, and of one that is not."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    process = Process(rank, rank, dist.get_world_size())
    results = {}
    for sharded in (False, True):
        results[sharded] = train_three_steps(recipe, sharded, process)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)                 # without the interpreter's finalization, in which gloo can crash


@pytest.fixture(scope="module", params=[("gpt2", 2), ("frontier", 3)], ids=["gpt2", "frontier"])
def results(request, tmp_path_factory):
    """[{is it sharded: result} of each rank] of three steps of a recipe."""
    recipe, ranks = request.param
    folder = tmp_path_factory.mktemp(recipe)
    call = functools.partial(train_on_a_rank, recipe, folder)
    ends = on_ranks(*[call] * ranks)
    assert [code for code, _, _ in ends] == [0] * ranks, ends
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def test_all_ranks_have_the_weights_of_a_run_that_is_not_sharded(results):
    expected = results[0][False]["weights"]
    for of_rank in results:
        for sharded in (False, True):
            for name, weight in of_rank[sharded]["weights"].items():
                assert torch.equal(weight, expected[name]), name


def test_a_rank_has_the_moments_that_it_holds_and_no_others(results):
    for of_rank in results:
        for sharded in (False, True):
            assert set(of_rank[sharded]["held"]) == set(of_rank[sharded]["states"])


def test_of_a_sharded_run_one_rank_has_the_moments_of_a_matrix(results):
    for name, weight in results[0][True]["weights"].items():
        holders = [rank for rank, of_rank in enumerate(results) if name in of_rank[True]["held"]]
        if weight.dim() >= 2:
            assert len(holders) == 1, name
        else:
            assert len(holders) == len(results), name


def test_moments_are_the_same_wherever_they_are(results):
    """Those of an AdamW that is not sharded are on all ranks, those of Muon on one."""
    for sharded in results:
        for name, state in sharded[True]["states"].items():
            for other in results:
                for key, value in other[False]["states"].get(name, {}).items():
                    assert torch.equal(state[key], value), (name, key)
