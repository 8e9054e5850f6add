"""Runs a script on the simulated GPU, and reports afterwards what it asked of the GPU:

    PY=$(tests/null_gpu/setup)
    $PY tests/null_gpu/run.py train_gpt2.py --data DIR --batch_size 64 --max_steps 6 --hellaswag_every 0
    export NULL_GPU_COUNT=2
    $PY -m torch.distributed.run --standalone --nproc_per_node=2 tests/null_gpu/run.py train_gpt2.py ...

After `null-gpu:` it prints peak memory, the compiled graphs with the bytes that each reads and writes (as
Inductor counts them), graph breaks, recompilations, the last update's launches, copies, waits and
collectives, and the lines that wait for the GPU from the fourth update on, those between updates included. An
update ends with the first optimizer's step(). `--json FILE` before the script writes all of that (several
processes: to FILE0, FILE1, ...).
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
    """Records events of the run with their updates: .steps, .graphs, .recompilations, .waits."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.optimizer = str(folder) + os.sep, None
        self.steps, self.graphs, self.recompilations = [], [], []
        self.waits = collections.defaultdict(list)
        # a graph that comes from a cache would not be recorded
        torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
        torch._inductor.graph.GraphLowering.save_output_code = staticmethod(self.graph)
        register_optimizer_step_post_hook(self.step)
        torch._logging.set_logs(recompiles=True)
        logger = torch._logging.getArtifactLogger("torch._dynamo.guards", "recompiles")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record):
        self.recompilations.append([len(self.steps), record.getMessage().strip().replace("\n", " ")[:400]])

    def graph(self, code):
        kind = "backward" if V.graph.is_backward else "inference" if V.graph.is_inference else "forward"
        sizes = [[node.is_extern() or node.is_template(), node.get_read_write_buffers_sizes()]
                 for node in V.graph.scheduler.nodes]
        self.graphs.append(dict(step=len(self.steps), kind=kind, bytes=sum(size for _, size in sizes),
                                outside=sum(size for library, size in sizes if not library),
                                launches=len(re.findall(r"^\s+triton_\w+\.run\(", code, re.M)),
                                functions=sorted(set(re.findall(r"\b(?:libdevice|tl_math)\.(\w+)\(", code))),
                                products=len(re.findall(r"extern_kernels\.\w+\(", code))))

    def step(self, optimizer, args, kwargs):
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        taken = nullgpu.library.null_gpu_peak()
        counts, collectives = nullgpu.take_counts()
        self.steps.append(dict(counts=counts, collectives=collectives, taken=taken,
                               held=torch.cuda.memory_allocated()))
        if len(self.steps) == WARM:
            warnings.simplefilter("always")
            warnings.showwarning = self.warning
            torch.cuda.set_sync_debug_mode("warn")

    def warning(self, message, category, filename, lineno, *rest):
        if "called a synchronizing" not in str(message):
            sys.stderr.write(f"{filename}:{lineno}: {category.__name__}: {message}\n")
            return
        stack = [f for f in traceback.extract_stack() if f.filename != __file__]
        f = [stack[-1], *(f for f in stack if f.filename.startswith(self.folder)
                          and "site-packages" not in f.filename)][-1]
        self.waits[f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}"].append(len(self.steps))

    def report(self, path):
        """Prints it, and writes it to `path` as JSON."""
        r = dict(steps=self.steps, graphs=self.graphs, recompilations=self.recompilations, waits=self.waits,
                 allocated=torch.cuda.max_memory_allocated(),
                 breaks=dict(torch._dynamo.utils.counters["graph_break"]))
        reserved, rank = torch.cuda.max_memory_reserved(), os.environ.get("RANK", "")
        lines = [f"peak {r['allocated'] / 2**30:.2f} GiB, {reserved / 2**30:.2f} reserved; "
                 f"graph breaks: {r['breaks'] or 'none'}"]
        lines += [f"graph {g['kind']} after update {g['step']}: {g['launches']} Triton launches, "
                  f"{g['products']} library calls, {g['bytes'] / 1e9:.2f} GB, of them outside products and "
                  f"attention {g['outside'] / 1e9:.2f}" for g in self.graphs]
        lines += [f"recompiled after update {step}: {text}" for step, text in self.recompilations]
        lines += [f"update {len(self.steps)}: {dict(sorted(last['counts'].items()))}; collectives: "
                  f"{last['collectives'] or 'none'}" for last in self.steps[-1:]]
        lines += [f"waits for the GPU, {len(steps)} times: {line}" for line, steps in self.waits.items()]
        print("".join(f"null-gpu{rank}: {line}\n" for line in lines), end="", flush=True)
        if path:
            Path(path + rank).write_text(json.dumps(r))


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json")
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script.resolve()
    sys.argv, sys.path[0] = [str(script), *args.flags], str(script.parent)
    sys.dont_write_bytecode = True
    recorder, leave, code = Recorder(script.parent), os._exit, 0

    def end(code):
        recorder.report(args.json)
        leave(code)                 # skips torch's destructors, which would look for a driver
    os._exit = end                  # of several ranks each leaves by it
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    end(code)


main()
