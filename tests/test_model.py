"""model.py: GPT-2 against plain references, in memory, compiled, and in generation.

The initial weights of all recipes are in test_recipes.py.
"""
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import LargestStorage, double_precision, make_model, plain_gpt2, tokens
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig, attention
from presets import GPT2_SIZES
from recipes import RECIPES
from runtime import language_model, tokenizer
from runtime.language_model import KVCache, sample_token
from runtime.layers import head_size
from runtime.ranks import bucket_size
from runtime.tokenizer import VOCAB_SIZE

# ----------------------------------------------------------------------- shapes and initial weights

@pytest.mark.parametrize("name, count", [
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
])
def test_parameter_counts_are_those_of_the_published_sizes(name, count):
    with torch.device("meta"):
        model = GPT(GPTConfig(**GPT2_SIZES[name]))
    assert sum(p.numel() for p in model.parameters()) == count


def test_state_dict_names_are_nanogpts():
    expected = ["transformer.wte.weight", "transformer.wpe.weight"]
    for layer in range(2):
        for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            expected.append(f"transformer.h.{layer}.{part}.weight")
            expected.append(f"transformer.h.{layer}.{part}.bias")
    expected += ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]
    assert list(make_model().state_dict()) == expected


def test_the_head_is_tied_and_stays_so_in_another_dtype():
    model = make_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    model.double()
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.fixture
def drawn(monkeypatch):
    """The tensors that have been filled with random numbers, in their order."""
    tensors = []

    def remember(name):
        draw = getattr(torch.Tensor, name)

        def draw_and_remember(tensor, *arguments):
            tensors.append(tensor)
            return draw(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, name, draw_and_remember)

    remember("normal_")
    remember("uniform_")
    return tensors


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_parameter_is_drawn_twice(recipe, drawn):
    cls = RECIPES[recipe].model
    model = cls(cls.Config(24, 97, 2, 2, 32))
    numbers = [id(p) for p in drawn]
    assert len(numbers) > 0
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= {id(p) for p in model.parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_the_meta_device_nothing_is_drawn(recipe, drawn):
    cls = RECIPES[recipe].model
    with torch.device("meta"):
        cls(cls.Config(24, 97, 2, 2, 32))
    assert drawn == []


def test_a_width_that_the_heads_do_not_divide_is_an_error():
    with pytest.raises(ValueError, match="100.*7"):
        head_size(GPTConfig(n_embd=100, n_head=7))


# ----------------------------------------------------------------------- forward, loss, gradients

def plain_loss(logits, targets):
    """The mean of -log p over the targets that are not -1."""
    is_scored = targets >= 0
    log_p = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -log_p[is_scored].mean()


@pytest.mark.parametrize("kernel, gelu", [
    ("auto", "tanh"), ("auto", "none"), ("naive", "tanh")])
def test_logits_loss_and_gradients_equal_a_plain_reference_in_float64(kernel, gelu):
    model = make_model(gelu=gelu)
    model.use_attention(kernel)
    idx = tokens(3, 24)
    targets = tokens(3, 24, seed=2)
    targets[0, :5] = -1
    targets[2, 7] = -1

    weights = double_precision(model)
    expected_logits = plain_gpt2(weights, 2, idx, gelu)
    expected_loss = plain_loss(expected_logits, targets)
    expected_loss.backward()

    logits, _ = model(idx)
    _, loss = model(idx, targets)
    loss.backward()

    torch.testing.assert_close(logits.double(), expected_logits, atol=1e-4, rtol=0)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    for name, p in model.named_parameters():
        expected = weights[name].grad.float()
        largest = max(1, expected.abs().max().item())
        assert (p.grad - expected).abs().max() < 1e-5 * largest, name


def test_a_sequence_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="longer than block_size 24"):
        make_model()(tokens(1, 25))


def test_flops_a_token_agree_with_torchs_own_count():
    model = GPT(GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=2, n_embd=128))
    model.use_attention("naive")
    idx = tokens(2, 64)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    counted = counter.get_total_flops() / idx.numel()
    assert model.flops_per_token(64) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_residual_stream_is_bfloat16_under_its_autocast_and_float32_elsewhere(dtype):
    model = make_model()
    seen = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(tokens(2, 24), tokens(2, 24))[1].backward()

    expected = torch.float32
    if dtype == torch.bfloat16:
        expected = torch.bfloat16
    assert seen == [expected] * 2
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_attention_to_many_tokens_never_holds_a_score_for_each_pair():
    q = torch.randn(1, 1024, 2, 16, dtype=torch.bfloat16)
    with LargestStorage() as seen:
        y = attention(q, q, q)
    assert seen.bytes < 1024 * 1024
    torch.testing.assert_close(y, attention(q, q, q, "naive"), atol=0.02, rtol=0.02)


# ----------------------------------------------------------------------- recomputed, compiled

def loss_gradients_and_kept(model, call, dtype=torch.float32):
    """Of call(idx, targets): the loss, the gradients, and the tensors kept for the backward."""
    idx = tokens(2, 24)
    targets = tokens(2, 24, seed=2)
    targets[0, :4] = -1
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    def give_back(tensor):
        return tensor

    model.zero_grad()
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        loss = call(idx, targets)[1]
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    return loss.detach(), gradients, kept


@functools.cache
def eager_and_in_one_graph(recipe, dtype):
    """loss_gradients_and_kept of a model, and of the same one compiled.

    The graph is that of Inductor, whose C++ would take most of a minute to compile.
    """
    model = make_model(cls=RECIPES[recipe].model, spread=0.02, n_layer=1, n_embd=32)
    compiled = torch.compile(
        model, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    eager = loss_gradients_and_kept(model, model, dtype)
    return eager, loss_gradients_and_kept(model, compiled, dtype)


@pytest.mark.parametrize("recipe, dtype, tolerance", [
    ("gpt2", torch.float32, 2e-5),
    ("frontier", torch.float32, 2e-5),          # which has all layers of speedrun
])
def test_compiled_in_one_graph_loss_and_gradients_equal_eager(recipe, dtype, tolerance):
    in_eager, in_one_graph = eager_and_in_one_graph(recipe, dtype)
    loss, gradients, _ = in_eager
    loss_in_graph, gradients_in_graph, _ = in_one_graph

    assert loss_in_graph.item() == pytest.approx(loss.item(), rel=tolerance)
    for eager, in_graph in zip(gradients, gradients_in_graph, strict=True):
        # Learned scalars are differences of large sums: they are compared in float32 only.
        if dtype == torch.float32 or eager.numel() > 2:
            assert (in_graph - eager).norm() <= tolerance * eager.norm() + 1e-6


def test_a_compiled_model_does_not_keep_what_comes_out_of_gelu():
    in_eager, in_one_graph = eager_and_in_one_graph("gpt2", torch.float32)
    _, _, kept = in_eager
    _, _, kept_by_graph = in_one_graph

    size_in_mlp = 2 * 24 * 4 * 32
    assert sum(tensor.numel() == size_in_mlp for tensor in kept) == 2
    assert sum(tensor.numel() == size_in_mlp for tensor in kept_by_graph) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_blocks_have_the_same_gradients_and_keep_less(recipe):
    model = make_model(cls=RECIPES[recipe].model, spread=0.02, block_size=32, n_layer=3, n_embd=32)
    loss, gradients, kept = loss_gradients_and_kept(model, model)

    model.recompute_blocks()
    loss_again, gradients_again, kept_again = loss_gradients_and_kept(model, model)

    assert torch.equal(loss, loss_again)
    for once, again in zip(gradients, gradients_again, strict=True):
        assert torch.equal(once, again)
    bytes_kept = sum({t.data_ptr(): t.nbytes for t in kept}.values())
    bytes_kept_again = sum({t.data_ptr(): t.nbytes for t in kept_again}.values())
    inputs_of_blocks = 3 * 2 * 24 * 32 * 4
    assert inputs_of_blocks <= bytes_kept_again < bytes_kept / 2


@pytest.fixture
def one_rank():
    """A process group of this process alone, without which there is no DDP."""
    torch.compiler.reset()              # it compiles only so many versions of a model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def inputs_of_graphs(model):
    """Of each graph into which DDP divides the compiled model, what the graphs before it made."""
    found = []

    def backend(graph, inputs):
        made = []
        for tensor in inputs:
            if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
                made.append(tensor)
        found.append(made)
        return graph.forward

    compiled = torch.compile(model, backend=backend, dynamic=False)
    ddp_model = DDP(compiled, bucket_cap_mb=bucket_size(model))
    with torch.autocast("cpu", torch.bfloat16):
        ddp_model(tokens(1, 8), tokens(1, 8))
    return found


@pytest.mark.parametrize("recipe, width, n_layer, most_graphs", [
    ("gpt2", 1024, 2, 4), ("frontier", 768, 5, 4),
])
def test_several_gpus_divide_a_compiled_model_where_little_is_stored(
    recipe, width, n_layer, most_graphs, one_rank
):
    """Between blocks, in frontier four of them, or after the head: what is stored is narrow, and in
    bfloat16. Of the head the losses remain, one number a token.
    """
    cls = RECIPES[recipe].model
    model = cls(cls.Config(vocab_size=512, n_layer=n_layer, n_head=4, n_embd=width))

    graphs = inputs_of_graphs(model)

    assert 2 < len(graphs) <= most_graphs
    for inputs in graphs[1:]:
        assert inputs
        for tensor in inputs:
            is_loss = tensor.numel() in (1, 8)              # the mean, or one of each token
            assert is_loss or tensor.dtype == torch.bfloat16
            assert is_loss or tensor.size(-1) <= width


# ----------------------------------------------------------------------- optimizers

def test_matrices_and_embeddings_decay_and_every_parameter_is_optimised_once():
    model = make_model()
    optimizer = model.configure_optimizers(max_lr=1e-3, weight_decay=0.1)

    assert isinstance(optimizer, torch.optim.AdamW)
    optimised = []
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-3
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        assert group["fused"]
        for p in group["params"]:
            weight_decay = 0.0
            if p.dim() >= 2:
                weight_decay = 0.1
            assert group["weight_decay"] == weight_decay
            optimised.append(id(p))
    assert sorted(optimised) == sorted(id(p) for p in model.parameters())


# ----------------------------------------------------------------------- generation

def sample_without_cache(model, idx, max_new_tokens, temperature, top_k, generator):
    """The plain way: a whole forward of the last block_size tokens for each new one."""
    for _ in range(max_new_tokens):
        context = idx[:, -model.config.block_size:]
        logits = model(context)[0][:, -1, :VOCAB_SIZE].detach()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            if top_k:
                descending = logits.sort(dim=-1, descending=True).values
                least = descending[:, [min(top_k, logits.size(1)) - 1]]
                logits = torch.where(logits >= least, logits, -math.inf)
            p = (logits / temperature).softmax(-1)
            new = torch.multinomial(p, 1, generator=generator)
        idx = torch.cat((idx, new), dim=1)
    return idx


@pytest.mark.parametrize("start, new, temperature, top_k", [
    (1, 23, 1.0, 50),
    (5, 60, 0.7, None),
    (24, 9, 1.3, 0),
    (40, 9, 0, 50),
    (5, 30, 2.0, 1),
    (40, 30, 1.0, 1000),
])
def test_tokens_are_the_same_with_the_cache_as_without(start, new, temperature, top_k):
    """Beyond block_size, which is 24, too."""
    model = make_model()
    idx = tokens(3, start)

    generator = torch.Generator().manual_seed(5)
    found = model.generate(idx, new, temperature, top_k, generator)
    generator = torch.Generator().manual_seed(5)
    expected = sample_without_cache(model, idx, new, temperature, top_k, generator)

    assert found.shape == (3, start + new)
    assert torch.equal(found, expected)


def test_generation_knows_the_size_of_gpt2s_vocabulary():
    assert language_model.VOCAB_SIZE == tokenizer.VOCAB_SIZE


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-30])
def test_no_or_hardly_any_temperature_takes_the_likeliest_token(temperature):
    torch.manual_seed(0)
    logits = 30 * torch.randn(4, 300)
    found = sample_token(logits.clone(), temperature, 50, None)
    assert torch.equal(found, logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("top_k, expected_logits", [
    (None, [0.0, 1.0, 2.0, -1.0]),
    (0, [0.0, 1.0, 2.0, -1.0]),
    (3, [0.0, 1.0, 2.0, -math.inf]),
    (1, [-math.inf, -math.inf, 2.0, -math.inf]),
])
def test_the_frequencies_are_the_softmax_over_the_k_likeliest(top_k, expected_logits):
    n = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(n, 1)
    drawn = sample_token(logits, 2.0, top_k, torch.Generator().manual_seed(0))
    frequencies = drawn.flatten().bincount(minlength=4) / n
    expected = F.softmax(torch.tensor(expected_logits) / 2.0, dim=-1)
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)


@pytest.mark.parametrize("temperature, top_k", [(0, 50), (1.0, 1), (1.0, 50), (3.0, None)])
def test_padding_ids_are_never_sampled_however_likely(temperature, top_k):
    model = make_model(vocab_size=50304, n_layer=1)
    with torch.no_grad():
        # About the last hidden state. So these logits are the largest.
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[VOCAB_SIZE:] = 5.0
    assert (model(tokens(2, 4))[0].argmax(-1) >= VOCAB_SIZE).all()

    new = model.generate(tokens(2, 4), 40, temperature, top_k)[:, 4:]

    assert (new < VOCAB_SIZE).all()


# ----------------------------------------------------------------- large logits, small numbers

SOFTCAP = 30.0


@torch.no_grad()
def enlarge_logits(model, factor):
    """Logits `factor` times as large, before a softcap. The modern models norm their embedding."""
    model.lm_head.weight *= factor              # in gpt2 and frontier it is the embedding, too
    if "part" in model.transformer:             # frontier adds it to the embedding
        model.transformer.part.weight *= factor


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
@torch.no_grad()
def test_logits_are_a_tanh_of_the_heads_output_computed_in_float32(recipe):
    """bfloat16 would round 29.98 to 30."""
    model = make_model(cls=RECIPES[recipe].model)
    x = SOFTCAP * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, model.head()).float()
        found = model.logits(x)

    assert y.abs().max() > SOFTCAP
    torch.testing.assert_close(found, SOFTCAP * torch.tanh(y / SOFTCAP), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_the_losses_of_tokens_are_those_of_forward(recipe, dtype):
    model = make_model(cls=RECIPES[recipe].model)
    enlarge_logits(model, 20)
    idx = tokens(3, 24)
    targets = tokens(3, 24, seed=2)
    targets[:, ::3] = -1
    positions = (targets >= 0).flatten().nonzero().flatten()

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        losses = model.token_losses(idx, targets, positions)
        logits = model(idx)[0].float()
        mean = model(idx, targets)[1]

    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    assert losses.shape == (3, 24)
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-4, atol=1e-4)
    assert mean.item() == pytest.approx(plain_loss(logits, targets).item(), rel=1e-4)


@torch.no_grad()
def test_of_all_tokens_only_those_that_are_scored_have_logits():
    model = make_model(vocab_size=640)
    idx = tokens(4, 24)
    with LargestStorage() as largest:
        model.token_losses(idx, idx, torch.tensor([5, 40]))
    bytes_of_all_logits = 4 * 24 * 640 * 4
    assert largest.bytes < bytes_of_all_logits


@pytest.mark.parametrize("recipe, temperature", [("gpt2", 150), ("speedrun", 7), ("frontier", 7)])
@torch.no_grad()
def test_two_sampled_tokens_have_the_frequencies_of_forwards_softmax(recipe, temperature):
    """The second token is sampled with the cache. Large logits tell a softcap from none."""
    V, n = 10, 20_000
    model = make_model(cls=RECIPES[recipe].model, vocab_size=V, n_layer=1)
    enlarge_logits(model, 40)
    idx = tokens(1, 5, vocab_size=V)
    generator = torch.Generator().manual_seed(1)

    pairs = model.generate(idx.repeat(n, 1), 2, temperature, None, generator)[:, 5:]

    first = (model(idx)[0][0, -1] / temperature).softmax(-1)
    every_first = torch.arange(V)[:, None]
    longer = torch.cat((idx.repeat(V, 1), every_first), dim=1)
    second = (model(longer)[0][:, -1] / temperature).softmax(-1)
    expected = (first[:, None] * second).flatten()
    found = (pairs[:, 0] * V + pairs[:, 1]).bincount(minlength=V * V) / n
    assert 0.02 < expected.max() < 0.3
    assert (found - expected).abs().sum() / 2 < 0.05        # a fair sample is 0.02 away


def test_probabilities_are_float32_in_bfloat16_too(monkeypatch):
    """Of 50,257 numbers with 8 bits each the sum is off by percents."""
    probabilities = []
    draw = torch.multinomial

    def draw_and_remember(p, **how):
        probabilities.append(p)
        return draw(p, **how)

    monkeypatch.setattr(torch, "multinomial", draw_and_remember)
    with torch.autocast("cpu", torch.bfloat16):
        make_model().generate(tokens(2, 5), 3)

    assert len(probabilities) == 3
    for p in probabilities:
        assert p.dtype == torch.float32
        assert (p.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_generation_casts_the_head_once_and_not_for_each_token(recipe, monkeypatch):
    model = make_model(cls=RECIPES[recipe].model)
    heads = []
    linear = F.linear

    def linear_and_remember(x, weight, *bias):
        if weight.size(0) == model.config.vocab_size:
            heads.append(weight)
        return linear(x, weight, *bias)

    monkeypatch.setattr(F, "linear", linear_and_remember)
    model.checked_room = 9                  # the cache has been compared with whole forwards
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(tokens(2, 5), 4)

    assert len(heads) == 4
    assert all(head is heads[0] for head in heads)
    if recipe == "frontier":
        assert heads[0].dtype == torch.bfloat16
    else:
        assert heads[0] is model.lm_head.weight         # autocast keeps its cast


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_generation_computes_no_gradients(recipe, monkeypatch):
    model = make_model(cls=RECIPES[recipe].model)
    hidden = model.hidden
    states = []

    def noted_hidden(*inputs):
        states.append(hidden(*inputs))
        return states[-1]

    monkeypatch.setattr(model, "hidden", noted_hidden)
    model.generate(tokens(2, 5), 3)
    assert [x.requires_grad for x in states] == [False] * (5 + 3)       # five to compare the cache


@torch.no_grad()
def test_the_cache_has_room_for_the_tokens_of_a_generation_alone():
    model = make_model(block_size=4096)
    with LargestStorage() as largest:
        model.generate(tokens(1, 5), 3)
    bytes_of_keys_of_all_positions = 4096 * 16 * 4
    assert largest.bytes < bytes_of_keys_of_all_positions


def test_the_cache_appends_without_copying_what_it_holds():
    cache = KVCache(room=5)
    layer = torch.nn.Identity()
    [first] = cache.append(layer, torch.tensor([[[1.0], [2.0]]]))
    cache.length = 2
    [second] = cache.append(layer, torch.tensor([[[3.0]]]))
    assert second.flatten().tolist() == [1, 2, 3]
    assert second.data_ptr() == first.data_ptr()


def test_by_default_a_token_is_one_of_the_50_likeliest_at_temperature_1():
    model = make_model()
    idx = tokens(4, 5)
    generator = torch.Generator().manual_seed(3)
    found = model.generate(idx, 19, generator=generator)
    generator = torch.Generator().manual_seed(3)
    expected = model.generate(idx, 19, 1.0, 50, generator)
    assert torch.equal(found, expected)
