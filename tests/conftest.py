"""The tests import the scripts from the folder above, without the network or a user's hub cache."""
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:         # the workers inherit it
    # a user's cache may hold files that a test needs to be missing
    empty = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["HF_HOME"] = empty.name
# one thread a process: tests run in parallel (pytest-xdist), and torch's threads would compete
# for the cores
os.environ["OMP_NUM_THREADS"] = "1"
# else each process that compiles starts up to six others, which import torch and try
# a vector instruction
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# The files that take or wait long, the longest first: a worker gets a file at a time (--dist
# loadfile), so that what its tests share is made once, and the short ones at the end fill
# the workers evenly.
LONG = [f"test_{name}.py" for name in (
    "resume export machines fineweb signals model checkpoint evaluation check frontier "
    "same_numbers speedrun flags output weights sample cli hellaswag readme text bench "
    "plain_loop").split()]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (
        LONG.index(item.path.name) if item.path.name in LONG else len(LONG)))


@pytest.fixture(autouse=True, scope="session")
def memory_is_given_back():
    """No tune_malloc in the tests' process: it lasts, and later tests measure memory."""
    from runtime import hardware
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "tune_malloc", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_pictures():
    """A picture takes two seconds; test_plots.py draws them."""
    from runtime import output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "plot_run", lambda *arguments: None)
        yield


@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's encoding made by tiktoken's own loader."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    assets = Path(__file__).resolve().parent.parent / "assets"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")      # tiktoken would else keep a copy in a cache
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(assets / "vocab.bpe"), str(assets / "encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256}, explicit_n_vocab=50257)


@pytest.fixture(scope="session")
def encoder():
    from runtime.tokenizer import Encoder
    return Encoder()


@pytest.fixture(scope="session")
def byte_data(tmp_path_factory):
    """Shards for helpers.BYTES: one of validation, three for training."""
    import numpy as np

    from runtime.shards import write_shard
    folder = tmp_path_factory.mktemp("bytes")
    text = (Path(__file__).resolve().parent.parent / "input.txt").read_bytes()[:12_001]
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    for i, (a, b) in enumerate(((0, 2500), (2500, 6000), (6000, 7517), (7517, 12001))):
        write_shard(folder / f"text_{'train' if i else 'val'}_{i:06d}.npy", tokens[a:b])
    return folder


def pytest_terminal_summary(terminalreporter, config):
    if "check_*.py" not in config.getini("python_files"):
        terminalreporter.write_line(
            "GPU paths are checked apart, and without a GPU: tests/null_gpu/check "
            "(CONTRIBUTING.md)")
