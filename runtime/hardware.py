"""The device and its dtype, its memory, and how fast devices are."""
import contextlib
import ctypes
import functools
import logging
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from runtime.cli import UserError, brief_error


def choose_device(name: str = "auto", local_rank: int = 0) -> str:
    """'cuda:N', 'mps' or 'cpu'; N is `local_rank` unless the name says it.

    'auto' is the first of them that is available. UserError for a device that is not available, or
    a GPU on which no kernel runs. Sets up the allocator of CUDA, if nobody has, or that of a CPU.
    """
    configure_allocator()

    with warnings.catch_warnings(action="ignore"):          # the error below says the same
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = [f"cuda:{i}" for i in range(gpus)]
    if torch.backends.mps.is_available():
        available.append("mps")
    available.append("cpu")

    if name == "auto":
        name = "cuda" if gpus > 0 else available[0]
    device = name
    if name == "cuda":
        device = f"cuda:{local_rank}"

    if device not in available:
        raise UserError(f"--device {device} is not available (torch {torch.__version__} finds "
                        f"{', '.join(available)}): choose one of these, and start at most as many "
                        "processes as GPUs")
    if device.startswith("cuda"):
        check_gpu(device)
    elif device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Two threads in half a core take five times as long as one.
        quota = cpu_quota()
        if quota < torch.get_num_threads():
            torch.set_num_threads(max(1, math.floor(quota)))
    if device == "cpu":
        tune_malloc()
    return device


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores this process may use, as of `docker run --cpus 0.5`; inf without a limit."""
    texts = []
    with contextlib.suppress(OSError):
        texts = (cgroup / "cpu.max").read_text().split()                        # cgroup v2
    with contextlib.suppress(OSError):
        for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"):                  # v1
            texts.append((cgroup / "cpu" / name).read_text())

    if len(texts) != 2 or texts[0].strip() in ("max", "-1"):
        return math.inf
    microseconds, period = map(int, texts)
    return microseconds / period


def configure_allocator() -> None:
    """Tells CUDA's allocator, before its first use, to split no large block."""
    # Otherwise it puts gradients and moments into the free block of the last micro-step's logits,
    # and the next logits need another block: fewer sequences then fit (docs/lab-notes.md).
    users_own = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if any(name in os.environ for name in users_own):
        return
    os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:2048"


def check_gpu(device: str) -> None:
    """UserError if this build of torch has no kernels for the GPU."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        if is_out_of_memory(error):
            return                      # it has kernels; the first micro-batch tells what to do
        built_for = ", ".join(torch.cuda.get_arch_list())
        raise UserError(f"torch {torch.__version__}, which is built for {built_for}, cannot run on "
                        f"{device_name(device)} ({brief_error(error)}): install another build, see "
                        "https://pytorch.org/get-started/previous-versions, or use --device cpu"
                        ) from None


def device_name(device: str) -> str:
    """The model of a GPU, and of a CPU where Linux tells it, else the architecture."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, TypeError):
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return platform.machine()


def choose_dtype(name: str, device: str, before: str = "") -> str:
    """`name`; for 'auto' the 16-bit dtype whose products are fast on the hardware, else float32.

    `before` is the dtype of the run that resumes, or "". A CPU goes on in it, if it has the
    instructions; other devices choose anew.
    """
    if name != "auto":
        return name
    if device.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        return "float16"
    if device != "cpu":
        return "float32"

    kind = bfloat16_of_cpu()
    if before == "float32" or (before == "bfloat16" and kind in FAST_BFLOAT16 + SLOW_BFLOAT16):
        return before
    if kind in FAST_BFLOAT16:
        return "bfloat16"
    return "float32"


# What bfloat16_of_cpu says of CPUs on which products in bfloat16 take less time than in float32,
# and of those on which they take more, but are as exact.
FAST_BFLOAT16 = ("AMX", "AMD's AVX512-BF16")
SLOW_BFLOAT16 = ("Intel's AVX512-BF16",)


def bfloat16_of_cpu() -> str:
    """The instructions by which torch computes products in bfloat16 on this CPU."""
    features = torch.cpu.get_capabilities()
    if features.get("amx_bf16"):
        return "AMX"
    if features.get("avx512_bf16"):
        # Where a virtual machine hides their AMX, Intel's cores are slower with it than in float32
        # (docs/speed.md, "A step on a CPU").
        if is_amd():
            return "AMD's AVX512-BF16"
        return "Intel's AVX512-BF16"
    if features.get("bf16"):
        return "ARM's bfloat16"         # rounds between blocks of 512 terms (docs/running.md)
    return "no bfloat16"


def agreed_dtype(asked: str, chosen: str, process) -> str:
    """The dtype in which all ranks compute: where `asked` is "auto", that of rank 0.

    `chosen` is what this rank would choose. One whose CPU cannot follow keeps its own choice: then
    the ranks differ, which check_ranks_agree tells.
    """
    choices = process.gather(chosen)
    of_master = choices[0]
    if asked != "auto" or chosen == of_master:
        agreed = chosen
    else:
        agreed = choose_dtype("auto", process.device, before=of_master)

    for rank, choice in enumerate(choices):
        if choice != of_master:
            process.print0(f"process 0 has chosen {of_master} for all processes; process {rank} by "
                           f"itself would compute in {choice}")
            break
    return agreed


@functools.cache
def is_amd() -> bool:
    """Whether the CPU is AMD's."""
    with contextlib.suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return "AuthenticAMD" in platform.processor()           # Windows


# ----------------------------------------------------------------------------- memory

def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = f"{type(error).__name__}: {error}"

    # So Triton calls a kernel that needs more than a GPU's core has: a smaller batch would not
    # help. torch.compile puts the name OutOfMemoryError before these words.
    if "out of resource" in text:
        return False

    # CUDA, its libraries and the CPU's allocator have words of their own for it. A compiler's error
    # quotes the error that it wraps. cuBLAS and cuDNN that find no memory when they start say that
    # they are not initialized, or that an error is internal.
    words = (r"\b(CUDA|HIP|MPS|NCCL)\b.{0,200}out of memory|_ALLOC_FAILED|DefaultCPUAllocator: "
             "|MemoryError|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR")
    return re.search(words, text, re.IGNORECASE | re.DOTALL) is not None


@contextlib.contextmanager
def oom_as_user_error(advice: Callable[[], str]) -> Iterator[None]:
    """If memory runs out inside, raises a UserError with the message `advice()`."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(advice()) from None
        raise


def memory_errors(device: str):
    """Around what may need more memory than there is."""
    return oom_as_user_error(lambda: f"{device} is out of memory: lower --batch_size, add "
                                     "--recompute or (with several GPUs) --shard_optimizer, or "
                                     "train a smaller model")


def peak_memory(device: str) -> int:
    """Peak bytes so far: reserved by torch on a GPU, resident of the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:                                     # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024          # macOS gives bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def tune_malloc() -> None:
    """Makes glibc keep large freed blocks, which training on a CPU uses again in each step."""
    # By default glibc returns them to the kernel, which zeroes them page by page when they are
    # allocated again; that costs more than any kernel here.
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):                        # musl
        return
    # M_MMAP_MAX 0: no mmap. M_TRIM_THRESHOLD -1: never trim. M_TOP_PAD: grow by 256 MB.
    for parameter, value in ((-4, 0), (-1, -1), (-2, 1 << 28)):
        libc.mallopt(parameter, value)


# ----------------------------------------------------------------------------- how fast devices are

def choose_compile(config, model: torch.nn.Module, tokens_left: int, process) -> bool:
    """--compile, where it is "auto" by the length of the run. Says so where one would wonder."""
    # Hides a warning on a T4, "not enough SMs to use max_autotune_gemm": nothing uses that mode.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)
    if config.compile != "auto":
        return config.compile
    flops = tokens_left / process.world_size * model.flops_per_token(config.sequence_length)
    pays = process.on_gpu and process.from_master(compiling_pays(flops, process.device))
    if process.on_gpu and not pays:
        process.print0("eager, because the run is too short for torch.compile to pay")
    return pays


def compiling_pays(flops: float, device: str) -> bool:
    """Whether a run of so many FLOPs is long enough to win back the time of torch.compile."""
    # Compiling takes about half a minute. An eager model reaches about a tenth of the peak, so what
    # the GPU could do in COMPILE_SECONDS takes it 50 s: below that compiling does not pay.
    peak = peak_flops(device) or USUAL_PEAK
    return flops > COMPILE_SECONDS * peak


# Dense 16-bit TFLOP/s with fp32 accumulation. NVIDIA's data sheets give twice as much (sparsity),
# and those of GeForce four times as much (fp16 accumulation, too). A name must match as a whole: a
# suffix (Ti, D, Laptop GPU, a MIG slice) means another chip or clock.
PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200|H100 80GB HBM3|H800|GH200 (480|120)GB": 989.4,
    "(H200|H100) NVL": 835.5,
    "H100 PCIe": 756,
    "A100(-SXM4|-PCIE)?[- ](40|80)GB( PCIe)?": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "A10G": 70,
    "L40S": 362,
    "L4": 121,
    "V100-SXM2-(16|32)GB": 125,
    "V100-PCIE-(16|32)GB": 112,
    "T4": 65,
    "RTX 6000 Ada Generation": 364,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 4090 D": 147.1,
    "RTX 4080": 97.5,
    "RTX 3090": 71,
}

USUAL_PEAK = 100e12         # FLOP/s, of a GPU that PEAK_TFLOPS does not list
COMPILE_SECONDS = 5.0       # see compiling_pays


@functools.cache
def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of the device's 16-bit matrix units; None if PEAK_TFLOPS does not list it."""
    if not device.startswith("cuda"):
        return None
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", torch.cuda.get_device_name(device))
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name):
            return tflops * 1e12
    return None
