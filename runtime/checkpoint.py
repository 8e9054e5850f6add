"""Checkpoints: which one a run resumes from, what it decides and restores, how one is written."""
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.cli import RunError, UserError, safe_repr
from runtime.console import Record, lowest
from runtime.files import (checkpoints, lock_folder, newest_of, readable, remove_leftovers, replace_file,
                           writable)
from runtime.muon import ADAM_STATE, state_keys
from runtime.presets import PRESETS
from runtime.ranks import read_launch
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint

RUN_FILES = "log.txt", "metrics.csv", "loss.png", "wandb_id"       # beside the checkpoints
MODEL_SHAPE = "n_layer", "n_head", "n_embd", "block_size", "vocab_size"


def choose_checkpoint(config) -> Path | None:
    """The checkpoint that --resume asks for, or None for a new run."""
    saved = [] if config.overfit else [path for _, path in checkpoints(config.out)]
    launch = read_launch()
    # after a restart by torchrun --resume never or PATH, which the first attempt followed, means auto
    if saved and (config.resume == "auto" or launch.restarts > 0
                  and read_checkpoint(saved[-1]).get("job") == launch.job):
        return saved[-1]
    if config.resume in ("auto", "never"):
        return None
    if path := find_checkpoint(config.resume):
        return path
    raise UserError(f"--resume {config.resume} is neither a checkpoint nor a run's folder: check the path, "
                    "or start a new run from a model's weights by --init")


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    if not path.exists():
        return "put --out on a file system that all machines share"
    others = [p.name for _, p in checkpoints(path.parent) if p != path]
    return (f"remove it, and the same command resumes from {others[-1]}" if others else
            "start a new run with another --out")


def state_of_run(path: Path):
    """Around what takes values out of a checkpoint: it may be another project's, or damaged."""
    return readable(path, f"{recovery_hint(path)}, or begin with its weights by --init {path}",
                    problem="does not hold the state of a run of train_gpt2.py")


def begin_or_resume(flags, explicit_flags: set[str], process, models: dict, load_model: Callable) -> tuple:
    """(flags of the run, model or None, checkpoint or None, its path). A new run begins with fresh weights or
    those of --init. A resumed one keeps its earlier flags unless they are given again."""
    # rank 0 decides: without a shared file system other machines may have another newest checkpoint
    path = process.gather(process.on_all_ranks(choose_checkpoint, flags))[0]
    if path:
        return process.on_all_ranks(read_run, flags, explicit_flags, models, path)
    return flags, load_init(flags, explicit_flags, process, models, load_model), None, None


def read_run(config, explicit_flags: set[str], models: dict, path: Path) -> tuple:
    """What begin_or_resume returns for a run that resumes from `path`. UserError for a flag, explicit or
    preset, that may not change, and for a step beyond --max_steps."""
    checkpoint, kept = read_checkpoint(path, recovery_hint(path)), {}
    given = explicit_flags | PRESETS[config.preset][1].keys()
    if config.init != "scratch":                # then the model's shape won over the preset's
        given -= {*MODEL_SHAPE} - explicit_flags
    with state_of_run(path):
        step, before = checkpoint["step"], checkpoint["config"]
        model = model_from_checkpoint(checkpoint, path, models, recovery_hint(path))
        before = before | model_shape(model)
        for f in dataclasses.fields(config):
            if f.name in before and not f.metadata.get("per_run"):
                had, now = before[f.name], getattr(config, f.name)
                meta, recipe = f.metadata, before["recipe"]
                if (type(had) is not f.type or had not in (meta.get("choices") or [had])
                        or recipe not in meta.get("recipes", [recipe])) and had != meta.get("word", f.type):
                    raise ValueError(f"its config says {f.name} = {safe_repr(had)}")
                fits = had, getattr(model.config, f.name, had)
                if f.name in given and f.metadata.get("fixed") and now not in fits:
                    raise UserError(f"{path} was trained with --{f.name} {had}, not {now}: give the same, or "
                                    "start a new run with another --out")
                kept[f.name] = now if f.name in explicit_flags else had
        asked = dataclasses.replace(config, **kept)
        if asked.recipe != checkpoint["recipe"] or type(step) is not int or step < 0:
            raise ValueError(f"its recipe is {asked.recipe}, its step {safe_repr(step)}")
    if step > asked.max_steps:
        raise UserError(f"{path} is at step {step}, beyond --max_steps {asked.max_steps}: give more steps, "
                        "or --resume an earlier checkpoint")
    return asked, model, checkpoint, path


def load_init(config, explicit_flags: set[str], process, models: dict, load_model: Callable):
    """The model of --init, None for scratch. UserError if another recipe's, or if a flag contradicts it."""
    process.require_same({"--init": config.init})           # else one rank would wait for another's model
    if config.init == "scratch":
        return None
    model = process.rank0_first(load_model, config.init)
    named = {cls: name for name, cls in models.items()} | {models[config.recipe]: config.recipe}
    recipe = named[type(model)]                     # recipes may share a class
    for name, value in (model_shape(model) | {"recipe": recipe}).items():
        if getattr(config, name) != value and name in explicit_flags | {"recipe"}:
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, whose model "
                            f"has {value}: give that")
    if "window" in explicit_flags and hasattr(model.config, "window"):
        model.config.window = 0 if config.window == "auto" else config.window       # any fits the weights
    return model


def model_shape(model) -> dict:
    return {name: getattr(model.config, name) for name in MODEL_SHAPE} if model else {}


def restore(run, checkpoint: dict, path: Path) -> None:
    """Step, scaler, and the moments that this rank holds; the model was built with the saved weights.
    UserError if the run was trained on other shards; their names may change."""
    run.step, rank, data = checkpoint["step"], run.process.rank, run.data.fingerprints()
    with state_of_run(path):
        if [shard[1:] for shard in checkpoint["data"]["train"]] != [shard[1:] for shard in data["train"]]:
            raise UserError(f"{path} was trained on other shards than {run.config.data} has: bring those "
                            f"back, or start a new run from its weights by --init {path} --out ANOTHER")
        if run.scaler.is_enabled() and (saved := checkpoint["scaler"]):
            scale, steps = float(saved["scale"]), int(saved["_growth_tracker"])
            if not (0 < scale < math.inf and 0 <= steps < 2**31):
                raise ValueError(f"its scale is {scale}, since {steps} steps")
            run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": scale, "_growth_tracker": steps})
        for optimizer in run.optimizers:
            owner, groups = getattr(optimizer, "owner", {}), optimizer.param_groups
            for name, p in [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]:
                for key in state_keys(optimizer) if owner.get(p, rank) == rank else ():
                    value = checkpoint["optimizers"][name][key]
                    if value.shape != (() if key == "step" else p.shape) or not value.isfinite().all():
                        raise ValueError(f"its optimizer's {key} of {name} does not fit")
                    optimizer.state[p][key] = value.clone()                 # out of the mapped file
            optimizer.load_state_dict(optimizer.state_dict())               # puts them on the device


def gather_state(run) -> dict:
    """{parameter's name: {key: tensor}} of all optimizers, complete on rank 0, in the CPU's memory. All ranks
    call it: the moments of a parameter with an owner are on that rank alone."""
    owner, keys, state, gathered, rank = dict(run.owner), {}, {}, {}, run.process.rank
    for optimizer in run.optimizers:
        owner |= getattr(optimizer, "owner", {})
        keys |= {p: state_keys(optimizer) for group in optimizer.param_groups for p in group["params"]}
        state |= optimizer.state
    for name, p in run.model.named_parameters():
        holder, gathered[name] = owner.get(p, 0), {}
        for key in keys.get(p, ADAM_STATE):      # Adam's, where others hold them
            # of a parameter that was never updated, because float16 skipped every step, they are zero
            mine = rank == holder and p in state
            tensor = state[p][key] if mine else p.new_zeros(() if key == "step" else p.shape)
            if holder != 0:
                dist.broadcast(tensor, holder)
            if rank == 0:
                gathered[name][key] = tensor.to("cpu")
    return gathered


def weights_digest(model: torch.nn.Module) -> int:
    """A sum of the weights' bits: ranks that have drifted apart differ in it."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in model.parameters()]).sum().item()


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, those that share memory (embedding and head) once."""
    copies = {t.data_ptr(): t.to("cpu") for t in tensors.values()}
    return {name: copies[t.data_ptr()] for name, t in tensors.items()}


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically, and keeps the newest `keep` (a number or "all") and the best.
    `background`: by a thread, while training continues; what it is given must then be copies."""

    def __init__(self, out: str, keep: int | str, background: bool, say: Callable[[str], None]):
        self.out, self.keep, self.background, self.say = Path(out), keep, background, say
        self.thread, self.pending = ThreadPoolExecutor(1, "checkpoint"), None

    def write(self, content: dict, record) -> None:
        """`record` knows the best step, and is on the disk before a checkpoint that continues it. RunError if
        this or, with `background`, the file before could not be written, or a number is not finite."""
        self.finish()
        record.sync()
        best = lowest(record.rows, dict(checkpoints(self.out)))      # (loss, step) or None
        self.pending = self.thread.submit(self._write, content, best and best[1])
        if not self.background:
            self.finish()

    def _write(self, content, best):
        began, path = time.perf_counter(), self.out / f"checkpoint_{content['step']:06d}.pt"
        tensors = {f"{key} of {name}": t for name, state in content["optimizers"].items()
                   for key, t in state.items()} | content["model"]
        if bad := next((name for name, t in tensors.items() if not t.isfinite().all()), None):
            raise RunError(f"after step {content['step']}, {bad} is not finite: {path.name} is not saved. "
                           f"{newest_of(self.out)}; lower --max_lr if it happens again")
        with writable(self.out, begun=True):
            replace_file(path, lambda file: torch.save(content, file))
            for step, old in checkpoints(self.out)[:-self.keep] if self.keep != "all" else []:
                if step != best:
                    old.unlink()
        self.say(f"saved {path} in {time.perf_counter() - began:.1f} s")

    def finish(self) -> None:
        """Waits until the file is there. Raises what its writing raised."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        """As finish, and ends the thread."""
        try:
            self.finish()
        finally:
            self.thread.shutdown()


def move_aside(out: Path, path: Path | None, step: int, say: Callable[[str], None]) -> None:
    """Moves an earlier run's files, by their names, and nothing else from `out` to OUT/previous_N. Of the run
    that resumes from `path` at `step` these are its later checkpoints, with copies of its logs."""
    resumes = path is not None and path.resolve().parent == out.resolve()
    saved = [p for s, p in checkpoints(out) if not resumes or s > step]
    logs = [p for name in RUN_FILES if (p := out / name).is_file()]
    remove_leftovers(out, rf"checkpoint_\d+\.pt|{'|'.join(RUN_FILES)}")
    if saved or logs and not resumes:
        folder = next(p for n in range(1, 10**6) if not os.path.lexists(p := out / f"previous_{n}"))
        folder.mkdir()
        for p in saved:
            shutil.move(p, folder)
        for p in logs:
            (shutil.copy if resumes else shutil.move)(p, folder)
        say(f"{len(logs + saved)} files of an earlier run in {out} are now in {folder}")


def open_output(run, path: Path | None) -> None:
    """On rank 0: locks --out, moves what is of another run out of the way, and opens the logs."""
    config, process = run.config, run.process
    if process.is_master:
        run.lock = lock_folder(config.out)
        if run.lock:                            # None where the file system has no locks
            # not with `run`, which the error of a failed run keeps alive in a notebook
            process.at_end.callback(run.lock.lock.release)
        if config.resume == "auto" and choose_checkpoint(config) != path:       # saved while we set up
            raise RunError(f"another run has just ended in {config.out}: give the same command again")
        move_aside(Path(config.out), path, run.step, process.print0)
        run.record = Record(config.out, run.step, config.total_batch_size, vars(config), config.wandb)
        done = next((row for row in run.record.rows if row["step"] == run.step), {})
        run.logged = tuple(kind for kind in ("val", "hella") if done.get(kind) is not None)
        run.saver = Saver(config.out, config.keep_checkpoints, process.device != "cpu", process.print0)


def outputs(run) -> ExitStack:
    """Around the loop: at its end, however it ends, what is being written is completed and closed."""
    stack = ExitStack()
    for close in (run.record.close, run.saver.close) if run.record else ():
        stack.callback(close)                   # the last one first
    stack.callback(run.batches.close)
    return stack
