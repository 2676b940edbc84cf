"""Fills against cache size, one line for each policy, horizon and prefetch depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError

STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "*-.")


def require_matplotlib() -> Any:
    """matplotlib's pyplot for files, never a window; ConfigError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install matplotlib, or ask for none.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(simulation: Any, file: Path) -> None:
    """Write the figure; .png or .svg by the file's name."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lines: dict[tuple[str, int | str | None, int], list[tuple[int, float]]] = {}
    for r in simulation.results:
        key = (r["policy"], "auto" if r["horizon_auto"] else r["horizon"], r["prefetch_depth"])
        lines.setdefault(key, []).append((r["cache_rows"], r["fills_a_batch"]))
    for number, ((policy, horizon, depth), points) in enumerate(sorted(lines.items(), key=lambda item: str(item[0]))):
        label = f"MIN({depth})" if policy == "min" else f"{policy}, horizon {horizon}, depth {depth}"
        rows, fills = zip(*sorted(points), strict=True)
        axes.plot(rows, fills, STYLES[number % len(STYLES)], label=label, markersize=4)
    summary = simulation.summary
    first = summary["rows_touched"] / summary["batches"]
    axes.axhline(first, color="grey", linewidth=0.8, label="first use of every row")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"cache, rows (of {summary['table_rows']:,})")
    axes.set_ylabel("rows filled a batch")
    axes.set_title(
        f"{summary['batches']:,} batches, {summary['distinct'] / summary['batches']:,.0f} distinct rows each"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    plt.close(figure)
