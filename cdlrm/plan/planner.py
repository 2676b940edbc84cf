"""`Planner`: from the ids of coming batches to plans.  Pure, on the host, deterministic.

`scan(rows)` lets one more batch into the window; `plan()` plans the oldest scanned batch with what
is known by then.  Plans depend on ids, settings and the order of these calls alone: no clock, no
threads, no device.  Rows are split by hash over independent shards (their number is a function of
`cache_rows`), which may run on any number of threads.  The inner loops are in `kernels.py` and `plan_kernels.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CacheTooSmallError, ConfigError, UsageError
from ..machine import cores
from . import kernels as k
from . import plan_kernels
from .plan import Plan
from .shards import Shards
from .team import Team

MAX_SHARDS = 16
MAX_SLOTS = 1 << 31  # slots are int32
ROWS_PER_SHARD = 1 << 18
LOOKUPS_PER_THREAD = 1 << 14  # for fewer a second thread costs more than it saves
PIECES = 8  # of the lookups, a thread: whoever starts late takes fewer
NO_INDEX = np.empty(0, np.int32)


def shards_for(cache_rows: int) -> int:
    """Shards of a cache: one a 262,144 slots, a power of two, at most 16.

    Small caches are one shard, since 16 need up to 18 % more slots for one batch, and each costs a few
    microseconds a batch.
    """
    return min(MAX_SHARDS, 1 << max(0, (cache_rows // ROWS_PER_SHARD).bit_length() - 1))


@dataclass
class _Scanned:
    """What is kept of a scanned batch until it is planned."""

    entry: np.ndarray  # int32 [L], in pieces, each by shard
    index: np.ndarray  # int32 [L], lookup of each (empty for one shard)
    bounds: np.ndarray  # int64 [pieces, > shards]: where each shard's begin in each piece, and the piece's end
    distinct: int
    most: int  # distinct rows of the shard that has most


class Planner:
    """Plans of one group.  `num_rows` rows, `cache_rows` slots, hold of `prefetch_depth` batches.

    `shards` overrides `shards_for(cache_rows)`; `strict` refuses a batch that has
    more distinct rows than there are slots instead of growing.  Big batches of several shards are scanned
    and planned on `threads` threads (default: as many as the process has cores), which changes no plan;
    `close` ends them.  Not thread-safe: one caller at a time.
    """

    def __init__(
        self,
        num_rows: int,
        cache_rows: int,
        prefetch_depth: int = 1,
        shards: int | None = None,
        strict: bool = False,
        threads: int | None = None,
    ) -> None:
        if not 1 <= cache_rows < MAX_SLOTS:
            raise ConfigError(f"cache_rows={cache_rows}: a cache needs at least 1 row and less than {MAX_SLOTS}.")
        if prefetch_depth < 0:
            raise ConfigError(f"prefetch_depth={prefetch_depth}: must be 0 or more.")
        shards = shards_for(cache_rows) if shards is None else shards
        if not 1 <= shards <= 256:
            raise ConfigError(f"shards={shards}: must be within [1, 256].")
        self.num_rows = num_rows
        self.prefetch_depth = prefetch_depth
        self.strict = strict
        self._team = Team(min(shards, threads or cores()))
        self._shards = Shards(shards, num_rows, -(-cache_rows // shards))
        self.planned = 0  # batches so far = number of the next one
        self._waiting: deque[_Scanned] = deque()
        self._needs_victim: bool | None = None
        self._room = True  # for one more batch
        self._whole = True  # no call has failed, or was interrupted, in the middle

    @property
    def shards(self) -> int:
        return self._shards.number

    @property
    def cache_rows(self) -> int:
        return self._shards.slots * self.shards

    @property
    def scanned(self) -> int:
        """Number of batches scanned so far = number of the next batch to scan."""
        return self.planned + len(self._waiting)

    @property
    def window(self) -> int:
        """Scanned batches that are not planned yet."""
        return len(self._waiting)

    @property
    def metadata_bytes(self) -> int:
        """Host memory of the per-row and per-slot arrays and the rings."""
        return self._shards.nbytes

    def scan(self, rows: np.ndarray, cuts: Sequence[int] = ()) -> int:
        """Let the lookups `rows int64 [L]` of one more batch into the window; returns its number."""
        del cuts  # a hint for planners that split by table
        self._begin()
        batch, n, shards = self.scanned, int(rows.size), self._shards
        if not self._room:
            shards.make_room()
        workers = self._workers_for(n)
        pieces = 1 if workers == 1 else PIECES * workers
        entry, at = np.empty(n, np.int32), np.empty(self.shards, np.int64)
        at.fill(-1)
        if self.shards == 1:
            unsorted, parts, index, bounds = 0, rows, NO_INDEX, np.array([[0, n]])
        else:
            unsorted, parts, index = pieces, np.empty(n, np.int64), np.empty(n, np.int32)
            # Two cache lines between the counters of two pieces: threads that count in one line wait for each other.
            bounds = np.empty((pieces, self.shards + 17), np.int64)

        def scan(worker: int, workers: int, claims: np.ndarray) -> tuple[int, int, bool]:
            result: tuple[int, int, bool] = k.scan_batch(
                worker, workers, claims, unsorted, rows, bounds, parts, index, at, entry, shards.meta, shards.ring,
                shards.link, shards.slot_use, shards.fifo, shards.start, shards.listed, shards.regs,
            )  # fmt: skip
            return result

        while (result := self._team.run(scan, workers, unsorted, self.shards))[0] < 0:
            shards.grow_rings()
            unsorted = 0
        distinct, most, self._room = result
        self._waiting.append(_Scanned(entry, index, bounds, distinct, most))
        self._whole = True
        return batch

    def _begin(self) -> None:
        """A call that changes the arrays begins; whatever ends it before its end leaves them half changed."""
        if not self._whole:
            raise UsageError("an earlier call of this planner was interrupted, or failed; call reset() first.")
        self._whole = False

    @property
    def newest_distinct(self) -> int:
        """Distinct rows of the batch that was scanned last (0 when it is planned already)."""
        return self._waiting[-1].distinct if self._waiting else 0

    def needs_victim(self) -> bool:
        """Whether the next batch to plan has to evict a row (then it pays to scan on first); False if there is none."""
        # The kernel must not see half changed arrays; plan() refuses.
        if self._needs_victim is None and self._whole and self._waiting:
            shards = self._shards
            self._needs_victim = bool(k.need_victims(shards.meta, shards.ring, shards.start, shards.regs))
        return bool(self._needs_victim)

    def plan(self, hold: int = 0) -> Plan:
        """Plan the next scanned batch.  Raises CacheTooSmallError (before any change) if `strict`.

        The rows of the `hold` batches before it stay in any case, if need be by growing; those of
        `prefetch_depth` batches stay as long as the cache is large enough.
        """
        batch, waiting = self.planned, self._waiting[0]
        held = self._shards.most_distinct(max(batch - hold, 0), batch) if hold else waiting.most
        need = min(held, self.num_rows)  # the held batches may have rows in common
        have = self._shards.slots
        grows = need > have
        if grows:
            if self.strict:
                raise CacheTooSmallError(
                    f"batch {batch} has {waiting.distinct} distinct rows and needs cache_rows="
                    f"{need * self.shards}, but the cache has {self.cache_rows}; raise cache_rows (or "
                    f"cache_ratio), use a smaller batch, or allow growth with strict=False.",
                    batch=batch, distinct=waiting.distinct, need=need * self.shards, have=self.cache_rows,
                )  # fmt: skip
        self._begin()
        if grows:
            self._shards.grow_slots(need)
        self._waiting.popleft()
        self.planned += 1
        self._needs_victim = None
        depth = max(self.prefetch_depth, hold)
        plan = self._make(batch, depth, waiting)
        plan.grows = grows
        if grows:
            plan.wait_for = batch - 1  # the arrays move
        self._whole = True
        return plan

    def _make(self, batch: int, depth: int, waiting: _Scanned) -> Plan:
        lookups, total, shards = int(waiting.entry.size), waiting.distinct, self._shards
        slots, seg_lookup, seg_start = (np.empty(size, np.int32) for size in (lookups, lookups, total + 1))
        seg_start[total] = lookups
        entry_slot, fill_slots, evict_slots = (np.empty(total, np.int32) for _ in range(3))
        entry_row, fill_rows, evict_rows = (np.empty(total, np.int64) for _ in range(3))
        out = np.empty((self.shards, 16), np.int64)

        def plan(worker: int, workers: int, claims: np.ndarray) -> tuple[int, int, int]:
            counts: tuple[int, int, int] = plan_kernels.plan_batch(
                worker, workers, claims, batch, depth, waiting.bounds, waiting.entry, waiting.index, *shards.arrays,
                slots, entry_slot, entry_row, seg_start, seg_lookup, fill_rows, fill_slots, evict_rows,
                evict_slots, out,
            )  # fmt: skip
            return counts

        workers = self._workers_for(lookups)
        fills, evicts, wait = self._team.run(plan, workers, self.shards, self.shards, len(waiting.bounds))
        return Plan(
            batch, slots, entry_slot, entry_row, seg_start, seg_lookup, fill_rows[:fills], fill_slots[:fills],
            evict_rows[:evicts], evict_slots[:evicts], wait_for=wait, cache_rows=self.cache_rows, window=self.window,
        )  # fmt: skip

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Slot of each of `rows int64 [n]` after the newest plan, int64 [n]; -1 = not cached."""
        local = self._shards.meta[2 * rows].astype(np.int64) - 1
        if self.shards == 1:
            return local
        x = (rows >> 3).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        shard = (((x >> np.uint64(40)) * np.uint64(self.shards)) >> np.uint64(24)).astype(np.int64)
        return np.where(local >= 0, local * self.shards + shard, -1)

    def slot_rows(self) -> np.ndarray:
        """Row in each slot after the newest plan, int64 [cache_rows]; -1 = empty."""
        return self._shards.slot_row[:, 1:].flatten(order="F")

    def reset(self, slot_rows: np.ndarray) -> None:
        """Forget the window; from now on the cache holds `slot_rows int64 [cache_rows]` (-1: empty).

        Used when a loop is left early: plans that were not executed never happened.  Rows keep
        their order of last use, as far as it is known; after a call that failed it is not: all arrays are made anew.
        """
        batch, whole, self._whole = self.scanned, self._whole, False
        if not whole:
            batch += 1  # the one that failed may have been begun
            self._shards = Shards(self.shards, self.num_rows, slot_rows.size // self.shards)
            self._shards.regs[:, k.SCANNED] = batch
        self._waiting.clear()
        self.planned, self._needs_victim, self._room = batch, None, False
        for s in range(self.shards):
            self._shards.reset(s, np.ascontiguousarray(slot_rows[s :: self.shards]))
        self._whole = True

    def _workers_for(self, lookups: int) -> int:
        return max(1, min(self._team.size, lookups // LOOKUPS_PER_THREAD))

    def close(self) -> None:
        """End the threads; the planner can still be used."""
        self._team.close()

    def check(self) -> None:
        """Verify the structure: raises AssertionError naming what is broken (for tests)."""
        for s in range(self.shards):
            self._shards.check(s)
