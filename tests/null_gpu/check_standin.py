"""The simulated GPU detects what the other checks rely on, in a script that does it all wrong."""
import re

import pytest
from standin import GiB, compiled_once, nothing_waits

BAD = """
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)

@torch.compile
def loss(x):
    y = model(x)
    torch._dynamo.graph_break()
    return y.square().mean()

try:
    torch.empty(80 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("80 GiB do not fit")
for step in range(9):
    x = torch.randn(8 + (step >= 5), 64, device="cuda")
    value = loss(x)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        print(value.item())
    if step == 6:
        torch.zeros(4).to("cuda")
    if step == 7:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
held = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
"""


def assert_seen(report, update, what):
    """The wait that comes after an update belongs to the next."""
    with pytest.raises(AssertionError, match=re.escape(what)):
        nothing_waits(report, update, update + 1)


def check_what_it_sees(play, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    report = play(script=tmp_path / "bad.py")

    # Memory.
    assert "80 GiB do not fit" in report.output
    assert 3 * GiB < report.allocated < 3.1 * GiB

    # Compilation.
    assert report.breaks
    assert [step for step, _ in report.recompilations] == [5, 5]
    assert report.graphs[0]["bytes"] >= 8 * 64 * 4
    report.breaks = {}
    with pytest.raises(AssertionError, match="compiled after"):
        compiled_once(report)

    # Waits.
    assert_seen(report, 6, "value.item")
    assert_seen(report, 7, "zeros(4)")
    assert_seen(report, 8, "0 launches behind")
    assert report.steps[7]["counts"]["copy H2D pageable"] == 1
    report.steps[4]["counts"]["cudaMalloc"] = 1
    assert_seen(report, 4, "cudaMalloc")
