"""From a checkpoint to the config of the run that resumes from it, and what an earlier run left in --out."""
import dataclasses
import os
import re
import shutil
import socket
from itertools import zip_longest
from pathlib import Path

import numpy as np

from runtime.cli import RunError, UserError, safe_repr
from runtime.files import (RUN_FILES, checkpoints, digest, is_redirected_to, read_text, readable,
                           remove_leftovers, writable)
from runtime.integrity import find_fault
from runtime.log import EVENT, LONGEST, Log
from runtime.presets import PRESETS
from runtime.weights import find_checkpoint, read_checkpoint

# paths and devices of a machine, and what only rank 0 or the rank itself reads
PER_RANK = {"data", "hellaswag_data", "init", "out", "device", "profile", "log_every", "plot", "wandb",
            "tensorboard"}
# values that stand for what is derived from other flags and the device
AUTOMATIC = {"sequence_length": 0, "min_lr": -1.0, "dtype": "auto", "updates_per_step": 0,
             "cooldown": 0.0}
MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
# of the two files in --out that are cut on a resume, the form of a line
LINES = {"log.txt": EVENT, "metrics.csv": r"step,tokens,.*|\d+,\d+,[^,]*(,[^,]*){6}"}


def require_same_flags(given: list[tuple[dict, set[str]]]) -> None:
    """UserError if a rank has another value of a flag than rank 0, or only one of them was given it, which
    decides on a resume. `given`: of each rank its flags and the names of those given."""
    def shown(rank, name):
        values, explicit = given[rank]
        return f"has --{name} {values[name]}" + ("" if name in explicit else " by default")
    for rank in range(1, len(given)):
        for name in sorted(given[0][0].keys() - PER_RANK):
            if shown(rank, name) != shown(0, name):
                raise UserError(f"process {rank} {shown(rank, name)}, and process 0 {shown(0, name)}: give "
                                "every machine the same")


def resumed_config(flags, explicit_flags: set[str], process) -> tuple[object, dict | None, Path | None]:
    """(config, checkpoint, its path) of the run that `flags` resume; (flags, None, None) if they begin one.
    The config's automatic values stay as they are (checks.complete_config). UserError on all ranks."""
    process.on_all_ranks(require_same_flags, process.gather((dataclasses.asdict(flags), explicit_flags)))
    # rank 0 decides: without a shared file system other machines may have another newest checkpoint
    path = process.gather(process.on_all_ranks(choose_checkpoint, flags, process.restarted))[0]
    if not path:
        return flags, None, None
    checkpoint = process.on_all_ranks(read_state, path, process)
    process.require_same("checkpoint", (str(path), digest(np.memmap(path, dtype=np.uint8, mode="r"))))
    return merge_config(flags, explicit_flags, checkpoint, path), checkpoint, path


def choose_checkpoint(config, restarted: bool = False) -> Path | None:
    """Path of the checkpoint to resume from, or None."""
    found = [path for _, path in checkpoints(config.out)]
    if config.resume == "auto":
        return found[-1] if found else None
    # after torchrun --max_restarts: the same command, whose --resume never or PATH was already applied
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if restarted and found and read_checkpoint(found[-1]).get("job") == job:
        return found[-1]
    if config.resume == "never":
        return None
    if path := find_checkpoint(config.resume):
        return path
    raise UserError(f"--resume {config.resume} is neither a checkpoint nor a run's folder here: check the "
                    "path, or start a new run from a model's weights by --init")


def read_state(path: Path, process) -> dict:
    """The dict of the checkpoint that rank 0 chose. UserError for any other file than train_gpt2.py's."""
    if not process.is_master and not path.is_file():
        raise UserError(f"the checkpoint {path} of process 0 is not there on {socket.gethostname()}: put "
                        "--out, the folder with the checkpoints, on a file system that all machines share, "
                        "or copy the checkpoint there under the same path")
    checkpoint = read_checkpoint(path, recovery_hint(path))
    keys = {"model", "model_config", "config", "recipe", "step", "optimizers", "data", "rng"}
    if missing := keys - checkpoint.keys():
        raise UserError(f"{path} is not a checkpoint of this script (it has no "
                        f"{', '.join(sorted(missing))}): {recovery_hint(path)}; or start a new run from its "
                        f"weights by --init {path}")
    return checkpoint


def merge_config(config, explicit_flags: set[str], checkpoint: dict, path: Path):
    """`config` with what the checkpoint's run had in place of flags that were not given and may not differ.
    UserError if a given flag contradicts it, and for a checkpoint beyond --max_steps."""
    fields = {f.name: f for f in dataclasses.fields(config) if not f.metadata.get("per_run")}
    with state_of_run(path):
        before = {name: value for name, value in checkpoint["config"].items() if name in fields}
        for name, value in before.items():
            kind, choices = fields[name].type, fields[name].metadata.get("choices")
            right = isinstance(value, (kind, int) if kind is float else kind)
            if not right or choices and value not in choices:
                raise ValueError(f"its config says {name} = {safe_repr(value)}")
        for name in (*MODEL_SHAPE, *({"window"} & checkpoint["model_config"].keys())):
            value = checkpoint["model_config"][name]
            if type(value) is not int or before[name] != value:
                raise ValueError(f"its two configs differ in {name}")
        if before["recipe"] != checkpoint["recipe"]:
            raise ValueError("its config says another recipe")
        # earlier checkpoints do not tell; a set would hash what may be nested without an end
        derived = [name for name in AUTOMATIC if name in checkpoint.get("derived", ())]
    given = set(PRESETS[config.preset][1]) if "preset" in explicit_flags else set()
    if config.init != "scratch":                # its shape won over the preset's in the first run, too
        given -= set(MODEL_SHAPE)
    given |= explicit_flags
    for name, f in fields.items():
        had, now = before.get(name, f.default), getattr(config, name)       # the flag may be newer
        same = now == had or name in derived and now == AUTOMATIC[name]
        if f.metadata.get("fixed") and name in given and not same:
            raise UserError(f"{path} was trained with --{name} {had}, not {now}: give the same, or start a "
                            "new run with another --out")
    # derived anew: from another --max_lr, on another device
    before |= {name: AUTOMATIC[name] for name in derived}
    taken = {name: value for name, value in before.items() if name not in explicit_flags}
    merged = dataclasses.replace(config, **taken)
    step = checkpoint["step"]                   # TrainState.load_state_dict refuses what is not a step
    if type(step) is int and merged.max_steps < step < 2**40:
        raise UserError(f"{path} is at step {step}, beyond --max_steps {merged.max_steps}: give more steps, "
                        "or --resume an earlier checkpoint")
    return merged


def derived_flags(config) -> list[str]:
    """Names of the flags whose values are to be derived from others, which a checkpoint records."""
    return [name for name, value in AUTOMATIC.items() if getattr(config, name) == value]


def check_data(checkpoint: dict, data: dict, folder: str, path: Path) -> None:
    """UserError unless the shards are still those of the checkpoint's run, in number, order and content."""
    shown = "{} ({:,} tokens, digest {})".format
    with state_of_run(path):
        for split in data.keys() & {"train", *checkpoint["data"]}:
            before, now = checkpoint["data"][split], data[split]
            if any([type(value) for value in shard] != [str, int, str] for shard in before):
                raise ValueError("it does not say which shards")
            for had, has in zip_longest(before, now, fillvalue=["none", 0, "-"]):
                if had[1:] != has[1:]:
                    raise UserError(
                        f"{path} was trained on other {split} shards: {len(before)}, and {folder} has "
                        f"{len(now)}; the first that differs was {shown(*had)} and is {shown(*has)}. Bring "
                        "the old data back, or start a new run from these weights: "
                        f"--init {path} --out ANOTHER")


def open_output(config, path: Path | None, state, process) -> Log | None:
    """On rank 0 the log in --out. What another run left there is moved, never lost."""
    if not process.is_master:
        return None
    with writable(config.out):
        if line := archive_output(config, path, state.step):
            process.print0(line)
        remove_leftovers(config.out, r"checkpoint_\d+\.pt|" + "|".join(map(re.escape, RUN_FILES)))
        return Log(config, state.step, state.evaluated)


def archive_output(config, path: Path | None, step: int) -> str:
    """Moves what does not belong to the run that resumes from `path` at `step`, or starts anew, from --out to
    OUT/previous_N: nothing is lost, and the next --resume auto does not find it. Returns a line about it, ''
    if there was nothing.

    Of the run that is resumed these are the later checkpoints; its logs, which are cut, are copied with them,
    or if they hold lines that no run has written. Of any other run it is all that has a run's file's name."""
    out = Path(config.out)
    inside = path is not None and path.resolve().parent == out.resolve()
    moved = [p for s, p in checkpoints(out) if not inside or s > step]
    files = [p for name in RUN_FILES if os.path.lexists(p := out / name) and not is_redirected_to(p)]
    copied = [p for p in files if inside and p.name in LINES]
    if not inside:
        moved = files + moved
    elif not moved and not any(map(has_other_lines, copied)):
        copied = []                     # nothing is lost when they are cut
    if not moved + copied:
        return ""
    folder = next(p for n in range(1, 10**6) if not os.path.lexists(p := out / f"previous_{n}"))
    folder.mkdir()
    for p in copied:
        shutil.copy(p, folder)
    for p in moved:
        p.rename(folder / p.name)
    names = [p.name for p in copied + moved]
    return (f"files in {out} of another run, later steps or other hands are now in {folder}: "
            f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}")


def has_other_lines(path: Path) -> bool:
    """Whether a log has a complete line that no run has written."""
    with readable(path, "move it out of the way, or choose another --out"):
        lines = read_text(path, LONGEST).splitlines(keepends=True)
    return any(line.endswith("\n") and not re.fullmatch(LINES[path.name], line.rstrip("\r\n"))
               for line in lines)


def state_of_run(path: Path):
    """files.readable, for wrong values inside a checkpoint that could be read."""
    errors = LookupError, TypeError, ValueError, RuntimeError, AttributeError
    return readable(path, recovery_hint(path), errors, "does not hold the state of a run")


def newest_of(out: str | Path) -> str:
    """What the same command does next in `out`, for the last line of a run that failed."""
    found = checkpoints(out)
    return (f"The same command resumes from {found[-1][1].name}" if found else
            "There is no checkpoint yet: the same command starts again")


def nonfinite_error(what: object, state, config, step: int, update: bool = True) -> RunError:
    """The end of a run by a loss or gradient that is not finite at `step`: `what`, then what is true of the
    weights as they are now, and what to do. `update`: whether it was one of an optimizer update."""
    if fault := find_fault(dict(state.model.named_parameters())):
        return RunError(f"{what}. {fault}, since an earlier update. {newest_of(config.out)}")
    if state.source and step == state.begun:
        return RunError(f"{what}. It is the first step since {state.source}, which may be damaged: "
                        f"{recovery_hint(state.source)}")
    cause, tolerate = "The weights are finite, but too large", ""
    if update:
        cause = "Each such update was skipped and changed no weight"
        tolerate = ", or tolerate such steps by --skip_nonfinite"
    return RunError(f"{what}. {cause}: lower --max_lr or lengthen --warmup_steps{tolerate}. "
                    f"{newest_of(config.out)}")


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    older = [p.name for _, p in checkpoints(Path(path).parent) if p.name < Path(path).name]
    if older:
        return f"remove it, and the same command resumes from {older[-1]}"
    return "start a new run with another --out"
