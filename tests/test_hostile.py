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
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import script
from test_fineweb import pieces_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import corpus.readers
import fineweb
import sample
import train_gpt2
from frontier import FrontierGPT
from corpus.readers import LAST_CUT
from corpus.sources import LocalSource
from hellaswag import load_examples
from model import GPT, GPTConfig, LanguageModel, load_model
from runtime.cli import UserError, print_error
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


@contextlib.contextmanager
def little_memory(megabytes=150):
    """Fails if the process grows by more than that inside: Linux shows the most that it held since it was
    told to forget."""
    def most():
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = most()
    except (OSError, IndexError):
        yield
        return
    yield
    assert most() - before < megabytes, f"{most() - before} MB"


def refused(read, source):
    with little_memory(), pytest.raises(UserError) as caught:
        read(source)
    assert len(str(caught.value)) < 1000, caught.value


# -----------------------------------------------------------------------------
# the files

class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


TOUCH = "__import__('os').system('touch CANARY')"
INNER = io.BytesIO()
torch.save(Call(os.system, "touch CANARY"), INNER)
CALLS = {
    "eval": Call(eval, TOUCH), "exec": Call(exec, TOUCH),
    "a program": Call(subprocess.check_output, ["touch", "CANARY"]),
    "torch's own unpickling": Call(torch.storage._load_from_bytes, INNER.getvalue()),
    "unpickling": Call(pickle.loads, pickle.dumps(Call(os.system, "touch CANARY"))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_these_tests_would_run_where_nobody_takes_care(name):
    pickle.loads(pickle.dumps(CALLS[name]))
    Path("CANARY").unlink()


def small_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))


def checkpoint(**changes):
    """A checkpoint of this project; names with config_ change its model's config."""
    model = small_model()
    config = dict(vars(model.config)) | {name[7:]: value for name, value in changes.items()
                                         if name.startswith("config_")}
    return {"model": model.state_dict(), "model_config": config, "recipe": "gpt2"} | changes


def saved(content, path="a.pt", **how):
    torch.save(content, path, **how)
    return Path(path)


def repacked(change=lambda data: data, method=zipfile.ZIP_STORED, content=None):
    """A checkpoint whose zip was packed anew with `method`, its pickle changed by `change`, with the right
    sums."""
    with zipfile.ZipFile(saved(content or checkpoint(), "good.pt")) as old, zipfile.ZipFile("a.pt", "w",
                                                                                            method) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return Path("a.pt")


def legacy(change):
    path = saved(checkpoint(extra=torch.zeros(777)), _use_new_zipfile_serialization=False)
    return written(path, change(path.read_bytes()))


def number(n):
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)           # pickle's LONG1


def calls(function, argument):
    """A pickle that calls `function`, one that torch's weights_only reader knows."""
    return b"\x80\x02}X\x05\x00\x00\x00modelc" + function + b"\n" + argument + b"\x85Rs."


def doubled(times=18):
    """A pickle of a thousand letters that are written as hexadecimal numbers, `times` times over."""
    start = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"X\x05\0\0\0utf-8\x86R"
    return b"\x80\x02" + b"c_codecs\nencode\n" * (times + 1) + start + b"X\x03\0\0\0hex\x86R" * times + b"."


def endless(characters=10**8):
    """A pickle of one text of so many characters."""
    return b"\x80\x02X" + struct.pack("<I", characters) + b"a" * characters + b"."


def two_archives():
    """A file in which Python's zipfile finds a harmless archive, and torch, by the offset in the last
    record, a packed one."""
    names = {"a/data.pkl": endless(), "a/version": b"3\n", "a/byteorder": b"little"}
    parts = []
    for content, method in ((names, zipfile.ZIP_DEFLATED), (dict.fromkeys(names, b"}."), zipfile.ZIP_STORED)):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in content.items():
                archive.writestr(zipfile.ZipInfo(name), data, method)
        data = file.getvalue()
        size, start = struct.unpack("<II", data[-10:-2])
        parts.append((data[:start], bytearray(data[start:start + size])))
    (evil, evil_list), (good, good_list) = parts
    at = 0
    while at < len(good_list):  # Python adds the distance by which the list lies behind its place
        offset = int.from_bytes(good_list[at + 42:at + 46], "little")
        good_list[at + 42:at + 46] = (len(evil) - len(good) + offset).to_bytes(4, "little")
        at += 46 + sum(struct.unpack("<HHH", good_list[at + 28:at + 34]))
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 3, 3, len(good_list), len(evil), 0)
    return written("a.pt", evil + evil_list + good + good_list + end)


def itself(depth=8, kind=list):
    """A list of lists of lists ... that are all the same one: a few bytes, and 8^(depth + 1) numbers as
    text."""
    value = kind([0] * 8)
    for _ in range(depth):
        value = kind([value] * 8)
    return value


def nested(data):
    """A pickle with lists 100,000 deep as recipe and config."""
    return b"\x80\x02}(X\x05\x00\x00\x00model}" + b"".join(
        b"X" + struct.pack("<I", len(name)) + name + b"]" * 100_000 + b"a" * 99_999
        for name in (b"recipe", b"config")) + b"u."


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


def llm_c_sparse(block_size, vocab_size, n_layer, n_head, n_embd, padded):
    """A model of llm.c whose size is right, and which takes a kilobyte of the disk."""
    header = struct.pack("<8i", 20240326, 5, block_size, vocab_size, n_layer, n_head, n_embd, padded)
    with open(written("model.bin", header), "ab") as file:
        per_layer = 12 * n_embd**2 + 13 * n_embd
        file.truncate(1024 + 2 * ((padded + block_size + 2) * n_embd + n_layer * per_layer))
    return Path("model.bin")


def pipe():
    os.mkfifo("x_train_000000.npy")
    return Path("x_train_000000.npy")


def small_frontier():
    torch.manual_seed(0)
    return FrontierGPT(FrontierGPT.Config(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))


def folder(change, model=small_model):
    """A folder in the Hugging Face format, `change`d."""
    model().save_pretrained("hf")
    Path("hf/SHA256SUMS").unlink()              # which would give any change away
    change(Path("hf"))
    return Path("hf")


def config(**changes):
    return lambda hf: (hf / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text())
                                                                 | changes))


def safetensors(change=None, length=None):
    """The header of model.safetensors changed, or only the length that it claims."""
    def rewrite(hf):
        data = (hf / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        text = json.dumps((change or dict)(header)).encode()
        (hf / "model.safetensors").write_bytes((length or len(text)).to_bytes(8, "little") + text
                                               + data[8 + size:])
    return rewrite


def at(name, **values):
    return lambda header: header | {name: header[name] | values}


WTE, LN = "transformer.wte.weight", "transformer.ln_f.weight"


def index(*names):
    def write(hf):
        shutil.copy(hf / "model.safetensors", "outside.safetensors")
        (hf / "model.safetensors").rename(hf / "part.safetensors")
        weight_map = {str(i): name for i, name in enumerate(names)}
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return write


def code_in_bin(hf):
    (hf / "model.safetensors").unlink()
    torch.save({"w": CALLS["eval"]}, hf / "pytorch_model.bin")


def code_beside(hf):
    (hf / "modeling_evil.py").write_text(TOUCH)
    (hf / "configuration_evil.py").write_text(TOUCH)
    config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil",
                     "AutoConfig": "configuration_evil.Evil"})(hf)


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
CHECKPOINTS = {
    **{f"a call of {name}, {form}": lambda call=call, form=form: saved(
        checkpoint(extra=call), _use_new_zipfile_serialization=form == "zip")
       for name, call in CALLS.items() for form in ("zip", "legacy")},
    "a packed pickle": lambda: repacked(lambda data: endless(), zipfile.ZIP_DEFLATED),
    "packed by bzip2": lambda: repacked(method=zipfile.ZIP_BZIP2),
    "a packed pickle that zipfile does not see": two_archives,
    "a storage larger than its record": lambda: repacked(
        lambda data: data.replace(b"M\x09\x03", number(HUGE)), content=checkpoint(extra=torch.zeros(777))),
    "sizes below zero": lambda: repacked(
        lambda data: data.replace(b"M\x09\x03", number(-777)), content=checkpoint(extra=torch.zeros(777))),
    "a record of 1.4 GB": lambda: written("a.pt", repacked().read_bytes().replace(
        struct.pack("<II", 1536, 1536), struct.pack("<II", HUGE % 2**32, HUGE % 2**32))),
    "a legacy storage of 40 GB": lambda: legacy(lambda data: data.replace(b"M\x09\x03", number(HUGE))),
    "a legacy storage below zero": lambda: legacy(lambda data: data.replace(b"M\x09\x03", number(-777))),
    "a gigabyte of zeros": lambda: repacked(lambda data: calls(b"builtins\nbytearray", number(10**9))),
    "a gigabyte of zeros for Python 2": lambda: repacked(lambda data: calls(b"__builtin__\nbytearray",
                                                                            number(10**9))),
    "a gigabyte of zeros in the weights": lambda: repacked(
        lambda data: data[:-1] + b"X\x01\0\0\0xcbuiltins\nbytearray\n" + number(10**9) + b"\x85Rs."),
    "a text that is doubled again and again": lambda: repacked(lambda data: doubled()),
    "lists 100,000 deep": lambda: repacked(nested),
    **{f"itself again and again as {name}": lambda name=name, kind=kind: saved(
        checkpoint(**{name: itself(kind=kind)}))
       for name in ("config_n_layer", "config_gelu", "recipe", "model", "model_config")
       for kind in (list, lambda values: OrderedDict(enumerate(values)))},
    "8 GB of zeros behind llm.c's header": lambda: llm_c_sparse(16, 96, 1, 1, 1024, 2**22),
    "a million layers of llm.c": lambda: llm_c_sparse(8, 96, 10**6, 1, 1, 96),
    "itself for ever as recipe": lambda: saved(checkpoint(recipe=itself(40, tuple))),
}
FOLDERS = {
    "code beside the weights": code_beside, "code in pytorch_model.bin": code_in_bin,
    "an index naming ../../": index("../../outside.safetensors"),
    "an index naming a file above": index("../outside.safetensors"),
    "an index naming /etc/passwd": index("/etc/passwd"), "an index naming no file": index(""),
    "an index naming null": index(None), "an index naming a zero byte": index("\0"),
    "an index naming itself": index(
        "model.safetensors.index.json"),
    "an index that is deep": lambda hf: index()(hf)
    or (hf / "model.safetensors.index.json").write_text("[" * 100_000),
    **{f"{name} of {value}": config(**{name: value}) for name in ("n_layer", "n_embd", "n_head",
                                                                  "n_positions", "vocab_size")
       for value in (10**12, 2**24 - 1, -1)},
    "a number of 5000 digits": lambda hf: (hf / "config.json").write_text('{"model_type": ' + "9" * 5000
                                                                          + "}"),
    "a norm that is a page of text": config(layer_norm_epsilon="x" * 10**6),
    "a header of 2^63 bytes": safetensors(length=2**63), "a header of 99 MB": safetensors(length=99 * 10**6),
    "overlapping tensors": safetensors(lambda header: header | {"transformer.ln_f.bias": header[LN]}),
    "a tensor beyond the end": safetensors(at(WTE, data_offsets=[0, 2**40])),
    "a tensor before the start": safetensors(at(WTE, data_offsets=[-8, 0])),
    "a tensor that ends before it starts": safetensors(at(WTE, data_offsets=[1536, 0])),
    "a shape of 2^124": safetensors(at(WTE, shape=[2**62, 2**62])),
    "a shape with a zero": safetensors(at(WTE, shape=[2**40, 0])),
    "a type that is none": safetensors(at(WTE, dtype="PY")),
}
OF_FRONTIER = {
    **{name: change for name, change in FOLDERS.items()
       if not name.startswith(("code beside", "a norm", "vocab", "n_positions", "overlapping"))},
    **{f"{name} of {value}": config(**{name: value}) for name in ("block_size", "padded_vocab_size", "window")
       for value in (10**12, -1, "96", None)},
    "no vocabulary": lambda hf: (hf / "config.json").write_text('{"model_type": "frontier"}'),
    "another model": config(model_type="speedrun"), "a model that is none": config(model_type={}),
    "stems as floats": safetensors(at("stems", dtype="F64")),
    "other stems": safetensors(lambda header: header | {"stems": header["stems"] | {"shape": [2, 48]}}),
    "no stems": safetensors(lambda header: {n: t for n, t in header.items() if n != "stems"} | {
        "other": header["stems"]}),
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
    **{f"checkpoint: {name}": (load_model, make) for name, make in CHECKPOINTS.items()},
    **{f"folder: {name}": (load_model, lambda change=change: folder(change))
       for name, change in FOLDERS.items()},
    **{f"frontier's folder: {name}": (load_model, lambda change=change: folder(change, small_frontier))
       for name, change in OF_FRONTIER.items()},
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


def in_hf(name):
    """Reads a folder in the Hugging Face format with the file as its `name`."""
    def read(path):
        hf = folder(index() if "index" in name else lambda hf: None)
        (hf / name).unlink()
        path.rename(hf / name)
        load_model(hf)
    return read


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
    "config.json": in_hf("config.json"), "the index": in_hf("model.safetensors.index.json"),
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


def test_a_config_that_holds_no_settings_is_said_to():
    for text in ("[]", "5", '"gpt2"', "null"):
        with pytest.raises(UserError, match="hf is not a GPT-2 .*its config.json holds no settings"):
            load_model(folder(lambda hf, text=text: (hf / "config.json").write_text(text)))


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


@pytest.mark.parametrize("what", ["shard: 2^62 tokens", "checkpoint: a packed pickle that zipfile does not "
                                  "see",
                                  "HellaSwag: a label of 5000 digits", "text: a column that is not UTF-8"])
def test_a_command_given_a_hostile_file_says_one_line_and_exits_2(what):
    path = HOSTILE[what][1]()
    shutil.copy(path, "x_val_000000.npy")
    name, flags = {"shard": ("train_gpt2.py", ["--data", ".", "--out", "log"]),
                   "checkpoint": ("sample.py", ["--model", path]),
                   "HellaSwag": ("hellaswag.py", ["--data", path]),
                   "text": ("fineweb.py", ["--input", path, "--out", "o"]),
                   }[what.split(":")[0]]
    result = script(name, *flags)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result
    assert result.stderr.startswith(name + ": ") and "Traceback" not in result.stderr


def test_escape_codes_of_a_file_do_not_reach_the_terminal():
    weights = small_model().state_dict()
    path = saved(checkpoint(model=weights
                            | {"transformer.\x1b]0;owned\x07\x1b[2J\u202e\r\n\x85": torch.zeros(3)}))
    with pytest.raises(UserError) as caught:
        load_model(path)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        print_error(caught.value)
    line = shown.getvalue()
    assert line.endswith("\n") and line[:-1].isprintable() and "owned" in line


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
        out[path[0]] = with_value(out[path[0]], path[1:], value, remove)
    return tuple(out) if isinstance(tree, tuple) else out


def strange(values):
    """What `replaced` is to do at a place: put one of `values` there, or remove what is."""
    return st.sampled_from([*({"value": value} for value in values), {"remove": True}])


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


@settings(FUZZ, max_examples=200)
@pytest.mark.parametrize("model", [small_model, small_frontier])
@given(data=st.data())
def test_whatever_a_hugging_face_config_says_there_is_a_model_or_it_is_refused(model, data):
    if not Path("hf").exists():
        folder(lambda hf: shutil.copy(hf / "config.json", "good.json"), model)
    good = json.loads(Path("good.json").read_text())
    key = data.draw(st.sampled_from([*good, "auto_map", "add_cross_attention", "scale_attn_weights"]))
    changed = json.dumps(good | {key: data.draw(JSON)}).encode()
    Path("hf/config.json").write_bytes(data.draw(st.just(changed) | damage(changed)))
    with contextlib.suppress(UserError):
        assert isinstance(load_model("hf"), type(model()))


# -----------------------------------------------------------------------------
# checkpoints, by load_model and by --resume

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


def load(path):
    assert isinstance(load_model(path), LanguageModel)


def test_the_checkpoint_of_these_tests_is_good(trained, some_data):
    load(trained.path)
    resume(trained.path)


@pytest.mark.parametrize("read", [load, resume])
def test_whatever_bytes_are_damaged_a_model_is_read_and_a_run_goes_on_or_they_refuse(trained, some_data,
                                                                                     read):
    def check(data):
        kind = data.draw(st.sampled_from(["pickle in a zip", "pickle in a zip", "zip", "legacy"]))
        if kind == "pickle in a zip":  # the sums of a zip would give most of what is damaged there away
            repacked(lambda pickled: data.draw(damage(pickled)), content=trained.content)
        else:
            path = saved(trained.content, _use_new_zipfile_serialization=kind == "zip")
            path.write_bytes(data.draw(damage(path.read_bytes())))
        with contextlib.suppress(UserError):
            read(Path("a.pt"))
    fuzz(check, trained, 120)


@pytest.mark.parametrize("read", [load, resume])
def test_whatever_value_is_replaced_a_model_is_read_and_a_run_goes_on_or_they_refuse(trained, some_data,
                                                                                     read):
    everywhere = [*places(trained.content)]

    def check(data):
        path, how = data.draw(st.sampled_from(everywhere)), data.draw(strange(STRANGE_OF_TORCH))
        with contextlib.suppress(UserError):
            read(saved(with_value(trained.content, path, **how)))
    fuzz(check, trained, 150)


@pytest.mark.parametrize("place, kind", [
    (("config", "n_layer"), list), (("model_config", "n_layer"), list), (("step",), list),
    (("val_loss",), list),
    (("best",), tuple), (("data", "train", 0, 0), list), (("data", "train", 0, 2), list)])
def test_a_run_does_not_go_on_from_a_value_that_holds_itself_again_and_again(place, kind, trained, some_data):
    refused(resume, saved(with_value(trained.content, place, itself(kind=kind))))


WRONG = [
    (("config", "max_steps"), None), (("config", "max_lr"), None), (("config", "dtype"), "load"),
    (("config", "dtype"), None),
    (("config", "data"), None), (("model_config", "n_layer"), torch.zeros(2)),
    (("data", "train", 0, 1), torch.zeros(2)),
    (("scaler", "scale"), "x"), (("scaler", "scale"), math.nan), (("scaler", "_growth_tracker"), math.inf)]


@pytest.mark.parametrize("place, value", [(("config", "data"), "x" * 300), (("config", "data"), "\0"),
                                          *WRONG])
def test_a_run_does_not_go_on_from_a_wrong_value(place, value, trained, some_data):
    refused(resume, saved(with_value(trained.content, place, value)))
