"""What is timed, each in a process of its own: a worker measures one Setting."""
import itertools
import statistics
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import train_gpt2
from benchmarks.data import measure_loader
from benchmarks.timing import Setting, random_tokens, time_steps
from model import GPT2_SIZES, attention
from runtime.device import peak_flops, peak_memory
from runtime.recipe import BatchSchedule
from runtime.shards import write_shard


def shape_of(s: Setting) -> dict:
    """n_layer, n_embd, n_head of a size of GPT-2 or, say, '4x256'. The modern recipes have heads of 128."""
    shape = GPT2_SIZES.get(s.size) or dict(zip(("n_layer", "n_embd"), map(int, s.size.split("x"))))  # noqa: B905
    width = 128 if "n_head" in train_gpt2.RECIPES[s.recipe].defaults else 64
    return shape | {"n_head": max(1, shape["n_embd"] // width)}


def our_step(s: Setting):
    """(a function that does one step as train_gpt2.py does it, the model). Writes into the current folder."""
    Path("data").mkdir(exist_ok=True)
    write_shard("data/x_train_000000.npy", random_tokens(20 * s.B * s.T + 1))
    never = dict.fromkeys(("val_every", "hellaswag_every", "sample_every", "checkpoint_every"), 0)
    same = {name: getattr(s, name) for name in ("recipe", "vocab_size", "device", "dtype", "tf32", "compile",
                                                "attention")}
    given = never | same | shape_of(s) | dict(
        data="data", out="out", total_batch_size=s.B * s.T, batch_size=s.B, block_size=s.T)
    tune_malloc = train_gpt2.tune_malloc if s.tune_memory else lambda: None
    with patch.object(train_gpt2, "tune_malloc", tune_malloc):
        process = train_gpt2.start_process(s.device)
    _, config = train_gpt2.resolve_config(given, train_gpt2.Start(), process)
    train_gpt2.use_tf32(config, process)

    # What a setting changes and no flag does, before anything is compiled.
    make_model = train_gpt2.make_model

    def changed_model(*args):
        model = make_model(*args)
        if s.loss_chunk is not None:
            model.loss_chunk = s.loss_chunk
        return model
    with patch.object(train_gpt2, "make_model", changed_model):
        state = train_gpt2.make_train_state(config, train_gpt2.Start(), process)
    for group in state.optimizer.groups():
        if not s.fused and "fused" in group:
            group["fused"] = None           # torch's default for the device

    # Every step has B x T tokens, also of a recipe whose batch grows over the run.
    schedule = BatchSchedule(config.total_batch_size, config.max_steps)
    loader = train_gpt2.TrainLoader(train_gpt2.open_data(config).train, schedule, s.B, 0, process)
    numbers = itertools.count()

    def step():
        number = next(numbers)
        train_gpt2.set_schedules(number, config, schedule, state)
        train_gpt2.train_step(number, config, process, loader, state)
    return step, state.model


def peers_step(s: Setting):
    """(a function that does one optimizer step as build-nanogpt's script does it, the model). The script's
    definitions are executed unchanged. Its step is repeated here, without gradient accumulation."""
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
    config = script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **shape_of(replace(s, recipe="gpt2")))
    raw = script.GPT(config).to(s.device)
    model = torch.compile(raw) if s.compile else raw
    optimizer = raw.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=device_type)
    tokens = torch.from_numpy(random_tokens(s.B * s.T + 1).astype(np.int64))

    def step():
        optimizer.zero_grad()
        x, y = tokens[:-1].view(s.B, s.T).to(s.device), tokens[1:].view(s.B, s.T).to(s.device)
        with torch.autocast(device_type, getattr(torch, s.dtype), enabled=s.dtype != "float32"):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        return loss.item()
    return step, raw


def product_rate(s: Setting) -> float:
    """FLOP/s of the kind of product that most of a step is, (B T, C) x (C, 4 C), in its dtype."""
    C, dtype = shape_of(s)["n_embd"], getattr(torch, s.dtype)
    x, w = (torch.randn(shape, device=s.device, dtype=dtype) for shape in ((s.B * s.T, C), (C, 4 * C)))
    _, seconds = time_steps(lambda: x @ w, replace(s, warmup=10, steps=50))
    return 2 * x.numel() * w.size(1) / statistics.median(seconds)


def measure_step(s: Setting) -> dict:
    step, model = peers_step(s) if s.peer else our_step(s)
    warmup_seconds, seconds = time_steps(step, s)
    # on a Mac what Metal has given, which torch keeps
    memory = torch.mps.driver_allocated_memory() if s.device == "mps" else peak_memory(s.device)
    found = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": memory}
    return found if s.peer else found | {"flops_per_token": model.flops_per_token(s.T),
                                         "peak_flops": peak_flops(s.device) or product_rate(s)}


def attention_and_gradients(kernel, q, k, v, dy):
    """y, dq, dk, dv, each (B, T, heads, head_dim)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attention(q, k, v, kernel)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


def measure_attention(s: Setting) -> dict:
    """Seconds of one layer's attention, forward and backward, and its errors against float64's formula,
    |x - x64| / |x64|: of y, and the largest of dq, dk and dv."""
    process = train_gpt2.start_process(s.device)
    train_gpt2.use_tf32(train_gpt2.Config(), process)
    device = process.device
    heads, dtype = shape_of(s)["n_head"], getattr(torch, s.dtype)
    shape = s.B, s.T, heads, shape_of(s)["n_embd"] // heads
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]       # q, k, v, dy
    _, seconds = time_steps(lambda: attention_and_gradients(s.attention, *tensors), s)

    tensors = [t[:1] for t in tensors]
    actual = attention_and_gradients(s.attention, *tensors)
    exact = attention_and_gradients("naive", *(t.cpu().double() for t in tensors))      # Metal has no float64
    errors = [((a.cpu().double() - b).norm() / b.norm()).item() for a, b in zip(actual, exact, strict=True)]
    return {"seconds": seconds, "error_forward": errors[0], "error_backward": max(errors[1:])}


WORKERS = {"step": measure_step, "attention": measure_attention, "loader": measure_loader}
