"""Peak memory on an H100 at the published width, and bytes that a micro-step's graphs read and write; the
micro-batch of a default run on several cards."""
import pytest
from standin import GiB, compiled_once, every


# speedrun's and frontier's 12 layers move 27.3 and 29.9 GB outside products and attention; two compile faster
@pytest.mark.parametrize("recipe, n_layer, batch_size, GB, outside, limit", [
    ("gpt2", 12, 64, 160, 79, 24.5),            # build-nanogpt, measured the same way: 178 GB, 41.2 GiB
    ("speedrun", 2, 16, 19.6, 10.9, 4.2), ("frontier", 2, 16, 22.4, 13.7, 4.5)])
def check_a_micro_step(recipe, n_layer, batch_size, GB, outside, limit, play):
    growth = 4 if recipe == "frontier" else 1           # its first steps have a quarter of the batch
    report = play("--recipe", recipe, "--n_layer", n_layer, "--batch_size", batch_size, "--total_batch_size",
                  growth * batch_size * 2048, "--max_steps", 5, "--compile", *every(0))
    all_bytes, outside_bytes = report.bytes_of_training("bytes"), report.bytes_of_training("outside")
    print(f"{recipe}: {all_bytes / 1e9:.2f} GB, {outside_bytes / 1e9:.2f} outside; "
          f"{report.allocated / GiB:.2f} GiB; {report.launches()} launches")
    compiled_once(report)
    assert all_bytes <= GB * 1e9 and outside_bytes <= outside * 1e9
    assert report.allocated <= limit * GiB


@pytest.mark.parametrize("card, memory, sequences", [
    ("H100", 85_017_493_504, 64), ("A100", 42_405_855_232, 64), ("RTX 4090", 25_386_352_640, 32)])
def check_a_default_run_compiles_only_the_micro_batch_that_it_takes(card, memory, sequences, play):
    report = play("--dry_run", NULL_GPU_CARD=card, NULL_GPU_BYTES=memory)
    assert f" tokens per step = {sequences} x 1024 x {512 // sequences} micro-steps" in report.output
    assert [graph["kind"] for graph in report.graphs] == ["forward", "backward"]
