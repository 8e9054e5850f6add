"""Programs that `bench.py data` times, each in a process of its own: python -m benchmarks.data_drivers ..."""
import os
import runpy
import sys
import types
from pathlib import Path

import numpy as np

from corpus import encoding
from corpus.sources import BYTES_PER_TOKEN
from runtime.tokenizer import EOT, tokenizer


def peer(folder: str, text: str, repeats: str, out: str, workers: str) -> None:
    """The fineweb.py of a clone of build-nanogpt in `folder`, unchanged, with so many workers, on so many
    times the rows of the .parquet file `text`. Its tokenizer is tiktoken's GPT-2, from assets/ and not from
    the network."""
    import pyarrow.parquet
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    ours = tokenizer()
    encoder = tiktoken.Encoding("gpt2", explicit_n_vocab=ours.n_vocab, pat_str=r50k_pat_str,
                                mergeable_ranks=ours._mergeable_ranks, special_tokens=ours._special_tokens)
    tiktoken.get_encoding = lambda name: encoder
    script = sys.modules["peer"] = types.ModuleType("peer")           # where its workers find `tokenize`
    script.__file__ = str(Path(out) / "fineweb.py")       # its shards go beside it
    rows = (row for _ in range(int(repeats))
            for batch in pyarrow.parquet.ParquetFile(text).iter_batches() for row in batch.to_pylist())
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows)
    os.cpu_count = lambda: 2 * int(workers)               # it takes half of them
    source = (Path(folder) / "fineweb.py").read_text(encoding="utf-8")
    exec(compile(source, "build-nanogpt/fineweb.py", "exec"), script.__dict__)


def without_encoding(script: str, *flags: str) -> None:
    """fineweb.py, its encoder replaced by one that returns at once as many tokens as English text has, of a
    ready array."""
    ready = (np.arange(1 << 24) % 50_000).astype(np.uint32)

    def run(row):
        tokens = ready[:int(len(row) / BYTES_PER_TOKEN)].copy()
        tokens[np.linspace(0, len(tokens) - 1, row.count(encoding.START), dtype=int)] = EOT
        return tokens

    encoding.gigatoken = lambda threads: run
    encoding.compare = lambda texts, tokens: None
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    drivers = {"peer": peer, "without_encoding": without_encoding}
    drivers[sys.argv[1]](*sys.argv[2:])
