"""Runs a script on the simulated GPU, and reports afterwards what it asked of the GPU:

    PY=$(tests/null_gpu/setup)
    RUN=tests/null_gpu/run.py
    $PY $RUN train_gpt2.py --data DIR --batch_size 64 --max_steps 6 --hellaswag_every 0
    export NULL_GPU_COUNT=2
    $PY -m torch.distributed.run --standalone --nproc_per_node=2 $RUN train_gpt2.py ...

After `null-gpu:` it prints peak memory, the compiled graphs with the bytes that each reads and
writes (as Inductor counts them), graph breaks, recompilations, the last update's launches, copies,
waits and collectives, and the lines that wait for the GPU from the fourth update on, those between
updates included. An update ends with the first optimizer's step(). `--json FILE` before the script
writes all of that (several processes: to FILE0, FILE1, ...).
"""
import argparse
import atexit
import collections
import json
import logging
import os
import re
import runpy
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import nullgpu                                                          # noqa: E402, before torch
import torch                                                            # noqa: E402
import torch._dynamo.utils                                              # noqa: E402
import torch._functorch.config                                          # noqa: E402
import torch._inductor.config                                           # noqa: E402
import torch._inductor.graph                                            # noqa: E402
from torch._inductor.virtualized import V                               # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook     # noqa: E402

WARM = 3                # updates that compile and fill caches; after them nothing should wait


class Recorder(logging.Handler):
    """Records events of the run with the update in which they come."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder) + os.sep          # of the script: its lines are shown in `waits`
        self.optimizer = None                       # the first one that steps
        self.steps = []
        self.graphs = []
        self.recompilations = []
        self.waits = collections.defaultdict(list)  # {line of code: [updates]}

        # A graph that comes from a cache would not be recorded.
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        torch._inductor.graph.GraphLowering.save_output_code = staticmethod(self.graph)
        register_optimizer_step_post_hook(self.step)
        torch._logging.set_logs(recompiles=True)
        logger = torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record):
        """A message of Dynamo's: it compiles anew."""
        text = record.getMessage().strip().replace("\n", " ")
        self.recompilations.append([len(self.steps), text[:400]])

    def graph(self, code):
        """A graph that Inductor has compiled to this code."""
        kind = "forward"
        if V.graph.is_backward:
            kind = "backward"
        elif V.graph.is_inference:
            kind = "inference"

        all_bytes = 0
        outside = 0                                 # of matrix products and attention
        for node in V.graph.scheduler.nodes:
            size = node.get_read_write_buffers_sizes()
            all_bytes += size
            if not node.is_extern() and not node.is_template():
                outside += size
        functions = re.findall(r"\b(?:libdevice|tl_math)\.(\w+)\(", code)
        self.graphs.append({
            "step": len(self.steps),
            "kind": kind,
            "bytes": all_bytes,
            "outside": outside,
            "launches": len(re.findall(r"^\s+triton_\w+\.run\(", code, re.M)),
            "products": len(re.findall(r"extern_kernels\.\w+\(", code)),
            "functions": sorted(set(functions)),
        })

    def step(self, optimizer, args, kwargs):
        """An optimizer's step has ended."""
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        taken = nullgpu.library.null_gpu_peak()
        counts, collectives = nullgpu.take_counts()
        self.steps.append({
            "counts": counts,
            "collectives": collectives,
            "taken": taken,
            "held": torch.cuda.memory_allocated(),
        })
        if len(self.steps) == WARM:
            warnings.simplefilter("always")
            warnings.showwarning = self.warning
            torch.cuda.set_sync_debug_mode("warn")

    def warning(self, message, category, filename, lineno, *rest):
        """In the place of warnings.showwarning: a wait for the GPU is noted with its line."""
        if "called a synchronizing" not in str(message):
            sys.stderr.write(f"{filename}:{lineno}: {category.__name__}: {message}\n")
            return

        # The script's or the project's last line on the way to it, if there is one.
        stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        place = stack[-1]
        for frame in stack:
            is_ours = frame.filename.startswith(self.folder)
            if is_ours and "site-packages" not in frame.filename:
                place = frame
        line = f"{Path(place.filename).name}:{place.lineno} in {place.name}: {place.line}"
        self.waits[line].append(len(self.steps))

    def report(self, path):
        """Prints all of it, and writes it to `path` as JSON."""
        found = {
            "steps": self.steps,
            "graphs": self.graphs,
            "recompilations": self.recompilations,
            "waits": self.waits,
            "allocated": torch.cuda.max_memory_allocated(),
            "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        }
        rank = os.environ.get("RANK", "")
        for line in self.lines(found):
            print(f"null-gpu{rank}: {line}", flush=True)
        if path:
            Path(path + rank).write_text(json.dumps(found))

    def lines(self, found):
        reserved = torch.cuda.max_memory_reserved()
        yield (f"peak {found['allocated'] / 2**30:.2f} GiB, {reserved / 2**30:.2f} reserved; "
               f"graph breaks: {found['breaks'] or 'none'}")
        for graph in self.graphs:
            yield (f"graph {graph['kind']} after update {graph['step']}: {graph['launches']} "
                   f"Triton launches, {graph['products']} library calls, "
                   f"{graph['bytes'] / 1e9:.2f} GB, of them outside "
                   f"products and attention {graph['outside'] / 1e9:.2f}")
        for step, text in self.recompilations:
            yield f"recompiled after update {step}: {text}"
        for last in self.steps[-1:]:
            yield (f"update {len(self.steps)}: {dict(sorted(last['counts'].items()))}; "
                   f"collectives: {last['collectives'] or 'none'}")
        for line, steps in self.waits.items():
            yield f"waits for the GPU, {len(steps)} times: {line}"


def run_script(script):
    """Its exit code, as Python would give it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json")
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    script = args.script.resolve()
    sys.argv = [str(script), *args.flags]
    sys.path[0] = str(script.parent)
    sys.dont_write_bytecode = True
    recorder = Recorder(script.parent)
    leave = os._exit

    def end(code):
        recorder.report(args.json)
        leave(code)                 # skips torch's destructors, which would look for a driver

    os._exit = end                  # by which each of several ranks leaves
    code = run_script(script)
    atexit._run_exitfuncs()
    end(code)


main()
