"""Simulated caches: each takes stretches of distinct rows and counts what it would have filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..horizon import LARGEST_HORIZON
from ..plan import MinCounter, shards_for
from ..plan import minimum as minimum
from . import kernels as k
from .auto import AutoWindow
from .uses import Stretch, grown

Task = Callable[[], None]


class Cache(Protocol):
    """`tasks(stretch)`: what to run, in any order and on any thread, before the next stretch."""

    def tasks(self, stretch: Stretch) -> list[Task]: ...

    def results(self) -> list[dict[str, Any]]:
        """One mapping a configuration: policy, cache_rows, horizon, prefetch_depth, fills, …"""


class LookAheadCache:
    """The planner's cache: the furthest next use goes first, and before it rows without a known use, oldest first.

    `horizon` 0 with `depth` 0 is LRU as in caches that do not look ahead.  Fills equal `cdlrm.plan.Planner`'s.
    `horizon` may be an `AutoWindow` (of its own: nobody else takes from it).
    """

    def __init__(self, cache_rows: int, horizon: int | AutoWindow, depth: int, tables: int) -> None:
        self.cache_rows, self.depth = cache_rows, depth
        self.window = horizon if isinstance(horizon, AutoWindow) else None
        self._horizon = max(horizon if isinstance(horizon, int) else LARGEST_HORIZON, depth)
        self.shards = shards_for(cache_rows)
        self.per_shard = self.slots = -(-cache_rows // self.shards)
        self.state = np.zeros((1024, 2), np.int32)  # of all shards: a row belongs to one
        self.parts = [_Part(tables) for _ in range(self.shards)]
        self._bucket_size = 1 << (self._horizon + 2).bit_length()

    @property
    def horizon(self) -> int:
        """Batches that the window shows; with an `AutoWindow` by its newest choice."""
        return self._horizon if self.window is None else self.window.horizon

    def tasks(self, stretch: Stretch) -> list[Task]:
        split = stretch.splits[self.shards]
        slots = np.maximum(split.need, self.per_shard)
        self.slots = int(slots[stretch.end - 1 - stretch.first_batch])
        self.state = grown(self.state, stretch.rows, 0)
        far = self._far(stretch)

        def task(number: int) -> Task:
            return lambda: self._run(number, stretch, slots, far)

        return [task(number) for number in range(self.shards)]

    def _far(self, stretch: Stretch) -> np.ndarray:
        """Newest batch that the window shows at each of the stretch's batches, int64 [B]."""
        batches = np.arange(stretch.first_batch, stretch.end)
        if self.window is None:
            return np.minimum(batches + self._horizon, stretch.last_seen[: batches.size])
        far = np.zeros(batches.size, np.int64)
        far[stretch.begin - stretch.first_batch :] = [
            self.window.far.popleft() for _ in range(stretch.begin, stretch.end)
        ]
        return far

    def _run(self, number: int, stretch: Stretch, slots: np.ndarray, far: np.ndarray) -> None:
        part, split = self.parts[number], stretch.splits[self.shards]
        part.make_room(stretch.rows, self.slots, self._bucket_size)
        k.look_ahead(
            stretch.begin, stretch.end, stretch.first_batch, split.lo[number], split.hi[number], split.row,
            split.following, stretch.first, far, self.depth, slots, self.state, part.fifo, part.bucket, part.regs,
            stretch.table, part.fills_by_table,
        )  # fmt: skip

    def results(self) -> list[dict[str, Any]]:
        counted = np.sum([part.regs for part in self.parts], axis=0)
        return [
            {
                "policy": "lru",
                "cache_rows": self.cache_rows,
                "horizon": self.horizon,
                "horizon_auto": self.window is not None,
                "prefetch_depth": self.depth,
                "shards": self.shards,
                "fills": int(counted[k.FILLS]),
                "fills_most_in_a_batch": int(counted[k.PEAK]),
                "grown_to_rows": self.slots * self.shards if self.slots > self.per_shard else None,
                "fills_by_table": np.sum([part.fills_by_table for part in self.parts], axis=0).tolist(),
            }
        ]


class _Part:
    """State of one shard of a `LookAheadCache`, see `kernels.look_ahead`."""

    def __init__(self, tables: int) -> None:
        self.fifo = np.zeros((64, 3), np.int32)
        self.bucket = np.empty(0, np.int32)
        self.regs = np.zeros(9, np.int64)
        self.fills_by_table = np.zeros(tables, np.int64)

    def make_room(self, rows: int, slots: int, buckets: int) -> None:
        if not self.bucket.size:
            self.bucket = np.full(buckets, k.NONE, np.int32)
        size = 1 << (2 * min(slots, rows) + 2).bit_length()
        if size > self.fifo.shape[0]:
            fifo = np.zeros((size, 3), np.int32)
            live = np.arange(self.regs[k.HEAD], self.regs[k.TAIL])
            fifo[live & (size - 1)] = self.fifo[live & (self.fifo.shape[0] - 1)]
            self.fifo = fifo


class _UsesCounter(MinCounter):
    """`MinCounter` that is told the previous batch of every distinct row, so it needs no memory by row."""

    def __init__(self, cache_rows: int, depths: tuple[int, ...]) -> None:
        super().__init__(1, cache_rows, *depths, double=False)
        self._positions = np.empty(0, np.int64)

    def add_uses(self, before: np.ndarray) -> None:
        if before.size > self._positions.size:
            self._positions = np.arange(before.size)
        self._last_use = before + np.int32(1)
        self.add(self._positions[: before.size])


class MinCache:
    """MIN(d): the fewest fills that any cache of this size can make, for several prefetch depths d."""

    def __init__(self, cache_rows: int, depths: tuple[int, ...]) -> None:
        self.cache_rows, self.depths = cache_rows, depths
        self.shards = shards_for(cache_rows)
        self.per_shard = self.slots = -(-cache_rows // self.shards)
        self.counter = _UsesCounter(cache_rows, depths)

    def tasks(self, stretch: Stretch) -> list[Task]:
        return [lambda: self._run(stretch)]

    def _run(self, stretch: Stretch) -> None:
        need = stretch.splits[self.shards].need  # the cache that it is compared with has grown to this
        for b, before in enumerate(stretch.before, stretch.begin - stretch.first_batch):
            self.slots = max(self.slots, int(need[b]))
            self.counter.resize(self.slots * self.shards)
            self.counter.add_uses(before)

    def results(self) -> list[dict[str, Any]]:
        return [
            {
                "policy": "min",
                "cache_rows": self.cache_rows,
                "horizon": None,
                "horizon_auto": False,
                "prefetch_depth": depth,
                "fills": self.counter.fills_at(depth),
                "hold_shortened": self.counter.shortened_at(depth),
                "grown_to_rows": self.slots * self.shards if self.slots > self.per_shard else None,
            }
            for depth in self.depths
        ]


class LruCurve:
    """LRU without look-ahead for all cache sizes at once, by stack distances.

    `fills(C)` is exact for caches that hold every batch (C >= `largest`); smaller ones would grow.
    """

    def __init__(self) -> None:
        self.tree = np.zeros(1 << 12, np.int64)
        self.at_place = np.full(1 << 12, k.NONE, np.int32)
        self.place = np.zeros(1024, np.int32)
        self.histogram = np.zeros(1024, np.int64)
        self.top = self.live = self.distinct = self.largest = 0

    def tasks(self, stretch: Stretch) -> list[Task]:
        return [lambda: self._run(stretch)]

    def _run(self, stretch: Stretch) -> None:
        sizes = np.diff(stretch.start)[stretch.begin - stretch.first_batch : stretch.end - stretch.first_batch]
        self.largest = max(self.largest, int(sizes.max()))
        self.distinct += int(sizes.sum())
        self.place, self.histogram = grown(self.place, stretch.rows, 0), grown(self.histogram, stretch.rows + 1, 0)
        need = 2 * stretch.rows + self.largest + 2
        if need > self.tree.size:
            tree_size = max(need, 2 * self.tree.size)
            self.at_place = grown(self.at_place, tree_size, -1)
            self.tree = np.zeros(self.at_place.size, np.int64)
            self.top = int(k._renumber(self.tree, self.place, self.at_place, self.top))
        self.top, self.live = k.stack_distances(
            stretch.begin, stretch.end, stretch.first_batch, stretch.start, stretch.row, self.tree, self.place,
            self.at_place, self.top, self.live, self.histogram,
        )  # fmt: skip

    def fills(self, cache_rows: int) -> int:
        return self.distinct - int(self.histogram[:cache_rows].sum())

    def results(self) -> list[dict[str, Any]]:
        return []
