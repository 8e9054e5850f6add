"""Import before torch: then `cuda` is a simulated GPU (null_gpu.cpp, built by `setup`).

torch's CUDA build checks, compiles, allocates and launches as on a real GPU. The kernels
compute nothing.
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
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"       # worker processes would lack the library
try:
    # It is found before CUDA's.
    library = ctypes.CDLL(str(HOME / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    nvml = ctypes.CDLL(str(HOME / "libnvidia-ml.so.1"))
except OSError as error:
    raise SystemExit(f"{error}: run {Path(__file__).with_name('setup')} first") from None
library.null_gpu_peak.restype = ctypes.c_size_t
library.null_gpu_take.restype = ctypes.c_char_p

import torch                                                            # noqa: E402
import torch.distributed as dist                                        # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode                # noqa: E402

called = collections.Counter()      # operators that are replaced here instead of in the library


def take_counts():
    """(Counter of launches, copies, waits; [(collective, bytes)]) since the last call."""
    counts = called.copy()
    called.clear()
    collectives = []
    for line in library.null_gpu_take().decode().splitlines():
        number, what = line.split("\t")
        if what.startswith("collective "):
            collectives.append([what.removeprefix("collective "), int(number)])
        else:
            counts[what] += int(number)
    return counts, collectives


# ----------------------------------------------------------------------- cuDNN's attention

def describe(value):
    """(shape, strides, dtype) of a tensor; another value itself."""
    if torch.is_tensor(value):
        return value.size(), value.stride(), value.dtype
    return value


def fake_results(op, args, kwargs):
    """`describe` of each result of `op`, which runs on fake tensors: that takes a millisecond."""
    with torch.utils._python_dispatch._disable_current_modes(), FakeTensorMode() as mode:
        def fake(value):
            if torch.is_tensor(value):
                return mode.from_tensor(value)
            return value

        fake_args = [fake(value) for value in args]
        fake_kwargs = {name: fake(value) for name, value in kwargs.items()}
        results = op(*fake_args, **fake_kwargs)
    return [describe(value) for value in results]


def without_cudnn(op):
    """cuDNN's attention `op` as one that allocates the same. cuDNN itself bypasses the driver."""
    known = {}                      # {descriptions of arguments: those of the results}
    is_backward = "backward" in op.__name__
    name = "cuDNN attention"
    if is_backward:
        name += " backward"

    def attention(*args, **kwargs):
        key = str([describe(value) for value in (*args, *kwargs.items())])
        if key not in known:
            known[key] = fake_results(op, args, kwargs)
        called[name] += 1

        query = args[0]
        if is_backward:
            query = args[1]
            # The workspace: dq in float32.
            torch.empty(query.shape, dtype=torch.float32, device=query.device)
        results = []
        for value in known[key]:
            if isinstance(value, tuple):
                shape, strides, dtype = value
                value = torch.empty_strided(shape, strides, dtype=dtype, device=query.device)
            results.append(value)
        return tuple(results)
    return attention


with warnings.catch_warnings():
    warnings.simplefilter("ignore")                     # of the implementation that is replaced
    operators = torch.library.Library("aten", "IMPL")
    for name in ("_scaled_dot_product_cudnn_attention",
                 "_scaled_dot_product_cudnn_attention_backward"):
        operator = getattr(torch.ops.aten, name).default
        operators.impl(name, without_cudnn(operator), "CUDA")


# ----------------------------------------------------------------------- collectives

# NCCL transfers nothing between processes (null_gpu.cpp). What the host needs to continue goes by
# gloo among the CPUs: objects, and sums of numbers that the host has just copied to the device.
# With NULL_GPU_RANKS a process alone is rank 0 of so many, which are taken to do what it does.
IS_ALONE = "NULL_GPU_RANKS" in os.environ
side_group = []

if IS_ALONE:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=os.environ["NULL_GPU_RANKS"])
    os.environ.update(MASTER_ADDR="nowhere", MASTER_PORT="0")       # nobody calls there
    os.environ["TORCHELASTIC_RUN_ID"] = "of one process"


class StoreOfOne(dist.HashStore):
    """A store that has whatever another rank would have written."""

    def check(self, keys):
        return True


def rendezvous(*args, **kwargs):
    yield StoreOfOne(), 0, int(os.environ["WORLD_SIZE"])


def by_gloo():
    if not side_group:
        side_group.append(dist.new_group(backend="gloo"))
    return side_group[0]


def all_gather_object(values, value, gather=dist.all_gather_object):
    if IS_ALONE:
        values[:] = [value] * len(values)
    else:
        gather(values, value, by_gloo())


def host_knows(tensor):
    """Whether the host has just copied this tensor to the device."""
    address = ctypes.c_void_p(tensor.data_ptr())
    return tensor.is_cuda and library.null_gpu_knows(address, ctypes.c_size_t(tensor.nbytes))


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False, nccl=dist.all_reduce):
    is_known = host_knows(tensor)
    work = nccl(tensor, op, group, async_op)            # is counted, and does not change the number
    if is_known and group is None:
        # The device's memory is the host's here.
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        on_host = torch.frombuffer(memory, dtype=tensor.dtype)
        if IS_ALONE:
            on_host *= dist.get_world_size()
        else:
            nccl(on_host, op, by_gloo())
    return work


dist.all_reduce = all_reduce
dist.all_gather_object = all_gather_object
if IS_ALONE:
    dist.rendezvous = rendezvous
