"""Bad files of every format: they are refused in one line that names them, in little memory, and run no code.
FORMATS has the good ones, ANY what spoils any file, BAD what is wrong in one format alone. Bad texts are in
test_text.py."""
import contextlib
import io
import json
import math
import operator
import os
import pickle
import random
import shutil
import struct
import zipfile
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hellaswag import load_examples
from helpers import little_memory, refused, script, train
from model import GPTConfig
from recipes import MODELS, load_model
from peers import nanogpt_checkpoint, own_checkpoint, save
from runtime.cli import RunError, UserError
from runtime.dataloader import TokenDataset
from runtime.shards import write_shard

FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
WPE, WTE, LN = "transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight"
NONE = object()                     # in place of a value: the entry is removed


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where `touch CANARY` would leave its trace."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("CANARY").exists(), "the file ran code"


# ----------------------------------------------------------------------------- good files

def small(recipe="gpt2"):
    torch.manual_seed(0)
    return MODELS[recipe](MODELS[recipe].Config(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))


def checkpoint(recipe="gpt2", **how):
    save("a.pt", own_checkpoint(small(recipe)) | {"recipe": recipe, "extra": torch.zeros(777)}, **how)


def nanogpt():
    weights = {name: p for name, p in small().state_dict().items() if not name.endswith(".bias")}
    save("ckpt.pt", nanogpt_checkpoint(weights, False, **vars(small().config)))


def folder(name="model.safetensors", recipe="gpt2"):
    small(recipe).save_pretrained("hf")
    if name != "model.safetensors":
        os.rename("hf/model.safetensors", "hf/part.safetensors")
        Path("hf/model.safetensors.index.json").write_text('{"weight_map": {"t": "part.safetensors"}}')


def run(recipe):
    """In float16, so that its scaler has a state."""
    os.mkdir("data")
    for i, split in enumerate(("val", "train")):
        write_shard(f"data/x_{split}_{i:06d}.npy", np.arange(400, dtype=np.uint16) % 96)
    window = "--window 4" * (recipe != "gpt2")
    train(*f"--data data --out log --n_layer 1 --n_head 1 --n_embd 4 --block_size 8 --vocab_size 96 {window} "
          f"--recipe {recipe} --dtype float16 --device cpu --max_steps 2 --total_batch_size 32 "
          "--val_tokens 8 --warmup_steps 1 --sample_every 0 --hellaswag_every 0".split())
    os.rename("log/checkpoint_000002.pt", "a.pt")


def resume(path):
    """One more step. --data is as the checkpoint says."""
    shutil.rmtree("log", ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        train("--out", "log", "--resume", path, "--device", "cpu", "--max_steps", 3)


def read_shard(name):
    rows = TokenDataset([name], 5, vocab_size=50257).read(0, 30)
    assert rows.dtype == np.uint16 and rows.shape == (30, 6)


def read_examples(path):
    for e in load_examples(path):
        assert {*map(type, [e["ctx"], *e["endings"]])} == {str} and len(e["endings"]) == 4
        assert type(e["label"]) is int and 0 <= e["label"] < 4


EXAMPLE = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
FORMATS = {                             # the file, what writes it, what reads it, and what is given to that
    "checkpoint": ("a.pt", checkpoint, load_model, "a.pt"),
    "legacy": ("a.pt", partial(checkpoint, _use_new_zipfile_serialization=False), load_model, "a.pt"),
    "nanoGPT": ("ckpt.pt", nanogpt, load_model, "ckpt.pt"),
    **{name: (f"hf/{name}", partial(folder, name), load_model, "hf") for name in (
        "model.safetensors", "model.safetensors.index.json")},
    "config.json": ("hf/config.json", folder, load_model, "hf"),
    "frontier's config.json": ("hf/config.json", partial(folder, recipe="frontier"), load_model, "hf"),
    "resumed gpt2": ("a.pt", partial(run, "gpt2"), resume, "a.pt"),
    "resumed frontier": ("a.pt", partial(run, "frontier"), resume, "a.pt"),
    **{name: (name, partial(write_shard, name, np.arange(100, dtype=np.uint16)), read_shard, name)
       for name in ("x_train_000000.npy", "x_train_000000.bin")},
    "HellaSwag": ("a.jsonl", lambda: Path("a.jsonl").write_text(json.dumps(EXAMPLE)), read_examples,
                  "a.jsonl"),
}


@pytest.fixture(scope="module")
def put(tmp_path_factory):
    """put(format): writes a good file here, each time the same, and returns its path."""
    kept = {}

    def put(format):
        path, write, read_it, source = FORMATS[format]
        if format not in kept:
            write()
            kept[format] = shutil.copytree(".", tmp_path_factory.mktemp("kept"), dirs_exist_ok=True)
            read_it(source)                     # it is good
        for name in os.listdir():
            (shutil.rmtree if os.path.isdir(name) else os.unlink)(name)
        shutil.copytree(kept[format], ".", dirs_exist_ok=True)
        return Path(path)
    return put


# ----------------------------------------------------------------------------- what spoils them

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
    "missing": Path.unlink, "empty": to(b""), "a tenth": to(lambda data: data[:len(data) // 10]),
    "all but a byte": to(lambda data: data[:-1]), "a text": to(b"hello\n" * 100), "a zip": to(a_zip()),
    "random": to(random.Random(0).randbytes(1000)), "lists without an end": to(b"[" * 100_000),
    "a folder": instead(Path.mkdir), "a pipe": instead(os.mkfifo),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")), "20 GB": instead(sparse),
}
def places(tree, *path):
    """The path of each value in nested dicts and lists."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(tree[key], *path, key)


def content_of(path):
    return json.loads(path.read_text()) if ".json" in path.suffix else torch.load(path, weights_only=True)


def change_value(path, place, value):
    zipped, box = zipfile.is_zipfile(path), {"content": content_of(path)}
    *way, last = "content", *place
    inner = reduce(operator.getitem, way, box)
    if value is NONE:
        del inner[last]
    else:
        inner[last] = value
    if ".json" in path.suffix:
        path.write_text(json.dumps(box["content"]))
    else:
        save(path, box["content"], _use_new_zipfile_serialization=zipped)


def values(table):
    """Rows of BAD: one for each value of {place: values}."""
    return {f"{place} {i}": partial(change_value, value=value, place=(
                place,) if isinstance(place, str) else place)
            for place, found in table.items() for i, value in enumerate(found)}


def pickle_to(change, method=zipfile.ZIP_STORED):
    """Packs a checkpoint's zip anew, with the right sums, its pickle changed by `change` or to it."""
    def repack(path):
        with zipfile.ZipFile(path) as old, zipfile.ZipFile("new", "w", method) as new:
            for name in old.namelist():
                data, pickled = old.read(name), name.endswith("data.pkl")
                new.writestr(name, (change(data) if callable(change) else change) if pickled else data)
        os.replace("new", path)
    return repack


def pickle_in_capitals(path):
    """torch.load finds its pickle under such a name, too."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile("new", "w") as new:
        for name in old.namelist():
            if name.endswith("data.pkl"):
                new.writestr(name.replace("data.pkl", "DATA.PKL"), GIGABYTE)
            else:
                new.writestr(name, old.read(name))
    os.replace("new", path)


def one_tensor_for_two(path):
    """With many of them, a small file would need much memory."""
    content = content_of(path)
    first, second = [name for name in content["model"] if ".ln_" in name and name.endswith(".weight")][:2]
    content["model"][second] = content["model"][first]
    save(path, content)


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


TOUCH = "__import__('os').system('touch CANARY')"
CODE = [Call(eval, TOUCH), Call(os.system, "touch CANARY")]
ENDLESS = reduce(lambda inner, _: [inner] * 8, range(9), 0)             # 8^9 numbers as text, but few bytes
HASHED = reduce(lambda inner, _: (inner,) * 8, range(40), 0)            # for ever


def letters(data):
    return b"X" + struct.pack("<I", len(data)) + data                   # as pickle writes text


def number(n):
    return b"\x8a\x08" + n.to_bytes(8, "little", signed=True)


GIGABYTE = b"\x80\x02}" + letters(b"model") + b"cbuiltins\nbytearray\n" + number(10**9) + b"\x85Rs."
DOUBLED = (b"\x80\x02" + b"c_codecs\nencode\n" * 19 + letters(b"a" * 1000) + letters(b"utf-8") + b"\x86R"
           + (letters(b"hex") + b"\x86R") * 18 + b".")                  # each time twice as long
NESTED = b"\x80\x02}(" + letters(b"model") + b"}" + b"".join(
    letters(name) + b"]" * 100_000 + b"a" * 99_999 for name in (b"recipe", b"config")) + b"u."
PACKED = {
    "packed": pickle_to(b"a" * 10**8, zipfile.ZIP_DEFLATED), "a gigabyte": pickle_to(GIGABYTE),
    "a packed one before": to(lambda data: a_zip(zipfile.ZIP_DEFLATED, b"a" * 10**8) + data),
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


NAN = {"NaN": to(lambda data: data[:-4] + b"\0\0\xc0\x7f")}             # the last float32 or bfloat16
MATRIX = torch.zeros(8, 4)
BAD = {
    "checkpoint": PACKED | values({
        (): [torch.zeros(3), {}, small().state_dict(), {"model": {}, "config": GPTConfig()}],
        "recipe": ["gpt9", ["gpt2"], NONE, HASHED], "model": [[1, 2], NONE, ENDLESS],
        "model_config": [[1], NONE, *CODE], ("model_config", "gelu"): ["swish", ["tanh"]],
        ("model_config", "n_head"): [3, 0, NONE], ("model_config", "n_embd"): [-4, "4", 4.0, 10**12],
        ("model_config", "n_layer"): [True, 3, 0, 20_000, 10**9, ENDLESS],
        ("model_config", "block_size"): [9, 2**23],
        ("model_config", "vocab_size"): [95, 10**100],
        ("model", WPE): [NONE, 3, MATRIX[:7], MATRIX.long(), MATRIX.cfloat(), MATRIX.to_sparse(),
                         MATRIX.to("meta"), torch.zeros(1).expand(8, 4), MATRIX - math.inf, *CODE],
        ("model", LN): [torch.tensor([1.0, 1.0, number, 1.0]) for number in (math.nan, math.inf, -math.inf)],
        ("model", "lm_head.weight"): [torch.zeros(96, 4)], ("model", "transformer.extra"): [torch.zeros(3)],
        ("model", 7): [torch.zeros(3)], ("model", "\x1b]0;owned\x07\x1b[2J\u202e\r\n\x85"): [0]}) | {
        "a storage of 40 GB": pickle_to(extra(10**10)), "a storage below zero": pickle_to(extra(-777)),
        "a pickle in capitals": pickle_in_capitals, "one tensor for two": one_tensor_for_two,
        "a record of 1.6 GB": to(lambda data: data.replace(struct.pack("<II", 3108, 3108),
                                                           b"\0\0\0\x5f" * 2))},
    "legacy": values({"extra": CODE}) | contents(pickle.dumps(CODE[0]), GIGABYTE) | {
        "a storage of 40 GB": to(extra(10**10)), "a storage below zero": to(extra(-777))},
    "nanoGPT": values({("model_args", name): [2**23] for name in ("n_layer", "n_embd", "vocab_size")} | {
        ("model", WTE): [torch.zeros(min(1, *size)).expand(size) for size in ((2**22, 2**22), (2**40, 0))]}),
    "resumed gpt2": values({
        ("config", "max_lr"): [None, "1"], ("config", "dtype"): ["load", None], ("config", "seed"): [1.5],
        ("config", "data"): [None, "x" * 300, "\0"], ("config", "window"): [3], "recipe": ["frontier"],
        "step": [ENDLESS, 10**400, 2**41, -1, 1.0, NONE], "optimizers": [{}, NONE],
        ("optimizers", WPE, "exp_avg"): [ENDLESS, MATRIX[:7], MATRIX + math.nan, NONE],
        ("optimizers", LN, "step"): [torch.zeros(4), 3], ("data", "train", 0, 1): [torch.zeros(2), 10**5000],
        ("scaler", "scale"): ["x", math.nan, -1.0], ("scaler", "_growth_tracker"): [math.inf, -1]}),
    "config.json": values({
        "model_type": ["llama", None, {}], "activation_function": ["relu", []], "n_inner": [32],
        "layer_norm_epsilon": [1e-6, "x" * 10**6], "scale_attn_weights": [False], "n_embd": [2**23, "4"],
        "scale_attn_by_inverse_layer_idx": [True], "add_cross_attention": [True],
        "tie_word_embeddings": [False],
        "auto_map": [{"AutoModelForCausalLM": "modeling_evil.Evil"}], "n_layer": [3, 10**9, -1, None],
        "n_head": [3, 2**24 - 1], "n_positions": [9], "vocab_size": [95, 10**12]}) | contents(
        b'{"model_type": ' + b"9" * 5000 + b"}"),
    "frontier's config.json": values({"model_type": ["speedrun", "gpt2"]} | {
        key: [10**12, -1, None] for key in ("n_layer", "n_embd", "block_size", "padded_vocab_size")}),
    "model.safetensors.index.json": values({("weight_map", "t"): [
        "../outside.safetensors", "/etc/passwd", "", 3, "\0", "none.safetensors", "config.json"]}),
    "model.safetensors": NAN | {f"{said} {length}": header(WTE, length, **said) for said, length in (
        ({"data_offsets": [0, 2**40]}, None), ({"data_offsets": [1536, 0]}, None), ({"dtype": "PY"}, None),
        ({"shape": [2**62, 2**62]}, None), ({"shape": [2**40, 0]}, None), ({}, 2**63), ({}, 10**8))},
    "x_train_000000.npy": contents(pickle.dumps(CODE[0])) | {
        "pickled objects": lambda path: np.save(path, np.array([CODE[0]], dtype=object)), "code": npy(TOUCH),
        "objects": npy(shape("(25,)", "|O")), "code within": npy(shape(TOUCH)), "nested": npy("(" * 9000, 3),
        **{f"{n} tokens": npy(shape(f"({n},)")) for n in (2**62, 2**70, -5, 99, 0)},
        "int32": npy(shape("(50,)", "<i4")), "two-dimensional": npy(shape("(10, 10)")),
        "a huge type": npy(shape("(1,)", "V10000000000")), "4 GB": npy(shape("(100,)"), 2, 2**32 - 1)},
    "x_train_000000.bin": int32((0, 20240801), (1, 9), (2, 2**31 - 1), (2, -512), (2, 99)) | {
        "no tokens": to(lambda data: data[:8] + bytes(4) + data[12:1024])},
    "HellaSwag": values({
        "label": [[1], 1.5, True, 4, -1, "", None, math.nan, NONE, "9" * 5000], "ctx": [NONE, None, {}],
        "endings": [["b", "c", "d"], "bcde", ["b", "c", "d", 4], dict.fromkeys("abcd", "a")]}) | contents(
        b'{"label": ' + b"9" * 5000 + b"}", b'{"ctx": ' * 100_000, b"7", b"{} {}", b"\0"),
}


@pytest.mark.parametrize("format, how", [
    (format, how) for format in FORMATS for how in (*ANY, *BAD.get(format, ()))
    if (format, how) != ("HellaSwag", "all but a byte")])               # its line end
def test_a_bad_file_is_refused_in_one_line_and_little_memory_and_runs_no_code(format, how, put):
    path, (_, _, read_it, source) = put(format), FORMATS[format]
    (ANY | BAD.get(format, {}))[how](path)
    with little_memory():
        line = refused(partial(read_it, source))
    assert any(word in line for word in (path.name, source, "x" * 30, "\0")), line


def test_the_code_of_these_files_would_run_if_it_were_unpickled():
    for call in CODE:
        pickle.loads(pickle.dumps(call))
        os.unlink("CANARY")


@st.composite
def damage(draw, content):
    """Bytes with up to four flips, cuts, insertions and repetitions, half of them near the beginning."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(content), 160)) | st.integers(0, len(content)))
        head, old, size = content[:at], content[at:], draw(st.sampled_from([1, 1, 2, 8, 100]))
        content = draw(st.sampled_from([
            head + bytes([b ^ 1 << at % 8 for b in old[:1]]) + old[1:], head + old[size:], head,
            head + old[:size] + old, head + b"\xff" * size + old, head + bytes(size) + old[size:],
            head + random.Random(at).randbytes(size) + old[size:]]))
    return content


def fuzz(format, put, change):
    *_, read_it, source = FORMATS[format]

    @settings(FUZZ, max_examples=10 if "resumed" in format else 40)
    @given(data=st.data())
    def check(data):
        change(put(format), data.draw)
        with contextlib.suppress(UserError, RunError):
            read_it(source)
    check()


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_bytes_are_damaged_there_is_a_good_result_or_a_users_error(format, put):
    def change(path, draw):
        if zipfile.is_zipfile(path) and draw(st.booleans()):            # else the sums give most of it away
            pickle_to(lambda pickled: draw(damage(pickled)))(path)
        else:
            path.write_bytes(draw(damage(path.read_bytes())))
    fuzz(format, put, change)


def test_a_flipped_bit_in_any_record_of_a_checkpoint_is_refused(put):
    good = (path := put("checkpoint")).read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [r for r in archive.infolist() if r.file_size]
    for r in records:                           # the middle of what follows its name, behind 30 bytes
        names = struct.unpack("<HH", good[r.header_offset + 26:][:4])
        at = r.header_offset + 30 + sum(names) + r.file_size // 2
        path.write_bytes(good[:at] + bytes([good[at] ^ 8]) + good[at + 1:])
        refused(lambda: load_model("a.pt"), "a.pt")
    assert len(records) > 15


def test_what_stands_before_a_checkpoint_is_not_read_in_its_place(put):
    """One reader of zips counts from the beginning of the file, another from that of the archive: the sums of
    one would say nothing about the other."""
    good = (path := put("checkpoint")).read_bytes()
    other = small()
    other.transformer.wte.weight.data += 1
    save(path, own_checkpoint(other) | {"extra": torch.zeros(777)})
    path.write_bytes(path.read_bytes() + good)
    refused(lambda: load_model("a.pt"), "a.pt")


@pytest.mark.parametrize("format, how, name, flags", [
    ("x_train_000000.npy", f"{2**62} tokens", "train_gpt2.py", "--data . --out log"),
    ("HellaSwag", "label 8", "hellaswag.py", "--data a.jsonl"),
    ("checkpoint", [*BAD["checkpoint"]][-4], "sample.py", "--model a.pt")])
def test_a_command_given_a_hostile_file_says_one_printable_line_and_exits_2(format, how, name, flags, put):
    BAD[format][how](path := put(format))
    if name == "train_gpt2.py":
        shutil.copy(path, "x_val_000000.npy")
    line = refused(lambda: script(name, *flags.split()))
    assert line.startswith(f"{name}: ") and line.isprintable()


# ----------------------------------------------------------------------------- there, but not to be read

@pytest.mark.parametrize("name", ["../outside.safetensors", "/absolute", "sub/part.safetensors",
                                  "../hf/part.safetensors"])
def test_an_index_that_names_a_whole_file_outside_its_folder_is_refused(name, put):
    path = put("model.safetensors.index.json")
    name = os.path.abspath("outside.safetensors") if name == "/absolute" else name
    os.mkdir("hf/sub")
    for place in ("outside.safetensors", "hf/sub/part.safetensors"):
        shutil.copy("hf/part.safetensors", place)
    for names in ([name], ["part.safetensors", name]):
        path.write_text(json.dumps({"weight_map": {f"t{i}": one for i, one in enumerate(names)}}))
        refused(lambda: load_model("hf"), "hf", "outside")
    path.write_text(json.dumps({"weight_map": {"t": "part.safetensors"}}))
    load_model("hf")


def test_a_file_that_the_hubs_cache_links_to_is_read(put):
    """Its folders are links to files by their sums, elsewhere."""
    put("model.safetensors.index.json")
    os.rename("hf/part.safetensors", "blob")
    os.symlink("../blob", "hf/part.safetensors")
    load_model("hf")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_packed_checkpoint_is_refused_though_it_is_whole(method, put):
    """What is packed can be larger than the memory."""
    path = put("checkpoint")
    for behind in (b"", bytes(10**8))[:1 + (method == zipfile.ZIP_DEFLATED)]:
        pickle_to(lambda pickled, behind=behind: pickled + behind, method)(path)
        with little_memory(60):
            refused(lambda: load_model("a.pt"), "a.pt")


@pytest.mark.parametrize("recipe", ["gpt2", "frontier"])
def test_code_that_a_folder_brings_is_never_run(recipe, put, monkeypatch):
    put("frontier's config.json" if recipe == "frontier" else "config.json")
    for name in ("modeling_modern.py", "modeling_evil.py", "__init__.py", "json.py", "safetensors.py"):
        Path("hf", name).write_text(TOUCH)
    config = json.loads(Path("hf/config.json").read_text())
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Evil"}
    Path("hf/config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    if recipe == "frontier":
        assert load_model("hf").recipe == recipe                                # by our own code
    else:
        refused(lambda: load_model("hf"), "hf", "auto_map")
