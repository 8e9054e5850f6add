"""The frontier recipe: what it has beside speedrun's (test_speedrun.py), and a batch that grows."""
import math
import re
from types import SimpleNamespace as Config

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import frontier
import speedrun
from frontier import FrontierGPT, automatic, bigram_hash, muon_momentum, parts_of_tokens
from helpers import logged, refused, run, train
from peers import tokens
from runtime.shards import write_shard
from runtime.tokenizer import EOT, tokenizer
from speedrun import trapezoid
from runtime.recipe import make_batch_schedule


def test_gpt2s_size_has_180_million_parameters_and_starts_near_the_loss_of_knowing_nothing():
    with torch.device("meta"):
        model = FrontierGPT(FrontierGPT.Config())
    blocks = 12 * 12 * 768**2 + 12 * 3
    assert sum(p.numel() for p in model.parameters()) == (2 * 50304 + 23579 + 91) * 768 + blocks
    assert model.lm_head.weight is model.transformer.wte.weight
    # of the tables of bigrams and of parts a token reads rows: no product
    assert model.flops_per_token(1024) == 6 * (50304 * 768 + blocks) + 12 * 12 * 768 * 1024
    for C in (64, 512):                 # logits of variance 25 / C raise it by half of that
        torch.manual_seed(0)
        small = FrontierGPT(FrontierGPT.Config(24, 50304, 2, 2, C))
        idx = tokens(8, 25, vocab_size=50257)
        assert small(idx[:, :-1], idx[:, 1:])[1].item() == pytest.approx(math.log(50304) + 12.5 / C, abs=0.15)


def test_a_new_model_attends_to_what_followed_the_same_token(monkeypatch):
    torch.manual_seed(0)
    model, seen = FrontierGPT(FrontierGPT.Config(64, 97, 1, 2, 256)), []
    idx = torch.randperm(97)[:24][None]
    idx[0, 20] = idx[0, 6]              # then 7 holds what followed it before

    def scores(q, k, v, kernel):
        seen.extend(k[0, :21, head] @ q[0, 20, head] for head in range(2))
        return torch.zeros_like(q)
    monkeypatch.setattr(frontier, "attention", scores)
    model(idx)
    assert seen[1].argmax() == 7 and seen[0].argmax() != 7


def test_tokens_of_one_stem_or_one_form_share_a_row():
    (stems, forms), text = parts_of_tokens(50304).numpy(), tokenizer().decode_single_token_bytes
    assert sorted({*stems}) == [*range(23579)] and sorted({*forms}) == [*range(23579, 23670)]

    def rows(numbers, *words):
        return {numbers[tokenizer().encode_single_token(word)] for word in words}
    words = "return", " return", "Return", " Return", " returns", " returned", " returning", " Returns"
    assert len(rows(stems, *words)) == 1 and len(rows(forms, *words)) == 8
    others = [text(int(i)).decode() for i in np.flatnonzero([*rows(stems, "return")] == stems)]
    assert {re.sub("(s|ed|ing)$", "", word.strip().lower()) for word in others} == {"return"}
    assert len(rows(stems, " red", "r")) == len(rows(stems, " sing", "s")) == 2     # three letters remain
    for words in (" Returns", " Words"), ("the", "ment"), (" 12", " 7"), (" US", " AM"), (b"\xff", b"\xfe"):
        assert len(rows(forms, *words)) == 1
    assert len(rows(forms, "12", " 12", "THE", "The", b"\xff", "!")) == 6 and len(set(forms[EOT:])) == 1
    alone = [*(i for i in range(EOT) if text(i).isspace()), *range(EOT, 50304)]
    assert len(alone) == 7 + 48 and (np.bincount(stems)[stems[alone]] == 1).all()
    assert parts_of_tokens(256).tolist() == [[*range(256)], [256] * 256]


def test_pairs_of_tokens_spread_over_the_rows():
    pairs = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    rows = bigram_hash(pairs, 50304)[:, 1]
    assert rows.min() >= 0 and rows.max() < 50304
    counts = rows.bincount(minlength=50304).double()        # a fair hash: mean = variance, as Poisson's
    assert counts.var() < 2 * counts.mean()
    assert torch.equal(bigram_hash(pairs[:, 1:], 50304)[:, 0], bigram_hash(
        F.pad(pairs[:, 1:], (1, 0), value=EOT), 50304)[:, 1])


# ----------------------------------------------------------------------------- a batch that grows

def run_of(batch, T, steps, **more):
    """A run's config with its automatic values, those that are given excepted."""
    config = Config(total_batch_size=batch, sequence_length=T, max_steps=steps, warmup_steps=0, max_lr=0.02)
    return Config(**vars(config) | automatic(config) | more)


# the steps are those of as many tokens as the recipe's fits were made with: 0.2M, 0.6M, 2M
@pytest.mark.parametrize("batch, T, steps, expected", [
    (4096, 128, 112, 4), (4096, 256, 195, 2), (4096, 256, 488, 1), (2048, 128, 112, 2),
    (2048, 1024, 200, 2),                                       # --preset shakespeare
    (524288, 1024, 5833, 4), (524288, 1024, 2, 4),              # never more
    (4096, 4096, 48, 1), (4096, 2048, 64, 2), (3072, 1024, 48, 1), (2048, 1024, 1, 1)])     # whole sequences
def test_the_first_batch_follows_from_the_runs_tokens(batch, T, steps, expected):
    schedule = make_batch_schedule(frontier.RECIPE, run_of(batch, T, steps), 1)
    assert schedule.tokens(0) == batch // expected
    assert all(schedule.tokens(step) % T == 0 for step in range(steps))
    third = schedule.tokens_before(steps) / 3                   # of the tokens: then it doubles
    sizes = [schedule.tokens(step) for step in range(steps)]
    for size in {batch // 4, batch // 2} & set(sizes):
        assert sizes.count(size) * size == pytest.approx(third, abs=2 * batch)


@pytest.mark.parametrize("recipe", [frontier.RECIPE, speedrun.RECIPE])
def test_the_schedule_knows_nothing_of_the_ranks_and_is_refused_where_they_cannot_share_a_step(recipe):
    config = run_of(16384, 1024, 64)                            # 16 sequences; frontier begins with 4
    alone = make_batch_schedule(recipe, config, 1)
    for ranks in (2, 4):
        shared = make_batch_schedule(recipe, config, ranks)
        assert shared.stages == alone.stages
    first = alone.tokens(0) // 1024
    refused(lambda: make_batch_schedule(recipe, config, 2 * first), "--total_batch_size 16384", "32768")


def test_a_batch_that_does_not_divide_is_refused():
    for batch, ranks, nearest in ((252, 3, " 240 or 255"), (10, 4, " 20")):
        config = run_of(batch, 5, 9)
        said = refused(lambda: make_batch_schedule(speedrun.RECIPE, config, ranks),     # noqa: B023
                       f"--total_batch_size {batch}")
        assert said.endswith(nearest)


@pytest.mark.parametrize("steps, last", [(112, 0.85), (1000, 0.85),
                                         (1732, 0.90),          # half-way in the logarithm
                                         (3000, 0.95), (5833, 0.95)])
def test_the_momentum_follows_from_the_runs_steps(steps, last):
    config = Config(max_steps=steps)
    momentum = [muon_momentum(percent / 100, config) for percent in range(101)]
    assert momentum[0] == 0.80 and max(momentum) == pytest.approx(last, abs=1e-3)
    assert momentum[25] == momentum[50] == max(momentum)
    assert momentum[100] == pytest.approx(0.85) and momentum[95] <= (0.85 + last) / 2 + 1e-3


@pytest.mark.parametrize("batch, T, steps, more, expected", [
    (4096, 128, 28, {}, (0.29, 0)), (4096, 128, 112, {}, (0.294, 0.1 * 0.0119)),
    (4096, 256, 260, {}, (0.466, 0.1 * 0.568)), (4096, 256, 1953, {}, (0.6, 0.1)),
    (4096, 256, 1953, {"cooldown": 0.1}, (0.1, 0.1)), (4096, 256, 1953, {"min_lr": 0.01}, (0.6, 0.5)),
    (4096, 256, 1953, {"min_lr": 0.0}, (0.6, 0))])
def test_cooldown_and_floor_follow_from_the_runs_steps(batch, T, steps, more, expected):
    config = run_of(batch, T, steps, **more)
    assert (config.cooldown, config.min_lr / config.max_lr) == pytest.approx(expected, abs=1e-3)
    assert trapezoid(steps, 1.0, config) == pytest.approx(expected[1], abs=1e-3)
    assert trapezoid(0, 0.0, config) == 1 == trapezoid(9, 0.999 - expected[0], config)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, n in (("val", 400), ("train", 3000)):         # n^2 mod 97 after (n - 1)^2: a pair tells it
        write_shard(folder / f"text_{name}_000000.npy", (torch.arange(n)**2 % 97).numpy().astype("uint16"))
    return ["--recipe", "frontier", "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 16,
            "--vocab_size", 97, "--total_batch_size", 512, "--max_steps", 21, "--val_every", 21,
            "--val_tokens", 320, "--sample_every", 0, "--hellaswag_every", 0, "--checkpoint_every", 21,
            "--dtype", "float32", "--data", folder]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "log"
    train(*flags, "--out", out)
    return out


@pytest.mark.parametrize("processes, batch_size, more", [(2, 1, []), (4, 32, ["--shard_optimizer"]),
                                                         (1, 2, [])])
def test_processes_and_micro_batches_change_only_the_rounding(processes, batch_size, more, flags, alone,
                                                              tmp_path):
    """Of four updates in a step, two, and one."""
    out = tmp_path / "log"
    flags = [*flags, "--batch_size", batch_size, *more, "--out", out]
    train(*flags) if processes == 1 else run(*flags, processes=processes)
    expected, found, val = logged(alone), logged(out), logged(alone, "val")
    assert len(expected) == 21
    for step in range(8):           # Muon lifts the rounding some 500 times a step
        assert found[step] == pytest.approx(expected[step], abs=2e-4)
    assert logged(out, "val")[21] == pytest.approx(val[21], abs=0.02) and val[21] < val[0] - 1
