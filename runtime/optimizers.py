"""The optimizers of a model as one, and optimizer state that the ranks share out.

Shared-out state is stage 1 of ZeRO (arXiv:1910.02054): `owner`, {parameter: rank}, names the one
rank that has the moments of a parameter. On several ranks Muon has owners in any case;
--shard_optimizer gives owners to the matrices of the other optimizers.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.cli import RunError
from runtime.muon import Muon


class CombinedOptimizer:
    """All optimizers of a model as one, which GradScaler can unscale and step.

    If any gradient overflows, all optimizers skip the step, on all ranks. With `shard` each rank
    keeps the moments of its share of the matrices.
    """

    def __init__(self, model: torch.nn.Module, optimizers: list, process, shard: bool = False):
        self.model = model
        self.optimizers = optimizers
        self.rank = process.rank
        for group in self.groups():
            group["initial_lr"] = group["lr"]           # the schedule multiplies it
        self.first_settings = [copy_of_settings(group) for group in self.groups()]

        self.optimizer_of = {}                          # {parameter: the optimizer that updates it}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    assert p not in self.optimizer_of, "a parameter has two optimizers"
                    self.optimizer_of[p] = optimizer
        for name, p in model.named_parameters():
            assert p in self.optimizer_of or not p.requires_grad, f"{name} has no optimizer"

        # GradScaler alone reads this, to look for overflows in the gradients. It has all the
        # parameters, also those that another rank updates: if one rank skips the step, all have to.
        # The optimizers' own groups are in `groups`.
        self.param_groups = [{"params": list(model.parameters())}]

        self.sharded = {}                   # {matrix: the rank that updates it and sends it}
        if shard and process.world_size > 1:
            self.sharded = shard_matrices(optimizers, process.rank, process.world_size)

        # The names of the buffers that a checkpoint has, such as the statistics of a batch norm:
        # after each step all ranks go on with those of rank 0.
        self.buffers = set()
        if process.world_size > 1:
            names = {name for name, _ in model.named_buffers()}
            self.buffers = names & model.state_dict().keys()
        self.is_checked = False

        # {parameter: the only rank with its moments}, also of Muon, which sends its own updates.
        self.owner = dict(self.sharded)
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                self.owner.update(optimizer.owner)

    def groups(self) -> list[dict]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        broadcast_updates(self.sharded)
        if self.buffers:
            buffers = dict(self.model.named_buffers())
            broadcast_updates({buffers[name]: 0 for name in self.buffers})

        if not self.is_checked:                         # now, and not when it is saved
            self.is_checked = True
            for optimizer in self.optimizers:
                check_plain(list(optimizer.state.values()), type(optimizer).__name__)
            check_plain(self.changed_settings(), "a group of the optimizers")

    def changed_settings(self) -> list[dict]:
        """What the optimizers have changed in their groups: a count of steps, say."""
        changed = []
        for group, first in zip(self.groups(), self.first_settings, strict=True):
            changed.append({
                name: value for name, value in copy_of_settings(group).items()
                if value != first.get(name)})
        return changed

    def holds(self, p: Tensor) -> bool:
        """Whether this rank has the moments of the parameter."""
        return self.owner.get(p, self.rank) == self.rank

    def bytes_of_moments(self, p: Tensor) -> int:
        """Muon has one moment of a parameter; AdamW has two, as is assumed of all others."""
        if isinstance(self.optimizer_of[p], Muon):
            return p.nbytes
        return 2 * p.nbytes

    def bytes_to_allocate(self) -> int:
        """What the first step will allocate on this rank; 0 after it."""
        if any(optimizer.state for optimizer in self.optimizers):
            return 0
        return sum(self.bytes_of_moments(p) for p in self.optimizer_of if self.holds(p))


def shard_matrices(optimizers: list, rank: int, world_size: int) -> dict[Tensor, int]:
    """Gives each matrix to one rank, and removes those of other ranks from the optimizers' groups.

    Returns {matrix: rank}, equal on all ranks: broadcast_updates sends the matrices after a step.
    Gains and biases, small but many, stay on all ranks.
    """
    groups = []
    for optimizer in optimizers:
        if not isinstance(optimizer, Muon):             # Muon shares its matrices out by itself
            groups += optimizer.param_groups

    # The largest first, each to the rank that has the fewest elements so far.
    matrices = [p for group in groups for p in group["params"] if p.dim() >= 2]
    matrices.sort(key=Tensor.numel, reverse=True)
    owner, load = {}, [0] * world_size
    for p in matrices:
        owner[p] = load.index(min(load))
        load[owner[p]] += p.numel()

    for group in groups:
        group["params"] = [p for p in group["params"] if owner.get(p, rank) == rank]

    # Adagrad has made its state in __init__: drop that of matrices which are now another rank's.
    for optimizer in optimizers:
        for p, owning_rank in owner.items():
            if owning_rank != rank:
                optimizer.state.pop(p, None)
    return owner


def broadcast_updates(owner: dict[Tensor, int]) -> None:
    """Each rank sends its matrices to the others."""
    # Start all, then wait for each. On a GPU wait() blocks only the stream, not the CPU.
    under_way = [dist.broadcast(p.detach(), rank, async_op=True) for p, rank in owner.items()]
    for work in under_way:
        work.wait()


def copy_of_settings(group: dict) -> dict:
    """A group without its parameters and its rate, which the schedule sets."""
    settings = {name: value for name, value in group.items() if name not in ("params", "lr")}
    return on_tensors(Tensor.clone, settings)


# ----------------------------------------------------------------------- what a checkpoint can hold

def check_plain(value, owner: str) -> None:
    """RunError unless `value`, part of the owner's state, is of a kind that a checkpoint can hold.

    These are tensors, numbers, texts, None, and lists and dicts of them.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            check_plain(item, owner)
    elif not isinstance(value, Tensor | int | float | str | None):
        raise RunError(f"{owner} keeps a {type(value).__name__} in its state, which a checkpoint "
                       "cannot hold: let it keep tensors, numbers, and lists or dicts of them")


def on_tensors(function: Callable, value):
    """Part of a state with function(tensor) in the place of each tensor, in lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: on_tensors(function, item) for key, item in value.items()}
    return value
