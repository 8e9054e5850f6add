"""Pictures of bench.py's tables."""
from runtime.plots import new_figure, save_figure, short_count


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


def plot_losses(path, panels, title="", reference=None, limits=None):
    """Validation losses. `panels`: {label of the x axis: {run: (xs, losses)}}, the first one of tokens.
    `reference`: a loss, at a dashed line. `limits`: of the y axis."""
    figure = new_figure(figsize=(12 if len(panels) > 1 else 7, 4.5))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (label, curves) in zip(axes, panels.items(), strict=True):
        for run, (xs, losses) in curves.items():
            panel.plot(xs, losses, marker="o", markersize=3, label=run)
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
    if reference is not None:
        axes[0].axhline(reference, color="grey", linewidth=0.8, linestyle="--")
    axes[0].xaxis.set_major_formatter(short_count)
    axes[0].set_ylabel("validation loss, nats a token")
    axes[0].set_ylim(limits)
    axes[0].set_title(title, fontsize=9)
    axes[0].legend(fontsize=8)
    save_figure(figure, path)
