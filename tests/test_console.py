"""runtime/console.py: the line of a step, the header and the summary, against known values."""
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import refused
from peers import RECIPES, GpuProcess, make_run

import sample
from config import Config
from model import GPT, GPTConfig
from runtime import console
from runtime.checkpoint import Start, gather_state
from runtime.console import StepLog, clock, counted
from runtime.hardware import peak_flops
from runtime.ranks import Process
from runtime.recipe import BatchSchedule
from train_gpt2 import train_step


def make_log(process=None, schedule=None, flops_per_token=10**6):
    """The StepLog of 100 steps of 1,000 tokens."""
    if process is None:
        process = Process()
    if schedule is None:
        schedule = BatchSchedule(1000, 100)
    return StepLog(process, schedule, flops_per_token)


@pytest.mark.parametrize("seconds, text", [
    (0.3, "0:00:00"),
    (299.6, "0:05:00"),
    (1e5, "1 day, 3:46:40"),
    (1e99, "115740 days, 17:46:40"),
])
def test_a_duration_is_written_as_a_clock_shows_it(seconds, text):
    assert clock(seconds) == text


def test_what_is_counted_is_in_the_plural_where_there_are_more():
    assert counted(1, "process") == "1 process"
    assert counted(8, "process") == "8 processes"
    assert counted(2000, "step") == "2,000 steps"


# ----------------------------------------------------------------------- the line of a step

def test_a_step_has_the_line_of_build_nanogpt(capsys):
    make_log(schedule=BatchSchedule(16384, 6)).step(5, 6.03724, 2.049, 4.2e-6, 0.0931)
    assert capsys.readouterr().out == (
        "step     5 | loss: 6.0372 | lr 4.20e-06 | norm: 2.05 | dt: 93.1ms | tok/sec: 175,983\n")


def test_a_slow_step_has_no_comma_in_its_milliseconds(capsys):
    make_log().step(19072, 3.2, 12.345, 6e-5, 12.34)
    assert "| dt: 12340.0ms |" in capsys.readouterr().out


def lines_of_steps(log, seconds, capsys):
    """The lines of steps that take these seconds."""
    for step, dt in enumerate(seconds):
        log.step(step, 4.0, 1.0, 1e-3, dt)
    return capsys.readouterr().out.splitlines()


def test_the_time_left_follows_the_median_of_the_last_twenty_steps_without_the_first(capsys):
    seconds = [900.0, 2.0, 4.0, 3.0] + [5.0] * 20 + [7.0] * 15
    lines = lines_of_steps(make_log(), seconds, capsys)

    assert not lines[0].endswith("left"), "the first step may have compiled"
    assert lines[1].endswith(f"| {clock(98 * 2.0)} left")
    assert lines[3].endswith(f"| {clock(96 * 3.0)} left")
    assert lines[23].endswith(f"| {clock(76 * 5.0)} left")
    assert lines[38].endswith(f"| {clock(61 * 7.0)} left")


def test_the_time_left_counts_tokens_where_the_batch_grows(capsys):
    # Four steps of 512 tokens, two of 1,024 and one of 2,048. After three of them 4,608 are left.
    log = make_log(schedule=BatchSchedule(2048, 7, (4, 2, 1)))
    lines = lines_of_steps(log, [4.0, 4.0, 4.0], capsys)

    assert lines[2].endswith(f"| {clock(4608 / 128)} left")
    assert "tok/sec: 128 |" in lines[2]


def test_the_last_step_leaves_no_time(capsys):
    lines = lines_of_steps(make_log(schedule=BatchSchedule(1000, 3)), [9.0, 5.0, 5.0], capsys)
    assert lines[-1].endswith("| 0:00:00 left")


@pytest.mark.parametrize("world_size, share", [(1, "80%"), (2, "40%")])
def test_mfu_is_the_share_of_all_gpus_peak(world_size, share, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    peak_flops.cache_clear()
    process = Process(device="cuda:0", world_size=world_size)
    flops_per_token = 0.8 * 312e12 / 1000

    make_log(process, flops_per_token=flops_per_token).step(0, 4.0, 1.0, 1e-3, 1.0)
    peak_flops.cache_clear()

    line = capsys.readouterr().out
    assert line.endswith(f"| mfu {share}\n")
    assert "tok/sec: 1,000 |" in line, "of all GPUs"


# A step has 1,000 tokens.
@pytest.mark.parametrize("steps, backward_tokens, turn", [
    (range(6), 0, None), (range(6), 3000, 3), (range(6), 3001, 4), (range(6), 1, 1),
    (range(3), 3000, None), (range(3, 6), 3000, 3), (range(4, 6), 3000, None)])
def test_the_step_in_which_the_reading_turns_says_so_once(steps, backward_tokens, turn, capsys):
    log = StepLog(Process(), BatchSchedule(1000, 100), 10**6, backward_tokens)
    for step in steps:
        log.step(step, 4.0, 1.0, 1e-3, 1.0)

    lines = capsys.readouterr().out.splitlines()
    told = [i for i, line in enumerate(lines) if "forwards" in line]
    if turn is None:
        assert told == []
    else:
        [i] = told
        assert lines[i].startswith(f"step     {turn} |")
        assert lines[i + 1].startswith(f"step     {turn} | loss")


def test_other_ranks_print_nothing(capsys):
    log = make_log(Process(rank=1, world_size=2))
    log.step(0, 4.0, 1.0, 1e-3, 1.0)
    log.line(0, "validation loss: 5.0000")

    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------- the header

SHAPE = {"block_size": 32, "vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 32}
# The embedding, the positions, two blocks, the last norm.
PARAMETERS = 256 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
def make_config(**more):
    """The flags of a run, after "auto" has been decided."""
    automatic = {"sequence_length": 32, "min_lr": 2e-5, "dtype": "float32", "compile": False}
    return Config(**SHAPE | automatic | {"total_batch_size": 256} | more)


def print_header(config, process=None, start=None, backward=0, divisors=(1, 1, 1)):
    """Of a run with 500 sequences of data."""
    if process is None:
        process = Process()
    data = SimpleNamespace(
        val_count=3, train=SimpleNamespace(total=500, backward_tokens=32 * backward))
    schedule = BatchSchedule(config.total_batch_size, config.max_steps, divisors)
    start = start or Start()
    console.print_machine(config, process, start)
    console.print_header(config, process, data, GPT(GPTConfig(**SHAPE)), schedule, start)


@pytest.mark.parametrize("word", [
    "1 process on cpu (",
    f", torch {torch.__version__}\n",
    f"gpt2: {PARAMETERS:,} parameters (2 layers, 2 heads, width 32, vocabulary 256)",
    f"37 steps = {37 * 256:,} tokens = {37 * 256 / 32 / 500:.2f} epochs",
    "epochs; learning rate 0.00312 after 6 steps of warm-up, 2e-05 at the end\n",
    "validation every 21 steps on 96 tokens",
    "HellaSwag never",
    "checkpoint every 1,100 steps",
    "output in a/log",
])
def test_the_header_counts_parameters_tokens_and_epochs_and_says_what_is_planned(word, capsys):
    print_header(make_config(
        max_steps=37, max_lr=3.1234e-3, warmup_steps=6, val_every=21, hellaswag_every=0,
        checkpoint_every=1100, out="a/log"))

    assert word in capsys.readouterr().out


@pytest.mark.parametrize("device, before, said", [
    ("cpu", "", "float32 (the CPU has no bfloat16)"),
    ("cpu", "float32", "float32 as before"),
    ("cpu", "bfloat16", "float32 (bfloat16 before)"),
    ("mps", "", "float32"),
])
def test_the_header_says_why_a_run_has_its_dtype(device, before, said, monkeypatch, capsys):
    monkeypatch.setattr(console, "bfloat16_of_cpu", lambda: "no bfloat16")
    print_header(make_config(), Process(device=device), Start(dtype=before))
    assert f"), {said}, torch" in capsys.readouterr().out


@pytest.mark.parametrize("step, is_complete", [(36, False), (37, True)])
def test_a_run_that_is_complete_says_how_there_is_more(step, is_complete, capsys):
    print_header(make_config(max_steps=37), start=Start(path=Path("log/x.pt"), step=step))
    assert ("another --out" in capsys.readouterr().out) == is_complete


@pytest.mark.parametrize("divisors, backward, step", [
    ((1, 1, 1), 0, None), ((1, 1, 1), 120, 15), ((1, 1, 1), 121, 16), ((1, 1, 1), 128, 16),
    ((2, 1, 1), 80, 19)])
def test_the_header_says_until_when_the_text_is_read_backwards(divisors, backward, step, capsys):
    """A step has 8 sequences, or 4 in the first 18 steps."""
    print_header(make_config(max_steps=37), backward=backward, divisors=divisors)
    text = capsys.readouterr().out
    assert ("backwards" in text) == (step is not None)
    assert (f"before step {step}:" in text) == (step is not None)


@pytest.mark.parametrize("step, said", [(0, True), (14, True), (15, False), (30, False)])
def test_a_run_that_resumes_behind_the_turn_does_not_hear_of_it(step, said, capsys):
    print_header(make_config(max_steps=37), backward=120, start=Start(path="a.pt", step=step))
    assert ("backwards" in capsys.readouterr().out) == said


def test_a_finetuning_names_the_weights_that_it_begins_with(capsys):
    print_header(make_config(init="log/base/best"), start=Start(source="log/base/checkpoint_9.pt"))
    assert "weights of --init log/base/best\n" in capsys.readouterr().out
    for config, start in (
        (make_config(), None), (make_config(init="gpt2"), Start(path="log/checkpoint_9.pt"))):
        print_header(config, start=start)
        assert "weights" not in capsys.readouterr().out


def test_a_compiled_run_says_that_it_takes_a_while_and_one_without_out_writes_nothing(capsys):
    print_header(make_config(compile=True, out=""), Process(world_size=2))
    text = capsys.readouterr().out

    assert "2 processes on cpu" in text
    assert "compiling the model" in text
    assert "output" not in text


@pytest.mark.parametrize("flags, said", [
    ({"warmup_steps": 5, "max_steps": 6}, "after 5 steps of warm-up, 2e-05 at the end\n"),
    ({"warmup_steps": 5, "max_steps": 5}, "after 5 steps of warm-up (the run has 5), "),
    ({"warmup_steps": 0}, "; learning rate 0.0006, 2e-05 at the end\n"),
    ({"warmup_steps": 0, "min_lr": 6e-4}, "; learning rate 0.0006\n")])
def test_the_header_tells_what_the_learning_rate_does(flags, said, capsys):
    print_header(make_config(**flags))
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("warmup_steps, said", [(0, True), (5, False)])
def test_a_sanity_run_is_told_that_its_loss_may_jump_without_warm_up(warmup_steps, said, capsys):
    print_header(make_config(overfit=True, warmup_steps=warmup_steps, min_lr=6e-4))
    assert ("without warm-up" in capsys.readouterr().out) == said


@pytest.mark.parametrize("divisors, world_size, text", [
    ((1, 1, 1), 1, "2,048 tokens per step = 4 x 32 x 16 micro-steps x 1 process\n"),
    ((1, 1, 1), 2, "2,048 tokens per step = 4 x 32 x 8 micro-steps x 2 processes\n"),
    ((4, 2, 1), 1, "2,048 tokens per step = 4 x 32 x 16 micro-steps x 1 process, 512 at first\n"),
])
def test_the_product_of_the_batch_is_the_tokens_of_a_step(divisors, world_size, text, capsys):
    schedule = BatchSchedule(2048, 7, divisors)
    process = Process(world_size=world_size)
    console.print_batch(make_config(max_steps=7), process, schedule, 4)

    assert capsys.readouterr().out == text


def make_data(backward_tokens=0):
    """Of which a validation reads four sequences."""
    return SimpleNamespace(
        val_count=4, train=SimpleNamespace(backward_tokens=backward_tokens))


@pytest.mark.parametrize("step, val_every, text", [
    # A validation reads 4 x 32 tokens, in a third of a second.
    (0, 0, "0:00:48 for 24 steps ("),
    (0, 10, "0:00:48 for 24 steps and 0:00:01 for 4 validations on 128 tokens ("),   # 0, 10, 20, 24
    (10, 10, "0:00:28 for 14 steps and 0:00:01 for 3 validations on 128 tokens ("),
    (11, 12, "0:00:26 for 13 steps and 0:00:01 for 2 validations on 128 tokens ("),  # 12, 24
    (24, 1, "0:00:00 for 0 steps and 0:00:00 for 1 validation on 128 tokens ("),
])
def test_an_estimate_has_the_time_of_a_step_and_of_all_that_is_left(step, val_every, text, capsys):
    config = make_config(max_steps=24, val_every=val_every)
    console.print_estimate(config, Process(), make_data(), BatchSchedule(256, 24), step, 0.25)
    printed = capsys.readouterr().out

    assert f"about 2 s per step, {text}" in printed
    assert "--dry_run" in printed


@pytest.mark.parametrize("step, tokens, validations", [
    (0, 1, "7 validations"),                # at 0, 4, 8, ..., 24
    (0, 10 * 256, "5 validations"),         # at 0, 12, 16, 20, 24
    (0, 12 * 256, "4 validations"),         # of the forwards part nothing is trained yet at 12
    (0, 12 * 256 - 1, "5 validations"),
    (3, 10 * 256, "4 validations"),
    (17, 10 * 256, "2 validations"),
    (24, 12 * 256, "1 validation on"),
])
def test_an_estimate_counts_no_validation_of_what_is_read_backwards(
        step, tokens, validations, capsys):
    config = make_config(max_steps=24, val_every=4)
    console.print_estimate(
        config, Process(), make_data(tokens), BatchSchedule(256, 24), step, 0.25)
    assert f" for {validations}" in capsys.readouterr().out


@pytest.mark.parametrize("flags, world_size, not_counted", [
    ({}, 1, "(not counted: optimizer, HellaSwag, samples, checkpoints);"),
    ({"hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0}, 1,
     "(not counted: optimizer);"),
    ({"sample_every": 0}, 2,
     "(not counted: optimizer, HellaSwag, checkpoints, what the processes exchange);"),
])
def test_an_estimate_names_what_the_run_has_and_it_does_not_count(
        flags, world_size, not_counted, capsys):
    config = make_config(max_steps=24, **flags)
    process = Process(world_size=world_size)
    console.print_estimate(config, process, make_data(), BatchSchedule(256, 24), 0, 0.25)
    assert not_counted in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_size_of_a_checkpoint_is_that_of_the_weights_and_moments_it_holds(recipe):
    run = make_run(recipe=recipe)
    size = console.bytes_of_checkpoint(run.state)
    train_step(0, run)
    moments = gather_state(run.state, run.process)["optimizers"]

    tensors = list(run.state.model.parameters())
    for state in moments.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    assert size == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.01)


@pytest.mark.parametrize("flags, text", [
    ({}, "and the 4 that may lie in a/log 8 GB"),                       # of 0.002 TB each
    ({"keep_checkpoints": 1}, "and the 2 that may lie in a/log 4 GB"),
    ({"keep_checkpoints": "all"}, "and the 11 that may lie in a/log 22 GB"),
    ({"max_steps": 6}, "and the 3 that may lie in a/log 6 GB"),
    ({"val_every": 0}, "and the 3 that may lie in a/log 6 GB"),
])
def test_a_dry_run_tells_the_size_of_all_checkpoints(flags, text, monkeypatch, capsys):
    monkeypatch.setattr(console, "bytes_of_checkpoint", lambda state: 2_000_000_000)
    config = make_config(**{"max_steps": 40, "checkpoint_every": 4, "out": "a/log", **flags})
    console.print_needs(config, Process(), None)
    printed = capsys.readouterr().out
    assert f"about 2 GB, {text};" in printed
    assert "peak" not in printed


@pytest.mark.parametrize("flags", [{"checkpoint_every": 0, "out": "a/log"}, {"out": ""}])
def test_a_dry_run_without_checkpoints_tells_no_size_of_them(flags, capsys):
    console.print_needs(make_config(**flags), Process(), None)
    assert capsys.readouterr().out == ""


def test_a_dry_run_on_a_gpu_tells_the_peak_of_its_memory_with_the_moments(monkeypatch, capsys):
    monkeypatch.setattr(console, "peak_memory", lambda device: 3_000_000_000)
    process = GpuProcess(device="cuda:0")
    optimizer = SimpleNamespace(bytes_to_allocate=lambda: 1_500_000_000)
    console.print_needs(make_config(out=""), process, SimpleNamespace(optimizer=optimizer))
    assert "4.5 GB of GPU memory" in capsys.readouterr().out


# ----------------------------------------------------------------------- the summary

@pytest.fixture
def summary(tmp_path, capsys):
    """summary(seconds of steps, {step: validation loss}) -> what is printed.

    The run's folder is `a run`. Steps in `saved` have a checkpoint.
    """
    out = tmp_path / "a run"
    out.mkdir()

    def summarise(
        seconds=(1.0,), losses=None, saved=(), stopped=False, process=None, prompt=""
    ):
        run = make_run(process=process, max_steps=100, total_batch_size=1000, out=str(out),
                       sample_prompt=prompt)
        run.data.bits_per_byte = 0.25
        lines_of_steps(run.log, seconds, capsys)
        for step, loss in (losses or {}).items():
            run.output.add(step, val=loss, val_tokens=264)
        for step in saved:
            (out / f"checkpoint_{step:06d}.pt").touch()
        console.print_summary(run, len(seconds), stopped)
        return capsys.readouterr().out
    return summarise


def test_the_summary_has_the_median_step_without_the_first_and_the_peak_of_memory(
    summary, monkeypatch
):
    monkeypatch.setattr(console, "peak_memory", lambda device: 12_288_000_000)
    text = summary([900.0, 2.0, 3.0, 4.0, 90.0, 3.0])
    assert "median step 3,000.0 ms, 333 tokens/s, peak memory 12.3 GB" in text
    assert "done: 6 steps" in text


def test_a_run_of_one_step_has_the_time_of_that(summary):
    assert "median step 2,000.0 ms, 500 tokens/s" in summary([2.0])


def test_a_run_that_was_done_already_has_no_time(summary):
    assert "median" not in summary([])


@pytest.mark.parametrize("names", [[], ["metrics.csv"], ["metrics.csv", "loss.png"]])
def test_the_summary_names_the_files_that_are_there(names, summary, tmp_path):
    for name in names:
        (tmp_path / "a run" / name).touch()
    text = summary()
    for name in ("metrics.csv", "loss.png"):
        assert (name in text) == (name in names)

    assert "checkpoints" not in text


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss_of_those_that_are_there(summary):
    losses = {0: 9.0, 1: 5.0, 2: 6.0, 4: 8.0}
    text = summary(losses=losses, saved=[2, 4])

    [line] = re.findall("best checkpoint.*", text)
    assert "a run/checkpoint_000002.pt," in line
    assert "validation loss 6.0000 (1.5000 bits per byte), 9.0000 at step 0" in line
    assert "8.0000 at step 4" in line
    assert "--max_lr" not in line
    assert "checkpoints" in text


def test_training_that_has_only_raised_the_loss_is_told(summary):
    text = summary(losses={0: 5.0, 1: 6.0, 2: 7.0}, saved=[1, 2])
    assert "training has raised the loss: lower --max_lr" in text


@pytest.mark.parametrize("losses, folder", [({0: 5.0, 2: 4.0}, "a run/best"), ({}, "a run")])
def test_the_next_command_samples_from_the_best_weights(losses, folder, summary, tmp_path):
    text = summary(losses=losses, saved=[2])
    words = shlex.split(text.splitlines()[-1])
    assert words[-3:] == ["sample.py", "--model", f"{tmp_path}/{folder}"]


@pytest.mark.parametrize("prompt", ["First Citizen:\n", "It's \"$HOME\" `now`!", "---", "第一回"])
def test_the_next_command_has_the_prompt_as_the_shell_reads_it(prompt, summary):
    command = summary(saved=[2], prompt=prompt).splitlines()[-1].removeprefix("next: python ")
    name, *words = shlex.split(command)
    assert name == "sample.py"
    assert sample.parse_args(words).prompt == prompt.strip()


def test_a_run_without_checkpoints_has_none_to_sample_from(summary):
    assert "sample.py" not in summary()


def test_a_stopped_run_says_by_what_and_how_it_goes_on(summary):
    text = summary([1.0, 1.0], stopped=True, process=Process(signal="SIGUSR1"))
    assert "stopped by SIGUSR1 after 2 of 100 steps. resumes from the newest" in text
    assert "done" not in text


class OneOfFour(Process):
    """Rank 0 of four on two machines, of which two have got a signal."""

    def gather(self, value):
        return [value, "SIGTERM", "", "SIGHUP"]


def test_the_first_rank_that_has_got_a_signal_is_named():
    process = OneOfFour(world_size=4, machines=["node0", "node1", "node1", "node1"])
    assert console.signals_received(process) == "SIGTERM (process 1 on node1 and 1 other)"


def test_the_sanity_run_passes_below_a_tenth(capsys):
    console.print_overfit(Process(), [10.9, 0.09, 0.2])
    text = capsys.readouterr().out
    assert "10.9000, at the lowest 0.0900 in 3 steps" in text
    assert "PASSED" in text

    refused(lambda: console.print_overfit(Process(), [10.9, 0.11]), "0.1100", "FAILED", failed=True)


@pytest.mark.parametrize("bits_per_byte, text", [
    (0.25, "4.0000 (1.0000 bits per byte)"), (math.nan, "4.0000")])
def test_bits_per_byte_are_told_where_they_are_known(bits_per_byte, text):
    assert console.loss_text(4.0, SimpleNamespace(bits_per_byte=bits_per_byte)) == text
