"""Several GPUs, a process each, by torchrun. NCCL transfers nothing, but ranks with unequal calls hang."""
import json

import pytest
from standin import ROOT, SMALL, compiled_once, nothing_waits

from runtime.console import counted

STEPS = 16


@pytest.mark.parametrize("processes, flags", [
    (2, ["--recipe", "gpt2"]), (2, ["--recipe", "speedrun", "--window", 128]),
    (2, ["--recipe", "gpt2", "--dtype", "float16"]), (2, ["--recipe", "frontier", "--updates_per_step", 2]),
    (2, ["--recipe", "gpt2", "--dtype", "float16", "--shard_optimizer", "--no_compile"]),
    (2, ["--recipe", "speedrun", "--shard_optimizer", "--no_compile"]), (8, ["--recipe", "speedrun"])])
def check_run(processes, flags, play):
    """Two micro-steps. The last of an update, and no other, sends the gradients, each byte once."""
    every = [word for name in ("val", "hellaswag", "sample", "checkpoint")
             for word in (f"--{name}_every", STEPS)]
    small = SMALL if processes == 2 else [*SMALL, "--n_layer", 1]       # eight compile long on few cores
    flags = [*small, *flags, "--batch_size", 8, "--total_batch_size", 2 * 8 * 256 * processes, *every]
    ranks = play(*flags, "--max_steps", STEPS, processes=processes)
    master = ranks[0]
    assert f"{counted(processes, 'process')} on cuda:0" in master.output
    assert "x 2 micro-steps" in master.output
    assert master.output.count("| validation loss: ") == 2 and master.output.count("sample 3") == 1
    # the reports' steps are updates, 6 x 2 and 10 x 1; with the first of two micro-steps more memory is taken
    quiet = [(8, 12), (13, 22)] if "frontier" in flags else [(6, STEPS)]
    for rank in ranks:
        compiled_once(rank)
        # DDP itself waits for events of the previous step: in the first ten backwards and every hundredth
        for first, last in quiet:
            nothing_waits(rank, first, last)
        assert len(rank.steps) == quiet[-1][1] and len(rank.graphs) == len(master.graphs)
        assert [step["collectives"] for step in rank.steps] == [step["collectives"] for step in master.steps]
    for step in master.steps[2:]:
        gradients = [number for what, number in step["collectives"] if what == "all_reduce" and number > 64]
        assert sum(gradients) == 4 * master.parameters()
    assert any(what == "all_gather" for what, _ in master.steps[-1]["collectives"]) == ("gpt2" not in flags)
    shared = sum(number for what, number in master.steps[-1]["collectives"] if what == "broadcast")
    # speedrun's, but for the matrices that Muon gathers, are embedding and head
    matrices = {"gpt2": 128 * (50304 + 256 + 2 * 12 * 128), "speedrun": 128 * 2 * 50304}
    assert shared == ("--shard_optimizer" in flags and 4 * matrices[flags[flags.index("--recipe") + 1]])
    if processes == 2 and "float16" not in flags:
        again = play(*flags, "--max_steps", STEPS + 1, processes=processes)
        assert f"at step {STEPS} of {STEPS + 1}" in again[0].output and len(again[1].steps) == 1


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def check_the_moments_of_other_ranks_take_no_memory(recipe, play):
    """Those of gpt2's blocks or its embedding, of speedrun's embedding or head. The least of two steps, since
    the second makes DDP's buckets anew, and the old ones are freed some time later."""
    flags = ["--recipe", recipe, "--n_layer", 1, "--n_embd", 512, "--n_head", 4, "--block_size", 64,
             "--no_compile", "--batch_size", 1, "--total_batch_size", 256, "--max_steps", 2, "--val_every", 0,
             "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0]
    held = [[min(step["held"] for step in rank.steps) for rank in play(*flags, *more, processes=2)]
            for more in ([], ["--shard_optimizer"])]
    table, blocks = 2 * 4 * 50304 * 512, 2 * 4 * 512 * (64 + 12 * 512)
    for before, after, less in zip(*held, (blocks if recipe == "gpt2" else table, table), strict=True):
        print(f"{before / 1e6:.0f} MB after a step, sharded {after / 1e6:.0f} MB")
        assert before - after == pytest.approx(less, rel=0.001)


def check_a_signal_to_one_rank_stops_all_at_the_same_micro_step(play, tmp_path):
    """Of four a step. A rank reads the answer to its last question but one."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, signal, sys; sys.path[:0] = [{str(ROOT / 'tests/null_gpu')!r}, {str(ROOT)!r}]\n"
        "import nullgpu                  # before torch\n"
        "from runtime.dataloader import TokenLoader\ndel sys.path[:2]\n"
        "real, calls = TokenLoader.next_batch, []\n"
        "def next_batch(loader, count):\n"
        "    calls.append(1)\n"
        "    if loader.rank == 1 and len(calls) == 4 * 5 + 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return real(loader, count)\nTokenLoader.next_batch = next_batch\n")
    ranks = play(*SMALL, "--n_layer", 1, "--batch_size", 8, "--total_batch_size", 4 * 8 * 256 * 2,
                 "--no_compile", "--max_steps", STEPS, "--val_every", 0, "--hellaswag_every", 0,
                 "--sample_every", 0, "--checkpoint_every", STEPS, processes=2, PYTHONPATH=str(tmp_path))
    assert f"stopped by a signal after 5 of {STEPS} steps" in ranks[0].output
    assert (tmp_path / "out/checkpoint_000005.pt").exists()
    assert ([step["collectives"] for step in ranks[0].steps]
            == [step["collectives"] for step in ranks[1].steps])


def check_without_flags_on_two(play, data, tmp_path):
    """--batch_size auto finds one number for both."""
    (tmp_path / "edu_fineweb10B").symlink_to(data)
    small = ["--n_layer", 2, "--n_embd", 256, "--n_head", 4]
    ranks = play(*small, "--max_steps", 3, bare=True, processes=2)
    for rank in ranks:
        expected = dict(rank.watched)[int(rank.output.split("tokens a step = ")[1].split(" x ")[0])]
        assert rank.taken() <= 0.9 * rank.card_bytes
        assert abs(rank.taken() / expected - 1) <= 0.05, (rank.taken(), expected)


def check_what_bench_measures_on_one_gpu_and_on_two(play):
    """The command that bench.py starts for each row of a table."""
    for processes in (1, 2):
        setting = dict(device="cuda", size="tiny", B=2, T=128, steps=2, processes=processes)
        reports = play("work", json.dumps(setting), script=ROOT / "bench.py", processes=processes)
        output = reports.output if processes == 1 else reports[0].output
        assert output.count('{"seconds": [') == 1, output
