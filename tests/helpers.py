"""Runs of our scripts for the tests.

- `train` runs train_gpt2.py in this process.
- `run`, `script`, `on_ranks` and `forked` run it in processes that are forked from one that has
  imported torch, which takes a tenth of the time of a new Python.

No test sleeps or polls. `before` is a list of functions that a new process calls first: with
`striking` it sends itself a signal at a chosen moment. Timeouts only end a process that hangs.
"""
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ENV.pop("PYTHONPATH", None)
HANG = 120          # seconds, a timeout: far more than any process takes

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload([
    "helpers", "torch._dynamo", "pyarrow.parquet", "datasets", "fineweb", "sample", "train_gpt2",
    "ready"])

# Flags of a run on the bytes of conftest's `byte_data`, in place of GPT-2's tokens. Its 40 steps
# take a third of a second. A step has two micro-batches, and 36 steps are an epoch.
BYTES = [
    "--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32",
    "--vocab_size", "256", "--dtype", "float32", "--total_batch_size", "256", "--batch_size", "4",
    "--max_steps", "40", "--warmup_steps", "5", "--hellaswag_every", "0", "--sample_every", "0",
    "--val_every", "20", "--val_tokens", "1000", "--checkpoint_every", "10",
    "--keep_checkpoints", "2",
]


# ----------------------------------------------------------------------- forked processes

def forked(*calls, envs=None, cwds=None, before=()):
    """Runs each call in a forked process of its own, all at once.

    `envs` and `cwds` have one entry for each call. Returns [(exit code, stdout, stderr)].
    """
    if envs is None:
        envs = [ENV] * len(calls)
    if cwds is None:
        cwds = [os.getcwd()] * len(calls)

    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for i, call in enumerate(calls):
            streams = [Path(folder, f"stdout{i}"), Path(folder, f"stderr{i}")]
            for path in streams:
                path.touch()
            arguments = (call, envs[i], cwds[i], streams, before)
            processes.append((FORK.Process(target=_become, args=arguments), streams))

        _start([process for process, _ in processes])
        for process, _ in processes:
            process.join(HANG)

        hangs = [process for process, _ in processes if process.exitcode is None]
        for process in hangs:
            process.kill()
        results = []
        for process, (stdout, stderr) in processes:
            results.append((process.exitcode, stdout.read_text(), stderr.read_text()))
        assert not hangs, f"it hangs: {results}"
        return results


def _start(processes):
    """The server, which the first process starts, finds our modules by PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    for process in processes:
        process.start()
    if path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path


def _become(call, env, cwd, streams, before):
    """What a forked process does."""
    gc.freeze()                 # a collection would write to, and so copy, all pages of the server

    # The tests may run behind a shell's `&`, which ignores Ctrl-C, or under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1,
                      closefd=False)

    # The server has imported these two, which read the environment when they are imported.
    if "HF_ENDPOINT" in env:
        for name in ("huggingface_hub.constants", "datasets.config"):
            if name in sys.modules:
                importlib.reload(sys.modules[name])

    draw_no_pictures()
    for function in before:
        function()
    try:
        call()
    finally:
        sys.stdout.flush()


def draw_no_pictures():
    """From now on, in this process: a picture takes two seconds."""
    from runtime import output
    output.plot_run = _draw_nothing


def _draw_nothing(*arguments):
    pass


def command(name, *flags):
    """The call, for `forked`, that is one of our scripts with these flags."""
    return functools.partial(_run_script, name, [str(flag) for flag in flags])


def _run_script(name, flags):
    from runtime.cli import run_command
    sys.argv = [str(ROOT / name), *flags]
    run_command(importlib.import_module(name.removesuffix(".py")).main)


def script(name, *flags, env=ENV, cwd=None, before=()):
    """One of our scripts to its end: a CompletedProcess."""
    if cwd is None:
        cwd = os.getcwd()
    [result] = forked(command(name, *flags), envs=[env], cwds=[cwd], before=before)
    return subprocess.CompletedProcess([name, *flags], *result)


def on_ranks(*calls, env=ENV, **options):
    """As `forked`, of processes that find each other as torchrun's do."""
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = str(len(calls))
    envs = []
    for rank in range(len(calls)):
        envs.append({
            **env, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "RANK": str(rank), "LOCAL_RANK": str(rank),
        })
    return forked(*calls, envs=envs, **options)


def run(*flags, processes=1, code=0, env=ENV, cwd=None, before=()):
    """train_gpt2.py to its end, which has this exit code: a CompletedProcess.

    The outputs of several processes are joined.
    """
    if cwd is None:
        cwd = os.getcwd()
    if processes == 1:
        result = script("train_gpt2.py", *flags, env=env, cwd=cwd, before=before)
    else:
        calls = [command("train_gpt2.py", *flags)] * processes
        results = on_ranks(*calls, env=env, cwds=[cwd] * processes, before=before)
        codes, outs, errs = zip(*results, strict=True)
        assert len(set(codes)) == 1, results
        result = subprocess.CompletedProcess(flags, codes[0], "".join(outs), "".join(errs))
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-2000:]
    return result


# ----------------------------------------------------------------------- this process

def train(*flags):
    """train_gpt2.py in this process, whose signal handlers stay."""
    import train_gpt2
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        train_gpt2.main([str(flag) for flag in flags])
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def parse_flags(argv):
    """(Config, names of the given flags) of a command line that begins a new run."""
    from config import FLAGS
    given = FLAGS.parse("", argv)
    flags = FLAGS.merge(given)
    FLAGS.check(flags)
    return flags, set(given)


def refused(call, *words, failed=False):
    """The line with which `call()` refuses, which has all `words`: a path, a flag, a number.

    `call` raises a UserError (with `failed` a RunError), or returns the CompletedProcess of a
    command that ended with exit code 2 (with `failed` 1) and one line on stderr.
    """
    from runtime.cli import RunError, UserError
    error_class, code = UserError, 2
    if failed:
        error_class, code = RunError, 1

    try:
        result = call()
    except error_class as error:
        line = str(error)
    else:
        assert isinstance(result, subprocess.CompletedProcess), f"it was taken: {result!r:.200}"
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        line = result.stderr.removesuffix("\n")

    assert line and "\n" not in line and len(line) < 1000, line
    for word in words:
        assert str(word) in line, (word, line)
    return line


# ----------------------------------------------------------------------- kills, for `before`

def strike(what, *names, item=0, nth=1, rank=0, restart="0", call=None):
    """From now on this process sends itself the signals `names`, or calls `call()`, at a moment.

    The moment is before micro-batch (or batch of an evaluation) number `item`, when the process
    begins `what` ("step 13", "validation", "HellaSwag") for the `nth` time. Only the process `rank`
    of torchrun's start number `restart` does so.
    """
    from runtime.ranks import Process
    until_stopped = Process.until_stopped
    begun = []

    def struck(items):
        for i, one in enumerate(items):
            if i == item:
                for name in names:
                    os.kill(os.getpid(), signal.Signals[name])
                if call is not None:
                    call()
            yield one

    def until_struck(process, label, items):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if label == what and process.rank == rank and start == restart:
            begun.append(label)
            if len(begun) == nth:
                items = struck(items)
        return until_stopped(process, label, items)

    Process.until_stopped = until_struck


def kill_parent():
    """Kills the process that has started this one, and waits until it has ended."""
    parent = os.getppid()
    ended = os.pidfd_open(parent)
    os.kill(parent, signal.SIGKILL)
    select.select([ended], [], [])


def striking(what, *names, **options):
    """`strike`, as `before` takes it."""
    return [functools.partial(strike, what, *names, **options)]


def die_in_write(n, cut):
    """From now on this process kills itself in its n-th fsync of an atomic write.

    An atomic write has two of them. At the first one the file has its temporary name, and is
    complete, or with `cut` half of it is there. The second one comes after the renaming.
    """
    from runtime import files
    sync = files.sync
    calls = []

    def dies(descriptor):
        calls.append(descriptor)
        if len(calls) == n:
            if cut:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    files.sync = dies


def dying(moment):
    """`die_in_write`, as `before` takes it, at a moment such as "3 half", "3 whole" or "3 after".

    The third atomic write is half done, or the whole file is there and still has its temporary
    name, or it has just got its own.
    """
    number, how = moment.split()
    if how == "after":
        return [functools.partial(die_in_write, 2 * int(number), cut=False)]
    return [functools.partial(die_in_write, 2 * int(number) - 1, cut=how == "half")]


def limit_file_size(size):
    """For `before`: no file can grow beyond so many bytes, as on a full disk."""
    import resource                     # not on Windows
    return functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


# ----------------------------------------------------------------------- what a run wrote

def logged(out, kind="train"):
    """{step: value} of a column of metrics.csv."""
    from runtime.metrics import read_metrics
    rows = read_metrics(Path(out) / "metrics.csv")
    return {row["step"]: row[kind] for row in rows if row[kind] is not None}


def newest(out):
    """The step of the newest checkpoint."""
    return saved_steps(out)[-1]


def saved_steps(out):
    """The steps of all checkpoints, the oldest first."""
    from runtime.files import checkpoints
    return [step for step, _ in checkpoints(out)]


def saved(out, step=None):
    """The content of the checkpoint of a step, by default of the newest one."""
    from runtime.files import checkpoints
    from runtime.weights import read_checkpoint
    paths = dict(checkpoints(out))
    if step is None:
        step = max(paths)
    return read_checkpoint(paths[step])


def contents(folder):
    """{name: bytes} of the files in a folder, and of those in its folders."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _rows_without_times(out):
    from runtime.metrics import read_metrics
    rows = list(read_metrics(Path(out) / "metrics.csv"))
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return rows


def same_end(out, whole, step=40):
    """Fails unless two runs ended alike: metrics.csv but for its times, and the last checkpoint.

    Weights and moments are compared bit for bit.
    """
    import torch

    from runtime.weights import read_checkpoint
    rows = _rows_without_times(out)
    assert rows == _rows_without_times(whole)
    assert len(rows) in (step, step + 1)            # the last one is of an evaluation

    name = f"checkpoint_{step:06d}.pt"
    found = read_checkpoint(Path(out) / name)
    expected = read_checkpoint(Path(whole) / name)
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name

    assert len(expected["optimizers"]) > 10
    assert found["optimizers"].keys() == expected["optimizers"].keys()
    for name, state in expected["optimizers"].items():
        assert found["optimizers"][name].keys() == state.keys()
        for key, value in state.items():
            value = torch.as_tensor(value)
            assert torch.equal(torch.as_tensor(found["optimizers"][name][key]), value), (name, key)
    assert not list(Path(out).glob("*.tmp"))


def hellaswag_file(path, n=12):
    """A .jsonl of n examples in HellaSwag's format, of words of input.txt."""
    words = (ROOT / "input.txt").read_text()[:20_000].split()
    with open(path, "w") as file:
        for i in range(n):
            endings = []
            for j in range(4):
                first = 50 * i + 7 * j
                endings.append(" ".join(words[first:first + 3 + j]))
            context = " ".join(words[9 * i:9 * i + 8])
            example = {"ctx": context, "endings": endings, "label": i % 4}
            file.write(json.dumps(example) + "\n")
    return path
