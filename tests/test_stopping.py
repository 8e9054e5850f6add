"""Stopping, wherever it comes from: Ctrl-C at any moment, a closed terminal, torchrun, a rank that hangs."""
import contextlib
import dataclasses
import os
import pty
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from helpers import ENV, HANG, ROOT, run
# ruff: noqa: F401, F811   pytest finds the fixtures data and live by their names
from test_reliability import BYTES, data, live, new_store

from model import GPT, GPTConfig
from runtime.checkpoint import Saver
from runtime.resume import PER_RANK, require_same_flags
from runtime.cli import UserError
from runtime.distributed import Process
from runtime.files import checkpoints
from runtime.heartbeat import Heartbeats
from runtime.signals import StopSignals
import runtime.checkpoint
import runtime.heartbeat
import train_gpt2

# sitecustomize.py: Ctrl-C at one moment of the process (which a shell's `&` would ignore)
AT_IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {what!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
AT_EVENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class InDestructor:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def hook(event, args, pressed=[]):
    if event == "fcntl.flock" and not pressed:
        pressed.append(True)
        {what}
sys.addaudithook(hook)
"""
AT_END = AT_IMPORT.replace("signal.raise_signal(signal.SIGINT)",
                           "import atexit; atexit.register(signal.raise_signal, signal.SIGINT)")
IN_FINALIZATION = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
class Module:
    def __del__(self, write=os.write, press=signal.raise_signal, number=signal.SIGINT):
        write(1, b"finalization\\n")
        press(number)
freed = Module()
"""


def interrupted(site, folder, script, *flags):
    """The process in which `site` presses Ctrl-C."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(site)
    return subprocess.run([sys.executable, ROOT / script, *map(str, flags)], capture_output=True, text=True,
                          timeout=HANG, cwd=folder, env={**ENV, "PYTHONPATH": str(folder)})


@pytest.mark.parametrize("script, modules", [
    ("train_gpt2.py", ["numpy", "torch", "model", "runtime.checks"]), ("sample.py", ["runtime.cli", "torch"]),
    ("hellaswag.py", ["numpy"]), ("fineweb.py", ["numpy"]), ("bench.py", ["torch"]), ("model.py", ["torch"])])
def test_ctrl_c_while_a_command_starts_is_one_line(script, modules, tmp_path):
    for module in modules:
        result = interrupted(AT_IMPORT.format(what=module), tmp_path, script)
        said = (result.returncode, result.stdout, result.stderr)
        assert said == (130, "", f"{script}: stopped by Ctrl-C\n"), module


def test_what_comes_before_ctrl_c_is_one_line_imports_nothing():
    """But what Python has imported by then: 30 ms after its start, Ctrl-C is no traceback any more."""
    code = ("import sys; before = set(sys.modules); import runtime.start\n"
            "print(*(set(sys.modules) - before - {'runtime', 'runtime.start'}))")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert not found.stdout.strip(), found


@pytest.mark.parametrize("moment", ["signal.raise_signal(signal.SIGINT)", "InDestructor()"])
def test_ctrl_c_before_the_first_step_is_one_line(moment, data, tmp_path):
    """The folder is made by then, and removed again; but a destructor cannot raise what Ctrl-C raises, and
    then the process ends at once."""
    result = interrupted(AT_EVENT.format(what=moment), tmp_path, "train_gpt2.py", "--data", data, *BYTES,
                         "--out", tmp_path / "log")
    assert (result.returncode, result.stderr) == (130, "train_gpt2.py: stopped by Ctrl-C\n")
    assert (tmp_path / "log").exists() == (moment == "InDestructor()")


def test_ctrl_c_while_a_command_ends_is_one_line(tmp_path):
    result = interrupted(AT_END.format(what="numpy"), tmp_path, "hellaswag.py", "--version")
    assert (result.returncode, result.stderr) == (130, "hellaswag.py: stopped by Ctrl-C\n")
    assert "hellaswag.py 0" in result.stdout


@pytest.mark.parametrize("flag, code", [("--version", 0), ("--model", 2)])
def test_ctrl_c_in_pythons_finalization_changes_no_exit_code(flag, code, tmp_path):
    result = interrupted(IN_FINALIZATION, tmp_path, "hellaswag.py", flag)
    assert result.returncode == code, result
    assert result.stdout.endswith("finalization\n")


def test_a_terminal_shows_that_torch_is_being_loaded(tmp_path):
    """Its import waits for that line."""
    (tmp_path / "sitecustomize.py").write_text(
        AT_IMPORT.format(what="torch").replace("signal.raise_signal(signal.SIGINT)",
                                               "import time\n            while True: time.sleep(0.01)"))
    screen, theirs = pty.openpty()
    argv = [sys.executable, ROOT / "train_gpt2.py"]
    with subprocess.Popen(argv, stderr=theirs, env={**ENV, "PYTHONPATH": str(tmp_path)}) as process:
        os.close(theirs)
        try:
            assert os.read(screen, 100) == b"train_gpt2.py: loading torch ...\r\n"
            process.send_signal(signal.SIGINT)
            assert os.read(screen, 100) == b"train_gpt2.py: stopped by Ctrl-C\r\n"
            assert process.wait(HANG) == 130
        finally:
            process.kill()
            os.close(screen)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_stops_a_run_which_saves_but_not_one_under_nohup(nohup, data, tmp_path, live):
    screen, theirs = pty.openpty()
    # the tests may run under nohup themselves
    told = signal.SIG_IGN if nohup else signal.SIG_DFL
    it = live("--data", data, *BYTES, "--max_steps", 30, "--out", tmp_path / "log", hold=[13], stdout=theirs,
              stderr=theirs, preexec_fn=lambda: signal.signal(signal.SIGHUP, told))
    os.close(theirs)
    it.stands_before(13)
    os.close(screen)
    it.process.send_signal(signal.SIGHUP)
    it.go_on(13)
    assert it.process.wait(HANG) == 0
    newest = checkpoints(tmp_path / "log")[-1][0]
    assert newest in ([30] if nohup else range(13, 30))


def test_under_torchrun_a_late_second_signal_does_not_stop_at_once(data, tmp_path, live):
    it = live("--data", data, *BYTES, "--out", tmp_path / "log", hold=[12],
              env={**ENV, "TORCHELASTIC_RUN_ID": "1"})
    it.stands_before(12)
    it.process.send_signal(signal.SIGTERM)
    it.until(lambda: "SIGTERM: stopping at the next" in it.stdout())
    assert "a second" not in it.stdout()
    time.sleep(1.1)                     # before that it counts as the same one, come twice
    it.process.send_signal(signal.SIGTERM)
    it.go_on(12)
    assert it.end()[0] == 0 and checkpoints(tmp_path / "log")[-1][0] >= 12


def test_sigusr2_saves_and_the_run_goes_on(data, tmp_path, live):
    flags = ["--data", data, *BYTES, "--checkpoint_every", 0, "--max_steps", 8]
    alone = live(*flags, "--out", tmp_path / "alone", hold=[3])
    two = live(*flags, "--checkpoint_minutes", 1000, "--shard_optimizer", "--out", tmp_path / "two", hold=[3],
               processes=2)
    for it, ranks in ((alone, [0]), (two, [0, 1])):
        os.kill(it.stands_before(3, ranks)[-1], signal.SIGUSR2)         # rank 1 of two
        it.go_on(3)
    assert alone.end()[0] == two.end()[0] == 0
    assert [step for step, _ in checkpoints(tmp_path / "alone")] == [4]
    # the question of step 3 was answered by then; checkpoints are on, so the last step has one, too
    assert [step for step, _ in checkpoints(tmp_path / "two")] == [5, 8]
    assert "SIGUSR2: saving before the next step" in alone.stdout()


def test_checkpoint_minutes_count_from_the_last_checkpoint():
    process = Process()
    signals = StopSignals(process)
    assert not signals.save_asked(10)
    process.last_save -= 601
    assert not signals.save_asked(0) and signals.save_asked(10) and not signals.save_asked(10)
    process.last_save -= 601
    assert signals.save_asked(10)
    signals.requests += 2
    assert signals.save_asked(10) and not signals.save_asked(10)


def test_a_checkpoint_slower_than_torchruns_patience_is_warned_of_once(tmp_path, monkeypatch, capsys):
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    config = train_gpt2.Config(out=str(tmp_path))
    state = train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), Process())
    for slow, job, lines in ((20, "1", 0), (0, "", 0), (0, "1", 1)):
        monkeypatch.setattr(runtime.checkpoint, "SLOW", slow)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        if not job:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        process = Process(last_save=0.0)
        saver = Saver(config, {}, None, process)
        for state.step in (1, 2):
            saver.save(state)
        assert process.last_save > 0.0          # --checkpoint_minutes counts from there
        assert capsys.readouterr().out.count("give it --shutdown_timeout 110 or more") == lines


def test_the_docs_give_torchrun_more_time_than_its_30_seconds():
    from torch.distributed.run import get_args_parser
    text = (ROOT / "docs/running.md").read_text().replace("\\\n", " ")
    commands = [line.split("torchrun ", 1)[1].split() for line in text.split("\n")
                if "torchrun --nnodes" in line]
    assert len(commands) == 2
    for words in commands:
        words = ["1" if "SLURM_NNODES" in word else word for word in words]
        assert get_args_parser().parse_args(words).shutdown_timeout == 110


# two heartbeats a second, and a rank is missed after four without one
SOON = "\nimport runtime.heartbeat\nruntime.heartbeat.EVERY, runtime.heartbeat.SILENT = 0.5, 4.0\n"


def test_a_rank_that_hangs_is_named_and_after_rank_timeout_the_run_ends(data, tmp_path, live):
    it = live("--data", data, *BYTES, "--max_steps", 40, "--rank_timeout", 0.4, "--out", tmp_path / "log",
              hold=[5, 12], processes=2, patch=SOON)
    first, pid = it.stands_before(5, [0, 1])
    os.kill(pid, signal.SIGSTOP)
    it.go_on(5)                                                 # rank 0, which waits in a collective
    missed = rf"train_gpt2.py: process 1 \(pid {pid} on .*\) has not answered for \d.* --rank_timeout 0.4 "
    it.until(lambda: re.search(missed, it.stderr()))
    os.kill(pid, signal.SIGCONT)
    it.until(lambda: "train_gpt2.py: process 1 answers again\n" in it.stderr())
    it.stands_before(12, [0, 1])
    os.kill(pid, signal.SIGSTOP)
    it.go_on(12)

    def gone():
        try:
            os.kill(first, 0)
        except ProcessLookupError:
            return True
    it.until(gone)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)                            # torchrun does that after 30 seconds
    code, _, stderr = it.end()
    assert re.search(rf"rank +: 0 .*\n +exitcode +: 1 \(pid: {first}\)", stderr), stderr
    ours = [line for line in stderr.splitlines() if line.startswith("train_gpt2.py: ")]
    assert code == 1 and checkpoints(tmp_path / "log")[-1][0] == 10
    assert re.match(missed, ours[-2])
    assert re.match(r".* process 1 \(pid .* \(--rank_timeout 0.4\): the checkpoints are whole", ours[-1])


# a compiled model whose first call on process 1 waits for a file, and then does what `end` says
COMPILES = """
import os, time, torch, runtime.device, runtime.progress
runtime.progress.QUIET = 0.1
class Compiled(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self._orig_mod, self.compiled = model, os.environ["RANK"] == "0"
    def forward(self, *args):
        while not self.compiled:
            time.sleep(0.02)
            if os.path.exists({file!r}):
                self.compiled = True
                {end}
        return self._orig_mod(*args)
runtime.device.compile_model = lambda config, model, process: Compiled(model)
"""


@pytest.mark.parametrize("flags, end", [
    (["--no_check_compile"], "pass"), ([], "raise TypeError('no compiler')")])
def test_no_rank_trains_before_all_have_compiled_and_a_line_says_what_it_waits_for(flags, end, data, tmp_path,
                                                                                   live):
    """Without the comparison too, and where one rank falls back to eager mode. So a slow compiler costs no
    collective of the first step its time."""
    it = live("--data", data, *BYTES, "--max_steps", 2, "--out", tmp_path / "log", *flags, hold=[0],
              processes=2, patch=COMPILES.format(file=str(tmp_path / "compiled"), end=end))
    it.until(lambda: re.search(r"^compiling: .* so far$|tokens a step", it.stdout(), re.M))
    assert "tokens a step" not in it.stdout() and not (it.folder / "rank0.0").exists()      # what comes next
    (tmp_path / "compiled").touch()
    it.stands_before(0, [0, 1])
    it.go_on(0)
    code, stdout, stderr = it.end()
    assert code == 0 and "done: 2 steps" in stdout, stderr
    assert ("falling back to eager mode" in stdout) == (end != "pass")


class Store(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]

    def get(self, key, default=None):
        return super().get(key, default)

    def check(self, keys):
        return all(key in self for key in keys)


def test_who_tells_of_ranks_that_do_not_answer_and_a_suspended_one_blames_nobody(monkeypatch):
    """Four ranks in one process, and a clock of ours. Each looks every five seconds."""
    now, said, store = [0.0], [], Store()
    monkeypatch.setattr(runtime.heartbeat, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    ranks = [Heartbeats(store, rank, 4, 600.0, lambda line, rank=rank: said.append((rank, line)))
             for rank in range(4)]

    def look(seconds, *alive):
        errors = []
        for _ in range(seconds // 5):
            now[0] += 5
            errors += [(rank, error) for rank in alive if (error := ranks[rank].look())]
        return errors
    assert not look(300, 0, 1, 2, 3) and not said
    # the lowest that answers, which looks at 1 once 0 is silent
    assert not look(140, 2, 3) and [rank for rank, _ in said] == [2, 2]
    assert "process 0 (pid" in said[0][1] and "process 1 (pid" in said[1][1]
    assert not look(10, 0, 2, 3)
    assert said[2:] == [(2, "process 0 answers again")]
    assert not look(80, 0, 2, 3) and len(said) == 4 and said[3][0] == 0         # of process 1
    errors = look(600, 0, 2, 3)
    assert errors and {rank for rank, _ in errors} == {0} and "process 1 (pid" in errors[0][1]
    # all were suspended for an hour, and rank 0 is the first to run again
    assert not look(100, 0, 1, 2, 3)[20:]
    del said[:]
    now[0] += 3600
    assert not ranks[0].look() and not look(100, 0, 1, 2, 3) and not said
    ranks[3].leave()                                            # done, while others still upload or write
    assert not look(1000, 0, 1, 2) and not said


def test_flags_that_must_be_the_same_on_all_ranks_are_compared():
    config, given = train_gpt2.parse_flags(["--batch_size", "4"])
    values = dataclasses.asdict(config)
    assert PER_RANK < values.keys()

    def compare(explicit=given, **others):
        require_same_flags([(values, given)] * 2 + [(values | others, explicit)])
    compare()
    compare(**{name: "another" for name in PER_RANK})
    for name in values.keys() - PER_RANK:
        with pytest.raises(UserError, match=f"process 2 has --{name} another.* process 0 has --{name} "):
            compare(**{name: "another"})
    # the same value, but on a resume the checkpoint's wins over the one that was not given
    with pytest.raises(UserError, match="process 2 has --max_lr 0.0006, and process 0 has .* by default"):
        compare(explicit=given | {"max_lr"})


def two_ranks(live, flags, folders):
    """Two processes without torchrun, each with flags and a working directory of its own; their ends."""
    store = new_store()
    env = {**ENV, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [live(*flags[rank], env=env | {"RANK": str(rank)}, cwd=folders[rank]) for rank in (0, 1)]
    return [it.end() for it in ranks]


def test_two_machines_are_refused_other_flags_and_an_out_that_they_do_not_share(data, tmp_path, live):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    flags = ["--data", data, *BYTES, "--max_steps", 4, "--out", "log"]
    ends = two_ranks(live, [[*flags, "--batch_size", 2], flags], folders)
    assert [code for code, *_ in ends] == [2, 2]
    assert "".join(stderr for *_, stderr in ends) == (
        "train_gpt2.py: process 1 has --batch_size auto by default, and process 0 has --batch_size 2: give "
        "every machine the same\n")
    run(*flags, cwd=folders[0])
    ends = two_ranks(live, [flags, flags], folders)
    assert [code for code, *_ in ends] == [2, 2]
    said = ("train_gpt2.py: process 1: the checkpoint log/checkpoint_000004.pt of process 0 is not there on "
            ".* that all machines share")
    assert re.match(said, "".join(stderr for *_, stderr in ends))
