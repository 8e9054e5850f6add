"""Formats of weights: of transformers and back, of this project and of its neighbours; and damaged or hostile
ones, which run no code, fill no memory and are refused in a sentence. The other recipes' exports are in
test_export.py."""
import contextlib
import dataclasses
import http.server
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontier import FrontierGPT
from helpers import HANG, ROOT, little_memory, llm_c_file, script
from model import GPT, GPT2_SIZES, GPTConfig, MODELS, load_model, main
from runtime.cli import UserError, print_error
from runtime.console import HEADER
from runtime.huggingface import EXPORTED, MODELING, OPENAI_NAMES
from runtime.tokenizer import EOT, VOCAB_SIZE, encode
from runtime.weights import model_from_checkpoint
from peers import (LargestStorage, TINY, make_model, nanogpt_checkpoint, own_checkpoint, plain_gpt2, save,
                   tokens, write_peer)

FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
WPE, WTE, LN = "transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight"
HUGE = 10**10                       # bytes or numbers that a file of a kilobyte claims


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where `touch CANARY` would leave its trace."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("CANARY").exists(), "the file ran code"


# -----------------------------------------------------------------------------
# transformers, in both directions

def random_transformers_model(**config):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    shape = dict(vocab_size=96, n_positions=24, n_layer=2, n_head=2, n_embd=16)
    theirs = GPT2LMHeadModel(GPT2Config(**shape | config))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return theirs.eval()


@torch.no_grad()
def same_logits(ours, theirs, tolerance=1e-4):
    V = theirs.config.vocab_size
    idx = tokens(2, min(64, ours.config.block_size), V)
    torch.testing.assert_close(ours(idx)[0][..., :V], theirs(idx).logits, atol=tolerance, rtol=0)


def as_one_bin(theirs, folder):
    theirs.config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")


def without_prefix(theirs, folder):
    """As the hub's own gpt2 is: no `transformer.`, no head, and the mask buffers of old."""
    from safetensors.torch import save_file
    theirs.config.save_pretrained(folder)
    weights = {name: p.clone() for name, p in theirs.transformer.state_dict().items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8) for i in range(2)}
    save_file(weights, folder / "model.safetensors")


LAYOUTS = {
    "safetensors": lambda theirs, folder: theirs.save_pretrained(folder),
    "sharded": lambda theirs, folder: theirs.save_pretrained(folder, max_shard_size="8KB"),
    "bin": as_one_bin,
    "hub's old names": without_prefix,
}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_transformers_gives_its_logits(layout, activation, tmp_path):
    theirs = random_transformers_model(activation_function=activation)
    LAYOUTS[layout](theirs, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 or layout != "sharded"
    same_logits(GPT.from_pretrained(tmp_path), theirs)
    same_logits(load_model(str(tmp_path)), theirs)


def test_half_precision_weights_become_fp32(tmp_path):
    theirs = random_transformers_model().half()
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert {(p.dtype, p.is_contiguous()) for p in ours.parameters()} == {(torch.float32, True)}
    same_logits(ours, theirs.float())


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_transformers_gets_our_logits_from_an_exported_folder_without_the_padding(gelu, tmp_path):
    from transformers import GPT2LMHeadModel
    ours = make_model(vocab_size=50304, gelu=gelu)
    ours.save_pretrained(tmp_path / "exported")
    theirs, loading = GPT2LMHeadModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.config.vocab_size == theirs.get_input_embeddings().weight.size(0) == 50257
    assert theirs.config.eos_token_id == theirs.config.bos_token_id == EOT and theirs.config.n_positions == 24
    same_logits(ours, theirs)
    again = load_model(tmp_path / "exported")
    assert again.config == dataclasses.replace(ours.config, vocab_size=50257)
    for name, p in again.state_dict().items():
        assert torch.equal(p, ours.state_dict()[name][:50257]), name


def test_the_exported_tokenizer_is_gpt2s_and_round_trips(tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer
    make_model(vocab_size=50304).save_pretrained(tmp_path)
    theirs, alone = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file("tokenizer.json")
    for text in [(ROOT / "input.txt").read_text(encoding="utf-8")[:20_000], "  two  spaces\n\n\tand tabs ",
                 "naïve Ω 日本語 🙂 e\u0301", "1234 don't"]:
        ids = theirs(text)["input_ids"]
        assert ids == encode(text).tolist() and theirs.decode(ids, clean_up_tokenization_spaces=False) == text
        assert alone.encode(text).ids == ids and alone.decode(ids) == text
    assert alone.encode("a<|endoftext|>").ids == [64, EOT] and alone.get_vocab_size() == VOCAB_SIZE
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.convert_tokens_to_ids("<|endoftext|>") == EOT
    assert theirs.model_max_length == 24 and len(theirs) == 50257


def test_the_full_124m_goes_to_transformers_and_back():
    from transformers import GPT2LMHeadModel
    torch.manual_seed(0)
    ours = GPT(GPTConfig(vocab_size=50304))
    with tempfile.TemporaryDirectory() as folder:       # half a gigabyte, which pytest's tmp_path would keep
        ours.save_pretrained(folder)
        theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
        same_logits(ours, theirs)
        del ours
        same_logits(GPT.from_pretrained(folder), theirs)


# -----------------------------------------------------------------------------
# checkpoints of this project and of its neighbours

def check_logits(path, weights, gelu):
    model, idx = load_model(path), tokens(3, 24)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(model(idx)[0], plain_gpt2(weights, 2, idx, gelu), atol=1e-4, rtol=0)
    model(idx, idx)[1].backward()


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_this_projects_checkpoint_loads_and_lives_on_when_its_file_is_overwritten(gelu, tmp_path):
    model = make_model(gelu=gelu)
    path = save(tmp_path / "checkpoint_000003.pt", own_checkpoint(model))
    check_logits(path, model.state_dict(), gelu)
    loaded = load_model(str(path))
    path.write_bytes(bytes(path.stat().st_size))
    assert loaded.config == model.config
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))


@pytest.fixture
def a_run(tmp_path):
    """A run's folder and the models of its checkpoints by step; of these the last but one was the best."""
    folder, models = tmp_path / "log", {step: make_model(seed=step) for step in (2, 10, 999_999, 1_000_000)}
    folder.mkdir()
    for step, model in models.items():          # in order of their names the newest is not the last
        save(folder / f"checkpoint_{step:06d}.pt", own_checkpoint(model))
    (folder / "metrics.csv").write_text(
        f"{HEADER}\n2,0,0,5,4.0,,,,\n3,0,0,5,1.0,,,,\n10,0,0,5,,,,,\n"
        "999999,0,0,5,3.0,,,,\n1000000,0,0,,3.5,,,,\n")
    (folder / "checkpoint_2000000.pt.tmp").touch()
    (folder / "previous_1").mkdir()
    return folder, models


def same_weights(source, model):
    assert all(map(torch.equal, load_model(source).parameters(), model.parameters()))


def test_a_runs_folder_is_its_newest_checkpoint_and_best_the_one_of_the_lowest_validation_loss(a_run,
                                                                                               monkeypatch):
    folder, models = a_run
    for source in (folder, f"{folder}/"):
        same_weights(source, models[1_000_000])
    for source in (folder / "best", f"{folder}/best/", f"{folder}/../log/best"):
        same_weights(source, models[999_999])
    monkeypatch.chdir(folder)
    same_weights(".", models[1_000_000])
    same_weights("best", models[999_999])


@pytest.mark.parametrize("kind", ["file", "folder", "run"])
def test_a_real_file_or_folder_called_best_wins(a_run, kind):
    folder, models = a_run
    if kind == "file":
        save(folder / "best", own_checkpoint(models[10]))
    elif kind == "folder":
        models[10].save_pretrained(folder / "best")
    else:
        (folder / "best").mkdir()
        save(folder / "best" / "checkpoint_000010.pt", own_checkpoint(models[10]))
    same_weights(folder / "best", models[10])


@pytest.mark.parametrize("metrics", [None, "", f"{HEADER}\n3,0,0,5,1.0,,,,\n", "step,val\n10,1\n"])
def test_without_a_best_checkpoint_one_line_says_what_to_give(a_run, metrics):
    folder, _ = a_run
    (folder / "metrics.csv").unlink() if metrics is None else (folder / "metrics.csv").write_text(metrics)
    refused(folder / "best", named=folder)
    load_model(folder)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy file"])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoint_loads_with_its_exact_gelu(bias, zipped, tmp_path):
    weights = {name: p for name, p in make_model().state_dict().items() if bias or not name.endswith(".bias")}
    path = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(weights, bias, gelu="tanh"),
                _use_new_zipfile_serialization=zipped)
    check_logits(path, weights, "none")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_compile_and_ddp_and_old_mask_buffers_are_dropped(prefix, bias, tmp_path):
    weights = {name: p for name, p in make_model().state_dict().items() if bias or not name.endswith(".bias")}
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(24, 24).tril()[None, None] for i in range(2)}
    prefixed = {prefix + name: p for name, p in {**weights, **masks}.items()}
    check_logits(save(tmp_path / "ckpt.pt", nanogpt_checkpoint(prefixed, bias)), weights, "none")


BUILD_NANOGPT = """
import sys, torch
from dataclasses import dataclass
@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
weights = torch.load(sys.argv[1])
config = GPTConfig(block_size=24, vocab_size=96, n_layer=2, n_head=2, n_embd=16)
torch.save({'model': weights, 'config': config, 'step': 5000, 'val_loss': 3.1}, sys.argv[2])
"""


def test_build_nanogpts_checkpoint_loads_though_its_config_is_a_class_of_main(tmp_path):
    weights = make_model().state_dict()
    source, path = save(tmp_path / "weights.pt", weights), tmp_path / "model_05000.pt"
    subprocess.run([sys.executable, "-c", BUILD_NANOGPT, source, path], check=True, timeout=HANG)
    check_logits(path, weights, "tanh")


@pytest.mark.parametrize("version, dtype", [(3, torch.float32), (5, torch.bfloat16)])
def test_llm_cs_model_has_the_logits_of_the_same_weights_as_a_state_dict(version, dtype, tmp_path):
    """To the last bit, and without the padding of its vocabulary, which llm.c's softmax leaves out."""
    source = make_model()
    path = llm_c_file(tmp_path / "gpt2_124M.bin", source, version, padding=32, pad=1e30)
    weights = {name: p.to(dtype).float() for name, p in source.state_dict().items()}
    check_logits(path, weights, "tanh")
    (same := GPT(source.config)).load_state_dict(weights)
    loaded, idx = load_model(str(path)), tokens(3, 24)
    assert loaded.config == source.config
    assert torch.equal(loaded(idx)[0], same(idx)[0]) and torch.equal(loaded(idx, idx)[1], same(idx, idx)[1])
    path.write_bytes(bytes(path.stat().st_size))        # it was read, and not mapped for good
    assert all(map(torch.equal, loaded.parameters(), same.parameters()))


def test_a_folder_named_like_a_checkpoint_is_still_a_folder(tmp_path):
    make_model().save_pretrained(tmp_path / "model.pt")
    assert load_model(tmp_path / "model.pt").config.n_embd == 16


# -----------------------------------------------------------------------------
# the export, as a real command

@pytest.mark.parametrize("kind", ["this project", "nanoGPT without biases", "build-nanogpt, DDP", "llm.c"])
def test_export_gives_transformers_the_logits_and_the_tokens_of_every_kind_of_checkpoint(kind, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel
    source, model = write_peer(kind, tmp_path)
    folder = tmp_path / "new" / "exported"
    result = script("model.py", "export", source, folder)
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert result.stdout.startswith(f"{folder} is ") and f"from_pretrained({str(folder)!r})" in result.stdout
    text = "Speak, speak — naïve citizens!  Résolus à mourir?"
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == encode(text).tolist() and len(ids) <= 24
    idx = torch.tensor([ids])
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(folder)(idx).logits                    # in evaluation mode
        torch.testing.assert_close(logits, model(idx)[0][..., :VOCAB_SIZE], atol=1e-4, rtol=0)
    assert {path.name for path in folder.iterdir()} == EXPORTED - {MODELING}


def test_export_replaces_an_earlier_export_and_nothing_else(tmp_path):
    source, model = write_peer("this project", tmp_path)
    for name in ("earlier", "theirs", "more"):
        make_model(seed=7, vocab_size=50304).save_pretrained(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for folder in ("earlier", "empty"):
        main(["export", str(source), str(tmp_path / folder)])
        assert torch.equal(load_model(tmp_path / folder).transformer.wpe.weight, model.transformer.wpe.weight)
    random_transformers_model().config.save_pretrained(tmp_path / "theirs")     # of an export's names only
    (tmp_path / "more" / "thesis.tex").write_text("not a file of an export")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.safetensors").write_text("a folder without a config.json")
    (tmp_path / "file").write_text("not a folder")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("theirs", "more", "half", "file", "file/a"):
        with pytest.raises(UserError, match=name):
            main(["export", str(source), str(tmp_path / name)])
    main(["export", str(tmp_path / "empty"), str(tmp_path / "empty")])          # the same again
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_model_that_gpt2s_tokenizer_cannot_go_with_is_not_exported(tmp_path):
    characters = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(make_model().state_dict()))
    with pytest.raises(UserError, match="has a vocabulary of 96"):
        main(["export", str(characters), str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()


def test_a_mistake_in_an_export_exits_2_with_one_line(tmp_path):
    result = script("model.py", "export", tmp_path / "nowhere.pt", tmp_path / "exported")
    assert result.returncode == 2 and result.stdout == "" and not (tmp_path / "exported").exists()
    assert result.stderr.startswith("model.py: ") and "nowhere.pt" in result.stderr
    assert result.stderr.count("\n") == 1
    for arguments in (["expor", "a", "b"], ["export", "a"], ["export", "a", "b", "--c"]):
        with pytest.raises(UserError, match="model.py --help"):
            main(arguments)


# -----------------------------------------------------------------------------
# files that are damaged: a UserError in one sentence, and nothing else

def refused(source, named=None):
    with little_memory(), pytest.raises(UserError) as caught:
        load_model(source)
    message = str(caught.value)
    assert str(named or source) in message and "\n" not in message and len(message) < 1000


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


def a_zip():
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("hello.txt", "hello")
    return file.getvalue()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_file_of_any_format_is_refused_in_one_sentence(format, damage):
    source, path = FORMATS[format]()
    load_model(source)
    good = path.read_bytes()
    path.unlink()
    if DAMAGE[damage]:
        path.write_bytes(DAMAGE[damage](good))
    refused(source)


def sparse(path):
    path.touch()
    os.truncate(path, 20 * 10**9)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, Path.mkdir, sparse],
                         ids=["a device", "a pipe", "a folder", "20 GB"])
@pytest.mark.parametrize("format", ["zip", "config.json", "model.safetensors.index.json"])
def test_what_is_no_file_or_has_no_end_is_refused_in_little_memory(format, make):
    source, path = FORMATS[format]()
    path.unlink()
    make(path)
    refused(source)


def test_a_flipped_bit_in_any_record_of_a_checkpoint_is_refused():
    path = save(Path("a.pt"), own_checkpoint(small_model()))
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {r.filename: archive.read(r) for r in archive.infolist() if r.file_size}
    assert len(records) > 15
    for content in records.values():
        at = good.index(content) + len(content) // 2
        path.write_bytes(good[:at] + bytes([good[at] ^ 8]) + good[at + 1:])
        refused(path)


def test_a_flipped_bit_anywhere_is_refused_or_changes_no_value():
    """Names and lengths in the zip's own lists, and the bytes between records that nothing reads."""
    path, dice, refusals = save(Path("a.pt"), own_checkpoint(small_model())), random.Random(3), 0
    good, model = bytearray(path.read_bytes()), load_model(path)
    for _ in range(100):
        damaged = good.copy()
        damaged[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            same_weights(path, model)
        except UserError:
            refusals += 1
    assert refusals > 10


# -----------------------------------------------------------------------------
# values that are wrong

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
        refused(save(Path("a.pt"), wrong))


@pytest.mark.parametrize("changes", [
    {"magic": 20240520}, {"magic": 20240325}, {"version": 1}, {"n_layer": 0}, {"n_layer": 1025},
    {"n_layer": 2**31 - 1}, {"n_embd": -16}, {"n_embd": 2**24 - 1}, {"padded": 2**24 - 1}, {"padded": 144},
    {"vocab_size": 144}, {"n_head": 3}, {"n_layer": 1024, "n_embd": 2**24 - 1, "padded": 2**24 - 1}])
def test_a_model_of_llm_c_with_a_wrong_header_is_refused(changes):
    refused(llm_c_file(Path("a.bin"), make_model(), **changes))


def test_a_model_of_llm_c_that_has_no_end_or_is_not_finite_is_refused():
    path = llm_c_file(Path("a.bin"), model := make_model())
    good = path.read_bytes()
    for damaged in (good + b"\0", good[:1024], good[:28], good[:-64] + bytes(64)):
        path.write_bytes(damaged)
        refused(path)
    model.transformer.ln_f.weight.data[3] = math.nan
    refused(llm_c_file(path, model))
    with open(path, "wb") as file:                      # 8 GB of zeros that take a kilobyte of the disk
        file.write(struct.pack("<8i", 20240326, 5, 16, 96, 1, 1, 1024, 2**22))
        file.truncate(1024 + 2 * ((2**22 + 16 + 2) * 1024 + 12 * 1024**2 + 13 * 1024))
    refused(path)


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
            refused(Path("hf"))
    path.write_text('{"model_type": ' + "9" * 5000 + "}")
    refused(Path("hf"))


@pytest.mark.parametrize("names", [["../outside.safetensors"], ["part.safetensors", "/etc/passwd"], [".."],
                                   [""], [3], [None], ["\0"], ["part2.safetensors"],
                                   ["model.safetensors.index.json"]], ids=str)
def test_an_index_that_names_another_file_is_refused(names):
    source, path = FORMATS["model.safetensors.index.json"]()
    shutil.copy(source / "part.safetensors", "outside.safetensors")
    path.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    refused(source)


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
    refused(Path("hf"))


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
# files that would run code or fill the memory

class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


TOUCH = "__import__('os').system('touch CANARY')"
CALLS = {"eval": Call(eval, TOUCH), "exec": Call(exec, TOUCH), "a command": Call(os.system, "touch CANARY"),
         "unpickling": Call(pickle.loads, pickle.dumps(Call(os.system, "touch CANARY")))}


@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_would_run_code_does_not_run(name):
    pickle.loads(pickle.dumps(CALLS[name]))             # it would
    Path("CANARY").unlink()
    Path("hf").mkdir()
    random_transformers_model().config.save_pretrained("hf")
    for place in [("model",), ("config",), ("model_args",), ("extra",), ("model", "w")]:
        checkpoint = with_value(nanogpt_checkpoint(make_model().state_dict()), place, CALLS[name])
        Path("a.pt").write_bytes(pickle.dumps(checkpoint))
        refused(Path("a.pt"))
        for zipped in (True, False):
            refused(save(Path("a.pt"), checkpoint, _use_new_zipfile_serialization=zipped))
        shutil.copy("a.pt", "hf/pytorch_model.bin")
        refused(Path("hf"))


def test_a_config_of_another_class_than_build_nanogpts_is_refused():
    refused(save(Path("a.pt"), {"model": make_model().state_dict(), "config": GPTConfig(**TINY)}))


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


def written(data):
    Path("a.pt").write_bytes(data)
    return Path("a.pt")


EXTRA = own_checkpoint(make_model()) | {"extra": torch.zeros(777)}
HOSTILE = {
    "a packed pickle": lambda: repacked(lambda data: b"a" * 10**8, zipfile.ZIP_DEFLATED),
    "packed by bzip2": lambda: repacked(method=zipfile.ZIP_BZIP2),
    "a packed archive before": lambda: written(behind_another()),
    "a storage larger than its record": lambda: repacked(size_of_extra(HUGE), content=EXTRA),
    "sizes below zero": lambda: repacked(size_of_extra(-777), content=EXTRA),
    "a record of 1.4 GB": lambda: written(repacked(content=own_checkpoint(make_model())).read_bytes().replace(
        struct.pack("<II", 6144, 6144), struct.pack("<II", HUGE % 2**32, HUGE % 2**32))),
    "a legacy storage of 40 GB": lambda: legacy(size_of_extra(HUGE)),
    "a legacy storage below zero": lambda: legacy(size_of_extra(-777)),
    "a gigabyte of zeros": lambda: repacked(lambda data: calls(b"builtins\nbytearray", number(10**9))),
    "a gigabyte of zeros for Python 2": lambda: repacked(lambda data: calls(b"__builtin__\nbytearray",
                                                                            number(10**9))),
    "a gigabyte of zeros in a legacy file": lambda: written(calls(b"builtins\nbytearray", number(10**9))),
    "a text that is doubled again and again": lambda: repacked(lambda data: doubled()),
    "lists 100,000 deep": lambda: repacked(lambda data: nested()),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_would_fill_the_memory_is_refused(what):
    refused(HOSTILE[what]())


def test_escape_codes_of_a_file_do_not_reach_the_terminal(capsys):
    weights = make_model().state_dict() | {"\x1b]0;owned\x07\x1b[2J\u202e\r\n\x85": torch.zeros(3)}
    with pytest.raises(UserError) as caught:
        load_model(save(Path("a.pt"), own_checkpoint(make_model()) | {"model": weights}))
    print_error(caught.value)
    line = capsys.readouterr().err
    assert line.endswith("\n") and line[:-1].isprintable() and "owned" in line


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


def strange(values):
    """What `with_value` is to do at a place: put one of `values` there, or remove what is."""
    return st.sampled_from([*({"value": value} for value in values), {"remove": True}])


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


# -----------------------------------------------------------------------------
# the hub

@pytest.mark.parametrize("name", ["gpt2-huge", "a/b/c", "x" * 300, "no such name", "../weights", "./gpt2"])
def test_what_cannot_be_a_models_name_is_not_looked_for_on_the_hub(name, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **how: pytest.fail("it was asked"))
    refused(name)


@pytest.mark.parametrize("name", ["gpt2", "no/such-model"])
def test_a_model_that_is_not_here_is_refused_in_one_sentence_offline(name, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(name)


class StandInHub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does: it has gpt2, the files of `folder`; others are not there, or without
    model.safetensors."""
    folder = None

    def do_HEAD(self):
        owner, _, _, _, name = self.path[1:].split("/")
        code = {"nobody": "RepoNotFound", "other": "EntryNotFound"}.get(owner)
        self.send_response(404 if code else 200)
        if code:
            self.send_header("X-Error-Code", code)
            return self.end_headers()
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{name}"')
        self.send_header("Content-Length", str((self.folder / name).stat().st_size))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write((self.folder / self.path.rpartition("/")[2]).read_bytes())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment of a process that takes this stand-in for the hub."""
    StandInHub.folder = tmp_path / "gpt2's"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandInHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        yield env | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"),
                     "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                     "PYTHONPATH": str(ROOT)}
        server.shutdown()


def test_gpt2_comes_from_the_hub_and_then_from_its_cache(hub):
    random_transformers_model().save_pretrained(StandInHub.folder)
    code = ("import torch; from model import GPT\n"
            "for p in GPT.from_pretrained('gpt2').parameters(): print(p.double().sum().item())")
    for env in (hub, hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        sums = [p.double().sum().item() for p in load_model(StandInHub.folder).parameters()]
        assert [*map(float, result.stdout.split())] == sums


@pytest.mark.parametrize("name, words", [("nobody/model", "no model with a model.safetensors on the hub"),
                                         ("other/model", "no model with a model.safetensors on the hub")])
def test_a_model_that_the_hub_does_not_have_is_told_in_one_line(name, words, hub):
    result = subprocess.run([sys.executable, ROOT / "model.py", "export", name, "hf"], env=hub, text=True,
                            capture_output=True, timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith(f"model.py: {name}") and words in result.stderr


def test_importing_model_prints_nothing_and_leaves_the_optional_libraries_alone(tmp_path):
    code = ("import model, sys; "
            "assert not {'transformers', 'datasets', 'huggingface_hub', 'safetensors'} & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


def test_the_hubs_names_without_an_owner_are_the_sizes():
    assert OPENAI_NAMES == tuple(GPT2_SIZES)
