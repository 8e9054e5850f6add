"""README.md: its commands run as they stand there, in a small size."""
import re
import shlex
import shutil

import pytest
from helpers import ROOT, script

README = (ROOT / "README.md").read_text(encoding="utf-8")

TINY = "--n_layer 1 --n_head 2 --n_embd 32 --dtype float32 --device cpu"
SHORT = ("--block_size 256 --total_batch_size 256 --max_steps 2 --val_every 2 --val_tokens 512 "
         "--sample_every 0 --checkpoint_every 2")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands():
    """The commands of the README that run a script and need no network."""
    found = []
    for block in blocks("bash"):
        for line in block.splitlines():
            line, _, _ = line.partition(" #")
            found += [command.strip() for command in line.split(" && ")]
    return [c for c in found if re.match(r"python \w+\.py ", c)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder like that of a clone, for what the commands write."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(ROOT / "input.txt", folder)
    return folder


def run_small(command, folder):
    """Runs a command of the README, with flags that make it small. Returns its stdout."""
    python, name, *flags = shlex.split(command)
    flags = [flag.removeprefix("$").replace(r"\n", "\n") for flag in flags]     # bash's $'...\n'
    if "--preset" in flags:
        flags += f"{TINY} {SHORT}".split()
    elif "--overfit" in flags:
        flags += f"{TINY} --max_lr 0.012 --min_lr 0.012".split()
    elif name == "sample.py":
        flags += "--max_new_tokens 5 --device cpu".split()
    result = script(name, *flags, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def trained(folder):
    """The folder after the first two commands, which make shards and a model."""
    make, train = commands()[:2]
    run_small(make, folder)
    run_small(train, folder)
    return folder


def test_the_third_command_continues_its_prompt(trained):
    sample = commands()[2]
    assert "First Citizen:\n" in run_small(sample, trained)


def test_the_interactive_command_ends_with_its_input(trained):
    """Here its input has no line."""
    [interactive] = [command for command in commands() if "--interactive" in command]
    run_small(interactive, trained)


def test_the_sanity_check_passes(tmp_path):
    [overfit] = [command for command in commands() if "--overfit" in command]
    assert "PASSED" in run_small(overfit, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_command_of_the_readme_is_left_out():
    names = [command.split()[1] for command in commands()]
    three = ["fineweb.py", "train_gpt2.py", "sample.py"]        # on the first screen, and once more
    assert names == [*three, "train_gpt2.py", *three, "sample.py"]
