"""The recipes without one of their ideas each, for `bench.py recipes --ideas`.

An idea of a recipe is a function, an attribute of a class, a parameter or a setting. Here is a
function for each idea that puts something else in its place, in the modules that are loaded. It is
given `put(owner, name, value)`: setattr, or the setattr of a test's monkeypatch. So this file
depends on names in the recipes, and not on the text of their code.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import frontier
import speedrun
from frontier import FrontierGPT
from speedrun import ModernLanguageModel, SpeedrunGPT, SpeedrunMLP
from train_gpt2 import RECIPES

SPEEDRUN = RECIPES["speedrun"]
FRONTIER = RECIPES["frontier"]


# ---------------------------------------------------------------------- what several of them need

def change_model(put, recipe, change):
    """Has `change(model)` called with each new model, before its optimizers are made."""
    make = recipe.make_optimizers

    def changed_optimizers(model, config):
        change(model)
        return make(model, config)

    put(recipe, "make_optimizers", changed_optimizers)


def change_group(put, recipe, name, change):
    """Has `change(group, config)` called with that group of Adam's which has the parameter."""
    make = recipe.make_optimizers

    def changed_optimizers(model, config):
        adam, muon = make(model, config)
        for group in adam.param_groups:
            if name in group["param_names"]:
                change(group, config)
        return [adam, muon]

    put(recipe, "make_optimizers", changed_optimizers)


@torch.no_grad()
def keep_zero(model, name_ends, learns=0.0):
    """Parameters whose name ends so stay zero, but for elements of which `learns` is 1."""
    for name, p in model.named_parameters():
        if name.endswith(name_ends):
            factor = torch.tensor(learns, device=p.device)
            p.mul_(factor)
            p.register_hook(lambda gradient, factor=factor: gradient * factor)


# ---------------------------------------------------------------------- speedrun

def no_rotary(put):
    put(speedrun, "rotate", lambda x, cos, sin: x)


def no_qk_norm(put):
    put(speedrun, "qk_norm", lambda x: x)


def no_value_residual(put):
    change_model(put, SPEEDRUN, lambda model: keep_zero(model, "lamb"))


def no_shortcut(put):
    # lambdas[0], the factor of the residual stream, still learns.
    change_model(put, SPEEDRUN, lambda model: keep_zero(model, "lambdas", learns=[1.0, 0.0]))


def gelu(put):
    put(SpeedrunMLP, "forward", lambda self, x: self.c_proj(F.gelu(self.c_fc(x))))


def random_start(put):
    @torch.no_grad()
    def draw(model):
        for name, p in model.named_parameters():
            if name.endswith(model.zero_at_start):
                p.normal_(0.0, 0.02)

    change_model(put, SPEEDRUN, draw)


def no_norm_of_embedding(put):
    def embed(self, tokens, T, dtype):
        return self.transformer.wte(tokens[:, -T:]).to(dtype)

    put(SpeedrunGPT, "embed", embed)


def no_softcap(put):
    put(SpeedrunGPT, "softcap", 0.0)


def adam_instead_of_muon(put):
    def adam(params, lr, **others):
        return torch.optim.Adam(params, 0.1 * lr, betas=(0.9, 0.95), fused=True)

    put(speedrun, "Muon", adam)


def constant_momentum(put):
    put(SPEEDRUN, "momentum", lambda progress, config: 0.95)


def cosine(put):
    def scale(step, progress, config):
        min_scale = config.min_lr / config.max_lr
        return min_scale + (1.0 - min_scale) * 0.5 * (1.0 + math.cos(math.pi * progress))

    put(SPEEDRUN, "lr_scale", scale)


def one_rate_at_all_widths(put):
    # Without the factor 768 / n_embd.
    def change(group, config):
        group["lr"] = 0.1 * config.max_lr

    change_group(put, SPEEDRUN, "lm_head.weight", change)


# ---------------------------------------------------------------------- frontier

def constant_batch(put):
    put(FRONTIER, "batch_divisors", lambda config: (1, 1, 1))


def no_shifted_keys(put):
    # Without them their start makes no sense either.
    put(frontier, "shift_keys", lambda k, starts: k)
    ordinary_start(put)


def ordinary_start(put):
    put(FrontierGPT, "init_weights", ModernLanguageModel.init_weights)


def untied_head(put):
    # The new head is speedrun's: it starts at zero, and has no rows for stems and forms. It is in
    # the embedding's group of Adam's.
    def untie(model):
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.transformer.wte.weight))
        model.head = lambda: model.lm_head.weight
        model.named = lambda *names: named_with_head(model, names)

    def named_with_head(model, names):
        if "transformer.wte.weight" in names:
            names = (*names, "lm_head.weight")
        return FrontierGPT.named(model, *names)

    change_model(put, FRONTIER, untie)


def usual_eps(put):
    def change(group, config):
        group["eps"] = 1e-8

    change_group(put, FRONTIER, "transformer.wte.weight", change)


def no_stems(put):
    # All tokens share one row instead.
    original = frontier.stem_and_form

    def same_stem(text):
        stem, form = original(text)
        return "the same of all", form

    put(frontier, "stem_and_form", same_stem)


def no_forms(put):
    original = frontier.stem_and_form

    def same_form(text):
        stem, form = original(text)
        return stem, ()

    put(frontier, "stem_and_form", same_form)


def no_bigram_table(put):
    change_model(put, FRONTIER, lambda model: keep_zero(model, "bigram.weight"))


def speedruns_bigram_rate(put):
    def change(group, config):
        group["lr"] = 15 * config.max_lr

    change_group(put, FRONTIER, "transformer.bigram.weight", change)


def speedruns_beta1(put):
    def change(group, config):
        group["betas"] = (0.9, 0.95)

    # One parameter of each of Adam's three groups.
    for name in ("transformer.wte.weight", "transformer.bigram.weight", "transformer.h.0.lambdas"):
        change_group(put, FRONTIER, name, change)


def speedruns_momentum(put):
    put(FRONTIER, "momentum", speedrun.muon_momentum)


def speedruns_softcap(put):
    put(FrontierGPT, "softcap", 30.0)


# Without this idea the same steps would have more tokens; ablation.py gives the run fewer steps.
CONSTANT_BATCH = "batch that grows (constant instead)"

# {recipe: {what the table calls an idea: the function that leaves it out}}
ABLATIONS = {
    "speedrun": {
        "rotary positions (none instead)": no_rotary,
        "QK-norm": no_qk_norm,
        "value residual": no_value_residual,
        "embedding shortcut x0": no_shortcut,
        "ReLU squared (GELU instead)": gelu,
        "projections and head start at zero (normal, 0.02)": random_start,
        "norm after the embedding": no_norm_of_embedding,
        "softcap": no_softcap,
        "Muon (Adam at a tenth of its rate)": adam_instead_of_muon,
        "momentum warm-up": constant_momentum,
        "constant rate, then linear (cosine instead)": cosine,
        "head's rate by width (0.002 instead)": one_rate_at_all_widths,
    },
    "frontier": {
        CONSTANT_BATCH: constant_batch,
        "shifted keys": no_shifted_keys,
        "start of the shifted keys as the queries": ordinary_start,
        "head tied to the embedding": untied_head,
        "eps of the embedding (1e-8 instead)": usual_eps,
        "rows for stems": no_stems,
        "rows for forms": no_forms,
        "bigram table": no_bigram_table,
        "bigram table's rate (ten times as high instead)": speedruns_bigram_rate,
        "Adam's beta1 of 0.7 (speedrun's 0.9 instead)": speedruns_beta1,
        "Muon's momentum of 0.80 to 0.85 (speedrun's 0.85 to 0.95 instead)": speedruns_momentum,
        "softcap of 15 (speedrun's 30 instead)": speedruns_softcap,
    },
}
