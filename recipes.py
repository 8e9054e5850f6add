"""The model of each recipe, and how one comes to be: fresh, or read from a file."""
from dataclasses import fields
from pathlib import Path

from frontier import FrontierGPT
from model import GPT
from runtime.cli import UserError
from runtime.huggingface import from_huggingface
from runtime.language_model import LanguageModel
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint
from speedrun import SpeedrunGPT

MODELS = {"gpt2": GPT, "speedrun": SpeedrunGPT, "frontier": FrontierGPT}


def fresh_model(config) -> LanguageModel:
    """The model of config.recipe with fresh weights. `config` may have other fields, too."""
    cls = MODELS[config.recipe]
    names = [f.name for f in fields(cls.Config) if hasattr(config, f.name)]
    try:
        return cls(cls.Config(**{name: getattr(config, name) for name in names}))
    except ValueError as error:
        raise UserError(f"--n_embd {config.n_embd} --n_head {config.n_head}: {error}. Give another "
                        "number of heads") from None


def load_model(source: str | Path) -> LanguageModel:
    """The model of `source`. UserError if it cannot be read.

    A source is a checkpoint of this project, a run's folder OUT (its newest checkpoint) or OUT/best
    (the one of the lowest validation loss); a folder in the Hugging Face format or a name on the
    hub; nanoGPT's ckpt.pt or build-nanogpt's model_*.pt.
    """
    path = find_checkpoint(source)
    if path is None:
        return from_huggingface(source, MODELS)
    return model_from_checkpoint(read_checkpoint(path), path, MODELS)


def check_tokens(model: LanguageModel, source: str) -> None:
    """UserError unless `model`, read from `source`, has GPT-2's tokens."""
    size = model.config.vocab_size
    if size < VOCAB_SIZE:
        raise UserError(f"{source} has another vocabulary than GPT-2 (expected {VOCAB_SIZE}, "
                        f"found {size}): give a model that was trained on those")
