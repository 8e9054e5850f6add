"""Starts commands as processes of their own, forked from this one, which has imported torch: that and
Python's end take two of the two and a half seconds of a small run. All else is as when they are started by
themselves: process id, signals, exit code.

Reads requests from stdin, one a line, and answers each by a line on stdout:
{"argv": [...], "env": {...}, "cwd": ..., "stdout": path, "stderr": path, "session": bool} -> process id
{"wait": process id, "block": bool} -> exit code as subprocess has it, null while it runs
"""
import atexit
import json
import os
import runpy
import sys
import threading

sys.path[0] = os.path.dirname(sys.path[0])              # where the scripts are

import train_gpt2                                                       # noqa: E402, F401, once for all
import sample                                                           # noqa: E402, F401


def serve():
    """Answers until the other end is closed; in a forked process returns the request."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            return request
        print(json.dumps(answer), flush=True)
    return None


def become(argv, env, cwd, stdout, stderr, session):
    """Makes this process what Python would have made of a command."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, how if descriptor else os.O_RDONLY, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", errors=errors, closefd=False,
                                              buffering=1 if fd == 2 else -1)
                                         for fd, mode, errors in ((0, "r", "strict"), (1, "w", "strict"),
                                                                  (2, "w", "backslashreplace")))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv, sys.orig_argv = argv, [sys.executable, *argv]
    sys.path[0] = os.path.dirname(argv[0])
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, folder)
        if os.path.exists(site := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(site)
    for name in ("train_gpt2", "sample"):               # a script is run, not what was imported of it
        sys.modules.pop(name, None)


def leave(code):
    """As Python's end, without taking down the modules: 0.8 s with torch."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if job := serve():
    become(**job)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            leave(end.code or 0)
        raise
    leave(0)
