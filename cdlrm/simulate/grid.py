"""A grid of simulated caches over one trace, in one pass, on all cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from ..config import TrainConfig
from ..errors import ConfigError, DataError
from ..interrupt import interrupt_later
from ..machine import cores
from . import policies
from .auto import AutoWindow
from .caches import Cache, LookAheadCache, LruCurve, MinCache
from .policies import PolicyCache
from .trace import Recorder, Trace
from .uses import Stretch, Uses

POLICIES = ("lru", *policies.POLICIES, "min")
STRETCH_LOOKUPS = 1 << 21  # enough that starting threads costs nothing
STRETCH_BATCHES = 4096
LONGEST_CURVE = 4096  # each size of MIN's is a cache of its own


@dataclass(frozen=True)
class Grid:
    """Every combination of these is a configuration; `curve`: number of cache sizes of the miss-ratio curves.

    `horizon` "auto": for each cache size what `cdlrm train` would choose.
    """

    cache_rows: list[int] = field(default_factory=list)
    cache_ratio: list[float] = field(default_factory=list)
    horizon: list[int | str] = field(default_factory=lambda: ["auto"])
    prefetch_depth: list[int] = field(default_factory=lambda: [1])
    policy: list[str] = field(default_factory=lambda: ["lru", "min"])
    curve: int = 0

    def __post_init__(self) -> None:
        bounds: list[tuple[str, Sequence[float], float, float]] = [
            ("--cache-rows", self.cache_rows, 1, math.inf),
            ("--cache-ratio", self.cache_ratio, 0, 1),
            ("--horizon", self._horizons, 0, 2**20),
            ("--prefetch-depth", self.prefetch_depth, 0, 64),
        ]
        for flag, values, low, high in bounds:
            for value in values:
                if not low <= value <= high or value != value or (flag == "--cache-ratio" and value == 0):
                    bound = f"above {low}" if flag == "--cache-ratio" else f"at least {low}"
                    bound += "" if high == math.inf else f" and at most {high}"
                    raise ConfigError(f"{flag} {value}: must be {bound}.")
        for name in self.policy:
            if name not in POLICIES:
                raise ConfigError(f"--policy {name}: is unknown; expected one of {', '.join(POLICIES)}.")
        for flag, given in (("--horizon", self.horizon), ("--prefetch-depth", self.prefetch_depth),
                            ("--policy", self.policy)):  # fmt: skip
            if not given:
                raise ConfigError(f"{flag}: the grid is empty; give at least one value.")
        if self.curve != 0 and not 2 <= self.curve <= LONGEST_CURVE:
            raise ConfigError(f"--curve {self.curve}: must be 0 (no curve) or from 2 to {LONGEST_CURVE} cache sizes.")

    def sizes(self, num_rows: int) -> list[int]:
        """Cache sizes in rows, rising; a ratio is of all `num_rows`, rounded up as `cdlrm train` does."""
        rows = {*self.cache_rows, *(max(1, math.ceil(num_rows * ratio)) for ratio in self.cache_ratio)}
        if not rows and not self.curve:
            rows = {max(1, math.ceil(num_rows * 0.1))}
        check_cache_rows(rows, num_rows)
        return sorted(rows)

    def curve_sizes(self, num_rows: int) -> list[int]:
        if not self.curve:
            return []
        return sorted({int(round(n)) for n in np.geomspace(max(1, num_rows / 1000), num_rows, self.curve)})

    def below_depth(self) -> list[int]:
        """Horizons that are raised to a prefetch depth."""
        return sorted({h for h in self._horizons if h < max(self.prefetch_depth)})

    @property
    def _horizons(self) -> list[int]:
        """Those that are numbers."""
        return [h for h in self.horizon if isinstance(h, int)]

    def caches(self, num_rows: int, tables: int) -> list[Cache]:
        """What to simulate, without duplicates."""
        sizes = self.sizes(num_rows)
        made: list[Cache] = []
        if "min" in self.policy:
            made += [MinCache(rows, tuple(sorted({0, *self.prefetch_depth}))) for rows in sizes]
        depths = sorted(set(self.prefetch_depth))
        settings: list[tuple[int | str, int]] = [*sorted({(max(h, d), d) for h, d in product(self._horizons, depths)})]
        settings += [("auto", d) for d in depths if "auto" in self.horizon]

        def window(horizon: int | str, rows: int, depth: int) -> int | AutoWindow:
            return horizon if isinstance(horizon, int) else AutoWindow(num_rows, rows, depth)

        for name in dict.fromkeys(self.policy):
            if name == "lru":
                made += [LookAheadCache(rows, window(h, rows, d), d, tables) for rows in sizes for h, d in settings]
            elif name != "min":
                made += [PolicyCache(name, rows, window(h, rows, d), d, tables) for rows in sizes for h, d in settings]
        if self.curve:
            made += [MinCache(rows, (0,)) for rows in self.curve_sizes(num_rows) if rows not in sizes or not made]
            made.append(LruCurve())
        return made

    @property
    def longest(self) -> tuple[int, int]:
        """The longest horizon that is a number, and the deepest prefetch depth."""
        depth = max(self.prefetch_depth)
        return max([*self._horizons, depth]) if set(self.policy) != {"min"} else 0, depth


@dataclass
class Simulation:
    """What came out: `results` one mapping a configuration, `summary` what is common to all."""

    results: list[dict[str, Any]]
    summary: dict[str, Any]


def simulate(
    trace: Trace,
    grid: Grid,
    *,
    workers: int | None = None,
    record_bytes: int = 4,
    progress: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
) -> Simulation:
    """All configurations of `grid` on `trace`; `progress(batches)` is told of every stretch that is done.

    `workers` threads (default: every core), results do not depend on it.  `record_bytes` of a row (weights and
    optimizer state) only scale the bytes.  Ctrl-C ends the trace there: the results are of what was read.
    Raises ConfigError for grids that cannot be, DataError for an empty trace.
    """
    caches = grid.caches(trace.num_rows, len(trace.table_rows))
    passed = simulate_caches(trace, caches, *grid.longest, workers=workers, progress=progress, recorder=recorder)
    return _collect(trace, grid, caches, passed.uses, record_bytes, passed.interrupted)


@dataclass
class Pass:
    """What a pass over a trace read, and whether the user ended it."""

    uses: Uses
    interrupted: bool


def simulate_caches(
    trace: Trace,
    caches: Sequence[Cache],
    horizon: int,
    depth: int,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
) -> Pass:
    """Let `caches`, none of which looks further than `horizon` or is deeper than `depth`, see the whole trace."""
    shards = {cache.shards for cache in caches if isinstance(cache, (LookAheadCache, MinCache))}
    windows = [cache.window for cache in caches if isinstance(cache, LookAheadCache) and cache.window is not None]
    uses = Uses(trace.table_rows, horizon, depth, shards, windows)
    interrupted = False
    with ThreadPoolExecutor(workers or cores(), thread_name_prefix="cdlrm-simulate") as pool:
        running = _Running(pool, progress)
        try:
            for batch in trace:
                with interrupt_later():  # what is counted is what is recorded
                    uses.add(batch)
                    if recorder is not None:
                        recorder.add(batch)
                    if uses.untaken and (uses.newest_lookups >= STRETCH_LOOKUPS or uses.untaken >= STRETCH_BATCHES):
                        running.wait()
                        running.start(uses.take(ended=False), caches)
        except KeyboardInterrupt:
            interrupted = True
        running.wait()
        running.start(uses.take(ended=True), caches)
        running.wait()
    if interrupted and not uses.distinct:
        raise KeyboardInterrupt
    if not uses.distinct:
        raise DataError("the trace is empty: no batch looks up a row; give data with samples.")
    return Pass(uses, interrupted)


def check_cache_rows(cache_rows: Iterable[int], num_rows: int) -> None:
    """Raise ConfigError where a cache of a grid is larger than all tables: several points would silently be one."""
    too_large = [n for n in sorted(cache_rows) if n > num_rows]
    if too_large:
        raise ConfigError(
            f"--cache-rows {too_large[0]}: the tables have only {num_rows} rows; give at most that (everything "
            "resident)."
        )


def cache_size(config: TrainConfig, num_rows: int) -> int:
    """Slots of `cdlrm train` with these settings, for tables of `num_rows` rows in all."""
    if config.cache_rows is not None:
        return min(config.cache_rows, num_rows)
    return max(1, math.ceil(num_rows * config.cache_ratio))


class _Running:
    """The tasks of the stretch in hand."""

    def __init__(self, pool: ThreadPoolExecutor, progress: Callable[[int], None] | None) -> None:
        self.pool, self.progress = pool, progress
        self.futures: list[Any] = []
        self.batches = 0

    def start(self, stretch: Stretch | None, caches: Iterable[Cache]) -> None:
        if stretch is not None:
            self.batches = stretch.end - stretch.begin
            self.futures = [self.pool.submit(task) for cache in caches for task in cache.tasks(stretch)]

    def wait(self) -> None:
        futures, self.futures = self.futures, []
        for future in futures:
            future.result()
        if futures and self.progress is not None:
            self.progress(self.batches)


def _collect(
    trace: Trace, grid: Grid, caches: list[Cache], uses: Uses, record_bytes: int, interrupted: bool
) -> Simulation:
    found = [result for cache in caches for result in cache.results()]
    only_curve = set(grid.curve_sizes(trace.num_rows)) - set(grid.sizes(trace.num_rows))
    found = [r for r in found if not (r["grown_to_rows"] and r["cache_rows"] in only_curve)]
    found += _curve(sorted(only_curve), caches)
    fewest = {(r["cache_rows"], r["prefetch_depth"]): r["fills"] for r in found if r["policy"] == "min"}
    shortened = {(r["cache_rows"], r["prefetch_depth"]): r["hold_shortened"] for r in found if r["policy"] == "min"}
    touched = int(uses.touched_by_table().sum())
    results = []
    for result in found:
        fills, rows = result["fills"], result["cache_rows"]
        by_table = result.pop("fills_by_table", None)
        least0, least = fewest.get((rows, 0)), fewest.get((rows, result["prefetch_depth"]))
        results.append(
            {
                "cache_ratio": rows / trace.num_rows,
                **result,
                "fills_first_touch": touched,
                "hit_rate_per_distinct_row": 1 - fills / uses.distinct,
                "fills_a_batch": fills / uses.scanned,
                "fills_copied": fills - touched,  # a row's first fill makes its initial values where they are needed
                "bytes_filled": (fills - touched) * record_bytes,
                "fills_over_min0": fills / least0 if least0 else None,
                "fills_over_mind": fills / least if least else None,
                "hold_shortened": shortened.get((rows, result["prefetch_depth"])),  # batches of MIN(d)
                "fills_by_table": None if by_table is None else dict(zip(trace.names, by_table, strict=True)),
            }
        )
    results.sort(key=lambda r: (r["policy"] != "min", r["cache_rows"], r["prefetch_depth"], r["horizon"] or 0))
    summary = {
        "batches": uses.scanned,
        "lookups": uses.lookups,
        "distinct": uses.distinct,
        "rows_touched": touched,
        "table_rows": trace.num_rows,
        "record_bytes": record_bytes,
        "interrupted": interrupted,
        "tables": {
            name: {"rows": rows, "distinct": int(distinct), "rows_touched": int(used)}
            for name, rows, distinct, used in zip(
                trace.names, trace.table_rows, uses.distinct_by_table, uses.touched_by_table(), strict=True
            )
        },
    }
    return Simulation(results, summary)


def _curve(sizes: list[int], caches: list[Cache]) -> list[dict[str, Any]]:
    """LRU without look-ahead at the sizes of the curve that hold every batch (smaller ones are left out)."""
    return [
        {"policy": "lru", "cache_rows": rows, "horizon": 0, "horizon_auto": False, "prefetch_depth": 0,
         "fills": cache.fills(rows), "grown_to_rows": None}
        for cache in caches if isinstance(cache, LruCurve)
        for rows in sizes if rows >= cache.largest
    ]  # fmt: skip
