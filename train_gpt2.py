"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                              sanity run: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run         what a run would do, and how long it takes
    python train_gpt2.py                                        FineWeb-Edu (made by `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py      the same on 8 GPUs

Run the same command again to resume from the newest checkpoint in --out.
"""
# first, because it refuses an old Python in one line
from runtime.cli import RunError, flag, run_command, said_once

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from inspect import signature

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import frontier
import hellaswag
import speedrun
from model import ATTENTION
from recipes import MODELS, fresh_model, load_model
from runtime import checkpoint as checkpoints
from runtime import plots
from runtime.console import (Record, in_bits, log_evaluation, log_steps, print_header, print_summary,
                             what_resumes)
from runtime.dataloader import (Data, divide_update, micro_batches, open_data, read_ahead, to_device,
                                updates_of_step)
from runtime.device import (choose_batch_size, choose_device, choose_dtype, fetch, oom_as_user_error,
                            tune_malloc)
from runtime.files import run_goes_on_later
from runtime.language_model import LanguageModel
from runtime.muon import SteppedTogether, broadcast_updates, shard_matrices
from runtime.presets import PRESETS, check_complete, read_flags
from runtime.ranks import Process, leave_group, read_launch, shared_store
from runtime.tokenizer import EOT, encode, tokenizer

START, DATA, MODEL, BATCH, OPTIM, SPEED, OUTPUT = "start data model batch optimisation speed output".split()
MODERN = "speedrun", "frontier"             # recipes with a window and a cooldown


@dataclass
class Config:
    """The flags. On resume fixed ones cannot change, and per_run ones are not taken from the checkpoint."""
    preset: str = flag("gpt2", START, "named defaults, see below", choices=list(PRESETS), per_run=True)
    dry_run: bool = flag(False, START, "print what would run and how long; writes nothing", per_run=True)
    data: str = flag("edu_fineweb10B", DATA, "folder of token shards")
    overfit: bool = flag(False, DATA, "sanity run: overfit one batch of 4 x 32 tokens; writes nothing")
    shuffle: bool = flag(True, DATA, "permute shards and sequences, by the seed and the epoch", fixed=True)
    val_tokens: int = flag(10_485_760, DATA, "tokens per validation, the first of the val shards", above=0)
    hellaswag_data: str = flag("", DATA, "HellaSwag examples as .jsonl (default: from the Hugging Face hub)")
    recipe: str = flag("gpt2", MODEL, "model, optimizers and schedule", choices=list(MODELS), fixed=True)
    init: str = flag("scratch", MODEL, "scratch, gpt2, OWNER/NAME, a checkpoint, run or folder", fixed=True)
    n_layer: int = flag(12, MODEL, "blocks", above=0, fixed=True)
    n_head: int = flag(12, MODEL, "attention heads", above=0, fixed=True)
    n_embd: int = flag(768, MODEL, "width", above=0, fixed=True)
    block_size: int = flag(1024, MODEL, "longest sequence, tokens", above=0, fixed=True)
    vocab_size: int = flag(50304, MODEL, "50304 is 50257, padded", above=0, most=65536, fixed=True)
    window: int = flag("auto", MODEL, "sliding window at the end of the run, tokens; auto: full attention",
                       word="auto", above=0, fixed=True, recipes=MODERN)
    total_batch_size: int = flag(524288, BATCH, "tokens per step, all ranks", above=0, fixed=True)
    batch_size: int = flag("auto", BATCH, "most sequences a micro-step", word="auto", above=0, per_run=True)
    sequence_length: int = flag("auto", BATCH, "tokens; auto: block_size", word="auto", above=0, fixed=True)
    updates_per_step: int = flag("auto", BATCH, "optimizer updates a step, halved at 1/3 and 2/3 of the run; "
                                 "auto: 1, frontier: by the run's tokens", word="auto", above=0)
    max_steps: int = flag(19073, OPTIM, "optimizer steps; 19073 are one epoch of 10B tokens", above=0)
    warmup_steps: int = flag(715, OPTIM, "steps of linear warmup; 715 are GPT-3's 375 million tokens")
    max_lr: float = flag(6e-4, OPTIM, "learning rate after the warmup", above=0)
    min_lr: float = flag("auto", OPTIM, "at the end; auto: max_lr / 10, frontier: by updates", word="auto")
    cooldown: float = flag("auto", OPTIM, "last fraction of the steps, in which lr decays; auto: "
                           "0.2856, frontier: by updates", word="auto", above=0, most=1, recipes=MODERN)
    weight_decay: float = flag(0.1, OPTIM, "of AdamW (matrices, embeddings) and Muon")
    grad_clip: float = flag(1.0, OPTIM, "largest gradient norm; inf: no clipping", above=0, most=math.inf)
    seed: int = flag(1337, OPTIM, "random seed of initial weights and data order", most=2**63 - 1, fixed=True)
    device: str = flag("auto", SPEED, "auto, cuda, mps or cpu", per_run=True)
    dtype: str = flag("auto", SPEED, "of matrix products (autocast); auto: bfloat16 where supported",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "use TF32 in float32 matrix products on CUDA")
    compile: bool = flag(None, SPEED, "torch.compile (default: on CUDA)", per_run=True)
    attention: str = flag("auto", SPEED, "kernel; auto: SDPA or the formula", choices=list(ATTENTION))
    recompute: bool = flag(False, SPEED, "recompute blocks in the backward, to save memory", per_run=True)
    shard_optimizer: bool = flag(False, SPEED, "each rank has a share of the moments (ZeRO 1)", per_run=True)
    val_every: int = flag(250, OUTPUT, "steps between validations; 0: never")
    hellaswag_every: int = flag(250, OUTPUT, "steps between HellaSwag evaluations; 0: never")
    sample_every: int = flag(250, OUTPUT, "steps between samples of text; 0: never")
    sample_prompt: str = flag("Hello, I'm a language model,", OUTPUT, "text that samples continue")
    checkpoint_every: int = flag(250, OUTPUT, "steps between checkpoints; 0: never")
    keep_checkpoints: int = flag(3, OUTPUT, "newest kept, beside the best one, or all", word="all", above=0)
    out: str = flag("log", OUTPUT, "folder for log.txt and checkpoints", per_run=True)
    resume: str = flag("auto", OUTPUT, "auto (newest in --out), never, or a checkpoint or run", per_run=True)
    wandb: bool = flag(False, OUTPUT, "also log to Weights & Biases (pip install wandb)", per_run=True)


def warmup_cosine(step: int, config: Config) -> float:
    """Fraction of max_lr at `step`: linear warmup, then cosine to min_lr at max_steps (arXiv:1608.03983). As
    every schedule a function of the step and the config alone, so that a resume continues it exactly."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.min_lr / config.max_lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - floor)


@dataclass
class Recipe:
    """How a model is trained; its class is in recipes.MODELS. The loop asks for nothing else."""
    optimizers: Callable        # model, config -> list of optimizers; each group's `lr` is its largest
    lr: Callable                # step, config -> fraction of the largest
    momentum: Callable = None   # step, config -> Muon's
    defaults: dict = field(default_factory=dict)        # of flags, where they differ from Config's
    automatic: Callable = speedrun.automatic    # config, ranks -> what `auto` means in a schedule's flags


MODERN_DEFAULTS = dict(n_head=6, warmup_steps=0, max_lr=0.02, weight_decay=0.0, grad_clip=math.inf)
RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B)
    "gpt2": Recipe(lambda model, c: model.configure_optimizers(c.max_lr, c.weight_decay), warmup_cosine),
    # modded-nanogpt's record 10: 3.28 on FineWeb's validation set in 7.8 minutes on 8 H100s
    "speedrun": Recipe(speedrun.optimizers, speedrun.trapezoid, speedrun.muon_momentum,
                       MODERN_DEFAULTS | dict(max_steps=3242, min_lr=0.0)),
    # modded-nanogpt's records up to 2026, where they help at small sizes, and more (docs/recipes.md)
    "frontier": Recipe(frontier.optimizers, speedrun.trapezoid, frontier.muon_momentum,
                       MODERN_DEFAULTS | dict(max_steps=2500), frontier.automatic),
}


def parse_flags(argv: list[str] | None = None) -> tuple[Config, set[str]]:
    """(Config, names of the fields given as flags). UserError for values that no run can have."""
    return read_flags(Config, {name: recipe.defaults for name, recipe in RECIPES.items()}, __doc__, argv)


# ----------------------------------------------------------------------------- set-up

@dataclass
class Run:
    """What the loop works with."""
    asked: Config                       # the flags: what a checkpoint records
    config: Config                      # the same with all that was `auto` decided
    process: Process
    data: Data
    model: LanguageModel                # samples and HellaSwag use it as it is, because their shapes change
    compiled: Callable                  # for validation: the same weights, compiled
    wrapped: Callable                   # for training: that inside DDP, if there are several ranks
    optimizers: list
    all_optimizers: object              # as one, for the scaler
    owner: dict                         # {parameter: the rank that updates it}, with --shard_optimizer
    scaler: torch.amp.GradScaler
    autocast: torch.autocast
    step: int = 0                       # steps done
    batch_size: int = 1                 # most sequences a micro-step
    hella: list = ()                    # batches of HellaSwag
    batches: Iterator = iter(())        # micro-batches, rows of tokens (B, T + 1)
    record: Record | None = None        # rank 0's metrics.csv and log.txt
    saver: checkpoints.Saver | None = None    # rank 0's
    lock: object = None                 # rank 0's, on --out, where the file system has locks
    logged: tuple = ()                  # evaluations of the first step that a resumed run's record has
    pending: deque = field(default_factory=deque)       # steps whose numbers a GPU still computes
    losses: list = field(default_factory=list)          # of each step
    seconds: list = field(default_factory=list)         # of each step
    clock: float = 0.0                  # time at which the step before was logged
    overflows: int = 0                  # consecutive steps that float16 has skipped


def set_up_process(config: Config) -> Process:
    """This rank's device, TF32, and torchrun's process group if there is one: nccl on CUDA, else gloo."""
    launch = read_launch()
    device = choose_device(config.device, launch.local_rank)                    # "cuda:3", "mps", "cpu"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")        # high: TF32
    elif device == "cpu":
        tune_malloc()
    process = Process(launch.rank, launch.world_size, device, by_torchrun=launch.by_torchrun)
    if process.world_size > 1:
        timeout = timedelta(minutes=10)
        store = shared_store(launch, timeout)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", store=store,
                                rank=process.rank, world_size=process.world_size, timeout=timeout)
        process.at_end.callback(leave_group)
    return process


def complete(asked: Config, model: LanguageModel | None, process: Process) -> Config:
    """`asked` with all that is `auto` decided: by the model that was loaded, the device, the recipe."""
    config = replace(asked, **checkpoints.model_shape(model))

    def auto(name, decided):
        return decided if getattr(config, name) == "auto" else getattr(config, name)
    config = replace(
        config, window=auto("window", getattr(model and model.config, "window", 0)),
        sequence_length=auto("sequence_length", config.block_size),
        dtype=choose_dtype(config.dtype, process.device),
        compile=process.device.startswith("cuda") if config.compile is None else config.compile)
    return replace(config, **RECIPES[config.recipe].automatic(config, process.world_size))


def compile_model(model: LanguageModel) -> Callable:
    """torch.compile of the model, which itself stays eager."""
    warnings.filterwarnings("ignore", ".* does not support bfloat16 compilation natively")
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)      # a T4's SMs: nothing is autotuned
    # values of more operations than this (default 30) are stored, not computed again where they are used: of
    # frontier's shifted keys: 1.5 of the 29 GB that a micro-step of 16 x 1024 tokens moved
    return torch.compile(model, dynamic=False, options={"realize_opcount_threshold": 64})


def wrap_model(model: Callable, device: str) -> DDP:
    """`model` inside DDP, which averages the ranks' gradients. The compiler splits its graph where a bucket
    ends: 170 MB a bucket are three graphs of 124M; torch's 25 MB are 14, which move 159 GB for 64 x 1024
    tokens instead of 149. Buffers (window, parts) are the same on all ranks, and not sent."""
    new, old = "forward_sync_buffers", "broadcast_buffers"              # new: from torch 2.13 on
    return DDP(model, device_ids=[device] if device.startswith("cuda") else None, bucket_cap_mb=170,
               gradient_as_bucket_view=True, **{new if new in signature(DDP).parameters else old: False})


def set_up(flags: Config, explicit_flags: set[str], process: Process) -> Run | None:
    """From flags to a Run; None after --dry_run. Nothing is written before everything has been checked."""
    # of a run that resumes: its flags, model, checkpoint; of a new one the model of --init, None for scratch
    asked, model, checkpoint, path = checkpoints.begin_or_resume(flags, explicit_flags, process, MODELS,
                                                                 load_model)
    config = complete(asked, model, process)
    check_complete(config, process)
    data = process.on_all_ranks(open_data, config)
    process.require_same({f"{split} shard {i} of --data": str(shard[1:])        # their names may differ
                          for split, shards in data.fingerprints().items() for i, shard in enumerate(shards)})

    device, device_type = process.device, process.device.split(":")[0]
    torch.manual_seed(config.seed)
    model = (model or fresh_model(config)).to(device)
    model.kernel, model.recompute = config.attention, config.recompute
    # a CPU's cache has no room for all logits; a compiler fuses them with the loss
    model.loss_chunk = 2048 if device == "cpu" and not config.compile else 0
    optimizers = RECIPES[config.recipe].optimizers(model, config)
    optimised = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, optimised)) == sorted(map(id, model.parameters())), "each parameter exactly once"
    sharded = config.shard_optimizer and process.world_size > 1
    owner = shard_matrices(optimizers, process.rank, process.world_size) if sharded else {}
    scaler = torch.amp.GradScaler(device_type, enabled=config.dtype == "float16")
    autocast = torch.autocast(device_type, getattr(torch, config.dtype), enabled=config.dtype != "float32")
    compiled = compile_model(model) if config.compile else model
    wrapped = wrap_model(compiled, device) if process.world_size > 1 else compiled

    run = Run(asked, config, process, data, model, compiled, wrapped, optimizers,
              SteppedTogether(optimizers, model.parameters()), owner, scaler, autocast)
    if checkpoint:
        checkpoints.restore(run, checkpoint, path)                # moments, scaler, step
    run.batch_size = choose_batch_size(run)
    print_header(run, path, schedule_change(run, checkpoint) if checkpoint else "")
    if config.dry_run:
        return None
    run.hella = hellaswag.hellaswag_batches(config, explicit_flags, process)
    if not config.overfit:
        process.on_all_ranks(checkpoints.open_output, run, path)
        run.logged = process.gather(run.logged)[0]
    run.batches = read_ahead(micro_batches(data.train, config, run.batch_size, run.step, process.rank,
                                           process.world_size), pin=device_type == "cuda")
    process.catch_signals()             # from here on SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask to stop
    return run


def schedule_change(run: Run, checkpoint: dict) -> str:
    """For the header of a resumed run: what another --max_steps does to the learning rate, which depends on
    the step's fraction of the run. '' where it is the same."""
    before, step = checkpoint["config"]["max_steps"], run.step
    if before == run.config.max_steps or step == 0:
        return ""
    earlier = complete(replace(run.asked, max_steps=before), run.model, run.process)
    lr = RECIPES[run.config.recipe].lr
    last, following = lr(step - 1, earlier) * earlier.max_lr, lr(step, run.config) * run.config.max_lr
    return (f"; --max_steps was {before}, and another length moves the schedule: lr {last:.2e} in step "
            f"{step - 1}, {following:.2e} in step {step}")


# ----------------------------------------------------------------------------- a step

def set_schedule(run: Run) -> float:
    """Sets every group's learning rate, Muon's momentum and the window of this step. Returns the rate."""
    config, recipe = run.config, RECIPES[run.config.recipe]
    fraction = recipe.lr(run.step, config)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("max_lr", group["lr"]) * fraction
            if recipe.momentum and "momentum" in group:         # Muon's
                group["momentum"] = recipe.momentum(run.step, config)
    if config.window:
        run.model.window.fill_(speedrun.window_schedule(run.step, config))
    return fraction * config.max_lr


def train_step(run: Run) -> torch.Tensor | None:
    """One step: in each of its updates gradients are summed over micro-batches and averaged over the ranks.
    Waits for no GPU, but float16's scaler once an update. Returns float32 (3,), the same on all ranks: mean
    loss, largest norm before clipping, ranks asked to stop. None if a single process was asked to before the
    step's first update: the step is then dropped."""
    config, process, results = run.config, run.process, []
    updates = updates_of_step(run.step, config)
    _, micro_steps = divide_update(config, updates, process.world_size, run.batch_size)
    for update in range(updates):
        loss_sum = torch.zeros((), device=process.device)
        for micro_step in process.progress(f"step {run.step}", range(micro_steps)):
            if process.stop and update == 0:            # later, the weights have changed
                return None
            x, y = to_device(next(run.batches), process.device)                 # (B, T) each
            if process.world_size > 1:      # DDP sends the gradients with an update's last micro-step alone
                run.wrapped.require_backward_grad_sync = micro_step == micro_steps - 1    # before its forward
            with run.autocast:
                _, loss = run.wrapped(x, y)
            loss = loss / micro_steps
            loss_sum += loss.detach()
            run.scaler.scale(loss).backward()
        results.append(update_weights(run, loss_sum))
        # DDP's gradients are views of its buckets: the first of several micro-steps, which accumulate without
        # DDP, would allocate freed ones again beside them
        run.model.zero_grad(set_to_none=process.world_size == 1 or micro_steps == 1)
    losses, norms, stops = torch.stack(results).unbind(1)
    return torch.stack((losses.mean(), norms.max(), stops.max()))


def update_weights(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """One optimizer update. `loss`: this rank's. Returns what train_step does."""
    config, process, scaler = run.config, run.process, run.scaler
    sums = torch.stack((loss, torch.full_like(loss, bool(process.received))))
    if process.world_size > 1:
        dist.all_reduce(sums)
    scaler.unscale_(run.all_optimizers)
    parameters = list(run.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if config.grad_clip < math.inf:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    scaler.step(run.all_optimizers)     # with float16 no optimizer steps if a gradient has overflowed
    scaler.update()
    if run.owner:                       # --shard_optimizer: each rank has updated its own parameters
        broadcast_updates(run.owner)
    return torch.stack((sums[0] / process.world_size, norm, sums[1]))


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks. All batches
    have one shape, the last padded with ignored targets: a model compiles once."""
    count, B, process = run.data.val_count, run.batch_size, run.process
    loss_sum, rows_seen = torch.zeros((), device=process.device), 0
    for first in process.until_stop("validation", range(process.rank * B, count, process.world_size * B)):
        rows = min(B, count - first)
        x, y = to_device(run.data.val.read(first, B), process.device)           # (B, T) each
        y[rows:] = -1
        with run.autocast:
            loss_sum += run.compiled(x, y)[1] * rows
        rows_seen += rows
    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / max(1, rows_seen)


def print_samples(run: Run, num_samples: int = 4, max_new_tokens: int = 32) -> None:
    generator = torch.Generator(run.process.device).manual_seed(42)     # training's own does not advance
    prompt = encode(run.config.sample_prompt).tolist()[-run.config.block_size:] or [EOT]
    idx = torch.tensor([prompt] * num_samples, device=run.process.device)       # (num_samples, T)
    with run.autocast:
        idx = run.model.generate(idx, max_new_tokens, generator=generator)
    for i, row in enumerate(idx.tolist()):
        run.process.print0(f"sample {i}: {tokenizer().decode(row).removeprefix('<|endoftext|>')}")


def evaluate(run: Run, due: Callable[[int], bool]) -> None:
    """Validation loss, HellaSwag and samples where due, except those that a resumed run's record has. After a
    signal nothing is recorded: the run that resumes evaluates."""
    config, process, step, logged = run.config, run.process, run.step, run.logged
    if due(config.val_every) and "val" not in logged:
        loss = validation_loss(run)
        if process.stop:
            return
        if not math.isfinite(loss):
            with said_once(process.is_master):
                raise RunError(f"step {step}: validation loss {loss}. {what_resumes(run)}")
        log_evaluation(run, "val", loss, f"validation loss: {loss:.4f}{in_bits(loss, run.data)}")
    if run.hella and due(config.hellaswag_every) and "hella" not in logged:
        counts = hellaswag.evaluate(run.model, run.hella, process.device, run.autocast, process.rank,
                                    process.world_size, lambda items: process.until_stop("HellaSwag", items))
        _, correct, n = map(int, process.sum(*counts.tolist()))         # by acc, by acc_norm, examples
        if process.stop:
            return
        log_evaluation(run, "hella", correct / n, f"HellaSwag accuracy: {correct}/{n}={correct / n:.4f}")
    if due(config.sample_every) and step > 0 and process.is_master and not logged:
        print_samples(run)
    run.logged = ()
    if run.record and (due(config.val_every) or due(config.hellaswag_every)):
        plots.draw(run.record, f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}",
                   last=step == config.max_steps)


# ----------------------------------------------------------------------------- the loop

def save(run: Run) -> None:
    """OUT/checkpoint_STEP.pt: weights, the optimizers' moments, step, the flags as they were given."""
    model, process = run.model, run.process
    process.require_same({"the weights' sum of bits": checkpoints.weights_digest(model)},
                         "the ranks have drifted apart; resume from the checkpoint before", RunError)
    optimizers = checkpoints.gather_state(run)                      # each rank has some of the moments
    if process.is_master:
        run.saver.write({
            "model": checkpoints.host_copy(model.state_dict()), "model_config": asdict(model.config),
            "recipe": run.config.recipe, "config": asdict(run.asked), "step": run.step,
            "optimizers": optimizers, "scaler": run.scaler.state_dict(),
            "data": run.data.fingerprints(), "job": read_launch().job}, run.record)


def loop(run: Run) -> None:
    """Save, evaluate, train, log, until max_steps or a signal."""
    config, process, last_saved = run.config, run.process, run.step
    periods = config.val_every, config.hellaswag_every, config.sample_every, config.checkpoint_every

    def due(every):
        return every and (run.step % every == 0 or run.step == config.max_steps)

    while True:
        stop = process.stop                         # read once: a signal may come at any moment
        if stop or run.step == config.max_steps or any(map(due, periods)):
            log_steps(run)                          # also ends the run if a loss or gradient is not finite
        # save: first, so that a kill during the evaluation loses nothing
        if config.checkpoint_every and run.step > last_saved and (stop or due(config.checkpoint_every)):
            save(run)
            last_saved = run.step
        if stop:
            break
        # evaluate, with this step's window
        lr = set_schedule(run)
        evaluate(run, due)
        if process.stop:
            continue                                # a signal came meanwhile: save, then leave
        if run.step == config.max_steps:
            break
        # train
        if not run.pending:
            run.clock = time.perf_counter()
        numbers = train_step(run)
        if numbers is None:
            continue                                # a signal came meanwhile, and the step is dropped
        run.step += 1
        # log: this step, on a GPU the one before, so that the GPU never waits for the CPU
        run.pending.append((run.step - 1, fetch(numbers), lr))
        log_steps(run, keep=1 if process.device.startswith("cuda") else 0)


def main(argv: list[str] | None = None) -> int:
    """The command; in a notebook `main(["--preset", "shakespeare"])`, which leaves the process as it was."""
    with said_once(read_launch().reports_mistakes):
        flags, explicit_flags = parse_flags(argv)
    process = set_up_process(flags)
    with process.at_end, oom_as_user_error(
            lambda: f"{process.device} is out of memory: give a smaller --batch_size, --recompute, "
                    "--shard_optimizer (several GPUs), or a smaller model"):
        with said_once(process.is_master):
            run = set_up(flags, explicit_flags, process)
        if not run:                                 # --dry_run
            return int(process.silent)
        with checkpoints.outputs(run), run_goes_on_later(run.config.out):
            loop(run)
        return print_summary(run)


if __name__ == "__main__":
    run_command(main)
