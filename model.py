"""GPT-2 as published (Radford et al. 2019): architecture, initialisation, optimizer; and loading any model.

    from model import GPT, GPTConfig, load_model
    model = GPT.from_pretrained("gpt2")         # or a folder in the Hugging Face format
    model = load_model("log/checkpoint_000250.pt")      # or "log", its newest checkpoint, or "log/best"
    python model.py export log/checkpoint_019073.pt exported/   for transformers, lm-evaluation-harness, ...
"""
# first, because it refuses an old Python in one line
from runtime.cli import FlagParser, UserError, run_command

import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from frontier import FrontierGPT
from runtime.files import writable
from runtime.huggingface import EXPORTED, EXPORTED_BY, MODELING, from_huggingface, read_json
from runtime.kernels import Embedding, Linear, by_formula, formula, matmul_dtype, sdpa
from runtime.language_model import KVCache, LanguageModel
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint
from speedrun import SpeedrunGPT

GPT2_SIZES = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),            # 124,439,808 parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),    # 354,823,168
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),     # 774,030,080
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),        # 1,557,611,200
}


@dataclass
class GPTConfig:
    block_size: int = 1024      # longest sequence
    vocab_size: int = 50257     # 50,000 merges + 256 bytes + <|endoftext|>; training pads it to 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    gelu: str = "tanh"          # GPT-2's approximation; "none": the exact GELU, which nanoGPT trains with


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)          # query, key, value of all heads
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.n_head, self.layer = config.n_head, layer

    def forward(self, x, kernel="auto", past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head)                         # (B, T, nh, hs)
        k = k.view(B, T, self.n_head, C // self.n_head)
        v = v.view(B, T, self.n_head, C // self.n_head)
        if past:
            k, v = past.add(f"k{self.layer}", k), past.add(f"v{self.layer}", v)     # (B, t + T, nh, hs)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                        # (B, nh, T or t + T, hs)
        is_causal = T == k.size(2)      # after the tokens of a cache the one new token sees them all
        if by_formula(kernel, q, k):    # short sequences on a CPU in bfloat16
            y = formula(q, k, v, is_causal)
        else:
            with sdpa(kernel):          # the kernel's name; 'auto': torch's choice
                y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))                  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)
        self.gelu = nn.GELU(approximate=config.gelu)                            # arXiv:1606.08415

    def forward(self, x):
        x = self.c_fc(x)                                                        # (B, T, 4 C)
        # a compiled backward computes GELU again instead of reading it: it is pointwise
        again = torch.compiler.is_compiling()
        return self.c_proj(checkpoint(self.gelu, x, use_reentrant=False) if again else self.gelu(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, kernel="auto", past=None):
        x = x + self.attn(self.ln_1(x), kernel, past)
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """GPT-2: pre-norm blocks, learned positions, tanh GELU, biases everywhere, head tied to wte."""
    Config = GPTConfig
    recipe = "gpt2"
    looked_up = ("wpe",)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=Embedding(config.vocab_size, config.n_embd),
            wpe=Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.transformer.wte.weight                       # arXiv:1608.05859
        if not self.lm_head.weight.is_meta:     # there normal_ draws nothing, but imports torch's compiler
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """normal(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer) (GPT-2 paper, section 2.3)."""
        for name, p in self.named_parameters():
            if ".ln_" in name:
                continue                        # nn.LayerNorm's own gains of 1 and biases of 0
            if name.endswith(".bias"):
                p.zero_()
            elif name.endswith("c_proj.weight"):
                p.normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layer))
            elif name.endswith(("wte.weight", "wpe.weight", "c_attn.weight", "c_fc.weight")):
                p.normal_(0.0, 0.02)
            else:
                raise AssertionError(f"no initialisation for {name}")

    def hidden(self, idx: Tensor, past: KVCache | None = None) -> Tensor:
        """Final hidden states (B, T, C) of idx (B, T), which follows the tokens in the KVCache `past`."""
        tokens = past.add("tokens", idx) if past else idx                       # (B, S)
        pos = torch.arange(tokens.size(1) - idx.size(1), tokens.size(1), device=idx.device)     # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)               # (B, T, C)
        # The residual stream is bfloat16 where the matmuls are, as in llm.c and modded-nanogpt: in fp32 it is
        # 14% of a step's memory traffic. LayerNorm still computes in fp32. Not float16: its maximum is 65504.
        if matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()
        for block in self.transformer.h:
            x = self.run_block(block, x, self.kernel, past)
        return self.transformer.ln_f(x)

    def configure_optimizers(self, max_lr: float, weight_decay: float, betas=(0.9, 0.95), eps=1e-8) -> list:
        """[AdamW] (arXiv:1711.05101) with weight decay on matrices and embeddings, not gains and biases."""
        params = list(self.named_parameters())
        groups = [{"params": [(n, p) for n, p in params if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [(n, p) for n, p in params if p.dim() < 2], "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=max_lr, betas=betas, eps=eps,
                                  fused=not self.lm_head.weight.is_mps)]      # there it ignores found_inf

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "GPT":
        """A name of GPT2_SIZES or of another GPT-2 on the Hugging Face hub, or a folder; else UserError."""
        return from_huggingface(source, {"gpt2": GPT})


MODELS = {"gpt2": GPT, "speedrun": SpeedrunGPT, "frontier": FrontierGPT}         # by recipe


def fresh_model(config) -> LanguageModel:
    """The model of config.recipe with fresh weights. `config` has the fields of the model's own, and more."""
    cls = MODELS[config.recipe]
    return cls(cls.Config(**{f.name: getattr(config, f.name) for f in fields(cls.Config)
                             if hasattr(config, f.name)}))


def load_model(source: str | Path) -> LanguageModel:
    """A model from this project's checkpoint, a run's folder OUT (its newest checkpoint) or OUT/best (its
    lowest validation loss), a Hugging Face folder or hub name, nanoGPT's ckpt.pt, build-nanogpt's
    model_*.pt or llm.c's model .bin. Raises UserError for anything else."""
    if path := find_checkpoint(source):
        return model_from_checkpoint(read_checkpoint(path), path, MODELS)
    return from_huggingface(source, MODELS)


def check_tokens(model, source: str) -> None:
    """UserError unless `model`, read from `source`, has GPT-2's tokens."""
    if model.config.vocab_size < VOCAB_SIZE:
        raise UserError(f"{source} has a vocabulary of {model.config.vocab_size}, and not GPT-2's "
                        f"{VOCAB_SIZE} tokens: give a model that was trained on those")


def refuse_other_files(folder: Path) -> None:
    """UserError unless a folder is new, empty or an earlier export: holds nothing else, by the files' names,
    and its config.json is ours. Hidden files, as .DS_Store of a Mac, do not count."""
    names, config = set(), {}
    if os.path.lexists(folder):
        names = {name for name in os.listdir(folder) if not name.startswith(".")}
    with suppress(OSError, ValueError, RecursionError):
        config = read_json(folder / "config.json")
    if others := names - EXPORTED or (not EXPORTED_BY.items() <= config.items() and names):
        raise UserError(f"{folder} holds other files than an earlier export ({min(others)}): give a new or "
                        f"empty folder")


def main(argv: list[str] | None = None) -> None:
    """`python model.py export SOURCE FOLDER`. Replaces an earlier export, and no other files."""
    parser = FlagParser(prog="model.py", description=__doc__)
    parser.add_argument("command", choices=["export"], help="write a model in the Hugging Face format")
    parser.add_argument("source", metavar="SOURCE",
                        help="checkpoint (also nanoGPT's, build-nanogpt's or llm.c's), a run's folder or "
                             "FOLDER/best, Hugging Face folder or hub name")
    parser.add_argument("folder", metavar="FOLDER",
                        help="new, empty, or of an earlier export, which is replaced")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    with writable(folder):
        refuse_other_files(folder)
    model = load_model(args.source)
    check_tokens(model, args.source)
    with writable(folder):
        for name in EXPORTED:                   # so that no mixture of two exports can be read as one
            (folder / name).unlink(missing_ok=True)
        model.save_pretrained(folder)
    code = ", trust_remote_code=True" if (folder / MODELING).exists() else ""
    print(f"{folder} is in the Hugging Face format: transformers' AutoModelForCausalLM and AutoTokenizer "
          f"read it with from_pretrained({os.path.abspath(folder)!r}{code})")


if __name__ == "__main__":
    run_command(main)
