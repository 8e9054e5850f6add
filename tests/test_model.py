"""model.py: GPT-2 against plain references, memory, devices, compiled graphs, generation."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import refused
from model import GPT, GPT2_SIZES, GPTConfig, attention, sample_token
from recipes import MODELS
from peers import LargestStorage, make_model, plain_gpt2, tokens
from runtime.cli import UserError
from runtime.device import choose_device, is_out_of_memory
from runtime.kernels import chunked_cross_entropy
from runtime.tokenizer import VOCAB_SIZE


# ----------------------------------------------------------------------------- shape and initial weights

@pytest.mark.parametrize("name, count", [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168),
                                         ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)])
def test_parameter_counts_are_those_of_the_published_sizes(name, count):
    with torch.device("meta"):
        model = GPT(GPTConfig(**GPT2_SIZES[name]))
    assert sum(p.numel() for p in model.parameters()) == count
    assert name != "gpt2" or model.config == GPTConfig(1024, 50257, 12, 12, 768, "tanh") == GPTConfig()


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


# ----------------------------------------------------------------------------- forward, loss, gradients

@pytest.mark.parametrize("kernel, gelu", [("auto", "tanh"), ("auto", "none"), ("naive", "tanh"),
                                          ("math", "tanh")])
def test_logits_loss_and_gradients_equal_a_plain_reference(kernel, gelu):
    """In float64; of the loss targets of -1 are ignored."""
    model, idx, targets = make_model(gelu=gelu), tokens(3, 24), tokens(3, 24, seed=2)
    model.kernel = kernel
    targets[0, :5] = targets[2, 7] = -1
    logits, loss = model(idx)
    assert loss is None and logits.shape == (3, 24, 96)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_gpt2(weights, 2, idx, gelu)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
    own = expected.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    (-own)[targets >= 0].mean().backward()
    logits, loss = model(idx, targets)
    loss.backward()
    assert logits is None and loss.shape == ()
    assert loss.item() == pytest.approx(-own[targets >= 0].mean().item(), abs=1e-5)
    for name, p in model.named_parameters():
        expected = weights[name].grad.float()
        assert (p.grad - expected).abs().max() < 1e-5 * max(1, expected.abs().max().item()), name


@pytest.mark.parametrize("chunk, vocab_size, softcap, scale", [
    (1, 50, 0.0, 1), (7, 50, 30.0, 7), (64, 50, 0.0, 70), (64, 50, 30.0, 70), (64, 150_000, 15.0, 1)])
def test_the_chunked_loss_is_the_whole_one_with_its_gradients(chunk, vocab_size, softcap, scale):
    """Also of logits whose exp would overflow, if the highest were not subtracted. With the large vocabulary
    the cache's tiles are smaller than the chunk: 2 rows for each thread."""
    torch.manual_seed(0)
    x, weight = scale * torch.randn(19, 8).double(), torch.randn(vocab_size, 8).double()
    targets, results = torch.randint(0, vocab_size, (19,)), []
    targets[::5] = -1

    def whole(x, w):
        z = x @ w.t()
        z = softcap * torch.tanh(z / softcap) if softcap else z
        return F.cross_entropy(z, targets, ignore_index=-1)
    for loss in (whole, lambda x, w: chunked_cross_entropy(x, w, targets, chunk, softcap)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = 3 * loss(a, b)                  # 3: the backward must pass on what comes after the loss
        value.backward()
        results.append((value.detach(), a.grad, b.grad))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()      # the loss and p are fp32 inside


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


def test_in_bfloat16_the_chunks_gradients_are_added_up_in_float32():
    """128 chunks: sums that are rounded to 8 bits after each of them would be some percents off."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(1024, 8), torch.randn(40, 8), torch.randint(0, 40, (1024,))
    gradients = []
    for chunk in (8, 1024):
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            chunked_cross_entropy(x.requires_grad_(), w, targets, chunk, 0.0).backward()
        gradients.append(w.grad)
    assert (gradients[0] - gradients[1]).norm() < 0.003 * gradients[1].norm()


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


# ----------------------------------------------------------------------------- attention and devices

@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_attention_to_many_tokens_never_holds_a_score_for_each_pair(kernel):
    q = torch.randn(1, 1024, 2, 16, dtype=torch.bfloat16)
    with LargestStorage() as seen:
        y = attention(q, q, q, kernel)
    assert seen.bytes < 1024 * 1024
    torch.testing.assert_close(y, attention(q, q, q, "naive"), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0", "2.10.0", "2.11.0a0+git1", "3.0.0"])
def test_a_torch_that_is_too_old_is_refused(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    if version in ("2.9.1+cu128", "1.13.0"):
        refused(lambda: choose_device("cpu"), version, "pip install")
    else:
        assert choose_device("cpu") == "cpu"


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n, raised): a torch that finds n GPUs, on which a kernel raises this."""
    make = torch.ones

    def find(n, raised=None):
        def ones(n, device):
            if raised:
                raise raised
            return make(n)
        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        for name, value in dict(is_available=n > 0, device_count=n, get_arch_list=["sm_90"],
                                get_device_name="Some GPU").items():
            monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return find


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "cuda:2", "cuda:x", "mps:0:0", ""])
@pytest.mark.parametrize("n", [0, 2])
def test_a_device_that_is_not_there_is_refused_with_what_is(n, name, gpus):
    gpus(n)
    refused(lambda: choose_device(name), f"--device {name}", *(["cuda:0", "cuda:1"] * (n > 0)), "cpu")


def test_auto_takes_the_gpu_of_its_rank(gpus, capsys, recwarn):
    gpus(0)
    assert choose_device("auto") == choose_device("auto", 1) == "cpu"
    gpus(2)
    for name, rank, device in (("auto", 0, "cuda:0"), ("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"),
                               ("cuda:0", 1, "cuda:0"), ("cpu", 1, "cpu")):
        assert choose_device(name, rank) == device
    refused(lambda: choose_device("cuda", 2), "--device cuda:2")
    assert not any(capsys.readouterr()) and not recwarn.list


@pytest.mark.parametrize(("raised", "said"), [
    (RuntimeError("CUDA error: out of memory"), ""), (torch.OutOfMemoryError("CUDA"), ""),
    (RuntimeError("CUDA error: no kernel image is available\nCUDA kernel errors"), "no kernel image"),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "busy")])
def test_a_gpu_that_runs_no_kernel_of_this_torch_is_refused(raised, said, gpus):
    gpus(1, raised)
    for name in ("auto", "cuda", "cuda:0"):
        if said:
            refused(lambda name=name: choose_device(name), "Some GPU", "sm_90", said, "--device cpu")
        else:
            assert choose_device(name) == "cuda:0"
    assert choose_device("cpu") == "cpu"


def caught(function):
    with pytest.raises(Exception) as raised:
        function()
    return raised.value


def failed_compile(error):
    def backend(graph, inputs):
        raise error
    return caught(lambda: torch.compile(torch.sin, backend=backend)(torch.zeros(3)))


def test_memory_that_runs_out_is_recognised_in_every_form_and_nothing_else_is():
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for error in (cuda, torch._inductor.exc.InductorError(cuda, None), failed_compile(cuda),
                  failed_compile(MemoryError("x")), caught(lambda: torch.empty(2**50, dtype=torch.uint8)),
                  caught(lambda: np.empty(2**50, dtype=np.uint8)), *map(RuntimeError, (
                      "CUDA error: out of memory\nCUDA kernel errors might ...",
                      "Triton Error [CUDA]: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when",
                      "MPS backend out of memory (MPS allocated: 8 GB, other allocations: ...",
                      "NCCL error in: a.cpp:77, unhandled cuda error\nCuda failure 2 'out of memory'"))):
        assert is_out_of_memory(error), error
    for error in (failed_compile(ValueError("x")), UserError("CUDA is out of memory"), OSError(12, "x"),
                  RuntimeError("CUDA error: an illegal memory access"),
                  RuntimeError("out of resource: shared memory")):
        assert not is_out_of_memory(error), error


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_residual_stream_is_bfloat16_where_the_products_are_and_float32_elsewhere(dtype):
    model, seen = make_model(), []
    for block in model.transformer.h:
        block.register_forward_hook(lambda block, x, y: seen.extend((x[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(tokens(2, 24), tokens(2, 24))[1].backward()
    assert seen == [torch.bfloat16 if dtype == torch.bfloat16 else torch.float32] * 4
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def gradients(model, call, dtype=torch.float32):
    """[loss, the gradient of each parameter] of call(idx, targets), and the tensors kept for the backward."""
    idx, targets, kept = tokens(2, 24), tokens(2, 24, seed=2), []
    targets[0, :4] = -1
    model.zero_grad()
    with (torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
          torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)):
        loss = call(idx, targets)[1]
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in model.parameters()], kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", MODELS)
def test_compiled_in_one_graph_loss_and_gradients_equal_eager(recipe, dtype):
    """What Inductor is given, divided into forward and backward as it is for Inductor, whose C++ would take
    most of a minute to compile."""
    model = make_model(cls=MODELS[recipe], spread=0.02, n_layer=1, n_embd=32)
    model.kernel = "math"               # a pinned kernel, which the graph has to carry
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    found, kept = zip(*(gradients(model, call, dtype) for call in (model, compiled)), strict=True)
    for eager, graph in zip(*found, strict=True):
        if dtype == torch.float32 or eager.numel() > 2:     # learned scalars are differences of large sums
            assert (graph - eager).norm() <= (2e-5 if dtype == torch.float32 else 0.05) * eager.norm() + 1e-6
    if recipe == "gpt2":
        of_mlp = [sum(t.numel() == 2 * 24 * 4 * 32 for t in tensors) for tensors in kept]
        assert of_mlp == [2, 1], "what goes into GELU; eagerly also what comes out of it"


@pytest.mark.parametrize("recipe", MODELS)
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit_and_keep_little(recipe):
    """In eager mode, and to rounding in the graph that Inductor would be given; in two runs of a backward."""
    model = make_model(cls=MODELS[recipe], spread=0.02, block_size=32, n_layer=3, n_embd=32)
    expected, kept = gradients(model, model)
    model.recompute = True
    found, kept_then = gradients(model, model)
    in_graph, _ = gradients(model, torch.compile(model, dynamic=False, backend="aot_eager"))
    for once, twice, compiled in zip(expected, found, in_graph, strict=True):
        assert torch.equal(once, twice)
        torch.testing.assert_close(compiled, once, atol=2e-5, rtol=1e-4)
    before, now = (sum({t.data_ptr(): t.nbytes for t in tensors}.values()) for tensors in (kept, kept_then))
    assert 3 * 24 * 32 * 4 <= 2 * now < before, "what each of the three blocks begins with"


# ----------------------------------------------------------------------------- optimizers

def test_matrices_and_embeddings_decay_the_rest_does_not_and_every_parameter_is_optimised_once():
    model = make_model()
    [optimizer] = model.configure_optimizers(max_lr=1e-3, weight_decay=0.1)
    assert isinstance(optimizer, torch.optim.AdamW)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (1e-3, (0.9, 0.95), 1e-8, True)
        assert all(group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0) for p in group["params"])


# ----------------------------------------------------------------------------- generation

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


@pytest.mark.parametrize("start, new, temperature, top_k", [
    (1, 23, 1.0, 50), (5, 60, 0.7, None), (24, 9, 1.3, 0), (40, 9, 0, 50), (5, 30, 2.0, 1),
    (40, 30, 1.0, 1000)])
def test_generate_gives_the_same_tokens_with_the_cache_as_without_past_block_size_too(
        start, new, temperature, top_k):
    model, idx = make_model(), tokens(3, start)
    ours = model.generate(idx, new, temperature, top_k, torch.Generator().manual_seed(5))
    plain = sample_without_cache(model, idx, new, temperature, top_k, torch.Generator().manual_seed(5))
    assert ours.shape == (3, start + new) and torch.equal(ours, plain)


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-30])
def test_no_or_hardly_any_temperature_takes_the_likeliest_token(temperature):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.equal(sample_token(logits.clone(), temperature, 50, None), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("top_k, kept", [(None, 4), (0, 4), (3, 3), (1, 1)])
def test_the_frequencies_are_the_softmax_over_the_k_likeliest(top_k, kept):
    logits, n = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), 20_000
    drawn = sample_token(logits.repeat(n, 1), 2.0, top_k, torch.Generator().manual_seed(0)).flatten()
    expected = (logits[0] / 2).masked_fill(logits[0].argsort(descending=True).argsort() >= kept, -math.inf)
    torch.testing.assert_close(drawn.bincount(minlength=4) / n, expected.softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature, top_k", [(0, 50), (1.0, 1), (1.0, 50), (3.0, None)])
def test_padding_ids_are_never_sampled_however_likely(temperature, top_k):
    model = make_model(vocab_size=50304, n_layer=1)
    with torch.no_grad():                   # about the last hidden state, so these logits are the largest
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB_SIZE:] = 5.0
    assert (model(tokens(2, 4))[0].argmax(-1) >= VOCAB_SIZE).all()
    assert (model.generate(tokens(2, 4), 40, temperature, top_k)[:, 4:] < VOCAB_SIZE).all()
