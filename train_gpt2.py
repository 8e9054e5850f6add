"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                          a sanity check: overfit one batch
    python train_gpt2.py                                    on the shards of `python fineweb.py`
    torchrun --standalone --nproc_per_node=8 train_gpt2.py  the same on 8 GPUs
    python train_gpt2.py --dry_run                          what it would do, and for how long

Run the same command again to resume from the newest checkpoint in --out.
"""
# From the parts to the whole: GPT-2's recipe, set-up, a step, evaluation, checkpoints, the loop,
# and last the command, where start_run has the order of a run. config.py has the flags, model.py
# the model, runtime/ what is around a run.
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
from config import FLAGS, Config, resolve
from model import GPT
from recipes import RECIPES, fresh_model
from runtime import checkpoint, console, dataloader, hardware, machines, micro_batch, ranks
from runtime.checkpoint import Start
from runtime.cli import run_command
from runtime.dataloader import Data, TrainLoader
from runtime.language_model import set_how_to_compute
from runtime.launched import LaunchedSteps, check_finite, check_step
from runtime.optimizers import CombinedOptimizer
from runtime.output import Output
from runtime.ranks import Process, Stopped
from runtime.recipe import BatchSchedule, Recipe, make_batch_schedule
from runtime.tokenizer import document_start, encode, tokens_as_text

# ----------------------------------------------------------------------------- the recipe of GPT-2

def warmup_cosine(step: int, config: Config) -> float:
    """The factor of the learning rate: linear warmup, then a cosine to min_lr (arXiv:1608.03983)"""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps

    decay = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)     # 0 to 1
    min_scale = config.min_lr / config.max_lr
    return min_scale + 0.5 * (1.0 + math.cos(math.pi * decay)) * (1.0 - min_scale)


def make_adamw(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """One AdamW; other recipes have two optimizers. Its settings are those of GPT-3 Small."""
    return [model.configure_optimizers(config.max_lr, config.weight_decay)]


# --recipe gpt2, the default. The other recipes are at the end of speedrun.py and frontier.py.
GPT2 = Recipe(model=GPT, make_optimizers=make_adamw, lr_scale=warmup_cosine)


def complete(recipe: Recipe) -> Recipe:
    """The recipe; where RECIPES has a model alone, as for gpt2, it is trained as GPT-2."""
    if recipe.make_optimizers is None:
        return replace(GPT2, model=recipe.model)
    return recipe


# ----------------------------------------------------------------------------- set-up

def start_process(device: str) -> Process:
    """This process with its device, and the process group if torchrun has started several."""
    process = ranks.read_process()              # RANK, LOCAL_RANK and WORLD_SIZE of torchrun
    process.device = hardware.choose_device(device, process.local_rank)     # "cuda:3", "mps", "cpu"
    if process.on_gpu:
        torch.cuda.set_device(process.device)

    if process.world_size > 1:
        # The ranks wait for up to an hour while rank 0 downloads, gpt2-xl with --init, say.
        timeout = timedelta(hours=1)
        dist.init_process_group(
            "nccl" if process.on_gpu else "gloo",
            store=machines.shared_store(process, timeout),      # by which the ranks find each other
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
        )
    return process


def make_model(config: Config, loaded: nn.Module | None, device: str) -> nn.Module:
    """The model that was `loaded` for --init or from a checkpoint, or a new one, on the device."""
    torch.manual_seed(config.seed)          # all ranks draw the same weights
    model = loaded or fresh_model(config)   # of the size that the flags say
    return model.to(device).train()


@dataclass
class TrainState:
    """The model and all that trains it. The three models are one: they share their weights."""
    model: nn.Module                    # eager, for HellaSwag and samples, which have many shapes
    compiled_model: Callable            # for validation, which has one shape; it may be eager, too
    ddp_model: Callable                 # for training: averages the gradients, if there are ranks
    optimizer: CombinedOptimizer        # the recipe's optimizers, as one that the scaler can step
    scaler: torch.amp.GradScaler        # of float16's gradients; of other dtypes it does nothing
    autocast: torch.autocast            # matrix products in config.dtype, inside `with`
    others: dict = field(default_factory=dict)  # what else you want saved: {"ema": ...}


def make_train_state(
    config: Config, recipe: Recipe, model: nn.Module, process: Process
) -> TrainState:
    set_how_to_compute(model, config, process)      # --attention, --recompute, chunks of the loss
    if process.on_gpu:
        # "high" is TF32: float32 matrix products with 10 bits of mantissa.
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")

    # With --shard_optimizer each rank keeps the moments of its share of the weights (ZeRO stage 1).
    optimizers = recipe.make_optimizers(model, config)
    optimizer = CombinedOptimizer(model, optimizers, process, config.shard_optimizer)

    # Mixed precision: matrix products are in bfloat16 (config.dtype). The weights, their gradients,
    # the moments and the loss stay in float32.
    device_type = process.device.split(":")[0]
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(device_type, dtype, enabled=config.dtype != "float32")
    # Unscaled, small gradients would be 0 in float16. bfloat16 has the range of float32.
    scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")

    # DDP wraps the compiled model, as in nanoGPT. The model itself stays eager.
    compiled_model = model
    if config.compile:
        compiled_model = torch.compile(model, dynamic=False)    # all batches have one shape
    ddp_model = compiled_model
    if process.world_size > 1:
        # Its device, buckets of whole blocks, and gradients that are views of them.
        ddp_model = DDP(compiled_model, **ranks.ddp_options(model, process))
    return TrainState(model, compiled_model, ddp_model, optimizer, scaler, autocast)


@dataclass
class Run:
    """All that a run consists of."""
    config: Config              # the flags, without "auto"
    asked: dict                 # the flags as they were asked for: a checkpoint records these
    recipe: Recipe              # GPT2, or another one
    process: Process            # this one, of `world_size`
    schedule: BatchSchedule     # how many tokens each step has
    data: Data
    loader: TrainLoader         # the micro-batches of this process
    hellaswag_batches: list     # [] without HellaSwag
    state: TrainState
    output: Output              # the folder --out
    log: console.StepLog        # the lines on the console


# ----------------------------------------------------------------------------- a step

def begin_step(step: int, run: Run) -> float:
    """Sets the learning rates of this step, and what else a recipe changes from step to step.

    Returns the learning rate for the log: --max_lr times the schedule's factor.
    """
    scale = run.recipe.lr_scale(step, run.config)
    for group in run.state.optimizer.groups():
        group["lr"] = group["initial_lr"] * scale       # the rate that the group was made with
    run.recipe.set_others(step, run)                    # Muon's momentum; GPT-2 has nothing here
    return run.config.max_lr * scale


def train_step(step: int, run: Run) -> torch.Tensor:
    """One optimizer step. Returns float32 (3,): loss, norm before clipping, votes to stop."""
    process = run.process
    state = run.state
    state.model.train()
    ranks.seed_step(run.config.seed, step, process.rank)        # for dropout, if you add some

    # Gradient accumulation: each backward() adds to the gradients. The losses are divided by the
    # number of micro-steps, because the loss of the batch is their mean, not their sum.
    micro_steps = run.loader.micro_steps(step)          # more in later steps, if the batch grows
    loss_accum = torch.zeros((), device=process.device)

    # until_stopped raises Stopped if a signal asks a single process to stop. It also shows a bar.
    for micro_step in process.until_stopped(f"step {step}", range(micro_steps)):
        x, y = run.loader.next_batch()      # (B, T) each; y is x one token later
        if process.world_size > 1:
            # DDP averages the gradients of the ranks in the backward of the last micro-step only.
            # This is set before the forward, because DDP reads it there.
            state.ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
        with state.autocast:
            _, loss = state.ddp_model(x, y)
        loss = loss / micro_steps
        loss_accum += loss.detach()
        state.scaler.scale(loss).backward()

    # One message for the loss, and for how many ranks a signal asks to stop: then all do.
    loss, votes = mean_loss_and_votes(loss_accum, process)
    ranks.seed_step(run.config.seed, step)              # what you draw from here on, all ranks draw

    # Clip, after the loss scale is taken out again. --grad_clip inf only measures the norm.
    state.scaler.unscale_(state.optimizer)
    parameters = [p for p in state.model.parameters() if p.grad is not None]    # None: frozen
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if run.config.grad_clip < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, run.config.grad_clip, norm)

    # Update. In float16 the scaler leaves the step out if a gradient has overflowed.
    state.scaler.step(state.optimizer)
    state.scaler.update()

    # Gradients become None. But where several GPUs accumulate, they become 0 and stay in DDP's
    # buckets: new ones would take memory beside those.
    keeps_buckets = process.on_gpu and process.world_size > 1 and micro_steps > 1
    state.model.zero_grad(set_to_none=not keeps_buckets)
    return torch.stack((loss, norm, votes))     # one tensor, because a GPU's is read a step later


def mean_loss_and_votes(loss: torch.Tensor, process: Process) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the ranks' losses, and how many ranks have got a signal."""
    vote = torch.full_like(loss, float(process.signal != ""))
    sums = torch.stack((loss, vote))
    if process.world_size > 1:
        dist.all_reduce(sums)
    return sums[0] / process.world_size, sums[1]


# ----------------------------------------------------------------------------- evaluation

def validation_loss(data: Data, B: int, state: TrainState, process: Process) -> float:
    """Mean loss (nats) of the tokens of a validation, the same on any number of ranks.

    `B`: how many sequences a rank computes at once.
    """
    loss_sum = torch.zeros((), device=process.device)
    count = torch.zeros((), device=process.device)

    # A compiled model keeps gradients on here, and so runs in the graph of training: to compile a
    # second graph without them takes longer than it saves.
    is_compiled = state.compiled_model is not state.model
    batches = dataloader.ValBatches(data, B, process)
    for x, y in process.until_stopped("validation", batches):                   # (B, T) each
        with torch.set_grad_enabled(is_compiled), state.autocast:
            _, loss = state.compiled_model(x, y)
        targets = (y >= 0).sum()            # the rows that fill up the last batch have only -1
        loss_sum += loss.detach() * targets
        count += targets
        del loss            # and with it what a backward would need, before the next batch

    loss_sum, count = process.sum(loss_sum.item(), count.item())
    return loss_sum / max(1, count)


def hellaswag_score(run: Run) -> tuple[int, int]:
    """(examples whose right ending has the lowest mean loss per token, all examples)."""
    process = run.process
    own_batches = run.hellaswag_batches[process.rank::process.world_size]
    batches = process.until_stopped("HellaSwag", own_batches)
    counts = hellaswag.evaluate(run.state.model, batches, process.device, run.state.autocast)
    _by_sum, by_mean, n = process.sum(*counts)          # over the ranks
    return int(by_mean), int(n)


def print_samples(run: Run, num_samples=4, max_new_tokens=32) -> None:
    """Prints continuations of --sample_prompt, as the lecture does."""
    # The same seed each time, so that samples of different steps differ by the weights alone.
    device = run.process.device
    generator = torch.Generator(device).manual_seed(42)
    tokens = encode(run.config.sample_prompt).tolist()[-run.config.block_size:]
    if not tokens:
        tokens = [document_start(run.config.vocab_size)]
    idx = torch.tensor([tokens] * num_samples, device=device)                   # (num_samples, T)
    with run.state.autocast:
        idx = run.state.model.generate(idx, max_new_tokens, generator=generator)
    for i, row in enumerate(idx.tolist()):
        run.process.print0(f"sample {i}: {tokens_as_text(row, run.config.vocab_size)}")


def evaluate(step: int, run: Run) -> bool:
    """Validation loss, HellaSwag and samples, where they are due.

    Returns whether the validation loss is the lowest of the run so far.
    """
    config = run.config
    val_is_due = is_due(step, config, config.val_every)
    hellaswag_is_due = is_due(step, config, config.hellaswag_every) and run.hellaswag_batches
    samples_are_due = is_due(step, config, config.sample_every) and step > 0    # at 0 all is noise
    if not (val_is_due or hellaswag_is_due or samples_are_due):
        return False
    if 0 < run.schedule.tokens_before(step) <= run.data.train.backward_tokens:
        run.output.draw_losses()
        return False                    # frontier has only read backwards: all would say nothing

    run.state.model.eval()              # no dropout; train_step calls train()
    found = {}                          # {column of metrics.csv: value}
    if val_is_due:
        loss = validation_loss(run.data, run.loader.B, run.state, run.process)
        check_finite(step, run, "the validation loss", loss)
        found["val"] = loss
        # Losses over other tokens are not compared with this one.
        found["val_tokens"] = run.data.val_count * config.sequence_length
        text = console.loss_text(loss, run.data)                # and the bits per byte of the text
        run.log.line(step, f"validation loss: {text}")

    if hellaswag_is_due:
        correct, n = hellaswag_score(run)
        found["hella"] = correct / n
        run.log.line(step, f"HellaSwag accuracy: {correct}/{n}={correct / n:.4f}")

    if samples_are_due and run.process.is_master:
        print_samples(run)

    if found:
        run.output.add(step, **found)           # rank 0 writes
    run.output.draw_losses()
    if not val_is_due:
        return False
    return run.process.from_master(run.output.metrics.is_lowest(step))      # rank 0 has the losses


def is_due(step: int, config: Config, period: int) -> bool:
    """Every `period` steps, and at the end of the run; never if the period is 0."""
    return period > 0 and (step % period == 0 or step == config.max_steps)


# ----------------------------------------------------------------------------- checkpoints

def save(step: int, run: Run) -> None:
    """Writes OUT/checkpoint_STEP.pt; training on a GPU goes on meanwhile."""
    state = run.state
    # Ranks on another kind of CPU or GPU, which round differently, take the weights of rank 0.
    checkpoint.keep_together(state.model, state.optimizer, run.process)

    # All ranks take part: some of the optimizers' state is on one of them alone.
    training_state = checkpoint.gather_state(state, run.process)
    if run.process.is_master:
        run.output.save(step, {
            "model": checkpoint.host_copy(state.model.state_dict()),
            "model_config": asdict(state.model.config),
            "reference_losses": checkpoint.reference_losses(state.model),   # they tell its code
            "recipe": run.config.recipe,
            "config": run.asked,                    # a resume decides anew what "auto" is,
            "dtype": run.config.dtype,              # but for this on a CPU
            "step": step,
            "tokens": run.schedule.tokens_before(step),
            "data": run.data.record(),              # a resume refuses other shards
            **training_state,                       # of the optimizers, the scaler, the others
        })


# ----------------------------------------------------------------------------- the loop

def train(step: int, run: Run) -> tuple[int, bool]:
    """Trains from `step` on. Returns the steps done, and whether a signal ended the run.

    A signal (SIGTERM, Ctrl-C, ...) is noted in `process`. A single process drops the step or the
    evaluation that it is in: process.until_stopped raises Stopped there. Several ranks have to stop
    after the same step: each step adds up their votes, and they stop when they log it. Then the run
    saves and ends with exit code 0, and the one that resumes repeats what was dropped.
    """
    config = run.config
    last_saved = step
    # A GPU computes a step while the CPU launches the next one: its numbers are read one step late.
    launched = LaunchedSteps(run.process)
    try:
        while step < config.max_steps:
            is_lowest = evaluate(step, run)
            if is_lowest and step > last_saved and config.checkpoint_every > 0:
                save(step, run)             # the best weights so far, whatever the periods
                last_saved = step

            launched.begin()                # the step's time
            lr = begin_step(step, run)
            numbers = train_step(step, run)
            launched.end(step, lr, numbers)
            step += 1

            # Before an evaluation or a save this waits for the last loss, which has to be finite.
            votes = log_steps(launched, run, wait_for_all=something_is_due(step, config))
            if votes > 0:
                raise Stopped               # on all ranks: they have logged the same steps

            # Before the evaluation: a kill during the evaluation then loses nothing.
            if is_due(step, config, config.checkpoint_every):
                save(step, run)
                last_saved = step

        # The last evaluation, unless this is a finished run that was started again.
        if not run.process.from_master(run.output.metrics.was_evaluated(step)):
            evaluate(step, run)
            run.output.draw_losses(last=True)       # within a minute of the one before, too
        return step, False
    except Stopped:
        log_steps(launched, run, wait_for_all=True)
        if config.checkpoint_every > 0 and step > last_saved:
            save(step, run)
        return step, True


def log_steps(launched: LaunchedSteps, run: Run, wait_for_all: bool) -> float:
    """Checks and logs the steps that are done, on a GPU all but the newest. Returns their votes."""
    all_votes = 0.0
    for done in launched.take(wait_for_all):
        loss, norm, votes = done.read_numbers()
        all_votes += votes
        check_step(done.step, run, loss, norm)          # an error if one of them is not finite
        seconds = done.seconds()
        run.log.step(done.step, loss, norm, done.lr, seconds)
        rate = run.schedule.tokens(done.step) / seconds
        run.output.add(done.step, train=loss, norm=norm, lr=done.lr, tokens_per_second=rate)
    return all_votes


def something_is_due(step: int, config: Config) -> bool:
    """Whether an evaluation, a checkpoint or the end of the run is due after `step` steps."""
    periods = (config.val_every, config.hellaswag_every, config.sample_every,
               config.checkpoint_every)
    return step == config.max_steps or any(is_due(step, config, period) for period in periods)


# ----------------------------------------------------------------------------- the command

def main(argv: list[str] | None = None) -> None:
    given = FLAGS.parse(__doc__, argv)                  # {flag: value} of the command line
    process = start_process(given.get("device", "auto"))    # first: the ranks agree on the others
    # Two errors of torch's become one line: no memory, and another rank that is gone.
    with hardware.memory_errors(process.device), machines.lost_ranks(process):
        # The flags as asked, the values that the run uses, and the checkpoint that it starts from.
        asked, config, start = resolve(given, process)
        console.print_machine(config, process, start)
        recipe = complete(RECIPES[config.recipe])
        if config.eval_only:
            evaluate_only(config, recipe, start, process)
        else:
            start_run(asked, config, recipe, start, process)


def evaluate_only(config: Config, recipe: Recipe, start: Start, process: Process) -> None:
    """--eval_only: prints the validation loss of the model of --init, or of the run in --out."""
    data = dataloader.open_data(config, process)
    model = make_model(config, start.model, process.device)
    state = make_train_state(config, recipe, model, process)
    checkpoint.restore_others(start, state)
    model.eval()
    # --batch_size, without a trial. At most as many as there are: a last batch is filled up to B.
    share = math.ceil(data.val_count / process.world_size)
    B = min(micro_batch.most_sequences(config), share)
    loss = validation_loss(data, B, state, process)
    tokens = data.val_count * config.sequence_length
    process.print0(f"{start.source}: validation loss: "
                   f"{console.loss_text(loss, data)} on {tokens:,} tokens of {config.data}")


def start_run(asked: dict, config: Config, recipe: Recipe, start: Start, process: Process) -> None:
    """Makes the parts of a run, and trains; with --dry_run it ends before that."""
    # Inside `together`, as in open_data, a mistake on one rank ends all of them.
    with process.together():
        schedule = make_batch_schedule(recipe, config, process.world_size)
    data = dataloader.open_data(config, process)
    with process.together():
        model = make_model(config, start.model, process.device)

    # Two flags that only the text and the model can tell, if they are "auto".
    prompt = data.choose_prompt(config)
    compiles = hardware.choose_compile(config, model, schedule.tokens_left(start.step), process)
    config = replace(config, sample_prompt=prompt, compile=compiles)
    state = make_train_state(config, recipe, model, process)
    with process.together():
        checkpoint.restore(start, data, schedule, state)        # all but the weights, if it resumes
    # frontier reads a small text otherwise than a large one (docs/recipes.md).
    recipe.look_at_text(data.train, schedule, model, config)
    console.print_header(config, process, data, model, schedule, start)

    # The sequences of a micro-batch. With --compile, or "auto" on a GPU, one micro-step is tried.
    B = micro_batch.choose_micro_batch(config, schedule, state, process)
    console.print_batch(config, process, schedule, B)
    if config.dry_run:
        estimate(config, process, data, schedule, start.step, state, B)
        return
    hellaswag_batches = hellaswag.batches_of_run(config, process)

    # From here on something is written, and a signal asks the run to stop.
    output = Output(config, process, schedule, data.train.backward_tokens)
    with process.together():
        output.open(start)
    process.catch_signals()

    loader = TrainLoader(data.train, schedule, B, start.step, process)
    flops = model.flops_per_token(config.sequence_length)
    log = console.StepLog(process, schedule, flops, data.train.backward_tokens)
    run = Run(
        config=config, asked=asked, recipe=recipe, process=process, schedule=schedule, data=data,
        loader=loader, hellaswag_batches=hellaswag_batches, state=state, output=output, log=log)
    with output, closing(loader):                   # the files, and the thread that reads ahead
        step, stopped = train(start.step, run)
    console.print_summary(run, step, stopped)


def estimate(
    config: Config, process: Process, data: Data, schedule: BatchSchedule, step: int,
    state: TrainState, B: int,
) -> None:
    """--dry_run: what the run would take from `step` on, in time, memory and room on the disk."""
    T = config.sequence_length
    process.print0("timing a micro-step ...")
    seconds = micro_batch.time_micro_step(state, T, process.device, B, tries=2)
    console.print_needs(config, process, state)
    console.print_estimate(config, process, data, schedule, step, seconds / B)


if __name__ == "__main__":
    run_command(main)       # an error is one line and an exit code
