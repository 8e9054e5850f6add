"""What surrounds a run: closed, full and unusual streams, paths that the system refuses, variables that
another job has left, packages and Pythons that are missing, notebooks, and the habits of nanoGPT's users."""
import contextlib
import ctypes
import functools
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types

import pytest
import torch
import tqdm
from helpers import (BYTES, ENV, HANG, ROOT, cold, command, hellaswag_file, logged, newest, on_ranks,
                     parse_flags, refused,
                     run, same_end, script, strike, striking, train)
from peers import make_model

import train_gpt2
from runtime import plots
from runtime.cli import RunError, UserError
from runtime.metrics import read_metrics
from runtime.ranks import Process
from runtime.tokenizer import tokenizer

DRAW = plots.draw           # conftest.py puts something else there


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder in the Hugging Face format: a GPT-2 with all of its tokens."""
    folder = tmp_path_factory.mktemp("model")
    make_model(vocab_size=50257, n_embd=4, n_layer=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards that fineweb.py has written."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text((ROOT / "input.txt").read_text()[:10_000])
    assert script("fineweb.py", "--input", folder / "a.txt", "--out", folder / "shards").returncode == 0
    return folder / "shards"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def in_process(monkeypatch, capfd):
    """in_process(name, flags): one of our scripts as a command, but in this process. A CompletedProcess."""
    def call(name, *flags):
        monkeypatch.setattr(sys, "argv", [])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(name, *flags)()
        return subprocess.CompletedProcess([name, *flags], ended.value.code, *capfd.readouterr())
    return call


# ----------------------------------------------------------------------------- streams

def closed():
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    sys.stdin = sys.stdout = sys.stderr = None


def full(buffering=-1):
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    raw = open(1, "wb", buffering=buffering, closefd=False)
    sys.stdout = io.TextIOWrapper(raw, write_through=buffering == 0)


def all_full():
    full()
    os.dup2(1, 2)


class OutStream:
    """What a notebook has for sys.stdout: no file, and no method but these."""
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def notebooks_streams():
    sys.stdout, sys.stderr = OutStream(), OutStream()


COMMANDS = {
    "train_gpt2.py": ["--overfit", "--dry_run", "--n_layer", 1, "--n_embd", 4, "--n_head", 1],
    "sample.py": ["--model", "MODEL", "--max_new_tokens", 2, "--device", "cpu"],
    "hellaswag.py": ["--model", "MODEL", "--data", "h.jsonl", "--limit", 2, "--device", "cpu"],
    "fineweb.py": ["--verify", "SHARDS"],
    "bench.py": ["compare", "curve.csv", "curve.csv"],
}


@pytest.fixture
def flags_of(here, model, shards):
    """flags_of(name): of a command that succeeds in the current folder."""
    hellaswag_file(here / "h.jsonl", 2)
    (here / "curve.csv").write_text("tokens,loss\n100,5.0\n200,4.0\n")
    places = {"MODEL": model, "SHARDS": shards}
    return lambda name: [places.get(flag, flag) for flag in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_its_work_without_stdin_stdout_and_stderr_and_in_a_notebook(name, flags_of, here):
    for hook in closed, notebooks_streams:
        result = script(name, *flags_of(name), before=[hook])
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def prompts(text):
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))


def test_prompts_come_from_any_stdin(model):
    flags = ["sample.py", "--model", model, "--interactive", "--max_new_tokens", 1]
    result = script(*flags, before=[functools.partial(prompts, "one\ntwo\n")])
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 2)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_print_says_so_in_one_line_with_exit_code_1(name, flags_of):
    result = script(name, *flags_of(name), before=[full])
    assert (result.returncode, result.stderr.count("\n")) == (1, 1) and "No space left" in result.stderr
    assert result.stderr.startswith(f"{name}: ")
    result = script(name, *flags_of(name), before=[functools.partial(full, 0)])
    assert (result.returncode, result.stderr.count("\n")) == (1, 1) and "No space left" in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_and_the_end_of_a_command_never_complain_twice(unbuffered):
    """Python's own finalization would, and has the exit code 120."""
    env = ENV | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as disk:
        for flag in "--help", "--version":
            result = cold(ROOT / "sample.py", flag, env=env, capture_output=False, stdout=disk,
                          stderr=subprocess.PIPE)
            assert (result.returncode, result.stderr.count("\n")) == (1, 1), result
        assert cold(ROOT / "sample.py", "--help", env=env, capture_output=False, stdout=disk,
                    stderr=disk).returncode == 1
        assert cold(ROOT / "sample.py", "--bogus", env=env, capture_output=False, stderr=disk).returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    result = cold(ROOT / "sample.py", "--help", env=env, capture_output=False, stdout=writer,
                  stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, ""), "`| head` needs no line"


@pytest.mark.parametrize("hook", [full, functools.partial(full, 0), all_full], ids=["", "unbuffered", "all"])
def test_a_run_whose_console_is_on_a_full_disk_goes_on_and_says_so_once(hook, byte_data, whole, tmp_path):
    result = run("--data", byte_data, *BYTES, "--out", tmp_path, before=[hook])
    same_end(tmp_path, whole())
    assert result.stderr.count("\n") == (hook is not all_full) and "Traceback" not in result.stderr
    assert hook is all_full or "--out" in result.stderr


def test_a_run_without_any_stream_writes_to_its_files_alone(byte_data, whole, tmp_path):
    """A file that took the number of stdout or stderr would get what is written there."""
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    run(*flags, before=[closed, *striking("step 13", "SIGTERM")])
    assert newest(tmp_path) == 13 and not (tmp_path / ".train_gpt2.lock").stat().st_size
    run(*flags, before=[closed])
    same_end(tmp_path, whole())


def test_a_shell_that_closes_everything_starts_a_run(byte_data, tmp_path):
    done = subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, ROOT / "train_gpt2.py",
                           "--data", byte_data, *BYTES, "--max_steps", "2", "--out", tmp_path], env=ENV,
                          timeout=HANG)
    assert done.returncode == 0 and newest(tmp_path) == 2


def test_main_prints_to_whatever_stdout_is(byte_data, tmp_path, monkeypatch):
    stream = OutStream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    train("--data", byte_data, *BYTES, "--max_steps", 2, "--out", tmp_path)
    assert "done: 2 steps" in stream.text


# ----------------------------------------------------------------------------- paths

@contextlib.contextmanager
def without_rights():
    """Inside, root has the rights of its user ID alone, as everybody: those of a file's mode."""
    if os.getuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)               # version 3 of the interface, this thread
    before, now = ((ctypes.c_uint32 * 6)() for _ in range(2))   # effective, permitted, inheritable, twice
    assert libc.capget(header, before) == 0
    now[:] = before[:]
    now[0] = now[3] = 0
    assert libc.capset(header, now) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def refused_paths(folder):
    """{what is wrong with it: a path that the system refuses}, all in `folder`."""
    (folder / "file").write_text("a file")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "private").mkdir(mode=0)
    return {"private": folder / "private/log", "private itself": folder / "private",
            "through a file": folder / "file/log", "a loop": folder / "loop/log",
            "a loop itself": folder / "loop", "too long": folder / ("x" * 300),
            "too long in all": folder / ("x" * 200 + "/") / ("y/" * 2500)}


# a command, of whose flags PATH is refused; DATA, MODEL and OUT can be used
PATHS = ["train_gpt2.py --data DATA --out PATH", "train_gpt2.py --data PATH --out OUT",
         "train_gpt2.py --data DATA --init PATH --out OUT",
         "train_gpt2.py --data DATA --resume PATH --out OUT",
         "train_gpt2.py --data DATA --resume PATH.pt --out OUT",
         "train_gpt2.py --data DATA --hellaswag_every 1 --vocab_size 50304 --hellaswag_data PATH --out OUT",
         "sample.py --model PATH", "sample.py --model PATH.pt", "sample.py --model PATH/best",
         "hellaswag.py --model MODEL --data PATH", "hellaswag.py --model PATH",
         "fineweb.py --input PATH --out OUT", "fineweb.py --input PATH.txt --out OUT",
         "fineweb.py --input TEXT --out PATH", "fineweb.py --input TEXT --val_input PATH --out OUT",
         "fineweb.py --verify PATH", "fineweb.py --pretokenized 1 --out PATH",
         "export.py MODEL PATH", "export.py PATH OUT",
         "bench.py compare PATH", "bench.py compare PATH.csv", "bench.py compare CURVE CURVE --plot PATH.png"]


@pytest.mark.parametrize("line", PATHS)
def test_a_path_that_the_system_refuses_is_one_line_and_nothing_is_written(line, model, byte_data, here,
                                                                           tmp_path, in_process):
    (tmp_path / "curve.csv").write_text("tokens,loss\n100,5.0\n200,4.0\n")
    (tmp_path / "a.txt").write_text("Once upon a time. " * 100)
    given = {"DATA": byte_data, "MODEL": model, "TEXT": tmp_path / "a.txt", "CURVE": tmp_path / "curve.csv",
             "OUT": here / "out"}
    name, *words = line.split()
    for what, path in refused_paths(tmp_path).items():
        if "itself" in what and "PATH." in line:
            continue                            # the path with a suffix is another one
        flags = [given.get(word, word.replace("PATH", str(path))) for word in words]
        if name == "train_gpt2.py":
            flags = [*BYTES, "--max_steps", 1, *flags]
        with without_rights():
            result = in_process(name, *flags)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), (what, result.stderr[-300:])
        assert result.stderr.startswith(f"{name}: ") and str(tmp_path) in result.stderr, what
    assert not list(here.iterdir())


def test_a_private_folder_is_told_from_an_empty_one(tmp_path, byte_data, in_process):
    private = refused_paths(tmp_path)["private itself"]
    for name, *flags in (["train_gpt2.py", *BYTES, "--data", byte_data, "--out", private],
                         ["train_gpt2.py", *BYTES, "--data", private, "--out", tmp_path / "out"],
                         ["train_gpt2.py", *BYTES, "--data", byte_data, "--resume", private, "--out", "x"],
                         ["sample.py", "--model", private]):
        with without_rights():
            assert "Permission denied" in refused(lambda name=name, flags=flags: in_process(name, *flags))


def test_a_run_in_a_folder_that_cannot_be_read_does_not_begin_anew(byte_data, tmp_path, in_process):
    """It could be written to, and its checkpoints would be passed over."""
    flags = ["train_gpt2.py", "--data", byte_data, *BYTES, "--max_steps", 2, "--out", tmp_path / "log"]
    assert in_process(*flags).returncode == 0
    (tmp_path / "log").chmod(0o300)
    with without_rights():
        refused(lambda: in_process(*flags), tmp_path / "log", "Permission denied")
    (tmp_path / "log").chmod(0o700)
    assert newest(tmp_path / "log") == 2 and not (tmp_path / "log/previous_1").exists()


def test_what_the_system_refuses_to_several_ranks_is_said_once(byte_data, tmp_path):
    path = refused_paths(tmp_path)["through a file"]
    refused(lambda: run("--data", byte_data, *BYTES, "--out", path, processes=2, code=2), path)


def refuse_to_list(folder, nth):
    """From now on the system refuses the `nth` look into the folder, counted from its first checkpoint on."""
    looks = []

    def hook(what, args):
        if what in ("os.listdir", "os.scandir") and args and str(args[0]) == str(folder) and (
                (folder / "checkpoint_000010.pt").exists()):
            looks.append(what)
            if len(looks) == nth:
                raise PermissionError(13, "Permission denied", str(folder))
    sys.addaudithook(hook)


def test_a_refusal_in_the_middle_of_a_run_is_exit_code_1_and_the_resume_goes_on(byte_data, whole, tmp_path):
    for nth in 1, 2:
        flags = ["--data", byte_data, *BYTES, "--out", tmp_path / str(nth)]
        hook = functools.partial(refuse_to_list, tmp_path / str(nth), nth)
        line = refused(lambda flags=flags, hook=hook: script("train_gpt2.py", *flags, before=[hook]),
                       tmp_path / str(nth), "Permission denied", "resumes", failed=True)
        assert line.startswith("train_gpt2.py: ") and newest(tmp_path / str(nth)) == 10
    run(*flags)
    same_end(tmp_path / "2", whole())


def test_a_full_disk_that_only_the_system_names_is_exit_code_1(tmp_path, in_process):
    """What opens a file is no write of ours: a lock, a library's cache."""
    def main():
        raise OSError(28, "No space left on device", str(tmp_path / "cache"))
    module = types.SimpleNamespace(main=main)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "full", module)
        line = refused(lambda: in_process("full.py"), tmp_path / "cache", "room", failed=True)
    assert line.startswith("full.py: ")


def test_what_is_no_path_of_the_users_keeps_its_traceback(in_process):
    for error in OSError("a bug"), ValueError("a bug"), ModuleNotFoundError("a bug", name="runtime.nowhere"):
        def main(error=error):
            raise error
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "bug", types.SimpleNamespace(main=main))
            result = in_process("bug.py")
        assert result.returncode == 1 and "Traceback" in result.stderr and "a bug" in result.stderr


NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("text", [NOT_UTF8, "a\0b"], ids=["bytes", "NUL"])
@pytest.mark.parametrize("line", [*PATHS, "train_gpt2.py --sample_prompt PATH", "bench.py recipes PATH",
                                  "fineweb.py --dataset PATH", "fineweb.py --text_field PATH --input a.txt"])
def test_a_text_that_could_not_be_read_again_is_refused_at_once(line, text, here, in_process):
    if "sample_prompt" in line and "\0" in text:
        pytest.skip("a prompt may hold any character")
    name, *words = line.split()
    flags = [word.replace("PATH", text) for word in words]
    line = refused(lambda: in_process(name, *flags), "NUL" if "\0" in text else "UTF-8")
    assert line.isprintable()
    assert not list(here.iterdir())


def test_the_prompt_of_sample_py_may_hold_any_bytes(model, in_process):
    """Nothing records it."""
    result = in_process("sample.py", "--model", model, "--max_new_tokens", 1, "--prompt", NOT_UTF8)
    assert (result.returncode, result.stderr) == (0, "") and "caf\ufffd" in result.stdout


# ----------------------------------------------------------------------------- torchrun's variables

VARIABLES = "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"


@pytest.mark.parametrize("left", ["RANK=1", "RANK=1 LOCAL_RANK=1", "LOCAL_RANK=1 WORLD_SIZE=", "RANK=x",
                                  "WORLD_SIZE=1 RANK=3 LOCAL_RANK=3", "TORCHELASTIC_RUN_ID=a RANK=1"])
def test_a_process_alone_prints_its_mistakes_whatever_is_left_in_the_environment(left, byte_data, tmp_path,
                                                                                 in_process, monkeypatch):
    for pair in left.split():
        monkeypatch.setenv(*pair.split("="))
    refused(lambda: in_process("train_gpt2.py", "--n_head", 0), "--n_head 0")
    refused(lambda: in_process("train_gpt2.py", "--data", "nowhere"), "nowhere")
    result = in_process("train_gpt2.py", *BYTES, "--data", byte_data, "--dry_run", "--out", tmp_path / "log")
    assert result.returncode == 0 and result.stdout.startswith("1 process on ")


def test_a_restart_that_another_job_has_left_in_the_environment_resumes_nothing(byte_data, tmp_path,
                                                                                monkeypatch, capsys):
    flags = ["--data", byte_data, *BYTES, "--max_steps", 2, "--out", tmp_path]
    train(*flags)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    train(*flags, "--resume", "never")
    assert "resuming" not in capsys.readouterr().out and (tmp_path / "previous_1").is_dir()


@pytest.mark.parametrize("left, word", [
    ("WORLD_SIZE=two", "WORLD_SIZE"), ("WORLD_SIZE=2 RANK=x", "RANK"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=x", "LOCAL_RANK"),
    ("WORLD_SIZE=0", "WORLD_SIZE"), ("WORLD_SIZE=-1 RANK=0", "WORLD_SIZE"), ("WORLD_SIZE=2", "RANK"),
    ("WORLD_SIZE=2 RANK=2", "RANK"), ("WORLD_SIZE=2 RANK=-1", "RANK"), ("WORLD_SIZE=2 RANK=1", "WORLD_SIZE"),
    ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=x", "WORLD_SIZE")])
def test_variables_that_no_torchrun_has_set_are_named(left, word, in_process, monkeypatch):
    for pair in left.split():
        monkeypatch.setenv(*pair.split("="))
    refused(lambda: in_process("train_gpt2.py", "--data", "nowhere"), word)


def test_without_torchrun_every_process_prints_its_own_mistakes(in_process, monkeypatch):
    for pair in "WORLD_SIZE=2 RANK=1 LOCAL_RANK=1".split():
        monkeypatch.setenv(*pair.split("="))
    refused(lambda: in_process("train_gpt2.py", "--n_head", 0), "--n_head 0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    result = in_process("train_gpt2.py", "--n_head", 0)
    assert (result.returncode, result.stderr) == (2, ""), "process 0 of this machine prints it"


def test_who_waits_for_other_processes_says_for_which_and_can_be_stopped(byte_data, tmp_path):
    """As WORLD_SIZE=2 in a shell, left by another job, lets it wait. Both ranks, each of a job of its own."""
    with socket.socket() as nobody:                     # has the port, and never answers
        nobody.bind(("127.0.0.1", 0))
        ports = {"0": "0", "1": str(nobody.getsockname()[1])}               # 0: any that is free
        processes = {rank: subprocess.Popen(
            [sys.executable, ROOT / "train_gpt2.py", "--data", byte_data, "--out", tmp_path], text=True,
            stderr=subprocess.PIPE, env=ENV | {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1",
                                               "MASTER_PORT": port},
            # where the tests are a shell's `&`, it would be ignored
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL))
            for rank, port in ports.items()}
        for rank, process in processes.items():
            ends = threading.Timer(HANG / 4, process.kill)              # if it never says anything
            ends.start()
            line = next((line for line in process.stderr if "WORLD_SIZE" in line), "")
            ends.cancel()
            assert f"127.0.0.1:{ports[rank]}" in line and f"process {rank} " in line and " 1 other" in line
        for process in processes.values():
            process.send_signal(signal.SIGINT)
            ends = threading.Timer(HANG / 4, process.kill)
            ends.start()
            with process:
                *_, last = process.stderr                   # torch may warn before it
                assert process.wait() == 130 and "Ctrl-C" in last
            ends.cancel()


# ----------------------------------------------------------------------------- without a GPU

# of BYTES: 256 tokens of 6 N + 12 n_layer n_embd T, where N leaves out the positions, which are looked up
STEP_FLOPS = 256 * (6 * (34_688 - 32 * 32) + 12 * 2 * 32 * 32)


@pytest.mark.parametrize("dtype, flops", [("float32", 2e11), ("bfloat16", 1e12)])
def test_a_run_of_more_than_a_day_on_a_cpu_says_so_before_it_starts(dtype, flops, byte_data, tmp_path,
                                                                    capsys, monkeypatch):
    """Even with more FLOP/s than a core has."""
    step = STEP_FLOPS / (flops * 2)             # seconds
    flags = ["--data", byte_data, *BYTES, "--dtype", dtype, "--device", "cpu", "--out", tmp_path]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for days, said in (0.98, None), (1.02, "1 day"), (2.98, "2 days"), (250.5, "250 days"):
        train(*flags, "--dry_run", "--max_steps", round(days * 86400 / step))
        lines = [line for line in capsys.readouterr().out.splitlines() if "GPU" in line]
        if said is None:
            assert not lines
        else:
            assert re.search(rf"\b{said}\b", lines[0]) and "--preset shakespeare" in lines[0]
            assert len(lines) == 1 and "--dry_run" in lines[0]


def test_several_processes_have_their_share_of_that_day_each(byte_data, tmp_path):
    day = round(86400 / (STEP_FLOPS / 2e11))            # steps of one process on one thread
    shown = run("--data", byte_data, *BYTES, "--device", "cpu", "--out", tmp_path, "--dry_run", "--max_steps",
                round(3.5 * day), processes=2).stdout
    assert shown.count("without a GPU") == 1 and "more than 1 day:" in shown


def test_what_a_resumed_run_still_has_to_do_counts_for_that_day(byte_data, tmp_path, capsys):
    day = round(86400 / (STEP_FLOPS / (2e11 * torch.get_num_threads())))            # steps
    flags = ["--data", byte_data, *BYTES, "--device", "cpu", "--out", tmp_path]
    train(*flags, "--max_steps", 10)
    path = tmp_path / "checkpoint_000010.pt"
    content = torch.load(path, weights_only=True)
    content["config"]["max_steps"] = day
    torch.save(content | {"step": day // 2, "tokens": day // 2 * 256}, path)
    capsys.readouterr()
    for steps in 1.4, 1.6:
        train(*flags, "--dry_run", "--max_steps", round(steps * day))
        assert ("without a GPU" in capsys.readouterr().out) == (steps == 1.6)


# ----------------------------------------------------------------------------- nanoGPT's habits

@pytest.mark.parametrize("words, name, value", [
    ("--compile=False", "compile", False), ("--compile False", "compile", False),
    ("--compile=True", "compile", True), ("--compile True", "compile", True),
    ("--no_compile --compile=True", "compile", True), ("--compile --compile False", "compile", False),
    ("--shuffle=False", "shuffle", False), ("--shuffle=True", "shuffle", True),
    ("--tf32 False", "tf32", False), ("--no_tf32 --tf32 True", "tf32", True),
    ("--recompute=True", "recompute", True), ("--recompute=False", "recompute", False),
    ("--recompute False --seed 5", "recompute", False), ("--dry-run=True", "dry_run", True),
    ("--wandb=False", "wandb", False), ("--dtype=bfloat16", "dtype", "bfloat16")])
def test_a_switch_takes_true_or_false_as_in_nanogpt(words, name, value):
    config, given = parse_flags(words.split())
    assert getattr(config, name) is value or getattr(config, name) == value != bool(value)
    assert config.seed == (5 if "seed" in words else 1337)
    assert given - {"seed"} == ({name} if value or f"no_{name}" in words or name in (
        "compile", "shuffle", "tf32") else set())


def test_other_values_of_a_switch_and_a_text_that_reads_false_are_what_they_were(in_process, model):
    refused(lambda: in_process("train_gpt2.py", "--compile=maybe"), "--compile", "maybe")
    refused(lambda: in_process("train_gpt2.py", "--no_compile=True"), "--no_compile")
    refused(lambda: in_process("train_gpt2.py", "--seed", 5, "False"), "False")
    refused(lambda: in_process("train_gpt2.py", "--data", "False"), "False", "fineweb.py")
    result = in_process("sample.py", "--model", model, "--max_new_tokens", 1, "--prompt", "False",
                        "--interactive=False", "--num_samples", 1)
    assert result.returncode == 0 and result.stdout.splitlines()[1].startswith("False")


def test_what_nanogpt_means_by_grad_clip_0_and_a_file_with_settings_is_said(in_process):
    refused(lambda: in_process("train_gpt2.py", "--grad_clip", 0), "--grad_clip", "inf", "turns clipping off")
    refused(lambda: in_process("train_gpt2.py", "config/train_gpt2.py", "--max_steps", 5),
            "config/train_gpt2.py", "nanoGPT", "--preset")
    assert "nanoGPT" not in refused(lambda: in_process("train_gpt2.py", "config"), "config")


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun", "frontier"])
def test_a_run_that_is_made_longer_says_what_that_does_to_its_learning_rate(recipe, byte_data, tmp_path,
                                                                            capsys):
    flags = ["--data", byte_data, *BYTES, "--recipe", recipe, "--n_head", 1, "--out", tmp_path]
    train(*flags, "--max_steps", 10)
    train(*flags, "--max_steps", 20)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resuming"))
    lrs = [row["lr"] for row in read_metrics(tmp_path / "metrics.csv") if row["lr"] is not None]
    assert line.startswith(f"resuming from {tmp_path / 'checkpoint_000010.pt'} at step 10 of 20; ")
    assert "--max_steps was 10" in line and f"{lrs[9]:.2e} in step 9, {lrs[10]:.2e} in step 10" in line
    assert lrs[10] > 2 * lrs[9]
    train(*flags, "--max_steps", 20, "--dry_run")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resuming"))
    assert line.endswith("checkpoint_000020.pt at step 20 of 20")


# ----------------------------------------------------------------------------- packages and Pythons

@pytest.fixture
def missing(monkeypatch):
    """missing(NAME, ...): packages that are not installed, as far as this process can see."""
    def remove(*names):
        for name in names:
            for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
                monkeypatch.delitem(sys.modules, loaded)
            monkeypatch.setitem(sys.modules, name, None)
    return remove


def test_a_missing_package_is_named_with_its_installation(missing, model, byte_data, here, in_process):
    missing("wandb", "datasets", "matplotlib", "tiktoken", "filelock")
    (here / "curve.csv").write_text("tokens,loss\n100,5.0\n200,4.0\n")
    files = {path.name for path in here.iterdir()}
    for package, name, *flags in (
            ["wandb", "train_gpt2.py", *BYTES, "--data", byte_data, "--out", "log", "--wandb"],
            ["datasets", "hellaswag.py", "--model", model],
            ["datasets", "train_gpt2.py", *BYTES, "--data", byte_data, "--out", "log", "--vocab_size", 50304,
             "--hellaswag_every", 1],
            ["matplotlib", "bench.py", "compare", "curve.csv", "curve.csv", "--plot", "runs.png"],
            ["tiktoken", "train_gpt2.py", "--overfit", "--n_layer", 1, "--n_embd", 4, "--n_head", 1],
            ["filelock", "train_gpt2.py", *BYTES, "--data", byte_data, "--out", "log"]):
        tokenizer.cache_clear()
        refused(lambda name=name, flags=flags: in_process(name, *flags), f"pip install {package}")
    assert {path.name for path in here.iterdir()} == files, "nothing is written"


def test_a_run_goes_on_without_datasets_and_matplotlib_and_names_them(missing, byte_data, tmp_path, capsys,
                                                                      monkeypatch):
    missing("datasets", "matplotlib")
    monkeypatch.setattr(plots, "draw", DRAW)
    at = BYTES.index("--hellaswag_every")
    train("--data", byte_data, *BYTES[:at], *BYTES[at + 2:], "--max_steps", 2, "--out", tmp_path,
          "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 4, "--checkpoint_every", 0)
    out, err = capsys.readouterr()
    assert "done: 2 steps" in out and "pip install datasets" in out
    assert err.count("pip install matplotlib") == err.count("\n") == 1, "two pictures are due"


def test_a_folder_with_the_name_of_a_package_is_none(here, byte_data, in_process, monkeypatch):
    """wandb makes one where it is run."""
    assert "wandb" not in sys.modules
    (here / "wandb").mkdir()
    monkeypatch.syspath_prepend(here)
    try:
        refused(lambda: in_process("train_gpt2.py", *BYTES, "--data", byte_data, "--out", "log", "--wandb"),
                "pip install wandb")
    finally:
        sys.modules.pop("wandb", None)
    assert [path.name for path in here.iterdir()] == ["wandb"]


# ----------------------------------------------------------------------------- notebooks

def handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


@pytest.fixture
def unusual_handlers():
    """Those that a notebook may have."""
    before = handlers()
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield handlers()
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def test_main_in_a_notebook_leaves_the_process_as_it_was_however_it_ends(unusual_handlers, byte_data, whole,
                                                                         tmp_path, monkeypatch):
    """What it raised is kept, as a notebook does: its frames hold all that the run had."""
    flags = [str(flag) for flag in ("--data", byte_data, *BYTES, "--out", tmp_path)]
    threads, raised = set(threading.enumerate()), []

    def assert_as_before():
        assert handlers() == unusual_handlers
        left = set(threading.enumerate()) - threads
        assert all(isinstance(thread, tqdm.TMonitor) for thread in left), left     # one for all bars
        assert not torch.distributed.is_initialized()

    for wrong in ["--n_head", "5"], ["--data", "nowhere"], ["--dry_run", "--device", "tpu"]:
        with pytest.raises(UserError) as error:
            train_gpt2.main([*flags, *wrong])
        raised.append(error)
        assert_as_before()
    assert train_gpt2.main([*flags, "--dry_run"]) == 0
    assert_as_before()
    with pytest.raises(RunError) as error:
        train_gpt2.main([*flags, "--max_lr", "1e30"])           # a loss that is not finite
    raised.append(error)
    assert_as_before()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as error:
        patch.setattr(train_gpt2, "print_summary", interrupted)
        train_gpt2.main([*flags, "--resume", "never"])
    raised.append(error)
    assert_as_before()
    for steps in "20", "40":                # the same folder: its lock is free
        assert train_gpt2.main([*flags, "--resume", "never" if steps == "20" else "auto", "--max_steps",
                                steps]) == 0
        assert_as_before()
    assert newest(tmp_path) == 40 and len(raised) == 5
    assert train_gpt2.main([*flags[:-1], str(tmp_path / "b")]) == 0
    same_end(tmp_path / "b", whole())


def interrupted(*args):
    raise KeyboardInterrupt


def test_signals_reach_a_run_in_a_notebook_and_later_the_notebook(unusual_handlers, byte_data, tmp_path,
                                                                  monkeypatch):
    flags = ["--data", byte_data, *BYTES, "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(Process, "watch", Process.watch)        # put back at the end
        strike("step 7", "SIGTERM")
        train_gpt2.main([str(flag) for flag in flags])
    assert newest(tmp_path) == 7
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_script_that_a_notebook_runs_leaves_ctrl_c_alone(unusual_handlers, byte_data, tmp_path, in_process):
    stdout = sys.stdout
    result = in_process("train_gpt2.py", "--data", byte_data, *BYTES, "--max_steps", 2, "--out", tmp_path)
    assert result.returncode == 0 and handlers() == unusual_handlers and sys.stdout is stdout
    in_process("train_gpt2.py", "--bogus")
    assert handlers() == unusual_handlers and sys.stdout is stdout


def test_main_works_in_a_thread_where_python_allows_no_signal_handlers(byte_data, tmp_path):
    codes = []
    flags = [str(flag) for flag in ("--data", byte_data, *BYTES, "--max_steps", 2, "--out", tmp_path)]
    thread = threading.Thread(target=lambda: codes.append(train_gpt2.main(flags)))
    thread.start()
    thread.join(HANG)
    assert codes == [0] and newest(tmp_path) == 2


def notebook_on_ranks(flags):
    """A process of several that calls main twice, and says what is left of the first call."""
    for steps in "4", "8":
        assert train_gpt2.main([*flags, "--max_steps", steps]) == 0
        assert not torch.distributed.is_initialized()
    print("both runs are done")


def test_main_can_be_called_twice_on_several_ranks(byte_data, tmp_path):
    call = functools.partial(notebook_on_ranks,
                             [str(flag) for flag in ("--data", byte_data, *BYTES, "--out", tmp_path)])
    for code, out, err in on_ranks(call, call):
        assert (code, err) == (0, "") and "both runs are done" in out
    assert newest(tmp_path) == 8 and len(logged(tmp_path)) == 8
