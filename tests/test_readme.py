"""The README's commands run as they stand there, at a small size, and its loop is that of train_gpt2.py."""
import re
import shlex
import shutil

from helpers import ROOT, script

README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {"train_gpt2.py": "--n_layer 1 --n_head 2 --n_embd 64 --dtype float32 --device cpu",
         "--preset": "--max_steps 2 --val_every 2 --val_tokens 512 --sample_every 0 --checkpoint_every 2",
         "--overfit": "--max_lr 0.006 --min_lr 0.006", "sample.py": "--max_new_tokens 5 --device cpu"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_commands_that_need_no_network_run(tmp_path):
    shutil.copy(ROOT / "input.txt", tmp_path)
    lines = [line.partition(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    commands = [command for line in lines for command in line.split(" && ") if command.startswith("python ")]
    here = [c for c in commands if "pytest" not in c and c != "python fineweb.py"]
    assert len(here) == 5
    for command in here:
        small = " ".join(flags for word, flags in SMALL.items() if word in command)
        done = script(*shlex.split(command)[1:], *small.split(), cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert "--overfit" not in command or "PASSED" in done.stdout


def test_the_loop_is_that_of_the_script():
    script = {line.strip() for line in (ROOT / "train_gpt2.py").read_text(encoding="utf-8").splitlines()}
    lines = [line.strip() for block in blocks("python") for line in block.splitlines()]
    others = [line for line in lines if not any(ours.startswith(line) for ours in script)]
    assert len(lines) >= 10 and not others
