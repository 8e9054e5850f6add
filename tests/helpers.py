"""Real processes of train_gpt2.py, for the tests.

No test depends on their speed. A run is held before the step at which the test does something (`Live`).
Timeouts only end a process that hangs.
"""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
HANG = 1200         # seconds, a timeout: far more than any process takes on a busy machine


def command(*flags, processes=1, torchrun=("--standalone",)):
    launcher = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train_gpt2.py"), "--no_plot",
            *map(str, flags)]


def run(*flags, processes=1, code=0, env=ENV, **kwargs):
    result = subprocess.run(command(*flags, processes=processes), capture_output=True, text=True, env=env,
                            timeout=HANG, **kwargs)
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-2000:]
    return result


def logged(out, kind="train"):
    rows = [line.split() for line in (Path(out) / "log.txt").read_text().splitlines()]
    return {int(step): float(value) for step, k, value in rows if k == kind}


def hellaswag_file(path, n=12):
    words = (ROOT / "input.txt").read_text()[:20_000].split()
    with open(path, "w") as file:
        for i in range(n):
            endings = [" ".join(words[50 * i + 7 * j:50 * i + 7 * j + 3 + j]) for j in range(4)]
            file.write(json.dumps({"ctx": " ".join(words[9 * i:9 * i + 8]), "endings": endings,
                                   "label": i % 4}) + "\n")
    return path


def limit_file_size(size):
    """For a process's preexec_fn: a full disk, for any file of more than `size` bytes."""
    import resource                     # not on Windows
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def wait_until(happened, alive=lambda: True):
    """Polls happened() and returns its first true value."""
    deadline = time.monotonic() + HANG
    while not (found := happened()):
        assert alive(), "the process ended before"
        assert time.monotonic() < deadline, "the process hangs"
        time.sleep(0.005)
    return found


# sitecustomize.py, which Python imports before the script. If there is a file hold.STEP, a process writes its
# id to rankR.STEP before the first batch of that step, and waits until hold.STEP is removed.
SITE = """
import os, sys, time
sys.path.insert(0, {root!r})
from runtime.dataloader import TokenLoader
del sys.path[0]
start, next_batch = TokenLoader.start, TokenLoader.next_batch

def tested():
    try:
        return os.kill({pid}, 0) is None
    except OSError:
        return False                    # the tests were killed: nothing will remove hold.STEP

def started(loader, step):
    loader.asked = step * loader.micro_batches
    start(loader, step)

def held(loader, count=1):
    step, m = divmod(loader.asked, loader.micro_batches)
    loader.asked += count
    hold, here = (os.path.join({folder!r}, f"{{name}}.{{step}}") for name in ("hold", f"rank{{loader.rank}}"))
    if m == 0 and os.path.exists(hold):
        with open(here + ".tmp", "w") as file:
            file.write(str(os.getpid()))
        os.replace(here + ".tmp", here)
        while os.path.exists(hold) and tested():
            time.sleep(0.005)
    return next_batch(loader, count)

TokenLoader.start, TokenLoader.next_batch = started, held
"""


class Live:
    """A command in the background, held before each step of `hold` until the test calls go_on(step). `patch`:
    lines that it runs first."""

    def __init__(self, folder, argv, hold=(), env=ENV, patch="", **how):
        folder.mkdir(parents=True)
        self.folder = folder
        for step in hold:
            (folder / f"hold.{step}").touch()
        site = SITE.format(root=str(ROOT), folder=str(folder), pid=os.getpid())
        (folder / "sitecustomize.py").write_text(site + patch)
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            path = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
            self.process = subprocess.Popen(argv, **{"stdout": stdout, "stderr": stderr} | how, text=True,
                                            start_new_session=True, env={**env, "PYTHONPATH": path})

    def stdout(self):
        return (self.folder / "stdout").read_text()

    def stderr(self):
        return (self.folder / "stderr").read_text()

    def until(self, happened):
        try:
            return wait_until(happened, lambda: self.process.poll() is None)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.stdout()[-2000:]}{self.stderr()[-2000:]}") from None

    def stands_before(self, step, ranks=(0,)):
        """Waits until these ranks are held before `step`; returns their process ids."""
        files = [self.folder / f"rank{rank}.{step}" for rank in ranks]
        self.until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def go_on(self, *steps):
        for step in steps:
            (self.folder / f"hold.{step}").unlink()

    def end(self):
        """Waits for the command; returns (exit code, stdout, stderr)."""
        return self.process.wait(timeout=HANG), self.stdout(), self.stderr()

    def kill(self):
        """Ends what is left of the command. torchrun's ranks, in sessions of their own, end with it."""
        for hold in self.folder.glob("hold.*"):
            hold.unlink()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
