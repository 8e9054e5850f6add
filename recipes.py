"""The recipes: each is a model and how it is trained. And load_model, which reads any of them."""
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

import frontier
import speedrun
from model import GPT
from runtime.checkpoint import check_code, model_from_checkpoint, warn_of_backwards
from runtime.cli import UserError
from runtime.huggingface import from_huggingface
from runtime.language_model import LanguageModel
from runtime.recipe import Recipe
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import find_checkpoint, read_checkpoint

# runtime/recipe.py explains the fields of a Recipe.
RECIPES = {
    "gpt2": Recipe(GPT),                # a model alone is trained as train_gpt2.py trains GPT-2
    "speedrun": speedrun.RECIPE,
    "frontier": frontier.RECIPE,
}


def models() -> dict[str, type]:
    """{recipe: the class of its model}."""
    return {name: recipe.model for name, recipe in RECIPES.items()}


def fresh_model(config) -> LanguageModel:
    """The model of config.recipe with new weights. `config` may have other fields, too.

    UserError for a shape that the model cannot have.
    """
    cls = RECIPES[config.recipe].model

    # GPTConfig has the field `gelu`, which is no flag: its default holds.
    names = [f.name for f in fields(cls.Config) if hasattr(config, f.name)]
    shape = {name: getattr(config, name) for name in names}
    try:
        with nan_in_empty_tensors():
            model = cls(cls.Config(**shape))
    except ValueError as error:
        raise UserError(f"{error}: choose another --n_embd or --n_head") from None

    for name, p in model.named_parameters():
        if p.isnan().any():
            raise UserError(f"no initialisation for {name}: draw it in init_weights, or where it "
                            "is made")
    return model


@contextmanager
def nan_in_empty_tensors():
    """Inside, torch.empty is full of nan, so that a parameter that nobody initialises shows."""
    # In this mode torch.utils.deterministic fills them. (torch.use_deterministic_algorithms would
    # import the compiler, which takes seconds.)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def load_model(source: str | Path, refuse_other_code: bool = False) -> LanguageModel:
    """The model of `source`. UserError if it cannot be read.

    If the model's code has changed since, that is told, or with `refuse_other_code` a UserError.

    A source is one of
    - a checkpoint of this project, of nanoGPT (ckpt.pt) or of build-nanogpt (model_*.pt), or
      another file of torch.save with a GPT-2's state dict
    - OUT, the folder of a run, which means its newest checkpoint
    - OUT/best, which means the checkpoint of the lowest validation loss there
    - a folder in the Hugging Face format, or that of a Trainer, which means its newest
      checkpoint-N; or a name on the hub
    """
    path = find_checkpoint(source)
    if path is None or path.is_dir():
        return from_huggingface(path or source, models())
    checkpoint = read_checkpoint(path)
    model = model_from_checkpoint(checkpoint, path, models())
    check_code(model, checkpoint, path, refuse_other_code)
    warn_of_backwards(checkpoint, path)
    return model


def check_tokens(model: LanguageModel, source: str) -> None:
    """UserError unless `model`, read from `source`, has a vocabulary that can be GPT-2's."""
    size = model.config.vocab_size
    if size < VOCAB_SIZE:
        raise UserError(f"{source} has a vocabulary of {size} tokens (expected GPT-2's "
                        f"{VOCAB_SIZE}): choose a model that was trained on GPT-2's tokens")
