"""Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon)."""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """The (semi-)orthogonal matrices nearest to those of G (n, rows, columns), approximately.

    The iteration runs in `dtype`.
    """
    # Newton-Schulz: each step applies a x + b x^3 + c x^5 to the singular values. They converge to
    # numbers between about 0.7 and 1.2. The coefficients are chosen so that small ones grow as fast
    # as possible.
    a, b, c = 3.4445, -4.7750, 2.0315

    # The iteration needs singular values of at most 1. None is larger than the Frobenius norm.
    X = G.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)

    # X X^T is smaller than X^T X if the matrix is wide.
    is_tall = X.size(-2) > X.size(-1)
    if is_tall:
        X = X.mT

    # baddbmm rounds once for a product and a sum.
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                             # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                                      # a X + B X

    if is_tall:
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for the matrices: `params`.

    Matrices of one shape form a group, and are orthogonalized as one batch. If there are several
    ranks, all have the same gradients. Each rank keeps the momentum of its share of every group,
    and orthogonalizes that share. Then all ranks gather the updates.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        by_shape = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        groups = [{"params": of_one_shape} for of_one_shape in by_shape.values()]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

        self.dtype = dtype              # of the Newton-Schulz iteration
        self.rank = 0
        self.ranks = 1
        self.owner = {}                 # {matrix: the rank that holds its momentum}
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.ranks = dist.get_world_size()
            for group in self.param_groups:
                share = self.share_of(group)
                for i, p in enumerate(group["params"]):
                    self.owner[p] = i // share

    def share_of(self, group) -> int:
        """How many matrices of a group a rank has room for. The last ranks may have fewer."""
        return -(-len(group["params"]) // self.ranks)           # rounded up

    @torch.no_grad()
    def step(self, closure=None):
        # While the ranks gather the updates of one group, they compute those of the next.
        gathers = []
        for group in self.param_groups:
            momentum = self.momentum_of_share(group)            # (share, rows, columns)
            updates = orthogonalize(momentum, self.dtype)
            gathers.append(self.start_gathering(updates))

        for group, gather in zip(self.param_groups, gathers, strict=True):
            params = group["params"]
            updates = gather()[:len(params)].to(params[0].dtype)

            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])

            # A tall matrix moves further, by sqrt(rows / columns).
            rows, columns = params[0].shape
            lr = group["lr"] * max(1.0, rows / columns)**0.5
            torch._foreach_add_(params, list(updates), alpha=-lr)

    def momentum_of_share(self, group) -> Tensor:
        """Nesterov momentum (share, rows, columns) of this rank's matrices; missing ones are 0."""
        share = self.share_of(group)
        params = group["params"]
        first = self.rank * share
        own_params = params[first:first + share]

        # As in torch's own optimizers, torch._foreach_* takes one launch for all matrices.
        momentum = []
        if own_params:
            buffers = [self.momentum_buffer(p) for p in own_params]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own_params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            # Nesterov's momentum adds the gradient once more, to the buffer as the next step will
            # scale it.
            momentum = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))

        # The ranks gather tensors of one size, also those that have fewer matrices than others.
        while len(momentum) < share:
            momentum.append(torch.zeros_like(params[0]))
        return torch.stack(momentum)

    def momentum_buffer(self, p) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def start_gathering(self, updates: Tensor) -> Callable[[], Tensor]:
        """Starts to gather the updates (share, rows, columns) of all ranks.

        Returns a function that waits for them and returns them, one rank's after the other's.
        """
        if not self.owner:
            return lambda: updates

        share, rows, columns = updates.shape
        gathered = updates.new_empty(self.ranks * share, rows, columns)
        all_gather = dist.all_gather_into_tensor
        if hasattr(dist, "all_gather_single"):                                  # from torch 2.13 on
            all_gather = dist.all_gather_single
        under_way = all_gather(gathered, updates.contiguous(), async_op=True)

        def wait():
            under_way.wait()                    # on a GPU its stream waits, not the CPU
            return gathered
        return wait
