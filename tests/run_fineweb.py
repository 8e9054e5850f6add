"""fineweb.py in a process of its own, which may kill itself:

    python tests/run_fineweb.py MOMENT FLAGS...

MOMENT is "never", or as "3 half": at the renaming number 3 of a file that is complete, half of
which is cut off first; or "3 after": behind that renaming.
"""
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fineweb  # noqa: E402
import runtime.text  # noqa: E402
from runtime.cli import run_command  # noqa: E402


def kill_at(number, how):
    rename = os.replace
    renamed = []

    def killing(source, target):
        renamed.append(target)
        if len(renamed) < number:
            rename(source, target)
            return
        if how == "after":
            rename(source, target)
        else:
            os.truncate(source, os.path.getsize(source) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killing


def main():
    moment = sys.argv.pop(1)
    if moment != "never":
        number, how = moment.split()
        kill_at(int(number), how)

    # Many chunks, as if the text were long. What a killed process has written stays without fsync.
    runtime.text.BLOCK = 900
    fineweb.CHUNKS_AHEAD = 0
    os.fsync = int

    if "HF_ENDPOINT" in os.environ:
        # The library waits before it tries again.
        import huggingface_hub.utils._http as http
        http.time.sleep = id
    return fineweb.main()


if __name__ == "__main__":
    run_command(main)
