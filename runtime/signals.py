"""SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2: stop at the next micro-step, or save."""
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from runtime.device import fetch
from runtime.distributed import Process, leave_closed_terminal


class StopSignals:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 (Slurm's warning) request a stop at the next micro-step or batch,
    but not between the updates of a step. A second SIGTERM or SIGINT stops at once, but not under torchrun,
    which passes a signal on when it comes to that, and ends the ranks itself. SIGUSR2 requests a checkpoint
    before the next step (`save_asked`)."""

    def __init__(self, process: Process):
        self.process, self.stopped = process, False
        self.received, self.first = None, None  # first signal's name; time of the first SIGTERM or SIGINT
        self.answers, self.stream = deque(), None       # on CUDA, see _some_rank
        # requests of this rank for a checkpoint; how many of all ranks are known, and how many were met
        self.requests, self.known, self.met = 0, 0, 0

    def install(self) -> "StopSignals":
        names = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGUSR2"}
        for name in names & set(dir(signal)):           # Windows has the first two
            number = getattr(signal, name)
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:      # as nohup leaves it
                signal.signal(number, self._handle)
        return self

    def _handle(self, number, frame):
        name, now = signal.Signals(number).name, time.monotonic()
        if name == "SIGUSR2":
            self.requests += 1
            return self._tell(f"{name}: saving before the next step\n")
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if name in ("SIGTERM", "SIGINT"):
            # a terminal's SIGINT may arrive twice at once: that is no second one
            if self.first and now > self.first + 1 and not under_torchrun:
                self.process.end_now(128 + number, f"stopped at once by a second {name}")
            self.first = self.first or now
        if not self.received:
            self.received = name
            at_once = "" if under_torchrun else "; a second SIGTERM or Ctrl-C stops at once"
            self._tell(f"{name}: stopping at the next micro-step or batch (a resume repeats what is "
                       f"unfinished){at_once}\n")
        if name == "SIGHUP":
            leave_closed_terminal()

    def _tell(self, line):
        if self.process.is_master:              # not print: the signal may have interrupted one
            with suppress(OSError):             # the reader of the pipe is gone
                os.write(1, line.encode())
            if self.process.console:
                self.process.console(line)

    def save_asked(self, minutes: float) -> bool:
        """Whether a checkpoint was requested since this was asked last, by SIGUSR2 on any rank, or on rank 0
        because the last is `minutes` old (0: never). The same on all ranks."""
        waited = time.monotonic() - self.process.last_save
        if minutes and self.process.is_master and waited > 60 * minutes:
            self.requests += 1
            self.process.last_save += waited
        if self.process.world_size == 1:
            self.known = self.requests
        asked, self.met = self.known > self.met, self.known
        return asked

    def stop(self) -> bool:
        """Whether some rank has received a signal, on a GPU by the question before the last: the answer
        never waits for the GPU, and is the same on all ranks, which must ask equally often. `stopped` keeps
        it."""
        self.stopped = self.stopped or self._some_rank()
        return self.stopped

    def until_stop(self, what: str, items: Sequence, unit: str) -> Iterator:
        """Yields the items, with progress shown, until `stop`, on all ranks at the same item. So all must
        have equally many."""
        for item in self.process.progress.over(what, items, unit):
            if self.stop():
                return
            yield item

    def now(self) -> bool:
        """Whether some rank has received a signal by now. Waits for the other ranks, and for the GPU."""
        self.stopped = self.stopped or self.process.sum(self.received is not None)[0] > 0
        return self.stopped

    def _some_rank(self):
        """Whether some rank was told to stop; takes down how many checkpoints were requested."""
        if self.process.world_size == 1:
            return self.received is not None
        both = torch.tensor([float(self.received is not None), float(self.requests)])
        if not self.process.device.startswith("cuda"):
            dist.all_reduce(both)
            stop, self.known = both.tolist()
            return stop > 0
        both = both.pin_memory().to(self.process.device, non_blocking=True)
        self.stream = self.stream or torch.cuda.Stream()
        work = dist.all_reduce(both, async_op=True)
        with torch.cuda.stream(self.stream):            # the next micro-step does not wait for other ranks
            work.wait()
            self.answers.append((fetch(both), both))    # which must not be freed before it was read
        # the answer to the last question but one: this one's comes after all that is queued, and the GPU must
        # not run out of work
        if len(self.answers) <= 2:
            return False
        answer, _both = self.answers.popleft()
        stop, self.known = answer()
        return stop > 0
