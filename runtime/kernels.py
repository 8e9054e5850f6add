"""Attention by name and windows, the chunked cross-entropy, RMSNorm, linear and embedding layers."""
import contextlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from runtime.tokenizer import EOT

SDPA_KERNELS = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION,
                "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ATTENTION = ("auto", "naive", *SDPA_KERNELS)


def sdpa(kernel: str) -> contextlib.AbstractContextManager:
    """Within it F.scaled_dot_product_attention takes this kernel; for 'auto' torch chooses."""
    return contextlib.nullcontext() if kernel == "auto" else sdpa_kernel(SDPA_KERNELS[kernel])


def by_formula(kernel: str, q: Tensor, k: Tensor) -> bool:
    """Whether attention is computed by its formula: 'naive', and 'auto' where that is faster, up to 512
    tokens; beyond them its (T, S) matrix costs too much memory."""
    fast = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.size(-2) <= 512
    return kernel == "naive" or kernel == "auto" and fast


def formula(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v (arXiv:1706.03762, eq. 1). q: (B, nh, T, hs), k, v: (B, nh, S, hs)."""
    T = q.size(-2)
    att = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                     # (B, nh, T, S)
    if is_causal:
        att = att + torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    elif mask is not None:
        att = att.masked_fill(~mask, float("-inf"))
    return F.softmax(att, dim=-1).to(v.dtype) @ v                               # (B, nh, T, hs)


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto",
              mask: Tensor | BlockMask | None = None) -> Tensor:
    """q: (B, T, nh, hs), k, v: (B, S, nh, hs) -> (B, T, nh, hs). `mask`: from document_window_mask; without
    one attention is causal if T = S, and full otherwise. `kernel`: a name in ATTENTION; a BlockMask always
    takes FlexAttention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                            # (B, nh, T or S, hs)
    is_causal = mask is None and q.size(-2) == k.size(-2)
    if isinstance(mask, BlockMask):
        y = flex_attention(q, k, v, block_mask=mask)
    elif by_formula(kernel, q, k):
        y = formula(q, k, v, is_causal, mask)
    else:
        with sdpa(kernel):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return y.transpose(1, 2)


def document_window_mask(tokens: Tensor, T: int, window: Tensor,
                         as_blocks: bool = False) -> Tensor | BlockMask:
    """Which of `tokens` (B, S) each of the last T attends to: itself and the `window` - 1 before it, as far
    as they are in its document. <|endoftext|> begins a document. `window`: int64 ().

    Returns a bool mask (B, 1, T, S), or, `as_blocks` and for T = S, FlexAttention's BlockMask
    (arXiv:2412.05496): it skips empty blocks of 128 x 128, so that time grows with T window, not with T^2."""
    B, S = tokens.size()
    document = (tokens == EOT).cumsum(1)                                        # (B, S)

    def seen(b, h, q, k):
        return (k <= q) & (q - k < window) & (document[b, q] == document[b, k])
    if as_blocks:
        return create_block_mask(seen, B, None, S, S, device=tokens.device)
    k = torch.arange(S, device=tokens.device)
    return seen(torch.arange(B, device=tokens.device)[:, None, None, None], None, k[S - T:, None], k[None, :])


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`: autocast's, or that of `x` where autocast is off."""
    device = x.device.type              # "meta" has no autocast
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def cross_entropy_(logits: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Sum of the cross-entropies (nats) of logits (n, V), or if not 0 of softcap tanh(logits / softcap), and
    targets (n,), of which -1 are ignored. Overwrites the logits with its gradient; computes in fp32.

    In place, so that fewer tensors compete for the cache, and on a CPU with exp2: torch's exp can take 8
    times as long there, its tanh 20 times (AMD EPYC). On CUDA torch compiles exp2 at its first call."""
    scored, targets = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    # unit: the nats that 1 of z stands for
    exp_, unit = (torch.exp2_, math.log(2)) if logits.device.type == "cpu" else (torch.exp_, 1.0)
    z = logits.float()                                                          # (n, V)
    if softcap:                         # tanh(u) = 2 sigmoid(2u) - 1, and the softmax cancels the -1
        s = z.mul_(2 / softcap).sigmoid_()
        assert softcap <= 38, "z is at most 2 softcap nats: beyond 38 the sum of 300,000 exps overflows"
        z = s * (2 * softcap / unit)
    else:
        z = z.mul_(1 / unit)
        z = z.sub_(z.amax(dim=1, keepdim=True))
    own = z.gather(1, targets)
    p = exp_(z)
    total = p.sum(dim=1, keepdim=True)
    loss = ((total.log() - own * unit) * scored).sum()
    weight = scored * (4.0 if softcap else 1.0)         # the derivative of tanh, 1 - tanh^2, is 4 s (1 - s)
    p.mul_(weight / total).scatter_add_(1, targets, -weight)
    if softcap:
        torch.ops.aten.sigmoid_backward.grad_input(p, s, grad_input=p)      # p s (1 - s)
    logits.copy_(p)
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x W^T in nats, with the logits of `chunk` tokens in memory at a time. x (N, C),
    weight (V, C), targets (N,) int64, -1 ignored. The logits' gradient, p - onehot(target), needs nothing of
    what follows the loss: so the forward makes the gradients of x and W, and the backward scales them."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, softcap, with_gradient):
        device, dtype = x.device.type, matmul_dtype(x)
        # on a CPU it takes a quarter of the time if the fp32 values of a few rows at a time stay in its cache
        tile = max(1, 400_000 // weight.size(0)) * torch.get_num_threads() if device == "cpu" else chunk
        with torch.autocast(device, enabled=False):
            w, loss, dx, dw = weight.to(dtype), torch.zeros((), device=x.device), torch.empty_like(x), None
            scale = 1 / (targets >= 0).sum().clamp(min=1)
            parts = zip(x.to(dtype).split(chunk), dx.split(chunk), targets.split(chunk), strict=True)
            for x_i, dx_i, targets_i in parts:
                logits = x_i @ w.t()                                            # (chunk, V)
                for rows, targets_of_rows in zip(logits.split(tile), targets_i.split(tile), strict=True):
                    loss += cross_entropy_(rows, targets_of_rows, softcap)
                if with_gradient:
                    dx_i.copy_(logits @ w)
                    dw_i = logits.t() @ x_i                                     # (V, C)
                    dw = dw_i.to(weight.dtype) if dw is None else dw.add_(dw_i)
                del logits, rows                # else the next chunk's are allocated beside them
            if with_gradient:
                ctx.save_for_backward(dx, dw, scale)        # unscaled: in float16 dx / N would underflow
            return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        dx, dw, scale = ctx.saved_tensors
        # in place, for dw is not needed again: a second backward (retain_graph=True) is an error of autograd
        return dx * (gradient * scale), dw.mul_(gradient * scale), None, None, None, None


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float) -> Tensor:
    """ChunkedCrossEntropy, for eager mode: a compiler would compute all chunks' products first."""
    return ChunkedCrossEntropy.apply(x, weight, targets, chunk, softcap, torch.is_grad_enabled())


class LinearFunction(torch.autograd.Function):
    """x W^T + b in autocast's dtype. x (B, T, in), weight (out, in), bias (out) -> (B, T, out).

    The bias's gradient is dy summed over T, then over B: so the compiler fuses it into the kernel that makes
    dy, which is not read again: of the 152 GB that a micro-step of 64 x 1024 tokens moves for 124M this saves
    8.4. It is summed in fp32; autograd's sum is rounded to dy's dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        dtype = matmul_dtype(x)
        x, w = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, w)
        return F.linear(x, w, bias.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        a, b = dy.flatten(0, 1).t(), x.flatten(0, 1)
        # in a graph on CUDA the fp32 sums become the gradient unrounded; a T4 has no such product in bfloat16
        exact = torch.compiler.is_compiling() and dy.is_cuda and torch.version.cuda and dy.itemsize == 2
        dw = torch.mm(a, b, out_dtype=torch.float32) if exact else a @ b        # (out, in)
        db = dy.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32)).sum(0)
        return dy @ w, dw.to(db.dtype), db


class Linear(nn.Linear):
    """nn.Linear, whose weights the model draws: with a bias that of LinearFunction; without one the weight,
    which is stored in fp32, is cast to the dtype of its input."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        if self.bias is None:
            return F.linear(x, self.weight.to(x.dtype))
        if torch.is_grad_enabled():
            return LinearFunction.apply(x, self.weight, self.bias)
        return super().forward(x)


class Embedding(nn.Embedding):
    """nn.Embedding, whose table the model draws."""

    def reset_parameters(self):
        pass


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain (arXiv:1910.07467): x / sqrt(mean of squares) over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))
