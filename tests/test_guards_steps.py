"""Guards, as test_guards.py: dtypes of a step, float16's scaler, DDP's gradients."""
# ruff: noqa: F811, a test's argument is a fixture that is imported

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from helpers import run
from test_guards import QUIET, TINY, checkpoint, shards, site, start, train       # noqa: F401, fixtures


@pytest.fixture
def hooked():
    """hooked(hook) calls hook(module, inputs, output) after each forward of any module, as torch does."""
    handles = []
    yield lambda hook: handles.append(register_module_forward_hook(hook))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linear_layers_compute_in_the_dtype_asked_for(recipe, dtype, hooked, shards,
                                                      tmp_path):
    """In the step and in the validation."""
    seen = []

    def look(module, inputs, output):
        if isinstance(module, nn.Linear):
            seen.append((torch.is_grad_enabled(), output.dtype))
    hooked(look)
    train("--data", shards, *TINY, *QUIET, "--recipe", recipe, "--dtype", dtype, "--max_steps", 1,
          "--val_every", 1, "--val_tokens", 256, "--out", tmp_path / "log")
    assert set(seen) == {(training, getattr(torch, dtype)) for training in (True, False)}


# -----------------------------------------------------------------------------
# float16

FLOAT16 = [*TINY, *QUIET, "--dtype", "float16", "--recipe", "speedrun", "--batch_size", 8, "--warmup_steps",
           0, "--max_lr", 0.005, "--checkpoint_every", 1, "--keep_checkpoints", 9]


@pytest.fixture
def overflow(hooked, tmp_path):
    """overflow(kind, step): at this step the gradient of the first weight of that kind of layer is
    infinite."""
    def begin(kind, step):
        first = []

        def now():              # each step begins with its checkpoint
            return (tmp_path / f"log/checkpoint_{step:06d}.pt").exists() and not (
                tmp_path / f"log/checkpoint_{step + 1:06d}.pt").exists()

        def watch(module, inputs, output):
            if isinstance(module, kind) and torch.is_grad_enabled() and not first:
                first.append(module)
                module.weight.register_hook(lambda gradient: gradient * torch.inf if now() else gradient)
        hooked(watch)
    return begin


@pytest.mark.parametrize("kind", [nn.Embedding, nn.Linear], ids=["Adam's", "Muon's"])
def test_where_one_optimizers_gradient_overflows_neither_steps(kind, overflow, shards, tmp_path):
    """speedrun's embedding is Adam's, and its first linear layer Muon's."""
    overflow(kind, 2)
    train("--data", shards, *FLOAT16, "--max_steps", 4, "--out", tmp_path / "log")
    states = [checkpoint(tmp_path / "log", step) for step in (1, 2, 3, 4)]
    scales = [state["scaler"]["scale"] for state in states]
    assert scales[:2] == [scales[0]] * 2 and scales[2:] == [scales[0] / 2] * 2
    for before, after, steps in zip(states, states[1:], (True, False, True), strict=False):
        assert before["model"].keys() == after["model"].keys()
        for name, value in before["model"].items():
            if not steps:
                assert torch.equal(value, after["model"][name]), name
        a, b = ([x for x in tree_leaves(state["optimizers"]) if torch.is_tensor(x)]
                for state in (before, after))
        assert len(a) == len(b) > 20
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) is not steps
    assert not torch.equal(states[2]["model"]["lm_head.weight"], states[3]["model"]["lm_head.weight"])


def test_a_resumed_run_has_the_scale_that_it_had(overflow, shards, tmp_path):
    """After an overflow at step 1, killed once checkpoint 3 was written."""
    overflow(nn.Embedding, 1)
    flags = ["--data", shards, *FLOAT16, "--max_steps", 5, "--out", tmp_path / "log"]
    train(*flags)
    whole = checkpoint(tmp_path / "log", 5)
    for step in (4, 5):
        (tmp_path / f"log/checkpoint_{step:06d}.pt").unlink()
    train(*flags)
    resumed = checkpoint(tmp_path / "log", 5)
    assert whole["scaler"]["scale"] == 2.0**15 and whole["scaler"]["_growth_tracker"] == 3
    for key in ("scale", "_growth_tracker"):
        assert resumed["scaler"][key] == whole["scaler"][key]
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())


def test_a_run_whose_first_step_overflows_is_saved_and_resumes(hooked, shards, tmp_path):
    """No optimizer has moments yet; the checkpoint's are zero."""
    def watch(module, inputs, output):
        begins = not list(tmp_path.glob("log/checkpoint_*"))
        if isinstance(module, nn.Embedding) and torch.is_grad_enabled() and begins:
            output.register_hook(lambda gradient: gradient * torch.inf)
    hooked(watch)
    flags = ["--data", shards, *FLOAT16, "--out", tmp_path / "log"]
    train(*flags, "--max_steps", 1)
    state = checkpoint(tmp_path / "log", 1)
    assert state["scaler"]["scale"] == 2.0**15
    assert not any(x.any() for x in tree_leaves(state["optimizers"]) if torch.is_tensor(x))
    train(*flags, "--max_steps", 2)
    assert checkpoint(tmp_path / "log", 2)["optimizers"]["lm_head.weight"]["step"] == 1


# -----------------------------------------------------------------------------
# DDP

# notes each forward that is trained, and each bucket of gradients that is sent, of rank 0
COUNTING = """
import os, torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
forward, register, hooked = DDP.forward, DDP.register_comm_hook, set()

def note(line):
    if os.environ.get("RANK") == "0":
        with open({path!r}, "a") as file:
            file.write(line + "\\n")

def counting(self, state, hook):
    def counted(state, bucket):
        note(str(bucket.buffer().numel()))
        return hook(state, bucket)
    hooked.add(self)
    register(self, state, counted)

def noted(self, *args, **kwargs):
    if self not in hooked:
        counting(self, None, allreduce_hook)
    if torch.is_grad_enabled():
        note("forward")
    return forward(self, *args, **kwargs)

DDP.register_comm_hook, DDP.forward = counting, noted
"""


def test_gradients_are_sent_once_a_step_and_all_of_them(shards, start, tmp_path):
    """Two ranks, four micro-steps, three steps."""
    events = tmp_path / "events"
    run("--data", shards, "--init", start, *TINY, *QUIET, "--batch_size", 1, "--max_steps", 3, "--out",
        tmp_path / "log", processes=2, env=site(tmp_path / "site", COUNTING.format(path=str(events))))
    size = sum(p.numel() for p in torch.load(start)["model"].values()) - 256 * 32       # the head is tied
    sent = []           # for each run of forwards: how many, and the gradients sent after them
    for event in events.read_text().split():
        if event == "forward":
            if not sent or sent[-1][1]:
                sent.append([0, 0])
            sent[-1][0] += 1
        else:
            sent[-1][1] += int(event)
    assert sent == [[4, size]] * 3
