"""GPT-2 (Radford et al. 2019): architecture, loss, initial weights, and AdamW as for GPT-3.

    from model import GPT, GPTConfig
    from presets import GPT2_SIZES

    model = GPT(GPTConfig())                        # new weights
    model = GPT(GPTConfig(**GPT2_SIZES["gpt2-xl"]))
    model = GPT.from_pretrained("gpt2")             # the published weights, or those of a folder

    logits, _ = model(idx)                          # idx: int64 (B, T)
    _, loss = model(idx, targets)                   # a target of -1 is ignored
    idx = model.generate(idx, max_new_tokens=50)

Generation is in runtime/language_model.py. recipes.load_model reads the checkpoints of a run.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh. In generation S is T plus
the tokens whose keys and values are in the cache `past`. In training there is none, and S = T.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.language_model import LanguageModel
# Subclasses of torch's layers that take less time and memory.
from runtime.layers import (
    GELU,
    Embedding,
    LayerNorm,
    Linear,
    formula_is_faster,
    matmul_dtype,
)


@dataclass
class GPTConfig:
    block_size: int = 1024      # longest sequence

    # 50,000 merges, 256 bytes and <|endoftext|>. For training config.py pads them to 50304, a
    # multiple of 128, because GPUs multiply matrices of such sizes faster. The 47 padding ids are
    # in the softmax, but never a target, and generation never draws them.
    vocab_size: int = 50257

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    gelu: str = "tanh"          # nn.GELU's `approximate`; "none" is the exact GELU, nanoGPT's


# ---------------------------------------------------------------------- attention

def attention(q, k, v, kernel="auto"):
    """softmax(q k^T / sqrt(hs)) v: q (B, T, nh, hs), k and v (B, S, nh, hs) -> (B, T, nh, hs).

    Each token sees itself and all before it. `kernel` "naive" is the formula of the paper, "auto"
    torch's kernel where that is faster.
    """
    # The cache has the tokens before the heads. torch wants (B, nh, T, hs) and (B, nh, S, hs).
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    T, S = q.size(2), k.size(2)

    # With a cache T is 1: the newest token sees all others, without a mask. (`bool`, because to
    # torch.export T == S is none.)
    is_causal = bool(T == S)
    assert is_causal or T == 1

    if kernel == "naive" or formula_is_faster(q, S):        # in bfloat16 on a CPU, of few tokens
        y = attention_by_formula(q, k, v, is_causal)
    else:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return y.transpose(1, 2)


def attention_by_formula(q, k, v, is_causal):
    """Equation 1 of arXiv:1706.03762: q (B, nh, T, hs), k and v (B, nh, S, hs) -> (B, nh, T, hs)"""
    T, hs = q.size(2), q.size(3)
    scores = (q / math.sqrt(hs)) @ k.transpose(-2, -1)                          # (B, nh, T, S)

    if is_causal:
        # -inf above the diagonal, where a key comes after the query.
        future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        scores = scores + future

    weights = F.softmax(scores, dim=-1).to(v.dtype)         # autocast returns float32
    return weights @ v


class CausalSelfAttention(nn.Module):
    kernel = "auto"         # or "naive", by --attention

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_attn = Linear(C, 3 * C)          # query, key, value of all heads
        self.c_proj = Linear(C, C)
        self.n_head = config.n_head
        if C % self.n_head != 0:
            raise ValueError(f"n_embd {C} must be divisible by n_head {self.n_head}")

    def forward(self, x, past=None):
        B, T, C = x.size()
        hs = C // self.n_head
        q, k, v = self.c_attn(x).split(C, dim=2)                                # 3 times (B, T, C)
        q = q.view(B, T, self.n_head, hs)                                       # (B, T, nh, hs)
        k = k.view(B, T, self.n_head, hs)
        v = v.view(B, T, self.n_head, hs)
        if past is not None:            # in generation: after this layer's keys and values so far
            k, v = past.append(self, k, v)                                      # (B, S, nh, hs)
        y = attention(q, k, v, self.kernel)                                     # (B, T, nh, hs)
        return self.c_proj(y.reshape(B, T, C))


# ---------------------------------------------------------------------- blocks

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = Linear(C, 4 * C)
        self.gelu = GELU(approximate=config.gelu)
        self.c_proj = Linear(4 * C, C)

    def forward(self, x):
        x = self.c_fc(x)                                                        # (B, T, 4 C)
        x = self.gelu(x)
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        x = x + self.attn(self.ln_1(x), past)
        x = x + self.mlp(self.ln_2(x))
        return x


# ---------------------------------------------------------------------- GPT-2

class GPT(LanguageModel):
    """Pre-norm blocks, learned positions, GELU, biases everywhere, a head tied to the embedding.

    There is no dropout. LanguageModel adds generate() and the losses of single tokens, for which it
    calls `hidden` and `logits`.
    """
    Config = GPTConfig      # a checkpoint has its fields
    recipe = "gpt2"         # so checkpoints and exports call it

    def __init__(self, config):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        self.transformer = nn.ModuleDict({
            "wte": Embedding(V, C),
            "wpe": Embedding(config.block_size, C),
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "ln_f": LayerNorm(C),
        })
        self.lm_head = Linear(C, V, bias=False)
        self.lm_head.weight = self.transformer.wte.weight       # tied (arXiv:1608.05859)
        if not self.lm_head.weight.is_meta:     # "meta": who reads a file needs no new weights
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draws all weights as nanoGPT does. OpenAI's code draws wpe with a deviation of 0.01."""
        # Each block adds the results of two projections, c_proj, to the residual stream. Their
        # standard deviation is smaller, so that the stream does not grow with the number of blocks
        # (GPT-2's paper, section 2.3).
        projection_std = 0.02 / math.sqrt(2 * self.config.n_layer)

        # Norms set their own gains to 1 and biases to 0.
        drawn = set()           # the head has the embedding's weight, which is drawn once
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding) or module.weight in drawn:
                continue
            std = projection_std if name.endswith("c_proj") else 0.02
            module.weight.normal_(0.0, std)
            drawn.add(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def forward(self, idx, targets=None):
        """(logits, None) without targets; (None, loss) with them: mean cross-entropy in nats.

        idx and targets are int64 (B, T), logits (B, T, vocab_size). A target of -1 is ignored.
        """
        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)      # no logits: where nobody needs them, none are kept

    def hidden(self, idx, past=None):
        """Final hidden states (B, T, C) of the tokens idx (B, S): of those not in the cache yet."""
        S, block_size = idx.size(1), self.config.block_size
        if S > block_size:
            raise ValueError(f"a sequence of {S} tokens is longer than block_size {block_size}")

        first = 0 if past is None else past.length          # which generation counts
        positions = torch.arange(first, S, device=idx.device)                   # (T,)
        x = self.transformer.wte(idx[:, first:]) + self.transformer.wpe(positions)      # (B, T, C)

        # Under bfloat16 autocast the residual stream is bfloat16, too, as in llm.c: in float32 it
        # would be 14% of a step's memory traffic, and gain nothing that was measured
        # (docs/lab-notes.md). Under float16 it stays in float32: beyond 65504 it would overflow.
        if matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()

        for block in self.transformer.h:
            x = block(x, past)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """Final hidden states x (..., C) -> (..., vocab_size)."""
        return self.lm_head(x)

    def loss(self, x, targets):
        """The mean cross-entropy (nats) of the targets (B, T), for hidden states x (B, T, C)."""
        logits = self.logits(x)                                                 # (B, T, vocab_size)
        logits = logits.flatten(0, 1).float()   # autocast's are in 16 bits
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, max_lr, weight_decay, betas=(0.9, 0.95), eps=1e-8):
        """AdamW (arXiv:1711.05101) with GPT-3's settings (arXiv:2005.14165), in a fused kernel."""
        # Matrices and embeddings decay. Biases and the gains of LayerNorm do not.
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=max_lr, betas=betas, eps=eps, fused=True)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "GPT":
        """A GPT-2 of the Hugging Face hub, such as "gpt2-xl", or of a folder in its format."""
        # Imported here, so that `import model` alone stays small.
        from runtime.huggingface import from_huggingface

        return from_huggingface(source, {"gpt2": cls})      # {recipe: class}, those that it reads
