"""sample.py: the stream of text, flags, prompts on pipes and terminals."""
import io
import os
import re
import signal
import sys

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import sample
from helpers import refused, script
from recipes import load_model
from peers import make_model, own_checkpoint, save
from runtime.tokenizer import EOT, encode, tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = make_model(block_size=16, vocab_size=50304, n_layer=1)
    return str(save(tmp_path_factory.mktemp("sample") / "model.pt", own_checkpoint(model)))


@pytest.fixture
def shown(path, capsys):
    """What sample.py with these flags prints, 20 tokens a sample; nothing on stderr."""
    def shown(*flags):
        sample.main(["--model", path, "--device", "cpu", "--max_new_tokens", "20", *map(str, flags)])
        out, err = capsys.readouterr()
        assert err == ""
        return out
    return shown


def plain_output(prompt, rows):
    """What the command prints if it prints only at its end."""
    rows = [row[:row.index(EOT)] if EOT in row else row for row in rows]
    return "".join(f"--- sample {i} of {len(rows)}\n{tokenizer().decode(prompt + row)}\n"
                   for i, row in enumerate(rows, 1))


def generated(path, text, num_samples=4, max_new_tokens=20, seed=42, **how):
    """What `generate` gives for the prompt, as the command prints it."""
    prompt = encode(text).tolist()
    start, generator = torch.tensor([prompt or [EOT]] * num_samples), torch.Generator().manual_seed(seed)
    rows = load_model(path).generate(start, max_new_tokens, generator=generator, **how)[:, start.size(1):]
    return plain_output(prompt, rows.tolist())


@pytest.mark.parametrize(("text", "how"), [
    ("Hello, I'm — a model,", {}), ("", {}), ("a<|endoftext|>b", {}), (" a" * 16, {"top_k": 2}),
    ("-- well-known", {"top_k": 9, "temperature": 0.7, "seed": 5, "num_samples": 2, "max_new_tokens": 12})])
def test_samples_are_those_of_generate_and_each_flag_reaches_it(text, how, path, shown):
    flags = ["--prompt", text, *(word for name in how for word in (f"--{name}", how[name]))]
    assert shown(*flags) == generated(path, text, **how)
    for but in how:                             # each of them matters
        assert shown(*flags) != generated(path, text, **{name: how[name] for name in how if name != but})
    with torch.autocast("cpu", torch.bfloat16):
        assert shown(*flags, "--dtype", "bfloat16") == generated(path, text, **how)


def test_the_defaults_are_four_samples_of_200_tokens_without_a_prompt(path, capsys):
    tokens = []
    hook = register_module_forward_hook(lambda module, inputs, output: tokens.append(output)
                                        if type(module).__name__ == "Block" else None)
    try:
        sample.main(["--model", path, "--device", "cpu"])
    finally:
        hook.remove()
    assert len(tokens) == 200 and all(len(x) == 4 for x in tokens)
    shown, heading = capsys.readouterr().out, re.compile(r"^--- sample \d of 4\n", re.M)
    begins = generated(path, "", 4, 20, 42, temperature=1.0, top_k=50)
    pairs = list(zip(heading.split(shown), heading.split(begins), strict=True))
    assert len(pairs) == 5
    for one, beginning in pairs:
        assert one.startswith(beginning.removesuffix("\n").rstrip("\ufffd"))


def test_top_k_0_samples_from_all_tokens_and_1_is_greedy(path, shown):
    every = shown("--top_k", 0, "--temperature", 50)
    assert every == generated(path, "", top_k=0, temperature=50) == generated(path, "", top_k=None,
                                                                              temperature=50)
    assert every != shown("--top_k", 50, "--temperature", 50)
    assert shown("--top_k", 1) == shown("--temperature", 0)


def steps_of(rows):
    """The rows (n, T) as generation yields them: T tensors (n, 1)."""
    return torch.tensor(rows).T[:, :, None]


BROKEN = [token for token in range(50256) if "\ufffd" in tokenizer().decode([token])]
def test_each_token_is_shown_when_it_comes_but_no_part_of_a_character():
    row, shown = encode("naïve 日本語 🙂🙃!").tolist(), ""
    assert any(token in BROKEN for token in row)

    def steps():
        for taken, step in enumerate(steps_of([row])):
            # all that is complete of the tokens before this one has been shown
            assert shown == tokenizer().decode_bytes(row[:taken]).decode(errors="ignore")
            yield step
    for piece in sample.stream_text(steps(), [], 1, titles=False):
        shown += piece
    assert shown == tokenizer().decode(row) + "\n"


def test_samples_come_one_after_the_other_and_nothing_is_generated_after_the_last():
    a, b, c = encode("a b c").tolist()
    taken, found = [], {}
    steps = (taken.append(step) or step for step in steps_of([[a, EOT, c, c, c], [EOT, b, b, b, b],
                                                              [b, c, a, EOT, a]]))
    for piece in sample.stream_text(steps, [a], 3):
        found[len(taken)] = found.get(len(taken), "") + piece
    assert found == {0: "--- sample 1 of 3\na", 1: "a", 2: "\n--- sample 2 of 3\na\n--- sample 3 of 3\na b c",
                     3: "a", 4: "\n"}


def test_of_a_prompt_longer_than_the_context_the_end_is_used(path, capsys):
    sample.main(["--model", path, "--prompt", " a" * 16 + " To be", "--device", "cpu", "--temperature", "0",
                 "--max_new_tokens", "3"])
    out, err = capsys.readouterr()
    assert "18" in err and err.count("\n") == 1
    assert out.replace("\n a a", "\n") == generated(path, " a" * 14 + " To be", 4, 3, temperature=0)


def stdin(monkeypatch, content, terminal=False):
    file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    file.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", file)
    return file


def greedy(path, text, n):
    row = load_model(path).generate(torch.tensor([encode(text).tolist() or [EOT]]), n, temperature=0)[0]
    return tokenizer().decode(row[-n:].tolist())


def test_interactive_from_a_pipe(path, shown, monkeypatch):
    def continued(content, *flags):
        stdin(monkeypatch, content)
        return shown("--interactive", "--max_new_tokens", 4, "--temperature", 0, *flags)
    assert continued("The\n\nnaïve\r\nno newline".encode() + b"\xff") == "".join(
        f"{greedy(path, text, 4)}\n" for text in ("The", "", "naïve", "no newline\ufffd"))
    # the second prompt's numbers are not those of the first
    first, second = continued(b"The\nThe\n", "--temperature", 1).splitlines()
    assert first != second
    assert continued(b"The", "--num_samples", 2) == "".join(
        f"--- sample {i} of 2\nThe{greedy(path, 'The', 4)}\n" for i in (1, 2))
    monkeypatch.setattr(sys, "stdin", None)
    refused(lambda: sample.main(["--model", path, "--interactive"]), "--interactive")


def test_ctrl_c_ends_a_continuation_and_at_the_prompt_the_program(path, monkeypatch, capsys):
    file, blocks = stdin(monkeypatch, b"The\nThe\n", terminal=True), []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    handler, readline = signal.signal(signal.SIGINT, signal.default_int_handler), file.readline
    file.readline = lambda *size: readline(*size) or signal.raise_signal(signal.SIGINT)

    def ctrl_c(module, inputs, output):
        if type(module).__name__ == "Block" and (blocks.append(module) or len(blocks) % 3 == 0):
            signal.raise_signal(signal.SIGINT)
    hook = register_module_forward_hook(ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            sample.main(["--model", path, "--interactive", "--device", "cpu", "--temperature", "0"])
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().out == f"> {greedy(path, 'The', 2)}\n" * 2 + "> \n"


def test_text_reaches_a_pipe_as_its_tokens_come(path, monkeypatch, tmp_path):
    """Not when a buffer of some kilobytes is full."""
    sizes = []
    with open(tmp_path / "shown", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        hook = register_module_forward_hook(lambda module, inputs, output: sizes.append(
            os.fstat(file.fileno()).st_size) if type(module).__name__ == "Block" else None)
        try:
            sample.main(["--model", path, "--device", "cpu", "--num_samples", "1", "--max_new_tokens", "12",
                         "--prompt", "The", "--temperature", "0"])
        finally:
            hook.remove()
    heading, after = len("--- sample 1 of 1\nThe"), greedy(path, "The", 12).encode()
    assert len(sizes) == 12 and sizes[0] == heading and sizes[-1] > heading + len(after) / 2
    assert sizes == sorted(sizes) and len({*sizes}) > 4


def close_the_pipe():
    """stdout's, whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = open(writer, "w", encoding="utf-8")


def test_a_closed_pipe_ends_it_quietly(path):
    done = script("sample.py", "--model", path, "--max_new_tokens", 1_000_000, before=[close_the_pipe])
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("flags", [
    "--num_samples 0", "--num_samples 2.5", "--num_samples 100000000000000", "--max_new_tokens -3",
    "--max_new_tokens many", "--temperature -1", "--temperature nan", "--temperature inf", "--top_k -1",
    "--seed -1", f"--seed {2**64}", "--bogus", "--device tpu", "--device ", "--dtype int8",
    "--interactive --prompt a"])
def test_mistakes_are_found_before_the_model_is_read(flags, monkeypatch):
    monkeypatch.setattr("recipes.load_model", lambda path: pytest.fail("the model was read"))
    refused(lambda: sample.main(flags.split(" ")), flags.split(" ")[0])


def test_another_vocabulary_is_refused(tmp_path, capsys):
    path = save(tmp_path / "a.pt", own_checkpoint(make_model()))
    refused(lambda: sample.main(["--model", str(path)]), "a.pt")
    assert capsys.readouterr().out == ""
