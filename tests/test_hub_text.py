"""fineweb.py --dataset: huggingface_hub and datasets as they are, with a stand-in of the hub on 127.0.0.1."""
import hashlib
import http.server
import io
import json
import math
import re
import shutil
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet
import pytest
from helpers import HANG, ROOT, Live, script
from test_fineweb import gpt2, hub_at, own_shards, plain_shards, read_shards  # noqa: F401

import fineweb
import corpus.hub
from corpus.hub_source import HubSource, default_names
from corpus.sources import LocalSource, Piece, difference
from runtime.cli import RunError, UserError
from corpus.hub import LONGEST_WAIT, asked_wait, wait_to_retry
from corpus.progress import Progress, Task
from runtime.shards import SHARD_NAME, list_shards

TALES = [[f"Tale {i} of book {book}: " + "once upon a time. " * (1 + i % 7) for i in range(40)]
         for book in range(5)]
SIZES = ["--shard_size", "300", "--val_tokens", "200"]


def jsonl(documents, **others):
    rows = ({"body": text, "n": i} | others for i, text in enumerate(documents))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(documents):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(documents)), "text": documents}), file,
                                row_group_size=15)
    return file.getvalue()


def card(**configs):
    """README.md with the configurations {name: {split: path}}."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", ""]).encode()


class Hub:
    """The hub. `repos`: {OWNER/NAME: SHA-1s of its commits}; the first is `main` until somebody has asked for
    it, then the next is. `asked`: (method, path, body) of all requests. `answers`: {regular expression of a
    path: the answers that come first, each (status, headers), or None for half a file}. `hold`: what is asked
    for at such a path waits for `go_on`."""

    def __init__(self):
        hub = self
        self.repos, self.asked, self.answers, self.hold = {}, [], {}, None
        self.go_on = threading.Event()
        self.commits = {}                         # {sha: files}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                hub.asked.append((self.command, self.path, sent))
                status, headers, body, whole = hub.answer(urlsplit(self.path), sent,
                                                          self.headers.get("Range"))
                self.send_response(status)
                for name, value in (headers | {"Content-Length": len(body)}).items():
                    self.send_header(name, str(value))
                self.close_connection = not whole
                with suppress(ConnectionError):             # the process was killed
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(body if whole else body[:len(body) // 2])

            do_HEAD = do_POST = do_GET

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.env = hub_at(f"http://127.0.0.1:{self.server.server_port}")

    def put(self, repo, *commits):
        """Returns the SHA-1s of these commits."""
        shas = [hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest() for files in commits]
        self.commits |= dict(zip(shas, commits, strict=True))
        self.repos[repo] = [*shas]
        return shas

    def answer(self, url, sent, span):
        path, whole = unquote(url.path), True
        for pattern, answers in self.answers.items():
            if answers and re.search(pattern, path):
                if first := answers.pop(0):
                    return *first, b"", True
                whole = False
        if self.hold and re.search(self.hold, path):
            self.go_on.wait(HANG)
        if path == "/":
            return 200, {}, b"", whole
        kinds = "(revision|tree|paths-info|resolve)"
        found = re.fullmatch(rf"/(api/)?datasets/(\w+/[\w-]+)(?:/{kinds}/([^/]+))?/?(.*)", path)
        if not found or found[2] not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"", whole
        shas = self.repos[found[2]]
        sha = shas[0] if found[4] in (None, "main") else found[4]
        if found[4] is None and len(shas) > 1:
            shas.pop(0)
        if sha not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"", whole
        files = self.commits[sha]
        if found[3] == "resolve":
            return *self.file(sha, files.get(found[5]), span), whole
        value = {"id": found[2], "sha": sha}
        if found[3] in ("tree", "paths-info"):
            value = self.listed(found[3], found[5], files, sent, parse_qs(url.query))
        if value == [] and found[3] == "tree":
            return 404, {"X-Error-Code": "EntryNotFound"}, b"", whole
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode(), whole

    def file(self, sha, data, span):
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b""
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if not (span := re.fullmatch(r"bytes=(\d+)-(\d*)", span or "")):
            return 200, headers, data
        return 206, headers, data[int(span[1]):int(span[2] or len(data)) + 1]

    def listed(self, kind, folder, files, sent, query):
        """Files and folders in `folder`, or those that are asked for by name."""
        inside = folder + "/" if folder else ""
        deep = query.get("recursive", [""])[0] == "true"
        names = {name for name in files if name.startswith(inside)}
        names |= {name[:slash.start()] for name in names for slash in re.finditer("/", name)
                  if slash.start() > len(inside)}
        if kind == "paths-info":
            names &= set(json.loads(sent)["paths"] if sent[:1] == "{" else parse_qs(sent)["paths"])
        elif not deep:
            names = {name for name in names if "/" not in name[len(inside):]}
        return [{"type": "file" if name in files else "directory", "path": name, "oid": "0" * 40,
                 "size": len(files.get(name, ""))} for name in sorted(names)]


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.go_on.set()
    hub.server.shutdown()
    hub.server.server_close()


# fineweb.py with the flags of each line, in one process. Nothing waits; what would wait is told.
SEVERAL = """
import contextlib, io, json, sys, types
sys.path.insert(0, {root!r})
import fineweb, huggingface_hub.utils._http as http, runtime.cli as cli, corpus.hub as hub
import datasets.utils.file_utils as files

for line in {runs!r}:
    waits, out, err, code = [], io.StringIO(), io.StringIO(), 0
    http.time = hub.time = files.time = types.SimpleNamespace(sleep=waits.append)
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            fineweb.main(line)
        except (cli.UserError, cli.RunError) as error:
            cli.print_error(error)
            code = 2 if isinstance(error, cli.UserError) else 1
    print(json.dumps([code, out.getvalue(), err.getvalue(), waits]))
"""


def several(folder, env, *runs):
    """The exit code, stdout, stderr and waits of each run, all in one process whose folder this is."""
    runs = [[*map(str, run)] for run in runs]
    (folder / "several.py").write_text(SEVERAL.format(root=str(ROOT), runs=runs))
    result = script(folder / "several.py", env=env, cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "several.py").unlink()
    return [SimpleNamespace(**dict(zip(("code", "stdout", "stderr", "waits"), json.loads(line), strict=True)))
            for line in result.stdout.splitlines()]


def test_a_killed_run_ends_with_the_documents_of_the_revision_it_began_with(hub, gpt2, tmp_path, capsys,  # noqa: F811
                                                                             monkeypatch):
    books = {f"tales/{i}.jsonl": jsonl(book) for i, book in enumerate(TALES)}
    newer = {name: data.replace(b"Tale", b"Poem") for name, data in books.items()}
    readme = card(tales={"train": "tales/*.jsonl", "test": "tales/0.jsonl"}, other={"train": "tales/1.jsonl"})
    sha, _ = hub.put("me/books", *({"README.md": readme} | files for files in (books, newer)))
    flags = ["--dataset", "me/books", "--name", "tales", "--text_field", "body", *SIZES]
    hub.hold = "resolve/.*/4.jsonl"
    patch = ("from corpus import encoding, hub_source\n"
             "encoding.BATCH, hub_source.CURSOR_EVERY = 100, 7\n")
    out, manifest = tmp_path / "out", tmp_path / "out/manifest.json"
    run = Live(tmp_path / "live", [sys.executable, str(ROOT / "fineweb.py"), *flags, "--out", str(out)],
               env=hub.env, patch=patch)
    run.until(lambda: manifest.exists() and (json.loads(manifest.read_text())["mark"] or [0])[0] > 121)
    run.kill()
    hub.go_on.set()
    found = json.loads(manifest.read_text())
    size = sum(map(len, books.values()))
    assert found["source"] == {"repo": "me/books", "name": "tales", "text_field": "body", "revision": sha,
                               "bytes": size}
    assert not found["complete"]
    hub.asked.clear()
    result = script("fineweb.py", *flags, "--out", "out", env=hub.env, cwd=tmp_path)
    assert result.returncode == 0 and "are there already" in result.stdout, result
    documents = sum(TALES, [])
    assert read_shards(tmp_path / "out") == own_shards(gpt2, documents, 200, 300)
    assert all(sha in path for _, path, _ in hub.asked if path != "/" and "agent-harnesses" not in path)
    assert not any("/1.jsonl" in path for _, path, _ in hub.asked)          # before the cursor
    monkeypatch.setattr(corpus.hub, "reach_hub", None)             # from here on no network is asked for
    fineweb.main([*flags, "--out", str(out)])
    assert "shards complete" in capsys.readouterr().out
    with pytest.raises(UserError, match="another source .split: none instead of test"):
        fineweb.main([*flags, "--out", str(out), "--split", "test"])


def test_parts_read_one_revision_and_share_its_documents(hub, gpt2, tmp_path, monkeypatch):  # noqa: F811
    """Of .parquet; the dataset changes as soon as the first part has asked for it."""
    older, newer = ({f"data/train-{i}.parquet": parquet([text.replace("Tale", word) for text in book])
                     for i, book in enumerate(TALES[:3])} for word in ("Tale", "Poem"))
    sha, _ = hub.put("me/tales", older, newer)
    flags = ["--dataset", "me/tales", "--shard_size", 900]
    runs = several(tmp_path, hub.env, [*flags, "--part", "1/2"], [*flags, "--part", "0/2"])
    assert [(run.code, run.waits) for run in runs] == [(0, [])] * 2, runs
    assert "all 2 parts complete" in runs[1].stdout
    out = tmp_path / "tales"
    assert (out / "tales_p0of2_val_000000.npy").exists() and (out / "tales_p1of2_train_000001.npy").exists()
    manifests = [json.loads((out / f"manifest_p{i}of2.json").read_text()) for i in range(2)]
    size = 2 * sum(map(len, older.values()))
    assert [m["source"] for m in manifests] == [{"repo": "me/tales", "revision": sha, "bytes": size}] * 2
    assert {m["val_tokens"] for m in manifests} == {int(size / 4.2) // 2 // 10}
    documents = sum(plain_shards(gpt2, sum(TALES[:3], []), 10**6), [])
    assert sorted(sum(read_shards(out), [])) == sorted(documents)
    # of two parts that began at the same time, one is refused
    manifests[0]["source"]["revision"] = "f" * 40
    (out / "manifest_p0of2.json").write_text(json.dumps(manifests[0]))
    pin = lambda source, out: source.description.update(manifests[1]["source"])           # noqa: E731
    monkeypatch.setattr(HubSource, "pin", pin)
    said = f"source .revision: {'f' * 40} instead of {sha}"
    with pytest.raises(UserError, match=said):
        fineweb.main(["--dataset", "me/tales", "--shard_size", "900", "--part", "1/2", "--out", str(out)])


def test_a_mistake_is_one_line_at_once_and_leaves_no_folder(hub, tmp_path):
    lines = jsonl(TALES[0])
    readme = card(**{f"name{i}": {"train": "a.jsonl", "test": "a.jsonl"} for i in range(60)})
    hub.put("me/books", {"README.md": readme, "a.jsonl": lines})
    hub.put("me/one", {"a.jsonl": lines})
    hub.put("me/null", {"a.jsonl": b'{"body": null, "n": 3}\n' + lines})
    hub.put("me/code", {"code.py": b"1 / 0", "a.jsonl": lines})
    hub.put("me/pictures", {"a.bin": b"1"})
    hub.put("me/broken", {"a.parquet": b"no parquet at all"})
    hub.put("me/mixed", {"a.jsonl": lines, "b.jsonl": jsonl(TALES[1], more=[1])})
    hub.put("me/gated", {"README.md": b"", "a.jsonl": lines})
    hub.answers = {"me/gated/resolve": [(403, {"X-Error-Code": "GatedRepo"})] * 99,
                   "datasets/me/wall": [(403, {})] * 99}
    body = ["--text_field", "body"]
    cases = {
        ("me/nothing",): "check the name; if it is private or gated, accept its terms on its page and log in "
                         "with `hf auth login` or set HF_TOKEN",
        ("me/wall",): "me/wall: the hub shows no such dataset (", ("me/gated", *body): "a gated dataset",
        ("me/books", *body): "available configs: ['name0', 'name1', 'name2'",
        ("me/books", "--name", "no", *body): "'no' not found. Available: ['name0', 'name1'",
        ("me/one", "--name", "no", *body): "'no' not found. Available: ['default']",
        ("me/one", "--split", "no", *body): "Bad split: no. Available splits: ['train']",
        ("me/one", "--split", "train[:10%]", *body): "Bad split: train[:10%]. Available splits: ['train']",
        ("me/one",): "document 0 has no string `text`; its columns are body, n: give another --text_field",
        ("me/null", "--text_field", "n"): "document 0 has no string `n`; its columns are body, n",
        ("me/code", *body): "code from the hub is never run", ("me/pictures",): "me/pictures cannot be read",
        ("me/broken",): "me/broken cannot be read", ("me/mixed", *body): "me/mixed: its files have not all"}
    others = ["--out", "new/out", "--val_tokens", "100000"]           # no shard before the end
    runs = several(tmp_path, hub.env, *(["--dataset", *case, *others] for case in cases))
    for run, (case, said) in zip(runs, cases.items(), strict=True):
        lines = [line for line in run.stderr.splitlines() if not line.startswith("Failed to read")]
        assert run.code == 2 and not run.waits and len(lines) == 1 and said in lines[0], (case, run)
        assert len(lines[0]) < 450, run
    assert list(tmp_path.iterdir()) == []


def test_waits_are_as_long_as_the_hub_asks_and_a_broken_file_is_read_on(hub, gpt2, tmp_path):  # noqa: F811
    hub.put("me/one", {"a.jsonl": jsonl(TALES[0]), "b.jsonl": jsonl(TALES[1])})
    # neither a local folder nor what `datasets` keeps is taken in its place
    (tmp_path / "me/one").mkdir(parents=True)
    (tmp_path / "me/one/a.jsonl").write_bytes(jsonl(TALES[2]))
    (tmp_path / "cache/me___one/default/0.0.0/abc").mkdir(parents=True)
    env = hub.env | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=3000), usegmt=True)
    hub.answers = {"api/datasets/me/one$": [(429, {"Retry-After": "7"}), (503, {"Retry-After": soon}),
                                            (500, {}), (429, {"RateLimit": '"api";r=0;t=55'})],
                   "api/datasets/me/one/revision": [(429, {"Retry-After": "100"})],
                   "resolve/.*/b.jsonl": [None, None]}
    run, again = several(tmp_path, env, *[["--dataset", "me/one", "--text_field", "body", *SIZES]] * 2)
    assert run.code == again.code == 0, run
    waits = [wait if wait < 100 else round(wait, -2) for wait in run.waits]
    assert waits[:5] == [7, 3000, 4, 55, 100] and len(waits) < 12, run.waits
    assert "trying again in 7 s, as the hub asks" in run.stderr and "trying again in 4 s\n" in run.stderr
    assert read_shards(tmp_path / "one") == own_shards(gpt2, TALES[0] + TALES[1], 200, 300)
    assert again.waits == [] and "shards complete" in again.stdout


def test_a_revision_that_the_hub_no_longer_has_is_a_mistake_and_one_of_an_earlier_version_stays_unpinned(
        hub, gpt2, tmp_path, monkeypatch):  # noqa: F811
    """A folder without a revision in its manifest, as earlier versions made them."""
    hub.put("HuggingFaceFW/fineweb", {"README.md": card(**{"sample-10BT": {"train": "a.parquet"}}),
                                      "a.parquet": parquet(TALES[0])})
    with monkeypatch.context() as patch:
        patch.setattr(HubSource, "pin", lambda source, out: None)
        patch.setattr(HubSource, "read", lambda source, *where: map(Piece, TALES[0]))
        fineweb.main(["--variant", "classic", "--shard_size", "1000", "--out", str(tmp_path / "fineweb10B")])
    found = json.loads((tmp_path / "fineweb10B/manifest.json").read_text())
    assert found["source"] == {"repo": "HuggingFaceFW/fineweb", "name": "sample-10BT"}
    shards = read_shards(tmp_path / "fineweb10B")
    assert sum(shards, []) == sum(plain_shards(gpt2, TALES[0], 10**6), [])
    last = found["shards"].pop()
    (tmp_path / "fineweb10B" / last["file"]).unlink()
    found |= {"complete": False, "mark": None, "tokens": found["tokens"] - last["tokens"]}
    others = {"old": {}, "gone": {"revision": "d" * 40}, "bad": {"revision": "../main"}}
    for name, source in others.items():
        shutil.copytree(tmp_path / "fineweb10B", tmp_path / name)
        source = found["source"] | source
        (tmp_path / name / "manifest.json").write_text(json.dumps(found | {"source": source}))
    flags = ["--dataset", "HuggingFaceFW/fineweb", "--name", "sample-10BT", "--shard_size", 1000, "--out"]
    old, gone, bad = several(tmp_path, hub.env, *[[*flags, name] for name in others])
    assert old.code == 0 and read_shards(tmp_path / "old") == shards, old
    assert json.loads((tmp_path / "old/manifest.json").read_text())["source"] == found["source"]
    assert (gone.code, gone.waits, gone.stderr.count("\n")) == (2, [], 1), gone
    assert "no longer on the hub" in gone.stderr
    assert bad.code == 2 and "damaged" in bad.stderr


# -----------------------------------------------------------------------------
# without the hub

@pytest.mark.parametrize("name", ["", "x", "a b/c", "a/b/c", "a/..", "../b", "-a/b", "a/-b", "a/b.", "a/b--c",
                                  "a/", "/b", "a/b c", "a/b\n", "ä/b", "~/b", "hf://datasets/a/b"])
def test_a_malformed_name_is_refused_at_once(name, monkeypatch):
    monkeypatch.setattr(HubSource, "pin", None)
    with pytest.raises(UserError, match="--dataset"):
        fineweb.main([f"--dataset={name}"])


@pytest.mark.parametrize("flags, said", [
    (["--variant", "edu"], "--variant cannot be combined with --dataset"),
    (["--sample=10BT"], "--sample cannot be combined with --dataset"),
    (["--input", "a.txt"], "--input cannot be combined with --dataset"),
    (["--pretokenized", "1"], "--dataset cannot be combined with --pretokenized"),
    (["--verify", "x"], "--dataset cannot be combined with --verify"), (["--name="], "--name is empty")])
def test_flags_of_another_source_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        fineweb.parse_args(["--dataset", "a/b", *flags])


def test_name_and_split_need_dataset():
    for flag in ("--name", "--split"):
        with pytest.raises(UserError, match=f"{flag} needs --dataset"):
            fineweb.parse_args([flag, "train"])


@pytest.mark.parametrize("flags", [["--name", "x"], ["--split", "train"], ["--variant", "classic"],
                                   ["--sample", "10BT"], ["--pretokenized", "1"], ["--verify", "x"]])
def test_input_takes_no_flags_of_another_source(flags):
    with pytest.raises(UserError, match="cannot be combined with --"):
        fineweb.parse_args(["--input", "a.txt", "--out", "x", *flags])


def test_variant_and_sample_are_names_of_datasets():
    for flags, repo, name in (([], "fineweb-edu", "sample-10BT"),
                              (["--variant", "classic", "--sample", "100BT"], "fineweb", "sample-100BT")):
        ours = fineweb.parse_args(flags)
        same = fineweb.parse_args(["--dataset", f"HuggingFaceFW/{repo}", "--name", name])
        assert vars(ours) == vars(same) | {"variant": ours.variant, "sample": ours.sample}
        source = HubSource(ours.dataset, ours.name)
        assert source.description == {"repo": ours.dataset, "name": name} and source.shuffled
    assert source.expected == 100 * 10**9
    assert HubSource(ours.dataset, ours.name, (0, 3)).expected == 100 * 10**9 // 3
    other = HubSource("a/sample", "sample-10BT")
    assert other.expected == math.inf and not other.shuffled


@pytest.mark.parametrize("repo, name, split, names", [
    ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", ("edufineweb", "edu_fineweb10B")),
    ("HuggingFaceFW/fineweb-edu", "sample-350BT", "train", ("edufineweb", "edu_fineweb350B")),
    ("HuggingFaceFW/fineweb", "sample-10BT", "test", ("fineweb-sample-10BT-test",) * 2),
    ("roneneldan/TinyStories", None, "train", ("TinyStories",) * 2),
    ("a/b_p1of2", "../ü/c_train_000001.npy", "train", ("b-p1of2-..-c-train-000001.npy",) * 2),
    ("a/_", "_", "train", ("hub",) * 2)])
def test_folder_and_prefix_are_the_datasets_name(repo, name, split, names):
    assert default_names(repo, name, split) == names
    assert "/" not in names[1] and SHARD_NAME.match(f"{names[0]}_p0of2_train_000001.npy")
    assert len(default_names(repo, "x" * 300, "train")[0]) <= 100


@pytest.mark.parametrize("name, seconds", [
    ("9", 9), (" 9 ", 9), ("99999999", LONGEST_WAIT), ("9" * 5000, LONGEST_WAIT), ("-5", 0), ("soon", 0),
    ("", 0), ("1e9", 0), ("nan", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ("Wed, 21 Oct 9000 07:28:00 GMT", LONGEST_WAIT)])
@pytest.mark.parametrize("status", [429, 503, 404])
def test_retry_after_is_read_whatever_it_holds(name, seconds, status):
    """From the error itself, its cause and its context, in a circle too."""
    errors = [OSError(), ValueError(), OSError()]
    errors[0].__cause__, errors[1].__context__, errors[2].__context__ = errors[1], errors[2], errors[0]
    errors[2].response = SimpleNamespace(status_code=status, headers={"retry-after": name})
    assert asked_wait(errors[0]) == asked_wait(errors[2]) == (seconds if status != 404 else 0)


def test_of_two_waits_the_longer_is_taken_and_said(monkeypatch, capsys):
    waits, error = [], OSError("busy")
    error.response = SimpleNamespace(status_code=503, headers={"retry-after": "20"})
    monkeypatch.setattr(corpus.hub, "time", SimpleNamespace(sleep=waits.append))
    for failures in (4, 5):
        wait_to_retry(error, failures, "a/b", "cannot read")
    assert waits == [20, 32]
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("trying again in 20 s, as the hub asks") and said[1].endswith("again in 32 s")
    with pytest.raises(RunError):
        wait_to_retry(error, corpus.hub.RETRIES, "a/b", "cannot read")


def test_a_source_of_unknown_size_has_no_total(tmp_path, monkeypatch):
    monkeypatch.setattr(HubSource, "pin", lambda source, out: None)
    (tmp_path / "a.txt").write_text("one two three. " * 300)
    text = LocalSource([str(tmp_path / "a.txt")])
    monkeypatch.setattr(HubSource, "read", lambda source, *where: text.read(*where))
    totals, begin = [], Progress.__call__
    monkeypatch.setattr(Progress, "__call__",
                        lambda self, *what: (totals.append(what[1:2]), begin(self, *what))[1])
    fineweb.main(["--dataset", "a/b", "--out", str(tmp_path / "out"), "--shard_size", "500"])
    assert totals[-1] == (None,)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["val_tokens"] == 500
    assert len(list_shards(tmp_path / "out", "train")) > 1
    assert str(Task("x", None, "tokens", 0, 0, 7)).startswith("x: 7 tokens, ")


def test_what_differs_between_two_sources_of_the_hub_is_said_in_words():
    found = HubSource("a/b", "c").description | {"revision": "1" * 40, "bytes": 5}
    assert difference(found, found | {"revision": "2" * 40}) == (
        f"revision: {'1' * 40} instead of {'2' * 40}")
    assert difference(HubSource("a/b", None).description, HubSource("a/b", None, split="x").description) == (
        "split: none instead of x")


def test_a_folder_of_another_source_or_a_damaged_one_is_refused_without_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.hub, "reach_hub", None)
    (tmp_path / "a.txt").write_text("one two three. " * 300)
    fineweb.main(["--input", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")])
    for said in ("repo: none instead of a/b", "manifest.json cannot be read"):
        with pytest.raises(UserError, match=said):
            fineweb.main(["--dataset", "a/b", "--out", str(tmp_path / "out")])
        (tmp_path / "out/manifest.json").write_text("{")


def test_a_row_without_text_is_an_empty_document(hub, tmp_path, monkeypatch):
    source = HubSource("me/null", None)
    monkeypatch.setattr(corpus.hub, "reach_hub", lambda: True)
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}]
    monkeypatch.setattr(HubSource, "_open", lambda *args: rows)
    assert [piece.text for piece in source.read()] == ["a", "", "b"]


@pytest.mark.parametrize("size", ["12", 12.5, 1e9, True, [], -1, 1 << 61])
def test_a_size_in_a_manifest_that_is_none_is_refused(size, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"source": {"repo": "me/x", "bytes": size}}))
    with pytest.raises(UserError, match="damaged"):
        HubSource("me/x", None).pin(tmp_path)


def test_a_manifest_of_another_configuration_does_not_decide_on_size_and_revision(tmp_path, monkeypatch):
    path, source = tmp_path / "manifest.json", HubSource("me/x", "b")
    path.write_text(json.dumps({"source": {"repo": "me/x", "name": "a", "revision": "1" * 40, "bytes": 7}}))
    source.pin(tmp_path)                          # asks nobody: the folder is of another source
    assert source.description == {"repo": "me/x", "name": "b"}
    path.unlink()
    monkeypatch.setattr("corpus.hub_source.need_hub", lambda what: None)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info",
                        lambda *args, **kwargs: SimpleNamespace(sha="2" * 40))
    monkeypatch.setattr(HubSource, "_text_bytes", lambda source: 99)
    source.pin(tmp_path)
    assert source.description == {"repo": "me/x", "name": "b", "revision": "2" * 40, "bytes": 99}
