"""runtime/device.py: which device is chosen, what is refused, and what counts as out of memory."""
import numpy as np
import pytest
import torch

from runtime.cli import UserError
from runtime.device import choose_device, is_out_of_memory


@pytest.fixture
def torch_with_gpus(monkeypatch):
    """torch_with_gpus(n, error): from now on torch finds n GPUs, whose kernels raise the error."""
    def patch(n, error=None):
        make_ones = torch.ones

        def ones(size, device):
            if error is not None:
                raise error
            return make_ones(size)

        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return patch


def test_without_a_gpu_auto_is_the_cpu(torch_with_gpus):
    torch_with_gpus(0)
    assert choose_device("auto") == "cpu"
    assert choose_device("auto", 1) == "cpu"


@pytest.mark.parametrize("name, rank, device", [
    ("auto", 0, "cuda:0"),
    ("auto", 1, "cuda:1"),
    ("cuda", 1, "cuda:1"),
    ("cuda:0", 1, "cuda:0"),
    ("cpu", 1, "cpu"),
])
def test_each_rank_has_its_own_gpu_unless_one_is_named(name, rank, device, torch_with_gpus):
    torch_with_gpus(2)
    assert choose_device(name, rank) == device


def test_a_rank_without_a_gpu_of_its_own_is_refused(torch_with_gpus):
    torch_with_gpus(2)
    with pytest.raises(UserError, match="--device cuda:2"):
        choose_device("cuda", 2)


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "cuda:2", "cuda:x", "mps:0:0"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name, torch_with_gpus):
    torch_with_gpus(2)
    with pytest.raises(UserError, match=f"--device {name}.*cuda:0.*cuda:1.*cpu"):
        choose_device(name)


@pytest.mark.parametrize("message, said", [
    ("CUDA error: no kernel image is available\nCUDA kernel errors", "no kernel image"),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "busy"),
])
def test_a_gpu_that_runs_no_kernel_of_this_torch_is_refused(message, said, torch_with_gpus):
    torch_with_gpus(1, RuntimeError(message))
    with pytest.raises(UserError, match=said) as raised:
        choose_device("auto")
    assert "Some GPU" in str(raised.value)
    assert "--device cpu" in str(raised.value)
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: out of memory"),
    torch.OutOfMemoryError("CUDA"),
])
def test_a_gpu_whose_memory_is_full_is_a_device_all_the_same(error, torch_with_gpus):
    torch_with_gpus(1, error)
    assert choose_device("auto") == "cuda:0"


# ----------------------------------------------------------------------- out of memory

@pytest.mark.parametrize("message", [
    "CUDA error: out of memory\nCUDA kernel errors might ...",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when",
    "MPS backend out of memory (MPS allocated: 8 GB, other allocations: ...",
    "NCCL error in: a.cpp:77, unhandled cuda error\nCuda failure 2 'out of memory'",
])
def test_what_each_library_says_when_memory_runs_out_is_recognised(message):
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access"),
    RuntimeError("out of resource: shared memory"),
    UserError("CUDA is out of memory"),
    OSError(12, "Cannot allocate memory"),
    ValueError("x"),
])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_a_tensor_and_an_array_that_are_too_large_are_recognised():
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**50, dtype=np.uint8)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)


@pytest.mark.parametrize("cause, expected", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (MemoryError("x"), True),
    (ValueError("x"), False),
])
def test_it_is_recognised_inside_an_error_of_the_compiler(cause, expected):
    def backend(graph, inputs):
        raise cause

    compiled = torch.compile(torch.sin, backend=backend)
    with pytest.raises(Exception) as raised:        # noqa: B017, torch has several classes for it
        compiled(torch.zeros(3))
    assert is_out_of_memory(raised.value) == expected
