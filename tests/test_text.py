"""Text -> tokens: the readers of files, and the encoder, whose reference is tiktoken."""
import csv
import gzip
import io
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, little_memory
from hypothesis import example, given
from hypothesis import strategies as st
from test_dataloader import FAST

import runtime.text
import runtime.tokenizer
from runtime.cli import RunError, UserError
from runtime.text import kind_of, read_rows
from runtime.tokenizer import EOT, Encoder, checked_asset, encode, token_bytes, tokenizer

SPACES = " \n\r\t\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000"    # white space to Rust, to Python, or to both
# documents as they come: short, long, empty, with the special token's name, other scripts, odd white space,
# with letters that are new in Unicode 17
DOCUMENTS = ["Hello, world.", "", "<|endoftext|>", " \n\n\t x  y", "naïve café 中文 🙂 \u200b", "a" * 300,
             "word " * 400, "def f(x):\r\n    return x\r\n", "", "\u088f's and \U00010940's", "తెలుగు's",
             "春眠不覺曉、處處聞啼鳥。\n" * 20, "👩‍👩‍👧 🇨🇭 fun\u3000\u3000 " * 9,
             *[f"Document {i}: " + "it's 1 of many. " * (i % 13) for i in range(150)]]
SEPARATOR = b"<separator>"


def stream_of(gpt2, documents):
    """build-nanogpt's tokens: 50256 and those of the text, document by document."""
    return [token for text in documents for token in (50256, *gpt2.encode_ordinary(text))]


def read(path, field="text", **patches):
    """(the documents of a file, how many rows they came in)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patches.items():
            patch.setattr(runtime.text, name, value)
        rows = list(read_rows(Path(path), field, SEPARATOR, str(path)))
    head, *documents = b"".join(rows).split(SEPARATOR)
    assert head == b""
    return [text.decode() for text in documents], len(rows)


def written(path, documents):
    """Writes `documents` in the format that the name asks for."""
    path, rows = Path(path), io.StringIO(newline="")
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(documents)), "text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=40)
        return path
    if ".jsonl" in path.suffixes:
        rows.writelines(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in documents)
    else:
        table = csv.writer(rows, delimiter="\t" if ".tsv" in path.suffixes else ",")
        table.writerows([["text", "id"], *([text, 1] for text in documents)])
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pyarrow.output_stream(str(path), compression=packed) as file:
        file.write(rows.getvalue().encode())
    return path


# -----------------------------------------------------------------------------
# readers

@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "A.TSV",
                                  "a.csv.gz"])
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_a_reader_gives_the_documents_of_a_file_in_its_order(name, block, tmp_path):
    path = written(tmp_path / name.lower(), DOCUMENTS).rename(tmp_path / name)
    documents, rows = read(path, BLOCK=block)
    assert documents == DOCUMENTS
    assert rows == len(DOCUMENTS) if block == 1 else rows > 10 if block == 500 else rows == 1


@FAST
@given(st.lists(st.one_of(st.sampled_from(["\n\n", "\n\n\n", " ", "    ", "\r\n", "a", "'s", "1.", "é中",
                                           *SPACES]), st.characters(codec="utf-8"))), st.integers(1, 8))
@example(["a\n\n b\r\n\r\nc \n d\n\n"], 1)
@example(["a\x1c b\x85 c\u3000 d"], 2)
def test_the_pieces_of_a_txt_file_have_the_tokens_of_the_whole(gpt2, tmp_path, parts, block):
    text = "".join(parts).removeprefix("\ufeff").replace("\0", "")
    (tmp_path / "a.txt").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.text, "BLOCK", block)
        rows = [*read_rows(tmp_path / "a.txt", "", SEPARATOR, "")]
    assert b"".join(rows) == (SEPARATOR + text.encode() if text else b"")
    tokens = [token for row in rows for token in gpt2.encode_ordinary(row.removeprefix(SEPARATOR).decode())]
    assert tokens == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_long_text_comes_in_bounded_pieces_and_its_line_ends_stay(end, tmp_path):
    text = (ROOT / "input.txt").read_text(encoding="utf-8").replace("\n", end)
    (tmp_path / "a.md").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.text, "BLOCK", 10_000)
        rows = [*read_rows(tmp_path / "a.md", "", SEPARATOR, "")]
    assert b"".join(rows) == SEPARATOR + text.encode() and max(map(len, rows)) < 20_000


def test_gzip_files_may_be_joined_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\n") + gzip.compress(b"two"))
    assert read(tmp_path / "a.txt.gz") == (["one\r\ntwo"], 2)
    for name, text in (("a.txt", "words"), ("a.jsonl", '{"text": "words"}'), ("a.csv", "text\nwords\n"),
                       ("b.csv.gz", "text\nwords\n")):
        data = text.encode("utf-8-sig")
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        assert read(tmp_path / name)[0] == ["words"], name


def test_a_file_without_text_has_no_documents_and_lines_of_white_space_are_none(tmp_path):
    for name, data in (("a.txt", b""), ("a.jsonl", b"\n \r\n"), ("a.csv", b""), ("b.csv", b"text\n\n")):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == ([], 0), name
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\r\n  \n{"text": null}\n{"text": "b\\r"}')
    assert read(tmp_path / "a.jsonl")[0] == ["a", "", "b\r"]
    (tmp_path / "a.csv").write_bytes(b'id,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,\r\n')
    assert read(tmp_path / "a.csv")[0] == ['a, "b"\r\nc', ""]


def test_lone_surrogates_become_the_replacement_character_and_pairs_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "\ud800 x"}' + "\n" + r'{"text": "\ud83d\ude42"}')
    assert read(tmp_path / "a.jsonl")[0] == ["\ufffd x", "🙂"]


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view(),
                                  pyarrow.dictionary(pyarrow.int32(), pyarrow.string())], ids=str)
def test_every_kind_of_string_column_is_read_and_null_is_an_empty_document(kind, tmp_path):
    texts = ["", "é", "word " * 40, None] * 50
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if "dict" in str(kind) else column.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"body": column}), tmp_path / "a.parquet", row_group_size=70)
    assert read(tmp_path / "a.parquet", "body")[0] == [text or "" for text in texts]


def test_half_a_kilobyte_that_repeats_a_long_text_is_read_in_little_memory(tmp_path):
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 600, pyarrow.int32()),
                                               pyarrow.array(["x" * 10**6]))
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 1000
    with little_memory(400):
        assert sum(map(len, read_rows(tmp_path / "a.parquet", "text", b"", ""))) == 600 * 10**6


def cut(data, n=200):
    return data[:-n]


BAD = {                                           # file: its bytes, and what the error has to say
    "latin.txt": ("caf\xe9 ".encode("latin-1") * 50, "utf-8"), "utf16.txt": ("word " * 50).encode("utf-16"),
    "utf16le.txt": (("word " * 50).encode("utf-16-le"), "UTF-16"), "no.txt.gz": b"not packed",
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}', "line 2"), "latin.csv": b"text\n\xe9\n",
    "half.jsonl": (b'{"text": "a"}\n\n{"text": "cut o', "line 3"), "list.jsonl": (b"[1]\n", "line 1"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 0}\n', "line 2"), "deep.jsonl": (b"[" * 100_000, "line 1"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "--text_field"), "none.jsonl": (b"{}", "--text_field"),
    "other.csv": (b"id,body\n1,a\n", "--text_field"), "few.csv": (b"id,text\n1,a\n2\n", "line 3"),
    "many.csv": (b"id,text\n1,Hello, world\n", "line 2"), "open.csv": b'id,text\n1,"never closed\n',
    "cut.jsonl.gz": cut(gzip.compress(json.dumps({"text": str([*range(9999)])}).encode())),
    "no.jsonl.zst": b"not packed", "no.parquet": b"not parquet", "empty.parquet": b""}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_named_with_the_cause(name, tmp_path):
    data, said = BAD[name] if isinstance(BAD[name], tuple) else (BAD[name], "")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert name in str(error.value) and said in str(error.value), error.value


@pytest.mark.parametrize("column, said", [
    (pyarrow.array([1, 2]), "int64"), (pyarrow.array([b"a", b"b"]), "binary"),
    (pyarrow.array([None, None], pyarrow.null()), "null"),
    (pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(np.array([0, 2], np.int32)),
                                                      pyarrow.py_buffer(b"\xe9a")]), "UTF")])
def test_a_column_that_is_no_text_is_refused(column, said, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(UserError, match=said):
        read(path)
    with pytest.raises(UserError, match="--text_field"):
        read(path, "body")
    path.write_bytes(cut(written(path, DOCUMENTS).read_bytes()))
    with pytest.raises(UserError, match="a.parquet"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz"])
def test_a_line_without_an_end_does_not_fill_the_memory(name, tmp_path):
    with pyarrow.output_stream(str(tmp_path / name),
                               compression="gzip" if name.endswith("gz") else None) as file:
        for _ in range(60):
            file.write(b"x" * 10**6)
    with little_memory(150), pytest.raises(UserError, match=name):
        read(tmp_path / name, MAX_DOCUMENT=10**7)


@pytest.mark.parametrize("name, kind", [("a.TXT", ".txt"), ("b/c.d.jsonl.ZST", ".jsonl"), ("x.md", ".md"),
                                        ("a.parquet", ".parquet"), ("a.parquet.gz", ""), ("a.gz", ""),
                                        ("txt", ""), (".txt", ""), ("a.pdf", ""), ("a.txt.bak", "")])
def test_the_end_of_a_name_says_how_a_file_is_read(name, kind):
    assert kind_of(name) == kind


# -----------------------------------------------------------------------------
# the tokenizer

@FAST
@given(st.text(st.one_of(st.characters(), st.characters(categories=["Cs"]),
                         st.sampled_from(SPACES + "'sdtlvre 09"))))
@example("<|endoftext|> and <|endoftext|>")
@example("\ud800 a lone surrogate, and a pair: \ud83d\ude42")
def test_tokens_equal_tiktokens_own_gpt2(gpt2, text):
    tokens = encode(text)
    assert tokens.dtype == np.uint16 and tokens.tolist() == gpt2.encode_ordinary(text)


def test_the_tokenizer_has_gpt2s_vocabulary_and_is_built_once(gpt2):
    encoding = tokenizer()
    assert encoding is tokenizer()
    assert encoding.n_vocab == 50257 and encoding.eot_token == EOT == 50256 and encoding.name == "gpt2"
    assert [encoding.decode_single_token_bytes(i) for i in range(EOT)] == [*token_bytes()]
    assert [gpt2.decode_single_token_bytes(i) for i in range(EOT)] == [*token_bytes()]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(),
                                    lambda path: path.write_bytes(path.read_bytes() + b" ")])
@pytest.mark.parametrize("name", ["vocab.bpe", "encoder.json"])
def test_a_changed_or_missing_asset_is_refused(name, damage, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "assets", tmp_path / "assets")
    damage(tmp_path / "assets" / name)
    monkeypatch.setattr(runtime.tokenizer, "ASSETS", tmp_path / "assets")
    for read_it in (lambda: checked_asset(name), Encoder):
        with pytest.raises(UserError, match=name):
            read_it()


def test_a_run_of_white_space_too_long_for_tiktoken_is_a_users_mistake_and_none_for_gigatoken(encoder):
    with pytest.raises(UserError, match="white space"):
        encode(" " * 1_000_000 + "a")
    tokens = encoder.encode(encoder.separator + b" " * 1_000_000 + b"a")
    assert tokenizer().decode(tokens[1:].tolist()) == " " * 1_000_000 + "a"


# -----------------------------------------------------------------------------
# gigatoken's tokens are tiktoken's

def row_of(encoder, documents):
    return b"".join(encoder.separator + text.encode() for text in documents)


def test_every_code_point_has_tiktokens_tokens_before_a_contraction_and_beside_letters(gpt2):
    """Of the planes that Unicode uses; of the long stretches of Hangul and Chinese some."""
    codes = [chr(c) for c in (*range(0x3400), *range(0x3400, 0xa000, 41), *range(0xa000, 0xac00),
                              *range(0xac00, 0xd7b0, 41), *range(0xf900, 0x17000),
                              *range(0x17000, 0x18000, 41), *range(0x18000, 0x20000),
                              *range(0x20000, 0x34000, 41))]
    documents = ["".join(f"{c}'s{c} 1{c}{c}" for c in codes[i:i + 512]) for i in range(0, len(codes), 512)]
    random.Random(0).shuffle(documents)
    encoder = Encoder()
    for i in range(0, len(documents), 3):
        tokens = encoder.encode(row_of(encoder, documents[i:i + 3]))
        assert tokens.dtype == np.uint16 and tokens.tolist() == stream_of(gpt2, documents[i:i + 3]), i


PIECES = st.sampled_from([*"aZ09 \n\r\t'é中🙂²½\u0301\u200b\u200d\ufeff\x00\x1c\x85\u088f", "'s",
                          "'ll", "'RE", "  ", "<|endoftext|>", "<|endof", "\U00033479", "it's", " word", "<|",
                          "|>"])


@FAST
@given(st.lists(st.lists(PIECES | st.characters(codec="utf-8"), max_size=12).map("".join), max_size=8))
def test_any_documents_have_tiktokens_tokens(gpt2, encoder, texts):
    assert encoder.encode(row_of(encoder, texts)).tolist() == stream_of(gpt2, texts)
    text = "".join(texts)                         # a row that continues a document
    assert encoder.encode(text.encode()).tolist() == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("unit", [" ", "\n", "a", "é", "'", "1", "ab ", "\u0301", "🙂", "中"])
def test_long_runs_have_tiktokens_tokens(unit, gpt2, encoder):
    texts = [unit * 30_000, "b" + unit * 3001 + "c", ""]
    assert encoder.encode(row_of(encoder, texts)).tolist() == stream_of(gpt2, texts)


def test_no_text_holds_the_separator_and_each_process_has_its_own(encoder, gpt2):
    assert Encoder().separator != encoder.separator
    other = Encoder().separator.decode()
    assert encoder.encode(row_of(encoder, [other])).tolist() == stream_of(gpt2, [other])


def test_only_a_row_with_a_letter_that_is_new_in_unicode_17_goes_to_tiktoken(encoder, monkeypatch):
    """Neighbours of such letters do not, or Telugu and Kannada would be slow."""
    asked = []
    monkeypatch.setattr(runtime.tokenizer, "encode", lambda text: asked.append(text) or encode(text))
    for text, new in (("\u088f's", True), ("x\U00010940", True), ("తెలుగు ಕನ್ನಡ", False),
                      ("中文 🙂 é's", False), ("plain", False)):
        for _ in range(2):                        # the second time, both have been asked about its letters
            asked.clear()
            encoder.encode(row_of(encoder, ["word " * 1000, text]))
        assert (text in asked) == new, text


def test_tokens_that_are_not_tiktokens_end_the_run(encoder, monkeypatch):
    """In the first kilobyte of a row: the others are a matter of trust."""
    class Wrong:
        def __init__(self, right, at):
            self.right, self.at = right, at

        def encode_batch_padded(self, *args, **kwargs):
            tokens, lengths = self.right.encode_batch_padded(*args, **kwargs)
            tokens[0, self.at] ^= 1
            return tokens, lengths

    for at, text in ((3, "one two three four"), (100, "word " * 10_000)):
        row = row_of(encoder, [text])
        encoder.encode(row)
        with monkeypatch.context() as patch:
            patch.setattr(encoder, "gigatoken", Wrong(encoder.gigatoken, at))
            with pytest.raises(RunError, match="gigatoken"):
                encoder.encode(row)


def test_without_gigatoken_tiktoken_does_the_work(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    encoder = Encoder()
    assert encoder.gigatoken is None
    assert encoder.encode(row_of(encoder, DOCUMENTS)).tolist() == stream_of(gpt2, DOCUMENTS)
