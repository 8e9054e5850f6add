"""runtime/curves.py: the losses of runs and of .csv files, how they compare, and their picture."""
import pytest
from helpers import ROOT

import bench
from runtime import curves
from runtime.cli import UserError
from runtime.curves import Curve
from runtime.metrics import HEADER


def curve(name="a", tokens=(0, 1000), losses=(9.0, 5.0), seconds=(0, 60), **more):
    return Curve(name, tokens=list(tokens), seconds=list(seconds), losses=list(losses), **more)


def rows_of(*found):
    """{name: row} of the table of these curves."""
    variants = curves.variants(found)
    first = next(iter(variants.values()))
    return {name: curves.variant_row(name, each, first) for name, each in variants.items()}


# ----------------------------------------------------------------------------- reading

@pytest.mark.parametrize("name", ["metrics.csv", "kept.csv"])
def test_a_runs_curve_are_its_validations_on_the_newest_val_tokens(name, tmp_path):
    (tmp_path / name).write_text(
        f"{HEADER}\n0,0,0,9.5,12,,,,,64\n1,1000,30,9.4,11,,,,,32\n2,2000,60,9.3,,,,,,\n"
        "3,3000,90,9.2,6,,,,,32\n4,4000,120,9.1,5.")
    source = str(tmp_path if name == "metrics.csv" else tmp_path / name)
    assert curves.read_curves(source) == [
        curve(source, [1000, 3000], [11, 6], [30, 90], val_tokens=32)]


@pytest.mark.parametrize("text, losses", [
    ("1e3,7\n2000,4.5\n", [[7, 4.5]]),
    ('"Step", "Loss","Tokens"\n# a comment\n1,7,1e3\n2,4,7000', [[7, 4]]),
    ("run,tokens,seconds,validation_loss\na,0,0,9\na,5,1,8\nb,0,0,7\n", [[9, 8], [7]]),
    ("run,minutes,nats_per_character\na,0,9\na,2,8\n", [[9, 8]])])
def test_a_csv_file_holds_one_curve_or_several(text, losses):
    assert [found.losses for found in curves.parse_curves("file", text)] == losses


def test_minutes_become_seconds():
    [found] = curves.parse_curves("file", "minutes,nats_per_character\n0,9\n1.5,8\n")
    assert found.seconds == [0, 90]
    assert found.unit == "nats per character"


@pytest.mark.parametrize("text", [
    "", "a,b\n", "tokens,loss\n", "2,5\n1,4\n", "1,2\n3,x\n", "1,nan\n", "loss\n5\n",
    f"{HEADER}\n0,0,0,9.5,,,,,,\n"])
def test_a_file_that_is_no_curve_is_refused(text, tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="curve.csv"):
        bench.main(["compare", str(path)])


def test_curves_that_differ_in_their_seed_alone_are_one_variant():
    names = ["gpt2, seed 0", "gpt2", "gpt2, seed 11", "log/gpt2_no_seed_seed_3", "seeds 5"]
    found = curves.variants([curve(name) for name in names])
    assert {name: list(by_seed) for name, by_seed in found.items()} == {
        "gpt2": ["0", None, "11"], "log/gpt2_no_seed": ["3"], "seeds 5": [None]}
    with pytest.raises(UserError, match="gpt2"):
        curves.variants([curve("gpt2"), curve("gpt2")])


# ----------------------------------------------------------------------------- the table

def test_a_curve_is_compared_with_the_first_one():
    first = curve("first", [0, 1000, 2000], [10.0, 6.0, 5.0], [0, 60, 120])
    other = curve("other", [0, 500, 1500, 3000], [10.0, 7.0, 4.0, 3.0], [0, 60, 120, 180])
    rows = rows_of(first, other)
    assert rows["other"] == {
        "run": "other", "tokens": "3k", "time": "0:03:00", "val loss": "3.000", "lowest": "3.000",
        "against the first": "-1.500 at 1.5k", "the first's end after": "1.17k (58%)"}
    assert "against the first" not in rows["first"]
    assert "the first's end after" not in rows_of(other, first)["first"]


def test_seeds_are_compared_with_the_same_seed():
    rows = rows_of(
        curve("GELU, seed 0", losses=[9, 6.0]), curve("GELU, seed 1", losses=[9, 7.0]),
        curve("ReLU, seed 1", losses=[9, 7.5]), curve("ReLU, seed 0", losses=[9, 6.1]))
    assert rows["GELU"]["val loss"] == "6.500 (6.000 to 7.000)"
    assert rows["ReLU"]["val loss"] == "6.800 (6.100 to 7.500)"
    assert rows["ReLU"]["against the first"] == "+0.300 (+0.100 to +0.500) at 1k"


@pytest.mark.parametrize("ours, other, compared", [
    (64, 64, True), (64, None, True), (None, None, True), (64, 32, False)])
def test_losses_over_other_tokens_are_not_compared(ours, other, compared):
    row = rows_of(curve("a", val_tokens=ours), curve("b", val_tokens=other))["b"]
    assert ("+0.000" in row["against the first"]) == compared
    assert ("the first's end after" in row) == compared
    characters = curve("c", unit="nats per character")
    assert "+" not in rows_of(curve("a"), characters)["c"]["against the first"]


def test_without_tokens_curves_are_compared_over_time():
    nan = float("nan")
    rows = rows_of(curve("a", [nan, nan], seconds=[0, 60]), curve("b", losses=[9, 4]))
    assert rows["a"]["tokens"] == ""
    assert rows["b"]["against the first"] == "-1.000 at 0:01:00"
    assert rows["b"]["the first's end after"] == "0:00:48 (80%)"
    neither = rows_of(curve("a", [nan, nan]), curve("b", seconds=[nan, nan]))["b"]
    assert neither["time"] == ""
    assert not {"against the first", "the first's end after"} & neither.keys()


# ----------------------------------------------------------------------------- the picture

def test_the_picture_has_tokens_and_minutes_and_a_colour_for_each_variant(tmp_path, monkeypatch):
    figures = []
    make = curves.new_figure

    def new_figure(**how):
        figures.append(make(**how))
        return figures[0]

    monkeypatch.setattr(curves, "new_figure", new_figure)
    found = curves.variants([
        curve("a, seed 0"), curve("b, seed 0", [0, 2000], [9, 4], [0, 300]), curve("b, seed 1")])
    curves.plot_variants(str(tmp_path / "a.png"), found, "title")

    left, right = figures[0].axes
    assert left.lines[1].get_xydata().tolist() == [[0, 9], [2000, 4]]
    assert right.lines[1].get_xydata().tolist() == [[0, 9], [5, 4]]
    assert list(right.lines[3].get_ydata()) == [5, 5]
    a, b, also_b, end = (line.get_color() for line in left.lines)
    assert a != b == also_b
    assert [text.get_text()[:3] for text in left.get_legend().get_texts()] == ["a", "b", "a a"]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name, picture, magic", [
    ("recipes.csv", "a.png", b"\x89PNG"), ("recipes_124m.csv", "a.pdf", b"%PDF"),
    ("shakespeare.csv", "a.svg", b"<?xml"), ("shakespeare_minutes.csv", "a.png", b"\x89PNG")])
def test_the_curves_of_the_docs_can_be_drawn(name, picture, magic, tmp_path):
    path = tmp_path / picture
    bench.main(["compare", str(ROOT / "assets" / name), "--plot", str(path)])
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5_000
