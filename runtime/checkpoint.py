"""Checkpoints: where a run starts, what it takes from a checkpoint, and what one holds."""
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime.cli import RunError, UserError, is_rank_0, print_error, unexpected
from runtime.files import checkpoints, is_there, reading
from runtime.huggingface import OPENAI_NAMES
from runtime.optimizers import CombinedOptimizer, check_plain, on_tensors
from runtime.recipe import BatchSchedule
from runtime.tokenizer import VOCAB_SIZE
from runtime.weights import (
    MODEL_SHAPE,
    build_model,
    find_checkpoint,
    gpt2_of_others,
    read_checkpoint,
)


# ----------------------------------------------------------------------------- where a run starts

@dataclass
class Start:
    """Where a run begins: with fresh weights, with those of --init, or where a checkpoint ended."""
    model: torch.nn.Module | None = None        # of --init or the checkpoint; None: fresh weights
    path: Path | None = None                    # the checkpoint's; None: a new run
    checkpoint: dict | None = None              # the checkpoint's content, until `restore`
    step: int = 0                               # steps done
    dtype: str = ""                             # that of the run so far; "" if it is not known
    extras: frozenset = frozenset()             # Output.extras, when the checkpoint was saved
    init_digest: int | None = None              # of the weights of --init, if that was a path
    has_same_init: bool = False                 # whether another path of --init means those
    remedy: str = ""                            # what to do if the checkpoint cannot be used
    source: Path | str = ""                     # the file, folder or hub name of the model

    @property
    def flags(self) -> dict:
        """{flag: value} that the run of the checkpoint was asked for."""
        return self.checkpoint["config"]


def find_start(flags, process, models: dict, load_model: Callable) -> Start:
    """Where the run of these flags begins, which are those of a new run.

    `models`: {recipe: class}. `load_model` reads the model of --init.
    """
    # All ranks look, so that an error on one is raised on all. Rank 0 decides: without a shared
    # file system other machines may have other checkpoints.
    with process.together():
        path = choose_checkpoint(flags)
    path = process.from_master(path)
    if path:
        named = Path(flags.resume)
        if flags.resume != "auto" and path.parent == Path(flags.out) and named != path:
            process.print0(f"--resume {flags.resume} says where a run begins, and the run in "
                           f"{flags.out} has begun: it continues")
        with process.together():
            start = start_from_checkpoint(path, flags, models)
            start.has_same_init = has_same_init(start, flags.init, load_model)
        if start.has_same_init:
            process.print0(f"goes on from {path.name}; --init was read when the run began")
        return start

    # If --init differed, some ranks would wait in rank0_first for others that never come.
    process.require_same({"--init": flags.init})
    if flags.init == "scratch":
        return Start()
    with process.together():
        source = find_checkpoint(flags.init) or flags.init
    model = process.rank0_first(load_model, source)
    digest = None
    if isinstance(source, Path):
        digest = weights_digest(model)
    return Start(model, source=source, init_digest=digest)


def has_same_init(start: Start, init: str, load_model: Callable) -> bool:
    """Whether a path that the run of a checkpoint did not begin from means the same weights.

    A run may have moved, and what it began from with it. A path where no model lies is believed,
    because nothing is read from it; OWNER/NAME cannot be told from such a path.
    """
    if start.init_digest is None or init in ("scratch", *OPENAI_NAMES, start.flags.get("init")):
        return False
    try:
        path = find_checkpoint(init)
    except (UserError, FileNotFoundError):              # a folder without a model
        return True
    if path is None or not is_there(path):
        return True
    return weights_digest(load_model(path)) == start.init_digest


def choose_checkpoint(flags) -> Path | None:
    """The checkpoint with which the run begins or continues; None for a new run.

    The newest one in --out, if there is any. Otherwise the one that --resume names.
    """
    if flags.eval_only and flags.init != "scratch":
        return None                             # it evaluates the model of --init
    newest = None
    saved = checkpoints(flags.out)
    if saved:
        _, newest = saved[-1]
    if flags.resume == "auto":
        return newest

    path = find_checkpoint(flags.resume)
    if path is not None and path.is_dir():
        path = None                             # a model in the Hugging Face format is no run
    if newest is None:
        if path is None or not is_there(path):
            raise UserError(f"--resume {flags.resume} is neither a checkpoint nor a run's folder: "
                            "check the path, or start a new run from a model's weights with --init")
        return path

    # A run that has begun goes on without the folder that --resume names, if it is gone by now.
    if path is None:
        return newest
    is_in_out = path.resolve().parent == newest.resolve().parent
    if is_in_out and path.name != newest.name:
        raise UserError(f"--resume {flags.resume} is not the newest checkpoint of {flags.out}, "
                        f"which is {newest.name}: to go back, add another --out")
    return newest


def start_from_checkpoint(path: Path, flags, models: dict) -> Start:
    remedy = remedy_for(path, flags)
    try:
        checkpoint = read_checkpoint(path, remedy)
    except FileNotFoundError:
        # Rank 0 has found it, perhaps on another machine.
        raise RunError(f"{path} was listed and is not there: check the disk or the mount, which "
                       "all machines have to share; the same command goes on") from None
    with reading_run_state(path, remedy):
        model = model_from_checkpoint(checkpoint, path, models, remedy)
        for name in ("step", "tokens"):
            if type(checkpoint[name]) is not int:
                raise unexpected(f"its {name}", "a number", checkpoint[name])
        dtype = checkpoint.get("dtype", "")
        if dtype not in ("", "float32", "bfloat16", "float16"):
            raise unexpected("its dtype", "float32, bfloat16 or float16", dtype)
        extras = frozenset(checkpoint.get("extras", ()))
        init_digest = checkpoint.get("init_digest")
    check_code(model, checkpoint, path)
    if flags.eval_only:
        warn_of_backwards(checkpoint, path)
    return Start(
        model, path, checkpoint, checkpoint["step"], dtype=dtype, extras=extras,
        init_digest=init_digest, remedy=remedy, source=path)


def model_shape(model) -> dict:
    """{flag: value} of the flags that are the shape of a model."""
    return {name: getattr(model.config, name) for name in MODEL_SHAPE}


def remedy_for(path: Path, flags) -> str:
    """What to do about a checkpoint that cannot be used."""
    before = None                               # the checkpoint before it
    for _, other in checkpoints(path.parent):
        if other == path:
            break
        before = other

    # A run continues the newest checkpoint in --out, whatever --resume says.
    if path.parent.resolve() == Path(flags.out).resolve():
        if before is None:
            return "start a new run with another --out"
        return f"move the file away to resume from {before.name}"
    if before is None:
        return "choose another checkpoint with --resume"
    return f"use --resume {before}"


def reading_run_state(path: Path, remedy: str):
    """Around code that takes values out of a checkpoint: its errors become one UserError.

    The checkpoint may be of another project, or of another version of this one.
    """
    remedy = f"{remedy}, or train from its weights with --init {path}"
    return reading(path, f"use the version that wrote it, {remedy}",
                   problem="does not hold the state of a run of this version of train_gpt2.py")


# ----------------------------------------------------------------------- its model

def model_from_checkpoint(
    checkpoint: dict,
    path: str | Path,
    models: dict,
    remedy: str = "choose another file (docs/formats.md)",
):
    """The model of a checkpoint's dict: ours, or another project's GPT-2.

    `models` is {recipe: class}. UserError with `path` and `remedy` if it cannot be built.
    """
    problem = "is not a model that this project can read"
    if "model_config" in checkpoint:
        # It is ours, and read_checkpoint has found the file whole: mostly the code is another one.
        problem = "is not a model of this version of the project"
        remedy = ("use the version that wrote it, with your changes of then (a changed model needs "
                  f"its own --out); if nothing was changed, {remedy}")
    with reading(path, remedy, problem=problem):
        if "model_config" in checkpoint:                # our own names need no translation
            recipe = checkpoint["recipe"]
            if recipe not in models:
                raise unexpected("its recipe", " or ".join(models), recipe)
            model = build_model(models[recipe], checkpoint["model_config"], checkpoint["model"])
            for name, p in model.named_parameters():
                if name in checkpoint.get("frozen", ()):
                    p.requires_grad_(False)
            return model

        return build_model(models["gpt2"], *gpt2_of_others(checkpoint, path))


def warn_of_backwards(checkpoint: dict, path: Path) -> None:
    """Says so if the run of a checkpoint has only read its text backwards so far (frontier)."""
    if "model_config" not in checkpoint:
        return                                          # another project's
    tokens = checkpoint.get("tokens", 0)
    turn = checkpoint.get("data", {}).get("backward_tokens", 0)
    if 0 < tokens <= turn and is_rank_0():
        print_error(f"{path} writes backwards, because its run has only read backwards so far "
                    f"({tokens:,} tokens; the first {turn:,} are read so): let it go on")


# A checkpoint has a model's weights, and not its code. Who changes model.py in the evening, trains,
# and takes the change back would else sample from a model that was never trained, or export it.

@torch.no_grad()
def reference_losses(model: torch.nn.Module) -> list[float]:
    """The losses (nats) of up to 64 fixed tokens. With the same weights other code has others.

    [] if they cannot be computed here: a kernel of the model's may need a GPU.
    """
    T = min(model.config.block_size, 64)
    V = min(model.config.vocab_size, VOCAB_SIZE)
    tokens = torch.randint(V, (1, T + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(model.lm_head.weight.device)

    is_training, precision = model.training, torch.get_float32_matmul_precision()
    model.eval()
    torch.set_float32_matmul_precision("highest")       # TF32 differs by more than a small change
    try:
        logits, _ = model(tokens[:, :-1])                                       # (1, T, V)
        return F.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="none").tolist()
    except RuntimeError:
        return []
    finally:
        model.train(is_training)
        torch.set_float32_matmul_precision(precision)


def check_code(model: torch.nn.Module, checkpoint: dict, path: Path, refuse: bool = False) -> None:
    """Says so if the model's code has changed since the checkpoint; `refuse`: by a UserError."""
    recorded = checkpoint.get("reference_losses")
    if not recorded:                                    # another project's, or not computed
        return
    losses = reference_losses(model)
    if len(losses) != len(recorded):
        return
    difference = max(abs(now - then) for now, then in zip(losses, recorded, strict=True))
    if difference <= 0.01:                              # rounding makes 1e-4
        return
    message = (f"the model's code has changed since {path} was saved: with its weights it now has "
               f"other losses (by up to {difference:.2g} nats)")
    if refuse:
        raise UserError(f"{message}: use the code that trained it")
    if is_rank_0():
        print_error(f"{message}. This goes on with the code that is there now")


# ----------------------------------------------------------------------- what a run takes from it

def restore(start: Start, data, schedule: BatchSchedule, state) -> None:
    """Loads all but the weights, if the run resumes: place in the data, moments, float16's scale.

    `state` is a train_gpt2.TrainState. UserError if the run has used other shards than those in
    --data, by their content.
    """
    restore_others(start, state)
    if start.path is None:
        return
    checkpoint = start.checkpoint
    with reading_run_state(start.path, start.remedy):
        for split, shards in data.fingerprints().items():
            # A run without validations has recorded no shards of them.
            recorded = checkpoint["data"].get(split, shards)
            if contents_of(recorded) != contents_of(shards):
                raise UserError(f"{start.path} has used other {split} shards than those in --data: "
                                "restore the shards, or start a new run from its weights with "
                                f"--init {start.path} --out ANOTHER")
        schedule.resume(start.step, checkpoint["tokens"])

        for name, p in start.model.named_parameters():
            if p in state.optimizer.optimizer_of and state.optimizer.holds(p):
                own_optimizer = state.optimizer.optimizer_of[p]
                own_optimizer.state[p] = read_state(checkpoint["optimizers"][name], name)
        for one in state.optimizer.optimizers:
            put_on_device(one)
        for group, changed in zip(state.optimizer.groups(), checkpoint["groups"], strict=True):
            group.update(changed)

        if state.scaler.is_enabled() and checkpoint["scaler"]:
            if not 0 < checkpoint["scaler"]["scale"] < math.inf:
                raise unexpected("its loss scale of float16", "a number above 0",
                                 checkpoint["scaler"]["scale"])
            state.scaler.load_state_dict(checkpoint["scaler"])

    # Its tensors are mapped from the file, which would keep its disk space even when it is removed.
    start.checkpoint = None


def restore_others(start: Start, state) -> None:
    """Loads the `others` of a train state: an average of the weights may be what is evaluated."""
    for name, other in state.others.items():
        check_plain(other.state_dict(), name)           # now, and not when it is saved
        if start.path is not None:
            with reading_run_state(start.path, start.remedy):
                other.load_state_dict(on_tensors(torch.clone, start.checkpoint["others"][name]))


def contents_of(fingerprint: list) -> list:
    """[(tokens, digest)] of the shards, without their names, which may change."""
    return [(length, digest) for _, length, digest in fingerprint]


def read_state(saved: dict, name: str) -> dict:
    """An optimizer's state for one parameter: tensors and numbers, whatever they are called."""
    state = {}
    for key, value in saved.items():
        if not is_finite(value):
            raise ValueError(f"its {key} of {name} is not finite")
        state[key] = on_tensors(torch.clone, value)             # out of the memory-mapped file
    return state


def put_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Moves an optimizer's state from the CPU to the devices of its parameters. Dtypes stay."""
    read = {p: dict(state) for p, state in optimizer.state.items()}
    optimizer.load_state_dict(optimizer.state_dict())

    # load_state_dict also casts to the weight's dtype: moments in bfloat16 would become float32.
    for p, state in optimizer.state.items():
        for key, value in read[p].items():
            if torch.is_tensor(value) and state[key].dtype == value.dtype:
                continue
            state[key] = on_tensors(lambda tensor, p=p: tensor.to(p.device), value)


# ----------------------------------------------------------------------- what a checkpoint holds

def gather_state(state, process) -> dict:
    """What a checkpoint holds of a train_gpt2.TrainState but the weights, complete on rank 0."""
    return {
        "frozen": [name for name, p in state.model.named_parameters() if not p.requires_grad],
        "optimizers": gather_optimizers(state.model, state.optimizer, process),
        "groups": state.optimizer.changed_settings(),
        "scaler": state.scaler.state_dict(),
        "others": others_state(state.others),
    }


def gather_optimizers(model: torch.nn.Module, optimizer: CombinedOptimizer, process) -> dict:
    """{parameter's name: {key: tensor or number}}: the state of all optimizers, complete on rank 0.

    Tensors are in the CPU's memory. All ranks call it, because the state of a parameter that has an
    owner is on that rank alone.
    """
    own = {}
    for name, p in model.named_parameters():
        own[name] = {}
        if p in optimizer.optimizer_of:                     # a frozen one is in none
            own[name] = optimizer.optimizer_of[p].state.get(p, {})
    outlines = process.gather({name: outline(state) for name, state in own.items()})

    gathered = {}
    for name, p in model.named_parameters():
        owner = optimizer.owner.get(p, 0)       # without an owner all ranks have the same state
        gathered[name] = {}
        for key, value in outlines[owner][name].items():
            if process.rank == owner:
                value = own[name][key]
            if owner != 0:
                value = on_tensors(lambda t, o=owner, p=p: send_to_all(t, o, p.device), value)
            if process.is_master:
                value = on_tensors(lambda t: t.to("cpu"), value)
            gathered[name][key] = value
    return gathered


def send_to_all(tensor: torch.Tensor, owner: int, device: torch.device) -> torch.Tensor:
    """The tensor of the rank `owner`, on all ranks; on the others `tensor` tells its shape."""
    if dist.get_rank() == owner:
        tensor = tensor.to(device)
    else:
        tensor = torch.empty_like(tensor, device=device)
    dist.broadcast(tensor, owner)
    return tensor


def outline(state: dict) -> dict:
    """The state of one parameter with tensors on "meta", which have a shape but no content."""
    def outline_of(tensor):
        return torch.empty_like(tensor, device="meta")

    return {key: on_tensors(outline_of, value) for key, value in state.items()}


def check_content(content: dict, path: Path) -> None:
    """RunError if a weight or a moment is not finite: such a checkpoint would replace good ones."""
    values = dict(content["model"])         # the others may hold inf: the best loss so far, say
    for name, state in content["optimizers"].items():
        for key, value in state.items():
            values[f"{key} of {name}"] = value

    for name, value in values.items():
        if not is_finite(value):
            raise RunError(f"{name} is not finite after step {content['step']}, so {path.name} was "
                           "not saved: lower --max_lr if this happens again")


def is_finite(value) -> bool:
    """Whether all tensors and numbers in what a checkpoint holds are finite."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(is_finite(item) for item in value)
    if value is None or isinstance(value, str):
        return True
    return bool(torch.as_tensor(value).isfinite().all())


def weights_digest(model: torch.nn.Module) -> int:
    """A sum of the weights' bits: ranks that have drifted apart differ in it."""
    sums = [p.detach().view(torch.int32).sum() for p in model.parameters()]
    return torch.stack(sums).sum().item()


def keep_together(model: torch.nn.Module, optimizer: CombinedOptimizer, process) -> None:
    """Gives all ranks the weights and moments of rank 0, if theirs differ by rounding.

    A CPU or GPU of another kind rounds otherwise. RunError if weights differ by more.
    """
    if len(set(process.gather(weights_digest(model)))) == 1:
        return

    # Rounding made 5e-6 in 2,000 steps, and grows with their square root. A step with another
    # gradient makes 1e-2.
    differences = [take_from_rank_0(p.detach(), p) for p in model.parameters()]
    of_ranks = torch.tensor(process.gather(max(differences)))
    rank = int(of_ranks.argmax())
    largest = of_ranks[rank].item()
    if largest > 1e-4:
        process.fail(RunError(
            f"process {rank} has drifted apart since the last checkpoint: its weights differ from "
            f"those of process 0 by {largest:.1e} of the largest one. A parameter that has no "
            "gradient on some processes does that: DDP(find_unused_parameters=True)"))

    # What only one rank has needs no other.
    for p, own_optimizer in optimizer.optimizer_of.items():
        if p not in optimizer.owner:
            on_tensors(lambda t, p=p: take_from_rank_0(t, p), own_optimizer.state.get(p, {}))

    if not process.rounds_differently:
        process.rounds_differently = True
        process.print0(f"the processes round differently (weights differ by {largest:.1e} of the "
                       "largest one): at each checkpoint all take those of process 0")


def take_from_rank_0(tensor: torch.Tensor, p: torch.Tensor) -> float:
    """Gives the tensor, which is p or part of its state, the values that it has on rank 0.

    Returns how far apart the two were, by the largest value on rank 0.
    """
    of_rank_0 = send_to_all(tensor, 0, p.device).to(tensor.device)
    difference = (tensor - of_rank_0).abs().max().item()
    tensor.copy_(of_rank_0)
    if difference == 0:
        return 0.0
    if math.isnan(difference):
        return math.inf
    return difference / max(of_rank_0.abs().max().item(), 1e-30)


def others_state(others: dict) -> dict:
    """{name: state} of a TrainState's `others`, in the CPU's memory."""
    def copy(tensor):
        return tensor.detach().to("cpu", copy=True)

    return {name: on_tensors(copy, other.state_dict()) for name, other in others.items()}


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the CPU's memory, without a copy if they are there already.

    Tensors that share memory (embedding and head) stay one.
    """
    copies = {t.data_ptr(): t.to("cpu") for t in tensors.values()}
    return {name: copies[t.data_ptr()] for name, t in tensors.items()}
