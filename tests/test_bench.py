"""bench.py: what it measures, what its tables compute from that, and what it refuses."""
import dataclasses
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers import script
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bench
import train_gpt2
from bench import Curve, Setting
from runtime.cli import RunError, UserError

ROOT = Path(bench.__file__).parent
TINY = dict(size="1x32", B=2, T=16, dtype="float32", steps=1, warmup=1)
TINY_FLAGS = "--size 1x32 --batch_size 1 --sequence_length 16 --steps 1 --device cpu".split()


@pytest.fixture
def rows_are_forked(monkeypatch):
    """The process of a row is forked, which takes a tenth of the time of a new Python."""
    def run(command, cwd, env, **how):
        python, path, *words = command
        return script(Path(path).name, *words, cwd=cwd, env=env)

    monkeypatch.setattr(bench.subprocess, "run", run)


def of_a_step(ms):
    """What a worker finds for a step of 100 tokens that takes so many milliseconds."""
    return {"tokens": 100, "seconds": [ms / 1e3], "warmup_seconds": 7.0, "memory": 2e9,
            "flops_per_token": 10, "peak_flops": 1e6}


# ----------------------------------------------------------------------------- rows and processes

def test_a_command_measures_its_row_in_a_new_python(tmp_path):
    done = script("bench.py", "profile", *TINY_FLAGS, "--dtype=float32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ms a step without the profiler" in done.stdout
    for name in ("loss", "attention", "optimizer", "matrix products", "aten::mm"):
        assert f"\n| {name} " in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_fails_in_that_process_is_told(rows_are_forked):
    found = bench.run_in_subprocess(Setting(**TINY | dict(attention="no such kernel")))
    assert list(found) == ["failed"]


def test_turns_are_joined_and_a_row_that_fails_is_left_out(capsys):
    asked = []

    def run(job):
        asked.append(job)
        if job == "bad":
            return {"failed": "no room"}
        return {"seconds": [len(asked)], "memory": 10 - len(asked)}

    results = bench.take_turns(run, {"a": "good", "b": "bad", "c": "good"}, turns=2)
    assert asked == ["good", "bad", "good", "good", "good"]
    assert results == {"a": {"seconds": [1, 4], "memory": 9}, "c": {"seconds": [3, 5], "memory": 7}}
    assert "b: no room" in capsys.readouterr().out
    with pytest.raises(RunError):
        bench.take_turns(run, {"b": "bad"}, turns=2)


def test_the_warm_up_is_not_in_the_times(monkeypatch):
    clock = [0.0]
    durations = iter([100.0, 30.0, 1.0, 2.0, 6.0])

    def step():
        clock[0] += next(durations)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    assert bench.time_steps(step, Setting(warmup=2, steps=3)) == (130.0, [1.0, 2.0, 6.0])


def test_the_peak_is_the_rate_of_a_product_with_two_flops_a_number(monkeypatch):
    monkeypatch.setattr(bench, "time_steps", lambda step, s: (0.0, [0.5, 0.25, 0.125]))
    rate = bench.product_rate(Setting(**TINY))
    assert rate == 2 * (2 * 16) * 32 * (4 * 32) / 0.25


def test_the_loaders_rate_is_in_millions_of_tokens(monkeypatch, capsys):
    seconds_of_batches = {"seconds": [0.0016384, 0.0016384], "tokens": 10}
    monkeypatch.setattr(bench, "run_in_subprocess", lambda s: seconds_of_batches)
    monkeypatch.setattr(bench, "time_tokenizing", lambda script, text: seconds_of_batches)
    bench.main(["data", "--copies", "1", "--turns", "1"])
    assert " 10 million tokens/s" in capsys.readouterr().out


def test_a_table_is_markdown_with_aligned_numbers(capsys):
    bench.print_table([{"a": "x", "b": 99.994, "c": 1}, {"a": "yyy", "b": 1234567.0}])
    lines = capsys.readouterr().out.split("\n")[1:-2]
    assert lines == [
        "| a   |         b | c |",
        "| --- | --------- | - |",
        "| x   |     99.99 | 1 |",
        "| yyy | 1,234,567 |   |",
    ]


# ----------------------------------------------------------------------------- the step

@pytest.mark.parametrize("optimized", [True, False])
def test_the_timed_step_trains_as_the_setting_says(optimized, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tuned = []
    monkeypatch.setattr(train_gpt2.device, "tune_malloc", lambda: tuned.append(1))
    fused = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *args: fused.append(optimizer.param_groups[0]["fused"]))

    setting = Setting(**TINY, fused=optimized, loss_in_tiles=optimized, tune_malloc=optimized)
    step, model = bench.our_step(setting)
    before = model.lm_head.weight.clone()
    step()
    hook.remove()

    assert not torch.equal(before, model.lm_head.weight)
    assert (model.loss_chunk > 0) == optimized
    assert len(tuned) == optimized
    assert [bool(value) for value in fused] == [optimized]


def test_each_step_has_all_tokens_also_where_the_batch_grows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shapes = []
    step, model = bench.our_step(Setting(**TINY, recipe="frontier"))
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    step()
    step()
    assert shapes == [(2, 16), (2, 16)]


@pytest.mark.parametrize("recipe, size, expected", [
    ("gpt2", "gpt2", (12, 768, 12)), ("frontier", "gpt2", (12, 768, 6)),
    ("gpt2", "4x256", (4, 256, 4)), ("speedrun", "2x64", (2, 64, 1))])
def test_a_size_has_the_heads_of_its_recipe(recipe, size, expected):
    shape = bench.shape_of(recipe, size)
    assert (shape["n_layer"], shape["n_embd"], shape["n_head"]) == expected


@pytest.mark.parametrize("command, device, expected", [
    ("ladder", "cpu", (4, 256, 4, False)), ("ladder", "cuda:0", (16, 1024, 20, True)),
    ("profile", "cuda:0", (64, 1024, 20, True)), ("attention", "mps", (4, 1024, 50, False)),
    ("attention --steps 3", "cpu", (4, 256, 3, False)),
    ("ladder --batch_size 3 --steps 7 --no_compile", "cuda:0", (3, 1024, 7, False))])
def test_what_a_device_is_measured_with(command, device, expected, monkeypatch):
    monkeypatch.setattr(bench, "choose_device", lambda name: device)
    monkeypatch.setattr(bench, "choose_dtype", lambda name, device: "bfloat16")
    command, *words = command.split()
    s = bench.setting_of(bench.parse_args(command, words))
    assert (s.B, s.T, s.steps, s.compile) == expected
    assert s.device == device


# ----------------------------------------------------------------------------- ladder and peer

def test_each_rung_of_the_ladder_changes_one_thing():
    rungs = bench.ladder_rungs(Setting(device="cuda:0", compile=True, B=16))
    lowest, *changes = rungs.values()
    assert changes == [
        {"tf32": True}, {"dtype": "bfloat16"}, {"compile": True}, {"attention": "flash"},
        {"vocab_size": 50304}, {"fused": True}, {"attention": "auto"}, {"B": 64}]
    assert lowest.items() >= dict(
        dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257,
        fused=False).items()

    rungs = bench.ladder_rungs(Setting(device="cpu", dtype="float32"))
    assert list(rungs.values())[1:] == [
        {"attention": "flash"}, {"vocab_size": 50304}, {"fused": True}, {"tune_malloc": True},
        {"loss_in_tiles": True}, {"attention": "auto"}]


@pytest.mark.parametrize("impossible", [
    dict(attention="flash"), dict(attention="naive", vocab_size=50257)])
def test_a_rung_stands_on_the_newest_one_that_can_run(impossible, monkeypatch, capsys):
    asked = []

    def run(setting):
        asked.append(setting)
        if vars(setting).items() >= impossible.items():
            return {"failed": "no kernel"}
        return of_a_step(10)

    monkeypatch.setattr(bench, "run_in_subprocess", run)
    bench.main(["ladder", "--device=cpu", "--dtype=float32", "--turns=2"])
    possible = [s for s in asked if not vars(s).items() >= impossible.items()]
    first, second = possible[:6], possible[6:]
    assert len(asked) == 13
    assert first == second
    assert [s.fused for s in first] == [False, False, True, True, True, True]
    assert [s.loss_in_tiles for s in first] == [False, False, False, False, True, True]
    assert capsys.readouterr().out.count(": no kernel") == 1


def test_the_ladders_figures_follow_from_what_was_measured():
    results = {"a": of_a_step(100), "b": of_a_step(50), "c": of_a_step(20)}
    rows = bench.rows_of_ladder(results, peak_flops=1e6)
    assert [row["ms per step"] for row in rows] == pytest.approx([100, 50, 20])
    assert [row["tokens/s"] for row in rows] == pytest.approx([1000, 2000, 5000])
    assert [row["MFU"] for row in rows] == ["1.0%", "2.0%", "5.0%"]
    assert [row["gain"] for row in rows] == ["1.00x", "2.00x", "2.50x"]
    assert [row["in all"] for row in rows] == ["1.00x", "2.00x", "5.00x"]
    assert rows[0]["peak GB"] == 2.0


PEERS_SCRIPT = """
from hellaswag import render_example, iterate_examples
from model import GPT, GPTConfig, torch
GPT.configure_optimizers = lambda self, **how: torch.optim.AdamW(self.parameters())
import tiktoken
raise SystemExit("the script's own run began")
"""


def test_the_peers_definitions_run_and_nothing_after_them(rows_are_forked, tmp_path):
    (tmp_path / "train_gpt2.py").write_text(PEERS_SCRIPT)
    found = bench.run_in_subprocess(Setting(**TINY, worker="peer", peer=str(tmp_path)))
    assert len(found["seconds"]) == 1, found
    assert found["tokens"] == 32


def test_the_peers_time_is_told_in_terms_of_ours(monkeypatch, tmp_path, capsys):
    (tmp_path / "train_gpt2.py").write_text(PEERS_SCRIPT)
    times = {"": 50, str(tmp_path): 75}
    monkeypatch.setattr(bench, "run_in_subprocess", lambda s: of_a_step(times[s.peer] + s.compile))
    bench.main(["peer", str(tmp_path), "--device=cpu", "--compile"])
    shown = capsys.readouterr().out
    assert [line.split()[-2] for line in shown.splitlines()[-4:-1]] == ["1.00x", "1.47x", "1.49x"]


# ----------------------------------------------------------------------------- profile

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


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    time_range = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return types.SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation,
                                 time_range=time_range, self_cpu_time_total=500)


def test_kernels_are_counted_for_a_step_and_an_overlap_once():
    events = [
        event("gemm", 0, 3000),
        event("gemm", 2000, 6000),          # on another stream
        event("step", 0, 90_000, annotation=True),
        event("aten::mm", 0, 9000, device=DeviceType.CPU),
        event("copy", 9000, 12_000),
    ]
    found = bench.kernels_of(events, "cuda:0")
    assert bench.PROFILED_STEPS == 3
    assert list(found["kernels"]) == ["gemm", "copy"]
    assert found["kernels"]["gemm"] == pytest.approx((2 / 3, 7 / 3))
    assert found["busy_ms"] == pytest.approx(3)

    found = bench.kernels_of(events, "cpu")
    assert found["kernels"] == {"aten::mm": pytest.approx((1 / 3, 0.5 / 3))}


def test_the_kinds_and_the_idle_time_are_shares_of_the_step():
    kernels = {"gemm": [5, 6.0], "nvjet": [1, 1.0], "aten::copy_": [2, 0.5]}
    rows = {row["kind"]: row for row in bench.rows_of_kinds(kernels, step_ms=10.0, busy_ms=7.5)}
    assert rows["matrix products"]["ms a step"] == 7.0
    assert rows["matrix products"]["share"] == "70.0%"
    assert rows["copies and casts"]["share"] == "5.0%"
    assert rows["idle (no kernel runs)"]["share"] == "25.0%"
    assert [row["kernel"] for row in bench.rows_of_kernels(kernels, 2)] == ["gemm", "nvjet"]


def test_without_kernels_the_steps_time_is_still_told(monkeypatch, capsys):
    found = of_a_step(20) | {"kernels": {}, "busy_ms": 0.0}
    monkeypatch.setattr(bench, "run_in_subprocess", lambda s: found)
    bench.main(["profile", "--device=cpu"])
    shown = capsys.readouterr().out
    assert "20.0 ms a step" in shown
    assert "saw no kernels" in shown


# ----------------------------------------------------------------------------- attention and data

def test_a_kernels_errors_are_those_of_its_output_and_of_its_worst_gradient(monkeypatch):
    exact = bench.attention

    def half_of_dv(q, k, v, kernel):
        if kernel == "math":
            v = v.detach() / 2 + v / 2
        return exact(q, k, v, "naive")

    monkeypatch.setattr(bench, "attention", half_of_dv)
    found = bench.measure_attention(Setting(**TINY, attention="math"))
    assert found["error_forward"] < 1e-5
    assert found["error_backward"] == pytest.approx(0.5, abs=1e-4)


POOL = """
import os
import multiprocessing as mp
import numpy as np
import tiktoken
from datasets import load_dataset
encoder = tiktoken.get_encoding("gpt2")
def tokenize(doc):
    return [50256, *encoder.encode_ordinary(doc["text"])]
with mp.Pool(max(1, os.cpu_count() // 2)) as pool:
    tokens = sum(pool.imap(tokenize, load_dataset("name", split="train")), [])
np.save(os.path.join(os.path.dirname(__file__), "x_train_0"), np.array(tokens, np.uint16))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="build-nanogpt's script needs forks")
def test_a_peers_script_makes_the_same_number_of_tokens(tmp_path):
    text = tmp_path / "text.jsonl"
    bench.write_text(text, copies=1)
    ours = bench.time_tokenizing(None, text)
    peers = bench.time_tokenizing(POOL, text)
    assert ours["tokens"] == peers["tokens"]


# ----------------------------------------------------------------------------- compare

def write_metrics(out, losses, seconds, end="\n"):
    """The metrics.csv of a run of 1,000 tokens a step that validated every second step."""
    lines = ["step,tokens,seconds,train,val,hella,lr,norm,tokens_per_second"]
    for i, loss in enumerate(losses):
        lines.append(f"{2 * i},{2000 * i},{2 * i * seconds},9.5,{loss},,,,")
        lines.append(f"{2 * i + 1},{2000 * i + 1000},{2 * i * seconds},9.5,,,,,")
    out.mkdir()
    (out / "metrics.csv").write_text("\n".join(lines) + end)
    return str(out)


def test_a_runs_curve_are_its_validations_but_for_an_incomplete_line(tmp_path):
    run = write_metrics(tmp_path / "run", [11.0, 6.0], 30.0, end="\n4,4000,120.0,9.5,3.")
    assert bench.read_curves(run) == [Curve(run, [0, 2000], [0, 60], [11.0, 6.0])]


@pytest.mark.parametrize("text, losses", [
    ("1e3,7\n2000,4.5\n", [[7, 4.5]]),
    ('"Step", "Loss","Tokens"\n# a comment\n1,7,1e3\n2,4,7000', [[7, 4]]),
    ("run,tokens,seconds,validation_loss\na,0,0,9\na,5,1,8\nb,0,0,7\n", [[9, 8], [7]])])
def test_a_csv_file_holds_one_curve_or_several(text, losses):
    assert [curve.losses for curve in bench.parse_curves("file", text)] == losses


@pytest.mark.parametrize("text", [
    "", "a,b\n", "tokens,loss\n", "2,5\n1,4\n", "1,2\n3,x\n", "1,nan\n"])
def test_a_file_that_is_no_curve_is_refused(text, tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="curve.csv"):
        bench.main(["compare", str(path)])


def test_curves_are_compared_with_the_first_one():
    first = Curve("first", [0, 1000, 2000], [0, 60, 120], [10.0, 6.0, 5.0])
    other = Curve("other", [0, 500, 1500, 3000], [0, 60, 120, 180], [10.0, 7.0, 4.0, 3.0])
    row = bench.curve_row(other, first)
    assert row["tokens"] == "3k"
    assert row["time"] == "0:03:00"
    assert row["val loss"] == "3.0000"
    assert row["against the first"] == "-1.5000 at 1.5k"
    assert row["the first's end after"] == "1.17k (58%)"
    assert bench.tokens_to_reach(2.9, other) is None
    assert "against the first" not in bench.curve_row(first, first)


def test_the_picture_has_tokens_and_minutes_of_each_curve(tmp_path, monkeypatch):
    figures = []
    make = bench.new_figure

    def new_figure(**how):
        figures.append(make(**how))
        return figures[0]

    monkeypatch.setattr(bench, "new_figure", new_figure)
    a = Curve("a", [0, 1000], [0, 60], [9.0, 5.0])
    b = Curve("b", [0, 2000], [0, 300], [9.0, 4.0])
    bench.plot_curves(str(tmp_path / "a.png"), [a, b], "title")

    left, right = figures[0].axes
    assert left.lines[1].get_xydata().tolist() == [[0, 9], [2000, 4]]
    assert right.lines[1].get_xydata().tolist() == [[0, 9], [5, 4]]
    assert list(right.lines[2].get_ydata()) == [5, 5]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["recipes.csv", "shakespeare.csv"])
def test_the_curves_of_the_docs_can_be_drawn(name, tmp_path):
    path = tmp_path / "a.png"
    bench.main(["compare", str(ROOT / "assets" / name), "--plot", str(path)])
    assert path.stat().st_size > 10_000


# ----------------------------------------------------------------------------- recipes

def test_recipes_are_trained_and_compared(monkeypatch, tmp_path, capsys):
    commands = []

    def run(command, **how):
        commands.append(command)
        write_metrics(Path(command[-1].removeprefix("--out=")), [9.0, 9.0 - len(commands)], 1.0)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench.subprocess, "run", run)
    bench.main(["recipes", "DATA", "--turns=2", "--steps=30", f"--out={tmp_path}"])
    recipes = [command[2] for command in commands]
    assert recipes == [f"--recipe={name}" for name in train_gpt2.RECIPES for _ in range(2)]
    assert [command[-2] for command in commands[:2]] == ["--seed=0", "--seed=1"]
    assert {"--data=DATA", "--max_steps=30", "--n_layer=4"} <= set(commands[0])
    assert "| speedrun, seed 0 |" in capsys.readouterr().out


@pytest.mark.parametrize("rates, words", [
    ({}, {"--max_lr=0.002", "--warmup_steps=2"}),
    ({"max_lr": 1e-3}, {"--warmup_steps=2"}),
    ({"max_lr": 1e-3, "warmup_steps": 0}, set()),
])
def test_a_recipe_is_given_the_rates_that_it_does_not_have(rates, words, monkeypatch):
    recipe = dataclasses.replace(train_gpt2.RECIPES["gpt2"], rates=rates)
    monkeypatch.setitem(train_gpt2.RECIPES, "gpt2", recipe)
    args = bench.parse_args("recipes", ["DATA", "--recipe=gpt2", "--steps=30"])
    command = bench.commands_of_runs(args)["gpt2"]
    given = {word for word in command if word.startswith(("--max_lr", "--warmup_steps"))}
    assert given == words


@pytest.mark.parametrize("recipe, idea", [
    (recipe, idea) for recipe, ideas in bench.IDEAS.items() for idea in ideas])
def test_an_idea_is_replaced_before_training(recipe, idea, monkeypatch):
    owner, name, replacement = bench.IDEAS[recipe][idea]
    monkeypatch.setattr(owner, name, getattr(owner, name))      # put back at the end
    found = []
    monkeypatch.setattr(
        train_gpt2, "main", lambda argv: found.extend([argv, getattr(owner, name)]))

    bench.main(["without", recipe, idea, "--max_steps=1"])
    assert found == [[f"--recipe={recipe}", "--max_steps=1"], replacement]


# ----------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("words, what", [
    ("lader", "lader"), ("--device cpu", "--device"), ("compare", "curves"), ("data a b", "b"),
    ("ladder --size 4x0", "4x0"), ("ladder --steps 0", "--steps"), ("ladder --device tpu", "tpu"),
    ("ladder --recipe no", "--recipe"), ("ladder --plot a.png", "--plot"),
    ("attention --compile", "--compile"), ("recipes a --ideas", "--recipe"),
    ("peer .", "not that of")])
def test_a_mistake_is_refused(words, what, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=what):
        bench.main(words.split())


def test_a_mistake_is_one_line_and_exit_code_2():
    done = script("bench.py", "ladder", "--steps=x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--steps" in done.stderr
