"""runtime/flags.py and the flags of train_gpt2.py: defaults, bounds, spellings, and what each does.

What a recipe and a preset set is in test_recipes.py, what a resume takes in test_checkpoint.py.
"""
import math
import sys
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    logged,
    parse_flags,
    refused,
    run,
    saved,
    saved_steps,
    script,
    train,
)
from peers import LargestStorage
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from config import FLAGS, Config
from model import GPT, GPTConfig
from presets import OVERFIT, PRESETS
from recipes import fresh_model, load_model
from runtime.checkpoint import Start
from runtime.flags import FlagTable, flag
from runtime.language_model import LanguageModel
from runtime.ranks import Process
from runtime.shards import write_shard
from train_gpt2 import RECIPES

T = 16
STEPS = 3

# A step has four sequences of T bytes.
TINY = [
    "--n_layer", 2, "--n_head", 2, "--n_embd", 16, "--block_size", T, "--vocab_size", 256,
    "--device", "cpu", "--dtype", "float32", "--total_batch_size", 4 * T, "--max_steps", STEPS,
    "--warmup_steps", 0, "--val_tokens", T, "--val_every", 0, "--hellaswag_every", 0,
    "--sample_every", 0, "--checkpoint_every", 0,
]
SAVED = ["--checkpoint_every", 1, "--keep_checkpoints", "all"]
STILL = ["--max_lr", 1e-12, "--weight_decay", 0]        # leaves the weights alone


@pytest.fixture
def go(byte_data, tmp_path, capsys):
    """go(name, *flags) trains with --out tmp_path / name. Returns what it printed."""
    def go(name, *flags):
        capsys.readouterr()
        train("--data", byte_data, *TINY, "--out", tmp_path / name, *flags)
        return capsys.readouterr().out

    return go


@pytest.fixture
def forwards():
    """Each forward of a whole model in the test: (whether it trains, idx, targets)."""
    seen = []

    def note(module, inputs):
        if isinstance(module, LanguageModel) and len(inputs) == 2:
            seen.append((torch.is_grad_enabled(), *inputs))

    hook = register_module_forward_pre_hook(note)
    yield seen
    hook.remove()


def trained(forwards):
    """All sequences (n, T) that were trained."""
    return torch.cat([idx for trains, idx, _ in forwards if trains])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint to start from, of weights larger than fresh ones."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(T, 256, 2, 2, 16))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = tmp_path_factory.mktemp("start") / "start.pt"
    save_model(path, model)
    return path


def save_model(path, model):
    torch.save({
        "model": model.state_dict(), "model_config": asdict(model.config), "recipe": model.recipe,
    }, path)


# ----------------------------------------------------------------------- defaults

def test_the_defaults_are_gpt2_124m_on_10_billion_tokens():
    config, given = parse_flags([])
    assert config == Config()
    assert given == set()
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert (config.total_batch_size, config.max_steps) == (524288, 19073)


def test_auto_becomes_a_value_in_config_and_stays_auto_in_the_flags_as_asked():
    given = {"block_size": 64, "max_lr": 2e-3, "dtype": "float32"}
    asked, config = FLAGS.resolve(given, Start(), Process())
    assert config.sequence_length == 64
    assert config.min_lr == 2e-4
    assert asked.sequence_length == asked.min_lr == "auto"


# ----------------------------------------------------------------------- what a flag takes

def parse_one(f, value):
    """The value of a flag alone, without what it may contradict."""
    return FLAGS.parse("", [f"--{f.name}={value}"])[f.name]


def each(flags):
    return pytest.mark.parametrize("f", flags, ids=lambda f: f.name)


NUMBERS = [f for f in fields(Config) if f.type in (int, float)]


@each(NUMBERS)
def test_a_number_is_taken_in_its_range_alone(f):
    smallest = f.metadata.get("smallest", 0)
    largest = f.metadata.get("largest", {int: 2**40, float: 1e38}[f.type])
    outside = [-1, "nan", "-inf", "x", "never", "1,000", ""]
    if f.type is int:
        outside += [smallest - 1, largest + 1, "1.5", "1e3"]
    else:
        outside += [smallest - 1e-13]
    if f.type is float and largest < math.inf:
        outside += [1.01 * largest, "inf"]

    for value in (smallest, largest):
        assert parse_one(f, value) == value
        assert type(parse_one(f, value)) is f.type
    for value in outside:
        refused(lambda value=value: parse_one(f, value), f"--{f.name}", value)


@each(NUMBERS)
@pytest.mark.parametrize("word", ["auto", "all"])
def test_a_word_stands_for_a_number_where_one_is_meant_and_nowhere_else(f, word):
    if f.metadata.get("word") == word:
        assert parse_one(f, word) == word
    else:
        refused(lambda: parse_one(f, word), f"--{f.name}", word)


@each([f for f in fields(Config) if f.type is not bool])
def test_a_default_is_a_value_that_its_flag_takes(f):
    assert parse_one(f, f.default) == f.default


@each([f for f in fields(Config) if "choices" in f.metadata])
def test_a_choice_is_one_of_these(f):
    choices = f.metadata["choices"]
    for value in choices:
        assert parse_one(f, value) == value
    for value in ("none", choices[0].upper(), choices[0][:-1]):
        refused(lambda value=value: parse_one(f, value), f"--{f.name}", value)


def test_the_bounds_that_other_parts_of_the_house_rely_on():
    bounds = {f.name: (f.metadata.get("smallest"), f.metadata.get("largest")) for f in NUMBERS}
    assert bounds["vocab_size"] == (1, 2**16), "shards are uint16"
    assert bounds["seed"] == (None, 2**63 - 1), "torch's"
    assert bounds["grad_clip"][1] == math.inf, "no clipping"
    for name in ("n_layer", "n_head", "n_embd", "block_size", "total_batch_size", "max_steps"):
        assert bounds[name][0] == 1
    for name in ("max_lr", "cooldown", "grad_clip"):
        assert bounds[name][0] == 1e-12, "something is divided by it"


@pytest.mark.parametrize("bad, named, good", [
    ("--max_lr 1e-3 --min_lr 1.1e-3", "--min_lr --max_lr", "--max_lr 1e-3 --min_lr 1e-3"),
    ("--sequence_length 1025", "--sequence_length --block_size", "--sequence_length 1024"),
    ("--cooldown 0.5", "--cooldown", "--recipe frontier --cooldown 0.5"),
    ("--vocab_size 50256", "--vocab_size --hellaswag_every", "--vocab_size 50257"),
    ("--vocab_size 50256", "--vocab_size", "--vocab_size 50256 --hellaswag_every 0"),
    ("--vocab_size 50256 --hellaswag_every 0 --sample_prompt To", "--sample_prompt --vocab_size",
     "--vocab_size 50256 --hellaswag_every 0 --sample_prompt auto"),
    ("--overfit --preset small", "--overfit --preset", "--overfit --preset gpt2"),
    ("--overfit --val_every 1", "--overfit --val_every", "--overfit --val_every 0"),
    ("--overfit --resume x", "--overfit --resume", "--overfit --resume"),
    ("--overfit --out log", "--overfit --out", "--overfit --seed 1"),
    ("--overfit --checkpoint_every 5", "--overfit --checkpoint_every", "--overfit --dry_run"),
])
def test_flags_that_contradict_each_other_are_refused(bad, named, good):
    refused(lambda: parse_flags(bad.split()), *named.split())
    parse_flags(good.split())


def test_a_recipes_own_flag_may_have_a_number_as_its_default():
    @dataclass
    class LionConfig(Config):
        beta: float = flag(0.9, "optimisation", "Lion's beta.")

    lion = replace(RECIPES["gpt2"], own_flags=("beta",))
    table = FlagTable(LionConfig, RECIPES | {"lion": lion}, PRESETS, OVERFIT)
    table.check(LionConfig())
    table.check(LionConfig(recipe="lion", beta=0.8))
    refused(lambda: table.check(LionConfig(beta=0.8)), "--beta", "gpt2")


@pytest.mark.parametrize("line, expected", [
    ("--max-steps=7", {"max_steps": 7}),
    ("--max_steps 1_000", {"max_steps": 1000}),
    ("--out=a-b--c --data d-e", {"out": "a-b--c", "data": "d-e"}),
    ("--no-shuffle", {"shuffle": False}),
    ("--no_tf32 --tf32", {"tf32": True}),
    ("--tf32 --no-tf32", {"tf32": False}),
    ("--compile", {"compile": True}),
    ("--compile=False", {"compile": False}),
    ("--compile False", {"compile": False}),
    ("--no_compile --compile True", {"compile": True}),
    ("--compile --compile False", {"compile": False}),
    ("--recompute=True", {"recompute": True}),
    ("--recompute False --max_steps 5", {"recompute": False, "max_steps": 5}),
    ("--recompute --shard-optimizer", {"recompute": True, "shard_optimizer": True}),
    ("--min_lr 0", {"min_lr": 0.0}),
    ("--grad_clip inf", {"grad_clip": math.inf}),
    ("--local_rank=1", {}),
    ("--resume", {"resume": "auto"}),
    ("--resume --data d", {"resume": "auto", "data": "d"}),
    ("--resume=a/log", {"resume": "a/log"}),
])
def test_flags_may_be_written_in_these_ways_and_the_last_one_counts(line, expected):
    """All ways of FlagParser, which every command has: test_cli.py."""
    config, given = parse_flags(line.split())
    assert asdict(config) == asdict(Config()) | expected
    assert given == set(expected)


@pytest.mark.parametrize("line", [
    "--no_recompute", "--no_dry_run", "--no_data", "--shuffle no", "--compile=maybe", "-n 3",
    "--window 3",
])
def test_what_is_no_flag_is_refused(line):
    refused(lambda: parse_flags(line.split()), "--help")


def test_help_names_each_flag_and_its_defaults():
    text = " ".join(script("train_gpt2.py", "--help").stdout.split())
    for f in fields(Config):
        assert f"--{f.name}" in text, f.name
    for shown in ("default 19073", "speedrun: 3242", "default auto", "default on",
                  "default 0.0006; speedrun: 0.02; frontier: 0.02"):
        assert shown in text, shown


def test_a_mistake_in_a_flag_is_told_by_rank_0_alone():
    mistake = run("--max_steps", 0, processes=2, code=2)
    assert mistake.stderr.count("\n") == 1
    assert "--max_steps" in mistake.stderr


# ----------------------------------------------------------------------- start and data

def test_data_is_the_folder_of_the_shards(go, forwards, tmp_path):
    write_shard(tmp_path / "x_train_000001.npy", np.full(2000, 7, np.uint16))
    write_shard(tmp_path / "x_val_000000.npy", np.full(2000, 9, np.uint16))

    go("log", "--data", tmp_path, "--val_every", 1)

    assert trained(forwards).unique().tolist() == [7]
    validated = torch.cat([idx for trains, idx, _ in forwards if not trains])
    assert validated.unique().tolist() == [9]


def test_no_shuffle_reads_the_tokens_in_their_order(go, forwards, byte_data):
    go("in order", "--no_shuffle")
    tokens = np.load(byte_data / "text_train_000001.npy").astype(np.int64)
    in_order = torch.from_numpy(tokens[:4 * STEPS * T].reshape(-1, T))
    assert torch.equal(trained(forwards), in_order)

    forwards.clear()
    go("shuffled")
    assert trained(forwards).shape == in_order.shape
    assert not torch.equal(trained(forwards), in_order)


@pytest.mark.parametrize("given, count", [(1, 1), (5 * T, 5), (6 * T - 1, 5), (10**6, 2499 // T)])
def test_val_tokens_is_how_much_of_the_validation_shard_is_read(
        given, count, go, forwards, byte_data):
    go("log", "--max_steps", 1, "--val_every", 2, "--val_tokens", given, "--batch_size", 4)

    batches = [(idx, y) for trains, idx, y in forwards if not trains]
    first = batches[:len(batches) // 2]                 # of two validations
    x = torch.cat([idx for idx, _ in first])
    y = torch.cat([targets for _, targets in first])
    is_read = y[:, 0] >= 0                              # other rows only fill the last batch
    tokens = torch.from_numpy(np.load(byte_data / "text_val_000000.npy").astype(np.int64))
    assert torch.equal(x[is_read].flatten(), tokens[:count * T])
    assert torch.equal(y[is_read].flatten(), tokens[1:count * T + 1])


# ----------------------------------------------------------------------- model

@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_chooses_the_model(recipe, go, tmp_path):
    text = go("log", "--recipe", recipe, *SAVED)
    assert saved(tmp_path / "log")["recipe"] == recipe
    assert type(load_model(tmp_path / "log")) is RECIPES[recipe].model
    assert f"\n{recipe}: " in text


def test_init_is_where_the_weights_come_from(go, start, tmp_path):
    expected = torch.load(start)["model"]
    go("begun", "--init", start, *STILL, *SAVED)
    go("fresh", "--init", "scratch", *STILL, *SAVED)
    for name, tensor in expected.items():
        torch.testing.assert_close(saved(tmp_path / "begun")["model"][name], tensor)
        assert not torch.allclose(saved(tmp_path / "fresh")["model"][name], tensor, atol=1e-3)


@pytest.mark.parametrize("name, value, weight, shape", [
    ("n_layer", 3, "transformer.h.2.mlp.c_fc.weight", (64, 16)),
    ("n_embd", 24, "transformer.wte.weight", (256, 24)),
    ("block_size", 40, "transformer.wpe.weight", (40, 16)),
    ("vocab_size", 300, "transformer.wte.weight", (300, 16)),
])
def test_the_shape_of_the_model(name, value, weight, shape, go, tmp_path):
    go("log", f"--{name}", value, "--sequence_length", T, *SAVED, "--max_steps", 1)
    checkpoint = saved(tmp_path / "log")
    assert checkpoint["model_config"][name] == value
    assert checkpoint["config"][name] == value
    assert checkpoint["model"][weight].shape == shape


@pytest.mark.parametrize("heads", [1, 4])
def test_n_head_divides_the_width(heads, go, monkeypatch):
    attend = F.scaled_dot_product_attention
    shapes = set()

    def watch(q, k, v, **options):
        shapes.add(q.shape[1:])                         # nh, T, hs
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    go("log", "--n_head", heads, "--max_steps", 1)
    assert shapes == {(heads, T, 16 // heads)}


# ----------------------------------------------------------------------- batch

@pytest.mark.parametrize("sequences", [4, 6])
def test_total_batch_size_is_the_tokens_of_a_step(sequences, go, forwards, tmp_path):
    go("log", "--total_batch_size", sequences * T)
    assert trained(forwards).shape == (sequences * STEPS, T)
    assert list(logged(tmp_path / "log", "tokens").values()) == [
        0, sequences * T, 2 * sequences * T]


@pytest.mark.parametrize("given, B", [(1, 1), (2, 2), (3, 2), (4, 4), (99, 4), ("auto", 4)])
def test_batch_size_is_the_most_sequences_of_a_micro_step(given, B, go, forwards):
    text = go("log", "--batch_size", given)
    assert [idx.shape for _, idx, _ in forwards] == [(B, T)] * (STEPS * 4 // B)
    assert f"= {B} x {T} x {4 // B} micro-step" in text


@pytest.mark.parametrize("given, length", [(T // 2, T // 2), ("auto", T), (T, T)])
def test_sequence_length_cuts_the_same_tokens(given, length, go, forwards, byte_data):
    go("log", "--sequence_length", given, "--no_shuffle")
    tokens = np.load(byte_data / "text_train_000001.npy")[:STEPS * 4 * T]
    assert trained(forwards).size(1) == length
    assert trained(forwards).flatten().tolist() == tokens.tolist()


# ----------------------------------------------------------------------- optimisation

@pytest.mark.parametrize("flags, expected", [
    # of 1e-3; a cosine has passed 85% and 15% of its way after a quarter and three quarters
    ("", [1, 0.86820, 0.55, 0.23180]),
    ("--warmup_steps 2", [0.5, 1, 1, 0.55]),
    ("--min_lr 0", [1, 0.85355, 0.5, 0.14645]),
    ("--min_lr 5e-4", [1, 0.92678, 0.75, 0.57322]),
    ("--min_lr 1e-3", [1, 1, 1, 1]),
    ("--recipe speedrun --warmup_steps 2 --cooldown 0.25", [0.5, 1, 1, 1]),
    ("--recipe speedrun --cooldown 0.5 --min_lr 0", [1, 1, 1, 0.5]),
    ("--recipe speedrun --cooldown 1 --min_lr 0", [1, 0.75, 0.5, 0.25]),
    ("--recipe speedrun --min_lr 0", [1, 1, 1, 0.25 / 0.2856]),
    ("--recipe speedrun --cooldown 0.5 --min_lr 5e-4", [1, 1, 1, 0.75]),
])
def test_the_learning_rate_of_each_step(flags, expected, go, tmp_path):
    go("log", "--max_steps", 4, "--max_lr", 1e-3, *flags.split())
    rates = [rate / 1e-3 for rate in logged(tmp_path / "log", "lr").values()]
    assert rates == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("recipe", ["gpt2", "speedrun"])
def test_weight_decay_shrinks_matrices_by_the_rate(recipe, go, tmp_path):
    """In gpt2 all of them; in the modern recipes those of Muon."""
    go("begun", "--recipe", recipe, *STILL, "--max_steps", 1, *SAVED)
    before = saved(tmp_path / "begun")["model"]
    again = ["--init", tmp_path / "begun", "--recipe", recipe, "--max_lr", 0.01, "--max_steps", 1,
             *SAVED]

    go("without", *again, "--weight_decay", 0)
    go("with", *again, "--weight_decay", 10)

    without = saved(tmp_path / "without")["model"]
    decayed = saved(tmp_path / "with")["model"]
    for name, p in before.items():
        expected = without[name]
        if p.dim() == 2 and (recipe == "gpt2" or ".h." in name):
            expected = expected - 0.01 * 10 * p
        torch.testing.assert_close(decayed[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_seed_is_that_of_the_weights_and_of_the_datas_order(recipe, go, forwards, tmp_path):
    batches, weights = [], []
    for i, seed in enumerate((5, 5, 6)):
        forwards.clear()
        go(str(i), "--recipe", recipe, *STILL, "--max_steps", 1, *SAVED, "--seed", seed)
        batches.append(trained(forwards))
        weights.append(saved(tmp_path / str(i))["model"])

    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    drawn = [name for name, p in weights[0].items() if p.dim() == 2 and p.std() > 1e-6]
    assert len(drawn) > 3
    for name in drawn:
        assert torch.equal(weights[0][name], weights[1][name]), name
        assert not torch.equal(weights[0][name], weights[2][name]), name


def test_a_user_can_draw_the_weights_of_a_run_from_its_seed(go, tmp_path):
    go("log", *STILL, "--max_steps", 1, *SAVED, "--seed", 6)
    config, _ = parse_flags([str(word) for word in TINY])
    torch.manual_seed(6)
    expected = fresh_model(config).state_dict()
    for name, tensor in saved(tmp_path / "log")["model"].items():
        torch.testing.assert_close(tensor, expected[name])


# ----------------------------------------------------------------------- speed

def test_device_is_where_the_run_computes(go):
    assert " on cpu (" in go("log", "--device", "cpu")
    refused(lambda: go("log", "--device", "cuda:99"), "--device cuda:99", "cpu")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_that_of_linear_layers_in_the_step_and_in_the_validation(
        recipe, dtype, go, forwards):
    seen = set()

    def watch(module, inputs, output):
        # Before the first forward the loss in chunks is compared with the model's, in float32.
        if forwards and isinstance(module, torch.nn.Linear):
            seen.add((torch.is_grad_enabled(), output.dtype))

    hook = register_module_forward_hook(watch)
    try:
        text = go("log", "--recipe", recipe, "--dtype", dtype, "--max_steps", 1, "--val_every", 1)
    finally:
        hook.remove()
    assert seen == {(True, getattr(torch, dtype)), (False, getattr(torch, dtype))}
    assert f"), {dtype} (" in text


@pytest.mark.parametrize("flags", [[], ["--no_compile"], ["--compile", "--compile=False"]])
def test_a_short_run_on_a_cpu_is_not_compiled(flags, go, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model))
    assert "compil" not in go("log", *flags)
    assert not compiled


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["auto", "naive"])
def test_attention_is_torchs_or_by_the_formula(recipe, name, go, monkeypatch):
    attend = F.scaled_dot_product_attention
    calls = []

    def watch(*args, **options):
        calls.append(options)
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    text = go("log", "--recipe", recipe, "--attention", name, "--max_steps", 1)
    assert ("attention naive," in text) == (name == "naive")
    assert bool(calls) == (name == "auto")


def note_moments():
    """From now on this rank prints of how many numbers its AdamW has moments."""
    def note(optimizer, args, options):
        held = sum(state["exp_avg_sq"].numel() for state in optimizer.state.values())
        print(f"moments {held}")

    register_optimizer_step_post_hook(note)


def test_shard_optimizer_shares_the_matrices_moments_out(byte_data, tmp_path):
    """Of two ranks each has about half of them, also after a resume. Gains and biases are small."""
    matrices = (256 + T + 2 * 12 * 16) * 16
    others = (2 * 13 + 2) * 16
    for steps in (1, 2):
        text = run("--data", byte_data, *TINY, *SAVED, "--shard_optimizer", "--max_steps", steps,
                   "--out", tmp_path, processes=2, before=[note_moments]).stdout
        held = [int(line.split()[1]) for line in text.splitlines() if "moments " in line]
        assert len(held) == 2
        assert sum(held) == matrices + 2 * others
        assert max(held) < 0.6 * (matrices + others)


# ----------------------------------------------------------------------- output

@pytest.mark.parametrize("every, steps", [(0, []), (2, [2, 4, 5]), (9, [5])])
def test_checkpoint_every(every, steps, go, tmp_path):
    go("log", "--max_steps", 5, "--checkpoint_every", every, "--keep_checkpoints", "all")
    assert saved_steps(tmp_path / "log") == steps
    assert [saved(tmp_path / "log", step)["step"] for step in steps] == steps


def test_out_is_the_only_folder_that_a_run_writes_to(byte_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("--data", byte_data, *TINY, "--checkpoint_every", 9)
    train("--data", byte_data, *TINY, "--checkpoint_every", 9, "--out", "a/b c")
    assert {path.name for path in tmp_path.iterdir()} == {"log", "a"}
    for folder in (tmp_path / "log", tmp_path / "a/b c"):
        assert {path.name for path in folder.iterdir()} == {
            ".train_gpt2.lock", "metrics.csv", "checkpoint_000003.pt"}


def test_wandb_is_told_the_run_and_its_values(go, monkeypatch):
    told = []
    fake = SimpleNamespace(
        init=lambda **options: told.append(options),
        log=lambda values, step: told.append((step, *values)),
        finish=lambda: told.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)

    go("without")
    assert not told
    go("log", "--wandb", "--val_every", 9, "--max_lr", 0.25)

    begun, *values, end = told
    assert begun["name"] == "log"
    assert begun["config"]["n_layer"] == 2
    assert begun["config"]["min_lr"] == 0.025               # what "auto" has become
    assert [value[:2] for value in values] == [
        (0, "val"), (0, "train"), (1, "train"), (2, "train"), (3, "val")]
    assert end == "finish"


# ----------------------------------------------------------------------- by no flag

def test_on_a_cpu_the_loss_never_has_all_logits_in_memory_unless_it_is_compiled(
        go, tmp_path, monkeypatch):
    """A compiler fuses them with the loss."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    flags = ["--total_batch_size", 4096, "--max_steps", 1]
    logits = 4096 * 256 * 4         # bytes

    with LargestStorage() as eager:
        go("eager", *flags)
    with LargestStorage() as compiled:
        go("compiled", *flags, "--compile")

    assert eager.bytes < logits <= compiled.bytes
    assert logged(tmp_path / "eager") == pytest.approx(logged(tmp_path / "compiled"), abs=1e-5)
