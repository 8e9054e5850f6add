"""train_gpt2.py: what a run makes of its flags, processes, evaluation, mistakes, the sanity run. Its steps
against a plain loop: test_guards.py. Kills, resumes and signals: test_reliability.py, test_stopping.py."""
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import fineweb
import train_gpt2
from helpers import ENV, HANG, ROOT, hellaswag_file, logged, run
from model import GPT, GPTConfig, load_model
from runtime.checkpoint import Saver
from runtime.cli import UserError
from runtime.console import Record
from runtime.device import choose_device, peak_flops
from runtime.files import checkpoints
from runtime.presets import PRESETS
from runtime.shards import first_words, write_shard
from runtime.tokenizer import EOT, encode
from runtime.weights import read_checkpoint
from train_gpt2 import Config, parse_flags, warmup_cosine

# Bytes instead of GPT-2's tokens: 25 steps take a sixth of the time. SPOKEN is for what samples or is scored,
# which needs GPT-2's vocabulary.
TINY = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--block_size", "32", "--dtype", "float32",
        "--total_batch_size", "256", "--max_steps", "12", "--warmup_steps", "5", "--hellaswag_every", "0",
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
    run("--data", shards, *TINY, *SPOKEN, *QUIET, "--batch_size", 2, "--no_shuffle", "--out", out)
    return logged(out)


def test_evaluation_samples_and_checkpoints_do_not_change_the_losses(shards, spoken_run, tmp_path):
    shown = run("--data", shards, *TINY, *SPOKEN, "--batch_size", 2, "--no_shuffle", "--out",
                tmp_path / "log", "--val_every", 5, "--val_tokens", 1000, "--sample_every", 4,
                "--checkpoint_every", 5).stdout
    assert logged(tmp_path / "log") == spoken_run and len(spoken_run) == 12
    assert sorted(logged(tmp_path / "log", "val")) == [0, 5, 10, 12]
    assert shown.count("sample 0: Hello, I'm a language model,") == 3
    lines = re.findall(r"^step +(\d+) \| loss: (\d+\.\d{4}) \| lr \d\.\d\de-0\d \| norm: \d+\.\d+ \| dt: "
                       r"[0-9.]+m?s \| tok/sec: [0-9,]+ \| .* left$", shown, re.M)
    assert {int(step): loss for step, loss in lines} == {
        step: f"{loss:.4f}" for step, loss in spoken_run.items()}


def test_recompute_and_llm_cs_files_change_no_loss_on_two_processes(shards, start, file_order_run, tmp_path):
    """The same tokens in .bin, and blocks computed anew in the backward."""
    for path in shards.glob("*.npy"):
        write_shard(tmp_path / f"{path.stem}.bin", np.load(path))
    run("--data", tmp_path, "--init", start, *TINY, *QUIET, "--no_shuffle", "--recompute", "--out",
        tmp_path / "log", processes=2)
    assert logged(tmp_path / "log") == pytest.approx(file_order_run, abs=1e-5) and len(file_order_run) == 12


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
    flags = ["--data", shards, *TINY, "--val_every", 3, "--val_tokens", 500, "--checkpoint_every", 3,
             "--sample_every", 0, "--out", out]
    run(*flags, "--keep_checkpoints", 2)
    best = min(logged(out, "val").items(), key=lambda item: item[1])[0]
    kept = {p.name for p in out.glob("*.pt")}
    assert kept == {f"checkpoint_{step:06d}.pt" for step in {9, 12, best}}
    assert {p.name for p in out.iterdir()} - kept == {"log.txt", "metrics.csv", ".train_gpt2.lock"}
    checkpoint = torch.load(out / "checkpoint_000012.pt", weights_only=True)
    assert {"model", "config", "recipe", "step", "optimizers"} <= checkpoint.keys()
    assert checkpoint["step"] == 12 and checkpoint["recipe"] == "gpt2"
    assert checkpoint["config"]["total_batch_size"] == 256 and checkpoint["config"]["min_lr"] == "auto"
    weights = checkpoint["model"]
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr(), "held twice"
    assert isinstance(load_model(out / "checkpoint_000012.pt"), GPT)
    # --resume never starts afresh, and wipes nothing
    (out / "notes.txt").write_text("mine")
    log = (out / "log.txt").read_bytes()
    run(*flags, "--resume", "never", "--max_steps", 3)
    assert (out / "previous_1/log.txt").read_bytes() == log
    assert {p.name for p in (out / "previous_1").glob("*.pt")} == kept
    assert [p.name for p in out.glob("*.pt")] == ["checkpoint_000003.pt"] and (out / "notes.txt").exists()


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    saver, record = Saver(tmp_path, 1, False, lambda line: None), Record(tmp_path, 0, 100)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        saver.write({"step": step, "model": {}, "optimizers": {}}, record)
        if loss:
            record.evaluation(step, "val", loss)
    record.evaluation(6, "val", 0.5)                    # of a step that was not saved
    saver.write({"step": 7, "model": {}, "optimizers": {}}, record)
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 7]


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


def test_samples_begin_with_the_texts_own_words_unless_a_prompt_is_given(shards, tmp_path):
    fineweb.main(["--input", str(ROOT / "input.txt"), "--out", str(tmp_path / "play")])
    poem = own_text(tmp_path / "a", POEM, before=[POEM])

    def begin(words, data, out, *flags):
        shown = run("--data", data, *TINY, *SPOKEN, "--val_every", 0, "--out", tmp_path / out, *flags).stdout
        samples = [line.split(": ", 1)[1] for line in shown.splitlines() if line.startswith("sample ")]
        return len(samples) == 4 and all(sample.startswith(words) for sample in samples)

    own, usual = "Sing, O goddess, the anger", "Hello, I'm a language model,"
    assert begin("First Citizen:", tmp_path / "play", "1", "--max_steps", 1)
    assert begin(usual, shards, "2", "--max_steps", 1)
    assert begin(own, poem, "3", "--max_steps", 1, "--preset", "shakespeare", "--n_head", 1)
    prompt = ["--max_steps", 1, "--sample_prompt"]
    assert not begin(own, poem, "4", *prompt, "") and not begin(usual, poem, "5", *prompt, "")  # a document
    assert begin(usual, poem, "6", *prompt, usual)
    assert begin(usual, poem, "6", "--max_steps", 2), "its checkpoint's"


def compiler_works():
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.zeros(8))
    except Exception:           # Inductor and the compiler raise many types
        return False
    return True


def site(folder, code):
    """The environment of processes that run these lines first."""
    (folder / "sitecustomize.py").write_text(code)
    return {**ENV, "PYTHONPATH": str(folder)}


def test_compile_goes_together_with_hellaswag_and_samples(shards, spoken_run, tmp_path):
    """On two processes; without Inductor's C++, which takes most of the time (test_guards_steps.py)."""
    if not compiler_works():
        pytest.skip("torch.compile finds no C++ compiler here")
    env = site(tmp_path, "import torch\ncompile = torch.compile\ntorch.compile = lambda model, **options: "
                         "compile(model, backend='aot_eager', dynamic=False)\n")
    result = run("--data", shards, *TINY, *SPOKEN, "--no_shuffle", "--compile", "--out", tmp_path / "log",
                 "--batch_size", 1, "--max_steps", 6, "--val_every", 3, "--val_tokens", 1000,
                 "--sample_every", 3, "--checkpoint_every", 3, "--hellaswag_every", 3,
                 "--hellaswag_data", hellaswag_file(tmp_path / "h.jsonl"), processes=2, env=env)
    assert "torch.compile, attention" in result.stdout
    losses = logged(tmp_path / "log")
    # another max_steps bends the cosine from step 5 on: the first steps are the eager run's
    assert max(abs(losses[s] - spoken_run[s]) for s in range(6)) < 1e-4
    hella = re.findall(r"HellaSwag accuracy: (\d+)/12=", result.stdout)
    assert len(hella) == 3
    assert logged(tmp_path / "log", "hella")[6] == pytest.approx(int(hella[-1]) / 12, abs=1e-6)
    assert result.stdout.count("sample 3: Hello, I'm a language model,") == 2


def test_hellaswag_by_default_and_not_to_be_had_is_a_warning_and_asked_for_an_error(shards, tmp_path):
    default = TINY[:TINY.index("--hellaswag_every")]
    flags = ["--data", shards, *default, *SPOKEN, "--max_steps", 1, *QUIET, "--out", tmp_path / "log"]
    assert run(*flags).stdout.count("warning: continuing without HellaSwag") == 1
    stderr = run(*flags, "--hellaswag_every", 1, code=2).stderr
    assert len(stderr.splitlines()) == 1 and "HellaSwag" in stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run_in_one_line_and_is_not_saved(processes, shards, tmp_path):
    result = run("--data", shards, *TINY, *QUIET, "--max_lr", "1e30", "--warmup_steps", 0,
                 "--checkpoint_every", 1, "--out", tmp_path / "log", processes=processes, code=1)
    assert re.match(r"train_gpt2.py: step \d+ .*loss (nan|inf)", result.stderr)
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for _, path in checkpoints(tmp_path / "log"):
        assert all(t.isfinite().all() for t in read_checkpoint(path)["model"].values())


# -----------------------------------------------------------------------------
# the sanity run, --dry_run, presets, schedule

def test_overfit_takes_the_full_model_and_writes_nothing(tmp_path):
    """Four of its 50 steps; .ci/run makes them all, as README's first command."""
    # on all cores; threads that wait sleep, since beside other tests those that spin cost three times the
    # work
    env = {k: v for k, v in ENV.items() if k != "OMP_NUM_THREADS"} | {"OMP_WAIT_POLICY": "PASSIVE"}
    result = run("--overfit", "--max_steps", 4, env=env, cwd=tmp_path, code=1)
    assert "124,439,808 parameters" in result.stdout
    first, last, steps = re.search(r"loss ([0-9.]+) -> ([0-9.]+) in (\d+) steps: FAILED",
                                   result.stdout).groups()
    assert 10.5 < float(first) < 11.2 and float(last) < float(first) - 2 and int(steps) == 4
    assert not list(tmp_path.iterdir())


def test_overfit_is_the_same_batch_on_several_processes_and_prints_no_warning(tmp_path):
    small = ["--overfit", "--n_layer", 1, "--n_head", 2, "--n_embd", 64, "--max_lr", 1e-2, "--min_lr", 1e-2]
    losses = {}
    for processes in (1, 2):
        result = run(*small, processes=processes, torchrun=processes == 2, cwd=tmp_path)
        assert ": PASSED\nnext: python fineweb.py --input input.txt --out data/shakespeare" in result.stdout
        # of Python's; torch has some about networks
        assert not re.search(r"\w+Warning:", result.stderr), result.stderr
        losses[processes] = [float(loss) for loss in re.findall(r"loss: (\S+)", result.stdout)]
    assert "2 x 32 x 1 micro-step x 2 processes" in result.stdout
    one, two = losses[1], losses[2]
    assert len(one) == len(two) == 50
    assert abs(one[0] - two[0]) < 1e-3 and abs(one[10] - two[10]) < 0.05        # perhaps in bfloat16
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_the_time_and_writes_nothing(shards, tmp_path):
    shown = run("--data", shards, *TINY, *QUIET, "--dry_run", cwd=tmp_path).stdout
    assert not list(tmp_path.iterdir())
    for said in ("2 layers", "256 tokens a step = 8 x 32 x 1 micro-step x 1 process", "12 steps",
                 "0.34 epochs", r"about \S+ m?s? ?a step"):
        assert re.search(said, shown), said
    assert "step     0" not in shown


def test_a_preset_is_defaults_that_flags_override():
    for name, (_, values) in PRESETS.items():
        config, given = parse_flags(["--preset", name])
        rates = {"max_lr", "min_lr", "warmup_steps"} & train_gpt2.RECIPES[config.recipe].defaults.keys()
        assert given == {"preset"}
        assert all(getattr(config, key) == value for key, value in values.items() if key not in rates), name
    config, _ = parse_flags("--preset small --n-layer 3 --recipe=speedrun --max_steps 1e2".split())
    assert (config.n_layer, config.n_embd, config.max_steps) == (3, 384, 100), "dashes are taken too"
    assert (config.max_lr, config.warmup_steps) == (0.02, 0), "a preset's are for AdamW"


def test_schedule_is_linear_then_cosine_and_never_leaves_its_bounds():
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1)
    assert warmup_cosine(0, config) == pytest.approx(0.1) and warmup_cosine(9, config) == 1.0
    assert warmup_cosine(10, config) == pytest.approx(1.0)
    assert warmup_cosine(55, config) == pytest.approx(0.55)
    assert warmup_cosine(100, config) == warmup_cosine(10_000, config) == pytest.approx(0.1)
    assert warmup_cosine(0, Config(warmup_steps=0, max_lr=1.0, min_lr=0.1)) == 1.0


# -----------------------------------------------------------------------------
# memory and GPUs

# memory ends in a forward of more sequences than LARGEST; what is compiled stays as it is
LITTLE_MEMORY = """
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
torch.compile = lambda model, **how: model

def before(module, inputs):
    if type(module).__name__ == "GPT" and len(inputs[0]) > LARGEST:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
register_module_forward_pre_hook(before)
"""


@pytest.mark.parametrize("largest, flags, code, said", [
    (2, ["--compile"], 0, "256 tokens a step = 2 x 32 x 4 micro-steps "),
    (2, ["--compile", "--batch_size", "4"], 2, "cpu is out of memory: give a smaller --batch_size"),
    (0, ["--compile"], 2, "cpu is out of memory: "), (2, [], 2, "cpu is out of memory: ")],
    ids=["halved", "asked for", "none fits", "in the run"])
def test_out_of_memory_halves_the_micro_batch_or_ends_the_run_in_one_line(largest, flags, code, said, shards,
                                                                          tmp_path):
    """On a CPU only a compiled model is tried out before the run."""
    env = site(tmp_path, LITTLE_MEMORY.replace("LARGEST", str(largest)))
    result = run("--data", shards, *TINY, *QUIET, *flags, "--out", tmp_path / "log", code=code, env=env)
    assert said in result.stdout + result.stderr and len(result.stderr.splitlines()) == (code > 0)


def test_cudas_allocator_leaves_large_blocks_whole_unless_the_user_has_set_it(monkeypatch):
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given in (None, *names):
        for name in names:
            monkeypatch.setenv(name, "")        # so that what is set in between is undone
            monkeypatch.delenv(name)
        if given:
            monkeypatch.setenv(given, "backend:native")
        choose_device("cpu")
        expected = {given: "backend:native"} if given else {names[0]: "max_split_size_mb:2048"}
        assert {name: os.environ[name] for name in names if name in os.environ} == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_batch_size_on_a_gpu_fits_and_changes_no_loss(shards, start, file_order_run, tmp_path):
    result = run("--data", shards, "--init", start, *TINY, *QUIET, "--no_shuffle", "--device", "cuda",
                 "--no_compile", "--no_tf32", "--out", tmp_path / "log")
    assert "256 tokens a step = 8 x 32 x 1 micro-step " in result.stdout
    assert logged(tmp_path / "log") == pytest.approx(file_order_run, abs=1e-3)


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


def test_a_gpu_that_is_not_exactly_known_has_no_mfu_and_similar_names_are_told_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: list(PEAKS)[int(device[5:])])
    for i, (name, peak) in enumerate(PEAKS.items()):
        assert peak_flops(f"cuda:{i}") == (peak and peak * 1e12), name
    peak_flops.cache_clear()
    assert peak_flops("cpu") is None


MISTAKES = {
    "heads": ["--n_head", "5"], "micro-batch": ["--batch_size", "0"],
    "token batch": ["--total_batch_size", "250"],
    "long sequence": ["--sequence_length", "64"], "negative rate": ["--max_lr", "-1"],
    "no number": ["--max_steps", "many"], "nan": ["--weight_decay", "nan"], "clip": ["--grad_clip", "nan"],
    "zero layers": ["--n_layer", "0"], "updates": ["--updates_per_step", "3"],
    "unknown flag": ["--bogus"], "abbreviation": ["--max_step", "3"], "empty path": ["--out", ""],
    "no data": ["--data", "nowhere"], "too little data": ["--data", "."],
    "no weights": ["--init", "nowhere.pt"], "no checkpoint": ["--resume", "nowhere.pt"],
    "other shape than --init": ["--init", "START", "--n_layer", "3"],
    "other recipe than --init": ["--init", "START", "--recipe", "speedrun"],
    "kernel": ["--attention", "cudnn"], "device": ["--device", "tpu"], "dtype": ["--dtype", "int8"],
    "recipe": ["--recipe", "gpt5"], "huge vocabulary": ["--vocab_size", "70000"],
    "samples without GPT-2's vocabulary": ["--sample_every", "1"],
    "another recipe's flag": ["--window", "16"],
    "window beyond the sequence": ["--recipe", "speedrun", "--window", "64"],
    "sanity run of a preset": ["--overfit", "--preset", "small"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_user_error_before_anything_is_written(name, shards, start, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    write_shard("text_train_000001.npy", np.arange(32, dtype=np.uint16))         # a target too few
    flags = [start if f == "START" else f for f in MISTAKES[name]]
    with pytest.raises(UserError):
        train_gpt2.main(list(map(str, [*TINY, *QUIET, "--data", shards, "--out", "log", *flags])))
    assert [path.name for path in tmp_path.iterdir()] == ["text_train_000001.npy"]


@pytest.mark.parametrize("processes, flags, said", [
    (1, [], "python fineweb.py"), (2, [], "python fineweb.py"), (2, ["--n_head", 5], "--n_head"),
    (2, ["--init", "START", "--n_layer", 3], "--n_layer")])
def test_a_mistake_is_one_line_on_stderr(processes, flags, said, start, tmp_path):
    """Of the data, of the flags, of the flags with the weights."""
    flags = [start if flag == "START" else flag for flag in flags]
    result = run(*TINY, *QUIET, "--data", tmp_path, *flags, processes=processes, torchrun=True,
                 cold=processes == 1, code=2 if processes == 1 else 1)
    ours = [line for line in result.stderr.splitlines() if line.startswith("train_gpt2.py:")]
    assert len(ours) == 1 and said in ours[0]
    assert processes == 2 or len(result.stderr.splitlines()) == 1


def test_help_names_every_flag_with_its_default():
    text = run("--help").stdout
    for name in Config.__dataclass_fields__:
        assert re.search(rf"\n  --{name}[ ,\n]", text), name
    assert "--shuffle, --no_shuffle" in text and "(default 524288)" in text and "(default )" not in text
    assert "--n_head INT" in text and "(default 12; speedrun: 6; frontier: 6)" in text
    assert re.findall(r"--no_\w+", text) == ["--no_shuffle", "--no_tf32", "--no_compile"]


def test_importing_a_module_prints_nothing_and_starts_nothing(tmp_path):
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "import fineweb, hellaswag, model, sample, train_gpt2\n"
            "assert not {'datasets', 'transformers', 'matplotlib'} & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            timeout=HANG)
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])
