"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                              the sanity run: memorise 128 tokens of Shakespeare
    python train_gpt2.py                                        FineWeb-Edu (made by `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py      the same on 8 GPUs: 19,073 steps of 2^19 tokens

The same command again goes on where the last checkpoint in --out was written.
"""
# Where to begin: `loop`, near the end, with `train_step` and `evaluate`; then RECIPES, which says what is trained how. The rest
# is what a run needs around them: flags, the other processes, checkpoints, messages.
import argparse
import atexit
import copy
import dataclasses
import errno
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import hellaswag
from fineweb import (VOCAB_SIZE, FlagParser, RunError, TokenLoader, UserError, Windows, digest, encode, list_shards,
                     one_line, replace_file, run_command, shown, to_device, tokenizer, whole_number)
from model import (ATTENTION, GPT, MODELS, GPTConfig, LanguageModel, Muon, SpeedrunConfig, SpeedrunGPT, can_compile,
                   check_attention, choose_device, choose_dtype, is_out_of_memory, is_plain, keep_freed_memory,
                   keep_large_blocks_whole, load_model, make_autocast, memory_is_told, model_from_checkpoint, peak_flops,
                   read_checkpoint)

try:
    import fcntl
except ImportError:             # Windows
    fcntl = None

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

    recipe: str = flag("gpt2", "model", "what is trained how; the other flags' defaults are those of gpt2", choices=list(MODELS))
    init: str = flag("scratch", "model", "scratch, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or the path of a checkpoint")
    n_layer: int = flag(12, "model", "blocks")
    n_head: int = flag(12, "model", "attention heads")
    n_embd: int = flag(768, "model", "width")
    block_size: int = flag(1024, "model", "longest sequence, tokens")
    vocab_size: int = flag(50304, "model", "rows of the embedding: 50257 padded to a multiple of 128")
    window: int = flag(0, "model", "speedrun's attention looks so many tokens back, inside its document: 64 at the start of the "
                       "run, and this at its end; 0: at all before it")

    total_batch_size: int = flag(524288, "batch", "tokens an optimizer step, over all processes and micro-steps")
    batch_size: str = flag("auto", "batch", "sequences a micro-step of one process, or auto")
    sequence_length: int = flag(0, "batch", "tokens a sequence; 0: block_size")

    max_steps: int = flag(19073, "optimisation", "optimizer steps in all; 19073 are one epoch of 10 billion tokens")
    warmup_steps: int = flag(715, "optimisation", "steps of linear warm-up; GPT-3's 375 million tokens")
    max_lr: float = flag(6e-4, "optimisation", "learning rate after the warm-up")
    min_lr: float = flag(-1.0, "optimisation", "learning rate at the end; -1: a tenth of max_lr")
    cooldown: float = flag(0.2856, "optimisation", "part of the steps at whose end speedrun's rate falls")
    weight_decay: float = flag(0.1, "optimisation", "AdamW's decay of matrices and embeddings, Muon's of its matrices")
    grad_clip: float = flag(1.0, "optimisation", "largest norm of the gradient; 0 switches clipping off")
    skip_nonfinite: int = flag(0, "optimisation", "how many steps with a non-finite loss or gradient may be passed over")
    seed: int = flag(1337, "optimisation", "decides the initial weights and the order of the data")

    device: str = flag("auto", "speed", "auto, cuda, mps or cpu")
    dtype: str = flag("auto", "speed", "of the matrix products; auto: bfloat16 where the hardware has it",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, "speed", "TF32 in what stays float32, on CUDA")
    compile: bool = flag(None, "speed", "torch.compile (default: on CUDA)", type=bool)
    attention: str = flag("auto", "speed", "attention kernel; auto: torch's choice, on a CPU the formula where it is faster",
                          choices=list(ATTENTION))
    loss_chunk: int = flag(-1, "speed", "tokens whose logits are in memory at a time; 0: all; -1: all, but 2048 on a CPU, where "
                           "it is the faster way. 8192 makes room on a GPU for a larger micro-batch")

    profile: bool = flag(False, "speed", "write a torch profiler trace of three steps to OUT/trace.json")

    val_every: int = flag(250, "evaluation and output", "steps between validations; 0: never")
    hellaswag_every: int = flag(250, "evaluation and output", "steps between HellaSwag evaluations; 0: never")
    sample_every: int = flag(250, "evaluation and output", "steps between samples of text; 0: never")
    checkpoint_every: int = flag(250, "evaluation and output", "steps between checkpoints; 0: never")
    keep_checkpoints: int = flag(3, "evaluation and output", "how many of the newest checkpoints stay, beside the best; 0: all")
    out: str = flag("log", "evaluation and output", "folder for log.txt and checkpoints")
    resume: str = flag("auto", "evaluation and output", "auto (the newest checkpoint in --out), never, or a checkpoint's path")
    plot: bool = flag(True, "evaluation and output", "redraw OUT/loss.png after each evaluation (needs matplotlib)")
    wandb: bool = flag(False, "evaluation and output", "also log to Weights & Biases (pip install wandb)")
    tensorboard: bool = flag(False, "evaluation and output", "also log to TensorBoard, in OUT (pip install tensorboard)")


# The lecture's sanity run: 50 AdamW steps on one batch, at a constant rate.
OVERFIT = dict(vocab_size=50257, total_batch_size=4 * 32, sequence_length=32, shuffle=False,
               max_steps=50, warmup_steps=0, max_lr=3e-4, min_lr=3e-4, val_every=0, hellaswag_every=0, sample_every=0,
               checkpoint_every=0, resume="never", out="log/overfit")
# What may differ between the runs that write one log; all else is taken from the checkpoint unless given as a flag.
PER_RUN = ("out", "resume", "init", "device", "batch_size", "compile", "loss_chunk", "profile", "plot", "wandb",
           "tensorboard")
MODEL_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
# What decides weights and data; it cannot change within a run.
FIXED = ("recipe", *MODEL_SHAPE, "window", "total_batch_size", "sequence_length", "seed", "shuffle")


def parse_flags(argv: list[str] | None = None) -> tuple[Config, set[str]]:
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
    defaults = RECIPES[given.get("recipe", "gpt2")].defaults
    return Config(**defaults | (OVERFIT if given.get("overfit") else {}) | given), set(given)


def check_config(config: Config) -> None:
    """Raises UserError for what can be told from the flags alone."""
    at_least = dict(val_tokens=1, n_layer=1, n_head=1, n_embd=1, block_size=1, vocab_size=1, total_batch_size=1,
                    sequence_length=0, max_steps=1, warmup_steps=0, weight_decay=0, grad_clip=0, seed=0, val_every=0,
                    hellaswag_every=0, sample_every=0, checkpoint_every=0, keep_checkpoints=0, skip_nonfinite=0,
                    loss_chunk=-1)
    for name, least in at_least.items():
        bits = 63 if name == "seed" else 40
        if not least <= getattr(config, name) < 2**bits:
            raise UserError(f"--{name} {getattr(config, name)}: must be at least {least} and below 2^{bits}")
    if not 0 < config.max_lr < math.inf or not (0 <= config.min_lr <= config.max_lr or config.min_lr == -1):
        raise UserError(f"--max_lr {config.max_lr} --min_lr {config.min_lr}: the first must be above 0, "
                        f"the second from 0 to the first")
    if not 0 < config.cooldown <= 1:
        raise UserError(f"--cooldown {config.cooldown}: give a part of the steps above 0 and up to 1")
    if config.n_embd % config.n_head:
        raise UserError(f"--n_embd {config.n_embd} does not divide into --n_head {config.n_head} heads: "
                        f"give one of {', '.join(map(str, divisors(config.n_embd)))} heads")
    if config.sequence_length > config.block_size:
        raise UserError(f"--sequence_length {config.sequence_length} is longer than --block_size {config.block_size}: "
                        f"shorten the one or raise the other")
    if not 0 <= config.window <= config.block_size:
        raise UserError(f"--window {config.window}: give a number of tokens up to --block_size {config.block_size}, or 0")
    if config.vocab_size > 65536:
        raise UserError(f"--vocab_size {config.vocab_size}: tokens are uint16, so 65536 is the most")
    if config.batch_size != "auto" and not (config.batch_size.isdecimal() and int(config.batch_size) > 0):
        raise UserError(f"--batch_size {config.batch_size}: give a number of sequences from 1 on, or auto")
    for name in ("wandb", "tensorboard"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise UserError(f"--{name} needs the package {name}: pip install {name}, or leave the flag out")


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def micro_batches(config: Config, world_size: int, device: str) -> list[int]:
    """The micro-batches (sequences) that make --total_batch_size, smallest first: --batch_size alone if it is given. For auto
    on a CPU, and of the sanity run, the largest of at most 4,096 tokens: beyond them a CPU's step costs memory and wins no time.
    """
    T = config.sequence_length
    if config.total_batch_size % (T * world_size):
        low = config.total_batch_size // (T * world_size)
        near = [n * T * world_size for n in (low, low + 1) if n]
        raise UserError(f"--total_batch_size {config.total_batch_size} does not divide into sequences of {T} tokens on "
                        f"{world_size} process(es): give {' or '.join(map(str, near))}")
    rows = config.total_batch_size // (T * world_size)
    if config.batch_size == "auto":
        tried = device.startswith("cuda") and not config.overfit
        return divisors(rows) if tried else [max(b for b in divisors(rows) if b * T <= 4096 or b == 1)]
    if rows % int(config.batch_size):
        raise UserError(f"--batch_size {config.batch_size} does not divide the {rows} sequences a step of each of {world_size} "
                        f"process(es): give one of {', '.join(map(str, divisors(rows)))}, or auto")
    return [int(config.batch_size)]


def check_memory(config: Config, device: str) -> None:
    """UserError if weights, gradients and AdamW's two moments alone, 16 bytes a parameter, are more than the device has, or more
    than others leave of a GPU."""
    parameters = 12 * config.n_layer * config.n_embd**2 + (config.vocab_size + config.block_size) * config.n_embd
    if device.startswith("cuda"):
        free, memory = torch.cuda.mem_get_info(device)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
        free = memory                           # what others hold there can be swapped out
    if 16 * parameters > free:
        need = (f"{config.n_layer} layers of width {config.n_embd} have {parameters:,} parameters, which need "
                f"{16 * parameters / 1e9:,.1f} GB to train, and {device} has {memory / 1e9:,.1f} GB")
        if 16 * parameters > memory:
            raise UserError(f"{need}: give a smaller --n_layer or --n_embd")
        raise UserError(f"{need}, of which {free / 1e9:,.1f} GB are free: end what else runs there (nvidia-smi shows it), choose "
                        f"another GPU by --device, or give a smaller --n_layer or --n_embd")


# -----------------------------------------------------------------------------
# recipes: which model, which optimizers, which schedule. The loop asks for nothing else.

def warmup_cosine(step: int, config: Config) -> float:
    """Learning rate of `step` as a fraction of the largest: linear warm-up, cosine to min_lr at max_steps (arXiv:1608.03983)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.min_lr / config.max_lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - floor)


def trapezoid(step: int, config: Config) -> float:
    """Learning rate of `step` as a fraction of the largest: linear warm-up if there is one, constant, and over the last
    `cooldown` of the steps linear to min_lr. Speedrun loses 0.080 with the cosine (bench.py recipes, as in model.py)."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    floor = config.min_lr / config.max_lr
    left = min(1.0, max(0, config.max_steps - step) / (config.cooldown * config.max_steps))
    return min(warm, floor + (1.0 - floor) * left)


def muon_momentum(step: int, config: Config) -> float:
    """From 0.85 to 0.95 over the first 15.4% of the steps: 500 of record 10's 3,242 [+0.008]."""
    return 0.85 + 0.10 * min(1.0, step / (0.154 * config.max_steps))


def window_warmup(step: int, config: Config) -> int:
    """How far attention looks back in `step`: from 64 tokens to --window over the whole run, in steps of 64 (record 13)."""
    return min(config.window, 64 * math.ceil(1 + (config.window / 64 - 1) * step / config.max_steps))


@dataclass
class Recipe:
    model: Callable             # config -> model with fresh weights
    optimizers: Callable        # model, config -> list of optimizers; each group's `lr` is its largest
    schedule: Callable          # step, config -> fraction of the largest learning rate
    momentum: Callable = None   # step, config -> `momentum` of the groups that have one
    defaults: dict = field(default_factory=dict)        # of flags, where they are not Config's
    flags: tuple = ()           # those that mean something in this recipe only


RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B)
    "gpt2": Recipe(
        model=lambda c: GPT(GPTConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd)),
        optimizers=lambda model, config: model.configure_optimizers(config.max_lr, config.weight_decay),
        schedule=warmup_cosine,
    ),
    # modded-nanogpt's record 10: 3.28 on FineWeb's validation set in 7.8 minutes on 8 H100s
    "speedrun": Recipe(
        model=lambda c: SpeedrunGPT(SpeedrunConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.window)),
        optimizers=lambda model, config: model.configure_optimizers(
            config.max_lr, config.weight_decay, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32),
        schedule=trapezoid,
        momentum=muon_momentum,
        defaults=dict(n_head=6, max_steps=3242, warmup_steps=0, max_lr=0.02, min_lr=0.0, weight_decay=0.0, grad_clip=0.0),
        flags=("cooldown", "window"),
    ),
}


# -----------------------------------------------------------------------------
# this process among the others

WAIT = timedelta(minutes=30)    # for the other processes: the master may have weights to download first


@dataclass
class Process:
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    store: dist.Store | None = None     # what the processes share, beside the collectives
    restarted: bool = False             # by torchrun --max_restarts
    done: threading.Event = field(default_factory=threading.Event)
    watch: threading.Thread | None = None
    told: bool = False                  # another process has failed, and said why

    @property
    def is_master(self):
        """Does the logging and the checkpoints."""
        return self.rank == 0

    def print0(self, *args):
        if self.is_master:
            try:
                print(*args, flush=True)
            except BrokenPipeError:             # `| tee` got the same Ctrl-C, `| head` has enough: stop, but save first
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:          # there is nothing to save yet
                    raise
                signal.raise_signal(signal.SIGTERM)

    def sum(self, *values):
        """Each value summed over all processes, as floats (gloo has no AVG: divide afterwards)."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device if self.device.startswith("cuda") else "cpu")
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value):
        """[the value of each process]."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, function, *args):
        """function(*args) on every process; where it fails on any, it fails on all, with the same message."""
        result = failure = None
        try:
            result = function(*args)
        except (UserError, RunError) as error:
            failure = error
        for rank, error in enumerate(self.gather(failure)):
            if error:
                raise self.agreed(type(error)(f"process {rank}: {error}" if rank else str(error)))
        return result

    @staticmethod
    def agreed(error):
        """Marks an error that all processes raise alike: only the master speaks of it."""
        error.agreed = True
        return error

    def master_first(self, function, *args):
        """function(*args), on the master first (it fills caches), then on the others."""
        result = self.together(lambda: function(*args) if self.is_master else None)
        return self.together(lambda: result if self.is_master else function(*args))

    def check_same(self, what, value):
        values = self.gather(value)
        other = next((rank for rank in range(self.world_size) if values[rank] != values[0]), None)
        if other is not None:
            raise self.agreed(UserError(f"process {other} has another {what} than process 0: give every machine the same"))

    @contextmanager
    def failing_as_one(self):
        """Around all that one process among several does: one that fails ends the others within seconds, and one line says
        why. Whoever failed by itself speaks before those that only lost it, and the master before the others."""
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            known, lost = isinstance(error, (UserError, RunError)), re.search("gloo|NCCL|Connection", str(error))
            time.sleep((not self.is_master) + (3 if lost and not known else 0))
            agreed, first = getattr(error, "agreed", False), not self.told
            with suppress(RuntimeError):        # the store is gone with the machine that held it
                first = self.is_master if agreed else self.store.add("failed", 1) == 1
                if agreed and not first:        # torchrun ends the master when we leave
                    self.store.wait(["told"], timedelta(seconds=10))
            if first and (known or lost):
                text = str(error) if known else ("another process was killed, or its machine lost; the checkpoints are whole, "
                                                 f"and the same command goes on from the newest ({str(error)[:120]})")
                one_line(text if self.is_master else f"process {self.rank}: {text}")
            elif first:
                traceback.print_exc()
            if first:
                with suppress(RuntimeError):
                    self.store.set("told", "")
            sys.stdout.flush()
            time.sleep(5 if first else 0)       # so that the others find the store, and in it that this was told
            os._exit(2 if isinstance(error, UserError) else 1)          # without waiting for what the others still owe us
        finally:
            self.done.set()
            self.watch.join()       # inside the store when the interpreter goes down, it would abort the process

    def leave_with_the_others(self, torchrun):
        """On a thread, because a process that waits for a lost one inside a collective hears nothing else."""
        while not self.done.wait(1):
            try:
                self.told = self.store is not None and self.store.add("failed", 0) > 0
                gone = self.told or os.getppid() != torchrun
            except RuntimeError:                # the machine that held the store is gone
                gone = True
            if gone and not self.done.wait(10):         # a checkpoint may just be written
                os._exit(1)


def leave(code: int) -> NoReturn:
    """Ends one of several processes without Python's finalization, in which a thread of gloo's that lets go of its last tensor
    waits for the interpreter's lock, is ended there, and takes the process with it: SIGABRT after all was done (pytorch issue
    190489). What is registered to be done at the end (wandb's upload) is done."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def setup_process(config: Config) -> Process:
    """Joins torchrun's process group if there is one; nccl on CUDA, gloo elsewhere."""
    keep_large_blocks_whole()
    device = choose_device(config.device)
    if device == "cuda":                                # set_device wants an index
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")       # refuses more processes than GPUs
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        # "high" alone; the newer fp32_precision settings beside it break torch.compile
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if device == "cpu":
        keep_freed_memory()
    process = Process(device=device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return process
    process.watch = threading.Thread(target=process.leave_with_the_others, args=(os.getppid(),), daemon=True)
    process.watch.start()
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=WAIT))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"WORLD_SIZE is set, and the other processes cannot be found ({error}): start by torchrun") from None
    process.restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or store.add("begun", 1) > world_size
    process.rank, process.world_size, process.store = rank, world_size, fresh_store(store, rank, world_size)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", rank=rank, world_size=world_size, timeout=WAIT,
                            store=dist.PrefixStore("group", process.store))
    return process


def fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of torchrun's key-value store of which all processes know that it is this attempt's.

    After a restart (--max_restarts) torchrun's store still holds the addresses of the processes that died, and torch 2.13
    connects to those (pytorch issue 135712); its restart count may differ between machines. So rank 0 names a new part,
    each rank answers with a nonce, and follows only a name under which rank 0 has repeated that nonce.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("attempt", name)
        nonces = {str(r): store.get(f"{name}/nonce/{r}").decode() for r in range(1, world_size)}       # waits for each
        store.set(f"{name}/nonces", json.dumps(nonces))
    else:
        nonce, nonces = uuid.uuid4().hex, {}
        while nonces.get(str(rank)) != nonce:
            name = store.get("attempt").decode()
            store.set(f"{name}/nonce/{rank}", nonce)
            time.sleep(0.05)
            nonces = json.loads(store.get(f"{name}/nonces")) if store.check([f"{name}/nonces"]) else {}
    return dist.PrefixStore(name, store)


# -----------------------------------------------------------------------------
# the log and the checkpoints

def read_log(path: str | Path) -> list[tuple[int, str, float]]:
    """[(step, kind, value)] of a log.txt: what is whole in it, for a crash can cut its last line off."""
    rows = [line.split() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdecimal() and re.fullmatch(r"-?\d+\.\d{6}|-?inf|nan", row[2])]
    return [(int(step), kind, float(value)) for step, kind, value in rows]


class Log:
    """OUT/log.txt, a line an event: `STEP KIND VALUE` with KIND train, val or hella; and wandb's and TensorBoard's, if asked
    for."""

    def __init__(self, config, step):
        self.wandb = self.tensorboard = None
        path = Path(config.out) / "log.txt"
        if path.exists():
            # a run that crashed wrote on after its last checkpoint: those steps come again. Evaluations
            # at the checkpoint's own step were made before it was written, and stay.
            kept = [f"{at} {kind} {value:.6f}\n" for at, kind, value in read_log(path)
                    if at < step + (kind != "train" and step > 0)]
            replace_file(path, lambda file: file.write("".join(kept).encode()))
        self.file = open(path, "a", encoding="utf-8")
        if config.wandb:
            import wandb
            self.wandb = wandb
            wandb.init(project="gpt2", name=Path(config.out).name, config=asdict(config), resume="allow")
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(config.out, purge_step=step)
            for at, kind, value in read_log(path):
                if at == step:                  # these evaluations stay, and the purge takes them too
                    self.tensorboard.add_scalar(kind, value, at)

    def write(self, step, kind, value, **more):
        try:
            self.file.write(f"{step} {kind} {value:.6f}\n")
            self.file.flush()
        except OSError as error:
            raise RunError(f"cannot write {self.file.name}: {error.strerror}. Make room, and the same command goes on from the "
                           f"newest checkpoint") from None
        if self.wandb:
            self.wandb.log({kind: value, **more}, step=step)
        if self.tensorboard:
            for name, number in {kind: value, **more}.items():
                self.tensorboard.add_scalar(name, number, step)


# GPT-2 124M by others: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's weights on HellaSwag
PUBLISHED = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"), "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}


def draw_log(config: Config) -> None:
    """OUT/loss.png: the losses of log.txt against tokens, and HellaSwag, beside what is published of GPT-2 124M."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
    points = {"train": [], "val": [], "hella": []}
    for step, kind, value in read_log(Path(config.out) / "log.txt"):
        tokens = (step + (kind == "train")) * config.total_batch_size           # that the weights have seen
        if tokens and kind in points and math.isfinite(value):
            points[kind].append((tokens, value))
    figure = Figure(figsize=(12 if points["hella"] else 7, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + bool(points["hella"]), squeeze=False)[0]
    for kind, panel, colour, label in (("train", panels[0], "#b8c4d6", "training loss"), ("val", panels[0], "#1f4e9c",
                                       "validation loss"), ("hella", panels[-1], "#1f4e9c", "HellaSwag, acc_norm")):
        if points[kind]:
            panel.plot(*zip(*points[kind], strict=True), color=colour, label=label, linewidth=0.8 if kind == "train" else 1.8,
                       marker=None if kind == "train" else "o", markersize=3)
            if kind in PUBLISHED and config.vocab_size >= VOCAB_SIZE:
                panel.axhline(PUBLISHED[kind][0], color="#c0392b", linestyle="--", linewidth=1, label=PUBLISHED[kind][1])
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    panels[0].set_yscale("log")         # a power law is a straight line (arXiv:2001.08361)
    panels[0].yaxis.set_major_formatter(ScalarFormatter())
    panels[0].yaxis.set_minor_formatter(ScalarFormatter())
    panels[0].set_title(f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}", fontsize=9)
    replace_file(Path(config.out) / "loss.png", lambda file: figure.savefig(file, format="png", dpi=110))


class Painter:
    """Has OUT/loss.png drawn on a thread: half a second at each evaluation, in which all processes would wait for the master."""

    def __init__(self, config, process):
        self.config, self.process = config, process
        self.thread, self.pending = ThreadPoolExecutor(1, "picture"), []

    def draw(self):
        """On the master. A picture that is asked for and not begun gives way to the new one, which shows what it would have."""
        self.pending = [*(picture for picture in self.pending if not picture.cancel()), self.thread.submit(draw_log, self.config)]

    def finish(self, wait=True):
        """Waits for the pictures, or with wait=False only looks. One that could not be drawn is a warning."""
        while self.pending and (wait or self.pending[0].done()):
            try:
                self.pending.pop(0).result()
            except Exception as error:          # matplotlib's of every kind: no picture is worth a run
                self.process.print0(f"warning: {self.config.out}/loss.png is not drawn ({error}); --no_plot does without it")

    def close(self):
        self.thread.shutdown(wait=False, cancel_futures=True)   # a run that has failed draws no more


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
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
    evaluated: int = -1                 # the last step whose evaluations are all made
    val_loss: float | None = None       # the newest
    best: tuple | None = None           # (validation loss, step) of the best checkpoint
    skipped: int = 0                    # steps that were passed over because something was not finite

    def content(self, config, data):
        """What a checkpoint holds: plain values and tensors. `data`: the fingerprints of the shards."""
        return {
            "model": self.model.state_dict(), "model_config": asdict(self.model.config), "recipe": config.recipe,
            "config": asdict(config), "data": data, "step": self.step, "evaluated": self.evaluated,
            "val_loss": self.val_loss, "best": self.best, "skipped": self.skipped,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers], "scaler": self.scaler.state_dict(),
            "rng": {"torch": torch.get_rng_state(),
                    "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []},
            "job": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        }

    def restore(self, checkpoint):
        """Takes over what a checkpoint holds, but for the weights: the model was made of them. ValueError if it is damaged."""
        numbers = {"step": int, "evaluated": int, "skipped": int, "val_loss": float | None, "best": tuple | None}
        for name, kind in numbers.items():
            if not isinstance(checkpoint[name], kind):
                raise ValueError(f"its {name} is {shown(checkpoint[name])}")
            setattr(self, name, checkpoint[name])
        if not 0 <= self.step < 2**40 or self.skipped < 0:
            raise ValueError(f"its step is {self.step}")
        if self.best and [type(number) for number in self.best] != [float, int]:
            raise ValueError(f"its best is {shown(self.best)}")
        if len(checkpoint["optimizers"]) != len(self.optimizers):
            raise ValueError(f"it holds {len(checkpoint['optimizers'])} optimizers instead of {len(self.optimizers)}")
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            restore_optimizer(optimizer, saved)
        if checkpoint["scaler"] and self.scaler.is_enabled():
            scale, tracker = (checkpoint["scaler"][name] for name in ("scale", "_growth_tracker"))
            if type(scale) is not float or type(tracker) is not int or not (0 < scale < math.inf and 0 <= tracker < 2**31):
                raise ValueError(f"its scaler says {shown(scale)} and {shown(tracker)}")
            self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale, "_growth_tracker": tracker})
        torch.set_rng_state(checkpoint["rng"]["torch"])
        if torch.cuda.is_available() and len(checkpoint["rng"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(checkpoint["rng"]["cuda"])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Gives an optimizer what was saved of each parameter, by name; rates and decay stay as the config says. ValueError for
    what was saved of another model or optimizer."""
    named = [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]
    if [name for group in saved["param_groups"] for name in group["param_names"]] != [name for name, _ in named]:
        raise ValueError("its optimizer is one of other parameters")
    keys, state = getattr(optimizer, "STATE", ("step", "exp_avg", "exp_avg_sq")), {}
    for i, (name, p) in enumerate(named):
        if not isinstance(saved["state"][i], dict):
            raise ValueError(f"its optimizer holds nothing of {name}")
        state[i] = {key: saved["state"][i][key] for key in keys}
        for key, value in state[i].items():
            if not is_plain(value) or value.shape != (() if key == "step" else p.shape):
                raise ValueError(f"its optimizer's {key} of {name} does not fit")
    state = copy.deepcopy(state)                # out of the memory-mapped file
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def make_state(config: Config, model: LanguageModel, checkpoint: dict | None, path: Path | None, process: Process) -> State:
    """The state before the first step, or as `checkpoint` holds it."""
    optimizers = RECIPES[config.recipe].optimizers(model, config)
    optimised = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(optimised) == sorted(map(id, model.parameters())), "every parameter is optimised exactly once"
    state = State(model, optimizers, torch.amp.GradScaler(process.device.split(":")[0], enabled=config.dtype == "float16"))
    if checkpoint:
        try:
            state.restore(checkpoint)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise damaged(path, error) from None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]       # what the schedule's fraction multiplies
    return state


def damaged(path: Path, error: Exception) -> UserError:
    """The UserError for a checkpoint that is readable and wrong inside."""
    return UserError(f"{path} does not hold the state of a run ({type(error).__name__}: {str(error)[:200]}): {instead_of(path)}")


def instead_of(path: Path) -> str:
    older = [p.name for _, p in checkpoints(Path(path).parent) if p.name < Path(path).name]
    return f"remove it, and the same command goes on from {older[-1]}" if older else "start a new run with another --out"


class CpuCopies:
    """Copies of trees of tensors, on a GPU by way of pinned memory, which the next call uses again. That memory is taken in a few
    large pieces: torch makes each a power of two, which tensor by tensor came to 2.5 GB for GPT-2 124M's 1.5, and to 3.1 at the
    next checkpoint. Every copy has a storage of its own in there, because torch.save writes a tensor's whole storage."""
    PIECE = 2**29               # bytes; the last piece only as large as it has to be

    def __init__(self):
        self.pieces = []

    def __call__(self, tree):
        """The same dicts and lists with copies of the tensors, one for those that share their memory (embedding and head). They
        are good until the next call."""
        places, sizes = {}, [0]             # of each tensor: itself, the number of its piece, where in there
        for key, tensor in tensors_of(tree).items():
            if sizes[-1] and sizes[-1] + tensor.nbytes > self.PIECE:
                sizes.append(0)
            places[key] = tensor, len(sizes) - 1, sizes[-1]
            sizes[-1] += -(-tensor.nbytes // 64) * 64
        if [len(piece) for piece in self.pieces] != sizes:
            self.pieces = []                # given back before others are taken
            self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for size in sizes]
        copies = {key: torch.frombuffer(self.pieces[i].numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                  .view(tensor.shape).copy_(tensor, non_blocking=True) for key, (tensor, i, offset) in places.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replaced(tree, copies)


def memory_key(tensor):
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def tensors_of(tree):
    """{memory_key: tensor} of all tensors in a tree of dicts and lists."""
    if torch.is_tensor(tree):
        return {memory_key(tree): tree}
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return {key: tensor for value in values for key, tensor in tensors_of(value).items()}


def replaced(tree, copies):
    if torch.is_tensor(tree):
        return copies[memory_key(tree)]
    if isinstance(tree, dict):
        return {name: replaced(value, copies) for name, value in tree.items()}
    return type(tree)(replaced(value, copies) for value in tree) if isinstance(tree, (list, tuple)) else tree


class Saver:
    """Writes OUT/checkpoint_STEP.pt, whole or not at all; then only the newest --keep_checkpoints and the best stay (the one
    saved with the lowest validation loss). On CUDA a thread writes from a copy in pinned memory while training goes on. On
    a CPU of two cores that cost more (3.3 to 5.2 s for GPT-2 124M) than to wait for the file (2 s)."""

    def __init__(self, config, data, log, process):
        self.config, self.data, self.log, self.process = config, data, log, process
        self.thread, self.pending, self.copies = ThreadPoolExecutor(1, "checkpoint"), None, CpuCopies()
        self.background = process.device.startswith("cuda")

    def save(self, state):
        """On the master. The file is there when `finish` has returned."""
        self.finish()
        if state.evaluated == state.step and state.val_loss is not None and (not state.best or state.val_loss < state.best[0]):
            state.best = (state.val_loss, state.step)
        if self.process.is_master:
            content = state.content(self.config, self.data)
            if self.background:
                content = self.copies(content)
            if self.log:
                os.fsync(self.log.file.fileno())        # the log never ends before its checkpoint
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
        """Waits for the file, or with wait=False only looks if it is there. Raises what went wrong."""
        if self.pending and (wait or self.pending.done()):
            pending, self.pending = self.pending, None
            self.process.print0(f"saved {pending.result()}")

    def close(self):
        self.thread.shutdown()                  # a checkpoint that is being written is finished, whatever else failed


def choose_checkpoint(config: Config, restarted: bool = False) -> Path | None:
    """Path of the checkpoint to go on from, or None."""
    found = [path for _, path in checkpoints(config.out)]
    if config.resume == "auto":
        return found[-1] if found else None
    # torchrun --max_restarts starts this same command again: then --resume never or PATH have had their effect already
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if restarted and found and read_checkpoint(found[-1]).get("job") == job:
        return found[-1]
    return None if config.resume == "never" else Path(config.resume)


def read_state(path: Path) -> dict:
    """The dict of a checkpoint of this script."""
    try:
        checkpoint = read_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}: {instead_of(path)}" if checkpoints(path.parent) else str(error)) from None
    missing = {"model", "model_config", "config", "recipe", "step", "optimizers", "data", "rng"} - checkpoint.keys()
    if missing:
        raise UserError(f"{path} is not a checkpoint of this script (it has no {', '.join(sorted(missing))}): "
                        f"{instead_of(path)}; or start a new run from its weights by --init {path}")
    return checkpoint


def config_of_checkpoint(config: Config, given: set[str], checkpoint: dict, path: Path) -> Config:
    """The flags given, and for the others what the checkpoint's run had; UserError if a given one contradicts it."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    try:
        before = {name: value for name, value in checkpoint["config"].items() if name in fields}
        for name, value in before.items():
            kind, choices = fields[name].metadata.get("type", fields[name].type), fields[name].metadata.get("choices")
            right = isinstance(value, (kind, int) if kind is float else kind) or value is fields[name].default
            if not right or choices and value not in choices:
                raise ValueError(f"its config says {name} = {shown(value)}")
        for name in (*MODEL_SHAPE, *({"window"} & checkpoint["model_config"].keys())):
            if type(checkpoint["model_config"][name]) is not int or before[name] != checkpoint["model_config"][name]:
                raise ValueError(f"its two configs differ in {name}")
        if before["recipe"] != checkpoint["recipe"]:
            raise ValueError("its config says another recipe")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, error) from None
    for name in FIXED:
        had = before.get(name, fields[name].default)            # a flag that has come later
        if name in given and getattr(config, name) != had:
            raise UserError(f"{path} was trained with --{name} {had}, not {getattr(config, name)}: give the same, "
                            f"or start a new run with another --out")
    taken = {name: value for name, value in before.items() if name not in given and name not in PER_RUN}
    return dataclasses.replace(config, **taken)


def check_data(checkpoint: dict, data: dict, folder: str, path: Path) -> None:
    """UserError unless the shards are still the ones of the checkpoint's run, in their number, order and content."""
    try:
        for split in data.keys() & {"train", *checkpoint["data"]}:
            before, now = checkpoint["data"][split], data[split]
            if any([type(value) for value in shard] != [str, int, str] for shard in before):
                raise ValueError("it does not say which shards")
            if [shard[1:] for shard in before] == [shard[1:] for shard in now]:
                continue
            described = [f"{len(shards)} {split} shard(s), {sum(n for _, n, _ in shards):,} tokens" for shards in (before, now)]
            i = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a[1:] != b[1:]), min(len(before), len(now)))
            first = ["{} ({:,} tokens, digest {})".format(*shards[i]) if i < len(shards) else "none" for shards in (before, now)]
            raise UserError(f"{path} was trained on other data: {described[0]}, and {folder} has {described[1]}; the first that "
                            f"differs was {first[0]} and is {first[1]}. Bring the old data back, or start a new run from these "
                            f"weights: --init {path} --out ANOTHER")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, error) from None


def set_aside(config: Config, path: Path | None, step: int) -> Path | None:
    """Moves the checkpoints in --out that do not belong to the run which goes on from `path` at `step` (or from nowhere),
    with the log, into OUT/previous_N: nothing is lost, and the next --resume auto does not find them."""
    inside = path is not None and path.resolve().parent == Path(config.out).resolve()
    old = [p for s, p in checkpoints(config.out) if not inside or s > step]
    if not old:
        return None
    folder = next(p for n in range(1, 10**6) if not (p := Path(config.out) / f"previous_{n}").exists())
    folder.mkdir()
    if (log := Path(config.out) / "log.txt").exists():
        shutil.copy(log, folder)
        if not inside:
            log.unlink()
    for p in old:
        p.rename(folder / p.name)
    return folder


# -----------------------------------------------------------------------------
# --batch_size auto on a GPU: the largest micro-batch that fits, found by trying, and remembered

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2" / "batch_size.json"


def largest_that_fits(candidates: list[int], memory_of: Callable[[int], float], limit: float) -> int:
    """The last of two or more `candidates` (ascending) with memory_of(B), infinite when out of memory, at most `limit` bytes.
    Each sequence takes the same, so that the two smallest tell where to try: a trial may have to compile."""
    first, second = candidates[:2]
    a = memory_of(first)
    if a > limit:
        raise UserError("not even the smallest micro-batch fits into this GPU's memory: give a smaller --sequence_length, or "
                        "--loss_chunk 1024")
    b = memory_of(second)
    if b > limit:
        return first
    likely = [B for B in candidates[2:] if b + (b - a) / (second - first) * (B - second) <= limit]
    return next((B for B in reversed(likely) if memory_of(B) <= limit), second)


def memory_of_step(B: int, state: State, model: Callable, config: Config, autocast: torch.autocast, device: str) -> float:
    """Bytes that CUDA needs for a step with micro-batches of B, infinity if there are not so many. Changes nothing.

    `model` is what trains, with DDP around it if there are several processes. Two micro-steps are made, for the second finds
    the first one's gradients, and memory that these and the first one's activations have cut into pieces.
    """
    moments = sum(t.nbytes for optimizer in state.optimizers for entry in optimizer.state.values() for t in entry.values())
    due = sum(p.nbytes * (1 if isinstance(optimizer, Muon) else 2) for optimizer in state.optimizers
              for group in optimizer.param_groups for p in group["params"])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        beside = torch.empty(max(0, due - moments), dtype=torch.uint8, device=device)       # moments come with the first step
        x = torch.zeros(B, config.sequence_length, dtype=torch.int64, device=device)
        for _ in range(2):
            if isinstance(model, DDP):          # a process that runs out of memory must leave no other waiting for its gradients
                model.require_backward_grad_sync = False
            with autocast:
                _, loss = model(x, torch.zeros_like(x))
            loss.backward()
        del beside
        return torch.cuda.max_memory_reserved(device)
    except Exception as error:
        if is_out_of_memory(error):
            return math.inf
        raise
    finally:
        model.zero_grad(set_to_none=True)


def choose_micro_batch(config: Config, candidates: list[int], state: State, model: Callable, autocast: torch.autocast,
                       process: Process) -> int:
    """The only candidate; or on a GPU the largest that fits on all processes, with a tenth of the memory to spare."""
    if len(candidates) == 1:
        return candidates[0]
    device = process.device
    total = torch.cuda.mem_get_info(device)[1]
    key = ", ".join(map(str, (torch.cuda.get_device_name(device), total, torch.__version__, config.recipe, config.dtype,
                              config.attention, config.window, config.loss_chunk, config.compile, config.sequence_length,
                              *(getattr(config, name) for name in MODEL_SHAPE), process.world_size, candidates[-1])))
    known = remembered()

    def find():
        if known.get(key) in candidates:
            return known[key]
        process.print0("trying how large a micro-batch fits (once; --batch_size N does without) ...")
        return largest_that_fits(candidates, lambda B: memory_of_step(B, state, model, config, autocast, device), 0.9 * total)

    try:
        B = min(process.gather(process.together(find)))
    finally:
        torch.cuda.empty_cache()                # NCCL and Triton allocate beside torch
        torch.compiler.reset()                  # the trials' graphs count against the limit of recompilations
    if process.is_master and known.get(key) != B:
        with suppress(OSError, RunError):       # a cache that cannot be written is tried again next time
            CACHE.parent.mkdir(parents=True, exist_ok=True)
            replace_file(CACHE, lambda file: file.write(json.dumps(known | {key: B}, indent=1).encode()))
    return B


def remembered() -> dict[str, int]:
    """{what a run is made of: its largest micro-batch}, from earlier runs."""
    try:
        known = json.loads(CACHE.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


# -----------------------------------------------------------------------------
# a step, and what is looked at between steps

def train_step(model: Callable, state: State, loader: TokenLoader, autocast: torch.autocast, grad_clip: float,
               process: Process, stop: bool = False) -> torch.Tensor:
    """One optimizer step over loader.micro_steps micro-batches. Nothing here waits for the GPU.

    Returns a tensor of four numbers, the same on all processes: the mean loss over the global batch,
    the gradient's norm before clipping, the index of the first parameter whose gradient is not finite
    (-1: none), and how many processes were asked to `stop`. A step with a non-finite loss or gradient
    leaves the weights as they are.
    """
    loss_sum = torch.zeros(2, device=process.device)
    loss_sum[1].fill_(stop)                     # a kernel; `loss_sum[1] = number` is a copy from the host, which waits
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
    if state.scaler.is_enabled():               # found out for each optimizer alone; all must pass over the step, or none
        for optimizer in state.optimizers:
            for found in state.scaler._found_inf_per_device(optimizer).values():
                found.fill_(bad.any())
    for optimizer in state.optimizers:
        if not state.scaler.is_enabled():       # the scaler does the same with what it finds itself
            optimizer.found_inf = (bad.any() | ~loss.isfinite()).float()        # a fused step is passed over where this is 1
        state.scaler.step(optimizer)
        # DDP's gradients are views of its buckets: let go of, micro-steps without a sync would make others beside them
        optimizer.zero_grad(set_to_none=process.world_size == 1 or loader.micro_steps == 1)
    state.scaler.update()
    first_bad = torch.where(bad.any(), bad.float().argmax(), -1)
    return torch.stack((loss, norm, first_bad.float(), loss_sum[1]))


@torch.no_grad()
def validation_loss(model: Callable, windows: Windows, count: int, batch_size: int, autocast: torch.autocast,
                    process: Process) -> float:
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


def print_samples(model: LanguageModel, autocast: torch.autocast, process: Process, num_samples: int = 4,
                  max_new_tokens: int = 32, prompt: str = "Hello, I'm a language model,") -> None:
    """Sampled on the master alone, from a generator of its own: training's random numbers stay as they are."""
    generator = torch.Generator(device=process.device).manual_seed(42)
    idx = torch.tensor([encode(prompt).tolist()] * num_samples, dtype=torch.int64, device=process.device)
    with autocast:
        rows = model.generate(idx[:, -model.config.block_size:], max_new_tokens, generator=generator)
    for i, row in enumerate(rows.tolist()):
        process.print0(f"sample {i}: {tokenizer().decode(row)}")


class Reporter:
    """Prints and logs. On CUDA a step is reported when the next one is queued, so that the GPU never waits."""

    def __init__(self, config, log, state, process):
        self.config, self.log, self.state, self.process = config, log, state, process
        self.flops, self.peak = state.model.flops_per_token(config.sequence_length), peak_flops(process.device)
        self.names = [name for name, _ in state.model.named_parameters()]
        self.lag = 1 if process.device.startswith("cuda") else 0
        self.pending, self.seconds, self.losses = [], [], {}
        self.stop = False                       # `stop`: some process was asked to; all learn it at the same step

    def start(self):
        """Before a step: starts the clock, unless one is still running on the GPU and the clock with it."""
        if not self.pending:
            self.clock = time.perf_counter()

    def step(self, step, numbers, lr):
        done = None
        if self.lag:                            # into pinned memory; whoever reads it waits for this step, not for what follows
            numbers, done = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            done.record()
        self.pending.append((step, numbers, lr, done))
        while len(self.pending) > self.lag:
            self._report(*self.pending.pop(0))

    def flush(self):
        while self.pending:
            self._report(*self.pending.pop(0))

    def event(self, step, kind, value, line):
        self.process.print0(line)
        if self.log:
            self.log.write(step, kind, value)

    def _report(self, step, numbers, lr, done):
        if done:
            done.synchronize()
        loss, norm, first_bad, stop = numbers.tolist()
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        self.stop = self.stop or stop > 0
        self.losses[step] = loss
        self.seconds = [*self.seconds[-19:], dt]
        rate = self.config.total_batch_size / dt
        mfu = f"{rate * self.flops / self.peak / self.process.world_size:.1%}" if self.peak else "n/a"
        left = sorted(self.seconds)[len(self.seconds) // 2] * (self.config.max_steps - 1 - step)
        self.process.print0(f"step {step:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms | "
                            f"tok/sec: {rate:.2f} | mfu: {mfu} | left: {timedelta(seconds=round(min(left, 1e9)))}")
        if self.log:
            self.log.write(step, "train", loss, norm=norm, lr=lr)
        # float16 overflows now and then: its scaler passes over those steps and lowers its scale
        if not math.isfinite(loss) or (first_bad >= 0 and self.config.dtype != "float16"):
            self.state.skipped += 1
            where = f"; the first gradient that is not finite is that of {self.names[int(first_bad)]}" if first_bad >= 0 else ""
            if self.state.skipped > self.config.skip_nonfinite:
                raise RunError(f"step {step}: loss {loss}, gradient norm {norm}{where}. The weights were not changed by it, and "
                               f"the checkpoints are as they were: lower --max_lr, lengthen --warmup_steps, or pass over such "
                               f"steps by --skip_nonfinite, and go on by the same command")
            self.process.print0(f"step {step} was passed over ({self.state.skipped} of --skip_nonfinite "
                                f"{self.config.skip_nonfinite}){where}")


class Profiler:
    """--profile: a trace of three steps of the master's for chrome://tracing or ui.perfetto.dev, and the costliest operations.
    The first five steps, which compile and fill caches, are left out, and two more in which the profiler itself warms up."""
    WAIT, WARMUP, ACTIVE = 5, 2, 3

    def __init__(self, config, process):
        self.config, self.process, self.inner = config, process, None
        if config.profile and process.is_master:
            self.order = "self_cuda_time_total" if process.device.startswith("cuda") else "self_cpu_time_total"
            steps = torch.profiler.schedule(wait=self.WAIT, warmup=self.WARMUP, active=self.ACTIVE, repeat=1)
            self.inner = torch.profiler.profile(schedule=steps, on_trace_ready=self._write)     # CPU, and CUDA if there is one
            self.inner.start()

    def step(self):
        """After a step."""
        if self.inner:
            self.inner.step()

    def _write(self, profile):
        path, self.inner = Path(self.config.out) / "trace.json", None
        try:
            profile.export_chrome_trace(str(path))
        except OSError as error:
            self.process.print0(f"warning: no trace: {path} cannot be written ({error.strerror})")
            return
        table = profile.key_averages().table(sort_by=self.order, row_limit=12, max_name_column_width=50)
        self.process.print0(f"{table}\nsaved {path}: {self.ACTIVE} steps, for chrome://tracing or ui.perfetto.dev")

    def close(self):
        if self.inner:
            self.inner.on_trace_ready = None
            self.inner.stop()
            steps = self.WAIT + self.WARMUP + self.ACTIVE
            self.process.print0(f"no trace: --profile needs {steps} steps, and this run had fewer")


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask for a stop after the step; a second SIGINT stops at once."""

    def __init__(self, is_master=True):
        self.received, self.is_master = None, is_master
        for name in {"SIGTERM", "SIGINT", "SIGUSR1"} & set(dir(signal)):        # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number, frame):
        # torchrun passes a terminal's SIGINT on, so that it comes twice at once: only a later one is a second one
        if self.received and number == signal.SIGINT and time.monotonic() > self.when + 1:
            os._exit(130)
        if not self.received:
            self.received, self.when = signal.Signals(number).name, time.monotonic()
            if self.is_master:                  # not by print, whose buffer the signal may have come upon half filled
                with suppress(OSError):         # who reads it is gone
                    os.write(1, f"{self.received}: finishing this step, then saving\n".encode())


# -----------------------------------------------------------------------------
# putting it together

PATIENCE = 20                   # seconds: a run that was just ended may still be saving


@contextmanager
def the_only_run_in(out, process):
    """Locks the output folder for as long as this process lives, however it ends: two runs would write over each other.
    A folder that is made for it goes again if nothing was written."""
    if not process.is_master:
        yield
        return
    out = Path(out).absolute()
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        folder = os.open(out, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}): choose another folder") from None
    try:
        deadline = time.monotonic() + PATIENCE
        while fcntl:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"--out {out}: another run is writing there; wait for its end, or choose another "
                                    f"folder") from None
                time.sleep(0.5)
            except OSError:                     # some network file systems know no locks
                break
        yield
    finally:
        if fcntl:
            os.close(folder)
        for folder in made:
            with suppress(OSError):             # not empty
                folder.rmdir()


def splits(config: Config) -> tuple[str, ...]:
    return ("train", "val") if config.val_every else ("train",)


def open_data(config: Config) -> tuple[Windows, Windows | None, int]:
    """(training windows, validation windows or None, number of validation windows)."""
    if config.overfit:
        try:
            text = INPUT_TXT.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{INPUT_TXT} cannot be read ({error}): restore it with `git checkout -- input.txt`") from None
        need = config.total_batch_size + 1
        tokens = encode(text[:20 * need])[:need]                # one epoch is one batch: 4 windows of 32 tokens
        return Windows([tokens], config.sequence_length, vocab_size=config.vocab_size), None, 0
    train = Windows(list_shards(config.data, "train"), config.sequence_length, config.seed, config.shuffle, config.vocab_size)
    if not config.val_every:
        return train, None, 0
    val = Windows(list_shards(config.data, "val"), config.sequence_length, vocab_size=config.vocab_size)
    return train, val, min(val.total, max(1, config.val_tokens // config.sequence_length))


def without_text(config: Config, given: set[str], process: Process) -> Config:
    """Samples and HellaSwag need GPT-2's tokens. With a smaller vocabulary: a warning, unless a flag asked for them."""
    if config.vocab_size >= VOCAB_SIZE or not (config.sample_every or config.hellaswag_every):
        return config
    reason = f"samples and HellaSwag need GPT-2's {VOCAB_SIZE} tokens, and --vocab_size is {config.vocab_size}"
    if given & {"sample_every", "hellaswag_every", "hellaswag_data"}:
        raise UserError(f"{reason}: give --sample_every 0 --hellaswag_every 0, or a larger vocabulary")
    process.print0(f"warning: going on without either: {reason}")
    return dataclasses.replace(config, sample_every=0, hellaswag_every=0)


def hellaswag_batches(config: Config, asked_for: bool, process: Process) -> list[tuple]:
    """Fetched by the master before the first step. Not to be had: a warning, unless a flag asked for it."""
    if not config.hellaswag_every:
        return []
    try:
        examples = process.master_first(hellaswag.load_examples, config.hellaswag_data or None)
    except UserError as error:
        if asked_for:
            raise UserError(f"{error} (or --hellaswag_every 0)") from None
        process.print0(f"warning: going on without HellaSwag. {error}")
        return []
    return hellaswag.make_batches(examples, config.block_size, batch_size=128 if process.device.startswith("cuda") else 32)


def load_init(config: Config, given: set[str], process: Process) -> tuple[LanguageModel, Config]:
    """The model of --init, and the config with the shape that comes with the weights."""
    model = process.master_first(load_model, config.init)
    if not isinstance(model, MODELS[config.recipe][0]):
        raise UserError(f"--init {config.init} is not a model of --recipe {config.recipe}")
    for name in MODEL_SHAPE:
        if name in given and getattr(config, name) != getattr(model.config, name):
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, which has "
                            f"{getattr(model.config, name)}: leave the flag out")
    shape = {name: getattr(model.config, name) for name in MODEL_SHAPE}
    if hasattr(model.config, "window"):         # it fits any weights
        shape["window"] = model.config.window = config.window if "window" in given else model.config.window
    return model, dataclasses.replace(config, **shape)


def open_output(config: Config, path: Path | None, step: int, process: Process) -> Log | None:
    """The output folder and its log, on the master; what an earlier run left there is continued or set aside, never lost."""
    if not process.is_master:
        return None
    try:
        if folder := set_aside(config, path, step):
            process.print0(f"checkpoints of another run, or later than the one to go on from, are now in {folder}")
        for stale in Path(config.out).glob("*.tmp"):
            stale.unlink()
        return Log(config, step)
    except (OSError, RunError) as error:
        raise UserError(f"--out {config.out} cannot be written ({error}): choose another folder") from None


def place_model(config: Config, model: LanguageModel, device: str) -> LanguageModel:
    """Moves the model to where it trains, and gives it the kernels that the config names."""
    model.to(device).use_attention(config.attention)
    model.loss_chunk = config.loss_chunk
    return model


def compile_model(config: Config, model: LanguageModel, process: Process) -> Callable:
    """The model for evaluation: compiled where that works. It shares its weights with `model`, through which samples and
    HellaSwag go with their changing shapes."""
    if config.compile or (config.compile is None and process.device.startswith("cuda")):
        if not (reason := can_compile(process.device)):
            if config.window and config.attention == "auto" and process.device.startswith("cuda"):
                try:
                    check_attention("flex", process.device, getattr(torch, config.dtype), config.n_embd // config.n_head,
                                    masked=True)
                except UserError as error:
                    model.flex = False
                    process.print0(f"warning: going on with a mask of T x T instead of FlexAttention: {error}")
            # inside its graph the compiler would do all chunks' products first, and save no memory
            model.chunked_loss = torch.compiler.disable(model.chunked_loss)
            return torch.compile(model, dynamic=False)
        process.print0(f"warning: torch.compile does not work here ({reason}); going on in eager mode")
    return model


def wrap_model(model: Callable, process: Process) -> Callable:
    """The model for training: DDP around it, if there are several processes."""
    if process.world_size == 1:
        return model
    # Buckets of 170 MB are three for 124M, and so are the graphs that torch.compile makes of a model inside DDP, one a bucket.
    # Of torch's own 25 MB they are 14, which read and write 159 GB for 64 x 1024 tokens instead of 149, and one for all would
    # send nothing before the end of the backward.
    known, options = signature(DDP).parameters, dict(gradient_as_bucket_view=True, bucket_cap_mb=170)
    # the window is the same everywhere already, and needs no broadcast at each step; torch 2.13 renamed the argument
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    if "batched_grad_copy" in known:            # a launch a bucket instead of one a parameter; torch 2.13
        options["batched_grad_copy"] = True
    return DDP(model, device_ids=[process.device] if process.device.startswith("cuda") else None, **options)


def print_header(config: Config, model: LanguageModel, compiled: Callable, loader: TokenLoader, process: Process) -> None:
    """The first lines of a run: where, what, and the arithmetic of the batch."""
    gpu = f" ({torch.cuda.get_device_name(process.device)})" if process.device.startswith("cuda") else ""
    process.print0(f"{process.world_size} process(es) on {process.device}{gpu}, {config.dtype}, "
                   f"{'eager' if compiled is model else 'torch.compile'}, attention {config.attention}, "
                   f"torch {torch.__version__}")
    process.print0(f"{config.recipe}: {sum(p.numel() for p in model.parameters()):,} parameters ({config.n_layer} layers, "
                   f"{config.n_head} heads, width {config.n_embd}, vocabulary {config.vocab_size}"
                   f"{f', window {config.window} inside documents' if config.window else ''})")
    tokens, epoch = config.max_steps * config.total_batch_size, loader.windows.total * loader.windows.T
    process.print0(f"{config.total_batch_size:,} tokens a step = {loader.B} x {config.sequence_length} x {loader.micro_steps} "
                   f"micro-step(s) x {process.world_size} process(es); {config.max_steps:,} steps = {tokens:,} tokens = "
                   f"{tokens / epoch:.2f} epochs")
    if config.warmup_steps > config.max_steps:
        process.print0(f"note: the warm-up of {config.warmup_steps} steps is longer than the run")


def resolve(config: Config, device: str) -> Config:
    """The config with its automatic values replaced by what they mean on this device."""
    return dataclasses.replace(config, sequence_length=config.sequence_length or config.block_size,
                               min_lr=config.max_lr / 10 if config.min_lr == -1 else config.min_lr,
                               dtype=choose_dtype(config.dtype, device),
                               loss_chunk=config.loss_chunk if config.loss_chunk >= 0 else 2048 * (device == "cpu"))


@dataclass
class Run:
    """What the loop works with, once all that can be checked has been."""
    config: Config
    process: Process
    state: State
    compiled: Callable                  # the model for evaluation
    wrapped: Callable                   # the model for training: with DDP around it, if there are several processes
    autocast: torch.autocast
    loader: TokenLoader
    val: tuple                          # validation windows or None, how many of them count
    hella: list
    reporter: Reporter
    saver: Saver
    painter: Painter
    profiler: Profiler


def set_up(config: Config, given: set[str], process: Process) -> Run:
    """From flags to a Run. What is quick to check comes first, and nothing is written before all of it was."""
    process.check_same("set of flags", {name: value for name, value in asdict(config).items()
                                        if name not in (*PER_RUN, "data", "hellaswag_data")})
    process.together(lambda: config.overfit or [list_shards(config.data, split) for split in splits(config)])
    # the master decides; on machines without a common file system the others may see another newest one
    path = process.gather(process.together(choose_checkpoint, config, process.restarted))[0]
    checkpoint = model = None
    if path:
        checkpoint = process.together(read_state, path)
        process.check_same("checkpoint", (str(path), digest(np.memmap(path, dtype=np.uint8, mode="r"))))
        config = config_of_checkpoint(config, given, checkpoint, path)
    elif config.init != "scratch":
        model, config = load_init(config, given, process)
    for recipe in RECIPES.values():
        for name in sorted(given & {*recipe.flags} - {*RECIPES[config.recipe].flags}):
            raise UserError(f"--{name} has no meaning for --recipe {config.recipe}: leave it out")
    config = resolve(config, process.device)
    check_config(config)
    config = without_text(config, given, process)
    check_memory(config, process.device)
    check_attention(config.attention, process.device, getattr(torch, config.dtype), config.n_embd // config.n_head,
                    masked=config.window > 0)
    candidates = micro_batches(config, process.world_size, process.device)
    train_windows, *val = process.together(open_data, config)
    data = {split: windows.fingerprint for split, windows in (("train", train_windows), ("val", val[0])) if windows}
    process.check_same(f"content of --data {config.data}", data)
    if checkpoint:
        check_data(checkpoint, data, config.data, path)
    hella = hellaswag_batches(config, bool(given & {"hellaswag_every", "hellaswag_data"}), process)

    if model is None:
        torch.manual_seed(config.seed)
        model = model_from_checkpoint(checkpoint, path) if checkpoint else RECIPES[config.recipe].model(config)
    state = make_state(config, place_model(config, model, process.device), checkpoint, path, process)
    compiled, autocast = compile_model(config, model, process), make_autocast(process.device, config.dtype)
    wrapped = wrap_model(compiled, process)
    B = choose_micro_batch(config, candidates, state, wrapped, autocast, process)
    log = process.together(open_output, config, path, state.step, process)
    loader = TokenLoader(train_windows, config.total_batch_size, B, process.rank, process.world_size, process.device)
    print_header(config, model, compiled, loader, process)
    if path:
        process.print0(f"going on from {path} at step {state.step} of {config.max_steps}")
    return Run(config, process, state, compiled, wrapped, autocast, loader, val, hella,
               Reporter(config, log, state, process), Saver(config, data, log, process), Painter(config, process),
               Profiler(config, process))


def evaluate(run: Run, due: Callable[[int], bool]) -> None:
    """Validation loss, HellaSwag and samples, where they are due."""
    config, process, state, reporter = run.config, run.process, run.state, run.reporter
    if due(config.val_every):
        reporter.flush()
        state.val_loss = validation_loss(run.compiled, *run.val, run.loader.B, run.autocast, process)
        reporter.event(state.step, "val", state.val_loss, f"validation loss: {state.val_loss:.4f}")
    if run.hella and due(config.hellaswag_every):
        reporter.flush()
        counts = hellaswag.evaluate(state.model, run.hella, process.device, run.autocast, process.rank, process.world_size)
        _, correct, n = process.sum(*counts.tolist())
        reporter.event(state.step, "hella", correct / n, f"HellaSwag accuracy: {correct:.0f}/{n:.0f}={correct / n:.4f}")
    if state.step > 0 and due(config.sample_every):
        reporter.flush()                        # on all processes: what it tells of a stop they must learn together
        if process.is_master:
            print_samples(state.model, run.autocast, process)
    if reporter.log and config.plot and any(map(due, (config.val_every, config.hellaswag_every))):
        run.painter.draw()
    state.evaluated = state.step


def loop(run: Run, signals: StopSignals) -> None:
    """Evaluate, save, train, log, until max_steps or a signal."""
    config, state, reporter, saver = run.config, run.state, run.reporter, run.saver
    recipe, saved = RECIPES[config.recipe], state.step
    run.loader.start(state.step)
    while True:
        last = state.step >= config.max_steps

        def due(every, last=last):
            return every and (state.step % every == 0 or last)

        if config.window:
            state.model.window.fill_(window_warmup(state.step, config))
        # evaluate, but not with seconds left to save: then the run that goes on does it
        if state.evaluated < state.step and not reporter.stop:
            evaluate(run, due)
        # save
        if config.checkpoint_every and state.step > saved and (due(config.checkpoint_every) or reporter.stop):
            reporter.flush()
            saver.save(state)
            saved = state.step
        if last or reporter.stop:
            break
        # train
        reporter.start()
        scale = recipe.schedule(state.step, config)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["max_lr"] * scale
                if "momentum" in group:
                    group["momentum"] = recipe.momentum(state.step, config)
        numbers = train_step(run.wrapped, state, run.loader, run.autocast, config.grad_clip, run.process,
                             stop=signals.received is not None)
        # log
        reporter.step(state.step, numbers, config.max_lr * scale)
        saver.finish(wait=False)
        run.painter.finish(wait=False)
        run.profiler.step()
        state.step += 1
    reporter.flush()
    saver.finish()
    run.painter.finish()


def train(argv: list[str] | None = None) -> int:
    config, given = parse_flags(argv)
    check_config(config)
    process = setup_process(config)
    with process.failing_as_one(), the_only_run_in(config.out, process):
        run = None
        with memory_is_told(lambda: less_memory(run.config if run else config, run.loader.B if run else 0, process.device)):
            run = set_up(config, given, process)
            signals = StopSignals(process.is_master)
            try:
                loop(run, signals)
            finally:
                run.loader.close()
                run.saver.close()
                run.painter.close()
                run.profiler.close()
    code = last_words(run, signals)
    if process.world_size > 1:
        dist.destroy_process_group()
        leave(code)
    return code


def less_memory(config: Config, B: int, device: str) -> str:
    """What to do about memory that ran out with micro-batches of B; 0: before the first."""
    if B > 1:
        return f"{device} is out of memory with --batch_size {B}: give --batch_size {divisors(B)[-2]}, which changes nothing else"
    smaller = "give a smaller model (--n_layer, --n_embd)"
    if B == 0:
        return f"{device} is out of memory before the first step: end what else runs there, or {smaller}"
    chunk = "--loss_chunk 1024, " if not 0 < config.loss_chunk <= 1024 else ""
    return f"{device} is out of memory with --batch_size 1: give {chunk}a shorter --sequence_length, or {smaller[5:]}"


def last_words(run: Run, signals: StopSignals) -> int:
    """Prints how the run ended and where everything is; returns its exit code."""
    config, state, process = run.config, run.state, run.process
    if run.reporter.stop:
        then = "the same command goes on from there" if config.checkpoint_every else "nothing was saved (--checkpoint_every 0)"
        process.print0(f"stopped by {signals.received or 'a signal'} after {state.step} of {config.max_steps} steps: {then}")
    elif config.overfit:
        return overfit_verdict(run.reporter.losses, process)
    else:
        newest = checkpoints(config.out)[-1:] if config.checkpoint_every else []
        files = {"log.txt": True, "loss.png": (Path(config.out) / "loss.png").exists(), "checkpoints": newest}
        process.print0(f"done: {state.step} steps; in {config.out}: {', '.join(name for name in files if files[name])}")
        if newest and config.vocab_size >= VOCAB_SIZE:
            process.print0(f"next: python sample.py --model {newest[0][1]}")
    return 0


def overfit_verdict(losses: dict[int, float], process: Process) -> int:
    """Prints whether the sanity run learnt its batch by heart; returns its exit code."""
    first, last = losses[min(losses)], losses[max(losses)]
    passed = last < 0.1
    process.print0(f"overfit one batch: loss {first:.4f} -> {last:.4f} in {len(losses)} steps: "
                   f"{'PASSED' if passed else 'FAILED (under 0.1 is expected)'}")
    return 0 if passed else 1


if __name__ == "__main__":
    run_command(train, is_master=lambda: int(os.environ.get("RANK", 0)) == 0)
