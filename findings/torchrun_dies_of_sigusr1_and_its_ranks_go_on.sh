#!/usr/bin/env bash
# torch 2.13.0: torchrun handles SIGTERM, SIGINT, SIGHUP and SIGQUIT. A SIGUSR1 that `kill` sends it, it neither handles
# nor passes on: it dies of it, and its ranks, which would have saved on that signal, never hear of it. Nor do they end
# with torchrun: their collectives need neither it nor its store, so they train on without a parent, and whoever starts
# the job again has two of them. Slurm's `--signal=USR1@120` sends SIGUSR1 to the ranks, too, but kills them as soon as
# torchrun is dead (22.05.8, proctrack/cgroup), before they have saved.
# Seen: torchrun's exit code 138 (128 + SIGUSR1); both ranks alive after it, and further all_reduces of theirs.
set -euo pipefail
tmp=$(mktemp -d)
trap 'touch "$tmp/stop"; sleep 2; rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/train.py" <<'PYTHON'
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
steps = 0
while True:
    stop = torch.tensor(float((folder / "stop").exists()))
    dist.all_reduce(stop)
    if stop > 0:
        break
    steps += 1
    path = folder / f"steps{os.environ['RANK']}"
    path.with_suffix(".tmp").write_text(str(steps))
    path.with_suffix(".tmp").replace(path)                  # the shell never reads half of it
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node=2 \
    "$tmp/train.py" "$tmp" &
torchrun=$!
until [ -s "$tmp/steps0" ] && [ -s "$tmp/steps1" ]; do
    kill -0 $torchrun
    sleep 1
done
kill -USR1 $torchrun
code=0
wait $torchrun || code=$?

for rank in 0 1; do
    before=$(cat "$tmp/steps$rank")
    sleep 2
    after=$(cat "$tmp/steps$rank")
    echo "torchrun's exit code $code; rank $rank: from step $before to $after"
    [ $code = 138 ] && [ -n "$before" ] && [ "${after:-0}" -gt "$before" ]
done
