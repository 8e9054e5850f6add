"""fineweb.py: text -> shards, their validation, kills, what is refused, the hub, the last line."""
import json
import os
import shlex
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import ENV, ROOT, dying, script
from hub import Hub, do_not_wait
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from texts import DOCUMENTS, encode_short_chunks, tokens_of, write_documents

import fineweb
import runtime.text
from runtime.cli import UserError
from runtime.shards import list_shards, read_shard, unfinished, write_shard

FAST = settings(max_examples=20, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def folder(tmp_path, encoder, monkeypatch):
    """The working directory of a test. The encoder is made once for all of them, and chunks are
    of a few documents, as if the texts were long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fineweb, "Encoder", lambda name: encoder)
    monkeypatch.setattr(runtime.text, "BLOCK", 900)
    return tmp_path


@pytest.fixture
def text(folder):
    """A file of DOCUMENTS."""
    write_documents("a.jsonl", DOCUMENTS)
    return "a.jsonl"


def prepare(*flags):
    fineweb.main([str(flag) for flag in flags])


def refusal(*flags):
    """The line with which fineweb.py refuses these flags."""
    with pytest.raises(UserError) as error:
        prepare(*flags)
    return str(error.value)


def run(*flags, env=ENV, before=()):
    """fineweb.py in a process of its own, with chunks as in this one."""
    return script("fineweb.py", *flags, env=env, before=[encode_short_chunks, *before])


def tokens(out, split):
    return np.concatenate([read_shard(path) for path in list_shards(out, split)]).tolist()


def lengths(out, split):
    return [len(read_shard(path)) for path in list_shards(out, split)]


def contents(out):
    """{name: bytes} of the files that are not hidden."""
    files = [path for path in Path(out).glob("[!.]*") if path.is_file()]
    return {path.name: path.read_bytes() for path in files}


def manifest(out):
    return json.loads(Path(out, "manifest.json").read_text())


# ------------------------------------------------------------------------- what the shards hold

@pytest.mark.parametrize("shard_size, file_format", [
    (97, "npy"), (1000, "bin"), (10**8, "npy")])
def test_shards_are_the_text_in_its_order_and_its_first_tenth_is_for_validation(
        shard_size, file_format, gpt2, text):
    prepare("--input", text, "--out", "out", "--shard_size", shard_size, "--format", file_format,
            "--workers", 3)

    expected = tokens_of(gpt2, DOCUMENTS)
    tenth = len(expected) // 10
    assert tokens("out", "val") == expected[:tenth]
    assert tokens("out", "train") == expected[tenth:]
    for split in ("val", "train"):
        *full, last = lengths("out", split)
        assert set(full) <= {shard_size}
        assert last <= shard_size


def test_shards_are_named_as_build_nanogpts(text):
    prepare("--input", text, "--out", "out", "--shard_size", 3000)
    assert sorted(contents("out")) == [
        "manifest.json", "text_train_000001.npy", "text_train_000002.npy", "text_train_000003.npy",
        "text_val_000000.npy"]


@pytest.mark.parametrize("validation", [7, 1001])
def test_val_tokens_says_how_many_tokens_are_for_validation(validation, gpt2, text):
    prepare("--input", text, "--out", "out", "--val_tokens", validation, "--shard_size", 300)
    assert tokens("out", "val") == tokens_of(gpt2, DOCUMENTS)[:validation]
    assert tokens("out", "train") == tokens_of(gpt2, DOCUMENTS)[validation:]


def test_no_more_than_ten_million_tokens_are_for_validation(text, monkeypatch):
    assert fineweb.MOST_VALIDATION == 10_000_000
    monkeypatch.setattr(fineweb, "MOST_VALIDATION", 100)
    prepare("--input", text, "--out", "out")
    assert lengths("out", "val") == [100]


@pytest.mark.parametrize("limit, validation", [(999, 99), (1000, 100), (1001, 100), (5000, 100)])
def test_max_tokens_counts_validation_in(limit, validation, gpt2, text, monkeypatch):
    monkeypatch.setattr(fineweb, "MOST_VALIDATION", 100)
    prepare("--input", text, "--out", "out", "--max_tokens", limit)
    expected = tokens_of(gpt2, DOCUMENTS)[:limit]
    assert tokens("out", "val") == expected[:validation]
    assert tokens("out", "train") == expected[validation:]


NOT_UTF8 = "café".encode("latin-1") * 50         # who reads it, refuses it


def test_beyond_max_tokens_no_file_is_read(text):
    Path("late.txt").write_bytes(NOT_UTF8)
    # One worker reads only a few chunks ahead.
    prepare("--input", text, "late.txt", "--out", "out", "--max_tokens", 400, "--workers", 1)
    assert sum(lengths("out", "val") + lengths("out", "train")) == 400


def test_the_validation_of_a_long_text_is_written_before_the_text_ends(text, monkeypatch):
    monkeypatch.setattr(fineweb, "MOST_VALIDATION", 100)
    added = []
    written = []
    add = fineweb.Shards.add
    write = fineweb.Shards.write

    def noted_add(shards, file, some):
        added.append(len(some))
        add(shards, file, some)

    def noted_write(shards, split, count):
        written.append((split, sum(added)))
        write(shards, split, count)

    monkeypatch.setattr(fineweb.Shards, "add", noted_add)
    monkeypatch.setattr(fineweb.Shards, "write", noted_write)
    prepare("--input", text, "--out", "out")
    split, tokens_read = written[0]
    assert split == "val"
    assert 1000 <= tokens_read < 2000       # from 1000 on a tenth of them is the most, 100
    assert sum(added) > 4000


def test_val_input_takes_whole_files_for_validation(gpt2, text):
    Path("val").mkdir()
    Path("val/a.txt").write_text("one\n\ntwo")
    write_documents("val/b.jsonl", DOCUMENTS[:20])
    prepare("--input", text, "--val_input", "val/a.txt", "val/*.jsonl", "--out", "out",
            "--shard_size", 500)

    assert tokens("out", "val") == tokens_of(gpt2, ["one\n\ntwo", *DOCUMENTS[:20]])
    assert tokens("out", "train") == tokens_of(gpt2, DOCUMENTS)


SOME = st.lists(st.sampled_from(DOCUMENTS[4:60]), max_size=12)


@FAST
@given(st.lists(SOME, min_size=1, max_size=3), st.integers(100, 700), st.integers(200, 3000),
       st.none() | st.integers(2, 198))
def test_wherever_shards_validation_and_files_end_no_token_is_lost(
        gpt2, tmp_path_factory, files, shard_size, limit, validation):
    folder = tmp_path_factory.mktemp("any")
    endings = ["jsonl", "parquet", "csv"]
    paths = []
    for i, documents in enumerate(files):
        paths.append(write_documents(folder / f"{i}.{endings[i]}", documents))
    flags = ["--input", *paths, "--out", folder / "out", "--shard_size", shard_size,
             "--max_tokens", limit]
    if validation:
        flags += ["--val_tokens", validation]

    expected = tokens_of(gpt2, sum(files, []))[:limit]
    assume(len(expected) >= 200)                # else it is too short to be divided
    prepare(*flags)
    assert tokens(folder / "out", "val") + tokens(folder / "out", "train") == expected


def test_a_text_of_200_tokens_is_divided_and_a_shorter_one_is_too_short():
    Path("a.txt").write_text(" a" * 198)
    assert "199" in refusal("--input", "a.txt", "--out", "out")
    assert not Path("out").exists()

    Path("a.txt").write_text(" a" * 199)
    prepare("--input", "a.txt", "--out", "out")
    assert lengths("out", "val") == [20]
    assert lengths("out", "train") == [180]


@pytest.mark.parametrize("flags", [
    ["--input", "a.txt", "--val_tokens", 400], ["--input", "a.txt", "--val_tokens", 9,
     "--max_tokens", 10], ["--input", "none.txt", "--val_input", "a.txt"],
    ["--input", "a.txt", "--val_tokens", 1], ["--val_input", "none.txt"]])
def test_a_text_of_which_one_part_would_have_less_than_two_tokens_is_refused(flags):
    Path("a.txt").write_text(" a" * 400)
    Path("none.txt").touch()
    Path("out").mkdir()
    assert "--val_tokens" in refusal(*flags, "--out", "out")
    assert Path("out").exists(), "which was there before"


def test_a_file_of_val_input_is_not_trained_on_though_input_names_it(gpt2):
    Path("in").mkdir()
    write_documents("in/a.jsonl", DOCUMENTS[:50])
    write_documents("in/b.jsonl", DOCUMENTS[50:])
    prepare("--input", "in/*", "--val_input", "../*/in/a.jsonl", "--out", "out")
    assert tokens("out", "val") == tokens_of(gpt2, DOCUMENTS[:50])
    assert tokens("out", "train") == tokens_of(gpt2, DOCUMENTS[50:])


@pytest.mark.parametrize("shard_size", [700, 10**8])
def test_val_input_alone_makes_shards_to_evaluate_on(shard_size, gpt2, text, capsys):
    Path("b.txt").write_text("one two")
    prepare("--val_input", text, "b.txt", "--out", "out", "--shard_size", shard_size)
    assert tokens("out", "val") == tokens_of(gpt2, [*DOCUMENTS, "one two"])
    assert not list(Path("out").glob("*train*"))
    assert all(length == shard_size for length in lengths("out", "val")[:-1])

    following = capsys.readouterr().out.splitlines()[-1]
    assert following.startswith("next: python train_gpt2.py --eval_only ")
    assert "--data out" in following
    # A sequence and its last target fit into a shard.
    assert ("--sequence_length 512" in following) == (shard_size == 700)


def test_of_val_input_alone_a_whole_shard_is_written_before_the_text_ends(text, monkeypatch):
    lengths_seen = []
    write = fineweb.Shards.write

    def noted_write(shards, split, count):
        lengths_seen.append(shards.seen)
        write(shards, split, count)

    monkeypatch.setattr(fineweb.Shards, "write", noted_write)
    prepare("--val_input", text, "--out", "out", "--shard_size", 700)
    assert lengths_seen[0] < 1400


def test_val_input_that_takes_all_of_input_is_refused(text):
    assert "--val_input" in refusal("--input", text, "--val_input", "*.jsonl", "--out", "out")
    assert not Path("out").exists()


def test_a_clone_of_a_dataset_with_splits_is_refused_and_then_trained_on_its_train_split(gpt2):
    Path("tales").mkdir()
    write_documents("tales/train-0.jsonl", DOCUMENTS[:90])
    write_documents("tales/test-0.jsonl", DOCUMENTS[90:])
    line = refusal("--input", "tales", "--out", "out")
    assert not Path("out").exists()

    flags = [word.strip("'") for word in line[line.rindex("--input"):].split()]
    prepare(*flags, "--out", "out")
    assert tokens("out", "val") == tokens_of(gpt2, DOCUMENTS[90:])
    assert tokens("out", "train") == tokens_of(gpt2, DOCUMENTS[:90])


def test_val_input_without_text_is_refused(text):
    Path("none.txt").touch()
    assert "--val_input" in refusal("--input", text, "--val_input", "none.txt", "--out", "out")


def test_rows_without_text_are_no_documents_and_are_counted(gpt2, capsys):
    documents = []
    for document in DOCUMENTS:
        documents += [document, "", ""]
    write_documents("a.parquet", documents)
    prepare("--input", "a.parquet", "--out", "out")

    assert tokens("out", "val") + tokens("out", "train") == tokens_of(gpt2, DOCUMENTS)
    assert f"; {2 * len(DOCUMENTS)} rows" in capsys.readouterr().out


def test_text_field_and_separator_reach_the_readers(gpt2):
    Path("a.jsonl").write_text('{"text": "no", "body": "deeper"}\n' * 99)
    prepare("--input", "a.jsonl", "--text_field", "body", "--out", "json")
    assert tokens("json", "train") == tokens_of(gpt2, ["deeper"] * 99)[len(tokens("json", "val")):]

    Path("a.txt").write_text("one\n==\ntwo\n==\n" * 50)
    prepare("--input", "a.txt", "--separator", "==", "--out", "txt", "--val_tokens", 2)
    assert tokens("txt", "train") == tokens_of(gpt2, ["one", "two"] * 50)[2:]


def test_split_says_which_part_of_a_saved_dataset_is_read(gpt2):
    import datasets
    parts = {"train": DOCUMENTS[:60], "test": DOCUMENTS[60:]}
    splits = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(splits).save_to_disk("saved")

    prepare("--input", "saved", "--out", "train", "--val_tokens", 2)
    prepare("--input", "saved", "--split", "test", "--out", "test", "--val_tokens", 2)
    for name, part in parts.items():
        assert tokens(name, "train") == tokens_of(gpt2, part)[2:]

    prepare("--input", "saved", "--val_input", "saved/test", "--out", "both")
    assert tokens("both", "train") == tokens_of(gpt2, parts["train"])
    assert tokens("both", "val") == tokens_of(gpt2, parts["test"])


def test_a_large_document_keeps_its_tokens(gpt2, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 1 << 20)
    line = "To be, or not to be: that is the question 🙂.\r\n"
    Path("a.txt").write_text(line * 100_000, encoding="utf-8", newline="")
    prepare("--input", "a.txt", "--out", "out")

    one = gpt2.encode_ordinary(line)
    found = tokens("out", "val") + tokens("out", "train")
    found = np.array(found[1:]).reshape(100_000, len(one))
    assert (found == one).all()


def test_plain_text_needs_no_optional_package(gpt2, text, monkeypatch):
    for name in ("pyarrow", "datasets", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    prepare("--input", text, "--out", "out", "--val_tokens", 2)
    assert tokens("out", "train") == tokens_of(gpt2, DOCUMENTS)[2:]


@pytest.mark.parametrize("flags, package", [
    (["--input", "a.parquet", "--out", "out"], "pyarrow"),
    (["--input", "a.jsonl.gz", "--out", "out"], "pyarrow"),
    (["--pretokenized", "1"], "huggingface_hub"), (["--dataset", "me/books"], "huggingface_hub")])
def test_a_package_that_is_missing_is_named(flags, package, monkeypatch):
    Path("a.parquet").write_bytes(b"PAR1")
    Path("a.jsonl.gz").write_bytes(b"\x1f\x8b")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        prepare(*flags)


# ------------------------------------------------------------------------- flags

def test_what_does_not_change_the_shards_is_not_in_their_manifest(text):
    prepare("--input", text, "--out", "out")
    assert not {"workers", "encoder"} & manifest("out").keys()


class Watched:
    """An encoder whose threads wait for each other, until so many have work."""

    def __init__(self, encoder, threads):
        self.encoder = encoder
        self.gigatoken = encoder.gigatoken
        self.mark = encoder.mark
        self.barrier = threading.Barrier(threads)
        self.threads = set()

    def encode(self, chunk):
        if threading.get_ident() not in self.threads:
            self.threads.add(threading.get_ident())
            self.barrier.wait(20)
        return self.encoder.encode(chunk)


@pytest.mark.parametrize("flags, threads", [(["--workers", 4], 4), ([], 3)])
def test_the_threads_are_as_many_as_workers_says_or_as_the_cores_of_this_process(
        flags, threads, text, encoder, monkeypatch):
    watched = Watched(encoder, threads)
    monkeypatch.setattr(fineweb, "Encoder", lambda name: watched)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    prepare("--input", text, "--out", "out", *flags)
    assert len(watched.threads) == threads


@pytest.mark.parametrize("flags, name", [
    ([], "auto"), (["--encoder", "tiktoken"], "tiktoken"),
    (["--encoder", "gigatoken"], "gigatoken")])
def test_the_encoder_is_the_one_that_is_asked_for(flags, name, text, encoder, monkeypatch):
    asked = []

    def make_encoder(name):
        asked.append(name)
        return encoder

    monkeypatch.setattr(fineweb, "Encoder", make_encoder)
    prepare("--input", text, "--out", "out", *flags)
    assert asked == [name]


def test_without_gigatoken_a_line_says_that_tiktoken_is_slow(text, encoder, monkeypatch, capsys):
    monkeypatch.setattr(encoder, "gigatoken", None)
    prepare("--input", text, "--out", "out")
    assert "pip install gigatoken" in capsys.readouterr().out


@pytest.mark.parametrize("line, named", [
    ("--input missing.txt --out out", "missing.txt"), ("--input a.txt", "--out"),
    ("--val_input a.txt", "--out"), ("--verify nowhere", "nowhere"),
    ("--val_input a.txt --dataset b/c", "--val_input"),
    ("--val_input a.txt --val_tokens 5 --out out", "--val_tokens"),
    ("--val_input a.txt --name x --out out", "--name"),
    ("--input a.txt --out=", "--out"), ("--input= --out out", "--input"),
    ("--input a.txt --separator --- --out out", "--separator"),
    ("--input a.txt --name x --out out", "--name"), ("--verify x --split y", "--split"),
    ("--input a.txt --dataset a/b --out out", "--dataset"),
    ("--pretokenized 9 --split y", "--split"),
    ("--shard_size 2147483648", "--shard_size"), ("--max_tokens 1e9", "--max_tokens"),
    ("--shard_size 0", "--shard_size"), ("--max_tokens 0", "--max_tokens"),
    ("--val_tokens 0", "--val_tokens"), ("--workers 0", "--workers"),
    ("--workers 257", "--workers"),
    ("--pretokenized 0", "--pretokenized"), ("--pretokenized 104", "103"),
    ("--format csv", "--format"), ("--no_such_flag", "--no_such_flag"),
    ("--input a.txt --val_input a.txt --val_tokens 5 --out out", "--val_tokens"),
    ("--input a.txt --split test --out out", "--split")])
def test_a_mistake_in_the_flags_is_named_and_nothing_is_written(line, named):
    Path("a.txt").write_text("some words " * 400)
    assert named in refusal(*line.split())
    assert os.listdir() == ["a.txt"]


# ------------------------------------------------------------------------- kills and repeats

CASES = [["--val_tokens", 1600], ["--val_tokens", 700, "--max_tokens", 4000],
         ["--val_input", "val.csv"], ["--separator", ":"]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wherever_it_is_killed_the_same_command_ends_with_the_same_bytes(case, text):
    Path("b.txt").write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:5000])
    write_documents("c.parquet", DOCUMENTS[:90])
    write_documents("val.csv", DOCUMENTS[:40])
    flags = ["--input", "b.txt", text, "c.parquet", *case, "--shard_size", 1500]
    prepare(*flags, "--out", "whole")
    assert len(contents("whole")) > 4

    # A call writes the manifest, as long as that lists no shard, and then in turn a shard and the
    # manifest that lists it.
    moments = ("3 half", "3 after", "1 after", "2 after")
    if case == CASES[0]:
        moments = ("1 half", "1 after", "2 after", "2 half", "3 half", "3 after",
                   "1 half", "1 after", "2 half", "2 after")
    for moment in moments:
        killed = run(*flags, "--out", "out", before=dying(moment))
        assert killed.returncode == -9
    assert len(manifest("out")["shards"]) == 2
    assert unfinished("out")
    prepare(*flags, "--out", "out")
    assert contents("out") == contents("whole")


def test_what_is_complete_is_left_alone(text, monkeypatch):
    prepare("--input", text, "--out", "out")
    before = contents("out")
    monkeypatch.setattr(fineweb, "encode_files", None)
    prepare("--input", text, "--out", "out", "--workers", 3, "--encoder", "tiktoken")
    assert contents("out") == before


def test_leftovers_of_killed_runs_are_removed_and_other_files_are_not(text):
    Path("out").mkdir()
    ours = {"text_train_000001.npy.77.tmp", "text_val_000000.bin.tmp", "manifest.json.5.tmp"}
    others = {"edufineweb_train_000001.npy.77.tmp", "notes.tmp", "README"}
    for name in ours | others:
        Path("out", name).write_text("half")

    prepare("--input", text, "--out", "out")
    left = set(contents("out"))
    assert others <= left
    assert left.isdisjoint(ours)


def test_the_progress_of_a_continued_run_counts_all_tokens(text, monkeypatch):
    bars = []

    class Bar(fineweb.tqdm):
        def __init__(self, **how):
            super().__init__(**how)
            self.counted = how["initial"]
            bars.append(self)

        def update(self, n=1):
            self.counted += n

    Path("done.txt").write_text(" word" * 400)
    flags = ["--input", "done.txt", text, "--shard_size", 1500, "--out", "out"]
    # The third shard is there, and the manifest does not list it yet.
    assert run(*flags, before=dying("6 after")).returncode == -9
    monkeypatch.setattr(fineweb, "tqdm", Bar)
    prepare(*flags)
    assert bars[0].counted == sum(lengths("out", "val") + lengths("out", "train"))


def test_a_second_call_in_a_folder_is_refused_while_the_first_is_at_work(text, monkeypatch):
    monkeypatch.setattr("runtime.lock.LOCK_PATIENCE", 0.1)
    write_documents("b.jsonl", DOCUMENTS[:90])
    write = fineweb.Shards.write
    refused = []

    def meanwhile(shards, split, count):
        refused.append(refusal("--input", "b.jsonl", "--out", "out"))
        write(shards, split, count)

    monkeypatch.setattr(fineweb.Shards, "write", meanwhile)
    prepare("--input", text, "--out", "out")
    assert len(refused) == 2
    assert all("in use" in line for line in refused)
    assert len(contents("out")) == 3


def test_text_that_cannot_be_read_leaves_whole_shards_that_the_manifest_lists(text):
    Path("late.txt").write_bytes(NOT_UTF8)
    line = refusal("--input", text, "late.txt", "--shard_size", 900, "--workers", 1,
                   "--val_tokens", 500, "--out", "out")
    assert "late.txt" in line

    listed = {shard["file"] for shard in manifest("out")["shards"]}
    assert len(listed) > 4
    assert listed == {path.name for path in Path("out").glob("*.npy")}


# ------------------------------------------------------------------------- another text or manifest

@pytest.mark.parametrize("name, value", [
    ("shard_size", 2001), ("text_field", "id"), ("format", "bin"), ("max_tokens", 4000),
    ("val_tokens", 501), ("separator", "x"), ("input", "b.jsonl"), ("val_input", "b.jsonl")])
def test_other_settings_are_refused_and_change_nothing(name, value, text):
    write_documents("b.jsonl", DOCUMENTS)
    flags = ["--input", text, "--shard_size", 2000, "--out", "out"]
    prepare(*flags)
    before = contents("out")

    line = refusal(*flags, f"--{name}", value)          # a second --input adds a file
    assert f"another {name}" in line
    assert contents("out") == before


@pytest.mark.parametrize("at", [0, -1])
def test_a_text_whose_beginning_or_end_has_changed_is_refused(at, text):
    prepare("--input", text, "--out", "out")
    changed = list(DOCUMENTS)
    changed[at] = changed[at].swapcase()
    write_documents(text, changed)
    assert "another input" in refusal("--input", text, "--out", "out")


@pytest.mark.parametrize("old, new", [
    pytest.param('"cursor"', '"other"', id="a key is missing"),
    pytest.param('"tokens": 1500', '"tokens": 1', id="a wrong length"),
    pytest.param("text_v", "none_v", id="a shard that is not there"),
    pytest.param("}\n ]", "}", id="no JSON"),
])
def test_a_damaged_manifest_ends_the_command_and_nothing_changes(old, new, text):
    flags = ["--input", text, "--out", "out", "--shard_size", 1500]
    prepare(*flags)
    path = Path("out/manifest.json")
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))

    before = contents("out")
    with pytest.raises((UserError, FileNotFoundError), match=r"out/(manifest\.json|none_val_)"):
        prepare(*flags)
    assert contents("out") == before


def test_shards_of_another_version_are_refused(text):
    prepare("--input", text, "--out", "out")
    found = manifest("out")
    Path("out/manifest.json").write_text(json.dumps({**found, "version": 4}))
    assert "another version" in refusal("--input", text, "--out", "out")


def test_shards_without_a_manifest_are_refused(text):
    prepare("--input", text, "--out", "out")
    Path("out/manifest.json").unlink()
    assert "manifest.json is missing" in refusal("--input", text, "--out", "out")


# ------------------------------------------------------------------------- --verify

def test_verify_says_how_many_shards_match_the_manifest(text, capsys):
    prepare("--input", text, "--out", "out", "--shard_size", 1500)
    number = len(list(Path("out").glob("*.npy")))
    prepare("--verify", "out")
    assert f"all {number} shards" in capsys.readouterr().out


def test_verify_says_that_a_folder_is_unfinished(text, capsys):
    prepare("--input", text, "--out", "out", "--shard_size", 1500)
    Path("out/manifest.json").write_text(json.dumps({**manifest("out"), "complete": False}))

    prepare("--verify", "out")
    assert unfinished("out") in capsys.readouterr().out


def test_verify_names_every_shard_that_is_not_as_it_was_written(text):
    prepare("--input", text, "--out", "out", "--shard_size", 1000)
    flipped, truncated, missing, *_ = sorted(Path("out").glob("*_train_*"))
    data = bytearray(flipped.read_bytes())
    data[-9] ^= 1
    flipped.write_bytes(data)
    truncated.write_bytes(truncated.read_bytes()[:-2])
    missing.unlink()

    line = refusal("--verify", "out")
    for path in (flipped, truncated, missing):
        assert path.name in line
    assert "_val_" not in line


def test_verify_needs_a_manifest(text):
    prepare("--input", text, "--out", "out")
    Path("out/manifest.json").unlink()
    assert "manifest.json" in refusal("--verify", "out")


# ------------------------------------------------------------------------- the last line

def test_the_last_line_is_a_command_that_runs_as_printed(folder, capsys):
    Path("a.txt").write_text(" word" * 199)
    prepare("--input", "a.txt", "--out", "it's $HOME")
    _, line = capsys.readouterr().out.splitlines()[-1].split(": ", 1)
    python, *command = shlex.split(line)
    assert python == "python"
    assert command[1:] == ["--preset", "shakespeare", "--data", "it's $HOME", "--out",
                           "log/it's $HOME", "--max_steps", "100", "--val_every", "12",
                           "--block_size", "16"]

    small = "--n_layer 1 --n_head 1 --n_embd 16 --max_steps 1 --checkpoint_every 0 --device cpu"
    done = script(*command, *small.split())
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------- the hub

def tales(book):
    """The documents of a file."""
    return [f"Tale {i} of book {book}: " + "once upon a time. " * (1 + i % 7) for i in range(40)]


def book_file(book, name):
    """The bytes of such a file, in the format that the name asks for."""
    path = write_documents(f"book.{name}", tales(book))
    return path.read_bytes()


def card(configs):
    """README.md with the configurations {name: {split: path}}."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", ""]).encode()


def test_a_killed_run_ends_with_the_files_of_the_revision_it_began_with(gpt2):
    readme = card({"tales": {"train": "tales/*"}})
    files = {f"tales/{i}.{ending}": book_file(i, ending)
             for i, ending in enumerate(["parquet", "jsonl", "csv", "json.gz"])}
    flags = ["--dataset", "me/books", "--name", "tales", "--shard_size", 700, "--val_tokens", 300]
    with Hub() as hub:
        # The dataset changes as soon as somebody has asked for its newest revision.
        sha, _ = hub.put("me/books", {"README.md": readme, **files}, {"README.md": readme})
        before = dying("11 after")          # the manifest that lists the fifth shard
        killed = run(*flags, env=hub.env, before=before)
        assert killed.returncode == -9, killed.stderr
        file, _ = manifest("books-tales")["shards"][-1]["cursor"]
        assert file > 0

        hub.asked.clear()
        done = run(*flags, env=hub.env)
        assert done.returncode == 0, done.stderr

    fetched = [path for path in hub.asked if "/resolve/" in path]
    assert fetched and all(sha in path for path in fetched)
    assert not any("tales/0.parquet" in path for path in fetched), "it was done"
    found = tokens("books-tales", "val") + tokens("books-tales", "train")
    assert found == tokens_of(gpt2, sum([tales(i) for i in range(4)], []))
    assert not Path("books-tales/.download").exists()


def test_while_a_file_is_fetched_at_most_one_other_is_on_the_disk():
    on_disk = []
    with Hub() as hub:
        hub.put("me/one", {f"{i}.jsonl": book_file(i, "jsonl") for i in range(5)})
        send = hub.file

        def noted(sha, data):
            on_disk.append(len(list(Path("one").rglob("[0-9].jsonl"))))
            return send(sha, data)

        hub.file = noted
        done = run("--dataset", "me/one", env=hub.env)
    assert done.returncode == 0, done.stderr
    assert max(on_disk) <= 1


def test_fineweb_edu_is_the_default_and_its_first_shard_or_a_tenth_is_for_validation(gpt2):
    with Hub() as hub:
        hub.put("HuggingFaceFW/fineweb-edu", {
            "README.md": card({"sample-10BT": {"train": "sample/10BT/*"}, "x": {"train": "x.txt"}}),
            "sample/10BT/000.parquet": book_file(0, "parquet"),
            "sample/10BT/001.parquet": book_file(1, "parquet")})
        done = run("--shard_size", 700, env=hub.env)
        limited = run("--max_tokens", 2000, "--out", "limited", env=hub.env)
        chosen = run("--val_tokens", 300, "--out", "chosen", env=hub.env)
        large = run("--shard_size", 700, "--max_tokens", 10**6, "--out", "large", env=hub.env)

    for result in (done, limited, chosen, large):
        assert result.returncode == 0, result.stderr
    expected = tokens_of(gpt2, tales(0) + tales(1))
    assert tokens("edu_fineweb10B", "val") == expected[:700]
    assert tokens("edu_fineweb10B", "train") == expected[700:]
    assert Path("edu_fineweb10B/edufineweb_val_000000.npy").exists()
    assert lengths("limited", "val") == [200]
    assert lengths("chosen", "val") == [300]
    assert lengths("large", "val") == [700], "a shard, which is less than a tenth of --max_tokens"


@pytest.mark.parametrize("dataset, name, split, names", [
    ("HuggingFaceFW/fineweb", "sample-100BT", "train", ("fineweb-sample-100BT",) * 2),
    ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", ("edufineweb", "edu_fineweb10B")),
    ("HuggingFaceFW/fineweb", None, "train", ("fineweb", "fineweb")),
    ("me/My_Books", "a/b", "test", ("My-Books-a-b-test", "My-Books-a-b-test"))])
def test_shards_and_folder_are_named_after_the_dataset(dataset, name, split, names):
    assert fineweb.hub_names(dataset, name, split) == names


@pytest.mark.parametrize("flags, named", [
    ("me/nothing", "hf auth login"), ("me/lost", "hf auth login"), ("me/wall", "hf auth login"),
    ("me/gated", "hf auth login"),
    ("me/books", "two"), ("me/one --split no", "train"), ("me/pictures", "me/pictures"),
    ("me/one --text_field body", "--text_field"), ("me/broken", "a.parquet")])
def test_a_mistake_about_a_dataset_is_one_line(flags, named):
    good = book_file(0, "jsonl")
    with Hub() as hub:
        configs = card({"one": {"train": "a.jsonl"}, "two": {"train": "a.jsonl"}})
        hub.put("me/books", {"README.md": configs, "a.jsonl": good})
        hub.put("me/one", {"a.jsonl": good})
        hub.put("me/pictures", {"a.png": b"1"})
        hub.put("me/broken", {"a.parquet": b"no parquet at all"})
        hub.put("me/gated", {"README.md": b"", "a.jsonl": good})
        hub.answers = {"gated/resolve": (403, {"X-Error-Code": "GatedRepo"}),
                       "datasets/me/wall": (403, {}),
                       # instead of 401, for a user who is logged in
                       "datasets/me/lost": (404, {"X-Error-Code": "RepoNotFound"})}
        done = run("--dataset", *flags.split(), "--out", "out", env=hub.env)

    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr
    assert not list(Path().rglob("*.npy"))


def test_a_hub_out_of_reach_is_a_failure_of_the_run_and_the_command_goes_on_later():
    flags = ["--dataset", "me/one", "--shard_size", 900, "--val_tokens", 100]
    with Hub() as hub:
        hub.put("me/one", {f"{i}.jsonl": book_file(i, "jsonl") for i in range(3)})
        hub.answers = {"resolve/.*/2.jsonl": (500, {})}
        failed = run(*flags, env=hub.env, before=[do_not_wait])
        assert failed.returncode == 1, failed.stderr
        assert "2.jsonl" in failed.stderr.splitlines()[-1]
        assert manifest("one")["shards"]

        hub.answers.clear()
        again = run(*flags, env=hub.env)
        whole = run(*flags, "--out", "whole", env=hub.env)
    assert [again.returncode, whole.returncode] == [0, 0]
    assert contents("one") == contents("whole")


@pytest.mark.parametrize("flags", [["--dataset", "me/one"], ["--pretokenized", 1]])
def test_without_a_network_a_dataset_is_one_line_and_exit_code_1(flags):
    done = run(*flags, "--out", "new", env={**ENV, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------- published shards

@pytest.fixture
def published():
    """{name: bytes} of FineWeb's published shards, a short one for validation and three more."""
    files = {}
    for i in range(4):
        name = f"fineweb_train_{i:06d}.bin"
        if i == 0:
            name = "fineweb_val_000000.bin"
        write_shard(name, np.full(1000 + i, i, dtype=np.uint16))
        files[name] = Path(name).read_bytes()
        Path(name).unlink()
    return files


def test_pretokenized_fetches_what_is_missing(published):
    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", published)
        two = run("--pretokenized", 2, env=hub.env)
        assert two.returncode == 0, two.stderr
        assert f"{1001 + 1002:,} for training" in two.stdout

        hub.asked.clear()
        three = run("--pretokenized", 3, env=hub.env)
        assert three.returncode == 0, three.stderr
    fetched = [path for path in hub.asked if "/resolve/" in path]
    assert len(fetched) == 1
    found = contents("fineweb10B")
    assert {name: found[name] for name in published} == published


def test_pretokenized_goes_on_after_a_kill(published):
    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", published)
        flags = ["--pretokenized", 1]
        killed = run(*flags, env=hub.env, before=dying("1 after"))      # the manifest's write
        assert killed.returncode == -9
        assert not list(Path("fineweb10B").glob("*.bin"))
        done = run(*flags, env=hub.env)
    assert done.returncode == 0, done.stderr


def test_pretokenized_still_knows_the_shards_of_an_earlier_call(published):
    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", published)
        assert run("--pretokenized", 3, env=hub.env).returncode == 0
        Path("fineweb10B/fineweb_train_000001.bin").unlink()
        assert run("--pretokenized", 2, env=hub.env).returncode == 0
        done = run("--pretokenized", 3, env=hub.env)
    assert done.returncode == 0, done.stderr


def test_pretokenized_names_a_shard_that_is_damaged(published):
    with Hub() as hub:
        hub.put("kjj0/fineweb10B-gpt2", published)
        assert run("--pretokenized", 1, env=hub.env).returncode == 0
        path = Path("fineweb10B/fineweb_train_000001.bin")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        again = run("--pretokenized", 1, env=hub.env)
    assert again.returncode == 2
    assert path.name in again.stderr


def test_pretokenized_leaves_shards_of_another_source_alone():
    Path("mine").mkdir()
    write_shard("mine/x_train_000001.npy", np.arange(9, dtype=np.uint16))
    assert "another source" in refusal("--pretokenized", 1, "--out", "mine")
    assert list(contents("mine")) == ["x_train_000001.npy"]
