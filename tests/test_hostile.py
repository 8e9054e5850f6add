"""Hostile and damaged files run no code, fill no memory, and are refused in a sentence. What concerns one
reader alone (foreign models, cut shards, bad lines) is in the tests of its module."""
import contextlib
import gzip
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import little_memory, script
from test_fineweb import pieces_of
from test_weights import (CALLS, JSON, STRANGE, STRANGE_OF_TORCH, TOUCH, damage, itself, places, repacked,
                          save, strange, with_value)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import corpus.readers
import fineweb
import sample
import train_gpt2
from corpus.readers import LAST_CUT
from corpus.sources import LocalSource
from hellaswag import load_examples
from runtime.cli import UserError
from benchmarks.curves import read_curve
from runtime.dataloader import TokenDataset
from runtime.distributed import Process
from runtime.console import read_metrics
from runtime.shards import SHARD_NAME, open_shard, write_shard

ROOT = Path(__file__).resolve().parent.parent
FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
EXAMPLE = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
HUGE = 10**10                       # bytes or tokens that a file of a kilobyte claims


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where `touch CANARY` would leave its trace."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not Path("CANARY").exists(), "the file ran code"


def refused(read, source):
    with little_memory(), pytest.raises(UserError) as caught:
        read(source)
    assert len(str(caught.value)) < 1000, caught.value


# -----------------------------------------------------------------------------
# the files

def npy(header, version=1, body=200, length=None):
    header = header.encode("latin-1")
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(header) if length is None else length)
    return written("x_train_000000.npy", b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(body))


def written(name, data):
    Path(name).write_bytes(data)
    return Path(name)


def shape(text, kind="<u2"):
    return f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {text}, }}"


def llm_c(count, magic=20240520):
    return written("x_train_000000.bin", np.array([magic, 1, count, *[0] * 253],
                                                  "<i8").astype("<i4").tobytes() + bytes(200))


def pipe():
    os.mkfifo("x_train_000000.npy")
    return Path("x_train_000000.npy")


def lines(name, *rows):
    return written(name, b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n"
                                  for row in rows))


def packed(name, content, keep=None):
    """`content` packed as the name's ending says, and of that only the first `keep` bytes."""
    with pyarrow.output_stream(name, compression="gzip" if name.endswith("gz") else "zstd") as file:
        for part in content:
            file.write(part)
    return written(name, Path(name).read_bytes()[:keep])


def parquet(column, names=("text",), damage=lambda data: data):
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([column] * len(names), names=list(names)),
                                "a.parquet")
    return written("a.parquet", damage(Path("a.parquet").read_bytes()))


def not_utf8():
    return pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, pyarrow.py_buffer(struct.pack("<ii", 0, 1)),
                                                            pyarrow.py_buffer(b"\xff")])


def read_windows(path):
    return TokenDataset([path], 5).read(0, 3)


def read_text(path):
    return sum(len(text) for text, _ in documents_of(path))


def documents_of(path):
    return ((text if isinstance(text, str) else str(text, "utf-8"), begins)
            for text, begins, _ in LocalSource([str(path)]).read())


SHARDS = {
    "objects in a header": lambda: npy(shape("(10,)", "|O"), body=80),
    "objects that are pickled": lambda: np.save("x_train_000000.npy", np.array([CALLS["eval"]], dtype=object))
    or Path("x_train_000000.npy"),
    "a bare pickle": lambda: written("x_train_000000.npy", pickle.dumps(CALLS["eval"])),
    "code as header": lambda: npy(TOUCH), "code in a header": lambda: npy(shape(TOUCH)),
    "code after a header": lambda: npy(shape("(100,)") + "\n" + TOUCH),
    "a trillion tokens": lambda: npy(shape("(1000000000000,)")),
    "2^62 tokens": lambda: npy(shape(f"({2**62},)")),
    "2^70 tokens": lambda: npy(shape(f"({2**70},)")), "fewer than no tokens": lambda: npy(shape("(-5,)")),
    "a type that is huge": lambda: npy(shape("(1,)", "V10000000000")),
    "a type within a type": lambda: npy(shape("(1,)", "(9,9)u2")),
    "a number with a million digits": lambda: npy(shape("(" + "9" * 9000 + ",)")),
    "nesting": lambda: npy("(" * 9000), "nesting in version 3": lambda: npy("(" * 9000, version=3),
    "minus signs": lambda: npy("-" * 9000 + "1"),
    "a header of 4 GB": lambda: npy(shape("(100,)"), version=2, length=2**32 - 1),
    "version 9": lambda: npy(shape("(100,)"), 9),
    "2^31 - 1 tokens in a .bin": lambda: llm_c(2**31 - 1), "-1 tokens in a .bin": lambda: llm_c(-1),
    "-2^31 tokens in a .bin": lambda: llm_c(-2**31), "-512 tokens in a .bin": lambda: llm_c(-512),
    "modded-nanogpt's other magic": lambda: llm_c(100, magic=20240801),
    **({"a named pipe": pipe} if hasattr(os, "mkfifo") else {}),
}
TEXTS = {
    "a .txt that never ends": lambda: packed("a.txt.gz", [b"a" * 10**6] * 30),
    "a .txt of blanks that never ends": lambda: packed("a.txt.zst", [b" " * 10**6] * 30),
    "a line that never ends": lambda: packed("a.jsonl.gz", [b'{"text": "', *[b"a" * 10**6] * 30, b'"}']),
    "a line of .zst that never ends": lambda: packed("a.jsonl.zst", [b'{"text": "a"', *[b" " * 10**6] * 30,
                                                                     b"}"]),
    "blanks that never end": lambda: packed("a.jsonl.zst", [b" " * 10**6] * 30),
    **{f"{keep} bytes of a {end}": lambda end=end, keep=keep: packed(f"a.{end}",
                                                                     [os.urandom(99).hex().encode() * 99],
                                                                     keep)
       for end in ("txt.gz", "txt.zst") for keep in (1, 10, -1)},
    "another sum": lambda: written("a.txt.gz", gzip.compress(b"text" * 99)[:-8] + bytes(8)),
    "something behind a .gz": lambda: written("a.txt.gz", gzip.compress(b"text") + b"more"),
    "lists as objects": lambda: lines("a.jsonl", b'{"text": ' * 100_000),
    "bytes": lambda: lines("a.jsonl", b'{"text": "\xff"}'),
    "a zero byte": lambda: lines("a.jsonl", b'{"text": "a"}\0'),
    "a number": lambda: lines("a.jsonl", b'{"text": 1e999}'),
    "5000 digits": lambda: lines("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}"),
    "text as list": lambda: lines("a.jsonl", {"text": ["a"]}),
    "a column of lists": lambda: parquet([["a"]]), "a column of bytes": lambda: parquet([b"a"]),
    "a column of times": lambda: parquet(pyarrow.array([1], pyarrow.timestamp("s"))),
    "a column of records": lambda: parquet([{"text": "a"}]),
    "a column that is not UTF-8": lambda: parquet(not_utf8()),
    "a column text.text": lambda: parquet(["a"], ["text.text"]), "no column": lambda: parquet(["a"], []),
    "a parquet without its end": lambda: parquet(["a" * 999] * 99, damage=lambda data: data[:-4]),
    "a parquet with a hole": lambda: parquet(["a" * 999] * 99, damage=lambda data: data[:20] + b"\xff" * 40
                                             + data[60:]),
    "a parquet whose end says 4 GB": lambda: parquet(["a"], damage=lambda data: data[:-8]
                                                     + b"\xff\xff\xff\xff" + data[-4:]),
}
EXAMPLES = {
    "a label that is a list": {**EXAMPLE, "label": [1]}, "a label of 1.5": {**EXAMPLE, "label": 1.5},
    "a label that is true": {**EXAMPLE, "label": True},
    "a label of 2^70": {**EXAMPLE, "label": 2**70},
    "a label of 5000 digits": {**EXAMPLE, "label": "9" * 5000},
    "5000 digits": b'{"label": ' + b"9" * 5000 + b"}", "a record as ctx": {**EXAMPLE, "ctx": {}},
    "endings as records": {**EXAMPLE, "endings": {str(i): "a" for i in range(4)}},
    "a million endings": {**EXAMPLE, "endings": [""] * 10**6},
    "objects": b'{"ctx": ' * 100_000, "a number": b"7", "not a number": b"NaN", "two objects": b"{} {}",
    "a zero byte": b"\0",
}
HOSTILE = {
    **{f"shard: {name}": (read_windows, make) for name, make in SHARDS.items()},
    **{f"text: {name}": (read_text, make) for name, make in TEXTS.items()},
    **{f"HellaSwag: {name}": (load_examples, lambda row=row: lines("a.jsonl", row))
       for name, row in EXAMPLES.items()},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_runs_no_code_fills_no_memory_and_is_refused(what, monkeypatch):
    monkeypatch.setattr(corpus.readers, "MAX_DOCUMENT", 10**7)
    read, make = HOSTILE[what]
    refused(read, make())


def to_zero(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(20 * 10**9)


def in_folder(name, read):
    """read() of a new folder with the file as its `name`."""
    def inner(path):
        Path("out").mkdir()
        path.rename(Path("out") / name)
        read("out")
    return inner


ENDLESS_READERS = {
    "HellaSwag": load_examples, "metrics.csv": read_metrics,
    "metrics.csv to compare": in_folder("metrics.csv", read_curve),
    "a curve": lambda path: read_curve(str(path.rename("curve.csv"))),
    "the manifest of a run that resumes": in_folder("manifest.json", lambda out: fineweb.main(
        ["--input", str(lines("a.jsonl", {"text": "a"})), "--out", out])),
    "the manifest of another part": in_folder("manifest_p1of2.json", lambda out: fineweb.main(
        ["--input", str(lines("a.jsonl", {"text": "a"})), "--part", "0/2", "--out", out])),
    "the manifest of a folder to verify": in_folder("manifest.json",
                                                    lambda out: fineweb.main(["--verify", out])),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("make", [to_zero, sparse, os.mkfifo], ids=["a device", "20 GB", "a pipe"])
@pytest.mark.parametrize("what", ENDLESS_READERS)
def test_a_file_without_an_end_is_refused_in_little_memory(what, make):
    make(Path("endless"))
    with little_memory(), pytest.raises(UserError) as caught:
        ENDLESS_READERS[what](Path("endless"))
    assert re.search("not a regular file|has 20,000 MB|neither model", str(caught.value)), caught.value
    assert "smaller model" not in str(caught.value)


def test_numbers_beyond_reason_are_mistakes():
    with pytest.raises(UserError, match="--num_samples 1000000000: must be at most 1000"):
        sample.parse_flags(["--num_samples", "1e9"])
    with pytest.raises(UserError, match="--workers 1000000: must be at most"):
        fineweb.parse_args(["--workers", "1e6"])


def test_a_run_on_a_shard_with_a_flipped_bit_ends_before_it_writes_anything():
    lines("a.jsonl", *({"text": f"document {i} " * 20} for i in range(40)))
    fineweb.main(["--input", "a.jsonl", "--out", "data", "--workers", "1"])
    shard = Path("data/text_train_000001.npy")
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    result = script("train_gpt2.py", "--data", "data", "--out", "log", "--n_layer", 1, "--n_head", 1,
                     "--n_embd", 8, "--sequence_length", 8, "--total_batch_size", 32, "--max_steps", 2)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result
    assert re.search("text_train_000001.npy is damaged .*`python fineweb.py --verify data`", result.stderr)
    assert not Path("log").exists()


@pytest.mark.parametrize("what", ["shard: 2^62 tokens", "HellaSwag: a label of 5000 digits",
                                  "text: a column that is not UTF-8"])
def test_a_command_given_a_hostile_file_says_one_line_and_exits_2(what):
    path = HOSTILE[what][1]()
    shutil.copy(path, "x_val_000000.npy")
    name, flags = {"shard": ("train_gpt2.py", ["--data", ".", "--out", "log"]),
                   "HellaSwag": ("hellaswag.py", ["--data", path]),
                   "text": ("fineweb.py", ["--input", path, "--out", "o"]),
                   }[what.split(":")[0]]
    result = script(name, *flags)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result
    assert result.stderr.startswith(name + ": ") and "Traceback" not in result.stderr


def test_half_a_kilobyte_of_parquet_that_repeats_a_long_text_is_read_in_little_memory():
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 600, pyarrow.int32()),
                                               pyarrow.array(["x" * 10**6]))
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), "a.parquet", compression="zstd")
    assert Path("a.parquet").stat().st_size < 1000
    with little_memory():
        assert read_text("a.parquet") == 600 * 10**6


def test_a_text_without_white_space_is_looked_through_once(monkeypatch):
    class Watched:
        seen = 0

        def match(self, text, start=0):
            self.seen += len(text) - start
            return cut.match(text, start)

    cut, watched = LAST_CUT, Watched()
    monkeypatch.setattr(corpus.readers, "LAST_CUT", watched)
    Path("a.txt").write_text("word " * 1000 + "a" * 10**6 + " " * 1000)
    assert list(map(len, pieces_of("a.txt", 1000)))[-1] == 1000 and watched.seen < 1.1 * 10**6


# -----------------------------------------------------------------------------
# any damage at all: a good result or a UserError

@settings(FUZZ, max_examples=200)
@given(st.data())
def test_whatever_is_damaged_in_a_shard_its_windows_are_read_or_refused(data):
    path = Path(f"x_train_000000.{data.draw(st.sampled_from(['npy', 'bin']))}")
    write_shard(path, np.arange(100, dtype=np.uint16))
    path.write_bytes(data.draw(damage(path.read_bytes())))
    with contextlib.suppress(UserError):
        tokens = open_shard(path)
        rows = TokenDataset([path], 5, vocab_size=50257).read(0, 30)
        assert tokens.dtype == rows.dtype == np.uint16 and tokens.ndim == 1 and rows.shape == (30, 6)


@settings(FUZZ, max_examples=150)
@given(st.data())
def test_whatever_is_damaged_in_text_its_documents_are_read_or_refused(data):
    good = b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n"
                    for text in ("a b", "", "\u4e2d\ud800", "d" * 99))
    name = data.draw(st.sampled_from(["a.jsonl", "a.txt", "a.jsonl.gz", "a.txt.zst", "a.parquet"]))
    if name == "a.parquet":
        parquet(["a", "b" * 99])
    elif name.endswith(("gz", "zst")):
        packed(name, [good])
    else:
        Path(name).write_bytes(good)
    Path(name).write_bytes(data.draw(damage(Path(name).read_bytes())))
    with contextlib.suppress(UserError):
        assert all(isinstance(text, str) and isinstance(first, bool)
                   for text, first in documents_of(name))


@settings(FUZZ, max_examples=150)
@given(st.data())
def test_whatever_is_in_jsonl_there_are_documents_and_examples_or_they_are_refused(data):
    good = data.draw(st.sampled_from([EXAMPLE, {"text": "a"}]))
    row = data.draw(JSON | st.builds(lambda key, value: good | {key: value}, st.sampled_from([*good]), JSON))
    line = data.draw(damage(json.dumps(row).encode()) | st.just(json.dumps(row).encode()))
    path = lines("a.jsonl", good, line)
    with contextlib.suppress(UserError):
        for example in load_examples(path):
            assert {*map(type,
                         [example["ctx"], *example["endings"]])} == {str} and len(example["endings"]) == 4
            assert type(example["label"]) is int and 0 <= example["label"] < 4
    with contextlib.suppress(UserError):
        assert all(isinstance(text, str) for text, _ in documents_of(path))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A text, and the folder of an unfinished run over it."""
    folder = tmp_path_factory.mktemp("begun")
    lines(folder / "a.jsonl", *({"text": f"document {i} " * 20} for i in range(40)))
    flags = ["--input", str(folder / "a.jsonl"), "--val_tokens", "100", "--shard_size", "700", "--workers",
             "1"]
    fineweb.main([*flags, "--out", str(folder / "out")])
    manifest = json.loads((folder / "out/manifest.json").read_text())
    manifest |= {"complete": False, "mark": [0, 0], "shards": manifest["shards"][:3], "tokens": 1500}
    return folder / "out", flags, manifest


@settings(FUZZ, max_examples=150)
@given(st.data())
def test_whatever_a_manifest_says_the_run_goes_on_or_refuses_and_writes_nowhere_else(interrupted, data):
    folder, flags, manifest = interrupted
    whole = json.dumps(manifest).encode()
    structure = st.builds(lambda path, how: json.dumps(with_value(manifest, path, **how)).encode(),
                          st.sampled_from([*places(manifest)]),
                          strange([*STRANGE, "../../evil.npy", [5, 5], [0, 1]]))
    shutil.rmtree("out", ignore_errors=True)
    shutil.copytree(folder, "out")
    Path("out/manifest.json").write_bytes(data.draw(structure | damage(whole)))
    with contextlib.suppress(UserError):
        fineweb.main([*flags, "--out", "out"])
        assert json.loads(Path("out/manifest.json").read_text())["complete"]
    # of a wrong place in the text nobody can tell: then there are more shards or fewer
    others = {path.name for path in Path("out").iterdir() if not SHARD_NAME.match(path.name)}
    assert others == {"manifest.json"}


@pytest.mark.parametrize("place, value", [
    (("mark",), [0]), (("mark",), [0, "a"]), (("mark",), [0, -1]), (("mark",), [0, 2]), (("mark",), [0, 1.5]),
    (("mark",), "00"),
    (("mark",), [math.nan, 0]), (("mark",), [0, {"deep": [[]]}]), (("complete",), "yes"),
    (("shards", 0, "tokens"), "100"),
    (("shards", 0, "tokens"), math.inf), (("shards", 1, "end", "token"), -5),
    (("shards", 1, "end", "unit"), 1.5), (("shards", 2, "end", "unit"), 0),
    (("shards", 0, "file"), ".."), (("shards", 0, "file"), "\0"), (("shards", 0, "file"), "../outside.npy"),
    (("shards", 0, "file"), "/etc/passwd")])
def test_a_manifest_with_a_wrong_value_is_refused(place, value, interrupted):
    folder, flags, manifest = interrupted
    shutil.copytree(folder, "out")
    shutil.copy(folder / manifest["shards"][0]["file"], "outside.npy")
    Path("out/manifest.json").write_text(json.dumps(with_value(manifest, place, value)))
    refused(fineweb.main, [*flags, "--out", "out"])


# -----------------------------------------------------------------------------
# checkpoints, by --resume

@pytest.fixture(scope="module", params=["gpt2", "speedrun", "frontier"])
def trained(request, tmp_path_factory):
    """The checkpoint of a real run of each recipe, `path` and `content`, in float16 so that its scaler has
    a state."""
    folder = tmp_path_factory.mktemp("trained")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM,
                                                 getattr(signal, "SIGUSR1", signal.SIGINT))}
    for i, split in enumerate(("val", "train")):
        write_shard(folder / f"x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
    train_gpt2.train(["--data", str(folder), "--out", str(folder / "log"), "--n_layer", "1", "--n_head", "1",
                      "--n_embd", "4",
                      "--block_size", "8", "--vocab_size", "96", "--total_batch_size", "32", "--max_steps",
                      "2",
                      *(["--recipe", request.param, "--window", "4"] if request.param != "gpt2" else []),
                      "--warmup_steps", "1", "--val_tokens", "8", "--sample_every", "0", "--hellaswag_every",
                      "0",
                      "--dtype", "float16", "--device", "cpu", "--no_plot"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    class Trained:                              # which hypothesis need not print
        recipe = request.param
        path = folder / "log/checkpoint_000002.pt"
        content = torch.load(path, weights_only=True)
    return Trained


@pytest.fixture
def some_data():
    """What lets the command pass its first look at its folders."""
    Path("edu_fineweb10B").mkdir()
    Path("log").mkdir()
    for i, split in enumerate(("val", "train")):
        write_shard(Path("edu_fineweb10B") / f"x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)


def resume(path):
    """What the command does before its first step, and what that step asks of a state. --data is as the
    checkpoint says."""
    config, given = train_gpt2.parse_flags(["--out", "log", "--resume", str(path), "--device", "cpu"])
    with contextlib.redirect_stdout(io.StringIO()):
        run = train_gpt2.set_up(config, given, Process())
    run.saver.close()
    run.reporter.log.file.close()
    lr = train_gpt2.RECIPES[run.config.recipe].set_hparams(run.state.step, run.config, run.state)
    assert math.isfinite(lr)
    run.state.scaler.scale(torch.ones(()))
    run.state.model(torch.zeros(1, 8, dtype=torch.int64))


def fuzz(check, trained, examples):
    """`check(data)` for so many examples of gpt2's checkpoint, for a quarter of each other recipe's: they
    differ in a few fields, and are read by the same code."""
    examples //= 1 if trained.recipe == "gpt2" else 4
    settings(FUZZ, max_examples=examples)(given(st.data())(check))()


def test_the_checkpoint_of_these_tests_is_good(trained, some_data):
    resume(trained.path)


def test_whatever_bytes_are_damaged_a_run_goes_on_or_they_refuse(trained, some_data):
    def check(data):
        kind = data.draw(st.sampled_from(["pickle in a zip", "pickle in a zip", "zip", "legacy"]))
        if kind == "pickle in a zip":  # the sums of a zip would give most of what is damaged there away
            repacked(lambda pickled: data.draw(damage(pickled)), content=trained.content)
        else:
            path = save(Path("a.pt"), trained.content, _use_new_zipfile_serialization=kind == "zip")
            path.write_bytes(data.draw(damage(path.read_bytes())))
        with contextlib.suppress(UserError):
            resume(Path("a.pt"))
    fuzz(check, trained, 120)


def test_whatever_value_is_replaced_a_run_goes_on_or_they_refuse(trained, some_data):
    everywhere = [*places(trained.content)]

    def check(data):
        path, how = data.draw(st.sampled_from(everywhere)), data.draw(strange(STRANGE_OF_TORCH))
        with contextlib.suppress(UserError):
            resume(save(Path("a.pt"), with_value(trained.content, path, **how)))
    fuzz(check, trained, 150)


@pytest.mark.parametrize("place, kind", [
    (("config", "n_layer"), list), (("model_config", "n_layer"), list), (("step",), list),
    (("val_loss",), list),
    (("best",), tuple), (("data", "train", 0, 0), list), (("data", "train", 0, 2), list)])
def test_a_run_does_not_go_on_from_a_value_that_holds_itself_again_and_again(place, kind, trained, some_data):
    refused(resume, save(Path("a.pt"), with_value(trained.content, place, itself(kind=kind))))


WRONG = [
    (("config", "max_steps"), None), (("config", "max_lr"), None), (("config", "dtype"), "load"),
    (("config", "dtype"), None),
    (("config", "data"), None), (("model_config", "n_layer"), torch.zeros(2)),
    (("data", "train", 0, 1), torch.zeros(2)),
    (("scaler", "scale"), "x"), (("scaler", "scale"), math.nan), (("scaler", "_growth_tracker"), math.inf)]


@pytest.mark.parametrize("place, value", [(("config", "data"), "x" * 300), (("config", "data"), "\0"),
                                          *WRONG])
def test_a_run_does_not_go_on_from_a_wrong_value(place, value, trained, some_data):
    refused(resume, save(Path("a.pt"), with_value(trained.content, place, value)))
