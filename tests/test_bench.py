"""bench.py: the real commands make its tables with a small model; and the arithmetic of the tables."""
import json
import math
import os
import shutil
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import benchmarks.data as data_benchmark
from benchmarks import ablation, steps
from benchmarks import timing as benchmark
from benchmarks.ablation import ABLATIONS, ablated_source, validation_curve
from benchmarks.compare import tokens_to_reach
from benchmarks.curves import read_curve
from benchmarks.data import time_fineweb
from benchmarks.flags import parse_args
from benchmarks.tables import ladder_settings
from benchmarks.timing import GB, Setting, measure, median_ms, run_in_subprocess
from helpers import ROOT, script, warm
from runtime.cli import run_command
from runtime.console import COLUMNS
from runtime.presets import PRESETS
from runtime.shards import write_shard

SMALL = ["--size", "tiny", "--batch_size", "1", "--sequence_length", "32", "--steps", "1", "--turns", "1",
         "--dtype", "float32"]


@pytest.fixture
def run_here(monkeypatch, capsys):
    """bench.py in this process, the processes in which it measures forked."""
    monkeypatch.setattr(subprocess, "run", lambda argv, env, cwd, **how: warm(argv[1:], env, cwd))

    def run(*flags):
        bench.main(list(map(str, flags)))
        return capsys.readouterr().out
    return run


def refused(flags, capsys):
    """The one line on stderr of a user's mistake."""
    with pytest.raises(SystemExit, match="^2$"):
        run_command(lambda: bench.main(list(map(str, flags))))
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1 and not cells(out)
    return err


def cells(shown):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()
            if line.startswith("| ") and not line.startswith("| --")]


def test_the_ladder_measures_all_rungs_and_saves_and_plots_them(run_here, tmp_path):
    json_file, png_file = tmp_path / "ladder.json", tmp_path / "ladder.png"
    shown = run_here("ladder", *SMALL, "--json", json_file, "--plot", png_file)
    saved = json.loads(json_file.read_text())
    assert len(saved["rows"]) == 7
    assert all(row["ms a step"] > 0 and row["peak GB"] > 0.1 for row in saved["rows"])
    assert saved["rows"][0]["in all"] == "1.00x" and saved["machine"] in shown
    assert "left out: TF32 (" in shown and "torch.compile (" in shown
    assert "matrix products of the last rung's step" in shown
    assert png_file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_the_timed_step_is_the_trainers_and_changes_the_weights(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    step, model = steps.our_step(Setting(recipe=recipe, size="tiny", B=4, T=16, dtype="float32",
                                         attention="naive", loss_chunk=8, tune_memory=False))
    before = [p.clone() for p in model.parameters()]
    step()
    assert (model.kernel, model.loss_chunk) == ("naive", 8)
    assert not all(map(torch.equal, before, model.parameters()))


def test_attention_kernels_are_measured_and_missing_ones_named(run_here):
    shown = run_here("attention", *SMALL)
    rows = {row[0]: row for row in cells(shown)}
    assert {"auto", "naive", "math"} <= rows.keys()
    errors = [float(rows[kernel][3]) for kernel in ("naive", "math")]       # of float32 against float64
    assert all(0 < error < 1e-5 for error in errors)
    assert "not on this machine: " in shown and "cudnn (" in shown


def test_a_rung_differs_from_the_one_before_in_what_its_name_says():
    cuda = Setting(device="cuda", compile=True)             # as bench.main makes it
    for base, left_out in ((Setting(device="cpu"), 3), (cuda, 0)):
        rungs = list(ladder_settings(base))
        assert sum(s is None for _, s, _ in rungs) == left_out
        settings = [asdict(s) for _, s, _ in rungs if s]
        changed = [{key for key in a if a[key] != b[key]}
                   for a, b in zip(settings, settings[1:], strict=False)]
        assert all(len(keys) == 1 for keys in changed), changed
        default = base if left_out else replace(base, compile=True, B=4 * base.B)
        assert settings[-1] == asdict(default), "what trains by default"


def test_settings_are_measured_in_turn_and_their_results_kept_apart(monkeypatch):
    calls = []

    def run(s):
        calls.append(s.B)
        if s.B == 3:
            return {"failed": "out of memory"}
        return {"seconds": [s.B + len(calls)], "memory": 10 - len(calls)}
    monkeypatch.setattr(benchmark, "run_in_subprocess", run)
    one, two, three = measure({B: Setting(B=B) for B in (1, 2, 3)}, 2).values()
    assert calls == [1, 2, 3, 1, 2]
    assert one == {"seconds": [2, 5], "memory": 9} and two["seconds"] == [4, 7]
    assert three == {"failed": "out of memory"}
    assert median_ms(one) == 3500


def test_the_largest_micro_batch_is_extrapolated_from_two_measured_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "run_in_subprocess", lambda s: {"memory": (3 + s.B / 2) * GB})
    for gigabytes, fit in ((16, 26), (1, 0)):
        bench.main(["memory", "--device", "cpu", "--batch_size", "2", "--memory_gb", str(gigabytes),
                    "--json", str(tmp_path / "m.json")])
        row = json.loads((tmp_path / "m.json").read_text())["rows"][0]
        assert (row["GB at 2"], row["at 4"], row["MB a sequence"]) == (4, 5, 500)
        assert row[f"fit {gigabytes} GB"] == fit


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_one_of_several_processes_that_runs_out_of_memory_ends_them_all(run_here, tmp_path, monkeypatch):
    """The limit is a real one: the memory before the first step, and 200 MB. The other process sleeps within
    its micro-step, as if it waited in NCCL; gloo would notice the lost connection."""
    (tmp_path / "bench.py").write_text(f"""
import os, resource, sys, time
sys.path.insert(0, {str(ROOT)!r})
import bench
from benchmarks import steps
def limited(*args):
    if os.environ["RANK"] == "0":
        steps.train_gpt2.to_device = lambda *args: time.sleep(1000)
        return time_steps(*args)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, -1))
    return time_steps(*args)
time_steps, steps.time_steps = steps.time_steps, limited
bench.main()
""")
    monkeypatch.setattr(benchmark, "BENCH", tmp_path / "bench.py")
    setting = Setting(size="small", B=8, T=1024, dtype="float32", steps=1, warmup=1, processes=2)
    assert run_in_subprocess(setting) == {"failed": "out of memory"}


@pytest.mark.parametrize("table", ["ladder", "attention", "data", "hellaswag", "scaling", "peer"])
def test_a_table_says_which_of_its_lines_failed(table, monkeypatch, capsys, tmp_path):
    """Each setting fails in turn, then all of them."""
    result = {"seconds": [0.5], "memory": 2e9, "warmup_seconds": 1.0, "flops_per_token": 1e9, "rates": [1e6],
              "peak_flops": None, "error_forward": 0.0, "error_backward": 0.0}
    (tmp_path / "train_gpt2.py").touch()
    calls, failing = [], [-1]

    def run(s):
        calls.append(s)
        return {"failed": "no room"} if len(calls) - 1 in failing else dict(result)
    monkeypatch.setattr(benchmark, "run_in_subprocess", run)
    monkeypatch.setattr(data_benchmark, "time_fineweb", lambda jobs, turns, peer: {
        name: {"seconds": [1.0], "cpu": [1.0], "tokens": 10, "bytes": 42} if i else {"failed": "no disk"}
        for i, name in enumerate(jobs)})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    flags = [table, *([str(tmp_path)] if table == "peer" else []), "--device", "cpu", "--turns", "1"]
    bench.main(flags)
    whole, n = capsys.readouterr().out, len(calls)
    assert "no room" not in whole and ("no disk" in whole) == (table == "data") and n > 1
    for failing in [[i] for i in range(n)] + [range(n)]:
        calls.clear()
        bench.main(flags)
        out = capsys.readouterr().out
        assert out.count(": no room") == len(failing), out
        assert out.count("\n| ") == whole.count("\n| "), "no line is left out"


# -----------------------------------------------------------------------------
# the flags

def test_without_a_table_they_are_listed(capsys):
    listed = script("bench.py").stdout
    assert all(listed.count(f"\n    python bench.py {table} ") == 1 for table in bench.TABLES)
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert bench.__doc__ in listed and bench.__doc__ in capsys.readouterr().out
    for words, compiled in ((["--compile"], True), (["--no_compile"], False), ([], False)):
        assert parse_args(["peer", *words, "--device", "cpu"], bench.TABLES, "")[1].compile == compiled


@pytest.mark.parametrize(("flags", "message"), [
    (["lader"], "invalid choice: 'lader' (choose from 'ladder', 'attention', "),
    (["--device", "cpu"], "required: table"), (["ladder", "--size", "big"], "--size: invalid choice: 'big'"),
    (["recipes", "one", "two"], "takes one path, not 2"), (["recipes"], "needs a folder of shards"),
    (["recipes", "DATA", "--steps", "10"], "give a multiple of 12"),
    (["recipes", "DATA", "--only_ideas", "--no_ideas"], "leave --no_ideas and --plot out"),
    (["recipes", "DATA", "--recipe", "frontier", "--batch_size", "6"], "a multiple of 4 sequences a step"),
    (["ladder", "--steps", "0"], "--steps 0: must be at least 1"),
    (["peer"], "git clone"), (["peer", "nowhere"], "nowhere/train_gpt2.py is not there"),
    (["data", "nowhere"], "fineweb.py is not there: git clone build-nanogpt"),
    (["memory", "--memory_gb", "-1"], "--memory_gb -1.0: must be at least 1"),
    (["ladder", "--device", "tpu"], "--device tpu"), (["compare"], "needs the --out folders of runs"),
    (["compare", "run", "--steps", "5"], "--steps does not apply to bench.py compare: leave it out"),
    (["compare", "run", "--no_compile"], "--compile does not apply to bench.py compare"),
    (["attention", "--plot", "a.png"], "--plot does not apply to bench.py attention"),
    (["compare", "run", "--plot", "README.md"], "--plot README.md: give a file whose name ends in .png"),
    (["compare", "run", "--plot", "folder.png"], "--plot folder.png: give a file whose name ends in .png"),
    (["compare", "run", "--json", "a.csv"], "--json a.csv: give a file whose name ends in .json"),
    (["compare", "run", "--curve", "nowhere/a.csv"], "is no folder that can be written: choose another"),
])
def test_a_mistake_is_one_line_on_stderr(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    assert message in refused(flags, capsys).split(" (see bench.py --help)")[0]


# -----------------------------------------------------------------------------
# compare

def write_metrics(out, losses, tokens=1000, seconds=60.0, every=2, end="\n"):
    """The metrics.csv of a run that validated each `every` steps, and at its end."""
    rows, steps = [",".join(COLUMNS)], every * (len(losses) - 1)
    for step in range(steps + 1):
        val = losses[step // every] if step % every == 0 else ""
        rest = ",,,," if step == steps else f",,0.0006,1.2,{tokens / seconds}"
        train = "" if step == steps else 9.5
        rows.append(f"{step},{step * tokens},{step * seconds:.3f},{train},{val}{rest}")
    out.mkdir()
    (out / "metrics.csv").write_text("\n".join(rows) + end)


def test_compare_shows_what_each_run_needed_to_reach_the_others(tmp_path, capsys):
    slow, fast, going, plot = (tmp_path / name for name in ("slow", "fast", "going", "here.png"))
    write_metrics(slow, [11.0, 5.0, 4.5, 4.0])
    write_metrics(fast, [11.0, 4.5, 3.5], seconds=90.0)
    write_metrics(going, [11.0, 6.0], end="\n3,3000,180.0,9.5,3.")      # still in progress, or crashed
    bench.main(list(map(str, ["compare", "--plot", plot, slow, fast, going, slow, "--json",
                              tmp_path / "c.json"])))
    shown = capsys.readouterr().out
    assert cells(shown) == [
        ["run", "steps", "tokens", "time", "final val loss", "lowest"],
        [str(slow), "6", "6k", "6 min", "4.0000", "4.0000"],
        [str(fast), "4", "4k", "6 min", "3.5000", "3.5000"],
        [str(going), "2", "2k", "2 min", "6.0000", "6.0000"],
        ["to reach", "val loss", "own tokens", str(slow), str(fast), str(going)],
        [str(slow), "4.0000", "6k", "", "3k (50%)", "-"],
        [str(fast), "3.5000", "4k", "-", "", "-"],
        [str(going), "6.0000", "2k", "1.67k (83%)", "1.54k (77%)", ""]]
    assert plot.read_bytes()[:4] == b"\x89PNG" and f"saved {plot}" in shown
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["table"] == "compare" and "machine" not in saved and len(saved["rows"]) == 3
    assert saved["rows"][0]["to_reach_it"] == {str(fast): {"tokens": 3000, "percent": 50.0}, str(going): None}


def test_compare_draws_loss_against_tokens_and_time(tmp_path, monkeypatch):
    import matplotlib.figure
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                        lambda figure, file, **how: figures.append(figure))
    write_metrics(tmp_path / "short", [11.0, 5.0, float("nan"), 4.0])
    write_metrics(tmp_path / "long", [11.0, 4.0, 3.5, 3.4, 3.3, 3.2], seconds=3600.0)
    monkeypatch.chdir(tmp_path)
    bench.main(["compare", "short", "long", "--plot", "a.png"])
    (figure,), (tokens, hours) = figures, figures[0].axes
    assert tokens.lines[0].get_xydata().tolist() == [[0, 11], [2000, 5], [6000, 4]]
    assert hours.lines[1].get_xydata()[:, 0].tolist() == [0, 2, 4, 6, 8, 10]
    assert [panel.get_xlabel() for panel in figure.axes] == ["tokens", "hours of training"]
    low, high = tokens.get_ylim()
    assert 2.5 < low < 3.2 and 9 < high < 11, "the first tenth of the runs may be cut off"


@pytest.mark.parametrize(("content", "message"), [
    (None, "run/metrics.csv is not there: give the --out folder of a run"),
    (",".join(COLUMNS) + "\n0,0,0.0,10.8,,,0.1,1.0,5\n", "has no validation loss yet: wait for the first"),
    ("", "has no validation loss yet"), ("a,b\n1,2\n", "cannot be read (line 1 is none of a run's metrics)"),
    (",".join(COLUMNS) + "\n0,0,,10.8,,,0.1,1.0,5\n", "cannot be read (line 2 is none of a run's metrics)")])
def test_compare_refuses_what_is_no_run_in_one_line(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.csv").write_text(content)
    assert message in refused(["compare", tmp_path / "run"], capsys)


def test_compare_takes_curves_beside_runs_and_makes_one_of_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, losses in (("one", [11.0, 5.0, 4.5, 4.0]), ("two", [11.1, 5.4, 4.25]),
                         ("mine", [11.0, 6.0, 4.4])):
        write_metrics(Path(name), losses)
    bench.main(["compare", "one", "two", "--curve", "seeds.csv"])
    assert "saved seeds.csv" in capsys.readouterr().out
    assert Path("seeds.csv").read_text().splitlines() == [
        "# mean validation loss of 2 runs, and the largest difference between them",
        "tokens,loss,spread", "0,11.0500,0.1000", "2000,5.2000,0.4000", "4000,4.3750,0.2500"]
    Path("paper.csv").write_text("1e3, 6\r\n5e3,4.0\r\n")
    Path("short.csv").write_text('"Step","Loss","Tokens"\n1,6.0,3000\n2,5.0,3500\n')
    bench.main(["compare", "mine", "seeds.csv", "paper.csv", "short.csv", "--json", "c.json"])
    shown = cells(capsys.readouterr().out)
    assert shown[1:5] == [
        ["mine", "4", "4k", "4 min", "4.4000", "4.4000"], ["seeds.csv", "", "4k", "", "4.3750", "4.3750"],
        ["paper.csv", "", "5k", "", "4.0000", "4.0000"], ["short.csv", "", "3.5k", "", "5.0000", "5.0000"]]
    assert shown[6] == ["mine", "4.4000", "4k", "", "3.94k (98%)", "4.2k (105%)", "-"]
    assert shown[10:] == [
        ["run", "curve", "tokens", "val loss", "of the curve", "difference", "its seeds"],
        ["mine", "seeds.csv", "4k", "4.4000", "4.3750", "+0.0250", "0.2500"],
        ["mine", "paper.csv", "4k", "4.4000", "4.5000", "-0.1000", ""]]
    first = json.loads(Path("c.json").read_text())["rows"][0]
    assert [found["curve"] for found in first["from_curves"]] == ["seeds.csv", "paper.csv"]
    assert "--curve new.csv: give runs of one" in refused(
        ["compare", "one", "paper.csv", "--curve", "new.csv"], capsys)


@pytest.mark.parametrize(("text", "cause"), [
    (None, "No such file"), ("", "it holds no loss"), ("tokens,loss\n# 1,2\n", "it holds no loss"),
    ("step,val\n1,2\n", "its header does not name tokens and loss"), ("1,2\n3\n", "its row 2 does not hold"),
    ("tokens,loss\n1,a\n", "its row 1 does not hold tokens and a loss"),
    ("1,nan\n", "its row 1 holds 1 tokens and a loss of nan"), ("1e999,2\n", "its row 1 holds inf tokens"),
    ("1,2\n1,3\n", "its row 2 has no more tokens than the one"),
    ("1," + "2" * 200_000 + "\n", "field larger than field limit")])
def test_compare_refuses_a_bad_curve_in_one_line(text, cause, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.csv").write_text(text)
    err = refused(["compare", "bad.csv"], capsys)
    assert "bad.csv cannot be read" in err and cause in err
    assert "give a .csv with the columns tokens,loss, or the --out folder of a run" in err


def test_the_published_curve_is_that_of_its_preset_as_it_is():
    """assets/shakespeare.csv: docs/running.md says how to make it again, where the preset has changed."""
    curve, preset = read_curve(str(ROOT / "assets/shakespeare.csv")), PRESETS["shakespeare"][1]
    every = preset["val_every"] * preset["total_batch_size"]
    assert [tokens for tokens, *_ in curve.points] == [*range(0, curve.last["tokens"] + 1, every)]
    whole = preset["max_steps"] * preset["total_batch_size"]
    assert whole / 2 <= curve.last["tokens"] <= whole
    assert max(curve.spreads) > 0


def test_tokens_are_interpolated_between_validations():
    points = [(0, 0, 11.0), (100, 1, 6.0), (200, 2, math.nan), (300, 3, 4.0), (400, 4, 5.0)]
    assert tokens_to_reach(11.0, points) == tokens_to_reach(12.0, points) == 0
    assert tokens_to_reach(6.0, points) == 100 and tokens_to_reach(5.0, points) == 200
    assert tokens_to_reach(4.0, points) == 300 and tokens_to_reach(3.9, points) is None
    assert tokens_to_reach(math.nan, points) is None


# -----------------------------------------------------------------------------
# peer

def test_the_peers_definitions_run_and_nothing_after_them(run_here, tmp_path):
    """A stand-in with the names of build-nanogpt's script; the real one is run by hand (docs/speed.md)."""
    (tmp_path / "train_gpt2.py").write_text("""
import torch
from dataclasses import dataclass
from hellaswag import render_example, iterate_examples
@dataclass
class GPTConfig:
    block_size: int = 1
    vocab_size: int = 1
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 1
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(config.vocab_size))
    def forward(self, x, y):
        return None, torch.nn.functional.cross_entropy(self.weight.expand(y.numel(), -1), y.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, device_type):
        if master_process:
            print("never")
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)

# -----------------------------------------------------------------------------
import tiktoken
raise SystemExit("the script's own run began")
""")
    result = run_in_subprocess(Setting(size="small", B=1, T=8, steps=2, warmup=1, peer=str(tmp_path)))
    assert len(result["seconds"]) == 2 and result["memory"] > 0


def test_another_checkout_of_this_project_is_measured_by_its_own_bench_py(run_here, tmp_path):
    (tmp_path / "train_gpt2.py").touch()
    (tmp_path / "bench.py").write_text("""
import json, sys
assert sys.argv[1] == "work" and json.loads(sys.argv[2]) == {
    "size": "tiny", "B": 1, "T": 32, "dtype": "float32", "steps": 1}
print(json.dumps({"seconds": [1000.0], "warmup_seconds": 1.0, "memory": 1e9}))
""")
    theirs, ours = cells(run_here("peer", tmp_path, *SMALL))[1:]
    assert theirs[:2] == [str(tmp_path), "1,000,000"] and float(theirs[-1][:-1]) > 1
    assert (ours[0], ours[-1]) == ("ours, as shipped", "1.00x")


# -----------------------------------------------------------------------------
# recipes

@pytest.mark.skipif(os.name == "nt", reason="reads /proc")
def test_synthetic_examples_have_hellaswags_format():
    import hellaswag
    examples = steps.synthetic_examples(5)
    assert [hellaswag._checked(example, "here") for example in examples] == examples


@pytest.mark.parametrize("recipe", ABLATIONS)
def test_each_idea_is_lines_of_the_code(recipe):
    for idea in ABLATIONS[recipe]:
        file, text = ablated_source(recipe, idea)
        assert text != (ROOT / file).read_text()
        namespace = types.ModuleType("ablated").__dict__
        code = compile(text, file, "exec")
        if file == "frontier.py":               # several lines, which must fit together
            exec(code, namespace)
            model = namespace["FrontierGPT"](namespace["FrontierGPT"].Config(8, 97, 2, 2, 32))
            optimizers = model.configure_optimizers(0.02, 0.0, torch.float32, 64)
            idx = torch.arange(9)[None]
            model(idx[:, :-1], idx[:, 1:])[1].backward()
            updated = [p for optimizer in optimizers
                       for group in optimizer.param_groups for p in group["params"]]
            assert sorted(map(id, updated)) == sorted(map(id, model.parameters())), idea
            assert all(p.grad is not None for p in updated), idea


def test_a_curve_is_that_of_a_real_run_without_the_idea(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16)
    for name in ("val", "train"):
        write_shard(tmp_path / f"text_{name}_000000.npy", tokens)
    flags = dict(data=tmp_path, recipe="speedrun", n_layer=1, n_head=1, n_embd=16, block_size=16,
                 vocab_size=64, total_batch_size=64, max_steps=4, val_every=2, val_tokens=500,
                 dtype="float32")
    baseline, ablated = validation_curve(flags), validation_curve(flags, "softcap", threads=1)
    assert list(baseline) == list(ablated) == [0, 128, 256]
    assert [baseline[0], ablated[0]] == pytest.approx([math.log(64)] * 2, abs=1e-5)
    assert baseline[256] != ablated[256]
    diverged = validation_curve(flags | dict(recipe="gpt2", max_lr=1e30))         # really diverges
    assert list(diverged) == list(baseline) and math.isfinite(diverged[0]) and math.isnan(diverged[256])


def test_recipes_table_compares_the_best_rate_with_a_recipe_in_its_share_of_the_steps(monkeypatch, tmp_path,
                                                                                      capsys):
    def curve(flags, idea=None, threads=None):
        steps, rate = flags["max_steps"], flags.get("max_lr")
        level = {0.001: 6.3, 0.002: 6.0, 0.004: 6.1}.get(rate, 5.9)
        level += 0.01 * flags["seed"] + 0.2 * (idea in ("softcap", "bigram table"))
        if rate == 0.004 or idea == "QK-norm":
            level = math.nan                    # the run diverged
        return {step * 32: level for step in (*range(0, steps, flags["val_every"]), steps)}
    monkeypatch.setattr(ablation, "validation_curve", curve)

    def shown(*flags):
        bench.main(["recipes", "DATA", "--device", "cpu", "--json", str(tmp_path / "r.json"), *flags])
        return capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())["rows"]
    out, rows = shown("--batch_size", "2", "--sequence_length", "16", "--steps", "24", "--turns", "2",
                      "--plot", str(tmp_path / "r.png"))
    assert "after a third of the tokens speedrun is at 5.905, gpt2 after all of them at 6.005: reached" in out
    assert [row["recipe"] for row in rows[:5]] == [
        "gpt2, --max_lr 0.001", "gpt2, --max_lr 0.002 (the best)", "gpt2, --max_lr 0.004",
        "speedrun, 8 steps", "speedrun, 24 steps"]
    gains = {row["speedrun without"]: row["the idea brings"] for row in rows[5:]}
    assert gains.keys() == ABLATIONS["speedrun"].keys()
    assert (gains["softcap"], gains["value residual"], gains["QK-norm"]) == ("+0.200", "+0.000", "+nan")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    frontier = "--recipe frontier --batch_size 4 --sequence_length 8 --steps 40 --turns 1".split()
    assert "after a tenth of the tokens frontier is at 5.900, gpt2 after all of" in shown(*frontier)[0]
    out, rows = shown(*frontier, "--only_ideas")
    assert "frontier after 4 steps: 5.900" in out and "gpt2" not in out
    (row,) = (row for row in rows if row["frontier without"] == "bigram table")
    assert (row["validation loss"], row["the idea brings"]) == ("6.100", "+0.200")


# -----------------------------------------------------------------------------
# data

PEERS_FINEWEB = '''
import os
import multiprocessing as mp
import numpy as np
import tiktoken
from datasets import load_dataset
folder = os.path.join(os.path.dirname(__file__), "edu_fineweb10B")
os.makedirs(folder, exist_ok=True)
enc = tiktoken.get_encoding("gpt2")

def tokenize(doc):
    return np.array([50256, *enc.encode_ordinary(doc["text"])], dtype=np.uint16)

with mp.Pool(os.cpu_count() // 2) as pool:
    rows = load_dataset("HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train")
    tokens = np.concatenate(list(pool.imap(tokenize, rows, 16)))
np.save(os.path.join(folder, "edufineweb_val_000000"), tokens)
'''


@pytest.mark.skipif(sys.platform != "linux", reason="build-nanogpt's script needs forks")
def test_fineweb_py_and_a_clones_script_make_the_same_tokens_of_the_same_text(monkeypatch, tmp_path):
    (tmp_path / "fineweb.py").write_text(PEERS_FINEWEB)
    (tmp_path / "input.txt").write_text("To be, or not to be.\n\n" * 40)
    monkeypatch.setattr(data_benchmark, "INPUT_TXT", tmp_path / "input.txt")
    seen, rmtree = [], shutil.rmtree

    def look(out, *args, **kwargs):               # each run's folder, and then the one around them
        seen.append([np.load(path).tolist() for path in sorted(Path(out).rglob("*.npy"), key=lambda p: (
            "train" in p.name, p.name))])
        rmtree(out, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", look)
    jobs = {what: (what, "parquet", 2) for what in (data_benchmark.OURS, data_benchmark.PEER,
                                                    *data_benchmark.PARTS)}
    results = time_fineweb(jobs, 1, tmp_path)
    assert not [result["failed"] for result in results.values() if "failed" in result]
    ours, peers, *_ = seen
    assert sorted(sum(ours, [])) == sorted(sum(peers, [])) and len(ours) == 2
    assert {result["tokens"] for result in results.values()} == {0, len(peers[0])}
    assert all(result["cpu"][0] > 0 for result in results.values())
    rows = data_benchmark.fineweb_rows(jobs, results)
    assert [bool(row.get("against the pool")) for row in rows] == [True] * 4
    (tmp_path / "fineweb.py").write_text("raise SystemExit('no disk')")
    monkeypatch.setattr(data_benchmark, "BENCH", tmp_path / "bench.py")
    assert time_fineweb({"it": (data_benchmark.OURS, "jsonl", 1)}, 1) == {"it": {"failed": "no disk"}}


def test_the_loader_is_measured_epoch_by_epoch():
    rates = data_benchmark.measure_loader(Setting(size="bin", recipe="shuffled", T=1024, steps=2))["rates"]
    assert len(rates) == 2 and min(rates) > 0
