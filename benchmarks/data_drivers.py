"""Programs that `bench.py data` times, each in a process of its own: python -m benchmarks.data_drivers ..."""
import json
import os
import sys
import time
import types
from pathlib import Path

from runtime.text import read_rows
from runtime.tokenizer import EOT, Encoder, token_bytes


def peer(text: str, repeats: str, out: str, folder: str) -> None:
    """The fineweb.py of a clone of build-nanogpt in `folder`, unchanged, with a process a core, on so many
    times the rows of the .parquet file `text`. Its tokenizer is tiktoken's GPT-2, from assets/ and not from
    the network."""
    import pyarrow.parquet
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    encoder = tiktoken.Encoding("gpt2", explicit_n_vocab=EOT + 1, pat_str=r50k_pat_str,
                                mergeable_ranks=token_bytes(), special_tokens={"<|endoftext|>": EOT})
    tiktoken.get_encoding = lambda name: encoder
    script = sys.modules["peer"] = types.ModuleType("peer")           # where its workers find `tokenize`
    script.__file__ = str(Path(out) / "fineweb.py")       # its shards go beside it
    rows = (row for _ in range(int(repeats))
            for batch in pyarrow.parquet.ParquetFile(text).iter_batches() for row in batch.to_pylist())
    sys.modules["datasets"] = types.SimpleNamespace(load_dataset=lambda *args, **kwargs: rows)
    cores = os.cpu_count()
    os.cpu_count = lambda: 2 * cores                      # it takes half of them
    source = (Path(folder) / "fineweb.py").read_text(encoding="utf-8")
    exec(compile(source, "build-nanogpt/fineweb.py", "exec"), script.__dict__)


def decoding(text: str, repeats: str, *others: str) -> None:
    """Reading alone, on one thread. 0 tokens."""
    path, often = Path(text), range(int(repeats))
    timed(lambda: sum(not row for _ in often for row in read_rows(path, "text", b"", text)))


def gigatoken(text: str, repeats: str, *others: str) -> None:
    """gigatoken alone, on one thread, of text in memory."""
    from gigatoken.gigatoken_rs import BytesSource, PadTruncate
    encoder = Encoder()
    rows = [*read_rows(Path(text), "text", encoder.separator, text)]
    encode, how = encoder.gigatoken.encode_batch_padded, PadTruncate(0)
    timed(lambda: sum(encode(BytesSource(row), how, parallel=False)[0].size
                      for _ in range(int(repeats)) for row in rows))


def timed(work) -> None:
    """Prints [seconds, CPU seconds, what work() returns: tokens]."""
    start, before = time.perf_counter(), time.process_time()
    tokens = work()
    print(json.dumps([time.perf_counter() - start, time.process_time() - before, tokens]))


if __name__ == "__main__":
    {"peer": peer, "decoding": decoding, "gigatoken": gigatoken}[sys.argv[1]](*sys.argv[2:])
