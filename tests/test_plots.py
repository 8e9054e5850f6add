"""The pictures: what is drawn in them. The layout was looked at."""
import json
import math

import matplotlib.figure
import numpy as np
import pytest
from helpers import ROOT, script

import train_gpt2
from runtime.plots import BASELINES, is_fineweb, plot_log, smooth

LLM_C, OPENAI = BASELINES["val"][1], BASELINES["hella"][1]


def draw(folder, events, monkeypatch, **flags):
    """The figure that plot_log draws of these (step, kind, value), 100 tokens a step."""
    figures, savefig = [], matplotlib.figure.Figure.savefig

    def save(figure, file, **how):
        figures.append(figure)
        savefig(figure, file, **how)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save)
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text("".join(f"{step} {kind} {value:.6f}\n" for step, kind, value in events))
    plot_log(train_gpt2.Config(**{"out": str(folder), "total_batch_size": 100, "data": "nowhere"} | flags))
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    return figures[-1]


def lines(panel):
    return {line.get_label(): line.get_xydata().tolist() for line in panel.lines}


def falling(steps, first=10.8, last=3.4, every=10):
    """Events of a run: losses on a straight line of log(loss), a validation every `every` steps."""
    loss = [first * (last / first) ** (step / steps) for step in range(steps + 1)]
    return [(step, kind, loss[step]) for step in range(steps + 1) for kind in ("val", "train")
            if (step < steps if kind == "train" else step % every == 0)]


@pytest.fixture
def fineweb(tmp_path):
    (tmp_path / "fineweb10B").mkdir()
    (tmp_path / "fineweb10B" / "fineweb_val_000000.bin").touch()
    return str(tmp_path / "fineweb10B")


def test_the_axes_are_named_and_step_0_has_a_place(tmp_path, monkeypatch):
    figure = draw(tmp_path, [*falling(200), (0, "hella", 0.25), (200, "hella", 0.26)], monkeypatch)
    losses, hella = figure.axes
    assert losses.get_ylabel() == "loss, nats a token"
    assert hella.get_ylabel() == "HellaSwag accuracy (acc_norm)"
    assert lines(losses)["validation loss"][:2] == [[0, 10.8], [1000, pytest.approx(10.19, abs=0.01)]]
    assert lines(losses)["training loss"][0] == [0, 10.8] and lines(hella)["HellaSwag, acc_norm"][0][0] == 0
    for panel in figure.axes:
        pixels = [panel.transData.transform((x, 5))[0] for x in (0, 100, 1000, 10000, 20000)]
        shares = np.diff(pixels) / (pixels[-1] - pixels[0])
        assert panel.get_xlim()[0] == 0 and all(shares > 0.05), shares
    figure.canvas.draw()
    assert [tick.get_text() for tick in losses.get_xticklabels()] == ["0", "100", "1k", "10k"]


@pytest.mark.parametrize(("steps", "label"), [(600, "mean of 13 steps"), (1, None), (99, None)])
def test_the_training_loss_is_drawn_raw_and_smoothed(steps, label, tmp_path, monkeypatch):
    drawn = lines(draw(tmp_path, falling(steps, every=steps), monkeypatch).axes[0])
    assert len(drawn["training loss"]) == steps
    smoothed = [name for name in drawn if "mean of" in name]
    assert smoothed == ([f"training loss, {label}"] if label else [])
    if label:
        assert [x for x, _ in drawn[smoothed[0]]] == [x for x, _ in drawn["training loss"]]


def test_smoothing_is_centred_and_complete():
    line, noise = np.arange(100.0), np.random.default_rng(0).normal(size=1000)
    averaged = smooth(list(line), 11)
    assert np.allclose(averaged[:95], line[:95]), "a straight line stays as it is"
    assert averaged[-1] == pytest.approx(np.mean(line[-6:]))
    assert smooth(list(noise), 101)[100:].std() < 0.2 * noise.std()
    steep = 1 / (1 + np.arange(1000.0))
    assert np.allclose(smooth(list(steep), 101), steep, rtol=0.1), "the fast fall at the start stays too"
    assert smooth([], 1).tolist() == [] and smooth([3.0], 1).tolist() == [3.0]


def test_published_results_are_beside_those_of_fineweb_only(tmp_path, fineweb, monkeypatch):
    events = [*falling(200), (0, "hella", 0.25), (200, "hella", 0.29)]

    def published(**flags):
        figure = draw(tmp_path / "log", events, monkeypatch, **flags)
        return [name for panel in figure.axes for name in lines(panel) if name in (LLM_C, OPENAI)]
    assert published(data=fineweb) == [LLM_C, OPENAI]
    assert published(data=str(tmp_path)) == [OPENAI], "shards of another text"
    assert published(data=fineweb, vocab_size=256) == [OPENAI], "another vocabulary: another loss"
    assert published(data=fineweb, hellaswag_data="mine.jsonl") == [LLM_C]


@pytest.mark.parametrize(("first", "last", "drawn"), [
    (10.8, 3.5, True), (10.8, 3.2, True), (10.8, 6.0, False), (2.9, 2.5, False), (4.2, 4.1, False)])
def test_a_published_line_never_squashes_the_curve(first, last, drawn, tmp_path, fineweb, monkeypatch):
    panel = draw(tmp_path / "log", falling(200, first, last), monkeypatch, data=fineweb).axes[0]
    assert (LLM_C in lines(panel)) == drawn
    low, high = map(math.log, panel.get_ylim())
    assert low < math.log(last) < math.log(first) < high
    assert math.log(first / last) / (high - low) > 0.6, "the share of the height that the curve has"
    assert not drawn or low < math.log(3.29) < high


def test_noise_of_hellaswag_does_not_fill_the_picture(tmp_path, monkeypatch):
    events = [*falling(20), (0, "hella", 0.5501), (10, "hella", 0.5499), (20, "hella", 0.5502)]
    panel = draw(tmp_path, events, monkeypatch).axes[1]
    low, high = panel.get_ylim()
    assert 0.02 <= high - low < 0.05 and low < 0.5499 and OPENAI not in lines(panel)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("events", [[], [(0, "train", math.nan)], [(0, "val", 5.0)], [(0, "val", 0.0)],
                                    [(0, "hella", 0.25)], [(0, "train", 1.0), (1, "train", 1.0)]])
def test_a_log_with_hardly_anything_in_it_is_drawn(events, tmp_path, monkeypatch):
    draw(tmp_path, events, monkeypatch)


@pytest.mark.parametrize(("manifest", "name", "expected"), [
    ({"pretokenized": "kjj0/fineweb10B-gpt2"}, "fineweb", True),
    ({"source": {"repo": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}}, "edufineweb", True),
    ({"source": {"files": [{"name": "fineweb.txt"}]}}, "text", False),
    ({"source": {"files": []}}, "fineweb", False),
    ({}, "fineweb", False), ([], "fineweb", False), ({"source": "fineweb"}, "fineweb", False),
    ("damaged", "fineweb", False),
    (None, "edufineweb", True), (None, "edufineweb_p0of3", True), (None, "text_p0of3", False),
    (None, "finewebedu", True), (None, "fineweb", True), (None, "text", False), (None, "notfineweb", False)])
def test_fineweb_is_recognised_by_its_manifest_or_its_names(manifest, name, expected, tmp_path):
    (tmp_path / f"{name}_val_000000.npy").touch()
    if manifest is not None:
        (tmp_path / "manifest.json").write_text("{" if manifest == "damaged" else json.dumps(manifest))
    assert is_fineweb(tmp_path) == expected
    assert not is_fineweb(tmp_path / "nowhere")


def test_fineweb_py_writes_what_is_recognised(tmp_path):
    """The sources of fineweb.py, as it records them in manifest.json."""
    import fineweb
    from corpus.hub_source import HubSource
    from corpus.sources import LocalSource
    names = [f"{prefix}_val_000000.npy" for _, prefix, _ in fineweb.FINEWEB.values()]
    names += [f"{prefix}_val_000000.bin" for _, prefix, _ in fineweb.PRETOKENIZED.values()]
    manifests = [{"source": HubSource(repo, "sample-10BT").description} for repo, _, _ in
                 fineweb.FINEWEB.values()]
    manifests += [{"pretokenized": repo} for repo, _, _ in fineweb.PRETOKENIZED.values()]
    for i, name in enumerate(names):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / name).touch()
        assert is_fineweb(tmp_path / str(i)), name
        (tmp_path / str(i) / "manifest.json").write_text(json.dumps(manifests[i]))
        assert is_fineweb(tmp_path / str(i)), manifests[i]
    own = {"source": LocalSource([str(ROOT / "input.txt")]).description}
    (tmp_path / "0" / "manifest.json").write_text(json.dumps(own))
    assert not is_fineweb(tmp_path / "0")


def test_a_run_draws_its_picture(tmp_path):
    """The real command, on real text; no published loss beside Shakespeare's."""
    run = ["train_gpt2.py", "--data", tmp_path / "data", "--out", tmp_path / "log",
           "--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--block_size", 16, "--total_batch_size", 64,
           "--batch_size", 4, "--max_steps", 2, "--val_every", 1, "--val_tokens", 64, "--hellaswag_every", 0,
           "--sample_every", 0, "--checkpoint_every", 0, "--device", "cpu", "--dtype", "float32"]
    text = ["fineweb.py", "--input", ROOT / "input.txt", "--out", tmp_path / "data"]
    for command in (text, run):
        result = script(*command)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "log" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert not is_fineweb(tmp_path / "data") and "warning" not in result.stdout
