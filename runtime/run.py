"""What the training loop works with."""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.checkpoint import Saver, TrainState
from runtime.console import Reporter
from runtime.dataloader import Data, TokenLoader
from runtime.distributed import Process
from runtime.log import Profiler
from runtime.plots import LossPlotter
from runtime.resume import derived_flags, open_output
from runtime.signals import StopSignals


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


def open_run(config, asked, path: Path | None, process: Process, state: TrainState, compiled: Callable,
             wrapped: Callable, autocast: torch.autocast, loader: TokenLoader, data: Data,
             hella: list) -> Run:
    """Begins to write to --out, where rank 0 moves out of the way what other runs left, and to listen to
    signals. `asked`: the config before its automatic values were replaced; `path`: of the checkpoint."""
    log = process.on_all_ranks(open_output, config, path, state, process)
    recorded = {"data": data.fingerprints(), "derived": derived_flags(asked)}
    return Run(config, process, state, compiled, wrapped, autocast, loader, data, hella,
               Reporter(config, log, state.model, process), Saver(config, recorded, log, process),
               LossPlotter(config, process), Profiler(config, process), StopSignals(process).install())
