"""Progress: a bar on a terminal, elsewhere a line now and then, and nothing for short work."""
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from shutil import get_terminal_size

QUIET = 10.0        # seconds of work before its first sign, and in its first minute between two lines


def duration(seconds: float) -> str:
    """'45 s', '12 min', '5.5 hours', '165 days'."""
    for unit, length, least in (("days", 86400, 48 * 3600), ("hours", 3600, 100 * 60), ("min", 60, 100)):
        if seconds >= least:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 10 or unit == "min" else f"{value:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


@dataclass
class Task:
    what: str
    total: int | None           # None: nothing to count, or with a `unit`, of an unknown number
    unit: str
    start: float
    due: float                  # time of its next sign
    done: int = 0

    def update(self, n: int = 1) -> None:
        self.done += n

    def __str__(self):
        of = f" of {self.total:,}" if self.total else ""
        count = f"{self.done:,}{of} {self.unit}, " if self.unit else ""
        return f"{self.what}: {count}{duration(time.monotonic() - self.start)} so far"


class Progress:
    """Shows the progress of work, once it takes more than ten seconds:

        with progress("validation", len(batches), "batches") as task:
            for batch in batches:
                task.update()

    A thread does it, because a single micro-step on a CPU can take longer. Of tasks within tasks the
    innermost that takes so long is shown. `say` prints a line where there is no terminal; by default on
    stderr."""

    def __init__(self, say: Callable[[str], None] | None = None, enabled: bool = True):
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.enabled, self.lock, self.tasks, self.thread = enabled, threading.Lock(), [], None
        self.shown = False                      # whether a bar is on the terminal

    @contextmanager
    def __call__(self, what: str, total: int | None = None, unit: str = "") -> Iterator[Task]:
        now = time.monotonic()
        task = Task(what, total, unit, now, now + QUIET)
        if self.enabled and not self.thread:
            self.thread = threading.Thread(target=self._watch, daemon=True, name="progress")
            self.thread.start()
        with self.lock:
            self.tasks.append(task)
        try:
            yield task
        finally:
            with self.lock, suppress(OSError):  # the terminal is closed
                self.tasks.remove(task)
                if self.shown:
                    self._draw("")

    def over(self, what: str, items: Sequence, unit: str) -> Iterator:
        """Yields the items, with progress shown."""
        with self(what, len(items), unit) as task:
            for item in items:
                yield item
                task.update()

    def _watch(self):
        while True:
            time.sleep(min(1.0, QUIET / 2))
            with self.lock, suppress(OSError):  # the reader of a pipe is gone
                now = time.monotonic()
                if due := [task for task in self.tasks if now >= task.due]:
                    self._show(due[-1], now)
                    for task in due:            # the outer ones have been spoken for
                        task.due = max(task.due, now + QUIET)

    def _show(self, task, now):
        if not sys.stderr.isatty():
            task.due = now + (QUIET if now - task.start < 6 * QUIET else 6 * QUIET)
            return self.say(str(task))
        from tqdm import tqdm
        self._draw(tqdm.format_meter(
            task.done, task.total, now - task.start, ncols=get_terminal_size().columns, prefix=task.what,
            unit=" " + task.unit, bar_format=None if task.total else "{desc}: {elapsed}"))

    def _draw(self, bar):
        print(f"\r\033[K{bar}", end="", file=sys.stderr, flush=True)
        self.shown = bool(bar)
