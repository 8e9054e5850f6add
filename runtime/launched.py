"""The steps that have been launched: a GPU may still compute them while the CPU goes on."""
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from runtime import hardware


@dataclass
class LaunchedStep:
    """A step whose numbers the CPU has not read yet.

    `began` and `ended` are moments of hardware.mark_time: on a GPU by the GPU's own clock, because
    the CPU reads the numbers of a step late.
    """
    step: int
    lr: float
    read_numbers: Callable      # waits for what train_step has returned: [loss, norm, votes]
    began: object
    ended: object

    def seconds(self) -> float:
        return hardware.seconds_between(self.began, self.ended)


class LaunchedSteps:
    """The steps from their launch to their line in the log, with the time that each one took.

    On a CPU a step is done when it is launched. A GPU computes one step while the CPU launches the
    next, so that it never waits for the CPU.
    """

    def __init__(self, process):
        self.process = process
        self.steps = deque()            # the oldest first
        self.began = None               # where the next step begins; None: where it is launched
        self.overflows = 0              # the newest steps in a row whose gradient was not finite

    def begin(self, after_pause: bool) -> None:
        """Notes when a step begins: where the last one ended, unless something came between."""
        if after_pause or self.began is None:
            self.began = hardware.mark_time(self.process.device)

    def end(self, step: int, lr: float, numbers: torch.Tensor) -> None:
        """Notes the end of the step; `numbers` are what train_step has returned."""
        read_numbers = hardware.copy_later(numbers)
        ended = hardware.mark_time(self.process.device)
        self.steps.append(LaunchedStep(step, lr, read_numbers, self.began, ended))
        self.began = ended

    def take(self, wait_for_all: bool) -> Iterator[LaunchedStep]:
        """The steps that can be logged. A GPU still computes the newest one."""
        running = 0
        if self.process.on_gpu and not wait_for_all:
            running = 1
        while len(self.steps) > running:
            yield self.steps.popleft()
