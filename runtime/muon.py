"""Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon).
"""
import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """The (semi-)orthogonal matrices nearest to G (n, rows, columns), approximately.

    A quintic Newton-Schulz iteration in `dtype`, which leaves singular values roughly between 0.7
    and 1.2: its coefficients increase the small ones as fast as possible.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)

    # X X^T is the smaller of the two products for a wide matrix.
    is_tall = X.size(-2) > X.size(-1)
    if is_tall:
        X = X.mT

    for _ in range(steps):                   # three matrix products, each with its sum rounded once
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                             # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                                      # a X + B X

    if is_tall:
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for the matrices in the blocks.

    `params` are (name, matrix) pairs. Matrices of one shape form a group and are orthogonalized as
    one batch. Several ranks, which have the same averaged gradients, share out each batch: a rank
    holds the momentum of its share, orthogonalizes that, and all gather the results. The learning
    rate is multiplied by sqrt(max(1, rows / columns)).
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        by_shape = {}
        for name, p in params:
            by_shape.setdefault(p.shape, []).append((name, p))
        groups = [{"params": named} for named in by_shape.values()]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

        self.dtype = dtype
        self.rank, self.ranks, self.owner = 0, 1, {}
        if dist.is_available() and dist.is_initialized():
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            for group in self.param_groups:
                share = self.share_of(group)
                for i, p in enumerate(group["params"]):
                    self.owner[p] = i // share

    def share_of(self, group) -> int:
        """How many of a group's matrices a rank has: the same number on all but the last ranks."""
        return -(-len(group["params"]) // self.ranks)           # rounded up

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = group["params"]
            updates = self.momentum_of_share(group)         # (share, rows, columns)
            updates = orthogonalize(updates, self.dtype)
            if self.owner:
                updates = self.gather(updates)

            rows, columns = params[0].shape
            lr = group["lr"] * max(1.0, rows / columns)**0.5
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            updates = list(updates[:len(params)].to(params[0].dtype))
            torch._foreach_add_(params, updates, alpha=-lr)

    def momentum_of_share(self, group) -> Tensor:
        """Nesterov momentum (share, rows, columns) of this rank's matrices. Zeros fill it up."""
        share = self.share_of(group)
        params = group["params"]
        mine = params[self.rank * share:(self.rank + 1) * share]
        momentum = []
        if mine:
            for p in mine:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in mine]
            grads = [p.grad for p in mine]
            torch._foreach_mul_(buffers, group["momentum"])                     # one launch for all
            torch._foreach_add_(buffers, grads)
            momentum = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))

        while len(momentum) < share:            # what is gathered must have one size on all ranks
            momentum.append(torch.zeros_like(params[0]))
        return torch.stack(momentum)

    def gather(self, updates: Tensor) -> Tensor:
        """The updates (share, rows, columns) of all ranks, one after the other."""
        gathered = updates.new_empty(self.ranks * updates.size(0), *updates.shape[1:])
        if hasattr(dist, "all_gather_single"):                                  # from torch 2.13 on
            dist.all_gather_single(gathered, updates.contiguous())
        else:
            dist.all_gather_into_tensor(gathered, updates.contiguous())
        return gathered
