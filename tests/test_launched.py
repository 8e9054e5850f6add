"""runtime/launched.py: the device's clock, and numbers that a GPU has later; more: test_loop.py."""
import math

import pytest
import torch
from peers import make_run

from runtime import launched
from runtime.cli import RunError
from runtime.launched import (
    check_finite,
    check_step,
    copy_later,
    mark_time,
    seconds_between,
)


class Event:
    """As torch.cuda.Event, of a GPU whose work is done when someone waits for it."""
    now = 0.0                   # milliseconds

    def __init__(self, enable_timing=False):
        self.enable_timing = enable_timing
        self.at = None
        self.is_done = False

    def record(self):
        self.at = Event.now

    def synchronize(self):
        assert self.at is not None, "it was not recorded"
        self.is_done = True

    def elapsed_time(self, other):
        assert self.enable_timing and other.enable_timing
        assert other.is_done, "nobody has waited for the GPU"
        return other.at - self.at


def test_the_time_between_two_moments_of_a_gpu_is_its_own_and_in_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", 1000.0)
    first = mark_time("cuda:0")
    Event.now = 3500.0
    last = mark_time("cuda:0")

    assert seconds_between(first, last) == 2.5


def test_the_time_between_two_moments_of_a_cpu_is_that_of_pythons_clock(monkeypatch):
    moments = [7.0, 9.5]
    monkeypatch.setattr(launched.time, "perf_counter", lambda: moments.pop(0))
    first = mark_time("cpu")
    last = mark_time("cpu")

    assert seconds_between(first, last) == 2.5


class TensorOnGpu:
    """A tensor whose copy on the CPU has its numbers only when an event after the copy has come."""
    is_cuda = True

    def __init__(self, numbers, monkeypatch):
        self.numbers = torch.tensor(numbers)
        self.copy = torch.zeros(len(numbers))
        self.copy_has_begun = False
        tensor = self

        class EventOfCopy(Event):
            def synchronize(self):
                super().synchronize()
                tensor.copy.copy_(tensor.numbers)

            def record(self):
                assert tensor.copy_has_begun, "the event is before the copy"
                super().record()

        monkeypatch.setattr(torch.cuda, "Event", EventOfCopy)

    def to(self, device, non_blocking):
        assert (device, non_blocking) == ("cpu", True)
        self.copy_has_begun = True
        return self.copy


def test_the_numbers_of_a_gpu_are_read_when_its_copy_has_come(monkeypatch):
    tensor = TensorOnGpu([1.0, 2.0], monkeypatch)
    numbers = copy_later(tensor)

    assert tensor.copy.tolist() == [0, 0], "it has waited at once"
    assert numbers() == [1, 2]


def test_the_numbers_of_a_cpu_are_those_at_the_time_of_the_call():
    tensor = torch.tensor([1.0, 2.0])
    numbers = copy_later(tensor)
    tensor.zero_()

    assert numbers() == [1, 2]


# ----------------------------------------------------------------------- what is finite

@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_an_error_of_its_step(number):
    with pytest.raises(RunError, match="the loss.* step 7 .*--max_lr"):
        check_finite(7, make_run(), "the loss", number)


def test_a_finite_number_is_none():
    check_finite(7, make_run(), "the loss", 1e38)


def with_scale(dtype, scale):
    run = make_run(dtype=dtype)
    run.state.scaler = torch.amp.GradScaler("cpu", scale, enabled=dtype == "float16")
    return run


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-9])
def test_an_overflow_is_usual_while_float16s_scale_is_still_large(scale, norm):
    check_step(7, with_scale("float16", scale), 2.0, norm)


@pytest.mark.parametrize("dtype, scale", [("float32", 1.0), ("bfloat16", 1.0), ("float16", 2**-10)])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_any_other_overflow_ends_the_run(dtype, scale, norm):
    with pytest.raises(RunError, match="gradient.* step 7"):
        check_step(7, with_scale(dtype, scale), 2.0, norm)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_usual_overflow(loss):
    with pytest.raises(RunError, match="loss.* step 7"):
        check_step(7, with_scale("float16", 2.0**16), loss, math.nan)
