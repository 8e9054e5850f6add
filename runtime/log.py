"""log.txt, metrics.csv, the console, dashboards, the profiler's trace."""
import csv
import re
import shlex
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.checkpoint import archive_checkpoints, checkpoints
from runtime.cli import RunError
from runtime.device import fetch, peak_flops, peak_memory
from runtime.distributed import Process
from runtime.files import replace_file, writable
from runtime.tokenizer import VOCAB_SIZE

COLUMNS = ("step", "tokens", "seconds", "train", "val", "hella", "lr", "norm", "tokens_per_second")


def read_log(path: str | Path) -> list[tuple[int, str, float]]:
    """[(step, kind, value)] of the complete lines of a log.txt; a crash can cut off the last one."""
    rows = [line.split() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()
            and re.fullmatch(r"-?\d+\.\d{6}|-?inf|nan", row[2])]
    return [(int(step), kind, float(value)) for step, kind, value in rows]


def read_metrics(path: str | Path) -> list[dict]:
    """The complete rows of a run's metrics.csv: {column of COLUMNS: number, or None where the cell is empty}.
    ValueError for a file of another kind."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]        # a crash can cut off the last one
    reader = csv.DictReader(lines)
    try:
        return [{name: int(row[name]) for name in COLUMNS[:2]} | {"seconds": float(row["seconds"])}
                | {name: float(row[name]) if row[name] else None for name in COLUMNS[3:]} for row in reader]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"line {reader.line_num} is none of a run's metrics") from None


class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; OUT/metrics.csv, a row a
    step; also Weights & Biases and TensorBoard, if asked for.

    `step`, `evaluated`: of the state to go on from. What a crashed run logged after it is cut off: it
    happens again."""

    def __init__(self, config, step, evaluated):
        self.config, self.wandb, self.tensorboard = config, None, None
        path = Path(config.out) / "log.txt"
        kept = [row for row in (read_log(path) if path.exists() else [])
                if (row[0] < step if row[1] == "train" else row[0] <= evaluated)]
        if path.exists():
            lines = [f"{at} {kind} {value:.6f}\n" for at, kind, value in kept]
            replace_file(path, lambda file: file.write("".join(lines).encode()))
        self.file = open(path, "a", encoding="utf-8")
        # evaluations whose row waits for the training loss of the same step
        self.evaluated, self.cells = step, {kind: value for at, kind, value in kept if at == step}
        self.metrics, self.seconds = self._open_metrics(step)
        if config.wandb:
            import wandb
            self.wandb = wandb
            wandb.init(project="gpt2", name=Path(config.out).name, config=asdict(config), resume="allow")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(config.out, purge_step=step)
            for kind, value in self.cells.items():      # these stay, but the purge removes them too
                self.tensorboard.add_scalar(kind, value, step)

    def _open_metrics(self, step):
        """(metrics.csv cut after the row of step - 1, seconds of training up to there)."""
        path, kept, seconds = Path(self.config.out) / "metrics.csv", [",".join(COLUMNS) + "\n"], 0.0
        with writable(self.config.out):
            old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in old.splitlines(keepends=True):
            with suppress(ValueError):          # the header, a line cut off, the row after the last step
                at, _, before, *_, rate = map(float, (cell or "nan" for cell in line.split(",")))
                if line.count(",") == len(COLUMNS) - 1 and line.endswith("\n") and at < step and rate > 0:
                    kept.append(line)
                    seconds = before + self.config.total_batch_size / rate
        replace_file(path, lambda file: file.write("".join(kept).encode()))
        return open(path, "a", encoding="utf-8"), seconds

    def step(self, step, loss, norm, lr, seconds):
        """A finished step, which took `seconds`."""
        self.write(step, "train", loss, norm=norm, lr=lr)
        self._row(step, train=f"{loss:.6f}", norm=f"{norm:.4f}", lr=f"{lr:.6g}",
                  tokens_per_second=f"{self.config.total_batch_size / seconds:.6g}")
        self.seconds += seconds

    def evaluation(self, step, kind, value):
        self.write(step, kind, value)
        self.evaluated, self.cells[kind] = step, value

    def _row(self, step, **cells):
        """A row of metrics.csv; its tokens and seconds are those of the steps before."""
        cells |= {kind: f"{value:.6f}" for kind, value in self.cells.items()}
        cells |= {"step": step, "tokens": step * self.config.total_batch_size,
                  "seconds": f"{self.seconds:.3f}"}
        self._append(self.metrics, ",".join(str(cells.get(name, "")) for name in COLUMNS))
        self.cells = {}

    def write(self, step, kind, value, **more):
        self._append(self.file, f"{step} {kind} {value:.6f}")
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)
        if self.tensorboard:
            for name, number in {kind: value, **more}.items():
                self.tensorboard.add_scalar(name, number, step)

    def _append(self, file, line):
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            raise RunError(f"cannot write {file.name}: {error.strerror}. Make room, and the same "
                           "command goes on from the newest checkpoint") from None

    def close(self):
        """Evaluations after the last step have a row of their own."""
        if self.cells:
            with suppress(RunError):            # the disk is full; they are in log.txt, if anywhere
                self._row(self.evaluated)
        for file in (self.file, self.metrics, self.tensorboard):
            if file:
                file.close()


def open_output(config, path: Path | None, state, process: Process) -> Log | None:
    """On rank 0 the log in --out. What another run left there is archived, never lost."""
    if not process.is_master:
        return None
    with writable(config.out):
        if folder := archive_checkpoints(config, path, state.step):
            process.print0("checkpoints of another run, or later than the one to go on from, are now in "
                           f"{folder}")
        for stale in Path(config.out).glob("*.tmp"):
            stale.unlink()
        return Log(config, state.step, state.evaluated)


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


class Reporter:
    """Prints and logs steps. On CUDA a step's numbers are read when the next step is queued, so that the
    GPU never waits. What they mean is decided by the caller, to whom `step` and `flush` return
    [StepResult] of those read."""

    def __init__(self, config, log, model, process):
        self.config, self.log, self.process = config, log, process
        self.flops, self.peak = model.flops_per_token(config.sequence_length), peak_flops(process.device)
        self.names = [name for name, _ in model.named_parameters()]
        self.lag = 1 if process.device.startswith("cuda") else 0
        self.pending, self.seconds, self.steps, self.first, self.last = [], [], 0, None, None

    def start(self):
        """Before a step: starts the clock, unless a step still runs on the GPU, and the clock with it."""
        if not self.pending:
            self.clock = time.perf_counter()

    def step(self, step, numbers, lr):
        """After a step was queued; `numbers` as train_step returns them."""
        self.pending.append((step, fetch(numbers), lr))
        return self.flush(self.lag)

    def flush(self, but=0):
        """Reads all but the newest `but` steps."""
        finished = []
        while len(self.pending) > but:
            finished.append(self._report(*self.pending.pop(0)))
        return finished

    def evaluation(self, step, kind, value, text):
        self.process.print0(f"step {step:5d} | {text}")
        if self.log:
            self.log.evaluation(step, kind, value)

    def _report(self, step, numbers, lr):
        with self.process.progress(f"step {step}"):
            loss, norm, first_bad = numbers()
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        self.seconds.append(dt)
        if step % self.config.log_every == 0 or step == self.config.max_steps - 1:
            rate = self.config.total_batch_size / dt
            mfu = rate * self.flops / self.peak / self.process.world_size if self.peak else None
            left = statistics.median(self.seconds[-20:]) * (self.config.max_steps - 1 - step)
            self.process.print0(step_line(step, loss, norm, lr, dt, rate, mfu, left))
        if self.log:
            self.log.step(step, loss, norm, lr, dt)
        self.last = StepResult(step, loss, norm, self.names[int(first_bad)] if first_bad >= 0 else "")
        self.steps, self.first = self.steps + 1, self.first or self.last
        return self.last

    def close(self):
        if self.log:
            self.log.close()

    def speed(self):
        """'median step 93.1 ms, 175,980 tokens/s, peak memory 22.1 GB' of this process's steps, or ''."""
        if not self.seconds:
            return ""
        median = statistics.median(self.seconds)
        return (f"median step {median * 1000:,.{0 if median >= 0.1 else 1}f} ms, "
                f"{self.config.total_batch_size / median:,.0f} tokens/s, "
                f"peak memory {peak_memory(self.process.device) / 1e9:.1f} GB")


class Profiler:
    """--profile: a trace of three steps of rank 0 for chrome://tracing or ui.perfetto.dev, and the
    costliest operations. It leaves out five steps, which compile and fill caches, and two in which the
    profiler warms up."""
    WAIT, WARMUP, ACTIVE = 5, 2, 3

    def __init__(self, config, process):
        self.config, self.process, self.inner = config, process, None
        if config.profile and process.is_master:
            self.order = f"self_{'cuda' if process.device.startswith('cuda') else 'cpu'}_time_total"
            steps = torch.profiler.schedule(wait=self.WAIT, warmup=self.WARMUP, active=self.ACTIVE, repeat=1)
            # CPU, and CUDA if there is one
            self.inner = torch.profiler.profile(schedule=steps, on_trace_ready=self._write)
            self.inner.start()

    def step(self):
        """After a step."""
        if self.inner:
            self.inner.step()

    def _write(self, profile):
        path, self.inner = Path(self.config.out) / "trace.json", None
        try:
            profile.export_chrome_trace(str(path))
        except OSError as error:
            self.process.print0(f"warning: no trace: {path} cannot be written ({error.strerror})")
            return
        table = profile.key_averages().table(sort_by=self.order, row_limit=12, max_name_column_width=50)
        self.process.print0(f"{table}\nsaved {path}: {self.ACTIVE} steps, for chrome://tracing or "
                            "ui.perfetto.dev")

    def close(self):
        if self.inner:
            self.inner.on_trace_ready = None
            self.inner.stop()
            steps = self.WAIT + self.WARMUP + self.ACTIVE
            self.process.print0(f"no trace: --profile needs {steps} steps, and this run had fewer")


def print_summary(run) -> int:
    """Prints how the run ended, how fast it was and where everything is. Returns its exit code."""
    config, state, process, signals = run.config, run.state, run.process, run.signals
    if speed := run.reporter.speed():
        process.print0(speed)
    if signals.stopped:
        then = "the same command goes on from there" if config.checkpoint_every else (
            "nothing was saved (--checkpoint_every 0)")
        process.print0(f"stopped by {signals.received or 'a signal'} after {state.step} of "
                       f"{config.max_steps} steps: {then}")
    elif config.overfit and run.reporter.steps:
        return overfit_verdict(run.reporter, process)
    else:
        newest = checkpoints(config.out)[-1:] if config.checkpoint_every else []
        files = {"log.txt": True, "metrics.csv": True, "loss.png": (Path(config.out) / "loss.png").exists(),
                 "checkpoints": newest}
        there = ", ".join(name for name, exists in files.items() if exists)
        process.print0(f"done: {state.step} steps; in {config.out}: {there}")
        if newest and config.vocab_size >= VOCAB_SIZE:
            process.print0(f"next: python sample.py --model {shlex.quote(str(newest[0][1]))}")
    return 0


def overfit_verdict(reporter: Reporter, process: Process) -> int:
    """Prints whether the sanity run overfitted its batch. Returns its exit code."""
    passed = reporter.last.loss < 0.1
    process.print0(f"overfit one batch: loss {reporter.first.loss:.4f} -> {reporter.last.loss:.4f} in "
                   f"{reporter.steps} steps: {'PASSED' if passed else 'FAILED (under 0.1 is expected)'}")
    return 0 if passed else 1
