"""Muon, several optimizers as one, and optimizer state that the ranks share out.

Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon).

Shared-out state is stage 1 of ZeRO (arXiv:1910.02054). `owner`, {parameter: rank}, names the one
rank that has the moments of a parameter. Muon always has owners; --shard_optimizer gives the other
optimizers some.
"""
import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """Approximates the (semi-)orthogonal matrices nearest to G (n, rows, columns), singular values
    roughly between 0.7 and 1.2, by a quintic Newton-Schulz iteration in `dtype`. Its coefficients
    increase small singular values as fast as possible (Keller Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)

    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    for _ in range(steps):              # three matrix products, each with its sum rounded only once
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)         # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                  # a X + B X
    if tall:
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for the matrices in the blocks [+0.142 against Adam; see
    speedrun.py].

    `params`: (name, parameter) pairs, all matrices. Matrices of one shape form a group and are
    orthogonalized as one batch. With several processes, which have the same averaged gradients,
    each orthogonalizes its share of a batch, of which it alone holds the momentum, and the updates
    are gathered. The learning rate is multiplied by sqrt(max(1, rows / columns)).
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        by_shape = {}
        for name, p in params:
            by_shape.setdefault(p.shape, []).append((name, p))
        groups = [{"params": named} for named in by_shape.values()]
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

        self.dtype = dtype
        self.rank, self.world_size = 0, 1
        self.owner = {}                 # {parameter: rank}, empty on a single process
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            for group in self.param_groups:
                share = self.share(group)
                for i, p in enumerate(group["params"]):
                    self.owner[p] = i // share

    def share(self, group: dict) -> int:
        """How many matrices of the group a process has at most."""
        return -(-len(group["params"]) // self.world_size)          # rounded up

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = group["params"]
            updates = orthogonalize(self.momentum_updates(group), self.dtype)       # (share, rows, columns)
            if self.owner:
                updates = self.gather(updates)                      # (world_size * share, rows, columns)
            updates = updates[:len(params)].to(params[0].dtype)

            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            rows, columns = params[0].shape
            rate = group["lr"] * max(1.0, rows / columns)**0.5
            torch._foreach_add_(params, list(updates), alpha=-rate)

    def momentum_updates(self, group: dict) -> Tensor:
        """The Nesterov momentum of the matrices that this process owns: (share, rows, columns)."""
        share = self.share(group)
        own = group["params"][self.rank * share:(self.rank + 1) * share]

        updates = []
        if own:
            for p in own:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in own]
            grads = [p.grad for p in own]
            torch._foreach_mul_(buffers, group["momentum"])         # one launch for all matrices
            torch._foreach_add_(buffers, grads)
            updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))

        # all_gather needs equal sizes: the last processes may have fewer matrices.
        while len(updates) < share:
            updates.append(torch.zeros_like(group["params"][0]))
        return torch.stack(updates)

    def gather(self, updates: Tensor) -> Tensor:
        gathered = updates.new_empty(self.world_size * len(updates), *updates.shape[1:])
        if hasattr(dist, "all_gather_single"):              # from torch 2.13 on
            dist.all_gather_single(gathered, updates.contiguous())
        else:
            dist.all_gather_into_tensor(gathered, updates.contiguous())
        return gathered


def state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of the tensors that an optimizer of ours has for each parameter."""
    if isinstance(optimizer, Muon):
        return ("momentum_buffer",)
    return "step", "exp_avg", "exp_avg_sq"


class CombinedOptimizer:
    """The optimizers of a model as one, which GradScaler can unscale and step: if a gradient of any
    of them overflows, none of them steps, on no rank. With `shard` each rank keeps its share of the
    moments."""

    def __init__(self, model: torch.nn.Module, optimizers: list, process, shard: bool = False):
        self.optimizers = optimizers
        self.rank = process.rank
        for group in self.groups():
            group["initial_lr"] = group["lr"]

        self.part_of = {}               # {parameter: its optimizer}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.part_of.update(dict.fromkeys(group["params"], optimizer))
        assert set(self.part_of) == set(model.parameters()), "every parameter has an optimizer"
        # For the scaler, which unscales all gradients, also of parameters that other ranks update.
        self.param_groups = [{"params": list(model.parameters())}]

        self.sharded = {}               # {parameter: the rank that updates it}, of --shard_optimizer
        if shard and process.world_size > 1:
            self.sharded = shard_matrices(optimizers, process.rank, process.world_size)

        # Which rank has the moments of a parameter, if not every rank has them.
        self.owner = dict(self.sharded)
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                self.owner.update(optimizer.owner)

    def groups(self) -> list[dict]:
        """The parameter groups of all optimizers; a schedule sets their "lr" by their
        "initial_lr"."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        broadcast_updates(self.sharded)

    def holds(self, p: Tensor) -> bool:
        """Whether this rank has the moments of the parameter."""
        return self.owner.get(p, self.rank) == self.rank

    def state_bytes(self) -> int:
        """The most that the moments of this rank take: two of each parameter."""
        return sum(2 * p.nbytes for p in self.part_of if self.holds(p))


def shard_matrices(optimizers: list, rank: int, world_size: int) -> dict[Tensor, int]:
    """Shares out the matrices of all optimizers but Muon: the largest first, each to the rank that
    has the least. Those of other ranks leave this one's groups; broadcast_updates sends them after
    each step. Gains and biases, small but many, stay on all ranks. Returns {parameter: rank}, the
    same on all ranks."""
    groups = []
    for optimizer in optimizers:
        if not isinstance(optimizer, Muon):
            groups.extend(optimizer.param_groups)
    matrices = [p for group in groups for p in group["params"] if p.dim() >= 2]

    owner = {}
    load = [0] * world_size             # numbers that each rank has so far
    for p in sorted(matrices, key=Tensor.numel, reverse=True):
        owner[p] = load.index(min(load))
        load[owner[p]] += p.numel()

    for group in groups:
        named = zip(group["param_names"], group["params"], strict=True)
        kept = [(name, p) for name, p in named if owner.get(p, rank) == rank]
        group["param_names"] = [name for name, _ in kept]
        group["params"] = [p for _, p in kept]
    return owner


def broadcast_updates(owner: dict[Tensor, int]) -> None:
    """Each rank sends its matrices to the others. All are under way before the first is waited for;
    on a GPU only its stream waits."""
    pending = [dist.broadcast(p.detach(), rank, async_op=True) for p, rank in owner.items()]
    for work in pending:
        work.wait()
