"""fineweb.py --input as a new user tries it: mixed folders, other encodings, the validation tokens."""
import gzip
import json
import shlex
import subprocess
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fineweb import (FAST, ROOT, command, contents, gpt2, mask_of, prepare, read_shards, texts_of,  # noqa: F401
                          write_text)

import corpus.shard_writer
import runtime.shards
from corpus.readers import charset_of, read_csv
from corpus.shard_writer import draw_validation
from corpus.sources import LocalSource
from runtime.cli import RunError, UserError
from runtime.tokenizer import encode

# -----------------------------------------------------------------------------
# what a folder may hold

def test_a_folder_is_read_as_far_as_it_can_be_and_one_line_counts_the_rest(tmp_path):
    folder = tmp_path / "docs"
    (folder / "more" / "deep").mkdir(parents=True)
    for name, text in {"UPPER.TXT": b"upper", "b.text": b"plain", "notes.md": b"notes"}.items():
        (folder / name).write_bytes(text)
    (folder / "z.Txt.GZ").write_bytes(gzip.compress(b"packed"))
    (folder / "rows.csv").write_text('id,text\n1,"a, ""quoted""\nline"\n2,second\n')
    (folder / "rows.tsv").write_text("text\tid\nwith, comma\t1\n")
    for name in ("picture.png", "book.pdf", "LICENSE"):
        (folder / name).write_bytes(b"\x00\xff" * 100)
    (folder / "more" / "c.md").write_text("inner")
    (folder / "more" / "deep" / "d.txt").write_text("innermost")
    source = LocalSource([str(folder)])
    want = ["upper", "plain", "notes", 'a, "quoted"\nline', "second", "with, comma", "packed"]
    assert texts_of(source) == want
    note, = source.notes
    assert note.startswith(f"--input {folder}: skipped 3 of 9 files (.pdf, .png, LICENSE; text is in .txt, ")
    assert note.endswith(f".parquet files) and the folders in it, which --input '{folder}/**' would read too")
    result = command("--input", folder, "--out", "out", cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.startswith(note) and result.stderr == "", result
    deep = LocalSource([f"{folder}/**"])
    assert sorted(texts_of(deep)) == sorted([*want, "inner", "innermost"])
    assert "folders" not in deep.notes[0] and "3 of 11 files" in deep.notes[0]


def test_a_file_of_another_kind_is_refused_where_it_is_named_and_where_there_is_no_other(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "b.md").write_text("text")
    for inputs in (["a.pdf"], ["b.md", "a.pdf"]):
        result = command("--input", *inputs, "--out", "out", cwd=tmp_path)
        assert result.returncode == 2 and "a.pdf: nothing to read, only 1 of 1" in result.stderr, result
    (tmp_path / "b.md").unlink()
    result = command("--input", ".", "--out", "out", cwd=tmp_path)
    assert result.returncode == 2 and "nothing to read, only 1 of 1 files" in result.stderr, result
    assert {path.name for path in tmp_path.iterdir()} == {"a.pdf"}


@pytest.mark.parametrize("text, said", [
    ("id,body\n1,x\n", "no column text, only id, body: name the right one with --text_field"),
    ("id,text\n1,x\n2\n", "the row in line 3 has 1 cells, and the first row 2"),
    ("id,text\n1,Hello, world\n", "the row in line 2 has 3 cells"),
    ('id,text\n1,"never closed\n', "unexpected end of data"),
])
def test_a_csv_that_is_not_as_it_should_be_is_a_users_mistake(text, said, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        texts_of(LocalSource([str(tmp_path / "a.csv")]))


def test_the_rows_of_a_csv_are_shared_by_parts_and_text_field_names_their_column(tmp_path):
    rows = [f"row {i} " + "word " * (i % 9) for i in range(100)]
    (tmp_path / "a.csv").write_bytes("\r\n\r\n".join(["\ufeffbody", *rows]).encode())
    shares = [[*read_csv(tmp_path / "a.csv", 200, lambda task, i=i: task % 2 == i, "body")]
              for i in range(2)]
    assert sorted(sum(shares, [])) == sorted(rows) and all(len(share) > 30 for share in shares)
    assert texts_of(LocalSource([str(tmp_path / "a.csv")], "body"), 37) == rows[37:]


# -----------------------------------------------------------------------------
# encodings

TEXT = "Grüße – “smart” quotes, naïve café\n" * 30


@pytest.mark.parametrize("codec, name", [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"),
                                         ("utf-16-be", "UTF-16BE"), ("cp1252", "WINDOWS-1252"),
                                         ("latin-1", "LATIN1")])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_another_encoding_is_named_with_the_command_that_mends_it(codec, name, suffix, tmp_path):
    text = TEXT if codec != "latin-1" else TEXT.replace("–", "-").replace("“", '"').replace("”", '"')
    lines = text if suffix == ".txt" else "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n"
                                                  for text in [text] * 3)
    (tmp_path / f"my text{suffix}").write_bytes(lines.encode(codec))
    result = command("--input", f"my text{suffix}", "--out", "out", cwd=tmp_path)
    assert result.returncode == 2 and f"is not UTF-8 but, it seems, {name}: " in result.stderr, result
    iconv = result.stderr.split("`")[1]
    assert iconv == f"iconv -f {name} -t UTF-8 'my text{suffix}' > 'my text.utf8{suffix}'"
    subprocess.run(iconv, shell=True, cwd=tmp_path, check=True)
    assert texts_of(LocalSource([str(tmp_path / f"my text.utf8{suffix}")]))[0][:100] == text[:100]


@pytest.mark.parametrize("data", ["naïve café, ".encode() * 50 + b"\xff" + "déjà vu".encode() * 50,
                                  "привет, мир ".encode("cp1251") * 50, "语言模型".encode("gbk") * 50])
def test_no_command_is_given_for_damaged_utf8_and_for_scripts_that_cannot_be_told(data, tmp_path):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match="a.txt is not UTF-8, or damaged: repair it.*iconv -f ITS_ENC"):
        LocalSource([str(tmp_path / "a.txt")])


def test_other_encodings_are_found_beyond_the_beginning_and_in_packed_files(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"word " * 10**5 + "naïve".encode("latin-1")))
    with pytest.raises(UserError, match="a.txt.gz is not UTF-8 but, it seems, LATIN1: unpack it"):
        texts_of(LocalSource([str(tmp_path / "a.txt.gz")]))
    assert charset_of("plain".encode("utf-16")) == "UTF-16"


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".txt.gz"])
def test_a_byte_order_mark_is_no_token_and_the_manifest_says_so(suffix, tmp_path):
    text = {".jsonl": json.dumps({"text": "words"}), ".csv": "text\nwords\n"}.get(suffix, "words")
    for codec, mark in (("utf-8-sig", "left out"), ("utf-8", None)):
        path, data = tmp_path / f"{codec}{suffix}", text.encode(codec)
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        source = LocalSource([str(path)])
        assert texts_of(source) == ["words"]
        assert source.description["files"][0].get("byte_order_mark") == mark


def test_windows_line_ends_stay_and_are_said(tmp_path):
    for name, end in (("a.txt", "\n"), ("b.txt", "\r\n"), ("c.md", "\r\n")):
        (tmp_path / name).write_bytes(f"one{end}two{end}".encode())
    source = LocalSource([str(tmp_path)])
    assert "".join(texts_of(source)) == "one\ntwo\n" + "one\r\ntwo\r\n" * 2
    note, = source.notes
    assert note.startswith(f"--input: 2 of 3 files, first {tmp_path}/b.txt, ") and "dos2unix" in note


# -----------------------------------------------------------------------------
# the validation tokens

def stream_of(lengths):
    """Documents of so many tokens; each token says which it is."""
    tokens = np.concatenate([np.full(n, i + 1, dtype=np.uint16) for i, n in enumerate(lengths)])
    tokens[np.cumsum([0, *lengths[:-1]])] = 50256
    return tokens


def test_the_validation_tokens_of_three_long_documents_are_a_piece_of_each_by_its_length():
    tokens = stream_of([10_000, 20_000, 5_000])
    chosen = mask_of(tokens, 3_500, 1337)
    assert Counter(tokens[chosen].tolist()) == {1: 1000, 2: 2000, 3: 500}
    assert np.count_nonzero(np.diff(chosen.astype(int)) == 1) == 3        # in one piece each
    other = mask_of(tokens, 3_500, 1338)
    assert (chosen != other).any() and (chosen == mask_of(tokens, 3_500, 1337)).all()


@pytest.mark.parametrize("lengths, count, least", [
    ([40 + i % 30 for i in range(2000)], 10_000, 40), ([100] * 100, 1000, 100), ([1000] * 150, 15_000, 1000)])
def test_the_validation_tokens_of_many_documents_are_whole_ones_from_all_over_the_text(lengths, count, least):
    tokens = stream_of(lengths)
    chosen = mask_of(tokens, count, 1337)
    inside = np.split(chosen, np.flatnonzero(tokens == 50256)[1:])
    cut = sum(part.any() and not part.all() for part in inside)
    assert sum(part.all() for part in inside) >= count // max(lengths) and cut <= 1 and chosen.sum() == count
    assert min(int(part.sum()) for part in np.array_split(chosen, 4)) > count // 20


@pytest.mark.parametrize("lengths, count", [([2000] * 1000, 10_000), ([100_000] * 1000, 20_000),
                                            ([1000] * 10, 1000), ([500_000, 3000], 50_000)])
def test_no_validation_piece_is_a_scrap(lengths, count):
    starts = np.cumsum([0, *lengths[:-1]])
    sizes = np.diff(draw_validation(starts, sum(lengths), count, 1337), axis=1)[:, 0]
    assert sorted(sizes)[1 if len(sizes) > 2 else 0] >= 256 and sizes.sum() == count and len(sizes) > 1


@FAST
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.floats(0.001, 0.999), st.integers(0, 2**63))
def test_exactly_as_many_tokens_as_asked_for_are_drawn_and_training_has_the_rest(lengths, share, seed):
    tokens = stream_of(lengths)
    count = int(share * len(tokens))
    chosen = mask_of(tokens, count, seed)
    assert chosen.sum() == count


def test_the_drawn_tokens_are_the_same_in_every_release():
    chosen = mask_of(stream_of([50, 3000, 20, 30, 10, 25, 40, 35]), 400, 1337)
    assert np.flatnonzero(np.diff(chosen.astype(int))).tolist() == FIXED


FIXED = [49, 367, 687, 3069, 3099]


def test_a_text_in_two_languages_is_validated_in_both(gpt2, tmp_path):  # noqa: F811
    (tmp_path / "a.txt").write_text("我们的语言模型学习中文。\n" * 300)
    (tmp_path / "b.txt").write_text("Der schnelle braune Fuchs springt über den faulen Hund.\n" * 300)
    (tmp_path / "c.md").write_text("🙂🚀 fun " * 500)
    prepare("--input", tmp_path, "--out", tmp_path / "out", "--shard_size", 10**6)
    val, train = read_shards(tmp_path / "out")
    text = gpt2.decode(val)
    assert text.count("我们的") > 10 and text.count("Fuchs") > 10 and text.count("🚀") > 10
    assert gpt2.decode(train[:40]).startswith("<|endoftext|>我们的语言")
    assert 0.05 < len(val) / len(train) < 0.2


def test_part_0_draws_from_its_share_and_the_others_go_on_with_folders_of_earlier_versions(tmp_path):
    files = [write_text(tmp_path / f"{i}.jsonl", [f"{i} {j} " + "word " * 20 for j in range(60)])
             for i in range(2)]
    flags = ["--input", *files, "--out", tmp_path / "out", "--val_tokens", 200, "--shard_size", 700]
    for i in range(2):
        prepare(*flags, "--part", f"{i}/2")
    manifests = [json.loads((tmp_path / f"out/manifest_p{i}of2.json").read_text()) for i in range(2)]
    assert manifests[0]["val_seed"] == 1337 and "val_seed" not in manifests[1]
    val, *_ = read_shards(tmp_path / "out")
    lines = [encode(f"0 {j} " + "word " * 20).tolist() for j in range(60)]
    text = [token for line in lines for token in (50256, *line)]
    assert len(val) == 200 and val != text[:200] and {*val} <= {*text}
    del manifests[0]["val_seed"]                  # as an earlier version wrote it
    (tmp_path / "out/manifest_p0of2.json").write_text(json.dumps(manifests[0]))
    for i in range(2):
        prepare(*flags, "--part", f"{i}/2")


def test_the_folder_of_the_example_is_still_shakespeare(tmp_path):
    result = command("--input", ROOT / "input.txt", "--out", "data/x", cwd=tmp_path)
    assert result.returncode == 0, result
    val, train = read_shards(tmp_path / "data/x")
    assert len(val) == 26_568 and len(train) == 313_494
    assert shlex.split(result.stdout.splitlines()[-1])[:3] == ["next:", "python", "train_gpt2.py"]


@pytest.mark.parametrize("files", [1, 2])
def test_ctrl_c_between_a_shard_and_its_manifest_does_not_bar_the_same_command(files, tmp_path, monkeypatch):
    flags = ["--input", write_text(tmp_path / "a.jsonl", ["word " * 50] * 40), "--out"]
    prepare(*flags, tmp_path / "whole")
    written, replace_file = [], runtime.shards.replace_file

    def stopped(path, write):
        replace_file(path, write)
        written.append(path)
        if len(written) == files:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runtime.shards, "replace_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(*flags, tmp_path / "out")
    prepare(*flags, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shards_that_no_manifest_lists_bind_the_folder_to_their_settings(tmp_path, monkeypatch):
    """Else they would stay, and the tokens of the one validation be in the other's training."""
    flags = ["--input", write_text(tmp_path / "a.jsonl", ["word " * 50] * 40), "--out", tmp_path / "out"]

    def full(path, *parts):
        if "train" in str(path):
            raise RunError("the disk is full")
        return write_shard(path, *parts)

    write_shard = runtime.shards.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(corpus.shard_writer, "write_shard", full)
        with pytest.raises(RunError):
            prepare(*flags)
    for others in (["--format", "bin"], ["--val_tokens", 40]):
        with pytest.raises(UserError, match="was begun with another"):
            prepare(*flags, *others)
    prepare(*flags)
    assert len(read_shards(tmp_path / "out")) == 2


def test_by_default_validation_has_no_more_than_a_tenth_however_much_else_the_files_hold(tmp_path):
    rows = [json.dumps({"text": f"some words {i} " * 20, "more": "x" * 4000}) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    val, train = read_shards(tmp_path / "out")
    assert len(val) == (len(val) + len(train)) // 10
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "asked", "--val_tokens", 3000)
    assert len(read_shards(tmp_path / "asked")[0]) == 3000
