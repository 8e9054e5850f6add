"""The frontier recipe: what modded-nanogpt's records after November 2024 taught, and our own ideas.

It is speedrun.py (record 10) with a tied head, and

    from later records    shifted keys, a batch that grows
    new here              rows for stems and forms, the start of the shifted keys, the pointer, the
                          eps of the embedding; for small texts a first epoch backwards, and a
                          sample of the logits
    tuned for short runs  Adam's beta1, Muon's momentum, the rate of the tables

docs/recipes.md says what each gains, measured by leaving it out.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh. S is T plus the tokens that
are already in the cache; in training S = T.
"""
import math
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

import speedrun
from model import attention
from presets import SMALL_TEXT
from runtime.layers import Embedding, matmul_dtype
from runtime.loss import VocabularySample, chunked_cross_entropy
from runtime.recipe import BatchSchedule, Recipe, growing_batch
from runtime.tokenizer import EOT, VOCAB_SIZE, token_bytes
from speedrun import CastedLinear, ModernLanguageModel, SpeedrunAttention, SpeedrunBlock, norm


# ---------------------------------------------------------------------- rows for stems and forms
# "return", " Returns" and "returning" are three tokens of GPT-2, and an ordinary embedding learns
# three times what they have in common. Here a token's embedding is the sum of three rows: its own,
# that of its stem, and that of its form, both of which it shares with other tokens. The stem of
# " Returns" is "return"; its form, "a space, a capital, -s", is that of " Words".

# One common English ending, if at least three characters stand before it.
ENDING = re.compile(r"(?<=...)(ings|ing|ies|ied|ers|er|ed|es|ly|s|e|y)\Z", re.DOTALL)


def stem_and_form(text: str) -> tuple[str, tuple]:
    """The stem of a token's text, and its form: leading space, capitals, digits, ending."""
    word = text.strip()
    lower = word.lower()
    stem = ENDING.sub("", lower)
    ending = lower[len(stem):]

    form = (
        text.startswith(" "),
        word.islower(),
        word.isupper(),
        word.istitle(),
        word.isdigit(),
        ending,
    )
    return stem, form


def parts_of_tokens(vocab_size: int) -> torch.Tensor:
    """The indices of each token's stem and form in the table of parts: int64 (2, vocab_size)."""
    # Whatever is not UTF-8 text keeps a stem of its own, numbered by its id, and the empty form:
    # padding, <|endoftext|>, parts of characters, and every token of another vocabulary.
    stems: list = list(range(vocab_size))
    forms: list = [()] * vocab_size

    if vocab_size >= VOCAB_SIZE:
        for token, i in token_bytes().items():
            try:
                text = token.decode()
            except UnicodeDecodeError:
                continue
            stem, form = stem_and_form(text)
            forms[i] = form
            if stem:                            # that of white space is empty: it keeps its own
                stems[i] = stem

    # Stems (texts and ids) and forms (tuples) are numbered as they first occur, stems first.
    parts = dict.fromkeys(stems + forms)
    row_of = {part: row for row, part in enumerate(parts)}
    rows = [
        [row_of[stem] for stem in stems],
        [row_of[form] for form in forms],
    ]

    # On the CPU also where the reader of checkpoints makes the rest of the model on "meta".
    return torch.tensor(rows, device="cpu")


# ---------------------------------------------------------------------- shifted keys
# In half of the heads position i holds the key of token i - 1, but its own value. So a query that
# matches an earlier occurrence of its token reads the value of what followed there. An ordinary
# attention needs two layers for that (an induction head, arXiv:2209.11895). Record 49 shifts half
# of the numbers of each head instead.

def first_shifted_head(n_head: int) -> int:
    """The first shifted head: the second half is shifted, and of an odd number the middle."""
    return n_head // 2


def shift_keys(k, starts):
    """Shifts the keys k (B, S, nh, hs) of half of the heads by one position.

    `starts`, bool (B, S, 1, 1), says which tokens start a document.
    """
    n_head = k.size(2)
    first = first_shifted_head(n_head)
    k, shifted = k.split((first, n_head - first), dim=2)

    # The key before is another document's where a document starts, and does not exist where the
    # sequence starts. Zero takes its place in both.
    shifted = F.pad(shifted[:, :-1], (0, 0, 0, 0, 1, 0))
    shifted = shifted.masked_fill(starts, 0)
    return torch.cat((k, shifted), dim=2)


class FrontierAttention(SpeedrunAttention):
    """SpeedrunAttention with shifted keys."""

    def forward(self, x, v1, rotary, past, starts):
        """x (B, T, C) -> (B, T, C), and v1: the values of the first block, None in that block."""
        q, k, v, v1 = self.queries_keys_values(x, v1, rotary, past)
        k = shift_keys(k, starts)
        y = attention(q, k, v, self.kernel)                                     # (B, T, nh, hs)
        return self.c_proj(y.flatten(2)), v1


# ---------------------------------------------------------------------- the pointer
# A text repeats its names and its rare words, of which a model that has seen little text knows
# nothing. So the next token is predicted in two ways: by the head, and as a copy of a token that
# the context has already (pointer sentinel mixture models, arXiv:1609.07843). With the shares
# (B, T, S) of the S tokens, that of the head (B, T), and the head's probability p it is
#
#     head_share p + (the sum of the shares of those tokens that are the same)
#
# A share may be so small that float32 has 0 for it: the logarithm is never taken of less than TINY.

TINY = 1e-37

# The score of the sentinel, which stands for "no copy", in a new model. It and the scale below are
# the best ones for the hidden states of a model that was trained without a pointer.
SENTINEL = 13.0


class Pointer(nn.Module):
    """The share of each prediction that copies a token of the context, and the head's share."""

    def __init__(self, C):
        super().__init__()
        self.c_q = CastedLinear(C, C)
        self.c_k = CastedLinear(C, C)
        self.c_e = CastedLinear(C, C)

        # What has led to a token before leads to it again: so queries and keys start alike.
        # (Not nn.init.eye_, which on "meta" imports the compiler: seconds for each model read.)
        with torch.no_grad():
            self.c_q.weight.zero_().fill_diagonal_(1)
            self.c_k.weight.zero_().fill_diagonal_(1)
            self.c_e.weight.zero_()

        self.scale = nn.Parameter(torch.tensor(11.0))       # a token's score is this times a cosine
        self.sentinel = nn.Parameter(torch.zeros(C))
        self.sentinel_bias = nn.Parameter(torch.tensor(SENTINEL))

    def forward(self, x, e, tokens, past):
        """The shares of the S tokens, float32 (B, T, S), and that of the head, (B, T).

        x and e (B, T, C) are final hidden states and embeddings of the last T of the tokens (B, S).
        """
        # A query asks what comes next. A token's key is the sum of two vectors: one of the hidden
        # state that has predicted it, which is that of the token before, and one of its embedding.
        q = norm(self.c_q(x))
        k = self.c_k(x)
        e = self.c_e(e)
        if past is not None:
            k, e = past.append(self, k, e)
        k = F.pad(k[:, :-1], (0, 0, 1, 0)).masked_fill((tokens == EOT)[:, :, None], 0)
        k = norm(k + e)                                                         # (B, S, C)

        T, S, C = q.size(1), k.size(1), k.size(2)
        cosines = (q @ k.mT).float() / C                                        # (B, T, S)
        sees = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)

        # A token like the current one is not copied: samples would go on as "ORDORDORD". So the
        # first token sees none, all of its scores are -inf, and the head's share is 1.
        sees = sees & (tokens[:, None, :] != tokens[:, -T:, None])              # (B, T, S)
        scores = (self.scale * cosines).masked_fill(~sees, float("-inf"))

        # The vector is scaled, not the product: OpenVINO computes (x @ v) / c wrong (findings/).
        sentinel = self.sentinel_bias + x.float() @ (self.sentinel / C**0.5)    # (B, T)

        # A softmax over the scores and the sentinel.
        total = torch.logaddexp(scores.logsumexp(dim=2), sentinel)              # (B, T)
        return torch.exp(scores - total[:, :, None]), torch.exp(sentinel - total)


# ---------------------------------------------------------------------- the model

class FrontierGPT(ModernLanguageModel):
    """143.5M parameters at GPT-2's size, of which 18.2M are in the table of stems and forms."""
    recipe = "frontier"
    kept_vectors = 20.9                         # with the pointer's scores of 1,024 tokens

    # A VocabularySample, if training on a CPU computes the logits of a sample of the tokens only,
    # which changes a loss by noise. Evaluations compute all.
    vocabulary_sample = None

    # As in speedrun the blocks of a new model add nothing. Nor does the table of shared rows.
    zero_at_start = ("c_proj.weight", "part.weight")

    def __init__(self, config):
        super().__init__(config)
        V, C = config.vocab_size, config.n_embd
        self.register_buffer("parts", parts_of_tokens(V), persistent=False)     # (2, V)
        blocks = [SpeedrunBlock(config, FrontierAttention) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict({
            "wte": Embedding(V, C),
            "part": Embedding(int(self.parts.max()) + 1, C),
            "h": nn.ModuleList(blocks),
        })

        # Tied head (record 51): a token's row learns where it is read and where it is predicted.
        self.lm_head = CastedLinear(C, V)
        self.lm_head.weight = self.transformer.wte.weight

        # The learning rate of speedrun's embedding is 0.3 of its deviation, 1. Here the rate is
        # head_lr below: 0.77 / C at --max_lr 0.02. So the deviation is about 2.5 / C.
        #
        # What enters the head has mean square 1. So the first logits have the variance
        # C (2.5 / C)^2 = 6.25 / C, and the first loss is about ln(V) + 3.1 / C. Only the input
        # token's own logit is larger: 2.5 before the softcap.
        self.embedding_std = 2.5 / C
        if not self.transformer.wte.weight.is_meta:     # on "meta" there is nothing to draw
            self.init_weights()
        self.pointer = Pointer(C)                       # draws nothing

    @torch.no_grad()
    def init_weights(self):
        """As speedrun's, but for the weights of the shifted keys: they are those of the queries."""
        # From the first step on a token then looks for itself, and so finds what followed it
        # earlier: the model need not discover that (in the spirit of arXiv:2305.09828).
        super().init_weights()
        first = first_shifted_head(self.config.n_head) * self.head_size
        for block in self.transformer.h:
            block.attn.c_k.weight[first:] = block.attn.c_q.weight[first:]

    def add_parts(self, rows, parts):
        """The sum of the tokens' own vectors `rows` (..., C) and those of their stems and forms.

        `parts`, int64 (2, ...), are the indices that parts_of_tokens has for these tokens.
        """
        # On several GPUs DDP cuts a compiled model where a table is first used. With `contiguous`,
        # which copies nothing here, that is before the sum. A cut inside would store half a sum.
        rows = rows.contiguous()
        table = self.transformer.part.weight.contiguous()

        return F.embedding(parts, table).sum(dim=0).add_(rows)

    def sums_of_rows(self, tokens):
        """tokens (...) -> (..., C): the sums that embed these tokens, and that predict them."""
        return self.add_parts(self.transformer.wte(tokens), self.parts[:, tokens])

    def head(self):
        """(vocab_size, C): a token is predicted by the same sum of rows that embeds it."""
        return self.add_parts(self.lm_head.weight, self.parts)

    def embed(self, tokens, dtype):
        return norm(self.sums_of_rows(tokens).to(dtype))

    def attention_inputs(self, tokens, T, dtype, past):
        """Those of speedrun, and where documents start, for the shifted keys."""
        starts = (tokens == EOT)[:, :, None, None]                              # (B, S, 1, 1)
        return *super().attention_inputs(tokens, T, dtype, past), starts

    def forward(self, idx, targets=None):
        """(logits, None) without targets; (None, loss) with them, as model.GPT's.

        The logits are the logarithms of probabilities.
        """
        x = self.hidden(idx)                                                    # (B, T, C)
        if targets is None:
            return self.add_copies(self.logits(x), x, idx), None

        # The head comes first: otherwise DDP would cut the compiled model inside of blocks.
        losses, loss = self.head_losses(x, targets)                             # (B, T), ()
        gains = self.gains_of_copies(losses, x, idx, targets)                   # (B, T)
        return None, loss - gains.sum() / (targets >= 0).sum().clamp(min=1)

    def head_losses_in_chunks(self, x, targets):
        if not self.vocabulary_sample or not torch.is_grad_enabled():
            return super().head_losses_in_chunks(x, targets)
        ids, places, counts = self.vocabulary_sample.choose(targets.flatten())
        losses, loss = chunked_cross_entropy(
            x.flatten(0, 1), self.sums_of_rows(ids), places, self.loss_chunk, self.softcap, counts)
        return losses.view_as(targets), loss

    def token_losses(self, idx, targets, positions):
        x = self.hidden(idx)
        losses = self.losses_at(x, targets, positions)                          # (B, T)
        return losses - self.gains_of_copies(losses, x, idx, targets)

    def next_logits(self, idx, past):
        x = self.hidden(idx, past)                                              # (B, T, C)
        logits = self.logits(x[:, -1:], past.once(self.head_in_matmul_dtype))
        return self.add_copies(logits, x, idx, past)[:, 0]

    def head_in_matmul_dtype(self):
        head = self.head()
        return head.to(matmul_dtype(head))      # autocast keeps only the casts of parameters

    def add_copies(self, logits, x, tokens, past=None):
        """The logarithms of the probabilities, float32 (B, n, V), of the last n tokens."""
        n = logits.size(1)
        shares, head_share = self.copies(x, tokens, past)
        shares, head_share = shares[:, -n:], head_share[:, -n:]

        probabilities = F.softmax(logits.float(), dim=2) * head_share[:, :, None]
        ids = tokens[:, None].expand_as(shares)                                 # (B, n, S)
        return probabilities.scatter_add(2, ids, shares).clamp(min=TINY).log()

    def gains_of_copies(self, losses, x, tokens, targets):
        """By how much copies lower each loss (B, T) of the head; 0 where the target is -1."""
        shares, head_share = self.copies(x, tokens)
        is_same = tokens[:, None, :] == targets[:, :, None]                     # (B, T, S)
        copied = (shares * is_same).sum(dim=2)                                  # (B, T)

        # The loss falls from -ln(p) to -ln(head_share p + copied).
        ratio = head_share + copied * losses.exp()
        return ratio.clamp(min=TINY).log() * (targets >= 0)

    def copies(self, x, tokens, past=None):
        """What the pointer returns for the last tokens, of which x (B, T, C) are hidden states."""
        # No gradient goes from the pointer into the rest of the model. With one, the head learns
        # less of the tokens that can be copied, and the loss of both is higher.
        x = x.detach()
        T = x.size(1)

        # As in `hidden` the dtypes are those of x. Autocast would norm in float32 on a GPU.
        with torch.autocast(x.device.type, enabled=False):
            e = self.embed(tokens[:, -T:], x.dtype).detach()    # once more the first block's input
            return self.pointer(x, e, tokens, past)

    def flops_per_token(self, sequence_length):
        # The pointer's scores are one product, (T, C) by (C, T). Attention has two in each layer.
        scores = 6 * self.config.n_embd * sequence_length
        return super().flops_per_token(sequence_length) + scores

    def configure_optimizers(self, max_lr, weight_decay, dtype, tokens):
        """[Adam, Muon]. `tokens`: those of the largest batch. `dtype`: of Muon's iteration."""
        # The tied embedding and the parts have half of the learning rate of speedrun's head.
        head_lr = 0.05 * max_lr * 768 / self.config.n_embd

        # A token that does not occur in a batch gets a gradient, too: its probability, tiny but of
        # the same sign in each batch, which Adam would scale up to a full step. One occurrence is
        # a gradient of about 1 / tokens. With an eps of a tenth of that, steps by tiny gradients
        # are tiny.
        head_eps = 0.1 / tokens

        tables = [self.transformer.wte.weight, self.transformer.part.weight]
        groups = [{"params": tables, "lr": head_lr, "eps": head_eps}]

        # beta1 is 0.7, speedrun's is 0.9: a short run needs an average over fewer updates. Muon's
        # momentum (muon_momentum) is lower for the same reason.
        return self.adam_and_muon(groups, 0.7, max_lr, weight_decay, dtype)


# ---------------------------------------------------------------------- the recipe
# `config` is config.Config. The measurements behind the numbers are in docs/lab-notes.md.

def make_optimizers(model: FrontierGPT, config) -> list:
    return model.configure_optimizers(
        config.max_lr, config.weight_decay, speedrun.muon_dtype(config), config.total_batch_size)


def position_in_log(n: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, and between them linear in the logarithm of n."""
    position = math.log(n / low, high / low)
    return min(1.0, max(0.0, position))


def automatic(config) -> dict:
    """What "auto" means in --cooldown and --min_lr."""
    # 0 for a short run, 1 for a long one. A long run decays as the later records do, over 60% of
    # its tokens to a tenth of the rate; a short one as record 10 does, over 29% to 0.
    longness = position_in_log(config.max_steps, 110, 500)
    return {"cooldown": 0.29 + 0.31 * longness, "min_lr": 0.1 * longness * config.max_lr}


def progress_of(step: int, config) -> float:
    """The share of the run's tokens before the step, 0 to 1: its batch grows."""
    schedule = BatchSchedule(config.total_batch_size, config.max_steps, growing_batch(config))
    return schedule.progress(step)


def lr_scale(step: int, config) -> float:
    """speedrun's, by the share of the tokens."""
    return speedrun.warmup_and_cooldown(step, progress_of(step, config), config)


def muon_momentum(step: int, config) -> float:
    """From 0.80 to 0.85 in runs of up to 1,000 steps; to the later records' 0.95 from 3,000 on."""
    progress = progress_of(step, config)
    highest = 0.85 + 0.10 * position_in_log(config.max_steps, 1000, 3000)
    rising = speedrun.rising_momentum(progress, 0.80, highest)

    # Over the last tenth of the run it goes back to 0.85.
    falling = 0.85 + (highest - 0.85) * min(1.0, (1.0 - progress) / 0.1)
    return min(rising, falling)


def read_backwards(config, sequences: int, epoch: int) -> int:
    """How many sequences, the first ones of a run, are read from their end to their start.

    Both counts are in sequences: those of the run and those of an epoch.
    """
    # What the model learns of words, and of what stands near what, holds in both directions. And
    # what it has only read backwards is still new when it is read forwards: so two epochs gain 0.12
    # nats per token on Shakespeare, and 0.01 if both are read forwards (docs/lab-notes.md).
    #
    # A second epoch backwards raised the loss. Existing weights, which know the text's language
    # forwards, were not tried.
    if config.init != "scratch":
        return 0
    return min(epoch, max(0, sequences - epoch))


def look_at_text(text, schedule, model: FrontierGPT, config) -> None:
    """Sets how a small training text is read, and for which tokens the loss computes logits."""
    # Neither has been found to help a large text: there the sample costs 0.015 nats. And --overfit
    # learns one batch by heart.
    if text.total * text.T > SMALL_TEXT or config.overfit:
        return
    sequences = schedule.tokens_before(config.max_steps) // config.sequence_length
    text.backward = read_backwards(config, sequences, text.total)
    # On a CPU, not compiled. Of a smaller vocabulary than GPT-2's a sample would be too few tokens.
    if model.loss_chunk and config.vocab_size >= VOCAB_SIZE:
        model.vocabulary_sample = VocabularySample(text.occurrences(config.vocab_size), config.seed)


def before_step(model: FrontierGPT, step: int, loader) -> None:
    """Draws the sample of the vocabulary, if there is one."""
    if model.vocabulary_sample:
        model.vocabulary_sample.draw(step, loader.tokens_of_step(step))


# modded-nanogpt's records up to 2026, where they help at small sizes, and more (docs/recipes.md).
# 5,833 steps are 1.31B tokens, an estimate: record 10's, less what the later records save.
RECIPE = Recipe(
    FrontierGPT,
    make_optimizers,
    lr_scale=lr_scale,
    momentum=muon_momentum,
    batch_divisors=growing_batch,               # record 46
    look_at_text=look_at_text,
    before_step=before_step,
    # A preset wins over `defaults`, but not over `rates`: the presets' rates are for AdamW.
    defaults=dict(n_head=6, max_steps=5833, weight_decay=0.0, grad_clip=math.inf),
    rates=dict(max_lr=0.02, warmup_steps=0),
    own_flags=("cooldown",),
    automatic=automatic,
)
