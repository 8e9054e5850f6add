"""One GPU: every way to train compiles once, waits for nothing, saves and resumes. Losses mean nothing."""
import pytest
from standin import ROOT, SMALL, compiled_once, nothing_waits

STEPS = 16      # evaluates, samples and saves at the first and the last only, more than ten steps apart

WAYS = {
    "gpt2": ["--recipe", "gpt2"],
    "gpt2 in fp16": ["--recipe", "gpt2", "--dtype", "float16"],
    "gpt2 in fp32": ["--recipe", "gpt2", "--dtype", "float32"],
    "gpt2, eager": ["--recipe", "gpt2", "--no_compile"],
    "gpt2 in chunks": ["--recipe", "gpt2", "--loss_chunk", 1024],
    "gpt2 in fp16 in chunks": ["--recipe", "gpt2", "--dtype", "float16", "--loss_chunk", 1024],
    **{f"gpt2, {kernel}": ["--recipe", "gpt2", "--attention", kernel]
       for kernel in ("naive", "math", "efficient", "flash", "cudnn")},
    "speedrun": ["--recipe", "speedrun"],
    "speedrun in fp16": ["--recipe", "speedrun", "--dtype", "float16"],
    "speedrun in chunks": ["--recipe", "speedrun", "--loss_chunk", 1024],
    "speedrun, window": ["--recipe", "speedrun", "--window", 128],
    "speedrun, window in fp16 in chunks": ["--recipe", "speedrun", "--window", 128, "--dtype", "float16",
                                           "--loss_chunk", 1024],
    "speedrun, window, eager": ["--recipe", "speedrun", "--window", 128, "--no_compile"],
    **{f"speedrun, window, {kernel}": ["--recipe", "speedrun", "--window", 128, "--attention", kernel]
       for kernel in ("flex", "naive", "math", "efficient")},
    "frontier": ["--recipe", "frontier"],
    "frontier, window": ["--recipe", "frontier", "--window", 128],
    "frontier in chunks": ["--recipe", "frontier", "--loss_chunk", 1024],
    "frontier, eager": ["--recipe", "frontier", "--no_compile"],
}


@pytest.mark.parametrize("way", WAYS)
def check_way(way, play, tmp_path):
    every = [word for name in ("val", "hellaswag", "sample", "checkpoint")
             for word in (f"--{name}_every", STEPS)]
    # one layer compiles in half the time
    shallow = [] if way in ("gpt2", "speedrun", "speedrun, window", "frontier") else ["--n_layer", 1]
    flags = [*SMALL, *shallow, *WAYS[way], "--total_batch_size", 16384, "--batch_size", 16, *every]
    report = play(*flags, "--max_steps", STEPS)
    for text in ("HellaSwag accuracy", "validation loss", "sample 3"):
        assert text in report.output
    assert "warning" not in report.output
    assert bool(report.graphs_after(0)) == ("eager" not in way)
    compiled_once(report, apart="chunked_cross_entropy" if "chunks" in way else None)
    # The report's steps are updates: 6 x 4, 5 x 2, 5 x 1. The first steps pin memory for their
    # numbers, as those of other recipes do; the first update of two micro-steps takes more memory, once.
    quiet = [(9, 24), (26, 34), (35, 39)] if "frontier" in way else [(4, STEPS)]
    assert len(report.steps) == quiet[-1][1]
    for first, last in quiet:
        nothing_waits(report, first, last)
    if way in ("gpt2 in fp16", "speedrun, window", "frontier"):     # resumes a scaler, two optimizers, ...
        again = play(*flags, "--max_steps", STEPS + 2, "--no_compile")
        assert f"resuming from {tmp_path / 'out'}/checkpoint_0000{STEPS}.pt at step {STEPS}" in again.output
        assert len(again.steps) == 2


def check_a_dry_run_predicts_the_time_from_the_data_sheet(play, tmp_path):
    out = play("--dry_run", "--batch_size", 64).output
    assert "124,475,904 parameters" in out and "(predicted, at 40% of the data sheet's 989 TFLOP/s)" in out
    assert "about 1.1 s a step, 6.1 hours in all" in out and "activations of a micro-batch (eager" in out
    assert not (tmp_path / "out").exists()


def check_a_model_that_was_saved(play, data, tmp_path):
    """sample.py and hellaswag.py on a run's checkpoint."""
    play(*SMALL, "--total_batch_size", 4096, "--max_steps", 1, "--val_every", 0, "--no_compile",
         "--batch_size", 16)
    model = tmp_path / "out" / "checkpoint_000001.pt"
    # 16 ids a token: fewer than nine read as a number that is none
    sampled = play("--model", model, "--num_samples", 16, script=ROOT / "sample.py")
    assert "--- sample 16 of 16" in sampled.output
    scored = play("--model", model, "--data", data / "hellaswag.jsonl", script=ROOT / "hellaswag.py")
    assert "acc_norm: " in scored.output
