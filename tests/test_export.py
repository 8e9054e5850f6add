"""The folders that the three recipes export, in transformers and back."""
import errno
import functools
import json
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from helpers import ROOT, refused
from export import main
from model import GPT, GPTConfig
from recipes import MODELS, load_model
from peers import own_checkpoint, save, transformers_model
from runtime.huggingface import EXPORTED, MODELING
from runtime.tokenizer import EOT, VOCAB_SIZE, encode

TINY = dict(block_size=40, vocab_size=50304, n_layer=2, n_head=3, n_embd=24)
KINDS = {"gpt2": {}, "gpt2, exact GELU": {"gelu": "none"}, "speedrun": {},
         "speedrun, window 7": {"window": 7}, "frontier": {}, "frontier, window 7": {"window": 7}}


def make_model(recipe="gpt2", **shape):
    """With random weights as after training, and with padding that would be sampled if it could be."""
    torch.manual_seed(0)
    model = MODELS[recipe](MODELS[recipe].Config(**TINY | shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.2 if p.dim() == 2 else 0.3))
        model.lm_head.weight[VOCAB_SIZE:] *= 20
    return model


def checkpoint(model, path):
    return str(save(path, own_checkpoint(model) | {"recipe": getattr(model, "recipe", "gpt2")}))


def tiny_checkpoint(path, recipe="gpt2"):
    return checkpoint(make_model(recipe, n_layer=1, n_head=1, n_embd=4, block_size=8), path)


@pytest.fixture(scope="module", autouse=True)
def transformers_copies_the_code_to_a_folder_of_the_tests(tmp_path_factory):
    from transformers import dynamic_module_utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory):
    """Our model, the folder, and transformers' model of it."""
    from transformers import AutoModelForCausalLM
    recipe, folder = request.param.partition(",")[0], tmp_path_factory.mktemp("exported")
    model = make_model(recipe, **KINDS[request.param])
    model.save_pretrained(folder)
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True,
                                                           trust_remote_code=recipe != "gpt2")
    assert not any(loading.values()), loading
    assert {path.name for path in folder.iterdir()} == EXPORTED - ({MODELING} if recipe == "gpt2" else set())
    return model, folder, theirs.eval()


@functools.cache
def their_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


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
    assert found.logits.shape == (3, 40, VOCAB_SIZE)
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(found.loss, loss)
    torch.testing.assert_close(theirs(idx, logits_to_keep=2).logits, found.logits[:, -2:])
    padded, mask = F.pad(idx, (0, 6), value=11)[:, 6:], torch.ones_like(idx)    # at the end
    mask[:, -6:] = 0
    found = theirs(padded, attention_mask=mask).logits[:, :-6]
    torch.testing.assert_close(found, model(padded[:, :-6])[0][..., :VOCAB_SIZE], atol=1e-4, rtol=0)
    past, parts = None, []                                  # several tokens after a cache, too
    for part in idx.split([9, 1, 17, 13], dim=1):
        part = theirs(part, past_key_values=past, use_cache=True)
        past, parts = part.past_key_values, [*parts, part.logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=0)
    with pytest.raises((ValueError, IndexError)):
        theirs(torch.zeros(1, 41, dtype=torch.int64))


def test_transformers_continues_as_we_do_in_batches_with_padding_and_beams(exported):
    model, _, theirs = exported
    how = dict(do_sample=False, max_new_tokens=18, eos_token_id=None, pad_token_id=EOT)
    prompts = documents()[:, :10]
    expected = model.generate(prompts, 18, temperature=0)
    assert expected.max() < VOCAB_SIZE and len(expected[:, 10:].unique()) > 7
    for use_cache in (True, False):
        found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), use_cache=use_cache, **how)
        assert torch.equal(found, expected), use_cache
    mask = torch.ones_like(prompts)
    for row, padding in enumerate((3, 7, 0)):
        mask[row, :padding] = 0
        expected[row, padding:] = model.generate(prompts[row:row + 1, padding:], 18, temperature=0)
    padded = prompts.where(mask == 1, 11)                   # which token stands there does not matter
    found = theirs.generate(padded, attention_mask=mask, **how)
    assert all(torch.equal(*(x[row, n:] for x in (found, expected))) for row, n in enumerate((3, 7, 0)))
    beams = [theirs.generate(padded, attention_mask=mask, num_beams=3, use_cache=use_cache, **how)
             for use_cache in (True, False)]
    assert torch.equal(*beams)


def test_the_folder_comes_back_and_so_does_what_transformers_saves(exported, tmp_path):
    model, folder, theirs = exported
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="2MB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for source in (folder, tmp_path / "saved"):
        again, cut = load_model(source), VOCAB_SIZE if type(model) is GPT else None
        assert type(again) is type(model)
        assert vars(again.config) == vars(model.config) | {"vocab_size": cut or 50304}
        for name, p in again.named_parameters():
            had = model.get_parameter(name)
            assert torch.equal(p, had[:cut] if cut else had), name
    if type(model) is not GPT:
        refused(lambda: GPT.from_pretrained(folder), folder)


def test_an_exports_settings_and_tensors_are_what_other_tools_expect(exported):
    model, folder, theirs = exported
    config, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in (
        "config", "tokenizer_config"))
    name = type(model).__name__.removesuffix("GPT").capitalize()
    want = {"vocab_size": 50257, "bos_token_id": EOT, "eos_token_id": EOT, "dtype": "float32",
            "model_type": model.recipe}
    if type(model) is GPT:
        want |= {"architectures": ["GPT2LMHeadModel"], "n_positions": 40, "n_ctx": 40, "n_inner": None,
                 "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
                 "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                 "activation_function": {"tanh": "gelu_new", "none": "gelu"}[model.config.gelu]}
    else:
        want |= {"architectures": [f"{name}ForCausalLM"], "block_size": 40, "padded_vocab_size": 50304,
                 "window": model.config.window, "tie_word_embeddings": False,
                 "auto_map": {"AutoConfig": f"modeling_modern.{name}Config",
                              "AutoModelForCausalLM": f"modeling_modern.{name}ForCausalLM"}}
    assert {key: config.get(key) for key in want} == want
    their = theirs.config
    assert (their.num_hidden_layers, their.num_attention_heads, their.hidden_size,
            their.max_position_embeddings, their.eos_token_id) == (2, 3, 24, 40, EOT)
    assert theirs.get_input_embeddings() is theirs.transformer.wte
    assert tokenizer == {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 40,
                         "add_prefix_space": False, "bos_token": "<|endoftext|>",
                         "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {name: file.get_tensor(name) for name in file.keys()}          # noqa: SIM118
    assert {t.dtype for name, t in stored.items() if name != "parts"} == {torch.float32}
    assert ("lm_head.weight" in stored) == (model.recipe == "speedrun")
    wte = model.transformer.wte.weight
    assert torch.equal(stored["transformer.wte.weight"], wte[:50257] if type(model) is GPT else wte)


def test_weights_of_any_dtype_are_exported_in_float32_and_logits_are_float32(tmp_path):
    from transformers import AutoModelForCausalLM
    for recipe in MODELS:
        model = make_model(recipe).bfloat16()
        model.save_pretrained(tmp_path / recipe)
        with safe_open(tmp_path / recipe / "model.safetensors", "pt") as file:
            assert file.get_tensor("transformer.wte.weight").dtype == torch.float32
        again = dict(load_model(tmp_path / recipe).named_parameters())
        for name, p in model.float().named_parameters():
            assert torch.equal(p[:len(again[name])] if p.dim() else p, again[name]), name
        if recipe != "gpt2":
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / recipe, trust_remote_code=True,
                                                          dtype=torch.bfloat16)
            assert theirs(documents()).logits.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_in_bfloat16_late_positions_differ_as_in_float32(recipe, tmp_path):
    """bfloat16 has 8 bits: from 256 on it does not tell a position from the next."""
    from transformers import AutoModelForCausalLM
    model = make_model(recipe, block_size=1024, n_layer=1, n_head=1, n_embd=32, vocab_size=50304)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    idx = documents(3, 1000)[1:2]
    with torch.no_grad():
        exact = theirs(idx, logits_to_keep=50).logits
        rounded = theirs.bfloat16()(idx, logits_to_keep=50).logits
    error = (rounded - exact).square().mean() / exact.square().mean()
    assert error < 2.5e-4, error


def test_an_export_that_fails_leaves_no_folder_that_is_read_as_a_model(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "c.pt", "speedrun")
    rename = os.replace
    for last in range(6):
        main(["export", tiny_checkpoint(tmp_path / "old.pt"), str(tmp_path / "hf")])
        done = []

        def full(*paths, last=last, done=done):
            if len(done) == last:
                raise OSError(errno.ENOSPC, "No space left on device")
            done.append(paths)
            rename(*paths)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            refused(lambda: main(["export", source, str(tmp_path / "hf")]), failed=True)
        assert not list((tmp_path / "hf").iterdir()), "the same command can be given again"

    # a kill cannot clean up: without config.json, which comes last, what it leaves is no model
    written = []
    monkeypatch.setattr(os, "replace", lambda *paths: (written.append(os.path.basename(paths[1])),
                                                       rename(*paths)))
    main(["export", source, str(tmp_path / "hf")])
    assert written[-1] == "config.json"


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(["  two  spaces\n\n\tand tabs ", "naïve Ω 日本語 🙂 e\u0301 1234 don't",
                        (ROOT / "input.txt").read_text(encoding="utf-8")[:20_000]])
       | st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_exported_tokenizer_is_gpt2s(exported, text):
    theirs = their_tokenizer(exported[1])
    ids = theirs(text)["input_ids"]
    assert ids == encode(text).tolist() and theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.convert_tokens_to_ids("<|endoftext|>") == EOT
    assert theirs("a<|endoftext|>")["input_ids"] == [64, EOT]
    assert theirs.model_max_length == 40 and len(theirs) == VOCAB_SIZE


def test_export_says_how_it_is_read_and_is_replaced_by_one_of_another_recipe(tmp_path, capsys):
    folder = tmp_path / "new" / "hf"
    for recipe, code in ("frontier", True), ("gpt2", False), ("speedrun", True):
        main(["export", tiny_checkpoint(tmp_path / "c.pt", recipe), str(folder)])
        said = capsys.readouterr().out
        assert repr(str(folder)) in said and ("trust_remote_code" in said) == code
        assert {path.name for path in folder.iterdir()} == EXPORTED - (set() if code else {MODELING})
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_modern.SpeedrunForCausalLM"
    main(["export", str(folder), str(folder)])                                  # the same again
    assert load_model(folder).recipe == "speedrun"


def test_a_mistake_in_an_export_writes_nothing_and_only_an_earlier_export_is_replaced(tmp_path):
    source = tiny_checkpoint(tmp_path / "c.pt")
    transformers_model().config.save_pretrained(tmp_path / "theirs")            # of an export's names only
    main(["export", source, str(tmp_path / "more")])
    (tmp_path / "more" / "thesis.tex").write_text("not a file of an export")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.safetensors").write_text("a folder without a config.json")
    (tmp_path / "file").write_text("not a folder")
    characters = checkpoint(GPT(GPTConfig(**TINY | {"vocab_size": 96})), tmp_path / "characters.pt")
    mistakes = [([source, tmp_path / name], name) for name in ("theirs", "more", "half", "file", "file/a")]
    mistakes += [([characters, tmp_path / "hf"], characters), (["no.pt", tmp_path / "hf"], "no.pt"),
                 (["a"], "model.py"), (["a", tmp_path / "hf", "--c"], "--c")]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments, said in mistakes:
        refused(lambda arguments=arguments: main(["export", *map(str, arguments)]), said)
    refused(lambda: main(["expor", source, str(tmp_path / "hf")]), "expor")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not (tmp_path / "hf").exists()
