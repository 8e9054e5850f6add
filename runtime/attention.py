"""Attention: its kernels by name, the mask of documents and windows, whether a kernel can run here."""
import contextlib
import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from runtime.cli import UserError
from runtime.tokenizer import EOT

SDPA_KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ATTENTION = ("auto", "naive", *SDPA_KERNELS, "flex")
# tokens; up to here half the time of SDPA's CPU kernel (bench.py attention), beyond it memory matters more
NAIVE_MAX_LENGTH = 512


@functools.cache
def compiled_flex() -> Callable:
    """FlexAttention as a kernel of its own. Cached, because torch never frees what torch.compile returns."""
    return torch.compile(flex_attention, dynamic=False)


def resolve_attention(kernel: str, device: str, dtype: torch.dtype, length: int, blocks: bool) -> str:
    """The kernel that runs. Every choice of an attention kernel is made here.

    `kernel`: a name in ATTENTION, or 'sdpa', where torch chooses among its own. `device`: its type, as
    'cuda'. `length`: number of keys. `blocks`: whether the mask is a BlockMask, or can be made as one.
    Returns 'naive', 'sdpa', or a name in SDPA_KERNELS; with `blocks` also 'flex' (the plain function) or
    'compiled flex'.
    """
    # The choice depends on is_compiling() only here. The compiled graph and the eager model that shares its
    # weights (samples, HellaSwag) are one module with one setting, so no attribute can tell them apart.
    in_graph = torch.compiler.is_compiling()
    if kernel == "auto":
        if blocks and device == "cuda" and in_graph:
            kernel = "flex"
        elif device == "cpu" and dtype == torch.bfloat16 and length <= NAIVE_MAX_LENGTH:
            kernel = "naive"
        else:       # also eagerly on CUDA: FlexAttention would be compiled for each of the many lengths there
            kernel = "sdpa"
    if kernel == "flex" and not blocks:                                         # generation with a KV cache
        kernel = "sdpa"
    if kernel == "flex" and device == "cuda" and not in_graph:                  # eager, it is not fused
        kernel = "compiled flex"
    return kernel


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto",
              mask: Tensor | BlockMask | None = None) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v. q: (B, T, nh, hs), k, v: (B, S, nh, hs) -> (B, T, nh, hs).

    Vaswani et al. 2017, eq. 1 (arXiv:1706.03762). `mask`: from document_window_mask. Without a mask attention
    is causal if T = S, and full otherwise. `kernel`: 'naive' computes the (T, S) matrix by the formula;
    'math', 'efficient', 'flash' (arXiv:2307.08691) and 'cudnn' select that SDPA kernel; 'flex' is for a
    BlockMask, which always selects it; 'auto': see resolve_attention.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                            # (B, nh, T or S, hs)
    T, S = q.size(-2), k.size(-2)
    blocks = isinstance(mask, BlockMask)
    kernel = resolve_attention("flex" if blocks else kernel, q.device.type, q.dtype, S, blocks)
    if blocks:
        flex = compiled_flex() if kernel == "compiled flex" else flex_attention
        return flex(q, k, v, block_mask=mask).transpose(1, 2)
    is_causal = mask is None and T == S
    if kernel == "naive":
        att = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                 # (B, nh, T, S)
        if is_causal:
            att = att + torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        elif mask is not None:
            att = att.masked_fill(~mask, float("-inf"))
        return (F.softmax(att, dim=-1).to(v.dtype) @ v).transpose(1, 2)
    with contextlib.nullcontext() if kernel == "sdpa" else sdpa_kernel(SDPA_KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal).transpose(1, 2)


def document_window_mask(tokens: Tensor, T: int, window: Tensor,
                         as_blocks: bool = False) -> Tensor | BlockMask:
    """Which of `tokens` (B, S) each of the last T attends to: itself and the `window` - 1 before it, as far
    as they are in its document. <|endoftext|> begins a document. `window`: int64 ().

    Returns a bool mask (B, 1, T, S), or, `as_blocks` and for T = S, FlexAttention's BlockMask
    (arXiv:2412.05496). That skips empty blocks of 128 x 128, so that the time grows with T window instead of
    T^2.
    """
    B, S = tokens.size()
    document = (tokens == EOT).cumsum(1)                                        # (B, S)

    def seen(b, h, q, k):
        return (k <= q) & (q - k < window) & (document[b, q] == document[b, k])
    if as_blocks:
        return create_block_mask(seen, B, None, S, S, device=tokens.device)
    k = torch.arange(S, device=tokens.device)
    return seen(torch.arange(B, device=tokens.device)[:, None, None, None], None, k[S - T:, None], k[None, :])


def check_attention(kernel: str, device: str, dtype: torch.dtype, head_dim: int,
                    masked: bool = False) -> None:
    """Raises UserError, with torch's reason, if `kernel` cannot run forward and backward on `device`, with a
    mask if `masked`."""
    if kernel not in ATTENTION:
        raise UserError(f"--attention {kernel}: choose one of {', '.join(ATTENTION)}")
    if kernel == "flex" and not masked:
        raise UserError("--attention flex is for documents and windows: give --window N (--recipe speedrun "
                        "or frontier), or --attention auto")
    q = torch.zeros(1, 128, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
    tokens, window = torch.zeros(1, 128, device=device, dtype=torch.int64), torch.tensor(128, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mask = document_window_mask(tokens, 128, window, kernel == "flex") if masked else None
            attention(q, q, q, kernel, mask).sum().backward()
        except Exception as error:              # torch raises many kinds, and its compiler others for flex
            reasons = [str(w.message).split(" (Triggered")[0] for w in caught]
            reasons = reasons or [str(error).strip().split("\n")[0][:200]]
            raise UserError(f"--attention {kernel} cannot run on {device} in {str(dtype)[6:]} with heads of "
                            f"{head_dim}{' and a mask' if masked else ''} ({'; '.join(reasons)}): "
                            f"use --attention auto") from None
