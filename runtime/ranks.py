"""The ranks of a run: printing, agreeing, and stopping on a signal."""
import errno
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from runtime import cli
from runtime.cli import RunError, UserError, print_error, refusal, safe_repr, said_once, silence

STOPS = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"        # SIGUSR1 is Slurm's warning
GROUPS = itertools.count()      # of this process
PATIENCE = 5.0              # seconds that processes may take to find each other before one says that it waits


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process in its environment."""
    rank: int = 0               # among all processes
    local_rank: int = 0         # among those of this machine
    world_size: int = 1         # number of processes
    by_torchrun: bool = False
    job: str = ""               # torchrun's --rdzv_id
    restarts: int = 0           # how many times torchrun has started this job again

    @property
    def reports_mistakes(self) -> bool:
        """Whether this process prints a mistake in the flags, which all processes of the job make. Without
        torchrun nobody knows whether there are others, whatever has been left in the environment."""
        return self.local_rank == 0 or not self.by_torchrun


def read_launch() -> Launch:
    """UserError for a number that is none. One process alone has rank 0, whatever RANK and LOCAL_RANK are
    left in the environment."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    by_torchrun = bool(job or os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    restarts = read_number("TORCHELASTIC_RESTART_COUNT", 0) if job else 0
    world_size = read_number("WORLD_SIZE", 1)
    if world_size == 1:
        return Launch(by_torchrun=by_torchrun, job=job, restarts=restarts)
    rank = read_number("RANK", None)
    local_rank = read_number("LOCAL_RANK", 0)
    if world_size < 1 or rank is None or not 0 <= rank < world_size or local_rank < 0:
        raise UserError(f"the environment has WORLD_SIZE={world_size}, RANK={rank}, LOCAL_RANK={local_rank}: "
                        "start by torchrun, which sets them, or for one process alone by `env -u WORLD_SIZE`")
    return Launch(rank, local_rank, world_size, by_torchrun, job, restarts)


def read_number(name: str, default: int | None) -> int | None:
    """The environment variable `name`; `default` if it is not set, or empty."""
    text = os.environ.get(name) or default
    try:
        return text if text is None else int(text)
    except ValueError:
        raise UserError(f"the environment variable {name} is {text!r}: it must be a number, as torchrun sets "
                        f"it, or be unset (`env -u {name}`)") from None


@dataclass
class Process:
    """One rank among world_size, one device each. Rank 0, the master process, prints, logs and saves."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    received: str = ""          # the last signal that asked this rank to stop
    agreed: bool = False        # of several ranks: whether all know that one was asked
    by_torchrun: bool = False   # also with one process
    silent: bool = False        # whether stdout cannot be written any more
    # undoes what the run has changed in this process, which in a notebook goes on
    at_end: ExitStack = field(default_factory=ExitStack)

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def stop(self) -> bool:
        """Whether to stop now: alone as soon as a signal came, with others once all know it."""
        return self.agreed or self.world_size == 1 and bool(self.received)

    def print0(self, *args) -> None:
        """Prints on rank 0. A run does not end because it cannot print: its record is in --out."""
        if self.silent or not self.is_master:
            return
        try:
            print(*args, flush=True)
        except OSError as error:
            self.silent = True
            silence(sys.stdout)
            if error.errno == errno.EPIPE:      # the reader of the pipe has ended
                self.received = self.received or "a closed pipe"
            elif error.errno != errno.EIO:      # a closed terminal also sends SIGHUP, which a run may ignore
                print_error(f"nothing more is printed ({error.strerror}): the run goes on, and its record is "
                            "in --out")

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
        except OSError as error:
            failure = refusal(error)
            if failure is None:
                raise
        for rank, error in enumerate(self.gather(failure)):
            if error:
                with said_once(self.is_master):
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
                    with said_once(self.is_master):
                        raise error(f"process {rank}: {name} is {safe_repr(here)} here, and "
                                    f"{safe_repr(there)} on process 0: {remedy}")

    def progress(self, what: str, items: Iterable) -> Iterable:
        """The items, with a bar of rank 0 on a terminal if they take longer than ten seconds."""
        hidden = not self.is_master or sys.stderr is None
        return tqdm(items, what, delay=10, leave=False, disable=True if hidden else None)

    def until_stop(self, what: str, items: Iterable) -> Iterator:
        """Yields the items, with progress shown, until a signal stops this one process."""
        for item in self.progress(what, items):
            if self.stop:
                return
            yield item

    def catch_signals(self) -> None:
        """Until at_end a signal of STOPS asks to stop, and interrupts nothing. A second SIGINT or SIGTERM
        ends the process at once, but not under torchrun, which passes them on and ends the ranks itself."""
        if threading.current_thread() is not threading.main_thread():
            return                                                  # Python allows handlers there alone
        for number in [getattr(signal, name) for name in STOPS if hasattr(signal, name)]:   # Windows has two
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:                            # ignored, as nohup leaves SIGHUP
                signal.signal(number, self._handle)
                # None is a handler of another language, which Python cannot put back
                self.at_end.callback(signal.signal, number, signal.SIG_DFL if before is None else before)

    def _handle(self, number, frame):
        name = signal.Signals(number).name
        if {name, self.received} <= {"SIGINT", "SIGTERM"} and not self.by_torchrun:
            os._exit(128 + number)
        try:                                    # not print: the signal may have interrupted one
            os.write(2, f"{name}: stopping\n".encode() * self.is_master)
        except OSError:
            silence(sys.stderr)                 # the terminal has closed, and later output would fail
        self.received = name


def shared_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store by which several processes make their process group. UserError if they do not find each
    other, as torchrun's do."""
    try:
        store = find_others(launch, timeout)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by "
                        "torchrun, or for one process alone by `env -u WORLD_SIZE`") from None
    # The store still has the addresses of earlier ranks, after a restart by torchrun those of the dead ones
    # (pytorch issue 135712), and in a process that calls main again those of its first group.
    return dist.PrefixStore(f"{launch.restarts}.{next(GROUPS)}", store)


def find_others(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store that all processes share, when all are there. Says what it waits for, if that takes long. By
    a thread, because torch would answer no Ctrl-C before `timeout`."""
    found = Future()

    def search():
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            found.set_result(store)
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=search, daemon=True).start()
    with suppress(TimeoutError):
        return found.result(PATIENCE)
    print_error(f"process {launch.rank} waits for {launch.world_size - 1} other(s) at "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, as WORLD_SIZE is "
                f"{launch.world_size}: torchrun starts them; for one process alone: env -u WORLD_SIZE")
    return found.result()


def leave_group() -> None:
    """Destroys the process group, but not at the end of a command: run_command says why."""
    if not cli.command_is_running:
        dist.destroy_process_group()
