"""Whole runs equal a plain loop in torch, written from the papers and from docs/recipes.md."""
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import logged, run, saved, train
from torch.nn import functional as F

from config import Config
from model import GPT, GPTConfig
from recipes import fresh_model, load_model
from runtime.dataloader import stable_permutation

T = 32          # tokens in a sequence of gpt2's runs
LONG = 192      # and of the modern recipes'
TINY = [
    "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--vocab_size", 256, "--dtype", "float32",
    "--device", "cpu", "--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0,
]


def sequences(data, T):
    """For each training shard its sequences, int64 (n, T + 1)."""
    shards = []
    for path in sorted(data.glob("*_train_*")):
        tokens = np.load(path).astype(np.int64)
        tokens = torch.from_numpy(tokens)
        rows = [tokens[i:i + T + 1] for i in range(0, len(tokens) - T, T)]
        shards.append(torch.stack(rows))
    return shards


def save_model(path, model):
    torch.save({
        "model": model.state_dict(), "model_config": asdict(model.config), "recipe": model.recipe,
    }, path)
    return path


# ----------------------------------------------------------------------- gpt2

@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights larger than fresh ones: gradients then differ from step to step."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(T, 256, 2, 2, 32))
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return save_model(tmp_path_factory.mktemp("start") / "start.pt", model)


def adamw(model):
    """AdamW with weight decay on matrices and embeddings."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.2},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)


def rate_of(step, steps):
    """5 steps of warm-up to 2e-3, then a cosine to 2e-4."""
    if step < 5:
        return 2e-3 * (step + 1) / 5
    progress = (step - 5) / (steps - 5)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return 2e-4 + height * (2e-3 - 2e-4)


def plain_gpt2_run(model, rows, grad_clip, steps):
    """[(loss, norm before clipping)] of each step of 8 sequences."""
    optimizer = adamw(model)
    numbers = []
    for step in range(steps):
        numbers_of_rows = torch.arange(8 * step, 8 * step + 8) % len(rows)
        batch = rows[numbers_of_rows]
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers


@pytest.mark.parametrize("grad_clip, processes", [(0.3, 1), (0.3, 2), (1.25, 1)])
def test_losses_and_norms_of_gpt2_are_those_of_a_plain_loop(
        grad_clip, processes, byte_data, start, tmp_path):
    """AdamW does not feel a constant factor of the gradient, but the norm and the clipping do."""
    flags = ["--data", byte_data, "--init", start, *TINY, "--block_size", T, "--no_shuffle",
             "--total_batch_size", 8 * T, "--batch_size", 2, "--grad_clip", grad_clip,
             "--max_steps", 25, "--warmup_steps", 5, "--max_lr", 2e-3, "--min_lr", 2e-4,
             "--weight_decay", 0.2, "--checkpoint_every", 0, "--out", tmp_path]
    if processes == 1:
        train(*flags)
    else:
        run(*flags, processes=processes)

    rows = torch.cat(sequences(byte_data, T))
    expected = plain_gpt2_run(load_model(start), rows, grad_clip, steps=25)

    losses = logged(tmp_path)
    norms = logged(tmp_path, "norm")
    for step, (loss, norm) in enumerate(expected):
        assert losses[step] == pytest.approx(loss, abs=2e-5), step
        assert norms[step] == pytest.approx(norm, rel=1e-3), step
    clipped = sum(norm > grad_clip for norm in norms.values())
    if grad_clip == 0.3:
        assert clipped == 25
    else:
        assert 5 < clipped < 22


@pytest.mark.parametrize("flags, seed", [([], 1337), (["--seed", 7], 7), (["--no_shuffle"], None)])
def test_an_epoch_reads_each_sequence_in_the_order_of_the_seed(
        flags, seed, byte_data, start, tmp_path):
    """Of (seed, epoch) for the shards, and of (seed, epoch, shard) for the sequences in them."""
    rows = []
    by_shard = sequences(byte_data, T)
    shard_order = range(3)
    if seed is not None:
        shard_order = stable_permutation(3, seed, 0)
    for i in shard_order:
        order = np.arange(len(by_shard[i]))
        if seed is not None:
            order = stable_permutation(len(order), seed, 0, i)
        rows.append(by_shard[i][order])
    rows = torch.cat(rows)
    steps = len(rows) // 8

    train("--data", byte_data, "--init", start, *TINY, "--block_size", T, *flags,
          "--total_batch_size", 8 * T, "--max_steps", steps, "--warmup_steps", 0,
          "--max_lr", 1e-12, "--min_lr", 0, "--checkpoint_every", 0, "--out", tmp_path)

    model = load_model(start)
    for step, loss in logged(tmp_path).items():
        batch = rows[8 * step:8 * step + 8]
        with torch.no_grad():
            _, expected = model(batch[:, :-1], batch[:, 1:])
        assert loss == pytest.approx(expected.item(), abs=2e-5), step


# ----------------------------------------------------------------------- speedrun and frontier

LR = 0.02
STEPS = 12


def modern_model(recipe):
    """Fresh, but for what begins at zero: with it most gradients would be zero at first."""
    torch.manual_seed(5)
    model = fresh_model(Config(
        recipe=recipe, n_layer=2, n_head=2, n_embd=32, block_size=LONG, vocab_size=256))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def adam_and_muon(recipe, model, batch_tokens):
    """torch's own Adam and Muon, with the rates of docs/recipes.md."""
    params = dict(model.named_parameters())
    tables_and_head = ("transformer.wte", "transformer.part", "lm_head")
    matrices = []
    for name, p in params.items():
        if p.dim() == 2 and not name.startswith(tables_and_head):
            matrices.append(p)
    scalars = [p for p in params.values() if p.dim() < 2]
    if recipe == "speedrun":
        beta1 = 0.9
        head_lr = 0.1 * LR * 768 / 32
        tables = [params["transformer.wte.weight"]]
        head = [params["lm_head.weight"]]
        groups = [{"params": tables, "lr": 15 * LR}, {"params": head, "lr": head_lr}]
    else:
        beta1 = 0.7
        head_lr = 0.05 * LR * 768 / 32
        tables = [params["transformer.wte.weight"], params["transformer.part.weight"]]
        groups = [{"params": tables, "lr": head_lr, "eps": 0.1 / batch_tokens}]
    groups.append({"params": scalars, "lr": LR, "eps": 1e-6})
    adam = torch.optim.Adam(groups, eps=1e-8, betas=(beta1, 0.95), foreach=False)
    muon = torch.optim.Muon(
        matrices, lr=LR, weight_decay=0.05, nesterov=True, adjust_lr_fn="original")
    return adam, muon


def set_momentum(muon, momentum):
    """torch's Muon averages, ours sums: a sum whose momentum changes is a scaled average."""
    [group] = muon.param_groups
    for p in group["params"]:
        if muon.state[p]:
            muon.state[p]["momentum_buffer"] *= (1 - momentum) / (1 - group["momentum"])
    group["momentum"] = momentum


def modern_rate(step, progress):
    """2 steps of warm-up; over the second half of the run the rate falls to a tenth."""
    warmup = (step + 1) / 2
    cooldown = min(1, (1 - progress) / 0.5)
    return min(warmup, 0.1 + 0.9 * cooldown)


def plain_modern_run(recipe, model, rows, batches):
    """[(loss, norm, rate)] of each step; `batches` has the number of sequences in each."""
    adam, muon = adam_and_muon(recipe, model, 4 * LONG)
    groups = adam.param_groups + muon.param_groups
    peaks = [group["lr"] for group in groups]
    lowest, highest = 0.80, 0.85
    if recipe == "speedrun":
        lowest, highest = 0.85, 0.95

    numbers = []
    first = 0
    for step, size in enumerate(batches):
        progress = first / sum(batches)
        batch = rows[torch.arange(first, first + size) % len(rows)]
        first += size
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

        factor = modern_rate(step, progress)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        set_momentum(muon, lowest + (highest - lowest) * min(1, progress / 0.154))
        adam.step()
        muon.step()
        model.zero_grad()
        numbers.append((loss.item(), norm.item(), LR * factor))
    return numbers


@pytest.mark.parametrize("recipe, batches", [
    ("speedrun", [4] * STEPS),
    ("frontier", [1] * 7 + [2] * 3 + [4] * 2),          # its batch grows
])
def test_a_modern_run_is_that_of_a_plain_loop_with_torchs_adam_and_muon(
        recipe, batches, byte_data, tmp_path, monkeypatch):
    model = modern_model(recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    init = save_model(tmp_path / "start.pt", model)
    train("--data", byte_data, "--init", init, "--recipe", recipe, *TINY, "--block_size", LONG,
          "--no_shuffle", "--total_batch_size", 4 * LONG, "--batch_size", 2, "--max_lr", LR,
          "--min_lr", 0.1 * LR, "--cooldown", 0.5, "--warmup_steps", 2, "--weight_decay", 0.05,
          "--max_steps", STEPS, "--checkpoint_every", STEPS, "--out", tmp_path / "log")

    # torch's Muon iterates in bfloat16, and the run in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    rows = torch.cat(sequences(byte_data, LONG))
    expected = plain_modern_run(recipe, model, rows, batches)

    losses = logged(tmp_path / "log")
    norms = logged(tmp_path / "log", "norm")
    rates = logged(tmp_path / "log", "lr")
    for step, (loss, norm, rate) in enumerate(expected):
        assert losses[step] == pytest.approx(loss, abs=1e-5), step
        assert norms[step] == pytest.approx(norm, rel=2e-3, abs=1e-4), step
        assert rates[step] == pytest.approx(rate, rel=1e-5), step
    weights = saved(tmp_path / "log")["model"]
    for name, p in model.named_parameters():
        assert (weights[name] - p).norm() <= 1e-4 * (p - before[name]).norm(), name
