"""The speedrun recipe: its model against an independent reference, Muon against torch's, its schedules."""
import dataclasses
import math
import runpy
import sys
from types import SimpleNamespace as Config

import pytest
import torch
import torch.nn.functional as F

from helpers import ROOT, logged, run, script, warm
from model import load_model
from runtime.cli import UserError
from runtime.kernels import attention, document_window_mask
from runtime.language_model import LanguageModel, ModernConfig
from runtime.muon import Muon, orthogonalize
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode
from speedrun import SpeedrunGPT, muon_momentum, trapezoid, window_schedule


def make_model(seed=0, **shape):
    """With random weights as after training: those of a new model's branches are all zero."""
    torch.manual_seed(seed)
    tiny = dict(block_size=24, vocab_size=97, n_layer=3, n_head=2, n_embd=32)
    model = SpeedrunGPT(ModernConfig(**tiny | shape))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.dim() == 2 else 0.3))
    return model


def tokens(*shape, seed=1, vocab_size=97):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def plain_speedrun(w, heads, idx):
    """Record 10 in float64, position by position and head by head. w: name -> float64 tensor."""
    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def turn(x):                        # (T, hs): rotates the pair (x_i, x_{i + hs/2}) by t / 10000^(2i/hs)
        T, hs = x.shape
        out = torch.empty_like(x)
        for t in range(T):
            for i in range(hs // 2):
                angle = t / 10000 ** (2 * i / hs)
                a, b = x[t, i], x[t, i + hs // 2]
                out[t, i] = a * math.cos(angle) + b * math.sin(angle)
                out[t, i + hs // 2] = b * math.cos(angle) - a * math.sin(angle)
        return out
    results = []
    for row in idx:
        x = x0 = rms(w["transformer.wte.weight"][row])
        first_values = None
        for n in range(sum(name.endswith("lambdas") for name in w)):
            g = {name.split(f"h.{n}.")[1]: value for name, value in w.items() if f"h.{n}." in name}
            x = g["lambdas"][0] * x + g["lambdas"][1] * x0
            u = rms(x)
            q, k, v = (u @ g[f"attn.c_{c}.weight"].t() for c in "qkv")
            first_values = v if first_values is None else first_values
            v = (1 - g["attn.lamb"]) * v + g["attn.lamb"] * first_values
            ys = []
            for q_h, k_h, v_h in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
                scores = turn(rms(q_h)) @ turn(rms(k_h)).t() / math.sqrt(q_h.size(-1))
                mask = torch.arange(len(row))[None, :] > torch.arange(len(row))[:, None]
                ys.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v_h)
            x = x + torch.cat(ys, -1) @ g["attn.c_proj.weight"].t()
            x = x + (rms(x) @ g["mlp.c_fc.weight"].t()).clamp(min=0).pow(2) @ g["mlp.c_proj.weight"].t()
        results.append(30 * torch.tanh(rms(x) @ w["lm_head.weight"].t() / 30))
    return torch.stack(results)


def test_logits_loss_and_gradients_equal_a_plain_reference():
    model, idx, targets = make_model(), tokens(2, 9), tokens(2, 9, seed=2)
    targets[0, :3] = -1
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_speedrun(weights, 2, idx)
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


def test_in_bfloat16_all_activations_are_and_the_logits_stay_near():
    model, idx = make_model(), tokens(2, 24)
    expected, seen = model(idx)[0], set()
    for module in model.modules():
        if type(module).__name__ == "Linear":
            module.register_forward_hook(
                lambda module, inputs, output: seen.add((inputs[0].dtype, output.dtype)))
    heads, linear = [], F.linear

    def head(*arguments):
        heads.append(linear(*arguments))
        return heads[-1]
    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.language_model.F.linear", head)
        found = model(idx)[0]
    assert seen == {(torch.bfloat16, torch.bfloat16)} and {y.dtype for y in heads} == {torch.bfloat16}
    assert heads[-1].size(-1) == 97
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_published_size_has_162_million_parameters_and_starts_at_the_loss_of_knowing_nothing():
    with torch.device("meta"):
        model = SpeedrunGPT(ModernConfig())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matrices == 162_201_600 and sum(p.numel() for p in model.parameters()) - matrices == 12 * 3
    small = SpeedrunGPT(ModernConfig(24, 97, 2, 2, 32))
    assert small(tokens(2, 24), tokens(2, 24))[1].item() == pytest.approx(math.log(97), abs=1e-5)


def test_cached_generation_takes_the_likeliest_tokens_of_whole_forwards():
    model, idx = make_model(), tokens(2, 5)
    found = model.generate(idx, 30, temperature=0)          # beyond block_size: the context slides
    for _ in range(30):
        idx = torch.cat((idx, model(idx[:, -24:])[0][:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, idx)


def test_an_odd_size_of_heads_is_refused():
    with pytest.raises(UserError, match="heads of an even size"):
        SpeedrunGPT(ModernConfig(n_embd=9, n_head=3))


def test_both_models_share_what_comes_after_the_hidden_states():
    assert issubclass(SpeedrunGPT, LanguageModel) and SpeedrunGPT.forward is LanguageModel.forward


# -----------------------------------------------------------------------------
# Muon

@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (48, 12)])
def test_orthogonalize_gives_singular_values_near_one_and_keeps_the_directions(shape):
    torch.manual_seed(0)
    G = torch.randn(3, *shape)
    X = orthogonalize(G).float()
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    assert X.shape == G.shape
    values = torch.linalg.svdvals(X)
    assert values.min() > 0.3 and values.max() < 1.3
    along = torch.einsum("bij,bjk,bki->bi", U.mT, X, V.mT)          # the diagonal of U^T X V
    assert (along - values.sort(descending=False).values.mean()).abs().max() < 0.6 and along.min() > 0.2


def test_muon_is_torchs_muon_to_rounding():
    torch.manual_seed(0)
    shapes = [(16, 16), (32, 16), (16, 32), (16, 16), (32, 16)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon([(str(i), p) for i, p in enumerate(ours)], lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1,
                         adjust_lr_fn="original")
    start = [p.detach().clone() for p in ours]
    for step in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.03 * (q - s).norm()


def test_shares_of_three_processes_make_the_updates_of_one(tmp_path, monkeypatch):
    script = tmp_path / "muon.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, torch, torch.distributed as dist
from runtime.muon import Muon
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(s)) for s in [(8, 8), (8, 8), (16, 8), (8, 8), (8, 8), (16, 8)]]
muon = Muon([(str(i), p) for i, p in enumerate(params)], lr=0.1)
for step in range(3):
    for p in params:
        p.grad = torch.randn(p.shape)
    muon.step()
if int(os.environ.get("RANK", 0)) == 0:
    torch.save([p.detach() for p in params], sys.argv[1])
if dist.is_initialized():
    dist.barrier()              # a process that exits while another still sends would crash that one
    dist.destroy_process_group()
    os._exit(0)                 # without the interpreter's finalization, in which gloo can crash
""")
    monkeypatch.setattr(sys, "argv", ["muon.py", str(tmp_path / "1.pt")])
    runpy.run_path(str(script))
    result = warm(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", script,
                   tmp_path / "3.pt"])
    assert result.returncode == 0, result.stderr[-3000:]
    for a, b in zip(torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "3.pt"), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


# -----------------------------------------------------------------------------
# the recipe

def test_every_parameter_is_in_one_group_and_the_rates_are_record_10s():
    model = make_model(n_embd=384)              # half of GPT-2's width: there the head's rate is 0.002
    optimizers = model.configure_optimizers(0.02)
    rates = {name: group["lr"] for optimizer in optimizers for group in optimizer.param_groups
             for name in group["param_names"]}
    assert sorted(rates) == sorted(name for name, _ in model.named_parameters())
    expected = {"transformer.wte.weight": 0.3, "lm_head.weight": 0.004}
    assert all(rate == pytest.approx(expected.get(name, 0.02)) for name, rate in rates.items())
    matrices = {name for group in optimizers[1].param_groups for name in group["param_names"]}
    assert matrices == {name for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}


def test_the_schedule_is_constant_and_then_linear_to_its_floor():
    config = Config(max_steps=3242, warmup_steps=0, max_lr=0.02, min_lr=0.0, cooldown=926 / 3242)
    assert trapezoid(0, config) == trapezoid(2316, config) == 1.0
    assert trapezoid(2316 + 463, config) == pytest.approx(0.5)
    assert trapezoid(3242, config) == trapezoid(9999, config) == 0.0
    floor = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1, cooldown=0.5)
    assert trapezoid(0, floor) == pytest.approx(0.1) and trapezoid(100, floor) == pytest.approx(0.1)
    assert trapezoid(75, floor) == pytest.approx(0.55)
    assert muon_momentum(0, config) == 0.85
    assert muon_momentum(500, config) == pytest.approx(0.95, abs=1e-4)


def test_weights_come_back_from_a_checkpoint(tmp_path):
    model = make_model()
    torch.save({"model": model.state_dict(), "model_config": dict(vars(model.config)), "recipe": "speedrun"},
               tmp_path / "c.pt")
    again = load_model(tmp_path / "c.pt")
    assert torch.equal(again(tokens(1, 24))[0], model(tokens(1, 24))[0])


def test_a_run_trains_evaluates_samples_and_is_sampled_from(tmp_path):
    """The same script, loop, checkpoints and commands as for gpt2, on GPT-2's tokens."""
    tokens = encode((ROOT / "input.txt").read_text()[:30_000])
    for name, part in (("val", tokens[:1000]), ("train", tokens[1000:])):
        write_shard(tmp_path / f"text_{name}_000000.npy", part)
    result = run("--recipe", "speedrun", "--data", tmp_path, "--out", tmp_path / "log", "--n_layer", 2,
                 "--n_head", 2, "--n_embd", 64, "--block_size", 32, "--window", 16, "--total_batch_size", 512,
                 "--max_steps", 12, "--val_every", 6, "--val_tokens", 900, "--sample_every", 6,
                 "--hellaswag_every", 0, "--checkpoint_every", 6)
    val = logged(tmp_path / "log", "val")
    assert val[0] == pytest.approx(math.log(50304), abs=0.01) and val[12] < val[6] < val[0]
    assert "sample 0: Hello, I'm a language model," in result.stdout
    sampled = script("sample.py", "--model", tmp_path / "log/checkpoint_000012.pt", "--num_samples", 1,
                     "--max_new_tokens", 4)
    assert sampled.returncode == 0 and sampled.stdout, sampled.stderr
    wrong = run("--recipe", "gpt2", "--data", tmp_path, "--out", tmp_path / "log", code=2)
    assert "was trained with --recipe speedrun, not gpt2" in wrong.stderr


# -----------------------------------------------------------------------------
# documents and windows

def with_window(window, **shape):
    model = make_model(window=window, vocab_size=50304, **shape)
    idx = tokens(2, model.config.block_size, vocab_size=50)
    idx[idx == 7] = EOT                         # documents of 50 tokens
    return model, idx


def test_a_mask_is_the_past_of_the_same_document_inside_the_window():
    idx = torch.tensor([[5, 5, EOT, 5, 5, 5, 5, EOT], [EOT, 5, 5, 5, 5, 5, 5, 5]])
    mask = document_window_mask(idx, 8, torch.tensor(3))
    for b in range(2):
        for q in range(8):
            for k in range(8):
                same_document = not (idx[b, k + 1:q + 1] == EOT).any()
                assert mask[b, 0, q, k] == (k <= q < k + 3 and same_document), (b, q, k)
    assert torch.equal(document_window_mask(idx, 2, torch.tensor(3)), mask[:, :, 6:])


@pytest.mark.parametrize("kernel", ["naive", "math", "auto"])
def test_every_kernel_computes_the_same_with_documents_and_a_window(kernel):
    """A token's logits depend only on its document's last tokens: 3 layers see 3 (window - 1) tokens back."""
    model, idx = with_window(20, block_size=160)
    model.kernel = kernel
    with torch.no_grad():
        found = model(idx)[0]
        for b, t in ((0, 159), (1, 159), (0, 77), (1, 40)):
            starts = (idx[b, :t + 1] == EOT).nonzero().flatten().tolist()
            begin = max((starts or [0])[-1], t - 3 * 19)
            alone = model(idx[b:b + 1, begin:t + 1])[0]
            torch.testing.assert_close(found[b, t], alone[0, -1], rtol=1e-4, atol=1e-4)


def test_a_window_as_long_as_the_sequence_in_one_document_changes_nothing():
    model, idx = with_window(24)
    plain = SpeedrunGPT(dataclasses.replace(model.config, window=0))
    plain.load_state_dict(model.state_dict())
    idx = torch.where(idx == EOT, 3, idx)
    torch.testing.assert_close(model(idx)[0], plain(idx)[0], rtol=1e-5, atol=1e-5)
    model.window.fill_(2)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() > 0.01


def test_flex_attention_compiled_gives_what_sdpa_gives_and_a_new_window_compiles_nothing_anew():
    """Without Inductor's C++, which is torch's and takes most of the time."""
    _, idx = with_window(64, block_size=256)
    q, k, v = torch.randn(3, 2, 256, 2, 16)

    @torch.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    def flex(window):
        return attention(q, k, v, "auto", document_window_mask(idx, 256, window, as_blocks=True))
    for window in map(torch.tensor, (64, 40)):
        expected = attention(q, k, v, "auto", document_window_mask(idx, 256, window))
        with torch._dynamo.config.patch(error_on_recompile=int(window) != 64):
            torch.testing.assert_close(flex(window), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("had", [0, 8])
def test_a_window_can_be_given_to_any_weights(had):
    model = make_model(window=had)
    again = SpeedrunGPT(dataclasses.replace(model.config, window=16))
    again.load_state_dict(model.state_dict())
    expected = SpeedrunGPT(dataclasses.replace(model.config, window=24))
    expected.load_state_dict(model.state_dict())
    expected.window.fill_(16)                   # as the loop does before each step
    assert torch.equal(again(tokens(1, 24))[0], expected(tokens(1, 24))[0])


def test_flops_count_no_more_attention_than_the_window():
    flops = [make_model(window=window, block_size=512).flops_per_token(T)
             for window, T in ((0, 512), (64, 512), (64, 32))]
    plain = [make_model(block_size=512).flops_per_token(T) for T in (512, 64, 32)]
    assert flops == plain and plain[0] > plain[1] > plain[2]


def test_generation_with_a_cache_keeps_to_documents_and_window():
    model, idx = with_window(6, n_layer=2)
    idx[0, 1] = idx[1, 3] = EOT
    found = model.generate(idx[:, :5], 40, temperature=0)
    again = idx[:, :5]
    for _ in range(40):
        again = torch.cat((again, model(again[:, -24:])[0][:, -1:, :50257].argmax(-1)), dim=1)
    assert torch.equal(found, again)


def test_the_window_grows_over_the_run_to_its_full_length():
    config = Config(max_steps=1000, window=1792, block_size=65536)
    spans = [window_schedule(step, config) for step in range(1001)]
    assert spans[0] == 64 and spans[1000] == 1792
    assert spans == sorted(spans) and {w % 64 for w in spans} == {0}
    short = [window_schedule(step, Config(max_steps=10, window=w))
             for step, w in ((0, 40), (10, 40), (10, 100))]
    assert short == [40, 40, 100]
