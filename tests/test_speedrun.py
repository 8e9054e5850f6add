"""speedrun.py, and what frontier.py shares with it: models, optimizers, schedules, a run."""
import math
from types import SimpleNamespace as Config

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, hellaswag_file, logged, train
from peers import make_model, own_checkpoint, plain_modern, save, tokens

import hellaswag
import sample
from recipes import MODELS, load_model
from runtime.cli import UserError
from runtime.shards import write_shard
from runtime.tokenizer import EOT, VOCAB_SIZE, encode
from speedrun import SpeedrunGPT, muon_momentum, trapezoid

MODERN = ["speedrun", "frontier"]
SOFTCAPS = {"speedrun": 30, "frontier": 15}


def trained(recipe, **shape):
    """With random weights as after training: in a new model all branches are zero."""
    return make_model(cls=MODELS[recipe], spread=0.1, **{"n_layer": 3, "n_embd": 32} | shape)


# ----------------------------------------------------------------------- the models

@pytest.mark.parametrize("loss_chunk", [0, 5])
@pytest.mark.parametrize("recipe, n_head", [
    ("speedrun", 2), ("frontier", 1), ("frontier", 2), ("frontier", 3)])
def test_logits_loss_and_gradients_equal_a_plain_reference(recipe, n_head, loss_chunk):
    model = trained(recipe, n_head=n_head, n_embd=12 * n_head, vocab_size=50304)
    model.loss_chunk = loss_chunk
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    idx[0, 4] = EOT
    idx[1, 0] = EOT
    targets[0, :3] = -1

    weights = {}
    for name, p in model.named_parameters():
        weights[name] = p.detach().double().requires_grad_()
    parts = getattr(model, "parts", None)               # frontier's
    expected = plain_modern(weights, n_head, idx, SOFTCAPS[recipe], parts)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
    expected_loss.backward()

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
    model, idx = trained(recipe), tokens(2, 24)
    expected, _ = model(idx)
    dtypes = []
    linear = F.linear

    def remember_dtype(x, weight):
        dtypes.append(x.dtype)
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", remember_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = model(idx)

    assert dtypes == [torch.bfloat16] * (3 * 6 + 1)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("recipe", MODERN)
@torch.no_grad()
def test_in_bfloat16_late_positions_differ_as_in_float32(recipe):
    """bfloat16 has 8 bits: from 256 on it does not tell a position from the next."""
    model = trained(recipe, block_size=1024, n_layer=1, n_head=1)
    idx = tokens(1, 1000)
    exact = model(idx)[0][:, -50:]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(idx)[0][:, -50:]
    error = (rounded - exact).square().mean() / exact.square().mean()
    assert error < 2.5e-4


def test_gpt2s_size_has_162_million_parameters():
    with torch.device("meta"):
        model = SpeedrunGPT(SpeedrunGPT.Config())
    matrices = 2 * 50304 * 768 + 12 * 12 * 768**2
    scalars = 12 * 3
    assert sum(p.numel() for p in model.parameters()) == matrices + scalars


def test_a_new_model_knows_nothing():
    model = SpeedrunGPT(SpeedrunGPT.Config(24, 97, 2, 2, 32))
    _, loss = model(tokens(2, 24), tokens(2, 24))
    assert loss.item() == pytest.approx(math.log(97), abs=1e-5)


@pytest.mark.parametrize("recipe", MODERN)
def test_cached_generation_takes_the_likeliest_tokens_of_whole_forwards(recipe, tmp_path):
    """Beyond block_size, too, where the context slides; of a model that was saved and loaded."""
    model, idx = trained(recipe, n_layer=2, vocab_size=50304), tokens(2, 5)
    idx[0, 1] = EOT
    idx[1, 3] = EOT
    path = save(tmp_path / "checkpoint.pt", own_checkpoint(model) | {"recipe": recipe})

    found = load_model(path).generate(idx, 30, temperature=0)

    expected = idx
    for _ in range(30):
        logits = model(expected[:, -24:])[0][:, -1:, :VOCAB_SIZE]
        expected = torch.cat((expected, logits.argmax(-1)), dim=1)
    assert torch.equal(found, expected)


# ----------------------------------------------------------------------- optimizers

@pytest.mark.parametrize("recipe", MODERN)
def test_every_parameter_is_optimised_once_and_the_matrices_of_blocks_by_muon(recipe):
    model = trained(recipe)
    more = [4096] if recipe == "frontier" else []
    adam, muon = model.configure_optimizers(0.02, 0.0, torch.bfloat16, *more)

    names = {p: name for name, p in model.named_parameters()}
    of_adam = [names[p] for group in adam.param_groups for p in group["params"]]
    of_muon = [names[p] for group in muon.param_groups for p in group["params"]]

    assert sorted(of_adam + of_muon) == sorted(name for name, _ in model.named_parameters())
    for name in of_muon:
        assert ".h." in name
        assert model.get_parameter(name).dim() == 2
    for name in of_adam:
        assert ".h." not in name or model.get_parameter(name).dim() < 2


@pytest.mark.parametrize("recipe, expected", [
    ("speedrun", {
        "transformer.wte.weight": (0.3, 1e-8),
        "lm_head.weight": (0.004, 1e-8),
    }),
    ("frontier", {
        "transformer.wte.weight": (0.004, 0.1 / 4096),
        "transformer.part.weight": (0.004, 0.1 / 4096),
        "transformer.bigram.weight": (0.03, 1e-8),
    }),
])
def test_rates_and_eps_outside_the_blocks(recipe, expected):
    """At half of GPT-2's width the head's rate is twice as high."""
    model = trained(recipe, n_embd=384)
    more = [4096] if recipe == "frontier" else []
    adam, muon = model.configure_optimizers(0.02, 0.0, torch.bfloat16, *more)
    names = {p: name for name, p in model.named_parameters()}
    for group in adam.param_groups:
        for p in group["params"]:
            found = (group["lr"], group["eps"])
            assert found == pytest.approx(expected.get(names[p], (0.02, 1e-8))), names[p]
    assert all(group["lr"] == 0.02 for group in muon.param_groups)


# ----------------------------------------------------------------------- schedules

def test_the_rate_is_constant_and_then_falls_linearly_to_zero():
    config = Config(warmup_steps=0, max_lr=0.02, min_lr=0.0, cooldown=926 / 3242)
    assert trapezoid(0, 0.0, config) == 1.0
    assert trapezoid(2315, 2315 / 3242, config) == 1.0
    assert trapezoid(2779, (2316 + 463) / 3242, config) == pytest.approx(0.5)
    assert trapezoid(3242, 1.0, config) == 0.0
    assert trapezoid(9999, 3.0, config) == 0.0


def test_the_rate_rises_over_the_warmup_and_ends_at_min_lr():
    config = Config(warmup_steps=10, max_lr=1.0, min_lr=0.1, cooldown=0.5)
    assert trapezoid(0, 0.0, config) == pytest.approx(0.1)
    assert trapezoid(9, 0.09, config) == pytest.approx(1.0)
    assert trapezoid(75, 0.75, config) == pytest.approx(0.55)
    assert trapezoid(100, 1.0, config) == pytest.approx(0.1)


@pytest.mark.parametrize("step, momentum", [(0, 0.85), (250, 0.90), (500, 0.95), (3242, 0.95)])
def test_muons_momentum_rises_over_the_first_500_steps_of_record_10(step, momentum):
    assert muon_momentum(step / 3242, Config()) == pytest.approx(momentum, abs=2e-4)


# ----------------------------------------------------------------------- a run

@pytest.fixture(scope="module", params=[("speedrun", "float32"), ("frontier", "bfloat16")], ids=str)
def a_run(request, tmp_path_factory):
    """(recipe, dtype, folder with shards, run and examples) of a run on GPT-2's tokens."""
    recipe, dtype = request.param
    folder = tmp_path_factory.mktemp(recipe)
    text = encode((ROOT / "input.txt").read_text()[:30_000])
    write_shard(folder / "text_val_000000.npy", text[:1000])
    write_shard(folder / "text_train_000001.npy", text[1000:])
    train("--recipe", recipe, "--data", folder, "--out", folder / "log", "--dtype", dtype,
          "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32,
          "--total_batch_size", 512, "--max_steps", 9, "--val_every", 9, "--val_tokens", 900,
          "--sample_every", 9, "--checkpoint_every", 9, "--hellaswag_every", 9,
          "--hellaswag_data", hellaswag_file(folder / "examples.jsonl"))
    return recipe, dtype, folder


def test_a_run_learns(a_run):
    _, _, folder = a_run
    val = logged(folder / "log", "val")
    assert val[0] == pytest.approx(math.log(50304), abs=0.6)
    assert val[9] < val[0] - 1


def test_hellaswag_of_its_checkpoint_is_that_of_the_run(a_run, capsys):
    _, dtype, folder = a_run
    examples = str(folder / "examples.jsonl")
    hellaswag.main(["--model", str(folder / "log"), "--data", examples, "--dtype", dtype])
    correct = round(12 * logged(folder / "log", "hella")[9])
    assert f"acc_norm: {correct}/12=" in capsys.readouterr().out


def test_its_checkpoint_is_sampled_from(a_run, capsys):
    _, _, folder = a_run
    sample.main(["--model", str(folder / "log"), "--prompt", "Now say", "--max_new_tokens", "4"])
    assert "Now say" in capsys.readouterr().out


def test_it_is_not_continued_with_another_recipe(a_run):
    recipe, _, folder = a_run
    with pytest.raises(UserError, match=f"--recipe {recipe}"):
        train("--recipe", "gpt2", "--data", folder, "--out", folder / "log")
