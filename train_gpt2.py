"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                          a sanity check: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run     what a run would do, and for how long
    python train_gpt2.py                                    on the shards of `python fineweb.py`
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  the same on 8 GPUs

Run the same command again to resume from the newest checkpoint in --out.
"""
# First, because it refuses an old Python in one line.
from runtime.cli import RunError, flag, printed_by, run_command

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import frontier
import hellaswag
import speedrun
from model import ATTENTION
from recipes import MODELS, OVERFIT, PRESETS, fresh_model, load_model
from runtime import plots
from runtime.checkpoint import (
    Output,
    Start,
    check_resumed_flags,
    find_start,
    gather_moments,
    host_copy,
    restore,
    weights_digest,
)
from runtime.console import StepLog, in_bits, print_estimate, print_header, print_summary
from runtime.dataloader import Data, TrainLoader, open_data, to_device
from runtime.device import (
    choose_batch_size,
    choose_device,
    choose_dtype,
    copy_later,
    oom_as_user_error,
    most_sequences_that_fit,
    time_micro_step,
    tune_malloc,
)
from runtime.files import run_can_continue
from runtime.flags import check_flags, parse_flags
from runtime.language_model import LanguageModel
from runtime.optimizers import CombinedOptimizer
from runtime.ranks import Process, StopRequested, leave_group, read_launch, shared_store
from runtime.recipe import BatchSchedule, Recipe, make_batch_schedule
from runtime.tokenizer import EOT, encode, tokenizer

# ----------------------------------------------------------------------------- the recipe of GPT-2

def warmup_cosine(step: int, progress: float, config) -> float:
    """GPT-2's Recipe.lr_scale: linear warmup, then a cosine to min_lr (arXiv:1608.03983).

    It needs no `progress`, because all steps of this recipe have the same number of tokens.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps

    decay = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    min_scale = config.min_lr / config.max_lr
    return min_scale + 0.5 * (1.0 + math.cos(math.pi * min(1.0, decay))) * (1.0 - min_scale)


RECIPES = {
    # Config's defaults for the optimizer, and AdamW's settings in model.py, are those of GPT-3 Small
    # (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B).
    "gpt2": Recipe(
        make_optimizers=lambda model, config: model.configure_optimizers(
            config.max_lr, config.weight_decay),
        lr_scale=warmup_cosine,
    ),
    "speedrun": speedrun.RECIPE,
    "frontier": frontier.RECIPE,
}


# ----------------------------------------------------------------------------- flags

START, DATA, MODEL, BATCH = "start", "data", "model", "batch"
OPTIM, SPEED, OUTPUT = "optimisation", "speed", "output"


@dataclass
class Config:
    """All flags. runtime.cli.flag explains `fixed`, `per_run` and the other settings."""
    preset: str = flag("gpt2", START, "A named set of defaults. The presets are listed below.",
                       choices=list(PRESETS), per_run=True)
    dry_run: bool = flag(False, START, "Print what the run would do and how long it would take, "
                         "and write nothing.", per_run=True)

    data: str = flag("edu_fineweb10B", DATA, "The folder of the token shards.")
    overfit: bool = flag(False, DATA, "Overfit one batch of 4 x 32 tokens as a sanity check, and "
                         "write nothing.")
    shuffle: bool = flag(True, DATA, "Shuffle the shards and their sequences anew in each epoch.",
                         fixed=True)
    val_tokens: int = flag(10_485_760, DATA, "The number of tokens in a validation, from the "
                           "beginning of the validation shards.", above=0)
    hellaswag_data: str = flag("", DATA, "The HellaSwag examples, a .jsonl file. By default they "
                               "are downloaded from the Hugging Face hub.")

    recipe: str = flag("gpt2", MODEL, "The model, optimizers and schedules.",
                       choices=list(RECIPES), fixed=True)
    init: str = flag("scratch", MODEL, "Where the initial weights come from: 'scratch' (random), "
                     "gpt2 or another model on the Hugging Face hub (OWNER/NAME), a checkpoint, "
                     "or the folder of a run or of an exported model.", fixed=True)
    n_layer: int = flag(12, MODEL, "The number of blocks.", above=0, fixed=True)
    n_head: int = flag(12, MODEL, "The number of attention heads in each block.",
                       above=0, fixed=True)
    n_embd: int = flag(768, MODEL, "The width of the model.", above=0, fixed=True)
    block_size: int = flag(1024, MODEL, "The length in tokens of the longest sequence that the "
                           "model can take.", above=0, fixed=True)
    vocab_size: int = flag(50304, MODEL, "The number of rows in the embedding. The default is "
                           "GPT-2's 50257 tokens, padded to a multiple of 128.",
                           above=0, most=65536, fixed=True)
    window: int = flag("auto", MODEL, "The number of tokens that a token attends to at the end of "
                       "the run, itself included, all in its own document (speedrun and "
                       "frontier). 'auto' means no limit in a new model, and the window of the "
                       "loaded model otherwise.", word="auto", above=0, fixed=True)

    total_batch_size: int = flag(524288, BATCH, "The number of tokens per optimizer step, over all "
                                 "processes.", above=0, fixed=True)
    batch_size: int = flag("auto", BATCH, "The most sequences that one process computes at once "
                           "(its micro-batch). 'auto' means as many as fit into a GPU's memory, "
                           "and at most 4096 tokens without a GPU.",
                           word="auto", above=0, per_run=True)
    sequence_length: int = flag("auto", BATCH, "The number of tokens in a sequence. 'auto' means "
                                "--block_size.", word="auto", above=0, fixed=True)

    max_steps: int = flag(19073, OPTIM, "The number of optimizer steps in the run. 19073 steps of "
                          "the default batch are one epoch of 10 billion tokens.", above=0)
    warmup_steps: int = flag(715, OPTIM, "The number of steps of linear warmup. 715 steps of the "
                             "default batch are GPT-3's 375 million tokens.")
    max_lr: float = flag(6e-4, OPTIM, "The learning rate after the warmup, which in speedrun and "
                         "frontier is Muon's.", above=0)
    min_lr: float = flag("auto", OPTIM, "The learning rate at the end of the run. 'auto' means a "
                         "tenth of --max_lr, or in frontier a value that depends on --max_steps.",
                         word="auto")
    cooldown: float = flag("auto", OPTIM, "The share of the run, at its end, over which the "
                           "learning rate falls (speedrun and frontier). 'auto' means 0.2856 in "
                           "speedrun, and in frontier a value that depends on --max_steps.",
                           word="auto", above=0, most=1)
    weight_decay: float = flag(0.1, OPTIM, "The weight decay of AdamW (on matrices and "
                               "embeddings) or of Muon.")
    grad_clip: float = flag(1.0, OPTIM, "The largest norm of the gradient: a larger gradient is "
                            "scaled down to this norm. 'inf' turns clipping off.",
                            above=0, most=math.inf)
    seed: int = flag(1337, OPTIM, "The random seed of new weights and of the order of the data.",
                     most=2**63 - 1, fixed=True)

    device: str = flag("auto", SPEED, "The device to train on: cuda, mps or cpu. 'auto' means the "
                       "first of these that is available.", per_run=True)
    dtype: str = flag("auto", SPEED, "The number format of matrix products (autocast). 'auto' "
                      "means bfloat16 where the hardware has it, else float16 on CUDA and float32 "
                      "elsewhere.", choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "Use TF32 for float32 matrix products on CUDA.")
    compile: bool = flag("auto", SPEED, "Compile the model with torch.compile. 'auto' means only "
                         "on CUDA.", per_run=True)
    attention: str = flag("auto", SPEED, "The kernel that computes attention. 'auto' lets torch "
                          "choose, and takes 'naive' (the plain formula) where naive is faster.",
                          choices=list(ATTENTION))
    recompute: bool = flag(False, SPEED, "Compute the blocks again in the backward pass, to save "
                           "memory (activation checkpointing).", per_run=True)
    shard_optimizer: bool = flag(False, SPEED, "Divide the optimizers' state among the processes, "
                                 "to save memory (ZeRO stage 1).", per_run=True)

    val_every: int = flag(250, OUTPUT, "The number of steps between validations; 0 turns them off.")
    hellaswag_every: int = flag(250, OUTPUT, "The number of steps between HellaSwag evaluations; "
                                "0 turns them off.")
    sample_every: int = flag(250, OUTPUT, "The number of steps between samples of text; 0 turns "
                             "them off.")
    sample_prompt: str = flag("Hello, I'm a language model,", OUTPUT,
                              "The text that the samples continue.")
    checkpoint_every: int = flag(250, OUTPUT, "The number of steps between checkpoints; 0 turns "
                                 "them off.")
    keep_checkpoints: int = flag(3, OUTPUT, "How many of the newest checkpoints to keep, beside "
                                 "the one with the lowest validation loss, or 'all'.",
                                 word="all", above=0)
    out: str = flag("log", OUTPUT, "The folder for checkpoints and logs.", per_run=True)
    resume: str = flag("auto", OUTPUT, "What to resume: 'auto' (the newest checkpoint in --out), "
                       "'never', a checkpoint, or the folder of another run.", per_run=True)
    wandb: bool = flag(False, OUTPUT, "Also log to Weights & Biases (pip install wandb).",
                       per_run=True)


def resolve_config(given: dict, start: Start, process: Process) -> tuple[Config, Config]:
    """The value of every flag. `given`, {flag: value}, is the command line.

    Of these sources a later one wins:

    1. the default in Config
    2. the recipe's default (Recipe.defaults)
    3. the preset, or --overfit, which is a run of its own
    4. the recipe's learning rates (Recipe.rates): those of the presets are for AdamW
    5. a resumed run's checkpoint, except for flags that are `per_run`
    6. the command line
    7. the shape of the model that was loaded
    8. where there is still "auto": the recipe (Recipe.automatic), and the values below

    On a resume a preset sets only `per_run` flags. UserError if the command line or the preset wants
    another value of a `fixed` flag than the resumed run has, or another shape than the model that
    was loaded.

    Returns two Configs: `flags`, after 7, which checkpoints record, so that a resume decides anew
    what "auto" means; and `config`, after 8, which the run uses.
    """
    flags = merge_flags(given, start)
    if start.path:
        check_resumed_flags(start, flags, wanted_flags(given, start, flags))
    check_flags(flags, RECIPES, start)

    config = replace(flags)             # a copy
    recipe = RECIPES[config.recipe]

    # A resumed run keeps its window, and so does the model of --init. A new model gets 0: it looks
    # back at all tokens. So does the model of --init, if "--window auto" was typed.
    window = 0
    if recipe.window and start.model and (start.path or "window" not in given):
        window = start.model.config.window
    set_automatic(config, sequence_length=config.block_size, window=window)
    set_automatic(config, **recipe.automatic(config))
    set_automatic(config, min_lr=config.max_lr / 10, dtype=choose_dtype("auto", process.device))

    # Micro-steps of more than 4,096 tokens are no faster on a CPU, and were never tried on a Mac. On a
    # GPU the limit is its memory, which a trial will tell (choose_micro_batch).
    most_sequences = max(1, 4096 // config.sequence_length)
    if process.on_gpu:
        most_sequences = config.total_batch_size // config.sequence_length
    set_automatic(config, compile=process.on_gpu, batch_size=most_sequences)
    return flags, config


def merge_flags(given: dict, start: Start) -> Config:
    """Sources 1 to 7 of resolve_config, where some flags are still "auto"."""
    preset = PRESETS[given.get("preset", "gpt2")].flags
    if given.get("overfit"):
        preset = OVERFIT
    recipe = RECIPES[(preset | start.recorded | given).get("recipe", "gpt2")]

    values = recipe.defaults | preset | recipe.rates                    # 2, 3, 4
    if given.get("overfit"):
        values["min_lr"] = given.get("max_lr", values["max_lr"])        # a constant rate
    values.update(start.recorded)                                       # 5
    values.update(given)                                                # 6
    values.update(start.shape)                                          # 7
    return Config(**values)                                             # 1, for all others


def wanted_flags(given: dict, start: Start, flags: Config) -> dict:
    """{flag: value}: what this command asks for, to compare with the `fixed` flags of a checkpoint."""
    wanted = PRESETS[flags.preset].flags | given
    if wanted.get("init", "scratch") != "scratch":
        # A run that began from --init has the shape of that model. The shape in a preset, which
        # --init overrode then, is no contradiction now; a typed one is.
        for name in start.shape.keys() - given.keys():
            wanted.pop(name, None)
    return wanted


def set_automatic(config: Config, **values) -> None:
    """Gives the flags that are still "auto" these values."""
    for name, value in values.items():
        if getattr(config, name) == "auto":
            setattr(config, name, value)


# ----------------------------------------------------------------------------- set-up

def start_process(device_name: str) -> Process:
    """This process's device, and torchrun's process group if there is one."""
    launch = read_launch()
    device = choose_device(device_name, launch.local_rank)      # "cuda:3", "mps" or "cpu"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    elif device == "cpu":
        tune_malloc()

    process = Process(launch.rank, launch.world_size, device, launch.by_torchrun)
    if process.world_size > 1:
        backend = "nccl" if process.on_gpu else "gloo"
        timeout = timedelta(minutes=10)         # of a rank that waits for one which compiles, say
        dist.init_process_group(
            backend,
            store=shared_store(launch, timeout),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
        )
        # In a notebook the group is destroyed at the end. A command leaves that to the end of the
        # process, because the destructor can hang (runtime.cli.run_command says why).
        process.at_end.callback(leave_group)
    return process


def use_tf32(config: Config, process: Process) -> None:
    if process.on_gpu:
        precision = "high" if config.tf32 else "highest"        # "high" is TF32
        torch.set_float32_matmul_precision(precision)


def check_ranks_agree(flags: Config, config: Config, process: Process) -> None:
    """UserError if the flags of the ranks differ, or what their hardware made of "auto"."""
    # Each GPU may find another --batch_size auto; the smallest will be taken.
    values = vars(config) | {"batch_size": flags.batch_size}
    for name in ("data", "hellaswag_data", "out", "device", "wandb"):
        del values[name]
    process.require_same({f"--{name}": value for name, value in values.items()})


def open_same_data(config: Config, process: Process) -> Data:
    """The data of the run. UserError if the ranks have different data; names of files may differ."""
    data = process.on_all_ranks(open_data, config)
    contents = {}
    for split, shards in data.fingerprints().items():
        for i, (_, *content) in enumerate(shards):
            contents[f"{split} shard {i} of --data"] = str(content)
    process.require_same(contents, "copy the same shards to every machine")
    if data.warning:
        process.print0(data.warning)
    return data


@dataclass
class TrainState:
    """The model and all that trains it. The three models are one: they share their weights."""
    model: LanguageModel                # eager, for HellaSwag and samples, which have many shapes
    compiled_model: Callable            # for validation, which has one shape
    ddp_model: Callable                 # for training: averages the gradients of all ranks
    optimizer: CombinedOptimizer
    scaler: torch.amp.GradScaler        # of float16's gradients; of other dtypes it does nothing
    autocast: torch.autocast            # matrix products in config.dtype, inside `with`


def make_train_state(config: Config, start: Start, process: Process) -> TrainState:
    """Model, optimizers, autocast, torch.compile and DDP, in this order."""
    device = process.device
    model = make_model(config, start, device)
    optimizers = RECIPES[config.recipe].make_optimizers(model, config)
    optimizer = CombinedOptimizer(model, optimizers, process, config.shard_optimizer)

    device_type = device.split(":")[0]
    scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(device_type, dtype, enabled=config.dtype != "float32")

    # DDP wraps the compiled model, as in nanoGPT.
    compiled_model = model
    if config.compile:
        compiled_model = compile_model(model)
    ddp_model = compiled_model
    if process.world_size > 1:
        ddp_model = wrap_ddp(compiled_model, process)
    return TrainState(model, compiled_model, ddp_model, optimizer, scaler, autocast)


def make_model(config: Config, start: Start, device: str) -> LanguageModel:
    """The model of --init, of the checkpoint, or a fresh one, on the device."""
    # All ranks have the same seed, so they draw the same weights. No model has dropout: nothing
    # else is random in training, and there is no need for model.train() and model.eval().
    torch.manual_seed(config.seed)
    model = start.model
    if model is None:
        model = fresh_model(config)
    if RECIPES[config.recipe].window:
        model.config.window = config.window             # any window fits the weights

    model.kernel = config.attention
    model.recompute = config.recompute
    if device == "cpu" and not config.compile:
        # A CPU's cache has no room for all logits. A compiler fuses them with the loss.
        model.loss_chunk = 2048
    return model.to(device)


def compile_model(model: LanguageModel) -> Callable:
    """torch.compile of the model, which itself stays eager."""
    warnings.filterwarnings("ignore", ".* does not support bfloat16 compilation natively")
    # On a T4: "not enough SMs to use max_autotune_gemm mode", though nothing is autotuned.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)
    return torch.compile(model, dynamic=False)


def wrap_ddp(model: Callable, process: Process) -> DDP:
    """The model inside DDP, which averages the gradients of all ranks."""
    options = {"gradient_as_bucket_view": True}         # no second copy of the gradients
    if process.on_gpu:
        options["device_ids"] = [process.device]

    # Buffers (the window, frontier's tables of tokens) are the same on all ranks anyway.
    if "forward_sync_buffers" in signature(DDP).parameters:             # from torch 2.13 on
        options["forward_sync_buffers"] = False
    else:
        options["broadcast_buffers"] = False
    return DDP(model, **options)


def choose_micro_batch(
    flags: Config,
    config: Config,
    start: Start,
    schedule: BatchSchedule,
    state: TrainState,
    process: Process,
) -> tuple[int, Callable]:
    """B, the sequences of a micro-batch; and trial(B), the seconds of a micro-step of B of them."""
    limit, moment_bytes = config.batch_size, 0
    may_shrink = flags.batch_size == "auto"
    if process.on_gpu:
        if start.step == 0:
            moment_bytes = state.optimizer.state_bytes()        # the first step will allocate them
        if may_shrink:
            limit = most_sequences_that_fit(config, state.model, process.device, moment_bytes)

    trial = partial(time_micro_step, state, config.sequence_length, process.device, moment_bytes)
    return choose_batch_size(config, may_shrink, limit, schedule, process, trial), trial


def schedule_change(
    start: Start, config: Config, schedule: BatchSchedule, process: Process
) -> str:
    """For the header of a resumed run: what another --max_steps does to the learning rate."""
    step = start.step
    if step == 0:
        return ""
    _, earlier = resolve_config({}, start, process)     # no command line: as the checkpoint says
    if earlier.max_steps == config.max_steps:
        return ""
    recipe = RECIPES[config.recipe]
    earlier_schedule = make_batch_schedule(recipe, earlier, process.world_size)
    earlier_schedule.resume(step, start.checkpoint["tokens"])

    progress = earlier_schedule.progress(step - 1)
    last_lr = earlier.max_lr * recipe.lr_scale(step - 1, progress, earlier)
    next_lr = config.max_lr * recipe.lr_scale(step, schedule.progress(step), config)
    return (f"; --max_steps was {earlier.max_steps}, so the schedule has moved: "
            f"lr {last_lr:.2e} in step {step - 1}, {next_lr:.2e} in step {step}")


# ----------------------------------------------------------------------------- a step

def set_schedules(
    step: int, config: Config, schedule: BatchSchedule, state: TrainState
) -> float:
    """Sets learning rates, Muon's momentum and the window of this step.

    Returns the learning rate for the log: --max_lr times the schedule's factor.
    """
    recipe = RECIPES[config.recipe]
    progress = schedule.progress(step)

    scale = recipe.lr_scale(step, progress, config)
    for group in state.optimizer.groups():
        group["lr"] = group["initial_lr"] * scale               # CombinedOptimizer noted initial_lr
        if recipe.momentum and "momentum" in group:             # Muon's
            group["momentum"] = recipe.momentum(progress, config)
    if config.window:
        state.model.window.fill_(recipe.window(progress, config))
    return config.max_lr * scale


def train_step(
    step: int, config: Config, process: Process, loader: TrainLoader, state: TrainState
) -> torch.Tensor:
    """One optimizer step: gradients are summed over micro-steps and averaged over the ranks.

    The CPU does not wait for the GPU here, except with float16, in scaler.step. Returns a float32
    tensor (3,), the same on all ranks: the mean loss, the norm of the gradient before clipping, and
    how many ranks vote to stop.
    """
    # Forward and backward of this rank's share of the batch.
    micro_steps = loader.micro_steps(step)
    loss_accum = torch.zeros((), device=process.device)
    for micro_step in process.watch(f"step {step}", range(micro_steps)):
        x, y = loader.next_batch()                              # (B, T) each
        if process.world_size > 1:
            # DDP averages the gradients during the backward of the last micro-step only. This is
            # set before the forward, because DDP reads it there.
            state.ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
        with state.autocast:
            _, loss = state.ddp_model(x, y)
        loss = loss / micro_steps
        loss_accum += loss.detach()
        state.scaler.scale(loss).backward()

    # The ranks add their losses, and with them their votes: 1 if a signal came to this one.
    vote = torch.full_like(loss_accum, process.asked_to_stop)
    sums = torch.stack((loss_accum, vote))
    if process.world_size > 1:
        dist.all_reduce(sums)
    mean_loss, votes = sums[0] / process.world_size, sums[1]

    # Clip and update. DDP has averaged the gradients, so all ranks do the same.
    state.scaler.unscale_(state.optimizer)
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if config.grad_clip < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    # Skipped if a float16 gradient has overflowed. Muon and --shard_optimizer send updates here.
    state.scaler.step(state.optimizer)
    state.scaler.update()

    # With DDP the gradients are views of its buckets. If they were set to None, the micro-steps
    # before the last one would accumulate into new tensors, beside the buckets.
    state.model.zero_grad(set_to_none=process.world_size == 1 or micro_steps == 1)
    return torch.stack((mean_loss, norm, votes))


# ----------------------------------------------------------------------------- evaluation

@torch.no_grad()
def validation_loss(data: Data, B: int, process: Process, state: TrainState) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks."""
    loss_sum = torch.zeros((), device=process.device)
    rows_seen = 0
    firsts = range(process.rank * B, data.val_count, process.world_size * B)
    for first in process.watch("validation", firsts):
        # All batches have one shape, so that the model compiles once: in the last one the targets
        # of the rows beyond the end are ignored.
        x, y = to_device(data.val.read(first, B), process.device)           # (B, T) each
        rows = min(B, data.val_count - first)
        y[rows:] = -1
        with state.autocast:
            _, loss = state.compiled_model(x, y)
        loss_sum += loss * rows
        rows_seen += rows

    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / max(1, rows_seen)


def hellaswag_score(data: Data, process: Process, state: TrainState) -> tuple[int, int]:
    """(examples answered rightly by the mean loss of a token, which is acc_norm; all examples)."""
    batches = process.watch("HellaSwag", data.hellaswag[process.rank::process.world_size])
    counts = hellaswag.evaluate(state.model, batches, process.device, state.autocast)
    _correct_by_sum, correct_by_mean, n = process.sum(*counts.tolist())
    return int(correct_by_mean), int(n)


def print_samples(
    config: Config, process: Process, state: TrainState, num_samples=4, max_new_tokens=32
) -> None:
    # The same seed each time, so that samples of different steps differ by the weights alone.
    generator = torch.Generator(process.device).manual_seed(42)
    tokens = encode(config.sample_prompt).tolist()[-config.block_size:]
    if not tokens:
        tokens = [EOT]
    idx = torch.tensor([tokens] * num_samples, device=process.device)       # (num_samples, T)
    with state.autocast:
        idx = state.model.generate(idx, max_new_tokens, generator=generator)
    for i, row in enumerate(idx.tolist()):
        text = tokenizer().decode(row).removeprefix("<|endoftext|>")
        process.print0(f"sample {i}: {text}")


def evaluate(
    step: int,
    config: Config,
    process: Process,
    data: Data,
    B: int,
    state: TrainState,
    log: StepLog,
    output: Output,
) -> None:
    """Validation loss, HellaSwag and samples, where they are due."""
    val_is_due = is_due(step, config, config.val_every)
    hellaswag_is_due = is_due(step, config, config.hellaswag_every)
    samples_are_due = is_due(step, config, config.sample_every)
    if not (val_is_due or hellaswag_is_due or samples_are_due):
        return

    # A run that resumes at this step may have evaluated before it ended.
    done = process.from_master(log.evaluated(step))

    if val_is_due and "val" not in done:
        loss = validation_loss(data, B, process, state)
        if not math.isfinite(loss):
            with printed_by(process.is_master):
                raise RunError(f"the validation loss at step {step} is {loss}: lower --max_lr. "
                               f"{output.what_resumes()}")
        log.evaluation(step, "val", loss, f"validation loss: {loss:.4f}{in_bits(loss, data)}")

    if hellaswag_is_due and data.hellaswag and "hella" not in done:
        correct, n = hellaswag_score(data, process, state)
        accuracy = correct / n
        log.evaluation(step, "hella", accuracy, f"HellaSwag accuracy: {correct}/{n}={accuracy:.4f}")

    if samples_are_due and step > 0 and process.is_master:
        print_samples(config, process, state)

    if log.record and (val_is_due or hellaswag_is_due):
        title = f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}"
        plots.draw(log.record, title, last=step == config.max_steps)


def is_due(step: int, config: Config, period: int) -> bool:
    """Every `period` steps, and at the end of the run; never if the period is 0."""
    return period > 0 and (step % period == 0 or step == config.max_steps)


# ----------------------------------------------------------------------------- checkpoints

def save(
    step: int,
    process: Process,
    data: Data,
    schedule: BatchSchedule,
    state: TrainState,
    output: Output,
) -> None:
    """Writes OUT/checkpoint_STEP.pt, on a GPU in the background."""
    process.require_same(
        {"the checksum of the weights": weights_digest(state.model)},
        "resume from the previous checkpoint, because the processes have drifted apart", RunError)

    moments = gather_moments(state.model, state.optimizer)      # some of them are on other ranks
    if process.is_master:
        checkpoint = {
            "model": host_copy(state.model.state_dict()),
            "model_config": asdict(state.model.config),
            "recipe": output.flags.recipe,
            "config": asdict(output.flags),
            "step": step,
            "tokens": schedule.tokens_before(step),
            "optimizers": moments,
            "scaler": state.scaler.state_dict(),
            "data": data.fingerprints(),
            "job": read_launch().job,           # torchrun restarts a job from its own checkpoints
        }
        output.saver.write(checkpoint, output.record)


# ----------------------------------------------------------------------------- the loop

@dataclass
class LaunchedStep:
    """A step that has been launched. A GPU may still be computing its numbers."""
    step: int
    numbers: Callable           # waits for them: [loss, norm, votes to stop]
    lr: float
    began: float                # seconds of time.perf_counter()


# How a run stops. A signal (SIGTERM, Ctrl-C, ...) only leaves a note in `process`; the work goes on.
# - A single process looks at the note before each micro-step and each batch of an evaluation, and
#   raises StopRequested. The step or the evaluation is dropped; the run that resumes repeats it.
# - Several ranks must stop after the same step. They add up their votes in each train_step, and read
#   the sum when they log that step: on a CPU at once, on a GPU after the next one is launched. So
#   they finish an evaluation first, and up to two steps on CPUs, four on GPUs.
# Either sets `stopped`: the run saves at the top of the loop (not with --checkpoint_every 0) and ends
# with exit code 0. No finished step is lost. A SIGKILL or a crash loses the steps since the newest
# complete checkpoint, and the run that resumes repeats them with the same tokens. torchrun kills its
# ranks 30 s after a SIGTERM, unless --shutdown_timeout gives them more time.

def train(
    step: int, config: Config, process: Process, data: Data, loader: TrainLoader,
    state: TrainState, log: StepLog, output: Output,
) -> tuple[int, bool]:
    """Trains from `step` on. Returns the steps done, and whether a signal ended the run."""
    stopped = False
    last_saved = step
    launched = deque()                  # steps that are not logged yet, the oldest first
    overflows = 0                       # the newest steps in a row whose gradient was not finite

    while True:
        # Save. It comes before the evaluation, so that a kill during the evaluation loses nothing.
        may_save = config.checkpoint_every > 0 and not config.overfit and step > last_saved
        if may_save and (stopped or is_due(step, config, config.checkpoint_every)):
            save(step, process, data, loader.schedule, state, output)
            last_saved = step
        if stopped:
            return step, True

        try:
            # Evaluate, with the window of this step.
            lr = set_schedules(step, config, loader.schedule, state)
            evaluate(step, config, process, data, loader.B, state, log, output)
            if step == config.max_steps:
                return step, False

            # Train.
            began = time.perf_counter()
            numbers = train_step(step, config, process, loader, state)
            launched.append(LaunchedStep(step, copy_later(numbers), lr, began))
            step += 1
        except StopRequested:
            stopped = True

        # Log, and check the loss before anything can be saved or evaluated.
        while len(launched) > steps_in_flight(step, config, process, stopped):
            done = launched.popleft()
            loss, norm, votes = done.numbers()
            overflows += 1
            if math.isfinite(norm):
                overflows = 0
            check_finite(done.step, loss, norm, overflows, config, process, output)
            log.step(done.step, loss, norm, done.lr, done.began)
            if votes > 0:
                stopped = True


def steps_in_flight(step: int, config: Config, process: Process, stopped: bool) -> int:
    """How many launched steps may stay unlogged for now."""
    if not process.on_gpu:
        return 0

    # A GPU computes one step while the CPU launches the next, so that it never waits for the CPU.
    # But before an evaluation or a checkpoint, and at the end, all numbers have to be known.
    periods = (config.val_every, config.hellaswag_every, config.sample_every,
               config.checkpoint_every)
    something_is_due = any(is_due(step, config, period) for period in periods)
    if stopped or step == config.max_steps or something_is_due:
        return 0
    return 1


def check_finite(
    step: int,
    loss: float,
    norm: float,
    overflows: int,
    config: Config,
    process: Process,
    output: Output,
) -> None:
    """RunError if the loss or the gradient is not finite: the weights are not worth saving."""
    # float16's scaler begins at 65536, skips a step whose gradient overflows, and halves its scale.
    # So some overflows in a row are usual. After 25 the scale is 1/512, and one more is an error.
    allowed = 0
    if config.dtype == "float16":
        allowed = 25
    if math.isfinite(loss) and overflows <= allowed:
        return
    with printed_by(process.is_master):
        raise RunError(f"the loss or the gradient of step {step} is not finite (loss {loss}, "
                       f"gradient norm {norm}): lower --max_lr or raise --warmup_steps. "
                       f"{output.what_resumes()}")


def memory_errors(device: str):
    """Around what may need more memory than there is."""
    return oom_as_user_error(lambda: f"{device} is out of memory: lower --batch_size, add "
                                     "--recompute or (with several GPUs) --shard_optimizer, or "
                                     "train a smaller model")


def main(argv: list[str] | None = None) -> int:
    """The command; in a notebook main(["--preset", "shakespeare"]). Returns the exit code."""
    with printed_by(read_launch().reports_mistakes):
        given = parse_flags(Config, RECIPES, PRESETS, __doc__, argv)
    process = start_process(given.get("device", "auto"))

    with process.at_end, memory_errors(process.device):
        # Until training begins, a mistake on one rank is an error on all: rank 0 prints it.
        with printed_by(process.is_master):
            # Where the run begins (--out, --resume and --init say where to look), and all flags.
            flags = merge_flags(given, Start())
            start = find_start(flags, given, process, MODELS, load_model)
            flags, config = process.on_all_ranks(resolve_config, given, start, process)
            check_ranks_agree(flags, config, process)
            use_tf32(config, process)

            # The data, and the model with all that trains it. The model of a checkpoint is in
            # `start`; restore takes the optimizers' moments and the place in the data from there.
            schedule = make_batch_schedule(RECIPES[config.recipe], config, process.world_size)
            data = open_same_data(config, process)
            state = make_train_state(config, start, process)
            if start.path:
                restore(start, config.data, data, schedule, state.optimizer, state.scaler)

            # The micro-batch that fits into memory. The training step is compiled here.
            B, trial = choose_micro_batch(flags, config, start, schedule, state, process)
            change = schedule_change(start, config, schedule, process)
            print_header(config, process, data, state.model, schedule, B, start, change)
            if config.dry_run:
                rate = B * config.sequence_length * process.world_size / trial(B)
                print_estimate(config, process, schedule.tokens_left(start.step), rate)
                return int(process.silent)          # 1 if stdout could not be written

            # From here on something is written, and a signal asks the run to stop.
            data.hellaswag = hellaswag.hellaswag_batches(config, given.keys(), process)
            output = Output(flags)
            process.on_all_ranks(output.open, config, start, process, schedule.tokens_before)
            process.catch_signals()

        loader = TrainLoader(data.train, schedule, B, start.step, process)
        with output, run_can_continue(config.out), closing(loader):
            flops_per_token = state.model.flops_per_token(config.sequence_length)
            log = StepLog(process, output.record, schedule, flops_per_token)
            step, stopped = train(start.step, config, process, data, loader, state, log, output)
        return print_summary(config, process, data, log, output, step, stopped)


if __name__ == "__main__":
    run_command(main)
