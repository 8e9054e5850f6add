#!/usr/bin/env bash
# OpenVINO 2026.4.1 on a CPU: the remainder x % n and the quotient x // n of int64 tensors are computed in float32, so
# they are wrong from 2^24 on, without a warning, and the result still has the type int64. Products and sums of the same
# numbers are right, up to 2^31, because int64 is computed as int32. A model that hashes pairs of token ids into rows of
# a table, (a * t ^ b * u) % rows, looks up other rows than in torch, and its logits are off by a tenth.
# Seen: 16777217 % 1000003 is 777168 (777169 in torch), 33554435 // 7 is 4793491 (4793490); 5000011 % 1000003 is right.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 openvino==2026.4.1
cat >"$tmp/try.py" <<'PYTHON'
import openvino
import torch


class Integers(torch.nn.Module):
    def forward(self, x):
        return x % 1000003, x // 7, x * 3


x = torch.tensor([5000011, 16777217, 33554435])
exact = [y.tolist() for y in Integers()(x)]
compiled = openvino.compile_model(openvino.convert_model(Integers(), example_input=x), "CPU")
results = compiled(x.numpy())
found = [results[i].tolist() for i in range(3)]
for name, theirs, torchs in zip(("x % 1000003", "x // 7", "x * 3"), found, exact, strict=True):
    print(f"{name}: OpenVINO {theirs}, torch {torchs}")

assert found[2] == exact[2], "the product is wrong, too"
assert found[0][0] == exact[0][0] and found[1][0] == exact[1][0], "small numbers are wrong, too"
if found[0] == exact[0] or found[1] == exact[1]:
    raise SystemExit("changed: OpenVINO computes the integers exactly")
PYTHON
"$tmp/venv/bin/python" "$tmp/try.py"
