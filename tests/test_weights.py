"""Every format that load_model reads gives transformers' logits. Exports are in test_export.py, damaged and
hostile files in test_hostile.py."""
import dataclasses
import json
import sys

import pytest
import torch

from helpers import refused, script
from hub import Hub
from model import GPT, GPT2_SIZES
from recipes import load_model
from peers import (TINY, make_model, nanogpt_checkpoint, our_model, own_checkpoint, save, tokens,
                   transformers_model)
from runtime.console import HEADER
from runtime.huggingface import OPENAI_NAMES

MASKS = {f"h.{i}.attn.bias": torch.ones(24, 24).tril()[None, None] for i in range(2)}       # of old


def own(ours, theirs, folder):
    return save(folder / "checkpoint_000003.pt", own_checkpoint(ours))


def nanogpt(prefix="", bias=True, masks=False, **how):
    def write(ours, theirs, folder):
        weights = {name: p for name, p in ours.state_dict().items() if bias or not name.endswith(".bias")}
        weights |= {f"transformer.{name}": mask for name, mask in MASKS.items()} if masks else {}
        weights = {prefix + name: p for name, p in weights.items()}
        return save(folder / "ckpt.pt", nanogpt_checkpoint(weights, bias, gelu="tanh"), **how)
    return write


def build_nanogpt(ours, theirs, folder):
    """Its config is an instance of the script's own class."""
    config = dataclasses.make_dataclass("GPTConfig", TINY)
    config.__module__ = "__main__"
    checkpoint = {"model": ours.state_dict(), "config": config(**TINY), "step": 5000, "val_loss": 3.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "GPTConfig", config, raising=False)
        return save(folder / "model_05000.pt", checkpoint)


def folder_of_transformers(**how):
    def write(ours, theirs, folder):
        theirs.save_pretrained(folder / "model.pt", **how)              # a folder, whatever its name
        assert len([*folder.glob("*/*.safetensors")]) > 2 or not how
        return folder / "model.pt"
    return write


def without_prefix(ours, theirs, folder):
    """As the hub's own gpt2 is: no `transformer.`, no head, and the masks."""
    from safetensors.torch import save_file
    theirs.config.save_pretrained(folder)
    weights = {name: p.clone() for name, p in theirs.transformer.state_dict().items()}
    save_file(weights | {name: mask.byte() for name, mask in MASKS.items()}, folder / "model.safetensors")
    return folder


FORMATS = {                             # what writes it -> what load_model is given; transformers' activation
    "this project": (own, "gelu_new"), "this project, exact GELU": (own, "gelu"),
    "nanoGPT": (nanogpt(), "gelu"),
    "nanoGPT, a legacy file with masks": (nanogpt(masks=True, _use_new_zipfile_serialization=False), "gelu"),
    "nanoGPT without biases": (nanogpt(bias=False), "gelu"),
    "nanoGPT without biases, compiled": (nanogpt("_orig_mod.", False, masks=True), "gelu"),
    "nanoGPT, compiled, in DDP": (nanogpt("module._orig_mod."), "gelu"),
    "nanoGPT, in DDP, compiled": (nanogpt("_orig_mod.module."), "gelu"),
    "build-nanogpt": (build_nanogpt, "gelu_new"),
    "a folder": (folder_of_transformers(), "gelu_pytorch_tanh"),
    "a folder, exact GELU": (folder_of_transformers(), "gelu"),
    "a folder, float16": (folder_of_transformers(), "gelu_new"),
    "a sharded folder": (folder_of_transformers(max_shard_size="8KB"), "gelu_new"),
    "the hub's old names": (without_prefix, "gelu_new"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_transformers_logits_and_the_model_lives_on_without_its_file(name, tmp_path):
    write, activation = FORMATS[name]
    theirs, idx = transformers_model(activation), tokens(3, 24)
    rounded = getattr(torch, name.rpartition(", ")[2], None) or torch.float32
    with torch.no_grad():
        for p_name, p in theirs.named_parameters():
            p.copy_(p.to(rounded)).mul_("without biases" not in name or not p_name.endswith(".bias"))
    ours, logits = our_model(theirs), theirs(idx).logits
    loaded = load_model(str(write(ours, theirs.to(rounded), tmp_path)))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    assert loaded.config == ours.config and loaded.lm_head.weight is loaded.transformer.wte.weight
    torch.testing.assert_close(loaded(idx)[0], logits, atol=1e-4, rtol=0)
    for p_name, p in loaded.state_dict(keep_vars=True).items():
        assert torch.equal(p, ours.state_dict()[p_name]), p_name
        assert p.requires_grad and p.dtype == torch.float32 and p.is_contiguous(), p_name
    loaded(idx, idx)[1].backward()


def test_what_an_old_config_leaves_out_is_as_in_gpt2(tmp_path):
    model = make_model(block_size=1024)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = "model_type", "vocab_size", "n_layer", "n_head", "n_embd"
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in kept}))
    assert load_model(tmp_path).config == model.config
    same_weights(tmp_path, model)


# ----------------------------------------------------------------------------- a run's folder

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
    for name in ("checkpoint_2000000.pt.tmp", "._checkpoint_2000000.pt", ".checkpoint_2000000.pt"):
        (folder / name).touch()
    (folder / "previous_1").mkdir()
    return folder, models


def same_weights(source, model):
    assert all(map(torch.equal, load_model(source).parameters(), model.parameters()))


def test_a_runs_folder_is_its_newest_checkpoint_and_best_the_one_of_the_lowest_loss(a_run, monkeypatch):
    folder, models = a_run
    monkeypatch.chdir(folder)
    for source in (folder, f"{folder}/", "."):
        same_weights(source, models[1_000_000])
    for source in (folder / "best", f"{folder}/best/", f"{folder}/../log/best", "best"):
        same_weights(source, models[999_999])
    for metrics in ("", f"{HEADER}\n3,0,0,5,1.0,,,,\n", f"{HEADER}\na note\n", None):
        (folder / "metrics.csv").unlink() if metrics is None else (folder / "metrics.csv").write_text(metrics)
        refused(lambda: load_model(folder / "best"), folder)
    load_model(folder)


# ----------------------------------------------------------------------------- the hub

def test_gpt2_comes_from_the_hub_and_then_from_its_cache_and_what_is_not_there_is_refused(tmp_path):
    theirs = transformers_model(vocab_size=50257)
    theirs.save_pretrained(tmp_path / "gpt2's")
    with Hub() as hub:
        hub.put("openai-community/gpt2", {p.name: p.read_bytes() for p in (tmp_path / "gpt2's").iterdir()})
        hub.put("other/model", {"config.json": b"{}"})
        env = hub.env | {"HF_HOME": str(tmp_path / "cache")}
        answer, asked = hub.answer, []
        hub.answer = lambda url, *how: asked.append(url.path) or answer(url, *how)
        for out in ("first", "from the cache"):
            result = script("export.py", "gpt2", tmp_path / out, env=env)
            assert result.returncode == 0 and result.stderr == "", result.stderr
            same_weights(tmp_path / out, our_model(theirs))
            assert any("/gpt2/resolve/" in path for path in asked) == (out == "first"), asked
            asked.clear()
        for name in ("nobody/model", "other/model"):
            refused(lambda name=name: script("export.py", name, tmp_path / "hf", env=env), name)
    assert not (tmp_path / "hf").exists()


def test_a_model_that_is_not_here_is_refused_offline():
    assert OPENAI_NAMES == tuple(GPT2_SIZES)
    for name in ("gpt2", "no/such-model", "gpt2-huge", "a/b/c", "x" * 300, "no such name", "../weights", ""):
        refused(lambda name=name: load_model(name), name)
        refused(lambda name=name: GPT.from_pretrained(name), name)
