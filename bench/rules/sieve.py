"""SIEVE: one queue in order of insertion; a hand goes from old to new, spares visited rows once, evicts others.

Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024; details as in libCacheSim's Sieve.c, with which this
file agrees on traces of one row a batch.  A batch's hits are marked before its first victim is chosen; the hand
passes over the batch's own rows without touching them.
"""

from __future__ import annotations

import numpy as np

from . import queues as k
from .base import Moved, Uses

HAND, EVICTS = 0, 1


@k.jit
def _evict(queue, link, visited, pinned, batch, regs):
    row = regs[HAND]
    while True:
        if row == k.NONE:
            row = queue[0, k.OLDEST]
        if pinned[row] != batch:
            if not visited[row]:
                break
            visited[row] = False
        row = link[row, k.NEWER]
    regs[HAND] = link[row, k.NEWER]
    k.remove(queue, link, 0, row)
    regs[EVICTS] += 1
    return row


@k.jit
def _step(rows, batch, slots, queue, link, cached, visited, pinned, regs):
    fills = 0
    for row in rows:
        pinned[row] = batch
        if cached[row]:
            visited[row] = True
    for row in rows:
        if cached[row]:
            continue
        fills += 1
        if queue[0, k.SIZE] >= slots:
            cached[_evict(queue, link, visited, pinned, batch, regs)] = False
        k.push(queue, link, 0, row)
        cached[row] = True
        visited[row] = False
    return fills


def moved(uses: Uses, slots: int) -> Moved:
    queue, link = k.empty(1, uses.rows)
    cached, visited = np.zeros(uses.rows, np.bool_), np.zeros(uses.rows, np.bool_)
    pinned = np.full(uses.rows, -1, np.int32)
    regs = np.array([k.NONE, 0], np.int64)
    fills = sum(
        int(_step(rows, batch, slots, queue, link, cached, visited, pinned, regs))
        for batch, rows in enumerate(uses.batches)
    )
    return Moved(fills, int(regs[EVICTS]))
