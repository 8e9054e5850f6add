"""Before the first step of a compiled run: one micro-batch's loss and gradients, compiled against eager.

torch.compile can be wrong without an error (pytorch issues 190796 and 193061). A compiled gradient g is right
where |g - f| <= TOLERANCE |f| + FLOOR / sqrt(n) |all f|. n is its number of elements, and f is eager mode's
in float32: in bfloat16 eager mode's own is up to 24% away for a LayerNorm on a CPU (4,096 tokens), the
compiled one 1%. What is farther away is right where eager mode in the run's own dtype is about as far from f.
FLOOR is for learned scalars, differences of large sums: of a single number, how far eager mode is tells
little.
"""
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from runtime.batch_size import allowed_micro_batches, choose_micro_batch, largest_divisor
from runtime.checkpoint import TrainState
from runtime.cli import RunError
from runtime.dataloader import to_device
from runtime.device import CompileFailure, compile_failures, is_out_of_memory, without_compile
from runtime.distributed import Process
from runtime.tokenizer import VOCAB_SIZE

TOLERANCE, FLOOR = 0.1, 5e-4
FACTOR = 3.0            # how much farther from float32 than eager mode a compiled gradient may be
EAGER_TOKENS = 2048     # of a slice in eager mode, which needs more memory than the compiled model
SCALE = 4096.0          # of the loss in float16: its smallest gradients are not lost, its largest fit


def prepare_compiled(config, state: TrainState, compiled: Callable, wrapped: Callable,
                     autocast: torch.autocast, process: Process) -> tuple[int, Callable, Callable]:
    """(micro-batch, model for evaluation, model for training). The compiled model has made a micro-step,
    and its gradients have been compared with eager mode's; where it cannot, both models are eager, with one
    warning. RunError where the gradients differ."""
    candidates = allowed_micro_batches(config, process.world_size, process.device)
    try:
        B, spare = choose_micro_batch(config, candidates, state, wrapped, autocast, process)
        if compiled is not state.model and not config.recompute:
            size = getattr(torch, config.dtype).itemsize
            if kept := state.model.keep_more(B * config.sequence_length, spare / size):
                process.print0(f"memory has room for {kept * size / 1e9:.1f} GB more: GELU's outputs are "
                               "kept for the backward instead of computed again")
        if compiled is not state.model and not config.dry_run:
            with process.progress("compiling"):
                agree = process.on_all_ranks(check_compiled, config, state.model, wrapped, autocast, process,
                                             B)
            torch.cuda.empty_cache()
            if agree:
                process.print0("torch.compile was compared with eager mode on one micro-batch: the gradients "
                               "agree")
        return B, compiled, wrapped
    except CompileFailure as failure:
        process.print0(f"warning: torch.compile does not work here ({failure}); falling back to eager mode")
    wrapped = without_compile(wrapped, state.model)
    config = replace(config, compile=False)
    B, _ = choose_micro_batch(config, candidates, state, wrapped, autocast, process)
    return B, state.model, wrapped


def check_compiled(config, model: torch.nn.Module, wrapped: Callable, autocast: torch.autocast,
                   process: Process, B: int) -> bool:
    """One micro-step of `wrapped`, in which its graph is compiled for training. Then, without
    --no_check_compile, the same in eager mode. Returns whether it was compared and is right. RunError if a
    gradient differs, CompileFailure if it cannot run. Changes neither weights nor random numbers."""
    kernel = model.kernel
    scale = SCALE if config.dtype == "float16" else 1.0
    slices = B // largest_divisor(B, EAGER_TOKENS // config.sequence_length)
    float32 = torch.autocast(process.device.split(":")[0], enabled=False)
    if isinstance(wrapped, DDP):
        wrapped.require_backward_grad_sync = False
    try:
        x, y = random_micro_batch(B, config.sequence_length, config.vocab_size, process.device)
        with nothing_zero(model, process.device):
            with compile_failures(wrapped):
                compiled = loss_and_gradients(wrapped, model, x, y, autocast, scale)
            if not config.check_compile:
                return False
            if kernel in ("flash", "cudnn", "flex"):    # no float32; flex would be compiled in eager mode too
                model.use_attention("auto")
            names = ["loss", *(name for name, _ in model.named_parameters())]
            exact, eager = (partial(loss_and_gradients, model, model, x, y, precision, scale, slices)
                            for precision in (float32, autocast))
            return compare_gradients(names, compiled, exact(), eager)
    except Exception as error:                  # a run out of memory says in its first step what needs less
        if not is_out_of_memory(error):
            raise
        process.print0("note: torch.compile is not compared with eager mode: out of memory")
        return False
    finally:
        model.zero_grad(set_to_none=True)
        model.use_attention(kernel)


def compare_gradients(names: list[str], compiled: list[Tensor], exact: list[Tensor],
                      eager: Callable[[], list[Tensor]]) -> bool:
    """RunError for a gradient that is wrong; False where eager mode's are not finite, which is not the
    compiler's doing. `exact`: in float32. `eager`: makes those of eager mode in the run's dtype, where they
    are needed. The first of each list is the loss."""
    size, off = norms(exact), norms(a - b for a, b in zip(compiled, exact, strict=True))
    counts = torch.tensor([gradient.numel() for gradient in exact], device=size.device)
    bound = TOLERANCE * size + FLOOR * torch.linalg.vector_norm(size[1:]) / counts.sqrt()
    bound[0] = TOLERANCE * size[0]
    if (off <= bound).all():
        return True
    noise = norms(a - b for a, b in zip(eager(), exact, strict=True))
    if not noise.isfinite().all():
        return False
    wrong = ~(off <= bound + FACTOR * noise)            # a NaN is wrong
    if not wrong.any():
        return True
    worst = int((off / bound).nan_to_num(math.inf, math.inf).where(wrong, -1.0).argmax())
    what = f"gradient of {names[worst]}" if worst else names[0]
    others = f", and {wrong.sum() - 1} more" if wrong.sum() > 1 else ""
    raise RunError(f"torch.compile gives another {what} than eager mode on this machine{others}: its norm is "
                   f"{norms(compiled)[worst]:.4g} instead of {size[worst]:.4g}, the difference's "
                   f"{off[worst]:.4g}; train without it: --no_compile (--no_check_compile trains with it "
                   "anyway)")


def loss_and_gradients(forward: Callable, model: torch.nn.Module, x: Tensor, y: Tensor,
                       autocast: torch.autocast, scale: float, slices: int = 1) -> list[Tensor]:
    """[loss, gradient of each parameter of `model`] of the batch, as the mean of equal slices of its rows.
    `scale`: of the loss in the backward."""
    model.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=x.device)
    for rows, targets in zip(x.chunk(slices), y.chunk(slices), strict=True):
        with autocast:
            loss = forward(rows, targets)[1] / slices
        (loss * scale).backward()
        loss_sum += loss.detach()
    gradients = [p.grad.div_(scale) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [loss_sum, *gradients]


def norms(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors])


def random_micro_batch(B: int, T: int, vocab_size: int, device: str) -> tuple[Tensor, Tensor]:
    """x, y int64 (B, T), from a generator of its own. One token in a hundred is the last of GPT-2's
    vocabulary, <|endoftext|>, so that documents begin within a sequence."""
    n = min(vocab_size, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(n + -(-n // 100), (B, T + 1), dtype=torch.int32, generator=generator)
    return to_device(rows.clamp_(max=n - 1), device)


@contextmanager
def nothing_zero(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Parameters that are zero everywhere have small random values inside. The modern recipes' output
    projections and head start at zero, so that most gradients would be exactly zero."""
    zeros = [p for p in model.parameters() if not p.any()]
    generator = torch.Generator(device).manual_seed(0)
    try:
        with torch.no_grad():
            for p in zeros:
                p.normal_(0.0, 0.02, generator=generator)
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
