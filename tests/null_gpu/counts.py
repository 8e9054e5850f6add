"""What a step asks of a GPU, operator by operator: matrix products, fused attention, bytes of all the rest.

`Counter` counts what runs eagerly, on any device; `count_graph` what Inductor compiled. `bench.py predict`
reads such counts from assets/counts.json, which tests/null_gpu/count.py writes. Numbers of bytes count a
tensor once for each operator that reads it and once for each that writes it, as if no cache kept it. Of a
tensor that a kernel only looks up by computed indices (the loss takes one logit a row, the embedding one row
a token) they count an element for each look-up, where Inductor counts all of it.
"""
import collections
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "mv": (0, 1)}
FUSED_ATTENTION = ("flash", "efficient", "cudnn")
# allocate, or only describe memory that another operator fills
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
             "_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "set_", "resize_"}
ONLY_WRITE = ("zero", "fill", "ones", "full", "arange", "new_zeros", "new_full", "new_ones")


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size(t: torch.Tensor) -> int:
    """Bytes of memory behind t. A dimension of stride 0 (`expand`) repeats the same bytes."""
    shape = zip(t.shape, t.stride(), strict=True)
    return math.prod(n for n, stride in shape if stride or not n) * t.element_size()


def name_of(func) -> str:
    return func._schema.name.split("::")[-1]


def product(func, args) -> tuple | None:
    """(dtype, batch, m, n, k) of a matrix product (m, k) x (k, n); None for another operator."""
    where = PRODUCTS.get(name_of(func).removesuffix("_dtype"))
    if where is None:
        return None
    a, b = (args[i] for i in where)
    n = b.shape[-1] if b.dim() > 1 else 1
    return str(a.dtype)[6:], a.shape[0] if a.dim() == 3 else 1, a.shape[-2], n, a.shape[-1]


def fused_attention(func, args) -> tuple | None:
    """(kernel, forward or backward, dtype, batch, heads, T, head_dim) of one of SDPA's fused kernels."""
    name = name_of(func)
    kernel = next((k for k in FUSED_ATTENTION
                   if name.removesuffix("_backward") == f"_scaled_dot_product_{k}_attention"), None)
    if kernel is None:
        return None
    backward = name.endswith("_backward")
    q = args[backward]                                      # (B, nh, T, hs); a backward's first is dy
    return kernel, "backward" if backward else "forward", str(q.dtype)[6:], *q.shape


def other_bytes(func, args, kwargs, out) -> int:
    """Bytes that an operator reads and writes. Lookups read only the rows that they look up."""
    name, schema = name_of(func), func._schema
    if name in NO_KERNEL or name.startswith(("_local_scalar", "prim")):
        return 0
    written = sum(size(t) for a, value in zip(schema.arguments, args, strict=False)
                  if a.alias_info and a.alias_info.is_write for t in tensors(value))
    fresh = [t for r, value in zip(schema.returns, out if isinstance(out, tuple) else (out,), strict=False)
             if not r.alias_info for t in tensors(value)]
    if not (written or fresh):                              # a view
        return 0
    if name == "embedding":                                 # weight, indices
        return 2 * size(out) + size(args[1])
    if name == "embedding_dense_backward":                  # dy, indices: zeroes dW, then adds the rows
        return size(args[0]) * 3 + size(args[1]) + size(out)
    if name in ("nll_loss_forward", "nll_loss_backward", "gather"):
        return sum(map(size, fresh)) + 2 * min(map(size, tensors(args)))
    if name.startswith("_fused_adam"):          # gradients change only where a GradScaler scales them
        written -= sum(map(size, args[1]))
    read = 0 if name.startswith(ONLY_WRITE) else sum(map(size, tensors((args, kwargs))))
    if name in ("copy_", "_foreach_copy_"):                 # the target is not read
        read -= written
    return read + written + sum(map(size, fresh))


class Counts:
    """Counts of a pass or step."""

    def __init__(self):
        self.products, self.attention = collections.Counter(), collections.Counter()
        self.bytes = self.operators = 0

    def add(self, func, args, kwargs, out):
        """Returns whether it was a matrix product or fused attention."""
        if key := product(func, args):
            self.products[key] += 1
        elif key := fused_attention(func, args):
            self.attention[key] += 1
        return key is not None

    def as_dict(self) -> dict:
        """For JSON: products and attention as lists of [*key, times]."""
        return {"products": sorted([*key, n] for key, n in self.products.items()),
                "attention": sorted([*key, n] for key, n in self.attention.items()), "bytes": self.bytes}


class Counter(TorchDispatchMode):
    """with Counter() as mode: ...; mode.counts. Counts each ATen operator that runs, the backward's too."""

    def __init__(self):
        super().__init__()
        self.counts, self.by_name = Counts(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.counts.add(func, args, kwargs, out):
            moved = other_bytes(func, args, kwargs, out)
            self.counts.bytes += moved
            self.counts.operators += moved > 0
            self.by_name[name_of(func)] += moved
        return out


def node_bytes(node, graph) -> int:
    """Bytes that a scheduler node of Inductor's reads and writes, as Inductor counts, but for look-ups."""
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    for name, whole in accesses.items():
        deps = [dep for dep in (*node.read_writes.reads, *node.read_writes.writes) if dep.name == name]
        if not any(dep.name == name for dep in node.read_writes.writes) and all(map(is_look_up, deps)):
            loops = [loop for loop in node.get_nodes() if any(d.name == name for d in loop.read_writes.reads)]
            turns = max(math.prod(map(int, sum(map(tuple, loop.get_ranges()), ()))) for loop in loops)
            accesses[name] = min(whole, len(deps) * turns * graph.get_dtype(name).itemsize)
    return sum(accesses.values())


def is_look_up(dep) -> bool:
    return isinstance(dep, torch._inductor.dependencies.MemoryDep) and dep.is_indirect()


def count_graph(graph) -> Counts:
    """Counts of Inductor's graph (a GraphLowering, after code generation)."""
    counts = Counts()
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args = torch.fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
            counts.add(node.target, args, {}, None)
    counts.bytes = sum(node_bytes(node, graph) for node in graph.scheduler.nodes if not node.is_extern())
    return counts
