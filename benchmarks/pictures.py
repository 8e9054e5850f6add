"""Pictures of bench.py's ladder and recipes."""
from runtime.plots import new_figure, save_figure


def plot_ladder(path, rows, title):
    """Bars of tokens/s by row of `bench.py ladder`; failed rows are left out."""
    rows = [row for row in rows if isinstance(row.get("tokens/s"), float)][::-1]
    figure = new_figure(figsize=(9, 0.45 * len(rows) + 1.2))
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in rows], [row["tokens/s"] for row in rows], color="#4878a8")
    axes.bar_label(bars, [f"{row['tokens/s']:,.0f} ({row['in all']})" for row in rows], padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("tokens/s")
    axes.set_title(f"GPT-2 124M, {title}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def plot_curves(path, curves, title):
    """Validation loss against tokens. `curves`: {name: {tokens: loss}}; a line marks the first one's end."""
    figure = new_figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, curve in curves.items():
        points = [(tokens / 1e6, loss) for tokens, loss in curve.items() if tokens]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    final = list(next(iter(curves.values())).values())[-1]
    axes.axhline(final, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("validation loss")
    axes.set_title(title, fontsize=9)
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
