"""Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon). And optimizer state
that the ranks share out, stage 1 of ZeRO (arXiv:1910.02054): `owner`, {parameter: rank}, names the one rank
that holds a parameter's moments. Muon has its own; --shard_optimizer makes one for the other optimizers."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """Approximates the (semi-)orthogonal matrices nearest to G (n, rows, columns), singular values roughly
    between 0.7 and 1.2, by a quintic Newton-Schulz iteration in `dtype`. Its coefficients increase small
    singular values as fast as possible (Keller Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    for _ in range(steps):                      # three matrix products, each with its sum rounded only once
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                             # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                                      # a X + B X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for the matrices in the blocks [+0.142 against Adam; see speedrun.py].

    `params`: (name, parameter) pairs, all matrices. Matrices of one shape form a group and are orthogonalized
    as one batch. With several processes, which have the same averaged gradients, each orthogonalizes its
    share of a batch, of which it alone holds the momentum, and the updates are gathered. The learning rate is
    multiplied by sqrt(max(1, rows / columns))."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        self.dtype, by_shape = dtype, {}
        for name, p in params:
            by_shape.setdefault(p.shape, []).append((name, p))
        super().__init__([{"params": named} for named in by_shape.values()],
                         dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.owner = {p: i // -(-len(group["params"]) // self.ranks) for group in self.param_groups
                      for i, p in enumerate(group["params"]) if several}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params, momentum, mine = group["params"], group["momentum"], []
            share = -(-len(params) // self.ranks)           # how many matrices a process has at most
            if own := params[self.rank * share:(self.rank + 1) * share]:
                for p in own:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffers, grads = [self.state[p]["momentum_buffer"] for p in own], [p.grad for p in own]
                torch._foreach_mul_(buffers, momentum)                          # one launch for all
                torch._foreach_add_(buffers, grads)
                mine = list(torch._foreach_add(grads, buffers, alpha=momentum))
            mine += [torch.zeros_like(params[0])] * (share - len(mine))         # all_gather needs equal sizes
            updates = orthogonalize(torch.stack(mine), self.dtype)              # (share, rows, columns)
            if self.owner:
                gathered = updates.new_empty(self.ranks * share, *params[0].shape)
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor    # 2.13's
                gather(gathered, updates.contiguous())
                updates = gathered
            rows, columns = params[0].shape
            rate = group["lr"] * max(1.0, rows / columns)**0.5
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(updates[:len(params)].to(params[0].dtype)), alpha=-rate)


def step_together(optimizers: list, parameters) -> SimpleNamespace:
    """Several optimizers as the one that GradScaler unscales and steps: if a gradient of any overflows, none
    steps, on no rank. `parameters`: all of the model, those that other ranks update included."""
    return SimpleNamespace(param_groups=[{"params": list(parameters)}],
                           step=lambda: [optimizer.step() for optimizer in optimizers])


def state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the tensors that an optimizer of ours has for a parameter."""
    return ("momentum_buffer",) if isinstance(optimizer, Muon) else ("step", "exp_avg", "exp_avg_sq")


def shard_matrices(optimizers: list, rank: int, world_size: int) -> dict[Tensor, int]:
    """Shares out the matrices of the optimizers without an `owner`: the largest first, each to the rank that
    has the least. Those of other ranks leave this one's groups; broadcast_updates sends them after each step.
    Returns {parameter: rank}, the same on all ranks. Gains and biases, small but many, stay on all."""
    groups = [group for optimizer in optimizers if not hasattr(optimizer, "owner")
              for group in optimizer.param_groups]
    owner, load = {}, [0] * world_size
    matrices = [p for group in groups for p in group["params"] if p.dim() >= 2]
    for p in sorted(matrices, key=Tensor.numel, reverse=True):
        owner[p] = load.index(min(load))
        load[owner[p]] += p.numel()
    for group in groups:
        own = [(name, p) for name, p in zip(group["param_names"], group["params"], strict=True)
               if owner.get(p, rank) == rank]
        group["param_names"], group["params"] = [name for name, _ in own], [p for _, p in own]
    return owner


def broadcast_updates(owner: dict[Tensor, int]) -> None:
    """Each rank sends its matrices to the others. All are under way before the first is waited for; on a GPU
    only its stream waits."""
    for work in [dist.broadcast(p.detach(), rank, async_op=True) for p, rank in owner.items()]:
        work.wait()
