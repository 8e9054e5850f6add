"""What a run prints and records: the console, OUT/metrics.csv and OUT/log.txt, Weights & Biases."""
import math
import shlex
import statistics
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from runtime.device import device_name, peak_flops, peak_memory
from runtime.files import checkpoints, newest_of, read_text, readable, replace_file, sync, writable
from runtime.recipe import BatchSchedule, divide_batch

# The columns of metrics.csv, and how their numbers are written.
FORMATS = dict(step="d", tokens="d", seconds=".3f", train=".6f", val=".6f", hella=".6f", lr=".6g",
               norm=".4f", tokens_per_second=".6g")
HEADER = ",".join(FORMATS)


def clock(seconds: float) -> str:
    """'0:05:00', '2 days, 1:00:00'."""
    return str(timedelta(seconds=min(round(seconds), 10**10)))


def counted(n: int, what: str) -> str:
    """'1 step', '2 steps', '8 processes'."""
    if n == 1:
        return f"1 {what}"
    plural = "es" if what.endswith("s") else "s"
    return f"{n:,} {what}{plural}"


# ----------------------------------------------------------------------- metrics.csv and log.txt

def read_metrics(path: str | Path, remedy: str = "remove it, or choose another --out") -> list[dict]:
    """The complete rows of a metrics.csv: {column of FORMATS: number, or None where the cell is
    empty}. A crash can cut off the last one. UserError for a file of another kind."""
    with readable(path, remedy):
        complete, _, _ = read_text(path).rpartition("\n")
        header, *lines = complete.splitlines() or [""]
        if header != HEADER:
            raise ValueError("its first line does not name the columns of a run's metrics")
        return [read_row(line) for line in lines]


def read_row(line: str) -> dict:
    row = {}
    for (name, form), cell in zip(FORMATS.items(), line.split(","), strict=True):
        if not cell and name not in ("step", "seconds"):
            row[name] = None
        elif form == "d":
            row[name] = int(cell)
        else:
            row[name] = float(cell)
    return row


def row_line(row: dict) -> str:
    cells = ["" if row[name] is None else format(row[name], form) for name, form in FORMATS.items()]
    return ",".join(cells)


def lowest(rows: list[dict], steps: Collection[int] | None = None) -> tuple[float, int] | None:
    """(validation loss, step) of the lowest one, the earliest of equals; of `steps` alone, if
    given."""
    found = []
    for row in rows:
        if row["val"] is None or not math.isfinite(row["val"]):
            continue
        if steps is None or row["step"] in steps:
            found.append((row["val"], row["step"]))
    return min(found, default=None)


class Record:
    """OUT/metrics.csv, a row a step: a resume, the best checkpoint and the picture read it. Beside
    it OUT/log.txt, a line an event, and Weights & Biases, if asked for. In a step val and hella
    precede train.

    A run that resumes at `step` cuts off the rows after it, and keeps the evaluations of `step`
    itself. `tokens_before` tells how many tokens a run has seen before a step. UserError if
    metrics.csv is damaged.
    """

    def __init__(self, out: str | Path, step: int, tokens_before: Callable[[int], int],
                 config: dict | None = None, wandb: bool = False):
        self.out = Path(out)
        self.tokens_before = tokens_before
        self.picture_due = 0.0                  # when plots.draw may make the next OUT/loss.png

        self.rows = []
        if step > 0 and (self.out / "metrics.csv").exists():
            rows = read_metrics(self.out / "metrics.csv")
            self.rows = [row for row in rows if row["step"] <= step]
        if self.rows and self.rows[-1]["step"] == step:
            # This step will be trained again.
            self.rows[-1].update(train=None, lr=None, norm=None, tokens_per_second=None)

        self.table = self._rewrite("metrics.csv", [HEADER, *map(row_line, self.rows)])
        self.events = self._rewrite("log.txt", self._event_lines())

        self.wandb = None
        if wandb:
            self.wandb = open_wandb(self.out.resolve(), config, resumes=step > 0)

    def _event_lines(self):
        lines = []
        for row in self.rows:
            for kind in ("val", "hella", "train"):
                if row[kind] is not None:
                    lines.append(f"{row['step']} {kind} {row[kind]:.6f}")
        return lines

    def _rewrite(self, name, lines):
        text = "".join(f"{line}\n" for line in lines)
        replace_file(self.out / name, lambda file: file.write(text.encode()))
        return open(self.out / name, "a", newline="\n")

    @property
    def seconds(self) -> float:
        """The time of all steps so far."""
        if not self.rows:
            return 0.0
        last = self.rows[-1]
        rate = last["tokens_per_second"] or 0.0
        if not rate > 0:
            return last["seconds"]
        tokens = self.tokens_before(last["step"] + 1) - self.tokens_before(last["step"])
        return last["seconds"] + tokens / rate

    def add(self, step: int, kind: str, value: float, **more: float) -> None:
        """`kind`: train, val or hella. `more`: other cells of the row."""
        end = self.table.tell()
        if self.rows and self.rows[-1]["step"] == step:
            end -= len(row_line(self.rows[-1])) + 1             # rewrite this row
        else:
            row = dict.fromkeys(FORMATS)
            row.update(step=step, tokens=self.tokens_before(step), seconds=self.seconds)
            self.rows.append(row)
        self.rows[-1].update(more)
        self.rows[-1][kind] = round(value, 6)                   # as it will be read again

        with writable(self.out, begun=True):
            # A kill between these lines leaves the row out, but never makes a mixture of two.
            self.table.truncate(end)
            print(row_line(self.rows[-1]), file=self.table, flush=True)
            print(f"{step} {kind} {value:.6f}", file=self.events, flush=True)
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)

    def sync(self) -> None:
        """Before a checkpoint is written: a loss of power must not leave one beyond its record."""
        with writable(self.out, begun=True):
            sync(self.table.fileno())
            sync(self.events.fileno())

    def close(self) -> None:
        for file in (self.table, self.events):
            with suppress(OSError):             # a full disk, which was told when the line was written
                file.close()
        if self.wandb:
            self.wandb.finish()


def open_wandb(out: Path, config: dict, resumes: bool):
    """The package wandb, with this run started, or resumed by the id in OUT/wandb_id."""
    import wandb

    path = out / "wandb_id"
    if not resumes or not path.exists():
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    with readable("Weights & Biases", "wandb login, or leave --wandb out", problem="cannot be started"):
        wandb.init(project="gpt2", name=out.name, config=config, id=read_text(path, 100), resume="allow")
    return wandb


# ----------------------------------------------------------------------------- the steps

def step_line(step: int, loss: float, norm: float, lr: float, dt: float, rate: float, mfu: float | None,
              left: float) -> str:
    """The console's line of a step. `dt`, `left`: seconds; `rate`: tokens/s."""
    parts = [f"step {step:5d}", f"loss: {loss:.4f}", f"lr {lr:.2e}", f"norm: {norm:.2f}",
             f"dt: {dt * 1000:,.1f}ms", f"tok/sec: {rate:,.0f}"]
    if mfu:
        parts.append(f"mfu {mfu:.0%}")
    parts.append(f"{clock(left)} left")
    return " | ".join(parts)


class StepLog:
    """Prints and records steps and evaluations, and does nothing else. `record`: None where nothing
    is written. `flops_per_token`: forward and backward."""

    def __init__(self, process, record: Record | None, schedule: BatchSchedule, flops_per_token: int):
        self.process = process
        self.record = record
        self.schedule = schedule
        self.flops_per_token = flops_per_token
        self.losses, self.seconds, self.rates = [], [], []      # of each step; rates: tokens/s
        self.last_time = 0.0                                    # when the step before was logged

    def step(self, step: int, loss: float, norm: float, lr: float, began: float) -> None:
        """`began`: time.perf_counter() at the beginning of the step. On a GPU it may begin before
        the numbers of the step before are there; then its time counts from that moment on."""
        now = time.perf_counter()
        dt = now - max(began, self.last_time)
        self.last_time = now
        rate = self.schedule.tokens(step) / dt
        self.losses.append(loss)
        self.seconds.append(dt)
        self.rates.append(rate)

        tokens_left = self.schedule.tokens_left(step + 1)
        left = tokens_left / statistics.median(self.rates[-20:])
        self.process.print0(step_line(step, loss, norm, lr, dt, rate, self.mfu(rate), left))
        if self.record:
            self.record.add(step, "train", loss, norm=norm, lr=lr, tokens_per_second=rate)

    def mfu(self, rate: float) -> float | None:
        """Model FLOPs utilisation: the share of the GPU's peak, None if that is not known."""
        peak = peak_flops(self.process.device)
        if peak is None:
            return None
        return rate * self.flops_per_token / self.process.world_size / peak

    def evaluation(self, step: int, kind: str, value: float, text: str) -> None:
        self.process.print0(f"step {step:5d} | {text}")
        if self.record:
            self.record.add(step, kind, value)

    def evaluated(self, step: int) -> set[str]:
        """The evaluations of this step that are recorded: of "val" and "hella"."""
        if self.record is None or not self.record.rows:
            return set()
        last = self.record.rows[-1]
        return {kind for kind in ("val", "hella") if last["step"] == step and last[kind] is not None}


# ----------------------------------------------------------------------- before and after them

def print_header(config, process, data, model, schedule, batch_size: int, start) -> None:
    """What the run will do."""
    c, say = config, process.print0
    processes = counted(process.world_size, "process")
    how = "torch.compile" if c.compile else "eager"
    say(f"{processes} on {process.device} ({device_name(process.device)}), {c.dtype}, {how}, "
        f"attention {c.attention}, torch {torch.__version__}")

    num_params = sum(p.numel() for p in model.parameters())
    shape = [counted(c.n_layer, "layer"), counted(c.n_head, "head"), f"width {c.n_embd}",
             f"vocabulary {c.vocab_size}"]
    if c.window:
        shape.append(f"window {c.window} inside documents")
    say(f"{c.recipe}: {num_params:,} parameters ({', '.join(shape)})")

    sequences = c.total_batch_size // c.sequence_length
    B, micro_steps = divide_batch(sequences, process.world_size, batch_size)
    batch = f"{B} x {c.sequence_length} x {counted(micro_steps, 'micro-step')} x {processes}"
    if c.initial_batch_size < c.total_batch_size:
        batch += f", {c.initial_batch_size:,} at first"
    tokens = schedule.tokens_before(c.max_steps)
    epochs = tokens / c.sequence_length / data.train.total
    rates = f"max_lr {c.max_lr:g} after {counted(c.warmup_steps, 'step')}, min_lr {c.min_lr:g}"
    say(f"{c.total_batch_size:,} tokens a step = {batch}; {c.max_steps:,} steps = {tokens:,} tokens = "
        f"{epochs:,.2f} epochs; {rates}")

    periods = {"validation": c.val_every, "HellaSwag": c.hellaswag_every,
               "checkpoint": c.checkpoint_every}
    plans = [f"{what} every {n:,} steps" if n else f"{what} never" for what, n in periods.items()]
    if not c.overfit:
        plans.append(f"in {c.out}")
    say(", ".join(plans))

    if start.path:
        say(f"resuming from {start.path} at step {start.step} of {c.max_steps}")


def print_estimate(config, process, tokens_left: int, rate: float) -> None:
    """How long the run will take, for --dry_run, at `rate` tokens/s of all ranks."""
    process.print0(
        f"about {config.total_batch_size / rate:.3g} s a step, {clock(tokens_left / rate)} in all without "
        "evaluations; nothing was written, and the same command without --dry_run starts the run")


def in_bits(loss: float, data) -> str:
    """' (1.6543 bits per byte)' for a validation loss; '' where the tokens are not GPT-2's."""
    bits = loss * data.bits_per_byte
    if not math.isfinite(bits):
        return ""
    return f" ({bits:.4f} bits per byte)"


def print_summary(config, process, data, log: StepLog, step: int, stopped: bool) -> int:
    """Prints how the run ended and where everything is. Returns its exit code."""
    say = process.print0
    if log.seconds:
        dt, rate = statistics.median(log.seconds), statistics.median(log.rates)
        memory = peak_memory(process.device)
        say(f"median step {dt * 1000:,.1f} ms, {rate:,.0f} tokens/s, peak memory {memory / 1e9:.1f} GB")

    if stopped:
        hint = "" if config.overfit else newest_of(config.out)
        say(f"stopped by {process.received or 'a signal'} after {step} of {config.max_steps} steps. {hint}")
        return 0
    if config.overfit:
        return print_overfit(say, log.losses)

    saved = dict(checkpoints(config.out))
    files = "log.txt, metrics.csv, loss.png"
    if saved:
        files += ", checkpoints"
    say(f"done: {step} steps; in {config.out}: {files}")
    if not saved:
        return 0

    best = lowest(log.record.rows, saved) if log.record else None
    model = config.out
    if best:
        loss, best_step = best
        first_loss = log.record.rows[0]["val"] or math.nan
        say(f"best checkpoint: {saved[best_step]}, validation loss {loss:.4f}{in_bits(loss, data)}, "
            f"at first {first_loss:.4f}")
        model += "/best"
    say(f"next: python sample.py --model {shlex.quote(model)}")
    return 0


def print_overfit(say: Callable, losses: list[float]) -> int:
    passed = losses[-1] < 0.1
    verdict = "FAILED (under 0.1 is expected)"
    if passed:
        verdict = "PASSED\nnext: python fineweb.py --input input.txt --out data/shakespeare"
    say(f"overfit one batch: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps: {verdict}")
    return 0 if passed else 1
