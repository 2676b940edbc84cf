"""Figures of a sweep, from its lines: one file a measure, and a batch size and dim where several were swept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..simulate.figure import STYLES, require_matplotlib

Line = dict[str, Any]
AUTO = 1 << 30  # in place of a horizon: one curve for all that "auto" chose, after those of numbers


class Measure(NamedTuple):
    """What a figure shows: `value(line)` over `axis` ("horizon" or "cache"), a curve for each of the other."""

    name: str
    title: str
    unit: str
    axis: str
    value: Callable[[Line], float | None]
    reference: Callable[[Line], float | None] | None = None  # a dotted line beside each, the same for all horizons
    reference_name: str = ""


def _of(key: str, scale: float) -> Callable[[Line], float | None]:
    return lambda line: None if line.get(key) is None else line[key] * scale


def _memory(line: Line) -> float | None:
    return (line["cache_bytes"] + line.get("look_ahead_bytes", 0)) / 2**20


MEASURES = (
    Measure("compute", "Batch computation time", "ms a batch", "horizon", _of("compute_seconds_a_batch", 1e3)),
    Measure(
        "overhead_by_horizon", "Amortised caching overhead (plan + copy)", "ms a batch", "horizon",
        _of("overhead_seconds_a_batch", 1e3),
    ),
    Measure(
        "overhead_by_cache", "Amortised caching overhead (plan + copy)", "ms a batch", "cache",
        _of("overhead_seconds_a_batch", 1e3),
    ),
    Measure("stall", "Exposed stall: the trainer waited", "ms a batch", "horizon", _of("stall_seconds_a_batch", 1e3)),
    Measure(
        "fills", "Rows filled, against the fewest that are possible", "rows a batch", "horizon",
        lambda line: line["fills"] / line["batches"], lambda line: line["min0_fills"] / line["batches"], "MIN(0)",
    ),
    Measure(
        "fills_over_min", "Rows filled / MIN(0)", "ratio", "horizon",
        lambda line: line["fills"] / line["min0_fills"] if line["min0_fills"] else None,
    ),
    Measure("memory", "Memory of cache and look-ahead", "MiB", "cache", _memory),
)  # fmt: skip

SHAPE_MEASURES = (
    Measure("samples_per_second", "Speed", "samples a second", "shape", _of("samples_per_second", 1)),
    Measure("stall", "Exposed stall: the trainer waited", "ms a batch", "shape", _of("stall_seconds_a_batch", 1e3)),
    Measure(
        "fills_a_sample", "Rows filled", "rows a sample", "shape",
        lambda line: line["fills"] / line["batches"] / line["batch_size"],
    ),
    Measure("memory", "Memory of cache and look-ahead", "MiB", "shape", _memory),
)  # fmt: skip
"""Drawn over the batch size and over the dim, where several were swept."""
SHAPES = {"batch_size": "samples a batch", "dim": "dim of the tables"}


def draw_all(lines: Sequence[Line], folder: Path, ending: str) -> list[Path]:
    """Write every figure that the lines have values for; returns the files.  `ending`: "png" or "svg"."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    shapes = sorted({(line["batch_size"], line["dim"]) for line in lines})
    written = []
    for shape in shapes:
        mine = [line for line in lines if (line["batch_size"], line["dim"]) == shape]
        suffix = f"_batch{shape[0]}_dim{shape[1]}" if len(shapes) > 1 else ""
        about = f"batch {shape[0]:,}, dim {shape[1]}"
        for measure in MEASURES:
            file = folder / f"{measure.name}{suffix}.{ending}"
            if _draw(measure, mine, about, file):
                written.append(file)
    for axis in SHAPES:
        for measure in SHAPE_MEASURES:
            file = folder / f"{measure.name}_by_{axis}.{ending}"
            if len({line[axis] for line in lines}) > 1 and _draw_shapes(measure, axis, lines, file):
                written.append(file)
    return written


def shape_curves(measure: Measure, axis: str, lines: Sequence[Line]) -> dict[tuple[str, int], dict[float, float]]:
    """(cache, horizon and depth; the other of batch size and dim) -> `axis` -> the best value of all repeats."""
    curves: dict[tuple[str, int], dict[float, float]] = {}
    best = max if measure.name == "samples_per_second" else min
    other = next(name for name in SHAPES if name != axis)
    for line in lines:
        value = measure.value(line)
        if value is None or not math.isfinite(value):
            continue
        depth = "= horizon" if line["depth_is_horizon"] else line["prefetch_depth"]
        horizon = "auto" if line.get("horizon_auto") else line["horizon"]
        name = f"cache {line['cache_ratio']:.1%}, horizon {horizon}, depth {depth}"
        curve = curves.setdefault((name, line[other]), {})
        curve[line[axis]] = best(value, curve.get(line[axis], value))
    return curves


def _draw_shapes(measure: Measure, axis: str, lines: Sequence[Line], file: Path) -> bool:
    curves = shape_curves(measure, axis, lines)
    if not curves:
        return False
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    other = next(name for name in SHAPES if name != axis)
    several = len({key[1] for key in curves}) > 1
    for number, ((name, shape), points) in enumerate(sorted(curves.items())):
        x, y = zip(*sorted(points.items()), strict=True)
        label = f"{name}, {shape:,} {SHAPES[other]}" if several else name
        axes.plot(x, y, STYLES[number // 10 % len(STYLES)], label=label, markersize=4)
    every = sorted({x for points in curves.values() for x in points})
    axes.set_xscale("log")
    axes.set_xticks(every, [f"{x:,}" for x in every])
    axes.minorticks_off()
    axes.set_xlabel(SHAPES[axis])
    axes.set_ylabel(measure.unit)
    axes.set_ylim(bottom=0)
    axes.set_title(measure.title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return True


def _curves(measure: Measure, lines: Sequence[Line]) -> dict[tuple[Any, ...], dict[float, float]]:
    """(cache or horizon, tied, depth) -> x -> the least value of all repeats."""
    curves: dict[tuple[Any, ...], dict[float, float]] = {}
    for line in lines:
        value = measure.value(line)
        if value is None or not math.isfinite(value):
            continue
        x, other = line["cache_rows"], line["horizon"]
        if measure.axis == "horizon":
            x, other = other, x
        elif line.get("horizon_auto"):
            other = AUTO
        tied = bool(line["depth_is_horizon"])
        # one parameter for both: over the horizon it is one curve
        curve = curves.setdefault((other, tied, None if tied else line["prefetch_depth"]), {})
        curve[x] = min(value, curve.get(x, math.inf))
    return curves


def _draw(measure: Measure, lines: Sequence[Line], about: str, file: Path) -> bool:
    curves = _curves(measure, lines)
    if not curves:
        return False
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    colours = {other: f"C{i % 10}" for i, other in enumerate(sorted({key[0] for key in curves}))}
    kinds = sorted({key[1:] for key in curves}, key=str)
    total = lines[0]["table_rows"]
    for (other, *kind), points in sorted(curves.items(), key=lambda item: (item[0][0], str(item[0][1:]))):
        horizon = "auto" if other == AUTO else other
        what = f"horizon {horizon}" if measure.axis == "cache" else f"{other:,} rows ({other / total:.1%})"
        if len(kinds) > 1 or kind[0]:
            what += ", depth = horizon" if kind[0] else f", depth {kind[1]}"
        x, y = zip(*sorted(points.items()), strict=True)
        style = STYLES[kinds.index(tuple(kind)) % len(STYLES)]
        axes.plot(x, y, style, color=colours[other], label=what, markersize=4)
    if measure.reference is not None:
        for other, colour in colours.items():
            values = [measure.reference(line) for line in lines if line["cache_rows"] == other]
            label = f"{measure.reference_name}, {other:,} rows"
            axes.axhline(values[0], color=colour, linestyle=":", linewidth=1, label=label)
    every = sorted({x for points in curves.values() for x in points})
    axes.set_xscale("symlog" if measure.axis == "horizon" else "log")
    if len(every) <= 8:
        axes.set_xticks(every, [f"{x:,}" for x in every])
        axes.minorticks_off()
    axes.set_xlabel(
        "horizon (look-ahead window), batches" if measure.axis == "horizon" else f"cache, rows of {total:,}"
    )
    axes.set_ylabel(measure.unit)
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]) if measure.unit == "ratio" else 0)
    axes.set_title(f"{measure.title}  ({about})")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return True
