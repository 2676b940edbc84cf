"""S3-FIFO: a small queue for new rows, a main queue with second chances, and ghosts of what left the small one.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; sizes and thresholds as in
libCacheSim's S3FIFO.c (small 10 %, ghosts 90 %, two hits to main; while the cache fills, what the small queue has no
room for goes to main), with which this file agrees on traces of one row a batch.  A queue without a row that may go
leaves the choice to the other.
"""

from __future__ import annotations

import numpy as np

from . import queues as k
from .base import Moved, Uses

SMALL, MAIN, GHOST = 0, 1, 2
TO_MAIN = 2
EVICTS = 0


@k.jit
def _remember(row, ghosts, ghost_queue, ghost_link, where):
    if ghosts == 0:
        where[row] = k.NONE
        return
    if ghost_queue[0, k.SIZE] >= ghosts:
        oldest = ghost_queue[0, k.OLDEST]
        k.remove(ghost_queue, ghost_link, 0, oldest)
        where[oldest] = k.NONE
    k.push(ghost_queue, ghost_link, 0, row)
    where[row] = GHOST


@k.jit
def _evict(small_slots, main_slots, ghosts, queue, link, ghost_queue, ghost_link, where, freq, pinned, batch, regs):
    regs[EVICTS] += 1
    from_small = queue[MAIN, k.SIZE] <= main_slots
    while True:
        small = k.oldest_free(queue, link, SMALL, pinned, batch)
        main = k.oldest_free(queue, link, MAIN, pinned, batch)
        if small == k.NONE:
            from_small = False
        if from_small or main == k.NONE:
            k.remove(queue, link, SMALL, small)
            if freq[small] < TO_MAIN:
                break
            freq[small] = 0
            k.push(queue, link, MAIN, small)
            where[small] = MAIN
        else:
            k.remove(queue, link, MAIN, main)
            if freq[main] == 0:
                where[main] = k.NONE
                return
            freq[main] = min(freq[main], 3) - 1
            k.push(queue, link, MAIN, main)
    _remember(small, ghosts, ghost_queue, ghost_link, where)


@k.jit
def _step(rows, batch, slots, small_slots, ghosts, queue, link, ghost_queue, ghost_link, where, freq, pinned, regs):
    k.start_batch(queue)
    fills = 0
    for row in rows:
        pinned[row] = batch
        if where[row] == SMALL or where[row] == MAIN:
            freq[row] += 1
    for row in rows:
        if where[row] == SMALL or where[row] == MAIN:
            continue
        fills += 1
        again = where[row] == GHOST
        if again:
            k.remove(ghost_queue, ghost_link, 0, row)
            where[row] = k.NONE
        if queue[SMALL, k.SIZE] + queue[MAIN, k.SIZE] >= slots:
            _evict(
                small_slots, slots - small_slots, ghosts, queue, link, ghost_queue, ghost_link, where, freq, pinned,
                batch, regs,
            )  # fmt: skip
        first = regs[EVICTS] == 0
        to = MAIN if again or (first and queue[SMALL, k.SIZE] >= small_slots) else SMALL
        freq[row] = 0
        k.push(queue, link, to, row)
        where[row] = to
    return fills


def moved(uses: Uses, slots: int) -> Moved:
    queue, link = k.empty(2, uses.rows)
    ghost_queue, ghost_link = k.empty(1, uses.rows)
    where, freq = np.full(uses.rows, k.NONE, np.int8), np.zeros(uses.rows, np.int32)
    pinned, regs = np.full(uses.rows, -1, np.int32), np.zeros(1, np.int64)
    small_slots, ghosts = int(slots * 0.1), int(slots * 0.9)
    fills = sum(
        int(_step(rows, batch, slots, small_slots, ghosts, queue, link, ghost_queue, ghost_link, where, freq, pinned,
                  regs))
        for batch, rows in enumerate(uses.batches)
    )  # fmt: skip
    return Moved(fills, int(regs[EVICTS]))
