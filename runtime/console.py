"""What a run prints: a line a step, how it ended."""
import math
import shlex
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from runtime.dataloader import Data
from runtime.device import fetch, peak_flops, peak_memory
from runtime.files import checkpoints
from runtime.tokenizer import ASSETS, VOCAB_SIZE


@dataclass
class StepResult:
    """What a finished step came to, the same on all ranks."""
    step: int
    loss: float                 # nats
    norm: float                 # of the gradient, before clipping
    first_bad: str              # name of the first parameter with a non-finite gradient, "" if there is none

    def __str__(self):
        where = f"; the first non-finite gradient is that of {self.first_bad}" if self.first_bad else ""
        return f"step {self.step}: loss {self.loss}, gradient norm {self.norm}{where}"


def brief_time(seconds: float) -> str:
    """'45s', '83m', '12h', '165d': at most four characters, up to years."""
    for unit, length, most in (("s", 1, 100), ("m", 60, 100), ("h", 3600, 48)):
        if seconds < length * most:
            return f"{seconds / length:.0f}{unit}"
    return f"{min(seconds, 1e9) / 86400:.0f}d"


def step_line(step: int, loss: float, norm: float, lr: float, dt: float, rate: float, mfu: float | None,
              left: float) -> str:
    """The console's line of a step, at most 100 columns. `dt`, `left`: seconds; `rate`: tokens/s."""
    time = f"{dt:.1f}s" if dt >= 10 else f"{dt * 1000:.0f}ms" if dt >= 0.1 else f"{dt * 1000:.1f}ms"
    tokens = f"{rate / 1000:,.0f}k" if rate >= 1e6 else f"{rate:,.0f}"
    line = (f"step {step:5d} | loss: {loss:.4f} | lr {lr:.2e} | norm: {norm:.{2 if norm < 10 else 1}f} | "
            f"dt: {time} | tok/sec: {tokens}")
    for more in (f" | mfu {mfu:.0%}" if mfu else "", f" | {brief_time(left)}", " left"):
        if len(line + more) > 100:
            break
        line += more
    return line


class Band:
    """The last 64 finite values of a loss or norm, to tell one that is far above all of them: by twice
    their range, and by a tenth, for losses that hardly change."""
    WIDTH, LEAST = 64, 32       # steps

    def __init__(self, name: str):
        self.name, self.values, self.quiet_until = name, deque(maxlen=self.WIDTH), 0

    def add(self, step: int, value: float) -> str:
        """A line if `value` is so far above, at most one every 64 steps, else ''."""
        line = ""
        if math.isfinite(value):
            if len(self.values) >= self.LEAST and step >= self.quiet_until:
                low, high = min(self.values), max(self.values)
                if value > high + max(2 * (high - low), 0.1 * high):
                    line = (f"step {step}: {self.name} {value:.4f} is far above those of the last "
                            f"{len(self.values)} steps ({low:.4f} to {high:.4f})")
                    self.quiet_until = step + self.WIDTH
            self.values.append(value)
        return line


class Reporter:
    """Prints and logs steps. On CUDA a step's numbers are read when the next step is queued, so that the
    GPU never waits. What they mean is decided by the caller, to whom `step` and `flush` return
    [StepResult] of those read."""

    def __init__(self, config, log, model, process):
        self.config, self.log, self.process = config, log, process
        self.flops, self.peak = model.flops_per_token(config.sequence_length), peak_flops(process.device)
        self.names = [name for name, _ in model.named_parameters()]
        self.bands = Band("loss"), Band("gradient norm")
        self.pending, self.seconds, self.losses = [], [], []
        if log and process.console:
            process.console.open(config, log.first)

    def start(self):
        """Before a step: starts the clock, unless a step still runs on the GPU, and the clock with it."""
        if not self.pending:
            self.clock = time.perf_counter()

    def step(self, step, numbers, lr):
        """After a step was queued; `numbers` as train_step returns them."""
        self.pending.append((step, fetch(numbers), lr))
        return self.flush(but=1 if self.process.device.startswith("cuda") else 0)

    def flush(self, but=0):
        """Reads all but the newest `but` steps."""
        return [self._report(*self.pending.pop(0)) for _ in range(len(self.pending) - but)]

    def evaluation(self, step, kind, value, text):
        self._status(at_once=True, step=step, **({"val_loss": value} if kind == "val" else {}))
        self.process.print0(f"step {step:5d} | {text}")
        if self.log:
            self.log.evaluation(step, kind, value)

    def _status(self, **values):
        if self.process.console:
            self.process.console.update(**values)

    def _report(self, step, numbers, lr):
        with self.process.progress(f"step {step}"):
            loss, norm, first_bad = numbers()
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        self.seconds.append(dt)
        self.losses.append(loss)
        self._status(step=step + 1, loss=loss)
        if step % self.config.log_every == 0 or step == self.config.max_steps - 1:
            rate = self.config.total_batch_size / dt
            mfu = rate * self.flops / self.peak / self.process.world_size if self.peak else None
            left = statistics.median(self.seconds[-20:]) * (self.config.max_steps - 1 - step)
            self.process.print0(step_line(step, loss, norm, lr, dt, rate, mfu, left))
        for band, value in zip(self.bands, (loss, norm), strict=True):
            if line := band.add(step, value):
                self.process.print0(line)
        if self.log:
            self.log.step(step, loss, norm, lr, dt)
        return StepResult(step, loss, norm, self.names[int(first_bad)] if first_bad >= 0 else "")

    def close(self):
        if self.log:
            self.log.close()


def print_summary(run) -> int:
    """Prints how the run ended, how fast it was and where everything is. Returns its exit code."""
    config, state, process, signals, reporter = run.config, run.state, run.process, run.signals, run.reporter
    if reporter.seconds:
        median = statistics.median(reporter.seconds)
        process.print0(f"median step {median * 1000:,.{0 if median >= 0.1 else 1}f} ms, "
                       f"{config.total_batch_size / median:,.0f} tokens/s, "
                       f"peak memory {peak_memory(process.device) / 1e9:.1f} GB")
    ended, message = "done", ""
    if signals.stopped:
        then = "the same command resumes from there" if run.saver.every else (
            "that is not saved (--checkpoint_every 0)")
        ended = "stopped"
        process.print0(f"stopped by {signals.received or 'a signal'} after {state.step} of "
                       f"{config.max_steps} steps: {then}")
        print_best(run)
    elif config.overfit and reporter.seconds:
        first, last, verdict = reporter.losses[0], reporter.losses[-1], "PASSED"
        if not last < 0.1:
            ended, message, verdict = "failed", "did not overfit", "FAILED (under 0.1 is expected)"
        process.print0(f"overfit one batch: loss {first:.4f} -> {last:.4f} in {len(reporter.losses)} steps: "
                       f"{verdict}")
        if verdict == "PASSED":                 # whose own last line goes on to training
            process.print0("next: python fineweb.py --input input.txt --out data/shakespeare")
    else:
        print_results(run)
    if process.console:
        process.console.end(ended, message)
    return 1 if ended == "failed" else 0


def print_results(run) -> None:
    """What a run that is done has made, and what to do with it."""
    config, state, process = run.config, run.state, run.process
    newest = checkpoints(config.out)[-1:] if run.saver.every else []
    picture = ", loss.png" if (Path(config.out) / "loss.png").exists() else ""
    process.print0(f"done: {state.step} steps; in {config.out}: log.txt, metrics.csv{picture}"
                   + (", checkpoints" if newest else ""))
    if picture:
        samples = ", and at the samples above" if config.sample_every and state.step > state.begun else ""
        process.print0(f"look at: {Path(config.out) / 'loss.png'}, the losses{samples}")
    best = print_best(run)
    if (ASSETS / f"{config.preset}.csv").exists():
        process.print0("beside the losses of others with this preset: python bench.py compare "
                       f"{shlex.quote(config.out)} assets/{config.preset}.csv")
    if newest and config.vocab_size >= VOCAB_SIZE:
        process.print0(f"next: python sample.py --model {shlex.quote(str(best or newest[0][1]))}")


def in_bits(loss: float, data: Data) -> str:
    """' (1.6543 bits per byte)' for a validation loss; '' where the tokens are not GPT-2's."""
    bits = loss * data.bits_per_byte
    return f" ({bits:.4f} bits per byte)" if math.isfinite(bits) else ""


def print_best(run) -> Path | None:
    """Which of the saved checkpoints has the lowest validation loss, and whether it has risen since. Returns
    its path, or None if there is none."""
    config, state, process = run.config, run.state, run.process
    if not (state.best and state.val_loss is not None):
        return None
    loss, step = state.best
    path = dict(checkpoints(config.out)).get(step)
    if state.val_loss > loss and f"{state.val_loss:.4f}" != f"{loss:.4f}":
        where = f": the best checkpoint is {path}" if path else ", and the checkpoint of that step is gone"
        process.print0(f"validation has risen since step {step} ({loss:.4f} -> {state.val_loss:.4f}){where}")
    elif path:
        process.print0(f"best checkpoint: {path}, validation loss {loss:.4f}{in_bits(loss, run.data)}")
    return path
