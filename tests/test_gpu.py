"""The values of a real GPU: what its owner runs first, `python -m pytest -m gpu`. On a CPU the same functions
run at tiny sizes, so that they are known to work; what only a GPU has is skipped there. One process runs all
of it by default; `-n 4 --dist worksteal` is faster: one needs 24 GB of the GPU's memory, the others 9.

tests/null_gpu shows that these paths run at all, on a card that computes nothing."""
import gc
import itertools
import os
import shutil

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import train_gpt2
from helpers import ROOT, logged, run, train
from model import ATTENTION, attention
from recipes import MODELS
from peers import make_model, tokens
from runtime.files import checkpoints
from runtime.shards import write_shard
from runtime.tokenizer import encode

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
RECIPES = ["gpt2", "speedrun", "frontier"]
DTYPES = ["float32", "bfloat16"]
QUIET = ["--val_every", 0, "--hellaswag_every", 0, "--sample_every", 0]
# a head of 64 on a GPU: each of its attention kernels runs
SIZES = {"cpu": dict(n_layer=1, n_head=2, n_embd=32, block_size=32, total_batch_size=256, max_steps=5,
                     vocab_size=256),
         "cuda": dict(n_layer=4, n_head=4, n_embd=256, block_size=256, total_batch_size=8192, max_steps=25)}


@pytest.fixture(autouse=True)
def new_compiler():
    """torch compiles a function at most 8 times in a process, then it runs it eagerly, without a word. Each
    test begins anew, and fails where that happens."""
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()                # other processes use the same GPU


def graphs():
    """How many graphs this test has compiled. None of them may have a break: all of the model is in them."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def compiler(device, monkeypatch):
    """On a CPU Inductor's C++ takes half a minute to compile: there torch's own kernels run its graphs."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device == "cpu":
        compile, backend = torch.compile, "aot_eager_decomp_partition"
        monkeypatch.setattr(torch, "compile", lambda model, dynamic: compile(
            model, dynamic=dynamic, backend=backend))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of Shakespeare's tokens, on a CPU of its bytes."""
    folders = {device: tmp_path_factory.mktemp(device) for device in SIZES}
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:400_000]
    for device, ids in (("cuda", encode(text)), ("cpu", np.frombuffer(text.encode("latin-1"), np.uint8))):
        write_shard(folders[device] / "text_val_000000.npy", ids[:20_000].astype(np.uint16))
        write_shard(folders[device] / "text_train_000001.npy", ids[20_000:].astype(np.uint16))
    return folders


def flags(shards, device, **more):
    values = {"data": shards[device], "device": device, "dtype": "float32", "warmup_steps": 0}
    values |= SIZES[device] | more
    return [*QUIET, *(part for name, value in values.items() for part in (f"--{name}", value))]


def losses(out, *argv):
    train(*argv, "--resume", "never", "--out", out)
    return list(logged(out).values())


def each(cpu=99, **values):
    """Parametrizes with all combinations of values on a GPU, and with the first `cpu` of them on the CPU."""
    rows = list(itertools.product(*values.values()))
    return pytest.mark.parametrize(["device", *values], [("cpu", *row) for row in rows[:cpu]] + [
        pytest.param("cuda", *row, marks=GPU) for row in rows])


needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


@needs_compiler
@each(dtype=DTYPES, recipe=RECIPES, cpu=3)
def test_compiled_steps_equal_eager_ones(device, recipe, dtype, shards, compiler, tmp_path, monkeypatch):
    """One graph is compiled, before the first step: also where the batch grows (frontier)."""
    step, seen = train_gpt2.train_step, []

    def strict(number, *args):
        seen.append(number)
        with torch.compiler.set_stance("fail_on_recompile"):
            return step(number, *args)
    how = flags(shards, device, recipe=recipe, dtype=dtype)
    eager = losses(tmp_path / "eager", *how, "--no_compile")
    monkeypatch.setattr(train_gpt2, "train_step", strict)
    compiled = losses(tmp_path / "compiled", *how, "--compile")
    assert graphs() == 1 and len(seen) == len(eager)
    assert compiled == pytest.approx(eager, abs=2e-3 if dtype == "float32" else 3e-2)
    assert eager[-1] < eager[0] - 0.05


@needs_compiler
@each(recipe=RECIPES, dtype=DTYPES, cpu=0)
def test_the_gradient_of_each_parameter_is_that_of_eager_mode(device, recipe, dtype):
    """On a CPU: test_model.py, without Inductor's C++."""
    model = make_model(cls=MODELS[recipe], spread=0.02, n_layer=4, n_head=4, n_embd=256, block_size=256,
                       vocab_size=50304).to(device)
    idx, found = tokens(8, 257, 50257).to(device), []
    for call in (model, train_gpt2.compile_model(model)):
        model.zero_grad()
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            call(idx[:, :-1], idx[:, 1:])[1].backward()
        found.append([p.grad for p in model.parameters()])
    assert graphs() == 1
    for (name, p), eager, compiled in zip(model.named_parameters(), *found, strict=True):
        if p.numel() > 2 or dtype == "float32":         # learned scalars are differences of large sums
            error = (compiled - eager).norm() / (eager.norm() + 1e-9)
            assert error < (1e-4 if dtype == "float32" else 0.05), name


@each(recipe=RECIPES)
def test_killed_and_resumed_it_ends_alike(device, recipe, shards, tmp_path):
    how = flags(shards, device, recipe=recipe, max_steps=6, checkpoint_every=3, out=tmp_path)
    train(*how, "--no_compile")
    whole = logged(tmp_path)
    checkpoints(tmp_path)[-1][1].unlink()
    train(*how, "--no_compile")
    assert logged(tmp_path) == pytest.approx(whole, abs=0 if device == "cpu" else 2e-3)


@each(recipe=RECIPES, compiled=["--no_compile", "--compile"], cpu=0)
def test_a_step_never_waits_for_the_gpu(device, recipe, compiled, shards, tmp_path, monkeypatch):
    step, seen = train_gpt2.train_step, []

    def strict(number, *args):
        seen.append(number)
        torch.cuda.set_sync_debug_mode("error" if len(seen) > 2 else "default")     # the first may compile
        try:
            return step(number, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(train_gpt2, "train_step", strict)
    how = flags(shards, device, recipe=recipe, dtype="bfloat16", max_steps=6, batch_size=8)
    losses(tmp_path, *how, compiled)
    assert seen == list(range(6)) and graphs() == (compiled == "--compile")


@each(cpu=0)
def test_a_step_of_64_sequences_of_1024_tokens_fits_where_it_was_counted(device, shards, tmp_path):
    if torch.cuda.mem_get_info()[1] < 30e9:
        pytest.skip("a GPU of at least 30 GB")
    torch.cuda.reset_peak_memory_stats()
    losses(tmp_path, *QUIET, "--data", shards[device], "--dtype", "bfloat16", "--batch_size", 64,
           "--max_steps", 3, "--total_batch_size", 2 * 65536, "--checkpoint_every", 0)
    assert graphs() == 1 and torch.cuda.max_memory_allocated() < 24.5 * 2**30


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus_train_as_one(recipe, shards, tmp_path):
    """Five steps; at a save the digests of the ranks' weights are compared."""
    how = flags(shards, "cuda", recipe=recipe, max_steps=5, checkpoint_every=5)
    one = losses(tmp_path / "one", *how, "--no_compile")
    for more in ("--no_compile", "--compile", "--shard_optimizer"):
        run(*how, more, "--out", tmp_path / more, processes=2)
        assert list(logged(tmp_path / more).values()) == pytest.approx(one, abs=5e-3)


@each()
def test_float16_trains_as_float32(device, shards, tmp_path):
    how = flags(shards, device, recipe="speedrun", max_steps=5)
    exact = losses(tmp_path / "float32", *how, "--no_compile")
    half = losses(tmp_path / "float16", *how, "--no_compile", "--dtype", "float16")
    assert half == pytest.approx(exact, abs=0.05)


@each(kernel=ATTENTION)
def test_attention_kernels_are_the_formula_of_float64_forward_and_backward(device, kernel):
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 0.05)
    for T in (7, 1, 64, 130):
        torch.manual_seed(T)
        q, k, v, upstream = (torch.randn(2, T, 3, 64).to(device, dtype).requires_grad_(i < 3)
                             for i in range(4))
        try:
            y = attention(q, k, v, kernel)
        except RuntimeError as error:
            assert "No available kernel" in str(error) or "No viable backend" in str(error), error
            pytest.skip(f"{device} has no kernel {kernel!r}")
        y.backward(upstream)
        Q, K, V = (t.detach().cpu().double().requires_grad_() for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", Q, K) / 8
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        Y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), V)
        Y.backward(upstream.cpu().double())
        for ours, expected in ((y, Y), (q.grad, Q.grad), (k.grad, K.grad), (v.grad, V.grad)):
            torch.testing.assert_close(ours.cpu().double(), expected, atol=tolerance, rtol=tolerance)
