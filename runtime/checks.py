"""Whether a run can start: flags, checkpoint, data and memory, before anything is built or written."""
import dataclasses
import importlib.util
import math
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from runtime.cli import UserError
from runtime.dataloader import TokenDataset, TokenLoader, open_data, splits
from runtime.device import choose_dtype, compiles, memory_of
from runtime.distributed import Process
from runtime.files import digest
from runtime.kernels import check_attention
from runtime.plan import Forecast, ModelSize, count_model
from runtime.resume import AUTOMATIC, MODEL_SHAPE, check_data, choose_checkpoint, merge_config, read_state
from runtime.shards import first_words, list_shards
from runtime.tokenizer import VOCAB_SIZE


MICRO_BATCH = 4096      # tokens; with more a CPU needs more memory and is no faster
# paths and devices of a machine, and what only rank 0 or the rank itself reads
PER_RANK = {"data", "hellaswag_data", "init", "out", "device", "profile", "log_every", "plot", "wandb",
            "tensorboard"}
CONTEXT = 1e9           # bytes of a GPU that one process takes before its first tensor, at most


@dataclass
class Plan:
    """A run that can start."""
    config: object                      # complete and checked
    path: Path | None                   # of the checkpoint to resume from
    checkpoint: dict | None
    model: torch.nn.Module | None       # of --init
    micro_batches: list[int]            # those that --batch_size allows, smallest first
    joined_rows: int                    # sequences up to which they are joined; 0: they are not
    size: ModelSize
    train_data: TokenDataset
    val: list                           # TokenDataset or None, number of its sequences that count
    recorded: dict                      # what a checkpoint holds of it: the shards, the derived flags


def plan_run(flags, explicit_flags: set[str], process: Process, models: dict, recipes: dict,
             fresh_model: Callable, load_model: Callable) -> Plan:
    """Checks what can be checked before a model is built, quick checks first. UserError on all ranks. For
    --dry_run prints what is known by then, and checks the memory after that."""
    process.on_all_ranks(require_same_flags, process.gather((asdict(flags), explicit_flags)))
    # rank 0 decides: without a shared file system other machines may have another newest checkpoint
    path = process.gather(process.on_all_ranks(choose_checkpoint, flags, process.restarted))[0]
    checkpoint = model = None
    if path:
        checkpoint = process.on_all_ranks(read_here, path, process)
        process.require_same("checkpoint", (str(path), digest(np.memmap(path, dtype=np.uint8, mode="r"))))
    asked = merge_config(flags, explicit_flags, checkpoint, path) if checkpoint else flags
    process.on_all_ranks(lambda: asked.overfit or [list_shards(asked.data, split) for split in splits(asked)])
    if not path and flags.init != "scratch":
        with process.progress(f"loading {flags.init}"):
            model = process.rank0_first(load_model, flags.init)
        if type(model) is not models[flags.recipe][0]:
            raise UserError(f"--init {flags.init} is not a model of --recipe {flags.recipe}")
    config = final_config(asked, explicit_flags, process, model)
    size = count_model(config, fresh_model, recipes[config.recipe].optimizers)
    if not config.dry_run:
        process.on_all_ranks(check_memory, config, size, process.device)
    check_attention(config.attention, process.device, getattr(torch, config.dtype),
                    config.n_embd // config.n_head, masked=config.window > 0)
    candidates = micro_batch_candidates(config, process.world_size, process.device)
    with process.progress(f"reading {config.data}"):
        train_data, *val = process.on_all_ranks(open_data, config)
    datasets = {"train": train_data, "val": val[0]}
    fingerprints = {split: dataset.fingerprint for split, dataset in datasets.items() if dataset}
    process.require_same(f"content of --data {config.data}", fingerprints)
    if checkpoint:
        check_data(checkpoint, fingerprints, config.data, path)
    derived = [name for name, value in AUTOMATIC.items() if getattr(asked, name) == value]
    joined_rows = most_joined_rows(config, process.device)
    if config.dry_run:
        Forecast(config, size, train_data, val, process, compiles(config, process.device)).print_plan()
        process.on_all_ranks(check_memory, config, size, process.device)
    return Plan(config, path, checkpoint, model, candidates, joined_rows, size, train_data, val,
                {"data": fingerprints, "derived": derived})


def require_same_flags(given: list[tuple[dict, set[str]]]) -> None:
    """UserError if a rank has another value of a flag than rank 0, or only one of them was given it, which
    decides on a resume. `given`: of each rank its flags and the names of those given."""
    def shown(rank, name):
        values, explicit = given[rank]
        return f"has --{name} {values[name]}" + ("" if name in explicit else " by default")
    for rank in range(1, len(given)):
        for name in sorted(given[0][0].keys() - PER_RANK):
            if shown(rank, name) != shown(0, name):
                raise UserError(f"process {rank} {shown(rank, name)}, and process 0 {shown(0, name)}: give "
                                "every machine the same")


def read_here(path: Path, process: Process) -> dict:
    """read_state, of the checkpoint that rank 0 chose."""
    if not process.is_master and not path.is_file():
        raise UserError(f"the checkpoint {path} of process 0 is not there on {socket.gethostname()}: put "
                        "--out, the folder with the checkpoints, on a file system that all machines share, "
                        "or copy the checkpoint there under the same path")
    return read_state(path)


def final_config(config, explicit_flags: set[str], process: Process, model: torch.nn.Module | None = None):
    """The config of a run, complete: the flags, what the `model` of --init decides, and automatic values
    replaced by what they mean on this device. UserError if it cannot run."""
    if model is not None:
        config = dataclasses.replace(config, **shape_of_init(config, explicit_flags, model))
    for f in dataclasses.fields(config):
        if f.name in explicit_flags and config.recipe not in f.metadata.get("only", [config.recipe]):
            raise UserError(f"--{f.name} has no meaning for --recipe {config.recipe}: leave it out")
    config = dataclasses.replace(config, **automatic_values(config, process.device))
    check_config(config)
    return dataclasses.replace(config, **disable_text_evals(config, explicit_flags, process))


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


def automatic_values(config, device: str) -> dict:
    prompt = config.sample_prompt
    if prompt == "auto" and config.sample_every:
        prompt = first_words(config.data) or "Hello, I'm a language model,"
    return {"sequence_length": config.sequence_length or config.block_size, "sample_prompt": prompt,
            "min_lr": config.max_lr / 10 if config.min_lr == -1 else config.min_lr,
            "dtype": choose_dtype(config.dtype, device),
            "loss_chunk": config.loss_chunk if config.loss_chunk >= 0 else 2048 * (device == "cpu")}


def disable_text_evals(config, explicit_flags: set[str], process: Process) -> dict:
    """Samples and HellaSwag need GPT-2's tokens: with a smaller vocabulary they are switched off with a
    warning, or UserError if a flag asked for them."""
    if config.vocab_size >= VOCAB_SIZE or not (config.sample_every or config.hellaswag_every):
        return {}
    reason = (f"samples and HellaSwag need GPT-2's {VOCAB_SIZE} tokens, and --vocab_size is "
              f"{config.vocab_size}")
    if explicit_flags & {"sample_every", "hellaswag_every", "hellaswag_data"}:
        raise UserError(f"{reason}: give --sample_every 0 --hellaswag_every 0, or a larger vocabulary")
    process.print0(f"warning: going on without either: {reason}")
    return {"sample_every": 0, "hellaswag_every": 0}


def check_config(config) -> None:
    """UserError for what can be checked on the flags alone."""
    for f in dataclasses.fields(config):
        least, bits = f.metadata.get("least", 0 if f.type is int else None), f.metadata.get("bits", 40)
        if least is not None and not least <= getattr(config, f.name) < 2**bits:
            raise UserError(f"--{f.name} {getattr(config, f.name)}: must be at least {least} and below "
                            f"2^{bits}")
    if not 0 < config.max_lr < math.inf or not (0 <= config.min_lr <= config.max_lr or config.min_lr == -1):
        raise UserError(f"--max_lr {config.max_lr} --min_lr {config.min_lr}: the first must be above 0, the "
                        "second from 0 to the first")
    if not 0 < config.cooldown <= 1:
        raise UserError(f"--cooldown {config.cooldown}: give a fraction of the steps above 0 and up to 1")
    if config.n_embd % config.n_head:
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: give "
                        f"one of {', '.join(map(str, divisors(config.n_embd)))} heads")
    if config.sequence_length > config.block_size:
        raise UserError(f"--sequence_length {config.sequence_length} is longer than --block_size "
                        f"{config.block_size}: shorten the one or raise the other")
    if not 0 <= config.window <= config.block_size:
        raise UserError(f"--window {config.window}: give a number of tokens up to --block_size "
                        f"{config.block_size}, or 0")
    if config.updates_per_step & (config.updates_per_step - 1):
        raise UserError(f"--updates_per_step {config.updates_per_step}: give a power of two")
    if config.vocab_size > 65536:
        raise UserError(f"--vocab_size {config.vocab_size}: tokens are uint16, so 65536 is the most")
    if config.batch_size != "auto" and not (config.batch_size.isdecimal() and int(config.batch_size) > 0):
        raise UserError(f"--batch_size {config.batch_size}: give a number of sequences from 1 on, or auto")
    for name in ("wandb", "tensorboard"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise UserError(f"--{name} needs the package {name}: pip install {name}, or leave the flag out")


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def micro_batch_candidates(config, world_size: int, device: str) -> list[int]:
    """The micro-batches (sequences) that divide --total_batch_size, smallest first; --batch_size alone if
    given. For auto on a CPU, and for --overfit, the largest of at most MICRO_BATCH tokens."""
    T, updates = config.sequence_length, config.updates_per_step
    if config.total_batch_size % (T * world_size * updates):
        unit = T * world_size * updates
        low = config.total_batch_size // unit
        near = [n * unit for n in (low, low + 1) if n]
        each = f" for each of --updates_per_step {updates}" if updates > 1 else ""
        give = " or ".join(map(str, near)) + (", or fewer updates a step" if updates > 1 else "")
        raise UserError(f"--total_batch_size {config.total_batch_size} does not divide into sequences of {T} "
                        f"tokens on {world_size} process(es){each}: give {give}")
    rows = config.total_batch_size // (T * world_size * updates)
    if config.batch_size == "auto":
        by_trial = device.startswith("cuda") and not config.overfit
        fits = [b for b in divisors(rows) if b * T <= MICRO_BATCH or b == 1]
        return divisors(rows) if by_trial else fits[-1:]
    if rows % int(config.batch_size):
        part = "an update" if updates > 1 else "a step"
        raise UserError(f"--batch_size {config.batch_size} does not divide the {rows} sequences {part} of "
                        f"each of {world_size} process(es): give one of "
                        f"{', '.join(map(str, divisors(rows)))}, or auto")
    return [int(config.batch_size)]


def most_joined_rows(config, device: str) -> int:
    """Sequences up to which an update's micro-batches are joined; 0: they are not. Only for --batch_size auto
    in eager mode on a CPU: a graph is compiled for one shape, and a GPU's micro-batch is the largest that its
    memory has room for."""
    joins = config.batch_size == "auto" and device == "cpu" and not config.compile
    return MICRO_BATCH // config.sequence_length if joins else 0


def check_memory(config, size: ModelSize, device: str) -> None:
    """UserError if weights, gradients and moments alone need more memory than there is, on a GPU more than
    is free: what others use of a CPU's can be swapped out."""
    free, memory = memory_of(device)
    free = free if device.startswith("cuda") else memory
    if size.state <= free:
        return
    need = (f"{config.n_layer} layers of width {config.n_embd} have {size.parameters:,} parameters, which "
            f"need {size.state / 1e9:,.1f} GB to train, and {device} has {memory / 1e9:,.1f} GB")
    smaller = "give a smaller --n_layer or --n_embd"
    if size.state > memory:
        raise UserError(f"{need}: {smaller}")
    need += f", of which {free / 1e9:,.1f} GB are free"
    if memory - free <= CONTEXT:
        raise UserError(f"{need} beside its driver: {smaller}")
    raise UserError(f"{need}: end what else runs there (nvidia-smi shows it), choose another GPU by "
                    f"--device, or {smaller}")


def oom_advice(config, loader: TokenLoader | None, device: str) -> str:
    """What to do when memory runs out. `loader`: None before the first step."""
    B = loader.B if loader else 0
    if loader and (largest := loader.largest(config.updates_per_step)) > B:
        return (f"{device} is out of memory with micro-batches of up to {largest} sequences: give "
                f"--batch_size {B}, which changes nothing else")
    if B > 1:
        return (f"{device} is out of memory with --batch_size {B}: give --batch_size {divisors(B)[-2]}, "
                "which changes nothing else")
    smaller = "give a smaller model (--n_layer, --n_embd)"
    if B == 0:
        return (f"{device} is out of memory before the first step: end what else runs there, or {smaller}, "
                "or --batch_size 1")
    chunk = "--loss_chunk 1024, " if not 0 < config.loss_chunk <= 1024 else ""
    return (f"{device} is out of memory with --batch_size 1: give {chunk}a shorter --sequence_length, or "
            f"{smaller[5:]}")
