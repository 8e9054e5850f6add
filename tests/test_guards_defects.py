"""Defects that were found before issue 38's rewrite, and shall not come back."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from helpers import logged, refused, run, striking, train
from runtime.files import checkpoints
from test_guards import QUIET, TINY, shards       # noqa: F401, a fixture


@pytest.mark.parametrize("bad, steps", [("gradient", range(2, 200)), ("loss", range(1))])
def test_float16_without_one_finite_gradient_or_loss_ends_in_one_line(bad, steps, shards, tmp_path):
    """The scaler alone would skip every step to the end; a loss that is not finite is not its business."""
    def nan(module, inputs, output):
        if type(module).__name__ == "GPT" and bad == "loss":
            return output[0], output[1] * torch.nan
        if type(module).__name__ == "GPT" and output[1].requires_grad:
            output[1].register_hook(lambda gradient: gradient * torch.nan)
    hook = register_module_forward_hook(nan)
    try:
        refused(lambda: train("--data", shards, *TINY, *QUIET, "--dtype", "float16", "--max_steps", 400,
                              "--out", tmp_path / "log"), "finite", failed=True)
    finally:
        hook.remove()
    assert len(logged(tmp_path / "log")) in steps


def test_an_explicit_compile_that_cannot_compile_ends_in_one_line_before_it_trains(shards, tmp_path,
                                                                                   monkeypatch):
    torch.compiler.reset()                      # of graphs that earlier tests have compiled
    compile = torch.compile

    def no_compiler(graph, inputs):
        raise FileNotFoundError("no C++ compiler")
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile(model, backend=no_compiler))
    refused(lambda: train("--data", shards, *TINY, *QUIET, "--max_steps", 2, "--compile",
                          "--out", tmp_path / "log"), "--no_compile", "no C++ compiler", failed=True)
    torch.compiler.reset()
    assert not list(tmp_path.iterdir())


def test_a_signal_in_the_last_step_of_two_ranks_is_answered(shards, tmp_path):
    flags = ["--data", shards, *TINY, *QUIET, "--batch_size", 4, "--max_steps", 4, "--val_every", 4,
             "--val_tokens", 256, "--checkpoint_every", 100, "--out", tmp_path]
    assert "SIGTERM" in run(*flags, processes=2, before=striking("step 3", "SIGTERM")).stdout
    assert checkpoints(tmp_path)[-1][0] == 4 and list(logged(tmp_path, "val")) == [0]
    run(*flags, processes=2)                    # goes on with what is left
    assert list(logged(tmp_path)) == [0, 1, 2, 3] and list(logged(tmp_path, "val")) == [0, 4]
