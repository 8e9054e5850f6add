"""What fineweb.py takes for a document in each kind of file, and what is no input at all: hidden files,
packages that are not installed."""
import gzip
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import refused, script, train
from hypothesis import example, given
from hypothesis import strategies as st
from test_text import FAST, read

import fineweb
from model import GPT, GPTConfig, load_model
from model import main as export
from runtime.shards import list_shards, open_shard

EOT = "<|endoftext|>"


@pytest.fixture(autouse=True)
def one_encoder(encoder, monkeypatch, tmp_path):
    """Made once for all runs in this process; each test has a folder of its own."""
    monkeypatch.setattr(fineweb, "Encoder", lambda name: encoder)
    monkeypatch.chdir(tmp_path)
    Path("val.txt").write_text("word " * 300)


def prepare(*flags):
    fineweb.main([str(flag) for flag in flags])


def documents(gpt2, *flags, out="out"):
    """What fineweb.py makes of --input: the documents of the training shards."""
    prepare(*flags, "--val_input", "val.txt", "--out", out)
    tokens = np.concatenate([open_shard(path) for path in list_shards(out, "train")])
    starts = [*np.flatnonzero(tokens == 50256), len(tokens)]
    assert starts[0] == 0
    return [gpt2.decode(tokens[a + 1:b].tolist()) for a, b in zip(starts, starts[1:], strict=False)]


def manifest(out="out"):
    return json.loads(Path(out, "manifest.json").read_text())


# ----------------------------------------------------------------------------- .csv

@pytest.mark.parametrize("name, data, said", [
    ("a.csv", b"\nid,body\n1,a\n", "line 2 text body"),
    ("a.csv", b'id,text\n1,a\n2,"b\nc" d\n', "line 3"),
    ("a.csv", b'id,text\n\n1,a\n2,"never closed\n\n', "line 4"),
    ("a.csv", b'id,text\n1,"a\nb"\n2,c,d\n', "line 4"), ("a.csv", b'text\n"a\nb\n\xe9"\n', "line 4"),
    ("a.csv", b"id,text\n1,a\n2\n", "line 3"),
    ("a.jsonl", b'\n{"text": "a"}\n{"body": "b", "id": 1}\n', "line 3 --text_field body id"),
    ("a.jsonl", b'{"text": "a"}\n{"text": {"b": 1}}\n', "line 2"), ("a.jsonl", b'"text"\n', "line 1"),
    ("a.jsonl", b'{"text": "a"}{"text": "b"}\n', "line 1"), ("a.jsonl", b'{"text": "\xe9"}', "line 1"),
    ("a.json", b'[{"text": "a"},\n {"text": "b"}]\n', "line 1 one object a line jq"),
    ("a.json", b' [\n{"text": "a"}\n]\n', "line 1 one object a line jq"),
    ("a.json", b'{"text": "a"}\n["text"]\n', "line 2 one object a line jq"),
    ("a.json", b'{\n  "text": "a"\n}\n', "line 1")])
def test_what_is_refused_in_a_table_or_in_json_names_its_line(name, data, said):
    Path(name).write_bytes(data)
    refused(lambda: prepare("--input", "val.txt", name, "--out", "out"), name, *said.split())
    assert not list(Path("out").glob("[!.]*"))


def test_a_csv_with_line_ends_of_old_macs_is_read_and_those_in_quotes_stay(gpt2):
    Path("a.csv").write_bytes(b'id,text\r1,one\r2,"two\rthree"\r\r3,four')
    assert documents(gpt2, "--input", "a.csv") == ["one", "two\rthree", "four"]


# ----------------------------------------------------------------------------- JSON lines by other names

def test_json_lines_are_read_whatever_their_usual_name(gpt2):
    Path("in").mkdir()
    names = "c.00000-of-01024.json.gz", "b.ndjson", "a.json", "d.ndjson.gz", "e.JSONL"
    for name in names:
        data = "".join(json.dumps({"text": f"{name} {i}", "url": "u"}) + "\n" for i in range(2)).encode()
        Path("in", name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    want = [f"{name} {i}" for name in sorted(names) for i in range(2)]
    assert sorted(documents(gpt2, "--input", "in")) == sorted(want)
    assert documents(gpt2, "--input", *(f"in/{name}" for name in names), out="named") == [
        f"{name} {i}" for name in names for i in range(2)]


# ----------------------------------------------------------------------------- --separator

STORIES = ["One day,\n  a cat.\n\nIt slept.", " Two", "Three \u2028"]


@pytest.mark.parametrize("text", [
    f"\n{EOT}\n".join(STORIES) + "\n", EOT.join(STORIES), f"{EOT}\n".join(["", *STORIES, ""]),
    f"\r\n\r\n{EOT}\r\n\r\n".join([*STORIES, ""]),
    f"\n{EOT}\n \t\n{EOT}{EOT}\n".join(["", *STORIES, "\n\n"])])
def test_documents_of_a_txt_stand_between_separators_and_line_ends_there_are_layout(text, gpt2, capsys):
    for name in ("a.txt", "b.md", "c.txt.gz"):
        data = text.encode()
        Path(name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    Path("d.jsonl").write_text(json.dumps({"text": f"a{EOT}\n"}) + "\n")
    found = documents(gpt2, "--input", "a.txt", "b.md", "c.txt.gz", "d.jsonl", "--separator", EOT)
    assert found == STORIES * 3 + [f"a{EOT}\n"]
    assert manifest()["separator"] == EOT and EOT not in capsys.readouterr().err


def test_another_separator_is_another_text_and_one_without_a_txt_a_mistake():
    Path("a.txt").write_text("one\n==\ntwo\n**\nthree " * 99)
    flags = ["--input", "a.txt", "--out", "out"]
    prepare(*flags, "--separator", "==\n")
    for other in ([], ["--separator", "**"]):
        refused(lambda other=other: prepare(*flags, *other), "out", "separator")
    prepare(*flags, "--separator", "==\n")
    Path("a.jsonl").write_text('{"text": "a"}\n' * 300)
    refused(lambda: prepare("--input", "a.jsonl", "--separator", "==", "--out", "new"), "--separator", ".txt")
    refused(lambda: prepare("--input", "a.txt", "--separator", "", "--out", "new"), "--separator")


def test_a_separator_may_lie_across_any_two_blocks_of_a_large_file(gpt2):
    """A megabyte is read at a time."""
    head = "word " * 209_715                                                    # a character less than it
    for before in range(0, len(EOT) + 1, 3):
        one = head[before:] + "x"
        Path("a.txt").write_text(one + EOT + "two", newline="")
        assert documents(gpt2, "--input", "a.txt", "--separator", EOT, out=f"{before}") == [one, "two"]


@FAST
@given(st.lists(st.sampled_from([EOT, "<|", "|>", "<|endof", "\n", "\r\n", " ", "a", "bc ", "é中", "'s"])),
       st.integers(3, 30), st.sampled_from([EOT, "\n\n", "a", "aba", "bc \n"]))
@example(["a"] * 9 + [EOT] + ["b"], 8, EOT)
@example(["a", "bc ", "\n"] * 9, 4, "bc \n")
@example(["\n"] * 5 + ["a"] + ["\n"] * 5, 3, "\n\n")
def test_wherever_blocks_end_the_documents_between_separators_are_the_same(parts, block, separator):
    text = "".join(parts)
    Path("a.txt").write_bytes(text.encode())
    want = [document.strip("\r\n") for document in text.split(separator) if document.strip()]
    assert read("a.txt", separator=separator, BLOCK=block) == want


def test_endoftext_in_a_text_without_a_separator_is_told_once(gpt2, capsys):
    for name in ("b.txt", "c.txt"):
        Path(name).write_text(f"One.\n{EOT}\nTwo.\n")
    Path("d.jsonl").write_text(json.dumps({"text": EOT}) + "\n")
    assert documents(gpt2, "--input", "d.jsonl", out="none") == [EOT]
    assert EOT not in capsys.readouterr().err
    found = documents(gpt2, "--input", "b.txt", "c.txt", "d.jsonl")
    assert found == [f"One.\n{EOT}\nTwo.\n"] * 2 + [EOT]
    [line] = [line for line in capsys.readouterr().err.splitlines() if EOT in line]
    assert "b.txt" in line and "--separator" in line


def test_a_separator_that_divides_no_file_is_told(gpt2, capsys):
    Path("a.txt").write_text("One.\n\nTwo.\n")
    assert documents(gpt2, "--input", "a.txt", "--separator", r"\n\n") == ["One.\n\nTwo."]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "--separator" in line]
    documents(gpt2, "--input", "a.txt", "--separator", "\n\n", out="two")
    assert "--separator" not in capsys.readouterr().err


# ----------------------------------------------------------------------------- hidden files

def test_hidden_files_are_no_input(gpt2):
    Path("in/.git").mkdir(parents=True)
    Path("in/a.txt").write_text("seen")
    for name in ("in/._a.txt", "in/.hidden.jsonl", "in/.git/x.txt"):
        Path(name).write_bytes(b"\0\5\x16\7" * 20)
    for i, pattern in enumerate(("in", "in/*", "in/**", "*/*.txt")):
        assert documents(gpt2, "--input", pattern, out=f"out{i}") == ["seen"]
    Path("in/a.txt").unlink()
    refused(lambda: prepare("--input", "in", "--out", "new"), "in")


def test_hidden_files_beside_shards_are_none(tmp_path, capsys):
    flags = ["--input", "val.txt", "--out", "out"]
    prepare(*flags)
    names = sorted(path.name for path in Path("out").iterdir() if path.name[0] != ".")
    for name in names + ["._text_train_000002.npy", "._x_val_000000.bin"]:
        Path("out", f"._{name.removeprefix('._')}").write_bytes(b"\0\5\x16\7" * 20)
    capsys.readouterr()
    prepare(*flags)                                                             # it is complete
    prepare("--verify", "out")
    assert "._" not in capsys.readouterr().out
    train(*"--data out --out log --n_layer 1 --n_head 1 --n_embd 4 --block_size 8 --total_batch_size 16 "
          "--max_steps 1 --device cpu --sample_every 0 --hellaswag_every 0 --val_tokens 8".split())
    for name in names:
        Path("out", name).unlink()
    for split in ("train", "val"):
        refused(lambda split=split: list_shards("out", split), "out")
    prepare(*flags)                                                             # as in an empty folder
    assert names == sorted(path.name for path in Path("out").iterdir() if path.name[0] != ".")


def test_hidden_files_do_not_keep_an_export_from_its_folder_and_stay_there():
    GPT(GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4)).save_pretrained("one")
    Path("two").mkdir()
    for folder in ("one", "two"):
        Path(folder, ".DS_Store").write_text("Finder's")
    for source, folder in (("one", "two"), ("two", "one")):
        export(["export", source, folder])
        assert Path(folder, ".DS_Store").read_text() == "Finder's" and load_model(folder)


# ----------------------------------------------------------------------------- packages that are not there

@pytest.mark.parametrize("package, module, call", [
    ("huggingface_hub", "", partial(load_model, "gpt2")),
    ("safetensors", ".torch", partial(load_model, "exported")),
    ("safetensors", ".torch", partial(export, ["export", "exported/a.pt", "new"]))])
def test_a_package_that_is_not_installed_is_named_with_its_installation(package, module, call, monkeypatch):
    from peers import make_model, own_checkpoint, save
    model = make_model(vocab_size=50257, n_layer=1, n_head=1, n_embd=4)
    model.save_pretrained("exported")
    save("exported/a.pt", own_checkpoint(model))
    monkeypatch.setitem(sys.modules, package + module, None)
    assert refused(call).endswith(f": pip install {package}")
    assert not Path("out").exists()


def test_plain_text_needs_no_optional_package(gpt2, monkeypatch):
    for name in ("pyarrow", "datasets", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    assert documents(gpt2, "--input", "a.jsonl") == ["a"]


def test_a_folder_that_hides_a_name_of_the_hub_is_told():
    Path("gpt2/drafts").mkdir(parents=True)
    for read_it in (load_model, GPT.from_pretrained):
        refused(lambda read_it=read_it: read_it("gpt2"), Path("gpt2").absolute(), "openai-community/gpt2")
    refused(lambda: load_model("gpt2/weights"), "gpt2/weights", Path("gpt2").absolute())
    assert "hub" not in refused(lambda: load_model("gpt2/drafts"), "gpt2/drafts")
    refused(lambda: script("model.py", "export", "gpt2", "new"), "model.py: ", "openai-community/gpt2")
