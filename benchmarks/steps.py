"""What is timed, each in a process of its own: a worker measures one Setting."""
import itertools
import statistics
import sys
import types
from collections.abc import Callable
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
    """n_layer, n_embd and n_head of a size of GPT-2, or of one such as '4x256'."""
    if s.size in GPT2_SIZES:
        shape = dict(GPT2_SIZES[s.size])
    else:
        layers, width = s.size.split("x")
        shape = {"n_layer": int(layers), "n_embd": int(width)}

    # The heads of the modern recipes are 128 wide: six at GPT-2's size.
    head_width = 64
    if "n_head" in train_gpt2.RECIPES[s.recipe].defaults:
        head_width = 128
    shape["n_head"] = max(1, shape["n_embd"] // head_width)
    return shape


# ---------------------------------------------------------------------- our step

def our_step(s: Setting) -> tuple[Callable, torch.nn.Module]:
    """(a function that does one step as train_gpt2.py does it, the model).

    Writes into the current folder.
    """
    Path("data").mkdir(exist_ok=True)
    write_shard("data/x_train_000000.npy", random_tokens(20 * s.B * s.T + 1))
    process = start_process(s)
    _, config = train_gpt2.resolve_config(flags_of_step(s), train_gpt2.Start(), process)
    train_gpt2.use_tf32(config, process)
    state = make_state(s, config, process)

    # Every step has B x T tokens, also of a recipe whose batch grows over the run.
    schedule = BatchSchedule(config.total_batch_size, config.max_steps)
    data = train_gpt2.open_data(config)
    loader = train_gpt2.TrainLoader(data.train, schedule, s.B, 0, process)
    numbers = itertools.count()

    def step():
        number = next(numbers)
        train_gpt2.set_schedules(number, config, schedule, state)
        train_gpt2.train_step(number, config, process, loader, state)
    return step, state.model


def start_process(s: Setting) -> train_gpt2.Process:
    if s.tune_memory:
        return train_gpt2.start_process(s.device)
    with patch.object(train_gpt2, "tune_malloc", lambda: None):
        return train_gpt2.start_process(s.device)


def flags_of_step(s: Setting) -> dict:
    """{flag: value} of train_gpt2.py for the steps of a Setting."""
    return dict(
        data="data",
        out="out",
        recipe=s.recipe,
        vocab_size=s.vocab_size,
        block_size=s.T,
        total_batch_size=s.B * s.T,
        batch_size=s.B,
        device=s.device,
        dtype=s.dtype,
        tf32=s.tf32,
        compile=s.compile,
        attention=s.attention,
        val_every=0,
        hellaswag_every=0,
        sample_every=0,
        checkpoint_every=0,
        **shape_of(s),
    )


def make_state(s: Setting, config, process) -> train_gpt2.TrainState:
    """train_gpt2.make_train_state, with what a Setting changes and no flag does."""
    make_model = train_gpt2.make_model

    def changed_model(*args):
        model = make_model(*args)
        if s.loss_chunk is not None:
            model.loss_chunk = s.loss_chunk
        return model

    # The model is changed where it is made, because it is compiled after that.
    with patch.object(train_gpt2, "make_model", changed_model):
        state = train_gpt2.make_train_state(config, train_gpt2.Start(), process)
    for group in state.optimizer.groups():
        if not s.fused and "fused" in group:
            group["fused"] = None           # torch's default for the device
    return state


# ---------------------------------------------------------------------- build-nanogpt's step

def load_script(path: Path) -> types.ModuleType:
    """build-nanogpt's train_gpt2.py, as far as it only defines."""
    # From this import on, the script loads data and trains.
    definitions = path.read_text(encoding="utf-8").split("\nimport tiktoken")[0]
    sys.modules["hellaswag"] = types.SimpleNamespace(render_example=None, iterate_examples=None)
    script = types.ModuleType("peer")
    sys.modules["peer"] = script            # where its dataclass looks for itself
    script.master_process = False           # it prints nothing
    exec(compile(definitions, str(path), "exec"), script.__dict__)
    return script


def peers_step(s: Setting) -> tuple[Callable, torch.nn.Module]:
    """(a function that does one optimizer step as build-nanogpt's script does it, the model).

    The script's definitions are executed unchanged. Its step is repeated here, without gradient
    accumulation.
    """
    script = load_script(Path(s.peer) / "train_gpt2.py")
    device_type = s.device.split(":")[0]
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")

    shape = shape_of(replace(s, recipe="gpt2"))
    raw_model = script.GPT(script.GPTConfig(vocab_size=s.vocab_size, block_size=s.T, **shape))
    raw_model.to(s.device)
    model = raw_model
    if s.compile:
        model = torch.compile(raw_model)
    optimizer = raw_model.configure_optimizers(
        weight_decay=0.1, learning_rate=6e-4, device_type=device_type)
    tokens = torch.from_numpy(random_tokens(s.B * s.T + 1).astype(np.int64))

    def step():
        optimizer.zero_grad()
        x = tokens[:-1].view(s.B, s.T).to(s.device)
        y = tokens[1:].view(s.B, s.T).to(s.device)
        with torch.autocast(device_type, dtype, enabled=s.dtype != "float32"):
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
        optimizer.step()
        return loss.item()
    return step, raw_model


# ---------------------------------------------------------------------- the workers

def product_rate(s: Setting) -> float:
    """FLOP/s of the kind of product that most of a step is, (B T, C) x (C, 4 C), in its dtype."""
    C = shape_of(s)["n_embd"]
    dtype = getattr(torch, s.dtype)
    x = torch.randn(s.B * s.T, C, device=s.device, dtype=dtype)
    w = torch.randn(C, 4 * C, device=s.device, dtype=dtype)
    _, seconds = time_steps(lambda: x @ w, replace(s, warmup=10, steps=50))
    return 2 * x.numel() * w.size(1) / statistics.median(seconds)


def measure_step(s: Setting) -> dict:
    """Seconds of each step and of the warm-up; peak memory in bytes; of ours also what MFU needs."""
    if s.peer:
        step, model = peers_step(s)
    else:
        step, model = our_step(s)
    warmup_seconds, seconds = time_steps(step, s)

    memory = peak_memory(s.device)
    if s.device == "mps":
        memory = torch.mps.driver_allocated_memory()        # what Metal has given, which torch keeps
    found = {"seconds": seconds, "warmup_seconds": warmup_seconds, "memory": memory}
    if not s.peer:
        found["flops_per_token"] = model.flops_per_token(s.T)
        found["peak_flops"] = peak_flops(s.device) or product_rate(s)
    return found


def attention_and_gradients(kernel: str, q, k, v, dy) -> tuple:
    """y, dq, dk, dv, each (B, T, heads, head_dim)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    y = attention(q, k, v, kernel)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


def measure_attention(s: Setting) -> dict:
    """Seconds of one layer's attention, forward and backward; and its errors.

    An error is |x - x64| / |x64|, where x64 is the formula's value in float64: that of y, and the
    largest of dq, dk and dv.
    """
    process = train_gpt2.start_process(s.device)
    train_gpt2.use_tf32(train_gpt2.Config(), process)
    model_shape = shape_of(s)
    heads = model_shape["n_head"]
    shape = (s.B, s.T, heads, model_shape["n_embd"] // heads)
    dtype = getattr(torch, s.dtype)
    torch.manual_seed(0)
    # q, k, v and dy
    tensors = [torch.randn(shape, device=process.device).to(dtype) for _ in range(4)]
    _, seconds = time_steps(lambda: attention_and_gradients(s.attention, *tensors), s)

    # On the CPU, because Metal has no float64; one sequence is enough.
    tensors = [t[:1] for t in tensors]
    found = attention_and_gradients(s.attention, *tensors)
    exact = attention_and_gradients("naive", *(t.cpu().double() for t in tensors))
    errors = []
    for x, x64 in zip(found, exact, strict=True):
        errors.append(((x.cpu().double() - x64).norm() / x64.norm()).item())
    return {"seconds": seconds, "error_forward": errors[0], "error_backward": max(errors[1:])}


WORKERS = {"step": measure_step, "attention": measure_attention, "loader": measure_loader}
