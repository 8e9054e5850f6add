"""train_gpt2.py's learning rates, set-up, and one step: the gradient, its clipping, the update."""
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import Batches, GpuProcess, make_model, make_run, tokens
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train_gpt2
from config import Config
from model import GPT
from recipes import RECIPES
from runtime.ranks import Process, Stopped
from runtime.recipe import Recipe
from train_gpt2 import GPT2, begin_step, complete, train_step, warmup_cosine

# ----------------------------------------------------------------------- schedules

@pytest.mark.parametrize("step, expected", [
    (0, 0.1), (8, 0.9), (9, 1.0),                                       # the warm-up
    (10, 1.0), (40, 0.775), (55, 0.55), (70, 0.325), (100, 0.1),        # the cosine
])
def test_the_rate_rises_linearly_and_falls_as_a_cosine_to_min_lr(step, expected):
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(step, config) == pytest.approx(expected)


@pytest.mark.parametrize("warmup_steps, step, expected", [
    (0, 0, 1.0),                # without a warm-up the first step has max_lr
    (100, 99, 1.0),             # a run may end in its warm-up
    (200, 99, 0.5),
])
def test_a_run_may_have_no_warmup_or_nothing_else(warmup_steps, step, expected):
    config = Config(max_steps=100, warmup_steps=warmup_steps, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(step, config) == pytest.approx(expected)


def test_a_recipe_that_is_a_model_alone_is_trained_as_gpt2():
    class Another(GPT):
        recipe = "another"

    found = complete(Recipe(Another))
    assert found.model is Another
    assert (found.make_optimizers, found.lr_scale) == (GPT2.make_optimizers, warmup_cosine)
    assert complete(RECIPES["speedrun"]) is RECIPES["speedrun"]


def speedrun(max_steps=10):
    """A run whose rate falls to a tenth in its second half."""
    return make_run(
        recipe="speedrun", cooldown=0.5, max_lr=0.02, min_lr=0.002, max_steps=max_steps)


def rates_of(run):
    return [group["lr"] for group in run.state.optimizer.groups()]


def test_each_group_of_an_optimizer_keeps_its_share_of_the_rate():
    run = speedrun()
    peaks = rates_of(run)
    assert len(set(peaks)) > 2

    lr = begin_step(9, run)

    scale = 0.1 + 0.9 * 0.2         # a fifth of the fall is left
    assert lr == pytest.approx(0.02 * scale)
    assert rates_of(run) == pytest.approx([scale * peak for peak in peaks])


def test_the_rates_of_a_step_do_not_depend_on_the_steps_before():
    run = speedrun()
    peaks = rates_of(run)
    for step in (9, 9, 3):              # a repeated step, and one back
        lr = begin_step(step, run)
    assert lr == pytest.approx(0.02)
    assert rates_of(run) == pytest.approx(peaks)


@pytest.mark.parametrize("step, expected", [(0, 0.85), (77, 0.9), (154, 0.95), (999, 0.95)])
def test_muons_momentum_rises_over_the_first_154_of_1000_steps(step, expected):
    run = speedrun(max_steps=1000)
    begin_step(step, run)
    groups = run.state.optimizer.groups()
    momenta = {group["momentum"] for group in groups if "momentum" in group}
    assert list(momenta) == pytest.approx([expected])


# ----------------------------------------------------------------------- set-up

def test_attention_and_recompute_reach_the_model():
    plain = make_run().state.model
    other = make_run(attention="naive", recompute=True).state.model
    for model, is_recomputed in ((plain, False), (other, True)):
        assert all(("forward" in vars(block)) == is_recomputed for block in model.transformer.h)
    for model, kernel in ((plain, "auto"), (other, "naive")):
        assert {block.attn.kernel for block in model.transformer.h} == {kernel}


@pytest.mark.parametrize("tf32, expected", [(True, "high"), (False, "highest")])
def test_tf32_is_set_on_a_gpu_alone(tf32, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)

    make_run(tf32=tf32)
    assert calls == []

    make_run(tf32=tf32, process=GpuProcess())
    assert calls == [expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float16_has_a_scaler_and_other_dtypes_have_none(dtype):
    state = make_run(dtype=dtype).state
    assert state.scaler.is_enabled() == (dtype == "float16")
    with state.autocast:
        y = F.linear(torch.ones(1, 4), torch.ones(4, 4))
    assert y.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_the_rotary_tables_are_constants_of_a_compiled_model(recipe, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile = functools.partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile)
    state = make_run(recipe=recipe, compile=True).state
    idx = tokens(2, 9)
    logits, _ = state.compiled_model(idx)

    [graph] = graphs
    operations = {str(node.target) for node in graph.graph.nodes}
    assert "chunk" in operations, "rotate is in the graph"
    assert not operations & {"cos", "sin"}, "rotary_tables is not"
    assert torch.equal(logits, state.model(idx)[0])


# ----------------------------------------------------------------------- a step

def one_step(micro_steps=2, **options):
    """A step on eight sequences. Returns ([loss, norm, votes], the state after it)."""
    run = make_run(**options)
    run.loader = Batches(micro_steps)
    return train_step(0, run).tolist(), run.state


def gradients_of_eight_sequences():
    """(loss, gradients, their norm), by one backward of all."""
    model = make_model()
    rows = tokens(8, 25)
    logits, _ = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return loss.item(), gradients, torch.nn.utils.get_total_norm(gradients).item()


def has_fresh_weights(state):
    pairs = zip(make_model().parameters(), state.model.parameters(), strict=True)
    return all(torch.equal(p, after) for p, after in pairs)


@pytest.fixture
def updates(monkeypatch):
    """For each update of the weights the gradients that reach it. It changes nothing."""
    seen = []

    def remember_gradients(optimizer):
        [group] = optimizer.param_groups            # the parameters of the model, in its order
        seen.append([p.grad.clone() for p in group["params"]])

    monkeypatch.setattr(train_gpt2.CombinedOptimizer, "step", remember_gradients)
    return seen


@pytest.mark.parametrize("micro_steps", [1, 2, 4, 8])
def test_accumulation_equals_one_large_batch(micro_steps, updates):
    expected_loss, expected_gradients, expected_norm = gradients_of_eight_sequences()

    (loss, norm, votes), _ = one_step(micro_steps, grad_clip=math.inf)

    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert votes == 0
    [gradients] = updates
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("grad_clip, factor", [
    (math.inf, 1.0), (2.0, 1.0), (0.5, 0.5), (0.25, 0.25)])
def test_a_gradient_longer_than_grad_clip_is_scaled_down_to_it(grad_clip, factor, updates):
    """`factor`: times the gradient, if its norm were 1."""
    _, _, norm = gradients_of_eight_sequences()

    (_, reported, _), _ = one_step(grad_clip=grad_clip * norm)

    [gradients] = updates
    found = torch.nn.utils.get_total_norm(gradients).item()
    assert found == pytest.approx(factor * norm, rel=1e-4)
    assert reported == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_step_is_adamws_with_its_weight_decay(weight_decay):
    before = make_model()
    _, gradients, _ = gradients_of_eight_sequences()

    _, state = one_step(grad_clip=math.inf, weight_decay=weight_decay, max_lr=0.01)

    pairs = zip(before.parameters(), state.model.parameters(), gradients, strict=True)
    for p, after, gradient in pairs:
        decay = weight_decay if p.dim() >= 2 else 0.0
        update = gradient / (gradient.abs() + 1e-8)         # AdamW's first step: the sign
        expected = p * (1 - 0.01 * decay) - 0.01 * update
        has_gradient = gradient.abs() > 1e-5
        torch.testing.assert_close(after[has_gradient], expected[has_gradient], atol=2e-5, rtol=0)


def test_a_signal_drops_the_step_of_a_single_process():
    run = make_run(process=Process(signal="SIGTERM"))
    with pytest.raises(Stopped):
        train_step(0, run)
    assert has_fresh_weights(run.state)


@pytest.mark.parametrize("grad_clip", [0.3, math.inf])
def test_float16_is_scaled_for_the_backward_and_not_for_the_clipping_and_the_update(
        grad_clip, updates):
    """A gradient that is still scaled is 65,536 times as large."""
    numbers, _ = one_step(dtype="float32", grad_clip=grad_clip)
    numbers_of_float16, _ = one_step(dtype="float16", grad_clip=grad_clip)

    assert numbers_of_float16 == pytest.approx(numbers, rel=0.01)
    gradients, gradients_of_float16 = updates
    for gradient, of_float16 in zip(gradients, gradients_of_float16, strict=True):
        assert (of_float16 - gradient).norm() < 0.02 * gradient.norm()


def test_after_an_overflow_float16s_scale_is_halved_and_the_weights_are_the_same():
    run = make_run(dtype="float16")
    run.state.model.transformer.wte.weight.register_hook(lambda gradient: gradient * torch.inf)
    train_step(0, run)
    assert run.state.scaler.get_scale() == 2**15
    assert has_fresh_weights(run.state)


# ----------------------------------------------------------------------- several ranks

@pytest.fixture
def group():
    """A process group of this process alone: DDP and all_reduce work, and change nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run_of_two(group):
    """Of one of two ranks, with four micro-steps."""
    run = make_run(process=Process(world_size=2))
    run.loader = Batches(4)
    yield run
    # If DDP outlived its group, it would end gloo's thread while it holds Python's lock (the GIL),
    # for which that thread may wait.
    run.state.ddp_model = None


def test_ddps_sync_flag_is_set_before_the_forward_of_the_last_micro_step_only(run_of_two):
    flags = []

    def remember_flag(ddp, inputs):
        flags.append(ddp.require_backward_grad_sync)

    run_of_two.state.ddp_model.register_forward_pre_hook(remember_flag)
    for step in range(2):
        train_step(step, run_of_two)

    assert flags == [False, False, False, True] * 2


def test_on_gpus_gradients_stay_in_ddps_buckets_from_step_to_step(run_of_two):
    """There is no second copy. If they were None, micro-steps would accumulate into other memory.

    (DDP makes its buckets anew after the first step, in the order of the backward.)
    """
    run_of_two.process = GpuProcess(world_size=2)
    assert run_of_two.state.ddp_model.gradient_as_bucket_view
    parameters = list(run_of_two.state.model.parameters())
    places = []
    for step in range(3):
        train_step(step, run_of_two)
        places.append([p.grad.data_ptr() for p in parameters])

    assert places[1] == places[2]
    assert not any(p.grad.any() for p in parameters)


def test_each_gradient_is_sent_once_in_a_step(run_of_two):
    sent = []

    def send(_, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    run_of_two.state.ddp_model.register_comm_hook(None, send)
    train_step(0, run_of_two)

    assert sum(sent) == sum(p.numel() for p in run_of_two.state.model.parameters())


@pytest.mark.parametrize("process, micro_steps, are_kept", [
    (GpuProcess(world_size=2), [4, 4], True),
    (GpuProcess(world_size=2), [4, 1], True),
    (GpuProcess(world_size=2), [1, 4], False),          # the batch grows
    (GpuProcess(world_size=1), [4, 4], False),
    (Process(world_size=2), [4, 4], False),             # or a resumed run had other bits
])
def test_gradients_are_kept_where_ddp_accumulates_on_gpus(
        process, micro_steps, are_kept, run_of_two):
    run_of_two.process = process
    run_of_two.loader.micro_steps = lambda step: micro_steps[step]
    train_step(0, run_of_two)
    for p in run_of_two.state.model.parameters():
        assert (p.grad is not None) == are_kept


@pytest.mark.parametrize("signal, expected_votes", [("", 1), ("SIGTERM", 2)])
def test_the_ranks_add_their_losses_and_their_votes_to_stop(
        signal, expected_votes, group, monkeypatch):
    def add_another_rank(sums):
        sums += torch.tensor([5.0, 1.0])

    monkeypatch.setattr(dist, "all_reduce", add_another_rank)
    own_loss, _, _ = gradients_of_eight_sequences()

    (loss, _, votes), _ = one_step(process=Process(world_size=2, signal=signal))

    assert loss == pytest.approx((own_loss + 5) / 2, abs=1e-5)
    assert votes == expected_votes
