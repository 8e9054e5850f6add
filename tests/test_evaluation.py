"""train_gpt2.py's evaluations: validation, HellaSwag, samples, when they are due, in whole runs."""
import math
import pickle
import re
import shlex
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    contents,
    hellaswag_file,
    logged,
    refused,
    run,
    saved,
    saved_steps,
    script,
    train,
)
from peers import make_model, make_run
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import hellaswag
import train_gpt2
from config import Config
from recipes import load_model
from runtime.cli import RunError
from runtime.ranks import Process, Stopped
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from train_gpt2 import evaluate, hellaswag_score, print_samples, validation_loss

# ----------------------------------------------------------------------- validation

def validate(run):
    return validation_loss(run.data, run.loader.B, run.state, run.process)


@torch.no_grad()
def plain_validation(run, count):
    """The mean loss of the first sequences, one after the other."""
    losses = []
    for row in run.data.val.read(0, count).astype(np.int64):
        row = torch.from_numpy(row)
        logits, _ = run.state.model(row[None, :-1])
        losses.append(F.cross_entropy(logits[0], row[1:]).item())
    return sum(losses) / count


@pytest.mark.parametrize("count, B", [(8, 4), (9, 4), (11, 4), (1, 4), (5, 5), (3, 1)])
def test_validation_is_the_mean_of_its_sequences_whatever_the_last_batch(count, B):
    run = make_run()
    run.data.val_count = count
    run.loader.B = B
    assert validate(run) == pytest.approx(plain_validation(run, count), abs=1e-5)


class Compiled:
    """What torch.compile returns in these tests: it calls the model, and remembers how."""

    def __init__(self, model):
        self.model = model
        self.shapes = []
        self.strides = set()
        self.had_gradients = []
        self.last_loss = None
        self.is_last_loss_freed = []

    def __call__(self, x, y):
        if self.last_loss is not None:
            self.is_last_loss_freed.append(self.last_loss() is None)
        self.shapes.append(tuple(x.shape))
        self.strides |= {x.stride(), y.stride()}
        self.had_gradients.append(torch.is_grad_enabled())
        result = self.model(x, y)
        self.last_loss = weakref.ref(result[1])
        return result


@pytest.fixture
def compiled(monkeypatch):
    """The models that torch.compile has been asked for."""
    models = []

    def compile(model, dynamic):
        assert dynamic is False
        models.append(Compiled(model))
        return models[-1]

    monkeypatch.setattr(torch, "compile", compile)
    return models


def test_a_compiled_validation_has_gradients_and_frees_each_graph_before_the_next(compiled):
    """For torch.no_grad() torch would compile a second graph, and another one for each shape."""
    run = make_run(compile=True)

    validate(run)

    [model] = compiled
    assert model.shapes == [(4, 24)] * 3
    assert model.had_gradients == [True] * 3
    assert model.is_last_loss_freed == [True] * 2
    assert all(p.grad is None for p in run.state.model.parameters())


def test_an_eager_validation_has_no_gradients():
    run = make_run()
    seen = []
    run.state.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    validate(run)
    assert seen == [False] * 3


# ----------------------------------------------------------------------- HellaSwag and samples

class OneOfTwo(Process):
    """One of two ranks, of which the other one has the same numbers."""

    def __init__(self, rank):
        super().__init__(rank, rank, 2)

    def sum(self, *values):
        return [2 * value for value in values]


def test_each_rank_scores_its_own_batches_of_hellaswag_by_the_mean_loss(monkeypatch):
    def count(model, batches, *arguments):
        scored.append(list(batches))
        return [3, 7, 10]         # right by the sum, right by the mean, all

    monkeypatch.setattr(hellaswag, "evaluate", count)
    scored = []
    run = make_run()
    run.hellaswag_batches = ["a", "b", "c", "d", "e"]

    assert hellaswag_score(run) == (7, 10)
    for rank in (0, 1):
        run.process = OneOfTwo(rank)
        assert hellaswag_score(run) == (14, 20)
    assert scored == [run.hellaswag_batches, ["a", "c", "e"], ["b", "d"]]


@pytest.fixture(scope="module")
def speaking_model():
    return make_model(vocab_size=50304, n_layer=1, block_size=24, spread=0.05)


@pytest.mark.parametrize("prompt, kept", [
    ("To be", [2514, 307]),
    ("", [EOT]),
    (" a" * 40 + " To be", [257] * 22 + [1675, 307]),       # the context's 24 tokens
], ids=["some", "none", "too long"])
def test_samples_continue_the_prompt_with_the_seed_42(prompt, kept, speaking_model, capsys):
    run = make_run(speaking_model, vocab_size=50304, sample_prompt=prompt)
    random_state = torch.get_rng_state()

    print_samples(run)

    generator = torch.Generator().manual_seed(42)
    rows = speaking_model.generate(
        torch.tensor([kept] * 4), max_new_tokens=32, temperature=1.0, top_k=50,
        generator=generator)
    assert not torch.equal(rows[0], rows[1])
    expected = ""
    for i, row in enumerate(rows.tolist()):
        expected += f"sample {i}: {tokenizer().decode(row)}\n"
    assert capsys.readouterr().out == expected
    assert torch.equal(random_state, torch.get_rng_state())


def test_samples_of_tokens_that_are_not_gpt2s_are_their_numbers(capsys):
    run = make_run(sample_prompt="")
    print_samples(run, num_samples=1, max_new_tokens=4)
    generator = torch.Generator().manual_seed(42)
    row = run.state.model.generate(torch.tensor([[0]]), 4, generator=generator)[0].tolist()
    assert capsys.readouterr().out.split() == ["sample", "0:", *map(str, row)]


def test_hellaswag_and_samples_are_computed_in_the_runs_dtype(speaking_model):
    """As are steps and validations: test_flags.py."""
    run = make_run(speaking_model, vocab_size=50304, dtype="bfloat16")
    example = {"ctx": "one two", "endings": ["three", "four", "five", "six"], "label": 0}
    run.hellaswag_batches = hellaswag.make_batches([example], 24)
    dtypes = set()

    def remember_dtype(module, inputs, output):
        if isinstance(module, nn.Linear):
            dtypes.add(output.dtype)

    with register_module_forward_hook(remember_dtype):
        hellaswag_score(run)
        assert dtypes == {torch.bfloat16}
        dtypes.clear()
        print_samples(run)
        assert dtypes == {torch.bfloat16}


# ----------------------------------------------------------------------- when they are due

@pytest.fixture
def made(monkeypatch):
    """The evaluations that have been made, by name. None of them takes time."""
    names = []
    for name, result in (("validation_loss", 2.5), ("hellaswag_score", (3, 4)),
                         ("print_samples", None)):
        def make(*arguments, name=name, result=result):
            names.append(name)
            return result

        monkeypatch.setattr(train_gpt2, name, make)
    return names


VALIDATION = {"val": 2.5, "val_tokens": 11 * 24}         # 11 sequences of make_run


@pytest.mark.parametrize("step, cells, samples", [
    (0, {**VALIDATION, "hella": 0.75}, False),        # samples would be of the fresh weights
    (1, None, False),
    (2, VALIDATION, False),
    (3, {"hella": 0.75}, False),
    (4, VALIDATION, True),
    (6, {**VALIDATION, "hella": 0.75}, False),
    (11, {**VALIDATION, "hella": 0.75}, True),
])
def test_an_evaluation_is_due_at_its_period_and_after_the_last_step(step, cells, samples, made):
    run = make_run(max_steps=11, val_every=2, hellaswag_every=3, sample_every=4)
    run.hellaswag_batches = ["a batch"]

    evaluate(step, run)

    assert ("print_samples" in made) == samples
    if cells is None:
        assert run.output.rows == run.output.pictures == []
    else:
        assert run.output.rows == [{"step": step, **cells}]
        assert run.output.pictures == [False]


def test_there_is_no_validation_of_what_is_read_backwards_but_at_step_0(made):
    """The first 32 sequences are, which are four steps: at step 4 nothing else was read yet."""
    run = make_run(max_steps=11, val_every=2)
    run.data.train.backward = 32
    lowest = [step for step in range(12) if evaluate(step, run)]

    assert [row["step"] for row in run.output.rows] == [0, 6, 8, 10, 11]
    assert lowest == [0], "all have the same loss"


def test_of_what_is_read_backwards_the_training_loss_alone_is_drawn(made):
    run = make_run(max_steps=11, val_every=2, hellaswag_every=2, sample_every=2)
    run.hellaswag_batches = ["a batch"]
    run.data.train.backward = 32
    evaluate(2, run)
    assert made == run.output.rows == []
    assert run.output.pictures == [False]


def test_an_evaluation_tells_whether_its_loss_is_the_lowest_so_far(made, monkeypatch):
    losses = iter([3.0, 2.0, 2.0, 1.0, 4.0])
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *arguments: next(losses))
    run = make_run(val_every=2, sample_every=1)
    lowest = [evaluate(step, run) for step in (0, 1, 2, 4, 6, 8)]
    assert lowest == [True, False, True, False, True, False]


def test_an_evaluation_is_printed(made, capsys):
    run = make_run(max_steps=250, val_every=250, hellaswag_every=250)
    run.hellaswag_batches = ["a batch"]
    run.data.bits_per_byte = 0.5
    evaluate(250, run)
    assert capsys.readouterr().out == (
        "step   250 | validation loss: 2.5000 (1.2500 bits per byte)\n"
        "step   250 | HellaSwag accuracy: 3/4=0.7500\n")


def test_a_period_of_0_is_never_and_nor_is_hellaswag_without_examples(made):
    never = make_run()
    never.hellaswag_batches = ["a batch"]
    for step in (0, 5, 10):
        evaluate(step, never)
    evaluate(1, make_run(hellaswag_every=1))
    assert made == []


def test_a_validation_loss_that_is_not_finite_ends_the_run_unrecorded(made, monkeypatch):
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *arguments: math.nan)
    run = make_run(val_every=2)
    with pytest.raises(RunError, match="step 4 .*--max_lr"):
        evaluate(4, run)
    assert run.output.rows == []


def test_a_signal_ends_an_evaluation_and_nothing_of_it_is_recorded():
    """The mean over no batch is no validation loss."""
    run = make_run(process=Process(signal="SIGTERM"), val_every=1)
    seen = []
    run.state.model.register_forward_pre_hook(lambda *_: seen.append(1))

    with pytest.raises(Stopped):
        evaluate(1, run)

    assert seen == run.output.rows == []


# ----------------------------------------------------------------------- in whole runs

T = 32
# What samples, or is scored by HellaSwag, needs GPT-2's vocabulary.
WORDS = [
    "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", T, "--dtype", "float32",
    "--device", "cpu", "--total_batch_size", 4 * T, "--batch_size", 2, "--warmup_steps", 2,
    "--val_tokens", 5 * T,
]
QUIET = ["--val_every", 0, "--sample_every", 0, "--checkpoint_every", 0]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Flags of a run on GPT-2's tokens."""
    folder = tmp_path_factory.mktemp("words")
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:9000]
    ids = encode(text).astype(np.uint16)
    write_shard(folder / "text_val_000000.npy", ids[:400])
    write_shard(folder / "text_train_000001.npy", ids[400:])
    return ["--data", folder, *WORDS]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return hellaswag_file(tmp_path_factory.mktemp("examples") / "examples.jsonl", 12)


@pytest.fixture(scope="module")
def evaluated_run(words, examples, tmp_path_factory):
    """OUT of a run that evaluates, samples and saves."""
    out = tmp_path_factory.mktemp("evaluated")
    train(*words, "--max_steps", 5, "--val_every", 2, "--sample_every", 2, "--hellaswag_every", 3,
          "--hellaswag_data", examples, "--checkpoint_every", 2, "--out", out)
    return out


def test_evaluations_samples_and_checkpoints_do_not_change_the_losses(
        evaluated_run, words, tmp_path):
    train(*words, *QUIET, "--hellaswag_every", 0, "--max_steps", 5, "--out", tmp_path)
    assert logged(evaluated_run) == logged(tmp_path)
    assert len(logged(tmp_path)) == 5


def test_a_run_evaluates_at_its_periods(evaluated_run):
    assert list(logged(evaluated_run, "val")) == [0, 2, 4, 5]
    assert list(logged(evaluated_run, "hella")) == [0, 3, 5]


def test_a_runs_hellaswag_is_acc_norm_of_the_command(evaluated_run, examples, capsys):
    hellaswag.main(["--model", str(evaluated_run), "--device", "cpu", "--data", str(examples)])
    acc_norm = capsys.readouterr().out.split("acc_norm: ")[1]
    share = int(acc_norm.split("/")[0]) / 12
    assert logged(evaluated_run, "hella")[5] == pytest.approx(share, abs=1e-6)


def test_a_checkpoint_records_its_step_tokens_recipe_and_the_flags_as_asked(evaluated_run):
    checkpoint = saved(evaluated_run, 5)
    assert checkpoint["step"] == 5
    assert checkpoint["tokens"] == 5 * 4 * T
    assert checkpoint["recipe"] == "gpt2"
    assert checkpoint["config"]["total_batch_size"] == 4 * T
    assert checkpoint["config"]["min_lr"] == "auto"


def test_a_compiled_run_sees_one_shape_and_has_the_numbers_of_an_eager_one(
        compiled, evaluated_run, words, examples, tmp_path):
    """Single sequences: their strides have to be those of a whole tensor.

    HellaSwag and samples have many shapes, and run eager.
    """
    train(*words, "--compile", "--batch_size", 1, "--max_steps", 2, "--val_every", 2,
          "--sample_every", 2, "--hellaswag_every", 2, "--hellaswag_data", examples,
          "--checkpoint_every", 0, "--out", tmp_path)

    [model] = compiled
    trial = 2                           # forwards, as are these
    validation = 5
    steps = 2 * 4
    assert model.shapes == [(1, T)] * (trial + 2 * validation + steps)
    assert model.strides == {(T, 1)}
    for kind in ("train", "val", "hella"):
        of_eager = logged(evaluated_run, kind)[0]
        assert logged(tmp_path, kind)[0] == pytest.approx(of_eager, abs=1e-4)


def test_samples_begin_with_the_first_line_of_the_validation_shards(words, tmp_path, capsys):
    """As does the command that is named at the end. What was typed wins, and a resume keeps it."""
    flags = [*words, "--preset", "small", "--sample_every", 1, "--checkpoint_every", 1]
    train(*flags, "--max_steps", 1, "--out", tmp_path / "auto")
    text = capsys.readouterr().out
    assert "\nsample 0: First Citizen:\n" in text
    assert text.endswith("/best --prompt='First Citizen:'\n")
    assert saved(tmp_path / "auto")["config"]["sample_prompt"] == "auto"

    train(*flags, "--max_steps", 1, "--out", tmp_path / "typed", "--sample_prompt", "To be\n")
    assert capsys.readouterr().out.endswith("/best --prompt='To be'\n")
    train(*flags, "--max_steps", 2, "--out", tmp_path / "typed")
    text = capsys.readouterr().out
    assert "\nsample 0: To be\n" in text
    assert text.endswith("/best --prompt='To be'\n")


def test_finetuning_starts_where_the_weights_ended(evaluated_run, words, tmp_path, capsys):
    """From a run's best checkpoint, and from an exported folder.

    The exported model has no rows of padding, whose probabilities go to the 50,257 tokens: its loss
    is lower by about log(50304 / 50257) = 0.001.
    """
    best = evaluated_run / "best"
    losses = logged(evaluated_run, "val")
    lowest = min(loss for step, loss in losses.items() if step > 0)
    load_model(best).save_pretrained(tmp_path / "exported")
    for source, tolerance in ((best, 2e-6), (tmp_path / "exported", 2e-3)):
        out = tmp_path / f"from {source.name}"
        train(*words, "--preset", "finetune", "--init", source, "--max_steps", 1, "--out", out,
              "--sample_prompt", "ROMEO:")
        assert logged(out, "val")[0] == pytest.approx(lowest, abs=tolerance)
        assert capsys.readouterr().out.count("sample 0: ROMEO:") == 1
        assert saved_steps(out) == [1]


# ----------------------------------------------------------------------- other tokens than GPT-2's

def write_characters(folder):
    """As nanoGPT's data/shakespeare_char/prepare.py. Returns how many characters there are."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:9000]
    itos = dict(enumerate(sorted(set(text))))
    stoi = {character: i for i, character in itos.items()}
    ids = np.array([stoi[character] for character in text], dtype=np.uint16)
    folder.mkdir(parents=True)
    ids[:8000].tofile(folder / "train.bin")
    ids[8000:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return len(itos)


def test_nanogpts_characters_are_trained_on_evaluated_sampled_and_read(
        tmp_path, monkeypatch, capsys):
    """To the command that comes next, and the lines of docs/data.md."""
    monkeypatch.chdir(tmp_path)
    data = Path("data/shakespeare_char")
    flags = [*WORDS, "--data", data, "--max_steps", 2, "--out", "log/char", "--val_every", 2]
    size = ["--vocab_size", write_characters(data)]
    refused(lambda: train(*flags, "--hellaswag_every", 0), "meta.pkl", "--vocab_size")

    train(*flags, *size, "--hellaswag_every", 0, "--sample_every", 2)
    text = capsys.readouterr().out
    assert re.search(r"^sample 0: 0( \d+){32} $", text, re.MULTILINE)
    assert "bits per byte" not in text
    assert saved("log/char")["config"]["sample_prompt"] == Config.sample_prompt

    train("--eval_only", "--data", data, "--init", "log/char", "--val_tokens", 5 * T,
          "--device", "cpu", "--dtype", "float32")
    assert evaluated_loss(capsys.readouterr().out) == pytest.approx(
        logged("log/char", "val")[2], abs=1e-4)
    _, name, *more = shlex.split(text.splitlines()[-1].removeprefix("next: "))
    assert script(name, *more, "--max_new_tokens", 3).returncode == 0

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(import pickle.*?)```", page, re.DOTALL)[1], {})
    assert len(capsys.readouterr().out) == 1 + 500 + 1


# ----------------------------------------------------------------------- --eval_only

def evaluated_loss(text):
    """The validation loss that --eval_only has printed."""
    [loss] = re.findall(r"validation loss: ([\d.]+)", text)
    return float(loss)


def test_eval_only_has_the_loss_of_the_runs_newest_checkpoint_and_writes_nothing(
        evaluated_run, words):
    """Or of the model of --init, whatever is in --out, and whatever the training shards are."""
    losses = logged(evaluated_run, "val")
    before = contents(evaluated_run)
    flags = ["--eval_only", "--val_tokens", 5 * T, "--out", evaluated_run]

    init = ["--init", evaluated_run / "checkpoint_000004.pt"]
    for more, step, processes in ([], 5, 2), (init, 4, 1):
        text = run(*words[:2], *flags, *more, processes=processes).stdout
        assert evaluated_loss(text) == pytest.approx(losses[step], abs=1e-4)
        assert f"checkpoint_{step:06d}.pt" in text
        assert f"{5 * T} tokens" in text
    assert contents(evaluated_run) == before


def test_eval_only_computes_at_once_what_needs_no_trial(evaluated_run, tmp_path, monkeypatch):
    """On a GPU, too: nothing makes the batch smaller if it does not fit."""
    write_shard(tmp_path / "text_val_000000.npy", np.zeros(5000, np.uint16))
    found = []

    def note_batch(data, B, *others):
        found.append(B)
        return 5.0

    monkeypatch.setattr(train_gpt2, "validation_loss", note_batch)
    train("--data", tmp_path, "--eval_only", "--init", evaluated_run, "--device", "cpu")
    assert found == [4096 // T]


def test_eval_only_takes_the_run_and_not_what_a_preset_begins_with(
        evaluated_run, words, tmp_path, capsys):
    """The preset's --init is gpt2. A typed one is evaluated, and its file is named."""
    flags = [*words[:2], "--eval_only", "--preset", "finetune", "--val_tokens", 5 * T]

    train(*flags, "--out", evaluated_run)
    assert f"{evaluated_run}/checkpoint_000005.pt: validation loss" in capsys.readouterr().out
    train(*flags, "--out", tmp_path, "--init", evaluated_run)
    assert f"{evaluated_run}/checkpoint_000005.pt: validation loss" in capsys.readouterr().out
    refused(lambda: train(*flags, "--out", tmp_path), "--init", "--out")


def test_a_model_that_is_there_is_not_to_be_made_longer(evaluated_run, words):
    flags = [*words[:2], "--eval_only", "--init", evaluated_run, "--sequence_length", 4096]
    line = refused(lambda: train(*flags), "--sequence_length")
    assert "raise" not in line


def test_eval_only_takes_a_model_of_another_recipe_than_its_preset(evaluated_run, words, capsys):
    train(*words[:2], "--eval_only", "--preset", "shakespeare", "--init", evaluated_run,
          "--val_tokens", 5 * T, "--device", "cpu")
    assert f"{5 * T} tokens" in capsys.readouterr().out


def test_eval_only_needs_a_model_and_no_training_shards(evaluated_run, words, tmp_path, capsys):
    _, data = words[:2]
    shutil.copy(data / "text_val_000000.npy", tmp_path)
    flags = ["--eval_only", "--data", tmp_path, "--out", tmp_path / "nowhere"]

    refused(lambda: train(*flags), "--init", "--out")
    train(*flags, "--init", evaluated_run, "--device", "cpu")
    assert 9 < evaluated_loss(capsys.readouterr().out) < 12
    assert [path.name for path in tmp_path.iterdir()] == ["text_val_000000.npy"]


def test_eval_only_computes_no_more_sequences_than_there_are(evaluated_run, words, capsys):
    """A last batch is filled up to --batch_size, which would take its time."""
    shapes = []

    def remember(module, inputs):
        if type(module).__name__ == "GPT":
            shapes.append(tuple(inputs[0].shape))

    with register_module_forward_pre_hook(remember):
        train(*words[:2], "--eval_only", "--out", evaluated_run, "--batch_size", 1000,
              "--val_tokens", 5 * T, "--device", "cpu")
    assert shapes == [(1, T), (5, T)]           # the first compares its code
    loss = evaluated_loss(capsys.readouterr().out)
    assert loss == pytest.approx(logged(evaluated_run, "val")[5], abs=1e-4)


def test_eval_only_takes_other_flags_of_training_than_its_run_but_no_other_model(
        evaluated_run, words, capsys):
    """It trains nothing: its sequences may be shorter."""
    flags = [*words[:2], "--eval_only", "--device", "cpu", "--dtype", "float32",
             "--val_tokens", 5 * T, "--sequence_length", T // 2]
    train(*flags, "--out", evaluated_run, "--seed", 3, "--total_batch_size", 7, "--no_shuffle")
    loss = evaluated_loss(capsys.readouterr().out)
    train(*flags, "--init", evaluated_run / "checkpoint_000005.pt")
    assert loss == evaluated_loss(capsys.readouterr().out)
    assert loss != pytest.approx(logged(evaluated_run, "val")[5], abs=1e-4)

    refused(lambda: train(*flags, "--out", evaluated_run, "--n_layer", 3), "--n_layer 1", "3")
