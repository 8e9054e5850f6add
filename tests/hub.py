"""A stand-in of the Hugging Face hub on 127.0.0.1, for huggingface_hub and datasets as they are; and runs of
fineweb.py, which may kill themselves."""
import contextlib
import functools
import gc
import hashlib
import http.server
import json
import multiprocessing
import os
import re
import signal
import subprocess
import threading
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import helpers


class Hub:
    """`repos`: {OWNER/NAME: SHA-1s of its commits}; the first is `main` until somebody has asked for it, then
    the next is. `asked`: paths that were asked for. `answers`: {regular expression of a path: (status,
    headers)} that are given instead. As a context it serves, with `env` for a process that is to use it."""

    def __init__(self):
        self.repos, self.asked, self.answers, self.commits = {}, [], {}, {}

    def __enter__(self):
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                hub.asked += [self.path] * (self.command == "GET")
                status, headers, body = hub.answer(urlsplit(self.path), sent, self.headers.get("Range"))
                self.send_response(status)
                for name, value in (headers | {"Content-Length": len(body)}).items():
                    self.send_header(name, str(value))
                with contextlib.suppress(ConnectionError):            # the process was killed
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(body)

            do_HEAD = do_POST = do_GET

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.env = {name: value for name, value in helpers.ENV.items() if name != "HF_HUB_OFFLINE"} | {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}", "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def put(self, repo, *commits):
        """Returns the SHA-1s of these commits, each {path: bytes}."""
        shas = [hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest() for files in commits]
        self.commits |= dict(zip(shas, commits, strict=True))
        self.repos[repo] = [*shas]
        return shas

    def answer(self, url, sent, span):
        """(status, headers, body)."""
        path = unquote(url.path)
        for pattern, (status, headers) in self.answers.items():
            if re.search(pattern, path):
                return status, headers, b""
        kinds = "(revision|tree|paths-info|resolve)"
        found = re.fullmatch(rf"(?:/api)?(?:/datasets)?/([\w-]+/[\w-]+)(?:/{kinds}/([^/]+))?/?(.*)", path)
        if not found or found[1] not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        (repo, kind, revision, name), shas = found.groups(), self.repos[found[1]]
        sha = shas[0] if revision in (None, "main") else revision
        if revision is None and len(shas) > 1:
            shas.pop(0)
        if sha not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files, value = self.commits[sha], {"id": repo, "sha": sha}
        if kind == "resolve":
            return self.file(sha, files.get(name), span)
        if kind in ("tree", "paths-info"):
            value = self.listed(kind, name, files, sent, parse_qs(url.query))
        if value == [] and kind == "tree":
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def file(self, sha, data, span):
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if not (span := re.fullmatch(r"bytes=(\d+)-(\d*)", span or "")):
            return 200, headers, data
        return 206, headers, data[int(span[1]):int(span[2] or len(data)) + 1]

    def listed(self, kind, folder, files, sent, query):
        """Files and folders in `folder`, or those that are asked for by name."""
        inside = folder + "/" if folder else ""
        names = {name for name in files if name.startswith(inside)}
        names |= {name[:slash.start()] for name in names for slash in re.finditer("/", name)
                  if slash.start() > len(inside)}
        if kind == "paths-info":
            names &= set(json.loads(sent)["paths"] if sent[:1] == "{" else parse_qs(sent)["paths"])
        elif query.get("recursive", [""])[0] != "true":
            names = {name for name in names if "/" not in name[len(inside):]}

        def entry(name):
            data = files.get(name, b"")
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            return {"type": "file" if name in files else "directory", "path": name, "oid": "0" * 40,
                    "size": len(data), "lfs": lfs}
        return [*map(entry, sorted(names))]


def several(folder, env, *runs):
    """fineweb.py with the flags of each run, one after the other, in `folder`: their results. A run that
    begins with a tuple kills itself: the arguments of `die`."""
    call = functools.partial(_several, [[*map(lambda x: x if isinstance(x, tuple) else str(x), run)]
                                        for run in runs])
    [(code, out, err)] = helpers.forked(call, envs=[env], cwds=[folder])
    assert code == 0, err
    return [subprocess.CompletedProcess("fineweb.py", *json.loads(line)) for line in out.splitlines()]


def _several(runs):
    """Forks them from this process, which has imported what they need, and has an encoder."""
    import fineweb
    import runtime.text
    fetches = all("--pretokenized" in run for run in runs)            # and encodes nothing
    if "HF_ENDPOINT" in os.environ:
        if not fetches:
            import datasets                                           # noqa: F401
        import huggingface_hub.utils._http as hub
        hub.time = SimpleNamespace(sleep=lambda seconds: None)        # before it tries again
    if not fetches:
        encoder, runtime.text.BLOCK = fineweb.Encoder(), 900
        fineweb.Encoder = lambda name: encoder
    import tqdm                                                       # noqa: F401
    os.fsync = lambda descriptor: None                                # a killed process's writes stay
    gc.freeze()                                                       # collections would copy all memory
    helpers.FORK = multiprocessing.get_context("fork")
    for moment, *flags in ([None, *run] if isinstance(run[0], str) else run for run in runs):
        result = helpers.script("fineweb.py", *flags, env=dict(os.environ),
                                before=[functools.partial(die, *moment)] if moment else [])
        print(json.dumps([result.returncode, result.stdout, result.stderr]))


def die(nth, how, kind="replace"):
    """The process kills itself at its rename number `nth`: "after" it, or with "half" of the file written.
    `kind`: fineweb.py renames by os.replace, the hub's library by os.rename."""
    rename, calls = getattr(os, kind), []

    def dying(*paths):
        calls.append(paths)
        if len(calls) == nth:
            if how == "after":
                rename(*paths)
            else:
                os.truncate(paths[0], os.path.getsize(paths[0]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*paths)
    setattr(os, kind, dying)
