"""What a checkpoint holds, and who writes it."""
import copy
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from runtime.cli import RunError, safe_repr
from runtime.files import checkpoint_name, checkpoints, replace_file, sync, writable
from runtime.integrity import check_written, find_fault
from runtime.resume import newest_of, state_of_run
from runtime.sharding import owns, shard, state_keys, whole_state
from runtime.weights import is_dense_float

SLOW = 20.0         # seconds of a save that torchrun's 30 are too few for


@dataclass
class TrainState:
    """What training changes and a checkpoint holds."""
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    step: int = 0
    evaluated: int = -1                 # the last step with all its evaluations done
    val_loss: float | None = None       # the newest, measured at step `val_step`
    val_step: int = -1
    best: tuple | None = None           # (validation loss, step) of the best checkpoint
    skipped: int = 0                    # steps with a non-finite loss or gradient
    source: Path | None = None          # the checkpoint that this process began with, at the step `begun`
    begun: int = 0
    saved: list = field(default_factory=list)           # steps of the checkpoints that this run has written

    def is_best(self) -> bool:
        """Whether the validation loss of this very step is the lowest so far."""
        measured = self.val_step == self.step and self.val_loss is not None
        return measured and (self.best is None or self.val_loss < self.best[0])

    def set_lr(self, fraction: float) -> float:
        """Sets the learning rate of every group to `fraction` of its largest, and returns it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("max_lr", group["lr"]) * fraction
        return fraction

    def state_dict(self, config, recorded):
        """What a checkpoint holds, but for the optimizers' states: plain values and tensors. `recorded`: its
        data's fingerprints and its derived flags."""
        return {
            "model": self.model.state_dict(), "model_config": asdict(self.model.config),
            "recipe": config.recipe, "config": asdict(config), **recorded,
            "step": self.step, "evaluated": self.evaluated,
            "val_loss": self.val_loss, "val_step": self.val_step, "best": self.best, "skipped": self.skipped,
            "saved": self.saved,
            "scaler": self.scaler.state_dict(),
            "rng": {"torch": torch.get_rng_state(),
                    "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []},
            "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        }

    def load_state_dict(self, checkpoint):
        """Loads all but the weights, which the model was built from. ValueError if something does not fit."""
        values = {"val_step": -1, "saved": []} | checkpoint         # not in earlier checkpoints
        step, val_loss, best = values["step"], values["val_loss"], values["best"]

        def is_step(value, first=0):
            return type(value) is int and first <= value <= step
        fits = {
            "step": is_step(step) and step < 2**40, "evaluated": is_step(values["evaluated"], -1),
            "val_loss": val_loss is None or type(val_loss) is float and math.isfinite(val_loss),
            "val_step": is_step(values["val_step"], -1),
            "best": best is None or (isinstance(best, tuple) and [*map(type, best)] == [float, int]
                                     and 0 <= best[0] < math.inf and is_step(best[1])),
            "skipped": type(values["skipped"]) is int and values["skipped"] >= 0,
            "saved": isinstance(values["saved"], list) and all(map(is_step, values["saved"]))}
        for name, fit in fits.items():
            if not fit:
                raise ValueError(f"its {name} is none that a run has at step {safe_repr(step)}")
            setattr(self, name, values[name])
        if len(checkpoint["optimizers"]) != len(self.optimizers):
            raise ValueError(f"it holds {len(checkpoint['optimizers'])} optimizers instead of "
                             f"{len(self.optimizers)}")
        updates = step * checkpoint["config"]["total_batch_size"]       # an update has one token or more
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            restore_optimizer(optimizer, saved, updates)
        if checkpoint["scaler"] and self.scaler.is_enabled():
            scale, tracker = (checkpoint["scaler"][name] for name in ("scale", "_growth_tracker"))
            if not (type(scale) is float and 0 < scale < math.inf
                    and type(tracker) is int and 0 <= tracker < 2**31):
                raise ValueError(f"its scaler says {safe_repr(scale)} and {safe_repr(tracker)}")
            self.scaler.load_state_dict(self.scaler.state_dict()
                                        | {"scale": scale, "_growth_tracker": tracker})
        torch.set_rng_state(checkpoint["rng"]["torch"])
        if torch.cuda.is_available() and len(checkpoint["rng"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(checkpoint["rng"]["cuda"])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict, updates: float) -> None:
    """Loads the saved state of each parameter whose moments this rank holds; learning rates and decay stay as
    the config says. ValueError for the state of another model or optimizer, and for numbers that no training
    makes, such as more than `updates` updates."""
    named = [pair for group in optimizer.param_groups
             for pair in zip(group["param_names"], group["params"], strict=True)]
    if [name for group in saved["param_groups"] for name in group["param_names"]] != [n for n, _ in named]:
        raise ValueError("its optimizer is one of other parameters")
    keys, state = state_keys(optimizer), {}
    for i, (name, p) in enumerate(named):
        state[i] = {key: saved["state"][i][key] for key in keys}
        for key, value in state[i].items():
            if not is_dense_float(value) or value.shape != (() if key == "step" else p.shape):
                raise ValueError(f"its optimizer's {key} of {name} does not fit")
            if key == "step" and not (0 <= value <= updates and value == value.round()):
                raise ValueError(f"its optimizer has made {value.item()} updates of {name}")
    if fault := find_fault({}, [{"state": state, "param_groups": saved["param_groups"]}]):
        raise ValueError(fault)
    state = {i: copy.deepcopy(state[i])         # out of the memory-mapped file
             for i, (_, p) in enumerate(named) if owns(optimizer, p)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def make_state(config, model: torch.nn.Module, optimizers: list, process, checkpoint: dict | None = None,
               path: Path | None = None) -> TrainState:
    """The state before the first step, or as `checkpoint` (read from `path`) holds it."""
    optimised = [id(p) for optimizer in optimizers for group in optimizer.param_groups
                 for p in group["params"]]
    parameters = sorted(map(id, model.parameters()))
    assert sorted(optimised) == parameters, "every parameter is optimised exactly once"
    if config.shard_optimizer and process.world_size > 1:
        for optimizer in optimizers:
            if not hasattr(optimizer, "owner"):                         # Muon has one of its own
                shard(optimizer, process.world_size)
    scaler = torch.amp.GradScaler(process.device.split(":")[0], enabled=config.dtype == "float16")
    state = TrainState(model, optimizers, scaler)
    if checkpoint:
        with state_of_run(path):
            state.load_state_dict(checkpoint)
        state.source, state.begun = path, state.step
    return state


def host_copy(tree):
    """The same dicts and lists with the tensors copied to the CPU, those that share memory (embedding and
    head) once. From a GPU into pinned memory, at 20 to 50 GB/s: GPT-2 124M's 1.5 GB hold the loop up for less
    than 0.1 s. At the 3 to 6 GB/s of other memory it is 0.4 s, a percent of 250 steps on eight H100s."""
    copies = {}

    def copied(tensor):
        key = tensor.data_ptr(), tensor.dtype, tensor.shape
        if key not in copies:                           # pinned, because it is asked for without blocking
            copies[key] = tensor.to("cpu", non_blocking=True, copy=True)
        return copies[key]
    return tree_map_only(torch.Tensor, copied, tree)


class Saver:
    """Writes OUT/checkpoint_STEP.pt atomically, unless a number in it is not finite, and reads it again. Then
    of the checkpoints that this run has written only the newest --keep_checkpoints and state.best's are kept.
    On CUDA a thread does this with a copy in pinned memory while training continues. On a CPU of two cores
    that cost more (3.3 to 5.2 s for GPT-2 124M) than waiting for the file (2 s)."""

    def __init__(self, config, recorded, log, process):
        self.config, self.recorded, self.log, self.process = config, recorded, log, process
        self.thread, self.pending = ThreadPoolExecutor(1, "checkpoint"), None
        self.background = process.device.startswith("cuda")
        # steps between checkpoints; with --checkpoint_minutes alone only the last step is such a one
        self.every = config.checkpoint_every or config.checkpoint_minutes and config.max_steps
        self.slow_told = False

    def save(self, state):
        """Rank 0 writes; all ranks take part, in the main thread. The file is there when `finish` has
        returned."""
        self.finish()
        begun = time.monotonic()
        copied = host_copy if self.background else lambda tensors: tensors
        optimizers = [whole_state(optimizer, copied, self.process) for optimizer in state.optimizers]
        if self.process.is_master:
            there = dict(checkpoints(self.config.out))
            state.saved = [*(step for step in state.saved if step in there and step < state.step), state.step]
            content = copied(state.state_dict(self.config, self.recorded)) | {"optimizers": optimizers}
            if self.background and torch.cuda.is_available():
                torch.cuda.synchronize()                # the copies are complete
            for file in (self.log.file, self.log.metrics) if self.log else ():
                with writable(file.name, begun=True):
                    sync(file.fileno())                 # a log never ends before its checkpoint
            self.pending = self.thread.submit(self._write, content, begun)
            if not self.background:
                self.finish()
        self.process.last_save = time.monotonic()

    def _write(self, content, begun):
        """Returns the path, and the seconds that it took."""
        out, best, keep = Path(self.config.out), content["best"], self.config.keep_checkpoints
        path = out / checkpoint_name(content["step"])
        if fault := find_fault(content["model"], content["optimizers"]):
            raise RunError(f"after step {content['step']}, {fault}: {path.name} is not saved. "
                           f"{newest_of(self.config.out)}; lower --max_lr if it happens again")
        replace_file(path, lambda file: torch.save(content, file))
        check_written(path)                     # before older ones are removed
        for step in content["saved"][:-keep]:   # none for 0
            if best is None or step != best[1]:
                try:
                    (out / checkpoint_name(step)).unlink(missing_ok=True)
                except OSError as error:                # protected by its owner, or a folder
                    self.process.print0(f"warning: {checkpoint_name(step)} is not removed ({error.strerror})")
        return path, time.monotonic() - begun

    def finish(self, wait=True):
        """Waits for the file; with wait=False only checks if it is there. Raises what the write raised."""
        if self.pending and (wait or self.pending.done()):
            pending, self.pending = self.pending, None
            path, seconds = pending.result()
            self.process.print0(f"saved {path}")
            if seconds > SLOW and "TORCHELASTIC_RUN_ID" in os.environ and not self.slow_told:
                self.slow_told = True
                self.process.print0(f"warning: that took {seconds:.0f} s, and torchrun kills its "
                                    "processes 30 s after a signal, or after its --shutdown_timeout: give it "
                                    f"--shutdown_timeout {max(110, math.ceil(2 * seconds))} or more")

    def close(self):
        self.thread.shutdown()                  # a write in progress is completed, whatever else failed
