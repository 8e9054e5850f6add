"""Measures the figures of the docs on this machine: one table a command. About how long on two CPU cores:

    python bench.py ladder          8 min   from float32 and naive attention to the step that trains
    python bench.py operators       30 s    where the time of a step on a CPU goes
    python bench.py attention       1 min   every attention kernel: time, memory, and error against float64
    python bench.py memory          8 min   memory a sequence, the largest micro-batch, by kernel and loss
    python bench.py data [PATH]     1 min   tokens/s of the loader, of fineweb.py, of a clone of build-nanogpt
    python bench.py hellaswag       3 min   HellaSwag in batches against one example a forward
    python bench.py scaling         2 min   step time by processes; estimates by size, what GPUs exchange
    python bench.py peer PATH       4 min   our step and that of a clone of build-nanogpt, in turn
    python bench.py recipes DATA    hours   gpt2 and --recipe on a folder of shards, and ablations
    python bench.py compare OUT ... 5 s     runs of train_gpt2.py by their --out: loss by tokens and by time
    python bench.py predict         5 s     step times of a GPU that is not here (--gpu), from counted work

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a subprocess, so that
none inherits another's memory or compiled code. The table is measured --turns times, and a row shows the
median: the speed of a shared machine changes within minutes.
"""
if __name__ == "__main__":              # before the slow imports: Ctrl-C, and a sign of life
    from runtime.start import begin
    begin()
import difflib
import importlib.util
import json
import math
import sys
from dataclasses import asdict

import train_gpt2
from benchmarks import tables
from benchmarks.ablation import recipes_table
from benchmarks.compare import compare_table
from benchmarks.data import data_table
from benchmarks.operators import operators_table
from benchmarks.predict import GPUS, predict_table
from benchmarks.steps import SIZES, WORKERS
from benchmarks.timing import Setting, check_outputs, machine, run_worker
from runtime.cli import FlagParser, UserError, parse_int, run_command
from runtime.device import choose_dtype, find_device
from runtime.files import replace_file

TABLES = {"ladder": tables.ladder, "attention": tables.attention_table, "memory": tables.memory_table,
          "data": data_table, "operators": operators_table, "hellaswag": tables.hellaswag_table,
          "scaling": tables.scaling_table, "peer": tables.peer_table,
          "recipes": lambda args, base: recipes_table(args, base, SIZES[args.size or "small"]),
          "compare": lambda args, base: compare_table(args.paths, args.plot),
          "predict": lambda args, base: predict_table(args.gpu)}
ELSEWHERE = "compare", "predict"            # tables of runs on other machines


def table_name(text):
    if text not in TABLES:
        near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(text, TABLES, 1))
        raise UserError(f"there is no table {text!r}: {near}`python bench.py` lists them")
    return text


def parse_args(argv):
    parser = FlagParser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    add("table", type=table_name, help="one of those above")
    add("paths", nargs="*", metavar="path", help="for peer and data: the folder of build-nanogpt; for "
        "recipes: the shards; for compare: --out folders of runs")
    add("--device", default="auto", help="auto, cuda or cpu (default auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--recipe", default="gpt2", choices=list(train_gpt2.RECIPES))
    add("--size", choices=list(SIZES), help="default gpt2 (124M), but small for hellaswag and recipes")
    add("--batch_size", type=parse_int, help="sequences a micro-step (default 16 on CUDA, 4 on a CPU); "
        "for recipes: a step (default 16)")
    add("--sequence_length", type=parse_int, help="tokens (default 1024; 256 on a CPU, except for memory)")
    add("--steps", type=parse_int, help="timed steps a turn (default 20 on CUDA, 4 on a CPU); for recipes: "
        "steps of the gpt2 runs (default 300); for data: times 52 MB of text (default 1)")
    add("--turns", type=parse_int, help="how often the table is measured (default 1 on CUDA, 2 on a CPU); "
        "for recipes: number of seeds")
    add("--compile", action="store_true", default=None, help="torch.compile on a CPU too")
    add("--no_compile", dest="compile", action="store_false", help="eager on CUDA too")
    add("--gpu", default="H100", help=f"for predict: {', '.join(GPUS)} (default H100)")
    add("--memory_gb", type=float, default=80, help="for memory: GB of the GPU (default 80)")
    add("--no_ideas", action="store_true", help="for recipes: no ablations")
    add("--only_ideas", action="store_true", help="for recipes: nothing but the ablations")
    add("--json", metavar="FILE", help="save what was measured")
    add("--plot", metavar="FILE.png", help="for ladder, recipes and compare: a picture (by matplotlib)")
    args = parser.parse_args(argv)
    args.path = args.paths[0] if args.paths else None
    if len(args.paths) > 1 and args.table != "compare":
        raise UserError(f"bench.py {args.table} takes one path, not {len(args.paths)}")
    args.device = "cpu" if args.table in ELSEWHERE else find_device(args.device)
    if args.device == "mps":
        raise UserError("bench.py measures on cuda or cpu: give --device cpu")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs the package matplotlib: pip install matplotlib, or leave the flag out")
    check_outputs(args.json, args.plot)
    for name in ("batch_size", "sequence_length", "steps", "turns", "memory_gb"):
        if (value := getattr(args, name)) is not None and not 1 <= value < math.inf:
            raise UserError(f"--{name} {value}: must be at least 1")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        return print(__doc__ + "\nThe flags: python bench.py --help")
    if argv[:1] == ["work"]:
        return run_worker(WORKERS, argv[1])
    args = parse_args(argv)
    cuda = args.device.startswith("cuda")
    args.turns = args.turns or (1 if cuda else 2)
    base = Setting(device=args.device, recipe=args.recipe, size=args.size or "gpt2",
                   dtype=choose_dtype(args.dtype, args.device), B=args.batch_size or (16 if cuda else 4),
                   T=args.sequence_length or (1024 if cuda or args.table == "memory" else 256),
                   compile=cuda if args.compile is None else args.compile,
                   warmup=3 if cuda else 2, steps=args.steps or (20 if cuda else 4))
    about = {} if args.table in ELSEWHERE else {
        "machine": machine(base.device), "setting": asdict(base), "turns": args.turns}
    if about:
        print(f"bench.py {args.table}: {about['machine']}", flush=True)
    rows = TABLES[args.table](args, base)
    if args.json:
        content = {"table": args.table, **about, "rows": rows}
        replace_file(args.json, lambda file: file.write(json.dumps(content, indent=1).encode()))


if __name__ == "__main__":
    run_command(main)
