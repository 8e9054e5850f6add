"""The same numbers on any number of ranks, with any micro-batch, and in plain loops with torch's
own optimizers. (frontier's on several ranks: test_frontier.py.)"""
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, hellaswag_file, logged, run, train
from peers import make_model

from recipes import fresh_model, load_model
from runtime.shards import write_shard
from runtime.tokenizer import encode
from train_gpt2 import Config

T = 32
QUIET = [
    "--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0,
]


def write_text(folder, ids, cut):
    write_shard(folder / "text_val_000000.npy", ids[:cut].astype(np.uint16))
    write_shard(folder / "text_train_000001.npy", ids[cut:].astype(np.uint16))
    return folder


# ----------------------------------------------------------------------- ranks and micro-batches

@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run with 31 sequences to validate and 12 examples, which no number of ranks divides."""
    folder = tmp_path_factory.mktemp("words")
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:20_000]
    write_text(folder, encode(text), 1000)
    examples = hellaswag_file(folder / "examples.jsonl", 12)
    return [
        "--data", folder, "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", T,
        "--dtype", "float32", "--device", "cpu", "--total_batch_size", 8 * T, "--max_steps", 6,
        "--warmup_steps", 2, "--max_lr", 3e-3, "--val_every", 3, "--val_tokens", 31 * T,
        "--hellaswag_every", 3, "--hellaswag_data", examples, "--sample_every", 0,
        "--checkpoint_every", 6,
    ]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """OUT of one process that computes each step at once."""
    out = tmp_path_factory.mktemp("alone")
    train(*flags, "--batch_size", 8, "--out", out)
    assert logged(out)[5] < logged(out)[0]
    return out


def assert_same_numbers(out, alone):
    for column in ("train", "norm", "lr", "val"):
        expected = logged(alone, column)
        assert logged(out, column) == pytest.approx(expected, rel=2e-5, abs=1e-5), column
    assert logged(out, "hella") == logged(alone, "hella")
    assert logged(out, "tokens") == logged(alone, "tokens")

    weights = load_model(alone).state_dict()
    for name, tensor in load_model(out).state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_micro_batch_changes_no_number(batch_size, flags, alone, tmp_path):
    train(*flags, "--batch_size", batch_size, "--out", tmp_path)
    assert_same_numbers(tmp_path, alone)


@pytest.mark.parametrize("processes, more", [
    (2, ["--batch_size", 1]),
    (4, ["--batch_size", 2]),
    (2, ["--batch_size", 4, "--shard_optimizer"]),
])
def test_the_number_of_ranks_changes_no_number(processes, more, flags, alone, tmp_path):
    run(*flags, *more, "--out", tmp_path, processes=processes)
    assert_same_numbers(tmp_path, alone)


def compile_without_a_compiler():
    """Inductor's C++ compiler takes most of a minute."""
    compile = torch.compile

    def compile_by_dynamo_alone(model, dynamic):
        return compile(model, backend="eager", dynamic=dynamic)

    torch.compile = compile_by_dynamo_alone


def test_compiled_ranks_that_sample_have_the_same_numbers(flags, alone, tmp_path):
    result = run(*flags, "--compile", "--batch_size", 1, "--sample_every", 3, "--out", tmp_path,
                 processes=2, before=[compile_without_a_compiler])
    assert_same_numbers(tmp_path, alone)
    assert result.stdout.count("sample 3: ") == 2, "rank 0 alone prints, at the steps 3 and 6"


def test_the_sanity_run_has_the_same_batch_on_several_ranks(tmp_path):
    flags = ["--overfit", "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--dtype", "float32",
             "--device", "cpu", "--max_steps", 4]
    losses = []
    for processes in (1, 2):
        result = run(*flags, processes=processes, cwd=tmp_path, code=1)
        found = re.findall(r"loss: (\S+)", result.stdout)
        losses.append([float(loss) for loss in found])

    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------- plain loops

BYTES = [
    "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--vocab_size", 256, "--dtype", "float32",
    "--device", "cpu", "--no_shuffle", "--batch_size", 2,
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    text = (ROOT / "input.txt").read_bytes()[:9000]
    folder = tmp_path_factory.mktemp("bytes")
    return write_text(folder, np.frombuffer(text, dtype=np.uint8), 1000)


def sequences(folder, T, count):
    """The first sequences of training, int64 (count, T + 1), over and over."""
    text = torch.from_numpy(np.load(folder / "text_train_000001.npy").astype(np.int64))
    per_epoch = (len(text) - 1) // T
    rows = []
    for i in range(count):
        begin = i % per_epoch * T
        rows.append(text[begin:begin + T + 1])
    return torch.stack(rows)


def save_start(path, model, recipe):
    """A file for --init."""
    config = dict(vars(model.config))
    torch.save({"model": model.state_dict(), "model_config": config, "recipe": recipe}, path)
    return path


def plain_gpt2_training(model, rows, steps, grad_clip):
    """[(loss, norm)] of steps of AdamW on eight sequences each, with GPT-2's schedule."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.2},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    numbers = []
    for step in range(steps):
        if step < 5:
            lr = 2e-3 * (step + 1) / 5
        else:
            lr = 2e-4 + 0.9e-3 * (1 + math.cos(math.pi * (step - 5) / (steps - 5)))
        for group in optimizer.param_groups:
            group["lr"] = lr

        batch = rows[8 * step:8 * step + 8]
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), norm.item()))
    return numbers


def test_25_steps_of_gpt2_equal_a_plain_loop_with_torchs_adamw(shards, tmp_path):
    """Some of the gradients are clipped, and some are not."""
    model = make_model(spread=0.05, block_size=T, vocab_size=256, n_embd=32)
    start = save_start(tmp_path / "start.pt", model, "gpt2")

    train("--data", shards, "--init", start, *BYTES, *QUIET, "--block_size", T,
          "--total_batch_size", 8 * T, "--grad_clip", 1.25, "--max_steps", 25,
          "--warmup_steps", 5, "--max_lr", 2e-3, "--weight_decay", 0.2, "--out", tmp_path / "out")

    expected = plain_gpt2_training(model, sequences(shards, T, 200), 25, 1.25)
    losses, norms = logged(tmp_path / "out"), logged(tmp_path / "out", "norm")
    assert len(losses) == 25
    for step, (loss, norm) in enumerate(expected):
        assert losses[step] == pytest.approx(loss, abs=2e-5)
        assert norms[step] == pytest.approx(norm, rel=1e-3)
    clipped = sum(norm > 1.25 for norm in norms.values())
    assert 3 < clipped < 22


LR = 0.02               # of Muon
MODERN_T = 192
MODERN_STEPS = 12
SIZES = {               # sequences in each step
    "speedrun": [4] * 12,
    "frontier": [1] * 7 + [2] * 3 + [4] * 2,
}


def modern_model(recipe):
    """A new one, but for what begins at zero: with it most gradients would be zero at first."""
    torch.manual_seed(5)
    config = Config(recipe=recipe, n_layer=2, n_head=2, n_embd=32, block_size=MODERN_T,
                    vocab_size=256)
    model = fresh_model(config)
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def adam_and_muon(recipe, model):
    """torch's own optimizers with the settings of docs/recipes.md."""
    params = dict(model.named_parameters())
    matrices = [p for name, p in params.items() if ".h." in name and p.dim() == 2]
    scalars = [p for p in params.values() if p.dim() < 2]
    embedding = params["transformer.wte.weight"]
    head_lr = 0.1 * LR * 768 / 32
    if recipe == "speedrun":
        beta1 = 0.9
        groups = [
            {"params": [embedding], "lr": 15 * LR},
            {"params": [params["lm_head.weight"]], "lr": head_lr},
        ]
    else:
        beta1 = 0.7
        eps = 0.1 / (4 * MODERN_T)
        parts = params["transformer.part.weight"]
        groups = [
            {"params": [embedding, parts], "lr": head_lr, "eps": eps},
            {"params": [params["transformer.bigram.weight"]], "lr": 1.5 * LR},
        ]
    groups.append({"params": scalars, "lr": LR})
    adam = torch.optim.Adam(groups, betas=(beta1, 0.95), eps=1e-8)
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=0.05, adjust_lr_fn="original")
    return adam, muon


def set_momentum(muon, momentum):
    """torch's Muon has an average of the gradients, and ours a sum.

    A sum whose momentum changes is an average that is scaled.
    """
    for group in muon.param_groups:
        for p in group["params"]:
            if p in muon.state:
                factor = (1 - momentum) / (1 - group["momentum"])
                muon.state[p]["momentum_buffer"] *= factor
        group["momentum"] = momentum


def modern_schedule(recipe, step, progress):
    """(the factor of all rates, Muon's momentum)."""
    rate = min((step + 1) / 2, 0.1 + 0.9 * min(1, (1 - progress) / 0.5))
    first, last = 0.85, 0.95
    if recipe == "frontier":
        first, last = 0.80, 0.85
    return rate, first + (last - first) * min(1, progress / 0.154)


def plain_modern_training(recipe, model, rows):
    """[(loss, norm, rate)] of the steps of SIZES."""
    adam, muon = adam_and_muon(recipe, model)
    groups = adam.param_groups + muon.param_groups
    peaks = [group["lr"] for group in groups]
    numbers = []
    first = 0
    for step, size in enumerate(SIZES[recipe]):
        rate, momentum = modern_schedule(recipe, step, first / sum(SIZES[recipe]))
        set_momentum(muon, momentum)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate

        batch = rows[first:first + size]
        _, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        adam.step()
        muon.step()
        model.zero_grad()
        numbers.append((loss.item(), norm.item(), LR * rate))
        first += size
    return numbers


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_12_steps_of_a_modern_recipe_equal_a_plain_loop_with_torchs_adam_and_muon(
        recipe, shards, tmp_path, monkeypatch):
    model = modern_model(recipe)
    start = save_start(tmp_path / "start.pt", model, recipe)

    train("--data", shards, "--init", start, "--recipe", recipe, *BYTES, *QUIET,
          "--block_size", MODERN_T, "--total_batch_size", 4 * MODERN_T, "--max_lr", LR,
          "--min_lr", 0.1 * LR, "--cooldown", 0.5, "--warmup_steps", 2, "--weight_decay", 0.05,
          "--max_steps", MODERN_STEPS, "--checkpoint_every", MODERN_STEPS,
          "--out", tmp_path / "out")

    # torch's Muon iterates in bfloat16, and the run in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    expected = plain_modern_training(recipe, model, sequences(shards, MODERN_T, 48))
    losses, norms, rates = [logged(tmp_path / "out", name) for name in ("train", "norm", "lr")]
    for step, (loss, norm, rate) in enumerate(expected):
        assert losses[step] == pytest.approx(loss, abs=1e-5)
        assert norms[step] == pytest.approx(norm, rel=2e-3, abs=1e-4)
        assert rates[step] == pytest.approx(rate, rel=1e-5)

    weights = load_model(tmp_path / "out").state_dict()
    before = load_model(start).state_dict()
    for name, p in model.named_parameters():
        change = p - before[name]
        assert (weights[name] - p).norm() <= 1e-4 * change.norm(), name
