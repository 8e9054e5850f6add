"""Checkpoints: which one a run resumes from, what it decides and restores, how one is written."""
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runtime import plots
from runtime.cli import RunError, UserError, safe_repr
from runtime.console import Record
from runtime.files import (checkpoint_name, checkpoints, lock_folder, newest_of, readable,
                           remove_leftovers, replace_file, writable)
from runtime.muon import state_keys
from runtime.presets import PRESETS, flag_values
from runtime.weights import find_checkpoint, model_from_checkpoint, read_checkpoint

RUN_FILES = "log.txt", "metrics.csv", "loss.png", "wandb_id"       # beside the checkpoints
MODEL_SHAPE = "n_layer", "n_head", "n_embd", "block_size", "vocab_size"
KEYS = {"model", "model_config", "config", "recipe", "step", "optimizers", "scaler", "data"}


# ----------------------------------------------------------------------------- resume

def choose_checkpoint(config) -> Path | None:
    """The checkpoint that --resume asks for, or None for a new run."""
    newest = checkpoints(config.out)[-1:] if not config.overfit else []
    # torchrun --max_restarts: the same command, whose --resume never or PATH the first attempt has followed
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if newest and (config.resume == "auto" or
                   restarted and read_checkpoint(newest[0][1]).get("job") == job()):
        return newest[0][1]
    if config.resume in ("auto", "never"):
        return None
    if path := find_checkpoint(config.resume):
        return path
    raise UserError(f"--resume {config.resume} is neither a checkpoint nor a run's folder: check the path, "
                    "or start a new run from a model's weights by --init")


def job() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    older = [p.name for _, p in checkpoints(Path(path).parent) if p.name < Path(path).name]
    return (f"remove it, and the same command resumes from {older[-1]}" if older else
            "start a new run with another --out")


def state_of_run(path: Path):
    """files.readable, for wrong values inside a checkpoint that could be read."""
    errors = LookupError, TypeError, ValueError, RuntimeError, AttributeError
    return readable(path, recovery_hint(path), errors, "does not hold the state of a run")


def read_run(path: Path) -> dict:
    """A checkpoint of train_gpt2.py. UserError for any other file, and on a rank that does not find it."""
    checkpoint = read_checkpoint(path, recovery_hint(path) if path.exists() else
                                 "put --out on a file system that all machines share")
    if missing := KEYS - checkpoint.keys():
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py (it has no "
                        f"{', '.join(sorted(missing))}): start a new run from its weights by --init {path}")
    return checkpoint


def begin_or_resume(flags, explicit_flags: set[str], process, models: dict, load_model: Callable) -> tuple:
    """(flags of the run, model or None, checkpoint or None, its path). A new run begins with fresh weights or
    those of --init. A resumed one keeps the flags that it began with, where they are not given anew."""
    process.require_same(flag_values(flags))
    # rank 0 decides: without a shared file system other machines may have another newest checkpoint
    path = process.gather(process.on_all_ranks(choose_checkpoint, flags))[0]
    if not path:
        return flags, load_init(flags, explicit_flags, process, models, load_model), None, None
    checkpoint = process.on_all_ranks(read_run, path)
    asked = merge_flags(flags, explicit_flags, checkpoint, path)
    return asked, model_from_checkpoint(checkpoint, path, models, recovery_hint(path)), checkpoint, path


def merge_flags(config, explicit_flags: set[str], checkpoint: dict, path: Path):
    """`config` with what the checkpoint's run was asked for in place of flags that are not given. UserError
    for one given, explicitly or by --preset, that may not change, and for a step beyond --max_steps."""
    known = {f.name: f for f in dataclasses.fields(config) if not f.metadata.get("per_run")}
    with state_of_run(path):
        before = {name: value for name, value in checkpoint["config"].items() if name in known}
        for name, value in before.items():
            meta = known[name].metadata
            kind = meta.get("type", known[name].type)
            if value is None or value != meta.get("word") and (
                    type(value) not in {kind, int if kind is float else kind}
                    or value not in meta.get("choices", [value])
                    or before["recipe"] not in meta.get("recipes", [before["recipe"]])):
                raise ValueError(f"its config says {name} = {safe_repr(value)}")
        shape = {name: checkpoint["model_config"][name] for name in MODEL_SHAPE}
        if before["recipe"] != checkpoint["recipe"] or any(type(n) is not int for n in shape.values()):
            raise ValueError("its config does not fit its model's")
        step = checkpoint["step"]
        if type(step) is not int or not 0 <= step < 2**40:
            raise ValueError(f"its step is {safe_repr(step)}")
    given = explicit_flags
    if "preset" in explicit_flags:              # with --init the model's shape won over the preset's
        given = given | PRESETS[config.preset][1].keys() - (
            shape.keys() if config.init != "scratch" else set())
    for name in sorted(given & before.keys()):
        now, had = getattr(config, name), before[name]
        if known[name].metadata.get("fixed") and now not in (had, checkpoint["model_config"].get(name, had)):
            raise UserError(f"{path} was trained with --{name} {had}, not {now}: give the same, or start a "
                            "new run with another --out")
    kept = {name: value for name, value in before.items() if name not in explicit_flags}
    merged = dataclasses.replace(config, **kept | shape)
    if step > merged.max_steps:
        raise UserError(f"{path} is at step {step}, beyond --max_steps {merged.max_steps}: give more steps, "
                        "or --resume an earlier checkpoint")
    return merged


def load_init(config, explicit_flags: set[str], process, models: dict, load_model: Callable):
    """The model of --init, None for scratch. UserError if another recipe's, or if a flag contradicts it."""
    if config.init == "scratch":
        return None
    model = process.rank0_first(load_model, config.init)
    recipe = next(name for name, cls in models.items() if type(model) is cls)
    has = model_shape(model) | {"recipe": recipe}
    for name, value in has.items():
        if getattr(config, name) != value and name in explicit_flags | {"recipe"}:
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, whose model "
                            f"has {value}: give that")
    if "window" in explicit_flags and hasattr(model.config, "window"):
        model.config.window = 0 if config.window == "auto" else config.window       # any fits the weights
    return model


def model_shape(model) -> dict:
    return {name: getattr(model.config, name) for name in MODEL_SHAPE} if model else {}


def check_data(data: dict, checkpoint: dict | None, path: Path | None, folder: str, process) -> None:
    """UserError unless `data`, the fingerprints of each split's shards, are the same on all ranks, and those
    of training the ones of the checkpoint's run."""
    process.require_same({f"the content of --data {folder}": data})
    if not checkpoint:
        return
    with state_of_run(path):
        before = [(safe_repr(name), n, safe_repr(digest)) for name, n, digest in checkpoint["data"]["train"]]
        if not all(type(n) is int and 0 < n < 2**63 for _, n, _ in before):
            raise ValueError("its shards have no lengths")
    for had, has in zip_longest(before, data["train"], fillvalue=("none", 0, "-")):
        if had[1:] != tuple(has[1:]):
            raise UserError(f"{path} was trained on other shards than {folder} has: the first that differs "
                            f"was {had[0]} ({had[1]:,} tokens, digest {had[2]}) and is {has[0]} ({has[1]:,}, "
                            f"{has[2]}). Bring the old data back, or start a new run from these weights: "
                            f"--init {path} --out ANOTHER")


def restore(run, checkpoint: dict, path: Path) -> None:
    """Moments, scaler and step; the model was built with the checkpoint's weights."""
    with state_of_run(path):
        load_state(run.optimizers, checkpoint["optimizers"])
        if run.scaler.is_enabled() and (saved := checkpoint["scaler"]):
            scale, steps = saved["scale"], saved["_growth_tracker"]
            if (type(scale), type(steps)) != (float, int) or not (
                    0 < scale < math.inf and 0 <= steps < 2**31):
                raise ValueError(f"its scale is {safe_repr(scale)}, since {safe_repr(steps)} steps")
            run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": scale, "_growth_tracker": steps})
    run.step = checkpoint["step"]


def load_state(optimizers: list, saved: dict) -> None:
    """Loads {parameter's name: {key: tensor}}, of the parameters whose moments this rank holds. ValueError
    for the state of another model or optimizer, or numbers that are not finite."""
    for optimizer in optimizers:
        keys, state = state_keys(optimizer), {}
        named = [pair for group in optimizer.param_groups
                 for pair in zip(group["param_names"], group["params"], strict=True)]
        for i, (name, p) in enumerate(named):
            if getattr(optimizer, "owner", {}).get(p, rank()) != rank():
                continue
            state[i] = {key: saved[name][key].clone() for key in keys}          # out of the mapped file
            for key, value in state[i].items():
                if value.shape != (() if key == "step" else p.shape) or not value.isfinite().all():
                    raise ValueError(f"its optimizer's {key} of {name} does not fit")
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ----------------------------------------------------------------------------- save

def gather_state(run) -> dict:
    """What load_state takes, complete on rank 0, in the CPU's memory. All ranks call it. A parameter with an
    owner has its moments on that rank alone: Muon's always, the others' with --shard_optimizer."""
    owner = run.owner | {p: r for o in run.optimizers for p, r in getattr(o, "owner", {}).items()}
    keys = {p: state_keys(o) for o in run.optimizers for group in o.param_groups for p in group["params"]}
    state = {p: values for o in run.optimizers for p, values in o.state.items()}
    gathered = {}
    for name, p in run.model.named_parameters():
        holder = owner.get(p, 0)
        for key in keys.get(p, ("step", "exp_avg", "exp_avg_sq")):      # Adam's, where others hold them
            tensor = state[p][key] if holder in (0, rank()) and p in state else (
                p.new_empty(() if key == "step" else p.shape))
            if holder != 0:
                dist.broadcast(tensor, holder)
            if rank() == 0:
                gathered.setdefault(name, {})[key] = tensor.to("cpu")
    return gathered


def weights_digest(model: torch.nn.Module) -> int:
    """A sum of the weights' bits: ranks that have drifted apart differ in it."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in model.parameters()]).sum().item()


def host_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, those that share memory (embedding and head) once."""
    copies = {t.data_ptr(): t.to("cpu") for t in tensors.values()}
    return {name: copies[t.data_ptr()] for name, t in tensors.items()}


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically, unless a number in it is not finite, and removes older ones
    than the newest `keep` (a number or "all"), but not the best. `background`: by a thread, while training
    continues; what it is given must then be copies."""

    def __init__(self, out: str, keep: int | str, background: bool, say: Callable[[str], None]):
        self.out, self.keep, self.background, self.say = Path(out), keep, background, say
        self.thread, self.pending = ThreadPoolExecutor(1, "checkpoint"), None

    def write(self, content: dict, record) -> None:
        """Waits for the file before; this one is there when `finish` has returned. `record`: knows the best
        step, and is on the disk before a checkpoint that continues it."""
        self.finish()
        record.sync()
        _, best = record.best([step for step, _ in checkpoints(self.out)]) or (None, None)
        self.pending = self.thread.submit(self._write, content, best)
        if not self.background:
            self.finish()

    def _write(self, content, best):
        began, path = time.perf_counter(), self.out / checkpoint_name(content["step"])
        tensors = [*content["model"].items(), *((f"{key} of {name}", t) for name, state in
                                                content["optimizers"].items() for key, t in state.items())]
        for name, tensor in tensors:
            if not tensor.isfinite().all():
                raise RunError(f"after step {content['step']}, {name} is not finite: {path.name} is not "
                               f"saved. {newest_of(self.out)}; lower --max_lr if it happens again")
        replace_file(path, lambda file: torch.save(content, file))
        kept = checkpoints(self.out)[:-self.keep] if self.keep != "all" else []
        for step, old in kept:
            if step != best and step < content["step"]:
                with writable(old, begun=True):
                    old.unlink(missing_ok=True)
        self.say(f"saved {path} in {time.perf_counter() - began:.1f} s")

    def finish(self) -> None:
        """Waits for the file. Raises what its writing raised."""
        if pending := self.pending:
            self.pending = None
            pending.result()


def move_aside(out: str | Path, path: Path | None, step: int) -> str:
    """Moves what is not of the run that resumes from `path` at `step`, or starts anew, from `out` to
    OUT/previous_N: files of a run by their names, and nothing else. Of the run that is resumed these are the
    later checkpoints, with copies of its logs. Returns a line about it, '' if there was nothing."""
    out = Path(out)
    inside = path is not None and path.resolve().parent == out.resolve()
    later = [p for s, p in checkpoints(out) if not inside or s > step]
    files = [p for name in RUN_FILES if (p := out / name).is_file()]
    remove_leftovers(out, rf"checkpoint_\d+\.pt|{'|'.join(RUN_FILES)}")
    if not later and (inside or not files):
        return ""
    folder = next(p for n in range(1, 10**6) if not os.path.lexists(p := out / f"previous_{n}"))
    folder.mkdir()
    for p in files:
        shutil.copy(p, folder) if inside else p.rename(folder / p.name)
    for p in later:
        p.rename(folder / p.name)
    return f"{len(files + later)} files of an earlier run in {out} are now in {folder}"


def open_output(run, path: Path | None) -> None:
    """On rank 0: locks --out, moves what is of another run out of the way, and opens the logs."""
    config, process = run.config, run.process
    if not process.is_master:
        return
    run.lock = lock_folder(config.out)
    if line := move_aside(config.out, path, run.step):
        process.print0(line)
    run.record = Record(config.out, run.step, config.total_batch_size, vars(config), config.wandb)
    run.known = tuple(kind for kind in ("val", "hella") if run.record.value(run.step, kind) is not None)
    run.saver = Saver(config.out, config.keep_checkpoints, process.device != "cpu", process.print0)


@contextmanager
def outputs(run):
    """Around the loop: at its end, however it ends, what is being written is completed and closed."""
    try:
        yield
    finally:
        run.batches.close()
        if run.record:
            try:
                run.saver.finish()
            finally:
                run.record.close()
                plots.finish()
