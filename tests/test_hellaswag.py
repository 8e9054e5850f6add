"""hellaswag.py: its counts against a plain scoring of row after row, its data, the command."""
import errno
import json
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, refused, script
from torch.nn.modules.module import register_module_forward_hook

import hellaswag
from hellaswag import (
    batches_of_run,
    evaluate,
    load_examples,
    make_batches,
)
from model import GPT, GPTConfig
from runtime.cli import UserError
from runtime.ranks import Process
from runtime.tokenizer import encode

WORDS = (ROOT / "input.txt").read_text(encoding="utf-8").split()[:30_000]


def phrase(rng, longest):
    start = rng.randrange(29_000)
    return " ".join(WORDS[start:start + rng.randint(1, longest)])


def make_examples(n):
    """Examples of very different lengths, cut from Shakespeare."""
    rng = random.Random(0)
    examples = []
    for _ in range(n):
        endings = [phrase(rng, 12) for _ in range(4)]
        examples.append({"ctx": phrase(rng, 25), "endings": endings, "label": rng.randrange(4)})
    return examples


EXAMPLES = make_examples(30)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = GPTConfig(block_size=192, vocab_size=50304, n_layer=2, n_head=2, n_embd=32)
    model = GPT(config).eval()

    # Far from uniform, so that no two endings are near a tie.
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


@torch.no_grad()
def plain_losses(model, ctx, ending):
    """The loss of each token of an ending, of which no other row and no padding is computed."""
    row = encode(ctx).tolist() + encode(" " + ending).tolist()
    row = row[-(model.config.block_size + 1):]

    # Nothing is before the row's first token.
    first = max(1, len(row) - len(encode(" " + ending)))

    logits, _ = model(torch.tensor([row[:-1]]))
    targets = torch.tensor(row[first:])
    return F.cross_entropy(logits[0, first - 1:].double(), targets, reduction="none").tolist()


def plain_counts(model, examples):
    """[right by the sum, right by the mean, examples]."""
    acc = 0
    acc_norm = 0
    for example in examples:
        endings = [plain_losses(model, example["ctx"], ending) for ending in example["endings"]]
        sums = [math.fsum(losses) for losses in endings]
        means = [math.fsum(losses) / len(losses) for losses in endings]
        acc += sums.index(min(sums)) == example["label"]
        acc_norm += means.index(min(means)) == example["label"]
    return [acc, acc_norm, len(examples)]


@pytest.fixture(scope="module")
def expected(model):
    counts = plain_counts(model, EXAMPLES)
    assert counts[0] != counts[1], "the two counts have to be told apart"
    return counts


# ------------------------------------------------------------------------- counts

@pytest.mark.parametrize("batch_size", [7, 32])
def test_counts_are_those_of_a_plain_scoring(batch_size, model, expected):
    batches = make_batches(EXAMPLES, 192, batch_size)
    assert evaluate(model, batches, "cpu") == expected
    assert all(len(idx) <= batch_size for idx, *_ in batches)


def test_batches_hold_little_padding_and_the_largest_comes_first():
    batches = make_batches(EXAMPLES, 192, 32)
    sizes = [idx.size for idx, *_ in batches]

    tokens = 0
    for example in EXAMPLES:
        for ending in example["endings"]:
            tokens += len(encode(example["ctx"])) + len(encode(" " + ending)) - 1

    assert sum(sizes) < 1.5 * tokens
    assert max(sizes) == sizes[0]


def test_counts_of_ranks_sum_to_those_of_one(model, expected):
    batches = make_batches(EXAMPLES, 192, 16)
    parts = [evaluate(model, batches[rank::3], "cpu") for rank in range(3)]
    assert [sum(counts) for counts in zip(*parts, strict=True)] == expected


def test_a_rank_without_a_batch_counts_nothing(model):
    assert evaluate(model, [], "cpu") == [0, 0, 0]


def endings_that_differ_in_one_word(i, at_the_end):
    words = [word for word in WORDS[:3000] if len(encode(" " + word)) == 1]
    four = sorted(set(words[40 * i:40 * i + 30]))[:4]
    rest = " ".join(words[40 * i + 30:40 * i + 34])
    if at_the_end:
        return {"ctx": words[i], "endings": [f"{rest} {word}" for word in four], "label": 0}
    return {"ctx": words[i], "endings": [f"{word} {rest}" for word in four], "label": 0}


@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_first_and_the_last_token_of_an_ending_count(at_the_end, model):
    examples = [endings_that_differ_in_one_word(i, at_the_end) for i in range(6)]
    for example in examples:
        losses = []
        for ending in example["endings"]:
            losses.append(math.fsum(plain_losses(model, example["ctx"], ending)))
        example["label"] = losses.index(min(losses))

    assert evaluate(model, make_batches(examples, 192), "cpu") == [6, 6, 6]


def test_rows_longer_than_block_size_lose_their_beginning():
    torch.manual_seed(2)
    config = GPTConfig(block_size=12, vocab_size=50304, n_layer=1, n_head=2, n_embd=32)
    short = GPT(config).eval()
    batches = make_batches(EXAMPLES, 12)

    assert max(idx.shape[1] for idx, *_ in batches) == 12
    assert evaluate(short, batches, "cpu") == plain_counts(short, EXAMPLES)


def test_an_example_may_have_no_context(model):
    example = {"ctx": "", "endings": ["a b", "b c", "d e f", "g h"], "label": 1}
    counts = evaluate(model, make_batches([example], 192), "cpu")
    assert counts == plain_counts(model, [example])


def test_endings_of_one_token_without_a_context_have_no_loss_and_are_counted(model):
    example = {"ctx": "", "endings": ["a", "b", "c", "d"], "label": 1}
    assert evaluate(model, make_batches([example], 192), "cpu")[2] == 1


def test_there_are_no_gradients_and_no_random_numbers_but_autocast(model):
    seen = []
    hook = model.transformer.ln_f.register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
    before = torch.get_rng_state()

    autocast = torch.autocast("cpu", torch.bfloat16)
    evaluate(model, make_batches(EXAMPLES[:8], 192), "cpu", autocast)
    hook.remove()

    assert seen == [(False, True)]
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------- examples

def write_jsonl(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_file_of_examples_is_read_whatever_else_its_lines_hold(tmp_path):
    examples = [{"ctx": "a\u2028b\x85c", "endings": ["\x0b", "b", "c\u2029", "ü"], "label": 2}]
    examples += EXAMPLES[:5]
    rows = [{**example, "label": str(example["label"]), "ind": 3} for example in examples]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    path.write_text("\ufeff\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_examples(path) == examples


@pytest.mark.parametrize("changes", [
    {"label": 4}, {"label": 1.5}, {"label": None}, {"endings": ["a", "b", "c"]},
    {"endings": [1, 2, 3, 4]}, {"ctx": None}])
def test_a_line_that_is_no_example_is_named(changes, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [EXAMPLES[0], {**EXAMPLES[1], **changes}])
    with pytest.raises(UserError, match="a.jsonl, line 2"):
        load_examples(path)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", EXAMPLES[:1])
    path.write_text(path.read_text() + "{ ctx\n")
    with pytest.raises(UserError, match="a.jsonl, line 2"):
        load_examples(path)


def hub_with(rows, asked):
    """The package `datasets`, which notes what it is asked for."""
    def load_dataset(name, split):
        asked.append((name, split))
        return rows
    return SimpleNamespace(load_dataset=load_dataset)


def test_examples_of_the_hub_are_the_validation_split(monkeypatch):
    asked = []
    rows = [{**example, "label": str(example["label"]), "source_id": "x"} for example in EXAMPLES]
    monkeypatch.setitem(sys.modules, "datasets", hub_with(rows, asked))

    assert load_examples() == EXAMPLES
    assert asked == [("Rowan/hellaswag", "validation")]


def test_a_row_of_the_hub_without_a_label_is_named(monkeypatch):
    rows = [EXAMPLES[0], {**EXAMPLES[1], "label": ""}]          # as in the test split
    monkeypatch.setitem(sys.modules, "datasets", hub_with(rows, []))
    with pytest.raises(UserError, match="row 1"):
        load_examples()


# ------------------------------------------------------------------------- in a training run

class OneOfTwo(Process):
    """One of two ranks. `problem` is what rank 0 has found to be wrong."""

    def __init__(self, rank, problem=""):
        super().__init__(rank, world_size=2)
        self.problem = problem

    def gather(self, value):
        if self.problem and value == "":
            value = self.problem
        return [value, value]


def config_of(**changes):
    return SimpleNamespace(
        **{"hellaswag_every": 250, "hellaswag_data": "", "block_size": 64, **changes})


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_read_a_runs_examples(rank, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", EXAMPLES)
    batches = batches_of_run(config_of(hellaswag_data=str(path)), OneOfTwo(rank))
    assert sum(len(labels) for *_, labels in batches) == 30

    monkeypatch.setattr(hellaswag, "load_examples_of_the_hub", lambda: EXAMPLES)
    batches = batches_of_run(config_of(), OneOfTwo(rank))
    assert sum(len(labels) for *_, labels in batches) == 30


def test_where_rank_0_has_failed_the_others_do_not_try(monkeypatch):
    """The hub's library waits and tries again for half a minute."""
    monkeypatch.setattr(hellaswag, "load_examples_of_the_hub", lambda: pytest.fail("it tries"))
    assert batches_of_run(config_of(), OneOfTwo(1, "no network")) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_examples_the_others_use_none(rank, monkeypatch, capsys):
    """They would wait for its counts."""
    monkeypatch.setattr(hellaswag, "load_examples_of_the_hub", lambda: EXAMPLES)
    process = OneOfTwo(rank)
    process.gather = lambda value: ["", "no connection"]

    assert batches_of_run(config_of(), process) == []
    assert ("no connection" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize("error", [
    ConnectionError("Couldn't reach the hub"), OSError(errno.ECONNREFUSED, "Connection refused"),
    ValueError("no such split"),
], ids=repr)
def test_whatever_the_hub_answers_a_run_goes_on_with_a_warning(error, monkeypatch, capsys):
    def fail(name, split):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    assert batches_of_run(config_of(), Process()) == []
    line = capsys.readouterr().out
    assert "warning" in line
    assert error.args[-1] in line
    assert "--hellaswag_data" in line


def test_a_run_without_hellaswag_reads_nothing(monkeypatch):
    monkeypatch.setattr(hellaswag, "load_examples", lambda *path: pytest.fail("it reads"))
    assert batches_of_run(config_of(hellaswag_every=0), Process()) == []


def test_without_the_hub_or_its_package_a_run_goes_on_with_a_warning(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert batches_of_run(config_of(), Process()) == []
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "warning" in line and "datasets" in line


def test_a_file_that_is_named_has_to_be_right(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("no example\n")
    refused(lambda: batches_of_run(config_of(hellaswag_data=str(path)), Process()), path)


# ------------------------------------------------------------------------- the command

@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """--model and --data of the command."""
    folder = tmp_path_factory.mktemp("command")
    model.save_pretrained(folder / "model")
    data = write_jsonl(folder / "examples.jsonl", EXAMPLES)
    return ["--model", str(folder / "model"), "--data", str(data), "--device", "cpu"]


def test_the_command_prints_counts_and_shares(files, expected, capsys):
    hellaswag.main(files)
    acc, acc_norm, _ = expected
    assert capsys.readouterr().out.splitlines() == [
        f"acc: {acc}/30={acc / 30:.4f}", f"acc_norm: {acc_norm}/30={acc_norm / 30:.4f}"]


@pytest.mark.parametrize("flags, rows, dtype", [
    (["--limit", "9"], 32, torch.float32),
    (["--limit", "3", "--batch_size", "11"], 8, torch.float32),
    (["--limit", "3", "--dtype", "bfloat16"], 12, torch.bfloat16)])
def test_the_commands_batches_and_dtype_are_those_of_its_flags(flags, rows, dtype, files):
    seen = []

    def note(module, inputs, output):
        if type(module).__name__ == "MLP":
            seen.append(output)

    hook = register_module_forward_hook(note)
    hellaswag.main([*files, *flags])
    hook.remove()

    assert max(len(output) for output in seen) == rows
    assert {output.dtype for output in seen} == {dtype}


@pytest.mark.parametrize("flags", [
    ["--limit", "0"], ["--batch_size", "3"], ["--dtype", "int8"], ["--device", "tpu"], ["--bogus"]])
def test_a_mistake_is_found_before_the_model_is_read(flags, monkeypatch):
    monkeypatch.setattr("recipes.load_model", lambda path: pytest.fail("the model was read"))
    with pytest.raises(UserError, match=flags[0]):
        hellaswag.main(flags)


def test_without_a_network_it_ends_with_one_line(files):
    done = script("hellaswag.py", *files[:2])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Rowan/hellaswag" in done.stderr
    assert "--data" in done.stderr
