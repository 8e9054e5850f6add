"""What `bench.py` times in a process of its own: each function measures one Setting."""
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import hellaswag
import train_gpt2
from benchmarks.data import measure_loader
from benchmarks.timing import GB, random_tokens, time_steps
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.dataloader import INPUT_TXT
from runtime.device import make_autocast, peak_flops, peak_memory
from runtime.kernels import attention
from runtime.shards import write_shard

SIZES = GPT2_SIZES | {"small": dict(n_layer=4, n_head=4, n_embd=256),       # for CPUs, and to try a command
                      "tiny": dict(n_layer=4, n_head=2, n_embd=128)}


def described(size):
    return f"{size} ({SIZES[size]['n_layer']} layers of width {SIZES[size]['n_embd']})"


def shape_of(s):
    """n_layer, n_head, n_embd. The modern recipes have heads of 128."""
    shape = SIZES[s.size]
    modern = "n_head" in train_gpt2.RECIPES[s.recipe].defaults
    return shape | {"n_head": max(1, shape["n_embd"] // 128)} if modern else shape


# -----------------------------------------------------------------------------
# a step

def our_step(s):
    """(a function that does one step of setting `s` as train_gpt2.py does it, the model). It writes random
    tokens and what a run writes into the current folder."""
    tokens = s.B * s.T * s.processes
    Path("data").mkdir(exist_ok=True)
    write_shard("data/x_train_000000.npy", random_tokens(20 * tokens + 1))
    never = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
    config = train_gpt2.Config(**train_gpt2.RECIPES[s.recipe].defaults | shape_of(s) | never | dict(
        data="data", out="out", recipe=s.recipe, total_batch_size=tokens, batch_size=s.B, block_size=s.T,
        vocab_size=s.vocab_size, device=s.device, dtype=s.dtype, tf32=s.tf32, compile=s.compile,
        attention=s.attention))

    def chosen_here(run):
        """Instead of the trial of a micro-batch: what a setting changes and no flag does, before anything is
        compiled."""
        if s.loss_chunk is not None:
            run.model.loss_chunk = s.loss_chunk
        if not s.fused:                         # torch's default for the device
            for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
                group |= {"fused": None} if "fused" in group else {}
        return s.B
    replaced = {"choose_batch_size": chosen_here} | ({} if s.tune_memory else {"tune_malloc": lambda: None})
    with patch.multiple(train_gpt2, **replaced):
        process = train_gpt2.set_up_process(config)
        process.listen = lambda: None           # a signal ends a benchmark at once
        if s.memory_gb:
            share = s.memory_gb * GB / torch.cuda.mem_get_info(process.device)[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), process.device)
        run = train_gpt2.set_up(config, set(), process)

    def step():
        train_gpt2.set_schedule(run)
        train_gpt2.train_step(run)
        run.step += 1
    return step, run.model


def peers_step(s):
    """(a function that does one optimizer step as build-nanogpt's script does it, the model).

    The script's definitions are executed unchanged. Its step is repeated here, without gradient accumulation.
    """
    path = Path(s.peer) / "train_gpt2.py"
    # from this import on, the script loads data and trains
    definitions = path.read_text(encoding="utf-8").split("\nimport tiktoken")[0]
    sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
    script = sys.modules["peer"] = types.ModuleType("peer")
    script.master_process = False
    exec(compile(definitions, str(path), "exec"), script.__dict__)
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    device_type = s.device.split(":")[0]
    config = script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **SIZES[s.size])
    raw = script.GPT(config).to(s.device)
    model = torch.compile(raw) if s.compile else raw
    optimizer = raw.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=device_type)
    tokens = torch.from_numpy(random_tokens(s.B * s.T + 1).astype(np.int64))

    def step():
        optimizer.zero_grad()
        x, y = tokens[:-1].view(s.B, s.T).to(s.device), tokens[1:].view(s.B, s.T).to(s.device)
        with torch.autocast(device_type=device_type, dtype=torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 6e-4
        optimizer.step()
        return loss.item()
    return step, raw


def measure_step(s):
    step, model = peers_step(s) if s.peer else our_step(s)
    warmup_seconds, seconds = time_steps(step, s)
    result = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": peak_memory(s.device)}
    if not s.peer:
        result |= {"flops_per_token": model.flops_per_token(s.T), "peak_flops": peak_flops(s.device)}
    return result


# -----------------------------------------------------------------------------
# parts of it

def measure_matmul(s):
    """Seconds of a step's matrix products alone, forward and backward, in the step's dtype.

    With N = B T tokens: three products of 2 N n k FLOPs for each (n, k) weight of the linear layers and the
    head, and six of 2 B T^2 C FLOPs for each layer's attention. Each layer has its own weights, as in the
    step, so that they do not come from the cache.
    """
    train_gpt2.set_up_process(train_gpt2.Config(device=s.device, tf32=s.tf32))
    layers, heads, C = (shape_of(s)[name] for name in ("n_layer", "n_head", "n_embd"))
    N, hs = s.B * s.T, C // heads

    def random(*shape):
        return torch.randn(shape, device=s.device).to(getattr(torch, s.dtype))

    weights = [random(n, k) for _ in range(layers) for n, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    weights.append(random(s.vocab_size, C))
    activations = {width: random(N, width) for width in (C, 3 * C, 4 * C, s.vocab_size)}
    q, p = random(s.B * heads, s.T, hs), random(s.B * heads, s.T, s.T)

    def products():
        for w in weights:
            x, dy = activations[w.size(1)], activations[w.size(0)]
            x @ w.t(), dy @ w, dy.t() @ x                               # y, dx, dw
        for _ in range(layers):
            q @ q.transpose(1, 2), q @ q.transpose(1, 2)                # scores, dp
            p @ q, p.transpose(1, 2) @ q, p @ q, p.transpose(1, 2) @ q  # y, dv, dq, dk
    return {"seconds": time_steps(products, replace(s, warmup=2, steps=5))[1]}


def attention_and_gradients(kernel, q, k, v, dy):
    """y, dq, dk, dv, each (B, T, heads, head_dim)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attention(q, k, v, kernel)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


def measure_attention(s):
    """Seconds and peak bytes of one layer's attention, forward and backward, and its errors.

    An error is |x - x64| / |x64| against the naive kernel in float64: of y, and the largest of dq, dk and dv.
    """
    device = train_gpt2.set_up_process(train_gpt2.Config(device=s.device)).device
    heads, C = (shape_of(s)[name] for name in ("n_head", "n_embd"))
    torch.manual_seed(0)

    def inputs(B, T):
        """q, k, v, dy."""
        shape = B, T, heads, C // heads
        return [torch.randn(shape, device=device).to(getattr(torch, s.dtype)) for _ in range(4)]

    attention_and_gradients(s.attention, *inputs(1, 64))            # the first call loads libraries
    tensors = inputs(s.B, s.T)
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated
        torch.cuda.reset_peak_memory_stats()
    else:
        peak = peak_memory
        Path("/proc/self/clear_refs").write_text("5")               # the peak starts anew
    before = peak(device)
    attention_and_gradients(s.attention, *tensors)
    memory = peak(device) - before
    _, seconds = time_steps(lambda: attention_and_gradients(s.attention, *tensors), s)

    tensors = inputs(1, s.T)
    actual = attention_and_gradients(s.attention, *tensors)
    expected = attention_and_gradients("naive", *(t.double() for t in tensors))
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, expected, strict=True)]
    return {"seconds": seconds, "memory": memory,
            "error_forward": errors[0], "error_backward": max(errors[1:])}


# -----------------------------------------------------------------------------
# HellaSwag

def synthetic_examples(n):
    """n examples in HellaSwag's format, from input.txt: contexts of 15 to 80 words, endings of 5 to 30."""
    rng = np.random.default_rng(0)
    words = INPUT_TXT.read_text(encoding="utf-8").split()

    def some(low, high):
        start = rng.integers(len(words) - high)
        return " ".join(words[start:start + rng.integers(low, high)])
    return [{"ctx": some(15, 80), "endings": [some(5, 30) for _ in range(4)], "label": int(rng.integers(4))}
            for _ in range(n)]


def measure_hellaswag(s):
    """Seconds of HellaSwag over s.steps examples, s.B rows a forward."""
    process = train_gpt2.set_up_process(train_gpt2.Config(device=s.device))
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, s.vocab_size, **SIZES[s.size])).to(process.device)
    batches = hellaswag.make_batches(synthetic_examples(s.steps), 1024, s.B)
    autocast = make_autocast(process.device, s.dtype)
    _, seconds = time_steps(lambda: hellaswag.evaluate(model, batches, process.device, autocast),
                            replace(s, warmup=1, steps=3))
    return {"seconds": seconds}


WORKERS = {"step": measure_step, "matmul": measure_matmul, "attention": measure_attention,
           "hellaswag": measure_hellaswag, "loader": measure_loader}
