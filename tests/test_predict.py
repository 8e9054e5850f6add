"""bench.py predict: what was counted, the roofline, its fit, and the tables. No time is measured."""
import json
import re
import sys
from dataclasses import replace

import pytest
import torch

import bench
from benchmarks import predict
from benchmarks.predict import (FITTED, GPUS, PUBLISHED, Shares, Work, at_micro_batch, attention_cost,
                                check_rows, exposed_all_reduce, fit, flops_of, ladder_rows, load_counts,
                                memory_of, recipe_rows, recipe_work, summary)
from benchmarks.tables import ladder_settings
from benchmarks.timing import Setting
from helpers import ROOT
from model import GPT, GPTConfig
from runtime.language_model import ModernConfig
from speedrun import SpeedrunGPT

sys.path.append(str(ROOT / "tests" / "null_gpu"))
from counts import Counter                                                    # noqa: E402, counts on the stand-in

COUNTS = load_counts()
SHARES = fit(COUNTS, FITTED)


def linear_flops(model, looked_up):
    """Of a token, forward and backward: flops_per_token's 6 N for the matrices alone, that is without gains
    and biases, which no matrix product has."""
    return 6 * sum(p.numel() for name, p in model.named_parameters()
                   if p.dim() == 2 and looked_up not in name)


@pytest.mark.parametrize("name", [n for n in COUNTS if not n.startswith("step")])
def test_the_flops_of_a_rung_are_those_of_the_formula(name):
    vocab_size = 50257 if "50257" in name else 50304
    with torch.device("meta"):
        model, looked_up = ((SpeedrunGPT(ModernConfig(vocab_size=vocab_size)), "wte")
                            if name.startswith("speedrun")
                            else (GPT(GPTConfig(vocab_size=vocab_size)), "wpe"))
    assert all(B.isdigit() for B in COUNTS[name])
    for B, counted in COUNTS[name].items():
        tokens, linear = int(B) * 1024, linear_flops(model, looked_up)
        attention = 12 * 12 * 768 * 1024
        assert model.flops_per_token(1024) == pytest.approx(linear + attention, rel=1e-3)
        if "naive" in name or "math" in name:       # six products of T x T
            assert flops_of(counted["products"]) == pytest.approx(tokens * (linear + attention), rel=1e-3)
            assert not counted["attention"]
        else:                                       # seven, of which the mask leaves half
            assert flops_of(counted["products"]) == pytest.approx(tokens * linear, rel=1e-3)
            fused = sum(a[-1] * attention_cost(a[1], *a[3:-1], a[2])[0] for a in counted["attention"])
            assert fused == tokens * attention * 7 / 6 / 2


def test_the_counter_counts_a_real_step_on_a_cpu():
    model = GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=16))
    model.use_attention("naive")
    idx = torch.zeros(3, 32, dtype=torch.int64)
    with Counter() as mode:
        model(idx, idx)[1].backward()
    attention = 12 * 2 * 16 * 32
    expected = 3 * 32 * (linear_flops(model, "wpe") + attention)
    assert flops_of(mode.counts.as_dict()["products"]) == expected
    assert mode.counts.bytes > 0 and mode.counts.operators > 50
    json.dumps(mode.counts.as_dict())


@pytest.mark.parametrize(("operation", "moved"), [
    (lambda x, y: x + y, 3), (lambda x, y: x.add_(y), 3), (lambda x, y: x.copy_(y), 2),
    (lambda x, y: x.t().view(10, 10), 0), (lambda x, y: torch.empty_like(x), 0), (lambda x, y: x.zero_(), 1),
    (lambda x, y: x.mul_(2.0), 2), (lambda x, y: torch._foreach_add_([x, y], 1.0), 4),
    (lambda x, y: x + x[:1].expand(10, 10), 2.1), (lambda x, y: torch.softmax(x, 1), 2),
    (lambda x, y: x @ y, 0)])                               # products are listed apart
def test_bytes_of_an_operator(operation, moved):
    x, y = torch.zeros(10, 10), torch.zeros(10, 10)
    with Counter() as mode:
        operation(x, y)
    assert mode.counts.bytes == pytest.approx(moved * 400)


def test_a_lookup_reads_only_its_rows():
    weight, idx = torch.zeros(1000, 8), torch.zeros(5, dtype=torch.int64)
    with Counter() as mode:
        torch.nn.functional.embedding(idx, weight)
    assert mode.counts.bytes == 2 * 5 * 8 * 4 + 5 * 8


def test_the_check_has_every_published_row():
    rows = check_rows(SHARES, COUNTS)
    published = {}
    for r in rows:
        published.setdefault(r["published"].split(":")[0], []).append(r["ms"])
    assert published == {"lecture": [1000, 333, 300, 130, 96, 93], "PyTorch's blog": [143, 134, 119, 113, 87],
                         "llm.c": [140, 452], "build-nanogpt": [478], "modded-nanogpt": [179, 142, 145, 147]}
    assert [r["error"] for r in rows[:2]] == ["fitted"] * 2
    for r in rows[2:]:
        assert float(r["error"].rstrip("%")) == pytest.approx(
            100 * (r["predicted ms"] / r["ms"] - 1), abs=1.5)
    low, high = (f(r["predicted ms"] / r["ms"] - 1 for r in rows[2:]) for f in (min, max))
    assert summary(rows).startswith("16 rows were not fitted: ")
    assert f"from {low:+.0%} to {high:+.0%}" in summary(rows)


def test_the_fit_uses_the_first_two_rungs_alone(monkeypatch, capsys):
    assert [(row.name, row.ms) for row in FITTED] == [("fp32", 1000), ("TF32", 333)] == \
        [(row.name, row.ms) for row in PUBLISHED[:2]]
    rows = check_rows(SHARES, COUNTS)
    assert [r["predicted ms"] for r in rows[:2]] == [1000, 333]
    used = {name: COUNTS[name] for row in FITTED for name in (row.work.counts, row.work.step)}
    assert fit(used, FITTED) == SHARES
    assert 0 < SHARES.memory < 1 and 0 < SHARES.products < 1
    assert fit(COUNTS, [replace(FITTED[0], ms=1100), FITTED[1]]).products < SHARES.products
    # the command fits no other row: with those all wrong it prints the same shares
    heads = []
    for others in (PUBLISHED[2:], [replace(row, ms=1) for row in PUBLISHED[2:]]):
        monkeypatch.setattr(predict, "PUBLISHED", [*FITTED, *others])
        bench.main(["predict"])
        heads.append(capsys.readouterr().out.split("\nThe check:")[0])
    assert heads[0] == heads[1] and "matrix products attain 88% of the peak" in heads[0]


@pytest.mark.parametrize("share", ["products", "memory", "attention"])
def test_a_smaller_share_makes_a_step_longer(share):
    slower = replace(SHARES, **{share: getattr(SHARES, share) / 2})
    before, after = (ladder_rows(GPUS["H100"], s, COUNTS)[-1]["predicted ms"] for s in (SHARES, slower))
    assert before < after < 2 * before


def test_each_rung_of_the_ladder_is_predicted():
    rows = ladder_rows(GPUS["A100"], SHARES, COUNTS)
    base = Setting(device="cuda", dtype="bfloat16", compile=True)
    assert [row["rung"] for row in rows] == [name for name, _, _ in ladder_settings(base)]
    assert rows[0]["TFLOP"].endswith("fp32") and rows[1]["TFLOP"].endswith("TF32")
    assert rows[0]["GB"] == rows[1]["GB"] and rows[0]["predicted ms"] > 2 * rows[1]["predicted ms"]
    assert rows[-1]["TFLOP"].endswith("bf16") and rows[-1]["tokens/s"] > rows[0]["tokens/s"]


def test_a_host_that_is_slower_than_the_gpu_sets_the_pace():
    fast = replace(GPUS["H100"], bf16=1e9, tf32=1e9, bandwidth=1e9)
    work = Work("gpt2 compile flash", "step fused")
    t = predict.predict(work, fast, SHARES, COUNTS)
    assert t["step"] == t["host"] == pytest.approx(t["launches"] * SHARES.launch)
    assert predict.predict(work, GPUS["4090"], SHARES, COUNTS)["step"] > t["host"]


def test_counts_between_and_beyond_the_counted_micro_batches_are_linear():
    entry = {"8": {"bytes": 100}, "16": {"bytes": 180}}
    assert [at_micro_batch(entry, B, lambda c: c["bytes"]) for B in (8, 16, 12, 64)] == [100, 180, 140, 660]


def test_each_update_of_a_step_costs_an_optimizers_step_and_an_all_reduce():
    one = Work("frontier compile flash", "step frontier", 16, gpus=8, micro_steps=4)
    a, b = (predict.predict(work, GPUS["H100"], SHARES, COUNTS) for work in (one, replace(one, updates=4)))
    for part in ("optimizer", "all-reduce"):
        assert b[part] == pytest.approx(4 * a[part]) and a[part] > 0
    assert b["launches"] - a["launches"] == 3 * COUNTS["step frontier"]["step"]["launches"]
    assert b["step"] - a["step"] == pytest.approx(3 * (a["optimizer"] + a["all-reduce"]))


def test_the_all_reduce_hides_behind_the_backward_but_for_the_last_bucket():
    gpu, shares = GPUS["H100"], Shares(1, 1, link=1)
    whole = 2 * 7 / 8 * 4e8 / 450e9
    assert exposed_all_reduce(1e8, gpu, shares, 1, 0.1) == 0
    assert exposed_all_reduce(1e8, gpu, shares, 8, 0.1) == pytest.approx(whole / 3)
    assert exposed_all_reduce(1e8, gpu, shares, 8, 0.0) == pytest.approx(whole)


def test_the_micro_batch_fits_and_eight_gpus_share_the_step():
    for gpu in GPUS.values():
        for row in recipe_rows(gpu, SHARES, COUNTS):
            work = recipe_work(row["recipe"], gpu, int(row["GPUs"].split(" x ")[0]), COUNTS)
            assert work.B * work.gpus * work.micro_steps == 512 and row["GiB"] < 0.9 * gpu.memory
            twice = memory_of(replace(work, B=2 * work.B), COUNTS) / 2**30
            first = {"frontier": 4}.get(row["recipe"], 1)          # an update has at least one micro-batch
            assert work.micro_steps == first or work.micro_steps > first and twice > 0.9 * gpu.memory
            assert work.updates == pytest.approx((4 + 2 + 1) / 3 if first == 4 else 1)
            steps = {"gpt2": 19073, "speedrun": 3242, "frontier": 2500}[row["recipe"]]
            assert row["hours"] == pytest.approx(steps * 2**19 / row["tokens/s"] / 3600)
    one, eight = recipe_rows(GPUS["H100"], SHARES, COUNTS)[:2]
    assert 6 < eight["tokens/s"] / one["tokens/s"] < 8


@pytest.mark.parametrize(("B", "reserved"), [(64, 23.2), (200, 67.3)])
def test_the_memory_is_that_of_the_table_in_the_docs(B, reserved):
    """Which was counted at these micro-batches; here it follows from 8 and 16."""
    work = Work("gpt2 compile auto", "step fused", B)
    assert memory_of(work, COUNTS) / 2**30 == pytest.approx(reserved, rel=0.06)


def test_a_rung_that_does_not_fit_has_no_time():
    rows = ladder_rows(GPUS["4090"], SHARES, COUNTS)
    assert rows[0]["predicted ms"] == "out of memory" and rows[0]["GiB"] > 24
    assert rows[-2]["predicted ms"] > 0


def test_the_command_prints_and_saves_the_tables(tmp_path, capsys):
    bench.main(["predict", "--gpu", "A100", "--json", str(tmp_path / "p.json")])
    out = capsys.readouterr().out
    assert "PREDICTED, not measured" in out and "fitted to the first two rows" in out
    rows = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(predict.LADDER) + len(PUBLISHED) + 6
    bench.main(["predict"])
    assert "H100 SXM 80 GB" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200", "4090"])
def test_the_docs_have_what_the_command_prints(gpu, capsys):
    """After new counts: print the tables of docs/speed.md again, and correct README's line."""
    bench.main(["predict", "--gpu", gpu])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    docs = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    docs = {re.sub(" +", " ", line) for line in docs.splitlines()}
    first = 0 if gpu == "H100" else len(predict.LADDER) + 2         # one ladder is enough
    assert len(printed) == len(predict.LADDER) + len(PUBLISHED) + 6 + 2 * 3
    for line in printed[first:]:
        assert set(line) <= set("| -") or re.sub(" +", " ", line) in docs, line
    if gpu == "H100":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        rates = re.findall(r"predicted \| gpt2 (\d+)k tokens/s, speedrun (\d+)k, frontier (\d+)k", readme)
        one = [row["tokens/s"] / 1e3 for row in recipe_rows(GPUS[gpu], SHARES, COUNTS)[::2]]
        assert [list(map(int, pair)) for pair in rates] == [list(map(round, one))]
