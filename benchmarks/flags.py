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
    add("table", choices=list(tables), metavar="table", help="one of those above")
    add("paths", nargs="*", metavar="path", help="what the table says above")
    add("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--recipe", default="gpt2", choices=list(RECIPES))
    add("--size", nargs="+", help="GPT-2's, or layers x width (default gpt2; for recipes 4x256, or several)")
    add("--batch_size", type=int, help="sequences a micro-step (16 on CUDA, else 4); recipes: a step (16)")
    add("--sequence_length", type=int, help="tokens (default 1024; 256 on a CPU)")
    add("--steps", type=int, help="timed steps a turn (default 20 on CUDA, else 4); for recipes: steps "
        "of a run (default 300); for data: copies of 52 MB of text (1, and 8)")
    add("--turns", type=int, help="times all is measured (2; 5 for data); for recipes: seeds (2)")
    add("--compile", action="store_true", default=None, help="torch.compile (default on CUDA only)")
    add("--no_compile", dest="compile", action="store_false", default=None)
    add("--ideas", action="store_true", help="for recipes: leave out each idea of --recipe alone")
    add("--nanochat", metavar="CLONE", help="for recipes: a clone of nanochat, to train on the same text")
    add("--plot", metavar="FILE.png", help="for recipes and compare: a picture")
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
            raise UserError(f"--{name} does not apply to bench.py {args.table}: leave it out")
        if type(value) in (int, float) and not 1 <= value < math.inf:           # True is no int here
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.plot and (Path(args.plot).suffix != ".png" or Path(args.plot).is_dir()
                      or not os.access(Path(args.plot).absolute().parent, os.W_OK | os.X_OK)):
        raise UserError(f"--plot {args.plot}: give a file .png in a folder that can be written")
    for size in args.size or ():
        if size not in GPT2_SIZES and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            raise UserError(f"--size {size}: give {', '.join(GPT2_SIZES)}, or layers x width, as 4x256")
    for what, given, table in (("path", args.paths, "compare"), ("size", args.size, "recipes")):
        if args.table != table and len(given or ()) > 1:
            raise UserError(f"bench.py {args.table} takes one {what}, not {len(given)}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
