"""The same numbers wherever they are computed: in forward, the loss, samples, HellaSwag; with a cache and
without; in float32, bfloat16 and float16; at the beginning of a sequence and beyond 256 tokens; in the step,
and in what evaluates it."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import hellaswag
from helpers import ROOT, hellaswag_file, logged, train
from recipes import MODELS, load_model
from peers import make_model, tokens
from runtime.tokenizer import EOT, encode, tokenizer
from test_guards import (QUIET, TINY, column, shards, start, text_shards)    # noqa: F401
from test_hellaswag import make_examples, plain_counts, plain_scores

MODERN = {"speedrun": 30.0, "frontier": 15.0}           # their softcaps


def confident(recipe, scale, **shape):
    """A model whose logits, but for a softcap, are `scale` times as large. In the modern ones only they: the
    embedding is normed."""
    model = make_model(cls=MODELS[recipe], **shape)
    enlarge_logits(model, scale)
    return model


def enlarge_logits(model, scale):
    with torch.no_grad():
        model.lm_head.weight *= scale           # frontier's and gpt2's embedding, too
        if "part" in model.transformer:         # is added to it
            model.transformer.part.weight *= scale


# ----------------------------------------------------------------------------- the softcap

@pytest.mark.parametrize("recipe, cap", MODERN.items())
def test_the_softcap_is_a_tanh_of_this_height(recipe, cap):
    model, idx = confident(recipe, 1), tokens(4, 24)
    with torch.no_grad():
        once = model(idx)[0].double()
        enlarge_logits(model, 0.4 * cap)
        found = model(idx)[0]
        enlarge_logits(model, 1000)
        largest = model(idx)[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert model(idx)[0].dtype == torch.float32, "bfloat16 would round 14.98 to 15"
    expected = cap * torch.tanh(0.4 * cap * torch.atanh(once / cap))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert expected.abs().max() > 0.6 * cap and largest.max() == cap == -largest.min()


@pytest.mark.parametrize("recipe", MODELS)
def test_two_sampled_tokens_have_the_frequencies_of_forwards_softmax(recipe):
    """At a temperature at which logits that no softcap bends would be sampled otherwise; the second token is
    sampled with the cache."""
    model, n, V = confident(recipe, 40, vocab_size=10, n_layer=1), 20_000, 10
    idx, temperature = tokens(1, 5, vocab_size=V), 150 if recipe == "gpt2" else 7
    generator = torch.Generator().manual_seed(1)
    pairs = model.generate(idx.repeat(n, 1), 2, temperature, None, generator)[:, 5:]
    found = torch.bincount(pairs[:, 0] * V + pairs[:, 1], minlength=V * V) / n
    with torch.no_grad():
        first = (model(idx)[0][0, -1] / temperature).softmax(-1)
        longer = torch.cat((idx.repeat(V, 1), torch.arange(V)[:, None]), dim=1)
        second = (model(longer)[0][:, -1] / temperature).softmax(-1)
    expected = (first[:, None] * second).flatten()
    assert 0.02 < expected.max() < 0.3, expected.max()
    # a fair sample is 0.02 away
    assert (found - expected).abs().sum() / 2 < 0.05


@pytest.mark.parametrize("recipe", MODELS)
def test_hellaswag_scores_large_logits_as_forward_does(recipe):
    model, examples = confident(recipe, 20, vocab_size=50304, n_layer=1, block_size=64), make_examples(10, 5)
    scores = plain_scores(model, examples)
    for example, score in zip(examples, scores, strict=True):
        counts = hellaswag.evaluate(model, hellaswag.make_batches([example], 64), "cpu")
        assert counts.tolist() == plain_counts([score], [example])
    assert 0 < plain_counts(scores, examples)[0] < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", MODELS)
def test_the_losses_of_tokens_are_those_of_forward_and_computed_in_float32(recipe, dtype):
    model, idx, targets = confident(recipe, 20), tokens(3, 24), tokens(3, 24, seed=2)
    targets[:, ::3] = -1
    positions = (targets >= 0).flatten().nonzero().flatten()
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        losses = model.token_losses(idx, targets, positions)
        logits, whole = model(idx)[0].float(), model(idx, targets)[1]
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses.flatten(), plain, rtol=1e-4, atol=1e-4)
    assert whole.item() == pytest.approx(plain.sum().item() / len(positions), rel=1e-4)


def test_probabilities_are_float32_in_bfloat16_too(monkeypatch):
    """Of 50,257 numbers with 8 bits each the sum is off by percents."""
    model, seen, draw = confident("gpt2", 1), [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *args, **how: seen.append(p) or draw(p, *args, **how))
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(tokens(2, 5), 3)
    assert [p.dtype for p in seen] == [torch.float32] * 3
    assert all((p.sum(-1) - 1).abs().max() < 1e-5 for p in seen)


def test_by_default_a_token_is_one_of_the_50_likeliest_at_temperature_1():
    model, idx = confident("gpt2", 1), tokens(4, 5)
    found, same = (model.generate(idx, 19, *how, generator=torch.Generator().manual_seed(3))
                   for how in ((), (1.0, 50)))
    assert torch.equal(found, same)


# ----------------------------------------------------------------------------- positions, caches, norms

@pytest.mark.parametrize("recipe", MODELS)
def test_with_a_cache_each_token_is_the_likeliest_of_a_whole_forward_beyond_256_and_block_size(recipe):
    shape = {} if recipe == "gpt2" else {"vocab_size": 50304}
    model = make_model(cls=MODELS[recipe], block_size=275, n_embd=32, n_head=2, **shape)
    idx = tokens(2, 250)
    if recipe != "gpt2":                        # several documents, one of which begins with the last token
        idx[0, [3, 100, 101, 249]] = idx[1, [0, 200]] = EOT
    found = model.generate(idx, 28, temperature=0)
    with torch.no_grad():
        logits = [model(found[:, :275])[0][:, 249:, :50257]]
        logits += [model(found[:, n - 275:n])[0][:, -1:, :50257] for n in range(276, 278)]
    logits = torch.cat(logits, dim=1)                                       # (2, 28, V)
    chosen = logits.gather(2, found[:, 250:, None])[..., 0]
    assert (chosen >= logits.amax(-1) - 1e-4).all()
    assert len({*found[:, 250:].flatten().tolist()}) > 1


@pytest.mark.parametrize("recipe", MODERN)
def test_in_bfloat16_a_small_embedding_is_normed_as_in_float32(recipe):
    """Whose mean square is some 1e-6: as eps the 2^-7 of bfloat16 would leave little of it."""
    model, idx = make_model(cls=MODELS[recipe], spread=0.1, n_embd=32), tokens(2, 24)
    enlarge_logits(model, 1e-3 / model.transformer.wte.weight.std())
    if recipe == "speedrun":
        with torch.no_grad():
            model.transformer.wte.weight *= 1e-3 / model.transformer.wte.weight.std()
    with torch.no_grad():
        expected = model(idx)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = model(idx)[0]
    assert (found - expected).norm() < 0.03 * expected.norm()


# ----------------------------------------------------------------------------- in a run

def test_float16_with_its_scaler_has_the_losses_norms_and_weights_of_float32(shards, start, tmp_path):
    """Where each step is clipped: a gradient that is still scaled is 65,536 times as large."""
    outs = {}
    for dtype in ("float32", "float16"):
        outs[dtype] = tmp_path / dtype
        train("--data", shards, "--init", start, *TINY, *QUIET, "--dtype", dtype, "--batch_size", 4,
              "--grad_clip", 0.3, "--max_steps", 12, "--warmup_steps", 2, "--max_lr", 2e-3,
              "--checkpoint_every", 12, "--out", outs[dtype])
    for name, tolerance in (("train", 5e-3), ("norm", 0.02), ("lr", 1e-9)):
        exact, found = (column(out, name) for out in outs.values())
        assert len(found) == 12 and found == pytest.approx(exact, rel=tolerance), name
    begin, exact, found = (torch.cat([p.flatten() for p in load_model(path).parameters()])
                           for path in (start, *outs.values()))
    assert (found - exact).norm() < 0.2 * (exact - begin).norm()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Flags of a run with GPT-2's tokens that evaluates all that there is, at steps 0 and 2."""
    folder = tmp_path_factory.mktemp("spoken")
    text_shards(folder, encode((ROOT / "input.txt").read_text()[:20_000]), 1000)
    return ["--data", folder, "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", 64, "--device",
            "cpu", "--total_batch_size", 256, "--batch_size", 2, "--max_steps", 2, "--val_every", 2,
            "--val_tokens", 5 * 64, "--sample_every", 2, "--checkpoint_every", 0, "--hellaswag_every", 2,
            "--hellaswag_data", hellaswag_file(folder / "h.jsonl", 8)]


@pytest.mark.parametrize("recipe", MODELS)
def test_all_that_a_run_evaluates_is_computed_in_its_dtype(recipe, spoken, tmp_path, capsys):
    """And without gradients, which only the steps need."""
    seen = []

    def look(module, inputs, output):
        if isinstance(module, nn.Linear):
            seen.append((torch.is_grad_enabled() and output.size(0) * output.size(1), output.dtype))
    hook = register_module_forward_hook(look)
    try:
        train(*spoken, "--recipe", recipe, "--dtype", "bfloat16", "--out", tmp_path)
    finally:
        hook.remove()
    assert {dtype for _, dtype in seen} == {torch.bfloat16}
    layers = 4 if recipe == "gpt2" else 6
    assert 0 < sum(tokens for tokens, _ in seen) <= 2 * 256 * layers, "those of two steps"
    shown = capsys.readouterr().out
    assert "sample 3: " in shown
    assert list(logged(tmp_path, "hella")) == list(logged(tmp_path, "val")) == [0, 2]


def test_steps_and_validation_run_compiled_in_one_shape_each_and_nothing_else_does(spoken, tmp_path,
                                                                                   monkeypatch):
    calls = []

    def compile(model, **how):
        assert how["dynamic"] is False          # True, or torch's choice, would compile a slower graph
        def compiled(x, y):
            calls.append((torch.is_grad_enabled(), tuple(x.shape)))
            return model(x, y)
        return compiled
    monkeypatch.setattr(torch, "compile", compile)
    train(*spoken, "--compile", "--dtype", "float32", "--out", tmp_path)
    assert {shape for _, shape in calls} == {(2, 64)}
    steps = [grad for grad, _ in calls].count(True) - 2             # but the two of the trial
    assert steps == 2 * 2 and len(calls) - steps - 2 == 2 * 3       # five sequences, the sixth is padding


def test_samples_in_training_continue_the_prompt_and_leave_the_random_numbers_alone(spoken, tmp_path, capsys):
    """Four of 32 tokens, drawn with seed 42 from the 50 likeliest; the same text whenever they are drawn."""
    flags = [*spoken, "--hellaswag_every", 0, "--val_every", 0, "--sample_every", 1, "--max_lr", 1e-12,
             "--dtype", "float32", "--checkpoint_every", 2]
    end = " a b c d e f g h i j k l m n o p q r s t u v w x" * 2 + " y z A B C D E F G H I J K L M N"
    assert len(encode(end)) == 64
    for i, (prompt, begin) in enumerate((("Hello, I'm", encode("Hello, I'm").tolist()), ("", [EOT]),
                                         ("start" * 40 + end, encode(end).tolist()))):  # keeps its end
        out = tmp_path / str(i)
        train(*flags, "--sample_prompt", prompt, "--out", out)
        rows = load_model(out).generate(torch.tensor([begin] * 4), 32, 1.0, 50,
                                        torch.Generator().manual_seed(42))
        texts = [tokenizer().decode(row).removeprefix("<|endoftext|>") for row in rows.tolist()]
        expected = "".join(f"sample {i}: {text}\n" for i, text in enumerate(texts))
        shown = capsys.readouterr().out
        assert shown.count(expected) == 2 == len(re.findall(r"^sample 0: ", shown, re.M))
        assert rows.size(1) == len(begin) + 32 and not torch.equal(rows[0], rows[1])
