"""The rows that move with every batch, for caches of several sizes, by our own planner on the ids of any source.

The trace is read once.  What is kept of it is each batch's distinct rows under small numbers (4 bytes each), so that
several planners, and later ones, can be run on it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..horizon import LEAST_HORIZON, horizon_for
from ..machine import cores
from ..plan import Planner
from ..simulate.caches import LruCurve
from ..simulate.trace import Trace
from ..simulate.uses import Stretch, Uses
from .work import Moves

MOST_DISTINCT = 1 << 27  # kept, of all batches: 512 MiB
MOST_BATCHES = 1024
STRETCH_BATCHES = 64


@dataclass
class Ids:
    """Of each batch: lookups, distinct rows (numbered from 0 in order of first use), and rows never used before.

    `curve`: fills of LRU without look-ahead at any cache size.  `read_seconds` of a batch, on one thread here.
    """

    lookups: np.ndarray
    distinct: list[np.ndarray]
    first: np.ndarray
    rows: int
    rows_used: int
    curve: LruCurve
    read_seconds: float
    complete: bool

    @property
    def batches(self) -> int:
        return len(self.distinct)


def read_ids(trace: Trace, progress: Callable[[int], Any] = lambda batches: None) -> Ids:
    """Read a trace, at most MOST_BATCHES of it.  Raises DataError if it is empty."""
    uses, curve = Uses(trace.table_rows, 0, 0, set()), LruCurve()
    lookups: list[int] = []
    distinct: list[np.ndarray] = []
    first: list[int] = []
    complete, started, own = True, time.perf_counter(), 0.0

    def take(ended: bool) -> None:
        stretch = uses.take(ended)
        if stretch is not None:
            _keep(stretch, distinct, first)
            for task in curve.tasks(stretch):
                task()
            progress(stretch.end - stretch.begin)

    for batch in trace:
        since = time.perf_counter()
        uses.add(batch)
        lookups.append(int(batch.rows.size))
        if uses.untaken >= STRETCH_BATCHES:
            take(ended=False)
        own += time.perf_counter() - since
        if len(lookups) >= MOST_BATCHES or uses.distinct >= MOST_DISTINCT:
            complete = False
            break
    read = time.perf_counter() - started - own
    take(ended=True)
    if not uses.distinct:
        raise DataError("the trace is empty: no batch looks up a row; give data with samples.")
    return Ids(
        np.array(lookups), distinct, np.array(first), trace.num_rows, uses.known, curve, read / len(lookups), complete
    )


def _keep(stretch: Stretch, distinct: list[np.ndarray], first: list[int]) -> None:
    for number in range(stretch.begin, stretch.end):
        at = number - stretch.first_batch
        distinct.append(stretch.row[stretch.start[at] : stretch.start[at + 1]].copy())
    first += [int((before < 0).sum()) for before in stretch.before]


@dataclass(frozen=True)
class Traffic:
    """What a cache of `cache_rows` moves, by batch, arrays [batches]; `warm`: the first batch that counts."""

    cache_rows: int
    horizon: int
    depth: int
    fills: np.ndarray
    written: np.ndarray
    warm: int
    grown: bool
    full: bool  # within the batches that were planned
    resident: bool = False
    estimated: bool = False  # between two sizes that were planned

    def moves(self, ids: Ids) -> list[Moves]:
        """Of each batch from `warm` on.  A row is copied unless it was never used before."""
        out = []
        for b in range(self.warm, len(self.fills)):
            fresh = min(float(ids.first[b]), float(self.fills[b]))
            out.append(Moves(
                float(ids.lookups[b]), float(ids.distinct[b].size), float(self.fills[b] - fresh), float(fresh),
                float(self.written[b]),
            ))  # fmt: skip
        return out

    def scaled(self, cache_rows: int, share: float, ids: Ids) -> Traffic:
        """About what a larger cache moves: of the fills of rows that were used before, `share` are left."""
        first = np.minimum(ids.first, self.fills)
        fills = first + share * (self.fills - first)
        written = self.written * fills / np.maximum(self.fills, 1)
        return dataclasses.replace(
            self, cache_rows=cache_rows, fills=fills, written=written, grown=False, estimated=True
        )


def everything_resident(ids: Ids) -> Traffic:
    """All rows on the device: nothing moves."""
    none = np.zeros(ids.batches, np.int64)
    return Traffic(ids.rows, 0, 0, none, none, _half(ids), False, True, resident=True)


def run_planner(ids: Ids, cache_rows: int, horizon: int | str, depth: int) -> Traffic:
    """Plans of all batches, with the horizon that "auto" would choose for them if that is asked for.

    What counts begins when the cache is full, but not in the trace's first half, and at the latest with its last
    quarter."""
    planner = Planner(max(ids.rows_used, 1), cache_rows, depth)
    fills, written = np.zeros(ids.batches, np.int64), np.zeros(ids.batches, np.int64)
    if isinstance(horizon, str):
        mean = sum(rows.size for rows in ids.distinct) / ids.batches
        horizon = max(LEAST_HORIZON, horizon_for(cache_rows, mean))
    horizon, full, grown = max(horizon, depth), ids.batches, False
    for b in range(ids.batches + horizon):
        if b < ids.batches:
            planner.scan(ids.distinct[b].astype(np.int64))
        if b >= horizon and planner.window:
            plan = planner.plan()
            fills[plan.batch], written[plan.batch] = plan.fill_rows.size, plan.evict_rows.size
            grown = grown or plan.grows
            if plan.evict_rows.size:
                full = min(full, plan.batch)
    warm = max(_half(ids), min(full, 3 * ids.batches // 4))
    warm = min(warm, ids.batches - 1)
    return Traffic(planner.cache_rows, horizon, depth, fills, written, warm, grown, full < ids.batches)


def _half(ids: Ids) -> int:
    return min(ids.batches // 2, ids.batches - 1)


def run_planners(
    ids: Ids, sizes: Sequence[int], horizon: int | str, depth: int, progress: Callable[[int], Any] = lambda done: None
) -> list[Traffic]:
    """One `Traffic` a cache size, in parallel; a cache of all rows is resident.

    All count from the same batch on, the latest of theirs: where batches differ, means over others would make a
    larger cache look slower.
    """

    def run(rows: int) -> Traffic:
        return everything_resident(ids) if rows >= ids.rows else run_planner(ids, rows, horizon, depth)

    out = []
    with ThreadPoolExecutor(cores(), thread_name_prefix="cdlrm-plan") as pool:
        for traffic in pool.map(run, sizes):
            out.append(traffic)
            progress(1)
    warm = max(traffic.warm for traffic in out)
    return [dataclasses.replace(traffic, warm=warm) for traffic in out]
