"""The folders that speedrun and frontier export, in transformers and back. GPT-2's are in test_model.py."""
import dataclasses
import json
import sys

import pytest
import torch
import torch.nn.functional as F

import hellaswag
import runtime.huggingface
import sample
from helpers import hellaswag_file
from model import GPT, GPTConfig, MODELS, load_model, main
from runtime.checkpoint import load_init
from runtime.cli import UserError
from runtime.huggingface import EXPORTED, MODELING
from runtime.language_model import ModernConfig
from runtime.ranks import Process
from runtime.tokenizer import EOT, VOCAB_SIZE
from train_gpt2 import parse_flags


def make_model(recipe, seed=0, **shape):
    """With random weights as after training, and with padding that would be sampled if it could be."""
    torch.manual_seed(seed)
    tiny = dict(block_size=40, vocab_size=50304, n_layer=2, n_head=3, n_embd=24)
    model = MODELS[recipe](ModernConfig(**tiny | shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.dim() == 2 else 0.3))
        model.lm_head.weight[VOCAB_SIZE:] *= 20
    return model


def checkpoint(model, path):
    torch.save({"model": model.state_dict(), "model_config": dataclasses.asdict(model.config),
                "recipe": model.recipe}, path)
    return path


@pytest.fixture(scope="module", autouse=True)
def transformers_copies_the_code_to_a_folder_of_the_tests(tmp_path_factory):
    from transformers import dynamic_module_utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


def in_transformers(folder, **how):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **how)


@pytest.fixture(scope="module", params=[("speedrun", 0), ("speedrun", 7), ("frontier", 0), ("frontier", 7)],
                ids=lambda param: f"{param[0]}, window {param[1]}")
def exported(request, tmp_path_factory):
    """Our model, the folder, and transformers' model of it."""
    folder, model = tmp_path_factory.mktemp("exported"), make_model(request.param[0], window=request.param[1])
    model.save_pretrained(folder)
    theirs, loading = in_transformers(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return model, folder, theirs


def documents(B=3, T=40):
    """Tokens (B, T) of several documents: <|endoftext|> first, alone, twice in a row."""
    idx = torch.randint(VOCAB_SIZE, (B, T), generator=torch.Generator().manual_seed(1))
    idx[0, 4] = idx[1, 2] = idx[1, 3] = idx[2, 0] = idx[2, 30] = EOT
    return idx


@torch.no_grad()
def test_transformers_has_our_logits_and_loss_without_the_padding(exported):
    model, _, theirs = exported
    idx = documents()
    logits = model(idx)[0][..., :VOCAB_SIZE]
    found = theirs(idx, labels=idx)
    assert found.logits.shape == (3, 40, VOCAB_SIZE) and found.past_key_values is None
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(found.loss, loss)
    assert torch.equal(theirs(idx, logits_to_keep=2).logits, found.logits[:, -2:])
    past, parts = None, []                                  # several tokens after a cache, too
    for part in idx.split([9, 1, 17, 13], dim=1):
        part = theirs(part, past_key_values=past, use_cache=True)
        past, parts = part.past_key_values, [*parts, part.logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="41 tokens are longer than block_size 40"):
        theirs(torch.zeros(1, 41, dtype=torch.int64))


def test_transformers_continues_as_we_do_in_batches_with_padding_and_beams(exported):
    model, _, theirs = exported
    how = dict(do_sample=False, max_new_tokens=25, eos_token_id=None, pad_token_id=EOT)
    prompts = documents()[:, :10]
    expected = model.generate(prompts, 25, temperature=0)
    assert expected.max() < VOCAB_SIZE and len(expected[:, 10:].unique()) > 20
    for use_cache in (True, False):
        found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), use_cache=use_cache, **how)
        assert torch.equal(found, expected), use_cache
    mask = torch.ones_like(prompts)
    for row, padding in enumerate((3, 7, 0)):
        mask[row, :padding] = 0
        expected[row, padding:] = model.generate(prompts[row:row + 1, padding:], 25, temperature=0)
    padded = prompts.where(mask == 1, 11)                   # which token stands there does not matter
    found = theirs.generate(padded, attention_mask=mask, **how)
    assert all(torch.equal(*(x[row, n:] for x in (found, expected))) for row, n in enumerate((3, 7, 0)))
    beams = [theirs.generate(padded, attention_mask=mask, num_beams=3, use_cache=use_cache, **how)
             for use_cache in (True, False)]
    assert torch.equal(*beams)


def test_the_folder_comes_back_and_so_does_what_transformers_saves(exported, tmp_path):
    model, folder, theirs = exported
    assert {path.name for path in folder.iterdir()} == EXPORTED
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="2MB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for source in (folder, tmp_path / "saved"):
        again = load_model(source)
        assert type(again) is type(model) and again.config == model.config
        assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    with pytest.raises(UserError, match=f"model_type = {model.recipe} instead of gpt2"):
        GPT.from_pretrained(folder)


def test_no_code_and_no_pickle_of_a_folder_is_read(exported, tmp_path, monkeypatch):
    model, _, _ = exported
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / MODELING).write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')")
    load_model(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "hf/pytorch_model.bin")
    (tmp_path / "hf/model.safetensors").unlink()
    monkeypatch.setattr(runtime.huggingface, "load_pickle", None)
    with pytest.raises(UserError, match="no model.safetensors"):
        load_model(tmp_path / "hf")
    assert not (tmp_path / "CANARY").exists()


def test_the_commands_take_the_folder_as_they_take_its_checkpoint(exported, tmp_path, capsys):
    model, folder, _ = exported
    said, data = [], hellaswag_file(tmp_path / "examples.jsonl")
    for source in (folder, checkpoint(model, tmp_path / "c.pt")):
        sample.main(["--model", str(source), "--max_new_tokens", "9", "--num_samples", "2"])
        hellaswag.main(["--model", str(source), "--data", str(data)])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].count("sample") == 2 and "acc_norm" in said[0]
    flags = parse_flags(["--init", str(folder), "--recipe", model.recipe])
    assert load_init(*flags, Process(), MODELS, load_model).config == model.config
    with pytest.raises(UserError, match=f"--recipe gpt2 contradicts .* has {model.recipe}: give that"):
        load_init(*parse_flags(["--init", str(folder)]), Process(), MODELS, load_model)


def test_an_export_names_the_code_and_is_replaced_by_one_of_another_recipe(tmp_path, capsys):
    folder, small = tmp_path / "hf", dict(n_layer=1, n_head=1, n_embd=4, block_size=8)
    frontier = checkpoint(make_model("frontier", **small), tmp_path / "frontier.pt")
    main(["export", str(frontier), str(folder)])
    assert f"{str(folder)!r}, trust_remote_code=True)" in capsys.readouterr().out
    GPT(GPTConfig(**small | {"vocab_size": 50304})).save_pretrained(tmp_path / "gpt2")
    main(["export", str(tmp_path / "gpt2"), str(folder)])
    assert "trust_remote_code" not in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == EXPORTED - {MODELING}
    main(["export", str(frontier), str(folder)])
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_modern.FrontierForCausalLM"
