"""The flags of train_gpt2.py and their defaults, which are those of GPT-2 (124M)."""
import math
from dataclasses import asdict, dataclass

from presets import OVERFIT, PRESETS
from recipes import RECIPES, load_model, models
from runtime.checkpoint import Start, find_start
from runtime.flags import FlagTable, check_ranks_agree, flag
from runtime.hardware import agreed_dtype

# The groups of --help.
START, DATA, MODEL, BATCH = "start", "data", "model", "batch"
OPTIM, SPEED, OUTPUT = "optimisation", "speed", "output"


@dataclass
class Config:
    """All flags. Of these sources of a flag's value a later one wins:

    1. the default below
    2. the recipe's default (Recipe.defaults)
    3. the preset
    4. the recipe's learning rates (Recipe.rates): those of the presets are for AdamW
    5. the checkpoint of a run that resumes, except for flags that are `per_run`
    6. the command line, which may not change a flag that is `fixed` when a run resumes
    7. the shape of the model of --init

    Last, `resolve` gives a flag that is "auto" its value, but for three, which start_run in
    train_gpt2.py decides: sample_prompt by the data, compile by the model, and batch_size by a
    trial. `word` is what may stand in place of a number; `flag` explains the other settings.
    """
    preset: str = flag("gpt2", START, "A named set of defaults. The presets are listed below.",
                       choices=list(PRESETS), per_run=True)
    dry_run: bool = flag(False, START, "Print what the run would do and how long it would take, "
                         "and write nothing.", per_run=True)

    data: str = flag("edu_fineweb10B", DATA, "The folder of the token shards.", is_path=True)
    overfit: bool = flag(False, DATA, "Overfit one batch of 4 x 32 tokens as a sanity check, and "
                         "write nothing.")
    eval_only: bool = flag(False, DATA, "Print the loss of the model of --init, or of the run in "
                           "--out, on the validation shards of --data, and write nothing.",
                           per_run=True)
    shuffle: bool = flag(True, DATA, "Shuffle the shards and their sequences anew in each epoch.",
                         fixed=True)
    val_tokens: int = flag(10_485_760, DATA, "The number of tokens in a validation, from the "
                           "beginning of the validation shards.", smallest=1)
    hellaswag_data: str = flag("", DATA, "The HellaSwag examples, a .jsonl file. By default they "
                               "are downloaded from the Hugging Face hub.", is_path=True)

    recipe: str = flag("gpt2", MODEL, "The model, optimizers and schedules.",
                       choices=list(RECIPES), fixed=True)
    init: str = flag("scratch", MODEL, "Where the initial weights come from: 'scratch' (random), "
                     "gpt2 or another model on the Hugging Face hub (OWNER/NAME), a checkpoint, "
                     "or the folder of a run or of an exported model.", is_path=True, fixed=True)
    n_layer: int = flag(12, MODEL, "The number of blocks.", smallest=1, fixed=True)
    n_head: int = flag(12, MODEL, "The number of attention heads in each block.",
                       smallest=1, fixed=True)
    n_embd: int = flag(768, MODEL, "The width of the model.", smallest=1, fixed=True)
    block_size: int = flag(1024, MODEL, "The length in tokens of the longest sequence that the "
                           "model can take.", smallest=1, fixed=True)
    # Token ids are uint16 in the shards: there are at most 65536.
    vocab_size: int = flag(50304, MODEL, "The number of rows in the embedding. The default is "
                           "GPT-2's 50257 tokens, padded to a multiple of 128.",
                           smallest=1, largest=65536, fixed=True)

    total_batch_size: int = flag(524288, BATCH, "The number of tokens per optimizer step, over all "
                                 "processes.", smallest=1, fixed=True)
    batch_size: int = flag("auto", BATCH, "The most sequences that one process computes at once "
                           "(its micro-batch). 'auto' means as many as fit into a GPU's memory, "
                           "and at most 65536 tokens, or 4096 without a GPU.",
                           word="auto", smallest=1, per_run=True)
    sequence_length: int = flag("auto", BATCH, "The number of tokens in a sequence. 'auto' means "
                                "--block_size.", word="auto", smallest=1, fixed=True)

    max_steps: int = flag(19073, OPTIM, "The number of optimizer steps in the run. 19073 steps of "
                          "the default batch are one epoch of 10 billion tokens.", smallest=1)
    warmup_steps: int = flag(715, OPTIM, "The number of steps of linear warmup. 715 steps of the "
                             "default batch are GPT-3's 375 million tokens.")
    max_lr: float = flag(6e-4, OPTIM, "The learning rate after the warmup, which in speedrun and "
                         "frontier is Muon's.", smallest=1e-12)
    min_lr: float = flag("auto", OPTIM, "The learning rate at the end of the run. 'auto' means a "
                         "tenth of --max_lr, or in frontier a value that depends on --max_steps.",
                         word="auto")
    cooldown: float = flag("auto", OPTIM, "The share of the run, at its end, over which the "
                           "learning rate falls, in recipes that have one. 'auto' means 0.2856 in "
                           "speedrun, and in frontier a value that depends on --max_steps.",
                           word="auto", smallest=1e-12, largest=1)
    weight_decay: float = flag(0.1, OPTIM, "The weight decay of AdamW (on matrices and "
                               "embeddings) or of Muon.")
    grad_clip: float = flag(1.0, OPTIM, "The largest norm of the gradient: a larger gradient is "
                            "scaled down to this norm. 'inf' turns clipping off.",
                            smallest=1e-12, largest=math.inf)
    seed: int = flag(1337, OPTIM, "The random seed of new weights and of the order of the data.",
                     largest=2**63 - 1, fixed=True)

    device: str = flag("auto", SPEED, "The device to train on: cuda, mps or cpu. 'auto' means the "
                       "first of these that is available.", per_run=True)
    dtype: str = flag("auto", SPEED, "The number format of matrix products (autocast). 'auto' "
                      "means bfloat16 where it is fast, else float16 on CUDA and float32 "
                      "elsewhere; on a CPU a run that resumes keeps its own.",
                      choices=["auto", "float32", "bfloat16", "float16"])
    tf32: bool = flag(True, SPEED, "Use TF32 for float32 matrix products on CUDA.")
    compile: bool = flag("auto", SPEED, "Compile the model with torch.compile. 'auto' means on "
                         "CUDA, if the run is long enough to win back the time of compiling.",
                         per_run=True)
    attention: str = flag("auto", SPEED, "The kernel that computes attention. 'auto' lets torch "
                          "choose, and takes 'naive' (the plain formula) where naive is faster.",
                          choices=["auto", "naive"])
    recompute: bool = flag(False, SPEED, "Compute the blocks again in the backward pass, to save "
                           "memory (activation checkpointing).", per_run=True)
    shard_optimizer: bool = flag(False, SPEED, "Divide the optimizers' state among the processes, "
                                 "to save memory (ZeRO stage 1).", per_run=True)

    val_every: int = flag(250, OUTPUT, "The number of steps between validations; 0 turns them off.")
    hellaswag_every: int = flag(250, OUTPUT, "The number of steps between HellaSwag evaluations; "
                                "0 turns them off.")
    sample_every: int = flag(250, OUTPUT, "The number of steps between samples of text; 0 turns "
                             "them off.")
    sample_prompt: str = flag("Hello, I'm a language model,", OUTPUT, "The text that the samples "
                              "continue. 'auto' means the first line of the validation shards.")
    checkpoint_every: int = flag(250, OUTPUT, "The number of steps between checkpoints; 0 turns "
                                 "them off.")
    keep_checkpoints: int = flag(3, OUTPUT, "How many of the newest checkpoints to keep, beside "
                                 "the one with the lowest validation loss, or 'all'.",
                                 word="all", smallest=1)
    out: str = flag("log", OUTPUT, "The folder for checkpoints and logs.", is_path=True,
                    per_run=True)
    resume: str = flag("auto", OUTPUT, "The checkpoint, or the folder of a run, from which the run "
                       "begins if --out has no checkpoint yet. 'auto' means a new run. Where --out "
                       "has checkpoints, the newest is continued.", bare="auto", is_path=True,
                       per_run=True)
    wandb: bool = flag(False, OUTPUT, "Also log to Weights & Biases (pip install wandb).",
                       per_run=True)


FLAGS = FlagTable(Config, RECIPES, PRESETS, OVERFIT)


def resolve(given: dict, process) -> tuple[dict, Config, Start]:
    """What the flags on the command line, {flag: value}, mean, the same on all ranks.

    Returns the flags as asked, {flag: value}, some of them "auto"; the values that the run uses;
    and where it starts, which the flags tell, and which has some of the values.
    """
    start = find_start(FLAGS.merge(given), process, models(), load_model)
    with process.together():
        asked, config = FLAGS.resolve(given, start, process)
    config.dtype = agreed_dtype(asked.dtype, config.dtype, process)
    check_ranks_agree(config, process)
    return asdict(asked), config, start
