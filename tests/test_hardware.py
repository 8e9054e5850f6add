"""runtime/hardware.py: device and dtype, memory that runs out, how fast devices are."""
import math
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import BYTES, forked, train
from torch.nn.modules.module import register_module_forward_pre_hook

from model import GPT
from runtime import hardware
from runtime.cli import UserError
from runtime.hardware import (
    choose_compile,
    choose_device,
    choose_dtype,
    compiling_pays,
    device_name,
    is_out_of_memory,
    memory_errors,
    peak_flops,
    peak_memory,
    tune_malloc,
)
from runtime.ranks import Process

# ----------------------------------------------------------------------- which device


@pytest.fixture
def torch_with_gpus(monkeypatch):
    """torch_with_gpus(n, error): from now on torch finds n GPUs, whose kernels raise the error.

    With `mps` it finds the GPU of a Mac, too.
    """
    def patch(n, error=None, mps=False):
        make_ones = torch.ones

        def ones(size, device):
            if error is not None:
                raise error
            return make_ones(size)

        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return patch


def test_without_a_gpu_auto_is_the_cpu(torch_with_gpus):
    torch_with_gpus(0)
    assert choose_device("auto") == "cpu"
    assert choose_device("auto", 1) == "cpu"


@pytest.mark.parametrize("name, gpus, expected", [
    ("auto", 0, "mps"),
    ("mps", 0, "mps"),
    ("cpu", 0, "cpu"),
    ("auto", 1, "cuda:0"),
])
def test_auto_is_the_gpu_of_a_mac_where_there_is_no_other(name, gpus, expected, torch_with_gpus):
    torch_with_gpus(gpus, mps=True)
    assert choose_device(name) == expected


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
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
])
def test_what_each_library_says_when_memory_runs_out_is_recognised(message):
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access"),
    # a kernel that does not fit into a core
    RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_per_fused_0 "
                 "Required: 180224 Hardware limit: 101376"),
    UserError("CUDA is out of memory"),
    OSError(12, "Cannot allocate memory"),
    ValueError("x"),
])
def test_other_errors_are_not_taken_for_lack_of_memory(error):
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
def test_lack_of_memory_is_recognised_inside_a_compilers_error(cause, expected):
    def backend(graph, inputs):
        raise cause

    compiled = torch.compile(torch.sin, backend=backend)
    with pytest.raises(Exception) as raised:        # noqa: B017, torch has several classes for it
        compiled(torch.zeros(3))
    assert is_out_of_memory(raised.value) == expected


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_run_that_is_out_of_memory_is_told_what_takes_less(error):
    with pytest.raises(UserError, match="cuda:1.*--batch_size") as raised:
        with memory_errors("cuda:1"):
            raise error
    for flag in ("--recompute", "--shard_optimizer"):
        assert flag in str(raised.value)


def test_another_error_is_not_told_as_one_of_memory():
    with pytest.raises(KeyError):
        with memory_errors("cpu"):
            raise KeyError("a bug")


def test_memory_that_runs_out_in_a_step_ends_the_run_in_one_line(byte_data, tmp_path):
    def out_of_memory(module, inputs):
        if isinstance(module, GPT):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = register_module_forward_pre_hook(out_of_memory)
    try:
        with pytest.raises(UserError, match="out of memory.*--batch_size"):
            train("--data", byte_data, *BYTES, "--val_every", 0, "--out", tmp_path)
    finally:
        hook.remove()


# ----------------------------------------------------------------------- CUDA's allocator

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("users_own", [None, *ALLOCATOR])
def test_with_the_device_cudas_allocator_is_told_to_split_no_large_block_unless_the_user_has_said(
        users_own, monkeypatch):
    environment = dict(os.environ)
    for name in ALLOCATOR:
        environment.pop(name, None)
    if users_own:
        environment[users_own] = "expandable_segments:True"
    monkeypatch.setattr(os, "environ", environment)
    choose_device("cpu")
    expected = {users_own: "expandable_segments:True"}
    if users_own is None:
        expected = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:2048"}
    assert {name: environment[name] for name in ALLOCATOR if name in environment} == expected


# ----------------------------------------------------------------------- dtype, name, memory

@pytest.mark.parametrize("device, has_bfloat16, emulates_it, expected", [
    ("cuda:0", True, True, "bfloat16"),
    ("cuda:1", False, True, "float16"),         # a T4, many times slower in bfloat16
    ("mps", True, True, "float32"),             # a Mac's GPU, whatever its CPU has
])
def test_auto_is_bfloat16_where_a_gpu_has_it(
    device, has_bfloat16, emulates_it, expected, monkeypatch
):
    def is_bf16_supported(including_emulation=True):
        return has_bfloat16 or (including_emulation and emulates_it)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert choose_dtype("auto", device, before="float32") == expected


@pytest.fixture
def cpu(monkeypatch):
    """cpu(vendor, *features) has choose_dtype see such a CPU."""
    def set_cpu(vendor, *features):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
        monkeypatch.setattr(hardware, "is_amd", lambda: vendor == "AMD")
    return set_cpu


@pytest.mark.parametrize("kind, new_run, after_bfloat16", [
    (("AMD", "avx512_bf16"), "bfloat16", "bfloat16"),
    (("Intel", "avx512_bf16", "amx_bf16"), "bfloat16", "bfloat16"),
    (("Intel", "avx512_bf16"), "float32", "bfloat16"),      # half as fast in bfloat16
    (("ARM", "bf16"), "float32", "float32"),
    (("AMD",), "float32", "float32"),
])
def test_a_cpu_computes_in_what_is_faster_but_keeps_the_dtype_of_a_run(
        kind, new_run, after_bfloat16, cpu):
    cpu(*kind)
    assert choose_dtype("auto", "cpu") == new_run
    assert choose_dtype("auto", "cpu", before="bfloat16") == after_bfloat16
    assert choose_dtype("auto", "cpu", before="float32") == "float32"
    assert choose_dtype("auto", "cpu", before="float16") == new_run
    assert choose_dtype("bfloat16", "cpu", before="float32") == "bfloat16"


@pytest.mark.parametrize("cpuinfo, processor, expected", [
    ("vendor_id\t: AuthenticAMD\n", "", True),
    ("vendor_id\t: GenuineIntel\n", "AMD64 Family 25, AuthenticAMD", False),
    (None, "AMD64 Family 25 Model 17, AuthenticAMD", True),          # Windows
    (None, "Intel64 Family 6, GenuineIntel", False),
])
def test_the_maker_of_a_cpu_is_told_by_the_system(cpuinfo, processor, expected, monkeypatch):
    def read_text(path):
        assert path == Path("/proc/cpuinfo")
        if cpuinfo is None:
            raise FileNotFoundError
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", lambda: processor)
    hardware.is_amd.cache_clear()
    assert hardware.is_amd() is expected
    hardware.is_amd.cache_clear()


@pytest.mark.parametrize("cpuinfo, name", [
    ("vendor_id\t: X\nmodel\t\t: 1\nmodel name\t: Some CPU @ 2 GHz\nstepping\t: 3\n",
     "Some CPU @ 2 GHz"),
    ("processor\t: 0\nBogoMIPS\t: 50\n", platform.machine()),       # Linux on ARM
])
def test_a_cpu_is_named_by_its_model_where_linux_tells_it(cpuinfo, name, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    assert device_name("cpu") == name


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell it")
@pytest.mark.parametrize("system, unit", [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_is_in_bytes_on_each_system(system, unit, monkeypatch):
    import resource

    def getrusage(who):
        assert who == resource.RUSAGE_SELF
        return SimpleNamespace(ru_maxrss=777)

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", getrusage)
    assert peak_memory("cpu") == 777 * unit


def print_resident_memory_beside_an_array():
    """Prints the MB that are in memory before an array of 128 MB is made, and after it is freed."""
    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20

    tune_malloc()
    print(resident())
    np.ones(128 * 2**20, np.uint8)      # a tensor would leave small blocks behind it
    print(resident())


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_process_on_a_cpu_keeps_the_memory_that_it_frees():
    [(code, stdout, stderr)] = forked(print_resident_memory_beside_an_array)
    assert code == 0, stderr
    before, after = stdout.split()
    assert int(after) - int(before) > 110


@pytest.mark.parametrize("name, expected", [("cpu", ["tuned"]), ("cuda", []), ("mps", [])])
def test_only_a_run_on_a_cpu_tunes_malloc(name, expected, monkeypatch, torch_with_gpus):
    tuned = []
    torch_with_gpus(1, mps=True)
    monkeypatch.setattr(hardware, "tune_malloc", lambda: tuned.append("tuned"))
    choose_device(name)

    assert tuned == expected


# ----------------------------------------------------------------------- a container's quota

@pytest.mark.parametrize("files, cores", [
    ({"cpu.max": "50000 100000\n"}, 0.5),
    ({"cpu.max": "max 100000\n"}, math.inf),
    ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ({}, math.inf),
])
def test_the_cores_of_a_container_are_read_from_its_cgroup(files, cores, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware.cpu_quota(tmp_path) == cores


@pytest.mark.parametrize("quota, own_choice, threads", [
    (0.5, None, [1]), (2.7, None, [2]), (8.0, None, []), (math.inf, None, []), (0.5, "4", [])])
def test_torch_has_no_more_threads_than_a_container_has_cores(
        quota, own_choice, threads, monkeypatch):
    chosen = []
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own_choice:
        monkeypatch.setenv("OMP_NUM_THREADS", own_choice)

    hardware.choose_device("cpu")

    assert chosen == threads


# ----------------------------------------------------------------------- how fast devices are

# How the driver writes the names, in all ways that PEAK_TFLOPS tells apart.
PEAKS = {
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "Tesla T4": 65,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
}


@pytest.fixture
def gpu_name(monkeypatch):
    """gpu_name(text): from now on GPU 0 has this name."""
    def rename(name):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        peak_flops.cache_clear()
    yield rename
    peak_flops.cache_clear()


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet(name, gpu_name):
    gpu_name(name)
    assert peak_flops("cuda:0") == PEAKS[name] * 1e12


@pytest.mark.parametrize("name", [
    "Some GPU 9000",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",
])
def test_a_gpu_that_is_not_exactly_known_has_no_peak(name, gpu_name):
    gpu_name(name)
    assert peak_flops("cuda:0") is None


def test_a_cpu_has_no_peak():
    assert peak_flops("cpu") is None


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("Some GPU", 100e12),               # USUAL_PEAK
])
def test_compiling_pays_for_runs_of_more_than_five_seconds_at_the_peak(name, peak, gpu_name):
    gpu_name(name)
    assert not compiling_pays(4.9 * peak, "cuda:0")
    assert compiling_pays(5.1 * peak, "cuda:0")


def compile_chosen(compile, process, seconds):
    """What --compile becomes in a run of so many seconds at the peak of an A100, on each rank."""
    config = SimpleNamespace(compile=compile, sequence_length=1024)
    model = SimpleNamespace(flops_per_token=lambda T: T * 10**6)
    tokens_left = int(seconds * 312e12 * process.world_size / (1024 * 10**6))
    return choose_compile(config, model, tokens_left, process)


class TwoRanks(Process):
    def __init__(self, device):
        super().__init__(world_size=2, device=device)

    def gather(self, value):
        return [value, value]


@pytest.mark.parametrize("seconds, expected", [(4.5, False), (5.5, True)])
@pytest.mark.parametrize("make_process", [Process, TwoRanks])
def test_on_a_gpu_a_long_run_is_compiled_and_a_short_one_says_why_not(
    seconds, expected, make_process, gpu_name, capsys
):
    gpu_name("NVIDIA A100-SXM4-80GB")
    process = make_process(device="cuda:0")

    assert compile_chosen("auto", process, seconds) is expected
    assert ("too short" in capsys.readouterr().out) == (not expected)


def test_on_a_cpu_no_run_is_compiled_and_none_says_so(capsys):
    assert compile_chosen("auto", Process(device="cpu"), 1e9) is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("compile", [True, False])
def test_what_the_user_says_about_compiling_counts(compile, gpu_name):
    gpu_name("NVIDIA A100-SXM4-80GB")
    assert compile_chosen(compile, Process(device="cuda:0"), 0.1) is compile
    assert compile_chosen(compile, Process(device="cuda:0"), 1e9) is compile
