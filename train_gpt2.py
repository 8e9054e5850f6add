"""Trains GPT-2 (124M) from scratch, on one process or many:

    python train_gpt2.py --overfit                              sanity run: overfit one batch
    python train_gpt2.py --preset shakespeare --dry_run         what a run would do, and how long it takes
    python train_gpt2.py                                        FineWeb-Edu (made by `python fineweb.py`)
    torchrun --standalone --nproc_per_node=8 train_gpt2.py      the same on 8 GPUs

Run the same command again to resume from the newest checkpoint in --out.
"""
# Start at `loop`, near the end: evaluate, save, train, log. RECIPES says which model is trained how.
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a progress line
    from runtime.start import begin
    begin()
import math
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import frontier
import hellaswag
import speedrun
from model import MODELS, fresh_model, load_model
from runtime.attention import ATTENTION
from runtime.checkpoint import TrainState, make_state
from runtime.batch_size import oom_advice, rows_joined
from runtime.checks import check_config, check_memory, complete_config, load_init, open_checked_data
from runtime.cli import flag, parse_config, run_command
from runtime.compile_check import prepare_compiled
from runtime.console import in_bits, print_summary
from runtime.dataloader import Data, TokenLoader, find_shards, to_device
from runtime.device import compile_model, make_autocast, oom_as_user_error, place_model, wrap_model
from runtime.distributed import Process, leave, setup_process
from runtime.files import output_lock
from runtime.forecast import count_model, print_forecast, print_plan
from runtime.generation import print_samples
from runtime.language_model import LanguageModel
from runtime.log import recorded
from runtime.presets import PRESETS, choose_defaults, preset_notes
from runtime.resume import nonfinite_error, recovery_hint, resumed_config
from runtime.run import Run, open_run
from runtime.signals import StopSignals
from runtime.weights import model_from_checkpoint

START, DATA, MODEL, BATCH, OPTIM, SPEED, OUTPUT = "start data model batch optimisation speed output".split()
MODERN = "speedrun", "frontier"             # recipes with a window and a cooldown


@dataclass
class Config:
    """The flags. On resume fixed ones cannot change, and per_run ones are not taken from the checkpoint."""
    preset: str = flag("gpt2", START, "named defaults, see below", choices=list(PRESETS), per_run=True)
    dry_run: bool = flag(False, START, "print what would run, how long, and write nothing", per_run=True)
    data: str = flag("edu_fineweb10B", DATA, "folder of token shards")
    overfit: bool = flag(False, DATA, "sanity run: overfit one batch of 4 x 32 tokens of input.txt")
    shuffle: bool = flag(True, DATA, "permute shards and sequences by the seed, anew each epoch", fixed=True)
    val_tokens: int = flag(10_485_760, DATA, "tokens per validation, the first of the val shards", minimum=1)
    hellaswag_data: str = flag("", DATA, "HellaSwag examples as .jsonl (default: from the Hugging Face hub)")
    recipe: str = flag("gpt2", MODEL, "model, optimizers and schedule", choices=list(MODELS), fixed=True)
    init: str = flag("scratch", MODEL, "scratch, gpt2 ... gpt2-xl, a checkpoint, or a folder", fixed=True)
    n_layer: int = flag(12, MODEL, "blocks", minimum=1, fixed=True)
    n_head: int = flag(12, MODEL, "attention heads", minimum=1, fixed=True)
    n_embd: int = flag(768, MODEL, "width", minimum=1, fixed=True)
    block_size: int = flag(1024, MODEL, "longest sequence, tokens", minimum=1, fixed=True)
    vocab_size: int = flag(50304, MODEL, "50257, padded to a multiple of 128", minimum=1, fixed=True)
    window: int = flag(0, MODEL, "last sliding window, tokens; 0: full attention", fixed=True, recipes=MODERN)
    total_batch_size: int = flag(524288, BATCH, "tokens per step, all ranks", minimum=1, fixed=True)
    batch_size: str = flag("auto", BATCH, "sequences per micro-step of one process, or auto", per_run=True)
    sequence_length: int = flag(0, BATCH, "tokens per sequence; 0: block_size", fixed=True)
    updates_per_step: int = flag(1, BATCH, "optimizer updates per step; halved after 1/3, 2/3; 0: as many as "
                                 "suit the run's tokens")
    max_steps: int = flag(19073, OPTIM, "optimizer steps; 19073 are one epoch of 10B tokens", minimum=1)
    warmup_steps: int = flag(715, OPTIM, "steps of linear warmup; 715 are GPT-3's 375 million tokens")
    max_lr: float = flag(6e-4, OPTIM, "learning rate after the warmup")
    min_lr: float = flag(-1.0, OPTIM, "learning rate at the end; -1: a tenth of max_lr, frontier's in short "
                         "runs less")
    cooldown: float = flag(0.2856, OPTIM, "last fraction of the run, in which lr decays; 0: as suits the "
                           "run's updates", recipes=MODERN)
    weight_decay: float = flag(0.1, OPTIM, "of AdamW (matrices, embeddings) and Muon", minimum=0)
    grad_clip: float = flag(1.0, OPTIM, "largest gradient norm; 0: no clipping", minimum=0)
    skip_nonfinite: int = flag(0, OPTIM, "non-finite steps tolerated before aborting")
    seed: int = flag(1337, OPTIM, "random seed of initial weights and data order", bits=63, fixed=True)
    device: str = flag("auto", SPEED, "auto, cuda, mps or cpu", per_run=True)
    dtype: str = flag("auto", SPEED, "of matrix products (autocast); auto: bfloat16 where supported",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "use TF32 in float32 matrix products on CUDA")
    compile: bool = flag(None, SPEED, "torch.compile (default: on CUDA)", type=bool, per_run=True)
    check_compile: bool = flag(True, SPEED, "compare compiled gradients with eager ones first", per_run=True)
    attention: str = flag("auto", SPEED, "kernel; auto: SDPA's choice", choices=list(ATTENTION))
    rank_timeout: float = flag(30.0, SPEED, "minutes to wait for a rank", minimum=0.1, bits=20, per_run=True)
    loss_chunk: int = flag(-1, SPEED, "compute logits and loss this many tokens at a time, to save memory; "
                           "0: all at once; -1: 2048 on a CPU, else 0", minimum=-1, per_run=True)
    recompute: bool = flag(False, SPEED, "recompute blocks in the backward: less memory, a third more work",
                           per_run=True)
    shard_optimizer: bool = flag(False, SPEED, "each rank keeps the moments of its share of the parameters "
                                 "(ZeRO stage 1)", per_run=True)
    profile: bool = flag(False, SPEED, "write a trace of three steps to OUT/trace.json", per_run=True)
    val_every: int = flag(250, OUTPUT, "steps between validations; 0: never")
    hellaswag_every: int = flag(250, OUTPUT, "steps between HellaSwag evaluations; 0: never")
    log_every: int = flag(1, OUTPUT, "steps between lines on the console", minimum=1, per_run=True)
    sample_every: int = flag(250, OUTPUT, "steps between samples of text; 0: never")
    sample_prompt: str = flag("auto", OUTPUT, "what samples continue; auto: the first words of your own text")
    checkpoint_every: int = flag(250, OUTPUT, "steps between checkpoints; 0: never")
    checkpoint_minutes: float = flag(0.0, OUTPUT, "also save this long after the last; 0: never", minimum=0)
    keep_checkpoints: int = flag(3, OUTPUT, "newest checkpoints kept, beside the best; 0: all")
    out: str = flag("log", OUTPUT, "folder for log.txt and checkpoints", per_run=True)
    resume: str = flag("auto", OUTPUT, "auto (newest in --out), never, a checkpoint or a run's folder",
                       per_run=True)
    plot: bool = flag(True, OUTPUT, "redraw OUT/loss.png after each evaluation", per_run=True)
    wandb: bool = flag(False, OUTPUT, "also log to Weights & Biases (pip install wandb)", per_run=True)
    tensorboard: bool = flag(False, OUTPUT, "also log to TensorBoard (pip install tensorboard)", per_run=True)


@dataclass
class Recipe:
    """How a model is trained; its class is in model.MODELS. The loop asks for nothing else."""
    optimizers: Callable        # model, config -> list of optimizers; each group's `lr` is its largest
    set_hparams: Callable       # step, config, state: sets what changes by step -> fraction of max_lr
    defaults: dict = field(default_factory=dict)        # of flags, where they differ from Config's
    # what --updates_per_step 0, --cooldown 0 and --min_lr -1 mean; record 10's cooldown: 926 of 3,242 steps
    automatic: Callable = lambda c: {"updates_per_step": c.updates_per_step or 1, "cooldown": c.cooldown or
                                     0.2856, "min_lr": c.max_lr / 10 if c.min_lr == -1 else c.min_lr}


MODERN_DEFAULTS = dict(n_head=6, warmup_steps=0, max_lr=0.02, min_lr=0.0, weight_decay=0.0, grad_clip=0.0)
RECIPES = {
    # GPT-3 Small's settings (Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B)
    "gpt2": Recipe(
        optimizers=lambda model, c: model.configure_optimizers(c.max_lr, c.weight_decay),
        set_hparams=lambda step, c, state: state.set_lr(warmup_cosine(step, c)),
    ),
    # modded-nanogpt's record 10: 3.28 on FineWeb's validation set in 7.8 minutes on 8 H100s
    "speedrun": Recipe(
        optimizers=lambda model, c: model.configure_optimizers(
            c.max_lr, c.weight_decay, torch.bfloat16 if c.dtype == "bfloat16" else torch.float32),
        set_hparams=speedrun.set_hparams,
        defaults=dict(max_steps=3242) | MODERN_DEFAULTS,
    ),
    # modded-nanogpt's records up to 2026, where they help at small sizes, and more (docs/recipes.md)
    "frontier": Recipe(
        optimizers=lambda model, c: model.configure_optimizers(
            c.max_lr, c.weight_decay, torch.bfloat16 if c.dtype == "bfloat16" else torch.float32,
            c.total_batch_size),
        set_hparams=lambda step, c, state: speedrun.set_hparams(step, c, state, frontier.muon_momentum),
        defaults=MODERN_DEFAULTS | dict(max_steps=2500, updates_per_step=0, cooldown=0.0, min_lr=-1.0),
        automatic=frontier.automatic,
    ),
}


def parse_flags(argv: list[str] | None = None) -> tuple[Config, set[str]]:
    """(Config, names of the fields given as flags)."""
    recipes = {name: recipe.defaults for name, recipe in RECIPES.items()}
    return parse_config("train_gpt2.py", Config, lambda given: choose_defaults(given, recipes), __doc__, argv,
                        recipes, preset_notes())


# schedules are functions of the step and the config alone, so that a resume continues them exactly

def warmup_cosine(step: int, config: Config) -> float:
    """Fraction of max_lr at `step`: linear warmup, then cosine to min_lr at max_steps (arXiv:1608.03983)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.min_lr / config.max_lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return floor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - floor)


def updates_of_step(step: int, config: Config) -> int:
    """Optimizer updates of a step: --updates_per_step, half as many after a third of the steps, a quarter
    after two, but at least one. So the batch of an update grows over the run, as in record 46."""
    return max(1, config.updates_per_step >> min(2, 3 * step // config.max_steps))


def train_step(model: Callable, state: TrainState, loader: TokenLoader, autocast: torch.autocast,
               grad_clip: float, process: Process, signals: StopSignals,
               updates: int = 1) -> torch.Tensor | None:
    """One step over the loader's micro-batches, in `updates` optimizer updates of equally many each. Never
    waits for the GPU.

    Returns float32 (3,), the same on all ranks: mean loss of the global batch, largest gradient norm before
    clipping, first parameter with a non-finite gradient (-1: none); None after a signal, which discards the
    step, but for one after its first update. An update with a non-finite loss or gradient changes nothing.
    """
    results, (micro_steps, joined) = [], loader.divide(updates)      # of an update
    with process.progress(f"step {state.step}", updates * micro_steps, "micro-steps") as progress:
        for update in range(updates):
            loss_sum = torch.zeros((), device=process.device)
            for micro_step in range(micro_steps):
                if update == 0 and signals.stop():      # asks all ranks; later, weights have changed
                    return None
                x, y = loader.next_batch(joined)
                if process.world_size > 1:      # read by DDP's forward and by its backward: set before both
                    model.require_backward_grad_sync = micro_step == micro_steps - 1
                with autocast:
                    loss = model(x, y)[1] / micro_steps
                loss_sum += loss.detach()
                state.scaler.scale(loss).backward()
                progress.update()
            results.append(update_weights(model, state, loss_sum, grad_clip, process))
            # DDP's gradients are views of its buckets; freed, they would be allocated again beside them
            model.zero_grad(set_to_none=process.world_size == 1 or micro_steps == 1)
    if updates == 1:
        return results[0]
    losses, norms, first_bad = torch.stack(results).unbind(1)
    first = (first_bad >= 0).byte().argmax(dim=0, keepdim=True)         # of the first update that has one
    return torch.stack((losses.mean(), norms.max(), first_bad.gather(0, first)[0]))


def update_weights(model: Callable, state: TrainState, loss: torch.Tensor, grad_clip: float,
                   process: Process) -> torch.Tensor:
    """One optimizer update. `loss`: this rank's. Returns what train_step does."""
    if process.world_size > 1:
        dist.all_reduce(loss)
    loss = loss / process.world_size
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    norms = torch.stack(torch._foreach_norm([p.grad for p in model.parameters()]))
    norm = torch.linalg.vector_norm(norms)
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    bad = ~norms.isfinite()
    skip = bad.any()
    for optimizer in state.optimizers:
        if state.scaler.is_enabled():   # it checks each optimizer alone, but all must skip, or none
            for found in state.scaler._found_inf_per_device(optimizer).values():
                found.fill_(skip)
        else:                           # where this is 1, fused and Muon's steps change nothing
            optimizer.found_inf = (skip | ~loss.isfinite()).float()
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
    state.scaler.update()
    first_bad = torch.where(skip, bad.float().argmax(), -1)
    return torch.stack((loss, norm, first_bad.float()))


def build_training(config: Config, process: Process, model: LanguageModel | None = None,
                   checkpoint: dict | None = None, path: Path | None = None) -> tuple:
    """(TrainState, compiled model for evaluation, the same inside DDP for training, autocast) of one set of
    weights: those of `model`, of `checkpoint` (read from `path`), or fresh ones."""
    if model is None:
        torch.manual_seed(config.seed)
        model = (model_from_checkpoint(checkpoint, path, MODELS, recovery_hint(path)) if checkpoint
                 else fresh_model(config))
    place_model(config, model, process.device)
    optimizers = RECIPES[config.recipe].optimizers(model, config)
    state = make_state(config, model, optimizers, process, checkpoint, path)
    compiled = compile_model(config, model, process)
    return state, compiled, wrap_model(compiled, process), make_autocast(process.device, config.dtype)


def set_up(flags: Config, explicit_flags: set[str], process: Process) -> Run | None:
    """From flags to a Run; None after --dry_run. Nothing is written before everything has been checked."""
    with process.progress("starting"):
        asked, checkpoint, path = resumed_config(flags, explicit_flags, process)
        process.on_all_ranks(find_shards, asked)
        model = None if path else load_init(asked, process, MODELS, load_model)
        config = complete_config(asked, explicit_flags, RECIPES[asked.recipe], process, model)
        size = count_model(config, fresh_model, RECIPES[config.recipe].optimizers, process.world_size)
        data = open_checked_data(config, checkpoint, path, process)
        if config.dry_run:
            print_plan(config, size, data, process)
        process.on_all_ranks(check_memory, config, size, process.device)
        state, compiled, wrapped, autocast = build_training(config, process, model, checkpoint, path)
        B, compiled, wrapped = prepare_compiled(config, state, compiled, wrapped, autocast, process)
        loader = TokenLoader(data.train, config.total_batch_size, B, process.rank, process.world_size,
                             process.device, rows_joined(config, process.device))
        print_forecast(config, size, data, state, compiled, loader, autocast, process)
        if config.dry_run:
            return None
        return open_run(config, asked, path, process, state, compiled, wrapped, autocast, loader, data,
                        hellaswag.hellaswag_batches(config, explicit_flags, process))


@torch.no_grad()
def validation_loss(model: Callable, data: Data, batch_size: int, autocast: torch.autocast,
                    process: Process, signals: StopSignals) -> float:
    """Mean loss (nats) of the first `data.val_count` sequences, the same on any number of ranks; nan after a
    signal. All batches have one shape, the last padded with ignored targets: a model compiles once."""
    count, loss_sum, rows_seen = data.val_count, torch.zeros((), device=process.device), 0
    own = process.rank * batch_size         # the first sequence of this rank; equally many batches on each
    firsts = range(own, own + count, process.world_size * batch_size)
    for first in signals.until_stop("validation", firsts, "batches"):
        if (rows := min(batch_size, count - first)) > 0:
            x, y = to_device(data.val.read(first, batch_size), process.device)
            y[rows:] = -1
            with autocast:
                loss_sum += model(x, y)[1] * rows
            rows_seen += rows
    loss_sum, rows_seen = process.sum(loss_sum.item(), rows_seen)
    return loss_sum / rows_seen if not signals.stopped else math.nan


def evaluate(run: Run, due: Callable[[int], bool]) -> None:
    """Validation loss, HellaSwag and samples, where due; after a signal the resumed run makes them all."""
    config, process, state, reporter, signals = run.config, run.process, run.state, run.reporter, run.signals
    if due(config.val_every):
        loss = validation_loss(run.compiled, run.data, run.loader.B, run.autocast, process, signals)
        if signals.stopped:
            return
        if not math.isfinite(loss):
            raise nonfinite_error(f"step {state.step}: val loss {loss}", state, config, state.step, False)
        state.val_loss, state.val_step = loss, state.step
        reporter.evaluation(state.step, "val", loss, f"validation loss: {loss:.4f}{in_bits(loss, run.data)}")
    if run.hella and due(config.hellaswag_every):
        counts = hellaswag.evaluate(state.model, run.hella, process.device, run.autocast, process.rank,
                                    process.world_size, signals.until_stop)
        if signals.stopped:
            return
        _, correct, n = process.sum(*counts.tolist())
        reporter.evaluation(state.step, "hella", correct / n,
                            f"HellaSwag accuracy: {correct:.0f}/{n:.0f}={correct / n:.4f}")
    if state.step > 0 and due(config.sample_every):
        print_samples(state.model, run.autocast, process, config.sample_prompt, stop=lambda: signals.received)
        if signals.now():
            return
    if reporter.log and config.plot and any(map(due, (config.val_every, config.hellaswag_every))):
        run.plotter.draw()
    state.evaluated = state.step


def check_steps(run: Run, finished: list) -> None:
    """Checks the results of finished steps: RunError for one non-finite step more than tolerated."""
    config, state = run.config, run.state
    for step in finished:
        # float16 overflows now and then: its scaler skips those steps and lowers its scale
        if not math.isfinite(step.loss) or (step.first_bad and config.dtype != "float16"):
            state.skipped += 1
            if state.skipped > config.skip_nonfinite:
                raise nonfinite_error(step, state, config, step.step)
            run.process.print0(f"skipped {step}; {state.skipped} of --skip_nonfinite {config.skip_nonfinite}")


def loop(run: Run) -> None:
    """Evaluate, save, train, log, until max_steps or a signal."""
    config, process, state, reporter, saver = run.config, run.process, run.state, run.reporter, run.saver
    recipe, signals, save_every = RECIPES[config.recipe], run.signals, saver.every
    periods = config.val_every, config.hellaswag_every, config.sample_every, save_every
    saved = state.step if state.evaluated in (-1, state.step) else -1       # then again, once evaluated
    run.loader.start(state.step)

    def due(every):
        return every and (state.step % every == 0 or state.step >= config.max_steps)

    while True:
        last, asked = state.step >= config.max_steps, signals.save_asked(config.checkpoint_minutes)
        lr = config.max_lr * recipe.set_hparams(state.step, config, state)
        if last or asked or signals.stopped or any(map(due, periods)):
            check_steps(run, reporter.flush())      # on a GPU the last step's numbers are still to come
        # evaluate; not after a signal, which may leave only seconds to save
        if state.evaluated < state.step and not signals.stopped:
            evaluate(run, due)
        # save
        if saved < state.step and (asked or due(save_every) or signals.stopped and save_every):
            if state.is_best():
                state.best = state.val_loss, state.step         # its checkpoint is kept
            saver.save(state)
            saved = state.step
        if last or signals.stopped:
            break
        # train
        reporter.start()
        numbers = train_step(run.wrapped, state, run.loader, run.autocast, config.grad_clip, process, signals,
                             updates_of_step(state.step, config))
        if signals.stopped:
            continue                                # discarded; save what came before
        # log: this step, on a GPU the one before, so that the GPU never waits for the CPU
        check_steps(run, reporter.step(state.step, numbers, lr))
        saver.finish(wait=False)
        run.profiler.step()
        state.step += 1
    saver.finish()
    run.plotter.finish()


def train(argv: list[str] | None = None) -> int:
    """The command. Returns the exit code."""
    flags, explicit_flags = parse_flags(argv)
    check_config(flags)
    process, run, code = setup_process(flags), None, 0
    with process.abort_all_on_error(), output_lock(flags, process), recorded(process), oom_as_user_error(
            lambda: oom_advice(run.config if run else flags, run.loader if run else None, process.device)):
        if run := set_up(flags, explicit_flags, process):
            with closing(run):
                loop(run)
            code = print_summary(run)
    return leave(process, code)


if __name__ == "__main__":
    run_command(train, is_master=lambda: int(os.environ.get("LOCAL_RANK", 0)) == 0)
