"""The values of a real GPU: what its owner runs first, `python -m pytest -m gpu`.

On a CPU the same functions run at tiny sizes, so that they are known to work; what only a GPU has
is skipped there. One process runs all of it by default. `-n 4 --dist worksteal` is faster: one of
the four needs 24 GB of the GPU's memory, the others 9. tests/null_gpu shows that these paths run at
all, on a card that computes nothing.
"""
import gc
import itertools
import os
import shutil

import numpy as np
import pytest
import torch
import torch._dynamo
from helpers import ROOT, logged, run, train
from peers import RECIPES, GpuProcess, make_model, make_run, tokens
from torch._dynamo.utils import counters

import train_gpt2
from model import attention
from runtime.files import checkpoints
from runtime.shards import write_shard
from runtime.tokenizer import encode

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")

DTYPES = ["float32", "bfloat16"]
QUIET = ["--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0]
SIZES = {
    "cpu": [
        "--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 32, "--vocab_size", 256,
        "--total_batch_size", 256, "--max_steps", 5,
    ],
    # A head of 64 numbers: each of a GPU's attention kernels runs.
    "cuda": [
        "--n_layer", 4, "--n_head", 4, "--n_embd", 256, "--block_size", 256,
        "--total_batch_size", 8192, "--max_steps", 25,
    ],
}


def on_both(**values):
    """Parametrizes with all combinations of the values on a GPU, and with the first on the CPU."""
    rows = list(itertools.product(*values.values()))
    cases = [("cpu", *rows[0])]
    cases += [pytest.param("cuda", *row, marks=GPU) for row in rows]
    return pytest.mark.parametrize(["device", *values], cases)


def on_a_gpu(**values):
    """Parametrizes with all combinations of the values, on a GPU."""
    rows = list(itertools.product(*values.values()))
    cases = [pytest.param("cuda", *row, marks=GPU) for row in rows]
    return pytest.mark.parametrize(["device", *values], cases)


# ----------------------------------------------------------------------- what the tests share

@pytest.fixture(autouse=True)
def new_compiler():
    """Each test compiles anew, and fails where torch would give up compiling.

    torch compiles a function at most 8 times in a process. Then it runs it eagerly, without a word.
    """
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()                # other processes use the same GPU


def count_graphs():
    """How many graphs this test has compiled. The whole model is in each: none has a break."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def compiler(device, monkeypatch):
    """On a CPU torch's own kernels run the graphs: Inductor's C++ compiles for half a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device == "cuda":
        return
    compile = torch.compile

    def compile_without_inductor(model, dynamic):
        return compile(model, dynamic=dynamic, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(torch, "compile", compile_without_inductor)


@pytest.fixture
def steps(monkeypatch):
    """The numbers of the steps that have been trained. None of them may compile."""
    numbers = []
    train_step = train_gpt2.train_step

    def train_step_without_compiling(step, *arguments):
        numbers.append(step)
        with torch.compiler.set_stance("fail_on_recompile"):
            return train_step(step, *arguments)

    monkeypatch.setattr(train_gpt2, "train_step", train_step_without_compiling)
    return numbers


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of Shakespeare, {device: path}: of its tokens for a GPU, of its bytes for the CPU."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:400_000]
    ids = {"cuda": encode(text), "cpu": np.frombuffer(text.encode("latin-1"), np.uint8)}
    folders = {}
    for device in SIZES:
        folders[device] = tmp_path_factory.mktemp(device)
        tokens = ids[device].astype(np.uint16)
        write_shard(folders[device] / "text_val_000000.npy", tokens[:20_000])
        write_shard(folders[device] / "text_train_000001.npy", tokens[20_000:])
    return folders


@pytest.fixture
def flags(device, shards):
    """A small run on the device."""
    return [
        *QUIET, *SIZES[device], "--data", shards[device], "--device", device,
        "--dtype", "float32", "--warmup_steps", 0,
    ]


def losses(out, *flags):
    train(*flags, "--out", out)
    return list(logged(out).values())


# ----------------------------------------------------------------------- compiled

@needs_compiler
@on_both(recipe=RECIPES, dtype=DTYPES)
def test_compiled_steps_equal_eager_ones(
        device, recipe, dtype, flags, compiler, steps, tmp_path):
    """One graph is compiled, before the first step: also where the batch grows (frontier's)."""
    flags += ["--recipe", recipe, "--dtype", dtype, "--no_tf32"]

    eager = losses(tmp_path / "eager", *flags, "--no_compile")
    others = losses(tmp_path / "others", *flags, "--no_compile", "--batch_size", 2)
    steps.clear()
    compiled = losses(tmp_path / "compiled", *flags, "--compile")

    assert count_graphs() == 1
    assert len(steps) == len(eager)
    # Steps amplify rounding. So compiled losses may differ from eager ones by a few times as much
    # as those of other micro-batches do, which are rounded otherwise.
    rounding = max(abs(a - b) for a, b in zip(eager, others, strict=True))
    tolerance = {"float32": 1e-3, "bfloat16": 3e-2}
    assert compiled == pytest.approx(eager, abs=3 * rounding + tolerance[dtype])
    assert eager[-1] < eager[0] - 0.05


def gradients(model, call, dtype):
    idx = tokens(8, 257, 50257).to("cuda")
    model.zero_grad()
    with torch.autocast("cuda", getattr(torch, dtype), enabled=dtype != "float32"):
        _, loss = call(idx[:, :-1], idx[:, 1:])
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@needs_compiler
@on_a_gpu(recipe=RECIPES, dtype=DTYPES)
def test_the_gradient_of_each_parameter_is_that_of_eager_mode(device, recipe, dtype):
    """On a CPU: test_model.py, without Inductor's C++."""
    model = make_model(
        cls=RECIPES[recipe].model, spread=0.02, n_layer=4, n_head=4, n_embd=256, block_size=256,
        vocab_size=50304).to(device)

    eager = gradients(model, model, dtype)
    run = make_run(model, GpuProcess(device="cuda:0"), recipe=recipe, dtype=dtype, compile=True)
    compiled = gradients(model, run.state.compiled_model, dtype)

    assert count_graphs() == 1
    tolerance = {"float32": 1e-4, "bfloat16": 0.05}
    for name, gradient in eager.items():
        # Learned scalars are differences of large sums.
        if gradient.numel() <= 2 and dtype == "bfloat16":
            continue
        error = (compiled[name] - gradient).norm() / (gradient.norm() + 1e-9)
        assert error < tolerance[dtype], name


# ----------------------------------------------------------------------- whole runs

@on_both(recipe=RECIPES)
def test_killed_and_resumed_a_run_ends_alike(device, recipe, flags, tmp_path):
    flags += ["--recipe", recipe, "--max_steps", 6, "--checkpoint_every", 3, "--no_compile",
              "--out", tmp_path]
    train(*flags)
    whole = logged(tmp_path)
    assert len(whole) == 6

    _, last = checkpoints(tmp_path)[-1]
    last.unlink()
    train(*flags)

    tolerance = {"cpu": 0, "cuda": 2e-3}
    assert logged(tmp_path) == pytest.approx(whole, abs=tolerance[device])


@on_both()
def test_float16_trains_as_float32(device, flags, tmp_path):
    # At a tenth of its rate: at the full one Muon's steps amplify the rounding of float16.
    flags += ["--recipe", "speedrun", "--max_steps", 5, "--max_lr", 0.002, "--no_compile"]
    exact = losses(tmp_path / "float32", *flags)
    half = losses(tmp_path / "float16", *flags, "--dtype", "float16")
    assert half == pytest.approx(exact, abs=0.02)
    assert half[-1] < half[0] - 0.05


@on_a_gpu(recipe=RECIPES, compiled=["--no_compile", "--compile"])
def test_a_step_never_waits_for_the_gpu(device, recipe, compiled, flags, tmp_path, monkeypatch):
    train_step = train_gpt2.train_step
    steps = []

    def train_step_without_waiting(step, *arguments):
        steps.append(step)
        if step >= 2:                           # the first may allocate
            torch.cuda.set_sync_debug_mode("error")
        try:
            return train_step(step, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(train_gpt2, "train_step", train_step_without_waiting)
    train(*flags, "--recipe", recipe, "--dtype", "bfloat16", "--max_steps", 6, "--batch_size", 8,
          compiled, "--out", tmp_path)

    assert steps == [0, 1, 2, 3, 4, 5]
    assert count_graphs() == (compiled == "--compile")


@on_a_gpu()
def test_64_sequences_of_1024_tokens_fit_where_it_was_counted(device, shards, tmp_path):
    _, memory = torch.cuda.mem_get_info()
    if memory < 30e9:
        pytest.skip("needs a GPU of at least 30 GB")
    torch.cuda.reset_peak_memory_stats()

    train(*QUIET, "--data", shards["cuda"], "--dtype", "bfloat16", "--batch_size", 64, "--compile",
          "--max_steps", 3, "--total_batch_size", 2 * 65536, "--checkpoint_every", 0,
          "--out", tmp_path)

    assert count_graphs() == 1
    assert torch.cuda.max_memory_allocated() < 24.5 * 2**30


@on_a_gpu()
def test_a_gpu_has_the_losses_of_the_cpu(device, shards, tmp_path):
    """With the micro-batch and the attention kernel that it chooses itself."""
    flags = [*QUIET, *SIZES["cpu"], "--data", shards["cpu"], "--dtype", "float32", "--no_tf32",
             "--no_compile", "--warmup_steps", 0, "--checkpoint_every", 0]
    on_cpu = losses(tmp_path / "cpu", *flags, "--device", "cpu")
    on_gpu = losses(tmp_path / "gpu", *flags, "--device", "cuda")
    assert on_gpu == pytest.approx(on_cpu, abs=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=TWO_GPUS)])
def test_two_gpus_train_as_one(device, recipe, flags, tmp_path):
    """Five steps. At a save the digests of the ranks' weights are compared."""
    flags += ["--recipe", recipe, "--max_steps", 5, "--checkpoint_every", 5]
    one = losses(tmp_path / "one", *flags, "--no_compile")
    for way in ("--no_compile", "--compile", "--shard_optimizer"):
        run(*flags, way, "--out", tmp_path / way, processes=2)
        two = list(logged(tmp_path / way).values())
        assert two == pytest.approx(one, abs=5e-3), way


# ----------------------------------------------------------------------- attention

def plain_attention(q, k, v):
    """(B, T, heads, 64) in float64."""
    T = q.size(1)
    future = torch.ones(T, T).triu(1).bool()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    scores = scores.masked_fill(future, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@on_both(T=[7, 1, 64, 130], kernel=["auto", "naive"])
def test_attention_is_the_formula_of_float64_forward_and_backward(device, T, kernel):
    dtype, tolerance = torch.float32, 1e-5
    if device == "cuda":
        dtype, tolerance = torch.bfloat16, 0.05
    torch.manual_seed(T)
    inputs = []
    exact_inputs = []
    for _ in range(3):
        tensor = torch.randn(2, T, 3, 64).to(device, dtype)
        inputs.append(tensor.requires_grad_())
        exact_inputs.append(tensor.detach().cpu().double().requires_grad_())
    upstream = torch.randn(2, T, 3, 64).to(device, dtype)

    y = attention(*inputs, kernel)
    y.backward(upstream)

    expected = plain_attention(*exact_inputs)
    expected.backward(upstream.cpu().double())
    torch.testing.assert_close(y.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for tensor, exact in zip(inputs, exact_inputs, strict=True):
        found = tensor.grad.cpu().double()
        torch.testing.assert_close(found, exact.grad, atol=tolerance, rtol=tolerance)
