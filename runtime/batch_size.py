"""The micro-batch: which sizes divide a step, which is the largest that fits into a GPU, found by trying and
remembered, which are joined on a CPU, and what to do when memory runs out."""
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from runtime.checkpoint import TrainState
from runtime.cli import RunError, UserError
from runtime.dataloader import TokenLoader
from runtime.device import compile_failures, device_name, is_out_of_memory
from runtime.distributed import Process
from runtime.files import read_text, replace_file
from runtime.progress import counted
from runtime.resume import MODEL_SHAPE
from runtime.sharding import moment_bytes, owns

MICRO_BATCH = 4096      # tokens; with more a CPU needs more memory and is no faster


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, or 1."""
    return max(d for d in divisors(n) if d <= max(1, most))


def allowed_micro_batches(config, world_size: int, device: str) -> list[int]:
    """The micro-batches (sequences) that divide --total_batch_size, smallest first; --batch_size alone if
    given, but no more than an update has. For auto on a CPU, and for --overfit, the largest of at most
    MICRO_BATCH tokens."""
    T, updates = config.sequence_length, config.updates_per_step
    unit = T * world_size * updates
    rows, rest = divmod(config.total_batch_size, unit)
    if rest:
        near = " or ".join(str(n * unit) for n in (rows, rows + 1) if n)
        raise UserError(f"--total_batch_size {config.total_batch_size} does not divide into sequences of {T} "
                        f"tokens (x {counted(world_size, 'process')} x --updates_per_step {updates}): give "
                        f"{near}")
    if config.batch_size == "auto":
        by_trial = device.startswith("cuda") and not config.overfit
        return divisors(rows) if by_trial else [largest_divisor(rows, MICRO_BATCH // T)]
    most = min(rows, int(config.batch_size))
    if rows % most:
        raise UserError(f"--batch_size {config.batch_size} does not divide the {rows} sequences an update of "
                        f"each of {counted(world_size, 'process')}: give one of "
                        f"{', '.join(map(str, divisors(rows)))}, or auto")
    return [most]


def rows_joined(config, device: str) -> int:
    """Sequences up to which an update's micro-batches are joined; 0: they are not. Only for --batch_size auto
    in eager mode on a CPU: a graph is compiled for one shape, and a GPU's micro-batch is the largest that its
    memory has room for."""
    joins = config.batch_size == "auto" and device == "cpu" and not config.compile
    return MICRO_BATCH // config.sequence_length if joins else 0


def largest_that_fits(candidates: list[int], memory_of: Callable[[int], float], limit: float) -> int:
    """The largest of two or more `candidates` (ascending) with memory_of(B) at most `limit` bytes;
    memory_of is infinite when out of memory. A trial may have to compile, so there are few: memory grows
    linearly with B, and the smallest and one that surely fits tell where to try."""
    first = candidates[0]
    a = memory_of(first)
    if a > limit:
        raise UserError("not even the smallest micro-batch fits into this GPU's memory: give --recompute, "
                        "--loss_chunk 1024, --shard_optimizer (several GPUs), or a smaller --sequence_length")
    # n times the sequences need at most n times the memory; far apart, two trials tell the slope
    second = max((B for B in candidates[1:] if B * a <= first * limit), default=candidates[1])
    b = memory_of(second)
    if b > limit:
        return first
    likely = [B for B in candidates if B > second and b + (b - a) / (second - first) * (B - second) <= limit]
    return next((B for B in reversed(likely) if memory_of(B) <= limit), second)


def memory_of_step(B: int, state: TrainState, model: Callable, config, autocast: torch.autocast,
                   device: str) -> float:
    """Bytes that CUDA reserves for a step with micro-batches of B sequences; infinity when out of memory.
    Changes nothing.

    `model` is the one that trains, inside DDP if there are several ranks. Two micro-steps are made, because
    the second finds the gradients of the first, and memory that these and the first one's activations have
    fragmented.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if isinstance(model, DDP):                  # a rank that runs out of memory must not leave others waiting
        model.require_backward_grad_sync = False
    try:
        # moments that were not loaded are allocated in the first step: reserve their room
        begun = any(optimizer.state for optimizer in state.optimizers)
        due = 0 if begun else sum(moment_bytes(state.optimizers, owns))
        moments = torch.empty(due, dtype=torch.uint8, device=device)
        x = torch.zeros(B, config.sequence_length, dtype=torch.int64, device=device)
        with compile_failures(model):
            for _ in range(2):
                with autocast:
                    _, loss = model(x, torch.zeros_like(x))
                loss.backward()
        del moments
        return torch.cuda.max_memory_reserved(device)
    except Exception as error:
        if is_out_of_memory(error):
            return math.inf
        raise
    finally:
        model.zero_grad(set_to_none=True)


def choose_micro_batch(config, candidates: list[int], state: TrainState, model: Callable,
                       autocast: torch.autocast, process: Process) -> tuple[int, float]:
    """(micro-batch, bytes that it leaves free): the only candidate, of whose memory nothing is known, or on a
    GPU the largest that fits on all ranks with a tenth of memory to spare, and a twentieth of what this
    process can have."""
    if len(candidates) == 1:
        return candidates[0], 0
    device = process.device
    free, total = torch.cuda.mem_get_info(device)
    # without others' memory and CUDA's context, which takes more than a tenth of a small card
    limit = min(0.9 * total, 0.95 * (free + torch.cuda.memory_reserved(device)))
    key = ", ".join(map(str, (
        device_name(device), torch.__version__, config.recipe, config.dtype, config.attention, config.window,
        config.loss_chunk, config.recompute, config.compile, config.shard_optimizer, config.sequence_length,
        *(getattr(config, name) for name in MODEL_SHAPE), process.world_size, total, candidates[-1])))
    known, memory = load_cache(), {}

    def memory_of(B):
        memory[B] = memory_of_step(B, state, model, config, autocast, device)
        return memory[B]

    def find():
        match known.get(key):
            case [int() as B, int() as taken] if B in candidates:
                return B, taken
        process.print0("trying how large a micro-batch fits (once; --batch_size N does without) ...")
        with process.progress("trying micro-batches"):
            B = largest_that_fits(candidates, memory_of, limit)
        return B, memory[B]

    try:
        B, taken = process.on_all_ranks(find)
        most, spare = (min(values) for values in zip(*process.gather((B, limit - taken)), strict=True))
    finally:
        torch.cuda.empty_cache()                # NCCL and Triton allocate beside torch
        torch.compiler.reset()                  # the trials' graphs count towards the recompilation limit
    if process.is_master and known.get(key) != [most, taken] and not config.dry_run:
        save_cache(known | {key: [most, taken]})
    return most, spare


def oom_advice(config, loader: TokenLoader | None, device: str) -> str:
    """What to do when memory runs out. `loader`: None before the first step."""
    largest = loader.largest(config.updates_per_step) if loader else 0
    if largest > 1:                             # no longer joined, or the next smaller
        less = loader.B if largest > loader.B else divisors(largest)[-2]
        return (f"{device} is out of memory with micro-batches of {largest} sequences: give --batch_size "
                f"{less}, which changes nothing else")
    smaller = "a smaller model (--n_layer, --n_embd)"
    if not loader:
        return (f"{device} is out of memory before the first step: end what else runs there, or give "
                f"{smaller}, or --batch_size 1")
    flags = [name for name, helps in (
        ("--recompute", not config.recompute),
        ("--shard_optimizer", loader.world_size > 1 and not config.shard_optimizer),
        ("--loss_chunk 1024", not 0 < config.loss_chunk <= 1024)) if helps]
    return (f"{device} is out of memory with --batch_size 1: give "
            f"{', '.join([*flags, 'a shorter --sequence_length'])}, or {smaller}")


def cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2/batch_size.json"


def load_cache() -> dict:
    """{hardware, versions and shape of a run: its micro-batch}, from earlier runs."""
    try:
        known = json.loads(read_text(cache_path(), most=1 << 20))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def save_cache(known: dict) -> None:
    with suppress(OSError, RunError):           # without a cache the next run finds it anew
        cache_path().parent.mkdir(parents=True, exist_ok=True)
        replace_file(cache_path(), lambda file: file.write(json.dumps(known, indent=1).encode()))
