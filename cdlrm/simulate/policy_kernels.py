"""Look-ahead caches with other rules beyond the horizon than LRU (numba, nogil).

Rows without a known use wait in queues of nodes; the rule says which queue a row joins when its hold ends, and which
queue's head is the next victim.  Everything else is as in `kernels.look_ahead`.

SCORED (LFU with decay, frequency): a row joins the queue of the class of its use count, two classes an octave; the
head with the least `class * weight + last use` goes first.  As all counts halve every half-life, a class is worth half
of one in time, so the order of two rows never changes while they wait (LRFU: Lee et al., IEEE ToC 2001).
S3FIFO (Yang et al., SOSP 2023): a small queue of new rows, a main queue with second chances, and ghosts of what left
the small queue.  "Like": a row that is held, or whose next use is known, leaves its queue and joins main later.

`node int32 [P, 4]`: row, last use + 1, next use, following node.  `queue int64 [Q, 3]`: head, tail, valid nodes.
`at int32 [rows]`: the row's node (NONE: none); other nodes of the row are stale.  `count float32 [rows]`,
`counted int32 [rows]`: uses (halved every half-life, for all rows that were ever used) as of batch `counted`.
`main uint8 [rows]`, `ghost int64 [rows]`: S3FIFO: row belongs to main; number of its eviction + 1.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from .kernels import FILLS, FREE, HELD, HITS, NONE, PEAK, RELEASED, SLOTS

SCORED, S3FIFO = 0, 1
QUEUES = 48
SMALL, MAIN = 0, 1
SMALL_SHARE = 10  # per cent of the cache
FREE_NODE, EVICTED = 9, 10  # further columns of `regs`

_jit = nb.njit(nogil=True, cache=True, error_model="numpy", inline="never")


@_jit
def _collect(node, queue, at, regs):
    """Give stale nodes back; the order of the others stays."""
    for q in range(queue.shape[0]):
        n = queue[q, 0]
        before = np.int64(NONE)
        while n != NONE:
            following = np.int64(node[n, 3])
            if at[node[n, 0]] == n:
                before = n
            else:
                if before == NONE:
                    queue[q, 0] = following
                else:
                    node[before, 3] = following
                node[n, 3] = regs[FREE_NODE]
                regs[FREE_NODE] = n
            n = following
        queue[q, 1] = before


@_jit
def _append(q, r, stamp, following, node, queue, at, regs):
    if regs[FREE_NODE] == NONE:
        _collect(node, queue, at, regs)
    n = regs[FREE_NODE]
    regs[FREE_NODE] = node[n, 3]
    node[n, 0] = r
    node[n, 1] = stamp
    node[n, 2] = following
    node[n, 3] = NONE
    if queue[q, 0] == NONE:
        queue[q, 0] = n
    else:
        node[queue[q, 1], 3] = n
    queue[q, 1] = n
    queue[q, 2] += 1
    at[r] = n


@_jit
def _class_of(count):
    return min(QUEUES - 1, int(2 * np.log2(count)))


@_jit
def _leave(r, q, queue, at):
    """Make the row's node, if it has one, stale."""
    if at[r] != NONE:
        at[r] = NONE
        queue[q, 2] -= 1


@_jit
def _release(rule, far, lo, hi, first_batch, row, following, state, bucket, regs, node, queue, at, count, main):
    batch = regs[RELEASED]
    stamp = np.int32(batch + 1)
    for e in range(lo[batch - first_batch], hi[batch - first_batch]):
        r = row[e]
        if state[r, 0] != stamp:
            continue
        regs[HELD] -= 1
        n = following[e]
        q = _class_of(count[r]) if rule == SCORED else np.int64(main[r])
        if n != NONE and n <= far:
            _leave(r, q, queue, at)
            state[r, 1] = bucket[n & (bucket.size - 1)]
            bucket[n & (bucket.size - 1)] = r
        elif at[r] != NONE:  # S3FIFO: it keeps its place
            node[at[r], 1] = stamp
            node[at[r], 2] = n
        else:
            _append(q, r, stamp, n, node, queue, at, regs)
    regs[RELEASED] = batch + 1


@_jit
def _head(q, far, first, state, bucket, node, queue, at, main, regs):
    """The first row of queue `q` that may be a victim (NONE: none); what may not is taken out on the way."""
    while queue[q, 0] != NONE:
        n = queue[q, 0]
        r = node[n, 0]
        if at[r] == n:
            stamp = node[n, 1]
            held = state[r, 0] > regs[RELEASED]
            use = node[n, 2]
            if not held and use == NONE and first[r] >= stamp:
                use = first[r]
            if not held and (use == NONE or use > far):
                return r
            at[r] = NONE
            queue[q, 2] -= 1
            main[r] = MAIN
            if not held:
                state[r, 1] = bucket[use & (bucket.size - 1)]
                bucket[use & (bucket.size - 1)] = r
        queue[q, 0] = node[n, 3]
        node[n, 3] = regs[FREE_NODE]
        regs[FREE_NODE] = n
    return NONE


@_jit
def _pick_scored(weight, far, first, state, bucket, node, queue, at, main, regs):
    best, least = NONE, np.int64(0)
    for q in range(queue.shape[0]):
        if queue[q, 0] == NONE:
            continue
        r = _head(q, far, first, state, bucket, node, queue, at, main, regs)
        if r != NONE:
            score = q * weight + node[at[r], 1]
            if best == NONE or score < least:
                best, least = r, score
    if best != NONE:
        _leave(best, _at_queue(best, node, queue, at), queue, at)
    return best


@_jit
def _at_queue(r, node, queue, at):
    """The queue whose head is the node of row `r`."""
    for q in range(queue.shape[0]):
        if queue[q, 0] == at[r]:
            return q
    return 0


@_jit
def _pick_s3fifo(far, first, state, bucket, node, queue, at, main, count, ghost, regs):
    while True:
        small = _head(SMALL, far, first, state, bucket, node, queue, at, main, regs)
        large = _head(MAIN, far, first, state, bucket, node, queue, at, main, regs)
        if small == NONE and large == NONE:
            return NONE
        if small != NONE and (large == NONE or queue[SMALL, 2] * 100 > regs[SLOTS] * SMALL_SHARE):
            stamp, use = node[at[small], 1], node[at[small], 2]
            _leave(small, SMALL, queue, at)
            if count[small] <= 1:
                regs[EVICTED] += 1
                ghost[small] = regs[EVICTED]
                return small
            main[small] = MAIN
            count[small] = 0
            _append(MAIN, small, stamp, use, node, queue, at, regs)
        else:
            stamp, use = node[at[large], 1], node[at[large], 2]
            _leave(large, MAIN, queue, at)
            if count[large] <= 0:
                return large
            count[large] -= 1
            _append(MAIN, large, stamp, use, node, queue, at, regs)


@_jit
def _note_use(rule, r, missed, decay, j, node, queue, at, count, counted, main, ghost, regs):
    """Count a use; `missed`: the row is filled for it."""
    if rule == SCORED:
        _leave(r, _class_of(max(count[r], np.float32(1))), queue, at)
        count[r] = count[r] * np.float32(2.0 ** ((counted[r] - j) * decay)) + np.float32(1)
        counted[r] = j
    elif missed:
        count[r] = 0
        recent = ghost[r] > 0 and regs[EVICTED] - ghost[r] < regs[SLOTS]
        main[r] = MAIN if recent else SMALL
        ghost[r] = 0
    else:
        count[r] = min(count[r] + 1, np.float32(3))


@_jit
def look_ahead(
    rule, weight, decay, begin, end, first_batch, lo, hi, row, following, first, far_seen, depth, slots,
    state, bucket, regs, node, queue, at, count, counted, main, ghost, table, fills_by_table,
):  # fmt: skip
    """As `kernels.look_ahead`, with `rule` beyond the horizon.  `decay` = 1 / half-life in batches."""
    wmask = bucket.size - 1
    for j in range(begin, end):
        b = j - first_batch
        far = far_seen[b]
        regs[FREE] += slots[b] - regs[SLOTS]
        regs[SLOTS] = slots[b]
        while regs[RELEASED] < j - depth:
            _release(rule, far, lo, hi, first_batch, row, following, state, bucket, regs, node, queue, at, count, main)
        bucket[j & wmask] = NONE
        stamp = np.int32(j + 1)
        oldest = regs[RELEASED]
        fills = 0
        for e in range(lo[b], hi[b]):
            r = row[e]
            used = state[r, 0]
            _note_use(rule, r, used == 0, decay, j, node, queue, at, count, counted, main, ghost, regs)
            if used == 0:
                fills += 1
                fills_by_table[table[r]] += 1
                regs[HELD] += 1
            elif used <= oldest:
                regs[HELD] += 1
            state[r, 0] = stamp
        while regs[HELD] > slots[b]:
            _release(rule, far, lo, hi, first_batch, row, following, state, bucket, regs, node, queue, at, count, main)
        victims = fills - min(fills, regs[FREE])
        regs[FREE] -= fills - victims
        k = far
        for _ in range(victims):
            if rule == SCORED:
                r = _pick_scored(weight, far, first, state, bucket, node, queue, at, main, regs)
            else:
                r = _pick_s3fifo(far, first, state, bucket, node, queue, at, main, count, ghost, regs)
            if r == NONE:
                while bucket[k & wmask] == NONE:
                    k -= 1
                r = bucket[k & wmask]
                bucket[k & wmask] = state[r, 1]
            state[r, 0] = 0
        regs[FILLS] += fills
        regs[HITS] += hi[b] - lo[b] - fills
        regs[PEAK] = max(regs[PEAK], fills)
