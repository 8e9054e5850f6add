"""bench.py: the real commands make its tables with a small model; and the arithmetic of the tables."""
import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

import bench
from bench import ladder_settings
from helpers import ENV, HANG, ROOT
from runtime import ablation, benchmark
from runtime.ablation import ABLATIONS, ablated_source, validation_curve
from runtime.benchmark import (GB, Setting, bytes_per_sequence, measure, median_ms, predict_largest,
                               run_in_subprocess)
from runtime.cli import run_command
from runtime.shards import write_shard

SMALL = ["--size", "tiny", "--batch_size", "1", "--sequence_length", "32", "--steps", "1", "--turns", "1",
         "--dtype", "float32"]


def run_bench(*flags, code=0):
    result = subprocess.run([sys.executable, ROOT / "bench.py", *map(str, flags)], capture_output=True,
                            text=True, env=ENV, timeout=HANG)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_the_ladder_measures_all_rungs_and_saves_and_plots_them(tmp_path):
    json_file, png_file = tmp_path / "ladder.json", tmp_path / "ladder.png"
    result = run_bench("ladder", *SMALL, "--json", json_file, "--plot", png_file)
    saved = json.loads(json_file.read_text())
    assert len(saved["rows"]) == 7
    assert all(row["ms a step"] > 0 and row["peak GB"] > 0.1 for row in saved["rows"])
    assert saved["rows"][0]["in all"] == "1.00x" and saved["machine"] in result.stdout
    assert "left out: TF32 (" in result.stdout and "torch.compile (" in result.stdout
    assert "matrix products of the last rung's step" in result.stdout
    assert png_file.read_bytes()[:4] == b"\x89PNG"


def test_attention_kernels_are_measured_and_missing_ones_named():
    result = run_bench("attention", *SMALL)
    cells = [line.split("|") for line in result.stdout.splitlines() if line.startswith("| ")]
    rows = {row[1].strip(): row for row in cells}
    assert {"auto", "naive", "math"} <= rows.keys()
    errors = [float(rows[kernel][4]) for kernel in ("naive", "math")]       # of float32 against float64
    assert all(0 < error < 1e-5 for error in errors)
    assert "not on this machine: " in result.stdout and "cudnn (" in result.stdout


def test_a_rung_differs_from_the_one_before_in_what_its_name_says():
    cuda = Setting(device="cuda", compile=True)             # as bench.main makes it
    for base, compiles, left_out in ((Setting(device="cpu"), False, 3), (cuda, True, 0)):
        rungs = list(ladder_settings(base, compiles))
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
    one, two, three = measure([Setting(B=1), Setting(B=2), Setting(B=3)], 2)
    assert calls == [1, 2, 3, 1, 2]
    assert one == {"seconds": [2, 5], "memory": 9} and two["seconds"] == [4, 7]
    assert three == {"failed": "out of memory"}
    assert median_ms(one) == 3500


def test_the_largest_micro_batch_is_extrapolated_from_two_measured_ones():
    assert bytes_per_sequence(4 * GB, 5 * GB, 2) == 0.5 * GB
    assert predict_largest(4 * GB, 5 * GB, 2, 16) == 26
    assert predict_largest(4 * GB, 5 * GB, 2, 1) == 0


def test_a_row_that_ran_out_of_memory_says_so_and_does_not_end_the_table(monkeypatch, capsys):
    good = {"seconds": [0.5], "memory": 2e9, "warmup_seconds": 1.0, "flops_per_token": 1e9,
            "peak_flops": None}
    monkeypatch.setattr(benchmark, "run_in_subprocess",
                        lambda s: {"failed": "out of memory"} if s.dtype == "float32" else dict(good))
    bench.main(["ladder", "--dtype", "bfloat16", "--device", "cpu", "--turns", "1"])
    out = capsys.readouterr().out
    assert "plain AdamW: out of memory" in out and "| + vocabulary 50304" in out


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_processes_that_runs_out_of_memory_ends_them_all(rank, tmp_path, monkeypatch):
    """The limit is a real one: the memory before the first step, and 200 MB. The other process sleeps, as if
    it waited in NCCL; gloo would notice the lost connection."""
    (tmp_path / "bench.py").write_text(f"""
import os, resource, sys, time
sys.path.insert(0, {str(ROOT)!r})
import bench
def limited(*args):
    if int(os.environ["RANK"]) != {rank}:
        time.sleep(1000)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, -1))
    return time_steps(*args)
time_steps, bench.time_steps = bench.time_steps, limited
bench.main()
""")
    monkeypatch.setattr(benchmark, "BENCH", tmp_path / "bench.py")
    monkeypatch.setattr(subprocess, "run", functools.partial(subprocess.run, timeout=250))
    setting = Setting(size="small", B=8, T=1024, dtype="float32", steps=1, warmup=1, processes=2)
    assert run_in_subprocess(setting) == {"failed": "out of memory"}


def test_scaling_goes_on_after_a_row_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(benchmark, "run_in_subprocess",
                        lambda s: {"failed": "no room"} if s.processes < 2 else {"seconds": [0.5]})
    bench.main(["scaling", "--device", "cpu", "--turns", "1", "--batch_size", "1", "--sequence_length", "10"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace(" ", "").split("|")[1:-1] for line in lines if line.startswith("| ")]
    assert rows[2:5] == [["1:noroom", "", "", "", ""], ["2", "20", "500", "40.00", "n/a"],
                         ["4", "40", "500", "80.00", "n/a"]]


def test_the_peers_definitions_run_and_nothing_after_them(tmp_path):
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
    setting = asdict(Setting(size="small", B=1, T=8, steps=2, warmup=1, peer=str(tmp_path)))
    result = json.loads(run_bench("work", json.dumps(setting)).stdout)
    assert len(result["seconds"]) == 2 and result["memory"] > 0


@pytest.mark.parametrize(("flags", "message"), [
    (["stairs"], "invalid choice"), (["ladder", "--steps", "0"], "--steps 0: must be at least 1"),
    (["peer"], "git clone"), (["peer", "nowhere"], "nowhere/train_gpt2.py is not there"),
    (["memory", "--memory_gb", "-1"], "--memory_gb -1.0: must be above 0"),
    (["ladder", "--device", "tpu"], "--device tpu"),
])
def test_a_mistake_is_one_line_on_stderr(flags, message, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        run_command(lambda: bench.main(flags))
    stderr = capsys.readouterr().err
    assert message in stderr and len(stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="reads /proc")
def test_synthetic_examples_have_hellaswags_format():
    import hellaswag
    examples = bench.synthetic_examples(5)
    assert [hellaswag._checked(example, "here") for example in examples] == examples


def test_each_idea_is_one_line_of_the_code():
    for idea in ABLATIONS:
        file, text = ablated_source(idea)
        compile(text, file, "exec")
        assert text != (ROOT / file).read_text()


def test_a_curve_is_that_of_a_real_run_without_the_idea(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16)
    for name in ("val", "train"):
        write_shard(tmp_path / f"text_{name}_000000.npy", tokens)
    flags = ["--data", tmp_path, "--recipe", "speedrun", "--n_layer", 1, "--n_head", 1, "--n_embd", 16,
             "--block_size", 16, "--vocab_size", 64, "--total_batch_size", 64, "--max_steps", 4,
             "--val_every", 2, "--val_tokens", 500, "--dtype", "float32", "--checkpoint_every", 0]
    baseline, ablated = validation_curve(flags), validation_curve(flags, "softcap", threads=1)
    assert list(baseline) == list(ablated) == [0, 128, 256]
    assert baseline[0] == ablated[0] == pytest.approx(math.log(64), abs=1e-5)
    assert baseline[256] != ablated[256]
    diverged = validation_curve([*flags, "--recipe", "gpt2", "--max_lr", 1e30])           # really diverges
    assert list(diverged) == list(baseline) and math.isfinite(diverged[0]) and math.isnan(diverged[256])


def test_recipes_table_compares_the_best_rate_with_speedrun_after_a_third(monkeypatch, tmp_path, capsys):
    def curve(flags, idea=None, threads=None):
        flags = list(map(str, flags))
        steps = int(flags[flags.index("--max_steps") + 1])
        rate = flags[flags.index("--max_lr") + 1] if "--max_lr" in flags else None
        level = {"0.001": 6.3, "0.002": 6.0, "0.004": 6.1}.get(rate, 5.9)
        level += 0.01 * int(flags[-1]) + 0.2 * (idea == "softcap")
        if rate == "0.004" or idea == "QK-norm":
            level = math.nan                    # the run diverged
        return {step * 32: level + 1 - step / steps for step in range(0, steps + 1, 2)}
    monkeypatch.setattr(ablation, "validation_curve", curve)
    bench.main(["recipes", "DATA", "--batch_size", "2", "--sequence_length", "16", "--steps", "24",
                "--turns", "2", "--device", "cpu", "--json", str(tmp_path / "r.json"),
                "--plot", str(tmp_path / "r.png")])
    result = "after a third of the tokens speedrun is at 5.905, gpt2 after all of them at 6.005: reached"
    assert result in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["recipe"] for row in rows[:5]] == [
        "gpt2, --max_lr 0.001", "gpt2, --max_lr 0.002 (the best)", "gpt2, --max_lr 0.004",
        "speedrun, 8 steps", "speedrun, 24 steps"]
    gains = {row["speedrun without"]: row["the idea brings"] for row in rows[5:]}
    assert gains.keys() == ABLATIONS.keys()
    assert (gains["softcap"], gains["value residual"], gains["QK-norm"]) == ("+0.200", "+0.000", "+nan")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"


def test_recipes_reports_a_missing_folder_and_wrong_steps():
    assert "give a multiple of 12" in run_bench("recipes", "DATA", "--steps", "10", code=2).stderr
    assert "needs a folder of shards" in run_bench("recipes", code=2).stderr
