"""Runs a script on the stand-in GPU, and reports afterwards what it asked of the GPU:

    PY=$(tests/null_gpu/setup)
    $PY tests/null_gpu/run.py train_gpt2.py --data DIR --batch_size 64 --max_steps 6 --hellaswag_every 0
    export NULL_GPU_COUNT=2
    $PY -m torch.distributed.run --standalone --nproc_per_node=2 tests/null_gpu/run.py train_gpt2.py ...

After `null-gpu:` it prints peak memory, the compiled graphs with the bytes that each reads and writes (as
Inductor counts them), graph breaks, recompilations, the last step's launches, copies, waits and collectives,
the host's time for a step, and the lines that wait for the GPU from the fourth step on, those between steps
included. A step ends with the first optimizer's step().

Its own flags come before the script. `--json FILE` writes all of that (several processes: to FILE.RANK).
`--watch MODULE.NAME` records the first argument and the result of each call of that function of the script's.
"""
import argparse
import ast
import atexit
import collections
import json
import linecache
import logging
import os
import re
import subprocess
import sys
import time
import traceback
import types
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

WARM = 3                # steps that compile and fill caches; after them nothing should wait
HBM = 3.35e12           # bytes a second of an H100's memory


class Recorder(logging.Handler):
    """Records events of the run with their steps: .steps, .graphs, .recompilations, .waits, .watched."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder) + os.sep
        self.optimizer = None
        self.steps, self.graphs, self.recompilations, self.watched = [], [], [], []
        self.waits = collections.defaultdict(list)
        self.kernels, self.clock, self.code = {}, time.perf_counter(), None
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
        launches = re.findall(r"^\s+(triton_\w+)\.run\(", code, re.M)
        self.graphs.append(dict(step=len(self.steps), kind=kind, launches=len(launches),
                                kernels=len(set(launches)), bytes=V.graph.count_bytes()[0],
                                products=len(re.findall(r"extern_kernels\.\w+\(", code))))

    def step(self, optimizer, args, kwargs):
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        taken = nullgpu.library.null_gpu_peak()
        counts, self.kernels, collectives = nullgpu.take_counts()
        now = time.perf_counter()
        self.steps.append(dict(counts=counts, collectives=collectives, taken=taken, seconds=now - self.clock,
                               held=torch.cuda.memory_allocated()))
        self.clock = now
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

    def watch(self, function):
        def watched(first, *args, **kwargs):
            result = function(first, *args, **kwargs)
            self.watched.append([first, result])
            return result
        return watched

    def report(self):
        return dict(
            code=self.code, card_bytes=nullgpu.library.null_gpu_bytes(), steps=self.steps, graphs=self.graphs,
            allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved(),
            breaks=dict(torch._dynamo.utils.counters["graph_break"]), recompilations=self.recompilations,
            waits=self.waits, watched=self.watched, kernels=self.kernels)

    def say(self):
        r = self.report()
        rank = f" {os.environ['RANK']}" if "RANK" in os.environ else ""
        lines = [f"peak {r['allocated'] / 2**30:.2f} GiB allocated, {r['reserved'] / 2**30:.2f} GiB reserved"]
        lines += [f"graph {g['kind']} after step {g['step']}: {g['launches']} Triton launches of "
                  f"{g['kernels']} kernels, {g['products']} library calls; "
                  f"{g['bytes'] / 1e9:.2f} GB read and written, "
                  f"{g['bytes'] / HBM * 1e3:.1f} ms at an H100's 3.35 TB/s" for g in r["graphs"]]
        lines += [f"graph breaks: {r['breaks'] or 'none'}",
                  f"recompilations: {len(r['recompilations']) or 'none'}"]
        lines += [f"  after step {step}: {text}" for step, text in r["recompilations"]]
        if r["steps"]:
            last = r["steps"][-1]
            counts, collectives = dict(sorted(last["counts"].items())), last["collectives"] or "none"
            lines += [f"step {len(r['steps'])}: {counts}; collectives: {collectives}"]
            seconds = sorted(s["seconds"] for s in r["steps"][WARM:])
            if seconds:
                lines += [f"the host's share of a step: {seconds[len(seconds) // 2] * 1e3:.1f} ms"]
            lines += [f"lines that wait for the GPU, after step {WARM}: {'' if r['waits'] else 'none'}"]
            lines += [f"  {len(steps)} x {line}" for line, steps in r["waits"].items()]
        print("".join(f"null-gpu{rank}: {line}\n" for line in lines), end="", flush=True)


class OnStandIn(subprocess.Popen):
    """The Python scripts that a script starts (bench.py's workers) run on the stand-in, too."""

    def __init__(self, args, *rest, **how):
        words = [str(word) for word in args]
        if words[0] == sys.executable and (at := [i for i, word in enumerate(words) if word.endswith(".py")]):
            args = [*words[:at[0]], __file__, *words[at[0]:]]
        super().__init__(args, *rest, **how)


def execute(script, recorder, watch):
    """`python script`, with the functions named in `watch` wrapped before its last `if __name__ == ...`."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module            # pickle and dataclasses look there
    tree = ast.parse(script.read_text(), str(script))
    linecache.updatecache(str(script))
    start = max((i for i, node in enumerate(tree.body)
                 if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)),
                default=len(tree.body))
    exec(compile(ast.Module(tree.body[:start], []), str(script), "exec"), module.__dict__)
    for where, name in (word.rsplit(".", 1) for word in watch):
        if where in sys.modules:
            setattr(sys.modules[where], name, recorder.watch(getattr(sys.modules[where], name)))
    exec(compile(ast.Module(tree.body[start:], []), str(script), "exec"), module.__dict__)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--watch", action="append", default=[])
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    script = args.script.resolve()
    sys.argv, sys.path[0] = [str(script), *args.flags], str(script.parent)
    sys.dont_write_bytecode = True
    recorder, subprocess.Popen = Recorder(script.parent), OnStandIn

    def end():
        if args.json:
            path = args.json + (f".{os.environ['RANK']}" if "RANK" in os.environ else "")
            Path(path).write_text(json.dumps(recorder.report()))
        recorder.say()
    if (script.parent / "runtime").is_dir():    # the numbers of kernels that compute nothing are no damage
        from runtime import integrity
        integrity.fault_of = integrity.find_fault = lambda *args: None
    atexit.register(end)                        # also run by processes that succeed and leave by os._exit
    try:
        execute(script, recorder, args.watch)
        recorder.code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        recorder.code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        recorder.code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(recorder.code)                     # skips torch's destructors, which would look for a driver


main()
