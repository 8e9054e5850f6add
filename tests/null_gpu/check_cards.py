"""The recipes on the cards that people have: what their first two steps say there, or why there are none."""
import re

import pytest
from standin import ROOT, SMALL

TINY = [*SMALL, "--n_layer", 1, "--batch_size", 4, "--total_batch_size", 4096, "--max_steps", 2,
        *(word for name in ("val", "hellaswag", "sample", "checkpoint") for word in (f"--{name}_every", 0))]
# what --dtype auto takes, and the peak by which the header predicts a step's time; None: torch has no code
CARDS = {
    "H100": ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
    "H200": ("NVIDIA H200", "bfloat16", 989),
    "B200": ("NVIDIA B200", "bfloat16", 2250),
    "A100": ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
    "A100 40GB": ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", "bfloat16", 165),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", "bfloat16", 210),
    "T4": ("Tesla T4", "float16", 65),
    "V100": ("Tesla V100-SXM2-16GB", None, None),
    "V100 32GB": ("Tesla V100-SXM2-32GB", None, None),
}
# card: flags -> dtype and mode of the header, and the only warning. The older two have no bfloat16
COMPILED = [
    ("T4", [], "float16, torch.compile", None),
    ("T4", ["--dtype", "bfloat16"], "bfloat16, eager",
     "torch.compile does not work here (SkipFrame: BF16 is not supported); falling back to eager mode"),
    ("V100", [], "float16, torch.compile", None),
    ("RTX 5090", [], "bfloat16, torch.compile", None),
]


# A process for each card and recipe, forked from one: torch's import would take most of the time
SCRIPT = """
import os, sys
import nullgpu, train_gpt2
from runtime.cli import run_command
for card in {cards}:
    for recipe in ("gpt2", "speedrun", "frontier"):
        if os.fork() == 0:
            nullgpu.library.null_gpu_play(card.encode())
            run_command(lambda: train_gpt2.train([*sys.argv[1:], "--recipe", recipe, "--out", card + recipe]))
        print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def warnings_in(output):
    """Ours, Python's, and those of torch's log (W1124 07:46 ...), without one that run.py itself causes."""
    return [line for line in output.splitlines()
            if re.match(r"W\d{4} |.*warning", line, re.I) and "Synchronization debug mode" not in line]


def check_each(play, data, tmp_path):
    (tmp_path / "each.py").write_text(SCRIPT.format(cards=list(CARDS)))
    output = play(*TINY, "--data", data, "--no_plot", "--no_compile", script=tmp_path / "each.py",
                  PYTHONPATH=ROOT).output
    output = "".join(line for line in output.splitlines(True) if not line.startswith("null-gpu"))
    *runs, _ = re.split(r"(?<=exit code \d)\n", output)
    assert len(runs) == 3 * len(CARDS)
    for number, run in enumerate(runs):
        name, dtype, peak = list(CARDS.values())[number // 3]
        if dtype is None:
            assert re.fullmatch(rf"each.py: {name}, of compute capability 7.0, cannot run torch .* no kernel "
                                r"image .* \(pip install torch==.*\)\nexit code 2", run), run
            continue
        assert f"cuda:0 ({name}), {dtype}, eager" in run and run.endswith("\nexit code 0"), run
        assert f"(predicted, at 40% of the data sheet's {peak:,} TFLOP/s)" in run, run
        assert "\ndone: 2 steps" in run and not warnings_in(run), run


def check_a_small_card_trains_with_what_auto_finds(play):
    """On 5 GB a tenth is less than CUDA's context takes."""
    report = play("--n_layer", 4, "--n_embd", 1280, "--n_head", 20, "--no_compile", "--val_every", 0,
                  "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0, "--max_steps", 2,
                  "--total_batch_size", 16384, NULL_GPU_BYTES=5_000_000_000)
    assert "tokens a step = 1 x 1024 x 16" in report.output and "done: 2 steps" in report.output


@pytest.mark.parametrize("card, flags, mode, warning", COMPILED)
def check_compiled(card, flags, mode, warning, play):
    """Triton's answer for the card. The V100's with code for it, as in torch's builds for CUDA 12.6."""
    code = {"NULL_GPU_CODE": "sm_70"} if card == "V100" else {}
    report = play(*TINY, *flags, NULL_GPU_CARD=card, **code)
    assert f"({CARDS[card][0]}), {mode}" in report.output and "done: 2 steps" in report.output
    assert warnings_in(report.output) == ([f"warning: {warning}"] if warning else [])
    assert bool(report.graphs) == (warning is None)
