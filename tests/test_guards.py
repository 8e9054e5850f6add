"""Guards: what a rewrite could break without any other test noticing. They know the contract alone: flags,
log.txt, metrics.csv, checkpoints, the models' classes and RECIPES; inside a run they see through torch's own
hooks. The runs are tiny, and most are in the tests' process.
"""
import csv
import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import hellaswag
import train_gpt2
from helpers import ROOT, hellaswag_file, logged, refused, run, striking, train
from model import GPT, GPTConfig
from recipes import fresh_model, load_model
from runtime.dataloader import stable_permutation
from runtime.files import checkpoints
from runtime.shards import write_shard
from runtime.tokenizer import encode

T = 32
# bytes instead of GPT-2's tokens, where these are not needed: a sixth of the time
TINY = ["--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", T, "--vocab_size", 256, "--dtype",
        "float32", "--total_batch_size", 8 * T, "--device", "cpu"]
QUIET = ["--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0]


def column(out, name):
    """{step: number} of a column of OUT/metrics.csv."""
    with open(out / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def text_shards(folder, tokens, *cuts):
    """Shards of tokens: up to the first of the `cuts` for validation, between the others for training."""
    for i, (a, b) in enumerate(zip((0, *cuts), (*cuts, len(tokens)), strict=True)):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


def text_bytes(n):
    """Shakespeare's first bytes."""
    return np.frombuffer((ROOT / "input.txt").read_bytes()[:n], dtype=np.uint8).astype(np.uint16)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three training shards of odd lengths and one for validation."""
    return text_shards(tmp_path_factory.mktemp("shards"), text_bytes(12_001), 3000, 4517, 9000)


def sequences(folder, T=T):
    """For each training shard its sequences, int64 (n, T + 1)."""
    shards = [torch.from_numpy(np.load(path).astype(np.int64)) for path in sorted(folder.glob("*_train_*"))]
    return [torch.stack([shard[i:i + T + 1] for i in range(0, len(shard) - T, T)]) for shard in shards]


def batches(rows, count, size=8):
    """The first `count` batches of `size` sequences of rows (n, T + 1), over and over."""
    for step in range(count):
        yield torch.stack([rows[i % len(rows)] for i in range(size * step, size * (step + 1))])


def save_start(path, model, recipe):
    torch.save({"model": model.state_dict(), "model_config": dict(vars(model.config)), "recipe": recipe},
               path)
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights to start from, larger than fresh ones: gradients then differ from step to step."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=T, vocab_size=256, n_layer=2, n_head=2, n_embd=32))
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return save_start(tmp_path_factory.mktemp("start") / "start.pt", model, "gpt2")


# ----------------------------- one step: scale of the gradients, clipping, order of the tokens

@pytest.mark.parametrize("processes", [1, 2])
def test_25_steps_equal_a_plain_loop_in_loss_and_norm_and_all_are_clipped(processes, shards, start, tmp_path):
    """AdamW does not feel a constant factor of the gradient, a mean that is a sum, or a clipping at each
    step to the same norm; `norm` does, and clipping by a factor that changes."""
    norms = equal_a_plain_loop(0.3, 25, shards, start, tmp_path, processes)
    assert min(norms) > 0.3


def test_gradients_below_the_largest_norm_are_left_alone_and_others_clipped_to_it(shards, start, tmp_path):
    norms = equal_a_plain_loop(1.25, 25, shards, start, tmp_path)
    assert 8 < sum(norm > 1.25 for norm in norms) < 20


def equal_a_plain_loop(grad_clip, steps, shards, start, tmp_path, processes=1):
    """Checks losses and norms of that many steps of AdamW and cosine. The norms before clipping."""
    flags = ["--data", shards, "--init", start, *TINY, *QUIET, "--batch_size", 2, "--no_shuffle",
             "--grad_clip", grad_clip, "--max_steps", steps, "--warmup_steps", 5, "--max_lr", 2e-3,
             "--min_lr", 2e-4, "--weight_decay", 0.1, "--out", tmp_path / "log"]
    train(*flags) if processes == 1 else run(*flags, processes=processes)
    losses, norms = logged(tmp_path / "log"), column(tmp_path / "log", "norm")
    model = load_model(start)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step, batch in enumerate(batches(torch.cat(sequences(shards)), steps)):
        loss = F.cross_entropy(model(batch[:, :-1])[0].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip).item()
        progress = (step - 5) / (steps - 5)
        lr = 2e-3 * (step + 1) / 5 if step < 5 else 2e-4 + 0.5 * (1 + math.cos(math.pi * progress)) * 1.8e-3
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), abs=2e-5), step
        assert norms[step] == pytest.approx(norm, rel=1e-3), step
    assert len(losses) == len(norms) == steps
    return list(norms.values())


@pytest.mark.parametrize("flags, seed", [([], 1337), (["--seed", 7], 7), (["--no_shuffle"], None)])
def test_a_run_reads_the_permutation_of_its_seed(flags, seed, shards, start, tmp_path):
    """Shards, then the sequences of each, are permuted by (seed, epoch) and (seed, epoch, shard). 35 steps
    see the 280 sequences once; the learning rate leaves the weights alone."""
    train("--data", shards, "--init", start, *TINY, *QUIET, "--batch_size", 8, *flags, "--max_steps", 35,
          "--warmup_steps", 0, "--max_lr", 1e-12, "--min_lr", 0, "--out", tmp_path / "log")
    by_shard, rows = sequences(shards), []
    for i in range(3) if seed is None else stable_permutation(3, seed, 0):
        n = len(by_shard[i])
        rows += by_shard[i][np.arange(n) if seed is None else stable_permutation(n, seed, 0, i)]
    assert len(rows) == 280
    with torch.no_grad():
        model = load_model(start)
        expected = [model(batch[:, :-1], batch[:, 1:])[1].item() for batch in batches(rows, 35)]
    losses = logged(tmp_path / "log")
    assert [losses[step] for step in range(35)] == pytest.approx(expected, abs=2e-5)


# ----------------------------------------------------------------------------- the modern recipes

STEPS, LONG, LR = 12, 192, 0.02


def modern_model(recipe):
    """Fresh, but for what begins at zero: with it most gradients would be zero at first."""
    torch.manual_seed(5)
    model = fresh_model(train_gpt2.Config(recipe=recipe, n_layer=2, n_head=2, n_embd=32, block_size=LONG,
                                          vocab_size=256))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def adam_and_muon(recipe, model, tokens):
    """As the recipes say (docs/recipes.md), in torch's own optimizers."""
    params = dict(model.named_parameters())
    matrices = [p for name, p in params.items() if ".h." in name and p.dim() == 2]
    scalars = [p for name, p in params.items() if p.dim() < 2]
    table = {name: params.get(f"transformer.{name}.weight") for name in ("wte", "part", "bigram")}
    head = 0.1 * LR * 768 / 32
    if recipe == "speedrun":
        groups = [{"params": [table["wte"]], "lr": 15 * LR},
                  {"params": [params["lm_head.weight"]], "lr": head}]
    else:
        groups = [{"params": [table["wte"], table["part"]], "lr": head, "eps": 0.1 / tokens},
                  {"params": [table["bigram"]], "lr": 1.5 * LR}]
    adam = torch.optim.Adam([*groups, {"params": scalars, "lr": LR}], eps=1e-8, foreach=False,
                            betas=(0.9 if recipe == "speedrun" else 0.7, 0.95))
    assert sum(len(group["params"]) for group in adam.param_groups) + len(matrices) == len(params)
    return adam, torch.optim.Muon(matrices, lr=LR, weight_decay=0.05, nesterov=True, adjust_lr_fn="original")


def set_momentum(muon, momentum):
    """torch's Muon averages, ours sums: a sum whose momentum changes is an average that is scaled."""
    for group in muon.param_groups:
        for state in (muon.state[p] for p in group["params"]):
            if state:
                state["momentum_buffer"] *= (1 - momentum) / (1 - group["momentum"])
        group["momentum"] = momentum


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_12_steps_of_a_modern_recipe_equal_a_plain_loop_with_torchs_adam_and_muon(recipe, shards, tmp_path,
                                                                                  monkeypatch):
    """With the schedules of learning rate and momentum, weight decay, and for frontier a batch that grows."""
    model, sizes = modern_model(recipe), [4] * STEPS if recipe == "speedrun" else [1] * 7 + [2] * 3 + [4] * 2
    init = save_start(tmp_path / "start.pt", model, recipe)
    train("--data", shards, "--init", init, "--recipe", recipe, *TINY, *QUIET, "--block_size", LONG,
          "--no_shuffle", "--batch_size", 2,
          "--total_batch_size", 4 * LONG, "--max_lr", LR, "--min_lr", 0.1 * LR, "--cooldown", 0.5,
          "--warmup_steps", 2, "--weight_decay", 0.05, "--max_steps", STEPS, "--checkpoint_every", STEPS,
          "--out", tmp_path / "log")
    losses, norms, lrs = (column(tmp_path / "log", name) for name in ("train", "norm", "lr"))
    adam, muon = adam_and_muon(recipe, model, 4 * LONG)
    largest = {id(group): group["lr"] for optimizer in (adam, muon) for group in optimizer.param_groups}
    # torch's Muon iterates in bfloat16, the run in float32
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    rows = torch.cat(sequences(shards, LONG))
    for step, size in enumerate(sizes):
        first = sum(sizes[:step])
        progress, batch = first / sum(sizes), torch.stack([rows[i % len(rows)]
                                                           for i in range(first, first + size)])
        rate = min((step + 1) / 2, 0.1 + 0.9 * min(1, (1 - progress) / 0.5))
        lowest, highest = (0.85, 0.95) if recipe == "speedrun" else (0.80, 0.85)
        set_momentum(muon, lowest + (highest - lowest) * min(1, progress / 0.154))
        for group in (*adam.param_groups, *muon.param_groups):
            group["lr"] = largest[id(group)] * rate
        loss = model(batch[:, :-1], batch[:, 1:])[1]
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        adam.step()
        muon.step()
        model.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), abs=1e-5), step
        assert norms[step] == pytest.approx(norm.item(), rel=2e-3, abs=1e-4), step
        assert lrs[step] == pytest.approx(LR * rate, rel=1e-5)
    weights = load_model(tmp_path / "log").state_dict()
    before = torch.load(init)["model"]
    for name, p in model.named_parameters():
        assert (weights[name] - p).norm() <= 1e-4 * (p - before[name]).norm(), name


def test_the_loops_hellaswag_is_acc_norm(tmp_path, capsys):
    text = text_shards(tmp_path, encode((ROOT / "input.txt").read_text()[:9999]), 100)
    examples = hellaswag_file(tmp_path / "h.jsonl", 30)
    train("--data", text, *QUIET, "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", 64,
          "--dtype", "float32", "--device", "cpu", "--total_batch_size", 64, "--max_steps", 2,
          "--hellaswag_every", 2, "--hellaswag_data", examples, "--checkpoint_every", 2,
          "--out", tmp_path / "log")
    capsys.readouterr()
    hellaswag.main(["--model", str(tmp_path / "log"), "--device", "cpu", "--data", str(examples)])
    shown = re.findall(r"(acc|acc_norm): (\d+)/30", capsys.readouterr().out)
    printed = {name: int(n) / 30 for name, n in shown}
    assert printed["acc"] != printed["acc_norm"]
    for found in (logged(tmp_path / "log", "hella"), column(tmp_path / "log", "hella")):
        assert found[2] == pytest.approx(printed["acc_norm"], abs=1e-6)


@pytest.mark.parametrize("bad, steps", [("gradient", range(2, 200)), ("loss", range(1))])
def test_float16_without_one_finite_gradient_or_loss_ends_in_one_line(bad, steps, shards, tmp_path):
    def nan(module, inputs, output):
        if type(module).__name__ == "GPT" and bad == "loss":
            return output[0], output[1] * torch.nan
        if type(module).__name__ == "GPT" and output[1].requires_grad:
            output[1].register_hook(lambda gradient: gradient * torch.nan)
    hook = register_module_forward_hook(nan)
    try:
        refused(lambda: train("--data", shards, *TINY, *QUIET, "--dtype", "float16", "--max_steps", 400,
                              "--out", tmp_path / "log"), "finite", failed=True)
    finally:
        hook.remove()
    assert len(logged(tmp_path / "log")) in steps


def test_an_explicit_compile_that_cannot_compile_ends_in_one_line_before_it_trains(shards, tmp_path,
                                                                                   monkeypatch):
    torch.compiler.reset()                      # of graphs that earlier tests have compiled
    compile = torch.compile

    def no_compiler(graph, inputs):
        raise FileNotFoundError("no C++ compiler")
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile(model, backend=no_compiler))
    refused(lambda: train("--data", shards, *TINY, *QUIET, "--max_steps", 2, "--compile",
                          "--out", tmp_path / "log"), "--no_compile", "no C++ compiler", failed=True)
    torch.compiler.reset()
    assert not list(tmp_path.iterdir())


def test_a_signal_in_the_last_step_of_two_ranks_is_answered(shards, tmp_path):
    flags = ["--data", shards, *TINY, *QUIET, "--batch_size", 4, "--max_steps", 4, "--val_every", 4,
             "--val_tokens", 256, "--checkpoint_every", 100, "--out", tmp_path]
    assert "SIGTERM" in run(*flags, processes=2, before=striking("step 3", "SIGTERM")).stdout
    assert checkpoints(tmp_path)[-1][0] == 4 and list(logged(tmp_path, "val")) == [0]
    run(*flags, processes=2)                    # goes on with what is left
    assert list(logged(tmp_path)) == [0, 1, 2, 3] and list(logged(tmp_path, "val")) == [0, 4]
