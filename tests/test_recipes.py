"""The numbers of each recipe, as literals: defaults, presets, sizes, new weights, rates."""
import math
from dataclasses import asdict

import pytest
import torch
from helpers import parse_flags, refused
from peers import RECIPES

from config import FLAGS, Config
from presets import GPT2_SIZES, PRESETS
from recipes import fresh_model
from runtime.checkpoint import Start
from runtime.cli import UserError
from runtime.ranks import Process
from runtime.recipe import make_batch_schedule

# ----------------------------------------------------------------------- defaults and presets

MODERN = {"n_head": 6, "warmup_steps": 0, "max_lr": 0.02, "weight_decay": 0.0,
          "grad_clip": math.inf}
SPEEDRUN = MODERN | {"recipe": "speedrun", "max_steps": 3242, "min_lr": 0.0}
FRONTIER = MODERN | {"recipe": "frontier", "max_steps": 5833}


@pytest.mark.parametrize("flags, expected", [
    ("", {}),
    ("--recipe gpt2", {}),
    ("--recipe speedrun", SPEEDRUN),
    ("--recipe frontier", FRONTIER),
    ("--preset shakespeare", FRONTIER | PRESETS["shakespeare"].flags),
    ("--preset small", PRESETS["small"].flags),
    ("--preset gpt2", {}),
    ("--preset gpt2-xl", PRESETS["gpt2-xl"].flags),
    ("--preset finetune", PRESETS["finetune"].flags),
])
def test_what_a_recipe_and_a_preset_set(flags, expected):
    config, _ = parse_flags(flags.split())
    assert asdict(config) == asdict(Config(preset=config.preset)) | expected


@pytest.mark.parametrize("name, max_lr", [
    ("gpt2", 6e-4), ("gpt2-medium", 3e-4), ("gpt2-large", 2.5e-4), ("gpt2-xl", 2e-4)])
def test_each_size_of_gpt2_has_gpt3s_rate_and_its_10_billion_tokens(name, max_lr):
    config, _ = parse_flags(["--preset", name])
    assert {key: getattr(config, key) for key in GPT2_SIZES[name]} == GPT2_SIZES[name]
    assert config.max_lr == max_lr
    assert config.total_batch_size * config.max_steps == pytest.approx(10e9, rel=1e-3)
    assert config.total_batch_size * config.warmup_steps == pytest.approx(375e6, rel=2e-3)


def test_a_presets_rates_are_for_adamw_and_other_recipes_keep_their_own():
    config, _ = parse_flags(["--preset", "small", "--recipe", "speedrun"])
    assert config.max_lr == 0.02
    assert config.warmup_steps == 0
    assert config.n_head == 6
    assert config.max_steps == 2000


def test_a_preset_that_has_a_recipe_is_refused_with_another_one():
    line = "--preset shakespeare --recipe"
    refused(lambda: parse_flags(f"{line} gpt2".split()), *line.split(), "gpt2", "frontier")
    parse_flags(f"{line} frontier".split())


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"shakespeare"}))
def test_a_presets_validations_come_with_checkpoints(preset):
    """Others would save the best weights once more, between the checkpoints.

    Those of shakespeare do, which takes a second each.
    """
    config = config_of(f"--preset {preset}")
    assert config.val_every % config.checkpoint_every == 0


@pytest.mark.parametrize("flags, max_steps", [
    ("--n_embd 128 --n_head 2", 300), ("--n_embd 1600 --n_head 25", 50),
    ("--n_embd 128 --n_head 2 --max_steps 20", 20)])
def test_overfit_has_as_many_times_more_steps_as_the_model_is_narrower(flags, max_steps):
    assert config_of(f"--overfit {flags}").max_steps == max_steps


@pytest.mark.parametrize("flags, max_lr", [
    ("", 3e-4), ("--max_lr 0.01", 0.01), ("--recipe speedrun", 0.02), ("--recipe frontier", 0.02)])
def test_overfit_is_50_steps_on_one_batch_at_a_constant_rate(flags, max_lr):
    config = config_of(f"--overfit {flags}")
    assert config.max_steps == 50
    assert config.total_batch_size == 4 * 32
    assert config.sequence_length == 32
    assert config.vocab_size == 50257
    assert config.shuffle is False
    assert config.warmup_steps == 0
    assert config.max_lr == config.min_lr == max_lr
    assert config.out == ""
    for name in ("val_every", "hellaswag_every", "sample_every", "checkpoint_every"):
        assert getattr(config, name) == 0, name


# ----------------------------------------------------------------------- sizes and new weights

@pytest.mark.parametrize("recipe, T, parameters, flops", [
    ("gpt2", 1024, 124_475_904, 855_383_040),
    ("gpt2", 256, 124_475_904, 770_448_384),
    ("speedrun", 1024, 162_201_636, 854_655_192),
    ("speedrun", 256, 162_201_636, 769_720_536),
    ("frontier", 1024, 143_516_966, 869_995_236),
    ("frontier", 256, 143_516_966, 781_521_636),
])
def test_parameters_and_flops_a_token_at_gpt2s_size(recipe, T, parameters, flops):
    """6 for each weight that a token is multiplied by, 12 for each layer, channel and token. And in
    frontier 6 for each channel and token: the scores of the pointer."""
    with torch.device("meta"):
        cls = RECIPES[recipe].model
        model = cls(cls.Config(vocab_size=50304))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.flops_per_token(T) == flops


# {end of a name: standard deviation} at width 768, in two layers
NORMAL = {
    "gpt2": {
        "wte.weight": 0.02,
        "wpe.weight": 0.02,
        "c_attn.weight": 0.02,
        "c_fc.weight": 0.02,
        "c_proj.weight": 0.01,
    },
    "speedrun": {"wte.weight": 1.0},
    "frontier": {"wte.weight": 2.5 / 768},
}

# {end of a name: bound of a uniform distribution}
UNIFORM = {
    "c_q.weight": 768**-0.5,
    "c_k.weight": 768**-0.5,
    "c_v.weight": 768**-0.5,
    "c_fc.weight": 768**-0.5,
}

# {end of a name: its value}
CONSTANT = {
    "gpt2": {".bias": 0.0, "ln_1.weight": 1.0, "ln_2.weight": 1.0, "ln_f.weight": 1.0},
    "speedrun": {"c_proj.weight": 0.0, "lm_head.weight": 0.0, "lamb": 0.5},
    "frontier": {
        "c_proj.weight": 0.0, "part.weight": 0.0, "lamb": 0.5, "c_e.weight": 0.0,
        "scale": 11.0, "sentinel": 0.0, "sentinel_bias": 13.0,
    },
}


def value_for(name, table):
    for end, value in table.items():
        if name.endswith(end):
            return value
    return None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_new_weight_has_this_distribution(recipe):
    torch.manual_seed(1)
    cls = RECIPES[recipe].model
    model = cls(cls.Config(256, 1024, n_layer=2, n_embd=768))
    recipe = model.recipe               # another recipe may train the same model

    for name, p in model.named_parameters():
        constant = value_for(name, CONSTANT[recipe])
        deviation = value_for(name, NORMAL[recipe])
        bound = value_for(name, UNIFORM)
        if name.endswith("lambdas"):
            assert p.tolist() == [1.0, 0.0]
        elif name in ("pointer.c_q.weight", "pointer.c_k.weight"):
            assert torch.equal(p, torch.eye(768)), name
        elif constant is not None:
            assert (p == constant).all(), name
        elif deviation is not None:
            assert p.std().item() == pytest.approx(deviation, rel=0.04), name
            assert p.abs().max() > 3.3 * deviation, name
        else:
            assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.04), name
            assert p.abs().max() <= bound * (1 + 1e-5), name


@pytest.mark.parametrize("recipe, n_embd, n_head, why", [
    ("gpt2", 100, 7, "n_embd 100 must be divisible by n_head 7"),
    ("speedrun", 9, 3, "n_embd 9 / n_head 3 = 3 must be even"),
    ("frontier", 9, 3, "n_embd 9 / n_head 3 = 3 must be even"),
])
def test_heads_that_do_not_fit_the_width_are_refused(recipe, n_embd, n_head, why):
    with pytest.raises(UserError, match=f"{why}.*: choose another --n_embd or --n_head"):
        fresh_model(Config(recipe=recipe, n_embd=n_embd, n_head=n_head))


def test_gpt2s_projections_are_smaller_in_a_deeper_model():
    model = fresh_model(Config(n_layer=12, n_head=2, n_embd=64, vocab_size=256))
    for block in model.transformer.h:
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(24), rel=0.04)


# ----------------------------------------------------------------------- schedules

def config_of(flags):
    """The flags of a run, with what "auto" means in the recipe."""
    _, config = FLAGS.resolve(FLAGS.parse("", flags.split()), Start(), Process())
    return config


@pytest.mark.parametrize("flags, step, rate, momentum", [
    ("--recipe gpt2", 0, 8.3916084e-7, None),
    ("--recipe gpt2", 714, 6e-4, None),
    ("--recipe gpt2", 9894, 3.3e-4, None),
    ("--recipe gpt2", 19_072, 6e-5, None),
    ("--recipe speedrun", 0, 0.02, 0.85),
    ("--recipe speedrun", 250, 0.02, 0.9000733),
    ("--recipe speedrun", 2779, 0.01000092, 0.95),
    ("--recipe speedrun", 3241, 2.1600254e-5, 0.95),
    ("--recipe frontier", 768, 0.02, 0.8748127),
    ("--recipe frontier", 1540, 0.02, 0.95),
    ("--recipe frontier", 4999, 0.012003, 0.95),
    ("--recipe frontier", 5708, 0.00350015, 0.900005),
    ("--recipe frontier", 5832, 0.002012001, 0.85040004),
    ("--preset shakespeare", 22, 0.02, 0.8239693),
    ("--preset shakespeare", 138, 0.02, 0.85),
    ("--preset shakespeare", 200, 0.01375307, 0.85),
    ("--preset shakespeare", 297, 0.001443323, 0.85),
])
def test_rate_and_momentum_of_a_step_of_a_run_without_other_flags(flags, step, rate, momentum):
    config = config_of(flags)
    recipe = RECIPES[config.recipe]

    scale = recipe.lr_scale(step, config)

    assert config.max_lr * scale == pytest.approx(rate, rel=1e-5)
    if momentum is not None:
        assert recipe.momentum(step, config) == pytest.approx(momentum, rel=1e-5)


@pytest.mark.parametrize("flags, first_steps", [
    ("--recipe frontier", [(0, 131_072), (3333, 262_144), (5000, 524_288)]),
    ("--preset shakespeare --max_steps 200", [(0, 1024), (100, 2048)]),
])
def test_frontiers_batch_grows_at_these_steps(flags, first_steps):
    config = config_of(flags)
    schedule = make_batch_schedule(RECIPES["frontier"], config, 1)
    for step, tokens in first_steps:
        assert schedule.tokens(step) == tokens
        if step > 0:
            assert schedule.tokens(step - 1) == tokens // 2


# ----------------------------------------------------------------------- optimizers

def optimizers_of(recipe, **more):
    """Model and optimizers as a run without other flags makes them, in a small size."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 256}
    config = config_of(f"--recipe {recipe}")
    for name, value in (shape | more).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = fresh_model(config)
    return model, RECIPES[recipe].make_optimizers(model, config)


def test_gpt2_is_trained_with_adamw():
    _, [adamw] = optimizers_of("gpt2")
    for group in adamw.param_groups:
        assert group["lr"] == 6e-4
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        assert group["weight_decay"] in (0.1, 0.0)


@pytest.mark.parametrize("recipe, beta1", [("speedrun", 0.9), ("frontier", 0.7)])
def test_modern_recipes_are_trained_with_adam_and_muon_without_weight_decay(recipe, beta1):
    _, [adam, muon] = optimizers_of(recipe)
    for group in adam.param_groups:
        assert group["betas"] == (beta1, 0.95)
        assert group["weight_decay"] == 0.0
    for group in muon.param_groups:
        assert group["lr"] == 0.02
        assert group["weight_decay"] == 0.0


@pytest.mark.parametrize("dtype, is_exact", [
    ("bfloat16", True), ("float16", False), ("float32", False)])
def test_muon_iterates_in_bfloat16_where_the_products_are(dtype, is_exact):
    """A projection begins at zero: after a step it is the update itself, times the rate."""
    model, [_, muon] = optimizers_of("frontier", dtype=dtype)
    projection = model.transformer.h[0].mlp.c_proj.weight
    for p in model.parameters():
        p.grad = torch.randn_like(p)

    muon.step()

    update = projection.detach() / -0.02
    share_of_bfloat16 = ((update - update.bfloat16()).abs() <= 1e-6 * update.abs()).float().mean()
    assert (share_of_bfloat16 == 1) == is_exact
