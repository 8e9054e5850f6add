"""Programs that `bench.py data` times, each in a process of its own: python -m runtime.data_drivers ..."""
import json
import os
import runpy
import sys
import types
from pathlib import Path

import numpy as np

from runtime import encoding
from runtime.sources import BYTES_PER_TOKEN
from runtime.tokenizer import tokenizer


def peer(folder: str, text: str, out: str, workers: str) -> None:
    """The fineweb.py of a clone of build-nanogpt in `folder`, unchanged, with so many workers, on the lines
    of the .jsonl file `text`. Its tokenizer is tiktoken's GPT-2, from assets/ and not from the network."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    ours = tokenizer()
    encoder = tiktoken.Encoding("gpt2", explicit_n_vocab=ours.n_vocab, pat_str=r50k_pat_str,
                                mergeable_ranks=ours._mergeable_ranks, special_tokens=ours._special_tokens)
    tiktoken.get_encoding = lambda name: encoder
    script = sys.modules["peer"] = types.ModuleType("peer")           # where its workers find `tokenize`
    script.__file__ = str(Path(out) / "fineweb.py")       # its shards go beside it
    rows = (json.loads(line) for line in open(text, encoding="utf-8"))
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows)
    os.cpu_count = lambda: 2 * int(workers)               # it takes half of them
    source = (Path(folder) / "fineweb.py").read_text(encoding="utf-8")
    exec(compile(source, "build-nanogpt/fineweb.py", "exec"), script.__dict__)


def without_tiktoken(script: str, *flags: str) -> None:
    """fineweb.py, its tokenizer replaced by one that returns at once as many tokens as English text has, of a
    ready array. On Linux, where the workers are forks."""
    ready = (np.arange(1 << 24) % 50_000).astype(np.uint16)
    encoding.encode = lambda text: ready[:int(len(text) / BYTES_PER_TOKEN)]
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def without_text(characters: str, script: str, *flags: str) -> None:
    """As without_tiktoken, and its workers read nothing either: what is left is what the first process does
    for all workers. `characters`: of a row of the .parquet, on average."""
    ready = (np.arange(1 << 24) % 50_000).astype(np.uint16)
    length = int(int(characters) / BYTES_PER_TOKEN)

    def tokenize(task, opened):
        rows = task.read.args[-1]
        return ready[:rows * length], [length] * rows, True

    encoding.tokenize = tokenize
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    drivers = {"peer": peer, "without_tiktoken": without_tiktoken, "without_text": without_text}
    drivers[sys.argv[1]](*sys.argv[2:])
