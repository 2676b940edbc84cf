"""`Planner`: from the ids of coming batches to plans.  Pure, on the host, deterministic.

`scan(rows)` lets one more batch into the window; `plan()` plans the oldest scanned batch with what
is known by then.  Plans depend on ids, settings and the order of these calls alone: no clock, no
threads, no device.  Rows are split by hash over independent shards (their number is a function of
`cache_rows`), which may run on any number of threads.  The inner loops are in `kernels.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CacheTooSmallError, ConfigError
from . import kernels as k
from .plan import Plan

MAX_SHARDS = 16
MAX_SLOTS = 1 << 31  # slots are int32
ROWS_PER_SHARD = 1 << 18
NO_INDEX = np.empty(0, np.int32)


def shards_for(cache_rows: int) -> int:
    """Shards of a cache: one a 262,144 slots, a power of two, at most 16.

    Small caches are one shard, since 16 need up to 18 % more slots for one batch, and each costs a few
    microseconds a batch.
    """
    return min(MAX_SHARDS, 1 << max(0, (cache_rows // ROWS_PER_SHARD).bit_length() - 1))


def _power_of_two(n: int) -> int:
    return 1 << max(int(n) - 1, 1).bit_length()


class _Shard:
    """Arrays of one shard, see `kernels.py`; owner of the rows that hash to it."""

    def __init__(self, number: int, meta: np.ndarray, slots: int) -> None:
        self.number = number
        self.meta = meta
        self.ring = np.full((1024, 2), -1, np.int64)
        self.ring32 = self.ring.view(np.int32)
        self.start = np.zeros(64, np.int64)
        self.listed = np.zeros(64, np.int64)
        self.regs = np.zeros(9, np.int64)
        self.slot = np.empty((0, 2), np.int64)
        self.fifo = np.zeros((0, 2), np.int32)
        self.free = np.empty(0, np.int32)
        self.grow(slots)

    @property
    def slots(self) -> int:
        return int(self.slot.shape[0])

    def distinct(self, batch: int) -> int:
        mask = self.start.size - 1
        return int(self.start[(batch + 1) & mask] - self.start[batch & mask])

    def grow(self, slots: int) -> None:
        """Add empty slots; the lowest is used first."""
        old = self.slots
        slot = np.full((slots, 2), -1, np.int64)
        slot[:old] = self.slot
        self.slot, self.slot32 = slot, slot.view(np.int32)
        size = _power_of_two(2 * slots + 2)
        if size > self.fifo.shape[0]:
            fifo = np.zeros((size, 2), np.int32)
            live = np.arange(self.regs[k.FIFO_HEAD], self.regs[k.FIFO_TAIL])
            if live.size:
                fifo[live & (size - 1)] = self.fifo[live & (self.fifo.shape[0] - 1)]
            self.fifo = fifo
        count = int(self.regs[k.FREE])
        self.free = np.concatenate([np.arange(slots - 1, old - 1, -1, dtype=np.int32), self.free[:count]])
        self.free = np.concatenate([self.free, np.empty(slots - self.free.size, np.int32)])
        self.regs[k.FREE] = count + slots - old

    def make_room(self, lookups: int) -> None:
        """Room in the rings for one more batch of `lookups` lookups."""
        regs = self.regs
        oldest = int(regs[k.RELEASED])
        batches = int(regs[k.SCANNED]) - oldest + 3
        if batches > self.start.size:
            size = _power_of_two(batches)
            live = np.arange(oldest, int(regs[k.SCANNED]) + 1)
            for name in ("start", "listed"):
                old = getattr(self, name)
                new = np.zeros(size, np.int64)
                new[live & (size - 1)] = old[live & (old.size - 1)]
                setattr(self, name, new)
        tail = int(self.start[oldest & (self.start.size - 1)])
        entries = int(regs[k.HEAD]) - tail + lookups
        if entries > self.ring.shape[0]:
            size = _power_of_two(entries)
            ring = np.full((size, 2), -1, np.int64)
            live = np.arange(tail, int(regs[k.HEAD]))
            ring[live & (size - 1)] = self.ring[live & (self.ring.shape[0] - 1)]
            self.ring, self.ring32 = ring, ring.view(np.int32)

    def scan(self, rows: np.ndarray, entry: np.ndarray) -> None:
        self.make_room(min(int(rows.size), int(self.meta.shape[0])))
        k.scan(
            rows, entry, self.meta, self.ring, self.ring32, self.slot32, self.start, self.listed, self.regs
        )  # fmt: skip

    def missing(self) -> int:
        return int(k.count_missing(self.meta, self.ring, self.start, self.regs))

    def free_slots(self) -> int:
        return int(self.regs[k.FREE])


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
    more distinct rows than there are slots instead of growing.  `executor` runs shards in parallel.
    Not thread-safe: one caller at a time.
    """

    def __init__(
        self,
        num_rows: int,
        cache_rows: int,
        prefetch_depth: int = 1,
        shards: int | None = None,
        strict: bool = False,
        executor: ThreadPoolExecutor | None = None,
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
        self._executor = executor
        self._meta = np.zeros((num_rows, 2), np.int32)
        per_shard = -(-cache_rows // shards)
        self._shards = [_Shard(s, self._meta, per_shard) for s in range(shards)]
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
        per_shard = sum(s.ring.nbytes + s.slot.nbytes + s.fifo.nbytes + s.free.nbytes for s in self._shards)
        return int(self._meta.nbytes) + int(per_shard)

    def scan(self, rows: np.ndarray, cuts: Sequence[int] = ()) -> int:
        """Let the lookups `rows int64 [L]` of one more batch into the window; returns its number."""
        del cuts  # a hint for planners that split by table
        batch = self.scanned
        n = int(rows.size)
        entry = np.empty(n, np.int32)
        if self.shards == 1:
            index, shard_start, parts = NO_INDEX, np.array([0, n], np.int64), rows
        else:
            shard_start = np.empty(self.shards + 1, np.int64)
            parts, index = np.empty(n, np.int64), np.empty(n, np.int32)
            k.partition(rows, self.shards, shard_start, parts, index, np.empty(n, np.uint8))

        def run(shard: _Shard) -> None:
            lo, hi = shard_start[shard.number], shard_start[shard.number + 1]
            shard.scan(parts[lo:hi], entry[lo:hi])

        self._each(run)
        distinct = sum(s.distinct(batch) for s in self._shards)
        self._waiting.append(_Scanned(entry, index, shard_start, distinct))
        return batch

    def distinct(self) -> int:
        """Distinct rows of the next batch to plan."""
        return self._waiting[0].distinct

    def needs_victim(self) -> bool:
        """Whether the next batch to plan has to evict a row (then it pays to scan on first)."""
        if self._needs_victim is None:
            self._needs_victim = any(
                s.distinct(self.planned) > s.free_slots() and s.missing() > s.free_slots() for s in self._shards
            )
        return self._needs_victim

    def plan(self, hold: int = 0) -> Plan:
        """Plan the next scanned batch.  Raises CacheTooSmallError (before any change) if `strict`.

        The rows of the `hold` batches before it stay in any case, if need be by growing; those of
        `prefetch_depth` batches stay as long as the cache is large enough.
        """
        batch, waiting = self.planned, self._waiting[0]
        counts = [s.distinct(batch) for s in self._shards]
        need = max(sum(s.distinct(b) for b in range(batch - hold, batch + 1)) for s in self._shards)
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
        plan = self._run(batch, depth, waiting, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        plan.grows = grows
        if grows:
            plan.wait_for = batch - 1  # the arrays move
        return plan

    def _run(self, batch: int, depth: int, waiting: _Scanned, entry_start: np.ndarray) -> Plan:
        lookups, total = int(waiting.entry.size), int(entry_start[-1])
        entry_slot, entry_row = np.empty(total, np.int32), np.empty(total, np.int64)
        fill_rows, fill_slots = np.empty(total, np.int64), np.empty(total, np.int32)
        evict_rows, evict_slots = np.empty(total, np.int64), np.empty(total, np.int32)
        slots, seg_lookup = np.empty(lookups, np.int32), np.empty(lookups, np.int32)
        seg_start = np.empty(total + 1, np.int64)
        out = np.empty((self.shards, 3), np.int64)

        def run(shard: _Shard) -> None:
            s = shard.number
            lo, hi = entry_start[s], entry_start[s + 1]
            first, last = waiting.shard_start[s], waiting.shard_start[s + 1]
            k.plan(
                depth, shard.meta, shard.ring, shard.ring32, shard.slot, shard.slot32, shard.fifo,
                shard.free, shard.start, shard.listed, shard.regs, s, self.shards, entry_slot[lo:hi],
                entry_row[lo:hi], fill_rows[lo:hi], fill_slots[lo:hi], evict_rows[lo:hi], evict_slots[lo:hi],
                out[s],
            )  # fmt: skip
            index = waiting.index[first:last]
            # the last element of a section is the first of the next: sections write all but that
            section = np.empty(hi - lo + 1, np.int64)
            k.segments(
                waiting.entry[first:last], index, entry_slot[lo:hi], first, slots, section, seg_lookup[first:last]
            )
            seg_start[lo:hi] = section[:-1]

        self._each(run)
        seg_start[total] = lookups
        return Plan(
            batch, slots, entry_slot, entry_row, seg_start, seg_lookup,
            _join(fill_rows, entry_start, out[:, 0]), _join(fill_slots, entry_start, out[:, 0]),
            _join(evict_rows, entry_start, out[:, 1]), _join(evict_slots, entry_start, out[:, 1]),
            wait_for=int(out[:, 2].max()), cache_rows=self.cache_rows, window=self.window,
        )  # fmt: skip

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Slot of each of `rows int64 [n]` after the newest plan, int64 [n]; -1 = not cached."""
        local = self._meta[rows, 0].astype(np.int64) - 1
        if self.shards == 1:
            return local
        x = (rows >> 3).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        shard = (((x >> np.uint64(40)) * np.uint64(self.shards)) >> np.uint64(24)).astype(np.int64)
        return np.where(local >= 0, local * self.shards + shard, -1)

    def slot_rows(self) -> np.ndarray:
        """Row in each slot after the newest plan, int64 [cache_rows]; -1 = empty."""
        return self._by_slot(lambda s: s.slot[:, 0])

    def _by_slot(self, column: Callable[[_Shard], np.ndarray]) -> np.ndarray:
        return np.ascontiguousarray(np.stack([column(s) for s in self._shards], axis=1).reshape(-1))

    def reset(self, slot_rows: np.ndarray) -> None:
        """Forget the window; from now on the cache holds `slot_rows int64 [cache_rows]` (-1: empty).

        Used when a loop is left early: plans that were not executed never happened.  Rows keep
        their order of last use, as far as it is known.
        """
        next_batch = self.scanned
        self._waiting.clear()
        self._needs_victim = None
        for shard in self._shards:
            rows = np.ascontiguousarray(slot_rows[shard.number :: self.shards])
            before = shard.slot[:, 0]
            self._meta[before[before >= 0], 0] = 0
            used = np.flatnonzero(rows >= 0)
            last = np.where(before[used] == rows[used], shard.slot32[used, 3], -1)
            order = used[np.argsort(last, kind="stable")]
            shard.slot[:, 0] = rows
            shard.slot32[:, 2] = -1
            shard.slot32[used, 3] = last
            self._meta[rows[used], 0] = used + 1
            empty = np.flatnonzero(rows < 0)[::-1]
            shard.free[: empty.size] = empty
            regs = shard.regs
            regs[k.FREE] = empty.size
            regs[k.HELD] = 0
            regs[k.PLANNED] = regs[k.RELEASED] = regs[k.SCANNED] = next_batch
            shard.fifo[: order.size, 0] = order
            shard.fifo[: order.size, 1] = shard.slot32[order, 3]
            regs[k.FIFO_HEAD], regs[k.FIFO_TAIL] = 0, order.size
            shard.start[next_batch & (shard.start.size - 1)] = regs[k.HEAD]

    def _each(self, run: Callable[[_Shard], Any]) -> None:
        if self._executor is None or self.shards == 1:
            for shard in self._shards:
                run(shard)
        else:
            for _ in self._executor.map(run, self._shards):
                pass

    def check(self) -> None:
        """Verify the structure: raises AssertionError naming what is broken (for tests)."""
        for shard in self._shards:
            _check_shard(shard, self.num_rows)


def _join(values: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The first `counts[s]` values of each section, in one array."""
    parts: Iterable[np.ndarray] = (values[lo : lo + n] for lo, n in zip(starts[:-1], counts, strict=True))
    return np.concatenate(list(parts))


def _check_shard(shard: _Shard, num_rows: int) -> None:
    regs, slot32 = shard.regs, shard.slot32
    rows = shard.slot[:, 0]
    used = np.flatnonzero(rows >= 0)
    if np.unique(rows[used]).size != used.size:
        raise AssertionError(f"rule 6: a row has two slots in shard {shard.number}")
    if not np.array_equal(shard.meta[rows[used], 0], used + 1):
        raise AssertionError(f"rule 1: row and slot disagree in shard {shard.number}")
    free = shard.free[: regs[k.FREE]]
    if np.unique(free).size != free.size or not np.array_equal(np.sort(free), np.flatnonzero(rows < 0)):
        raise AssertionError(f"shard {shard.number}: the free slots are not exactly the empty ones")
    planned, scanned, released = (int(regs[i]) for i in (k.PLANNED, k.SCANNED, k.RELEASED))
    if not released <= planned <= scanned:
        raise AssertionError(f"shard {shard.number}: released, planned, scanned are out of order")
    last, nxt = slot32[used, 3], slot32[used, 2]
    if ((nxt != -1) & ((nxt < planned) | (nxt >= scanned))).any():
        raise AssertionError(f"shard {shard.number}: a next use lies outside the window")
    candidates = used[last < released]
    if used.size - candidates.size != regs[k.HELD]:
        raise AssertionError(f"shard {shard.number}: the number of held slots is wrong")
    listed: list[int] = []
    wmask, emask = shard.start.size - 1, shard.ring.shape[0] - 1
    for b in range(planned, scanned):
        first = int(shard.start[b & wmask])
        stack = [int(shard.ring32[(first + i) & emask, 3]) for i in range(int(shard.listed[b & wmask]))]
        if any(slot32[s, 2] != b for s in stack):
            raise AssertionError(f"shard {shard.number}: a slot is listed for batch {b} but is used elsewhere")
        listed += stack
    fmask = shard.fifo.shape[0] - 1
    for at in range(int(regs[k.FIFO_HEAD]), int(regs[k.FIFO_TAIL])):
        s, stamp = (int(x) for x in shard.fifo[at & fmask])
        if slot32[s, 3] == stamp and slot32[s, 2] == -1:
            listed.append(s)
    if sorted(listed) != sorted(int(s) for s in candidates):
        raise AssertionError(f"rule 3: shard {shard.number}: the victims are not exactly the released slots")
    if num_rows and used.size and rows[used].max() >= num_rows:
        raise AssertionError(f"shard {shard.number}: a slot holds a row beyond the group")
