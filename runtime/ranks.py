"""The processes (ranks) of a run: how they print, agree and learn of a signal."""
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

STOP_SIGNALS = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"         # SIGUSR1 is Slurm's warning


class StopRequested(Exception):
    """A signal has asked the run to stop. The loop catches it, saves and ends."""


@dataclass
class Process:
    """One rank of world_size, with a device of its own. Rank 0, the master process, prints and
    saves."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    received: str = ""          # the last signal that asked this process to stop

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def asked_to_stop(self) -> bool:
        return bool(self.received)

    def print0(self, *args) -> None:
        if not self.is_master:
            return
        try:
            print(*args, flush=True)
        except OSError as error:
            # EPIPE: the reader of our pipe has ended. EIO: the terminal is closed; it also sends
            # SIGHUP, which a run under nohup ignores, and so it goes on without output.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            silence(sys.stdout)
            if error.errno == errno.EPIPE and not self.received:
                self.received = "a closed pipe"

    # ------------------------------------------------------------------------- agreeing

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        if self.world_size == 1:
            return list(values)
        # gloo sums on the CPU, nccl on a GPU.
        device = self.device if self.device.startswith("cuda") else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value) -> list:
        """The value of every rank, in their order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_master(self, value):
        """Rank 0's value, on all ranks."""
        return self.gather(value)[0]

    def on_all_ranks(self, function, *args):
        """function(*args) on every rank. A UserError or RunError on any rank is raised on all of
        them, so that none waits for one that has ended."""
        result = failure = None
        try:
            result = function(*args)
        except (UserError, RunError) as error:
            failure = error

        for rank, error in enumerate(self.gather(failure)):
            if error is None:
                continue
            message = f"process {rank}: {error}" if rank > 0 else str(error)
            with said_once():
                raise type(error)(message)
        return result

    def rank0_first(self, function, *args):
        """function(*args) on rank 0, which fills caches on the disk, and then on the others."""
        result = None
        if self.is_master:
            result = self.on_all_ranks(function, *args)
        else:
            self.on_all_ranks(lambda: None)

        if self.is_master:
            self.on_all_ranks(lambda: None)
        else:
            result = self.on_all_ranks(function, *args)
        return result

    def require_same(self, values: dict, remedy: str = "give every machine the same",
                     error: type = UserError) -> None:
        """Raises `error` on all ranks if one of the {name: value} differs between them."""
        everywhere = self.gather(values)
        expected = everywhere[0]
        for rank, found in enumerate(everywhere):
            for name in expected | found:
                here, there = found.get(name), expected.get(name)
                if here != there:
                    with said_once():
                        raise error(f"process {rank}: {name} is {safe_repr(here)} here, and "
                                    f"{safe_repr(there)} on process 0: {remedy}")

    # ------------------------------------------------------------------------- stopping

    def watch(self, what: str, items: Iterable) -> Iterator:
        """Yields the items. Rank 0 shows a bar on a terminal if they take longer than ten seconds.

        A single process stops here, in the middle of its work, when a signal comes: StopRequested.
        Several have to stop at the same place, so they vote with the loss of every step instead.
        """
        hidden = None if self.is_master else True           # None: hidden unless it is a terminal
        for item in tqdm(items, what, delay=10, leave=False, disable=hidden):
            if self.world_size == 1 and self.asked_to_stop:
                raise StopRequested
            yield item

    def catch_signals(self) -> None:
        """From now on a signal of STOP_SIGNALS interrupts nothing: it is noted in `received`."""
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)            # Windows has only two of them
            if number is None or signal.getsignal(number) == signal.SIG_IGN:
                continue                                    # nohup lets SIGHUP be ignored
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame) -> None:
        name = signal.Signals(number).name

        # A second Ctrl-C or SIGTERM ends the process at once. torchrun, which passes on every
        # signal that it receives, ends its processes itself.
        urgent = "SIGINT", "SIGTERM"
        if name in urgent and self.received in urgent and "TORCHELASTIC_RUN_ID" not in os.environ:
            os._exit(128 + number)

        self.received = name
        if self.is_master:
            try:
                # Not print: the signal may have interrupted one.
                os.write(2, f"{name}: stopping\n".encode())
            except OSError:
                silence(sys.stderr)         # the terminal is closed, and later output would fail


def find_ranks(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) from torchrun's environment variables, for init_process_group."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by "
                        "torchrun") from None

    # After a restart torchrun's store still has the addresses of the dead ranks (pytorch issue
    # 135712).
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(restart, store), rank, world_size
