"""Starts commands as processes of their own, forked from this one, which has imported torch and built the
tokenizers: that and Python's end take two of the two and a half seconds of a small run. All else is as when
they are started by themselves: process id, signals, exit code. torchrun is a command too, and its ranks are
forked as it is.

Reads requests from stdin, one a line, and answers each by a line on stdout:
{"argv": what follows "python", "env": {...}, "cwd": ..., "stdout": path, "stderr": path, "session": bool}
    -> process id
{"wait": process id} -> exit code as subprocess has it, null while it runs
"""
import atexit
import json
import os
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from helpers import Warm
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
import torch._dynamo                                    # DDP imports it: two seconds of each rank
import torch.distributed.run

sys.path[0] = os.path.dirname(sys.path[0])              # where the scripts are

import pyarrow.parquet                                                  # noqa: E402, F401, once for all
import fineweb                                                          # noqa: E402, F401
import sample                                                           # noqa: E402, F401
import train_gpt2                                                       # noqa: E402, F401
from runtime import plots                                               # noqa: E402
from runtime.tokenizer import Encoder, tokenizer                        # noqa: E402

tokenizer()
draw, plots.draw = plots.draw, lambda *args, **how: None        # a picture is a process of two seconds
Encoder()                                                       # loads gigatoken


def serve():
    """Answers until the other end is closed; in a forked process returns the request."""
    ended = {}
    for line in sys.stdin:
        request = json.loads(line)
        if pid := request.get("wait"):
            if pid not in ended and (waited := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(waited[1])
            answer = ended.get(pid)
        elif (answer := os.fork()) == 0:
            return request
        else:
            ended.pop(answer, None)                     # the system gives numbers of ended processes again
        print(json.dumps(answer), flush=True)
    os._exit(0)


def lend_ranks(job):
    """For torchrun's process: a server of its own forks its ranks, and as their parent ends when it ends.
    Returns what is to be done: torchrun's job, in that server's forked processes a rank's."""
    requests, answers = os.pipe(), os.pipe()
    if (server := os.fork()) == 0:
        os.setsid()                                     # a signal to torchrun's group is not for this process
        os.dup2(requests[0], 0)
        os.dup2(answers[1], 1)
        for descriptor in (*requests, *answers):
            os.close(descriptor)
        return serve()
    Warm.server = SimpleNamespace(stdin=open(requests[1], "w"), stdout=open(answers[0]), poll=lambda: None)

    def end():
        os.close(requests[1])
        os.waitpid(server, 0)
    atexit.register(end)
    # on a thread, since a signal, of which torchrun makes an exception, must not come between a request and
    # its answer
    ask, thread = Warm._ask, ThreadPoolExecutor(1)
    Warm._ask = staticmethod(lambda **request: thread.submit(ask, **request).result())
    SubprocessHandler._popen = lambda handler, args, env: Warm(args[1:], job["stdout"], job["stderr"], env,
                                                               session=True)
    return job


def become(argv, env, cwd, stdout, stderr, session):
    """Makes this process what Python would have made of a command."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if env.get("DRAW"):
        plots.draw = draw
    os.chdir(cwd)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, how if descriptor else os.O_RDONLY, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    unbuffered = argv[0] == "-u"
    argv = argv[argv[0] in ("-u", "-m"):]
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", errors=errors, closefd=False,
                                              buffering=1 if fd == 2 or unbuffered else -1)
                                         for fd, mode, errors in ((0, "r", "strict"), (1, "w", "strict"),
                                                                  (2, "w", "backslashreplace")))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv, sys.orig_argv = argv, [sys.executable, *argv]
    sys.path[0] = os.path.dirname(argv[0])
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, folder)
        if os.path.exists(site := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(site)
    for name in ("train_gpt2", "sample", "fineweb"):    # a script is run, not what was imported of it
        sys.modules.pop(name, None)


def leave(code):
    """As Python's end, without taking down the modules: 0.8 s with torch."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


job = serve()
if job["argv"][0] == "-m":
    job = lend_ranks(job)
become(**job)
try:
    if sys.argv[0] == "torch.distributed.run":
        torch.distributed.run.main()
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if isinstance(end.code, int | None):
        leave(end.code or 0)
    raise
except Exception:
    sys.excepthook(*sys.exc_info())
    leave(1)
leave(0)
