"""What a run prints: its header, the line of each step, and the summary."""
import math
import shlex
import statistics
from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from runtime.checkpoint import Start
from runtime.cli import RunError
from runtime.files import checkpoints
from runtime.hardware import bfloat16_of_cpu, device_name, peak_flops, peak_memory
from runtime.metrics import Metrics
from runtime.recipe import BatchSchedule

RECENT_STEPS = 20           # whose median speed tells the time left
OVERFIT_LOSS = 0.1          # below this, --overfit has passed


def clock(seconds: float) -> str:
    """'0:05:00', '2 days, 1:00:00'."""
    return str(timedelta(seconds=min(round(seconds), 10**10)))          # timedelta holds no 10**14


def counted(n: int, what: str) -> str:
    """'1 step', '2 steps', '8 processes'."""
    if n == 1:
        return f"1 {what}"
    plural = "es" if what.endswith("s") else "s"
    return f"{n:,} {what}{plural}"


# ----------------------------------------------------------------------- the steps

class StepLog:
    """The lines of the steps on the console, and how fast the steps were.

    `flops_per_token`: forward and backward. `backward_tokens`: those that the run reads backwards.
    """

    def __init__(
        self, process, schedule: BatchSchedule, flops_per_token: int, backward_tokens: int = 0
    ):
        self.process = process
        self.schedule = schedule
        self.flops_per_token = flops_per_token
        self.turn = 0               # the first step whose text is no more read backwards
        if backward_tokens:
            self.turn = schedule.first_step_after(backward_tokens)
        # One number for each step, in 4 bytes.
        self.losses = array("f")
        self.seconds = array("f")
        self.seconds_per_token = array("f")

    def step(self, step: int, loss: float, norm: float, lr: float, dt: float) -> None:
        """`dt`: the seconds that the step took."""
        tokens = self.schedule.tokens(step)
        rate = tokens / dt
        self.losses.append(loss)
        self.seconds.append(dt)
        self.seconds_per_token.append(dt / tokens)

        parts = [
            f"loss: {loss:.4f}",
            f"lr {lr:.2e}",
            f"norm: {norm:.2f}",
            f"dt: {dt * 1000:.1f}ms",
            f"tok/sec: {rate:,.0f}",
        ]
        peak = peak_flops(self.process.device)
        if peak:
            # Model FLOPs utilisation: the share of the GPUs' peak.
            mfu = rate * self.flops_per_token / self.process.world_size / peak
            parts.append(f"mfu {mfu:.0%}")

        # The first step tells nothing about the others: it may still compile and allocate.
        recent = self.seconds_per_token[max(1, len(self.seconds) - RECENT_STEPS):]
        if recent:
            left = self.schedule.tokens_left(step + 1) * statistics.median(recent)
            parts.append(f"{clock(left)} left")
        if step == self.turn > 0:
            self.line(step, "the text is read forwards from here on: the loss jumps, because the "
                            "model has not learned yet what comes next")
        self.line(step, " | ".join(parts))

    def line(self, step: int, text: str) -> None:
        self.process.print0(f"step {step:5d} | {text}")

    def medians(self) -> tuple[float, float]:
        """(seconds of a step, tokens per second), without the first step if there are others."""
        first = min(1, len(self.seconds) - 1)
        seconds_per_token = statistics.median(self.seconds_per_token[first:])
        return statistics.median(self.seconds[first:]), 1 / seconds_per_token


# ----------------------------------------------------------------------- header and summary

def print_machine(config, process, start: Start) -> None:
    """The first line: where the run computes, and in which dtype.

    It comes early, because torch's optimizers then import the compiler, which takes seconds.
    """
    machines = ""
    if process.machines:                        # of several processes
        machines = f" ({counted(len(set(process.machines)), 'machine')})"
    how = dtype_text(config.dtype, process.device, start)
    if config.attention != "auto":
        how += f", attention {config.attention}"
    process.print0(f"{counted(process.world_size, 'process')}{machines} on {process.device} "
                   f"({device_name(process.device)}), {how}, torch {torch.__version__}")


def print_header(config, process, data, model, schedule: BatchSchedule, start: Start) -> None:
    """Where the run begins, and what it will do."""
    c, say = config, process.print0
    if start.path:
        say(f"resuming from {start.path} at step {start.step} of {c.max_steps}")
        if start.step >= c.max_steps:
            say("the run is complete: a larger --max_steps continues it, and another --out begins "
                "a new one")
    elif c.init != "scratch":
        say(f"beginning with the weights of --init {c.init}")
    num_params = sum(p.numel() for p in model.parameters())
    say(f"{c.recipe}: {num_params:,} parameters ({counted(c.n_layer, 'layer')}, "
        f"{counted(c.n_head, 'head')}, width {c.n_embd}, vocabulary {c.vocab_size})")

    tokens = schedule.tokens_before(c.max_steps)
    epochs = tokens / c.sequence_length / data.train.total
    say(f"{c.max_steps:,} steps = {tokens:,} tokens = {epochs:,.2f} epochs; {learning_rates(c)}")
    say(", ".join(plans(c, data)))
    turn = schedule.first_step_after(data.train.backward_tokens)
    if start.step < turn:
        say(f"the text is read backwards before step {turn:,}: from step 1 until then nothing is "
            "evaluated")

    if c.compile:
        say("compiling the model, which takes about a minute ...")


def dtype_text(dtype: str, device: str, start: Start) -> str:
    """The dtype, and what it depends on: the run before a resume, or the CPU."""
    if start.dtype == dtype:
        return f"{dtype} as before"
    if start.dtype:
        return f"{dtype} ({start.dtype} before)"
    if device == "cpu":
        return f"{dtype} (the CPU has {bfloat16_of_cpu()})"
    return dtype


def print_batch(config, process, schedule: BatchSchedule, B: int) -> None:
    """How a step is divided into micro-batches of B sequences."""
    first_batch, last_batch = schedule.tokens(0), schedule.tokens(config.max_steps - 1)
    micro_steps = last_batch // (B * config.sequence_length * process.world_size)
    at_first = ""
    if first_batch < last_batch:
        at_first = f", {first_batch:,} at first"
    process.print0(f"{last_batch:,} tokens per step = {B} x {config.sequence_length} x "
                   f"{counted(micro_steps, 'micro-step')} x "
                   f"{counted(process.world_size, 'process')}{at_first}")


def learning_rates(config) -> str:
    """The largest learning rate, the steps until the warm-up reaches it, and the last one."""
    text = f"learning rate {config.max_lr:.3g}"
    if config.warmup_steps > 0:
        text += f" after {counted(config.warmup_steps, 'step')} of warm-up"
    elif config.overfit:
        # In steps 1 to 3 GPT-2's loss is 8.2, 9.4 and 7.4. With --warmup_steps 10 it falls in each.
        text += " from the first step on: without warm-up the loss may jump back once"
    if config.warmup_steps >= config.max_steps:
        text += f" (the run has {config.max_steps:,})"
    if config.min_lr != config.max_lr:
        text += f", {config.min_lr:.3g} at the end"
    return text


def plans(config, data) -> list[str]:
    """When the run evaluates and saves, and where it writes."""
    periods = {
        "validation": config.val_every,
        "HellaSwag": config.hellaswag_every,
        "checkpoint": config.checkpoint_every,
    }
    texts = []
    for what, period in periods.items():
        when = "never"
        if period:
            when = f"every {period:,} steps"
        if what == "validation" and period:
            when += f" on {data.val_count * config.sequence_length:,} tokens"
        texts.append(f"{what} {when}")
    if config.out:
        texts.append(f"output in {config.out}")
    return texts


def print_estimate(
    config, process, data, schedule: BatchSchedule, step: int, seconds: float
) -> None:
    """How long the run will take from `step` on, for --dry_run.

    `seconds`: of the forward and backward of one sequence, in one process.
    """
    c = config
    rate = c.sequence_length * process.world_size / seconds         # tokens per second
    steps = f"{clock(schedule.tokens_left(step) / rate)} for {counted(c.max_steps - step, 'step')}"
    validations = ""
    if c.val_every:
        count = count_validations(c, schedule, data.train.backward_tokens, step)
        # A forward takes about a third of the time (docs/running.md).
        tokens = data.val_count * c.sequence_length
        validations = (f" and {clock(count * tokens / rate / 3)} for "
                       f"{counted(count, 'validation')} on {tokens:,} tokens")

    not_counted = ["optimizer"]
    for what, period in (("HellaSwag", c.hellaswag_every), ("samples", c.sample_every),
                         ("checkpoints", c.checkpoint_every)):
        if period:
            not_counted.append(what)
    if process.world_size > 1:
        not_counted.append("what the processes exchange")
    process.print0(
        f"about {c.total_batch_size / rate:.3g} s per step, {steps}{validations} (not counted: "
        f"{', '.join(not_counted)}); nothing was written, and the same command without --dry_run "
        "starts the run")


def print_needs(config, process, state) -> None:
    """The memory of a GPU and the room for checkpoints that a run takes, for --dry_run.

    A micro-step has just been timed: it has left its peak.
    """
    c, say = config, process.print0
    if process.on_gpu:
        # The first step allocates the moments.
        peak = peak_memory(process.device) + state.optimizer.bytes_to_allocate()
        say(f"about {peak / 1e9:.1f} GB of GPU memory at the peak")
    if not c.out or not c.checkpoint_every:
        return

    count = math.ceil(c.max_steps / c.checkpoint_every)         # the last one at the end
    if c.keep_checkpoints != "all":
        count = min(count, c.keep_checkpoints)
    if c.val_every:
        count += 1                                              # the best one
    size = bytes_of_checkpoint(state)
    say(f"a checkpoint takes about {size / 1e9:.2g} GB, and the {count} that may lie in {c.out} "
        f"{count * size / 1e9:.2g} GB; while one is written there is one more")


def bytes_of_checkpoint(state) -> int:
    """Of the weights and their moments."""
    weights = sum(p.nbytes for p in state.model.parameters())
    moments = sum(state.optimizer.bytes_of_moments(p) for p in state.optimizer.optimizer_of)
    return weights + moments


def count_validations(config, schedule: BatchSchedule, backward_tokens: int, step: int) -> int:
    """How many validations a run makes from `step` on, of which the last one is at its end."""
    first, at_step_0 = step, 0
    if backward_tokens:
        # As in `evaluate`: at step 0, and then not before something has been read forwards.
        first = max(step, schedule.first_step_after(backward_tokens + 1))
        if step == 0:
            at_step_0 = 1
    periods = math.ceil(config.max_steps / config.val_every) - math.ceil(first / config.val_every)
    return at_step_0 + periods + 1


def loss_text(loss: float, data) -> str:
    """'4.2510 (1.8901 bits per byte)' for a validation loss; without bits if nobody knows them."""
    bits = loss * data.bits_per_byte
    if not math.isfinite(bits):             # the tokens are not GPT-2's
        return f"{loss:.4f}"
    return f"{loss:.4f} ({bits:.4f} bits per byte)"


def print_summary(run, step: int, stopped: bool) -> None:
    """Prints how the run ended, and where everything is. RunError if an --overfit has failed."""
    config, process, log = run.config, run.process, run.log
    say = process.print0
    if log.seconds:
        dt, rate = log.medians()
        memory = peak_memory(process.device)
        say(f"median step {dt * 1000:,.1f} ms, {rate:,.0f} tokens/s, "
            f"peak memory {memory / 1e9:.1f} GB")

    if stopped:
        say(f"stopped by {signals_received(process)} after {step} of {config.max_steps} steps. "
            f"{run.output.what_resumes()}")
    elif config.overfit:
        print_overfit(process, log.losses)
    else:
        names = ("metrics.csv", "loss.png")
        files = [name for name in names if (Path(config.out) / name).exists()]
        if checkpoints(config.out):
            files.append("checkpoints")
        say(f"done: {step} steps; {config.out} has {', '.join(files)}")
        if process.is_master and checkpoints(config.out):
            print_best(config, process, run.data, run.output.metrics)


def signals_received(process) -> str:
    """'SIGTERM', or of several ranks 'SIGTERM (process 3 on node2)'."""
    signals = process.gather(process.signal)
    if process.world_size == 1:
        return signals[0]
    ranks = [rank for rank, signal in enumerate(signals) if signal]
    first, *others = ranks
    where = f"process {first} on {process.machines[first]}"
    if others:
        where += f" and {counted(len(others), 'other')}"
    return f"{signals[first]} ({where})"


def print_best(config, process, data, metrics: Metrics) -> None:
    """The best checkpoint of the run, and the command that samples from it."""
    saved = dict(checkpoints(config.out))
    best = metrics.lowest(saved)
    model = config.out
    if best:
        loss, step = best
        measured = metrics.measured("val", over="step")
        text = f"best checkpoint: {saved[step]}, validation loss {loss_text(loss, data)}"
        for other_step, other_loss in (measured[0], measured[-1]):
            if other_step != step:
                text += f", {other_loss:.4f} at step {other_step:.0f}"
        first_step, first_loss = measured[0]
        if first_step < step and first_loss < loss:
            text += "; training has raised the loss: lower --max_lr"
        process.print0(text)
        model += "/best"
    command = f"python sample.py --model {shlex.quote(model)}"
    prompt = config.sample_prompt.strip()           # without the end of its line
    if prompt:
        # With =, because argparse takes a word that begins with a dash for a flag.
        command += f" --prompt={shlex.quote(prompt)}"
    process.print0(f"next: {command}")


def print_overfit(process, losses: Sequence[float]) -> None:
    """The verdict of --overfit. RunError if it has failed."""
    # The lowest loss, because at a constant rate the last one goes up and down.
    lowest = min(losses)
    text = (f"overfit one batch: loss {losses[0]:.4f}, at the lowest {lowest:.4f} in "
            f"{len(losses)} steps: ")
    if lowest >= OVERFIT_LOSS:
        process.fail(RunError(f"{text}FAILED (expected a loss below {OVERFIT_LOSS})"))
    process.print0(f"{text}PASSED\n"
                   "next: python fineweb.py --input input.txt --out data/shakespeare")
