"""Small models for the tests, a plain GPT-2 and transformers' to compare with, and checkpoints of them."""
import dataclasses
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig

TINY = dict(block_size=24, vocab_size=96, n_layer=2, n_head=2, n_embd=16)


def make_model(seed=0, spread=0.2, cls=GPT, **config):
    """A small model whose every parameter, gains and biases too, is far from its initial value."""
    torch.manual_seed(seed)
    model = cls(cls.Config(**{**TINY, **config}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=spread)
    return model


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest tensor that is allocated inside this context, and the number of operations."""
    bytes = operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if torch.is_tensor(t) and t.device.type != "meta":
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def tokens(B, T, vocab_size=96, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def plain_gpt2(weights, n_head, idx, gelu="tanh"):
    """GPT-2 from its published description: a dict of tensors and einsums, no module. Biases are optional."""
    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[name + ".weight"] + weights.get(name + ".bias", 0)

    def linear(x, name):
        return torch.einsum("bti,oi->bto", x, weights[name + ".weight"]) + weights.get(name + ".bias", 0)

    def activation(x):
        if gelu == "none":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    B, T = idx.shape
    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][:T]
    layer = 0
    while f"transformer.h.{layer}.ln_1.weight" in weights:
        block = f"transformer.h.{layer}."
        q, k, v = (part.reshape(B, T, n_head, -1) for part in
                   linear(norm(x, block + "ln_1"), block + "attn.c_attn").chunk(3, dim=-1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores + torch.full((T, T), -math.inf).triu(1)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(B, T, -1)
        x = x + linear(y, block + "attn.c_proj")
        x = x + linear(activation(linear(norm(x, block + "ln_2"), block + "mlp.c_fc")), block + "mlp.c_proj")
        layer += 1
    return torch.einsum("bti,vi->btv", norm(x, "transformer.ln_f"), weights["transformer.wte.weight"])


def own_checkpoint(model):
    return {"model": model.state_dict(), "model_config": dataclasses.asdict(model.config), "recipe": "gpt2",
            "config": {}, "step": 3, "optimizers": {},
            "rng": {"torch": torch.get_rng_state()}}


def nanogpt_checkpoint(weights, bias=True, **args):
    return {"model": weights, "optimizer": {"state": {}, "param_groups": []}, "iter_num": 5,
            "best_val_loss": torch.tensor(2.5), "model_args": {**TINY, "dropout": 0.0, "bias": bias, **args},
            "config": {"out_dir": "out", "dtype": "bfloat16"}}


def save(path, checkpoint, **how):
    torch.save(checkpoint, path, **how)
    return path


def transformers_model(activation="gelu_new", vocab_size=96):
    """A small GPT-2 of transformers, every parameter far from its initial value."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=24, n_layer=2, n_head=2, n_embd=16,
                                        activation_function=activation))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return theirs.eval()


def our_model(theirs):
    """A GPT with the weights of transformers' model, whose Conv1D stores (in, out)."""
    gelu = "none" if theirs.config.activation_function == "gelu" else "tanh"
    ours = GPT(GPTConfig(**TINY | {"vocab_size": theirs.config.vocab_size}, gelu=gelu))
    ours.load_state_dict({name: p.t() if ".c_" in name and p.dim() == 2 else p
                          for name, p in theirs.state_dict().items()})
    return ours
