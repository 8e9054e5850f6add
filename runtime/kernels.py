"""The cross-entropy in chunks: a head of 50,000 tokens without all of its logits in memory."""
import math

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`: autocast's, or that of `x` where autocast is off."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):          # "meta" has no autocast
        return torch.get_autocast_dtype(device)
    return x.dtype


def cross_entropy_in_place(logits: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Sum of the cross-entropies (nats) of logits (n, V), which become its gradient.

    targets (n,) of -1 are ignored. With `softcap` c the logits count as c tanh(logits / c). In
    place, so that fewer tensors compete for the CPU's cache.
    """
    scored = (targets >= 0)[:, None]
    targets = targets.clamp(min=0)[:, None]

    # torch's exp can take 8 times as long as exp2 on a CPU, its tanh 20 times (AMD EPYC). Hence z
    # is in bits there: one unit of it stands for `unit` nats. CUDA would compile exp2 at its first
    # call.
    if logits.device.type == "cpu":
        exp_, unit = torch.exp2_, math.log(2)
    else:
        exp_, unit = torch.exp_, 1.0

    z = logits.float()                                                          # (n, V)
    if softcap:
        # c tanh(u) = 2 c sigmoid(2 u) - c, and the softmax cancels the last term.
        assert softcap <= 38, "z reaches 2 softcap nats: beyond 38 a sum of 300,000 exps overflows"
        s = z.mul_(2 / softcap).sigmoid_()
        z = s * (2 * softcap / unit)
    else:
        z = z.mul_(1 / unit)
        z = z.sub_(z.amax(dim=1, keepdim=True))

    of_target = z.gather(1, targets)
    p = exp_(z)
    total = p.sum(dim=1, keepdim=True)
    loss = ((total.log() - of_target * unit) * scored).sum()

    # The gradient is p / total - onehot(target), by the chain rule times 1 - tanh^2 = 4 s (1 - s).
    factor = scored * 1.0
    if softcap:
        factor = scored * 4.0
    p.mul_(factor / total).scatter_add_(1, targets, -factor)
    if softcap:
        torch.ops.aten.sigmoid_backward.grad_input(p, s, grad_input=p)          # p s (1 - s)
    logits.copy_(p)
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x W^T in nats, with the logits of `chunk` tokens in memory at a time.

    x (N, C), weight (V, C), targets int64 (N,), -1 ignored. The gradient of the logits needs
    nothing of what follows the loss, so the forward already computes those of x and W while the
    logits are in the cache, and the backward only scales them.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, softcap, with_gradient):
        device = x.device.type
        dtype = matmul_dtype(x)

        # On a CPU the loss takes a quarter of the time if the float32 logits of a few rows stay in
        # cache.
        tile = chunk
        if device == "cpu":
            tile = max(1, 400_000 // weight.size(0)) * torch.get_num_threads()

        with torch.autocast(device, enabled=False):
            w = weight.to(dtype)
            loss = torch.zeros((), device=x.device)
            dx = torch.empty_like(x)
            dw = None
            scale = 1 / (targets >= 0).sum().clamp(min=1)

            x = x.to(dtype)
            chunks = zip(x.split(chunk), dx.split(chunk), targets.split(chunk), strict=True)
            for x_i, dx_i, targets_i in chunks:
                logits = x_i @ w.t()                                            # (chunk, V)
                tiles = zip(logits.split(tile), targets_i.split(tile), strict=True)
                for rows, targets_of_rows in tiles:
                    loss += cross_entropy_in_place(rows, targets_of_rows, softcap)

                # The logits are their gradient now.
                if with_gradient:
                    dx_i.copy_(logits @ w)
                    dw_i = logits.t() @ x_i                                     # (V, C)
                    if dw is None:
                        dw = dw_i.to(weight.dtype)
                    else:
                        dw.add_(dw_i)
                del logits, rows                # else the next chunk's are allocated beside them

            if with_gradient:
                ctx.save_for_backward(dx, dw, scale)   # unscaled: in float16 dx / N would underflow
            return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        dx, dw, scale = ctx.saved_tensors
        factor = gradient * scale
        # In place, for dw is not needed again: autograd refuses a second backward.
        return dx * factor, dw.mul_(factor), None, None, None, None


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float
) -> Tensor:
    """ChunkedCrossEntropy, for eager mode: a compiler would compute all chunks' products first."""
    return ChunkedCrossEntropy.apply(x, weight, targets, chunk, softcap, torch.is_grad_enabled())
