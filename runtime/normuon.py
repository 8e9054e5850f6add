"""NorMuon: Muon whose rows each get the same share of an update (arXiv:2510.05491)."""
import torch
from torch import Tensor

from runtime.muon import Muon


class NorMuon(Muon):
    """Muon (see there), and after the orthogonalization each row of an update, a neuron's, is divided by the
    root of a running mean of its squares. Then the whole is scaled back to the norm that it had, so that the
    learning rate means the same as Muon's (the paper's algorithm 1 scales to AdamW's instead)."""
    STATE = ("momentum_buffer", "row_squares")
    BETA2 = 0.95

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return super().new_state(p) | {"row_squares": p.new_zeros(p.size(0), 1)}

    def apply(self, group: dict, updates: Tensor, bad: Tensor | None) -> None:
        state = [self.state[p]["row_squares"] for p in group["params"]]
        weight = 1 - self.BETA2 if bad is None else torch.where(bad > 0, 0.0, 1 - self.BETA2)
        squares = torch.stack(state).lerp(updates.square().mean(dim=-1, keepdim=True), weight)  # (n, rows, 1)
        torch._foreach_copy_(state, list(squares))
        norm = updates.norm(dim=(-2, -1), keepdim=True)                                         # (n, 1, 1)
        updates = updates * (squares + 1e-10).rsqrt()
        super().apply(group, updates * (norm / (updates.norm(dim=(-2, -1), keepdim=True) + 1e-10)), bad)
