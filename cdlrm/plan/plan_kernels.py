"""The planner's inner loops, second half: from the window to the plan of its oldest batch; see `kernels.py`."""

from __future__ import annotations

import numpy as np

from ..driver.intrinsics import prefetch_read as prefetch
from .claims import claim, finish, wait
from .kernels import (
    AHEAD,
    FIFO_HEAD,
    FIFO_SIZE,
    FREE,
    HELD,
    NONE,
    ORIGIN,
    PLANNED,
    RELEASED,
    ROW_MASK,
    SCANNED,
    USE_MASK,
    U,
    jit,
    part,
)  # fmt: skip


@jit
def compact_fifo(regs, slot_use, fifo):
    """Close the gaps in the FIFO, in place; the order of the others stays."""
    size = fifo.size - 1
    read = write = regs[FIFO_HEAD]
    kept = 0
    for _ in range(regs[FIFO_SIZE]):
        s = fifo[U(read)]
        read = read + 1 if read + 1 < size else 0
        if s != 0:
            fifo[U(write)] = s
            slot_use[U(2 * s)] = -2 - write
            write = write + 1 if write + 1 < size else 0
            kept += 1
    regs[FIFO_SIZE] = kept


@jit
def release(batch, ring, link, slot_use, fifo, start, listed, regs):
    """End the hold of `batch`: its rows that were not used since may be victims from now on."""
    size = ring.size - 1
    wmask = start.size - 1
    fsize = fifo.size - 1
    origin = regs[ORIGIN]
    lo = start[U(batch & wmask)]
    hi = start[U((batch + 1) & wmask)]
    p = lo - origin
    p += size if p < 0 else 0
    q = p
    for _ in range(min(AHEAD, hi - lo)):
        prefetch(slot_use, np.int64(link[U(q)]) * 2)
        q = q + 1 if q + 1 < size else 0
    held = regs[HELD]
    waiting = regs[FIFO_SIZE]
    t = regs[FIFO_HEAD] + waiting
    t -= fsize if t >= fsize else 0
    for _ in range(lo, hi):
        if waiting == fsize:
            regs[FIFO_SIZE] = waiting
            compact_fifo(regs, slot_use, fifo)
            waiting = regs[FIFO_SIZE]
            t = regs[FIFO_HEAD] + waiting
            t -= fsize if t >= fsize else 0
        prefetch(slot_use, np.int64(link[U(q)]) * 2)  # beyond the batch: any slot
        q = q + 1 if q + 1 < size else 0
        s = link[U(p)]
        p = p + 1 if p + 1 < size else 0
        k = np.int64(slot_use[U(2 * s)])
        free = slot_use[U(2 * s + 1)] == batch
        unknown = free & (k < 0)
        listing = free & (k >= 0)
        held -= free
        fifo[U(t if unknown else fsize)] = s
        slot_use[U(2 * s)] = -2 - t if unknown else k
        waiting += unknown
        t += unknown
        t = 0 if t == fsize else t
        w = k & wmask
        at = start[U(w)] + listed[U(w)] - origin
        at += size if at < 0 else 0
        link[U(at if listing else size)] = s
        listed[U(w)] += listing
    regs[HELD] = held
    regs[FIFO_SIZE] = waiting
    regs[RELEASED] = batch + 1


@jit
def pick_victims(fills, taken, fill_slots, link, fifo, start, listed, regs):
    """Slots to give away, into `fill_slots[taken: fills]`: those without a known use first, oldest use first,
    then those with the furthest next use.  There are enough while no more rows are held than there are slots."""
    fsize = fifo.size - 1
    h = regs[FIFO_HEAD]
    waiting = regs[FIFO_SIZE]
    n = taken
    while n < fills and waiting > 0:
        s = fifo[U(h)]
        fill_slots[U(n)] = s
        n += s != 0
        h = h + 1 if h + 1 < fsize else 0
        waiting -= 1
    regs[FIFO_HEAD] = h
    regs[FIFO_SIZE] = waiting
    size = link.size - 1
    k = regs[SCANNED] - 1
    while n < fills and k > regs[PLANNED]:
        w = k & (start.size - 1)
        while n < fills and listed[U(w)] > 0:
            listed[U(w)] -= 1
            p = start[U(w)] + listed[U(w)] - regs[ORIGIN]
            fill_slots[U(n)] = link[U(p + (size if p < 0 else 0))]
            n += 1
        k -= n < fills


@jit
def use_cached(
    depth, meta, ring, link, slot_row, slot_use, fifo, free, start, listed, regs,
    shard, shards, entry_slot, entry_row, missing, out,
):  # fmt: skip
    """First half of planning a batch: end holds, take the rows that are cached, list those that are not.

    Writes per entry its row and slot (numbered over all shards, from 0: `(local - 1) * shards + shard`) and
    the entries that are `missing int32`; `out int64 [2]` = how many those are, and how many evicts they need.
    The shard must have at least as many slots as the batch has distinct rows.
    """
    j = regs[PLANNED]
    size = ring.size - 1
    wmask = start.size - 1
    while regs[RELEASED] < j - depth:
        release(regs[RELEASED], ring, link, slot_use, fifo, start, listed, regs)
    listed[U(j & wmask)] = 0  # every slot listed for j is used now; the links become entry slots
    lo = start[U(j & wmask)]
    n = start[U((j + 1) & wmask)] - lo
    base = lo - regs[ORIGIN]
    released = regs[RELEASED]
    held = regs[HELD]
    slot_use[1] = j  # slot 0 is never held
    fills = 0
    for e in range(n):
        if e + 2 * AHEAD < n:
            p = base + e + 2 * AHEAD
            prefetch(meta, (ring[U(p + (size if p < 0 else 0))] & ROW_MASK) * 2)
        if e + AHEAD < n:
            p = base + e + AHEAD
            prefetch(slot_use, 2 * np.int64(meta[U(2 * (ring[U(p + (size if p < 0 else 0))] & ROW_MASK))]))
        p = base + e
        p += size if p < 0 else 0
        r = ring[U(p)] & ROW_MASK
        use = ring[U(p)] >> 40
        s = np.int64(meta[U(2 * r)])
        slot_use[U(2 * s)] = j + ((use - 1 - j) & USE_MASK) if use > 0 else np.int64(NONE)
        held += slot_use[U(2 * s + 1)] < released
        slot_use[U(2 * s + 1)] = j
        link[U(p)] = s
        entry_row[U(e)] = r
        entry_slot[U(e)] = (s - 1) * shards + shard
        missing[U(fills)] = e
        fills += s == 0
    regs[HELD] = held + fills
    while regs[HELD] > slot_row.size - 1:  # the hold of batches j-depth.. is too long for this cache: shorten it
        release(regs[RELEASED], ring, link, slot_use, fifo, start, listed, regs)
    out[0] = fills
    out[1] = max(fills - regs[FREE], 0)


@jit
def fill_missing(
    meta, ring, link, slot_row, slot_use, fifo, free, start, listed, regs,
    shard, shards, missing, entry_slot, fill_rows, fill_slots, evict_rows, evict_slots,
):  # fmt: skip
    """Second half: a slot for each row that is missing.  Returns the last batch to wait for.

    `free int32` holds `regs[FREE]` empty slots, last one first.  Writes the fills and the evicts.
    """
    j = regs[PLANNED]
    size = ring.size - 1
    base = start[U(j & (start.size - 1))] - regs[ORIGIN]
    fills = missing.size
    taken = min(fills, regs[FREE])  # fills that go to empty slots; the others need a victim each
    for f in range(taken):
        fill_slots[U(f)] = free[U(regs[FREE] - 1 - f)]
    regs[FREE] -= taken
    pick_victims(fills, taken, fill_slots, link, fifo, start, listed, regs)
    wait = np.int64(-1)
    for f in range(fills):
        if f + AHEAD < fills:
            prefetch(slot_row, np.int64(fill_slots[U(f + AHEAD)]))
            prefetch(slot_use, 2 * np.int64(fill_slots[U(f + AHEAD)]))
        if f + AHEAD // 2 < fills:
            prefetch(meta, max(slot_row[U(fill_slots[U(f + AHEAD // 2)])], 0) * 2)
        s = np.int64(fill_slots[U(f)])
        if f >= taken:
            evict_rows[U(f - taken)] = slot_row[U(s)]
            evict_slots[U(f - taken)] = (s - 1) * shards + shard
            meta[U(2 * slot_row[U(s)])] = 0
            wait = max(wait, np.int64(slot_use[U(2 * s + 1)]))
        e = np.int64(missing[U(f)])
        p = base + e
        p += size if p < 0 else 0
        r = ring[U(p)] & ROW_MASK
        use = ring[U(p)] >> 40
        meta[U(2 * r)] = s
        slot_row[U(s)] = r
        slot_use[U(2 * s)] = j + ((use - 1 - j) & USE_MASK) if use > 0 else np.int64(NONE)
        slot_use[U(2 * s + 1)] = j
        link[U(p)] = s
        entry_slot[U(e)] = (s - 1) * shards + shard
        fill_rows[U(f)] = r
        fill_slots[U(f)] = (s - 1) * shards + shard
    regs[PLANNED] = j + 1
    return wait


@jit
def segments(shard, bounds, entry, index, begin, seg_start, seg_lookup):
    """Counting sort of a shard's lookups (see `scan`) by entry.

    `index` are the lookups' numbers in the batch (empty: 0, 1, 2, …).  They go to `seg_lookup` from `begin` on;
    `seg_start` (where each entry's begin) is the shard's section.
    """
    seg_start[:] = 0
    for section in range(bounds.shape[0]):
        for i in range(bounds[section, shard], bounds[section, shard + 1]):
            seg_start[U(entry[U(i)])] += 1
    at = begin
    for e in range(seg_start.size):
        count = seg_start[U(e)]
        seg_start[U(e)] = at
        at += count
    plain = index.size == 0
    for section in range(bounds.shape[0]):
        for i in range(bounds[section, shard], bounds[section, shard + 1]):
            e = entry[U(i)]
            at = seg_start[U(e)]
            seg_start[U(e)] = at + 1  # at last where the next entry's begin
            seg_lookup[U(at)] = i if plain else np.int64(index[U(i)])
    for e in range(seg_start.size - 1, 0, -1):
        seg_start[U(e)] = seg_start[U(e - 1)]
    seg_start[:1] = begin


@jit
def put_slots(bounds, entry, index, entry_start, entry_slot, slots):
    """The slot of each lookup of a piece, which begin at `bounds int64 [shards + 1]`.

    By piece, since threads that write here and there in the same cache lines would wait for each other.
    """
    plain = index.size == 0
    for s in range(entry_start.size - 1):
        base = entry_start[s]
        for i in range(bounds[s], bounds[s + 1]):
            slots[U(i if plain else np.int64(index[U(i)]))] = entry_slot[U(base + entry[U(i)])]


@jit
def plan_sections(batch, bounds, start):
    """Where each shard's lookups (see `scan`) and entries of `batch` begin in a plan, and where the last ones end:
    int64 [shards + 1] each."""
    shards = start.shape[0]
    wmask = start.shape[1] - 1
    lookup_start = np.zeros(shards + 1, np.int64)
    entry_start = np.zeros(shards + 1, np.int64)
    for s in range(shards):
        lookups = np.int64(0)
        for section in range(bounds.shape[0]):
            lookups += bounds[section, s + 1] - bounds[section, s]
        lookup_start[s + 1] = lookup_start[s] + lookups
        entry_start[s + 1] = entry_start[s] + start[s, U((batch + 1) & wmask)] - start[s, U(batch & wmask)]
    return lookup_start, entry_start


@jit
def plan_batch(
    worker, workers, claims, batch, depth, bounds, entry, index,
    meta, ring, link, slot_row, slot_use, fifo, free, start, listed, regs,
    slots, entry_slot, entry_row, seg_start, seg_lookup, fill_rows, fill_slots, evict_rows, evict_slots, out,
):  # fmt: skip
    """Plan the oldest scanned batch, on all threads that call it with the same `claims`, into the plan's arrays.

    By shard: `use_cached`; when it is known where each one's fills and evicts begin, `fill_missing` and `segments`; and
    by piece `put_slots`.  `fill_rows` etc. are as long as `entry_row`.  Which entries are missing lies meanwhile in the
    shard's section of `seg_lookup`, which is not needed before and has at least as many places.
    `out int64 [shards, 16]` (a cache line each, and a gap) receives the fills and evicts of each shard, and the last
    batch it has to wait for.  Returns the sums of those, and the latest.
    """
    shards = out.shape[0]
    lookup_start, entry_start = plan_sections(batch, bounds, start)
    for turn in range(shards):
        s = claim(claims, 0, worker, workers, turn, shards)
        if s >= 0:
            lo = entry_start[s]
            hi = entry_start[s + 1]
            use_cached(
                depth, meta, part(ring, regs[s]), part(link, regs[s]), slot_row[s], slot_use[s], fifo[s], free[s],
                start[s], listed[s], regs[s], s, shards, entry_slot[lo:hi], entry_row[lo:hi],
                seg_lookup[lookup_start[s] :], out[s],
            )  # fmt: skip
            finish(claims, 0)
    if not wait(claims, 0, shards):
        return np.int64(0), np.int64(0), np.int64(0)
    for turn in range(shards):
        s = claim(claims, 1, worker, workers, turn, shards)
        if s >= 0:
            lo = entry_start[s]
            hi = entry_start[s + 1]
            begin = lookup_start[s]
            fills = out[:s, 0].sum()
            evicts = out[:s, 1].sum()
            out[s, 2] = fill_missing(
                meta, part(ring, regs[s]), part(link, regs[s]), slot_row[s], slot_use[s], fifo[s], free[s], start[s],
                listed[s], regs[s], s, shards, seg_lookup[begin : begin + out[s, 0]], entry_slot[lo:hi],
                fill_rows[fills:], fill_slots[fills:], evict_rows[evicts:], evict_slots[evicts:],
            )  # fmt: skip
            segments(s, bounds, entry, index, begin, seg_start[lo:hi], seg_lookup)
            finish(claims, 1)
    if not wait(claims, 1, shards):
        return np.int64(0), np.int64(0), np.int64(0)
    pieces = bounds.shape[0]
    for turn in range(pieces):
        p = claim(claims, 2, worker, workers, turn, pieces)
        if p >= 0:
            put_slots(bounds[p], entry, index, entry_start, entry_slot, slots)
            finish(claims, 2)
    wait(claims, 2, pieces)
    return out[:, 0].sum(), out[:, 1].sum(), out[:, 2].max()
