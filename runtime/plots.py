"""OUT/loss.png. matplotlib is imported when it is drawn."""
import json
import logging
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from runtime.cli import brief_error
from runtime.files import read_text, remove_leftovers, replace_file
from runtime.log import read_log
from runtime.tokenizer import VOCAB_SIZE

# published figures of GPT-2 124M: llm.c's run on FineWeb's validation set (its discussion 481), and OpenAI's
# weights on HellaSwag
BASELINES = {"val": (3.29, "GPT-2 124M on FineWeb, llm.c: 3.29"),
             "hella": (0.2955, "OpenAI's GPT-2 124M: 0.2955")}
RAW = dict(color="#f0cfa5", linewidth=0.6)
SMOOTH = dict(color="#d9822b", linewidth=1.2)
EVALUATION = dict(color="#1f4e9c", linewidth=1.6, marker="o", markersize=3)


def new_figure(**how):
    logging.getLogger("matplotlib").setLevel(logging.ERROR)     # a HOME that cannot be written, a font cache
    from matplotlib.figure import Figure
    return Figure(**how, layout="constrained")


def save_figure(figure, path, dpi=130):
    replace_file(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def short_count(n: float, _position=None) -> str:
    """'250k', '1.2M', '10B': a number of tokens, at a tick."""
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= least:
            return f"{n / least:g}{unit}"
    return f"{n:g}"


def is_fineweb(folder: str | Path) -> bool:
    """Whether the shards in `folder` are those of FineWeb or FineWeb-Edu: by fineweb.py's manifest.json, or,
    without one, by their names. False if the folder is gone."""
    try:
        manifest = json.loads(read_text(Path(folder) / "manifest.json", errors="strict"))
        repo = str(manifest.get("pretokenized") or manifest["source"].get("repo"))
        return bool(re.fullmatch(r"HuggingFaceFW/fineweb(-edu)?|kjj0/fineweb.*", repo))
    except OSError:
        names = [path.name for path in Path(folder).glob("*_val_*")]
        return any(re.match(r"(edufineweb|finewebedu|fineweb)(_p\d+of\d+)?_val_", name) for name in names)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False                                # another project's manifest, or a damaged one


def smooth(values: list[float], width: int) -> np.ndarray:
    """Centred moving average over `width` values; over fewer at the start, where a loss falls fast, and at
    the end, where there are no more."""
    i, n = np.arange(len(values)), len(values)
    half = np.minimum(width // 2, i // 4)
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    first, last = i - half, np.minimum(i + half + 1, n)
    return (sums[last] - sums[first]) / (last - first)


def limits(values: list[float], margin: float) -> tuple[float, float]:
    """The range of `values`, extended on both sides by the share `margin` of its height."""
    low, high = min(values), max(values)
    extra = margin * max(high - low, 1e-3)
    return low - extra, high + extra


def draw_panel(panel, curves, log_scale, baseline, least_height=0.0):
    """Draws curves [(label, points, style)]. The y axis has their range, and the line of `baseline` (value,
    label) only if it is in or near it: it must never squash the run's own curves."""
    scale, inverse = (math.log, math.exp) if log_scale else (float, float)
    for label, points, style in curves:
        if points:
            panel.plot(*zip(*points, strict=True), label=label, **style)
    ys = [scale(y) for _, points, _ in curves for _, y in points if y > 0 or not log_scale]
    if ys:
        ys.append(min(ys) + least_height)
        low, high = limits(ys, 1 / 3)
        if baseline and low <= scale(baseline[0]) <= high:
            panel.axhline(baseline[0], color="#c0392b", linestyle="--", linewidth=1, label=baseline[1])
            ys.append(scale(baseline[0]))
        panel.set_ylim(*map(inverse, limits(ys, 0.05)))
    if log_scale and ys:                # a power law is a straight line (arXiv:2001.08361)
        from matplotlib.ticker import ScalarFormatter
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(ScalarFormatter())


def plot_log(config) -> None:
    """Draws OUT/loss.png from log.txt: losses and HellaSwag against the tokens that the weights were trained
    on, beside BASELINES."""
    events = [(step * config.total_batch_size, kind, value)
              for step, kind, value in read_log(Path(config.out) / "log.txt") if math.isfinite(value)]
    train, val, hella = ([(x, y) for x, kind, y in events if kind == name]
                         for name in ("train", "val", "hella"))
    figure = new_figure(figsize=(12 if hella else 7, 4.5))
    panels = figure.subplots(1, 1 + bool(hella), squeeze=False)[0]

    width = 2 * (len(train) // 100) + 1             # about 2% of the steps, odd
    averaged = zip((x for x, _ in train), smooth([y for _, y in train], width), strict=True)
    curves = [("training loss", train, RAW if width > 1 else SMOOTH),
              (f"training loss, mean of {width} steps", list(averaged) if width > 1 else [], SMOOTH),
              ("validation loss", val, EVALUATION)]
    is_published = config.vocab_size >= VOCAB_SIZE and is_fineweb(config.data)
    draw_panel(panels[0], curves, True, BASELINES["val"] if is_published else None)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].set_title(f"{config.recipe}, {config.n_layer} layers of width {config.n_embd}", fontsize=9)
    if hella:   # 0.02: the noise of 10,042 questions, 0.0045, must not fill the picture
        draw_panel(panels[1], [("HellaSwag, acc_norm", hella, EVALUATION)], False,
                   None if config.hellaswag_data else BASELINES["hella"], least_height=0.02)
        panels[1].set_ylabel("HellaSwag accuracy (acc_norm)")

    newest = max([config.total_batch_size, *(x for x, _, _ in events)])
    # logarithmic, but linear up to a power of ten, about a hundredth of the run, so that step 0 has a place
    linear = max(config.total_batch_size, 10 ** max(0, round(math.log10(newest / 100))))
    decades = [10 ** i for i in range(20) if linear <= 10 ** i <= 1.05 * newest]
    for panel in panels:
        panel.set_xscale("symlog", linthresh=linear, linscale=0.5, subs=range(2, 10))
        panel.set_xticks([0, *decades])
        panel.set_xlim(0, 1.05 * newest)
        panel.xaxis.set_major_formatter(short_count)
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    save_figure(figure, Path(config.out) / "loss.png", dpi=110)


class LossPlotter:
    """Draws OUT/loss.png in a process of its own, of lowest priority: a thread would share the interpreter
    with the training loop, and all GPUs wait for that. A thread only waits for it, so that there is at most
    one at a time."""
    PATIENCE = 60               # seconds, for the last picture at the end of a run

    def __init__(self, config, process):
        self.config, self.process, self.thread = config, process, ThreadPoolExecutor(1, "loss.png")
        self.picture = self.child = self.warned = None
        self.closed = False

    def draw(self):
        """On rank 0. Returns at once. A picture that has not begun yet will show this moment, too."""
        if not self.picture or self.picture.running() or self.picture.done():
            self.picture = self.thread.submit(self._draw)

    def _draw(self):
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:    # -P: nothing is imported from the working directory; a new session: Ctrl-C is not for it
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.plots", json.dumps(vars(self.config))],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        except OSError as error:
            return self._warn(str(error))
        if self.closed:
            self.child.kill()
        said = self.child.communicate()[1].decode(errors="replace").strip()
        if code := self.child.returncode:
            self._warn(said.split("\n")[-1] or f"its process ended with {code}")

    def _warn(self, reason):
        if reason != self.warned and not self.closed:   # the same once a run, not once an evaluation
            self.warned = reason
            self.process.print0(f"warning: {self.config.out}/loss.png is not drawn ({reason}); --no_plot "
                                "does without it")

    def finish(self):
        """Waits for the last picture, at the end of a run that went well."""
        if self.picture:
            try:
                self.picture.result(self.PATIENCE)
            except TimeoutError:
                self._warn(f"it took more than {self.PATIENCE} s")

    def close(self):
        """Nothing is drawn any more."""
        self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.thread.shutdown()
            with suppress(OSError):
                remove_leftovers(self.config.out, re.escape("loss.png"))


if __name__ == "__main__":              # LossPlotter's process, given the run's config as JSON
    if hasattr(os, "nice"):             # not on Windows
        os.nice(19)
    try:
        plot_log(SimpleNamespace(**json.loads(sys.argv[1])))
    except Exception as error:          # matplotlib raises all kinds
        sys.exit(brief_error(error))
