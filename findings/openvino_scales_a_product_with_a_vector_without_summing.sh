#!/usr/bin/env bash
# OpenVINO 2026.4.1 on a CPU: (x @ v) * 0.5, where x is (B, T, C) and v a constant vector of C numbers, is the product
# number by number, without the sum: (B, T, C) in place of (B, T), and no warning. It moves the factor to v, and then
# broadcasts v as (1, C) where it was a column (MatMulMultiplyFusion). Where something behind it needs the right shape,
# the model does not compile ("Incompatible MatMul matrix dimension"). Right are a matrix x, the factor on v already,
# v as a matrix (C, 1), and no factor.
# Seen for ones @ [1, 2, 3, 4] * 0.5: [0.5, 1.0, 1.5, 2.0] for each row (5.0 in torch).
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 openvino==2026.4.1
cat >"$tmp/try.py" <<'PYTHON'
import openvino
import torch


class Scaled(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.register_buffer("v", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return self.compute(x, self.v)


def results(x, compute):
    model = Scaled(compute)
    compiled = openvino.compile_model(openvino.convert_model(model, example_input=x), "CPU")
    return torch.from_numpy(compiled(x.numpy())[0].copy()), model(x)


x = torch.ones(2, 3, 4)
theirs, torchs = results(x, lambda x, v: (x @ v) * 0.5)
print(f"(x @ v) * 0.5: OpenVINO {tuple(theirs.shape)} {theirs[0, 0].tolist()}, "
      f"torch {tuple(torchs.shape)} {torchs[0, 0].tolist()}")

others = {
    "a matrix x": (x[0], lambda x, v: (x @ v) * 0.5),
    "the factor on v": (x, lambda x, v: x @ (v * 0.5)),
    "v as a matrix": (x, lambda x, v: (x @ v[:, None])[..., 0] * 0.5),
    "no factor": (x, lambda x, v: x @ v),
}
for name, (x, compute) in others.items():
    assert torch.equal(*results(x, compute)), f"{name} is wrong, too"
if torch.equal(theirs, torchs):
    raise SystemExit("changed: OpenVINO sums")
assert theirs.tolist() == [[[0.5, 1.0, 1.5, 2.0]] * 3] * 2, theirs
PYTHON
"$tmp/venv/bin/python" "$tmp/try.py"
