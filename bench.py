"""Measures what the README claims, on the machine at hand: one table a command.

    python bench.py ladder          from fp32 and textbook attention to the step that trains, rung by rung
    python bench.py attention       every attention kernel: time, memory, and error against float64
    python bench.py memory          memory a sequence, and the largest micro-batch, by attention kernel and loss
    python bench.py data            tokens/s of the loader, and of fineweb.py by its workers
    python bench.py hellaswag       HellaSwag in batches against one example a forward
    python bench.py scaling         step time by processes; on paper: model sizes, and what GPUs must exchange
    python bench.py peer PATH       our step and that of a clone of build-nanogpt, in turn
    python bench.py recipes DATA    both recipes on a folder of shards: validation loss against tokens; what each idea brings

All that is timed is the code that trains (train_gpt2.train_step): there is no loop of its own here. Each line is measured in
a process of its own, so that none inherits another's memory or compiled code, and the whole table --turns times over:
shared machines change their speed within minutes, and medians over turns do not follow.
"""
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import hellaswag
import train_gpt2
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.ablation import recipes_table
from runtime.benchmark import (BENCH, GB, PlainAdamW, Setting, largest_fit, machine, matmul_seconds, measure,
                               median_ms, peak_memory, peers_step, print_table, random_tokens, rss_and_peak,
                               time_steps, find_largest)
from runtime.checks import automatic_values
from runtime.cli import FlagParser, UserError, run_command, parse_int
from runtime.dataloader import INPUT_TXT, TokenLoader, TokenDataset, to_device
from runtime.device import (choose_device, choose_dtype, is_out_of_memory, make_autocast,
                            peak_flops)
from runtime.distributed import setup_process
from runtime.files import replace_file
from runtime.kernels import ATTENTION, attention, check_attention, document_window_mask
from runtime.plots import plot_ladder
from runtime.shards import write_shard
from runtime.tokenizer import VOCAB_SIZE

SIZES = GPT2_SIZES | {"small": dict(n_layer=4, n_head=4, n_embd=256),       # to try a command, and for what a CPU can train
                      "tiny": dict(n_layer=4, n_head=2, n_embd=128)}


def shape_of(s):
    """n_layer, n_head, n_embd."""
    heads = train_gpt2.RECIPES[s.recipe].defaults.get("n_head")
    return SIZES[s.size] | ({"n_head": heads} if heads and s.size == "gpt2" else {})


def our_step(s):
    """(a function that does one optimizer step of setting `s` as train_gpt2.py does it, the model)."""
    config = train_gpt2.Config(**train_gpt2.RECIPES[s.recipe].defaults | shape_of(s) | dict(
        recipe=s.recipe, total_batch_size=s.B * s.T * s.processes, batch_size=str(s.B), sequence_length=s.T, block_size=s.T,
        vocab_size=s.vocab_size, device=s.device, dtype=s.dtype, tf32=s.tf32, compile=s.compile, attention=s.attention,
        loss_chunk=s.loss_chunk, seed=0))
    process = setup_process(config, s.tune_memory)
    config = replace(config, **automatic_values(config, process.device))
    state, _, wrapped, autocast = train_gpt2.build_training(config, process)
    if not s.fused:
        state.optimizers = [PlainAdamW([{name: g[name] for name in ("params", "lr", "weight_decay")}
                                        for g in optimizer.param_groups], betas=(0.9, 0.95))
                            if isinstance(optimizer, torch.optim.Adam) else optimizer for optimizer in state.optimizers]
    dataset = TokenDataset([random_tokens(20 * s.B * s.T * s.processes + 1)], s.T)
    loader = TokenLoader(dataset, config.total_batch_size, s.B, process.rank, process.world_size, process.device)
    loader.start(0)
    return lambda: train_gpt2.train_step(wrapped, state, loader, autocast, config.grad_clip, process), state.model


def measure_step(s):
    step, model = peers_step(s, SIZES[s.size]) if s.peer else our_step(s)
    if s.memory_gb:
        gpu = int(s.device.partition(":")[2] or 0)
        fraction = s.memory_gb * GB / torch.cuda.mem_get_info(gpu)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), gpu)
    warmup_seconds, seconds = time_steps(step, s)
    result = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": peak_memory(s.device)}
    if not s.peer:
        result |= {"flops_per_token": model.flops_per_token(s.T), "peak_flops": peak_flops(s.device)}
    return result


def measure_matmul(s):
    setup_process(train_gpt2.Config(device=s.device, tf32=s.tf32))
    return {"seconds": matmul_seconds(s, shape_of(s))}


def measure_attention(s):
    """Time and memory of forward and backward, and the relative error of output and gradients against float64."""
    heads, hs = shape_of(s)["n_head"], shape_of(s)["n_embd"] // shape_of(s)["n_head"]
    process = setup_process(train_gpt2.Config(device=s.device))
    dtype, cuda = getattr(torch, s.dtype), s.device.startswith("cuda")
    torch.manual_seed(0)

    def inputs(B):
        return [torch.randn(B, s.T, heads, hs, device=process.device).to(dtype).transpose(1, 2) for _ in range(4)]

    def mask_for(B, T):
        """For flex: one document, and a window as long as it is, which is the causal mask. A model makes it once a forward."""
        tokens, window = torch.zeros(B, T, dtype=torch.int64, device=process.device), torch.tensor(T, device=process.device)
        return document_window_mask(tokens, T, window, as_blocks=True) if s.attention == "flex" else None

    def forward_and_backward(q, k, v, g, kernel, mask=None):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        y = attention(q, k, v, kernel, mask)
        y.backward(g)
        return y.detach(), q.grad, k.grad, v.grad

    forward_and_backward(*(t[:, :, :64] for t in inputs(1)), s.attention, mask_for(1, 64))         # loads libraries
    q, k, v, g = inputs(s.B)
    mask = mask_for(s.B, s.T)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else rss_and_peak()[0]
    forward_and_backward(q, k, v, g, s.attention, mask)
    after = torch.cuda.max_memory_allocated() if cuda else rss_and_peak()[1]
    _, seconds = time_steps(lambda: forward_and_backward(q, k, v, g, s.attention, mask), s)
    small = inputs(1)
    found = forward_and_backward(*small, s.attention, mask_for(1, s.T))
    expected = forward_and_backward(*(t.double() for t in small), "naive")
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    return {"seconds": seconds, "memory": after - before, "error_forward": errors[0], "error_backward": max(errors[1:])}


def synthetic_examples(n):
    """HellaSwag's form and about its lengths (contexts of 15 to 80 words, endings of 5 to 30), from input.txt."""
    rng = np.random.default_rng(0)
    words = INPUT_TXT.read_text(encoding="utf-8").split()

    def some(low, high):
        start = rng.integers(len(words) - high)
        return " ".join(words[start:start + rng.integers(low, high)])
    return [{"ctx": some(15, 80), "endings": [some(5, 30) for _ in range(4)], "label": int(rng.integers(4))} for _ in range(n)]


def measure_hellaswag(s):
    """Seconds of HellaSwag over s.steps examples in forwards of s.B rows."""
    process = setup_process(train_gpt2.Config(device=s.device))
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, s.vocab_size, **SIZES[s.size])).to(process.device)
    batches = hellaswag.make_batches(synthetic_examples(s.steps), 1024, s.B)
    autocast = make_autocast(process.device, s.dtype)
    counts = []

    def evaluate():
        counts[:] = hellaswag.evaluate(model, batches, process.device, autocast)
    _, seconds = time_steps(evaluate, replace(s, warmup=1, steps=3))
    return {"seconds": seconds, "correct": int(counts[0])}


def measure_loader(s):
    """Tokens/s of TokenLoader on one thread over one epoch of four shards of odd lengths, their edges and hashes included."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [Path(folder) / f"x_train_{i}.{s.size}" for i in range(4)]
        for i, path in enumerate(shards):
            write_shard(path, random_tokens(4_000_000 + 1013 * i))
        dataset = TokenDataset(shards, s.T, 1337, s.recipe == "shuffled", VOCAB_SIZE)
        loader = TokenLoader(dataset, s.B * s.T, s.B)
        rates = []
        for epoch in range(s.steps):
            start, steps = time.perf_counter(), dataset.total // s.B
            for step in range(steps * epoch, steps * (epoch + 1)):
                to_device(loader.rows(step, 0), "cpu")
            rates.append(steps * s.B * s.T / (time.perf_counter() - start))
    return {"rates": rates}


WORKERS = {"step": measure_step, "matmul": measure_matmul, "attention": measure_attention, "hellaswag": measure_hellaswag,
           "loader": measure_loader}


def work(setting):
    """What `python bench.py work JSON` does: prints the measured dict as its last line. Of several processes the first prints
    it, and any that fails: its exit code lets torchrun end the others, which would wait for it inside a collective."""
    s = Setting(**json.loads(setting))
    try:
        result = WORKERS[s.what](s)
    except Exception as error:
        if is_out_of_memory(error):
            result = {"failed": "out of memory"}
        else:
            traceback.print_exc()
            result = {"failed": (str(error).strip() or repr(error)).split("\n")[-1][:200]}
    if "failed" in result or int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit("failed" in result)            # without waiting for the loader's thread and the other processes


def rungs(base, compiles):
    """(name, setting, None), or (name, None, why it is left out on this device), each rung with those before it."""
    cuda = base.device.startswith("cuda")
    s = replace(base, dtype="float32", tf32=not cuda, attention="naive", vocab_size=50257, fused=False,
                loss_chunk=-1 if cuda else 0, tune_memory=cuda)
    yield "float32, textbook attention, vocabulary 50257, eager, plain AdamW", s, None
    if cuda:
        s = replace(s, tf32=True)
    yield "+ TF32", *((s, None) if cuda else (None, "TF32 is a format of NVIDIA's GPUs"))
    s = replace(s, dtype=base.dtype)
    yield (f"+ {base.dtype} autocast", *((s, None) if base.dtype != "float32" else (None, "no 16-bit products in this hardware")))
    if compiles:
        s = replace(s, compile=True)
    yield "+ torch.compile", *((s, None) if compiles else (None, "on a CPU by --compile only"))
    s = replace(s, attention="flash")
    yield "+ SDPA's flash attention", s, None
    s = replace(s, vocab_size=50304)
    yield "+ vocabulary 50304", s, None
    s = replace(s, fused=True)
    yield "+ fused AdamW", s, None
    if not cuda:
        s = replace(s, tune_memory=True)
        yield "+ freed memory kept (mallopt)", s, None
        s = replace(s, loss_chunk=-1)
        yield "+ loss in tiles that stay in the cache", s, None
    s = replace(s, attention="auto")
    yield "+ attention kernel of choice (auto)", s, None
    s = replace(s, B=4 * s.B)
    yield f"+ micro-batch {s.B}", *((s, None) if cuda else (None, "1,024 tokens keep a CPU busy"))


def ladder(args, base):
    walked = list(rungs(base, base.compile))
    measured = [(name, s) for name, s, _ in walked if s]
    results = measure([s for _, s in measured], args.turns)
    bounds = measure([replace(s, what="matmul") for _, s in measured[-1:]], args.turns)
    rows, first, before = [], None, None
    for (name, s), result in zip(measured, results, strict=True):
        if "failed" in result:
            rows.append({"rung": f"{name}: {result['failed']}"})
            continue
        rate = s.B * s.T / statistics.median(result["seconds"])
        peak = result["peak_flops"]
        rows.append({"rung": name, "ms a step": median_ms(result), "tokens/s": rate,
                     "MFU": f"{rate * result['flops_per_token'] / peak:.1%}" if peak else "n/a",
                     "peak GB": result["memory"] / GB, "start s": result["warmup_seconds"],
                     "gain": f"{rate / (before or rate):.2f}x", "in all": f"{rate / (first or rate):.2f}x"})
        first, before = first or rate, rate
    print_table(rows)
    left_out = [f"{name[2:]} ({why})" for name, s, why in walked if not s]
    if left_out:
        print("left out: " + "; ".join(left_out))
    if "failed" not in results[-1] and "failed" not in bounds[0]:
        share = median_ms(bounds[0]) / median_ms(results[-1])
        print(f"the matrix products of the last rung's step alone take {median_ms(bounds[0]):,.0f} ms: it runs at {share:.0%} of "
              f"what they allow")
    if args.plot:
        plot_ladder(args.plot, rows, machine(base.device))
    return rows


def kernels_here(base):
    """(kernels that run, ["name (reason)"] of those that do not)."""
    here, missing = [], []
    for kernel in ATTENTION:
        try:
            check_attention(kernel, base.device, getattr(torch, base.dtype), 64, masked=kernel == "flex")
            here.append(kernel)
        except UserError as error:
            missing.append(f"{kernel} ({str(error).split('(', 1)[-1].rsplit(')', 1)[0].split('. ')[0]})")
    return here, missing


def attention_table(args, base):
    here, missing = kernels_here(base)
    results = measure([replace(base, what="attention", attention=kernel) for kernel in here], args.turns)
    rows = [{"kernel": kernel, "forward + backward ms": median_ms(r), "memory MB": r["memory"] / 1e6,
             "error of y": f"{r['error_forward']:.1e}", "largest error of dq, dk, dv": f"{r['error_backward']:.1e}"}
            for kernel, r in zip(here, results, strict=True) if "failed" not in r]
    print(f"one layer of {base.size}, B = {base.B}, T = {base.T}, {base.dtype}; errors are |x - x64| / |x64| against float64")
    print_table(rows)
    if missing:
        print("not on this machine: " + "; ".join(missing))
    return rows


def memory_table(args, base):
    """Two sizes give bytes a sequence and the rest; on a GPU the largest micro-batch is then tried in --memory_gb."""
    cuda = base.device.startswith("cuda")
    here, missing = kernels_here(base)
    here = [kernel for kernel in here if kernel not in ("auto", "flex")]        # the one is one of the others, the other masks
    settings = [replace(base, attention=kernel, loss_chunk=chunk, warmup=1, steps=1)
                for kernel in here for chunk in (0, 8192 if cuda else 2048)]
    small, large = (measure([replace(s, B=B) for s in settings], 1) for B in (base.B, 2 * base.B))
    gigabytes = sorted({8, 12, 24, 80, args.memory_gb})
    rows = []
    for s, a, b in zip(settings, small, large, strict=True):
        row = {"attention": s.attention, "logits in memory": f"{s.loss_chunk:,} tokens" if s.loss_chunk else "all"}
        if "failed" in a or "failed" in b:
            rows.append(row | {f"GB at {base.B}": a.get("failed") or b.get("failed")})
            continue
        fits = {g: largest_fit(a["memory"], b["memory"], base.B, g)[1] for g in gigabytes}
        if cuda and args.memory_gb <= torch.cuda.mem_get_info()[1] / GB:
            fits[args.memory_gb] = find_largest(s, fits[args.memory_gb], args.memory_gb)
        each, _ = largest_fit(a["memory"], b["memory"], base.B, 0)
        rows.append(row | {f"GB at {base.B}": a["memory"] / GB, f"at {2 * base.B}": b["memory"] / GB,
                           "MB a sequence": each / 1e6} | {f"fit {g:g} GB": n for g, n in fits.items()})
    print(f"peak memory, and sequences of {base.T} tokens that fit, {base.size}, {base.dtype}, "
          f"{'torch.compile' if base.compile else 'eager'}; measured at micro-batches {base.B} and {2 * base.B}, the rest "
          f"follows from the two{f', but {args.memory_gb:g} GB was tried' if cuda else ''}")
    print_table(rows)
    if missing:
        print("not on this machine: " + "; ".join(missing))
    return rows


def data_table(args, base):
    """The loader by file format and order; fineweb.py on input.txt's speeches, 30 times over, by workers."""
    kinds = [("npy", "shuffled"), ("npy", "in order"), ("bin", "shuffled")]
    results = measure([replace(base, what="loader", size=kind, recipe=order, B=16, T=1024, steps=3) for kind, order in kinds],
                      args.turns)
    rows = [{"what": f"loader, one thread: .{kind} {order}", "million tokens/s": statistics.median(result["rates"]) / 1e6}
            for (kind, order), result in zip(kinds, results, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        speeches = INPUT_TXT.read_text(encoding="utf-8").split("\n\n")
        documents = ["\n\n".join(speeches[i:i + 30]) for i in range(0, len(speeches), 30)]
        text.write_text("".join(json.dumps({"text": f"{i} {d}"}) + "\n" for i in range(30) for d in documents))
        workers = sorted({1, 2, os.cpu_count() or 1})
        seconds = {n: [] for n in workers}
        for turn in range(args.turns):
            for n in workers:
                start = time.perf_counter()
                subprocess.run([sys.executable, str(BENCH.with_name("fineweb.py")), "--input", str(text), "--workers", str(n),
                                "--out", str(Path(folder) / f"out{n}_{turn}")], check=True, capture_output=True)
                seconds[n].append(time.perf_counter() - start)
        tokens = sum(shard["tokens"] for shard in json.loads((Path(folder) / "out1_0/manifest.json").read_text())["shards"])
    rows += [{"what": f"fineweb.py, {n} worker(s), {tokens / 1e6:.1f} million tokens, whole process",
              "million tokens/s": tokens / statistics.median(seconds[n]) / 1e6} for n in workers]
    print_table(rows)
    return rows


def hellaswag_table(args, base):
    n = args.steps or (2000 if base.device.startswith("cuda") else 100)
    widths = (4, 16, 32, 64, 128)
    results = measure([replace(base, what="hellaswag", B=B, steps=n, size=args.size or "small") for B in widths], args.turns)
    alone = median_ms(results[0])
    rows = [{"rows a forward": B, "examples/s": n / median_ms(r) * 1e3, "gain": f"{alone / median_ms(r):.2f}x",
             "10,042 examples, s": 10042 / n * median_ms(r) / 1e3} for B, r in zip(widths, results, strict=True)]
    print(f"{n} made-up examples of HellaSwag's lengths, model {args.size or 'small (4 layers of width 256)'}, {base.dtype}")
    print_table(rows)
    return rows


def scaling_table(args, base):
    """Measured: the same micro-batch on more processes. On paper: sizes, and the exchange of gradients."""
    counts = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if base.device.startswith("cuda") else os.cpu_count())]
    results = measure([replace(base, processes=n) for n in counts], args.turns)
    rows, alone = [], None
    for n, r in zip(counts, results, strict=True):
        if "failed" in r:
            rows.append({"processes": f"{n}: {r['failed']}"})
            continue
        rate = n * base.B * base.T / statistics.median(r["seconds"])
        alone = rate if n == 1 else alone
        rows.append({"processes": n, "tokens a step": n * base.B * base.T, "ms a step": median_ms(r), "tokens/s": rate,
                     "against one": f"{rate / alone:.2f}x" if alone else None})
    print_table(rows)
    paper = []
    for name, shape in GPT2_SIZES.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(1024, 50304, **shape))
        parameters, flops = sum(p.numel() for p in model.parameters()), model.flops_per_token(1024)
        tokens = 0.4 * 989e12 / flops
        ring = 2 * 7 / 8 * 4 * parameters                   # bytes each of 8 GPUs sends a step, fp32 gradients
        paper.append({"on paper": name, "parameters": parameters, "GFLOP a token": flops / GB, "state GB": 16 * parameters / GB,
                      "tokens/s a GPU": tokens, "ms of 65,536 tokens": 65536 / tokens * 1e3, "GB sent a GPU": ring / GB,
                      "ms at 450 GB/s": ring / 450e9 * 1e3, "ms at 50 GB/s": ring / 50e9 * 1e3})
    print("state: weights, gradients, two moments in fp32. Tokens/s: at 40% of an H100's 989 TFLOP/s. Sent: a ring all-reduce "
          "over 8 GPUs, by NVLink (450 GB/s) or by a 400 Gb/s network; DDP sends while the backward goes on")
    print_table(paper)
    return rows + paper


def peer_table(args, base):
    if not args.path:
        raise UserError("bench.py peer needs the path of a clone of build-nanogpt: git clone it, and give its folder")
    if not (Path(args.path) / "train_gpt2.py").is_file():
        raise UserError(f"{args.path}/train_gpt2.py is not there: give the folder of a clone of build-nanogpt")
    path = str(Path(args.path).resolve())
    contenders = {"build-nanogpt, as shipped": replace(base, peer=path, compile=False),
                  "build-nanogpt, torch.compile": replace(base, peer=path, compile=True), "ours, as shipped": base}
    results = measure(list(contenders.values()), args.turns)
    bound = measure([replace(base, what="matmul")], args.turns)[0]
    ours = median_ms(results[-1])
    rows = [{"step": name, "ms": median_ms(r), "tokens/s": base.B * base.T / median_ms(r) * 1e3, "peak GB": r["memory"] / GB,
             "start s": r["warmup_seconds"], "time against ours": f"{median_ms(r) / ours:.2f}x"}
            for (name, r) in zip(contenders, results, strict=True) if "failed" not in r]
    rows.append({"step": "its matrix products alone", "ms": median_ms(bound),
                 "tokens/s": base.B * base.T / median_ms(bound) * 1e3, "time against ours": f"{median_ms(bound) / ours:.2f}x"})
    print_table(rows)
    return rows


TABLES = {"ladder": ladder, "attention": attention_table, "memory": memory_table, "data": data_table,
          "hellaswag": hellaswag_table, "scaling": scaling_table, "peer": peer_table,
          "recipes": lambda args, base: recipes_table(args, base, SIZES[args.size or "small"])}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["work"]:
        return work(argv[1])
    parser = FlagParser(prog="bench.py", description=__doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("path", nargs="?", help="for peer: the folder of build-nanogpt; for recipes: the shards")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default auto)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--recipe", default="gpt2", choices=list(train_gpt2.RECIPES))
    parser.add_argument("--size", choices=list(SIZES), help="default gpt2 (124M), but for hellaswag and recipes small")
    parser.add_argument("--batch_size", type=parse_int, help="sequences a micro-step (default 16 on CUDA, 4 on a CPU)")
    parser.add_argument("--sequence_length", type=parse_int, help="tokens (default 1024; 256 on a CPU, but for memory)")
    parser.add_argument("--steps", type=parse_int, help="timed steps a turn (default 20 on CUDA, 4 on a CPU); for recipes: "
                        "of gpt2's runs (default 300)")
    parser.add_argument("--turns", type=parse_int, help="how often the table is measured (default 1 on CUDA, 2 on a CPU); "
                        "for recipes: seeds")
    parser.add_argument("--compile", action="store_true", default=None, help="torch.compile on a CPU too")
    parser.add_argument("--no_compile", dest="compile", action="store_false", help="eager on CUDA too")
    parser.add_argument("--memory_gb", type=float, default=80, help="for memory: what the GPU has (default 80)")
    parser.add_argument("--no_ideas", action="store_true", help="for recipes: without taking the ideas out one by one")
    parser.add_argument("--json", metavar="FILE", help="keep what was measured")
    parser.add_argument("--plot", metavar="FILE.png", help="for ladder and recipes: a picture (needs matplotlib)")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    if device == "mps":
        raise UserError("bench.py measures on cuda or cpu: give --device cpu")
    cuda = device.startswith("cuda")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
    for name in ("batch_size", "sequence_length", "steps", "turns"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least 1")
    if not 0 < args.memory_gb < math.inf:
        raise UserError(f"--memory_gb {args.memory_gb}: must be above 0")
    args.turns = args.turns or (1 if cuda else 2)
    long = cuda or args.table == "memory"
    base = Setting(device=device, recipe=args.recipe, size=args.size or "gpt2", dtype=choose_dtype(args.dtype, device),
                   B=args.batch_size or (16 if cuda else 4),
                   T=args.sequence_length or (1024 if long else 256), compile=cuda if args.compile is None else args.compile,
                   warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))
    print(f"bench.py {args.table}: {machine(device)}", flush=True)
    rows = TABLES[args.table](args, base)
    if args.json:
        content = {"table": args.table, "machine": machine(device), "setting": asdict(base), "turns": args.turns, "rows": rows}
        replace_file(args.json, lambda file: file.write(json.dumps(content, indent=1).encode()))


if __name__ == "__main__":
    run_command(main)
