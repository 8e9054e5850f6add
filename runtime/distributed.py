"""The ranks of a run: how they find each other, agree, and fail together."""
import atexit
import errno
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.cli import RunError, UserError, print_error
from runtime.device import choose_device, leave_compiler_out, tune_cuda_allocator, tune_malloc
from runtime.heartbeat import RESUMES, Heartbeats
from runtime.progress import Progress

# torch's own timeout is so much longer than --rank_timeout, which names the rank, while torch's ends in an
# abort of NCCL
GRACE = timedelta(minutes=10)


def leave_closed_terminal() -> None:
    """What is printed after a terminal has closed goes nowhere, and no longer fails."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@dataclass
class Process:
    """One rank among world_size, one device each."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    store: dist.Store | None = None     # key-value store of all ranks, beside the collectives
    restarted: bool = False             # by torchrun --max_restarts
    done: threading.Event = field(default_factory=threading.Event)
    watch: threading.Thread | None = None
    beats: Heartbeats | None = None
    last_save: float = field(default_factory=time.monotonic)       # time of the last checkpoint, or the start
    failure_reported: bool = False      # another rank has failed and printed why
    console: Callable | None = None     # is given what print0 prints, too: runtime.log.ConsoleLog

    def __post_init__(self):
        self.progress = Progress(self.print0)

    @property
    def is_master(self):
        """Rank 0: logs, evaluates text and writes checkpoints."""
        return self.rank == 0

    def print0(self, *args):
        if not self.is_master:
            return
        if self.console:
            self.console(*args)
        try:
            print(*args, flush=True)
        except OSError as error:        # `| tee` got the same Ctrl-C, `| head` ended, or a terminal is closed
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            if threading.current_thread() is not threading.main_thread():
                return                          # the main thread's next line finds out
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            leave_closed_terminal()             # stderr too
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:      # there is nothing to save yet
                raise
            # a terminal also sends SIGHUP, which a run under nohup outlives; SIGUSR1 is never a second signal
            if error.errno == errno.EPIPE:
                signal.raise_signal(getattr(signal, "SIGUSR1", signal.SIGTERM))

    def sum(self, *values):
        """Each value summed over all ranks, as floats (gloo has no AVG: divide afterwards)."""
        if self.world_size == 1:
            return values
        device = self.device if self.device.startswith("cuda") else "cpu"
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value):
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
                error = type(error)(f"process {rank}: {error}" if rank else str(error))
                error.agreed = True             # all raise it, and only rank 0 prints it
                raise error
        return result

    def rank0_first(self, function, *args):
        """function(*args) on rank 0 first, which fills caches, then on the others."""
        result = self.on_all_ranks(lambda: function(*args) if self.is_master else None)
        return self.on_all_ranks(lambda: result if self.is_master else function(*args))

    def require_same(self, what, value):
        """UserError on all ranks if `value` differs between them."""
        first = self.gather(value)[0]

        def compare():
            if value != first:
                raise UserError(f"another {what} than process 0 has: give every machine the same")
        self.on_all_ranks(compare)

    @contextmanager
    def abort_all_on_error(self):
        """Around everything a rank does: one that fails ends the others within seconds, and one line says
        why. A rank with an error of its own prints before those that only lost the connection to it, and
        rank 0 first of all."""
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            self._abort(error)
        finally:
            self.done.set()
            self.watch.join()  # inside the store at interpreter shutdown, the thread would abort the process

    def _abort(self, error):
        # a call to the store never returns where the machine that holds it stands still
        threading.Timer(60, os._exit, (1,)).start()
        code, known = 2 if isinstance(error, UserError) else 1, isinstance(error, (UserError, RunError))
        lost = not known and re.search("gloo|NCCL|Connection", str(error))
        time.sleep((not self.is_master) + (3 if lost else 0))
        agreed, first = getattr(error, "agreed", False), not self.failure_reported
        with suppress(RuntimeError):            # the store is gone with the machine that held it
            first = self.is_master if agreed else self.store.add("failed", 1) == 1
            if agreed and not first:            # torchrun ends rank 0 when this rank exits
                self.store.wait(["told"], timedelta(seconds=10))
        if first:
            if lost:
                cause = ("another process answers, but has not come to where this one waits for it"
                         if "imed out" in str(error) else "another process was killed, or its machine lost")
                error = f"{cause}; {RESUMES} ({str(error)[:120]})"
            if known or lost:
                print_error(error if self.is_master else f"process {self.rank}: {error}")
            else:
                traceback.print_exception(error)
            with suppress(RuntimeError):
                self.store.set("told", "")
            time.sleep(5)       # so that the others find the store, and in it that this was printed
        os._exit(code)          # without waiting inside collectives for the others

    def end_now(self, code: int, message: str) -> None:
        """Ends this process in the midst of its work, which status.json then says."""
        if self.console:                        # on a thread: a dead file system would never let it end
            tell = threading.Thread(target=self.console.end, args=("failed", message), daemon=True)
            tell.start()
            tell.join(1)
        os._exit(code)

    def watch_peers(self, torchrun):
        """Exits when another rank has failed or no longer answers, or torchrun is gone. A thread, because the
        main one may be waiting inside a collective for a rank that is lost."""
        while not self.done.wait(1):
            try:
                # by a connection of this thread's own: the main one may be waiting in the other
                self.failure_reported = self.beats is not None and self.beats.store.add("failed", 0) > 0
                gone = self.failure_reported or os.getppid() != torchrun
                if self.beats and not gone and (error := self.beats.look()):
                    print_error(error)
                    self.beats.store.add("failed", 1)
                    time.sleep(5)               # as in _abort
                    self.end_now(1, error)
            except RuntimeError:                # the machine that held the store is gone
                gone = True
            if gone and not self.done.wait(10):         # a checkpoint may be being written
                self.end_now(1, "another process has failed, or torchrun is gone")
        with suppress(RuntimeError):
            if self.beats:
                self.beats.leave()


def leave(process: Process, code: int) -> int:
    """Returns `code`. Of several ranks each exits with it instead, without Python's finalization, in which a
    gloo thread that frees its last tensor can abort the process (SIGABRT after everything was done, pytorch
    issue 190489). atexit functions (wandb's upload) are run."""
    if process.world_size == 1:
        return code
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def setup_process(config, tune_memory: bool = True) -> Process:
    """This process on its device, in torchrun's process group if there is one: nccl on CUDA, else gloo."""
    tune_cuda_allocator()
    device = choose_device(config.device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        # "high" alone; the newer fp32_precision settings beside it break torch.compile
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if device == "cpu":
        leave_compiler_out()
        if tune_memory:
            tune_malloc()
    process = Process(device=device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return process
    process.watch = threading.Thread(target=process.watch_peers, args=(os.getppid(),), daemon=True)
    process.watch.start()
    patience = timedelta(minutes=config.rank_timeout)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience + GRACE))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by "
                        "torchrun") from None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    process.restarted = restarts != "0" or store.add("begun", 1) > world_size
    process.rank, process.world_size, process.store = rank, world_size, fresh_store(store, rank, world_size)
    process.beats = Heartbeats(process.store.clone(), rank, world_size, patience.total_seconds(), print_error)
    process.progress.enabled = process.is_master
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", rank=rank, world_size=world_size,
                            timeout=patience + GRACE, store=dist.PrefixStore("group", process.store))
    return process


def fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of torchrun's key-value store that belongs to this attempt alone.

    After a restart (--max_restarts) torchrun's store still holds the addresses of the dead ranks, and torch
    2.13 connects to those (pytorch issue 135712); its restart count may differ between machines. So rank 0
    names a new part, each other rank writes a nonce there, and uses it only once rank 0 has repeated that
    nonce.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("attempt", name)
        for other in range(1, world_size):
            nonce = store.get(f"{name}/{other}").decode()           # waits for it
            store.set(nonce, "")
    else:
        nonce = uuid.uuid4().hex
        while not store.check([nonce]):
            name = store.get("attempt").decode()
            store.set(f"{name}/{rank}", nonce)
            time.sleep(0.05)
    return dist.PrefixStore(name, store)
