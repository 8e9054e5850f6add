"""Whether all around an edit of the model or the training holds, edit by edit:

    python tests/edits.py                       all of them, in some minutes of two cores
    python tests/edits.py dropout rope          these
    python tests/edits.py --jobs 4

An edit is a patched copy of this tree, as somebody makes it who has read model.py and train_gpt2.py
once: forks of nanoGPT, build-nanogpt and nanochat have these. A column is a thing that has to hold
(COLUMNS). It is no part of the suite. Exit code 0 if each edit ends as it is expected to.

MISTAKES are models with one mistake each, which check.py has to name.
"""
import argparse
import difflib
import functools
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import helpers  # noqa: E402
from helpers import BYTES, ENV, ROOT, command, forked, on_ranks  # noqa: E402

COLUMNS = {
    "train": "4 steps; other losses than without the edit, unless it changes none",
    "resume": "killed after step 2 and resumed: checkpoint and metrics.csv bit for bit",
    "ranks": "3 processes in other micro-batches: the first loss and norm of 1 process; a resume",
    "recompute": "--recompute: the same losses to the digit",
    "eval": "--eval_only prints the last validation loss of the run",
    "sample": "generate() takes the tokens of whole forwards, also beyond block_size",
    "export": "transformers computes the same logits, or one line refuses",
    "check": "check.py --fast: what it names",
}
MODEL, TRAIN = "model.py", "train_gpt2.py"


@dataclass
class Edit:
    """`changes` are (file, old text, new text), or of whole lines: `before`, `after`, `instead`."""
    name: str
    what: str
    changes: list[tuple]
    expected: str = "holds"         # or "told": ends in one line; or "documented"
    flags: tuple = ()
    data: str = "bytes"             # which shards: see make_data
    same: bool = False              # whether its losses may be those of the unedited code

    # Where 3 processes train otherwise than 1 by nature. "micro-batch": its loss is one of a whole
    # micro-batch, and 3 processes get the same micro-batches as 1. "random": each process draws its
    # own numbers, or has statistics of its own: only the resume is compared.
    ranks: str = ""
    documented: dict = field(default_factory=dict)      # {column: why it need not be ok}


# ----------------------------------------------------------------------- texts that edits replace

ATTEND = "self.attn(self.ln_1(x), past)"
FEED = "self.mlp(self.ln_2(x))"
KERNEL = 'if kernel == "naive" or formula_is_faster(q, S):'
MASKED = "scores = scores + future"
BLOCK_MADE = "        self.mlp = MLP(config)\n"
BLOCK_BEGINS = f"        x = x + {ATTEND}\n"
BEFORE_CACHE = "        if past is not None:"
ATTENTION = "y = attention(q, k, v, self.kernel)"
HEADS = "self.n_head = config.n_head"
BEFORE_ATTENTION = "class CausalSelfAttention(nn.Module):"
BEFORE_BLOCK = "class Block(nn.Module):"
TIED = "self.lm_head.weight = self.transformer.wte.weight"
INITIALISED = " self.init_weights()"
STD = 'std = projection_std if name.endswith("c_proj") else 0.02'
CROSS_ENTROPY = "return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)"
LOSS = "return None, self.loss(x, targets)"
LAST = "return self.transformer.ln_f(x)"
MATRICES = '{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},'
ADAMW = "torch.optim.AdamW(groups, lr=max_lr, betas=betas, eps=eps, fused=True)"
BEFORE_GPT = "class GPT(LanguageModel):"
STATE = "return TrainState(model, compiled_model, ddp_model, optimizer, scaler, autocast)"
BEFORE_STEP = f"# {'-' * 77} a step\n"
BATCH = "x, y = run.loader.next_batch()"


def before(file, old, new):
    """The change that puts the lines `new` before the line in which `old` begins."""
    return (file, old, new, "before")


def after(file, old, new):
    return (file, old, new, "after")


def instead(file, old, new):
    """The change that has `new` in the place of whole lines: of that with `old`, and its comment"""
    return (file, old, new, "instead")


def changed(text, old, new, where=""):
    """The text of a file with one change. `old` has to be in it once."""
    assert text.count(old) == 1, f"{text.count(old)} times: {old!r}"
    begin = text.index(old)
    end = begin + len(old)
    if where:                           # whole lines
        begin = text.rfind("\n", 0, begin) + 1
        end = text.index("\n", end - 1) + 1
    if where == "before":
        end = begin
    if where == "after":
        begin = end
    return text[:begin] + new + text[end:]


NO_POSITIONS = [
    instead(MODEL, '"wpe": Embedding(', ""),
    instead(MODEL, "positions = torch.arange(first, S", ""),
    (MODEL, " + self.transformer.wpe(positions)", ""),
]


# ----------------------------------------------------------------------- the 35 kinds, 43 variants

EDITS = [
    Edit("dropout", "in Block, with F.dropout", [
        (MODEL, ATTEND, f"F.dropout({ATTEND}, 0.1, self.training)"),
        (MODEL, FEED, f"F.dropout({FEED}, 0.1, self.training)"),
    ], ranks="random"),
    Edit("dropout_field", "its rate is a field of GPTConfig, a float", [
        before(MODEL, '    gelu: str = "tanh"', "    dropout: float = 0.1\n"),
        after(MODEL, BLOCK_MADE, "        self.drop = nn.Dropout(config.dropout)\n"),
        (MODEL, ATTEND, f"self.drop({ATTEND})"),
        (MODEL, FEED, f"self.drop({FEED})"),
    ], ranks="random"),
    Edit("bool_field", "a switch in GPTConfig", [
        before(MODEL, '    gelu: str = "tanh"', "    parallel: bool = True\n"),
        after(MODEL, BLOCK_MADE, "        self.parallel = config.parallel\n"),
        before(MODEL, BLOCK_BEGINS, "        if self.parallel:\n"
               f"            return x + {ATTEND} + {FEED}\n"),
    ]),
    Edit("rope", "rotary positions for wpe, with angles of each forward", [
        *NO_POSITIONS,
        before(MODEL, BEFORE_ATTENTION, '''\
def rotate(x, first):
    hs = x.size(-1)
    frequencies = 10000.0 ** (-torch.arange(0, hs, 2, device=x.device) / hs)
    positions = torch.arange(first, first + x.size(1), device=x.device)
    angles = torch.outer(positions, frequencies)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


'''),
        before(MODEL, BEFORE_CACHE, "        first = 0 if past is None else past.length\n"
               "        q, k = rotate(q, first), rotate(k, first)\n"),
    ]),
    Edit("rope_tables", "its tables are buffers, not saved; each forward begins at position 0", [
        *NO_POSITIONS,
        after(MODEL, HEADS, '''\
        hs = C // self.n_head
        frequencies = 10000.0 ** (-torch.arange(0, hs, 2) / hs)
        angles = torch.outer(torch.arange(config.block_size), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
'''),
        before(MODEL, BEFORE_ATTENTION, '''\
def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


'''),
        before(MODEL, BEFORE_CACHE, "        cos, sin = self.cos[:T], self.sin[:T]\n"
               "        q, k = rotate(q, cos, sin), rotate(k, cos, sin)\n"),
    ]),
    Edit("rmsnorm", "for LayerNorm", [
        (MODEL, "    LayerNorm,\n", ""),
        before(MODEL, "@dataclass\nclass GPTConfig", "LayerNorm = nn.RMSNorm\n\n\n"),
    ]),
    Edit("no_biases", "RMSNorm, and Linear without biases: nanoGPT's bias=False", [
        (MODEL, "    LayerNorm,\n", ""),
        before(MODEL, "@dataclass\nclass GPTConfig", "LayerNorm = nn.RMSNorm\n\n\n"),
        (MODEL, "Linear(C, 3 * C)", "Linear(C, 3 * C, bias=False)"),
        (MODEL, "self.c_proj = Linear(C, C)", "self.c_proj = Linear(C, C, bias=False)"),
        (MODEL, "Linear(C, 4 * C)", "Linear(C, 4 * C, bias=False)"),
        (MODEL, "Linear(4 * C, C)", "Linear(4 * C, C, bias=False)"),
    ]),
    Edit("mask_buffer", "nanoGPT's attention, whose mask is the buffer `bias`", [
        after(MODEL, HEADS, '''\
        n = config.block_size
        self.register_buffer("bias", torch.tril(torch.ones(n, n)).view(1, 1, n, n))
'''),
        instead(MODEL, ATTENTION, '''\
        S, q, k, v = k.size(1), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(hs)
        att = att.masked_fill(self.bias[:, :, S - T:S, :S] == 0, float("-inf"))
        y = (F.softmax(att, dim=-1) @ v).transpose(1, 2)
'''),
    ], same=True),
    Edit("next_proj", "a head for the token after the next, under self.training", [
        before(MODEL, TIED, "        self.next_proj = Linear(C, C)\n"),
        instead(MODEL, LOSS, '''\
        loss = self.loss(x, targets)
        if self.training:
            loss = loss + 0.3 * self.loss(self.next_proj(x)[:, :-1], targets[:, 1:])
        return None, loss
'''),
    ]),
    Edit("swiglu", "a gate in MLP", [
        before(MODEL, "        self.gelu = GELU", "        self.c_gate = Linear(C, 4 * C)\n"),
        (MODEL, " x = self.c_fc(x)", " x = F.silu(self.c_gate(x)) * self.c_fc(x)"),
    ]),
    Edit("no_initialisation", "the gate is a Parameter that nobody draws", [
        before(MODEL, "        self.gelu = GELU",
               "        self.gate = nn.Parameter(torch.empty(4 * C, C))\n"),
        (MODEL, " x = self.c_fc(x)", " x = F.silu(F.linear(x, self.gate)) * self.c_fc(x)"),
    ], expected="told"),
    Edit("gqa", "one head of keys and values for all queries", [
        (MODEL, "Linear(C, 3 * C)", "Linear(C, C + 2 * (C // config.n_head))"),
        (MODEL, ".split(C, dim=2)", ".split((C, hs, hs), dim=2)"),
        (MODEL, "k = k.view(B, T, self.n_head,", "k = k.view(B, T, 1,"),
        (MODEL, "v = v.view(B, T, self.n_head,", "v = v.view(B, T, 1,"),
        before(MODEL, ATTENTION, "        k, v = k.expand(-1, -1, self.n_head, -1), "
               "v.expand(-1, -1, self.n_head, -1)\n"),
    ]),
    Edit("alibi", "in the formula of attention, which knows of no cache", [
        *NO_POSITIONS,
        (MODEL, KERNEL, "if True:"),
        instead(MODEL, MASKED, '''\
        distance = torch.arange(T)[:, None] - torch.arange(T)
        slopes = 2.0 ** -torch.arange(1, q.size(1) + 1)
        scores = scores + future - slopes[:, None, None] * distance
'''),
    ]),
    Edit("no_positions", "no wpe", NO_POSITIONS),
    Edit("window", "each token sees 8, in the mask of the formula", [
        after(MODEL, 'recipe = "gpt2"', "    window = 8\n"),
        (MODEL, KERNEL, "if True:"),
        instead(MODEL, MASKED, '''\
        scores = scores + future + torch.full_like(future, float("-inf")).tril(-8)
'''),
    ]),
    Edit("mixer", "a running mean of the values for attention, without a cache", [
        instead(MODEL, BEFORE_CACHE, ""),
        instead(MODEL, "k, v = past.append(", ""),
        (MODEL, ATTENTION, "y = v.cumsum(1) / torch.arange(1, T + 1)[:, None, None]"),
    ]),
    Edit("qk_norm", "with gains", [
        after(MODEL, HEADS, '''\
        self.q_norm = nn.RMSNorm(C // self.n_head)
        self.k_norm = nn.RMSNorm(C // self.n_head)
'''),
        before(MODEL, BEFORE_CACHE, "        q, k = self.q_norm(q), self.k_norm(k)\n"),
    ]),
    Edit("parallel", "attention and MLP side by side, one norm", [
        (MODEL, "        self.ln_2 = LayerNorm(config.n_embd)\n", ""),
        (MODEL, BLOCK_BEGINS + f"        x = x + {FEED}\n",
         f"        x = x + {ATTEND} + self.mlp(self.ln_1(x))\n"),
    ]),
    Edit("untied", "a head of its own", [instead(MODEL, TIED, "")]),
    Edit("untied_zero", "a head of its own that is zero at first", [
        instead(MODEL, TIED, ""),
        (MODEL, " module.bias.zero_()\n",
         " module.bias.zero_()\n        self.lm_head.weight.zero_()\n"),
    ]),
    Edit("moe", "4 experts of which 2 compute, and a loss of their balance", [
        before(MODEL, BEFORE_BLOCK, '''\
class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Linear(config.n_embd, 4, bias=False)
        self.experts = nn.ModuleList([MLP(config) for _ in range(4)])

    def forward(self, x):
        shares = F.softmax(self.router(x), dim=-1)
        top, chosen = shares.topk(2, dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + (top * (chosen == i)).sum(-1, keepdim=True) * expert(x)
        load = F.one_hot(chosen, 4).float().mean((0, 1, 2))
        self.balance = 4 * (load * shares.mean((0, 1))).sum()
        return y


'''),
        (MODEL, BLOCK_MADE, "        self.mlp = MoE(config)\n"),
        instead(MODEL, LOSS, '''\
        loss = self.loss(x, targets)
        if self.training:
            loss = loss + 0.1 * sum(block.mlp.balance for block in self.transformer.h)
        return None, loss
'''),
    ], ranks="micro-batch"),
    Edit("label_smoothing", "at F.cross_entropy", [
        (MODEL, CROSS_ENTROPY,
         CROSS_ENTROPY.replace("ignore_index=-1", "ignore_index=-1, label_smoothing=0.1")),
    ]),
    Edit("z_loss", "added to the cross-entropy", [
        (MODEL, CROSS_ENTROPY, CROSS_ENTROPY.replace("return", "loss =")),
        after(MODEL, CROSS_ENTROPY.replace("return", "loss ="), '''\
        return loss + 1e-2 * logits.logsumexp(-1).square().mean()
'''),
    ]),
    Edit("mup", "matrices are drawn and learn by the width", [
        after(MODEL, STD,
              "            std *= (64 / self.config.n_embd) ** 0.5\n"),
        instead(MODEL, MATRICES, '''\
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay,
             "lr": max_lr * 64 / self.config.n_embd},
'''),
    ]),
    Edit("ema", "torch's AveragedModel in `others`, which is validated", [
        after(TRAIN, "from torch.nn.parallel import DistributedDataParallel as DDP\n",
              "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"),
        instead(TRAIN, STATE, '''\
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return TrainState(
        model, compiled_model, ddp_model, optimizer, scaler, autocast, others={"ema": ema})
'''),
        after(TRAIN, "    state.scaler.update()\n",
              '    state.others["ema"].update_parameters(state.model)\n'),
        (TRAIN, "            _, loss = state.compiled_model(x, y)\n",
         '            _, loss = state.others["ema"](x, y)\n'),
    ]),
    Edit("adafactor", "torch's, with a rate of its own", [
        (MODEL, ADAMW, "torch.optim.Adafactor(groups, lr=10 * max_lr)")]),
    Edit("lion", "a class of one's own", [
        before(MODEL, BEFORE_GPT, '''\
class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["m"] = torch.zeros_like(p)
                m = self.state[p]["m"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(p.grad, m, 0.9).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 0.01)


'''),
        (MODEL, ADAMW, 'Lion(groups, {"lr": max_lr})'),
    ]),
    Edit("shampoo", "lists of tensors in its state", [
        before(MODEL, BEFORE_GPT, '''\
class Shampoo(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["factors"] = [1e-3 * torch.eye(min(n, 1024)) for n in p.shape]
                update = p.grad
                for dim, factor in enumerate(self.state[p]["factors"]):
                    if p.size(dim) > 1024:
                        continue
                    rows = p.grad.transpose(0, dim).reshape(len(factor), -1)
                    factor.addmm_(rows, rows.T)
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors * values.clamp(min=1e-6) ** -0.25 @ vectors.T
                    update = (root @ update.transpose(0, dim)).transpose(0, dim)
                p.sub_(update, alpha=group["lr"])


'''),
        (MODEL, ADAMW, 'Shampoo(groups, {"lr": 30 * max_lr})'),
    ]),
    Edit("schedule_free", "an optimizer that counts in its groups", [
        before(MODEL, BEFORE_GPT, '''\
class ScheduleFree(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                z.sub_(p.grad, alpha=100 * group["lr"])
                p.lerp_(z, 1 / group["k"])


'''),
        (MODEL, ADAMW, 'ScheduleFree(groups, {"lr": max_lr})'),
    ]),
    Edit("plateau", "the rate halves where a validation is no better, by `others`", [
        before(TRAIN, BEFORE_STEP, '''\
class Plateau:
    def __init__(self):
        self.best, self.scale = math.inf, 1.0

    def see(self, loss):
        if loss > self.best - 1:
            self.scale /= 2
        self.best = min(self.best, loss)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, saved):
        vars(self).update(saved)


'''),
        instead(TRAIN, STATE, '''\
    return TrainState(model, compiled_model, ddp_model, optimizer, scaler, autocast,
                      others={"plateau": Plateau()})
'''),
        before(TRAIN, "    for group in run.state.optimizer.groups():\n",
               '    scale *= run.state.others["plateau"].scale\n'),
        after(TRAIN, '        found["val"] = loss\n',
              '        run.state.others["plateau"].see(loss)\n'),
    ]),
    Edit("curriculum", "short sequences at first", [
        after(TRAIN, BATCH,
              "        T = 16 if step < 2 else 32\n        x, y = x[:, :T], y[:, :T]\n"),
    ]),
    Edit("batch_warmup", "by the recipe's batch_divisors", [
        (TRAIN, "lr_scale=warmup_cosine)",
         "lr_scale=warmup_cosine, batch_divisors=lambda config: (4, 2, 1))"),
    ]),
    Edit("characters", "nanoGPT's shakespeare_char: 65 characters as tokens", [
        ("runtime/tokenizer.py", "VOCAB_SIZE = 50257  ", "VOCAB_SIZE = 65  "),
        ("runtime/tokenizer.py", "EOT = 50256  ", "EOT = 0  "),
        ("runtime/tokenizer.py", "    return np.array([*lengths, 0], dtype=np.uint8)\n",
         "    return np.ones(VOCAB_SIZE, dtype=np.uint8)\n"),
        ("runtime/tokenizer.py", "    return new_encoding()\n\n\ndef new_encoding", '''\
    return Characters()


class Characters:
    characters = sorted(set((ASSETS.parent / "input.txt").read_text()))

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array([self.characters.index(c) for c in text])

    def decode(self, ids, errors="replace"):
        return "".join(self.characters[i] for i in ids)

    def decode_single_token_bytes(self, i):
        return self.characters[i].encode()


def new_encoding'''),
    ], flags=("--vocab_size", "65"), data="characters", same=True),
    Edit("second_validation", "of another text, a column of metrics.csv", [
        after("runtime/metrics.py", '    "hella": ".6f",\n', '    "other": ".6f",\n'),
        before(TRAIN, '        run.log.line(step, f"validation loss: ', '''\
        other = dataloader.TokenDataset(
            dataloader.list_shards(config.data, "train"), config.sequence_length)
        found["other"] = validation_loss(
            Data(None, other, 8), run.loader.B, run.state, run.process)
'''),
    ], same=True),
    Edit("norm_of_a_layer", "on the console and in metrics.csv", [
        after("runtime/metrics.py", '    "norm": ".4f",\n', '    "last_norm": ".4f",\n'),
        before(TRAIN, "    if run.config.grad_clip < math.inf:\n", '''\
    last = state.model.transformer.h[-1].parameters()
    last_norm = torch.nn.utils.get_total_norm([p.grad for p in last])
'''),
        (TRAIN, "torch.stack((loss, norm, votes))",
         "torch.stack((loss, norm, votes, last_norm))"),
        (TRAIN, "loss, norm, votes = done.", "loss, norm, votes, last_norm = done."),
        after(TRAIN, "        rate = run.schedule.tokens(done.step) / seconds\n", '''\
        run.log.line(done.step, f"norm of the last block: {last_norm:.2f}")
        run.output.add(done.step, last_norm=last_norm)
'''),
    ], same=True),
    Edit("early_stop", "where a validation is no better than those before", [
        after(TRAIN, "            is_lowest = evaluate(step, run)\n", '''\
            if is_due(step, config, config.val_every) and step > 0 and not is_lowest:
                return step, False
'''),
    ], flags=("--max_lr", "1"), same=True),
    Edit("lora", "of c_attn; all else is frozen", [
        after(MODEL, HEADS, '''\
        self.lora_a = Linear(C, 4, bias=False)
        self.lora_b = Linear(4, 3 * C, bias=False)
'''),
        (MODEL, "self.c_attn(x).split", "(self.c_attn(x) + self.lora_b(self.lora_a(x))).split"),
        after(MODEL, INITIALISED, '''\
        for name, p in self.named_parameters():
            p.requires_grad_("lora" in name)
'''),
    ]),
    Edit("decay", "of matrices, not of embeddings", [
        instead(MODEL, MATRICES, '''\
            {"params": list(self.transformer.wte.parameters()), "weight_decay": 0.0},
            {"params": list(self.transformer.wpe.parameters()), "weight_decay": 0.0},
            {"params": [p for p in self.transformer.h.parameters() if p.dim() >= 2],
             "weight_decay": weight_decay},
'''),
    ], flags=("--weight_decay", "10"), same=True),
    Edit("loss_mask", "no loss after a line end: targets of -1", [
        before(MODEL, LOSS, "        targets = targets.masked_fill(idx == 10, -1)\n"),
    ], expected="documented", documented={"ranks": "a mean of means (CONTRIBUTING.md)"}),
    Edit("frozen_wpe", "by requires_grad_", [
        after(MODEL, INITIALISED, "        self.transformer.wpe.weight.requires_grad_(False)\n")]),
    Edit("frozen_wte", "and with it the head", [
        after(MODEL, INITIALISED, "        self.transformer.wte.weight.requires_grad_(False)\n")]),
    Edit("noise", "in the gradients, before the update", [
        before(TRAIN, "    state.scaler.step(state.optimizer)\n", '''\
    for p in parameters:
        p.grad.add_(torch.randn_like(p), alpha=1e-2)
'''),
    ]),
    Edit("statistics", "a buffer that training changes", [
        before(MODEL, TIED, '        self.register_buffer("mean", torch.zeros(C))\n'),
        instead(MODEL, LAST, '''\
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.transformer.ln_f(x - self.mean)
'''),
    ], ranks="random"),
]

# ----------------------------------------------------------------------- others, of public forks

EDITS += [
    Edit("value_embeddings", "a second table, added to the values of all blocks (nanochat)", [
        after(MODEL, '            "wpe": Embedding(config.block_size, C),\n',
              '            "ve": Embedding(V, C),\n'),
        (MODEL, "x = block(x, past)",
         "x = block(x, past, self.transformer.ve(idx[:, first:]))"),
        (MODEL, "    def forward(self, x, past=None):\n" + BLOCK_BEGINS,
         "    def forward(self, x, past=None, ve=None):\n"
         "        x = x + self.attn(self.ln_1(x), past, ve)\n"),
        (MODEL, "    def forward(self, x, past=None):\n        B, T, C = x.size()\n",
         "    def forward(self, x, past=None, ve=None):\n        B, T, C = x.size()\n"),
        (MODEL, "v = v.view(", "v = (v + ve).view("),
    ]),
    Edit("softcap", "of the logits, 15 tanh(z / 15) (Gemma 2, nanochat)", [
        (MODEL, "self.lm_head(x)", "15 * torch.tanh(self.lm_head(x) / 15)"),
    ]),
    Edit("sandwich", "norms behind attention and MLP, too (Gemma 2)", [
        after(MODEL, BLOCK_MADE, '''\
        self.ln_3 = LayerNorm(config.n_embd)
        self.ln_4 = LayerNorm(config.n_embd)
'''),
        (MODEL, ATTEND, f"self.ln_3({ATTEND})"),
        (MODEL, FEED, f"self.ln_4({FEED})"),
    ]),
    Edit("residual_scales", "learned, a Parameter of ones (modded-nanogpt)", [
        after(MODEL, BLOCK_MADE, "        self.scales = nn.Parameter(torch.ones(2))\n"),
        (MODEL, ATTEND, f"self.scales[0] * {ATTEND}"),
        (MODEL, FEED, f"self.scales[1] * {FEED}"),
    ]),
    Edit("by_targets", "a loss mask, and gradients by the number of targets", [
        after(TRAIN, BATCH, '''\
        y = y.masked_fill(x == 10, -1)
        n = (y >= 0).sum()
        targets += n
'''),
        (TRAIN, "loss = loss / micro_steps", "loss = loss * n"),
        after(TRAIN, "    loss_accum = torch.zeros((), device=process.device)\n",
              "    targets = torch.zeros((), device=process.device)\n"),
        before(TRAIN, "    loss, votes = mean_loss_and_votes(loss_accum, process)\n", '''\
    if process.world_size > 1:
        dist.all_reduce(targets)
    share = process.world_size / targets
    loss_accum *= share
    for p in state.model.parameters():
        p.grad *= share
'''),
    ]),
    Edit("stochastic_depth", "each block is left out of 1 in 5 micro-batches (timm)", [
        before(MODEL, BLOCK_BEGINS,
               "        keep = 1.0 if not self.training else (torch.rand(()) < 0.8) / 0.8\n"),
        (MODEL, ATTEND, f"keep * {ATTEND}"),
        (MODEL, FEED, f"keep * {FEED}"),
    ], ranks="random"),
    Edit("tied_qk", "keys are the queries (Reformer)", [
        (MODEL, "Linear(C, 3 * C)", "Linear(C, 2 * C)"),
        (MODEL, "q, k, v = self.c_attn(x).split(C", "q, v = self.c_attn(x).split(C"),
        (MODEL, "k = k.view(B, T, self.n_head, hs)", "k = q"),
    ]),
    Edit("restarts", "of the cosine (arXiv:1608.03983)", [
        (TRAIN, "/ (config.max_steps - config.warmup_steps)",
         "/ (config.max_steps - config.warmup_steps) * 2 % 1"),
    ]),
    Edit("rates_by_layer", "lower in the first blocks (BERT's fine-tuning)", [
        (MODEL, '''\
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
''', '''\
        groups = [{"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
        for i, block in enumerate(self.transformer.h):
            matrices = [p for p in block.parameters() if p.dim() >= 2]
            rate = max_lr * 0.5 ** (self.config.n_layer - i)
            groups.append({"params": matrices, "weight_decay": weight_decay, "lr": rate})
        tables = [self.transformer.wte.weight, self.transformer.wpe.weight]
        groups.append({"params": tables, "weight_decay": weight_decay})
'''),
    ]),
    Edit("documents", "a token sees its own document only (nanochat, modded-nanogpt)", [
        after(MODEL, "from runtime.language_model import LanguageModel\n",
              "from runtime.tokenizer import EOT\n"),
        (MODEL, "x = block(x, past)", "x = block(x, past, (idx == EOT).cumsum(1))"),
        (MODEL, "    def forward(self, x, past=None):\n" + BLOCK_BEGINS,
         "    def forward(self, x, past=None, documents=None):\n"
         "        x = x + self.attn(self.ln_1(x), past, documents)\n"),
        (MODEL, "    def forward(self, x, past=None):\n        B, T, C = x.size()\n",
         "    def forward(self, x, past=None, documents=None):\n        B, T, C = x.size()\n"),
        instead(MODEL, ATTENTION, '''\
        mask = documents[:, -T:, None] == documents[:, None, :]                 # (B, T, S)
        mask = mask.tril(documents.size(1) - T)[:, None]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
'''),
    ], flags=("--vocab_size", "50304"), data="documents", same=True),
    Edit("z_loss_in_training", "the same under self.training, in `loss` (PaLM)", [
        (MODEL, CROSS_ENTROPY, CROSS_ENTROPY.replace("return", "loss =")),
        after(MODEL, CROSS_ENTROPY.replace("return", "loss ="), '''\
        if self.training:
            loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()
        return loss
'''),
    ]),
    Edit("token_shift", "each token gets half of the one before it (RWKV, nanochat's smear)", [
        before(MODEL, "        for block in self.transformer.h:",
               "        x = x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]\n"),
    ]),
    Edit("experts_without_tokens", "16 experts of which 1 computes; one may get no tokens", [
        before(MODEL, BEFORE_BLOCK, '''\
class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Linear(config.n_embd, 16, bias=False)
        self.experts = nn.ModuleList([MLP(config) for _ in range(16)])

    def forward(self, x):
        share, chosen = F.softmax(self.router(x), dim=-1).max(-1, keepdim=True)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = chosen[..., 0] == i
            if rows.any():
                y[rows] = share[rows] * expert(x[rows])
        return y


'''),
        (MODEL, BLOCK_MADE, "        self.mlp = MoE(config)\n"),
        (TRAIN, "DDP(compiled_model, **", "DDP(compiled_model, find_unused_parameters=True, **"),
    ]),
    Edit("noise_before_clipping", "in the gradients, before their norm is taken", [
        before(TRAIN, "    norm = torch.nn.utils.get_total_norm(", '''\
    for p in parameters:
        p.grad.add_(torch.randn_like(p), alpha=1e-2)
'''),
    ]),
    Edit("statistics_in_block", "a buffer of each block that training changes (a MoE's balance)", [
        after(MODEL, BLOCK_MADE,
              '        self.register_buffer("mean", torch.zeros(config.n_embd))\n'),
        before(MODEL, BLOCK_BEGINS, '''\
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        x = x - self.mean
'''),
    ], ranks="random"),
    Edit("unused", "an attention that nobody calls any more", [
        (MODEL, BLOCK_BEGINS, '''\
        x = x + self.ln_1(x).cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]
'''),
    ], expected="told"),
]

# ----------------------------------------------------------------------- mistakes, for check.py

MISTAKES = [
    Edit("mask_one_later", "each token sees the next one", [
        (MODEL, KERNEL, "if True:"), (MODEL, ".triu(1)", ".triu(2)")]),
    Edit("mask_missing_in_one_head", "", [
        (MODEL, KERNEL, "if True:"),
        (MODEL, MASKED, "scores = torch.cat((scores[:, :1], scores[:, 1:] + future), dim=1)")]),
    Edit("softmax_over_queries", "the wrong axis", [
        (MODEL, KERNEL, "if True:"),
        (MODEL, "F.softmax(scores, dim=-1)", "F.softmax(scores, dim=-2)")]),
    Edit("batch_norm", "across the batch", [
        before(MODEL, LAST, "        x = F.batch_norm(x.mT, None, None, training=True).mT\n")]),
    Edit("loss_over_inputs", "in place of the targets", [
        (MODEL, "self.loss(x, targets)", "self.loss(x, idx)")]),
    Edit("head_without_gradient", "its weight is detached", [
        instead(MODEL, TIED, ""),
        (MODEL, "self.lm_head(x)", "F.linear(x, self.lm_head.weight.detach())")]),
    Edit("no_optimizer", "biases and gains are in none", [
        (MODEL, "if p.dim() < 2]", "if p.dim() < 1]")]),
    Edit("wide_embedding", "drawn ten times as wide", [
        after(MODEL, STD,
              "            std = 0.2 if isinstance(module, nn.Embedding) else std\n")]),
    Edit("positions_restart", "with the cache", [
        (MODEL, "torch.arange(first, S, ", "torch.arange(0, S - first, ")]),
    Edit("divided_twice", "gradients, by the number of ranks", [
        (TRAIN, "= loss / micro_steps", "= loss / micro_steps / process.world_size")]),
    Edit("dropout_in_evaluation", "F.dropout without self.training", [
        (MODEL, FEED, f"F.dropout({FEED}, 0.1)")]),
    Edit("buffer_not_saved", "persistent=False, and training changes it", [
        before(MODEL, TIED,
               '        self.register_buffer("mean", torch.zeros(C), persistent=False)\n'),
        instead(MODEL, LAST, '''\
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.transformer.ln_f(x - self.mean)
''')]),
]


# ----------------------------------------------------------------------- the columns, in a copy
# What follows runs in the patched copy, by its own tests/edits.py: `ROOT` is the copy, and so all
# modules are. Each function returns what a cell says: "ok", "-", or how it fails.

RUN = [*BYTES, "--total_batch_size", "768", "--max_steps", "4", "--warmup_steps", "1",
       "--max_lr", "0.003", "--val_every", "2", "--checkpoint_every", "2",
       "--keep_checkpoints", "all"]


def columns(edit: Edit, data: Path) -> dict[str, str]:
    """{column: what its cell says} of the edit that this tree has."""
    flags = [*RUN, *edit.flags, "--data", data / edit.data]
    cells = {"train": trained(edit, flags, data)}
    if cells["train"].startswith("ok"):
        cells["resume"] = resumed(flags)
        cells["ranks"] = on_three(edit, flags)
        cells["recompute"] = recomputed(flags)
        cells["eval"] = evaluated(flags)
        cells["sample"] = sampled()
        cells["export"] = exported(edit, flags)
    if (ROOT / "check.py").exists():
        cells["check"] = checked("--fast")
    return cells


def train(*flags) -> str:
    """Trains. Returns "", or how it failed."""
    return failure(forked(command("train_gpt2.py", *flags), cwds=[os.getcwd()]))


def failure(results: list) -> str:
    """"" if all exit codes are 0, else the last line of the first process that has said something.

    `results` are [(exit code, stdout, stderr)], as helpers.forked returns them.
    """
    if all(code == 0 for code, _, _ in results):
        return ""
    said = [err.strip() for code, _, err in results if code != 0 and err.strip()]
    if not said:
        return f"TRACEBACK: none, but exit code {max(results)[0]}"
    kind = "TRACEBACK" if "Traceback" in "".join(said) else "told"
    return f"{kind}: {said[0].splitlines()[-1]}"


def trained(edit, flags, data):
    failed = train(*flags, "--out", "whole")
    if failed:
        return failed
    stock = json.loads((data / "stock.json").read_text())
    if not edit.same and rows_of("whole") == stock:
        return "SILENT: as without the edit"
    return "ok"


def rows_of(out):
    """The rows of metrics.csv as lists, without its times."""
    from runtime.metrics import read_metrics
    rows = []
    for row in read_metrics(Path(out, "metrics.csv")):
        del row["seconds"], row["tokens_per_second"]
        rows.append(list(row.values()))
    return rows


def begin_at_2(whole, out):
    """The folder `out` as `whole` was when its checkpoint of step 2 was saved."""
    shutil.copytree(whole, out)
    for path in Path(out).glob("checkpoint_*.pt"):
        if path.name > "checkpoint_000002.pt":
            path.unlink()


def resumed(flags):
    begin_at_2("whole", "resumed")
    return train(*flags, "--out", "resumed") or compared("resumed", "whole")


def compared(out, whole):
    """"ok" if two runs have the same last checkpoint and metrics.csv, bit for bit."""
    from helpers import newest, saved
    if newest(out) != newest(whole):
        return f"SILENT: ends at {newest(out)}, not {newest(whole)}"
    found, expected = saved(out), saved(whole)
    for part in ("model", "optimizers", "groups", "others", "step", "tokens", "frozen"):
        if not equal(found[part], expected[part]):
            return f"SILENT: other {part}"
    if rows_of(out) != rows_of(whole):
        return "SILENT: other losses"
    return "ok"


def equal(a, b):
    import torch
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if torch.is_tensor(a):
        return torch.equal(a, b)
    return a == b


def on_three(edit, flags):
    """3 processes, and the same resumed."""
    B = 4 if edit.ranks == "micro-batch" else 2
    flags = [*flags, "--batch_size", B]

    def train_on_three(out):
        call = command("train_gpt2.py", *flags, "--out", out)
        return failure(on_ranks(call, call, call, cwds=[os.getcwd()] * 3))

    failed = train_on_three("three")
    if failed:
        return failed
    begin_at_2("three", "three_resumed")
    end = train_on_three("three_resumed") or compared("three_resumed", "three")
    if end != "ok":
        return f"{end} (resumed)"
    if edit.ranks == "random":
        return "ok: a resume"

    for mine, expected in zip(rows_of("three")[0], rows_of("whole")[0], strict=True):
        if mine != expected and not math.isclose(mine, expected, rel_tol=1e-4, abs_tol=1e-4):
            return f"SILENT: {mine} for {expected} in the first step"
    return "ok"


def recomputed(flags):
    failed = train(*flags, "--recompute", "--out", "recomputed")
    if failed:
        return failed
    for mine, expected in zip(rows_of("recomputed"), rows_of("whole"), strict=True):
        if mine != expected:
            return f"SILENT: {mine} for {expected}"
    return "ok"


def evaluated(flags):
    call = command("train_gpt2.py", *flags, "--eval_only", "--out", "whole")
    results = forked(call, cwds=[os.getcwd()])
    [(_, out, _)] = results
    from helpers import logged
    *_, expected = logged("whole", "val").values()
    if failure(results) or f"validation loss: {expected:.4f}" in out:
        return failure(results) or "ok"
    return f"SILENT: {out.strip().rpartition('loss: ')[2][:6]} for {expected:.4f}"


def sampled():
    results = forked(sample, cwds=[os.getcwd()])
    [(_, out, err)] = results
    return failure(results) or out.strip() + (" (without a cache)" if "without it" in err else "")


def sample():
    """Prints whether 40 tokens after 3 are those that whole forwards find the likeliest."""
    import torch

    from recipes import load_model
    model = load_model("whole")
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():            # after 4 steps all tokens would be the same
        p.data += 0.2 * torch.randn(p.shape, generator=generator)
    prompts = torch.randint(0, 65, (4, 3), generator=generator)

    found = model.generate(prompts, 40, temperature=0)
    idx = prompts
    with torch.no_grad():
        for _ in range(40):
            logits, _ = model(idx[:, -model.config.block_size:])
            idx = torch.cat((idx, logits[:, -1:, :50257].argmax(-1)), dim=1)
    wrong = (found != idx).any(0).nonzero().flatten().tolist()
    print(f"SILENT: token {wrong[0] - 2} of 40 is the first that differs" if wrong else "ok")


def exported(edit, flags):
    """export.py, of a checkpoint whose vocabulary can be GPT-2's."""
    out = "whole"
    if edit.data != "characters":
        out = "wide"
        failed = train(*flags, "--out", out, "--vocab_size", "50304", "--total_batch_size", "384",
                       "--max_steps", "1", "--val_every", "0", "--max_lr", "0.03")
        if failed:
            return failed
    results = forked(command("export.py", out, "exported"), cwds=[os.getcwd()])
    [(code, _, _)] = results
    if failure(results):
        is_refused = code == 2 and failure(results).startswith("told")
        return "ok: refused" if is_refused else failure(results)
    results = forked(functools.partial(compare_export, out), cwds=[os.getcwd()])
    return failure(results) or results[0][1].strip()


def compare_export(out):
    """Prints whether transformers computes the logits of the model, and has its tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipes import load_model
    theirs = AutoModelForCausalLM.from_pretrained("exported").eval()
    V = theirs.config.vocab_size
    idx = torch.randint(0, V, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_model(out)(idx)[0][..., :V]
        difference = (theirs(idx).logits - expected).square().mean().sqrt() / expected.std()
    tokens = json.loads(Path("exported/vocab.json").read_text())
    if len(tokens) != V:
        print(f"SILENT: writes {len(tokens)} tokens beside {V} rows")
    else:
        print("ok" if difference < 1e-4 else f"SILENT: logits differ by {difference:.1e}")


def checked(*flags):
    """What check.py says: "ok", or the checks that fail."""
    result = subprocess.run([sys.executable, ROOT / "check.py", *flags], env=ENV, text=True,
                            capture_output=True)
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAILED")]
    if result.returncode == 0:
        return "ok"
    if failed:
        return "names " + ", ".join(failed)
    return failure([(result.returncode, result.stdout, result.stderr)])


# ----------------------------------------------------------------------- copies, and the table

def make_copy(edit: Edit, folder: Path) -> None:
    """This tree with the edit, without the suite."""
    folder.mkdir(parents=True)
    for path in [*ROOT.glob("*.py"), *(ROOT / "tests").glob("[!t]*.py"), ROOT / "runtime"]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target)
    for name in ("assets", "input.txt"):
        (folder / name).symlink_to(ROOT / name)

    for file, old, new, *where in edit.changes:
        text = (folder / file).read_text()
        (folder / file).write_text(changed(text, old, new, *where))


def lines_of(edit: Edit, folder: Path) -> str:
    """'+3 -2', as git counts."""
    signs = []
    for file in {change[0] for change in edit.changes}:
        before, after = [(tree / file).read_text().splitlines() for tree in (ROOT, folder)]
        difference = list(difflib.unified_diff(before, after, n=0))[2:]
        signs += [line[0] for line in difference]
    return f"+{signs.count('+')} -{signs.count('-')}"


def make_data(folder: Path) -> None:
    """Shards of input.txt: its bytes, its 65 characters, and bytes with <|endoftext|> for \\n."""
    import numpy as np

    from runtime.shards import write_shard
    text = (ROOT / "input.txt").read_text()
    characters = sorted(set(text))
    kinds = {
        "bytes": list(text[:12_001].encode()),
        "characters": [characters.index(c) for c in text[:12_001]],
        "documents": [50256 if byte == 10 else byte for byte in text[:12_001].encode()],
    }
    for kind, tokens in kinds.items():
        (folder / kind).mkdir()
        tokens = np.array(tokens, dtype=np.uint16)
        write_shard(folder / kind / "text_val_000000.npy", tokens[:2500])
        write_shard(folder / kind / "text_train_000001.npy", tokens[2500:])


def try_edit(edit: Edit, data: Path, folder: Path) -> dict[str, str]:
    """{column: cell} of an edit, with its lines and its verdict."""
    make_copy(edit, folder / edit.name)
    work = folder / edit.name / "work"
    work.mkdir()
    words = ["--in_copy", edit.name, "--data", str(data)]
    result = subprocess.run([sys.executable, folder / edit.name / "tests" / "edits.py", *words],
                            cwd=work, env=ENV, text=True, capture_output=True)
    assert result.returncode == 0, f"{edit.name}: {result.stderr}"
    cells = json.loads(result.stdout.splitlines()[-1])
    cells["lines"] = lines_of(edit, folder / edit.name)
    for column, why in edit.documented.items():
        if cells.get(column, "").startswith("SILENT"):
            cells[column] = f"documented: {why}"
    cells["verdict"] = verdict(cells)
    if edit in MISTAKES:
        cells["verdict"] = "named" if cells["check"].startswith("names") else "SILENT"
    shutil.rmtree(folder / edit.name)
    return cells


def verdict(cells: dict[str, str]) -> str:
    """The worst that a cell says; a mistake that check.py names is not silent."""
    found = [text for column, text in cells.items() if column != "check"]
    for kind in ("SILENT", "TRACEBACK"):
        if any(text.startswith(kind) for text in found):
            return "named" if cells.get("check", "").startswith("names") else kind
    for kind in ("documented", "told"):
        if any(text.startswith(kind) for text in found):
            return kind
    return "holds"


def table(rows: dict[str, dict], edits: list) -> str:
    """As Markdown."""
    names = ["lines", *COLUMNS, "verdict"]
    lines = [f"| edit | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for edit in edits:
        cells = [rows[edit.name].get(name, "-").replace("|", "\\|") for name in names]
        cells = [text if len(text) < 100 else f"{text[:97]}..." for text in cells]
        lines.append(f"| {edit.name}: {edit.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_copy(name: str, data: Path) -> None:
    """Prints {column: cell} as JSON: what the copy's tests/edits.py is called for."""
    for edit in MISTAKES:
        if edit.name == name:
            found = checked("--fast")
            if found == "ok":
                found = f"{checked()} (without --fast)"         # what starts processes, too
            print(json.dumps({"check": found}))
            return
    [edit] = [edit for edit in EDITS if edit.name == name]

    # Commands are forked from here: torch is imported once for an edit.
    import torch._dynamo  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import train_gpt2  # noqa: F401
    helpers.FORK = multiprocessing.get_context("fork")
    print(json.dumps(columns(edit, data)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="edits (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="edits at a time (default 2)")
    parser.add_argument("--in_copy", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_copy:
        in_copy(args.in_copy, args.data)
        return 0

    has_check = (ROOT / "check.py").exists()
    every = EDITS + MISTAKES * has_check
    edits = [edit for edit in every if not args.names or edit.name in args.names]
    assert set(args.names) <= {edit.name for edit in edits}, "an edit is not there"
    with tempfile.TemporaryDirectory() as folder:
        rows = try_all(edits, Path(folder), args.jobs)
    print(table(rows, edits))
    if not has_check:
        print(f"{len(MISTAKES)} mistakes were not tried: there is no check.py")

    others = [edit.name for edit in edits if rows[edit.name]["verdict"] != expected(edit)]
    for kind, count in Counter(cells["verdict"] for cells in rows.values()).items():
        print(f"{kind}: {count}")
    print(f"{len(edits) - len(others)} of {len(edits)} as expected", *others)
    return len(others) > 0


def expected(edit):
    return "named" if edit in MISTAKES else edit.expected


def try_all(edits: list, folder: Path, jobs: int) -> dict[str, dict]:
    """{name: cells}; a line on stderr for each edit that is done."""
    data = folder / "data"
    data.mkdir()
    make_data(data)
    stock = folder / "stock"
    [(code, _, err)] = forked(
        command("train_gpt2.py", *RUN, "--data", data / "bytes", "--out", stock))
    assert code == 0, err
    (data / "stock.json").write_text(json.dumps(rows_of(stock)))

    def try_one(edit):
        cells = try_edit(edit, data, folder)
        print(f"{edit.name}: {cells}", file=sys.stderr, flush=True)
        return cells

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip([edit.name for edit in edits], pool.map(try_one, edits), strict=True))


if __name__ == "__main__":
    sys.exit(main())
