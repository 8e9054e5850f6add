"""Bad files of every format: they are refused in one line that names them, in little memory, and run no code.
FORMATS has the good ones, ANY what spoils any file, BAD what is wrong in one format alone. Bad texts are in
test_text.py."""
import contextlib
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import zipfile
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fineweb
from benchmarks.curves import read_curve
from hellaswag import load_examples
from helpers import little_memory, llm_c_file, refused, script, train
from model import GPTConfig, MODELS, load_model
from peers import LargestStorage, TINY, nanogpt_checkpoint, own_checkpoint, save
from runtime.cli import RunError, UserError
from runtime.console import HEADER
from runtime.dataloader import TokenDataset
from runtime.shards import SHARD_NAME, write_shard
from runtime.text import read_rows

FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
WPE, WTE, LN = "transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight"
HUGE = 10**10                       # bytes, numbers or tokens that a file of a kilobyte claims
NONE = object()                     # in place of a value: the entry is removed


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where `touch CANARY` would leave its trace."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not Path("CANARY").exists(), "the file ran code"


def small(recipe="gpt2"):
    torch.manual_seed(0)
    return MODELS[recipe](MODELS[recipe].Config(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))


def checkpoint(recipe="gpt2", **how):
    save("a.pt", own_checkpoint(small(recipe)) | {"recipe": recipe, "extra": torch.zeros(777)}, **how)


def nanogpt(bias):
    weights = {name: p for name, p in small().state_dict().items() if bias or not name.endswith(".bias")}
    save("ckpt.pt", nanogpt_checkpoint(weights, bias, **vars(small().config)))


def folder(name, recipe="gpt2"):
    small(recipe).save_pretrained("hf")
    if name == "pytorch_model.bin":
        from safetensors.torch import load_file
        save("hf/pytorch_model.bin", load_file("hf/model.safetensors"))
        os.unlink("hf/model.safetensors")
    elif name not in ("model.safetensors", "config.json"):
        os.rename("hf/model.safetensors", "hf/part.safetensors")
        Path("hf/model.safetensors.index.json").write_text('{"weight_map": {"t": "part.safetensors"}}')


def run(recipe):
    """In float16, so that its scaler has a state."""
    os.mkdir("data")
    for i, split in enumerate(("val", "train")):
        write_shard(f"data/x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
    train("--data", "data", "--out", "log", "--n_layer", 1, "--n_head", 1, "--n_embd", 4, "--block_size", 8,
          "--vocab_size", 96, "--device", "cpu", "--total_batch_size", 32, "--max_steps", 2,
          "--val_tokens", 8,
          "--warmup_steps", 1, "--sample_every", 0, "--hellaswag_every", 0, "--dtype", "float16", "--recipe",
          recipe, *(["--window", 4] if recipe != "gpt2" else []))
    os.rename("log/checkpoint_000002.pt", "a.pt")


def resume(path):
    """One more step. --data is as the checkpoint says."""
    shutil.rmtree("log", ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        train("--out", "log", "--resume", path, "--device", "cpu", "--max_steps", 3)


def metrics():
    os.mkdir("log")
    save("log/checkpoint_000001.pt", own_checkpoint(small()))
    Path("log/metrics.csv").write_text(f"{HEADER}\n1,32,0.5,4.0,4.0,,0.1,1.0,50\n")


def read_shard(name):
    rows = TokenDataset([name], 5, vocab_size=50257).read(0, 30)
    assert rows.dtype == np.uint16 and rows.shape == (30, 6)


def text(name):
    rows = [{"text": f"document {i}. " * 20} for i in range(20)]
    packing = {"gz": "gzip", "zst": "zstd"}.get(name.rpartition(".")[2])
    with pyarrow.output_stream(name, compression=packing) as file:
        if name == "t.parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def read_text(name):
    return [row.decode() for row in read_rows(Path(name), "text", b"", name)]


def begun():
    """The folder of a text whose tokens are not all there."""
    text("t.jsonl")
    go_on("out")
    content = json.loads(Path("out/manifest.json").read_text())
    content |= {"complete": False, "shards": content["shards"][:4]}
    Path("out/manifest.json").write_text(json.dumps(content))


def go_on(out):
    with contextlib.redirect_stdout(io.StringIO()):
        fineweb.main(["--input", "t.jsonl", "--out", out, "--shard_size", "300", "--val_tokens", "100"])
    assert all(SHARD_NAME.match(name) for name in {*os.listdir(out)} - {"manifest.json"})


def read_examples(path):
    for e in load_examples(path):
        assert {*map(type, [e["ctx"], *e["endings"]])} == {str} and len(e["endings"]) == 4
        assert type(e["label"]) is int and 0 <= e["label"] < 4


EXAMPLE = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
FORMATS = {                             # the file, what writes it, what reads it, and what is given to that
    "checkpoint": ("a.pt", checkpoint, load_model, "a.pt"),
    "frontier's checkpoint": ("a.pt", partial(checkpoint, "frontier"), load_model, "a.pt"),
    "legacy": ("a.pt", partial(checkpoint, _use_new_zipfile_serialization=False), load_model, "a.pt"),
    "nanoGPT": ("ckpt.pt", partial(nanogpt, True), load_model, "ckpt.pt"),
    "nanoGPT without biases": ("ckpt.pt", partial(nanogpt, False), load_model, "ckpt.pt"),
    "llm.c": ("a.bin", lambda: llm_c_file("a.bin", small()), load_model, "a.bin"),
    **{name: (f"hf/{name}", partial(folder, name), load_model, "hf") for name in (
        "config.json", "model.safetensors", "model.safetensors.index.json", "part.safetensors",
        "pytorch_model.bin")},
    **{f"frontier's {name}": (f"hf/{name}", partial(folder, name, "frontier"), load_model, "hf")
       for name in ("config.json", "model.safetensors")},
    **{f"resumed {recipe}": ("a.pt", partial(run, recipe), resume, "a.pt") for recipe in MODELS},
    "metrics.csv": ("log/metrics.csv", metrics, load_model, "log/best"),
    **{name: (name, partial(write_shard, name, np.arange(100, dtype=np.uint16)), read_shard, name)
       for name in ("x_train_000000.npy", "x_train_000000.bin")},
    "HellaSwag": ("a.jsonl", lambda: Path("a.jsonl").write_text(json.dumps(EXAMPLE)), read_examples,
                  "a.jsonl"),
    "curve": ("c.csv", lambda: Path("c.csv").write_text("tokens,loss\n1,2\n3,4"), read_curve, "c.csv"),
    "manifest.json": ("out/manifest.json", begun, go_on, "out"),
}
TEXTS = {name: (name, partial(text, name), read_text, name)
         for name in ("t.jsonl", "t.jsonl.gz", "t.txt.zst", "t.parquet")}


@pytest.fixture(scope="module")
def put(tmp_path_factory):
    """put(format): writes a good file here, each time the same, and returns its path."""
    kept = {}

    def put(format):
        path, write, read, source = (FORMATS | TEXTS)[format]
        if format not in kept:
            write()
            kept[format] = shutil.copytree(".", tmp_path_factory.mktemp("kept"), dirs_exist_ok=True)
            read(source)                        # it is good
        for name in os.listdir():
            (shutil.rmtree if os.path.isdir(name) else os.unlink)(name)
        shutil.copytree(kept[format], ".", dirs_exist_ok=True)
        return Path(path)
    return put


def to(change):
    """The file's bytes become `change(bytes)`, or `change` itself."""
    return lambda path: path.write_bytes(change(path.read_bytes()) if callable(change) else change)


def instead(make):
    return lambda path: (path.unlink(), make(path))


def sparse(path, size=20 * 10**9, start=b""):
    path.write_bytes(start)
    os.truncate(path, size)


def a_zip(method=zipfile.ZIP_STORED, content=b"hello"):
    with zipfile.ZipFile(file := io.BytesIO(), "w", method) as archive:
        archive.writestr("archive/data.pkl", content)
    return file.getvalue()


ANY = {
    "missing": Path.unlink, "empty": to(b""), "3 bytes": to(lambda data: data[:3]), "a list": to(b"[]"),
    "a tenth": to(lambda data: data[:len(data) // 10]), "all but a byte": to(lambda data: data[:-1]),
    "a text": to(b"hello\n" * 100), "a zip": to(a_zip()), "random": to(random.Random(0).randbytes(1000)),
    "lists without an end": to(b"[" * 100_000), "a folder": instead(Path.mkdir), "a pipe": instead(os.mkfifo),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")), "20 GB": instead(sparse),
}
HARMLESS = {("HellaSwag", "all but a byte"), ("curve", "all but a byte")}
HANGS = {("part.safetensors", "a pipe")}


def places(tree, *path):
    """The path of each value in nested dicts, lists and tuples."""
    sequence = enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in tree.items() if isinstance(tree, dict) else sequence:
        yield (*path, key)
        yield from places(value, *path, key)


def with_value(tree, place, value):
    """A copy of `tree` with `value` at `place`."""
    if not place:
        return value
    out = dict(tree) if isinstance(tree, dict) else list(tree)
    if value is NONE and len(place) == 1:
        del out[place[0]]
    else:
        out[place[0]] = with_value(out[place[0]] if len(place) > 1 else None, place[1:], value)
    return tuple(out) if isinstance(tree, tuple) else out


def content_of(path):
    return json.loads(path.read_text()) if ".json" in path.suffix else torch.load(path, weights_only=True)


def change_value(path, place, value):
    zipped, content = zipfile.is_zipfile(path), with_value(content_of(path), place, value)
    if ".json" in path.suffix:
        path.write_text(json.dumps(content))
    else:
        save(path, content, _use_new_zipfile_serialization=zipped)


def values(table):
    """Rows of BAD: one for each value of {place: values}."""
    return {f"{place} {i}": partial(change_value, value=value, place=(
                place,) if isinstance(place, str) else place)
            for place, found in table.items() for i, value in enumerate(found)}


def pickle_to(change=lambda data: data, method=zipfile.ZIP_STORED):
    """Packs a checkpoint's zip anew, with the right sums, its pickle changed by `change` or to it."""
    def repack(path):
        with zipfile.ZipFile(path) as old, zipfile.ZipFile("new", "w", method) as new:
            for name in old.namelist():
                data, pickled = old.read(name), name.endswith("data.pkl")
                new.writestr(name, (change(data) if callable(change) else change) if pickled else data)
        os.replace("new", path)
    return repack


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


TOUCH = "__import__('os').system('touch CANARY')"
CODE = [Call(eval, TOUCH), Call(os.system, "touch CANARY"),
        Call(pickle.loads, pickle.dumps(Call(os.system, "touch CANARY")))]
ENDLESS = reduce(lambda inner, _: [inner] * 8, range(9), 0)             # 8^9 numbers as text, but few bytes
HASHED = reduce(lambda inner, _: (inner,) * 8, range(40), 0)            # for ever


def letters(data):
    return b"X" + struct.pack("<I", len(data)) + data                   # as pickle writes text


def number(n):
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)


def zeros(module):
    return b"\x80\x02}" + letters(b"model") + b"c" + module + b"\nbytearray\n" + number(10**9) + b"\x85Rs."


DOUBLED = (b"\x80\x02" + b"c_codecs\nencode\n" * 19 + letters(b"a" * 1000) + letters(b"utf-8") + b"\x86R"
           + (letters(b"hex") + b"\x86R") * 18 + b".")                  # each time twice as long
NESTED = b"\x80\x02}(" + letters(b"model") + b"}" + b"".join(
    letters(name) + b"]" * 100_000 + b"a" * 99_999 for name in (b"recipe", b"config")) + b"u."
PACKED = {
    "packed": pickle_to(b"a" * 10**8, zipfile.ZIP_DEFLATED), "bzip2": pickle_to(method=zipfile.ZIP_BZIP2),
    "a packed one before": to(lambda data: a_zip(zipfile.ZIP_DEFLATED, b"a" * 10**8) + data),
    "a gigabyte": pickle_to(zeros(b"builtins")), "a gigabyte of Python 2": pickle_to(zeros(b"__builtin__")),
    "doubled again and again": pickle_to(DOUBLED), "nested": pickle_to(NESTED),
}


def extra(n):
    return lambda data: data.replace(b"M\x09\x03", number(n))           # the size of torch.zeros(777)


def npy(header, version=1, length=None):
    header = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", length or len(header))
    return to(b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(200))


def shape(text, kind="<u2"):
    return f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {text}, }}"


def int32(*changes):
    """Rows of BAD: the number at a place of a header is another."""
    return {f"header {at} {n}": to(
        lambda data, at=4 * at, n=n: data[:at] + struct.pack("<i", n) + data[at + 4:])
            for at, n in changes}


def header(name, length=None, **changes):
    """Of safetensors: changes what it says of a tensor, and the length that it claims."""
    def change(data):
        size = int.from_bytes(data[:8], "little")
        said = json.loads(data[8:8 + size])
        text = json.dumps(said | {name: said[name] | changes}).encode()
        return (length or len(text)).to_bytes(8, "little") + text + data[8 + size:]
    return to(change)


def contents(*found):
    return {f"{data[:30]}": to(data) for data in found}


def absurd(path, shape, weights=(LN, WTE, "lm_head.weight", WPE)):
    """Tensors that store one number and have that shape."""
    for name in weights:
        change_value(path, ("model", name), torch.zeros(0 if 0 in shape else 1).expand(shape))
    change_value(path, ("model_args",), {**TINY, "block_size": 2**22, "vocab_size": 2**22, "n_embd": 2**22})


NAN = {"NaN": to(lambda data: data[:-4] + b"\0\0\xc0\x7f")}             # the last float32 or bfloat16
MATRIX = torch.zeros(8, 4)
OF_A_MODEL = values({
    (): [torch.zeros(3), {}, small().state_dict(), {"model": {}, "config": GPTConfig()}],
    "recipe": ["gpt9", ["gpt2"], NONE, HASHED], "model": [[1, 2], NONE, {}, ENDLESS],
    "model_config": [[1], NONE, {}, *CODE], ("model_config", "gelu"): ["swish", ["tanh"], ENDLESS],
    ("model_config", "n_head"): [3, 0, NONE], ("model_config", "n_embd"): [-4, "4", 4.0, 10**12],
    ("model_config", "n_layer"): [True, 3, 0, 10**9, ENDLESS], ("model_config", "vocab_size"): [95, 10**100],
    ("model_config", "block_size"): [9, 2**23],
    ("model", WPE): [
        NONE, 3, torch.zeros(7, 4), MATRIX.long(), MATRIX.cfloat(), MATRIX.to_sparse(), MATRIX.to("meta"),
        torch.zeros(1).expand(8, 4), MATRIX + math.nan, MATRIX - math.inf, *CODE],
    ("model", "lm_head.weight"): [torch.zeros(96, 4)], ("model", "transformer.extra"): [torch.zeros(3)],
    ("model", "transformer.h.1.ln_1.weight"): [torch.zeros(4)], ("model", 7): [torch.zeros(3)]})
OF_A_RUN = values({
    ("config", "max_lr"): [None, "1"], ("config", "dtype"): ["load", None], ("config", "seed"): [1.5, True],
    ("config", "data"): [None, "x" * 300, "\0"], ("config", "window"): [3], "recipe": ["frontier"],
    "step": [ENDLESS, 10**400, 2**41, -1, 1.0, NONE], "optimizers": [{}, NONE],
    ("optimizers", WPE, "exp_avg"): [ENDLESS, MATRIX[:7], MATRIX + math.nan, NONE],
    ("optimizers", LN, "step"): [torch.zeros(4), 3], ("data", "train", 0, 1): [torch.zeros(2), 10**5000],
    ("scaler", "scale"): ["x", math.nan, 0.0, -1.0], ("scaler", "_growth_tracker"): [math.inf, -1]})
SIZES = values({("model_args", name): found for name, found in dict(
    n_layer=[10**9, 10_000], n_embd=[2**23], block_size=[2**23], vocab_size=[2**23, 10**100]).items()}) | {
    f"tensors of {shape}": partial(absurd, shape=shape) for shape in ((2**40,), (2**22, 2**22), (2**40, 0))}
SETTINGS = values({
    "model_type": ["llama", None, 7, {}], "activation_function": ["relu", []], "n_inner": [32],
    "layer_norm_epsilon": [1e-6, "x" * 10**6], "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False], "tie_word_embeddings": [False], "add_cross_attention": [True],
    "auto_map": [{"AutoModelForCausalLM": "modeling_evil.Evil"}], "n_layer": [3, 10**9, -1, None],
    "n_embd": [2**23, None, "4"], "n_head": [3, 2**24 - 1], "n_positions": [9], "vocab_size": [95, 10**12]})
BAD = {
    "checkpoint": PACKED | OF_A_MODEL | {
        **values({("model", "\x1b]0;owned\x07\x1b[2J\u202e\r\n\x85"): [0]}),
        "a storage of 40 GB": pickle_to(extra(HUGE)), "a storage below zero": pickle_to(extra(-777)),
        "a record of 1.6 GB": to(lambda data: data.replace(struct.pack("<II", 3108, 3108),
                                                           b"\0\0\0\x5f" * 2))},
    "legacy": values({"extra": CODE}) | contents(pickle.dumps(CODE[0]), zeros(b"builtins")) | {
        "a storage of 40 GB": to(extra(HUGE)), "a storage below zero": to(extra(-777))},
    "nanoGPT": SIZES, "nanoGPT without biases": SIZES, "resumed gpt2": OF_A_RUN,
    "pytorch_model.bin": PACKED | values({WTE: [MATRIX + math.nan, *CODE]}),
    "llm.c": NAN | int32((0, 20240520), (0, 20240325), (1, 1), (2, -1), (3, 144), (4, 0), (4, 1025), (5, 3),
                         (4, 2**31 - 1), (6, -16), (6, 2**24 - 1), (7, 2**24 - 1), (7, 144)) | {
        "a byte too long": to(lambda data: data + b"\0"), "no weights": to(lambda data: data[:1024]),
        "zeros at its end": to(lambda data: data[:-64] + bytes(64)),
        "8 GB of zeros": partial(sparse, start=struct.pack(
            "<8i", 20240326, 5, 16, 96, 1, 1, 1024, 2**22), size=(
            1024 + 2 * ((2**22 + 16 + 2) * 1024 + 12 * 1024**2 + 13 * 1024)))},
    "config.json": SETTINGS | contents(b'{"model_type": ' + b"9" * 5000 + b"}"),
    "frontier's config.json": values({"model_type": ["speedrun", "gpt2"]} | {
        key: [10**12, -1, "96", None]
        for key in ("n_layer", "n_embd", "n_head", "block_size", "padded_vocab_size", "window")}),
    "model.safetensors.index.json": values({("weight_map", "t"): [
        "../outside.safetensors", "/etc/passwd", "..", "", 3, None, "\0", "none.safetensors",
        "config.json"]}),
    "model.safetensors": NAN | {f"{said} {length}": header(WTE, length, **said)
                                for length in (None, 2**63, 10**8)
                                for said in ({"data_offsets": [0, 2**40]}, {"data_offsets": [1536, 0]},
                                             {"shape": [2**62, 2**62]}, {"shape": [2**40, 0]},
                                             {"dtype": "PY"})},
    "part.safetensors": NAN, "frontier's model.safetensors": {"F64": header("stems", dtype="F64")},
    "metrics.csv": contents(*(f"{HEADER}\n{row}\n".encode() for row in (     # others are in test_log.py
        "a note", "9" * 200_000 + ",0,0,4.0,4.0,,0.1,1.0,50"))),
    "x_train_000000.npy": contents(pickle.dumps(CODE[0])) | {                # others are in test_shards.py
        "pickled objects": lambda path: np.save(path, np.array([CODE[0]], dtype=object)), "code": npy(TOUCH),
        "objects": npy(shape("(25,)", "|O")), "code within": npy(shape(TOUCH)), "nested": npy("(" * 9000, 3),
        "code behind": npy(shape("(100,)") + "\n" + TOUCH), "minus signs": npy("-" * 9000 + "1"),
        **{f"{n} tokens": npy(shape(f"({n},)")) for n in (10**12, 2**62, 2**70, -5, 99, "9" * 9000)},
        "a huge type": npy(shape("(1,)", "V10000000000")), "a type within": npy(shape("(1,)", "(9,9)u2")),
        "a header of 4 GB": npy(shape("(100,)"), 2, 2**32 - 1), "version 9": npy(shape("(100,)"), 9)},
    "x_train_000000.bin": int32((0, 20240801), (2, 2**31 - 1), (2, -2**31), (2, -512), (2, 99)),
    "HellaSwag": values({
        "label": [[1], 1.5, True, 2**70, 4, -1, "", None, math.inf, math.nan, NONE, "9" * 5000],
        "endings": [["b", "c", "d"], "bcde", ["b", "c", "d", 4], dict.fromkeys("abcd", "a"), [""] * 10**6],
        "ctx": [NONE, None, {}]}) | contents(b'{"label": ' + b"9" * 5000 + b"}", b'{"ctx": ' * 100_000, b"7",
                                             b"NaN", b"{} {}", b"\0", b'"ctx"'),
    "manifest.json": values({
        ("shards", 0, "tokens"): ["100", math.inf], ("shards", 1): [[]], "block": [None, -1, 1.5],
        ("shards", 0, "file"): ["..", "\0", "../outside.npy", "/etc/passwd"],
        ("shards", 3, "cursor"): [[0], [0, -1], [0, 1.5], "00"]}),
}


@pytest.mark.parametrize("format, how", [
    (format, how) for format in FORMATS for how in (*ANY, *BAD.get(format, ()))
    if (format, how) not in HARMLESS | HANGS])
def test_a_bad_file_is_refused_in_one_line_and_little_memory_and_runs_no_code(format, how, put):
    path, (_, _, read, source) = put(format), FORMATS[format]
    (ANY | BAD.get(format, {}))[how](path)
    watch = LargestStorage() if format[:7] == "nanoGPT" else contextlib.nullcontext()
    with little_memory(), watch as largest:
        line = refused(partial(read, source))
    assert any(word in line for word in (path.name, source, "x" * 30, "\0")), line
    assert not largest or largest.operations < 10_000


def test_the_code_of_these_files_would_run_if_it_were_unpickled():
    for call in CODE:
        pickle.loads(pickle.dumps(call))
        os.unlink("CANARY")


@st.composite
def damage(draw, content):
    """Bytes with up to four flips, cuts, insertions and repetitions, half of them near the beginning."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(out), 160)) | st.integers(0, len(out)))
        size = draw(st.sampled_from([1, 1, 2, 8, 100]))
        kind = draw(st.sampled_from(["flip", "flip", "overwrite", "insert", "remove", "repeat", "end"]))
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "repeat":
            out[at:at] = out[at:at + size]
        elif kind in ("overwrite", "insert", "remove"):
            new = draw(st.binary(min_size=size, max_size=size)) if kind != "remove" else b""
            out[at:at + size * (kind != "insert")] = new
        elif kind == "end":
            del out[at:]
    return bytes(out)


def fuzz(format, put, change):
    *_, read, source = (FORMATS | TEXTS)[format]

    @settings(FUZZ, max_examples=10 if format in ("resumed speedrun", "resumed frontier") else 40)
    @given(data=st.data())
    def check(data):
        change(put(format), data.draw)
        with contextlib.suppress(UserError, RunError):
            read(source)
    check()


@pytest.mark.parametrize("format", FORMATS | TEXTS)
def test_whatever_bytes_are_damaged_there_is_a_good_result_or_a_users_error(format, put):
    def change(path, draw):
        if zipfile.is_zipfile(path) and draw(st.booleans()):            # else the sums give most of it away
            pickle_to(lambda pickled: draw(damage(pickled)))(path)
        else:
            path.write_bytes(draw(damage(path.read_bytes())))
    fuzz(format, put, change)


STRANGE = [NONE, None, True, -1, 0, 3, 2**70, 1.5, math.nan, math.inf, "", "x" * 300, "\0", [], {}, [[]],
           {"a": None}]
TENSORS = [(), (1.5, 2), b"", b"abc", torch.zeros(3, 5), torch.zeros((), dtype=torch.int64), MATRIX.double(),
           torch.zeros(1, 5).expand(7, 5), MATRIX + math.nan, torch.zeros(4).to_sparse(), MATRIX.to("meta"),
           torch.zeros(5056, dtype=torch.uint8)]


@pytest.mark.parametrize("format", [name for name, row in FORMATS.items() if row[0][-4:] in (
    "a.pt", "json", "sonl")])
def test_whatever_value_is_replaced_there_is_a_good_result_or_a_users_error(format, put):
    def change(path, draw):
        place = draw(st.sampled_from([*places(content_of(path))]))
        change_value(path, place, draw(st.sampled_from(STRANGE + TENSORS * (path.suffix == ".pt"))))
    fuzz(format, put, change)


def test_a_flipped_bit_in_a_checkpoint_is_refused_in_a_record_and_else_changes_no_value(put):
    path, dice, inside = put("checkpoint"), random.Random(3), []
    good, model = path.read_bytes(), load_model("a.pt")
    with zipfile.ZipFile(path) as archive:
        for r in archive.infolist():            # the middle of what follows its name, behind 30 bytes
            at = r.header_offset + 30 + sum(struct.unpack("<HH", good[r.header_offset + 26:][:4]))
            inside += [8 * (at + r.file_size // 2) + 3] * bool(r.file_size)
    for bit in inside + [dice.randrange(8 * len(good)) for _ in range(100)]:
        path.write_bytes(good[:bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1:])
        with contextlib.suppress(UserError):
            assert all(map(torch.equal, load_model("a.pt").parameters(), model.parameters()))
            assert bit not in inside


@pytest.mark.parametrize("format, how, name, flags", [
    ("x_train_000000.npy", f"{2**62} tokens", "train_gpt2.py", ["--data", ".", "--out", "log"]),
    ("HellaSwag", "label 11", "hellaswag.py", ["--data", "a.jsonl"]),
    ("manifest.json", "block 0", "fineweb.py", ["--input", "t.jsonl", "--out", "out"]),
    ("checkpoint", [*BAD["checkpoint"]][-4], "sample.py", ["--model", "a.pt"])])
def test_a_command_given_a_hostile_file_says_one_printable_line_and_exits_2(format, how, name, flags, put):
    BAD[format][how](path := put(format))
    if name == "train_gpt2.py":
        shutil.copy(path, "x_val_000000.npy")
    line = refused(lambda: script(name, *flags))
    assert line.startswith(f"{name}: ") and line.isprintable()
