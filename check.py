"""What is wrong with my model? Looks for mistakes in what you have changed: model, loss, loop.

    python check.py                             a small GPT-2 of model.py, in train_gpt2.py
    python check.py --recipe frontier --n_layer 3
    python check.py --model log                 the forward of a model that you have trained
    python check.py --fast                      seconds: without processes and torch.compile

Each check prints a line with what it has measured, and where it FAILED the likely causes. They come
in the order in which one debugs: repair the first one first. The exit code is 1 if any has failed.
Flags that are not given are those of a small model, not the defaults of train_gpt2.py.

What you mean is no mistake, if the model says so:

    p.requires_grad_(False) in __init__     this parameter is frozen: no step moves it
    window = 128 of the class or the model  a token need not see more than the last 128 tokens,
                                            itself among them
"""
# A check is a function whose docstring is printed where it fails: the first line says what has to
# hold, the rest what breaks it. Before the checks comes what they share.
import copy
import dataclasses
import io
import logging
import math
import re
import tempfile
import textwrap
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train_gpt2
from config import FLAGS, MODEL, Config, resolve
from recipes import RECIPES, fresh_model, load_model
from runtime import checkpoint
from runtime.cli import MODEL_HELP, FlagParser, UserError, run_command, user_path
from runtime.console import StepLog
from runtime.dataloader import TrainLoader, read_data
from runtime.flags import add_flag
from runtime.language_model import KVCache
from runtime.output import Output
from runtime.ranks import Process
from runtime.recipe import make_batch_schedule
from runtime.shards import write_shard
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import read_checkpoint

SHAPE = dict(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256)
SEQUENCES = 24              # of a step: 2 and 3 processes can share them, and frontier's quarter
STEPS_BY_HEART = 120
ROUNDING = 1e-4             # more than float32 rounds, less than a mistake changes


class Failed(Exception):
    """What a check has measured, and should not have."""


class NotThere(Exception):
    """Why there is nothing to check."""


def expect(holds: bool, figure: str) -> str:
    """The figure, if it is as it has to be."""
    if not holds:
        raise Failed(figure)
    return figure


# ----------------------------------------------------------------------------- models and runs

class Quiet(Process):
    """A process whose runs print nothing."""

    def print0(self, *args):
        pass


class Lab:
    """Small models of a recipe, random tokens, and the runs that train_gpt2.py makes of them.

    `given`, {flag: value}, is the command line. `source` is what load_model reads, None for a small
    model. x and y, int64 (2, T), are what a forward takes.
    """

    def __init__(self, given: dict, folder: Path, source: str | None = None):
        self.folder = folder
        self.source = source
        self.loaded = None
        self.shape = dict(SHAPE)
        if source:
            self.loaded = load_model(source)
            given = given | {"recipe": self.loaded.recipe}
            for name, size in (SHAPE | {"block_size": 64}).items():
                self.shape[name] = min(size, getattr(self.loaded.config, name))
        self.given = given
        self.shape |= {name: value for name, value in given.items() if name in SHAPE}

        name = given.get("recipe", "gpt2")
        self.recipe = train_gpt2.complete(RECIPES[name])
        # AdamW's rate for so narrow a model. The rates of other recipes hold for any width.
        rates = {"max_lr": 3e-3, "warmup_steps": 0} | self.recipe.rates
        T = self.shape["block_size"]
        self.flags = rates | self.shape | given | dict(
            data=str(folder / "random"), out=str(folder / "new"), total_batch_size=SEQUENCES * T,
            max_steps=4, val_every=2, val_tokens=10 * T, hellaswag_every=0, sample_every=0,
            checkpoint_every=2, device="cpu", dtype="float32", compile=False)
        _, self.config, _ = resolve(self.flags, Quiet())

        rows = torch.from_numpy(self.write_tokens(T)[:2 * (T + 1)].astype(np.int64))
        self.x = rows.view(2, T + 1)[:, :-1]
        self.y = rows.view(2, T + 1)[:, 1:]

    def write_tokens(self, T: int) -> np.ndarray:
        """Writes random tokens as shards of two data sets, and returns them."""
        V = min(self.config.vocab_size, VOCAB_SIZE)     # ids that pad the vocabulary are no tokens
        tokens = np.random.default_rng(0).integers(V, size=200 * T).astype(np.uint16)
        for name, end in (("random", 200 * T), ("by_heart", 4 * T + 1)):
            (self.folder / name).mkdir(exist_ok=True)
            write_shard(self.folder / name / "val_000000.npy", tokens[:20 * T])
            write_shard(self.folder / name / "train_000001.npy", tokens[:end])
        return tokens

    def new_model(self) -> nn.Module:
        """A small model with the weights that a run begins with."""
        torch.manual_seed(self.config.seed)
        if self.loaded:             # its config may have fields that are no flags
            return type(self.loaded)(dataclasses.replace(self.loaded.config, **self.shape))
        return fresh_model(self.config)

    def small_model(self) -> nn.Module:
        """A small model, in train(), whose weights have noise. Each call makes the same."""
        return with_noise(self.new_model())

    def model(self) -> nn.Module:
        """The model whose forward is checked, in eval(): that of --model, or a small one."""
        if self.loaded:
            return copy.deepcopy(self.loaded).eval()
        return self.small_model().eval()

    def run(self, process: Process | None = None, B: int = 0, **flags) -> train_gpt2.Run:
        """A run, as start_run makes it: of a new model, or of the checkpoint in its --out.

        `B`: the sequences of a micro-step; 0 means all that a process has of the first step.
        """
        process = process or Quiet()
        asked, config, start = resolve(self.flags | flags, process)
        schedule = make_batch_schedule(self.recipe, config, process.world_size)
        data = read_data(config)
        start.model = (start.model or self.new_model()).train()     # as make_model has it
        state = train_gpt2.make_train_state(config, self.recipe, start.model, process)
        checkpoint.restore(start, data, schedule, state)
        if B == 0:
            B = schedule.tokens(0) // config.sequence_length // process.world_size
        Path(config.out).mkdir(exist_ok=True)
        return train_gpt2.Run(
            asked=asked, config=config, recipe=self.recipe, process=process, schedule=schedule,
            data=data, loader=TrainLoader(data.train, schedule, B, start.step, process),
            hellaswag_batches=[], state=state, output=Output(config, process, schedule),
            log=StepLog(process, schedule, flops_per_token=0))


@torch.no_grad()
def with_noise(model: nn.Module) -> nn.Module:
    """The model with noise in all weights: behind the zeros of a new one mistakes would hide."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return model


# ----------------------------------------------------------------------------- dropout

def dropout_modules(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, the name of its rate) of each dropout: nn.Dropout, and nanoGPT's `self.dropout`."""
    found = []
    for module in model.modules():
        name = "dropout"
        if isinstance(module, nn.Dropout):
            name = "p"
        rate = getattr(module, name, None)
        if isinstance(rate, float) and rate > 0:
            found.append((module, name))
    return found


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all rates of dropout at 0: many checks compare what would be random."""
    for module, name in dropout_modules(model):
        setattr(module, name, 0.0)
    return model


@torch.no_grad()
def is_random(lab: Lab, change: Callable = without_dropout) -> bool:
    """Whether the loss in train() depends on the seed, of a model that `change` has changed."""
    losses = []
    for seed in range(8):                       # a layer that is left out may be in with some
        model = change(lab.small_model())       # a new one, because a forward may change a state
        torch.manual_seed(seed)
        _, loss = model(lab.x, lab.y)
        losses.append(loss.item())
    return len(set(losses)) > 1


# ----------------------------------------------------------------------------- what is compared

def distance(a: Tensor, b: Tensor, floor: float = 1e-12) -> float:
    """How far two tensors are apart, by the largest number of the second. nan is infinitely far."""
    largest = b.abs().max() + floor
    difference = ((a - b).abs().max() / largest).item()
    if math.isnan(difference):
        return math.inf
    return difference


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """{parameter's name: its gradient} of the loss. The model's random numbers start anew."""
    torch.manual_seed(0)
    model.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    return kept_gradients(model)


def kept_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.clone()
    return found


class Gradients:
    """In the place of the optimizers: keeps the gradients with which train_step calls step()."""

    def __init__(self, model: nn.Module):
        self.model = model

    def step(self):
        self.found = kept_gradients(self.model)


def gradients_of_step(lab: Lab, process: Process | None = None, B: int = 0) -> dict[str, Tensor]:
    """{name: its gradient} in the first train_step of a run, with the loss and the norm."""
    run = lab.run(process, B, grad_clip=math.inf)
    model = without_dropout(with_noise(run.state.model))
    run.state.optimizer = Gradients(model)
    loss, norm, *_ = train_gpt2.train_step(0, run)
    run.loader.close()
    return {"the loss": loss, "the norm": norm} | run.state.optimizer.found


def expect_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Two {parameter's name: its gradient} have to be equal but for rounding."""
    if found.keys() != expected.keys():
        raise Failed(f"only one has a gradient of {min(found.keys() ^ expected.keys())}")

    # A gradient that is 0 but for rounding is compared with the others.
    floor = 1e-2 * max(tensor.abs().max().item() for tensor in expected.values())
    distances = {name: distance(found[name], expected[name], floor) for name in expected}
    worst = max(distances, key=distances.get)
    return expect(distances[worst] < ROUNDING,
                  f"gradients differ by {distances[worst]:.1g} ({worst})")


def embedding_of(model: nn.Module) -> nn.Embedding:
    """The table of the tokens, which has to be the first one that the model makes."""
    return next(module for module in model.modules() if isinstance(module, nn.Embedding))


# ----------------------------------------------------------------------------- what is printed

def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """{parameter: all its names}: one that is tied has several."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    return names


def describe(model: nn.Module) -> str:
    """The deviation of each kind of parameter of a new model, and what is tied and frozen."""
    of_kind = defaultdict(list)         # {kind: its parameters}
    groups = defaultdict(list)          # {deviation, or what else: kinds}
    for p, names in names_of(model).items():
        # transformer.h.0.mlp.c_fc.weight, of each block -> h.*.mlp.c_fc.weight
        kind = re.sub(r"\.\d+\.", ".*.", names[0]).removeprefix("transformer.")
        of_kind[kind].append(p.detach().flatten())
        if len(names) > 1:
            groups["tied"].append(" = ".join(names))
        if not p.requires_grad:
            groups["frozen"].append(names[0])

    for kind, parameters in of_kind.items():
        numbers = torch.cat(parameters)
        deviation = f"{numbers.std(correction=0).item():.2g}"
        if numbers.min() == numbers.max():
            deviation = f"all {numbers[0].item():.3g}"
        groups[deviation].append(kind)

    lines = ["deviations at the start:"]
    for group in sorted(groups):
        line = f"{group:>8}  {', '.join(groups[group])}"
        lines.append(textwrap.fill(line, 100, subsequent_indent=" " * 10))
    return "\n".join(lines)


# ----------------------------------------------------------------------------- the loss

@torch.no_grad()
def same_in_eval(lab: Lab) -> str:
    """In eval() a model has the same logits twice.

    Dropout is on: F.dropout lacks training=self.training. Or a forward changes a state.
    """
    model = lab.model()
    first, _ = model(lab.x)
    second, _ = model(lab.x)
    difference = distance(first, second)
    return expect(difference == 0, f"logits differ by {difference:.1g}")


@torch.no_grad()
def loss_of_targets(lab: Lab) -> str:
    """In eval() the loss is the mean cross-entropy of logits and targets, without those of -1.

    It is of the inputs, or shifted twice; or what only training wants (label smoothing, z-loss, a
    second head) is not under `if self.training`, and so is in the validation loss.
    """
    model = lab.model()
    logits, _ = model(lab.x)
    for targets in (lab.y, lab.y.flip(0)):          # with other targets it is another loss
        targets = targets.clone()
        targets[0, ::3] = -1
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        _, loss = model(lab.x, targets)
        figure = f"{loss:.5f}, of the logits {expected:.5f}"
        expect(distance(loss, expected) < ROUNDING, figure)
    return figure


@torch.no_grad()
def first_loss(lab: Lab) -> str:
    """A new model knows nothing: its loss is ln V.

    Higher: the initial weights of the head or the embedding are too wide, or the last norm is
    missing. Lower: the model sees its targets, or the loss is not a mean in nats.
    """
    # At the width of a real run, because the logits of a wider model are larger.
    config = FLAGS.merge({"n_layer": 2, "n_head": lab.config.n_head} | lab.given)
    torch.manual_seed(0)
    idx, targets = torch.randint(config.vocab_size, (2, 4, min(32, config.block_size)))
    _, loss = fresh_model(config).eval()(idx, targets)
    V = config.vocab_size
    figure = f"{loss:.3f}, and ln {V} is {math.log(V):.3f}"
    return expect(abs(loss.item() - math.log(V)) < 0.5, figure)


def loss_in_chunks(lab: Lab) -> str:
    """The loss in chunks, by which a CPU trains, has the gradients of the model's own loss.

    use_chunks compares the two by itself, at hidden states. It does not see what `forward` adds.
    """
    own = gradients(without_dropout(lab.small_model()), lab.x, lab.y)
    model = without_dropout(lab.small_model())
    if not model.use_chunks(chunk=7):
        raise NotThere("the loss is another one, and a CPU takes more time for it")
    return expect_same(gradients(model, lab.x, lab.y), own)


# ----------------------------------------------------------------------------- the forward

def some_places(T: int) -> list[int]:
    """The first two of T places, the last, and five between."""
    return [0, 1, *np.linspace(2, T - 1, 6).astype(int).tolist()]


@torch.no_grad()
def past_alone(lab: Lab) -> str:
    """No logit changes with a token that comes later.

    The mask of attention is missing (in a kernel, in a head) or one off; a softmax has the wrong
    axis; something, such as a mean or a norm, is taken over the whole sequence.
    """
    model = lab.model()
    idx = lab.x[:1]
    other = (idx + 1) % lab.config.vocab_size
    largest = 0.0
    for kernel in ("naive", "auto"):                # those of --attention
        model.use_attention(kernel)
        logits, _ = model(idx)                                                  # (1, T, V)
        for t in some_places(idx.size(1)):
            changed, _ = model(torch.cat((idx[:, :t + 1], other[:, t + 1:]), dim=1))
            difference = distance(changed[:, :t + 1], logits[:, :t + 1])
            largest = max(largest, difference)
    return expect(largest < ROUNDING, f"logits change by {largest:.1g}")


def all_of_the_past(lab: Lab) -> str:
    """The gradient of a logit reaches its own token and all before it (or `window` of them).

    Too few: the mask is one off in the other direction, `detach` cuts the graph, or attention sees
    less of the past than the model's `window` says. Too many: see past_alone.
    """
    model = lab.model()
    embedded = []                           # what the embedding returns, (1, T, C)
    def keep(embedding, arguments, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()

    embedding_of(model).register_forward_hook(keep)
    logits = model(lab.x[:1])[0][0]                                             # (T, V)
    T, V = logits.shape
    outputs = logits @ torch.randn(V, generator=torch.Generator().manual_seed(0))
    for t in some_places(T):
        found = torch.autograd.grad(outputs[t], embedded, retain_graph=True, allow_unused=True)
        influence = sum(grad[0].abs().sum(dim=1) for grad in found if grad is not None)     # (T,)
        first = max(0, t + 1 - getattr(model, "window", T))
        unseen = (influence[first:t + 1] == 0).sum().item()
        later = influence[t + 1:].count_nonzero().item()
        expect(unseen + later == 0, f"token {t} does not see {unseen} of those from {first} to it, "
               f"and sees {later} after it")
    return f"at {len(some_places(T))} of {T} tokens"


@torch.no_grad()
def kernels(lab: Lab) -> str:
    """Both kernels of --attention, "naive" (the formula) and "auto", have the same logits.

    Only one of two places was changed: a scale, a mask, a bias of attention.
    """
    model = lab.model()
    model.use_attention("naive")
    naive, _ = model(lab.x)
    model.use_attention("auto")
    auto, _ = model(lab.x)
    difference = distance(auto, naive)
    return expect(difference < ROUNDING, f"logits differ by {difference:.1g}")


@torch.no_grad()
def sequences_apart(lab: Lab) -> str:
    """The sequences of a batch do not see each other.

    A norm, a mean or a softmax over the batch; a `view` that mixes B with T or with the heads.
    """
    others = torch.cat((lab.x[:1], lab.x[1:].flip(1)))
    changes = []
    modes = [False, True]                   # a batch norm looks at the batch in train() alone
    if is_random(lab):
        modes = [False]                     # in train() another batch draws other numbers
    for training in modes:
        found = []
        for idx in (lab.x, others, lab.x[:1]):
            model = without_dropout(lab.model()).train(training)
            torch.manual_seed(0)
            logits, _ = model(idx)
            found.append(logits[:1])
        beside, beside_others, alone = found
        changes.append(max(distance(beside_others, beside), distance(alone, beside)))
    figure = f"logits change by {changes[0]:.1g} in eval()"
    if len(changes) > 1:
        figure += f" and {changes[1]:.1g} in train()"
    return expect(max(changes) < ROUNDING, figure)


@torch.no_grad()
def cache(lab: Lab) -> str:
    """Token by token, with the cache of keys and values, a model has the logits of a whole forward.

    Positions, a bias or a window are counted in the T new tokens, of which a cache leaves one, and
    not from past.length; or what is not causal by position is in the cache, too.
    """
    model = lab.model()
    idx = torch.cat((lab.x, lab.y[:, -3:]), dim=1)
    T = model.config.block_size             # beyond it all positions change with each token
    past = KVCache(min(T, idx.size(1)))
    whole, _ = model(idx[:, :T])                                                # (2, T, V)
    within = beyond = 0.0
    for end in range(1, idx.size(1) + 1):
        context = idx[:, max(0, end - T):end]
        if end <= T:
            logits = model.next_logits(context, past)                           # (2, V)
            within = max(within, distance(logits, whole[:, end - 1]))
        else:
            past.length = 0
            logits = model.next_logits(context, past)
            expected, _ = model(context)
            beyond = max(beyond, distance(logits, expected[:, -1]))
        past.length = context.size(1)
    return expect(max(within, beyond) < ROUNDING,
                  f"logits differ by {within:.1g} within block_size, {beyond:.1g} beyond")


# ----------------------------------------------------------------------------- training

def dropout(lab: Lab) -> str:
    """If a model has dropout, it is on in train().

    F.dropout has training=False, its result is not used, or a module of the model stays in eval().
    """
    if is_random(lab, change=lambda model: model):
        return "the loss in train() depends on the seed"
    count = len(dropout_modules(lab.small_model()))
    if count > 0:
        raise Failed(f"{count} modules have a rate above 0, and all seeds the same loss")
    return "none"


def without_gradient(model: nn.Module, names: list[str], x: Tensor, y: Tensor) -> list[str]:
    """Those of the names whose parameters get no gradient; what is tied is untied before."""
    for p, own in names_of(without_dropout(model)).items():
        for name in own[1:]:                # otherwise one use would hide the other
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(p.detach().clone()))

    found = gradients(model, x, y)
    missing = []
    for name in names:
        grad = found.get(name, torch.zeros(2))
        # A single number may have a gradient of 0 by symmetry, as a share of equal values.
        if not grad.any() and grad.numel() > 1:
            missing.append(name)
    return missing


def gradients_arrive(lab: Lab) -> str:
    """Every parameter has a gradient, but for those that requires_grad_(False) has frozen.

    `detach` or no_grad cuts the graph, or a layer is made and not used. What is tied is checked
    by each of its names.
    """
    model = lab.small_model()
    learning = [name for p, names in names_of(model).items() if p.requires_grad for name in names]
    missing = without_gradient(model, learning, lab.x, lab.y)
    # An expert may get no tokens. The router of a new model spreads them over all.
    for shift in range(8):
        if missing:
            x, y = [(ids + shift) % lab.config.vocab_size for ids in (lab.x, lab.y)]
            missing = without_gradient(lab.new_model(), missing, x, y)
    if missing:
        raise Failed(f"no gradient: {', '.join(missing)}")
    return f"{len(learning)} tensors"


def optimizers(lab: Lab) -> str:
    """Every parameter is in exactly one optimizer, and moves in a step.

    configure_optimizers leaves it out (by its name, its shape), or has it in two groups; its
    learning rate is 0; its gradient is too small for an optimizer's eps.
    """
    model = without_dropout(lab.small_model())
    made = lab.recipe.make_optimizers(model, lab.config)
    times = Counter(p for one in made for group in one.param_groups for p in group["params"])
    before = {p: p.detach().clone() for p in model.parameters()}
    found = gradients(model, lab.x, lab.y)
    for one in made:
        one.step()

    mistakes = []
    for name, p in model.named_parameters():
        if p.requires_grad and times[p] != 1:
            mistakes.append(f"{name} is in {times[p]} optimizers")
        elif name in found and found[name].any() and torch.equal(p, before[p]):
            mistakes.append(f"{name} does not move")
    if mistakes:
        raise Failed("; ".join(mistakes))
    return f"{describe_groups(made)}; {still_rows(lab, before, model)}"


def describe_groups(optimizers: list) -> str:
    """'AdamW: 10 tensors with weight decay 0.1, 18 tensors with weight decay 0'."""
    texts = []
    for one in optimizers:
        tensors = Counter()
        for group in one.param_groups:
            tensors[group.get("weight_decay", 0)] += len(group["params"])
        parts = [f"{count} tensors with weight decay {decay:g}" for decay, count in tensors.items()]
        texts.append(f"{type(one).__name__}: {', '.join(parts)}")
    return "; ".join(texts)


def still_rows(lab: Lab, before: dict, model: nn.Module) -> str:
    """Of how many tokens in x the rows have not moved. That is no failure: it may be meant."""
    seen = lab.x.unique()
    counts = []
    for p in (embedding_of(model).weight, model.lm_head.weight):
        moved = (p != before[p]).any(dim=1)                                     # (V,)
        counts.append((~moved[seen]).sum().item())
    return (f"rows of {len(seen)} tokens that do not move: {counts[0]} in the embedding, "
            f"{counts[1]} in the head")


def by_heart(lab: Lab) -> str:
    """A batch can be learnt by heart, and what is learnt is the NEXT token.

    The loss stays: gradients do not arrive, or the learning rate is off by a factor. The loss falls
    and the tokens are wrong: its targets are not the next tokens.
    """
    # There are 4 T + 1 tokens: without a shuffle each step has the same 4 sequences.
    run = lab.run(data=str(lab.folder / "by_heart"), shuffle=False, val_every=0,
                  total_batch_size=4 * lab.config.block_size, max_steps=STEPS_BY_HEART)
    without_dropout(run.state.model)
    for step in range(STEPS_BY_HEART):
        train_gpt2.begin_step(step, run)
        loss, norm, *_ = train_gpt2.train_step(step, run)
    rows = run.loader.tokens_of_step(0)                                         # (4, T+1)
    run.loader.close()

    with torch.no_grad():
        logits, _ = run.state.model.eval()(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    right = (logits.argmax(dim=-1) == rows[:, 1:]).float().mean().item()
    figure = (f"after {STEPS_BY_HEART} steps the loss is {loss:.3f}, "
              f"and {right:.0%} of the next tokens are right")
    if not all(p.requires_grad for p in run.state.model.parameters()):
        return f"{figure}; with frozen weights it need not be learnt"
    return expect(loss < 1 and right > 0.9, figure)


# ----------------------------------------------------------------------------- checkpoints

def checkpoints(lab: Lab) -> str:
    """A checkpoint, written and read, is the same model.

    A buffer that training changes has persistent=False, or is no buffer but an attribute; what is
    computed from the config in __init__ is computed elsewhere, too.
    """
    run = lab.run(out=str(lab.folder / "one_step"))
    model = with_noise(run.state.model)
    train_gpt2.train_step(0, run)
    run.loader.close()
    train_gpt2.save(1, run)

    model.eval()
    read = load_model(lab.folder / "one_step")
    with torch.no_grad():
        difference = distance(read(lab.x)[0], model(lab.x)[0])
    return expect(difference == 0, f"logits differ by {difference:.1g}")


def resume(lab: Lab) -> str:
    """A run of 4 steps is one that is stopped in its third step, and resumes: bit for bit.

    What changes in training is not in the checkpoint: a buffer, an attribute, a count of steps.
    Put it into a buffer, the optimizer's state or TrainState.others.
    """
    train_on(lab.run(out=str(lab.folder / "whole")))
    train_on(lab.run(out=str(lab.folder / "stopped")), stop_in=2)
    train_on(lab.run(out=str(lab.folder / "stopped")), first_step=2)

    # Of step 4, unless the run ends by itself before.
    expected, found = [tensors(max((lab.folder / out).glob("checkpoint_*.pt")))
                       for out in ("whole", "stopped")]
    if found.keys() != expected.keys():
        raise Failed(f"only one has {min(found.keys() ^ expected.keys())}")
    others = [name for name in expected if not torch.equal(found[name], expected[name])]
    if others:
        raise Failed(f"{len(others)} of {len(expected)} tensors differ, the first: {others[0]}")
    return f"{len(expected)} tensors"


def train_on(run: train_gpt2.Run, first_step: int = 0, stop_in: int = -1) -> None:
    """The run to its end, or until a signal comes in step `stop_in`."""
    own_before_step = run.recipe.before_step

    def before_step(model, step, loader):
        own_before_step(model, step, loader)
        if step == stop_in:
            run.process.signal = "SIGTERM"          # as Process.on_signal notes it

    run.recipe = dataclasses.replace(run.recipe, before_step=before_step)
    train_gpt2.train(first_step, run)
    run.loader.close()


def tensors(path: Path) -> dict[str, Tensor]:
    """{name: tensor} of a checkpoint's weights and optimizers."""
    content = read_checkpoint(path)
    result = dict(content["model"])
    for name, state in content["optimizers"].items():
        for key, value in state.items():
            parts = value if isinstance(value, list | tuple) else [value]
            for i, part in enumerate(parts):
                result[f"{key} {i} of {name}"] = torch.as_tensor(part)
    return result


@torch.no_grad()
def export(lab: Lab) -> str:
    """An export, read again, is the same model; or the line says why there is none.

    There is none of a GPT-2 with other layers: it needs a recipe and a class of its own. If it was
    not to be another model, a tie, a bias or a norm is not what it was.
    """
    model = lab.model()
    try:
        with redirect_stderr(io.StringIO()):    # it says that so small a vocabulary is not GPT-2's
            model.save_pretrained(lab.folder / "export")
    except UserError as error:
        raise NotThere(error) from None
    read = load_model(lab.folder / "export")
    difference = distance(read(lab.x)[0], model(lab.x)[0])
    return expect(difference < ROUNDING, f"logits differ by {difference:.1g}")


# ----------------------------------------------------------------------------- other ways to train

RANDOM = "the model is random, even with its rates of dropout at 0"


def micro_steps(lab: Lab) -> str:
    """A step in micro-steps of one sequence is one of all sequences at once.

    train_step does not divide by their number, or zeroes between them; the loss is not a mean over
    tokens; something is taken over the batch, or changes in each forward.
    """
    if is_random(lab):
        raise NotThere(RANDOM)
    return expect_same(gradients_of_step(lab, B=1), gradients_of_step(lab))


def recompute(lab: Lab) -> str:
    """--recompute has the same gradients.

    A block changes a state that is no buffer in its forward, which it then does twice.
    """
    found = []
    for recomputes in (True, False):
        model = lab.small_model()
        if recomputes:
            model.recompute_blocks()
        gradients(model, lab.x, lab.y)
        found.append(gradients(model, lab.x, lab.y))        # by now a state has changed
    return expect_same(*found)


def processes(lab: Lab) -> str:
    """Two and three processes are one.

    Gradients are divided by the number of ranks twice, or not at all; DDP is told only after the
    forward to average them; something is taken over the batch of a rank; a loss is a mean of means
    of unequal counts; ranks draw other random numbers.
    """
    if is_random(lab):
        raise NotThere(RANDOM)
    expected = gradients_of_step(lab)
    for count in (2, 3):
        # torchrun calls this, too. A forkserver imports torch once for all processes.
        config = LaunchConfig(1, 1, count, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                              max_restarts=0, start_method="forkserver")
        path = lab.folder / f"gradients_of_{count}.pt"
        try:
            elastic_launch(config, step_of_rank)(lab.given, lab.source, path)
        except ChildFailedError:
            raise Failed(f"{count} processes: {path.with_suffix('.error').read_text()}") from None
        figure = expect_same(torch.load(path), expected)
    return f"{figure}, of 3"


def step_of_rank(given: dict, source: str | None, path: Path) -> None:
    """What each process does: the gradients of its first step, which rank 0 writes."""
    torch.set_num_threads(1)
    process = Quiet(**vars(train_gpt2.start_process("cpu")))
    try:
        with tempfile.TemporaryDirectory() as folder:
            lab = Lab(given, Path(folder), source)
            found = gradients_of_step(lab, process, B=1)
    except Exception as error:
        # The other processes then fail by its end: the first error is the cause.
        with suppress(FileExistsError), open(path.with_suffix(".error"), "x") as file:
            file.write(error_line(error))
        raise
    if process.is_master:
        torch.save(found, path)


def compiles(lab: Lab) -> str:
    """--compile makes one graph of the model, with the same gradients.

    A branch on a tensor's value, .item() or a print divides the graph, which costs time.
    """
    if is_random(lab):
        raise NotThere(RANDOM)
    model = without_dropout(lab.small_model())
    expected = gradients(model, lab.x, lab.y)
    model = without_dropout(lab.small_model())
    model.before_compile()
    # The graphs of forward and backward run as they are: from them --compile makes C++ or Triton,
    # which would take half a minute and is no matter of the model's.
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    return expect_same(gradients(model, lab.x, lab.y), expected)


# ----------------------------------------------------------------------------- the command

FAST = [same_in_eval, loss_of_targets, first_loss, loss_in_chunks, past_alone, all_of_the_past,
        kernels, sequences_apart, cache, dropout, gradients_arrive, optimizers, by_heart,
        checkpoints, resume, export, micro_steps, recompute]
SLOW = [processes, compiles]

# Where one of these fails, those after it would fail by it, or say nothing.
FIRST = [same_in_eval, loss_of_targets, past_alone, gradients_arrive, optimizers]


def outcome(check: Callable, lab: Lab) -> str:
    """Prints the line of a check, and where it has failed its docstring: ok, none or FAILED."""
    name = f"{check.__name__:17}"
    try:
        print(f"ok      {name} {check(lab)}", flush=True)
        return "ok"
    except NotThere as reason:
        print(f"none    {name} {reason}", flush=True)
        return "none"
    except Failed as error:
        title, _, causes = check.__doc__.partition("\n\n")
        text = f"{title}\n{textwrap.dedent(causes).rstrip()}"
        print(f"FAILED  {name} {error}\n{textwrap.indent(text, '    ')}", flush=True)
    except Exception as error:              # whatever a model that is wrong may raise
        print(f"FAILED  {name} {error_line(error)}", flush=True)
    return "FAILED"


def error_line(error: Exception) -> str:
    """What an error says, and the line of this project from which it comes."""
    folder = str(Path(__file__).resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames
           if frame.filename.startswith(folder) and "site-packages" not in frame.filename]
    what = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {what} ({Path(own[-1].filename).name}:{own[-1].lineno})"


def check_all(lab: Lab, checks: list[Callable]) -> bool:
    """Whether all are ok; ends at one of FIRST that has failed."""
    outcomes = Counter()
    for check in checks:
        result = outcome(check, lab)
        outcomes[result] += 1
        if result == "FAILED" and check in FIRST:
            print("Repair this first: the checks that follow would say nothing.")
            return False
    none = ""
    if outcomes["none"]:
        none = f", {outcomes['none']} had nothing to check"
    print(f"{outcomes['ok']} of {len(checks)} checks are ok{none}")
    return outcomes["FAILED"] == 0


def parse(argv: list[str] | None) -> dict:
    """{flag: value} of the command line: its own, and those that train_gpt2.py has for a model."""
    parser = FlagParser(prog="check.py", usage="%(prog)s [flags]", description=__doc__)
    parser.add_argument("--fast", action="store_true",
                        help="Start no processes, and do not compile.")
    parser.add_argument("--model", type=user_path, help=f"{MODEL_HELP}.")
    for f in dataclasses.fields(Config):
        if f.metadata["group"] == MODEL and f.name != "init":
            add_flag(parser, f, RECIPES)
    return vars(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    checks = FAST + SLOW
    if given.pop("fast"):
        checks = FAST
    source = given.pop("model")
    if source and "recipe" in given:
        raise UserError(f"--model {source} has a recipe of its own: leave --recipe out")
    logging.disable()                       # transformers warns of so small a vocabulary
    torch.set_num_threads(1)                # more would wait for each other in so small a model

    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(given, Path(folder), source)
        model = lab.new_model()
        parameters = sum(p.numel() for p in model.parameters())
        shape = " ".join(f"--{name} {value}" for name, value in lab.shape.items())
        print(f"{lab.config.recipe}, {parameters:,} parameters: {shape}")
        print(describe(model))
        if check_all(lab, checks):
            return 0
    return 1


if __name__ == "__main__":
    run_command(main)
