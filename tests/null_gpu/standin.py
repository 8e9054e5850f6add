"""run.py's report on a process, and what the checks assert about it."""
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GiB = 2**30
SMALL = ["--n_layer", 2, "--n_embd", 128, "--n_head", 2, "--block_size", 256, "--val_tokens", 16384]


def every(steps):
    """Flags: evaluate, sample and save every `steps` steps."""
    kinds = "val", "hellaswag", "sample", "checkpoint"
    return [word for kind in kinds for word in (f"--{kind}_every", steps)]


class Report:
    """What one process of run.py wrote (see its Recorder), and what the command printed. Its steps are the
    optimizer's updates."""

    def __init__(self, path, output):
        self.__dict__.update(json.loads(path.read_text()))
        self.output = output

    def bytes_of_training(self, which):
        """Read and written by the forward and the backward of a micro-step: by the graphs compiled last."""
        return sum([g[which] for g in self.graphs if g["kind"] == kind][-1]
                   for kind in ("forward", "backward"))

    def launches(self):
        """Of kernels, in the last update."""
        counts = self.steps[-1]["counts"].items()
        return sum(n for what, n in counts if not re.match("copy|wait|cuda", what))

    def parameters(self):
        return int(re.search(r"([\d,]+) parameters", self.output)[1].replace(",", ""))


def compiled_once(report):
    """Without graph breaks, and before the first step. Validation runs in training's graph, too. (DDP divides
    the graph into several, so that it can send gradients during the backward.)"""
    assert not report.breaks
    kinds = [graph["kind"] for graph in report.graphs]
    assert kinds.count("forward") == kinds.count("backward") == len(kinds) / 2
    assert not [graph for graph in report.graphs if graph["step"]], "compiled after the first step"
    assert not [what for step, what in report.recompilations if step]


def rotary_tables_are_constants(report):
    """No kernel computes the tables of the rotary embedding anew."""
    assert report.graphs
    for graph in report.graphs:
        assert not {"sin", "cos", "pow"} & set(graph["functions"])


def nothing_waits(report, first, last, but=None):
    """From update `first` to `last`, and between them, nothing waits for the GPU or makes it wait, `but` a
    line with this text."""
    lines = {line for line, steps in report.waits.items() if any(first <= step < last for step in steps)}
    assert not [line for line in lines if not but or but not in line], f"wait for the GPU: {lines}"
    for step in report.steps[first:last]:
        counts = step["counts"]
        launches = counts["aten kernels"] + counts.get("triton kernels", 0)
        for what in counts:
            assert what not in ("wait for the device", "cudaMalloc", "cudaFree", "cudaHostAlloc"), what
            assert what != "wait for a stream" or but
            assert not ("pageable" in what or "blocking" in what), f"{what}: pinned memory would not wait"
            # the host may wait for the previous step, not to run ahead, while the GPU works on this one
            if behind := re.search(r"wait for an event, (\d+)", what):
                assert int(behind[1]) >= launches / 2, what
