"""The models of the recipes (train_gpt2.RECIPES says how each is trained), and the presets."""
from dataclasses import fields
from pathlib import Path

from frontier import FrontierGPT
from model import GPT, GPT2_SIZES, LanguageModel
from runtime.cli import UserError
from runtime.flags import Preset
from runtime.huggingface import from_huggingface
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint
from speedrun import SpeedrunGPT

MODELS = {
    "gpt2": GPT,
    "speedrun": SpeedrunGPT,
    "frontier": FrontierGPT,
}

PRESETS = {
    # 200 steps are one epoch, 0.3M tokens: the first 100 have half the batch (frontier's
    # batch_divisors). In a second epoch the validation loss rises again. The sequences are long,
    # because a play that training has not seen repeats its own names. The warmup and max_lr are for
    # --recipe gpt2: frontier's own (Recipe.rates) win over those of a preset.
    "shakespeare": Preset(
        "Trains 35M parameters on 0.3M tokens of input.txt: minutes on a CPU.",
        dict(
            recipe="frontier", data="data/shakespeare", out="log/shakespeare",
            n_layer=4, n_head=2, n_embd=256, block_size=1024,
            total_batch_size=2048, max_steps=200, warmup_steps=15, max_lr=2e-3,
            val_every=50, hellaswag_every=0, sample_every=100, sample_prompt="\n",
            checkpoint_every=100,
        ),
    ),
    "small": Preset(
        "Trains 30M parameters on 33M tokens: a night on a CPU.",
        dict(
            n_layer=6, n_head=6, n_embd=384, block_size=256,
            total_batch_size=16384, max_steps=2000, warmup_steps=100, max_lr=1e-3,
            val_tokens=524288, val_every=200, hellaswag_every=0,
            sample_every=500, sample_prompt="\n", checkpoint_every=200,
        ),
    ),

    # GPT-3's learning rates and batches (Brown et al. 2020, arXiv:2005.14165, table 2.1). With XL's
    # batch of 1M tokens half as many steps make the same 10 billion tokens.
    "gpt2": Preset(
        "Trains GPT-2 (124M) on 10B tokens, by the defaults: for GPUs.",
        {},
    ),
    "gpt2-medium": Preset(
        "Trains 355M parameters on 10B tokens: for GPUs.",
        dict(**GPT2_SIZES["gpt2-medium"], max_lr=3e-4),
    ),
    "gpt2-large": Preset(
        "Trains 774M parameters on 10B tokens: for GPUs.",
        dict(**GPT2_SIZES["gpt2-large"], max_lr=2.5e-4),
    ),
    "gpt2-xl": Preset(
        "Trains 1.6B parameters on 10B tokens: for GPUs.",
        dict(
            **GPT2_SIZES["gpt2-xl"],
            total_batch_size=1048576, max_steps=9536, warmup_steps=358, max_lr=2e-4,
        ),
    ),

    # Measured in docs/finetuning.md.
    "finetune": Preset(
        "Finetunes the weights of --init on 1.2M tokens of your own text (--data).",
        dict(
            init="gpt2", out="log/finetune",
            total_batch_size=8192, max_steps=150, warmup_steps=15, max_lr=1e-4,
            val_tokens=524288, val_every=25, hellaswag_every=0,
            sample_every=50, sample_prompt="\n", checkpoint_every=25, keep_checkpoints=1,
        ),
    ),
}

# --overfit is the lecture's sanity run: 50 steps on one batch. FlagTable.merge sets min_lr to
# max_lr, so the rate is constant. The run writes no files.
OVERFIT = dict(
    vocab_size=50257, total_batch_size=4 * 32, sequence_length=32, shuffle=False,
    max_steps=50, warmup_steps=0, max_lr=3e-4,
    val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0,
)


def fresh_model(config) -> LanguageModel:
    """The model of config.recipe with new weights. `config` may have other fields, too."""
    cls = MODELS[config.recipe]

    # GPTConfig has the field `gelu`, which is no flag: its default holds.
    names = [f.name for f in fields(cls.Config) if hasattr(config, f.name)]
    shape = {name: getattr(config, name) for name in names}

    try:
        return cls(cls.Config(**shape))
    except ValueError as error:
        # head_size (in model.py) names the fields. On the command line they are flags.
        text = str(error).replace("n_embd", "--n_embd").replace("n_head", "--n_head")
        raise UserError(f"{text}: choose another --n_embd or --n_head") from None


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
                        f"{VOCAB_SIZE}): choose a model that was trained on GPT-2's tokens")
