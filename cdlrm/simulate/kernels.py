"""Inner loops of the simulation (numba, nogil).

`first_uses` finds a batch's distinct rows, `link` their next uses, `look_ahead` is the planner's rule for
one cache (or one shard of it), and `stack_distances` is LRU for all cache sizes at once.

Batches and rows are int32 numbers; `NONE` = not known.  Entries (distinct rows of a batch, in order of their
first lookup) of several batches lie one after another; those of batch b are `lo[b - first_batch] ..
hi[b - first_batch]`.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from ..driver.intrinsics import prefetch_read as prefetch

NONE = np.int32(-1)
AHEAD = 24
RELEASED, HEAD, TAIL, FREE, HELD, SLOTS, FILLS, HITS, PEAK = range(9)

_jit = nb.njit(nogil=True, cache=True, error_model="numpy", inline="never")


@_jit
def first_uses(rows, batch, meta, known, row_of, entry_row, entry_before):
    """Distinct rows of a batch.  Returns how many, and how many rows are known then.

    `meta int32 [N, 2]` per table row: its number + 1 (0: never used), newest batch + 1.  `known` rows have a
    number; `row_of int64` gets the table row of each new one.  `entry_row int32`, `entry_before int32`: number
    and previous batch of each distinct row.
    """
    stamp = np.int32(batch + 1)
    n = rows.size
    u = 0
    for i in range(n):
        if i + AHEAD < n:
            prefetch(meta, rows[i + AHEAD] * 2)
        r = rows[i]
        before = meta[r, 1]
        if before == stamp:
            continue
        meta[r, 1] = stamp
        if meta[r, 0] == 0:
            row_of[known] = r
            known += 1
            meta[r, 0] = known
        entry_row[u] = meta[r, 0] - 1
        entry_before[u] = before - 1
        u += 1
    return u, known


@_jit
def link(first_batch, now, start, entry_row, entry_next, first):
    """Next use of every entry, in one backward pass.

    `start int64 [B + 1]`: entries of batch `first_batch + b`.  `first int32 [rows]`: in the end the first use of a
    row in batch `now` or later (anything below `now`: none that is known).
    """
    for b in range(start.size - 2, -1, -1):
        batch = np.int32(first_batch + b)
        lo = start[b]
        for e in range(start[b + 1] - 1, lo - 1, -1):
            if e - AHEAD >= lo:
                prefetch(first, np.int64(entry_row[e - AHEAD]))
            r = entry_row[e]
            following = first[r]
            entry_next[e] = following if following > batch else NONE
            if batch >= now:
                first[r] = batch


@_jit
def split(shards, start, entry_row, entry_next, shard, out_row, out_next, lo, hi):
    """Order each batch's entries by shard, stable.  `shard uint8 [rows]`; `lo, hi int64 [shards, B]`."""
    cursor = np.empty(shards, np.int64)
    for b in range(start.size - 1):
        cursor[:] = 0
        for e in range(start[b], start[b + 1]):
            cursor[shard[entry_row[e]]] += 1
        at = start[b]
        for s in range(shards):
            lo[s, b] = at
            at += cursor[s]
            hi[s, b] = at
            cursor[s] = lo[s, b]
        for e in range(start[b], start[b + 1]):
            s = shard[entry_row[e]]
            out_row[cursor[s]] = entry_row[e]
            out_next[cursor[s]] = entry_next[e]
            cursor[s] += 1


@_jit
def _compact(regs, state, fifo):
    """Drop elements of rows that were used again or evicted, in place."""
    mask = fifo.shape[0] - 1
    write = regs[HEAD]
    for read in range(regs[HEAD], regs[TAIL]):
        row, stamp = fifo[read & mask, 0], fifo[read & mask, 1]
        if state[row, 0] == stamp:
            fifo[write & mask, 0] = row
            fifo[write & mask, 1] = stamp
            fifo[write & mask, 2] = fifo[read & mask, 2]
            write += 1
    regs[TAIL] = write


@_jit
def _release(far, lo, hi, first_batch, row, following, state, fifo, bucket, regs):
    """End the hold of the oldest batch that is held: its rows that were not used since may be victims."""
    batch = regs[RELEASED]
    stamp = np.int32(batch + 1)
    last = hi[batch - first_batch]
    for e in range(lo[batch - first_batch], last):
        if e + AHEAD < last:
            prefetch(state, np.int64(row[e + AHEAD]) * 2)
        r = row[e]
        if state[r, 0] != stamp:
            continue
        regs[HELD] -= 1
        n = following[e]
        if n != NONE and n <= far:
            state[r, 1] = bucket[n & (bucket.size - 1)]
            bucket[n & (bucket.size - 1)] = r
            continue
        if regs[TAIL] - regs[HEAD] == fifo.shape[0]:
            _compact(regs, state, fifo)
        at = regs[TAIL] & (fifo.shape[0] - 1)
        fifo[at, 0] = r
        fifo[at, 1] = stamp
        fifo[at, 2] = n
        regs[TAIL] += 1
    regs[RELEASED] = batch + 1


@_jit
def _pop_unknown(far, first, state, fifo, bucket, regs):
    """The row longest unused of those without a known use; rows whose next use has come into the window since go
    to its list on the way.  NONE when there is none."""
    mask = fifo.shape[0] - 1
    while regs[HEAD] < regs[TAIL]:
        at = regs[HEAD] & mask
        prefetch(state, np.int64(fifo[(at + AHEAD) & mask, 0]) * 2)
        regs[HEAD] += 1
        r = fifo[at, 0]
        stamp = fifo[at, 1]
        if state[r, 0] != stamp:
            continue
        n = fifo[at, 2]
        if n == NONE and first[r] >= stamp:  # stamp = last use + 1
            n = first[r]
        if n == NONE or n > far:
            return r
        state[r, 1] = bucket[n & (bucket.size - 1)]
        bucket[n & (bucket.size - 1)] = r
    return NONE


@_jit
def look_ahead(
    begin, end, first_batch, lo, hi, row, following, first, far_seen, depth, slots, state, fifo, bucket, regs, table,
    fills_by_table,
):  # fmt: skip
    """Batches `begin .. end - 1` through one cache whose window shows batches up to `far_seen int64 [B]` of each.

    The planner's rule (`cdlrm.plan.kernels`): fills take free slots, then victims without a known use, oldest use
    first, then those of the furthest next use; rows of the `depth` batches before are held.  The window is not
    scanned: a row's next use is looked at when the row is released, or when it is about to become a victim.

    `state int32 [rows, 2]`: last use + 1 (0: not cached), link of the list it is in.  `fifo int32 [F, 3]`: row, stamp
    (last use + 1), next use.  `bucket int32 [W]`: per next-use batch the list of its rows.  `slots int64 [B]`: of the
    cache at each batch.  `far_seen` never falls, and is less than the buckets from its batch.
    """
    wmask = bucket.size - 1
    for j in range(begin, end):
        b = j - first_batch
        far = far_seen[b]
        regs[FREE] += slots[b] - regs[SLOTS]
        regs[SLOTS] = slots[b]
        while regs[RELEASED] < j - depth:
            _release(far, lo, hi, first_batch, row, following, state, fifo, bucket, regs)
        bucket[j & wmask] = NONE  # all of them are used now
        stamp = np.int32(j + 1)
        oldest = regs[RELEASED]
        fills = 0
        for e in range(lo[b], hi[b]):
            if e + AHEAD < hi[b]:
                prefetch(state, np.int64(row[e + AHEAD]) * 2)
            r = row[e]
            used = state[r, 0]
            if used == 0:
                fills += 1
                fills_by_table[table[r]] += 1
                regs[HELD] += 1
            elif used <= oldest:
                regs[HELD] += 1
            state[r, 0] = stamp
        while regs[HELD] > slots[b]:  # the hold is too long for this cache: shorten it
            _release(far, lo, hi, first_batch, row, following, state, fifo, bucket, regs)
        victims = fills - min(fills, regs[FREE])
        regs[FREE] -= fills - victims
        k = far
        for _ in range(victims):
            r = _pop_unknown(far, first, state, fifo, bucket, regs)
            if r == NONE:
                while bucket[k & wmask] == NONE:
                    k -= 1
                r = bucket[k & wmask]
                bucket[k & wmask] = state[r, 1]
            state[r, 0] = 0
        regs[FILLS] += fills
        regs[HITS] += hi[b] - lo[b] - fills
        regs[PEAK] = max(regs[PEAK], fills)


@_jit
def _add_to(tree, at, value):
    while at < tree.size:
        tree[at] += value
        at += at & -at


@_jit
def _sum_to(tree, at):
    total = np.int64(0)
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@_jit
def _renumber(tree, place, at_place, top):
    """Give the rows places 1, 2, … in the same order; returns the highest place."""
    write = 0
    for p in range(1, top + 1):
        r = at_place[p]
        if r != NONE and place[r] == p:
            write += 1
            at_place[write] = r
            place[r] = write
    for p in range(1, tree.size):
        tree[p] = 0
    for p in range(1, write + 1):
        tree[p] += 1
        up = p + (p & -p)
        if up < tree.size:
            tree[up] += tree[p]
    for p in range(write + 1, tree.size):
        up = p + (p & -p)
        if up < tree.size:
            tree[up] += tree[p]
    return write


@_jit
def stack_distances(begin, end, first_batch, start, row, tree, place, at_place, top, live, histogram):
    """LRU of every size at once (Mattson et al. 1970), a batch's rows being present all at once.

    A row is a hit in a cache of C rows exactly if fewer than C rows were used after it: `histogram[d]` counts uses with
    d such rows.  Rows have places in order of last use (`place int32 [rows]`, 0 = never used; `at_place int32`), and a
    Fenwick tree counts them.  The tree must have room for twice the rows.  Returns highest place and rows used.
    """
    for j in range(begin, end):
        lo, hi = start[j - first_batch], start[j - first_batch + 1]
        if top + hi - lo >= tree.size:
            top = _renumber(tree, place, at_place, top)
        for e in range(lo, hi):
            p = place[row[e]]
            if p > 0:
                histogram[live - _sum_to(tree, p)] += 1
        for e in range(lo, hi):
            r = row[e]
            if place[r] > 0:
                _add_to(tree, np.int64(place[r]), -1)
            else:
                live += 1
            top += 1
            place[r] = top
            at_place[top] = r
            _add_to(tree, top, 1)
    return top, live
