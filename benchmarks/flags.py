"""The flags of bench.py."""
import importlib.util
import math
import os
import re
from argparse import Namespace
from pathlib import Path

from benchmarks.timing import Setting
from model import GPT2_SIZES
from runtime.cli import FlagParser, UserError
from runtime.device import choose_device, choose_dtype
from train_gpt2 import RECIPES

# the tables to which a flag says something, where these are few
ONLY = {"ideas": ["recipes"], "nanochat": ["recipes"], "plot": ["recipes", "compare"],
        "compile": ["ladder", "peer"]}


def parse_args(argv: list[str], tables: dict, description: str) -> tuple[Namespace, Setting]:
    """The flags, and the setting that they name, which a table varies. UserError for flags that cannot be."""
    parser = FlagParser(prog="bench.py", description=description)
    add = parser.add_argument
    add("table", choices=list(tables), metavar="table", help="One of the tables above.")
    add("paths", nargs="*", metavar="path", help="The PATH, DATA or OUT of the table.")
    add("--device", default="auto", help="The device: cuda, mps or cpu. 'auto' means the first of these that "
        "is available (default auto).")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="The number format of matrix products. 'auto' means bfloat16 where the "
        "hardware has it (default auto).")
    add("--recipe", default="gpt2", choices=list(RECIPES), help="The recipe (default gpt2).")
    add("--size", nargs="+", help="A size of GPT-2, or layers x width (default gpt2, or 4x256 for recipes, "
        "which takes several sizes).")
    add("--batch_size", type=int, help="The number of sequences in a micro-batch (default 16 on CUDA, else "
        "4), or for recipes in a batch (default 16).")
    add("--sequence_length", type=int, help="The number of tokens in a sequence (default 1024, or 256 on a "
        "CPU).")
    add("--steps", type=int, help="The number of timed steps per turn (default 20 on CUDA, else 4), for "
        "recipes of steps per run (default 300), for data of copies of 52 MB of text (default 1, then 8).")
    add("--turns", type=int, help="How many times everything is measured (default 2, or 5 for data), or "
        "for recipes the number of seeds (default 2).")
    add("--compile", action="store_true", default=None, help="Use torch.compile (default: only on CUDA).")
    add("--no_compile", dest="compile", action="store_false", default=None, help="Turn --compile off.")
    add("--ideas", action="store_true", help="Train --recipe without each of its ideas in turn (recipes).")
    add("--nanochat", metavar="CLONE", help="Also train nanochat, from its clone, on this text (recipes).")
    add("--plot", metavar="FILE.png", help="Draw the curves (recipes and compare).")
    check(args := parser.parse_args(argv), parser)
    args.size = args.size or ["4x256" if args.table == "recipes" else "gpt2"]
    args.path = args.paths[0] if args.paths else None
    device = "cpu" if args.table == "compare" else choose_device(args.device)
    cuda, args.turns = device.startswith("cuda"), args.turns or (5 if args.table == "data" else 2)
    return args, Setting(
        device=device, recipe=args.recipe, size=args.size[0],
        dtype=choose_dtype(args.dtype, device), B=args.batch_size or (16 if cuda else 4),
        T=args.sequence_length or (256 if device == "cpu" else 1024),
        compile=cuda if args.compile is None else args.compile,
        warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))


def check(args: Namespace, parser: FlagParser) -> None:
    """UserError for a flag that says nothing to its table, and for a value that cannot be."""
    for name, value in vars(args).items():
        tables = ONLY.get(name, () if args.table == "compare" else (args.table,))
        if value != parser.get_default(name) and name not in ("table", "paths") and (
                args.table not in tables):
            raise UserError(f"--{name} does not apply to bench.py {args.table}: leave the flag out")
        if type(value) in (int, float) and not 1 <= value < math.inf:           # True is no int here
            raise UserError(f"--{name} {value} is out of range: choose at least 1")
    if args.plot and (Path(args.plot).suffix != ".png" or Path(args.plot).is_dir()
                      or not os.access(Path(args.plot).absolute().parent, os.W_OK | os.X_OK)):
        raise UserError(f"--plot {args.plot} is not a .png in a writable folder: choose another path")
    for size in args.size or ():
        if size not in GPT2_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            raise UserError(f"--size {size} is unknown: choose {', '.join(GPT2_SIZES)}, or layers x width, "
                            "such as 4x256")
    for what, given, table in (("path", args.paths, "compare"), ("size", args.size, "recipes")):
        if args.table != table and len(given or ()) > 1:
            raise UserError(f"bench.py {args.table} takes one {what}, not {len(given)}: drop the rest")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib, which is missing: pip install matplotlib")
