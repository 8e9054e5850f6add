"""What the training loop works with."""
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.checkpoint import Saver, TrainState
from runtime.console import Reporter
from runtime.dataloader import Data, TokenLoader
from runtime.distributed import Process, StopSignals
from runtime.log import Profiler
from runtime.plots import LossPlotter


@dataclass
class Run:
    """Made by train_gpt2.set_up, once everything that can be checked has been."""
    config: object
    process: Process
    state: TrainState
    compiled: Callable                  # the model for evaluation
    wrapped: Callable                   # the model for training: inside DDP, if there are several ranks
    autocast: torch.autocast
    loader: TokenLoader
    data: Data
    hella: list                         # batches of HellaSwag
    reporter: Reporter
    saver: Saver
    plotter: LossPlotter
    profiler: Profiler
    signals: StopSignals

    def close(self):
        for part in (self.loader, self.saver, self.plotter, self.profiler, self.reporter):
            part.close()
