"""Device, dtype, compilation, memory allocators, and the peak FLOP/s of GPUs."""
import contextlib
import ctypes
import logging
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from runtime.attention import check_attention
from runtime.cli import RunError, UserError, print_error
from runtime.start import is_rank0


def choose_device(name: str = "auto") -> str:
    """find_device; of several GPUs the one of this rank. A GPU is tried."""
    device = find_device(name)
    if device == "cuda":
        device = find_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")     # refuses more ranks than GPUs
    if device.startswith("cuda"):
        check_gpu(device)
    return device


def find_device(name: str = "auto") -> str:
    """The device `name`; for 'auto' the first available of 'cuda', 'mps' and 'cpu'. UserError if it is not
    available, or if there is a GPU whose driver cannot be used: 'auto' does not fall back to the CPU then."""
    with warnings.catch_warnings(action="ignore"):      # torch's; the checks below say the same in one line
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cuda", *(f"cuda:{i}" for i in range(gpus))] if gpus else []
    there += ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    if not gpus and (name == "auto" or name.startswith("cuda")):
        check_driver()
    device = there[0] if name == "auto" else name
    if device not in there:
        raise UserError(f"--device {name}: not available here; use {' or '.join(there)}")
    if name == "auto" and device == "cpu" and is_rank0():
        warn_of_unused_gpu()
    return device


# a maker, the build of torch for its GPUs, and a file of its driver: where that is, there is a GPU
DRIVERS = [("NVIDIA", "CUDA", "/dev/nvidia0"), ("NVIDIA", "CUDA", "/proc/driver/nvidia/version"),
           ("NVIDIA", "CUDA", "/usr/lib/wsl/lib/libcuda.so.1"), ("AMD", "ROCm", "/dev/kfd")]


def warn_of_unused_gpu() -> None:
    """A line if there is a GPU that torch does not find, unless CUDA_VISIBLE_DEVICES hides it."""
    hidden = os.environ.keys() & {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    built = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    for maker, build, driver in DRIVERS:
        if os.path.exists(driver) and not (hidden and build == built):
            return print_error(
                f"warning: torch {torch.__version__}, a {built} build, does not find the {maker} GPU: give it"
                f" the {build} build (https://pytorch.org/get-started/locally) and access to its /dev files; "
                "falling back to the CPU (--device cpu does so without this line)")


def check_driver() -> None:
    """If torch finds no GPU: UserError, with torch's reason, if there is a driver. Mostly it is too old."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:     # AssertionError: torch without CUDA
        if not re.search("not compiled|Found no NVIDIA driver|No (CUDA|HIP) GPUs", str(error)):
            raise UserError(f"torch {torch.__version__} cannot use this machine's GPU driver: "
                            f"{first_line(error)} (nvidia-smi tells more; --device cpu does without a GPU)"
                            ) from None


def check_gpu(device: str) -> None:
    """UserError unless a kernel runs on the GPU: this torch may hold no code for it ('no kernel image is
    available'), or another process may have it for itself. Makes the GPU's context."""
    with warnings.catch_warnings(record=True) as said:      # torch's, which say the same in several lines
        warnings.simplefilter("always")
        try:
            torch.ones(2, device=device).sum().item()
        except RuntimeError as error:
            if is_out_of_memory(error):                 # whoever needs more says what to do
                return
            major, minor = torch.cuda.get_device_capability(device)
            # torch names a build for the GPU, where there is one of its version
            build = re.search("pip install .*|$", "\n".join(str(warning.message) for warning in said))[0]
            build = build or "https://pytorch.org/get-started/previous-versions has other builds"
            raise UserError(
                f"{device_name(device)}, of compute capability {major}.{minor}, cannot run torch "
                f"{torch.__version__}, which has code for {', '.join(torch.cuda.get_arch_list())}: "
                f"{first_line(error)} ({build}; nvidia-smi shows who uses the GPU, --device cpu does without "
                f"it)") from None


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


def make_autocast(device: str, dtype: str) -> torch.autocast:
    """torch.autocast to `dtype` ('bfloat16', 'float16') on `device`; disabled for 'float32'."""
    return torch.autocast(device.split(":")[0], dtype=getattr(torch, dtype), enabled=dtype != "float32")


class CompileFailure(RunError):
    """torch.compile fails on the model's graph: eager mode does without it."""


@contextlib.contextmanager
def compile_failures(model: Callable) -> Iterator[None]:
    """Around what `model` does: if torch.compile made it, any error but that of memory becomes a
    CompileFailure, because the compiler, its backend, Triton and the kernels raise many types. An error of
    the model's own is raised in eager mode too."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if not hasattr(getattr(model, "module", model), "_orig_mod") or is_out_of_memory(error):
            raise
        raise CompileFailure(first_line(error)) from None


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


OUT_OF_MEMORY = re.compile(
    r"\b(CUDA|HIP|MPS|NCCL)\b.{0,200}out of memory|_ALLOC_FAILED|DefaultCPUAllocator: |MemoryError",
    re.I | re.S)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory: a MemoryError, torch's own error, or a RuntimeError of
    CUDA, of one of its libraries or of the CPU allocator. A compiler's error quotes the one that it wraps."""
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(
        OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"))


@contextlib.contextmanager
def oom_as_user_error(advice: Callable[[], str]) -> Iterator[None]:
    """If memory runs out inside, raises a UserError with the message `advice()`."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(advice()) from None
        raise


# Dense 16-bit peaks in TFLOP/s with fp32 accumulation, from NVIDIA's data sheets. Those of newer cards are
# given there with sparsity (twice as much), GeForce's also with fp16 accumulation (twice again). A name must
# match as a whole: a suffix (Ti, D, Laptop GPU, NVL, a MIG slice) means another chip or clock, and an unknown
# name has no figure.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "B100": 1750, "GH200 (480|120)GB": 989.4, "H200": 989.4, "H200 NVL": 835.5,
    "H100 80GB HBM3": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756, "H800": 989.4, "H20": 148,
    "A100-(SXM4|PCIE)-(40|80)GB": 312, "A100 80GB PCIe": 312, "A800-SXM4-(40|80)GB": 312,
    "A800 80GB PCIe": 312,
    "A40": 149.7, "A30": 165, "A10": 125, "A10G": 70, "L40S": 362, "L40": 181, "L4": 121,
    "V100-SXM2-(16|32)GB": 125, "V100-PCIE-(16|32)GB": 112, "V100S-PCIE-32GB": 130, "T4": 65,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 154.8,
    # GeForce: multiprocessors x boost clock x 512, as in NVIDIA's white papers (128 x 2.52 GHz x 512: 165.2)
    "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2, "RTX 4090 D": 147.1, "RTX 4080 SUPER": 104.4,
    "RTX 4080": 97.5, "RTX 3090 Ti": 80, "RTX 3090": 71, "RTX 3080 Ti": 68.2, "RTX 3080": 59.5,
}


def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of the device's 16-bit matrix units, or None if PEAK_TFLOPS does not list it."""
    if not device.startswith("cuda"):
        return None
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", torch.cuda.get_device_name(device))
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if re.fullmatch(key, name)), None)


def memory_of(device: str) -> tuple[float, float]:
    """(free, all) bytes of a GPU's memory, or of the machine's with its swap; infinite where unknown."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)
    with contextlib.suppress(OSError, KeyError):        # Linux
        kB = re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text())
        size = {name: 1024 * int(number) for name, number in kB}
        return size["MemAvailable"] + size["SwapFree"], size["MemTotal"] + size["SwapTotal"]
    if not hasattr(os, "sysconf"):                      # Windows
        return math.inf, math.inf
    return (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),) * 2


def peak_memory(device: str) -> int:
    """Peak bytes so far: reserved by torch on a GPU, resident of the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError, TypeError):       # Linux; getrusage counts the parent of a fork, too
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    try:
        import resource
    except ImportError:                         # Windows
        return 0
    # kilobytes, on macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tune_cuda_allocator() -> None:
    """Keeps torch's CUDA allocator from splitting large blocks, unless the user has set it. Call it before
    CUDA's first use.

    By default, what stays in memory (gradients, moments) is put into the free block of the last micro-step's
    logits, by far the largest, and the next micro-step needs another one: GPT-2 124M at 200 x 1,024 tokens
    then does not fit in 80 GB, although it uses 69."""
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:2048"


def tune_malloc() -> None:
    """Makes glibc keep large freed blocks. By default it returns them to the kernel, which zeroes them page
    by page at the next step; on a CPU that costs more than any kernel here, as the logits alone take hundreds
    of megabytes."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):       # musl has none
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        for parameter, value in ((-4, 0), (-1, -1), (-2, 1 << 28)):
            libc.mallopt(parameter, value)


def leave_compiler_out() -> None:
    """Lets torch's optimizers start without its compiler. They import it (1.3 of the 3 seconds that a small
    run needs to start) only to exempt their own methods from it. They stay outside a compiled model's graph
    all the same."""
    for method in vars(torch.optim.Optimizer).values():         # as torch/_compile.py would do it
        exempted = getattr(method, "__wrapped__", None)
        if exempted is not None and not hasattr(exempted, "__dynamo_disable"):
            setattr(exempted, "__dynamo_disable", exempted)     # noqa: B010, a class would mangle the name
    # the wrapper of step switches gradients off, between two breaks of a graph
    if step := getattr(torch.optim.Adam.step, "__wrapped__", None):
        torch.optim.Adam.step = torch.no_grad()(step)


def fetch(tensor: torch.Tensor) -> Callable[[], list]:
    """Starts to copy a small tensor to the CPU. Returns a function that waits for it, and not for what is
    queued later on a GPU, and returns its numbers."""
    if not tensor.is_cuda:
        return tensor.tolist
    copy, done = tensor.to("cpu", non_blocking=True), torch.cuda.Event()        # into pinned memory
    done.record()

    def wait():
        done.synchronize()
        return copy.tolist()
    return wait


def place_model(config, model, device: str) -> None:
    """Moves the model to `device`, and sets how it computes: kernels, and what it keeps in memory."""
    model.to(device).use_attention(config.attention)
    model.loss_chunk, model.recompute = config.loss_chunk, config.recompute


def compiles(config, device: str) -> bool:
    """Whether the config asks for torch.compile."""
    return device.startswith("cuda") if config.compile is None else config.compile


def compile_model(config, model, process) -> Callable:
    """The model for evaluation: compiled if the config asks for it. It shares its weights with `model`, which
    stays eager: samples and HellaSwag use that one, because their shapes change."""
    if not compiles(config, process.device):
        return model
    if config.window and config.attention == "auto" and process.device.startswith("cuda"):
        head_dim = config.n_embd // config.n_head
        try:
            check_attention("flex", process.device, getattr(torch, config.dtype), head_dim, masked=True)
        except UserError as error:
            model.use_attention("sdpa")
            process.print0(f"warning: using a T x T mask instead of FlexAttention: {error}")
    # the compiler's own lines: our warning of eager mode says the first, and we never ask for autotuning
    warnings.filterwarnings("ignore", ".* does not support bfloat16 compilation natively")
    logging.getLogger("torch._inductor.utils").addFilter(lambda r: "Not enough SMs" not in r.getMessage())
    # inside its graph the compiler would compute all chunks' products first, and save no memory
    model.chunked_loss = torch.compiler.disable(model.chunked_loss)
    # A value that takes more operations than this (by default 30) is written to memory instead of computed in
    # the kernel that uses it. Only frontier has such values, the gradients of its late keys: a micro-step of
    # 16 x 1024 tokens moves 27.5 GB instead of 29.0. gpt2 and speedrun move the same as before.
    options = {"realize_opcount_threshold": 64}
    try:
        return torch.compile(model, dynamic=False, options=options)
    except RuntimeError as error:                       # not for this Python
        process.print0(f"warning: {first_line(error)}; falling back to eager mode")
        return model


def wrap_model(model: Callable, process) -> Callable:
    """The model for training: wrapped in DDP if there are several processes."""
    if process.world_size == 1:
        return model
    # torch.compile makes one graph per bucket of a model inside DDP. 170 MB a bucket are three graphs for
    # 124M. torch's default of 25 MB gives 14, which read and write 159 GB for 64 x 1024 tokens instead of
    # 149. A single bucket would send nothing before the end of the backward.
    buckets = dict(gradient_as_bucket_view=True, bucket_cap_mb=170)
    # window and stems are the same on all ranks: no broadcast at each step
    if "batched_grad_copy" in signature(DDP).parameters:        # torch 2.13: one launch per bucket
        buckets |= dict(batched_grad_copy=True, forward_sync_buffers=False)
    else:
        buckets |= dict(broadcast_buffers=False)
    if not process.device.startswith("cuda"):
        return DDP(model, **buckets)
    wrapped = DDP(model, device_ids=[process.device], **buckets)
    wrapped.register_comm_hook(None, average_bucket)
    return wrapped


def average_bucket(_state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket's gradients over the ranks. NCCL divides while it adds, where DDP would divide in
    a pass of its own (8 bytes a parameter). gloo cannot."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def without_compile(wrapped: Callable, model: torch.nn.Module) -> Callable:
    """The model for training in eager mode, in place of `wrapped`, which was to be compiled. DDP stays: its
    parameters, and what it does with their gradients, are the same."""
    if isinstance(wrapped, DDP):
        wrapped.module = model
        return wrapped
    return model
