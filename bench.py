"""Benchmarks of this machine, one table per command, and how long each takes on two CPU cores:

    python bench.py ladder          8 min   a training step, made faster one optimisation at a time
    python bench.py attention       1 min   the time and the error of every attention kernel
    python bench.py data [PATH]     5 min   the dataloader, and fineweb.py (beside build-nanogpt's in PATH)
    python bench.py peer PATH       4 min   our step beside that of build-nanogpt, or of another version
    python bench.py recipes DATA    hours   the recipes (and nanochat), trained on a folder of shards
    python bench.py compare OUT ... 5 s     the losses of runs (--out folders) and of .csv curves

The timed step is the one that trains, train_gpt2.train_step. Each row is measured in a process of its
own, so that no row inherits memory or compiled code from another. The rows are measured in turn,
--turns times, because the speed of a shared machine changes within minutes. A row shows the median of
its times, the largest peak of its memory and its longest start, or for recipes the mean of the seeds.
"""
# First, because it refuses an old Python in one line.
from runtime.cli import run_command

import sys
from datetime import date

import torch

from benchmarks import tables
from benchmarks.ablation import recipes_table, train_without
from benchmarks.compare import compare_table
from benchmarks.data import data_table
from benchmarks.flags import parse_args
from benchmarks.processes import CHILDREN, signals_as_errors
from benchmarks.steps import WORKERS
from benchmarks.timing import run_worker
from runtime.device import device_name

# Each prints its table: (flags, their Setting) -> its rows.
TABLES = {
    "ladder": tables.ladder,
    "attention": tables.attention_table,
    "data": data_table,
    "peer": tables.peer_table,
    "recipes": recipes_table,
    "compare": compare_table,
}


def main(argv: list[str] | None = None) -> int | None:
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        print(__doc__ + "\nThe flags: python bench.py --help")
        return None

    # Two commands that are not for users: the tables start them, each in a process of its own.
    if argv[0] == "work":
        return run_worker(WORKERS, argv[1])
    if argv[0] == "train":
        return train_without(argv[1], argv[2:])

    args, base = parse_args(argv, TABLES, __doc__)
    if args.table != "compare":
        threads = ""
        if base.device == "cpu":
            threads = f" ({torch.get_num_threads()} threads)"
        print(f"bench.py {args.table}: {device_name(base.device)}{threads}, torch {torch.__version__}, "
              f"{date.today()}", flush=True)
    with signals_as_errors(), CHILDREN:
        TABLES[args.table](args, base)


if __name__ == "__main__":
    run_command(main)
