"""train_gpt2.py: the loop against a plain one, processes, resume, evaluation, mistakes, the sanity run."""
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig, load_model
from runtime.batch_size import choose_micro_batch, largest_that_fits
from benchmarks.timing import Setting
from runtime.checkpoint import Saver
from runtime.batch_size import allowed_micro_batches
from runtime.checks import check_memory
from runtime.cli import UserError
from runtime.device import peak_flops
from runtime.distributed import Process, setup_process
from runtime.forecast import ModelSize
from runtime.files import checkpoints
from runtime.shards import first_words, write_shard
from runtime.signals import StopSignals
from runtime.tokenizer import EOT, encode
from runtime.weights import read_checkpoint
from train_gpt2 import Config, warmup_cosine
import fineweb
import runtime.batch_size
import train_gpt2
from helpers import ENV, HANG, ROOT, hellaswag_file, logged, run

# Bytes instead of GPT-2's tokens: 25 steps take a sixth of the time. SPOKEN is for what samples or is scored,
# which needs GPT-2's vocabulary.
TINY = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--dtype", "float32",
        "--total_batch_size", "256", "--max_steps", "25", "--warmup_steps", "5", "--hellaswag_every", "0",
        "--vocab_size", "256"]
SPOKEN = ["--vocab_size", "50304", "--n_layer", "1", "--n_embd", "16", "--total_batch_size", "64"]
QUIET = ["--val_every", "0", "--sample_every", "0", "--checkpoint_every", "0"]


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Shakespeare's bytes in three training shards of odd lengths and one for validation."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.frombuffer((ROOT / "input.txt").read_bytes()[:12_001], dtype=np.uint8).astype(np.uint16)
    for i, (a, b) in enumerate(((0, 3000), (3000, 4517), (4517, 9000), (9000, 12001))):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Weights to start from, as the smallest checkpoint that load_model reads."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=32, vocab_size=256, n_layer=2, n_head=2, n_embd=32))
    path = tmp_path_factory.mktemp("start") / "start.pt"
    torch.save({"model": model.state_dict(), "model_config": dict(vars(model.config)), "recipe": "gpt2"},
               path)
    return path


@pytest.fixture(scope="session")
def file_order_run(shards, start, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "log"
    run("--data", shards, "--init", start, *TINY, *QUIET, "--batch_size", 2, "--no_shuffle", "--out", out)
    return logged(out)


@pytest.fixture(scope="session")
def spoken_run(shards, tmp_path_factory):
    """Of a model with GPT-2's vocabulary."""
    out = tmp_path_factory.mktemp("spoken") / "log"
    run("--data", shards, *TINY, *SPOKEN, *QUIET, "--batch_size", 2, "--no_shuffle", "--max_steps", 12,
        "--out", out)
    return logged(out)


def test_25_steps_equal_a_plain_loop(shards, start, file_order_run):
    """Written out here once more, in the plainest way: file order, accumulation, clipping, AdamW, warm-up
    and cosine."""
    model = load_model(start)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    rows = []
    for path in sorted(shards.glob("*_train_*")):
        tokens = torch.from_numpy(np.load(path).astype(np.int64))
        rows += [tokens[i:i + 33] for i in range(0, len(tokens) - 32, 32)]
    for step in range(25):
        batch = torch.stack([rows[i % len(rows)] for i in range(8 * step, 8 * step + 8)])
        losses = []
        for micro in batch.split(2):
            logits, _ = model(micro[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten())
            (loss / 4).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        progress = (step - 5) / 20
        lr = 6e-4 * (step + 1) / 5 if step < 5 else 6e-5 + 0.5 * (1 + math.cos(math.pi * progress)) * 5.4e-4
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert file_order_run[step] == pytest.approx(sum(losses) / 4, abs=1e-4), step
    assert len(file_order_run) == 25 and file_order_run[24] < file_order_run[0] - 0.2


def test_evaluation_samples_and_checkpoints_do_not_change_the_losses(shards, spoken_run, tmp_path):
    shown = run("--data", shards, *TINY, *SPOKEN, "--batch_size", 2, "--no_shuffle", "--out",
                tmp_path / "log", "--max_steps", 12,
                "--val_every", 5, "--val_tokens", 1000, "--sample_every", 4, "--checkpoint_every", 5).stdout
    assert logged(tmp_path / "log") == spoken_run and len(spoken_run) == 12
    assert sorted(logged(tmp_path / "log", "val")) == [0, 5, 10, 12]
    assert shown.count("sample 0: Hello, I'm a language model,") == 3


@pytest.mark.parametrize(("processes", "flags"), [
    (2, ["--batch_size", 2, "--loss_chunk", 50, "--recompute"]), (1, ["--batch_size", 8, "--loss_chunk", 0])])
def test_other_processes_and_micro_batches_give_the_same_losses(shards, start, file_order_run, tmp_path,
                                                                processes, flags):
    run("--data", shards, "--init", start, *TINY, "--no_shuffle", "--out", tmp_path / "log", *flags,
        "--val_every", 10, "--val_tokens", 2000, "--sample_every", 0, "--checkpoint_every", 0,
        processes=processes)
    losses = logged(tmp_path / "log")
    assert len(losses) == 25
    assert max(abs(losses[s] - file_order_run[s]) for s in losses) < 1e-4


def test_validation_is_the_mean_over_its_tokens_on_one_and_two_processes(shards, start, tmp_path):
    tokens = torch.from_numpy(np.load(next(shards.glob("*_val_*"))).astype(np.int64))
    rows = torch.stack([tokens[i:i + 33] for i in range(0, 31 * 32, 32)])  # 1000 // 32 = 31 windows
    with torch.no_grad():
        expected = load_model(start)(rows[:, :-1], rows[:, 1:])[1].item()
    for processes in (1, 2):
        out = tmp_path / f"log{processes}"
        run("--data", shards, "--init", start, *TINY, "--max_steps", 1, "--out", out, "--batch_size", 4,
            "--val_every", 1, "--val_tokens", 1000, "--sample_every", 0, "--checkpoint_every", 0,
            processes=processes)
        assert logged(out, "val")[0] == pytest.approx(expected, abs=1e-5)


def test_checkpoints_hold_what_the_contract_names_and_only_the_newest_and_the_best_stay(shards, tmp_path):
    out = tmp_path / "log"
    flags = ["--data", shards, *TINY, "--val_every", 5, "--val_tokens", 500, "--checkpoint_every", 5,
             "--sample_every", 0,
             "--out", out]
    run(*flags, "--keep_checkpoints", 2)
    best = min(logged(out, "val").items(), key=lambda item: item[1])[0]
    kept = {p.name for p in out.glob("*.pt")}
    assert kept == {f"checkpoint_{step:06d}.pt" for step in {20, 25, best}}
    checkpoint = torch.load(out / "checkpoint_000025.pt", weights_only=True)
    assert {"model", "config", "recipe", "step", "val_loss", "optimizers", "rng"} <= checkpoint.keys()
    assert checkpoint["step"] == 25 and checkpoint["recipe"] == "gpt2"
    assert checkpoint["config"]["total_batch_size"] == 256
    assert checkpoint["val_loss"] == pytest.approx(logged(out, "val")[25], abs=1e-6)
    assert isinstance(load_model(out / "checkpoint_000025.pt"), GPT)
    # --resume never starts afresh and keeps what was there
    log = (out / "log.txt").read_bytes()
    run(*flags, "--resume", "never", "--max_steps", 5)
    assert (out / "previous_1/log.txt").read_bytes() == log
    assert {p.name for p in (out / "previous_1").glob("*.pt")} == kept
    assert [p.name for p in out.glob("*.pt")] == ["checkpoint_000005.pt"]


def test_finetuning_starts_where_the_weights_ended(shards, tmp_path):
    """Those of a run's best checkpoint, and of an exported folder, which has no rows of padding."""
    base, small = tmp_path / "base", ["--total_batch_size", 64, "--val_tokens", 1000, "--dtype", "float32",
                                          "--max_steps", 1]
    run("--data", shards, *TINY, *SPOKEN, "--max_steps", 2, "--val_every", 1, "--checkpoint_every", 1,
        "--sample_every", 0, "--max_lr", 1e-2, "--val_tokens", 1000, "--out", base)
    load_model(base / "best").save_pretrained(tmp_path / "exported")
    for source, tolerance in ((base / "best", 2e-6), (tmp_path / "exported", 2e-3)):
        out = tmp_path / f"from {source.name}"
        result = run("--preset", "finetune", "--init", source, "--data", shards, *small, "--out", out,
                     "--sample_prompt", "ROMEO:")
        assert logged(out, "val")[0] == pytest.approx(min(logged(base, "val").values()), abs=tolerance)
        assert result.stdout.count("sample 0: ROMEO:") == 1
        assert [p.name for p in out.glob("*.pt")] == ["checkpoint_000001.pt"]


# -----------------------------------------------------------------------------
# what samples begin with

POEM = "  \n\r\n \nSing, O  goddess, the anger\tof Achilles son of Peleus\n" + "and more of it. " * 300


def own_text(folder, *texts, before=()):
    """As fineweb.py --input makes it: `before` in the validation shard, `texts` in the one of training."""
    folder.mkdir()
    for name, documents in (("val_000000", before), ("train_000001", texts)):
        tokens = [token for text in documents for token in (EOT, *encode(text))] or [13] * 99
        write_shard(folder / f"text_{name}.npy", np.array(tokens, dtype=np.uint16))
    return folder


@pytest.mark.parametrize("texts, words", [
    ([POEM], "Sing, O goddess, the anger"),
    (["", " \n", "Twice 1"], "Twice 1"),
    (["One\u2028two"], "One"),
    (["Don't-stop-now, it’s fine: go on-and-on-and-on"], "Don't-stop-now, it’s fine: go"),
    (["antidisestablishmentarianism " * 3], "antidisestablishmentarianism"),
    (["x" * 99], "x" * 40),
    (["春眠不覺曉處處聞啼鳥" * 20], "春眠不覺曉處處聞啼鳥" * 4),
    (["🙂" * 9 + "a" * 500], "🙂" * 9 + "a" * 31),
    (["𓀀" * 100], "𓀀" * 40),
    (["𓀀 " + " \n" * 300 + "and more"], "𓀀"),
    ([" \n" * 300], "")], ids="poem empty line words long letters chinese emoji hieroglyphs one none".split())
def test_the_first_words_are_those_of_the_first_line_and_whole_characters(texts, words, tmp_path):
    assert first_words(own_text(tmp_path / "a", *texts)) == words


def test_first_words_need_a_text_of_the_users_own(shards, tmp_path):
    folder = own_text(tmp_path / "a", POEM)
    write_shard(folder / "text_train_000001.npy", np.array([EOT, 60000], dtype=np.uint16))
    assert first_words(folder) == "", "which is damaged, and the run says so"
    folder = own_text(tmp_path / "b", POEM)
    (folder / "text_train_000001.npy").rename(folder / "edufineweb_train_000001.npy")
    assert first_words(folder) == first_words(shards) == first_words(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("flags", [[], ["--part", "0/1"]], ids=str)
def test_fineweb_makes_shards_with_the_first_words_of_the_text(flags, tmp_path, capsys):
    fineweb.main(["--input", str(ROOT / "input.txt"), "--out", str(tmp_path / "a"), *flags])
    assert first_words(tmp_path / "a") == "First Citizen:"


def test_samples_begin_with_the_texts_own_words_unless_a_prompt_is_given(shards, tmp_path, capsys):
    poem = own_text(tmp_path / "a", POEM, before=[POEM])

    def samples(data, *flags):
        flags = ["--data", data, *TINY, *SPOKEN, "--max_steps", 1, "--val_every", 0, "--no_plot", *flags]
        assert train_gpt2.train(list(map(str, flags))) == 0
        shown = capsys.readouterr()
        assert "warning" not in shown.out and shown.err == ""
        return [line.split(": ", 1)[1] for line in shown.out.splitlines() if line.startswith("sample ")]

    own, usual = "Sing, O goddess, the anger", "Hello, I'm a language model,"
    for text in samples(poem, "--out", tmp_path / "1", "--preset", "shakespeare"):
        assert text.startswith(own)
    for text in samples(shards, "--out", tmp_path / "2"):
        assert text.startswith(usual)
    for text in samples(poem, "--out", tmp_path / "3", "--sample_prompt", ""):      # a new document
        assert own not in text and usual not in text
    # an older run has its prompt in the checkpoint, and goes on with it
    for out, said, prompt in (("4", usual, ["--sample_prompt", usual]), ("1", own, [])):
        first = samples(poem, "--out", tmp_path / out, *prompt)
        second = samples(poem, "--out", tmp_path / out, "--max_steps", 2)
        assert len(second) == 4 and all(text.startswith(said) for text in first + second)
        assert read_checkpoint(tmp_path / out / "checkpoint_000002.pt")["config"]["sample_prompt"] == said
    assert samples(poem, "--out", tmp_path / "1", "--max_steps", 3, "--sample_prompt", "A")[0][0] == "A"


def compiler_works():
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.zeros(8))
    except Exception:           # Inductor and the compiler raise many types
        return False
    return True


def test_compile_goes_together_with_hellaswag_and_samples(shards, spoken_run, tmp_path):
    """On two processes; tests/null_gpu has one. Without Inductor's C++, which takes most of the time."""
    if not compiler_works():
        pytest.skip("torch.compile finds no C++ compiler here")
    (tmp_path / "sitecustomize.py").write_text(
        "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='aot_eager')\n")
    result = run("--data", shards, *TINY, *SPOKEN, "--no_shuffle", "--compile", "--out", tmp_path / "log",
                 "--batch_size", 1, "--max_steps", 6, "--val_every", 3, "--val_tokens", 1000,
                 "--sample_every", 3,
                 "--checkpoint_every", 3, "--hellaswag_every", 3,
                 "--hellaswag_data", hellaswag_file(tmp_path / "h.jsonl"), processes=2,
                 env={**ENV, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)})
    assert "torch.compile, attention" in result.stdout
    assert result.stdout.count("torch.compile was compared with eager mode") == 1
    losses = logged(tmp_path / "log")
    # another max_steps bends the cosine from step 5 on: the first steps are the eager run's
    assert max(abs(losses[s] - spoken_run[s]) for s in range(6)) < 1e-4
    hella = re.findall(r"HellaSwag accuracy: (\d+)/12=", result.stdout)
    assert len(hella) == 3 and logged(tmp_path / "log", "hella")[6] == pytest.approx(int(hella[-1]) / 12,
                                                                                     abs=1e-6)
    assert result.stdout.count("sample 3: Hello, I'm a language model,") == 2


def test_without_a_compiler_compile_falls_back_to_eager_with_one_warning(shards, start, file_order_run,
                                                                         tmp_path):
    env = {**ENV, "CXX": "/nonexistent/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = run("--data", shards, "--init", start, *TINY, *QUIET, "--no_shuffle", "--batch_size", 2,
                 "--compile",
                 "--out", tmp_path / "log", env=env, cold=True)         # Inductor asks for CXX when imported
    assert result.stdout.count("warning: torch.compile does not work here") == 1
    assert logged(tmp_path / "log") == file_order_run


def test_hellaswag_by_default_and_not_to_be_had_is_a_warning_and_asked_for_an_error(shards, tmp_path):
    default = TINY[:TINY.index("--hellaswag_every")]
    flags = ["--data", shards, *default, *SPOKEN, "--max_steps", 1, *QUIET, "--out", tmp_path / "log"]
    assert run(*flags).stdout.count("warning: continuing without HellaSwag") == 1
    stderr = run(*flags, "--hellaswag_every", 1, code=2).stderr
    assert len(stderr.splitlines()) == 1 and "HellaSwag" in stderr


def test_float16_trains_with_a_scaler_and_resumes(shards, tmp_path):
    flags = ["--data", shards, *TINY, "--n_layer", 1, "--dtype", "float16", "--total_batch_size", 64,
             "--val_every", 0,
             "--sample_every", 0, "--out", tmp_path / "log", "--max_steps", 10, "--checkpoint_every", 5,
             "--max_lr", 2e-3]
    run(*flags)
    losses = logged(tmp_path / "log")
    assert losses[9] < losses[0] - 0.1
    assert torch.load(tmp_path / "log/checkpoint_000010.pt", weights_only=True)["scaler"]["scale"] > 1
    (tmp_path / "log/checkpoint_000010.pt").unlink()
    run(*flags)
    assert logged(tmp_path / "log") == losses


def test_a_loss_that_is_not_finite_ends_the_run_with_exit_code_1(shards, tmp_path):
    result = run("--data", shards, *TINY, *QUIET, "--max_lr", "1e30", "--warmup_steps", 0, "--out",
                 tmp_path / "log", code=1)
    assert re.search(r"step \d+: loss (nan|inf)", result.stderr) and len(result.stderr.splitlines()) == 1


def test_the_console_line_is_build_nanogpts(shards, tmp_path):
    result = run("--data", shards, *TINY, *QUIET, "--max_steps", 2, "--out", tmp_path / "log")
    line = next(line for line in result.stdout.splitlines() if line.startswith("step "))
    assert re.fullmatch(r"step     0 \| loss: \d+\.\d{4} \| lr 1\.20e-04 \| norm: \d+\.\d+ \| dt: "
                        r"[0-9.]+m?s \| tok/sec: [0-9,]+ \| \d+s left", line) and len(line) <= 100
    first = (tmp_path / "log/log.txt").read_text().split()[:3]
    assert first[:2] == ["0", "train"] and f"{float(first[2]):.4f}" == re.search(r"loss: ([0-9.]+)", line)[1]


def test_overfit_takes_the_full_model_and_leaves_nothing_in_the_way(tmp_path):
    """Four of its 50 steps; .ci/run makes them all, as README's first command."""
    # on all cores; threads that wait sleep, since beside other tests those that spin cost three times the
    # work
    env = {k: v for k, v in ENV.items() if k != "OMP_NUM_THREADS"} | {"OMP_WAIT_POLICY": "PASSIVE"}
    result = run("--overfit", "--max_steps", 4, env=env, cwd=tmp_path, code=1)
    assert "124,439,808 parameters" in result.stdout
    first, last, steps = re.search(r"loss ([0-9.]+) -> ([0-9.]+) in (\d+) steps: FAILED",
                                   result.stdout).groups()
    assert 10.5 < float(first) < 11.2 and float(last) < float(first) - 2 and int(steps) == 4
    assert not list(tmp_path.iterdir()), "it writes nothing"


def test_overfit_runs_as_it_stands_on_several_processes_and_prints_no_warning(tmp_path):
    small = ["--n_layer", 1, "--n_head", 2, "--n_embd", 64, "--max_lr", 1e-2, "--min_lr", 1e-2]
    result = run("--overfit", *small, "--out", tmp_path / "two", processes=2, torchrun=True)
    assert result.stdout.endswith(
        ": PASSED\nnext: python fineweb.py --input input.txt --out data/shakespeare\n")
    assert "2 x 32 x 1 micro-step x 2 processes" in result.stdout
    # of Python's; torch has some about networks
    assert not re.search(r"\w+Warning:", result.stderr), result.stderr
    run("--overfit", *small, "--out", tmp_path / "one")
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert abs(one[0] - two[0]) < 1e-3 and abs(one[10] - two[10]) < 0.05        # the same batch, in bfloat16


def test_overfit_that_does_not_learn_fails_with_exit_code_1(tmp_path):
    result = run("--overfit", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--max_steps", 3, "--out",
                 tmp_path / "o", code=1)
    assert "FAILED" in result.stdout


def test_schedule_is_linear_then_cosine_and_never_leaves_its_bounds():
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(0, config) == pytest.approx(0.1) and warmup_cosine(9, config) == 1.0
    assert warmup_cosine(10, config) == pytest.approx(1.0)
    assert warmup_cosine(55, config) == pytest.approx(0.55)
    assert warmup_cosine(100, config) == warmup_cosine(10_000, config) == pytest.approx(0.1)
    assert warmup_cosine(0, Config(warmup_steps=0, max_lr=1.0, min_lr=0.1)) == 1.0


def test_auto_batch_size_divides_and_a_wrong_one_is_told_what_would():
    config = Config(total_batch_size=12 * 1024, sequence_length=1024)
    assert allowed_micro_batches(config, 1, "cpu") == [4] and allowed_micro_batches(config, 2,
                                                                                      "cuda:0") == [1, 2, 3,
                                                                                                    6]
    assert allowed_micro_batches(Config(total_batch_size=8192, sequence_length=8192), 1, "cpu") == [1]
    assert allowed_micro_batches(Config(sequence_length=1024), 8, "cuda:0")[-1] == 64
    assert allowed_micro_batches(Config(sequence_length=1024, batch_size="16"), 8, "cuda:0") == [16]
    with pytest.raises(UserError, match="give one of 1, 2, 3, 4, 6, 12, or auto"):
        allowed_micro_batches(Config(total_batch_size=12 * 1024, sequence_length=1024, batch_size="5"), 1,
                               "cpu")
    with pytest.raises(UserError, match="give 12288 or 14336"):
        allowed_micro_batches(Config(total_batch_size=13_000, sequence_length=1024), 2, "cpu")


@pytest.mark.parametrize("bend", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("limit", [30, 35, 100, 250, 1e9])
def test_the_largest_micro_batch_that_fits_is_found_in_few_trials(limit, bend):
    """Memory is 20 + 10 B**bend: where it is not linear the two smallest predict too much or too little."""
    tried = []

    def memory_of(B):
        tried.append(B)
        return 20 + 10 * B**bend if 20 + 10 * B**bend <= limit else math.inf

    candidates = [2**i for i in range(10)]
    found = largest_that_fits(candidates, memory_of, limit)
    fitting = [B for B in candidates if 20 + 10 * B**bend <= limit]
    assert found == fitting[-1] if bend >= 1 else found in fitting[-2:]
    assert len(tried) <= 2 + (3 if bend > 1 else 1)


def test_no_trial_is_wasted_on_a_micro_batch_that_cannot_fit():
    """GB as counted for GPT-2 124M on an 80 GB card: two sequences need hardly more than one."""
    tried = []
    memory = {1: 3.09, 2: 3.33, 16: 8.2, 32: 13.8, 64: 25.1, 128: 47.6}
    assert largest_that_fits([2**i for i in range(10)],
                             lambda B: tried.append(B) or memory.get(B, math.inf), 72) == 128
    assert tried == [1, 16, 128]


def test_cudas_allocator_leaves_large_blocks_whole_unless_the_user_has_set_it(monkeypatch):
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given in (None, *names):
        for name in names:
            monkeypatch.setenv(name, "")        # so that what is set in between is undone
            monkeypatch.delenv(name)
        if given:
            monkeypatch.setenv(given, "backend:native")
        setup_process(Config(device="cpu"))
        expected = {given: "backend:native"} if given else {names[0]: "max_split_size_mb:2048"}
        assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_a_gpu_that_holds_no_sequence_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="smaller --sequence_length"):
        largest_that_fits([1, 2, 4], lambda B: math.inf, 100)


def test_a_gpu_too_small_for_the_model_or_taken_by_others_is_refused(monkeypatch):
    config = Config(block_size=1024, vocab_size=50304)
    # 1.99 GB of weights, gradients and moments, 1.25 with a quarter of the moments
    size = ModelSize(124_475_904, 995_807_232, 0, 995_807_232, 250_000_000)
    for free, total, said in ((10, 80, None), (1.1, 1.6, "cuda:1 has 1.6 GB, .* give a smaller --n_layer or"),
                              (1.1, 80, "has 80.0 GB, of which 1.1 GB are free: .* end what else runs"),
                              (1.5, 1.6, ": give --shard_optimizer, or a smaller --n_layer or --n_embd")):
        monkeypatch.setattr(torch.cuda, "mem_get_info",
                            lambda device, free=free, total=total: (free * 1e9, total * 1e9))
        with pytest.raises(UserError, match=said) if said else nullcontext():
            check_memory(config, size, "cuda:1")


def test_what_fits_is_remembered_for_the_same_model_on_the_same_gpu(monkeypatch, tmp_path):
    """The trials themselves need a GPU (test_auto_batch_size_on_a_gpu_fits...); here what they say is made
    up."""
    tried = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(runtime.batch_size, "memory_of_step", lambda B, *_: tried.append(B) or 8 * B)
    process = Process(device="cuda:0")
    for config, expected, trials in ((Config(sequence_length=1024), 8, [1, 8]),
                                     (Config(sequence_length=1024), 8, []),
                                     (Config(sequence_length=1024, n_layer=13), 8, [1, 8]),
                                     (Config(sequence_length=1024, window=64), 8, [1, 8]),
                                     (Config(sequence_length=1024, shard_optimizer=True), 8, [1, 8])):
        assert choose_micro_batch(config, [1, 2, 4, 8, 16], None, None, None,
                                  process) == (expected, 90 - 8 * expected) and tried == trials
        tried.clear()
    key, value = next(iter(json.loads((tmp_path / "a/train_gpt2/batch_size.json").read_text()).items()))
    older = json.dumps({key: value[0]})         # as it was before the memory was remembered, too
    for content in ("[]", "{broken", json.dumps({"a": 1}), older):
        (tmp_path / "a/train_gpt2/batch_size.json").write_text(content)
        assert choose_micro_batch(Config(sequence_length=1024), [1, 2, 4, 8, 16], None, None, None,
                                  process)[0] == 8
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))       # others have the rest
    assert choose_micro_batch(Config(sequence_length=1024, n_layer=14), [1, 2, 4, 8, 16], None, None, None,
                              process)[0] == 2


def test_the_same_tokens_as_llm_cs_bin_files_train_alike(shards, start, file_order_run, tmp_path):
    for path in shards.glob("*.npy"):
        write_shard(tmp_path / f"{path.stem}.bin", np.load(path))
    run("--data", tmp_path, "--init", start, *TINY, *QUIET, "--batch_size", 2, "--no_shuffle", "--out",
        tmp_path / "log")
    assert logged(tmp_path / "log") == file_order_run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_batch_size_on_a_gpu_fits_and_changes_no_loss(shards, start, file_order_run, tmp_path):
    env = {**ENV, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = run("--data", shards, "--init", start, *TINY, *QUIET, "--no_shuffle", "--device", "cuda",
                 "--no_compile",
                 "--no_tf32", "--out", tmp_path / "log", env=env)
    assert "256 tokens a step = 8 x 32 x 1 micro-step " in result.stdout
    losses = logged(tmp_path / "log")
    assert max(abs(losses[s] - file_order_run[s]) for s in losses) < 1e-3
    assert (tmp_path / "cache" / "train_gpt2" / "batch_size.json").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recipe", list(train_gpt2.RECIPES))
def test_a_step_on_a_gpu_never_waits_for_it(recipe):
    from benchmarks import steps
    step, _ = steps.our_step(Setting(device="cuda", recipe=recipe, size="small", B=2, T=64, compile=False))
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


PEAKS = {
    "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5, "NVIDIA GH200 480GB": 989.4, "NVIDIA GB200": 2500, "NVIDIA B200": 2250,
    "NVIDIA A100-SXM4-80GB": 312, "A100-SXM4-40GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L4": 121, "NVIDIA L40S": 362, "Tesla T4": 65, "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-PCIE-32GB": 112,
    "NVIDIA RTX A6000": 154.8, "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 3080 Ti": 68.2, "NVIDIA GeForce RTX 3080": 59.5,
    **dict.fromkeys(("Some GPU 9000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti "
                     "Laptop GPU",
                     "NVIDIA GeForce RTX 2080 with Max-Q Design", "NVIDIA GeForce RTX 3080 SUPER",
                     "NVIDIA GeForce RTX 5090 D",
                     "NVIDIA RTX 6000 Ada Generation Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                     "NVIDIA H20-3e",
                     "NVIDIA A100-SXM-64GB", "NVIDIA B200 NVL", "NVIDIA L4 2")),
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_gpu_that_is_not_exactly_known_has_no_mfu_and_similar_names_are_told_apart(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops("cuda:0") == (PEAKS[name] and PEAKS[name] * 1e12) and peak_flops("cpu") is None


MISTAKES = {
    "heads": ["--n_head", "5"], "micro-batch": ["--batch_size", "3"],
    "token batch": ["--total_batch_size", "250"],
    "long sequence": ["--sequence_length", "64"], "negative rate": ["--max_lr", "-1"],
    "no number": ["--max_steps", "many"],
    "nan": ["--weight_decay", "nan"], "zero layers": ["--n_layer", "0"], "unknown flag": ["--bogus"],
    "no data": ["--data", "nowhere"],
    "no weights": ["--init", "nowhere.pt"], "no checkpoint": ["--resume", "nowhere.pt"],
    "kernel": ["--attention", "cudnn"],
    "device": ["--device", "tpu"], "dtype": ["--dtype", "int8"], "recipe": ["--recipe", "gpt5"],
    "huge vocabulary": ["--vocab_size", "70000"],
    "another recipe's flag": ["--window", "16"],
    "window beyond the sequence": ["--recipe", "speedrun", "--window", "64"],
    "flex without a GPU": ["--recipe", "speedrun", "--window", "16", "--attention", "flex"],
    "flex without a window": ["--attention", "flex"],
    "abbreviation": ["--max_step", "3"], "other shape than --init": ["--init", "START", "--n_layer", "3"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_user_error_before_anything_is_written(name, shards, start, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = [str(start) if f == "START" else f for f in MISTAKES[name]]
    with pytest.raises(UserError):
        train_gpt2.train([*TINY, *QUIET, "--data", str(shards), "--out", str(tmp_path / "log"), *flags])
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("flags", "where", "said"), [
    (["--batch_size", "4"], "train_step", "of 4 sequences: give --batch_size 2, which"),
    (["--total_batch_size", "288", "--batch_size", "9"], "train_step", "of 9 sequences: give "
     "--batch_size 3, which"),
    (["--batch_size", "1"], "train_step", "give --recompute, --loss_chunk 1024, a shorter --sequence_length, "
     "or a smaller model"),
    (["--batch_size", "1", "--loss_chunk", "64", "--recompute"], "train_step", "give a shorter "
     "--sequence_length"),
    ([], "place_model", "before the first step: end what else runs there, or give a smaller model")])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_is_out_of_memory_is_told_what_needs_less(flags, where, said, compiled, shards, tmp_path,
                                                             monkeypatch):
    def fails(*args, **how):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        raise torch._inductor.exc.InductorError(error, None) if compiled else error
    monkeypatch.setattr(train_gpt2, where, fails)
    monkeypatch.setattr(StopSignals, "install", lambda signals: signals)
    with pytest.raises(UserError, match=f"cpu is out of memory .*{said}"):
        train_gpt2.train([*TINY, *QUIET, "--data", str(shards), "--out", str(tmp_path / "log"), *flags])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_is_one_line_on_stderr(shards, tmp_path, processes):
    result = run(*TINY, "--data", tmp_path, processes=processes, torchrun=True, cold=processes == 1,
                 code=2 if processes == 1 else 1)
    ours = [line for line in result.stderr.splitlines() if line.startswith("train_gpt2.py:")]
    assert len(ours) == 1 and "python fineweb.py" in ours[0]
    assert processes == 2 or len(result.stderr.splitlines()) == 1


def test_help_names_every_flag_with_its_default():
    text = run("--help").stdout
    for name in Config.__dataclass_fields__:
        assert re.search(rf"\n  --{name}[ ,\n]", text), name
    assert "--shuffle, --no_shuffle" in text and "(default 524288)" in text and "(default )" not in text
    assert "--n_head INT" in text and "(default 12; speedrun: 6; frontier: 6)" in text
    assert re.findall(r"--no_\w+", text) == ["--no_shuffle", "--no_tf32", "--no_compile",
                                            "--no_check_compile", "--no_plot"]


def test_importing_a_module_prints_nothing_and_starts_nothing(tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "import fineweb, hellaswag, model, sample, train_gpt2\n"
            "assert not {'datasets', 'transformers', 'matplotlib'} & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


def test_eager_training_and_sampling_start_without_torchs_compiler(shards, tmp_path):
    """Its import takes as long as that of torch."""
    flags = [*TINY, *SPOKEN, "--total_batch_size", "128", "--data", str(shards), "--device", "cpu",
             "--no_plot", "--max_steps", "2"]
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport sample, train_gpt2\n"
            "for recipe in ('gpt2', 'speedrun', 'frontier'):\n"
            f"    assert train_gpt2.train([*{flags!r}, '--recipe', recipe, '--out', recipe]) == 0\n"
            "    sample.main(['--model', recipe, '--device', 'cpu', '--max_new_tokens', '2'])\n"
            "assert 'torch._dynamo' not in sys.modules\n")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            env=ENV, timeout=HANG)
    assert result.returncode == 0 and result.stdout.count("done: 2 steps") == 3, result.stderr


def test_a_step_that_is_not_finite_is_named_and_leaves_weights_and_checkpoints_alone(shards, start, tmp_path):
    weights = load_model(start).state_dict()
    weights["transformer.h.1.mlp.c_fc.bias"][3] = 3e38          # finite, what follows from it is not
    torch.save({"model": weights, "model_config": dict(vars(load_model(start).config)), "recipe": "gpt2"},
               tmp_path / "bad.pt")
    flags = ["--data", shards, "--init", tmp_path / "bad.pt", *TINY, *QUIET[:4], "--checkpoint_every", 2,
             "--max_steps", 4]
    stderr = run(*flags, "--out", tmp_path / "log", code=1).stderr
    assert len(stderr.splitlines()) == 1 and re.search(r"step 0: loss nan.* that of transformer\.", stderr)
    assert not list((tmp_path / "log").glob("checkpoint*"))
    result = run(*flags, "--out", tmp_path / "log", "--skip_nonfinite", 4)
    assert result.stdout.count("skipped step ") == 4
    after = read_checkpoint(tmp_path / "log/checkpoint_000004.pt")["model"]
    assert all(torch.equal(after[name], weights[name]) for name in weights)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    config = Config(out=str(tmp_path), keep_checkpoints=1)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    state = train_gpt2.make_state(config, model, model.configure_optimizers(1e-3, 0.1), Process())
    saver = Saver(config, {}, None, Process())
    for state.step, state.val_loss, state.val_step in ((1, 3.0, 1), (2, 1.0, 2), (3, 2.0, 3), (4, 0.5, 3),
                                                        (5, 2.5, 5)):
        if state.is_best():             # as the loop does; the loss at step 4 was not measured there
            state.best = state.val_loss, state.step
        saver.save(state)
    saver.finish()
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 5]
