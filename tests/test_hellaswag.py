"""hellaswag.py: its counts against a plain scoring of one example at a time, its data, and the command."""
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hellaswag
from hellaswag import evaluate, load_examples, make_batches
from helpers import HANG, script
from model import GPT, GPTConfig
from runtime.cli import UserError
from runtime.tokenizer import encode
from test_model import PEERS, make_model, nanogpt_checkpoint, save, write_peer

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def make_examples(n, seed=0):
    """Examples of very different lengths, cut from Shakespeare."""
    rng = random.Random(seed)
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()[:30_000]

    def phrase(longest):
        start, length = rng.randrange(29_000), rng.randint(1, longest)
        return " ".join(words[start:start + length])
    return [{"ctx": phrase(25), "endings": [phrase(12) for _ in range(4)], "label": rng.randrange(4)}
            for _ in range(n)]


@pytest.fixture(scope="module")
def examples():
    return make_examples(80)


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that the losses of endings differ clearly."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=192, vocab_size=50304, n_layer=2, n_head=2, n_embd=24))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


@torch.no_grad()
def plain_scores(model, examples):
    """[(summed losses, mean losses)] of the four endings, one row and one token's loss at a time."""
    found = []
    for example in examples:
        totals, means = [], []
        for ending in example["endings"]:
            ctx, end = encode(example["ctx"]).tolist(), encode(" " + ending).tolist()
            row = (ctx + end)[-(model.config.block_size + 1):]
            first = max(1, len(row) - len(end))             # the row's first token has nothing before it
            logits = model(torch.tensor([row[:-1]]))[0][0, first - 1:]        # of the tokens from `first` on
            losses = [(row_logits.exp().sum().log() - row_logits[token]).item()
                      for row_logits, token in zip(logits.double(), row[first:], strict=True)]
            totals.append(math.fsum(losses))
            means.append(math.fsum(losses) / len(losses))
        found.append((totals, means))
    return found


def plain_counts(scores, examples):
    hits = [sum(kind.index(min(kind)) == example["label"]
                for kind, example in zip(column, examples, strict=True))
            for column in zip(*scores, strict=True)]
    return [*hits, len(examples)]


@pytest.fixture(scope="module")
def scores(model, examples):
    return plain_scores(model, examples)


def test_the_made_up_examples_tell_sum_from_mean_and_have_no_near_ties(scores, examples):
    for losses in (losses for pair in scores for losses in pair):
        best, second = sorted(losses)[:2]
        assert second - best > 1e-4
    acc, acc_norm, n = plain_counts(scores, examples)
    assert acc != acc_norm and 8 < acc < 40 and n == 80
    assert len({len(encode(e["ctx"])) for e in examples}) > 15


@pytest.mark.parametrize("batch_size", [4, 7, 32, 128])
def test_counts_equal_plain_scoring_at_any_batch_size(batch_size, model, examples, scores):
    batches = make_batches(examples, 192, batch_size)
    assert all(len(idx) <= batch_size for idx, *_ in batches)
    assert sum((labels >= 0).sum() for *_, labels in batches) == 80
    assert evaluate(model, batches, "cpu").tolist() == plain_counts(scores, examples)


@pytest.mark.parametrize("world_size", [2, 64])
def test_counts_split_over_processes_sum_to_the_same(world_size, model, examples, scores):
    batches = make_batches(examples, 192, 32)
    rounds = []             # each rank asks before each whether to stop: they must have equally many

    def watched(what, items, unit):
        rounds.append(len(items))
        return items
    parts = [evaluate(model, batches, "cpu", None, rank, world_size, watched) for rank in range(world_size)]
    assert len(set(rounds)) == 1
    assert sum(parts).tolist() == plain_counts(scores, examples)
    assert max(part[2] for part in parts) < 80


def test_losses_of_each_ending_equal_plain_scoring_to_rounding(model, examples, scores):
    order = []
    for idx, targets, positions, labels in make_batches(examples, 192, 32):
        total = model.token_losses(*map(torch.from_numpy, (idx, targets, positions))).sum(1).view(-1, 4)
        rows = zip(total.tolist(), labels.tolist(), strict=True)
        order += [(*row, label) for row, label in rows if label >= 0]
    plain = [(*totals, example["label"]) for (totals, _), example in zip(scores, examples, strict=True)]
    for ours, theirs in zip(sorted(order), sorted(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_rows_longer_than_block_size_lose_their_beginning(examples):
    torch.manual_seed(1)
    short = GPT(GPTConfig(block_size=12, vocab_size=50304, n_layer=1, n_head=2, n_embd=24))
    with torch.no_grad():
        for p in short.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    some = examples[:60]
    assert any(len(encode(" " + ending)) > 13 for e in some for ending in e["endings"])   # an ending alone
    expected = plain_counts(plain_scores(short, some), some)
    assert evaluate(short, make_batches(some, 12, 32), "cpu").tolist() == expected


def realistic_examples(n):
    """Contexts of about 20 to 110 tokens; endings of 3 to 60, the four of an example alike."""
    rng, found = random.Random(3), []
    for _ in range(n):
        length = rng.randint(3, 50)
        found.append({"ctx": " the" * rng.randint(20, 110), "label": rng.randrange(4),
                      "endings": ["a" + " dog" * (rng.randint(length, length + 10) - 1) for _ in range(4)]})
    return found


def test_the_similar_in_length_share_a_batch_so_that_little_is_padding():
    some = realistic_examples(300)
    padded = sum(idx.size for idx, *_ in make_batches(some, 192, 32))
    rows = sum(len(encode(e["ctx"])) + len(encode(" " + ending)) - 1 for e in some for ending in e["endings"])
    assert padded < 1.3 * rows


@pytest.mark.parametrize("batch_size, most, waste", [(4, 24, 1.4), (32, 7, 1.15), (128, 7, 1.05)])
def test_batches_come_in_few_shapes_with_few_positions_in_vain(batch_size, most, waste):
    some = realistic_examples(301)
    batches = make_batches(some, 1024, batch_size)
    assert len({tuple(array.shape for array in batch) for batch in batches}) <= most
    assert {(len(idx), len(labels)) for idx, _, _, labels in batches} == {(batch_size, batch_size // 4)}
    assert len(batches) == math.ceil(301 * 4 / batch_size)
    assert all(idx.shape[1] % 32 == 0 for idx, *_ in batches)
    for _, targets, positions, _ in batches:
        assert set(positions) == set((targets >= 0).reshape(-1).nonzero()[0])
    endings = sum(len(encode(" " + ending)) for e in some for ending in e["endings"])
    assert sum(len(positions) for _, _, positions, _ in batches) < waste * endings


def test_a_batchs_length_is_never_above_block_size():
    batches = make_batches(realistic_examples(40), 100, 32)
    assert max(idx.shape[1] for idx, *_ in batches) == 100


def test_a_compiled_model_compiles_once_a_shape_and_counts_the_same(model, examples, scores, monkeypatch):
    from torch._dynamo.testing import CompileCounter
    batches, counter = make_batches(examples, 192, 32), CompileCounter()
    shapes = {tuple(array.shape for array in batch) for batch in batches}
    torch.compiler.reset()
    compiled = torch.compile(model.token_losses, backend=counter, dynamic=False, fullgraph=True)
    monkeypatch.setattr(model, "token_losses", compiled)
    # not monkeypatch: it would hide the setting from torch itself
    with torch._dynamo.config.patch(recompile_limit=32):
        assert evaluate(model, batches, "cpu").tolist() == plain_counts(scores, examples)
    assert 1 <= counter.frame_count <= len(shapes) < len(batches)


def test_rows_that_fill_a_batch_never_count(model, examples, scores):
    batches = make_batches(examples[:9], 192, 32)
    fillers = [(targets[4 * i:4 * i + 4] == -1).all()
               for _, targets, _, labels in batches for i in range(8) if labels[i] == -1]
    assert len(batches) == 2 and len(fillers) == 7 and all(fillers)
    assert evaluate(model, batches, "cpu").tolist() == plain_counts(scores[:9], examples[:9])
    for *_, labels in batches:
        labels[:] = -1
    assert evaluate(model, batches, "cpu").tolist() == [0, 0, 0]


def test_examples_without_context_are_scored_from_their_second_token(model):
    some = {"ctx": "", "endings": ["a b", "b c", "d e f", "g h"], "label": 1}
    counts = evaluate(model, make_batches([some], 192), "cpu")
    assert counts.tolist() == plain_counts(plain_scores(model, [some]), [some])
    nothing = {"ctx": "", "endings": ["a", "b", "c", "d"], "label": 0}      # to score, yet no crash
    assert evaluate(model, make_batches([nothing], 192), "cpu")[2] == 1


def test_evaluation_leaves_the_random_numbers_alone_and_keeps_no_graph(model, examples, monkeypatch):
    before, token_losses, graphs = torch.get_rng_state(), model.token_losses, []

    def watched(*batch):
        losses = token_losses(*batch)
        graphs.append(losses.requires_grad)
        return losses
    monkeypatch.setattr(model, "token_losses", watched)
    evaluate(model, make_batches(examples[:8], 192), "cpu")
    assert graphs == [False] and torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()


# -----------------------------------------------------------------------------
# the data

def write_jsonl(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_examples_come_from_jsonl_with_labels_as_text_and_any_other_fields(tmp_path):
    rows = make_examples(5)
    written = [{**row, "label": str(row["label"]), "ind": 3, "split": "val"} for row in rows]
    path = write_jsonl(tmp_path / "a.jsonl", written)
    assert load_examples(path) == rows


def test_a_line_separator_inside_a_string_and_a_byte_order_mark_do_no_harm(tmp_path):
    rows = [{"ctx": "a\u2028b\x85c", "endings": ["\x0b", "b", "c\u2029", "ü"], "label": 2}]
    path = write_jsonl(tmp_path / "a.jsonl", ["\ufeff" + json.dumps(rows[0], ensure_ascii=False)])
    assert load_examples(path) == rows


GOOD = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1}
BAD_LINES = {
    "no json": "{'ctx'", "cut off": json.dumps(GOOD)[:-5], "a list": "[1]", "text": '"ctx"', "null": "null",
    "deep": "[" * 100_000,
    "no ctx": {**GOOD, "ctx": None}, "three endings": {**GOOD, "endings": ["b", "c", "d"]},
    "endings as one string": {**GOOD, "endings": "bcde"},
    "an ending that is a number": {**GOOD, "endings": ["b", "c", "d", 4]},
    "label 4": {**GOOD, "label": 4}, "label -1": {**GOOD, "label": -1},
    "no label": {k: GOOD[k] for k in ("ctx", "endings")},
    "label without a number": {**GOOD, "label": ""}, "label null": {**GOOD, "label": None},
    "label infinite": {**GOOD, "label": math.inf}, "label nan": {**GOOD, "label": math.nan},
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_broken_line_is_named(what, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, "", BAD_LINES[what]])
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3")):
        load_examples(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00", None])
def test_a_file_without_examples_is_refused(content, tmp_path):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(path))):
        load_examples(path)


def test_the_hubs_rows_are_read_and_checked(monkeypatch):
    import datasets
    rows, asked = make_examples(3), []
    hub = [{**row, "label": str(row["label"]), "source_id": "x"} for row in rows]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or hub)
    assert load_examples() == rows and asked == [(("Rowan/hellaswag",), {"split": "validation"})]
    hub[1]["label"] = ""
    with pytest.raises(UserError, match="Rowan/hellaswag, row 1"):
        load_examples()


# -----------------------------------------------------------------------------
# the command

def command(*flags):
    return script("hellaswag.py", *flags)


@pytest.fixture(scope="module")
def files(model, examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hellaswag")
    content = {"model": model.state_dict(), "model_config": vars(model.config), "recipe": "gpt2"}
    torch.save(content, folder / "model.pt")
    return folder / "model.pt", write_jsonl(folder / "examples.jsonl", examples)


def test_the_command_prints_both_counts_of_the_first_examples(files, scores, examples):
    result = command("--model", files[0], "--data", files[1], "--limit", 50, "--batch_size", 16,
                     "--device", "cpu")
    acc, acc_norm, n = plain_counts(scores[:50], examples[:50])
    assert result.returncode == 0 and n == 50
    assert result.stdout == f"acc: {acc}/50={acc / 50:.4f}\nacc_norm: {acc_norm}/50={acc_norm / 50:.4f}\n"


@pytest.mark.parametrize("kind", PEERS)
def test_every_kind_of_checkpoint_is_scored(kind, files, examples, tmp_path, capsys):
    source, model = write_peer(kind, tmp_path)
    hellaswag.main(["--model", str(source), "--data", str(files[1]), "--limit", "16", "--device", "cpu"])
    acc, acc_norm, n = plain_counts(plain_scores(model, examples[:16]), examples[:16])
    out = capsys.readouterr().out
    assert out == f"acc: {acc}/{n}={acc / n:.4f}\nacc_norm: {acc_norm}/{n}={acc_norm / n:.4f}\n"


def test_a_model_of_another_tokenizer_is_refused(files, tmp_path):
    characters = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(make_model().state_dict()))
    with pytest.raises(UserError, match="ckpt.pt has a vocabulary of 96"):
        hellaswag.main(["--model", str(characters), "--data", str(files[1])])


MISTAKES = {
    "no network": (["--model", "MODEL"], "Rowan/hellaswag"),
    "missing data": (["--model", "MODEL", "--data", "nowhere.jsonl"], "nowhere"),
    "missing model": (["--model", "nowhere.pt", "--data", "DATA"], "nowhere.pt"),
    "device": (["--device", "tpu"], "--device tpu"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_exits_2_with_one_line_and_no_traceback(what, files):
    flags, word = MISTAKES[what]
    result = command(*({"MODEL": files[0], "DATA": files[1]}.get(flag, flag) for flag in flags))
    assert result.returncode == 2 and result.stdout == "" and word in result.stderr
    assert result.stderr.startswith("hellaswag.py: ") and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("flags", [["--bogus"], ["--limit", "0"], ["--limit", "many"], ["--batch_size", "3"],
                                   ["--dtype", "int8"], ["--device", "cpu:x"]], ids=" ".join)
def test_a_wrong_flag_is_named(flags):
    with pytest.raises(UserError, match=flags[0]):
        hellaswag.main(["--model", "nowhere.pt", *flags])


def test_memory_that_runs_out_is_told_in_one_line(files, monkeypatch):
    monkeypatch.setattr(hellaswag, "evaluate", lambda *args, **how: torch.empty(2**50))
    with pytest.raises(UserError, match="cpu is out of memory: give a smaller --batch_size"):
        hellaswag.main(["--model", str(files[0]), "--data", str(files[1]), "--device", "cpu"])


@pytest.mark.parametrize("mistake, slow", [(["--device", "tpu"], "model"),
                                           (["--data", "nowhere.jsonl"], "model"),
                                           (["--model", "nowhere.pt"], "hub")])
def test_mistakes_are_found_before_slow_work(mistake, slow, monkeypatch, files):
    import model

    def too_late(*args, **kwargs):
        raise AssertionError(f"{slow} came before the mistake was found")
    if slow == "model":
        monkeypatch.setattr(model, "load_model", too_late)
    else:
        monkeypatch.setattr(hellaswag, "load_examples", too_late)
    with pytest.raises(UserError):
        hellaswag.main(["--model", str(files[0]), *mistake])


def test_importing_hellaswag_prints_nothing_and_leaves_the_slow_libraries_alone(tmp_path):
    code = ("import hellaswag, sys; "
            "slow = {'torch', 'transformers', 'datasets', 'huggingface_hub', 'safetensors'}; "
            "assert not slow & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG, env={**ENV, "PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])
