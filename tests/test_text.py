"""Text -> tokens: the readers of files, and the encoder, whose reference is tiktoken."""
import csv
import gzip
import io
import json
import random
import shutil
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, little_memory, refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import runtime.text
import runtime.tokenizer
from runtime.cli import RunError
from runtime.text import Layout, kind_of, read_chunks
from runtime.tokenizer import EOT, Encoder, checked_asset, encode, token_bytes, token_lengths, tokenizer

# the same examples in every run, and no look at the clock
FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))
SPACES = " \n\r\t\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000"    # white space to Rust, to Python, or to both
# documents as they come: short, long, empty, with the special token's name, other scripts, odd white space
DOCUMENTS = ["Hello, world.", "", "<|endoftext|>", " \n\n\t x  y", "naïve café 中文 🙂 \u200b", "a" * 300,
             "word " * 400, "def f(x):\r\n    return x\r\n", "", "ࢎ's and 𐤀's", "తెలుగు's",
             "春眠不覺曉、處處聞啼鳥。\n" * 20, "👩‍👩‍👧 🇨🇭 fun\u3000\u3000 " * 9,
             *[f"Document {i}: " + "it's 1 of many. " * (i % 13) for i in range(150)]]
SEPARATOR = b"<separator>"


def stream_of(gpt2, documents):
    """build-nanogpt's tokens: 50256 and those of the text, document by document."""
    return [token for text in documents for token in (50256, *gpt2.encode_ordinary(text))]


def rows_of(path, field="text", separator="", **patches):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patches.items():
            patch.setattr(runtime.text, name, value)
        return [*read_chunks(Path(path), Layout(field, separator), SEPARATOR, str(path))]


def read(*args, **how):
    """The documents of a file."""
    head, *documents = b"".join(rows_of(*args, **how)).split(SEPARATOR)
    assert head == b""
    return [text.decode() for text in documents]


def written(path, documents):
    """Writes `documents` in the format that the name asks for."""
    path, rows = Path(path), io.StringIO(newline="")
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(documents)), "text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=40)
        return path
    if {".jsonl", ".json", ".ndjson"} & {*path.suffixes}:
        rows.writelines(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in documents)
    else:
        table = csv.writer(rows)
        table.writerows([["text", "id"], *([text, 1] for text in documents)])
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pyarrow.output_stream(str(path), compression=packed) as file:
        file.write(rows.getvalue().encode())
    return path


# ----------------------------------------------------------------------------- readers

@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.CSV",
                                  "a.csv.gz", "c4-train.00000-of-01024.json.gz", "a.ndjson"])
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_a_reader_gives_the_documents_of_a_file_in_its_order(name, block, tmp_path):
    path = written(tmp_path / name.lower(), DOCUMENTS).rename(tmp_path / name)
    assert read(path, BLOCK=block) == DOCUMENTS
    rows = len(rows_of(path, BLOCK=block))
    assert rows == len(DOCUMENTS) if block == 1 else rows > 10 if block == 500 else rows == 1


@FAST
@given(st.lists(st.one_of(st.sampled_from(["\n\n", "\n\n\n", " ", "    ", "\r\n", "a", "'s", "1.", "é中",
                                           *SPACES]), st.characters(codec="utf-8"))), st.integers(1, 8))
@example(["a\n\n b\r\n\r\nc \n d\n\n"], 1)
@example(["a\x1c b\x85 c\u3000 d"], 2)
def test_the_pieces_of_a_txt_file_have_the_tokens_of_the_whole(gpt2, tmp_path, parts, block):
    text = "".join(parts).removeprefix("\ufeff").replace("\0", "")
    (tmp_path / "a.txt").write_bytes(text.encode())
    rows = rows_of(tmp_path / "a.txt", BLOCK=block)
    assert b"".join(rows) == (SEPARATOR + text.encode() if text else b"")
    tokens = [token for row in rows for token in gpt2.encode_ordinary(row.removeprefix(SEPARATOR).decode())]
    assert tokens == gpt2.encode_ordinary(text)


def test_a_long_text_comes_in_bounded_pieces_and_its_line_ends_stay(tmp_path):
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:200_000].replace("\n", "\r\n")
    (tmp_path / "a.md").write_bytes(text.encode())
    rows = rows_of(tmp_path / "a.md", BLOCK=10_000)
    assert b"".join(rows) == SEPARATOR + text.encode() and max(map(len, rows)) < 30_000
    (tmp_path / "a.md").write_text("one two three")                         # a cut between two blocks, too
    assert rows_of(tmp_path / "a.md", BLOCK=1) == [SEPARATOR + b"one", b" two", b" three"]


@pytest.mark.parametrize("name, data, documents", [
    ("a.txt", b"", []), ("a.jsonl", b"\n \r\n", []), ("a.csv", b"", []), ("a.csv", b"text\n\n", []),
    ("a.jsonl", b'\n{"text": "a"}\r\n  \n{"text": null}\n{"text": "b\\r"}', ["a", "", "b\r"]),
    ("a.csv", b'id,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,\r\n', ['a, "b"\r\nc', ""]),
    ("a.jsonl", rb'''{"text": "\ud800 x"}
{"text": "\ud83d\ude42"}''', ["\ufffd x", "🙂"]),                        # a lone surrogate, and a pair
    ("a.txt.gz", gzip.compress(b"one\r\n", mtime=0) + gzip.compress(b"two", mtime=0), ["one\r\ntwo"]),
    ("a.txt", b"\xef\xbb\xbfwords", ["words"]), ("a.jsonl", b'\xef\xbb\xbf{"text": "words"}', ["words"]),
    ("a.csv", b"\xef\xbb\xbftext\nwords\n", ["words"]),
    ("a.csv.gz", gzip.compress(b"\xef\xbb\xbftext\nwords\n", mtime=0), ["words"])])
def test_what_a_file_holds_and_empty_lines_and_byte_order_marks_are_no_text(name, data, documents, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == documents


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view(),
                                  pyarrow.dictionary(pyarrow.int32(), pyarrow.string())], ids=str)
def test_every_kind_of_string_column_is_read_and_null_is_an_empty_document(kind, tmp_path):
    texts = ["", "é", "word " * 40, None] * 50
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if "dict" in str(kind) else column.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"body": column}), tmp_path / "a.parquet", row_group_size=70)
    assert read(tmp_path / "a.parquet", "body") == [text or "" for text in texts]


BAD = {                                           # file: its bytes, and what the error has to say
    "latin.txt": ("caf\xe9 ".encode("latin-1") * 50, "utf-8"),
    "utf16.txt": (("word " * 50).encode("utf-16"), "UTF-16"),
    "utf16le.txt": (("word " * 50).encode("utf-16-le"), "UTF-16"), "no.txt.gz": b"not packed",
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}', "line 2"), "latin.csv": b"text\n\xe9\n",
    "half.jsonl": (b'{"text": "a"}\n\n{"text": "cut o', "line 3"), "list.jsonl": (b"[1]\n", "line 1"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 0}\n', "line 2"), "deep.jsonl": (b"[" * 100_000, "line 1"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "--text_field"), "none.jsonl": (b"{}", "--text_field"),
    "other.csv": (b"id,body\n1,a\n", "--text_field"), "few.csv": (b"id,text\n1,a\n2\n", "line 3"),
    "many.csv": (b"id,text\n1,Hello, world\n", "line 2"), "open.csv": b'id,text\n1,"never closed\n',
    "cut.jsonl.gz": gzip.compress(json.dumps({"text": str([*range(9999)])}).encode())[:-200],
    "no.jsonl.zst": b"not packed", "no.parquet": b"not parquet", "empty.parquet": b""}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_named_with_the_cause(name, tmp_path):
    data, said = BAD[name] if isinstance(BAD[name], tuple) else (BAD[name], "")
    (tmp_path / name).write_bytes(data)
    refused(lambda: read(tmp_path / name), name, said)


@pytest.mark.parametrize("column, said", [
    (pyarrow.array([1, 2]), "int64"), (pyarrow.array([b"a", b"b"]), "binary"),
    (pyarrow.array([None, None], pyarrow.null()), "null"),
    (pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(np.array([0, 2], np.int32)),
                                                      pyarrow.py_buffer(b"\xe9a")]), "UTF")])
def test_a_column_that_is_no_text_is_refused(column, said, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path := tmp_path / "a.parquet")
    refused(lambda: read(path), path, said)
    refused(lambda: read(path, "body"), path, "--text_field")


def test_a_small_parquet_that_repeats_a_long_document_does_not_fill_the_memory(tmp_path):
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 800, pyarrow.int32()),
                                                 pyarrow.array(["word " * 200_000]))
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10**6
    with little_memory(400):                                                    # of 800 MB
        rows = read_chunks(tmp_path / "a.parquet", Layout(), SEPARATOR, "a.parquet")
        assert sum(map(len, rows)) == 800 * (10**6 + len(SEPARATOR))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz", "a.csv"])
def test_a_line_without_an_end_does_not_fill_the_memory(name, tmp_path):
    with pyarrow.output_stream(str(tmp_path / name),
                               compression="gzip" if name.endswith("gz") else None) as file:
        for _ in range(60):
            file.write(b"x" * 10**6)
    with little_memory(55):
        refused(lambda: read(tmp_path / name, MAX_DOCUMENT=10**7), name)


@pytest.mark.parametrize("name, kind", [("a.TXT", ".txt"), ("b/c.d.jsonl.ZST", ".jsonl"), ("x.md", ".md"),
                                        ("a.parquet", ".parquet"), ("a.parquet.gz", ""), ("a.gz", ""),
                                        (".txt", ""), ("a.txt.bak", "")])
def test_the_end_of_a_name_says_how_a_file_is_read(name, kind):
    assert kind_of(name) == kind


# ----------------------------------------------------------------------------- the tokenizer

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
    assert encoding is tokenizer() and encoding.n_vocab == 50257 and encoding.eot_token == EOT == 50256
    for one in (gpt2, encoding):
        assert [one.decode_single_token_bytes(i) for i in range(EOT)] == [*token_bytes()]
    assert token_lengths().tolist() == [len(gpt2.decode_single_token_bytes(i)) for i in range(EOT)] + [0]


@pytest.mark.parametrize("name", ["vocab.bpe", "encoder.json"])
def test_a_changed_or_missing_asset_is_refused(name, tmp_path, monkeypatch):
    pytest.importorskip("gigatoken")
    path = shutil.copytree(ROOT / "assets", tmp_path / "assets") / name
    monkeypatch.setattr(runtime.tokenizer, "ASSETS", path.parent)
    for damage in (lambda: path.write_bytes(path.read_bytes() + b" "), path.unlink):
        damage()
        for read_it in (lambda: checked_asset(name), Encoder):
            refused(read_it, path)


def test_a_run_of_white_space_too_long_for_tiktoken_is_a_users_mistake_and_none_for_gigatoken(encoder):
    pytest.importorskip("gigatoken")
    refused(lambda: encode(" " * 1_000_000 + "a"), "white space")
    tokens = encoder.encode(encoder.mark + b" " * 1_000_000 + b"a")
    assert tokenizer().decode(tokens[1:].tolist()) == " " * 1_000_000 + "a"

def row_of(encoder, documents):
    return b"".join(encoder.mark + text.encode() for text in documents)


def is_known(character):
    """Whether Python's Unicode, of version 16 at most, has it. gigatoken knows the letters of Unicode 17, and
    tiktoken does not."""
    return unicodedata.category(character) != "Cn"


def test_every_code_point_has_tiktokens_tokens_before_a_contraction_and_beside_letters(gpt2):
    """Of the planes that Unicode uses; of the long stretches of Hangul and Chinese some."""
    codes = [chr(c) for c in (*range(0x3400), *range(0x3400, 0xa000, 41), *range(0xa000, 0xac00),
                              *range(0xac00, 0xd7b0, 41), *range(0xf900, 0x17000),
                              *range(0x17000, 0x18000, 41), *range(0x18000, 0x20000),
                              *range(0x20000, 0x34000, 41)) if is_known(chr(c))]
    assert len(codes) > 30_000
    documents = ["".join(f"{c}'s{c} 1{c}{c}" for c in codes[i:i + 512]) for i in range(0, len(codes), 512)]
    random.Random(0).shuffle(documents)
    encoder = Encoder()
    for i in range(0, len(documents), 3):
        tokens = encoder.encode(row_of(encoder, documents[i:i + 3]))
        assert tokens.dtype == np.uint16 and tokens.tolist() == stream_of(gpt2, documents[i:i + 3]), i


def test_letters_that_are_new_in_unicode_17_end_the_run_or_have_tiktokens_tokens(gpt2, encoder):
    for text in ("\u088f's", "\U00010940's", "\U00033479's"):
        row = row_of(encoder, [text])
        try:
            assert encoder.encode(row).tolist() == stream_of(gpt2, [text])
        except RunError as error:
            assert "--encoder tiktoken" in str(error)
        reference = Encoder("tiktoken")
        assert reference.encode(row_of(reference, [text])).tolist() == stream_of(gpt2, [text])


PIECES = st.sampled_from([*"aZ09 \n\r\t'é中🙂²½\u0301\u200b\u200d\ufeff\x00\x1c\x85ࢎ", "'s",
                          "'ll", "'RE", "  ", "<|endoftext|>", "<|endof", "it's", " word", "<|", "|>"])


@FAST
@given(st.lists(st.lists(PIECES | st.characters(codec="utf-8").filter(is_known), max_size=12).map("".join),
                max_size=8))
def test_any_documents_have_tiktokens_tokens(gpt2, encoder, texts):
    assert encoder.encode(row_of(encoder, texts)).tolist() == stream_of(gpt2, texts)
    text = "".join(texts)                         # a row that continues a document
    assert encoder.encode(text.encode()).tolist() == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("unit", [" ", "\n", "a", "é", "'", "1", "ab ", "\u0301", "🙂", "中"])
def test_long_runs_have_tiktokens_tokens(unit, gpt2, encoder):
    texts = [unit * 9000, "b" + unit * 3001 + "c", ""]
    assert encoder.encode(row_of(encoder, texts)).tolist() == stream_of(gpt2, texts)


def test_no_text_holds_the_separator_and_each_process_has_its_own(encoder, gpt2):
    assert Encoder().mark != encoder.mark
    other = Encoder().mark.decode()
    assert encoder.encode(row_of(encoder, [other])).tolist() == stream_of(gpt2, [other])


def test_tokens_that_are_not_tiktokens_end_the_run(gpt2, encoder, monkeypatch):
    """In the first kilobyte of a row, a megabyte of text: the others are a matter of trust."""
    pytest.importorskip("gigatoken")
    right, wrong_at = encoder.gigatoken, [0, 0]             # the first token that is wrong, and how many are

    def wrong(*args, **kwargs):
        tokens, lengths = right.encode_batch_padded(*args, **kwargs)
        at, count = wrong_at
        tokens[0, at:at + count] ^= 1
        return tokens, lengths
    monkeypatch.setattr(encoder, "gigatoken", SimpleNamespace(encode_batch_padded=wrong))
    for text, places in (("one two three four", (0, 1, 3)), ("word " * 10_000, (0, 1, 100, 180))):
        for row in (row_of(encoder, [text]), text.encode(), row_of(encoder, ["", text])):
            wrong_at[:] = 0, 0
            tokens = encoder.encode(row)
            for at in places:
                wrong_at[:] = at, 1
                line = refused(lambda row=row: encoder.encode(row), "differ", "--encoder tiktoken",
                               "requirements.txt", failed=True)
                near = [token for token in tokens[max(0, at - 1):at + 2].tolist() if token < 50256]
                assert gpt2.decode(near) in line.replace("<|endoftext|>", "")
    wrong_at[:] = 1000, 9000
    assert encoder.encode(row_of(encoder, ["word " * 10_000])).tolist()[:1000] == [
        50256, *gpt2.encode_ordinary("word " * 10_000)[:999]]


def test_a_token_too_many_or_too_few_at_the_end_of_a_short_row_ends_the_run(encoder, monkeypatch):
    pytest.importorskip("gigatoken")
    right, row = encoder.gigatoken, row_of(encoder, ["one two three"])
    for length in (3, 5):
        def wrong(*args, length=length, **kwargs):
            tokens, _ = right.encode_batch_padded(*args, **kwargs)
            return np.concatenate((tokens, tokens), axis=1), [length]
        monkeypatch.setattr(encoder, "gigatoken", SimpleNamespace(encode_batch_padded=wrong))
        refused(lambda: encoder.encode(row), "differ", failed=True)


def test_tiktoken_does_the_work_without_gigatoken_or_where_it_is_asked_for(gpt2, monkeypatch):
    asked = Encoder("tiktoken")
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    for encoder in (asked, Encoder()):
        assert encoder.gigatoken is None
        assert encoder.encode(row_of(encoder, DOCUMENTS)).tolist() == stream_of(gpt2, DOCUMENTS)
    with pytest.raises(ModuleNotFoundError):
        Encoder("gigatoken")
