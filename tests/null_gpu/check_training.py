"""The ways to train compile once, wait for nothing inside a step, save and resume. Losses mean nothing."""
import re

import pytest
from standin import SMALL, compiled_once, every, nothing_waits

STEPS = 12      # evaluates, samples and saves at the first and the last only
WAYS = {
    "gpt2": [],
    "gpt2, eager": ["--no_compile"],
    "gpt2 in float16": ["--dtype", "float16", "--no_compile"],
    "gpt2, recomputed": ["--recompute", "--val_every", 0],
    "speedrun": ["--recipe", "speedrun"],
    # 16 sequences in each of the first steps, then 32 and 64: the micro-batch stays the same
    "frontier": ["--recipe", "frontier", "--batch_size", 64],
}


@pytest.mark.parametrize("way", WAYS)
def check_one_gpu(way, play):
    flags = [*SMALL, "--total_batch_size", 16384, "--batch_size", 16, *every(STEPS), *WAYS[way]]
    report = play(*flags, "--max_steps", STEPS)
    for text in ("HellaSwag accuracy", "sample 3", f"saved log/checkpoint_0000{STEPS}.pt"):
        assert text in report.output
    assert "warning" not in report.output
    assert bool(report.graphs) == ("--no_compile" not in flags)
    compiled_once(report)
    assert len(report.steps) == STEPS
    # the first steps pin memory for their numbers; and frontier's where its batch grows, at steps 7 and 10
    for first, last in [(4, 7), (9, 10)] if way == "frontier" else [(4, STEPS)]:
        nothing_waits(report, first, last, but="scaler.step" if "float16" in way else None)
    if way == "speedrun":
        again = play(*flags, "--max_steps", STEPS + 2, "--no_compile")
        assert f"log/checkpoint_0000{STEPS}.pt at step {STEPS} of" in again.output and len(again.steps) == 2


@pytest.mark.parametrize("flags", [["--recipe", "gpt2"],
                                   ["--recipe", "speedrun", "--shard_optimizer", "--no_compile"],
                                   ["--recipe", "frontier", "--total_batch_size", 32768, "--val_every", 0]])
def check_two_gpus(flags, play):
    """NCCL transfers nothing, but ranks with unequal calls hang. Of the micro-steps of a step the last one
    alone sends the gradients, each byte once: two micro-steps, but frontier has 2, 4 and 8."""
    flags = [*SMALL, "--batch_size", 8, "--total_batch_size", 2 * 8 * 256 * 2, *every(STEPS), *flags]
    micro_steps = 8 if "frontier" in flags else 2
    ranks = play(*flags, "--max_steps", STEPS, processes=2)
    master = ranks[0]
    assert "2 processes on cuda:0" in master.output and f"x {micro_steps} micro-steps" in master.output
    assert master.output.count("| HellaSwag accuracy: ") == 2 and master.output.count("sample 3") == 1
    for rank in ranks:
        compiled_once(rank)
        # DDP itself waits for events of the previous step: in the first ten backwards and every hundredth
        nothing_waits(rank, 6, STEPS)
        assert len(rank.steps) == STEPS and len(rank.graphs) == len(master.graphs)
        assert [step["collectives"] for step in rank.steps] == [step["collectives"] for step in master.steps]
    for step in master.steps[2:]:
        sent = {what: sum(n for name, n in step["collectives"] if name == what and n > 64)
                for what in ("all_reduce", "all_gather", "broadcast")}
        assert sent["all_reduce"] == 4 * master.parameters()
        assert bool(sent["all_gather"]) == ("gpt2" not in flags)        # Muon's updates
        assert sent["broadcast"] == (4 * 128 * 2 * 50304 if "--shard_optimizer" in flags else 0)


TINY = [*SMALL, "--n_layer", 1, "--batch_size", 4, "--total_batch_size", 4096, "--max_steps", 2, *every(0)]


@pytest.mark.parametrize("card, flags, code, said", [
    ("T4", [], 0, r"\(Tesla T4\), float16, torch.compile.*\ndone: 2 steps"),
    ("T4", ["--dtype", "bfloat16"], 1, r"train_gpt2.py: torch.compile .*--no_compile\n"),
    ("V100", [], 2, r"train_gpt2.py: torch .* Tesla V100-SXM2-16GB .*no kernel image .*\n")])
def check_cards(card, flags, code, said, play):
    """A card without bfloat16, and one that torch's build for CUDA 13 has no code for."""
    output = play(*TINY, *flags, code=code, NULL_GPU_CARD=card).output
    assert re.search(said, output, re.S) and "Traceback" not in output


def check_a_small_card_halves_the_micro_batch(play):
    report = play("--n_layer", 4, "--no_compile", *every(0), "--max_steps", 2, "--total_batch_size", 16384,
                  NULL_GPU_BYTES=5_000_000_000)
    assert "tokens per step = 2 x 1024 x 8 micro-steps" in report.output and "done: 2 steps" in report.output
