"""Checkpoints: where a run starts, what it takes from a checkpoint, and how one is written."""
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.cli import RunError, UserError, unexpected
from runtime.console import Record, lowest
from runtime.files import (
    checkpoints,
    lock_folder,
    reading,
    remove_leftovers,
    replace_file,
    what_resumes,
    writing,
)
from runtime.optimizers import CombinedOptimizer, state_keys
from runtime.ranks import read_launch
from runtime.recipe import BatchSchedule
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint

RUN_FILES = ("log.txt", "metrics.csv", "loss.png", "wandb_id")      # beside the checkpoints
LARGEST_COUNT = 2**60           # of steps or tokens
MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


# ----------------------------------------------------------------------------- where a run starts

@dataclass
class Start:
    """Where a run begins: with fresh weights, with those of --init, or where a checkpoint ended."""
    model: torch.nn.Module | None = None        # of --init or the checkpoint; None: fresh weights
    shape: dict = field(default_factory=dict)   # {flag: value}: the model's shape
    path: Path | None = None                    # the checkpoint's; None: a new run
    checkpoint: dict | None = None              # the checkpoint's content
    recorded: dict = field(default_factory=dict)        # {flag: value} in the checkpoint
    step: int = 0                               # steps done


def find_start(
    flags, given: Collection[str], process, models: dict, load_model: Callable
) -> Start:
    """Where the run of these flags begins.

    `given`: the names of the flags on the command line. `models`: {recipe: class}. `load_model`
    reads the model of --init.
    """
    # All ranks look, so that an error on one is raised on all. Rank 0 decides: without a shared file
    # system other machines may have other checkpoints.
    path = process.from_master(process.on_all_ranks(choose_checkpoint, flags))
    if path:
        return process.on_all_ranks(start_from_checkpoint, path, flags, models)

    # If --init differed, some ranks would wait in rank0_first for others that never come.
    process.require_same({"--init": flags.init})
    if flags.init != "scratch":
        model = process.rank0_first(load_model, flags.init)
        process.on_all_ranks(check_init, flags, given, model, models)
        return Start(model, model_shape(model))
    return Start()


def choose_checkpoint(flags) -> Path | None:
    """The checkpoint that --resume asks for; None for a new run."""
    saved_paths = []
    if not flags.overfit:
        saved_paths = [path for _, path in checkpoints(flags.out)]
    if saved_paths and (flags.resume == "auto" or restarted_by_torchrun(saved_paths[-1])):
        return saved_paths[-1]
    if flags.resume in ("auto", "never"):
        return None

    path = find_checkpoint(flags.resume)
    if path is None:
        raise UserError(f"--resume {flags.resume} is neither a checkpoint nor a run's folder: check "
                        "the path, or start a new run from a model's weights with --init")
    return path


def restarted_by_torchrun(newest: Path) -> bool:
    """Whether torchrun has restarted this job since the job saved the checkpoint `newest`.

    Only a job's first attempt follows --resume never or PATH: a restart continues its own work.
    """
    launch = read_launch()
    if launch.restarts == 0:
        return False
    return read_checkpoint(newest, recovery_hint(newest)).get("job") == launch.job


def start_from_checkpoint(path: Path, flags, models: dict) -> Start:
    hint = recovery_hint(path)
    checkpoint = read_checkpoint(path, hint)
    with reading_run_state(path):
        model = model_from_checkpoint(checkpoint, path, models, hint)
        recorded = recorded_flags(checkpoint["config"], flags)
        recorded.update(model_shape(model))
        if recorded["recipe"] != checkpoint["recipe"]:
            raise unexpected("its recipe", recorded["recipe"], checkpoint["recipe"])
        for name in ("step", "tokens"):
            value = checkpoint[name]
            if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
                raise unexpected(f"its {name}", f"a number from 0 to {LARGEST_COUNT}", value)
    return Start(model, model_shape(model), path, checkpoint, recorded, checkpoint["step"])


def recorded_flags(config: dict, flags) -> dict:
    """The flags that a checkpoint recorded, without those that every start chooses anew.

    ValueError for a value of another type: the file may be damaged or hostile. Ranges are checked
    later, with those of all flags.
    """
    recorded = {}
    for f in dataclasses.fields(flags):
        if f.name not in config or f.metadata.get("per_run"):
            continue
        value = config[f.name]
        recorded[f.name] = value
        if isinstance(value, str) and value == f.metadata.get("word"):
            continue
        choices = f.metadata.get("choices")
        if type(value) is not f.type or (choices and value not in choices):
            raise unexpected(f"its --{f.name}", f"a valid {f.type.__name__}", value)
    return recorded


def check_resumed_flags(start: Start, config, wanted: dict) -> None:
    """UserError for a flag that cannot change on a resume, and for a run that is beyond its end.

    `wanted`, {flag: value}: what the command line or the preset ask for.
    """
    for f in dataclasses.fields(config):
        if f.name not in wanted or f.name not in start.recorded or not f.metadata.get("fixed"):
            continue
        # What the run's "auto" resolved to, given as a number, is no change either.
        recorded = start.recorded[f.name]
        resolved = getattr(start.model.config, f.name, recorded)
        if wanted[f.name] not in (recorded, resolved):
            raise UserError(f"{start.path} was trained with --{f.name} {recorded}, not "
                            f"{wanted[f.name]}: set --{f.name} to {recorded}, or start a new run "
                            "with another --out")

    if start.step > config.max_steps:
        raise UserError(f"{start.path} is at step {start.step}, beyond --max_steps "
                        f"{config.max_steps}: raise --max_steps, or --resume an earlier checkpoint")


def check_init(flags, given: Collection[str], model, models: dict) -> None:
    """UserError if the model of --init is another recipe's, or if a given flag contradicts its shape."""
    if type(model) is not models[flags.recipe]:
        raise UserError(f"--recipe {flags.recipe} contradicts --init {flags.init}, whose model has "
                        f"the recipe {model.recipe}: use --recipe {model.recipe}")
    for name, value in model_shape(model).items():
        wanted = getattr(flags, name)
        if name in given and wanted != value:
            raise UserError(f"--{name} {wanted} contradicts --init {flags.init}, whose model has "
                            f"{value}: use --{name} {value}, or leave the flag out")


def model_shape(model) -> dict:
    return {name: getattr(model.config, name) for name in MODEL_SHAPE}


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    if not path.exists():       # on this machine; rank 0 chose the path
        return "put --out on a file system that all machines share"
    others = [other.name for _, other in checkpoints(path.parent) if other != path]
    if not others:
        return "start a new run with another --out"
    return f"remove the file to resume from {others[-1]}"


def reading_run_state(path: Path):
    """Around code that takes values out of a checkpoint: its errors become one UserError.

    The checkpoint may be damaged, or of another project.
    """
    return reading(path, f"{recovery_hint(path)}, or train from its weights with --init {path}",
                    problem="does not hold the state of a run of train_gpt2.py")


# ----------------------------------------------------------------------- what a run takes from it

def restore(
    start: Start,
    data_name: str,
    data,
    schedule: BatchSchedule,
    optimizer: CombinedOptimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Loads everything but the weights: the position in the data, the moments, float16's scale.

    UserError if the run was trained on other shards than those of --data, by their content.
    """
    checkpoint = start.checkpoint
    with reading_run_state(start.path):
        trained_on = contents_of(checkpoint["data"]["train"])
        if trained_on != contents_of(data.train.fingerprint):
            raise UserError(f"{start.path} was trained on other shards than those in {data_name}: "
                            "restore the shards, or start a new run from its weights with --init "
                            f"{start.path} --out ANOTHER")
        schedule.resume(start.step, checkpoint["tokens"])

        for name, p in start.model.named_parameters():
            if optimizer.holds(p):
                own_optimizer = optimizer.optimizer_of[p]
                saved = checkpoint["optimizers"][name]
                own_optimizer.state[p] = read_moments(saved, name, p, state_keys(own_optimizer))
        for one in optimizer.optimizers:
            one.load_state_dict(one.state_dict())               # puts the moments on the device

        if scaler.is_enabled() and checkpoint["scaler"]:
            scale = float(checkpoint["scaler"]["scale"])
            steps = int(checkpoint["scaler"]["_growth_tracker"])
            if not (0 < scale < math.inf and 0 <= steps < 2**31):
                raise ValueError(f"its loss scale of float16: expected a number above 0, found "
                                 f"{scale} after {steps} steps")
            state = {"scale": scale, "_growth_tracker": steps}
            scaler.load_state_dict(scaler.state_dict() | state)


def contents_of(fingerprint: list) -> list:
    """[(tokens, digest)] of the shards, without their names, which may change."""
    return [(length, digest) for _, length, digest in fingerprint]


def read_moments(saved: dict, name: str, p: torch.Tensor, keys: tuple[str, ...]) -> dict:
    moments = {}
    for key in keys:
        if saved[key].shape != moment_shape(key, p):
            raise unexpected(f"the shape of its {key} of {name}", str(tuple(moment_shape(key, p))),
                             str(tuple(saved[key].shape)))
        if not saved[key].isfinite().all():
            raise ValueError(f"its {key} of {name} is not finite")
        moments[key] = saved[key].clone()                       # out of the memory-mapped file
    return moments


def moment_shape(key: str, p: torch.Tensor) -> torch.Size:
    if key == "step":
        return torch.Size()             # a single number
    return p.shape


# ----------------------------------------------------------------------- what a checkpoint holds

def gather_moments(model: torch.nn.Module, optimizer: CombinedOptimizer) -> dict:
    """{parameter's name: {key: tensor}} of all optimizers, in the CPU's memory, complete on rank 0.

    All ranks call it: the moments of a parameter that has an owner are on that rank alone.
    """
    gathered = {}
    for name, p in model.named_parameters():
        own_optimizer = optimizer.optimizer_of[p]
        owner = optimizer.owner.get(p, 0)       # without an owner all ranks have the same moments
        gathered[name] = {}
        for key in state_keys(own_optimizer):
            if optimizer.rank == owner and p in own_optimizer.state:
                tensor = own_optimizer.state[p][key]
            else:
                # Room for what the owner sends. On the owner itself there are no moments yet if
                # float16 has skipped every step so far.
                tensor = p.new_zeros(moment_shape(key, p))
            if owner != 0:
                dist.broadcast(tensor, owner)
            if optimizer.rank == 0:
                gathered[name][key] = tensor.to("cpu")
    return gathered


def weights_digest(model: torch.nn.Module) -> int:
    """A sum of the weights' bits: ranks that have drifted apart differ in it."""
    sums = [p.detach().view(torch.int32).sum() for p in model.parameters()]
    return torch.stack(sums).sum().item()


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the CPU's memory, without a copy if they are there already.

    Tensors that share memory (embedding and head) stay one.
    """
    copies = {t.data_ptr(): t.to("cpu") for t in tensors.values()}
    return {name: copies[t.data_ptr()] for name, t in tensors.items()}


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically, and keeps the newest `keep` of them and the best.

    `keep` is a number or "all". With `background` a thread writes while training continues: the
    tensors it is given must be copies.
    """

    def __init__(self, out: Path, keep: int | str, background: bool, say: Callable[[str], None]):
        self.out = out
        self.keep = keep
        self.background = background
        self.say = say
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending = None             # the Future of the checkpoint that is being written

    def write(self, content: dict, record: Record) -> None:
        """Writes a checkpoint, with `background` in a thread.

        RunError if a tensor is not finite, or if the file cannot be written. The thread's error is
        raised by the next call, or by finish.
        """
        self.finish()

        # After a loss of power no checkpoint may be newer than the record that it continues.
        record.sync()

        # The best step is the best one of those that have a file.
        best = lowest(record.rows, dict(checkpoints(self.out)))
        best_step = None
        if best:
            _, best_step = best
        self.pending = self.executor.submit(self._write, content, best_step)
        if not self.background:
            self.finish()

    def _write(self, content, best_step):
        began = time.perf_counter()
        path = self.out / f"checkpoint_{content['step']:06d}.pt"
        refuse_non_finite(content, path)
        with writing(self.out, begun=True):
            replace_file(path, lambda file: torch.save(content, file))
            self._remove_old(best_step)
        self.say(f"saved {path} in {time.perf_counter() - began:.1f} s")

    def _remove_old(self, best_step):
        if self.keep == "all":
            return
        for step, path in checkpoints(self.out)[:-self.keep]:
            if step != best_step:
                path.unlink()

    def finish(self) -> None:
        """Waits until the file is there. Raises what its writing raised."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self.executor.shutdown()


def refuse_non_finite(content: dict, path: Path) -> None:
    """RunError if a weight or a moment is not finite: such a checkpoint would replace good ones."""
    tensors = dict(content["model"])
    for name, moments in content["optimizers"].items():
        for key, tensor in moments.items():
            tensors[f"{key} of {name}"] = tensor

    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RunError(f"{name} is not finite after step {content['step']}, so {path.name} was "
                           "not saved: lower --max_lr if this happens again. "
                           f"{what_resumes(path.parent)}")


# ----------------------------------------------------------------------------- the folder --out

class Output:
    """The folder --out of a run: its lock, metrics.csv and log.txt (`record`), checkpoints (`saver`).

    Only rank 0 has them, and not with --overfit. Elsewhere `record` and `saver` are None. As a
    context manager it completes and closes its files, however the run ends.
    """

    def __init__(self, flags):
        self.flags = flags              # which checkpoints record
        self.out = Path(flags.out)
        self.record = None
        self.saver = None

    def open(self, config, start: Start, process, tokens_before: Callable[[int], int]) -> None:
        """Locks the folder, moves an earlier run's files aside, and opens `record` and `saver`."""
        if config.overfit or not process.is_master:
            return
        lock = lock_folder(self.out)
        if lock:
            # `at_end` closes after __exit__ has closed the files: the next run finds them whole.
            process.at_end.callback(lock.release)
        if config.resume == "auto" and choose_checkpoint(config) != start.path:
            # The other run saved it while this one was set up.
            raise RunError(f"another run has just ended in {self.out}: run the same command again")

        move_aside(self.out, start, process.print0)
        self.record = Record(self.out, start.step, tokens_before, vars(config), config.wandb)
        on_gpu = process.device != "cpu"                # a thread can write while the GPU trains
        self.saver = Saver(self.out, config.keep_checkpoints, on_gpu, process.print0)

    def what_resumes(self) -> str:
        """What the same command does next, after the checkpoint that is being written is complete."""
        if self.saver:
            self.saver.finish()
        return what_resumes(self.out)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            if self.saver:
                self.saver.close()
        finally:
            if self.record:
                self.record.close()


def move_aside(out: Path, start: Start, say: Callable[[str], None]) -> None:
    """Moves an earlier run's checkpoints and RUN_FILES to OUT/previous_N, and no other files.

    On a resume it moves the checkpoints after start.step, and copies the logs beside them.
    """
    remove_leftovers(out, rf"checkpoint_\d+\.pt|{'|'.join(RUN_FILES)}")
    resumes = start.path is not None and start.path.resolve().parent == out.resolve()
    logs = [out / name for name in RUN_FILES if (out / name).is_file()]
    old_checkpoints = [path for _, path in checkpoints(out)]
    if resumes:
        old_checkpoints = [path for step, path in checkpoints(out) if step > start.step]
    if not old_checkpoints and (resumes or not logs):
        return

    folder = new_folder(out)
    for path in old_checkpoints:
        shutil.move(path, folder)
    for path in logs:
        if resumes:
            shutil.copy(path, folder)
        else:
            shutil.move(path, folder)

    count = len(logs) + len(old_checkpoints)
    if count == 1:
        say(f"1 file of an earlier run in {out} is now in {folder}")
    else:
        say(f"{count} files of an earlier run in {out} are now in {folder}")


def new_folder(out: Path) -> Path:
    """Makes OUT/previous_N, with the first number that is free."""
    number = 1
    while os.path.lexists(out / f"previous_{number}"):
        number += 1
    folder = out / f"previous_{number}"
    folder.mkdir()
    return folder
