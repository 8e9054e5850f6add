"""The config of a run, complete, and whether it can run: before anything is built or written."""
import dataclasses
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.attention import check_attention
from runtime.batch_size import allowed_micro_batches, divisors
from runtime.cli import UserError
from runtime.dataloader import Data, open_data
from runtime.device import choose_dtype, memory_of
from runtime.distributed import Process
from runtime.forecast import ModelSize, size_text
from runtime.progress import counted
from runtime.resume import MODEL_SHAPE, check_data
from runtime.shards import first_words
from runtime.tokenizer import VOCAB_SIZE


def load_init(config, process: Process, models: dict, load_model: Callable) -> torch.nn.Module | None:
    """The model of --init, of the class in `models` that --recipe names; None for --init scratch."""
    if config.init == "scratch":
        return None
    with process.progress(f"loading {config.init}"):
        model = process.rank0_first(load_model, config.init)
    recipe = next(name for name, cls in models.items() if type(model) is cls)
    if recipe != config.recipe:
        raise UserError(f"--init {config.init} is a model of --recipe {recipe}, not {config.recipe}: give "
                        f"--recipe {recipe}")
    return model


def complete_config(config, explicit_flags: set[str], recipe, process: Process,
                    model: torch.nn.Module | None = None):
    """The config of a run, complete: the flags, what the `model` of --init decides, and automatic values
    replaced by what they mean on this device. UserError if it cannot run."""
    if model is not None:
        config = dataclasses.replace(config, **shape_of_init(config, explicit_flags, model))
    for f in dataclasses.fields(config):
        if f.name in explicit_flags and config.recipe not in f.metadata.get("recipes", [config.recipe]):
            raise UserError(f"--{f.name} does not apply to --recipe {config.recipe}: leave it out")
    config = dataclasses.replace(config, **automatic_values(config, recipe, process.device))
    check_config(config)
    most = allowed_micro_batches(config, process.world_size, process.device)[-1]    # raises if there is none
    if config.batch_size != "auto" and most < int(config.batch_size):
        process.print0(f"--batch_size {config.batch_size} is more than an update has "
                       f"({counted(most, 'sequence')} for each of "
                       f"{counted(process.world_size, 'process')}): a micro-step takes {most}")
    check_attention(config.attention, process.device, getattr(torch, config.dtype),
                    config.n_embd // config.n_head, masked=config.window > 0)
    return dataclasses.replace(config, **disable_text_evals(config, explicit_flags, process))


def open_checked_data(config, checkpoint: dict | None, path: Path | None, process: Process) -> Data:
    """The data of --data, the same on all ranks and as that of the checkpoint's run."""
    with process.progress(f"reading {config.data}"):
        data = process.on_all_ranks(open_data, config)
    process.require_same(f"content of --data {config.data}", data.fingerprints())
    if checkpoint:
        check_data(checkpoint, data.fingerprints(), config.data, path)
    return data


def shape_of_init(config, explicit_flags: set[str], model: torch.nn.Module) -> dict:
    """What the model of --init decides of the config. UserError where a flag contradicts it."""
    shape = {name: getattr(model.config, name) for name in MODEL_SHAPE}
    for name, value in shape.items():
        if name in explicit_flags and getattr(config, name) != value:
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, which has "
                            f"{value}: leave the flag out")
    if hasattr(model.config, "window"):         # any window fits the weights
        if "window" in explicit_flags:
            model.config.window = config.window
        shape["window"] = model.config.window
    return shape


def automatic_values(config, recipe, device: str) -> dict:
    """Of the flags whose value stands for one that is derived (resume.AUTOMATIC and more): what it means."""
    prompt = config.sample_prompt
    if prompt == "auto" and config.sample_every:
        prompt = first_words(config.data) or "Hello, I'm a language model,"
    return recipe.automatic(config) | {
        "sequence_length": config.sequence_length or config.block_size, "sample_prompt": prompt,
        "dtype": choose_dtype(config.dtype, device),
        "loss_chunk": config.loss_chunk if config.loss_chunk >= 0 else 2048 if device == "cpu" else 0}


def disable_text_evals(config, explicit_flags: set[str], process: Process) -> dict:
    """Samples and HellaSwag need GPT-2's tokens: with a smaller vocabulary they are switched off with a
    warning, or UserError if a flag asked for them."""
    if config.vocab_size >= VOCAB_SIZE or not (config.sample_every or config.hellaswag_every):
        return {}
    reason = (f"samples and HellaSwag need GPT-2's {VOCAB_SIZE} tokens, and --vocab_size is "
              f"{config.vocab_size}")
    if explicit_flags & {"sample_every", "hellaswag_every", "hellaswag_data"}:
        raise UserError(f"{reason}: give --sample_every 0 --hellaswag_every 0, or a larger vocabulary")
    process.print0(f"warning: continuing without either: {reason}")
    return {"sample_every": 0, "hellaswag_every": 0}


def check_config(config) -> None:
    """UserError for what can be checked on the flags alone."""
    for f in dataclasses.fields(config):
        minimum, bits = f.metadata.get("minimum", 0 if f.type is int else None), f.metadata.get("bits", 40)
        if minimum is not None and not minimum <= getattr(config, f.name) < 2**bits:
            raise UserError(f"--{f.name} {getattr(config, f.name)}: must be at least {minimum} and below "
                            f"2^{bits}")
    if not 0 < config.max_lr < math.inf or not (0 <= config.min_lr <= config.max_lr or config.min_lr == -1):
        raise UserError(f"--max_lr {config.max_lr} --min_lr {config.min_lr}: the first must be above 0, the "
                        "second from 0 to the first")
    if not 0 <= config.cooldown <= 1:
        raise UserError(f"--cooldown {config.cooldown}: give a fraction of the steps up to 1, or 0 for what "
                        "suits the run's updates")
    if config.n_embd % config.n_head:
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: give "
                        f"one of {', '.join(map(str, divisors(config.n_embd)))} heads")
    for name in ("sequence_length", "window"):
        if getattr(config, name) > config.block_size:
            raise UserError(f"--{name} {getattr(config, name)} is longer than --block_size "
                            f"{config.block_size}: shorten the one or raise the other")
    if config.overfit and config.val_every:
        raise UserError("--overfit has no validation data: leave --val_every out")
    if config.updates_per_step & (config.updates_per_step - 1):
        raise UserError(f"--updates_per_step {config.updates_per_step}: give a power of two")
    if config.vocab_size > 65536:
        raise UserError(f"--vocab_size {config.vocab_size}: tokens are uint16, so 65536 is the most")
    if config.batch_size != "auto" and not (config.batch_size.isdecimal() and int(config.batch_size) > 0):
        raise UserError(f"--batch_size {config.batch_size}: give a number of sequences from 1 on, or auto")
    for name in ("wandb", "tensorboard"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise UserError(f"--{name} needs the package {name}: pip install {name}, or leave the flag out")


def check_memory(config, size: ModelSize, device: str) -> None:
    """UserError if weights, gradients and moments alone need more memory than there is, on a GPU more than
    is free: what others use of a CPU's can be swapped out."""
    free, memory = memory_of(device)
    there, remedy = f"{device} has {size_text(memory)}", "give a smaller --n_layer or --n_embd"
    if device.startswith("cuda"):
        there += f", of which {size_text(free)} are free"
        remedy += ", or end what else runs there (nvidia-smi shows it)"
    else:
        free = memory
    if size.state > free >= size.state - size.held + size.sharded:
        remedy = f"give --shard_optimizer, or{remedy.removeprefix('give')}"
    if size.state > free:
        raise UserError(f"{config.n_layer} layers of width {config.n_embd} have {size.parameters:,} "
                        f"parameters, which need {size_text(size.state)} to train, and {there}: {remedy}")
