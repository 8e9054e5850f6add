"""runtime/machines.py: ranks of several machines find each other, and notice one that is gone.

Machines are simulated on this one: by network namespaces, or only by another host name.
"""
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import (
    BYTES,
    ENV,
    HANG,
    command,
    forked,
    logged,
    newest,
    on_ranks,
    run,
    same_end,
    strike,
    striking,
    train,
)

from runtime import machines
from runtime.cli import RunError
from runtime.ranks import Process

NEW_NETWORK_NAME = 0x04000000       # CLONE_NEWUTS: a host name of its own

# A step of three ranks has one micro-batch of a sequence each.
RUN = [*BYTES, "--total_batch_size", 96, "--batch_size", 1, "--val_every", 0, "--max_steps", 20,
       "--checkpoint_every", 2]


# ----------------------------------------------------------------------- finding each other

@pytest.fixture
def start(monkeypatch):
    """start(rank, ...) is what shared_store gives each of these ranks of three, at once.

    The store behind it stays, as torchrun's does.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0",
        "WORLD_SIZE": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def start_ranks(*ranks, seconds=20):
        with ThreadPoolExecutor() as executor:
            stores = []
            for rank in ranks:
                process = Process(rank=rank, world_size=3)
                stores.append(executor.submit(
                    machines.shared_store, process, timedelta(seconds=seconds)))
            return [store.result() for store in stores]

    yield start_ranks
    del server


def test_ranks_of_a_new_start_find_each_other_and_not_the_addresses_of_the_dead(start):
    for value in ("of a process that dies", "of a living one"):
        stores = start(2, 0, 1)
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", value)
        assert [store.get("address").decode() for store in stores] == [value] * 3


def test_a_rank_that_died_while_it_waited_does_not_confuse_the_next_start(start):
    with pytest.raises(dist.DistStoreError):
        start(1, 2, seconds=0.3)            # rank 0 does not come
    with pytest.raises(RunError, match="process 1"):
        start(0, seconds=0.3)               # the others do not

    stores = start(0, 1, 2)
    stores[2].set("address", "of rank 2")
    assert stores[0].get("address") == stores[1].get("address") == b"of rank 2"


def test_ranks_that_have_found_each_other_do_not_say_that_they_wait(start, monkeypatch, capsys):
    monkeypatch.setattr(machines, "WAIT_TOLD_AFTER", 3)
    start(0, 1, 2)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(HANG)
    assert capsys.readouterr().err == ""


def run_a_machine(endpoint, flags):
    """What torchrun does on one of two machines with one rank each, which it forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="test", rdzv_backend="c10d",
        rdzv_endpoint=endpoint, max_restarts=2, start_method="fork")
    elastic_launch(config, train_until_struck)(flags)


def train_until_struck(flags):
    """Rank 1 dies in its second validation, and rank 0 waits there until torchrun ends it."""
    strike("validation", "SIGKILL", rank=1, nth=2)
    strike("validation", rank=0, nth=2, call=signal.pause)
    train(*flags)


def test_machines_that_count_their_restarts_otherwise_find_each_other(byte_data, tmp_path):
    """A rank of one machine dies while that of the other one is busy.

    The torchrun of the first counts a restart, and the other one, which only follows, does not. The
    run began with --resume PATH, and after the kill goes on with its own newest checkpoint.
    """
    flags = ["--data", byte_data, *BYTES, "--max_steps", 4, "--val_every", 2,
             "--checkpoint_every", 2]
    run(*flags, "--max_steps", 1, "--out", tmp_path / "before")
    path = tmp_path / "before/checkpoint_000001.pt"
    flags += ["--resume", path]
    run(*flags, "--out", tmp_path / "whole", processes=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    call = functools.partial(run_a_machine, endpoint, [*flags, "--out", tmp_path / "log"])

    results = forked(call, call)

    assert [code for code, _, _ in results] == [0, 0], results
    text = "".join(stdout + stderr for _, stdout, stderr in results)
    assert "WORLD_SIZE is" not in text, "torchrun is not noticed"
    began = re.findall(r"resuming from (\S+) at step", text)
    assert began == [str(path), str(tmp_path / "log/checkpoint_000004.pt")]
    assert "done: 4 steps" in text
    same_end(tmp_path / "log", tmp_path / "whole", step=4)


# ----------------------------------------------------------------------- machines that are gone

@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the connections")
@pytest.mark.parametrize("family, host", [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_ends_two_minutes_after_the_last_answer_also_where_nothing_is_sent(
        family, host):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as one:
        other, _ = server.accept()
        with other:
            machines.watch_machines(Process())
            for connection in (one, other):
                tcp = functools.partial(connection.getsockopt, socket.IPPROTO_TCP)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert tcp(socket.TCP_KEEPIDLE) == 30
                assert tcp(socket.TCP_KEEPINTVL) == 15
                assert tcp(socket.TCP_USER_TIMEOUT) == 120_000      # milliseconds


def test_of_a_machine_without_addresses_nothing_is_known():
    """As on a Mac, where a process does not know its connections."""
    addresses = [[("10.99.0.1", 29500)], []]        # of this machine, which is not asked, and of b
    process = Process(world_size=2, machines=["a", "b"], addresses=addresses)
    assert machines.silent_machines(process) == []


class Network:
    """Three machines a, b and c on a bridge, as network namespaces."""

    def __init__(self):
        self.prefix = f"gpt2-{os.getpid()}"

    def ip(self, text):
        """The command `ip`, where {a} is the namespace of machine a."""
        names = {name: f"{self.prefix}-{name}" for name in ("a", "b", "c", "bridge")}
        words = ["ip", *text.format(**names).split()]
        subprocess.run(words, check=True, capture_output=True, text=True)

    def set_up(self):
        self.ip("netns add {bridge}")
        self.ip("-n {bridge} link add hub type bridge")
        self.ip("-n {bridge} link set hub up")
        for number, name in enumerate("abc", 1):
            here = "{" + name + "}"
            self.ip(f"netns add {here}")
            self.ip(f"link add to_{name} netns {{bridge}} type veth peer name eth0 netns {here}")
            self.ip(f"-n {{bridge}} link set to_{name} master hub up")
            self.ip(f"-n {here} addr add 10.99.0.{number}/24 dev eth0")
            self.ip(f"-n {here} link set eth0 up")
            self.ip(f"-n {here} link set lo up")

    def remove(self):
        for name in ("a", "b", "c", "bridge"):
            subprocess.run(["ip", "netns", "del", f"{self.prefix}-{name}"], capture_output=True)


@pytest.fixture
def network():
    network = Network()
    try:
        network.set_up()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make network namespaces here: {error}")
    else:
        yield network
    finally:
        network.remove()


def move_to_machine():
    """For `before`: this process goes to the machine MACHINE, whose name it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{os.environ['MACHINE']}") as namespace:
        assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(NEW_NETWORK_NAME) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(os.environ["MACHINE"])


def lose_patience_soon():
    """For `before`: a machine counts as gone after a second, and is asked for half of one."""
    machines.SILENCE = 1
    machines.ANSWER = 0.5


def lose_power():
    """The machine of this process is gone at once: it sends nothing any more."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    os.kill(os.getpid(), signal.SIGKILL)


def on_machines(network, call, before):
    """`forked`, of a rank on each machine. Rank 0, on machine a, has the store."""
    envs = []
    for rank, name in enumerate("abc"):
        envs.append({
            **ENV, "TORCHELASTIC_RUN_ID": "test", "MACHINE": f"{network.prefix}-{name}",
            "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
            "WORLD_SIZE": "3", "RANK": str(rank), "LOCAL_RANK": "0",
        })
    return forked(call, call, call, envs=envs, before=[move_to_machine, *before])


@pytest.mark.parametrize("what", ["step 5", "validation"])
def test_when_a_machine_loses_its_power_the_others_end_and_say_which(
        what, network, byte_data, tmp_path):
    call = command("train_gpt2.py", "--data", byte_data, *RUN, "--val_every", 5, "--out", tmp_path)
    strike = striking(what, rank=2, nth=2 if what == "validation" else 1, call=lose_power)

    results = on_machines(network, call, [lose_patience_soon, *strike])

    assert [code for code, _, _ in results] == [1, 1, -signal.SIGKILL], results
    for _, _, stderr in results[:2]:
        # Before its line torch warns that these machines have addresses without names.
        [line] = [line for line in stderr.splitlines() if "socket.cpp" not in line]
        assert f"no answer from machine {network.prefix}-c:" in line
        assert f"{network.prefix}-b" not in line
        assert f"checkpoint_{newest(tmp_path):06d}.pt" in line
    assert len(logged(tmp_path)) == 5


def check_who_is_lost(results, machines_of_ranks):
    """Each rank that lives says in one line which one has ended: rank 2, or one that has seen it"""
    for rank, (_, _, stderr) in enumerate(results[:2]):
        [line] = [line for line in stderr.splitlines() if "socket.cpp" not in line]
        lost = int(re.search(r"process (\d) on", line)[1])
        assert lost in {1 - rank, 2}
        assert f"process {lost} on {machines_of_ranks[lost]} " in line
    assert any("process 2 on" in stderr for _, _, stderr in results[:2])


def test_a_rank_that_dies_on_another_machine_is_named(network, byte_data, tmp_path):
    """Its machine answers that nothing listens there."""
    call = command("train_gpt2.py", "--data", byte_data, *RUN, "--out", tmp_path)
    strike = striking("step 5", "SIGKILL", rank=2)

    results = on_machines(network, call, [lose_patience_soon, *strike])

    assert [code for code, _, _ in results] == [1, 1, -signal.SIGKILL], results
    check_who_is_lost(results, [f"{network.prefix}-{name}" for name in "abc"])


def test_a_rank_that_dies_on_the_same_machine_is_named(byte_data, tmp_path):
    call = command("train_gpt2.py", "--data", byte_data, *RUN, "--out", tmp_path)
    results = on_ranks(call, call, call, before=striking("step 5", "SIGKILL", rank=2))
    assert [code for code, _, _ in results] == [1, 1, -signal.SIGKILL], results
    check_who_is_lost(results, [socket.gethostname()] * 3)


@pytest.mark.parametrize("text, rank", [
    ("Read error [10.0.0.2]:7000: reset", 1),
    (f"closed by peer [10.0.0.2]:{0x581B}. GLHF", 1),       # 7000 is 0x1B58
    ("closed by peer [127.0.0.1]:7001", 2),                 # not that of the other machine
    ("closed by peer [10.0.0.2]:7002", None),
    ("from [10.0.0.3]:7002 to another", None),              # its own
    ("closed by peer [10.0.0.2]:7000000", None),
    ("out of [memory]:3", None),
    ("mat1 and mat2 shapes cannot be multiplied", None),
])
def test_only_an_error_with_a_ranks_address_is_blamed_on_it(text, rank, monkeypatch):
    process = Process(rank=3, world_size=4, machines=["a", "b", "c", "c"], addresses=[
        [("127.0.0.1", 7001)], [("10.0.0.2", 7000)], [("127.0.0.1", 7001)], [("10.0.0.3", 7002)]])
    monkeypatch.setattr(machines, "silent_machines", lambda process: [])

    error = machines.error_of_lost_rank(process, RuntimeError(text))

    if rank is None:
        assert error is None
    else:
        assert f"process {rank} on {process.machines[rank]}" in str(error)


def test_the_loopback_of_another_machine_is_not_asked_whether_it_is_there(monkeypatch):
    """That would ask the own machine, which answers."""
    asked = []

    def answer_nothing(address, timeout):
        asked.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", answer_nothing)
    process = Process(rank=0, world_size=2, machines=["a", "b"], addresses=[
        [], [("::ffff:127.0.0.1", 1), ("127.0.1.1", 2), ("::1", 3), ("10.0.0.2", 4)]])

    error = machines.error_of_lost_rank(process, RuntimeError("timed out"))

    assert asked == [("10.0.0.2", 4)]
    assert "machine b:" in str(error)


# ----------------------------------------------------------------------- what a run says

def name_machines():
    """For `before`: ranks 0 and 1 are on node0, and rank 2 is on node1."""
    name = f"node{int(os.environ['RANK']) // 2}"
    socket.gethostname = lambda: name


def on_nodes(*flags, before=(), **options):
    """The stdout and stderr of rank 0 of three."""
    calls = [command("train_gpt2.py", *RUN, "--max_steps", 4, *flags)] * 3
    before = [name_machines, *before]
    results = on_ranks(*calls, before=before, **options)
    assert [code for code, _, _ in results] == [0, 0, 0], results
    _, stdout, stderr = results[0]
    return stdout, stderr


def test_the_header_counts_machines_and_a_signal_is_traced_to_its_rank(byte_data, tmp_path):
    stdout, stderr = on_nodes("--data", byte_data, "--out", tmp_path,
                              before=striking("step 2", "SIGUSR1", rank=2))
    assert stdout.startswith("3 processes (2 machines) on cpu")
    assert "stopped by SIGUSR1 (process 2 on node1) after 3 of 4 steps" in stdout
    assert stderr == ""
