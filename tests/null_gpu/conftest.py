"""Real processes of train_gpt2.py on the simulated GPU, for the checks in this folder; `check` runs them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from standin import ROOT, Report

from runtime.shards import write_shard


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with random tokens, and examples in HellaSwag's format of three lengths."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, count in (("tokens_val_000000.npy", 300_000), ("tokens_train_000001.npy", 2_000_000)):
        write_shard(folder / name, random.integers(0, 50257, count).astype(np.uint16))
    examples = [{"ctx": "A man is " * (1 + i % 3), "label": i % 4,
                 "endings": ["going", "here" * (1 + i % 3), "sitting", "there"]} for i in range(40)]
    (folder / "hellaswag.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return folder


@pytest.fixture
def play(data, tmp_path):
    """play(*flags) -> Report; of several processes, [Report of each]. Runs train_gpt2.py, or another script,
    under run.py in an empty folder."""
    def play(*flags, script=ROOT / "train_gpt2.py", processes=1, code=0, **settings):
        report = tmp_path / "report"
        if script.name == "train_gpt2.py":
            flags = ("--data", data, "--hellaswag_data", data / "hellaswag.jsonl", *flags)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), Path(__file__).with_name("run.py"),
                   "--json", report, script, *flags]
        env = {**os.environ, "NULL_GPU_COUNT": processes, "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1,
               **settings}
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
                              env={name: str(value) for name, value in env.items()}, timeout=1500)
        message = f"exit code {done.returncode} instead of {code}:\n{done.stdout[-6000:]}"
        assert done.returncode == code, message
        reports = [Report(path, done.stdout) for path in sorted(tmp_path.glob("report*"))]
        return reports if processes > 1 else reports[0]
    return play
