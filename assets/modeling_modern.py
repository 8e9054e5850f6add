"""Language models trained with --recipe speedrun or frontier, for transformers. They read GPT-2's tokens.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)

Shapes: B sequences, T new tokens, S tokens with those in the cache, C = n_embd, nh heads of size hs.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

EOT = 50256                     # <|endoftext|>, which begins a document


class SpeedrunConfig(PretrainedConfig):
    model_type = "speedrun"
    attribute_map = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd",
                     "max_position_embeddings": "block_size"}
    block_size: int = 1024          # longest sequence
    vocab_size: int = 50257         # tokens; there are logits only of these
    padded_vocab_size: int = 50304  # rows of the tables
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    window: int = 0                 # tokens it attends to, itself included, in its document; 0: all before
    bos_token_id: int = EOT
    eos_token_id: int = EOT
    tie_word_embeddings: bool = False


class FrontierConfig(SpeedrunConfig):
    model_type = "frontier"
    n_part: int = 23670             # rows of the table of parts


def norm(x):
    """RMSNorm without a gain (arXiv:1910.07467)."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864): x (B, nh, T, hs); cos, sin (T, hs/2) rotate (i, i + hs/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class SpeedrunAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.lamb = nn.Parameter(torch.tensor(0.5))
        self.n_head, self.layer = config.n_head, layer

    def forward(self, x, v1, rotary, begins, seen, past):
        """x (B, T, C); v1 (B, nh, T, hs): the first block's values, None in that block -> (B, T, C), v1."""
        B, T, C = x.size()
        q, k, v = (linear(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)      # (B, nh, T, hs)
                   for linear in (self.c_q, self.c_k, self.c_v))
        v1 = v if v1 is None else v1
        v = (1 - self.lamb) * v + self.lamb * v1                    # value residual (arXiv:2410.17897)
        q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)   # QK-norm (arXiv:2010.04245)
        if past is not None:
            k, v = past.update(k, v, self.layer)                                            # (B, nh, S, hs)
        y = F.scaled_dot_product_attention(q, self.shift(k, begins), v, attn_mask=seen)     # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), v1

    def shift(self, k, begins):
        return k


class FrontierAttention(SpeedrunAttention):
    def shift(self, k, begins):
        """Shifts the keys of the second half of the heads by one position: the key of a token is that of the
        token before it, and zero at the first token of a document or of the text."""
        n = self.n_head // 2
        late = F.pad(k[:, n:, :-1], (0, 0, 1, 0)).masked_fill(begins[:, None, :, None], 0)
        return torch.cat((k[:, :n], late), dim=1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())           # ReLU squared (arXiv:2109.08668)


class SpeedrunBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn, self.mlp = SpeedrunAttention(config, layer), MLP(config)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, v1, x0, *context):
        x = self.lambdas[0] * x + self.lambdas[1] * x0              # learned shortcut from the embedding
        y, v1 = self.attn(norm(x), v1, *context)
        x = x + y
        return x + self.mlp(norm(x)), v1


class FrontierBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = FrontierAttention(config, layer)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, v1, x0, *context):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        y, v1 = self.attn(norm(x), v1, *context)
        x = x + y
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square()), v1


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = SpeedrunConfig
    Block, softcap = SpeedrunBlock, 30.0
    _no_split_modules = ["SpeedrunBlock", "FrontierBlock"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "h": nn.ModuleList(self.Block(config, layer) for layer in range(config.n_layer)),
        })
        self.add_tables(config)
        self.post_init()

    def add_tables(self, config):
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    def embed(self, tokens, begins, T):
        """The last T of tokens (B, S) -> (B, T, C)."""
        return norm(self.transformer.wte(tokens[:, -T:]))

    def head(self):
        """(vocab_size, C)"""
        return self.lm_head.weight[:self.config.vocab_size]

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=False,
                logits_to_keep=0, **kwargs):
        """input_ids (B, T) follow the tokens in the cache. attention_mask (B, S): 0 for padding, at either
        end. Returns loss, logits (B, T, vocab_size), of the last `logits_to_keep` tokens if that is not 0,
        and the cache."""
        past = DynamicCache() if use_cache and past_key_values is None else past_key_values
        tokens, T = self.all_tokens(input_ids, past), input_ids.size(1)                     # (B, S)
        if tokens.size(1) > self.config.block_size:
            raise ValueError(f"{tokens.size(1)} tokens are longer than block_size {self.config.block_size}")
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask        # no padding
        begins = (tokens == EOT) | (F.pad(real[:, :-1], (1, 0)) == 0)       # documents, and the text
        x = x0 = self.embed(tokens, begins, T)                                              # (B, T, C)
        context = self.rotary_tables(tokens, T, x.dtype), begins, self.seen(begins, real, T), past
        v1 = None
        for block in self.transformer.h:
            x, v1 = block(x, v1, x0, *context)
        z = F.linear(norm(x[:, -logits_to_keep:]), self.head())
        logits = self.softcap * torch.tanh(z.float() / self.softcap)                # arXiv:2408.00118
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)

    def all_tokens(self, input_ids, past):
        """Appends input_ids (B, T) to the tokens in the cache -> (B, S). They are one more layer of it, with
        one head of size 1."""
        if past is None:
            return input_ids
        if len(past.layers) == self.config.n_layer:
            past.layers.append(DynamicLayer())
        ids = input_ids[:, None, :, None]
        return past.update(ids, ids, self.config.n_layer)[0].flatten(1)

    def rotary_tables(self, tokens, T, dtype):
        """Cosines and sines (T, hs/2) of the last T positions of tokens (B, S)."""
        S, hs = tokens.size(1), self.config.n_embd // self.config.n_head
        positions = torch.arange(S - T, S, device=tokens.device)
        frequencies = 10000.0 ** -(torch.arange(0, hs, 2, device=tokens.device) / hs)
        angles = torch.outer(positions, frequencies)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def seen(self, begins, real, T):
        """What the last T of S tokens attend to, bool (B, 1, T, S): themselves, and what is no padding before
        them; with a window, only its tokens of their document."""
        k = torch.arange(begins.size(1), device=begins.device)
        q, document = k[-T:, None], begins.cumsum(1)
        seen = (k <= q) & (real[:, None] != 0)                                              # (B, T, S)
        if self.config.window:
            seen &= (q - k < self.config.window) & (document[:, -T:, None] == document[:, None])
        return (seen | (k == q))[:, None]

    def get_input_embeddings(self):
        return self.transformer.wte


class FrontierForCausalLM(SpeedrunForCausalLM):
    """A bigram table, and a head that is tied to the embedding; in both, tokens of one stem, and of one
    form (a space before, capitals, ending), share a row."""
    config_class = FrontierConfig
    Block, softcap = FrontierBlock, 15.0

    def add_tables(self, config):
        self.transformer["bigram"] = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.transformer["part"] = nn.Embedding(config.n_part, config.n_embd)
        self.register_buffer("parts", torch.zeros((2, config.padded_vocab_size), dtype=torch.int64))

    def embed(self, tokens, begins, T):
        """A token's row plus those of its parts, and then that of the pair with the token before it. At the
        beginning of a document or of the text that counts as <|endoftext|>."""
        before = F.pad(tokens[:, :-1], (1, 0)).masked_fill(begins, EOT)[:, -T:]
        tokens = tokens[:, -T:]
        pairs = (36313 * tokens ^ 27191 * before) % self.config.padded_vocab_size
        x = norm(self.transformer.wte(tokens) + self.transformer.part(self.parts[:, tokens]).sum(0))
        return norm(x + self.transformer.bigram(pairs))

    def head(self):
        rows = self.config.vocab_size
        return self.transformer.wte.weight[:rows] + self.transformer.part(self.parts[:, :rows]).sum(0)
