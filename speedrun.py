"""The speedrun recipe: modded-nanogpt's record 10 (November 2024), written anew.

The names in the state dict are the record's. Two things differ from it: the embedding stays in
float32, and the eps of norm() is float32's (the record's, in torch 2.5, was bfloat16's: 2^-7).

docs/recipes.md says what each idea gains, measured by leaving it out. frontier.py builds on this
file.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh. S is T plus the tokens that
are already in the cache; in training S = T.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import attention
from runtime.language_model import LanguageModel
from runtime.layers import Embedding, Linear, head_size, linear, matmul_dtype
from runtime.loss import chunked_cross_entropy
from runtime.muon import Muon
from runtime.recipe import Recipe


@dataclass
class SpeedrunConfig:
    block_size: int = 1024      # longest sequence
    vocab_size: int = 50304     # 50257, padded
    n_layer: int = 12
    n_head: int = 6             # heads of 128
    n_embd: int = 768


# ---------------------------------------------------------------------- pieces of a block

class CastedLinear(Linear):
    """A linear layer without bias, stored in float32, that computes in the dtype of its input."""

    def __init__(self, n_in, n_out, device=None):
        super().__init__(n_in, n_out, bias=False, device=device)

    def forward(self, x):
        return linear(x, self.weight.to(x.dtype))


def norm(x):
    """RMSNorm without a gain (arXiv:1910.07467): x / sqrt(mean of x^2) over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864): turns each pair (x_i, x_{i + hs/2}) by its angle.

    x is (B, T, nh, hs); cos and sin, (T, 1, hs/2), come from rotary_tables.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def rotary_tables(S, T, hs, dtype, device):
    """Cosines and sines (T, 1, hs/2) of the last T of S positions, for `rotate`."""
    positions = torch.arange(S - T, S, device=device)                           # (T,)
    frequencies = 10000.0 ** -(torch.arange(0, hs, 2, device=device) / hs)      # (hs/2,)
    angles = torch.outer(positions, frequencies)[:, None]                       # (T, 1, hs/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


# ---------------------------------------------------------------------- blocks

class SpeedrunAttention(nn.Module):
    kernel = "auto"         # or "naive", by --attention

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_q = CastedLinear(C, C)
        self.c_k = CastedLinear(C, C)
        self.c_v = CastedLinear(C, C)
        self.c_proj = CastedLinear(C, C)
        self.lamb = nn.Parameter(torch.empty(()))       # lambda, the share of the first values
        self.n_head = config.n_head

    def queries_keys_values(self, x, v1, rotary, past):
        """x (B, T, C) -> q (B, T, nh, hs), k and v (B, S, nh, hs), v1 (B, T, nh, hs).

        `rotary` is (cos, sin) of rotary_tables.
        """
        B, T, C = x.size()
        shape = (B, T, self.n_head, C // self.n_head)                           # (B, T, nh, hs)
        q = self.c_q(x).view(shape)
        k = self.c_k(x).view(shape)
        v = self.c_v(x).view(shape)

        # Value residual (arXiv:2410.17897): each block mixes the values of the first block into its
        # own, in a learned proportion, so that what a token is does not get lost on the way.
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1

        q = self.norm_and_rotate(q, rotary)
        k = self.norm_and_rotate(k, rotary)
        if past is not None:
            k, v = past.append(self, k, v)
        return q, k, v, v1

    def norm_and_rotate(self, x, rotary):
        """QK-norm (arXiv:2010.04245) and rotary positions of queries or keys (B, T, nh, hs)."""
        # Normed, all have the length sqrt(hs), so that no score explodes.
        return rotate(norm(x), *rotary)

    def forward(self, x, v1, rotary, past):
        """x (B, T, C) -> (B, T, C), and v1: the values of the first block, None in that block."""
        q, k, v, v1 = self.queries_keys_values(x, v1, rotary, past)
        y = attention(q, k, v, self.kernel)                                     # (B, T, nh, hs)
        return self.c_proj(y.flatten(2)), v1


class SpeedrunMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = CastedLinear(C, 4 * C)
        self.c_proj = CastedLinear(4 * C, C)

    def forward(self, x):
        # ReLU squared (arXiv:2109.08668) instead of GELU.
        return self.c_proj(F.relu(self.c_fc(x)).square())


class SpeedrunBlock(nn.Module):
    def __init__(self, config, attention_class=SpeedrunAttention):
        super().__init__()
        self.attn = attention_class(config)
        self.mlp = SpeedrunMLP(config)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x, v1, x0, *attention_inputs):
        """x and x0 (B, T, C) -> (B, T, C), and v1.

        `attention_inputs` are what `attn` takes after x and v1.
        """
        # Embedding shortcut: each block mixes the embedding x0 into its input, by learned factors.
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, v1 = self.attn(norm(x), v1, *attention_inputs)
        x = x + y
        x = x + self.mlp(norm(x))
        return x, v1


# ---------------------------------------------------------------------- models

class ModernLanguageModel(LanguageModel):
    """What SpeedrunGPT and FrontierGPT share: the way from tokens through the blocks.

    A subclass has `transformer`, with the blocks in `transformer.h`, and embed(tokens, dtype): the
    input (B, T, C) of the first block, for tokens (B, T).
    """
    Config = SpeedrunConfig
    kept_vectors = 20.1         # see LanguageModel; counted for speedrun
    blocks_per_bucket = 4       # all blocks read x0 and v1: each cut adds up their gradients
    softcap = 30.0              # c: logits are c tanh(y / c) of the head's output y; 0: they are y
    zero_at_start = ()          # endings of the names of parameters that are zero in a new model
    embedding_std = 1.0         # of the rows of a new embedding

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_size = head_size(config)
        if self.head_size % 2 != 0:
            raise ValueError(f"n_embd {config.n_embd} / n_head {config.n_head} = {self.head_size} "
                             "must be even, because rotary embeddings rotate pairs of numbers")

    def forward(self, idx, targets=None):
        """(logits, None) without targets; (None, loss) with them, as model.GPT's."""
        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is None:
            return self.logits(x), None
        _, loss = self.head_losses(x, targets)
        return None, loss

    def head(self):
        """The matrix (vocab_size, C) that turns hidden states into logits."""
        return self.lm_head.weight

    def logits(self, x, head=None):
        """x (..., C) -> (..., vocab_size). `head` is what self.head() returns, if it is known."""
        y = linear(x, self.head() if head is None else head)
        if self.softcap:
            y = self.softcap * torch.tanh(y.float() / self.softcap)
        return y

    def head_losses(self, x, targets):
        """The head's losses (B, T), without gradient, for x (B, T, C); and their mean."""
        logits = self.logits(x.flatten(0, 1))                                   # (B T, vocab_size)
        losses = F.cross_entropy(
            logits.float(), targets.flatten(), ignore_index=-1, reduction="none")
        return losses.detach().view_as(targets), losses.sum() / (targets >= 0).sum()

    def head_losses_in_chunks(self, x, targets):
        losses, loss = chunked_cross_entropy(
            x.flatten(0, 1), self.head(), targets.flatten(), self.loss_chunk, self.softcap)
        return losses.view_as(targets), loss

    def use_chunks(self, chunk=2048):
        self.head_losses = self.faster(self.head_losses, self.head_losses_in_chunks, chunk)
        return self.loss_chunk > 0

    def hidden(self, idx, past=None):
        """Final hidden states (B, T, C): of all tokens idx (B, S), or of those not in the cache."""
        T, block_size = idx.size(1), self.config.block_size
        if T > block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size {block_size}")
        if past is not None:
            T -= past.length
        dtype = matmul_dtype(self.transformer.wte.weight)
        attention_inputs = self.attention_inputs(idx, T, dtype, past)

        # All activations are in `dtype`. Autocast itself would compute norms and sums in float32.
        # Under float16 that includes the residual stream, which model.py keeps in float32: this
        # recipe has trained in float16 at small sizes only.
        with torch.autocast(idx.device.type, enabled=False):
            x = self.embed(idx[:, -T:], dtype)                                  # (B, T, C)
            x0 = x
            v1 = None
            for block in self.transformer.h:
                x, v1 = block(x, v1, x0, *attention_inputs)
            return norm(x)

    def attention_inputs(self, tokens, T, dtype, past):
        """What every block gives its attention beside x and v1."""
        rotary = rotary_tables(tokens.size(1), T, self.head_size, dtype, tokens.device)
        return rotary, past

    def before_compile(self):
        # The rotary tables are constants of the graph. Otherwise it would compute powers, cosines
        # and sines anew for each number that is rotated. (As a decorator of the function this would
        # import the compiler, which takes a second, into every script.)
        torch.compiler.assume_constant_result(rotary_tables)

    @torch.no_grad()
    def init_weights(self):
        """Draws all weights, each once."""
        for name, p in self.named_parameters():
            if name.endswith(self.zero_at_start):
                p.zero_()
            elif name.endswith("wte.weight"):
                p.normal_(0.0, self.embedding_std)
            elif name.endswith(("c_q.weight", "c_k.weight", "c_v.weight", "c_fc.weight")):
                bound = p.size(1)**-0.5
                p.uniform_(-bound, bound)
            elif name.endswith("lambdas"):
                p.copy_(torch.tensor([1.0, 0.0]))       # no shortcut from the embedding yet
            elif name.endswith("lamb"):
                p.fill_(0.5)
            else:
                raise AssertionError(f"no initialisation for {name}")

    def adam_and_muon(self, groups, beta1, max_lr, weight_decay, dtype):
        """[Adam, Muon]: Adam has `groups`, which are the tables and the head.

        Of all other parameters Muon has the matrices, Adam the rest. `dtype` is that of Muon's
        iteration. Only Muon has weight decay.
        """
        in_groups = {id(p) for group in groups for p in group["params"]}
        others = [p for p in self.parameters() if id(p) not in in_groups]
        matrices = [p for p in others if p.dim() == 2]

        # The first gradients of the lambdas are 0 but for rounding, because a norm follows and the
        # blocks add nothing yet. With Adam's eps a rounding of 1e-8 would become a full step.
        scalars = {
            "params": [p for p in others if p.dim() < 2],
            "lr": max_lr,
            "eps": 1e-6,
        }
        adam = torch.optim.Adam(
            [*groups, scalars],
            betas=(beta1, 0.95),
            eps=1e-8,
            fused=True,
        )
        muon = Muon(matrices, max_lr, weight_decay=weight_decay, dtype=dtype)
        return [adam, muon]


class SpeedrunGPT(ModernLanguageModel):
    """Record 10: 162.2M parameters at GPT-2's size, because embedding and head are not tied."""
    recipe = "speedrun"

    # Output projections and head start at zero (arXiv:2203.03466). So the blocks of a new model add
    # nothing to the embedding, and its first loss is ln(vocab_size).
    zero_at_start = ("c_proj.weight", "lm_head.weight")

    def __init__(self, config):
        super().__init__(config)
        V, C = config.vocab_size, config.n_embd
        blocks = [SpeedrunBlock(config) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict({
            "wte": Embedding(V, C),
            "h": nn.ModuleList(blocks),
        })
        self.lm_head = CastedLinear(C, V)
        if not self.transformer.wte.weight.is_meta:     # on "meta" there is nothing to draw
            self.init_weights()

    def embed(self, tokens, dtype):
        return norm(self.transformer.wte(tokens).to(dtype))

    def configure_optimizers(self, max_lr, weight_decay=0.0, dtype=torch.bfloat16):
        """[Adam, Muon], with record 10's learning rates at GPT-2's width."""
        # With --max_lr 0.02, which is Muon's, the rates below are record 10's: 0.3 for the
        # embedding, 0.002 for the head. The narrower the model, the higher the head's
        # (arXiv:2203.03466, table 3).
        head_lr = 0.1 * max_lr * 768 / self.config.n_embd
        groups = [
            {"params": [self.transformer.wte.weight], "lr": 15 * max_lr},
            {"params": [self.lm_head.weight], "lr": head_lr},
        ]
        return self.adam_and_muon(groups, 0.9, max_lr, weight_decay, dtype)


# ---------------------------------------------------------------------- the recipe
# `config` is config.Config.

def make_optimizers(model: SpeedrunGPT, config) -> list:
    return model.configure_optimizers(config.max_lr, config.weight_decay, muon_dtype(config))


def muon_dtype(config) -> torch.dtype:
    """The dtype of Muon's Newton-Schulz iteration: bfloat16 is exact enough, float16 overflows."""
    if config.dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def trapezoid(step: int, config) -> float:
    """Factor of the learning rates: linear warmup, constant, then linear to min_lr.

    The last part takes `cooldown` of the run's tokens.
    """
    return warmup_and_cooldown(step, step / config.max_steps, config)


def warmup_and_cooldown(step: int, progress: float, config) -> float:
    """`trapezoid`, where `progress` is the share of the run's tokens before the step, 0 to 1."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))

    min_scale = config.min_lr / config.max_lr
    remaining = min(1.0, max(0.0, 1.0 - progress) / config.cooldown)
    return min(warmup, min_scale + (1.0 - min_scale) * remaining)


def muon_momentum(step: int, config) -> float:
    """From 0.85 to 0.95 over the first 15.4% of the run: 500 of record 10's 3,242 steps."""
    return rising_momentum(step / config.max_steps, 0.85, 0.95)


def rising_momentum(progress: float, first: float, last: float) -> float:
    return first + (last - first) * min(1.0, progress / 0.154)


# modded-nanogpt's record 10: 3.28 on FineWeb's validation set in 7.8 minutes on 8 H100s.
RECIPE = Recipe(
    SpeedrunGPT,
    make_optimizers,
    lr_scale=trapezoid,
    momentum=muon_momentum,
    # A preset wins over `defaults`, but not over `rates`: the presets' rates are for AdamW.
    defaults=dict(n_head=6, max_steps=3242, weight_decay=0.0, grad_clip=math.inf),
    rates=dict(max_lr=0.02, min_lr=0.0, warmup_steps=0),
    own_flags=("cooldown",),
    automatic=lambda config: {"cooldown": 0.2856},      # record 10's 926 of 3,242 steps
)
