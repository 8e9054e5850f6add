"""From a checkpoint's file to a model: this project's, nanoGPT's, build-nanogpt's.

A file may be damaged, or made to do harm. No code in it runs, it takes no more memory than its size
on the disk, and whatever is wrong with it becomes a UserError of one line.
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
from runtime.files import checkpoints, reading

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"
LARGEST_SIZE = 2**24 - 1        # of the numbers in a config: larger ones could only be hostile

# The models on the hub whose owner, openai-community, can be left out.
OPENAI_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


# ---------------------------------------------------------------------- which file is meant

def find_checkpoint(source: str | Path) -> Path | None:
    """The file that `source` means, or None if it means a Hugging Face folder or a hub name.

    A file means itself, a run's folder OUT its newest checkpoint, OUT/best the one of the lowest
    validation loss. UserError for any other folder.
    """
    path = Path(source)
    refuse_unreadable(path)

    # os.path here, because the methods of Path raise OSError for some names.
    if os.path.isdir(path):
        if os.path.exists(path / "config.json"):
            return None
        found = checkpoints(path)
        if found:
            step, newest = found[-1]
            return newest
        refuse_hidden_name(source)
        raise UserError(f"{source} is neither a run's folder (it has no checkpoint_*.pt) nor in "
                        "the Hugging Face format (it has no config.json): choose one of these, or "
                        "a checkpoint's file")

    if path.name == "best" and os.path.isdir(path.parent) and not os.path.exists(path):
        refuse_unreadable(path.parent)
        return best_checkpoint(path.parent)

    if os.path.exists(path) or path.suffix in (".pt", ".pth"):
        return path
    return None


def best_checkpoint(out: Path) -> Path:
    """The checkpoint in a run's folder with the lowest validation loss, by its metrics.csv."""
    remedy = f"use a checkpoint's file, or {out} for the newest checkpoint"
    saved = dict(checkpoints(out))                                              # {step: path}
    best = lowest(read_metrics(out / "metrics.csv", remedy), saved)
    if best is None:
        raise UserError(f"{out / 'best'} is not known, because no checkpoint in {out} has a "
                        f"validation loss in metrics.csv: {remedy}")
    loss, step = best
    return saved[step]


def refuse_unreadable(path: Path) -> None:
    """UserError for a folder that this user may not list."""
    # Otherwise isdir, exists and checkpoints() would make an unreadable folder look empty.
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.listdir(path)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({brief_error(error)}): make the folder readable, "
                        "or choose another") from None
    except (OSError, ValueError):
        pass                            # nothing has this name, or nothing can have it


def refuse_hidden_name(source: str | Path) -> None:
    """UserError if `source`, a local folder without a model, has the name of one on the hub."""
    if str(source) in OPENAI_NAMES:
        raise UserError(f"the folder {os.path.abspath(source)} contains no model, but hides the "
                        f"hub's {source}: rename the folder, or use openai-community/{source}")


# ---------------------------------------------------------------------- reading a file

def read_checkpoint(
    path: str | Path, remedy: str = "check the path, or copy the file again"
) -> dict:
    """The dict that a .pt file holds. UserError with `remedy` if it cannot be read."""
    # `reading` turns any error in here into a UserError that names the file.
    with reading(path, remedy, problem="cannot be read as a checkpoint"):
        if not os.path.isfile(path):
            raise ValueError("it does not exist, or is not a regular file")
        checkpoint = load_pickle(path)
        if not isinstance(checkpoint, dict):
            raise unexpected("its content", "a checkpoint's dict", checkpoint)
        return checkpoint


def load_pickle(path: str | Path):
    """What torch.save wrote. Any error if the file is damaged or hostile."""
    # torch.save writes a zip with a pickle in it; long ago, and on request, it wrote a pickle.
    with open(path, "rb") as file:
        start = file.read(4)
        is_zip = start == b"PK\x03\x04"
        if is_zip:
            pickled = pickles_of_zip(file)
        elif start[:1] == b"\x80":
            pickled = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            raise unexpected("its first bytes", "those of a zip or a pickle", start.hex())

    # weights_only=True below still lets a pickle call bytearray and _codecs.encode with any
    # arguments, and so a few bytes in a file could fill the memory. No checkpoint needs them.
    if re.search(rb"\nbytearray\n|_codecs\nencode\n", pickled):
        raise ValueError("its pickle makes raw bytes, which no checkpoint needs")

    # build-nanogpt pickles an instance of GPTConfig, a class of its own script. Here it becomes a
    # plain record with the same attributes.
    allowed = torch.serialization.safe_globals([(SimpleNamespace, "__main__.GPTConfig")])
    with warnings.catch_warnings(action="ignore"), allowed:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def pickles_of_zip(file) -> bytes:
    """The pickles in a checkpoint's zip. ValueError if it is compressed, prefixed or damaged."""
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()

        # torch.save compresses nothing. A compressed record could be larger than the memory.
        if any(r.compress_type != zipfile.ZIP_STORED for r in records):
            raise ValueError("its zip is compressed, unlike torch.save's")

        # Something before the first record would make torch and zipfile read different archives,
        # and what is checked here would not be what is loaded.
        if records[0].header_offset != 0:
            raise ValueError("its zip does not start at the first byte, unlike torch.save's")

        # Each record has a CRC-32, which torch.load ignores.
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"its record {damaged[:80]} is damaged and has another CRC-32")

        return b"".join(archive.read(r) for r in records if is_pickle(r.filename))


def is_pickle(name: str) -> bool:
    return name.lower().endswith("data.pkl")            # torch.load finds DATA.PKL, too


# ---------------------------------------------------------------------- from a dict to a model

def model_from_checkpoint(
    checkpoint: dict, path: str | Path, models: dict, remedy: str = "choose another checkpoint"
):
    """The model of a checkpoint's dict: ours, nanoGPT's or build-nanogpt's.

    `models` is {recipe: class}. UserError with `path` and `remedy` if it cannot be built.
    """
    with reading(path, remedy, problem="is not a model that this project can read"):
        weights = checkpoint["model"]
        recipe = "gpt2"
        if "model_config" in checkpoint:                # this project's
            recipe = checkpoint["recipe"]
            config = checkpoint["model_config"]
        elif "model_args" in checkpoint:                # nanoGPT's
            config = checkpoint["model_args"] | {"gelu": "none"}
        else:                                           # build-nanogpt's
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
    """A GPT-2's state dict of any project, with the names and tensors of model.GPT's."""
    weights = {}
    for name, tensor in state_dict.items():
        # Prefixes that torch.compile and DDP have put before the names.
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", name)

        # OpenAI's weights on the hub have no such prefix.
        if not name.startswith(("transformer.", "lm_head.")):
            name = "transformer." + name

        # The causal mask, which older code stored in each layer.
        is_mask = name.endswith((".attn.bias", ".attn.masked_bias"))
        if not is_mask:
            weights[name] = tensor

    # nanoGPT's bias=False
    if not any(name.endswith(".bias") for name in weights):
        weights |= zero_biases(weights)

    # Embedding and head are tied: a file may have one of them only.
    if HEAD in weights:
        weights.setdefault(EMBEDDING, weights[HEAD])
    return weights


def zero_biases(weights: dict) -> dict:
    """A bias for each weight of the blocks and the last norm."""
    biases = {}
    for name, weight in weights.items():
        needs_bias = ".h." in name or ".ln_f." in name
        if needs_bias and is_dense_float(weight) and weight.dim() > 0:
            biases[name.removesuffix("weight") + "bias"] = torch.zeros(weight.size(0))
    return biases


def is_dense_float(tensor: object) -> bool:
    """Whether `tensor` is an ordinary tensor of floats, of which each element is stored."""
    if not torch.is_tensor(tensor) or tensor.layout != torch.strided:
        return False
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False

    # A tensor that was expanded claims any number of elements, but stores one.
    size = tensor.numel() * tensor.element_size()
    return 0 < size <= tensor.untyped_storage().nbytes()


def check_config(config) -> None:
    """ValueError unless each value of a model's config is one that a model can have."""
    for name, value in vars(config).items():
        if name == "gelu":
            expected = "tanh or none"
            valid = value in ("tanh", "none")
        else:
            expected = f"a whole number from 1 to {LARGEST_SIZE}"
            valid = type(value) is int and 1 <= value <= LARGEST_SIZE
        if not valid:
            raise unexpected(f"its config's {name}", expected, value)


def check_sizes(config, state_dict: dict) -> None:
    """ValueError if the config claims more layers or tokens than there are weights."""
    # Even on "meta", where tensors take no memory, a model makes a list of its layers, and
    # frontier's a table of its tokens.
    if config.n_layer > len(state_dict):
        expected = f"at most the number of its tensors, {len(state_dict)}"
        raise unexpected("its config's n_layer", expected, config.n_layer)

    embedding = state_dict.get(EMBEDDING)
    if not is_dense_float(embedding):
        raise ValueError(f"its {EMBEDDING} is missing or not a plain tensor of floats")
    shape = list(embedding.shape)
    if shape[:1] != [config.vocab_size]:
        raise ValueError(f"its config's vocab_size is {config.vocab_size}, but its embedding has "
                         f"the shape {shape}")


def check_shared_memory(model, is_tied: bool) -> None:
    """ValueError if several tensors of the file are one, but for a tied head.

    Each would get memory of its own, and so a small file could fill the memory.
    """
    storages, needed = {}, 0
    for name, p in model.named_parameters():
        if is_tied and name == HEAD:
            continue
        storage = p.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        needed += p.numel() * p.element_size()
    if needed > sum(storages.values()):
        raise ValueError("several of its tensors share memory")


@torch.no_grad()
def build_model(cls: type, config, state_dict: dict):
    """A `cls(config)` with the weights of `state_dict`, as float32.

    ValueError, or an error of torch's, if they do not fit.
    """
    check_config(config)
    check_sizes(config, state_dict)

    # On "meta" a model has names and shapes, but allocates nothing, whatever its config claims. It
    # also refuses an n_embd that is not divisible by n_head.
    with torch.device("meta"):
        model = cls(config)

    is_tied = model.lm_head.weight is model.transformer.wte.weight
    if is_tied:
        state_dict = {HEAD: state_dict[EMBEDDING]} | state_dict
    model.load_state_dict(state_dict, assign=True)

    # Now all names and shapes are right. The tensors are still the file's own, of any dtype.
    check_shared_memory(model, is_tied)
    for name, p in model.named_parameters():
        if not is_dense_float(p):
            raise ValueError(f"its {name} is not a plain tensor of floats")
        if not p.isfinite().all():
            raise ValueError(f"its {name} contains numbers that are not finite")
        p.data = torch.empty(p.shape, dtype=torch.float32).copy_(p)

    if is_tied:
        if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
            raise ValueError("its head differs from its embedding (expected the same weights)")
        model.lm_head.weight = model.transformer.wte.weight
    return model
