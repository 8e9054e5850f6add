"""What all models have in common: the loss, and sampling from what the model predicts.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh.
"""
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.kernels import chunked_cross_entropy, matmul_dtype
from runtime.tokenizer import VOCAB_SIZE


class Linear(nn.Linear):
    """nn.Linear that draws no weights: the model's init_weights draws each of them once."""

    def reset_parameters(self):
        pass


class Embedding(nn.Embedding):
    """nn.Embedding that draws no rows: the model's init_weights does."""

    def reset_parameters(self):
        pass


def head_size(config, even: bool = False) -> int:
    """Width of one attention head. ValueError if n_embd cannot be divided among n_head heads."""
    size, rest = divmod(config.n_embd, config.n_head)
    if rest:
        raise ValueError(f"a width of {config.n_embd} does not divide into {config.n_head} heads")
    if even and size % 2 == 1:
        raise ValueError(f"a width of {config.n_embd} gives {config.n_head} heads of size {size}, "
                         "but rotary positions need an even size")
    return size


class KVCache:
    """The tokens so far (B, S), and the keys and values that each layer has computed for them.

    Generation appends the whole context at once, then one token at a time.
    """

    def __init__(self):
        self.tensors = {}

    def append(self, name: str, new: Tensor) -> Tensor:
        """Appends `new` (B, T, ...) to the tensor called `name`. Returns all of it (B, S, ...)."""
        if name in self.tensors:
            new = torch.cat((self.tensors[name], new), dim=1)
        self.tensors[name] = new
        return new


@torch.no_grad()
def generate_tokens(
    model,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """LanguageModel.generate step by step: yields the next token of each row, int64 (B, 1).

    The caller may stop after any of them.
    """
    block_size = model.config.block_size
    head = model.head()
    head = head.to(matmul_dtype(head))      # cast once: autocast keeps only the casts of parameters

    past = None
    for _ in range(max_new_tokens):
        # Beyond block_size the context slides, every token's position changes, and no key can be
        # kept.
        if past is None or idx.size(1) > block_size:
            past = KVCache()
            x = model.hidden(idx[:, -block_size:], past)                        # (B, S, C)
        else:
            x = model.hidden(idx[:, -1:], past)                                 # (B, 1, C)

        logits = model.logits(x[:, -1], head).float()                           # (B, vocab_size)
        new = sample_token(logits, temperature, top_k, generator)               # (B, 1)
        idx = torch.cat((idx, new), dim=1)
        yield new


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Samples a token of each row: logits (B, vocab_size) -> int64 (B, 1). Overwrites logits."""
    logits[:, VOCAB_SIZE:] = float("-inf")      # rows that pad the vocabulary stand for no token

    if temperature < 1e-5:      # greedy; so small a temperature would overflow the quotient below
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature

    if top_k:
        likeliest = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < likeliest[:, -1:], float("-inf"))

    probabilities = F.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


class LanguageModel(nn.Module):
    """Loss and samples from a model's hidden states.

    A subclass has `config`, `lm_head`, and `hidden(idx, past=None)`: the final hidden states (B, T,
    C) of the tokens idx (B, T), which follow those in the KVCache `past`. It may override `head`.
    """
    recipe = ""                 # the name of its recipe, which checkpoints and exports carry
    lookup_tables = ()          # embeddings of which rows are read, but that no matrix product uses
    softcap = 0.0            # c: the logits are c tanh(z / c) of the head's output z; 0: they are z

    # How to compute, not what: train_gpt2.py sets these.
    kernel = "auto"             # attention kernel, one of model.ATTENTION
    loss_chunk = 0              # tokens whose logits are in memory at a time in training; 0: all
    recompute = False           # compute each block again in the backward, to keep less in memory

    def head(self) -> Tensor:
        """The matrix (vocab_size, C) that turns hidden states into logits."""
        return self.lm_head.weight

    def logits(self, x: Tensor, head: Tensor | None = None) -> Tensor:
        """x (..., C) -> (..., vocab_size). `head`: what self.head() returned, if it is at hand."""
        if head is None:
            head = self.head()
        z = F.linear(x, head)
        if self.softcap:
            z = self.softcap * torch.tanh(z.float() / self.softcap)
        return z

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, None) without targets; with targets (None, mean cross-entropy in nats).

        idx and targets are int64 (B, T); a target of -1 is ignored. With targets no logits are
        returned, so that torch.compile can fuse them with the loss.
        """
        T, block_size = idx.size(1), self.config.block_size
        if T > block_size:
            raise ValueError(f"{T} tokens are longer than block_size {block_size}")

        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is None:
            return self.logits(x), None

        x, targets = x.flatten(0, 1), targets.flatten()                         # (B T, C), (B T)
        if self.loss_chunk:
            loss = chunked_cross_entropy(x, self.head(), targets, self.loss_chunk, self.softcap)
        else:
            loss = F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1)
        return None, loss

    def run_block(self, block: nn.Module, *args):
        """block(*args); with `recompute` the backward computes it again (arXiv:1604.06174)."""
        if self.recompute and torch.is_grad_enabled():
            # The blocks draw no random numbers, so there is no state of a generator to restore.
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Cross-entropy of each token, float32 (B, T), and 0 where the target is -1.

        Logits are computed only at `positions`, int64 (n,): indices into the B T tokens, with every
        target >= 0 among them. The caller finds them, because here the CPU would wait for the GPU.
        """
        x = self.hidden(idx).flatten(0, 1)[positions]                           # (n, C)
        logits = self.logits(x).float()
        targets = targets.flatten()[positions]
        losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

        everywhere = torch.zeros(idx.numel(), device=idx.device)
        return everywhere.scatter(0, positions, losses).view_as(idx)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) by max_new_tokens sampled tokens -> (B, T + max_new_tokens).

        `temperature` 0 takes the likeliest token; `top_k` None or 0 samples from all. Beyond
        block_size each token needs a forward pass of the whole context.
        """
        new = generate_tokens(self, idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat((idx, *new), dim=1)

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs, forward and backward: 6 N + 12 n_layer n_embd T (arXiv:2204.02311, appendix B)."""
        # N: parameters in matrix products. A tied head is one of them, a looked-up table is not.
        N = sum(p.numel() for p in self.parameters())
        N -= sum(self.transformer[name].weight.numel() for name in self.lookup_tables)

        # T: tokens that each token attends to, no more than the window at the end of the run.
        T = sequence_length
        window = getattr(self.config, "window", 0)
        if window:
            T = min(T, window)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the model and its tokenizer in the Hugging Face format, for transformers."""
        from runtime.huggingface import save_model
        save_model(self, folder)
