"""runtime/layers.py: products of few rows, shared by the cores of a CPU, are F.linear's."""
import pytest
import torch
import torch.nn.functional as F

from runtime import hardware
from runtime.layers import linear


@pytest.fixture(autouse=True)
def on_amd(monkeypatch):
    monkeypatch.setattr(hardware, "is_amd", lambda: True)


@pytest.mark.parametrize("shape, n_out, threads", [
    ((1, 1, 48), 64, 1), ((4, 1, 48), 64, 2), ((4, 48), 127, 5),    # a prime
    ((32, 48), 3, 5),                                               # fewer than threads
    ((2, 16, 48), 64, 5), ((3, 40, 48), 64, 2)])                    # prompts: few rows, and many
@torch.no_grad()
def test_linear_is_torchs_linear_layer(shape, n_out, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    x = torch.randn(shape)
    weight = torch.randn(n_out, 48)
    bias = torch.randn(n_out)

    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


@torch.no_grad()
def test_linear_takes_a_weight_that_is_stored_transposed():
    torch.manual_seed(0)
    x = torch.randn(2, 48)
    weight = torch.randn(48, 64).t()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@torch.no_grad()
def test_a_product_of_few_rows_is_shared_by_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    parts = []
    bmm = torch.bmm

    def bmm_and_remember(x, weights):
        parts.append(weights.size(0))
        return bmm(x, weights)

    monkeypatch.setattr(torch, "bmm", bmm_and_remember)
    linear(torch.randn(32, 48), torch.randn(64, 48))
    linear(torch.randn(33, 48), torch.randn(64, 48))        # these are no longer few
    assert parts == [2]

    monkeypatch.setattr(hardware, "is_amd", lambda: False)
    linear(torch.randn(32, 48), torch.randn(64, 48))
    assert parts == [2]
