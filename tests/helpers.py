"""Real processes of train_gpt2.py, for the tests.

No test depends on their speed. A run is held before the step at which the test does something (`Live`).
Timeouts only end a process that hangs.
"""
import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
HANG = 1200         # seconds, a timeout: far more than any process takes on a busy machine


def command(*flags, processes=1, torchrun=("--standalone",)):
    launcher = ["-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train_gpt2.py"),
            *map(str, flags)]


class Warm:
    """A command of ours in a process that was forked from one that has imported torch (tests/warm.py). As
    subprocess.Popen, as far as the tests need it."""
    server = None

    def __init__(self, argv, stdout, stderr, env=ENV, cwd=None, session=False):
        if not Warm.server or Warm.server.poll() is not None:
            Warm.server = subprocess.Popen([sys.executable, ROOT / "tests/warm.py"], text=True, env=ENV,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            atexit.register(Warm.server.kill)
        self.returncode, self.pid = None, self._ask(
            argv=[str(arg) for arg in argv], env=env, cwd=str(cwd or os.getcwd()), stdout=str(stdout),
            stderr=str(stderr), session=session)

    @staticmethod
    def _ask(**request):
        Warm.server.stdin.write(json.dumps(request) + "\n")
        Warm.server.stdin.flush()
        answer = Warm.server.stdout.readline()
        assert answer, f"tests/warm.py has ended, {Warm.server.poll()}"
        return json.loads(answer)

    def poll(self):
        if self.returncode is None:
            self.returncode = self._ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout=HANG):
        deadline, pause = time.monotonic() + timeout, 0.001
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(pause := min(0.05, 1.5 * pause))
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


def script(name, *flags, env=ENV, cwd=None):
    """Runs one of our scripts to its end: exit code, stdout, stderr."""
    return warm([ROOT / name, *flags], env, cwd)


def warm(argv, env=ENV, cwd=None, **how):
    """As subprocess.run, of `python` with these arguments: a script or torchrun. Its output is captured."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        code = Warm(argv, out, err, env, cwd).wait()
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def script_on_ranks(processes, name, *flags, env=ENV, cwd=None):
    """As `script`, by several processes, which find each other as torchrun's do. Their output is joined."""
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**env, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / f"out{rank}", Path(folder) / f"err{rank}") for rank in range(processes)]
        ranks = [Warm([ROOT / name, *flags], *files[rank], env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                      cwd)
                 for rank in range(processes)]
        code = max(rank.wait() for rank in ranks)
        stdout, stderr = ("".join(path.read_text() for path in paths) for paths in zip(*files, strict=True))
        return subprocess.CompletedProcess([name, *flags], code, stdout, stderr)


def run(*flags, processes=1, code=0, env=ENV, torchrun=False, cold=False, cwd=None, **kwargs):
    """train_gpt2.py to its end, several processes by `torchrun` or without it. `cold` or with `kwargs` of
    subprocess.run: by a Python that has imported nothing."""
    if kwargs or cold:
        result = subprocess.run(command(*flags, processes=processes), capture_output=True, text=True, env=env,
                                timeout=HANG, cwd=cwd, **kwargs)
    elif torchrun:
        result = warm(command(*flags, processes=processes)[1:], env, cwd)
    elif processes > 1:
        result = script_on_ranks(processes, "train_gpt2.py", *flags, env=env, cwd=cwd)
    else:
        result = script("train_gpt2.py", *flags, env=env, cwd=cwd)
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-2000:]
    return result


def train(*flags, code=0):
    """train_gpt2.py in this process, whose signal handlers stay."""
    import train_gpt2
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        assert train_gpt2.main([str(flag) for flag in flags]) == code
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def refused(call, *words, failed=False):
    """The line with which `call()` refuses: a UserError (a RunError: `failed`), or of a command's result exit
    code 2 (1). It is one line, and has the `words`: the path or flag that it is about."""
    from runtime.cli import RunError, UserError
    expected = RunError if failed else UserError
    try:
        result = call()
        assert isinstance(result, subprocess.CompletedProcess), f"it was taken: {result!r:.200}"
        assert result.returncode == 2 - failed, (result.returncode, result.stdout, result.stderr)
        line = result.stderr.removesuffix("\n")
    except expected as error:
        line = str(error)
    assert line and "\n" not in line and len(line) < 1000 and all(str(word) in line for word in words), line
    return line


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


@contextlib.contextmanager
def little_memory(megabytes=150):
    """Fails if the process grows by more than that inside: Linux shows the most that it held since it was
    told to forget."""
    def most():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = most()
    except (OSError, IndexError):
        yield
        return
    yield
    assert most() - before < megabytes, f"{most() - before} MB"


LAYER = ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
         "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
         "mlp.c_proj.weight", "mlp.c_proj.bias")


def llm_c_file(path, model, version=5, padding=47, pad=0.0, **header):
    """Writes a GPT as llm.c does, in bfloat16 (version 5) or float32 (3), `padding` rows of `pad` behind its
    vocabulary. `header`: other numbers in place of the right ones."""
    import torch
    c, dtype = model.config, torch.float32 if version == 3 else torch.bfloat16
    shape = {name: getattr(c, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    numbers = {"magic": 20240326, "version": version, **shape, "padded": c.vocab_size + padding} | header
    weights = {name.removeprefix("transformer."): p for name, p in model.state_dict().items()}
    names = ["wte.weight", "wpe.weight", *(f"h.{i}.{name}" for name in LAYER for i in range(c.n_layer)),
             "ln_f.weight", "ln_f.bias"]
    weights["wte.weight"] = torch.cat((weights["wte.weight"], torch.full((padding, c.n_embd), pad)))
    with open(path, "wb") as file:
        file.write(struct.pack("<8i", *numbers.values()) + bytes(1024 - 32))
        for name in names:
            file.write(weights[name].to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
    return path


def limit_file_size(size):
    """For a process's preexec_fn: a full disk, for any file of more than `size` bytes."""
    import resource                     # not on Windows
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def wait_until(happened, alive=lambda: True):
    """Polls happened() and returns its first true value."""
    deadline, pause = time.monotonic() + HANG, 0.002
    while not (found := happened()):
        assert alive(), "the process ended before"
        assert time.monotonic() < deadline, "the process hangs"
        time.sleep(pause := min(0.05, 1.2 * pause))
    return found


# sitecustomize.py, which Python imports before the script. If there is a file hold.STEP, a process writes its
# id to rankR.STEP before the first batch of that step, and waits until hold.STEP is removed.
SITE = """
import itertools, os, sys, time
sys.path.insert(0, {root!r})
from runtime import dataloader
del sys.path[0]
micro_batches, read_ahead, asked = dataloader.micro_batches, dataloader.read_ahead, []

def tested():
    try:
        return os.kill({pid}, 0) is None
    except OSError:
        return False                    # the tests were killed: nothing will remove hold.STEP

def noted(dataset, config, batch_size, step=0, rank=0, ranks=1):
    asked.append((config, batch_size, step, rank, ranks))
    return micro_batches(dataset, config, batch_size, step, rank, ranks)

def held(batches, pin):
    (config, batch_size, first, rank, ranks), items = asked[-1], read_ahead(batches, pin)
    for step in itertools.count(first):
        hold, here = (os.path.join({folder!r}, f"{{name}}.{{step}}") for name in ("hold", f"rank{{rank}}"))
        updates = dataloader.updates_of_step(step, config)
        for m in range(updates * dataloader.divide_update(config, updates, ranks, batch_size)[1]):
            if m == 0 and os.path.exists(hold):
                with open(here + ".tmp", "w") as file:
                    file.write(str(os.getpid()))
                os.replace(here + ".tmp", here)
                while os.path.exists(hold) and tested():
                    time.sleep(0.02)
            yield next(items)

dataloader.micro_batches, dataloader.read_ahead = noted, held
"""


def read_if_there(path):
    return path.read_text() if path.exists() else ""


class Live:
    """A command in the background, held before each step of `hold` until the test calls go_on(step). `patch`:
    lines that it runs first."""

    def __init__(self, folder, argv, hold=(), env=ENV, patch="", cwd=None, **how):
        folder.mkdir(parents=True)
        self.folder = folder
        for step in hold:
            (folder / f"hold.{step}").touch()
        site = SITE.format(root=str(ROOT), folder=str(folder), pid=os.getpid())
        (folder / "sitecustomize.py").write_text(site + patch)
        path = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
        env = {**env, "PYTHONPATH": path}
        if argv[0] == sys.executable and (argv[1].endswith(".py") or argv[1] == "-m") and not how:
            self.process = Warm(argv[1:], folder / "stdout", folder / "stderr", env, cwd, session=True)
            return
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            self.process = subprocess.Popen(argv, **{"stdout": stdout, "stderr": stderr} | how, text=True,
                                            start_new_session=True, env=env, cwd=cwd)

    def stdout(self):
        return read_if_there(self.folder / "stdout")

    def stderr(self):
        return read_if_there(self.folder / "stderr")

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
