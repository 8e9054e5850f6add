"""README.md: its commands run as they stand there, in a small size. All pages: shells read them."""
import re
import shlex
import shutil
import subprocess

import pytest
from helpers import ROOT, script

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

TINY = "--n_layer 1 --n_head 2 --n_embd 32 --dtype float32 --device cpu"
SHORT = ("--block_size 256 --total_batch_size 256 --max_steps 2 --val_every 2 --val_tokens 512 "
         "--sample_every 0 --checkpoint_every 2")


def blocks(page):
    """[(language or "", text)] of the blocks of code."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)


def commands():
    """The commands of the README that run a script and need no network."""
    found = []
    for language, block in blocks(README):
        if language != "bash":
            continue
        for line in block.splitlines():
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
        flags += f"{TINY} --max_lr 0.012 --max_steps 50".split()
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


# ----------------------------------------------------------------------- what a shell reads

@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_comment_stands_behind_a_command(page):
    """zsh, the shell of every Mac, gives what is typed behind a # to the command."""
    found = []
    for language, block in blocks(page):
        if language in ("", "bash"):
            found += re.findall(r"^(?! *#).*[^ \n] +#.*$", block, re.MULTILINE)
    assert found == []


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_can_read_the_commands(page, shell):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    for language, block in blocks(page):
        if language == "bash":
            done = subprocess.run([shell, "-n"], input=block, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, ""), block


# ----------------------------------------------------------------------- names

BUILD_NANOGPTS = {"NANOGPT_SCALE_INIT"}


@pytest.mark.parametrize("page", ["lecture.md", "recipes.md"])
def test_the_names_on_a_page_are_those_of_the_code(page):
    code = ""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("runtime/*.py")]:
        code += path.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", code))

    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names = set(re.findall(r"`([A-Za-z_]\w*)`", text)) - BUILD_NANOGPTS
    names = {name for name in names if not re.fullmatch("[0-9a-f]{7}", name)}       # a commit
    assert len(names) > 20
    assert names <= words, names - words
