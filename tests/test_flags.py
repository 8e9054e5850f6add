"""What each flag of train_gpt2.py does: EFFECTS has a row for each field of Config, which fails where a flag
is inert. And the flags' defaults, bounds and spellings. What a resume takes of them: test_resume.py."""
import functools
import itertools
import math
import os
import sys
import types
from dataclasses import dataclass, fields
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import train_gpt2
from helpers import forked, hellaswag_file, logged, parse_flags, refused, run, train
from model import GPT, GPTConfig
from recipes import MODELS, fresh_model, load_model
from peers import LargestStorage
from runtime.cli import RunError, UserError, run_command
from runtime.metrics import read_metrics
from runtime.files import checkpoints
from runtime.shards import write_shard
from train_gpt2 import Config

T, STEPS = 16, 3
QUIET = ["--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0]
TINY = ["--n_layer", 2, "--n_head", 2, "--n_embd", 16, "--block_size", T, "--vocab_size", 256, "--device",
        "cpu", "--dtype", "float32", "--total_batch_size", 4 * T, "--max_steps", STEPS, "--warmup_steps", 0,
        "--val_tokens", T]
SPOKEN = ["--vocab_size", 50304, "--n_layer", 1]        # for what samples or is scored
SAVED = ["--checkpoint_every", 1, "--keep_checkpoints", "all"]
STILL = ["--max_lr", 1e-12, "--weight_decay", 0]        # leaves the weights alone


@dataclass
class Found:
    """What came of a run."""
    out: Path
    text: str               # what it printed
    forwards: list          # of the whole model: (whether it is trained, idx, targets or None)

    def trained(self):
        """idx (B, T) of each micro-step."""
        return [idx for training, idx, _ in self.forwards if training]

    def column(self, name):
        rows = read_metrics(self.out / "metrics.csv")
        return [row[name] for row in rows if row[name] is not None]

    def saved(self, step=None):
        found = dict(checkpoints(self.out))
        return torch.load(found[step or max(found)], weights_only=True)

    def files(self):
        return {path.name for path in self.out.iterdir()} if self.out.exists() else set()


@pytest.fixture
def go(byte_data, tmp_path, capsys):
    """go(*flags) trains, by default in a new folder."""
    numbers = itertools.count()

    def go(*flags, out=None, code=0, given=(*TINY, *QUIET), data=byte_data):
        out, forwards = out or tmp_path / f"run{next(numbers)}", []

        def watch(module, inputs):
            if isinstance(module, tuple(MODELS.values())):
                forwards.append((torch.is_grad_enabled(), *inputs, *[None] * (2 - len(inputs))))
        capsys.readouterr()
        hook = register_module_forward_pre_hook(watch)
        try:
            train("--data", data, *given, "--out", out, *flags, code=code)
        finally:
            hook.remove()
        return Found(out, capsys.readouterr().out, forwards)
    go.data, go.folder = byte_data, tmp_path
    return go


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint to start from, of weights larger than fresh ones."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(T, 256, 2, 2, 16))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = tmp_path_factory.mktemp("start") / "start.pt"
    torch.save({"model": model.state_dict(), "model_config": vars(model.config), "recipe": "gpt2"}, path)
    return path


EFFECTS = {}


def effect(name):
    """The row of a field: a function that asks for fixtures as a test does."""
    def add(check):
        assert name not in EFFECTS
        EFFECTS[name] = check
        return check
    return add


def test_each_flag_has_a_row():
    assert [*EFFECTS] == [field.name for field in fields(Config)]


@pytest.mark.parametrize("name", EFFECTS)
def test_a_flag_does_what_it_says(name, request):
    check = EFFECTS[name]
    check(**{fixture: request.getfixturevalue(fixture) for fixture in signature(check).parameters})


# ----------------------------------------------------------------------------- start and data

@effect("preset")
def _(go):
    text = go("--preset", "small", "--n_head", 1, "--n_embd", 16, "--sample_every", 0, "--vocab_size", 256,
              "--batch_size", 2, "--dry_run", given=["--device", "cpu"]).text
    for said in ("(6 layers, 1 head, width 16,", "16,384 tokens per step = 2 x 256 x 32 micro-steps",
                 "2,000 steps", "max_lr 0.001 after 100 steps,"):
        assert said in text, said


@pytest.mark.parametrize("steps, said", [(5, "after 5 steps,"), (4, "after 5 steps (")])
def test_a_warm_up_longer_than_the_run_is_told(go, steps, said):
    assert said in go("--warmup_steps", 5, "--max_steps", steps, "--dry_run").text


@effect("dry_run")
def _(go):
    dry, wet = go("--dry_run", *SAVED), go(*SAVED)
    assert "about " in dry.text and "step     0" not in dry.text and not dry.out.exists()
    assert "about " not in wet.text and "step     0" in wet.text and wet.out.exists()


def worse_and_worse(folder):
    """Flags of a run whose validation loss rises in each step: it begins with a model that expects nines,
    which the validation has, and is trained on sevens."""
    for split, token in (("train", 7), ("val", 9)):
        write_shard(folder / f"x_{split}_000001.npy", np.full(2000, token, np.uint16))
    torch.manual_seed(0)
    model = GPT(GPTConfig(T, 256, 2, 2, 16))
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(12 * model.transformer.wte.weight[9].sign())
    torch.save({"model": model.state_dict(), "model_config": vars(model.config), "recipe": "gpt2"},
               folder / "start.pt")
    return ["--data", folder, "--init", folder / "start.pt", "--max_lr", 0.01, "--min_lr", 0.01]


@effect("data")
def _(go):
    """The tokens of the folder, and no others."""
    found = go(*worse_and_worse(go.folder), "--val_every", 1)
    assert {(training, int(token)) for training, idx, _ in found.forwards for token in idx.unique()} == {
        (True, 7), (False, 9)}


@effect("overfit")
def _(go):
    found = go("--overfit", *STILL, code=1, given=["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--device",
                                                   "cpu", "--dtype", "float32", "--max_steps", 3])
    first, *others = found.trained()
    assert first.shape == (4, 32) and len(others) == 2 and all(torch.equal(first, x) for x in others)
    assert "FAILED" in found.text and not found.out.exists()


@effect("shuffle")
def _(go):
    tokens = np.load(go.data / "text_train_000001.npy").astype(np.int64)
    in_order = torch.from_numpy(tokens[:12 * T].reshape(12, T))
    assert torch.equal(torch.cat(go("--no_shuffle").trained()), in_order)
    for flags in ([], ["--no_shuffle", "--shuffle"]):
        shuffled = torch.cat(go(*flags).trained())
        assert shuffled.shape == in_order.shape and not torch.equal(shuffled, in_order)


@effect("val_tokens")
def _(go):
    """The first sequences of the shard, each token once."""
    tokens = torch.from_numpy(np.load(go.data / "text_val_000000.npy").astype(np.int64))
    for given, count in ((1, 1), (5 * T, 5), (6 * T - 1, 5), (10**6, 2499 // T)):
        found = go("--max_steps", 1, "--val_every", 2, "--val_tokens", given, "--batch_size", 4)
        for begin in (0, -(-count // 4)):           # two validations
            pairs = [(idx, y) for training, idx, y in found.forwards if not training]
            x, y = map(torch.cat, zip(*pairs[begin:begin + -(-count // 4)], strict=True))
            x, y = x[y[:, 0] >= 0], y[y[:, 0] >= 0]             # without what fills the last batch
            assert torch.equal(x.flatten(), tokens[:count * T]), given
            assert torch.equal(y.flatten(), tokens[1:count * T + 1]), given


@effect("hellaswag_data")
def _(go):
    for n in (3, 5):
        examples = hellaswag_file(go.folder / f"{n}.jsonl", n)
        flags = [*SPOKEN, "--max_steps", 1, "--hellaswag_every", 2, "--hellaswag_data", examples]
        assert f"/{n}=" in go(*flags).text


# ----------------------------------------------------------------------------- model

@effect("recipe")
def _(go):
    for recipe, cls in MODELS.items():
        found = go("--recipe", recipe, *SAVED)
        assert found.saved()["recipe"] == recipe and type(load_model(found.out)) is cls
        assert f"\n{recipe}: " in found.text


@effect("init")
def _(go, start):
    begun, weights = go("--init", start, *STILL, *SAVED), torch.load(start)["model"]
    assert all(torch.allclose(begun.saved()["model"][name], weights[name], atol=1e-9) for name in weights)
    fresh = go("--init", "scratch", *STILL, *SAVED).saved()["model"]
    assert not any(torch.allclose(fresh[name], weights[name], atol=1e-3) for name in weights)


def shape_flag(name, value, weight, shape):
    """The row of a flag of the model's shape: of the saved config, and of a weight that it decides."""
    def check(go):
        saved = go(f"--{name}", value, "--sequence_length", T, *SAVED, "--max_steps", 1).saved()
        assert saved["model_config"][name] == value and saved["config"][name] == value
        assert tuple(saved["model"][weight].shape) == shape
        assert saved["model"].keys() == expected_names(saved["model_config"]["n_layer"])
    effect(name)(check)


def expected_names(layers):
    parts = [f"h.{i}.{part}" for i in range(layers)
             for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")]
    return {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight",
            *(f"transformer.{part}.{kind}" for part in (*parts, "ln_f") for kind in ("weight", "bias"))}


shape_flag("n_layer", 3, "transformer.h.2.mlp.c_fc.weight", (64, 16))


@effect("n_head")
def _(go, monkeypatch):
    """Other heads of the same weights: another attention, seen by its shape."""
    shapes, attend = set(), F.scaled_dot_product_attention

    def watch(q, k, v, **how):
        shapes.add((q.size(1), q.size(3)))                      # nh, hs
        return attend(q, k, v, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    for heads in (1, 4):
        shapes.clear()
        found = go("--n_head", heads, "--max_steps", 1, *SAVED)
        assert shapes == {(heads, 16 // heads)} and found.saved()["model_config"]["n_head"] == heads


shape_flag("n_embd", 24, "transformer.wte.weight", (256, 24))
shape_flag("block_size", 40, "transformer.wpe.weight", (40, 16))
shape_flag("vocab_size", 300, "transformer.wte.weight", (300, 16))


# ----------------------------------------------------------------------------- batch

@effect("total_batch_size")
def _(go):
    for sequences in (4, 6):
        found = go("--total_batch_size", sequences * T)
        assert torch.cat(found.trained()).shape == (sequences * STEPS, T)
        assert found.column("tokens") == [step * sequences * T for step in range(STEPS)]


@effect("batch_size")
def _(go):
    """At most so many sequences, and at the most 4,096 tokens on a CPU; a resume has its own."""
    losses = []
    for given, B in ((1, 1), (2, 2), (3, 2), (4, 4), (99, 4), ("auto", 4)):
        found = go("--batch_size", given, *SAVED)
        assert [idx.shape for idx in found.trained()] == [(B, T)] * (STEPS * 4 // B), given
        assert f"= {B} x {T} x {4 // B} micro-step" in found.text
        losses.append(found.column("train"))
    assert all(loss == pytest.approx(losses[0], abs=1e-5) for loss in losses)
    again = go("--batch_size", 1, "--max_steps", STEPS + 1, out=found.out)
    assert [idx.shape for idx in again.trained()] == [(1, T)] * 4
    large = go("--total_batch_size", 512 * T, "--max_steps", 1)
    assert [idx.shape for idx in large.trained()] == [(4096 // T, T)] * 2


@effect("sequence_length")
def _(go):
    for given, length in ((T // 2, T // 2), ("auto", T), (T, T)):
        found = go("--sequence_length", given, "--val_every", 9, "--val_tokens", 64, "--no_shuffle")
        assert {idx.size(1) for _, idx, _ in found.forwards} == {length}
        assert torch.cat(found.trained()).numel() == STEPS * 4 * T
        tokens = np.load(go.data / "text_train_000001.npy")[:STEPS * 4 * T]
        assert np.array_equal(torch.cat(found.trained()).flatten(), tokens)


# ----------------------------------------------------------------------------- optimisation

@effect("max_steps")
def _(go):
    for steps in (1, 4):
        found = go("--max_steps", steps, "--val_every", 3)
        assert len(found.trained()) == steps and list(logged(found.out)) == list(range(steps))
        assert list(logged(found.out, "val")) == ([0, 1] if steps == 1 else [0, 3, 4])
        assert f"done: {steps} steps" in found.text


def rates(go, *flags):
    return go("--max_steps", 4, "--max_lr", 1e-3, *flags).column("lr")


def cosine(floor, *progress):
    return pytest.approx([1e-3 * (floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * p))) for p in progress],
                         rel=1e-4)


@effect("warmup_steps")
def _(go):
    assert rates(go, "--warmup_steps", 0) == cosine(0.1, 0, 0.25, 0.5, 0.75)
    assert rates(go, "--warmup_steps", 2) == [0.5e-3, *cosine(0.1, 0, 0, 0.5).expected[:1], *[
        1e-3, pytest.approx(0.55e-3, rel=1e-4)]]
    assert rates(go, "--recipe", "speedrun", "--warmup_steps", 2, "--cooldown", 0.25) == pytest.approx(
        [0.5e-3, 1e-3, 1e-3, 1e-3])


@effect("max_lr")
def _(go, start):
    """Adam's first step moves a weight by the rate."""
    before = torch.load(start)["model"]
    for rate in (1e-3, 0.02):
        found = go("--init", start, "--max_lr", rate, "--weight_decay", 0, "--max_steps", 1, *SAVED)
        after = found.saved()["model"]
        assert found.column("lr") == [rate] and f"max_lr {rate:g} after 0 steps" in found.text
        for name, p in before.items():
            assert (after[name] - p).abs().max().item() == pytest.approx(rate, rel=0.02), name


@effect("min_lr")
def _(go):
    for given, floor in ((0, 0), (5e-4, 0.5), (1e-3, 1), ("auto", 0.1)):
        assert rates(go, "--min_lr", given) == cosine(floor, 0, 0.25, 0.5, 0.75), given
    assert "min_lr 0.0001" in go("--max_lr", 1e-3, "--dry_run").text


@effect("cooldown")
def _(go):
    """The last so many steps go linearly to min_lr."""
    for given, expected in ((0.5, [1, 1, 1, 0.5]), (1, [1, 0.75, 0.5, 0.25]),
                            ("auto", [1, 1, 1, 0.25 / 0.2856])):
        found = rates(go, "--recipe", "speedrun", "--cooldown", given, "--min_lr", 0)
        assert found == pytest.approx([1e-3 * x for x in expected], rel=1e-4), given
    found = rates(go, "--recipe", "speedrun", "--cooldown", 0.5, "--min_lr", 5e-4)
    assert found == pytest.approx([1e-3, 1e-3, 1e-3, 0.75e-3], rel=1e-4)


@effect("weight_decay")
def _(go, start):
    """AdamW and Muon first shrink matrices by lr times that; gains and biases, and what Adam updates in the
    modern recipes, have none."""
    once = ["--max_lr", 0.01, "--max_steps", 1, *SAVED]
    for recipe in ("gpt2", "speedrun"):         # frontier has several updates in a step
        begun = go("--recipe", recipe, *STILL, "--max_steps", 1, *SAVED)
        before = torch.load(start)["model"] if recipe == "gpt2" else begun.saved()["model"]
        flags = ["--init", start if recipe == "gpt2" else begun.out, "--recipe", recipe, *once]
        without, with_decay = (go(*flags, "--weight_decay", decay).saved()["model"] for decay in (0, 10))
        for name, p in before.items():
            decays = p.dim() == 2 and (recipe == "gpt2" or ".h." in name)
            expected = without[name] - 0.01 * 10 * p * decays
            assert torch.allclose(with_decay[name], expected, atol=1e-6), name


@effect("grad_clip")
def _(go):
    """Adam's first moment is a tenth of the gradient; the norm that is shown is that before clipping."""
    [whole] = go("--max_steps", 1).column("norm")
    assert 0.1 < whole < 1e3
    for clip, expected in ((0.01, 0.001), (1e3, 0.1 * whole), ("inf", 0.1 * whole)):
        found = go("--grad_clip", clip, "--max_steps", 1, *SAVED)
        moments = [state["exp_avg"].norm() for state in found.saved()["optimizers"].values()]
        assert torch.stack(moments).norm().item() == pytest.approx(expected, rel=1e-3), clip
        assert found.column("norm") == [whole]


@effect("seed")
def _(go):
    """Of the initial weights and of the data's order."""
    flags = [*STILL, "--max_steps", 1, *SAVED, "--seed"]
    for recipe in MODELS:
        (batch, weights), same, other = (
            (found.trained()[0], found.saved()["model"]) for found in
            (go("--recipe", recipe, *flags, seed) for seed in (5, 5, 6)))
        assert torch.equal(same[0], batch) and not torch.equal(other[0], batch)
        assert all(torch.equal(same[1][name], p) for name, p in weights.items())
        drawn = {name for name, p in weights.items() if p.dim() == 2 and p.std() > 1e-6}
        assert len(drawn) > 3 and not any(torch.equal(other[1][name], weights[name]) for name in drawn)
    config, _ = parse_flags([str(flag) for flag in (*TINY, *QUIET, "--seed", 6)])
    torch.manual_seed(6)
    expected = fresh_model(config).state_dict()
    found = go(*flags, 6).saved()["model"]
    assert all(torch.allclose(found[name], p, atol=1e-9) for name, p in expected.items())


# ----------------------------------------------------------------------------- speed

@effect("device")
def _(go):
    assert " on cpu (" in go("--device", "cpu").text
    refused(lambda: go("--device", "cuda:99"), "--device cuda:99", "cpu")


@effect("dtype")
def _(go, monkeypatch):
    def products(*flags):
        """dtypes of the linear layers' outputs."""
        seen = set()

        def watch(module, inputs, output):
            if isinstance(module, torch.nn.Linear):
                seen.add(output.dtype)
        hook = register_module_forward_hook(watch)
        try:
            text = go(*flags, "--max_steps", 1, "--val_every", 1).text
        finally:
            hook.remove()
        assert len(seen) == 1 and f"), {str(*seen).removeprefix('torch.')}, eager" in text
        return {*seen}
    for name in ("float32", "bfloat16", "float16"):
        assert products("--dtype", name) == {getattr(torch, name)}
    for native in (False, True):
        for seen in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, seen, lambda native=native: native)
        assert products("--dtype", "auto") == {torch.bfloat16 if native else torch.float32}


class Reached(Exception):
    """Where a run ends that is to go no further."""


def reach(where):
    raise Reached(where)


@pytest.fixture
def gpu(monkeypatch):
    """A run takes the CPU for a GPU, until it looks how much memory that has."""
    monkeypatch.setattr(train_gpt2, "choose_device", lambda *args: "cuda:0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: reach("memory"))


@effect("tf32")
def _(go, gpu, monkeypatch):
    """On a GPU."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", reach)
    for flags, precision in (([], "high"), (["--tf32"], "high"), (["--no_tf32"], "highest")):
        with pytest.raises(Reached, match=f"^{precision}$"):
            go(*flags)


@effect("compile")
def _(go, monkeypatch):
    """Steps and validation go through what torch.compile returns, samples do not: their shapes change."""
    compiled, forwards = [], []

    def compile(model, **how):
        compiled.append(how)
        return lambda *args: (forwards.append(torch.is_grad_enabled()), model(*args))[1]
    monkeypatch.setattr(torch, "compile", compile)
    flags = ["--val_every", STEPS]
    for off in ([], ["--compile", "--no_compile"]):
        assert "eager" in go(*flags, *off).text and not compiled
    found = go(*flags, "--compile")
    assert "torch.compile" in found.text and len(compiled) == 1 and compiled[0]["dynamic"] is False
    assert forwards[2:] == [False, *[True] * STEPS, False]              # after a trial of two
    assert len(forwards) == len(found.forwards)
    go(*SPOKEN, "--compile", "--sample_every", STEPS)
    assert len(compiled) == 2 and len(forwards) == 2 * (2 + STEPS) + 2


def test_on_a_gpu_a_model_is_compiled_unless_that_is_declined(go, gpu, monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch, "compile", lambda model, **how: reach("compiled"))
    for flags, where in (([], "compiled"), (["--compile"], "compiled"), (["--no_compile"], "memory")):
        with pytest.raises(Reached, match=f"^{where}$"):
            go(*flags)


@effect("attention")
def _(go, monkeypatch):
    kernels, seen = ("math", "mem_efficient", "flash", "cudnn"), set()
    attend, allowed = F.scaled_dot_product_attention, torch.nn.attention.sdpa_kernel

    def watch(*args, **how):
        seen.add(tuple(name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()))
        with allowed([*torch.nn.attention.SDPBackend.__members__.values()][1:]):        # without ERROR
            return attend(*args, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    expected = {"math": {("math",)}, "efficient": {("mem_efficient",)}, "flash": {("flash",)},
                "cudnn": {("cudnn",)}, "auto": {kernels}, "naive": set()}
    for recipe, (name, found) in itertools.product(MODELS, expected.items()):
        seen.clear()
        text = go("--recipe", recipe, "--attention", name, "--max_steps", 1, "--val_every", 1).text
        assert seen == found and f"attention {name}," in text, (recipe, name)


@effect("recompute")
def _(go):
    """A block runs once more in each backward; losses stay as they are."""
    for recipe in MODELS:
        counts, losses = [], []
        for flags in ([], ["--recompute"]):
            blocks = []
            hook = register_module_forward_pre_hook(lambda module, inputs, blocks=blocks: blocks.append(
                torch.is_grad_enabled()) if type(module).__name__.endswith("Block") else None)
            try:
                found = go("--recipe", recipe, *flags, "--val_every", 9)
            finally:
                hook.remove()
            counts.append((blocks.count(True), blocks.count(False)))
            losses.append(found.column("train"))
            n = 2 * len(found.trained())
        assert counts == [(n, 4), (2 * n, 4)] and losses[0] == losses[1]


def note_moments(folder):
    """From now on each rank notes of how many numbers its optimizer has the moments."""
    def note(optimizer, args, how):
        held = sum(state["exp_avg_sq"].numel() for state in optimizer.state.values())
        (folder / f"{os.environ['RANK']} {type(optimizer).__name__}").write_text(str(held))
    register_optimizer_step_post_hook(note)


@effect("shard_optimizer")
def _(go):
    """Two ranks: together one copy of the matrices' moments, about half on each; also after a resume."""
    matrices = (256 + 16 + 2 * 12 * 16) * 16
    whole = matrices + (2 * 13 + 2) * 16                # with gains and biases, which are on all
    for steps in (1, 2):
        run("--data", go.data, *TINY, *QUIET, *SAVED, "--shard_optimizer", "--max_steps", steps, "--out",
            go.folder / "log", processes=2, before=[functools.partial(note_moments, go.folder)])
        held = [int((go.folder / f"{rank} AdamW").read_text()) for rank in range(2)]
        assert sum(held) == 2 * whole - matrices and max(held) < 0.6 * whole, held


# ----------------------------------------------------------------------------- output

def steps_of(text, words):
    return [int(line.split()[1]) for line in text.splitlines() if words in line]


@effect("val_every")
def _(go):
    for every, expected in ((0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])):
        found = go("--max_steps", 5, "--val_every", every)
        assert list(logged(found.out, "val")) == steps_of(found.text, "validation loss:") == expected


@effect("hellaswag_every")
def _(go):
    examples = hellaswag_file(go.folder / "examples.jsonl", 2)
    for every, expected in ((0, []), (2, [0, 2, 3])):
        found = go(*SPOKEN, "--hellaswag_every", every, "--hellaswag_data", examples)
        assert list(logged(found.out, "hella")) == steps_of(found.text, "HellaSwag accuracy:") == expected


@effect("sample_every")
def _(go):
    """Not of the fresh weights, but of the last ones."""
    for every, expected in ((0, []), (2, [2, 3])):
        lines = go(*SPOKEN, "--sample_every", every).text.splitlines()
        at = [i for i, line in enumerate(lines) if line.startswith("sample 0: ")]
        shown = [int([line.split()[1] for line in lines[:i] if line.startswith("step ")][-1]) + 1 for i in at]
        assert shown == expected and sum(line.startswith("sample ") for line in lines) == 4 * len(expected)


@effect("sample_prompt")
def _(go):
    for given, begins in (([], "Hello, I'm a language model,"), (["--sample_prompt", "To be"], "To be")):
        text = go(*SPOKEN, "--sample_every", 9, *given).text
        assert [text.count(f"sample {i}: {begins}") for i in range(5)] == [1, 1, 1, 1, 0]


@effect("checkpoint_every")
def _(go):
    for every, expected in ((0, []), (2, [2, 4, 5]), (9, [5])):
        found = go("--max_steps", 5, "--checkpoint_every", every, "--keep_checkpoints", "all")
        assert [step for step, _ in checkpoints(found.out)] == expected
        assert [torch.load(path)["step"] for _, path in checkpoints(found.out)] == expected


@effect("keep_checkpoints")
def _(go):
    """The newest, and the best one, here the first."""
    flags = [*worse_and_worse(go.folder), "--checkpoint_every", 1, "--max_steps", 6]
    for keep, newest in ((1, [6]), (3, [4, 5, 6]), ("all", [1, 2, 3, 4, 5, 6])):
        for every in (0, 1):
            found = go(*flags, "--keep_checkpoints", keep, "--val_every", every)
            best = [1] if every and keep != "all" else []
            assert [step for step, _ in checkpoints(found.out)] == best + newest
    losses = logged(found.out, "val")
    assert all(losses[step] + 0.1 < losses[step + 1] for step in range(6))


@effect("out")
def _(go, monkeypatch):
    monkeypatch.chdir(go.folder)
    train("--data", go.data, *TINY, *QUIET, "--checkpoint_every", 9)
    other = go("--checkpoint_every", 9, out=Path("a/b c"))
    assert {path.name for path in go.folder.iterdir()} == {"log", "a"}
    for folder in (Path("log"), other.out):
        assert {path.name for path in folder.iterdir()} - {".train_gpt2.lock"} == {
            "log.txt", "metrics.csv", "checkpoint_000003.pt"}
    assert f"in {other.out}" in other.text


@effect("resume")
def _(go):
    begun = go(*SAVED)
    assert "resuming" not in begun.text and len(begun.trained()) == STEPS
    again = go(*SAVED, out=begun.out)
    assert f"checkpoint_000003.pt at step {STEPS} of {STEPS}" in again.text and not again.trained()
    for given in ("checkpoint_000001.pt", ""):
        other = go("--resume", begun.out / given, *SAVED)
        first = 1 if given else STEPS
        assert f" at step {first} of {STEPS}" in other.text and len(other.trained()) == STEPS - first
        assert list(logged(other.out)) == list(range(first, STEPS))
    anew = go("--resume", "never", *SAVED, out=begun.out)
    assert "resuming" not in anew.text and len(anew.trained()) == STEPS
    assert (begun.out / "previous_1/checkpoint_000003.pt").exists()


def fake_wandb(begun, told):
    """The package: what begins a run and what is told are appended."""
    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None, origin="wandb.py")
    fake.init, fake.finish = lambda **how: begun.append(how), lambda: told.append("end")
    fake.log = lambda values, step: told.append((step, *values))
    return fake


@effect("wandb")
def _(go, monkeypatch):
    begun, told = [], []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(begun, told))
    go()
    assert not begun and not told
    found = go("--wandb", "--val_every", 9, "--max_lr", 0.25)
    assert len(begun) == 1 and begun[0]["name"] == found.out.name
    config = begun[0]["config"]
    assert (config["n_layer"], config["max_lr"], config["min_lr"]) == (2, 0.25, 0.025), "the completed one"
    trained = [(step, "train") for step in range(STEPS)]
    assert [event[:2] for event in told] == [(0, "val"), *trained, (STEPS, "val"), "en"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(lambda: go("--wandb"), "pip install wandb")


# ----------------------------------------------------------------------------- not by a flag

def test_on_a_cpu_the_loss_never_has_the_logits_of_a_whole_micro_batch_in_memory(go):
    """Of 4,096 tokens; a compiler fuses them with the loss, and is given them all."""
    flags = ["--total_batch_size", 4096, "--max_steps", 1, "--val_every", 1, "--val_tokens", 4096]
    losses, largest = [], []
    for more in ([], ["--compile"]):
        with LargestStorage() as seen, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda model, **how: model)
            found = go(*flags, *more)
        losses.append(found.column("train") + found.column("val"))
        largest.append(seen.bytes)
    assert largest[0] < 4096 * 256 * 4 <= largest[1] and losses[0] == pytest.approx(losses[1], abs=1e-5)


# ----------------------------------------------------------------------------- defaults

DEFAULTS = dict(
    preset="gpt2", dry_run=False, data="edu_fineweb10B", overfit=False, shuffle=True, val_tokens=10_485_760,
    hellaswag_data="", recipe="gpt2", init="scratch", n_layer=12, n_head=12, n_embd=768, block_size=1024,
    vocab_size=50304, total_batch_size=524_288, batch_size="auto", sequence_length="auto",
    max_steps=19_073, warmup_steps=715, max_lr=6e-4, min_lr="auto", cooldown="auto",
    weight_decay=0.1, grad_clip=1.0, seed=1337, device="auto", dtype="auto", tf32=True, compile="auto",
    attention="auto", recompute=False, shard_optimizer=False, val_every=250, hellaswag_every=250,
    sample_every=250, sample_prompt="Hello, I'm a language model,", checkpoint_every=250, keep_checkpoints=3,
    out="log", resume="auto", wandb=False)
MODERN = dict(n_head=6, warmup_steps=0, max_lr=0.02, weight_decay=0.0, grad_clip=math.inf)
NO_EVALUATION = dict(val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)
SHAKESPEARE = dict(
    data="data/shakespeare", out="log/shakespeare", n_layer=4, n_head=2, n_embd=256, block_size=1024,
    total_batch_size=2048, max_steps=200, val_every=50, hellaswag_every=0, sample_every=100,
    checkpoint_every=100, sample_prompt="\n")
GIVEN = {           # flags: the defaults that they change
    "": {},
    "--preset gpt2": {},
    "--recipe speedrun": dict(MODERN, max_steps=3242, min_lr=0.0),
    "--recipe frontier": dict(MODERN, max_steps=5833),
    "--preset shakespeare": SHAKESPEARE | dict(MODERN, n_head=2, recipe="frontier"),
    # AdamW's rate and warmup, of its preset
    "--preset shakespeare --recipe gpt2": SHAKESPEARE | dict(max_lr=2e-3, warmup_steps=15),
    "--preset small": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, total_batch_size=16_384, max_steps=2000,
        warmup_steps=100, max_lr=1e-3, val_tokens=524_288, val_every=200, hellaswag_every=0, sample_every=500,
        sample_prompt="\n", checkpoint_every=200),
    "--preset gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4),
    "--preset gpt2-medium --recipe speedrun": MODERN | dict(
        n_layer=24, n_head=16, n_embd=1024, max_steps=3242, min_lr=0.0),
    "--preset gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4),
    "--preset gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, total_batch_size=1_048_576,
                             max_steps=9536, warmup_steps=358),
    "--preset finetune": dict(
        init="gpt2", out="log/finetune", total_batch_size=8192, max_steps=150, warmup_steps=15, max_lr=1e-4,
        val_tokens=524_288, val_every=25, hellaswag_every=0, sample_every=50, checkpoint_every=25,
        sample_prompt="\n", keep_checkpoints=1),
    "--overfit": dict(
        NO_EVALUATION, vocab_size=50257, total_batch_size=128, sequence_length=32, shuffle=False,
        max_steps=50, warmup_steps=0, resume="never", max_lr=3e-4, min_lr=3e-4),
    "--overfit --recipe speedrun": dict(
        MODERN, **NO_EVALUATION, vocab_size=50257, total_batch_size=128, sequence_length=32, shuffle=False,
        max_steps=50, resume="never", min_lr=0.02),
}


@pytest.mark.parametrize("flags", GIVEN)
def test_the_defaults_are(flags):
    """Each spelt out: a default that changes changes what a user's command does."""
    config, given = parse_flags(flags.split())
    words = flags.replace("--", "").split()
    named = {"overfit": True} if words[:1] == ["overfit"] else {}
    named |= {name: words[words.index(name) + 1] for name in ("preset", "recipe") if name in words}
    assert vars(config) == DEFAULTS | GIVEN[flags] | named
    assert {type(value) for value in vars(config).values()} <= {int, float, str, bool, type(None)}
    assert given == {*named}


def test_what_a_config_is_without_flags():
    assert vars(Config()) == DEFAULTS


# ----------------------------------------------------------------------------- what a flag takes

WITH = {"cooldown": ["--recipe", "speedrun"],
        "n_embd": ["--n_head", 1], "n_head": ["--n_embd", 2**40], "min_lr": ["--max_lr", 1e38],
        "vocab_size": ["--hellaswag_every", 0, "--sample_every", 0]}
BLOCKS = ["--block_size", 2**40]


def takes(name, value):
    """Whether the flag is taken, and gives the value; a refusal names it."""
    call = functools.partial(parse_flags, [str(word) for word in (*WITH.get(name, ()), *(
        BLOCKS if name == "sequence_length" else ()), f"--{name}={value}")])
    try:
        config, given = call()
    except UserError:
        refused(call, f"--{name}", value)
        return False
    assert getattr(config, name) == value and name in given
    return True


FROM_0 = ("warmup_steps seed val_every hellaswag_every sample_every checkpoint_every "
          "min_lr weight_decay").split()
INTEGERS = ("val_tokens n_layer n_head n_embd block_size vocab_size total_batch_size batch_size "
            "sequence_length max_steps keep_checkpoints").split() + FROM_0[:6]
LARGEST = {"vocab_size": 65536, "seed": 2**63 - 1, "cooldown": 1.0, "grad_clip": math.inf}
FLOATS = "max_lr min_lr cooldown weight_decay grad_clip".split()


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_a_number_has_bounds(name):
    """Whole ones from 1 on, at most 2^40; others above 0, at most 1e38; with the exceptions of the tables."""
    whole = name in INTEGERS
    smallest, largest = (1, 2**40) if whole else (1e-30, 1e38)
    smallest, largest = 0 if name in FROM_0 else smallest, LARGEST.get(name, largest)
    good = [smallest, largest]
    bad = [-1, *[0] * (name not in FROM_0), "nan", "-inf", "x", "1,000", *["inf"] * (largest != math.inf)]
    bad += [largest + 1, "1.5", "1e3"] if whole else [largest * 1.01] * (largest != math.inf)
    assert [value for value in good if not takes(name, value)] == [], "taken"
    assert [value for value in bad if takes(name, value)] == [], "refused"
    config, _ = parse_flags([*map(str, WITH.get(name, ())), f"--{name}=1"])
    assert type(getattr(config, name)) is (int if whole else float)


WORDS = dict(batch_size="auto", sequence_length="auto", min_lr="auto",
             cooldown="auto", keep_checkpoints="all")


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_a_number_may_be_a_word_where_one_is_meant_and_nowhere_else(name):
    assert [word for word in ("auto", "all", "none", "never") if takes(name, word)] == [
        *filter(None, [WORDS.get(name)])]


@pytest.mark.parametrize("name, values", {
    "preset": "shakespeare small gpt2 gpt2-medium gpt2-large gpt2-xl finetune",
    "recipe": "gpt2 speedrun frontier",
    "dtype": "auto float32 bfloat16 float16", "attention": "auto naive math efficient flash cudnn"}.items())
def test_a_choice_is_one_of(name, values):
    assert all(takes(name, value) for value in values.split())
    first, *_ = values.split()
    assert not any(takes(name, value) for value in ("none", first.upper(), first[:-1]))


@pytest.mark.parametrize("flags, named, good", [
    ("--max_lr 1e-3 --min_lr 1.1e-3", "--min_lr --max_lr", "--max_lr 1e-3 --min_lr 1e-3"),
    ("--n_embd 100 --n_head 7", "--n_embd --n_head", "--n_embd 98 --n_head 7"),
    ("--sequence_length 1025", "--sequence_length --block_size", "--sequence_length 1024"),
    ("--cooldown 0.5", "--cooldown", "--recipe frontier --cooldown 0.5"),
    ("--vocab_size 50256", "--vocab_size --sample_every", "--vocab_size 50257"),
    ("--vocab_size 50256 --sample_every 0", "--vocab_size",
     "--vocab_size 50256 --sample_every 0 --hellaswag_every 0"),
    ("--vocab_size 50256 --hellaswag_every 0", "--vocab_size", "--overfit"),
    ("--overfit --preset small", "--overfit --preset", "--overfit --preset gpt2"),
    ("--overfit --val_every 1", "--overfit --val_every", "--overfit --val_every 0")])
def test_flags_that_contradict_each_other_are_refused(flags, named, good):
    refused(lambda: parse_flags(flags.split()), *named.split())
    parse_flags(good.split())


@pytest.mark.parametrize("line, expected", [
    ("--max-steps 7", dict(max_steps=7)), ("--max_steps=7", dict(max_steps=7)),
    ("--max-steps=7 --max_steps 8", dict(max_steps=8)), ("--max_steps 1_000", dict(max_steps=1000)),
    ("--out=a-b--c --data d-e", dict(out="a-b--c", data="d-e")), ("--sample-prompt=--to-be", dict(
        sample_prompt="--to-be")), ("--no-shuffle", dict(shuffle=False)),
    ("--no_tf32 --tf32", dict(tf32=True)), ("--tf32 --no-tf32", dict(tf32=False)),
    ("--no_compile", dict(compile=False)), ("--compile", dict(compile=True)),
    ("--recompute --shard-optimizer", dict(recompute=True, shard_optimizer=True)),
    ("--min_lr 0", dict(min_lr=0.0)), ("--grad_clip inf", dict(grad_clip=math.inf))])
def test_a_flag_is_taken_with_dashes_an_equals_sign_and_the_last_time(line, expected):
    config, given = parse_flags(line.split())
    assert vars(config) == DEFAULTS | expected and given == {*expected}


@pytest.mark.parametrize("line", [
    "--max_step 7", "--no_recompute", "--no_dry_run", "--Max_steps 7", "-n 3", "seven", "--max_steps",
    "--shuffle no", "--data", "--no_data"])
def test_what_is_no_flag_is_refused(line):
    """Also an abbreviation: a later version might mean another flag by it."""
    refused(lambda: parse_flags(line.split()), "--help")


# ----------------------------------------------------------------------------- how a command ends

def ends(how):
    """For run_command: a command that ends by this error, or returns this."""
    if isinstance(how, BaseException):
        raise how
    return how


def test_the_exit_code_and_the_line_on_stderr_say_how_a_command_ended():
    dirty = UserError("a\nb \x1b[31mc\u202e\0 d" + "e" * 50)
    ways = [(None, 0, 0), (0, 0, 0), (3, 3, 0), (dirty, 2, 1), (RunError("it failed"), 1, 1), (
        KeyboardInterrupt(), 130, 1), (OSError("unforeseen"), 1, 2)]
    found = forked(*[functools.partial(run_command, functools.partial(ends, how)) for how, _, _ in ways])
    assert [code for code, _, _ in found] == [code for _, code, _ in ways]
    lines = [stderr.splitlines() for _, _, stderr in found]
    assert [min(len(said), 2) for said in lines] == [n for _, _, n in ways], lines
    assert lines[3][0].endswith(f": a b ?[31mc?? d{'e' * 50}") and lines[4][0].endswith(": it failed")
    assert "Ctrl-C" in lines[5][0] and "Traceback" in lines[6][0] and "unforeseen" in lines[6][-1]
