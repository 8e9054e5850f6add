"""train_gpt2.py's loop: its order and times, how it stops; and whole small runs."""
import functools
import math

import pytest
import torch
from helpers import BYTES, ROOT, contents, logged, refused, run, saved_steps, striking, train
from peers import GpuProcess, make_run
from torch.nn.modules.module import register_module_forward_hook

import train_gpt2
from model import GPT
from runtime import launched, micro_batch
from runtime.cli import RunError
from runtime.metrics import read_metrics
from runtime.ranks import Process, Stopped
from runtime.tokenizer import encode

# ----------------------------------------------------------------------- the loop

class FakeTime:
    """The loop with a clock of its own: steps, evaluations and saves take the times of a test.

    A GPU does one step after the other, while the CPU goes on. The numbers of a step are on the CPU
    a quarter of a second after the GPU has computed them. The methods stand in for the functions of
    train_gpt2 and of runtime.launched that have their names.
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
        self.lowest = ()                # the steps whose validation loss is the lowest so far
        self.events = []
        for name in ("train_step", "evaluate", "save"):
            monkeypatch.setattr(train_gpt2, name, getattr(self, name))
        for name in ("mark_time", "copy_later"):
            monkeypatch.setattr(launched, name, getattr(self, name))

    def train_step(self, step, run):
        self.events.append(f"train {step}")
        if step == self.signal_in:
            raise Stopped
        self.gpu_is_free = max(self.now, self.gpu_is_free) + self.seconds[step]
        if not run.process.on_gpu:
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

    def evaluate(self, step, run):
        if train_gpt2.is_due(step, run.config, run.config.val_every):
            self.events.append(f"evaluate {step}")
            self.now = max(self.now, self.gpu_is_free) + self.evaluation
        return step in self.lowest

    def save(self, step, run):
        self.events.append(f"save {step}")
        self.now = max(self.now, self.gpu_is_free) + self.saving

    def run(self, first_step=0, evaluated=(), **flags):
        """The loop, of a run that has made these evaluations. Returns what it returns, and the Run.

        Its log has the seconds of the steps, and its output the numbers.
        """
        run = make_run(process=self.process, **flags)
        for step in evaluated:
            run.output.add(step, val=3.0)
        log_step = run.log.step

        def step(number, *values):
            self.events.append(f"log {number}")
            log_step(number, *values)

        run.log.step = step
        return train_gpt2.train(first_step, run), run


SECONDS = {0: 1.0, 1: 2.0, 2: 1.5, 3: 3.0, 4: 1.0, 5: 2.0}
BOTH = pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU"])


def test_numbers_that_arrive_late_do_not_change_the_time_of_a_step(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    result, run = clock.run(max_steps=6)
    assert result == (6, False)
    assert list(run.log.seconds) == pytest.approx(list(SECONDS.values()))


@BOTH
def test_a_step_after_an_evaluation_or_a_save_counts_from_its_own_beginning(on_gpu, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS, evaluation=100.0, saving=1000.0)
    _, run = clock.run(max_steps=6, val_every=3, checkpoint_every=2)
    assert list(run.log.seconds) == pytest.approx(list(SECONDS.values()))


def test_the_loop_saves_evaluates_trains_and_logs_in_this_order(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    _, run = clock.run(max_steps=3, val_every=2, checkpoint_every=2)
    assert clock.events == [
        "evaluate 0", "train 0", "log 0",
        "train 1", "log 1",
        "save 2", "evaluate 2", "train 2", "log 2",
        "save 3", "evaluate 3",
    ]
    assert run.output.pictures == [True]            # after the last evaluation, at any rate


def test_the_best_weights_are_saved_at_their_validation_if_their_step_has_no_file(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    clock.lowest = (0, 1, 2, 3, 5)
    clock.run(max_steps=5, val_every=1, checkpoint_every=2)
    saves = [event for event in clock.events if "save" in event or "evaluate" in event]
    assert saves == [
        "evaluate 0", "evaluate 1", "save 1", "save 2", "evaluate 2", "evaluate 3", "save 3",
        "save 4", "evaluate 4", "save 5", "evaluate 5",
    ]


@pytest.mark.parametrize("first_step, checkpoint_every", [(2, 100), (0, 0)])
def test_where_a_run_begins_its_weights_have_a_file_and_without_checkpoints_none_is_saved(
        first_step, checkpoint_every, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    clock.lowest = (first_step, 3)
    clock.signal_in = 4
    clock.run(first_step, max_steps=6, val_every=1, checkpoint_every=checkpoint_every)
    saves = [event for event in clock.events if "save" in event]
    assert saves == (["save 3", "save 4"] if checkpoint_every else [])


@BOTH
def test_the_best_weights_of_a_step_that_a_signal_ends_are_not_saved_twice(on_gpu, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS)
    clock.lowest = (3,)
    clock.signal_in = 3
    clock.run(max_steps=6, val_every=3, checkpoint_every=100)
    assert clock.events[-3:] == ["evaluate 3", "save 3", "train 3"]


def test_a_gpus_steps_are_logged_one_later_but_all_before_a_save_or_an_evaluation(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.run(max_steps=6, val_every=3, checkpoint_every=5)
    assert clock.events == [
        "evaluate 0", "train 0", "train 1", "log 0", "train 2", "log 1", "log 2",
        "evaluate 3", "train 3", "train 4", "log 3", "log 4",
        "save 5", "train 5", "log 5",
        "save 6", "evaluate 6",
    ]


def test_each_step_is_recorded_with_its_own_numbers_and_rates(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.numbers = {0: [9.0, 0.75, 0.0], 1: [8.0, 1.0, 0.0], 2: [7.0, 0.5, 0.0]}
    _, run = clock.run(max_steps=3, max_lr=1.0, min_lr=0.1)

    columns = ("step", "train", "norm", "lr", "tokens_per_second")
    rows = [[row[name] for name in columns] for row in run.output.rows]
    assert rows == [                        # the learning rate is a cosine from 1 to 0.1
        pytest.approx([0, 9.0, 0.75, 1.0, 192 / 1.0]),
        pytest.approx([1, 8.0, 1.0, 0.775, 192 / 2.0]),
        pytest.approx([2, 7.0, 0.5, 0.325, 192 / 1.5]),
    ]


def test_a_gpus_loss_that_is_not_finite_is_seen_before_the_save_and_not_logged(monkeypatch):
    """The CPU's: test_output.py."""
    clock = FakeTime(monkeypatch, on_gpu=True, seconds=SECONDS)
    clock.numbers = {3: [math.nan, 1.0, 0.0]}
    with pytest.raises(RunError, match="step 3 "):
        clock.run(max_steps=6, checkpoint_every=4, val_every=4)
    assert "log 2" in clock.events
    assert not {"log 3", "save 4", "evaluate 4"} & set(clock.events)


@BOTH
def test_a_dropped_step_ends_a_run_that_has_logged_and_saved_the_one_before(on_gpu, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS)
    clock.signal_in = 3
    result, _ = clock.run(max_steps=6, checkpoint_every=100)
    assert result == (3, True)
    assert "log 2" in clock.events
    assert clock.events[-1] == "save 3"


@pytest.mark.parametrize("on_gpu, done", [(False, 2), (True, 3)], ids=["CPU", "GPU"])
def test_ranks_that_vote_to_stop_end_after_the_step_in_which_all_know_it(
        on_gpu, done, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu, SECONDS)
    votes = 1.0
    clock.numbers = {1: [2.0, 1.0, votes]}
    result, run = clock.run(max_steps=6, checkpoint_every=100)
    assert result == (done, True)
    assert [row["step"] for row in run.output.rows] == list(range(done))
    assert clock.events[-1] == f"save {done}"


def test_a_resumed_run_evaluates_again_but_does_not_save_again_what_it_came_from(monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    result, _ = clock.run(2, evaluated=[0, 2], max_steps=4, checkpoint_every=2, val_every=2)
    assert result == (4, False)
    assert clock.events == [
        "evaluate 2", "train 2", "log 2", "train 3", "log 3", "save 4", "evaluate 4"]


@pytest.mark.parametrize("evaluated, events", [([0, 4], []), ([0], ["evaluate 4"])])
def test_a_run_at_its_end_makes_the_last_evaluation_if_it_has_not(
        evaluated, events, monkeypatch):
    clock = FakeTime(monkeypatch, on_gpu=False, seconds=SECONDS)
    result, _ = clock.run(4, evaluated, max_steps=4, checkpoint_every=2, val_every=3)
    assert result == (4, False)
    assert clock.events == events


def test_gradients_that_always_overflow_end_a_run_in_float16_after_25_halvings_of_the_scale():
    run = make_run(dtype="float16", max_steps=100)
    run.state.model.transformer.wte.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(RunError, match="step 25 "):
        train_gpt2.train(0, run)


# ----------------------------------------------------------------------- whole runs

@pytest.fixture
def flags(byte_data, tmp_path):
    """Of a run of 12 steps, which writes to tmp_path / "log"."""
    return ["--data", byte_data, *BYTES, "--device", "cpu", "--max_steps", 12, "--val_every", 0,
            "--out", tmp_path / "log"]


def test_metrics_csv_has_the_numbers_of_each_step(flags, tmp_path):
    train(*flags, "--max_steps", 4, "--warmup_steps", 2, "--max_lr", 1e-3)
    rows = read_metrics(tmp_path / "log/metrics.csv")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["tokens"] for row in rows] == [0, 256, 512, 768]
    assert [row["lr"] for row in rows] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4])
    for row in rows:
        assert 3 < row["train"] < 8
        assert row["norm"] > 0
        assert row["tokens_per_second"] > 0


def test_a_run_that_is_killed_in_its_last_evaluation_makes_it_when_typed_again(
        flags, tmp_path, capsys):
    """And typed once more it ends at once. It has one row a step, and one for the end."""
    flags += ["--val_every", 12]
    run(*flags, code=-9, before=striking("validation", "SIGKILL", nth=2))
    assert saved_steps(tmp_path / "log")[-1] == 12
    assert list(logged(tmp_path / "log", "val")) == [0]

    train(*flags)
    assert list(logged(tmp_path / "log", "val")) == [0, 12]
    rows = read_metrics(tmp_path / "log/metrics.csv")
    assert [row["step"] for row in rows] == list(range(13))

    before = contents(tmp_path)
    capsys.readouterr()
    train(*flags)
    text = capsys.readouterr().out
    assert "done: 12 steps" in text
    assert "validation loss:" not in text
    assert contents(tmp_path) == before


def test_a_dry_run_tells_the_time_of_a_step_and_makes_none(flags, tmp_path, capsys):
    train(*flags, "--dry_run")
    text = capsys.readouterr().out
    assert "256 tokens per step = 4 x 32 x 2 micro-steps x 1 process" in text
    assert "s per step" in text
    assert "step     0" not in text
    assert not (tmp_path / "log").exists()


def set_time_of_a_micro_step(seconds):
    micro_batch.time_micro_step = lambda *args, tries: seconds


@pytest.mark.parametrize("processes, time", [(1, "0:00:24"), (2, "0:00:12")])
def test_a_dry_run_counts_the_tokens_of_all_processes(processes, time, flags):
    result = run(*flags, "--dry_run", processes=processes,
                 before=[functools.partial(set_time_of_a_micro_step, 1.0)])
    assert f" {time} for 12 steps" in result.stdout


SANITY = ["--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 3,
          "--dtype", "float32", "--device", "cpu"]


@pytest.fixture
def batches():
    """The inputs (x, y) of each forward of a sanity run. Its loss is 0.09."""
    seen = []

    def remember_batch(module, inputs, output):
        if isinstance(module, GPT):
            seen.append(inputs)
            return None, output[1] * 0 + 0.09

    with register_module_forward_hook(remember_batch):
        yield seen


def test_the_sanity_run_has_the_same_batch_in_each_step_and_writes_nothing(
        batches, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(*SANITY)

    assert "PASSED" in capsys.readouterr().out
    assert len(batches) == 3
    first_tokens = encode((ROOT / "input.txt").read_text(encoding="utf-8")[:2000])[:129]
    for x, y in batches:
        assert x.shape == (4, 32)
        assert x.flatten().tolist() == first_tokens[:-1].tolist()
        assert y.flatten().tolist() == first_tokens[1:].tolist()
    assert contents(tmp_path) == {}


def test_a_sanity_run_that_fails_has_exit_code_1():
    refused(lambda: run(*SANITY, code=1), "FAILED", failed=True)
