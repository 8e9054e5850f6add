"""GPT-2 124M at full size on an H100: memory, and bytes moved by a step. Times are only printed."""
import re

import pytest
from standin import GiB, compiled_once

QUIET = ["--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0]


def print_memory(name, report):
    print(f"{name}: {report.allocated / GiB:.2f} GiB allocated at the peak, "
          f"{report.taken() / GiB:.2f} GiB taken of the card, "
          f"{report.bytes_of_training() / 1e9:.1f} GB read and written, "
          f"the host's share of a step {report.seconds():.3f} s")


def check_64_sequences(play):
    """build-nanogpt, measured the same way: 41.2 GiB compiled, 178 GB."""
    report = play("--batch_size", 64, "--total_batch_size", 131072, "--max_steps", 5, *QUIET)
    print_memory("64 sequences", report)
    compiled_once(report)
    assert report.allocated <= 24.5 * GiB
    assert report.bytes_of_training() <= 150e9


def check_64_sequences_in_chunks(play):
    """--loss_chunk saves memory: the logits, 6.1 GiB, are never all in memory."""
    report = play("--batch_size", 64, "--total_batch_size", 131072, "--max_steps", 3, "--loss_chunk", 8192,
                  *QUIET)
    print_memory("64 sequences, 8,192 tokens' logits at a time", report)
    assert report.allocated <= 17.7 * GiB, "with two chunks' logits it is 18.0"


def check_64_sequences_recomputed(play):
    """--recompute keeps only what each block begins with: 22.1 GiB without it."""
    report = play("--batch_size", 64, "--total_batch_size", 131072, "--max_steps", 3, "--recompute", *QUIET)
    print_memory("64 sequences, recomputed", report)
    compiled_once(report)
    assert report.allocated <= 9.6 * GiB


def check_frontier_needs_little_more_than_speedrun(play):
    """Its bigram table takes the place of the head, which is tied; the stems' table comes on top."""
    reports = [play("--recipe", recipe, "--batch_size", 64, "--total_batch_size", 131072, "--max_steps", 5,
                    "--updates_per_step", 2, *QUIET) for recipe in ("speedrun", "frontier")]
    for recipe, report in zip(("speedrun", "frontier"), reports, strict=True):
        print_memory(f"{recipe}, 64 sequences", report)
        compiled_once(report)
    assert reports[1].allocated <= 1.1 * reports[0].allocated


def check_200_sequences(play):
    """With accumulation, which adds the memory of the earlier micro-steps' gradients."""
    report = play("--batch_size", 200, "--total_batch_size", 409600, "--max_steps", 3, *QUIET)
    print_memory("200 sequences", report)
    # not even one that the allocator recovered from
    assert not any("out of memory" in step["counts"] for step in report.steps)
    assert report.taken() <= 80e9


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def check_starts_without_flags(recipe, play, data, tmp_path):
    """As a new user types it, with data in the default folder; --max_steps because 19,073 take too long. The
    modern recipes have three layers: twelve compile for minutes."""
    (tmp_path / "edu_fineweb10B").symlink_to(data)
    layers = [] if recipe == "gpt2" else ["--n_layer", 3]
    report = play("--recipe", recipe, *layers, "--max_steps", 3, bare=True)
    print_memory(f"{recipe} without flags", report)
    assert "saved log/checkpoint_000003.pt" in report.output and "sample 3" in report.output
    assert report.taken() <= 0.9 * report.card_bytes
    chosen = report.steps and int(report.output.split("tokens a step = ")[1].split(" x ")[0])
    expected = dict(report.watched)[chosen]
    if kept := re.search(r"room for ([\d.]+) GB more: GELU's outputs are kept", report.output):
        expected += 1e9 * float(kept[1])
    assert bool(kept) == (recipe == "gpt2")
    print(f"{recipe}: --batch_size auto took {chosen} and expected {expected / GiB:.2f} GiB; "
          f"all trials: {report.watched}")
    assert abs(report.taken() / expected - 1) <= 0.05
    assert not report.breaks and not report.graphs_after(1)
