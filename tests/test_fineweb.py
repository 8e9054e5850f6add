"""fineweb.py: the tokenizer, text -> shards (kills and bad input included), shards -> batches."""
import base64
import gzip
import hashlib
import http.server
import io
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from helpers import HANG, script, wait_until
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import corpus.encoding
import corpus.hub
import corpus.hub_source
import corpus.progress
import corpus.shard_writer
import corpus.sources
import fineweb
import runtime.dataloader
import runtime.shards
import runtime.tokenizer
from corpus.encoding import encode_stream
from corpus.hub import RETRIES
from corpus.hub_source import HubSource
from corpus.readers import read_txt
from corpus.shard_writer import VAL_SEED, draw_validation, file_sha256
from corpus.sources import LocalSource, Piece
from corpus.verify import recorded_sums
from runtime.cli import RunError, UserError, parse_int
from runtime.dataloader import TokenDataset
from runtime.files import digest, fingerprint_blocks, replace_file, writable
from runtime.presets import PRESETS
from runtime.shards import list_shards, open_shard, write_shard
from runtime.tokenizer import EOT, checked_asset, encode, tokenizer

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
# the same examples in every run, and no look at the clock
FAST = settings(max_examples=60, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))
SPACES = " \n\r\t\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2028\u3000"    # white space to Rust, to Python, or to both

# documents as they come: short, long, empty, with the special token's name, other scripts, odd white space
DOCUMENTS = ["Hello, world.", "", "<|endoftext|>", " \n\n\t x  y", "naïve café 中文 🙂 \u200b", "a" * 300,
             "word " * 400, "def f(x):\r\n    return x\r\n", "",
             *[f"Document {i}: " + "it's 1 of many. " * (i % 13) for i in range(150)]]


# -----------------------------------------------------------------------------
# plain references

@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's encoding made by tiktoken's own loader."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")               # tiktoken would otherwise keep a copy in a cache
        ranks = data_gym_to_mergeable_bpe_ranks(str(ROOT / "assets/vocab.bpe"),
                                                str(ROOT / "assets/encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256}, explicit_n_vocab=50257)


def plain_shards(gpt2, documents, shard_size):
    """build-nanogpt's shards: one stream of 50256 + tokens a document, cut every `shard_size`."""
    stream = [token for text in documents for token in (50256, *gpt2.encode_ordinary(text))]
    return [stream[i:i + shard_size] for i in range(0, len(stream), shard_size)]


def mask_of(tokens, count, seed):
    """Which tokens are drawn for validation."""
    chosen = np.zeros(len(tokens), dtype=int)
    for begin, end in draw_validation(np.flatnonzero(tokens == 50256), len(tokens), count, seed):
        chosen[begin:end] += 1
    assert chosen.max(initial=0) <= 1
    return chosen.astype(bool)


def own_shards(gpt2, documents, val_tokens, shard_size, limit=None):
    """Shards of a user's own text: the validation tokens are drawn from those of the first two."""
    stream = np.array(plain_shards(gpt2, documents, 2**30)[0][:limit], dtype=np.uint16)
    first, rest = stream[:val_tokens + shard_size], stream[val_tokens + shard_size:]
    count = val_tokens if val_tokens < len(first) else len(first) // 10
    chosen = mask_of(first, count, VAL_SEED)
    train = [*first[~chosen].tolist(), *rest.tolist()]
    return [first[chosen].tolist(), *(train[i:i + shard_size] for i in range(0, len(train), shard_size))]


def read_shards(folder):
    return [open_shard(path).tolist() for split in ("val", "train") for path in list_shards(folder, split)]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_parquet(path, documents, **options):
    table = pyarrow.table({"id": range(len(documents)), "text": documents})
    pyarrow.parquet.write_table(table, path, **options)


def write_text(path, documents):
    """Writes `documents` in the format that the name asks for."""
    rows = (json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in documents)
    lines = "".join(rows).encode()
    if path.suffix == ".parquet":
        write_parquet(path, documents, row_group_size=40)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(lines)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def texts_of(source, *args, **kwargs):
    return [bytes(text).decode() if isinstance(text, memoryview) else text
            for text, *_ in source.read(*args, **kwargs)]


def pieces_of(path, size=1 << 18):
    """Of a .txt file."""
    return [*read_txt(Path(path), 1, lambda task: True, piece_size=size)]


def cursors_of(source, **kwargs):
    """[[number, state]] as a manifest keeps them."""
    cursors = [[number, piece.cursor] for number, piece in enumerate(source.read(**kwargs))
               if piece.cursor is not None]
    return json.loads(json.dumps(cursors))


def prepare(*args):
    fineweb.main([str(arg) for arg in args])


def command(*args, cwd=None, env=ENV):
    return script("fineweb.py", *args, env=env, cwd=cwd)


def hub_at(endpoint):
    """The environment in which a command takes `endpoint` for the Hugging Face hub."""
    env = {name: value for name, value in ENV.items() if name != "HF_HUB_OFFLINE"}
    return {**env, "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


NO_HUB = "http://127.0.0.1:9"                 # nobody answers there


# -----------------------------------------------------------------------------
# the tokenizer

@FAST
@given(st.text(st.one_of(st.characters(), st.characters(categories=["Cs"]),
                         st.sampled_from(SPACES + "'sdtlvre 09"))))
@example("<|endoftext|> and <|endoftext|>")
@example("\ud800 a lone surrogate, and a pair: \ud83d\ude42")
@example("  \n\n trailing \u3000\u3000")
def test_tokens_equal_tiktokens_own_gpt2(gpt2, text):
    tokens = encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == gpt2.encode_ordinary(text)


def test_tokenizer_has_gpt2s_vocabulary_and_is_built_once(gpt2):
    encoding = tokenizer()
    assert encoding is tokenizer()
    assert encoding.n_vocab == 50257 and encoding.eot_token == EOT == 50256 and encoding.name == "gpt2"
    assert encoding._mergeable_ranks == gpt2._mergeable_ranks
    assert encoding.decode(encode("Hello, wörld 🙂").tolist()) == "Hello, wörld 🙂"


@pytest.mark.parametrize("damage", [lambda path: path.unlink(),
                                    lambda path: path.write_bytes(path.read_bytes() + b" ")])
@pytest.mark.parametrize("name", ["vocab.bpe", "encoder.json"])
def test_a_changed_or_missing_asset_is_refused(name, damage, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "assets", tmp_path / "assets")
    damage(tmp_path / "assets" / name)
    monkeypatch.setattr(runtime.tokenizer, "ASSETS", tmp_path / "assets")
    with pytest.raises(UserError, match="git checkout"):
        checked_asset(name)
    if name == "encoder.json":
        with pytest.raises(UserError, match="encoder.json"):
            runtime.tokenizer.token_bytes.__wrapped__()


def test_a_run_of_white_space_too_long_for_tiktoken_is_a_users_mistake():
    with pytest.raises(UserError, match="white space"):
        encode(" " * 1_000_000 + "a")


# -----------------------------------------------------------------------------
# writing

@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_equal_a_plain_writers(name, workers, gpt2, tmp_path):
    write_text(tmp_path / name, DOCUMENTS)
    for size in (97, 1000, 2**20):            # 97: documents that span several shards
        out = tmp_path / f"out{size}"
        prepare("--input", tmp_path / name, "--out", out, "--shard_size", size,
                "--val_tokens", min(size, 1000), "--workers", workers)
        want = own_shards(gpt2, DOCUMENTS, min(size, 1000), size)
        assert read_shards(out) == want
        names = sorted(path.name for path in out.glob("*.npy"))
        train = [f"text_train_{i:06d}.npy" for i in range(1, len(want))]
        assert names == [*train, "text_val_000000.npy"]
        assert all(np.load(out / name).dtype == np.uint16 for name in names)


def test_a_text_that_ends_with_a_full_shard_leaves_no_empty_one(gpt2, tmp_path):
    stream = sum(plain_shards(gpt2, DOCUMENTS, 2**20), [])
    size = max(n for n in range(1, 100) if len(stream) % n == 0)
    size *= len(stream) // size // 2 if len(stream) // size % 2 == 0 else 1
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--shard_size", size,
            "--val_tokens", size)
    assert [len(shard) for shard in read_shards(tmp_path / "out")] == [size] * (len(stream) // size)


def test_small_pieces_are_encoded_together_in_their_order(gpt2, monkeypatch):
    documents = [(text, i % 3 > 0) for i, text in enumerate(DOCUMENTS * 3)]
    want = [[50256] * starts + gpt2.encode_ordinary(text) for text, starts in documents]
    pieces = [Piece(text, starts, None if i % 5 else i) for i, (text, starts) in enumerate(documents)]
    for size in (1, 1000, 1 << 22):
        monkeypatch.setattr(corpus.encoding, "BATCH", size)
        found, number, cursors = list(encode_stream(pieces, 2)), 0, []
        for batch in found:
            cursors += [(number + n, state) for n, state in batch.cursors]
            number += len(batch.lengths)
        assert cursors == [(i, i) for i in range(0, len(documents), 5)]
        assert [n for batch in found for n in batch.lengths] == list(map(len, want))
        assert np.concatenate([batch.tokens for batch in found]).tolist() == sum(want, [])


def test_several_inputs_globs_and_folders_are_read_in_order(gpt2, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_text(folder / "b.jsonl", DOCUMENTS[:50])
    write_text(folder / "a.parquet", DOCUMENTS[50:90])
    write_text(folder / "c.jsonl.gz", DOCUMENTS[90:])
    # gzip files may be concatenated
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"one\r\n") + gzip.compress(b"two"))
    want = DOCUMENTS[50:90] + DOCUMENTS[:50] + DOCUMENTS[90:] + ["one\r\ntwo"]
    choices = [folder / "*"], [folder], [folder / "a*", folder / "b.jsonl", folder / "[cd]*"]
    for i, inputs in enumerate(choices):
        flags = [arg for path in inputs for arg in ("--input", path)]
        prepare(*flags, "--out", tmp_path / str(i), "--val_tokens", 1000)
        assert read_shards(tmp_path / str(i)) == own_shards(gpt2, want, 1000, 10**8)


def test_the_words_that_a_shell_makes_of_a_glob_are_all_taken_and_mixed_with_repeated_flags(gpt2, tmp_path,
                                                                                            monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(6):
        write_text(tmp_path / f"{i}.jsonl", DOCUMENTS[i * 20:i * 20 + 20])
    choices = (["--input", *"012345"], ["--input", "0", "1", "--input", "2", "--input", "3", "4", "5"],
               ["--input", "[0-3].jsonl", "4", "--input", "5"])
    for i, flags in enumerate(choices):
        flags = [f"{flag}.jsonl" if flag.isdigit() else flag for flag in flags]
        prepare(*flags, "--out", f"out{i}", "--val_tokens", 1000)
        assert read_shards(tmp_path / f"out{i}") == own_shards(gpt2, DOCUMENTS[:120], 1000, 10**8)


@settings(FAST, max_examples=150)
@given(st.lists(st.one_of(st.sampled_from(["\n\n", "\n\n\n", " ", "    ", "\r\n", "a", "'s", "1.", "é中",
                                           *SPACES]),
                          st.characters(codec="utf-8"))), st.integers(1, 8))
@example(["a\n\n b\r\n\r\nc \n d\n\n"], 1)
@example(["a\n\n\n b"], 3)
@example(["a\x1c b\x85 c\u3000 d"], 2)
def test_the_pieces_of_a_txt_file_have_the_tokens_of_the_whole(gpt2, tmp_path, parts, piece_size):
    text = "".join(parts)
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = pieces_of(tmp_path / "a.txt", piece_size)
    assert "".join(pieces) == text
    tokens = [token for piece in pieces for token in gpt2.encode_ordinary(piece)]
    assert tokens == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_long_txt_file_is_one_document_in_bounded_pieces(end, gpt2, tmp_path):
    text = (ROOT / "input.txt").read_text(encoding="utf-8").replace("\n", end)
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert max(map(len, pieces_of(tmp_path / "a.txt", 10_000))) < 20_000
    prepare("--input", tmp_path / "a.txt", "--out", tmp_path / "out")
    val, train = read_shards(tmp_path / "out")
    stream = [50256] + gpt2.encode_ordinary(text)
    place = next(i for i, (a, b) in enumerate(zip(train, stream, strict=False)) if a != b)
    assert place > 0 and train[:place] + val + train[place:] == stream        # one piece of it
    assert 0.05 < len(val) / len(train) < 0.15         # the default: about a tenth


def test_the_bin_format_is_llm_c_s_and_holds_the_same_tokens(tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    for kind in ("npy", "bin"):
        prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / kind, "--shard_size", 3000,
                "--val_tokens", 500, "--format", kind)
    assert read_shards(tmp_path / "bin") == read_shards(tmp_path / "npy")
    for path in (tmp_path / "bin").glob("*.bin"):
        data = path.read_bytes()
        header, tokens = np.frombuffer(data[:1024], "<i4"), np.frombuffer(data[1024:], "<u2")
        assert header[:3].tolist() == [20240520, 1, len(tokens)] and not header[3:].any()
        assert tokens.tolist() == open_shard(path.with_suffix(".bin")).tolist()
    assert len(list((tmp_path / "bin").glob("*.bin"))) == len(list((tmp_path / "npy").glob("*.npy")))


@pytest.mark.parametrize("limit", [1000, 1001, 1300, 2000, 2017, 10**9])
def test_max_tokens_and_val_tokens_cut_the_stream_exactly(limit, gpt2, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--shard_size", 700,
            "--val_tokens", 300, "--max_tokens", limit)
    assert read_shards(tmp_path / "out") == own_shards(gpt2, DOCUMENTS, 300, 700, limit)


def test_a_corpus_smaller_than_the_validation_shard_is_divided_one_to_nine(gpt2, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_tokens", 10**6,
            "--shard_size", 4000)
    shards = read_shards(tmp_path / "out")
    assert shards == own_shards(gpt2, DOCUMENTS, 10**6, 4000)
    assert [len(shard) for shard in shards[:2]] == [sum(map(len, shards)) // 10, 4000] and len(shards) > 2


def test_the_manifest_says_where_each_shard_ends_in_the_source(gpt2, tmp_path):
    path = write_text(tmp_path / "a.jsonl", DOCUMENTS)
    for val_tokens in (300, 10**6):           # 10**6: the division 1 : 9
        out = tmp_path / str(val_tokens)
        prepare("--input", path, "--out", out, "--shard_size", 700, "--val_tokens", val_tokens)
        manifest, done = json.loads((out / "manifest.json").read_text()), 0
        documents = [[50256, *gpt2.encode_ordinary(text)] for text in DOCUMENTS]
        for i, shard in enumerate(manifest["shards"]):
            done += shard["tokens"]
            if i and (val_tokens == 300 or shard == manifest["shards"][-1]):      # else written together
                assert sum(map(len, documents[:shard["end"]["unit"]])) + shard["end"]["token"] == done
            assert len(open_shard(out / shard["file"])) == shard["tokens"]
        assert manifest["complete"] and manifest["tokens"] == done == sum(map(len, documents))
        file = manifest["source"]["files"][0]
        assert (file["name"], file["bytes"]) == ("a.jsonl", path.stat().st_size)
        sha256 = hashlib.sha256((ROOT / "assets/encoder.json").read_bytes()).hexdigest()
        assert manifest["tokenizer"]["encoder.json"] == sha256


def test_defaults_are_build_nanogpts():
    args = fineweb.parse_args([])
    assert (args.shard_size, args.variant, args.sample, args.format) == (10**8, "edu", "10BT", "npy")
    assert args.workers is args.part is args.max_tokens is None
    sizes = [fineweb.parse_args(["--shard_size", text]).shard_size for text in ("1e5", "100_000")]
    assert sizes == [10**5, 10**5]


# -----------------------------------------------------------------------------
# --text_field

def test_text_field_names_the_column_of_jsonl_and_parquet(gpt2, tmp_path):
    rows = [{"text": "not this", "body": text} for text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[60:]), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(rows[0]).encode()))
    (tmp_path / "d.txt").write_text("plain text")
    flags = ["--input", "a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt", "--out", "out", "--val_tokens", 1000,
             "--text_field", "body"]
    result = command(*flags, cwd=tmp_path)
    assert result.returncode == 0, result
    want = own_shards(gpt2, [*DOCUMENTS, DOCUMENTS[0], "plain text"], 1000, 10**8)
    assert read_shards(tmp_path / "out") == want
    assert json.loads((tmp_path / "out/manifest.json").read_text())["source"]["text_field"] == "body"
    for other, words in (("text", "source (text_field: body instead of none)"),
                         ("id", "source (text_field: body instead of id)")):
        refused = command(*flags[:-1], other, cwd=tmp_path)
        assert refused.returncode == 2 and words in refused.stderr, refused


def test_the_default_text_field_and_one_without_meaning_are_not_in_the_manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "a.txt").write_text(GOOD)
    for name, field in (("a.jsonl", "text"), ("a.txt", "body")):
        flags = ["--input", name, "--out", f"out-{name}"]
        prepare(*flags)
        before = contents(tmp_path / f"out-{name}")
        assert b"text_field" not in before["manifest.json"]
        prepare(*flags, "--text_field", field)
        assert contents(tmp_path / f"out-{name}") == before


@pytest.mark.parametrize("flags, said", [
    (["--input", "body.parquet"], "body.parquet: no column text, only body: name the right one with"),
    (["--input", "good.jsonl", "--text_field", "corpus"],
     "good.jsonl, line 1: no column corpus, only id, body: name the right one with"),
    (["--input", "some.jsonl", "--text_field", "body"], "some.jsonl, line 3: no column body, only text, x y"),
    (["--input", "empty.jsonl"], "empty.jsonl, line 1: no column text, only nothing:"),
    (["--input", "wide.parquet"], "no column text, only c0, c1, c2,"),
    (["--input", "good.jsonl", "--text_field", "id"], 'line 1 is not JSON of the form {"id": "..."}'),
    (["--input", "ids.parquet", "--text_field", "id"], "column id holds something that is not a string"),
    (["--text_field", "body"], "--text_field body needs --input"),
    (["--variant", "classic", "--text_field", "body"], "--text_field body needs --input"),
    (["--pretokenized", "2", "--text_field", "body"], "--text_field cannot be combined with --pretokenized"),
    (["--pretokenized", "2", "--text_field=text"], "--text_field cannot be combined with --pretokenized")])
def test_a_wrong_text_field_is_one_line_that_names_the_columns_and_the_flag(flags, said, tmp_path):
    (tmp_path / "good.jsonl").write_text(json.dumps({"id": 1, "body": GOOD}) + "\n")
    (tmp_path / "some.jsonl").write_text('{"body": "a"}\n\n{"text": "b", "x\\ny\\u0007": 1}\n')
    (tmp_path / "empty.jsonl").write_text("{}\n")
    pyarrow.parquet.write_table(pyarrow.table({"body": [GOOD]}), tmp_path / "body.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), tmp_path / "ids.parquet")
    wide = pyarrow.table({f"c{i}": [0] for i in range(500)})
    pyarrow.parquet.write_table(wide, tmp_path / "wide.parquet")
    result = command(*flags, "--out", "new", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result
    assert "--text_field" in result.stderr or "id" in flags
    assert len(result.stderr) < 350 and not (tmp_path / "new").exists()


# -----------------------------------------------------------------------------
# progress

# The command, with signs after a moment instead of ten seconds. It waits for a file `first` before the first
# text, and for a file `rest` before the second piece of it.
WAITS = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import fineweb
from corpus import encoding, progress, sources
from runtime import cli
progress.QUIET, encoding.BATCH = 0.1, 1
read, add, added = sources.LocalSource.read, fineweb.ShardWriter.add, []

def wait(name):
    while not Path(name).exists():
        time.sleep(0.01)

def held(source, *args):
    wait("first")
    yield from read(source, *args)

def held_add(writer, tokens):
    if added:
        wait("rest")
    added.append(tokens)
    add(writer, tokens)

sources.LocalSource.read, fineweb.ShardWriter.add = held, held_add
cli.run_command(fineweb.main)
"""


@pytest.mark.parametrize("terminal", [False, pytest.param(True, marks=pytest.mark.skipif(
    os.name == "nt", reason="no pseudo-terminals"))], ids=["log file", "terminal"])
def test_long_work_shows_that_it_goes_on(terminal, tmp_path):
    said = bytearray()

    def listen():
        with suppress(OSError):               # a pseudo-terminal whose other end is closed
            while data := os.read(reader, 1 << 16):
                said.extend(data)

    reader, writer = os.openpty() if terminal else os.pipe()
    if terminal:
        termios = pytest.importorskip("termios")
        termios.tcsetwinsize(writer, (24, 100))               # tqdm shows nothing in a window without columns
    argv = [sys.executable, "-c", WAITS, "--input", str(ROOT / "input.txt"), "--out", "out"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=writer, env=ENV, cwd=tmp_path) as process:
        os.close(writer)
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            for name, sign in (
                    ("first", rb"out: waiting for the first text: [^\r\n]*\d"),
                    ("rest", rb"out: +\d+%[^\r\n]* [0-9.]+k?/[0-9.]+k [^\r\n]*tok/s" if terminal else
                     rb"out: \d+,\d+ of \d+,\d+ tokens \(estimated\), [0-9.]+ s so far\n")):
                wait_until(lambda sign=sign: re.search(sign, bytes(said)), lambda: process.poll() is None)
                time.sleep(0.5 * terminal)                # for a sign that a terminal should not get
                (tmp_path / name).touch()
            out = process.communicate(timeout=HANG)[0].decode()
        finally:
            process.kill()
            listener.join(HANG)
            os.close(reader)
    assert process.returncode == 0 and "\nnext: python train_gpt2.py" in out
    assert (b"so far" in said) == (b"estimated" in said) == (not terminal)


def test_short_work_is_silent_in_a_log_file(tmp_path):
    result = command("--input", ROOT / "input.txt", "--out", "out", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""


# -----------------------------------------------------------------------------
# the last line

def next_line(result):
    assert result.returncode == 0 and result.stderr == "", result
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("out", ["my data", "data/it's $HOME", "plain"])
def test_the_last_line_is_a_command_that_a_shell_reads_right(out, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    line = next_line(command("--input", "a.jsonl", "--out", out, cwd=tmp_path))
    prefix, words = line.split(" ", 1)
    assert prefix == "next:"
    assert shlex.split(words) == ["python", "train_gpt2.py", "--preset", "shakespeare", "--data", out,
                                  "--out", f"log/{Path(out).name}"]
    assert list_shards(tmp_path / out, "train")


# one layer of width 16, one step
SMALL = ["--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 1, "--checkpoint_every", 0]


def trained(line, cwd, *flags):
    """What the command of a last line prints, with the flags of SMALL and `flags`."""
    python, name, *words = shlex.split(line.removeprefix("next: "))
    result = script(name, *words, *SMALL, *flags, cwd=cwd)
    assert python == "python" and result.returncode == 0, result
    return result.stdout


def test_the_last_line_names_the_preset_for_so_many_training_tokens(tmp_path):
    """And with a tiny validation split, which does not shorten the sequences, the command runs."""
    (tmp_path / "a.txt").write_text(" a" * 8_200_100)         # a token each
    for tokens, preset in ((8_199_999, "shakespeare"), (8_200_000, "small")):
        result = command("--input", "a.txt", "--out", preset, "--val_tokens", 50, "--max_tokens", tokens + 50,
                         cwd=tmp_path)
        assert f"{tokens:,} for training" in result.stdout
        line = next_line(result)
        assert line == (f"next: python train_gpt2.py --preset {preset} --data {preset} --out log/{preset} "
                        f"--val_every 0")
        values = PRESETS[preset][1]
        assert 4 * tokens >= values["total_batch_size"] * values["max_steps"], "at most four epochs"
        assert f"for sequences of {values['block_size']} tokens, hence --val_every 0" in result.stdout
    assert "done: 1 steps" in trained(line, tmp_path)


@pytest.mark.parametrize("tokens, flags", [(184, ["--block_size", "16"]), (600, ["--block_size", "32"])])
def test_the_last_line_of_a_tiny_text_is_a_command_that_runs(tokens, flags, tmp_path):
    """Validation has a tenth, or 20 tokens."""
    (tmp_path / "a.txt").write_text(" word" * (tokens - 1))
    line = next_line(command("--input", "a.txt", "--out", "b", cwd=tmp_path))
    assert shlex.split(line) == ["next:", "python", "train_gpt2.py", "--preset", "shakespeare", "--data", "b",
                                 "--out", "log/b", *flags]
    assert "step     1 | validation loss: " in trained(line, tmp_path)


def test_the_last_line_counts_with_shards_and_not_with_their_sum(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(" a" * 5000)
    for out, flags in ("whole", []), ("parts", ["--part", "0/1"]):
        prepare("--input", tmp_path / "a.txt", "--out", tmp_path / out, "--shard_size", 100, *flags)
        assert capsys.readouterr().out.endswith(f"--out log/{out} --block_size 64\n")


@pytest.mark.parametrize("tokens, flags", [(30, []), (100, ["--val_tokens", 10]),
                                           (500, ["--shard_size", 16])])
def test_the_last_line_says_of_a_text_that_is_too_short_what_it_needs(tokens, flags, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(" a" * (tokens - 1))
    prepare("--input", tmp_path / "a.txt", "--out", tmp_path / "b", *flags)
    assert capsys.readouterr().out.endswith(
        "b: too short to train on: validation and training each need a shard of at least 17 tokens. Give "
        "more text, and another --out\n")


@pytest.mark.parametrize("val, train, flags", [
    (1024, 10**9, "--val_every 0"), (1025, 10**9, ""), (17, 339, "--block_size 16"),
    (17, 360, "--val_every 0"), (16, 339, None), (16, 340, "--val_every 0"), (128, 129, "--block_size 64"),
    (129, 128, "--block_size 64"), (129, 129, ""), (9, 8_200_000, "--val_every 0"), (1, 17, None),
    (17, 1, None)])
def test_the_last_line_has_the_flags_that_fit(val, train, flags):
    why, line = fineweb.next_command(Path("d"), [val, 1], [1, train])
    assert ("too short to train on" in line) == (flags is None)
    if flags is not None:
        assert line.split("log/d")[1].strip() == flags and why.endswith(f"hence {flags}" if flags else "")


def test_the_presets_have_the_sequences_that_the_last_line_counts_with(monkeypatch):
    """A power of two that divides the batch, and Config's where it has none of its own."""
    from train_gpt2 import parse_flags
    for preset in fineweb.BLOCK_SIZES:
        config = parse_flags(["--preset", preset])[0]
        T = config.block_size
        assert T == fineweb.BLOCK_SIZES[preset] and T & (T - 1) == 0 and config.total_batch_size % T == 0
        monkeypatch.setattr(fineweb, "preset_for", lambda tokens, preset=preset: preset)
        for tokens, flags in ((T + 1, ""), (T, f" --block_size {T // 2}")):
            assert fineweb.next_command(Path("d"), [tokens], [tokens])[1].split("log/d")[1] == flags


@pytest.mark.parametrize("out, name", [(".", "here"), ("..", "above"), ("../", "above"), ("a/..", "here"),
                                       ("a/../", "here"), ("a/.", "a"), ("/", "data"), ("/..", "data"),
                                       ("...", "..."), ("link", "link")])
def test_the_last_line_names_a_folder_for_the_run(out, name, tmp_path, monkeypatch):
    here = tmp_path / "above/here"
    here.mkdir(parents=True)
    (here / "link").symlink_to(tmp_path)
    monkeypatch.chdir(here)
    line = fineweb.next_command(Path(out), [2000], [20_000])[1]
    assert shlex.split(line)[5:] == ["--data", str(Path(out)), "--out", f"log/{name}"]


@pytest.mark.skipif(os.name == "nt", reason="would take two gigabytes of disk")
@pytest.mark.parametrize("tokens, preset", [(10**9 - 1, "small"), (10**9, "gpt2")])
def test_pretokenized_the_last_line_names_the_preset_and_quotes_the_folder(tokens, preset, tmp_path):
    (tmp_path / "my data").mkdir()
    write_shard(tmp_path / "my data" / VAL, np.arange(5, dtype=np.uint16))
    header = np.array([20240520, 1, tokens] + [0] * 253, dtype="<i4").tobytes()
    with open(tmp_path / "my data" / TRAIN[1], "wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * tokens)               # a hole: takes no room on the disk
    line = next_line(command("--pretokenized", 1, "--out", "my data", cwd=tmp_path))
    assert line == (f"next: python train_gpt2.py --preset {preset} --data 'my data' --out 'log/my data' "
                    f"--val_every 0")
    if preset == "gpt2":                                      # of `small` another test runs the command
        assert "nothing was written" in trained(line, tmp_path, "--dry_run", "--total_batch_size", 1024)


# -----------------------------------------------------------------------------
# kill and restart

class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def die_at(monkeypatch, number, how, calls=None):
    """The process dies at its `number`-th file: half-way through it, just before or just after its rename.
    `calls`: gets the files."""
    real, calls = replace_file, [] if calls is None else calls

    def dying(path, write):
        calls.append(path)
        if len(calls) == number:
            if how == "after":
                real(path, write)
            else:
                data = io.BytesIO()
                write(data)
                end = None if how == "before" else len(data.getvalue()) // 2
                # its name in this version, and in earlier ones
                Path(f"{path}.{'4711.' * (number % 2)}tmp").write_bytes(data.getvalue()[:end])
            raise Killed
        real(path, write)

    for module in corpus.shard_writer, runtime.shards:
        monkeypatch.setattr(module, "replace_file", dying)


@pytest.mark.parametrize("flags", [["--val_tokens", "500"], ["--val_tokens", "500", "--max_tokens", "4000"],
                                   ["--val_tokens", "1e6"]], ids=["whole", "max_tokens", "one to nine"])
def test_after_a_death_at_any_file_the_same_command_ends_with_the_same_bytes(flags, tmp_path, monkeypatch):
    write_text(tmp_path / "a.jsonl", DOCUMENTS[:90])
    write_text(tmp_path / "b.parquet", DOCUMENTS[90:])
    flags, writes = ["--input", tmp_path / "?.*", *flags, "--shard_size", 1500], []
    with monkeypatch.context() as patch:
        die_at(patch, math.inf, "after", writes)
        prepare(*flags, "--out", tmp_path / "whole")
    want = contents(tmp_path / "whole")
    assert len(writes) > len(want) + 1
    for number in range(1, len(writes) + 1):
        for how in ("half", "before", "after"):
            out = tmp_path / f"{number}{how}"
            with monkeypatch.context() as patch:
                die_at(patch, number, how)
                with pytest.raises(Killed):
                    prepare(*flags, "--out", out)
            prepare(*flags, "--out", out)
            assert contents(out) == want, (number, how)


def test_only_leftovers_of_the_same_command_are_removed(tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags, out = ["--input", tmp_path / "a.jsonl", "--part", "0/2"], tmp_path / "out"
    out.mkdir()
    ours = ["text_p0of2_train_000001.npy.77.tmp", "text_p0of2_val_000000.bin.tmp",
            "manifest_p0of2.json.5.tmp"]
    others = ["text_p1of2_train_000001.npy.77.tmp", "manifest_p1of2.json.5.tmp", "manifest.json.5.tmp",
              "text_train_000001.npy.5.tmp", "text_p0of2_train_000001.npy.x.tmp", "notes.tmp", "5.tmp"]
    for name in ours + others:
        (out / name).write_text("half")
    prepare(*flags, "--out", out)
    assert {path.name for path in out.glob("*.tmp")} == {*others}
    assert len(list(out.glob("text_p0of2_val_000000.npy"))) == 1


# The command, which waits once there are so many shards: it is always killed before it ends.
NO_FURTHER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import fineweb
from corpus import shard_writer
from runtime import cli, shards
del sys.argv[0]
most, replace_file = int(sys.argv[0]), shards.replace_file

def held(path, write):
    if len(list(path.parent.glob("*.npy"))) >= most:
        time.sleep({HANG})
    replace_file(path, write)

shard_writer.replace_file = shards.replace_file = held
cli.run_command(fineweb.main)
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_killed_again_and_again_it_ends_with_the_bytes_of_an_uninterrupted_run(tmp_path):
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:400_000]
    write_text(tmp_path / "a.jsonl", [text[i:i + 3000] for i in range(0, len(text), 3000)])
    (tmp_path / "b.txt").write_text(text, encoding="utf-8")
    flags = ["--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.txt", "--shard_size", 4000,
             "--workers", 2]
    assert command(*flags, "--out", tmp_path / "whole").returncode == 0
    want, out = contents(tmp_path / "whole"), tmp_path / "out"
    for shards in (0, 1, 7, 25, 40):
        argv = [sys.executable, "-c", NO_FURTHER, str(shards + 15), *map(str, flags), "--out", str(out)]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENV) as process:
            try:
                wait_until(lambda shards=shards: len(list(out.glob("*.npy"))) > shards,
                           lambda: process.poll() is None)
            finally:
                process.kill()
            said = process.communicate()[1].decode().splitlines()     # progress, if the machine is slow
            assert all(line.endswith(" so far") for line in said) and process.returncode == -signal.SIGKILL
    there = len(json.loads((out / "manifest.json").read_text())["shards"])
    done = command(*flags, "--out", out)
    assert done.returncode == 0 and f"{there} shards" in done.stdout
    assert contents(out) == want                              # the manifest too, and nothing else


def test_what_is_complete_is_left_alone_and_said_so(tmp_path, monkeypatch, capsys):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags = ["--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_tokens", 500]
    prepare(*flags)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(LocalSource, "read", None)   # reads no text
    capsys.readouterr()
    prepare(*flags, "--workers", 3)
    assert "complete" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_a_restart_with_other_settings_or_other_text_is_refused(tmp_path):
    path = write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags, out = ["--input", path, "--val_tokens", "500", "--shard_size", "2000"], tmp_path / "out"
    prepare(*flags, "--out", out)
    want = contents(out)
    for change in (["--shard_size", 2001], ["--val_tokens", 501], ["--format", "bin"], ["--max_tokens", 4000],
                   ["--input", path]):
        name = "source" if change[0] == "--input" else change[0][2:]
        with pytest.raises(UserError, match=f"another {name}"):
            prepare(*flags, *change, "--out", out)
    write_text(path, [DOCUMENTS[0].swapcase(), *DOCUMENTS[1:]])                    # the same name and size
    refused = command(*flags, "--out", out)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "another source" in refused.stderr
    assert contents(out) == want


def test_a_restart_with_other_settings_says_in_words_what_differs(tmp_path):
    for name in ("a", "b", "c"):
        write_text(tmp_path / f"{name}.jsonl", DOCUMENTS)
    begun = ["--input", "a.jsonl", "b.jsonl", "--out", "out", "--shard_size", 2000, "--val_tokens", 500]
    assert command(*begun, cwd=tmp_path).returncode == 0
    sizes = begun[3:]
    for flags, words in (
            ([*begun, "--shard_size", 2001], "shard_size (2000 instead of 2001)"),
            ([*begun, "--max_tokens", 4000], "max_tokens (none instead of 4000)"),
            ([*begun, "--format", "bin"], "format (npy instead of bin)"),
            ([*begun, "--input", "c.jsonl"], "source (files: 2 instead of 3)"),
            (["--input", "b.jsonl", *sizes], "source (files: 2 instead of 1)"),
            (["--input", "a.jsonl", "c.jsonl", *sizes],
             "source (files: c.jsonl: name: b.jsonl instead of c.jsonl)"),
            (sizes, "source (repo: none instead of HuggingFaceFW/fineweb-edu)"),
            (begun, "source (files: b.jsonl: sha256_of_ends: SUM instead of SUM)")):
        if flags == begun:
            write_text(tmp_path / "b.jsonl", [DOCUMENTS[0].swapcase(), *DOCUMENTS[1:]])
        result = command(*flags, cwd=tmp_path)
        assert result.returncode == 2 and re.sub("[0-9a-f]{40}", "SUM", result.stderr) == (
            f"fineweb.py: out was begun with another {words}: give the same again, or choose another --out\n")


def test_an_out_folder_with_other_shards_is_not_written_into(tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "out").mkdir()
    write_shard(tmp_path / "out/mine_train_000001.npy", np.arange(9, dtype=np.uint16))
    want = contents(tmp_path / "out")
    with pytest.raises(UserError, match="already holds shards"):
        prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == want


def test_a_mistake_before_the_first_shard_does_not_bind_the_folder(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(UserError, match="line 1"):
        prepare("--input", tmp_path / "bad.jsonl", "--out", tmp_path / "out")
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")


@pytest.mark.parametrize("damage", [
    lambda text: text[:-40], lambda text: "", lambda text: "[]", lambda text: "7",
    lambda text: text.replace('"end"', '"and"'),
    lambda text: text.replace('"tokens": 500,', '"tokens": 501,'),
    lambda text: text.replace('"mark": null', '"mark": 5'),
    lambda text: text.replace('"unit": ', '"unit": "x'), lambda text: text.replace("text_val", "other_val")])
def test_a_damaged_manifest_or_shard_of_it_is_refused(damage, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags = ["--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_tokens", 500]
    prepare(*flags)
    path = tmp_path / "out/manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match="manifest.json|other_val"):
        prepare(*flags)


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path):
    resource = pytest.importorskip("resource")
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags = ["--input", tmp_path / "a.jsonl", "--val_tokens", "1000", "--shard_size", "4000"]
    # the limit cuts into the last bytes of the shard, which C's buffers hold back until the file is closed
    argv = [sys.executable, str(ROOT / "fineweb.py"), *map(str, flags), "--out", str(tmp_path / "out")]
    failed = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=HANG,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert "text_train_000001.npy" in failed.stderr
    prepare(*flags, "--out", tmp_path / "out")
    prepare(*flags, "--out", tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_that_is_full_from_the_start_is_exit_1_and_a_folder_that_cannot_be_written_exit_2(
        tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    flags = ["--input", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    failed = subprocess.run([sys.executable, str(ROOT / "fineweb.py"), *flags], env=ENV, capture_output=True,
                            text=True, timeout=HANG,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1
    assert re.search(r"cannot write .*manifest.json \(File too large\): make room", failed.stderr)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:                      # root may write everywhere
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UserError, match=r"out cannot be written \(Permission denied\)"):
            prepare(*flags)
    for error, raised, said in ((OSError(28, "No space left on device"), RunError, "make room"),
                                (OSError(122, "Disk quota exceeded"), RunError, "make room"),
                                (PermissionError(13, "Permission denied"), UserError, "choose another")):
        with pytest.raises(raised, match=said), writable(tmp_path):
            raise error
        with pytest.raises(raised, match=said), writable(tmp_path):
            replace_file(tmp_path / "x", partial(raising, error))


def raising(error, file):
    raise error


# -----------------------------------------------------------------------------
# the SHA-256 of the shards

def flip(path, at=-1000):
    """Changes the lowest bit of the byte `at`."""
    change(path, lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])


SIZES = ["--shard_size", 1500, "--val_tokens", 900]


@pytest.fixture
def written(tmp_path):
    """A folder of five shards with their manifest."""
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", *SIZES)
    assert len(list((tmp_path / "out").glob("*.npy"))) == 5
    return tmp_path / "out"


def without_sums(folder):
    """The manifest as earlier versions wrote it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize("flags", [[], ["--format", "bin"], ["--part", "1/2"]], ids=str)
def test_the_manifest_records_the_sha256_of_each_shards_file(flags, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--out", tmp_path, "--shard_size", 1500, *flags)
    manifest, = tmp_path.glob("manifest*.json")
    for shard in json.loads(manifest.read_text())["shards"]:
        assert shard["sha256"] == hashlib.sha256((tmp_path / shard["file"]).read_bytes()).hexdigest()


def test_verify_names_every_shard_that_is_not_as_it_was_written(written, capsys):
    prepare("--verify", written)
    size = sum(path.stat().st_size for path in written.glob("*.npy"))
    assert re.fullmatch(rf"{written}: 5 shards, {size / 1e6:.1f} MB, are as they were written, after .* s\n",
                        capsys.readouterr().out)
    flip(written / "text_train_000001.npy", 20)               # its header
    flip(written / "text_train_000003.npy")
    (written / "text_train_000002.npy").unlink()
    change(written / "text_train_000004.npy", lambda data: data[:-2])
    write_shard(written / "mine_train_000001.npy", np.arange(9, dtype=np.uint16))
    result = command("--verify", written)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "4 of 6 shards" in result.stderr and "text_train_000002.npy (missing)" in result.stderr
    for number in (1, 3, 4):
        assert f"text_train_00000{number}.npy (its SHA-256 is not that in its manifest)" in result.stderr
    assert "text_val" not in result.stderr
    assert "not checked (no SHA-256 in its manifest): mine_train_000001.npy" in result.stderr


def test_verify_takes_ids_beyond_gpt2s_for_damage_and_says_what_it_cannot_check(written, tmp_path):
    tokens = np.array([5, 50257, 7], dtype=np.uint16)
    manifest = json.loads((written / "manifest.json").read_text())
    write_shard(written / "text_val_000000.npy", tokens)
    manifest["shards"][0]["sha256"] = file_sha256(written / "text_val_000000.npy")
    (written / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"val_000000.npy \(it holds token 50257, and GPT-2's end at 50256"):
        prepare("--verify", written)
    without_sums(written)
    for folder, said in ((written, "no manifest in it has a SHA-256"), (tmp_path, "no manifest in it"),
                         (tmp_path / "none", "no such folder")):
        with pytest.raises(UserError, match=said):
            prepare("--verify", folder)
    for flags in (["--out", "x"], ["--input", "x"], ["--workers", "2"], ["--pretokenized", "1"]):
        with pytest.raises(UserError, match=f"{flags[0]} cannot be combined with --verify"):
            prepare("--verify", written, *flags)


def test_a_manifest_with_a_damaged_sum_is_refused_and_another_projects_is_left_alone(tmp_path):
    for sha256 in ("0" * 63, 5, ["a"]):
        (tmp_path / "manifest.json").write_text(json.dumps({"shards": [{"file": "a", "sha256": sha256}]}))
        with pytest.raises(UserError, match="manifest.json cannot be read"):
            recorded_sums(tmp_path)
    for other in ([], {}, {"shards": 5}, {"shards": [[], {}, {"file": 1}]}):
        (tmp_path / "manifest.json").write_text(json.dumps(other))
        assert recorded_sums(tmp_path) == {}


# -----------------------------------------------------------------------------
# the hub, by a local stand-in

class Clock:
    """For fineweb alone: other threads of this process may sleep too."""
    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, waits):
        self.sleep = waits.append


class Stream:
    """As datasets' streaming dataset; drops the connection whenever `failures` says so."""

    def __init__(self, documents, failures, served):
        self.documents, self.failures, self.served, self.at = documents, failures, served, 0

    def __iter__(self):
        while self.at < len(self.documents):
            if self.failures and self.failures[0] <= len(self.served):
                raise ConnectionError(f"dropped at {self.failures.pop(0)}")
            self.served.append(self.at)
            self.at += 1
            yield {"id": self.at, "text": self.documents[self.at - 1]}


class ResumableStream(Stream):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(dataset) makes `dataset()` the stream of any dataset; waits cost no time and are recorded."""
    import datasets
    waits, calls = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus.hub_source, "CURSOR_EVERY", 10)
    monkeypatch.setattr(corpus.hub, "time", Clock(waits))
    monkeypatch.setattr(corpus.hub, "reach_hub", lambda: True)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info",
                        lambda *args, **kwargs: SimpleNamespace(sha="0123456789" * 4))

    def install(dataset):
        def load_dataset_builder(path, name, cache_dir, **kwargs):
            kwargs["name"] = name
            return SimpleNamespace(as_streaming_dataset=lambda split: (
                calls.append((path, kwargs | {"split": split})), dataset())[1])
        monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
        return waits, calls
    return install


@pytest.mark.parametrize("kind", [Stream, ResumableStream])
def test_a_connection_that_drops_now_and_then_changes_nothing(kind, hub, gpt2, tmp_path, capsys):
    served, failures = [], [0, 0, 5, 64, 65, 120, 130, 140, 150, 155]
    waits, calls = hub(lambda: kind(DOCUMENTS, failures, served))
    prepare("--shard_size", 700)
    assert read_shards(tmp_path / "edu_fineweb10B") == plain_shards(gpt2, DOCUMENTS, 700)
    assert calls[0] == ("hf://datasets/HuggingFaceFW/fineweb-edu",
                        {"name": "sample-10BT", "revision": "0123456789" * 4, "split": "train"})
    assert len(waits) == 10 > RETRIES and waits[:2] == [1, 2]
    assert "dropped at 5; trying again" in capsys.readouterr().err
    assert (tmp_path / "edu_fineweb10B/edufineweb_val_000000.npy").exists()
    if kind is ResumableStream:               # resumes at the last cursor, at most ten documents back
        assert len(served) < len(DOCUMENTS) + 10 * 10


def test_variant_and_sample_name_the_dataset_and_the_folder(hub, gpt2, tmp_path):
    _, calls = hub(lambda: Stream(DOCUMENTS, [], []))
    prepare("--variant", "classic", "--sample", "100BT", "--max_tokens", 3000, "--val_tokens", 1000)
    assert calls[0][0] == "hf://datasets/HuggingFaceFW/fineweb" and calls[0][1]["name"] == "sample-100BT"
    assert sum(read_shards(tmp_path / "fineweb100B"), []) == plain_shards(gpt2, DOCUMENTS, 3000)[0]


def small_batches(monkeypatch):
    """Batches of 100 characters, none ahead: few documents are read ahead of a kill."""
    monkeypatch.setattr(corpus.encoding, "BATCH", 100)
    monkeypatch.setattr(corpus.encoding, "AHEAD", 1)


def test_a_hub_out_of_reach_is_given_up_after_the_retries_and_taken_up_later(hub, gpt2, tmp_path,
                                                                             monkeypatch):
    served, failures = [], [90] * 100
    waits, _ = hub(lambda: ResumableStream(DOCUMENTS, failures, served))
    with pytest.raises(RunError, match="same command"):
        prepare("--shard_size", 700, "--workers", 1)
    assert waits == [2**i for i in range(RETRIES)]
    # what was read ahead of the drop is lost, whole shards are not
    small_batches(monkeypatch)
    failures[:] = [150] * 100
    with pytest.raises(RunError):
        prepare("--shard_size", 700, "--workers", 1)
    manifest = json.loads((tmp_path / "edu_fineweb10B/manifest.json").read_text())
    assert len(manifest["shards"]) > 2 and manifest["mark"][0] >= 20
    failures.clear()
    served.clear()
    prepare("--shard_size", 700)
    assert read_shards(tmp_path / "edu_fineweb10B") == plain_shards(gpt2, DOCUMENTS, 700)
    assert served == list(range(manifest["mark"][0], len(DOCUMENTS)))     # nothing before the cursor again


def test_a_hub_dataset_without_text_is_a_users_mistake_at_once(hub):
    waits, _ = hub(lambda: Stream([7], [], []))
    with pytest.raises(UserError, match="`text`"):
        prepare()
    assert not waits


@pytest.mark.parametrize("cursor", [[0], [10, None], [10, "state"], [10, {}, 3]])
def test_a_damaged_cursor_of_a_stream_is_refused_at_once(cursor, hub):
    waits, calls = hub(lambda: ResumableStream(DOCUMENTS, [], []))
    with pytest.raises(UserError, match="manifest.json of an earlier run is damaged"):
        next(HubSource("stand-in", "sample-10BT").read(0, cursor))
    assert not waits and not calls


def test_datasets_own_streams_resume_exactly_at_a_cursor(hub, gpt2, tmp_path, monkeypatch):
    import datasets
    load = datasets.load_dataset
    for i in range(3):
        write_parquet(tmp_path / f"{i}.parquet", DOCUMENTS[i::3], row_group_size=17)
    files = [str(tmp_path / f"{i}.parquet") for i in range(3)]
    documents = DOCUMENTS[0::3] + DOCUMENTS[1::3] + DOCUMENTS[2::3]
    hub(lambda: load("parquet", data_files=files, split="train", streaming=True,
                     cache_dir=str(tmp_path / "cache")))
    source = HubSource("stand-in", "sample-10BT")
    assert texts_of(source) == documents
    cursors = cursors_of(source)
    assert [number for number, _ in cursors] == list(range(10, len(documents), 10))
    for number, state in cursors[::4]:
        for start in (number, number + 3):
            assert texts_of(HubSource("stand-in", "sample-10BT"), start, [number, state]) == documents[start:]
    small_batches(monkeypatch)
    with monkeypatch.context() as patch:
        die_at(patch, 11, "half")
        with pytest.raises(Killed):
            prepare("--shard_size", 700, "--workers", 2)
    assert json.loads((tmp_path / "edu_fineweb10B/manifest.json").read_text())["mark"][1]
    prepare("--shard_size", 700, "--workers", 2)
    assert read_shards(tmp_path / "edu_fineweb10B") == plain_shards(gpt2, documents, 700)


# -----------------------------------------------------------------------------
# --pretokenized

@pytest.fixture
def published(monkeypatch, tmp_path):
    """published(faults) replaces huggingface_hub.hf_hub_download, and the check whether the hub is in reach.

    The stand-in makes the .bin shard that is asked for: 1000 + i tokens of value i. `faults[name]` says what
    happens to the first calls for a file: an error is raised, "cut" truncates the copy, "flip" changes a bit
    of it beside huggingface_hub's note of the right SHA-256. Waits cost no time.
    Returns the list of the waits, and that of the names asked for."""
    import huggingface_hub
    waits, asked = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus.hub, "time", Clock(waits))
    monkeypatch.setattr(corpus.hub, "reach_hub", lambda: True)

    def install(faults):
        def hf_hub_download(repo_id, filename, *, repo_type, local_dir):
            asked.append(filename)
            assert (repo_type, repo_id) in [("dataset", repo) for repo, *_ in fineweb.PRETOKENIZED.values()]
            number, path = int(filename[-10:-4]), Path(local_dir) / filename
            assert not path.exists()
            fault = faults[filename].pop(0) if faults.get(filename) else None
            if isinstance(fault, BaseException):
                raise fault
            write_shard(tmp_path / filename, np.full(1000 + number, number, dtype=np.uint16))
            shutil.move(tmp_path / filename, path)
            if fault == "flip":
                note = Path(local_dir) / ".cache/huggingface/download" / f"{filename}.metadata"
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(f"{'0' * 40}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n1.5\n")
                flip(path)
            if fault == "cut":
                change(path, lambda data: data[:-10])
            return str(path)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
        return waits, asked
    return install


VAL, TRAIN = "fineweb_val_000000.bin", [f"fineweb_train_{i:06d}.bin" for i in range(4)]


def test_pretokenized_fetches_the_validation_and_n_training_shards_that_the_loader_reads(published, tmp_path,
                                                                                         capsys):
    waits, asked = published({})
    prepare("--pretokenized", 3)
    assert asked == [VAL, *TRAIN[1:]] and waits == []
    out = capsys.readouterr().out
    assert "1,000 tokens for validation and 3,006 for training" in out
    assert out.endswith("--preset shakespeare --data fineweb10B --out log/fineweb10B\n")
    folder = tmp_path / "fineweb10B"
    assert [path.name for path in list_shards(folder, "val")] == [VAL]
    rows = TokenDataset(list_shards(folder, "train"), 10, vocab_size=50257).read(0, 300)
    assert rows[:, 0].tolist() == [1] * 100 + [2] * 100 + [3] * 100


def test_pretokenized_fetches_only_what_is_missing(published, tmp_path, monkeypatch):
    _, asked = published({})
    prepare("--pretokenized", 1, "--out", "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(corpus.hub, "reach_hub", None)             # all is there: no network is asked for
        prepare("--pretokenized", 1, "--out", "a")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    prepare("--pretokenized", 3, "--out", "a")
    assert asked == [VAL, *TRAIN[1:]]
    (tmp_path / "b").mkdir()                      # as another program's download left it, without a manifest
    shutil.copy(tmp_path / "a" / VAL, tmp_path / "b")
    prepare("--pretokenized", 1, "--out", "b")
    assert asked[4:] == TRAIN[1:2]


@pytest.mark.parametrize("flags, folder, names", [
    (["--variant", "edu"], "finewebedu10B", ["finewebedu_val_000000.bin", "finewebedu_train_000001.bin"]),
    (["--variant", "classic"], "fineweb10B", [VAL, TRAIN[1]]),
    (["--sample", "100BT"], "fineweb100B", [VAL, TRAIN[1]])])
def test_pretokenized_variant_and_sample_name_the_dataset_and_the_folder(flags, folder, names, published,
                                                                         tmp_path):
    _, asked = published({})
    prepare("--pretokenized", 1, *flags)
    assert asked == names
    manifest = json.loads((tmp_path / folder / "manifest.json").read_text())
    assert manifest["pretokenized"] == f"kjj0/{folder}-gpt2"


def test_pretokenized_a_connection_that_drops_is_tried_again(published, tmp_path, capsys):
    waits, asked = published({VAL: [ConnectionError("dropped\nat once")] * 8, TRAIN[2]: [TimeoutError()]})
    prepare("--pretokenized", 2)
    assert waits == [2**i for i in range(8)] + [1] and asked == [VAL] * 9 + [TRAIN[1]] + [TRAIN[2]] * 2
    err = capsys.readouterr().err
    assert err.count("\n") == 9 and "dropped at once; trying again in 128 s" in err
    assert len(read_shards(tmp_path / "fineweb10B")) == 3


def http_error(status):
    error = RuntimeError(f"status {status}")
    error.response = type("Response", (), {"status_code": status, "headers": {}})()
    return error


@pytest.mark.parametrize("error, tries", [(ConnectionError("dropped"), 9), (http_error(503), 9),
                                          (http_error(404), 1), (OSError(28, "No space left on device"), 1)],
                         ids=str)
def test_pretokenized_is_given_up_after_the_retries_or_at_once_and_taken_up_later(error, tries, published,
                                                                                  tmp_path):
    faults = {TRAIN[2]: [error] * 9}
    waits, asked = published(faults)
    with pytest.raises(RunError, match=r"fineweb_train_000002.bin.*kjj0/fineweb10B-gpt2(.|\n)*same command"):
        prepare("--pretokenized", 3)
    assert len(waits) == tries - 1 and asked == [VAL, TRAIN[1]] + [TRAIN[2]] * tries
    faults.clear()
    asked.clear()
    prepare("--pretokenized", 3)
    assert asked == TRAIN[2:] and len(read_shards(tmp_path / "fineweb10B")) == 4


def test_pretokenized_a_file_that_is_cut_off_is_fetched_again(published, tmp_path):
    waits, asked = published(faults := {TRAIN[1]: ["cut"]})
    prepare("--pretokenized", 2)
    assert asked == [VAL, TRAIN[1], TRAIN[1], TRAIN[2]] and waits == []
    change(tmp_path / "fineweb10B" / VAL, lambda data: data[:500])
    asked.clear()
    prepare("--pretokenized", 2)
    assert asked == [VAL]
    assert [len(shard) for shard in read_shards(tmp_path / "fineweb10B")] == [1000, 1001, 1002]
    faults[TRAIN[3]] = ["cut", "cut"]
    with pytest.raises(RunError, match="fineweb_train_000003.bin came damaged"):
        prepare("--pretokenized", 3)
    prepare("--pretokenized", 3)
    assert len(read_shards(tmp_path / "fineweb10B")) == 4


def test_pretokenized_a_file_that_is_not_the_hubs_is_fetched_again_and_the_sums_are_recorded(published,
                                                                                             tmp_path):
    _, asked = published(faults := {TRAIN[1]: ["flip"]})
    prepare("--pretokenized", 2)
    assert asked == [VAL, TRAIN[1], TRAIN[1], TRAIN[2]]
    prepare("--verify", "fineweb10B")
    shards = json.loads((tmp_path / "fineweb10B/manifest.json").read_text())["shards"]
    assert {shard["file"] for shard in shards} == {VAL, TRAIN[1], TRAIN[2]}
    flip(tmp_path / "fineweb10B" / TRAIN[2])
    with pytest.raises(UserError, match=TRAIN[2]):
        prepare("--verify", "fineweb10B")
    (tmp_path / "fineweb10B" / TRAIN[2]).unlink()
    prepare("--pretokenized", 2)
    prepare("--verify", "fineweb10B")
    faults[TRAIN[3]] = ["flip", "flip"]
    with pytest.raises(RunError, match="fineweb_train_000003.bin came damaged"):
        prepare("--pretokenized", 3)
    assert not (tmp_path / "fineweb10B" / TRAIN[3]).exists()


def test_pretokenized_goes_on_in_a_folder_of_an_earlier_version(published, tmp_path, capsys):
    published({})
    prepare("--pretokenized", 1)
    (tmp_path / "fineweb10B/manifest.json").write_text('{"pretokenized": "kjj0/fineweb10B-gpt2"}')
    prepare("--pretokenized", 2)
    prepare("--verify", "fineweb10B")
    assert capsys.readouterr().out.endswith(f"not checked (no SHA-256 in its manifest): {TRAIN[1]}, {VAL}\n")


def test_pretokenized_a_long_download_shows_in_a_log_file_that_it_goes_on(published, tmp_path, monkeypatch,
                                                                          capsys):
    import huggingface_hub
    _, asked = published({})
    download, said = huggingface_hub.hf_hub_download, []

    def slow(repo, name, **kwargs):
        if name == TRAIN[2]:
            want = "fineweb10B: fetching from kjj0/fineweb10B-gpt2: 2 of 4 shards, "
            wait_until(lambda: want in "".join(said) or said.append(capsys.readouterr().err))
        return download(repo, name, **kwargs)

    monkeypatch.setattr(corpus.progress, "QUIET", 0.05)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", slow)
    prepare("--pretokenized", 3)
    assert asked == [VAL, *TRAIN[1:]]


@pytest.mark.parametrize("flags, said", [
    (["0"], "1 to 103"), (["-1"], "1 to 103"), (["104"], "1 to 103"), (["1.5"], "whole number"),
    ([], "argument"),
    (["100", "--variant", "edu"], "1 to 99"), (["1031", "--sample", "100BT"], "1 to 1030"),
    (["9", "--variant", "edu", "--sample", "100BT"], "no tokens of --variant edu --sample 100BT"),
    (["9", "--input", "a.txt"], "--input cannot be combined"),
    (["9", "--shard_size", "100000000"], "--shard_size"),
    (["9", "--val_tokens=5"], "--val_tokens"), (["9", "--max_tokens", "5"], "--max_tokens"),
    (["9", "--workers", "2"], "--workers"), (["9", "--format", "npy"], "--format")])
def test_pretokenized_with_a_wrong_number_or_flag_is_a_users_mistake(flags, said, published, tmp_path):
    _, asked = published({})
    with pytest.raises(UserError, match=said):
        prepare("--pretokenized", *flags)
    assert asked == [] and list(tmp_path.iterdir()) == []
    fineweb.parse_args(["--pretokenized", "103"])


def text_folder(flags, tmp_path):
    write_text(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("--input", tmp_path / "a.jsonl", "--val_tokens", 500, *flags)


@pytest.mark.parametrize("fill", [
    lambda out: text_folder(["--out", out], out.parent),
    lambda out: text_folder(["--out", out, "--format", "bin"], out.parent),
    lambda out: prepare("--pretokenized", 1, "--out", out, "--sample", "100BT"),
    lambda out: prepare("--pretokenized", 1, "--out", out, "--variant", "edu"),
    lambda out: write_shard(out / "mine_train_000001.npy", np.arange(9, dtype=np.uint16))],
    ids=["text", "text as bin", "100BT", "edu", "no manifest"])
def test_pretokenized_shards_are_not_mixed_with_those_of_another_source(fill, published, tmp_path):
    _, asked = published({})
    out = tmp_path / "out"
    out.mkdir()
    fill(out)
    asked.clear()
    want = contents(out)
    with pytest.raises(UserError, match="another source than kjj0/fineweb10B-gpt2"):
        prepare("--pretokenized", 1, "--out", out)
    assert contents(out) == want and asked == []


def test_pretokenized_shards_are_not_gone_on_with_from_text(published, tmp_path):
    published({})
    prepare("--pretokenized", 1, "--out", "out")
    want = contents(tmp_path / "out")
    with pytest.raises(UserError, match="holds fetched shards of kjj0/fineweb10B-gpt2"):
        text_folder(["--out", "out"], tmp_path)
    assert contents(tmp_path / "out") == want


def test_pretokenized_takes_a_folder_whose_text_run_made_no_shard(published, tmp_path):
    published({})
    (tmp_path / "fineweb10B").mkdir()
    (tmp_path / "fineweb10B/manifest.json").write_text('{"shards": []}')
    prepare("--pretokenized", 1)
    prepare("--pretokenized", 1)


OUT_OF_REACH = ("fineweb.py: the Hugging Face hub is out of reach (or HF_HUB_OFFLINE is set): connect to a "
                "network to get {}, or give your own text with --input\n")


def test_fineweb_offline_is_one_line_at_once_and_goes_on_when_the_hub_is_back(hub, gpt2, tmp_path,
                                                                              monkeypatch):
    result = command(cwd=tmp_path)
    assert result.returncode == 1 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "HF_HUB_OFFLINE is set" in result.stderr and "HuggingFaceFW/fineweb-edu" in result.stderr
    _, calls = hub(lambda: Stream(DOCUMENTS, [], []))
    with monkeypatch.context() as patch, pytest.raises(RunError, match="HF_HUB_OFFLINE is set"):
        patch.setattr(corpus.hub, "reach_hub", lambda: False)
        prepare("--max_tokens", 3000)
    assert calls == []
    prepare("--max_tokens", 3000)
    with monkeypatch.context() as patch:
        patch.setattr(corpus.hub, "reach_hub", None)             # all is there: no network is asked for
        prepare("--max_tokens", 3000)


@pytest.mark.parametrize("flags, what", [([], "HuggingFaceFW/fineweb-edu"),
                                         (["--variant", "classic"], "HuggingFaceFW/fineweb"),
                                         (["--pretokenized", 3], "4 of 4 files of kjj0/fineweb10B-gpt2")])
def test_without_a_network_the_command_says_so_in_a_short_line_and_leaves_nothing(flags, what, tmp_path):
    result = command(*flags, cwd=tmp_path, env=hub_at(NO_HUB))
    assert result.returncode == 1 and result.stdout == "" and list(tmp_path.iterdir()) == []
    assert result.stderr == OUT_OF_REACH.format(what)


def test_pretokenized_offline_is_one_line_at_once_and_leaves_nothing(tmp_path):
    result = command("--pretokenized", 1, "--out", "X", cwd=tmp_path)
    assert result.returncode == 1 and result.stdout == "" and list(tmp_path.iterdir()) == []
    assert result.stderr.count("\n") == 1
    assert result.stderr == OUT_OF_REACH.format("2 of 2 files of kjj0/fineweb10B-gpt2")
    (tmp_path / "X").mkdir()
    for name, tokens in ((VAL, 5), (TRAIN[1], 7)):
        write_shard(tmp_path / "X" / name, np.arange(tokens, dtype=np.uint16))
    result = command("--pretokenized", 1, "--out", "X", cwd=tmp_path)       # copied there by hand
    assert result.returncode == 0 and result.stderr == ""
    assert "5 tokens for validation and 7 for training" in result.stdout


# -----------------------------------------------------------------------------
# the folders that a mistake leaves

@pytest.mark.parametrize("out", ["new", "there/a/b"])
@pytest.mark.parametrize("flags, code", [
    (["--input", "missing.txt"], 2), (["--input", "latin.txt"], 2), (["--input", "short.txt"], 2),
    (["--input", "half.jsonl"], 2), (["--input", "body.parquet"], 2), ([], 1), (["--pretokenized", "2"], 1)])
def test_a_command_that_made_no_shard_leaves_no_folder(flags, code, out, mistakes, tmp_path):
    (tmp_path / "there").mkdir()
    flags = [mistakes / flag if "." in flag else flag for flag in flags]
    result = command(*flags, "--out", out, cwd=tmp_path, env=hub_at(NO_HUB))
    assert result.returncode == code and result.stderr.count("\n") == 1, result
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_folder_that_cannot_be_made_leaves_none_of_its_parents(tmp_path):
    (tmp_path / "a.txt").write_text(GOOD)
    result = command("--input", "a.txt", "--out", "new/" + "x" * 300, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_ctrl_c_before_the_first_shard_leaves_no_folder(tmp_path, monkeypatch):
    def stopped(source, *args):
        assert (tmp_path / "new/out/manifest.json").exists()
        raise KeyboardInterrupt
    (tmp_path / "a.txt").write_text(GOOD)
    monkeypatch.setattr(LocalSource, "read", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare("--input", tmp_path / "a.txt", "--out", tmp_path / "new/out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_pretokenized_after_ctrl_c_the_same_command_resumes(published):
    _, asked = published({VAL: [KeyboardInterrupt()], TRAIN[1]: [KeyboardInterrupt()]})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare("--pretokenized", 1)
    prepare("--pretokenized", 1)
    assert asked == [VAL, VAL, TRAIN[1], TRAIN[1]]


def test_a_mistake_leaves_a_folder_that_was_there_and_every_complete_shard(mistakes, tmp_path):
    (tmp_path / "there/.cache").mkdir(parents=True)
    for name in (".cache/mine", "manifest.json"):             # --out might be a home folder
        (tmp_path / "there" / name).write_text('{"shards": []')
        assert command("--input", mistakes / "latin.txt", "--out", "there", cwd=tmp_path).returncode == 2
        assert (tmp_path / "there" / name).read_text() == '{"shards": []'
    (tmp_path / "there/manifest.json").unlink()
    # the second file is damaged: the shards of the first are kept, and the same command resumes after them
    late = tmp_path / "late.txt"                  # beyond what is looked at before anything is written
    late.write_bytes(b"word " * 40_000 + "caf\u00e9".encode("latin-1"))
    for out, resumed in (("new", False), ("new", True), ("there", False)):
        result = command("--input", ROOT / "input.txt", late, "--shard_size", 20_000,
                         "--workers", 1, "--out", out, cwd=tmp_path)
        assert result.returncode == 2 and "late.txt" in result.stderr
        shards = json.loads((tmp_path / out / "manifest.json").read_text())["shards"]
        assert {shard["file"] for shard in shards} == {path.name for path in (tmp_path / out).glob("*.npy")}
        assert len(shards) > 5 and ("are there already" in result.stdout) == resumed


class Serving(http.server.BaseHTTPRequestHandler):
    """A hub with one file of each name, whose etag is its SHA-256, as for all large files. The first copy
    that it sends of a training shard has another bit."""
    sent = []

    def do_HEAD(self):
        data = b""
        if self.path != "/":
            head = np.array([20240520, 1, 900, *[0] * 253], dtype="<i4").tobytes()
            data = head + np.arange(900, dtype="<u2").tobytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET" and self.path.endswith(".bin"):
            self.sent.append(self.path[-10:])
            first = "train" in self.path and self.sent.count(self.path[-10:]) == 1
            self.wfile.write(data[:-1] + bytes([data[-1] ^ 1]) if first else data)

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


def test_the_hubs_own_sha256_is_compared_with_what_came(tmp_path):
    """With huggingface_hub itself, whose notes hold it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = command("--pretokenized", 1, "--out", "new", cwd=tmp_path,
                         env=hub_at(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert Serving.sent == ["000000.bin", "000001.bin", "000001.bin"]
    prepare("--verify", tmp_path / "new")


class Refusing(http.server.BaseHTTPRequestHandler):
    """A hub that answers, and has none of the files."""

    def do_HEAD(self):
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


def test_a_download_that_never_began_leaves_no_folder(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = hub_at(f"http://127.0.0.1:{server.server_port}")
        for out in ("new", "a/b/c"):
            result = command("--pretokenized", 1, "--out", out, cwd=tmp_path, env=env)
            assert result.returncode == 1 and "fineweb_val_000000.bin" in result.stderr, result
            assert result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
        server.shutdown()


def test_a_download_that_broke_off_is_kept(published, tmp_path, monkeypatch):
    import huggingface_hub

    def broken(repo, name, *, repo_type, local_dir):
        part = Path(local_dir) / ".cache/huggingface/download/x.incomplete"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"half")
        raise http_error(404)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(RunError):
        prepare("--pretokenized", 1, "--out", "new")
    assert {path.name for path in (tmp_path / "new").rglob("*") if path.is_file()} == {"manifest.json",
                                                                                      "x.incomplete"}


# -----------------------------------------------------------------------------
# mistakes

GOOD = (base64.b85encode(bytes(range(200))).decode() +
        " some text of twenty tokens and more, one two three four five six")


def files_for_mistakes(folder):
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 50)
    (folder / "notes.pdf").write_bytes(b"%PDF")
    (folder / "short.txt").write_text("hi")
    (folder / "good.txt").write_text(GOOD)
    (folder / "half.jsonl").write_text(json.dumps({"text": GOOD}) + '\n\n{"text": "cut o')
    (folder / "number.jsonl").write_text(json.dumps({"text": GOOD}) + '\n{"text": 5}\n')
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    packed = gzip.compress(json.dumps({"text": str(list(range(9999)))}).encode())
    (folder / "cut.jsonl.gz").write_bytes(packed[:-200])
    write_text(folder / "cut.jsonl.zst", [str(list(range(9999)))])
    change(folder / "cut.jsonl.zst", lambda data: data[:-200])
    (folder / "no.jsonl.gz").write_text("not packed at all")
    (folder / "no.jsonl.zst").write_text("not packed at all")
    (folder / "no.parquet").write_text("not parquet")
    (folder / "folder").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": [GOOD]}), folder / "body.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [GOOD, None]}), folder / "null.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "int.parquet")
    write_parquet(folder / "cut.parquet", [GOOD] * 2000)
    (folder / "cut.parquet").write_bytes((folder / "cut.parquet").read_bytes()[:-100])


@pytest.mark.parametrize("args, said", [
    (["--input", "missing.txt"], "missing.txt"), (["--input", "no*.csv"], "no*.csv"),
    (["--input", "folder"], "folder"), (["--input", "empty.txt"], "0 tokens"),
    (["--input", "short.txt"], "tokens"), (["--input", "latin.txt"], "latin.txt"),
    (["--input", "notes.pdf"], "notes.pdf"), (["--input", "half.jsonl"], "line 3"),
    (["--input", "number.jsonl"], "line 2"), (["--input", "list.jsonl"], "line 1"),
    (["--input", "deep.jsonl"], "line 1"), (["--input", "cut.jsonl.gz"], "cut.jsonl.gz"),
    (["--input", "cut.jsonl.zst"], "cut.jsonl.zst"), (["--input", "no.jsonl.gz"], "no.jsonl.gz"),
    (["--input", "no.jsonl.zst"], "no.jsonl.zst"),
    (["--input", "no.parquet"], "no.parquet"), (["--input", "cut.parquet"], "cut.parquet"),
    (["--input", "body.parquet"], "body"),
    (["--input", "null.parquet"], "text"), (["--input", "int.parquet"], "text"),
    (["--input", "good.txt", "--out", "short.txt"], "short.txt"),
    (["--input", "good.txt", "--out", "short.txt/x"], "short.txt"),
    (["--input", "good.txt", "--out", "damaged"], "manifest.json"),
    (["--input", "good.txt", "--shard_size", "many"], "many"),
    (["--input", "good.txt", "--shard_size", "0"], "shard_size"),
    (["--input", "good.txt", "--val_tokens", "0"], "val_tokens"),
    (["--input", "good.txt", "--max_tokens", "-5"], "max_tokens"),
    (["--input", "good.txt", "--workers", "1.5"], "workers"),
    (["--input", "good.txt", "--workers", "1e9"], "--workers 1000000000: must be at most"),
    (["--input", "good.txt", "--max_tokens", "inf"], "inf"),
    (["--input", "good.txt", "--max_tokens", "100", "--val_tokens", "100"], "val_tokens"),
    (["--colour", "red"], "colour"),
    (["--variant", "new"], "variant"), (["--format", "csv"], "format"), (["--in", "good.txt"], "--in")])
def test_a_mistake_is_one_clear_line_and_exit_code_2(args, said, mistakes):
    result = command(*args, *([] if "--out" in args else ["--out", "out"]), cwd=mistakes)
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("fineweb.py: "), result.stderr
    assert said in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    files_for_mistakes(folder)
    (folder / "damaged").mkdir()
    (folder / "damaged/manifest.json").write_text('{"version"')
    return folder


def test_input_without_out_is_a_mistake_too(tmp_path):
    (tmp_path / "good.txt").write_text(GOOD)
    result = command("--input", "good.txt", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "--out" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["good.txt"]


def save_pickle(path):
    np.save(path, np.array([Evil()], dtype=object), allow_pickle=True)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pickle_was_run",)


def save_npz(path):
    np.savez(path.with_suffix(".npz"), np.arange(100, dtype=np.uint16))
    path.with_suffix(".npz").rename(path)


def change(path, function):
    path.write_bytes(function(path.read_bytes()))


DAMAGES = {
    "cut.npy": lambda path: change(path, lambda data: data[:-10]),
    "cut in the header.npy": lambda path: change(path, lambda data: data[:40]),
    "other magic.npy": lambda path: change(path, lambda data: b"\x00" + data[1:]),
    "header of nonsense.npy": lambda path: change(path,
                                                  lambda data: data[:10] + b"{'descr': ((((" + data[24:]),
    "int32.npy": lambda path: np.save(path, np.arange(100, dtype=np.int32)),
    "two-dimensional.npy": lambda path: np.save(path, np.zeros((10, 10), dtype=np.uint16)),
    "no tokens.npy": lambda path: np.save(path, np.zeros(0, dtype=np.uint16)),
    "pickle.npy": save_pickle,
    "bare pickle.npy": lambda path: path.write_bytes(pickle.dumps(Evil())),
    "npz.npy": save_npz,
    "zero bytes.npy": lambda path: change(path, lambda data: b""),
    "missing.npy": lambda path: path.unlink(),
    "cut.bin": lambda path: change(path, lambda data: data[:-10]),
    "too long.bin": lambda path: change(path, lambda data: data + b"\0"),
    "cut in the header.bin": lambda path: change(path, lambda data: data[:40]),
    "other magic.bin": lambda path: change(path, lambda data: b"\x00" + data[1:]),
    "other version.bin": lambda path: change(path, lambda data: data[:4] + b"\x09" + data[5:]),
    "negative count.bin": lambda path: change(path, lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:]),
    "no tokens.bin": lambda path: change(path, lambda data: data[:8] + bytes(4) + data[12:1024]),
    "zero bytes.bin": lambda path: change(path, lambda data: b""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_refused_by_name_and_never_unpickled(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"x_train_000000{Path(name).suffix}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    assert len(open_shard(path)) == 100
    DAMAGES[name](path)
    with pytest.raises(UserError, match="x_train_000000"):
        TokenDataset([path], 5)
    assert not Path("pickle_was_run").exists()


@pytest.mark.filterwarnings("ignore")         # numpy evaluates what is left of the header
@settings(FAST, max_examples=200)
@given(st.sampled_from(["npy", "bin"]), st.integers(0, 127), st.binary(min_size=1, max_size=6))
def test_any_damage_to_a_header_is_a_users_mistake_or_none(tmp_path, kind, at, junk):
    path = tmp_path / f"x_train_000000.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    change(path, lambda data: data[:at] + junk + data[at + len(junk):])
    try:
        assert open_shard(path).dtype == np.uint16
    except UserError:
        pass


def test_too_little_text_foreign_ids_and_missing_data_are_users_mistakes(tmp_path):
    with pytest.raises(UserError, match="too few for one sequence"):
        TokenDataset([np.arange(8, dtype=np.uint16)] * 3, 8)
    assert TokenDataset([np.arange(9, dtype=np.uint16)], 8).total == 1
    with pytest.raises(UserError, match="holds token 50257"):
        TokenDataset([np.array([1, 2, 50257], dtype=np.uint16)], 2, vocab_size=50257)
    with pytest.raises(UserError, match="holds token 50257, and the model's tokens end at 50256"):
        TokenDataset([np.array([1, 2, 50257], dtype=np.uint16)], 2, vocab_size=50304)       # no padding's
    with pytest.raises(UserError, match="holds token 256, and the model's tokens end at 255"):
        TokenDataset([np.array([1, 2, 256], dtype=np.uint16)], 2, vocab_size=256)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="python fineweb.py"):
            list_shards(folder, "train")
    with pytest.raises(UserError, match="is a file"):
        list_shards(Path(__file__), "train")


def test_an_id_that_no_sample_of_a_large_shard_shows_is_found_when_the_shard_is_read(tmp_path):
    tokens = np.zeros(9_000_000, dtype=np.uint16)
    tokens[1_000_000] = 50300
    write_shard(tmp_path / "x_train_000001.npy", tokens)
    windows = TokenDataset(list_shards(tmp_path, "train"), 1024, vocab_size=50257)
    with pytest.raises(UserError, match="x_train_000001.npy holds token 50300"):
        windows.read(0, 1)


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize("change", ["another token", "shorter", "longer", "cut off", "gone"])
def test_a_shard_that_changes_under_the_run_is_noticed_when_it_is_read(change, kind, tmp_path):
    path = tmp_path / f"x_train_000001.{kind}"
    write_shard(path, np.arange(100, dtype=np.uint16))
    windows = TokenDataset([path], 5)
    if change == "cut off":
        path.write_bytes(path.read_bytes()[:-7])
    elif change == "gone":
        path.unlink()
    else:
        start, end = {"another token": (1, 101), "shorter": (0, 50), "longer": (0, 101)}[change]
        write_shard(path, np.arange(start, end, dtype=np.uint16))
    with pytest.raises(UserError, match="x_train_000001"):
        windows.read(0, 1)


@pytest.mark.parametrize("n", [100, 1 << 23, 100_000_000])
def test_a_fingerprint_tells_shards_apart_by_length_ends_and_blocks_between(n, tmp_path):
    tokens = np.zeros(n, dtype=np.uint16)
    seen = {digest(tokens)}
    for at in (0, n - 1, int(np.linspace(0, n - 131072, 8)[3]) if n > 1 << 23 else n // 2):
        tokens[at] += 1
        seen.add(digest(tokens))
    assert len(seen) == 4 and len(fingerprint_blocks(tokens)) <= 1 << 23


def test_importing_prints_nothing_and_loads_nothing_heavy():
    code = ("import sys, fineweb\n"
            "heavy = 'torch', 'datasets', 'tiktoken', 'pyarrow', 'tqdm'\n"
            "print([name for name in heavy if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, capture_output=True, text=True,
                            timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_flags_take_whole_numbers_however_written():
    texts = "7", "1_000", "1e5", "2.0", str(2**60 + 1)
    assert [parse_int(text) for text in texts] == [7, 1000, 10**5, 2, 2**60 + 1]
    for text in ("1.5", "nan", "inf", "1e999", "ten", ""):
        with pytest.raises(Exception, match="not a whole number"):
            parse_int(text)
    assert math.isfinite(parse_int("1e300"))
