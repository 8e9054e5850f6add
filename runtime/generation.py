"""Sampling with a KV cache."""
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.tokenizer import VOCAB_SIZE, encode, tokenizer


class KVCache:
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


def print_samples(model, autocast: torch.autocast, process, num_samples: int = 4,
                  max_new_tokens: int = 32, prompt: str = "Hello, I'm a language model,") -> None:
    """Sampled on the master alone, from a generator of its own: training's random numbers stay as they are."""
    generator = torch.Generator(device=process.device).manual_seed(42)
    idx = torch.tensor([encode(prompt).tolist()] * num_samples, dtype=torch.int64, device=process.device)
    with autocast:
        rows = model.generate(idx[:, -model.config.block_size:], max_new_tokens, generator=generator)
    for i, row in enumerate(rows.tolist()):
        process.print0(f"sample {i}: {tokenizer().decode(row)}")
