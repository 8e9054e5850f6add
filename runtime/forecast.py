"""What a run will do, before it does it: batches, epochs, memory, disk, time; its header, and --dry_run."""
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime.checkpoint import TrainState
from runtime.cli import UserError
from runtime.dataloader import Data, TokenLoader
from runtime.device import compiles, device_name, memory_of, peak_flops
from runtime.distributed import Process
from runtime.muon import Muon
from runtime.progress import counted, duration
from runtime.sharding import is_matrix, moment_bytes
from runtime.weights import Uninitialized

MFU = 0.4               # of a GPU's peak, for predictions: about what others' runs reach (docs/speed.md)
HELLASWAG_TOKENS = 10_042 * 4 * 96              # examples, endings, tokens with padding (about)
MOST_EPOCHS = 4         # repeated text is worth about as much as new text up to there (arXiv:2305.16264)


@dataclass
class Trial:
    """A micro-step that was tried, per sequence: seconds, and bytes kept for the backward."""
    seconds: float
    activations: float


def try_micro_step(model, B: int, T: int, autocast: torch.autocast, device: str) -> Trial:
    """Forward and backward of B sequences in eager mode. Changes neither weights nor gradients."""
    x, kept, seconds = torch.zeros(B, T, dtype=torch.int64, device=device), {}, math.inf

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def keep_input(block, args):                # with --recompute it stays, which no operator saves
        keep(args[0])

    blocks = model.transformer.h if model.recompute else ()
    hooks = [block.register_forward_pre_hook(keep_input) for block in blocks]
    for _ in range(2):                          # the first is slow
        kept.clear()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            _, loss = model(x, x)
        # not backward(): DDP's hooks would take it for a step
        torch.autograd.grad(loss, list(model.parameters()))[0].sum().item()         # waits for a GPU
        seconds = min(seconds, time.perf_counter() - start)
        if seconds > 10:
            break
    for hook in hooks:
        hook.remove()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return Trial(seconds / B, sum(size for place, size in kept.items() if place not in weights) / B)


def size_text(n: float) -> str:
    """'1.5 GB', '20 MB'."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.0f} MB"


@dataclass
class ModelSize:
    """Of a model with its optimizers, before either is made."""
    parameters: int
    moments: int                # bytes, of all ranks together
    flops_per_token: int
    held: int                   # bytes of moments of the rank that has the most, at least: an even share
    sharded: int                # the same with --shard_optimizer

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and moments on one rank."""
        return 8 * self.parameters + self.held

    @property
    def checkpoint(self) -> int:
        return 4 * self.parameters + self.moments


def count_model(config, fresh_model: Callable, make_optimizers: Callable, ranks: int = 1) -> ModelSize:
    """The size of config.recipe's model. Counted for one and two layers without weights, because the flags
    may ask for any number."""
    def by_muon(optimizer, _p):
        return isinstance(optimizer, Muon)

    def by_flag(optimizer, p):
        return by_muon(optimizer, p) or is_matrix(optimizer, p)

    def count(n_layer):
        shape = replace(config, n_layer=n_layer)
        with torch.device("meta"), Uninitialized():
            model = fresh_model(shape)
        optimizers = make_optimizers(model, shape)
        shared = [moment_bytes(optimizers, held) for held in (by_muon, by_flag)]
        sums = (sum(p.numel() for p in model.parameters()), model.flops_per_token(config.sequence_length),
                sum(moment_bytes(optimizers)), *map(sum, shared))
        return sums, [max(sizes, default=0) for sizes in shared]
    try:
        (one, largest), (two, _) = count(1), count(2)
    except (RuntimeError, OverflowError):               # torch: "Storage size calculation overflowed"
        raise UserError(f"a model of width {config.n_embd} with --block_size {config.block_size} has more "
                        "parameters than can be counted: give a smaller --n_embd or --block_size") from None
    parameters, flops, moments, *shared = (a + (config.n_layer - 1) * (b - a)
                                           for a, b in zip(one, two, strict=True))
    always, sharded = (moments - total + max(-(-total // ranks), most)
                       for total, most in zip(shared, largest, strict=True))
    return ModelSize(parameters, moments, flops, sharded if config.shard_optimizer else always, sharded)


@dataclass
class Forecast:
    """What a run will do. `loader` is None before the micro-batch is known, `trial` before a micro-step is
    tried."""
    config: object
    size: ModelSize
    data: Data
    process: Process
    compiled: bool
    step: int = 0               # that the run begins at
    loader: TokenLoader | None = None
    trial: Trial | None = None

    def machine(self) -> str:
        config, process = self.config, self.process
        return (f"{counted(process.world_size, 'process')} on {process.device} "
                f"({device_name(process.device)}), {config.dtype}, "
                f"{'torch.compile' if self.compiled else 'eager'}, attention {config.attention}, "
                f"torch {torch.__version__}")

    def model(self) -> str:
        config = self.config
        return (f"{config.recipe}: {self.size.parameters:,} parameters ({counted(config.n_layer, 'layer')}, "
                f"{counted(config.n_head, 'head')}, width {config.n_embd}, vocabulary {config.vocab_size}"
                f"{f', window {config.window} inside documents' if config.window else ''})")

    def batch(self) -> str:
        config, loader = self.config, self.loader
        first = config.updates_per_step
        updates = f"{first} updates a step at first; " if first > 1 else ""
        largest = loader.largest(first)
        joined = f", joined to {largest} x {config.sequence_length} later" if largest > loader.B else ""
        return (f"{config.total_batch_size:,} tokens a step = {loader.B} x {config.sequence_length} x "
                f"{counted(loader.micro_batches, 'micro-step')} x "
                f"{counted(self.process.world_size, 'process')}{joined}; {updates}{config.max_steps:,} steps "
                f"= {config.max_steps * config.total_batch_size:,} tokens = {self.epochs():,.2f} epochs")

    def epochs(self) -> float:
        config, train = self.config, self.data.train
        return config.max_steps * config.total_batch_size / (train.total * train.T)

    def memory(self) -> str:
        parts = [("weights", 4 * self.size.parameters), ("gradients", 4 * self.size.parameters),
                 ("moments" if self.size.held == self.size.moments else "moments (a rank's share)",
                  self.size.held)]
        if self.trial:
            parts.append(("activations of a micro-batch (eager mode)",
                          self.trial.activations * self.loader.largest(self.config.updates_per_step)))
        text = (f"at least {size_text(sum(n for _, n in parts))}: "
                f"{', '.join(f'{size_text(n)} {what}' for what, n in parts)}")
        if self.loader:
            return text
        free, total = memory_of(self.process.device)
        return (f"{text}, and activations; {self.process.device} has {size_text(total)}, of which "
                f"{size_text(free)} are free now")

    def disk(self) -> str:
        config = self.config
        if not (config.checkpoint_every or config.checkpoint_minutes):
            return "no checkpoints"
        # the newest, the best, and the one being written
        count = f"up to {config.keep_checkpoints + 2}" if config.keep_checkpoints else "all"
        return f"{size_text(self.size.checkpoint)} a checkpoint, {count} in {config.out}"

    def time(self) -> str:
        seconds, source = self.step_time()
        if seconds is None:
            return source
        return (f"about {duration(seconds)} a step, {duration(self.seconds_left())} in all with its "
                f"evaluations ({source})")

    def step_time(self) -> tuple[float | None, str]:
        """(seconds a step, where they are from); None where they are unknown."""
        config, process = self.config, self.process
        peak = peak_flops(process.device)
        if peak and config.dtype == "float32":
            peak = peak / 2 if config.tf32 else None            # TF32 has half the peak of 16 bits
        if peak:
            flops = self.size.flops_per_token * config.total_batch_size
            return (flops / (peak * MFU * process.world_size),
                    f"predicted, at {MFU:.0%} of the data sheet's {peak / 1e12:,.0f} TFLOP/s")
        if not self.trial:
            return None, "unknown for this GPU"
        return (self.trial.seconds * self.loader.rows_per_step / process.world_size,
                "from one micro-step in eager mode, timed here")

    def seconds_left(self) -> float:
        """To the end of the run, 0 if unknown. A forward takes a third of a micro-step's time."""
        config = self.config
        evaluations = ((config.val_every, self.data.val_count * config.sequence_length),
                       (config.hellaswag_every, HELLASWAG_TOKENS))
        forwards = sum((1 + self.times(every)) * tokens for every, tokens in evaluations if every)
        steps = config.max_steps + forwards / 3 / config.total_batch_size
        return (self.step_time()[0] or 0) * steps * (1 - self.step / config.max_steps)

    def times(self, every: int) -> int:
        """How often in the whole run something happens every so many steps and at the last."""
        return math.ceil(self.config.max_steps / every)

    def periods(self) -> Iterator[str]:
        """When something is evaluated or saved, one line each."""
        config = self.config
        for what, every, at_0 in (
                ("validation", config.val_every, 1), ("HellaSwag", config.hellaswag_every, 1),
                ("samples", config.sample_every, 0), ("checkpoint", config.checkpoint_every, 0)):
            when = "never"
            if every:
                when = (f"{'at step 0, ' if at_0 else ''}every {every:,} steps and at the last, "
                        f"{self.times(every) + at_0:,} times")
            if every and what == "validation":
                when += f", {self.data.val_count:,} sequences of {config.sequence_length} tokens"
            yield f"{what}: {when}"
        if config.checkpoint_minutes:
            yield f"checkpoint: {config.checkpoint_minutes:g} minutes after the last, and at the last step"

    def warnings(self) -> Iterator[tuple[str, str]]:
        """("note" or "warning", text) of what the user may not want."""
        config = self.config
        if config.warmup_steps > config.max_steps:
            yield "note", f"the warm-up of {config.warmup_steps} steps is longer than the run"
        if config.overfit:
            return
        if (epochs := self.epochs()) > MOST_EPOCHS:
            enough = max(1, int(MOST_EPOCHS * config.max_steps / epochs))
            yield "warning", (f"{epochs:,.0f} epochs over the data, and after about {MOST_EPOCHS} a model "
                              f"memorises it: give --max_steps {enough}, a smaller --preset, or more text")
        if (left := self.seconds_left()) > 7 * 86400:
            yield "warning", (f"this takes about {duration(left)} here: give a smaller --preset (see --help) "
                              "or fewer --max_steps")
        free, out = math.inf, Path(config.out).absolute()
        with suppress(OSError):                 # a folder that may not be read is refused later
            free = shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free
        if (config.checkpoint_every or config.checkpoint_minutes) and free < 2 * self.size.checkpoint:
            yield "warning", (f"{size_text(free)} are free for {config.out}, and a checkpoint has "
                              f"{size_text(self.size.checkpoint)}: make room, or give another --out")


def print_plan(config, size: ModelSize, data: Data, process: Process) -> None:
    """Of --dry_run, what is known before anything is allocated."""
    plan = Forecast(config, size, data, process, compiles(config, process.device))
    source = "input.txt" if config.overfit else config.data
    print_rows(process, ("machine", plan.machine()), ("model", plan.model()),
               ("data", f"{source}: {sum(data.train.lengths):,} tokens for training"),
               ("memory", plan.memory()), ("disk", plan.disk()),
               *(("steps", text) for text in plan.periods()))


def print_forecast(config, size: ModelSize, data: Data, state: TrainState, compiled: Callable,
                   loader: TokenLoader, autocast: torch.autocast, process: Process) -> None:
    """The header of a run, or the rest of --dry_run's plan. A micro-batch is tried first, on CUDA only for
    --dry_run, and of one sequence; elsewhere the largest."""
    trial, cuda = None, process.device.startswith("cuda")
    if not (cuda or config.overfit) or config.dry_run:
        with process.progress("timing a micro-step"):
            rows = 1 if cuda else loader.largest(config.updates_per_step)
            trial = try_micro_step(state.model, rows, config.sequence_length, autocast, process.device)
    plan = Forecast(config, size, data, process, compiled is not state.model, state.step, loader, trial)
    if config.dry_run:
        print_rows(process, ("batch", plan.batch()), ("memory", plan.memory()), ("time", plan.time()),
                   *plan.warnings())
    else:
        costs = [] if config.overfit else [f"memory: {plan.memory()}", plan.disk(), plan.time()]
        for line in (plan.machine(), plan.model(), plan.batch(), *costs, *map(": ".join, plan.warnings())):
            process.print0(line)
    if process.console:
        process.console.update(machine=plan.machine(), data=data.identity())
    if state.source:
        process.print0(f"resuming from {state.source} at step {state.step} of {config.max_steps}")
    if config.dry_run:
        process.print0("nothing was written; the same command without --dry_run starts the run")


def print_rows(process: Process, *rows: tuple[str, str]) -> None:
    for name, text in rows:
        process.print0(f"{name + ':':<9}{text}")
