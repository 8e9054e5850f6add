"""hellaswag.py: its counts against a plain scoring of one token at a time, its data, and the command."""
import json
import math
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hellaswag
from hellaswag import evaluate, hellaswag_batches, load_examples, make_batches
from helpers import ENV, HANG, ROOT
from model import GPT, GPTConfig
from runtime.cli import UserError
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


def random_model(seed, **config):
    """Weights so large that the losses of endings differ clearly."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=50304, n_head=2, n_embd=24, **config))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


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
def examples():
    return make_examples(80)


@pytest.fixture(scope="module")
def model():
    return random_model(0, block_size=192, n_layer=2)


@pytest.fixture(scope="module")
def scores(model, examples):
    scores = plain_scores(model, examples)
    for losses in (losses for pair in scores for losses in pair):       # no near ties
        best, second = sorted(losses)[:2]
        assert second - best > 1e-4
    acc, acc_norm, _ = plain_counts(scores, examples)
    assert acc != acc_norm and 8 < acc < 40
    return scores


@pytest.mark.parametrize("batch_size", [4, 7, 32, 128])
def test_counts(batch_size, model, examples, scores):
    batches = make_batches(examples, 192, batch_size)
    assert all(len(idx) <= batch_size for idx, *_ in batches)
    assert evaluate(model, batches, "cpu").tolist() == plain_counts(scores, examples)


@pytest.mark.parametrize("world_size", [2, 64])
def test_counts_of_ranks_sum_to_those_of_one(world_size, model, examples, scores):
    batches = make_batches(examples, 192, 32)
    parts = [evaluate(model, batches, "cpu", None, rank, world_size) for rank in range(world_size)]
    assert sum(parts).tolist() == plain_counts(scores, examples) and max(part[2] for part in parts) < 80


def test_rows_longer_than_block_size_lose_their_beginning(examples):
    short, some = random_model(1, block_size=12, n_layer=1), examples[:60]
    assert any(len(encode(" " + ending)) > 13 for e in some for ending in e["endings"])   # an ending alone
    batches = make_batches(some, 12, 32)
    assert max(idx.shape[1] for idx, *_ in batches) == 12
    assert evaluate(short, batches, "cpu").tolist() == plain_counts(plain_scores(short, some), some)


def test_little_of_a_batch_is_padding_and_the_largest_comes_first(examples):
    sizes = [idx.size for idx, *_ in make_batches(examples, 192, 16)]
    rows = sum(len(encode(e["ctx"])) + len(encode(" " + ending)) - 1 for e in examples
               for ending in e["endings"])
    assert sum(sizes) < 1.5 * rows and sizes == sorted(sizes, reverse=True)


def test_without_context(model):
    some = {"ctx": "", "endings": ["a b", "b c", "d e f", "g h"], "label": 1}
    counts = evaluate(model, make_batches([some], 192), "cpu")
    assert counts.tolist() == plain_counts(plain_scores(model, [some]), [some])
    nothing = {"ctx": "", "endings": ["a", "b", "c", "d"], "label": 0}      # to score, yet no crash
    assert evaluate(model, make_batches([nothing], 192), "cpu")[2] == 1


def test_watched_sees_the_batches_and_may_end_early(model, examples):
    batches, seen = make_batches(examples, 192, 32), []

    def watched(items):
        seen.extend(items)
        yield from items[:1]
    assert evaluate(model, batches, "cpu", None, 1, 2, watched)[2] == 8
    assert [id(item) for item in seen] == [id(batch) for batch in batches[1::2]]


def test_no_gradients_and_no_random_numbers_but_autocast(model, examples, monkeypatch):
    before, token_losses, seen = torch.get_rng_state(), model.token_losses, []

    def spied(*batch):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return token_losses(*batch)
    monkeypatch.setattr(model, "token_losses", spied)
    evaluate(model, make_batches(examples[:8], 192), "cpu", torch.autocast("cpu", torch.bfloat16))
    assert seen == [(False, True)] and torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


# -----------------------------------------------------------------------------
# the data

GOOD = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}


def write_jsonl(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_jsonl(tmp_path):
    rows = [{"ctx": "a\u2028b\x85c", "endings": ["\x0b", "b", "c\u2029", "ü"], "label": 2}, *make_examples(5)]
    written = [{**row, "label": str(row["label"]), "ind": 3, "split": "val"} for row in rows]
    written[0] = "\ufeff" + json.dumps(written[0], ensure_ascii=False)
    assert load_examples(write_jsonl(tmp_path / "a.jsonl", written)) == rows


def test_a_broken_line_is_named(tmp_path):
    """What else can be wrong with one is in test_hostile.py."""
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, "", "{'ctx'"])
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3")):
        load_examples(path)


def test_rows_of_the_hub(monkeypatch):
    import datasets
    rows, asked = make_examples(3), []
    hub = [{**row, "label": str(row["label"]), "source_id": "x"} for row in rows]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or hub)
    assert load_examples() == rows and asked == [(("Rowan/hellaswag",), {"split": "validation"})]
    hub[1]["label"] = ""
    with pytest.raises(UserError, match="Rowan/hellaswag, row 1"):
        load_examples()


def test_batches_of_a_training_run(tmp_path, monkeypatch):
    said = []
    process = SimpleNamespace(device="cpu", print0=said.append, rank0_first=lambda f, *args: f(*args))
    config = SimpleNamespace(hellaswag_every=250, hellaswag_data=write_jsonl(tmp_path / "a.jsonl", [GOOD]),
                             block_size=16)
    (batch,) = hellaswag_batches(config, set(), process)
    assert batch[3].tolist() == [1] and not said
    config.hellaswag_data = str(tmp_path / "nowhere.jsonl")
    for flag in ("hellaswag_every", "hellaswag_data"):
        with pytest.raises(UserError, match="nowhere.jsonl"):
            hellaswag_batches(config, {flag}, process)
    assert hellaswag_batches(config, {"max_steps"}, process) == []
    assert len(said) == 1 and said[0].startswith("warning: ") and "nowhere.jsonl" in said[0]
    config.hellaswag_every = 0
    assert hellaswag_batches(config, {"hellaswag_every"}, process) == [] and len(said) == 1


# -----------------------------------------------------------------------------
# the command

@pytest.fixture(scope="module")
def files(model, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hellaswag")
    content = {"model": model.state_dict(), "model_config": vars(model.config), "recipe": "gpt2"}
    torch.save(content, folder / "model.pt")
    return str(folder / "model.pt"), str(write_jsonl(folder / "examples.jsonl", examples))


def test_command(files, scores, examples, capsys):
    hellaswag.main(["--model", files[0], "--data", files[1], "--limit", "50", "--device", "cpu"])
    acc, acc_norm, _ = plain_counts(scores[:50], examples[:50])
    assert (capsys.readouterr().out ==
            f"acc: {acc}/50={acc / 50:.4f}\nacc_norm: {acc_norm}/50={acc_norm / 50:.4f}\n")


def test_without_a_network_it_ends_with_one_line(files):
    env = {**ENV, "HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}       # nothing listens there
    result = subprocess.run([sys.executable, ROOT / "hellaswag.py", "--model", files[0]], env=env, text=True,
                            capture_output=True, timeout=HANG)
    assert result.returncode == 2 and result.stdout == "" and "Rowan/hellaswag" in result.stderr
    assert result.stderr.startswith("hellaswag.py: ") and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("flags", ["--bogus", "--limit 0", "--limit many", "--batch_size 3", "--dtype int8",
                                   "--device tpu", "--device cpu:x", "--data nowhere.jsonl"])
def test_mistakes_are_found_before_the_model_is_read(flags, monkeypatch):
    import model
    monkeypatch.setattr(model, "load_model", lambda path: pytest.fail("the model was read"))
    with pytest.raises(UserError, match="nowhere" if "nowhere" in flags else flags.split()[0]):
        hellaswag.main(flags.split())
