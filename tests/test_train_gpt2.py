"""train_gpt2.py: schedules, a step, evaluations, the loop and its times, and whole small runs."""
import contextlib
import functools
import io
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, hellaswag_file, logged, run, train
from peers import make_model, tokens
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_hook

import hellaswag
import train_gpt2
from model import GPT
from recipes import MODELS, load_model
from runtime import device
from runtime.checkpoint import Start
from runtime.cli import RunError, UserError
from runtime.console import StepLog
from runtime.dataloader import Data, TokenDataset
from runtime.files import checkpoints
from runtime.metrics import read_metrics
from runtime.ranks import Process, Stopped
from runtime.recipe import BatchSchedule
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from runtime.weights import read_checkpoint
from train_gpt2 import FLAGS, Config, warmup_cosine

OFF = {"val_every": 0, "hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0}


def small_config(**flags):
    """The values of all flags, for a small model that neither evaluates nor saves."""
    values = {
        "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 96,
        "sequence_length": 24, "total_batch_size": 8 * 24, "batch_size": 2,
        "max_steps": 10, "warmup_steps": 0, "max_lr": 1e-2, "min_lr": 1e-3,
        "dtype": "float32", "compile": False,
    }
    return Config(**(values | OFF | flags))


def make_state(config, model=None, process=None):
    if model is None:
        model = make_model()
    if process is None:
        process = Process()
    return train_gpt2.make_train_state(config, model, process)


# ----------------------------------------------------------------------- schedules

@pytest.mark.parametrize("step, expected", [
    (0, 0.1), (8, 0.9), (9, 1.0),                                       # the warm-up
    (10, 1.0), (40, 0.775), (55, 0.55), (70, 0.325), (100, 0.1),        # the cosine
    (101, 0.1), (10_000, 0.1),                                          # beyond its end
])
def test_the_rate_rises_linearly_and_falls_as_a_cosine_to_min_lr(step, expected):
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(step, step / 100, config) == pytest.approx(expected)


def test_without_a_warmup_the_first_step_has_max_lr():
    config = Config(max_steps=100, warmup_steps=0, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(0, 0.0, config) == 1.0


@pytest.mark.parametrize("warmup_steps, expected", [(100, 1.0), (200, 0.5)])
def test_a_run_may_end_in_its_warmup(warmup_steps, expected):
    config = Config(max_steps=100, warmup_steps=warmup_steps, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(99, 0.99, config) == expected


@pytest.mark.parametrize("warmup_steps, expected", [(100, 1.0), (99, 0.1)])
def test_the_rate_after_a_run_that_is_all_warmup_is_known(warmup_steps, expected):
    config = Config(max_steps=100, warmup_steps=warmup_steps, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(100, 1.0, config) == pytest.approx(expected)


FLOOR = 0.1                     # the rate at the end of a run, as a share of --max_lr


def begin_speedrun():
    """The config and state of a run whose rate falls in its second half."""
    config = small_config(recipe="speedrun", cooldown=0.5, max_lr=0.02, min_lr=FLOOR * 0.02)
    return config, make_state(config, make_model(cls=MODELS["speedrun"]))


def rates_of(state):
    return [group["lr"] for group in state.optimizer.groups()]


def test_each_group_of_an_optimizer_keeps_its_share_of_the_rate():
    config, state = begin_speedrun()
    peaks = rates_of(state)
    assert len(set(peaks)) > 2

    lr = train_gpt2.set_schedules(9, config, BatchSchedule(192, 10), state)

    left = 0.2                  # of the five steps of the fall
    scale = FLOOR + (1 - FLOOR) * left
    assert lr == pytest.approx(0.02 * scale)
    assert rates_of(state) == pytest.approx([scale * peak for peak in peaks])


def test_the_rates_of_a_step_do_not_depend_on_the_steps_before():
    config, state = begin_speedrun()
    peaks = rates_of(state)

    for step in (9, 9, 3):              # a repeated step, and one back
        lr = train_gpt2.set_schedules(step, config, BatchSchedule(192, 10), state)

    assert lr == pytest.approx(0.02)
    assert rates_of(state) == pytest.approx(peaks)


@pytest.mark.parametrize("step, expected", [(0, 0.85), (77, 0.9), (154, 0.95), (999, 0.95)])
def test_muons_momentum_rises_over_the_first_154_of_1000_steps(step, expected):
    config, state = begin_speedrun()
    train_gpt2.set_schedules(step, config, BatchSchedule(192, 1000), state)
    momenta = {group["momentum"] for group in state.optimizer.groups() if "momentum" in group}
    assert list(momenta) == pytest.approx([expected])


# ----------------------------------------------------------------------- set-up

def test_auto_becomes_a_value_in_config_and_stays_auto_in_the_flags_as_asked():
    given = {"block_size": 64, "max_lr": 2e-3, "dtype": "float32"}
    flags, config = FLAGS.resolve(given, Start(), Process())

    assert config.sequence_length == 64
    assert config.min_lr == 2e-4
    assert config.batch_size == 4096 // 64
    assert flags.sequence_length == flags.min_lr == flags.batch_size == "auto"


def test_on_a_gpu_a_micro_batch_has_at_most_65536_tokens():
    given = {"dtype": "float32"}
    _, config = FLAGS.resolve(given, Start(), Process(device="cuda:0"))
    assert config.batch_size == 64


def test_a_sequence_that_is_longer_than_a_micro_batch_makes_one_alone():
    _, config = FLAGS.resolve({"block_size": 8192}, Start(), Process())
    assert config.batch_size == 1


def test_a_given_micro_batch_may_be_larger_than_the_automatic_one():
    given = {"batch_size": 100, "dtype": "float32"}
    _, config = FLAGS.resolve(given, Start(), Process())
    assert config.batch_size == 100


def test_attention_and_recompute_reach_the_model():
    plain = make_state(small_config()).model
    assert plain.kernel == "auto"
    assert plain.recompute is False

    model = make_state(small_config(attention="math", recompute=True)).model
    assert model.kernel == "math"
    assert model.recompute is True


@pytest.mark.parametrize("compile, chunk", [(False, 2048), (True, 0)])
def test_a_cpus_eager_model_computes_its_loss_in_chunks(compile, chunk):
    assert make_state(small_config(compile=compile)).model.loss_chunk == chunk


@pytest.mark.parametrize("tf32, expected", [(True, "high"), (False, "highest")])
def test_tf32_is_set_on_a_gpu_alone(tf32, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)

    train_gpt2.use_tf32(Config(tf32=tf32), Process(device="cpu"))
    assert calls == []

    train_gpt2.use_tf32(Config(tf32=tf32), Process(device="cuda:0"))
    assert calls == [expected]


def test_float16_has_a_scaler_and_other_dtypes_have_none():
    for dtype in ("float32", "bfloat16", "float16"):
        state = make_state(small_config(dtype=dtype))
        assert state.scaler.is_enabled() == (dtype == "float16")
        with state.autocast:
            y = F.linear(torch.ones(1, 4), torch.ones(4, 4))
        assert y.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("recipe", ["speedrun", "frontier"])
def test_the_rotary_tables_are_constants_of_a_compiled_model(recipe, monkeypatch):
    model, idx = make_model(cls=MODELS[recipe]), tokens(2, 9)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile = functools.partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile)
    logits, _ = train_gpt2.compile_model(model)(idx)

    [graph] = graphs
    operations = {str(node.target) for node in graph.graph.nodes}
    assert "chunk" in operations, "rotate is in the graph"
    assert not operations & {"cos", "sin"}, "rotary_tables is not"
    assert torch.equal(logits, model(idx)[0])


# ----------------------------------------------------------------------- a step

class Batches:
    """In the place of a TrainLoader: the rows (N, T + 1), divided into micro-batches."""

    def __init__(self, rows, micro_steps):
        self.parts = iter(rows.chunk(micro_steps))
        self.number = micro_steps

    def micro_steps(self, step):
        return self.number

    def next_batch(self):
        part = next(self.parts)
        return part[:, :-1], part[:, 1:]


def one_step(config, micro_steps, process=None):
    """A step on eight sequences. Returns ([loss, norm, votes], the state after it)."""
    if process is None:
        process = Process()
    state = make_state(config, process=process)
    numbers = train_gpt2.train_step(0, config, process, Batches(tokens(8, 25), micro_steps), state)
    return numbers.tolist(), state


def gradients_of_eight_sequences():
    """(loss, gradients, their norm), by one backward of all."""
    model = make_model()
    rows = tokens(8, 25)
    logits, _ = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return loss.item(), gradients, torch.nn.utils.get_total_norm(gradients).item()


@pytest.fixture
def updates(monkeypatch):
    """For each update of the weights the gradients that reach it. It changes nothing."""
    seen = []

    def remember_gradients(optimizer):
        [group] = optimizer.param_groups            # the parameters of the model, in its order
        seen.append([p.grad.clone() for p in group["params"]])

    monkeypatch.setattr(train_gpt2.CombinedOptimizer, "step", remember_gradients)
    return seen


@pytest.mark.parametrize("micro_steps", [1, 2, 4, 8])
def test_accumulation_equals_one_large_batch(micro_steps, updates):
    expected_loss, expected_gradients, expected_norm = gradients_of_eight_sequences()

    config = small_config(grad_clip=math.inf)
    (loss, norm, votes), _ = one_step(config, micro_steps)

    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert votes == 0
    [gradients] = updates
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("grad_clip, factor", [
    (math.inf, 1.0), (2.0, 1.0), (0.5, 0.5), (0.25, 0.25)])
def test_a_gradient_longer_than_grad_clip_is_scaled_down_to_it(grad_clip, factor, updates):
    """`factor`: times the gradient, if its norm were 1."""
    _, _, norm = gradients_of_eight_sequences()

    (_, reported, _), _ = one_step(small_config(grad_clip=grad_clip * norm), 2)

    [gradients] = updates
    found = torch.nn.utils.get_total_norm(gradients).item()
    assert found == pytest.approx(factor * norm, rel=1e-4)
    assert reported == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_step_is_adamws_with_its_weight_decay(weight_decay):
    before = make_model()
    _, gradients, _ = gradients_of_eight_sequences()
    config = small_config(grad_clip=math.inf, weight_decay=weight_decay)
    lr = config.max_lr

    _, state = one_step(config, 2)

    pairs = zip(before.parameters(), state.model.parameters(), gradients, strict=True)
    for p, after, gradient in pairs:
        decay = weight_decay if p.dim() >= 2 else 0.0
        update = gradient / (gradient.abs() + 1e-8)         # AdamW's first step: the sign
        expected = p * (1 - lr * decay) - lr * update
        has_gradient = gradient.abs() > 1e-5
        torch.testing.assert_close(after[has_gradient], expected[has_gradient], atol=2e-5, rtol=0)


def test_a_signal_drops_the_step_of_a_single_process():
    before = make_model()
    process = Process(received="SIGTERM")
    config = small_config()
    state = make_state(config, process=process)

    with pytest.raises(Stopped):
        train_gpt2.train_step(0, config, process, Batches(tokens(8, 25), 4), state)

    for p, after in zip(before.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(p, after)


@pytest.mark.parametrize("grad_clip", [0.3, math.inf])
def test_float16_is_scaled_for_the_backward_and_not_for_the_clipping_and_the_update(
        grad_clip, updates):
    """A gradient that is still scaled is 65,536 times as large."""
    numbers, _ = one_step(small_config(dtype="float32", grad_clip=grad_clip), 2)
    numbers_of_float16, _ = one_step(small_config(dtype="float16", grad_clip=grad_clip), 2)

    assert numbers_of_float16 == pytest.approx(numbers, rel=0.01)
    gradients, gradients_of_float16 = updates
    for gradient, of_float16 in zip(gradients, gradients_of_float16, strict=True):
        assert (of_float16 - gradient).norm() < 0.02 * gradient.norm()


def test_after_an_overflow_float16s_scale_is_halved_and_the_weights_are_the_same():
    before = make_model()
    config = small_config(dtype="float16")
    state = make_state(config)
    state.model.transformer.wte.weight.register_hook(lambda gradient: gradient * torch.inf)

    train_gpt2.train_step(0, config, Process(), Batches(tokens(8, 25), 2), state)

    assert state.scaler.get_scale() == 2**15
    for p, after in zip(before.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(p, after)


@pytest.fixture
def group():
    """A process group of this process alone: DDP and all_reduce work, and change nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddps_sync_flag_is_set_before_the_forward_of_the_last_micro_step_only(group):
    process = Process(world_size=2)
    config = small_config()
    state = make_state(config, process=process)
    flags = []

    def remember_flag(ddp, inputs):
        flags.append(ddp.require_backward_grad_sync)

    state.ddp_model.register_forward_pre_hook(remember_flag)
    for _ in range(2):
        train_gpt2.train_step(0, config, process, Batches(tokens(8, 25), 4), state)

    assert flags == [False, False, False, True] * 2


def test_with_ddp_gradients_stay_in_its_buckets_from_step_to_step(group):
    """If they were None, the first micro-steps would accumulate into other memory.

    (DDP makes its buckets anew after the first step, in the order of the backward.)
    """
    process = Process(world_size=2)
    config = small_config()
    state = make_state(config, process=process)
    places = []
    for _ in range(3):
        train_gpt2.train_step(0, config, process, Batches(tokens(8, 25), 4), state)
        places.append([p.grad.data_ptr() for p in state.model.parameters()])

    assert places[1] == places[2]
    for p in state.model.parameters():
        assert not p.grad.any()


def test_each_gradient_is_sent_once_in_a_step(group):
    process = Process(world_size=2)
    config = small_config()
    state = make_state(config, process=process)
    sent = []

    def send(_, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    state.ddp_model.register_comm_hook(None, send)
    train_gpt2.train_step(0, config, process, Batches(tokens(8, 25), 4), state)

    assert sum(sent) == sum(p.numel() for p in state.model.parameters())


@pytest.mark.parametrize("world_size, micro_steps", [(1, 4), (2, 1)])
def test_without_ddp_or_with_one_micro_step_no_gradient_is_kept(world_size, micro_steps, group):
    process = Process(world_size=world_size)
    _, state = one_step(small_config(), micro_steps, process)
    assert all(p.grad is None for p in state.model.parameters())


def test_the_ranks_add_their_losses_and_their_votes_to_stop(group, monkeypatch):
    def add_another_rank(sums):
        sums += torch.tensor([5.0, 1.0])

    monkeypatch.setattr(dist, "all_reduce", add_another_rank)
    own_loss, _, _ = gradients_of_eight_sequences()

    for received, expected_votes in (("", 1), ("SIGTERM", 2)):
        process = Process(world_size=2, received=received)
        (loss, _, votes), _ = one_step(small_config(), 2, process)
        assert loss == pytest.approx((own_loss + 5) / 2, abs=1e-5)
        assert votes == expected_votes


# ----------------------------------------------------------------------- evaluation

def validation_data(count, B=4):
    """The first `count` sequences of 24 tokens, read in batches of B."""
    text = tokens(1, 24 * 12 + 1).flatten().numpy().astype(np.uint16)
    dataset = TokenDataset([text], 24, vocab_size=96)
    return Data(dataset, dataset, count, loader=SimpleNamespace(B=B))


@torch.no_grad()
def plain_validation(model, count):
    text = tokens(1, 24 * 12 + 1).flatten()
    losses = []
    for i in range(count):
        row = text[24 * i:24 * i + 25]
        logits, _ = model(row[None, :-1])
        losses.append(F.cross_entropy(logits[0], row[1:]).item())
    return sum(losses) / count


@pytest.mark.parametrize("count, B", [(8, 4), (9, 4), (11, 4), (1, 4), (5, 5), (3, 1)])
def test_validation_is_the_mean_of_its_sequences_whatever_the_last_batch(count, B):
    state = make_state(small_config())
    found = train_gpt2.validation_loss(validation_data(count, B), Process(), state)
    assert found == pytest.approx(plain_validation(state.model, count), abs=1e-5)


class Compiled:
    """What torch.compile returns in these tests: it calls the model, and remembers how."""

    def __init__(self, model):
        self.model = model
        self.shapes = []
        self.strides = set()
        self.had_gradients = []
        self.last_loss = None
        self.is_last_loss_freed = []

    def __call__(self, x, y):
        if self.last_loss is not None:
            self.is_last_loss_freed.append(self.last_loss() is None)
        self.shapes.append(tuple(x.shape))
        self.strides |= {x.stride(), y.stride()}
        self.had_gradients.append(torch.is_grad_enabled())
        result = self.model(x, y)
        self.last_loss = weakref.ref(result[1])
        return result


@pytest.fixture
def compiled(monkeypatch):
    """The models that torch.compile has been asked for."""
    models = []

    def compile(model, dynamic):
        assert dynamic is False
        models.append(Compiled(model))
        return models[-1]

    monkeypatch.setattr(torch, "compile", compile)
    return models


def test_a_compiled_validation_has_gradients_and_frees_each_graph_before_the_next(compiled):
    """For torch.no_grad() torch would compile a second graph."""
    state = make_state(small_config(compile=True))

    train_gpt2.validation_loss(validation_data(11), Process(), state)

    [model] = compiled
    assert model.had_gradients == [True] * 3
    assert model.is_last_loss_freed == [True] * 2
    assert all(p.grad is None for p in state.model.parameters())


def test_all_batches_of_a_validation_have_one_shape(compiled):
    state = make_state(small_config(compile=True))
    train_gpt2.validation_loss(validation_data(11), Process(), state)
    assert compiled[0].shapes == [(4, 24)] * 3


def test_an_eager_validation_has_no_gradients():
    seen = []
    state = make_state(small_config())
    state.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))

    train_gpt2.validation_loss(validation_data(11), Process(), state)

    assert seen == [False] * 3


def test_hellaswags_score_is_that_of_the_mean_loss(monkeypatch):
    counts = torch.tensor([3, 7, 10])       # right by the sum, right by the mean, all
    monkeypatch.setattr(hellaswag, "evaluate", lambda *arguments: counts)
    state = make_state(small_config())
    assert train_gpt2.hellaswag_score(validation_data(1), Process(), state) == (7, 10)


def test_each_rank_scores_its_own_batches_of_hellaswag_and_the_counts_are_summed(monkeypatch):
    class OneOfTwo(Process):
        def sum(self, *values):
            return [2 * value for value in values]

    def evaluate(model, batches, *arguments):
        scored.append(list(batches))
        return torch.tensor([3, 7, 10])

    monkeypatch.setattr(hellaswag, "evaluate", evaluate)
    scored = []
    state = make_state(small_config())
    data = validation_data(1)
    data.hellaswag = ["a", "b", "c", "d", "e"]

    for rank in (0, 1):
        assert train_gpt2.hellaswag_score(data, OneOfTwo(rank, rank, 2), state) == (14, 20)

    assert scored == [["a", "c", "e"], ["b", "d"]]


@pytest.fixture(scope="module")
def speaking_model():
    return make_model(vocab_size=50304, n_layer=1, block_size=24, spread=0.05)


@pytest.mark.parametrize("prompt, kept", [
    ("To be", [2514, 307]),
    ("", [EOT]),
    (" a" * 40 + " To be", [257] * 22 + [1675, 307]),       # the context's 24 tokens
], ids=["some", "none", "too long"])
def test_samples_continue_the_prompt_with_the_seed_42(prompt, kept, speaking_model, capsys):
    config = small_config(vocab_size=50304, sample_prompt=prompt)
    state = make_state(config, speaking_model)
    random_state = torch.get_rng_state()

    for _ in range(2):
        train_gpt2.print_samples(config, Process(), state)

    generator = torch.Generator().manual_seed(42)
    rows = speaking_model.generate(
        torch.tensor([kept] * 4), max_new_tokens=32, temperature=1.0, top_k=50,
        generator=generator)
    assert not torch.equal(rows[0], rows[1])
    expected = ""
    for i, row in enumerate(rows.tolist()):
        text = tokenizer().decode(row).removeprefix("<|endoftext|>")
        expected += f"sample {i}: {text}\n"
    assert capsys.readouterr().out == 2 * expected
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.fixture
def after_each_forward():
    """after_each_forward(function): every module calls it after its forward, until the end."""
    with contextlib.ExitStack() as hooks:
        def register(function):
            hooks.callback(register_module_forward_hook(function).remove)
        yield register


def test_hellaswag_and_samples_are_computed_in_the_runs_dtype(speaking_model, after_each_forward):
    """As are steps and validations: test_flags.py."""
    config = small_config(vocab_size=50304, dtype="bfloat16")
    state = make_state(config, speaking_model)
    example = {"ctx": "one two", "endings": ["three", "four", "five", "six"], "label": 0}
    data = validation_data(4)
    data.hellaswag = hellaswag.make_batches([example], 24)
    dtypes = set()

    def remember_dtype(module, inputs, output):
        if isinstance(module, nn.Linear):
            dtypes.add(output.dtype)

    after_each_forward(remember_dtype)
    train_gpt2.hellaswag_score(data, Process(), state)
    assert dtypes == {torch.bfloat16}

    dtypes.clear()
    train_gpt2.print_samples(config, Process(), state)
    assert dtypes == {torch.bfloat16}


class Record:
    """In the place of a StepLog and of its Output: what is recorded."""

    def __init__(self):
        self.output = self
        self.evaluations = []
        self.steps = []
        self.last_pictures = []
        self.already = set()

    def evaluated(self, step):
        return self.already

    def evaluation(self, step, kind, value, text):
        self.evaluations.append((step, kind, value))

    def step(self, step, loss, norm, lr, dt):
        self.steps.append((step, loss, norm, lr, dt))

    def draw(self, title, last):
        self.last_pictures.append(last)


@pytest.fixture
def evaluations(monkeypatch):
    """The evaluations that have been made, by name. None of them takes time."""
    made = []

    def validation_loss(*arguments):
        made.append("validation")
        return 2.5

    def hellaswag_score(*arguments):
        made.append("HellaSwag")
        return 3, 4

    def print_samples(*arguments):
        made.append("samples")

    monkeypatch.setattr(train_gpt2, "validation_loss", validation_loss)
    monkeypatch.setattr(train_gpt2, "hellaswag_score", hellaswag_score)
    monkeypatch.setattr(train_gpt2, "print_samples", print_samples)
    return made


PERIODS = {"val_every": 2, "hellaswag_every": 3, "sample_every": 4}


@pytest.mark.parametrize("step, expected", [
    (0, ["validation", "HellaSwag"]),
    (1, []),
    (2, ["validation"]),
    (3, ["HellaSwag"]),
    (4, ["validation", "samples"]),
    (6, ["validation", "HellaSwag"]),
    (11, ["validation", "HellaSwag", "samples"]),
])
def test_an_evaluation_is_due_at_its_period_and_after_the_last_step(step, expected, evaluations):
    """At step 0 there are no samples: they would be of the fresh weights."""
    config = small_config(max_steps=11, **PERIODS)
    data = validation_data(1)
    data.hellaswag = ["a batch"]
    log = Record()

    train_gpt2.evaluate(step, config, Process(), data, None, log)

    assert evaluations == expected
    kinds = {"validation": (step, "val", 2.5), "HellaSwag": (step, "hella", 0.75)}
    assert log.evaluations == [kinds[what] for what in expected if what in kinds]
    last_pictures = []
    if expected:
        last_pictures = [step == 11]
    assert log.last_pictures == last_pictures


def test_a_period_of_0_is_never(evaluations):
    data = validation_data(1)
    data.hellaswag = ["a batch"]
    for step in (0, 5, 10):
        train_gpt2.evaluate(step, small_config(), Process(), data, None, Record())
    assert evaluations == []


def test_without_examples_hellaswag_is_not_due(evaluations):
    config = small_config(hellaswag_every=1)
    train_gpt2.evaluate(1, config, Process(), validation_data(1), None, Record())
    assert evaluations == []


@pytest.mark.parametrize("already, expected", [
    ({"val"}, ["HellaSwag"]),
    ({"hella"}, ["validation"]),
    ({"val", "hella"}, []),
])
def test_a_resumed_run_does_not_repeat_what_its_record_has(already, expected, evaluations):
    config = small_config(max_steps=11, **PERIODS)
    data = validation_data(1)
    data.hellaswag = ["a batch"]
    log = Record()
    log.already = already

    train_gpt2.evaluate(6, config, Process(), data, None, log)

    assert evaluations == expected


def test_a_validation_loss_that_is_not_finite_ends_the_run_unrecorded(evaluations, monkeypatch):
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *arguments: math.nan)
    log = Record()
    with pytest.raises(RunError, match="step 4 .*--max_lr"):
        train_gpt2.evaluate(
            4, small_config(val_every=2), Process(), validation_data(1), None, log)
    assert log.evaluations == []


def test_a_signal_ends_an_evaluation_and_nothing_of_it_is_recorded():
    """The mean over no batch is no validation loss."""
    config = small_config(val_every=1)
    log = Record()
    seen = []
    state = make_state(config)
    state.model.register_forward_pre_hook(lambda *_: seen.append(1))

    process = Process(received="SIGTERM")
    with pytest.raises(Stopped):
        train_gpt2.evaluate(1, config, process, validation_data(11), state, log)

    assert seen == []
    assert log.evaluations == []


# ----------------------------------------------------------------------- what is finite

@pytest.mark.parametrize("dtype, loss", [("float32", math.nan), ("float16", math.inf)])
def test_a_loss_that_is_not_finite_ends_the_run(dtype, loss):
    with pytest.raises(RunError, match="step 7 .*--max_lr"):
        train_gpt2.check_finite(7, loss, 1.0, 0, Config(dtype=dtype), Process())


@pytest.mark.parametrize("dtype, allowed", [("float32", 0), ("bfloat16", 0), ("float16", 25)])
def test_one_overflow_in_a_row_more_than_its_dtype_allows_ends_the_run(dtype, allowed):
    config = Config(dtype=dtype)
    train_gpt2.check_finite(7, 2.0, 1.0, allowed, config, Process())
    with pytest.raises(RunError, match="step 7 .*--max_lr"):
        train_gpt2.check_finite(7, 2.0, math.inf, allowed + 1, config, Process())


# ----------------------------------------------------------------------- the loop

class GpuProcess(Process):
    """A process whose loop is that of a GPU. It computes nothing in these tests."""
    on_gpu = True


class FakeTime:
    """The loop with a clock of its own: steps, evaluations and saves take the times of a test.

    A GPU does one step after the other, while the CPU goes on. The numbers of a step are on the CPU
    a quarter of a second after the GPU has computed them. The methods stand in for the functions of
    train_gpt2 and of runtime.device that have their names.
    """

    def __init__(self, monkeypatch, on_gpu, seconds, evaluation=0.0, saving=0.0):
        self.process = GpuProcess() if on_gpu else Process()
        self.seconds = seconds          # of each step
        self.evaluation = evaluation
        self.saving = saving
        self.now = 1000.0               # the CPU's time
        self.gpu_is_free = 1000.0       # when the GPU will have done all that it was given
        self.numbers = {}               # {step: [loss, norm, votes]} where they are unusual
        self.signal_in = None           # the step that a signal ends
        self.events = []
        for name in ("train_step", "evaluate", "save"):
            monkeypatch.setattr(train_gpt2, name, getattr(self, name))
        for name in ("mark_time", "copy_later"):
            monkeypatch.setattr(device, name, getattr(self, name))

    def train_step(self, step, config, process, loader, state):
        self.events.append(f"train {step}")
        if step == self.signal_in:
            raise Stopped
        self.gpu_is_free = max(self.now, self.gpu_is_free) + self.seconds[step]
        if not process.on_gpu:
            self.now = self.gpu_is_free
        return torch.tensor(self.numbers.get(step, [2.0 + step, 1.0, 0.0]))

    def mark_time(self, device_name):
        return max(self.now, self.gpu_is_free)

    def copy_later(self, tensor):
        numbers = tensor.tolist()
        arrival = self.gpu_is_free
        if self.process.on_gpu:
            arrival += 0.25

        def wait():
            self.now = max(self.now, arrival)
            return numbers
        return wait

    def evaluate(self, step, config, process, data, state, log):
        if train_gpt2.is_due(step, config, config.val_every):
            self.events.append(f"evaluate {step}")
            self.now = max(self.now, self.gpu_is_free) + self.evaluation

    def save(self, step, process, data, state, output):
        self.events.append(f"save {step}")
        self.now = max(self.now, self.gpu_is_free) + self.saving

    def run(self, first_step=0, log=None, **flags):
        """The loop. Returns (steps done, was it stopped), and the Record of its steps."""
        config = small_config(**flags)
        if log is None:
            log = Record()
        loader = SimpleNamespace(schedule=BatchSchedule(192, config.max_steps))
        data = SimpleNamespace(loader=loader)
        state = make_state(config)
        record_step = log.step

        def step(number, *values):
            self.events.append(f"log {number}")
            record_step(number, *values)

        log.step = step
        result = train_gpt2.train(first_step, config, self.process, data, state, log)
        return result, log


SECONDS = {0: 1.0, 1: 2.0, 2: 1.5, 3: 3.0, 4: 1.0, 5: 2.0}


def times(log):
    return {step: dt for step, _, _, _, dt in log.steps}


def test_numbers_that_arrive_late_do_not_change_the_time_of_a_step(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    result, log = clock.run(max_steps=6)
    assert result == (6, False)
    assert times(log) == pytest.approx(SECONDS)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU"])
def test_a_step_after_an_evaluation_or_a_save_counts_from_its_own_beginning(on_gpu, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS, evaluation=100.0, saving=1000.0)
    _, log = clock.run(max_steps=6, val_every=3, checkpoint_every=2)
    assert times(log) == pytest.approx(SECONDS)


def test_the_first_steps_time_enters_neither_the_time_left_nor_the_median(monkeypatch, capsys):
    seconds = {0: 600.0, 1: 3.0, 2: 5.0, 3: 10.0}
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=seconds)
    output = SimpleNamespace(add=lambda *cells, **more: None)
    log = StepLog(clock.process, output, BatchSchedule(192, 4), 1000)

    clock.run(log=log, max_steps=4)

    lines = capsys.readouterr().out.splitlines()
    assert "left" not in lines[0]
    left = [line.split(" | ")[-1] for line in lines[1:]]
    assert left == ["0:00:06 left", "0:00:04 left", "0:00:00 left"]
    assert "dt: 600000.0ms" in lines[0]
    seconds, rate = log.medians()
    assert seconds == pytest.approx(5.0)
    assert rate == pytest.approx(192 / 5.0)


def test_the_loop_saves_evaluates_trains_and_logs_in_this_order(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    clock.run(max_steps=3, val_every=2, checkpoint_every=2)
    assert clock.events == [
        "evaluate 0", "train 0", "log 0",
        "train 1", "log 1",
        "save 2", "evaluate 2", "train 2", "log 2",
        "save 3", "evaluate 3",
    ]


def test_a_gpus_steps_are_logged_one_later_but_all_before_a_save_or_an_evaluation(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.run(max_steps=6, val_every=3, checkpoint_every=5)
    assert clock.events == [
        "evaluate 0", "train 0", "train 1", "log 0", "train 2", "log 1", "log 2",
        "evaluate 3", "train 3", "train 4", "log 3", "log 4",
        "save 5", "train 5", "log 5",
        "save 6", "evaluate 6",
    ]


def test_each_step_is_logged_with_its_own_numbers_and_rate(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.numbers = {0: [9.0, 0.75, 0.0], 1: [8.0, 1.0, 0.0], 2: [7.0, 0.5, 0.0]}
    _, log = clock.run(max_steps=3, max_lr=1.0, min_lr=0.1)

    assert [values[:3] for values in log.steps] == [(0, 9.0, 0.75), (1, 8.0, 1.0), (2, 7.0, 0.5)]
    rates = [lr for _, _, _, lr, _ in log.steps]
    assert rates == pytest.approx([1.0, 0.775, 0.325])          # a cosine from 1 to 0.1


def test_a_gpus_loss_that_is_not_finite_is_seen_before_the_save_and_not_logged(monkeypatch):
    """The CPU's: test_output.py."""
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.numbers = {3: [math.nan, 1.0, 0.0]}
    with pytest.raises(RunError, match="step 3 "):
        clock.run(max_steps=6, checkpoint_every=4, val_every=4)
    assert "save 4" not in clock.events
    assert "evaluate 4" not in clock.events
    assert "log 2" in clock.events
    assert "log 3" not in clock.events


def test_a_finite_gradient_begins_the_count_of_overflows_anew(monkeypatch):
    """25 in a row are allowed: from step 52 on, step 77 is one too many."""
    seconds = dict.fromkeys(range(100), 1.0)
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=seconds)
    overflow = [2.0, math.inf, 0.0]
    finite = [2.0, 1.0, 0.0]
    clock.numbers = dict.fromkeys(range(100), overflow)
    clock.numbers[25] = finite
    clock.numbers[51] = finite
    with pytest.raises(RunError, match="step 77 "):
        clock.run(max_steps=100, dtype="float16")


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU"])
def test_a_dropped_step_ends_a_run_that_has_logged_and_saved_the_one_before(on_gpu, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS)
    clock.signal_in = 3
    result, _ = clock.run(max_steps=6, checkpoint_every=100, val_every=3)
    assert result == (3, True)
    assert clock.events[-2:] == ["train 3", "save 3"]
    assert "log 2" in clock.events


@pytest.mark.parametrize("on_gpu, done", [(False, 2), (True, 3)], ids=["CPU", "GPU"])
def test_ranks_that_vote_to_stop_end_after_the_step_in_which_all_know_it(
        on_gpu, done, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS)
    votes = 1.0
    clock.numbers = {1: [2.0, 1.0, votes]}
    result, log = clock.run(max_steps=6, checkpoint_every=100)
    assert result == (done, True)
    assert [values[0] for values in log.steps] == list(range(done))
    assert clock.events[-1] == f"save {done}"


def test_a_resumed_run_does_not_save_again_what_it_came_from(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    result, _ = clock.run(first_step=2, max_steps=6, checkpoint_every=2)
    assert result == (6, False)
    assert clock.events[0] == "train 2"
    saves = [event for event in clock.events if event.startswith("save")]
    assert saves == ["save 4", "save 6"]


# ----------------------------------------------------------------------- whole runs

T = 32
BYTES = [
    "--n_layer", 2, "--n_head", 2, "--n_embd", 32, "--block_size", T, "--vocab_size", 256,
    "--dtype", "float32", "--device", "cpu", "--total_batch_size", 8 * T, "--warmup_steps", 5,
]
QUIET = [
    "--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0, "--checkpoint_every", 0,
]
# What samples, or is scored by HellaSwag, needs GPT-2's vocabulary.
WORDS = [
    "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", T, "--dtype", "float32",
    "--device", "cpu", "--total_batch_size", 4 * T, "--batch_size", 2, "--warmup_steps", 2,
    "--val_tokens", 5 * T,
]


def printed(*flags, code=0):
    """What a run in this process prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train(*flags, code=code)
    return output.getvalue()


def write_text(folder, ids, cut):
    write_shard(folder / "text_val_000000.npy", ids[:cut].astype(np.uint16))
    write_shard(folder / "text_train_000001.npy", ids[cut:].astype(np.uint16))
    return folder


@pytest.fixture(scope="module")
def byte_shards(tmp_path_factory):
    text = (ROOT / "input.txt").read_bytes()[:9000]
    folder = tmp_path_factory.mktemp("bytes")
    return write_text(folder, np.frombuffer(text, dtype=np.uint8), 1000)


@pytest.fixture(scope="module")
def word_shards(tmp_path_factory):
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:9000]
    return write_text(tmp_path_factory.mktemp("words"), encode(text), 400)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return hellaswag_file(tmp_path_factory.mktemp("examples") / "examples.jsonl", 12)


@pytest.fixture(scope="module")
def evaluated_run(word_shards, examples, tmp_path_factory):
    """OUT of a run that evaluates, samples and saves."""
    out = tmp_path_factory.mktemp("evaluated")
    train("--data", word_shards, *WORDS, "--max_steps", 5, "--val_every", 2, "--sample_every", 2,
          "--hellaswag_every", 3, "--hellaswag_data", examples, "--checkpoint_every", 2,
          "--out", out)
    return out


def test_evaluations_samples_and_checkpoints_do_not_change_the_losses(
        evaluated_run, word_shards, tmp_path):
    train("--data", word_shards, *WORDS, *QUIET, "--max_steps", 5, "--out", tmp_path)
    assert logged(evaluated_run) == logged(tmp_path)
    assert len(logged(tmp_path)) == 5


def test_a_runs_hellaswag_is_acc_norm_of_the_command(evaluated_run, examples, capsys):
    hellaswag.main(["--model", str(evaluated_run), "--device", "cpu", "--data", str(examples)])
    acc_norm = capsys.readouterr().out.split("acc_norm: ")[1]
    share = int(acc_norm.split("/")[0]) / 12
    assert logged(evaluated_run, "hella")[5] == pytest.approx(share, abs=1e-6)


def test_a_checkpoint_records_its_step_tokens_recipe_and_the_flags_as_asked(evaluated_run):
    checkpoint = read_checkpoint(evaluated_run / "checkpoint_000005.pt")
    assert checkpoint["step"] == 5
    assert checkpoint["tokens"] == 5 * 4 * T
    assert checkpoint["recipe"] == "gpt2"
    assert checkpoint["config"]["total_batch_size"] == 4 * T
    assert checkpoint["config"]["min_lr"] == "auto"


def train_compiled(word_shards, examples, out):
    """Two steps in micro-batches of one sequence, with evaluations before and after them."""
    train("--data", word_shards, *WORDS, "--compile", "--batch_size", 1, "--max_steps", 2,
          "--val_every", 2, "--sample_every", 2, "--hellaswag_every", 2,
          "--hellaswag_data", examples, "--checkpoint_every", 0, "--out", out)


def test_what_is_compiled_sees_one_shape(compiled, word_shards, examples, tmp_path):
    """Single sequences: their strides have to be those of a whole tensor.

    HellaSwag and samples have many shapes, and run eager.
    """
    train_compiled(word_shards, examples, tmp_path)

    [model] = compiled
    trial = 2                           # forwards, as are these
    validation = 5
    steps = 2 * 4
    assert model.shapes == [(1, T)] * (trial + 2 * validation + steps)
    assert model.strides == {(T, 1)}


def test_a_compiled_run_has_the_numbers_of_an_eager_one(
        compiled, evaluated_run, word_shards, examples, tmp_path):
    train_compiled(word_shards, examples, tmp_path)
    for kind in ("train", "val", "hella"):
        of_eager = logged(evaluated_run, kind)[0]
        assert logged(tmp_path, kind)[0] == pytest.approx(of_eager, abs=1e-4)


def test_a_missing_file_of_examples_is_an_error_where_it_was_asked_for(word_shards, tmp_path):
    missing = tmp_path / "nowhere.jsonl"
    with pytest.raises(UserError, match="nowhere.jsonl.*--hellaswag_every 0"):
        train("--data", word_shards, *WORDS, "--max_steps", 1, "--hellaswag_data", missing,
              "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_examples_that_cannot_be_fetched_are_a_warning_where_no_flag_asked(
        word_shards, tmp_path):
    """The tests are offline."""
    pytest.importorskip("datasets")
    text = printed("--data", word_shards, *WORDS, "--val_every", 0, "--sample_every", 0,
                   "--checkpoint_every", 0, "--max_steps", 1, "--out", tmp_path)
    assert text.count("warning: continuing without HellaSwag") == 1
    assert list(logged(tmp_path)) == [0]


def test_metrics_csv_has_the_numbers_of_each_step(byte_shards, tmp_path):
    train("--data", byte_shards, *BYTES, *QUIET, "--max_steps", 4, "--warmup_steps", 2,
          "--max_lr", 1e-3, "--out", tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["tokens"] for row in rows] == [0, 256, 512, 768]
    assert [row["lr"] for row in rows] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    for row in rows:
        assert 3 < row["train"] < 8
        assert row["norm"] > 0
        assert row["tokens_per_second"] > 0


def test_finetuning_starts_where_the_weights_ended(evaluated_run, word_shards, tmp_path):
    """From a run's best checkpoint, and from an exported folder.

    The exported model has no rows of padding, whose probabilities go to the 50,257 tokens: its loss
    is lower by about log(50304 / 50257) = 0.001.
    """
    best = evaluated_run / "best"
    losses = logged(evaluated_run, "val")
    lowest = min(loss for step, loss in losses.items() if step > 0)
    load_model(best).save_pretrained(tmp_path / "exported")
    for source, tolerance in ((best, 2e-6), (tmp_path / "exported", 2e-3)):
        out = tmp_path / f"from {source.name}"
        text = printed(
            "--preset", "finetune", "--init", source, "--data", word_shards,
            "--total_batch_size", 4 * T, "--batch_size", 2, "--val_tokens", 5 * T,
            "--device", "cpu", "--dtype", "float32", "--max_steps", 1, "--out", out,
            "--sample_prompt", "ROMEO:")
        assert logged(out, "val")[0] == pytest.approx(lowest, abs=tolerance)
        assert text.count("sample 0: ROMEO:") == 1
        assert [step for step, _ in checkpoints(out)] == [1]


def test_a_dry_run_tells_the_time_of_a_step_and_makes_none(byte_shards, tmp_path):
    text = printed("--data", byte_shards, *BYTES, *QUIET, "--max_steps", 12, "--dry_run",
                   "--out", tmp_path)
    assert "256 tokens per step = 8 x 32 x 1 micro-step x 1 process" in text
    assert "s per step" in text
    assert "step     0" not in text


def set_time_of_a_micro_step(seconds):
    device.time_micro_step = lambda *args: seconds


@pytest.mark.parametrize("processes, time", [(1, "0:00:24"), (2, "0:00:12")])
def test_a_dry_run_counts_the_tokens_of_all_processes(processes, time, byte_shards, tmp_path):
    result = run("--data", byte_shards, *BYTES, *QUIET, "--batch_size", 4, "--max_steps", 12,
                 "--dry_run", "--out", tmp_path, processes=processes,
                 before=[functools.partial(set_time_of_a_micro_step, 1.0)])
    assert f" {time} for 12 steps" in result.stdout


@pytest.mark.parametrize("loss, code, word", [(0.11, 1, "FAILED"), (0.09, 0, "PASSED")])
def test_the_sanity_run_passes_below_a_tenth(loss, code, word, tmp_path, after_each_forward):
    def set_loss(module, inputs, output):
        if isinstance(module, GPT):
            return None, output[1] * 0 + loss

    after_each_forward(set_loss)
    text = printed("--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 2,
                   "--dtype", "float32", "--device", "cpu", "--out", tmp_path, code=code)
    assert word in text


def test_the_sanity_run_has_the_same_batch_in_each_step(tmp_path, after_each_forward):
    batches = []

    def remember_batch(module, inputs, output):
        if isinstance(module, GPT):
            batches.append(inputs)

    after_each_forward(remember_batch)
    printed("--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 3,
            "--dtype", "float32", "--device", "cpu", "--out", tmp_path, code=1)

    assert len(batches) == 3
    first_tokens = encode((ROOT / "input.txt").read_text(encoding="utf-8")[:2000])[:129]
    for x, y in batches:
        assert x.shape == (4, 32)
        assert x.flatten().tolist() == first_tokens[:-1].tolist()
        assert y.flatten().tolist() == first_tokens[1:].tolist()
