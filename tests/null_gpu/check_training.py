"""The ways to train compile once, wait for nothing inside a step, save and resume.

Losses mean nothing here.
"""
import re

import pytest
from standin import SMALL, compiled_once, every, nothing_waits, rotary_tables_are_constants

STEPS = 12      # a run evaluates, samples and saves at the first and the last step only
ONE_GPU = [
    *SMALL, "--total_batch_size", 16384, "--batch_size", 16, *every(STEPS), "--max_steps", STEPS,
]


def play_whole(play, *flags):
    """A run to its end, with all that it evaluates and saves."""
    report = play(*ONE_GPU, *flags)
    assert "HellaSwag accuracy" in report.output
    assert "sample 3" in report.output
    assert "saved log/checkpoint_000012.pt" in report.output
    assert "warning" not in report.output
    assert len(report.steps) == STEPS
    return report


def assert_one_graph(report):
    compiled_once(report)
    assert len(report.graphs) == 2, "of the forward and of the backward"


# ----------------------------------------------------------------------- one GPU

@pytest.mark.parametrize("flags", [
    [],
    ["--recompute"],
    ["--batch_size", 1, "--total_batch_size", 1024],
], ids=["plain", "recomputed", "single sequences"])
def check_gpt2_compiled(flags, play):
    report = play_whole(play, "--compile", *flags)
    assert_one_graph(report)
    # The first steps pin memory for their numbers.
    nothing_waits(report, 4, STEPS)


def check_gpt2_eager(play):
    """So short a run is not compiled by itself."""
    report = play_whole(play)
    assert report.graphs == []
    nothing_waits(report, 4, STEPS)


def check_gpt2_in_float16(play):
    """GradScaler reads whether a gradient has overflowed."""
    report = play_whole(play, "--dtype", "float16")
    nothing_waits(report, 4, STEPS, but="scaler.step")


def check_speedrun_and_its_resume(play):
    flags = ["--recipe", "speedrun"]
    report = play_whole(play, *flags, "--compile")
    assert_one_graph(report)
    rotary_tables_are_constants(report)
    nothing_waits(report, 4, STEPS)

    again = play(*ONE_GPU, *flags, "--no_compile", "--max_steps", STEPS + 2)
    assert f"log/checkpoint_000012.pt at step {STEPS} of" in again.output
    assert len(again.steps) == 2


def check_frontier(play):
    """The first steps have 16 sequences, later ones 32 and 64: the micro-batch stays the same."""
    report = play_whole(play, "--recipe", "frontier", "--batch_size", 64, "--compile")
    assert_one_graph(report)
    rotary_tables_are_constants(report)
    # It pins memory again where its batch grows, at the steps 7 and 10.
    nothing_waits(report, 4, 7)
    nothing_waits(report, 9, 10)


# ----------------------------------------------------------------------- two GPUs

def play_on_two(play, micro_steps, *flags):
    """The reports of two ranks. NCCL transfers nothing here, but ranks with unequal calls hang."""
    ranks = play(*SMALL, "--batch_size", 8, "--total_batch_size", 2 * 8 * 256 * 2, *every(STEPS),
                 "--max_steps", STEPS, *flags, processes=2)
    output = ranks[0].output
    assert "2 processes (1 machine) on cuda:0" in output
    assert f"x {micro_steps} micro-steps" in output
    assert output.count("| HellaSwag accuracy: ") == 2
    assert output.count("sample 3") == 1

    for rank in ranks:
        compiled_once(rank)
        # DDP itself waits for events of the previous step: in the first ten backwards and every
        # hundredth.
        nothing_waits(rank, 6, STEPS)
        assert len(rank.steps) == STEPS
        assert len(rank.graphs) == len(ranks[0].graphs)
        for own, of_master in zip(rank.steps, ranks[0].steps, strict=True):
            assert own["collectives"] == of_master["collectives"]
    return ranks[0]


def bytes_sent(step, what):
    """In an update, without what has a few numbers only: losses, votes, overflows."""
    return sum(size for name, size in step["collectives"] if name == what and size > 64)


def check_two_gpus_send_each_gradient_once(play):
    """In the last of the two micro-steps."""
    report = play_on_two(play, 2, "--recipe", "gpt2", "--compile")
    for step in report.steps[2:]:
        assert bytes_sent(step, "all_reduce") == 4 * report.parameters()
        assert bytes_sent(step, "all_gather") == 0
        assert bytes_sent(step, "broadcast") == 0


def check_two_gpus_with_a_sharded_optimizer(play):
    """Muon gathers its updates; the embedding and the head are sent by the rank that has them."""
    report = play_on_two(play, 2, "--recipe", "speedrun", "--shard_optimizer")
    for step in report.steps[2:]:
        assert bytes_sent(step, "all_reduce") == 4 * report.parameters()
        assert bytes_sent(step, "all_gather") > 0
        assert bytes_sent(step, "broadcast") == 4 * 128 * 2 * 50304


def check_two_gpus_whose_batch_grows(play):
    """Of the 2, 4 and 8 micro-steps of a step the last one alone sends the gradients."""
    report = play_on_two(
        play, 8, "--recipe", "frontier", "--total_batch_size", 32768, "--compile")
    for step in report.steps[2:]:
        assert bytes_sent(step, "all_reduce") == 4 * report.parameters()
        assert bytes_sent(step, "all_gather") > 0
        assert bytes_sent(step, "broadcast") == 0


# ----------------------------------------------------------------------- cards

TINY = [
    *SMALL, "--n_layer", 1, "--batch_size", 4, "--total_batch_size", 4096, "--max_steps", 2,
    *every(0),
]


@pytest.mark.parametrize("card, flags, code, words", [
    ("T4", ["--compile"], 0, ["(Tesla T4), float16", "compiling the model", "done: 2 steps"]),
    ("T4", ["--compile", "--dtype", "bfloat16"], 1, ["torch.compile", "--no_compile"]),
    ("V100", [], 2, ["Tesla V100-SXM2-16GB", "no kernel image"]),
], ids=["T4", "T4 in bfloat16", "V100"])
def check_cards(card, flags, code, words, play):
    """A card without bfloat16, and one that torch's build for CUDA 13 has no code for."""
    output = play(*TINY, *flags, code=code, NULL_GPU_CARD=card).output
    for word in words:
        assert word in output
    assert "Traceback" not in output
    if code != 0:
        assert re.search(r"^train_gpt2.py: ", output, re.M)


def check_a_small_card_halves_the_micro_batch(play):
    report = play("--n_layer", 4, "--no_compile", *every(0), "--max_steps", 2,
                  "--total_batch_size", 16384, NULL_GPU_BYTES=5_000_000_000)
    assert "tokens per step = 2 x 1024 x 8 micro-steps" in report.output
    assert "done: 2 steps" in report.output
