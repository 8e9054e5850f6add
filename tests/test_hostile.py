"""Hostile and damaged files run no code, fill no memory, and are refused in a sentence. What concerns one
reader alone (cut shards, bad lines) is in the tests of its module."""
import contextlib
import gzip
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import little_memory, llm_c_file, script, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import LargestStorage, TINY, make_model, nanogpt_checkpoint, own_checkpoint, save

import fineweb
import runtime.text
from benchmarks.curves import read_curve
from frontier import FrontierGPT
from hellaswag import load_examples
from model import GPTConfig, MODELS, load_model
from runtime.cli import RunError, UserError, print_error
from runtime.console import read_metrics
from runtime.dataloader import TokenDataset
from runtime.shards import SHARD_NAME, open_shard, write_shard
from runtime.text import read_rows
from runtime.tokenizer import LAST_CUT
from runtime.weights import model_from_checkpoint

FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
WPE, WTE, LN = "transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight"
EXAMPLE = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
HUGE = 10**10                       # bytes, numbers or tokens that a file of a kilobyte claims


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where `touch CANARY` would leave its trace."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not Path("CANARY").exists(), "the file ran code"


def refused(read, source, *named):
    """In one sentence, which names the file, and in little memory."""
    with little_memory(), pytest.raises(UserError) as caught:
        read(source)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000, message
    assert any(str(name) in message for name in named or [source]), message


# -----------------------------------------------------------------------------
# what damages: bytes, values, calls

def places(tree, *path):
    """The path of each value in nested dicts, lists and tuples."""
    sequence = enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in tree.items() if isinstance(tree, dict) else sequence:
        yield (*path, key)
        yield from places(value, *path, key)


def with_value(tree, path, value=None, remove=False):
    """A copy of `tree` with `value` at `path`, or without that entry."""
    if not path:
        return value
    out = dict(tree) if isinstance(tree, dict) else list(tree)
    if remove and len(path) == 1:
        del out[path[0]]
    else:
        out[path[0]] = with_value(out[path[0]] if len(path) > 1 else None, path[1:], value, remove)
    return tuple(out) if isinstance(tree, tuple) else out


def itself(depth=8, kind=list):
    """A list of lists of lists ... that are all the same one: a few bytes, and 8^(depth + 1) numbers as
    text."""
    value = kind([0] * 8)
    for _ in range(depth):
        value = kind([value] * 8)
    return value


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


TOUCH = "__import__('os').system('touch CANARY')"
CALLS = {"eval": Call(eval, TOUCH), "exec": Call(exec, TOUCH), "a command": Call(os.system, "touch CANARY"),
         "unpickling": Call(pickle.loads, pickle.dumps(Call(os.system, "touch CANARY")))}


STRANGE = [None, True, -1, 0, 3, 2**70, 1.5, math.nan, math.inf, "", "x" * 300, "\0", [], {}, [[]],
           {"a": None}]
STRANGE_OF_TORCH = STRANGE + [(), (1.5, 2), b"", b"abc", torch.zeros(3, 5),
                              torch.zeros((), dtype=torch.int64),
                              torch.zeros(1, 5).expand(7, 5), torch.full((4,), math.nan),
                              torch.zeros(4).to_sparse(),
                              torch.zeros(4, device="meta"), torch.zeros(5056, dtype=torch.uint8),
                              torch.zeros(4).double()]
JSON = st.recursive(st.sampled_from(STRANGE) | st.integers() | st.floats() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=5)


@st.composite
def damage(draw, content):
    """`content`, bytes, with up to four flips, cuts, insertions and repetitions, half of them near its
    beginning."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(out), 160)) | st.integers(0, len(out)))
        size = draw(st.sampled_from([1, 1, 2, 8, 100]))
        kind = draw(st.sampled_from(["flip", "flip", "overwrite", "insert", "remove", "repeat", "end"]))
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind in ("overwrite", "insert"):
            out[at:at + size * (kind == "overwrite")] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "repeat":
            out[at:at] = out[at:at + size]
        elif kind == "remove":
            del out[at:at + size]
        elif kind == "end" and draw(st.booleans()):
            del out[at:]
    return bytes(out)


def strange(values):
    """What `with_value` is to do at a place: put one of `values` there, or remove what is."""
    return st.sampled_from([*({"value": value} for value in values), {"remove": True}])


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
    """Its rows are UTF-8, of which <|endoftext|> separates the documents."""
    return sum(len(row.decode()) for row in read_rows(Path(path), "text", b"<|endoftext|>", str(path)))


def small_model():
    return make_model(block_size=8, n_layer=1, n_head=1, n_embd=4)


def small_frontier():
    torch.manual_seed(0)
    return FrontierGPT(FrontierGPT.Config(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))


def in_folder(name):
    """A good folder in the Hugging Face format in which `name` is to be damaged."""
    def make():
        small_model().save_pretrained("hf")
        if name == "pytorch_model.bin":
            from safetensors.torch import load_file
            torch.save(load_file("hf/model.safetensors"), "hf/pytorch_model.bin")
            Path("hf/model.safetensors").unlink()
        elif name not in ("model.safetensors", "config.json"):
            Path("hf/model.safetensors").rename("hf/part.safetensors")
            index = {"weight_map": {"t": "part.safetensors"}}
            Path("hf/model.safetensors.index.json").write_text(json.dumps(index))
        return Path("hf"), Path("hf") / name
    return make


def in_file(write):
    return lambda: (write(Path("a.pt")), Path("a.pt"))


FORMATS = {                             # what writes a good one -> (what is given, the file to damage)
    "zip": in_file(lambda path: save(path, own_checkpoint(small_model()))),
    "legacy": in_file(lambda path: save(path, own_checkpoint(small_model()),
                                        _use_new_zipfile_serialization=False)),
    "llm.c": in_file(lambda path: llm_c_file(path, small_model())),
    **{name: in_folder(name) for name in ("model.safetensors", "config.json", "model.safetensors.index.json",
                                          "part.safetensors", "pytorch_model.bin")},
}
DAMAGE = {
    "no": None, "empty": lambda data: b"", "3 bytes of": lambda data: data[:3],
    "a tenth of": lambda data: data[:len(data) // 10], "all but a byte of": lambda data: data[:-1],
    "text as": lambda data: b"hello\n" * 100, "another zip as": lambda data: a_zip(),
    "random bytes as": lambda data: random.Random(0).randbytes(1000),
    "lists without an end as": lambda data: b"[" * 100_000,
    "settings that are a list as": lambda data: b"[]",
}


def damaged(format, how):
    """A file of that format, damaged, which was good before."""
    source, path = FORMATS[format]()
    load_model(source)
    good = path.read_bytes()
    path.unlink()
    if DAMAGE[how]:
        path.write_bytes(DAMAGE[how](good))
    return source


def with_call(name, how):
    """A checkpoint that would run code if it were unpickled."""
    pickle.loads(pickle.dumps(CALLS[name]))
    Path("CANARY").unlink()             # it would
    checkpoint = nanogpt_checkpoint(make_model().state_dict())
    for place in (("config",), ("model_args",), ("extra",), ("model", "w")):
        checkpoint = with_value(checkpoint, place, CALLS[name])
    path = save(Path("a.pt"), checkpoint, _use_new_zipfile_serialization=how != "legacy")
    if how == "bare":
        path.write_bytes(pickle.dumps(checkpoint))
    if how != "pytorch_model.bin":
        return path
    source, target = FORMATS[how]()
    path.rename(target)
    return source


def a_zip():
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("hello.txt", "hello")
    return file.getvalue()


def repacked(change=lambda data: data, method=zipfile.ZIP_STORED, content=None):
    """A checkpoint whose zip was packed anew with `method`, its pickle changed by `change`, with the right
    sums."""
    good = save(Path("good.pt"), content or own_checkpoint(small_model()))
    with zipfile.ZipFile(good) as old, zipfile.ZipFile("a.pt", "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return Path("a.pt")


def legacy(change):
    path = save(Path("a.pt"), own_checkpoint(small_model()) | {"extra": torch.zeros(777)},
                _use_new_zipfile_serialization=False)
    path.write_bytes(change(path.read_bytes()))
    return path


def number(n):
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)           # pickle's LONG1


def size_of_extra(n):
    return lambda data: data.replace(b"M\x09\x03", number(n))           # of torch.zeros(777)


def calls(function, argument):
    """A pickle that calls `function`, one that torch's weights_only reader knows."""
    return b"\x80\x02}X\x05\x00\x00\x00modelc" + function + b"\n" + argument + b"\x85Rs."


def doubled(times=18):
    """A pickle of a thousand letters that are written as hexadecimal numbers, `times` times over."""
    start = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"X\x05\0\0\0utf-8\x86R"
    return b"\x80\x02" + b"c_codecs\nencode\n" * (times + 1) + start + b"X\x03\0\0\0hex\x86R" * times + b"."


def nested():
    """A pickle with lists 100,000 deep as recipe and config."""
    return b"\x80\x02}(X\x05\x00\x00\x00model}" + b"".join(
        b"X" + struct.pack("<I", len(name)) + name + b"]" * 100_000 + b"a" * 99_999
        for name in (b"recipe", b"config")) + b"u."


def behind_another():
    """A packed archive before one that is not, of which zipfile reads the last."""
    data = repacked(lambda data: b"a" * 10**8, zipfile.ZIP_DEFLATED).read_bytes()
    return data + save(Path("a.pt"), own_checkpoint(small_model())).read_bytes()


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
    **{f"the label {label}": {**EXAMPLE, "label": label}
       for label in ([1], 1.5, True, 2**70, 4, -1, "", None, math.inf, math.nan)},
    **{f"the endings {endings}": {**EXAMPLE, "endings": endings}
       for endings in (["b", "c", "d"], "bcde", ["b", "c", "d", 4])},
    "no ctx": {"endings": EXAMPLE["endings"], "label": 1},
    "no label": {"ctx": "a", "endings": EXAMPLE["endings"]},
    "a ctx that is none": {**EXAMPLE, "ctx": None}, "half a line": json.dumps(EXAMPLE)[:-5].encode(),
    "a list": [1], "a text": "ctx", "nothing": b"", "a byte-order mark of UTF-16": b"\xff\xfe\x00",
    "a label of 5000 digits": {**EXAMPLE, "label": "9" * 5000},
    "5000 digits": b'{"label": ' + b"9" * 5000 + b"}", "a record as ctx": {**EXAMPLE, "ctx": {}},
    "endings as records": {**EXAMPLE, "endings": {str(i): "a" for i in range(4)}},
    "a million endings": {**EXAMPLE, "endings": [""] * 10**6},
    "objects": b'{"ctx": ' * 100_000, "a number": b"7", "not a number": b"NaN", "two objects": b"{} {}",
    "a zero byte": b"\0",
}
EXTRA = own_checkpoint(make_model()) | {"extra": torch.zeros(777)}
CHECKPOINTS = {
    "a packed pickle": lambda: repacked(lambda data: b"a" * 10**8, zipfile.ZIP_DEFLATED),
    "packed by bzip2": lambda: repacked(method=zipfile.ZIP_BZIP2),
    "a packed archive before": lambda: written("a.pt", behind_another()),
    "a storage larger than its record": lambda: repacked(size_of_extra(HUGE), content=EXTRA),
    "sizes below zero": lambda: repacked(size_of_extra(-777), content=EXTRA),
    "a record of 1.4 GB": lambda: written("a.pt", repacked(content=EXTRA).read_bytes().replace(
        struct.pack("<II", 6144, 6144), struct.pack("<II", HUGE % 2**32, HUGE % 2**32))),
    "a legacy storage of 40 GB": lambda: legacy(size_of_extra(HUGE)),
    "a legacy storage below zero": lambda: legacy(size_of_extra(-777)),
    "a gigabyte of zeros": lambda: repacked(lambda data: calls(b"builtins\nbytearray", number(10**9))),
    "a gigabyte of zeros for Python 2": lambda: repacked(lambda data: calls(b"__builtin__\nbytearray",
                                                                            number(10**9))),
    "a gigabyte of zeros in a legacy file": lambda: written("a.pt", calls(b"builtins\nbytearray",
                                                                          number(10**9))),
    "a text that is doubled again and again": lambda: repacked(lambda data: doubled()),
    "lists 100,000 deep": lambda: repacked(lambda data: nested()),
}


HOSTILE = {                             # how it is read, and what makes it
    **{f"shard: {name}": (read_windows, make) for name, make in SHARDS.items()},
    **{f"text: {name}": (read_text, make) for name, make in TEXTS.items()},
    **{f"HellaSwag: {name}": (load_examples, lambda row=row: lines("a.jsonl", row))
       for name, row in EXAMPLES.items()},
    **{f"checkpoint: {name}": (load_model, make) for name, make in CHECKPOINTS.items()},
    **{f"{what} {name}": (load_model, lambda name=name, what=what: damaged(name, what))
       for name in FORMATS for what in DAMAGE},
    **{f"pickle: {name}, {how}": (load_model, lambda name=name, how=how: with_call(name, how))
       for name in CALLS for how in ("bare", "zip", "legacy", "pytorch_model.bin")},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_or_damaged_file_runs_no_code_fills_no_memory_and_is_refused(what, monkeypatch):
    monkeypatch.setattr(runtime.text, "MAX_DOCUMENT", 10**7)
    read, make = HOSTILE[what]
    refused(read, make())


def to_zero(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(20 * 10**9)


def found_in_folder(name, read):
    """read() of a new folder with the file as its `name`."""
    def inner(path):
        Path("out").mkdir()
        path.rename(Path("out") / name)
        read("out")
    return inner


def loaded_with(format):
    """load_model of a good model in whose `format` the file takes a place."""
    def inner(endless):
        source, path = FORMATS[format]()
        path.unlink()
        endless.rename(path)
        load_model(source)
    return inner


def resume_in(out):
    write_shard(Path(out) / "text_val_000000.npy", np.arange(9, dtype=np.uint16))
    fineweb.main(["--input", str(lines("a.jsonl", {"text": "a " * 400})), "--out", out])


ENDLESS_READERS = {
    "HellaSwag": load_examples, "metrics.csv": read_metrics,
    "metrics.csv to compare": found_in_folder("metrics.csv", read_curve),
    "a curve": lambda path: read_curve(str(path.rename("curve.csv"))),
    "the manifest of a run that resumes": found_in_folder("manifest.json", resume_in),
    "the manifest of a folder to verify": found_in_folder("manifest.json",
                                                          lambda out: fineweb.main(["--verify", out])),
    **{name: loaded_with(name) for name in ("zip", "config.json", "model.safetensors.index.json")},
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("make", [to_zero, sparse, os.mkfifo, Path.mkdir],
                         ids=["a device", "20 GB", "a pipe", "a folder"])
@pytest.mark.parametrize("what", ENDLESS_READERS)
def test_what_is_no_file_or_has_no_end_is_refused_in_little_memory(what, make):
    make(Path("endless"))
    refused(ENDLESS_READERS[what], Path("endless"), "endless", "curve.csv", "out", "a.pt", "hf")


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


def test_a_text_without_white_space_is_looked_through_once(monkeypatch):
    class Watched:
        seen = 0

        def match(self, text, start=0):
            self.seen += len(text) - start
            return cut.match(text, start)

    cut, watched = LAST_CUT, Watched()
    monkeypatch.setattr(runtime.text, "LAST_CUT", watched)
    monkeypatch.setattr(runtime.text, "BLOCK", 1000)
    Path("a.txt").write_text("word " * 1000 + "a" * 10**6 + " " * 1000)
    assert read_text("a.txt") == 13 + 5000 + 10**6 + 1000 and watched.seen < 1.1 * 10**6


def test_a_flipped_bit_in_any_record_of_a_checkpoint_is_refused():
    path = save(Path("a.pt"), own_checkpoint(small_model()))
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {r.filename: archive.read(r) for r in archive.infolist() if r.file_size}
    assert len(records) > 15
    for content in records.values():
        at = good.index(content) + len(content) // 2
        path.write_bytes(good[:at] + bytes([good[at] ^ 8]) + good[at + 1:])
        refused(load_model, path)


def test_a_flipped_bit_anywhere_is_refused_or_changes_no_value():
    """Names and lengths in the zip's own lists, and the bytes between records that nothing reads."""
    path, dice, refusals = save(Path("a.pt"), own_checkpoint(small_model())), random.Random(3), 0
    good, model = bytearray(path.read_bytes()), load_model(path)
    for _ in range(100):
        damaged = good.copy()
        damaged[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            assert all(map(torch.equal, load_model(path).parameters(), model.parameters()))
        except UserError:
            refusals += 1
    assert refusals > 10


def test_a_config_of_another_class_than_build_nanogpts_is_refused():
    refused(load_model, save(Path("a.pt"), {"model": make_model().state_dict(), "config": GPTConfig(**TINY)}))


def test_escape_codes_of_a_file_do_not_reach_the_terminal(capsys):
    weights = make_model().state_dict() | {"\x1b]0;owned\x07\x1b[2J\u202e\r\n\x85": torch.zeros(3)}
    with pytest.raises(UserError) as caught:
        load_model(save(Path("a.pt"), own_checkpoint(make_model()) | {"model": weights}))
    print_error(caught.value)
    line = capsys.readouterr().err
    assert line.endswith("\n") and line[:-1].isprintable() and "owned" in line


# -----------------------------------------------------------------------------
# any damage at all: a good result or a UserError

# -----------------------------------------------------------------------------
# values that are wrong

NONE = object()                         # the entry is removed
MATRIX = torch.zeros(24, 16)
WRONG_VALUES = {                        # of this project's checkpoint
    (): [torch.zeros(3), [], {}, make_model().state_dict()],
    ("recipe",): ["gpt9", ["gpt2"], NONE, itself(40, tuple)],
    ("model",): [[1, 2], NONE, {}, itself()],
    ("model_config",): [[1], NONE, {}, itself(kind=tuple), OrderedDict(enumerate(itself()))],
    ("model_config", "n_head"): [3, 0, NONE], ("model_config", "n_embd"): [-16, "16", 16.0, 10**12],
    ("model_config", "n_layer"): [True, 3, 1, 10**9, itself()], ("model_config", "vocab_size"): [95, 10**100],
    ("model_config", "block_size"): [25, 2**23], ("model_config", "gelu"): ["swish", ["tanh"], itself()],
    ("model", WPE): [NONE, 3, torch.zeros(23, 16), torch.tensor(1.0), MATRIX.long(), MATRIX.cfloat(),
                     MATRIX.to_sparse(), MATRIX.to("meta"), torch.zeros(1).expand(24, 16), MATRIX + math.nan,
                     MATRIX - math.inf],
    ("model", "lm_head.weight"): [torch.zeros(96, 16)], ("model", "transformer.extra"): [torch.zeros(3)],
    ("model", "transformer.h.2.ln_1.weight"): [torch.zeros(16)], ("model", 7): [torch.zeros(3)],
}


@pytest.mark.parametrize("place", WRONG_VALUES, ids=lambda place: ".".join(map(str, place)))
def test_a_checkpoint_with_a_wrong_value_is_refused(place):
    for value in WRONG_VALUES[place]:
        wrong = with_value(own_checkpoint(make_model()), place, value, remove=value is NONE)
        refused(load_model, save(Path("a.pt"), wrong))


@pytest.mark.parametrize("changes", [
    {"magic": 20240520}, {"magic": 20240325}, {"version": 1}, {"n_layer": 0}, {"n_layer": 1025},
    {"n_layer": 2**31 - 1}, {"n_embd": -16}, {"n_embd": 2**24 - 1}, {"padded": 2**24 - 1}, {"padded": 144},
    {"vocab_size": 144}, {"n_head": 3}, {"n_layer": 1024, "n_embd": 2**24 - 1, "padded": 2**24 - 1}])
def test_a_model_of_llm_c_with_a_wrong_header_is_refused(changes):
    refused(load_model, llm_c_file(Path("a.bin"), make_model(), **changes))


def test_a_model_of_llm_c_that_has_no_end_or_is_not_finite_is_refused():
    path = llm_c_file(Path("a.bin"), model := make_model())
    good = path.read_bytes()
    for damaged in (good + b"\0", good[:1024], good[:28], good[:-64] + bytes(64)):
        path.write_bytes(damaged)
        refused(load_model, path)
    model.transformer.ln_f.weight.data[3] = math.nan
    refused(load_model, llm_c_file(path, model))
    with open(path, "wb") as file:                      # 8 GB of zeros that take a kilobyte of the disk
        file.write(struct.pack("<8i", 20240326, 5, 16, 96, 1, 1, 1024, 2**22))
        file.truncate(1024 + 2 * ((2**22 + 16 + 2) * 1024 + 12 * 1024**2 + 13 * 1024))
    refused(load_model, path)


WRONG_SETTINGS = {                      # of a GPT-2's config.json
    "model_type": ["llama", None, 7, {}], "activation_function": ["relu", []], "n_inner": [32],
    "layer_norm_epsilon": [1e-6, "x" * 10**6], "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False], "tie_word_embeddings": [False], "add_cross_attention": [True],
    "auto_map": [{"AutoModelForCausalLM": "modeling_evil.Evil"}],
    "n_layer": [3, 10**9, -1, None], "n_embd": [2**23, None, "4", 10**12], "n_head": [3, 2**24 - 1],
    "n_positions": [9, 2**24 - 1], "vocab_size": [95, 10**12],
}
OF_FRONTIER = {key: [10**12, -1, "96", None] for key in
               ("n_layer", "n_embd", "n_head", "block_size", "padded_vocab_size", "window")} | {
    "model_type": ["speedrun", "gpt2", {}]}


@pytest.mark.parametrize("model, settings", [(small_model, WRONG_SETTINGS), (small_frontier, OF_FRONTIER)],
                         ids=["gpt2", "frontier"])
def test_a_folder_with_a_wrong_setting_is_refused(model, settings):
    model().save_pretrained("hf")
    path = Path("hf/config.json")
    good = json.loads(path.read_text())
    Path("hf/modeling_evil.py").write_text("open('CANARY', 'w')")
    for key, values in settings.items():
        for value in values:
            path.write_text(json.dumps(good | {key: value}))
            refused(load_model, Path("hf"))
    path.write_text('{"model_type": ' + "9" * 5000 + "}")
    refused(load_model, Path("hf"))


@pytest.mark.parametrize("names", [["../outside.safetensors"], ["part.safetensors", "/etc/passwd"], [".."],
                                   [""], [3], [None], ["\0"], ["part2.safetensors"],
                                   ["model.safetensors.index.json"]], ids=str)
def test_an_index_that_names_another_file_is_refused(names):
    source, path = FORMATS["model.safetensors.index.json"]()
    shutil.copy(source / "part.safetensors", "outside.safetensors")
    path.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    refused(load_model, source)


def safetensors_header(change, length=None):
    """Changes the header of hf/model.safetensors, or only the length that it claims."""
    data = Path("hf/model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8:8 + size]))).encode()
    start = (length or len(text)).to_bytes(8, "little")
    Path("hf/model.safetensors").write_bytes(start + text + data[8 + size:])


@pytest.mark.parametrize("length", [None, 2**63, 99 * 10**6])
@pytest.mark.parametrize("model, values", [
    (small_model, {"data_offsets": [0, 2**40]}), (small_model, {"data_offsets": [-8, 0]}),
    (small_model, {"data_offsets": [1536, 0]}), (small_model, {"shape": [2**62, 2**62]}),
    (small_model, {"shape": [2**40, 0]}), (small_model, {"dtype": "PY"}), (small_frontier, {"dtype": "F64"})])
def test_safetensors_with_another_header_are_refused(model, values, length):
    model().save_pretrained("hf")
    name = "stems" if model is small_frontier else WTE
    safetensors_header(lambda header: header | {name: header[name] | values}, length)
    refused(load_model, Path("hf"))


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("config, shape", [
    (dict(n_layer=10**9), None), (dict(n_layer=10_000), None), (dict(n_embd=2**23, n_head=2**20), None),
    (dict(block_size=2**23), None), (dict(vocab_size=2**23), None), (dict(vocab_size=10**100), None),
    *((dict(block_size=2**22, vocab_size=2**22, n_embd=2**22), shape)
      for shape in ((2**40,), (2**22, 2**22), (2**40, 0)))])
def test_absurd_sizes_are_refused_at_once_without_allocating(config, shape, biases):
    weights = {name: p for name, p in make_model().state_dict().items()
               if biases or not name.endswith(".bias")}
    for name in (LN, WTE, "lm_head.weight", WPE) if shape else ():
        weights[name] = torch.zeros(0 if 0 in shape else 1).expand(shape)
    with LargestStorage() as largest, pytest.raises(UserError):
        model_from_checkpoint(nanogpt_checkpoint(weights, **config), "a.pt", MODELS)
    assert largest.bytes < 10_000 and largest.operations < 10_000


# -----------------------------------------------------------------------------
# any damage at all: a good result or a UserError

@pytest.mark.parametrize("format", ["zip", "pickle in a zip", "legacy", "llm.c", "model.safetensors"])
def test_whatever_bytes_are_damaged_there_is_a_model_or_a_user_error(format):
    source, path = FORMATS[format.removeprefix("pickle in a ")]()
    good = path.read_bytes()

    @settings(FUZZ, max_examples=40)
    @given(data=st.data())
    def check(data):
        if format == "pickle in a zip":         # whose sums would give most of what is damaged there away
            repacked(lambda pickled: data.draw(damage(pickled)))
        else:
            path.write_bytes(data.draw(damage(good)))
        with contextlib.suppress(UserError):
            load_model(source)
    check()


@pytest.mark.parametrize("model", [small_model, small_frontier])
def test_whatever_value_is_replaced_there_is_a_model_or_a_user_error(model):
    content = own_checkpoint(model()) | {"recipe": getattr(model(), "recipe", "gpt2")}
    model().save_pretrained("hf")
    config, everywhere = json.loads(Path("hf/config.json").read_text()), [*places(content)]

    @settings(FUZZ, max_examples=60)
    @given(data=st.data())
    def check(data):
        place, how = data.draw(st.sampled_from(everywhere)), data.draw(strange(STRANGE_OF_TORCH))
        with contextlib.suppress(UserError):
            load_model(save(Path("a.pt"), with_value(content, place, **how)))
        key = data.draw(st.sampled_from([*config, "auto_map", "add_cross_attention", "scale_attn_weights"]))
        Path("hf/config.json").write_text(json.dumps(config | {key: data.draw(JSON)}))
        with contextlib.suppress(UserError):
            assert isinstance(load_model("hf"), type(model()))
    check()


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
        assert read_text(name) >= 0


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
        assert read_text(path) >= 0


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A text, and the folder of an unfinished run over it."""
    folder = tmp_path_factory.mktemp("begun")
    lines(folder / "a.jsonl", *({"text": f"document {i} " * 20} for i in range(40)))
    flags = ["--input", str(folder / "a.jsonl"), "--val_tokens", "100", "--shard_size", "700", "--workers",
             "1"]
    fineweb.main([*flags, "--out", str(folder / "out")])
    manifest = json.loads((folder / "out/manifest.json").read_text())
    manifest |= {"complete": False, "shards": manifest["shards"][:4]}
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
    *((("shards", 3, "cursor"), cursor) for cursor in (
        [0], [0, "a"], [0, -1], [0, 1.5], "00", [math.nan, 0], [0, {"deep": [[]]}], [0, 1, 2])),
    (("shards", 0, "tokens"), "100"), (("shards", 0, "tokens"), math.inf), (("shards", 1, "split"), "train"),
    (("block",), None), (("block",), -1), (("block",), 1.5), (("shards", 1), []), (("shards",), 5),
    (("shards", 0, "file"), ".."), (("shards", 0, "file"), "\0"), (("shards", 0, "file"), "../outside.npy"),
    (("shards", 0, "file"), "/etc/passwd")])
def test_a_manifest_with_a_wrong_value_is_refused(place, value, interrupted):
    folder, flags, manifest = interrupted
    shutil.copytree(folder, "out")
    shutil.copy(folder / manifest["shards"][0]["file"], "outside.npy")
    Path("out/manifest.json").write_text(json.dumps(with_value(manifest, place, value)))
    refused(fineweb.main, [*flags, "--out", "out"], "out")


# -----------------------------------------------------------------------------
# checkpoints, by --resume

TINY_RUN = ["--n_layer", 1, "--n_head", 1, "--n_embd", 4, "--block_size", 8, "--vocab_size", 96, "--device",
            "cpu", "--total_batch_size", 32, "--max_steps", 2, "--warmup_steps", 1, "--val_tokens", 8,
            "--sample_every", 0, "--hellaswag_every", 0, "--dtype", "float16"]


class Trained:                                  # which hypothesis need not print
    def __init__(self, folder, recipe):
        """The checkpoint of a real run, `path` and `content`, in float16 so that its scaler has a state."""
        for i, split in enumerate(("val", "train")):
            write_shard(folder / f"x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
        train("--data", folder, "--out", folder / "log", *TINY_RUN, "--recipe", recipe,
              *(["--window", 4] if recipe != "gpt2" else []))
        self.recipe, self.path = recipe, folder / "log/checkpoint_000002.pt"
        self.content = torch.load(self.path, weights_only=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {recipe: Trained(tmp_path_factory.mktemp(recipe), recipe) for recipe in MODELS}


@pytest.fixture(params=MODELS)
def trained(request, runs):
    return runs[request.param]


@pytest.fixture
def of_gpt2(runs):
    return runs["gpt2"]


def resume(path):
    """One more step. --data is as the checkpoint says."""
    with contextlib.redirect_stdout(io.StringIO()):
        shutil.rmtree("log", ignore_errors=True)
        train("--out", "log", "--resume", path, "--device", "cpu", "--max_steps", 3)


def fuzz(check, trained, examples):
    """`check(data)` for so many examples of gpt2's checkpoint, for a quarter of each other recipe's: they
    differ in a few fields, and are read by the same code."""
    examples //= 1 if trained.recipe == "gpt2" else 4
    settings(FUZZ, max_examples=examples)(given(st.data())(check))()


def test_the_checkpoint_of_these_tests_is_good(trained):
    resume(trained.path)


def test_whatever_bytes_are_damaged_a_run_goes_on_or_they_refuse(trained):
    def check(data):
        kind = data.draw(st.sampled_from(["pickle in a zip", "pickle in a zip", "zip", "legacy"]))
        if kind == "pickle in a zip":  # the sums of a zip would give most of what is damaged there away
            repacked(lambda pickled: data.draw(damage(pickled)), content=trained.content)
        else:
            path = save(Path("a.pt"), trained.content, _use_new_zipfile_serialization=kind == "zip")
            path.write_bytes(data.draw(damage(path.read_bytes())))
        with contextlib.suppress(UserError, RunError):
            resume(Path("a.pt"))
    fuzz(check, trained, 120)


def test_whatever_value_is_replaced_a_run_goes_on_or_they_refuse(trained):
    everywhere = [*places(trained.content)]

    def check(data):
        path, how = data.draw(st.sampled_from(everywhere)), data.draw(strange(STRANGE_OF_TORCH))
        with contextlib.suppress(UserError, RunError):
            resume(save(Path("a.pt"), with_value(trained.content, path, **how)))
    fuzz(check, trained, 150)


WRONG = [
    (("config", "max_steps"), None), (("config", "max_lr"), None), (("config", "dtype"), "load"),
    (("config", "dtype"), None), (("config", "data"), None), (("config", "data"), "x" * 300),
    (("config", "data"), "\0"), (("model_config", "n_layer"), itself()),
    (("model_config", "n_layer"), torch.zeros(2)), (("step",), itself()), (("step",), 10**400),
    (("step",), 2**41), (("optimizers",), {}), (("optimizers", WPE, "exp_avg"), itself()),
    (("data", "train", 0, 1), torch.zeros(2)), (("data", "train", 0, 1), 10**5000),
    (("config", "window"), 3), (("data", "train", 0, 2), itself()), (("scaler", "scale"), "x"),
    (("scaler", "scale"), math.nan), (("scaler", "scale"), 0.0),
    (("scaler", "_growth_tracker"), math.inf)]


@pytest.mark.parametrize("place, value", WRONG, ids=[".".join(map(str, place)) for place, _ in WRONG])
def test_a_run_does_not_go_on_from_a_wrong_value(place, value, of_gpt2):
    path = save(Path("a.pt"), with_value(of_gpt2.content, place, value))
    refused(resume, path, "a.pt", "x" * 30, "\0")
