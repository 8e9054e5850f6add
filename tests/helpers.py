"""Real processes of train_gpt2.py, for the tests."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(*flags, processes=1, torchrun=("--standalone",)):
    launcher = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, str(ROOT / "train_gpt2.py"), "--no_plot", *map(str, flags)]


def run(*flags, processes=1, code=0, env=ENV, **kwargs):
    result = subprocess.run(command(*flags, processes=processes), capture_output=True, text=True, env=env, timeout=600, **kwargs)
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-2000:]
    return result


def logged(out, kind="train"):
    rows = [line.split() for line in (Path(out) / "log.txt").read_text().splitlines()]
    return {int(step): float(value) for step, k, value in rows if k == kind}
