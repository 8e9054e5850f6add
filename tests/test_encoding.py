"""Text -> tokens, as tiktoken has them, and one corpus by several commands (--part)."""
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pyarrow.parquet
import pytest
from helpers import HANG, run, wait_until
from hypothesis import given
from hypothesis import strategies as st
from test_fineweb import (ENV, FAST, ROOT, command, contents, cursors_of, gpt2, hub, pieces_of, plain_shards,  # noqa: F401
                          prepare, small_batches, texts_of, write_parquet, write_text)

import corpus.encoding
import corpus.sources
from corpus.encoding import ahead, encode_stream, rows_of
from corpus.shard_writer import share
from corpus.hub_source import HubSource
from corpus.readers import read_parquet, read_row_group
from corpus.sources import LocalSource, Piece
from runtime.cli import RunError, UserError
from runtime.shards import list_shards, open_shard
from runtime.tokenizer import encode, tokenizer

needs_gigatoken = pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="no gigatoken")
LINES = [f"line {i} " + "word " * (i % 17) for i in range(200)]


# -----------------------------------------------------------------------------
# sources

@pytest.fixture
def mixed(tmp_path):
    """Files of every format, their documents in order, and the same with each piece of the .txt for one."""
    write_parquet(tmp_path / "1.parquet", LINES[:90], row_group_size=40)
    write_parquet(tmp_path / "2.parquet", LINES[90:110])
    (tmp_path / "3.txt").write_text("\n".join(LINES[:50]))
    lines = [json.dumps({"text": text}) for text in LINES[110:150]]
    (tmp_path / "4.jsonl").write_bytes("\n \u3000\n\r\n".join(lines).encode())     # and no line end
    (tmp_path / "5.jsonl").write_bytes(b"\n\n")
    write_text(tmp_path / "6.jsonl.gz", LINES[150:170])
    write_text(tmp_path / "7.jsonl.zst", LINES[170:])
    files = sorted(map(str, tmp_path.iterdir()))
    documents = [*LINES[:110], "\n".join(LINES[:50]), *LINES[110:]]
    pieces = pieces_of(tmp_path / "3.txt")
    assert len(pieces) == 2 and "".join(pieces) == documents[110]
    return files, documents, [*LINES[:110], *pieces, *LINES[110:]]


BEGINS = [[0, 0], [90, 1], [110, 2], [112, 3], [152, 5], [172, 6]]    # of these files, but the empty one


def test_every_document_comes_once_and_in_order_from_any_number_on(mixed):
    files, _, documents = mixed
    assert texts_of(LocalSource(files)) == documents
    for start in (*range(0, len(documents), 7), 40, 90, 110, 111):
        assert texts_of(LocalSource(files), start) == documents[start:]
    cursors = cursors_of(LocalSource(files))
    assert cursors == BEGINS
    for number, file in cursors:
        for start in (number, number + 2):
            assert texts_of(LocalSource(files), start, [number, file]) == documents[start:]


@pytest.mark.parametrize("rows_per_group", [7, 40, 100])
@pytest.mark.parametrize("size", [1, 300, 1 << 22])
def test_the_tasks_of_a_parquet_file_are_rows_and_each_is_read_by_whom_it_belongs_to(size, rows_per_group,
                                                                                     tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, LINES, row_group_size=rows_per_group)
    seen = []
    assert read_all(path, size, lambda task: seen.append(task) or True) == LINES
    assert seen == list(range(len(seen)))
    assert len(seen) == 200 if size == 1 else len(seen) >= 200 // rows_per_group
    shares = [read_all(path, size, lambda task, i=i: task % 3 == i) for i in range(3)]
    assert sorted(sum(shares, [])) == sorted(LINES)
    assert all(len(share) > 20 for share in shares) or size == 1 << 22 and rows_per_group == 100


def read_all(path, size, mine):
    return [str(text, "utf-8") for text in read_parquet(path, size, mine, "text")]


def test_a_row_group_with_fewer_rows_than_the_file_states_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", LINES)
    file = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet")

    class Fewer:
        metadata = file.metadata

        @staticmethod
        def iter_batches(**kwargs):
            return list(file.iter_batches(**kwargs))[:-1]

    with pytest.raises(ValueError, match="its row group 0 has 192 rows, not 200"):
        list(read_row_group(Fewer, 0, "text"))


def test_rows_with_more_text_than_the_file_states_come_in_pieces(gpt2, tmp_path, monkeypatch):  # noqa: F811
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1] * 100, pyarrow.int32()),
                                               pyarrow.array(["long " * 1000, "longer " * 2000]))
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    monkeypatch.setattr(corpus.encoding, "BATCH", 50_000)
    documents = ["long " * 1000, "longer " * 2000] * 100
    found = list(encode_stream(LocalSource([str(tmp_path / "a.parquet")]).read(), 2))
    assert len(found) > 10 and [batch.cursors for batch in found] == [[(0, 0)]] + [[]] * (len(found) - 1)
    assert max(len(batch.tokens) for batch in found) < 80_000
    want = plain_shards(gpt2, documents, 10**9)[0]
    assert np.concatenate([batch.tokens for batch in found]).tolist() == want


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view(),
                                  pyarrow.dictionary(pyarrow.int32(), pyarrow.string())], ids=str)
def test_every_kind_of_string_column_is_read(kind, tmp_path):
    texts = ["", "é", "word " * 40, ""] * 20
    table = pyarrow.table({"text": pyarrow.array(texts).dictionary_encode() if "dict" in str(kind) else
                           pyarrow.array(texts, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    assert texts_of(LocalSource([str(tmp_path / "a.parquet")]), 3) == texts[3:]


@pytest.mark.parametrize("column", [pyarrow.array(["a", None]), pyarrow.array([b"a", b"b"]),
                                    pyarrow.array([1, 2])])
def test_rows_that_are_no_text_are_a_users_mistake(column, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="holds something that is not a string"):
        texts_of(LocalSource([str(tmp_path / "a.parquet")]))


def test_bytes_in_a_string_column_that_are_no_utf8_are_a_users_mistake(tmp_path):
    column = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(np.array(
        [0, 2], np.int32)), pyarrow.py_buffer(b"\xe9a")])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet cannot be read .*UTF-?8"):
        texts_of(LocalSource([str(tmp_path / "a.parquet")]))


# -----------------------------------------------------------------------------
# gigatoken's tokens are tiktoken's

def stream_of(texts):
    """Their tokens and the batches, as fineweb.py makes them."""
    found = list(encode_stream(map(Piece, texts), 2))
    return np.concatenate([batch.tokens for batch in found]), found


def assert_equal(gpt2, texts):  # noqa: F811
    want = plain_shards(gpt2, texts, 10**9)[0]
    tokens, found = stream_of(texts)
    assert tokens.dtype == np.uint16 and tokens.tolist() == want
    assert sum(n for batch in found for n in batch.lengths) == len(want)


def test_every_code_point_has_tiktokens_tokens_before_a_contraction_and_beside_letters(gpt2):  # noqa: F811
    """Of the planes that Unicode uses; 64 a document, so that new letters do not take others along."""
    codes = [chr(c) for c in (*range(0xd800), *range(0xe000, 0x34000), *range(0xe0000, 0xe0200))]
    assert_equal(gpt2, ["".join(f"{c}'s{c} 1{c}{c}" for c in codes[i:i + 64])
                        for i in range(0, len(codes), 64)])


def test_only_letters_that_are_new_in_unicode_17_and_literal_endoftext_go_to_tiktoken():
    import unicodedata
    new = sum(table.sum() for table in corpus.encoding.new_letters().values())
    assert new == 86 + 4, "values of the second and third byte"
    for text in ("\u088f", "\U00010940's", "x\U00033479", "a<|endoftext|>"):
        assert list(rows_of(["a", text, "é🙂 中文 हिन्दी"])) == [b"<|endoftext|>a", text,
                                                         "<|endoftext|>é🙂 中文 हिन्दी".encode()]
    assert all(unicodedata.category(c) == "Cn" for c in "\u088f\ua7d2\U00010940\U00033479"), (
        "this Python knows Unicode 17: does tiktoken?")


PIECES = st.sampled_from([*"aZ09 \n\r\t'é中🙂²½\u0301\u200b\u200d\ufeff\x00\x1c\x85\u088f\ud800", "'s",
                          "'ll", "'RE", "  ", "<|endoftext|>", "<|endof", "\U00033479", "it's", " word"])


@FAST
@given(st.lists(st.lists(PIECES | st.characters(), max_size=12).map("".join), max_size=8))
def test_any_documents_have_tiktokens_tokens(gpt2, texts):  # noqa: F811
    want = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    assert stream_of(["", *texts])[0].tolist() == plain_shards(gpt2, ["", *want], 10**9)[0]


@pytest.mark.parametrize("unit", [" ", "\n", "a", "é", "'", "1", "ab ", "\u0301", "🙂"])
def test_long_runs_have_tiktokens_tokens(unit, gpt2):  # noqa: F811
    assert_equal(gpt2, [unit * 30_000, "b" + unit * 3001 + "c", ""])


def test_rows_of_any_length_keep_their_documents(gpt2, monkeypatch):  # noqa: F811
    monkeypatch.setattr(corpus.encoding, "BATCH", 100)              # some documents are longer
    assert_equal(gpt2, [*LINES, "x " * 500, "", "\u088f's", *LINES])


@needs_gigatoken
def test_a_document_with_other_tokens_than_tiktokens_ends_the_run_with_one_line(tmp_path, monkeypatch):
    write_text(tmp_path / "a.jsonl", LINES)
    run = corpus.encoding.gigatoken(2)

    def wrong(row):                               # the tokens of the last document but one
        tokens = run(row)
        return tokens * np.where(np.arange(len(tokens)) == len(tokens) - 60, 0, 1)

    monkeypatch.setattr(corpus.encoding, "gigatoken", lambda threads: run and wrong)
    with pytest.raises(RunError, match="gigatoken's tokens are not tiktoken's .* 'line 19[0-9] w"):
        prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_gigatoken
def test_the_first_documents_and_a_thousandth_of_the_text_are_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(corpus.encoding, "encode", lambda text: compared.append(len(text)) or encode(text))
    monkeypatch.setattr(corpus.encoding, "COMPARED_FIRST", 2000)
    stream_of([*(["word " * 40] * 20), *(["word " * 200] * 3000)])
    assert sorted(compared)[:10] == [200] * 10 and 5000 < sum(compared) < 9000


def test_without_gigatoken_tiktoken_does_the_work_and_a_line_says_so(mixed, tmp_path, monkeypatch, capsys):
    files, *_ = mixed
    flags = ["--shard_size", 500, "--val_tokens", 300, "--out"]
    prepare("--input", *files, *flags, tmp_path / "with")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    corpus.encoding.gigatoken.cache_clear()
    try:
        prepare("--input", *files, *flags, tmp_path / "without")
    finally:
        corpus.encoding.gigatoken.cache_clear()
    assert "tiktoken does the work, slowly: gigatoken is not installed" in capsys.readouterr().out
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


@needs_gigatoken
def test_white_space_too_long_for_tiktoken_and_a_lone_surrogate_are_encoded(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\ud800" + " " * 1_500_000 + "a"}))
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    tokens, _ = stream_of(["\ud800" + " " * 1_500_000 + "a"])
    assert tokenizer().decode(tokens[1:].tolist()) == "\ufffd" + " " * 1_500_000 + "a"
    assert counted(tmp_path / "out") == Counter(tokens.tolist())


# -----------------------------------------------------------------------------
# threads

def test_items_made_ahead_come_in_order_and_their_error_in_its_place():
    made, closed = [], []

    def items():
        try:
            for i in range(5):
                made.append(i)
                yield i
            raise UserError("the sixth")
        finally:
            closed.append(threading.current_thread().name)

    found = ahead(items(), 2)
    assert next(found) == 0
    wait_until(lambda: len(made) >= 2)
    assert len(made) <= 3, "one was taken, and at most two are ahead"
    with pytest.raises(UserError, match="the sixth"):
        for i, item in enumerate(found, 1):
            assert item == i
    assert made == [0, 1, 2, 3, 4]
    assert closed == ["ahead"]
    found = ahead(items(), 2)
    assert next(found) == 0
    found.close()
    assert closed == ["ahead"] * 2, "a consumer that stops leaves no thread behind"


# The command, whose reader waits for a file `go`, as for a network, at the text STOP.
WAITS = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's `&` has it ignored
sys.path.insert(0, {str(ROOT)!r})
import fineweb
from corpus import encoding, sources
from runtime import cli
encoding.BATCH, read = 100, sources.LocalSource.read

def held(source, *args):
    for piece in read(source, *args):
        while piece.text == "STOP":
            time.sleep(0.01)
        yield piece

sources.LocalSource.read = held
cli.run_command(fineweb.main)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_while_its_reader_waits_and_it_goes_on_later(number, code, tmp_path):
    files = [str(write_text(tmp_path / f"{i}.jsonl", LINES[:150] + ["STOP"] * i)) for i in range(2)]
    out = tmp_path / "out"
    flags = ["--input", *files, "--out", str(out), "--shard_size", "300", "--val_tokens", "100"]
    with subprocess.Popen([sys.executable, "-c", WAITS, *flags], env=ENV, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: len(list(out.glob("*.npy"))) > 3, lambda: process.poll() is None)
            process.send_signal(number)
            said = process.communicate(timeout=HANG)
        finally:
            process.kill()
    line = b"-c: stopped by Ctrl-C\n" * (number == signal.SIGINT)
    assert process.returncode == code and said[1] == line, said
    prepare(*flags)
    prepare(*flags[:-5], tmp_path / "whole", *flags[-4:])
    assert contents(out) == contents(tmp_path / "whole")


# -----------------------------------------------------------------------------
# --part

def counted(folder):
    """How often a folder holds each token, <|endoftext|> before each document included."""
    return sum((Counter(open_shard(path).tolist()) for path in folder.glob("*.npy")), Counter())


def counted_in(documents, gpt2):  # noqa: F811
    return Counter(plain_shards(gpt2, documents, 2**30)[0])


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(corpus.sources, "TASK", 200)


@pytest.mark.parametrize("parts", [1, 2, 3, 12])
def test_the_parts_have_every_document_once(parts, mixed, gpt2, tmp_path, small_parts, capsys):  # noqa: F811
    files, documents, _ = mixed
    for i in range(parts):
        prepare("--input", *files, "--out", tmp_path / "out", "--part", f"{i}/{parts}", "--shard_size", 200,
                "--val_tokens", 30)
        said = capsys.readouterr().out.splitlines()
        assert f"of part {i}/{parts} complete" in said[-2]
        assert said[-1].startswith(f"{i + 1} of {parts} parts are complete" if i < parts - 1 else
                                   "next: python train_gpt2.py")
    val, train = (list_shards(tmp_path / "out", split) for split in ("val", "train"))
    tokens = sum(len(open_shard(path)) for path in train)
    assert f"30 tokens for validation and {tokens:,} for training" in said[-2]
    wide = len(str(parts - 1))
    assert [path.name for path in val] == [f"text_p{0:0{wide}}of{parts}_val_000000.npy"]
    assert train[0].name == f"text_p{0:0{wide}}of{parts}_train_000001.npy"
    assert {path.name[6:6 + wide] for path in train} <= {f"{i:0{wide}}" for i in range(parts)}
    assert counted(tmp_path / "out") == counted_in(documents, gpt2)
    want = contents(tmp_path / "out")
    for i in range(parts):                        # again: all is there
        prepare("--input", *files, "--out", tmp_path / "out", "--part", f"{i}/{parts}", "--shard_size", 200,
                "--val_tokens", 30)
    assert contents(tmp_path / "out") == want


# The command, which waits once there are so many shards of its own.
NO_FURTHER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import fineweb
from corpus import shard_writer, sources
from runtime import cli, shards
sources.TASK = 2000
del sys.argv[0]
most, name, replace_file = int(sys.argv[0]), "_p" + sys.argv[-1].replace("/", "of") + "_", shards.replace_file

def held(path, write):
    while len([p for p in path.parent.glob("*.npy") if name in p.name]) >= most:
        time.sleep(0.01)
    replace_file(path, write)

shard_writer.replace_file = shards.replace_file = held
cli.run_command(fineweb.main)
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_three_parts_at_once_one_of_them_killed_and_run_again(mixed, gpt2, tmp_path):  # noqa: F811
    files, documents, _ = mixed
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    more = [text[i:i + 3000] for i in range(0, 600_000, 3000)]
    files.append(str(write_text(tmp_path / "8.jsonl", more)))

    def part(i, out, most=10**6):
        flags = [*files, "--out", tmp_path / out, "--shard_size", 4000, "--val_tokens", 1000,
                 "--max_tokens", 10**7, "--workers", 2, "--part", f"{i}/3"]
        return subprocess.Popen([sys.executable, "-c", NO_FURTHER, str(most), "--input", *map(str, flags)],
                                env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(process):
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0 and err == "", (out, err)
        return out.splitlines()

    out = tmp_path / "out"
    processes = [part(0, "out"), part(1, "out", most=5), part(2, "out")]
    try:
        wait_until(lambda: len(list(out.glob("*_p1of3_*.npy"))) == 5, lambda: processes[1].poll() is None)
        last = [end(processes[i])[-1] for i in (0, 2)]
    finally:
        for process in processes:
            process.kill()
    processes[1].communicate()
    assert sorted(line[:8] for line in last) in (["1 of 3 p", "2 of 3 p"], ["2 of 3 p"] * 2)
    said = end(part(1, "out"))                    # the fifth was not in the manifest yet
    assert "4 shards" in said[0] and "all 3 parts complete" in said[-2] and said[-1].startswith("next: ")
    assert counted(out) == counted_in([*documents, *more], gpt2)
    for i in range(3):
        end(part(i, "whole"))
    assert contents(out) == contents(tmp_path / "whole")


def test_max_tokens_is_shared_out_among_the_parts(gpt2, tmp_path, small_parts):  # noqa: F811
    assert [share(11, (i, 3)) for i in range(3)] == [4, 4, 3]
    write_text(tmp_path / "a.jsonl", LINES)
    for i in range(3):
        prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--part", f"{i}/3",
                "--max_tokens", 302, "--val_tokens", 20)
    shards = {path.name: len(open_shard(path)) for path in (tmp_path / "out").glob("*.npy")}
    assert shards == {"text_p0of3_val_000000.npy": 20, "text_p0of3_train_000001.npy": 81,
                      "text_p1of3_train_000001.npy": 101, "text_p2of3_train_000001.npy": 100}


def test_parts_of_another_corpus_or_with_other_settings_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.jsonl", LINES)
    write_text(tmp_path / "b.jsonl", LINES[:150])
    flags = ["--input", "a.jsonl", "--out", "out", "--val_tokens", 100]
    prepare(*flags, "--part", "0/2")
    found = json.loads((tmp_path / "out/manifest_p0of2.json").read_text())
    other = tmp_path / "out/manifest_p1of2.json"              # of a command killed before its first shard
    other.write_text(json.dumps(found | {"part": 1, "shards": [], "tokens": 0, "complete": False}))
    want = contents(tmp_path / "out")
    for other, words in (
            ([*flags, "--part", "1/2", "--shard_size", 999],
             "out was begun with another shard_size (100000000 instead of 999)"),
            (["--input", "b.jsonl", *flags[2:], "--part", "1/2"],
             "another source (files: b.jsonl: name: a.jsonl instead of b.jsonl)"),
            ([*flags, "--part", "1/2", "--max_tokens", 900], "another max_tokens (none instead of 900)"),
            ([*flags, "--part", "0/2", "--format", "bin"], "out was begun with another format"),
            ([*flags, "--part", "1/3"], "was begun with another number of parts (2 instead of 3)"),
            (flags, "out holds parts (--part) of manifest_p0of2.json: choose another --out")):
        with pytest.raises(UserError, match=re.escape(words)):
            prepare(*other)
        assert contents(tmp_path / "out") == want
    prepare(*flags[:3], "whole")
    with pytest.raises(UserError, match="whole holds shards without parts of manifest.json"):
        prepare(*flags[:3], "whole", "--part", "0/2")
    for path in (tmp_path / "out").glob("manifest*"):
        path.unlink()
    for i in range(2):
        with pytest.raises(UserError, match="shards without a manifest_p0of2.json"):
            prepare(*flags, "--part", f"{i}/2")
    (tmp_path / "out/manifest_p1of2.json").write_text("[]")
    result = command(*flags, "--part", "0/2", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1


@pytest.mark.parametrize("flags, said", [
    (["--part", "3/3"], "'3/3' is not I/N with I from 0 to N-1"), (["--part", "1"], "is not I/N"),
    (["--part", "-1/3"], "--part"), (["--part", "0/0"], "is not I/N"), (["--part", "1/2/3"], "is not I/N"),
    (["--part", "0/3", "--max_tokens", "300", "--val_tokens", "100"], "--max_tokens 300 / 3 parts"),
    (["--part", "0/3", "--pretokenized", "2"], "--part cannot be combined with --pretokenized")])
def test_a_wrong_part_is_one_clear_line(flags, said, tmp_path):
    result = command(*flags, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result


def test_a_part_that_fails_before_its_first_shard_binds_no_other(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "b.txt").write_text("word " * 100)
    failed = command("--input", "a.jsonl", "--out", "out", "--part", "0/2", cwd=tmp_path)
    assert failed.returncode == 2 and not (tmp_path / "out").exists()
    assert command("--input", "b.txt", "--out", "out", "--part", "0/2", cwd=tmp_path).returncode == 0
    none = command("--input", "b.txt", "--out", "out", "--part", "1/2", cwd=tmp_path)
    assert none.returncode == 0 and "0 shards, 0 tokens, of part 1/2 complete, all 2 parts" in none.stdout


@pytest.mark.parametrize("parts", [2, 3])         # of four files: whole files each, or every third document
def test_parts_of_the_hubs_stream_have_every_document_once_and_resume(parts, hub, gpt2, tmp_path,  # noqa: F811
                                                                      monkeypatch):
    import datasets
    load = datasets.load_dataset
    for i in range(4):
        write_parquet(tmp_path / f"{i}.parquet", LINES[i::4], row_group_size=17)
    files = [str(tmp_path / f"{i}.parquet") for i in range(4)]
    hub(lambda: load("parquet", data_files=files, split="train", streaming=True,
                     cache_dir=str(tmp_path / "cache")))
    small_batches(monkeypatch)
    for i in range(parts):
        flags = ["--part", f"{i}/{parts}", "--shard_size", 200, "--val_tokens", 100, "--workers", 1]
        prepare(*flags, "--out", "out")
        path = tmp_path / f"out/manifest_p{i}of{parts}.json"
        whole = path.read_bytes()
        manifest = json.loads(whole)              # as after a kill behind the third shard
        cut = manifest["shards"][:3]
        path.write_text(json.dumps(manifest | {"complete": False, "shards": cut, "tokens":
                                               sum(shard["tokens"] for shard in cut)}))
        prepare(*flags, "--out", "out")
        assert path.read_bytes() == whole
        source = HubSource("stand-in", "sample-10BT", (i, parts))
        texts = texts_of(source)
        number, state = next(cursor for cursor in cursors_of(source) if cursor[0] >= 20)
        assert texts_of(source, number + 1, [number, state]) == texts[number + 1:]
    assert counted(tmp_path / "out") == counted_in(LINES, gpt2)
    assert {path.name[:16] for path in (tmp_path / "out").glob("*val*")} == {f"edufineweb_p0of{parts}"[:16]}


def test_a_run_trains_on_a_folder_of_parts(tmp_path):
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    for name, piece in zip("abc", (text[:20_000], text[20_000:40_000], text[40_000:60_000]), strict=True):
        (tmp_path / f"{name}.txt").write_text(piece)
    for i in range(3):
        prepare("--input", tmp_path / "*.txt", "--out", tmp_path / "out", "--part", f"{i}/3")
    result = run("--data", tmp_path / "out", "--out", tmp_path / "log", "--device", "cpu", "--n_layer", 1,
                 "--n_head", 1, "--n_embd", 8, "--block_size", 16, "--sequence_length", 16, "--batch_size", 2,
                 "--total_batch_size", 64, "--max_steps", 3, "--warmup_steps", 1, "--hellaswag_every", 0,
                 "--sample_every", 0, "--val_tokens", 64)
    assert "step     2 | loss:" in result.stdout
