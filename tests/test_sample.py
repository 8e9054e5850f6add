"""sample.py as a command."""
import contextlib
import io
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.generation
import sample
from helpers import HANG, logged, run, script
from model import GPT, GPTConfig, load_model
from runtime.cli import UserError
from runtime.device import choose_dtype, make_autocast
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from test_model import PEERS, make_model, nanogpt_checkpoint, save, write_peer

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def command(*flags):
    return script("sample.py", *flags)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "model.pt"
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=50304, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    torch.save({"model": model.state_dict(), "model_config": vars(model.config), "recipe": "gpt2"}, path)
    return path


def samples(result, n):
    assert (result.returncode, result.stderr) == (0, "")
    parts = re.split(r"^--- sample (\d+) of \d+\n", result.stdout, flags=re.M)
    assert parts[0] == "" and parts[1::2] == [str(i + 1) for i in range(n)]
    return [part.removesuffix("\n") for part in parts[2::2]]


def test_it_prints_the_samples_asked_for_each_after_the_prompt_and_the_seed_decides_them(model_path):
    flags = ["--model", model_path, "--prompt", "Hello, I'm — a model,", "--num_samples", 3,
             "--max_new_tokens", 20]
    first, again, other = command(*flags), command(*flags, "--seed", 42), command(*flags, "--seed", 43)
    texts = samples(first, 3)
    assert all(text.startswith("Hello, I'm — a model,") and len(text) > 40 for text in texts)
    assert len(set(texts)) == 3
    assert first.stdout == again.stdout != other.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of two steps that diverges: its --out, flags for data, validation losses by step."""
    folder = tmp_path_factory.mktemp("run")
    tokens = encode((ROOT / "input.txt").read_text()[:20_000])
    for name, part in (("val", tokens[:600]), ("train", tokens[600:])):
        write_shard(folder / f"text_{name}_000000.npy", part)
    flags = ["--data", folder, "--total_batch_size", 256, "--val_every", 1, "--val_tokens", 512, "--dtype",
             "float32", "--sample_every", 0, "--hellaswag_every", 0, "--max_lr", 1, "--min_lr", 1,
             "--warmup_steps", 0]
    run(*flags, "--n_layer", 1, "--n_head", 2, "--n_embd", 16, "--block_size", 32, "--max_steps", 2,
        "--checkpoint_every", 1, "--out", folder / "log")
    return folder / "log", flags, logged(folder / "log", "val")


def test_every_command_takes_a_runs_folder_and_its_best(trained, tmp_path, capsys):
    out, _, losses = trained            # --init: test_finetuning_... in test_train.py
    best = min((1, 2), key=losses.get)
    assert best == 1, "the newest checkpoint must not be the best here"
    (tmp_path / "a.jsonl").write_text('{"ctx": "A cat", "endings": ["sat", "is", "was", "no"], "label": 0}')
    files, short = {step: out / f"checkpoint_{step:06d}.pt" for step in (1, 2)}, ["--max_new_tokens", "8"]
    for source, step in ((out, 2), (out / "best", 1)):
        sample.main(["--model", str(files[step]), *short])
        expected = capsys.readouterr().out
        sample.main(["--model", str(source), *short])
        assert capsys.readouterr().out == expected
    source = out / "best"
    shown = run(*trained[1], "--out", tmp_path / "log", "--resume", source, "--dry_run").stdout
    assert f"resuming from {files[1]} at step 1 of 2" in shown
    for arguments in (["model.py", "export", source, tmp_path / "exported"],
                      ["hellaswag.py", "--model", source, "--data", tmp_path / "a.jsonl"]):
        result = script(*arguments)
        assert result.returncode == 0, result.stderr
    wte = load_model(tmp_path / "exported").transformer.wte.weight
    assert torch.equal(wte, load_model(files[1]).transformer.wte.weight[:50257])


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_the_lines_of_the_docs_read_a_checkpoint_with_torch_alone(recipe, trained, tmp_path):
    run(*trained[1], "--n_layer", 2, "--n_head", 1, "--n_embd", 16, "--block_size", 32, "--recipe", recipe,
        "--dtype", "bfloat16", "--max_steps", 3, "--val_every", 0, "--checkpoint_every", 3, "--out",
        tmp_path / "log")
    (tmp_path / "log/checkpoint_000003.pt").rename(tmp_path / "log/checkpoint_000250.pt")
    text = (ROOT / "docs/formats.md").read_text().split("## Checkpoints")[1]
    lines = re.search(r"```python\n(.*?)```", text, re.S)[1]
    read = subprocess.run([sys.executable, "-I", "-c", lines + """
said = {}
for name, state in moments.items():
    weight = weights[name]
    assert weight.dtype == torch.float32 and weight.device.type == "cpu", name
    for key, tensor in state.items():
        assert tensor.dtype == torch.float32 and tensor.shape == (() if key == "step" else weight.shape), name
    said.setdefault(" ".join(sorted(state)), []).append(name)
assert all(weight.dtype == torch.float32 for weight in weights.values())
for name in weights.keys() - moments.keys():
    assert weights[name].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    said[name] = ["tied"]
print(*(f"{keys}: {' '.join(names)}" for keys, names in said.items()), sep="\\n")
"""], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert read.returncode == 0, read.stderr
    said = dict(line.split(": ") for line in read.stdout.splitlines())
    assert ("lm_head.weight" in said) == (recipe != "speedrun")
    muon = {"momentum_buffer"} if recipe != "gpt2" else set()
    assert said.keys() - {"lm_head.weight"} == {"exp_avg exp_avg_sq step"} | muon
    adam = said["exp_avg exp_avg_sq step"]
    assert ("transformer.h.0.attn.c_attn.weight" in adam) == (recipe == "gpt2")


def test_without_a_prompt_a_new_document_begins(model_path, capsys):
    sample.main(["--model", str(model_path), "--num_samples", "1", "--max_new_tokens", "5",
                 "--temperature", "0"])
    row = load_model(model_path).generate(torch.tensor([[EOT]]), 5, temperature=0)[0, 1:].tolist()
    assert capsys.readouterr().out == f"--- sample 1 of 1\n{tokenizer().decode(row)}\n"


@pytest.mark.parametrize("kind", PEERS)
def test_every_kind_of_checkpoint_is_sampled(kind, tmp_path, capsys):
    source, model = write_peer(kind, tmp_path)
    sample.main(["--model", str(source), "--prompt", "The", "--num_samples", "1", "--max_new_tokens", "8",
                 "--temperature", "0"])
    row = model.generate(torch.tensor([encode("The").tolist()]), 8, temperature=0)[0].tolist()
    assert EOT not in row and capsys.readouterr().out == f"--- sample 1 of 1\n{tokenizer().decode(row)}\n"


def test_a_model_of_another_tokenizer_is_refused(tmp_path, capsys):
    characters = save(tmp_path / "ckpt.pt", nanogpt_checkpoint(make_model().state_dict()))
    with pytest.raises(UserError, match="ckpt.pt has a vocabulary of 96"):
        sample.main(["--model", str(characters)])
    assert capsys.readouterr().out == ""


def test_a_sample_ends_where_its_document_does_and_flags_reach_generation(model_path, monkeypatch, capsys):
    prompt, asked = encode("The end").tolist(), {}

    def generate_tokens(model, idx, max_new_tokens, temperature, top_k, generator, top_p, penalty):
        asked.update(idx=idx.tolist(), seed=generator.initial_seed(), dtype=torch.get_autocast_dtype("cpu"),
                     numbers=(max_new_tokens, temperature, top_k, top_p, penalty))
        yield from torch.tensor([[[11], [EOT]], [[EOT], [12]], [[12], [EOT]]])
    monkeypatch.setattr(runtime.generation, "generate_tokens", generate_tokens)
    sample.main(["--model", str(model_path), "--prompt", "The end", "--num_samples", "2", "--top_p", "0.8",
                 "--max_new_tokens", "3", "--dtype", "float16", "--repetition_penalty", "1.2",
                 "--temperature", "0.7", "--top_k", "9", "--seed", "5", "--device", "cpu"])
    assert asked == {"idx": [prompt, prompt], "seed": 5, "dtype": torch.float16,
                     "numbers": (3, 0.7, 9, 0.8, 1.2)}
    assert capsys.readouterr().out == "--- sample 1 of 2\nThe end,\n--- sample 2 of 2\nThe end\n"


def plain_output(prompt, rows):
    """What the command prints if it prints only at its end."""
    out = ""
    for i, row in enumerate(rows):
        row = row[:row.index(EOT)] if EOT in row else row
        out += f"--- sample {i + 1} of {len(rows)}\n{tokenizer().decode(prompt + row)}\n"
    return out


def steps_of(rows):
    """The rows (n, T) as generation yields them: T tensors (n, 1)."""
    return torch.tensor(rows).T[:, :, None]


BROKEN = [token for token in range(50256) if "\ufffd" in tokenizer().decode([token])]
TOKEN = st.one_of(st.sampled_from(BROKEN), st.sampled_from(encode("a 日本語 🙂🙃 é").tolist()),
                  st.integers(0, 50255), st.just(EOT))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.sampled_from(["", "a", "日本語 "]))
def test_the_stream_is_in_the_end_what_would_be_printed_at_once(data, n, length, prompt):
    rows = data.draw(st.lists(st.lists(TOKEN, min_size=length, max_size=length), min_size=n, max_size=n))
    prompt = encode(prompt).tolist()
    assert "".join(sample.stream_text(steps_of(rows), prompt, n)) == plain_output(prompt, rows)


def test_each_token_is_shown_when_it_comes_but_no_part_of_a_character():
    text = "naïve 日本語 🙂🙃!"
    row, shown = encode(text).tolist(), ""
    assert any(token in BROKEN for token in row)
    pieces = sample.stream_text(steps_of([row]), [], 1)
    for i in range(len(row)):
        shown += next(pieces)
        complete = tokenizer().decode_bytes(row[:i + 1]).decode(errors="ignore")
        assert shown == f"--- sample 1 of 1\n{complete}"
    assert "".join(pieces) == "\n"


def test_a_later_sample_is_shown_from_the_end_of_those_before_it_and_nothing_is_generated_after_the_last():
    a, b, c = encode("a b c").tolist()
    taken = []

    def steps():
        for step in steps_of([[a, EOT, c, c, c], [EOT, b, b, b, b], [b, c, a, EOT, a]]):
            taken.append(step)
            yield step
    pieces = [(piece, len(taken)) for piece in sample.stream_text(steps(), [a], 3)]
    assert [(piece, n) for piece, n in pieces if piece] == [
        ("--- sample 1 of 3\naa", 1), ("\n", 2), ("--- sample 2 of 3\na\n", 2),
        ("--- sample 3 of 3\na b c", 2), ("a", 3), ("\n", 4)]
    assert len(taken) == 4


def test_text_of_the_end_token_in_a_prompt_is_ordinary_text(model_path, capsys):
    sample.main(["--model", str(model_path), "--prompt", "a<|endoftext|>b", "--num_samples", "1",
                 "--max_new_tokens", "2"])
    assert capsys.readouterr().out.startswith("--- sample 1 of 1\na<|endoftext|>b")


@pytest.mark.parametrize("flags", [["--temperature", "1e-300"], ["--top_k", "0"], ["--top_k", "1_000_000"],
                                   ["--seed", str(2**63 - 1)], ["--prompt", "a long prompt " * 30]])
def test_unusual_but_sensible_numbers_work(flags, model_path, capsys):
    sample.main(["--model", str(model_path), "--max_new_tokens", "3", *flags])
    assert capsys.readouterr().out.count("--- sample") == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_the_dtype_is_that_of_autocast(dtype, model_path, capsys):
    sample.main(["--model", str(model_path), "--prompt", "The", "--max_new_tokens", "12", "--device", "cpu",
                 "--dtype", dtype, "--num_samples", "2", "--top_p", "0.9"])
    generator, prompt = torch.Generator().manual_seed(42), encode("The").tolist()
    with make_autocast("cpu", choose_dtype(dtype, "cpu")):
        rows = load_model(model_path).generate(torch.tensor([prompt] * 2), 12, generator=generator, top_p=0.9)
    assert capsys.readouterr().out == plain_output(prompt, rows[:, len(prompt):].tolist())


# sitecustomize.py: progress after a twentieth of a second; the command waits for the files load, first
# and next before it has loaded the model, generated its first token and its third
HELD = """
import os, sys, time
sys.path.insert(0, {root!r})
import model, runtime.generation, runtime.progress
del sys.path[0]
runtime.progress.QUIET = 0.05
load_model, sample_token, calls = model.load_model, runtime.generation.sample_token, []

def wait_for(name):
    while not os.path.exists(os.path.join({folder!r}, name)):
        time.sleep(0.01)

def slow_load(source):
    wait_for("load")
    return load_model(source)

def slow_sample(*args):
    calls.append(0)
    if len(calls) in (1, 3):
        wait_for("first" if len(calls) == 1 else "next")
    return sample_token(*args)

model.load_model, runtime.generation.sample_token = slow_load, slow_sample
"""


def test_slow_work_shows_progress_and_each_token_comes_at_once(model_path, tmp_path):
    flags = ["--model", model_path, "--num_samples", 1, "--max_new_tokens", 6, "--prompt", "The"]
    (whole,) = samples(command(*flags), 1)
    (tmp_path / "sitecustomize.py").write_text(HELD.format(root=str(ROOT), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", *map(str, flags)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE,
                               env={**ENV, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": ""})
    watchdog = threading.Timer(HANG, process.kill)
    watchdog.start()
    for name, what in (("load", f"loading {model_path}: "), ("first", "generating the first token: ")):
        line = ""
        while not line.startswith(what):
            line = process.stderr.readline().decode()
            assert line, "the command ended"
        (tmp_path / name).touch()
    out = b""
    while len(out.decode(errors="ignore")) <= len("--- sample 1 of 1\nThe"):
        assert (more := os.read(process.stdout.fileno(), 1000)), "the command ended"
        out += more
    (tmp_path / "next").touch()                 # until here the third token is not generated
    rest, _ = process.communicate()
    watchdog.cancel()
    assert process.returncode == 0 and len(rest) > 1
    assert (out + rest).decode() == f"--- sample 1 of 1\n{whole}\n"


def test_a_prompt_comes_from_a_file_as_it_is_and_a_long_one_is_said_to_be_cut(model_path, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve\nwords\n".encode())
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    flags = ["--model", str(model_path), "--num_samples", "1", "--max_new_tokens", "3"]
    sample.main([*flags, "--prompt_file", str(tmp_path / "a.txt")])
    from_file = capsys.readouterr()
    sample.main([*flags, "--prompt", "naïve\nwords\n"])
    assert from_file == capsys.readouterr() and from_file.err == ""
    with pytest.raises(UserError, match="latin.txt cannot be read .* give a text file in UTF-8"):
        sample.main([*flags, "--prompt_file", str(tmp_path / "latin.txt")])
    for n, said in ((16, ""), (17, "the prompt has 17 tokens, and the model's context 16: it is cut, and the "
                                   "last 16 are used\n")):
        sample.main([*flags, "--prompt", " a" * n])
        shown = capsys.readouterr()
        assert shown.err == said and shown.out.startswith("--- sample 1 of 1\n" + " a" * n)


def stdin_of(content, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_each_line_of_stdin_is_continued_and_nothing_else_is_printed(model_path, monkeypatch, capsys):
    flags = ["--model", str(model_path), "--interactive", "--max_new_tokens", "4", "--temperature", "0"]
    stdin_of("The\n\nnaïve\r\nno newline".encode() + b"\xff", monkeypatch)
    sample.main(flags)
    rows = [load_model(model_path).generate(torch.tensor([encode(text).tolist() or [EOT]]), 4, temperature=0)
            for text in ("The", "", "naïve", "no newline\ufffd")]
    assert capsys.readouterr().out == "".join(tokenizer().decode(row[0, -4:].tolist()) + "\n" for row in rows)
    stdin_of(b"The", monkeypatch)
    sample.main([*flags, "--num_samples", "2"])
    text = tokenizer().decode(rows[0][0].tolist())
    assert capsys.readouterr().out == f"--- sample 1 of 2\n{text}\n--- sample 2 of 2\n{text}\n"
    stdin_of(b"a" * sample.LONGEST + b"\n", monkeypatch)
    with pytest.raises(UserError, match="a line on stdin has 1,048,576 characters or more"):
        sample.main(flags)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin, which is closed"):
        sample.main(flags)


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals")
@pytest.mark.parametrize("end, code", [(b"\x03", 130), (b"\x04", 0)], ids=["Ctrl-C", "Ctrl-D"])
def test_ctrl_c_ends_a_continuation_and_at_the_prompt_the_program(end, code, model_path):
    import pty
    # greedy text repeats itself, and has neither a line break nor what a prompt looks like
    flags = ["--model", str(model_path), "--temperature", "0", "--max_new_tokens"]
    text = command(*flags, "300", "--prompt", "The", "--num_samples", "1").stdout.split("\n", 1)[1]
    assert not re.search("\n.|>", text)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)        # what runs the tests may ignore it
        os.execve(sys.executable, [sys.executable, str(ROOT / "sample.py"), *flags, "1000000",
                                   "--interactive"], {**ENV, "TERM": "dumb"})
    watchdog = threading.Timer(HANG, os.kill, (pid, signal.SIGKILL))
    watchdog.start()
    shown = b""

    def until(pattern):
        nonlocal shown
        while not (found := re.search(pattern, shown, re.S)):
            shown += os.read(terminal, 1000)
        shown = shown[found.end():]
    until(b"> ")
    for _ in range(2):                          # the second Ctrl-C is a first one again
        os.write(terminal, b"The\n")
        until(b"The\r\n.{9}")
        os.write(terminal, b"\x03")
        until(b"\r\n> ")
    os.write(terminal, end)
    with contextlib.suppress(OSError):          # how Linux tells that the other end is closed
        more = b" "
        while more:
            if select.select([terminal], [], [], 1)[0]:
                more = os.read(terminal, 1000)
                shown += more
            elif b"\n" not in shown:    # Python's readline misses a signal between its prompt and its wait
                os.write(terminal, end)
    os.close(terminal)
    watchdog.cancel()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    line = rb"sample\.py: stopped by Ctrl-C\r\n" if code else b""
    assert re.search(rb"\r\n%s(\^[CD])*\Z" % line, shown), shown   # the terminal shows a late key
    assert b"Traceback" not in shown


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals")
def test_a_terminal_gets_the_same_text_as_a_pipe(model_path):
    flags = ["--model", model_path, "--num_samples", 3, "--max_new_tokens", 30]
    piped, (terminal, end) = command(*flags), os.openpty()
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", *map(str, flags)], stdout=end, env=ENV)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):          # how Linux tells that the other end is closed
        while more := os.read(terminal, 1000):
            shown += more
    os.close(terminal)
    assert process.wait(timeout=HANG) == 0
    assert shown.decode().replace("\r\n", "\n") == piped.stdout and len(samples(piped, 3)) == 3


def test_a_closed_pipe_ends_it_quietly(model_path):
    flags = ["--model", model_path, "--num_samples", "1", "--max_new_tokens", "1000000"]
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", *map(str, flags)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=ENV)
    assert process.stdout.readline() == b"--- sample 1 of 1\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=HANG) == 1


BAD_NUMBERS = [["--num_samples", "0"], ["--num_samples", "2.5"], ["--max_new_tokens", "-3"],
               ["--max_new_tokens", "many"], ["--temperature", "-1"], ["--temperature", "nan"],
               ["--temperature", "inf"], ["--top_k", "-1"], ["--seed", "x"], ["--seed", "-1"],
               ["--seed", str(2**64)], ["--bogus"], ["--device", "tpu"], ["--device", "cpu:x"],
               ["--device", ""], ["--top_p", "0"], ["--top_p", "1.01"], ["--top_p", "-0.5"],
               ["--top_p", "nan"], ["--dtype", "int8"], ["--repetition_penalty", "0.99"],
               ["--repetition_penalty", "-1"], ["--repetition_penalty", "nan"],
               ["--repetition_penalty", "inf"], ["--prompt_file", "nowhere.txt"], ["--prompt_file", ""],
               ["--prompt_file", "/dev/zero"], ["--prompt", "a", "--interactive"],
               ["--prompt_file", "sample.py", "--prompt", ""],
               ["--interactive", "--prompt_file", "sample.py"]]


@pytest.mark.parametrize("flags", BAD_NUMBERS, ids=" ".join)
def test_a_mistake_is_found_before_the_model_is_read(flags, monkeypatch):
    import model
    monkeypatch.setattr(model, "load_model", lambda path: pytest.fail("the model was read before the error"))
    with pytest.raises(UserError, match=flags[0]):
        sample.main(["--model", "nowhere.pt", *flags])


@pytest.mark.parametrize("flags", [["--model", "nowhere.pt"], ["--model", "no-such-name"],
                                   ["--model", "PICKLE"],
                                   ["--device", "tpu"], ["--device", "cuda"], ["--top_k", "few"],
                                   ["--num_samples", str(10**14)]], ids=" ".join)
def test_a_mistake_exits_2_with_one_line_and_no_traceback(flags, model_path, tmp_path):
    if flags[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU")
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"a": 1}, protocol=5))
    flags = [str(tmp_path / "a.pt") if flag == "PICKLE" else flag for flag in flags]
    result = command("--model", model_path, *flags)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("sample.py: ") and result.stderr.count("\n") == 1, result.stderr


def test_importing_sample_prints_nothing_and_leaves_the_slow_libraries_alone(tmp_path):
    code = ("import sample, sys; "
            "slow = {'torch', 'transformers', 'datasets', 'huggingface_hub', 'safetensors'}; "
            "assert not slow & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG, env={**ENV, "PYTHONPATH": str(ROOT)})
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])
