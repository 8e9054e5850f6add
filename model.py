"""GPT-2 as published (Radford et al. 2019), its attention kernels, and its weights in every usual format.

    from model import GPT, GPTConfig, load_model
    model = GPT.from_pretrained("gpt2")         # or a folder in the Hugging Face format
    model = load_model("log/checkpoint_000250.pt")

    python model.py export log/checkpoint_019073.pt exported/       for transformers, lm-evaluation-harness, ...
"""
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import mmap
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from fineweb import EOT, VOCAB_SIZE, FlagParser, UserError, checked_asset, reach_hub, replace_file, run_command, shown

if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9):
    raise ImportError(f"torch {torch.__version__} is too old: this project needs torch 2.9 or newer")

GPT2_SIZES = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),            # 124,439,808 parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),    # 354,823,168
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),     # 774,030,080
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),        # 1,557,611,200
}


# -----------------------------------------------------------------------------
# the hardware

def choose_device(name: str = "auto") -> str:
    """'cuda', 'mps' or 'cpu' for `name`; 'auto' takes the first that is there. UserError for one that is not, and for a GPU that
    is there and cannot be used: 'auto' does not go on without it."""
    with warnings.catch_warnings(action="ignore"):      # torch's, of what the two checks below say in one line
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cuda", *(f"cuda:{i}" for i in range(gpus))] if gpus else []
    there += ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    if not gpus and (name == "auto" or name.startswith("cuda")):
        check_driver()
    if name != "auto" and name not in there:
        raise UserError(f"--device {name}: not to be found here; use {' or '.join(there)}")
    device = there[0] if name == "auto" else name
    if device.startswith("cuda"):
        check_capability(device)
    return device


def check_driver() -> None:
    """Where torch finds no GPU: UserError, with torch's reason, if there is a driver; that it is too old, mostly."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:     # the first: a torch without CUDA
        reason = str(error).split("\n")[0]
        if not re.search("not compiled|Found no NVIDIA driver|No (CUDA|HIP) GPUs", reason):
            raise UserError(f"torch {torch.__version__} cannot use this machine's GPU driver: {reason} (nvidia-smi tells "
                            f"more; --device cpu does without a GPU)") from None


def check_capability(device: str) -> None:
    """UserError if this torch holds no code for the GPU, which the first kernel would say as 'no kernel image is available'."""
    with warnings.catch_warnings(action="ignore"):      # torch's of the same, in several lines
        capability = torch.cuda.get_device_capability(device)
    held = re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(torch.cuda.get_arch_list()))      # none of ROCm's

    def runs(kind, major, minor, suffix):
        own = int(major), int(minor)
        if suffix == "a":                               # for this very one
            return own == capability
        # sm: also on later ones of the same generation; compute is compiled by the driver for any later one
        return own <= capability and (kind == "compute" or own[0] == capability[0])
    if held and not any(runs(*each) for each in held):
        raise UserError(f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, for which "
                        f"torch {torch.__version__} holds no code (it has {', '.join(torch.cuda.get_arch_list())}): install one "
                        f"that does (https://pytorch.org/get-started/previous-versions), or give --device cpu")


def choose_dtype(name: str, device: str) -> str:
    """'auto': bfloat16 where the hardware multiplies it, else float16 on CUDA and float32 elsewhere."""
    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    native = device == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bfloat16" if native else "float32"


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which `x` would be multiplied here: autocast's, or its own where autocast is off."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)          # "meta" has none
    return torch.get_autocast_dtype(device) if on else x.dtype


def make_autocast(device: str, dtype: str) -> torch.autocast:
    """torch.autocast to `dtype` ('bfloat16', 'float16') on `device`; switched off for 'float32'."""
    return torch.autocast(device.split(":")[0], dtype=getattr(torch, dtype), enabled=dtype != "float32")


def can_compile(device: str) -> str | None:
    """None if torch.compile works here, else the reason: it needs Triton on CUDA, a C++ compiler on the CPU."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.zeros(8, device=device))
    except Exception as error:          # inductor's, Triton's, the compiler's: any of them means eager
        return str(error).strip().split("\n")[0][:200] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, of a GPU or of the machine, as torch says it: by its own error, by a RuntimeError of CUDA's, of
    a library's or of the CPU's allocator, or by the compiler's error around one of these."""
    while error is not None:
        # torch.compile's two kinds keep what happened in `inner_exception`; they are raised from None
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or isinstance(error, RuntimeError) and re.search(
                r"\b(CUDA|HIP|NCCL)\b.{0,200}out of memory|_ALLOC_FAILED|DefaultCPUAllocator: ", str(error), re.I | re.S):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or (
            None if error.__suppress_context__ else error.__context__)
    return False


@contextlib.contextmanager
def memory_is_told(advice: Callable[[], str]) -> Iterator[None]:
    """Around what may run out of memory: then it ends in the UserError that `advice()` words, not in a traceback."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(advice()) from None
        raise


# Dense 16-bit peaks in TFLOP/s, accumulated in fp32, from NVIDIA's data sheets; those of newer cards are printed there with
# sparsity (twice as much), GeForce's also as accumulated in fp16 (twice again). The names are whole: what stands behind a number
# (Ti, D, Laptop GPU, NVL, a MIG slice) is another chip or clock, and what is not here has no figure rather than a neighbour's.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "B100": 1750, "GH200 (480|120)GB": 989.4, "H200": 989.4, "H200 NVL": 835.5,
    "H100 80GB HBM3": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756, "H800": 989.4, "H20": 148,
    "A100-(SXM4|PCIE)-(40|80)GB": 312, "A100 80GB PCIe": 312, "A800-SXM4-(40|80)GB": 312, "A800 80GB PCIe": 312,
    "A40": 149.7, "A30": 165, "A10": 125, "A10G": 70, "L40S": 362, "L40": 181, "L4": 121,
    "V100-SXM2-(16|32)GB": 125, "V100-PCIE-(16|32)GB": 112, "V100S-PCIE-32GB": 130, "T4": 65,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 154.8,
    # GeForce: multiprocessors x boost clock x 512, which gives the figures of NVIDIA's white papers (128 x 2.52 GHz: 165.2)
    "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2, "RTX 4090 D": 147.1, "RTX 4080 SUPER": 104.4, "RTX 4080": 97.5,
    "RTX 3090 Ti": 80, "RTX 3090": 71, "RTX 3080 Ti": 68.2, "RTX 3080": 59.5,
}


def peak_flops(device: str) -> float | None:
    """FLOP/s of this device's 16-bit matrix units, or None where the table does not know it."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", name)
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if re.fullmatch(key, name)), None)


def keep_large_blocks_whole() -> None:
    """Before CUDA's first use. Otherwise what lives on (gradients, moments) is put into the block that a micro-step's logits have
    left, by far the largest, and the next micro-step needs another: GPT-2 124M at 200 x 1,024 tokens then does not fit in 80 GB,
    of which it uses 69. What the user has set for the allocator stays."""
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:2048"


def keep_freed_memory() -> None:
    """glibc gives large freed blocks back to the kernel and has them zeroed page by page at the next step; on a CPU that
    costs more than any kernel here, since the logits alone take hundreds of megabytes. This makes it keep them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        for parameter, value in ((-4, 0), (-1, -1), (-2, 1 << 28)):     # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(parameter, value)


# -----------------------------------------------------------------------------
# attention: the textbook formula, torch's scaled_dot_product_attention with its kernel pinned, or FlexAttention

SDPA_KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ATTENTION = ("auto", "naive", *SDPA_KERNELS, "flex")
NAIVE_UP_TO = 512       # tokens: half the time of SDPA's CPU kernel there (bench.py attention); beyond, memory counts for more


@functools.cache
def compiled_flex() -> Callable:
    """Made once, when it is first asked for: every torch.compile is another wrapper that torch never lets go of."""
    return torch.compile(flex_attention, dynamic=False)


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto", mask: Tensor | BlockMask | None = None) -> Tensor:
    """softmax(q k^T / sqrt(hs)) v. q: (B, nh, T, hs), k, v: (B, nh, S, hs) -> (B, nh, T, hs).

    Vaswani et al. 2017, eq. 1 (arXiv:1706.03762). `mask`: what a token looks at, as look_back gives it; without one, and with
    T = S, what came before. `kernel`: 'naive' writes the (T, S) matrix out; 'math', 'efficient', 'flash' (arXiv:2307.08691)
    and 'cudnn' pin that SDPA kernel; 'flex' needs a mask of its own kind; 'auto' lets torch choose, but for short sequences
    in bfloat16 on a CPU, where the formula is the faster one.
    """
    T, S = q.size(-2), k.size(-2)
    if isinstance(mask, BlockMask):
        # a graph that is being compiled takes it in; anywhere else on a GPU only its compiled form is a kernel
        flex = compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        return flex(q, k, v, block_mask=mask)
    is_causal = mask is None and T == S
    if kernel == "naive" or kernel == "auto" and q.device.type == "cpu" and q.dtype == torch.bfloat16 and S <= NAIVE_UP_TO:
        att = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)                 # (B, nh, T, S)
        if is_causal:
            att = att + torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        elif mask is not None:
            att = att.masked_fill(~mask, float("-inf"))
        return F.softmax(att, dim=-1).to(v.dtype) @ v
    with contextlib.nullcontext() if kernel in ("auto", "flex") else sdpa_kernel(SDPA_KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


def look_back(tokens: Tensor, T: int, window: Tensor, as_blocks: bool = False) -> Tensor | BlockMask:
    """Which of all S `tokens` (B, S) each of the last T looks at: those of its own document (an <|endoftext|> begins one) among
    itself and the `window` - 1 before it; `window`: int64 (). A bool (B, 1, T, S), or as_blocks FlexAttention's BlockMask
    (arXiv:2412.05496), which leaves out whole blocks of 128 x 128: then the time grows with T window instead of T^2."""
    B, S = tokens.size()
    document = (tokens == EOT).cumsum(1)                                        # (B, S)

    def seen(b, h, q, k):
        return (k <= q) & (q - k < window) & (document[b, q] == document[b, k])
    if as_blocks:
        return create_block_mask(seen, B, None, S, S, device=tokens.device)
    k = torch.arange(S, device=tokens.device)
    return seen(torch.arange(B, device=tokens.device)[:, None, None, None], None, k[S - T:, None], k[None, :])


def check_attention(kernel: str, device: str, dtype: torch.dtype, head_dim: int, masked: bool = False) -> None:
    """Raises UserError, with torch's reason, if `kernel` cannot run forward and backward here; `masked`: with a mask."""
    if kernel not in ATTENTION:
        raise UserError(f"--attention {kernel}: choose one of {', '.join(ATTENTION)}")
    if kernel == "flex" and not masked:
        raise UserError("--attention flex is for documents and windows: give --recipe speedrun --window N, or --attention auto")
    q = torch.zeros(1, 1, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    tokens, window = torch.zeros(1, 128, device=device, dtype=torch.int64), torch.tensor(128, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attention(q, q, q, kernel, look_back(tokens, 128, window, kernel == "flex") if masked else None).sum().backward()
        except Exception as error:              # torch's of every kind, the compiler's for flex
            reasons = [str(w.message).split(" (Triggered")[0] for w in caught] or [str(error).strip().split("\n")[0][:200]]
            raise UserError(f"--attention {kernel} cannot run on {device} in {str(dtype)[6:]} with heads of {head_dim}"
                            f"{' and a mask' if masked else ''} ({'; '.join(reasons)}): use --attention auto") from None


# -----------------------------------------------------------------------------
# the loss

def cross_entropy_(logits: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Sum of the cross-entropies (nats) of logits (n, V) at targets (n,), -1 ignored. The logits turn into its gradient,
    softmax - onehot, in place; in between all is fp32. `softcap`: of softcap tanh(logits / softcap), if not 0."""
    scored, targets = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    z = logits.float()                                                          # (n, V)
    if softcap:
        s = torch.sigmoid(z * (2 / softcap))    # tanh(u) = 2 sigmoid(2u) - 1, and on a CPU tanh takes ten times as long
        z = (s - 0.5) * (2 * softcap)
    highest, own = z.amax(dim=1, keepdim=True), z.gather(1, targets)
    p = z.softmax(dim=1)
    # the likeliest token has p = exp(0) / sum exp(z - highest), which gives the normaliser without a second exp
    loss = ((highest - p.amax(dim=1, keepdim=True).log() - own) * scored).sum()
    if torch.compiler.is_compiling():           # to compare keeps all in one kernel, where to scatter makes an fp32 copy of p
        p = p - (torch.arange(z.size(1), device=z.device) == targets)
    else:
        p.scatter_add_(1, targets, torch.full_like(own, -1.0))
    if softcap:
        p = p.mul_(s).mul_(1 - s).mul_(4)                                       # the derivative, 1 - tanh^2
    logits.copy_(p.mul_(scored))
    return loss


@functools.cache
def compiled_cross_entropy_():
    """cross_entropy_ as one kernel: two passes over the logits, and nothing of their size beside them."""
    return torch.compile(cross_entropy_, dynamic=False)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x W^T in nats, with the logits of only `chunk` tokens in memory at a time.

    x (N, C), weight (V, C), targets (N,) int64, -1 ignored. GPT-2's logits are its largest tensor by far: a token's take
    4 x 50304 bytes in fp32, as much as 65 of its residual streams, and as much again for their gradient. The gradient
    p - onehot(target) needs nothing of what comes after the loss, so that the forward turns each chunk's logits into the
    gradients of x and W at once, and the backward only scales them. Chunks change neither the mean nor its gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, with_gradient, softcap=0.0, compiled=False):
        device, dtype = x.device.type, matmul_dtype(x)
        # a CPU needs a quarter of the time where the fp32 numbers of a few rows at a time stay in its cache
        tile = max(1, 400_000 // weight.size(0)) * torch.get_num_threads() if device == "cpu" else chunk
        loss_and_gradient_ = compiled_cross_entropy_() if compiled and device != "cpu" else cross_entropy_
        with torch.autocast(device, enabled=False):
            w, loss, dx, dw = weight.to(dtype), torch.zeros((), device=x.device), torch.empty_like(x), None
            scale = 1 / (targets >= 0).sum().clamp(min=1)
            for x_i, dx_i, targets_i in zip(x.to(dtype).split(chunk), dx.split(chunk), targets.split(chunk), strict=True):
                logits = x_i @ w.t()                                            # (chunk, V)
                for rows, targets_of_rows in zip(logits.split(tile), targets_i.split(tile), strict=True):
                    loss += loss_and_gradient_(rows, targets_of_rows, softcap)
                if with_gradient:
                    dx_i.copy_(logits @ w)
                    dw_i = logits.t() @ x_i                                     # (V, C)
                    dw = dw_i.to(weight.dtype) if dw is None else dw.add_(dw_i)
            if with_gradient:
                ctx.save_for_backward(dx, dw, scale)        # apart: in float16, dx / N would be lost before a scaler's factor
            return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        dx, dw, scale = ctx.saved_tensors
        return dx * (gradient * scale), dw * (gradient * scale), None, None, None, None, None


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float, compiled: bool) -> Tensor:
    """ChunkedCrossEntropy, apart from the graph of the rest where that is `compiled`."""
    return ChunkedCrossEntropy.apply(x, weight, targets, chunk, torch.is_grad_enabled(), softcap, compiled)


# -----------------------------------------------------------------------------
# what both models do with their final hidden states

class Cache:
    """What generation keeps: `tokens` (B, t) so far, None before the first, and each block's [keys, values] (B, nh, t, hs)."""

    def __init__(self, n_layer):
        self.tokens, self.blocks = None, [[] for _ in range(n_layer)]

    def add(self, idx: Tensor) -> Tensor:
        """Takes idx (B, T) in -> all tokens (B, t + T)."""
        self.tokens = idx if self.tokens is None else torch.cat((self.tokens, idx), dim=1)
        return self.tokens


def remembered(past: list | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, of a block's in the cache and the new ones; [] before the first, None: no cache."""
    if past is None:
        return k, v
    if past:
        assert k.size(2) == 1, "the cache is filled at once and then grows token by token"
        k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
    past[:] = k, v
    return k, v


class LanguageModel(nn.Module):
    """From hidden states to loss, losses a token, and samples. A subclass has `config`, blocks in `transformer.h` with their
    attention in `attn`, `lm_head`, and `hidden(idx, past=None)`: the final hidden states (B, T, C) of idx (B, T), which follow
    on the tokens in the Cache `past`."""
    chunked_loss = staticmethod(chunked_cross_entropy)
    loss_chunk = 0              # tokens whose logits are in memory at a time while training; 0: all
    softcap = 0.0               # c: the logits are c tanh(z / c), of z what the head gives; 0: they are z

    def logits(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., vocab_size)."""
        z = self.lm_head(x)
        return self.softcap * torch.tanh(z.float() / self.softcap) if self.softcap else z

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets: int64 (B, T). Without targets: (logits (B, T, vocab_size), None).

        With targets: (None, mean cross-entropy in nats); targets of -1 are ignored. The logits stay
        inside, so that torch.compile may fuse them with the loss.
        """
        if idx.size(1) > self.config.block_size:
            raise ValueError(f"a sequence of {idx.size(1)} tokens is longer than block_size {self.config.block_size}")
        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is not None and self.loss_chunk:
            return None, self.chunked_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.loss_chunk,
                                           self.softcap, torch.compiler.is_compiling())
        logits = self.logits(x)                                                 # (B, T, vocab_size)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Cross-entropy of each token, fp32 (B, T); 0 where the target is -1. idx, targets: int64 (B, T).

        Logits are computed at `positions` only: int64 (n,), indices into B T, which name each target >= 0 at least once.
        Without positions they are looked up, for which a GPU has to be waited for, and n is another each time.
        """
        if positions is None:
            positions = (targets >= 0).flatten().nonzero().flatten()            # (n,)
        logits = self.logits(self.hidden(idx).flatten(0, 1)[positions]).float()                 # (n, vocab_size)
        losses = F.cross_entropy(logits, targets.flatten()[positions], ignore_index=-1, reduction="none")
        return torch.zeros(idx.numel(), device=idx.device).scatter(0, positions, losses).view_as(idx)

    def use_attention(self, kernel: str) -> None:
        """Chooses the attention kernel by name (see `attention`); check_attention tells if it can run."""
        for block in self.transformer.h:
            block.attn.kernel = kernel

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = 50,
                 generator: torch.Generator | None = None) -> Tensor:
        """Continues idx (B, T) int64 by max_new_tokens sampled tokens -> (B, T + max_new_tokens).

        Keys and values are cached until the context fills block_size; from then on the window slides
        and positions shift, so each token costs a whole forward. `temperature` 0 takes the likeliest
        token; `top_k` None or 0 samples from all. Ids from 50257 on (padding) are never sampled.
        """
        past = None
        for _ in range(max_new_tokens):
            if past is None or idx.size(1) > self.config.block_size:
                past = Cache(self.config.n_layer)
                x = self.hidden(idx[:, -self.config.block_size:], past)
            else:
                x = self.hidden(idx[:, -1:], past)
            logits = self.logits(x[:, -1]).float()                              # (B, vocab_size)
            idx = torch.cat((idx, sample_token(logits, temperature, top_k, generator)), dim=1)
        return idx


# -----------------------------------------------------------------------------
# GPT-2

@dataclass
class GPTConfig:
    block_size: int = 1024      # longest sequence
    vocab_size: int = 50257     # 50,000 merges + 256 bytes + <|endoftext|>; training pads it to 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    gelu: str = "tanh"          # GPT-2's approximation; "none" is the exact one, which nanoGPT trains with


class LinearFunction(torch.autograd.Function):
    """x W^T + b as autocast does it, with its gradients. x (B, T, in), weight (out, in), bias (out) -> (B, T, out).

    The gradient of the bias is dy summed over B and T. Summed over T first, and then over B, a compiler does that in the kernel
    that makes dy, and need not read dy once more: 8.4 GB of the 152 that a micro-step of 64 x 1024 tokens moves for 124M. The sum
    is in fp32, where autograd's own is rounded to the dtype of the product.
    """

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
        dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)                             # (out, in)
        db = dy.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32)).sum(0)
        return dy @ w, dw.to(db.dtype), db


class Linear(nn.Linear):
    """torch's, but for how the gradient of its bias is summed up."""

    def forward(self, x):
        return LinearFunction.apply(x, self.weight, self.bias) if torch.is_grad_enabled() else super().forward(x)


def recomputed(f: Callable, x: Tensor) -> Tensor:
    """f(x), pointwise. A compiled backward computes it anew from x, in the kernel of f's derivative, instead of keeping it."""
    return checkpoint(f, x, use_reentrant=False) if torch.compiler.is_compiling() else f(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)          # query, key, value of all heads
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.kernel = "auto"

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)         # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = attention(q, *remembered(past, k, v), self.kernel)                  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)
        self.gelu = nn.GELU(approximate=config.gelu)                            # arXiv:1606.08415

    def forward(self, x):
        return self.c_proj(recomputed(self.gelu, self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """GPT-2: pre-norm blocks, learned positions, tanh GELU, biases everywhere, head tied to wte."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.transformer.wte.weight                       # arXiv:1608.05859
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Every parameter once: normal(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer), GPT-2 section 2.3."""
        for name, p in self.named_parameters():
            if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")):
                p.fill_(1.0)
            elif name.endswith(".bias"):
                p.zero_()
            elif name.endswith("c_proj.weight"):
                p.normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layer))
            elif name.endswith(("wte.weight", "wpe.weight", "c_attn.weight", "c_fc.weight")):
                p.normal_(0.0, 0.02)
            else:
                raise AssertionError(f"no initialisation for {name}")

    def hidden(self, idx: Tensor, past: Cache | None = None) -> Tensor:
        """Final hidden states (B, T, C) of idx (B, T), which follow on the tokens in the Cache `past`."""
        tokens = past.add(idx) if past else idx
        pos = torch.arange(tokens.size(1) - idx.size(1), tokens.size(1), device=idx.device)     # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)               # (B, T, C)
        # The residual stream is bfloat16 where the products are, as llm.c and modded-nanogpt have it: in fp32 it is 14% of what a
        # step moves. LayerNorm computes in fp32 all the same. Not in float16, whose largest number is 65504.
        if matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()
        for i, block in enumerate(self.transformer.h):
            x = block(x, past.blocks[i] if past else None)
        return self.transformer.ln_f(x)

    def configure_optimizers(self, max_lr: float, weight_decay: float, betas: tuple = (0.9, 0.95), eps: float = 1e-8) -> list:
        """[AdamW] with decay (arXiv:1711.05101) on what is two-dimensional and up, none on gains and biases."""
        params = list(self.named_parameters())
        groups = [{"params": [(n, p) for n, p in params if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [(n, p) for n, p in params if p.dim() < 2], "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=max_lr, betas=betas, eps=eps, fused=True)]

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward FLOPs a token: 6 N + 12 n_layer n_embd T (PaLM, arXiv:2204.02311, appendix B).

        N counts the tied head and leaves out the positions, which are only looked up.
        """
        N = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * sequence_length

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "GPT":
        """`gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl` (or another name on the Hugging Face hub), or a local folder."""
        return _from_huggingface(source)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer, as transformers' GPT2LMHeadModel and AutoTokenizer
        read them: Conv1D weights transposed, the padding of the vocabulary cut off."""
        from safetensors.torch import save
        folder, c = Path(folder), self.config
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = min(c.vocab_size, VOCAB_SIZE)
        weights = {}
        for name, p in self.state_dict().items():
            if name != "lm_head.weight":                                        # tied to wte
                p = p[:vocab_size] if name.endswith("wte.weight") else p.t() if _is_conv1d(name) else p
                weights[name] = p.detach().float().cpu().contiguous()
        config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab_size,
                  "n_positions": c.block_size, "n_ctx": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer,
                  "n_head": c.n_head, "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
                  "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
                  "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02,
                  "bos_token_id": EOT, "eos_token_id": EOT, "dtype": "float32"}
        eot = "<|endoftext|>"
        tokens = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": c.block_size, "add_prefix_space": False,
                  "bos_token": eot, "eos_token": eot, "unk_token": eot}
        for name, content in (("config.json", config), ("tokenizer_config.json", tokens)):
            data = json.dumps(content, indent=2).encode()
            replace_file(folder / name, lambda file, data=data: file.write(data))
        shutil.copyfile(checked_asset("encoder.json"), folder / "vocab.json")
        shutil.copyfile(checked_asset("vocab.bpe"), folder / "merges.txt")
        replace_file(folder / "model.safetensors", lambda file: file.write(save(weights, metadata={"format": "pt"})))


# -----------------------------------------------------------------------------
# the speedrun model: modded-nanogpt's record 10 (November 2024), in our words, with its state-dict names. What an idea brings
# stands in brackets beside it: validation loss without it minus with it, after 0.41 million tokens, 4 layers of width 128, means
# of two seeds, which differ by up to 0.06 (bench.py recipes, 2026-11-21). Some bring nothing here that can be told from 0.

@dataclass
class SpeedrunConfig:
    block_size: int = 1024      # longest sequence
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6             # heads of 128
    n_embd: int = 768
    window: int = 0             # how many tokens attention looks at, itself included, inside its document; 0: all before it


class CastLinear(nn.Linear):
    """A linear layer without bias whose weight stays fp32 and multiplies in the dtype of what comes in."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain (arXiv:1910.07467): x / sqrt(mean of squares) over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864): x (B, nh, T, hs); cos, sin (T, hs/2) turn the pairs (i, i + hs/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class SpeedrunAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_q, self.c_k, self.c_v, self.c_proj = (CastLinear(C, C) for _ in range(4))
        self.lamb = nn.Parameter(torch.empty(()))
        self.n_head, self.kernel = config.n_head, "auto"

    def forward(self, x, v1, rotary, mask, past=None):
        """x (B, T, C), v1 (B, nh, T, hs) the first block's values or None -> (B, T, C) and v1."""
        B, T, C = x.size()
        q, k, v = (linear(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)          # (B, nh, T, hs)
                   for linear in (self.c_q, self.c_k, self.c_v))
        v1 = v if v1 is None else v1
        v = (1 - self.lamb) * v + self.lamb * v1        # value residual (arXiv:2410.17897), the mix learnt [-0.007]
        # QK-norm (arXiv:2010.04245) [+0.018], then positions [+0.082]
        q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)
        y = attention(q, *remembered(past, k, v), self.kernel, mask)            # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), v1


class SpeedrunMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc, self.c_proj = CastLinear(config.n_embd, 4 * config.n_embd), CastLinear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())                       # ReLU squared (arXiv:2109.08668) [-0.003]


class SpeedrunBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = SpeedrunAttention(config), SpeedrunMLP(config)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x, v1, x0, rotary, mask, past=None):
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # every block sees the embedding, as it learns to [+0.011]
        y, v1 = self.attn(norm(x), v1, rotary, mask, past)
        x = x + y
        return x + self.mlp(norm(x)), v1


class SpeedrunGPT(LanguageModel):
    """modded-nanogpt's model of record 10: 162.2M parameters at GPT-2's size, because embedding and head are two matrices."""
    softcap = 30.0              # arXiv:2408.00118, section 2 [+0.004]
    flex = True                 # attention "auto" is FlexAttention in a compiled graph on CUDA

    def __init__(self, config):
        super().__init__()
        if config.n_embd % (2 * config.n_head):
            raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads of an even size, as "
                            f"rotary positions need it: give another number of heads")
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList(SpeedrunBlock(config) for _ in range(config.n_layer)),
        ))
        self.lm_head = CastLinear(config.n_embd, config.vocab_size)
        # a tensor, because its warm-up changes it while a compiled graph stays
        self.register_buffer("window", torch.tensor(config.window or config.block_size, device="cpu"), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Every parameter once. What ends a branch, and the head, starts at zero (arXiv:2203.03466) [+0.009], so that the first
        loss is ln(vocab_size); a block starts as x + 0, and its values as half of the first block's."""
        for name, p in self.named_parameters():
            if name.endswith(("c_proj.weight", "lm_head.weight")):
                p.zero_()
            elif name.endswith("wte.weight"):
                p.normal_()
            elif name.endswith(("c_q.weight", "c_k.weight", "c_v.weight", "c_fc.weight")):
                p.uniform_(-p.size(1)**-0.5, p.size(1)**-0.5)
            elif name.endswith("lambdas"):
                p.copy_(torch.tensor([1.0, 0.0]))
            elif name.endswith("lamb"):
                p.fill_(0.5)
            else:
                raise AssertionError(f"no initialisation for {name}")

    def hidden(self, idx: Tensor, past: Cache | None = None) -> Tensor:
        """Final hidden states (B, T, C), in autocast's dtype from the embedding on: without autocast's own casts, which
        would take norms and residuals back to fp32."""
        device = idx.device.type
        dtype = matmul_dtype(self.transformer.wte.weight)
        tokens = past.add(idx) if past else idx
        hs = self.config.n_embd // self.config.n_head
        pos = torch.arange(tokens.size(1) - idx.size(1), tokens.size(1), device=idx.device)     # (T,)
        frequencies = 10000.0 ** -(torch.arange(0, hs, 2, device=idx.device) / hs)              # (hs/2,)
        angles = torch.outer(pos, frequencies)                                  # (T, hs/2)
        rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        mask = None
        if self.config.window:          # modded-nanogpt's records 12 and 13
            kernel = self.transformer.h[0].attn.kernel
            flex = kernel == "flex" or kernel == "auto" and self.flex and device == "cuda" and torch.compiler.is_compiling()
            mask = look_back(tokens, idx.size(1), self.window, as_blocks=flex and not past)
        with torch.autocast(device, enabled=False):
            x = x0 = norm(self.transformer.wte(idx).to(dtype))                  # (B, T, C), normed [+0.019]
            v1 = None
            for i, block in enumerate(self.transformer.h):
                x, v1 = block(x, v1, x0, rotary, mask, past.blocks[i] if past else None)
            return norm(x)

    def configure_optimizers(self, max_lr: float, weight_decay: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> list:
        """[Adam, Muon]: at GPT-2's width with record 10's rates, Muon's max_lr, the embedding's 15 times that, the head's a
        tenth; the head's goes with 1 / width (arXiv:2203.03466, table 3) [+0.437 at width 128]. The decay is Muon's alone,
        `dtype` that of its iteration."""
        params = list(self.named_parameters())
        blocks = [(n, p) for n, p in params if n.startswith("transformer.h.")]
        head, wte = ([(n, p) for n, p in params if n == name] for name in ("lm_head.weight", "transformer.wte.weight"))
        adam = torch.optim.Adam([{"params": wte, "lr": 15 * max_lr},
                                 {"params": head, "lr": 0.1 * max_lr * 768 / self.config.n_embd},
                                 {"params": [(n, p) for n, p in blocks if p.dim() < 2], "lr": max_lr}],
                                betas=(0.9, 0.95), eps=1e-8, fused=True)
        return [adam, Muon([(n, p) for n, p in blocks if p.dim() == 2], max_lr, weight_decay=weight_decay,
                           dtype=dtype)]

    def flops_per_token(self, sequence_length: int) -> int:
        """As GPT's; the embedding is only looked up, and a token attends to no more than the window, as it is at the end of
        its warm-up."""
        N = sum(p.numel() for p in self.parameters()) - self.transformer.wte.weight.numel()
        span = min(sequence_length, self.config.window or sequence_length)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * span

    def save_pretrained(self, folder: str | Path) -> None:
        raise UserError("a speedrun model has no form in transformers: only one of --recipe gpt2 can be exported")


def orthogonalize(G: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices to G (n, rows, columns), roughly: singular values end between 0.7 and 1.2.

    `steps` of a quintic Newton-Schulz iteration in `dtype`, with the coefficients that push small singular values up
    fastest (Keller Jordan 2024, kellerjordan.github.io/posts/muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    for _ in range(steps):                      # three products and nothing between them, which are rounded once each
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                             # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)                                      # a X + B X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Keller Jordan 2024), for the matrices inside the blocks [+0.142 against Adam]; `params`: (name,
    parameter) pairs.

    Matrices of one shape are a group and go through the iteration as one batch. Of several processes, which all have the
    same averaged gradients, each takes its share of a batch, and the updates are gathered: the momentum is on all of them.
    The rate counts sqrt(max(1, rows / columns)) times. `found_inf`, a tensor, if set: where it is 1 the step does nothing.
    """
    STATE = ("momentum_buffer",)
    _step_supports_amp_scaling = True           # GradScaler then sets found_inf instead of waiting for the GPU

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, dtype=torch.bfloat16):
        self.dtype, by_shape = dtype, {}
        for name, p in params:
            by_shape.setdefault(p.shape, []).append((name, p))
        super().__init__([{"params": named} for named in by_shape.values()],
                         dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        several = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params, momentum = group["params"], group["momentum"]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            grads = [p.grad for p in params]
            if bad is not None:
                grads = [torch.where(bad > 0, 0.0, grad) for grad in grads]
            torch._foreach_mul_(buffers, momentum if bad is None else torch.where(bad > 0, 1.0, momentum))
            torch._foreach_add_(buffers, grads)
            share = -(-len(params) // world_size)
            mine = [grads[i] + momentum * buffers[i] for i in range(rank * share, min(len(params), (rank + 1) * share))]
            mine += [torch.zeros_like(params[0])] * (share - len(mine))         # what is gathered has one size
            updates = orthogonalize(torch.stack(mine), self.dtype)              # (share, rows, columns)
            if several:
                gathered = updates.new_empty(world_size * share, *params[0].shape)
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor        # renamed in torch 2.13
                gather(gathered, updates.contiguous())
                updates = gathered
            rows, columns = params[0].shape
            scale = -group["lr"] * max(1.0, rows / columns)**0.5
            updates = updates.float() * (scale if bad is None else torch.where(bad > 0, 0.0, scale))
            shrink = 1.0 - group["lr"] * group["weight_decay"]
            torch._foreach_mul_(params, shrink if bad is None else torch.where(bad > 0, 1.0, shrink))
            torch._foreach_add_(params, list(updates[:len(params)]))


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One sampled id a row: logits (B, vocab_size) -> (B, 1)."""
    logits[:, VOCAB_SIZE:] = float("-inf")
    if temperature < 1e-5:              # 0, or so small that the quotients would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < kept[:, -1:], float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1, generator=generator)


# -----------------------------------------------------------------------------
# weights from elsewhere

MODELS = {"gpt2": (GPT, GPTConfig), "speedrun": (SpeedrunGPT, SpeedrunConfig)}          # what a checkpoint's `recipe` names


def _brief(error):
    text = str(error).split("WeightsUnpickler error:")[-1]                      # before it torch tells how to run the file's code
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"


def _is_conv1d(name):
    """GPT-2's own code stores these as (in, out), nn.Linear as (out, in)."""
    return name.endswith(("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"))


def is_plain(tensor: object) -> bool:
    """Dense floats that are all in the file (an expanded tensor has any shape and holds one number)."""
    return (torch.is_tensor(tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            and tensor.is_floating_point()
            and 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _canonical(state_dict):
    """State dict in this project's names: no wrapper's prefixes, no mask buffers, zeros for biases left out."""
    out = {}
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not torch.is_tensor(tensor):
            raise UserError("its state dict holds something that is not a tensor")
        while name.startswith(("_orig_mod.", "module.")):                       # torch.compile, DDP
            name = name.split(".", 1)[1]
        if not name.startswith(("transformer.", "lm_head.")):                   # the hub's gpt2 has no prefix
            name = "transformer." + name
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            out[name] = tensor
    if not any(name.endswith(".bias") for name in out):                         # nanoGPT's bias=False
        for name in [n for n, t in out.items() if (".h." in n or ".ln_f." in n) and is_plain(t) and t.dim()]:
            out[name.removesuffix("weight") + "bias"] = torch.zeros(out[name].size(0))
    if "transformer.wte.weight" in out:
        out.setdefault("lm_head.weight", out["transformer.wte.weight"])
    elif "lm_head.weight" in out:
        out["transformer.wte.weight"] = out["lm_head.weight"]
    return out


def build_model(cls: type, config: GPTConfig | SpeedrunConfig, state_dict: dict) -> LanguageModel:
    """A `cls(config)` that holds the weights of `state_dict` (fp32); UserError where they do not fit.

    The tensors are compared with the config before anything of the config's size is allocated.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in ("int", int) and not (type(value) is int and (field.name != "window") <= value < 2**24):
            raise UserError(f"its config says {field.name} = {shown(value)}")
    if getattr(config, "gelu", "tanh") not in ("tanh", "none"):
        raise UserError(f"its config says gelu = {shown(config.gelu)}")
    if config.n_embd % config.n_head:
        raise UserError(f"its config says {config.n_head} heads for n_embd {config.n_embd}")
    if config.n_layer > len(state_dict):
        raise UserError(f"its config says {config.n_layer} layers and it holds {len(state_dict)} tensors")
    with torch.device("meta"):
        model = cls(config)
    expected = model.state_dict()
    for name in expected.keys() - state_dict.keys():
        raise UserError(f"the tensor {name} is missing")
    for name in state_dict.keys() - expected.keys():
        raise UserError(f"the tensor {name[:80]} does not belong to a {cls.__name__}")
    for name, tensor in state_dict.items():
        if not is_plain(tensor):
            raise UserError(f"{name} is not a plain tensor of floats")
        if tensor.shape != expected[name].shape:
            raise UserError(f"{name} is {tuple(tensor.shape)} where the config needs {tuple(expected[name].shape)}")
    tied = model.lm_head.weight is model.transformer.wte.weight
    head, wte = (state_dict.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
    if tied and not torch.equal(head.float().view(torch.int32), wte.float().view(torch.int32)):     # so that NaN equals NaN
        raise UserError("its head is not tied to its embedding")
    model.load_state_dict({name: t.detach().float().clone() for name, t in state_dict.items()}, assign=True)
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    return model.requires_grad_()


def _from_huggingface(source):
    """A GPT from a folder in the Hugging Face format, or from a name on the hub. UserError if it is not GPT-2's kind."""
    folder = Path(source)
    if not os.path.isdir(folder):       # unlike Path's, os.path's questions raise no OSError for a strange name
        folder = _download(str(source))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in config:
            raise UserError("its config.json names code of its own (auto_map), which is never run here")
        if config.get("model_type") != "gpt2":
            raise UserError(f"its config.json says model_type {shown(config.get('model_type'))!r} instead of 'gpt2'")
        for key, value in (("layer_norm_epsilon", 1e-5), ("scale_attn_weights", True), ("tie_word_embeddings", True),
                           ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
            if config.get(key, value) != value:
                raise UserError(f"its config.json says {key} = {shown(config[key])}, which this GPT does not do")
        gelu = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}.get(
            config.get("activation_function", "gelu_new"))
        if gelu is None or config.get("n_inner") not in (None, 4 * config["n_embd"]):
            raise UserError("its config.json asks for another activation or n_inner than GPT-2's")
        weights = {name: t.t() if _is_conv1d(name) else t for name, t in _canonical(_folder_weights(folder)).items()}
        return build_model(GPT, GPTConfig(config.get("n_positions", 1024), config["vocab_size"], config["n_layer"],
                                          config["n_head"], config["n_embd"], gelu), weights)
    except UserError as error:
        raise UserError(f"{source} is not a GPT-2 in the Hugging Face format: {error}") from None
    except Exception as error:      # whatever a damaged or foreign file makes the readers raise
        raise UserError(f"{source} is not a GPT-2 in the Hugging Face format ({_brief(error)})") from None


def _folder_weights(folder):
    """The tensors of a folder: safetensors, whole or in parts, else pytorch_model.bin."""
    from safetensors.torch import load_file
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    if index.is_file():
        weights = {}
        for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
            if Path(name).name != name:
                raise UserError(f"its index names a file outside the folder ({str(name)[:80]})")
            weights |= load_file(folder / name)
        return weights
    if (folder / "pytorch_model.bin").is_file():
        return _load_pickle(folder / "pytorch_model.bin")
    raise UserError("it has neither model.safetensors nor pytorch_model.bin")


def _download(name):
    """Folder of the hub's config.json and model.safetensors of `name`, from huggingface_hub's cache where it can."""
    repo = f"openai-community/{name}" if name in GPT2_SIZES else name
    try:
        if "/" not in repo:
            raise ValueError(f"names there have an owner, but for {', '.join(GPT2_SIZES)}")
        reach_hub()
        from huggingface_hub import hf_hub_download
        hf_hub_download(repo, "model.safetensors")
        return Path(hf_hub_download(repo, "config.json")).parent
    except Exception as error:      # the network's errors are of many libraries' classes
        raise UserError(f"{name} is neither a file or folder here nor to be had from the Hugging Face hub "
                        f"({_brief(error)}): check the name and the connection, "
                        f"or give the path of a checkpoint") from None


class _Record:
    """Stands in for build-nanogpt's pickled `__main__.GPTConfig`: attributes, and nothing that could run."""


def _load_pickle(path):
    """What torch.save wrote, memory-mapped; raises whatever the unpickler does for damaged or hostile files."""
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"                                  # torch.load asks the same
        if zipped:                  # by the reader that will unpack it: another one may find another archive in the same file
            archive = torch._C.PyTorchFileReader(str(path))
            size_of = getattr(archive, "get_record_size", lambda record: 0)     # not in every release of torch
            if sum(map(size_of, archive.get_all_records())) > os.path.getsize(path):
                raise UserError("it is packed")         # torch.save never packs: it would only fill the memory
        pickled = archive.get_record("data.pkl") if zipped else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # the two functions that weights_only lets a file call with numbers and texts of its own: any size from a few bytes
        if pickled.find(b"\nbytearray\n") >= 0 or pickled.find(b"_codecs\nencode\n") >= 0:
            raise UserError("it holds raw bytes")
    with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([(_Record, "__main__.GPTConfig")]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def read_checkpoint(path: str | Path) -> dict:
    """The dict of a .pt file, with tensors and plain values only; nothing in it can run."""
    path = Path(path)
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file: check the path")
    try:
        checkpoint = _load_pickle(path)
    except Exception as error:      # whatever a damaged or hostile file makes the unpickler raise
        raise UserError(f"{path} cannot be read as a checkpoint: it was cut off, or holds more than tensors "
                        f"and plain values ({_brief(error)}); copy it again") from None
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__} instead of a checkpoint's dict")
    return checkpoint


def model_from_checkpoint(checkpoint: dict, path: str | Path) -> LanguageModel:
    """The model of a checkpoint's dict: this project's, nanoGPT's or build-nanogpt's, told by what it records."""
    try:
        cls, config_cls, extra = GPT, GPTConfig, {}
        weights = checkpoint.get("model")
        if "model_config" in checkpoint:
            recipe = checkpoint.get("recipe")
            if not isinstance(recipe, str) or recipe not in MODELS:
                raise UserError(f"its recipe {shown(recipe)!r} is unknown here")
            cls, config_cls = MODELS[recipe]
            config = checkpoint["model_config"]
        elif "model_args" in checkpoint:                                        # nanoGPT
            config, extra = checkpoint["model_args"], {"gelu": "none"}
        else:                                                                   # build-nanogpt
            config = vars(checkpoint["config"]) if isinstance(checkpoint.get("config"), _Record) else None
        if not isinstance(weights, dict) or not isinstance(config, dict):
            raise UserError("it records neither this project's model_config, nor nanoGPT's model_args, nor "
                            "build-nanogpt's GPTConfig")
        fields = {f.name for f in dataclasses.fields(config_cls)}
        for name in sorted(fields - config.keys() - {"gelu", "window"}):       # these have come later
            raise UserError(f"its config does not say {name}")
        config = config_cls(**{name: config[name] for name in fields & config.keys()} | extra)
        return build_model(cls, config, _canonical(weights) if cls is GPT else weights)
    except UserError as error:
        raise UserError(f"{path} is not a checkpoint that this project reads: {error}") from None
    except Exception as error:      # whatever a damaged or hostile file still makes torch raise
        raise UserError(f"{path} is not a checkpoint that this project reads ({_brief(error)})") from None


def load_model(path: str | Path) -> LanguageModel:
    """A model from this project's checkpoint, a Hugging Face folder or hub name, nanoGPT's ckpt.pt or
    build-nanogpt's model_*.pt. Raises UserError, in one sentence, for anything else."""
    if os.path.isfile(path) or Path(path).suffix in (".pt", ".pth") and not os.path.isdir(path):
        return model_from_checkpoint(read_checkpoint(path), path)
    return _from_huggingface(path)


def check_tokens(model: LanguageModel, source: str) -> None:
    """UserError unless `model`, read from `source`, has GPT-2's tokens, with which all text here is written."""
    if model.config.vocab_size < VOCAB_SIZE:
        raise UserError(f"{source} has a vocabulary of {model.config.vocab_size}, and not GPT-2's {VOCAB_SIZE} tokens: give a "
                        f"model that was trained on those")


EXPORTED = {"config.json", "tokenizer_config.json", "vocab.json", "merges.txt", "model.safetensors"}     # by save_pretrained


def main(argv: list[str] | None = None) -> None:
    parser = FlagParser(prog="model.py", description=__doc__)
    parser.add_argument("command", choices=["export"], help="write a model in the Hugging Face format")
    parser.add_argument("source", metavar="SOURCE", help="checkpoint, nanoGPT's or build-nanogpt's too, folder, or hub name")
    parser.add_argument("folder", metavar="FOLDER", help="new, empty, or of an earlier export, which is replaced")
    args = parser.parse_args(argv)
    if os.path.exists(args.source) and os.path.exists(args.folder) and os.path.samefile(args.source, args.folder):
        raise UserError(f"{args.folder} is the source itself: give another folder")
    try:
        names = set(os.listdir(args.folder)) if os.path.exists(args.folder) else set()
        # not whatever has a config.json: transformers would prefer a tokenizer.json of another model's to the files written here
        if names and ("config.json" not in names or names - EXPORTED):
            raise UserError(f"{args.folder} holds other files ({min(names - EXPORTED or names)}): give a new or empty folder")
        model = load_model(args.source)
        check_tokens(model, args.source)
        model.save_pretrained(args.folder)
    except OSError as error:
        raise UserError(f"{args.folder} cannot be written ({error.strerror}): give another folder") from None
    print(f"{args.folder} is in the Hugging Face format: transformers' AutoModelForCausalLM and AutoTokenizer read it with "
          f"from_pretrained({os.path.abspath(args.folder)!r})")


if __name__ == "__main__":
    run_command(main)
