"""Queues of rows for the rules that keep some (numba).

`link int32 [rows, 2]`: the older and the newer neighbour of a row, NONE at the ends; a row is in one queue at most.
`queue int64 [Q, 4]`: oldest row, newest row, number of rows, cursor.  The cursor is where the search for a victim
goes on: every row that is older than it is pinned for the rest of the batch (NONE: all are).
`start_batch` sets the cursors to the oldest rows again.
"""

from __future__ import annotations

import numba as nb
import numpy as np

NONE = -1
OLDEST, NEWEST, SIZE, CURSOR = range(4)
OLDER, NEWER = 0, 1

jit = nb.njit(nogil=True, cache=True)


def empty(queues: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`queue`, `link` with nothing in them."""
    queue = np.full((queues, 4), NONE, np.int64)
    queue[:, SIZE] = 0
    return queue, np.full((rows, 2), NONE, np.int32)


@jit
def start_batch(queue):
    for q in range(queue.shape[0]):
        queue[q, CURSOR] = queue[q, OLDEST]


@jit
def push(queue, link, q, row):
    """Add `row` as the newest of queue `q`."""
    newest = queue[q, NEWEST]
    link[row, OLDER] = newest
    link[row, NEWER] = NONE
    if newest == NONE:
        queue[q, OLDEST] = row
    else:
        link[newest, NEWER] = row
    queue[q, NEWEST] = row
    queue[q, SIZE] += 1
    if queue[q, CURSOR] == NONE:
        queue[q, CURSOR] = row


@jit
def remove(queue, link, q, row):
    older, newer = link[row, OLDER], link[row, NEWER]
    if older == NONE:
        queue[q, OLDEST] = newer
    else:
        link[older, NEWER] = newer
    if newer == NONE:
        queue[q, NEWEST] = older
    else:
        link[newer, OLDER] = older
    queue[q, SIZE] -= 1
    if queue[q, CURSOR] == row:
        queue[q, CURSOR] = newer


@jit
def oldest_free(queue, link, q, pinned, batch):
    """The oldest row that is not pinned (`pinned[row] == batch`); NONE: there is none."""
    row = queue[q, CURSOR]
    while row != NONE and pinned[row] == batch:
        row = link[row, NEWER]
    queue[q, CURSOR] = row
    return row
