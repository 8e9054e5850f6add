"""Reads every format of a checkpoint: this project's, nanoGPT's, build-nanogpt's.

A file may be damaged or made to do harm. No code in it runs, it takes no more memory than its size,
and whatever is wrong with it becomes a UserError of one line.
"""
import dataclasses
import mmap
import os
import re
import stat
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from runtime.cli import UserError, brief_error, unexpected
from runtime.console import lowest, read_metrics
from runtime.files import checkpoints, readable

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
LARGEST = 2**24 - 1             # of a size in a model's config

# These names of the hub are accepted without their owner.
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


# ---------------------------------------------------------------------- which file

def find_checkpoint(source: str | Path) -> Path | None:
    """The checkpoint that `source` means; None if it means a Hugging Face folder or hub name.

    A file means itself, a run's folder OUT its newest checkpoint, OUT/best the one of the lowest
    validation loss. UserError for another folder.
    """
    path = Path(source)
    refuse_unreadable(path)
    if os.path.isdir(path):             # Path.is_dir raises OSError for some names
        if os.path.exists(path / "config.json"):
            return None
        found = checkpoints(path)
        if found:
            return found[-1][1]
        refuse_hidden_name(source)
        raise UserError(f"{source} is neither a run's folder (it has no checkpoint_*.pt) nor in "
                        "the Hugging Face format (it has no config.json): give one of these, or "
                        "a checkpoint's file")
    if path.name == "best" and os.path.isdir(path.parent) and not os.path.exists(path):
        refuse_unreadable(path.parent)
        return best_checkpoint(path)
    if os.path.exists(path) or path.suffix in (".pt", ".pth"):
        return path
    return None


def best_checkpoint(path: Path) -> Path:
    """Of OUT/best the checkpoint in OUT with the lowest validation loss."""
    remedy = f"give a checkpoint's file, or {path.parent} for its newest"
    saved = dict(checkpoints(path.parent))
    best = lowest(read_metrics(path.with_name("metrics.csv"), remedy), saved)
    if best is None:
        raise UserError(f"{path}: no checkpoint there has a validation loss in metrics.csv: "
                        f"{remedy}")
    return saved[best[1]]


def refuse_unreadable(path: Path) -> None:
    """UserError for a folder that this user may not list: it would be taken for an empty one."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.listdir(path)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({brief_error(error)}): make it readable, or give "
                        "another") from None
    except (OSError, ValueError):       # nothing is there, or no file can have this name
        pass


def refuse_hidden_name(source: str | Path) -> None:
    """UserError if a local folder, which holds no model, has the name of a model on the hub."""
    if str(source) in OPENAI_NAMES:
        raise UserError(f"the folder {os.path.abspath(source)} holds no model, and hides the hub's "
                        f"{source}: rename it, or give openai-community/{source}")


# ---------------------------------------------------------------------- reading a file

def read_checkpoint(path: str | Path, remedy: str = "check the path, or copy it again") -> dict:
    """The dict that a .pt file holds. UserError with `remedy` if it cannot be read."""
    with readable(path, remedy, problem="cannot be read as a checkpoint"):
        if not os.path.isfile(path):
            raise ValueError("no regular file is there")
        checkpoint = load_pickle(path)
        if not isinstance(checkpoint, dict):
            raise unexpected("its content", "a checkpoint's dict", checkpoint)
        return checkpoint


def load_pickle(path: str | Path):
    """What torch.save wrote, memory-mapped. Any error for a damaged or hostile file."""
    with open(path, "rb") as file:
        start = file.read(4)
        is_zip = start == b"PK\x03\x04"                                      # torch.load's own test
        if is_zip:
            pickled = pickles_of_zip(file)
        elif start[:1] == b"\x80":
            pickled = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            raise unexpected("its beginning", "that of a zip or a pickle", start.hex())

    # weights_only allows a pickle to call these two with arguments of its own, and so a few bytes
    # of a file could fill the memory. No checkpoint needs them.
    if re.search(rb"\nbytearray\n|_codecs\nencode\n", pickled):
        raise ValueError("its pickle makes raw bytes, which no checkpoint holds")

    # build-nanogpt's config is an instance of its script's own class. Here any record will do.
    its_config = torch.serialization.safe_globals([(SimpleNamespace, "__main__.GPTConfig")])
    with warnings.catch_warnings(action="ignore"), its_config:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def pickles_of_zip(file) -> bytes:
    """The pickles in a checkpoint's zip. ValueError if it is not as torch.save writes it."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()

        # torch.save compresses nothing, and begins with a record. Others could fill the memory.
        compressed = any(r.compress_type != zipfile.ZIP_STORED for r in records)
        if compressed or records[0].header_offset != 0:
            raise ValueError("its zip is not torch.save's: expected records that are not "
                             "compressed, from the first byte on")

        damaged = archive.testzip()                     # by their CRC-32, which torch.load ignores
        if damaged:
            raise ValueError(f"its record {damaged[:80]} is damaged: bits of it have changed")
        return b"".join(archive.read(r) for r in records if r.filename.endswith("data.pkl"))


# ---------------------------------------------------------------------- from a dict to a model

def model_from_checkpoint(
    checkpoint: dict, path: str | Path, models: dict, remedy: str = "give another checkpoint"
):
    """The model of a checkpoint's dict: ours, nanoGPT's or build-nanogpt's.

    `models` is {recipe: class}. UserError with `path` and `remedy` if it cannot be built.
    """
    with readable(path, remedy, problem="is not a model's checkpoint that this project reads"):
        recipe, weights = "gpt2", checkpoint["model"]
        if "model_config" in checkpoint:                                        # this project's
            recipe, config = checkpoint["recipe"], checkpoint["model_config"]
        elif "model_args" in checkpoint:                                        # nanoGPT's
            config = checkpoint["model_args"] | {"gelu": "none"}
        else:                                                                   # build-nanogpt's
            config = vars(checkpoint["config"]) | {"gelu": "tanh"}

        if not isinstance(recipe, str) or recipe not in models:
            raise unexpected("its recipe", " or ".join(models), recipe)
        cls = models[recipe]
        names = [f.name for f in dataclasses.fields(cls.Config)]
        config = cls.Config(**{name: config[name] for name in names})
        if recipe == "gpt2":
            weights = gpt2_in_our_names(weights)
        return build_model(cls, config, weights)


def gpt2_in_our_names(state_dict: dict) -> dict:
    """A GPT-2's state dict without wrappers' prefixes and masks, with zeros for missing biases."""
    weights = {}
    for name, tensor in state_dict.items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", name)                # torch.compile's, DDP's
        if not name.startswith(("transformer.", "lm_head.")):
            name = "transformer." + name                                        # the hub's gpt2
        is_mask = name.endswith((".attn.bias", ".attn.masked_bias"))
        if not is_mask:
            weights[name] = tensor

    if not any(name.endswith(".bias") for name in weights):                   # nanoGPT's bias=False
        weights |= zero_biases(weights)
    if HEAD in weights:
        weights.setdefault(EMBEDDING, weights[HEAD])                            # they are tied
    return weights


def zero_biases(weights: dict) -> dict:
    """A bias for each weight of the blocks and the last norm."""
    biases = {}
    for name, weight in weights.items():
        has_bias = ".h." in name or ".ln_f." in name
        if has_bias and is_dense_float(weight) and weight.dim() > 0:
            biases[name.removesuffix("weight") + "bias"] = torch.zeros(weight.size(0))
    return biases


def is_dense_float(tensor: object) -> bool:
    """Whether each element is stored, as a float. An expanded tensor stores one for any shape."""
    if not torch.is_tensor(tensor) or tensor.layout != torch.strided:
        return False
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False
    size = tensor.numel() * tensor.element_size()
    return 0 < size <= tensor.untyped_storage().nbytes()


def check_config(config) -> None:
    """ValueError unless each value of a model's config is one that a model can have."""
    for name, value in vars(config).items():
        if name == "gelu":
            expected = "tanh or none"
            valid = value in ("tanh", "none")
        else:
            least = 0 if name == "window" else 1
            expected = f"a whole number from {least} to {LARGEST}"
            valid = type(value) is int and least <= value <= LARGEST
        if not valid:
            raise unexpected(f"its config's {name}", expected, value)


def check_sizes(config, state_dict: dict) -> None:
    """ValueError if the config claims more layers or tokens than there are weights.

    Of these two a model makes lists, even on "meta", where its tensors take no memory.
    """
    if config.n_layer > len(state_dict):
        most = f"at most its {len(state_dict)} tensors"
        raise unexpected("its config's n_layer", most, config.n_layer)
    embedding = state_dict.get(EMBEDDING)
    if not is_dense_float(embedding):
        raise ValueError(f"its {EMBEDDING} is missing or not a plain tensor of floats")
    rows = list(embedding.shape[:1])
    if rows != [config.vocab_size]:
        expected = f"{rows}, the rows of its embedding"
        raise unexpected("its config's vocab_size", expected, config.vocab_size)


@torch.no_grad()
def build_model(cls: type, config, state_dict: dict):
    """A `cls(config)` with the weights of `state_dict`, as float32.

    ValueError or torch's own error if they do not fit, before anything of the config's size is
    allocated.
    """
    check_config(config)
    check_sizes(config, state_dict)
    with torch.device("meta"):
        model = cls(config)                             # refuses heads that do not divide the width

    tied = model.lm_head.weight is model.transformer.wte.weight
    if tied:
        state_dict = {HEAD: state_dict[EMBEDDING]} | state_dict
    model.load_state_dict(state_dict, assign=True)

    # Now names and shapes fit. The tensors are still the file's, of any dtype.

    for name, p in model.named_parameters():
        if not is_dense_float(p):
            raise ValueError(f"its {name} is not a plain tensor of floats")
        if not p.isfinite().all():
            raise ValueError(f"its {name} is damaged: it holds numbers that are not finite")
        p.data = torch.empty(p.shape, dtype=torch.float32).copy_(p)

    if tied:
        if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
            raise ValueError("its head differs from its embedding, to which it should be tied")
        model.lm_head.weight = model.transformer.wte.weight
    return model
