"""Import before torch: then `cuda` is a simulated GPU (null_gpu.cpp, built by `setup`).

torch's CUDA build checks, compiles, allocates and launches as on a real GPU. The kernels compute nothing.
"""
import collections
import ctypes
import os
import sys
import warnings
from pathlib import Path

HOME = Path(sys.prefix).parent          # setup's folder: this python is in its venv
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(HOME))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(HOME / "cache"))
os.environ.setdefault("TRITON_CACHE_DIR", str(HOME / "cache" / "triton"))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"       # worker processes would not have loaded the library
try:
    library = ctypes.CDLL(str(HOME / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # found before CUDA's
    nvml = ctypes.CDLL(str(HOME / "libnvidia-ml.so.1"))
except OSError as error:
    raise SystemExit(f"{error}: run {Path(__file__).with_name('setup')} first") from None
library.null_gpu_peak.restype = ctypes.c_size_t
library.null_gpu_take.restype = ctypes.c_char_p

import torch                                                            # noqa: E402
import torch.distributed as dist                                        # noqa: E402

called = collections.Counter()      # operators that are replaced here instead of in the library


def take_counts():
    """(Counter of launches, copies, waits; [(collective, bytes)]) since the last call."""
    counts, collectives = called.copy(), []
    called.clear()
    for line in library.null_gpu_take().decode().splitlines():
        number, what = line.split("\t")
        if what.startswith("collective "):
            collectives.append([what[11:], int(number)])
        else:
            counts[what] += int(number)
    return counts, collectives


def without_cudnn(op):
    """cuDNN's attention `op` as an operator that allocates the same. cuDNN itself bypasses the driver."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    made = {}                       # shapes of arguments -> of results: a fake run takes a millisecond

    def results(args, kwargs):
        with torch.utils._python_dispatch._disable_current_modes(), FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) if torch.is_tensor(a) else a for a in args],
                      **{k: mode.from_tensor(a) if torch.is_tensor(a) else a for k, a in kwargs.items()})
        return [(t.size(), t.stride(), t.dtype) if isinstance(t, FakeTensor) else t for t in fake]

    def attention(*args, **kwargs):
        query = args["backward" in op.__name__]
        key = str([(a.size(), a.stride(), a.dtype) if torch.is_tensor(a) else a
                   for a in (*args, *kwargs.items())])
        if key not in made:
            made[key] = results(args, kwargs)
        called["cuDNN attention" + " backward" * ("backward" in op.__name__)] += 1
        if "backward" in op.__name__:
            torch.empty(query.shape, dtype=torch.float32, device=query.device)      # workspace: dq in fp32
        return tuple(torch.empty_strided(t[0], t[1], dtype=t[2], device=query.device)
                     if isinstance(t, tuple) else t for t in made[key])
    return attention


with warnings.catch_warnings():
    warnings.simplefilter("ignore")                     # of the implementation that is replaced
    operators = torch.library.Library("aten", "IMPL")
    for name in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"):
        operators.impl(name, without_cudnn(getattr(torch.ops.aten, name).default), "CUDA")


# NCCL transfers nothing between processes (null_gpu.cpp). What the host needs to continue goes by gloo among
# the CPUs: objects, and sums of numbers that the host has just copied to the device.
side_group = []


def by_gloo():
    if not side_group:
        side_group.append(dist.new_group(backend="gloo"))
    return side_group[0]


def all_gather_object(values, value, gather=dist.all_gather_object):
    gather(values, value, by_gloo())


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False, nccl=dist.all_reduce):
    known = tensor.is_cuda and library.null_gpu_knows(ctypes.c_void_p(tensor.data_ptr()),
                                                      ctypes.c_size_t(tensor.nbytes))
    work = nccl(tensor, op, group, async_op)            # is counted, and does not change the number
    if known and group is None:
        # the device's memory is the host's here
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        nccl(torch.frombuffer(memory, dtype=tensor.dtype), op, by_gloo())
    return work


dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
