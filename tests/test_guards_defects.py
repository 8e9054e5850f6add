"""Defects that the rewrite of issue 38 is to end (its part C). Before it, those of C2, C6 and C7 fail."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import dataclasses
import re

import pytest

import frontier
import train_gpt2
from helpers import ENV, logged, run
from runtime.files import checkpoints
from test_guards import QUIET, TINY, shards, site       # noqa: F401, a fixture

# acts after each forward of a GPT
EACH_FORWARD = """
import os, signal, torch
from torch.nn.modules.module import register_module_forward_hook
forwards = []

def after(module, inputs, output):
    if type(module).__name__ == "GPT":
        forwards.append(torch.is_grad_enabled())
        return act(output, forwards)

register_module_forward_hook(after)
"""


def one_line(stderr):
    lines = [line for line in stderr.splitlines() if line.startswith("train_gpt2.py: ")]
    assert len(lines) == 1 and "Traceback" not in stderr, stderr
    return lines[0]


def test_c2_float16_without_one_finite_gradient_ends_in_one_line(shards, tmp_path):
    """The loss is finite, its gradient NaN at every step: the scaler alone would skip every step to the
    end."""
    nan = "def act(output, forwards):\n    output[1].register_hook(lambda gradient: gradient * torch.nan)\n"
    result = run("--data", shards, *TINY, *QUIET, "--dtype", "float16", "--max_steps", 400, "--warmup_steps",
                 0, "--out", tmp_path / "log", code=1, env=site(tmp_path / "site", EACH_FORWARD + nan))
    assert re.search("float16|finite", one_line(result.stderr))
    assert 2 <= len(logged(tmp_path / "log")) <= 200


@pytest.mark.parametrize("ranks, tokens, expected", [
    (1, 16_384, 4), (8, 16_384, 2), (16, 16_384, 1), (32, 65_536, 2), (3, 49_152, 4), (8, 524_288, 4),
    (256, 524_288, 2)])
def test_c6_frontiers_automatic_updates_leave_each_rank_a_whole_sequence(ranks, tokens, expected):
    """One rank would make four updates of a step in each of these runs of 100 steps."""
    flags = train_gpt2.RECIPES["frontier"].defaults | {"recipe": "frontier", "total_batch_size": tokens,
                                                       "max_steps": 100, "sequence_length": 1024}
    config = dataclasses.replace(train_gpt2.Config(), **flags)
    assert frontier.automatic(config, ranks)["updates_per_step"] == expected


def test_c7_an_explicit_compile_that_cannot_compile_ends_in_one_line(shards, tmp_path):
    env = ENV | {"CXX": "/nonexistent/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
                 "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = run("--data", shards, *TINY, *QUIET, "--max_steps", 2, "--compile", "--out", tmp_path / "log",
                 env=env, code=1, cold=True)                 # Inductor asks for CXX when it is imported
    assert "compile" in one_line(result.stderr)
    log = tmp_path / "log/log.txt"
    assert not log.exists() or not logged(tmp_path / "log"), "it trained"


@pytest.mark.parametrize("processes, trained, training", [(1, 3, True), (2, 3, True), (1, 4, False)], ids=[
    "in the last step", "in the last step of two ranks", "in the evaluation after it"])
def test_c8_a_signal_at_the_end_of_a_run_is_answered(processes, trained, training, shards, tmp_path):
    out, log = tmp_path / "log", str(tmp_path / "log/log.txt")
    flags = ["--data", shards, *TINY, *QUIET, "--batch_size", 4, "--max_steps", 4, "--warmup_steps", 0,
             "--val_every", 4, "--val_tokens", 256, "--checkpoint_every", 100, "--out", out]
    kill = f"""
def act(output, forwards):
    global done
    trained = open({log!r}).read().count("train") if os.path.exists({log!r}) else 0
    if not done and forwards[-1] is {training} and trained == {trained}:
        done = True
        os.kill(os.getpid(), signal.SIGTERM)
done = os.environ.get("RANK", "0") != "0"
"""
    stopped = run(*flags, processes=processes, env=site(tmp_path / "site", EACH_FORWARD + kill))
    assert "SIGTERM" in stopped.stdout + stopped.stderr
    assert checkpoints(out)[-1][0] in (trained, 4)
    run(*flags, processes=processes)                # goes on, if there is something left
    assert checkpoints(out)[-1][0] == 4 and sorted(logged(out)) == [0, 1, 2, 3]
    assert sorted(logged(out, "val")) == [0, 4]
