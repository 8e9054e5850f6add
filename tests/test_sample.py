"""sample.py: the stream of text, flags, and the command on pipes and terminals."""
import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sample
from helpers import ENV, HANG, ROOT, refused
from model import load_model
from peers import make_model, own_checkpoint, save
from runtime.tokenizer import EOT, encode, tokenizer

ENV = {**ENV, "PYTHONUTF8": "1"}
DEFAULTS = dict(top_k=50, top_p=1.0, temperature=1.0, repetition_penalty=1.0, seed=42)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    model = make_model(block_size=16, vocab_size=50304, n_layer=1)
    return str(save(tmp_path_factory.mktemp("sample") / "model.pt", own_checkpoint(model)))


@pytest.fixture
def shown(path, capsys):
    """What sample.py with these flags prints on stdout; nothing on stderr."""
    def shown(*flags):
        sample.main(["--model", path, "--device", "cpu", *map(str, flags)])
        out, err = capsys.readouterr()
        assert err == ""
        return out
    return shown


def plain_output(prompt, rows):
    """What the command prints if it prints only at its end."""
    out = ""
    for i, row in enumerate(rows):
        row = row[:row.index(EOT)] if EOT in row else row
        out += f"--- sample {i + 1} of {len(rows)}\n{tokenizer().decode(prompt + row)}\n"
    return out


def generated(path, text, n, length, seed=42, **how):
    """What `generate` gives for the prompt, as the command prints it."""
    prompt = encode(text).tolist()
    start, generator = torch.tensor([prompt or [EOT]] * n), torch.Generator().manual_seed(seed)
    rows = load_model(path).generate(start, length, generator=generator, **how)[:, start.size(1):]
    return plain_output(prompt, rows.tolist())


@pytest.mark.parametrize("text", ["Hello, I'm — a model,", "", "a<|endoftext|>b", " a" * 16])
def test_four_samples_of_a_prompt_are_those_of_generate_with_seed_42(text, path, shown):
    assert shown("--prompt", text, "--max_new_tokens", 20) == generated(path, text, 4, 20)


@pytest.mark.parametrize("flags", [
    {}, {"top_k": 2}, {"top_p": 0.1}, {"temperature": 0.1}, {"temperature": 0.1, "repetition_penalty": 9.0},
    {"top_k": 9, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.2}], ids=str)
def test_each_flag_reaches_generation(flags, path, shown):
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    text = generated(path, "The end", 2, 12, 5, **flags)
    for but in flags or ["seed"]:               # each of them matters
        assert text != generated(path, "The end", 2, 12, **{"seed": 5} | flags | {but: DEFAULTS[but]})
    assert text == shown("--prompt", "The end", "--num_samples", 2, "--max_new_tokens", 12, "--seed", 5,
                         *given)
    with torch.autocast("cpu", torch.bfloat16):
        text = generated(path, "The end", 1, 12, **flags)
    assert text == shown("--prompt", "The end", "--num_samples", 1, "--max_new_tokens", 12, "--dtype",
                         "bfloat16", *given)


def steps_of(rows):
    """The rows (n, T) as generation yields them: T tensors (n, 1)."""
    return torch.tensor(rows).T[:, :, None]


BROKEN = [token for token in range(50256) if "\ufffd" in tokenizer().decode([token])]
TOKEN = st.one_of(st.sampled_from(BROKEN), st.sampled_from(encode("a 日本語 🙂🙃 é").tolist()),
                  st.integers(0, 50255), st.just(EOT))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.sampled_from(["", "a", "日本語 "]))
def test_the_pieces_are_together_what_would_be_printed_at_once(data, n, length, prompt):
    rows = data.draw(st.lists(st.lists(TOKEN, min_size=length, max_size=length), min_size=n, max_size=n))
    prompt = encode(prompt).tolist()
    assert "".join(sample.stream_text(steps_of(rows), prompt, n)) == plain_output(prompt, rows)


def test_each_token_is_shown_when_it_comes_but_no_part_of_a_character():
    row, shown, taken = encode("naïve 日本語 🙂🙃!").tolist(), "", 0
    assert any(token in BROKEN for token in row)

    def steps():
        nonlocal taken
        for taken, step in enumerate(steps_of([row]), 1):
            # all that is complete of the tokens before this one has been shown
            assert shown == tokenizer().decode_bytes(row[:taken - 1]).decode(errors="ignore")
            yield step
    for piece in sample.stream_text(steps(), [], 1, titles=False):
        shown += piece
    assert shown == tokenizer().decode(row) + "\n" and taken == len(row)


def test_samples_come_one_after_the_other_and_nothing_is_generated_after_the_last():
    a, b, c = encode("a b c").tolist()
    taken, found = 0, {}

    def steps():
        nonlocal taken
        for step in steps_of([[a, EOT, c, c, c], [EOT, b, b, b, b], [b, c, a, EOT, a]]):
            taken += 1
            yield step
    for piece in sample.stream_text(steps(), [a], 3):
        found[taken] = found.get(taken, "") + piece
    assert found == {0: "--- sample 1 of 3\na", 1: "a", 2: "\n--- sample 2 of 3\na\n--- sample 3 of 3\na b c",
                     3: "a", 4: "\n"}


def test_a_prompt_from_a_file_and_one_longer_than_the_context(path, shown, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve\nwords\n".encode())
    text = shown("--prompt_file", tmp_path / "a.txt", "--max_new_tokens", 3)
    assert text == shown("--prompt", "naïve\nwords\n", "--max_new_tokens", 3)
    sample.main(["--model", path, "--prompt", " a" * 17, "--max_new_tokens", "3"])
    out, err = capsys.readouterr()
    assert out.startswith("--- sample 1 of 4\n" + " a" * 17) and "17" in err and err.count("\n") == 1


def test_interactive_from_a_pipe(path, shown, monkeypatch):
    def continued(content, *flags):
        monkeypatch.setattr(sys, "stdin", content and io.TextIOWrapper(io.BytesIO(content)))
        return shown("--interactive", "--max_new_tokens", 4, "--temperature", 0, *flags)
    rows = [load_model(path).generate(torch.tensor([encode(text).tolist() or [EOT]]), 4, temperature=0)
            for text in ("The", "", "naïve", "no newline\ufffd")]
    assert continued("The\n\nnaïve\r\nno newline".encode() + b"\xff") == "".join(
        tokenizer().decode(row[0, -4:].tolist()) + "\n" for row in rows)
    assert continued(b"The", "--num_samples", 2) == plain_output([], [rows[0][0].tolist()] * 2)
    refused(lambda: continued(None), "--interactive")


@pytest.mark.skipif(sys.platform != "linux", reason="of its pseudo-terminals")
def test_ctrl_c_ends_a_continuation_and_at_the_prompt_the_program(path):
    import pty
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)        # what runs the tests may ignore it
        argv = [sys.executable, str(ROOT / "sample.py"), "--model", path, "--interactive", "--device", "cpu",
                "--temperature", "0", "--max_new_tokens", "1000000"]
        os.execve(sys.executable, argv, {**ENV, "TERM": "dumb"})
    (watchdog := threading.Timer(HANG, os.kill, (pid, signal.SIGKILL))).start()
    shown = b""

    def until(pattern):
        nonlocal shown
        while not (found := re.search(pattern, shown, re.S)):
            shown += os.read(terminal, 1000)
        shown = shown[found.end():]
    until(b"> ")
    for _ in range(2):                          # the second Ctrl-C is as the first
        os.write(terminal, b"The\n")
        until(b"The\r\n.{9}")                   # the text streams: it has far to go
        os.write(terminal, b"\x03")
        until(b"\r\n> ")
    with contextlib.suppress(OSError):          # how Linux tells that the other end is closed
        while os.write(terminal, b"\x03"):                  # again: Python misses one just before it waits
            while select.select([terminal], [], [], 10)[0]:
                shown += os.read(terminal, 1000)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    watchdog.cancel()
    os.close(terminal)
    assert b"sample.py: " in shown and b"Traceback" not in shown


def test_a_closed_pipe_ends_it_quietly(path):
    argv = [sys.executable, ROOT / "sample.py", "--model", path, "--num_samples", "1", "--max_new_tokens",
            "1000000"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    assert process.stdout.readline() == b"--- sample 1 of 1\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=HANG) == 1


@pytest.mark.parametrize("flags", [
    "--num_samples 0", "--num_samples 2.5", "--num_samples 100000000000000", "--max_new_tokens -3",
    "--max_new_tokens many", "--temperature -1", "--temperature nan", "--temperature inf", "--top_k -1",
    "--top_p 0", "--top_p 1.01", "--top_p nan", "--repetition_penalty 0.99", "--repetition_penalty nan",
    "--repetition_penalty inf", "--seed x", "--seed -1", f"--seed {2**64}", "--bogus", "--device tpu",
    "--device cpu:x", "--device ", "--dtype int8", "--prompt_file nowhere.txt", "--prompt_file ",
    "--prompt_file /dev/zero", "--prompt_file latin.txt", "--prompt a --interactive",
    "--prompt_file sample.py --prompt ", "--interactive --prompt_file sample.py"])
def test_mistakes_are_found_before_the_model_is_read(flags, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    monkeypatch.setattr("model.load_model", lambda path: pytest.fail("the model was read"))
    refused(lambda: sample.main(flags.split(" ")), flags.split(" ")[0])


def test_another_vocabulary_is_refused(tmp_path, capsys):
    path = save(tmp_path / "a.pt", own_checkpoint(make_model()))
    refused(lambda: sample.main(["--model", str(path)]), "a.pt")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("module", ["sample", "hellaswag"])
def test_an_import_leaves_the_slow_libraries_alone(module):
    code = (f"import {module}, sys; "
            "assert not {'torch', 'transformers', 'datasets', 'huggingface_hub'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=HANG)
