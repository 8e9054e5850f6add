"""The ranks (processes) of a run: how they find each other, print, agree, and learn of a signal."""
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
from runtime.cli import (
    RunError,
    UserError,
    print_error,
    printed_by,
    refusal,
    safe_repr,
    silence,
)

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")      # SIGUSR1 is Slurm's warning
GROUP_NUMBERS = itertools.count()       # one for each process group of this process
LEFT_GROUPS = []        # the process groups that leave_group has destroyed
PATIENCE = 5.0          # seconds of waiting for the other processes before one prints that it waits


class StopRequested(Exception):
    """A signal has asked this single process to stop. The loop catches it, saves and ends."""


# ----------------------------------------------------------------------------- torchrun's environment

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
        """Whether this process prints a mistake in the flags, which all processes of the job make."""
        # Without torchrun LOCAL_RANK may be left over from another job: this may be the only process.
        return self.local_rank == 0 or not self.by_torchrun


def read_launch() -> Launch:
    """This process's Launch. UserError if the environment has text in place of a number."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    by_torchrun = bool(job or os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    restarts = 0
    if job:
        restarts = read_number("TORCHELASTIC_RESTART_COUNT", 0)

    # A single process has rank 0, whatever RANK and LOCAL_RANK are left in the environment.
    world_size = read_number("WORLD_SIZE", 1)
    if world_size == 1:
        return Launch(by_torchrun=by_torchrun, job=job, restarts=restarts)

    rank = read_number("RANK", None)
    local_rank = read_number("LOCAL_RANK", 0)
    is_valid = rank is not None and 0 <= rank < world_size and local_rank >= 0
    if not is_valid:
        raise UserError(f"the environment variables WORLD_SIZE={world_size}, RANK={rank} and "
                        f"LOCAL_RANK={local_rank} do not fit together: start several processes "
                        "with torchrun, which sets all three, or one with `env -u WORLD_SIZE`")
    return Launch(rank, local_rank, world_size, by_torchrun, job, restarts)


def read_number(name: str, default: int | None) -> int | None:
    """The environment variable `name`; `default` if it is not set, or empty."""
    text = os.environ.get(name, "")
    if text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"the environment variable {name} is {text!r}, expected a number: start "
                        "several processes with torchrun, which sets the variable, or one with "
                        f"`env -u {name}`") from None


# ----------------------------------------------------------------------------- a rank

@dataclass
class Process:
    """One rank of world_size, with a device of its own. Rank 0, the master process, prints and saves."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    by_torchrun: bool = False   # torchrun can start a single process, too
    received: str = ""          # the last signal that asked this process to stop, or "a closed pipe"
    silent: bool = False        # whether stdout cannot be written any more

    # Undoes what must not outlast the run in a notebook: signal handlers, the lock, the group.
    at_end: ExitStack = field(default_factory=ExitStack)

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def asked_to_stop(self) -> bool:
        return bool(self.received)

    def print0(self, *args) -> None:
        """Prints on rank 0. If the reader of a pipe has ended, the run stops as by a signal.

        With any other error it goes on in silence: its record is in --out.
        """
        if self.silent or not self.is_master:
            return
        try:
            print(*args, flush=True)
        except OSError as error:
            self.silent = True
            silence(sys.stdout)
            if error.errno == errno.EPIPE:          # the reader of the pipe has ended
                self.received = self.received or "a closed pipe"
            elif error.errno != errno.EIO:          # EIO: a closed terminal, which sends SIGHUP, too
                print_error(f"the output can no longer be printed ({error.strerror}): the run goes "
                            "on, and its record is in --out")

    # ------------------------------------------------------------------------- agreeing

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks."""
        if self.world_size == 1:
            return list(values)
        # gloo sums on the CPU, nccl on a GPU.
        device = "cpu"
        if self.on_gpu:
            device = self.device
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value) -> list:
        """The value of every rank, in their order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def from_master(self, value):
        """Rank 0's value, on all ranks."""
        return self.gather(value)[0]

    def on_all_ranks(self, function, *args):
        """function(*args) on every rank.

        A UserError, a RunError or a refused path on one rank is raised on all, so that none waits for
        a rank that has ended.
        """
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
            if error is None:
                continue
            message = str(error)
            if rank > 0:
                message = f"process {rank}: {message}"
            with printed_by(self.is_master):
                raise type(error)(message)
        return result

    def rank0_first(self, function, *args):
        """function(*args) on rank 0, which fills caches on the disk, and then on the others."""
        def nothing():
            return None

        if self.is_master:
            result = self.on_all_ranks(function, *args)
            self.on_all_ranks(nothing)
        else:
            self.on_all_ranks(nothing)
            result = self.on_all_ranks(function, *args)
        return result

    def require_same(
        self,
        values: dict,
        remedy: str = "use the same on every machine",
        error: type = UserError,
    ) -> None:
        """Raises `error` on all ranks if one of the {name: value} differs between them."""
        values_of_ranks = self.gather(values)
        of_master = values_of_ranks[0]
        for rank, of_rank in enumerate(values_of_ranks):
            for name in of_master | of_rank:
                found, expected = of_rank.get(name), of_master.get(name)
                if found != expected:
                    with printed_by(self.is_master):
                        raise error(f"process {rank}: {name} is {safe_repr(found)}, but "
                                    f"{safe_repr(expected)} on process 0: {remedy}")

    # ------------------------------------------------------------------------- stopping

    def watch(self, what: str, items: Iterable) -> Iterator:
        """Yields the items. Rank 0 shows a bar on a terminal if they take longer than ten seconds.

        StopRequested in a single process as soon as a signal has come. Several ranks have to stop at
        the same place: they agree once in each step, in train_gpt2.train_step.
        """
        hidden = None                               # None: hidden unless stderr is a terminal
        if not self.is_master or sys.stderr is None:
            hidden = True
        for item in tqdm(items, what, delay=10, leave=False, disable=hidden):
            if self.world_size == 1 and self.asked_to_stop:
                raise StopRequested
            yield item

    def catch_signals(self) -> None:
        """Until `at_end` closes, a signal of STOP_SIGNALS is only noted in `received`."""
        if threading.current_thread() is not threading.main_thread():
            return                                  # Python allows handlers in that thread alone

        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)    # Windows has only two of them
            if number is None or signal.getsignal(number) == signal.SIG_IGN:
                continue                            # nohup lets SIGHUP be ignored
            before = signal.signal(number, self.on_signal)
            if before is None:                      # a handler in C, which Python cannot restore
                before = signal.SIG_DFL
            self.at_end.callback(signal.signal, number, before)

    def on_signal(self, number, frame) -> None:
        name = signal.Signals(number).name

        # A second Ctrl-C or SIGTERM ends the process at once. Not under torchrun, which passes on the
        # terminal's Ctrl-C, so that it comes twice, and which ends its processes itself.
        urgent = ("SIGINT", "SIGTERM")
        if name in urgent and self.received in urgent and not self.by_torchrun:
            os._exit(128 + number)

        self.received = name
        if self.is_master:
            try:
                # Not print: the signal may have interrupted one.
                os.write(2, f"{name}: stopping\n".encode())
            except OSError:
                silence(sys.stderr)                 # the terminal is closed: later output would fail


# ----------------------------------------------------------------------------- the process group

def shared_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store by which several processes make their process group.

    UserError if they do not find each other.
    """
    try:
        store = wait_for_store(launch, timeout)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is {launch.world_size}, but the other processes cannot be "
                        f"found ({error}): start several processes with torchrun, or one with "
                        "`env -u WORLD_SIZE`") from None

    # The store outlives a group: after a restart (pytorch issue 135712), or in a second main() of a
    # notebook, ranks would read the addresses of the earlier group. So each has its own prefix.
    return dist.PrefixStore(f"{launch.restarts}.{next(GROUP_NUMBERS)}", store)


def wait_for_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The store that all processes share, when all are there.

    After PATIENCE seconds it prints what it waits for.
    """
    found = Future()

    def search():
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            found.set_result(store)
        except BaseException as error:
            found.set_exception(error)

    # A thread searches, because torch would answer no Ctrl-C before `timeout`.
    threading.Thread(target=search, daemon=True).start()
    with suppress(TimeoutError):
        return found.result(PATIENCE)

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    print_error(f"process {launch.rank} is waiting at {address}:{port} for "
                f"{launch.world_size - 1} other(s), because WORLD_SIZE is {launch.world_size}: "
                "start several processes with torchrun, or one with `env -u WORLD_SIZE`")
    return found.result()


def leave_group() -> None:
    """Destroys the process group, but not at the end of a command: run_command says why."""
    if not cli.command_is_running:
        # The destructor of a group holds Python's lock while it waits for gloo's threads, one of
        # which may need the lock to drop the tensors of the last transfer. Neither would ever go on.
        # So a group stays in memory, and its destructor runs at the end of the process at most.
        LEFT_GROUPS.append(dist.group.WORLD)
        dist.destroy_process_group()
