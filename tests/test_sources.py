"""runtime/sources.py: which files paths, folders and globs mean, and what is told of the others."""
import json
import os
import shlex
from pathlib import Path

import pytest

from runtime.cli import UserError
from runtime.sources import describe, find_files
from texts import DOCUMENTS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names):
    """Files with these names, whose text is their name."""
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def found(*patterns, split="train"):
    """The names of the files that are read."""
    files = find_files("input", list(patterns), split, Path("out"))
    return [str(path) for path in files.values()]


def refusal(*patterns, split="train"):
    with pytest.raises(UserError) as error:
        found(*patterns, split=split)
    return str(error.value)


# ------------------------------------------------------------------------- what is meant

def test_files_of_a_folder_are_read_in_order_and_subfolders_by_a_glob():
    write("in/b.jsonl", "in/a.json.gz", "in/deep/c.jsonl", "in/deep/er/d.ndjson")
    assert found("in") == ["in/a.json.gz", "in/b.jsonl"]
    assert found("in/*") == ["in/a.json.gz", "in/b.jsonl"]
    assert found("in/**") == [
        "in/a.json.gz", "in/b.jsonl", "in/deep/c.jsonl", "in/deep/er/d.ndjson"]


def test_paths_are_read_in_the_order_in_which_they_are_given_and_each_once():
    write("in/a.txt", "in/b.txt", "in/c.txt")
    assert found("in/c.txt", "in/*", "in/a.txt") == ["in/c.txt", "in/a.txt", "in/b.txt"]


def test_a_file_behind_a_link_is_read_once():
    write("a.txt")
    os.symlink("a.txt", "b.txt")
    assert found("*.txt") == ["a.txt"]


def test_a_path_is_taken_as_it_is_though_it_looks_like_a_glob():
    write("notes[1].txt", "notes1.txt")
    assert found("notes[1].txt") == ["notes[1].txt"]


def test_hidden_files_and_folders_are_not_read():
    write("in/a.txt", "in/._a.txt", "in/.hidden.jsonl", "in/.git/x.txt")
    for pattern in ("in", "in/*", "in/**", "*/*.txt"):
        assert found(pattern) == ["in/a.txt"]


def test_shards_may_be_made_in_the_folder_of_their_text(capsys):
    write("out/a.txt", "out/b.md", "out/manifest.json", "out/text_train_000001.bin")
    assert found("out") == ["out/a.txt", "out/b.md"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["missing.txt", "no*.csv", "empty", "a.pdf"])
def test_what_has_no_text_is_refused(pattern):
    write("a.pdf")
    Path("empty").mkdir()
    assert f"--input {pattern}" in refusal(pattern)


@pytest.mark.parametrize("pattern", ["in", "in/*", "in/**"])
def test_a_folder_that_cannot_be_read_is_told_by_the_system(pattern, monkeypatch):
    write("in/a.txt", "in/closed/b.txt")
    scandir = os.scandir

    def refusing(path):
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="closed"):
        found(pattern)


# ------------------------------------------------------------------------- what is not read

def test_files_of_other_kinds_are_counted_by_their_endings(capsys):
    write("in/a.jsonl", "in/b.pdf", "in/c.pdf", "in/d.tsv", "in/LICENSE")
    assert found("in") == ["in/a.jsonl"]
    [line] = capsys.readouterr().err.splitlines()
    assert "2 .pdf" in line and "1 .tsv" in line and "1 without an ending" in line
    assert "in in" in line


def test_files_of_subfolders_are_told_with_the_glob_that_takes_them(capsys):
    write("in/a.jsonl", "in/deep/b.jsonl")
    assert found("in") == ["in/a.jsonl"]
    [line] = capsys.readouterr().err.splitlines()
    assert "1 .jsonl" in line and "/**" in line and "in/deep" in line


@pytest.mark.parametrize("typed", ["in", "../{here}/in", "{parent}/{here}/in"])
def test_where_files_are_not_read_is_told_as_it_was_typed(typed, folder, capsys):
    typed = typed.format(here=folder.name, parent=folder.parent)
    write("in/a.txt", "in/b.pdf", "in/deep/c.pdf")
    assert found(typed) == [f"{typed}/a.txt"]
    assert capsys.readouterr().err.endswith(f" 2 .pdf in {typed}\n")


def test_the_working_directory_is_told_as_a_dot(capsys):
    write("a.txt", "b.pdf", "deep/c.pdf")
    assert found("*") == ["a.txt"]
    assert capsys.readouterr().err.endswith(" 2 .pdf in .\n")


def test_a_link_to_nowhere_is_told(capsys):
    write("in/a.txt")
    os.symlink("nowhere", "in/b.txt")
    assert found("in") == ["in/a.txt"]
    assert "1 .txt" in capsys.readouterr().err


def test_nothing_is_told_where_all_is_read(capsys):
    write("in/a.txt", "in/b.md")
    assert found("in") == ["in/a.txt", "in/b.md"]
    assert capsys.readouterr().err == ""


def test_a_hidden_folder_below_a_glob_is_neither_read_nor_told(capsys):
    write("in/a.jsonl", "in/deep/b.jsonl", "in/.git/c.jsonl", "in/deep/.cache/d.jsonl",
          "in/e.jsonl/part.jsonl", "in/e.jsonl/.tmp/part.jsonl")
    assert found("in/**") == ["in/a.jsonl", "in/deep/b.jsonl", "in/e.jsonl/part.jsonl"]
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------- several kinds

@pytest.mark.parametrize("names, one_kind", [
    (["README.md", "data/a.parquet", "data/b.parquet"], "in/data/*.parquet"),
    (["a.jsonl.gz", "notes.txt"], "in/*.gz"),
])
def test_files_of_several_kinds_are_refused_and_those_of_one_are_named(names, one_kind):
    """Those of one kind are about the others: the README of a dataset, say."""
    write(*[f"in/{name}" for name in names])
    for pattern in ("in", "in/**"):
        line = refusal(pattern)
        assert f"--input {pattern} has files of several kinds" in line
    assert all(path.endswith(one_kind.rpartition("*")[2]) for path in found(one_kind))


@pytest.mark.parametrize("names", [["README.md", "train/a.jsonl"], ["a.txt", "b.jsonl"]])
def test_the_glob_that_is_proposed_for_one_of_several_kinds_is_read(names):
    write(*[f"in/{name}" for name in names])
    _, proposed, _ = refusal("in").rsplit("'", 2)
    assert found(proposed.replace("FOLDER", "in")) == [f"in/{names[1]}"]


# ------------------------------------------------------------------------- splits

SPLITS = [
    # as datasets of the hub have them
    (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
      "data/test-00000-of-00001.parquet"], "in/data/train*", "in/data/test*"),
    (["train.jsonl", "validation.jsonl", "test.jsonl"], "in/train*", "in/validation*"),
    (["en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"],
     "in/en/*-train*", "in/en/*-validation*"),
    (["train/0000.parquet", "valid/0000.parquet"], "in/train/**", "in/valid/**"),
    (["de/train/a/b.txt", "de/val/c.txt"], "in/de/train/**", "in/de/val/**"),
    (["squad_train_1.csv", "squad_dev_1.csv"], "in/*_train*", "in/*_dev*"),
    (["Train.csv", "Eval.csv", "Test.csv"], "in/Train*", "in/Eval*"),
    (["Train/a.txt", "Test/b.txt"], "in/Train/**", "in/Test/**"),
    (["train.parquet/part-0.parquet", "dev.parquet/part-0.parquet"], "in/train*", "in/dev*"),
    (["my [1]/train.txt", "my [1]/test.txt"], "in/my [[]1]/train*", "in/my [[]1]/test*"),
    (["contest_train.csv", "contest_test.csv"], "in/*_train*", "in/*_test*"),
    (["1-train.txt", "2-test.txt"], "in/*-train*", "in/*-test*"),
    # of several kinds: The Pile, and others
    (["train/00.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"], "in/train/**", "in/val*"),
    (["train.jsonl", "validation.json"], "in/train*", "in/validation*"),
    (["README.md", "train.parquet", "test.csv"], "in/train*", "in/test*"),
    # BabyLM, mC4, SQuAD, WikiText, ARC, and other words for the same
    (["train_10M/a.txt", "dev/a.txt", "test/a.txt"], "in/train_10M/**", "in/dev/**"),
    (["c4-en.tfrecord-00000-of-00064.json.gz", "c4-en-validation.tfrecord-00000-of-00001.json.gz"],
     "in/c4-en.tfrecord-[0-9]*", "in/c4-en-validation*"),
    (["c4-en.00000-of-00064.json.gz", "c4-en-validation.00000-of-00001.json.gz"],
     "in/c4-en.[0-9]*", "in/c4-en-validation*"),
    (["train-v1.1.json", "dev-v1.1.json"], "in/train*", "in/dev*"),
    (["wiki.train.tokens.txt", "wiki.valid.tokens.txt", "wiki.test.tokens.txt"],
     "in/wiki.train*", "in/wiki.valid*"),
    (["training/a.jsonl", "evaluation/a.jsonl"], "in/training/**", "in/evaluation/**"),
    (["training.txt", "testing.txt"], "in/training*", "in/testing*"),
    (["trainSet.csv", "testSet.csv"], "in/trainSet*", "in/testSet*"),
    (["books train/a.txt", "books test/b.txt"], "in/books train/**", "in/books test/**"),
    (["train.txt", "heldout.txt"], "in/train*", "in/heldout*"),
    (["train.txt", "held-out.txt"], "in/train*", "in/held-out*"),
]


@pytest.mark.parametrize("names, train, held_out", SPLITS)
def test_a_folder_of_splits_is_refused_with_the_flags_that_take_them_apart(names, train, held_out):
    write(*[f"in/{name}" for name in names])
    line = refusal("in/**")
    assert f" --input {shlex.quote(train)} --val_input {shlex.quote(held_out)}" in line

    for_training = found(train)
    for_validation = list(find_files("val_input", [held_out], "train", Path("out")).values())
    assert for_training and for_validation
    assert not {*for_training} & {str(path) for path in for_validation}


@pytest.mark.parametrize("names, train, held_out", SPLITS)
def test_a_folder_of_splits_is_no_text_for_validation(names, train, held_out):
    write(*[f"in/{name}" for name in names])
    with pytest.raises(UserError) as error:
        find_files("val_input", ["in/**"], "train", Path("out"))
    assert str(error.value).endswith(f" --val_input {shlex.quote(held_out)}")


def test_splits_of_which_one_is_in_a_subfolder_are_refused_and_those_that_are_not_read_are_not():
    """Of The Pile, `in` alone would mean val and test."""
    write("in/train/00.jsonl", "in/val.jsonl", "in/test.jsonl", "notes.jsonl")
    assert "--input 'in/train/**' --val_input 'in/val*'" in refusal("in")
    assert found("*") == ["notes.jsonl"]


@pytest.mark.parametrize("pattern", ["in", "in/", "in/*", "in/*.jsonl", "in/**", "./in", "*/*"])
def test_one_folder_or_glob_that_means_several_splits_is_refused(pattern):
    write("in/train-a.jsonl", "in/test-a.jsonl")
    assert "train*" in refusal(pattern)


def test_splits_that_are_named_one_by_one_are_read():
    names = ["in/train-a.jsonl", "in/train-b.jsonl", "in/test.jsonl"]
    write(*names)
    assert found("in/train*", "in/test*") == names
    assert found(*names) == names
    assert found("in/test*") == ["in/test.jsonl"]


def test_splits_that_are_for_validation_are_not_mixed_with_the_others():
    write("in/train.jsonl", "in/validation.csv", "in/test.jsonl")
    held_back = find_files("val_input", ["in/validation*", "in/test*"], "train", Path("out"))
    files = find_files("input", ["in"], "train", Path("out"), held_back)
    assert [str(path) for path in files.values()] == ["in/train.jsonl"]

    held_back.popitem()
    with pytest.raises(UserError, match="train, test"):
        find_files("input", ["in"], "train", Path("out"), held_back)


@pytest.mark.parametrize("names", [
    ["train.txt", "chapter.txt"],
    ["test.txt", "validation.txt"],
    ["trains.txt", "test.txt"],
    ["my train set.txt", "test.txt"],
    ["train/a.txt", "book/test/b.txt"],
    ["train-and-test.txt", "latest.txt"],
    ["train_test.txt", "trainers.txt"],
    ["old train/a.txt", "test/b.txt"],
    ["the_test_of_time.txt", "latest.txt"],
    ["the test of time.txt", "the train at night.txt"],
    ["dev notes/a.txt", "training/b.txt"],
    ["shard-00000-of-00002.txt", "test.txt"],
    ["exam.txt", "exam_test.txt"],
])
def test_names_that_only_look_like_splits_are_read(names):
    write(*[f"in/{name}" for name in names])
    assert len(found("in/**")) == 2


# ------------------------------------------------------------------------- folders that are files

def test_a_folder_named_as_a_file_is_read_as_the_files_in_it(capsys):
    # Spark writes it so, with partitions and a mark of its success.
    write("in/a.parquet/lang=de/part-0.parquet", "in/a.parquet/lang=en/part-1.parquet",
          "in/a.parquet/_SUCCESS", "in/b.parquet")
    files = ["in/a.parquet/lang=de/part-0.parquet", "in/a.parquet/lang=en/part-1.parquet",
             "in/b.parquet"]
    assert found("in/*.parquet") == files
    assert found("in") == files
    assert found("in/**") == files
    assert found("in/a.parquet") == files[:2]
    assert "without an ending" in capsys.readouterr().err


@pytest.fixture
def saved():
    """A folder that `datasets` has written, of two splits and what it has computed of one."""
    import datasets
    text = datasets.Dataset.from_dict({"text": DOCUMENTS})
    datasets.DatasetDict(train=text, test=text).save_to_disk("saved")
    train = datasets.load_from_disk("saved/train")
    train.map(lambda row: {"length": len(row["text"])})
    assert list(Path("saved/train").glob("cache-*.arrow"))
    return "saved"


TRAIN_FILE = "saved/train/data-00000-of-00001.arrow"
TEST_FILE = "saved/test/data-00000-of-00001.arrow"


@pytest.mark.parametrize("pattern", [
    "saved/train", "saved/train/*", "saved/train/**", "saved/tr*/*.arrow"])
def test_a_saved_dataset_is_its_arrow_files(pattern, saved, capsys):
    assert found(pattern) == [TRAIN_FILE]
    assert capsys.readouterr().err == ""


def test_of_a_saved_dataset_of_several_splits_the_split_is_read(saved, capsys):
    assert found("saved") == [TRAIN_FILE]
    assert found("saved", split="test") == [TEST_FILE]
    assert capsys.readouterr().err == ""
    line = refusal("saved", split="validation")
    assert "train, test" in line and "--split" in line


def test_the_splits_of_a_saved_dataset_are_taken_apart_as_others_are(saved):
    assert "--input 'saved/train/**' --val_input 'saved/test/**'" in refusal("saved/**")


def test_what_describes_a_dataset_is_not_told_as_unread(saved, capsys):
    write("notes.arrow")
    assert found("*") == ["notes.arrow"]
    assert "not read: 2 .arrow in saved;" in capsys.readouterr().err


def test_a_file_that_is_named_as_a_description_is_read_if_it_is_none_or_is_asked_for(saved):
    write("in/state.json", "in/cache-flow.jsonl")
    assert found("in") == ["in/cache-flow.jsonl", "in/state.json"]
    assert found("saved/train/state.json") == ["saved/train/state.json"]


def test_rows_in_another_order_than_that_of_their_file_are_refused_with_the_way_out(saved):
    # datasets 1.4 to 1.13 write this entry for a shuffled dataset.
    path = Path("saved/train/state.json")
    state = json.loads(path.read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    path.write_text(json.dumps(state))
    assert "flatten_indices()" in refusal("saved")

    # And these, with a file of such a name, once the rows are written in their order.
    Path(TRAIN_FILE).rename("saved/train/cache-1ac3891090a432f9.arrow")
    state["_indices_data_files"] = []
    state["_data_files"] = [{"filename": "cache-1ac3891090a432f9.arrow"}]
    path.write_text(json.dumps(state))
    assert found("saved") == ["saved/train/cache-1ac3891090a432f9.arrow"]


@pytest.mark.parametrize("name", ["dataset_dict.json", "train/state.json"])
def test_a_damaged_description_of_a_dataset_is_named(name, saved):
    Path(saved, name).write_text("{}")
    assert name in refusal("saved")


# ------------------------------------------------------------------------- the manifest

@pytest.mark.parametrize("size", [10, 300_000])
def test_a_file_is_told_from_another_one_by_its_name_size_and_ends(size):
    Path("a.txt").write_bytes(bytes(size))
    Path("copy").mkdir()
    Path("copy/a.txt").write_bytes(bytes(size))
    assert describe(Path("a.txt")) == describe(Path("copy/a.txt"))

    described = [json.dumps(describe(Path("a.txt")))]
    for changed in (b"\1" + bytes(size - 1), bytes(size - 1) + b"\1", bytes(size + 1)):
        Path("a.txt").write_bytes(changed)
        described.append(json.dumps(describe(Path("a.txt"))))
    assert len(set(described)) == 4
