"""torch's layers, but for what no reader of a model need know, and matrix products.

A new layer draws no random numbers: the init_weights of a model draws each weight once. No layer
changes the dtype of its input.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def head_size(config) -> int:
    """hs, the width of one attention head. ValueError if it is no whole number."""
    C, nh = config.n_embd, config.n_head
    if C % nh != 0:
        raise ValueError(f"n_embd {C} must be divisible by n_head {nh}")
    return C // nh


# ---------------------------------------------------------------------- layers

class Linear(nn.Linear):
    """nn.Linear without random weights."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding without random rows."""

    def reset_parameters(self):
        pass


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose result has the dtype of its input: autocast would make it float32."""

    def forward(self, x):
        # The matrix product that follows would round it in any case. But on several GPUs DDP cuts
        # the compiled model just there, and would store it in float32.
        return super().forward(x).to(x.dtype)


class GELU(nn.GELU):
    """nn.GELU (arXiv:1606.08415), whose result a compiled model does not keep for the backward."""

    def forward(self, x):
        # The backward computes it again, which saves a sixth of the memory (docs/lab-notes.md).
        if torch.compiler.is_compiling():
            return checkpoint(self.formula, x, use_reentrant=False)
        return self.formula(x)

    def formula(self, x):
        return F.gelu(x, approximate=self.approximate)


# ---------------------------------------------------------------------- matrix products

def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`: autocast's, or that of `x` where autocast is off."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):          # "meta" has no autocast
        return torch.get_autocast_dtype(device)
    return x.dtype


def formula_is_faster(q: Tensor, S: int) -> bool:
    """Whether the formula of attention to S tokens beats torch's kernel (docs/speed.md)."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x (..., n_in), weight (n_out, n_in), bias (n_out) -> (..., n_out).

    Generation multiplies one row for each sample. On an AMD CPU, F.linear does that on one core if
    the numbers are float32 (pytorch issue 96643). As a batch of products, each with a part of the
    weight's rows, it runs on all cores.
    """
    # Training has many rows, and a compiled or exported model may have any number.
    in_a_graph = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if in_a_graph or x.device.type != "cpu" or matmul_dtype(x) != torch.float32:
        return F.linear(x, weight, bias)

    from runtime.hardware import is_amd         # only now: a model alone needs no hardware.py
    n_out, n_in = weight.shape
    rows = x.numel() // n_in
    # With more rows F.linear uses all cores, and on Intel's CPUs with few, too (docs/speed.md).
    if rows > 32 or not is_amd():
        return F.linear(x, weight, bias)

    # A part for each core, or a few more, so that all parts have the same size.
    parts = min(torch.get_num_threads(), n_out)
    while n_out % parts != 0:
        parts += 1

    x_of_parts = x.reshape(rows, n_in).expand(parts, rows, n_in)
    weights = weight.view(parts, n_out // parts, n_in)
    y = torch.bmm(x_of_parts, weights.mT)                                       # (parts, rows, ...)
    y = y.transpose(0, 1).reshape(*x.shape[:-1], n_out)
    if bias is not None:
        y = y + bias
    return y
