"""`MinCounter`: how many fills Belady's optimum (MIN) would have made, in one forward pass.

At batch granularity a batch's rows must all be present at once, and with prefetch depth d so must
the rows of the d batches before it.  For each use of a row, MIN keeps the row since its previous use
if every batch in between still has room for it; kept = hit.  Accepting in order of the right end is
optimal for intervals on one resource, and equals brute force in the tests.  (Belady 1966.)

Where the rows of d + 1 batches do not fit the cache, the hold is shortened for that batch: the oldest
batch is let go first, as the planner does.  `free_from(p)` is the first batch that does not hold the
rows of batch p any more (p+d+1, or earlier).

An accepted interval (p, j) takes a place in batches free_from(p) .. j-1, a suffix of the batches so
far, and is accepted when the smallest room in that suffix, m(free_from(p)), is positive.  m never decreases from one
batch to the next, so batches with equal m form runs.  A suffix decrement lowers the difference
between one run and the run before it; at 0 the two merge.  That is a union-find: a few operations a
use, a few words a batch.

Old batches are forgotten in two cases.  Nothing can be kept across a full batch.  And a batch never becomes full
when it has as many places as there are rows that were used last before it ended: each of those takes at most one of
its places, when it is used again, and no other row takes any.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from ..driver.intrinsics import prefetch_read as prefetch

# columns of `regs`: m of the newest run; first batch of the oldest run; oldest batch that is held; rows used last
# before this batch cannot be kept (a full batch is between)
NEWEST, OLDEST, HELD, LOST = range(4)
AHEAD = 24

_jit = nb.njit(nogil=True, cache=True, error_model="numpy")


@_jit
def _find(parent, b):
    """First batch of the run that holds batch `b`."""
    mask = parent.size - 1
    root = b
    while parent[root & mask] != root:
        root = parent[root & mask]
    while parent[b & mask] != root:
        parent[b & mask], b = root, parent[b & mask]
    return root


@_jit
def _take(parent, delta, regs, lo):
    """Keep a row over batches `lo ..`: True when each of them has room (and then less)."""
    mask = parent.size - 1
    run = _find(parent, max(lo, regs[OLDEST]))
    if run == regs[OLDEST]:
        if delta[run & mask] == 0:
            return False
        delta[run & mask] -= 1
    else:
        delta[run & mask] -= 1
        if delta[run & mask] == 0:
            parent[run & mask] = _find(parent, run - 1)
    regs[NEWEST] -= 1
    return True


@_jit
def _append(parent, delta, regs, batch, room):
    """Add `batch` with `room` places: no m before it may exceed `room`."""
    mask = parent.size - 1
    parent[batch & mask] = batch
    first = batch  # of the run that `batch` ends up in
    value = regs[NEWEST] if regs[OLDEST] < batch else np.int64(0)
    while first > regs[OLDEST]:
        run = _find(parent, first - 1)
        if value < room:
            break
        value -= delta[run & mask]
        parent[first & mask] = run
        first = run
    delta[first & mask] = room - (value if first > regs[OLDEST] else 0)
    regs[NEWEST] = room


@_jit
def _add(rows, batch, capacities, depths, last_use, users, free_from, parent, delta, regs, fills):
    mask = parent.shape[1] - 1
    before = np.empty(rows.size, np.int64)  # batch of each row's use before, -1: none
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            prefetch(last_use, rows[i + AHEAD])
        p = np.int64(last_use[rows[i]]) - 1
        before[i] = p
        last_use[rows[i]] = batch + 1
        if p < 0:
            users[mask + 1] += 1
        elif batch - p <= mask:
            users[p & mask] -= 1
    for q in range(depths.size):
        mine, room, reg, frees = parent[q], delta[q], regs[q], free_from[q]
        held = reg[HELD]
        missed = 0
        for p in before:
            if p < 0:
                missed += 1
            elif p < held:  # else it was held all the time: a hit
                lo = np.int64(frees[p & mask]) if batch - p <= mask else np.int64(-1)  # -1: long before `OLDEST`
                missed += p < reg[LOST] or (lo < batch and not _take(mine, room, reg, lo))
        fills[q] += missed
    users[batch & mask] = rows.size
    for q in range(depths.size):
        capacity = capacities[q]
        held = np.int64(0)
        for b in range(regs[q, HELD], batch + 1):
            held += users[b & mask]
        while regs[q, HELD] < batch and (regs[q, HELD] < batch - depths[q] or held > capacity):
            held -= users[regs[q, HELD] & mask]
            free_from[q, regs[q, HELD] & mask] = batch
            regs[q, HELD] += 1
        _append(parent[q], delta[q], regs[q], batch, max(capacity - held, 0))


@_jit
def _end_of_oldest(parent, regs, batch):
    """First batch after the oldest run."""
    end = batch
    run = _find(parent, batch - 1)
    while run > regs[OLDEST]:
        end = run
        run = _find(parent, run - 1)
    return end


@_jit
def _forget(parent, delta, free_from, users, regs, batch):
    """Drop the oldest run if it is full, and batches that can never be; at least `batch - 1` is kept."""
    mask = parent.size - 1
    end = _end_of_oldest(parent, regs, batch)
    if end < batch and delta[regs[OLDEST] & mask] == 0:
        regs[OLDEST] = end
        regs[LOST] = min(end, regs[HELD])
        while regs[LOST] > max(0, batch - mask) and free_from[(regs[LOST] - 1) & mask] >= end:
            regs[LOST] -= 1
    waiting = users[mask + 1]  # rows that were used last in a batch before `after`
    for b in range(regs[OLDEST], batch):
        waiting -= users[b & mask]
    starts = np.zeros(mask + 1, np.bool_)  # first batches of runs
    run = batch
    while run > regs[OLDEST]:
        starts[run & mask] = True
        run = _find(parent, run - 1)
    places = delta[regs[OLDEST] & mask]
    after = regs[OLDEST]
    while after < batch - 1:
        waiting += users[after & mask]
        if waiting > places:
            break
        after += 1
        if starts[after & mask]:
            places += delta[after & mask]
    if after == regs[OLDEST]:
        return
    delta[after & mask] = places
    b = after
    while b < batch and not (b > after and starts[b & mask]):
        parent[b & mask] = after
        b += 1
    regs[OLDEST] = after


class MinCounter:
    """Fills that MIN(d) makes on the batches added so far, for each of the `depths`.

    `num_rows` rows of the group, `cache_rows` slots (`resize` changes them from the next batch on).
    `double`: also those of the last of the depths in a cache twice as large, `double_fills`.
    Memory (`nbytes`): 4 bytes a row, touched only where rows are used, and 16 bytes a batch and depth of the batches
    that are neither before a full one nor never full; 1,024 batches at least, a power of two.
    """

    def __init__(self, num_rows: int, cache_rows: int, *depths: int, double: bool = True) -> None:
        depths = depths or (0,)
        self.depths = np.array(depths + depths[-1:] * double, np.int64)
        self._times = np.array([1] * len(depths) + [2] * double, np.int64)  # capacity, in caches
        self.cache_rows = cache_rows
        self.batches = 0
        self._last_use = np.zeros(num_rows, np.int32)
        count = self.depths.size
        size = 1 << max(10, int(4 * self.depths.max() + 16).bit_length())
        self._parent = np.zeros((count, size), np.int32)
        self._delta = np.zeros((count, size), np.int64)
        self._free_from = np.zeros((count, size), np.int32)
        self._users = np.zeros(size + 1, np.int64)  # rows used last in each batch; at the end: all that were used
        self._regs = np.zeros((count, 4), np.int64)
        self._fills = np.zeros(count, np.int64)
        self._shortened = np.zeros(count, np.int64)

    def add(self, rows: np.ndarray) -> None:
        """Count the distinct `rows int64 [U]` of the next batch."""
        self._make_room()
        _add(
            rows, self.batches, self.cache_rows * self._times, self.depths, self._last_use, self._users,
            self._free_from, self._parent, self._delta, self._regs, self._fills,
        )  # fmt: skip
        self._shortened += self._regs[:, HELD] > np.maximum(self.batches - self.depths, 0)
        self.batches += 1

    def resize(self, cache_rows: int) -> None:
        self.cache_rows = cache_rows

    def continue_from(self, other: MinCounter) -> None:
        """Take over what `other`, with as many depths, has counted; new depths hold from now on."""
        names = ("batches", "_last_use", "_free_from", "_parent", "_delta", "_users", "_regs", "_fills", "_shortened")
        for name in names:
            setattr(self, name, getattr(other, name))
        while self.batches and self._parent.shape[1] < 4 * int(self.depths.max()) + 16:
            self._double()

    @property
    def nbytes(self) -> int:
        """Host memory."""
        names = ("_last_use", "_free_from", "_parent", "_delta", "_users", "_regs", "_fills")
        return sum(int(getattr(self, name).nbytes) for name in names)

    @property
    def fills(self) -> int:
        """Fills of the first of the depths."""
        return int(self._fills[0])

    def fills_at(self, depth: int) -> int:
        return int(self._fills[int(np.flatnonzero(self.depths == depth)[0])])

    def shortened_at(self, depth: int) -> int:
        """Batches for which the hold was shorter than `depth`, because the rows of `depth` + 1 batches do not fit."""
        return int(self._shortened[int(np.flatnonzero(self.depths == depth)[0])])

    @property
    def double_fills(self) -> int:
        """Fills in a cache twice as large, with the last of the depths."""
        if self._times[-1] != 2:
            raise ValueError("made with double=False: the cache twice as large was not counted.")
        return int(self._fills[-1])

    def _make_room(self) -> None:
        size = self._parent.shape[1]
        margin = int(self.depths.max()) + 3
        if self.batches - int(self._regs[:, OLDEST].min()) < size - margin:
            return
        for q in range(self.depths.size):
            _forget(self._parent[q], self._delta[q], self._free_from[q], self._users, self._regs[q], self.batches)
        if self.batches - int(self._regs[:, OLDEST].min()) >= size // 2:
            self._double()

    def _double(self) -> None:
        size = self._parent.shape[1]
        live = np.arange(max(0, self.batches - size), self.batches)
        for name in ("_free_from", "_parent", "_delta"):
            old = getattr(self, name)
            new = np.zeros((self.depths.size, 2 * size), old.dtype)
            new[:, live & (2 * size - 1)] = old[:, live & (size - 1)]
            setattr(self, name, new)
        users = np.zeros(2 * size + 1, np.int64)
        users[live & (2 * size - 1)], users[-1] = self._users[live & (size - 1)], self._users[-1]
        self._users = users
