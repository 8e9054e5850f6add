"""log.txt, metrics.csv, console.log, status.json, dashboards, the profiler's trace."""
# torch, and what needs it, is imported where it is used: the process that draws loss.png does without
import csv
import io
import json
import math
import os
import re
import shlex
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from runtime.cli import RunError, UserError
from runtime.files import checkpoints, is_redirected_to, read_text, readable, replace_file, writable

COLUMNS = ("step", "tokens", "seconds", "train", "val", "hella", "lr", "norm", "tokens_per_second")
LONGEST = 1 << 30               # bytes of a log: ten million steps
ELSEWHERE = "remove it, or choose another --out"


def read_log(path: str | Path) -> list[tuple[int, str, float]]:
    """[(step, kind, value)] of the complete lines of a log.txt; a crash can cut off the last one."""
    with readable(path, ELSEWHERE):
        rows = [line.split() for line in read_text(path, LONGEST).splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal()
            and re.fullmatch(r"-?\d+\.\d{6}|-?inf|nan", row[2])]
    return [(int(step), kind, float(value)) for step, kind, value in rows]


def read_metrics(path: str | Path) -> list[dict]:
    """The complete rows of a run's metrics.csv: {column of COLUMNS: number, or None where the cell is empty}.
    ValueError for a file of another kind."""
    text = io.StringIO(read_text(path, LONGEST), newline="")
    lines = [line for line in text if line.endswith("\n")]            # a crash can cut off the last one
    reader = csv.DictReader(lines)
    try:
        return [{name: int(row[name]) for name in COLUMNS[:2]} | {"seconds": float(row["seconds"])}
                | {name: float(row[name]) if row[name] else None for name in COLUMNS[3:]} for row in reader]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"line {reader.line_num} is none of a run's metrics") from None


def wandb_id(out: str | Path, resumes: bool) -> str:
    """The id under which Weights & Biases knows this run: a resume finds it in OUT/wandb_id."""
    path = Path(out) / "wandb_id"
    if resumes:
        with suppress(OSError, ValueError):
            if re.fullmatch(r"[0-9a-f]{32}", known := read_text(path, 100).strip()):
                return known
    new = uuid.uuid4().hex
    replace_file(path, lambda file: file.write(f"{new}\n".encode()))
    return new


class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; OUT/metrics.csv, a row a
    step; also Weights & Biases and TensorBoard, if asked for.

    `step`, `evaluated`: of the state to resume from. What a crashed run logged after it is cut off: it
    happens again."""

    def __init__(self, config, step, evaluated):
        self.config, self.first, self.wandb, self.tensorboard = config, step, None, None
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
            wandb.init(project="gpt2", name=Path(config.out).name, config=asdict(config), resume="allow",
                       id=wandb_id(config.out, resumes=step > 0 or evaluated >= 0))
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(config.out, purge_step=step)
            for kind, value in self.cells.items():      # these stay, but the purge removes them too
                self.tensorboard.add_scalar(kind, value, step)

    def _open_metrics(self, step):
        """(metrics.csv cut after the row of step - 1, seconds of training up to there)."""
        path, kept, seconds = Path(self.config.out) / "metrics.csv", [",".join(COLUMNS) + "\n"], 0.0
        with readable(path, ELSEWHERE):
            old = read_text(path, LONGEST) if path.exists() else ""
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
        with writable(file.name, begun=True):
            file.write(line + "\n")
            file.flush()

    def close(self):
        """Evaluations after the last step have a row of their own."""
        if self.cells:
            with suppress(RunError):            # the disk is full; they are in log.txt, if anywhere
                self._row(self.evaluated)
        for file in filter(None, (self.file, self.metrics, self.tensorboard)):
            with suppress(OSError):             # the same disk: what could not be written was told before
                file.close()


class ConsoleLog:
    """OUT/console.log: what rank 0 prints, each line with the local time, its offset from UTC, and the host.
    OUT/status.json: where the run is, for scripts. What is printed before `open` is kept until then.

    Neither ends a run: where they cannot be written, a warning says so once."""
    EVERY = 1.0         # seconds, at least, between two status.json

    def __init__(self, process):
        self.process, self.host, self.lock = process, socket.gethostname(), threading.Lock()
        self.out, self.file, self.due, self.warned = None, None, 0.0, False
        self.early = deque(maxlen=1000)         # lines
        self.values = {"state": "running", "message": "", "step": 0, "max_steps": 0, "loss": None,
                       "val_loss": None}
        ranks = f" (rank 0 of {process.world_size})" if process.world_size > 1 else ""
        self(f"process {os.getpid()}{ranks}: {shlex.join(sys.orig_argv)}")

    def open(self, config, step: int) -> None:
        """Once --out is known to be this run's, which begins at `step`."""
        self.out = Path(config.out)
        self.values |= {"step": step, "max_steps": config.max_steps}
        if is_redirected_to(self.out / "console.log"):
            return self._write_status()
        # O_NONBLOCK: a named pipe of that name is no reason to wait
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
        with self._warning("console.log"):
            self.file = os.open(self.out / "console.log", how, 0o666)
        self._append("".join(self.early))
        self._write_status()

    def __call__(self, *args):
        """Takes what `print` takes."""
        before = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {self.host} "
        text = "".join(f"{before}{line}\n" for line in " ".join(map(str, args)).splitlines())
        if not self.out:
            self.early.append(text)
            return
        self._append(text)
        if time.monotonic() >= self.due:
            self._write_status()

    def update(self, at_once: bool = False, **values) -> None:
        """Values of status.json, written with the next line, however soon after the one before if
        `at_once`."""
        self.values |= values
        if at_once:
            self.due = 0.0

    def end(self, state: str, message: str = "") -> None:
        """`state`: done, stopped or failed."""
        self.values |= {"state": state, "message": message}
        if self.out:
            self._write_status(last=True)

    def failed(self, error: BaseException) -> None:
        known = isinstance(error, UserError | RunError)
        text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}"
        self(f"{Path(sys.argv[0]).name}: {text}" if known else "".join(traceback.format_exception(error)))
        self.end("failed", text)

    def _append(self, text):
        if self.file is not None:
            with self._warning("console.log"):
                os.write(self.file, text.encode(errors="replace"))      # at once: threads print, too

    def _write_status(self, last=False):
        """Atomically, but not durable as replace_file is: an fsync a second would cost a fast run time."""
        self.due = time.monotonic() + self.EVERY
        if not self.lock.acquire(timeout=float(last)):  # another thread writes it
            return
        temporary = self.out / f"status.json.{os.getpid()}.tmp"
        try:
            newest, now = checkpoints(self.out)[-1:], time.time()
            values = self.values | {
                "checkpoint": str(newest[0][1]) if newest else None, "unix_time": round(now, 3),
                "time": datetime.fromtimestamp(now).astimezone().isoformat(timespec="seconds"),
                "host": self.host, "pid": os.getpid()}
            # JSON has no NaN
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                      for k, v in values.items()}
            with self._warning("status.json"):
                temporary.write_text(json.dumps(values) + "\n")
                os.replace(temporary, self.out / "status.json")
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self.lock.release()

    @contextmanager
    def _warning(self, name):
        try:
            yield
        except OSError as error:
            warned, self.warned = self.warned, True
            if not warned:
                self.process.print0(f"warning: {self.out / name} cannot be written ({error.strerror}); the "
                                    "run continues")

    def close(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None


@contextmanager
def recorded(process):
    """Around a run: rank 0's console.log and status.json hold how it ended."""
    if not process.is_master:
        yield
        return
    process.console = ConsoleLog(process)
    try:
        yield
    except BaseException as error:
        process.console.failed(error)
        raise
    finally:
        process.console.close()
        process.console = None


class Profiler:
    """--profile: a trace of three steps of rank 0 for chrome://tracing or ui.perfetto.dev, and the
    costliest operations. It leaves out five steps, which compile and fill caches, and two in which the
    profiler warms up."""
    WAIT, WARMUP, ACTIVE = 5, 2, 3

    def __init__(self, config, process):
        self.config, self.process, self.inner = config, process, None
        if config.profile and process.is_master:
            import torch
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
