"""Named sets of defaults: the sizes of GPT-2, the presets, and the run of --overfit. And the
command that trains a preset on a text, which fineweb.py prints."""
import shlex
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from runtime.recipe import BatchSchedule, growing_batch

GPT2_SIZES = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),            # 124,439,808 parameters
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),    # 354,823,168
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),     # 774,030,080
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),        # 1,557,611,200
}


# A text of at most so many tokens is small. fineweb.py proposes to read it twice. frontier reads it
# backwards the first time, and on a CPU computes a sample of its logits (docs/recipes.md).
SMALL_TEXT = 2**20


@dataclass(frozen=True)
class Preset:
    """The flags of --preset NAME. One that sets the recipe refuses another --recipe."""
    purpose: str            # for --help
    flags: dict             # {flag: value}


PRESETS = {
    # 298 steps are two epochs of 0.3M tokens, of which frontier reads the first one backwards. In
    # the second there are eight validations, each of which takes as long as some ten steps. The
    # sequences are long, because a play that training has not seen repeats its own names.
    "shakespeare": Preset(
        "Trains 22M parameters on 0.3M tokens of input.txt: minutes on a CPU.",
        dict(
            recipe="frontier", data="data/shakespeare", out="log/shakespeare",
            n_layer=4, n_head=2, n_embd=256, block_size=1024,
            total_batch_size=2048, max_steps=298,
            val_tokens=65536, val_every=20, hellaswag_every=0, sample_every=200,
            sample_prompt="auto", checkpoint_every=100,
        ),
    ),
    "small": Preset(
        "Trains 30M parameters on 33M tokens: a night on a CPU.",
        dict(
            n_layer=6, n_head=6, n_embd=384, block_size=256,
            total_batch_size=16384, max_steps=2000, warmup_steps=100, max_lr=1e-3,
            val_tokens=524288, val_every=200, hellaswag_every=0,
            sample_every=500, sample_prompt="auto", checkpoint_every=200,
        ),
    ),

    # GPT-3's learning rates and batches (Brown et al. 2020, arXiv:2005.14165, table 2.1). With XL's
    # batch of 1M tokens half as many steps make the same 10 billion tokens.
    "gpt2": Preset(
        "Trains GPT-2 (124M) on 10B tokens, by the defaults: for GPUs.",
        {},
    ),
    "gpt2-medium": Preset(
        "Trains 355M parameters on 10B tokens: for GPUs.",
        dict(**GPT2_SIZES["gpt2-medium"], max_lr=3e-4),
    ),
    "gpt2-large": Preset(
        "Trains 774M parameters on 10B tokens: for GPUs.",
        dict(**GPT2_SIZES["gpt2-large"], max_lr=2.5e-4),
    ),
    "gpt2-xl": Preset(
        "Trains 1.6B parameters on 10B tokens: for GPUs.",
        dict(
            **GPT2_SIZES["gpt2-xl"],
            total_batch_size=1048576, max_steps=9536, warmup_steps=358, max_lr=2e-4,
        ),
    ),

    # Measured in docs/finetuning.md.
    "finetune": Preset(
        "Finetunes the weights of --init on 1.2M tokens of your own text (--data).",
        dict(
            init="gpt2", out="log/finetune",
            total_batch_size=8192, max_steps=150, warmup_steps=15, max_lr=1e-4,
            val_tokens=524288, val_every=25, hellaswag_every=0,
            sample_every=50, sample_prompt="auto", checkpoint_every=25, keep_checkpoints=1,
        ),
    ),
}

# --overfit is the lecture's sanity run: 50 steps on one batch, at a constant rate, with GPT-2's
# vocabulary as it is. A model narrower than GPT-2 has more steps (FlagTable.resolve). Without a
# folder in `out` a run writes nothing. (It is not among PRESETS, because it reads input.txt in
# place of shards.)
OVERFIT = Preset(
    "Overfits one batch of 4 x 32 tokens.",
    dict(
        out="", vocab_size=50257, total_batch_size=4 * 32, sequence_length=32, shuffle=False,
        max_steps=50, warmup_steps=0, max_lr=3e-4,
        val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0,
    ),
)


# ------------------------------------------------------------------- which preset for a text

def next_command(out: Path, val: list[int], train: list[int]) -> str:
    """The command that trains on shards of so many tokens, as a shell reads it, and what it does.

    The command is the last of two lines.
    """
    # A preset leaves some flags as Config has them.
    preset = preset_for(sum(train))
    flags = PRESETS[preset].flags
    preset_block_size = flags.get("block_size", 1024)
    steps = flags.get("max_steps", 19073)
    block_size = length_that_fits(preset_block_size, min(max(val), max(train)))
    # As a run counts: an epoch has whole sequences alone.
    epoch = sum((n - 1) // block_size * block_size for n in train)

    data = shlex.quote(str(out))
    log = shlex.quote(f"log/{out.resolve().name}")
    command = f"python train_gpt2.py --preset {preset} --data {data} --out {log}"
    if preset == "shakespeare":
        epochs = 2 if epoch <= SMALL_TEXT else 1        # of two the first is read backwards
        steps = steps_of_epochs(epochs, sum(train))
        command += f" --max_steps {steps}"
        # The preset's period is for its own steps. Here, too, what is read forwards has 8 or more
        # validations, and not many more: each takes some 4% of the training's time.
        if steps != flags["max_steps"]:
            forward = steps - turn_of(steps, sum(train))
            command += f" --val_every {forward // 8}"
    if block_size < preset_block_size:
        command += f" --block_size {block_size}"

    epochs = epochs_of_run(preset, steps, epoch)
    text = f"the run below makes {epochs:g} epochs of the text"
    if epochs == 1:
        text = "the run below makes 1 epoch of the text"
    if preset == "shakespeare" and epoch <= SMALL_TEXT:
        if epochs > 3:
            return (f"{text}, which is too small for it: instead train the weights of a model that "
                    f"knows the language (docs/finetuning.md)\nfrom scratch: {command}")
        text += ", the first of them backwards"
    return f"{text}\nnext: {command}"


def preset_for(tokens: int) -> str:
    """The preset for a text of so many training tokens."""
    # `small` trains on 33M tokens: with fewer it would read a text more than once.
    if tokens < 32_768_000:
        return "shakespeare"
    if tokens < 1_000_000_000:
        return "small"
    return "gpt2"


def epochs_of_run(preset: str, steps: int, tokens: int) -> float:
    """How often a run of so many steps reads a text, of which an epoch has so many tokens."""
    total_batch_size = PRESETS[preset].flags.get("total_batch_size", 524288)
    tokens_of_run = steps * total_batch_size
    if preset == "shakespeare":
        tokens_of_run = schedule_of(steps).tokens_before(steps)
    return float(f"{tokens_of_run / tokens:.2g}")


def length_that_fits(length: int, tokens: int) -> int:
    """`length`, halved until a sequence and its last target fit into a shard of so many tokens."""
    while length + 1 > tokens:
        length //= 2
    return length


def schedule_of(steps: int) -> BatchSchedule:
    """That of --preset shakespeare with so many steps: the batch of the first may be smaller."""
    config = SimpleNamespace(**PRESETS["shakespeare"].flags | {"max_steps": steps})
    config.sequence_length = config.block_size
    return BatchSchedule(config.total_batch_size, steps, growing_batch(config))


def tokens_of_epoch(tokens: int) -> int:
    """An epoch of --preset shakespeare has whole sequences."""
    T = PRESETS["shakespeare"].flags["block_size"]
    return (tokens - 1) // T * T


def turn_of(steps: int, tokens: int) -> int:
    """How many steps --preset shakespeare reads a small text backwards at first.

    See read_backwards in frontier.py.
    """
    schedule = schedule_of(steps)
    epoch = tokens_of_epoch(tokens)
    backward = min(epoch, max(0, schedule.tokens_before(steps) - epoch))
    return schedule.first_step_after(backward)


def steps_of_epochs(epochs: int, tokens: int) -> int:
    """The steps in which --preset shakespeare reads so many tokens about `epochs` times, but at
    least 100.
    """
    tokens = epochs * tokens_of_epoch(tokens)

    def tokens_of_run(steps):
        return schedule_of(steps).tokens_before(steps)

    # The first number of steps that reads them all. Where a step more means larger batches all the
    # way, it reads far more than them: then the one before, if that is nearer.
    steps = bisect_left(range(2**32), tokens, lo=1, key=tokens_of_run)
    beyond = tokens_of_run(steps) - tokens
    missing = tokens - tokens_of_run(steps - 1)
    if beyond > max(missing, PRESETS["shakespeare"].flags["total_batch_size"]):
        steps -= 1
    return max(100, steps)
