"""Counts on the stand-in GPU what bench.py predict computes with, into assets/counts.json:

    PY=$(tests/null_gpu/setup)
    $PY tests/null_gpu/count.py                                     our ladder, the recipes, optimizers
    $PY tests/null_gpu/count.py --build_nanogpt DIR                 what the lecture's ladder ran
    $PY tests/null_gpu/count.py --nanogpt DIR                       what PyTorch's blog ran
    $PY tests/null_gpu/count.py --only "gpt2 fp32 naive 50257"      some entries, by name
    $PY tests/null_gpu/count.py --only ... --print                  to the screen, without changing the file
    $PY tests/null_gpu/count.py --only ... --print --batch 16       only at this micro-batch

DIR is a clone of the project, whose model is read at the commit of that time. An entry takes a minute or two.
The counts of a forward and backward are made at two micro-batches, because they grow linearly.
"""
import argparse
import gc
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]
import nullgpu                                                          # noqa: E402, before torch
import torch                                                            # noqa: E402
import torch._functorch.config                                          # noqa: E402
import torch._inductor.config                                           # noqa: E402
import torch._inductor.graph                                            # noqa: E402
from torch._inductor.virtualized import V                               # noqa: E402
from torch.nn.attention import sdpa_kernel                              # noqa: E402

from model import fresh_model                                            # noqa: E402
import train_gpt2                                                       # noqa: E402
from counts import Counter, count_graph                                 # noqa: E402
from runtime.device import compile_model, place_model                   # noqa: E402
from runtime.distributed import Process                    # noqa: E402
from benchmarks.steps import PlainAdamW                                 # noqa: E402
from runtime.attention import SDPA_KERNELS                              # noqa: E402
from runtime.signals import StopSignals                    # noqa: E402

FILE = ROOT / "assets" / "counts.json"
T = 1024
# train_gpt2.py at these commits of build-nanogpt; model.py of nanoGPT at the blog's (appendix B)
LECTURE = {"naive": "177e4cd", "flash": "7ee630c"}
BLOG = "b3c17c6c6a363357623f223aaa4a8b1e89d0a465"


@dataclass
class Entry:
    """A model and how it runs. Its counts are those of one micro-batch's forward and backward."""
    model: str = "gpt2"                 # a recipe of ours; lecture: build-nanogpt's model; nanogpt
    dtype: str = "bfloat16"
    attention: str = "auto"
    vocab_size: int = 50304
    compile: bool = True
    batches: tuple = (8, 16)
    parts: tuple = ()                   # of an optimizer's step, which is counted instead


ENTRIES = {
    # the rungs of bench.py ladder
    "gpt2 fp32 naive 50257": Entry(dtype="float32", attention="naive", vocab_size=50257, compile=False),
    "gpt2 bf16 naive 50257": Entry(attention="naive", vocab_size=50257, compile=False),
    "gpt2 compile naive 50257": Entry(attention="naive", vocab_size=50257),
    "gpt2 compile flash 50257": Entry(attention="flash", vocab_size=50257),
    "gpt2 compile flash": Entry(attention="flash"),
    "gpt2 compile auto": Entry(),
    "speedrun compile flash": Entry("speedrun", attention="flash"),
    "speedrun compile auto": Entry("speedrun"),
    "frontier compile flash": Entry("frontier", attention="flash"),
    "frontier compile auto": Entry("frontier"),
    # the lecture's
    "lecture fp32 naive 50257": Entry("lecture", "float32", "naive", 50257, compile=False, batches=(16,)),
    "lecture bf16 naive 50257": Entry("lecture", "bfloat16", "naive", 50257, compile=False, batches=(16,)),
    "lecture compile naive 50257": Entry("lecture", "bfloat16", "naive", 50257, batches=(16,)),
    "lecture compile flash 50257": Entry("lecture", "bfloat16", "flash", 50257, batches=(16,)),
    "lecture compile flash": Entry("lecture", attention="flash"),
    # the blog's: nanoGPT's default micro-batch of 12
    "nanogpt compile naive 50257": Entry("nanogpt", attention="naive", vocab_size=50257, batches=(12,)),
    "nanogpt compile math 50257": Entry("nanogpt", attention="math", vocab_size=50257, batches=(12,)),
    "nanogpt compile efficient 50257": Entry("nanogpt", attention="efficient", vocab_size=50257,
                                             batches=(12,)),
    "nanogpt compile flash 50257": Entry("nanogpt", attention="flash", vocab_size=50257, batches=(12,)),
    "nanogpt compile flash": Entry("nanogpt", attention="flash", batches=(12,)),
    # optimizer steps: of ours all that train_step does after the backward, of the others as they did
    "step foreach": Entry(parts=("plain",)),
    "step fused": Entry(parts=("train_step",)),
    "step speedrun": Entry("speedrun", parts=("train_step",)),
    "step frontier": Entry("frontier", parts=("train_step",)),
    "step lecture": Entry("lecture", parts=("foreach",)),
    "step nanogpt": Entry("nanogpt", parts=("foreach", "clip")),
}


def source_of(clone, commit, file):
    return subprocess.run(["git", "-C", clone, "show", f"{commit}:{file}"], capture_output=True, text=True,
                          check=True).stdout


def peers_model(entry, clones):
    """The model of build-nanogpt or nanoGPT as it was for the published figure."""
    module = types.ModuleType("peer")
    sys.modules["peer"] = module                            # dataclasses look there
    if entry.model == "lecture":
        commit = LECTURE["naive" if entry.attention == "naive" else "flash"]
        source = source_of(clones["lecture"], commit, "train_gpt2.py")
        # from here on, the script loads data and trains
        exec(source.split("\nimport tiktoken")[0].split("\n# attempt to autodetect")[0], module.__dict__)
        return module.GPT(module.GPTConfig(vocab_size=entry.vocab_size))
    source = source_of(clones["nanogpt"], BLOG, "model.py")
    if entry.attention == "naive":                          # the blog's baseline: without torch's SDPA
        chosen = "self.flash = hasattr(torch.nn.functional, 'scaled_dot_product_attention')"
        assert chosen in source
        source = source.replace(chosen, "self.flash = False")
    exec(source, module.__dict__)
    return module.GPT(module.GPTConfig(block_size=T, vocab_size=entry.vocab_size, dropout=0.0, bias=False))


def our_config(entry):
    return train_gpt2.Config(**train_gpt2.RECIPES[entry.model].defaults | dict(
        recipe=entry.model, vocab_size=entry.vocab_size, dtype=entry.dtype, attention=entry.attention,
        compile=entry.compile, loss_chunk=0, sequence_length=T, batch_size="8", total_batch_size=8 * T))


def build(entry, clones):
    """(the raw model, the one that is called)."""
    if entry.model in clones:
        raw = peers_model(entry, clones).cuda()
        return raw, torch.compile(raw) if entry.compile else raw
    config = our_config(entry)
    raw = fresh_model(config)
    place_model(config, raw, "cuda")
    return raw, compile_model(config, raw, Process(device="cuda")) if entry.compile else raw


def calls(counts):
    """Launches of kernels and library calls, from nullgpu.take_counts."""
    other = ("wait", "cudaMalloc", "cudaFree", "cudaHostAlloc", "out of memory")
    return sum(n for what, n in counts.items() if not what.startswith(other))


def count_micro_step(entry, raw, model, B):
    """{products, attention, bytes, launches, memory} of a forward and a backward."""
    graphs = []
    torch._inductor.graph.GraphLowering.save_output_code = staticmethod(
        lambda code: graphs.append(count_graph(V.graph)))
    torch._dynamo.reset()
    x = torch.zeros(B, T, dtype=torch.int64, device="cuda")
    own_kernel = entry.model in ("lecture", "nanogpt") and entry.attention in SDPA_KERNELS
    if entry.compile:
        micro_step(entry, model, x, own_kernel)             # compiles
    raw.zero_grad(set_to_none=True)
    nullgpu.take_counts()
    torch.cuda.reset_peak_memory_stats()
    if entry.compile:
        micro_step(entry, model, x, own_kernel)
        assert len(graphs) == 2, f"{len(graphs)} graphs instead of a forward and a backward"
        result = graphs[0]
        result.products += graphs[1].products
        result.attention += graphs[1].attention
        result.bytes += graphs[1].bytes
    else:
        with Counter() as mode:
            micro_step(entry, model, x, own_kernel)
        result = mode.counts
    return result.as_dict() | {"launches": calls(nullgpu.take_counts()[0]),
                               "memory": torch.cuda.max_memory_allocated()}


def micro_step(entry, model, x, own_kernel):
    with torch.autocast("cuda", torch.bfloat16, enabled=entry.dtype == "bfloat16"):
        if own_kernel:
            with sdpa_kernel(SDPA_KERNELS[entry.attention]):
                loss = model(x, x)[1]
        else:
            loss = model(x, x)[1]
    loss.backward()


class Given(torch.nn.Module):
    """In place of the model: its parameters have their gradients already."""

    def __init__(self, raw):
        super().__init__()
        self.raw, self.loss = raw, torch.zeros((), device="cuda", requires_grad=True)

    def forward(self, x, y):
        return None, self.loss


def count_optimizer(entry, raw):
    """What follows the backward: {products, attention, bytes, launches, memory of moments, parameters}."""
    before = torch.cuda.memory_allocated()
    for p in raw.parameters():
        p.grad = torch.empty_like(p)
    if "foreach" in entry.parts:
        optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-4)

        def step():
            if "clip" in entry.parts:
                torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        step = our_step(entry, raw)
    step()
    for p in raw.parameters():                              # the step has freed them
        p.grad = torch.empty_like(p)
    nullgpu.take_counts()
    with Counter() as mode:
        step()
    return mode.counts.as_dict() | {"launches": calls(nullgpu.take_counts()[0]),
                                    "memory": torch.cuda.memory_allocated() - before,
                                    "parameters": sum(p.numel() for p in raw.parameters())}


def our_step(entry, raw):
    config = our_config(entry)
    process = Process(device="cuda")
    optimizers = train_gpt2.RECIPES[entry.model].optimizers(raw, config)
    if "plain" in entry.parts:
        optimizers = [PlainAdamW([{n: g[n] for n in ("params", "lr", "weight_decay")}
                                  for g in optimizers[0].param_groups], betas=(0.9, 0.95))]
    x = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
    loader = types.SimpleNamespace(divide=lambda updates: (1, 1), next_batch=lambda count: (x, x))
    state = types.SimpleNamespace(step=0, optimizers=optimizers, model=raw,
                                  scaler=torch.amp.GradScaler("cuda", enabled=False))
    autocast = torch.autocast("cuda", torch.bfloat16)
    return lambda: train_gpt2.train_step(Given(raw), state, loader, autocast, config.grad_clip, process,
                                         StopSignals(process))


def count(entry, clones, batch):
    raw, model = build(entry, clones)
    if entry.parts:
        return {"step": count_optimizer(entry, raw)}
    return {str(B): count_micro_step(entry, raw, model, B) for B in ((batch,) if batch else entry.batches)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build_nanogpt")
    parser.add_argument("--nanogpt")
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES))
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    torch.set_float32_matmul_precision("high")
    clones = {"lecture": args.build_nanogpt, "nanogpt": args.nanogpt}
    given = [name for name, clone in clones.items() if clone]
    names = args.only or [name for name, entry in ENTRIES.items()
                          if (entry.model in given if given else entry.model not in clones)]
    for name in names:
        counts = count(ENTRIES[name], clones, args.batch)
        torch._dynamo.reset()                               # its caches hold the model
        gc.collect()
        torch.cuda.empty_cache()
        if args.print:
            print(json.dumps({name: counts}), flush=True)
            continue
        known = json.loads(FILE.read_text()) if FILE.exists() else {"torch": "", "counts": {}}
        known["torch"] = torch.__version__.split("+")[0]
        known["counts"][name] = counts
        known["counts"] = {each: known["counts"][each] for each in ENTRIES if each in known["counts"]}
        write(known)
        print(name, {B: (c["bytes"], c["launches"], c["memory"]) for B, c in counts.items()}, flush=True)


def write(known):
    """One line for each micro-batch of each entry."""
    entries = []
    for name, counts in known["counts"].items():
        lines = ",\n".join(f"   {json.dumps(B)}: {json.dumps(c)}" for B, c in counts.items())
        entries.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    FILE.write_text(f'{{\n "torch": {json.dumps(known["torch"])},\n "counts": {{\n'
                    + ",\n".join(entries) + "\n }\n}\n")


if __name__ == "__main__":
    main()
