"""The folders that the three recipes export: in transformers, and back in this project."""
import copy
import functools
import json
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from peers import own_checkpoint, relative_error, save
from safetensors import safe_open

import frontier
from export import main
from helpers import ROOT
from model import GPT, GPTConfig
from recipes import RECIPES, load_model
from runtime.cli import RunError, UserError
from runtime.huggingface import EXPORTED, MODELING
from runtime.tokenizer import EOT, VOCAB_SIZE, encode

MODERN = ["speedrun", "frontier"]
GREEDY = {"do_sample": False, "max_new_tokens": 18, "eos_token_id": None, "pad_token_id": EOT}


def make_model(recipe, gelu=None, **shape):
    """A small model with random weights, as after training."""
    sizes = {"block_size": 40, "vocab_size": 50304, "n_layer": 2, "n_head": 3, "n_embd": 24} | shape
    if gelu is not None:
        sizes["gelu"] = gelu

    torch.manual_seed(0)
    cls = RECIPES[recipe].model
    model = cls(cls.Config(**sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))

        # The padding would be sampled, if it could be.
        model.lm_head.weight[VOCAB_SIZE:] *= 20
        if recipe == "frontier":
            model.pointer.sentinel_bias += 6    # fewer copies: otherwise one token would go on
    return model


def tiny_checkpoint(path, recipe="gpt2"):
    model = make_model(recipe, n_layer=1, n_head=1, n_embd=4, block_size=8)
    return str(save(path, own_checkpoint(model) | {"recipe": recipe}))


def documents(B=3, T=40):
    """Tokens (B, T) of several documents: <|endoftext|> first, alone, twice in a row."""
    idx = torch.randint(VOCAB_SIZE, (B, T), generator=torch.Generator().manual_seed(1))
    idx[0, 4] = EOT
    idx[1, 2:4] = EOT
    idx[2, 0] = EOT
    idx[2, 30] = EOT
    return idx


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def read_json(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def transformers_copies_the_code_to_a_folder_of_the_tests(tmp_path_factory):
    from transformers import dynamic_module_utils

    modules = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """export(recipe, gelu): our model, its folder, and transformers' model of it, made once."""
    from transformers import AutoModelForCausalLM

    @functools.cache
    def make(recipe, gelu=None):
        folder = tmp_path_factory.mktemp("exported")
        model = make_model(recipe, gelu)
        model.save_pretrained(folder)

        theirs, problems = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, trust_remote_code=recipe != "gpt2")
        assert not any(problems.values()), problems
        return model, folder, theirs.eval()
    return make


@pytest.fixture(scope="module", params=RECIPES)
def exported(request, export):
    """Our model, its folder, and transformers' model of the folder."""
    return export(request.param)


@pytest.fixture
def modern(export):
    """{recipe: (our model, transformers' model of its export)}, which a test may change."""
    models = {}
    for recipe in MODERN:
        model, _, theirs = export(recipe)
        models[recipe] = copy.deepcopy((model, theirs))
    return models


# ----------------------------------------------------------------------- the model in transformers

@torch.no_grad()
def test_transformers_computes_our_logits_and_loss_without_the_padding_ids(exported):
    model, _, theirs = exported
    idx = documents()

    found = theirs(idx, labels=idx)

    logits = model(idx)[0][..., :VOCAB_SIZE]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    assert found.logits.shape == (3, 40, VOCAB_SIZE)
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.loss, loss)
    shared = theirs(idx, labels=idx, num_items_in_batch=9).loss     # as the Trainer asks for it
    torch.testing.assert_close(shared, loss * (3 * 39) / 9)
    last_two = theirs(idx, logits_to_keep=2).logits
    torch.testing.assert_close(last_two, found.logits[:, -2:])


@torch.no_grad()
def test_the_exact_gelu_of_a_gpt2_is_that_of_transformers(export):
    model, _, theirs = export("gpt2", "none")
    assert theirs.config.activation_function == "gelu"
    logits = model(documents())[0][..., :VOCAB_SIZE]
    torch.testing.assert_close(theirs(documents()).logits, logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_padding_at_the_end_changes_no_logits(exported):
    model, _, theirs = exported
    idx = documents(T=34)
    mask = torch.ones(3, 40, dtype=torch.int64)
    mask[:, 34:] = 0

    found = theirs(F.pad(idx, (0, 6), value=11), attention_mask=mask).logits[:, :34]

    torch.testing.assert_close(found, model(idx)[0][..., :VOCAB_SIZE], atol=1e-4, rtol=0)


@torch.no_grad()
def test_several_tokens_after_a_cache_have_the_logits_of_the_whole_text(exported):
    model, _, theirs = exported
    idx = documents()

    past = None
    parts = []
    for tokens in idx.split([9, 1, 17, 13], dim=1):
        output = theirs(tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        parts.append(output.logits)

    logits = model(idx)[0][..., :VOCAB_SIZE]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_the_cache_is_known_by_its_old_and_by_its_new_name(name, modern):
    """transformers 5.24 calls it `cache`."""
    model, theirs = modern["frontier"]
    idx = documents()

    first = theirs(idx[:, :17], use_cache=True)
    last = theirs(idx[:, 17:], **{name: first[-1]})

    logits = model(idx)[0][..., :VOCAB_SIZE]
    torch.testing.assert_close(last.logits, logits[:, 17:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("recipe", MODERN)
@torch.no_grad()
def test_frontiers_head_is_made_once_in_a_generation_and_anew_in_the_next(recipe, modern):
    model, theirs = modern[recipe]
    prompt = documents()[:1, :10]
    heads_made = []

    def remember(module, args, result):
        if args[0].size(-1) == 50304:
            heads_made.append(True)

    if recipe == "frontier":
        theirs.transformer.part.register_forward_hook(remember)

    first = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    model.transformer.wte.weight.neg_()
    theirs.transformer.wte.weight.neg_()
    second = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)

    assert len(heads_made) == {"speedrun": 0, "frontier": 2}[recipe]
    assert not torch.equal(first, second)
    assert torch.equal(second, model.generate(prompt, 18, temperature=0))


def test_gradients_of_the_head_do_not_come_from_a_cache(modern):
    _, theirs = modern["frontier"]
    idx = documents()
    with torch.no_grad():
        past = theirs(idx[:, :9], use_cache=True)[-1]

    theirs(idx[:, 9:], past_key_values=past).logits.sum().backward()

    assert theirs.transformer.wte.weight.grad[VOCAB_SIZE - 2].abs().max() > 0


# ----------------------------------------------------------------------- what transformers may ask

@pytest.mark.parametrize("recipe", MODERN)
@torch.no_grad()
def test_without_return_dict_there_is_a_tuple(recipe, modern):
    _, theirs = modern[recipe]
    idx = documents()
    expected = theirs(idx, labels=idx)

    loss, logits = theirs(idx, labels=idx, return_dict=False)

    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)


@pytest.mark.parametrize("name", ["position_ids", "inputs_embeds", "output_attentions", "typo"])
def test_an_argument_that_would_change_the_result_is_an_error(name, modern):
    _, theirs = modern["speedrun"]
    idx = documents()
    with pytest.raises(ValueError, match=name):
        theirs(idx, **{name: torch.ones(3, 40)})
    theirs(idx, **{name: None})


@pytest.mark.parametrize("shape", [(3, 1), (3, 1, 40, 40)])
@pytest.mark.parametrize("recipe", MODERN)
def test_an_attention_mask_of_another_shape_is_an_error(recipe, shape, modern):
    _, theirs = modern[recipe]
    with pytest.raises(ValueError, match="attention_mask"):
        theirs(documents(), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("recipe", MODERN)
def test_a_static_cache_is_an_error(recipe, modern):
    _, theirs = modern[recipe]
    with pytest.raises(ValueError, match="static"):
        theirs.generate(documents()[:1], cache_implementation="static", **GREEDY)


@pytest.mark.parametrize("recipe", MODERN)
def test_another_number_of_tokens_is_an_error(recipe, modern):
    _, theirs = modern[recipe]
    with pytest.raises(ValueError, match="50300"):
        theirs.resize_token_embeddings(50300)
    assert theirs.resize_token_embeddings() is theirs.transformer.wte
    assert theirs.resize_token_embeddings(VOCAB_SIZE) is theirs.transformer.wte


# ----------------------------------------------------------------------- torch.export and its kind

class LogitsOnly(torch.nn.Module):
    """What a tracer takes: tensors in, one tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx):
        return self.model(idx)[0]


@pytest.mark.parametrize("recipe", ["gpt2", "frontier"])      # which has all layers of speedrun
@torch.no_grad()
def test_torch_export_keeps_the_length_free(recipe, export):
    ours, _, _ = export(recipe)
    model = LogitsOnly(ours)
    T = torch.export.Dim("T", min=3, max=40)

    program = torch.export.export(model, (short_documents(),), dynamic_shapes=({1: T},))

    idx = documents(T=33)
    torch.testing.assert_close(program.module()(idx), model(idx), atol=1e-5, rtol=0)


def short_documents():
    return documents()[:, :9].contiguous()


def test_a_text_longer_than_block_size_is_an_error_there_too(exported):
    _, _, theirs = exported
    with pytest.raises((ValueError, IndexError)):
        theirs(torch.zeros(1, 41, dtype=torch.int64))


@pytest.mark.parametrize("use_cache", [True, False])
def test_transformers_continues_as_we_do(exported, use_cache):
    model, _, theirs = exported
    prompts = documents()[:, :10]

    found = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), use_cache=use_cache, **GREEDY)

    expected = model.generate(prompts, 18, temperature=0)
    assert torch.equal(found, expected)
    assert expected.max() < VOCAB_SIZE
    assert len(expected[:, 10:].unique()) > 6


@pytest.mark.parametrize("padding", [1, 7])
def test_padding_before_a_prompt_changes_nothing_that_follows_it(exported, padding):
    model, _, theirs = exported
    prompts = documents()[:, :10]
    mask = torch.ones_like(prompts)
    mask[1, :padding] = 0
    padded = prompts.where(mask == 1, 11)       # which token stands there does not matter

    found = theirs.generate(padded, attention_mask=mask, **GREEDY)

    expected = model.generate(prompts[1:2, padding:], 18, temperature=0)
    assert torch.equal(found[1:2, padding:], expected)
    assert torch.equal(found[0:1], model.generate(prompts[0:1], 18, temperature=0))


@pytest.mark.parametrize("recipe", MODERN)
@torch.no_grad()
def test_padding_before_a_text_changes_no_logits(recipe, export):
    _, _, theirs = export(recipe)
    idx = documents()[1:2]
    mask = torch.ones_like(idx)
    mask[0, :6] = 0
    padded = idx.where(mask == 1, 11)
    found = theirs(padded, attention_mask=mask).logits[:, 6:]
    torch.testing.assert_close(found, theirs(idx[:, 6:]).logits, atol=1e-3, rtol=1e-3)


def test_beams_are_the_same_with_and_without_the_cache(exported):
    _, _, theirs = exported
    prompts = documents()[:, :10]
    mask = torch.ones_like(prompts)
    mask[1, :7] = 0

    with_cache = theirs.generate(
        prompts, attention_mask=mask, num_beams=3, use_cache=True, **GREEDY)
    without = theirs.generate(
        prompts, attention_mask=mask, num_beams=3, use_cache=False, **GREEDY)

    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_logits_are_float32_in_a_bfloat16_model(recipe, export):
    from transformers import AutoModelForCausalLM
    _, folder, _ = export(recipe)

    theirs = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16)

    assert theirs.transformer.wte.weight.dtype == torch.bfloat16
    assert theirs(documents()).logits.dtype == torch.float32


@torch.no_grad()
def test_in_bfloat16_late_positions_differ_as_in_float32(tmp_path):
    """bfloat16 has 8 bits: from 256 on it does not tell a position from the next."""
    from transformers import AutoModelForCausalLM
    model = make_model("frontier", block_size=600, n_layer=1, n_head=1, n_embd=32)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    idx = documents(T=600)[1:2]

    exact = theirs(idx, logits_to_keep=20).logits
    rounded = theirs.bfloat16()(idx, logits_to_keep=20).logits

    assert relative_error(rounded, exact) < 0.016


# ----------------------------------------------------------------------- the folder's files

def test_the_folder_has_these_files(exported):
    model, folder, _ = exported
    expected = set(EXPORTED)
    if model.recipe == "gpt2":
        expected.remove(MODELING)
    assert names_in(folder) == expected


def test_config_json_of_a_gpt2_is_transformers_own(exported):
    model, folder, theirs = exported
    if model.recipe != "gpt2":
        pytest.skip("of GPT-2")

    config = read_json(folder / "config.json")

    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["model_type"] == "gpt2"
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["activation_function"] == "gelu_new"
    assert config["dtype"] == "float32"
    for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
        assert config[key] == 0.0
    for key, value in config.items():
        if key not in ("architectures", "dtype"):
            assert getattr(theirs.config, key) == value, key


def test_the_settings_have_the_names_that_other_tools_ask_for(exported):
    _, _, theirs = exported
    config = theirs.config
    assert config.num_hidden_layers == 2
    assert config.num_attention_heads == 3
    assert config.hidden_size == 24
    assert config.max_position_embeddings == 40
    assert config.bos_token_id == EOT
    assert config.eos_token_id == EOT
    assert theirs.get_input_embeddings() is theirs.transformer.wte


def test_weights_are_stored_once_and_in_float32(exported):
    model, folder, _ = exported

    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}          # noqa: SIM118

    assert metadata == {"format": "pt"}
    is_tied = model.recipe != "speedrun"
    assert ("lm_head.weight" in stored) == (not is_tied)
    for name, tensor in stored.items():
        if name != "parts":
            assert tensor.dtype == torch.float32, name


def test_a_gpt2_has_the_names_of_openais_own_file(exported):
    """mlx-lm knows these only."""
    from transformers import GPT2Model

    model, folder, theirs = exported
    if model.recipe != "gpt2":
        pytest.skip("of GPT-2")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(GPT2Model(theirs.config).state_dict())


def test_weights_of_another_dtype_are_stored_in_float32(tmp_path):
    model = make_model("gpt2").bfloat16()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = file.get_tensor("wpe.weight")
    assert torch.equal(found, model.transformer.wpe.weight.float())


# ----------------------------------------------------------------------- a model that was rewritten

class SquaredReLU(torch.nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class Window(torch.nn.Module):
    """Attention that sees only the last tokens."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, *args):
        return torch.cat((x[:, :30], self.attention(x[:, 30:], *args)), dim=1)


class Gated(torch.nn.Module):
    """SwiGLU (arXiv:2002.05202): one more matrix."""

    def __init__(self, mlp):
        super().__init__()
        self.c_fc = mlp.c_fc
        self.c_gate = copy.deepcopy(mlp.c_fc)
        self.c_proj = mlp.c_proj

    def forward(self, x):
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))


def change_blocks(name, change):
    """Replaces the module `name` of each block by change(it)."""
    def change_model(model):
        for block in model.transformer.h:
            parent, _, child = name.rpartition(".")
            module = block.get_submodule(parent)
            setattr(module, child, change(getattr(module, child)))
    return change_model


def capped(model):
    model.softcap = 20.0                        # of speedrun and frontier
    if model.recipe == "gpt2":
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x: 20 * torch.tanh(forward(x) / 20)


CHANGES = {
    "the exact GELU": change_blocks("mlp.gelu", lambda gelu: torch.nn.GELU()),
    "ReLU squared": change_blocks("mlp.gelu", lambda gelu: SquaredReLU()),
    "a window": change_blocks("attn", Window),
    "a gate": change_blocks("mlp", Gated),
    "a softcap": capped,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gpt2_that_was_rewritten_is_not_exported_as_one(change, tmp_path):
    model = make_model("gpt2")
    CHANGES[change](model)
    with pytest.raises(UserError, match="CONTRIBUTING"):
        model.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


@pytest.mark.parametrize("change", ["ReLU squared", "a softcap"])
@pytest.mark.parametrize("recipe", MODERN)
def test_a_modern_model_that_is_not_that_of_the_exported_code_is_not_exported(
        recipe, change, tmp_path):
    model = make_model(recipe)
    if change == "ReLU squared":
        for block in model.transformer.h:
            block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(F.relu(mlp.c_fc(x)))
    else:
        CHANGES[change](model)
    with pytest.raises(UserError, match=MODELING):
        model.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_a_frontier_whose_documents_see_each_other_is_not_exported(tmp_path, monkeypatch):
    shift_keys = frontier.shift_keys
    monkeypatch.setattr(
        frontier, "shift_keys", lambda k, starts: shift_keys(k, torch.zeros_like(starts)))
    with pytest.raises(UserError, match=MODELING):
        make_model("frontier").save_pretrained(tmp_path / "changed")


def test_a_recipe_without_a_class_in_the_exported_code_is_refused(tmp_path):
    model = make_model("speedrun")
    model.recipe = "mine"
    with pytest.raises(UserError, match=MODELING):
        model.save_pretrained(tmp_path / "exported")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_that_was_not_trained_is_exported(recipe, tmp_path):
    """The logits of a new speedrun are all 0."""
    cls = RECIPES[recipe].model
    model = cls(cls.Config(block_size=16, n_layer=1, n_head=2, n_embd=8))
    model.save_pretrained(tmp_path)
    assert type(load_model(tmp_path)) is cls


def test_without_transformers_the_code_of_an_export_is_not_checked_and_that_is_told(
        tmp_path, monkeypatch, capsys):
    model = make_model("frontier", n_layer=1, n_embd=6)
    monkeypatch.setitem(sys.modules, "transformers", None)
    model.save_pretrained(tmp_path)
    assert "pip install transformers" in capsys.readouterr().err
    assert names_in(tmp_path) == set(EXPORTED)


# ----------------------------------------------------------------------- the tokenizer

@pytest.fixture(scope="module")
def their_tokenizer(exported):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(exported[1])


@pytest.mark.parametrize("text", [
    "  two  spaces\n\n\tand tabs ",
    "naïve Ω 日本語 🙂 e\u0301 1234 don't",
    "Ça va ? [ 1 , 2 ] do n't . ! 's",
    (ROOT / "input.txt").read_text(encoding="utf-8")[:20_000],
])
def test_the_exported_tokenizer_encodes_and_decodes_as_ours(their_tokenizer, text):
    ids = their_tokenizer(text)["input_ids"]
    assert ids == encode(text).tolist()
    assert their_tokenizer.decode(ids) == text


def test_transformers_js_is_told_to_leave_blanks_as_they_are(exported):
    """It removes some in decode() where the file does not say so."""
    config = read_json(exported[1] / "tokenizer_config.json")
    assert config["clean_up_tokenization_spaces"] is False


def test_tokenizer_json_alone_is_the_same_tokenizer(tmp_path):
    from tokenizers import Tokenizer
    make_model("gpt2", n_layer=1).save_pretrained(tmp_path)
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:20_000] + " naïve 日本語 🙂\n\n  don't"

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    ids = tokenizer.encode(text).ids
    assert ids == encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>").ids == [64, EOT]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_the_exported_tokenizer_knows_endoftext_and_the_longest_text(their_tokenizer):
    assert their_tokenizer("a<|endoftext|>")["input_ids"] == [64, EOT]
    assert their_tokenizer.eos_token_id == EOT
    assert their_tokenizer.bos_token_id == EOT
    assert their_tokenizer.model_max_length == 40
    assert len(their_tokenizer) == VOCAB_SIZE


# ----------------------------------------------------------------------- and back

def assert_same_model(found, model):
    """A gpt2 comes back without the rows that pad its vocabulary."""
    vocab_size = model.config.vocab_size
    if model.recipe == "gpt2":
        vocab_size = VOCAB_SIZE

    assert type(found) is type(model)
    assert vars(found.config) == vars(model.config) | {"vocab_size": vocab_size}
    for name, p in found.named_parameters():
        expected = model.get_parameter(name)
        if name == "transformer.wte.weight":
            expected = expected[:vocab_size]
        assert torch.equal(p, expected), name


def test_an_export_is_read_again_with_the_same_weights(exported):
    model, folder, _ = exported
    assert_same_model(load_model(folder), model)


def test_what_transformers_saves_in_several_files_is_read_too(exported, tmp_path):
    model, _, theirs = exported
    theirs.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_model(load_model(tmp_path), model)


def test_gpt_reads_no_other_recipe(export):
    _, folder, _ = export("speedrun")
    with pytest.raises(UserError, match="model_type"):
        GPT.from_pretrained(folder)


# ----------------------------------------------------------------------- the command

@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_writes_the_folder_and_says_how_it_is_read(recipe, tmp_path, capsys):
    source = tiny_checkpoint(tmp_path / "checkpoint.pt", recipe)
    folder = tmp_path / "new" / "exported"

    main([source, str(folder)])

    said = capsys.readouterr().out
    assert repr(str(folder)) in said
    exported = load_model(folder)
    assert type(exported) is RECIPES[recipe].model
    assert ("trust_remote_code=True" in said) == (exported.recipe != "gpt2")


def test_the_folder_is_named_so_that_it_is_found_from_anywhere(tmp_path, monkeypatch, capsys):
    source = tiny_checkpoint(tmp_path / "checkpoint.pt")
    monkeypatch.chdir(tmp_path)
    main([source, "exported"])
    assert repr(str(tmp_path / "exported")) in capsys.readouterr().out


def test_an_empty_folder_is_taken(tmp_path):
    source = tiny_checkpoint(tmp_path / "checkpoint.pt")
    (tmp_path / "exported").mkdir()
    main([source, str(tmp_path / "exported")])
    assert "config.json" in names_in(tmp_path / "exported")


def test_a_folder_with_files_is_refused_and_left_as_it_is(tmp_path):
    source = tiny_checkpoint(tmp_path / "checkpoint.pt")
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.tex").write_text("a year of work")

    with pytest.raises(UserError, match="thesis"):
        main([source, str(folder)])

    assert names_in(folder) == {"thesis.tex"}
    assert (folder / "thesis.tex").read_text() == "a year of work"


def test_a_source_that_is_not_there_makes_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no.pt"):
        main(["no.pt", str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()


def test_a_model_of_other_tokens_is_exported_without_a_tokenizer(tmp_path, capsys):
    model = GPT(GPTConfig(block_size=8, vocab_size=96, n_layer=1, n_head=1, n_embd=4))
    source = save(tmp_path / "characters.pt", own_checkpoint(model))
    main([str(source), str(tmp_path / "exported")])

    output, errors = capsys.readouterr()
    assert names_in(tmp_path / "exported") == {"config.json", "model.safetensors"}
    assert "AutoTokenizer" not in output
    assert errors.count("\n") == 1 and "tokenizer" in errors
    idx = torch.tensor([[5, 95, 0]])
    assert torch.equal(load_model(tmp_path / "exported")(idx)[0], model.eval()(idx)[0])


@pytest.mark.parametrize("error", [RunError("the disk is full"), KeyboardInterrupt()])
def test_an_export_that_fails_can_be_repeated(error, tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "checkpoint.pt", "speedrun")
    folder = tmp_path / "exported"
    rename = os.replace

    def fails_at_the_last_file(old, new):
        if os.path.basename(new) == "config.json":
            raise error
        rename(old, new)

    monkeypatch.setattr(os, "replace", fails_at_the_last_file)
    with pytest.raises(type(error)):
        main([source, str(folder)])
    assert names_in(folder) == set()

    monkeypatch.setattr(os, "replace", rename)
    main([source, str(folder)])
    assert load_model(folder).recipe == "speedrun"


def test_the_file_that_makes_a_folder_a_model_is_written_last(tmp_path, monkeypatch):
    """So what a killed export leaves is not read as a model."""
    written = []
    rename = os.replace

    def remember(old, new):
        written.append(os.path.basename(new))
        rename(old, new)

    monkeypatch.setattr(os, "replace", remember)
    make_model("frontier", n_layer=1, n_embd=6).save_pretrained(tmp_path)

    assert written[-1] == "config.json"
