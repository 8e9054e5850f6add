"""The flags of bench.py."""
import importlib.util
import math
import os
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

from benchmarks.steps import SIZES
from benchmarks.timing import Setting
from runtime.cli import FlagParser, UserError, parse_int
from runtime.device import choose_device, choose_dtype
from train_gpt2 import RECIPES

# the tables to which a flag says something, where these are few
ONLY = {"memory_gb": ("memory",), "no_ideas": ("recipes",), "only_ideas": ("recipes",),
        "plot": ("ladder", "recipes", "compare"), "curve": ("compare",)}


def parse_args(argv: list[str], tables: Collection[str], description: str) -> tuple[Namespace, Setting]:
    """The flags, and the setting that they name, which a table varies."""
    parser = FlagParser(prog="bench.py", description=description)
    add = parser.add_argument
    add("table", choices=list(tables), metavar="table", help="one of those above")
    add("paths", nargs="*", metavar="path", help="for peer and data: the folder of build-nanogpt; for "
        "recipes: the shards; for compare: --out folders of runs, and .csv files with tokens,loss")
    add("--device", default="auto", help="auto, cuda or cpu (default auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--recipe", default="gpt2", choices=list(RECIPES))
    add("--size", choices=list(SIZES), help="default gpt2 (124M), but small for hellaswag and recipes")
    add("--batch_size", type=parse_int, help="sequences a micro-step (default 16 on CUDA, 4 on a CPU); "
        "for recipes: a step (default 16)")
    add("--sequence_length", type=parse_int, help="tokens (default 1024; 256 on a CPU, except for memory)")
    add("--steps", type=parse_int, help="timed steps a turn (default 20 on CUDA, 4 on a CPU); for recipes: "
        "steps of the gpt2 runs (default 300); for data: times 52 MB of text (default 1, and 8)")
    add("--turns", type=parse_int, help="how often the table is measured (default 1 on CUDA, 2 on a CPU, "
        "5 for data); for recipes: number of seeds")
    add("--compile", action="store_true", default=None, help="torch.compile (default on CUDA only)")
    add("--no_compile", dest="compile", action="store_false", default=None)
    add("--memory_gb", type=float, default=80, help="for memory: GB of the GPU (default 80)")
    add("--no_ideas", action="store_true", help="for recipes: no ablations")
    add("--only_ideas", action="store_true", help="for recipes: nothing but the ablations")
    add("--json", metavar="FILE", help="save what was measured")
    add("--plot", metavar="FILE.png", help="for ladder, recipes and compare: a picture")
    add("--curve", metavar="FILE.csv", help="for compare: the mean of the runs, as a curve to compare with")
    args = parser.parse_args(argv)
    check_meaning(args, parser)
    args = check_args(args)
    cuda = args.device.startswith("cuda")
    args.turns = args.turns or (5 if args.table == "data" else 1 if cuda else 2)
    small = args.table in ("hellaswag", "recipes")
    return args, Setting(
        device=args.device, recipe=args.recipe, size=args.size or ("small" if small else "gpt2"),
        dtype=choose_dtype(args.dtype, args.device), B=args.batch_size or (16 if cuda else 4),
        T=args.sequence_length or (1024 if cuda or args.table == "memory" else 256),
        compile=cuda if args.compile is None else args.compile,
        warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))


def check_meaning(args: Namespace, parser: FlagParser) -> None:
    """UserError for a flag that says nothing to its table."""
    for name, value in vars(args).items():
        tables = ONLY.get(name, () if args.table == "compare" else (args.table,))
        if value != parser.get_default(name) and name not in ("table", "paths", "json") and (
                args.table not in tables):
            raise UserError(f"--{name} does not apply to bench.py {args.table}: leave it out")


def check_args(args: Namespace) -> Namespace:
    """The same with the device chosen. UserError for flags that cannot be."""
    args.path = args.paths[0] if args.paths else None
    if len(args.paths) > 1 and args.table != "compare":
        raise UserError(f"bench.py {args.table} takes one path, not {len(args.paths)}")
    found = "cpu" if args.table == "compare" else choose_device(args.device)
    args.device = "cuda" if found == "cuda:0" else found         # of several processes each finds its own
    if args.device == "mps":
        raise UserError("bench.py measures on cuda or cpu: give --device cpu")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
    check_outputs({"--json": (args.json, ".json"), "--plot": (args.plot, ".png"),
                   "--curve": (args.curve, ".csv")})
    for name in ("batch_size", "sequence_length", "steps", "turns", "memory_gb"):
        if (value := getattr(args, name)) is not None and not 1 <= value < math.inf:
            raise UserError(f"--{name} {value}: must be at least 1")
    return args


def check_outputs(given: dict[str, tuple[str | None, str]]) -> None:
    """Before anything is measured: UserError unless each {flag: (path, suffix)} can be written. Its name must
    end in its suffix, so that nothing else is replaced by mistake."""
    for flag, (path, suffix) in given.items():
        if path is None:
            continue
        folder = Path(path).absolute().parent
        if Path(path).suffix != suffix or os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"{flag} {path}: give a file whose name ends in {suffix}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{flag} {path}: {folder} is no folder that can be written: choose another")
