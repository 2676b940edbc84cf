"""The planner's inner loops (numba, nogil): scan, release, plan, segments.  One shard each.

State of one shard, all in flat arrays so that what is read together lies together:

* `meta  int32 [N, 2]`  per row of the group: slot + 1 (0 = not cached), number of its newest entry.
* `ring  int64 [E, 2]`  per scanned (row, batch): row; next use (int32) and a link word (int32), seen
  through the view `ring32 int32 [E, 4]` as columns 2 and 3.  E is a power of two; an entry number is
  absolute modulo 2^31 and lives at `number & (E - 1)`.  The link words of batch k's entries first hold
  the *list* of slots whose next use is k (a stack), then, once k is planned, the slot of each entry.
* `slot  int64 [S, 2]`  per slot: row (-1 = empty); next use and last use, through `slot32 int32 [S, 4]`
  as columns 2 and 3.
* `fifo  int32 [F, 2]`  slots without a known use, in order of last use: slot, last use (its stamp).
* `start int64 [W]`, `listed int64 [W]`  per batch (number & (W - 1)): first entry, stack height.
* `regs  int64 [9]`     the scalars named below.

An entry is valid for a row when `ring[e].row` is that row: a row has one newest entry, and whoever
overwrites a ring place writes another row there (or the same row, and then the number moved too).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from ..driver.intrinsics import prefetch_read as prefetch

HEAD, SCANNED, PLANNED, RELEASED, FIFO_HEAD, FIFO_TAIL, FREE, FAR, HELD = range(9)
NONE = np.int32(-1)  # no known next use
MASK31 = (1 << 31) - 1
AHEAD = 24

_jit = nb.njit(nogil=True, cache=True, error_model="numpy", inline="never")


@_jit
def shard_of(row, shards):
    """Shard of a row: a hash of its block of 8 rows, so that no cache line of `meta` has two owners."""
    x = np.uint64(row >> 3) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((x >> np.uint64(40)) * np.uint64(shards)) >> np.uint64(24))


@_jit
def partition(rows, shards, shard_start, part_rows, part_index, scratch):
    """Split lookups by shard, keeping their order: `part_rows`, `part_index` per shard section."""
    for s in range(shards + 1):
        shard_start[s] = 0
    for i in range(rows.size):
        s = shard_of(rows[i], shards)
        scratch[i] = s
        shard_start[s + 1] += 1
    for s in range(shards):
        shard_start[s + 1] += shard_start[s]
    cursor = shard_start[:shards].copy()
    for i in range(rows.size):
        s = scratch[i]
        at = cursor[s]
        cursor[s] = at + 1
        part_rows[at] = rows[i]
        part_index[at] = i


@_jit
def push(slot, batch, ring32, start, listed):
    """Put `slot` on the stack of slots whose next use is `batch` (scanned, not yet planned)."""
    w = batch & (start.size - 1)
    ring32[(start[w] + listed[w]) & (ring32.shape[0] - 1), 3] = slot
    listed[w] += 1


@_jit
def compact_fifo(regs, slot32, fifo):
    """Drop the stale elements of the FIFO, in place; the order of the others stays."""
    mask = fifo.shape[0] - 1
    write = regs[FIFO_HEAD]
    for read in range(regs[FIFO_HEAD], regs[FIFO_TAIL]):
        s = fifo[read & mask, 0]
        stamp = fifo[read & mask, 1]
        if slot32[s, 3] == stamp and slot32[s, 2] == NONE:
            fifo[write & mask, 0] = s
            fifo[write & mask, 1] = stamp
            write += 1
    regs[FIFO_TAIL] = write


@_jit
def enqueue(s, regs, slot32, fifo):
    """Append slot `s`, which has no known use, to the FIFO (capacity at least twice the slots)."""
    if regs[FIFO_TAIL] - regs[FIFO_HEAD] == fifo.shape[0]:
        compact_fifo(regs, slot32, fifo)
    at = regs[FIFO_TAIL] & (fifo.shape[0] - 1)
    fifo[at, 0] = s
    fifo[at, 1] = slot32[s, 3]
    regs[FIFO_TAIL] += 1


@_jit
def tables_of(rows, bases, table, counts):
    """Table of each group row (`bases int64 [T+1]`): into `table int32 [n]`, unless it is empty, and
    counted in `counts int64 [T]`.  Rows mostly come table after table, so the last one is tried first."""
    t = 0
    keep = table.size == rows.size
    for i in range(rows.size):
        r = rows[i]
        if r < bases[t] or r >= bases[t + 1]:
            t = np.searchsorted(bases, r, side="right") - 1
        counts[t] += 1
        if keep:
            table[i] = t


@_jit
def scan(rows, entry, meta, ring, ring32, slot32, start, listed, regs):
    """Scan the next batch: number its distinct rows, link next uses.  Returns the distinct rows.

    `entry int32 [L]` receives each lookup's entry number, counted from the batch's first.
    The ring must have room for L more entries.
    """
    k = regs[SCANNED]
    emask = ring.shape[0] - 1
    wmask = start.size - 1
    first = regs[HEAD]
    head = first
    # Entries from here on belong to batches that are not planned yet.
    unplanned = start[regs[PLANNED] & wmask] if regs[PLANNED] < k else first
    released = regs[RELEASED]
    start[k & wmask] = first
    listed[k & wmask] = 0
    n = rows.size
    for i in range(n):
        if i + 2 * AHEAD < n:
            prefetch(meta, rows[i + 2 * AHEAD] * 2)
        if i + AHEAD < n:
            prefetch(ring, np.int64(meta[rows[i + AHEAD], 1] & emask) * 2)
        r = rows[i]
        number = meta[r, 1]
        at = number & emask
        age = (head - number) & MASK31
        known = ring[at, 0] == r
        if known and age <= head - first:
            entry[i] = head - age - first
            continue
        entry[i] = head - first
        if known and age <= head - unplanned:
            ring32[at, 2] = k
        else:
            s = meta[r, 0] - 1
            if s >= 0:
                slot32[s, 2] = k
                if slot32[s, 3] < released:
                    push(s, k, ring32, start, listed)
        at = head & emask
        ring[at, 0] = r
        ring32[at, 2] = NONE
        meta[r, 1] = head & MASK31
        head += 1
    regs[HEAD] = head
    regs[SCANNED] = k + 1
    start[(k + 1) & wmask] = head
    return head - first


@_jit
def count_missing(meta, ring, start, regs):
    """Distinct rows of the next batch to plan that are not cached."""
    emask = ring.shape[0] - 1
    wmask = start.size - 1
    j = regs[PLANNED]
    missing = 0
    for e in range(start[j & wmask], start[(j + 1) & wmask]):
        missing += meta[ring[e & emask, 0], 0] == 0
    return missing


@_jit
def release(batch, ring32, slot32, fifo, start, listed, regs):
    """End the hold of `batch`: its rows that were not used since may be victims from now on."""
    emask = ring32.shape[0] - 1
    wmask = start.size - 1
    lo = start[batch & wmask]
    hi = start[(batch + 1) & wmask]
    for e in range(lo, hi):
        if e + AHEAD < hi:
            prefetch(slot32, np.int64(ring32[(e + AHEAD) & emask, 3]) * 4)
        s = ring32[e & emask, 3]
        if slot32[s, 3] == batch:
            regs[HELD] -= 1
            k = slot32[s, 2]
            if k == NONE:
                enqueue(s, regs, slot32, fifo)
            else:
                push(s, k, ring32, start, listed)
    regs[RELEASED] = batch + 1


@_jit
def pop_victim(j, ring32, slot32, fifo, start, listed, regs):
    """The slot to give away for batch `j`: no known use first (oldest use first), then the furthest
    next use; -1 when only held rows are left (never, while no more rows are held than there are slots)."""
    fmask = fifo.shape[0] - 1
    while regs[FIFO_HEAD] < regs[FIFO_TAIL]:
        at = regs[FIFO_HEAD] & fmask
        prefetch(slot32, np.int64(fifo[(regs[FIFO_HEAD] + AHEAD) & fmask, 0]) * 4)
        regs[FIFO_HEAD] += 1
        s = fifo[at, 0]
        if slot32[s, 3] == fifo[at, 1] and slot32[s, 2] == NONE:
            return s
    wmask = start.size - 1
    emask = ring32.shape[0] - 1
    k = regs[FAR]
    while k > j:
        w = k & wmask
        if listed[w] > 0:
            listed[w] -= 1
            regs[FAR] = k
            return ring32[(start[w] + listed[w]) & emask, 3]
        k -= 1
    regs[FAR] = k
    return np.int32(-1)


@_jit
def plan(
    depth, meta, ring, ring32, slot, slot32, fifo, free, start, listed, regs,
    shard, shards, entry_slot, entry_row, fill_rows, fill_slots, evict_rows, evict_slots, out,
):  # fmt: skip
    """Plan the next scanned batch.  `free int32` holds `regs[FREE]` empty slots, last one first.

    Writes per entry its slot and row, the fills and the evicts (slots numbered over all shards:
    `local * shards + shard`); `out int64 [3]` = fills, evicts, last batch to wait for.
    The shard must have at least as many slots as the batch has distinct rows.
    """
    j = regs[PLANNED]
    emask = ring.shape[0] - 1
    wmask = start.size - 1
    lo = start[j & wmask]
    hi = start[(j + 1) & wmask]
    while regs[RELEASED] < j - depth:
        release(regs[RELEASED], ring32, slot32, fifo, start, listed, regs)
    listed[j & wmask] = 0  # every slot listed for j is used now; the link words become entry slots
    fills = 0
    for e in range(lo, hi):
        if e + 2 * AHEAD < hi:
            prefetch(meta, ring[(e + 2 * AHEAD) & emask, 0] * 2)
        if e + AHEAD < hi:
            ahead = meta[ring[(e + AHEAD) & emask, 0], 0] - 1
            if ahead >= 0:
                prefetch(slot32, np.int64(ahead) * 4)
        at = e & emask
        r = ring[at, 0]
        s = meta[r, 0] - 1
        entry_row[e - lo] = r
        if s >= 0:
            slot32[s, 2] = ring32[at, 2]
            regs[HELD] += slot32[s, 3] < regs[RELEASED]
            slot32[s, 3] = j
            ring32[at, 3] = s
            entry_slot[e - lo] = s * shards + shard
        else:
            fill_rows[fills] = e  # replaced by the row below
            fills += 1
    regs[HELD] += fills
    while regs[HELD] > slot.shape[0]:  # the hold of batches j-depth.. is too long for this cache: shorten it
        release(regs[RELEASED], ring32, slot32, fifo, start, listed, regs)
    regs[FAR] = regs[SCANNED] - 1
    taken = min(fills, regs[FREE])  # fills that go to empty slots; the others need a victim each
    for f in range(fills):
        if f < taken:
            regs[FREE] -= 1
            fill_slots[f] = free[regs[FREE]]
        else:
            fill_slots[f] = pop_victim(j, ring32, slot32, fifo, start, listed, regs)
    wait = np.int64(-1)
    for f in range(fills):
        if f + AHEAD < fills:
            prefetch(slot, np.int64(fill_slots[f + AHEAD]) * 2)
        if f + AHEAD // 2 < fills:
            prefetch(meta, max(slot[fill_slots[f + AHEAD // 2], 0], 0) * 2)
        s = fill_slots[f]
        if f >= taken:
            evict_rows[f - taken] = slot[s, 0]
            evict_slots[f - taken] = s * shards + shard
            meta[slot[s, 0], 0] = 0
            wait = max(wait, np.int64(slot32[s, 3]))
        e = fill_rows[f]
        at = e & emask
        r = ring[at, 0]
        meta[r, 0] = s + 1
        slot[s, 0] = r
        slot32[s, 2] = ring32[at, 2]
        slot32[s, 3] = j
        ring32[at, 3] = s
        entry_slot[e - lo] = s * shards + shard
        fill_rows[f] = r
        fill_slots[f] = s * shards + shard
    regs[PLANNED] = j + 1
    out[0] = fills
    out[1] = fills - taken
    out[2] = wait


@_jit
def segments(entry, index, entry_slot, lookup_base, slots, seg_start, seg_lookup):
    """Counting sort of a shard's lookups by entry; `slots[lookup]` for each of them.

    `index` are the lookups' numbers in the batch (empty: 0, 1, 2, …).  `seg_start` (one more than
    entries, counted from `lookup_base`) and `seg_lookup` are the shard's sections of the plan's.
    """
    n = entry.size
    u = entry_slot.size
    for e in range(u + 1):
        seg_start[e] = 0
    for i in range(n):
        seg_start[entry[i] + 1] += 1
    total = np.int64(0)
    for e in range(1, u + 1):  # seg_start[e] becomes where entry e-1 starts: a cursor for it
        count = seg_start[e]
        seg_start[e] = total
        total += count
    plain = index.size == 0
    for i in range(n):
        e = entry[i]
        at = seg_start[e + 1]
        seg_start[e + 1] = at + 1
        lookup = np.int64(i) if plain else np.int64(index[i])
        seg_lookup[at] = lookup
        slots[lookup] = entry_slot[e]
    for e in range(u + 1):
        seg_start[e] += lookup_base
