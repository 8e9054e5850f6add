"""A model that somebody has changed trains, resumes, evaluates, samples and exports as ours do."""
import json
import math
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import on_ranks
from peers import TINY, make_run, tokens

import model
import recipes
import train_gpt2
from model import GPT, GPTConfig
from recipes import fresh_model, load_model
from runtime import checkpoint
from runtime.checkpoint import Start
from runtime.cli import RunError, UserError
from runtime.micro_batch import time_micro_step
from runtime.ranks import Process


@dataclass
class EditedConfig(GPTConfig):
    dropout: float = 0.1
    bias: bool = False
    flavour: str = "plain"


class Edited(GPT):
    """No biases; dropout; a head of its own; tables in a buffer, and in no buffer; a saved mask."""
    Config = EditedConfig

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm) and not config.bias:
                module.bias = None
        self.drop = nn.Dropout(config.dropout)
        self.scale = nn.Parameter(torch.ones(C))
        self.register_buffer("angles", torch.linspace(0, 1, C), persistent=False)
        self.slopes = torch.linspace(1, 2, C)
        self.transformer.h[0].attn.register_buffer("bias", torch.linspace(2, 3, C))

    def hidden(self, idx, past=None):
        x = super().hidden(idx, past)
        mask = self.transformer.h[0].attn.bias
        return self.drop(x * self.scale * self.angles.cos() * self.slopes * mask)


def edited(**settings):
    torch.manual_seed(5)
    return Edited(EditedConfig(**TINY | settings))


def checkpoint_of(run, step=3):
    """What train_gpt2.save writes, as a plain dict."""
    contents = []
    run.output.save = lambda step, content: contents.append(content)
    train_gpt2.save(step, run)
    return contents[0]


@pytest.fixture
def known(monkeypatch):
    """known(cls): from now on recipe gpt2 has this class."""
    def use(cls):
        monkeypatch.setitem(recipes.RECIPES, "gpt2", recipes.Recipe(cls))
    return use


def train_steps(run, steps):
    losses = []
    for step in steps:
        train_gpt2.begin_step(step, run)
        losses.append(train_gpt2.train_step(step, run)[:2].tolist())
    return losses


def resumed(run, content, net):
    """A new run with the model `net`, where this checkpoint ended."""
    content = dict(content, tokens=0)
    start = Start(net, path="a", checkpoint=content, step=content["step"])
    other = make_run(net)
    other.state.others = run.state.others
    content["data"] = {}
    checkpoint.restore(start, other.data, other.schedule, other.state)
    return other


# ----------------------------------------------------------------------------- checkpoints

def test_a_checkpoint_of_a_changed_model_is_read_as_it_was_written(known, tmp_path):
    known(Edited)
    net = edited(dropout=0.5, flavour="other")
    path = tmp_path / "a.pt"
    torch.save(checkpoint_of(make_run(net)), path)

    read = load_model(path)

    assert asdict(read.config) == asdict(net.config)
    idx = tokens(2, 9)
    assert torch.equal(read(idx)[0], net.eval()(idx)[0])


def test_a_field_that_an_older_checkpoint_lacks_has_its_default(known, tmp_path):
    known(Edited)
    content = checkpoint_of(make_run(edited()))
    del content["model_config"]["flavour"]
    torch.save(content, tmp_path / "a.pt")
    assert load_model(tmp_path / "a.pt").config.flavour == "plain"


def test_a_model_is_read_in_eval_mode(known, tmp_path):
    known(Edited)
    torch.save(checkpoint_of(make_run(edited(dropout=0.9))), tmp_path / "a.pt")
    assert not load_model(tmp_path / "a.pt").training


def test_what_was_frozen_stays_frozen(known, tmp_path):
    known(GPT)
    net = GPT(GPTConfig(**TINY))
    net.transformer.wpe.weight.requires_grad_(False)
    run = make_run(net)
    before = net.transformer.wpe.weight.clone()
    train_steps(run, range(2))
    torch.save(checkpoint_of(run), tmp_path / "a.pt")

    read = load_model(tmp_path / "a.pt")

    assert torch.equal(net.transformer.wpe.weight, before)
    frozen = [name for name, p in read.named_parameters() if not p.requires_grad]
    assert frozen == ["transformer.wpe.weight"]
    assert len(make_run(read).state.optimizer.optimizer_of) == len(list(read.parameters())) - 1


# ----------------------------------------------------------------------------- random numbers

def test_dropout_is_on_in_training_alone(monkeypatch):
    net = edited(dropout=0.5)
    run = make_run(net, val_every=1)
    train_steps(run, [0])
    assert net.training

    train_gpt2.evaluate(0, run)
    assert not net.training
    assert train_gpt2.validation_loss(run.data, 4, run.state, run.process) == pytest.approx(
        run.output.rows[0]["val"])


def test_a_resumed_step_has_the_masks_of_the_whole_run():
    whole = make_run(edited(dropout=0.5))
    losses = train_steps(whole, range(2))
    content = checkpoint_of(whole, 2)
    content["optimizers"] = checkpoint.on_tensors(torch.clone, content["optimizers"])
    net = edited(dropout=0.5)
    net.load_state_dict({name: p.clone() for name, p in content["model"].items()})

    expected = train_steps(whole, [2, 3])
    torch.rand(99)                                      # whatever else draws in between
    found = train_steps(resumed(whole, content, net), [2, 3])

    assert found == expected
    assert losses[0] != losses[1]


def test_ranks_have_masks_of_their_own():
    losses = set()
    for rank in range(3):
        run = make_run(edited(dropout=0.5), process=Process(rank=rank))
        losses.add(train_steps(run, [0])[0][0])
    assert len(losses) == 3


def test_recomputed_blocks_have_the_same_masks():
    def gradients(recompute):
        net = GPT(GPTConfig(**TINY))
        torch.manual_seed(7)
        net.init_weights()
        for block in net.transformer.h:
            block.mlp.gelu = nn.Sequential(block.mlp.gelu, nn.Dropout(0.5))
        run = make_run(net, recompute=recompute, grad_clip=math.inf)
        run.state.model.zero_grad = lambda **how: None
        train_steps(run, [0])
        return [p.grad for p in net.parameters()]

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(recomputed, plain)


# ----------------------------------------------------------------------------- the loss

class Smoothed(GPT):
    def loss(self, x, targets):
        logits = self.logits(x.flatten(0, 1))
        return F.cross_entropy(
            logits.float(), targets.flatten(), ignore_index=-1, label_smoothing=0.1)


class Capped(GPT):
    def logits(self, x):
        return 50 * torch.tanh(super().logits(x) / 50)


class Penalized(GPT):
    def loss(self, x, targets):
        logits = self.logits(x.flatten(0, 1))
        return super().loss(x, targets) + 1e-4 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("cls, uses_chunks", [
    (GPT, True), (Smoothed, False), (Penalized, False), (Capped, False)])
def test_a_loss_that_was_changed_acts_on_a_cpu_too(cls, uses_chunks, capsys):
    torch.manual_seed(3)
    net = cls(GPTConfig(**TINY))
    idx = tokens(2, 9)
    _, expected = net(idx[:, :-1], idx[:, 1:])

    make_run(net)

    assert (net.loss_chunk > 0) == uses_chunks
    assert ("chunks" in capsys.readouterr().out) != uses_chunks
    torch.testing.assert_close(net(idx[:, :-1], idx[:, 1:])[1], expected)


def test_an_auxiliary_loss_is_in_training_and_not_in_validation():
    class Auxiliary(GPT):
        def forward(self, idx, targets=None):
            logits, loss = super().forward(idx, targets)
            if self.training and loss is not None:
                loss = loss + 7
            return logits, loss

    plain = make_run(GPT(GPTConfig(**TINY)), val_every=1)
    changed = make_run(Auxiliary(GPTConfig(**TINY)), val_every=1)
    changed.state.model.load_state_dict(plain.state.model.state_dict())
    for run in (plain, changed):
        train_gpt2.evaluate(0, run)
    assert plain.output.rows == changed.output.rows
    assert train_steps(changed, [0])[0][0] == pytest.approx(train_steps(plain, [0])[0][0] + 7)


def test_where_targets_are_masked_a_validation_weighs_by_them(monkeypatch):
    run = make_run(GPT(GPTConfig(**TINY)))
    to_device = train_gpt2.dataloader.to_device

    def masked(rows, device):
        x, y = to_device(rows, device)
        y[y % 3 > 0] = -1
        return x, y

    monkeypatch.setattr(train_gpt2.dataloader, "to_device", masked)
    losses = [train_gpt2.validation_loss(run.data, B, run.state, run.process) for B in (1, 4, 11)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


# ----------------------------------------------------------------------------- what is counted

def test_a_parameter_that_nobody_initialises_is_named(monkeypatch):
    class WithGain(model.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.gain = nn.Parameter(torch.empty(3))

    monkeypatch.setattr(model, "MLP", WithGain)
    config = train_gpt2.Config(**TINY)
    with pytest.raises(UserError, match="mlp.gain"):
        fresh_model(config)


def test_a_new_matrix_is_drawn_as_the_others(monkeypatch):
    class Gated(model.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.c_gate = model.Linear(config.n_embd, 4 * config.n_embd, bias=False)

    monkeypatch.setattr(model, "MLP", Gated)
    net = fresh_model(train_gpt2.Config(**TINY))
    assert net.transformer.h[0].mlp.c_gate.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_positions_that_are_no_table_need_no_other_change():
    net = GPT(GPTConfig(**TINY))
    flops = net.flops_per_token(8)
    net.transformer["more"] = nn.Embedding(99, TINY["n_embd"])
    assert net.flops_per_token(8) == flops


def test_a_layer_that_got_no_gradient_ends_no_step():
    net = GPT(GPTConfig(**TINY))
    net.unused = nn.Linear(3, 3)
    [(loss, norm)] = train_steps(make_run(net), [0])
    assert math.isfinite(loss) and norm > 0


def test_the_trial_of_a_micro_batch_leaves_buffers_as_they_were():
    class Counting(GPT):
        def hidden(self, idx, past=None):
            self.count += 1
            return super().hidden(idx, past)

    net = Counting(GPTConfig(**TINY))
    net.register_buffer("count", torch.zeros(()))
    run = make_run(net)
    time_micro_step(run.state, 24, "cpu", 2)
    assert net.count == 0


# ----------------------------------------------------------------------------- state of one's own

class Ema:
    """An average of the weights, as somebody would write it."""

    def __init__(self, net):
        self.average = [p.detach().clone() for p in net.parameters()]
        self.updates = 0

    def state_dict(self):
        return {"average": self.average, "updates": self.updates}

    def load_state_dict(self, state):
        self.average, self.updates = state["average"], state["updates"]


def test_others_are_saved_and_resumed():
    net = GPT(GPTConfig(**TINY))
    run = make_run(net)
    run.state.others["ema"] = ema = Ema(net)
    ema.updates = 41
    content = checkpoint_of(run)
    ema.updates = 0
    ema.average[0].zero_()

    resumed(run, content, net)

    assert ema.updates == 41
    assert torch.equal(ema.average[0], net.transformer.wte.weight)


def test_others_that_cannot_be_saved_are_refused_at_the_start():
    net = GPT(GPTConfig(**TINY))
    run = make_run(net)
    run.state.others["odd"] = odd = Ema(net)
    odd.updates = {1, 2}
    with pytest.raises(RunError, match="odd"):
        checkpoint.restore(Start(), run.data, run.schedule, run.state)


class Counted(torch.optim.SGD):
    """It counts its steps in its group, and keeps lists in its state, as some optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                self.state[p]["last"] = [p.detach().clone(), group["k"]]


def test_what_an_optimizer_keeps_in_groups_and_lists_is_resumed():
    def with_counted(net):
        run = make_run(net)
        run.state.optimizer = train_gpt2.CombinedOptimizer(
            net, [Counted(net.parameters(), 0.1)], run.process)
        return run

    net = GPT(GPTConfig(**TINY))
    run = with_counted(net)
    train_steps(run, range(3))
    content = checkpoint_of(run)
    other = with_counted(net)
    content |= {"tokens": 0, "data": {}}
    checkpoint.restore(Start(net, "a", content, 3), other.data, other.schedule, other.state)

    optimizer = other.state.optimizer.optimizers[0]
    weight = net.transformer.wte.weight
    assert optimizer.param_groups[0]["k"] == 3
    assert torch.equal(optimizer.state[weight]["last"][0], weight)
    assert optimizer.state[weight]["last"][1] == 3


def test_an_optimizer_that_keeps_what_cannot_be_saved_is_refused_in_its_first_step():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["odd"] = {1, 2}

    net = GPT(GPTConfig(**TINY))
    run = make_run(net)
    run.state.optimizer = train_gpt2.CombinedOptimizer(
        net, [Odd(net.parameters(), 0.1)], run.process)
    with pytest.raises(RunError, match="Odd"):
        train_steps(run, [0])


def test_an_object_in_a_group_is_refused_in_the_first_step():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["odd"] = {1, 2}

    net = GPT(GPTConfig(**TINY))
    run = make_run(net)
    run.state.optimizer = train_gpt2.CombinedOptimizer(
        net, [Odd(net.parameters(), 0.1)], run.process)
    with pytest.raises(RunError, match="group"):
        train_steps(run, [0])


def print_buffer_of_rank():
    process = train_gpt2.start_process("cpu")
    net = GPT(GPTConfig(**TINY))
    net.register_buffer("mean", torch.zeros(3))
    run = make_run(net, process=process)
    run.state.ddp_model = net                   # without DDP, which exchanges gradients only
    net.mean.fill_(process.rank + 5)
    train_steps(run, [0])
    print(json.dumps(net.mean.tolist()))


def test_a_buffer_that_a_checkpoint_has_is_that_of_rank_0_on_all_ranks():
    for code, stdout, stderr in on_ranks(*[print_buffer_of_rank] * 3):
        assert code == 0, stderr
        assert json.loads(stdout.splitlines()[-1]) == [5.0] * 3


# ----------------------------------------------------------------------------- generation

class Restarting(GPT):
    """Its positions begin anew with the cache, which is a mistake."""

    def hidden(self, idx, past=None):
        if past is not None and past.length:
            past_length, past.length = past.length, past.length
            positions = self.transformer.wpe.weight
            self.transformer.wpe.weight = nn.Parameter(positions.roll(-7, 0))
            x = super().hidden(idx, past)
            self.transformer.wpe.weight = positions
            past.length = past_length
            return x
        return super().hidden(idx, past)


def whole_forwards(net, idx, count):
    """A generation of the likeliest tokens without a cache."""
    for _ in range(count):
        logits, _ = net(idx)
        idx = torch.cat((idx, logits[:, -1:].argmax(-1)), dim=1)
    return idx


@pytest.mark.parametrize("cls, is_told", [(GPT, False), (Restarting, True)])
def test_a_cache_that_computes_something_else_is_told_and_not_used(cls, is_told, capsys):
    torch.manual_seed(2)
    net = cls(GPTConfig(**TINY)).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.2)
        idx = tokens(2, 3)
        found = net.generate(idx, 15, temperature=0)
        assert torch.equal(found, whole_forwards(net, idx, 15))
    assert ("cache" in capsys.readouterr().err) == is_told


def test_a_cache_is_compared_once_and_again_for_longer_texts(monkeypatch):
    net = GPT(GPTConfig(**TINY)).eval()
    lengths = []
    next_logits = net.next_logits

    def noted(idx, past):
        lengths.append(idx.size(1))
        return next_logits(idx, past)

    net.next_logits = noted
    for _ in range(2):
        net.generate(tokens(1, 3), 5)
    assert lengths == [5, 6, 7, 8, 8] + 2 * [3, 4, 5, 6, 7]
    net.generate(tokens(1, 3), 6)
    assert len(lengths) == 15 + 5 + 6


# ----------------------------------------------------------------------------- exports

def test_a_vocabulary_that_is_not_gpt2s_gets_no_tokenizer(tmp_path, capsys):
    net = GPT(GPTConfig(**TINY))
    net.save_pretrained(tmp_path / "small")
    files = {path.name for path in (tmp_path / "small").iterdir()}
    assert files == {"config.json", "model.safetensors"}
    assert "tokenizer" in capsys.readouterr().err
    assert json.loads((tmp_path / "small/config.json").read_text())["eos_token_id"] is None
