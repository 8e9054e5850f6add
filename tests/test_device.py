"""runtime/device.py: what is chosen for a device, and what is asked of it (its refusals: test_model.py)."""
import functools
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import train_gpt2
from helpers import BYTES, command, forked, logged, on_ranks, train
from runtime import device
from runtime.checkpoint import Start
from runtime.device import choose_dtype, device_name, peak_memory
from runtime.recipe import BatchSchedule

QUIET = ["--val_every", 0, "--checkpoint_every", 0]


# ----------------------------------------------------------------------------- the size of a micro-batch

CARDS = {"H100 80GB": 85_017_493_504, "A100 40GB": 42_405_855_232, "RTX 4090": 25_386_352_640,
         "T4": 15_642_329_088}
CONTEXT = 600_000_000
# bytes of the weights, of a micro-step's token, and others, gradients and moments included, as counted on the
# stand-in for 12 layers of width 768
COUNTED = {"gpt2": (4 * 124_475_904, 325_500, 2_400_000_000),
           "gpt2 recomputed": (4 * 124_475_904, 120_800, 2_210_000_000),
           "speedrun": (4 * 162_201_636, 471_600, 3_020_000_000)}


@pytest.fixture
def trials(monkeypatch):
    """trials(what, memory) -> the micro-batches that choose_batch_size tries on a card with so much memory,
    where what was counted fits, and the one that it chooses."""
    def trials(what, memory, batch=524_288, divisors=(1, 1, 1), most=64, **more):
        size, a_token, others = COUNTED[what]
        free, tried = memory - CONTEXT - size, []

        def micro_step(state, T, device, reserved, B):
            tried.append(B)
            spare = reserved - 2 * size         # beside the moments
            if B * 1024 * a_token + others - size + spare > free:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 1.0
        how = dict(compile=True, sequence_length=1024, dtype="bfloat16") | more
        asked = train_gpt2.Config(recipe=what.split()[0], recompute="recomputed" in what,
                                  total_batch_size=batch, **how)
        config = replace(asked, batch_size=more.get("batch_size", most))
        weights = [torch.empty(size // 4, device="meta")]
        process = SimpleNamespace(device="cuda:0", world_size=1, gather=lambda value: [value],
                                  on_all_ranks=lambda call, *args: call(*args), on_gpu=True)
        state = SimpleNamespace(ddp_model=None, autocast=None,
                                optimizer=SimpleNamespace(state_bytes=lambda: 2 * size),
                                model=SimpleNamespace(parameters=lambda: iter(weights)))
        schedule = BatchSchedule(batch, 100, divisors)
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt2, "time_micro_step", micro_step)
            patch.setattr(torch.cuda, "mem_get_info", lambda *device: (free, None))
            patch.setattr(torch.cuda, "empty_cache", lambda: None)
            chosen, _ = train_gpt2.choose_micro_batch(asked, config, Start(), schedule, state, process)
            return tried, chosen
    return trials


@pytest.mark.parametrize("card, what, expected", [
    ("H100 80GB", "gpt2", 64), ("A100 40GB", "gpt2", 64), ("RTX 4090", "gpt2", 32),
    ("H100 80GB", "speedrun", 64), ("A100 40GB", "speedrun", 64), ("RTX 4090", "speedrun", 32),
    ("T4", "gpt2 recomputed", 64)])
def test_the_first_micro_batch_that_a_gpu_tries_is_the_largest_that_fits(card, what, expected, trials):
    """Each trial compiles for a minute. Of 512 sequences a step and 64 at once, as by default."""
    assert trials(what, CARDS[card]) == ([expected], expected)


def test_in_float32_a_sequence_takes_twice_as_much(trials):
    for dtype, first in (("float32", 64), ("float16", 128)):
        found = trials("gpt2", CARDS["H100 80GB"], dtype=dtype, batch=2**24, most=512)
        assert found[0][0] == first


@pytest.mark.parametrize("what", COUNTED)
def test_no_card_has_a_larger_micro_batch_than_the_first_that_it_tries(what, trials):
    """Of 720,720 sequences a step, which all numbers up to 14 divide, and many others."""
    _, a_token, others = COUNTED[what]
    for gigabytes in range(6, 200, 5):
        weights = COUNTED[what][0]
        free = 0.95 * (gigabytes * 10**9 - CONTEXT - weights)           # 5% stay free
        room = int(free + weights - others) // (a_token * 1024)
        best = max(B for B in range(1, room + 1) if 720_720 % B == 0)
        tried, chosen = trials(what, gigabytes * 10**9, batch=720_720 * 1024, most=720_720)
        assert chosen <= best <= tried[0] <= 1.5 * best, gigabytes


def test_a_micro_batch_that_does_not_fit_is_halved_and_a_given_one_is_not(trials):
    assert trials("gpt2", 30 * 10**9, n_layer=4, batch=720 * 1024, most=720) == ([120, 60], 60)
    with pytest.raises(torch.OutOfMemoryError):
        trials("gpt2", CARDS["T4"], batch_size=64)
    assert trials("gpt2", CARDS["H100 80GB"], batch_size=48) == ([32], 32)


def test_all_steps_of_a_run_have_the_micro_batch_of_its_first(trials, tmp_path, byte_data, capsys):
    """Those of the later steps have more sequences, and could have a larger one: it would compile again."""
    found = trials("gpt2 recomputed", CARDS["H100 80GB"], batch=192 * 1024, divisors=(4, 2, 1))
    assert found == ([48], 48)
    seen = set()

    def look(module, inputs):
        if type(module).__name__ == "FrontierGPT":
            seen.add(inputs[0].shape)
    hook = register_module_forward_pre_hook(look)
    try:
        train("--data", byte_data, *BYTES, *QUIET, "--recipe", "frontier",
              "--total_batch_size", 768, "--batch_size", 8, "--max_steps", 7, "--out", tmp_path)
    finally:
        hook.remove()
    assert seen == {(6, 32)} and "24 x" not in capsys.readouterr().out


def test_on_a_cpu_a_micro_batch_has_4096_tokens(byte_data, capsys):
    """More are no faster, and take more memory."""
    train("--data", byte_data, *BYTES, "--batch_size", "auto", "--total_batch_size", 32 * 512, "--dry_run")
    assert " = 128 x 32 x 4 micro-steps " in capsys.readouterr().out


# ----------------------------------------------------------------------------- a timed micro-step

def test_the_time_of_a_dry_run_leaves_out_the_first_micro_step_which_may_compile(byte_data, capsys,
                                                                                monkeypatch):
    clock, forwards = [0.0], []

    def count(module, *args):
        if type(module).__name__ == "GPT":
            clock[0] += 2.5 if forwards else 100.0
            forwards.append(module)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    hook = register_module_forward_hook(count)
    try:
        train("--data", byte_data, *BYTES, "--dry_run")
    finally:
        hook.remove()
    # 40 steps of 4 micro-batches
    assert "about 10 s per step, 0:06:40 in all" in capsys.readouterr().out


def test_a_trial_leaves_no_gradients_behind(byte_data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    for name, more in (("plain", []), ("tried", ["--compile"]), ("kernel", ["--attention", "math"])):
        train("--data", byte_data, *BYTES, *QUIET, "--max_steps", 3, "--warmup_steps", 0, "--max_lr", 0.01,
              *more, "--out", tmp_path / name)
    for name in ("tried", "kernel"):
        assert logged(tmp_path / name) == pytest.approx(logged(tmp_path / "plain"), abs=1e-5)


def out_of_memory_on_rank_1():
    """A forward of more than two sequences, on the second of two ranks."""
    def memory(module, inputs):
        if type(module).__name__ == "GPT" and len(inputs[0]) > 2 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    torch.compile = lambda model, **how: model
    register_module_forward_pre_hook(memory)


def test_of_two_ranks_one_that_is_out_of_memory_in_its_trial_leaves_the_other_not_waiting(byte_data,
                                                                                         tmp_path):
    flags = ["--data", byte_data, *BYTES, *QUIET, "--max_steps", 2, "--batch_size", "auto", "--compile",
             "--out", tmp_path]
    (code, out, err), (other, *_) = on_ranks(*[command("train_gpt2.py", *flags)] * 2,
                                             before=[out_of_memory_on_rank_1])
    assert code == other == 0, err
    assert " = 2 x 32 x 2 micro-steps x 2 processes" in out


# ----------------------------------------------------------------------------- dtype, name, memory

@pytest.mark.parametrize("at, native, emulated, avx, amx, expected", [
    ("cuda:0", True, True, False, False, "bfloat16"), ("cuda:1", False, True, True, True, "float16"),
    ("cpu", False, False, True, False, "bfloat16"), ("cpu", False, False, False, True, "bfloat16"),
    ("cpu", True, True, False, False, "float32"), ("mps", True, True, True, True, "float32")],
    ids=["Ampere", "Turing, which emulates bfloat16", "AVX512-BF16", "AMX", "an older CPU", "a Mac"])
def test_auto_is_bfloat16_where_the_hardware_has_it(at, native, emulated, avx, amx, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: emulated if including_emulation else native)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert choose_dtype("auto", at) == expected
    assert [choose_dtype(name, at) for name in ("float32", "float16")] == ["float32", "float16"]


def test_a_device_is_named_by_its_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device[5:]}")
    assert device_name("cuda:3") == "card 3"
    monkeypatch.setattr(device, "Path", lambda path: SimpleNamespace(
        read_text=lambda: "vendor_id\t: X\nmodel\t\t: 1\nmodel name\t: Some CPU @ 2 GHz\nstepping\t: 3\n"))
    assert device_name("cpu") == "Some CPU @ 2 GHz"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell it")
@pytest.mark.parametrize("platform, unit", [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_is_in_bytes_on_each_system_and_on_a_gpu_what_torch_has_reserved(platform, unit,
                                                                                           monkeypatch):
    import resource
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(
        ru_maxrss=who == resource.RUSAGE_SELF and 777))
    assert peak_memory("cpu") == 777 * unit
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int(device[5:]))
    assert peak_memory("cuda:5") == 5


def faults_of_large_tensors(*flags):
    """After a run in this process: page faults of four tensors of 384 MB that are made and freed in turn.
    Smaller ones fit into the 256 MB that the heap grows by at least."""
    import resource
    train(*flags)
    for i in range(6):
        if i == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.full((96 * 2**20,), 1.0)
    print("faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_run_on_a_cpu_keeps_the_memory_that_it_frees(byte_data, tmp_path):
    """Each page that is given back to Linux costs a fault when it is used again: here 393,216, with huge
    pages 768. Where the memory is kept there is none."""
    run = functools.partial(faults_of_large_tensors, "--data", byte_data, *BYTES, *QUIET, "--max_steps", 1,
                            "--out", tmp_path)
    [(code, out, err)] = forked(run)
    assert code == 0 and int(re.search(r"faults: (\d+)", out)[1]) < 50, err or out
