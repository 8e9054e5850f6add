"""How the ranks of several machines find each other, and notice that a machine is gone."""
import ipaddress
import os
import re
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer

import torch.distributed as dist

from runtime.cli import RunError, UserError, print_error
from runtime.ranks import Process

SILENCE = 120           # seconds without an answer after which a machine counts as gone
ANSWER = 2              # seconds in which a machine that is there answers a call
WAIT_TOLD_AFTER = 10    # seconds in which processes that were started together find each other


# ----------------------------------------------------------------------- finding each other

def shared_store(process: Process, timeout: timedelta) -> dist.Store:
    """The store by which the ranks of this start find each other.

    UserError if the environment does not say where it is.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"WORLD_SIZE is {process.world_size}, and {name} is not set: start "
                            "several processes with torchrun, or one with `env -u WORLD_SIZE`")
    warning = Timer(WAIT_TOLD_AFTER, tell_that_it_waits, [process])
    warning.daemon = True
    warning.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        name = name_of_start(store, process, timeout)
    finally:
        warning.cancel()

    # torchrun's store outlives a restart (pytorch issue 135712). Without a prefix of its own a rank
    # would read there the address of a dead one. The number of the restart cannot be the prefix:
    # each machine's torchrun counts its own.
    return dist.PrefixStore(name, store)


def tell_that_it_waits(process: Process) -> None:
    """Says how many others this process waits for, and where: they never come if another job has
    left WORLD_SIZE in the shell. torchrun starts them, and sets all that they need."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print_error(f"process {process.rank} waits at {address} for {process.world_size - 1} other(s), "
                f"because WORLD_SIZE is {process.world_size}: start several processes with "
                "torchrun, or one with `env -u WORLD_SIZE`")


def name_of_start(store: dist.Store, process: Process, timeout: timedelta) -> str:
    """A name that no other start of these ranks has. Rank 0 makes it, and the others ask for it.

    RunError on rank 0 if a rank does not come within `timeout`.
    """
    own_name = uuid.uuid4().hex
    if not process.is_master:
        store.set(f"rank {process.rank} asks as", own_name)
        name = store.get(f"answer to {own_name}").decode()          # waits for it
        store.set(f"rank {process.rank} knows {name}", "")
        return name

    # A question that is there may be a dead rank's. So rank 0 answers until the living one knows.
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(1, process.world_size):
        while not store.check([f"rank {rank} knows {own_name}"]):
            if time.monotonic() > deadline:
                raise RunError(f"process {rank} has not started within {timeout}")
            if store.check([f"rank {rank} asks as"]):
                question = store.get(f"rank {rank} asks as").decode()
                store.set(f"answer to {question}", own_name)
            time.sleep(0.01)
    return own_name


# ----------------------------------------------------------------------- machines that are gone

def watch_machines(process: Process) -> None:
    """Has Linux end the connections to a machine that has not answered for SILENCE seconds.

    A machine without power, or behind a cut cable, does not say that it is gone. By default Linux
    notices after 16 minutes if something was sent to it, and never while this process only waits.
    Linux also answers for a process that is busy, so that this cuts no long wait short.
    """
    # Once the ranks have exchanged something, all their connections are there.
    process.machines = process.gather(socket.gethostname())
    addresses = []              # the own ends of the connections
    for connection in own_connections():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, -(-SILENCE // 4))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, -(-SILENCE // 8))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)
        addresses.append(connection.getsockname()[:2])
    process.addresses = process.gather(addresses)


def own_connections() -> Iterator[socket.socket]:
    """The TCP connections of this process; each is a copy, which is closed after its turn.

    Only Linux tells them: elsewhere there are none.
    """
    if sys.platform != "linux":
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):                         # it is closed by now, or only listens
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_internet and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()
                    yield connection


@contextmanager
def lost_ranks(process: Process) -> Iterator[None]:
    """Around all that the ranks do together: RunError if a machine is gone, or a rank has ended."""
    if process.world_size > 1:
        watch_machines(process)
    try:
        yield
    except RuntimeError as error:               # gloo's, or another one
        lost = error_of_lost_rank(process, error)
        if lost is None:
            raise
        raise lost from None


def error_of_lost_rank(process: Process, error: RuntimeError) -> RunError | None:
    """A RunError that names what this process has lost; None if `error` has another cause."""
    if not process.machines:                    # a process alone
        return None
    silent = silent_machines(process)
    if silent:
        return RunError(f"no answer from machine {', '.join(silent)}: it has no power, or the "
                        "network between is cut")

    rank = rank_of_address(process, str(error))
    if rank is None:
        return None
    return RunError(f"process {rank} on {process.machines[rank]} has ended, or was killed: look "
                    "for its own error")


def rank_of_address(process: Process, text: str) -> int | None:
    """The rank whose [host]:port an error of gloo's names, if there is one."""
    found = re.search(r"\[(\S+)\]:(\d+)", text)
    if found is None:
        return None
    host, port = found[1], int(found[2])
    swapped = port % 256 * 256 + port // 256    # gloo prints the two bytes in the wrong order
    own_machine = process.machines[process.rank]
    for rank, addresses in enumerate(process.addresses):
        if (host, port) not in addresses and (host, swapped) not in addresses:
            continue
        # Each machine has a 127.0.0.1 of its own.
        is_possible = not is_loopback(host) or process.machines[rank] == own_machine
        if is_possible and rank != process.rank:
            return rank
    return None


def silent_machines(process: Process) -> list[str]:
    """The names of the other ranks' machines that do not answer now."""
    ports_of = {}                               # {machine: {host: port}}, without 127.0.0.1
    for machine, addresses in zip(process.machines, process.addresses, strict=True):
        to_others = {host: port for host, port in addresses if not is_loopback(host)}
        ports_of.setdefault(machine, {}).update(to_others)

    ports_of.pop(process.machines[process.rank], None)
    with ThreadPoolExecutor() as executor:
        silent = executor.map(is_silent, ports_of.values())
        return [machine for machine, is_gone in zip(ports_of, silent, strict=True) if is_gone]


def is_silent(ports: dict) -> bool:
    """Whether a machine with these {host: port} answers nothing, not even that nothing listens."""
    for address in ports.items():
        try:
            socket.create_connection(address, timeout=ANSWER).close()
            return False
        except ConnectionRefusedError:
            return False
        except OSError:                         # nothing for ANSWER seconds, or no way to it
            pass
    return len(ports) > 0                       # of a machine without addresses nothing is known


def is_loopback(host: str) -> bool:
    """Whether an address leads to the own machine, as 127.0.0.1 and ::ffff:127.0.0.1 do."""
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
