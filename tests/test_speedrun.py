"""speedrun.py, and what frontier.py shares with it: models, optimizers, schedules, a run."""
import math
from types import SimpleNamespace as Config

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, hellaswag_file, logged, train
from peers import (
    double_precision,
    make_model,
    own_checkpoint,
    plain_modern,
    relative_error,
    save,
    tokens,
)

import hellaswag
import sample
from recipes import RECIPES, load_model
from runtime.language_model import sample_token
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode
from speedrun import SpeedrunGPT, rotary_tables, trapezoid, warmup_and_cooldown

MODERN = ["speedrun", "frontier"]
SOFTCAP = 30


def trained(recipe, **shape):
    """With random weights as after training: in a new model all branches are zero."""
    shape = {"n_layer": 3, "n_embd": 32} | shape
    model = make_model(cls=RECIPES[recipe].model, spread=0.1, **shape)
    if recipe == "frontier":
        model.pointer.sentinel_bias.data.fill_(6.0)     # so that copies have a share
    return model


# ----------------------------------------------------------------------- the models

@pytest.mark.parametrize("recipe, n_head, chunk", [
    ("speedrun", 2, 0), ("speedrun", 2, 5), ("frontier", 1, 5), ("frontier", 2, 0),
    ("frontier", 3, 5)])
def test_logits_loss_and_gradients_equal_a_plain_reference(recipe, n_head, chunk):
    is_frontier = recipe == "frontier"
    vocab_size = 50304 if is_frontier else 96
    model = trained(recipe, n_head=n_head, n_embd=12 * n_head, vocab_size=vocab_size)
    if chunk:
        assert model.use_chunks(chunk)
    idx = tokens(2, 9)
    if is_frontier:                                     # to which a document's end is special
        idx[0, 4] = EOT
        idx[1, 0] = EOT
    targets = tokens(2, 9, seed=2)
    targets[0, :3] = -1

    weights = double_precision(model)
    parts = getattr(model, "parts", None)               # frontier's
    of_head, expected = plain_modern(weights, n_head, idx, SOFTCAP, parts)
    loss_of_head, expected_loss = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        for logits in (of_head, expected))
    expected_loss.backward()
    if is_frontier:
        loss_of_head.backward()                         # which learns as if there were no copies

    logits, _ = model(idx)
    _, loss = model(idx, targets)
    loss.backward()

    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=2e-4)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    for name, p in model.named_parameters():
        gradient = weights[name].grad
        assert (p.grad.double() - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("recipe", MODERN)
def test_under_autocast_all_products_are_in_bfloat16(recipe, monkeypatch):
    model = trained(recipe)
    idx = tokens(2, 24)
    expected, _ = model(idx)
    dtypes = []
    linear = F.linear

    def remember_dtype(x, *weights):
        dtypes.append(x.dtype)
        return linear(x, *weights)

    monkeypatch.setattr(F, "linear", remember_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = model(idx)

    products = 3 * 6 + 1
    if recipe == "frontier":
        products += 3                                   # the pointer's
    assert dtypes == [torch.bfloat16] * products
    assert 0 < relative_error(found, expected) < 0.05
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_rotary_tables_in_bfloat16_tell_late_positions_apart():
    """bfloat16 has 8 bits: from 256 on it does not tell a position from the next."""
    exact = rotary_tables(1000, 1000, 32, torch.float32, "cpu")
    rounded = rotary_tables(1000, 1000, 32, torch.bfloat16, "cpu")
    for table, expected in zip(rounded, exact, strict=True):
        assert table.dtype == torch.bfloat16
        torch.testing.assert_close(table.float(), expected, rtol=0, atol=0.005)


@pytest.mark.parametrize("recipe", MODERN)
@torch.no_grad()
def test_in_bfloat16_a_small_embedding_is_normed_as_in_float32(recipe):
    """Its mean square is some 1e-6: with the 2^-7 of bfloat16 as eps little would be left of it."""
    model = trained(recipe)
    factor = 1e-3 / model.transformer.wte.weight.std()
    for name in ("wte", "part"):
        if name in model.transformer:
            model.transformer[name].weight *= factor
    idx = tokens(2, 24)

    expected, _ = model(idx)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = model(idx)

    assert relative_error(found, expected) < 0.03


def test_a_new_model_knows_nothing():
    model = SpeedrunGPT(SpeedrunGPT.Config(24, 97, 2, 2, 32))
    _, loss = model(tokens(2, 24), tokens(2, 24))
    assert loss.item() == pytest.approx(math.log(97), abs=1e-5)


@pytest.mark.parametrize("recipe", MODERN)
def test_cached_generation_samples_the_tokens_of_whole_forwards(recipe, tmp_path):
    """Beyond block_size, too, where the context slides; of a model that was saved and loaded."""
    model = trained(recipe, n_layer=2, vocab_size=50304)
    idx = tokens(2, 5)
    idx[0, 1] = EOT
    idx[1, 3] = EOT
    path = save(tmp_path / "checkpoint.pt", own_checkpoint(model) | {"recipe": recipe})

    generator = torch.Generator().manual_seed(0)
    found = load_model(path).generate(idx, 23, temperature=3, generator=generator)

    generator.manual_seed(0)
    expected = idx
    for _ in range(23):
        logits = model(expected[:, -24:])[0][:, -1].detach()
        new = sample_token(logits, 3, 50, generator)
        expected = torch.cat((expected, new), dim=1)
    assert torch.equal(found, expected)
    assert len(found[:, 5:].unique()) > 7


# ----------------------------------------------------------------------- optimizers

def optimizers_of(recipe, model):
    """(Adam, Muon). frontier's eps depends on the tokens of a step."""
    if recipe == "frontier":
        return model.configure_optimizers(0.02, 0.0, torch.bfloat16, 4096)
    return model.configure_optimizers(0.02, 0.0, torch.bfloat16)


def names_in(optimizer, model):
    """The names of the model's parameters in an optimizer."""
    names = {p: name for name, p in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        found += [names[p] for p in group["params"]]
    return found


@pytest.mark.parametrize("recipe", MODERN)
def test_every_parameter_is_optimised_once_and_the_matrices_inside_by_muon(recipe):
    model = trained(recipe)
    adam, muon = optimizers_of(recipe, model)
    of_adam = names_in(adam, model)
    of_muon = names_in(muon, model)

    assert all(group["fused"] for group in adam.param_groups)
    assert sorted(of_adam + of_muon) == sorted(name for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        is_matrix_inside = name.startswith(("transformer.h.", "pointer.")) and p.dim() == 2
        assert (name in of_muon) == is_matrix_inside, name


@pytest.mark.parametrize("recipe, expected", [
    ("speedrun", {
        "transformer.wte.weight": (0.3, 1e-8),
        "lm_head.weight": (0.004, 1e-8),
    }),
    ("frontier", {
        "transformer.wte.weight": (0.002, 0.1 / 4096),
        "transformer.part.weight": (0.002, 0.1 / 4096),
    }),
])
def test_rates_and_eps_outside_the_blocks(recipe, expected):
    """At half of GPT-2's width the head's rate is twice as high."""
    model = trained(recipe, n_embd=384)
    adam, muon = optimizers_of(recipe, model)

    names = {p: name for name, p in model.named_parameters()}
    for group in adam.param_groups:
        found = (group["lr"], group["eps"])
        for p in group["params"]:
            name = names[p]
            assert found == pytest.approx(expected.get(name, (0.02, 1e-6))), name
    for group in muon.param_groups:
        assert group["lr"] == 0.02


# ----------------------------------------------------------------------- schedules

def test_the_rate_is_constant_and_then_falls_linearly_to_zero():
    config = Config(
        max_steps=3242, warmup_steps=0, max_lr=0.02, min_lr=0.0, cooldown=926 / 3242)
    assert trapezoid(0, config) == 1.0
    assert trapezoid(2315, config) == 1.0
    assert trapezoid(2316 + 463, config) == pytest.approx(0.5)
    assert trapezoid(3242, config) == 0.0
    assert trapezoid(9999, config) == 0.0


def test_the_rate_rises_over_the_warmup_and_ends_at_min_lr():
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1, cooldown=0.5)
    assert trapezoid(0, config) == pytest.approx(0.1)
    assert trapezoid(9, config) == pytest.approx(1.0)
    assert trapezoid(75, config) == pytest.approx(0.55)
    assert trapezoid(100, config) == pytest.approx(0.1)


def test_of_a_warmup_and_a_cooldown_at_once_the_lower_rate_counts():
    config = Config(max_steps=100, warmup_steps=80, max_lr=1.0, min_lr=0.0, cooldown=0.8)
    assert trapezoid(39, config) == pytest.approx(0.5)
    assert trapezoid(60, config) == pytest.approx(0.5)


def test_the_rate_falls_by_the_share_of_the_tokens():
    config = Config(max_steps=100, warmup_steps=0, max_lr=1.0, min_lr=0.0, cooldown=1.0)
    assert warmup_and_cooldown(50, 0.25, config) == pytest.approx(0.75)


# ----------------------------------------------------------------------- a run

@pytest.fixture(scope="module", params=[("speedrun", "float32"), ("frontier", "bfloat16")], ids=str)
def a_run(request, tmp_path_factory):
    """(dtype, OUT, its examples of HellaSwag) of a run on GPT-2's tokens."""
    recipe, dtype = request.param
    folder = tmp_path_factory.mktemp(recipe)
    text = encode((ROOT / "input.txt").read_text()[:15_000])
    write_shard(folder / "text_val_000000.npy", text[:400])
    write_shard(folder / "text_train_000001.npy", text[400:])
    examples = hellaswag_file(folder / "examples.jsonl", 6)
    out = folder / "log"
    train("--recipe", recipe, "--data", folder, "--out", out, "--dtype", dtype,
          "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32,
          "--total_batch_size", 256, "--max_steps", 8, "--val_every", 8, "--val_tokens", 300,
          "--sample_every", 0, "--checkpoint_every", 8, "--hellaswag_every", 8,
          "--hellaswag_data", examples)
    return dtype, out, examples


def test_a_run_learns(a_run):
    _, out, _ = a_run
    val = logged(out, "val")
    assert val[0] == pytest.approx(math.log(50304), abs=0.6)
    assert val[8] < val[0] - 1


def test_hellaswag_of_its_checkpoint_is_that_of_the_run(a_run, capsys):
    dtype, out, examples = a_run
    hellaswag.main(["--model", str(out), "--data", str(examples), "--dtype", dtype])
    correct = round(6 * logged(out, "hella")[8])
    assert f"acc_norm: {correct}/6=" in capsys.readouterr().out


def test_its_checkpoint_is_sampled_from(a_run, capsys):
    _, out, _ = a_run
    sample.main(["--model", str(out), "--prompt", "Now say", "--max_new_tokens", "4"])
    assert "Now say" in capsys.readouterr().out
