"""The model of each recipe, and where a model comes from: new weights, or those of a file."""
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

MODELS = {
    "gpt2": GPT,
    "speedrun": SpeedrunGPT,
    "frontier": FrontierGPT,
}


def fresh_model(config) -> LanguageModel:
    """The model of config.recipe with new weights. `config` may have other fields, too."""
    cls = MODELS[config.recipe]

    # GPTConfig has the field `gelu`, which is no flag: its default holds.
    names = [f.name for f in fields(cls.Config) if hasattr(config, f.name)]
    shape = {name: getattr(config, name) for name in names}

    try:
        return cls(cls.Config(**shape))
    except ValueError as error:
        raise UserError(f"--n_embd {config.n_embd} --n_head {config.n_head}: {error}: give another "
                        "--n_head") from None


def load_model(source: str | Path) -> LanguageModel:
    """The model of `source`. UserError if it cannot be read.

    A source is one of
    - a checkpoint of this project, of nanoGPT (ckpt.pt) or of build-nanogpt (model_*.pt)
    - OUT, the folder of a run, which means its newest checkpoint
    - OUT/best, which means the checkpoint of the lowest validation loss there
    - a folder in the Hugging Face format, or a name on the hub
    """
    path = find_checkpoint(source)
    if path is None:
        return from_huggingface(source, MODELS)
    return model_from_checkpoint(read_checkpoint(path), path, MODELS)


def check_tokens(model: LanguageModel, source: str) -> None:
    """UserError unless `model`, read from `source`, has a vocabulary that can be GPT-2's."""
    size = model.config.vocab_size
    if size < VOCAB_SIZE:
        raise UserError(f"{source} has a vocabulary of {size} tokens (expected GPT-2's "
                        f"{VOCAB_SIZE}): give a model that was trained on GPT-2's tokens")
