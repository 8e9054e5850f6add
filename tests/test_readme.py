"""The README's commands run as they stand, at a small size, and its loop is train_gpt2.py's."""
import re
import shlex
import shutil

from helpers import ROOT, script

README = (ROOT / "README.md").read_text(encoding="utf-8")

# Flags that make a command small, where it has the word.
SMALL = {
    "train_gpt2.py": "--n_layer 1 --n_head 2 --n_embd 64 --dtype float32 --device cpu",
    "--preset": "--max_steps 2 --val_every 2 --val_tokens 512 --sample_every 0 --checkpoint_every 2",
    "--overfit": "--max_lr 0.006 --min_lr 0.006",
    "sample.py": "--max_new_tokens 5 --device cpu",
}


def blocks(language):
    """The texts of the README's blocks of code in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands_without_network():
    """The README's commands, in their order, that need neither a network nor hours."""
    found = []
    for block in blocks("bash"):
        for line in block.splitlines():
            before_comment = line.partition(" #")[0].strip()
            found += before_comment.split(" && ")

    skipped = ("python fineweb.py", "python -m pytest")     # 28 GB of text; all of the tests
    return [command for command in found if command.startswith("python ") and command not in skipped]


def small_flags(command):
    flags = []
    for word, more in SMALL.items():
        if word in command:
            flags += more.split()
    return flags


def test_the_commands_that_need_no_network_run(tmp_path):
    shutil.copy(ROOT / "input.txt", tmp_path)
    commands = commands_without_network()
    assert len(commands) == 5

    for command in commands:
        _python, *words = shlex.split(command)
        done = script(*words, *small_flags(command), cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if "--overfit" in command:
            assert "PASSED" in done.stdout


def test_the_loop_is_that_of_the_script():
    code = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    lines_of_script = [line.strip() for line in code.splitlines()]
    lines_of_readme = [line.strip() for block in blocks("python") for line in block.splitlines()]
    assert len(lines_of_readme) >= 10

    # The README leaves out the comments at the end of some lines.
    for line in lines_of_readme:
        assert any(ours.startswith(line) for ours in lines_of_script), line
