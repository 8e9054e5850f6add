"""Every format that load_model reads: the model has transformers' logits. (Damaged files:
test_hostile.py. Our own exports: test_export.py.)"""
import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import ENV, HANG, ROOT, forked, script
from hub import Hub
from peers import (
    TINY,
    make_model,
    nanogpt_checkpoint,
    our_model,
    own_checkpoint,
    save,
    tokens,
    transformers_model,
)

from model import GPT
from presets import GPT2_SIZES
from recipes import load_model
from runtime.cli import UserError
from runtime.metrics import HEADER
from runtime.huggingface import OPENAI_NAMES
from runtime.weights import find_checkpoint, tell_of_best

# The causal masks, which older code stored beside the weights.
MASKS = {f"h.{layer}.attn.bias": torch.ones(24, 24).tril()[None, None] for layer in range(2)}


def without_biases(theirs):
    """transformers' model with biases of 0, which is what a nanoGPT with bias=False computes."""
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith(".bias"):
                p.zero_()
    return theirs


def assert_loads_as(theirs, source):
    """load_model(source) is the model `theirs` of transformers, in float32 and ready to train."""
    loaded = load_model(source)

    idx = tokens(3, 24)
    torch.testing.assert_close(loaded(idx)[0], theirs(idx).logits, atol=1e-4, rtol=0)
    assert loaded.config == our_model(theirs).config
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, p in our_model(theirs).named_parameters():
        assert torch.equal(loaded.get_parameter(name), p), name

    loaded(idx, idx)[1].backward()
    for name, p in loaded.named_parameters():
        assert p.dtype == torch.float32, name
        assert p.is_contiguous(), name
        assert p.grad is not None, name


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder of `make_model()`, which no test changes."""
    folder = tmp_path_factory.mktemp("folder") / "exported"
    make_model().save_pretrained(folder)
    return folder


def copy_with_config(folder, copy, changes):
    """Copies an export, with these changes of its config.json."""
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return copy


def assert_same_weights(model, expected):
    for name, p in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name


# ----------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_a_checkpoint_of_this_project(activation, tmp_path):
    theirs = transformers_model(activation)
    path = save(tmp_path / "checkpoint_000003.pt", own_checkpoint(our_model(theirs)))
    assert_loads_as(theirs, path)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_nanogpts_ckpt_compiled_or_in_ddp(prefix, tmp_path):
    theirs = transformers_model("gelu")
    weights = {prefix + name: p for name, p in our_model(theirs).state_dict().items()}
    path = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(weights))
    assert_loads_as(theirs, path)


def test_nanogpts_ckpt_without_biases(tmp_path):
    theirs = without_biases(transformers_model("gelu"))
    weights = our_model(theirs).state_dict()
    weights = {name: p for name, p in weights.items() if not name.endswith(".bias")}
    path = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(weights, bias=False))
    assert_loads_as(theirs, path)


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_ckpt_with_the_masks_of_old(bias, tmp_path):
    theirs = without_biases(transformers_model("gelu"))
    weights = our_model(theirs).state_dict()
    if not bias:
        weights = {name: p for name, p in weights.items() if not name.endswith(".bias")}
    weights |= {f"transformer.{name}": mask for name, mask in MASKS.items()}
    path = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(weights, bias))
    assert_loads_as(theirs, path)


def test_build_nanogpts_checkpoint_whose_config_is_a_class_of_its_script(tmp_path, monkeypatch):
    theirs = transformers_model("gelu_new")
    config_class = dataclasses.make_dataclass("GPTConfig", TINY)
    config_class.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", config_class, raising=False)

    path = save(tmp_path / "model_05000.pt", {
        "model": our_model(theirs).state_dict(),
        "config": config_class(**TINY),
        "step": 5000,
        "val_loss": 3.1,
    })

    assert_loads_as(theirs, path)


def in_a_module(model):
    """As a LightningModule has it."""
    return nn.ModuleDict({"net": model})


def compiled_block_by_block(model):
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = torch.compile(block)
    return model


@pytest.mark.parametrize("content", [
    lambda theirs: our_model(theirs).state_dict(),
    lambda theirs: theirs.state_dict(),
    lambda theirs: theirs.transformer.state_dict(),
    lambda theirs: {"model_state_dict": our_model(theirs).state_dict(), "epoch": 3},
    lambda theirs: {"state_dict": in_a_module(our_model(theirs)).state_dict()},
    lambda theirs: {"state_dict": in_a_module(theirs).state_dict(), "hyper_parameters": {}},
    lambda theirs: {"model": compiled_block_by_block(our_model(theirs)).state_dict()},
])
def test_a_state_dict_without_sizes_has_those_of_its_shapes_and_heads_of_64(
        content, tmp_path, capsys):
    theirs = transformers_model(n_embd=128)
    assert_loads_as(theirs, save(tmp_path / "a.ckpt", content(theirs)))
    assert "2 are taken" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config", "hyper_parameters"])       # that is Lightning's
@pytest.mark.parametrize("activation, gelu", [("gelu_new", {}), ("gelu", {"gelu": "none"})])
def test_settings_that_are_a_dict_say_how_many_heads_there_are_and_which_gelu(
        name, activation, gelu, tmp_path, capsys):
    theirs = transformers_model(activation)
    content = {"state_dict": our_model(theirs).state_dict(), name: TINY | gelu}
    assert_loads_as(theirs, save(tmp_path / "a.pt", content))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("n_embd", [16, 96])
def test_heads_are_not_guessed_where_64_does_not_divide_the_width(n_embd, tmp_path):
    with pytest.raises(UserError, match="n_head"):
        load_model(save(tmp_path / "a.pt", make_model(n_embd=n_embd).state_dict()))


def test_of_two_models_in_one_state_dict_none_is_chosen(tmp_path):
    both = nn.ModuleDict({"student": make_model(), "teacher": make_model(seed=1)})
    with pytest.raises(UserError, match="several transformer"):
        load_model(save(tmp_path / "a.ckpt", {"state_dict": both.state_dict()}))


def legacy(path):
    torch.save(make_model().state_dict(), path, _use_new_zipfile_serialization=False)


def numpys(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(3))


def torchscript(path):
    torch.jit.script(nn.Linear(2, 2)).save(path)


def a_tensor(path):
    torch.save(torch.zeros(3), path)


@pytest.mark.parametrize("write", [
    legacy, numpys, torchscript, a_tensor, lambda path: path.write_bytes(b"GGUF and so on")])
def test_a_whole_file_of_another_kind_is_not_called_damaged(write, tmp_path):
    write(tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt.*docs/formats\.md") as refused:
        load_model(tmp_path / "a.pt")
    assert "copy" not in str(refused.value)


def save_a_share(path):
    """What a rank has of a model that is divided among the ranks."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    weights = make_model().state_dict()
    weights = {name: distribute_tensor(p, mesh) for name, p in weights.items()}
    torch.save({"model": weights, "config": TINY}, path)
    dist.destroy_process_group()


def test_what_is_to_be_done_with_a_share_of_the_weights(tmp_path):
    """In a new process, which has not imported what could read it, as torch._dynamo does."""
    [(code, _, stderr)] = forked(functools.partial(save_a_share, tmp_path / "a.pt"))
    assert code == 0, stderr
    result = subprocess.run(
        [sys.executable, ROOT / "export.py", tmp_path / "a.pt", tmp_path / "exported"],
        env=ENV, text=True, capture_output=True, timeout=HANG)
    assert result.returncode == 2
    assert "full_tensor" in result.stderr
    assert "copy the file" not in result.stderr


@pytest.mark.parametrize("value", [np.float64(3.1), np.zeros(3)])
def test_what_is_to_be_done_with_a_checkpoint_that_has_numpys_values(value, tmp_path):
    path = save(tmp_path / "ckpt.pt", own_checkpoint(make_model()) | {"val_loss": value})
    with pytest.raises(UserError, match=r"numpy.*float\(x\)"):
        load_model(path)


def test_a_loaded_model_needs_its_file_no_longer(tmp_path):
    model = make_model()
    path = save(tmp_path / "checkpoint.pt", own_checkpoint(model))
    loaded = load_model(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert_same_weights(loaded, model)


# ----------------------------------------------------------------------- Hugging Face folders

@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_a_folder_of_transformers(activation, tmp_path):
    theirs = transformers_model(activation)
    theirs.save_pretrained(tmp_path / "model.pt")           # a folder, whatever its name
    assert_loads_as(theirs, tmp_path / "model.pt")


def test_a_folder_in_float16(tmp_path):
    theirs = transformers_model().half()
    theirs.save_pretrained(tmp_path)
    assert_loads_as(theirs.float(), tmp_path)


def test_a_folder_of_several_files(tmp_path):
    theirs = transformers_model()
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_loads_as(theirs, tmp_path)


def test_a_missing_one_of_several_files_is_named(tmp_path):
    transformers_model().save_pretrained(tmp_path, max_shard_size="8KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(UserError, match=f"{missing} is missing"):
        load_model(tmp_path)


def test_the_folder_of_transformers_trainer_means_its_newest_checkpoint(tmp_path):
    for step in (9, 10):
        make_model(seed=step).save_pretrained(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-old").mkdir()
    (tmp_path / "checkpoint-old" / "config.json").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert_same_weights(load_model(tmp_path), make_model(seed=10))


def test_the_names_of_the_hubs_own_gpt2_which_have_no_prefix_and_no_head(tmp_path):
    from safetensors.torch import save_file
    theirs = transformers_model()
    theirs.config.save_pretrained(tmp_path)
    weights = {name: p.clone() for name, p in theirs.transformer.state_dict().items()}
    weights |= {name: mask.byte() for name, mask in MASKS.items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert_loads_as(theirs, tmp_path)


def test_a_file_that_the_hubs_cache_links_to(tmp_path):
    theirs = transformers_model()
    theirs.save_pretrained(tmp_path / "snapshot")
    (tmp_path / "snapshot" / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert_loads_as(theirs, tmp_path / "snapshot")


def test_what_an_old_config_leaves_out_is_as_in_gpt2(tmp_path):
    model = make_model(block_size=1024)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    names = ("model_type", "vocab_size", "n_layer", "n_head", "n_embd")
    path.write_text(json.dumps({name: config[name] for name in names}))

    assert load_model(tmp_path).config == model.config


def test_an_epsilon_in_float32_is_the_same_epsilon(exported, tmp_path):
    """A folder that went through GGUF has it so."""
    in_float32 = {"layer_norm_epsilon": float(np.float32(1e-5))}
    folder = copy_with_config(exported, tmp_path / "copy", in_float32)
    assert_same_weights(load_model(folder), make_model())


def test_a_folder_with_torchs_pickles_alone_is_to_be_saved_as_safetensors(tmp_path):
    theirs = transformers_model()
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="save_pretrained"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_of_a_file_in_place_of_its_folder_the_folder_is_named(name, exported):
    with pytest.raises(UserError, match="exported$"):
        load_model(exported / name)


@pytest.mark.parametrize("key, value", [
    ("model_type", "llama"),
    ("activation_function", "relu"),
    ("n_inner", 32),
    ("layer_norm_epsilon", 1e-6),
    ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True),
    ("add_cross_attention", True),
    ("tie_word_embeddings", False),
    ("quantization_config", {"load_in_8bit": True}),
    ("auto_map", {"AutoModelForCausalLM": "modeling_other.Other"}),
])
def test_a_gpt2_that_our_code_does_not_compute_is_refused(key, value, exported, tmp_path):
    folder = copy_with_config(exported, tmp_path / "copy", {key: value})
    with pytest.raises(UserError, match=key):
        load_model(folder)


# ----------------------------------------------------------------------- a run's folder

@pytest.fixture
def a_run(tmp_path):
    """A run's folder, and its models by step. Step 10 had no validation, 999,999 the best one."""
    models = {step: make_model(seed=step) for step in (1, 2, 10, 999_999, 1_000_000)}
    for step, model in models.items():
        save(tmp_path / f"checkpoint_{step:06d}.pt", own_checkpoint(model))

    rows = [
        "1,0,0,5,0.5,,,,,8",            # on other tokens than the later ones
        "2,0,0,5,4.0,,,,,32",
        "3,0,0,5,1.0,,,,,32",           # has no checkpoint any more
        "10,0,0,5,,,,,,",
        "999999,0,0,5,3.0,,,,,32",
        "1000000,0,0,,3.5,,,,,32",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return tmp_path, models


def test_a_runs_folder_means_its_newest_checkpoint(a_run):
    folder, models = a_run
    (folder / "checkpoint_2000000.pt.tmp").touch()
    (folder / "._checkpoint_2000000.pt").touch()
    assert_same_weights(load_model(folder), models[1_000_000])
    assert_same_weights(load_model(f"{folder}/"), models[1_000_000])


def test_best_means_the_checkpoint_of_the_lowest_validation_loss(a_run, monkeypatch):
    folder, models = a_run
    assert_same_weights(load_model(folder / "best"), models[999_999])
    assert_same_weights(load_model(f"{folder}/best/"), models[999_999])
    monkeypatch.chdir(folder)
    assert_same_weights(load_model("best"), models[999_999])


def test_who_samples_from_a_runs_folder_is_told_which_checkpoint_is_the_best(a_run, capsys):
    folder, _ = a_run
    tell_of_best(folder)
    assert "checkpoint_999999.pt" in capsys.readouterr().err

    (folder / "checkpoint_1000000.pt").unlink()         # now the newest one is the best
    tell_of_best(folder)
    (folder / "metrics.csv").unlink()
    tell_of_best(folder)
    tell_of_best(folder / "best")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("metrics", ["", f"{HEADER}\n3,0,0,5,1.0,,,,,32\n", f"{HEADER}\na note\n"])
def test_without_a_validated_checkpoint_there_is_no_best(metrics, a_run):
    folder, models = a_run
    (folder / "metrics.csv").write_text(metrics)
    with pytest.raises(UserError, match="best|metrics.csv"):
        load_model(folder / "best")
    assert_same_weights(load_model(folder), models[1_000_000])


@pytest.mark.parametrize("name", ["absent.pt", "absent.pth", "absent.ckpt"])
def test_the_name_of_an_absent_checkpoint_is_none_of_the_hub(name, tmp_path):
    assert find_checkpoint(tmp_path / name) == tmp_path / name


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(UserError, match="checkpoint_"):
        load_model(tmp_path)


# ----------------------------------------------------------------------- another tokenizer

def give_it_another_token(folder):
    """One token of a folder's tokenizer becomes another, as if it was of another language."""
    for name, key in (("vocab.json", ""), ("tokenizer.json", "model")):
        settings = json.loads((folder / name).read_text())
        vocab = settings[key]["vocab"] if key else settings
        vocab["żółć"] = vocab.pop("the")
        (folder / name).write_text(json.dumps(settings))


@pytest.mark.parametrize("left_out", [[], ["vocab.json"]])
def test_a_folder_whose_tokens_are_not_gpt2s_is_refused(left_out, tmp_path):
    for folder in (tmp_path / "english", tmp_path / "polish"):
        make_model(vocab_size=50304).save_pretrained(folder)
    give_it_another_token(tmp_path / "polish")
    for name in left_out:
        (tmp_path / "english" / name).unlink()
        (tmp_path / "polish" / name).unlink()

    load_model(tmp_path / "english")
    with pytest.raises(UserError, match=f"{tmp_path / 'polish'} .*tokenizer"):
        load_model(tmp_path / "polish")


def test_a_folder_with_fewer_tokens_than_gpt2_may_have_another_tokenizer(tmp_path):
    """Then the run and sample.py know that they are not GPT-2's."""
    theirs = transformers_model()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    assert_loads_as(theirs, tmp_path)


def test_a_tokenizer_that_has_a_token_for_padding_besides_is_gpt2s(tmp_path):
    make_model(vocab_size=50304).save_pretrained(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|pad|>": 50257}))
    load_model(tmp_path)


# ----------------------------------------------------------------------- the hub

def test_a_model_of_the_hub_whose_tokens_are_not_gpt2s_is_refused(tmp_path):
    make_model(vocab_size=50304).save_pretrained(tmp_path / "published")
    give_it_another_token(tmp_path / "published")
    files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}
    del files["vocab.json"]             # a newer model has the other file alone

    with Hub() as hub:
        hub.put("somebody/polish", files)
        env = hub.env | {"HF_HOME": str(tmp_path / "cache")}
        results = [script("export.py", "somebody/polish", tmp_path / out, env=env)
                   for out in ("first", "from its cache")]
    for result in results:
        assert result.returncode == 2
        assert "somebody/polish has a tokenizer" in result.stderr
        assert result.stderr.count("\n") == 1


def test_gpt2_comes_from_the_hub_and_then_from_its_cache(tmp_path):
    theirs = transformers_model(vocab_size=50257)
    theirs.save_pretrained(tmp_path / "published")
    files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}

    with Hub() as hub:
        hub.put("openai-community/gpt2", files)
        env = hub.env | {"HF_HOME": str(tmp_path / "cache")}
        first = script("export.py", "gpt2", tmp_path / "first", env=env)
        asked_at_first = list(hub.asked)
        hub.requests.clear()
        second = script("export.py", "gpt2", tmp_path / "second", env=env)

    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert any("/gpt2/resolve/" in path for path in asked_at_first)
    assert not any("/gpt2/" in path for path in hub.requests)
    assert_same_weights(load_model(tmp_path / "first"), our_model(theirs))
    assert_same_weights(load_model(tmp_path / "second"), our_model(theirs))


def test_a_model_without_safetensors_on_the_hub_is_to_be_saved_again(tmp_path):
    with Hub() as hub:
        hub.put("somebody/model", {"config.json": b"{}", "pytorch_model.bin": b"..."})
        env = hub.env | {"HF_HOME": str(tmp_path / "cache")}
        result = script("export.py", "somebody/model", tmp_path / "exported", env=env)
    assert result.returncode == 2
    assert "save_pretrained" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_the_hub_does_not_have_is_refused(tmp_path):
    with Hub() as hub:
        env = hub.env | {"HF_HOME": str(tmp_path / "cache")}
        result = script("export.py", "nobody/model", tmp_path / "exported", env=env)
    assert result.returncode == 2
    assert "nobody/model" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("name", ["gpt2", "no/such-model", "a/b/c", "no such name", "../weights"])
def test_a_model_that_is_not_here_is_refused_offline(name):
    with pytest.raises(UserError, match=name):
        load_model(name)
    with pytest.raises(UserError, match=name):
        GPT.from_pretrained(name)


@pytest.mark.parametrize("name, near", [
    ("log/bset", "best"), ("log/checkpoint-10", "checkpoint-100"), ("./lgo", "log"),
    ("log/x", "log"),
])
def test_a_path_into_a_folder_that_is_here_is_not_asked_for_on_the_hub(
        name, near, tmp_path, monkeypatch):
    (tmp_path / "log" / "checkpoint-100").mkdir(parents=True)
    (tmp_path / "log" / "metrics.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    with pytest.raises(UserError, match=f"{name} .*{near}"):
        load_model(name)


def test_the_names_of_openais_models_are_those_of_the_sizes():
    assert OPENAI_NAMES == tuple(GPT2_SIZES)


# ----------------------------------------------------------------------- packages

@pytest.mark.parametrize("module, source", [
    ("huggingface_hub", "gpt2"),
    ("safetensors.torch", "exported"),
])
def test_a_missing_package_is_not_taken_for_a_bad_model(module, source, exported, monkeypatch):
    """run_command names the package."""
    monkeypatch.chdir(exported.parent)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=module):
        load_model(source)
