"""Save and resume: what a checkpoint holds, who writes it, and which one a run resumes from."""
import copy
import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.cli import UserError, safe_repr
from runtime.files import checkpoints, replace_file
from runtime.presets import PRESETS
from runtime.weights import is_dense_float, read_checkpoint

# values that stand for what is derived from other flags and the device
AUTOMATIC = {"sequence_length": 0, "min_lr": -1.0, "dtype": "auto"}
MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")


@dataclass
class TrainState:
    """What training changes and a checkpoint holds."""
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    step: int = 0
    evaluated: int = -1                 # the last step with all its evaluations done
    val_loss: float | None = None       # the newest
    best: tuple | None = None           # (validation loss, step) of the best checkpoint
    skipped: int = 0                    # steps with a non-finite loss or gradient

    def is_best(self) -> bool:
        """Whether the validation loss of this very step is the lowest so far."""
        measured = self.evaluated == self.step and self.val_loss is not None
        return measured and (self.best is None or self.val_loss < self.best[0])

    def state_dict(self, config, recorded):
        """What a checkpoint holds: plain values and tensors. `recorded`: as Plan.recorded."""
        return {
            "model": self.model.state_dict(), "model_config": asdict(self.model.config),
            "recipe": config.recipe, "config": asdict(config), **recorded,
            "step": self.step, "evaluated": self.evaluated,
            "val_loss": self.val_loss, "best": self.best, "skipped": self.skipped,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "rng": {"torch": torch.get_rng_state(),
                    "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []},
            "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        }

    def load_state_dict(self, checkpoint):
        """Loads all but the weights, which the model was built from. ValueError if something does not fit."""
        numbers = {"step": int, "evaluated": int, "skipped": int, "val_loss": float | None,
                   "best": tuple | None}
        for name, kind in numbers.items():
            if not isinstance(checkpoint[name], kind):
                raise ValueError(f"its {name} is {safe_repr(checkpoint[name])}")
            setattr(self, name, checkpoint[name])
        if not 0 <= self.step < 2**40 or self.skipped < 0:
            raise ValueError(f"its step is {self.step}")
        if self.best and [type(number) for number in self.best] != [float, int]:
            raise ValueError(f"its best is {safe_repr(self.best)}")
        if len(checkpoint["optimizers"]) != len(self.optimizers):
            raise ValueError(f"it holds {len(checkpoint['optimizers'])} optimizers instead of "
                             f"{len(self.optimizers)}")
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            restore_optimizer(optimizer, saved)
        if checkpoint["scaler"] and self.scaler.is_enabled():
            scale, tracker = (checkpoint["scaler"][name] for name in ("scale", "_growth_tracker"))
            types = type(scale) is float and type(tracker) is int
            if not types or not (0 < scale < math.inf and 0 <= tracker < 2**31):
                raise ValueError(f"its scaler says {safe_repr(scale)} and {safe_repr(tracker)}")
            self.scaler.load_state_dict(self.scaler.state_dict()
                                        | {"scale": scale, "_growth_tracker": tracker})
        torch.set_rng_state(checkpoint["rng"]["torch"])
        if torch.cuda.is_available() and len(checkpoint["rng"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(checkpoint["rng"]["cuda"])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Loads the saved state of each parameter; learning rates and decay stay as the config says.
    ValueError for the state of another model or optimizer."""
    named = [pair for group in optimizer.param_groups
             for pair in zip(group["param_names"], group["params"], strict=True)]
    names = [name for name, _ in named]
    if [name for group in saved["param_groups"] for name in group["param_names"]] != names:
        raise ValueError("its optimizer is one of other parameters")
    keys, state = getattr(optimizer, "STATE", ("step", "exp_avg", "exp_avg_sq")), {}
    for i, (name, p) in enumerate(named):
        if not isinstance(saved["state"][i], dict):
            raise ValueError(f"its optimizer holds nothing of {name}")
        state[i] = {key: saved["state"][i][key] for key in keys}
        for key, value in state[i].items():
            if not is_dense_float(value) or value.shape != (() if key == "step" else p.shape):
                raise ValueError(f"its optimizer's {key} of {name} does not fit")
    state = copy.deepcopy(state)                # out of the memory-mapped file
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def make_state(config, model: torch.nn.Module, optimizers: list, process, checkpoint: dict | None = None,
               path: Path | None = None) -> TrainState:
    """The state before the first step, or as `checkpoint` (read from `path`) holds it."""
    optimised = [id(p) for optimizer in optimizers for group in optimizer.param_groups
                 for p in group["params"]]
    parameters = sorted(map(id, model.parameters()))
    assert sorted(optimised) == parameters, "every parameter is optimised exactly once"
    scaler = torch.amp.GradScaler(process.device.split(":")[0], enabled=config.dtype == "float16")
    state = TrainState(model, optimizers, scaler)
    if checkpoint:
        with damaged_if_fails(path):
            state.load_state_dict(checkpoint)
    return state


class HostCopies:
    """Copies trees of tensors to the CPU, from a GPU into pinned memory that the next call reuses. It is
    allocated in a few large pieces: torch rounds each allocation up to a power of two, which tensor by
    tensor came to 2.5 GB for GPT-2 124M's 1.5, and to 3.1 at the next checkpoint. Each copy has a storage
    of its own, because torch.save writes a tensor's whole storage."""
    PIECE = 2**29               # bytes; the last piece only as large as it has to be

    def __init__(self):
        self.pieces = []

    def __call__(self, tree):
        """The same dicts and lists with copies of the tensors; tensors that share memory (embedding and
        head) share a copy. Valid until the next call."""
        places, sizes = {}, [0]             # of each tensor: itself, the index of its piece, the offset in it
        for key, tensor in tensors_of(tree).items():
            if sizes[-1] and sizes[-1] + tensor.nbytes > self.PIECE:
                sizes.append(0)
            places[key] = tensor, len(sizes) - 1, sizes[-1]
            sizes[-1] += -(-tensor.nbytes // 64) * 64
        if [len(piece) for piece in self.pieces] != sizes:
            self.pieces = []                # freed before others are allocated
            self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                           for size in sizes]
        copies = {}
        for key, (tensor, i, offset) in places.items():
            flat = torch.frombuffer(self.pieces[i].numpy(), dtype=tensor.dtype, count=tensor.numel(),
                                    offset=offset)
            copies[key] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace_tensors(tree, copies)


def storage_key(tensor):
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def tensors_of(tree):
    """{storage_key: tensor} of all tensors in a tree of dicts and lists."""
    if torch.is_tensor(tree):
        return {storage_key(tree): tree}
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return {key: tensor for value in values for key, tensor in tensors_of(value).items()}


def replace_tensors(tree, copies):
    if torch.is_tensor(tree):
        return copies[storage_key(tree)]
    if isinstance(tree, dict):
        return {name: replace_tensors(value, copies) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(replace_tensors(value, copies) for value in tree)
    return tree


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically; then only the newest --keep_checkpoints and state.best's
    are kept. On CUDA a thread writes from a copy in pinned memory while training continues. On a CPU of
    two cores that cost more (3.3 to 5.2 s for GPT-2 124M) than waiting for the file (2 s)."""

    def __init__(self, config, recorded, log, process):
        self.config, self.recorded, self.log, self.process = config, recorded, log, process
        self.thread, self.pending, self.copies = ThreadPoolExecutor(1, "checkpoint"), None, HostCopies()
        self.background = process.device.startswith("cuda")

    def save(self, state):
        """On rank 0. The file is there when `finish` has returned."""
        self.finish()
        if self.process.is_master:
            content = state.state_dict(self.config, self.recorded)
            if self.background:
                content = self.copies(content)
            for file in (self.log.file, self.log.metrics) if self.log else ():
                os.fsync(file.fileno())                 # a log never ends before its checkpoint
            self.pending = self.thread.submit(self._write, content)
            if not self.background:
                self.finish()

    def _write(self, content):
        path = Path(self.config.out) / f"checkpoint_{content['step']:06d}.pt"
        replace_file(path, lambda file: torch.save(content, file))
        if self.config.keep_checkpoints:
            for step, old in checkpoints(self.config.out)[:-self.config.keep_checkpoints]:
                if content["best"] is None or step != content["best"][1]:
                    old.unlink(missing_ok=True)
        return path

    def finish(self, wait=True):
        """Waits for the file; with wait=False only checks if it is there. Raises what the write raised."""
        if self.pending and (wait or self.pending.done()):
            pending, self.pending = self.pending, None
            self.process.print0(f"saved {pending.result()}")

    def close(self):
        self.thread.shutdown()                  # a write in progress is completed, whatever else failed


# -----------------------------------------------------------------------------
# resuming

def choose_checkpoint(config, restarted: bool = False) -> Path | None:
    """Path of the checkpoint to resume from, or None."""
    found = [path for _, path in checkpoints(config.out)]
    if config.resume == "auto":
        return found[-1] if found else None
    # after torchrun --max_restarts: the same command, whose --resume never or PATH was already applied
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if restarted and found and read_checkpoint(found[-1]).get("job") == job:
        return found[-1]
    return None if config.resume == "never" else Path(config.resume)


def read_state(path: Path) -> dict:
    """The dict of a checkpoint of train_gpt2.py. UserError for any other file."""
    try:
        checkpoint = read_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}: {recovery_hint(path)}" if checkpoints(path.parent)
                        else str(error)) from None
    keys = {"model", "model_config", "config", "recipe", "step", "optimizers", "data", "rng"}
    missing = keys - checkpoint.keys()
    if missing:
        raise UserError(f"{path} is not a checkpoint of this script (it has no "
                        f"{', '.join(sorted(missing))}): {recovery_hint(path)}; or start a new run from its "
                        f"weights by --init {path}")
    return checkpoint


def merge_config(config, explicit_flags: set[str], checkpoint: dict, path: Path):
    """`config` with what the checkpoint's run had in place of flags that were not given and may not differ.
    UserError if a given flag contradicts it."""
    fields = {f.name: f for f in dataclasses.fields(config)}
    with damaged_if_fails(path):
        before = {name: value for name, value in checkpoint["config"].items() if name in fields}
        for name, value in before.items():
            meta = fields[name].metadata
            kind = meta.get("type", fields[name].type)
            right = isinstance(value, (kind, int) if kind is float else kind) or value is fields[name].default
            known = "choices" not in meta or meta.get("per_run") or value in meta["choices"]
            if not right or not known:
                raise ValueError(f"its config says {name} = {safe_repr(value)}")
        for name in (*MODEL_SHAPE, *({"window"} & checkpoint["model_config"].keys())):
            value = checkpoint["model_config"][name]
            if type(value) is not int or before[name] != value:
                raise ValueError(f"its two configs differ in {name}")
        if before["recipe"] != checkpoint["recipe"]:
            raise ValueError("its config says another recipe")
        derived = checkpoint.get("derived", [])
        if not isinstance(derived, list) or not all(isinstance(name, str) for name in derived):
            raise ValueError("it does not say which flags were derived")
        # earlier checkpoints do not tell: a rate of a tenth was derived
        tenth = "derived" not in checkpoint and before["min_lr"] == before["max_lr"] / 10
        derived = AUTOMATIC.keys() & ({"min_lr"} if tenth else set(derived))
    given = set(PRESETS[config.preset][1]) if "preset" in explicit_flags else set()
    if config.init != "scratch":                # its shape won over the preset's in the first run, too
        given -= set(MODEL_SHAPE)
    given |= explicit_flags
    for name, f in fields.items():
        had = before.get(name, f.default)                       # the flag may be newer than the checkpoint
        same = getattr(config, name) in (had, AUTOMATIC[name] if name in derived else had)
        if f.metadata.get("fixed") and name in given and not same:
            raise UserError(f"{path} was trained with --{name} {had}, not {getattr(config, name)}: give the "
                            "same, or start a new run with another --out")
    taken = {name: value for name, value in before.items()
             if name not in explicit_flags and not fields[name].metadata.get("per_run")}
    for name in derived & taken.keys():         # derived anew: from another --max_lr, on another device
        taken[name] = fields[name].default
    return dataclasses.replace(config, **taken)


def check_data(checkpoint: dict, data: dict, folder: str, path: Path) -> None:
    """UserError unless the shards are still those of the checkpoint's run, in number, order and content."""
    with damaged_if_fails(path):
        for split in data.keys() & {"train", *checkpoint["data"]}:
            before, now = checkpoint["data"][split], data[split]
            if any([type(value) for value in shard] != [str, int, str] for shard in before):
                raise ValueError("it does not say which shards")
            if [shard[1:] for shard in before] == [shard[1:] for shard in now]:
                continue
            had, has = (f"{len(shards)} {split} shard(s), {sum(n for _, n, _ in shards):,} tokens"
                        for shards in (before, now))
            differ = (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a[1:] != b[1:])
            i = next(differ, min(len(before), len(now)))
            was, is_now = ("{} ({:,} tokens, digest {})".format(*shards[i]) if i < len(shards) else "none"
                           for shards in (before, now))
            raise UserError(f"{path} was trained on other data: {had}, and {folder} has {has}; the first "
                            f"that differs was {was} and is {is_now}. Bring the old data back, or start a "
                            f"new run from these weights: --init {path} --out ANOTHER")


def archive_checkpoints(config, path: Path | None, step: int) -> Path | None:
    """Moves the checkpoints in --out that do not belong to the run which resumes from `path` at `step` (or
    starts anew), with the log, into OUT/previous_N: nothing is lost, and the next --resume auto does not
    find them."""
    inside = path is not None and path.resolve().parent == Path(config.out).resolve()
    old = [p for s, p in checkpoints(config.out) if not inside or s > step]
    if not old:
        return None
    folder = next(p for n in range(1, 10**6) if not (p := Path(config.out) / f"previous_{n}").exists())
    folder.mkdir()
    for name in ("log.txt", "metrics.csv"):
        if (log := Path(config.out) / name).exists():
            shutil.copy(log, folder)
            if not inside:
                log.unlink()
    for p in old:
        p.rename(folder / p.name)
    return folder


@contextmanager
def damaged_if_fails(path: Path) -> Iterator[None]:
    """As files.readable, for wrong values inside a checkpoint that could be read."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path} does not hold the state of a run ({type(error).__name__}: "
                        f"{str(error)[:200]}): {recovery_hint(path)}") from None


def recovery_hint(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    older = [p.name for _, p in checkpoints(Path(path).parent) if p.name < Path(path).name]
    if older:
        return f"remove it, and the same command goes on from {older[-1]}"
    return "start a new run with another --out"
