"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                          sanity run: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run     what a run would do, and how long it takes
    python train_gpt2.py                                    FineWeb-Edu (of `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  the same on 8 GPUs

Run the same command again to resume from the newest checkpoint in --out.
"""
import logging
import math
import os
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
from model import MODELS, fresh_model, load_model
from runtime import plots
from runtime.checkpoint import (Output, Start, check_resumed_flags, find_start, gather_moments,
                                host_copy, restore, weights_digest)
from runtime.cli import RunError, flag, run_command, said_once
from runtime.console import StepLog, in_bits, print_estimate, print_header, print_summary
from runtime.dataloader import Data, TrainLoader, open_data, to_device
from runtime.device import (choose_batch_size, choose_device, choose_dtype, fetch, most_sequences,
                            oom_as_user_error, time_micro_step, tune_malloc)
from runtime.files import newest_of
from runtime.kernels import ATTENTION
from runtime.language_model import LanguageModel
from runtime.muon import CombinedOptimizer
from runtime.presets import OVERFIT, PRESETS, check_flags, parse_flags
from runtime.ranks import Process, StopRequested, find_ranks
from runtime.recipe import BatchSchedule, Recipe, batch_schedule
from runtime.tokenizer import EOT, encode, tokenizer

# ----------------------------------------------------------------------------- the recipe of GPT-2

def warmup_cosine(step: int, progress: float, config) -> float:
    """Linear warmup, then a cosine that ends at min_lr with the run's tokens (arXiv:1608.03983)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps

    warmup = min(1.0, config.warmup_steps / config.max_steps)
    decay = (progress - warmup) / max(1e-9, 1.0 - warmup)
    decay = min(1.0, max(0.0, decay))
    min_scale = config.min_lr / config.max_lr
    return min_scale + 0.5 * (1.0 + math.cos(math.pi * decay)) * (1.0 - min_scale)


RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B).
    "gpt2": Recipe(
        lambda model, config: model.configure_optimizers(config.max_lr, config.weight_decay),
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
    """All flags. When a run resumes, `fixed` ones cannot change, and `per_run` ones are chosen
    anew: they are not taken from the checkpoint. `word` may stand in place of a number."""
    preset: str = flag("gpt2", START, "A named set of defaults, see below.", choices=list(PRESETS),
                       per_run=True)
    dry_run: bool = flag(False, START,
                         "Print what would run and how long it takes, and write nothing.",
                         per_run=True)

    data: str = flag("edu_fineweb10B", DATA, "Folder of token shards.")
    overfit: bool = flag(False, DATA,
                         "Sanity run: overfit one batch of 4 x 32 tokens. Writes nothing.")
    shuffle: bool = flag(True, DATA, "Permute shards and sequences anew in each epoch.", fixed=True)
    val_tokens: int = flag(10_485_760, DATA, "Tokens of a validation: the first of the val shards.",
                           above=0)
    hellaswag_data: str = flag("", DATA,
                               "HellaSwag examples as .jsonl. Default: from Hugging Face's hub.")

    recipe: str = flag("gpt2", MODEL, "Model, optimizers and schedules.", choices=list(MODELS),
                       fixed=True)
    init: str = flag("scratch", MODEL, "Where the weights come from: scratch, gpt2, OWNER/NAME of "
                     "the hub, a checkpoint, or a folder.", fixed=True)
    n_layer: int = flag(12, MODEL, "Number of blocks.", above=0, fixed=True)
    n_head: int = flag(12, MODEL, "Attention heads.", above=0, fixed=True)
    n_embd: int = flag(768, MODEL, "Width of the model.", above=0, fixed=True)
    block_size: int = flag(1024, MODEL, "Longest sequence, in tokens.", above=0, fixed=True)
    vocab_size: int = flag(50304, MODEL,
                           "Rows of the embedding. GPT-2's 50257 tokens are padded to 50304.",
                           above=0, most=65536, fixed=True)
    window: int = flag("auto", MODEL,
                       "Tokens that attention looks back at the end of the run. 'auto': all.",
                       word="auto", above=0, fixed=True)

    total_batch_size: int = flag(524288, BATCH,
                                 "Tokens of an optimizer step, on all processes together.", above=0,
                                 fixed=True)
    initial_batch_size: int = flag("auto", BATCH, "Tokens of the first steps. The batch doubles "
                                   "after 1/3 and 2/3 of the run's tokens. 'auto': "
                                   "--total_batch_size; for frontier by the run's tokens.",
                                   word="auto", above=0)
    batch_size: int = flag("auto", BATCH,
                           "Most sequences of a micro-step. 'auto': what fits into memory.",
                           word="auto", above=0, per_run=True)
    sequence_length: int = flag("auto", BATCH, "Tokens of a sequence. 'auto': --block_size.",
                                word="auto", above=0, fixed=True)

    max_steps: int = flag(19073, OPTIM, "Optimizer steps. 19073 are one epoch of 10B tokens.",
                          above=0)
    warmup_steps: int = flag(715, OPTIM, "Steps of linear warmup. 715 are GPT-3's 375M tokens.")
    max_lr: float = flag(6e-4, OPTIM, "Learning rate after the warmup.", above=0)
    min_lr: float = flag("auto", OPTIM, "Learning rate at the end. 'auto': a tenth of --max_lr; "
                         "for frontier by --max_steps.", word="auto")
    cooldown: float = flag("auto", OPTIM, "Last part of the run, in which the learning rate "
                           "falls. 'auto': 0.2856; for frontier by --max_steps.", word="auto",
                           above=0, most=1)
    weight_decay: float = flag(0.1, OPTIM,
                               "Weight decay of AdamW (matrices, embeddings) and of Muon.")
    grad_clip: float = flag(1.0, OPTIM, "Largest norm of the gradient. 'inf' clips nothing.",
                            above=0, most=math.inf)
    seed: int = flag(1337, OPTIM, "Random seed of the fresh weights and of the data's order.",
                     most=2**63 - 1, fixed=True)

    device: str = flag("auto", SPEED, "auto, cuda, mps or cpu.", per_run=True)
    dtype: str = flag("auto", SPEED,
                      "Of matrix products (autocast). 'auto': bfloat16 where supported.",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "Use TF32 for float32 matrix products on CUDA.")
    compile: bool = flag("auto", SPEED, "Use torch.compile. 'auto': on CUDA.", per_run=True)
    attention: str = flag("auto", SPEED,
                          "Attention kernel. 'auto': SDPA, or the formula where it is faster.",
                          choices=list(ATTENTION))
    recompute: bool = flag(False, SPEED, "Compute blocks again in the backward, to save memory.",
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
    keep_checkpoints: int = flag(3, OUTPUT,
                                 "How many of the newest are kept, beside the best one, or 'all'.",
                                 word="all", above=0)
    out: str = flag("log", OUTPUT, "Folder for checkpoints and logs.", per_run=True)
    resume: str = flag("auto", OUTPUT, "'auto' (the newest checkpoint in --out), 'never', a "
                       "checkpoint, or a run's folder.", per_run=True)
    wandb: bool = flag(False, OUTPUT, "Also log to Weights & Biases (pip install wandb).",
                       per_run=True)


def merge_flags(given: dict, start: Start) -> Config:
    """Sources 1 to 7 of `resolve_config`. `given`: {flag: value} of the command line."""
    preset = PRESETS[given.get("preset", "gpt2")][1]
    if given.get("overfit"):
        preset = OVERFIT
    recipe = RECIPES[(preset | start.recorded | given).get("recipe", "gpt2")]

    values = recipe.defaults | preset | recipe.rates
    if given.get("overfit"):
        values["min_lr"] = given.get("max_lr", values["max_lr"])        # a constant rate
    values.update(start.recorded)
    values.update(given)
    values.update(start.shape)
    return Config(**values)


def resolve_config(given: dict, start: Start, process: Process) -> tuple[Config, Config]:
    """The value of every flag. Of these sources a later one wins:

    1. the default in Config
    2. the recipe's default (Recipe.defaults)
    3. the preset, or --overfit, which is a run of its own
    4. the recipe's learning rates (Recipe.rates), where it has any: those of presets are for AdamW
    5. the checkpoint of the run that resumes, except for flags that are `per_run`
    6. the command line; with a run that resumes it cannot change flags that are `fixed`
    7. the shape of the model that was loaded (--init); the command line must not contradict it
    8. where there is still "auto": what the recipe says (Recipe.automatic), else the table below

    Returns the flags after 7, which a checkpoint records, so that 8 is decided anew on a resume;
    and after 8, which the run uses.
    """
    asked = merge_flags(given, start)
    if start.path:
        wanted = PRESETS[asked.preset][1] | given
        if wanted.get("init", "scratch") != "scratch":
            # The shape of the weights, and not the preset's, was that of the run from the
            # beginning.
            wanted = {name: value for name, value in wanted.items()
                      if name in given or name not in start.shape}
        check_resumed_flags(start, asked, wanted)
    check_flags(asked, RECIPES, start.path)

    config = replace(asked)             # a copy
    recipe = RECIPES[config.recipe]
    window = 0                          # of attention: everything before
    if recipe.window and start.model:
        window = start.model.config.window
    set_automatic(config, sequence_length=config.block_size, window=window,
                  dtype=choose_dtype("auto", process.device),
                  compile=process.device.startswith("cuda"))
    set_automatic(config, **recipe.automatic(config, process.world_size))
    set_automatic(config, initial_batch_size=config.total_batch_size, min_lr=config.max_lr / 10,
                  batch_size=most_sequences(process.device, config.sequence_length,
                                            config.vocab_size))
    return asked, config


def set_automatic(config: Config, **values) -> None:
    """Gives the flags that are still "auto" these values."""
    for name, value in values.items():
        if getattr(config, name) == "auto":
            setattr(config, name, value)


# ----------------------------------------------------------------------------- set-up

def start_process(device_name: str) -> Process:
    """This process's device, and torchrun's process group if there is one: nccl on CUDA, else
    gloo."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(device_name, local_rank)             # "cuda:3", "mps" or "cpu"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    elif device == "cpu":
        tune_malloc()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Process(device=device)

    timeout = timedelta(minutes=10)
    store, rank, world_size = find_ranks(timeout)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Process(rank, world_size, device)


def use_tf32(config: Config, device: str) -> None:
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")        # high: TF32


def check_ranks_agree(asked: Config, config: Config, process: Process) -> None:
    """UserError if the flags of the processes differ, or what their hardware made of "auto"."""
    # Each GPU may find another --batch_size auto; the smallest will be taken.
    values = vars(config) | {"batch_size": asked.batch_size}
    for name in ("data", "hellaswag_data", "out", "device", "wandb"):
        del values[name]
    process.require_same({f"--{name}": value for name, value in values.items()})


def open_same_data(config: Config, process: Process) -> Data:
    """The data of the run. UserError if the processes have different ones; only their names may
    differ."""
    data = process.on_all_ranks(open_data, config)
    contents = {}
    for split, shards in data.fingerprints().items():
        for i, (_, *content) in enumerate(shards):
            contents[f"{split} shard {i} of --data"] = str(content)
    process.require_same(contents)
    return data


def make_model(config: Config, start: Start, device: str) -> LanguageModel:
    """The model of --init, of the checkpoint, or a fresh one, on the device."""
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


def mixed_precision(config: Config, device: str) -> tuple[torch.amp.GradScaler, torch.autocast]:
    """The scaler of float16's gradients, and the autocast to config.dtype."""
    device_type = device.split(":")[0]
    scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")
    dtype = getattr(torch, config.dtype)
    return scaler, torch.autocast(device_type, dtype, enabled=config.dtype != "float32")


def compile_model(model: LanguageModel) -> Callable:
    """torch.compile of the model, which itself stays eager."""
    warnings.filterwarnings("ignore", ".* does not support bfloat16 compilation natively")
    # On a T4: "not enough SMs to use max_autotune_gemm mode", though nothing is autotuned.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)

    # The compiler computes a small value again wherever it is used, and stores those that take more
    # than 30 operations. Frontier's shifted keys take more, but are used several times: with 64 a
    # micro-step of 16 x 1024 tokens moves 1.5 GB less of 29.
    return torch.compile(model, dynamic=False, options={"realize_opcount_threshold": 64})


def wrap_ddp(model: Callable, device: str) -> DDP:
    """The model inside DDP, which averages the gradients of all ranks."""
    # The compiler splits its graph where a bucket of gradients ends. Torch's buckets of 25 MB make
    # 14 graphs of the 124M, which move 159 GB for 64 x 1024 tokens; those of 170 MB make three,
    # which move 149.
    options = dict(bucket_cap_mb=170, gradient_as_bucket_view=True)
    if device.startswith("cuda"):
        options["device_ids"] = [device]

    # Buffers (the window, the parts of tokens) are the same on all ranks.
    if "forward_sync_buffers" in signature(DDP).parameters:             # from torch 2.13 on
        options["forward_sync_buffers"] = False
    else:
        options["broadcast_buffers"] = False
    return DDP(model, **options)


# ----------------------------------------------------------------------------- a step

def set_schedules(step: int, config: Config, schedule: BatchSchedule, model: LanguageModel,
                  optimizer: CombinedOptimizer) -> float:
    """Sets learning rates, Muon's momentum and the window of this step. Returns the learning
    rate."""
    recipe = RECIPES[config.recipe]
    progress = schedule.progress(step)

    scale = recipe.lr_scale(step, progress, config)
    for group in optimizer.groups():
        group["lr"] = group["initial_lr"] * scale
        if recipe.momentum and "momentum" in group:             # Muon's
            group["momentum"] = recipe.momentum(progress, config)
    if config.window:
        model.window.fill_(recipe.window(progress, config))
    return config.max_lr * scale


def train_step(step: int, config: Config, process: Process, train_loader: TrainLoader,
               model: Callable, optimizer: CombinedOptimizer, scaler: torch.amp.GradScaler,
               autocast: torch.autocast) -> torch.Tensor:
    """One optimizer step: gradients are summed over micro-steps and averaged over the ranks. Waits
    for no GPU, but float16's scaler does. Returns, the same on all ranks, float32 (3,): the mean
    loss, the norm of the gradient before clipping, and how many ranks vote to stop."""
    # Forward and backward of this rank's share of the batch.
    micro_steps = train_loader.micro_steps(step)
    loss_accum = torch.zeros((), device=process.device)
    for micro_step in process.watch(f"step {step}", range(micro_steps)):
        x, y = train_loader.next_batch()                        # (B, T) each
        if process.world_size > 1:
            # DDP sends the gradients along with the last micro-step alone.
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        with autocast:
            _, loss = model(x, y)
        loss = loss / micro_steps
        loss_accum += loss.detach()
        scaler.scale(loss).backward()

    # The ranks add their losses, and with them their votes: 1 if a signal has asked this one to
    # stop.
    vote = torch.full_like(loss_accum, process.asked_to_stop)
    sums = torch.stack((loss_accum, vote))
    if process.world_size > 1:
        dist.all_reduce(sums)
    mean_loss, votes = sums[0] / process.world_size, sums[1]

    # Clip and update. DDP has averaged the gradients: all ranks do the same.
    scaler.unscale_(optimizer)
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if config.grad_clip < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    scaler.step(optimizer)              # does nothing if a gradient of float16 has overflowed
    scaler.update()

    # DDP's gradients are views of its buckets. Several micro-steps accumulate the first ones
    # without DDP: in tensors that were freed they would need memory beside the buckets.
    model.zero_grad(set_to_none=process.world_size == 1 or micro_steps == 1)
    return torch.stack((mean_loss, norm, votes))


# ----------------------------------------------------------------------------- evaluation

@torch.no_grad()
def validation_loss(model: Callable, data: Data, batch_size: int, process: Process,
                    autocast: torch.autocast) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks."""
    B, count = batch_size, data.val_count
    loss_sum = torch.zeros((), device=process.device)
    rows_seen = 0
    firsts = range(process.rank * B, count, process.world_size * B)
    for first in process.watch("validation", firsts):
        # All batches have one shape, so that a model compiles once: the last one has ignored
        # targets.
        x, y = to_device(data.val.read(first, B), process.device)       # (B, T) each
        rows = min(B, count - first)
        y[rows:] = -1
        with autocast:
            _, loss = model(x, y)
        loss_sum += loss * rows
        rows_seen += rows

    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / max(1, rows_seen)


def hellaswag_score(model: LanguageModel, batches: list, process: Process,
                    autocast: torch.autocast) -> tuple[int, int]:
    """(examples answered rightly by acc_norm, all examples)."""
    watched = partial(process.watch, "HellaSwag")
    counts = hellaswag.evaluate(model, batches, process.device, autocast, process.rank,
                                process.world_size, watched)
    _, correct, n = process.sum(*counts.tolist())
    return int(correct), int(n)


def print_samples(model: LanguageModel, prompt: str, process: Process, autocast: torch.autocast,
                  num_samples: int = 4, max_new_tokens: int = 32) -> None:
    # A generator of its own, so that the random numbers of training do not advance.
    generator = torch.Generator(process.device).manual_seed(42)
    tokens = encode(prompt).tolist()[-model.config.block_size:] or [EOT]
    idx = torch.tensor([tokens] * num_samples, device=process.device)   # (num_samples, T)
    with autocast:
        idx = model.generate(idx, max_new_tokens, generator=generator)
    for i, row in enumerate(idx.tolist()):
        text = tokenizer().decode(row).removeprefix("<|endoftext|>")
        process.print0(f"sample {i}: {text}")


@dataclass
class Evaluator:
    """Validation loss, HellaSwag and samples, where they are due."""
    config: Config
    process: Process
    data: Data
    hellaswag_batches: list
    model: LanguageModel        # HellaSwag and samples are of many shapes: they are not compiled
    compiled_model: Callable
    autocast: torch.autocast
    batch_size: int
    log: StepLog

    def run(self, step: int) -> None:
        """StopRequested after a signal to a single process: the run that resumes evaluates
        instead."""
        config, process, log = self.config, self.process, self.log
        due = partial(is_due, step, config.max_steps)
        if not (due(config.val_every) or due(config.hellaswag_every) or due(config.sample_every)):
            return

        # A run that resumes at this step may have evaluated before it ended.
        done = process.from_master(log.evaluated(step))

        if due(config.val_every) and "val" not in done:
            loss = validation_loss(self.compiled_model, self.data, self.batch_size, process,
                                   self.autocast)
            if not math.isfinite(loss):
                with said_once():
                    raise RunError(f"step {step}: validation loss {loss}. {newest_of(config.out)}")
            text = f"validation loss: {loss:.4f}{in_bits(loss, self.data)}"
            log.evaluation(step, "val", loss, text)

        if due(config.hellaswag_every) and self.hellaswag_batches and "hella" not in done:
            correct, n = hellaswag_score(self.model, self.hellaswag_batches, process, self.autocast)
            accuracy = correct / n
            text = f"HellaSwag accuracy: {correct}/{n}={accuracy:.4f}"
            log.evaluation(step, "hella", accuracy, text)

        if due(config.sample_every) and step > 0 and not done and process.is_master:
            print_samples(self.model, config.sample_prompt, process, self.autocast)

        if log.record and (due(config.val_every) or due(config.hellaswag_every)):
            title = f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}"
            plots.draw(log.record, title, last=step == config.max_steps)


def is_due(step: int, max_steps: int, period: int) -> bool:
    """Every `period` steps, and at the end; never if it is 0."""
    return period > 0 and (step % period == 0 or step == max_steps)


# ----------------------------------------------------------------------------- checkpoints

@dataclass
class Checkpointer:
    """Writes OUT/checkpoint_STEP.pt."""
    asked: Config               # the flags; what is "auto" is decided anew by the run that resumes
    process: Process
    data: Data
    schedule: BatchSchedule
    model: LanguageModel
    optimizer: CombinedOptimizer
    scaler: torch.amp.GradScaler
    output: Output
    last_step: int              # of the newest checkpoint

    def save(self, step: int) -> None:
        if step == self.last_step or self.asked.overfit or not self.asked.checkpoint_every:
            return
        self.last_step = step
        self.process.require_same(
            {"the weights' sum of bits": weights_digest(self.model)},
            "the ranks have drifted apart; resume from the checkpoint before", RunError)

        moments = gather_moments(self.model, self.optimizer)    # some of them are on other ranks
        if self.process.is_master:
            checkpoint = {
                "model": host_copy(self.model.state_dict()),
                "model_config": asdict(self.model.config),
                "recipe": self.asked.recipe,
                "config": asdict(self.asked),
                "step": step,
                "tokens": self.schedule.tokens_before(step),
                "optimizers": moments,
                "scaler": self.scaler.state_dict(),
                "data": self.data.fingerprints(),
                "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            }
            self.output.saver.write(checkpoint, self.output.record)


# ----------------------------------------------------------------------------- the loop

@dataclass
class LaunchedStep:
    """A step whose numbers a GPU may still compute."""
    step: int
    numbers: Callable           # waits for them: [loss, norm, votes to stop]
    lr: float
    began: float


def train(start_step: int, config: Config, process: Process, schedule: BatchSchedule,
          train_loader: TrainLoader, model: LanguageModel, train_model: Callable,
          optimizer: CombinedOptimizer, scaler: torch.amp.GradScaler, autocast: torch.autocast,
          evaluator: Evaluator, checkpointer: Checkpointer, log: StepLog) -> tuple[int, bool]:
    """Trains until max_steps or a signal. Returns the steps done, and whether a signal ended the
    run."""
    periods = config.val_every, config.hellaswag_every, config.sample_every, config.checkpoint_every
    on_gpu = process.device.startswith("cuda")

    step = start_step                   # steps done
    launched = deque()                  # those of them that are not logged yet
    overflows = 0                       # steps in a row that float16 has skipped
    stopped = False

    while True:
        finished = step == config.max_steps
        due = [is_due(step, config.max_steps, period) for period in periods]

        # Log the finished steps. A GPU still computes the last one while the CPU launches the next,
        # so that it never waits; but before anything is saved or evaluated, all numbers have to be
        # known to be finite.
        ahead = 1 if on_gpu and not finished and not any(due) else 0
        while len(launched) > ahead or (launched and stopped):
            done = launched.popleft()
            loss, norm, votes = done.numbers()
            overflows = 0 if math.isfinite(norm) else overflows + 1
            check_finite(done.step, loss, norm, overflows, config)
            log.step(done.step, loss, norm, done.lr, done.began)
            if votes > 0:
                stopped = True

        # Save: before the evaluation, so that a kill during it loses nothing.
        if stopped or is_due(step, config.max_steps, config.checkpoint_every):
            checkpointer.save(step)
        if stopped:
            return step, True

        # Evaluate and train. A single process leaves at once when a signal comes: the step is
        # dropped, and the run that resumes repeats it. Several processes finish it, because they
        # vote with its loss.
        try:
            lr = set_schedules(step, config, schedule, model, optimizer)
            evaluator.run(step)
            if finished:
                return step, False
            began = time.perf_counter()
            numbers = train_step(step, config, process, train_loader, train_model, optimizer,
                                 scaler, autocast)
        except StopRequested:
            stopped = True
            continue

        launched.append(LaunchedStep(step, fetch(numbers), lr, began))
        step += 1


def check_finite(step: int, loss: float, norm: float, overflows: int, config: Config) -> None:
    """RunError if the loss or the gradient is not finite. The scaler of float16 begins at 65536,
    skips steps whose gradient overflows, and halves its scale: some are usual."""
    most = 25 if config.dtype == "float16" else 0
    if math.isfinite(loss) and overflows <= most:
        return
    with said_once():
        raise RunError(f"step {step} is not finite: loss {loss}, gradient norm {norm}: lower "
                       f"--max_lr or lengthen --warmup_steps. {newest_of(config.out)}")


def memory_errors(device: str):
    """Around what may need more memory than there is."""
    return oom_as_user_error(lambda: f"{device} is out of memory: give a smaller --batch_size, "
                                     "--recompute, --shard_optimizer (several GPUs), or a smaller "
                                     "model")


def main(argv: list[str] | None = None) -> int:
    # The command line, {flag: value}, and what it means for a new run.
    with said_once("LOCAL_RANK"):
        given = parse_flags(Config, RECIPES, __doc__, argv)
        flags = merge_flags(given, Start())
        check_flags(flags, RECIPES, None)
    process = start_process(flags.device)
    device = process.device

    # All processes find the same mistakes until the training begins: one of them says it.
    with memory_errors(device), said_once():
        # Where the run starts, and the values of all flags.
        start = find_start(flags, given, process, MODELS, load_model)
        asked, config = resolve_config(given, start, process)
        check_ranks_agree(asked, config, process)
        use_tf32(config, device)

        # The data, the model, its optimizers.
        schedule = batch_schedule(config, process.world_size)
        data = open_same_data(config, process)
        model = make_model(config, start, device)
        optimizers = RECIPES[config.recipe].make_optimizers(model, config)
        optimizer = CombinedOptimizer(model, optimizers, process, config.shard_optimizer)
        scaler, autocast = mixed_precision(config, device)
        if start.path:
            restore(start, config.data, data, schedule, model, optimizer, scaler)

        # The same weights: as they are, compiled, and for training inside DDP.
        compiled_model = compile_model(model) if config.compile else model
        train_model = wrap_ddp(compiled_model, device) if process.world_size > 1 else compiled_model

        # How large a micro-batch fits: a trial tells.
        moments = optimizer.state_bytes() if device.startswith("cuda") and start.step == 0 else 0
        trial = partial(time_micro_step, train_model, config.sequence_length, device, autocast,
                        moments)
        batch_size = choose_batch_size(config, asked.batch_size == "auto", process, trial)
        print_header(config, process, data, model, schedule, batch_size, start)
        if config.dry_run:
            rate = batch_size * config.sequence_length * process.world_size / trial(batch_size)
            print_estimate(config, process, schedule.tokens_left(start.step), rate)
            return 0

        # From here on something is written, and signals ask the run to stop.
        hellaswag_batches = hellaswag.hellaswag_batches(config, given.keys(), process)
        output = Output()
        process.on_all_ranks(output.open, config, start, process, schedule.tokens_before)
        process.catch_signals()

    train_loader = TrainLoader(data.train, schedule, batch_size, start.step, process)
    with memory_errors(device), output, closing(train_loader):
        log = StepLog(process, output.record, schedule,
                      model.flops_per_token(config.sequence_length))
        evaluator = Evaluator(config, process, data, hellaswag_batches, model, compiled_model,
                              autocast, batch_size, log)
        checkpointer = Checkpointer(asked, process, data, schedule, model, optimizer, scaler,
                                    output, start.step)
        step, stopped = train(start.step, config, process, schedule, train_loader, model,
                              train_model, optimizer, scaler, autocast, evaluator, checkpointer, log)
    return print_summary(config, process, data, log, step, stopped)


if __name__ == "__main__":
    run_command(main)
