"""What a user is told before a run: the plan, presets, flags, warnings."""
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
from helpers import ENV, HANG, ROOT, logged, run

from model import GPT, GPTConfig, fresh_model
from benchmarks.timing import random_tokens
from runtime.checks import check_config
from runtime.cli import UserError, __version__
from runtime.device import make_autocast
from runtime.dataloader import Data, TokenDataset, TokenLoader
from runtime.distributed import Process
from runtime.language_model import ModernConfig
from speedrun import SpeedrunGPT
from runtime.forecast import Forecast, ModelSize, Trial, count_model, try_micro_step
from runtime.presets import OVERFIT, PRESETS
from runtime.sharding import moment_bytes
from runtime.shards import write_shard
from runtime.weights import read_checkpoint
from train_gpt2 import RECIPES, Config, parse_flags
import runtime.checks
import runtime.forecast
import train_gpt2

SMALL = ["--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--dtype", "float32",
         "--hellaswag_every", 0, "--total_batch_size", 256]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """10,000 tokens to train on."""
    folder = tmp_path_factory.mktemp("plan") / "data/shakespeare"
    folder.mkdir(parents=True)
    for i, n in enumerate((2000, 10_000)):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", random_tokens(n))
    return folder


def files(folder):
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_dry_run_tells_what_would_run_and_writes_nothing(processes, shards, tmp_path):
    before = files(tmp_path)
    result = run("--data", shards, *SMALL, "--max_steps", 100, "--val_every", 30, "--sample_every", 0,
                 "--checkpoint_every", 50, "--batch_size", 2, "--out", "log", "--dry_run", cwd=tmp_path,
                 processes=processes)
    for text in ("1,636,224 parameters", f"256 tokens a step = 2 x 32 x {4 // processes} micro-steps",
                 "100 steps = 25,600 tokens = 2.56 epochs", "10,000 tokens for training",
                 "7 MB weights, 7 MB gradients, 13 MB moments", "20 MB a checkpoint, up to 5 in log",
                 "validation: at step 0, every 30 steps and at the last, 5 times", "HellaSwag: never",
                 "checkpoint: every 50 steps and at the last, 2 times", "timed here",
                 "nothing was written"):
        assert text in result.stdout, text
    assert files(tmp_path) == before and "warning" not in result.stdout


def test_gpt2_on_a_cpu_over_shakespeare_is_warned_of_its_epochs_and_weeks(shards, tmp_path):
    """What happens to whoever leaves the preset out, at full size; one short sequence a micro-step to save
    time."""
    result = run("--data", shards, "--batch_size", 1, "--sequence_length", 64, "--dry_run", "--max_steps",
                 100_000, "--out", tmp_path / "log")
    assert "124,475,904 parameters" in result.stdout
    assert re.search(r"time: +about .* a step, [\d,]+ days in all with its evaluations \(from one micro",
                     result.stdout)
    assert re.search(r"warning: [\d,]+ epochs over the data, .* --max_steps 1,", result.stdout)
    assert re.search(r"warning: this takes about [\d,]+ days here: give a smaller --preset", result.stdout)


def test_the_header_has_the_plan_in_short_and_warns_of_many_epochs(shards, tmp_path, capsys):
    flags = ["--data", shards, *SMALL, "--val_every", 0, "--sample_every", 0, "--checkpoint_every", 0]
    result = run(*flags, "--max_steps", 2, "--out", tmp_path / "short")
    assert "memory" in result.stdout and "no checkpoints" in result.stdout and "about " in result.stdout
    assert "warning" not in result.stdout
    more = ["--max_steps", 1000, "--total_batch_size", 128, "--out", tmp_path / "x", "--dry_run"]
    assert train_gpt2.train(list(map(str, [*flags, *more]))) == 0
    assert re.search("warning: 13 epochs over the data.* --max_steps 312,", capsys.readouterr().out)


@pytest.mark.parametrize("model", [GPT(GPTConfig(32, 512, 2, 2, 32)),
                                   SpeedrunGPT(ModernConfig(32, 512, 2, 2, 32))])
def test_the_trial_counts_what_is_kept_for_the_backward_and_changes_nothing(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    two, four = (try_micro_step(model, B, 32, make_autocast("cpu", "float32"), "cpu") for B in (2, 4))
    # at least the eight (B, T, C) inputs of a block's matrix products, as float32
    assert two.activations > 8 * 2 * 32 * 32 * 4 and two.seconds > 0
    assert four.activations == pytest.approx(two.activations, rel=0.1)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_run_its_values_are_defaults_and_flags_win(name, recipe):
    config, given = parse_flags(["--preset", name, "--recipe", recipe])
    check_config(config)
    assert given == {"preset", "recipe"}
    rates = {"max_lr", "min_lr", "warmup_steps"} if recipe != "gpt2" else set()
    for flag, value in PRESETS[name][1].items():
        if flag != "recipe":
            assert (getattr(config, flag) == value) == (flag not in rates), flag
    assert config.recipe == recipe and parse_flags(["--preset", name])[0].recipe == (
        "frontier" if name == "shakespeare" else "gpt2")
    assert parse_flags(["--preset", name, "--n_layer", "3", "--out", "x"])[0].n_layer == 3


def test_overfit_is_a_run_of_its_own():
    assert vars(parse_flags(["--overfit"])[0]).items() >= OVERFIT.items()
    with pytest.raises(UserError, match="leave --preset out"):
        parse_flags(["--overfit", "--preset", "small"])
    with pytest.raises(UserError, match="no validation data"):
        check_config(parse_flags(["--overfit", "--val_every", "5"])[0])


def test_a_presets_values_are_kept_by_the_checkpoint(shards, monkeypatch, capsys):
    folder = shards.parent.parent
    run("--preset", "shakespeare", "--max_steps", 2, "--val_every", 0, "--sample_every", 0,
        "--total_batch_size", 256, cwd=folder)
    monkeypatch.chdir(folder)
    assert train_gpt2.train(["--out", "log/shakespeare", "--max_steps", "3", "--dry_run"]) == 0
    assert "resuming from log/shakespeare/checkpoint_000002.pt at step 2 of 3" in capsys.readouterr().out
    result = run("--out", "log/shakespeare", "--max_steps", 3, cwd=folder)
    assert "at step 2 of 3" in result.stdout and set(logged(folder / "log/shakespeare")) == {0, 1, 2}
    config = read_checkpoint(folder / "log/shakespeare/checkpoint_000003.pt")["config"]
    assert (config["n_layer"], config["max_lr"], config["val_every"]) == (4, 0.02, 0)


def test_help_lists_the_presets_and_what_a_resume_may_change():
    text = run("--help").stdout
    for name, (what, values) in PRESETS.items():
        assert f"  {name}: {what}" in text
        assert all(f"--{flag}" in text for flag in values)
    assert "On resume, these cannot change: --shuffle --recipe" in text
    assert "These are not taken from the checkpoint: --preset --dry_run" in text
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("script", ["train_gpt2", "fineweb"])
def test_every_command_says_its_version(script):
    result = subprocess.run([sys.executable, ROOT / f"{script}.py", "--version"], capture_output=True,
                            text=True, timeout=HANG, env=ENV)
    assert (result.returncode, result.stdout) == (0, f"{script}.py {__version__}\n")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(("flag", "meant"), [
    ("--max-lr", "--max_lr"), ("--max_lrr", "--max_lr"), ("--no-shuffle", "--no_shuffle"),
    ("--batchsize=4", "--batch_size")])
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(flag, meant):
    with pytest.raises(UserError, match=f"unrecognized arguments: {flag}; did you mean {meant}\\?"):
        parse_flags([flag])


@pytest.mark.parametrize(("words", "answer"), [
    ("--compile off", "--compile takes no value: give --no_compile "),
    ("--compile=False", "--compile takes no value: give --no_compile "),
    ("--max_steps 1 --no_plot 1 --seed 0", "--no_plot takes no value: give --no_plot alone "),
    ("--no_plot no", "--no_plot takes no value: give --plot "), ("--dry_run yes", "give --dry_run alone ")])
def test_a_value_for_a_flag_without_one_is_answered_with_the_flag_to_give(words, answer):
    with pytest.raises(UserError, match=answer):
        parse_flags(words.split())


@pytest.mark.parametrize(("val_every", "hellaswag_every", "evaluations"), [
    (0, 0, 0), (50, 0, 3 * 10 * 32), (100, 50, 2 * 10 * 32 + 3 * 10_042 * 4 * 96)])
def test_the_time_of_a_run_includes_its_evaluations(val_every, hellaswag_every, evaluations):
    """A forward is a third of a micro-step: of 10 s for 256 tokens here."""
    config = Config(block_size=32, sequence_length=32, total_batch_size=256, max_steps=100, dtype="float32",
                    val_every=val_every, hellaswag_every=hellaswag_every)
    loader = TokenLoader(TokenDataset([random_tokens(1000) % 512], 32), 256, 8)
    forecast = Forecast(config, ModelSize(0, 0, 0, 0, 0), Data(loader.dataset, loader.dataset, 10), Process(),
                        False, 0, loader, Trial(10 / 8, 1))
    assert forecast.seconds_left() == pytest.approx(100 * 10 + evaluations * 10 / 256 / 3)
    forecast.step = 75
    assert forecast.seconds_left() == pytest.approx((100 * 10 + evaluations * 10 / 256 / 3) / 4)


def test_the_time_on_a_gpu_is_predicted_by_its_data_sheet_and_dtype(monkeypatch):
    model = GPT(GPTConfig(32, 512, 1, 2, 32))
    monkeypatch.setattr(runtime.forecast, "peak_flops", lambda device: 100e12)
    loader = TokenLoader(TokenDataset([random_tokens(1000) % 512], 32), 256, 8)
    size, seconds = ModelSize(0, 0, model.flops_per_token(32), 0, 0), {}
    for dtype, tf32 in (("bfloat16", True), ("float32", True), ("float32", False)):
        config = Config(block_size=32, sequence_length=32, total_batch_size=256, dtype=dtype, tf32=tf32)
        forecast = Forecast(config, size, Data(loader.dataset, None, 0), Process(), False, 0, loader)
        seconds[dtype, tf32] = forecast.step_time()[0]
    expected = model.flops_per_token(32) * 256 / (0.4 * 100e12)
    assert seconds == {("bfloat16", True): pytest.approx(expected),
                       ("float32", True): pytest.approx(2 * expected), ("float32", False): None}


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
@pytest.mark.parametrize("n_layer", [1, 3])
def test_the_size_of_a_model_is_counted_before_it_is_made(recipe, n_layer):
    config = Config(recipe=recipe, n_layer=n_layer, n_head=2, n_embd=32, block_size=64, vocab_size=512,
                    sequence_length=32)
    size, model = count_model(config, fresh_model, RECIPES[recipe].optimizers), fresh_model(config)
    optimizers = RECIPES[recipe].optimizers(model, config)
    moments = sum(moment_bytes(optimizers))
    assert size == ModelSize(sum(p.numel() for p in model.parameters()), moments, model.flops_per_token(32),
                             moments, moments)
    assert size.moments == 8 * size.parameters if recipe == "gpt2" else size.moments < 8 * size.parameters
    with pytest.raises(UserError, match="smaller --n_embd"):
        count_model(dataclasses.replace(config, n_embd=2**39), fresh_model, RECIPES[recipe].optimizers)


def test_a_dry_run_of_what_does_not_fit_prints_its_plan_and_makes_no_model(shards, tmp_path, monkeypatch,
                                                                           capsys):
    """1.5 billion parameters on a machine of 24 GB."""
    monkeypatch.setattr(train_gpt2, "build_training", lambda *_: pytest.fail("nothing is to be allocated"))
    for module in (runtime.forecast, runtime.checks):
        monkeypatch.setattr(module, "memory_of", lambda device: (22e9, 24e9))
    with pytest.raises(UserError, match="need 24.9 GB to train, and cpu has 24.0 GB: give a smaller"):
        train_gpt2.train(["--preset", "gpt2-xl", "--data", str(shards), "--dry_run", "--out",
                          str(tmp_path / "log")])
    out = capsys.readouterr().out
    assert "memory:  at least 24.9 GB: 6.2 GB weights, 6.2 GB gradients, 12.5 GB moments" in out
    assert "cpu has 24.0 GB, of which 22.0 GB are free now" in out and "checkpoint: every" in out


def test_a_checkpoint_that_would_not_fit_on_the_disk_is_warned_of(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1e6))
    assert train_gpt2.train([*map(str, SMALL), "--data", str(shards), "--max_steps", "5", "--dry_run",
                             "--out", str(tmp_path / "a/b")]) == 0
    assert "warning: 1 MB are free for" in capsys.readouterr().out and not os.listdir(tmp_path)
