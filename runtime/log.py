"""log.txt, the console, dashboards, the profiler's trace."""
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from runtime.checkpoint import archive_checkpoints, checkpoints
from runtime.cli import RunError
from runtime.dataloader import TokenLoader
from runtime.device import peak_flops
from runtime.distributed import Process, StopSignals
from runtime.files import replace_file, writable
from runtime.tokenizer import VOCAB_SIZE


def read_log(path: str | Path) -> list[tuple[int, str, float]]:
    """[(step, kind, value)] of the complete lines of a log.txt; a crash can cut off the last one."""
    rows = [line.split() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()
            and re.fullmatch(r"-?\d+\.\d{6}|-?inf|nan", row[2])]
    return [(int(step), kind, float(value)) for step, kind, value in rows]


class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; also to Weights &
    Biases and TensorBoard, if asked for."""

    def __init__(self, config, step):
        self.wandb = self.tensorboard = None
        path = Path(config.out) / "log.txt"
        if path.exists():
            # steps that a crashed run logged after its last checkpoint are run again; evaluations at the
            # checkpoint's own step were made before it was written, and stay
            kept = [f"{at} {kind} {value:.6f}\n" for at, kind, value in read_log(path)
                    if at < step + (kind != "train" and step > 0)]
            replace_file(path, lambda file: file.write("".join(kept).encode()))
        self.file = open(path, "a", encoding="utf-8")
        if config.wandb:
            import wandb
            self.wandb = wandb
            wandb.init(project="gpt2", name=Path(config.out).name, config=asdict(config), resume="allow")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(config.out, purge_step=step)
            for at, kind, value in read_log(path):
                if at == step:                  # these stay, but the purge removes them too
                    self.tensorboard.add_scalar(kind, value, at)

    def write(self, step, kind, value, **more):
        try:
            self.file.write(f"{step} {kind} {value:.6f}\n")
            self.file.flush()
        except OSError as error:
            raise RunError(f"cannot write {self.file.name}: {error.strerror}. Make room, and the same "
                           "command goes on from the newest checkpoint") from None
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)
        if self.tensorboard:
            for name, number in {kind: value, **more}.items():
                self.tensorboard.add_scalar(name, number, step)


def open_output(config, path: Path | None, step: int, process: Process) -> Log | None:
    """On rank 0 the log in --out. What another run left there is archived, never lost."""
    if not process.is_master:
        return None
    with writable(config.out):
        if folder := archive_checkpoints(config, path, step):
            process.print0("checkpoints of another run, or later than the one to go on from, are now in "
                           f"{folder}")
        for stale in Path(config.out).glob("*.tmp"):
            stale.unlink()
        return Log(config, step)


@dataclass
class StepResult:
    """What a finished step came to, the same on all ranks."""
    step: int
    loss: float                 # nats
    norm: float                 # of the gradient, before clipping
    first_bad: str              # name of the first parameter with a non-finite gradient, "" if there is none
    stop: bool                  # whether some rank has received a signal

    def __str__(self):
        where = f"; the first non-finite gradient is that of {self.first_bad}" if self.first_bad else ""
        return f"step {self.step}: loss {self.loss}, gradient norm {self.norm}{where}"


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
        done = None
        if self.lag:  # through pinned memory: whoever reads it waits for this step, not for what follows
            numbers, done = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            done.record()
        self.pending.append((step, numbers, lr, done))
        return self.flush(self.lag)

    def flush(self, but=0):
        """Reads all but the newest `but` steps."""
        finished = []
        while len(self.pending) > but:
            finished.append(self._report(*self.pending.pop(0)))
        return finished

    def event(self, step, kind, value, line):
        self.process.print0(line)
        if self.log:
            self.log.write(step, kind, value)

    def _report(self, step, numbers, lr, done):
        if done:
            done.synchronize()
        loss, norm, first_bad, stop = numbers.tolist()
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        self.seconds = [*self.seconds[-19:], dt]
        rate = self.config.total_batch_size / dt
        mfu = f"{rate * self.flops / self.peak / self.process.world_size:.1%}" if self.peak else "n/a"
        left = sorted(self.seconds)[len(self.seconds) // 2] * (self.config.max_steps - 1 - step)
        self.process.print0(f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: "
                            f"{dt * 1000:.2f}ms | tok/sec: {rate:.2f} | mfu: {mfu} | left: "
                            f"{timedelta(seconds=round(min(left, 1e9)))}")
        if self.log:
            self.log.write(step, "train", loss, norm=norm, lr=lr)
        self.last = StepResult(step, loss, norm, self.names[int(first_bad)] if first_bad >= 0 else "",
                               stop > 0)
        self.steps, self.first = self.steps + 1, self.first or self.last
        return self.last


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


def print_header(config, model, compiled: Callable, loader: TokenLoader, process: Process) -> None:
    """The first lines of a run: where, what, and the arithmetic of the batch."""
    gpu = f" ({torch.cuda.get_device_name(process.device)})" if process.device.startswith("cuda") else ""
    process.print0(f"{process.world_size} process(es) on {process.device}{gpu}, {config.dtype}, "
                   f"{'eager' if compiled is model else 'torch.compile'}, attention {config.attention}, "
                   f"torch {torch.__version__}")
    process.print0(f"{config.recipe}: {sum(p.numel() for p in model.parameters()):,} parameters "
                   f"({config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
                   f"vocabulary {config.vocab_size}"
                   f"{f', window {config.window} inside documents' if config.window else ''})")
    tokens, epoch = config.max_steps * config.total_batch_size, loader.dataset.total * loader.dataset.T
    process.print0(f"{config.total_batch_size:,} tokens a step = {loader.B} x {config.sequence_length} x "
                   f"{loader.micro_steps} micro-step(s) x {process.world_size} process(es); "
                   f"{config.max_steps:,} steps = {tokens:,} tokens = {tokens / epoch:.2f} epochs")
    if config.warmup_steps > config.max_steps:
        process.print0(f"note: the warm-up of {config.warmup_steps} steps is longer than the run")


def print_summary(run, stopped: bool, signals: StopSignals) -> int:
    """Prints how the run ended and where everything is. Returns its exit code."""
    config, state, process = run.config, run.state, run.process
    if stopped:
        then = "the same command goes on from there" if config.checkpoint_every else (
            "nothing was saved (--checkpoint_every 0)")
        process.print0(f"stopped by {signals.received or 'a signal'} after {state.step} of "
                       f"{config.max_steps} steps: {then}")
    elif config.overfit and run.reporter.steps:
        return overfit_verdict(run.reporter, process)
    else:
        newest = checkpoints(config.out)[-1:] if config.checkpoint_every else []
        files = {"log.txt": True, "loss.png": (Path(config.out) / "loss.png").exists(), "checkpoints": newest}
        there = ", ".join(name for name, exists in files.items() if exists)
        process.print0(f"done: {state.step} steps; in {config.out}: {there}")
        if newest and config.vocab_size >= VOCAB_SIZE:
            process.print0(f"next: python sample.py --model {newest[0][1]}")
    return 0


def overfit_verdict(reporter: Reporter, process: Process) -> int:
    """Prints whether the sanity run overfitted its batch. Returns its exit code."""
    passed = reporter.last.loss < 0.1
    process.print0(f"overfit one batch: loss {reporter.first.loss:.4f} -> {reporter.last.loss:.4f} in "
                   f"{reporter.steps} steps: {'PASSED' if passed else 'FAILED (under 0.1 is expected)'}")
    return 0 if passed else 1
