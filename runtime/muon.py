"""Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon)."""
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.sharding import owns


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """Approximates the (semi-)orthogonal matrices nearest to G (n, rows, columns): singular values end
    roughly between 0.7 and 1.2.

    `steps` of a quintic Newton-Schulz iteration in `dtype`. Its coefficients increase small singular values
    as fast as possible (Keller Jordan 2024).
    """
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
    """Orthogonalized Nesterov momentum for the matrices in the blocks [+0.142 against Adam; see model.py].

    `params`: (name, parameter) pairs, all matrices. Matrices of one shape form a group and are orthogonalized
    as one batch. With several processes, which have the same averaged gradients, each orthogonalizes its
    share of a batch, of which it alone holds the momentum (see sharding.py), and the updates are gathered.
    The learning rate is multiplied by sqrt(max(1, rows / columns)). If the attribute `found_inf`, a tensor,
    is set and 1, the step changes nothing.
    """
    STATE = ("momentum_buffer",)
    _step_supports_amp_scaling = True           # GradScaler then sets found_inf and does not wait for the GPU

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        self.dtype, by_shape = dtype, {}
        for name, p in params:
            by_shape.setdefault(p.shape, []).append((name, p))
        super().__init__([{"params": named} for named in by_shape.values()],
                         dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        several = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if several else 1
        self.owner = {p: i // self.share(group["params"]) for group in self.param_groups
                      for i, p in enumerate(group["params"]) if several}

    def share(self, params: list[Tensor]) -> int:
        """How many of a group's matrices a process has at most."""
        return -(-len(params) // self.world_size)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params, momentum, share = group["params"], group["momentum"], self.share(group["params"])
            bad = getattr(self, "found_inf", torch.zeros((), device=params[0].device)) > 0
            mine = []
            if own := [p for p in params if owns(self, p)]:
                for p in own:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum_buffer"] for p in own]
                grads = [torch.where(bad, 0.0, p.grad) for p in own]
                torch._foreach_mul_(buffers, torch.where(bad, 1.0, momentum))
                torch._foreach_add_(buffers, grads)
                mine = [grad + momentum * buffer for grad, buffer in zip(grads, buffers, strict=True)]
            mine += [torch.zeros_like(params[0])] * (share - len(mine))         # all_gather needs equal sizes
            updates = orthogonalize(torch.stack(mine), self.dtype)              # (share, rows, columns)
            if self.owner:
                gathered = updates.new_empty(self.world_size * share, *params[0].shape)
                # renamed in torch 2.13
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                gather(gathered, updates.contiguous())
                updates = gathered
            rows, columns = params[0].shape
            if group["weight_decay"]:
                shrink = 1.0 - group["lr"] * group["weight_decay"]
                torch._foreach_mul_(params, torch.where(bad, 1.0, shrink))
            # of shape (1,), so that its product with bfloat16 is made in fp32
            scale = torch.where(bad, 0.0, -group["lr"] * max(1.0, rows / columns)**0.5).view(1)
            torch._foreach_add_(params, list(updates[:len(params)] * scale))
