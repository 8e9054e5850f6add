"""Language models trained with --recipe speedrun or frontier, for transformers. They read GPT-2's
tokens.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)

speedrun.py and frontier.py, in the project that has trained the model, explain its ideas.

Shapes: B sequences, T new tokens, C = n_embd, nh heads of size hs. S is T plus the tokens that are
already in the cache.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

EOT = 50256                     # <|endoftext|>, which begins a document

# What forward passes on to transformers' own loss function.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")

# What transformers calls the cache: "cache" from 5.24 on.
CACHE = "past_key_values"
if "cache" in CausalLMOutputWithPast.__dataclass_fields__:
    CACHE = "cache"


class SpeedrunConfig(PretrainedConfig):
    model_type = "speedrun"
    attribute_map = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
    }
    block_size: int = 1024          # longest sequence
    vocab_size: int = 50257         # tokens; there are logits only of these
    padded_vocab_size: int = 50304  # rows of the tables
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768

    bos_token_id: int = EOT
    eos_token_id: int = EOT
    tie_word_embeddings: bool = False


class FrontierConfig(SpeedrunConfig):
    model_type = "frontier"
    n_part: int = 23670             # rows of the table of parts


# ---------------------------------------------------------------------- blocks

def norm(x):
    """RMSNorm without a gain (arXiv:1910.07467)."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864): turns each pair (x_i, x_{i + hs/2}) by its angle.

    x is (B, nh, T, hs); cos and sin are (T, hs/2).
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class SpeedrunAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_q = nn.Linear(C, C, bias=False)
        self.c_k = nn.Linear(C, C, bias=False)
        self.c_v = nn.Linear(C, C, bias=False)
        self.c_proj = nn.Linear(C, C, bias=False)
        self.lamb = nn.Parameter(torch.tensor(0.5))
        self.n_head = config.n_head
        self.layer = layer

    def heads(self, x):
        """(B, T, C) -> (B, nh, T, hs)"""
        B, T, C = x.size()
        return x.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

    def forward(self, x, v1, rotary, starts, mask, past):
        """x (B, T, C) -> (B, T, C), and v1: the values of the first block, None in that block."""
        q = self.heads(self.c_q(x))
        k = self.heads(self.c_k(x))
        v = self.heads(self.c_v(x))

        # Value residual (arXiv:2410.17897).
        if v1 is None:
            v1 = v
        v = (1 - self.lamb) * v + self.lamb * v1

        # QK-norm (arXiv:2010.04245).
        q = rotate(norm(q), *rotary)
        k = rotate(norm(k), *rotary)

        if past is not None:
            k, v = past.update(k, v, self.layer)                                # (B, nh, S, hs)
        k = self.shift_keys(k, starts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)             # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2)), v1

    def shift_keys(self, k, starts):
        return k


class FrontierAttention(SpeedrunAttention):
    def shift_keys(self, k, starts):
        """Shifts the keys (B, nh, S, hs) of the second half of the heads by one position.

        A token has the key of the token before it, and zero where a document or the text starts.
        """
        first = self.n_head // 2
        shifted = F.pad(k[:, first:, :-1], (0, 0, 1, 0))
        shifted = shifted.masked_fill(starts[:, None, :, None], 0)
        return torch.cat((k[:, :first], shifted), dim=1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = nn.Linear(C, 4 * C, bias=False)
        self.c_proj = nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        # ReLU squared (arXiv:2109.08668).
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer, attention_class):
        super().__init__()
        self.attn = attention_class(config, layer)
        self.mlp = MLP(config)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, v1, x0, *attention_inputs):
        # A learned shortcut from the embedding x0.
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, v1 = self.attn(norm(x), v1, *attention_inputs)
        x = x + y
        x = x + self.mlp(norm(x))
        return x, v1


# ---------------------------------------------------------------------- the pointer

class Pointer(nn.Module):
    """The share of each prediction that copies a token of the context, and the head's share.

    (Pointer sentinel mixture models, arXiv:1609.07843.)
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_q = nn.Linear(C, C, bias=False)
        self.c_k = nn.Linear(C, C, bias=False)
        self.c_e = nn.Linear(C, C, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.sentinel = nn.Parameter(torch.zeros(C))
        self.sentinel_bias = nn.Parameter(torch.tensor(0.0))
        self.cache_layer = config.n_layer + 1

    def forward(self, x, e, starts, mask, past):
        """x and e (B, T, C) -> (B, T, S), which copies each of the S tokens, and (B, T).

        x are final hidden states, e embeddings. mask (B, T, S) is what each token sees.
        """
        q = norm(self.c_q(x))
        k = self.c_k(x)
        e = self.c_e(e)
        if past is not None:
            if len(past.layers) == self.cache_layer:
                past.layers.append(DynamicLayer())
            k, e = past.update(k[:, None], e[:, None], self.cache_layer)        # (B, 1, S, C)
            k, e = k[:, 0], e[:, 0]
        k = F.pad(k[:, :-1], (0, 0, 1, 0)).masked_fill(starts[:, :, None], 0)
        k = norm(k + e)                                                         # (B, S, C)

        C = x.size(2)
        scores = self.scale * (q @ k.mT).float() / C                            # (B, T, S)
        scores = scores.masked_fill(~mask, float("-inf"))
        sentinel = self.sentinel_bias + x.float() @ (self.sentinel.float() / C**0.5)
        total = torch.logaddexp(scores.logsumexp(dim=2), sentinel)              # (B, T)
        return torch.exp(scores - total[:, :, None]), torch.exp(sentinel - total)


# ---------------------------------------------------------------------- models

class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SpeedrunConfig
    Attention = SpeedrunAttention
    softcap = 30.0
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        blocks = [Block(config, layer, self.Attention) for layer in range(config.n_layer)]
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "h": nn.ModuleList(blocks),
        })
        self.add_tables(config)
        self.post_init()

    def add_tables(self, config):
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    def embed(self, tokens):
        """(B, T) -> (B, T, C)"""
        return norm(self.transformer.wte(tokens))

    def head(self, past):
        """(padded_vocab_size, C). `past` is the cache, or None."""
        return self.lm_head.weight

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=False,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        """Returns loss, logits (B, T, vocab_size) and the cache.

        input_ids (B, T) follow the tokens in the cache, which is called `cache` or
        `past_key_values`. attention_mask (B, S) is 0 for padding, at either end. If logits_to_keep
        is not 0, there are only the logits of so many last tokens.
        """
        past = past_key_values
        if cache is not None:
            past = cache
        if use_cache and past is None:
            past = DynamicCache()
        self.check_arguments(input_ids, past, kwargs)

        T = input_ids.size(1)
        tokens = self.all_tokens(input_ids, past)                               # (B, S)
        not_padding = self.not_padding(attention_mask, tokens)                  # (B, S)
        starts = self.starts(tokens, not_padding)                               # (B, S)
        mask = self.mask(not_padding, T)                                        # (B, 1, T, S)
        x = self.hidden(tokens, starts, mask, T, past)                          # (B, T, C)

        # The softcap (arXiv:2408.00118, section 2).
        z = F.linear(x[:, -logits_to_keep:], self.head(past))
        logits = self.softcap * torch.tanh(z.float() / self.softcap)
        logits = self.add_copies(logits, x, tokens, starts, mask, past)
        logits = logits[..., :self.config.vocab_size]           # the others stand for no token

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: past})

    def check_arguments(self, input_ids, past, others):
        """ValueError for what these models do not compute. `others`, {name: value}, are unknown."""
        for name, value in others.items():
            # None and False ask for nothing.
            if name not in LOSS_ARGUMENTS and value is not None and value is not False:
                raise ValueError(f"{name} has no meaning for this model: leave it out")
        if input_ids is None:
            raise ValueError("input_ids is missing")
        if past is not None and past.is_compileable:
            raise ValueError("a static cache cannot be used here: leave out cache_implementation")

    def add_copies(self, logits, x, tokens, starts, mask, past):
        return logits

    def starts(self, tokens, not_padding):
        """Where a document starts, or the text, after padding: bool (B, S)."""
        after_padding = F.pad(not_padding[:, :-1], (1, 0)) == 0
        return (tokens == EOT) | after_padding

    def hidden(self, tokens, starts, mask, T, past):
        """The final hidden states (B, T, C) of the last T tokens."""
        x = self.embed(tokens[:, -T:])                                          # (B, T, C)
        x0 = x
        v1 = None
        rotary = self.rotary_tables(tokens, T, x.dtype)
        for block in self.transformer.h:
            x, v1 = block(x, v1, x0, rotary, starts, mask, past)
        return norm(x)

    def all_tokens(self, input_ids, past):
        """Appends input_ids (B, T) to the tokens in the cache -> (B, S).

        ValueError if they are longer than block_size.
        """
        tokens = input_ids
        if past is not None:
            # They are one more layer of the cache, with one head of size 1.
            if len(past.layers) == self.config.n_layer:
                past.layers.append(DynamicLayer())
            ids = input_ids[:, None, :, None]
            keys, values = past.update(ids, ids, self.config.n_layer)
            tokens = keys.flatten(1)

        S, block_size = tokens.size(1), self.config.block_size
        if S > block_size:
            raise ValueError(f"{S} tokens are longer than block_size {block_size}")
        return tokens

    def not_padding(self, attention_mask, tokens):
        """The attention_mask (B, S); where there is none, nothing is padding."""
        if attention_mask is None:
            return torch.ones_like(tokens)
        if attention_mask.shape != tokens.shape:
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)} (expected "
                             f"{tuple(tokens.shape)}, with the tokens in the cache)")
        return attention_mask

    def rotary_tables(self, tokens, T, dtype):
        """Cosines and sines (T, hs/2) of the last T positions of tokens (B, S)."""
        S = tokens.size(1)
        hs = self.config.n_embd // self.config.n_head
        positions = torch.arange(S - T, S, device=tokens.device)
        frequencies = 10000.0 ** -(torch.arange(0, hs, 2, device=tokens.device) / hs)
        angles = torch.outer(positions, frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def mask(self, not_padding, T):
        """Which tokens the last T of S see, bool (B, 1, T, S)."""
        k = torch.arange(not_padding.size(1), device=not_padding.device)        # (S,)
        q = k[-T:, None]                                                        # (T, 1)
        sees = (k <= q) & (not_padding[:, None] != 0)                           # (B, T, S)

        # Padding sees itself: of a token that sees nothing, attention would be nan.
        return (sees | (k == q))[:, None]

    def get_input_embeddings(self):
        return self.transformer.wte

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        # frontier's rows for stems and forms depend on which text each token is.
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(f"the tokens of this model are GPT-2's: it keeps its vocabulary of "
                             f"{self.config.vocab_size}, and cannot have one of {new_num_tokens}")
        return self.get_input_embeddings()


class FrontierForCausalLM(SpeedrunForCausalLM):
    """Speedrun with shifted keys, a head that is tied to the embedding, and a pointer.

    A token's embedding is the sum of its own row and of two that it shares with other tokens: those
    of its parts, which are its stem and its form (a space before, capitals, ending).
    """
    config_class = FrontierConfig
    Attention = FrontierAttention

    def add_tables(self, config):
        V, C = config.padded_vocab_size, config.n_embd
        self.transformer["part"] = nn.Embedding(config.n_part, C)
        self.register_buffer("parts", torch.zeros((2, V), dtype=torch.int64))
        self.pointer = Pointer(config)

    def embed(self, tokens):
        """(B, T) -> (B, T, C): the sums of each token's row and those of its parts, normed."""
        parts = self.transformer.part(self.parts[:, tokens]).sum(0)
        return norm(self.transformer.wte(tokens) + parts)

    def add_copies(self, logits, x, tokens, starts, mask, past):
        """Logits (B, n, V) of the last n tokens -> the logarithms of the probabilities.

        A token is predicted in two ways: by the head, and as a copy of a token of the context.
        """
        T, n = x.size(1), logits.size(1)
        e = self.embed(tokens[:, -T:])
        other = tokens[:, None, :] != tokens[:, -T:, None]                      # (B, T, S)
        shares, head_share = self.pointer(x, e, starts, mask[:, 0] & other, past)
        shares, head_share = shares[:, -n:], head_share[:, -n:]
        probabilities = F.softmax(logits, dim=2) * head_share[:, :, None]
        ids = tokens[:, None].expand_as(shares)                                 # (B, n, S)
        return probabilities.scatter_add(2, ids, shares).clamp(min=1e-37).log()

    def head(self, past):
        """(padded_vocab_size, C). `past` is the cache, or None."""
        # To add three rows for each token of the vocabulary takes longer than all blocks take for a
        # new token. So a generation keeps the head in its cache, as it keeps the keys.
        keeps = past is not None and not torch.is_grad_enabled()
        if keeps and hasattr(past, "head"):
            return past.head

        head = self.transformer.wte.weight + self.transformer.part(self.parts).sum(0)
        if keeps:
            past.head = head
        return head
