"""bench.py: the runs that stand behind its tables, the figures in them, and what it refuses."""
import functools
import json
import re
import runpy
import types
from pathlib import Path

import pytest
import torch.nn.functional as F
from helpers import BYTES, ROOT, command, forked, logged, script
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bench
import train_gpt2
from bench import Run, Timing
from recipes import RECIPES
from runtime import hardware
from runtime.cli import RunError, UserError
from runtime.metrics import HEADER

TINY = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=2",
        "--device=cpu", "--dtype=float32"]


@pytest.fixture
def rows_are_forked(monkeypatch):
    """The process of a row is forked, which takes a tenth of the time of a new Python."""
    def run(words, cwd=None, **how):
        python, path, *flags = words
        call = functools.partial(runpy.run_path, path)
        if path == str(ROOT / "bench.py"):
            call = command("bench.py", *flags)
        [(code, stdout, stderr)] = forked(call, cwds=[cwd])
        return types.SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    monkeypatch.setattr(bench.subprocess, "run", run)


def timing(ms, tokens=100):
    """Of a run whose step takes so many milliseconds, after the two that do not count."""
    seconds = [9.0, 9.0, ms / 1e3, 2 * ms / 1e3, ms / 1e3]
    return Timing(tokens, seconds, 20.0 + sum(seconds[2:]), "mfu 7%\nmfu 48%\npeak memory 2.5 GB")


def cells(capsys):
    """The rows of the tables that were printed: lists of cells, the first is of the columns."""
    printed = capsys.readouterr().out
    assert "not measured" not in printed, printed
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if set(row[0]) != {"-"}]


# ----------------------------------------------------------------------------- runs

@pytest.mark.parametrize("returncode, stderr, told", [
    (2, "a warning\nno such shards\n", "no such shards"), (-9, "a warning", "memory"),
    (-6, "a warning", "-6"), (1, "", "1")])
def test_what_ended_a_run_is_told(returncode, stderr, told, monkeypatch):
    ended = types.SimpleNamespace(returncode=returncode, stderr=stderr)
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **how: ended)
    with pytest.raises(RunError, match=told):
        bench.execute(["script"])


def test_all_names_have_their_turn_and_one_that_fails_is_left_out(capsys):
    asked = []

    def measure(name, turn):
        asked.append(f"{name} {turn}")
        if name == "bad" or asked[-1] == "late 1":
            raise RunError("no room")
        return turn + 10

    results = bench.in_turn(measure, ["good", "bad", "late"], turns=3)
    assert asked == ["good 0", "bad 0", "late 0", "good 1", "late 1", "good 2"]
    assert results == {"good": [10, 11, 12], "late": [10]}
    assert capsys.readouterr().out.count(": no room") == 2
    with pytest.raises(RunError):
        bench.in_turn(measure, ["bad"], turns=2)


@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_timed_step_can_go_without(replaced, byte_data, tmp_path, monkeypatch):
    tuned, losses, fused = [], [], []
    monkeypatch.setattr(hardware, "tune_malloc", lambda: tuned.append(1))
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **how: (
        losses.append(args[0].shape), cross_entropy(*args, **how))[1])
    for owner, name, _ in bench.STEP.values():
        monkeypatch.setattr(owner, name, getattr(owner, name))      # put back at the end
    hook = register_optimizer_step_pre_hook(lambda optimizer, *args: fused.extend(
        group["fused"] for group in optimizer.param_groups if "fused" in group))

    pairs = [("step", key) for key in bench.STEP if replaced]
    bench.run_here(json.dumps(pairs), "--recipe=frontier", f"--data={byte_data}", *BYTES,
                   "--val_every=0", "--max_steps=6", f"--out={tmp_path}")
    hook.remove()

    assert (tuned == []) == replaced
    assert (losses != []) == replaced
    assert {bool(value) for value in fused} == {not replaced}
    tokens = list(logged(tmp_path, "tokens").values())
    assert (tokens[1] == 256) == replaced


@pytest.mark.parametrize("recipe, vocab_size, steps", [
    ("gpt2", 256, 20), ("speedrun", 256, 20),
    ("frontier", 50304, 8)])                    # GPT-2's tokens have stems
def test_each_idea_changes_the_run(recipe, vocab_size, steps, byte_data, tmp_path):
    runs = [Run({}), *(Run({}, ((recipe, idea),)) for idea in bench.IDEAS[recipe])]
    calls = []
    for i, run in enumerate(runs):
        _, *words = run.command(
            recipe=recipe, data=byte_data, vocab_size=vocab_size, max_steps=steps, val_every=0,
            total_batch_size=128, n_embd=16, out=tmp_path / str(i))
        calls.append(command("bench.py", *words[:2], *BYTES, *words[2:]))
    results = forked(*calls)

    assert [code for code, _, _ in results] == [0] * len(runs), results
    curves = [tuple(logged(tmp_path / str(i)).values()) for i in range(len(runs))]
    assert len(set(curves)) == len(runs), curves


# ----------------------------------------------------------------------------- the time of a step

def test_the_cells_of_a_step_are_those_of_all_turns():
    slower = timing(80)
    slower.whole += 5
    slower.printed = "peak memory 7.1 GB"
    assert bench.timing_cells([timing(40), timing(40), slower]) == {
        "ms per step": "80.0", "tokens/s": "1,250", "peak GB": "7.1", "start s": "25.0",
        "MFU": "48%"}


def test_a_table_is_markdown_with_aligned_numbers(capsys):
    bench.print_table([{"a": "x", "b": "9.99", "c": "1"}, {"a": "yyy", "b": "1,234.56"}])
    assert capsys.readouterr().out.split("\n")[1:-2] == [
        "| a   |        b | c |",
        "| --- | -------- | - |",
        "| x   |     9.99 | 1 |",
        "| yyy | 1,234.56 |   |",
    ]


@pytest.mark.parametrize("line, device, expected", [
    ("ladder", "cpu", (4, 256, 1024, 6, False)),
    ("ladder", "cuda:0", (16, 1024, 16384, 22, True)),
    ("ladder", "mps", (4, 1024, 4096, 6, False)),
    ("ladder --batch_size 3 --block_size 32 --steps 7 --no_compile", "cuda:0",
     (3, 32, 96, 9, False)),
    ("ladder --total_batch_size 9 --sequence_length 3 --compile", "cpu", (4, 3, 9, 6, True)),
    ("profile", "cuda:0", (64, 1024, 65536, 26, True))])
def test_what_a_step_is_timed_with(line, device, expected, monkeypatch):
    monkeypatch.setattr(hardware, "choose_device", lambda name: device)
    monkeypatch.setattr(hardware, "choose_dtype", lambda name, device: "bfloat16")
    seen = []

    def see(flags, *others):
        seen.append(flags)
        raise RunError("that is enough")

    monkeypatch.setattr(bench, "ladder_rungs", see)
    monkeypatch.setattr(bench, "words_of", see)
    for owner, name in ((train_gpt2, "train_step"), (train_gpt2, "make_batch_schedule")):
        monkeypatch.setattr(owner, name, getattr(owner, name))      # put back at the end
    with pytest.raises(RunError, match="enough"):
        bench.main(line.split())
    names = ("batch_size", "sequence_length", "total_batch_size", "max_steps", "compile")
    assert tuple(seen[0][name] for name in names) == expected
    assert (seen[0]["device"], seen[0]["dtype"]) == (device, "bfloat16")


# ----------------------------------------------------------------------------- ladder and peer

def test_each_rung_of_the_ladder_changes_one_thing():
    (bottom, _), *rungs = bench.ladder_rungs(dict(
        device="cuda:0", dtype="bfloat16", compile=True, batch_size=16, total_batch_size=64,
    )).values()
    assert rungs == [
        ({"tf32": True}, ""), ({"dtype": "bfloat16"}, ""), ({"compile": True}, ""),
        ({"attention": "auto"}, ""), ({"vocab_size": 50304}, ""), ({}, "plain AdamW"),
        ({"batch_size": 64, "total_batch_size": 256}, "")]
    assert bottom == dict(
        dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257)

    (bottom, _), *rungs = bench.ladder_rungs(
        dict(device="cpu", dtype="float32", compile=False)).values()
    assert rungs == [
        ({"attention": "auto"}, ""), ({"vocab_size": 50304}, ""), ({}, "plain AdamW"),
        ({}, "freed memory is given back"), ({}, "all logits at once")]
    assert {key for _, key in rungs} - {""} < bench.STEP.keys()


def test_the_ladder_times_real_runs(rows_are_forked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bench.main(["ladder", "--steps=1", "--turns=1", *TINY])
    columns, *rows = cells(capsys)
    assert len(rows) == 6
    for row in rows:
        found = dict(zip(columns, row, strict=True))
        assert float(found["ms per step"].replace(",", "")) > 0
        rate = 32 / float(found["ms per step"].replace(",", "")) * 1e3
        assert float(found["tokens/s"].replace(",", "")) == pytest.approx(rate, rel=0.1)
        assert 0.1 < float(found["peak GB"]) < 9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("impossible", [
    dict(attention="auto", vocab_size=50257), dict(attention="naive", vocab_size=50257)])
def test_a_rung_stands_on_the_newest_one_that_can_run(impossible, monkeypatch, capsys):
    asked = []

    def time_run(run, folder):
        asked.append(run)
        if run.flags.items() >= impossible.items():
            raise RunError("no kernel")
        return timing(10)

    monkeypatch.setattr(bench, "time_run", time_run)
    bench.main(["ladder", "--turns=2", *TINY])
    possible = [run for run in asked if not run.flags.items() >= impossible.items()]
    first, second = possible[:5], possible[5:]
    assert len(asked) == 11
    assert first == second
    assert [len(run.replaced) for run in first[-4:]] == [4, 3, 2, 1]
    assert capsys.readouterr().out.count(": no kernel") == 1


def test_the_ladders_gains_follow_from_what_was_measured():
    results = {"a": [timing(100)], "b": [timing(50)], "c": [timing(80, tokens=400)]}
    rows = bench.ladder_rows(results)
    assert [row["tokens/s"] for row in rows] == ["1,000", "2,000", "5,000"]
    assert [row["gain"] for row in rows] == ["1.00x", "2.00x", "2.50x"]
    assert [row["in all"] for row in rows] == ["1.00x", "2.00x", "5.00x"]


# It has what bench.py changes in build-nanogpt's script, and checks what came of it.
SCRIPT = """
from types import SimpleNamespace as GPTConfig
import numpy as np
import tiktoken
import torch
from hellaswag import render_example, iterate_examples
device = "mps"
device_type = "cuda" if device.startswith("cuda") else "cpu"
enc = tiktoken.get_encoding("gpt2")
total_batch_size = 524288 # 2**19, ~0.5M, in number of tokens
B = 64 # micro batch size
T = 1024 # sequence length
config = vars(GPTConfig(vocab_size=50304))
use_compile = False # torch.compile interferes
max_steps = 19073
autocast = dict(dtype=torch.bfloat16)
for split in ("train", "val"):              # a loader that has read all begins anew
    assert len(np.load(f"edu_fineweb10B/random_{split}_000000.npy")) > 4 * B * T
assert (total_batch_size, B, T, device, device_type) == (32, 2, 16, "cpu", "cpu")
assert config == dict(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=16)
assert autocast == dict(dtype=torch.float32, enabled=False)
for step in range(max_steps):
    assert step == 1
    print(f"step {step:5d} | dt: {100 + 50 * use_compile}.00ms | tok/sec: 1.00")
"""


def test_a_peers_script_gets_our_numbers(rows_are_forked, tmp_path, monkeypatch, capsys):
    (tmp_path / "train_gpt2.py").write_text(SCRIPT)
    monkeypatch.setattr(bench, "time_run", lambda run, folder: timing(50))
    bench.main(["peer", str(tmp_path), "--steps=2", "--turns=1", "--compile", *TINY])
    columns, *rows = cells(capsys)
    assert [(row[1], row[-1]) for row in rows] == [
        ("50.0", "1.00x"), ("100.0", "2.00x"), ("150.0", "3.00x")]
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt2.py"]


# ----------------------------------------------------------------------------- profile

def test_a_profile_has_the_kinds_of_kernels_and_the_step_without_the_profiler(tmp_path):
    done = script("bench.py", "profile", "--steps=1", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ms a step without the profiler" in done.stdout
    for name in ("loss", "attention", "optimizer", "matrix products", "aten::mm"):
        assert f"\n| {name} " in done.stdout
    assert len(re.findall(r"^step ", done.stdout, re.MULTILINE)) == 2 + 1 + 1 + 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, kind", [
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
    ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8", "matrix products"),
    ("aten::addmm", "matrix products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
    ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_14", "loss"),
    ("triton_per_fused__to_copy_amax_div_mul_tanh_15", "loss"),
    ("aten::_log_softmax", "loss"),
    ("triton_per_fused__to_copy_add_native_layer_norm_view_6", "elementwise and norms"),
    ("triton_poi_fused__scaled_dot_product_flash_attention_view_3", "elementwise and norms"),
    ("triton_poi_fused_addmm_gelu_view_3", "elementwise and norms"),
    ("void at::native::vectorized_elementwise_kernel<4, Gelu>", "elementwise and norms"),
    ("triton_poi_fused__to_copy_t_11", "copies and casts"),
    ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "copies and casts"),
    ("Memcpy DtoD (Device -> Device)", "copies and casts"),
    ("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
    ("void at::native::indexSelectSmallIndex<float>", "other")])
def test_a_kernels_name_tells_its_kind(name, kind):
    assert bench.kind_of(name) == kind


def event(key, count, ms, device=DeviceType.CUDA, annotation=False):
    return types.SimpleNamespace(
        key=key, count=count, device_type=device, is_user_annotation=annotation,
        self_cpu_time_total=500.0, self_device_time_total=ms * 1e3)


def test_kernels_and_idle_time_are_shares_of_a_step(capsys):
    events = [
        event("copy_kernel", 6, 6.0),
        event("gemm", 3, 21.0),
        event("step", 3, 90.0, annotation=True),
        event("aten::mm", 3, 9.0, device=DeviceType.CPU),
    ]
    assert bench.PROFILED_STEPS == 3
    assert bench.kernels_of(events, "cpu") == [(0.5 / 3, 1, "aten::mm")]
    kernels = bench.kernels_of(events, "cuda:0")
    assert kernels == [(7, 1, "gemm"), (2, 2, "copy_kernel")]

    bench.print_kernels(kernels, step_ms=10.0)
    rows = {row[0]: row[1:] for row in cells(capsys)}
    assert rows["matrix products"] == ["7.00", "70.0%"]
    assert rows["copies and casts"] == ["2.00", "20.0%"]
    assert rows["idle (no kernel runs)"] == ["1.00", "10.0%"]
    assert rows["gemm"] == ["matrix products", "1.0", "7.00"]
    bench.print_kernels([], step_ms=10.0)
    assert "saw no kernels" in capsys.readouterr().out


# ----------------------------------------------------------------------------- recipes

def words_given(command):
    """{flag: value} of the command of a run."""
    return train_gpt2.FLAGS.parse("", command[4:])


@pytest.fixture
def trained(monkeypatch):
    """The commands of the runs, none of which starts: each ends with a loss of its own."""
    commands = []

    def run(command, **how):
        commands.append(command)
        out = Path(words_given(command)["out"])
        out.mkdir(parents=True)
        rows = f"0,0,0,,11,,,,,64\n9,900,60,,{11 - len(commands)},,,,,64\n"
        (out / "metrics.csv").write_text(f"{HEADER}\n{rows}")
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(bench.subprocess, "run", run)
    return commands


def test_recipes_are_trained_with_the_seeds_in_turn(trained, tmp_path, capsys):
    bench.main(["recipes", "DATA", "--seeds=2", "--max_steps=30", "--n_embd=128", "--tf32",
                "--val_tokens=512", f"--out={tmp_path}"])
    given = [words_given(command) for command in trained]
    assert [(flags["seed"], flags["recipe"]) for flags in given] == [
        (seed, recipe) for seed in range(2) for recipe in RECIPES]
    assert given[0].items() >= dict(
        data="DATA", max_steps=30, n_layer=4, n_embd=128, n_head=2, block_size=256, tf32=True,
        val_tokens=512, val_every=3).items()
    assert [flags["n_head"] for flags in given[:3]] == [2, 1, 1]
    assert cells(capsys)[1][:4] == ["gpt2", "900", "0:01:00", "8.500 (7.000 to 10.000)"]


def test_a_recipe_is_given_the_rates_that_it_does_not_have(trained, tmp_path):
    bench.main(["recipes", "DATA", "--seeds=1", "--max_steps=30", f"--out={tmp_path}"])
    flags = [words_given(words) for words in trained]
    rates = [(given.get("max_lr"), given.get("warmup_steps")) for given in flags]
    assert rates == [(2e-3, 2), (None, None), (None, None)]


@pytest.mark.parametrize("ideas, expected", [
    ([], [[]]),
    (["--ideas"], [[], *([["frontier", idea]] for idea in bench.IDEAS["frontier"])]),
    (["--ideas", "softcap"], [[], [["frontier", "softcap 30 for 15"]]])])
def test_ideas_are_variants_of_the_recipe_with_its_flags(
    ideas, expected, trained, tmp_path, capsys
):
    bench.main(["recipes", "DATA", "--seeds=2", "--recipe=frontier", f"--out={tmp_path}", *ideas])
    assert [json.loads(command[3]) for command in trained] == 2 * expected
    flags = [words_given(command) for command in trained]
    for one in flags:
        del one["seed"], one["out"]
    assert all(one == flags[0] for one in flags)
    rows = cells(capsys)[1:]
    assert len(rows) == len(expected)
    if ideas:
        assert rows[-1][0] == f"frontier: {expected[-1][0][1]}"
        assert rows[-1][5].startswith(f"-{len(expected) - 1}.000 (")


# ----------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("line, what", [
    ("lader", "lader"), ("--device cpu", "--device"), ("compare", "curves"), ("recipes", "shards"),
    ("ladder --steps 0", "--steps"), ("ladder --device tpu", "tpu"),
    ("ladder --max_steps 9", "--max_steps"), ("ladder --n_layer 0", "n_layer"),
    ("ladder --recipe no", "--recipe"), ("ladder --plot a.png", "--plot"),
    ("compare a --compile", "--compile"), ("recipes a --seed 3", "--seed"),
    ("compare a --plot notes.md", "notes.md"), ("compare a --plot png", ".svg"),
    ("recipes a --plot a.jpg", "a.jpg"), ("peer PEER", "build-nanogpt")])
def test_a_mistake_is_refused(line, what, monkeypatch, tmp_path):
    (tmp_path / "PEER").mkdir()
    (tmp_path / "PEER" / "train_gpt2.py").write_text(SCRIPT.replace("B = 64", "B = batch"))
    (tmp_path / "notes.md").write_text("mine")
    monkeypatch.setattr(bench, "in_turn", lambda *args: pytest.fail("it was taken"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(what)):
        bench.main(line.split())
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_a_mistake_is_one_line_and_exit_code_2():
    done = script("bench.py", "ladder", "--steps=x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--steps" in done.stderr
