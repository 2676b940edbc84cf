"""`Planner`: from the ids of coming batches to plans.  Pure, on the host, deterministic.

`scan(rows)` lets one more batch into the window; `plan()` plans the oldest scanned batch with what
is known by then.  Plans depend on ids, settings and the order of these calls alone: no clock, no
threads, no device.  Rows are split by hash over independent shards (their number is a function of
`cache_rows`), which may run on any number of threads.  The inner loops are in `kernels.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CacheTooSmallError, ConfigError
from ..machine import cores
from . import kernels as k
from .plan import Plan
from .shard import Shard

MAX_SHARDS = 16
MAX_SLOTS = 1 << 31  # slots are int32
ROWS_PER_SHARD = 1 << 18
LOOKUPS_PER_THREAD = 1 << 14  # for fewer a second thread costs more than it saves
PIECES = 4  # of the lookups, a thread: whoever starts late takes fewer
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

    entry: np.ndarray  # int32 [L], by shard
    index: np.ndarray  # int32 [L], lookup of each (empty for one shard)
    shard_start: np.ndarray  # int64 [shards + 1]
    distinct: int

    @property
    def nbytes(self) -> int:
        return int(self.entry.nbytes + self.index.nbytes) + 16 * self.distinct


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
        self.threads = min(shards, threads or cores())
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._meta = np.zeros(2 * num_rows, np.int32)
        per_shard = -(-cache_rows // shards)
        self._shards = [Shard(s, shards, self._meta, per_shard) for s in range(shards)]
        self._waiting: deque[_Scanned] = deque()
        self._needs_victim: bool | None = None

    @property
    def shards(self) -> int:
        return len(self._shards)

    @property
    def cache_rows(self) -> int:
        return self._shards[0].slots * self.shards

    @property
    def scanned(self) -> int:
        """Number of batches scanned so far = number of the next batch to scan."""
        return int(self._shards[0].regs[k.SCANNED])

    @property
    def planned(self) -> int:
        """Number of batches planned so far = number of the next batch to plan."""
        return int(self._shards[0].regs[k.PLANNED])

    @property
    def window(self) -> int:
        """Scanned batches that are not planned yet."""
        return self.scanned - self.planned

    @property
    def window_bytes(self) -> int:
        """Host memory of the scanned batches that are not planned yet."""
        return sum(s.nbytes for s in self._waiting)

    @property
    def metadata_bytes(self) -> int:
        """Host memory of the per-row and per-slot arrays and the rings."""
        return int(self._meta.nbytes) + sum(s.nbytes for s in self._shards)

    def scan(self, rows: np.ndarray, cuts: Sequence[int] = ()) -> int:
        """Let the lookups `rows int64 [L]` of one more batch into the window; returns its number."""
        del cuts  # a hint for planners that split by table
        batch, n = self.scanned, int(rows.size)
        entry = np.empty(n, np.int32)
        if self.shards == 1:
            parts, index, shard_start = rows, NO_INDEX, np.array([0, n], np.int64)
        else:
            parts, index, shard_start = self._partition(rows)

        def scan(shard: Shard) -> None:
            lo, hi = shard_start[shard.number], shard_start[shard.number + 1]
            shard.scan(parts[lo:hi], entry[lo:hi])

        self._each(self._shards, scan, n)
        distinct = sum(s.distinct(batch) for s in self._shards)
        self._waiting.append(_Scanned(entry, index, shard_start, distinct))
        return batch

    def _partition(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The lookups by shard, in their order: rows, lookup numbers, where each shard's start."""
        n = int(rows.size)
        threads = self._threads_for(n)
        cuts = np.linspace(0, n, (1 if threads == 1 else PIECES * threads) + 1).astype(np.int64)
        pieces = range(cuts.size - 1)
        shard = np.empty(n, np.uint8)
        # Each piece's counters end before a gap of two cache lines: threads that count in one line wait for each other.
        counts = np.empty((cuts.size - 1, self.shards + 16), np.int64)[:, : self.shards]
        self._each(
            pieces,
            lambda p: k.count_shards(rows[cuts[p] : cuts[p + 1]], self.shards, shard[cuts[p] : cuts[p + 1]], counts[p]),
            n,
        )
        shard_start = _starts(counts.sum(axis=0))
        before = np.cumsum(counts, axis=0) - counts
        counts[:] = shard_start[:-1] + before  # from now on: where the piece's next lookup of each shard goes
        parts, index = np.empty(n, np.int64), np.empty(n, np.int32)
        self._each(
            pieces,
            lambda p: k.partition(
                rows[cuts[p] : cuts[p + 1]], cuts[p], shard[cuts[p] : cuts[p + 1]], counts[p], parts, index
            ),
            n,
        )
        return parts, index, shard_start

    @property
    def newest_distinct(self) -> int:
        """Distinct rows of the batch that was scanned last (0 when it is planned already)."""
        return self._waiting[-1].distinct if self._waiting else 0

    def needs_victim(self) -> bool:
        """Whether the next batch to plan has to evict a row (then it pays to scan on first)."""
        if self._needs_victim is None:
            self._needs_victim = any(
                s.distinct(self.planned) > s.free_slots() and s.lacks(s.free_slots()) for s in self._shards
            )
        return self._needs_victim

    def plan(self, hold: int = 0) -> Plan:
        """Plan the next scanned batch.  Raises CacheTooSmallError (before any change) if `strict`.

        The rows of the `hold` batches before it stay in any case, if need be by growing; those of
        `prefetch_depth` batches stay as long as the cache is large enough.
        """
        batch, waiting = self.planned, self._waiting[0]
        counts = [s.distinct(batch) for s in self._shards]
        need = max(sum(s.distinct(b) for b in range(max(batch - hold, 0), batch + 1)) for s in self._shards)
        need = min(need, self.num_rows)  # the held batches may have rows in common
        have = self._shards[0].slots
        grows = need > have
        if grows:
            if self.strict:
                raise CacheTooSmallError(
                    f"batch {batch} has {waiting.distinct} distinct rows and needs cache_rows="
                    f"{need * self.shards}, but the cache has {self.cache_rows}; raise cache_rows (or "
                    f"cache_ratio), use a smaller batch, or allow growth with strict=False.",
                    batch=batch, distinct=waiting.distinct, need=need * self.shards, have=self.cache_rows,
                )  # fmt: skip
            for shard in self._shards:
                shard.grow(need)
        self._waiting.popleft()
        self._needs_victim = None
        depth = max(self.prefetch_depth, hold)
        plan = self._run(batch, depth, waiting, _starts(counts))
        plan.grows = grows
        if grows:
            plan.wait_for = batch - 1  # the arrays move
        return plan

    def _run(self, batch: int, depth: int, waiting: _Scanned, entry_start: np.ndarray) -> Plan:
        lookups, total = int(waiting.entry.size), int(entry_start[-1])
        entry_slot, entry_row = np.empty(total, np.int32), np.empty(total, np.int64)
        missing, counts = np.empty(total, np.int32), np.empty((self.shards, 2), np.int64)

        def use_cached(shard: Shard) -> None:
            s, lo, hi = shard.number, entry_start[shard.number], entry_start[shard.number + 1]
            k.use_cached(
                depth, shard.meta, *shard.arrays, s, self.shards, entry_slot[lo:hi], entry_row[lo:hi],
                missing[lo:hi], counts[s],
            )  # fmt: skip

        self._each(self._shards, use_cached, lookups)
        fill_start, evict_start = (_starts(counts[:, i]) for i in (0, 1))
        fill_rows, fill_slots = np.empty(fill_start[-1], np.int64), np.empty(fill_start[-1], np.int32)
        evict_rows, evict_slots = np.empty(evict_start[-1], np.int64), np.empty(evict_start[-1], np.int32)
        slots, seg_lookup = np.empty(lookups, np.int32), np.empty(lookups, np.int32)
        seg_start = np.empty(total + 1, np.int32)
        seg_start[total] = lookups
        wait = np.empty(self.shards, np.int64)

        def fill_missing(shard: Shard) -> None:
            s = shard.number
            mine, fills, evicts, looked = (
                slice(starts[s], starts[s + 1])
                for starts in (entry_start, fill_start, evict_start, waiting.shard_start)
            )
            wait[s] = k.fill_missing(
                shard.meta, *shard.arrays, s, self.shards, entry_slot[mine], missing[mine][: counts[s, 0]],
                fill_rows[fills], fill_slots[fills], evict_rows[evicts], evict_slots[evicts],
            )  # fmt: skip
            k.segments(
                waiting.entry[looked], waiting.index[looked], entry_slot[mine], looked.start, slots, seg_start[mine],
                seg_lookup[looked],
            )  # fmt: skip

        self._each(self._shards, fill_missing, lookups)
        return Plan(
            batch, slots, entry_slot, entry_row, seg_start, seg_lookup, fill_rows, fill_slots, evict_rows, evict_slots,
            wait_for=int(wait.max()), cache_rows=self.cache_rows, window=self.window,
        )  # fmt: skip

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Slot of each of `rows int64 [n]` after the newest plan, int64 [n]; -1 = not cached."""
        local = self._meta[2 * rows].astype(np.int64) - 1
        if self.shards == 1:
            return local
        x = (rows >> 3).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        shard = (((x >> np.uint64(40)) * np.uint64(self.shards)) >> np.uint64(24)).astype(np.int64)
        return np.where(local >= 0, local * self.shards + shard, -1)

    def slot_rows(self) -> np.ndarray:
        """Row in each slot after the newest plan, int64 [cache_rows]; -1 = empty."""
        return np.ascontiguousarray(np.stack([s.slot_row[1:] for s in self._shards], axis=1).reshape(-1))

    def reset(self, slot_rows: np.ndarray) -> None:
        """Forget the window; from now on the cache holds `slot_rows int64 [cache_rows]` (-1: empty).

        Used when a loop is left early: plans that were not executed never happened.  Rows keep
        their order of last use, as far as it is known.
        """
        self._waiting.clear()
        self._needs_victim = None
        for shard in self._shards:
            shard.reset(np.ascontiguousarray(slot_rows[shard.number :: self.shards]))

    def _threads_for(self, lookups: int) -> int:
        return max(1, min(self.threads, lookups // LOOKUPS_PER_THREAD))

    def _each(self, items: Sequence[Any], run: Callable[[Any], object], lookups: int) -> None:
        """`run` each item, on as many threads as the lookups are worth; whoever is free takes the next one."""
        threads = min(self._threads_for(lookups), len(items))
        waiting = deque(items)

        def work() -> None:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                run(item)

        others = [self._threads_pool().submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            for other in others:
                other.exception()
        for other in others:
            other.result()

    def _threads_pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="cdlrm-plan")
            self._pool_process = os.getpid()
        return self._pool

    def close(self) -> None:
        """End the threads; the planner can still be used."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def check(self) -> None:
        """Verify the structure: raises AssertionError naming what is broken (for tests)."""
        for shard in self._shards:
            shard.check()


def _starts(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Where each of consecutive sections starts, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
