"""Running a sweep: each point that the file does not hold yet, one line appended as soon as it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..arguments import writing
from ..config import TrainConfig
from ..datasets import open_datasets
from ..errors import CdlrmError, ConfigError, retold
from ..progress import Listener
from ..report import jsonable
from .points import Point

Advance = Callable[[float], None]


class Stopped(Exception):
    """The user pressed Ctrl-C; the points that were finished are in the file."""


class Appender:
    """Appends whole lines, each on disk before the next run begins.  The file is made with the first line.

    Raises DataError where it cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, line: dict[str, Any]) -> None:
        text = json.dumps(jsonable(line), allow_nan=False) + "\n"
        with writing("--out", self._file), self._file.open("a", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())


class _Share(Listener):
    """Tells how much of a run is done, in parts of one."""

    def __init__(self, advance: Advance) -> None:
        self.advance, self.total, self.done = advance, 0, 0.0

    def start(self, total_samples: int | None) -> None:
        self.total = total_samples or 0

    def step(self, samples: int) -> None:
        if self.total:
            share = min(samples / self.total, 1.0 - self.done)
            self.done += share
            self.advance(share)


def describe(point: Point) -> dict[str, Any]:
    """What a line says of its point, whatever the mode; the horizon "auto" gives way to the newest that it chose."""
    c = point.config
    return {
        "key": point.key(),
        "mode": point.mode,
        "batch_size": c.mini_batch_size,
        "dim": c.arch_sparse_feature_size,
        "asked_horizon": c.horizon,
        "horizon": c.horizon if isinstance(c.horizon, str) else max(c.horizon, c.prefetch_depth),
        "horizon_auto": c.horizon == "auto",
        "prefetch_depth": c.prefetch_depth,
        "depth_is_horizon": point.tied,
        "repeat": point.repeat,
    }


def check_data(points: Sequence[Point]) -> None:
    """Raise DataError or ConfigError, before anything is run, where the data cannot be opened or has fewer rows than a
    cache of a point."""
    from ..simulate.grid import check_cache_rows

    rows = sum(open_datasets(points[0].config, []).table_rows)  # the data are the same for all points
    check_cache_rows([p.config.cache_rows for p in points if p.config.cache_rows is not None], rows)


def train_points(points: Iterable[Point], append: Callable[[dict[str, Any]], None], advance: Advance) -> None:
    """Real runs.  Raises Stopped after Ctrl-C; the run that was interrupted is not recorded.  The error of a run that
    fails says which it was."""
    warm = False
    for point in points:
        if not warm:  # kernels are compiled or loaded here, not in the first point's times
            _train(point, TrainConfig.from_mapping({**point.config.to_mapping(), "num_batches": 3, "nepochs": 1}))
            warm = True
        share = _Share(advance)
        report = _train(point, point.config, share)
        append({**describe(point), **figures_of(point.config, report)})
        advance(1.0 - share.done)


def _train(point: Point, config: TrainConfig, listener: Listener | None = None) -> dict[str, Any]:
    from ..train import train

    try:
        report = train(config, listener)
    except ConfigError:
        raise  # names a flag
    except CdlrmError as error:
        raise retold(error, f"the run with {point.name()}: {error}") from error
    if report["interrupted"]:
        raise Stopped
    return report


def figures_of(config: TrainConfig, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run: seconds a batch, rows, bytes.

    `overhead_seconds_a_batch`: planning and copying over all batches, the amortised caching overhead of cDLRM
    (Balasubramanian et al., RecSys 2021); most of it overlaps with computing.  `stall_seconds_a_batch`: what does not.
    """
    from ..simulate.command import record_bytes

    cache, seconds, training = report["cache"], report["seconds"], report["training"]
    steps = max(training["steps"], 1)
    return {
        "horizon": cache["horizon"],
        "cache_rows": cache["cache_rows"],
        "cache_ratio": cache["cache_rows"] / cache["table_rows"],
        "asked_cache_rows": config.cache_rows,
        "asked_cache_ratio": None if config.cache_rows is not None else config.cache_ratio,
        "table_rows": cache["table_rows"],
        "batches": training["steps"],
        "compute_seconds_a_batch": seconds["forward_backward"] / steps,
        "overhead_seconds_a_batch": (seconds["plan"] + seconds["transfer"]) / steps,
        "stall_seconds_a_batch": seconds["stall"] / steps,
        "samples_per_second": training["samples_per_second"],
        "lookups": cache["lookups"],
        "distinct": cache["distinct"],
        "fills": cache["fills"],
        "min0_fills": cache["min0_fills"],
        "mind_fills": cache["mind_fills"],
        "mind_shortened": cache["mind_shortened"],
        "rows_written": cache["rows_written"],
        "short_windows": cache["short_windows"],
        "grows": cache["grows"],
        "cache_bytes": cache["cache_rows"] * record_bytes(config),
        "look_ahead_bytes": cache["metadata_bytes"],
        "peak_bytes_of_all_so_far": report["memory"]["peak_bytes"],
        "report": report,
    }


def simulate_points(points: list[Point], append: Callable[[dict[str, Any]], None], advance: Advance) -> None:
    """Simulations: one pass over the data for all points that read the same batches."""
    passes: dict[str, list[Point]] = {}
    for point in points:
        passes.setdefault(json.dumps(_without_cache(point.config), sort_keys=True), []).append(point)
    for mine in passes.values():
        _simulate_pass(mine, append, advance)


def _without_cache(config: TrainConfig) -> dict[str, Any]:
    swept = ("cache_rows", "cache_ratio", "horizon", "prefetch_depth")
    return {name: value for name, value in config.to_mapping().items() if name not in swept}


def _simulate_pass(points: list[Point], append: Callable[[dict[str, Any]], None], advance: Advance) -> None:
    from ..simulate.auto import AutoWindow
    from ..simulate.caches import Cache, LookAheadCache, MinCache
    from ..simulate.command import record_bytes
    from ..simulate.grid import cache_size, simulate_caches
    from ..simulate.trace import SourceTrace

    trace = SourceTrace(points[0].config)
    size = record_bytes(points[0].config)
    caches: list[Cache] = []
    for point in points:
        c, rows = point.config, cache_size(point.config, trace.num_rows)
        horizon = AutoWindow(trace.num_rows, rows, c.prefetch_depth) if isinstance(c.horizon, str) else c.horizon
        caches.append(LookAheadCache(rows, horizon, c.prefetch_depth, len(trace.table_rows)))
        caches.append(MinCache(rows, tuple(sorted({0, c.prefetch_depth}))))
    fixed = [p.config.horizon for p in points if isinstance(p.config.horizon, int)]
    depth = max(p.config.prefetch_depth for p in points)
    total = trace.batches or 0
    share = len(points) / total if total else 0.0
    longest = max([*fixed, depth])
    found = simulate_caches(trace, caches, longest, depth, progress=lambda batches: advance(batches * share))
    if not total:
        advance(len(points))
    if found.interrupted:
        raise Stopped
    for point, ahead, least in zip(points, caches[::2], caches[1::2], strict=True):
        result, fewest = ahead.results()[0], {r["prefetch_depth"]: r for r in least.results()}
        rows = result["grown_to_rows"] or result["cache_rows"]
        append(
            {
                **describe(point),
                "horizon": result["horizon"],
                "cache_rows": rows,
                "cache_ratio": rows / trace.num_rows,
                "asked_cache_rows": point.config.cache_rows,
                "asked_cache_ratio": None if point.config.cache_rows is not None else point.config.cache_ratio,
                "table_rows": trace.num_rows,
                "batches": found.uses.scanned,
                "lookups": found.uses.lookups,
                "distinct": found.uses.distinct,
                "fills": result["fills"],
                "min0_fills": fewest[0]["fills"],
                "mind_fills": fewest[point.config.prefetch_depth]["fills"],
                "mind_shortened": fewest[point.config.prefetch_depth]["hold_shortened"],
                "cache_bytes": rows * size,
            }
        )
