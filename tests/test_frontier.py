"""frontier.py: what it has beside speedrun.py (test_speedrun.py), and a batch that grows."""
import math
import re
import shutil
from bisect import bisect_left
from types import SimpleNamespace as Config

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import logged, run, train
from peers import make_model, make_run, tokens

import frontier
from frontier import (
    FrontierGPT,
    automatic,
    lr_scale,
    muon_momentum,
    parts_of_tokens,
)
from recipes import RECIPES, load_model
from runtime.loss import VocabularySample
from runtime.recipe import make_batch_schedule
from runtime.shards import write_shard
from runtime.tokenizer import EOT, tokenizer

# ----------------------------------------------------------------------- the model

@pytest.mark.parametrize("n_embd", [32, 192])
def test_a_new_model_begins_near_the_loss_of_knowing_nothing(n_embd):
    """Logits of variance 6.25 / n_embd raise it by half of that."""
    torch.manual_seed(0)
    model = FrontierGPT(FrontierGPT.Config(24, 50304, 2, 2, n_embd))
    idx = tokens(8, 25, vocab_size=50257)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    assert loss.item() == pytest.approx(math.log(50304) + 3.1 / n_embd, abs=0.05)


def test_a_new_model_attends_to_what_followed_the_same_token(monkeypatch):
    torch.manual_seed(0)
    model = FrontierGPT(FrontierGPT.Config(64, 97, 1, 2, 256))
    idx = torch.randperm(97)[:24][None]
    idx[0, 20] = idx[0, 6]                      # then 7 holds what followed it before
    scores = []

    def remember_scores(q, k, v, kernel):
        for head in range(2):
            scores.append(k[0, :21, head] @ q[0, 20, head])
        return torch.zeros_like(q)

    monkeypatch.setattr(frontier, "attention", remember_scores)
    model(idx)

    ordinary, shifted = scores
    assert shifted.argmax() == 7
    assert ordinary.argmax() != 7


def test_the_shifted_keys_begin_as_the_queries_of_their_heads():
    """Of three heads these are the last two: half of them, rounded up."""
    model = FrontierGPT(FrontierGPT.Config(32, 97, 2, 3, 48))
    for block in model.transformer.h:
        is_same = (block.attn.c_k.weight == block.attn.c_q.weight).all(1)
        assert not is_same[:16].any()
        assert is_same[16:].all()


# ----------------------------------------------------------------------- the pointer

def model_that_copies(**shape):
    """With random weights as after training, and copies that have a share."""
    shape = {"vocab_size": 50304, "n_layer": 1, "n_embd": 32} | shape
    model = make_model(cls=FrontierGPT, spread=0.1, **shape)
    model.pointer.sentinel_bias.data.fill_(4.0)
    return model


def test_a_new_model_already_copies_what_followed_earlier():
    torch.manual_seed(0)
    model = FrontierGPT(FrontierGPT.Config(64, 50304, 2, 2, 256))
    idx = tokens(4, 12, vocab_size=50257).repeat(1, 2)                          # each row twice
    targets = idx.roll(-1, dims=1)
    new, again = targets.clone(), targets.clone()
    new[:, 11:] = -1
    again[:, :12] = -1
    assert model(idx, new)[1] > 10
    assert model(idx, again)[1] < 4


def test_with_copies_the_probabilities_add_up_to_1():
    model = model_that_copies()
    idx = tokens(2, 24)
    logits, _ = model(idx)
    torch.testing.assert_close(logits.exp().sum(dim=2), torch.ones(2, 24))
    shares, _ = model.copies(model.hidden(idx), idx)
    assert shares[:, -1].sum() > 0.2


def test_no_token_is_copied_behind_its_like():
    model = model_that_copies()
    idx = torch.tensor([[7, 5, 7, 7, 5]])
    shares, _ = model.copies(model.hidden(idx), idx)
    assert ((shares[0] > 0).int().tolist()) == [
        [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 1, 0]]


def test_the_losses_of_single_tokens_have_their_copies():
    model = model_that_copies()
    idx = tokens(2, 24)
    targets = tokens(2, 24, seed=2)
    targets[0, 1:] = idx[0, :-1]                        # copies
    targets[1, 5:9] = -1
    positions = (targets.flatten() >= 0).nonzero().flatten()

    losses = model.token_losses(idx, targets, positions)
    expected = F.cross_entropy(model(idx)[0].mT, targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-3)
    _, mean = model(idx, targets)
    assert losses.sum().item() / len(positions) == pytest.approx(mean.item(), rel=1e-5)


def test_copies_know_the_targets_also_where_a_sample_has_other_numbers_for_them():
    model = model_that_copies()
    assert model.use_chunks(16)
    idx = tokens(2, 24, vocab_size=50257)
    _, expected = model(idx, idx)                       # each token is a copy
    occurrences = np.zeros(50304)
    occurrences[idx.unique()] = 1
    model.vocabulary_sample = VocabularySample(occurrences, seed=0)
    model.vocabulary_sample.draw(0, idx)
    _, sampled = model(idx, idx)
    assert sampled.item() == pytest.approx(expected.item(), abs=0.05)


# ----------------------------------------------------------------------- stems and forms

def rows_of(words, which):
    """The rows of these tokens in the table of parts: their stems (0) or forms (1)."""
    parts = parts_of_tokens(50304)[which]
    rows = set()
    for word in words:
        token = tokenizer().encode_single_token(word)
        rows.add(parts[token].item())
    return rows


def test_each_row_of_the_table_of_parts_is_used():
    stems, forms = parts_of_tokens(50304).tolist()
    assert set(stems) == set(range(23579))
    assert set(forms) == set(range(23579, 23670))


def test_words_of_one_stem_share_its_row_and_have_forms_of_their_own():
    words = ["return", " return", "Return", " Return",
             " returns", " returned", " returning", " Returns"]
    assert len(rows_of(words, 0)) == 1
    assert len(rows_of(words, 1)) == 8


@pytest.mark.parametrize("words", [[" red", "r"], [" sing", "s"]])
def test_a_stem_has_at_least_three_letters(words):
    assert len(rows_of(words, 0)) == 2


@pytest.mark.parametrize("words", [
    [" Returns", " Words"], ["the", "ment"], [" 12", " 7"], [" US", " AM"], [b"\xff", b"\xfe"]])
def test_words_of_one_form_share_its_row(words):
    assert len(rows_of(words, 1)) == 1


def test_numbers_capitals_and_signs_are_different_forms():
    assert len(rows_of(["12", " 12", "THE", "The", b"\xff", "!"], 1)) == 6


def test_white_space_and_padding_keep_stems_of_their_own():
    stems, forms = parts_of_tokens(50304).numpy()
    alone = list(range(EOT, 50304))
    for token in range(EOT):
        if tokenizer().decode_single_token_bytes(token).isspace():
            alone.append(token)
    assert len(alone) == 7 + 48
    assert (np.bincount(stems)[stems[alone]] == 1).all()
    assert len(set(forms[EOT:])) == 1


def test_tokens_of_another_vocabulary_have_stems_of_their_own():
    assert parts_of_tokens(256).tolist() == [list(range(256)), [256] * 256]


# ----------------------------------------------------------------------- a batch that grows

def config_of(batch, T, steps, **more):
    """A run's config with its automatic values, unless others are given."""
    config = Config(
        total_batch_size=batch, sequence_length=T, max_steps=steps, warmup_steps=0, max_lr=0.02)
    return Config(**vars(config) | automatic(config) | more)


# The steps are those of as many tokens as the recipe was tuned with: 0.2M, 0.6M, 2M.
@pytest.mark.parametrize("batch, T, steps, divisor", [
    (4096, 128, 112, 4),
    (4096, 256, 195, 2),
    (4096, 256, 488, 1),
    (2048, 128, 112, 2),
    (2048, 1024, 200, 2),           # --preset shakespeare
    (524288, 1024, 5833, 4),
    (524288, 1024, 2, 4),           # never more
    (4096, 4096, 48, 1),            # from here on: a step has whole sequences
    (4096, 2048, 64, 2),
    (3072, 1024, 48, 1),
    (2048, 1024, 1, 1),
])
def test_the_first_batch_follows_from_the_runs_tokens(batch, T, steps, divisor):
    schedule = make_batch_schedule(frontier.RECIPE, config_of(batch, T, steps), 1)
    assert schedule.tokens(0) == batch // divisor
    assert all(schedule.tokens(step) % T == 0 for step in range(steps))


@pytest.mark.parametrize("batch, T, steps", [
    (4096, 128, 112), (4096, 256, 195), (524288, 1024, 5833)])
def test_each_size_has_a_third_of_the_runs_tokens_or_two(batch, T, steps):
    schedule = make_batch_schedule(frontier.RECIPE, config_of(batch, T, steps), 1)
    third = schedule.tokens_before(steps) / 3
    sizes = [schedule.tokens(step) for step in range(steps)]
    assert sizes == sorted(sizes)
    for size in set(sizes):
        thirds = sizes.count(size) * size / third
        assert thirds == pytest.approx(round(thirds), abs=2 * batch / third)


# ----------------------------------------------------------------------- schedules

@pytest.mark.parametrize("steps, highest", [
    (112, 0.85), (1000, 0.85), (1732, 0.90), (3000, 0.95), (5833, 0.95)])
def test_the_momentum_rises_to_what_the_runs_length_says_and_falls_at_the_end(steps, highest):
    config = config_of(4096, 256, steps)
    schedule = make_batch_schedule(frontier.RECIPE, config, 1)
    momentum = []
    for percent in range(101):          # of the run's tokens
        step = bisect_left(range(steps), percent / 100, key=schedule.progress)
        momentum.append(muon_momentum(step, config))

    assert momentum[0] == 0.80
    assert momentum[25] == pytest.approx(highest, abs=1e-3)
    assert momentum[25] == momentum[50] == max(momentum)
    assert momentum[95] == pytest.approx((0.85 + highest) / 2, abs=1e-2)
    assert momentum[100] == pytest.approx(0.85)


@pytest.mark.parametrize("steps, cooldown, floor", [
    (28, 0.29, 0.0), (112, 0.294, 0.00119), (260, 0.466, 0.0568), (1953, 0.6, 0.1)])
def test_cooldown_and_floor_follow_from_the_runs_steps(steps, cooldown, floor):
    config = config_of(4096, 256, steps)
    assert config.cooldown == pytest.approx(cooldown, abs=1e-3)
    assert config.min_lr / config.max_lr == pytest.approx(floor, abs=1e-3)
    scales = [lr_scale(step, config) for step in range(steps + 1)]
    schedule = make_batch_schedule(frontier.RECIPE, config, 1)
    assert scales[0] == 1
    assert scales == sorted(scales, reverse=True)
    for step in range(steps):
        assert (scales[step] == 1) == (schedule.progress(step) <= 1 - config.cooldown)
    assert scales[steps] == pytest.approx(floor, abs=1e-3)


# ----------------------------------------------------------------------- a run

@pytest.mark.parametrize("sequences, epoch, backward", [
    (7, 10, 0), (10, 10, 0), (13, 10, 3), (20, 10, 10), (35, 10, 10)])
def test_what_comes_before_a_last_epoch_is_read_backwards_but_one_epoch_at_most(
        sequences, epoch, backward):
    assert frontier.read_backwards(Config(init="scratch"), sequences, epoch) == backward
    assert frontier.read_backwards(Config(init="log/before"), sequences, epoch) == 0


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run on n^2 mod 97: what comes next follows from the last two tokens."""
    folder = tmp_path_factory.mktemp("shards")
    squares = (np.arange(3000) ** 2 % 97).astype(np.uint16)
    write_shard(folder / "text_val_000000.npy", squares[:400])
    write_shard(folder / "text_train_000000.npy", squares)
    return [
        "--recipe", "frontier", "--data", folder, "--dtype", "float32",
        "--n_layer", 2, "--n_head", 2, "--n_embd", 16, "--block_size", 16, "--vocab_size", 50304,
        "--total_batch_size", 256, "--max_steps", 8, "--val_every", 8, "--val_tokens", 112,
        "--sample_every", 0, "--hellaswag_every", 0, "--checkpoint_every", 8,
    ]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "log"
    train(*flags, "--out", out)
    return out


def test_processes_and_micro_batches_change_only_rounding(flags, alone, tmp_path):
    out = tmp_path / "log"
    run(*flags, "--batch_size", 2, "--shard_optimizer", "--out", out, processes=2)

    expected, found = logged(alone), logged(out)
    for step in range(8):           # Muon lifts the rounding some 500 times a step
        assert found[step] == pytest.approx(expected[step], abs=2e-4)
    val = logged(alone, "val")
    assert logged(out, "val")[8] == pytest.approx(val[8], abs=0.02)
    assert val[8] < val[0] - 1


def test_a_run_of_more_than_an_epoch_reads_backwards_at_first(flags, tmp_path, capsys):
    """An epoch has 187 sequences, a step at most 16."""
    flags = [*flags, "--val_every", 0, "--out", tmp_path / "log"]
    train(*flags, "--max_steps", 11, "--dry_run")
    assert "backwards" not in capsys.readouterr().out
    train(*flags, "--max_steps", 24)
    assert "backwards" in capsys.readouterr().out


@pytest.fixture(scope="module")
def two_epochs(flags, tmp_path_factory):
    """A run whose text is read backwards before step 17 or so."""
    out = tmp_path_factory.mktemp("two_epochs") / "log"
    train(*flags, "--max_steps", 24, "--val_every", 0, "--out", out)
    return out


@pytest.mark.parametrize("step, backwards", [(8, True), (24, False)])
def test_whoever_reads_a_model_that_writes_backwards_is_told(
        step, backwards, two_epochs, capsys):
    load_model(two_epochs / f"checkpoint_{step:06d}.pt")
    assert ("backwards" in capsys.readouterr().err) == backwards


def test_a_loss_of_a_model_that_writes_backwards_says_so(flags, two_epochs, tmp_path, capsys):
    shutil.copy(two_epochs / "checkpoint_000008.pt", tmp_path)
    train(*flags, "--eval_only", "--out", tmp_path)
    printed = capsys.readouterr()
    assert "validation loss" in printed.out
    assert "backwards" in printed.err


def test_a_run_says_draws_and_validates_where_its_reading_turns(
        flags, tmp_path, monkeypatch, capsys):
    pictures = []
    monkeypatch.setattr("runtime.output.plot_run", lambda *arguments: pictures.append(arguments))
    train(*flags, "--max_steps", 24, "--val_every", 1, "--checkpoint_every", 0, "--out", tmp_path)

    text = capsys.readouterr().out
    turn = int(re.search(r"backwards before step (\d+)", text)[1])
    assert re.findall(r"step +(\d+) \| .* forwards", text) == [str(turn)]

    tokens = logged(tmp_path, "tokens")
    *_, backward_tokens = pictures[-1]
    assert tokens[turn - 1] < backward_tokens <= tokens[turn]
    first = turn
    if tokens[turn] == backward_tokens:         # nothing else has been read yet
        first = turn + 1
    assert list(logged(tmp_path, "val")) == [0, *range(first, 25)]


def look_at_text(run):
    RECIPES[run.config.recipe].look_at_text(
        run.data.train, run.schedule, run.state.model, run.config)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_frontier_alone_computes_the_logits_of_a_sample_drawn_for_each_step(recipe, monkeypatch):
    run = make_run(recipe=recipe, cooldown=0.5)
    monkeypatch.setattr(frontier, "VOCAB_SIZE", 96)
    run.loader.tokens_of_step = lambda step: tokens(8, 25)
    look_at_text(run)
    RECIPES[recipe].before_step(run.state.model, 3, run.loader)

    if recipe != "frontier":
        assert not hasattr(run.state.model, "vocabulary_sample")
        return
    expected = VocabularySample(run.data.train.occurrences(96), run.config.seed)
    expected.draw(3, tokens(8, 25))
    assert run.state.model.vocabulary_sample.counts.equal(expected.counts)


@pytest.mark.parametrize("flags, small", [
    ({"compile": True}, 10**6), ({"overfit": True}, 10**6), ({}, 287),
    ({"vocab_size": 95}, 10**6)])
def test_a_compiled_frontier_an_overfit_one_another_vocabulary_or_a_larger_text_has_all_logits(
        flags, small, monkeypatch):
    """The text of a test has 288 tokens."""
    monkeypatch.setattr(frontier, "SMALL_TEXT", small)
    run = make_run(recipe="frontier", **flags)
    monkeypatch.setattr(frontier, "VOCAB_SIZE", 96)
    look_at_text(run)
    assert run.state.model.vocabulary_sample is None
