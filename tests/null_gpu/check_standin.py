"""The simulated GPU detects what the other checks rely on, in a script that does all of it wrong."""
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


def check_what_it_sees(play, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    report = play(script=tmp_path / "bad.py")
    assert "80 GiB do not fit" in report.output and 3 * GiB < report.allocated < 3.1 * GiB
    assert report.breaks and [step for step, _ in report.recompilations] == [5, 5]
    assert report.graphs[0]["bytes"] >= 8 * 64 * 4
    report.breaks = {}
    with pytest.raises(AssertionError, match="compiled after"):
        compiled_once(report)
    for after, what in ((6, "value.item"), (7, "zeros(4)"), (8, "0 launches behind")):
        with pytest.raises(AssertionError, match=re.escape(what)):
            nothing_waits(report, after, after + 1)
    assert report.steps[7]["counts"]["copy H2D pageable"] == 1
    report.steps[4]["counts"]["cudaMalloc"] = 1
    with pytest.raises(AssertionError, match="cudaMalloc"):
        nothing_waits(report, 4, 5)
