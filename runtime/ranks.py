"""The ranks of a run: printing, agreeing, and stopping on a signal."""
import errno
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from runtime.cli import RunError, UserError, safe_repr, said_once, silence

STOPS = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"        # SIGUSR1 is Slurm's warning


@dataclass
class Process:
    """One rank among world_size, one device each. Rank 0, the master process, prints, logs and saves."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    received: str = ""          # the last signal that asked this rank to stop
    agreed: bool = False        # of several ranks: whether all know that one was asked

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def stop(self) -> bool:
        """Whether to stop now: alone as soon as a signal came, with others once all know it."""
        return self.agreed or self.world_size == 1 and bool(self.received)

    def print0(self, *args) -> None:
        try:
            if self.is_master:
                print(*args, flush=True)
        except OSError as error:        # the reader of the pipe has ended, or the terminal is closed
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            silence(sys.stdout)
            if error.errno == errno.EPIPE:      # a terminal also sends SIGHUP, which a run may ignore
                self.received = self.received or "a closed pipe"

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks (gloo has no AVG: divide afterwards). The ranks also agree here
        whether to stop."""
        if self.world_size == 1:
            return list(values)
        device = self.device if self.device.startswith("cuda") else "cpu"
        total = torch.tensor([*values, bool(self.received)], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        *sums, asked = total.tolist()
        self.agreed = self.agreed or asked > 0
        return sums

    def gather(self, value) -> list:
        """[the value of each rank]."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_all_ranks(self, function, *args):
        """function(*args) on every rank. A UserError or RunError on any rank is raised on all."""
        result = failure = None
        try:
            result = function(*args)
        except (UserError, RunError) as error:
            failure = error
        for rank, error in enumerate(self.gather(failure)):
            if error:
                with said_once():
                    raise type(error)(f"process {rank}: {error}" if rank else str(error))
        return result

    def rank0_first(self, function, *args):
        """function(*args) on rank 0 first, which fills caches, then on the others."""
        result = self.on_all_ranks(lambda: function(*args) if self.is_master else None)
        return self.on_all_ranks(lambda: result if self.is_master else function(*args))

    def require_same(self, values: dict, remedy: str = "give every machine the same",
                     error: type = UserError) -> None:
        """`error` on all ranks if one of the {name: value} differs between them."""
        first, *others = self.gather(values)
        for rank, other in enumerate(others, 1):
            for name in first | other:
                if (here := other.get(name)) != (there := first.get(name)):
                    with said_once():
                        raise error(f"process {rank}: {name} is {safe_repr(here)} here, and "
                                    f"{safe_repr(there)} on process 0: {remedy}")

    def progress(self, what: str, items: Iterable) -> Iterable:
        """The items, with a bar of rank 0 on a terminal if they take longer than ten seconds."""
        return tqdm(items, what, delay=10, leave=False, disable=None if self.is_master else True)

    def until_stop(self, what: str, items: Iterable) -> Iterator:
        """Yields the items, with progress shown, until a signal stops this one process."""
        for item in self.progress(what, items):
            if self.stop:
                return
            yield item

    def catch_signals(self) -> None:
        """From now on a signal of STOPS asks to stop, and interrupts nothing. A second SIGINT or SIGTERM ends
        the process at once, but not under torchrun, which passes signals on and ends the ranks itself."""
        for number in [getattr(signal, name) for name in STOPS if hasattr(signal, name)]:   # Windows has two
            if signal.getsignal(number) != signal.SIG_IGN:          # as nohup leaves SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number, frame):
        name = signal.Signals(number).name
        if {name, self.received} <= {"SIGINT", "SIGTERM"} and "TORCHELASTIC_RUN_ID" not in os.environ:
            os._exit(128 + number)
        try:                                    # not print: the signal may have interrupted one
            os.write(2, f"{name}: stopping\n".encode() * self.is_master)
        except OSError:
            silence(sys.stderr)                 # the terminal has closed, and later output would fail
        self.received = name


def find_ranks(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) by torchrun's environment variables, for init_process_group."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by "
                        "torchrun") from None
    # after a restart torchrun's store still has the addresses of the dead ranks (pytorch issue 135712)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank, world_size
