"""Benchmarks of this machine, one table a command. About how long they take on two CPU cores:

    python bench.py ladder          8 min   from float32 and naive attention to the step that trains
    python bench.py attention       1 min   every attention kernel: time, and error against float64
    python bench.py data [PATH]     5 min   the loader; fineweb.py, and that of a clone of build-nanogpt
    python bench.py peer PATH       4 min   our step and that of a clone of build-nanogpt, or of this project
    python bench.py recipes DATA    hours   the recipes on a folder of shards (and --nanochat)
    python bench.py compare OUT ... 5 s     runs of train_gpt2.py by their --out, and .csv files tokens,loss

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a process of its own, so
that none inherits another's memory or compiled code. All rows are measured in turn, --turns times, and a row
shows the median, as the speed of a shared machine changes within minutes; for recipes the mean of the seeds.
"""
# first, because it refuses an old Python in one line
from runtime.cli import run_command

import sys
from datetime import date

import torch

from benchmarks import tables
from benchmarks.ablation import recipes_table, train_without
from benchmarks.compare import compare_table
from benchmarks.data import data_table
from benchmarks.flags import parse_args
from benchmarks.steps import WORKERS
from benchmarks.timing import run_worker
from runtime.device import device_name

# each prints its table: (flags, their Setting) -> its rows
TABLES = {"ladder": tables.ladder, "attention": tables.attention_table, "data": data_table,
          "peer": tables.peer_table, "recipes": recipes_table, "compare": compare_table}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        return print(__doc__ + "\nThe flags: python bench.py --help")
    if argv[:1] == ["work"]:
        return run_worker(WORKERS, argv[1])
    if argv[:1] == ["train"]:
        return train_without(argv[1], argv[2:])
    args, base = parse_args(argv, TABLES, __doc__)
    if args.table != "compare":
        threads = f" ({torch.get_num_threads()} threads)" if base.device == "cpu" else ""
        print(f"bench.py {args.table}: {device_name(base.device)}{threads}, torch {torch.__version__}, "
              f"{date.today()}", flush=True)
    TABLES[args.table](args, base)


if __name__ == "__main__":
    run_command(main)
