"""The planner's inner loops (numba, nogil): scan, release, plan, segments.  One shard each.

Time goes to cache misses and mispredicted branches, so: what is read together lies together, a row's
word is the only random access per lookup (all else is per distinct row or in order), lines are asked
for a block ahead, and rare against frequent is decided by selecting a harmless target (a dummy element
at the end, or slot 0) instead of by a branch.

State of one shard.  Slots are numbered from 1 here (0: none); an *entry* is a scanned (row, batch):

* `meta int32 [2N]`  per row of the group: slot, number of its newest entry (absolute, modulo 2^31).
* `ring int64 [E+1]`, `link int32 [E+1]`  per entry: row in the low 40 bits, above it 1 + next use (modulo
  2^22; 0 = none).  Entry `n` lives at `n - ORIGIN`, plus E if that is negative.  The links of batch k's
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

HEAD, ORIGIN, SWEPT, SCANNED, PLANNED, RELEASED, FIFO_HEAD, FIFO_SIZE, FREE, HELD, DISTINCT = range(11)
REGISTERS = 11 + 16  # then a gap of two cache lines, so that no line has two shards' registers
NONE = np.int32(-1)  # no known next use
MASK31 = (1 << 31) - 1
UNSEEN = 1 << 29  # a row that is not in the window has an entry at least as old as this
ROW_MASK = (1 << 40) - 1
USE_MASK = (1 << 22) - 1
AHEAD = 24
BLOCK = 128

U = np.uint64  # of every index: numba lets a signed one count from the end, which costs two instructions
_jit: Any = nb.njit(nogil=True, cache=True, error_model="numpy", inline="never")


@_jit
def shard_of(row, shards):
    """Shard of a row: a hash of its block of 8 rows, so that no cache line of `meta` has two owners."""
    x = np.uint64(row >> 3) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64(((x >> np.uint64(40)) * np.uint64(shards)) >> np.uint64(24))


@_jit
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


@_jit
def tables_of(rows, bases, table, counts):
    """Table of each group row (`bases int64 [T+1]`): into `table int32 [n]`, unless it is empty, and
    counted in `counts int64 [T]`.  Rows mostly come table after table, so the last one is tried first."""
    t = 0
    keep = table.size == rows.size
    for i in range(rows.size):
        r = rows[U(i)]
        if r < bases[t] or r >= bases[t + 1]:
            t = np.searchsorted(bases, r, side="right") - 1
        counts[t] += 1
        if keep:
            table[i] = t


@_jit
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


@_jit
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


@_jit
def has_room(start, regs):
    """Whether one more batch can be scanned beside those that are scanned and not released, in every shard."""
    for s in range(regs.shape[0]):
        if regs[s, SCANNED] - regs[s, RELEASED] + 3 > start.shape[1] or regs[s, HEAD] - regs[s, SWEPT] >= UNSEEN:
            return False
    return True


@_jit
def need_victims(meta, ring, start, regs):
    """Whether more rows of the next batch to plan are not cached than slots are free, in any shard."""
    size = ring.shape[1] - 1
    wmask = start.shape[1] - 1
    for s in range(regs.shape[0]):
        j = regs[s, PLANNED]
        free = regs[s, FREE]
        begin = start[s, U(j & wmask)]
        end = start[s, U((j + 1) & wmask)]
        missing = 0
        for e in range(begin, end if end - begin > free else begin):
            p = e - regs[s, ORIGIN]
            missing += meta[U(2 * (ring[s, U(p + (size if p < 0 else 0))] & ROW_MASK))] == 0
            if missing > free:
                return True
    return False


@_jit
def sections(batch, bounds, start, lookup_start, entry_start):
    """Where each shard's lookups (see `scan`) and entries of `batch` begin in a plan, and where the last ones end:
    `lookup_start`, `entry_start int64 [shards + 1]`."""
    wmask = start.shape[1] - 1
    lookup_start[0] = entry_start[0] = 0
    for s in range(start.shape[0]):
        lookups = np.int64(0)
        for section in range(bounds.shape[0]):
            lookups += bounds[section, s + 1] - bounds[section, s]
        lookup_start[s + 1] = lookup_start[s] + lookups
        entry_start[s + 1] = entry_start[s] + start[s, U((batch + 1) & wmask)] - start[s, U(batch & wmask)]


@_jit
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


@_jit
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


@_jit
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


@_jit
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


@_jit
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


@_jit
def segments(shard, bounds, entry, index, entry_slot, lookup_base, slots, seg_start, seg_lookup):
    """Counting sort of a shard's lookups (see `scan`) by entry; `slots[lookup]` for each of them.

    `index` are the lookups' numbers in the batch (empty: 0, 1, 2, …).  `seg_start` (where each entry's
    lookups start, counted from `lookup_base`) and `seg_lookup` are the shard's sections of the plan's.
    """
    u = entry_slot.size
    cursor = np.zeros(2 * u, np.int32)  # next place, slot
    for section in range(bounds.shape[0]):
        for i in range(bounds[section, shard], bounds[section, shard + 1]):
            cursor[U(2 * entry[U(i)])] += 1
    total = np.int64(0)
    for e in range(u):
        count = cursor[U(2 * e)]
        seg_start[U(e)] = lookup_base + total
        cursor[U(2 * e)] = total
        cursor[U(2 * e + 1)] = entry_slot[U(e)]
        total += count
    plain = index.size == 0
    for section in range(bounds.shape[0]):
        for i in range(bounds[section, shard], bounds[section, shard + 1]):
            e = entry[U(i)]
            at = cursor[U(2 * e)]
            cursor[U(2 * e)] = at + 1
            lookup = np.int64(i) if plain else np.int64(index[U(i)])
            seg_lookup[U(at)] = lookup
            slots[U(lookup)] = cursor[U(2 * e + 1)]


@_jit
def scan_shards(first, last, at, rows, bounds, entry, meta, ring, link, slot_use, fifo, start, listed, regs):
    """`scan` for the shards [first, last) that have not come to the end; `at int64 [shards]`: where they stopped, -1 at
    the beginning."""
    for s in range(first, last):
        if at[s] < rows.size:
            at[s] = scan(
                s, max(at[s], 0), rows, bounds, entry, meta, ring[s], link[s], slot_use[s], fifo[s], start[s],
                listed[s], regs[s],
            )  # fmt: skip


@_jit
def plan_shards(
    first, last, shards, depth, bounds, entry, index, lookup_start, entry_start,
    meta, ring, link, slot_row, slot_use, fifo, free, start, listed, regs,
    slots, entry_slot, entry_row, seg_start, seg_lookup, fill_rows, fill_slots, evict_rows, evict_slots, out,
):  # fmt: skip
    """Plan the part of the shards [first, last) in a batch, into their sections of the plan's arrays.

    For `lookup_start` and `entry_start` see `sections`; a shard's fills and evicts go to the beginning of its section
    of `fill_rows` etc., which are as long as `entry_row`.
    `out int64 [shards, 16]` receives how many those are, and the last batch to wait for.
    """
    for s in range(first, last):
        lo = entry_start[s]
        hi = entry_start[s + 1]
        missing = np.empty(hi - lo, np.int32)
        use_cached(
            depth, meta, ring[s], link[s], slot_row[s], slot_use[s], fifo[s], free[s], start[s], listed[s], regs[s],
            s, shards, entry_slot[lo:hi], entry_row[lo:hi], missing, out[s],
        )  # fmt: skip
        out[s, 2] = fill_missing(
            meta, ring[s], link[s], slot_row[s], slot_use[s], fifo[s], free[s], start[s], listed[s], regs[s], s, shards,
            missing[: out[s, 0]], entry_slot[lo:hi], fill_rows[lo:hi], fill_slots[lo:hi], evict_rows[lo:hi],
            evict_slots[lo:hi],
        )  # fmt: skip
        begin = lookup_start[s]
        segments(
            s, bounds, entry, index, entry_slot[lo:hi], begin, slots, seg_start[lo:hi],
            seg_lookup[begin : lookup_start[s + 1]],
        )  # fmt: skip


@_jit
def close_up(entry_start, counts, rows, slots):
    """Move the first `counts[s]` elements of every section s of `rows` and `slots` to the front; how many they are."""
    at = np.int64(0)
    for s in range(counts.size):
        begin = entry_start[s]
        for i in range(counts[s]):
            rows[U(at)] = rows[U(begin + i)]
            slots[U(at)] = slots[U(begin + i)]
            at += 1
    return at
