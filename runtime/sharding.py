"""Optimizer state that the ranks share out: stage 1 of ZeRO (arXiv:1910.02054).

An optimizer's `owner`, {parameter: rank}, names the one rank that holds a parameter's moments and updates
it. For a parameter that is not in it all ranks do. Muon brings its own `owner`; --shard_optimizer gives one
to the others.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return getattr(optimizer, "STATE", ("step", "exp_avg", "exp_avg_sq"))       # Muon's, or Adam's


def owns(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    """Whether this rank holds the moments of p."""
    owner = getattr(optimizer, "owner", {})
    return p not in owner or owner[p] == dist.get_rank()


def is_matrix(_optimizer, p: Tensor) -> bool:
    """What --shard_optimizer shares out. Gains and biases are one parameter in a thousand, but most of the
    tensors: a broadcast of each would cost more than its moments."""
    return p.dim() >= 2


def moment_bytes(optimizers: list, held: Callable = lambda optimizer, p: True) -> list[int]:
    """Bytes of the moments of each parameter that is `held`: AdamW has two a parameter, Muon one."""
    return [p.nbytes * len([key for key in state_keys(optimizer) if key != "step"])
            for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            if held(optimizer, p)]


def share_out(params: list[Tensor], ranks: int) -> dict[Tensor, int]:
    """{parameter: rank}, the same on all ranks: the largest first, each to the rank that has the least."""
    owner, load = {}, [0] * ranks
    for p in sorted(params, key=Tensor.numel, reverse=True):
        owner[p] = load.index(min(load))
        load[owner[p]] += p.numel()
    return owner


def shard(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """From now on each rank updates its own matrices and receives the others from their owners. Gradients,
    and with them norm, clipping and found_inf, stay those of all parameters on every rank."""
    optimizer.owner = share_out([p for group in optimizer.param_groups for p in group["params"]
                                 if is_matrix(optimizer, p)], ranks)
    whole = []

    def only_own(*_):
        whole[:] = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if owns(optimizer, p)]

    def exchange(*_):
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params
        # all are under way before the first is waited for; on a GPU only its stream waits
        sent = [dist.broadcast(p.detach(), rank, async_op=True) for p, rank in optimizer.owner.items()]
        for work in sent:
            work.wait()
    optimizer.register_step_pre_hook(only_own)
    optimizer.register_step_post_hook(exchange)


def whole_state(optimizer: torch.optim.Optimizer, copied: Callable, process) -> dict:
    """optimizer.state_dict() of all parameters, complete on rank 0 alone. All ranks call it. Tensor by
    tensor, because a GPU has no room for all: rank 0 keeps copied(tensor) of each, the others nothing."""
    saved, state, owner = optimizer.state_dict(), {}, getattr(optimizer, "owner", {})
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        mine = saved["state"].get(i, {})
        for key in state_keys(optimizer) if p in owner else mine:
            tensor = mine[key] if owns(optimizer, p) else p.new_empty(() if key == "step" else p.shape)
            if p in owner:
                dist.broadcast(tensor, owner[p])
            if process.is_master:
                state.setdefault(i, {})[key] = copied(tensor)
    return saved | {"state": state}
