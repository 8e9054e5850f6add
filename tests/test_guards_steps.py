"""Guards: dtypes of a step, float16's scaler, DDP's gradients, seen through torch's own hooks. Each was seen
to fail, once, with the line that it guards taken out."""
import functools
import itertools
import os

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

from helpers import run, train
from model import GPT

QUIET = ["--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--vocab_size", 256,
         "--total_batch_size", 256, "--device", "cpu", "--hellaswag_every", 0, "--sample_every", 0]


@pytest.fixture
def shards(byte_data):
    return byte_data


@pytest.fixture
def hooked():
    """hooked(hook) calls hook(module, inputs, output) after each forward of any module, as torch does."""
    handles = []
    yield lambda hook: handles.append(register_module_forward_hook(hook))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linear_layers_compute_in_the_dtype_asked_for(recipe, dtype, hooked, shards, tmp_path):
    """In the step and in the validation."""
    seen = set()

    def look(module, inputs, output):
        if isinstance(module, nn.Linear):
            seen.add((torch.is_grad_enabled(), output.dtype))
    hooked(look)
    train("--data", shards, *QUIET, "--recipe", recipe, "--dtype", dtype, "--max_steps", 1, "--val_every", 1,
          "--val_tokens", 256, "--checkpoint_every", 0, "--out", tmp_path / "log")
    assert seen == {(training, getattr(torch, dtype)) for training in (True, False)}


# ----------------------------------------------------------------------------- float16

def tensors(tree):
    return [x for x in tree_leaves(tree) if torch.is_tensor(x)]


@pytest.mark.parametrize("kind, step", [(nn.Embedding, 2), (nn.Linear, 2), (nn.Embedding, 0)])
def test_where_one_optimizers_gradient_overflows_neither_steps_and_a_resumed_run_knows(kind, step, hooked,
                                                                                       shards, tmp_path):
    """speedrun's embedding is Adam's, and its first linear layer Muon's. Before the first step there are no
    moments yet: the checkpoint's are zero."""
    paths, first = [tmp_path / f"log/checkpoint_{n:06d}.pt" for n in range(6)], []

    def overflow(gradient):             # each step but the first begins with its checkpoint
        now = (not step or paths[step].exists()) and not paths[step + 1].exists()
        return gradient * torch.inf if now else gradient

    def watch(module, inputs, output):
        if isinstance(module, kind) and torch.is_grad_enabled() and not first:
            first.append(module.weight.register_hook(overflow))
    hooked(watch)
    flags = ["--data", shards, *QUIET, "--val_every", 0, "--dtype", "float16", "--recipe", "speedrun",
             "--batch_size", 8, "--max_lr", 0.005, "--checkpoint_every", 1, "--keep_checkpoints", "all",
             "--max_steps", 5, "--out", tmp_path / "log"]
    train(*flags)
    states = [torch.load(path) for path in paths[1:]]
    assert [state["scaler"]["scale"] for state in states] == [2.0**16] * step + [2.0**15] * (5 - step)
    for n, (before, after) in enumerate(itertools.pairwise(states), 1):
        for what in ("model", "optimizers"):
            pairs = list(zip(tensors(before[what]), tensors(after[what]), strict=True))
            assert len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs) is (n == step)
    assert any(moment.any() for moment in tensors(states[0]["optimizers"])) is (step > 0)
    assert states[4]["optimizers"]["lm_head.weight"]["step"] == 4
    for path in paths[step + 2:]:
        path.unlink()
    train(*flags)
    resumed = torch.load(paths[5])
    assert resumed["scaler"] == states[4]["scaler"]
    assert all(torch.equal(value, resumed["model"][name]) for name, value in states[4]["model"].items())


# ----------------------------------------------------------------------------- DDP

def note_forwards_and_buckets(path):
    """From now on rank 0 notes each forward that is trained, and each bucket of gradients that is sent."""
    begin, forward = DDP.__init__, DDP.forward

    def note(line):
        if os.environ["RANK"] == "0":
            with open(path, "a") as file:
                file.write(f"{line}\n")

    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.register_comm_hook(None, lambda _, bucket: note(bucket.buffer().numel()) or
                                allreduce_hook(None, bucket))
    DDP.__init__ = functools.wraps(begin)(begun)
    DDP.forward = lambda *args, **kwargs: (torch.is_grad_enabled() and note("forward"),
                                           forward(*args, **kwargs))[1]


def test_gradients_are_sent_once_a_step_and_all_of_them(shards, tmp_path):
    """Two ranks, four micro-steps, three steps."""
    run("--data", shards, *QUIET, "--val_every", 0, "--dtype", "float32", "--batch_size", 1, "--max_steps", 3,
        "--out", tmp_path / "log", processes=2, before=[
            functools.partial(note_forwards_and_buckets, tmp_path / "events")])
    size = sum(p.numel() for p in GPT(GPT.Config(32, 256, 2, 2, 32)).parameters())
    sent = []           # for each run of forwards: how many, and the gradients sent after them
    for event in (tmp_path / "events").read_text().split():
        if event == "forward":
            if not sent or sent[-1][1]:
                sent.append([0, 0])
            sent[-1][0] += 1
        else:
            sent[-1][1] += int(event)
    assert sent == [[4, size]] * 3
