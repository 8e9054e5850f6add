"""Before the first step of a compiled run: one micro-batch's loss and gradients, compiled against eager.

torch.compile can be wrong without an error (pytorch issues 190796 and 193061). A compiled gradient g is right
where |g - f| <= TOLERANCE |f| + FLOOR / sqrt(n) |all f|. n is its number of elements, and f is eager mode's
in float32: in bfloat16 eager mode's own is up to 24% away for a LayerNorm on a CPU (4,096 tokens), the
compiled one 1%. What is farther away is right where eager mode in the run's own dtype is about as far from f.
FLOOR is for learned scalars, differences of large sums: of a single number, how far eager mode is tells
little.
"""
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from runtime import kernels
from runtime.batch_size import allowed_micro_batches, cache_key, choose_micro_batch, load_cache, save_cache
from runtime.checkpoint import TrainState
from runtime.cli import RunError
from runtime.dataloader import to_device
from runtime.device import CompileFailure, compile_failures, is_out_of_memory, without_compile
from runtime.distributed import Process
from runtime.tokenizer import VOCAB_SIZE

NAME = "compile_check.json"     # in the cache
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
        B = choose_micro_batch(config, candidates, state, wrapped, autocast, process)
        if compiled is not state.model and not config.dry_run:
            check_compiled(config, state, wrapped, autocast, process, B)
        return B, compiled, wrapped
    except CompileFailure as failure:
        process.print0(f"warning: torch.compile does not work here ({failure}); falling back to eager mode")
    wrapped = without_compile(wrapped, state.model)
    return (choose_micro_batch(replace(config, compile=False), candidates, state, wrapped, autocast, process),
            state.model, wrapped)


def check_compiled(config, state: TrainState, wrapped: Callable, autocast: torch.autocast, process: Process,
                   B: int) -> None:
    """One micro-step of `wrapped`, in which its graph is compiled for training. Then, unless an earlier run
    has done so or --no_check_compile is given, the same in eager mode: RunError if a gradient differs,
    CompileFailure if it cannot run, on all ranks alike. Changes neither weights nor random numbers."""
    model = state.model
    key = cache_key(config, process, config.tf32, sources(model), B)
    known = load_cache(NAME)
    asked = config.check_compile and key not in known

    def check():
        try:
            return try_compiled(model, wrapped, config, autocast, process, B, asked)
        except Exception as error:              # a run out of memory says in its first step what needs less
            if not is_out_of_memory(error):
                raise
            process.print0("note: torch.compile is not compared with eager mode: out of memory")
        finally:
            model.zero_grad(set_to_none=True)

    with process.progress("compiling, and comparing with eager mode" if asked else "compiling"):
        passed = process.on_all_ranks(check)
    if process.device.startswith("cuda"):
        torch.cuda.empty_cache()
    if passed and process.is_master:
        process.print0("torch.compile was compared with eager mode on one micro-batch: the gradients agree")
        save_cache(NAME, known | {key: True})


def try_compiled(model: torch.nn.Module, wrapped: Callable, config, autocast: torch.autocast,
                 process: Process, B: int, compare: bool) -> bool:
    """A micro-step of the compiled model, and whether it was compared and is right."""
    x, y = random_micro_batch(B, config.sequence_length, config.vocab_size, process.device)
    scale = SCALE if config.dtype == "float16" else 1.0
    slices = next(n for n in range(1, B + 1) if B % n == 0 and x.numel() <= n * max(EAGER_TOKENS, x.size(1)))
    float32 = torch.autocast(process.device.split(":")[0], enabled=False)
    if isinstance(wrapped, DDP):
        wrapped.require_backward_grad_sync = False
    with nothing_zero(model, process.device):
        with compile_failures(wrapped):
            compiled = loss_and_gradients(wrapped, model, x, y, autocast, scale)
        if not compare:
            return False
        with eager_kernel(model):
            names = ["loss", *(name for name, _ in model.named_parameters())]
            exact = loss_and_gradients(model, model, x, y, float32, scale, slices)
            return compare_gradients(names, compiled, exact, scale, lambda: loss_and_gradients(
                model, model, x, y, autocast, scale, slices))


def compare_gradients(names: list[str], compiled: list[Tensor], exact: list[Tensor], scale: float,
                      eager: Callable[[], list[Tensor]]) -> bool:
    """RunError for a gradient that is wrong; False where eager mode's are not finite, which is not the
    compiler's doing. `exact`: in float32. `eager`: makes those of eager mode in the run's dtype, where they
    are needed. The first of each list is the loss."""
    rows = torch.stack((distances(compiled, exact), norms(exact), norms(compiled)), 1).tolist()
    floor = FLOOR * math.hypot(*(size for _, size, _ in rows[1:]))
    bounds = [TOLERANCE * size + floor / math.sqrt(gradient.numel())
              for gradient, (_, size, _) in zip(exact, rows, strict=True)]
    bounds[0] = TOLERANCE * rows[0][1]
    if all(off <= bound for (off, *_), bound in zip(rows, bounds, strict=True)):
        return True
    noise = distances(eager(), exact).tolist()
    if not all(map(math.isfinite, noise)):
        return False
    wrong = [i for i, (off, *_) in enumerate(rows) if not off <= bounds[i] + FACTOR * noise[i]]
    if not wrong:
        return True
    first = max(wrong, key=lambda i: rows[i][0] / bounds[i] if math.isfinite(rows[i][0]) else math.inf)
    what = f"gradient of {names[first]}" if first else names[0]
    off, size, other = rows[first]
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise RunError(f"torch.compile gives another {what} than eager mode on this machine{others}: its norm is "
                   f"{other / scale:.4g} instead of {size / scale:.4g}, the difference's {off / scale:.4g}; "
                   "train without it: --no_compile (--no_check_compile trains with it anyway)")


def loss_and_gradients(forward: Callable, model: torch.nn.Module, x: Tensor, y: Tensor,
                       autocast: torch.autocast, scale: float, slices: int = 1) -> list[Tensor]:
    """[loss, gradient of each parameter of `model`] of the batch, times `scale`, as the mean of equal slices
    of its rows."""
    model.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=x.device)
    for rows, targets in zip(x.chunk(slices), y.chunk(slices), strict=True):
        with autocast:
            loss = forward(rows, targets)[1] / slices
        (loss * scale).backward()
        loss_sum += loss.detach()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [loss_sum, *gradients]


def norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors])


def distances(some: list[Tensor], others: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(a - b) for a, b in zip(some, others, strict=True)])


def random_micro_batch(B: int, T: int, vocab_size: int, device: str) -> tuple[Tensor, Tensor]:
    """x, y int64 (B, T), from a generator of its own. One token in a hundred is the last of GPT-2's
    vocabulary, <|endoftext|>, so that documents begin within a sequence."""
    n = min(vocab_size, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(n + -(-n // 100), (B, T + 1), dtype=torch.int32, generator=generator)
    rows = rows.clamp_(max=n - 1)
    return to_device(rows.pin_memory() if device.startswith("cuda") else rows, device)


@contextmanager
def nothing_zero(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Parameters that are zero everywhere have small random values inside. The modern recipes' output
    projections and head start at zero, so that most gradients would be exactly zero."""
    params = [p for p in model.parameters()]
    bits = torch.stack([p.detach().view(torch.int32).any() for p in params]).tolist()     # -0.0 has one
    zeros = [p for p, some in zip(params, bits, strict=True) if not some]
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


@contextmanager
def eager_kernel(model: torch.nn.Module) -> Iterator[None]:
    """Inside, auto takes the place of kernels that have no float32 (flash, cudnn), and of FlexAttention,
    which alone would be compiled for eager mode too."""
    kernel = model.kernel
    model.use_attention("auto" if kernel in ("flash", "cudnn", "flex") else kernel)
    try:
        yield
    finally:
        model.use_attention(kernel)


def sources(model: torch.nn.Module) -> str:
    """Digest of the code that the compiler sees: the files of the model's classes, and of the kernels."""
    classes = [cls for cls in type(model).__mro__ if not cls.__module__.startswith(("torch", "builtins"))]
    files = sorted({inspect.getfile(thing) for thing in (*classes, kernels)})
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]
