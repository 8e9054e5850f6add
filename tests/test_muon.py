"""runtime/muon.py: orthogonal updates, and torch's own Muon."""
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from runtime.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (48, 12)])
def test_orthogonalize_gives_singular_values_near_one_and_keeps_the_directions(shape):
    torch.manual_seed(0)
    G = torch.randn(3, *shape)
    U, _, V = torch.linalg.svd(G, full_matrices=False)

    X = orthogonalize(G).float()

    assert X.shape == G.shape
    values = torch.linalg.svdvals(X)
    assert values.min() > 0.3
    assert values.max() < 1.3
    along = torch.einsum("bij,bjk,bki->bi", U.mT, X, V.mT)          # the diagonal of U^T X V
    assert along.min() > 0.2
    assert (along - values.mean()).abs().max() < 0.6


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_orthogonalize_multiplies_matrices_of_the_smaller_side(shape):
    X = torch.randn(1, *shape)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(X, steps=1)

    products_with_X = 2 * 8 * 8 * 32
    square = 8 * 8 * 8
    assert counter.get_total_flops() == 2 * (products_with_X + square)


def matrices():
    torch.manual_seed(0)
    shapes = [(16, 16), (32, 16), (16, 32), (16, 16), (16, 16)]
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_six_steps_are_those_of_torchs_muon_to_rounding():
    start = matrices()
    ours = matrices()
    theirs = matrices()
    our_muon = Muon(ours, lr=0.02, weight_decay=0.1)
    their_muon = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")

    for _ in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        our_muon.step()
        their_muon.step()

    for p, q, before in zip(ours, theirs, start, strict=True):
        change = q - before
        assert (p - q).norm() < 0.03 * change.norm()


def test_the_ranks_gather_a_group_while_they_compute_the_next(monkeypatch):
    """No gather is waited for before all of them are under way."""
    calls = []

    class Work:
        def wait(self):
            calls.append("wait")

    def all_gather(gathered, updates, async_op=False):
        assert async_op
        calls.append("start")
        gathered.copy_(torch.cat((updates, updates)))
        return Work()

    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, all_gather, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    params = matrices()
    muon = Muon(params, lr=0.02)
    for p in params:
        p.grad = torch.randn_like(p)

    muon.step()

    assert calls == 3 * ["start"] + 3 * ["wait"]
