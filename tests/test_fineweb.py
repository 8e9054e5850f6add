"""fineweb.py: text -> shards, their validation, kills, what is refused, the hub, the command that trains."""
import gzip
import json
import os
import shlex
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import ENV, ROOT, refused, script, train
from hub import Hub, several
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import DOCUMENTS, FAST, stream_of, written

import fineweb
import runtime.text
from recipes import PRESETS
from runtime.shards import list_shards, open_shard, write_shard


@pytest.fixture(autouse=True)
def one_encoder(encoder, monkeypatch):
    """Made once for all runs in this process. And rows of a few documents, as if the texts were long."""
    monkeypatch.setattr(fineweb, "Encoder", lambda name: encoder)
    monkeypatch.setattr(runtime.text, "BLOCK", 900)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A file of documents. Where it is made is the working directory."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "a.jsonl", DOCUMENTS)


def prepare(*args):
    fineweb.main([str(arg) for arg in args])


def refuses(*args, said):
    return refused(lambda: prepare(*args), *said.split())


def tokens_in(folder, split):
    return np.concatenate([open_shard(path) for path in list_shards(folder, split)]).tolist()


def both(folder):
    return tokens_in(folder, "val"), tokens_in(folder, "train")


def lengths(folder, split):
    return [len(open_shard(path)) for path in list_shards(folder, split)]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("[!.]*") if path.is_file()}


def divided(stream, validation=None):
    """(validation, training) of a text's tokens: a tenth from its beginning, or so many."""
    validation = len(stream) // 10 if validation is None else validation
    return stream[:validation], stream[validation:]


# ----------------------------------------------------------------------------- what the shards hold

@pytest.mark.parametrize("shard_size, validation, kind", [
    (97, None, "npy"), (1000, 333, "bin"), (2500, 2500, "npy"), (10**8, None, "bin"), (10**8, 7, "npy"),
    (300, 1001, "npy")])
def test_shards_are_the_text_in_its_order_and_its_beginning_is_for_validation(shard_size, validation, kind,
                                                                              gpt2, text):
    prepare("--input", text, "--out", "out", "--shard_size", shard_size, "--workers", 3, "--format", kind,
            *(["--val_tokens", validation] if validation else []))
    assert both("out") == divided(stream_of(gpt2, DOCUMENTS), validation)
    for split in ("val", "train"):
        *full, last = lengths("out", split)
        assert {*full} <= {shard_size} and last <= shard_size
    names = sorted(contents("out"))
    assert names[:2] == ["manifest.json", f"text_train_000001.{kind}"] and f"text_val_000000.{kind}" in names
    assert len(names) == 1 + len(lengths("out", "val")) + len(lengths("out", "train"))


def test_a_tenth_is_for_validation_but_no_more_than_a_limit_and_that_is_looked_at_first(gpt2, text,
                                                                                       monkeypatch):
    """The limit is 10 million tokens. Of a long text no more is read than ten times that before the first
    shard is written; and its tenth does not depend on what is behind it."""
    assert fineweb.MOST_VALIDATION == 10_000_000
    monkeypatch.setattr(fineweb, "MOST_VALIDATION", 100)
    stream, fed, fed_before = stream_of(gpt2, DOCUMENTS), [0], []
    encode_files, write = fineweb.encode_files, fineweb.Shards.write

    def counted(*args):
        for file, tokens in encode_files(*args):
            fed[0] += len(tokens)
            yield file, tokens

    def watched(*args):
        fed_before.append(fed[0])
        write(*args)
    monkeypatch.setattr(fineweb, "encode_files", counted)
    monkeypatch.setattr(fineweb.Shards, "write", watched)
    prepare("--input", text, "--out", "out")
    assert both("out") == divided(stream, 100)
    assert 1000 <= fed_before[0] < 2000 < len(stream)
    fed[0] = 0
    prepare("--input", text, "--out", "told", "--val_tokens", 50)
    assert fed_before[2] < 900, "only a tenth has to be counted first"
    for limit, validation in ((999, 99), (1000, 100), (1001, 100), (5000, 100)):
        prepare("--input", text, "--out", f"{limit}", "--max_tokens", limit)
        assert both(f"{limit}") == divided(stream[:limit], validation)


def test_defaults_are_those_of_the_help_and_the_last_lines_count_what_is_there(text, tmp_path, capsys):
    prepare("--input", text, "--out", "out")
    found, printed = json.loads(Path("out/manifest.json").read_text()), capsys.readouterr().out.splitlines()
    want = {"version": 4, "shard_size": 10**8, "val_tokens": None, "max_tokens": None, "text_field": "text",
            "format": "npy", "separator": "", "complete": True}
    assert {key: found[key] for key in want} == want and not {"workers", "encoder"} & {*found}
    val, train = map(len, both("out"))
    assert found["validation"] == val == (val + train) // 10
    assert printed[-2] == f"out: 2 shards complete, {val:,} tokens for validation and {train:,} for training"
    before = contents("out")
    prepare("--input", text.name, "--out", tmp_path / "out", "--workers", 3)    # by another path the same
    assert contents("out") == before
    prepare("--input", text, "--out", "a/new/folder", "--max_tokens", 2010)
    assert [*map(len, both("a/new/folder"))] == [201, 1809]


@pytest.mark.parametrize("flags, threads", [(["--workers", 4], 4), ([], 3)])
def test_so_many_threads_encode_as_workers_says_or_as_this_process_has_cores(flags, threads, text, encoder,
                                                                            monkeypatch):
    barrier, of_threads = threading.Barrier(threads), set()

    class Watched:
        gigatoken, mark = encoder.gigatoken, encoder.mark

        def __init__(self, name):
            pass

        def encode(self, row):
            if threading.get_ident() not in of_threads:       # each waits until all of them have work
                of_threads.add(threading.get_ident())
                barrier.wait(20)
            return encoder.encode(row)
    monkeypatch.setattr(fineweb, "Encoder", Watched)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    prepare("--input", text, "--out", "out", *flags)
    assert len(of_threads) == threads


@settings(FAST, max_examples=40)
@given(st.data())
def test_wherever_shards_validation_files_and_rows_end_no_token_is_lost(gpt2, tmp_path_factory, data):
    some = st.lists(st.sampled_from(DOCUMENTS[4:60]), max_size=12)
    files = data.draw(st.lists(some, min_size=1, max_size=3))
    folder = tmp_path_factory.mktemp("any")
    stream = stream_of(gpt2, sum(files, []))
    limit = data.draw(st.integers(200, 3000))
    size = data.draw(st.integers(1, 700)) + len(stream) // 40
    validation = data.draw(st.none() | st.integers(1, 199))
    paths = [written(folder / f"{i}.{kind}", texts) for i, (texts, kind) in
             enumerate(zip(files, ("jsonl", "parquet", "csv"), strict=False))]
    flags = ["--input", *paths, "--out", folder / "out", "--shard_size", size, "--max_tokens", limit,
             *(["--val_tokens", validation] if validation else [])]
    if len(stream) <= (validation or 199):
        refuses(*flags, said="training" if validation else "tokens")
        return
    prepare(*flags)
    assert both(folder / "out") == divided(stream[:limit], validation)


def test_a_text_of_200_tokens_is_divided_and_a_shorter_one_is_too_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(" a" * 198)
    refuses("--input", "a.txt", "--out", "out", said="199 tokens")
    refuses("--input", "a.txt", "--val_tokens", 199, "--out", "none", said="--val_tokens")
    Path("a.txt").write_text(" a" * 199)
    prepare("--input", "a.txt", "--out", "out")
    assert (lengths("out", "val"), lengths("out", "train")) == ([20], [180])


def test_val_input_takes_whole_files_for_validation(gpt2, text):
    Path("val").mkdir()
    Path("val/a.txt").write_text("one\n\ntwo")
    written(Path("val/b.csv"), DOCUMENTS[:20])
    prepare("--input", text, "--val_input", "val/a.txt", "val/*.csv", "--out", "out", "--shard_size", 500)
    assert both("out") == (stream_of(gpt2, ["one\n\ntwo", *DOCUMENTS[:20]]), stream_of(gpt2, DOCUMENTS))
    assert {*lengths("out", "val")[:-1], *lengths("out", "train")[:-1]} == {500}
    assert json.loads(Path("out/manifest.json").read_text())["validation"] == sum(lengths("out", "val"))
    Path("val/none.txt").touch()
    refuses("--input", text, "--val_input", "val/none.txt", "--out", "other", said="for validation")
    for flags in (["--input", "val/none.txt"], ["--input", "val/a.txt", "--max_tokens", 200]):
        refuses(*flags, "--val_input", text, "--out", f"out {len(flags)}", said="for training")


def test_files_folders_and_globs_are_read_in_order_and_other_kinds_left_alone(gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in/deep").mkdir(parents=True)
    for i, name in enumerate(("b.jsonl", "a.parquet", "c.jsonl.gz")):
        written(Path("in", name), DOCUMENTS[i * 50:i * 50 + 50])
    Path("in/d.TXT").write_text("upper case")
    for name in ("x.pdf", "LICENSE", "deep/e.md"):
        Path("in", name).write_text("deep")
    Path("in/deep/f.jsonl").write_text('{"text": "no", "body": "deeper"}\n')
    want = stream_of(gpt2, [*DOCUMENTS[50:100], *DOCUMENTS[:50], *DOCUMENTS[100:150], "upper case"])
    for i, flags in enumerate((["in"], ["in/*"], ["in/a*", "in/b.jsonl", "--input", "in/[cd]*", "in/a*"])):
        prepare("--input", *flags, "--out", f"{i}", "--val_tokens", 1)
        assert both(f"{i}") == divided(want, 1)
    end = stream_of(gpt2, ["deep", "no"])
    prepare("--input", "in/**", "--out", "all", "--val_tokens", 1)
    assert tokens_in("all", "train")[-len(end):] == end
    Path("in/deep/f.jsonl").write_text('{"body": "deeper"}\n' * 99)
    prepare("--input", "in/deep/f.jsonl", "--text_field", "body", "--out", "body")
    assert both("body") == divided(stream_of(gpt2, ["deeper"] * 99))


def test_shards_may_be_made_in_the_folder_of_their_text(tmp_path, capsys):
    """Given again, the command finds them complete: its manifest.json is not read as text."""
    (tmp_path / "a.txt").write_text("some words and others. " * 500)
    for _ in range(2):
        fineweb.main(["--input", str(tmp_path), "--out", str(tmp_path)])
        assert "2 shards complete" in capsys.readouterr().out



def test_a_large_document_and_chinese_without_spaces(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 1 << 20)
    line, chinese = "To be, or not to be: that is the question 🙂.\r\n", "春眠不覺曉處處聞啼鳥"
    documents = [line * 400_000, chinese * 100_000]                         # 20 MB and 3 MB
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_tokens", 1)
    tokens = open_shard(tmp_path / "out/text_train_000001.npy")
    one, two = gpt2.encode_ordinary(line), gpt2.encode_ordinary(chinese)
    assert len(tokens) + 1 == 2 + len(one) * 400_000 + len(two) * 100_000
    assert tokens[:len(one)].tolist() == one and tokens[-len(two):].tolist() == two


# ----------------------------------------------------------------------------- two at once

def test_a_second_call_in_a_folder_is_refused_as_long_as_the_first_is_at_work(text, monkeypatch):
    monkeypatch.setattr("runtime.files.LOCK_PATIENCE", 0.1)
    written(Path("b.jsonl"), DOCUMENTS[:90])
    write, said = fineweb.Shards.write, []

    def meanwhile(*args):
        if not said:                            # before the first shard, and after it
            said.append(refuses("--input", "b.jsonl", "--out", "a/out", said="--out a/out"))
        write(*args)
        if len(said) == 1:
            said.append(refuses("--pretokenized", 1, "--out", "a/out", said="--out a/out"))
    monkeypatch.setattr(fineweb.Shards, "write", meanwhile)
    prepare("--input", text, "--out", "a/out")
    assert len(said) == 2 and said[0] == said[1]
    assert {path.name for path in Path("a/out").iterdir()} - {".fineweb.lock"} == {
        "manifest.json", "text_train_000001.npy", "text_val_000000.npy"}


# ----------------------------------------------------------------------------- kills

@pytest.mark.parametrize("flags, ways", [
    ("--val_tokens 1600", ("half", "after")),
    ("--val_tokens 700 --max_tokens 4000 --separator :", ("after", "half")),
    ("--val_input val.csv", ("half", "after")), ("", ("after", "half"))])
def test_wherever_it_is_killed_the_same_command_ends_with_the_same_bytes(flags, ways, text, tmp_path):
    """At each rename: the manifest's, then in turn those of a shard and of the manifest that lists it."""
    (tmp_path / "b.txt").write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:5000])
    written(tmp_path / "c.parquet", DOCUMENTS[:90])
    written(Path("val.csv"), DOCUMENTS[:40])
    flags = ["--input", "b.txt", "a.jsonl", "c.parquet", *flags.split(), "--shard_size", 1500]
    prepare(*flags, "--out", "whole")
    assert len(contents("whole")) > 4 and {*lengths("whole", "train")[:-1]} == {1500}
    kills = [[(n, ways[n % 2]), *flags, "--out", f"out{n}"] for n in range(1, 9)]
    kills += [[moment, *flags, "--out", "again"] for moment in ((4, "after"), (2, "half"), (3, "half"))]
    ends = [kill[1:] for kill in kills[:-2]]
    runs = several(tmp_path, ENV, *kills, *ends)
    assert [run.returncode for run in runs] == [-9] * len(kills) + [0] * len(ends), runs
    assert {run.stderr for run in runs} == {""}
    for *_, out in ends:
        assert contents(out) == contents("whole"), out


def test_the_progress_bar_of_a_continued_run_counts_what_is_read_again_from_the_beginning_of_a_file(
        text, monkeypatch, tmp_path):
    bars = []

    class Bar(fineweb.tqdm):
        def __init__(self, **flags):
            super().__init__(**flags)
            self.counted = [flags.get("initial", 0)]
            bars.append(self.counted)

        def update(self, n=1):
            self.counted.append(n)

    for name in ("b.jsonl", "c.jsonl"):
        written(Path(name), DOCUMENTS)
    flags = ["--input", text, "b.jsonl", "c.jsonl", "--shard_size", 1500, "--out", "out"]
    assert several(tmp_path, ENV, [(16, "after"), *flags])[0].returncode == -9
    file, _ = json.loads(Path("out/manifest.json").read_text())["shards"][-1]["cursor"]
    monkeypatch.setattr(fineweb, "tqdm", Bar)
    prepare(*flags)
    length = sum(map(len, both("out")))
    assert file == 1 and bars[0][0] == length // 3 and sum(bars[0]) == length


def test_what_is_complete_is_left_alone_and_only_leftovers_of_the_command_are_removed(text, monkeypatch):
    Path("out").mkdir()
    ours = ["text_train_000001.npy.77.tmp", "text_val_000000.bin.tmp", "manifest.json.5.tmp"]
    others = ["edufineweb_train_000001.npy.77.tmp", "notes.tmp", "text_train_000001.npy.x.tmp", "README"]
    for name in ours + others:
        Path("out", name).write_text("half")
    prepare("--input", text, "--out", "out")
    assert {*others} < {*contents("out")} and not {*ours} & {*contents("out")}
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("[!.]*")}
    monkeypatch.setattr(fineweb, "encode_files", None)
    prepare("--input", text, "--out", "out", "--workers", 3)
    assert before == {path: path.stat().st_mtime_ns for path in Path("out").glob("[!.]*")}


# ----------------------------------------------------------------------------- what is refused

def test_other_settings_or_another_text_are_refused_and_change_nothing(text):
    written(Path("b.jsonl"), DOCUMENTS)
    flags = ["--input", text, "--val_tokens", 500, "--shard_size", 2000, "--out", "out"]
    prepare(*flags)
    want = contents("out")
    for name, value in (("shard_size", 2001), ("text_field", "id"), ("format", "bin"), ("max_tokens", 4000),
                        ("input", "b.jsonl"), ("val_tokens", 501)):
        refuses(*flags, f"--{name}", value, said=f"out begun {name}")
    refuses(*flags[:2], *flags[4:], said="out begun val_tokens 500")         # a tenth is another number
    refuses(*flags[:2], *flags[4:], "--val_input", "b.jsonl", said="out begun val_input b.jsonl")
    refuses(*flags[:1], "b.jsonl", *flags[1:], said="out begun input b.jsonl")
    for at in (0, -1):                            # the same name and size
        written(text, DOCUMENTS[:at] + [DOCUMENTS[at].swapcase()] + DOCUMENTS[at:][1:])
        refuses(*flags, said=f"out begun input {text.name}")
    assert contents("out") == want
    for end in "ab":                              # of a long text, too
        Path("long.txt").write_text("word " * 40_000 + end)
        if end == "a":
            prepare("--input", "long.txt", "--out", "long")
    refuses("--input", "long.txt", "--out", "long", said="long input")


@pytest.mark.parametrize("old, new", [
    ('"cursor": [', '"cursor": [1,'), ('"cursor": [\n    0,', '"cursor": [\n    -1,'),
    ('"validation"', '"other"'), ('"tokens": 1500', '"tokens": 1'), ('"split": "val"', '"split": "train"'),
    ("text_v", "../text_v"), ("text_v", "sub/text_v"), ("text_v", "none_v"), ("}\n ]", "}"), (None, None)])
def test_a_damaged_manifest_or_another_folders_shards_are_refused(old, new, text):
    flags = ["--input", text, "--out", "out", "--shard_size", 1500]
    prepare(*flags)
    Path("out/sub").mkdir()
    for shard in list_shards("out", "val"):                   # its other place has the same
        write_shard(f"out/sub/{shard.name}", open_shard(shard))
    path = Path("out/manifest.json")
    if old:
        assert old in (content := path.read_text())
        path.write_text(content.replace(old, new))
    else:
        path.unlink()
    want = contents("out")
    refuses(*flags, said="out")
    assert contents("out") == want


def test_a_manifest_of_an_earlier_version_is_refused_and_its_shards_are_trained_on_as_before(text, capsys):
    flags = ["--input", text, "--out", "out", "--shard_size", 1500]
    prepare(*flags)
    path = Path("out/manifest.json")
    found = json.loads(path.read_text())
    del found["validation"]
    for complete in (True, False):
        path.write_text(json.dumps(found | {"version": 3, "block": 183, "complete": complete}))
        want = contents("out")
        refuses(*flags, said="out 3 4 choose another --out")
        assert contents("out") == want
    capsys.readouterr()
    prepare("--verify", "out")
    assert "6 shards" in capsys.readouterr().out
    train(*"--data out --out log --n_layer 1 --n_head 1 --n_embd 4 --block_size 8 --total_batch_size 16 "
          "--max_steps 1 --device cpu --sample_every 0 --hellaswag_every 0 --val_tokens 8".split())


@pytest.mark.parametrize("flags, name", [("", "auto"), ("--encoder tiktoken", "tiktoken"),
                                         ("--encoder gigatoken", "gigatoken")])
def test_the_encoder_is_the_one_that_is_asked_for(flags, name, text, encoder, monkeypatch):
    """And another one may continue a folder: their tokens are the same."""
    asked = []
    monkeypatch.setattr(fineweb, "Encoder", lambda name: asked.append(name) or encoder)
    prepare("--input", text, "--out", "out", *flags.split())
    assert asked == [name]
    prepare("--input", text, "--out", "out", "--encoder", "tiktoken")


def test_text_that_cannot_be_read_leaves_whole_shards_that_the_manifest_lists(text):
    """And none if it comes early: then the folder is not bound to that text."""
    Path("late.txt").write_bytes("café".encode("latin-1") * 50)
    refuses("--input", text, "late.txt", "--shard_size", 900, "--workers", 1, "--val_tokens", 500, "--out",
            "out", said="late.txt")
    shards = json.loads(Path("out/manifest.json").read_text())["shards"]
    assert {shard["file"] for shard in shards} == {path.name for path in Path("out").glob("*.npy")}
    assert len(shards) > 4
    Path("early.jsonl").write_bytes(text.read_bytes() + b"{}\n")
    refuses("--input", "early.jsonl", "--out", "none", said="early.jsonl --text_field")
    refuses("--input", "early.jsonl", "--out", "new", "--val_tokens", 9000, said="early.jsonl")
    prepare("--input", text, "--out", "new", "--shard_size", 3000)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "short.txt").write_text("hi")
    (folder / "good.txt").write_text("some words " * 400)
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 50)
    (folder / "a.pdf").write_bytes(b"%PDF")
    (folder / "empty").mkdir()
    return folder


GOOD = "--input good.txt"


@pytest.mark.parametrize("line, said", [
    ("--input missing.txt", "missing.txt"), ("--input no*.csv", "no*.csv"), ("--input a.pdf", "a.pdf"),
    ("--input empty", "empty"), ("--input short.txt", "tokens"), ("--input latin.txt", "latin.txt"),
        ("--val_input good.txt", "--input"), ("--verify nowhere", "nowhere"), ("--name x", "--dataset"),
    (f"{GOOD} --name x", "--name"), (f"{GOOD} --dataset a/b", "--dataset"), ("--verify x --split y", "--sp"),
    (f"{GOOD} --shard_size 2147483648", "shard_size"), (f"{GOOD} --max_tokens 1e9", "max_tokens"),
    *[(f"{GOOD} --{name} 0", name) for name in ("shard_size", "max_tokens", "val_tokens", "workers")],
    ("--workers 257", "workers"), ("--pretokenized 0", "pretokenized"),
    ("--pretokenized 104", "103"), ("--pretokenized 9 --split y", "--sp"),
    ("--max_tokens 100 --val_tokens 100", "val_tokens"), ("--format csv", "format"), ("--part 0/2", "--part"),
    (f"{GOOD} --val_input good.txt --val_tokens 5", "val_tokens"),
    (f"{GOOD} --max_tokens 199", "--max_tokens 199"),
    (f"{GOOD} --val_input short.txt empty/../good.txt", "good.txt is both")])
def test_a_mistake_is_a_users_and_writes_nothing(line, said, mistakes, monkeypatch):
    monkeypatch.chdir(mistakes)
    before, flags = {*mistakes.rglob("*")}, line.split()
    refuses(*flags, *([] if {"--out", "--verify"} & {*flags} else ["--out", "out"]), said=said)
    assert {*mistakes.rglob("*")} - before <= {mistakes / "out", mistakes / "out/.fineweb.lock"}


# ----------------------------------------------------------------------------- --verify

def test_verify_names_every_shard_that_is_not_as_it_was_written(text, capsys):
    prepare("--input", text, "--out", "out", "--shard_size", 1500)
    capsys.readouterr()
    prepare("--verify", "out")
    assert f"{len(lengths('out', 'val') + lengths('out', 'train'))} shards" in capsys.readouterr().out
    manifest = json.loads(Path("out/manifest.json").read_text())
    Path("out/manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    prepare("--verify", "out")
    assert "not written yet" in capsys.readouterr().out
    Path("out/manifest.json").write_text(json.dumps(manifest))
    shards = [path.name for path in list_shards("out", "train")]
    write_shard("out/mine_train_000001.npy", np.arange(9, dtype=np.uint16))
    prepare("--verify", "out")
    printed = capsys.readouterr().out
    assert "mine_train_000001.npy" in printed and "not written yet" not in printed
    for name, damage in zip(shards, (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
                                     lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
                                     lambda data: data[:-2]), strict=False):
        path = Path("out", name)
        path.write_bytes(damage(path.read_bytes()))
    Path("out", shards[3]).unlink()
    assert "_val_" not in refuses("--verify", "out", said=" ".join(shards[:4]))
    Path("out/manifest.json").unlink()
    refuses("--verify", "out", said="manifest")


# ----------------------------------------------------------------------------- the last line

@pytest.mark.parametrize("tokens, flags", [(200, ["--block_size", "16"]), (700, ["--block_size", "64"])])
def test_the_last_line_is_a_command_that_runs_as_printed(tokens, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(" word" * (tokens - 1))
    prepare("--input", "a.txt", "--out", "it's $HOME")
    following, python, name, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert [following, python, *words] == ["next:", "python", "--preset", "shakespeare", "--data",
                                           "it's $HOME", "--out", "log/it's $HOME", *flags]
    small = "--n_layer 1 --n_head 1 --n_embd 16 --max_steps 1 --checkpoint_every 0 --device cpu"
    result = script(name, *words, *small.split(), cwd=tmp_path)
    assert result.returncode == 0 and "validation loss" in result.stdout, result


def test_the_last_line_names_the_preset_for_so_many_training_tokens():
    for preset, tokens in (("shakespeare", 8_199_999), ("small", 8_200_000), ("small", 10**9 - 1),
                           ("gpt2", 10**9)):
        assert f"--preset {preset} " in fineweb.next_command(Path("d"), [10**5], [tokens - 1, 1])
        values = PRESETS[preset].flags
        if preset == "small":
            assert 4 * tokens >= values["total_batch_size"] * values["max_steps"], "at most four epochs"


def test_the_presets_have_the_sequences_that_the_last_line_counts_with():
    """A power of two that divides the batch; and a shard of that and one token has room for one."""
    from helpers import parse_flags
    for preset, tokens in (("shakespeare", 10**6), ("small", 10**8), ("gpt2", 10**9)):
        config = parse_flags(["--preset", preset])[0]
        T = config.block_size
        assert T == fineweb.BLOCK_SIZES[preset] and T & (T - 1) == 0 and config.total_batch_size % T == 0
        for val, flags in ((T + 1, ""), (T, f" --block_size {T // 2}"), (17, " --block_size 16"), (16, None)):
            line = fineweb.next_command(Path("d"), [val, 1], [1, tokens])
            assert ("too short" in line) == (flags is None)
            assert flags is None or line.split("log/d")[1] == flags


# ----------------------------------------------------------------------------- the hub

TALES = [[f"Tale {i} of book {book}: " + "once upon a time. " * (1 + i % 7) for i in range(40)]
         for book in range(4)]


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
    out, run = tmp_path / "out", [*flags, "out"]
    at_once = []
    with Hub() as hub:
        send = hub.file

        def watched(*args):
            at_once.append(len([*(out / ".download").glob("tales/*")]))
            return send(*args)
        hub.file = watched
        sha, _ = hub.put("me/books", {"README.md": readme} | books, {"README.md": readme})
        killed = several(tmp_path, hub.env, *([moment, *run] for moment in (
            (5, "half"), (2, "half", "rename"), (3, "half"), (4, "after"))))
        first = json.loads((out / "manifest.json").read_text())
        assert [one.returncode for one in killed] == [-9] * 4
        assert first["revision"] == sha and not first["complete"] and first["shards"]
        hub.asked.clear()
        done, = several(tmp_path, hub.env, run)
        assert done.returncode == 0, done
        assert all(sha in path for path in hub.asked if "/datasets/" in path)
        begun = first["shards"][-1]["cursor"][0]
        assert begun > 0 and not any(f"resolve/{sha}/{name}" in path for path in hub.asked
                                     for name in names[:begun])           # those are done
        assert not (out / ".download").exists()
        assert both(out) == divided(stream_of(gpt2, sum(TALES, [])), 300)
        hub.put("me/books", {"README.md": readme} | books)
        other, whole, test = several(tmp_path, hub.env, [*run, "--split", "test"], flags[:-1],
                                     [*flags[:-1], "--split", "test"])
        assert whole.returncode == 0 and contents(out) == contents(tmp_path / "books-tales")
        refused(lambda: other, "out", "split")
        assert both(tmp_path / "books-tales-test") == divided(stream_of(gpt2, TALES[1]), 300), test
    assert max(at_once) <= 2, "a file is removed before the next but one is fetched"
    prepare(*flags, out)                          # a complete folder needs no network


def test_downloads_that_a_kill_has_left_are_removed(tmp_path):
    """But for the two files that are read and fetched next."""
    left, seen = tmp_path / "one/.download", []
    left.mkdir(parents=True)
    for name in ("1.jsonl", "2.jsonl", "3.jsonl"):
        (left / name).write_text("half")
    with Hub() as hub:
        hub.put("me/one", {f"{i}.jsonl": file_of("a.jsonl", TALES[i], tmp_path) for i in range(4)})
        send = hub.file

        def watched(sha, data, span):
            if data is not None:
                seen.append({path.name for path in left.glob("*.jsonl")})
            return send(sha, data, span)
        hub.file = watched
        done, = several(tmp_path, hub.env, ["--dataset", "me/one"])
    assert done.returncode == 0 and seen and all(len(names) <= 2 for names in seen), seen
    assert seen[0] <= {"0.jsonl", "1.jsonl"}


def test_fineweb_is_the_default_and_its_first_tokens_are_for_validation(gpt2, tmp_path):
    with Hub() as hub:
        hub.put("HuggingFaceFW/fineweb-edu", {
            "README.md": card(**{"sample-10BT": {"train": "sample/10BT/*"}, "other": {"train": "x.txt"}}),
            **{f"sample/10BT/00{i}.parquet": file_of("a.parquet", TALES[i], tmp_path) for i in range(2)}})
        hub.put("HuggingFaceFW/fineweb", {
            "README.md": card(**{"sample-100BT": {"train": "a.json.gz"}, "default": {"train": "b.txt"}}),
            "a.json.gz": gzip.compress(json.dumps({"text": " a" * 999}).encode()), "b.txt": b" b|" * 999})
        (tmp_path / "edu_fineweb10B").mkdir()                 # of a run that failed before its first shard
        (tmp_path / "edu_fineweb10B/manifest.json").write_text(
            json.dumps({"dataset": "me/other", "revision": "0" * 40, "shards": []}))
        done, all_val, named, hundred, default, first_shard = several(
            tmp_path, hub.env, ["--shard_size", 1000, "--max_tokens", 2500, "--val_tokens", 600],
            ["--shard_size", 1000, "--val_tokens", 10**6, "--out", "x"],
            ["--dataset", "HuggingFaceFW/fineweb-edu", "--name", "sample-10BT", "--max_tokens", 2000, "--out",
             "y"], ["--dataset", "HuggingFaceFW/fineweb", "--name", "sample-100BT", "--val_tokens", 100],
            ["--dataset", "HuggingFaceFW/fineweb", "--max_tokens", 500, "--separator", "|"],
            ["--shard_size", 700, "--out", "z"])
    for one, name in (hundred, "fineweb100B/fineweb"), (default, "fineweb/fineweb"):
        assert one.returncode == 0 and (tmp_path / f"{name}_train_000001.npy").exists(), one
    assert both(tmp_path / "fineweb100B")[0] == [50256] + [257] * 99            # " a"
    assert both(tmp_path / "fineweb") == ([50256, 275] * 25, [50256, 275] * 225)        # " b"
    assert done.returncode == 0 and "next: python train_gpt2.py" in done.stdout, done
    stream, out = stream_of(gpt2, sum(TALES[:2], []))[:2500], tmp_path / "edu_fineweb10B"
    assert both(out) == (stream[:600], stream[600:])
    assert {*contents(out)} == {"manifest.json", *(
        f"edufineweb_{name}.npy" for name in ("val_000000", "train_000001", "train_000002"))}
    refused(lambda: all_val, "--val_tokens")
    assert first_shard.returncode == 0
    assert both(tmp_path / "z") == divided(stream_of(gpt2, sum(TALES[:2], [])), 700)
    assert named.returncode == 0 and lengths(tmp_path / "y", "val") == [200]


def test_a_mistake_about_a_dataset_is_one_line_at_once(tmp_path):
    good = file_of("a.jsonl", TALES[0], tmp_path)
    with Hub() as hub:
        hub.put("me/books", {"README.md": card(one={"train": "a.jsonl"}, two={"train": "a.jsonl"}),
                             "a.jsonl": good})
        hub.put("me/one", {"a.jsonl": good})
        hub.put("me/pictures", {"a.png": b"1"})
        hub.put("me/array", {"a.json": b'[{"text": "a"}]'})
        hub.put("me/broken", {"a.parquet": b"no parquet at all"})
        hub.put("me/gated", {"README.md": b"", "a.jsonl": good})
        hub.answers = {"gated/resolve": (403, {"X-Error-Code": "GatedRepo"}), "datasets/me/wall": (403, {})}
        cases = {"me/nothing": "hf auth login", "me/wall": "hf auth login", "me/gated": "hf auth login",
                 "me/books": "'one', 'two'", "me/books --name no": "'one', 'two'",
                 "me/one --split no": "train", "me/one --text_field body": "--text_field",
                 "me/one --separator x": "--separator", "me/array": "a.json line 1",
                 "me/pictures": "me/pictures", "me/broken": "a.parquet", "../x": "../x"}
        runs = several(tmp_path, hub.env, *(["--dataset", *case.split(), "--out", "out"] for case in cases))
    for run, said in zip(runs, cases.values(), strict=True):
        refused(lambda run=run: run, "fineweb.py: ", *(said.split() if "line" in said else [said]))
    assert not [*tmp_path.rglob("*.npy")]


def test_a_hub_out_of_reach_is_a_failure_of_the_run_and_the_command_goes_on_later(tmp_path):
    with Hub() as hub:
        hub.put("me/one", {f"{i}.jsonl": file_of("a.jsonl", 9 * TALES[i], tmp_path) for i in range(3)})
        hub.answers = {"resolve/.*/2.jsonl": (500, {})}
        flags = ["--dataset", "me/one", "--shard_size", 900, "--val_tokens", 100]
        failed, = several(tmp_path, hub.env, flags)
        assert json.loads((tmp_path / "one/manifest.json").read_text())["shards"]
        hub.answers.clear()
        done = several(tmp_path, hub.env, flags, [*flags, "--out", "whole"])
    failed.stderr = failed.stderr[failed.stderr.index("fineweb.py: "):]         # the library tells each try
    refused(lambda: failed, "2.jsonl", failed=True)
    assert [run.returncode for run in done] == [0, 0], done
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")
    offline = hub.env | {"HF_HUB_OFFLINE": "1"}
    for run in several(tmp_path, offline, [*flags, "--out", "new"], ["--pretokenized", 1, "--out", "new"]):
        refused(lambda run=run: run, "fineweb.py: ", failed=True)


def test_pretokenized_fetches_what_is_missing_even_after_a_kill_and_checks_it(tmp_path):
    def shard(i):
        write_shard(tmp_path / "x_train_000000.bin", np.full(1000 + i, i, dtype=np.uint16))
        return (tmp_path / "x_train_000000.bin").read_bytes()

    files = {f"fineweb_{'train' if i else 'val'}_{i:06d}.bin": shard(i) for i in range(4)}
    out, one, two, three = tmp_path / "fineweb10B", *(["--pretokenized", n] for n in (1, 2, 3))

    def fetched():
        found = [path for path in hub.asked if "resolve" in path]
        hub.asked.clear()
        return len(found)

    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", files)
        *killed, first = several(tmp_path, hub.env, *([moment, *two] for moment in (
            (1, "half"), (1, "after"), (1, "half", "rename"), (2, "after", "rename"))), two)
        assert [run.returncode for run in killed] == [-9] * 4 and first.returncode == 0, first
        assert "1,000 tokens for validation and 2,003 for training" in first.stdout
        assert {path.name: path.read_bytes() for path in out.glob("*.bin")} == {
            name: data for name, data in files.items() if name[-5] < "3"}
        fetched()
        for run in several(tmp_path, hub.env, two, three):
            assert run.returncode == 0 and "shards complete" in run.stdout, run
        assert fetched() == 1 and {name: (out / name).read_bytes() for name in files} == files
        (out / "fineweb_train_000003.bin").unlink()
        fewer, again = [several(tmp_path, hub.env, flags)[0] for flags in (two, three)]
        assert fewer.returncode == again.returncode == 0 and fetched() == 1, (fewer, again)
        (out / "fineweb_train_000002.bin").unlink()
        bad = bytearray(files["fineweb_train_000001.bin"])
        bad[-1] ^= 1
        (out / "fineweb_train_000001.bin").write_bytes(bad)
        (tmp_path / "mine").mkdir()
        write_shard(tmp_path / "mine/x_train_000001.npy", np.arange(9, dtype=np.uint16))
        runs = several(tmp_path, hub.env, three, [*one, "--out", "mine"])
        runs += several(tmp_path, hub.env, three)           # it has nothing to fetch
    for run, name in zip(runs, ("000001", "mine", "000001"), strict=True):
        assert "000002" not in refused(lambda run=run: run, name)
    assert [*contents(tmp_path / "mine")] == ["x_train_000001.npy"]
