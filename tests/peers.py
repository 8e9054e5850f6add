"""Small models and runs for the tests, plain models to compare with, transformers', checkpoints."""
import dataclasses
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config import Config
from model import GPT, GPTConfig
from recipes import RECIPES as MODELS
from runtime.console import StepLog
from runtime.dataloader import Data, TokenDataset
from runtime.metrics import MetricsFile
from runtime.ranks import Process
from runtime.recipe import BatchSchedule
from runtime.tokenizer import EOT
from train_gpt2 import GPT2, Run, make_train_state

RECIPES = MODELS | {"gpt2": GPT2}         # all complete
TINY = dict(block_size=24, vocab_size=96, n_layer=2, n_head=2, n_embd=16)


def make_model(seed=0, spread=0.2, cls=GPT, **config):
    """A small model whose every parameter, gains and biases too, is far from its initial value."""
    torch.manual_seed(seed)
    model = cls(cls.Config(**{**TINY, **config}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=spread)
    return model


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest tensor that is there inside this context."""
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.device.type != "meta":
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def tokens(B, T, vocab_size=96, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (B, T), generator=generator)


def double_precision(model):
    """{name: a float64 copy} of a model's parameters, with gradients of their own."""
    copies = {}
    for name, p in model.named_parameters():
        copies[name] = p.detach().double().requires_grad_()
    return copies


# ----------------------------------------------------------------------- a run

class Batches:
    """In the place of a TrainLoader: in each step the same eight sequences."""

    def __init__(self, micro_steps=2):
        self.count = micro_steps
        self.B = 8 // micro_steps
        self.parts = itertools.cycle(tokens(8, 25).chunk(micro_steps))

    def micro_steps(self, step):
        return self.count

    def next_batch(self):
        part = next(self.parts)
        return part[:, :-1], part[:, 1:]


def metrics_of(rows):
    """The metrics of rows, which are {column: number, or None where the cell is empty}."""
    metrics = MetricsFile(None, None)           # without its file
    for row in rows:
        metrics.add_row()
        for name, value in row.items():
            if value is not None:
                metrics.set(name, value)
    return metrics


class Record:
    """In the place of an Output: its rows, and for each picture whether it is the last one."""

    def __init__(self):
        self.rows = []
        self.pictures = []

    def add(self, step, **cells):
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1].update(cells)

    @property
    def metrics(self):
        return metrics_of(self.rows)

    def draw_losses(self, last=False):
        self.pictures.append(last)

    def what_resumes(self):
        return "resumes from the newest"


class GpuProcess(Process):
    """A process whose steps go on as on a GPU. What it computes, it computes on the CPU."""
    on_gpu = True


def make_run(model=None, process=None, **flags):
    """A small Run that neither evaluates nor saves, but for what the flags say.

    A test may replace parts of it, as in `run.loader = Batches(8)`.
    """
    values = {
        **TINY, "sequence_length": 24, "total_batch_size": 8 * 24, "batch_size": 4,
        "max_steps": 10, "warmup_steps": 0, "max_lr": 1e-2, "min_lr": 1e-3,
        "dtype": "float32", "compile": False, "val_every": 0, "hellaswag_every": 0,
        "sample_every": 0, "checkpoint_every": 0,
    }
    config = Config(**values | flags)
    if model is None:
        model = make_model(cls=RECIPES[config.recipe].model)
    if process is None:
        process = Process()

    text = tokens(1, 24 * 12 + 1).flatten().numpy().astype(np.uint16)
    dataset = TokenDataset([text], 24, vocab_size=96)
    schedule = BatchSchedule(config.total_batch_size, config.max_steps)
    recipe = RECIPES[config.recipe]
    return Run(
        asked=dataclasses.asdict(config), config=config, recipe=recipe, process=process,
        schedule=schedule,
        data=Data(dataset, dataset, val_count=11), loader=Batches(), hellaswag_batches=[],
        state=make_train_state(config, recipe, model, process), output=Record(),
        log=StepLog(process, schedule, flops_per_token=1000),
    )


# ----------------------------------------------------------------------- gpt2

def plain_linear(weights, name, x):
    y = torch.einsum("bti,oi->bto", x, weights[name + ".weight"])
    return y + weights.get(name + ".bias", 0)


def plain_layer_norm(weights, name, x):
    x = x - x.mean(-1, keepdim=True)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x / (variance + 1e-5).sqrt()
    return x * weights[name + ".weight"] + weights.get(name + ".bias", 0)


def plain_gelu(x, kind):
    if kind == "none":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def plain_gpt2(weights, n_head, idx, gelu="tanh"):
    """GPT-2 from its published description: a dict of tensors and einsums. Biases are optional."""
    B, T = idx.shape
    future = torch.full((T, T), -math.inf).triu(1)
    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][:T]

    layer = 0
    while f"transformer.h.{layer}.ln_1.weight" in weights:
        block = f"transformer.h.{layer}."
        normed = plain_layer_norm(weights, block + "ln_1", x)
        qkv = plain_linear(weights, block + "attn.c_attn", normed)
        q, k, v = qkv.reshape(B, T, 3, n_head, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        p = (scores + future).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", p, v).reshape(B, T, -1)
        x = x + plain_linear(weights, block + "attn.c_proj", y)

        normed = plain_layer_norm(weights, block + "ln_2", x)
        hidden = plain_gelu(plain_linear(weights, block + "mlp.c_fc", normed), gelu)
        x = x + plain_linear(weights, block + "mlp.c_proj", hidden)
        layer += 1

    x = plain_layer_norm(weights, "transformer.ln_f", x)
    return torch.einsum("bti,vi->btv", x, weights["transformer.wte.weight"])


# ----------------------------------------------------------------------- speedrun and frontier

def rms_norm(x):
    eps = torch.finfo(torch.float32).eps
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x / (mean_square + eps).sqrt()


def turn(x):
    """Rotary positions: x (T, hs), whose pair (x_i, x_{i + hs/2}) turns by t / 10000^(2i / hs)."""
    T, hs = x.shape
    turned = torch.empty_like(x)
    for t in range(T):
        for i in range(hs // 2):
            angle = t / 10000 ** (2 * i / hs)
            a = x[t, i]
            b = x[t, i + hs // 2]
            turned[t, i] = a * math.cos(angle) + b * math.sin(angle)
            turned[t, i + hs // 2] = b * math.cos(angle) - a * math.sin(angle)
    return turned


def shift_by_one(k, row):
    """Each token has the key of the one before it, and zero where a document or the row begins."""
    shifted = torch.zeros_like(k)
    for t in range(1, len(row)):
        if row[t] != EOT:
            shifted[t] = k[t - 1]
    return shifted


def plain_head(q, k, v):
    """Causal attention of one head: q, k, v (T, hs)."""
    T, hs = q.shape
    later = torch.ones(T, T).triu(1).bool()
    scores = (q @ k.t() / math.sqrt(hs)).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


def plain_embedding(weights, row, parts):
    """(table, x): the vectors of all tokens, and what the first block gets for this row."""
    table = weights["transformer.wte.weight"]
    if parts is not None:               # frontier adds the rows of stem and form
        table = table + weights["transformer.part.weight"][parts].sum(0)
    return table, rms_norm(table[row])


def relative_error(found, expected):
    """Of logits (..., vocab_size), from each row of which any number may be subtracted."""
    found = found - found.mean(-1, keepdim=True)
    expected = expected - expected.mean(-1, keepdim=True)
    return (found - expected).norm() / expected.norm()


def plain_modern(weights, n_head, idx, softcap, parts=None):
    """The logits of the head, and those of the model: speedrun's, or with `parts` frontier's.

    Token by token and head by head. weights: {name: tensor}. `parts` are the rows of each token's
    stem and form. idx (B, T) -> (B, T, vocab_size) twice
    """
    rows = [plain_modern_row(weights, n_head, row, softcap, parts) for row in idx.tolist()]
    of_head, of_model = zip(*rows, strict=True)
    return torch.stack(of_head), torch.stack(of_model)


def plain_modern_row(weights, n_head, row, softcap, parts):
    """Those of one row of tokens, (T, vocab_size) each."""
    has_shifted_keys = parts is not None
    table, x = plain_embedding(weights, row, parts)
    x0, first_v = x, None
    layer = 0
    while f"transformer.h.{layer}.lambdas" in weights:
        w = weights_of_block(weights, layer)
        x = w["lambdas"][0] * x + w["lambdas"][1] * x0
        y, first_v = plain_modern_attention(w, rms_norm(x), first_v, n_head, row, has_shifted_keys)
        x = x + y
        hidden = (rms_norm(x) @ w["mlp.c_fc.weight"].t()).clamp(min=0).pow(2)
        x = x + hidden @ w["mlp.c_proj.weight"].t()
        layer += 1

    x = rms_norm(x)
    if parts is None:
        logits = softcap * torch.tanh(x @ weights["lm_head.weight"].t() / softcap)
        return logits, logits
    logits = softcap * torch.tanh(x @ table.t() / softcap)
    probabilities = plain_pointer(weights, x.detach(), table.detach(), row, logits.detach())
    return logits, probabilities.log()


def plain_pointer(weights, x, table, row, logits):
    """frontier's probabilities (T, vocab_size), of the head's logits and of copies."""
    w = {name: weights[f"pointer.{name}"] for name in ("scale", "sentinel", "sentinel_bias")}
    q = rms_norm(x @ weights["pointer.c_q.weight"].t())
    k = shift_by_one(x @ weights["pointer.c_k.weight"].t(), row)
    k = rms_norm(k + rms_norm(table[row]) @ weights["pointer.c_e.weight"].t())

    C = x.size(1)
    probabilities = []
    for t in range(len(row)):
        seen = [s for s in range(t) if row[s] != row[t]]        # no copy of itself or its like
        scores = [w["scale"] * (q[t] @ k[s]) / C for s in seen]
        scores.append(w["sentinel_bias"] + x[t] @ w["sentinel"] / math.sqrt(C))
        *copies, share = torch.stack(scores).softmax(0)
        p = share * logits[t].softmax(0)
        for s, copy in zip(seen, copies, strict=True):
            p = p + copy * F.one_hot(torch.tensor(row[s]), len(p))
        probabilities.append(p)
    return torch.stack(probabilities)


def weights_of_block(weights, layer):
    """Without the prefix of the block."""
    prefix = f"transformer.h.{layer}."
    found = {}
    for name, weight in weights.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = weight
    return found


def plain_modern_attention(w, x, first_v, n_head, row, has_shifted_keys):
    """(T, C) of x (T, C), and the values of the first block."""
    q = x @ w["attn.c_q.weight"].t()
    k = x @ w["attn.c_k.weight"].t()
    v = x @ w["attn.c_v.weight"].t()
    if first_v is None:
        first_v = v
    v = (1 - w["attn.lamb"]) * v + w["attn.lamb"] * first_v

    results = []
    of_heads = zip(q.chunk(n_head, -1), k.chunk(n_head, -1), v.chunk(n_head, -1), strict=True)
    for head, (q_h, k_h, v_h) in enumerate(of_heads):
        q_h = turn(rms_norm(q_h))
        k_h = turn(rms_norm(k_h))
        if has_shifted_keys and head >= n_head // 2:
            k_h = shift_by_one(k_h, row)
        results.append(plain_head(q_h, k_h, v_h))
    return torch.cat(results, -1) @ w["attn.c_proj.weight"].t(), first_v


# ----------------------------------------------------------------------- files

def own_checkpoint(model):
    return {
        "model": model.state_dict(),
        "model_config": dataclasses.asdict(model.config),
        "recipe": "gpt2",
        "config": {},
        "step": 3,
        "optimizers": {},
        "rng": {"torch": torch.get_rng_state()},
    }


def nanogpt_checkpoint(weights, bias=True, **args):
    return {
        "model": weights,
        "model_args": {**TINY, "dropout": 0.0, "bias": bias, **args},
        "optimizer": {"state": {}, "param_groups": []},
        "iter_num": 5,
        "best_val_loss": torch.tensor(2.5),
        "config": {"out_dir": "out", "dtype": "bfloat16"},
    }


def save(path, checkpoint, **how):
    torch.save(checkpoint, path, **how)
    return path


def transformers_model(activation="gelu_new", vocab_size=96, n_embd=16):
    """A small GPT-2 of transformers, every parameter far from its initial value."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab_size, n_positions=24, n_layer=2, n_head=2, n_embd=n_embd,
        activation_function=activation))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return theirs.eval()


def our_model(theirs):
    """A GPT with the weights of transformers' model, whose Conv1D stores (in, out)."""
    gelu = "tanh"
    if theirs.config.activation_function == "gelu":
        gelu = "none"
    shape = TINY | {"vocab_size": theirs.config.vocab_size, "n_embd": theirs.config.n_embd}
    ours = GPT(GPTConfig(**shape, gelu=gelu))

    weights = theirs.state_dict()
    for name, p in weights.items():
        if ".c_" in name and p.dim() == 2:
            weights[name] = p.t()
    ours.load_state_dict(weights)
    return ours
