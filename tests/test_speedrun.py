"""The modern recipes: their models against one plain reference, Muon, schedules."""
import dataclasses
import math
from types import SimpleNamespace as Config

import pytest
import torch
import torch.nn.functional as F

import hellaswag
import sample
from helpers import ROOT, hellaswag_file, logged, refused, train
from recipes import MODELS, fresh_model, load_model
from peers import make_model, tokens
from runtime.muon import Muon, orthogonalize
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode
from speedrun import SpeedrunGPT, muon_momentum, trapezoid

MODERN = ["speedrun", "frontier"]


def modern(recipe="speedrun", **shape):
    """With random weights as after training: those of a new model's branches are all zero."""
    return make_model(cls=MODELS[recipe], spread=0.1, **dict(n_layer=3, n_embd=32) | shape)


def plain_modern(w, heads, idx, softcap, parts=None):
    """Record 10, or with `parts` (each token's rows of the table of parts) the frontier model, in float64,
    head by head. w: name -> float64 tensor."""
    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def turn(x):                        # (T, hs): rotates the pair (x_i, x_{i + hs/2}) by t / 10000^(2i/hs)
        out, hs = torch.empty_like(x), x.size(1)
        for t in range(len(x)):
            for i in range(hs // 2):
                angle = t / 10000 ** (2 * i / hs)
                a, b = x[t, i], x[t, i + hs // 2]
                out[t, i] = a * math.cos(angle) + b * math.sin(angle)
                out[t, i + hs // 2] = b * math.cos(angle) - a * math.sin(angle)
        return out
    table, results = w["transformer.wte.weight"], []
    if parts is not None:
        table = table + w["transformer.part.weight"][parts].sum(0)
    for row in idx.tolist():
        x, first_values = rms(table[row]), None
        if parts is not None:           # each token and the one before it share a row of the bigram table
            pairs = [((36313 * token) ^ (27191 * (EOT if token == EOT else before))) % len(table)
                     for before, token in zip([EOT, *row], row, strict=False)]
            x = rms(x + w["transformer.bigram.weight"][pairs])
        x0 = x
        for n in range(sum(name.endswith("lambdas") for name in w)):
            g = {name.split(f"h.{n}.")[1].replace("mlp.", ""): value
                 for name, value in w.items() if f"h.{n}." in name}
            x = g["lambdas"][0] * x + g["lambdas"][1] * x0
            q, k, v = (rms(x) @ g[f"attn.c_{c}.weight"].t() for c in "qkv")
            first_values = v if first_values is None else first_values
            v, ys = (1 - g["attn.lamb"]) * v + g["attn.lamb"] * first_values, []
            for head in range(heads):
                q_h, k_h, v_h = (z.chunk(heads, -1)[head] for z in (q, k, v))
                k_h = turn(rms(k_h))
                if parts is not None and head >= heads // 2:    # the key before; none where a document begins
                    k_h = torch.stack([0 * k_h[0] if t == 0 or row[t] == EOT else k_h[t - 1]
                                       for t in range(len(row))])
                scores = turn(rms(q_h)) @ k_h.t() / math.sqrt(q_h.size(-1))
                later = torch.arange(len(row))[None, :] > torch.arange(len(row))[:, None]
                ys.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v_h)
            x = x + torch.cat(ys, -1) @ g["attn.c_proj.weight"].t()
            x = x + (rms(x) @ g["c_fc.weight"].t()).clamp(min=0).pow(2) @ g["c_proj.weight"].t()
        head = w["lm_head.weight"] if parts is None else table
        results.append(softcap * torch.tanh(rms(x) @ head.t() / softcap))
    return torch.stack(results)


@pytest.mark.parametrize("recipe, heads", [("speedrun", 2), *(("frontier", heads) for heads in (1, 2, 3))])
def test_logits_loss_and_gradients_equal_a_plain_reference(recipe, heads):
    model = modern(recipe, n_head=heads, n_embd=12 * heads, vocab_size=97 if recipe == "speedrun" else 50304)
    idx, targets = tokens(2, 9), tokens(2, 9, seed=2)
    targets[0, :3] = -1
    if recipe == "frontier":
        idx[0, 4] = idx[1, 0] = EOT
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_modern(weights, heads, idx, *(30,) if recipe == "speedrun" else (15, model.parts))
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


@pytest.mark.parametrize("recipe", MODERN)
def test_in_bfloat16_all_activations_are_and_the_logits_stay_near(recipe, monkeypatch):
    model, idx, seen, linear = modern(recipe), tokens(2, 24), [], F.linear
    expected = model(idx)[0]
    monkeypatch.setattr(F, "linear", lambda x, w: seen.append(x.dtype) or linear(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(idx)[0]
    assert seen == [torch.bfloat16] * (3 * 6 + 1)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_published_size_has_162_million_parameters_and_starts_at_the_loss_of_knowing_nothing():
    with torch.device("meta"):
        model = SpeedrunGPT(SpeedrunGPT.Config())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matrices == 162_201_600 and sum(p.numel() for p in model.parameters()) - matrices == 12 * 3
    small = SpeedrunGPT(SpeedrunGPT.Config(24, 97, 2, 2, 32))
    assert small(tokens(2, 24), tokens(2, 24))[1].item() == pytest.approx(math.log(97), abs=1e-5)


@pytest.mark.parametrize("recipe", MODERN)
def test_cached_generation_takes_the_likeliest_tokens_of_whole_forwards(recipe, tmp_path):
    """Beyond block_size, too, where the context slides; of a model that comes back from its checkpoint."""
    model, idx = modern(recipe, n_layer=2, vocab_size=50304), tokens(2, 5)
    idx[0, 1] = idx[1, 3] = EOT
    torch.save({"model": model.state_dict(), "model_config": dataclasses.asdict(model.config),
                "recipe": recipe}, tmp_path / "c.pt")
    found = load_model(tmp_path / "c.pt").generate(idx, 30, temperature=0)
    for _ in range(30):
        idx = torch.cat((idx, model(idx[:, -24:])[0][:, -1:, :50257].argmax(-1)), dim=1)
    assert torch.equal(found, idx)


@pytest.mark.parametrize("recipe", MODERN)
def test_an_odd_size_of_heads_is_refused(recipe):
    config = Config(recipe=recipe, block_size=24, vocab_size=96, n_layer=1, n_embd=9, n_head=3)
    refused(lambda: fresh_model(config), "--n_embd 9", "--n_head 3", "even")


# ----------------------------------------------------------------------------- Muon

@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (48, 12)])
def test_orthogonalize_gives_singular_values_near_one_and_keeps_the_directions(shape):
    G = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    X = orthogonalize(G).float()
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    values = torch.linalg.svdvals(X)
    assert X.shape == G.shape and values.min() > 0.3 and values.max() < 1.3
    along = torch.einsum("bij,bjk,bki->bi", U.mT, X, V.mT)          # the diagonal of U^T X V
    assert (along - values.mean()).abs().max() < 0.6 and along.min() > 0.2


def matrices():
    generator, shapes = torch.Generator().manual_seed(0), [(16, 16), (32, 16), (16, 32), (16, 16), (16, 16)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_muon_is_torchs_muon_to_rounding():
    ours, theirs, start = matrices(), matrices(), matrices()
    muons = [Muon([(str(i), p) for i, p in enumerate(ours)], lr=0.02, weight_decay=0.1),
             torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")]
    for _ in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for muon in muons:
            muon.step()
    for p, q, s in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.03 * (q - s).norm()


# ----------------------------------------------------------------------------- the recipes

@pytest.mark.parametrize("recipe, more, expected", [
    ("speedrun", [], {"transformer.wte.weight": (0.3, 1e-8), "lm_head.weight": (0.004, 1e-8)}),
    ("frontier", [4096], {"transformer.wte.weight": (0.004, 0.1 / 4096), "transformer.bigram.weight": (
        0.03, 1e-8), "transformer.part.weight": (0.004, 0.1 / 4096)})])
def test_every_parameter_is_in_one_group_and_matrices_of_blocks_in_muons(recipe, more, expected):
    model = modern(recipe, n_embd=384)          # half of GPT-2's width: there the head's rate is 0.002
    adam, muon = model.configure_optimizers(0.02, 0.0, torch.bfloat16, *more)
    groups = {name: group for optimizer in (adam, muon) for group in optimizer.param_groups
              for name in group["param_names"]}
    assert sorted(groups) == sorted(name for name, _ in model.named_parameters())
    for name, group in groups.items():
        assert (group["lr"], group.get("eps", 1e-8)) == pytest.approx(expected.get(name, (0.02, 1e-8))), name
    in_muon = {name for group in muon.param_groups for name in group["param_names"]}
    assert in_muon == {name for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}


def test_the_schedule_is_constant_and_then_linear_to_its_floor():
    config = Config(max_steps=3242, warmup_steps=0, max_lr=0.02, min_lr=0.0, cooldown=926 / 3242)
    def rate(step):
        return trapezoid(step, step / 3242, config)
    assert rate(0) == rate(2315) == 1.0
    assert rate(2316 + 463) == pytest.approx(0.5)
    assert rate(3242) == rate(9999) == 0.0
    floor = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1, cooldown=0.5)
    assert [trapezoid(step, step / 100, floor) for step in (0, 9, 75, 100)] == (
        pytest.approx([0.1, 1, 0.55, 0.1]))
    assert [muon_momentum(step / 3242, config) for step in (0, 250, 500, 3242)] == pytest.approx(
        [0.85, 0.90, 0.95, 0.95], abs=2e-4)


@pytest.mark.parametrize("recipe, dtype", [("speedrun", "float32"), ("frontier", "bfloat16")])
def test_a_run_trains_evaluates_samples_and_is_sampled_from(recipe, dtype, tmp_path, capsys):
    """The same loop, checkpoints and commands as for gpt2, on GPT-2's tokens."""
    text, out = encode((ROOT / "input.txt").read_text()[:30_000]), tmp_path / "log"
    for name, part in (("val", text[:1000]), ("train", text[1000:])):
        write_shard(tmp_path / f"text_{name}_000000.npy", part)
    train("--recipe", recipe, "--data", tmp_path, "--out", out, "--n_layer", 2, "--n_head", 2, "--n_embd", 32,
          "--block_size", 32, "--total_batch_size", 512, "--max_steps", 9, "--val_every", 9,
          "--val_tokens", 900, "--sample_every", 9, "--hellaswag_every", 9, "--hellaswag_data",
          hellaswag_file(tmp_path / "h.jsonl"), "--checkpoint_every", 9, "--dtype", dtype)
    val = logged(out, "val")
    assert val[0] == pytest.approx(math.log(50304), abs=0.6) and val[9] < val[0] - 1
    assert "sample 0: Hello, I'm a language model," in capsys.readouterr().out
    hellaswag.main(["--model", str(out), "--data", str(tmp_path / "h.jsonl"), "--dtype", dtype])
    assert f"acc_norm: {round(12 * logged(out, 'hella')[9])}/12=" in capsys.readouterr().out
    sample.main(["--model", str(out), "--num_samples", "1", "--max_new_tokens", "4", "--prompt", "Now say"])
    assert "Now say" in capsys.readouterr().out
    refused(lambda: train("--recipe", "gpt2", "--data", tmp_path, "--out", out), f"--recipe {recipe}", "gpt2")
