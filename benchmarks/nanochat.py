"""nanochat's side of `bench.py recipes`: its own scripts, in a clone of it, on the text of our shards."""
import json
import math
import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np

from benchmarks.compare import Curve
from benchmarks.timing import Setting
from runtime.cli import UserError
from runtime.shards import list_shards, open_shard
from runtime.tokenizer import EOT, token_bytes, token_lengths

RATES = {"embedding": 0.3, "unembedding": 0.008, "matrix": 0.02, "scalar": 0.5}      # its defaults (92d63d4)
# run in the clone: its tokenizer's bytes per token, then for each checkpoint of a run bits per byte on the
# validation text, its documents concatenated, T tokens at a time
EVALUATE = """
import json, math, sys, pyarrow.parquet, torch
from nanochat.checkpoint_manager import load_model
from nanochat.tokenizer import get_tokenizer
path, device, T, tag, *steps = sys.argv[1:]
tokenizer, tokens, sizes = get_tokenizer(), [], []
for text in pyarrow.parquet.read_table(path)["text"].to_pylist():
    own = tokenizer.encode(text)
    tokens += [tokenizer.get_bos_token_id(), *own]
    sizes += [0, *(len(tokenizer.decode_single_token_bytes(token)) for token in own)]
found, n = [sum(sizes) / len(tokens)], (len(tokens) - 1) // int(T) * int(T)
x, y, sizes = (torch.tensor(row).view(-1, int(T)).to(device)
               for row in (tokens[:n], tokens[1:n + 1], sizes[1:n + 1]))
for step in steps:
    model, *_ = load_model("base", torch.device(device), "eval", model_tag=tag, step=int(step))
    with torch.no_grad():
        nats = sum((model(a, b, loss_reduction="none").view(-1) * (s > 0).view(-1)).sum().item()
                   for a, b, s in zip(x.split(16), y.split(16), sizes.split(16)))
    found.append(nats / math.log(2) / sizes.sum().item())
print(json.dumps(found))
"""


def bytes_a_token(data: str, n: int) -> float:
    """Mean over the first n validation targets of a folder of shards; <|endoftext|> has 0."""
    return token_lengths()[read_tokens(data, "val", n + 1)[1:]].mean().item()


def read_tokens(data: str, split: str, most: int | None) -> np.ndarray:
    """The first `most` tokens of the first shard of a split."""
    return np.asarray(open_shard(list_shards(data, split)[0])[:most])


class Nanochat:
    """nanochat in `clone`, whose files go into `folder`, with the text of the first shards of `data` and a
    vocabulary of its own, of 8,192 tokens. `s`: device, dtype and length of its sequences."""

    def __init__(self, clone: str, folder: str, data: str, s: Setting, val_tokens: int):
        import pyarrow.parquet
        self.clone, self.s, self.text = clone, s, Path(folder, "base_data_climbmix")    # nanochat's name
        self.env = os.environ | {"NANOCHAT_BASE_DIR": folder, "NANOCHAT_DTYPE": s.dtype} | (
            {"OMP_NUM_THREADS": "1"} if s.device == "cpu" else {})
        if not Path(clone, "scripts/base_train.py").is_file():
            raise UserError(f"{clone}/scripts/base_train.py does not exist: git clone nanochat, and name its "
                            "folder")
        self.text.mkdir()
        bytes_of = [*token_bytes(), b""]
        for name, split, most in (("0", "train", None), ("1", "val", val_tokens + 1)):  # the last: validation
            tokens = read_tokens(data, split, most)
            texts = [b"".join(bytes_of[token] for token in part.tolist()).decode(errors="replace")
                     for part in np.split(tokens, np.flatnonzero(tokens == EOT)) if len(part) > 1]
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), self.text / f"{name}.parquet", 100)
        self.call("-m", "scripts.tok_train", "--vocab-size=8192")
        self.ours, (self.own, *_) = bytes_a_token(data, val_tokens), self.evaluate("", [])

    def call(self, *words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=self.clone, env=self.env, capture_output=True,
                              text=True)
        if done.returncode:
            raise UserError(f"nanochat's {words[1]}: {(done.stderr.strip() or '?').splitlines()[-1][:200]}")
        return done.stdout

    def evaluate(self, tag: str, steps: list[int]) -> list[float]:
        words = f"{self.text}/1.parquet", self.s.device, str(self.s.T), tag, *map(str, steps)
        return json.loads(self.call("-c", EVALUATE, *words).splitlines()[-1])

    def train(self, flags: dict, multiple: int, seed: int = 0) -> Curve:
        """A run at `multiple` of its rates, with shape, batch and bytes of text of `flags`, train_gpt2.py's.
        Tokens and losses are as they would be in GPT-2's tokens."""
        layers, width, tokens = (flags[name] for name in ("n_layer", "n_embd", "total_batch_size"))
        N = round(flags["max_steps"] * self.ours / self.own)
        tag, every = f"{layers}x{width}_{multiple}", max(1, N // 8)
        given = {"device-type": self.s.device.split(":")[0], "depth": layers, "max-seq-len": self.s.T,
                 "aspect-ratio": width // layers, "device-batch-size": math.gcd(8, tokens // self.s.T),
                 "total-batch-size": tokens, "num-iterations": N, "warmup-steps": N // 13, "model-tag": tag,
                 "save-every": every, "eval-every": -1, "core-metric-every": -1, "sample-every": -1,
                 **{f"{name}-lr": multiple * rate for name, rate in RATES.items()}}
        words = [f"--{name}={value}" for name, value in given.items()]
        printed, steps = self.call("-m", "scripts.base_train", *words), [*range(every, N, every), N]
        times = [float(ms) / 1e3 for ms in re.findall(r"\bdt: ([\d.]+)ms", printed)]
        seconds = [0.0, *accumulate((times[1:2] or times) + times[1:])]     # the first step also compiles
        points = [(step * tokens * self.own / self.ours, seconds[step], bits * math.log(2) * self.ours)
                  for step, bits in zip(steps, self.evaluate(tag, steps)[1:], strict=True)]
        return Curve(tag, {"step": N, "tokens": points[-1][0], "seconds": seconds[-1]}, points)
