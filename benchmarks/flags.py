"""The flags of bench.py."""
import importlib.util
import math
import os
import re
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

from benchmarks.timing import Setting
from model import GPT2_SIZES
from runtime.cli import FlagParser, UserError
from runtime.device import choose_device, choose_dtype
from train_gpt2 import RECIPES

# The flags that say something to each table. All others are refused.
OF_A_STEP = ("device", "dtype", "recipe", "size", "batch_size", "sequence_length", "steps", "turns")
FLAGS = {
    "ladder": (*OF_A_STEP, "compile"),
    "attention": OF_A_STEP,
    "data": ("steps", "turns"),
    "peer": (*OF_A_STEP, "compile"),
    "recipes": (*OF_A_STEP, "ideas", "nanochat", "plot", "title"),
    "compare": ("plot", "title"),
}

# How many paths each table takes at most.
PATHS = {"ladder": 0, "attention": 0, "data": 1, "peer": 1, "recipes": 1, "compare": math.inf}

# The tables of which nothing runs on a GPU.
ON_THE_CPU = ("data", "compare")


def make_parser(tables: dict, description: str) -> FlagParser:
    parser = FlagParser(prog="bench.py", description=description)
    add = parser.add_argument
    add("table", choices=list(tables), metavar="table", help="One of the tables above.")
    add("paths", nargs="*", metavar="path", help="The PATH, DATA or OUT of the table.")
    add("--device", default="auto", help="The device: cuda, mps or cpu. 'auto' means the first of "
        "these that is available (default auto).")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="The number format of matrix products. 'auto' means bfloat16 where the hardware has "
        "it (default auto).")
    add("--recipe", default="gpt2", choices=list(RECIPES), help="The recipe (default gpt2).")
    add("--size", nargs="+", help="A size of GPT-2, or layers x width (default gpt2, or 4x256 for "
        "recipes, which takes several sizes).")
    add("--batch_size", type=int, help="The number of sequences in a micro-batch (default 16 on "
        "CUDA, else 4), or for recipes in a batch (default 16).")
    add("--sequence_length", type=int, help="The number of tokens in a sequence (default 1024, or "
        "256 on a CPU).")
    add("--steps", type=int, help="The number of timed steps per turn (default 20 on CUDA, else 4; "
        "for attention 50), for recipes of steps per run (default 300), for data of copies of 52 MB "
        "of text (default 1, then 8).")
    add("--turns", type=int, help="How many times everything is measured (default 2, or 5 for "
        "data), or for recipes the number of seeds (default 2).")
    add("--compile", action="store_true", default=None,
        help="Use torch.compile (default: only on CUDA).")
    add("--no_compile", dest="compile", action="store_false", default=None,
        help="Turn --compile off.")
    add("--ideas", action="store_true",
        help="Train --recipe without each of its ideas in turn (recipes).")
    add("--nanochat", metavar="CLONE",
        help="Also train nanochat, from its clone, on this text (recipes).")
    add("--plot", metavar="FILE.png", help="Draw the curves (recipes and compare).")
    add("--title", metavar="TEXT", help="The title of the picture that --plot draws.")
    return parser


def parse_args(argv: list[str], tables: dict, description: str) -> tuple[Namespace, Setting]:
    """The flags, and the setting that they name, which a table varies.

    UserError for flags that cannot be.
    """
    parser = make_parser(tables, description)
    args = parser.parse_args(argv)
    check_flags(args, parser)
    check_paths(args)
    check_sizes(args)
    check_plot(args.plot)
    if args.title and not args.plot:
        raise UserError("--title is for the picture: add --plot FILE.png, or leave out --title")

    default_size, default_turns = "gpt2", 2
    if args.table == "recipes":
        default_size = "4x256"
    if args.table == "data":
        default_turns = 5
    args.size = args.size or [default_size]
    args.turns = args.turns or default_turns
    args.path = None
    if args.paths:
        args.path = args.paths[0]

    device = "cpu"
    if args.table not in ON_THE_CPU:
        # choose_device sets a variable of CUDA's allocator, for our training. The processes that
        # train set it again themselves; a peer's gets the environment of the user.
        with patch.dict(os.environ):
            device = choose_device(args.device)
    return args, default_setting(args, device)


def default_setting(args: Namespace, device: str) -> Setting:
    """The Setting of the flags, with the defaults of the device where there is no flag."""
    s = Setting(
        device=device,
        recipe=args.recipe,
        size=args.size[0],
        dtype=choose_dtype(args.dtype, device),
        B=4,
        T=1024,
        compile=False,
        warmup=2,
        steps=4,
    )
    if device == "cpu":
        s.T = 256
    if device.startswith("cuda"):
        s.B = 16
        s.compile = True
        s.warmup = 3
        s.steps = 20
    if args.table == "attention":
        s.steps = 50                    # one layer takes milliseconds: a median needs more of them

    if args.batch_size:
        s.B = args.batch_size
    if args.sequence_length:
        s.T = args.sequence_length
    if args.compile is not None:
        s.compile = args.compile
    if args.steps:
        s.steps = args.steps
    return s


# ---------------------------------------------------------------------- mistakes

def check_flags(args: Namespace, parser: FlagParser) -> None:
    """UserError for a flag that says nothing to its table, and for a number that cannot be."""
    for name, value in vars(args).items():
        if name in ("table", "paths") or value == parser.get_default(name):
            continue
        if name not in FLAGS[args.table]:
            raise UserError(f"--{name} does not apply to bench.py {args.table}: leave the flag out")
        if type(value) is int and value < 1:                # a switch is a bool
            raise UserError(f"--{name} {value} is out of range: choose at least 1")


def check_paths(args: Namespace) -> None:
    most, given = PATHS[args.table], len(args.paths)
    if given > most:
        allowed = {0: "no path", 1: "one path"}[most]
        raise UserError(f"bench.py {args.table} takes {allowed}, not {given} "
                        f"({' '.join(args.paths)}): drop the rest")


def check_sizes(args: Namespace) -> None:
    sizes = args.size or []
    for size in sizes:
        if size not in GPT2_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            raise UserError(f"--size {size} is unknown: choose {', '.join(GPT2_SIZES)}, or layers x "
                            "width, such as 4x256")
    if args.table != "recipes" and len(sizes) > 1:
        raise UserError(f"bench.py {args.table} takes one size, not {len(sizes)}: drop the rest")


def check_plot(path: str | None) -> None:
    if path is None:
        return
    plot = Path(path)
    can_write = os.access(plot.absolute().parent, os.W_OK | os.X_OK)
    if plot.suffix != ".png" or plot.is_dir() or not can_write:
        raise UserError(f"--plot {path} is not a .png in a writable folder: choose another path")
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib, which is missing: pip install "
                        "matplotlib")
