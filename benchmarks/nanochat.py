"""nanochat's side of `bench.py recipes`: its own scripts, in a clone of it, on the text of our shards.

Read for this: commit 92d63d4 of nanochat.
"""
import json
import math
import os
import re
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np

from benchmarks.compare import Curve
from benchmarks.processes import run_process, why_it_failed
from benchmarks.timing import Setting
from runtime.cli import UserError
from runtime.shards import list_shards, open_shard
from runtime.tokenizer import EOT, token_bytes, token_lengths

# The defaults of its learning rates.
RATES = {"embedding": 0.3, "unembedding": 0.008, "matrix": 0.02, "scalar": 0.5}

# Run in the clone. Prints a list: the bytes per token of its tokenizer, then for each checkpoint of a
# run the bits per byte of the validation text, whose documents are concatenated, T tokens at a time.
#
# All targets are scored, as ours are: a BOS between two documents, too, which stands for our
# <|endoftext|>. nanochat's own evaluate_bpb leaves it out, but its training does not: the rows of its
# loader hold several documents, with a BOS before each.
EVALUATE = """
import json, math, sys
import pyarrow.parquet, torch
from nanochat.checkpoint_manager import load_model
from nanochat.tokenizer import get_tokenizer

path, device, T, tag, *steps = sys.argv[1:]
T = int(T)
tokenizer = get_tokenizer()
tokens, sizes = [], []
for text in pyarrow.parquet.read_table(path)["text"].to_pylist():
    tokens.append(tokenizer.get_bos_token_id())
    sizes.append(0)
    for token in tokenizer.encode(text):
        tokens.append(token)
        sizes.append(len(tokenizer.decode_single_token_bytes(token)))
found = [sum(sizes) / len(tokens)]

n = (len(tokens) - 1) // T * T
x = torch.tensor(tokens[:n]).view(-1, T).to(device)
y = torch.tensor(tokens[1:n + 1]).view(-1, T).to(device)
text_bytes = sum(sizes[1:n + 1])
for step in steps:
    model, *_ = load_model("base", torch.device(device), "eval", model_tag=tag, step=int(step))
    nats = 0.0
    with torch.no_grad():
        for a, b in zip(x.split(16), y.split(16)):
            nats += model(a, b, loss_reduction="none").sum().item()
    found.append(nats / math.log(2) / text_bytes)
print(json.dumps(found))
"""


def read_tokens(data: str, split: str, count: int | None) -> np.ndarray:
    """The first `count` tokens of the first shard of a split; None: all."""
    return np.asarray(open_shard(list_shards(data, split)[0])[:count])


def bytes_a_token(data: str, n: int) -> float:
    """Mean over the first n validation targets of a folder of shards; <|endoftext|> has 0."""
    targets = read_tokens(data, "val", n + 1)[1:]
    return token_lengths()[targets].mean().item()


def texts_of(tokens: np.ndarray) -> list[str]:
    """The text of each document among the tokens."""
    bytes_of = [*token_bytes(), b""]            # <|endoftext|> is the last token
    texts = []
    for document in np.split(tokens, np.flatnonzero(tokens == EOT)):
        if len(document) > 1:
            text = b"".join(bytes_of[token] for token in document.tolist())
            texts.append(text.decode(errors="replace"))
    return texts


def rounded_width(width: int) -> int:
    """nanochat's width: its heads have 128, and it rounds the width up to whole heads."""
    return math.ceil(width / 128) * 128


class Nanochat:
    """nanochat in the folder `clone`, with a vocabulary of its own, of 8,192 tokens.

    It gets the text of the first shards of `data`. Its files go into `folder`. `s`: the device, dtype
    and length of its sequences.
    """

    def __init__(self, clone: str, folder: str, data: str, s: Setting, val_tokens: int):
        if not Path(clone, "scripts/base_train.py").is_file():
            raise UserError(f"{clone}/scripts/base_train.py does not exist: git clone nanochat, and "
                            "name its folder")
        import pyarrow.parquet

        self.clone = clone
        self.s = s
        self.env = os.environ | {"NANOCHAT_BASE_DIR": folder, "NANOCHAT_DTYPE": s.dtype}
        if s.device == "cpu":
            self.env["OMP_NUM_THREADS"] = "1"           # runs on a CPU share it, a thread for each

        self.text = Path(folder, "base_data_climbmix")          # nanochat's name
        self.text.mkdir()
        for name, split, count in (("0", "train", None), ("1", "val", val_tokens + 1)):
            # nanochat takes the last file for validation. It reads a group of rows at a time.
            table = pyarrow.table({"text": texts_of(read_tokens(data, split, count))})
            pyarrow.parquet.write_table(table, self.text / f"{name}.parquet", row_group_size=100)

        self.call("tokenizer", "-m", "scripts.tok_train", "--vocab-size=8192")
        self.our_bytes = bytes_a_token(data, val_tokens)                # per token
        self.own_bytes = self.evaluate("", [])[0]

    def call(self, what: str, *words: str) -> str:
        """What Python prints with these arguments, in the clone. UserError if `what` they do fails."""
        done = run_process([sys.executable, *words], cwd=self.clone, env=self.env)
        if done.returncode != 0:
            raise UserError(f"nanochat's {what} failed: {why_it_failed(done)}")
        return done.stdout

    def evaluate(self, tag: str, steps: list[int]) -> list[float]:
        """The bytes per token of its tokenizer, and the bits per byte of a run's checkpoints."""
        words = [f"{self.text}/1.parquet", self.s.device, str(self.s.T), tag, *map(str, steps)]
        return json.loads(self.call("evaluation", "-c", EVALUATE, *words).splitlines()[-1])

    def train(self, flags: dict, size: str, multiple: int, seed: int = 0) -> Curve:
        """A run at `multiple` of its rates, with depth, batch and bytes of text of our `flags`.

        Its width is that of rounded_width, and its seed always the same: it has no flag for one.
        Tokens and losses of the Curve are as they would be in GPT-2's tokens.
        """
        tokens = flags["total_batch_size"]
        steps = round(flags["max_steps"] * self.our_bytes / self.own_bytes)
        save_every = max(1, steps // 8)
        tag = f"{size}_{multiple}"                      # the name of the folder of its checkpoints
        options = {
            "device-type": self.s.device.split(":")[0],
            "depth": flags["n_layer"],
            "aspect-ratio": rounded_width(flags["n_embd"]) // flags["n_layer"],
            "max-seq-len": self.s.T,
            "device-batch-size": math.gcd(8, tokens // self.s.T),
            "total-batch-size": tokens,
            "num-iterations": steps,
            "warmup-steps": steps // 13,
            "model-tag": tag,
            "save-every": save_every,
            "eval-every": -1,
            "core-metric-every": -1,
            "sample-every": -1,
        }
        for name, rate in RATES.items():
            options[f"{name}-lr"] = multiple * rate
        words = [f"--{name}={value}" for name, value in options.items()]
        printed = self.call("training", "-m", "scripts.base_train", *words)

        seconds = seconds_before_steps(printed, steps)
        saved = [*range(save_every, steps, save_every), steps]
        _, *bits_per_byte = self.evaluate(tag, saved)
        points = []
        for step, bits in zip(saved, bits_per_byte, strict=True):
            gpt2_tokens = step * tokens * self.own_bytes / self.our_bytes
            points.append((gpt2_tokens, seconds[step], bits * math.log(2) * self.our_bytes))
        last = {"step": steps, "tokens": points[-1][0], "seconds": seconds[-1]}
        return Curve(tag, last, points)


def seconds_before_steps(printed: str, steps: int) -> list[float]:
    """The seconds of training before each step, and of all, from what base_train printed.

    The first step also compiles: it counts as much as the second. UserError if there are not as many.
    """
    times = [float(ms) / 1e3 for ms in re.findall(r"\bdt: ([\d.]+)ms", printed)]
    if len(times) != steps:
        raise UserError(f"nanochat printed the times of {len(times)} steps, expected {steps}: "
                        "try commit 92d63d4 of nanochat")
    if len(times) > 1:
        times[0] = times[1]
    return [0.0, *accumulate(times)]
