"""The steps that have been launched: a GPU may still compute them while the CPU goes on."""
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from runtime.cli import RunError
from runtime.files import checkpoints


@dataclass
class LaunchedStep:
    """A step whose numbers the CPU has not read yet.

    `began` and `ended` are moments of mark_time: on a GPU by the GPU's own clock, because the CPU
    reads the numbers of a step late.
    """
    step: int
    lr: float
    read_numbers: Callable      # waits for what train_step has returned: [loss, norm, votes]
    began: object
    ended: object

    def seconds(self) -> float:
        return seconds_between(self.began, self.ended)


class LaunchedSteps:
    """The steps from their launch to their line in the log, with the time that each one took.

    On a CPU a step is done when it is launched. A GPU computes one step while the CPU launches the
    next, so that it never waits for the CPU.
    """

    def __init__(self, process):
        self.process = process
        self.steps = deque()            # the oldest first
        self.began = None               # where the next step begins; None: where it is launched

    def begin(self) -> None:
        """Notes when a step begins: where the last one ended, unless all were waited for."""
        if self.began is None:
            self.began = mark_time(self.process.device)

    def end(self, step: int, lr: float, numbers: torch.Tensor) -> None:
        """Notes the end of the step; `numbers` are what train_step has returned."""
        read_numbers = copy_later(numbers)
        ended = mark_time(self.process.device)
        self.steps.append(LaunchedStep(step, lr, read_numbers, self.began, ended))
        self.began = ended

    def take(self, wait_for_all: bool) -> Iterator[LaunchedStep]:
        """The steps that can be logged. A GPU still computes the newest one, if it may."""
        running = 0
        if self.process.on_gpu and not wait_for_all:
            running = 1
        if wait_for_all:
            self.began = None           # what comes between takes time that is no step's
        while len(self.steps) > running:
            yield self.steps.popleft()


def check_finite(step: int, run, what: str, number: float) -> None:
    """RunError on all ranks unless the number is finite: the weights are not worth saving."""
    if not math.isfinite(number):
        remedy = "lower --max_lr"
        if checkpoints(run.config.out):
            remedy += ", and begin at an earlier checkpoint (--resume) in another --out"
        run.process.fail(RunError(f"{what} of step {step} is {number}, and with the same settings "
                                  f"it would be so again: {remedy}"))


def check_step(step: int, run, loss: float, norm: float) -> None:
    """RunError on all ranks unless both are finite, or the norm has overflowed as is usual."""
    check_finite(step, run, "the loss", loss)
    if math.isfinite(norm):
        return

    # float16's scaler begins at 65536, leaves out a step whose gradient overflows, and halves its
    # scale. So some overflows are usual. 25 in a row bring it to 1/512: one more is an error.
    scaler = run.state.scaler               # to read its scale waits for a GPU, so it comes last
    if not scaler.is_enabled() or scaler.get_scale() < 2**-9:
        check_finite(step, run, "the norm of the gradient", norm)


# ----------------------------------------------------------------------------- a GPU's clock

def mark_time(device: str) -> "torch.cuda.Event | float":
    """A moment in the device's work, for seconds_between.

    A GPU comes to it when it has done all that it was given before, whenever the CPU asks for it.
    """
    if device.startswith("cuda"):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def seconds_between(first, last) -> float:
    """The seconds between two moments of mark_time. Waits until the GPU has come to the last."""
    if isinstance(first, float):
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1000


def copy_later(tensor: torch.Tensor) -> Callable[[], list]:
    """Starts to copy a small tensor to the CPU. Returns a function that returns its numbers.

    That function waits for the copy, but not for work that the GPU has been given since. A tensor
    on the CPU is not copied.
    """
    if not tensor.is_cuda:
        numbers = tensor.tolist()           # on a Mac this waits for its GPU
        return lambda: numbers

    copy = tensor.to("cpu", non_blocking=True)              # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def wait():
        copied.synchronize()
        return copy.tolist()
    return wait
