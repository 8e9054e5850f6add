#!/usr/bin/env bash
# torch 2.13.0, gloo, CPU: the first backward of a DistributedDataParallel gives other bits than the second one of the
# same weights and the same batch, if there are three ranks or more. After it has averaged the gradients once, DDP sorts
# them into other buckets, in the order in which they came. A ring sums each part of a bucket from another rank on, and
# with two ranks alone the order of a sum does not matter. So a run that is resumed from a checkpoint, whose process is
# new, does not repeat the bits of the run that went on, with deterministic kernels, one thread and the same ranks.
# A backward before the first step, whose gradients are dropped, settles the buckets.
# Seen: 2 ranks: first = second True, second = third True; 3 ranks: False, True; 4 ranks: False, True.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/try.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())
x = torch.randn(8, 256)                                     # a batch of each rank's own
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 256) for _ in range(12)]
model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=1)


def gradients():
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


first, second, third = gradients(), gradients(), gradients()
if dist.get_rank() == 0:
    print(dist.get_world_size(), "ranks:", torch.equal(first, second), torch.equal(second, third))
dist.destroy_process_group()
PYTHON
found=$(for ranks in 2 3 4; do
  "$tmp/venv/bin/torchrun" --standalone --nproc_per_node=$ranks "$tmp/try.py" 2>/dev/null
done)
echo "$found"
[ "$found" = "2 ranks: True True
3 ranks: False True
4 ranks: False True" ]
