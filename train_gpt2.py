"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                              the sanity run: memorise 128 tokens of Shakespeare
    python train_gpt2.py                                        FineWeb-Edu (made by `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py      the same on 8 GPUs: 19,073 steps of 2^19 tokens

The same command again goes on where the last checkpoint in --out was written.
"""
import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import hellaswag
from model import GPT, MODELS, GPTConfig, LanguageModel, SpeedrunConfig, SpeedrunGPT, load_model
from runtime.batch_size import choose_micro_batch
from runtime.checkpoint import (MODEL_SHAPE, PER_RUN, Saver, TrainState, check_data, choose_checkpoint,
                                merge_config, damaged_checkpoint, read_state)
from runtime.checks import (check_config, check_memory, oom_advice, micro_batch_candidates, resolve,
                            disable_text_evals)
from runtime.cli import UserError, flag, parse_config, run_command
from runtime.dataloader import TokenLoader, TokenDataset, open_data, splits, to_device
from runtime.device import compile_model, make_autocast, oom_as_user_error, place_model, wrap_model
from runtime.distributed import Process, StopSignals, hard_exit, setup_process
from runtime.files import digest, output_lock
from runtime.generation import print_samples
from runtime.kernels import ATTENTION, check_attention
from runtime.log import Profiler, Reporter, print_summary, open_output, print_header
from runtime.plots import LossPlotter
from runtime.shards import list_shards
from runtime.weights import model_from_checkpoint


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


def parse_flags(argv: list[str] | None = None) -> tuple[Config, set[str]]:
    """(Config, names of the fields given as flags)."""
    return parse_config(Config, lambda given: RECIPES[given.get("recipe", "gpt2")].defaults
                        | (OVERFIT if given.get("overfit") else {}), __doc__, argv)


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


def window_schedule(step: int, config: Config) -> int:
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


def train_step(model: Callable, state: TrainState, loader: TokenLoader, autocast: torch.autocast, grad_clip: float,
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
def validation_loss(model: Callable, dataset: TokenDataset, count: int, batch_size: int, autocast: torch.autocast,
                    process: Process) -> float:
    """Mean loss over the first `count` windows, the same on any number of processes. Batches have one shape (the
    last is filled up with ignored targets), so that a compiled model compiles once."""
    loss_sum, rows_seen = torch.zeros((), device=process.device), 0
    for first in range(process.rank * batch_size, count, process.world_size * batch_size):
        rows = min(batch_size, count - first)
        x, y = to_device(dataset.read(first, batch_size), process.device)
        y[rows:] = -1
        with autocast:
            loss_sum += model(x, y)[1] * rows
        rows_seen += rows
    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / rows_seen


def load_init(config: Config, explicit_flags: set[str], process: Process) -> tuple[LanguageModel, Config]:
    """The model of --init, and the config with the shape that comes with the weights."""
    model = process.rank0_first(load_model, config.init)
    if not isinstance(model, MODELS[config.recipe][0]):
        raise UserError(f"--init {config.init} is not a model of --recipe {config.recipe}")
    for name in MODEL_SHAPE:
        if name in explicit_flags and getattr(config, name) != getattr(model.config, name):
            raise UserError(f"--{name} {getattr(config, name)} contradicts --init {config.init}, which has "
                            f"{getattr(model.config, name)}: leave the flag out")
    shape = {name: getattr(model.config, name) for name in MODEL_SHAPE}
    if hasattr(model.config, "window"):         # it fits any weights
        shape["window"] = model.config.window = config.window if "window" in explicit_flags else model.config.window
    return model, dataclasses.replace(config, **shape)


def make_state(config: Config, model: LanguageModel, checkpoint: dict | None, path: Path | None, process: Process) -> TrainState:
    """The state before the first step, or as `checkpoint` holds it."""
    optimizers = RECIPES[config.recipe].optimizers(model, config)
    optimised = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(optimised) == sorted(map(id, model.parameters())), "every parameter is optimised exactly once"
    state = TrainState(model, optimizers, torch.amp.GradScaler(process.device.split(":")[0], enabled=config.dtype == "float16"))
    if checkpoint:
        try:
            state.load_state_dict(checkpoint)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise damaged_checkpoint(path, error) from None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["max_lr"] = group["lr"]       # what the schedule's fraction multiplies
    return state


@dataclass
class Run:
    """What the loop works with, once all that can be checked has been."""
    config: Config
    process: Process
    state: TrainState
    compiled: Callable                  # the model for evaluation
    wrapped: Callable                   # the model for training: with DDP around it, if there are several processes
    autocast: torch.autocast
    loader: TokenLoader
    val: tuple                          # validation windows or None, how many of them count
    hella: list
    reporter: Reporter
    saver: Saver
    painter: LossPlotter
    profiler: Profiler


def set_up(config: Config, explicit_flags: set[str], process: Process) -> Run:
    """From flags to a Run. What is quick to check comes first, and nothing is written before all of it was."""
    process.require_same("set of flags", {name: value for name, value in asdict(config).items()
                                        if name not in (*PER_RUN, "data", "hellaswag_data")})
    process.on_all_ranks(lambda: config.overfit or [list_shards(config.data, split) for split in splits(config)])
    # the master decides; on machines without a common file system the others may see another newest one
    path = process.gather(process.on_all_ranks(choose_checkpoint, config, process.restarted))[0]
    checkpoint = model = None
    if path:
        checkpoint = process.on_all_ranks(read_state, path)
        process.require_same("checkpoint", (str(path), digest(np.memmap(path, dtype=np.uint8, mode="r"))))
        config = merge_config(config, explicit_flags, checkpoint, path)
    elif config.init != "scratch":
        model, config = load_init(config, explicit_flags, process)
    for recipe in RECIPES.values():
        for name in sorted(explicit_flags & {*recipe.flags} - {*RECIPES[config.recipe].flags}):
            raise UserError(f"--{name} has no meaning for --recipe {config.recipe}: leave it out")
    config = resolve(config, process.device)
    check_config(config)
    config = disable_text_evals(config, explicit_flags, process)
    check_memory(config, process.device)
    check_attention(config.attention, process.device, getattr(torch, config.dtype), config.n_embd // config.n_head,
                    masked=config.window > 0)
    candidates = micro_batch_candidates(config, process.world_size, process.device)
    train_data, *val = process.on_all_ranks(open_data, config)
    data = {split: dataset.fingerprint for split, dataset in (("train", train_data), ("val", val[0])) if dataset}
    process.require_same(f"content of --data {config.data}", data)
    if checkpoint:
        check_data(checkpoint, data, config.data, path)
    hella = hellaswag.hellaswag_batches(config, bool(explicit_flags & {"hellaswag_every", "hellaswag_data"}), process)

    if model is None:
        torch.manual_seed(config.seed)
        model = model_from_checkpoint(checkpoint, path, MODELS) if checkpoint else RECIPES[config.recipe].model(config)
    state = make_state(config, place_model(config, model, process.device), checkpoint, path, process)
    compiled, autocast = compile_model(config, model, process), make_autocast(process.device, config.dtype)
    wrapped = wrap_model(compiled, process)
    B = choose_micro_batch(config, candidates, state, wrapped, autocast, process)
    log = process.on_all_ranks(open_output, config, path, state.step, process)
    loader = TokenLoader(train_data, config.total_batch_size, B, process.rank, process.world_size, process.device)
    print_header(config, model, compiled, loader, process)
    if path:
        process.print0(f"going on from {path} at step {state.step} of {config.max_steps}")
    return Run(config, process, state, compiled, wrapped, autocast, loader, val, hella,
               Reporter(config, log, state, process), Saver(config, data, log, process), LossPlotter(config, process),
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
            state.model.window.fill_(window_schedule(state.step, config))
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
    config, explicit_flags = parse_flags(argv)
    check_config(config)
    process = setup_process(config)
    with process.abort_all_on_error(), output_lock(config.out, process):
        run = None
        with oom_as_user_error(lambda: oom_advice(run.config if run else config, run.loader.B if run else 0, process.device)):
            run = set_up(config, explicit_flags, process)
            signals = StopSignals(process.is_master)
            try:
                loop(run, signals)
            finally:
                run.loader.close()
                run.saver.close()
                run.painter.close()
                run.profiler.close()
    code = print_summary(run, signals)
    if process.world_size > 1:
        dist.destroy_process_group()
        hard_exit(code)
    return code


if __name__ == "__main__":
    run_command(train, is_master=lambda: int(os.environ.get("RANK", 0)) == 0)
