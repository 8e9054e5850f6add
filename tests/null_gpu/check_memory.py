"""Peak memory on an H100 at the published width, bytes that a micro-step's graphs read and write,
and the micro-batch of a default run on several cards."""
import pytest
from standin import GiB, compiled_once, every


def play_five_steps(play, recipe, n_layer, batch_size, total_batch_size):
    report = play(
        "--recipe", recipe, "--n_layer", n_layer, "--batch_size", batch_size,
        "--total_batch_size", total_batch_size, "--max_steps", 5, "--compile", *every(0))
    compiled_once(report)
    print(f"{report.bytes_of_training('bytes') / 1e9:.2f} GB, "
          f"{report.bytes_of_training('outside') / 1e9:.2f} outside products and attention; "
          f"{report.allocated / GiB:.2f} GiB; {report.launches()} launches")
    return report


def check_a_micro_step_of_gpt2(play):
    """build-nanogpt, measured the same way, takes 178 GB and 41.2 GiB."""
    report = play_five_steps(play, "gpt2", 12, 64, 2 * 64 * 1024)
    assert report.bytes_of_training("bytes") <= 160e9
    assert report.bytes_of_training("outside") <= 79e9
    assert report.allocated <= 24.5 * GiB


def check_a_micro_step_of_speedrun(play):
    """Two layers compile faster than 12, which move 27.3 GB outside products and attention."""
    report = play_five_steps(play, "speedrun", 2, 16, 2 * 16 * 1024)
    assert report.bytes_of_training("bytes") <= 19.6e9
    assert report.bytes_of_training("outside") <= 10.9e9
    assert report.allocated <= 4.2 * GiB


def check_a_micro_step_of_frontier(play):
    """Its first steps have a quarter of the batch. 12 layers move 28.7 GB outside products."""
    report = play_five_steps(play, "frontier", 2, 16, 4 * 2 * 16 * 1024)
    assert report.bytes_of_training("bytes") <= 20.6e9
    assert report.bytes_of_training("outside") <= 11.4e9
    assert report.allocated <= 4.1 * GiB


@pytest.mark.parametrize("card, memory, sequences", [
    ("H100", 85_017_493_504, 64),
    ("A100", 42_405_855_232, 64),
    ("RTX 4090", 25_386_352_640, 32),
])
def check_a_default_run_compiles_only_the_micro_batch_that_it_takes(card, memory, sequences, play):
    report = play("--dry_run", NULL_GPU_CARD=card, NULL_GPU_BYTES=memory)
    micro_steps = 512 // sequences
    assert f"tokens per step = {sequences} x 1024 x {micro_steps} micro-steps" in report.output
    assert [graph["kind"] for graph in report.graphs] == ["forward", "backward"]


# ----------------------------------------------------------------------- several GPUs

# DDP divides a compiled model, to send gradients during the backward. What is stored between two
# parts must not cost more than sending in the background gains.

@pytest.mark.parametrize("recipe, n_layer", [("gpt2", 4), ("speedrun", 8), ("frontier", 8)])
def check_the_graphs_of_a_rank_move_hardly_more_than_one_graph(recipe, n_layer, play):
    """With 12 layers they are measured in docs/lab-notes.md.

    frontier begins with a quarter of the batch, which is 16 sequences for each of 8 GPUs.
    """
    flags = ["--recipe", recipe, "--n_layer", n_layer, "--batch_size", 16, "--dry_run", "--compile"]
    alone = play(*flags)
    rank = play(*flags, NULL_GPU_RANKS=8)
    ratio = rank.bytes_of_graphs() / alone.bytes_of_graphs()
    print(f"{rank.count('forward')} graphs each way, {ratio:.4f} times the bytes of one")
    assert alone.count("forward") == 1
    assert 2 < rank.count("forward") <= n_layer + 2
    assert ratio <= 1.01


def check_a_rank_with_three_blocks_of_xl(play):
    """A wide block is one graph, which stores no hidden layer for the next."""
    rank = play("--n_layer", 3, "--n_embd", 1600, "--n_head", 25, "--batch_size", 16,
                "--total_batch_size", 8 * 16 * 1024, "--max_steps", 2, "--compile", *every(0),
                NULL_GPU_RANKS=8)
    print(f"{rank.count('forward')} graphs each way, {rank.allocated / GiB:.2f} GiB")
    assert rank.count("forward") == rank.count("backward") == 3 + 2
    assert rank.allocated <= 7.3 * GiB
