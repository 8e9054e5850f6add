"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                          sanity run: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run     what a run would do, and how long it takes
    python train_gpt2.py                                    FineWeb-Edu (of `python fineweb.py`)
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
    sequences_that_fit,
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
    """Factor of the learning rate: linear warmup, then a cosine to min_lr (arXiv:1608.03983)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps

    decay = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    min_scale = config.min_lr / config.max_lr
    return min_scale + 0.5 * (1.0 + math.cos(math.pi * min(1.0, decay))) * (1.0 - min_scale)


RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B).
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
    preset: str = flag("gpt2", START, "A named set of defaults, see below.",
                       choices=list(PRESETS), per_run=True)
    dry_run: bool = flag(False, START,
                         "Print what would run and how long it takes, and write nothing.",
                         per_run=True)

    data: str = flag("edu_fineweb10B", DATA, "Folder of token shards.")
    overfit: bool = flag(False, DATA,
                         "Sanity run: overfit one batch of 4 x 32 tokens. Writes nothing.")
    shuffle: bool = flag(True, DATA, "Permute shards and sequences anew in each epoch.", fixed=True)
    val_tokens: int = flag(10_485_760, DATA,
                           "Tokens of a validation: the first of the val shards.", above=0)
    hellaswag_data: str = flag("", DATA,
                               "HellaSwag examples as .jsonl. Default: from Hugging Face's hub.")

    recipe: str = flag("gpt2", MODEL, "Model, optimizers and schedules.", choices=list(MODELS),
                       fixed=True)
    init: str = flag("scratch", MODEL, "Where the weights come from: scratch, gpt2, OWNER/NAME of "
                     "the hub, a checkpoint, or a folder.", fixed=True)
    n_layer: int = flag(12, MODEL, "Number of blocks.", above=0, fixed=True)
    n_head: int = flag(12, MODEL, "Number of attention heads.", above=0, fixed=True)
    n_embd: int = flag(768, MODEL, "Width of the model.", above=0, fixed=True)
    block_size: int = flag(1024, MODEL, "Longest sequence, in tokens.", above=0, fixed=True)
    vocab_size: int = flag(50304, MODEL,
                           "Rows of the embedding. GPT-2's 50257 tokens are padded to 50304.",
                           above=0, most=65536, fixed=True)
    window: int = flag("auto", MODEL, "How many tokens attention looks back at the end of the run. "
                       "'auto': all.", word="auto", above=0, fixed=True)

    total_batch_size: int = flag(524288, BATCH,
                                 "Tokens of an optimizer step, on all processes together.",
                                 above=0, fixed=True)
    batch_size: int = flag("auto", BATCH, "Sequences of a micro-step, at most. 'auto': as many as "
                           "fit into memory.", word="auto", above=0, per_run=True)
    sequence_length: int = flag("auto", BATCH, "Tokens of a sequence. 'auto': --block_size.",
                                word="auto", above=0, fixed=True)

    max_steps: int = flag(19073, OPTIM,
                          "Optimizer steps of the run. 19073 are one epoch of 10B tokens.", above=0)
    warmup_steps: int = flag(715, OPTIM, "Steps of linear warmup. 715 are GPT-3's 375M tokens.")
    max_lr: float = flag(6e-4, OPTIM, "Learning rate after the warmup.", above=0)
    min_lr: float = flag("auto", OPTIM, "Learning rate at the end. 'auto': a tenth of --max_lr; "
                         "frontier derives it from --max_steps.", word="auto")
    cooldown: float = flag("auto", OPTIM, "The last part of the run, in which the learning rate "
                           "falls. 'auto': 0.2856; frontier derives it from --max_steps.",
                           word="auto", above=0, most=1)
    weight_decay: float = flag(0.1, OPTIM,
                               "Weight decay of AdamW (on matrices and embeddings) and of Muon.")
    grad_clip: float = flag(1.0, OPTIM, "Largest norm of the gradient. 'inf' clips nothing.",
                            above=0, most=math.inf)
    seed: int = flag(1337, OPTIM, "Random seed of the fresh weights and of the data's order.",
                     most=2**63 - 1, fixed=True)

    device: str = flag("auto", SPEED, "auto, cuda, mps or cpu.", per_run=True)
    dtype: str = flag("auto", SPEED,
                      "Of matrix products (autocast). 'auto': bfloat16 where the hardware has it.",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "Use TF32 for float32 matrix products on CUDA.")
    compile: bool = flag("auto", SPEED, "Use torch.compile. 'auto': on CUDA.", per_run=True)
    attention: str = flag("auto", SPEED,
                          "Attention kernel. 'auto': SDPA, or the formula where that is faster.",
                          choices=list(ATTENTION))
    recompute: bool = flag(False, SPEED,
                           "Compute the blocks again in the backward, to save memory.",
                           per_run=True)
    shard_optimizer: bool = flag(False, SPEED,
                                 "Give each rank a share of the moments (ZeRO stage 1).",
                                 per_run=True)

    val_every: int = flag(250, OUTPUT, "Steps between validations. 0: never.")
    hellaswag_every: int = flag(250, OUTPUT, "Steps between HellaSwag evaluations. 0: never.")
    sample_every: int = flag(250, OUTPUT, "Steps between samples of text. 0: never.")
    sample_prompt: str = flag("Hello, I'm a language model,", OUTPUT,
                              "Text that the samples continue.")
    checkpoint_every: int = flag(250, OUTPUT, "Steps between checkpoints. 0: never.")
    keep_checkpoints: int = flag(3, OUTPUT, "How many of the newest checkpoints are kept, beside "
                                 "the best one, or 'all'.", word="all", above=0)
    out: str = flag("log", OUTPUT, "Folder for checkpoints and logs.", per_run=True)
    resume: str = flag("auto", OUTPUT, "'auto' (the newest checkpoint in --out), 'never', a "
                       "checkpoint, or a run's folder.", per_run=True)
    wandb: bool = flag(False, OUTPUT, "Also log to Weights & Biases (pip install wandb).",
                       per_run=True)


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


def resolve_config(given: dict, start: Start, process: Process) -> tuple[Config, Config]:
    """The value of every flag. `given`, {flag: value}, is the command line.

    Of these sources a later one wins:

    1. the default in Config
    2. the recipe's default (Recipe.defaults)
    3. the preset, or --overfit, which is a run of its own
    4. the recipe's learning rates (Recipe.rates): those of the presets are for AdamW
    5. a resumed run's checkpoint, except for flags that are `per_run`
    6. the command line; on a resume it cannot change flags that are `fixed`
    7. the shape of the model that was loaded, which the command line must not contradict
    8. for what is still "auto": the recipe (Recipe.automatic), then the values below

    Returns the flags after 7, which checkpoints record, so that a resume decides 8 anew; and the
    flags after 8, which the run uses.
    """
    asked = merge_flags(given, start)
    if start.path:
        check_resumed_flags(start, asked, wanted_flags(given, start, asked))
    check_flags(asked, RECIPES, start.path)

    config = replace(asked)             # a copy
    recipe = RECIPES[config.recipe]
    window = 0                          # of attention: it looks back at all tokens
    if recipe.window and start.model and (start.path or "window" not in given):
        window = start.model.config.window
    set_automatic(config, sequence_length=config.block_size, window=window)
    set_automatic(config, **recipe.automatic(config))
    set_automatic(config, min_lr=config.max_lr / 10, dtype=choose_dtype("auto", process.device))

    # More than 4,096 tokens of a micro-step are no faster on a CPU. A GPU's memory sets the limit
    # later, by a trial (choose_micro_batch).
    most_sequences = max(1, 4096 // config.sequence_length)
    if process.on_gpu:
        most_sequences = config.total_batch_size // config.sequence_length
    set_automatic(config, compile=process.on_gpu, batch_size=most_sequences)
    return asked, config


def wanted_flags(given: dict, start: Start, asked: Config) -> dict:
    """{flag: value} of the command line and its preset, for a run that resumes."""
    wanted = PRESETS[asked.preset].flags | given
    if wanted.get("init", "scratch") != "scratch":
        # The run began with the shape of the model that --init loaded, and not with the preset's.
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
        timeout = timedelta(minutes=10)
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


def check_ranks_agree(asked: Config, config: Config, process: Process) -> None:
    """UserError if the flags of the ranks differ, or what their hardware made of "auto"."""
    # Each GPU may find another --batch_size auto; the smallest will be taken.
    values = vars(config) | {"batch_size": asked.batch_size}
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
    process.require_same(contents)
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
    asked: Config,
    config: Config,
    start: Start,
    schedule: BatchSchedule,
    state: TrainState,
    process: Process,
) -> tuple[int, Callable]:
    """B, the sequences of a micro-batch, and the trial: seconds of a micro-step of B sequences."""
    limit, moments = config.batch_size, 0
    may_shrink = asked.batch_size == "auto"
    if process.on_gpu:
        if start.step == 0:
            moments = state.optimizer.state_bytes()     # which the first step will allocate
        if may_shrink:
            limit = sequences_that_fit(config, state.model, process.device, moments)

    trial = partial(time_micro_step, state, config.sequence_length, process.device, moments)
    return choose_batch_size(config, may_shrink, limit, schedule, process, trial), trial


def schedule_change(
    given: dict, start: Start, config: Config, schedule: BatchSchedule, process: Process
) -> str:
    """For the header of a resumed run: what another --max_steps does to the learning rate."""
    max_steps, step = start.recorded.get("max_steps"), start.step
    if max_steps in (None, config.max_steps) or step == 0:
        return ""
    _, earlier = resolve_config(given | {"max_steps": max_steps}, start, process)
    recipe = RECIPES[config.recipe]
    progress = make_batch_schedule(recipe, earlier, process.world_size).progress(step - 1)

    last = earlier.max_lr * recipe.lr_scale(step - 1, progress, earlier)
    following = config.max_lr * recipe.lr_scale(step, schedule.progress(step), config)
    return (f"; --max_steps was {max_steps}, and another length moves the schedule: lr {last:.2e} in "
            f"step {step - 1}, {following:.2e} in step {step}")


# ----------------------------------------------------------------------------- a step

def set_schedules(
    step: int, config: Config, schedule: BatchSchedule, state: TrainState
) -> float:
    """Sets learning rates, Muon's momentum and the window of this step. Returns the learning rate."""
    recipe = RECIPES[config.recipe]
    progress = schedule.progress(step)

    scale = recipe.lr_scale(step, progress, config)
    for group in state.optimizer.groups():
        group["lr"] = group["initial_lr"] * scale
        if recipe.momentum and "momentum" in group:             # Muon's
            group["momentum"] = recipe.momentum(progress, config)
    if config.window:
        state.model.window.fill_(recipe.window(progress, config))
    return config.max_lr * scale


def train_step(
    step: int, config: Config, process: Process, loader: TrainLoader, state: TrainState
) -> torch.Tensor:
    """One optimizer step: gradients are summed over micro-steps and averaged over the ranks.

    Waits for no GPU, but for float16's scaler. Returns, the same on all ranks, float32 (3,): the
    mean loss, the norm of the gradient before clipping, and how many ranks vote to stop.
    """
    # Forward and backward of this rank's share of the batch.
    micro_steps = loader.micro_steps(step)
    loss_accum = torch.zeros((), device=process.device)
    for micro_step in process.watch(f"step {step}", range(micro_steps)):
        x, y = loader.next_batch()                              # (B, T) each
        if process.world_size > 1:
            # DDP sends the gradients along with the last micro-step alone. It reads this already
            # in the forward.
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
    state.scaler.step(state.optimizer)      # does nothing if a float16 gradient has overflowed
    state.scaler.update()

    # DDP's gradients are views of its buckets. Several micro-steps accumulate the first ones outside
    # of DDP: in tensors that had been freed they would need memory beside the buckets.
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
    """(examples answered rightly by acc_norm, all examples)."""
    watched = partial(process.watch, "HellaSwag")
    counts = hellaswag.evaluate(state.model, data.hellaswag, process.device, state.autocast,
                                process.rank, process.world_size, watched)
    _, correct, n = process.sum(*counts.tolist())
    return int(correct), int(n)


def print_samples(
    config: Config, process: Process, state: TrainState, num_samples=4, max_new_tokens=32
) -> None:
    # A generator of its own, so that the random numbers of training do not advance.
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
                raise RunError(f"step {step}: validation loss {loss}. {output.what_resumes()}")
        log.evaluation(step, "val", loss, f"validation loss: {loss:.4f}{in_bits(loss, data)}")

    if hellaswag_is_due and data.hellaswag and "hella" not in done:
        correct, n = hellaswag_score(data, process, state)
        accuracy = correct / n
        log.evaluation(step, "hella", accuracy, f"HellaSwag accuracy: {correct}/{n}={accuracy:.4f}")

    if samples_are_due and step > 0 and not done and process.is_master:
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
        {"the weights' sum of bits": weights_digest(state.model)},
        "the ranks have drifted apart; resume from the checkpoint before", RunError)

    moments = gather_moments(state.model, state.optimizer)      # some of them are on other ranks
    if process.is_master:
        checkpoint = {
            "model": host_copy(state.model.state_dict()),
            "model_config": asdict(state.model.config),
            "recipe": output.asked.recipe,
            "config": asdict(output.asked),
            "step": step,
            "tokens": schedule.tokens_before(step),
            "optimizers": moments,
            "scaler": state.scaler.state_dict(),
            "data": data.fingerprints(),
            "job": read_launch().job,           # by which a restart by torchrun knows its checkpoints
        }
        output.saver.write(checkpoint, output.record)


# ----------------------------------------------------------------------------- the loop

@dataclass
class LaunchedStep:
    """A step whose numbers a GPU may still compute."""
    step: int
    numbers: Callable           # waits for them: [loss, norm, votes to stop]
    lr: float
    began: float                # seconds of time.perf_counter()


# How a run stops. A signal only leaves a note in `process`; the work goes on.
# - A single process looks at the note before each micro-step and each batch of an evaluation, and
#   raises StopRequested. What it was doing is dropped, and done again by the run that resumes.
# - Several ranks must leave at the same place. They add their votes in each train_step, and read the
#   sum when they log that step: all of them stop after the same one.
# Either way `stopped` becomes True, the run saves at the top of the loop, and ends with exit code 0.
# A second Ctrl-C or SIGTERM ends the process at once (Process.on_signal).

def train(
    step: int, config: Config, process: Process, data: Data, loader: TrainLoader,
    state: TrainState, log: StepLog, output: Output,
) -> tuple[int, bool]:
    """Save, evaluate, train, log, until max_steps or a signal. `step`: steps done before.

    Returns the steps done, and whether a signal ended the run.
    """
    stopped = False
    last_saved = step
    launched = deque()                  # steps that are not logged yet, the oldest first
    overflows = 0                       # the newest steps in a row that float16 has skipped

    while True:
        # Save. It comes first, so that a kill during the evaluation loses nothing.
        may_save = config.checkpoint_every > 0 and step > last_saved
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
    """How many launched steps may be left without a look at their numbers."""
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
    # The scaler of float16 begins at 65536, skips steps whose gradient overflows, and halves its
    # scale: some overflows in a row are usual.
    allowed = 0
    if config.dtype == "float16":
        allowed = 25
    if math.isfinite(loss) and overflows <= allowed:
        return
    with printed_by(process.is_master):
        raise RunError(f"step {step} is not finite: loss {loss}, gradient norm {norm}: lower "
                       f"--max_lr or lengthen --warmup_steps. {output.what_resumes()}")


def memory_errors(device: str):
    """Around what may need more memory than there is."""
    return oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --batch_size, "
                                     "--recompute, --shard_optimizer (several GPUs), or a smaller "
                                     "model")


def main(argv: list[str] | None = None) -> int:
    """The command; in a notebook main(["--preset", "shakespeare"]). Returns the exit code."""
    with printed_by(read_launch().reports_mistakes):
        given = parse_flags(Config, RECIPES, PRESETS, __doc__, argv)
    process = start_process(given.get("device", "auto"))

    with process.at_end, memory_errors(process.device):
        # Until training begins, all ranks find the same mistakes: rank 0 prints them.
        with printed_by(process.is_master):
            # Where the run begins, and the values of all flags.
            flags = merge_flags(given, Start())
            start = find_start(flags, given, process, MODELS, load_model)
            asked, config = resolve_config(given, start, process)
            check_ranks_agree(asked, config, process)
            use_tf32(config, process)

            # The data, and the model with all that trains it.
            schedule = make_batch_schedule(RECIPES[config.recipe], config, process.world_size)
            data = open_same_data(config, process)
            state = make_train_state(config, start, process)
            if start.path:
                restore(start, config.data, data, schedule, state.optimizer, state.scaler)

            # The micro-batch that fits into memory; what is compiled is compiled here.
            B, trial = choose_micro_batch(asked, config, start, schedule, state, process)
            change = schedule_change(given, start, config, schedule, process)
            print_header(config, process, data, state.model, schedule, B, start, change)
            if config.dry_run:
                rate = B * config.sequence_length * process.world_size / trial(B)
                print_estimate(config, process, schedule.tokens_left(start.step), rate)
                return int(process.silent)

            # From here on something is written, and a signal asks the run to stop.
            data.hellaswag = hellaswag.hellaswag_batches(config, given.keys(), process)
            output = Output(asked)
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
