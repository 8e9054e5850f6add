"""What the models have in common: generation, loss, and the pieces of the modern ones."""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.cli import UserError
from runtime.huggingface import save_model
from runtime.kernels import chunked_cross_entropy, document_window_mask, matmul_dtype
from runtime.tokenizer import VOCAB_SIZE


class KVCache:
    """What is kept of the tokens so far: them (B, t), and each layer's keys and values (B, t, nh, hs). The
    context is added at once, then one token at a time."""

    def __init__(self):
        self.kept = {}

    def add(self, name: str, new: Tensor) -> Tensor:
        """Appends `new` (B, T, ...) to what is kept as `name` -> that of all tokens (B, t + T, ...)."""
        self.kept[name] = torch.cat((self.kept[name], new), dim=1) if name in self.kept else new
        return self.kept[name]


@torch.no_grad()
def generate_tokens(model, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                    top_k: int | None = 50,
                    generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """LanguageModel.generate, step by step: of idx (B, T) int64 yields the next ids (B, 1), one row's each,
    max_new_tokens times. The caller may stop at any of them."""
    block_size, past, head = model.config.block_size, None, model.head()
    head = head.to(matmul_dtype(head))          # once: autocast keeps only the casts of parameters
    for _ in range(max_new_tokens):
        if past is None or idx.size(1) > block_size:
            past = KVCache()
            x = model.hidden(idx[:, -block_size:], past)                        # (B, t, C)
        else:
            x = model.hidden(idx[:, -1:], past)                                 # (B, 1, C)
        new = sample_token(model.logits(x[:, -1], head).float(), temperature, top_k, generator)     # (B, 1)
        idx = torch.cat((idx, new), dim=1)
        yield new


def sample_token(logits: Tensor, temperature: float, top_k: int | None,
                 generator: torch.Generator | None) -> Tensor:
    """Samples one id per row: logits (B, vocab_size) -> int64 (B, 1). Overwrites the logits of padding."""
    logits[:, VOCAB_SIZE:] = float("-inf")
    if temperature < 1e-5:              # 0, or so small that the quotient below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < kept[:, -1:], float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1, generator=generator)


class LanguageModel(nn.Module):
    """Loss and samples from hidden states. A subclass has `config`, `lm_head` and `hidden(idx, past=None)`:
    the final hidden states (B, T, C) of idx (B, T), which follows the tokens in the KVCache `past`. It has
    `recipe`, the name that its exports carry, and `looked_up`: its tables of which only rows are read, and
    which are no head. It may override `head`."""
    loss_chunk = 0              # tokens whose logits are in memory at a time while training; 0: all
    kernel = "auto"             # attention kernel, by name
    recompute = False           # whether a block's activations are computed again in the backward, not kept
    softcap = 0.0               # c: the logits are c tanh(z / c), where z is the head's output; 0: they are z

    def head(self) -> Tensor:
        """The matrix (vocab_size, C) that turns hidden states into logits."""
        return self.lm_head.weight

    def logits(self, x: Tensor, head: Tensor | None = None) -> Tensor:
        """x (..., C) -> (..., vocab_size). `head`: what self.head() returned, if it is at hand."""
        z = F.linear(x, self.head() if head is None else head)      # autocast casts, and keeps what it cast
        return self.softcap * torch.tanh(z.float() / self.softcap) if self.softcap else z

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets: int64 (B, T). Without targets: (logits (B, T, vocab_size), None). With targets:
        (None, mean cross-entropy in nats); targets of -1 are ignored. Logits are not returned then, so that
        torch.compile can fuse them with the loss. ValueError if T exceeds block_size."""
        if idx.size(1) > self.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens are longer than block_size {self.config.block_size}")
        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is not None and self.loss_chunk:
            return None, chunked_cross_entropy(x.flatten(0, 1), self.head(), targets.flatten(),
                                               self.loss_chunk, self.softcap)
        logits = self.logits(x)                                                 # (B, T, vocab_size)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)

    def run_block(self, block: nn.Module, *args):
        """block(*args); with `recompute` only its inputs are kept for the backward (arXiv:1604.06174)."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)      # none is used
        return block(*args)

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Cross-entropy of each token, fp32 (B, T); 0 where the target is -1. idx, targets: int64 (B, T).
        Logits are computed only at `positions`: int64 (n,), indices into B T, each target >= 0 at least once.
        To find them here would make the CPU wait for the GPU, and their number differ from call to call."""
        logits = self.logits(self.hidden(idx).flatten(0, 1)[positions]).float()     # (n, vocab_size)
        losses = F.cross_entropy(logits, targets.flatten()[positions], ignore_index=-1, reduction="none")
        return torch.zeros(idx.numel(), device=idx.device).scatter(0, positions, losses).view_as(idx)

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = 50,
                 generator: torch.Generator | None = None) -> Tensor:
        """Continues idx (B, T) int64 by max_new_tokens sampled tokens -> (B, T + max_new_tokens).

        `temperature` 0 takes the likeliest token; `top_k` None or 0 samples from all. Ids >= 50257 (padding)
        are never sampled. Beyond block_size each token needs a forward of the whole context."""
        new = generate_tokens(self, idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat((idx, *new), dim=1)

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward FLOPs per token: 6 N + 12 n_layer n_embd T (arXiv:2204.02311, appendix B). N
        counts a tied head, but not what is `looked_up`; T at most the window of the last step."""
        tables = sum(self.transformer[name].weight.numel() for name in self.looked_up)
        N = sum(p.numel() for p in self.parameters()) - tables
        span = min(sequence_length, getattr(self.config, "window", 0) or sequence_length)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * span

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer, for transformers: GPT-2 for its own class,
        others with assets/modeling_modern.py, the code that it needs to read them."""
        save_model(self, folder)


@dataclass
class ModernConfig:
    """Of SpeedrunGPT and FrontierGPT."""
    block_size: int = 1024      # longest sequence
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 6             # heads of 128
    n_embd: int = 768
    window: int = 0             # tokens a token attends to, itself included, in its document; 0: all before


class ModernLanguageModel(LanguageModel):
    """Rotary positions and the sliding window."""
    Config = ModernConfig

    def __init__(self, config):
        super().__init__()
        if config.n_embd % (2 * config.n_head):
            raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads "
                            f"of an even size, which rotary positions need: give another number of heads")
        self.config = config
        window = torch.tensor(config.window or config.block_size, device="cpu")
        self.register_buffer("window", window, persistent=False)    # a tensor: a new value needs no recompile

    def rotary_tables(self, S: int, T: int, dtype: torch.dtype,
                      device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, 1, hs/2) of the last T of S positions, for `rotate`."""
        hs = self.config.n_embd // self.config.n_head
        pos = torch.arange(S - T, S, device=device)                             # (T,)
        frequencies = 10000.0 ** -(torch.arange(0, hs, 2, device=device) / hs)  # (hs/2,)
        angles = torch.outer(pos, frequencies)[:, None]                         # (T, 1, hs/2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def window_mask(self, tokens: Tensor, T: int, past: KVCache | None):
        """What the last T of tokens (B, S) attend to, as `attention` takes it; None without a window.
        modded-nanogpt's records 12 and 13."""
        if not self.config.window:
            return None
        # FlexAttention is fast only in a compiled graph, and has no heads under 16
        flex = (self.kernel == "auto" and tokens.is_cuda and torch.compiler.is_compiling() and past is None
                and self.config.n_embd >= 16 * self.config.n_head)
        return document_window_mask(tokens, T, self.window, as_blocks=flex)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864): x (B, T, nh, hs); cos, sin (T, 1, hs/2) rotate (i, i + hs/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)
