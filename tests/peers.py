"""Small models for the tests, a plain GPT-2 to compare with, and a file of one as each program saves it."""
import dataclasses
import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import llm_c_file
from model import GPT, GPTConfig

TINY = dict(block_size=24, vocab_size=96, n_layer=2, n_head=2, n_embd=16)


def make_model(seed=0, spread=0.2, **config):
    """A small GPT whose every parameter, gains and biases too, is far from its initial value."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**TINY, **config}))
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


def write_peer(kind, folder):
    """Saves a small model with GPT-2's vocabulary in `folder` as `kind` does -> (the path, the model)."""
    model = make_model(vocab_size=50257 if kind == "llm.c" else 50304,
                       gelu="none" if kind.startswith("nanoGPT") else "tanh")
    if kind == "llm.c":
        for p in model.parameters():
            p.data = p.data.bfloat16().float()
        return llm_c_file(folder / "model_00019560.bin", model), model
    if kind == "nanoGPT without biases":
        for p in (p for name, p in model.named_parameters() if name.endswith(".bias")):
            p.data.zero_()
    bias = "without" not in kind
    prefix = {"nanoGPT, compiled": "_orig_mod.", "build-nanogpt, DDP": "module."}.get(kind, "")
    weights = {prefix + name: p for name, p in model.state_dict().items()
               if bias or not name.endswith(".bias")}
    if kind == "this project":
        return save(folder / "checkpoint_000003.pt", own_checkpoint(model)), model
    if kind.startswith("nanoGPT"):
        return save(folder / "ckpt.pt", nanogpt_checkpoint(weights, bias, vocab_size=50304)), model
    if kind == "build-nanogpt, DDP":
        config = dataclasses.make_dataclass("GPTConfig", TINY)
        config.__module__ = "__main__"
        with pytest.MonkeyPatch.context() as patch:         # BUILD_NANOGPT without a process of its own
            patch.setattr(sys.modules["__main__"], "GPTConfig", config, raising=False)
            checkpoint = {"model": weights, "config": config(**TINY | {"vocab_size": 50304}), "step": 5000,
                          "val_loss": 3.1}
            return save(folder / "model_05000.pt", checkpoint), model
    model.save_pretrained(folder / "hf")
    if kind == "bin":
        from safetensors.torch import load_file
        torch.save(load_file(folder / "hf" / "model.safetensors"), folder / "hf" / "pytorch_model.bin")
        (folder / "hf" / "model.safetensors").unlink()
    return folder / "hf", model
