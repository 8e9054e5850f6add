"""Reads every format of a checkpoint: this project's, nanoGPT's, build-nanogpt's, llm.c's."""
import dataclasses
import math
import mmap
import os
import re
import stat
import struct
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from runtime.cli import UserError, brief_error, safe_repr
from runtime.console import lowest, read_metrics
from runtime.files import checkpoints, readable

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
OPENAI_NAMES = "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"            # on the hub, without their owner


def find_checkpoint(source: str | Path) -> Path | None:
    """The file that `source` means: itself, of a run's folder OUT the newest checkpoint, of OUT/best the one
    of lowest validation loss. None for a Hugging Face folder or hub name. UserError for another folder."""
    path = Path(source)
    refuse_unreadable(path)
    if os.path.isdir(path):             # Path.is_dir raises OSError for some names
        if os.path.exists(path / "config.json"):
            return None
        if found := checkpoints(path):
            return found[-1][1]
        refuse_hiding(source)
        raise UserError(f"{source} is neither a run's folder (it has no checkpoint_*.pt) nor in the Hugging "
                        f"Face format (it has no config.json): give one of these, or a checkpoint's file")
    if path.name == "best" and os.path.isdir(path.parent) and not os.path.exists(path):
        refuse_unreadable(path.parent)
        saved = dict(checkpoints(path.parent))
        remedy = f"give a checkpoint's file, or {path.parent} for its newest"
        if best := lowest(read_metrics(path.with_name("metrics.csv"), remedy), saved):
            return saved[best[1]]
        raise UserError(f"{path}: no checkpoint there has a validation loss in metrics.csv: {remedy}")
    return path if os.path.exists(path) or path.suffix in (".pt", ".pth", ".bin") else None


def refuse_unreadable(path: Path) -> None:
    """UserError if this user may not read the path. Other functions take such a folder for an empty one."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.listdir(path)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({brief_error(error)}): make it readable, or give "
                        f"another") from None
    except (OSError, ValueError):       # it is not there, or is no name of a file at all
        pass


def refuse_hiding(source: str | Path) -> None:
    """UserError if a folder, which is no model, has the name of one on the hub."""
    if str(source) in OPENAI_NAMES:
        raise UserError(f"the folder {os.path.abspath(source)} holds no model, and hides the hub's {source}: "
                        f"rename it, or give openai-community/{source}")


def read_checkpoint(path: str | Path, remedy: str = "check the path, or copy it again") -> dict:
    """The dict of a .pt file or llm.c's .bin. No code in it runs. UserError with `remedy` if unreadable."""
    with readable(path, remedy, problem="cannot be read as a checkpoint"):
        if not os.path.isfile(path):
            raise ValueError("no regular file is there")
        checkpoint = load_llm_c(path) or load_pickle(path)
        if not isinstance(checkpoint, dict):
            raise ValueError(f"it holds a {type(checkpoint).__name__} instead of a checkpoint's dict")
        return checkpoint


def load_pickle(path):
    """What torch.save wrote, memory-mapped. Any error for a damaged or hostile file."""
    with open(path, "rb") as file:
        if zipped := file.read(4) == b"PK\x03\x04":                             # torch.load's own test
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                # torch.save never compresses, and begins with a record: this could fill the memory
                if any(r.compress_type != zipfile.ZIP_STORED for r in records) or records[0].header_offset:
                    raise ValueError("it is packed")
                if damaged := archive.testzip():                # by their CRC-32, which torch.load ignores
                    raise ValueError(f"bits of its record {damaged[:80]} have changed")
                pickled = b"".join(archive.read(r) for r in records if r.filename.endswith("data.pkl"))
        else:
            pickled = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if pickled[:1] != b"\x80":
                raise ValueError("it is neither a zip, a pickle nor a GPT-2 of llm.c")
        # weights_only lets a file call these two with arguments of its own: a few bytes could fill the memory
        if re.search(rb"\nbytearray\n|_codecs\nencode\n", pickled):
            raise ValueError("it holds raw bytes")
    record = torch.serialization.safe_globals([(SimpleNamespace, "__main__.GPTConfig")])     # build-nanogpt's
    with warnings.catch_warnings(action="ignore"), record:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def load_llm_c(path: str | Path) -> dict | None:
    """A model's .bin of llm.c (write_model in its train_gpt2.py) as a checkpoint's dict, memory-mapped; None
    for another file. Without the vocabulary's padding: rows of zeros, which llm.c's softmax leaves out."""
    with open(path, "rb") as file:
        header = struct.unpack("<8i", file.read(32).ljust(32, b"\0"))           # of 256 int32
    magic, version, T, V, n_layer, n_head, C, padded = header
    if magic != 20240326:
        return None
    dtype = {3: torch.float32, 5: torch.bfloat16}.get(version)
    if not (dtype and all(0 < n < 2**24 for n in header[2:]) and n_layer <= 1024 and V <= padded):
        raise ValueError(f"by its header it has version {version} and the sizes {header[2:]}")
    modules = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C),  # of a layer: their weights
               "ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    shapes = {"wte.weight": (padded, C), "wpe.weight": (T, C),
              **{f"h.{i}.{name}.{kind}": shape if kind == "weight" else shape[:1]
                 for name, shape in modules.items() for kind in ("weight", "bias") for i in range(n_layer)},
              "ln_f.weight": (C,), "ln_f.bias": (C,)}
    counts = [1024 // dtype.itemsize, *map(math.prod, shapes.values())]
    size, needed = os.path.getsize(path), sum(counts) * dtype.itemsize
    if size != needed:                                                          # there is no checksum in it
        raise ValueError(f"it has {size:,} bytes, and by its header {needed:,}")
    _, *parts = torch.from_file(str(path), size=sum(counts), dtype=dtype).split(counts)
    model = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    if not model["ln_f.weight"].any():
        raise ValueError("it ends in zeros: it was not written to its end")
    model["wte.weight"] = model["wte.weight"][:V]
    config = dict(block_size=T, vocab_size=V, n_layer=n_layer, n_head=n_head, n_embd=C, gelu="tanh")
    return {"model": model, "model_config": config, "recipe": "gpt2"}


def model_from_checkpoint(checkpoint: dict, path: str | Path, MODELS: dict,
                          remedy: str = "give another checkpoint"):
    """The model of a checkpoint's dict: ours, nanoGPT's or build-nanogpt's. UserError with `path` and
    `remedy` if it cannot be built."""
    with readable(path, remedy, problem="is not a model's checkpoint that this project reads"):
        recipe, weights = "gpt2", checkpoint["model"]
        if "model_config" in checkpoint:
            recipe, config = checkpoint["recipe"], checkpoint["model_config"]
        elif "model_args" in checkpoint:
            config = checkpoint["model_args"] | {"gelu": "none"}                # nanoGPT's
        else:
            config = vars(checkpoint["config"]) | {"gelu": "tanh"}              # build-nanogpt's
        if not isinstance(recipe, str) or recipe not in MODELS:
            raise ValueError(f"its recipe {safe_repr(recipe)!r} is unknown here")
        cls = MODELS[recipe]
        config = cls.Config(**{f.name: config[f.name] for f in dataclasses.fields(cls.Config)})
        return build_model(cls, config, canonical(weights) if recipe == "gpt2" else weights)


def is_dense_float(tensor: object) -> bool:
    """Whether all elements are stored, as floats (an expanded tensor has any shape but stores one number)."""
    return (torch.is_tensor(tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
            and tensor.is_floating_point()
            and 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def canonical(state_dict: dict) -> dict:
    """A GPT-2's state dict in our names: no wrapper's prefixes, no mask buffers, zeros for missing biases."""
    out = {}
    for name, tensor in state_dict.items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", name)                    # torch.compile, DDP
        if not name.startswith(("transformer.", "lm_head.")):                   # the hub's gpt2 has no prefix
            name = "transformer." + name
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            out[name] = tensor
    if not any(name.endswith(".bias") for name in out):                         # nanoGPT's bias=False
        out |= {name.removesuffix("weight") + "bias": torch.zeros(t.size(0)) for name, t in out.items()
                if (".h." in name or ".ln_f." in name) and is_dense_float(t) and t.dim()}
    if HEAD in out:                                                             # tied to it
        out.setdefault(WTE, out[HEAD])
    return out


@torch.no_grad()
def build_model(cls: type, config, state_dict: dict):
    """A `cls(config)` with the weights of `state_dict`, as fp32. ValueError or torch's own error if they do
    not fit, before anything of the config's size is allocated."""
    for name, value in vars(config).items():
        if not (value in ("tanh", "none") if name == "gelu" else
                type(value) is int and (name != "window") <= value < 2**24):
            raise ValueError(f"its config says {name} = {safe_repr(value)}")
    # of n_layer and vocab_size a model makes things even on meta
    heads, wte = config.n_head * (2 if hasattr(config, "window") else 1), state_dict.get(WTE)
    if config.n_embd % heads:                                                 # rotary: of an even size
        raise ValueError(f"its config says n_embd = {config.n_embd}, n_head = {config.n_head}")
    if config.n_layer > len(state_dict) or not is_dense_float(wte) or wte.shape[:1] != (config.vocab_size,):
        raise ValueError(f"it has no {config.n_layer} layers or {config.vocab_size} rows of floats in {WTE}")
    with torch.device("meta"):
        model = cls(config)
    tied = model.lm_head.weight is model.transformer.wte.weight
    model.load_state_dict({HEAD: state_dict[WTE]} | state_dict if tied else state_dict, assign=True)
    for name, p in model.named_parameters():        # still the file's; names and shapes fit
        if not is_dense_float(p):
            raise ValueError(f"{name} is not a plain tensor of floats")
        if not p.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite: it is damaged")
        p.data = torch.empty(p.shape, dtype=torch.float32).copy_(p)
    if tied:
        if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
            raise ValueError("its head is not tied to its embedding")
        model.lm_head.weight = model.transformer.wte.weight
    return model
