"""runtime/hardware.py: device and dtype, what fits into its memory, how fast devices are."""
import math
import os
import platform
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import BYTES, command, forked, on_ranks, train
from torch.nn.modules.module import register_module_forward_pre_hook

import train_gpt2
from config import Config
from model import GPT, GPTConfig
from recipes import RECIPES
from runtime import hardware, micro_batch
from runtime.cli import RunError, UserError
from runtime.hardware import (
    choose_compile,
    choose_device,
    choose_dtype,
    compiling_pays,
    cpu_has_bfloat16,
    device_name,
    is_out_of_memory,
    memory_errors,
    peak_flops,
    peak_memory,
    tune_malloc,
)
from runtime.micro_batch import choose_micro_batch, fits_in_memory, time_micro_step
from runtime.ranks import Process
from runtime.recipe import BatchSchedule

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

def test_with_the_device_cudas_allocator_is_configured(monkeypatch):
    """How: test_gpu_paths.py."""
    calls = []
    monkeypatch.setattr(hardware, "configure_allocator", lambda: calls.append("configured"))
    choose_device("cpu")
    assert calls == ["configured"]


# ----------------------------------------------------------------------- dtype, name, memory

@pytest.mark.parametrize("device, has_bfloat16, emulates_it, expected", [
    ("cuda:0", True, True, "bfloat16"),
    ("cuda:1", False, True, "float16"),         # a T4, many times slower in bfloat16
    ("cpu", True, False, "bfloat16"),
    ("cpu", False, True, "float32"),
    ("mps", True, True, "float32"),             # a Mac's GPU, whatever its CPU has
    ("cpu of ARM", True, False, "float32"),
])
def test_auto_is_bfloat16_where_the_hardware_has_it(
    device, has_bfloat16, emulates_it, expected, monkeypatch
):
    def is_bf16_supported(including_emulation=True):
        return has_bfloat16 or (including_emulation and emulates_it)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr("runtime.hardware.cpu_has_bfloat16", lambda: has_bfloat16)

    machine = "aarch64" if device == "cpu of ARM" else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert choose_dtype("auto", device.removesuffix(" of ARM")) == expected


@pytest.mark.parametrize("features, expected", [
    ({"avx512_bf16": True, "amx_bf16": False}, True),
    ({"avx512_bf16": False, "amx_bf16": True}, True),
    ({"bf16": True}, True),                         # ARM's
    ({"avx512_bf16": False, "amx_bf16": False}, False),
    ({}, False),
])
def test_a_cpu_has_bfloat16_by_one_of_its_instructions(features, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert cpu_has_bfloat16() is expected


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
    """Prints the MB that are in memory before an array of 384 MB is made, and after it is freed."""
    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20

    tune_malloc()
    print(resident())
    np.ones(384 * 2**20, np.uint8)      # a tensor would leave small blocks behind it
    print(resident())


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_process_on_a_cpu_keeps_the_memory_that_it_frees():
    [(code, stdout, stderr)] = forked(print_resident_memory_beside_an_array)
    assert code == 0, stderr
    before, after = stdout.split()
    assert int(after) - int(before) > 350


@pytest.mark.parametrize("name, expected", [("cpu", ["tuned"]), ("cuda", []), ("mps", [])])
def test_only_a_run_on_a_cpu_tunes_malloc(name, expected, monkeypatch, torch_with_gpus):
    tuned = []
    torch_with_gpus(1, mps=True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(hardware, "tune_malloc", lambda: tuned.append("tuned"))
    train_gpt2.start_process(name)

    assert tuned == expected


# ----------------------------------------------------------------------- the micro-batch of a GPU

@dataclass
class Counted:
    """What training takes."""
    weights: int                # bytes
    token: int                  # bytes of a token of a micro-step
    others: int                 # bytes of the gradients, moments and copies


# Counted on 2026-11-26 by the allocator of torch 2.13.0 on the simulated GPU (tests/null_gpu), for
# compiled models of 12 layers of width 768 in bfloat16.
COUNTED = {
    "gpt2": Counted(4 * 124_475_904, 325_500, 1_902_000_000),
    "gpt2 --recompute": Counted(4 * 124_475_904, 120_800, 1_712_000_000),
    "speedrun": Counted(4 * 162_201_636, 471_600, 2_371_000_000),
}
CARDS = {
    "H100 80GB": 85_017_493_504,
    "A100 40GB": 42_405_855_232,
    "RTX 4090": 25_386_352_640,
    "T4": 15_642_329_088,
}
CUDA_CONTEXT = 600_000_000      # bytes


class Card:
    """A GPU on which what was counted fits. `tried` are the micro-batches of its trials."""

    def __init__(self, what, memory, monkeypatch):
        self.counted = COUNTED[what]
        self.free = memory - CUDA_CONTEXT - self.counted.weights
        recipe = what.split()[0]
        self.kept_vectors = RECIPES[recipe].model.kept_vectors
        self.config = Config(
            recipe=recipe,
            recompute="--recompute" in what,
            dtype="bfloat16",
            compile=True,
            sequence_length=1024,
        )
        self.tried = []
        self.reserved = None
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (self.free, None))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(micro_batch, "time_micro_step", self.time_micro_step)

    def time_micro_step(self, state, T, device, B, reserved):
        self.tried.append(B)
        self.reserved = reserved
        spare = reserved - 2 * self.counted.weights             # beside the moments
        needed = B * T * self.counted.token + self.counted.others
        if needed + spare > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    def choose(self, most=64, batch=512, divisors=(1, 1, 1), has_moments=False, may_shrink=True):
        """The micro-batch, of `batch` sequences a step of which at most `most` are at once."""
        self.config.batch_size = most
        weights = torch.empty(self.counted.weights // 4, device="meta")
        moments = 0 if has_moments else 2 * self.counted.weights
        state = SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: [weights], kept_vectors=self.kept_vectors),
            optimizer=SimpleNamespace(bytes_to_allocate=lambda: moments),
        )
        schedule = BatchSchedule(1024 * batch, 100, divisors)
        return choose_micro_batch(
            self.config, may_shrink, schedule, state, Process(device="cuda:0"))


@pytest.mark.parametrize("name, what, expected", [
    ("H100 80GB", "gpt2", 64),
    ("A100 40GB", "gpt2", 64),
    ("RTX 4090", "gpt2", 32),
    ("H100 80GB", "speedrun", 64),
    ("A100 40GB", "speedrun", 64),
    ("RTX 4090", "speedrun", 32),
    ("T4", "gpt2 --recompute", 64),
])
def test_the_first_micro_batch_that_a_gpu_tries_is_the_largest_that_fits(
    name, what, expected, monkeypatch
):
    """Each trial compiles for a minute."""
    card = Card(what, CARDS[name], monkeypatch)
    assert card.choose(most=64, batch=512) == expected
    assert card.tried == [expected]


@pytest.mark.parametrize("gigabytes", range(6, 200, 20))
@pytest.mark.parametrize("what", COUNTED)
def test_the_first_guess_is_never_too_small_and_at_most_half_too_large(
    what, gigabytes, monkeypatch
):
    """A guess that is too small is never corrected, and one that is too large costs a trial."""
    card = Card(what, gigabytes * 10**9, monkeypatch)
    free = 0.95 * card.free                     # 5% stay free
    most = int(free - card.counted.others) // (1024 * card.counted.token)
    n = 720_720                                 # which all numbers up to 16 divide
    largest = max(B for B in range(1, most + 1) if n % B == 0)

    chosen = card.choose(most=n, batch=n)

    first = card.tried[0]
    assert largest <= first <= 1.5 * largest
    assert chosen <= largest


def test_a_gpu_that_is_too_small_tries_a_single_sequence(monkeypatch):
    card = Card("gpt2", 3 * 10**9, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        card.choose()
    assert card.tried == [1]


def test_an_eager_run_on_a_gpu_does_not_try_a_given_batch_size(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.config.compile = False

    assert card.choose(most=64, may_shrink=False) == 64
    assert card.tried == []


@pytest.mark.parametrize("dtype, first", [("float32", 64), ("float16", 128)])
def test_in_float32_a_sequence_takes_twice_as_much(dtype, first, monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.config.dtype = dtype
    card.choose(most=512, batch=2**14)

    assert card.tried[0] == first


def test_a_micro_batch_that_does_not_fit_is_halved(monkeypatch):
    """The guess is for 4 layers. The card has those that were counted, 12: 76 sequences fit."""
    card = Card("gpt2", 30 * 10**9, monkeypatch)
    card.config.n_layer = 4

    assert card.choose(most=720, batch=720) == 60
    assert card.tried == [120, 60]


def test_a_given_batch_size_is_not_halved(monkeypatch):
    card = Card("gpt2", CARDS["T4"], monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        card.choose(most=64, may_shrink=False)


def test_a_micro_batch_divides_the_step(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    assert card.choose(most=48, batch=512) == 32        # 48 does not divide 512
    assert card.tried == [32]


def test_a_recipe_that_trains_gpt_2_takes_the_memory_of_gpt_2(monkeypatch):
    """As the one of CONTRIBUTING.md does, of which nothing here knows the name."""
    chosen = []
    for recipe in ("gpt2", "wsd"):
        card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
        card.config.recipe = recipe
        chosen.append(card.choose(most=720, batch=720))
        assert card.tried == [chosen[-1]]
    assert chosen[0] == chosen[1] > 64


def test_all_steps_have_the_micro_batch_of_the_first_which_is_the_smallest(monkeypatch):
    """Those of later steps have more sequences. Another shape would compile again."""
    card = Card("gpt2 --recompute", CARDS["H100 80GB"], monkeypatch)
    assert card.choose(most=64, batch=192, divisors=(4, 2, 1)) == 48


def test_a_trial_leaves_room_for_the_moments_which_a_resumed_run_has_already(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.choose(most=32, may_shrink=False)
    assert card.reserved == 2 * card.counted.weights
    card.choose(most=32, may_shrink=False, has_moments=True)
    assert card.reserved == 0


def test_auto_leaves_a_twentieth_of_the_memory_free(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.choose(has_moments=True)
    assert card.reserved == card.free // 20


# ----------------------------------------------------------------------- the micro-batch of a CPU

@pytest.fixture
def chosen_on_cpu(monkeypatch):
    """chosen_on_cpu(limit, process, ...) -> (B, the trials)."""
    def choose(limit, process, compile=False, sequences=24):
        tried = []
        monkeypatch.setattr(
            micro_batch, "time_micro_step", lambda state, T, device, B, reserved: tried.append(B))
        monkeypatch.setattr(micro_batch, "settle_buckets", lambda *arguments: None)
        config = Config(batch_size=limit, sequence_length=8, compile=compile)
        schedule = BatchSchedule(sequences * 8, 10)
        return choose_micro_batch(config, True, schedule, None, process), tried
    return choose


@pytest.mark.parametrize("limit, B", [(1, 1), (7, 6), (8, 8), (24, 24), (100, 24)])
def test_a_cpu_takes_the_largest_divisor_without_a_trial(limit, B, chosen_on_cpu):
    assert chosen_on_cpu(limit, Process()) == (B, [])


def test_a_cpu_tries_a_compiled_model(chosen_on_cpu):
    assert chosen_on_cpu(8, Process(), compile=True) == (8, [8])


@pytest.mark.parametrize("sequences, limit, is_told", [
    (23, 8, True), (24, 5, False), (3, 1, False), (2, 8, False)])
def test_a_step_that_can_only_be_cut_small_is_told(
        sequences, limit, is_told, chosen_on_cpu, capsys):
    chosen_on_cpu(limit, Process(), sequences=sequences)
    assert ("--total_batch_size" in capsys.readouterr().out) == is_told


def test_the_smallest_limit_of_the_ranks_counts_for_all(chosen_on_cpu):
    """Otherwise they would read some sequences twice and others never."""
    class OneOfTwo(Process):
        def gather(self, value):
            return [value, 3]

    assert chosen_on_cpu(12, OneOfTwo(world_size=2)) == (3, [])


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


# ----------------------------------------------------------------------- a trial

@pytest.fixture
def state():
    """What a trial needs of a TrainState, with a tiny model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=1, n_embd=8))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=False)
    return SimpleNamespace(model=model, ddp_model=model, autocast=autocast)


def test_a_trial_tells_the_time_of_its_second_micro_step(state, monkeypatch):
    """The first one may compile."""
    clock = SimpleNamespace(now=0.0, shapes=[])

    def compute(module, inputs):
        clock.now += 2.5 if clock.shapes else 100.0
        clock.shapes.append(inputs[0].shape)

    monkeypatch.setattr(micro_batch.time, "perf_counter", lambda: clock.now)
    state.model.register_forward_pre_hook(compute)

    assert time_micro_step(state, T=8, device="cpu", B=3) == 2.5
    assert clock.shapes == [(3, 8), (3, 8)]


def test_a_trial_leaves_no_gradients_and_the_weights_as_they_were(state):
    before = [p.clone() for p in state.model.parameters()]
    time_micro_step(state, T=8, device="cpu", B=3)
    for p, old in zip(state.model.parameters(), before, strict=True):
        assert p.grad is None
        assert torch.equal(p, old)


def test_a_trial_that_fails_leaves_no_gradients(state):
    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    state.model.transformer.wte.weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        time_micro_step(state, T=8, device="cpu", B=3)
    assert all(p.grad is None for p in state.model.parameters())


def test_the_reserved_memory_is_in_use_during_a_trial(state, monkeypatch):
    make_empty = torch.empty
    blocks = []
    bytes_in_use = []

    def empty(*size, **options):
        block = make_empty(*size, **options)
        blocks.append(weakref.ref(block))
        return block

    def look(module, inputs):
        there = [block() for block in blocks if block() is not None]
        bytes_in_use.append(sum(block.nbytes for block in there))

    monkeypatch.setattr(torch, "empty", empty)
    state.model.register_forward_pre_hook(look)
    time_micro_step(state, T=8, device="cpu", B=3, reserved=1000)

    assert bytes_in_use == [1000, 1000]


def out_of_memory_on_rank_1():
    """From now on a forward of more than two sequences fails on the second of two ranks.

    torch.compile compiles nothing: with --compile there is a trial.
    """
    torch.compile = lambda model, dynamic: model

    def check_memory(module, inputs):
        if isinstance(module, GPT) and len(inputs[0]) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    register_module_forward_pre_hook(check_memory)


def test_a_rank_whose_trial_is_out_of_memory_halves_for_all_and_lets_none_wait(byte_data, tmp_path):
    call = command(
        "train_gpt2.py", "--data", byte_data, *BYTES, "--device", "cpu", "--batch_size", "auto",
        "--compile", "--max_steps", 1, "--val_every", 0, "--checkpoint_every", 0,
        "--out", tmp_path)

    of_rank_0, of_rank_1 = on_ranks(call, call, before=[out_of_memory_on_rank_1])

    assert of_rank_0[0] == of_rank_1[0] == 0, of_rank_0
    assert "= 2 x 32 x 2 micro-steps x 2 processes" in of_rank_0[1]
    assert of_rank_1[1] == ""


# ----------------------------------------------------------------------- a trial that fails

def trial_that_raises(error):
    def trial(B):
        raise error
    return trial


def test_a_trial_out_of_memory_asks_for_a_smaller_one_and_is_raised_where_none_is_left():
    trial = trial_that_raises(torch.OutOfMemoryError("CUDA out of memory"))

    assert fits_in_memory(trial, 2, may_shrink=True, compiled=True) is False
    for B, may_shrink in ((1, True), (2, False)):
        with pytest.raises(torch.OutOfMemoryError):
            fits_in_memory(trial, B, may_shrink, compiled=True)


@pytest.mark.parametrize("cause, remedy", [
    ("no C compiler found", "--no_compile"),
    ("a.so: failed to map segment from shared object", "TORCHINDUCTOR_CACHE_DIR"),
])
def test_a_trial_that_cannot_compile_is_told_with_its_remedy(cause, remedy):
    trial = trial_that_raises(OSError(cause))
    with pytest.raises(RunError, match=f"{cause}.*{remedy}"):
        fits_in_memory(trial, 2, may_shrink=True, compiled=True)


def test_a_bug_in_an_eager_trial_is_raised_as_it_is():
    with pytest.raises(ValueError, match="a bug"):
        fits_in_memory(trial_that_raises(ValueError("a bug")), 2, may_shrink=True, compiled=False)


# ----------------------------------------------------------------------- how fast devices are

# How the driver writes the names, in all ways that PEAK_TFLOPS tells apart.
PEAKS = {
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A10G": 70,
    "Tesla T4": 65,
    "Tesla V100-SXM2-16GB": 125,
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
    "NVIDIA RTX 6000 Ada Generation Laptop GPU",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H20-3e",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA B200 NVL",
    "NVIDIA L4 2",
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
