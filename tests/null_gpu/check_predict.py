"""assets/counts.json, from which bench.py predict computes, still holds what the code asks of a GPU."""
import json
import os
import subprocess

import pytest
from conftest import HERE, HOME
from standin import ROOT


@pytest.mark.parametrize("name", ["gpt2 fp32 naive 50257", "gpt2 compile auto", "speedrun compile auto",
                                  "frontier compile auto", "step fused", "step speedrun", "step frontier"])
def check_stored_counts(name):
    """A cheap rung, the recipes and their optimizers. If one differs: run tests/null_gpu/count.py."""
    command = [HOME / "venv/bin/python", HERE / "count.py", "--print", "--batch", "16", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500,
                          env={**os.environ, "NULL_GPU_HOME": str(HOME), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-6000:]
    counted = json.loads(done.stdout.strip().split("\n")[-1])[name]
    stored = json.loads((ROOT / "assets" / "counts.json").read_text())["counts"][name]
    assert counted.keys() <= stored.keys() and len(counted) == 1
    for B, now in counted.items():
        for what in ("products", "attention", "bytes"):
            assert now[what] == stored[B][what], f"{name}, {B}: {what}"
        for what in ("launches", "memory"):
            assert now[what] == pytest.approx(stored[B][what], rel=0.03), f"{name}, {B}: {what}"
