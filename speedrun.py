"""The speedrun recipe's model, optimizers and schedule: modded-nanogpt's record 10 (November 2024), written
anew, with its state-dict names. Unlike the record it keeps the embedding in float32, and norm's eps is that
of float32 (in the record's torch 2.5 bfloat16's, 2^-7).

The number in brackets beside an idea is its gain: validation loss without it minus with it, after 0.41
million tokens, 4 layers of width 128, means of two seeds, which differ by up to 0.06 (bench.py recipes,
2026-11-21). Some gains are within that noise.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels import Embedding, Linear, attention, matmul_dtype, norm
from runtime.language_model import KVCache, ModernLanguageModel, rotate
from runtime.muon import Muon
from runtime.recipe import Recipe


class SpeedrunAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_q, self.c_k, self.c_v, self.c_proj = (Linear(C, C, bias=False) for _ in range(4))
        self.lamb = nn.Parameter(torch.empty(()))
        self.n_head, self.layer = config.n_head, layer

    def forward(self, x, v1, rotary, kernel, mask, past=None):
        """x (B, T, C); v1 (B, T, nh, hs): the first block's values, None in that block -> (B, T, C), v1."""
        B, T, C = x.size()
        q, k, v = (linear(x).view(B, T, self.n_head, C // self.n_head)          # (B, T, nh, hs)
                   for linear in (self.c_q, self.c_k, self.c_v))
        v1 = v if v1 is None else v1
        v = (1 - self.lamb) * v + self.lamb * v1        # value residual (arXiv:2410.17897), learned [-0.007]
        # QK-norm (arXiv:2010.04245) [+0.018], then rotary positions [+0.082]
        q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)
        if past:
            k, v = past.add(f"k{self.layer}", k), past.add(f"v{self.layer}", v)     # (B, t + T, nh, hs)
        y = attention(q, k, v, kernel, mask)                                    # (B, T, nh, hs)
        return self.c_proj(y.reshape(B, T, C)), v1


class SpeedrunMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())           # ReLU squared (arXiv:2109.08668) [-0.003]


class SpeedrunBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn, self.mlp = SpeedrunAttention(config, layer), SpeedrunMLP(config)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x, v1, x0, rotary, kernel, mask, past=None):
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # learned shortcut from the embedding [+0.011]
        y, v1 = self.attn(norm(x), v1, rotary, kernel, mask, past)
        x = x + y
        return x + self.mlp(norm(x)), v1


class SpeedrunGPT(ModernLanguageModel):
    """modded-nanogpt's record 10: 162.2M parameters at GPT-2's size, as embedding and head are not tied."""
    recipe = "speedrun"
    softcap = 30.0              # arXiv:2408.00118, section 2 [+0.004]
    looked_up = ("wte",)

    def __init__(self, config):
        super().__init__(config)
        self.transformer = nn.ModuleDict(dict(
            wte=Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList(SpeedrunBlock(config, layer) for layer in range(config.n_layer)),
        ))
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if not self.transformer.wte.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Output projections and head at zero (arXiv:2203.03466) [+0.009]: first loss ln(vocab_size)."""
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

    def hidden(self, idx: Tensor, past: KVCache | None = None) -> Tensor:
        """As GPT's, all in autocast's dtype; autocast itself would cast norms and residuals to fp32."""
        device, dtype, T = idx.device.type, matmul_dtype(self.transformer.wte.weight), idx.size(1)
        tokens = past.add("tokens", idx) if past else idx                       # (B, S)
        rotary = self.rotary_tables(tokens.size(1), T, dtype, idx.device)       # [+0.082]
        mask = self.window_mask(tokens, T, past)
        with torch.autocast(device, enabled=False):
            x = x0 = norm(self.transformer.wte(idx).to(dtype))                  # (B, T, C) [the norm: +0.019]
            v1 = None
            for block in self.transformer.h:
                x, v1 = self.run_block(block, x, v1, x0, rotary, self.kernel, mask, past)
            return norm(x)

    def configure_optimizers(self, max_lr: float, weight_decay: float = 0.0, dtype=torch.bfloat16) -> list:
        """[Adam, Muon] with record 10's learning rates at GPT-2's width: max_lr for Muon, 15 max_lr for the
        embedding, 0.1 max_lr for the head. The head's goes with 1 / width (arXiv:2203.03466, table 3) [+0.437
        at width 128]. Only Muon has weight decay; `dtype` is that of its Newton-Schulz iteration."""
        params = dict(self.named_parameters())
        head, wte = ([(name, params[name])] for name in ("lm_head.weight", "transformer.wte.weight"))
        blocks = [(n, p) for n, p in params.items() if n.startswith("transformer.h.")]
        adam = torch.optim.Adam([{"params": wte, "lr": 15 * max_lr},
                                 {"params": head, "lr": 0.1 * max_lr * 768 / self.config.n_embd},
                                 {"params": [(n, p) for n, p in blocks if p.dim() < 2], "lr": max_lr}],
                                betas=(0.9, 0.95), eps=1e-8, fused=not self.lm_head.weight.is_mps)
        return [adam, Muon([(n, p) for n, p in blocks if p.dim() == 2], max_lr, weight_decay=weight_decay,
                           dtype=dtype)]


def make_optimizers(model: SpeedrunGPT, config) -> list:
    return model.configure_optimizers(config.max_lr, config.weight_decay, muon_dtype(config))


def muon_dtype(config) -> torch.dtype:
    """The dtype of Muon's Newton-Schulz iteration."""
    if config.dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def trapezoid(step: int, progress: float, config) -> float:
    """Linear warmup, a constant rate, then linear to min_lr over the last `cooldown` of the run's tokens. The
    cosine instead costs 0.080."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    min_scale = config.min_lr / config.max_lr
    decay = min(1.0, max(0.0, 1.0 - progress) / config.cooldown)
    return min(warmup, min_scale + (1.0 - min_scale) * decay)


def muon_momentum(progress: float, config, first: float = 0.85, last: float = 0.95) -> float:
    """From `first` to `last` over the first 15.4% of the run: 500 of record 10's 3,242 steps [+0.008]."""
    return first + (last - first) * min(1.0, progress / 0.154)


def window_schedule(progress: float, config) -> int:
    """Size of the sliding window: from 64 tokens to --window over the run, in steps of 64 (record 13)."""
    blocks = config.window / 64
    return min(config.window, 64 * math.ceil(1 + (blocks - 1) * progress))


# modded-nanogpt's record 10: 3.28 on FineWeb's validation set in 7.8 minutes on 8 H100s.
RECIPE = Recipe(
    make_optimizers,
    lr_scale=trapezoid,
    momentum=muon_momentum,
    window=window_schedule,
    defaults=dict(n_head=6, max_steps=3242, weight_decay=0.0, grad_clip=math.inf),
    rates=dict(max_lr=0.02, min_lr=0.0, warmup_steps=0),
    own_flags=("window", "cooldown"),
    automatic=lambda config, world_size: {"cooldown": 0.2856},      # 926 of the record's 3,242 steps
)
