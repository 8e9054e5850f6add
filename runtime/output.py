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

from runtime.checkpoint import Start, choose_checkpoint, is_finite
from runtime.cli import RunError, UserError, brief_error, print_error
from runtime.files import (
    checkpoints,
    lock_folder,
    read_text,
    remove_leftovers,
    replace_file,
    sync,
    what_resumes,
)
from runtime.metrics import FORMATS, HEADER, as_written, lowest, read_metrics, row_line
from runtime.plots import plot_run

# What a run writes beside its checkpoints.
RUN_FILES = ("metrics.csv", "loss.png", "wandb_id")
PICTURE_SECONDS = 60.0          # at least, between two pictures of a run
CACHED_SECONDS = 60.0           # after them other machines see a new file on a network's disk


class Output:
    """What a run writes. Only rank 0 writes, and without a folder in --out nobody does.

    metrics.csv has one row for each step; a resume, the best checkpoint and the picture read it. As
    a context manager an Output completes and closes its files, however the run ends.
    """

    def __init__(self, config, process, tokens_before: Callable[[int], int]):
        self.config = config
        self.process = process
        self.tokens_before = tokens_before      # step -> the tokens of all steps before it
        self.out = Path(config.out)
        self.rows = []                  # of metrics.csv
        self.row_is_open = False        # whether the last one is not in the file yet
        self.table = None               # metrics.csv, open for writing; None: nothing is written
        self.lock = None
        self.wandb = None
        self.picture_due = 0.0          # when draw_losses may make the next loss.png

        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending = None             # the Future of the checkpoint that is being written

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

        # A row at the step where the run resumes stays open for what that step measures.
        self.rows = rows_before(self.out / "metrics.csv", start.step)
        self.row_is_open = bool(self.rows) and self.rows[-1]["step"] == start.step
        complete = self.rows[:len(self.rows) - self.row_is_open]
        text = "".join(f"{line}\n" for line in [HEADER, *map(row_line, complete)])
        replace_file(self.out / "metrics.csv", lambda file: file.write(text.encode()))
        self.table = open(self.out / "metrics.csv", "a", newline="\n")
        if self.config.wandb:
            self.wandb = open_wandb(self.out.resolve(), vars(self.config), resumes=start.step > 0)

    def warn_unless_shared(self) -> None:
        """Warns if other machines do not see the folder in which rank 0 writes: none could resume.

        All ranks call it, after `open`. On a network file system it may take CACHED_SECONDS.
        """
        machines = self.process.machines
        if not self.config.out or len(set(machines)) <= 1:
            return
        name = self.process.from_master(self.lock and Path(self.lock.name).name)
        seen = self.process.gather(wait_for(name, self.out, CACHED_SECONDS))
        blind = {machine for machine, sees in zip(machines, seen, strict=True) if not sees}
        if blind and self.process.is_master:
            print_error(f"warning: {self.out} is another folder on {', '.join(sorted(blind))}: "
                        "put --out on a file system that all machines share, or the run may not "
                        "resume")

    # ------------------------------------------------------------------------- metrics.csv

    @property
    def seconds(self) -> float:
        """The time of all steps so far."""
        # The `seconds` of a row do not include its own step. If that was trained, its time is added
        # here: its tokens divided by its rate.
        if not self.rows:
            return 0.0
        last = self.rows[-1]
        rate = last["tokens_per_second"]
        if rate is None:
            return last["seconds"]
        tokens = self.tokens_before(last["step"] + 1) - self.tokens_before(last["step"])
        return last["seconds"] + tokens / rate

    def add(self, step: int, **cells: float) -> None:
        """Records cells of the row of `step`: val and hella, and then those of its training.

        The row is written when it has them all, so that a kill leaves no half of one.
        """
        if self.table is None:
            return
        if not self.rows or self.rows[-1]["step"] != step:
            self.end_row()
            row = dict.fromkeys(FORMATS)
            row.update(step=step, tokens=self.tokens_before(step), seconds=self.seconds)
            self.rows.append(row)
        for name, value in cells.items():
            self.rows[-1][name] = as_written(name, value)
        self.row_is_open = True
        if "train" in cells:
            self.end_row()
        if self.wandb:
            self.wandb.log(cells, step=step)

    def was_evaluated(self, step: int) -> bool:
        """Whether the last row is that of this step, and has its evaluations."""
        if not self.rows or self.rows[-1]["step"] != step:
            return False
        return self.rows[-1]["val"] is not None or self.rows[-1]["hella"] is not None

    def end_row(self) -> None:
        """Writes the last row, if it is not in the file yet."""
        if self.row_is_open:
            print(row_line(self.rows[-1]), file=self.table, flush=True)
        self.row_is_open = False

    def draw_losses(self, last: bool = False) -> None:
        """Draws loss.png, at most once in PICTURE_SECONDS, and at the end (`last`).

        A failure is a warning. Without matplotlib it warns once, and does not try again.
        """
        never_again = self.picture_due == math.inf
        too_early = time.monotonic() < self.picture_due
        if self.table is None or never_again or (too_early and not last):
            return

        path = self.out / "loss.png"
        c = self.config
        self.picture_due = time.monotonic() + PICTURE_SECONDS
        try:
            plot_run(self.rows, path, f"{c.recipe}, {c.n_layer} layers of width {c.n_embd}")
        except Exception as error:
            # matplotlib raises all kinds of errors, and no run should end by a picture.
            print_error(f"warning: {path} was not drawn ({brief_error(error)})")
            if isinstance(error, ModuleNotFoundError):
                self.picture_due = math.inf

    # ------------------------------------------------------------------------- checkpoints

    def save(self, content: dict) -> None:
        """Writes OUT/checkpoint_STEP.pt atomically, and keeps the newest ones and the best.

        On a GPU a thread writes while training continues: the tensors have to be copies. Its error
        is raised by the next call, or by finish_save. RunError if a tensor is not finite.
        """
        self.finish_save()
        self.end_row()

        # After a loss of power no checkpoint may be newer than the record that it continues.
        sync(self.table.fileno())

        # The best step is the best one of those that have a file.
        best = lowest(self.rows, dict(checkpoints(self.out)))
        best_step = None
        if best:
            _, best_step = best
        self.pending = self.executor.submit(self._write, content, best_step)
        if self.process.device == "cpu":
            self.finish_save()

    def _write(self, content, best_step):
        began = time.perf_counter()
        path = self.out / f"checkpoint_{content['step']:06d}.pt"
        refuse_non_finite(content, path)
        save_atomically(path, content)

        keep = self.config.keep_checkpoints
        if keep != "all":
            for step, old in checkpoints(self.out)[:-keep]:
                if step != best_step:
                    old.unlink()
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
            self.end_row()                          # of the last evaluation
        except (RunError, OSError) as error_of_save:
            if error is None:
                error = error_of_save
        finally:
            self.executor.shutdown()
            for file in (self.table, self.lock):
                if file:
                    with suppress(OSError):         # a full disk, which `error` tells
                        file.close()
            if self.wandb:
                self.wandb.finish()

        # What ends a run gets a sentence about how it goes on.
        if isinstance(error, UserError | RunError | OSError) and self.config.out:
            text = f"{error}. {what_resumes(self.out)}"
            if isinstance(error, OSError) and error.filename is None:
                text = f"{self.out} cannot be written: {text}"
            if isinstance(error, UserError):
                raise UserError(text) from None
            raise RunError(text) from None


def wait_for(name: str, folder: Path, seconds: float) -> bool:
    """Whether the folder has this file, now or within so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):                 # the folder is not there
            if name in os.listdir(folder):      # unlike exists(), asks a network file system anew
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def rows_before(path: Path, step: int) -> list[dict]:
    """The rows of a metrics.csv that a run keeps if it resumes at `step`."""
    if step == 0 or not path.exists():
        return []
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    if rows and rows[-1]["step"] == step:
        # Its evaluations stay; the step itself will be trained again.
        rows[-1].update(train=None, lr=None, norm=None, tokens_per_second=None)
    return rows


def keep_aside(out: Path, say: Callable[[str], None]) -> None:
    """Gives the files of a run that left no checkpoint in `out` another name."""
    left = [out / name for name in RUN_FILES if (out / name).exists()]
    if not left:
        return

    number = 1
    while any(numbered(path, number).exists() for path in left):
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


def refuse_non_finite(content: dict, path: Path) -> None:
    """RunError if a weight or a moment is not finite: such a checkpoint would replace good ones.

    RunError, too, if an optimizer keeps something else than tensors and numbers in its state.
    """
    values = dict(content["model"])
    for name, state in content["optimizers"].items():
        for key, value in state.items():
            values[f"{key} of {name}"] = value

    for name, value in values.items():
        if not isinstance(value, torch.Tensor | int | float | None):
            raise RunError(f"{name} is a {type(value).__name__}, and {path.name} was not saved: an "
                           "optimizer's state may hold tensors and numbers only, each by a name")
        if not is_finite(value):
            raise RunError(f"{name} is not finite after step {content['step']}, so {path.name} was "
                           "not saved: lower --max_lr if this happens again")


def open_wandb(out: Path, config: dict, resumes: bool):
    """The package wandb, with this run started, or resumed by the id in OUT/wandb_id."""
    import wandb

    path = out / "wandb_id"
    if not resumes or not path.exists():
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    wandb.init(name=out.name, config=config, id=read_text(path), resume="allow")
    return wandb
