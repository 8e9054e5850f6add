"""What all models have in common: the loss, and generation from what the model predicts.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh. S is T plus the tokens that
are already in the cache.
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


# ---------------------------------------------------------------------- layers

class Linear(nn.Linear):
    """nn.Linear without random weights: init_weights of the model draws them."""

    def reset_parameters(self):
        pass


class Embedding(nn.Embedding):
    """nn.Embedding without random rows: init_weights of the model draws them."""

    def reset_parameters(self):
        pass


def head_size(config, even: bool = False) -> int:
    """hs, the width of one attention head. ValueError if it is no whole number, or not `even`."""
    C, nh = config.n_embd, config.n_head
    if C % nh != 0:
        raise ValueError(f"n_embd {C} must be divisible by n_head {nh}")

    hs = C // nh
    if even and hs % 2 != 0:
        raise ValueError(f"n_embd {C} / n_head {nh} = {hs} must be even, because rotary embeddings "
                         "rotate pairs of numbers")
    return hs


# ---------------------------------------------------------------------- generation

class KVCache:
    """The tokens so far (B, S), and the keys and values that each layer has computed for them.

    Generation appends the whole context at once, and then one token at a time.
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
    model: "LanguageModel",
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields the new tokens of LanguageModel.generate one by one, int64 (B, 1) each.

    The caller may stop after any of them.
    """
    block_size = model.config.block_size

    # The head is cast to autocast's dtype once. Autocast keeps only the casts of parameters, and
    # frontier's head is a sum of rows: it would be cast again for each token.
    head = model.head()
    head = head.to(matmul_dtype(head))

    past = None
    for _ in range(max_new_tokens):
        if past is None or idx.size(1) > block_size:
            # Beyond block_size the context is the last block_size tokens. The position of each
            # changes with every new token, so that no key of the cache can be used again.
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
    # The ids that pad the vocabulary stand for no token.
    logits[:, VOCAB_SIZE:] = float("-inf")

    # Temperature 0 takes the likeliest token. So does one below 1e-5: divided by a far smaller one,
    # logits would overflow float32.
    if temperature < 1e-5:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature

    if top_k:
        likeliest = logits.topk(min(top_k, logits.size(-1))).values             # (B, top_k)
        logits = logits.masked_fill(logits < likeliest[:, -1:], float("-inf"))

    probabilities = F.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


# ---------------------------------------------------------------------- the parent of all models

class LanguageModel(nn.Module):
    """Loss and generation from a model's hidden states.

    A subclass has `config`, `lm_head`, and `hidden(idx, past=None)`: the final hidden states (B, T,
    C) of the tokens idx (B, T), which follow those in the KVCache `past`.
    """
    recipe = ""             # the name of its recipe, which checkpoints and exports carry
    lookup_tables = ()      # names of the embeddings of which no matrix product makes use
    softcap = 0.0           # c: the logits are c tanh(y / c) of the head's output y; 0: they are y

    # How to compute, which changes no result but by rounding. train_gpt2.py sets these.
    kernel = "auto"         # attention's, one of model.ATTENTION
    loss_chunk = 0          # tokens of which training has the logits in memory at a time; 0: all
    recompute = False       # compute each block again in the backward, to keep less in memory

    def head(self) -> Tensor:
        """The matrix (vocab_size, C) that turns hidden states into logits."""
        return self.lm_head.weight

    def logits(self, x: Tensor, head: Tensor | None = None) -> Tensor:
        """x (..., C) -> (..., vocab_size). `head` is what self.head() returns, if it is known."""
        if head is None:
            head = self.head()
        y = F.linear(x, head)
        if self.softcap:
            y = self.softcap * torch.tanh(y.float() / self.softcap)
        return y

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, None) without targets; (None, loss) with them: mean cross-entropy in nats.

        idx and targets are int64 (B, T), logits (B, T, vocab_size). A target of -1 is ignored.
        """
        T, block_size = idx.size(1), self.config.block_size
        if T > block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size {block_size}")

        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is None:
            return self.logits(x), None

        # The logits are not returned beside the loss: so the chunks below need not keep them, and
        # torch.compile can compute the loss without storing them in float32.
        x = x.flatten(0, 1)                                                     # (B T, C)
        targets = targets.flatten()                                             # (B T)
        if self.loss_chunk:
            loss = chunked_cross_entropy(x, self.head(), targets, self.loss_chunk, self.softcap)
        else:
            loss = F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1)
        return None, loss

    def run_block(self, block: nn.Module, *args):
        """block(*args). With `recompute` the backward computes it again (arXiv:1604.06174)."""
        if self.recompute and torch.is_grad_enabled():
            # No block draws random numbers. So no generator's state has to be kept for it.
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Cross-entropy (nats) of each token, float32 (B, T), and 0 where the target is -1.

        `positions`, int64 (n,), are the indices of the targets >= 0 among all B T. Logits are
        computed only there. The caller finds the positions on the CPU, because torch.nonzero on a
        GPU would make the CPU wait for their number.
        """
        x = self.hidden(idx).flatten(0, 1)[positions]                           # (n, C)
        logits = self.logits(x).float()                                         # (n, vocab_size)
        targets = targets.flatten()[positions]                                  # (n,)
        losses = F.cross_entropy(logits, targets, reduction="none")

        zeros = torch.zeros(idx.numel(), device=idx.device)
        return zeros.scatter(0, positions, losses).view_as(idx)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) by max_new_tokens sampled tokens -> (B, T + max_new_tokens).

        `temperature` 0 takes the likeliest token. `top_k` None or 0 samples from all tokens. Beyond
        block_size each token takes a forward pass of the whole context.
        """
        new = generate_tokens(self, idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat((idx, *new), dim=1)

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of a token, forward and backward: 6 N + 12 n_layer n_embd T.

        (arXiv:2204.02311, appendix B.) T is how many tokens a token attends to.
        """
        # N counts the parameters in matrix products: a tied head is one, a looked-up table is not.
        N = sum(p.numel() for p in self.parameters())
        N -= sum(self.transformer[name].weight.numel() for name in self.lookup_tables)
        T = sequence_length
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the model and its tokenizer in the Hugging Face format, for transformers."""
        from runtime.huggingface import save_model
        save_model(self, folder)
