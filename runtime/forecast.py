"""What a run will do, before it does it: batches, epochs, memory, disk, time; its header, and --dry_run."""
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime.batch_size import moment_bytes
from runtime.checkpoint import TrainState
from runtime.cli import UserError
from runtime.dataloader import Data, TokenLoader
from runtime.device import compiles, memory_of, peak_flops
from runtime.distributed import Process
from runtime.progress import counted, duration
from runtime.weights import Uninitialized

MFU = 0.4               # of a GPU's peak, for predictions: about what others' runs reach (docs/speed.md)
HELLASWAG_TOKENS = 10_042 * 4 * 96              # examples, endings, tokens with padding (about)
MOST_EPOCHS = 4         # repeated text is worth about as much as new text up to there (arXiv:2305.16264)


@dataclass
class Trial:
    """A micro-step that was tried: rows, seconds, and bytes that its forward keeps for the backward."""
    rows: int
    seconds: float
    activations: int


def try_micro_step(model, B: int, T: int, autocast: torch.autocast, device: str) -> Trial:
    """Forward and backward of B sequences in eager mode. Changes neither weights nor gradients."""
    x, kept = torch.zeros(B, T, dtype=torch.int64, device=device), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor
    seconds, started, trials = math.inf, time.perf_counter(), 0
    # the first is slow, and is repeated if that takes seconds
    while trials == 0 or trials == 1 and time.perf_counter() - started < 10:
        trials += 1
        kept.clear()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            _, loss = model(x, x)
        # not backward(): DDP's hooks would take it for a step
        torch.autograd.grad(loss, list(model.parameters()))[0].sum().item()         # waits for a GPU
        seconds = min(seconds, time.perf_counter() - start)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return Trial(B, seconds, sum(size for place, size in kept.items() if place not in weights))


def size(n: float) -> str:
    """Bytes in GB or MB."""
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.0f} MB"


@dataclass
class ModelSize:
    """Of a model with its optimizers, before either is made."""
    parameters: int
    moments: int                # bytes
    flops_per_token: int

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and moments."""
        return 8 * self.parameters + self.moments

    @property
    def checkpoint(self) -> int:
        return 4 * self.parameters + self.moments


def count_model(config, fresh_model: Callable, make_optimizers: Callable) -> ModelSize:
    """The size of config.recipe's model. Counted for one and two layers without weights, because the flags
    may ask for any number."""
    def count(n_layer):
        shape = replace(config, n_layer=n_layer)
        with torch.device("meta"), Uninitialized():
            model = fresh_model(shape)
        return (sum(p.numel() for p in model.parameters()), moment_bytes(make_optimizers(model, shape)),
                model.flops_per_token(config.sequence_length))
    try:
        one, two = count(1), count(2)
    except (RuntimeError, OverflowError):               # torch: "Storage size calculation overflowed"
        raise UserError(f"a model of width {config.n_embd} with --block_size {config.block_size} has more "
                        "parameters than can be counted: give a smaller --n_embd or --block_size") from None
    return ModelSize(*(a + (config.n_layer - 1) * (b - a) for a, b in zip(one, two, strict=True)))


class Forecast:
    """What a run will do. `loader` is None before the micro-batch is known, `trial` before a micro-step is
    tried: of the micro-batch, or on CUDA, for --dry_run, of one sequence."""

    def __init__(self, config, count: ModelSize, data: Data, process: Process, compiled: bool, step: int = 0,
                 loader: TokenLoader | None = None, trial: Trial | None = None):
        self.config, self.count, self.datasets = config, count, data
        self.process, self.compiled, self.step = process, compiled, step
        self.loader, self.trial = loader, trial
        self.tokens = config.max_steps * config.total_batch_size
        self.epochs = self.tokens / (data.train.total * data.train.T)
        self.step_seconds, self.source = self._time()

    def _time(self):
        """(seconds a step or None, where they are from)."""
        config, process = self.config, self.process
        peak = peak_flops(process.device)
        if config.dtype == "float32":
            peak = peak / 2 if peak and config.tf32 else None       # TF32 has half the peak of 16 bits
        if peak:
            flops = self.count.flops_per_token * config.total_batch_size
            return (flops / (peak * MFU * process.world_size),
                    f"predicted, at {MFU:.0%} of the data sheet's {peak / 1e12:,.0f} TFLOP/s")
        if not self.trial:
            return None, "unknown for this GPU"
        rows = self.loader.rows_per_step / process.world_size
        where = "CPU" if process.device == "cpu" else "device"
        mode = " in eager mode" if self.compiled else ""
        return (self.trial.seconds * rows / self.trial.rows,
                f"from one micro-step, timed on this {where}{mode}")

    def _evaluation_seconds(self):
        """Of all validations and HellaSwag: forwards, a third of a micro-step's time."""
        config = self.config
        tokens = self._times(config.val_every) * self.datasets.val_count * config.sequence_length
        tokens += self._times(config.hellaswag_every) * HELLASWAG_TOKENS
        return tokens / config.total_batch_size * self.step_seconds / 3

    def _times(self, every):
        """How often in the whole run something happens at step 0, every so many steps and at the last."""
        return math.ceil(self.config.max_steps / every) + 1 if every else 0

    def _left(self):
        """Seconds to the end of the run, or 0 if they are not known."""
        share = 1 - self.step / max(1, self.config.max_steps)
        steps = (self.step_seconds or 0) * self.config.max_steps
        return share * (steps + (self._evaluation_seconds() if steps else 0))

    def machine(self):
        config, process = self.config, self.process
        gpu = f" ({torch.cuda.get_device_name(process.device)})" if process.device.startswith("cuda") else ""
        return (f"{counted(process.world_size, 'process')} on {process.device}{gpu}, {config.dtype}, "
                f"{'torch.compile' if self.compiled else 'eager'}, attention {config.attention}, "
                f"torch {torch.__version__}")

    def model(self):
        config = self.config
        return (f"{config.recipe}: {self.count.parameters:,} parameters ({counted(config.n_layer, 'layer')}, "
                f"{counted(config.n_head, 'head')}, width {config.n_embd}, vocabulary {config.vocab_size}"
                f"{f', window {config.window} inside documents' if config.window else ''})")

    def data(self):
        source = "input.txt" if self.config.overfit else self.config.data
        return f"{source}: {sum(self.datasets.train.lengths):,} tokens for training"

    def batch(self):
        config, loader = self.config, self.loader
        first = config.updates_per_step
        updates = f"{first} updates a step at first; " if first > 1 else ""
        largest = loader.largest(first)
        joined = f", joined to {largest} x {config.sequence_length} later" if largest > loader.B else ""
        return (f"{config.total_batch_size:,} tokens a step = {loader.B} x {config.sequence_length} x "
                f"{counted(loader.micro_batches, 'micro-step')} x "
                f"{counted(self.process.world_size, 'process')}{joined}; {updates}"
                f"{config.max_steps:,} steps = {self.tokens:,} tokens = {self.epochs:,.2f} epochs")

    def time(self):
        if self.step_seconds is None:
            return self.source
        return (f"about {duration(self.step_seconds)} a step, {duration(self._left())} in all with its "
                f"evaluations ({self.source})")

    def memory(self):
        parts = [("weights", 4 * self.count.parameters), ("gradients", 4 * self.count.parameters),
                 ("moments", self.count.moments)]
        if self.trial:
            note = " (eager; less with torch.compile)" if self.compiled else ""
            activations = self.trial.activations * self.loader.largest(self.config.updates_per_step)
            parts.append((f"activations of a micro-batch{note}", activations // self.trial.rows))
        each = ", ".join(f"{size(n)} {what}" for what, n in parts)
        text = f"at least {size(sum(n for _, n in parts))}: {each}"
        if self.loader:
            return text
        free, total = memory_of(self.process.device)
        return (f"{text}, and activations; {self.process.device} has {size(total)}, of which {size(free)} "
                f"are free now")

    def disk(self):
        config = self.config
        if not (config.checkpoint_every or config.checkpoint_minutes):
            return "no checkpoints"
        # the newest, the best, and the one being written
        count = f"up to {config.keep_checkpoints + 2}" if config.keep_checkpoints else (
            f"{math.ceil(config.max_steps / config.checkpoint_every)}" if config.checkpoint_every else "all")
        return f"{size(self.count.checkpoint)} a checkpoint, {count} in {config.out}"

    def steps(self):
        """When something is evaluated or saved, one line each."""
        config = self.config
        for what, every in (("validation", config.val_every), ("HellaSwag", config.hellaswag_every),
                            ("samples", config.sample_every), ("checkpoint", config.checkpoint_every)):
            if not every:
                yield f"{what}: never"
                continue
            first, times, detail = "", self._times(every), ""
            if what in ("validation", "HellaSwag"):
                first = "at step 0, "
            else:
                times -= 1
            if what == "validation" and self.datasets.val:
                detail = f", {self.datasets.val_count:,} sequences of {config.sequence_length} tokens"
            yield f"{what}: {first}every {every:,} steps and at the last, {times:,} times{detail}"
        if config.checkpoint_minutes:
            yield f"checkpoint: {config.checkpoint_minutes:g} minutes after the last, and at the last step"

    def warning(self):
        config = self.config
        if config.overfit:
            return
        if self.epochs > MOST_EPOCHS:
            enough = max(1, int(MOST_EPOCHS * config.max_steps / self.epochs))
            yield (f"{self.epochs:,.0f} epochs over the data, and after about {MOST_EPOCHS} a model "
                   f"memorises it: give --max_steps {enough}, a smaller --preset, or more text")
        if (left := self._left()) > 7 * 86400:
            yield (f"this takes about {duration(left)} here: give a smaller --preset (see --help), or fewer "
                   f"--max_steps")
        free, out = math.inf, Path(config.out).absolute()
        with suppress(OSError):                 # a folder that may not be read is refused later
            free = shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free
        if (config.checkpoint_every or config.checkpoint_minutes) and free < 2 * self.count.checkpoint:
            yield (f"{size(free)} are free for {config.out}, and a checkpoint has "
                   f"{size(self.count.checkpoint)}: make room, or give another --out")

    def note(self):
        if self.config.warmup_steps > self.config.max_steps:
            yield f"the warm-up of {self.config.warmup_steps} steps is longer than the run"

    def rows(self, *names: str) -> Iterator[tuple[str, str]]:
        """(name, text) of each row with one of these names, which are those of the methods above."""
        for name in names:
            texts = getattr(self, name)()
            yield from ((name, text) for text in ([texts] if isinstance(texts, str) else texts))

    def print_header(self) -> None:
        """The first lines of a run: where, what, the arithmetic of the batch, memory, disk and time."""
        costs = () if self.config.overfit else ("memory", "disk", "time")
        for name, text in self.rows("machine", "model", "batch", *costs, "warning", "note"):
            self.process.print0(f"{name}: {text}" if name in ("memory", "warning", "note") else text)

    def print_plan(self) -> None:
        """--dry_run: what is known before anything is allocated, or the rest, once a micro-step was tried."""
        for name, text in self.rows(*("batch", "memory", "time", "warning") if self.trial else
                                    ("machine", "model", "data", "memory", "disk", "steps")):
            self.process.print0(f"{name + ':':<9}{text}")


def print_plan(config, count: ModelSize, data: Data, process: Process) -> None:
    """Of --dry_run, what is known before anything is allocated."""
    Forecast(config, count, data, process, compiles(config, process.device)).print_plan()


def print_forecast(config, size: ModelSize, data: Data, state: TrainState, compiled: Callable,
                   loader: TokenLoader, autocast: torch.autocast, process: Process) -> None:
    """Prints the header of a run, or the rest of --dry_run's plan. A micro-batch is tried first, on CUDA only
    for --dry_run, and of one sequence; elsewhere the largest."""
    trial, cuda = None, process.device.startswith("cuda")
    if not (cuda or config.overfit) or config.dry_run:
        with process.progress("timing a micro-step"):
            rows = 1 if cuda else loader.largest(config.updates_per_step)
            trial = try_micro_step(state.model, rows, config.sequence_length, autocast, process.device)
    forecast = Forecast(config, size, data, process, compiled is not state.model, state.step, loader, trial)
    (forecast.print_plan if config.dry_run else forecast.print_header)()
    if state.source:
        process.print0(f"resuming from {state.source} at step {state.step} of {config.max_steps}")
    if config.dry_run:
        process.print0("nothing was written; the same command without --dry_run starts the run")
