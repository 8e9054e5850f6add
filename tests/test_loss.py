"""runtime/loss.py: the loss and its gradients in chunks of tokens are those of all at once."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peers import LargestStorage, tokens
from torch.utils.flop_counter import FlopCounterMode

from frontier import FrontierGPT
from model import GPT, GPTConfig
from runtime.loss import VocabularySample, chunked_cross_entropy, cross_entropy_in_place


def plain_loss(x, weight, targets, softcap):
    logits = x @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1)


@pytest.mark.parametrize("chunk, vocab_size, softcap, scale", [
    (1, 50, 0.0, 1),
    (7, 50, 30.0, 7),
    (64, 50, 0.0, 70),          # exp of these logits would overflow
    (64, 50, 30.0, 70),
    (64, 150_000, 15.0, 1),     # the cache's tiles are smaller than the chunk: 2 rows a thread
])
def test_the_chunked_loss_is_the_whole_one_with_its_gradients(chunk, vocab_size, softcap, scale):
    torch.manual_seed(0)
    x = (scale * torch.randn(19, 8).double()).requires_grad_()
    weight = torch.randn(vocab_size, 8).double().requires_grad_()
    targets = torch.randint(0, vocab_size, (19,))
    targets[::5] = -1

    # Three times, because the backward must pass on what comes after the loss.
    whole = 3 * plain_loss(x, weight, targets, softcap)
    chunked = 3 * chunked_cross_entropy(x, weight, targets, chunk, softcap)[1]

    # The loss and the probabilities are float32 inside.
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-5)
    expected = torch.autograd.grad(whole, (x, weight))
    found = torch.autograd.grad(chunked, (x, weight))
    for gradient, expected_gradient in zip(found, expected, strict=True):
        error = (gradient - expected_gradient).norm()
        assert error <= 1e-5 * expected_gradient.norm()


def test_the_losses_of_the_tokens_are_returned_too_without_a_gradient():
    torch.manual_seed(0)
    x = torch.randn(19, 8).requires_grad_()
    weight = torch.randn(50, 8)
    targets = torch.randint(0, 50, (19,))
    targets[::5] = -1
    losses, mean = chunked_cross_entropy(x, weight, targets, 7, 0.0)

    expected = F.cross_entropy(x @ weight.t(), targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    assert not losses.requires_grad
    assert mean.item() == pytest.approx(losses[targets >= 0].mean().item())


@pytest.mark.parametrize("with_gradients, products", [(True, 3), (False, 1)])
def test_an_evaluation_computes_no_products_for_gradients(with_gradients, products):
    x = torch.randn(10, 8)
    weight = torch.randn(50, 8)
    with torch.set_grad_enabled(with_gradients), FlopCounterMode(display=False) as counter:
        chunked_cross_entropy(x, weight, torch.arange(10), 4, 0.0)
    assert counter.get_total_flops() == products * 2 * 10 * 50 * 8


def test_the_loss_is_computed_for_rows_that_fit_into_the_cache_of_a_core(monkeypatch):
    """7 rows of 50,304 numbers in float32 take 1.4 MB."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rows = []

    def noted_cross_entropy(logits, *more):
        rows.append(len(logits))
        return cross_entropy_in_place(logits, *more)

    monkeypatch.setattr("runtime.loss.cross_entropy_in_place", noted_cross_entropy)
    weight = torch.randn(50304, 4)
    chunked_cross_entropy(torch.randn(20, 4), weight, torch.arange(20), 16, 0.0)
    assert rows == [7, 7, 2, 4]


def small_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=640, n_layer=2, n_head=2, n_embd=32))


@pytest.mark.parametrize("dtype, loss_tolerance, tolerance", [
    (torch.float32, 2e-6, 1e-5), (torch.bfloat16, 2e-3, 0.03)])
def test_a_model_trains_the_same_with_it(dtype, loss_tolerance, tolerance):
    model = small_model()
    idx = tokens(4, 32, vocab_size=640)
    targets = tokens(4, 32, vocab_size=640, seed=2)
    targets[0, :9] = -1

    losses, gradients = [], []
    for in_chunks in (False, True):
        if in_chunks:
            assert model.use_chunks(16)
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            _, loss = model(idx, targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in model.parameters()])

    assert losses[1] == pytest.approx(losses[0], abs=loss_tolerance)
    for whole, chunked in zip(*gradients, strict=True):
        assert (chunked - whole).norm() <= tolerance * whole.norm()


def test_no_tensor_has_the_logits_of_all_tokens():
    model = small_model()
    assert model.use_chunks(16)
    idx = tokens(4, 32, vocab_size=640)
    with LargestStorage() as seen:
        model(idx, idx)
    assert seen.bytes < idx.numel() * 640 * 2, "bytes of all logits in bfloat16"


def test_the_loss_is_the_same_without_gradients():
    model = small_model()
    assert model.use_chunks(16)
    idx = tokens(4, 32, vocab_size=640)
    _, loss = model(idx, idx)
    with torch.no_grad():
        _, loss_without = model(idx, idx)
    assert loss_without.item() == loss.item()


def test_in_bfloat16_the_chunks_gradients_are_added_up_in_float32():
    """Sums that are rounded to 8 bits after each of 128 chunks would be some percents off."""
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    targets = torch.randint(0, 40, (1024,))
    weight = torch.randn(40, 8).requires_grad_()

    gradients = []
    for chunk in (8, 1024):
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = chunked_cross_entropy(x, weight, targets, chunk, 0.0)
        gradients += torch.autograd.grad(loss, weight)

    in_chunks, at_once = gradients
    assert (in_chunks - at_once).norm() < 0.003 * at_once.norm()


def test_in_float16_the_gradients_of_unlikely_tokens_survive_the_chunks():
    """p / N is 2e-8 here, which float16 does not hold; the scale comes only in the backward."""
    torch.manual_seed(0)
    x = torch.randn(2048, 8).requires_grad_()
    weight = (0.1 * torch.randn(20_000, 8)).requires_grad_()
    targets = torch.randint(0, 20_000, (2048,))

    gradients = []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            _, loss = chunked_cross_entropy(x, weight, targets, 1024, 0.0)
        gradients.append(torch.autograd.grad(65536.0 * loss, (x, weight)))

    for exact, rounded in zip(*gradients, strict=True):
        assert (rounded - exact).norm() < 0.01 * exact.norm()


# ----------------------------------------------------------------------- a sample of the vocabulary

def problem_of_many_rare_tokens():
    """x, weight, targets, and how often each of 2,000 tokens occurs: most of them never."""
    torch.manual_seed(0)
    occurrences = 100_000 // np.arange(1, 2001) ** 2
    x = torch.randn(12, 8).double().requires_grad_()
    weight = 0.3 * torch.randn(2000, 8).double()
    weight[:, 0] += torch.from_numpy(occurrences + 0.1).log() / 8
    targets = torch.tensor([0, 1, 2, 3, 0, -1, 700, 1999, 5, 0, 40, 0])
    return x, weight.requires_grad_(), targets, occurrences


def sampled_loss(x, weight, targets, sample, softcap):
    ids, places, counts = sample.choose(targets)
    return chunked_cross_entropy(x, weight[ids], places, 7, softcap, counts)[1]


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_a_sampled_loss_weighs_each_logit(softcap):
    x, weight, targets, occurrences = problem_of_many_rare_tokens()
    sample = VocabularySample(occurrences, seed=0)
    assert sample.counts[700] == 0, "a target that the sample lacks"
    sample.draw(0, tokens=targets.clamp(min=0))

    logits = x @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    scored = targets >= 0
    totals = (logits[scored].exp() * sample.counts).sum(dim=1)
    expected = (totals.log() - logits[scored, targets[scored]]).mean()
    found = sampled_loss(x, weight, targets, sample, softcap)

    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, expected_gradient in zip(
            torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)),
            strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def test_the_mean_over_many_samples_is_the_whole_loss_with_its_gradients(softcap=15.0):
    x, weight, targets, occurrences = problem_of_many_rare_tokens()
    whole = plain_loss(x, weight, targets, softcap)
    expected = [whole, *torch.autograd.grad(whole, (x, weight))]

    means = [torch.zeros_like(tensor) for tensor in expected]
    sample = VocabularySample(occurrences, seed=0)
    for step in range(500):
        sample.draw(step, targets.clamp(min=0))
        loss = sampled_loss(x, weight, targets, sample, softcap)
        gradients = torch.autograd.grad(loss, (x, weight))
        for mean, tensor in zip(means, (loss, *gradients), strict=True):
            mean += tensor / 500

    assert means[0].item() == pytest.approx(whole.item(), rel=0.01)
    for mean, gradient in zip(means[1:], expected[1:], strict=True):
        assert (mean - gradient).norm() < 0.06 * gradient.norm()


def test_a_sample_has_all_frequent_tokens_those_of_the_step_and_few_others():
    *_, occurrences = problem_of_many_rare_tokens()
    sample = VocabularySample(occurrences, seed=0)
    sample.draw(7, torch.tensor([[1998, 0], [1999, 0]]))
    assert sample.counts[[1998, 1999]].tolist() == [1, 1]
    frequent = occurrences > occurrences.sum() / 20_000
    assert (sample.counts[frequent] == 1).all()
    drawn = (sample.counts[occurrences == 0] > 0).float().mean()
    assert drawn == pytest.approx(1 / 16, abs=0.02)


def test_a_sample_follows_from_the_seed_and_the_step():
    *_, occurrences = problem_of_many_rare_tokens()
    draws = []
    for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5)):
        sample = VocabularySample(occurrences, seed)
        sample.draw(step, torch.tensor([3]))
        draws.append(sample.counts)

    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert not draws[0].equal(draws[3])


def test_a_sampled_loss_does_not_depend_on_the_rest_of_the_micro_batch():
    """Otherwise the number of processes would change it by more than rounding."""
    x, weight, targets, occurrences = problem_of_many_rare_tokens()
    sample = VocabularySample(occurrences, seed=0)
    assert sample.counts[700] == 0, "a target that is not drawn"
    sample.draw(0, targets.clamp(min=0))

    whole = sampled_loss(x, weight, targets, sample, 15.0) * 11         # one of 12 is ignored
    halves = 0
    for part, count in ((slice(0, 6), 5), (slice(6, 12), 6)):
        halves += sampled_loss(x[part], weight, targets[part], sample, 15.0) * count
    assert halves.item() == pytest.approx(whole.item(), rel=1e-6)


def test_an_evaluation_computes_all_logits():
    torch.manual_seed(0)
    model = FrontierGPT(FrontierGPT.Config(32, 640, 2, 2, 32))
    assert model.use_chunks(16)
    idx = tokens(4, 32, vocab_size=640)
    with torch.no_grad():
        _, whole = model(idx, idx)
        model.vocabulary_sample = VocabularySample(np.arange(640) == 0, seed=0)
        _, again = model(idx, idx)
    _, sampled = model(idx, idx)
    assert again.item() == whole.item()
    assert sampled.item() != whole.item()
