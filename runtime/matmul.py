"""Matrix products: their dtype, and those of few rows on a CPU."""
import torch
import torch.nn.functional as F
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`: autocast's, or that of `x` where autocast is off."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):          # "meta" has no autocast
        return torch.get_autocast_dtype(device)
    return x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x (..., n_in), weight (n_out, n_in), bias (n_out) -> (..., n_out).

    Generation multiplies one row for each sample. On a CPU, F.linear does that on one core if the
    numbers are float32 (pytorch issue 96643). As a batch of products, each with a part of the
    weight's rows, it runs on all cores.
    """
    # Training has many rows, and a compiled or exported model may have any number.
    in_a_graph = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if in_a_graph or x.device.type != "cpu" or matmul_dtype(x) != torch.float32:
        return F.linear(x, weight, bias)

    n_out, n_in = weight.shape
    rows = x.numel() // n_in
    if rows > 32:               # there F.linear uses all cores, and is about as fast
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
