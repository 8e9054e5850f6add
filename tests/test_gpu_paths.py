"""Small decisions about GPUs and CPUs that no machine here shows by itself."""
import os

import pytest
import torch

from runtime.dataloader import to_device
from runtime.hardware import configure_allocator, is_out_of_memory


# ----------------------------------------------------------------------- memory

@pytest.mark.parametrize("message", [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
])
def test_libraries_that_find_no_memory_when_they_start_are_recognised(message):
    assert is_out_of_memory(RuntimeError(message))


def test_a_kernel_that_does_not_fit_into_a_core_is_no_lack_of_memory():
    message = ("No valid triton configs. OutOfMemoryError: out of resource: triton_per_fused_0 "
               "Required: 180224 Hardware limit: 101376 Reducing block sizes may help.")
    assert not is_out_of_memory(RuntimeError(message))


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def test_the_allocator_is_told_to_split_no_large_block(monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    # Set once, so that monkeypatch removes it again.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    del os.environ["PYTORCH_ALLOC_CONF"]

    configure_allocator()

    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:2048"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_users_own_settings_of_the_allocator_stay(name, monkeypatch):
    for other in ALLOCATOR:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "expandable_segments:True")

    configure_allocator()

    assert [other for other in ALLOCATOR if other in os.environ] == [name]
    assert os.environ[name] == "expandable_segments:True"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_only_pinned_memory_is_copied_while_the_program_goes_on(is_pinned, monkeypatch):
    how = []
    copy = torch.Tensor.to

    def remember(rows, device, non_blocking=False):
        how.append(non_blocking)
        return copy(rows, device)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda rows: is_pinned)
    monkeypatch.setattr(torch.Tensor, "to", remember)
    to_device(torch.zeros(2, 5, dtype=torch.int32), "cpu")
    assert how == [is_pinned]
