"""W-TinyLFU: an LRU window of 1 % before a segmented LRU (probation 20 %, protected 80 %); the more frequent row wins.

Source: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS 2017; shares as
in libCacheSim's WTinyLFU.c (window-size 0.01, main cache SLRU 1:4, ageing after 32 x main uses).  Frequencies are
exact counts of all uses, halved by the ageing, where the original has a sketch: in its favour.  A row of the batch
always gets in (the batch needs it), so the admission decides about window rows of earlier batches; during a batch the
window may therefore be larger than its share.
"""

from __future__ import annotations

import numpy as np

from . import queues as k
from .base import Moved, Uses

WINDOW, PROBATION, PROTECTED = 0, 1, 2
EVICTS, USES = 0, 1
AGEING = 32


@k.jit
def _main_victim(queue, link, pinned, batch):
    row = k.oldest_free(queue, link, PROBATION, pinned, batch)
    return row if row != k.NONE else k.oldest_free(queue, link, PROTECTED, pinned, batch)


@k.jit
def _drop(row, queue, link, where):
    k.remove(queue, link, where[row], row)
    where[row] = k.NONE


@k.jit
def _evict(main_slots, queue, link, where, count, pinned, batch, regs):
    regs[EVICTS] += 1
    while True:
        candidate = k.oldest_free(queue, link, WINDOW, pinned, batch)
        victim = _main_victim(queue, link, pinned, batch)
        if candidate == k.NONE:
            _drop(victim, queue, link, where)
            return
        room = queue[PROBATION, k.SIZE] + queue[PROTECTED, k.SIZE] < main_slots
        if not room and (victim == k.NONE or count[candidate] <= count[victim]):
            _drop(candidate, queue, link, where)
            return
        if not room:
            _drop(victim, queue, link, where)
        k.remove(queue, link, WINDOW, candidate)
        k.push(queue, link, PROBATION, candidate)
        where[candidate] = PROBATION
        if not room:
            return


@k.jit
def _touch(row, protected_slots, queue, link, where):
    k.remove(queue, link, where[row], row)
    if where[row] == WINDOW:
        k.push(queue, link, WINDOW, row)
        return
    k.push(queue, link, PROTECTED, row)
    where[row] = PROTECTED
    if queue[PROTECTED, k.SIZE] > protected_slots:
        oldest = queue[PROTECTED, k.OLDEST]
        k.remove(queue, link, PROTECTED, oldest)
        k.push(queue, link, PROBATION, oldest)
        where[oldest] = PROBATION


@k.jit
def _step(rows, batch, slots, main_slots, protected_slots, queue, link, where, count, pinned, regs):
    fills = 0
    for row in rows:
        pinned[row] = batch
        count[row] += 1
        if where[row] != k.NONE:
            _touch(row, protected_slots, queue, link, where)
    regs[USES] += rows.size
    if regs[USES] >= AGEING * main_slots:
        regs[USES] = 0
        for row in range(count.size):
            count[row] //= 2
    k.start_batch(queue)
    for row in rows:
        if where[row] != k.NONE:
            continue
        fills += 1
        if queue[WINDOW, k.SIZE] + queue[PROBATION, k.SIZE] + queue[PROTECTED, k.SIZE] >= slots:
            _evict(main_slots, queue, link, where, count, pinned, batch, regs)
        k.push(queue, link, WINDOW, row)
        where[row] = WINDOW
    return fills


def moved(uses: Uses, slots: int) -> Moved:
    queue, link = k.empty(3, uses.rows)
    where, count = np.full(uses.rows, k.NONE, np.int8), np.zeros(uses.rows, np.int32)
    pinned, regs = np.full(uses.rows, -1, np.int32), np.zeros(2, np.int64)
    main_slots = slots - max(1, int(slots * 0.01))
    fills = sum(
        int(_step(rows, batch, slots, main_slots, main_slots * 4 // 5, queue, link, where, count, pinned, regs))
        for batch, rows in enumerate(uses.batches)
    )
    return Moved(fills, int(regs[EVICTS]))
