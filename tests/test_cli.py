"""runtime/cli.py: how a command ends and what it says, on which streams, and how flags are read."""
import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module

import pytest
from helpers import BYTES, ENV, HANG, ROOT, hellaswag_file, train
from peers import make_model

from runtime import cli
from runtime.cli import (
    FlagParser, RunError, UserError, brief_error, run_command, safe_repr, user_path)
from runtime.tokenizer import tokenizer

PROGRAM = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
from runtime.cli import FlagParser, RunError, UserError, run_command

def main():
    LINE

sys.argv = ["command.py", "--help"]
run_command(main)
"""

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")


def run_main(line, shell="", variables=None, **streams):
    """A process whose main() is this line of Python. `shell` redirects its streams."""
    program = PROGRAM.replace("LINE", line)
    command = ["sh", "-c", f'exec "$0" "$@" {shell}', sys.executable, "-c", program, ROOT]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    env = {name: value for name, value in ENV.items() if name != "PYTHONUNBUFFERED"}
    env.update(variables or {})
    return subprocess.run(command, text=True, env=env, timeout=HANG, **streams)


# ----------------------------------------------------------------------- how a command ends

@pytest.mark.parametrize("line, code", [
    ("return None", 0),
    ("return 0", 0),
    ("return 3", 3),
    ("sys.exit(4)", 4),
    ("sys.exit()", 0),
])
def test_what_main_returns_is_the_exit_code(line, code):
    result = run_main(line)
    assert result.returncode == code
    assert result.stderr == ""


@pytest.mark.parametrize("line, code, word", [
    ("raise UserError('--n_head 5: choose 4')", 2, "--n_head 5: choose 4"),
    ("raise RunError('the loss is nan')", 1, "the loss is nan"),
    ("raise KeyboardInterrupt", 130, "Ctrl-C"),
    ("import no_such_package", 2, "pip install no_such_package"),
    ("open('nowhere.txt')", 2, "nowhere.txt"),
    ("open('x' * 300)", 2, "name too long"),
    ("raise PermissionError(13, 'Permission denied', 'private')", 2, "private"),
    ("raise OSError(errno.ENOSPC, 'No space left', 'a.npy')", 1, "a.npy"),
    ("raise OSError(errno.EDQUOT, 'Quota exceeded', 'a.npy')", 1, "a.npy"),
    ("raise OSError(errno.EFBIG, 'File too large', 'a.npy')", 1, "a.npy"),
    ("raise OSError(errno.EMFILE, 'Too many open files', 'a.npy')", 1, "a.npy"),
    ("raise OSError(errno.EROFS, 'Read-only file system', 'a.npy')", 2, "a.npy"),
    ("raise OSError(errno.EIO, 'Input/output error')", 1, "Input/output error"),
    ("raise OSError(errno.EIO, 'Input/output error', 'a.npy')", 1, "a.npy"),
    ("raise OSError(errno.ENOTCONN, 'not connected', 'a.npy')", 1, "the mount"),
    ("raise OSError(errno.ESTALE, 'Stale file handle', 'a.npy')", 1, "the mount"),
    ("raise OSError(errno.ENODEV, 'No such device', 'a.npy')", 1, "the mount"),
    ("raise OSError(errno.ETIMEDOUT, 'timed out', 'a.npy')", 1, "the mount"),
])
def test_what_ends_a_command_is_one_line_and_an_exit_code(
        line, code, word, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command.py"])
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: exec(line, {"errno": errno, "UserError": UserError,
                                        "RunError": RunError}))

    assert ended.value.code == code
    stderr = capfd.readouterr().err
    assert stderr.startswith("command.py: ")
    assert word in stderr
    assert stderr.count("\n") == 1


def test_a_path_that_is_not_there_is_told_as_typed_and_without_the_systems_number(
        monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command.py"])
    with pytest.raises(SystemExit):
        run_command(lambda: open("nowhere/model.pt"))
    line = capsys.readouterr().err
    assert "command.py: nowhere/model.pt" in line
    assert "No such file" in line and "check the path" in line
    assert "Errno" not in line


def test_a_bug_keeps_its_traceback():
    result = run_main("raise ValueError('a bug')")

    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "a bug" in result.stderr


def test_a_message_that_quotes_a_file_cannot_move_the_cursor():
    result = run_main(r"raise UserError('a\nb \x1b[31mc\u202e\0 d')")
    assert result.stderr == "command.py: a b ?[31mc?? d\n"


def test_a_mistake_of_the_users_ends_a_real_command_with_exit_code_2(tmp_path):
    command = [sys.executable, ROOT / "train_gpt2.py", "--data", "nowhere"]
    result = subprocess.run(command, cwd=tmp_path, env=ENV, text=True, capture_output=True)

    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------- streams

@needs_dev_full
@pytest.mark.parametrize("line, unbuffered", [
    ("print('a result')", ""),
    ("print('a result')", "1"),
    ("FlagParser(prog='p').parse_args()", ""),
])
def test_what_cannot_be_printed_is_one_line_and_exit_code_1(line, unbuffered):
    result = run_main(line, ">/dev/full", {"PYTHONUNBUFFERED": unbuffered})

    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No space left" in result.stderr


@pytest.mark.parametrize("line", ["print('a result')", "FlagParser(prog='p').parse_args()"])
def test_a_reader_that_has_seen_enough_is_told_nothing(line):
    reader, writer = os.pipe()
    os.close(reader)
    result = run_main(line, stdout=writer)
    os.close(writer)

    assert result.stderr == ""


@needs_dev_full
def test_a_full_disk_under_stderr_changes_no_exit_code():
    result = run_main("raise UserError('a mistake')", "2>/dev/full")
    assert result.returncode == 2


@needs_dev_full
def test_a_warning_that_cannot_be_printed_ends_nothing():
    line = "import runtime.cli; runtime.cli.print_error('warning'); print('done')"
    result = run_main(line, "2>/dev/full")

    assert result.returncode == 0
    assert result.stdout == "done\n"


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark():
    result = run_main(r"print('caf\u00e9')", variables={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stdout) == (0, "caf?\n")


# ----------------------------------------------------------------------- ranks

@pytest.mark.parametrize("variables", [
    {"WORLD_SIZE": "2", "RANK": "0"},
    {"RANK": "1", "LOCAL_RANK": "1"},
    {"WORLD_SIZE": "", "RANK": "1"},
    {"WORLD_SIZE": "1", "RANK": "1"},
], ids=str)
def test_rank_0_and_a_process_alone_print_a_mistake_as_it_is(variables):
    result = run_main("raise UserError('a mistake')", variables=variables)
    assert (result.returncode, result.stderr) == (2, "command.py: a mistake\n")


@pytest.mark.parametrize("line", ["raise UserError('wrong')", "open('nowhere.txt')"])
def test_a_mistake_of_one_rank_names_the_rank(line):
    result = run_main(line, variables={"WORLD_SIZE": "2", "RANK": "1"})
    assert result.returncode == 2
    assert "process 1: " in result.stderr


@pytest.mark.parametrize("end, code", [("return 3", 3), ("raise RunError('failed')", 1)])
def test_what_a_rank_has_printed_is_there_when_it_ends(end, code):
    result = run_main(f"print('a line'); {end}", variables={"WORLD_SIZE": "2", "RANK": "1"})
    assert (result.returncode, result.stdout) == (code, "a line\n")


# ----------------------------------------------------------------------- flags

@pytest.fixture
def parser():
    """A number, a text, and two switches, off and on by default."""
    made = FlagParser(prog="command.py")
    made.add_argument("--max_steps", type=int)
    made.add_argument("--prompt")
    made.add_argument("--wandb", action="store_true")
    made.add_argument("--compile", action="store_true", default=True)
    made.add_argument("--no_compile", dest="compile", action="store_false")
    return made


@pytest.mark.parametrize("line, name, value", [
    ("--max_steps 7", "max_steps", 7),
    ("--max-steps 7", "max_steps", 7),
    ("--max-steps=7", "max_steps", 7),
    ("--max_steps 3 --max_steps 7", "max_steps", 7),
    ("--prompt=--max-steps=7", "prompt", "--max-steps=7"),
    ("--prompt=a-b", "prompt", "a-b"),
    ("--prompt False", "prompt", "False"),
    ("--no-compile", "compile", False),
])
def test_flags_take_underscores_and_dashes_and_the_last_one_counts(line, name, value, parser):
    assert getattr(parser.parse_args(line.split()), name) == value


@pytest.mark.parametrize("line, word", [
    ("--max_step 7", "--max_step"),
    ("--Max_steps 7", "--Max_steps"),
    ("--max_steps", "--max_steps"),
    ("--max_steps many", "many"),
    ("--no_compile=True", "--no_compile"),
    ("--max_steps 5 False", "False"),
    ("seven", "seven"),
])
def test_what_is_no_flag_is_refused_with_the_way_to_the_help(line, word, parser):
    with pytest.raises(UserError, match="command.py --help") as error:
        parser.parse_args(line.split())
    assert word in str(error.value)


def test_an_unknown_flag_is_refused_with_the_nearest_one(parser):
    with pytest.raises(UserError, match="--max_stop.*: use --max_steps"):
        parser.parse_args(["--max_stop", "7"])


def test_a_path_is_expanded_where_no_shell_does_so(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    made = FlagParser(prog="command.py")
    made.add_argument("--out", type=user_path, default="log")
    made.add_argument("--input", type=user_path, nargs="+", action="extend", default=[])

    assert made.parse_args(["--out=~/runs/a"]).out == "/home/me/runs/a"
    assert made.parse_args(["--input", "~/a*.txt", "~"]).input == ["/home/me/a*.txt", "/home/me"]
    assert made.parse_args([]).out == "log"
    for path in ("a~", "./~", "gpt2-xl", "/a/~/b"):
        assert made.parse_args(["--out", path]).out == path
    with pytest.raises(UserError, match="--out"):
        made.parse_args(["--out", ""])


def test_what_nanogpt_means_by_a_grad_clip_of_0_is_said():
    with pytest.raises(UserError, match="--grad_clip.*'inf' turns clipping off"):
        train("--grad_clip", 0)


def test_each_command_tells_its_version(parser, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--version"])

    assert ended.value.code == 0
    assert cli.__version__ in capsys.readouterr().out


# ----------------------------------------------------------------------- messages

@dataclass
class Endless:
    """A value from a file that would never be printed to its end."""

    def __repr__(self):
        raise AssertionError("it was printed")


@pytest.mark.parametrize("value, text", [
    (5, "5"),
    (None, "None"),
    ("x" * 100, "x" * 40),
    ([Endless()], "a list"),
    (Endless(), "a Endless"),
])
def test_a_value_from_a_file_is_quoted_in_a_few_characters(value, text):
    assert safe_repr(value) == text


@pytest.mark.parametrize("error, text", [
    (FileNotFoundError(2, "No such file", "a.npy"), "No such file"),
    (ValueError("its step"), "its step"),
    (RunError("drifted\napart"), "drifted apart"),
    (KeyError("step"), "it has no 'step'"),
    (RuntimeError("how to load it unsafely WeightsUnpickler error: what"), "RuntimeError: what"),
    (ValueError("x" * 999), "x" * 200),
])
def test_an_error_is_quoted_in_its_own_words(error, text):
    assert brief_error(error) == text


# ----------------------------------------------------------------------- paths and packages

@pytest.fixture(scope="module")
def places(byte_data, tmp_path_factory):
    """{word of a command line: a file or folder that can be used}."""
    folder = tmp_path_factory.mktemp("places")
    make_model(vocab_size=50257, n_embd=4, n_layer=1).save_pretrained(folder / "model")
    hellaswag_file(folder / "h.jsonl", 2)
    (folder / "a.txt").write_text("Once upon a time. " * 100)
    return {
        "DATA": byte_data,
        "MODEL": folder / "model",
        "TEXT": folder / "a.txt",
    }


@pytest.fixture
def run_script(places, tmp_path, monkeypatch, capsys):
    """run_script("sample.py --model MODEL") -> (exit code, stderr) of the script, in this process.

    The current folder is an empty one.
    """
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def run(line, **more):
        name, *words = line.split()
        known = places | more
        flags = [str(known.get(word, word)) for word in words]
        if name == "train_gpt2.py":
            flags = [*BYTES, "--max_steps", "1", *flags]
        monkeypatch.setattr(sys, "argv", [name, *flags])
        with pytest.raises(SystemExit) as ended:
            run_command(import_module(name.removesuffix(".py")).main)
        return ended.value.code, capsys.readouterr().err
    return run


PATHS = [
    "train_gpt2.py --data DATA --out PATH",
    "train_gpt2.py --data PATH",
    "train_gpt2.py --data DATA --init PATH",
    "train_gpt2.py --data DATA --resume PATH",
    "train_gpt2.py --data DATA --vocab_size 50304 --hellaswag_every 1 --hellaswag_data PATH",
    "sample.py --model PATH",
    "check.py --fast --model PATH",
    "hellaswag.py --model MODEL --data PATH",
    "fineweb.py --input PATH --out OUT",
    "fineweb.py --input TEXT --out PATH",
    "fineweb.py --verify PATH",
    "export.py MODEL PATH",
    "export.py PATH OUT",
    "bench.py compare PATH",
]


@pytest.mark.parametrize("line", PATHS)
def test_a_path_that_the_system_refuses_is_one_line_and_nothing_is_written(
    line, run_script, tmp_path, monkeypatch
):
    """It begins with the home folder, which no shell has expanded."""
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, stderr = run_script(line, PATH="~/file/log")

    assert code == 2
    assert str(tmp_path / "file") in stderr
    assert stderr.count("\n") == 1
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("line", [line for line in PATHS if "--hellaswag_data" not in line])
def test_an_empty_path_is_refused_and_nothing_is_written(line, run_script, tmp_path):
    """But where that is the default, as of --hellaswag_data."""
    code, stderr = run_script(line, PATH="")

    assert code == 2
    assert "empty" in stderr
    assert stderr.count("\n") == 1
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("package, line", [
    ("wandb", "train_gpt2.py --data DATA --wandb"),
    ("datasets", "hellaswag.py --model MODEL"),
    ("matplotlib", "bench.py compare OUT --plot a.png"),
    ("tiktoken", "sample.py --model MODEL"),
])
def test_a_missing_package_is_named_with_its_installation(
    package, line, byte_data, run_script, tmp_path, monkeypatch
):
    out = tmp_path / "log"
    train("--data", byte_data, *BYTES, "--max_steps", 1, "--out", out)      # for bench.py
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    tokenizer.cache_clear()
    code, stderr = run_script(line, OUT=out)

    assert code == 2
    assert f"pip install {package}" in stderr
    assert stderr.count("\n") == 1
