#!/usr/bin/env bash
# torch 2.13.0: x[:, :-1].contiguous() of a batch of ONE row returns the slice itself, with the stride T + 1 of the
# longer row, because torch calls any stride of a dimension of size 1 contiguous. torch.compile guards on strides all
# the same: a model that was compiled for a batch of the same shape with the stride T is compiled a second time. A loader
# that cuts inputs and targets out of rows of T + 1 tokens does this as soon as the micro-batch is one sequence.
# x.clone(memory_format=torch.contiguous_format) gives the stride T.
# Seen: strides (9, 1) and (8, 1) for shape (1, 8); 2 graphs with contiguous(), 1 with clone().
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/try.py" <<'PYTHON'
import torch

row = torch.arange(9.0)[None]                               # (1, T + 1)
sliced = row[:, :-1].contiguous()
cloned = row[:, :-1].clone(memory_format=torch.contiguous_format)
print(tuple(sliced.shape), sliced.is_contiguous(), sliced.stride(), cloned.stride())

for x in (sliced, cloned):
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: x * 2, backend=count, dynamic=False)
    compiled(torch.zeros(1, 8))                             # as a warm-up or another loader makes it
    compiled(x)
    print(len(graphs))
PYTHON
found=$("$tmp/venv/bin/python" "$tmp/try.py" 2>/dev/null)
echo "$found"
[ "$found" = "(1, 8) True (9, 1) (8, 1)
2
1" ]
