"""The ranks (processes) of a run: what they agree on, and how they learn of a signal."""
import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from runtime.cli import (
    RunError,
    UserError,
    discard,
    error_of_the_system,
    exit_code,
    safe_repr,
)

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")      # SIGUSR1 is Slurm's warning
# Programs that start several processes, but do not say how these find each other: {name: (variable
# with their number, variable with the number of this one)}.
OTHER_LAUNCHERS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),       # not set in a batch script
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),     # Open MPI's
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),                            # MPICH's
}


class Stopped(Exception):
    """A signal asks this process to stop: the step or evaluation that it is in is dropped."""


@dataclass
class Process:
    """One rank of world_size, with its own device. Rank 0, the master process, prints and saves."""
    rank: int = 0               # among all processes
    local_rank: int = 0         # among those of this machine
    world_size: int = 1
    device: str = "cpu"
    signal: str = ""            # one that asked this process to stop: Ctrl-C, or the last one
    machines: list = field(default_factory=list)    # the name of each rank's machine
    addresses: list = field(default_factory=list)   # of each rank, [(host, port)]
    rounds_differently: bool = False    # whether another rank has been found to; it was said

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def print0(self, *args) -> None:
        """Prints on rank 0. A run whose console is gone, or on a full disk, goes on in silence."""
        if not self.is_master:
            return
        try:
            print(*args, flush=True)
        except OSError:
            discard(sys.stdout)                     # the run's record is in --out

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

    def fail(self, error: UserError | RunError) -> NoReturn:
        """Raises an error that all ranks have noticed: only rank 0 prints it."""
        if self.is_master:
            raise error
        raise SystemExit(exit_code(error))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what each rank does by itself, and all come to: a mistake on one ends all of them.

        So none waits for a rank that has ended. Inside, no rank may wait for another. Ranks other
        than 0 see the mistake as a SystemExit: a caller that catches UserError would go on alone.
        """
        failure = None
        try:
            yield
        except (UserError, RunError) as error:
            failure = error
        except OSError as error:
            failure = error_of_the_system(error)
        except ModuleNotFoundError as error:
            failure = UserError(f"{error}: pip install {error.name}")

        for rank, error in enumerate(self.gather(failure)):
            if error is None:
                continue
            message = str(error)
            if rank > 0:
                message = f"process {rank}: {message}"
            self.fail(type(error)(message))

    def rank0_first(self, function, *args):
        """function(*args) on rank 0, which fills caches on the disk, and then on the others."""
        for its_turn in (self.is_master, not self.is_master):
            with self.together():
                if its_turn:
                    result = function(*args)
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
                    self.fail(error(
                        f"process {rank}: {name} is {safe_repr(found)}, but "
                        f"{safe_repr(expected)} on process 0: {remedy}"))

    # ------------------------------------------------------------------------- stopping

    def stop_requested(self) -> bool:
        """Whether a signal asks this process to stop at once, in the middle of a step.

        Several ranks have to stop at the same place. They vote on it in each step (train_step).
        """
        return self.world_size == 1 and self.signal != ""

    def until_stopped(self, what: str, items: Iterable) -> Iterator:
        """The items. Raises Stopped before one of them if a signal asks this process to stop.

        Rank 0 shows a bar on a terminal if they take longer than ten seconds.
        """
        hidden = None                               # None: hidden unless stderr is a terminal
        if not self.is_master:
            hidden = True
        for item in tqdm(items, what, delay=10, leave=False, disable=hidden):
            if self.stop_requested():
                raise Stopped
            yield item

    def catch_signals(self) -> None:
        """From now on a signal of STOP_SIGNALS is only noted in `signal`."""
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)    # Windows has only two of them
            if number is None or signal.getsignal(number) == signal.SIG_IGN:
                continue                            # nohup lets SIGHUP be ignored
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame) -> None:
        name = signal.Signals(number).name

        # A second Ctrl-C ends a single process at once. A second SIGTERM does not, because Slurm
        # sends two within 0.1 s, and kills only 30 s later. Of several ranks a second Ctrl-C does
        # not, either: torchrun passes on the terminal's, so that it comes twice, and ends its
        # processes itself.
        if name == "SIGINT" and self.signal == "SIGINT" and self.world_size == 1:
            os._exit(128 + number)

        if self.signal != "SIGINT":                 # a second one is known by the first
            self.signal = name
        if self.is_master:
            try:
                # Not print: the signal may have interrupted one.
                os.write(2, f"{name}: stopping\n".encode())
            except OSError:
                pass                                # the terminal is closed


# ----------------------------------------------------------------------- torchrun's environment

def read_process() -> Process:
    """The Process that torchrun's environment describes, without its device. It ends with torchrun.

    UserError if the environment has text in place of a number, or if another program has started
    several processes. A single process has rank 0, whatever RANK and LOCAL_RANK are left in the
    environment.
    """
    die_with_torchrun()
    if os.environ.get("WORLD_SIZE", "") == "":
        refuse_other_launchers()
    world_size = read_number("WORLD_SIZE", 1)
    if world_size == 1:
        return Process()
    process = Process(read_number("RANK", -1), read_number("LOCAL_RANK", 0), world_size)
    if not 0 <= process.rank < world_size or process.local_rank < 0:
        raise UserError(f"the environment variables WORLD_SIZE={world_size}, RANK={process.rank} "
                        f"and LOCAL_RANK={process.local_rank} do not fit together: start several "
                        "processes with torchrun, which sets all three, or one with "
                        "`env -u WORLD_SIZE`")
    return process


def read_number(name: str, default: int) -> int:
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


def refuse_other_launchers() -> None:
    """UserError if srun or mpirun has started several processes: each would train alone."""
    for launcher, (size, rank) in OTHER_LAUNCHERS.items():
        processes = read_number(size, 1)
        if processes == 1:
            continue
        if read_number(rank, 0) > 0:
            raise SystemExit(2)                     # the first of them says it
        raise UserError(
            f"{launcher} has started {processes} processes, of which each would train alone: let "
            f"it start one torchrun on each machine (docs/running.md#slurm). For {processes} "
            "separate runs, each with its own --out, put WORLD_SIZE=1 in front of the command")


def die_with_torchrun() -> None:
    """Has Linux send this process SIGTERM when torchrun dies. A torchrun that is killed cannot pass
    anything on, and its ranks would train on, and keep their --out from the next run."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))         # PR_SET_PDEATHSIG


def ddp_options(model: torch.nn.Module, process: Process) -> dict:
    """The arguments of DDP, which depend on the model, the device and torch's version."""
    options = {
        "bucket_cap_mb": bucket_size(model),
        "gradient_as_bucket_view": True,            # no second copy of the gradients
    }
    if process.on_gpu:
        options["device_ids"] = [process.device]
        # A GPU that waits for the gradients of another one does not see that a machine is gone.
        # NCCL's watchdog ends the process, after the timeout of the group: the hour of the first
        # group is for downloads. In a step nothing takes ten minutes, torch's own default.
        options["process_group"] = dist.new_group(timeout=timedelta(minutes=10))

    # Buffers (frontier's tables of tokens) are the same on all ranks anyway.
    if "forward_sync_buffers" in signature(DDP).parameters:             # from torch 2.13 on
        options["forward_sync_buffers"] = False
    else:
        options["broadcast_buffers"] = False
    return options


def seed_step(*numbers: int) -> None:
    """Seeds torch's random numbers, on all devices, by these: the seed, the step, and the rank.

    So they are the same after a resume, whatever an evaluation has drawn between.
    """
    # torch.manual_seed takes 64 bits; those of a SeedSequence are well mixed.
    first, *_ = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    torch.manual_seed(int(first))


def bucket_size(model: torch.nn.Module) -> int:
    """MiB of gradients that DDP sends at a time: those of whole blocks, 25 MiB or more."""
    # DDP cuts a compiled model where a bucket is full, so that it is sent while the backward goes
    # on. Between blocks a cut stores the least. DDP's own 25 MiB would cut inside a wide block, and
    # store its hidden layer.
    block = sum(p.nbytes for p in model.transformer.h[0].parameters())
    blocks = max(model.blocks_per_bucket, -(-25 * 2**20 // block))              # rounded up
    return blocks * block // 2**20
