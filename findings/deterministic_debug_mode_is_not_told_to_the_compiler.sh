#!/usr/bin/env bash
# torch 2.13.0: its documentation calls set_deterministic_debug_mode("error") "an alternative interface for
# use_deterministic_algorithms(True)". For torch.compile it is not. use_deterministic_algorithms imports the compiler
# (some 800 modules, two to six seconds where nothing is compiled) and sets inductor's own flag, so that no
# kernel is chosen by timing. set_deterministic_debug_mode imports nothing and leaves that flag off: eager operations are
# deterministic or raise, are_deterministic_algorithms_enabled() is True, and a compiled model is still autotuned.
# Seen: modules imported and torch._inductor.config.deterministic after each of the two.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/mode.py" <<'PYTHON'
import sys
import torch

before = len(sys.modules)
if sys.argv[1] == "algorithms":
    torch.use_deterministic_algorithms(True)
else:
    torch.set_deterministic_debug_mode("error")
imported = len(sys.modules) - before
enabled = torch.are_deterministic_algorithms_enabled()
mode = torch.get_deterministic_debug_mode()

import torch._inductor.config
compiler = torch._inductor.config.deterministic
print(f"torch {torch.__version__}, {sys.argv[1]}: {imported} modules imported, enabled {enabled}, debug mode {mode}, "
      f"the compiler's flag {compiler}")
if sys.argv[1] == "algorithms":
    ok = imported > 300 and compiler
else:
    ok = imported < 10 and not compiler
sys.exit(0 if ok and enabled and mode == 2 else 1)
PYTHON
"$tmp/venv/bin/python" "$tmp/mode.py" algorithms
"$tmp/venv/bin/python" "$tmp/mode.py" debug_mode
