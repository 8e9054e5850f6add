"""What all models of this project share: generation, the losses of single tokens, and FLOPs.

Shapes: B sequences, C = n_embd. Of S tokens the last T are new, the others are in the cache.
"""
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.layers import matmul_dtype
from runtime.loss import chunked_cross_entropy

VOCAB_SIZE = 50257      # GPT-2's, as runtime/tokenizer.py has it: ids from here on are padding


# ---------------------------------------------------------------------- generation

class KVCache:
    """What a generation has computed of the tokens so far, such as each layer's keys and values.

    It holds `length` tokens and has `room` for more. A forward appends what it computes of the
    tokens after those, and generate_tokens then sets `length`.
    """

    def __init__(self, room: int):
        self.room = room
        self.length = 0
        self.tensors = {}       # {layer: its tensors (B, room, ...)}
        self.constants = {}

    def append(self, layer: nn.Module, *new: Tensor) -> list[Tensor]:
        """Appends each of `new` (B, T, ...) to those of the layer. Returns all: (B, S, ...)."""
        if layer not in self.tensors:
            self.tensors[layer] = [
                tensor.new_empty(tensor.size(0), self.room, *tensor.shape[2:]) for tensor in new]
        S = self.length + new[0].size(1)
        for whole, tensor in zip(self.tensors[layer], new, strict=True):
            whole[:, self.length:S] = tensor
        return [whole[:, :S] for whole in self.tensors[layer]]

    def once(self, function):
        """function(), which is called once in a generation."""
        if function not in self.constants:
            self.constants[function] = function()
        return self.constants[function]


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


# ---------------------------------------------------------------------- before training

def set_how_to_compute(model: nn.Module, config, process) -> None:
    """Has the model compute as the flags and the device want it, which changes rounding only."""
    model.use_attention(config.attention)
    if config.recompute:
        model.recompute_blocks()
    if config.compile:
        model.before_compile()
    elif process.device == "cpu":
        if not model.use_chunks():
            process.print0("the loss of this model cannot be computed in chunks, as a CPU does it "
                           "faster: it takes more time and memory")


# ---------------------------------------------------------------------- two forms of a loss

def agree(model: nn.Module, loss: Callable, other: Callable) -> bool:
    """Whether two losses of the model and their gradients differ by rounding only.

    Each is a function (x (B, T, C), targets (B, T)) -> loss, which is the last one if it returns
    several. They are compared on 8 random hidden states, one of which has no target, with a random
    head that makes logits of deviation 8: those of a new model are so small that a softcap would
    not show.
    """
    generator = torch.Generator().manual_seed(0)
    C, V = model.config.n_embd, model.config.vocab_size
    x = torch.randn(2, 4, C, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (2, 4), generator=generator)
    targets[0, 0] = -1

    head = model.lm_head.weight
    before, head.data = head.data, torch.randn(head.shape, generator=generator) * 8 * C**-0.5
    found = []
    for function in (loss, other):
        result = function(x, targets)
        if isinstance(result, tuple):
            *_, result = result
        learning = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(result, [x, *learning], allow_unused=True)
        found.append([result, *gradients])
    head.data = before
    return all(same_but_for_rounding(a, b) for a, b in zip(*found, strict=True))


def same_but_for_rounding(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors differ by at most 1e-4 of the largest number; None is like None."""
    if a is None or b is None:
        return a is b
    return bool((a - b).abs().max() <= 1e-4 * a.abs().max())


def same_next_token(logits: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits (B, vocab_size), from matrix products in `dtype`, differ by rounding only."""
    # Rounding makes 1e-6 in float32, and less than 1e-2 in 16 bits.
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    return bool((logits - other).square().mean().sqrt() <= tolerance * other.std())


# ---------------------------------------------------------------------- blocks computed twice

def recomputed(block: nn.Module, forward: Callable, *inputs):
    """forward(*inputs), which the backward computes again, with the buffers that the block had.

    So what a forward changes in them, such as the balance of experts, it changes once.
    """
    owners = [(m, name) for m in block.modules() for name, _ in m.named_buffers(recurse=False)]
    if not owners or torch.compiler.is_compiling():
        return checkpoint(forward, *inputs, use_reentrant=False)

    def swap(tensors):
        others = [getattr(module, name) for module, name in owners]
        for (module, name), tensor in zip(owners, tensors, strict=True):
            setattr(module, name, tensor)
        return others

    before = [getattr(module, name).clone() for module, name in owners]

    @contextmanager
    def as_before():
        now = swap(before)
        try:
            yield
        finally:
            swap(now)

    return checkpoint(
        forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), as_before()))


# ---------------------------------------------------------------------- the class

class LanguageModel(nn.Module):
    """A model of this project.

    A subclass has Config, `config`, `lm_head`, `transformer` with the blocks in `transformer.h`,
    and forward(idx, targets=None), logits(x) and loss(x, targets) as model.GPT has them. Its
    hidden(idx, past=None) returns the final hidden states (B, T, C): of all tokens idx (B, S), or
    of those that are not in the KVCache.
    """
    recipe = ""                 # the name of its recipe, which checkpoints and exports carry

    # The length up to which the cache of generation has been compared with whole forwards.
    checked_room = 0

    # How many tokens' logits the loss holds in memory at a time. 0: those of all. See use_chunks.
    loss_chunk = 0

    # How many vectors of width n_embd a block keeps of each token for its backward, compiled: the
    # first guess of the micro-batch that fits into a GPU's memory is made with it. GPT-2 keeps the
    # block's input, the first norm, q, k, v, the output of attention, the residual stream, the
    # second norm, and 4 of the hidden layer; the rest are statistics of the norms and of attention.
    kept_vectors = 12.2

    # How many blocks' gradients several GPUs send at a time (ddp_options in runtime/ranks.py).
    blocks_per_bucket = 1

    def before_compile(self) -> None:
        """Tells torch.compile what it has to know about a model of this kind."""

    def use_attention(self, kernel: str) -> None:
        """Computes attention by this kernel from now on: "auto" or "naive"."""
        for module in self.modules():
            if hasattr(module, "kernel"):
                module.kernel = kernel

    def recompute_blocks(self) -> None:
        """From now on the backward computes each block again, to keep less (arXiv:1604.06174)."""
        for block in self.transformer.h:
            block.forward = partial(recomputed, block, block.forward)

    def use_chunks(self, chunk: int = 2048) -> bool:
        """Computes the loss of so many tokens at a time from now on, which is faster on a CPU.

        Returns whether that is the model's own loss. Where it is not, because somebody has changed
        the loss or the head, the model goes on with its own.
        """
        self.loss = self.faster(self.loss, self.loss_in_chunks, chunk)
        return self.loss_chunk > 0

    def faster(self, own: Callable, in_chunks: Callable, chunk: int) -> Callable:
        """`in_chunks`, if it computes the same as the model's `own` loss; else that."""
        self.loss_chunk = chunk
        if agree(self, own, in_chunks):
            return in_chunks
        self.loss_chunk = 0
        return own

    def loss_in_chunks(self, x: Tensor, targets: Tensor) -> Tensor:
        _, loss = chunked_cross_entropy(
            x.flatten(0, 1), self.lm_head.weight, targets.flatten(), self.loss_chunk)
        return loss

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Cross-entropy (nats) of each token, float32 (B, T), and 0 where the target is -1.

        `positions`, int64 (n,), are the indices of the targets >= 0 among all B T. Logits are
        computed only there. The caller finds the positions on the CPU, because torch.nonzero on a
        GPU would make the CPU wait for their number.
        """
        return self.losses_at(self.hidden(idx), targets, positions)

    def losses_at(self, x: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """token_losses of final hidden states x (B, T, C)."""
        logits = self.logits(x.flatten(0, 1)[positions]).float()                # (n, vocab_size)
        losses = F.cross_entropy(logits, targets.flatten()[positions], reduction="none")     # (n,)
        zeros = torch.zeros(targets.numel(), device=targets.device)
        return zeros.scatter(0, positions, losses).view_as(targets)             # (B, T)

    def next_logits(self, idx: Tensor, past: KVCache) -> Tensor:
        """The logits (B, vocab_size) of what follows the tokens idx (B, S)."""
        x = self.hidden(idx, past)                                              # (B, T, C)
        return self.logits(x[:, -1:])[:, 0]

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
        new = self.generate_tokens(idx, max_new_tokens, temperature, top_k, generator)
        return torch.cat((idx, *new), dim=1)

    @torch.no_grad()
    def generate_tokens(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields the new tokens of `generate` one by one, int64 (B, 1) each.

        The caller may stop after any of them.
        """
        block_size = self.config.block_size
        past = KVCache(min(idx.size(1) + max_new_tokens, block_size))
        has_cache = self.cache_is_right(past.room, idx.device)
        for _ in range(max_new_tokens):
            if idx.size(1) > block_size or not has_cache:
                # Beyond block_size the position of each token changes with every new one, so that
                # no key of the cache can be used again.
                past.length = 0
            context = idx[:, -block_size:]                                      # (B, S)
            logits = self.next_logits(context, past).float()                    # (B, vocab_size)
            past.length = context.size(1)
            new = sample_token(logits, temperature, top_k, generator)           # (B, 1)
            idx = torch.cat((idx, new), dim=1)
            yield new

    def cache_is_right(self, room: int, device: torch.device) -> bool:
        """Whether the model, which somebody may have changed, computes the same with its cache.

        The first generation of a length compares it with a whole forward, on random tokens. They
        are as many as the generation will have, because a window shows only behind its length.
        """
        if room <= self.checked_room:
            return True
        block_size = self.config.block_size
        S = min(block_size, max(2 * self.checked_room, room, 4))            # not for each new token
        if S < 4:
            return True
        generator = torch.Generator().manual_seed(0)
        idx = torch.randint(0, min(self.config.vocab_size, VOCAB_SIZE), (1, S), generator=generator)
        idx = idx.to(device)

        past = KVCache(S)
        for length in range(S - 3, S + 1):      # a prompt, and three tokens after it
            logits = self.next_logits(idx[:, :length], past).float()
            past.length = length
        whole = self.next_logits(idx, KVCache(S)).float()
        if same_next_token(logits, whole, matmul_dtype(self.lm_head.weight)):
            self.checked_room = S
            return True
        print("this model computes something else with the cache of keys and values: generating "
              "without it, which takes more time", file=sys.stderr)
        return False

    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of a token, forward and backward: 6 N + 12 n_layer n_embd T.

        (arXiv:2204.02311, appendix B.) T is how many tokens a token attends to.
        """
        # N counts the parameters in matrix products: a tied head is one, a looked-up table is not.
        N = sum(p.numel() for p in self.parameters())
        for module in self.modules():
            if isinstance(module, nn.Embedding) and module.weight is not self.lm_head.weight:
                N -= module.weight.numel()
        T = sequence_length
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the model and its tokenizer in the Hugging Face format, for transformers."""
        # Imported here, so that `import model` alone stays small; from_pretrained does so, too.
        from runtime.huggingface import save_model

        save_model(self, folder)
