"""runtime/micro_batch.py: how many sequences a micro-step has, by an estimate and a trial."""
import os
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import BYTES, command, on_ranks
from torch.nn.modules.module import register_module_forward_pre_hook

from config import Config
from model import GPT, GPTConfig
from recipes import RECIPES
from runtime import micro_batch
from runtime.cli import RunError
from runtime.micro_batch import choose_micro_batch, fits_in_memory, time_micro_step
from runtime.ranks import Process
from runtime.recipe import BatchSchedule

# ----------------------------------------------------------------------- the micro-batch of a GPU

@dataclass
class Counted:
    """What training takes."""
    weights: int                # bytes
    moments: int                # bytes: 8 of a number that Adam trains, 4 of one of Muon's
    token: int                  # bytes of a token of a micro-step
    others: int                 # bytes of the gradients, moments and copies


# Counted by torch 2.13.0's allocator on the simulated GPU (tests/null_gpu), frontier on 2026-11-30
# and the others on 2026-11-26, for compiled models of 12 layers of width 768 in bfloat16.
COUNTED = {
    "gpt2": Counted(4 * 124_475_904, 8 * 124_475_904, 325_500, 1_902_000_000),
    "gpt2 --recompute": Counted(4 * 124_475_904, 8 * 124_475_904, 120_800, 1_712_000_000),
    "speedrun": Counted(4 * 162_201_636, 957_900_000, 471_600, 2_371_000_000),
    "frontier": Counted(4 * 143_516_966, 801_000_000, 487_200, 1_722_000_000),
}
CARDS = {
    "H100 80GB": 85_017_493_504,
    "A100 40GB": 42_405_855_232,
    "RTX 4090": 25_386_352_640,
    "T4": 15_642_329_088,
}
CUDA_CONTEXT = 600_000_000      # bytes


class Card:
    """A GPU on which what was counted fits. `tried` are the micro-batches of its trials."""

    def __init__(self, what, memory, monkeypatch):
        self.counted = COUNTED[what]
        self.free = memory - CUDA_CONTEXT - self.counted.weights
        recipe = what.split()[0]
        self.kept_vectors = RECIPES[recipe].model.kept_vectors
        self.config = Config(
            recipe=recipe,
            recompute="--recompute" in what,
            dtype="bfloat16",
            compile=True,
            sequence_length=1024,
        )
        self.monkeypatch = monkeypatch
        self.tried = []
        self.reserved = None
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (self.free, None))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(micro_batch, "time_micro_step", self.time_micro_step)

    def time_micro_step(self, state, T, device, B, reserved):
        self.tried.append(B)
        self.reserved = reserved
        spare = reserved - self.counted.moments
        needed = B * T * self.counted.token + self.counted.others
        if needed + spare > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    def choose(self, most=64, batch=512, divisors=(1, 1, 1), has_moments=False, auto=True):
        """The micro-batch, of `batch` sequences a step of which at most `most` are at once.

        `most` is what "auto" takes at most, or what is asked for.
        """
        self.config.batch_size = "auto" if auto else most
        self.monkeypatch.setattr(micro_batch, "ON_A_GPU", 1024 * most)
        weights = torch.empty(self.counted.weights // 4, device="meta")
        moments = 0 if has_moments else self.counted.moments
        state = SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: [weights], kept_vectors=self.kept_vectors),
            optimizer=SimpleNamespace(bytes_to_allocate=lambda: moments),
        )
        schedule = BatchSchedule(1024 * batch, 100, divisors)
        return choose_micro_batch(self.config, schedule, state, Process(device="cuda:0"))


@pytest.mark.parametrize("name, what, expected", [
    ("H100 80GB", "gpt2", 64),
    ("A100 40GB", "gpt2", 64),
    ("RTX 4090", "gpt2", 32),
    ("H100 80GB", "speedrun", 64),
    ("A100 40GB", "speedrun", 64),
    ("RTX 4090", "speedrun", 32),
    ("T4", "gpt2 --recompute", 64),
])
def test_the_first_micro_batch_that_a_gpu_tries_is_the_largest_that_fits(
    name, what, expected, monkeypatch
):
    """Each trial compiles for a minute."""
    card = Card(what, CARDS[name], monkeypatch)
    assert card.choose(most=64, batch=512) == expected
    assert card.tried == [expected]


@pytest.mark.parametrize("gigabytes", [6, 24, 80, 192])
@pytest.mark.parametrize("what", COUNTED)
def test_the_first_guess_is_never_too_small_and_at_most_half_too_large(
    what, gigabytes, monkeypatch
):
    """A guess that is too small is never corrected, and one that is too large costs a trial."""
    card = Card(what, gigabytes * 10**9, monkeypatch)
    free = 0.95 * card.free                     # 5% stay free
    most = int(free - card.counted.others) // (1024 * card.counted.token)
    n = 720_720                                 # which all numbers up to 16 divide
    largest = max(B for B in range(1, most + 1) if n % B == 0)

    chosen = card.choose(most=n, batch=n)

    first = card.tried[0]
    assert largest <= first <= 1.5 * largest
    assert chosen <= largest


def test_a_gpu_that_is_too_small_tries_a_single_sequence(monkeypatch):
    card = Card("gpt2", 3 * 10**9, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        card.choose()
    assert card.tried == [1]


def test_an_eager_run_on_a_gpu_does_not_try_a_given_batch_size(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.config.compile = False

    assert card.choose(most=64, auto=False) == 64
    assert card.tried == []


@pytest.mark.parametrize("dtype, first", [("float32", 64), ("float16", 128)])
def test_in_float32_a_sequence_takes_twice_as_much(dtype, first, monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.config.dtype = dtype
    card.choose(most=512, batch=2**14)

    assert card.tried[0] == first


def test_a_micro_batch_that_does_not_fit_is_halved(monkeypatch):
    """The guess is for 4 layers. The card has those that were counted, 12: 76 sequences fit."""
    card = Card("gpt2", 30 * 10**9, monkeypatch)
    card.config.n_layer = 4

    assert card.choose(most=720, batch=720) == 60
    assert card.tried == [120, 60]


def test_a_given_batch_size_is_not_halved(monkeypatch):
    card = Card("gpt2", CARDS["T4"], monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        card.choose(most=64, auto=False)


def test_a_micro_batch_divides_the_step(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    assert card.choose(most=48, batch=512) == 32        # 48 does not divide 512
    assert card.tried == [32]


def test_a_recipe_that_trains_gpt_2_takes_the_memory_of_gpt_2(monkeypatch):
    """As the one of CONTRIBUTING.md does, of which nothing here knows the name."""
    chosen = []
    for recipe in ("gpt2", "wsd"):
        card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
        card.config.recipe = recipe
        chosen.append(card.choose(most=720, batch=720))
        assert card.tried == [chosen[-1]]
    assert chosen[0] == chosen[1] > 64


def test_all_steps_have_the_micro_batch_of_the_first_which_is_the_smallest(monkeypatch):
    """Those of later steps have more sequences. Another shape would compile again."""
    card = Card("gpt2 --recompute", CARDS["H100 80GB"], monkeypatch)
    assert card.choose(most=64, batch=192, divisors=(4, 2, 1)) == 48


def test_a_trial_leaves_room_for_the_moments_which_a_resumed_run_has_already(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.choose(most=32, auto=False)
    assert card.reserved == 2 * card.counted.weights
    card.choose(most=32, auto=False, has_moments=True)
    assert card.reserved == 0


def test_auto_leaves_a_twentieth_of_the_memory_free(monkeypatch):
    card = Card("gpt2", CARDS["H100 80GB"], monkeypatch)
    card.choose(has_moments=True)
    assert card.reserved == card.free // 20


# ----------------------------------------------------------------------- the micro-batch of a CPU

@pytest.fixture
def chosen_on_cpu(monkeypatch):
    """chosen_on_cpu(limit, process, ...) -> (B, the trials)."""
    def choose(limit, process, compile=False, sequences=24):
        tried = []
        monkeypatch.setattr(
            micro_batch, "time_micro_step", lambda state, T, device, B, reserved: tried.append(B))
        monkeypatch.setattr(micro_batch, "settle_buckets", lambda *arguments: None)
        config = Config(batch_size=limit, sequence_length=8, compile=compile)
        schedule = BatchSchedule(sequences * 8, 10)
        return choose_micro_batch(config, schedule, None, process), tried
    return choose


@pytest.mark.parametrize("limit, B", [(1, 1), (7, 6), (8, 8), (24, 24), (100, 24)])
def test_a_cpu_takes_the_largest_divisor_without_a_trial(limit, B, chosen_on_cpu):
    assert chosen_on_cpu(limit, Process()) == (B, [])


@pytest.mark.parametrize("batch_size, T, expected", [
    ("auto", 1024, (4, 64)), ("auto", 8192, (1, 8)), (100, 1024, (100, 100))])
def test_auto_is_4096_tokens_on_a_cpu_and_65536_on_a_gpu_but_a_sequence_at_least(
        batch_size, T, expected):
    config = Config(batch_size=batch_size, sequence_length=T)
    for limit, count in zip((micro_batch.ON_A_CPU, micro_batch.ON_A_GPU), expected, strict=True):
        assert micro_batch.most_sequences(config, limit) == count


def test_a_cpu_tries_a_compiled_model(chosen_on_cpu):
    assert chosen_on_cpu(8, Process(), compile=True) == (8, [8])


@pytest.mark.parametrize("sequences, limit, is_told", [
    (23, 8, True), (24, 5, False), (3, 1, False), (2, 8, False)])
def test_a_step_that_can_only_be_cut_small_is_told(
        sequences, limit, is_told, chosen_on_cpu, capsys):
    chosen_on_cpu(limit, Process(), sequences=sequences)
    assert ("--total_batch_size" in capsys.readouterr().out) == is_told


def test_the_smallest_limit_of_the_ranks_counts_for_all(chosen_on_cpu):
    """Otherwise they would read some sequences twice and others never."""
    class OneOfTwo(Process):
        def gather(self, value):
            return [value, 3]

    assert chosen_on_cpu(12, OneOfTwo(world_size=2)) == (3, [])


# ----------------------------------------------------------------------- a trial

@pytest.fixture
def state():
    """What a trial needs of a TrainState, with a tiny model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=1, n_embd=8))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=False)
    return SimpleNamespace(model=model, ddp_model=model, autocast=autocast)


@pytest.mark.parametrize("tries, seconds", [(1, 2.5), (2, 1.5), (3, 1.5)])
def test_a_trial_tells_the_shortest_time_after_its_first_micro_step(
        tries, seconds, state, monkeypatch):
    """The first one may compile, and others may be disturbed."""
    clock = SimpleNamespace(now=0.0, shapes=[])

    def compute(module, inputs):
        clock.now += [0.5, 2.5, 1.5, 9.5][len(clock.shapes)]
        clock.shapes.append(inputs[0].shape)

    monkeypatch.setattr(micro_batch.time, "perf_counter", lambda: clock.now)
    state.model.register_forward_pre_hook(compute)

    assert time_micro_step(state, T=8, device="cpu", B=3, tries=tries) == seconds
    assert clock.shapes == (1 + tries) * [(3, 8)]


def test_a_trial_leaves_no_gradients_and_the_weights_as_they_were(state):
    before = [p.clone() for p in state.model.parameters()]
    time_micro_step(state, T=8, device="cpu", B=3)
    for p, old in zip(state.model.parameters(), before, strict=True):
        assert p.grad is None
        assert torch.equal(p, old)


def test_a_trial_that_fails_leaves_no_gradients(state):
    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    state.model.transformer.wte.weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        time_micro_step(state, T=8, device="cpu", B=3)
    assert all(p.grad is None for p in state.model.parameters())


def test_the_reserved_memory_is_in_use_during_a_trial(state, monkeypatch):
    make_empty = torch.empty
    blocks = []
    bytes_in_use = []

    def empty(*size, **options):
        block = make_empty(*size, **options)
        blocks.append(weakref.ref(block))
        return block

    def look(module, inputs):
        there = [block() for block in blocks if block() is not None]
        bytes_in_use.append(sum(block.nbytes for block in there))

    monkeypatch.setattr(torch, "empty", empty)
    state.model.register_forward_pre_hook(look)
    time_micro_step(state, T=8, device="cpu", B=3, reserved=1000)

    assert bytes_in_use == [1000, 1000]


def out_of_memory_on_rank_1():
    """From now on a forward of more than two sequences fails on the second of two ranks.

    torch.compile compiles nothing: with --compile there is a trial.
    """
    torch.compile = lambda model, dynamic: model

    def check_memory(module, inputs):
        if isinstance(module, GPT) and len(inputs[0]) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    register_module_forward_pre_hook(check_memory)


def test_a_rank_whose_trial_is_out_of_memory_halves_for_all_and_lets_none_wait(byte_data, tmp_path):
    call = command(
        "train_gpt2.py", "--data", byte_data, *BYTES, "--device", "cpu", "--batch_size", "auto",
        "--compile", "--max_steps", 1, "--val_every", 0, "--checkpoint_every", 0,
        "--out", tmp_path)

    of_rank_0, of_rank_1 = on_ranks(call, call, before=[out_of_memory_on_rank_1])

    assert of_rank_0[0] == of_rank_1[0] == 0, of_rank_0
    assert "= 2 x 32 x 2 micro-steps x 2 processes" in of_rank_0[1]
    assert of_rank_1[1] == ""


# ----------------------------------------------------------------------- a trial that fails

def trial_that_raises(error):
    def trial(B):
        raise error
    return trial


def test_a_trial_out_of_memory_asks_for_a_smaller_one_and_is_raised_where_none_is_left():
    trial = trial_that_raises(torch.OutOfMemoryError("CUDA out of memory"))

    assert fits_in_memory(trial, 2, may_shrink=True, compiled=True) is False
    for B, may_shrink in ((1, True), (2, False)):
        with pytest.raises(torch.OutOfMemoryError):
            fits_in_memory(trial, B, may_shrink, compiled=True)


@pytest.mark.parametrize("cause, remedy", [
    ("no C compiler found", "--no_compile"),
    ("a.so: failed to map segment from shared object", "TORCHINDUCTOR_CACHE_DIR"),
])
def test_a_trial_that_cannot_compile_is_told_with_its_remedy(cause, remedy):
    trial = trial_that_raises(OSError(cause))
    with pytest.raises(RunError, match=f"{cause}.*{remedy}"):
        fits_in_memory(trial, 2, may_shrink=True, compiled=True)


def test_a_bug_in_an_eager_trial_is_raised_as_it_is():
    with pytest.raises(ValueError, match="a bug"):
        fits_in_memory(trial_that_raises(ValueError("a bug")), 2, may_shrink=True, compiled=False)


