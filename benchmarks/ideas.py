"""The recipes without one of their ideas each, for `bench.py recipes --ideas`.

An idea of a recipe is a function, an attribute of a class, a parameter or a setting. Each has a
function that puts something else in its place, in the loaded modules: `put(owner, name, value)` is
setattr, or a test's monkeypatch. So this file depends on names, not on the text of the code.
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

SPEEDRUN, FRONTIER = RECIPES["speedrun"], RECIPES["frontier"]


# ---------------------------------------------------------------------- ways to change something

def change_model(put, recipe, change):
    """`change(model)` is called with each fresh model, before there are optimizers for it."""
    make = recipe.make_optimizers

    def optimizers(model, config):
        change(model)
        return make(model, config)
    put(recipe, "make_optimizers", optimizers)


def change_group(put, recipe, name, change):
    """`change(group, config)` is called with Adam's group that has the parameter `name`."""
    make = recipe.make_optimizers

    def optimizers(model, config):
        adam, muon = make(model, config)
        for group in adam.param_groups:
            if name in group["param_names"]:
                change(group, config)
        return [adam, muon]
    put(recipe, "make_optimizers", optimizers)


@torch.no_grad()
def hold(model, name, trained):
    """Parameters whose name ends so stay zero, but for the elements whose `trained` is 1."""
    for full_name, p in model.named_parameters():
        if full_name.endswith(name):
            trained_here = torch.tensor(trained, device=p.device)
            p.mul_(trained_here)
            p.register_hook(lambda gradient, factor=trained_here: gradient * factor)


# ---------------------------------------------------------------------- speedrun

def no_rotary(put):
    put(speedrun, "rotate", lambda x, cos, sin: x)


def no_qk_norm(put):
    put(speedrun, "qk_norm", lambda x: x)


def no_value_residual(put):
    change_model(put, SPEEDRUN, lambda model: hold(model, "lamb", 0.0))


def no_shortcut(put):
    change_model(put, SPEEDRUN, lambda model: hold(model, "lambdas", [1.0, 0.0]))


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
    def change(group, config):
        group["lr"] = 0.1 * config.max_lr
    change_group(put, SPEEDRUN, "lm_head.weight", change)


# ---------------------------------------------------------------------- frontier

def constant_batch(put):
    put(FRONTIER, "batch_divisors", lambda config: (1, 1, 1))


def no_shifted_keys(put):
    put(frontier, "shift_keys", lambda k, starts: k)
    keys_start_anywhere(put)


def keys_start_anywhere(put):
    put(FrontierGPT, "init_weights", ModernLanguageModel.init_weights)


def untied_head(put):
    def untie(model):
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.transformer.wte.weight))
        model.head = lambda: model.lm_head.weight
        model.named = lambda *names: untied_names(model, names)

    def untied_names(model, names):
        if "transformer.wte.weight" in names:
            names = *names, "lm_head.weight"
        return FrontierGPT.named(model, *names)
    change_model(put, FRONTIER, untie)


def usual_eps(put):
    change_group(put, FRONTIER, "transformer.wte.weight",
                 lambda group, config: group.update(eps=1e-8))


def no_stems(put):
    stem_and_form = frontier.stem_and_form
    put(frontier, "stem_and_form", lambda text: ("the same of all", stem_and_form(text)[1]))


def no_forms(put):
    stem_and_form = frontier.stem_and_form
    put(frontier, "stem_and_form", lambda text: (stem_and_form(text)[0], ()))


def no_bigram_table(put):
    change_model(put, FRONTIER, lambda model: hold(model, "bigram.weight", 0.0))


def speedruns_bigram_rate(put):
    def change(group, config):
        group["lr"] = 15 * config.max_lr
    change_group(put, FRONTIER, "transformer.bigram.weight", change)


def speedruns_beta1(put):
    for name in ("transformer.wte.weight", "transformer.bigram.weight", "transformer.h.0.lambdas"):
        change_group(put, FRONTIER, name, lambda group, config: group.update(betas=(0.9, 0.95)))


def speedruns_momentum(put):
    put(FRONTIER, "momentum", speedrun.muon_momentum)


def speedruns_softcap(put):
    put(FrontierGPT, "softcap", 30.0)


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
        "batch that grows (constant instead)": constant_batch,
        "shifted keys": no_shifted_keys,
        "start of the shifted keys as the queries": keys_start_anywhere,
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
