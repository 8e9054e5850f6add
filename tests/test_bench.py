"""bench.py: its tables at a tiny size, what they compute, what they refuse."""
import ast
import functools
import itertools
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bench
import frontier
import benchmarks.data as data_benchmark
from benchmarks import ablation, flags, nanochat, processes, steps, tables, timing
from benchmarks.compare import Curve, read_curve
from benchmarks.data import OURS, POOL, Job
from benchmarks.timing import Setting
from helpers import ROOT, forked, parse_flags, refused
from runtime.cli import UserError, brief_error
from runtime.metrics import HEADER
from runtime.recipe import make_batch_schedule
from recipes import PRESETS
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode

TINY = " --device cpu --dtype float32 --size 1x32 --batch_size 1 --sequence_length 32 --steps 1 --turns 1"


def run_script(argv, cwd=".", env=None, **how):
    """The script argv[0], perhaps of a copy of the project; after -m a module, after -c a program."""
    ours = {"runtime", "benchmarks", *(path.stem for path in ROOT.glob("*.py"))}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    os.chdir(cwd)
    os.environ.update(env or {})
    kind, sys.argv = argv[0], argv[argv[0] in ("-m", "-c"):]
    sys.path[:0] = ["." if kind in ("-m", "-c") else str(Path(kind).parent)]
    if kind == "-c":
        exec(argv[1], {})
    else:
        (runpy.run_module if kind == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")


def fork(argv, **how):
    """processes.run_process, by a fork of a process that has torch imported."""
    # multiprocessing loses the exit code of a process that two threads ask after
    with ONE_AT_A_TIME:
        return subprocess.CompletedProcess(argv, *forked(functools.partial(run_script, argv[1:], **how))[0])


ONE_AT_A_TIME = threading.Lock()


@pytest.fixture
def table(monkeypatch, capsys, tmp_path):
    """flags -> (what bench.py prints, its rows); what it measures is measured in this process."""
    def worker(s):
        try:
            return steps.WORKERS[s.what](s)
        except Exception as error:
            return {"failed": brief_error(error)}
    monkeypatch.setattr(timing, "run_in_subprocess", worker)
    monkeypatch.chdir(tmp_path)

    def run(flags):
        rows, tables = [], bench.TABLES.items()
        with monkeypatch.context() as patch:
            patch.setattr(bench, "TABLES", {name: lambda *how, found=found: rows.extend(found(*how))
                                            for name, found in tables})
            bench.main(flags.split())
        return capsys.readouterr().out, rows
    return run


def test_steps_and_kernels_are_measured_and_what_is_left_out_is_named(table):
    shown, rows = table("ladder" + TINY)
    measured = [row for row in rows if "failed" not in row]
    assert (len(measured), shown.count("\n| "), shown.count("\nnot measured: ")) == (7, 9, 4)
    assert all(row["ms per step"] > 0 and row["peak GB"] > 0.1 and row["MFU"] > "0.0%" for row in measured)
    assert measured[0]["in all"] == "1.00x" and all(f"py {key} " in bench.__doc__ for key in bench.TABLES)
    kernels = {row["kernel"]: row for row in table("attention" + TINY)[1]}
    assert all(0 < float(kernels[name]["error of y"]) < 1e-5 for name in ("auto", "naive", "math"))
    assert kernels.keys() == set(tables.ATTENTION) and "kernel" in kernels["cudnn"]["failed"]
    rates = steps.WORKERS["loader"](Setting(size="bin", recipe="shuffled", T=1024, steps=2))["rates"]
    assert len(rates) == 2 and min(rates) > 0, "one an epoch"


def changes(settings):
    """What each setting has other than the one before it."""
    return [{name: value for name, value in vars(b).items() if value != getattr(a, name)}
            for a, b in itertools.pairwise(settings)]


def climb(monkeypatch, cannot_run=lambda s: False, turns=1, **base):
    """The names of the rungs that the ladder measures, and the settings in the order of the processes."""
    asked = []

    def measured(s):
        asked.append(s)
        if cannot_run(s):
            return {"failed": "no kernel"}
        return {"seconds": [1.0], "warmup_seconds": 1.0, "memory": 1, "flops_per_token": 1, "peak_flops": 1}
    monkeypatch.setattr(timing, "run_in_subprocess", measured)
    rows = tables.ladder(types.SimpleNamespace(turns=turns), Setting(**base))
    return [row["rung"] for row in rows if "failed" not in row], asked


PLAIN = dict(dtype="float32", compile=False, attention="naive", vocab_size=50257, fused=False)


def test_a_rung_of_the_ladder_changes_what_it_is_called_after_and_no_more(monkeypatch):
    names, cpu = climb(monkeypatch, device="cpu", B=4)
    assert vars(cpu[0]).items() >= (PLAIN | dict(loss_chunk=0, tune_memory=False, B=4)).items()
    assert changes(cpu) == [dict(dtype="bfloat16"), dict(attention="flash"), dict(vocab_size=50304),
                            dict(fused=True), dict(tune_memory=True), dict(loss_chunk=None),
                            dict(attention="auto")]
    for name, word in zip(names[1:], ("bfloat16", "flash", "50304", "AdamW", "mallopt", "loss", "auto"),
                          strict=True):
        assert word in name
    names, gpu = climb(monkeypatch, device="cuda:0", compile=True)
    assert vars(gpu[0]).items() >= (PLAIN | dict(tf32=False, B=16)).items()
    assert changes(gpu) == [dict(tf32=True), dict(dtype="bfloat16"), dict(compile=True),
                            dict(attention="flash"), dict(vocab_size=50304), dict(fused=True),
                            dict(attention="auto"), dict(B=64)]
    for name, word in zip(names[1:], ("TF32", "bfloat16", "compile", "flash", "50304", "AdamW", "auto", "64"),
                          strict=True):
        assert word in name


def test_a_compiled_models_loss_has_no_rung_because_it_has_no_tiles(monkeypatch):
    _, cpu = climb(monkeypatch, device="cpu", compile=True)
    assert changes(cpu) == [dict(dtype="bfloat16"), dict(compile=True), dict(attention="flash"),
                            dict(vocab_size=50304), dict(fused=True), dict(tune_memory=True),
                            dict(attention="auto")]


def test_a_rung_stands_on_the_last_one_that_can_run(monkeypatch):
    def cannot_run(s):
        return s.dtype == "bfloat16" or s.attention == "flash"
    names, asked = climb(monkeypatch, cannot_run, turns=2, device="cuda:0", compile=True)
    assert [name for name in names if "flash" in name or "bfloat16" in name] == []
    able = [s for s in asked if not cannot_run(s)]
    first, second = able[:len(names)], able[len(names):]
    assert first == second and len(asked) == 2 * len(names) + 2, "what fails is tried once"
    assert vars(first[0]).items() >= PLAIN.items()
    assert changes(first) == [dict(tf32=True), dict(compile=True), dict(vocab_size=50304), dict(fused=True),
                              dict(attention="auto"), dict(B=64)]


def test_the_ladders_figures_follow_from_what_was_measured(table, monkeypatch):
    n, asked = itertools.count(1), []

    def measured(s):
        asked.append(s)
        if s.attention == "flash" and s.vocab_size == 50257:
            return {"failed": "no kernel"}
        seconds = 2 / next(n)
        return {"seconds": [seconds, 9.0, seconds], "warmup_seconds": 7.0, "memory": 3_500_000_000,
                "flops_per_token": 1 + (s.vocab_size == 50304),
                "peak_flops": 4e3 if s.dtype == "bfloat16" else 2e3}
    monkeypatch.setattr(timing, "run_in_subprocess", measured)
    shown, rows = table("ladder --device cpu --dtype bfloat16 --batch_size 4 --sequence_length 100 --turns 1")
    first, second, third = [row for row in rows if "failed" not in row][:3]
    assert (first["ms per step"], first["tokens/s"], first["peak GB"], first["start s"]) == pytest.approx(
        (2000, 200, 3.5, 7))
    assert [(row["MFU"], row["gain"], row["in all"]) for row in (first, second, third)] == [
        ("5.0%", "1.00x", "1.00x"), ("10.0%", "2.00x", "2.00x"), ("30.0%", "1.50x", "3.00x")]
    assert "0.00 TFLOP/s" in shown and re.search(r"\| +2,000 \| +200 \| +3.50 \| +7.00 \|", shown)
    assert {(s.device, s.B, s.T, s.what) for s in asked} == {("cpu", 4, 100, "step")}


def test_time_against_ours_is_theirs_in_terms_of_ours(table, monkeypatch, tmp_path):
    """And build-nanogpt as shipped is eager, in an environment without our settings of the allocator."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    Path("clone").mkdir()
    Path("clone/train_gpt2.py").touch()

    def measured(s):
        assert s.peer in ("", str(tmp_path / "clone")) and "PYTORCH_ALLOC_CONF" not in os.environ
        seconds = (1.5 - 0.5 * s.compile) if s.peer else 0.5
        return {"seconds": [seconds], "warmup_seconds": 1.0, "memory": 1e9, "peer": s.peer}
    monkeypatch.setattr(timing, "run_in_subprocess", measured)
    for more in ("", " --compile"):
        rows = table(f"peer clone --device cpu --turns 1{more}")[1]
        assert [(row["step"], row["time against ours"]) for row in rows] == [
            ("ours", "1.00x"), ("build-nanogpt, as shipped", "3.00x"),
            ("build-nanogpt, torch.compile", "2.00x")]


def test_a_kernels_errors_are_those_of_its_output_and_of_its_worst_gradient(monkeypatch):
    exact = steps.attention
    monkeypatch.setattr(steps, "attention", lambda q, k, v, kernel: exact(
        q, k, v if kernel == "naive" else v.detach() / 2 + v / 2, "naive"))
    found = steps.WORKERS["attention"](Setting(what="attention", size="1x32", B=2, T=16, dtype="float32",
                                               attention="math", steps=3, warmup=0))
    assert found["error_forward"] < 1e-5 and found["error_backward"] == pytest.approx(0.5, abs=1e-4)
    assert len(found["seconds"]) == 3


def test_the_warm_up_is_not_in_the_times(monkeypatch):
    clock, took = [5.0], iter((100.0, 30.0, 1.0, 2.0, 6.0))

    def step():
        clock[0] += next(took)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert timing.time_steps(step, Setting(device="cpu", warmup=2, steps=3)) == (130, [1, 2, 6])


def test_a_cpus_peak_is_the_rate_of_the_mlps_products(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    timed = []

    def time_steps(step, s):
        timed.append((step(), s))
        return 7.0, [0.25, 0.5, 8.0]
    monkeypatch.setattr(steps, "time_steps", time_steps)
    s = Setting(size="1x32", B=2, T=8, dtype="float32", attention="naive")
    found = steps.WORKERS["step"](s)
    assert found["peak_flops"] == 2 * (2 * 8) * 32 * (4 * 32) / 0.5
    assert (found["seconds"], found["warmup_seconds"]) == ([0.25, 0.5, 8.0], 7.0)
    assert timed[1][0].shape == (16, 128) and timed[1][1].warmup > 0
    # 6 a parameter but the positions', and attention's products: 12 layers * width * tokens
    parameters = 50304 * 32 + 12 * 32 * 32 + 13 * 32 + 2 * 32
    assert found["flops_per_token"] == pytest.approx(6 * parameters + 12 * 32 * 8, rel=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_the_timed_step_is_made_as_the_setting_says(kept, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fused, tuned, shapes = [], [], []
    monkeypatch.setattr(steps.train_gpt2, "tune_malloc", lambda: tuned.append(1))
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *how: fused.append(optimizer.param_groups[0]["fused"]))
    try:
        step, model = steps.our_step(Setting(size="1x32", B=2, T=8, dtype="float32", vocab_size=50257,
                                             fused=kept, tune_memory=kept))
        model.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
        before = model.lm_head.weight.clone()
        step()
    finally:
        hook.remove()
    assert fused == [True if kept else None] and len(tuned) == kept and shapes == [(2, 8)]
    assert model.config.vocab_size == 50257 and not torch.equal(before, model.lm_head.weight)


@pytest.mark.parametrize("recipe, size, expected", [
    ("gpt2", "gpt2", (12, 768, 12)), ("frontier", "gpt2", (12, 768, 6)), ("gpt2", "4x256", (4, 256, 4)),
    ("speedrun", "4x256", (4, 256, 2)), ("speedrun", "2x64", (2, 64, 1)),
    ("gpt2", "gpt2-xl", (48, 1600, 25))])
def test_a_size_is_layers_times_width_with_the_recipes_heads(recipe, size, expected):
    shape = steps.shape_of(Setting(recipe=recipe, size=size))
    assert tuple(shape[name] for name in ("n_layer", "n_embd", "n_head")) == expected


@pytest.mark.parametrize("argv, device, expected, turns", [
    ("ladder", "cpu", dict(B=4, T=256, steps=4, warmup=2, compile=False, size="gpt2"), 2),
    ("ladder", "cuda:0", dict(B=16, T=1024, steps=20, warmup=3, compile=True, recipe="gpt2"), 2),
    ("ladder --no_compile", "cuda:0", dict(B=16, compile=False), 2),
    ("peer x --compile", "mps", dict(B=4, T=1024, steps=4, compile=True), 2),
    ("data", "cpu", {}, 5), ("data", "cuda:0", dict(device="cpu"), 5),
    ("attention", "cpu", dict(B=4, T=256, steps=50), 2), ("attention --steps 3", "cpu", dict(steps=3), 2),
    ("attention", "cuda:0", dict(B=16, T=1024, steps=50), 2), ("recipes x", "cpu", dict(size="4x256"), 2),
    ("ladder --batch_size 3 --sequence_length 5 --steps 7 --turns 1 --size 1x2 --recipe speedrun", "cpu",
     dict(B=3, T=5, steps=7, size="1x2", recipe="speedrun"), 1)])
def test_what_is_measured_without_flags(argv, device, expected, turns, monkeypatch):
    monkeypatch.setattr(flags, "choose_device", lambda name: device)
    monkeypatch.setattr(flags, "choose_dtype", lambda name, device: "bfloat16")
    args, base = flags.parse_args(argv.split(), bench.TABLES, "")
    assert vars(base).items() >= ({"device": device, "dtype": "bfloat16"} | expected).items()
    assert args.turns == turns


def test_a_tables_cells_are_short_and_a_missing_one_says_so(capsys):
    timing.print_table([{"a": "x", "b": 99.994, "c": 1}, {"a": "yyy", "b": 1234567.0}, {"a": "z", "b": None},
                        {"a": "w", "failed": "no room"}])
    assert capsys.readouterr().out == """
| a   |         b | c |
| --- | --------- | - |
| x   |     99.99 | 1 |
| yyy | 1,234,567 |   |
| z   |       n/a |   |
not measured: w: no room

"""


def test_the_loaders_rate_is_tokens_a_second(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    [rate] = steps.WORKERS["loader"](Setting(size="npy", recipe="in order", B=8, T=50_000, steps=1))["rates"]
    # four shards of 4,000,000 tokens and some, of 80 sequences each, whose targets are a token further: 79 of
    # the first, which has no further token
    assert rate == (79 + 80 + 80 + 80) // 8 * 8 * 50_000


def test_the_loaders_order_is_the_one_that_its_row_says(monkeypatch):
    shuffled, rows = [], np.zeros((8, 17), np.uint16)
    monkeypatch.setattr(data_benchmark, "TokenDataset", lambda shards, T, seed, shuffle, vocab_size: (
        shuffled.append(shuffle) or types.SimpleNamespace(total=8, T=16, read=lambda first, count: rows)))
    for order in ("shuffled", "in order"):
        steps.WORKERS["loader"](Setting(size="npy", recipe=order, B=8, T=16, steps=1))
    assert shuffled == [True, False]


def test_fineweb_pys_figures_follow_from_what_was_measured():
    jobs = {"ours": Job(OURS, "parquet", 1), "ours, 8": Job(OURS, "parquet", 8),
            "pool": Job(POOL, "parquet", 1)}
    text = {"bytes": 42_000_000, "tokens": 9_000_000}
    results = {"ours": {"seconds": [9.0, 1.0, 2.0], "cpu": [3.0, 5.0, 10.0]} | text,
               "ours, 8": {"seconds": [7.0], "cpu": [1.0]} | text,
               "pool": {"seconds": [8.0], "cpu": [1.0]} | text}
    ours, more, pool = data_benchmark.fineweb_rows(jobs, results)
    assert ours == {"what": "ours", "s": 2.0, "slowest": 9.0, "CPU s": 5.0, "million tokens": 9.0,
                    "MB of text/s": 21.0, "against the pool": "4.00x"}
    assert "against the pool" not in more and pool["against the pool"] == "1.00x"


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_the_timed_step_is_the_trainers_and_timed_to_its_end_on_a_mac(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    step, model = steps.our_step(Setting("step", "cpu", recipe, "2x64", 4, 16, "float32", attention="naive",
                                         loss_chunk=8))
    seen, wte = [], model.transformer.wte.weight
    monkeypatch.setattr(torch.mps, "synchronize", lambda: seen.append(wte.sum().item()))
    _, seconds = timing.time_steps(step, Setting(device="mps", warmup=1, steps=2))
    assert len(seconds) == 2 and len({*seen}) == 3, "after the warm-up, and after each step"
    assert (model.kernel, model.loss_chunk) == ("naive", 8)


def test_settings_are_measured_in_turn_each_by_a_process_that_may_fail(monkeypatch, tmp_path):
    (tmp_path / "bench.py").write_text("""
import json, os, sys
B, calls = json.loads(sys.argv[2])["B"], __file__ + ".calls"
open(calls, "a").write(str(B))
if B == 2:
    print("a warning", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
if B == 3:
    sys.exit("broken")
print(json.dumps({"seconds": [B + os.path.getsize(calls)], "memory": 10 - os.path.getsize(calls),
                  "caches": [os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]]}))
""")
    monkeypatch.setattr(timing, "BENCH", tmp_path / "bench.py")
    settings = {B: Setting(B=B) for B in (1, 2, 3)} | {4: Setting(B=4, peer=str(tmp_path)), 5: "left out"}
    found = timing.measure(settings, 2)
    caches = found[1].pop("caches") + found[4].pop("caches")
    assert len(set(caches)) == 2 * 4, "no process finds what another one has compiled"
    killed = found.pop(2)["failed"]
    assert "SIGKILL" in killed and "warning" not in killed
    assert found == {1: {"seconds": [2, 6], "memory": 9}, 3: {"failed": "broken"},
                     4: {"seconds": [8, 10], "memory": 6}, 5: {"failed": "left out"}}
    assert (tmp_path / "bench.py.calls").read_text() == "123414"


@pytest.mark.parametrize("flags", ["ladder --device cpu --batch_size 2", "attention --device cpu", "data",
                                   "peer . --device cpu"])
def test_a_table_says_which_of_its_lines_failed(flags, table, monkeypatch):
    names = "warmup_seconds", "flops_per_token", "peak_flops", "error_forward", "error_backward", "memory"
    good, n = {"seconds": [0.5], "rates": [1.0], **dict.fromkeys(names, 1.0)}, itertools.count()
    monkeypatch.setattr(data_benchmark, "time_fineweb", lambda jobs, turns, clone: dict.fromkeys(
        jobs, {"seconds": [1.0], "cpu": [1.0], "tokens": 10, "bytes": 42}))
    monkeypatch.setattr(timing, "run_in_subprocess", lambda _: good if next(n) - 1 else {"failed": "no room"})
    Path("train_gpt2.py").touch()
    shown, rows = table(f"{flags} --turns 1")
    assert shown.count(": no room") == 1 == [row.get("failed") for row in rows].count("no room")


@pytest.mark.parametrize(("flags", "word"), [
    ("lader", "lader"), ("--device cpu", "table"), ("recipes a b", "one path"), ("recipes", "fineweb.py"),
    ("recipes a --ideas", "--recipe"), ("recipes a --recipe frontier", "--ideas"),
    ("recipes a --compile", "--compile"), ("ladder a", "no path"), ("attention a", "no path"),
    ("attention --compile", "--compile"), ("peer a b", "one path"), ("data a b", "one path"),
    ("ladder --plot a.png", "--plot"), ("compare a --title b", "--plot"),
    *((f"data --{name} {value}", f"--{name}") for name, value in (
        ("device", "cpu"), ("dtype", "float32"), ("recipe", "frontier"), ("size", "1x2"), ("batch_size", 2),
        ("sequence_length", 8))),
    ("recipes a --ideas --recipe frontier --nanochat b", "--nanochat"),
    ("peer no --steps 0", "--steps 0"), ("data no", "no/fineweb.py"),
    ("recipes a --size 4x0", "4x0"), ("ladder --size 1x64 2x64", "one size"), ("recipes a", "a"),
    ("peer no", "no/train_gpt2.py"), ("ladder --device tpu", "tpu"), ("compare a --no_compile", "--compile"),
    ("compare a --plot a.md", ".png"), ("compare", "--out"), ("compare a --plot no/a.png", "no/a.png"),
    ("compare a", "a/metrics.csv"),
    *((f"compare {i}.csv", word) for i, word in enumerate(("", "row 1", "row 2", "row 2", "5"), 1))])
def test_a_mistake_is_one_line(flags, word, table, monkeypatch):
    monkeypatch.setattr(steps, "WORKERS", {})           # what is not refused measures nothing
    for i, text in enumerate(("1,2", "a,b", "tokens,x\n1,2", "1,2\n3", "1,2\n1,3")):
        Path(f"{i}.csv").write_text(text)
    refused(lambda: table(flags), word)


def drawn(monkeypatch):
    """The list of figures that are saved from now on, in place of their files."""
    figure, figures = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda *args, **how: figures.append(args[0]))
    return figures


def write_metrics(out, losses, seconds=60.0, end="\n"):
    """The metrics.csv of a run of 1,000 tokens a step that validated each second step, and at its end."""
    rows = [f"{step},{step}000,{step * seconds:.3f},9.5,{'' if step % 2 else losses[step // 2]},,,,"
            for step in range(2 * len(losses) - 1)]
    Path(out).mkdir()
    Path(out, "metrics.csv").write_text("\n".join([HEADER, *rows]) + end)


def test_compare_shows_what_each_run_needed_to_reach_the_others_and_a_curve(table):
    write_metrics(slow := "slow$^{$", [11.0, 5.0, float("nan"), 4.0])
    write_metrics("fast", [11.0, 4.5, 3.5], seconds=3600.0)
    write_metrics("going", [11.0, 6.0], end="\n3,3000,180.0,9.5,3.")       # still in progress, or crashed
    _, rows = table(f"compare --plot a.png --title 4_layers,_$5$ {slow} fast going {slow}")
    assert [[*row.values()][:5] for row in rows[:3]] == [
        [slow, 6000, 6, 360, 4.0], ["fast", 4000, 4, 14400, 3.5], ["going", 2000, 2, 120, 6.0]]
    write_metrics("worse", [11.0, 3.0, 4.0])
    [row] = table("compare worse")[1]
    assert (row["final val loss"], row["lowest"]) == (4.0, 3.0)
    assert [row["reached after"] for row in rows[3:]] == [
        "3k (50%)", "-", "-", "-", "1.67k (83%)", "1.54k (77%)"]
    assert Path("a.png").read_bytes()[:4] == b"\x89PNG"
    Path("paper.csv").write_text('"Step","Loss", "Tokens"\n# a comment\n1, 7,1e3\r\n2,4.0,7000\r\n')
    rows = table("compare going paper.csv")[1][2:]
    assert [(*list(row.values())[:3], round(row["difference"], 4)) for row in rows] == [
        ("going", "paper.csv", 2000, -0.5), ("paper.csv", "going", 1000, -1.5)]
    curve, preset = read_curve(str(ROOT / "assets/shakespeare.csv")), PRESETS["shakespeare"].flags
    config, _ = parse_flags(["--preset", "shakespeare"])
    config.sequence_length = config.block_size
    schedule = make_batch_schedule(frontier.RECIPE, config, 1)
    steps_of_val = range(0, preset["max_steps"] + 1, preset["val_every"])
    assert [at for at, *_ in curve.points] == [*map(schedule.tokens_before, steps_of_val)], "docs/running.md"


def test_a_picture_of_runs_has_tokens_and_time_of_training(table, monkeypatch):
    figures = drawn(monkeypatch)
    write_metrics("slow", [11.0, 5.0, 4.0], seconds=900.0)
    write_metrics("fast", [11.0, 4.0], seconds=600.0)
    for runs, unit, seconds in (("slow fast", "minutes", 60), ("slow", "minutes", 60)):
        table(f"compare --plot a.png --title {runs.replace(' ', '_')} {runs}")
        figure = figures.pop()
        tokens, times = figure.axes
        assert figure.get_suptitle() == runs.replace(" ", "_")
        assert (tokens.get_xlabel(), times.get_xlabel()) == ("tokens of training", f"{unit} of training")
        for panel, a_step in ((tokens, 1000), (times, 900 / seconds)):
            assert panel.lines[0].get_xydata().tolist() == [[0, 11], [2 * a_step, 5], [4 * a_step, 4]]
    write_metrics("days", [11.0, 5.0], seconds=36_000.0)
    table("compare --plot a.png slow days")
    times = figures.pop().axes[1]
    assert times.get_xlabel() == "hours of training"
    slow, line, days = times.lines
    assert (slow.get_xdata().tolist(), days.get_xdata().tolist()) == ([0, 0.5, 1], [0, 20])
    assert [*line.get_ydata()] == [4, 4] and "slow" in line.get_label()


def test_the_peers_definitions_run_and_nothing_after_them(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "run_process", fork)
    (tmp_path / "train_gpt2.py").write_text("""
from hellaswag import render_example, iterate_examples
from model import GPT, GPTConfig, torch
GPT.configure_optimizers = lambda self, **how: master_process or torch.optim.AdamW(self.parameters())
GPT.__call__ = lambda self, *xy: torch.is_autocast_enabled("cpu") or self.forward(*xy)
import tiktoken
raise SystemExit("the script's own run began")
""")
    assert timing.run_in_subprocess(Setting(size="1x8", T=8, dtype="float32", peer=str(tmp_path)))["seconds"]


def three_steps(recipe):
    """Losses and all that the optimizers are told; each parameter with a gradient is updated once."""
    config, _ = parse_flags(f"--recipe {recipe} --n_layer 2 --n_head 2 --n_embd 32 --block_size 16 --dtype "
                            "float32 --total_batch_size 4096 --max_steps 30".split())
    config.sequence_length = 16
    how, found = steps.train_gpt2.RECIPES[recipe], []
    vars(config).update(how.automatic(config))
    frontier.parts_of_tokens.cache_clear()
    torch.manual_seed(0)
    model = steps.train_gpt2.fresh_model(config)
    idx = torch.randint(50257, (2, 17), generator=torch.Generator().manual_seed(1))
    optimizers = how.make_optimizers(model, config)
    for step in range(3):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        updated = [p for group in groups for p in group["params"]]
        assert sorted(map(id, updated)) == sorted(id(p) for p in model.parameters() if p.grad is not None)
        for optimizer in optimizers:
            optimizer.step()
        found += [loss.item(), how.lr_scale(9 * step, 0.3 * step, config), how.momentum(0.3 * step, config)]
        found += [how.batch_divisors(config)]
        found += [group.get(key) for group in groups for key in ("lr", "eps", "betas")]
    return found


@pytest.mark.parametrize("recipe", ablation.ABLATIONS)
def test_without_each_idea_the_recipe_trains_and_is_another_one(recipe, monkeypatch):
    whole = three_steps(recipe)
    assert three_steps(recipe) == whole
    for idea, leave_out in ablation.ABLATIONS[recipe].items():
        with monkeypatch.context() as patch:
            leave_out(patch.setattr)
            assert three_steps(recipe) != whole, idea
    frontier.parts_of_tokens.cache_clear()
    assert three_steps(recipe) == whole


def test_a_run_without_an_idea_is_a_real_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "run_process", fork)
    for name in ("val", "train"):
        write_shard(tmp_path / f"text_{name}_000000.npy", np.arange(4000, dtype=np.uint16) ** 2 % 50)
    flags = dict(data=tmp_path, recipe="speedrun", n_layer=1, n_head=1, n_embd=16, vocab_size=64, val_every=2,
                 total_batch_size=64, block_size=16, max_steps=4, val_tokens=9, device="cpu", dtype="float32")
    whole, ablated = ([loss for *_, loss in ablation.train(flags, idea).points] for idea in (None, "softcap"))
    assert [whole[0], ablated[0]] == pytest.approx([np.log(64)] * 2, abs=1e-5) and whole[2] != ablated[2]
    for val_every, points in ((2, 2), (1, 2)):      # what is not finite: step 1's gradient, its validation
        diverged = ablation.train(flags | dict(recipe="gpt2", max_lr=1e30, val_every=val_every))
        losses = [loss for *_, loss in diverged.points]
        assert len(losses) == points and math.isfinite(losses[0]) and math.isnan(losses[-1])


def trained(monkeypatch, asked, steps=None):
    """Runs of recipes seem to train, to the end or for `steps`. Their flags are appended to `asked`."""
    def run(argv, env):
        assert argv[1:4] == [str(ROOT / "bench.py"), "train", ""]
        flags = dict(word[2:].split("=", 1) for word in argv[4:])
        asked.append(flags | {"threads": env.get("OMP_NUM_THREADS")})
        done = int(flags["max_steps"]) if steps is None else steps
        write_metrics(flags["out"], [5.0] + [4.0] * (done // 2))
        return subprocess.CompletedProcess(argv, 0, "", "")
    monkeypatch.setattr(ablation, "run_process", run)


def test_a_run_of_a_recipe_is_given_its_seed_shape_and_schedule(monkeypatch, table, data):
    """And no idea is left out of it."""
    asked = []
    trained(monkeypatch, asked)
    table(f"recipes {data} --device cpu --dtype float32 --batch_size 2 --sequence_length 16 --turns 2 "
          "--steps 60 --size 2x128")
    assert [len([flags for flags in asked if flags["seed"] == seed]) for seed in "01"] == [7, 7]
    same = dict(block_size=16, total_batch_size=32, val_tokens=64 * 32, device="cpu", dtype="float32",
                n_layer=2, n_embd=128, hellaswag_every=0, sample_every=0, checkpoint_every=0, threads=1,
                data=data)
    assert all(flags.items() >= {(name, str(value)) for name, value in same.items()} for flags in asked)
    runs = sorted((f["recipe"], f["n_head"], int(f["max_steps"]), int(f["val_every"]), f.get("max_lr"),
                   f.get("warmup_steps")) for f in asked if f["seed"] == "1")
    assert runs == [("frontier", "1", 6, 1, None, None), ("frontier", "1", 60, 7, None, None),
                    *(("gpt2", "2", 60, 7, str(rate), "4") for rate in (0.001, 0.002, 0.004)),
                    ("speedrun", "1", 20, 2, None, None), ("speedrun", "1", 60, 7, None, None)]


def test_a_run_that_a_signal_ends_is_not_taken_for_a_whole_one(monkeypatch):
    trained(monkeypatch, [], steps=40)
    refused(lambda: ablation.train({"device": "cpu", "max_steps": 60}), "40", "60")
    assert ablation.train({"device": "cpu", "max_steps": 40}).last["step"] == 40


PLAY = "To be, or not to be, that is the question:\n" * 20
BYTES_A_TOKEN = 2 * len(PLAY) / (2 * len(encode(PLAY)) + 1)         # in validation, without the first token


@pytest.fixture
def data(tmp_path):
    """A folder of shards: PLAY ten times for training, twice for validation."""
    (tmp_path / "data").mkdir()
    document = [EOT, *encode(PLAY)]
    for name, tokens in (("val", 2 * document), ("train", 10 * document)):
        write_shard(tmp_path / f"data/text_{name}_000000.npy", np.array(tokens, dtype=np.uint16))
    return tmp_path / "data"


def test_a_run_that_fails_is_a_row_and_the_others_go_on(monkeypatch, table, data):
    asked = []

    def train(flags, idea="", seed=0):
        asked.append(flags["recipe"])
        if flags["recipe"] == failing:
            raise UserError("no room")
        return Curve("log", {"seconds": 1.0, "step": 3, "tokens": 96}, [(0, 0.0, 9.0), (96, 1.0, 5.0)])
    monkeypatch.setattr(ablation, "train", train)
    drawn(monkeypatch)
    failing = "speedrun"
    flags = (f"recipes {data} --device cpu --batch_size 2 --sequence_length 16 --size 1x64 --steps 60 "
             "--turns 2")
    shown, rows = table(f"{flags} --plot r.png")
    failed = [row for row in rows if "failed" in row]
    assert [row["failed"] for row in failed] == ["no room"] * 2 and len(rows) == 7
    assert all("speedrun" in row["run"] for row in failed) and shown.count("not measured: ") == 2
    assert asked.count("speedrun") <= 2 * 2 and asked.count("frontier") == 2 * 2

    failing = ""
    whole = iter([True])

    def train_but_the_whole(flags, idea="", seed=0):
        if not idea and next(whole):
            raise UserError("no room")
        return train(flags)
    monkeypatch.setattr(ablation, "train", train_but_the_whole)
    rows = table(f"{flags.replace('--turns 2', '--turns 1')} --ideas --recipe speedrun")[1]
    assert "failed" in rows[0] and {row["the idea brings"] for row in rows[1:]} == {None}


@pytest.mark.parametrize("flags, word", [("--size 2x64 4x200", "4x200"), ("--size 2x65", "speedrun 2x65")])
def test_a_run_that_is_not_possible_is_refused_before_any_has_trained(flags, word, monkeypatch, table, data):
    monkeypatch.setattr(ablation, "train", lambda *args, **how: pytest.fail("it trains"))
    refused(lambda: table(f"recipes {data} --device cpu --batch_size 4 --steps 60 {flags}"), word)


CHILD = """
import sys, threading
with open(sys.argv[1], "wb", 0) as fifo:
    threading.Event().wait(15)
    fifo.write(b"nobody has ended it")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no FIFOs")
def test_a_signal_ends_bench_py_and_all_that_it_has_started(monkeypatch, table, data, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    ends = []                       # where the last child has ended, what it had written

    def when_they_run():
        with open(tmp_path / "fifo", "rb") as fifo:
            os.kill(os.getpid(), signal.SIGTERM)
            ends.append(fifo.read())
    watch = threading.Thread(target=when_they_run)
    watch.start()
    monkeypatch.setattr(ablation, "available_cores", lambda: 1)
    monkeypatch.setattr(ablation, "train", lambda flags, idea="", seed=0: ablation.run_process(
        [sys.executable, "-c", CHILD, str(tmp_path / "fifo")]))
    before = signal.signal(signal.SIGTERM, lambda *how: pytest.fail("bench.py does not catch it"))
    try:
        refused(lambda: table(f"recipes {data} --device cpu --batch_size 2 --sequence_length 16 --size 1x64"),
                "SIGTERM", failed=True)
        watch.join()
        assert ends == [b""]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_recipes_are_compared_at_equal_text_and_ideas_with_their_recipe(monkeypatch, table, data):
    def train(flags, idea="", seed=0):
        loss = {0.001: 6.3, 0.002: 6.0}.get(flags.get("max_lr"), 5.9) + 0.2 * ("softcap" in idea)
        fails = flags.get("max_lr") == 0.004 or "QK" in idea        # it diverges in its first step
        n, loss = (0, math.nan) if fails else (flags["max_steps"], loss + 0.01 * seed)
        last = {"seconds": n * (0.5 + seed), "step": n, "tokens": 32 * n}
        return Curve("log", last, [(0, 0.0, 9.0), (32 * n, 0.0, loss)])
    monkeypatch.setattr(ablation, "train", train)
    figures = drawn(monkeypatch)
    flags = f"recipes {data} --device cpu --batch_size 2 --sequence_length 16 --turns 2 --steps"
    rows = table(f"{flags} 24 --plot r.png --size 1x64 2x128")[1]
    # 2 x 32 tokens in 0.5 + 1.5 seconds, where it did not diverge at once
    assert len(rows) == 2 * 7 and {row["tokens/s"] for row in rows} == {32.0, None}
    assert {row["seeds"] for row in rows} == {2}
    lines = [line for line in figures[0].axes[0].lines if "at its end" not in line.get_label()]
    ends = {line.get_label().strip(): line.get_xydata()[-1].tolist() for line in lines}
    assert len(ends) == 2 * 5 and ends["gpt2 2x128, 24 steps"] == pytest.approx(
        [24 * 32 * BYTES_A_TOKEN, 6.0 / math.log(2) / BYTES_A_TOKEN]), "at the best rate"
    at = {row["run"]: row for row in rows}
    assert {row["seeds differ by"] for row in rows} == {"0.010", "nan"}
    assert [at[f"gpt2 2x128, 24 steps, --max_lr {rate}"]["validation loss"] for rate in (0.002, 0.004)] == [
        "6.005", "nan"]
    assert at["frontier 1x64, 2 steps"]["MB of text"] == pytest.approx(64 * BYTES_A_TOKEN / 1e6)
    assert at["speedrun 1x64, 8 steps"]["bits per byte"] == f"{5.905 / math.log(2) / BYTES_A_TOKEN:.4f}"
    gains = [row["the idea brings"] for row in table(f"{flags} 40 --recipe speedrun --ideas")[1]]
    assert sorted(gains) == ["+0.000"] * 11 + ["+0.200", "+nan"]


def test_an_idea_about_the_batch_is_left_out_at_the_same_number_of_tokens(monkeypatch, table, data):
    steps = {}

    def train(flags, idea="", seed=0):
        steps[idea] = flags["max_steps"]
        return Curve("log", {"seconds": 1.0, "step": 1, "tokens": 1}, [(1, 0.0, 5.0)])
    monkeypatch.setattr(ablation, "train", train)
    table(f"recipes {data} --device cpu --batch_size 64 --sequence_length 16 --turns 1 --steps 280 "
          "--recipe frontier --ideas --size 1x64")
    # thirds of 4, 2 and 1: 16 steps of 256 tokens, 8 of 512, 4 of 1024
    assert steps.pop("batch that grows (constant instead)") == 3 * 4
    assert len(steps) > 8 and {*steps.values()} == {28}


CLONE = {       # a tokenizer of bytes, a model whose loss in bits is its checkpoint's step, or 500 for a BOS
    "nanochat/tokenizer.py": """
class get_tokenizer:
    encode = lambda self, text: list(text.encode())
    get_bos_token_id = lambda self: 256
    decode_single_token_bytes = lambda self, token: bytes([token])
""", "nanochat/checkpoint_manager.py": """
import torch
def load_model(source, device, phase, model_tag, step):
    def bits(x, y, loss_reduction):
        assert loss_reduction == "none"
        return torch.where(y == 256, 500.0, step).view(-1) * 0.6931471805599453
    return bits, None, None
""", "scripts/tok_train.py": "", "scripts/base_train.py": """
import os, pathlib, sys
flags = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
pathlib.Path(f"given_{flags['model-tag']}").write_text(repr(flags))
for step in range(int(flags["num-iterations"])):
    print(f"step {step:05d}/00000 (1%) | loss: 4.6 | dt: {500 if step else 9000}.00ms | tok/sec: 5,335")
"""}


def test_nanochat_trains_on_the_same_text_and_is_compared_in_our_tokens(monkeypatch, table, data, tmp_path):
    for name, text in CLONE.items():
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).write_text(text)
    texts, parquet = {}, pytest.importorskip("pyarrow.parquet")

    def run(argv, env, cwd):
        texts.update((path.name, parquet.read_table(path)["text"].to_pylist())
                     for path in Path(env["NANOCHAT_BASE_DIR"], "base_data_climbmix").glob("*"))
        return fork(argv, env={"NANOCHAT_BASE_DIR": env["NANOCHAT_BASE_DIR"]}, cwd=cwd)
    monkeypatch.setattr(nanochat, "run_process", run)
    ours = Curve("", {"step": 1, "seconds": 1.0, "tokens": 1}, [(1, 1.0, 1.0)])
    monkeypatch.setattr(ablation, "train", lambda *args, **how: ours)
    rows = table(f"recipes {data} --device cpu --batch_size 2 --sequence_length 16 --turns 2 --steps 24 "
                 f"--size 2x128 --nanochat {tmp_path}/clone")[1][-3:]
    assert len(texts["0.parquet"]) == 10 and texts["0.parquet"][:2] == texts["1.parquet"] == [PLAY] * 2
    own = len(PLAY) / (len(PLAY) + 1)           # bytes a token
    steps = round(24 * BYTES_A_TOKEN / own)
    targets = (2 * len(PLAY) + 1) // 16 * 16            # in whole sequences; one is the BOS between the two
    bits = steps + 500 / (targets - 1)
    for row, multiple in zip(rows, (2, 4, 8), strict=True):
        assert row == {"run": f"nanochat 2x128, {multiple} times its rates", "seeds": 1,
                       "tokens/s": pytest.approx(32 * own / BYTES_A_TOKEN / 0.5),
                       "MB of text": pytest.approx(steps * 32 * own / 1e6), "bits per byte": f"{bits:.4f}",
                       "validation loss": f"{bits * math.log(2) * BYTES_A_TOKEN:.3f}",
                       "seeds differ by": ""}
        flags = ast.literal_eval((tmp_path / f"clone/given_2x128_{multiple}").read_text())
        assert [flags[name] for name in ("embedding-lr", "depth", "aspect-ratio", "total-batch-size")] == [
            str(multiple * 0.3), "2", "64", "32"]


def test_nanochats_rows_tell_its_width_and_no_two_runs_share_their_checkpoints():
    args = types.SimpleNamespace(path="data", size=["gpt2", "12x768", "4x200"])
    peer = types.SimpleNamespace(train=lambda flags, size, multiple, seed=0: (size, multiple))
    runs = ablation.nanochat_runs(args, Setting(T=16), 3, 32, peer)
    assert len({run() for run in runs.values()}) == len(runs) == 3 * len(ablation.NANOCHAT_RATES)
    assert {name for name, variant in runs if "768" in name or "256" in name} == {
        "nanochat 12x768", "nanochat 4x200 (its width is 256)"}


PEERS_FINEWEB = '''
import multiprocessing as mp, numpy as np, os, tiktoken
from datasets import load_dataset
enc = tiktoken.get_encoding("gpt2")
def tokenize(doc):
    return np.array([50256, *enc.encode_ordinary(doc["text"])], dtype=np.uint16)

with mp.Pool(os.cpu_count() // 2) as pool:
    tokens = np.concatenate(list(pool.imap(tokenize, load_dataset("any", split="train"), 16)))
np.save(os.path.join(os.path.dirname(__file__), "edufineweb_val_000000"), tokens)
'''


@pytest.mark.skipif(sys.platform != "linux", reason="build-nanogpt's script needs forks")
def test_fineweb_py_and_a_clones_script_make_as_many_tokens_of_the_same_text(monkeypatch, tmp_path):
    (tmp_path / "fineweb.py").write_text(PEERS_FINEWEB)
    (tmp_path / "input.txt").write_text("To be, or not to be.\n\n" * 40)
    monkeypatch.setattr(data_benchmark, "INPUT_TXT", tmp_path / "input.txt")
    jobs = {program: Job(program, "parquet", 2) for program in (OURS, POOL)}
    with processes.CHILDREN:                    # as bench.main does
        results = data_benchmark.time_fineweb(jobs, 1, tmp_path)
    ours, peers = results[OURS], results[POOL]
    assert ours["tokens"] == peers["tokens"] > 1000 and min(*ours["cpu"], *peers["cpu"]) > 0
    assert all(row["against the pool"] for row in data_benchmark.fineweb_rows(jobs, results))
