"""The same numbers on any number of ranks and with any micro-batch.

Equal to a plain loop in torch: test_plain_loop.py. frontier's on several ranks: test_frontier.py.
"""
import re

import pytest
import torch
from helpers import hellaswag_file, logged, run, train

from recipes import load_model

T = 32
SMALL = [
    "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", T, "--dtype", "float32",
    "--device", "cpu",
]

# ----------------------------------------------------------------------- ranks and micro-batches

@pytest.fixture(scope="module")
def flags(byte_data):
    """Of a run with 11 sequences to validate, which no number of ranks divides."""
    return [
        "--data", byte_data, *SMALL, "--vocab_size", 256, "--total_batch_size", 8 * T,
        "--max_steps", 4, "--warmup_steps", 2, "--max_lr", 3e-3, "--val_every", 2,
        "--val_tokens", 11 * T, "--hellaswag_every", 0, "--sample_every", 0,
        "--checkpoint_every", 4,
    ]


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    """OUT of one process that computes each step at once."""
    out = tmp_path_factory.mktemp("alone")
    train(*flags, "--batch_size", 8, "--out", out)
    assert logged(out)[3] < logged(out)[0]
    return out


def assert_same_numbers(out, alone):
    for column in ("train", "norm", "lr", "val"):
        expected = logged(alone, column)
        assert logged(out, column) == pytest.approx(expected, rel=2e-5, abs=1e-5), column
    assert logged(out, "hella") == logged(alone, "hella")
    assert logged(out, "tokens") == logged(alone, "tokens")

    weights = load_model(alone).state_dict()
    for name, tensor in load_model(out).state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_micro_batch_changes_no_number(batch_size, flags, alone, tmp_path):
    train(*flags, "--batch_size", batch_size, "--out", tmp_path)
    assert_same_numbers(tmp_path, alone)


@pytest.mark.parametrize("processes, more", [
    (2, ["--batch_size", 1]),
    (4, ["--batch_size", 2]),
    (2, ["--batch_size", 4, "--shard_optimizer"]),
])
def test_the_number_of_ranks_changes_no_number(processes, more, flags, alone, tmp_path):
    run(*flags, *more, "--out", tmp_path, processes=processes)
    assert_same_numbers(tmp_path, alone)


def compile_without_a_compiler():
    """Inductor's C++ compiler takes most of a minute."""
    compile = torch.compile

    def compile_by_dynamo_alone(model, dynamic):
        return compile(model, backend="eager", dynamic=dynamic)

    torch.compile = compile_by_dynamo_alone


def test_compiled_ranks_that_sample_and_score_hellaswag_have_the_same_numbers(flags, tmp_path):
    """Of 5 examples, which two ranks cannot share evenly."""
    examples = hellaswag_file(tmp_path / "examples.jsonl", 5)
    flags = [*flags, "--vocab_size", 50304, "--max_steps", 2, "--checkpoint_every", 2,
             "--sample_every", 1, "--hellaswag_every", 2, "--hellaswag_data", examples]
    train(*flags, "--batch_size", 8, "--out", tmp_path / "alone")
    result = run(*flags, "--compile", "--batch_size", 1, "--out", tmp_path / "log",
                 processes=2, before=[compile_without_a_compiler])

    assert_same_numbers(tmp_path / "log", tmp_path / "alone")
    assert result.stdout.count("sample 3: ") == 2, "rank 0 alone prints, at the steps 1 and 2"


def test_the_sanity_run_has_the_same_batch_on_several_ranks(tmp_path):
    flags = ["--overfit", "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--dtype", "float32",
             "--device", "cpu", "--max_steps", 4]
    losses = []
    for processes in (1, 2):
        result = run(*flags, processes=processes, cwd=tmp_path, code=1)
        found = re.findall(r"loss: (\S+)", result.stdout)
        losses.append([float(loss) for loss in found])

    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert list(tmp_path.iterdir()) == []
