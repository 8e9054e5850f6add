"""A stand-in of the Hugging Face hub on 127.0.0.1, for huggingface_hub and datasets as they are."""
import contextlib
import functools
import hashlib
import http.server
import json
import re
import threading
import time
from urllib.parse import parse_qs, unquote, urlsplit

import helpers

PATH = re.compile(
    r"(?:/api)?(?:/datasets)?/(?P<repo>[\w-]+/[\w-]+)"
    r"(?:/(?P<kind>revision|tree|paths-info|resolve)/(?P<revision>[^/]+))?/?(?P<name>.*)")


def do_not_wait():
    """For `before`: huggingface_hub asks again at once where it has been told of an error."""
    time.sleep = id


class Handler(http.server.BaseHTTPRequestHandler):
    """Asks `hub`, which a subclass has, for the answers."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        url = urlsplit(self.path)
        self.hub.requests.append(self.path)
        if self.command == "GET":
            self.hub.asked.append(self.path)

        status, headers, body = self.hub.answer(url, sent)
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if status == 200 and part:
            status = 206
            end = int(part[2]) + 1 if part[2] else len(body)
            body = body[int(part[1]):end]

        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):            # the process was killed
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    do_HEAD = do_GET
    do_POST = do_GET

    def log_message(self, *args):
        pass


class Hub:
    """A context, in which the hub serves.

    `repos`: {OWNER/NAME: the SHA-1s of its commits}. The first one is `main` until somebody has
    asked for it, and then the next one is.
    `asked`: the paths that were asked for. `requests` has also those of HEAD.
    `answers`: {regular expression of a path: (status, headers)}, which are given instead.
    `env`: the environment of a process that is to use this hub."""

    def __init__(self):
        self.repos = {}
        self.commits = {}           # {SHA-1: {path: bytes}}
        self.asked = []
        self.requests = []
        self.answers = {}

    def __enter__(self):
        handler = type("HandlerOfHub", (Handler,), {"hub": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        # shutdown() waits for the server's next poll, by default for half a second.
        serve = functools.partial(self.server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        self.env = {**helpers.ENV, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
                    "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
                    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def put(self, repo, *commits):
        """Gives a repository these commits, each {path: bytes}. Returns their SHA-1s."""
        self.repos[repo] = []
        for files in commits:
            sha = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
            self.repos[repo].append(sha)
            self.commits[sha] = files
        return list(self.repos[repo])

    def answer(self, url, sent):
        """(status, headers, body) of a request. `sent` is the body that came with it."""
        path = unquote(url.path)
        for pattern, (status, headers) in self.answers.items():
            if re.search(pattern, path):
                return status, headers, b""

        found = PATH.fullmatch(path)
        if found is None or found["repo"] not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        sha = self.commit(found["repo"], found["revision"])
        if sha not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = self.commits[sha]

        if found["kind"] == "resolve":
            return self.file(sha, files.get(found["name"]))
        if found["kind"] == "paths-info":
            asked = parse_qs(sent).get("paths", [])
            if sent.startswith("{"):
                asked = json.loads(sent)["paths"]
            return self.listing(files, [name for name in asked if name in files])
        if found["kind"] == "tree":
            names = self.tree(files, found["name"], "recursive=true" in url.query.lower())
            if not names:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            return self.listing(files, names)
        body = json.dumps({"id": found["repo"], "sha": sha}).encode()
        return 200, {"Content-Type": "application/json"}, body

    def commit(self, repo, revision):
        """The SHA-1 of a revision. To ask for none is to ask for what is newest now."""
        commits = self.repos[repo]
        sha = revision
        if revision in (None, "main"):
            sha = commits[0]
        if revision is None and len(commits) > 1:
            commits.pop(0)
        return sha

    def file(self, sha, data):
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
        etag = hashlib.sha256(data).hexdigest()
        return 200, {"X-Repo-Commit": sha, "ETag": f'"{etag}"'}, data

    def tree(self, files, folder, recursive):
        """The names of the files and folders in `folder`."""
        prefix = f"{folder}/" if folder else ""
        names = set()
        for name in files:
            if name.startswith(prefix):
                parts = name.removeprefix(prefix).split("/")
                for depth in range(1, len(parts) + 1):
                    names.add(prefix + "/".join(parts[:depth]))
        if not recursive:
            names = {name for name in names if "/" not in name.removeprefix(prefix)}
        return sorted(names)

    def listing(self, files, names):
        entries = []
        for name in names:
            data = files.get(name, b"")
            kind = "file" if name in files else "directory"
            sha256 = hashlib.sha256(data).hexdigest()
            lfs = {"oid": sha256, "size": len(data), "pointerSize": 130}
            entries.append({"type": kind, "path": name, "oid": "0" * 40, "size": len(data),
                            "lfs": lfs})
        return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
