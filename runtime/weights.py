"""From a checkpoint's file to a model: this project's, nanoGPT's, build-nanogpt's.

No code of a file runs, and a file that is damaged, or holds another model, becomes a UserError of
one line.
"""
import dataclasses
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from runtime.cli import UserError, is_rank_0, print_error, unexpected
from runtime.files import checkpoints, is_there, reading
from runtime.metrics import read_metrics

MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")      # in every Config
EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"

# OpenAI and transformers store these weights of a GPT-2 as (in, out), nn.Linear as (out, in).
TRANSPOSED = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)

OTHER_KIND = "is of no kind that is read here: docs/formats.md has what to do with it"


# ---------------------------------------------------------------------- which file is meant

def find_checkpoint(source: str | Path) -> Path | None:
    """The file that `source` means, or the folder in the Hugging Face format; None: a hub's name.

    A file means itself, a run's folder OUT its newest checkpoint, OUT/best the one of the lowest
    validation loss, and the folder of transformers' Trainer its newest checkpoint-N. UserError for
    any other folder.
    """
    path = Path(source)
    path_is_there = is_there(path)
    if path.is_dir():
        if is_there(path / "config.json"):
            return path
        found = checkpoints(path)
        for config in path.glob("checkpoint-*/config.json"):
            _, number = config.parent.name.split("-", 1)
            if number.isdecimal():
                found.append((int(number), config.parent))
        if not found:
            raise UserError(f"{source} is neither a run's folder (it has no checkpoint_*.pt) nor "
                            "in the Hugging Face format (it has no config.json): choose one of "
                            "these, or a checkpoint's file (docs/formats.md has other kinds)")
        step, newest = max(found)
        return newest

    if path.suffix == ".safetensors" or path.name in ("config.json", "pytorch_model.bin"):
        raise UserError(f"{source} is one of the files of a Hugging Face folder: give the folder, "
                        f"{path.parent}")

    if path.name == "best" and path.parent.is_dir() and not path_is_there:
        return best_checkpoint(path.parent)
    if path_is_there or path.suffix in (".pt", ".pth", ".ckpt"):
        return path
    return None


def best_checkpoint(out: Path) -> Path:
    """The checkpoint in a run's folder with the lowest validation loss, by its metrics.csv."""
    remedy = f"use a checkpoint's file, or {out} for the newest checkpoint"
    saved = dict(checkpoints(out))                                              # {step: path}
    best = read_metrics(out / "metrics.csv", remedy).lowest(saved)
    if best is None:
        raise UserError(f"{out / 'best'} is not known, because no checkpoint in {out} has a "
                        f"validation loss in metrics.csv: {remedy}")
    loss, step = best
    return saved[step]


def tell_of_best(source: str | Path) -> None:
    """Names OUT/best, if `source` is a run's folder OUT whose newest checkpoint is another one."""
    if not Path(source).is_dir() or not checkpoints(source):
        return
    _, newest = checkpoints(source)[-1]
    try:
        best = best_checkpoint(Path(source))
    except (UserError, FileNotFoundError):
        return                          # it has not been validated, or metrics.csv is gone
    if best != newest:
        print_error(f"{newest.name} is the newest of {source}; the lowest validation loss is that "
                    f"of {source}/best, which is {best.name}")


# ---------------------------------------------------------------------- reading a file

def read_checkpoint(
    path: str | Path, remedy: str = "check the path, or copy the file again"
) -> dict:
    """The dict that a .pt file holds. UserError with `remedy` if it cannot be read."""
    # `reading` turns any error in here into a UserError that names the file.
    with reading(path, remedy, problem="cannot be read as a checkpoint"):
        check_zip(path)

        # weights_only=True runs no code of the file. build-nanogpt pickles an instance of
        # GPTConfig, a class of its own script: here that becomes a plain record with the same
        # attributes.
        allowed = torch.serialization.safe_globals([(SimpleNamespace, "__main__.GPTConfig")])
        try:
            with warnings.catch_warnings(action="ignore"), allowed:
                checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            # torch says "Unsupported global: GLOBAL module.Class", or of DTensors which module
            # "must be imported to load" them.
            refused = re.search(r"(?:GLOBAL|imported to load) (DTensor|\S+)", str(error))
            if refused is None:
                raise
            raise UserError(f"{path} contains a {refused[1]} (expected tensors and plain values): "
                            "save it again without that: a model as its state_dict(), NumPy's "
                            "numbers as float(x), DTensors as x.full_tensor()") from None

        if not isinstance(checkpoint, dict):
            raise UserError(f"{path} {OTHER_KIND}")
        return checkpoint


def check_zip(path: str | Path) -> None:
    """An error unless the file is a whole, uncompressed zip, as torch.save writes it."""
    with open(path, "rb") as file:
        beginning = file.read(2)        # the system's own error, if it cannot be read
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        # Where the reading fails later, zipfile hides the error behind "not a zip file".
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        # A zip that was cut off begins like one, and a crash can leave zeros.
        if beginning not in (b"", b"\0\0", b"PK"):
            raise UserError(f"{path} {OTHER_KIND}") from None
        raise

    with archive:
        # Each record has a CRC-32, which torch.load ignores.
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"its record {damaged} is damaged and has another CRC-32")

        # read_checkpoint maps tensors from the file: compressed bytes would be taken for numbers.
        records = archive.infolist()
        is_compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        is_torchs = any(record.filename.endswith("/data.pkl") for record in records)
        if is_compressed or not is_torchs:
            raise UserError(f"{path} {OTHER_KIND}")


# ---------------------------------------------------------------------- from weights to a model

def gpt2_in_our_names(state_dict: dict) -> dict:
    """A GPT-2's state dict of any project, with the names and tensors of model.GPT's."""
    weights = {}
    for name, tensor in state_dict.items():
        # torch.compile's prefix is inside a name where a block was compiled by itself. The other
        # is DDP's.
        name = name.replace("_orig_mod.", "").removeprefix("module.")
        # A LightningModule puts before them what it calls the model.
        for part in ("transformer.", "lm_head."):
            if part in name:
                name = name[name.index(part):]

        # OpenAI's weights on the hub have no such prefix.
        if not name.startswith(("transformer.", "lm_head.")):
            name = "transformer." + name

        # The causal mask, which older code stored in each layer.
        is_mask = name.endswith((".attn.bias", ".attn.masked_bias"))
        if not is_mask:
            if name in weights:
                raise ValueError(f"it has several {name}")
            weights[name] = tensor

    # nn.Linear's is (3C, C).
    first = weights["transformer.h.0.attn.c_attn.weight"]
    if first.size(0) < first.size(1):
        weights = transpose(weights)

    # nanoGPT's bias=False
    if not any(name.endswith(".bias") for name in weights):
        weights |= zero_biases(weights)

    # Embedding and head are tied: a file may have one of them only.
    # build_model adds a head that is missing.
    if HEAD in weights:
        weights.setdefault(EMBEDDING, weights[HEAD])
    return weights


def transpose(weights: dict) -> dict:
    """The weights, from transformers' (in, out) to nn.Linear's (out, in), or back."""
    result = dict(weights)
    for name, tensor in weights.items():
        if name.endswith(TRANSPOSED):
            result[name] = tensor.t()
    return result


def gpt2_of_others(checkpoint: dict, path: str | Path) -> tuple[dict, dict]:
    """(settings, weights) of another project's GPT-2: those of a Config, and of a model.GPT.

    What `checkpoint`, from the file `path`, does not say is taken from the shapes. They do not tell
    the number of heads: then these are of 64 numbers, as in GPT-2.
    """
    found = [key for key in ("model", "state_dict", "model_state_dict") if key in checkpoint]
    if found:
        weights = checkpoint[found[0]]
    else:
        weights = checkpoint                            # the file is a state dict alone
    weights = gpt2_in_our_names(weights)

    gelu = "tanh"
    settings = checkpoint.get("config") or checkpoint.get("hyper_parameters") or {}  # Lightning's
    if "model_args" in checkpoint:                      # nanoGPT's
        gelu = "none"
        settings = checkpoint["model_args"]
    elif not isinstance(settings, dict):                # build-nanogpt's
        settings = vars(settings)

    vocab_size, n_embd = weights[EMBEDDING].shape
    sizes = {
        "n_layer": len({name.split(".")[2] for name in weights if ".h." in name}),
        "n_embd": n_embd,
        "block_size": len(weights["transformer.wpe.weight"]),
        "vocab_size": vocab_size,
    }
    if "n_head" not in settings:
        if n_embd % 64 != 0:
            raise UserError(f"{path} does not say how many heads it has: save "
                            "{'model': state_dict, 'config': {'n_head': ...}}")
        sizes["n_head"] = n_embd // 64
        if is_rank_0():
            print_error(f"{path} does not say how many heads it has: {n_embd // 64} are taken, of "
                        f"64 numbers each, as in GPT-2, and GELU(approximate={gelu!r})")
    return sizes | {"gelu": gelu} | settings, weights


def zero_biases(weights: dict) -> dict:
    """A bias for each weight of the blocks and the last norm."""
    biases = {}
    for name, weight in weights.items():
        if ".h." in name or ".ln_f." in name:
            biases[name.removesuffix("weight") + "bias"] = torch.zeros(weight.size(0))
    return biases


def config_of(cls: type, settings: dict):
    """The Config of a model's class from {field: value}; a field that is missing has its default.

    ValueError or KeyError unless each value is one that a model can have.
    """
    values = {name: settings[name] for name in MODEL_SHAPE}
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise unexpected(f"its config's {name}", "a whole number from 1 on", value)

    # What somebody has added to the Config, such as a rate of dropout.
    for field in dataclasses.fields(cls.Config):
        value = settings.get(field.name, field.default)
        if field.name == "gelu" and value not in ("tanh", "none"):
            raise unexpected("its config's gelu", "tanh or none", value)
        values[field.name] = value
    return cls.Config(**values)


@torch.no_grad()
def build_model(cls: type, settings: dict, state_dict: dict):
    """A `cls` with these settings, {field of its Config: value}, and weights, as float32.

    It is in eval(). ValueError, or an error of torch's, if they do not fit.
    """
    config = config_of(cls, settings)

    # On "meta" a model has names and shapes, but allocates nothing. The tensors of the file take
    # the place of its own, and load_state_dict compares all names and shapes.
    with torch.device("meta"):
        model = cls(config)
    load_weights(model, state_dict)

    # What it computes by itself, such as rotary tables, has to be made for real.
    if any(tensor.is_meta for tensor in own_tensors(model)):
        with torch.random.fork_rng():
            model = cls(config)
        load_weights(model, state_dict)
    return model.eval()


def load_weights(model: torch.nn.Module, state_dict: dict) -> None:
    # An export also has what a model computes from its config: the parts of frontier's tokens.
    computed = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    state_dict = {name: tensor for name, tensor in state_dict.items() if name not in computed}

    is_tied = model.lm_head.weight is model.transformer.wte.weight
    if is_tied and HEAD not in state_dict:
        state_dict = state_dict | {HEAD: state_dict[EMBEDDING]}
    # torch's own error names them all, and would be cut off.
    missing = sorted(model.state_dict().keys() - state_dict.keys())
    if missing:
        raise KeyError(missing[0])
    for name, tensor in model.state_dict().items():
        if state_dict[name].shape != tensor.shape:
            raise unexpected(f"the shape of its {name}", tuple(tensor.shape),
                             tuple(state_dict[name].shape))
    model.load_state_dict(state_dict, assign=True)

    for name, p in model.named_parameters():
        if not p.is_floating_point() or not p.isfinite().all():
            raise ValueError(f"its {name} contains numbers that are not finite floats")
    # Copies, because the file's own tensors are views of the file, which may change.
    for p in model.parameters():
        p.data = torch.empty(p.shape, dtype=torch.float32).copy_(p)
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.clone()

    if is_tied:
        if not torch.equal(model.lm_head.weight, model.transformer.wte.weight):
            raise ValueError("its head differs from its embedding (expected the same weights)")
        model.lm_head.weight = model.transformer.wte.weight


def own_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a model that are no parameters: buffers, and attributes of its modules."""
    yield from model.buffers()
    for module in model.modules():
        for value in vars(module).values():
            values = value if isinstance(value, list | tuple) else [value]
            yield from (tensor for tensor in values if torch.is_tensor(tensor))
