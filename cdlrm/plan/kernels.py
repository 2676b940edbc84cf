"""The planner's inner loops (numba, nogil), first half: the window.  The second is `plan_kernels.py`.

Time goes to cache misses and mispredicted branches, so: what is read together lies together, a row's
word is the only random access per lookup (all else is per distinct row or in order), lines are asked
for a block ahead, and rare against frequent is decided by selecting a harmless target (a dummy element
at the end, or slot 0) instead of by a branch.

State of one shard.  Slots are numbered from 1 here (0: none); an *entry* is a scanned (row, batch):

* `meta int32 [2N]`  per row of the group: slot, number of its newest entry (absolute, modulo 2^31).
* `ring int64 [E+1]`, `link int32 [E+1]`  per entry: row in the low 40 bits, above it 1 + next use (modulo
  2^22; 0 = none).  Entry `n` lives at `n - ORIGIN`, plus E if that is negative.  The rings of all shards, each as large
  as its shard needs, are one array: this is its part [RING, RING_END), see `part`.  The links of batch k's
  entries first hold the *list* of slots whose next use is k (a stack), then, once k is planned, the slot of
  each entry.
* `slot_row int64 [S+1]`, `slot_use int32 [2(S+1)]`  per slot: row (-1 = empty); next use and last use.
  Without a known use, next use is NONE while the slot is held, then -2 minus its place in the FIFO.
* `fifo int32 [F+1]`  slots without a known use, in order of last use; 0 where one left (was used, or has a
  known use by now).
* `start int64 [W]`, `listed int64 [W]`  per batch (number & (W - 1)): number of its first entry, stack height.
* `regs int64 [..]`  the scalars named below.

An entry's number is unique among the last 2^30: rows that were not seen for as long are renumbered (`sweep`).
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from ..driver.intrinsics import prefetch_read as prefetch
from .claims import claim, finish, wait

HEAD, ORIGIN, SWEPT, SCANNED, PLANNED, RELEASED, FIFO_HEAD, FIFO_SIZE, FREE, HELD, DISTINCT = range(11)
RING, RING_END = 11, 12
REGISTERS = 13 + 16  # then a gap of two cache lines, so that no line has two shards' registers
NONE = np.int32(-1)  # no known next use
MASK31 = (1 << 31) - 1
UNSEEN = 1 << 29  # a row that is not in the window has an entry at least as old as this
ROW_MASK = (1 << 40) - 1
USE_MASK = (1 << 22) - 1
AHEAD = 24
BLOCK = 128

U = np.uint64  # of every index: numba lets a signed one count from the end, which costs two instructions
jit: Any = nb.njit(nogil=True, cache=True, error_model="numpy", inline="never")


@jit
def shard_of(row, shards):
    """Shard of a row: a hash of its block of 8 rows, so that no cache line of `meta` has two owners."""
    x = np.uint64(row >> 3) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((x >> np.uint64(40)) * np.uint64(shards)) >> np.uint64(24))


@jit
def part(ring, regs):
    """A shard's part of the rings (or links) of all."""
    return ring[regs[RING] : regs[RING_END]]


@jit
def partition(rows, first, stop, shards, bounds, part_rows, part_index):
    """Sort the lookups [first, stop) of `rows int64 [L]` by shard, each shard's in their order.

    Their rows and numbers go to [first, stop) of `part_rows int64 [L]` and `part_index int32 [L]`; `bounds int64
    [shards + 1]` receives where each shard's begin, and where the last one's end.
    """
    shard = np.empty(stop - first, np.uint8)
    bounds[:] = 0
    for i in range(first, stop):
        s = shard_of(rows[U(i)], shards)
        shard[U(i - first)] = s
        bounds[U(s)] += 1
    at = first
    for s in range(shards):
        count = bounds[U(s)]
        bounds[U(s)] = at
        at += count
    for i in range(first, stop):
        s = shard[U(i - first)]
        at = bounds[U(s)]
        bounds[U(s)] = at + 1  # at last where the next shard's begin
        part_rows[U(at)] = rows[U(i)]
        part_index[U(at)] = i
    for s in range(shards, 0, -1):
        bounds[U(s)] = bounds[U(s - 1)]
    bounds[0] = first


@jit
def sweep(shard, shards, live, meta, regs):
    """Renumber entries of `shard`'s rows that are older than the `live` newest ones, before numbers repeat."""
    head = regs[HEAD]
    number = np.int32((head - UNSEEN) & MASK31)
    for block in range(0, meta.size // 2, 8):
        if shard_of(block, shards) != shard:
            continue
        for row in range(block, min(block + 8, meta.size // 2)):
            if ((head - meta[U(2 * row + 1)]) & MASK31) > live:
                meta[U(2 * row + 1)] = number
    regs[SWEPT] = head


@jit
def scan(shard, begin, rows, bounds, entry, meta, ring, link, slot_use, fifo, start, listed, regs):
    """Scan the shard's lookups of the next batch from `begin` on: number its distinct rows, link next uses.

    They are the sections [bounds[p, shard], bounds[p, shard + 1]) of `rows int64 [L]`, in order of p.
    `entry int32 [L]` receives each lookup's entry number, counted from the batch's first.  Returns where it
    stopped: `rows.size`, or earlier when the ring must grow first.
    """
    k = regs[SCANNED]
    size = ring.size - 1
    wmask = start.size - 1
    head = regs[HEAD]
    origin = regs[ORIGIN]
    first = head - regs[DISTINCT]
    tail = start[U(regs[RELEASED] & wmask)]
    # Entries from here on belong to batches that are not planned yet.
    unplanned = start[U(regs[PLANNED] & wmask)]
    released = regs[RELEASED]
    use = np.int64((k & USE_MASK) + 1) << 40
    pushed = listed[U(k & wmask)]
    row = np.empty(BLOCK, np.int64)
    before = np.empty(BLOCK, np.int64)
    place = np.empty(BLOCK, np.int64)
    slot = np.empty(BLOCK, np.int64)
    i = n = np.int64(0)
    for section in range(bounds.shape[0]):
        i = max(begin, bounds[section, shard])
        n = bounds[section, shard + 1]
        for a in range(i, min(i + 2 * AHEAD, n)):
            prefetch(meta, rows[U(a)] * 2)
        while i < n and head - tail + min(BLOCK, n - i) <= size:
            stop = min(i + BLOCK, n)
            known = head - first
            fresh = 0
            for a in range(i, stop):
                if a + 2 * AHEAD < n:
                    prefetch(meta, rows[U(a + 2 * AHEAD)] * 2)
                r = rows[U(a)]
                number = np.int64(meta[U(2 * r + 1)])
                e = (number - first) & MASK31
                new = e >= UNSEEN
                at = known + fresh
                entry[U(a)] = at if new else e
                meta[U(2 * r + 1)] = np.int32((first + at) & MASK31) if new else np.int32(number)
                row[U(fresh)] = r
                before[U(fresh)] = number
                fresh += new
            i = stop
            for f in range(fresh):
                old = head - ((head - before[U(f)]) & MASK31)
                linked = old >= unplanned
                p = old - origin
                p += size if p < 0 else 0
                place[U(f)] = p if linked else size
                s = np.int64(meta[U(2 * row[U(f)])])
                slot[U(f)] = 0 if linked else s
                prefetch(ring, place[U(f)])
                prefetch(slot_use, 2 * slot[U(f)])
            at = head - origin
            to = first + pushed - origin
            for f in range(fresh):
                if at == size:
                    at = 0
                    origin += size
                    to -= size
                ring[U(place[U(f)])] |= use
                s = slot[U(f)]
                following = slot_use[U(2 * s)]
                candidate = (s != 0) & (slot_use[U(2 * s + 1)] < released)
                slot_use[U(2 * s)] = k
                fifo[U(-2 - following if candidate else fifo.size - 1)] = 0
                p = to + (size if to < 0 else 0)
                link[U(p)] = s
                to += candidate
                pushed += candidate
                ring[U(at)] = row[U(f)]
                at += 1
            ring[U(size)] = 0
            head += fresh
        if i < n:
            break
    regs[HEAD] = head
    regs[ORIGIN] = origin
    regs[DISTINCT] = head - first
    listed[U(k & wmask)] = pushed
    if i < n:
        return i
    regs[DISTINCT] = 0
    regs[SCANNED] = k + 1
    start[U((k + 1) & wmask)] = head
    listed[U((k + 1) & wmask)] = 0
    return rows.size


@jit
def has_room(start, regs):
    """Whether one more batch can be scanned beside those that are scanned and not released, in every shard."""
    for s in range(regs.shape[0]):
        if regs[s, SCANNED] - regs[s, RELEASED] + 3 > start.shape[1] or regs[s, HEAD] - regs[s, SWEPT] >= UNSEEN:
            return False
    return True


@jit
def need_victims(meta, ring, start, regs):
    """Whether more rows of the next batch to plan are not cached than slots are free, in any shard."""
    wmask = start.shape[1] - 1
    for s in range(regs.shape[0]):
        own = part(ring, regs[s])
        size = own.size - 1
        j = regs[s, PLANNED]
        free = regs[s, FREE]
        begin = start[s, U(j & wmask)]
        end = start[s, U((j + 1) & wmask)]
        missing = 0
        for e in range(begin, end if end - begin > free else begin):
            p = e - regs[s, ORIGIN]
            missing += meta[U(2 * (own[U(p + (size if p < 0 else 0))] & ROW_MASK))] == 0
            if missing > free:
                return True
    return False


@jit
def scan_batch(
    worker, workers, claims, unsorted, rows, bounds, parts, index, at, entry,
    meta, ring, link, slot_use, fifo, start, listed, regs,
):  # fmt: skip
    """Let `rows int64 [L]` into the window, on all threads that call it with the same `claims`: `partition` in
    `unsorted` pieces (0: that is done already), then `scan` by shard.

    `at int64 [shards]` is where a shard stopped, -1 at the beginning.  Returns how many distinct rows there are (-1: a
    ring must grow first), how many in the shard that has most, and whether there is room for one more batch.
    """
    shards = at.size
    failed = np.int64(0), np.int64(0), True
    for turn in range(unsorted):
        p = claim(claims, 0, worker, workers, turn, unsorted)
        if p >= 0:
            first = rows.size * p // unsorted
            partition(rows, first, rows.size * (p + 1) // unsorted, shards, bounds[p], parts, index)
            finish(claims, 0)
    if not wait(claims, 0, unsorted):
        return failed
    for turn in range(shards):
        s = claim(claims, 1, worker, workers, turn, shards)
        if s >= 0:
            if at[s] < rows.size:
                at[s] = scan(
                    s, max(at[s], 0), parts, bounds, entry, meta, part(ring, regs[s]), part(link, regs[s]),
                    slot_use[s], fifo[s], start[s], listed[s], regs[s],
                )  # fmt: skip
            finish(claims, 1)
    if not wait(claims, 1, shards):
        return failed
    distinct = np.int64(0)
    most = np.int64(0)
    for s in range(shards):
        if at[s] < rows.size:
            return np.int64(-1), most, True
        k = regs[s, SCANNED]
        count = start[s, U(k & (start.shape[1] - 1))] - start[s, U((k - 1) & (start.shape[1] - 1))]
        distinct += count
        most = max(most, count)
    return distinct, most, has_room(start, regs)
