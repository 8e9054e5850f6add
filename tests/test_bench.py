"""bench.py: the ladder's runs, the figures of its tables, and the curves that it compares."""
import functools
import re
import runpy
import subprocess

import pytest
from helpers import ROOT, command, forked

import bench
from bench import Curve, Timing
from runtime import hardware
from runtime.cli import RunError, UserError
from runtime.metrics import HEADER

TINY = ["--n_layer=1", "--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=2",
        "--device=cpu", "--dtype=float32"]


def cells(text):
    """The rows of a table that was printed: lists of cells, the first is of the columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if set(row[0]) != {"-"}]


def test_a_table_is_markdown_with_aligned_numbers(capsys):
    bench.print_table([{"a": "x", "b": "9.99", "c": "1"}, {"a": "yyy", "b": "1,234.56"}])
    assert capsys.readouterr().out.split("\n")[1:-2] == [
        "| a   |        b | c |",
        "| --- | -------- | - |",
        "| x   |     9.99 | 1 |",
        "| yyy | 1,234.56 |   |",
    ]


# ----------------------------------------------------------------------------- ladder and peer

def test_each_rung_of_the_ladder_changes_one_thing(monkeypatch):
    bottom, *rungs = bench.ladder_rungs(dict(
        device="cuda:0", dtype="bfloat16", compile=True, batch_size=16, total_batch_size=64,
    )).values()
    assert bottom == dict(
        dtype="float32", tf32=False, compile=False, attention="naive", vocab_size=50257)
    assert rungs == [
        {"tf32": True}, {"dtype": "bfloat16"}, {"compile": True}, {"attention": "auto"},
        {"vocab_size": 50304}, {"batch_size": 64, "total_batch_size": 256}]

    on_cpu = dict(device="cpu", dtype="float32", compile=False)
    monkeypatch.setattr(hardware, "bfloat16_of_cpu", lambda: "no bfloat16")
    _, *rungs = bench.ladder_rungs(on_cpu).values()
    assert rungs == [{"attention": "auto"}, {"vocab_size": 50304}]

    # Of a CPU that has bfloat16 and is faster in float32 the ladder shows both.
    monkeypatch.setattr(hardware, "bfloat16_of_cpu", lambda: "Intel's AVX512-BF16")
    *_, highest = bench.ladder_rungs(on_cpu).values()
    assert highest == {"dtype": "bfloat16"}
    *_, highest = bench.ladder_rungs(on_cpu, dtype_is_typed=True).values()
    assert highest == {"vocab_size": 50304}


@pytest.fixture
def rows_are_forked(monkeypatch):
    """A new Python takes ten times as long."""
    def run(words, cwd=None, **how):
        _, path, *flags = words
        call = functools.partial(runpy.run_path, path)
        if path == bench.SCRIPT:
            call = command("train_gpt2.py", *flags)
        [result] = forked(call, cwds=[cwd or ROOT])
        return subprocess.CompletedProcess(words, *result)

    monkeypatch.setattr(bench.subprocess, "run", run)


def test_the_ladder_times_real_runs(rows_are_forked, capsys):
    bench.main(["ladder", "--steps=1", "--turns=1", *TINY])
    columns, *rows = cells(capsys.readouterr().out)
    assert len(rows) == 3
    for row in rows:
        found = dict(zip(columns, row, strict=True))
        milliseconds = float(found["ms per step"].replace(",", ""))
        rate = 32 / milliseconds * 1e3
        assert float(found["tokens/s"].replace(",", "")) == pytest.approx(rate, rel=0.1)
        assert 0.1 < float(found["peak GB"]) < 9


def test_a_rung_stands_on_those_that_can_run(monkeypatch, capsys):
    asked = []

    def time_run(flags, folder):
        asked.append((flags["attention"], flags["vocab_size"]))
        if asked[-1] == ("auto", 50257):
            raise RunError("no kernel")
        return Timing([0.01], 32, "peak memory 1.0 GB")

    monkeypatch.setattr(bench, "time_run", time_run)
    bench.main(["ladder", "--turns=2", *TINY])
    assert asked == 2 * [("naive", 50257), ("auto", 50257), ("naive", 50304)]
    text = capsys.readouterr().out
    assert text.count(": no kernel") == 2
    assert len(cells(text)) == 1 + 2


def test_the_ladders_figures_follow_from_what_was_measured():
    def timing(ms, tokens=100):
        seconds = [ms / 1e3, 2 * ms / 1e3, ms / 1e3]
        return Timing(seconds, tokens, "mfu 7%\nmfu 48%\npeak memory 2.5 GB")

    rows = bench.ladder_rows({"a": [timing(100)], "b": [timing(50)], "c": [timing(80, 400)]})
    assert [row["ms per step"] for row in rows] == ["100.0", "50.0", "80.0"]
    assert [row["tokens/s"] for row in rows] == ["1,000", "2,000", "5,000"]
    assert [row["gain"] for row in rows] == ["1.00x", "2.00x", "2.50x"]
    assert [row["in all"] for row in rows] == ["1.00x", "2.00x", "5.00x"]
    assert {row["MFU"] for row in rows} == {"48%"}
    assert {row["peak GB"] for row in rows} == {"2.5"}


# It has what bench.py changes in build-nanogpt's script, and checks what came of it.
PEER = """
from types import SimpleNamespace as GPTConfig
import numpy as np
import tiktoken
import torch
from hellaswag import render_example, iterate_examples
device = "mps"
device_type = "cuda" if device.startswith("cuda") else "cpu"
enc = tiktoken.get_encoding("gpt2")
total_batch_size = 524288 # 2**19, ~0.5M, in number of tokens
B = 64 # micro batch size
T = 1024 # sequence length
config = vars(GPTConfig(vocab_size=50304))
use_compile = False # torch.compile interferes
max_steps = 19073
autocast = dict(dtype=torch.bfloat16)
for split in ("train", "val"):              # a loader that has read all begins anew
    assert len(np.load(f"edu_fineweb10B/random_{split}_000001.npy")) > 4 * B * T
assert (total_batch_size, B, T, device, device_type) == (16, 2, 8, "cpu", "cpu")
assert config == dict(vocab_size=50304, block_size=16, n_layer=1, n_head=1, n_embd=16)
is_bfloat16 = autocast == {"dtype": torch.bfloat16, "enabled": True}
assert is_bfloat16 or autocast == dict(dtype=torch.float32, enabled=False)
milliseconds = 100 + 50 * use_compile + 300 * is_bfloat16
for step in range(max_steps):
    assert step == 1
    print(f"step {step:5d} | dt: {milliseconds}.00ms | tok/sec: 1.00")
"""


def test_a_peers_script_gets_our_numbers(rows_are_forked, tmp_path, monkeypatch, capsys):
    (tmp_path / "train_gpt2.py").write_text(PEER)
    monkeypatch.setattr(
        bench, "time_run", lambda flags, folder: Timing([0.05], 32, "peak memory 1.0 GB"))
    bench.main(["peer", str(tmp_path), "--steps=2", "--turns=1", "--compile",
                "--sequence_length=8", *TINY])
    columns, *rows = cells(capsys.readouterr().out)
    assert [(row[1], row[-1]) for row in rows] == [
        ("50.0", "1.00x"), ("400.0", "8.00x"), ("100.0", "2.00x"), ("150.0", "3.00x")]
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt2.py"]


# ----------------------------------------------------------------------------- curves

def curve(name="a", tokens=(0, 1000), losses=(9.0, 5.0), seconds=(0, 60), **more):
    return Curve(name, tokens=list(tokens), seconds=list(seconds), losses=list(losses), **more)


def rows_of(*found):
    """{name: row} of the table of these curves."""
    variants = bench.variants(found)
    first = next(iter(variants.values()))
    return {name: bench.variant_row(name, each, first) for name, each in variants.items()}


def test_a_runs_curve_are_its_validations_on_the_newest_val_tokens(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        f"{HEADER}\n0,0,0,9.5,12,,,,,64\n1,1000,30,9.4,11,,,,,32\n2,2000,60,9.3,,,,,,\n"
        "3,3000,90,9.2,6,,,,,32\n4,4000,120,9.1,5.")
    assert bench.read_curves(str(tmp_path)) == [
        curve(str(tmp_path), [1000, 3000], [11, 6], [30, 90], val_tokens=32)]


@pytest.mark.parametrize("text, losses", [
    ('# a comment\nstep,loss,tokens\n1,7,1e3\n2,4,7000', [[7, 4]]),
    ("run,tokens,seconds,loss\na,0,0,9\na,5,1,8\nb,0,0,7\n", [[9, 8], [7]])])
def test_a_csv_file_holds_one_curve_or_several(text, losses):
    assert [found.losses for found in bench.parse_curves("file", text)] == losses


@pytest.mark.parametrize("text", [
    "", "a,b\n1,2\n", "tokens,loss\n", "tokens,loss\n2,5\n1,4\n", "tokens,loss\n1,2\n3,x\n",
    "tokens,loss\n1,nan\n", "loss\n5\n"])
def test_a_file_that_is_no_curve_is_refused(text, tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="curve.csv"):
        bench.main(["compare", str(path)])


def test_curves_that_differ_in_their_seed_alone_are_one_variant():
    names = ["gpt2, seed 0", "gpt2", "gpt2, seed 11", "log/gpt2_no_seed_seed_3", "seeds 5"]
    found = bench.variants([curve(name) for name in names])
    assert {name: list(by_seed) for name, by_seed in found.items()} == {
        "gpt2": ["0", None, "11"], "log/gpt2_no_seed": ["3"], "seeds 5": [None]}
    with pytest.raises(UserError, match="gpt2"):
        bench.variants([curve("gpt2"), curve("gpt2")])


def test_a_curve_is_compared_with_the_first_one():
    first = curve("first", [0, 1000, 2000], [10.0, 6.0, 5.0], [0, 60, 120])
    other = curve("other", [0, 500, 1500, 3000], [10.0, 7.0, 4.0, 3.0], [0, 60, 120, 180])
    rows = rows_of(first, other)
    assert rows["other"] == {
        "run": "other", "tokens": "3k", "time": "0:03:00", "val loss": "3.000", "lowest": "3.000",
        "against the first": "-1.500 at 1.5k", "the first's end after": "1.17k (58%)"}
    assert "against the first" not in rows["first"]
    assert "the first's end after" not in rows_of(other, first)["first"]


def test_a_short_run_is_not_compared_with_a_line_from_the_new_model():
    """A run that reads backwards at first has no validations there."""
    rows = rows_of(curve("first", [0, 1000, 2000], [10.0, 6.0, 5.0]),
                   curve("other", [0, 100], [10.0, 7.0]))
    assert "against the first" not in rows["other"]


def test_seeds_are_compared_with_the_same_seed():
    rows = rows_of(
        curve("GELU, seed 0", losses=[9, 6.0]), curve("GELU, seed 1", losses=[9, 7.0]),
        curve("ReLU, seed 1", losses=[9, 7.5]), curve("ReLU, seed 0", losses=[9, 6.1]))
    assert rows["GELU"]["val loss"] == "6.500 (6.000 to 7.000)"
    assert rows["ReLU"]["val loss"] == "6.800 (6.100 to 7.500)"
    assert rows["ReLU"]["against the first"] == "+0.300 (+0.100 to +0.500) at 1k"


@pytest.mark.parametrize("ours, other, compared", [
    (64, 64, True), (64, None, True), (64, 32, False)])
def test_losses_over_other_tokens_are_not_compared(ours, other, compared):
    """Here those of the second seed."""
    row = rows_of(
        curve("a, seed 0", val_tokens=64), curve("a, seed 1", val_tokens=ours),
        curve("b, seed 0", val_tokens=64), curve("b, seed 1", val_tokens=other))["b"]
    assert ("+0.000" in row["against the first"]) == compared
    assert ("the first's end after" in row) == compared


def test_without_tokens_curves_are_compared_over_time():
    nan = float("nan")
    rows = rows_of(curve("a", [nan, nan], seconds=[0, 60]), curve("b", losses=[9, 4]))
    assert rows["a"]["tokens"] == ""
    assert rows["b"]["against the first"] == "-1.000 at 0:01:00"
    assert rows["b"]["the first's end after"] == "0:00:48 (80%)"


def test_the_picture_has_tokens_and_time_and_a_colour_for_each_variant(tmp_path, monkeypatch):
    figures = []
    make = bench.new_figure

    def new_figure(**how):
        figures.append(make(**how))
        return figures[0]

    monkeypatch.setattr(bench, "new_figure", new_figure)
    found = bench.variants([
        curve("a, seed 0"), curve("b, seed 0", [0, 2000], [9, 4], [0, 300]), curve("b, seed 1")])
    bench.plot_variants(str(tmp_path / "a.png"), found, "title")

    left, right = figures[0].axes
    assert left.lines[1].get_xydata().tolist() == [[0, 9], [2000, 4]]
    assert right.lines[1].get_xydata().tolist() == [[0, 9], [300, 4]]
    assert list(right.lines[3].get_ydata()) == [5, 5]
    a, b, also_b, end = (line.get_color() for line in left.lines)
    assert a != b == also_b
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["recipes", "recipes_124m", "shakespeare", "shakespeare_seconds"])
def test_the_curves_of_the_docs_can_be_compared(name, capsys):
    bench.main(["compare", str(ROOT / "assets" / f"{name}.csv")])
    assert len(cells(capsys.readouterr().out)) > 1


# ----------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("line, what", [
    ("lader", "lader"), ("--device cpu", "--device"), ("compare", "curves"),
    ("ladder --steps 0", "--steps"), ("ladder --device tpu", "tpu"),
    ("ladder --n_layer 0", "n_layer"), ("ladder --plot a.png", "--plot"),
    ("compare a --compile", "--compile"), ("compare a --plot notes.md", "notes.md"),
    ("peer PEER", "build-nanogpt"), ("peer NOWHERE", "NOWHERE")])
def test_a_mistake_is_refused(line, what, tmp_path):
    (tmp_path / "train_gpt2.py").write_text("print('another script')\n")
    with pytest.raises((UserError, FileNotFoundError), match=re.escape(what)):
        bench.main(line.replace("PEER", str(tmp_path)).split())
