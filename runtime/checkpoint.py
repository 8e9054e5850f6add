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
    readable,
    remove_leftovers,
    replace_file,
    what_resumes,
    writable,
)
from runtime.optimizers import CombinedOptimizer, state_keys
from runtime.ranks import read_launch
from runtime.recipe import BatchSchedule
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint

RUN_FILES = ("log.txt", "metrics.csv", "loss.png", "wandb_id")      # beside the checkpoints
MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


# ----------------------------------------------------------------------------- where a run starts

@dataclass
class Start:
    """Where a run begins: with fresh weights, with those of --init, or where a checkpoint ended."""
    model: torch.nn.Module | None = None        # None: fresh weights
    shape: dict = field(default_factory=dict)   # {flag: value} of the shape of that model
    path: Path | None = None                    # of the checkpoint; None for a new run
    checkpoint: dict | None = None              # what it holds
    recorded: dict = field(default_factory=dict)        # {flag: value} of the run that wrote it
    step: int = 0                               # steps done


def find_start(
    flags, given: Collection[str], process, models: dict, load_model: Callable
) -> Start:
    """Where the run of these flags begins.

    `given`: the names of the flags on the command line. `models`: {recipe: class}. `load_model`
    reads the model of --init.
    """
    # Rank 0 decides: without a shared file system other machines may have another newest checkpoint.
    path = process.from_master(process.on_all_ranks(choose_checkpoint, flags))
    if path:
        return process.on_all_ranks(start_from_checkpoint, path, flags, models)

    # With another --init one rank would wait for a model that the others do not load.
    process.require_same({"--init": flags.init})
    if flags.init != "scratch":
        model = process.rank0_first(load_model, flags.init)
        process.on_all_ranks(check_init, flags, given, model, models)
        return Start(model, model_shape(model))
    return Start()


def choose_checkpoint(flags) -> Path | None:
    """The checkpoint that --resume asks for; None for a new run."""
    saved = []
    if not flags.overfit:
        saved = [path for _, path in checkpoints(flags.out)]
    if saved and (flags.resume == "auto" or restarted_by_torchrun(saved[-1])):
        return saved[-1]
    if flags.resume in ("auto", "never"):
        return None

    path = find_checkpoint(flags.resume)
    if path is None:
        raise UserError(f"--resume {flags.resume} is neither a checkpoint nor a run's folder: check "
                        "the path, or start a new run from a model's weights by --init")
    return path


def restarted_by_torchrun(newest: Path) -> bool:
    """Whether torchrun has restarted this job since the job saved the checkpoint `newest`.

    The first attempt followed --resume never or PATH. A restart goes on from where that one came to.
    """
    launch = read_launch()
    if launch.restarts == 0:
        return False
    return read_checkpoint(newest).get("job") == launch.job


def start_from_checkpoint(path: Path, flags, models: dict) -> Start:
    hint = recovery_hint(path)
    checkpoint = read_checkpoint(path, hint)
    with state_of_run(path):
        model = model_from_checkpoint(checkpoint, path, models, hint)
        recorded = recorded_flags(checkpoint["config"], flags)
        recorded.update(model_shape(model))
        if recorded["recipe"] != checkpoint["recipe"]:
            raise unexpected("its recipe", recorded["recipe"], checkpoint["recipe"])
        for name in ("step", "tokens"):
            value = checkpoint[name]
            if type(value) is not int or not 0 <= value < 2**60:
                raise unexpected(f"its {name}", "a number from 0 to 2^60", value)
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
        choices = f.metadata.get("choices", [value])
        if type(value) is not f.type or value not in choices:
            raise unexpected(f"its --{f.name}", f"a {f.type.__name__} that the flag takes", value)
    return recorded


def check_resumed_flags(start: Start, config, wanted: dict) -> None:
    """UserError for a flag that cannot change on a resume, and for a run that is beyond its end.

    `wanted`, {flag: value}: what the command line or the preset ask for.
    """
    for f in dataclasses.fields(config):
        if f.name not in wanted or f.name not in start.recorded or not f.metadata.get("fixed"):
            continue
        recorded = start.recorded[f.name]
        resolved = getattr(start.model.config, f.name, recorded)        # what "auto" came to, then
        if wanted[f.name] not in (recorded, resolved):
            raise UserError(f"{start.path} was trained with --{f.name} {recorded}, not "
                            f"{wanted[f.name]}: give the same, or start a new run with another --out")

    if start.step > config.max_steps:
        raise UserError(f"{start.path} is at step {start.step}, beyond --max_steps "
                        f"{config.max_steps}: give more steps, or --resume an earlier checkpoint")


def check_init(flags, given: Collection[str], model, models: dict) -> None:
    """UserError if the model of --init is another recipe's, or if a given flag contradicts its shape."""
    if type(model) is not models[flags.recipe]:
        raise UserError(f"--recipe {flags.recipe} contradicts --init {flags.init}, whose model has "
                        f"the recipe {model.recipe}: give --recipe {model.recipe}")
    for name, value in model_shape(model).items():
        wanted = getattr(flags, name)
        if name in given and wanted != value:
            raise UserError(f"--{name} {wanted} contradicts --init {flags.init}, whose model has "
                            f"{value}: give --{name} {value}, or leave the flag out")


def model_shape(model) -> dict:
    return {name: getattr(model.config, name) for name in MODEL_SHAPE}


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    if not path.exists():
        return "put --out on a file system that all machines share"
    others = [other.name for _, other in checkpoints(path.parent) if other != path]
    if not others:
        return "start a new run with another --out"
    return f"remove it, and the same command resumes from {others[-1]}"


def state_of_run(path: Path):
    """Around what takes values out of a checkpoint: it may be another project's, or damaged."""
    return readable(path, f"{recovery_hint(path)}, or begin with its weights by --init {path}",
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
    with state_of_run(start.path):
        trained_on = [shard[1:] for shard in checkpoint["data"]["train"]]       # without the names
        if trained_on != [shard[1:] for shard in data.train.fingerprint]:
            raise UserError(f"{start.path} was trained on other shards than {data_name} has: bring "
                            "those back, or start a new run from its weights by --init "
                            f"{start.path} --out ANOTHER")
        schedule.resume(start.step, checkpoint["tokens"])

        for name, p in start.model.named_parameters():
            if optimizer.holds(p):
                part = optimizer.optimizer_of[p]
                saved = checkpoint["optimizers"][name]
                part.state[p] = read_moments(saved, name, p, state_keys(part))
        for part in optimizer.optimizers:
            part.load_state_dict(part.state_dict())             # puts the moments on the device

        if scaler.is_enabled() and checkpoint["scaler"]:
            scale = float(checkpoint["scaler"]["scale"])
            steps = int(checkpoint["scaler"]["_growth_tracker"])
            if not (0 < scale < math.inf and 0 <= steps < 2**31):
                raise ValueError(f"its scale of float16 is {scale}, since {steps} steps")
            state = {"scale": scale, "_growth_tracker": steps}
            scaler.load_state_dict(scaler.state_dict() | state)


def read_moments(saved: dict, name: str, p: torch.Tensor, keys: tuple[str, ...]) -> dict:
    moments = {}
    for key in keys:
        if saved[key].shape != moment_shape(key, p) or not saved[key].isfinite().all():
            raise ValueError(f"its optimizer's {key} of {name} has another shape, or is not finite")
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
        part = optimizer.optimizer_of[p]
        owner = optimizer.owner.get(p, 0)
        gathered[name] = {}
        for key in state_keys(part):
            if optimizer.rank == owner and p in part.state:
                tensor = part.state[p][key]
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
    """The tensors on the CPU, those that share memory (embedding and head) once."""
    copies = {t.data_ptr(): t.to("cpu") for t in tensors.values()}
    return {name: copies[t.data_ptr()] for name, t in tensors.items()}


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically, and keeps the newest `keep` of them and the best.

    `keep` is a number or "all". With `background` a thread writes while training continues; what it
    is given must then be copies.
    """

    def __init__(self, out: Path, keep: int | str, background: bool, say: Callable[[str], None]):
        self.out = out
        self.keep = keep
        self.background = background
        self.say = say
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending = None             # the file that is being written

    def write(self, content: dict, record: Record) -> None:
        """Begins to write a checkpoint. RunError if a number in it is not finite, or it cannot be written.

        With `background` the next call, or finish, raises that error. `record` knows the best step,
        and is on the disk before a checkpoint that continues it.
        """
        self.finish()
        record.sync()
        best = lowest(record.rows, dict(checkpoints(self.out)))
        best_step = None
        if best:
            _, best_step = best
        self.pending = self.thread.submit(self._write, content, best_step)
        if not self.background:
            self.finish()

    def _write(self, content, best_step):
        began = time.perf_counter()
        path = self.out / f"checkpoint_{content['step']:06d}.pt"
        refuse_non_finite(content, path)
        with writable(self.out, begun=True):
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
            self.thread.shutdown()


def refuse_non_finite(content: dict, path: Path) -> None:
    """RunError if a weight or a moment is not finite: such a checkpoint would replace good ones."""
    tensors = dict(content["model"])
    for name, moments in content["optimizers"].items():
        for key, tensor in moments.items():
            tensors[f"{key} of {name}"] = tensor

    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise RunError(f"after step {content['step']}, {name} is not finite: {path.name} is not "
                           f"saved. {what_resumes(path.parent)}; lower --max_lr if it happens again")


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
        """Locks the folder and moves what is of another run out of the way."""
        if config.overfit or not process.is_master:
            return
        lock = lock_folder(self.out)
        if lock:
            # Not at __exit__: the files of a failed run must be closed before another run begins.
            process.at_end.callback(lock.lock.release)
        if config.resume == "auto" and choose_checkpoint(config) != start.path:
            # The other run saved it while this one was set up.
            raise RunError(f"another run has just ended in {self.out}: give the same command again")

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
    """Moves the files of an earlier run from `out` to OUT/previous_N: by their names, nothing else.

    Of a run that resumes these are its checkpoints after start.step, with copies of its logs.
    """
    remove_leftovers(out, rf"checkpoint_\d+\.pt|{'|'.join(RUN_FILES)}")
    resumes = start.path is not None and start.path.resolve().parent == out.resolve()
    logs = [out / name for name in RUN_FILES if (out / name).is_file()]
    if resumes:
        saved = [path for step, path in checkpoints(out) if step > start.step]
        needed = bool(saved)
    else:
        saved = [path for _, path in checkpoints(out)]
        needed = bool(saved or logs)
    if not needed:
        return

    folder = new_folder(out)
    for path in saved:
        shutil.move(path, folder)
    for path in logs:
        if resumes:
            shutil.copy(path, folder)
        else:
            shutil.move(path, folder)
    say(f"{len(logs + saved)} files of an earlier run in {out} are now in {folder}")


def new_folder(out: Path) -> Path:
    """Makes OUT/previous_N, with the first number that is free."""
    number = 1
    while os.path.lexists(out / f"previous_{number}"):
        number += 1
    folder = out / f"previous_{number}"
    folder.mkdir()
    return folder
