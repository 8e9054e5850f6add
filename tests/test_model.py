"""model.py: GPT-2 against plain references and transformers, kernels, generation, and formats of weights."""
import dataclasses
import math
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt2
from model import GPT, GPT2_SIZES, GPTConfig, MODELS
from runtime.cli import UserError
from runtime.device import choose_device, is_out_of_memory, make_autocast
from runtime.language_model import generate_tokens, penalize_repetition, sample_token
from runtime.kernels import (ATTENTION, Linear, by_formula, check_attention, chunked_cross_entropy,
                             cross_entropy_, norm)
from runtime.ranks import Process
from peers import LargestStorage, make_model, plain_gpt2, tokens
from runtime.tokenizer import EOT, VOCAB_SIZE, encode, tokenizer

ROOT = Path(__file__).resolve().parent.parent


# -----------------------------------------------------------------------------
# shape and initial weights

@pytest.mark.parametrize("name, count", [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168),
                                         ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)])
def test_parameter_counts_are_those_of_the_published_sizes(name, count):
    with torch.device("meta"):
        model = GPT(GPTConfig(**GPT2_SIZES[name]))
    assert sum(p.numel() for p in model.parameters()) == count


def test_state_dict_names_are_nanogpts_and_the_head_is_tied():
    model = make_model()
    parts = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    names += [f"transformer.h.{i}.{part}.{kind}"
              for i in range(2) for part in parts for kind in ("weight", "bias")]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.double().lm_head.weight is model.transformer.wte.weight


def test_initial_weights_are_gpt2s_and_every_parameter_gets_one():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=512, n_layer=3, n_head=2, n_embd=128))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".ln_" not in name:              # LayerNorm's own are right
                p.fill_(math.nan)
    model.init_weights()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 4 * std / p.numel() ** 0.5, name


@pytest.mark.parametrize("recipe", MODELS)
def test_no_parameter_is_drawn_twice_and_on_the_meta_device_none_is(recipe, monkeypatch):
    """Of what is drawn, each number once: the layers themselves draw nothing."""
    drawn = []
    for name in ("normal_", "uniform_"):
        draw = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name,
                            lambda p, *args, draw=draw: drawn.append(p) or draw(p, *args))

    def make():
        return MODELS[recipe](MODELS[recipe].Config(24, 97, 2, 2, 32))
    model = make()
    assert len({id(p) for p in drawn}) == len(drawn) > 0
    assert {id(p) for p in drawn} <= {id(p) for p in model.parameters()}
    drawn.clear()
    with torch.device("meta"):
        make()
    assert not drawn


def test_defaults_are_gpt2_small():
    assert dataclasses.asdict(GPTConfig()) == dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12,
                                                   n_embd=768, gelu="tanh")


# -----------------------------------------------------------------------------
# forward, loss, gradients

@pytest.mark.parametrize("gelu", ["tanh", "none"])
@pytest.mark.parametrize("kernel", ["auto", "naive", "math"])
def test_logits_equal_a_plain_reference(kernel, gelu):
    model, idx = make_model(gelu=gelu), tokens(3, 24)
    model.kernel = kernel
    logits, loss = model(idx)
    assert loss is None and logits.shape == (3, 24, 96)
    torch.testing.assert_close(logits, plain_gpt2(model.state_dict(), 2, idx, gelu), atol=1e-4, rtol=0)


def test_loss_is_the_cross_entropy_of_the_logits_and_ignores_minus_one():
    model, idx, targets = make_model(), tokens(3, 24), tokens(3, 24, seed=2)
    logits, loss = model(idx, targets)
    assert logits is None and loss.shape == ()
    every = F.cross_entropy(model(idx)[0].reshape(-1, 96), targets.reshape(-1), reduction="none").view(3, 24)
    assert loss.item() == pytest.approx(every.mean().item(), abs=1e-5)
    targets[0, :5] = targets[2, 7] = -1
    assert model(idx, targets)[1].item() == pytest.approx(every[targets >= 0].mean().item(), abs=1e-5)


def test_token_losses_are_the_loss_of_each_token_and_zero_where_ignored():
    model, idx, targets = make_model(), tokens(3, 24), tokens(3, 24, seed=2)
    targets[:, :20], targets[1], targets[2, -1] = -1, -1, 0
    positions = (targets >= 0).flatten().nonzero().flatten()
    losses = model.token_losses(idx, targets, positions)
    every = F.cross_entropy(model(idx)[0].transpose(1, 2), targets, ignore_index=-1, reduction="none")
    assert losses.dtype == torch.float32 and (losses[targets == -1] == 0).all()
    torch.testing.assert_close(losses, every)
    for more in (positions[:0], positions[:3], torch.tensor([0])):      # none, some again, one with target -1
        torch.testing.assert_close(model.token_losses(idx, targets, torch.cat((positions, more))), losses)
    without_data = [t.to("meta") for t in (idx, targets, positions)]    # there reading a value, a sync, fails
    assert model.to("meta").token_losses(*without_data).shape == (3, 24)


@pytest.mark.parametrize("kernel", ["auto", "naive"])
def test_gradients_of_every_parameter_equal_a_plain_references(kernel):
    model, idx, targets = make_model(), tokens(3, 24), tokens(3, 24, seed=2)
    targets[1, 3:9] = -1
    model.kernel = kernel
    model(idx, targets)[1].backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    logits = plain_gpt2(weights, 2, idx)
    own = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    (-own)[targets >= 0].mean().backward()
    for name, p in model.named_parameters():
        expected = weights[name].grad.float()
        assert (p.grad - expected).abs().max() < 1e-5 * max(1, expected.abs().max().item()), name


@pytest.mark.parametrize(("chunk", "vocab_size"), [(1, 50), (5, 50), (7, 50), (64, 50), (17, 50257),
                                                   (64, 150_000)])
def test_the_chunked_loss_is_the_whole_one_with_its_gradients(chunk, vocab_size):
    """In float64, so that only the last digits are rounded; a fifth of the targets is ignored. With the large
    vocabularies the cache's tiles are smaller than the chunk: 7 and 2 rows for each thread."""
    torch.manual_seed(0)
    x, weight = torch.randn(19, 8, dtype=torch.float64), torch.randn(vocab_size, 8, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (19,))
    targets[::5] = -1
    results = []
    for loss in (lambda x, w: F.cross_entropy(x @ w.t(), targets, ignore_index=-1),
                 lambda x, w: chunked_cross_entropy(x, w, targets, chunk, 0.0)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = 3 * loss(a, b)                  # 3: the backward must pass on what comes after the loss
        value.backward()
        results.append((value.detach(), a.grad, b.grad))
    for whole, chunked in zip(*results, strict=True):
        assert (chunked - whole).norm() <= 1e-5 * whole.norm()          # the loss and p are fp32 inside


@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_trains_the_same_with_the_chunked_loss_and_never_holds_all_logits(autocast):
    torch.manual_seed(0)
    config = GPTConfig(block_size=32, vocab_size=640, n_layer=2, n_head=2, n_embd=32)
    whole, chunked = GPT(config), GPT(config)
    chunked.load_state_dict(whole.state_dict())
    chunked.loss_chunk = 16
    idx, targets = torch.randint(0, 640, (4, 32)), torch.randint(0, 640, (4, 32))
    targets[0, :9] = -1
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        a = whole(idx, targets)[1]
        with LargestStorage() as seen:
            b = chunked(idx, targets)[1]
        with torch.no_grad():
            assert chunked(idx, targets)[1].item() == b.item()
    a.backward()
    b.backward()
    assert b.item() == pytest.approx(a.item(), abs=2e-3 if autocast else 2e-6)
    for (name, p), q in zip(whole.named_parameters(), chunked.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= (0.03 if autocast else 1e-5) * p.grad.norm(), name
    assert seen.bytes < 4 * 32 * 640 * 2, "bytes of all logits in bfloat16"


def test_the_chunked_loss_frees_the_logits_of_a_chunk_before_the_next():
    logits = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            logits_next = func == torch.ops.aten.mm.default and args[1].shape == (8, 640)
            assert not logits_next or all(storage.expired() for storage in logits)
            result = func(*args, **kwargs or {})
            if logits_next:
                logits.append(StorageWeakRef(result.untyped_storage()))
            return result
    x, weight = torch.randn(48, 8), torch.randn(640, 8, requires_grad=True)
    with Products():
        chunked_cross_entropy(x, weight, torch.randint(0, 640, (48,)), 16, 0.0)
    assert len(logits) == 3


def test_in_float16_the_gradients_of_unlikely_tokens_survive_the_chunks():
    """p / N is 1e-8 here, which float16 does not hold; the scaler's factor comes only in the backward."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(4096, 8), torch.randn(20_000, 8) * 0.1, torch.randint(0, 20_000, (4096,))
    results = []
    for autocast in (False, True):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = chunked_cross_entropy(a, b, targets, 1024, 0.0)
        (loss * 65536.0).backward()
        results.append((a.grad, b.grad))
    for exact, rough in zip(*results, strict=True):
        assert (rough - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_norm_and_its_gradient_are_those_of_the_formula_and_it_keeps_no_fp32_copy(dtype, tolerance):
    torch.manual_seed(0)
    x, dy = torch.randn(3, 5, 2, 16).transpose(1, 2).to(dtype), torch.randn(3, 2, 5, 16).to(dtype)
    x[0, 0, 0] = 1e-4                   # where eps matters
    exact, before, kept = x.double().requires_grad_(), x.clone(), []
    expected = exact / (exact.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    expected.backward(dy.double())
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        y = norm(x)
    y.backward(dy)
    assert y.dtype == dtype and torch.equal(x, before) and sum(kept) == y.nbytes + 4 * 3 * 2 * 5
    for found, wanted in ((y, expected), (x.grad, exact.grad)):
        assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
        assert (found.double() - wanted)[0, 0, 0].norm() <= 4 * tolerance * wanted[0, 0, 0].norm()


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="longer than block_size 24"):
        make_model()(tokens(1, 25))


def test_flops_a_token_agree_with_torchs_own_count():
    from torch.utils.flop_counter import FlopCounterMode
    model = GPT(GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=2, n_embd=128))
    model.kernel = "naive"
    idx = tokens(2, 64)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    assert model.flops_per_token(64) == pytest.approx(counter.get_total_flops() / idx.numel(), rel=0.01)


# -----------------------------------------------------------------------------
# attention kernels and devices

def runs_here(kernel, device="cpu", dtype=torch.float32, head_dim=16):
    try:
        check_attention(kernel, device, dtype, head_dim)
    except UserError:
        return False
    return True


def test_the_cpu_has_at_least_three_attention_kernels():
    assert {"auto", "naive", "math"} <= {kernel for kernel in ATTENTION if runs_here(kernel)}


@pytest.mark.parametrize("kernel, reason", [
    ("cudnn", r"cannot run on cpu in float32 .*\(.{10,}\)"), ("efficient", r"\(.{10,}\)")])
def test_a_kernel_that_cannot_run_here_is_refused_with_a_reason(kernel, reason):
    with pytest.raises(UserError, match=reason):
        check_attention(kernel, "cpu", torch.float32, 64)


def test_checking_a_kernel_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    check_attention("naive", "cpu", torch.float32, 64)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("kernel", "dtype", "length", "formula"), [
    ("auto", torch.bfloat16, 512, True), ("auto", torch.bfloat16, 513, False),
    ("auto", torch.float16, 9, False), ("auto", torch.float32, 9, False),
    ("naive", torch.float32, 9999, True), ("math", torch.bfloat16, 9, False)])
def test_on_a_cpu_the_formula_is_for_short_sequences_in_bfloat16(kernel, dtype, length, formula):
    q = torch.empty(1, 1, length, 16, dtype=dtype)
    assert by_formula(kernel, q[:, :, -1:], q) == formula
    assert by_formula(kernel, q.to("meta"), q.to("meta")) == (kernel == "naive")


@pytest.mark.parametrize(("version", "refused"), [("2.9.1+cu128", True), ("1.13.0", True), ("2.10.0", False),
                                                  ("2.11.0a0+git1", False), ("3.0.0", False)])
def test_a_torch_that_is_too_old_is_refused(version, refused, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    if refused:
        with pytest.raises(UserError, match=f"torch {re.escape(version)} is too old: pip install"):
            choose_device("cpu")
    else:
        assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "cuda:99", "cuda:x", "mps:0:0", ""])
def test_a_device_that_is_not_there_is_refused_with_what_is(name):
    with pytest.raises(UserError, match=r"--device .*finds .*cpu: use one of these"):
        choose_device(name)


@pytest.mark.parametrize(("gpus", "files", "hidden", "said"), [
    (0, [], False, ""), (0, ["/dev/nvidia0"], False, "does not find the GPU"),
    (0, ["/dev/kfd"], False, "does not find the GPU"), (0, ["/dev/nvidia0"], True, ""),
    (2, ["/dev/nvidia0"], False, "")])
def test_auto_takes_a_gpu_and_a_gpu_that_torch_does_not_find_is_told_in_one_line(
        gpus, files, hidden, said, monkeypatch, capsys, recwarn):
    def is_available():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return gpus > 0
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "ones", lambda n, device, ones=torch.ones: ones(n))
    monkeypatch.setattr(os.path, "exists", files.__contains__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert choose_device("auto", rank) == (f"cuda:{rank}" if gpus else "cpu")
        err = capsys.readouterr().err
        assert err.count("\n") == bool(said and rank == 0) and (rank or said in err)
    assert choose_device("cpu") == "cpu" and not capsys.readouterr().err and not recwarn.list
    if gpus:
        assert choose_device("cuda", 1) == "cuda:1" and choose_device("cuda:0", 1) == "cuda:0"
        with pytest.raises(UserError, match="--device cuda:2: not available here"):
            choose_device("cuda", 2)


@pytest.mark.parametrize(("raised", "refused"), [
    (None, None), (RuntimeError("CUDA error: out of memory"), None), (torch.OutOfMemoryError("CUDA"), None),
    (RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors"), "no kernel image"),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "busy")])
def test_a_gpu_that_runs_no_kernel_of_this_torch_is_refused(raised, refused, monkeypatch):
    def ones(n, device, make=torch.ones):
        if raised:
            raise raised
        return make(n)
    monkeypatch.setattr(torch, "ones", ones)
    functions = dict(is_available=lambda: True, device_count=lambda: 1, get_arch_list=["sm_90"].copy,
                     get_device_name=lambda device: "Some GPU")
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name in ("auto", "cuda", "cuda:0"):
        if refused:
            said = rf"Some GPU cannot .* code for sm_90: .*{refused}.*--device cpu"
            with pytest.raises(UserError, match=said):
                choose_device(name)
        else:
            assert choose_device(name) == "cuda:0"
    assert choose_device("cpu") == "cpu"


def caught(function):
    with pytest.raises(Exception) as raised:
        function()
    return raised.value


def test_memory_that_runs_out_is_recognised_in_every_form_and_nothing_else_is():
    def fails(error):
        def backend(graph, inputs):
            raise error
        return caught(lambda: torch.compile(torch.sin, backend=backend)(torch.zeros(3)))

    def hidden():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError:
            raise ValueError("another") from None
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for error in (torch.OutOfMemoryError("x"), torch._inductor.exc.InductorError(cuda, None),
                  fails(torch.OutOfMemoryError("x")), fails(MemoryError("x")),
                  caught(lambda: torch.empty(2**50, dtype=torch.uint8)),
                  caught(lambda: np.empty(2**50, dtype=np.uint8)),
                  RuntimeError("CUDA error: out of memory\nCUDA kernel errors might ..."),
                  RuntimeError("Triton Error [CUDA]: out of memory"),
                  RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                  RuntimeError("MPS backend out of memory (MPS allocated: 8 GB, other allocations: ..."),
                  RuntimeError("NCCL error in: a.cpp:77, unhandled cuda error\nLast error:\n"
                               "Cuda failure 2 'out of memory'")):
        assert is_out_of_memory(error), error
    for error in (fails(ValueError("x")), caught(hidden), UserError("CUDA is out of memory"),
                  RuntimeError("CUDA error: an illegal memory access"),
                  RuntimeError("out of resource: shared memory"), OSError(12, "x")):
        assert not is_out_of_memory(error), error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_is_torchs_and_sums_its_biass_gradient_in_fp32(dtype):
    torch.manual_seed(0)
    ours, theirs, x = Linear(5, 7), torch.nn.Linear(5, 7), torch.randn(3, 800, 5)
    ours.load_state_dict(theirs.state_dict())       # ours are not drawn
    if dtype == torch.float64:
        ours, theirs, x = ours.double(), theirs.double(), x.double()
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        for linear in (ours, theirs):
            x_i = x.clone().requires_grad_()
            y = linear(x_i)
            assert y.dtype == dtype
            (y.float() + 1).square().sum().backward()
            found.append((y.detach(), x_i.grad, linear.weight.grad, linear.bias.grad))
            with torch.no_grad():
                assert torch.equal(linear(x), y)
    tolerances = (0, 1e-6, 1e-6, 1e-6 if dtype != torch.bfloat16 else 0.01)
    for a, b, tolerance in zip(*found, tolerances, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= tolerance * b.norm()
    exact = (2 * (found[0][0].float() + 1)).to(dtype).double().sum((0, 1))      # the same gradients, summed
    assert (found[0][3] - exact).norm() <= 1e-5 * exact.norm(), "in bfloat16, torch's own sum is 1e-3 off"


@pytest.mark.parametrize(("dtype", "stream"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16),
                                               (torch.float16, torch.float32)])
def test_the_residual_stream_is_bfloat16_where_the_products_are_and_float32_elsewhere(dtype, stream):
    model, seen = make_model(), []
    for block in model.transformer.h:
        block.register_forward_hook(lambda block, x, y: seen.extend((x[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(tokens(2, 24), tokens(2, 24))[1].backward()
    assert seen == [stream] * 4
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", MODELS)
def test_compiled_in_one_graph_loss_and_gradients_equal_eager(recipe, dtype):
    """What Inductor is given, divided into forward and backward as it is for Inductor, whose C++ would take
    most of a minute to compile."""
    cls, idx, targets = MODELS[recipe], tokens(2, 24), tokens(2, 24, seed=2)
    targets[0, :4] = -1
    torch.manual_seed(0)
    model = cls(cls.Config(24, 97, 1, 2, 32))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    model.kernel = "math"               # a pinned kernel, which the graph has to carry
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    found, kept = [], []
    for run in (model, compiled):
        model.zero_grad()
        shapes = []
        with (torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
              torch.autograd.graph.saved_tensors_hooks(lambda t, shapes=shapes: shapes.append(t.shape) or t,
                                                       lambda t: t)):
            _, loss = run(idx, targets)
        loss.backward()
        found.append([loss.detach()] + [p.grad.clone() for p in model.parameters()])
        kept.append(sum(shape.numel() == 2 * 24 * 4 * 32 for shape in shapes))
    for eager, graph in zip(*found, strict=True):
        if dtype == torch.float32 or eager.numel() > 2:     # learned scalars are differences of large sums
            assert (graph - eager).norm() <= (2e-5 if dtype == torch.float32 else 0.05) * eager.norm() + 1e-6
    if recipe == "gpt2":
        assert kept == [2, 1], "what goes into GELU; eagerly also what comes out of it"


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("recipe", MODELS)
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit_and_keep_little(recipe, window):
    """In eager mode, and to rounding in the graph that Inductor would be given; in two runs of a backward."""
    if window and recipe == "gpt2":
        pytest.skip("gpt2 has no window")
    torch.manual_seed(0)
    shape = dict(block_size=32, vocab_size=97, n_layer=3, n_head=2, n_embd=32) | (
        {"window": window} if window else {})
    model, idx, targets = MODELS[recipe](MODELS[recipe].Config(**shape)), tokens(2, 24), tokens(2, 24, seed=2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))          # the modern recipes' projections are zero at first
    found, kept = [], []
    compiled = torch.compile(model, dynamic=False, backend="aot_eager")
    for recompute, run in ((False, model), (True, model), (True, compiled)):
        model.recompute = recompute
        model.zero_grad()
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: sizes.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            loss = run(idx, targets)[1]
        loss.backward()
        found.append([loss.detach()] + [p.grad.clone() for p in model.parameters()])
        kept.append(sum(sizes.values()))
    for once, twice, in_graph in zip(*found, strict=True):
        assert torch.equal(once, twice)
        torch.testing.assert_close(in_graph, once, atol=2e-5, rtol=1e-4)
    assert kept[1] < kept[0] / 2
    assert 2 * kept[1] >= 3 * 24 * 32 * 4, "what each of the three blocks begins with"
    with torch.no_grad():
        assert model(idx, targets)[1] == found[0][0]


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_the_kernel_of_the_chunked_loss_is_that_of_float64(softcap):
    torch.manual_seed(0)
    # without a softcap their exp would overflow, if the highest were not subtracted
    logits, targets = (20 if softcap else 200) * torch.randn(9, 50), torch.randint(0, 50, (9,))
    targets[::4] = -1
    z = logits.double().requires_grad_()
    expected = F.cross_entropy(softcap * torch.tanh(z / softcap) if softcap else z, targets,
                               ignore_index=-1, reduction="sum")
    expected.backward()
    loss = cross_entropy_(logits, targets, softcap)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits.double(), z.grad, atol=1e-5, rtol=1e-4)


# -----------------------------------------------------------------------------
# optimizers

def test_matrices_and_embeddings_decay_the_rest_does_not_and_every_parameter_is_optimised_once():
    model = make_model()
    [optimizer] = model.configure_optimizers(max_lr=1e-3, weight_decay=0.1)
    assert isinstance(optimizer, torch.optim.AdamW)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (1e-3, (0.9, 0.95), 1e-8, True)
        assert all(group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0) for p in group["params"])


def test_a_fused_step_on_the_cpu_is_adamws():
    model, idx = make_model(), tokens(2, 24)
    [optimizer] = model.configure_optimizers(max_lr=1e-2, weight_decay=0.1)
    model(idx, idx)[1].backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        w, g = before[name]             # the first step's bias-corrected moments are g and g^2
        expected = w * (1 - 1e-2 * (0.1 if w.dim() >= 2 else 0)) - 1e-2 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, atol=1e-5, rtol=0)


# -----------------------------------------------------------------------------
# generation

def sample_without_cache(model, idx, max_new_tokens, temperature, top_k, generator):
    """The plain way: a whole forward of the last block_size tokens for each new one."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size:])[0][:, -1, :VOCAB_SIZE].detach()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            if top_k:
                least = logits.sort(dim=-1, descending=True).values[:, [min(top_k, logits.size(1)) - 1]]
                logits = torch.where(logits >= least, logits, -math.inf)
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        idx = torch.cat((idx, new), dim=1)
    return idx


@pytest.mark.parametrize("start, new", [(1, 23), (5, 60), (24, 9), (40, 9)])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 50), (0.7, None), (1.3, 0), (0, 50), (2.0, 1),
                                                (1.0, 1000)])
def test_generate_gives_the_same_tokens_with_the_cache_as_without_past_block_size_too(
        start, new, temperature, top_k):
    model, idx = make_model(), tokens(3, start)
    ours = model.generate(idx, new, temperature, top_k, torch.Generator().manual_seed(5))
    plain = sample_without_cache(model, idx, new, temperature, top_k, torch.Generator().manual_seed(5))
    assert ours.shape == (3, start + new) and torch.equal(ours, plain)


def test_the_cache_spares_the_forward_of_the_context():
    model, seen = make_model(), []
    model.transformer.wte.register_forward_hook(lambda module, args, out: seen.append(out.size(1)))
    model.generate(tokens(2, 5), 20)
    assert seen == [5] + [1] * 19


def test_rows_of_a_batch_do_not_see_each_other():
    model, idx = make_model(), tokens(3, 5)
    together = model.generate(idx, 30, temperature=0)
    assert torch.equal(together, torch.cat([model.generate(row[None], 30, temperature=0) for row in idx]))


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-30])
def test_no_or_hardly_any_temperature_takes_the_likeliest_token(temperature):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.equal(sample_token(logits.clone(), temperature, 50, None), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_leaves_the_k_likeliest(top_k):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).repeat(500, 1)
    drawn = set(sample_token(logits.clone(), 5.0, top_k, torch.Generator().manual_seed(0)).flatten().tolist())
    assert drawn == set(logits[0].topk(top_k).indices.tolist())


NUCLEUS = torch.tensor([[0.05, 0.4, 0.0, 0.15, 0.3, 0.1]])       # in descending order 1, 4, 3, 5, 0


@pytest.mark.parametrize("top_k, top_p, kept", [
    (None, 0.39, {1}), (None, 0.41, {1, 4}), (None, 0.69, {1, 4}), (None, 0.71, {1, 3, 4}),
    (None, 0.9499, {1, 3, 4, 5}), (None, 0.951, {0, 1, 3, 4, 5}), (None, 1.0, {0, 1, 3, 4, 5}),
    (None, None, {0, 1, 3, 4, 5}), (None, 1e-9, {1}),
    # of two tokens with 4/7 and 3/7: only where top_k comes first
    (2, 0.56, {1}), (2, 0.58, {1, 4}), (2, 1.0, {1, 4}), (1, 0.9, {1}), (0, 0.71, {1, 3, 4})])
def test_top_p_leaves_the_fewest_likeliest_that_sum_to_p_and_their_frequencies(top_k, top_p, kept):
    n, generator = 5000, torch.Generator().manual_seed(0)
    drawn = sample_token(NUCLEUS.log().repeat(n, 1), 1.0, top_k, generator, top_p).flatten()
    expected = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(NUCLEUS[0].tolist())])
    assert set(drawn.tolist()) == kept
    torch.testing.assert_close(drawn.bincount(minlength=6) / n, expected / expected.sum(), atol=0.025, rtol=0)


def test_top_p_cuts_each_row_for_itself_and_after_the_temperature():
    rows = torch.stack((NUCLEUS[0], NUCLEUS[0].flip(0))).log().repeat(500, 1)
    drawn = sample_token(2 * rows, 2.0, None, torch.Generator().manual_seed(0), 0.6).view(500, 2)
    assert [set(column.tolist()) for column in drawn.T] == [{1, 4}, {1, 4}] and (drawn[:, 0] == 1).sum() > 250
    assert (drawn[:, 1] == 4).sum() > 250


def test_the_repetition_penalty_is_transformers_but_for_the_token_that_begins_a_document():
    from transformers import RepetitionPenaltyLogitsProcessor
    logits = torch.randn(3, 50304, generator=torch.Generator().manual_seed(0))
    idx = torch.tensor([[5, 7, 5, 300], [EOT, 0, 1, 2], [EOT, EOT, EOT, EOT]])
    found = penalize_repetition(logits, idx, 1.3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(idx, logits.clone())
    expected[:, EOT] = logits[:, EOT]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(found[2], logits[2]) and (found[:2] != logits[:2]).sum(1).tolist() == [3, 3]


def test_generate_penalizes_what_the_prompt_and_the_text_so_far_have():
    model, idx = make_model(), tokens(1, 5)
    greedy = model.generate(idx, 40, temperature=0)[0].tolist()
    row = model.generate(idx, 40, temperature=0, repetition_penalty=1000.0)[0].tolist()
    assert len(set(greedy)) < 40 and len(set(row)) == len({*idx[0].tolist()}) + 40


def test_generate_passes_top_p_on():
    model, idx = make_model(), tokens(2, 5)
    greedy = model.generate(idx, 30, temperature=0)
    assert torch.equal(model.generate(idx, 30, 1.0, None, torch.Generator().manual_seed(0), 1e-9), greedy)
    assert not torch.equal(model.generate(idx, 30, 1.0, None, torch.Generator().manual_seed(0)), greedy)


def test_steps_of_generation_are_those_of_generate_and_stop_where_the_caller_stops():
    model, idx, forwards = make_model(), tokens(3, 5), []
    whole = model.generate(idx, 30, 1.3, 20, torch.Generator().manual_seed(4))
    model.transformer.ln_f.register_forward_hook(lambda *args: forwards.append(torch.is_grad_enabled()))
    steps = generate_tokens(model, idx, 30, 1.3, 20, torch.Generator().manual_seed(4))
    assert not forwards
    for i, new in zip(range(7), steps, strict=False):
        assert new.shape == (3, 1) and torch.equal(new, whole[:, 5 + i:6 + i])
        assert torch.is_grad_enabled()                  # the caller's
    assert len(forwards) == 7 and not any(forwards)


@pytest.mark.parametrize("top_k", [None, 0])
def test_without_top_k_the_frequencies_are_the_softmax(top_k):
    logits, n = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 20_000
    drawn = sample_token(logits.repeat(n, 1), 2.0, top_k, torch.Generator().manual_seed(0)).flatten()
    expected = (logits[0] / 2).softmax(-1)
    torch.testing.assert_close(drawn.bincount(minlength=4) / n, expected, atol=0.015, rtol=0)


def test_a_generator_decides_the_sample_and_the_global_random_numbers_stay_untouched():
    model, idx = make_model(), tokens(2, 3)
    before = torch.get_rng_state()
    first, again, other = (model.generate(idx, 30, generator=torch.Generator().manual_seed(seed))
                           for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("temperature, top_k", [(0, 50), (1.0, 1), (1.0, 50), (3.0, None)])
def test_padding_ids_are_never_sampled_however_likely(temperature, top_k):
    model = make_model(vocab_size=50304, n_layer=1)
    with torch.no_grad():                   # about the last hidden state, so these logits are the largest
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB_SIZE:] = 5.0
    assert (model(tokens(2, 4))[0].argmax(-1) >= VOCAB_SIZE).all()
    assert (model.generate(tokens(2, 4), 40, temperature, top_k)[:, 4:] < VOCAB_SIZE).all()


def test_samples_in_training_continue_the_prompt_and_leave_the_random_numbers_alone(capsys):
    model = make_model(vocab_size=50304, n_layer=1)

    def printed(prompt, num_samples):
        config = train_gpt2.Config(sample_prompt=prompt, block_size=24)
        train_gpt2.print_samples(SimpleNamespace(process=Process(), config=config, model=model,
                                                 autocast=make_autocast("cpu", "float32")), num_samples, 5)
        return capsys.readouterr().out
    before, end = torch.get_rng_state(), " a b c d e f g h i j k l m n o p q r s t u v w x"
    assert len(encode(end)) == 24
    for prompt, start in (("Hello, I'm", encode("Hello, I'm").tolist()), ("", [EOT]),
                          ("start" * 40 + end, encode(end).tolist())):         # a long one keeps its end
        rows = model.generate(torch.tensor([start] * 3), 5, generator=torch.Generator().manual_seed(42))
        texts = [tokenizer().decode(row).removeprefix("<|endoftext|>") for row in rows.tolist()]
        assert printed(prompt, 3) == "".join(f"sample {i}: {text}\n" for i, text in enumerate(texts))
        assert not torch.equal(rows[0], rows[1])
    assert torch.equal(before, torch.get_rng_state())
