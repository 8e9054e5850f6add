"""runtime/text.py: the documents in each kind of file, and what is refused or told."""
import bz2
import csv
import gzip
import itertools
import json
import time
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from texts import DOCUMENTS, SCRIPTS, write_documents

import runtime.text
from runtime.cli import UserError
from runtime.text import KINDS, TextReader, ending

# The same examples in every run, and no look at the clock.
FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))
MARK = b"<mark>"
EOT = "<|endoftext|>"


def read(path, text_field="text", separator=""):
    """The documents of a file."""
    reader = TextReader(text_field, separator, MARK)
    before, *documents = b"".join(reader.read_chunks(path)).split(MARK)
    assert before == b""
    return [document.decode() for document in documents]


def read_bytes(folder, name, data, **flags):
    """The documents of a file with this name and these bytes."""
    path = folder / name
    path.write_bytes(data)
    return read(path, **flags)


def refusal(folder, name, data, **flags):
    """The line that refuses a file with this name and these bytes."""
    with pytest.raises(UserError) as error:
        read_bytes(folder, name, data, **flags)
    line = str(error.value)
    assert name in line
    return line


# ------------------------------------------------------------------------- every kind

@pytest.mark.parametrize("name", [
    "a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv", "c4-train.00000-of-01024.json.gz", "a.ndjson"])
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_a_reader_gives_the_documents_of_a_file_in_their_order(name, block, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", block)
    path = write_documents(tmp_path / name, DOCUMENTS)
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonlines", "a.ndjson", "a.json"])
def test_json_lines_are_read_by_each_of_their_names(name, tmp_path):
    assert read_bytes(tmp_path, name, b'{"text": "a"}\n{"text": "b"}\n') == ["a", "b"]


@pytest.mark.parametrize("ending", [".gz", ".gzip", ".GZ"])
def test_gzip_is_read_by_each_of_its_names_and_with_several_members(ending, tmp_path):
    data = gzip.compress(b"one\n", mtime=0) + gzip.compress(b"two\n")
    assert read_bytes(tmp_path, "a.txt" + ending, data) == ["one\ntwo\n"]


@pytest.mark.parametrize("ending", [".zst", ".zstd"])
def test_zstd_is_read_by_each_of_its_names_and_with_several_frames(ending, tmp_path):
    frames = [pyarrow.compress(text, "zstd", asbytes=True) for text in (b"one\n", b"two\n")]
    assert read_bytes(tmp_path, "a.txt" + ending, b"".join(frames)) == ["one\ntwo\n"]


def test_bzip2_is_read_with_several_streams(tmp_path):
    data = bz2.compress(b"one\n") + bz2.compress(b"two\n")
    assert read_bytes(tmp_path, "a.txt.bz2", data) == ["one\ntwo\n"]


@pytest.mark.parametrize("name, kind", [
    ("a.TXT", ".txt"), ("b/c.d.jsonl.ZST", ".jsonl"), ("x.md", ".md"), ("a.parquet", ".parquet"),
    ("a.arrow", ".arrow")])
def test_the_end_of_a_name_says_how_a_file_is_read(name, kind):
    assert ending(name) == kind
    assert kind in KINDS


@pytest.mark.parametrize("name", ["a.gz", ".txt", "a.txt.bak", "a.tsv", "a"])
def test_files_with_other_ends_of_their_names_are_of_no_kind(name):
    assert ending(name) not in KINDS


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.gz"])
def test_a_table_that_is_compressed_as_a_whole_is_refused(name, tmp_path):
    assert refusal(tmp_path, name, gzip.compress(b"PAR1 and more"))


@pytest.mark.parametrize("name, data", [
    ("a.jsonl", b'{"text": ""}\n{"text": "a"}\n{"text": null}\n'),
    ("a.csv", b'id,text\n1,\n2,a\n3,""\n')])
def test_a_row_without_text_is_no_document_and_is_counted(name, data, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    reader = TextReader("text", "", MARK)

    assert list(reader.read_chunks(path)) == [MARK + b"a"]
    assert reader.empty_rows == 2


@pytest.mark.parametrize("name, data", [
    ("a.txt", b"words"), ("a.jsonl", b'{"text": "words"}'), ("a.csv", b"text\nwords\n")])
def test_a_byte_order_mark_is_no_text(name, data, tmp_path):
    mark = b"\xef\xbb\xbf"
    assert read_bytes(tmp_path, name, mark + data) == ["words"]
    assert read_bytes(tmp_path, name + ".gz", gzip.compress(mark + data, mtime=0)) == ["words"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_an_empty_file_has_no_documents(name, tmp_path):
    assert read_bytes(tmp_path, name, b"") == []


# ------------------------------------------------------------------------- .txt

def test_a_text_is_one_document_with_its_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 10_000)
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:200_000].replace("\n", "\r\n")
    assert read_bytes(tmp_path, "a.md", text.encode()) == [text]


def test_a_long_text_comes_in_pieces_that_are_cut_between_words(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 1)
    (tmp_path / "a.txt").write_text("one two three")
    reader = TextReader("text", "", MARK)
    chunks = list(reader.read_chunks(tmp_path / "a.txt"))
    assert b"".join(chunks) == MARK + b"one two three"
    assert chunks[-2:] == [b" two", b" three"]


SPACES = " \n\r\t\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000"
PIECES = st.sampled_from([
    "\n\n", " ", "    ", "\r\n", "a", "'s", "1.", "é中", "。", "，の", "！", "ガ", *SPACES])


@FAST
@given(st.lists(PIECES | st.characters(codec="utf-8", exclude_characters="\0\ufeff<")),
       st.integers(3, 8))
@example(["a\n\n b\r\n\r\nc \n d\n\n"], 3)
@example(["a\x1c b\x85 c\u3000 d"], 3)
def test_the_pieces_of_a_text_have_the_tokens_of_the_whole(gpt2, tmp_path, parts, block):
    text = "".join(parts)
    (tmp_path / "a.txt").write_bytes(text.encode())
    reader = TextReader("text", "", MARK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.text, "BLOCK", block)
        chunks = list(reader.read_chunks(tmp_path / "a.txt"))

    assert tokens_of_chunks(gpt2, chunks) == gpt2.encode_ordinary(text)


def tokens_of_chunks(gpt2, chunks):
    tokens = []
    for chunk in chunks:
        tokens.extend(gpt2.encode_ordinary(chunk.removeprefix(MARK).decode()))
    return tokens


@pytest.mark.parametrize("script", SCRIPTS)
def test_in_every_script_the_pieces_of_a_text_have_the_tokens_of_the_whole(
        script, gpt2, tmp_path, monkeypatch):
    for blank, block in itertools.product(("", " ", "\u3000"), (4, 30, 200)):
        text = blank.join([SCRIPTS[script]] * 12)
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        monkeypatch.setattr(runtime.text, "BLOCK", block)
        chunks = list(TextReader("text", "", MARK).read_chunks(tmp_path / "a.txt"))
        assert tokens_of_chunks(gpt2, chunks) == gpt2.encode_ordinary(text), (blank, block)


LETTERS = [chr(code) for codes in (range(0x3041, 0x3095), range(0x30a1, 0x30fb),
                                   range(0x4e00, 0x9fa6)) for code in codes]


@pytest.mark.parametrize("sign", "。，！？、；")
def test_before_each_letter_of_chinese_and_japanese_a_cut_behind_a_sign_leaves_the_tokens(
        sign, gpt2, tmp_path, monkeypatch):
    text = "".join(sign + letter for letter in LETTERS)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(runtime.text, "BLOCK", 6)           # bytes: a letter and a sign
    chunks = list(TextReader("text", "", MARK).read_chunks(tmp_path / "a.txt"))

    assert len(chunks) > 0.9 * len(LETTERS)
    assert tokens_of_chunks(gpt2, chunks) == gpt2.encode_ordinary(text)


def test_a_book_in_one_line_is_read_in_pieces_and_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", 10_000)
    (tmp_path / "a.txt").write_text(SCRIPTS["chinese"] * 8000, encoding="utf-8")
    sizes = []
    tracemalloc.start()
    for chunk in TextReader("text", "", MARK).read_chunks(tmp_path / "a.txt"):
        sizes.append(len(chunk))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert sum(sizes) == (tmp_path / "a.txt").stat().st_size + len(MARK)
    assert max(sizes) < 30_000
    assert peak < 300_000


UNCUT = {"dna": "ACGT" * 250_000, "emoji": "🙂" * 250_000}


@pytest.mark.parametrize("separator", ["", "--"])
@pytest.mark.parametrize("kind", UNCUT)
def test_a_text_that_can_be_cut_nowhere_takes_three_times_its_size(kind, separator, tmp_path):
    (tmp_path / "a.txt").write_text(UNCUT[kind], encoding="utf-8")
    reader = TextReader("text", separator, MARK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.text, "BLOCK", 10_000)
        tracemalloc.start()
        chunks = list(reader.read_chunks(tmp_path / "a.txt"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert chunks == [MARK + UNCUT[kind].encode()]
    assert peak < 3.2 * 1_000_000


@pytest.mark.parametrize("separator", ["", "ACGA"])
def test_no_part_of_a_text_is_searched_again_for_each_block(separator, tmp_path, monkeypatch):
    def seconds(text):
        (tmp_path / "a.txt").write_text(text)
        tries = []
        for _ in range(3):
            begun = time.process_time()
            list(TextReader("text", separator, MARK).read_chunks(tmp_path / "a.txt"))
            tries.append(time.process_time() - begun)
        return min(tries)

    monkeypatch.setattr(runtime.text, "BLOCK", 200)
    # 2000 blocks, of which the last would be 2000 times as much work as the first.
    assert seconds("ACGT" * 100_000) < 10 * seconds("ACG " * 100_000)


STORIES = ["One day,\n  a cat.\n\nIt slept.", " Two", "Three \u2028"]


@pytest.mark.parametrize("text", [
    f"\n{EOT}\n".join(STORIES) + "\n", EOT.join(STORIES), f"{EOT}\n".join(["", *STORIES, ""]),
    f"\r\n\r\n{EOT}\r\n\r\n".join([*STORIES, ""]),
    f"\n{EOT}\n \t\n{EOT}{EOT}\n".join(["", *STORIES, "\n\n"])])
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_documents_stand_between_separators_and_line_ends_there_are_layout(
        text, block, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.text, "BLOCK", block)
    assert read_bytes(tmp_path, "a.txt", text.encode(), separator=EOT) == STORIES


@FAST
@given(st.lists(st.sampled_from([EOT, "<|", "|>", "<|endof", "\n", "\r\n", " ", "a", "bc ", "é"])),
       st.integers(3, 30), st.sampled_from([EOT, "\n\n", "a", "aba", "bc \n"]))
@example(["a"] * 9 + [EOT] + ["b"], 8, EOT)
@example(["a", "bc ", "\n"] * 9, 4, "bc \n")
def test_wherever_blocks_end_the_documents_are_the_same(tmp_path, parts, block, separator):
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.text, "BLOCK", block)
        documents = read_bytes(tmp_path, "a.txt", text.encode(), separator=separator)

    expected = [part.strip("\r\n") for part in text.split(separator) if part.strip()]
    assert documents == expected


def test_a_separator_does_not_divide_json(tmp_path):
    data = json.dumps({"text": f"a{EOT}\n"}).encode()
    assert read_bytes(tmp_path, "a.jsonl", data, separator=EOT) == [f"a{EOT}\n"]


def test_endoftext_in_a_text_without_a_separator_is_told_once(tmp_path, capsys):
    reader = TextReader("text", "", MARK)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"One.\n{EOT}\nTwo.\n")
        list(reader.read_chunks(tmp_path / name))

    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "a.txt" in told[0] and "--separator" in told[0]


def test_a_separator_that_does_not_divide_a_file_is_told(tmp_path, capsys):
    read_bytes(tmp_path, "a.txt", b"One. == Two.", separator="==")
    assert capsys.readouterr().err == ""

    read_bytes(tmp_path, "a.txt", b"One. Two.", separator="==")
    told = capsys.readouterr().err
    assert "--separator" in told and "$" not in told


@pytest.mark.parametrize("before", [0, 1, 500, 1 << 20])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_byte_that_is_not_utf8_is_named_with_its_place_in_the_file(before, ending, tmp_path):
    data = b"\xef\xbb\xbf" + b"a" * before + b"\xe9 b"
    if ending:
        data = gzip.compress(data, mtime=0)
    assert f"byte {before + 3} " in refusal(tmp_path, f"latin.txt{ending}", data)


def test_the_place_is_that_of_the_character_also_where_a_block_ends_in_it(tmp_path):
    data = b"a" * (runtime.text.BLOCK - 1) + b"\xe2("
    assert f"byte {runtime.text.BLOCK - 1} " in refusal(tmp_path, "cut.txt", data)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_named(encoding, tmp_path):
    assert "UTF-16" in refusal(tmp_path, "a.txt", ("word " * 50).encode(encoding))


@pytest.mark.parametrize("name, data, place", [
    ("a.txt", "Ende: ü", "byte 6 "), ("a.md", "🙂", "byte 0 "),
    ("a.jsonl", '{"text": "中', "line 1 "), ("a.csv", "text\né", "line 2 ")])
def test_a_file_that_ends_inside_a_character_is_refused(name, data, place, tmp_path):
    assert place in refusal(tmp_path, name, data.encode()[:-1])


# ------------------------------------------------------------------------- JSON lines

def test_json_has_text_null_and_halves_of_characters(tmp_path):
    data = rb'''
{"text": "a"}
   {"text": null}
{"text": "b\r"}
{"text": "\ud800 x"}
{"text": "\ud83d\ude42"}'''
    assert read_bytes(tmp_path, "a.jsonl", data) == ["a", "b\r", "\ufffd x", "🙂"]


def test_a_json_field_may_be_missing_once_a_line_has_had_it(tmp_path):
    data = b'{"body": "a", "id": 1}\n{"id": 2}\n{"body": "b"}\n'
    assert read_bytes(tmp_path, "a.jsonl", data, text_field="body") == ["a", "b"]


@pytest.mark.parametrize("line", [
    b'{"text": "cut o', b"[1]", b'"text"', b'{"text": "a"}{"text": "b"}', b'{"text": "\xe9"}',
    b'{"text": 0}', b'{"text": {"b": 1}}', b"{"])
def test_a_line_that_has_no_text_is_named(line, tmp_path):
    assert "line 3" in refusal(tmp_path, "a.jsonl", b'{"text": "a"}\n\n' + line + b"\n")


def test_the_fields_of_json_are_shown_where_the_first_line_lacks_the_text(tmp_path):
    line = refusal(tmp_path, "a.jsonl", b'{"body": "b", " id": 1}\n')
    assert "line 1" in line and "--text_field" in line
    assert "'body'" in line and "' id'" in line


@pytest.mark.parametrize("data", [b'{\n  "text": "a"\n}\n', b'[{"text": "a"},\n {"text": "b"}]\n'])
def test_json_that_is_not_in_lines_is_refused_with_the_way_to_make_it_so(data, tmp_path):
    assert "jq -c" in refusal(tmp_path, "a.json", data)


# ------------------------------------------------------------------------- .csv

def test_cells_of_a_csv_may_be_quoted_and_hold_line_ends(tmp_path):
    data = b'id,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,d\r\n'
    assert read_bytes(tmp_path, "a.csv", data) == ['a, "b"\r\nc', "d"]


def test_a_cell_may_be_longer_than_pythons_limit(tmp_path):
    documents = ["word " * 40_000, "b"]
    assert len(documents[0]) > 131_072
    assert read(write_documents(tmp_path / "a.csv", documents)) == documents


def test_two_columns_of_the_name_are_refused_and_of_another_name_not(tmp_path):
    data = b"id,text,id,text\n1,a,2,b\n"
    assert "'text' 2 times" in refusal(tmp_path, "a.csv", data)
    assert read_bytes(tmp_path, "b.csv", data.replace(b"text\n", b"body\n")) == ["a"]


def test_a_lone_carriage_return_in_a_cell_does_not_split_the_document(tmp_path):
    # pandas on Python 3.11 writes it without quotes.
    path = tmp_path / "a.csv"
    documents = ["a\rb", "\rc", "quoted, \r too", "d\r\r e"]
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONE, escapechar="~")
        rows.writerow(["text"])
        rows.writerows([[documents[0]], [documents[1]]])
        file.write(f'"{documents[2]}"\n{documents[3]}\n')
    assert read(path) == documents


def test_a_csv_whose_lines_end_with_carriage_returns_alone_is_refused(tmp_path):
    assert "line 1" in refusal(tmp_path, "a.csv", b"id,text\r1,one\r2,two\r")


@pytest.mark.parametrize("data, number", [
    (b'id,text\n1,a\n2,"b\nc" d\n', 3), (b'id,text\n\n1,a\n2,"never closed\n\n', 4),
    (b'id,text\n1,"a\nb"\n2,c,d\n', 4), (b'text\n"a\nb\n\xe9"\n', 4), (b"id,text\n1,a\n2\n", 3),
    (b"id,text\n1,Hello, world\n", 2)])
def test_a_row_of_a_csv_that_cannot_be_read_is_named_by_its_line(data, number, tmp_path):
    assert f"line {number}" in refusal(tmp_path, "a.csv", data)


def test_a_csv_without_a_header_is_refused_and_the_first_row_is_shown(tmp_path):
    line = refusal(tmp_path, "a.csv", b'1,"a document"\n2,another\n')
    assert "line 1" in line and "'a document'" in line
    assert "--text_field" in line and "?" in line


def test_a_quotation_mark_behind_a_backslash_is_named(tmp_path):
    assert "backslash" in refusal(tmp_path, "a.csv", b'text\n"a \\"quoted\\" word"\n')


# ------------------------------------------------------------------------- .parquet, .arrow

STRINGS = [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
           pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]


def column_of(kind, texts):
    if pyarrow.types.is_dictionary(kind):
        return pyarrow.array(texts).dictionary_encode()
    return pyarrow.array(texts).cast(kind)


def write_arrow_file(table, path):
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def write_arrow_stream(table, path):
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def write_parquet(table, path):
    pyarrow.parquet.write_table(table, path, row_group_size=70)


TABLES = [("a.parquet", write_parquet), ("file.arrow", write_arrow_file),
          ("stream.arrow", write_arrow_stream)]


@pytest.mark.parametrize("kind", STRINGS, ids=str)
@pytest.mark.parametrize("name, write", TABLES)
def test_every_kind_of_string_column_is_read_row_by_row(kind, name, write, tmp_path):
    texts = ["", None, "é"]
    for i in range(200):
        texts.append(f"{i} words " * 40)
    table = pyarrow.table({"id": range(203), "body": column_of(kind, texts)})
    write(table, tmp_path / name)
    assert read(tmp_path / name, text_field="body") == [text for text in texts if text]


@pytest.mark.parametrize("name, write", TABLES)
def test_a_column_of_nulls_has_no_text(name, write, tmp_path):
    table = pyarrow.table({"text": pyarrow.nulls(3)})
    write(table, tmp_path / name)
    reader = TextReader("text", "", MARK)
    assert list(reader.read_chunks(tmp_path / name)) == []
    assert reader.empty_rows == 3


NOT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(), 1,
    [None, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xe9a")])


JSON = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['{"a": 1}']))
UUID = pyarrow.ExtensionArray.from_storage(
    pyarrow.uuid(), pyarrow.array([b"0" * 16], pyarrow.binary(16)))


@pytest.mark.parametrize("column", [
    pyarrow.array([1, 2]), pyarrow.array([b"a", b"b"]), pyarrow.array([1]).dictionary_encode(),
    pyarrow.array([["a", "b"]]), JSON, UUID])
@pytest.mark.parametrize("name, write", TABLES)
def test_a_column_of_another_type_is_refused_and_the_file_is_not_called_damaged(
        column, name, write, tmp_path):
    write(pyarrow.table({"text": column, "body": ["words"] * len(column)}), tmp_path / name)
    with pytest.raises(UserError, match=f"{name}.*'text'.*--text_field") as error:
        read(tmp_path / name)
    assert "repair" not in str(error.value)
    assert read(tmp_path / name, text_field="body") == ["words"] * len(column)


@pytest.mark.parametrize("name, write", TABLES)
def test_a_column_of_text_that_is_not_utf8_is_refused(name, write, tmp_path):
    write(pyarrow.table({"text": NOT_UTF8}), tmp_path / name)
    with pytest.raises(UserError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize("name, write", TABLES)
def test_a_missing_column_is_refused_and_the_others_are_shown(name, write, tmp_path):
    write(pyarrow.table({"body ": ["a"]}), tmp_path / name)
    with pytest.raises(UserError, match="'body '.*--text_field"):
        read(tmp_path / name)


@pytest.mark.parametrize("name, write", TABLES)
def test_two_columns_of_a_table_with_the_name_are_refused(name, write, tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    write(pyarrow.Table.from_arrays(columns, names=["text", "text"]), tmp_path / name)
    with pytest.raises(UserError, match="'text' 2 times"):
        read(tmp_path / name)


def test_a_parquet_file_of_which_fewer_rows_are_read_than_it_has_is_refused(tmp_path, monkeypatch):
    """As where pyarrow finds none behind a changed byte of the footer."""
    path = tmp_path / "a.parquet"
    write_parquet(pyarrow.table({"text": ["one", "two", "three"]}), path)
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda *arguments, **options: iter(()))
    with pytest.raises(UserError, match="a.parquet.*3"):
        read(path)


def test_a_flipped_bit_in_a_parquet_page_with_a_crc_is_refused(tmp_path):
    # Spark writes the CRC. Without compression the bit changes a letter, and nothing else.
    table = pyarrow.table({"text": ["The letter is here: e."] * 3})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False,
                                write_page_checksum=True, write_statistics=False)
    assert read(path) == ["The letter is here: e."] * 3

    data = path.read_bytes()
    place = data.index(b"here: e.") + 6
    path.write_bytes(data[:place] + b"a" + data[place + 1:])
    with pytest.raises(UserError, match="a.parquet"):
        read(path)


@pytest.mark.parametrize("name, write", TABLES)
def test_a_table_that_is_cut_off_is_refused(name, write, tmp_path):
    write(pyarrow.table({"text": ["word " * 40] * 50}), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert refusal(tmp_path, name, data[:-500])


# ------------------------------------------------------------------------- files that are damaged

@pytest.mark.parametrize("name", [
    "a.txt.gz", "a.jsonl.zst", "a.txt.bz2", "a.jsonl.gzip", "a.parquet", "a.arrow"])
def test_a_file_of_0_bytes_that_is_to_be_compressed_or_a_table_is_refused(name, tmp_path):
    assert refusal(tmp_path, name, b"")


def compressed_lines(ending):
    lines = [json.dumps({"text": f"line {number}"}) + "\n" for number in range(5000)]
    data = "".join(lines).encode()
    if ending == ".zst":
        return pyarrow.compress(data, "zstd", asbytes=True)
    if ending == ".bz2":
        return bz2.compress(data)
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("cut", [1, 9, 2000])
def test_a_compressed_file_that_is_cut_off_is_refused(ending, cut, tmp_path):
    assert refusal(tmp_path, "a.jsonl" + ending, compressed_lines(ending)[:-cut])


def test_zeros_behind_the_last_gzip_member_are_refused(tmp_path):
    assert refusal(tmp_path, "a.txt.gz", gzip.compress(b"words", mtime=0) + bytes(512))


def test_a_zstd_window_that_is_too_large_is_refused(tmp_path):
    # A frame of one raw block of five bytes, which asks for a window of 2^28 bytes.
    block_header = (5 << 3 | 1).to_bytes(3, "little")
    frame = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([18 << 3]) + block_header + b"words"
    assert refusal(tmp_path, "a.txt.zst", frame)


def test_a_tar_archive_is_no_text(tmp_path):
    header = b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + bytes(247)
    data = gzip.compress(header + b"words".ljust(512, b"\0") + bytes(1024))
    assert "tar" in refusal(tmp_path, "a.txt.gz", data)


def test_a_pointer_of_git_lfs_is_no_text(tmp_path):
    """It is valid UTF-8, and would be trained on."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    assert "git lfs pull" in refusal(tmp_path, "a.txt", pointer)


@pytest.mark.parametrize("name, data", [
    ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0)),
    ("a.txt", pyarrow.compress(b"words", "zstd", asbytes=True)),
    ("a.csv", b"PAR1\xff and more"),
    ("a.parquet", b"PK\x03\x04 and more")])
def test_a_file_of_another_kind_than_its_name_says_is_refused(name, data, tmp_path):
    assert name in refusal(tmp_path, name, data)


@FAST
@given(st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.txt"]), st.data())
def test_whatever_byte_of_a_file_is_another_it_is_refused_or_the_other_documents_are_the_same(
        tmp_path, name, data):
    """A byte between two lines of a .txt belongs to both documents."""
    path = write_documents(tmp_path / name, DOCUMENTS[:20])
    documents = read(path, separator="\n")
    assert len(documents) >= 20

    changed = bytearray(path.read_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        found = read(path, separator="\n")
    except UserError as error:
        assert name in str(error)
    else:
        assert len([text for text in documents if text not in found]) <= 2
        assert len(found) <= len(documents) + 1


def test_a_file_that_is_gone_is_told_by_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "a.txt")
