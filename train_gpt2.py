"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                          a sanity check: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run     what a run would do, and for how long
    python train_gpt2.py                                    on the shards of `python fineweb.py`
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  the same on 8 GPUs

Run the same command again to resume from the newest checkpoint in --out.
"""
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import frontier
import hellaswag
import recipes
import speedrun
from model import ATTENTION, LanguageModel
from runtime import checkpoint, console, dataloader, device, ranks
from runtime.cli import RunError, flag, run_command
from runtime.dataloader import Data
from runtime.flags import FlagTable, check_ranks_agree, set_automatic
from runtime.optimizers import CombinedOptimizer
from runtime.output import Output
from runtime.ranks import Process
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


# How each model is trained: runtime.recipe.Recipe explains the fields. recipes.MODELS has
# the models themselves.
RECIPES = {
    # Config's defaults for the optimizer, and AdamW's settings in model.py, are those of GPT-3
    # Small (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B).
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
    """All flags. A flag that is "auto" gets its value in resolve_config.

    When a run resumes, a `fixed` flag cannot change, and a `per_run` flag is not taken from the
    checkpoint. runtime.cli.flag explains the other settings.
    """
    preset: str = flag("gpt2", START, "A named set of defaults. The presets are listed below.",
                       choices=list(recipes.PRESETS), per_run=True)
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
    # Token ids are uint16 in the shards: there are at most 65536.
    vocab_size: int = flag(50304, MODEL, "The number of rows in the embedding. The default is "
                           "GPT-2's 50257 tokens, padded to a multiple of 128.",
                           above=0, largest=65536, fixed=True)

    total_batch_size: int = flag(524288, BATCH, "The number of tokens per optimizer step, over all "
                                 "processes.", above=0, fixed=True)
    batch_size: int = flag("auto", BATCH, "The most sequences that one process computes at once "
                           "(its micro-batch). 'auto' means as many as fit into a GPU's memory, "
                           "and at most 65536 tokens, or 4096 without a GPU.",
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
                           "learning rate falls, in recipes that have one. 'auto' means 0.2856 in "
                           "speedrun, and in frontier a value that depends on --max_steps.",
                           word="auto", above=0, largest=1)
    weight_decay: float = flag(0.1, OPTIM, "The weight decay of AdamW (on matrices and "
                               "embeddings) or of Muon.")
    grad_clip: float = flag(1.0, OPTIM, "The largest norm of the gradient: a larger gradient is "
                            "scaled down to this norm. 'inf' turns clipping off.",
                            above=0, largest=math.inf)
    seed: int = flag(1337, OPTIM, "The random seed of new weights and of the order of the data.",
                     largest=2**63 - 1, fixed=True)

    device: str = flag("auto", SPEED, "The device to train on: cuda, mps or cpu. 'auto' means the "
                       "first of these that is available.", per_run=True)
    dtype: str = flag("auto", SPEED, "The number format of matrix products (autocast). 'auto' "
                      "means bfloat16 where the hardware has it, else float16 on CUDA and float32 "
                      "elsewhere.", choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "Use TF32 for float32 matrix products on CUDA.")
    compile: bool = flag("auto", SPEED, "Compile the model with torch.compile. 'auto' means on "
                         "CUDA, if the run is long enough to win back the time of compiling.",
                         per_run=True)
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
    resume: str = flag("auto", OUTPUT, "The checkpoint, or the folder of a run, from which the run "
                       "begins if --out has no checkpoint yet. 'auto' means a new run. Where --out "
                       "has checkpoints, the newest is continued.", per_run=True)
    wandb: bool = flag(False, OUTPUT, "Also log to Weights & Biases (pip install wandb).",
                       per_run=True)


FLAGS = FlagTable(Config, RECIPES, recipes.PRESETS, recipes.OVERFIT)


def resolve_config(given: dict, start: checkpoint.Start, process: Process) -> tuple[Config, Config]:
    """The flags as asked, some of them "auto", and the `config` that the run uses.

    `given`, {flag: value}, is the command line. Checkpoints record the flags as asked, so that a
    resume decides anew what "auto" means. UserError if the command line or the preset contradicts
    the run that resumes (in a `fixed` flag) or the shape of the model that was loaded.
    """
    flags = FLAGS.merge(given, start)
    if start.path:
        checkpoint.check_resumed_flags(start, flags, FLAGS.wanted(given, start, flags))
    FLAGS.check(flags)

    # What "auto" means: first what the recipe says, then what holds for all recipes.
    config = replace(flags)             # a copy
    set_automatic(config, sequence_length=config.block_size)
    set_automatic(config, **RECIPES[config.recipe].automatic(config))
    set_automatic(config, min_lr=config.max_lr / 10)
    config.dtype = device.choose_dtype(config.dtype, process.device)

    # Micro-steps of more tokens are no faster, on an H200 and on CPUs (docs/speed.md). On a GPU a
    # trial will tell whether so many fit into its memory. --compile auto is decided when the
    # model is there.
    most_tokens = 4096
    if process.on_gpu:
        most_tokens = 65536
    set_automatic(config, batch_size=max(1, most_tokens // config.sequence_length))
    return flags, config


# ----------------------------------------------------------------------------- set-up

def start_process(device_name: str) -> Process:
    """This process's device, and torchrun's process group if there is one.

    Nothing calls destroy_process_group: run_command ends the ranks, and says why.
    """
    ranks.end_with_torchrun()
    process = ranks.read_process()
    process.device = device.choose_device(device_name, process.local_rank)  # "cuda:3", "mps", "cpu"
    if process.on_gpu:
        torch.cuda.set_device(process.device)
    elif process.device == "cpu":
        device.tune_malloc()

    if process.world_size > 1:
        ranks.say_who_is_missing(process)
        backend = "nccl" if process.on_gpu else "gloo"
        # The ranks wait while rank 0 downloads: HellaSwag, or 6 GB of gpt2-xl with --init.
        timeout = timedelta(hours=1)
        dist.init_process_group(
            backend,
            store=ranks.shared_store(timeout),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
        )
    return process


def use_tf32(config: Config, process: Process) -> None:
    if process.on_gpu:
        precision = "high" if config.tf32 else "highest"        # "high" is TF32
        torch.set_float32_matmul_precision(precision)


@dataclass
class TrainState:
    """The model and all that trains it. The three models are one: they share their weights."""
    model: LanguageModel                # eager, for HellaSwag and samples, which have many shapes
    compiled_model: Callable            # for validation, which has one shape
    ddp_model: Callable                 # for training: averages the gradients of all ranks
    optimizer: CombinedOptimizer
    scaler: torch.amp.GradScaler        # of float16's gradients; of other dtypes it does nothing
    autocast: torch.autocast            # matrix products in config.dtype, inside `with`


def make_model(config: Config, start: checkpoint.Start, device_name: str) -> LanguageModel:
    """The model of --init, of the checkpoint, or a fresh one, on the device."""
    # All ranks have the same seed, so they draw the same weights. No model has dropout: nothing
    # else is random in training, and there is no need for model.train() and model.eval().
    torch.manual_seed(config.seed)
    model = start.model
    if model is None:
        model = recipes.fresh_model(config)
    return model.to(device_name)


def make_train_state(config: Config, model: LanguageModel, process: Process) -> TrainState:
    """How the model computes; then the optimizers, autocast, torch.compile and DDP."""
    model.kernel = config.attention
    model.recompute = config.recompute
    if process.device == "cpu" and not config.compile:
        # A CPU's cache has no room for all logits. A compiler would fuse them with the loss.
        model.loss_chunk = 2048

    optimizers = RECIPES[config.recipe].make_optimizers(model, config)
    optimizer = CombinedOptimizer(model, optimizers, process, config.shard_optimizer)

    device_type = process.device.split(":")[0]
    scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(device_type, dtype, enabled=config.dtype != "float32")

    # DDP wraps the compiled model, as in nanoGPT.
    compiled_model = model
    if config.compile:
        compiled_model = compile_model(model)
    ddp_model = compiled_model
    if process.world_size > 1:
        ddp_model = DDP(compiled_model, **ranks.ddp_options(process))
    return TrainState(model, compiled_model, ddp_model, optimizer, scaler, autocast)


def compile_model(model: LanguageModel) -> Callable:
    """torch.compile of the model, which itself stays eager."""
    # On a T4 torch warns: "not enough SMs to use max_autotune_gemm mode". Nothing here uses it.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)

    # The rotary tables are constants of the graph. Otherwise it would compute powers, cosines and
    # sines anew for each number that is rotated, and they took a quarter of a step. (A decorator in
    # speedrun.py would import the compiler, which takes a second, into every script.)
    torch.compiler.assume_constant_result(speedrun.rotary_tables)
    return torch.compile(model, dynamic=False)


# ----------------------------------------------------------------------------- a step

def set_schedules(
    step: int, config: Config, schedule: BatchSchedule, state: TrainState
) -> float:
    """Sets the learning rates of this step, and the momentum where the recipe has a schedule of it.

    Returns the learning rate for the log: --max_lr times the schedule's factor.
    """
    recipe = RECIPES[config.recipe]
    progress = schedule.progress(step)

    scale = recipe.lr_scale(step, progress, config)
    for group in state.optimizer.groups():
        group["lr"] = group["initial_lr"] * scale               # CombinedOptimizer noted initial_lr
        if recipe.momentum and "momentum" in group:
            group["momentum"] = recipe.momentum(progress, config)
    return config.max_lr * scale


def train_step(
    step: int, config: Config, process: Process, loader: dataloader.TrainLoader, state: TrainState
) -> torch.Tensor | None:
    """One optimizer step: gradients are summed over micro-steps and averaged over the ranks.

    The CPU does not wait for the GPU here, except with float16, in scaler.step. Returns a
    float32 tensor (3,), the same on all ranks: the mean loss, the norm of the gradient before
    clipping, and how many ranks vote to stop. None if a signal has ended a single process's step
    before its update.
    """
    # Forward and backward of this rank's share of the batch.
    micro_steps = loader.micro_steps(step)
    loss_accum = torch.zeros((), device=process.device)
    for micro_step in process.progress(f"step {step}", range(micro_steps)):
        if process.stop_requested():
            return None
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

    mean_loss, votes = over_all_ranks(loss_accum, process)

    # Clip and update. DDP has averaged the gradients, so all ranks do the same.
    state.scaler.unscale_(state.optimizer)
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if config.grad_clip < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    # With float16 this skips the step if a gradient has overflowed. Muon and --shard_optimizer
    # exchange the updates of the ranks in here.
    state.scaler.step(state.optimizer)
    state.scaler.update()

    # With DDP the gradients are views of its buckets. If they were set to None, the micro-steps
    # before the last one would accumulate into new tensors, beside the buckets.
    state.model.zero_grad(set_to_none=process.world_size == 1 or micro_steps == 1)
    return torch.stack((mean_loss, norm, votes))


def over_all_ranks(loss: torch.Tensor, process: Process) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the ranks' losses, and how many ranks vote to stop."""
    vote = torch.full_like(loss, float(process.received != ""))     # 1: a signal came
    sums = torch.stack((loss, vote))
    if process.world_size > 1:
        dist.all_reduce(sums)
    return sums[0] / process.world_size, sums[1]


# ----------------------------------------------------------------------------- evaluation

def validation_loss(data: Data, process: Process, state: TrainState) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks."""
    B = data.loader.B
    loss_sum = torch.zeros((), device=process.device)
    rows_seen = 0

    # A compiled model runs in the graph of training, which computes what a backward would need. For
    # torch.no_grad() torch would compile a second graph, and that takes longer than it saves.
    is_compiled = state.compiled_model is not state.model
    firsts = range(process.rank * B, data.val_count, process.world_size * B)
    for first in process.progress("validation", firsts):
        if process.stop_requested():
            break
        # All batches have one shape, so that the model compiles once: in the last one the targets
        # of the rows beyond the end are ignored.
        x, y = dataloader.to_device(data.val.read(first, B), process.device)        # (B, T) each
        rows = min(B, data.val_count - first)
        y[rows:] = -1
        with torch.set_grad_enabled(is_compiled), state.autocast:
            _, loss = state.compiled_model(x, y)
        loss_sum += loss.detach() * rows
        rows_seen += rows
        del loss            # and with it what a backward would need, before the next batch

    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / max(1, rows_seen)


def hellaswag_score(data: Data, process: Process, state: TrainState) -> tuple[int, int]:
    """(examples answered rightly by the mean loss of a token, which is acc_norm; all examples)."""
    def own_batches():
        batches = data.hellaswag[process.rank::process.world_size]
        for batch in process.progress("HellaSwag", batches):
            if process.stop_requested():
                break
            yield batch

    counts = hellaswag.evaluate(state.model, own_batches(), process.device, state.autocast)
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
    step: int, config: Config, process: Process, data: Data, state: TrainState, log: console.StepLog
) -> None:
    """Validation loss, HellaSwag and samples, where they are due. A signal ends it early."""
    val_is_due = is_due(step, config, config.val_every)
    hellaswag_is_due = is_due(step, config, config.hellaswag_every) and data.hellaswag
    samples_are_due = is_due(step, config, config.sample_every) and step > 0
    if not (val_is_due or hellaswag_is_due or samples_are_due):
        return

    # A run that resumes at this step may have evaluated before it ended.
    done = process.from_master(log.output.evaluated(step))

    if val_is_due and "val" not in done:
        loss = validation_loss(data, process, state)
        if process.stop_requested():
            return
        if not math.isfinite(loss):
            raise process.shared(RunError(f"the validation loss at step {step} is {loss}: lower "
                                          "--max_lr"))
        text = f"validation loss: {loss:.4f}{console.in_bits(loss, data)}"
        log.evaluation(step, "val", loss, text)

    if hellaswag_is_due and "hella" not in done:
        correct, n = hellaswag_score(data, process, state)
        if process.stop_requested():
            return
        text = f"HellaSwag accuracy: {correct}/{n}={correct / n:.4f}"
        log.evaluation(step, "hella", correct / n, text)

    if samples_are_due and process.is_master:
        print_samples(config, process, state)

    title = f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}"
    log.output.draw(title, last=step == config.max_steps)


def is_due(step: int, config: Config, period: int) -> bool:
    """Every `period` steps, and at the end of the run; never if the period is 0."""
    return period > 0 and (step % period == 0 or step == config.max_steps)


# ----------------------------------------------------------------------------- checkpoints

def save(step: int, process: Process, data: Data, state: TrainState, output: Output) -> None:
    """Writes OUT/checkpoint_STEP.pt, on a GPU in the background."""
    process.require_same(
        {"the checksum of the weights": checkpoint.weights_digest(state.model)},
        "the processes have drifted apart since the last checkpoint", RunError)

    # Some of the optimizers' state is on other ranks.
    optimizer_state = checkpoint.gather_state(state.model, state.optimizer, process)
    if process.is_master:
        output.save({
            "model": checkpoint.host_copy(state.model.state_dict()),
            "model_config": asdict(state.model.config),
            "recipe": output.flags.recipe,
            "config": asdict(output.flags),         # as asked: a resume decides anew what "auto" is
            "step": step,
            "tokens": data.loader.schedule.tokens_before(step),
            "optimizers": optimizer_state,
            "scaler": state.scaler.state_dict(),
            "data": data.fingerprints(),
        })


# ----------------------------------------------------------------------------- the loop

@dataclass
class LaunchedStep:
    """A step that has been launched. A GPU may still be computing its numbers.

    `began` and `ended` are moments of device.mark_time: on a GPU by the GPU's own clock, because
    the CPU reads the numbers of a step late.
    """
    step: int
    read_numbers: Callable      # waits for them: [loss, norm, votes to stop]
    lr: float
    began: object
    ended: object

    def seconds(self) -> float:
        return device.seconds_between(self.began, self.ended)


# How a run stops. A signal (SIGTERM, Ctrl-C, ...) ends nothing by itself: `process` notes it.
# - A single process looks at the note before each micro-step and each batch of an evaluation. It
#   drops the step or evaluation that it is in. The run that resumes repeats it.
# - Several ranks must stop after the same step. They add up their votes in train_step, and read the
#   sum when they log that step. So they first finish their evaluation, and one or two steps; on
#   GPUs up to four, because there a step is logged after the next one is launched.
# Then the run saves, unless --checkpoint_every is 0, and ends with exit code 0.
#
# A SIGKILL or a crash loses the steps since the newest checkpoint; the run that resumes repeats
# them with the same tokens. torchrun sends SIGKILL 30 s after SIGTERM (--shutdown_timeout).

def train(
    step: int, config: Config, process: Process, data: Data, state: TrainState, log: console.StepLog
) -> tuple[int, bool]:
    """Trains from `step` on. Returns the steps done, and whether a signal ended the run."""
    stopped = False
    last_saved = step
    launched = deque()                  # steps that are not logged yet, the oldest first
    ended = None                        # when the step before ended
    overflows = 0                       # the newest steps in a row whose gradient was not finite

    while True:
        # Save. It comes before the evaluation, so that a kill during the evaluation loses nothing.
        may_save = config.checkpoint_every > 0 and not config.overfit and step > last_saved
        if may_save and (stopped or is_due(step, config, config.checkpoint_every)):
            save(step, process, data, state, log.output)
            last_saved = step
        if stopped:
            return step, True

        # Evaluate.
        lr = set_schedules(step, config, data.loader.schedule, state)
        evaluate(step, config, process, data, state, log)
        if step == config.max_steps:
            return step, process.stop_requested()       # a signal has cut the last evaluation short

        # Train.
        began = beginning(step, ended, config, process)
        numbers = train_step(step, config, process, data.loader, state)
        if numbers is None:             # a signal: the step is dropped
            stopped = True
        else:
            read_numbers = device.copy_later(numbers)
            ended = device.mark_time(process.device)
            launched.append(LaunchedStep(step, read_numbers, lr, began, ended))
            step += 1

        # Log, and check the loss before anything can be saved or evaluated.
        while len(launched) > steps_in_flight(step, config, process, stopped):
            done = launched.popleft()
            loss, norm, votes = done.read_numbers()
            overflows = 0 if math.isfinite(norm) else overflows + 1
            check_finite(done.step, loss, norm, overflows, config, process)
            log.step(done.step, loss, norm, done.lr, done.seconds())
            if votes > 0:
                stopped = True


def beginning(step: int, ended, config: Config, process: Process):
    """When a step begins: where the step before `ended`, unless something came between."""
    if ended is None or something_is_due(step, config):
        return device.mark_time(process.device)
    return ended


def steps_in_flight(step: int, config: Config, process: Process, stopped: bool) -> int:
    """How many launched steps may stay unlogged for now."""
    if not process.on_gpu:
        return 0

    # A GPU computes one step while the CPU launches the next, so that it never waits for the CPU.
    # But before an evaluation or a checkpoint, and at the end, all numbers have to be known.
    if stopped or step == config.max_steps or something_is_due(step, config):
        return 0
    return 1


def something_is_due(step: int, config: Config) -> bool:
    """Whether an evaluation or a checkpoint comes before this step."""
    periods = (config.val_every, config.hellaswag_every, config.sample_every,
               config.checkpoint_every)
    return any(is_due(step, config, period) for period in periods)


def check_finite(
    step: int, loss: float, norm: float, overflows: int, config: Config, process: Process
) -> None:
    """RunError if the loss or the gradient is not finite: the weights are not worth saving."""
    # float16's scaler begins at 65536, skips a step whose gradient overflows, and halves its scale.
    # So some overflows in a row are usual. After 25 the scale is 1/512, and one more is an error.
    allowed = 0
    if config.dtype == "float16":
        allowed = 25
    if math.isfinite(loss) and overflows <= allowed:
        return
    raise process.shared(RunError(
        f"the loss or the gradient of step {step} is not finite (loss {loss}, gradient norm "
        f"{norm}), and with the same settings it would be so again: lower --max_lr, and begin at "
        "an earlier checkpoint (--resume) in another --out"))


def resume(
    start: checkpoint.Start, config: Config, process: Process, data: Data, schedule: BatchSchedule,
    state: TrainState,
) -> None:
    """Loads the optimizers' state and the place in the data, and says where the run resumes."""
    process.on_all_ranks(
        checkpoint.restore, start, data, schedule, state.optimizer, state.scaler)
    lr = set_schedules(start.step, config, schedule, state)
    console.print_resume(config, process, start, lr)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    given = FLAGS.parse(__doc__, argv)
    process = start_process(given.get("device", "auto"))
    with device.memory_errors(process.device):
        # Where the run begins; then all flags, among them those that a checkpoint has recorded.
        start = checkpoint.find_start(FLAGS.merge(given, checkpoint.Start()), given, process,
                                      recipes.MODELS, recipes.load_model)
        flags, config = process.on_all_ranks(resolve_config, given, start, process)
        check_ranks_agree(flags, config, process)
        use_tf32(config, process)

        # The data, and the model with all that trains it. The model of a checkpoint is in `start`;
        # restore takes the optimizers' state and the place in the data from there.
        schedule = process.on_all_ranks(
            make_batch_schedule, RECIPES[config.recipe], config, process.world_size)
        data = dataloader.open_same_data(config, process)
        model = process.on_all_ranks(make_model, config, start, process.device)
        device.choose_compile(config, model, schedule.tokens_left(start.step), process)
        state = make_train_state(config, model, process)
        if start.path:
            resume(start, config, process, data, schedule, state)
        console.print_header(config, process, data, model, schedule, start.step)

        # The micro-batch that fits into memory; trial(B) computes one of B sequences twice, and
        # returns the seconds of the second. The training step is compiled here.
        B, trial = device.choose_micro_batch(flags, config, start, schedule, state, process)
        console.print_batch(config, process, schedule, B)
        if config.dry_run:
            rate = B * config.sequence_length * process.world_size / trial(B)
            console.print_estimate(config, process, data, schedule, start.step, rate)
            return 0

        # From here on something is written, and a signal asks the run to stop.
        data.hellaswag = hellaswag.hellaswag_batches(config, given.keys(), process)
        output = Output(flags, process, schedule.tokens_before)
        process.on_all_ranks(output.open, config, start)
        process.catch_signals()

        data.loader = dataloader.TrainLoader(data.train, schedule, B, start.step, process)
        log = console.StepLog(
            process, output, schedule, model.flops_per_token(config.sequence_length))
        with output, closing(data.loader):
            step, stopped = train(start.step, config, process, data, state, log)
        return console.print_summary(config, process, data, log, step, stopped)


if __name__ == "__main__":
    run_command(main)
