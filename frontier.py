"""The frontier recipe's model: what modded-nanogpt's records after November 2024 taught, and more.

It keeps the ideas of SpeedrunGPT (record 10), but for the untied head. It adds the records' key offset, tied
head, bigram table, several updates a step and lower softcap, and as new ideas rows for stems and forms, the
start of the shifted keys, an eps for the embedding, and shorter averages (docs/recipes.md).
"""
import contextlib
import functools
import math
import re

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import speedrun
from runtime.kernels import Embedding, Linear, attention, matmul_dtype, norm
from runtime.language_model import KVCache, ModernLanguageModel, rotate
from runtime.muon import Muon
from runtime.recipe import BatchSchedule, Recipe
from runtime.tokenizer import EOT, VOCAB_SIZE, token_bytes

ENDING = re.compile(r"(?<=...)(ings|ing|ies|ied|ers|er|ed|es|ly|s|e|y)\Z", re.DOTALL)


@functools.cache
def parts_of_tokens(vocab_size: int) -> Tensor:
    """Rows of each token's stem and form, int64 (2, vocab_size). The stem is the text in lower case, without
    white space around it and without one common English ending, if three characters remain; the form is
    what that leaves out, and whether it is a number: " Returns" has the stem of "returning" and the form of
    " Words". White space, padding, <|endoftext|>, bytes that are no text, and all tokens of a vocabulary
    smaller than GPT-2's have a stem each, and all of these but white space one form."""
    parts: list = [(i, ()) for i in range(vocab_size)]
    for token, i in token_bytes().items() if vocab_size >= VOCAB_SIZE else ():
        with contextlib.suppress(UnicodeDecodeError):
            text = token.decode()
            word = text.strip()
            stem = ENDING.sub("", word.lower())
            parts[i] = stem or i, (text[:1] == " ", word.islower(), word.isupper(), word.istitle(),
                                   word.isdigit(), word.lower()[len(stem):])
    number: dict = {}
    return torch.tensor([[number.setdefault(name, len(number)) for name in kind]
                         for kind in zip(*parts, strict=True)], device="cpu")


def bigram_hash(tokens: Tensor, rows: int) -> Tensor:
    """A row number for each token and the one before it: tokens int64 (B, T) -> (B, T); pairs may share a
    row. The first token of a sequence, and <|endoftext|>, which begins a document, count as following
    <|endoftext|>. The multipliers are those of modded-nanogpt's record 62."""
    before = torch.where(tokens == EOT, EOT, F.pad(tokens[:, :-1], (1, 0), value=EOT))
    return (36313 * tokens ^ 27191 * before) % rows


def offset_keys(k: Tensor, begins: Tensor) -> Tensor:
    """Shifts the keys k (B, S, nh, hs) of the second half of the heads by one position, as record 49 does to
    half of each head. begins (B, S, 1, 1) bool: where documents begin, whose shifted key is zero."""
    n = k.size(2) // 2          # heads whose keys are not shifted: of an odd number the smaller half
    k, late = k.split((n, k.size(2) - n), dim=2)        # 0.3 GB less than two slices, compiled
    return torch.cat((k, F.pad(late[:, :-1], (0, 0, 0, 0, 1, 0)).masked_fill(begins, 0)), dim=2)


class FrontierAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_q, self.c_k, self.c_v, self.c_proj = (Linear(C, C, bias=False) for _ in range(4))
        self.lamb = nn.Parameter(torch.empty(()))
        self.n_head, self.layer = config.n_head, layer

    def forward(self, x, v1, rotary, begins, kernel, mask, past=None):
        """x (B, T, C); v1 (B, T, nh, hs): the first block's values, None in that block -> (B, T, C), v1."""
        B, T, C = x.size()
        q, k, v = (linear(x).view(B, T, self.n_head, C // self.n_head)          # (B, T, nh, hs)
                   for linear in (self.c_q, self.c_k, self.c_v))
        v1 = v if v1 is None else v1
        v = (1 - self.lamb) * v + self.lamb * v1
        q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)
        if past:
            k, v = past.add(f"k{self.layer}", k), past.add(f"v{self.layer}", v)     # (B, t + T, nh, hs)
        y = attention(q, offset_keys(k, begins), v, kernel, mask)               # (B, T, nh, hs)
        return self.c_proj(y.reshape(B, T, C)), v1


class FrontierBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = FrontierAttention(config, layer)
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x, v1, x0, rotary, begins, kernel, mask, past=None):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, v1 = self.attn(norm(x), v1, rotary, begins, kernel, mask, past)
        x = x + y
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square()), v1


class FrontierGPT(ModernLanguageModel):
    """180.4M parameters at GPT-2's size, of which the bigram table has 38.6M and that of the parts 18.2M."""
    recipe = "frontier"
    softcap = 15.0              # record 18
    looked_up = "bigram", "part"

    def __init__(self, config):
        super().__init__(config)
        parts = parts_of_tokens(config.vocab_size)                              # (2, vocab_size)
        self.transformer = nn.ModuleDict(dict(
            wte=Embedding(config.vocab_size, config.n_embd),
            bigram=Embedding(config.vocab_size, config.n_embd),
            part=Embedding(int(parts.max()) + 1, config.n_embd),
            h=nn.ModuleList(FrontierBlock(config, layer) for layer in range(config.n_layer)),
        ))
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.transformer.wte.weight                       # arXiv:1608.05859
        self.register_buffer("parts", parts.clone(), persistent=False)
        if not self.transformer.wte.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Output projections and all tables but the embedding at zero. That is the head too, hence small: the
        first loss is about ln(vocab_size) + 12.5 / n_embd. Where keys are shifted, their weights start as the
        queries': a token then attends to what followed the same token before, an induction head
        (arXiv:2209.11895) from the first step, by an initialisation like that of arXiv:2305.09828."""
        for name, p in self.named_parameters():
            if name.endswith(("c_proj.weight", "bigram.weight", "part.weight")):
                p.zero_()
            elif name.endswith("wte.weight"):
                # at each width its rate is 0.3 of this (max_lr 0.02), as speedrun's embedding's of its scale
                p.normal_(0.0, 5 / self.config.n_embd)
            elif name.endswith("lambdas"):
                p.copy_(torch.tensor([1.0, 0.0]))
            elif name.endswith("lamb"):
                p.fill_(0.5)
            else:
                p.uniform_(-p.size(1)**-0.5, p.size(1)**-0.5)
        late = self.config.n_head // 2 * (self.config.n_embd // self.config.n_head)
        for block in self.transformer.h:
            block.attn.c_k.weight[late:] = block.attn.c_q.weight[late:]

    def add_parts(self, rows: Tensor, parts: Tensor) -> Tensor:
        """rows (..., C) of tokens plus those of parts (2, ...). In place, which saves time on a CPU."""
        return functools.reduce(Tensor.add_, map(self.transformer.part, parts)).add_(rows)

    def head(self) -> Tensor:
        """(vocab_size, C): each token's row plus those of its parts."""
        return self.add_parts(self.lm_head.weight, self.parts)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens (B, S) -> (B, S, C): rows and parts, then the row of the pair with the token before."""
        x = norm(self.add_parts(self.transformer.wte(tokens), self.parts[:, tokens]).to(dtype))
        pair = self.transformer.bigram(bigram_hash(tokens, self.transformer.bigram.num_embeddings))
        return norm(x + pair.to(dtype))                                         # record 62

    def hidden(self, idx: Tensor, past: KVCache | None = None) -> Tensor:
        """Final hidden states (B, T, C) of idx (B, T), which follows the tokens in the KVCache `past`."""
        device, dtype, T = idx.device.type, matmul_dtype(self.transformer.wte.weight), idx.size(1)
        tokens = past.add("tokens", idx) if past else idx                       # (B, S)
        rotary = self.rotary_tables(tokens.size(1), T, dtype, idx.device)
        begins = (tokens == EOT)[:, :, None, None]                              # (B, S, 1, 1)
        mask = self.window_mask(tokens, T, past)
        with torch.autocast(device, enabled=False):
            x = x0 = self.embed(tokens[:, -T - 1:], dtype)[:, -T:]      # (B, T, C); pairs need one more
            v1 = None
            for block in self.transformer.h:
                x, v1 = self.run_block(block, x, v1, x0, rotary, begins, self.kernel, mask, past)
            return norm(x)

    def configure_optimizers(self, max_lr: float, weight_decay: float, dtype, tokens: int) -> list:
        """[Adam, Muon]. Rates as SpeedrunGPT's, the embedding's and the parts' that of the head. The bigram
        table's is a tenth of SpeedrunGPT's embedding's: most of its rows are seen only a few times.

        `tokens`: of the largest batch. One occurrence of a token gives its row of the embedding a gradient of
        about 1 / tokens (a multiple in smaller batches), of which eps is a tenth. The gradient of a token
        that does not occur is about its probability, and always lowers it: without eps Adam would turn even
        the smallest of them into a full step."""
        params = dict(self.named_parameters())
        wte, part, bigram = ((name, params.pop(name)) for name in (
            f"transformer.{table}.weight" for table in ("wte", "part", "bigram")))
        matrices = [(n, p) for n, p in params.items() if n.startswith("transformer.h.") and p.dim() == 2]
        scalars = [(n, p) for n, p in params.items() if n not in dict(matrices)]
        adam = torch.optim.Adam([
            {"params": [wte, part], "lr": 0.1 * max_lr * 768 / self.config.n_embd, "eps": 0.1 / tokens},
            {"params": [bigram], "lr": 1.5 * max_lr}, {"params": scalars, "lr": max_lr},
        ], betas=(0.7, 0.95), eps=1e-8, fused=not self.lm_head.weight.is_mps)
        return [adam, Muon(matrices, max_lr, weight_decay=weight_decay, dtype=dtype)]


def make_optimizers(model: FrontierGPT, config) -> list:
    return model.configure_optimizers(config.max_lr, config.weight_decay, speedrun.muon_dtype(config),
                                      config.total_batch_size)


def position_in_log(n: float, first: float, last: float) -> float:
    """Where n lies between `first` (0) and `last` (1) in the logarithm; outside of them 0 or 1."""
    position = math.log(n / first, last / first)
    return min(1.0, max(0.0, position))


def initial_batch_size(config, world_size: int) -> int:
    """What --initial_batch_size auto means. The best first batch has 1,024 sqrt(D / 200,000) tokens, where D
    are those of the run (fitted, docs/recipes.md). Of all, a half and a quarter of --total_batch_size this is
    the first one that is close to it, or that cannot be halved further for so many processes."""
    total, max_steps = config.total_batch_size, config.max_steps
    divisor = 1
    while divisor < 4:
        tokens = BatchSchedule(total // divisor, total, max_steps).tokens_before(max_steps)
        best = 1024 * math.sqrt(tokens / 200_000)
        can_halve = total % (2 * divisor * config.sequence_length * world_size) == 0
        if total / divisor < best * math.sqrt(2) or not can_halve:
            break
        divisor *= 2
    return total // divisor


def automatic(config, world_size: int) -> dict:
    """What "auto" means here. --cooldown and --min_lr (fitted, docs/recipes.md): up to 110 steps record 10's
    29% and 0, from 500 on the later records' 60% and a tenth."""
    long = position_in_log(config.max_steps, 110, 500)
    return {"initial_batch_size": initial_batch_size(config, world_size),
            "cooldown": 0.29 + 0.31 * long,
            "min_lr": 0.1 * long * config.max_lr}


def muon_momentum(progress: float, config) -> float:
    """From 0.80 to 0.85 in runs of up to 1,000 steps. From 3,000 steps on to the later records' 0.95, and
    back to 0.85 over the last tenth of the run."""
    peak = 0.85 + 0.10 * position_in_log(config.max_steps, 1000, 3000)
    rising = speedrun.muon_momentum(progress, config, 0.80, peak)
    falling = 0.85 + (peak - 0.85) * min(1.0, (1.0 - progress) / 0.1)
    return min(rising, falling)


# modded-nanogpt's records up to 2026, where they help at small sizes, and more (docs/recipes.md).
RECIPE = Recipe(
    make_optimizers,
    lr_scale=speedrun.trapezoid,
    momentum=muon_momentum,
    window=speedrun.window_schedule,
    defaults=dict(n_head=6, max_steps=5833, weight_decay=0.0, grad_clip=math.inf),
    rates=dict(max_lr=0.02, warmup_steps=0),
    own_flags=("window", "cooldown"),
    automatic=automatic,
)
