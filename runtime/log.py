"""log.txt, metrics.csv, console.log, status.json, dashboards, the profiler's trace."""
# torch, and what needs it, is imported where it is used: the process that draws loss.png does without
import itertools
import json
import math
import os
import re
import shlex
import socket
import sys
import time
import traceback
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from runtime.cli import RunError, UserError
from runtime.files import checkpoints, is_redirected_to, read_text, readable, replace_file, writable

COLUMNS = ("step", "tokens", "seconds", "train", "val", "hella", "lr", "norm", "tokens_per_second")
EVENT = r"(\d+) (\w+) (-?\d+\.\d{6}|-?inf|nan)"       # a line of log.txt
LONGEST = 1 << 30               # bytes of a log: ten million steps
ELSEWHERE = "remove it, or choose another --out"


def read_log(path: str | Path) -> list[tuple[int, str, float]]:
    """[(step, kind, value)] of the complete lines of a log.txt; a crash can cut off the last one."""
    with readable(path, ELSEWHERE):
        events = [re.fullmatch(EVENT, line) for line in read_text(path, LONGEST).splitlines()]
        return [(int(event[1]), event[2], float(event[3])) for event in events if event]


def read_metrics(path: str | Path) -> list[dict]:
    """The complete rows of a run's metrics.csv: {column of COLUMNS: number, or None where the cell is empty}.
    ValueError for a file of another kind."""
    complete, rows = read_text(path, LONGEST).rpartition("\n")[0], []     # a crash can cut off the last line
    header, *lines = complete.splitlines() or [",".join(COLUMNS)]
    if header != ",".join(COLUMNS):
        raise ValueError("line 1 is none of a run's metrics")
    for number, line in enumerate(lines, 2):
        try:
            step, tokens, seconds, *rest = line.split(",")
            rest = [float(cell) if cell else None for cell in rest]
            rows.append(dict(zip(COLUMNS, (int(step), int(tokens), float(seconds), *rest), strict=True)))
        except ValueError:
            raise ValueError(f"line {number} is none of a run's metrics") from None
    return rows


def wandb_id(out: str | Path, resumes: bool) -> str:
    """The id under which Weights & Biases knows this run: a resume finds it in OUT/wandb_id."""
    path = Path(out) / "wandb_id"
    with suppress(OSError, ValueError):
        if resumes:
            return uuid.UUID(read_text(path, 100).strip()).hex
    new = uuid.uuid4().hex
    replace_file(path, lambda file: file.write(f"{new}\n".encode()))
    return new


def rewritten(path: Path, lines: list[str]):
    """The text file with these lines, open to append to."""
    if lines or path.exists():
        replace_file(path, lambda file: file.write("".join(f"{line}\n" for line in lines).encode()))
    return open(path, "a", encoding="utf-8")


class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; OUT/metrics.csv, a row a
    step; also Weights & Biases and TensorBoard, if asked for.

    `step`, `evaluated`: of the state to resume from. What a crashed run logged after it is cut off: it
    happens again."""

    def __init__(self, config, step, evaluated):
        self.config, self.first, self.wandb, self.tensorboard = config, step, None, None
        path = Path(config.out) / "log.txt"
        events = [(at, kind, value) for at, kind, value in (read_log(path) if path.exists() else [])
                  if (at < step if kind == "train" else at <= evaluated)]
        self.file = rewritten(path, [f"{at} {kind} {value:.6f}" for at, kind, value in events])
        # evaluations whose row waits for the training loss of the same step
        self.evaluated, self.cells = step, {kind: value for at, kind, value in events if at == step}
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
        path, kept, seconds = Path(self.config.out) / "metrics.csv", [",".join(COLUMNS)], 0.0
        with readable(path, ELSEWHERE):
            old = read_text(path, LONGEST) if path.exists() else ""
        for line in old.rpartition("\n")[0].splitlines():
            with suppress(ValueError):          # the header, the row after the last step
                at, _, before, *cells, rate = map(float, (cell or "nan" for cell in line.split(",")))
                if len(cells) == len(COLUMNS) - 4 and at < step and rate > 0:
                    kept.append(line)
                    seconds = before + self.config.total_batch_size / rate
        return rewritten(path, kept), seconds

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
            print(line, file=file, flush=True)

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
        self.process, self.early, self.writes = process, [], itertools.count()
        self.out, self.file, self.due, self.warned = None, None, 0.0, False
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.values = {"state": "running", "message": "", "step": 0, "max_steps": 0, "loss": None,
                       "val_loss": None, "host": socket.gethostname(), "pid": os.getpid(), "command": command}
        ranks = f" (rank 0 of {process.world_size})" if process.world_size > 1 else ""
        self(f"process {os.getpid()}{ranks}: {shlex.join(sys.orig_argv)}")

    def open(self, config, step: int) -> None:
        """Once --out is known to be this run's, which begins at `step`."""
        self.out = Path(config.out)
        if not is_redirected_to(self.out / "console.log"):
            # O_NONBLOCK: a named pipe of that name is no reason to wait
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
            with self._warning("console.log"):
                self.file = os.open(self.out / "console.log", how, 0o666)
        self._append("".join(self.early))
        self.update(step=step, max_steps=config.max_steps)
        self._write_status()

    def __call__(self, *args):
        """Takes what `print` takes."""
        before = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {self.values['host']} "
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
        self.values |= {name: None if isinstance(value, float) and not math.isfinite(value) else value
                        for name, value in values.items()}          # JSON has no NaN
        if at_once:
            self.due = 0.0

    def end(self, state: str, message: str = "") -> None:
        """`state`: done, stopped or failed."""
        self.update(state=state, message=message)
        if self.out:
            self._write_status()

    def _append(self, text):
        if self.file is not None:
            with self._warning("console.log"):
                os.write(self.file, text.encode(errors="replace"))      # at once: threads print, too

    def _write_status(self):
        """Atomically, but not durable as replace_file is: an fsync a second would cost a fast run time."""
        self.due = time.monotonic() + self.EVERY
        newest, now = checkpoints(self.out)[-1:], datetime.now().astimezone()
        self.update(checkpoint=str(newest[0][1]) if newest else None,
                    unix_time=round(now.timestamp(), 3), time=now.isoformat(timespec="seconds"))
        # each time another name: a thread or a signal may come in between
        temporary = self.out / f"status.json.{next(self.writes)}.tmp"
        with self._warning("status.json"):
            try:
                temporary.write_text(json.dumps(self.values) + "\n")
                os.replace(temporary, self.out / "status.json")
            finally:
                temporary.unlink(missing_ok=True)

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
    console = process.console = ConsoleLog(process)
    try:
        yield
    except BaseException as error:
        known = isinstance(error, UserError | RunError)
        text = " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}"
        console(f"{Path(sys.argv[0]).name}: {text}" if known else "".join(traceback.format_exception(error)))
        console.end("failed", text)
        raise
    finally:
        console.close()
        process.console = None


class Profiler:
    """--profile: a trace of three steps of rank 0 for chrome://tracing or ui.perfetto.dev, and the
    costliest operations. It leaves out five steps, which compile and fill caches, and two in which the
    profiler warms up."""
    STEPS = dict(wait=5, warmup=2, active=3)

    def __init__(self, config, process):
        self.path, self.process, self.inner = Path(config.out) / "trace.json", process, None
        if config.profile and process.is_master:
            from torch.profiler import profile, schedule
            # of the CPU, and of CUDA if there is one
            self.inner = profile(schedule=schedule(**self.STEPS, repeat=1), on_trace_ready=self._write)
            self.inner.start()

    def step(self):
        """After a step."""
        if self.inner:
            self.inner.step()

    def _write(self, profile):
        self.inner = None
        order = f"self_{'cuda' if self.process.device.startswith('cuda') else 'cpu'}_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=50)
        profile.export_chrome_trace(str(self.path))     # where it cannot, it only says why on stderr
        said = f"saved {self.path}: {self.STEPS['active']} steps, for chrome://tracing or ui.perfetto.dev"
        if not self.path.is_file():
            said = f"warning: no trace: {self.path} cannot be written"
        self.process.print0(f"{table}\n{said}")

    def close(self):
        if self.inner:
            self.inner.on_trace_ready = None
            self.inner.stop()
            self.process.print0(f"no trace: --profile needs {sum(self.STEPS.values())} steps, and this run "
                                "had fewer")
