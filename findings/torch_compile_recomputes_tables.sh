#!/usr/bin/env bash
# torch 2.13.0: a small table that a compiled function makes of constants (the cosines of rotary positions, say) is
# not computed once. Inductor fuses its formula into every kernel that reads it, so that a table of T numbers that
# multiplies a tensor of B x T x n numbers costs B x T x n cosines, again in each layer and again in the backward.
# Neither constant folding nor common subexpressions take it out. torch.compiler.assume_constant_result around the
# function that makes the table does: then no generated kernel has a cosine.
# Seen: 3 generated kernels with cos for 3 readers of one table; with assume_constant_result none. Needs g++.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/try.py" <<'PYTHON'
import re
import torch
from torch._inductor.utils import run_and_get_code

def make_table(T):
    return (torch.arange(T).outer(10000.0 ** -(torch.arange(32) / 32))).cos()

constant_table = torch.compiler.assume_constant_result(make_table)

def three_readers(x, table_of):
    table = table_of(x.size(1))[None, :, None, :]           # (1, T, 1, 32)
    for _ in range(3):
        x = (x * table).softmax(1)                          # the softmax ends a kernel
    return x

x = torch.randn(4, 64, 8, 32)
for name, table_of in (("plain", make_table), ("assume_constant_result", constant_table)):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: three_readers(x, table_of), dynamic=False)
    y, code = run_and_get_code(compiled, x)
    assert torch.allclose(y, three_readers(x, make_table), atol=1e-5)
    kernels = re.split(r'extern "C"', "\n".join(code))[1:]
    print(name, sum("cos()" in kernel or "std::cos" in kernel for kernel in kernels))
PYTHON
found=$(cd "$tmp" && "$tmp/venv/bin/python" try.py 2>/dev/null)
echo "$found"
[ "$found" = "plain 3
assume_constant_result 0" ]
