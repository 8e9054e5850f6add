"""Can this config run?"""
import dataclasses
import importlib.util
import math
import os

import torch

from runtime.cli import UserError
from runtime.device import choose_dtype
from runtime.distributed import Process
from runtime.tokenizer import VOCAB_SIZE


def check_config(config) -> None:
    """Raises UserError for what can be told from the flags alone."""
    at_least = dict(val_tokens=1, n_layer=1, n_head=1, n_embd=1, block_size=1, vocab_size=1, total_batch_size=1,
                    sequence_length=0, max_steps=1, warmup_steps=0, weight_decay=0, grad_clip=0, seed=0, val_every=0,
                    hellaswag_every=0, sample_every=0, checkpoint_every=0, keep_checkpoints=0, skip_nonfinite=0,
                    loss_chunk=-1)
    for name, least in at_least.items():
        bits = 63 if name == "seed" else 40
        if not least <= getattr(config, name) < 2**bits:
            raise UserError(f"--{name} {getattr(config, name)}: must be at least {least} and below 2^{bits}")
    if not 0 < config.max_lr < math.inf or not (0 <= config.min_lr <= config.max_lr or config.min_lr == -1):
        raise UserError(f"--max_lr {config.max_lr} --min_lr {config.min_lr}: the first must be above 0, "
                        f"the second from 0 to the first")
    if not 0 < config.cooldown <= 1:
        raise UserError(f"--cooldown {config.cooldown}: give a part of the steps above 0 and up to 1")
    if config.n_embd % config.n_head:
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: "
                        f"give one of {', '.join(map(str, divisors(config.n_embd)))} heads")
    if config.sequence_length > config.block_size:
        raise UserError(f"--sequence_length {config.sequence_length} is longer than --block_size {config.block_size}: "
                        f"shorten the one or raise the other")
    if not 0 <= config.window <= config.block_size:
        raise UserError(f"--window {config.window}: give a number of tokens up to --block_size {config.block_size}, or 0")
    if config.vocab_size > 65536:
        raise UserError(f"--vocab_size {config.vocab_size}: tokens are uint16, so 65536 is the most")
    if config.batch_size != "auto" and not (config.batch_size.isdecimal() and int(config.batch_size) > 0):
        raise UserError(f"--batch_size {config.batch_size}: give a number of sequences from 1 on, or auto")
    for name in ("wandb", "tensorboard"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise UserError(f"--{name} needs the package {name}: pip install {name}, or leave the flag out")


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def micro_batch_candidates(config, world_size: int, device: str) -> list[int]:
    """The micro-batches (sequences) that make --total_batch_size, smallest first: --batch_size alone if it is given. For auto
    on a CPU, and of the sanity run, the largest of at most 4,096 tokens: beyond them a CPU's step costs memory and wins no time.
    """
    T = config.sequence_length
    if config.total_batch_size % (T * world_size):
        low = config.total_batch_size // (T * world_size)
        near = [n * T * world_size for n in (low, low + 1) if n]
        raise UserError(f"--total_batch_size {config.total_batch_size} does not divide into sequences of {T} tokens on "
                        f"{world_size} process(es): give {' or '.join(map(str, near))}")
    rows = config.total_batch_size // (T * world_size)
    if config.batch_size == "auto":
        by_trial = device.startswith("cuda") and not config.overfit
        return divisors(rows) if by_trial else [max(b for b in divisors(rows) if b * T <= 4096 or b == 1)]
    if rows % int(config.batch_size):
        raise UserError(f"--batch_size {config.batch_size} does not divide the {rows} sequences a step of each of {world_size} "
                        f"process(es): give one of {', '.join(map(str, divisors(rows)))}, or auto")
    return [int(config.batch_size)]


def check_memory(config, device: str) -> None:
    """UserError if weights, gradients and AdamW's two moments alone, 16 bytes a parameter, are more than the device has, or more
    than others leave of a GPU."""
    parameters = 12 * config.n_layer * config.n_embd**2 + (config.vocab_size + config.block_size) * config.n_embd
    if device.startswith("cuda"):
        free, memory = torch.cuda.mem_get_info(device)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
        free = memory                           # what others hold there can be swapped out
    if 16 * parameters > free:
        need = (f"{config.n_layer} layers of width {config.n_embd} have {parameters:,} parameters, which need "
                f"{16 * parameters / 1e9:,.1f} GB to train, and {device} has {memory / 1e9:,.1f} GB")
        if 16 * parameters > memory:
            raise UserError(f"{need}: give a smaller --n_layer or --n_embd")
        raise UserError(f"{need}, of which {free / 1e9:,.1f} GB are free: end what else runs there (nvidia-smi shows it), choose "
                        f"another GPU by --device, or give a smaller --n_layer or --n_embd")


def disable_text_evals(config, explicit_flags: set[str], process: Process):
    """Samples and HellaSwag need GPT-2's tokens. With a smaller vocabulary: a warning, unless a flag asked for them."""
    if config.vocab_size >= VOCAB_SIZE or not (config.sample_every or config.hellaswag_every):
        return config
    reason = f"samples and HellaSwag need GPT-2's {VOCAB_SIZE} tokens, and --vocab_size is {config.vocab_size}"
    if explicit_flags & {"sample_every", "hellaswag_every", "hellaswag_data"}:
        raise UserError(f"{reason}: give --sample_every 0 --hellaswag_every 0, or a larger vocabulary")
    process.print0(f"warning: going on without either: {reason}")
    return dataclasses.replace(config, sample_every=0, hellaswag_every=0)


def resolve(config, device: str):
    """The config with its automatic values replaced by what they mean on this device."""
    return dataclasses.replace(config, sequence_length=config.sequence_length or config.block_size,
                               min_lr=config.max_lr / 10 if config.min_lr == -1 else config.min_lr,
                               dtype=choose_dtype(config.dtype, device),
                               loss_chunk=config.loss_chunk if config.loss_chunk >= 0 else 2048 * (device == "cpu"))


def oom_advice(config, B: int, device: str) -> str:
    """What to do about memory that ran out with micro-batches of B; 0: before the first."""
    if B > 1:
        return f"{device} is out of memory with --batch_size {B}: give --batch_size {divisors(B)[-2]}, which changes nothing else"
    smaller = "give a smaller model (--n_layer, --n_embd)"
    if B == 0:
        return f"{device} is out of memory before the first step: end what else runs there, or {smaller}"
    chunk = "--loss_chunk 1024, " if not 0 < config.loss_chunk <= 1024 else ""
    return f"{device} is out of memory with --batch_size 1: give {chunk}a shorter --sequence_length, or {smaller[5:]}"
