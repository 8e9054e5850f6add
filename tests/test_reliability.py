"""Nothing lost: kills, signals, restarts by torchrun, full disks, data and checkpoints that changed, in real processes."""
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers import ENV, ROOT, command, logged, run

import train_gpt2
from fineweb import RunError, UserError, replace_file, write_shard
from model import load_model, read_checkpoint

fcntl = pytest.importorskip("fcntl")

# Bytes instead of GPT-2's tokens: 120 steps take a second. 36 steps are an epoch, of three shards of odd lengths.
BYTES = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--vocab_size", "256", "--dtype", "float32",
         "--total_batch_size", "256", "--max_steps", "120", "--warmup_steps", "5", "--hellaswag_every", "0", "--val_every", "20",
         "--val_tokens", "1000", "--sample_every", "0", "--checkpoint_every", "10", "--keep_checkpoints", "2"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tokens = np.frombuffer((ROOT / "input.txt").read_bytes()[:12_001], dtype=np.uint8).astype(np.uint16)
    for i, (a, b) in enumerate(((0, 2500), (2500, 6000), (6000, 7517), (7517, 12001))):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The run that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "log"
    run("--data", data, *BYTES, "--out", out)
    return out


@pytest.fixture(scope="session")
def whole_speedrun(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole_speedrun") / "log"
    run("--data", data, *BYTES, "--recipe", "speedrun", "--out", out)
    return out


@pytest.fixture(params=["gpt2", "speedrun"])
def recipe_and_whole(request):
    return request.param, request.getfixturevalue({"gpt2": "whole", "speedrun": "whole_speedrun"}[request.param])


def same_end(out, whole, step=120):
    """The log byte for byte, weights and moments bit for bit, and nothing else in the folder."""
    assert (out / "log.txt").read_bytes() == (whole / "log.txt").read_bytes()
    a, b = (read_checkpoint(folder / f"checkpoint_{step:06d}.pt") for folder in (whole, out))
    assert a["model"].keys() == b["model"].keys() and all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    for before, after in zip(a["optimizers"], b["optimizers"], strict=True):
        for i, entry in before["state"].items():
            assert all(torch.equal(entry[key], after["state"][i][key]) for key in entry)
    assert not list(out.glob("*.tmp"))


def run_until(step, flags, then, processes=1, **kwargs):
    """Starts a run, calls then(process) at the line of `step`, and returns (exit code, stdout, stderr)."""
    with subprocess.Popen(command(*flags, processes=processes, **kwargs), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=ENV, start_new_session=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if (found := re.match(r"step +(\d+) ", line)) and int(found[1]) >= step:
                then(process)
                break
        stdout, stderr = process.communicate(timeout=120)
        return process.returncode, "".join(lines) + stdout, stderr


def test_killed_at_random_moments_it_ends_bit_for_bit_as_the_run_that_was_not(data, recipe_and_whole, tmp_path):
    """SIGKILL and SIGTERM in turn, over shard edges and epochs; before the first step too."""
    recipe, whole = recipe_and_whole
    dice = random.Random(7)

    def kill(number):
        def then(process):
            time.sleep(dice.uniform(0, 0.05))
            process.send_signal(number)
        return then

    flags, step = ["--data", data, *BYTES, "--recipe", recipe, "--out", tmp_path / "log"], 0
    for i in range(6 if recipe == "gpt2" else 4):
        code, stdout, stderr = run_until(step, flags, kill((signal.SIGKILL, signal.SIGTERM)[i % 2]))
        assert code in (-signal.SIGKILL, 0) and not stderr, stderr
        assert ("stopped by SIGTERM" in stdout and "the same command goes on" in stdout) or i % 2 == 0 or "done: 120" in stdout
        step = max(logged(tmp_path / "log"), default=0) + dice.randrange(1, 25)
    run(*flags)
    same_end(tmp_path / "log", whole)
    # and once more: nothing is left to do, and what is not given comes from the checkpoint
    assert "done: 120 steps" in run("--data", data, "--out", tmp_path / "log").stdout
    same_end(tmp_path / "log", whole)


def test_a_stop_saves_before_an_evaluation_that_is_due_and_the_next_run_makes_it(data, tmp_path):
    flags = ["--data", data, *BYTES, "--max_steps", 30, "--val_every", 1]
    run(*flags, "--out", tmp_path / "whole")
    code, stdout, _ = run_until(12, [*flags, "--out", tmp_path / "cut"], lambda process: process.send_signal(signal.SIGUSR1))
    assert code == 0
    stopped = train_gpt2.checkpoints(tmp_path / "cut")[-1][0]
    assert max(logged(tmp_path / "cut", "val")) == stopped - 1
    run(*flags, "--out", tmp_path / "cut")
    same_end(tmp_path / "cut", tmp_path / "whole", 30)


@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_a_pipe_that_closes_stops_the_run_which_saves_first(number, data, whole, tmp_path):
    """`| head` that has enough; `| tee` that got the same Ctrl-C."""
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    with subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        next(line for line in process.stdout if line.startswith("step    13 "))
        process.stdout.close()
        if number:
            process.send_signal(number)
        assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
    assert 13 < train_gpt2.checkpoints(tmp_path / "log")[-1][0] < 120
    run(*flags)
    same_end(tmp_path / "log", whole)


AT_THE_END = """
import atexit, os
if "RANK" in os.environ:
    def left(what, path=os.environ["ENDS"], rank=os.environ["RANK"], open=os.open, create=os.O_CREAT):
        open(f"{path}/{what}.{rank}", create)
    class Finalized:
        def __del__(self, left=left):
            left("finalization")
    alive = Finalized()
    atexit.register(left, "atexit")
"""


def test_a_signal_to_all_of_several_processes_is_agreed_on_saved_and_gone_on_from(data, tmp_path):
    flags = ["--data", data, *BYTES, "--max_steps", 40]
    site = tmp_path / "site"
    site.mkdir()
    site.joinpath("sitecustomize.py").write_text(AT_THE_END)
    run(*flags, "--out", tmp_path / "whole", processes=2, env={**ENV, "PYTHONPATH": str(site), "ENDS": str(site)})
    # a gloo thread may abort the process in Python's finalization: ranks do what is registered for the end, and leave before it
    assert sorted(path.name for path in site.glob("*.*[0-9]")) == ["atexit.0", "atexit.1"]
    # to the group, as a terminal sends it: torchrun sends it on, so that it comes twice
    run_until(13, [*flags, "--out", tmp_path / "cut"], lambda process: os.killpg(process.pid, signal.SIGINT), processes=2)
    assert 13 < train_gpt2.checkpoints(tmp_path / "cut")[-1][0] < 40
    # to torchrun alone, as Slurm's --signal=TERM sends it
    run_until(25, [*flags, "--out", tmp_path / "cut"], lambda process: process.send_signal(signal.SIGTERM), processes=2)
    assert 25 < train_gpt2.checkpoints(tmp_path / "cut")[-1][0] < 40
    run(*flags, "--out", tmp_path / "cut", processes=2)
    same_end(tmp_path / "cut", tmp_path / "whole", 40)


def test_a_second_interrupt_stops_at_once(data, tmp_path):
    def twice(process):
        process.send_signal(signal.SIGSTOP)             # both arrive before it can end by itself
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)

    # one step takes seconds here, so that the second interrupt finds it at work
    slow = ["--n_embd", 256, "--total_batch_size", 65536]
    code, stdout, stderr = run_until(0, ["--data", data, *BYTES, *slow, "--out", tmp_path / "log"], twice)
    assert code == 130 and "stopped by" not in stdout and not train_gpt2.checkpoints(tmp_path / "log")


def test_a_run_goes_on_with_other_processes_and_micro_batches_as_it_would_have_gone(data, recipe_and_whole, tmp_path):
    recipe, whole = recipe_and_whole
    flags = ["--data", data, *BYTES, "--recipe", recipe, "--out", tmp_path / "log"]
    run_until(33, [*flags, "--batch_size", 4], lambda process: process.kill())
    run(*flags, "--batch_size", 2, processes=2)
    a, b = logged(whole), logged(tmp_path / "log")
    assert a.keys() == b.keys() and max(abs(a[step] - b[step]) for step in a) < (1e-4 if recipe == "gpt2" else 2e-3)


def workers(agent):
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(agent)], capture_output=True, text=True).stdout.split()]


def test_torchrun_brings_a_run_back_whose_ranks_are_killed(data, tmp_path):
    """--max_restarts: rank 0 is killed, then rank 1; it ends as if nothing had happened."""
    flags = ["--data", data, *BYTES, "--max_steps", 40]
    run(*flags, "--out", tmp_path / "whole", processes=2)
    torchrun = ["--standalone", "--max_restarts=3"]
    with subprocess.Popen(command(*flags, "--out", tmp_path / "log", processes=2, torchrun=torchrun),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        victims = [(14, 0), (27, 1)]
        for line in process.stdout:
            if victims and line.startswith(f"step {victims[0][0]:5d}"):
                os.kill(workers(process.pid)[victims.pop(0)[1]], signal.SIGKILL)
        stderr = process.communicate(timeout=120)[1]
        assert process.returncode == 0, stderr
    assert not victims and stderr.count("another process was killed") == 2
    same_end(tmp_path / "log", tmp_path / "whole", 40)


def test_after_a_restart_by_torchrun_resume_never_or_a_path_is_not_obeyed_a_second_time(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "log")
    newest = tmp_path / "log/checkpoint_000120.pt"

    def choice(resume, restarted):
        return train_gpt2.choose_checkpoint(train_gpt2.Config(out=str(tmp_path / "log"), resume=resume), restarted)

    assert choice("never", False) is None and choice("a.pt", False).name == "a.pt" and choice("auto", False) == newest
    assert choice("never", True) == choice("a.pt", True) == choice("auto", True) == newest
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another job")         # a checkpoint of before: not made by this command
    assert choice("never", True) is None and choice("a.pt", True).name == "a.pt"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def two_machines(flags, port):
    """Two agents of torchrun over loopback, each with a process of its own and its own flags."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
                f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1", str(ROOT / "train_gpt2.py")]
    return [subprocess.Popen([sys.executable, *torchrun, *map(str, own)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, env=ENV) for own in flags]


def test_two_machines_train_together(data, whole, tmp_path):
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    for agent in two_machines([flags, flags], free_port()):
        output = agent.communicate(timeout=120)[0]
        assert agent.returncode == 0, output
    a, b = logged(whole), logged(tmp_path / "log")
    assert a.keys() == b.keys() and max(abs(a[step] - b[step]) for step in a) < 1e-4


@pytest.mark.parametrize("failure", ["other data", "no data", "changes under the run"])
def test_a_machine_that_fails_ends_the_job_within_seconds_and_says_why_once(failure, data, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(data, theirs)
    flags = [["--data", folder, *BYTES, "--max_steps", 3000, "--val_every", 0, "--out", tmp_path / "log"]
             for folder in (data, theirs)]
    if failure == "other data":
        write_shard(theirs / "text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
    elif failure == "no data":
        shutil.rmtree(theirs)
    agents = two_machines(flags, free_port())
    if failure == "changes under the run":
        while not train_gpt2.checkpoints(tmp_path / "log"):
            assert agents[0].poll() is None and agents[1].poll() is None
            time.sleep(0.2)
        write_shard(theirs / "text_train_000002.npy", np.zeros(1517, dtype=np.uint16))
    begin = time.monotonic()
    output = "".join(agent.communicate(timeout=120)[0] for agent in agents)
    assert time.monotonic() - begin < 60
    assert all(agent.returncode for agent in agents)
    ours = [line for line in output.splitlines() if line.startswith("train_gpt2.py: ")]
    said = {"other data": "has another content of --data", "no data": "there is no data in",
            "changes under the run": "changed during the run"}[failure]
    assert len(ours) == 1 and said in ours[0], output
    # which of the two becomes process 0 is torchrun's choice
    assert failure == "other data" or "process 1: " in ours[0] or str(theirs) in ours[0]


def limit_file_size(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_nothing_but_that_checkpoint(data, whole, tmp_path):
    flags = ["--data", data, *BYTES, "--out", tmp_path / "log"]
    run_until(25, flags, lambda process: process.send_signal(signal.SIGTERM))
    before = {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*.pt")}
    size = min(map(len, before.values()))
    result = run(*flags, code=1, preexec_fn=limit_file_size(size // 2))
    assert re.fullmatch(r"train_gpt2.py: cannot write .*checkpoint_0000\d0.pt: File too large. Make room .*\n", result.stderr)
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*") if path.suffix != ".txt"} == before
    run(*flags)
    same_end(tmp_path / "log", whole)


def test_a_full_file_system_is_told_in_one_line(data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        result = run("--data", data, *BYTES, "--out", disk / "log", "--keep_checkpoints", 0, code=1)
        kept = train_gpt2.checkpoints(disk / "log")
        assert re.fullmatch(r"train_gpt2.py: cannot write .*\.pt: No space left on device.*\n", result.stderr)
        assert kept and all(read_checkpoint(path)["step"] == step for step, path in kept) and not list(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", disk])


def shards_changed(kind, folder):
    path = folder / "text_train_000002.npy"
    tokens = np.load(path)
    if kind == "replaced":
        np.save(path, tokens[::-1].copy())
    elif kind == "one token":
        tokens[len(tokens) // 2] += 1
        np.save(path, tokens)
    elif kind == "shortened":
        np.save(path, tokens[:-40])
    elif kind == "one more":
        np.save(folder / "text_train_000004.npy", tokens)
    elif kind == "one less":
        (folder / "text_train_000003.npy").unlink()
    elif kind == "in another order":
        (folder / "text_train_000001.npy").rename(folder / "text_train_000004.npy")
    elif kind == "validation":
        np.save(folder / "text_val_000000.npy", np.load(folder / "text_val_000000.npy")[:-40])


@pytest.mark.parametrize("kind", ["replaced", "one token", "shortened", "one more", "one less", "in another order", "validation"])
def test_other_data_than_the_runs_is_refused_with_both_described(kind, data, whole, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shutil.copytree(whole, tmp_path / "log")
    shards_changed(kind, tmp_path / "data")
    with pytest.raises(UserError, match="was trained on other data: .* shard.*, and .* has .*differs was .* and is .*--init"):
        train_gpt2.train(["--data", str(tmp_path / "data"), "--out", str(tmp_path / "log"), "--max_steps", "200"])
    assert (tmp_path / "log/log.txt").read_bytes() == (whole / "log.txt").read_bytes()


def test_the_same_data_in_another_folder_and_format_is_the_same_data(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    (tmp_path / "data").mkdir()
    for path in data.iterdir():
        write_shard(tmp_path / "data" / path.with_suffix(".bin").name, np.load(path))
    assert "done: 120 steps" in run("--data", tmp_path / "data", "--out", tmp_path / "log").stdout


def test_a_second_run_in_the_same_folder_is_refused(data, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "log")
    monkeypatch.setattr(train_gpt2, "PATIENCE", 0)
    folder = os.open(tmp_path / "log", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another run is writing there"):
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log")])
    os.close(folder)
    with pytest.raises(UserError, match="--n_layer 2, not 3"):          # free again, and freed again after a mistake
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log"), "--n_layer", "3"])
    with pytest.raises(UserError, match="--n_layer 2, not 3"):
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log"), "--n_layer", "3"])


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    older = train_gpt2.checkpoints(tmp_path / "log")[0]
    (tmp_path / "log/checkpoint_000777.pt.tmp").write_bytes(b"left by a kill")
    result = run("--data", data, "--out", tmp_path / "log", "--resume", older[1])
    assert f"at step {older[0]} of 120" in result.stdout and "are now in" in result.stdout
    assert (tmp_path / "log/previous_1/checkpoint_000120.pt").read_bytes() == (whole / "checkpoint_000120.pt").read_bytes()
    assert (tmp_path / "log/previous_1/log.txt").read_bytes() == (whole / "log.txt").read_bytes()
    same_end(tmp_path / "log", whole)


def test_going_on_from_another_folders_checkpoint_leaves_that_folder_alone(data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "theirs")
    older = train_gpt2.checkpoints(tmp_path / "theirs")[0][1]
    run("--data", data, "--out", tmp_path / "log", "--resume", older)
    assert {p.name for p in (tmp_path / "theirs").iterdir()} == {p.name for p in whole.iterdir()}
    assert (tmp_path / "theirs/log.txt").read_bytes() == (whole / "log.txt").read_bytes()
    assert logged(tmp_path / "log")[119] == logged(whole)[119]


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "weights only": lambda path: torch.save({"model": load_model(path).state_dict(), "model_config": {}, "recipe": "gpt2"}, path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_refused_and_the_older_one_named(kind, data, whole, tmp_path):
    """Never passed over in silence: that would run steps again without a word."""
    shutil.copytree(whole, tmp_path / "log")
    DAMAGES[kind](tmp_path / "log/checkpoint_000120.pt")
    with pytest.raises(UserError, match="checkpoint_000120.pt.*remove it, and the same command goes on from checkpoint_000110"):
        train_gpt2.train(["--data", str(data), "--out", str(tmp_path / "log")])


def test_how_many_steps_were_passed_over_is_remembered(tmp_path):
    model = train_gpt2.GPT(train_gpt2.GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config, process = train_gpt2.Config(), train_gpt2.Process()
    state = train_gpt2.make_state(config, model, None, None, process)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizers[0].step()
    state.step, state.skipped, state.evaluated, state.best = 5, 3, 5, (1.5, 4)
    again = train_gpt2.make_state(config, model, state.content(config, {}), tmp_path / "c.pt", process)
    assert (again.step, again.skipped, again.evaluated, again.best) == (5, 3, 5, (1.5, 4))


def test_a_checkpoint_written_in_the_background_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    """Weights that change while the thread writes do not reach the file, and the embedding is in it once."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(block_size=8, vocab_size=640, n_layer=1, n_head=1, n_embd=64))
    config = train_gpt2.Config(out=str(tmp_path), keep_checkpoints=1)
    state = train_gpt2.make_state(config, model, None, None, train_gpt2.Process())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saver, may_write = train_gpt2.Saver(config, {}, None, train_gpt2.Process()), threading.Event()
    saver.background, state.step = True, 1
    write = saver._write
    monkeypatch.setattr(saver, "_write", lambda content: may_write.wait() and write(content))
    saver.save(state)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saver.finish(wait=False)
    assert not train_gpt2.checkpoints(tmp_path)
    may_write.set()
    saver.finish()
    saved = read_checkpoint(tmp_path / "checkpoint_000001.pt")["model"]
    assert all(torch.equal(saved[name], before[name]) for name in before)
    assert saved["lm_head.weight"].data_ptr() == saved["transformer.wte.weight"].data_ptr()


def test_copies_for_the_background_use_their_memory_again_and_bring_nothing_else_into_the_file(tmp_path):
    def numbers(seed, *sizes):
        return [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for size in sizes]
    copies, addresses = train_gpt2.CpuCopies(), []
    copies.PIECE = 1000
    for seed in (1, 2):
        a, b, c = numbers(seed, (3, 40), (100,), ())                        # 480 + 400 bytes fit into a piece, the rest does not
        large, tree = numbers(seed, (50, 20))[0], {"tied": [a, a], "b": b, "n": 3}
        tree |= {"c": (c, torch.tensor(7, dtype=torch.int64)), "large": large, "bits": large.bfloat16()}
        copied = copies(tree)
        addresses.append({t.data_ptr() for t in train_gpt2.tensors_of(copied).values()})
        torch.save(copied, tmp_path / "copied.pt")
        for tensor in (a, b, c, large):
            tensor.zero_()
        read = torch.load(tmp_path / "copied.pt", weights_only=True)
        fresh = numbers(seed, (3, 40), (100,), ()) + numbers(seed, (50, 20))
        found = read["tied"][0], read["b"], read["c"][0], read["large"]
        assert all(torch.equal(x, y) for x, y in zip(found, fresh, strict=True))
        assert torch.equal(read["bits"], fresh[3].bfloat16()) and read["c"][1] == 7 and read["n"] == 3
        assert read["tied"][0].data_ptr() == read["tied"][1].data_ptr()
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in train_gpt2.tensors_of(read).values())
    assert addresses[0] == addresses[1] and [len(piece) for piece in copies.pieces] == [1024, 64, 4032, 2048]
    assert copies({"b": torch.ones(2)})["b"].tolist() == [1, 1] and [len(piece) for piece in copies.pieces] == [64]


def test_what_goes_wrong_in_the_background_is_raised_at_the_next_look(tmp_path):
    model = train_gpt2.GPT(train_gpt2.GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path / "missing"))
    saver = train_gpt2.Saver(config, {}, None, train_gpt2.Process())
    saver.background = True
    saver.save(train_gpt2.make_state(config, model, None, None, train_gpt2.Process()))
    with pytest.raises(RunError, match="cannot write .*missing.*No such file"):
        saver.finish()


def test_a_write_error_that_torch_hides_is_told_as_what_it_was(tmp_path):
    """torch.save raises its own RuntimeError while it handles the OSError of the file."""
    def write(file):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")            # noqa: B904

    with pytest.raises(RunError, match="cannot write .*a.pt: No space left on device"):
        replace_file(tmp_path / "a.pt", write)
    with pytest.raises(RuntimeError, match="another"):
        replace_file(tmp_path / "a.pt", lambda file: (_ for _ in ()).throw(RuntimeError("another")))
    assert not list(tmp_path.iterdir())
