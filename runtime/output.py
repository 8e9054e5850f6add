"""The folder --out of a run: metrics.csv, checkpoints, loss.png; and Weights & Biases."""
import itertools
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
from runtime.cli import RunError, UserError, brief_error, error_of_the_system, print_error
from runtime.files import (
    checkpoints,
    is_there,
    lock_folder,
    naming,
    read_text,
    reading,
    remove_leftovers,
    replace_file,
    sync,
    what_resumes,
)
from runtime.metrics import FORMATS, HEADER, REMEDY, Metrics, line_of, read_lines
from runtime.plots import plot_run

# What a run writes beside its checkpoints.
RUN_FILES = ("metrics.csv", "loss.png", "wandb_id")
PICTURE_SECONDS = 60.0          # at least, between two pictures of a run


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
        self.lock = None                # the locked file; None: nothing is written
        self.metrics = Metrics()
        self.table = None               # metrics.csv, where it is open for writing
        self.row = None                 # {column: text} of the last row, until it is in the file
        self.wandb = None
        self.picture_due = 0.0          # when draw_losses may make the next loss.png

        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending = None             # the Future of the checkpoint that is being written
        self.extras = set()             # steps saved for their loss alone, beside the periods

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

        self.continue_metrics(start.step)
        if self.config.wandb:
            self.wandb = open_wandb(self.out.resolve(), vars(self.config), resumes=start.step > 0)

    # ------------------------------------------------------------------------- metrics.csv

    def continue_metrics(self, step: int) -> None:
        """Makes metrics.csv anew, with the rows that it has up to `step`.

        Of a row of `step` itself the evaluations stay: the step will be trained again.
        """
        path = self.out / "metrics.csv"
        lines = {}
        if step > 0 and is_there(path):
            with reading(path, REMEDY):
                lines = {s: line for s, line in read_lines(path).items() if s <= step}
                for line in lines.values():
                    self.metrics.add_line(line)
        elif checkpoints(self.out):
            self.process.print0(
                f"{self.out} has checkpoints, but no metrics.csv with their validation losses: the "
                f"checkpoints up to step {step} stay, because one of them may be the best")

        if step in lines:
            for name in ("train", "lr", "norm", "tokens_per_second"):
                self.metrics.set(name, math.nan)
            lines[step] = line_of(self.last_row())
        lines = itertools.chain([HEADER], lines.values())
        replace_file(path, lambda file: file.writelines(f"{line}\n".encode() for line in lines))

    @property
    def seconds(self) -> float:
        """The time of all steps so far."""
        # The `seconds` of a row do not include its own step. If that was trained, its time is added
        # here: its tokens divided by its rate.
        if not self.metrics:
            return 0.0
        last = self.metrics[-1]
        rate = last["tokens_per_second"]
        if rate is None:
            return last["seconds"]
        tokens = self.tokens_before(last["step"] + 1) - self.tokens_before(last["step"])
        return last["seconds"] + tokens / rate

    def add(self, step: int, **cells: float) -> None:
        """Records cells of the row of `step`: those of its evaluations, then those of its training.

        The row is written when it has them all, so that a kill leaves no half of one; or before, if
        a checkpoint of the step is saved.
        """
        if self.lock is None:
            return
        if self.wandb:
            self.wandb.log(cells, step=step)
        if self.has_row(step) and self.row is None:
            self.reopen_row()
        if not self.has_row(step):
            self.end_row()
            cells = dict(step=step, tokens=self.tokens_before(step), seconds=self.seconds) | cells
            self.metrics.add_row()
            self.row = {}
        for name, value in cells.items():
            self.row[name] = format(value, FORMATS[name])
            self.metrics.set(name, float(self.row[name]))
        if "train" in cells:
            self.end_row()

    def was_evaluated(self, step: int) -> bool:
        """Whether the last row is that of this step, and has its evaluations."""
        if not self.has_row(step):
            return False
        last = self.metrics[-1]
        return last["val"] is not None or last["hella"] is not None

    def has_row(self, step: int) -> bool:
        """Whether the last row is that of this step."""
        return len(self.metrics) > 0 and self.metrics[-1]["step"] == step

    def is_lowest(self, step: int) -> bool:
        """Whether the validation loss of this step is the lowest of the run so far."""
        best = self.metrics.lowest()
        return best is not None and best[1] == step

    def end_row(self) -> None:
        """Writes the last row, if it is not in the file yet."""
        if self.row is None:
            return
        path = self.out / "metrics.csv"
        with naming(path):
            if self.table is None:
                # Not "a", which would begin a new file where the disk with this one is away.
                self.table = open(path, "r+", newline="\n")
                self.table.seek(0, os.SEEK_END)
            print(line_of(self.row), file=self.table, flush=True)
        self.row = None

    def last_row(self) -> dict[str, str]:
        """{column: text} of the cells of the last row that are not empty."""
        cells = self.metrics[-1].items()
        return {name: format(value, FORMATS[name]) for name, value in cells if value is not None}

    def reopen_row(self) -> None:
        """Takes the last row out of the file again, for what else its step measures."""
        # Not by a truncate, which not all file systems have: s3fs would keep both rows.
        self.close_table()
        self.row = self.last_row()
        path = self.out / "metrics.csv"
        with naming(path):
            text = path.read_bytes()
        end_of_others = text[:-1].rfind(b"\n") + 1
        replace_file(path, lambda file: file.write(text[:end_of_others]))

    def close_table(self) -> None:
        """Puts metrics.csv onto the disk. What mounts a bucket uploads a file when it is closed."""
        table, self.table = self.table, None
        if table:
            with naming(table.name), table:
                sync(table.fileno())

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
            plot_run(self.metrics, path, title)
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

        # After a loss of power no checkpoint may be newer than the record that it continues.
        self.end_row()
        self.close_table()

        old = self.superfluous_after(content["step"])
        self.pending = self.executor.submit(self._write, content, old)
        if self.process.device == "cpu":
            self.finish_save()

    def superfluous_after(self, step: int) -> list[Path]:
        """The checkpoints to remove when the one of `step` is there."""
        if self.is_lowest(step):
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

    def _write(self, content, old):
        began = time.perf_counter()
        path = self.out / f"checkpoint_{content['step']:06d}.pt"
        refuse_non_finite(content, path)
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
    if not resumes or not is_there(path):
        replace_file(path, lambda file: file.write(uuid.uuid4().hex.encode()))
    wandb.init(name=out.name, config=config, id=read_text(path), resume="allow")
    return wandb
