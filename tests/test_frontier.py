"""The frontier recipe: its model against an independent reference, and several updates a step."""
import dataclasses
import math
import re
from types import SimpleNamespace as Config

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from frontier import FrontierGPT, automatic, bigram_hash, muon_momentum, stems_of_tokens
from helpers import ROOT, hellaswag_file, logged, run, script
from model import load_model
from runtime.cli import UserError
from runtime.language_model import ModernConfig
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from speedrun import trapezoid


def make_model(seed=0, **shape):
    """With random weights as after training: those of a new model's branches are all zero."""
    torch.manual_seed(seed)
    tiny = dict(block_size=24, vocab_size=97, n_layer=3, n_head=2, n_embd=32)
    model = FrontierGPT(ModernConfig(**tiny | shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.dim() == 2 else 0.3))
    return model


def tokens(*shape, seed=1, vocab_size=97):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def plain_frontier(w, heads, idx, stems):
    """The model in float64, position by position and head by head. w: name -> float64 tensor; stems: the row
    of the stem table for each token."""
    table = w["transformer.wte.weight"] + w["transformer.stem.weight"][stems]

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def turn(x):                        # (T, hs): rotates the pair (x_i, x_{i + hs/2}) by t / 10000^(2i/hs)
        T, hs = x.shape
        angle = torch.arange(T)[:, None] / 10000 ** (2 * torch.arange(hs // 2)[None] / hs).double()
        a, b = x[:, :hs // 2], x[:, hs // 2:]
        return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), 1)
    results = []
    for row in idx.tolist():
        rows = len(w["transformer.bigram.weight"])
        pairs = [((36313 * token) ^ (27191 * (EOT if token == EOT else before))) % rows
                 for before, token in zip([EOT, *row], row, strict=False)]
        x = x0 = rms(rms(table[row]) + w["transformer.bigram.weight"][pairs])
        first_values = None
        for n in range(sum(name.endswith("lambdas") for name in w)):
            g = {name.split(f"h.{n}.")[1]: value for name, value in w.items() if f"h.{n}." in name}
            x = g["lambdas"][0] * x + g["lambdas"][1] * x0
            u = rms(x)
            q, k, v = (u @ g[f"attn.c_{c}.weight"].t() for c in "qkv")
            first_values = v if first_values is None else first_values
            v = (1 - g["attn.lamb"]) * v + g["attn.lamb"] * first_values
            ys = []
            parts = zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True)
            for head, (q_h, k_h, v_h) in enumerate(parts):
                k_h = turn(rms(k_h))
                if head >= heads // 2:          # late: the key of the token before, none if a document begins
                    k_h = torch.stack([0 * k_h[0] if t == 0 or row[t] == EOT else k_h[t - 1]
                                       for t in range(len(row))])
                scores = turn(rms(q_h)) @ k_h.t() / math.sqrt(q_h.size(-1))
                mask = torch.arange(len(row))[None, :] > torch.arange(len(row))[:, None]
                ys.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v_h)
            x = x + torch.cat(ys, -1) @ g["attn.c_proj.weight"].t()
            x = x + (rms(x) @ g["c_fc.weight"].t()).clamp(min=0).pow(2) @ g["c_proj.weight"].t()
        results.append(15 * torch.tanh(rms(x) @ table.t() / 15))
    return torch.stack(results)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_logits_loss_and_gradients_equal_a_plain_reference(heads):
    model = make_model(n_head=heads, n_embd=12 * heads, vocab_size=50304)
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    targets[0, :3], idx[0, 4], idx[1, 0] = -1, EOT, EOT
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_frontier(weights, heads, idx, model.stems)
    torch.testing.assert_close(model(idx)[0].double(), expected, rtol=1e-4, atol=2e-4)
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    for chunk in (0, 5):
        model.loss_chunk = chunk
        model.zero_grad()
        ours = model(idx, targets)[1]
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), abs=1e-5)
        for name, p in model.named_parameters():
            gradient = weights[name].grad
            assert (p.grad.double() - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, (chunk, name)


def test_no_token_sees_a_later_one():
    model, idx = make_model(), tokens(2, 24)
    changed = idx.clone()
    changed[:, 11] = (idx[:, 11] + 1) % 97
    difference = (model(idx)[0] - model(changed)[0]).abs().amax(-1)
    assert difference[:, :11].max() == 0 and difference[:, 11:].min() > 0


def test_in_bfloat16_the_logits_stay_near():
    model, idx = make_model(), tokens(2, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(idx)[0]
    expected = model(idx)[0]
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_gpt2s_size_has_180_million_parameters_and_starts_near_the_loss_of_knowing_nothing():
    with torch.device("meta"):
        model = FrontierGPT(ModernConfig())
    parameters = sum(p.numel() for p in model.parameters())
    blocks = 12 * 12 * 768**2 + 12 * 3
    assert parameters == (2 * 50304 + 23579) * 768 + blocks
    assert model.lm_head.weight is model.transformer.wte.weight
    # of the bigram and the stem table a token reads one row: no product
    assert model.flops_per_token(1024) == 6 * (50304 * 768 + blocks) + 12 * 12 * 768 * 1024
    for width in (64, 512):             # logits of variance 25 / width raise it by half of that
        torch.manual_seed(0)
        small = FrontierGPT(ModernConfig(24, 50304, 2, 2, width))
        idx = tokens(8, 25, vocab_size=50257)
        loss = small(idx[:, :-1], idx[:, 1:])[1].item()
        assert loss == pytest.approx(math.log(50304) + 12.5 / width, abs=0.15)


def test_a_new_model_attends_to_what_followed_the_same_token():
    torch.manual_seed(0)
    model = FrontierGPT(ModernConfig(64, 97, 1, 2, 256))
    idx = torch.randperm(97)[:24][None]
    idx[0, 20] = idx[0, 6]              # then 7 holds what followed it before
    seen = []

    def scores(q, k, v, kernel, mask):
        seen.append([k[0, :21, head] @ q[0, 20, head] for head in range(2)])
        return torch.zeros_like(q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontier.attention", scores)
        model(idx)
    assert seen[0][1].argmax() == 7 and seen[0][0].argmax() != 7


def test_tokens_of_one_stem_share_a_row_and_all_else_has_its_own():
    stems, text = stems_of_tokens(50304).numpy(), tokenizer().decode_single_token_bytes
    assert stems.shape == (50304,) and sorted(set(stems)) == list(range(23579))
    same = {tokenizer().encode_single_token(word) for word in (
        "return", " return", "Return", " Return", " returns", " returned", " returning", " Returns")}
    assert len(same) == 8 and len({stems[token] for token in same}) == 1
    others = np.flatnonzero(stems == stems[min(same)])
    assert {re.sub("(s|ed|ing)$", "", text(int(token)).decode().strip().lower())
            for token in others} == {"return"}
    for word, rest in ((" red", "r"), (" sing", "s")):      # three letters have to remain
        assert len({stems[tokenizer().encode_single_token(each)] for each in (word, rest)}) == 2
    counts = np.bincount(stems)[stems]
    spaces = [token for token in range(50256) if text(token).isspace()]
    assert len(spaces) == 7 and (counts[spaces] == 1).all()
    assert (counts[EOT:] == 1).all() and (counts[[tokenizer().encode_single_token(b"\xff")]] == 1).all()
    assert (stems_of_tokens(256).numpy() == np.arange(256)).all()


def test_an_absurd_vocabulary_is_refused_before_its_stems_are_made(tmp_path, monkeypatch):
    model = make_model()
    torch.save({"model": model.state_dict(), "recipe": "frontier", "step": 0,
                "model_config": dataclasses.asdict(model.config) | {"vocab_size": 2**23}}, tmp_path / "a.pt")
    monkeypatch.setattr("frontier.stems_of_tokens", lambda vocab_size: pytest.fail("made first"))
    with pytest.raises(UserError, match="8388608"):
        load_model(tmp_path / "a.pt")


def test_pairs_of_tokens_spread_over_the_rows():
    pairs = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    rows = bigram_hash(pairs, 50304)[:, 1]
    assert rows.min() >= 0 and rows.max() < 50304
    counts = rows.bincount(minlength=50304).double()        # a fair hash: mean = variance, as Poisson's
    assert counts.var() < 2 * counts.mean()
    assert torch.equal(bigram_hash(pairs[:, 1:], 50304)[:, 0], bigram_hash(
        F.pad(pairs[:, 1:], (1, 0), value=EOT), 50304)[:, 1])


@pytest.mark.parametrize("window", [0, 6])
def test_cached_generation_takes_the_likeliest_tokens_of_whole_forwards(window):
    model, idx = make_model(window=window, n_layer=2, vocab_size=50304), tokens(2, 5)
    idx[0, 1] = idx[1, 3] = EOT
    found = model.generate(idx, 30, temperature=0)          # beyond block_size: the context slides
    for _ in range(30):
        idx = torch.cat((idx, model(idx[:, -24:])[0][:, -1:, :50257].argmax(-1)), dim=1)
    assert torch.equal(found, idx)


def test_samples_cast_the_head_once_and_not_for_each_token():
    class Casts(TorchDispatchMode):
        heads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.heads += func == torch.ops.aten._to_copy.default and args[0].shape == (97, 32)
            return func(*args, **kwargs or {})
    model = make_model()
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        model.generate(tokens(1, 3), 5)
    assert casts.heads == 1


def test_with_a_window_no_token_sees_the_document_before():
    model, idx = make_model(window=24, vocab_size=50304), tokens(1, 24, vocab_size=50)
    idx[0, 10] = EOT
    changed = idx.clone()
    changed[0, 9] = 77                          # the last token of the first document
    difference = (model(idx)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert difference[9] > 0 and difference[10:].max() == 0


def test_an_odd_size_of_heads_is_refused():
    with pytest.raises(UserError, match="heads of an even size"):
        FrontierGPT(ModernConfig(n_embd=9, n_head=3))


def test_weights_come_back_from_a_checkpoint(tmp_path):
    model = make_model()
    torch.save({"model": model.state_dict(), "model_config": dict(vars(model.config)), "recipe": "frontier"},
               tmp_path / "c.pt")
    again = load_model(tmp_path / "c.pt")
    assert torch.equal(again(tokens(1, 24))[0], model(tokens(1, 24))[0])


def test_every_parameter_is_in_one_group():
    model = make_model(n_embd=384)
    optimizers = model.configure_optimizers(0.02, 0.0, torch.bfloat16, tokens=4096)
    rates = {name: group["lr"] for optimizer in optimizers for group in optimizer.param_groups
             for name in group["param_names"]}
    assert sorted(rates) == sorted(name for name, _ in model.named_parameters())
    expected = {"transformer.wte.weight": 0.004, "transformer.stem.weight": 0.004,
                "transformer.bigram.weight": 0.03}
    assert all(rate == pytest.approx(expected.get(name, 0.02)) for name, rate in rates.items())
    eps = {name: group["eps"] for group in optimizers[0].param_groups for name in group["param_names"]}
    for name in ("wte", "stem"):
        assert eps.pop(f"transformer.{name}.weight") == pytest.approx(0.1 / 4096)
    assert set(eps.values()) == {1e-8}
    matrices = {name for group in optimizers[1].param_groups for name in group["param_names"]}
    assert matrices == {name for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}


# -----------------------------------------------------------------------------
# several updates a step

@pytest.mark.parametrize("first, steps, expected", [
    (4, 9, [4, 4, 4, 2, 2, 2, 1, 1, 1]), (2, 6, [2, 2, 1, 1, 1, 1]), (1, 3, [1, 1, 1]),
    (16, 4, [16, 16, 8, 4]), (4, 1, [4])])
def test_the_updates_of_a_step_are_halved_after_each_third(first, steps, expected):
    from train_gpt2 import updates_of_step
    config = Config(max_steps=steps, updates_per_step=first)
    assert [updates_of_step(step, config) for step in range(steps)] == expected
    assert updates_of_step(steps, config) == updates_of_step(steps + 9, config) == max(1, first // 4)


def run_of(batch, T, steps, ranks=1, **more):
    """A run's config with its automatic values."""
    config = Config(**dict(total_batch_size=batch, sequence_length=T, max_steps=steps, warmup_steps=0,
                           max_lr=0.02, min_lr="auto", cooldown="auto", updates_per_step="auto") | more)
    return Config(**vars(config) | automatic(config, ranks))


@pytest.mark.parametrize("batch, T, steps, ranks, expected", [
    (4096, 128, 48, 1, 4), (4096, 256, 146, 1, 2), (4096, 256, 488, 1, 1), (4096, 256, 19073, 1, 1),
    (2048, 128, 48, 1, 4), (524288, 1024, 1750, 8, 4), (524288, 1024, 1, 1, 4),         # never more
    (4096, 4096, 48, 1, 1), (4096, 2048, 48, 1, 2), (3072, 1024, 48, 1, 1),
    # of each update every rank has a sequence, and all as many
    (16384, 1024, 48, 8, 2), (16384, 1024, 48, 16, 1), (65536, 1024, 48, 32, 2), (524288, 1024, 1750, 256, 2),
    (524288, 1024, 1750, 512, 1), (12288, 1024, 48, 4, 1), (24576, 1024, 48, 4, 2)])
def test_the_updates_of_a_step_follow_from_the_runs_tokens_and_the_ranks(batch, T, steps, ranks, expected):
    assert run_of(batch, T, steps, ranks).updates_per_step == expected
    assert batch % (T * ranks * expected) == 0
    assert run_of(batch, T, steps, ranks, updates_per_step=16).updates_per_step == 16


@pytest.mark.parametrize("steps, first, last", [
    (48, 4, 0.85), (1000, 1, 0.85),                     # 112 and 1,000 updates
    (1732, 1, 0.90), (742, 4, 0.90),                    # 1,732: half-way in the logarithm
    (3000, 1, 0.95), (2500, 4, 0.95), (19073, 1, 0.95)])
def test_the_momentum_follows_from_the_runs_updates(steps, first, last):
    config = Config(max_steps=steps, updates_per_step=first)
    momentum = [muon_momentum(step, config) for step in range(steps + 1)]
    assert momentum[0] == 0.80 and max(momentum) == pytest.approx(last, abs=1e-3)
    assert momentum[steps // 4] == momentum[steps // 2] == max(momentum)
    assert momentum[-1] == pytest.approx(0.85) and momentum[-1 - steps // 20] <= (0.85 + last) / 2 + 1e-3


@pytest.mark.parametrize("batch, T, steps, more, expected", [
    (4096, 128, 12, {}, (0.29, 0)), (4096, 128, 48, {}, (0.294, 0.1 * 0.0119)),         # 28 and 112 updates
    (4096, 256, 195, {}, (0.466, 0.1 * 0.568)),                                         # 260
    (4096, 256, 1953, {}, (0.6, 0.1)), (524288, 1024, 2500, {}, (0.6, 0.1)),
    (4096, 128, 48, {"updates_per_step": 1}, (0.29, 0)),                                # 48
    (4096, 256, 1953, {"cooldown": 0.1}, (0.1, 0.1)), (4096, 256, 1953, {"min_lr": 0.01}, (0.6, 0.5)),
    (4096, 256, 1953, {"min_lr": 0.0}, (0.6, 0))])
def test_cooldown_and_floor_follow_from_the_runs_updates(batch, T, steps, more, expected):
    config = run_of(batch, T, steps, **more)
    assert (config.cooldown, config.min_lr / config.max_lr) == pytest.approx(expected, abs=1e-3)
    assert trapezoid(steps, config) == pytest.approx(expected[1], abs=1e-3) and trapezoid(0, config) == 1
    assert trapezoid(round((1 - expected[0]) * steps) - 1, config) == 1


FLAGS = ["--recipe", "frontier", "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 16,
         "--total_batch_size", 512, "--max_steps", 9, "--val_every", 9, "--val_tokens", 320,
         "--sample_every", 0, "--hellaswag_every", 0, "--checkpoint_every", 9, "--dtype", "float32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, n in (("val", 400), ("train", 3000)):         # n^2 mod 97 after (n - 1)^2: a pair tells it
        write_shard(folder / f"text_{name}_000000.npy", (torch.arange(n)**2 % 97).numpy().astype("uint16"))
    return folder


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "log"
    run(*FLAGS, "--vocab_size", 97, "--data", data, "--out", out)
    return out


@pytest.mark.parametrize("processes, more", [
    (2, ["--batch_size", 1]), (4, ["--batch_size", 32]), (1, ["--batch_size", 2])])
def test_processes_and_micro_batches_change_only_the_rounding(processes, more, data, alone, tmp_path):
    run(*FLAGS, "--vocab_size", 97, "--data", data, "--out", tmp_path / "log", *more, processes=processes)
    expected, found = logged(alone), logged(tmp_path / "log")
    assert len(expected) == 9 and expected[0] < math.log(97)        # the mean over four updates
    for step in range(2):           # Muon lifts the rounding some 500 times a step
        assert found[step] == pytest.approx(expected[step], abs=2e-4)
    val = logged(alone, "val")
    assert logged(tmp_path / "log", "val")[9] == pytest.approx(val[9], abs=0.02) and val[9] < val[0] - 1


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(data, alone, tmp_path):
    out = tmp_path / "log"
    for first in (True, False):
        if not first:
            (out / "checkpoint_000009.pt").unlink()
        result = run(*FLAGS, "--vocab_size", 97, "--data", data, "--out", out, "--checkpoint_every", 4)
    assert "at step 8 of 9" in result.stdout
    a, b = (torch.load(folder / "checkpoint_000009.pt")["model"] for folder in (alone, out))
    assert all(torch.equal(a[name], b[name]) for name in a) and logged(alone) == logged(out)


def test_a_run_with_a_window_evaluates_samples_and_is_sampled_from(tmp_path):
    text = encode((ROOT / "input.txt").read_text()[:30_000])
    for name, part in (("val", text[:1000]), ("train", text[1000:])):
        write_shard(tmp_path / f"text_{name}_000000.npy", part)
    result = run(*FLAGS, "--window", 8, "--data", tmp_path, "--out", tmp_path / "log", "--sample_every", 9,
                 "--val_tokens", 900, "--dtype", "bfloat16", "--hellaswag_every", 9, "--hellaswag_data",
                 hellaswag_file(tmp_path / "h.jsonl"))
    val = logged(tmp_path / "log", "val")
    assert val[0] == pytest.approx(math.log(50304), abs=0.6) and val[9] < val[0] - 1
    assert "sample 0: Hello, I'm a language model," in result.stdout
    assert 0 <= logged(tmp_path / "log", "hella")[9] <= 1
    sampled = script("sample.py", "--model", tmp_path / "log", "--num_samples", 1, "--max_new_tokens", 4)
    assert sampled.returncode == 0 and sampled.stdout, sampled.stderr
