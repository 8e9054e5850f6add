#!/usr/bin/env bash
# torch 2.13.0: where the disk becomes full while torch.save writes into a Python file, the OSError that says so never
# arrives. torch.save closes its zip while the OSError is on its way, which fails, too, and what the caller gets is
# a RuntimeError about a position ("unexpected pos"). `except OSError` around torch.save(obj, file), by which one would
# tell a full disk from a bug, catches nothing; the OSError is the RuntimeError's __context__.
# Seen with a limit of the file's size in place of a full disk: RuntimeError; its context OSError, EFBIG.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$tmp/try.py" <<'PYTHON'
import errno
import resource
import signal
import sys
import torch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)               # then write() fails with EFBIG
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with open(sys.argv[1], "wb", buffering=0) as file:
        torch.save({"weight": torch.zeros(1_000_000)}, file)
except OSError:
    print("OSError")
except RuntimeError as error:
    print("RuntimeError", "unexpected pos" in str(error), type(error.__context__).__name__,
          errno.errorcode[error.__context__.errno])
PYTHON
found=$("$tmp/venv/bin/python" "$tmp/try.py" "$tmp/checkpoint.pt" 2>/dev/null)
echo "$found"
[ "$found" = "RuntimeError True OSError EFBIG" ]
