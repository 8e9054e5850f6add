"""The folder --out of a run: metrics.csv, checkpoints, loss.png; and Weights & Biases."""
import math
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from runtime.checkpoint import Start, check_content, choose_checkpoint
from runtime.cli import RunError, UserError, brief_error, error_of_the_system, print_error
from runtime.files import (
    checkpoints,
    is_there,
    read_text,
    remove_leftovers,
    replace_file,
    what_resumes,
)
from runtime.lock import lock_folder
from runtime.machines import error_of_lost_rank
from runtime.metrics import MetricsFile
from runtime.plots import plot_run
from runtime.recipe import BatchSchedule

# What a run writes beside its checkpoints.
RUN_FILES = ("metrics.csv", "loss.png", "wandb_id")
PICTURE_SECONDS = 60.0          # at least, between two pictures of a run


class Output:
    """What a run writes. Only rank 0 writes, and without a folder in --out nobody does.

    metrics.csv has one row for each step; a resume, the best checkpoint and the picture read it. As
    a context manager an Output completes and closes its files, however the run ends.
    """

    def __init__(self, config, process, schedule: BatchSchedule, backward_tokens: int = 0):
        self.config = config
        self.process = process
        self.out = Path(config.out)
        self.backward_tokens = backward_tokens      # read at first, for loss.png
        self.metrics = MetricsFile(self.out / "metrics.csv", schedule.tokens_before)
        self.lock = None                # the locked file; None: nothing is written
        self.wandb = None
        self.picture_due = 0.0          # when draw_losses may make the next loss.png

        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending = None             # the Future of the checkpoint that is being written
        self.extras = set()             # steps saved for their loss alone, beside the periods
        self.init_digest = None         # of the weights that the run began from

    def open(self, start: Start) -> None:
        """Locks the folder, and opens metrics.csv where the run begins or continues.

        UserError if metrics.csv is damaged.
        """
        if not self.config.out or not self.process.is_master:
            return

        self.lock = lock_folder(self.out)
        if choose_checkpoint(self.config) != start.path:
            # The other run saved a checkpoint after this one had chosen where to begin.
            raise RunError(f"another run has just ended in {self.out}: run the same command again")
        remove_leftovers(self.out, rf"checkpoint_\d+\.pt|{'|'.join(RUN_FILES)}")
        if not checkpoints(self.out):
            keep_aside(self.out, self.process.print0)

        if checkpoints(self.out) and not is_there(self.metrics.path):
            self.process.print0(
                f"{self.out} has checkpoints, but no metrics.csv with their validation losses: the "
                f"checkpoints up to step {start.step} stay, because one of them may be the best")
        self.metrics.continue_at(start.step)
        self.extras.update(start.extras)
        self.init_digest = start.init_digest
        if self.config.wandb:
            self.wandb = open_wandb(self.out.resolve(), vars(self.config), resumes=start.step > 0)

    # ------------------------------------------------------------------------- metrics.csv

    def add(self, step: int, **cells: float) -> None:
        """Records cells of the row of `step` in metrics.csv, and at Weights & Biases."""
        if self.lock is None:
            return
        if self.wandb:
            self.wandb.log(cells, step=step)
        self.metrics.add(step, **cells)

    def draw_losses(self, last: bool = False) -> None:
        """Draws loss.png, at most once in PICTURE_SECONDS, and at the end (`last`).

        A failure is a warning. Without matplotlib it warns once, and does not try again.
        """
        never_again = self.picture_due == math.inf
        too_early = time.monotonic() < self.picture_due
        if self.lock is None or never_again or (too_early and not last):
            return

        path = self.out / "loss.png"
        c = self.config
        self.picture_due = time.monotonic() + PICTURE_SECONDS
        try:
            title = f"{c.recipe}, {c.n_layer} layers of width {c.n_embd}"
            plot_run(self.metrics, path, title, self.backward_tokens)
        except Exception as error:
            # matplotlib raises all kinds of errors, and no run should end by a picture.
            print_error(f"warning: {path} was not drawn ({brief_error(error)})")
            if isinstance(error, ModuleNotFoundError):
                self.picture_due = math.inf

    # ------------------------------------------------------------------------- checkpoints

    def save(self, step: int, content: dict) -> None:
        """Writes OUT/checkpoint_STEP.pt atomically, and keeps the newest ones and the best.

        On a GPU a thread writes while training continues: the tensors have to be copies. Its error
        is raised by the next call, or by finish_save. RunError if a tensor is not finite.
        """
        self.finish_save()

        # After a loss of power no checkpoint may be newer than the record that it continues.
        self.metrics.end_row()
        self.metrics.close()

        old = self.superfluous_after(step)
        content["extras"] = sorted(self.extras)     # a resume goes on with them
        content["init_digest"] = self.init_digest
        self.pending = self.executor.submit(self._write, step, content, old)
        if self.process.device == "cpu":
            self.finish_save()

    def superfluous_after(self, step: int) -> list[Path]:
        """The checkpoints to remove when the one of `step` is there."""
        if self.metrics.is_lowest(step):
            # At the periods a checkpoint comes before the evaluation, when its loss is not known.
            self.extras.add(step)

        saved = dict(checkpoints(self.out))
        counted = [s for s in sorted({step, *saved}) if s not in self.extras]
        if self.config.keep_checkpoints != "all":
            counted = counted[-self.config.keep_checkpoints:]
        kept = {step, *counted}

        # The best of those that have a file.
        best = self.metrics.lowest({step, *saved})
        if best:
            kept.add(best[1])

        # Before the first row no losses are known: an earlier metrics.csv has been lost.
        first_row = step
        if self.metrics:
            first_row = self.metrics[0]["step"]
        return [path for s, path in saved.items() if s not in kept and s > first_row]

    def _write(self, step, content, old):
        began = time.perf_counter()
        path = self.out / f"checkpoint_{step:06d}.pt"
        check_content(content, path)
        save_atomically(path, content)
        for superfluous in old:
            superfluous.unlink(missing_ok=True)
        self.process.print0(f"saved {path} in {time.perf_counter() - began:.1f} s")

    def finish_save(self) -> None:
        """Waits until the checkpoint is there. Raises what its writing raised."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def what_resumes(self) -> str:
        """What the same command does next, once the checkpoint being written is complete."""
        if not self.config.out:
            return ""
        self.finish_save()
        return what_resumes(self.out)

    # ------------------------------------------------------------------------- the end

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.finish_save()
            self.metrics.end_row()                  # of the last evaluation
        except (RunError, OSError) as error_of_save:
            if error is None:
                error = error_of_save
        finally:
            self.executor.shutdown()
            for file in (self.metrics.file, self.lock):
                if file:
                    with suppress(OSError):         # a full disk, which `error` tells
                        file.close()
            if self.wandb:
                self.wandb.finish()

        # What ends a run gets a sentence about how it goes on.
        if isinstance(error, RuntimeError):
            error = error_of_lost_rank(self.process, error) or error
        if isinstance(error, UserError | RunError | OSError) and self.config.out:
            if isinstance(error, OSError):
                error = RunError(str(error_of_the_system(error)))
            raise type(error)(f"{error}. {what_resumes(self.out)}") from None


def keep_aside(out: Path, say: Callable[[str], None]) -> None:
    """Gives the files of a run that left no checkpoint in `out` another name."""
    left = [out / name for name in RUN_FILES if is_there(out / name)]
    if not left:
        return

    number = 1
    while any(is_there(numbered(path, number)) for path in left):
        number += 1
    for path in left:
        os.rename(path, numbered(path, number))
    say(f"{out} has no checkpoint: {left[0].name} of an earlier run is now "
        f"{numbered(left[0], number).name}")


def numbered(path: Path, number: int) -> Path:
    """metrics.csv -> metrics_1.csv."""
    return path.with_stem(f"{path.stem}_{number}")


def save_atomically(path: Path, content: dict) -> None:
    """torch.save. OSError with the path if the system cannot write it: the disk is full, say."""
    try:
        replace_file(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:
        # While torch.save handles an error of the file, it may raise "unexpected pos 64 vs 0".
        cause = error
        if not isinstance(error, OSError):
            cause = error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


def open_wandb(out: Path, config: dict, resumes: bool):
    """The package wandb, with this run started, or resumed by the id in OUT/wandb_id.

    UserError if wandb cannot be used as it is set up.
    """
    import wandb

    path = out / "wandb_id"
    if not resumes or not is_there(path):
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    try:
        wandb.init(name=out.name, config=config, id=read_text(path), resume="allow")
    except wandb.errors.UsageError as error:            # nobody has logged in, say
        raise UserError(f"--wandb: {brief_error(error)}") from None
    return wandb
