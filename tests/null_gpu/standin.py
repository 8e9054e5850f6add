"""run.py's report on a process, and what the checks assert about it."""
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GiB = 2**30
SMALL = [
    "--n_layer", 2, "--n_embd", 128, "--n_head", 2, "--block_size", 256, "--val_tokens", 16384,
]


def every(steps):
    """Flags: evaluate, sample and save every `steps` steps."""
    flags = []
    for kind in ("val", "hellaswag", "sample", "checkpoint"):
        flags += [f"--{kind}_every", steps]
    return flags


class Report:
    """What one process of run.py wrote (see its Recorder), and what the command printed.

    Its steps are the optimizer's updates.
    """

    def __init__(self, path, output):
        found = json.loads(path.read_text())
        self.steps = found["steps"]                     # [{counts, collectives, ...}]
        self.graphs = found["graphs"]                   # [{step, kind, bytes, ...}]
        self.recompilations = found["recompilations"]   # [[step, text]]
        self.waits = found["waits"]                     # {line of code: [steps]}
        self.breaks = found["breaks"]                   # {reason: count}, of graphs
        self.allocated = found["allocated"]             # bytes
        self.output = output

    def bytes_of_training(self, which):
        """Read and written by a forward and a backward: by the graphs that were compiled last."""
        last = {graph["kind"]: graph[which] for graph in self.graphs}
        return last["forward"] + last["backward"]

    def bytes_of_graphs(self):
        """Read and written by all graphs. A forward has several on a rank of many."""
        return sum(graph["bytes"] for graph in self.graphs)

    def count(self, kind):
        """How many graphs of that kind there are."""
        return sum(graph["kind"] == kind for graph in self.graphs)

    def launches(self):
        """Of kernels, in the last update."""
        total = 0
        for what, count in self.steps[-1]["counts"].items():
            if not what.startswith(("copy", "wait", "cuda")):
                total += count
        return total

    def parameters(self):
        found = re.search(r"([\d,]+) parameters", self.output)
        return int(found[1].replace(",", ""))


def compiled_once(report):
    """Without graph breaks, and before the first step. Validation runs in training's graph, too.

    (DDP divides the graph into several, so that it can send gradients during the backward.)
    """
    assert not report.breaks
    kinds = [graph["kind"] for graph in report.graphs]
    assert kinds.count("forward") == kinds.count("backward") == len(kinds) / 2

    late_graphs = [graph for graph in report.graphs if graph["step"] > 0]
    assert not late_graphs, "compiled after the first step"
    late_texts = [text for step, text in report.recompilations if step > 0]
    assert not late_texts


def rotary_tables_are_constants(report):
    """No kernel computes the tables of the rotary embedding anew."""
    assert report.graphs
    for graph in report.graphs:
        assert not {"sin", "cos", "pow"} & set(graph["functions"])


def nothing_waits(report, first, last, but=None):
    """From update `first` to `last`, and between them, nothing waits for the GPU or makes it wait.

    `but`: a text of lines that may wait.
    """
    for line, steps in report.waits.items():
        is_allowed = but is not None and but in line
        if not is_allowed:
            assert not any(first <= step < last for step in steps), f"wait for the GPU: {line}"
    for step in report.steps[first:last]:
        update_waits_for_nothing(step["counts"], may_wait=but is not None)


def update_waits_for_nothing(counts, may_wait):
    launches = counts["aten kernels"] + counts.get("triton kernels", 0)
    for what in counts:
        assert what not in ("wait for the device", "cudaMalloc", "cudaFree", "cudaHostAlloc"), what
        if not may_wait:
            assert what != "wait for a stream"
        is_slow_copy = "pageable" in what or "blocking" in what
        assert not is_slow_copy, f"{what}: pinned memory would not wait"

        # The host may wait for the previous step, not to run ahead, while the GPU runs this one.
        event = re.search(r"wait for an event, (\d+)", what)
        if event:
            assert int(event[1]) >= launches / 2, what
