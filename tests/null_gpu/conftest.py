"""Real processes of train_gpt2.py on the GPU that is not there, for the checks beside this file; run them by `check`."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fineweb import write_shard

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = Path(os.environ.get("NULL_GPU_HOME") or Path(sys.prefix).parent)         # `check` runs this in the venv in there
GiB = 2**30
SMALL = ["--n_layer", 2, "--n_embd", 128, "--n_head", 2, "--block_size", 256, "--val_tokens", 16384]


class Report:
    """What one process of run.py wrote (see its Recorder), and what the command printed."""

    def __init__(self, path, output):
        self.__dict__.update(json.loads(path.read_text()))
        self.output = output

    def graphs_after(self, step):
        return [graph for graph in self.graphs if graph["step"] >= step]

    def bytes_of_training(self):
        """Read and written by the forward and the backward of a micro-step: by the graphs compiled last."""
        return sum([g["bytes"] for g in self.graphs if g["kind"] == kind][-1] for kind in ("forward", "backward"))

    def taken(self):
        """The most memory taken from the card in a step, but for those steps that compile."""
        return max(step["taken"] for step in self.steps[1:])

    def seconds(self):
        """The host's share of a step."""
        return sorted(step["seconds"] for step in self.steps[2:])[len(self.steps[2:]) // 2]

    def parameters(self):
        return int(re.search(r"([\d,]+) parameters", self.output)[1].replace(",", ""))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with random tokens, and HellaSwag's form of examples in three lengths."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, count in (("tokens_val_000000.npy", 300_000), ("tokens_train_000001.npy", 2_000_000)):
        write_shard(folder / name, random.integers(0, 50257, count).astype(np.uint16))
    examples = [{"ctx": "A man is " * (1 + i % 3), "endings": ["going", "here" * (1 + i % 3), "sitting", "there"], "label": i % 4,
                 "ind": i} for i in range(40)]
    (folder / "hellaswag.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return folder


@pytest.fixture
def play(data, tmp_path):
    """play(*flags) -> Report, of several processes [Report of each]: train_gpt2.py, or another script, under run.py."""
    def play(*flags, script=ROOT / "train_gpt2.py", processes=1, code=0, watch="memory_of_step", cwd=tmp_path, **settings):
        report = tmp_path / "report"
        if Path(script).name == "train_gpt2.py" and cwd is tmp_path:
            flags = ("--data", data, "--hellaswag_data", data / "hellaswag.jsonl", "--out", tmp_path / "out", "--no_plot", *flags)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
        command = [HOME / "venv/bin/python", *launcher, HERE / "run.py", "--json", report, "--watch", watch, script, *flags]
        env = {**os.environ, "NULL_GPU_HOME": HOME, "NULL_GPU_COUNT": processes, "XDG_CACHE_HOME": tmp_path / "cache",
               "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1, **settings}
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
                              env={name: str(value) for name, value in env.items()}, timeout=1500)
        assert done.returncode == code, f"exit code {done.returncode} instead of {code}:\n{done.stdout[-6000:]}"
        if processes == 1:
            return Report(report, done.stdout)
        return [Report(Path(f"{report}.{rank}"), done.stdout) for rank in range(processes)]
    return play


def check_compiled_once(report):
    """No graph break; nothing compiled after the first step, which comes after the first validation and HellaSwag."""
    assert not report.breaks
    assert not report.graphs_after(1), "compiled after the first step"
    assert all(step == 0 for step, _ in report.recompilations), report.recompilations


def check_nothing_waits(report, first, last):
    """From optimizer step `first` to `last`, what is between them included, nothing waits for the GPU or makes it wait."""
    lines = {line for line, steps in report.waits.items() if any(first <= step < last for step in steps)}
    assert not lines, f"wait for the GPU: {lines}"
    for step in report.steps[first:last]:
        counts = step["counts"]
        launches = counts["aten kernels"] + counts.get("triton kernels", 0)
        for what in counts:
            assert not what.startswith(("wait for a stream", "wait for the device", "cudaMalloc", "cudaFree", "cudaHostAlloc")), what
            assert not ("pageable" in what or "blocking" in what), f"{what}: from pinned memory it does not wait"
            # the host may wait for the step before this one, not to run ahead, while the GPU has this one to do
            if behind := re.search(r"wait for an event, (\d+)", what):
                assert int(behind[1]) >= launches / 2, what
