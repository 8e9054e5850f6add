"""The flags of bench.py."""
import importlib.util
import math
import os
from argparse import Namespace
from pathlib import Path

from benchmarks.steps import SIZES
from benchmarks.timing import Setting
from runtime.cli import FlagParser, UserError
from runtime.device import choose_device, choose_dtype
from train_gpt2 import RECIPES

# the tables to which a flag says something, where these are few
ONLY = {"no_ideas": ["recipes"], "only_ideas": ["recipes"],
        "plot": ["recipes", "compare"], "curve": ["compare"]}
FILES = {"plot": ".png", "curve": ".csv"}


def parse_args(argv: list[str], tables: dict, description: str) -> tuple[Namespace, Setting]:
    """The flags, and the setting that they name, which a table varies. UserError for flags that cannot be."""
    parser = FlagParser(prog="bench.py", description=description)
    add = parser.add_argument
    add("table", choices=list(tables), metavar="table", help="one of those above")
    add("paths", nargs="*", metavar="path", help="what the table says above")
    add("--device", default="auto", help="auto, cuda, mps or cpu (default auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--recipe", default="gpt2", choices=list(RECIPES))
    add("--size", choices=list(SIZES), help="default gpt2 (124M), but small for recipes")
    add("--batch_size", type=int, help="sequences a micro-step (default 16 on CUDA, else 4); for "
        "recipes: a step (default 16)")
    add("--sequence_length", type=int, help="tokens (default 1024; 256 on a CPU, except for memory)")
    add("--steps", type=int, help="timed steps a turn (default 20 on CUDA, else 4); for recipes: steps "
        "of the gpt2 runs (default 300); for data: times 52 MB of text (default 1, and 8)")
    add("--turns", type=int, help="how often all is measured (2; 5 for data); for recipes: seeds (2)")
    add("--compile", action="store_true", default=None, help="torch.compile (default on CUDA only)")
    add("--no_compile", dest="compile", action="store_false", default=None)
    add("--no_ideas", action="store_true", help="for recipes: no ablations")
    add("--only_ideas", action="store_true", help="for recipes: nothing but the ablations")
    add("--plot", metavar="FILE.png", help="for recipes and compare: a picture")
    add("--curve", metavar="FILE.csv", help="for compare: the mean of the runs, as a curve to compare with")
    check(args := parser.parse_args(argv), parser)
    args.path = args.paths[0] if args.paths else None
    device = "cpu" if args.table == "compare" else choose_device(args.device)
    cuda, args.turns = device.startswith("cuda"), args.turns or (5 if args.table == "data" else 2)
    return args, Setting(
        device=device, recipe=args.recipe, size=args.size or ("small" if args.table == "recipes" else "gpt2"),
        dtype=choose_dtype(args.dtype, device), B=args.batch_size or (16 if cuda else 4),
        T=args.sequence_length or (256 if device == "cpu" and args.table != "memory" else 1024),
        compile=cuda if args.compile is None else args.compile,
        warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))


def check(args: Namespace, parser: FlagParser) -> None:
    """UserError for a flag that says nothing to its table, a number below 1, a file that cannot be written:
    its name must end as such files' do, so that nothing else is replaced by mistake."""
    for name, value in vars(args).items():
        tables = ONLY.get(name, () if args.table == "compare" else (args.table,))
        if value != parser.get_default(name) and name not in ("table", "paths") and (
                args.table not in tables):
            raise UserError(f"--{name} does not apply to bench.py {args.table}: leave it out")
        if type(value) in (int, float) and not 1 <= value < math.inf:           # True is no int here
            raise UserError(f"--{name} {value}: must be at least 1")
        if name in FILES and value is not None:
            if Path(value).suffix != FILES[name] or os.path.exists(value) and not os.path.isfile(value):
                raise UserError(f"--{name} {value}: give a file whose name ends in {FILES[name]}")
            if not os.access(Path(value).absolute().parent, os.W_OK | os.X_OK):
                raise UserError(f"--{name} {value}: its folder cannot be written: choose another")
    if len(args.paths) > 1 and args.table != "compare":
        raise UserError(f"bench.py {args.table} takes one path, not {len(args.paths)}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
