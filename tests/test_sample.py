"""sample.py: the stream of text, flags, prompts from pipes and terminals."""
import io
import os
import signal
import sys

import pytest
import torch
from helpers import refused, script
from peers import make_model, own_checkpoint, save
from torch.nn.modules.module import register_module_forward_hook

import sample
from recipes import load_model
from runtime.cli import UserError
from runtime.language_model import LanguageModel
from runtime.metrics import HEADER
from runtime.tokenizer import EOT, encode, tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = make_model(block_size=16, vocab_size=50304, n_layer=1)
    return str(save(tmp_path_factory.mktemp("sample") / "model.pt", own_checkpoint(model)))


@pytest.fixture
def shown(path, capsys):
    """shown(flags): what sample.py prints with them, 8 tokens a sample; nothing on stderr."""
    def shown(*flags):
        flags = [str(flag) for flag in flags]
        sample.main(["--model", path, "--device", "cpu", "--max_new_tokens", "8", *flags])
        output, errors = capsys.readouterr()
        assert errors == ""
        return output
    return shown


@pytest.fixture
def after_each_block():
    """after_each_block(call): calls it whenever the only block of the model has computed."""
    handles = []

    def register(call):
        def hook(module, inputs, output):
            if type(module).__name__ == "Block":
                call(output)
        handles.append(register_module_forward_hook(hook))

    yield register
    for handle in handles:
        handle.remove()


def generated(path, text, num_samples=4, max_new_tokens=8, seed=42, **how):
    """What the command has to print for a prompt, by model.generate."""
    prompt = encode(text).tolist()
    idx = torch.tensor([prompt or [EOT]] * num_samples)
    generator = torch.Generator().manual_seed(seed)
    rows = load_model(path).generate(idx, max_new_tokens, generator=generator, **how)

    printed = ""
    for number, row in enumerate(rows.tolist(), start=1):
        new = row[idx.size(1):]
        if EOT in new:
            new = new[:new.index(EOT)]
        printed += f"--- sample {number} of {num_samples}\n{tokenizer().decode(prompt + new)}\n"
    return printed


def likeliest(path, text, n):
    """The text of the n likeliest tokens after `text`."""
    idx = torch.tensor([encode(text).tolist() or [EOT]])
    row = load_model(path).generate(idx, n, temperature=0)[0]
    return tokenizer().decode(row[-n:].tolist())


# ----------------------------------------------------------------------- samples and flags

@pytest.mark.parametrize("text", [
    "Hello, I'm — a model,", "", "a<|endoftext|>b", " a" * 16, "-- well-known"])
def test_samples_are_those_of_generate(text, path, shown):
    assert shown("--prompt", text) == generated(path, text)


@pytest.mark.parametrize("name, value", [
    ("num_samples", 2),
    ("max_new_tokens", 12),
    ("temperature", 0.7),
    ("top_k", 2),
    ("seed", 5),
])
def test_each_flag_reaches_generate(name, value, path, shown):
    found = shown("--prompt", "The", f"--{name}", value)
    assert found == generated(path, "The", **{name: value})
    assert found != generated(path, "The")


def test_dtype_is_that_of_autocast(path, shown):
    found = shown("--prompt", "The", "--temperature", 0, "--dtype", "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert found == generated(path, "The", temperature=0)


def test_top_k_0_samples_from_all_tokens(path, shown):
    found = shown("--top_k", 0, "--temperature", 50)
    assert found == generated(path, "", top_k=None, temperature=50)
    assert found != shown("--top_k", 50, "--temperature", 50)


def test_the_defaults_are_four_samples_of_200_tokens():
    args = sample.parse_args([])
    assert (args.num_samples, args.max_new_tokens) == (4, 200)


def test_of_a_runs_folder_the_best_checkpoint_is_named(tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path / f"checkpoint_{step:06d}.pt",
             own_checkpoint(make_model(block_size=16, vocab_size=50304, n_layer=1)))
    rows = ["1,0,0,,3.0,,,,,32", "2,0,0,,4.0,,,,,32"]
    (tmp_path / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")

    sample.main(["--model", str(tmp_path), "--device", "cpu", "--max_new_tokens", "1"])
    assert "checkpoint_000001.pt" in capsys.readouterr().err


def test_of_a_prompt_longer_than_the_context_the_end_is_used_and_all_is_shown(path, capsys):
    flags = ["--device", "cpu", "--temperature", "0", "--max_new_tokens", "3"]
    prompt = " a" * 16 + " To be"
    sample.main(["--model", path, "--prompt", prompt, *flags])
    output, errors = capsys.readouterr()
    assert output.endswith("\n" + prompt + likeliest(path, " a" * 14 + " To be", 3) + "\n")
    assert "18 tokens" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("flags", [
    "--num_samples 0",
    "--num_samples 2.5",
    "--num_samples 1001",
    "--max_new_tokens -3",
    "--max_new_tokens many",
    "--temperature -1",
    "--temperature nan",
    "--temperature inf",
    "--top_k -1",
    "--seed -1",
    f"--seed {2**64}",
    "--bogus",
    "--device tpu",
    "--dtype int8",
    "--interactive --prompt a",
])
def test_mistakes_are_found_before_the_model_is_read(flags, monkeypatch):
    monkeypatch.setattr("recipes.load_model", lambda path: pytest.fail("the model was read"))
    words = flags.split()
    with pytest.raises(UserError, match=words[0]):
        sample.main(words)


def test_tokens_that_are_not_gpt2s_are_shown_as_numbers_and_take_no_text(tmp_path, capsys):
    path = str(save(tmp_path / "a.pt", own_checkpoint(make_model())))       # 96 tokens
    sample.main(["--model", path, "--num_samples", "1", "--max_new_tokens", "5", "--device", "cpu"])
    generator = torch.Generator().manual_seed(42)
    row = load_model(path).generate(torch.tensor([[0]]), 5, generator=generator)[0].tolist()
    title, numbers = capsys.readouterr().out.splitlines()
    assert numbers.split() == [str(token) for token in row[1:]]

    for flags in (["--prompt", "a"], ["--interactive"]):
        refused(lambda flags=flags: sample.main(["--model", path, *flags]), flags[0], "a.pt")
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------- the stream of text

def steps_of(rows):
    """The rows (n, T) as generation yields them: T tensors (n, 1)."""
    return torch.tensor(rows).T[:, :, None]


def test_each_token_is_shown_when_it_comes_but_no_part_of_a_character():
    row = encode("naïve 日本語 🙂🙃!").tolist()
    shown = ""

    def steps():
        for taken, step in enumerate(steps_of([row])):
            # All that is complete of the tokens before this one has been shown.
            assert shown == tokenizer().decode_bytes(row[:taken]).decode(errors="ignore")
            yield step

    for piece in sample.stream_text(steps(), [], 1, titles=False):
        shown += piece
    assert shown == tokenizer().decode(row) + "\n"


def test_of_a_character_that_the_last_token_leaves_incomplete_a_sign_remains():
    row = encode("a🙂").tolist()[:-1]
    shown = "".join(sample.stream_text(steps_of([row]), [], 1, titles=False))
    assert shown == "a\ufffd\n"


def test_samples_come_one_after_the_other_and_end_with_their_documents():
    a, b, c = encode("a b c").tolist()
    rows = [[a, EOT, c], [EOT, b, b], [b, c, EOT]]
    pieces = sample.stream_text(steps_of(rows), [a], 3)
    assert "".join(pieces) == (
        "--- sample 1 of 3\naa\n--- sample 2 of 3\na\n--- sample 3 of 3\na b c\n")


def test_no_more_tokens_are_generated_than_are_shown():
    a, b, c = encode("a b c").tolist()
    taken = []

    def steps():
        for step in steps_of([[a, EOT, c, c, c], [b, c, EOT, a, a]]):
            taken.append(step)
            yield step

    list(sample.stream_text(steps(), [], 2))
    assert len(taken) == 3


def test_text_reaches_a_pipe_as_its_tokens_come(path, after_each_block, monkeypatch, tmp_path):
    """Not when a buffer of some kilobytes is full."""
    sizes = []
    flags = ["--num_samples", "1", "--max_new_tokens", "12", "--prompt", "The", "--device", "cpu"]
    with open(tmp_path / "shown", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        after_each_block(lambda output: sizes.append(os.fstat(file.fileno()).st_size))
        sample.main(["--model", path, "--temperature", "0", *flags])

    assert len(sizes) == 5 + 12         # five to compare the cache with a whole forward
    assert sizes[0] == len("--- sample 1 of 1\nThe")
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 4


def close_the_pipe():
    """stdout becomes a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = open(writer, "w", encoding="utf-8")


def test_a_closed_pipe_ends_it_quietly(path):
    flags = ["--model", path, "--max_new_tokens", 1_000_000]
    result = script("sample.py", *flags, before=[close_the_pipe])
    assert result.stderr == ""


# ----------------------------------------------------------------------- --interactive

def put_on_stdin(monkeypatch, content, terminal=False):
    file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    file.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", file)
    return file


INTERACTIVE = ["--interactive", "--max_new_tokens", 4, "--temperature", 0]


def test_each_line_of_a_pipe_is_continued(path, shown, monkeypatch):
    put_on_stdin(monkeypatch, "The\n\nnaïve\r\nno newline".encode() + b"\xff")
    found = shown(*INTERACTIVE)
    prompts = ["The", "", "naïve", "no newline\ufffd"]
    assert found == "".join(f"{likeliest(path, prompt, 4)}\n" for prompt in prompts)


def test_the_same_prompt_twice_has_two_continuations(shown, monkeypatch):
    put_on_stdin(monkeypatch, b"The\nThe\n")
    first, second = shown("--interactive", "--max_new_tokens", 4).splitlines()
    assert first != second


def test_several_samples_of_a_line_have_titles_and_the_prompt(path, shown, monkeypatch):
    put_on_stdin(monkeypatch, b"The")
    text = "The" + likeliest(path, "The", 4)
    assert shown(*INTERACTIVE, "--num_samples", 2) == (
        f"--- sample 1 of 2\n{text}\n--- sample 2 of 2\n{text}\n")


@pytest.fixture
def ctrl_c_raises():
    """As in a terminal; where the tests are a shell's `&`, the signal is ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_ctrl_c_ends_a_continuation_and_at_the_prompt_the_program(
        path, after_each_block, ctrl_c_raises, monkeypatch, capsys):
    file = put_on_stdin(monkeypatch, b"The\nThe\n", terminal=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    readline = file.readline
    blocks = []

    def line_or_ctrl_c(*size):
        line = readline(*size)
        if not line:
            signal.raise_signal(signal.SIGINT)
        return line

    def ctrl_c_at_every_third_token(output):
        blocks.append(output)
        if len(blocks) % 3 == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LanguageModel, "checked_room", 10**6)        # the cache has been compared
    monkeypatch.setattr(file, "readline", line_or_ctrl_c)
    after_each_block(ctrl_c_at_every_third_token)
    with pytest.raises(KeyboardInterrupt):
        sample.main(["--model", path, "--interactive", "--device", "cpu", "--temperature", "0"])

    continued = f"> {likeliest(path, 'The', 2)}\n"
    assert capsys.readouterr().out == continued * 2 + "> \n"


def test_ctrl_c_ends_a_sample_of_a_prompt(path, after_each_block, ctrl_c_raises):
    after_each_block(lambda output: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        sample.main(["--model", path, "--prompt", "The", "--device", "cpu"])
