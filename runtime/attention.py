"""Attention: its kernels by name, the mask of documents and windows, whether a kernel can run here."""
import contextlib
import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from runtime.cli import UserError, brief_error
from runtime.tokenizer import EOT

SDPA_KERNELS = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION,
                "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ATTENTION = ("auto", "naive", *SDPA_KERNELS)
NAIVE_MAX_LENGTH = 512      # tokens; beyond it the formula's (T, S) matrix costs too much memory


def sdpa(kernel: str) -> contextlib.AbstractContextManager:
    """Within it F.scaled_dot_product_attention takes this kernel; for 'auto' torch chooses."""
    return contextlib.nullcontext() if kernel == "auto" else sdpa_kernel(SDPA_KERNELS[kernel])


def by_formula(kernel: str, q: Tensor, k: Tensor) -> bool:
    """Whether attention is computed by its formula: 'naive', and 'auto' where that is faster."""
    fast = q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.size(-2) <= NAIVE_MAX_LENGTH
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


def check_attention(kernel: str, device: str, dtype: torch.dtype, head_dim: int,
                    masked: bool = False) -> None:
    """Raises UserError, with torch's reason, if `kernel` cannot run forward and backward on `device`, with a
    mask if `masked`."""
    q = torch.zeros(1, 128, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device) if masked else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attention(q, q, q, kernel, mask).sum().backward()
        except RuntimeError as error:
            reasons = [str(w.message).split(" (Triggered")[0] for w in caught] or [brief_error(error)]
            raise UserError(f"--attention {kernel} cannot run on {device} in {str(dtype)[6:]} with heads of "
                            f"{head_dim}{' and a mask' if masked else ''} ({'; '.join(reasons)}): "
                            f"use --attention auto") from None
