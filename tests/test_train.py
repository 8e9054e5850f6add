"""train_gpt2.py: what a run makes of its flags, processes, evaluation, mistakes, the sanity run. Its steps
against a plain loop: test_guards.py. Kills, resumes and signals: test_reliability.py, test_stopping.py."""
# ruff: noqa: F811, a test's argument is a fixture that is imported
import os
import re
import shutil

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import train_gpt2
from helpers import ROOT, cold, hellaswag_file, logged, parse_flags, refused, run, train
from recipes import load_model
from runtime.checkpoint import Saver
from runtime.console import Record
from runtime.device import choose_device, peak_flops
from runtime.files import checkpoints
from recipes import PRESETS
from runtime.shards import write_shard
from runtime.tokenizer import EOT, encode, tokenizer
from runtime.weights import read_checkpoint
from test_guards import QUIET, TINY, shards, start       # noqa: F401, fixtures
from train_gpt2 import Config, warmup_cosine

STEPS = [*TINY, "--hellaswag_every", 0, "--max_steps", 12, "--warmup_steps", 5]
# what samples or is scored needs GPT-2's vocabulary
SPOKEN = [*STEPS, "--vocab_size", 50304, "--n_layer", 1, "--n_embd", 16, "--total_batch_size", 64,
          "--no_shuffle", "--val_tokens", 1000]


@pytest.fixture
def shown(capsys):
    """What a run in this process prints."""
    def shown(*flags, **how):
        train(*flags, **how)
        return capsys.readouterr().out
    return shown


@pytest.fixture(scope="module")
def spoken(shards, tmp_path_factory):
    """The losses of a model with GPT-2's vocabulary, which is neither evaluated nor saved."""
    out = tmp_path_factory.mktemp("spoken")
    train("--data", shards, *SPOKEN, *QUIET, "--out", out)
    return logged(out)


def test_evaluation_samples_and_checkpoints_do_not_change_the_losses(shards, spoken, shown, tmp_path):
    text = shown("--data", shards, *SPOKEN, "--out", tmp_path, "--val_every", 5, "--sample_every", 4,
                 "--checkpoint_every", 5)
    assert logged(tmp_path) == spoken and len(spoken) == 12
    assert list(logged(tmp_path, "val")) == [0, 5, 10, 12]
    assert [step for step, _ in checkpoints(tmp_path)] == [5, 10, 12]
    assert text.count("sample 0: Hello, I'm a language model,") == 3
    lines = re.findall(r"^step +(\d+) \| loss: (\d+\.\d{4}) \| lr \d\.\d\de-0\d \| norm: \d+\.\d+ \| dt: "
                       r"\d+\.\dms \| tok/sec: [0-9,]+ \| \d:\d\d:\d\d left$", text, re.M)
    assert {int(step): loss for step, loss in lines} == {step: f"{spoken[step]:.4f}" for step in spoken}
    config = read_checkpoint(tmp_path / "checkpoint_000012.pt")["config"]
    assert (config["total_batch_size"], config["min_lr"]) == (64, "auto"), "the flags as asked"


def compile_without_a_compiler():
    """Inductor's takes most of the time."""
    compile = torch.compile
    torch.compile = lambda model, **options: compile(model, backend="eager", dynamic=False)


def test_compile_goes_together_with_hellaswag_and_samples_on_two_processes(shards, spoken, tmp_path):
    text = run("--data", shards, *SPOKEN, "--compile", "--out", tmp_path / "log", "--batch_size", 1,
               "--max_steps", 6, "--val_every", 3, "--sample_every", 3, "--checkpoint_every", 3,
               "--hellaswag_every", 3, "--hellaswag_data", hellaswag_file(tmp_path / "h.jsonl"), processes=2,
               before=[compile_without_a_compiler]).stdout
    assert "torch.compile, attention" in text
    losses = logged(tmp_path / "log")       # another max_steps bends the cosine from step 5 on
    assert [losses[step] for step in range(6)] == pytest.approx([spoken[step] for step in range(6)], abs=1e-4)
    hella = re.findall(r"HellaSwag accuracy: (\d+)/12=", text)
    assert len(hella) == 3
    assert logged(tmp_path / "log", "hella")[6] == pytest.approx(int(hella[-1]) / 12, abs=1e-6)
    assert text.count("sample 3: Hello, I'm a language model,") == 2


@pytest.mark.parametrize("val_tokens, sequences", [(5, 1), (100, 3), (10**9, 93)])
def test_validation_has_the_whole_sequences_of_its_tokens_and_at_least_one(val_tokens, sequences, shards,
                                                                           tmp_path):
    """Of the 2,999 targets there are."""
    seen = []
    hook = register_module_forward_pre_hook(lambda module, inputs: seen.append((inputs[1][:, -1] >= 0).sum())
                                            if type(module).__name__ == "GPT" else None)
    try:
        train("--data", shards, *STEPS, *QUIET, "--max_steps", 1, "--batch_size", 8, "--val_every", 1,
              "--val_tokens", val_tokens, "--out", tmp_path)
    finally:
        hook.remove()
    assert sum(seen) == sequences * 2 + 8, "two validations and a step of 8 sequences"


def test_a_token_that_the_model_does_not_have_is_found_in_either_split(shards, tmp_path):
    for split in ("train", "val"):
        data = shutil.copytree(shards, tmp_path / split)
        write_shard(data / f"text_{split}_000009.npy", np.array([1, 2, 256] * 20, dtype=np.uint16))
        refused(lambda data=data: train("--data", data, *STEPS, *QUIET, "--val_every", 1, "--dry_run"),
                f"text_{split}_000009.npy", 256)


@pytest.mark.parametrize("processes", [1, 2])
def test_validation_is_the_mean_over_its_tokens(processes, shards, start, tmp_path):
    tokens = torch.from_numpy(np.load(next(shards.glob("*_val_*"))).astype(np.int64))
    rows = torch.stack([tokens[i:i + 33] for i in range(0, 31 * 32, 32)])  # 1000 // 32 = 31 windows
    with torch.no_grad():
        expected = load_model(start)(rows[:, :-1], rows[:, 1:])[1].item()
    run("--data", shards, "--init", start, *STEPS, *QUIET, "--max_steps", 1, "--out", tmp_path,
        "--batch_size", 4, "--val_every", 1, "--val_tokens", 1000, processes=processes)
    assert logged(tmp_path, "val")[0] == pytest.approx(expected, abs=1e-5)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    saver, record = Saver(tmp_path, 1, False, lambda line: None), Record(tmp_path, 0, (100).__mul__)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        saver.write({"step": step, "model": {}, "optimizers": {}}, record)
        if loss:
            record.add(step, "val", loss)
    record.add(6, "val", 0.5)                   # of a step that was not saved
    saver.write({"step": 7, "model": {}, "optimizers": {}}, record)
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 7]


def test_finetuning_starts_where_the_weights_ended(shards, shown, tmp_path):
    """Those of a run's best checkpoint, and of an exported folder, which has no rows of padding."""
    base = tmp_path / "base"
    train("--data", shards, *SPOKEN, *QUIET, "--max_steps", 2, "--val_every", 1, "--checkpoint_every", 1,
          "--max_lr", 1e-2, "--out", base)
    load_model(base / "best").save_pretrained(tmp_path / "exported")
    for source, tolerance in ((base / "best", 2e-6), (tmp_path / "exported", 2e-3)):
        out = tmp_path / f"from {source.name}"
        text = shown("--preset", "finetune", "--init", source, "--data", shards, "--total_batch_size", 64,
                     "--val_tokens", 1000, "--dtype", "float32", "--max_steps", 1, "--out", out,
                     "--sample_prompt", "ROMEO:")
        assert logged(out, "val")[0] == pytest.approx(min(logged(base, "val").values()), abs=tolerance)
        assert text.count("sample 0: ROMEO:") == 1
        assert [step for step, _ in checkpoints(out)] == [1]


def test_samples_continue_the_prompt_and_a_resumed_run_keeps_its(shards, shown, tmp_path):
    def begins(words, *flags):
        text = shown("--data", shards, *SPOKEN, *QUIET, "--sample_every", 1, "--out", tmp_path, *flags)
        return [sample.startswith(words) for sample in re.split(r"^sample \d: ", text, flags=re.M)[1:5]]

    once, usual = ["--max_steps", 1, "--resume", "never"], "Hello, I'm a language model,"
    assert begins(usual, *once) == [True] * 4
    assert begins("\n", *once, "--preset", "small") == [True] * 4
    assert not any(begins(usual, *once, "--sample_prompt", ""))         # a document
    assert begins("To be", *once, "--sample_prompt", "To be", "--checkpoint_every", 1) == [True] * 4
    assert begins("To be", "--max_steps", 2) == [True] * 4


@pytest.mark.parametrize("prompt", ["To be", "", " a" * 40 + " To be"], ids=["some", "none", "too long"])
def test_samples_are_those_of_generate_of_the_steps_weights(prompt, shards, shown, tmp_path):
    """Four of 32 tokens, by the seed 42. Of a prompt that is longer than the context the end is continued."""
    text = shown("--data", shards, *SPOKEN, *QUIET, "--sample_every", 1, "--sample_prompt", prompt,
                 "--max_steps", 1, "--checkpoint_every", 1, "--out", tmp_path)
    start = torch.tensor([encode(prompt).tolist()[-32:] or [EOT]] * 4)
    rows = load_model(tmp_path).generate(start, 32, generator=torch.Generator().manual_seed(42))
    texts = [tokenizer().decode(row[not prompt:]) for row in rows.tolist()]
    assert text.count("sample ") == 4 and len({*texts}) == 4
    for i, one in enumerate(texts):
        assert f"\nsample {i}: {one}\n" in text


def test_hellaswag_by_default_and_not_to_be_had_is_a_warning_and_asked_for_an_error(shards, shown, tmp_path):
    flags = ["--data", shards, "--max_steps", 1, "--val_every", 0, "--sample_every", 0, "--checkpoint_every",
             0, "--out", tmp_path / "log", "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--block_size", 32,
             "--total_batch_size", 32, "--device", "cpu", "--dtype", "float32"]
    assert shown(*flags).count("warning: continuing without HellaSwag") == 1
    refused(lambda: train(*flags, "--hellaswag_every", 1), "HellaSwag")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run_in_one_line_and_is_not_saved(processes, shards, tmp_path):
    refused(lambda: run("--data", shards, *STEPS, *QUIET, "--max_lr", "1e30", "--warmup_steps", 0,
                        "--checkpoint_every", 1, "--out", tmp_path, processes=processes, code=1), "--max_lr",
            "loss", failed=True)
    for _, path in checkpoints(tmp_path):
        assert all(t.isfinite().all() for t in read_checkpoint(path)["model"].values())


# ----------------------------- the sanity run, --dry_run, presets, schedule

def test_overfit_is_the_same_batch_on_several_processes_and_writes_nothing(tmp_path):
    """The whole run is README's."""
    small = ["--overfit", "--n_layer", 1, "--n_head", 2, "--n_embd", 64, "--max_lr", 0.006, "--min_lr", 0.006,
             "--dtype", "float32", "--max_steps", 4, "--checkpoint_every", 2]
    one, two = (run(*small, processes=n, cwd=tmp_path, code=1) for n in (1, 2))
    assert "in 4 steps: FAILED" in one.stdout and "2 x 32 x 1 micro-step x 2 processes" in two.stdout
    # of Python's; torch has some about networks
    assert not re.search(r"\w+Warning:", one.stderr + two.stderr), one.stderr + two.stderr
    losses, same = ([float(loss) for loss in re.findall(r"loss: (\S+)", x.stdout)] for x in (one, two))
    assert losses == pytest.approx(same, abs=1e-3) and losses[0] > losses[3] > 1 and len(losses) == 4
    assert not list(tmp_path.iterdir())
    config, _ = parse_flags(["--overfit"])
    assert (config.n_layer, config.n_embd, config.max_steps, config.shuffle) == (12, 768, 50, False)
    for flags, rate in (([], 3e-4), (["--recipe", "frontier"], 0.02), (["--max_lr", "0.1"], 0.1)):
        config, _ = parse_flags(["--overfit", *flags])
        assert config.max_lr == config.min_lr == rate, "that of the recipe, constant"


def test_a_dry_run_tells_the_time_and_writes_nothing(shards, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = shown("--data", shards, *STEPS, *QUIET, "--dry_run")
    for said in ("2 layers", "256 tokens per step = 8 x 32 x 1 micro-step x 1 process", "12 steps",
                 "0.34 epochs", " s per step"):
        assert said in text, said
    assert "step     0" not in text and not list(tmp_path.iterdir())


def test_a_preset_is_defaults_that_flags_override():
    for name, preset in PRESETS.items():
        config, given = parse_flags(["--preset", name])
        rates = {"max_lr", "min_lr", "warmup_steps"} & train_gpt2.RECIPES[config.recipe].rates.keys()
        assert given == {"preset"}
        assert all(getattr(config, key) == value for key, value in preset.flags.items()
                   if key not in rates), name
    config, _ = parse_flags("--preset small --n-layer 3 --recipe=speedrun --max_steps 1_000".split())
    assert (config.n_layer, config.n_embd, config.max_steps) == (3, 384, 1000), "dashes are taken too"
    assert (config.max_lr, config.warmup_steps) == (0.02, 0), "a preset's are for AdamW"
    config, _ = parse_flags("--no_shuffle --no-compile --min_lr 1e-5 --grad_clip inf".split())
    assert [config.shuffle, config.compile, config.tf32, config.min_lr] == [False, False, True, 1e-5]


def test_schedule_is_linear_then_cosine_and_never_leaves_its_bounds():
    config = Config(max_steps=100, warmup_steps=10, max_lr=1.0, min_lr=0.1)
    assert [warmup_cosine(step, step / 100, config) for step in (0, 9, 10, 55, 100, 10_000)] == (
        pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1, 0.1]))
    assert warmup_cosine(0, 0.0, Config(warmup_steps=0, max_lr=1.0, min_lr=0.1)) == 1.0
    for warmup in (100, 200):                   # a run that is all warmup, or ends in it
        config = Config(max_steps=100, warmup_steps=warmup, max_lr=1.0, min_lr=0.1)
        assert warmup_cosine(99, 0.99, config) == 100 / warmup


# ----------------------------------------------------------------------------- memory and GPUs

@pytest.mark.parametrize("largest, flags, said", [
    (2, ["--compile"], None), (2, ["--compile", "--batch_size", 4], "--batch_size"),
    (0, ["--compile"], "--batch_size"), (2, [], "--batch_size")],
    ids=["halved", "asked for", "none fits", "in the run"])
def test_out_of_memory_halves_the_micro_batch_or_ends_the_run_in_one_line(largest, flags, said, shards, shown,
                                                                          tmp_path, monkeypatch):
    """In a forward of more sequences. On a CPU only a compiled model is tried out before the run."""
    def memory(module, inputs):
        if type(module).__name__ == "GPT" and len(inputs[0]) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    hook = register_module_forward_pre_hook(memory)
    try:
        flags = ["--data", shards, *STEPS, *QUIET, *flags, "--max_steps", 1, "--out", tmp_path]
        if said:
            refused(lambda: train(*flags), "cpu is out of memory", said)
        else:
            assert "256 tokens per step = 2 x 32 x 4 micro-steps " in shown(*flags)
    finally:
        hook.remove()


def test_ranks_with_different_memory_have_the_same_micro_batch(shards, shown, monkeypatch):
    """Else they would read some sequences twice and others never. Another rank has room for 2 sequences."""
    monkeypatch.setattr(train_gpt2.Process, "gather", lambda self, value: (
        [value, 2] if type(value) is int else [value]))
    assert "= 2 x 32 x 4 micro-steps x 1 process" in shown("--data", shards, *STEPS, *QUIET, "--dry_run")


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
def test_auto_batch_size_on_a_gpu_fits_and_changes_no_loss(shards, start, shown, tmp_path):
    flags = ["--data", shards, "--init", start, *STEPS, *QUIET, "--no_compile", "--no_tf32", "--out"]
    train(*flags, tmp_path / "cpu")
    assert "256 tokens per step = 8 x 32 x 1 micro-step " in shown(*flags, tmp_path / "cuda", "--device",
                                                                   "cuda")
    assert logged(tmp_path / "cuda") == pytest.approx(logged(tmp_path / "cpu"), abs=1e-3)


PEAKS = {
    "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756,
    "NVIDIA GB200": 2500, "NVIDIA B200": 2250, "NVIDIA A100-SXM4-80GB": 312, "A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA A10": 125, "NVIDIA A10G": 70, "NVIDIA L4": 121, "Tesla T4": 65,
    "Tesla V100-SXM2-16GB": 125, "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 4090 D": 147.1,
    **dict.fromkeys(("Some GPU 9000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
                     "NVIDIA RTX 6000 Ada Generation Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                     "NVIDIA H20-3e", "NVIDIA A100-SXM-64GB", "NVIDIA B200 NVL", "NVIDIA L4 2")),
}


def test_a_gpu_that_is_not_exactly_known_has_no_mfu_and_similar_names_are_told_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: list(PEAKS)[int(device[5:])])
    for i, (name, peak) in enumerate(PEAKS.items()):
        assert peak_flops(f"cuda:{i}") == (peak and peak * 1e12), name
    peak_flops.cache_clear()
    assert peak_flops("cpu") is None


# ----------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("flags", [
    "--n_head 5", "--batch_size 0", "--total_batch_size 250", "--sequence_length 64", "--max_lr -1",
    "--max_steps many", "--max_steps 1e5", "--weight_decay nan", "--grad_clip nan", "--n_layer 0",
    "--bogus", "--max_step 3", "--out=", "--data nowhere", "--data .",
    "--init nowhere.pt", "--resume nowhere.pt", "--n_layer 3 --init START", "--recipe speedrun --init START",
    "--device tpu", "--dtype int8", "--recipe gpt5", "--vocab_size 70000",
    "--sample_every 1", "--overfit --preset small",
    "--min_lr 1", "--attention cudnn"])
def test_a_mistake_names_its_flag_before_anything_is_written(flags, shards, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shard("text_train_000001.npy", np.arange(32, dtype=np.uint16))         # a target too few
    flags = [str(start) if flag == "START" else flag for flag in flags.split(" ")]
    word = {".": "text_train_000001.npy", "=": "--out"}.get(flags[-1][-1], flags["nowhere" in flags[-1]])
    refused(lambda: train(*STEPS, *QUIET, "--data", shards, "--out", "log", *flags), word)
    assert [path.name for path in tmp_path.iterdir()] == ["text_train_000001.npy"]


@pytest.mark.parametrize("flags, said", [([], "python fineweb.py"), (["--n_head", 5], "--n_head"),
                                         (["--init", "START", "--n_layer", 3], "--n_layer")])
def test_a_mistake_is_said_once_by_two_processes(flags, said, start, tmp_path):
    """Of the data, of the flags, of the flags with the weights."""
    flags = [start if flag == "START" else flag for flag in flags]
    refused(lambda: run(*STEPS, *QUIET, "--data", tmp_path, *flags, processes=2, code=2), said)


def test_a_real_command_ends_a_mistake_with_exit_code_2_and_one_line(tmp_path):
    refused(lambda: cold(ROOT / "train_gpt2.py", "--data", "nowhere", cwd=tmp_path), "nowhere", "fineweb.py")
    assert not list(tmp_path.iterdir())


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        train_gpt2.main(["--help"])
    text = capsys.readouterr().out
    assert not ended.value.code
    words = " ".join(text.split())
    for name in Config.__dataclass_fields__:
        assert re.search(rf"\n  --{name}[ ,\n]", text), name
    assert "(default 524288)" in words and "(default )" not in words
    assert "--n_head INT The number of attention heads in each block. (default 12; speedrun: 6; " \
        "frontier: 6)" in words
    assert re.findall(r"\n  (--no_\w+)", text) == ["--no_shuffle", "--no_tf32", "--no_compile"]
