"""The validation loss."""
import math
from collections.abc import Callable

import torch

from runtime.dataloader import Data, to_device
from runtime.distributed import Process, StopSignals


@torch.no_grad()
def validation_loss(model: Callable, data: Data, batch_size: int, autocast: torch.autocast,
                    process: Process, signals: StopSignals) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks; nan after a
    signal. All batches have one shape, the last padded with ignored targets: a model compiles once."""
    count, loss_sum, rows_seen = data.val_count, torch.zeros((), device=process.device), 0
    own = process.rank * batch_size         # the first sequence of this rank; equally many batches on each
    firsts = range(own, own + count, process.world_size * batch_size)
    for first in signals.until_stop("validation", firsts, "batches"):
        if (rows := min(batch_size, count - first)) > 0:
            x, y = to_device(data.val.read(first, batch_size), process.device)
            y[rows:] = -1
            with autocast:
                loss_sum += model(x, y)[1] * rows
            rows_seen += rows
    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / rows_seen if not signals.stopped else math.nan
