"""The numbers that a run prints and records, against known values: a clock that the tests move, known peaks,
texts of a known number of bytes. test_log.py has the form of the line and of the two files."""
import contextlib
import csv
import datetime
import io
import math
import os
import re
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from helpers import BYTES, ROOT, logged, run, train
from runtime.tokenizer import EOT, encode, tokenizer

T, TOKENS = 32, 256                         # of BYTES: a sequence, a step
# parameters of BYTES' model: embedding, positions, two blocks, the last layer norm
PARAMETERS = 256 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
FLOPS = 6 * (PARAMETERS - 32 * 32) + 12 * 2 * 32 * T        # a token's (docs: without the table of positions)
COMPILING = 100.0                           # seconds of a micro-step that is the first of its process


class Clock:
    """A clock that stands still but for what a test says takes time, in the place of Python's."""
    now = 5000.0

    def install(self, put=setattr):
        for name in ("perf_counter", "monotonic", "time"):
            put(time, name, lambda: self.now)
        return self


def is_model(module):
    """Whether it is a whole model, and no part of one."""
    return type(module).__name__ in ("GPT", "SpeedrunGPT", "FrontierGPT")


def takes_time(clock, training, evaluation=0.0):
    """From now on the n-th forward that is trained takes training(n) seconds by the clock, and any other
    `evaluation`. Returns what ends that."""
    seen = []

    def hook(module, inputs, output):
        if not is_model(module):
            return
        if torch.is_grad_enabled():
            clock.now += training(len(seen))
            seen.append(module)
        else:
            clock.now += evaluation
    return register_module_forward_hook(hook)


def replace_everywhere(put, name, value):
    """Puts `value` in the place of the function `name`, in whichever of our modules has it."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("runtime/*.py")]
    holders = [module for module in list(sys.modules.values()) if hasattr(module, name)
               and Path(getattr(module, "__file__", None) or "") in files]
    assert holders, f"nothing is called {name}"
    for module in holders:
        put(module, name, value)


def printed(*flags, **how):
    """What a run in this process prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        train(*flags, **how)
    return shown.getvalue()


def table(out):
    """The rows of OUT/metrics.csv, numbers where there are any."""
    with open(out / "metrics.csv", newline="") as file:
        return [{name: float(cell) if cell else None for name, cell in row.items()}
                for row in csv.DictReader(file)]


def step_lines(text):
    """{step: the fields of its line}."""
    return {int(line[5:10]): line.split(" | ")[1:] for line in text.splitlines()
            if re.match(r"step +\d+ \| loss", line)}


# ----------------------------------------------------------------------------- time

FIRST, LAST = 32, 36                        # steps of the run before it is resumed, and in all


def seconds_of(step):
    """What each step takes: the first of a process is far longer than the others."""
    return 9.0 if step in (0, FIRST) else (2.0 if step < 14 else 0.5) + 0.25 * (step * 7 % 11)


@pytest.fixture(scope="module")
def timed(byte_data, tmp_path_factory):
    """(OUT, what its two processes printed) of a run of two micro-steps a step, whose evaluations take 100
    seconds a batch and whose saves take 1000."""
    out, texts = tmp_path_factory.mktemp("timed") / "log", []
    flags = ["--data", byte_data, *BYTES, "--batch_size", 4, "--device", "cpu", "--val_every", 8,
             "--checkpoint_every", 8, "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        clock, save = Clock().install(patch.setattr), torch.save

        def slow_save(*args, **how):
            clock.now += 1000
            save(*args, **how)
        patch.setattr(torch, "save", slow_save)
        with contextlib.suppress(ImportError):              # not on Windows
            import resource
            usage = resource.getrusage
            patch.setattr(sys, "platform", "linux")         # whose unit is kilobytes
            patch.setattr(resource, "getrusage", lambda who: type("Usage", (), {
                "ru_maxrss": 12_000_000 if who == resource.RUSAGE_SELF else usage(who).ru_maxrss}))
        for first, last in ((0, FIRST), (FIRST, LAST)):
            hook = takes_time(clock, lambda n, first=first: seconds_of(first + n // 2) / 2, 100)
            try:
                texts.append(printed(*flags, "--max_steps", last))
            finally:
                hook.remove()
    return out, texts


def test_a_steps_line_has_the_time_of_that_step_alone_and_the_time_left(timed):
    """Neither an evaluation's nor a save's. What is left goes by the median of the last twenty steps."""
    out, texts = timed
    rows = {int(row["step"]): row for row in table(out)}
    for text, first, last in zip(texts, (0, FIRST), (FIRST, LAST), strict=True):
        lines = step_lines(text)
        assert list(lines) == list(range(first, last))
        for step, (loss, lr, norm, dt, rate, left) in lines.items():
            taken = seconds_of(step)
            assert dt == f"dt: {1000 * taken:.1f}ms"
            assert rate == f"tok/sec: {256 / taken:,.0f}"
            median = statistics.median([seconds_of(s) for s in range(first, step + 1)][-20:])
            assert left == f"{datetime.timedelta(seconds=round(median * (last - 1 - step)))} left", step
            for field, name, error in ((loss, "train", 1e-4), (lr, "lr", 1e-5), (norm, "norm", 0.01)):
                assert float(field.split()[-1]) == pytest.approx(rows[step][name], abs=error)


def test_metrics_csv_counts_tokens_and_the_seconds_of_steps_over_a_resume(timed):
    rows = table(timed[0])
    assert [row["step"] for row in rows] == list(range(LAST + 1))
    for step, row in enumerate(rows):
        assert row["tokens"] == TOKENS * step
        assert row["seconds"] == pytest.approx(sum(map(seconds_of, range(step))), abs=0.02)
        if step < LAST:
            assert row["tokens_per_second"] == pytest.approx(256 / seconds_of(step), rel=1e-5)
            progress = (step - 5) / ((FIRST if step < FIRST else LAST) - 5)
            rate = (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
            assert row["lr"] == pytest.approx(6e-4 * rate, rel=1e-4), "warm-up, then cosine to a tenth"
        assert (row["val"] is not None) == (step % 8 == 0 or step == LAST)


def test_the_summary_has_the_median_step_its_tokens_a_second_and_the_peak_of_memory(timed):
    for text, first, last in zip(timed[1], (0, FIRST), (FIRST, LAST), strict=True):
        median = statistics.median(seconds_of(step) for step in range(first, last))
        line = next(line for line in text.splitlines() if line.startswith("median step"))
        ms, rate, memory = (float(number.replace(",", "")) for number in re.findall(r"[\d,.]*\d", line))
        assert ms == pytest.approx(1000 * median, abs=0.06) and rate == pytest.approx(256 / median, abs=0.6)
        assert memory == 12.3, "12,000,000 KiB are 12.288 GB"


def test_a_save_tells_its_own_time_and_its_file(timed):
    out, texts = timed
    saved = [re.findall(r"saved (\S+) in ([\d,.]+) s", text) for text in texts]
    assert saved == [[(f"{out}/checkpoint_{step:06d}.pt", "1000.0") for step in steps]
                     for steps in ((8, 16, 24, 32), (36,))]


def test_tokens_that_are_not_gpt2s_have_no_bits_per_byte(timed):
    for text in timed[1]:
        assert "validation loss" in text and "bits" not in text and "nan" not in text and "mfu" not in text


@pytest.mark.parametrize("flags, last, left", [
    (["--out", "new"], 100, "0:03:20"), (["--out", "new", "--batch_size", 1], 100, "0:06:40"),
    ([], 100, "0:02:08"), ([], LAST, "0:00:00")], ids=["new", "more micro-steps", "resumed", "at its end"])
def test_a_dry_run_tells_the_time_of_the_steps_that_are_left(flags, last, left, timed, byte_data, tmp_path,
                                                              monkeypatch):
    """By the second of two micro-steps: the first may compile."""
    monkeypatch.chdir(tmp_path)
    clock = Clock().install(monkeypatch.setattr)
    hook = takes_time(clock, lambda n: 0.5 if n % 2 else COMPILING)
    try:
        text = printed("--data", byte_data, *BYTES, "--batch_size", 2, "--out", timed[0], *flags,
                       "--max_steps", last, "--dry_run")
    finally:
        hook.remove()
    line = next(line for line in text.splitlines() if " s per step" in line)
    assert re.search(r"[\d.]+", line)[0] == ("4" if "--batch_size" in flags else "2")
    assert re.search(r"\d+:\d\d:\d\d", line)[0] == left
    B, n = (1, 8) if "--batch_size" in flags else (2, 4)
    assert f"256 tokens per step = {B} x 32 x {n} micro-steps x 1 process" in text
    assert not list(tmp_path.iterdir())


def test_the_summary_names_the_files_that_are_there(byte_data, tmp_path):
    """Without an evaluation there is no picture."""
    text = printed("--data", byte_data, *BYTES, "--max_steps", 1, "--val_every", 0, "--checkpoint_every", 0,
                   "--out", tmp_path)
    assert "metrics.csv" in text and "loss.png" not in text and "checkpoints" not in text.split("done:")[1]


def test_a_dry_run_of_a_batch_that_grows_counts_the_tokens_of_each_step(byte_data, tmp_path, monkeypatch):
    """Seven steps: four of 512 tokens, two of 1,024 and one of 2,048. 64 tokens take half a second."""
    clock = Clock().install(monkeypatch.setattr)
    hook = takes_time(clock, lambda n: 0.5 if n % 2 else COMPILING)
    try:
        text = printed("--data", byte_data, *BYTES, "--recipe", "frontier", "--total_batch_size", 2048,
                       "--batch_size", 2, "--max_steps", 7, "--out", tmp_path / "log", "--dry_run")
    finally:
        hook.remove()
    assert "about 16 s per step, 0:00:48 in all" in text
    assert "512 at first" in text and "7 steps = 6,144 tokens" in text


# ----------------------------------------------------------------------------- ranks

def slow_ranks():
    """A forward of rank 0 takes a quarter of a second, of rank 1 seven, and rank 1 has no memory for more
    than two sequences. The device's peak is 100 MFLOP/s."""
    import train_gpt2                       # noqa: F401
    rank = int(os.environ["RANK"])
    takes_time(Clock().install(), lambda n: 7.0 if rank else 0.25)
    replace_everywhere(setattr, "peak_flops", lambda device: 1e8)

    def memory(module, inputs, output):
        if is_model(module) and rank and len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    register_module_forward_hook(memory)


def test_two_ranks_one_without_memory_halve_together_and_count_all_their_tokens(byte_data, tmp_path):
    """Tokens a second are of the whole job, MFU of one device. An attention kernel that is asked for is
    tried out before the run, with as many sequences as there are."""
    text = run("--data", byte_data, *BYTES, "--batch_size", "auto", "--attention", "math", "--max_steps", 3,
               "--val_every", 0, "--checkpoint_every", 0, "--out", tmp_path, processes=2,
               before=[slow_ranks]).stdout
    assert "256 tokens per step = 2 x 32 x 2 micro-steps x 2 processes" in text
    mfu = 512 * FLOPS / 2 / 1e8
    assert 0.5 < mfu < 0.7
    lines = step_lines(text)
    assert [fields[3:6] for fields in lines.values()] == [
        ["dt: 500.0ms", "tok/sec: 512", f"mfu {mfu:.0%}"]] * 3
    assert text.count("step     1 |") == text.count("done: 3 steps") == 1, "rank 0 alone prints"
    assert [row["tokens_per_second"] for row in table(tmp_path)[:3]] == [512] * 3


# ----------------------------------------------------------------------------- the header

def test_the_header_counts_parameters_tokens_and_epochs(byte_data, tmp_path):
    """The three shards of training have 109 + 47 + 140 sequences, and their last targets."""
    text = printed("--data", byte_data, *BYTES, "--batch_size", 2, "--max_steps", 37, "--device", "cpu",
                   "--max_lr", 3e-3, "--min_lr", 2e-5, "--warmup_steps", 6, "--val_every", 21,
                   "--checkpoint_every", 11, "--out", tmp_path / "log", "--dry_run")
    assert f"{PARAMETERS:,} parameters" in text
    for said in ("gpt2: ", "2 layers", "2 heads", "width 32", "vocabulary 256", "1 process on cpu", "float32",
                 "eager", "256 tokens per step = 2 x 32 x 4 micro-steps x 1 process", "37 steps",
                 f"{37 * 256:,} tokens", f"{37 * 256 / 32 / (109 + 47 + 140):.2f} epochs",
                 "max_lr 0.003 after 6 steps", "min_lr 2e-05", "validation every 21 steps",
                 "HellaSwag never", "checkpoint every 11 steps", f"in {tmp_path}/log", torch.__version__):
        assert said in text, said


def test_a_cpus_micro_step_has_4096_tokens_unless_a_flag_says_less(byte_data, tmp_path):
    for flags, product in (([], "128 x 32 x 2 micro"), (["--batch_size", 100], "64 x 32 x 4 micro"),
                           (["--sequence_length", 16], "256 x 16 x 2 micro")):
        text = printed("--data", byte_data, *BYTES, "--batch_size", "auto", "--total_batch_size", 8192,
                       "--device", "cpu", "--out", tmp_path / "log", *flags, "--dry_run")
        assert f"8,192 tokens per step = {product}" in text


# ----------------------------------------------------------------------------- bits per byte, the best

ASCII = "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak! " * 60
CHINESE = "我们在一台计算机上训练一个小的语言模型，看看每个字要多少比特。" * 30


VAL = [9.0, 5.0, 6.0, 7.0, 8.0]             # the validation losses; steps 2 and 4 are saved


@pytest.mark.parametrize("text, other", [(ASCII, CHINESE), (CHINESE, ASCII)], ids=["ASCII", "Chinese"])
def test_bits_per_byte_are_those_of_the_texts_bytes_and_the_best_checkpoint_is_named(text, other, tmp_path):
    """A document's beginning is predicted, and has no bytes. Of the shard six sequences are validated."""
    tokens, out, trained = encode(text)[:6 * T - 1], tmp_path / "a run", []
    known = tokenizer().decode_bytes(tokens.tolist())
    assert text.encode().startswith(known) and len(tokens) == 6 * T - 1
    shard = [EOT, *tokens[:100], EOT, *tokens[100:], *encode(other)]
    np.save(tmp_path / "text_val_000000.npy", np.array(shard, dtype=np.uint16))
    np.save(tmp_path / "text_train_000001.npy", encode(text))

    def loss(module, inputs, output):
        if is_model(module) and not torch.is_grad_enabled():
            return None, output[1] * 0 + VAL[len(trained)]
        trained.extend([module] * is_model(module))
    hook = register_module_forward_hook(loss)
    try:
        shown = printed("--data", tmp_path, *BYTES, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16,
                        "--total_batch_size", 2 * T, "--max_steps", 4, "--val_tokens", 6 * T + 5,
                        "--val_every", 1, "--checkpoint_every", 2, "--out", out)
    finally:
        hook.remove()
    assert list(logged(out, "val").values()) == VAL
    bits = [loss * 6 * T / math.log(2) / len(known) for loss in VAL]
    told = re.findall(r"^step +(\d+) \| .*: ([\d.]+) \(([\d.]+) ", shown, re.M)
    assert told == [(str(step), f"{VAL[step]:.4f}", f"{bits[step]:.4f}") for step in range(5)]
    line = next(line for line in shown.splitlines() if line.startswith("best"))
    assert f"{out}/checkpoint_000002.pt" in line
    assert re.findall(r"\d+\.\d+", line.split(".pt")[1]) == ["6.0000", f"{bits[2]:.4f}", "9.0000"]
    assert shlex.split(shown.splitlines()[-1])[-1] == f"{out}/best"


# ----------------------------------------------------------------------------- the sanity run

@pytest.mark.parametrize("loss, code", [(0.11, 1), (0.09, 0)])
def test_the_sanity_run_passes_below_a_tenth(loss, code):
    hook = register_module_forward_hook(lambda module, inputs, output: (
        (None, output[1] * 0 + loss) if is_model(module) else None))
    try:
        text = printed("--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 2,
                       "--dtype", "float32", code=code)
    finally:
        hook.remove()
    assert f"{loss}00 -> {loss}00 in 2 steps" in text and ("PASSED" in text) == (code == 0)
