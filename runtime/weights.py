"""Reads every format of a checkpoint: this project's, nanoGPT's, build-nanogpt's, llm.c's."""
import dataclasses
import math
import mmap
import os
import struct
import warnings
from pathlib import Path

import torch

from runtime.cli import UserError, safe_repr
from runtime.files import (checkpoints, is_huggingface, models_in, readable, what_is_in,
                           what_is_there)
from runtime.integrity import check_archive, find_fault
from runtime.tokenizer import VOCAB_SIZE


def is_dense_float(tensor: object) -> bool:
    """Whether all elements are stored, as floats (an expanded tensor has any shape but stores one number)."""
    return (torch.is_tensor(tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            and tensor.is_floating_point()
            and 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def canonical(state_dict):
    """State dict in this project's names: no wrapper's prefixes or mask buffers, zeros for missing biases."""
    out = {}
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not torch.is_tensor(tensor):
            raise ValueError("its state dict holds something that is not a tensor")
        while name.startswith(("_orig_mod.", "module.")):                       # torch.compile, DDP
            name = name.split(".", 1)[1]
        if not name.startswith(("transformer.", "lm_head.")):                   # the hub's gpt2 has no prefix
            name = "transformer." + name
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            out[name] = tensor
    if not any(name.endswith(".bias") for name in out):                         # nanoGPT's bias=False
        for name, t in list(out.items()):
            if (".h." in name or ".ln_f." in name) and is_dense_float(t) and t.dim():
                out[name.removesuffix("weight") + "bias"] = torch.zeros(t.size(0))
    if "transformer.wte.weight" in out:
        out.setdefault("lm_head.weight", out["transformer.wte.weight"])
    elif "lm_head.weight" in out:
        out["transformer.wte.weight"] = out["lm_head.weight"]
    return out


class Uninitialized(torch.overrides.TorchFunctionMode):
    """Within it, modules draw no random weights. On the meta device, which has no numbers, torch would import
    its compiler (1.3 s) to draw none."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def check_config(config, state_dict: dict) -> None:
    """ValueError unless a config's numbers are possible, and its vocabulary is the embedding's."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        minimum = 0 if field.name == "window" else 1
        if field.type in ("int", int) and not (type(value) is int and minimum <= value < 2**24):
            raise ValueError(f"its config says {field.name} = {safe_repr(value)}")
    if getattr(config, "gelu", "tanh") not in ("tanh", "none"):
        raise ValueError(f"its config says gelu = {safe_repr(config.gelu)}")
    if config.n_embd % config.n_head:
        raise ValueError(f"its config says {config.n_head} heads for n_embd {config.n_embd}")
    if config.n_layer > len(state_dict):
        raise ValueError(f"its config says {config.n_layer} layers, but it holds {len(state_dict)} tensors")
    wte = state_dict.get("transformer.wte.weight")
    if not is_dense_float(wte):
        raise ValueError("transformer.wte.weight is missing, or not a plain tensor of floats")
    if wte.shape[:1] != (config.vocab_size,):       # before frontier's class makes a buffer of that size
        raise ValueError(f"transformer.wte.weight is {tuple(wte.shape)} where the config needs "
                         f"{config.vocab_size} rows")


def build_model(cls: type, config, state_dict: dict):
    """A `cls(config)` with the weights of `state_dict`, as fp32. ValueError if they do not fit: they are
    compared with the config before anything of the config's size is allocated."""
    check_config(config, state_dict)
    try:
        with torch.device("meta"), Uninitialized():
            model = cls(config)
    except UserError as error:                      # of a flag; here it is the file's
        raise ValueError(str(error)) from None
    if tied := model.lm_head.weight is model.transformer.wte.weight:
        state_dict = {"lm_head.weight": state_dict["transformer.wte.weight"]} | state_dict
    expected = model.state_dict()
    for name in expected.keys() - state_dict.keys():
        raise ValueError(f"the tensor {name} is missing")
    for name in state_dict.keys() - expected.keys():
        raise ValueError(f"the tensor {name[:80]} does not belong to a {cls.__name__}")
    for name, tensor in state_dict.items():
        if not is_dense_float(tensor):
            raise ValueError(f"{name} is not a plain tensor of floats")
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)} where the config needs "
                            f"{tuple(expected[name].shape)}")
    head, wte = (state_dict[name] for name in ("lm_head.weight", "transformer.wte.weight"))
    # compared as integers, so that NaN equals NaN
    if tied and not torch.equal(head.float().view(torch.int32), wte.float().view(torch.int32)):
        raise ValueError("its head is not tied to its embedding")
    weights = {name: t.detach().float().clone() for name, t in state_dict.items()}
    if fault := find_fault(weights):
        raise ValueError(f"{fault}, which no run here saves: it is damaged")
    model.load_state_dict(weights, assign=True)
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    return model.requires_grad_()


class _Record:
    """Replaces build-nanogpt's pickled `__main__.GPTConfig`: it has attributes and no code."""


def load_pickle(path):
    """Reads what torch.save wrote, memory-mapped. Raises whatever the unpickler raises for a damaged or
    hostile file."""
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"                                  # torch.load's own test
        if zipped:
            # by torch's own reader, because another reader may find another archive in the same file
            archive = torch._C.PyTorchFileReader(str(path))
            size_of = getattr(archive, "get_record_size", lambda record: 0)     # not in every torch release
            if sum(map(size_of, archive.get_all_records())) > os.path.getsize(path):
                raise ValueError("it is packed")     # torch.save never compresses; this could fill the memory
            check_archive(path, archive)
            pickled = archive.get_record("data.pkl")
        else:
            pickled = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # weights_only lets a file call these two with arguments of its own: a few bytes could fill the memory
        if pickled.find(b"\nbytearray\n") >= 0 or pickled.find(b"_codecs\nencode\n") >= 0:
            raise ValueError("it holds raw bytes")
    allowed = torch.serialization.safe_globals([(_Record, "__main__.GPTConfig")])
    with warnings.catch_warnings(action="ignore"), allowed:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


# llm.c's .bin files by their first number (its train_gpt2.py, train_gpt2.cu, dev/data/data_common.py)
LLM_C_MODEL = 20240326
LLM_C_OTHERS = {
    20240520: "holds llm.c's tokens, and no model: --data takes their folder",
    20240527: "holds the optimizer's state of a run of llm.c, and no model: give the model_*.bin beside it",
    20240327: "holds what llm.c compares itself with, and no model: give the file without _debug_state",
    20240328: "holds llm.c's tokenizer, and no model: give a model's .bin",
    20240803: "holds a Llama 3 of llm.c: give the .bin of a GPT-2",
}


def load_llm_c(path: Path) -> dict | None:
    """A model's .bin of llm.c as a checkpoint's dict, memory-mapped; None if its first number is none of
    llm.c's. The padding of the vocabulary is cut off: rows of zeros, which llm.c's softmax leaves out. Ours
    would not, and the logits of OpenAI's weights are far below their 0."""
    with open(path, "rb") as file:
        start = file.read(1024)                                                 # 256 int32
    header = struct.unpack("<8i", start[:32].ljust(32, b"\0"))
    magic, version, block_size, vocab_size, n_layer, n_head, C, padded = header
    if magic in LLM_C_OTHERS:
        raise UserError(f"{path} {LLM_C_OTHERS[magic]}")
    if magic != LLM_C_MODEL:
        return None
    with readable(path, "copy it again, or let llm.c write it anew",
                  problem="is not a model of llm.c that can be read"):
        dtype = {3: torch.float32, 5: torch.bfloat16}.get(version)
        if not dtype:
            raise ValueError(f"its version is {version}, and 3 (float32) and 5 (bfloat16) are read")
        if not (all(0 < n < 2**24 for n in header[2:]) and n_layer <= 1024 and vocab_size <= padded):
            raise ValueError(f"the sizes in its header are {header[2:]}")
        shapes = {"wte.weight": (padded, C), "wpe.weight": (block_size, C)}
        for name, shape in (("ln_1.weight", (C,)), ("ln_1.bias", (C,)),
                            ("attn.c_attn.weight", (3 * C, C)), ("attn.c_attn.bias", (3 * C,)),
                            ("attn.c_proj.weight", (C, C)), ("attn.c_proj.bias", (C,)),
                            ("ln_2.weight", (C,)), ("ln_2.bias", (C,)),
                            ("mlp.c_fc.weight", (4 * C, C)), ("mlp.c_fc.bias", (4 * C,)),
                            ("mlp.c_proj.weight", (C, 4 * C)), ("mlp.c_proj.bias", (C,))):
            shapes |= {f"h.{i}.{name}": shape for i in range(n_layer)}          # all layers of one together
        shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
        counts = [1024 // dtype.itemsize, *map(math.prod, shapes.values())]
        size, needed = os.path.getsize(path), sum(counts) * dtype.itemsize
        if size != needed:                                  # there is no checksum in it
            raise ValueError(f"it has {size:,} bytes, and by its header {needed:,}")
        _, *parts = torch.from_file(str(path), size=sum(counts), dtype=dtype).split(counts)
        model = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        if not model["ln_f.weight"].any():
            raise ValueError("it ends in zeros: it was not written to its end")
    model["wte.weight"] = model["wte.weight"][:vocab_size]
    config = dict(block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=C)
    return {"model": model, "model_config": config, "recipe": "gpt2"}


def read_checkpoint(path: str | Path, remedy: str = "check the path, or copy it again") -> dict:
    """The dict of a .pt file or llm.c's .bin: tensors and plain values. No code in it can run. UserError if
    unreadable, with `remedy`."""
    path = Path(path)
    if not os.path.isfile(path):
        here = "" if os.path.exists(path) else what_is_there(path)
        raise UserError(f"{path} is not a file: {here or remedy}")
    with readable(path, f"it was cut off, or holds more than tensors and plain values; {remedy}",
                  problem="cannot be read as a checkpoint"):
        checkpoint = load_llm_c(path) or load_pickle(path)
    if not isinstance(checkpoint, dict):
        raise UserError(f"{path} holds a {type(checkpoint).__name__} instead of a checkpoint's dict: "
                        f"{remedy}")
    return checkpoint


def find_checkpoint(source: str | Path) -> Path | None:
    """The file that `source` means: itself, of a run's folder (--out) OUT the newest checkpoint, of OUT/best
    the one with the lowest validation loss. None for a folder in the Hugging Face format or a hub name.
    UserError if it can be none of these."""
    path = Path(source)
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):             # Path.is_dir raises OSError for some names
        if is_huggingface(path):
            return None
        if found := checkpoints(path):
            return found[-1][1]
        remedy = what_is_in(path) or "give one of these, or a checkpoint's file"
        raise UserError(f"{source} is neither a run's folder (it has no checkpoint_*.pt) nor in the Hugging "
                        f"Face format (it has no config.json): {remedy}")
    if path.name == "best" and os.path.isdir(path.parent):
        return best_checkpoint(path.parent)
    if path.suffix in (".pt", ".pth", ".bin"):
        return path
    # no OWNER/NAME of the hub either: the folder OWNER has runs in it
    if len(path.parts) > 1 and not all(map(is_huggingface, models_in(path.parent))):
        raise UserError(f"{source} is not there: {what_is_there(path)}")
    return None


def best_checkpoint(out: Path) -> Path:
    """The checkpoint of the run in `out` with the lowest validation loss, as its newest one records it."""
    found = dict(checkpoints(out))
    if not found:
        raise UserError(f"{out / 'best'}: {out} is not a run's folder (it has no checkpoint_*.pt); "
                        f"{what_is_there(out / 'best') or 'check the path'}")
    best = read_checkpoint(found[max(found)]).get("best")
    known = isinstance(best, tuple) and [type(number) for number in best] == [float, int]
    if not known or best[1] not in found:
        raise UserError(f"{out / 'best'}: no checkpoint of this run has a validation loss (--val_every), or "
                        f"that with the lowest is gone; give {out} for its newest checkpoint")
    return found[best[1]]


def model_from_checkpoint(checkpoint: dict, path: str | Path, MODELS: dict,
                          remedy: str = "give another checkpoint"):
    """The model of a checkpoint's dict: this project's, nanoGPT's or build-nanogpt's, as its keys show.
    `path` and `remedy` are for the UserError if it cannot be built."""
    with readable(path, remedy, problem="is not a checkpoint that this project reads"):
        cls, extra, weights = MODELS["gpt2"], {}, checkpoint.get("model")
        if "model_config" in checkpoint:
            recipe = checkpoint.get("recipe")
            if not isinstance(recipe, str) or recipe not in MODELS:
                raise ValueError(f"its recipe {safe_repr(recipe)!r} is unknown here")
            cls, config = MODELS[recipe], checkpoint["model_config"]
        elif "model_args" in checkpoint:                                        # nanoGPT
            config, extra = checkpoint["model_args"], {"gelu": "none"}
        else:                                                                   # build-nanogpt
            config = vars(checkpoint["config"]) if isinstance(checkpoint.get("config"), _Record) else None
        if not isinstance(weights, dict) or not isinstance(config, dict):
            raise ValueError("it records neither this project's model_config, nor nanoGPT's model_args, nor "
                            "build-nanogpt's GPTConfig")
        fields = {f.name for f in dataclasses.fields(cls.Config)}
        for name in sorted(fields - config.keys() - {"gelu", "window"}):        # missing in older checkpoints
            raise ValueError(f"its config does not say {name}")
        config = cls.Config(**{name: config[name] for name in fields & config.keys()} | extra)
        return build_model(cls, config, canonical(weights) if cls is MODELS["gpt2"] else weights)


def check_tokens(model, source: str) -> None:
    """UserError unless `model`, read from `source`, has GPT-2's tokens, the only ones used here."""
    if model.config.vocab_size < VOCAB_SIZE:
        raise UserError(f"{source} has a vocabulary of {model.config.vocab_size}, and not GPT-2's "
                        f"{VOCAB_SIZE} tokens: give a model that was trained on those")
