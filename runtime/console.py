"""What a run prints and records: the console, OUT/metrics.csv and OUT/log.txt, Weights & Biases."""
import math
import shlex
import statistics
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from runtime.cli import RunError, import_package, said_once
from runtime.dataloader import divide_update
from runtime.device import device_name, least_cpu_seconds, peak_flops, peak_memory, time_micro_step
from runtime.files import checkpoints, newest_of, read_text, readable, replace_file, sync, writable

FORMATS = dict(step="d", tokens="d", seconds=".3f", train=".6f", val=".6f", hella=".6f", lr=".6g",
               norm=".4f", tokens_per_second=".6g")         # of metrics.csv's cells
HEADER = ",".join(FORMATS)
DAY = 24 * 60 * 60          # seconds


def clock(seconds: float) -> str:
    """'0:05:00', '2 days, 1:00:00'."""
    return str(timedelta(seconds=min(round(seconds), 10**10)))


def counted(n: int, what: str) -> str:
    """'1 step', '2 steps', '8 processes'."""
    return f"{n:,} {what}" + ("" if n == 1 else "es" if what.endswith("s") else "s")


def step_line(step: int, loss: float, norm: float, lr: float, dt: float, rate: float, mfu: float | None,
              left: float) -> str:
    """The console's line of a step. `dt`, `left`: seconds; `rate`: tokens/s."""
    return (f"step {step:5d} | loss: {loss:.4f} | lr {lr:.2e} | norm: {norm:.2f} | dt: {dt * 1000:.1f}ms | "
            f"tok/sec: {rate:,.0f}{f' | mfu {mfu:.0%}' if mfu else ''} | {clock(left)} left")


def read_metrics(path: str | Path, remedy: str = "remove it, or choose another --out") -> list[dict]:
    """The complete rows of a metrics.csv: {column of FORMATS: number, or None where the cell is empty}. A
    crash can cut off the last one. UserError for a file of another kind."""
    with readable(path, remedy):
        header, *lines = read_text(path).rpartition("\n")[0].splitlines() or [""]
        if header != HEADER:
            raise ValueError("its first line does not name the columns of a run's metrics")
        return [{name: (int if form == "d" else float)(cell) if cell or name in ("step", "seconds") else None
                 for (name, form), cell in zip(FORMATS.items(), line.split(","), strict=True)}
                for line in lines]


def lowest(rows: list[dict], steps: Collection[int] | None = None) -> tuple[float, int] | None:
    """(validation loss, step) of the lowest one, the earliest of equals; of `steps` alone, if given."""
    return min(((row["val"], row["step"]) for row in rows if row["val"] is not None
                and math.isfinite(row["val"]) and (steps is None or row["step"] in steps)), default=None)


def row_line(row: dict) -> str:
    return ",".join("" if row[name] is None else format(row[name], form) for name, form in FORMATS.items())


class Record:
    """OUT/metrics.csv, a row a step: a resume, the best checkpoint and the picture read it. Beside it
    OUT/log.txt, a line an event, and Weights & Biases, if asked for. In a step val and hella precede train.
    A run that resumes at `step` cuts off the rows after it, and keeps the evaluations of `step` itself.
    UserError if metrics.csv is damaged."""

    def __init__(self, out: str | Path, step: int, tokens_per_step: int, config: dict | None = None,
                 wandb: bool = False):
        self.out, self.tokens_per_step, self.wandb, self.rows = Path(out), tokens_per_step, None, []
        self.picture_due = 0.0                  # of OUT/loss.png
        if step and (self.out / "metrics.csv").exists():
            self.rows = [row for row in read_metrics(self.out / "metrics.csv") if row["step"] <= step]
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1] |= dict.fromkeys(("train", "lr", "norm", "tokens_per_second"))
        texts = {"metrics.csv": [HEADER, *map(row_line, self.rows)],
                 "log.txt": [f"{row['step']} {kind} {row[kind]:.6f}" for row in self.rows
                             for kind in ("val", "hella", "train") if row[kind] is not None]}
        for name, lines in texts.items():
            text = "".join(f"{line}\n" for line in lines).encode()
            replace_file(self.out / name, lambda file, text=text: file.write(text))
        self.table, self.events = (open(self.out / name, "a", newline="\n") for name in texts)
        if wandb:
            self.wandb = open_wandb(self.out.resolve(), config, resumes=step > 0)

    @property
    def seconds(self) -> float:
        """The time of the steps up to here."""
        row = self.rows[-1] if self.rows else dict.fromkeys(FORMATS, 0)
        rate = row["tokens_per_second"] or 0
        return row["seconds"] + (self.tokens_per_step / rate if rate > 0 else 0)

    def add(self, step: int, kind: str, value: float, **more: float) -> None:
        """`kind`: train, val or hella. `more`: other cells of the row."""
        end = self.table.tell()
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append(dict.fromkeys(FORMATS) | {
                "step": step, "tokens": step * self.tokens_per_step, "seconds": self.seconds})
        else:
            end -= len(row_line(self.rows[-1])) + 1                 # that row is rewritten
        self.rows[-1] |= {kind: round(value, 6), **more}            # as it will be read
        with writable(self.out, begun=True):
            self.table.truncate(end)            # what is killed here leaves a row out, never a mixture of two
            print(row_line(self.rows[-1]), file=self.table, flush=True)
            print(f"{step} {kind} {value:.6f}", file=self.events, flush=True)
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)

    def sync(self) -> None:
        """Before a checkpoint is written: a loss of power must not leave one beyond its record."""
        with writable(self.out, begun=True):
            for file in (self.table, self.events):
                sync(file.fileno())

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
    if not (resumes and path.exists()):
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    with readable("Weights & Biases", "wandb login, or leave --wandb out", problem="cannot be started"):
        wandb.init(project="gpt2", name=out.name, config=config, id=read_text(path, 100), resume="allow")
    return wandb


def print_header(run, path: Path | None, change: str = "") -> None:
    """What `run` will do; for --dry_run also how long, by one timed micro-step. `path`: the checkpoint's.
    `change`: what is not as in the run that it resumes."""
    c, process, say = run.config, run.process, run.process.print0
    ranks, updates, tokens = counted(process.world_size, "process"), c.updates_per_step, c.total_batch_size
    B, n = divide_update(c, updates, process.world_size, run.batch_size)
    epochs = c.max_steps * tokens / (run.data.train.total * c.sequence_length)
    every = {"validation": c.val_every, "HellaSwag": c.hellaswag_every, "checkpoint": c.checkpoint_every}
    say(f"{ranks} on {process.device} ({device_name(process.device)}), {c.dtype}, "
        f"{'torch.compile' if c.compile else 'eager'}, attention {c.attention}, torch {torch.__version__}")
    say(f"{c.recipe}: {sum(p.numel() for p in run.model.parameters()):,} parameters "
        f"({counted(c.n_layer, 'layer')}, {counted(c.n_head, 'head')}, width {c.n_embd}, "
        f"vocabulary {c.vocab_size}{f', window {c.window} inside documents' if c.window else ''})")
    say(f"{tokens:,} tokens a step = {B} x {c.sequence_length} x {counted(n * updates, 'micro-step')} x "
        f"{ranks}{f' in {updates} updates at first' if updates > 1 else ''}; {c.max_steps:,} steps = "
        f"{c.max_steps * tokens:,} tokens = {epochs:,.2f} epochs; max_lr {c.max_lr:g} after "
        f"{counted(c.warmup_steps, 'step')}, min_lr {c.min_lr:g}")
    say(", ".join(f"{what} {f'every {n:,} steps' if n else 'never'}" for what, n in every.items())
        + ("" if c.overfit else f", in {c.out}"))
    if path:
        say(f"resuming from {path} at step {run.step} of {c.max_steps}{change}")
    flops = (c.max_steps - run.step) * tokens * run.model.flops_per_token(c.sequence_length)
    if process.device == "cpu" and (least := least_cpu_seconds(flops, c.dtype, process.world_size)) > DAY:
        say(f"without a GPU this takes more than {counted(math.floor(least / DAY), 'day')}: --preset "
            "shakespeare is for a CPU and takes minutes, --dry_run tells how long this run takes")
    if c.dry_run:
        dt = time_micro_step(run, B) * n * updates
        say(f"about {dt:.3g} s a step, {clock(dt * (c.max_steps - run.step))} in all without evaluations; "
            "nothing was written, and the same command without --dry_run starts the run")


def what_resumes(run) -> str:
    """What the same command does next, when a checkpoint that is still being written is complete."""
    if run.saver:
        run.saver.finish()
    return newest_of(run.config.out)


def log_steps(run, keep: int = 0) -> None:
    """Prints and records the finished steps but the newest `keep`. RunError for a loss or gradient that is
    not finite; float16's scaler skips a step that overflows and lowers its scale, which is 65536 at first."""
    config, process = run.config, run.process
    while len(run.pending) > keep:
        step, numbers, lr = run.pending.popleft()
        loss, norm, stops = numbers()                   # on a GPU this waits for that step
        now = time.perf_counter()
        dt, run.clock = now - run.clock, now
        process.agreed |= stops > 0 and process.world_size > 1
        run.overflows = 0 if math.isfinite(norm) else run.overflows + 1
        if not math.isfinite(loss) or run.overflows > (25 if config.dtype == "float16" else 0):
            with said_once(process.is_master):
                raise RunError(f"step {step} is not finite: loss {loss}, gradient norm {norm}: lower "
                               f"--max_lr or lengthen --warmup_steps. {what_resumes(run)}")
        run.losses.append(loss)
        run.seconds.append(dt)
        rate, peak = config.total_batch_size / dt, peak_flops(process.device)
        mfu = peak and rate * run.model.flops_per_token(config.sequence_length) / process.world_size / peak
        left = statistics.median(run.seconds[-20:]) * (config.max_steps - 1 - step)
        process.print0(step_line(step, loss, norm, lr, dt, rate, mfu, left))
        if run.record:
            run.record.add(step, "train", loss, norm=norm, lr=lr, tokens_per_second=rate)


def log_evaluation(run, kind: str, value: float, text: str) -> None:
    run.process.print0(f"step {run.step:5d} | {text}")
    if run.record:
        run.record.add(run.step, kind, value)


def in_bits(loss: float, data) -> str:
    """' (1.6543 bits per byte)' for a validation loss; '' where the tokens are not GPT-2's."""
    bits = loss * data.bits_per_byte
    return f" ({bits:.4f} bits per byte)" if math.isfinite(bits) else ""


def print_summary(run) -> int:
    """Prints how the run ended and where everything is. Returns its exit code."""
    config, process, say, losses = run.config, run.process, run.process.print0, run.losses
    if run.seconds:
        dt, peak = statistics.median(run.seconds), peak_memory(process.device) / 1e9
        say(f"median step {dt * 1000:,.1f} ms, {config.total_batch_size / dt:,.0f} tokens/s, "
            f"peak memory {peak:.1f} GB")
    if process.stop:
        say(f"stopped by {process.received or 'a signal'} after {run.step} of {config.max_steps} steps. "
            + newest_of(config.out) * (not config.overfit))
        return 0
    if config.overfit:
        passed = losses[-1] < 0.1
        say(f"overfit one batch: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps: "
            + ("PASSED\nnext: python fineweb.py --input input.txt --out data/shakespeare" if passed else
               "FAILED (under 0.1 is expected)"))
        return 0 if passed else 1
    saved = dict(checkpoints(config.out))
    say(f"done: {run.step} steps; in {config.out}: log.txt, metrics.csv, loss.png"
        + (", checkpoints" if saved else ""))
    if best := run.record and lowest(run.record.rows, saved):
        first, bits = run.record.rows[0]["val"] or math.nan, in_bits(best[0], run.data)
        say(f"best checkpoint: {saved[best[1]]}, validation loss {best[0]:.4f}{bits}, at first {first:.4f}")
    if saved:
        say(f"next: python sample.py --model {shlex.quote(config.out + '/best' * bool(best))}")
    return 0
