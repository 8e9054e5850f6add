"""GPT-2 (Radford et al. 2019): architecture, loss, generation, and AdamW as for GPT-3.

    from model import GPT, GPTConfig
    from presets import GPT2_SIZES
    from recipes import load_model

    model = GPT(GPTConfig())                        # new weights
    model = GPT(GPTConfig(**GPT2_SIZES["gpt2-xl"]))
    model = GPT.from_pretrained("gpt2")             # the published weights, or those of a folder
    model = load_model("log/checkpoint_000250.pt")  # any model of this project or its peers

    logits, _ = model(idx)                          # idx: int64 (B, T)
    _, loss = model(idx, targets)                   # a target of -1 is ignored
    idx = model.generate(idx, max_new_tokens=50)

The file goes from the parts to the whole: layers, attention, blocks, then LanguageModel, which has
what all models of this project share (loss and generation), and last GPT, which is one of them.

Shapes: B sequences, T tokens, C = n_embd, nh heads of size hs = C / nh. S is T plus the tokens that
are already in the cache; in training S = T.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from runtime.loss import chunked_cross_entropy
from runtime.matmul import linear, matmul_dtype
from runtime.tokenizer import VOCAB_SIZE

# The choices of --attention: the faster of torch's kernels and the formula of the paper; or the
# formula.
ATTENTION = ("auto", "naive")


@dataclass
class GPTConfig:
    block_size: int = 1024      # longest sequence

    # 50,000 merges, 256 bytes and <|endoftext|>. train_gpt2.py pads them to 50304, a multiple of
    # 128, because GPUs multiply matrices of such sizes faster. The 47 padding ids are in the
    # softmax, but never a target, and sample_token never draws them.
    vocab_size: int = 50257

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    gelu: str = "tanh"          # nn.GELU's `approximate`; "none" is the exact GELU, nanoGPT's


# ---------------------------------------------------------------------- layers
# They are torch's, but draw no random numbers when they are made, which init_weights of the model
# would draw once more.

class Linear(nn.Linear):
    """nn.Linear without random weights."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        # This is F.linear, which for few rows on a CPU, as in generation, would use one core only.
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding without random rows."""

    def reset_parameters(self):
        pass


def head_size(config) -> int:
    """hs, the width of one attention head. ValueError if it is no whole number."""
    C, nh = config.n_embd, config.n_head
    if C % nh != 0:
        raise ValueError(f"n_embd {C} must be divisible by n_head {nh}")
    return C // nh


# ---------------------------------------------------------------------- attention

def attention(q, k, v, kernel="auto"):
    """softmax(q k^T / sqrt(hs)) v: q (B, T, nh, hs), k and v (B, S, nh, hs) -> (B, T, nh, hs).

    Each token sees itself and all before it. `kernel` is one of ATTENTION.
    """
    # torch wants the heads before the tokens: (B, nh, T, hs) and (B, nh, S, hs).
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    T, S = q.size(2), k.size(2)

    # If T is not S, there is a cache and T is 1: the newest token sees all others, without a
    # mask. (To torch.export and torch.jit.trace a size is no plain number, and T == S no bool.)
    is_causal = bool(T == S)
    assert is_causal or T == 1

    # On a CPU in bfloat16 the formula is faster than torch's kernel, while there are few scores
    # (docs/speed.md).
    on_cpu_in_bfloat16 = q.device.type == "cpu" and q.dtype == torch.bfloat16
    if kernel == "naive" or (on_cpu_in_bfloat16 and S <= 512):
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
    kernel = "auto"         # one of ATTENTION; LanguageModel.use_attention sets it

    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_attn = Linear(C, 3 * C)          # query, key, value of all heads
        self.c_proj = Linear(C, C)
        self.n_head = config.n_head
        self.layer = layer                      # the number of the block, from 0 on

    def forward(self, x, past=None):
        B, T, C = x.size()
        hs = C // self.n_head
        q, k, v = self.c_attn(x).split(C, dim=2)                                # 3 times (B, T, C)
        q = q.view(B, T, self.n_head, hs)                                       # (B, T, nh, hs)
        k = k.view(B, T, self.n_head, hs)
        v = v.view(B, T, self.n_head, hs)

        # Only generation has a cache, `past`, a KVCache (below): the keys and values so far.
        if past is not None:
            k = past.append(f"k{self.layer}", k)                                # (B, S, nh, hs)
            v = past.append(f"v{self.layer}", v)

        y = attention(q, k, v, self.kernel)                                     # (B, T, nh, hs)
        return self.c_proj(y.reshape(B, T, C))


# ---------------------------------------------------------------------- blocks

class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose result has the dtype of its input: autocast would make it float32."""

    def forward(self, x):
        # The matrix product that follows would round it in any case. But on several GPUs DDP cuts
        # the compiled model just there, and would store it in float32.
        return super().forward(x).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.c_fc = Linear(C, 4 * C)
        self.gelu = nn.GELU(approximate=config.gelu)                            # arXiv:1606.08415
        self.c_proj = Linear(4 * C, C)

    def forward(self, x):
        x = self.c_fc(x)                                                        # (B, T, 4 C)

        # In a compiled model the backward computes GELU again, so that its result need not be kept:
        # at 124M, 64 x 1024 tokens take 22 GiB instead of 27, for 3% more memory traffic.
        if torch.compiler.is_compiling():
            x = checkpoint(self.gelu, x, use_reentrant=False)
        else:
            x = self.gelu(x)
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        x = x + self.attn(self.ln_1(x), past)
        x = x + self.mlp(self.ln_2(x))
        return x


# ---------------------------------------------------------------------- generation

class KVCache:
    """The tokens so far (B, S), and the keys and values that each layer has computed for them.

    Generation appends the whole prompt at once, and then one token at a time, `room` in all.
    """

    def __init__(self, room: int):
        self.room = room
        self.tensors = {}       # (B, room, ...) each, of which the first lengths[name] are in use
        self.lengths = {}

    def append(self, name: str, new: Tensor) -> Tensor:
        """Appends `new` (B, T, ...) to the tensor called `name`. Returns all of it (B, S, ...)."""
        B, T, *rest = new.shape
        if name not in self.tensors:
            self.tensors[name] = new.new_empty(B, self.room, *rest)
            self.lengths[name] = 0

        S = self.lengths[name] + T
        self.tensors[name][:, S - T:S] = new
        self.lengths[name] = S
        return self.tensors[name][:, :S]


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


# ---------------------------------------------------------------------- what all models share

class LanguageModel(nn.Module):
    """Loss and generation from a model's hidden states.

    A subclass has `config`, `lm_head`, and `hidden(idx, past=None)`: the final hidden states (B, T,
    C) of the tokens idx (B, T), which follow those in the KVCache `past`.
    """
    recipe = ""             # the name of its recipe, which checkpoints and exports carry
    lookup_tables = ()      # names of the embeddings that are only looked up, never multiplied
    computed_tables = ()    # names of buffers that an export stores and a checkpoint does not
    softcap = 0.0           # if c > 0, the logits are c tanh(y / c), where y is the head's output

    # How many vectors of width n_embd a block keeps of each token for its backward, compiled. The
    # first guess of the micro-batch that fits into a GPU's memory is made with it.
    kept_vectors = 0.0

    # How many blocks' gradients several GPUs send at a time (ddp_options in runtime/ranks.py).
    blocks_per_bucket = 1

    # How to compute, which changes no result but by rounding. train_gpt2.py sets these.
    loss_chunk = 0          # how many tokens' logits training holds in memory at a time; 0: all
    recompute = False       # compute each block again in the backward, to keep less in memory

    # A runtime.loss.VocabularySample, if training on a CPU computes the logits of a sample of the
    # tokens only, which changes a loss by noise. Evaluations compute all. frontier.py sets it.
    vocabulary_sample = None

    def use_attention(self, kernel: str) -> None:
        """Computes attention by this kernel, one of ATTENTION, from now on."""
        for block in self.transformer.h:
            block.attn.kernel = kernel

    def head(self, ids: Tensor | None = None) -> Tensor:
        """The matrix (vocab_size, C) that turns hidden states into logits, or its rows `ids`."""
        if ids is None:
            return self.lm_head.weight
        return F.embedding(ids, self.lm_head.weight)

    def logits(self, x: Tensor, head: Tensor | None = None) -> Tensor:
        """x (..., C) -> (..., vocab_size). `head` is what self.head() returns, if it is known."""
        if head is None:
            head = self.head()
        y = linear(x, head)
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
            return self.add_copies(self.logits(x), x, idx), None                # (B, T, vocab_size)

        # The head comes first: otherwise DDP would cut a compiled frontier inside of blocks.
        losses, loss = self.head_losses(x.flatten(0, 1), targets.flatten())     # (B T), ()
        gains = self.gains_of_copies(losses.view_as(targets), x, idx, targets)  # (B, T)
        return None, loss - gains.sum() / (targets >= 0).sum().clamp(min=1)

    def head_losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The head's losses for x (N, C) and targets (N,): (N,), without gradient, and the mean."""
        # The logits are not returned: so the chunks below need not keep them, and torch.compile can
        # compute the losses without storing them in float32.
        if self.loss_chunk:
            ids, counts = None, None
            if self.vocabulary_sample and torch.is_grad_enabled():
                ids, targets, counts = self.vocabulary_sample.choose(targets)
            return chunked_cross_entropy(
                x, self.head(ids), targets, self.loss_chunk, self.softcap, counts)

        losses = F.cross_entropy(
            self.logits(x).float(), targets, ignore_index=-1, reduction="none")
        return losses.detach(), losses.sum() / (targets >= 0).sum()

    def add_copies(
        self, logits: Tensor, x: Tensor, idx: Tensor, past: KVCache | None = None
    ) -> Tensor:
        """The logits (B, n, vocab_size) of the last n tokens, here unchanged.

        frontier, which can also copy a token of idx (B, S), gives the logarithms of probabilities.
        x (B, T, C) are the hidden states of the last T tokens.
        """
        return logits

    def gains_of_copies(self, losses: Tensor, x: Tensor, idx: Tensor, targets: Tensor) -> Tensor:
        """By how much copies lower the head's losses, (B, T), in nats: here by nothing."""
        return torch.zeros_like(losses)

    def begin_step(self, step: int, loader) -> None:
        """Before each training step: draws the sample of the vocabulary, if there is one."""
        if self.vocabulary_sample:
            self.vocabulary_sample.draw(step, loader.tokens_of_step(step))

    def run_block(self, block: nn.Module, *args):
        """block(*args). With `recompute` the backward computes it again (arXiv:1604.06174)."""
        if self.recompute and torch.is_grad_enabled():
            # No block draws random numbers. So no generator's state has to be kept for it.
            return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return block(*args)

    def before_compile(self) -> None:
        """Tells torch.compile what it has to know about a model of this kind."""

    def token_losses(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Cross-entropy (nats) of each token, float32 (B, T), and 0 where the target is -1.

        `positions`, int64 (n,), are the indices of the targets >= 0 among all B T. Logits are
        computed only there. The caller finds the positions on the CPU, because torch.nonzero on a
        GPU would make the CPU wait for their number.
        """
        x = self.hidden(idx)                                                    # (B, T, C)
        logits = self.logits(x.flatten(0, 1)[positions]).float()                # (n, vocab_size)
        losses = F.cross_entropy(logits, targets.flatten()[positions], reduction="none")     # (n,)

        zeros = torch.zeros(idx.numel(), device=idx.device)
        losses = zeros.scatter(0, positions, losses).view_as(idx)               # (B, T)
        return losses - self.gains_of_copies(losses, x, idx, targets)

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

        # The head is cast to autocast's dtype once. Autocast keeps only the casts of parameters: a
        # head that is computed, as frontier's is, would be cast again for each token.
        head = self.head()
        head = head.to(matmul_dtype(head))

        past = KVCache(min(idx.size(1) + max_new_tokens, block_size))
        for i in range(max_new_tokens):
            context = idx[:, -block_size:]                                      # (B, S)
            if idx.size(1) > block_size:
                # The position of each token changes with every new one, so that no key of the cache
                # can be used again.
                past = None
                x = self.hidden(context)                                        # (B, block_size, C)
            elif i == 0:
                x = self.hidden(idx, past)                                      # (B, T, C)
            else:
                x = self.hidden(idx[:, -1:], past)                              # (B, 1, C)

            logits = self.logits(x[:, -1:], head)                               # (B, 1, vocab_size)
            logits = self.add_copies(logits, x, context, past)
            logits = logits[:, 0].float()                                       # (B, vocab_size)
            new = sample_token(logits, temperature, top_k, generator)           # (B, 1)
            idx = torch.cat((idx, new), dim=1)
            yield new

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


# ---------------------------------------------------------------------- GPT-2

class GPT(LanguageModel):
    """Pre-norm blocks, learned positions, GELU, biases everywhere, a head tied to the embedding.

    There is no dropout: model.train() and model.eval() would change nothing.
    """
    # What LanguageModel and the code that saves a model ask of each class.
    Config = GPTConfig
    recipe = "gpt2"
    lookup_tables = ("wpe",)            # wte is the head, too

    # Its input, the first norm, q, k, v, the output of attention, the residual stream and the
    # second norm; and 4 of the hidden layer, whose GELU is computed again. The rest are statistics
    # of the norms and of attention.
    kept_vectors = 12.2

    def __init__(self, config):
        super().__init__()
        head_size(config)               # ValueError if n_embd is not divisible by n_head
        self.config = config
        V, C = config.vocab_size, config.n_embd
        blocks = [Block(config, layer) for layer in range(config.n_layer)]
        self.transformer = nn.ModuleDict({
            "wte": Embedding(V, C),
            "wpe": Embedding(config.block_size, C),
            "h": nn.ModuleList(blocks),
            "ln_f": LayerNorm(C),
        })

        # The head's weight is the embedding's (arXiv:1608.05859). On "meta" the layer's own weight,
        # which is replaced at once, takes no memory.
        self.lm_head = Linear(C, V, bias=False, device="meta")
        self.lm_head.weight = self.transformer.wte.weight

        # runtime/weights.py makes the whole model on "meta", and then loads its weights.
        if not self.transformer.wte.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Draws all weights as nanoGPT does. OpenAI's code draws wpe with a deviation of 0.01."""
        # Each block adds the results of two projections, c_proj, to the residual stream. Their
        # standard deviation is smaller, so that the stream does not grow with the number of blocks
        # (GPT-2's paper, section 2.3).
        projection_std = 0.02 / math.sqrt(2 * self.config.n_layer)

        for name, p in self.named_parameters():
            if ".ln_" in name:
                continue            # nn.LayerNorm itself has set its gains to 1, its biases to 0
            elif name.endswith(".bias"):
                p.zero_()
            elif name.endswith("c_proj.weight"):
                p.normal_(0.0, projection_std)
            elif name.endswith(("wte.weight", "wpe.weight", "c_attn.weight", "c_fc.weight")):
                p.normal_(0.0, 0.02)
            else:
                raise AssertionError(f"no initialisation for {name}")

    def hidden(self, idx, past=None):
        """Final hidden states (B, T, C) of the tokens idx (B, T), which follow those in `past`."""
        B, T = idx.size()
        S = T
        if past is not None:
            S = past.append("tokens", idx).size(1)

        positions = torch.arange(S - T, S, device=idx.device)                   # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)         # (B, T, C)

        # Under bfloat16 autocast the residual stream is bfloat16, too, as in llm.c: in float32 it
        # would be 14% of a step's memory traffic. It costs nothing that was measured: 60 losses of
        # a small model stay within 4e-4 of build-nanogpt's, whose stream is float32
        # (docs/lab-notes.md). Under float16 autocast it stays in float32, because numbers above
        # 65504 would overflow.
        if matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()

        # run_block (of LanguageModel) calls the block; with --recompute the backward computes it
        # again.
        for block in self.transformer.h:
            x = self.run_block(block, x, past)
        return self.transformer.ln_f(x)

    def configure_optimizers(self, max_lr, weight_decay, betas=(0.9, 0.95), eps=1e-8):
        """A list of one AdamW (arXiv:1711.05101), whose fused kernel updates all at once."""
        # Matrices and embeddings decay. Biases and the gains of LayerNorm do not.
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=max_lr, betas=betas, eps=eps, fused=True)]

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "GPT":
        """A GPT-2 of the Hugging Face hub, such as "gpt2-xl", or of a folder in its format."""
        # Imported here, so that `import model` alone stays small; save_pretrained does so, too.
        from runtime.huggingface import from_huggingface

        return from_huggingface(source, {"gpt2": GPT})
