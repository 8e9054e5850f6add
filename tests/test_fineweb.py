"""fineweb.py: text -> shards, their validation, kills, what is refused, the hub, the command that trains."""
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ENV, HANG, ROOT, limit_file_size, script, warm
from hub import Hub
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataloader import FAST
from test_text import DOCUMENTS, stream_of, written

import fineweb
import runtime.shards
import runtime.text
from runtime.cli import UserError
from runtime.presets import PRESETS
from runtime.shards import list_shards, open_shard, write_shard


@pytest.fixture(autouse=True)
def one_encoder(encoder, monkeypatch):
    """Made once for all runs in this process. And rows of a few documents, as if the texts were long."""
    monkeypatch.setattr(fineweb, "Encoder", lambda: encoder)
    monkeypatch.setattr(runtime.text, "BLOCK", 900)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A file of documents. Where it is made is the working directory."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "a.jsonl", DOCUMENTS)


def prepare(*args):
    fineweb.main([str(arg) for arg in args])


def tokens_in(folder, split):
    return np.concatenate([open_shard(path) for path in list_shards(folder, split)]).tolist()


def lengths(folder, split):
    return [len(open_shard(path)) for path in list_shards(folder, split)]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def in_blocks(stream, block, most):
    """(validation, training): every tenth block is for validation, until that has so many tokens."""
    stream = np.array(stream)
    chosen = np.arange(len(stream)) // block % 10 == 9
    chosen &= np.cumsum(chosen) <= most
    return stream[chosen].tolist(), stream[~chosen].tolist()


def block_of(stream):
    return min(4096, len(stream) // 40)


# -----------------------------------------------------------------------------
# what the shards hold

@pytest.mark.parametrize("shard_size, most", [(97, None), (1000, 333), (2500, 10**6), (10**8, None),
                                              (10**8, 7)])
@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_shards_are_the_stream_and_every_tenth_block_is_for_validation(shard_size, most, kind, gpt2, text):
    prepare("--input", text, "--out", "out", "--shard_size", shard_size, "--workers", 3, "--format", kind,
            *(["--val_tokens", most] if most else []))
    stream = stream_of(gpt2, DOCUMENTS)
    val, train = in_blocks(stream, block_of(stream), most or shard_size)
    assert (tokens_in("out", "val"), tokens_in("out", "train")) == (val, train)
    *full, last = lengths("out", "train")
    assert {*full} <= {shard_size} and last <= shard_size
    names = sorted(path.name for path in Path("out").iterdir())
    assert names[:2] == ["manifest.json", f"text_train_000001.{kind}"] and f"text_val_000000.{kind}" in names
    assert len(names) == 1 + len(full) + 1 + len(lengths("out", "val"))


@settings(FAST, max_examples=40)
@given(st.data())
def test_wherever_shards_blocks_files_and_rows_end_no_token_is_lost(gpt2, tmp_path_factory, data):
    some = st.lists(st.sampled_from(DOCUMENTS[4:60]), max_size=12)
    files = data.draw(st.lists(some, min_size=1, max_size=3))
    folder = tmp_path_factory.mktemp("any")
    stream = stream_of(gpt2, sum(files, []))
    limit = data.draw(st.integers(200, 3000))
    size, most = data.draw(st.integers(1, 700)) + len(stream) // 40, data.draw(st.integers(1, 199))
    paths = [written(folder / f"{i}.{kind}", texts) for i, (texts, kind) in
             enumerate(zip(files, ("jsonl", "parquet", "csv"), strict=False))]
    flags = ["--input", *paths, "--out", folder / "out", "--shard_size", size, "--val_tokens", most,
             "--max_tokens", limit]
    if min(len(stream), limit) < 200:
        with pytest.raises(UserError, match="only"):
            prepare(*flags)
        return
    prepare(*flags)
    val, train = in_blocks(stream[:limit], block_of(stream[:limit]), most)
    assert (tokens_in(folder / "out", "val"), tokens_in(folder / "out", "train")) == (val, train)


def test_a_text_of_200_tokens_is_divided_and_a_shorter_one_is_too_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n in (199, 200):
        Path("a.txt").write_text(" a" * (n - 1))
        if n < 200:
            with pytest.raises(UserError, match="199 tokens"):
                prepare("--input", "a.txt", "--out", "out")
            assert not Path("out").exists()
    prepare("--input", "a.txt", "--out", "out")
    assert (lengths("out", "val"), lengths("out", "train")) == ([20], [180])


def test_shakespeare_has_blocks_of_4096_tokens(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 1 << 20)
    prepare("--input", ROOT / "input.txt", "--out", tmp_path)
    stream = stream_of(gpt2, [(ROOT / "input.txt").read_text(encoding="utf-8")])
    assert tokens_in(tmp_path, "val") == in_blocks(stream, 4096, 10**8)[0]
    assert (lengths(tmp_path, "val"), lengths(tmp_path, "train")) == ([32_768], [len(stream) - 32_768])


def test_val_input_takes_whole_files_for_validation(gpt2, text):
    Path("val").mkdir()
    Path("val/a.txt").write_text("one\n\ntwo")
    written(Path("val/b.csv"), DOCUMENTS[:20])
    prepare("--input", text, "--val_input", "val/a.txt", "val/*.csv", "--out", "out", "--shard_size", 500)
    assert tokens_in("out", "val") == stream_of(gpt2, ["one\n\ntwo", *DOCUMENTS[:20]])
    assert tokens_in("out", "train") == stream_of(gpt2, DOCUMENTS)
    assert {*lengths("out", "val")[:-1], *lengths("out", "train")[:-1]} == {500}
    Path("val/none.txt").touch()
    with pytest.raises(UserError, match="none for validation"):
        prepare("--input", text, "--val_input", "val/none.txt", "--out", "other")


def test_files_folders_and_globs_are_read_in_order_and_other_kinds_left_alone(gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in/deep").mkdir(parents=True)
    for i, name in enumerate(("b.jsonl", "a.parquet", "c.jsonl.gz")):
        written(tmp_path / "in" / name, DOCUMENTS[i * 50:i * 50 + 50])
    (tmp_path / "in/d.TXT").write_text("upper case")
    for name in ("x.pdf", "LICENSE", "deep/e.md"):
        (tmp_path / "in" / name).write_text("deep")
    want = stream_of(gpt2, [*DOCUMENTS[50:100], *DOCUMENTS[:50], *DOCUMENTS[100:150], "upper case"])
    for i, flags in enumerate((["in"], ["in/*"], ["in/a*", "in/b.jsonl", "--input", "in/[cd]*"])):
        prepare("--input", *flags, "--out", f"{i}", "--val_tokens", 1)
        assert tokens_in(f"{i}", "train") == in_blocks(want, block_of(want), 1)[1]
    prepare("--input", "in/**", "--out", "all", "--val_tokens", 1)
    assert tokens_in("all", "train")[-2:] == [50256, *gpt2.encode_ordinary("deep")]


def test_text_field_names_the_column(gpt2, text):
    Path("b.jsonl").write_text("".join(json.dumps({"text": "no", "body": t}) + "\n" for t in DOCUMENTS))
    prepare("--input", "b.jsonl", "--text_field", "body", "--out", "out", "--val_tokens", 1)
    assert len(tokens_in("out", "train")) + 1 == len(stream_of(gpt2, DOCUMENTS))


def test_a_document_of_100_mb_and_chinese_without_spaces(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 1 << 20)
    line = "To be, or not to be: that is the question 🙂.\r\n"
    documents = [line * (100 * 2**20 // len(line.encode())), "春眠不覺曉處處聞啼鳥" * 100_000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_tokens", 1)
    tokens = open_shard(tmp_path / "out/text_train_000001.npy")
    one, two = gpt2.encode_ordinary(line), gpt2.encode_ordinary("春眠不覺曉處處聞啼鳥")
    assert len(tokens) + 1 == 2 + len(one) * (len(documents[0]) // len(line)) + len(two) * 100_000
    assert tokens[:1 + len(one)].tolist() == [50256, *one] and tokens[-len(two):].tolist() == two


# -----------------------------------------------------------------------------
# kills

# sitecustomize.py: the process kills itself at its n-th rename, before it or with -n right after it
DIES = """
import os, signal
at, calls, replace = int(os.environ["DIES_AT"]), [], os.replace

def dying(*paths):
    calls.append(paths)
    if len(calls) == -at:
        replace(*paths)
    if len(calls) == abs(at):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = dying
"""


def killed(folder, at, *flags, env=ENV):
    """The command in `folder`, killed at a rename: its exit code."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site/sitecustomize.py").write_text(DIES)
    env = env | {"DIES_AT": str(at), "PYTHONPATH": str(folder / "site")}
    return script("fineweb.py", *flags, env=env, cwd=folder).returncode


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_killed_again_and_again_it_ends_with_the_bytes_of_an_uninterrupted_run(text, tmp_path):
    """A step renames a training shard, one of validation and the manifest; before the first, the manifest."""
    text_again = (ROOT / "input.txt").read_text(encoding="utf-8")[:60_000]
    (tmp_path / "b.txt").write_text(text_again)
    written(tmp_path / "c.parquet", DOCUMENTS)
    flags = ["--input", "a.jsonl", "b.txt", "c.parquet", "--shard_size", 9000, "--val_tokens", 3000]
    prepare(*flags, "--out", "whole")
    assert len(contents("whole")) == 1 + 4 + 4
    for at in (1, -2, 3, -4, 3, -1, -5):
        assert killed(tmp_path, at, *flags, "--out", "out") == -9
    done = script("fineweb.py", *flags, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done
    assert contents("out") == contents("whole")


def test_wherever_it_dies_the_same_command_ends_with_the_same_bytes(text, tmp_path, monkeypatch):
    """At any rename, as if it were killed, and with a half-written file left behind."""
    class Killed(BaseException):
        pass

    def dying(path, write):
        nonlocal left
        left -= 1
        if left == 0 and at_end:
            replace_file(path, write)
        if left == 0:
            if not at_end:
                Path(f"{path}.4711.tmp").write_bytes(b"half")
            raise Killed
        replace_file(path, write)

    replace_file, left, at_end = runtime.shards.replace_file, 0, False
    for flags in (["--val_tokens", 300], ["--val_tokens", 300, "--max_tokens", 4000],
                  ["--val_input", written(Path("val.csv"), DOCUMENTS[:30])]):
        flags = ["--input", text, *flags, "--shard_size", 1500]
        prepare(*flags, "--out", whole := f"whole{flags[-3]}".replace("/", "-"))
        for number in range(1, 30):
            for at_end in (False, True):
                left, out = number, tmp_path / f"{number}{at_end}{flags[-3]}".replace("/", "-")
                with monkeypatch.context() as patch:
                    patch.setattr(runtime.shards, "replace_file", dying)
                    try:
                        prepare(*flags, "--out", out)
                    except Killed:
                        prepare(*flags, "--out", out)
                assert contents(out) == contents(whole), (number, at_end)
            if left > 0:
                break                             # there is no such rename
        assert number > 8


def test_what_is_complete_is_left_alone_and_only_leftovers_of_the_command_are_removed(text, monkeypatch):
    Path("out").mkdir()
    ours = ["text_train_000001.npy.77.tmp", "text_val_000000.bin.tmp", "manifest.json.5.tmp"]
    others = ["edufineweb_train_000001.npy.77.tmp", "notes.tmp", "text_train_000001.npy.x.tmp", "README"]
    for name in ours + others:
        Path("out", name).write_text("half")
    prepare("--input", text, "--out", "out")
    assert {*others} < {*contents("out")} and not {*ours} & {*contents("out")}
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    monkeypatch.setattr(fineweb, "encoded", None)
    prepare("--input", text, "--out", "out", "--workers", 3)
    assert before == {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}


# -----------------------------------------------------------------------------
# what is refused

def test_other_settings_or_another_text_are_refused_and_change_nothing(text):
    written(Path("b.jsonl"), DOCUMENTS)
    flags = ["--input", text, "--val_tokens", 500, "--shard_size", 2000, "--out", "out"]
    prepare(*flags)
    want = contents("out")
    for others, said in ((["--shard_size", 2001], "2000 instead of 2001"), (["--text_field", "id"], "text_f"),
                         (["--format", "bin"], "npy instead of bin"), (["--max_tokens", 4000], "max_tokens"),
                         (["--input", "b.jsonl"], "input"), (["--val_tokens", 501], "val_tokens")):
        with pytest.raises(UserError, match=said):
            prepare(*flags, *others)
    with pytest.raises(UserError, match="input"):
        prepare(*flags[:2], *flags[4:], "--val_input", "b.jsonl")
    for at in (0, -1):                            # the same name and size
        written(text, DOCUMENTS[:at] + [DOCUMENTS[at].swapcase()] + DOCUMENTS[at:][1:])
        with pytest.raises(UserError, match="input"):
            prepare(*flags)
    assert contents("out") == want


@pytest.mark.parametrize("damage", [
    lambda text: text[:-40], lambda text: "", lambda text: "[]", lambda text: "7",
    *(lambda text, old=old, new=new: text.replace(old, new) for old, new in (
        ('"cursor"', '"and"'), ('"cursor": [', '"cursor": [1,'), ('"block"', '"other"'),
        ('"tokens": 1500', '"tokens": 1'), ("text_v", "../text_v"), ("text_v", "none_v")))])
def test_a_damaged_manifest_or_another_folders_shards_are_refused(damage, text):
    flags = ["--input", text, "--out", "out", "--shard_size", 1500]
    prepare(*flags)
    path = Path("out/manifest.json")
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match="out"):
        prepare(*flags)
    path.unlink()
    want = contents("out")
    with pytest.raises(UserError, match="out"):
        prepare(*flags)
    assert contents("out") == want


def test_a_mistake_before_the_first_shard_does_not_bind_the_folder(text, monkeypatch):
    monkeypatch.setattr(fineweb, "VAL_BLOCK", 20)             # less is looked at before a shard is begun
    Path("bad.jsonl").write_bytes(text.read_bytes() + b"{}\n")
    with pytest.raises(UserError, match="bad.jsonl"):
        prepare("--input", "bad.jsonl", "--out", "out")
    assert not any(path.suffix == ".npy" for path in Path("out").iterdir())
    prepare("--input", text, "--out", "out", "--shard_size", 3000)


def test_text_that_cannot_be_read_late_leaves_whole_shards_that_the_manifest_lists(text, monkeypatch):
    monkeypatch.setattr(fineweb, "VAL_BLOCK", 20)
    Path("late.txt").write_bytes("café".encode("latin-1") * 50)
    with pytest.raises(UserError, match="late.txt"):
        prepare("--input", text, "late.txt", "--shard_size", 900, "--workers", 1, "--out", "out")
    shards = json.loads(Path("out/manifest.json").read_text())["shards"]
    assert {shard["file"] for shard in shards} == {path.name for path in Path("out").glob("*.npy")}
    assert len(shards) > 4


@pytest.mark.parametrize("size, said", [(100, "manifest.json"), (5000, "text_train_000001.npy")])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(size, said, text, tmp_path):
    pytest.importorskip("resource")
    flags = ["--input", str(text), "--shard_size", "4000", "--out", "out"]
    failed = subprocess.run([sys.executable, str(ROOT / "fineweb.py"), *flags], env=ENV, capture_output=True,
                            text=True, timeout=HANG, preexec_fn=limit_file_size(size))
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1 and said in failed.stderr, failed
    assert not [path for path in Path("out").iterdir() if path.suffix in (".npy", ".tmp")]
    prepare(*flags)
    prepare(*flags[:-1], "whole")
    assert contents("out") == contents("whole")


MISTAKES = [
    (["--input", "missing.txt"], "missing.txt"), (["--input", "no*.csv"], "no*.csv"),
    (["--input", "a.pdf"], "a.pdf"), (["--input", "empty"], "empty"), (["--input", "short.txt"], "tokens"),
    (["--input", "latin.txt"], "latin.txt"),
    (["--input", "good.txt", "--out", "short.txt"], "short.txt"), (["--val_input", "good.txt"], "--input"),
    (["--input", "good.txt", "--out", "short.txt/x"], "short.txt"), (["--verify", "nowhere"], "nowhere"),
    (["--input", "good.txt", "--shard_size", "many"], "many"), (["--name", "x"], "--dataset"),
    (["--input", "good.txt", "--shard_size", "0"], "shard_size"), (["--split", "x"], "--dataset"),
    (["--input", "good.txt", "--max_tokens", "-5"], "max_tokens"), (["--workers", "257"], "workers"),
    (["--input", "good.txt", "--workers", "1.5"], "workers"), (["--pretokenized", "104"], "103"),
    (["--input", "good.txt", "--max_tokens", "inf"], "inf"), (["--pretokenized", "0"], "103"),
    (["--max_tokens", "100", "--val_tokens", "100"], "val_tokens"), (["--format", "csv"], "format"),
    (["--input", "good.txt", "--val_input", "good.txt", "--val_tokens", "5"], "val_tokens"),
    (["--input", "good.txt", "--dataset", "a/b"], "--dataset"), (["--in", "good.txt"], "--in"),
    (["--pretokenized", "9", "--shard_size", "5"], "--shard_size"), (["--part", "0/2"], "--part"),
    (["--verify", "x", "--workers", "2"], "--workers"), (["--input", "good.txt", "--name", "x"], "--name")]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "short.txt").write_text("hi")
    (folder / "good.txt").write_text("some words " * 400)
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 50)
    (folder / "a.pdf").write_bytes(b"%PDF")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("args, said", MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_a_users_and_writes_nothing(args, said, mistakes, monkeypatch):
    monkeypatch.chdir(mistakes)
    before = {*mistakes.rglob("*")}
    with pytest.raises(UserError) as error:
        prepare(*args, *([] if {"--out", "--verify"} & {*args} else ["--out", "out"]))
    assert said in str(error.value) and len(str(error.value)) < 400
    assert {*mistakes.rglob("*")} == before


def test_a_mistake_of_the_command_is_one_line_and_exit_code_2(mistakes):
    for args in (["--input", "good.txt"], ["--input", "latin.txt", "--out", "out"]):
        result = script("fineweb.py", *args, cwd=mistakes)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result
        assert result.stderr.startswith("fineweb.py: ") and "Traceback" not in result.stderr


def test_importing_loads_nothing_heavy():
    code = ("import sys, fineweb\n"
            "heavy = 'torch', 'datasets', 'huggingface_hub', 'tiktoken', 'gigatoken', 'pyarrow', 'tqdm'\n"
            "print([name for name in heavy if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, text=True,
                            timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


# -----------------------------------------------------------------------------
# --verify

def test_verify_names_every_shard_that_is_not_as_it_was_written(text, capsys):
    prepare("--input", text, "--out", "out", "--shard_size", 1500)
    capsys.readouterr()
    prepare("--verify", "out")
    assert f"{len(lengths('out', 'val') + lengths('out', 'train'))} shards" in capsys.readouterr().out
    shards = [path.name for path in list_shards("out", "train")]
    write_shard("out/mine_train_000001.npy", np.arange(9, dtype=np.uint16))
    prepare("--verify", "out")
    assert "mine_train_000001.npy" in capsys.readouterr().out
    for name, damage in zip(shards, (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
                                     lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
                                     lambda data: data[:-2]), strict=False):
        path = Path("out", name)
        path.write_bytes(damage(path.read_bytes()))
    Path("out", shards[3]).unlink()
    with pytest.raises(UserError) as error:
        prepare("--verify", "out")
    assert all(name in str(error.value) for name in shards[:4]) and "_val_" not in str(error.value)
    Path("out/manifest.json").unlink()
    with pytest.raises(UserError, match="manifest"):
        prepare("--verify", "out")


# -----------------------------------------------------------------------------
# the last line

SMALL = ["--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 1, "--checkpoint_every", 0]


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("tokens, flags", [(200, ["--block_size", "16"]), (700, ["--block_size", "64"])])
def test_the_last_line_is_a_command_that_runs_as_printed(tokens, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(" word" * (tokens - 1))
    prepare("--input", "a.txt", "--out", "it's $HOME")
    following, python, name, *words = shlex.split(last_line(capsys))
    assert [following, python, *words] == ["next:", "python", "--preset", "shakespeare", "--data",
                                           "it's $HOME", "--out", "log/it's $HOME", *flags]
    result = script(name, *words, *SMALL, cwd=tmp_path)
    assert result.returncode == 0 and "validation loss" in result.stdout, result


def test_the_last_line_names_the_preset_for_so_many_training_tokens():
    for preset, tokens in (("shakespeare", 8_199_999), ("small", 8_200_000), ("small", 10**9 - 1),
                           ("gpt2", 10**9)):
        assert f"--preset {preset} " in fineweb.next_command(Path("d"), [10**5], [tokens - 1, 1])
        values = PRESETS[preset][1]
        if preset == "small":
            assert 4 * tokens >= values["total_batch_size"] * values["max_steps"], "at most four epochs"


def test_the_presets_have_the_sequences_that_the_last_line_counts_with():
    """A power of two that divides the batch; and a shard of that and one token has room for one."""
    from train_gpt2 import parse_flags
    for preset, tokens in (("shakespeare", 10**6), ("small", 10**8), ("gpt2", 10**9)):
        config = parse_flags(["--preset", preset])[0]
        T = config.block_size
        assert T == fineweb.BLOCK_SIZES[preset] and T & (T - 1) == 0 and config.total_batch_size % T == 0
        for val, flags in ((T + 1, ""), (T, f" --block_size {T // 2}"), (17, " --block_size 16"), (16, None)):
            line = fineweb.next_command(Path("d"), [val, 1], [1, tokens])
            assert ("too short" in line) == (flags is None)
            assert flags is None or line.split("log/d")[1] == flags


@pytest.mark.parametrize("out, name", [(".", "here"), ("..", "above"), ("a/..", "here"), ("a/.", "a"),
                                       ("/", "data"), ("...", "...")])
def test_the_last_line_names_a_folder_for_the_run(out, name, tmp_path, monkeypatch):
    (tmp_path / "above/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "above/here")
    line = fineweb.next_command(Path(out), [2000], [20_000])
    assert shlex.split(line)[5:] == ["--data", str(Path(out)), "--out", f"log/{name}"]


# -----------------------------------------------------------------------------
# the hub

TALES = [[f"Tale {i} of book {book}: " + "once upon a time. " * (1 + i % 7) for i in range(40)]
         for book in range(4)]

# fineweb.py with the flags of each line, in one process, which has imported the hub's libraries once
SEVERAL = """
import contextlib, io, json, sys, types
sys.path.insert(0, {root!r})
import fineweb
import huggingface_hub.utils._http as http
from runtime import cli

http.time = types.SimpleNamespace(sleep=lambda seconds: None)         # before it tries again
{patch}

for line in {runs!r}:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            fineweb.main(line)
        except (cli.UserError, cli.RunError) as error:
            cli.print_error(error)
            code = 2 if isinstance(error, cli.UserError) else 1
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def several(folder, env, *runs, patch=""):
    """The exit code, stdout and stderr of each run, all in one process whose folder this is."""
    runs = [[*map(str, run)] for run in runs]
    (folder / "several.py").write_text(SEVERAL.format(root=str(ROOT), runs=runs, patch=patch))
    result = warm([folder / "several.py"], env, folder)
    assert result.returncode == 0, result.stderr
    (folder / "several.py").unlink()
    return [SimpleNamespace(**dict(zip(("code", "stdout", "stderr"), json.loads(line), strict=True)))
            for line in result.stdout.splitlines()]


def file_of(name, documents, folder):
    return written(folder / name, documents).read_bytes()


def card(**configs):
    """README.md with the configurations {name: {split: path}}."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", ""]).encode()


def test_a_killed_run_ends_with_the_files_of_the_revision_it_began_with(gpt2, tmp_path):
    """A dataset of four files, which changes as soon as somebody has asked for it."""
    names = [f"tales/{i}.{kind}" for i, kind in enumerate(("parquet", "jsonl", "csv", "jsonl.gz"))]
    books = {name: file_of(name[6:], TALES[i], tmp_path) for i, name in enumerate(names)}
    readme = card(tales={"train": "tales/*", "test": "tales/1.jsonl"}, other={"train": "tales/1.jsonl"})
    flags = ["--dataset", "me/books", "--name", "tales", "--shard_size", 700, "--val_tokens", 300, "--out"]
    with Hub() as hub:
        sha, _ = hub.put("me/books", {"README.md": readme} | books, {"README.md": readme})
        for at in (6, -7):                        # renames of huggingface_hub are counted, too
            assert killed(tmp_path, at, *flags, "out", env=hub.env) == -9
        out, first = tmp_path / "out", json.loads((tmp_path / "out/manifest.json").read_text())
        assert first["revision"] == sha and not first["complete"] and first["shards"]
        hub.asked.clear()
        done, = several(tmp_path, hub.env, [*flags, "out"])
        assert done.code == 0, done
        assert all(sha in path for _, path in hub.asked if "/datasets/" in path)
        begun = first["shards"][-1]["cursor"][0]
        assert begun > 0 and not any(f"resolve/{sha}/{name}" in path for _, path in hub.asked
                                     for name in names[:begun])           # those are done
        assert not (out / ".download").exists()
        stream = stream_of(gpt2, sum(TALES, []))
        assert (tokens_in(out, "val"), tokens_in(out, "train")) == in_blocks(stream, block_of(stream), 300)
        hub.put("me/books", {"README.md": readme} | books)
        hub.asked.clear()
        again, other, whole = several(tmp_path, hub.env, [*flags, "out"], [*flags, "out", "--split", "test"],
                                      [*flags, "whole"])
        assert again.code == whole.code == 0 and other.code == 2 and "split" in other.stderr, (again, other)
        assert contents(out) == contents(tmp_path / "whole")
    prepare(*flags, out)                          # a complete folder needs no network


def test_fineweb_is_the_default_and_its_first_tokens_are_for_validation(gpt2, tmp_path):
    with Hub() as hub:
        hub.put("HuggingFaceFW/fineweb-edu", {
            "README.md": card(**{"sample-10BT": {"train": "sample/10BT/*"}, "other": {"train": "x.txt"}}),
            **{f"sample/10BT/00{i}.parquet": file_of("a.parquet", TALES[i], tmp_path) for i in range(2)}})
        done, all_val, named = several(
            tmp_path, hub.env, ["--shard_size", 1000, "--max_tokens", 2500, "--val_tokens", 600],
            ["--shard_size", 1000, "--val_tokens", 10**6, "--out", "x"],
            ["--dataset", "HuggingFaceFW/fineweb-edu", "--name", "sample-10BT", "--max_tokens", 2000, "--out",
             "y"])
    assert done.code == 0 and "next: python train_gpt2.py" in done.stdout, done
    stream, out = stream_of(gpt2, sum(TALES[:2], []))[:2500], tmp_path / "edu_fineweb10B"
    assert (tokens_in(out, "val"), tokens_in(out, "train")) == (stream[:600], stream[600:])
    assert {path.name for path in out.iterdir()} == {"manifest.json", *(
        f"edufineweb_{name}.npy" for name in ("val_000000", "train_000001", "train_000002"))}
    assert all_val.code == 2 and all_val.stderr.count("\n") == 1
    assert named.code == 0 and lengths(tmp_path / "y", "val") == [200]


def test_a_mistake_about_a_dataset_is_one_line_at_once(tmp_path):
    good = file_of("a.jsonl", TALES[0], tmp_path)
    with Hub() as hub:
        hub.put("me/books", {"README.md": card(one={"train": "a.jsonl"}, two={"train": "a.jsonl"}),
                             "a.jsonl": good})
        hub.put("me/one", {"a.jsonl": good})
        hub.put("me/code", {"code.py": b"1 / 0", "a.jsonl": good})
        hub.put("me/pictures", {"a.png": b"1"})
        hub.put("me/broken", {"a.parquet": b"no parquet at all"})
        hub.put("me/gated", {"README.md": b"", "a.jsonl": good})
        hub.answers = {"gated/resolve": (403, {"X-Error-Code": "GatedRepo"}), "datasets/me/wall": (403, {})}
        cases = {("me/nothing",): "hf auth login", ("me/wall",): "hf auth login",
                 ("me/gated",): "hf auth login", ("me/books",): "'one', 'two'",
                 ("me/books", "--name", "no"): "'one', 'two'", ("me/one", "--split", "no"): "train",
                 ("me/one", "--text_field", "body"): "--text_field", ("me/pictures",): "me/pictures",
                 ("me/broken",): "a.parquet", ("a b/c",): "a b/c", ("../x",): "../x"}
        runs = several(tmp_path, hub.env, *(["--dataset", *case, "--out", "out"] for case in cases))
        for run, (case, said) in zip(runs, cases.items(), strict=True):
            assert run.code == 2 and said in run.stderr.splitlines()[-1], (case, run)
        assert not [*tmp_path.rglob("*.npy")]


def test_a_hub_out_of_reach_is_a_failure_of_the_run_and_the_command_goes_on_later(tmp_path):
    with Hub() as hub:
        hub.put("me/one", {f"{i}.jsonl": file_of("a.jsonl", 9 * TALES[i], tmp_path) for i in range(3)})
        hub.answers = {"resolve/.*/2.jsonl": (500, {})}
        flags = ["--dataset", "me/one", "--shard_size", 900, "--val_tokens", 100]
        small = "import runtime.text; fineweb.VAL_BLOCK, runtime.text.BLOCK = 20, 900"
        runs = several(tmp_path, hub.env, flags, patch=small)
        shards = json.loads((tmp_path / "one/manifest.json").read_text())["shards"]
        hub.answers.clear()
        runs += several(tmp_path, hub.env, flags, [*flags, "--out", "whole"], patch=small)
    assert [run.code for run in runs] == [1, 0, 0] and shards, runs
    assert runs[0].stderr.splitlines()[-1].startswith("several.py: ") and "2.jsonl" in runs[0].stderr
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")
    offline = hub.env | {"HF_HUB_OFFLINE": "1"}
    for run in several(tmp_path, offline, [*flags, "--out", "new"], ["--pretokenized", 1, "--out", "new"]):
        assert run.code == 1 and run.stderr.count("\n") == 1, run


@pytest.mark.parametrize("repo, name, split, folder", [
    ("HuggingFaceFW/fineweb-edu", "sample-350BT", "train", "edu_fineweb350B"),
    ("HuggingFaceFW/fineweb", "sample-10BT", "train", "fineweb10B"),
    ("HuggingFaceFW/fineweb", "sample-10BT", "test", "fineweb-sample-10BT-test"),
    ("roneneldan/TinyStories", None, "train", "TinyStories"),
    ("a/b_p1of2", "../ü/c_train_000001.npy", "train", "b-p1of2-..-c-train-000001.npy"),
    ("a/_", "_", "train", "hub")])
def test_the_folder_has_the_datasets_name(repo, name, split, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info",
                        lambda *args, **kwargs: SimpleNamespace(sha="2" * 40))
    args = fineweb.parse_args(["--dataset", repo, "--split", split, *(["--name", name] if name else [])])
    found, prefix, _ = fineweb.hub_source(args)
    assert args.out == folder and found["revision"] == "2" * 40 and "_" not in prefix


def test_pretokenized_fetches_what_is_missing_and_checks_it(tmp_path, capsys):
    def shard(i):
        write_shard(tmp_path / "x_train_000000.bin", np.full(1000 + i, i, dtype=np.uint16))
        return (tmp_path / "x_train_000000.bin").read_bytes()

    files = {f"fineweb_{'train' if i else 'val'}_{i:06d}.bin": shard(i) for i in range(4)}
    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", files)
        first, = several(tmp_path, hub.env, ["--pretokenized", 2])
        asked = [path for method, path in hub.asked if method == "GET"]
        assert first.code == 0 and "1,000 tokens for validation and 2,003 for training" in first.stdout, first
        assert sum("resolve" in path for path in asked) == 3
        hub.asked.clear()
        again, more = several(tmp_path, hub.env, ["--pretokenized", 2], ["--pretokenized", 3])
        assert again.code == more.code == 0 and sum("resolve" in path for method, path in hub.asked
                                                    if method == "GET") == 1
        out = tmp_path / "fineweb10B"
        assert {name: (out / name).read_bytes() for name in files} == files
        (out / "fineweb_train_000002.bin").unlink()
        bad = bytearray(files["fineweb_train_000001.bin"])
        bad[-1] ^= 1
        (out / "fineweb_train_000001.bin").write_bytes(bad)
        (tmp_path / "mine").mkdir()
        write_shard(tmp_path / "mine/x_train_000001.npy", np.arange(9, dtype=np.uint16))
        damaged, other = several(tmp_path, hub.env, ["--pretokenized", 3],
                                 ["--pretokenized", 1, "--out", "mine"])
    assert damaged.code == 2 and "000001" in damaged.stderr and "000002" not in damaged.stderr, damaged
    assert other.code == 2 and [path.name for path in (tmp_path / "mine").iterdir()] == ["x_train_000001.npy"]
