"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                              the sanity run: memorise 128 tokens of Shakespeare
    python train_gpt2.py                                        FineWeb-Edu (made by `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py      the same on 8 GPUs: 19,073 steps of 2^19 tokens

The same command again goes on where the last checkpoint in --out was written.
"""
import argparse
import copy
import dataclasses
import math
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
from fineweb import (FlagParser, RunError, TokenLoader, UserError, Windows, encode, list_shards, replace_file,
                     run_command, to_device, tokenizer, whole_number)
from model import (ATTENTION, GPT, MODELS, GPTConfig, can_compile, check_attention, choose_device, choose_dtype,
                   keep_freed_memory, load_model, make_autocast, model_from_checkpoint, peak_flops, read_checkpoint)

INPUT_TXT = Path(__file__).resolve().parent / "input.txt"


# -----------------------------------------------------------------------------
# one dataclass: the flags, the log's first lines, the checkpoint's config

def flag(default, group, help, **metadata):
    return field(default=default, metadata={"group": group, "help": help, **metadata})


@dataclass
class Config:
    data: str = flag("edu_fineweb10B", "data", "folder of token shards")
    overfit: bool = flag(False, "data", "the sanity run: one batch of 4 x 32 tokens of input.txt, until it is learnt by heart")
    shuffle: bool = flag(True, "data", "permute shards and sequences each epoch by the seed; otherwise the files' order")
    val_tokens: int = flag(10_485_760, "data", "tokens of a validation, the first of the validation shards")
    hellaswag_data: str = flag("", "data", "HellaSwag examples as .jsonl (default: from the Hugging Face hub)")

    recipe: str = flag("gpt2", "model", "what is trained how", choices=list(MODELS))
    init: str = flag("scratch", "model", "scratch, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or the path of a checkpoint")
    n_layer: int = flag(12, "model", "blocks")
    n_head: int = flag(12, "model", "attention heads")
    n_embd: int = flag(768, "model", "width")
    block_size: int = flag(1024, "model", "longest sequence, tokens")
    vocab_size: int = flag(50304, "model", "rows of the embedding: 50257 padded to a multiple of 128")

    total_batch_size: int = flag(524288, "batch", "tokens an optimizer step, over all processes and micro-steps")
    batch_size: str = flag("auto", "batch", "sequences a micro-step of one process, or auto")
    sequence_length: int = flag(0, "batch", "tokens a sequence; 0: block_size")

    max_steps: int = flag(19073, "optimisation", "optimizer steps in all; 19073 are one epoch of 10 billion tokens")
    warmup_steps: int = flag(715, "optimisation", "steps of linear warm-up; GPT-3's 375 million tokens")
    max_lr: float = flag(6e-4, "optimisation", "learning rate after the warm-up")
    min_lr: float = flag(-1.0, "optimisation", "learning rate at the end of the cosine; -1: a tenth of max_lr")
    weight_decay: float = flag(0.1, "optimisation", "AdamW's decay of matrices and embeddings")
    grad_clip: float = flag(1.0, "optimisation", "largest norm of the gradient; 0 switches clipping off")
    skip_nonfinite: int = flag(0, "optimisation", "how many steps with a non-finite loss or gradient may be passed over")
    seed: int = flag(1337, "optimisation", "decides the initial weights and the order of the data")

    device: str = flag("auto", "speed", "auto, cuda, mps or cpu")
    dtype: str = flag("auto", "speed", "of the matrix products; auto: bfloat16 where the hardware has it",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, "speed", "TF32 in what stays float32, on CUDA")
    compile: bool = flag(None, "speed", "torch.compile (default: on CUDA)", type=bool)
    attention: str = flag("auto", "speed", "attention kernel; auto: torch's choice", choices=list(ATTENTION))

    val_every: int = flag(250, "evaluation and output", "steps between validations; 0: never")
    hellaswag_every: int = flag(250, "evaluation and output", "steps between HellaSwag evaluations; 0: never")
    sample_every: int = flag(250, "evaluation and output", "steps between samples of text; 0: never")
    checkpoint_every: int = flag(250, "evaluation and output", "steps between checkpoints; 0: never")
    keep_checkpoints: int = flag(3, "evaluation and output", "how many of the newest checkpoints stay, beside the best; 0: all")
    out: str = flag("log", "evaluation and output", "folder for log.txt and checkpoints")
    resume: str = flag("auto", "evaluation and output", "auto (the newest checkpoint in --out), never, or a checkpoint's path")
    wandb: bool = flag(False, "evaluation and output", "also log to Weights & Biases (pip install wandb)")


# The lecture's sanity run: 50 AdamW steps on one batch, at a constant rate.
OVERFIT = dict(vocab_size=50257, total_batch_size=4 * 32, batch_size="4", sequence_length=32, shuffle=False,
               max_steps=50, warmup_steps=0, max_lr=3e-4, min_lr=3e-4, val_every=0, hellaswag_every=0, sample_every=0,
               checkpoint_every=0, resume="never", out="log/overfit")
# What may differ between the runs that write one log; all else is taken from the checkpoint unless given as a flag.
PER_RUN = ("out", "resume", "init", "device", "batch_size", "compile", "wandb")
# What decides weights and data; it cannot change within a run.
FIXED = ("recipe", "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "total_batch_size", "sequence_length",
         "seed", "shuffle")


def parse_flags(argv=None):
    """(Config, names of the fields given as flags)."""
    parser = FlagParser(prog="train_gpt2.py", usage="train_gpt2.py [flags]", description=__doc__)
    group = None
    for f in dataclasses.fields(Config):
        name, kind = f.name, f.metadata.get("type", f.type)
        if group is None or group.title != f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        if kind is bool:
            group.add_argument(f"--{name}", dest=name, action="store_true", default=argparse.SUPPRESS, help=f.metadata["help"])
            group.add_argument(f"--no_{name}", dest=name, action="store_false", default=argparse.SUPPRESS,
                               help=f"(default: {'--' if f.default else '--no_'}{name})" if f.default is not None else None)
        else:
            group.add_argument(f"--{name}", default=argparse.SUPPRESS, choices=f.metadata.get("choices"),
                               metavar=None if "choices" in f.metadata else kind.__name__.upper(),
                               type=whole_number if kind is int else kind, help=f"{f.metadata['help']} (default {f.default})")
    given = vars(parser.parse_args(argv))           # a flag that is not given leaves no trace there
    return Config(**(OVERFIT if given.get("overfit") else {}) | given), set(given)


def check_config(config):
    """Raises UserError for what can be told from the flags alone."""
    at_least = dict(val_tokens=1, n_layer=1, n_head=1, n_embd=1, block_size=1, vocab_size=1, total_batch_size=1,
                    sequence_length=0, max_steps=1, warmup_steps=0, weight_decay=0, grad_clip=0, seed=0, val_every=0,
                    hellaswag_every=0, sample_every=0, checkpoint_every=0, keep_checkpoints=0, skip_nonfinite=0)
    for name, least in at_least.items():
        if not least <= getattr(config, name) < math.inf:
            raise UserError(f"--{name} {getattr(config, name)}: must be at least {least}")
    if not 0 < config.max_lr < math.inf or not (0 <= config.min_lr <= config.max_lr or config.min_lr == -1):
        raise UserError(f"--max_lr {config.max_lr} --min_lr {config.min_lr}: the first must be above 0, "
                        f"the second from 0 to the first")
    if config.n_embd % config.n_head:
        fitting = [n for n in range(1, config.n_embd + 1) if config.n_embd % n == 0]
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: "
                        f"give one of {', '.join(map(str, fitting))} heads")
    if config.sequence_length > config.block_size:
        raise UserError(f"--sequence_length {config.sequence_length} is longer than --block_size {config.block_size}: "
                        f"shorten the one or raise the other")
    if config.seed >= 2**63:
        raise UserError(f"--seed {config.seed}: must be below 2^63")
    if config.vocab_size > 65536:
        raise UserError(f"--vocab_size {config.vocab_size}: tokens are uint16, so 65536 is the most")
    if config.batch_size != "auto" and not (config.batch_size.isdecimal() and int(config.batch_size) > 0):
        raise UserError(f"--batch_size {config.batch_size}: give a number of sequences from 1 on, or auto")


def micro_batch(config, world_size, device):
    """Sequences a micro-step: --batch_size, or for auto the largest that divides, at most 64 on CUDA and 8 elsewhere."""
    T = config.sequence_length
    if config.total_batch_size % (T * world_size):
        low = config.total_batch_size // (T * world_size)
        near = [n * T * world_size for n in (low, low + 1) if n]
        raise UserError(f"--total_batch_size {config.total_batch_size} does not divide into sequences of {T} tokens on "
                        f"{world_size} process(es): give {' or '.join(map(str, near))}")
    rows = config.total_batch_size // (T * world_size)
    divisors = [b for b in range(1, rows + 1) if rows % b == 0]
    if config.batch_size == "auto":
        return max(b for b in divisors if b <= (64 if device.startswith("cuda") else 8))
    if int(config.batch_size) not in divisors:
        raise UserError(f"--batch_size {config.batch_size} does not divide the {rows} sequences a step of each of {world_size} "
                        f"process(es): give one of {', '.join(map(str, divisors))}, or auto")
    return int(config.batch_size)


# -----------------------------------------------------------------------------
# recipes: which model, which optimizers, which schedule. The loop asks for nothing else.

def warmup_cosine(step, config):
    """Learning rate of `step` as a fraction of the largest: linear warm-up, cosine to min_lr at max_steps (arXiv:1608.03983)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.min_lr / config.max_lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - floor)


@dataclass
class Recipe:
    model: Callable             # config -> model with fresh weights
    optimizers: Callable        # model, config -> list of optimizers; each group's `lr` is its largest
    schedule: Callable          # step, config -> fraction of the largest learning rate


RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B)
    "gpt2": Recipe(
        model=lambda c: GPT(GPTConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd)),
        optimizers=lambda model, config: model.configure_optimizers(config.max_lr, config.weight_decay),
        schedule=warmup_cosine,
    ),
}


# -----------------------------------------------------------------------------
# this process among the others

@dataclass
class Process:
    rank: int
    world_size: int
    device: str
    is_master: bool             # does the logging and the checkpoints

    def print0(self, *args):
        if self.is_master:
            print(*args, flush=True)

    def sum(self, *values):
        """Each value summed over all processes, as floats (gloo has no AVG: divide afterwards)."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device if self.device.startswith("cuda") else "cpu")
        dist.all_reduce(total)
        return total.tolist()

    @contextmanager
    def master_first(self):
        """The master goes through the body first (and fills caches), then the others."""
        if self.world_size > 1 and not self.is_master:
            dist.barrier()
        yield
        if self.world_size > 1 and self.is_master:
            dist.barrier()


def setup_process(config):
    """Joins torchrun's process group if there is one; nccl on CUDA, gloo elsewhere."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = choose_device(config.device)
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        # "high" alone; the newer fp32_precision settings beside it break torch.compile
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if device == "cpu":
        keep_freed_memory()
    if world_size > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Process(rank, world_size, device, rank == 0)


# -----------------------------------------------------------------------------
# the log and the checkpoints

class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; and wandb's, if asked for."""

    def __init__(self, config, step):
        self.wandb = None
        path = Path(config.out) / "log.txt"
        if path.exists():
            # a run that crashed wrote on after its last checkpoint: those steps come again. Evaluations
            # at the checkpoint's own step were made before it was written, and stay.
            rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
            kept = [" ".join(row) + "\n" for row in rows if len(row) == 3 and row[0].isdecimal()
                    and int(row[0]) < step + (row[1] != "train" and step > 0)]
            replace_file(path, lambda file: file.write("".join(kept).encode()))
        self.file = open(path, "a", encoding="utf-8")
        if config.wandb:
            try:
                import wandb
            except ImportError:
                raise UserError("--wandb needs the package wandb: pip install wandb, or leave the flag out") from None
            self.wandb = wandb
            wandb.init(project="gpt2", name=Path(config.out).name, config=asdict(config), resume="allow")

    def write(self, step, kind, value, **more):
        self.file.write(f"{step} {kind} {value:.6f}\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)


def checkpoints(out):
    """[(step, path)] of the whole checkpoints in `out`, oldest first."""
    found = ((re.fullmatch(r"checkpoint_(\d+)\.pt", p.name), p) for p in Path(out).glob("checkpoint_*.pt"))
    return sorted((int(m[1]), p) for m, p in found if m)


@dataclass
class State:
    """What training changes and a checkpoint holds."""
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler
    step: int = 0
    val_loss: float | None = None       # the newest
    best: tuple | None = None           # (validation loss, step) of the best checkpoint


def make_state(config, model, checkpoint, path, process):
    """The state before the first step, or as `checkpoint` holds it. Rates and decay come from the config."""
    optimizers = RECIPES[config.recipe].optimizers(model, config)
    optimised = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(optimised) == sorted(map(id, model.parameters())), "every parameter is optimised exactly once"
    state = State(model, optimizers, torch.amp.GradScaler(process.device.split(":")[0], enabled=config.dtype == "float16"))
    if checkpoint:
        try:
            for optimizer, saved in zip(optimizers, checkpoint["optimizers"], strict=True):
                saved = copy.deepcopy(saved["state"])           # out of the memory-mapped file
                optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
            if checkpoint["scaler"] and state.scaler.is_enabled():
                state.scaler.load_state_dict(checkpoint["scaler"])
            torch.set_rng_state(checkpoint["rng"]["torch"])
            state.step, state.val_loss, state.best = int(checkpoint["step"]), checkpoint["val_loss"], checkpoint["best"]
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UserError(f"{path} does not hold the state of a run ({type(error).__name__}: {str(error)[:200]}): "
                            f"remove it to go on from an older one, or start a new run with another --out") from None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]       # what the schedule's fraction multiplies
    return state


def save_checkpoint(config, state):
    """Writes OUT/checkpoint_STEP.pt whole or not at all; then only the newest --keep_checkpoints and the best stay
    (the one saved with the lowest validation loss)."""
    if state.val_loss is not None and (state.best is None or state.val_loss < state.best[0]):
        state.best = (state.val_loss, state.step)
    content = {
        "model": state.model.state_dict(), "model_config": asdict(state.model.config), "recipe": config.recipe,
        "config": asdict(config), "step": state.step, "val_loss": state.val_loss, "best": state.best,
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers], "scaler": state.scaler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []},
    }
    path = Path(config.out) / f"checkpoint_{state.step:06d}.pt"
    replace_file(path, lambda file: torch.save(content, file))
    if config.keep_checkpoints:
        for step, old in checkpoints(config.out)[:-config.keep_checkpoints]:
            if state.best is None or step != state.best[1]:
                old.unlink()
    return path


def find_checkpoint(config):
    """(path, dict) of the checkpoint to go on from, or (None, None)."""
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
    else:
        found = checkpoints(config.out)
        if not found or config.resume == "never":
            return None, None
        path = found[-1][1]
    checkpoint = read_checkpoint(path)
    missing = {"model", "model_config", "config", "recipe", "step", "optimizers"} - checkpoint.keys()
    if missing:
        raise UserError(f"--resume {path}: not a checkpoint of this script (it has no {', '.join(sorted(missing))}); "
                        f"to start a new run from its weights give --init {path}")
    return path, checkpoint


def config_of_checkpoint(config, given, checkpoint, path):
    """The flags given, and for the others what the checkpoint's run had; UserError if a given one contradicts it."""
    known = {f.name for f in dataclasses.fields(Config)}
    before = {name: value for name, value in checkpoint["config"].items() if name in known}
    for name in FIXED:
        if name in given and name in before and getattr(config, name) != before[name]:
            raise UserError(f"{path} was trained with --{name} {before[name]}, not {getattr(config, name)}: give the same, "
                            f"or start a new run with another --out")
    taken = {name: value for name, value in before.items() if name not in given and name not in PER_RUN}
    return dataclasses.replace(config, **taken)


def set_aside(out):
    """Moves an earlier run's log and checkpoints into OUT/previous_N, for --resume never loses nothing."""
    old = [path for _, path in checkpoints(out)]
    if not old:
        return None
    folder = next(p for n in range(1, 10**6) if not (p := Path(out) / f"previous_{n}").exists())
    folder.mkdir()
    for path in [*old, Path(out) / "log.txt"]:
        if path.exists():
            path.rename(folder / path.name)
    return folder


# -----------------------------------------------------------------------------
# a step, and what is looked at between steps

def train_step(model, state, loader, autocast, grad_clip, process, stop=False):
    """One optimizer step over loader.micro_steps micro-batches. Nothing here waits for the GPU.

    Returns a tensor of four numbers, the same on all processes: the mean loss over the global batch,
    the gradient's norm before clipping, the index of the first parameter whose gradient is not finite
    (-1: none), and how many processes were asked to `stop`. A step with a non-finite loss or gradient
    leaves the weights as they are.
    """
    loss_sum = torch.zeros(2, device=process.device)
    loss_sum[1] = float(stop)
    for micro_step in range(loader.micro_steps):
        x, y = loader.next_batch()
        if process.world_size > 1:      # read by DDP's forward as well as by its backward: set before both
            model.require_backward_grad_sync = micro_step == loader.micro_steps - 1
        with autocast:
            _, loss = model(x, y)
        loss = loss / loader.micro_steps
        loss_sum[0] += loss.detach()
        state.scaler.scale(loss).backward()
    if process.world_size > 1:
        dist.all_reduce(loss_sum)
    loss = loss_sum[0] / process.world_size
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    grads = [p.grad for p in model.parameters()]
    norms = torch.stack(torch._foreach_norm(grads))
    norm = torch.linalg.vector_norm(norms)
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    bad = ~norms.isfinite()
    for optimizer in state.optimizers:
        if not state.scaler.is_enabled():       # the scaler does the same with what it finds itself
            optimizer.found_inf = (bad.any() | ~loss.isfinite()).float()        # a fused step is passed over where this is 1
        state.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    state.scaler.update()
    first_bad = torch.where(bad.any(), bad.float().argmax(), -1)
    return torch.stack((loss, norm, first_bad.float(), loss_sum[1]))


@torch.no_grad()
def validation_loss(model, windows, count, batch_size, autocast, process):
    """Mean loss over the first `count` windows, the same on any number of processes. Batches have one shape (the
    last is filled up with ignored targets), so that a compiled model compiles once."""
    loss_sum, rows_seen = torch.zeros((), device=process.device), 0
    for first in range(process.rank * batch_size, count, process.world_size * batch_size):
        rows = min(batch_size, count - first)
        x, y = to_device(windows.read(first, batch_size), process.device)
        y[rows:] = -1
        with autocast:
            loss_sum += model(x, y)[1] * rows
        rows_seen += rows
    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / rows_seen


def print_samples(model, autocast, process, num_samples=4, max_new_tokens=32, prompt="Hello, I'm a language model,"):
    """Sampled on the master alone, from a generator of its own: training's random numbers stay as they are."""
    generator = torch.Generator(device=process.device).manual_seed(42)
    idx = torch.tensor([encode(prompt).tolist()] * num_samples, dtype=torch.int64, device=process.device)
    with autocast:
        rows = model.generate(idx[:, -model.config.block_size:], max_new_tokens, generator=generator)
    for i, row in enumerate(rows.tolist()):
        process.print0(f"sample {i}: {tokenizer().decode(row)}")


class Reporter:
    """Prints and logs. On CUDA a step is reported when the next one is queued, so that the GPU never waits."""

    def __init__(self, config, log, model, process):
        self.config, self.log, self.process = config, log, process
        self.flops, self.peak = model.flops_per_token(config.sequence_length), peak_flops(process.device)
        self.names = [name for name, _ in model.named_parameters()]
        self.lag = 1 if process.device.startswith("cuda") else 0
        self.pending, self.seconds, self.losses = [], [], {}
        self.skipped, self.stop = 0, False      # `stop`: some process was asked to; all learn it at the same step

    def start(self):
        """Before a step: starts the clock, unless one is still running on the GPU and the clock with it."""
        if not self.pending:
            self.clock = time.perf_counter()

    def step(self, step, numbers, lr):
        self.pending.append((step, numbers, lr))
        while len(self.pending) > self.lag:
            self._report(*self.pending.pop(0))

    def flush(self):
        while self.pending:
            self._report(*self.pending.pop(0))

    def event(self, step, kind, value, line):
        self.process.print0(line)
        if self.log:
            self.log.write(step, kind, value)

    def _report(self, step, numbers, lr):
        loss, norm, first_bad, stop = numbers.tolist()          # waits until this step is done
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        self.stop = self.stop or stop > 0
        self.losses[step] = loss
        self.seconds = [*self.seconds[-19:], dt]
        rate = self.config.total_batch_size / dt
        mfu = f"{rate * self.flops / self.peak / self.process.world_size:.1%}" if self.peak else "n/a"
        left = sorted(self.seconds)[len(self.seconds) // 2] * (self.config.max_steps - 1 - step)
        self.process.print0(f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms | "
                            f"tok/sec: {rate:.2f} | mfu: {mfu} | left: {timedelta(seconds=round(left))}")
        if self.log:
            self.log.write(step, "train", loss, norm=norm, lr=lr)
        # float16 overflows now and then: its scaler passes over those steps and lowers its scale
        if not math.isfinite(loss) or (first_bad >= 0 and self.config.dtype != "float16"):
            self.skipped += 1
            where = f"; the first gradient that is not finite is that of {self.names[int(first_bad)]}" if first_bad >= 0 else ""
            if self.skipped > self.config.skip_nonfinite:
                raise RunError(f"step {step}: loss {loss}, gradient norm {norm}{where}. The weights were not changed by it, and "
                               f"the checkpoints are as they were: lower --max_lr, lengthen --warmup_steps, or pass over such "
                               f"steps by --skip_nonfinite, and go on by the same command")
            self.process.print0(f"step {step} was passed over ({self.skipped} of --skip_nonfinite {self.config.skip_nonfinite})"
                                f"{where}")


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask for a stop after the step; a second SIGINT stops at once."""

    def __init__(self):
        self.received = None
        for name in {"SIGTERM", "SIGINT", "SIGUSR1"} & set(dir(signal)):        # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number, frame):
        # torchrun passes a terminal's SIGINT on, so that it comes twice at once: only a later one is a second one
        if self.received and number == signal.SIGINT and time.monotonic() > self.when + 1:
            os._exit(130)
        if not self.received:
            self.received, self.when = signal.Signals(number).name, time.monotonic()


# -----------------------------------------------------------------------------
# putting it together

def open_data(config):
    """(training windows, validation windows or None, number of validation windows)."""
    if config.overfit:
        text = INPUT_TXT.read_text(encoding="utf-8")
        need = config.total_batch_size + 1
        tokens = encode(text[:20 * need])[:need]                # one epoch is one batch: 4 windows of 32 tokens
        return Windows([tokens], config.sequence_length, vocab_size=config.vocab_size), None, 0
    train = Windows(list_shards(config.data, "train"), config.sequence_length, config.seed, config.shuffle, config.vocab_size)
    if not config.val_every:
        return train, None, 0
    val = Windows(list_shards(config.data, "val"), config.sequence_length, vocab_size=config.vocab_size)
    return train, val, min(val.total, max(1, config.val_tokens // config.sequence_length))


def hellaswag_batches(config, asked_for, process):
    """Fetched by the master before the first step. Not to be had: a warning, unless a flag asked for it."""
    if not config.hellaswag_every:
        return []
    with process.master_first():
        try:
            examples = hellaswag.load_examples(config.hellaswag_data or None)
        except UserError as error:
            if asked_for:
                raise UserError(f"{error} (or --hellaswag_every 0)") from None
            process.print0(f"warning: going on without HellaSwag. {error}")
            return []
    return hellaswag.make_batches(examples, config.block_size)


def load_init(config, given, process):
    """The model of --init, and the config with the shape that comes with the weights."""
    with process.master_first():
        model = load_model(config.init)
    if not isinstance(model, MODELS[config.recipe][0]):
        raise UserError(f"--init {config.init} is not a model of --recipe {config.recipe}")
    shape = {name: value for name, value in asdict(model.config).items() if name in asdict(config)}
    for name, value in shape.items():
        if name in given and getattr(config, name) != value:
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, which has {value}: "
                            f"leave the flag out")
    return model, dataclasses.replace(config, **shape)


def open_output(config, start_step, process):
    """The output folder and its log; what an earlier run left there is continued, or set aside, never lost."""
    if process.is_master:
        try:
            Path(config.out).mkdir(parents=True, exist_ok=True)
            if config.resume == "never" and (folder := set_aside(config.out)):
                process.print0(f"--resume never: the earlier run's files are now in {folder}")
            for stale in Path(config.out).glob("*.tmp"):
                stale.unlink()
            return Log(config, start_step)
        except (OSError, RunError) as error:
            raise UserError(f"--out {config.out} cannot be written ({error}): choose another folder") from None


def wrap_model(config, model, process):
    """(model for evaluation, model for training): compiled where that works, and DDP around it for several processes.

    Both share their weights with `model`, through which samples and HellaSwag go with their changing shapes.
    """
    compiled = model
    if config.compile or (config.compile is None and process.device.startswith("cuda")):
        if reason := can_compile(process.device):
            process.print0(f"warning: torch.compile does not work here ({reason}); going on in eager mode")
        else:
            compiled = torch.compile(model, dynamic=False)
    if process.world_size == 1:
        return compiled, compiled
    return compiled, DDP(compiled, device_ids=[process.device] if process.device.startswith("cuda") else None,
                         gradient_as_bucket_view=True, broadcast_buffers=False)


def print_header(config, model, compiled, loader, process):
    """The first lines of a run: where, what, and the arithmetic of the batch."""
    gpu = f" ({torch.cuda.get_device_name(process.device)})" if process.device.startswith("cuda") else ""
    process.print0(f"{process.world_size} process(es) on {process.device}{gpu}, {config.dtype}, "
                   f"{'eager' if compiled is model else 'torch.compile'}, attention {config.attention}, "
                   f"torch {torch.__version__}")
    process.print0(f"{config.recipe}: {sum(p.numel() for p in model.parameters()):,} parameters ({config.n_layer} layers, "
                   f"{config.n_head} heads, width {config.n_embd}, vocabulary {config.vocab_size})")
    tokens, epoch = config.max_steps * config.total_batch_size, loader.windows.total * loader.windows.T
    process.print0(f"{config.total_batch_size:,} tokens a step = {loader.B} x {config.sequence_length} x {loader.micro_steps} "
                   f"micro-step(s) x {process.world_size} process(es); {config.max_steps:,} steps = {tokens:,} tokens = "
                   f"{tokens / epoch:.2f} epochs")
    if config.warmup_steps > config.max_steps:
        process.print0(f"note: the warm-up of {config.warmup_steps} steps is longer than the run")


def train(argv=None):
    config, given = parse_flags(argv)
    check_config(config)
    process = setup_process(config)
    path, checkpoint = find_checkpoint(config)
    model = None
    if checkpoint:
        config = config_of_checkpoint(config, given, checkpoint, path)
    elif config.init != "scratch":
        model, config = load_init(config, given, process)
    config = dataclasses.replace(config, sequence_length=config.sequence_length or config.block_size,
                                 min_lr=config.max_lr / 10 if config.min_lr == -1 else config.min_lr,
                                 dtype=choose_dtype(config.dtype, process.device))
    check_config(config)
    check_attention(config.attention, process.device, getattr(torch, config.dtype), config.n_embd // config.n_head)
    B = micro_batch(config, process.world_size, process.device)
    train_windows, val_windows, val_count = open_data(config)
    hella = hellaswag_batches(config, bool(given & {"hellaswag_every", "hellaswag_data"}), process)
    recipe = RECIPES[config.recipe]
    if model is None:
        torch.manual_seed(config.seed)
        model = model_from_checkpoint(checkpoint, path) if checkpoint else recipe.model(config)
    model.to(process.device).use_attention(config.attention)
    state = make_state(config, model, checkpoint, path, process)
    del checkpoint
    log = open_output(config, state.step, process)
    compiled, wrapped = wrap_model(config, model, process)
    autocast = make_autocast(process.device, config.dtype)
    loader = TokenLoader(train_windows, config.total_batch_size, B, process.rank, process.world_size, process.device)
    print_header(config, model, compiled, loader, process)
    if path:
        process.print0(f"going on from {path} at step {state.step} of {config.max_steps}")
    reporter, signals, start_step = Reporter(config, log, model, process), StopSignals(), state.step
    loader.start(start_step)

    def due(every):
        """Every so many steps and at the last; what a resumed run did before its checkpoint is not done twice."""
        step = state.step
        return every and (step % every == 0 or step == config.max_steps) and (step > start_step or step == 0)

    while True:
        # evaluate
        if due(config.val_every):
            reporter.flush()
            state.val_loss = validation_loss(compiled, val_windows, val_count, B, autocast, process)
            reporter.event(state.step, "val", state.val_loss, f"validation loss: {state.val_loss:.4f}")
        if hella and due(config.hellaswag_every):
            reporter.flush()
            counts = hellaswag.evaluate(model, hella, process.device, autocast, process.rank, process.world_size)
            _, correct, n = process.sum(*counts.tolist())
            reporter.event(state.step, "hella", correct / n, f"HellaSwag accuracy: {correct:.0f}/{n:.0f}={correct / n:.4f}")
        if state.step > 0 and due(config.sample_every):
            reporter.flush()                    # on all processes: what it tells of a stop they must learn together
            if process.is_master:
                print_samples(model, autocast, process)
        # save
        if state.step > 0 and config.checkpoint_every and (due(config.checkpoint_every) or reporter.stop):
            reporter.flush()
            if process.is_master:
                process.print0(f"saved {save_checkpoint(config, state)}")
        if state.step >= config.max_steps or reporter.stop:
            break
        # train
        reporter.start()
        scale = recipe.schedule(state.step, config)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["max_lr"] * scale
        numbers = train_step(wrapped, state, loader, autocast, config.grad_clip, process, signals.received is not None)
        # log
        reporter.step(state.step, numbers, config.max_lr * scale)
        state.step += 1

    reporter.flush()
    loader.close()
    if process.world_size > 1:
        dist.destroy_process_group()
    if state.step < config.max_steps:
        then = "the same command goes on from there" if config.checkpoint_every else "nothing was saved (--checkpoint_every 0)"
        process.print0(f"stopped by {signals.received or 'a signal'} after {state.step} of {config.max_steps} steps: {then}")
    elif config.overfit:
        return overfit_verdict(reporter.losses, process)
    else:
        process.print0(f"done: {state.step} steps; log.txt and checkpoints are in {config.out}")


def overfit_verdict(losses, process):
    """Prints whether the sanity run learnt its batch by heart; returns its exit code."""
    first, last = losses[min(losses)], losses[max(losses)]
    passed = last < 0.1
    process.print0(f"overfit one batch: loss {first:.4f} -> {last:.4f} in {len(losses)} steps: "
                   f"{'PASSED' if passed else 'FAILED (under 0.1 is expected)'}")
    return 0 if passed else 1


if __name__ == "__main__":
    run_command(train, is_master=lambda: int(os.environ.get("RANK", 0)) == 0)
