"""The numbers of each recipe, as literals: flags, presets, sizes, initial weights, optimizers, schedules.
They are those of a run that gives no flags, at GPT-2's size, seen from outside: metrics.csv, and the
optimizers through torch's own hook."""
import contextlib
import dataclasses
import math
import os
import signal
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from helpers import logged, parse_flags, train
from model import GPT2_SIZES
from recipes import MODELS
from runtime.files import checkpoints
from runtime.shards import write_shard
from test_guards import QUIET, TINY, column

# ----------------------------------------------------------------------------- flags and presets

FLAGS = {                   # gpt2's, which --preset and --recipe change
    "preset": "gpt2", "dry_run": False, "data": "edu_fineweb10B", "overfit": False, "shuffle": True,
    "val_tokens": 10_485_760, "hellaswag_data": "", "recipe": "gpt2", "init": "scratch", "n_layer": 12,
    "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304,
    "total_batch_size": 524_288, "batch_size": "auto", "sequence_length": "auto",
    "max_steps": 19_073, "warmup_steps": 715, "max_lr": 6e-4, "min_lr": "auto", "cooldown": "auto",
    "weight_decay": 0.1, "grad_clip": 1.0, "seed": 1337, "device": "auto", "dtype": "auto", "tf32": True,
    "compile": "auto", "attention": "auto", "recompute": False, "shard_optimizer": False, "val_every": 250,
    "hellaswag_every": 250, "sample_every": 250, "sample_prompt": "Hello, I'm a language model,",
    "checkpoint_every": 250, "keep_checkpoints": 3, "out": "log", "resume": "auto", "wandb": False}
MODERN = {"n_head": 6, "warmup_steps": 0, "max_lr": 0.02, "weight_decay": 0.0, "grad_clip": math.inf}
SPEEDRUN = {"recipe": "speedrun", **MODERN, "max_steps": 3242, "min_lr": 0.0}
FRONTIER = {"recipe": "frontier", **MODERN, "max_steps": 5833}
PRESETS = {
    "shakespeare": FRONTIER | {
        "data": "data/shakespeare", "out": "log/shakespeare", "n_layer": 4, "n_head": 2, "n_embd": 256,
        "block_size": 1024, "total_batch_size": 2048, "max_steps": 200, "val_every": 50, "hellaswag_every": 0,
        "sample_every": 100, "checkpoint_every": 100, "sample_prompt": "\n"},
    "small": {
        "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "total_batch_size": 16_384,
        "max_steps": 2000, "warmup_steps": 100, "max_lr": 1e-3, "val_tokens": 524_288, "val_every": 200,
        "hellaswag_every": 0, "sample_every": 500, "sample_prompt": "\n", "checkpoint_every": 200},
    "gpt2": {},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "max_lr": 3e-4},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280, "max_lr": 2.5e-4},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "max_lr": 2e-4, "total_batch_size": 1_048_576,
                "max_steps": 9536, "warmup_steps": 358},
    "finetune": {
        "init": "gpt2", "out": "log/finetune", "total_batch_size": 8192, "max_steps": 150, "warmup_steps": 15,
        "max_lr": 1e-4, "val_tokens": 524_288, "val_every": 25, "hellaswag_every": 0, "sample_every": 50,
        "checkpoint_every": 25, "sample_prompt": "\n", "keep_checkpoints": 1}}
OVERFIT = {"overfit": True, "vocab_size": 50257, "total_batch_size": 128, "sequence_length": 32,
           "shuffle": False, "max_steps": 50, "warmup_steps": 0, "val_every": 0, "hellaswag_every": 0,
           "sample_every": 0, "checkpoint_every": 0, "resume": "never"}


@pytest.mark.parametrize("flags, expected", [
    ("", {}), ("--recipe gpt2", {}), ("--recipe speedrun", SPEEDRUN), ("--recipe frontier", FRONTIER),
    *((f"--preset {name}", values) for name, values in PRESETS.items()),
    # a preset's rates and warm-up are for AdamW: another recipe keeps its own
    ("--preset small --recipe speedrun", SPEEDRUN | PRESETS["small"] | {
        "max_lr": 0.02, "warmup_steps": 0, "min_lr": 0.0}),
    ("--preset shakespeare --recipe gpt2", {
        name: value for name, value in PRESETS["shakespeare"].items() if name not in FRONTIER} | {
            "n_head": 2, "max_steps": 200, "max_lr": 2e-3, "warmup_steps": 15}),
    ("--overfit", OVERFIT | {"max_lr": 3e-4, "min_lr": 3e-4}),
    ("--overfit --recipe speedrun", SPEEDRUN | OVERFIT | {"max_lr": 0.02, "min_lr": 0.02})])
def test_every_flags_default_is_this(flags, expected):
    config, _ = parse_flags(flags.split())
    words = flags.split()
    named = dict(zip((word.lstrip("-") for word in words[::2]), words[1::2], strict=False))
    assert dataclasses.asdict(config) == FLAGS | expected | {
        name: value for name, value in named.items() if name in ("preset", "recipe")}


@pytest.mark.parametrize("recipe", MODELS)
def test_the_models_own_defaults_are_gpt2s_size(recipe):
    shape = {"block_size": 1024, "vocab_size": 50304, "n_layer": 12, "n_embd": 768}
    assert vars(MODELS[recipe].Config()) == shape | (
        {"vocab_size": 50257, "n_head": 12, "gelu": "tanh"} if recipe == "gpt2"
        else {"n_head": 6})


def test_the_published_sizes_have_heads_of_64():
    """The number of parameters does not tell how many heads they are divided into."""
    assert GPT2_SIZES == {name: {"n_layer": layers, "n_head": heads, "n_embd": width}
                          for name, layers, heads, width in (
        ("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024), ("gpt2-large", 36, 20, 1280),
        ("gpt2-xl", 48, 25, 1600))}


@pytest.mark.parametrize("recipe, T, parameters, flops", [
    ("gpt2", 1024, 124_475_904, 855_383_040), ("gpt2", 256, 124_475_904, 770_448_384),
    ("speedrun", 1024, 162_201_636, 854_655_192), ("speedrun", 256, 162_201_636, 769_720_536),
    ("frontier", 1024, 180_380_196, 854_655_192), ("frontier", 256, 180_380_196, 769_720_536)])
def test_parameters_and_flops_a_token_at_gpt2s_size(recipe, T, parameters, flops):
    """6 for each weight that a token is multiplied by, and 12 for each layer, channel and token seen. gpt2:
    123,689,472 weights without positions; speedrun and frontier: 50,304 x 768 of the head, 84,934,656 in the
    blocks and 36 scalars."""
    with torch.device("meta"):
        model = MODELS[recipe](MODELS[recipe].Config(vocab_size=50304))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.flops_per_token(T) == flops


# ----------------------------------------------------------------------------- initial weights

# (end of the name, kind, at width 768 in 2 layers of 12 or 6 heads, at width 64 in 12 layers)
INITIAL = {
    "gpt2": [("wte.weight", "std", 0.02, 0.02), ("wpe.weight", "std", 0.02, 0.02),
             ("ln_1.weight", "all", 1.0, 1.0), ("ln_1.bias", "all", 0.0, 0.0),
             ("ln_2.weight", "all", 1.0, 1.0), ("ln_2.bias", "all", 0.0, 0.0),
             ("ln_f.weight", "all", 1.0, 1.0), ("ln_f.bias", "all", 0.0, 0.0),
             ("c_attn.weight", "std", 0.02, 0.02), ("c_attn.bias", "all", 0.0, 0.0),
             ("attn.c_proj.weight", "std", 0.01, 0.00408248), ("attn.c_proj.bias", "all", 0.0, 0.0),
             ("c_fc.weight", "std", 0.02, 0.02), ("c_fc.bias", "all", 0.0, 0.0),
             ("mlp.c_proj.weight", "std", 0.01, 0.00408248), ("mlp.c_proj.bias", "all", 0.0, 0.0)],
    "speedrun": [("wte.weight", "std", 1.0, 1.0), ("lm_head.weight", "all", 0.0, 0.0),
                 ("c_q.weight", "bound", 0.0360844, 0.125), ("c_k.weight", "bound", 0.0360844, 0.125),
                 ("c_v.weight", "bound", 0.0360844, 0.125), ("c_fc.weight", "bound", 0.0360844, 0.125),
                 ("attn.c_proj.weight", "all", 0.0, 0.0), ("mlp.c_proj.weight", "all", 0.0, 0.0),
                 ("lambdas", "all", (1.0, 0.0), (1.0, 0.0)), ("lamb", "all", 0.5, 0.5)],
    "frontier": [("wte.weight", "std", 0.00651042, 0.078125), ("bigram.weight", "all", 0.0, 0.0),
                 ("part.weight", "all", 0.0, 0.0),
                 ("c_q.weight", "bound", 0.0360844, 0.125), ("c_k.weight", "bound", 0.0360844, 0.125),
                 ("c_v.weight", "bound", 0.0360844, 0.125), ("c_fc.weight", "bound", 0.0360844, 0.125),
                 ("c_proj.weight", "all", 0.0, 0.0),
                 ("lambdas", "all", (1.0, 0.0), (1.0, 0.0)), ("lamb", "all", 0.5, 0.5)]}


@pytest.mark.parametrize("at, n_layer, n_embd", [(0, 2, 768), (1, 12, 64)])
@pytest.mark.parametrize("recipe", MODELS)
def test_every_fresh_weight_has_this_spread(recipe, at, n_layer, n_embd):
    torch.manual_seed(1)
    heads = {"gpt2": 12, "speedrun": 6, "frontier": 6}[recipe] if n_embd == 768 else 2
    model = MODELS[recipe](MODELS[recipe].Config(256, 8192 if at else 1024, n_layer, heads, n_embd))
    drawn, rows_used = [], set()
    for name, p in model.named_parameters():
        [(end, kind, *expected)] = [row for row in INITIAL[recipe] if name.endswith(row[0])]
        expected, p = expected[at], p.detach()
        rows_used.add(end)
        if kind == "all":
            assert torch.equal(p, torch.tensor(expected).expand_as(p)), name
            continue
        drawn.append((name, p))
        std = expected if kind == "std" else expected / math.sqrt(3)
        assert p.std().item() == pytest.approx(std, rel=0.04), name
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
        largest = p.abs().max().item()
        # a normal distribution goes beyond three times its std, a uniform one ends at its bound
        assert largest > 3.3 * std if kind == "std" else 0.99 * expected < largest <= expected * (1 + 1e-5)
    assert rows_used == {row[0] for row in INITIAL[recipe]}
    numbers = defaultdict(list)
    for _, p in drawn:
        numbers[p.shape].append(p.flatten())
    shifted = 0.5 if recipe == "frontier" else 0          # of c_k: the same numbers as c_q, see below
    for shape, several in numbers.items():
        for i, a in enumerate(several):
            for b in several[:i]:
                equal = (a == b).float().mean().item()
                assert min(equal, abs(equal - shifted)) < 0.01, f"drawn twice: {shape}"


def test_frontiers_shifted_keys_begin_as_the_queries_of_their_heads():
    """Of three heads the last two: half of them, rounded up."""
    model = MODELS["frontier"](MODELS["frontier"].Config(32, 97, 2, 3, 48))
    for block in model.transformer.h:
        same = (block.attn.c_k.weight == block.attn.c_q.weight).all(1).reshape(3, 16)
        assert same.all(1).tolist() == [False, True, True] and not same[0].any()


# ----------------------------------------------------------------------------- optimizers and schedules

@contextlib.contextmanager
def optimizers_seen(stop, at):
    """[(is it Muon, {parameter's name: its group's numbers})] of each optimizer step inside; `stop()` is
    called in that number `at`, from 1."""
    names, seen = {}, []

    def look_at_model(module, inputs, output):
        if isinstance(module, tuple(MODELS.values())) and not names:
            names.update({id(p): name for name, p in module.named_parameters()})

    def look_at_step(optimizer, args, kwargs):
        seen.append(("momentum" in optimizer.param_groups[0], {
            names[id(p)]: {key: value for key, value in group.items() if "param" not in key}
            for group in optimizer.param_groups for p in group["params"]}))
        if len(seen) == at:
            stop()
    handles = [register_module_forward_hook(look_at_model), register_optimizer_step_pre_hook(look_at_step)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def zeros(tmp_path_factory):
    """A step's tokens, and more."""
    folder = tmp_path_factory.mktemp("zeros")
    write_shard(folder / "zeros_train_000001.npy", np.zeros(600_000, dtype=np.uint16))
    return folder


@pytest.fixture
def no_forward(monkeypatch):
    """Of a model only the parameters: a step of 524,288 tokens takes no time, and no gradient."""
    def nothing(self, idx, targets=None):
        return None, 0 * sum(p.sum() for p in self.parameters())
    for cls in MODELS.values():
        monkeypatch.setattr(cls, "forward", nothing)


ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "weight_decay": 0}
FRONTIERS_ADAM = {**ADAM, "betas": (0.7, 0.95)}
# Of the first step of a run that gives no flags. The embedding's eps is 0.1 / 524,288.
FIRST = {
    "gpt2": [("wte.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.1}),
             ("wpe.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.1}),
             ("ln_1.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.0}),
             ("ln_2.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.0}),
             ("ln_f.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.0}),
             (".bias", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.0}),
             ("c_attn.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.1}),
             ("c_fc.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.1}),
             ("c_proj.weight", {**ADAMW, "lr": 6e-4 / 715, "weight_decay": 0.1})],
    "speedrun": [("wte.weight", {**ADAM, "lr": 0.3}), ("lm_head.weight", {**ADAM, "lr": 0.002}),
                 ("lambdas", {**ADAM, "lr": 0.02}), ("lamb", {**ADAM, "lr": 0.02}),
                 *((f"{name}.weight", {"lr": 0.02, "momentum": 0.85, "weight_decay": 0.0})
                   for name in ("c_q", "c_k", "c_v", "c_proj", "c_fc"))],
    "frontier": [("wte.weight", {**FRONTIERS_ADAM, "lr": 0.002, "eps": 1.9073486e-7}),
                 ("part.weight", {**FRONTIERS_ADAM, "lr": 0.002, "eps": 1.9073486e-7}),
                 ("bigram.weight", {**FRONTIERS_ADAM, "lr": 0.03}),
                 ("lambdas", {**FRONTIERS_ADAM, "lr": 0.02}), ("lamb", {**FRONTIERS_ADAM, "lr": 0.02}),
                 *((f"{name}.weight", {"lr": 0.02, "momentum": 0.80, "weight_decay": 0.0})
                   for name in ("c_q", "c_k", "c_v", "c_proj", "c_fc"))]}


class Stopped(Exception):
    pass


def stop_here():
    raise Stopped


@pytest.mark.parametrize("recipe", MODELS)
def test_the_first_step_of_a_run_without_flags_has_these_optimizers(recipe, zeros, no_forward, tmp_path):
    """At GPT-2's width, of which the head's rate is a function, with two layers of its twelve."""
    with optimizers_seen(stop_here, at=1 if recipe == "gpt2" else 2) as steps, pytest.raises(Stopped):
        train("--recipe", recipe, "--data", zeros, "--out", tmp_path, "--n_layer", 2, "--vocab_size", 256,
              "--batch_size", 512, *QUIET, "--dtype", "float32", "--device", "cpu")
    found = {}
    for is_muon, groups in steps:
        assert not found.keys() & groups.keys()
        found |= {name: group | {"is_muon": is_muon} for name, group in groups.items()}
    config = MODELS[recipe].Config(1024, 256, 2, 12 if recipe == "gpt2" else 6, 768)
    assert found.keys() == {name for name, _ in MODELS[recipe](config).named_parameters()}
    for name, group in found.items():
        [expected] = [expected for end, expected in FIRST[recipe] if name.endswith(end)]
        assert group["is_muon"] is ("momentum" in expected), name
        for key, value in expected.items():
            assert group[key] == (pytest.approx(value) if type(value) is float else value), (name, key)


# {step: (learning rate, Muon's momentum)} of runs without other flags
SCHEDULES = {
    "--recipe gpt2": {0: (8.3916084e-7, None), 714: (6e-4, None), 715: (6e-4, None), 9894: (3.3e-4, None),
             14_484: (1.39065e-4, None), 19_072: (6e-5, None)},
    "--recipe speedrun": {0: (0.02, 0.85), 250: (0.02, 0.9000733), 500: (0.02, 0.95), 2316: (0.02, 0.95),
                 2779: (0.01000092, 0.95), 3241: (2.1600254e-5, 0.95)},
    "--recipe frontier": {
        0: (0.02, 0.80), 768: (0.02, 0.8748127), 1540: (0.02, 0.95), 3500: (0.02, 0.95),
        4999: (0.012003, 0.95), 5583: (0.0050003, 0.95), 5708: (0.00350015, 0.900005),
        5832: (0.002012001, 0.85040004)},
    "--preset shakespeare": {0: (0.02, 0.80), 22: (0.02, 0.8238095), 60: (0.02, 0.85), 138: (0.02, 0.85),
                             169: (0.0104166, 0.85), 199: (0.00110022, 0.85)}}
# {flags: [(first step, tokens of a step)]}: of frontier's first two thirds a quarter and a half
STAGES = {
    "--recipe frontier": [(0, 131_072), (3333, 262_144), (5000, 524_288)],
    "--preset shakespeare": [(0, 1024), (100, 2048)]}


def tokens_before(step, stages):
    ends = [first for first, _ in stages[1:]] + [step]
    return sum(tokens * max(0, min(step, end) - first)
               for (first, tokens), end in zip(stages, ends, strict=True))


def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("given, schedule", SCHEDULES.items())
def test_rate_and_momentum_at_these_steps_of_a_run_without_flags(given, schedule, zeros, no_forward,
                                                                     tmp_path):
    """Each step is reached by a checkpoint that says so: the step decides all."""
    flags = [*given.split(), "--data", zeros, "--out", tmp_path, "--n_layer", 1, "--n_embd", 48,
             "--vocab_size", 256, "--batch_size", 512, *QUIET, "--checkpoint_every", 10**6,
             "--keep_checkpoints", 1, "--dtype", "float32", "--device", "cpu"]
    for step, (rate, momentum) in schedule.items():
        if step:
            [(_, path)] = checkpoints(tmp_path)
            done = tokens_before(step, STAGES.get(given, [(0, 524_288)]))
            checkpoint = torch.load(path) | {"step": step, "tokens": done}
            path.unlink()
            torch.save(checkpoint, tmp_path / f"checkpoint_{step:06d}.pt")
        with optimizers_seen(interrupt, at=1) as seen:      # the step is completed and saved
            train(*flags)
        assert column(tmp_path, "lr")[step] == pytest.approx(rate, rel=1e-5), step
        assert max(logged(tmp_path)) == step
        muons = [group for is_muon, groups in seen if is_muon for group in groups.values()]
        assert bool(muons) is (momentum is not None)
        for group in muons:
            assert (group["lr"], group["momentum"]) == pytest.approx((rate, momentum), rel=1e-5), step


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_muon_orthogonalizes_in_bfloat16_where_the_products_are_and_else_in_float32(dtype, byte_data,
                                                                                      tmp_path):
    """The projections begin at zero: after a step they are the update itself, times the rate."""
    with optimizers_seen(interrupt, at=1):
        train("--recipe", "frontier", "--data", byte_data, "--out", tmp_path, *TINY, *QUIET, "--dtype", dtype,
              "--checkpoint_every", 1)
    update = torch.load(tmp_path / "checkpoint_000001.pt")["model"]["transformer.h.0.c_proj.weight"] / -0.02
    assert 0.01 < update.abs().max() < 1
    exact = (update - update.bfloat16()).abs() <= 1e-6 * update.abs()
    assert exact.all() if dtype == "bfloat16" else exact.float().mean() < 0.1
