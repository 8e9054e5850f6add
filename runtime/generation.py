"""Generation with a KV cache, and the samples that training prints."""
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.tokenizer import VOCAB_SIZE, encode, tokenizer


class KVCache:
    """The tokens (B, t) so far, and each layer's keys and values (B, nh, t, hs) of them; empty at first."""

    def __init__(self, n_layer: int):
        self.tokens, self.layers = None, [None] * n_layer

    def add(self, idx: Tensor) -> Tensor:
        """Appends idx (B, T) -> all tokens (B, t + T)."""
        self.tokens = idx if self.tokens is None else torch.cat((self.tokens, idx), dim=1)
        return self.tokens

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's keys and values (B, nh, T, hs) -> those of all tokens (B, nh, t + T, hs)."""
        if self.layers[layer]:
            assert k.size(2) == 1, "the context is added at once, then one token at a time"
            keys, values = self.layers[layer]
            k, v = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        self.layers[layer] = k, v
        return k, v


@torch.no_grad()
def generate(model, idx: Tensor, max_new_tokens: int, temperature: float, top_k: int | None,
             generator: torch.Generator | None) -> Tensor:
    """LanguageModel.generate: idx (B, T) int64 -> (B, T + max_new_tokens)."""
    block_size, past = model.config.block_size, None
    for _ in range(max_new_tokens):
        if past is None or idx.size(1) > block_size:
            past = KVCache(model.config.n_layer)
            x = model.hidden(idx[:, -block_size:], past)                        # (B, t, C)
        else:
            x = model.hidden(idx[:, -1:], past)                                 # (B, 1, C)
        logits = model.logits(x[:, -1]).float()                                 # (B, vocab_size)
        idx = torch.cat((idx, sample_token(logits, temperature, top_k, generator)), dim=1)
    return idx


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


def print_samples(model, autocast: torch.autocast, process, num_samples: int = 4,
                  max_new_tokens: int = 32, prompt: str = "Hello, I'm a language model,") -> None:
    """Prints samples, on rank 0 only. They have a generator of their own, so that training's
    random numbers do not change."""
    generator = torch.Generator(device=process.device).manual_seed(42)
    idx = torch.tensor([encode(prompt).tolist()] * num_samples, dtype=torch.int64, device=process.device)
    with autocast:
        rows = model.generate(idx[:, -model.config.block_size:], max_new_tokens, generator=generator)
    for i, row in enumerate(rows.tolist()):
        process.print0(f"sample {i}: {tokenizer().decode(row)}")
