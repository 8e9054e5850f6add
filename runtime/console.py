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

from runtime.cli import import_package
from runtime.device import device_name, least_cpu_seconds, peak_flops, peak_memory
from runtime.files import checkpoints, read_text, reading, replace_file, sync, writing
from runtime.recipe import BatchSchedule

# The columns of metrics.csv, and how their numbers are written.
FORMATS = {
    "step": "d",
    "tokens": "d",
    "seconds": ".3f",
    "train": ".6f",
    "val": ".6f",
    "hella": ".6f",
    "lr": ".6g",
    "norm": ".4f",
    "tokens_per_second": ".6g",
}
HEADER = ",".join(FORMATS)

DAY = 24 * 60 * 60          # seconds
RECENT_STEPS = 20           # whose median speed tells the time left
OVERFIT_LOSS = 0.1          # below this, --overfit has passed


def clock(seconds: float) -> str:
    """'0:05:00', '2 days, 1:00:00'."""
    return str(timedelta(seconds=min(round(seconds), 10**10)))          # timedelta holds no more


def counted(n: int, what: str) -> str:
    """'1 step', '2 steps', '8 processes'."""
    if n == 1:
        return f"1 {what}"
    plural = "es" if what.endswith("s") else "s"
    return f"{n:,} {what}{plural}"


# ----------------------------------------------------------------------- metrics.csv and log.txt

def read_metrics(
    path: str | Path, remedy: str = "remove the file, or choose another --out"
) -> list[dict]:
    """The complete rows of a metrics.csv, each {column: number, or None where the cell is empty}.

    UserError with `remedy` for a file of another kind.
    """
    with reading(path, remedy):
        complete, _, _ = read_text(path).rpartition("\n")       # a crash can cut off the last line
        header, *lines = complete.splitlines() or [""]
        if header != HEADER:
            raise ValueError(f"its first line: expected {HEADER}, found {header[:80]!r}")
        return [read_row(line) for line in lines]


def read_row(line: str) -> dict:
    row = {}
    for (name, form), cell in zip(FORMATS.items(), line.split(","), strict=True):
        if cell == "" and name not in ("step", "tokens", "seconds"):
            row[name] = None
        elif form == "d":
            row[name] = int(cell)
        else:
            row[name] = float(cell)
    return row


def row_line(row: dict) -> str:
    cells = []
    for name, form in FORMATS.items():
        cell = ""
        if row[name] is not None:
            cell = format(row[name], form)
        cells.append(cell)
    return ",".join(cells)


def lowest(rows: list[dict], steps: Collection[int] | None = None) -> tuple[float, int] | None:
    """(validation loss, step) of the lowest loss, the earliest of equal ones. None if there is none.

    With `steps`, only the rows of these steps count.
    """
    losses = []
    for row in rows:
        if row["val"] is None or not math.isfinite(row["val"]):
            continue
        if steps is None or row["step"] in steps:
            losses.append((row["val"], row["step"]))
    return min(losses, default=None)


class Record:
    """OUT/metrics.csv, OUT/log.txt and Weights & Biases: what a run has measured.

    metrics.csv has one row for each step; a resume, the best checkpoint and the picture read it.
    log.txt has one line for each event. The evaluations of a step come before its training.

    A run that resumes at `step` cuts off the rows after it, and keeps the evaluations of `step`
    itself. `tokens_before` tells how many tokens a run has seen before a step. UserError if
    metrics.csv is damaged.
    """

    def __init__(
        self,
        out: str | Path,
        step: int,
        tokens_before: Callable[[int], int],
        config: dict | None = None,
        wandb: bool = False,
    ):
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
        # The `seconds` of a row are those before its step. The step itself follows from its rate, if
        # it was trained.
        if not self.rows:
            return 0.0
        last = self.rows[-1]
        rate = last["tokens_per_second"] or 0.0
        if not rate > 0:
            return last["seconds"]
        tokens = self.tokens_before(last["step"] + 1) - self.tokens_before(last["step"])
        return last["seconds"] + tokens / rate

    def add(self, step: int, kind: str, value: float, **more: float) -> None:
        """Records `value` of `kind` (train, val or hella) in the row of `step`.

        `more`: other cells of that row.
        """
        end = self.table.tell()
        if self.rows and self.rows[-1]["step"] == step:
            end -= len(row_line(self.rows[-1])) + 1             # rewrite this row
        else:
            row = dict.fromkeys(FORMATS)
            row.update(step=step, tokens=self.tokens_before(step), seconds=self.seconds)
            self.rows.append(row)
        self.rows[-1].update(more)
        self.rows[-1][kind] = round(value, 6)                   # as it will be read again

        with writing(self.out, begun=True):
            # After a kill between truncate and print the row is missing, but never half of it.
            self.table.truncate(end)
            print(row_line(self.rows[-1]), file=self.table, flush=True)
            print(f"{step} {kind} {value:.6f}", file=self.events, flush=True)
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)

    def sync(self) -> None:
        """Forces both files to the disk."""
        with writing(self.out, begun=True):
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
    wandb = import_package("wandb")
    path = out / "wandb_id"
    if not resumes or not path.exists():
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    remedy = "run `wandb login`, or leave --wandb out"
    with reading("Weights & Biases", remedy, problem="cannot start"):
        wandb.init(
            project="gpt2",
            name=out.name,
            config=config,
            id=read_text(path, 100),
            resume="allow",
        )
    return wandb


# ----------------------------------------------------------------------------- the steps

def step_line(
    step: int,
    loss: float,
    norm: float,
    lr: float,
    dt: float,
    rate: float,
    mfu: float | None,
    left: float,
) -> str:
    """The console's line of a step. `dt` and `left` are seconds, `rate` is tokens per second."""
    parts = [
        f"step {step:5d}",
        f"loss: {loss:.4f}",
        f"lr {lr:.2e}",
        f"norm: {norm:.2f}",
        f"dt: {dt * 1000:.1f}ms",
        f"tok/sec: {rate:,.0f}",
    ]
    if mfu:
        parts.append(f"mfu {mfu:.0%}")
    parts.append(f"{clock(left)} left")
    return " | ".join(parts)


class StepLog:
    """Prints and records steps and evaluations, with the time that they take.

    `record` is None where nothing is written. `flops_per_token`: forward and backward.
    """

    def __init__(
        self, process, record: Record | None, schedule: BatchSchedule, flops_per_token: int
    ):
        self.process = process
        self.record = record
        self.schedule = schedule
        self.flops_per_token = flops_per_token
        self.losses, self.seconds, self.seconds_per_token = [], [], []          # of each step
        self.last_time = 0.0                                    # when the step before was logged

    def step(self, step: int, loss: float, norm: float, lr: float, began: float) -> None:
        """`began`: time.perf_counter() at the beginning of the step."""
        # On a GPU a step is launched while the one before it runs: then its time counts from the
        # end of that one.
        now = time.perf_counter()
        dt = now - max(began, self.last_time)
        self.last_time = now

        tokens = self.schedule.tokens(step)
        rate = tokens / dt
        self.losses.append(loss)
        self.seconds.append(dt)
        self.seconds_per_token.append(dt / tokens)

        tokens_left = self.schedule.tokens_left(step + 1)
        left = tokens_left * statistics.median(self.seconds_per_token[-RECENT_STEPS:])
        self.process.print0(step_line(step, loss, norm, lr, dt, rate, self.mfu(rate), left))
        if self.record:
            self.record.add(step, "train", loss, norm=norm, lr=lr, tokens_per_second=rate)

    def mfu(self, rate: float) -> float | None:
        """Model FLOPs utilisation: the share of the GPUs' peak; None if the peak is not known."""
        peak = peak_flops(self.process.device)
        if peak is None:
            return None
        return rate * self.flops_per_token / self.process.world_size / peak

    def evaluation(self, step: int, kind: str, value: float, text: str) -> None:
        """Prints `text`, and records `value` as this step's `kind` (val or hella)."""
        self.process.print0(f"step {step:5d} | {text}")
        if self.record:
            self.record.add(step, kind, value)

    def evaluated(self, step: int) -> set[str]:
        """The evaluations of this step that are recorded already: "val", "hella", both or none.

        A run that resumes does not repeat them.
        """
        if self.record is None or not self.record.rows:
            return set()
        last = self.record.rows[-1]
        if last["step"] != step:
            return set()
        return {kind for kind in ("val", "hella") if last[kind] is not None}


# ----------------------------------------------------------------------- header and summary

def print_header(
    config, process, data, model, schedule: BatchSchedule, B: int, start, change: str
) -> None:
    """What the run will do.

    `B`: sequences of a micro-batch. `change`: text that ends the line of a run that resumes.
    """
    c, say = config, process.print0
    processes = counted(process.world_size, "process")
    how = "torch.compile" if c.compile else "eager"
    say(f"{processes} on {process.device} ({device_name(process.device)}), {c.dtype}, {how}, "
        f"attention {c.attention}, torch {torch.__version__}")

    num_params = sum(p.numel() for p in model.parameters())
    shape = [
        counted(c.n_layer, "layer"),
        counted(c.n_head, "head"),
        f"width {c.n_embd}",
        f"vocabulary {c.vocab_size}",
    ]
    say(f"{c.recipe}: {num_params:,} parameters ({', '.join(shape)})")

    first_batch, last_batch = schedule.tokens(0), schedule.tokens(c.max_steps - 1)
    micro_steps = last_batch // (B * c.sequence_length * process.world_size)
    batch = f"{B} x {c.sequence_length} x {counted(micro_steps, 'micro-step')} x {processes}"
    if first_batch < last_batch:
        batch += f", {first_batch:,} at first"
    tokens = schedule.tokens_before(c.max_steps)
    epochs = tokens / c.sequence_length / data.train.total
    say(f"{last_batch:,} tokens per step = {batch}; {c.max_steps:,} steps = {tokens:,} tokens = "
        f"{epochs:,.2f} epochs; {learning_rates(c)}")

    say(", ".join(plans(c)))
    if start.path:
        say(f"resuming from {start.path} at step {start.step} of {c.max_steps}{change}")

    flops = schedule.tokens_left(start.step) * model.flops_per_token(c.sequence_length)
    least = least_cpu_seconds(flops, c.dtype, process.world_size)
    if process.device == "cpu" and least > DAY:
        say(f"without a GPU this run takes more than {counted(math.floor(least / DAY), 'day')}: "
            "try --preset shakespeare, which takes minutes on a CPU, or --dry_run for an estimate")


def learning_rates(config) -> str:
    """The largest learning rate, when the warm-up reaches it, and the last one."""
    warmup = counted(config.warmup_steps, "step")
    if config.warmup_steps > config.max_steps:
        warmup += " (more than the run has)"
    return f"max_lr {config.max_lr:g} after {warmup}, min_lr {config.min_lr:g}"


def plans(config) -> list[str]:
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
        texts.append(f"{what} {when}")
    if not config.overfit:
        texts.append(f"output in {config.out}")
    return texts


def print_estimate(config, process, tokens_left: int, rate: float) -> None:
    """How long the run will take, for --dry_run, at `rate` tokens per second of all ranks."""
    process.print0(
        f"about {config.total_batch_size / rate:.3g} s per step, {clock(tokens_left / rate)} in all "
        "without evaluations; nothing was written, and the same command without --dry_run starts "
        "the run")


def in_bits(loss: float, data) -> str:
    """' (1.6543 bits per byte)' for a validation loss; '' where the tokens are not GPT-2's."""
    bits = loss * data.bits_per_byte
    if not math.isfinite(bits):
        return ""
    return f" ({bits:.4f} bits per byte)"


def print_summary(config, process, data, log: StepLog, output, step: int, stopped: bool) -> int:
    """Prints how the run ended and where everything is. Returns its exit code."""
    say = process.print0
    if log.seconds:
        dt, rate = statistics.median(log.seconds), 1 / statistics.median(log.seconds_per_token)
        memory = peak_memory(process.device)
        say(f"median step {dt * 1000:,.1f} ms, {rate:,.0f} tokens/s, "
            f"peak memory {memory / 1e9:.1f} GB")

    if stopped:
        hint = ""
        if not config.overfit:
            hint = output.what_resumes()
        cause = process.received
        if not cause:
            cause = "a signal"                  # another rank received it
        say(f"stopped by {cause} after {step} of {config.max_steps} steps. {hint}")
        return 0
    if config.overfit:
        return print_overfit(say, log.losses)

    saved = dict(checkpoints(config.out))
    files = [name for name in ("log.txt", "metrics.csv", "loss.png") if (output.out / name).exists()]
    if saved:
        files.append("checkpoints")
    say(f"done: {step} steps; {config.out} has {', '.join(files)}")
    if saved and log.record:
        print_best(config, data, log.record.rows, saved, say)
    return 0


def print_best(config, data, rows: list[dict], saved: dict[int, Path], say: Callable) -> None:
    """The best checkpoint of `saved`, {step: path}, and the command that samples from it."""
    best = lowest(rows, saved)
    model = config.out
    if best:
        loss, step = best
        first_loss = rows[0]["val"]
        at_first = ""
        if first_loss is not None:
            at_first = f", {first_loss:.4f} at step {rows[0]['step']}"
            if first_loss < loss:
                at_first += "; training has raised the loss: lower --max_lr"
        say(f"best checkpoint: {saved[step]}, validation loss {loss:.4f}{in_bits(loss, data)}"
            f"{at_first}")
        model += "/best"
    say(f"next: python sample.py --model {shlex.quote(model)}")


def print_overfit(say: Callable, losses: list[float]) -> int:
    """The verdict of --overfit. Returns the exit code."""
    passed = losses[-1] < OVERFIT_LOSS
    verdict = f"FAILED (expected a loss below {OVERFIT_LOSS})"
    if passed:
        verdict = "PASSED\nnext: python fineweb.py --input input.txt --out data/shakespeare"
    say(f"overfit one batch: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps: "
        f"{verdict}")
    if passed:
        return 0
    return 1
