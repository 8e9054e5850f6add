"""What `bench.py` times in a process of its own: each function measures one Setting."""
from dataclasses import replace

import numpy as np
import torch

import hellaswag
import train_gpt2
from benchmarks.data import measure_loader
from benchmarks.timing import (GB, PlainAdamW, attention_costs, matmul_seconds, peers_step, random_tokens,
                               time_steps)
from model import GPT, GPT2_SIZES, GPTConfig
from runtime.checks import automatic_values
from runtime.dataloader import INPUT_TXT, TokenDataset, TokenLoader
from runtime.device import make_autocast, peak_flops, peak_memory
from runtime.distributed import setup_process
from runtime.signals import StopSignals

SIZES = GPT2_SIZES | {"small": dict(n_layer=4, n_head=4, n_embd=256),       # for CPUs, and to try a command
                      "tiny": dict(n_layer=4, n_head=2, n_embd=128)}


def shape_of(s):
    """n_layer, n_head, n_embd."""
    heads = train_gpt2.RECIPES[s.recipe].defaults.get("n_head")
    return SIZES[s.size] | ({"n_head": heads} if heads and s.size == "gpt2" else {})


def our_step(s):
    """(a function that does one optimizer step of setting `s` as train_gpt2.py does it, the model)."""
    config = train_gpt2.Config(**train_gpt2.RECIPES[s.recipe].defaults | shape_of(s) | dict(
        recipe=s.recipe, total_batch_size=s.B * s.T * s.processes, batch_size=str(s.B), sequence_length=s.T,
        block_size=s.T, vocab_size=s.vocab_size, device=s.device, dtype=s.dtype, tf32=s.tf32,
        compile=s.compile, attention=s.attention, loss_chunk=s.loss_chunk, seed=0))
    process = setup_process(config, s.tune_memory)
    config = replace(config, **automatic_values(config, process.device))
    state, _, wrapped, autocast = train_gpt2.build_training(config, process)
    if not s.fused:
        state.optimizers = [PlainAdamW([{name: g[name] for name in ("params", "lr", "weight_decay")}
                                        for g in optimizer.param_groups], betas=(0.9, 0.95))
                            if isinstance(optimizer, torch.optim.Adam) else optimizer
                            for optimizer in state.optimizers]
    dataset = TokenDataset([random_tokens(20 * s.B * s.T * s.processes + 1)], s.T)
    loader = TokenLoader(dataset, config.total_batch_size, s.B, process.rank, process.world_size,
                         process.device)
    loader.start(0)
    return (lambda: train_gpt2.train_step(wrapped, state, loader, autocast, config.grad_clip, process,
                                           StopSignals(process)), state.model)


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
    device = setup_process(train_gpt2.Config(device=s.device)).device
    shape = shape_of(s)
    return attention_costs(s, shape["n_head"], shape["n_embd"] // shape["n_head"], device)


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
    process = setup_process(train_gpt2.Config(device=s.device))
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, s.vocab_size, **SIZES[s.size])).to(process.device)
    batches = hellaswag.make_batches(synthetic_examples(s.steps), 1024, s.B)
    autocast = make_autocast(process.device, s.dtype)
    _, seconds = time_steps(lambda: hellaswag.evaluate(model, batches, process.device, autocast),
                            replace(s, warmup=1, steps=3))
    return {"seconds": seconds}


WORKERS = {"step": measure_step, "matmul": measure_matmul, "attention": measure_attention,
           "hellaswag": measure_hellaswag, "loader": measure_loader}
