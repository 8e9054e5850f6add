#!/usr/bin/env bash
# numpy 2.4.6: np.fromfile of a file whose disk fails raises nothing. It returns the numbers that came before, here none,
# as at the end of a file: a network disk that is away (EIO, ENOTCONN) looks like a file that was cut off, and who then
# calls the file damaged makes its owner remove a whole one. The same read by file.readinto(array) raises the OSError.
# Seen with /proc/self/mem, whose first byte no process can read, in place of a failing disk.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q numpy==2.4.6
cat >"$tmp/try.py" <<'PYTHON'
import errno

import numpy as np

print("fromfile", len(np.fromfile("/proc/self/mem", dtype=np.uint16, count=8)))
try:
    with open("/proc/self/mem", "rb") as file:
        file.readinto(np.empty(8, dtype=np.uint16))
except OSError as error:
    print("readinto", errno.errorcode[error.errno])
PYTHON
found=$("$tmp/venv/bin/python" "$tmp/try.py" 2>/dev/null | tr '\n' ' ')
echo "$found"
[ "$found" = "fromfile 0 readinto EIO " ]
