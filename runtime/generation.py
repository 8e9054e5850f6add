"""Generation with a KV cache."""
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels import matmul_dtype
from runtime.tokenizer import EOT, VOCAB_SIZE


class KVCache:
    """The tokens (B, t) so far, and each layer's keys and values (B, t, nh, hs) of them; empty at first."""

    def __init__(self, n_layer: int):
        self.tokens, self.layers = None, [None] * n_layer

    def add(self, idx: Tensor) -> Tensor:
        """Appends idx (B, T) -> all tokens (B, t + T)."""
        self.tokens = idx if self.tokens is None else torch.cat((self.tokens, idx), dim=1)
        return self.tokens

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's keys and values (B, T, nh, hs) -> those of all tokens (B, t + T, nh, hs)."""
        if self.layers[layer]:
            assert k.size(1) == 1, "the context is added at once, then one token at a time"
            keys, values = self.layers[layer]
            k, v = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
        self.layers[layer] = k, v
        return k, v


@torch.no_grad()
def generate_tokens(model, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                    top_k: int | None = 50, generator: torch.Generator | None = None,
                    top_p: float | None = None, repetition_penalty: float = 1.0) -> Iterator[Tensor]:
    """LanguageModel.generate, step by step: of idx (B, T) int64 yields the next ids (B, 1), one row's each,
    max_new_tokens times. The caller may stop at any of them."""
    block_size, past, head = model.config.block_size, None, model.head()
    head = head.to(matmul_dtype(head))          # once: autocast keeps only the casts of parameters
    for _ in range(max_new_tokens):
        if past is None or idx.size(1) > block_size:
            past = KVCache(model.config.n_layer)
            x = model.hidden(idx[:, -block_size:], past)                        # (B, t, C)
        else:
            x = model.hidden(idx[:, -1:], past)                                 # (B, 1, C)
        logits = model.logits(x[:, -1], head).float()                           # (B, vocab_size)
        if repetition_penalty != 1.0:
            logits = penalize_repetition(logits, idx, repetition_penalty)
        new = sample_token(logits, temperature, top_k, generator, top_p)        # (B, 1)
        idx = torch.cat((idx, new), dim=1)
        yield new


def penalize_repetition(logits: Tensor, idx: Tensor, penalty: float) -> Tensor:
    """Logits (B, vocab_size) with those of the tokens in idx (B, S) divided by `penalty`, or multiplied where
    they are negative (arXiv:1909.05858, section 4.1). Not <|endoftext|>'s, with which a document begins."""
    seen = logits.gather(1, idx)                                                # (B, S)
    less = torch.where(seen > 0, seen / penalty, seen * penalty)
    return logits.scatter(1, idx, torch.where(idx == EOT, seen, less))


def sample_token(logits: Tensor, temperature: float, top_k: int | None,
                 generator: torch.Generator | None, top_p: float | None = None) -> Tensor:
    """Samples one id per row: logits (B, vocab_size) -> int64 (B, 1). Overwrites the logits of padding."""
    logits[:, VOCAB_SIZE:] = float("-inf")
    if temperature < 1e-5:              # 0, or so small that the quotient below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kept = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < kept[:, -1:], float("-inf"))
    probs = F.softmax(logits, dim=-1)                                           # (B, vocab_size)
    if top_p is not None and top_p < 1:         # the nucleus (arXiv:1904.09751)
        likeliest, ids = probs.sort(dim=-1, descending=True, stable=True)
        before = F.pad(likeliest.cumsum(dim=-1)[:, :-1], (1, 0))                # of the ids that are likelier
        probs = probs.scatter(-1, ids, likeliest.masked_fill(before >= top_p, 0.0))
    return torch.multinomial(probs, num_samples=1, generator=generator)
