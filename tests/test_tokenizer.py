"""runtime/tokenizer.py: GPT-2's tokens, whose reference is tiktoken's own encoding of them."""
import hashlib
import random
import sys
import threading
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from texts import DOCUMENTS, SCRIPTS, tokens_of

import runtime.tokenizer
from runtime.cli import RunError, UserError
from runtime.tokenizer import (
    EOT, Encoder, bpe_file, encode, token_bytes, token_lengths, tokenizer)

# The same examples in every run, and no look at the clock.
FAST = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))
SPACES = " \n\r\t\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000"


def chunk_of(encoder, documents):
    return b"".join(encoder.mark + text.encode() for text in documents)


def is_known(character):
    """Whether Python's Unicode has it. gigatoken knows the letters of Unicode 17, which are no
    letters to tiktoken yet."""
    return unicodedata.category(character) != "Cn"


# ------------------------------------------------------------------------- tiktoken

CHARACTERS = st.characters() | st.characters(categories=["Cs"])


@FAST
@given(st.text(CHARACTERS | st.sampled_from(SPACES + "'sdtlvre 09")))
@example("<|endoftext|> and <|endoftext|>")
@example("\ud800 a lone surrogate, and a pair: \ud83d\ude42")
def test_tokens_equal_tiktokens_own_gpt2(gpt2, text):
    tokens = encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == gpt2.encode_ordinary(text)


def test_the_tokenizer_has_gpt2s_vocabulary(gpt2):
    encoding = tokenizer()
    assert encoding.n_vocab == 50257
    assert encoding.eot_token == EOT == 50256

    expected = [gpt2.decode_single_token_bytes(i) for i in range(EOT)]
    assert [encoding.decode_single_token_bytes(i) for i in range(EOT)] == expected
    assert list(token_bytes()) == expected
    assert token_lengths().tolist() == [*map(len, expected), 0]


def test_the_tokenizer_is_built_once():
    assert tokenizer() is tokenizer()


# As tiktoken checks them, tiktoken_ext/openai_public.py.
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@pytest.mark.parametrize("name", SHA256)
def test_the_two_files_in_assets_are_gpt2s(name):
    data = (ROOT / "assets" / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256[name]


def test_a_text_that_tiktoken_refuses_is_a_users_mistake():
    def encode_to_numpy(text, disallowed_special):
        raise ValueError("as tiktoken does for a long run of white space")

    refusing = SimpleNamespace(encode_to_numpy=encode_to_numpy)
    with pytest.raises(UserError, match="white space"):
        encode("a", refusing)


# ------------------------------------------------------------------------- gigatoken

def test_every_code_point_has_tiktokens_tokens_beside_letters_and_contractions(gpt2, encoder):
    # Of the planes that Unicode uses; of the long stretches of Hangul and Chinese some.
    ranges = [range(0x3400), range(0x3400, 0xa000, 41), range(0xa000, 0xac00),
              range(0xac00, 0xd7b0, 41), range(0xf900, 0x17000), range(0x17000, 0x18000, 41),
              range(0x18000, 0x20000), range(0x20000, 0x34000, 41)]
    characters = [chr(code) for codes in ranges for code in codes if is_known(chr(code))]
    assert len(characters) > 30_000

    documents = []
    for i in range(0, len(characters), 512):
        documents.append("".join(f"{c}'s{c} 1{c}{c}" for c in characters[i:i + 512]))
    random.Random(0).shuffle(documents)

    tokens = encoder.encode(chunk_of(encoder, documents))
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == tokens_of(gpt2, documents)


@pytest.mark.parametrize("text", ["\u088f's", "\U00010940's", "\U00033479's"])
def test_letters_new_in_unicode_17_end_the_run_or_have_tiktokens_tokens(text, gpt2, encoder):
    try:
        tokens = encoder.encode(chunk_of(encoder, [text]))
    except RunError as error:
        assert "--encoder tiktoken" in str(error)
    else:
        assert tokens.tolist() == tokens_of(gpt2, [text])


PIECES = st.sampled_from([
    *"aZ09 \n\r\t'é中🙂²½\u0301\u200b\u200d\ufeff\x00\x1c\x85ࢎ", "'s", "'ll", "'RE", "  ",
    "<|endoftext|>", "<|endof", "it's", " word", "<|", "|>"])
KNOWN = st.characters(codec="utf-8").filter(is_known)
TEXTS = st.lists(PIECES | KNOWN, max_size=12).map("".join)


@FAST
@given(st.lists(TEXTS, max_size=8))
def test_any_documents_have_tiktokens_tokens(gpt2, encoder, texts):
    tokens = encoder.encode(chunk_of(encoder, texts))
    assert tokens.tolist() == tokens_of(gpt2, texts)


@FAST
@given(TEXTS)
def test_a_chunk_that_continues_a_document_has_no_endoftext(gpt2, encoder, text):
    assert encoder.encode(text.encode()).tolist() == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("unit", [" ", "\n", "a", "é", "'", "1", "ab ", "\u0301", "🙂", "中"])
def test_long_runs_have_tiktokens_tokens(unit, gpt2, encoder):
    texts = [unit * 9000, "b" + unit * 3001 + "c", ""]
    assert encoder.encode(chunk_of(encoder, texts)).tolist() == tokens_of(gpt2, texts)


def test_each_encoder_has_a_mark_of_its_own_and_no_text_holds_it(encoder, gpt2):
    other = Encoder().mark
    assert other != encoder.mark
    texts = [other.decode()]
    assert encoder.encode(chunk_of(encoder, texts)).tolist() == tokens_of(gpt2, texts)


def make_wrong(encoder, monkeypatch, at):
    """From now on gigatoken's token number `at` is another one than tiktoken's."""
    right = encoder.gigatoken

    def encode_batch_padded(*args, **kwargs):
        tokens, lengths = right.encode_batch_padded(*args, **kwargs)
        tokens[0, at] ^= 1
        return tokens, lengths

    wrong = SimpleNamespace(encode_batch_padded=encode_batch_padded)
    monkeypatch.setattr(encoder, "gigatoken", wrong)


@pytest.mark.parametrize("text, at", [
    ("one two three four", 0), ("one two three four", 3), ("word " * 10_000, 0),
    ("word " * 10_000, 180)])
def test_tokens_that_are_not_tiktokens_end_the_run(text, at, encoder, monkeypatch):
    pytest.importorskip("gigatoken")
    make_wrong(encoder, monkeypatch, at)
    with pytest.raises(RunError, match="--encoder tiktoken"):
        encoder.encode(chunk_of(encoder, [text]))
    with pytest.raises(RunError, match="--encoder tiktoken"):
        encoder.encode(text.encode())


@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_are_compared_in_every_script_with_and_without_blanks(script, encoder, monkeypatch):
    pytest.importorskip("gigatoken")
    text = SCRIPTS[script].replace(" ", "") * 200
    encoder.encode(text.encode())
    make_wrong(encoder, monkeypatch, 150)
    with pytest.raises(RunError, match="--encoder tiktoken"):
        encoder.encode(text.encode())


RUNS = st.sampled_from(["ACGT", "actg", "a", "-", "=", "0123456789", "é", "🙂", "กข", "中", "'s"])


@FAST
@given(RUNS, st.integers(0, 40), TEXTS)
def test_wherever_the_sample_ends_right_tokens_are_taken(gpt2, encoder, run, length, text):
    # The second document begins before, in, or behind the last bytes of the sample.
    texts = [run * ((960 + length - len(encoder.mark)) // len(run.encode())), text + run * 300]
    assert encoder.encode(chunk_of(encoder, texts)).tolist() == tokens_of(gpt2, texts)


def test_only_the_first_kilobyte_of_a_chunk_is_compared(encoder, monkeypatch):
    pytest.importorskip("gigatoken")
    make_wrong(encoder, monkeypatch, 5000)
    assert len(encoder.encode(chunk_of(encoder, ["word " * 10_000]))) == 10_002


@pytest.mark.parametrize("length", [3, 5])
def test_a_token_too_many_or_too_few_at_the_end_of_a_short_chunk_ends_the_run(
        length, encoder, monkeypatch):
    pytest.importorskip("gigatoken")
    right = encoder.gigatoken

    def encode_batch_padded(*args, **kwargs):
        tokens, _ = right.encode_batch_padded(*args, **kwargs)
        return np.concatenate((tokens, tokens), axis=1), [length]

    wrong = SimpleNamespace(encode_batch_padded=encode_batch_padded)
    monkeypatch.setattr(encoder, "gigatoken", wrong)
    with pytest.raises(RunError):
        encoder.encode(chunk_of(encoder, ["one two three"]))            # four tokens


def test_gigatoken_is_loaded_anew_before_it_has_kept_too_much(gpt2, monkeypatch):
    pytest.importorskip("gigatoken")
    encoder = Encoder()
    loaded = []

    def load_gigatoken(mark):
        loaded.append(mark)
        return encoder.gigatoken

    monkeypatch.setattr(runtime.tokenizer, "load_gigatoken", load_gigatoken)
    encoder.encode(b"words")
    assert loaded == []

    encoder.seconds = runtime.tokenizer.FRESH_SECONDS
    for _ in range(2):                          # the second one has one that is fresh
        assert encoder.encode(chunk_of(encoder, DOCUMENTS)).tolist() == tokens_of(gpt2, DOCUMENTS)
        assert loaded == [encoder.mark.decode()]


# ------------------------------------------------------------------------- without gigatoken

def test_tiktoken_does_the_work_where_it_is_asked_for(gpt2):
    encoder = Encoder("tiktoken")
    assert encoder.gigatoken is None
    assert encoder.encode(chunk_of(encoder, DOCUMENTS)).tolist() == tokens_of(gpt2, DOCUMENTS)


def test_tiktoken_does_the_work_where_gigatoken_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert Encoder().gigatoken is None
    with pytest.raises(ModuleNotFoundError):
        Encoder("gigatoken")


def test_each_thread_has_an_encoding_of_its_own_where_tiktoken_does_the_work(monkeypatch):
    made = []
    new_encoding = runtime.tokenizer.new_encoding

    def noted():
        made.append(threading.get_ident())
        return new_encoding()

    monkeypatch.setattr(runtime.tokenizer, "new_encoding", noted)
    encoder = Encoder("tiktoken")
    for _ in range(2):
        thread = threading.Thread(target=encoder.encode, args=(b"words",))
        thread.start()
        thread.join()
    encoder.encode(b"words")
    encoder.encode(b"words")
    assert len(made) == 3


def test_a_changed_bpe_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    monkeypatch.setattr(runtime.tokenizer, "ASSETS", tmp_path)
    with pytest.raises(UserError, match="vocab.bpe"):
        bpe_file("vocab.bpe")
