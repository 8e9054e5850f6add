"""The stand-in itself: it detects what the other checks rely on, in a script that does all of it wrong."""
import os
import re
import subprocess

import pytest
from conftest import HERE, HOME
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

assert torch.tensor([3.0, 4.0]).cuda().tolist() == [3.0, 4.0]               # copies from the host are real
assert (torch.tensor([3.0, 4.0]).cuda() + 1).tolist() == [-1.0, -1.0]       # results of kernels are not
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
    assert "80 GiB do not fit" in report.output and report.steps[0]["counts"]["out of memory"] > 0
    assert 3 * GiB < report.allocated < 3.1 * GiB
    assert report.breaks
    assert [step for step, _ in report.recompilations] == [5, 5] and report.graphs_after(5)
    assert all(report.steps[4]["counts"][f"{kind} kernels"] > 0 for kind in ("aten", "triton"))
    assert report.graphs[0]["bytes"] >= 8 * 64 * 4 and report.kernels
    assert report.waits["bad.py:25 in <module>: print(value.item())"] == [6]
    with pytest.raises(AssertionError, match="compiled after"):
        report.breaks = {}
        compiled_once(report)
    for after, what in ((6, "value.item"), (7, "zeros(4)"), (8, "0 launches behind")):
        with pytest.raises(AssertionError, match=re.escape(what)):
            nothing_waits(report, after, after + 1)
    assert report.steps[7]["counts"]["copy H2D pageable"] == 1
    for what in ("cudaMalloc", "copy H2D pageable"):
        report.steps[4]["counts"] = {**report.steps[3]["counts"], what: 1}
        with pytest.raises(AssertionError, match=what):
            nothing_waits(report, 4, 5)


def check_cards(play, tmp_path):
    (tmp_path / "cards.py").write_text(
        "from torch import cuda\n"
        "print(cuda.device_count(), cuda.get_device_name(1), cuda.mem_get_info(1)[1] / 2**30)\n")
    report = play(script=tmp_path / "cards.py", NULL_GPU_CARD="A100", NULL_GPU_COUNT=2,
                  NULL_GPU_BYTES=24 * GiB)
    assert "2 NVIDIA A100-SXM4-80GB 24.0" in report.output
    command = [HOME / "venv/bin/python", HERE / "run.py", tmp_path / "cards.py"]
    unknown = subprocess.run(command, env={**os.environ, "NULL_GPU_HOME": HOME, "NULL_GPU_CARD": "K80"},
                             capture_output=True, text=True)
    assert unknown.returncode == 2 and "NULL_GPU_CARD 'K80' is none of 'H100' 'H200'" in unknown.stderr
