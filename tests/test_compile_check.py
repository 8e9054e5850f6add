"""Compiled against eager before the first step. Most 'compiled' models here are made up, for time."""
import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from helpers import logged
from torch.nn.parallel import DistributedDataParallel as DDP

from model import fresh_model
from benchmarks.timing import random_tokens
from runtime.checkpoint import TrainState
from runtime.cli import RunError
from runtime.compile_check import compare_gradients, prepare_compiled
from runtime.device import make_autocast
from runtime.distributed import Process
from runtime.shards import write_shard
from runtime.signals import StopSignals
from train_gpt2 import Config
import runtime.compile_check
import train_gpt2

NORM = "transformer.h.0.ln_1.weight"


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, factor):
        ctx.factor = factor
        return p * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class Compiled(torch.nn.Module):
    """A model as torch.compile might return it. The gradient of parameter `name` is `factor` times what it
    should be; where `error` is given, a call raises it."""

    def __init__(self, model, name="", factor=1.0, error=None):
        super().__init__()
        self._orig_mod, self.name, self.factor, self.error, self.calls = model, name, factor, error, 0

    def forward(self, x, y):
        self.calls += 1
        if self.error:
            raise self.error
        params = {n: Scaled.apply(p, self.factor) if n == self.name else p
                  for n, p in self._orig_mod.named_parameters()}
        return torch.func.functional_call(self._orig_mod, params, (x, y))


def a_config(recipe="gpt2", dtype="float32", **flags):
    return Config(recipe=recipe, dtype=dtype, n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=512,
                  sequence_length=64, loss_chunk=0, compile=True, **flags)


def prepare(config, compiled, model, B=3):
    config = dataclasses.replace(config, batch_size=str(B), total_batch_size=B * config.sequence_length)
    return prepare_compiled(config, TrainState(model, [], None), compiled, compiled,
                            make_autocast("cpu", config.dtype), Process())


def bits(model):
    return {name: p.detach().clone().view(torch.int32) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("recipe", "dtype", "window"), [
    ("gpt2", "bfloat16", 0), ("gpt2", "float16", 0), ("speedrun", "float32", 0),
    ("frontier", "bfloat16", 32)])
def test_a_right_model_passes_and_is_left_as_it_was_bit_for_bit(recipe, dtype, window, capsys):
    """Zeros too, which have random values meanwhile: the head and projections of two recipes start there."""
    config = a_config(recipe, dtype, window=window)
    model = fresh_model(config)
    before, rng, compiled = bits(model), torch.get_rng_state(), Compiled(model)
    assert prepare(config, compiled, model) == (3, compiled, compiled)
    assert "compared with eager mode" in capsys.readouterr().out
    assert all(torch.equal(now, before[name]) for name, now in bits(model).items())
    assert torch.equal(torch.get_rng_state(), rng) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("recipe", "name"), [("gpt2", NORM), ("gpt2", "transformer.h.1.mlp.c_fc.bias"),
                                              ("speedrun", "transformer.h.1.attn.c_q.weight"),
                                              ("frontier", "transformer.wte.weight")])
@pytest.mark.parametrize(("factor", "dtype"), [(0.5, "float32"), (4.0, "bfloat16"), (math.nan, "bfloat16")])
def test_a_gradient_that_differs_ends_the_run_in_one_line_that_names_it(recipe, name, factor, dtype):
    """In bfloat16 four times as large: half can be within eager mode's own error, a matter of the CPU."""
    config = a_config(recipe, dtype)
    model = fresh_model(config)
    before = bits(model)
    with pytest.raises(RunError, match=f"another gradient of {name} .*--no_compile"):
        prepare(config, Compiled(model, name, factor), model)
    assert all(torch.equal(now, before[n]) for n, now in bits(model).items())
    assert prepare(a_config(recipe, dtype, check_compile=False), Compiled(model, name, factor), model)


def test_a_gradient_far_from_float32_is_right_where_eager_modes_is_as_far():
    ones = torch.ones(100)
    exact, rounded = [ones[0], ones, 10 * ones], [ones[0], 1.3 * ones, 10 * ones]
    names = ["loss", "a", "b"]
    assert compare_gradients(names, exact, exact, lambda: pytest.fail("not needed"))
    assert compare_gradients(names, rounded, exact, lambda: rounded)
    with pytest.raises(RunError, match="another gradient of a than .* norm is 13 instead of 10, the"):
        compare_gradients(names, rounded, exact, lambda: exact)
    with pytest.raises(RunError, match="another loss than"):
        compare_gradients(names, [1.3 * ones[0], *exact[1:]], exact, lambda: exact)
    # what is not finite in eager mode either is not the compiler's doing, and is told by the first step
    overflown = [ones[0], math.inf * ones, ones]
    assert not compare_gradients(names, overflown, exact, lambda: overflown)


def test_a_graph_that_does_not_compile_is_eager_with_one_warning_inside_ddp_too(capsys):
    config = a_config()
    model = fresh_model(config)
    broken = Compiled(model, error=AttributeError("type fp8e4nv not supported\nin this architecture"))
    assert prepare(config, broken, model) == (3, model, model)
    assert capsys.readouterr().out == (
        "warning: torch.compile does not work here (type fp8e4nv not supported); falling back to eager "
        "mode\n")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        B, compiled, wrapped = prepare_compiled(
            dataclasses.replace(config, batch_size="3", total_batch_size=192), TrainState(model, [], None),
            broken, DDP(broken), make_autocast("cpu", "float32"), Process())
        assert isinstance(wrapped, DDP) and wrapped.module is compiled is model
        x = torch.zeros(3, 64, dtype=torch.int64)
        wrapped(x, x)[1].backward()
        assert all(p.grad.norm() >= 0 for p in model.parameters())
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_out_of_memory_is_no_failure_of_the_compiler(capsys, monkeypatch):
    """The first step says what needs less memory."""
    config = a_config()
    model = fresh_model(config)
    full = Compiled(model, error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert prepare(config, full, model)[2] is full and "out of memory" in capsys.readouterr().out
    # in eager mode, after the first of three slices: its gradients are not left for the first step
    monkeypatch.setattr(runtime.compile_check, "EAGER_TOKENS", 64)
    compiled, calls = Compiled(model), []

    def out_of_memory(*_):
        calls.append([p.grad is not None for p in model.parameters()])
        if len(calls) == 3:
            raise full.error
    model.register_forward_pre_hook(out_of_memory)
    assert prepare(config, compiled, model)[2] is compiled and "out of memory" in capsys.readouterr().out
    assert len(calls) == 3 and all(calls[-1]) and all(p.grad is None for p in model.parameters())


def test_a_compiled_run_is_compared_and_its_losses_are_those_without(tmp_path, monkeypatch, capsys):
    """The only real torch.compile of this file, without Inductor, whose kernels test_model.py compiles."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for i, n in enumerate((2000, 10_000)):
        write_shard(tmp_path / f"text_{'train' if i else 'val'}_{i:06d}.npy", random_tokens(n) % 256)
    monkeypatch.setattr(StopSignals, "install", lambda signals: signals)
    for out, more in (("with", []), ("without", ["--no_check_compile"])):
        flags = ("--compile --no_plot --max_steps 2 --n_layer 1 --n_head 2 --n_embd 32 --block_size 32 "
                 "--dtype bfloat16 --vocab_size 256 --total_batch_size 256 --batch_size 4 --val_every 0 "
                 "--hellaswag_every 0 --sample_every 0 --checkpoint_every 0").split()
        assert train_gpt2.train(["--data", str(tmp_path), "--out", str(tmp_path / out), *flags, *more]) == 0
        assert ("compared with eager mode" in capsys.readouterr().out) == (out == "with")
    assert len(logged(tmp_path / "with")) == 2
    assert logged(tmp_path / "with") == logged(tmp_path / "without")
