"""Runs of our scripts for the tests: in this process (`train`), in processes forked from one that has
imported torch (`script`, `run`, `forked`), and by a Python of their own (`cold`, `torchrun`).

Nothing polls or sleeps. A test gives a process `before`, what it calls first: `strike` lets it send itself a
signal at a chosen moment. Timeouts only end a process that hangs."""
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
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
FORK.set_forkserver_preload(["helpers", "torch._dynamo", "pyarrow.parquet", "fineweb", "sample",
                             "train_gpt2"])


def forked(*calls, envs=None, cwds=None, before=()):
    """Runs each call in a forked process of its own, all at once. [(exit code, stdout, stderr)]."""
    with tempfile.TemporaryDirectory() as folder:
        files = [[os.path.join(folder, f"{kind}{i}") for kind in ("out", "err")] for i in range(len(calls))]
        processes = [FORK.Process(target=_become, args=(
            call, envs[i] if envs else ENV, str(cwds[i] if cwds else os.getcwd()), files[i], before))
            for i, call in enumerate(calls)]
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))    # of the server
        for process in processes:
            process.start()
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
        for process in processes:
            process.join(HANG)
        hangs = [process.kill() for process in processes if process.exitcode is None]
        found = [(process.exitcode, *map(read_if_there, map(Path, paths)))
                 for process, paths in zip(processes, files, strict=True)]
        assert not hangs, f"it hangs: {found}"
        return found


def read_if_there(path):
    return path.read_text() if path.exists() else ""


def _become(call, env, cwd, files, before):
    gc.freeze()                         # else a collection writes to, and so copies, all pages of the server
    signal.signal(signal.SIGINT, signal.default_int_handler)   # ignored where the tests are a shell's `&`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)                    # or under nohup
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    if "DRAW" not in env:
        from runtime import plots
        plots.draw = lambda *args, **how: None
    for hook in before:
        hook()
    try:
        call()
    finally:
        sys.stdout.flush()


def command(name, *flags):
    """The call that is one of our scripts with these flags."""
    return functools.partial(_run_script, name, [str(flag) for flag in flags])


def _run_script(name, flags):
    from runtime.cli import run_command
    sys.argv = [str(ROOT / name), *flags]
    run_command(importlib.import_module(name.removesuffix(".py")).main)


def script(name, *flags, env=ENV, cwd=None, before=()):
    """One of our scripts to its end: a CompletedProcess."""
    [found] = forked(command(name, *flags), envs=[env], cwds=[cwd or os.getcwd()], before=before)
    return subprocess.CompletedProcess([name, *flags], *found)


def on_ranks(*calls, env=ENV, **how):
    """As `forked`, of processes that find each other as torchrun's do."""
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**env, "WORLD_SIZE": str(len(calls)), "LOCAL_WORLD_SIZE": str(len(calls)),
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    envs = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(calls))]
    return forked(*calls, envs=envs, **how)


def run(*flags, processes=1, code=0, env=ENV, cwd=None, before=()):
    """train_gpt2.py to its end, with `code`. The outputs of several processes are joined."""
    if processes == 1:
        result = script("train_gpt2.py", *flags, env=env, cwd=cwd, before=before)
    else:
        found = on_ranks(*[command("train_gpt2.py", *flags)] * processes, env=env,
                         cwds=cwd and [cwd] * processes, before=before)
        codes, outs, errs = zip(*found, strict=True)
        assert len(set(codes)) == 1, found
        result = subprocess.CompletedProcess(flags, codes[0], "".join(outs), "".join(errs))
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-2000:]
    return result


def cold(*argv, env=ENV, **how):
    """A Python that has imported nothing, with these arguments: what a user starts."""
    return subprocess.run([sys.executable, *map(str, argv)], **{"capture_output": True, **how}, text=True,
                          env=env, timeout=HANG)


def torchrun(*flags, options=("--standalone", "--nproc_per_node=2"), **how):
    """train_gpt2.py by the real torchrun."""
    return cold("-m", "torch.distributed.run", *options, ROOT / "train_gpt2.py", *flags, **how)


def site(folder, code):
    """The environment of a `cold` Python that runs these lines first, and so do its children."""
    folder.mkdir()
    ours = [str(ROOT), str(ROOT / "tests")]
    code = f"import sys\nsys.path[:0] = {ours}\n{code}\ndel sys.path[:2]\n"
    (folder / "sitecustomize.py").write_text(code)
    return {**ENV, "PYTHONPATH": str(folder)}


def strike(what, *names, item=0, nth=1, rank=0, restart="0"):
    """From now on this process, if it is `rank` of torchrun's start number `restart`, sends itself the
    signals `names` before it takes the micro-batch (or batch of an evaluation) number `item` of the `nth`
    time that it begins `what`: "step 13", "validation", "HellaSwag"."""
    from runtime.ranks import Process
    progress, seen = Process.progress, []

    def struck_progress(process, label, items):
        here = label == what and process.rank == rank and (
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == restart)
        seen.extend([label] * here)

        def struck():
            for i, one in enumerate(items):
                if here and len(seen) == nth and i == item:
                    for name in names:
                        os.kill(os.getpid(), signal.Signals[name])
                yield one
        return progress(process, label, struck())
    Process.progress = struck_progress


def striking(what, *names, **how):
    """`strike`, as `before` takes it."""
    return [functools.partial(strike, what, *names, **how)]


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


def parse_flags(argv):
    """(Config, names of the flags) of a command line that begins a new run."""
    from runtime.checkpoint import Start
    from train_gpt2 import FLAGS
    given = FLAGS.parse("", argv)
    flags = FLAGS.merge(given, Start())
    FLAGS.check(flags, Start())
    return flags, set(given)


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
    """{step: value} of a column of metrics.csv."""
    from runtime.metrics import read_metrics
    rows = read_metrics(Path(out) / "metrics.csv")
    return {row["step"]: row[kind] for row in rows if row[kind] is not None}


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


def limit_file_size(size):
    """For `before` or a subprocess's preexec_fn: a full disk, for any file of more than `size` bytes."""
    import resource                     # not on Windows
    return functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


def die_in_write(n, cut):
    """From now on this process kills itself in its n-th fsync of an atomic write: of odd ones the file is
    complete, or with `cut` half of it, and has its temporary name; even ones are right after the renaming."""
    from runtime import files
    sync, calls = files.sync, []

    def dies(descriptor):
        calls.append(descriptor)
        if len(calls) == n:
            if cut:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)
    files.sync = dies


# Bytes instead of GPT-2's tokens, in conftest's `byte_data`: 40 steps take half a second, 36 are an epoch of
# three shards of odd lengths. A step has four micro-batches.
BYTES = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--vocab_size", "256",
         "--dtype", "float32", "--total_batch_size", "256", "--batch_size", "2", "--max_steps", "40",
         "--warmup_steps", "5", "--hellaswag_every", "0", "--val_every", "20", "--val_tokens", "1000",
         "--sample_every", "0", "--checkpoint_every", "10", "--keep_checkpoints", "2"]


def newest(out):
    from runtime.files import checkpoints
    return checkpoints(out)[-1][0]


def same_end(out, whole, step=40):
    """metrics.csv but for its times, weights and moments bit for bit, and nothing else in the folder."""
    import torch

    from runtime.metrics import read_metrics
    from runtime.weights import read_checkpoint
    rows = [[{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}
             for row in read_metrics(folder / "metrics.csv")] for folder in (out, whole)]
    assert rows[0] == rows[1] and len(rows[0]) == step + 1
    a, b = (read_checkpoint(folder / f"checkpoint_{step:06d}.pt") for folder in (whole, out))
    assert a["model"].keys() == b["model"].keys() and len(a["optimizers"]) > 10
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    assert a["optimizers"].keys() == b["optimizers"].keys()
    for name, state in a["optimizers"].items():
        assert all(torch.equal(tensor, b["optimizers"][name][key]) for key, tensor in state.items()), name
    assert not list(out.glob("*.tmp"))
