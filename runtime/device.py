"""Device, dtype, memory, the size of a micro-batch, and the peak FLOP/s of GPUs."""
import contextlib
import ctypes
import functools
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from runtime.cli import RunError, UserError, brief_error
from runtime.dataloader import divide_update


def choose_device(name: str = "auto", local_rank: int = 0) -> str:
    """'cuda:N', 'mps' or 'cpu'; N is `local_rank` unless the name says it. For 'auto' the first of them that
    is available. UserError for one that is not, or a GPU on which no kernel runs."""
    if TorchVersion(torch.__version__) < (2, 10):       # mm(out_dtype=) would break a graph there
        raise UserError(f"torch {torch.__version__} is too old: pip install 'torch>=2.10'")
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        # CUDA's allocator, before its first use, should split no large block. Else gradients and moments are
        # put into the free block of the last micro-step's logits, and the next needs another: GPT-2 124M at
        # 200 x 1,024 tokens then does not fit in 80 GB, although it uses 69
        os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:2048"
    with warnings.catch_warnings(action="ignore"):      # torch's; ours say the same in one line
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = [f"cuda:{i}" for i in range(gpus)] + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    gpu = f"cuda:{local_rank}"
    device = {"auto": gpu if gpus else there[0], "cuda": gpu}.get(name, name)
    if device not in there:
        raise UserError(f"--device {device}: not available here, torch {torch.__version__} finds "
                        f"{', '.join(there)}: use one of these, and at most as many processes as GPUs")
    if device.startswith("cuda"):
        try:                                            # makes the GPU's context
            torch.ones(2, device=device).sum().item()
        except RuntimeError as error:                   # "no kernel image is available", for one
            if not is_out_of_memory(error):             # whoever needs more says what to do
                raise UserError(f"{device_name(device)} cannot run torch {torch.__version__}, which has code "
                                f"for {', '.join(torch.cuda.get_arch_list())}: {brief_error(error)} (another "
                                "build: https://pytorch.org/get-started/previous-versions; --device cpu does "
                                "without the GPU)") from None
    return device


def device_name(device: str) -> str:
    """The model of a GPU, and of a CPU where Linux tells it, else the architecture."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, TypeError):
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return platform.machine()


def choose_dtype(name: str, device: str) -> str:
    """`name`; for 'auto' 'bfloat16' if the hardware has it, else 'float16' on CUDA, 'float32' elsewhere."""
    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    native = device == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bfloat16" if native else "float32"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory: a MemoryError, torch's own error, or a RuntimeError of
    CUDA, of one of its libraries or of the CPU allocator. A compiler's error quotes the one that it wraps."""
    words = r"\b(CUDA|HIP|MPS|NCCL)\b.{0,200}out of memory|_ALLOC_FAILED|DefaultCPUAllocator: |MemoryError"
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(
        re.search(words, f"{type(error).__name__}: {error}", re.I | re.S))


@contextlib.contextmanager
def oom_as_user_error(advice: Callable[[], str]) -> Iterator[None]:
    """If memory runs out inside, raises a UserError with the message `advice()`."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(advice()) from None
        raise


def time_micro_step(run, B: int) -> float:
    """Seconds of a forward and backward of B sequences: the second one's, since the first may compile.
    Changes neither weights nor gradients."""
    # two tensors, as in a step: for one that is both, torch.compile makes another graph
    x, y = (torch.zeros(B, run.config.sequence_length, dtype=torch.int64, device=run.process.device)
            for _ in range(2))
    if run.process.world_size > 1:              # a rank that is out of memory leaves no other waiting
        run.wrapped.require_backward_grad_sync = False
    try:
        for _ in range(2):
            began = time.perf_counter()
            with run.autocast:
                _, loss = run.wrapped(x, y)
            loss.backward()
            next(run.model.parameters()).grad.sum().item()      # waits for a GPU
        return time.perf_counter() - began
    finally:
        run.model.zero_grad(set_to_none=True)


def sequences_that_fit(run, moments: int) -> int:
    """How many sequences a micro-step can have in a GPU's free memory beside the gradients and `moments`
    bytes, as counted for compiled models. Never fewer than fit; eager ones take up to three times more."""
    config = run.config
    # Of a block the backward needs 12 vectors a token: the input, its norm, q, k, v, attention's output, the
    # sum of it and the input, the norm of that, and the hidden layer, four times as wide, whose GELU is
    # computed again
    vectors = 12
    if config.recipe != "gpt2":
        vectors = 20            # counted with tests/null_gpu: 20.1 for speedrun, 20.4 for frontier
    if config.recompute:
        vectors = 1             # the input alone
    # one row of logits a token, whose gradient takes their place
    numbers = config.vocab_size + config.n_layer * vectors * config.n_embd
    sequence = (4 if config.dtype == "float32" else 2) * numbers * config.sequence_length
    gradients = sum(p.nbytes for p in run.model.parameters())
    free, _ = torch.cuda.mem_get_info(run.process.device)
    return max(1, (free - gradients - moments) // sequence)


def choose_batch_size(run) -> int:
    """The most sequences of a micro-step: --batch_size; or as many as an update has, on a GPU halved as long
    as a trial is out of memory, on a CPU 4,096 tokens, of which more are no faster. A compiled model is
    compiled here, and --attention tried: where that fails, the run ends before its first step."""
    config, process = run.config, run.process
    auto, cuda = config.batch_size == "auto", process.device.startswith("cuda")
    moments = sum(2 * p.nbytes for o in run.optimizers for g in o.param_groups for p in g["params"])
    moments *= cuda and run.step == 0           # which the first step allocates
    most = config.batch_size
    if auto and cuda:
        most = sequences_that_fit(run, moments)
    elif auto:
        most = max(1, 4096 // config.sequence_length)
    tried = config.compile or auto and cuda or config.attention not in ("auto", "naive")

    def fits(B):
        try:
            _room = torch.empty(moments, dtype=torch.uint8, device=process.device)
            with warnings.catch_warnings(record=True, action="always") as reasons:      # torch's
                return time_micro_step(run, B) > 0
        except Exception as error:              # the compiler, its backend and Triton raise many types
            if is_out_of_memory(error):
                if auto and B > 1:
                    return False
            elif re.search("No (available kernel|viable backend)", str(error)):
                why = "; ".join(str(w.message).split(" (Triggered")[0] for w in reasons) or brief_error(error)
                raise UserError(f"--attention {config.attention} cannot run on {process.device} in "
                                f"{config.dtype} ({why}): use --attention auto") from None
            elif config.compile:
                raise RunError(f"torch.compile does not work here ({brief_error(error)}): train without it, "
                               "--no_compile") from None
            raise
    while True:
        # What divides an update of the first steps divides those of later steps, which have more sequences:
        # every micro-batch of the run has the same shape, and nothing is compiled again
        B, _ = divide_update(config, config.updates_per_step, process.world_size,
                             min(process.gather(most)))         # GPUs differ
        done = not tried or all(process.gather(process.on_all_ranks(fits, B)))
        torch.cuda.empty_cache()                # what the run allocates need not fit into a trial's blocks
        if done:
            return B
        most = B // 2


# Dense 16-bit peaks in TFLOP/s with fp32 accumulation, from NVIDIA's data sheets, which give them with
# sparsity (twice as much), GeForce's also with fp16 accumulation (twice again). A name must match as a whole:
# a suffix (Ti, D, Laptop GPU, a MIG slice) means another chip or clock.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "H200|H100 80GB HBM3|H800|GH200 (480|120)GB": 989.4,
    "(H200|H100) NVL": 835.5, "H100 PCIe": 756, "A100(-SXM4|-PCIE)?[- ](40|80)GB( PCIe)?": 312,
    "A40": 149.7, "A30": 165, "A10": 125, "A10G": 70, "L40S": 362, "L4": 121, "V100-SXM2-(16|32)GB": 125,
    "V100-PCIE-(16|32)GB": 112, "T4": 65, "RTX 6000 Ada Generation": 364, "RTX A6000": 154.8,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 4090 D": 147.1, "RTX 4080": 97.5, "RTX 3090": 71,
}


# FLOP/s of one core, more than any reaches in training: AVX-512 at 3 GHz has 1.9e11 in float32, and AMX comes
# to a few 1e11 in the 16-bit matrix products of GPT-2
CORE_FLOPS = {"float32": 2e11, "bfloat16": 1e12, "float16": 1e12}


def least_cpu_seconds(flops: float, dtype: str, processes: int = 1) -> float:
    """Seconds that so many FLOPs take at least on a CPU, with torch's threads in each process. For a warning:
    it must not call a run slow that is not, and needs no measurement, which at 124M takes a minute."""
    return flops / (CORE_FLOPS[dtype] * torch.get_num_threads() * processes)


@functools.cache
def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of the device's 16-bit matrix units, or None if PEAK_TFLOPS does not list it."""
    if not device.startswith("cuda"):
        return None
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", torch.cuda.get_device_name(device))
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if re.fullmatch(key, name)), None)


def peak_memory(device: str) -> int:
    """Peak bytes so far: reserved by torch on a GPU, resident of the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:                         # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024          # macOS gives bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def tune_malloc() -> None:
    """Makes glibc keep large freed blocks. By default it returns them to the kernel, which zeroes them page
    by page at the next step; on a CPU that costs more than any kernel here."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):       # musl has none
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        for parameter, value in ((-4, 0), (-1, -1), (-2, 1 << 28)):
            libc.mallopt(parameter, value)


def fetch(tensor: torch.Tensor) -> Callable[[], list]:
    """Starts to copy a small tensor to the CPU. Returns a function that waits for it, and not for what is
    queued later on a GPU, and returns its numbers."""
    if not tensor.is_cuda:
        return tensor.tolist
    copy, done = tensor.to("cpu", non_blocking=True), torch.cuda.Event()        # into pinned memory
    done.record()
    return lambda: done.synchronize() or copy.tolist()
