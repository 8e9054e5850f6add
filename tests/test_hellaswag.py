"""hellaswag.py: its counts against a plain scoring of one token at a time, its data, and the command. Bad
files are in test_hostile.py."""
import functools
import json
import math
import os
import random
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import hellaswag
from hellaswag import evaluate, load_examples, make_batches
from helpers import BYTES, ROOT, logged, refused, run, script
from peers import make_model, own_checkpoint, save
from runtime.tokenizer import encode

def make_examples(n, seed=0):
    """Examples of very different lengths, cut from Shakespeare."""
    rng = random.Random(seed)
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()[:30_000]

    def phrase(longest):
        start, length = rng.randrange(29_000), rng.randint(1, longest)
        return " ".join(words[start:start + length])
    return [{"ctx": phrase(25), "endings": [phrase(12) for _ in range(4)], "label": rng.randrange(4)}
            for _ in range(n)]


N, EXAMPLES = 30, make_examples(30)


@torch.no_grad()
def plain_scores(model, examples):
    """[(summed losses, mean losses)] of the four endings, one row and one token's loss at a time."""
    def losses(ctx, ending):
        ctx, end = encode(ctx).tolist(), encode(" " + ending).tolist()
        row = (ctx + end)[-(model.config.block_size + 1):]
        first = max(1, len(row) - len(end))                 # the row's first token has nothing before it
        logits = model(torch.tensor([row[:-1]]))[0][0, first - 1:].double()
        return [(row_logits.exp().sum().log() - row_logits[token]).item()
                for row_logits, token in zip(logits, row[first:], strict=True)]
    found = [[losses(e["ctx"], ending) for ending in e["endings"]] for e in examples]
    return [([*map(math.fsum, four)], [math.fsum(one) / len(one) for one in four]) for four in found]


def plain_counts(scores, examples):
    hits = [[kind.index(min(kind)) == example["label"] for kind in pair]
            for pair, example in zip(scores, examples, strict=True)]
    return [*map(sum, zip(*hits, strict=True)), len(examples)]


@pytest.fixture(scope="module")
def model():
    return make_model(block_size=192, vocab_size=50304)


@pytest.fixture(scope="module")
def scores(model):
    scores = plain_scores(model, EXAMPLES)
    for losses in (losses for pair in scores for losses in pair):       # no near ties
        best, second = sorted(losses)[:2]
        assert second - best > 1e-4
    acc, acc_norm, _ = plain_counts(scores, EXAMPLES)
    assert acc != acc_norm and 2 < acc < N / 2
    return scores


@pytest.mark.parametrize("batch_size", [7, 32])
def test_counts_are_those_of_a_plain_scoring_and_little_of_a_batch_is_padding(batch_size, model, scores):
    batches = make_batches(EXAMPLES, 192, batch_size)
    sizes = [idx.size for idx, *_ in batches]
    assert all(len(idx) <= batch_size for idx, *_ in batches)
    rows = sum(len(encode(e["ctx"])) + len(encode(" " + ending)) - 1 for e in EXAMPLES
               for ending in e["endings"])
    assert sum(sizes) < 1.5 * rows and max(sizes) == sizes[0]           # what needs most memory fails first
    assert evaluate(model, batches, "cpu").tolist() == plain_counts(scores, EXAMPLES)


def test_the_first_and_the_last_token_of_an_ending_count(model):
    """Of endings that differ in nothing else the plain scoring's best is the right one."""
    text = (ROOT / "input.txt").read_text()[:9000]
    words = [word for word in text.split() if len(encode(" " + word)) == 1]
    some = []
    for i in range(12):
        four, rest = sorted({*words[40 * i:40 * i + 30]})[:4], " ".join(words[40 * i + 30:40 * i + 34])
        endings = [f"{word} {rest}" if i % 2 else f"{rest} {word}" for word in four]
        some.append({"ctx": words[i], "endings": endings, "label": 0})
    for example, (sums, means) in zip(some, plain_scores(model, some), strict=True):
        assert sums.index(min(sums)) == means.index(min(means))
        example["label"] = sums.index(min(sums))
    assert evaluate(model, make_batches(some, 192), "cpu").tolist() == [12, 12, 12]


@pytest.mark.parametrize("world_size", [2, 64])
def test_counts_of_ranks_sum_to_those_of_one(world_size, model, scores):
    batches, seen = make_batches(EXAMPLES, 192, 16), []
    parts = [evaluate(model, batches, "cpu", None, rank, world_size,
                      lambda of: seen.append(len(of)) or of) for rank in range(world_size)]
    assert sum(parts).tolist() == plain_counts(scores, EXAMPLES) and max(part[2] for part in parts) < N
    assert sum(seen) == len(batches) and evaluate(model, batches, "cpu", watched=lambda of: of[:1])[2] == 4


def test_rows_longer_than_block_size_lose_their_beginning():
    short = make_model(block_size=12, vocab_size=50304, n_layer=1)
    assert any(len(encode(" " + ending)) > 13 for e in EXAMPLES for ending in e["endings"])  # an ending alone
    batches = make_batches(EXAMPLES, 12, 32)
    assert max(idx.shape[1] for idx, *_ in batches) == 12
    assert evaluate(short, batches, "cpu").tolist() == plain_counts(plain_scores(short, EXAMPLES), EXAMPLES)


def test_without_context(model):
    some = [{"ctx": "", "endings": ["a b", "b c", "d e f", "g h"], "label": 1}]
    counts = evaluate(model, make_batches(some, 192), "cpu").tolist()
    assert counts == plain_counts(plain_scores(model, some), some)
    some[0]["endings"] = ["a", "b", "c", "d"]                           # nothing to score, yet no crash
    assert evaluate(model, make_batches(some, 192), "cpu")[2] == 1


def test_no_gradients_and_no_random_numbers_but_autocast(model):
    before, seen = torch.get_rng_state(), []
    hook = model.transformer.ln_f.register_forward_hook(lambda *_: seen.append(
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    evaluate(model, make_batches(EXAMPLES[:8], 192), "cpu", torch.autocast("cpu", torch.bfloat16))
    hook.remove()
    assert seen == [(False, True)] and torch.equal(before, torch.get_rng_state())


def write_jsonl(path, rows, start=""):
    path.write_text(start + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_a_file_of_examples_and_a_line_of_it_that_is_broken(tmp_path):
    rows = [{"ctx": "a\u2028b\x85c", "endings": ["\x0b", "b", "c\u2029", "ü"], "label": 2}, *make_examples(5)]
    written = [{**row, "label": str(row["label"]), "ind": 3, "split": "val"} for row in rows]
    assert load_examples(write_jsonl(tmp_path / "a.jsonl", written, "\ufeff\n")) == rows
    path = write_jsonl(tmp_path / "a.jsonl", [*rows[1:3], {}], "\n")
    refused(lambda: load_examples(path), f"{path}, line 4")


def test_rows_of_the_hub(monkeypatch):
    rows, asked = make_examples(3), []
    hub = [{**row, "label": str(row["label"]), "source_id": "x"} for row in rows]
    datasets = SimpleNamespace(load_dataset=lambda *args, **how: asked.append((args, how)) or hub)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert load_examples() == rows and asked == [(("Rowan/hellaswag",), {"split": "validation"})]
    hub[1]["label"] = ""
    refused(load_examples, "Rowan/hellaswag", "row 1")


def test_the_command_prints_counts_and_shares(model, scores, tmp_path, capsys):
    path, data = save(tmp_path / "m.pt", own_checkpoint(model)), write_jsonl(tmp_path / "a.jsonl", EXAMPLES)
    hellaswag.main(["--model", str(path), "--data", str(data), "--limit", "20", "--device", "cpu"])
    acc, acc_norm, _ = plain_counts(scores[:20], EXAMPLES[:20])
    assert (capsys.readouterr().out ==
            f"acc: {acc}/20={acc / 20:.4f}\nacc_norm: {acc_norm}/20={acc_norm / 20:.4f}\n")


def test_the_commands_batches_and_dtype_are_those_of_its_flags(model, tmp_path):
    """By default 32 rows in float32."""
    path, data = save(tmp_path / "m.pt", own_checkpoint(model)), write_jsonl(tmp_path / "a.jsonl", EXAMPLES)

    def rows_and_dtypes(*flags):
        seen = []
        hook = register_module_forward_hook(lambda module, inputs, output: seen.append(output)
                                            if type(module).__name__ == "MLP" else None)
        try:
            hellaswag.main(["--model", str(path), "--data", str(data), "--device", "cpu", *flags])
        finally:
            hook.remove()
        return max(len(x) for x in seen), {x.dtype for x in seen}
    assert rows_and_dtypes("--limit", "9") == (32, {torch.float32})
    assert rows_and_dtypes("--limit", "3", "--batch_size", "11") == (8, {torch.float32})
    assert rows_and_dtypes("--limit", "3", "--dtype", "bfloat16") == (12, {torch.bfloat16})


def hub_that_notes(path):
    """The package datasets, whose examples take a while on rank 0: each rank notes when it has them."""
    rank = os.environ["RANK"]

    def load_dataset(*args, **how):
        if rank == "0":
            threading.Event().wait(0.3)         # if both begin at once, rank 1 is the first now
        with open(path, "a") as file:
            file.write(rank)
        return EXAMPLES[:9]             # two batches
    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)


def test_rank_0_fetches_the_examples_before_the_others_look(byte_data, tmp_path):
    """It fills the cache; else eight ranks would download at once."""
    text = run("--data", byte_data, *BYTES, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16,
               "--max_steps", 1, "--val_every", 0, "--checkpoint_every", 0, "--hellaswag_every", 100, "--out",
               tmp_path / "log", processes=2,
               before=[functools.partial(hub_that_notes, tmp_path / "order")]).stdout
    assert (tmp_path / "order").read_text() == "01"
    told = re.findall(r"accuracy: (\d+)/(\d+)=([\d.]+)", text)           # of both ranks' examples
    assert [(n, share) for _, n, share in told] == [("9", f"{int(c) / 9:.4f}") for c, *_ in told]
    assert logged(tmp_path / "log", "hella") == {step: pytest.approx(int(c) / 9, abs=1e-6)
                                                 for step, (c, *_) in zip((0, 1), told, strict=True)}


def test_without_a_network_it_ends_with_one_line(model, tmp_path):
    path = save(tmp_path / "model.pt", own_checkpoint(model))
    refused(lambda: script("hellaswag.py", "--model", path), "hellaswag.py: ", "Rowan/hellaswag")


@pytest.mark.parametrize("flags", ["--bogus", "--limit 0", "--batch_size 3", "--dtype int8", "--device tpu",
                                   "--data nowhere.jsonl"])
def test_mistakes_are_found_before_the_model_is_read(flags, monkeypatch):
    monkeypatch.setattr("recipes.load_model", lambda path: pytest.fail("the model was read"))
    refused(lambda: hellaswag.main(flags.split()), flags.split()[-1 if "nowhere" in flags else 0])
