"""Validation losses against tokens and time, of runs and of .csv files: a table, and a picture.

Curves whose names differ in their seed alone, as "gpt2, seed 0" and "gpt2, seed 1", are one
variant: one row of the table, one colour of the picture. Two variants are compared seed by seed.
"""
import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

from runtime.cli import UserError
from runtime.console import clock
from runtime.files import read_text, reading, replace_file
from runtime.metrics import HEADER, Metrics, read_metrics
from runtime.plots import new_figure, short_count

# {column of a .csv file in which a loss may stand: its unit}
UNITS = {
    "loss": "nats per token",
    "validation_loss": "nats per token",
    "val": "nats per token",
    "nats_per_character": "nats per character",
}


@dataclass
class Curve:
    """The validations of a run, or of a curve in a file."""
    name: str
    tokens: list[float] = field(default_factory=list)       # of training before each validation
    seconds: list[float] = field(default_factory=list)      # nan in a file without them, as tokens
    losses: list[float] = field(default_factory=list)
    unit: str = "nats per token"
    val_tokens: int | None = None                           # of each validation, of a run

    @property
    def xs(self) -> list[float]:
        """The tokens, or the seconds of a curve whose tokens are not known."""
        return self.tokens if math.isfinite(self.tokens[-1]) else self.seconds


# ----------------------------------------------------------------------------- reading

def read_curves(source: str) -> list[Curve]:
    """The curve of a run's --out folder, or those of a .csv file. UserError if there is none."""
    path = Path(source)
    if path.is_dir():
        path = path / "metrics.csv"
    remedy = "choose the --out folder of a run, or a .csv with the columns tokens and loss"
    with reading(path, remedy):
        text = read_text(path)
        if text.startswith(HEADER):
            return [curve_of_run(source, read_metrics(path, remedy))]
        return parse_curves(source, text)


def curve_of_run(name: str, metrics: Metrics) -> Curve:
    """The validations in a metrics.csv. ValueError if there is none."""
    losses = [loss for _, loss in metrics.measured("val")]
    if not losses:
        raise ValueError("it has no validation loss yet")
    tokens = [x for x, _ in metrics.measured("val", over="tokens")]
    seconds = [x for x, _ in metrics.measured("val", over="seconds")]
    val_tokens = [x for x, _ in metrics.measured("val", over="val_tokens")]
    return Curve(name, tokens, seconds, losses, val_tokens=val_tokens[-1])


def parse_curves(source: str, text: str) -> list[Curve]:
    """The curves in the text of a .csv file. ValueError if it is none.

    Its columns are a loss (UNITS), and tokens, seconds or minutes; without a header they are tokens
    and loss. A column `run` tells several curves apart. A line that begins with # is a comment.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and lines[0][0].isdigit():
        lines.insert(0, "tokens,loss")

    curves = {}
    for row in csv.DictReader(lines, restkey="others", restval="", skipinitialspace=True):
        cells = {name.lower(): cell for name, cell in row.items()}
        columns = [name for name in UNITS if cells.get(name)]
        if not columns:
            continue                                # a step without a validation
        name = cells.get("run", source)
        curve = curves.setdefault(name, Curve(name, unit=UNITS[columns[0]]))
        minutes = float(cells.get("minutes", "nan"))
        curve.tokens.append(float(cells.get("tokens", "nan")))
        curve.seconds.append(float(cells.get("seconds", 60 * minutes)))
        curve.losses.append(float(cells[columns[0]]))

    for curve in curves.values():
        grows = (np.diff(curve.xs) > 0).all()
        if not grows or not np.isfinite(curve.xs + curve.losses).all():
            raise ValueError(f"{curve.name} has no growing numbers of tokens with a loss for each")
    if not curves:
        raise ValueError("it has no losses")
    return list(curves.values())


def variants(curves: list[Curve]) -> dict[str, dict[str, Curve]]:
    """{name without the seed: {seed: curve}}. UserError for two curves of the same name."""
    found = {}
    for curve in curves:
        name, seed = re.fullmatch(r"(.*?)(?:,?[ _]seed[ _](\d+))?", curve.name).groups()
        if seed in found.setdefault(name, {}):
            raise UserError(f"two curves are called {curve.name}: give one of them another name")
        found[name][seed] = curve
    return found


# ----------------------------------------------------------------------------- the table

def three_digits(n: float) -> str:
    """'1.23M'."""
    return short_count(float(f"{n:.3g}"))


def spread(numbers: list[float], form: str) -> str:
    """Their mean, and of several the smallest and the largest: '6.592 (6.558 to 6.616)'."""
    text = format(mean(numbers), form)
    if len(numbers) > 1:
        text += f" ({min(numbers):{form}} to {max(numbers):{form}})"
    return text


def where_it_reaches(target: float, xs: list[float], losses: list[float]) -> float:
    """Where on the axis the loss was first at `target`, linear between validations; else nan."""
    for i, loss in enumerate(losses):
        if loss <= target:
            before = max(0, i - 1)
            return np.interp(target, (loss, losses[before]), (xs[i], xs[before])).item()
    return math.nan


def variant_row(name: str, by_seed: dict[str, Curve], first: dict[str, Curve]) -> dict:
    """The row of a variant, which says how it stands to the first one."""
    curves = list(by_seed.values())
    tokens = curves[0].tokens[-1]
    seconds = mean(curve.seconds[-1] for curve in curves)
    row = {
        "run": name,
        "tokens": three_digits(tokens) if math.isfinite(tokens) else "",
        "time": clock(seconds) if math.isfinite(seconds) else "",
        "val loss": spread([curve.losses[-1] for curve in curves], ".3f"),
        "lowest": f"{mean(min(curve.losses) for curve in curves):.3f}",
    }
    if by_seed is first:
        return row

    # A seed that the first one does not have is compared with its first curve.
    any_first = next(iter(first.values()))
    pairs = [(curve, first.get(seed, any_first)) for seed, curve in by_seed.items()]
    for curve, other in pairs:
        known = None not in (curve.val_tokens, other.val_tokens)
        if curve.unit != other.unit or (known and curve.val_tokens != other.val_tokens):
            return row | {"against the first": "measured on other tokens"}
    return row | compared(pairs)


def compared(pairs: list[tuple[Curve, Curve]]) -> dict:
    """The cells that compare a variant with the first one: [(its curve, the first's), ...].

    Its loss at the newest validation that the first one reaches, and when it had the first one's
    final loss; linear between validations. Both are over time where a curve has no tokens.
    """
    axis, form = "tokens", three_digits
    if any(math.isnan(curve.tokens[-1]) for pair in pairs for curve in pair):
        axis, form = "seconds", clock

    differences, shares = [], []
    for curve, first in pairs:
        xs, first_xs = getattr(curve, axis), getattr(first, axis)
        at = max((x for x in xs if first_xs[0] <= x <= first_xs[-1]), default=math.nan)
        loss, first_loss = np.interp(at, xs, curve.losses), np.interp(at, first_xs, first.losses)
        differences.append(loss - first_loss)
        shares.append(where_it_reaches(first.losses[-1], xs, curve.losses) / first_xs[-1])

    cells = {}
    if math.isfinite(mean(differences)):
        cells["against the first"] = f"{spread(differences, '+.3f')} at {form(at)}"
    if math.isfinite(mean(shares)):
        reached = mean(shares) * first_xs[-1]
        cells["the first's end after"] = f"{form(reached)} ({mean(shares):.0%})"
    return cells


# ----------------------------------------------------------------------------- the picture

# {what stands on the x axis of a panel: a curve -> its numbers there}
PANELS = {
    "tokens": lambda curve: curve.tokens,
    "minutes": lambda curve: np.array(curve.seconds) / 60,
}


def plot_variants(path: str, found: dict[str, dict[str, Curve]], title: str) -> None:
    """Validation loss against tokens, and against the time of training, where they are known.

    `found` is what `variants` returns. A dashed line is the final loss of the first one: where
    another meets it, one can read how many tokens and how much time that one needed. `path` ends in
    .png, .svg or .pdf.
    """
    curves = [curve for by_seed in found.values() for curve in by_seed.values()]
    known = [what for what, xs in PANELS.items() if any(math.isfinite(xs(c)[-1]) for c in curves)]
    figure = new_figure(figsize=(6 * len(known), 4.5))
    figure.suptitle(title)
    panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for panel, what in zip(panels, known, strict=True):
        draw_panel(panel, what, found)

    # The first tenth of a run is cut off: its fall would hide how the runs differ later.
    highest = max(np.interp(0.1 * curve.xs[-1], curve.xs, curve.losses) for curve in curves)
    lowest = min(min(curve.losses) for curve in curves)
    panels[0].set_ylim(lowest - 0.05, highest + 0.05)
    units = " or ".join(dict.fromkeys(curve.unit for curve in curves))
    panels[0].set_ylabel(f"validation loss, {units}")
    panels[0].legend(fontsize=8)
    ending = Path(path).suffix[1:]
    replace_file(path, lambda file: figure.savefig(file, format=ending, dpi=130))


def draw_panel(panel, what: str, found: dict[str, dict[str, Curve]]) -> None:
    """Draws the variants over `what`, a key of PANELS, each in one colour."""
    for i, (name, by_seed) in enumerate(found.items()):
        for curve in by_seed.values():
            panel.plot(PANELS[what](curve), curve.losses, f"C{i % 10}", marker="o", markersize=3)
        panel.lines[-1].set_label(name)             # of all seeds together
    name, by_seed = next(iter(found.items()))
    end = mean(curve.losses[-1] for curve in by_seed.values())
    panel.axhline(end, color="grey", linestyle="--", linewidth=0.8, zorder=0,
                  label=f"{name} at its end: {end:.2f}")
    panel.set(xlabel=f"{what} of training", xlim=(0, None))
    panel.grid(alpha=0.3)
    if what == "tokens":
        panel.xaxis.set_major_formatter(short_count)
