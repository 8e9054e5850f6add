"""Real processes of train_gpt2.py on the simulated GPU, for the checks here; `check` runs them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from standin import ROOT, Report

from runtime.shards import write_shard

RUN = Path(__file__).with_name("run.py")
HANG = 1500             # seconds, a timeout


def write_examples(path):
    """Examples in HellaSwag's format, of three lengths."""
    lines = []
    for i in range(40):
        times = 1 + i % 3
        endings = ["going", "here" * times, "sitting", "there"]
        example = {"ctx": "A man is " * times, "label": i % 4, "endings": endings}
        lines.append(json.dumps(example) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with random tokens and examples."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    val = random.integers(0, 50257, 300_000)
    train = random.integers(0, 50257, 2_000_000)
    write_shard(folder / "tokens_val_000000.npy", val.astype(np.uint16))
    write_shard(folder / "tokens_train_000001.npy", train.astype(np.uint16))
    write_examples(folder / "hellaswag.jsonl")
    return folder


@pytest.fixture
def play(data, tmp_path):
    """play(*flags) runs train_gpt2.py, or another script, under run.py.

    Returns its Report; of several processes a list of them. `settings` are environment variables:
    with NULL_GPU_RANKS=8 one process does what rank 0 of eight would do.
    """
    def play(*flags, script=ROOT / "train_gpt2.py", processes=1, code=0, **settings):
        for report in tmp_path.glob("report*"):
            report.unlink()
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}"]
        command += [RUN, "--json", tmp_path / "report", script]
        if script.name == "train_gpt2.py":
            command += ["--data", data, "--hellaswag_data", data / "hellaswag.jsonl"]
        command += flags

        env = {"NULL_GPU_COUNT": processes, "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1, **settings}
        env = {name: str(value) for name, value in env.items()}
        done = subprocess.run(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=tmp_path, env={**os.environ, **env}, timeout=HANG)
        assert done.returncode == code, done.stdout[-6000:]

        reports = [Report(path, done.stdout) for path in sorted(tmp_path.glob("report*"))]
        if processes == 1:
            return reports[0]
        return reports
    return play
