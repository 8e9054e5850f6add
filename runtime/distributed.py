"""Ranks and signals."""
import atexit
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from runtime.cli import RunError, UserError, print_error
from runtime.device import choose_device, tune_malloc, tune_cuda_allocator

DIST_TIMEOUT = timedelta(minutes=30)    # for the other processes: the master may have weights to download first


@dataclass
class Process:
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    store: dist.Store | None = None     # what the processes share, beside the collectives
    restarted: bool = False             # by torchrun --max_restarts
    done: threading.Event = field(default_factory=threading.Event)
    watch: threading.Thread | None = None
    failure_reported: bool = False                  # another process has failed, and said why

    @property
    def is_master(self):
        """Does the logging and the checkpoints."""
        return self.rank == 0

    def print0(self, *args):
        if self.is_master:
            try:
                print(*args, flush=True)
            except BrokenPipeError:             # `| tee` got the same Ctrl-C, `| head` has enough: stop, but save first
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:          # there is nothing to save yet
                    raise
                signal.raise_signal(signal.SIGTERM)

    def sum(self, *values):
        """Each value summed over all processes, as floats (gloo has no AVG: divide afterwards)."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device if self.device.startswith("cuda") else "cpu")
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value):
        """[the value of each process]."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_all_ranks(self, function, *args):
        """function(*args) on every process; where it fails on any, it fails on all, with the same message."""
        result = failure = None
        try:
            result = function(*args)
        except (UserError, RunError) as error:
            failure = error
        for rank, error in enumerate(self.gather(failure)):
            if error:
                raise self.agreed(type(error)(f"process {rank}: {error}" if rank else str(error)))
        return result

    @staticmethod
    def agreed(error):
        """Marks an error that all processes raise alike: only the master speaks of it."""
        error.agreed = True
        return error

    def rank0_first(self, function, *args):
        """function(*args), on the master first (it fills caches), then on the others."""
        result = self.on_all_ranks(lambda: function(*args) if self.is_master else None)
        return self.on_all_ranks(lambda: result if self.is_master else function(*args))

    def require_same(self, what, value):
        values = self.gather(value)
        other = next((rank for rank in range(self.world_size) if values[rank] != values[0]), None)
        if other is not None:
            raise self.agreed(UserError(f"process {other} has another {what} than process 0: give every machine the same"))

    @contextmanager
    def abort_all_on_error(self):
        """Around all that one process among several does: one that fails ends the others within seconds, and one line says
        why. Whoever failed by itself speaks before those that only lost it, and the master before the others."""
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            known, lost = isinstance(error, (UserError, RunError)), re.search("gloo|NCCL|Connection", str(error))
            time.sleep((not self.is_master) + (3 if lost and not known else 0))
            agreed, first = getattr(error, "agreed", False), not self.failure_reported
            with suppress(RuntimeError):        # the store is gone with the machine that held it
                first = self.is_master if agreed else self.store.add("failed", 1) == 1
                if agreed and not first:        # torchrun ends the master when we leave
                    self.store.wait(["told"], timedelta(seconds=10))
            if first and (known or lost):
                text = str(error) if known else ("another process was killed, or its machine lost; the checkpoints are whole, "
                                                 f"and the same command goes on from the newest ({str(error)[:120]})")
                print_error(text if self.is_master else f"process {self.rank}: {text}")
            elif first:
                traceback.print_exc()
            if first:
                with suppress(RuntimeError):
                    self.store.set("told", "")
            sys.stdout.flush()
            time.sleep(5 if first else 0)       # so that the others find the store, and in it that this was told
            os._exit(2 if isinstance(error, UserError) else 1)          # without waiting for what the others still owe us
        finally:
            self.done.set()
            self.watch.join()       # inside the store when the interpreter goes down, it would abort the process

    def watch_peers(self, torchrun):
        """On a thread, because a process that waits for a lost one inside a collective hears nothing else."""
        while not self.done.wait(1):
            try:
                self.failure_reported = self.store is not None and self.store.add("failed", 0) > 0
                gone = self.failure_reported or os.getppid() != torchrun
            except RuntimeError:                # the machine that held the store is gone
                gone = True
            if gone and not self.done.wait(10):         # a checkpoint may just be written
                os._exit(1)


def hard_exit(code: int) -> NoReturn:
    """Ends one of several processes without Python's finalization, in which a thread of gloo's that lets go of its last tensor
    waits for the interpreter's lock, is ended there, and takes the process with it: SIGABRT after all was done (pytorch issue
    190489). What is registered to be done at the end (wandb's upload) is done."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def setup_process(config, tune_memory: bool = True) -> Process:
    """Joins torchrun's process group if there is one; nccl on CUDA, gloo elsewhere."""
    tune_cuda_allocator()
    device = choose_device(config.device)
    if device == "cuda":                                # set_device wants an index
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")       # refuses more processes than GPUs
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        # "high" alone; the newer fp32_precision settings beside it break torch.compile
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if device == "cpu" and tune_memory:
        tune_malloc()
    process = Process(device=device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return process
    process.watch = threading.Thread(target=process.watch_peers, args=(os.getppid(),), daemon=True)
    process.watch.start()
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=DIST_TIMEOUT))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by torchrun") from None
    process.restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or store.add("begun", 1) > world_size
    process.rank, process.world_size, process.store = rank, world_size, fresh_store(store, rank, world_size)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", rank=rank, world_size=world_size, timeout=DIST_TIMEOUT,
                            store=dist.PrefixStore("group", process.store))
    return process


def fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of torchrun's key-value store of which all processes know that it is this attempt's.

    After a restart (--max_restarts) torchrun's store still holds the addresses of the processes that died, and torch 2.13
    connects to those (pytorch issue 135712); its restart count may differ between machines. So rank 0 names a new part,
    each rank answers with a nonce, and follows only a name under which rank 0 has repeated that nonce.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("attempt", name)
        nonces = {str(r): store.get(f"{name}/nonce/{r}").decode() for r in range(1, world_size)}       # waits for each
        store.set(f"{name}/nonces", json.dumps(nonces))
    else:
        nonce, nonces = uuid.uuid4().hex, {}
        while nonces.get(str(rank)) != nonce:
            name = store.get("attempt").decode()
            store.set(f"{name}/nonce/{rank}", nonce)
            time.sleep(0.05)
            nonces = json.loads(store.get(f"{name}/nonces")) if store.check([f"{name}/nonces"]) else {}
    return dist.PrefixStore(name, store)


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask for a stop after the step; a second SIGINT stops at once."""

    def __init__(self, is_master=True):
        self.received, self.is_master = None, is_master
        for name in {"SIGTERM", "SIGINT", "SIGUSR1"} & set(dir(signal)):        # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number, frame):
        # torchrun passes a terminal's SIGINT on, so that it comes twice at once: only a later one is a second one
        if self.received and number == signal.SIGINT and time.monotonic() > self.when + 1:
            os._exit(130)
        if not self.received:
            self.received, self.when = signal.Signals(number).name, time.monotonic()
            if self.is_master:                  # not by print, whose buffer the signal may have come upon half filled
                with suppress(OSError):         # who reads it is gone
                    os.write(1, f"{self.received}: finishing this step, then saving\n".encode())
