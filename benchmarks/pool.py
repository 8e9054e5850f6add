"""Runs the fineweb.py of a clone of build-nanogpt, unchanged, on a file of ours, for `bench.py data`.

    python -m benchmarks.pool TEXT.parquet REPEATS OUT CLONE PROCESSES

It runs in a process whose whole time is measured, so this file imports no torch. The script is
given three things in place of what it would ask for:

- the rows of TEXT.parquet, REPEATS times, in place of the data set of the hub;
- GPT-2's tokenizer of tiktoken from the files in assets/, in place of a download;
- twice PROCESSES as the number of cores, because it starts a process for half of them.
"""
import multiprocessing
import os
import sys
import types
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from runtime.tokenizer import EOT, token_bytes


def rows_of_parquet(path: str, repeats: int):
    """The rows of the file, as dicts, as often as `repeats` says."""
    import pyarrow.parquet

    for _ in range(repeats):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()


def run_pool(text: str, repeats: str, out: str, clone: str, processes: str) -> None:
    """The shards go to a folder in `out`."""
    encoder = tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=EOT + 1,
        pat_str=r50k_pat_str,
        mergeable_ranks=token_bytes(),
        special_tokens={"<|endoftext|>": EOT},
    )
    tiktoken.get_encoding = lambda name: encoder

    datasets = types.ModuleType("datasets")
    datasets.load_dataset = lambda *args, **kwargs: rows_of_parquet(text, int(repeats))
    sys.modules["datasets"] = datasets

    os.cpu_count = lambda: 2 * int(processes)

    # Its processes are forks, which find its function `tokenize` in the module of this name. It
    # writes its shards beside its own file.
    multiprocessing.set_start_method("fork")
    script = types.ModuleType("pool_script")
    script.__file__ = str(Path(out) / "fineweb.py")
    sys.modules["pool_script"] = script
    source = (Path(clone) / "fineweb.py").read_text(encoding="utf-8")
    exec(compile(source, "build-nanogpt/fineweb.py", "exec"), script.__dict__)


if __name__ == "__main__":
    run_pool(*sys.argv[1:])
