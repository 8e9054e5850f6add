#!/usr/bin/env bash
# torch 2.13.0: when a rank dies, gloo's error names its address, "Connection closed by peer [127.0.0.1]:24247" or "Read
# error [127.0.0.1]:17048: Connection reset by peer". Whoever looks for that port in `ss -tnp`, in a firewall's log or in
# what each rank has noted of its sockets finds it nowhere. gloo prints the 16 bits as they are in the socket's address,
# in network order, without ntohs: 17048 is 0x4298, and the port is 0x9842, 38978. The host is right.
# Seen: the printed port is in no connection of this process, and with its bytes swapped it is that of a peer.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/ranks.py" <<'PYTHON'
import os
import re
import socket
import stat
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def peers_ports():
    """The ports at the other ends of this process's TCP connections."""
    ports = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    ports.add(connection.getpeername()[1])
        except (OSError, IndexError):       # closed by now, only listening, or a UNIX socket
            pass
    return ports


def run(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 1:
        time.sleep(2)                       # the other one is in its loop by then
        os._exit(9)

    ports = peers_ports()
    try:
        while True:
            dist.all_reduce(tensor)
    except RuntimeError as error:
        host, port = re.search(r"\[(\S+)\]:(\d+)", str(error)).groups()
    swapped = int.from_bytes(int(port).to_bytes(2, "little"), "big")
    print(f"torch {torch.__version__}: gloo names {host} port {port}; the peers' ports: "
          f"{sorted(ports)}; {port} with its bytes swapped: {swapped}", flush=True)
    # A port of two equal bytes is the same either way.
    right = swapped in ports and (int(port) not in ports or swapped == int(port))
    os._exit(0 if right else 1)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = [mp.get_context("spawn").Process(target=run, args=(rank, address)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(ranks[0].exitcode)
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/ranks.py"
