"""The frontier recipe: what modded-nanogpt's records after November 2024 taught, and six new ideas.

It keeps the ideas of speedrun.py (record 10) but for the untied head. From later records it has
shifted keys, the tied head, the bigram table, several updates a step and the lower softcap. New are
the rows for stems and forms, the start of the shifted keys, the eps of the embedding and the
shorter averages. What each gains, measured by leaving it out, is in docs/recipes.md.

Shapes: B sequences, T tokens, S with those in a cache, C = n_embd, nh heads of size hs = C / nh.
"""
import functools
import math
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

import speedrun
from runtime.language_model import Embedding
from runtime.recipe import BatchSchedule, Recipe
from runtime.tokenizer import EOT, VOCAB_SIZE, token_bytes
from speedrun import CastedLinear, ModernLanguageModel, SpeedrunAttention, masked_attention, norm


# ---------------------------------------------------------------------- stems and forms
# "return", " Returns" and "returning" are three tokens of GPT-2, which would learn three times what
# they have in common. Here a token's embedding is the sum of three rows: its own, and those of its
# parts, which are its stem ("return") and its form (" Returns" and " Words" share one).

ENDING = re.compile(r"(?<=...)(ings|ing|ies|ied|ers|er|ed|es|ly|s|e|y)\Z", re.DOTALL)


def stem_and_form(text: str) -> tuple[str, tuple]:
    """The parts of a token's text: what it is about, and all that the stem leaves out.

    The stem is in lower case, without white space around it, and without one common English ending
    if three characters remain.
    """
    word = text.strip()
    lower = word.lower()
    stem = ENDING.sub("", lower)
    ending = lower[len(stem):]
    case = word.islower(), word.isupper(), word.istitle()
    form = text.startswith(" "), *case, word.isdigit(), ending
    return stem, form


@functools.cache
def parts_of_tokens(vocab_size):
    """Rows of the table of parts: int64 (2, vocab_size), each token's stem and its form."""
    # What is no text has a stem of its own, named by its number, and shares one form: padding,
    # <|endoftext|>, single bytes, and all tokens of a vocabulary that is not GPT-2's.
    stems: list = list(range(vocab_size))
    forms: list = [()] * vocab_size

    if vocab_size >= VOCAB_SIZE:
        for token, i in token_bytes().items():
            try:
                stem, forms[i] = stem_and_form(token.decode())
            except UnicodeDecodeError:
                continue
            if stem:                            # white space keeps its own
                stems[i] = stem

    # The rows are numbered as the parts first occur, the stems before the forms.
    row_of = {part: row for row, part in enumerate(dict.fromkeys(stems + forms))}
    rows = [[row_of[part] for part in stems], [row_of[part] for part in forms]]
    return torch.tensor(rows, device="cpu")


# ---------------------------------------------------------------------- pairs of tokens

def bigram_hash(tokens, rows):
    """A row of the bigram table for each token and the one before it: (B, T) -> (B, T), int64.

    Pairs may share a row. The first token of a sequence, and <|endoftext|>, which begins a
    document, count as following <|endoftext|>. The factors are record 62's.
    """
    before = F.pad(tokens[:, :-1], (1, 0), value=EOT)
    before = torch.where(tokens == EOT, EOT, before)
    return (36313 * tokens ^ 27191 * before) % rows


# ---------------------------------------------------------------------- shifted keys

def shift_keys(k, starts):
    """Moves the keys k (B, S, nh, hs) of the second half of the heads on by one position.

    A query that looks for a token then finds the one after it: what followed this token before. An
    ordinary attention needs two layers for that (an induction head, arXiv:2209.11895). Record 49
    shifts half of each head instead. `starts`, bool (B, S, 1, 1), says where documents start: there
    the key before is another document's, and zero takes its place.
    """
    n_head = k.size(2)
    unshifted = n_head // 2                             # of three heads, one
    k, shifted = k.split((unshifted, n_head - unshifted), dim=2)
    shifted = F.pad(shifted[:, :-1], (0, 0, 0, 0, 1, 0))
    shifted = shifted.masked_fill(starts, 0)
    return torch.cat((k, shifted), dim=2)


# ---------------------------------------------------------------------- the model

class FrontierAttention(SpeedrunAttention):
    """SpeedrunAttention with shifted keys."""

    def forward(self, x, v1, rotary, kernel, mask, past, starts):
        """x (B, T, C) -> (B, T, C), and v1: the values of the first block, None in that block."""
        q, k, v, v1 = self.queries_keys_values(x, v1, rotary, past)
        y = masked_attention(q, shift_keys(k, starts), v, kernel, mask)         # (B, T, nh, hs)
        return self.c_proj(y.flatten(2)), v1


class FrontierBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.attn = FrontierAttention(config, layer)
        self.c_fc = CastedLinear(C, 4 * C)
        self.c_proj = CastedLinear(4 * C, C)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x, v1, x0, *context):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, v1 = self.attn(norm(x), v1, *context)
        x = x + y
        x = x + self.c_proj(F.relu(self.c_fc(norm(x))).square())
        return x, v1


class FrontierGPT(ModernLanguageModel):
    """180.4M parameters at GPT-2's size: 38.6M in the bigram table, 18.2M in that of the parts."""
    recipe = "frontier"
    lookup_tables = ("bigram", "part")
    softcap = 15.0                              # record 18

    # A new model computes its embedding and no more, without the rows that tokens share.
    zero_at_start = ("c_proj.weight", "bigram.weight", "part.weight")

    def __init__(self, config):
        super().__init__(config)

        V, C = config.vocab_size, config.n_embd
        parts = parts_of_tokens(V)
        self.register_buffer("parts", parts.clone(), persistent=False)          # (2, vocab_size)
        blocks = [FrontierBlock(config, layer) for layer in range(config.n_layer)]
        self.transformer = nn.ModuleDict({
            "wte": Embedding(V, C),
            "bigram": Embedding(V, C),
            "part": Embedding(int(parts.max()) + 1, C),
            "h": nn.ModuleList(blocks),
        })

        # Tied head (record 53): a token's row learns where it is read and where it is predicted.
        # Its start is small, as it is the head too: the first loss is about ln(V) + 12.5 / C. At
        # --max_lr 0.02 Adam's rate is 0.3 of it, which is also what speedrun's embedding has.
        self.embedding_std = 5 / C
        self.lm_head = CastedLinear(C, V, device="meta")
        self.lm_head.weight = self.transformer.wte.weight
        if not self.transformer.wte.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """As speedrun's, but the weights of the shifted keys start as the queries'.

        A token then looks for itself from the first step on, and so finds what followed it before:
        the model need not discover that (an initialisation like that of arXiv:2305.09828).
        """
        super().init_weights()
        first = self.config.n_head // 2 * self.head_size
        for block in self.transformer.h:
            block.attn.c_k.weight[first:] = block.attn.c_q.weight[first:]

    def add_parts(self, rows, parts):
        """rows (..., C) of tokens plus those of their parts (2, ...)."""
        stems, forms = parts
        total = self.transformer.part(stems)
        total.add_(self.transformer.part(forms))        # in place, which saves time on a CPU
        return total.add_(rows)

    def head(self):
        """(vocab_size, C): a token is predicted by the sum that embeds it."""
        return self.add_parts(self.lm_head.weight, self.parts)

    def embed(self, tokens, T, dtype):
        # One token more than T, if there is one, because the first of T makes a pair with it.
        tokens = tokens[:, -T - 1:]
        rows = self.add_parts(self.transformer.wte(tokens), self.parts[:, tokens])
        x = norm(rows.to(dtype))

        # Bigram table (record 62): a row for each pair of a token and the one before it, so that no
        # attention has to learn what mostly follows what.
        pairs = bigram_hash(tokens, self.transformer.bigram.num_embeddings)
        x = norm(x + self.transformer.bigram(pairs).to(dtype))
        return x[:, -T:]

    def context(self, tokens, T, dtype, past):
        """What the attention of every block is given: also where documents start."""
        starts = (tokens == EOT)[:, :, None, None]                              # (B, S, 1, 1)
        return *super().context(tokens, T, dtype, past), starts

    def configure_optimizers(self, max_lr, weight_decay, dtype, tokens):
        """[Adam, Muon], for steps of that many `tokens`. `dtype` is that of Muon's iteration."""
        # The tied embedding and the parts learn at the rate of speedrun's head.
        head_lr = 0.1 * max_lr * 768 / self.config.n_embd

        # Every step lowers the logits of tokens that do not occur: their gradient is about their
        # probability, tiny, and always of one sign, from which Adam would make full steps. With an
        # eps of a tenth of what one occurrence gives, about 1 / tokens, they hardly move.
        head_eps = 0.1 / tokens

        # Most pairs occur a few times only: a tenth of the rate of speedrun's embedding.
        bigram_lr = 1.5 * max_lr

        head = self.named("transformer.wte.weight", "transformer.part.weight")
        groups = [
            {"params": head, "lr": head_lr, "eps": head_eps},
            {"params": self.named("transformer.bigram.weight"), "lr": bigram_lr},
        ]
        # Shorter averages than speedrun's, for shorter runs: beta1 of 0.7 (and muon_momentum).
        return self.adam_and_muon(groups, 0.7, max_lr, weight_decay, dtype)


# ---------------------------------------------------------------------- the recipe
# `config` is train_gpt2.Config; `progress` is the share of the run's tokens before a step, 0 to 1.
# The fits behind the numbers are in docs/recipes.md.

def make_optimizers(model: FrontierGPT, config) -> list:
    return model.configure_optimizers(
        config.max_lr, config.weight_decay, speedrun.muon_dtype(config), config.total_batch_size)


def batch_divisors(config) -> tuple[int, int, int]:
    """The first batch is all, a half or a quarter of --total_batch_size, and then grows (record 46).

    The best first batch grows with the run's tokens D: it has sqrt(5 D) tokens. The batch is halved
    as long as it is more than sqrt(2) times larger than that.
    """
    for divisors in ((1, 1, 1), (2, 1, 1)):
        schedule = BatchSchedule(config.total_batch_size, config.max_steps, divisors)
        best = math.sqrt(5 * schedule.tokens_before(config.max_steps))
        can_be_halved = schedule.tokens(0) % (2 * config.sequence_length) == 0
        if schedule.tokens(0) < math.sqrt(2) * best or not can_be_halved:
            return divisors
    return (4, 2, 1)


def position_in_log(n: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, and between them linear in the logarithm of n."""
    position = math.log(n / low, high / low)
    return min(1.0, max(0.0, position))


def automatic(config) -> dict:
    """What "auto" means in --cooldown and --min_lr."""
    # A long run decays as the later records do, over 60% of its tokens to a tenth of the rate; a
    # short one as record 10 does, over 29% to 0.
    length = position_in_log(config.max_steps, 110, 500)
    return {"cooldown": 0.29 + 0.31 * length, "min_lr": 0.1 * length * config.max_lr}


def muon_momentum(progress: float, config) -> float:
    """From 0.80 to 0.85 in runs of up to 1,000 steps; to the later records' 0.95 from 3,000 on."""
    highest = 0.85 + 0.10 * position_in_log(config.max_steps, 1000, 3000)
    rising = speedrun.muon_momentum(progress, config, 0.80, highest)

    # Over the last tenth of the run it goes back to 0.85.
    falling = 0.85 + (highest - 0.85) * min(1.0, (1.0 - progress) / 0.1)
    return min(rising, falling)


# modded-nanogpt's records up to 2026, where they help at small sizes, and more (docs/recipes.md).
RECIPE = Recipe(
    make_optimizers,
    lr_scale=speedrun.trapezoid,
    momentum=muon_momentum,
    window=speedrun.window_schedule,
    batch_divisors=batch_divisors,
    defaults=dict(n_head=6, max_steps=5833, weight_decay=0.0, grad_clip=math.inf),
    rates=dict(max_lr=0.02, warmup_steps=0),
    own_flags=("window", "cooldown"),
    automatic=automatic,
)
