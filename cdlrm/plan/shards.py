"""`Shards`: the arrays of a planner's shards, see `kernels.py`; each owns the rows that hash to it."""

from __future__ import annotations

import numpy as np

from . import kernels as k

KEPT = 1024  # entries of a shard, 12 bytes each, for which no ring shrinks


class Shards:
    """Shard `s` has row `s` of each array (of `ring` and `link`: `kernels.part`), and slots that are numbered from 1;
    `meta int32 [2 * rows]` is shared, by whole cache lines.

    The shards' arrays lie together since only large ones get huge pages, and with small pages the address of nearly
    every slot has to be looked up in memory.
    """

    def __init__(self, number: int, num_rows: int, slots: int) -> None:
        self.number = number
        lines = np.zeros(2 * num_rows + 16, np.int32)
        self.meta = lines[-lines.ctypes.data % 64 // 4 :][: 2 * num_rows]  # from the beginning of a cache line
        self.ring, self.link = np.zeros(number, np.int64), np.zeros(number, np.int32)  # no room for entries yet
        self.start, self.listed = np.full((number, 64), k.UNSEEN, np.int64), np.zeros((number, 64), np.int64)
        self.regs = np.zeros((number, k.REGISTERS), np.int64)
        self.regs[:, [k.HEAD, k.ORIGIN, k.SWEPT]] = k.UNSEEN  # rows that were never seen have entry 0
        self.regs[:, k.RING], self.regs[:, k.RING_END] = np.arange(number), np.arange(1, number + 1)
        self.slot_row, self.slot_use = np.full((number, 1), -1, np.int64), np.full((number, 2), -1, np.int32)
        self.fifo, self.free = np.zeros((number, 1), np.int32), np.empty((number, 0), np.int32)
        self.grow_slots(slots)

    @property
    def slots(self) -> int:
        """Of each shard."""
        return int(self.slot_row.shape[1] - 1)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which the kernel of a plan takes them."""
        window = (self.meta, self.ring, self.link, self.slot_row, self.slot_use, self.fifo, self.free)
        return (*window, self.start, self.listed, self.regs)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)

    def most_distinct(self, first: int, last: int) -> int:
        """Entries of the batches [first, last] in the shard that has most."""
        mask = self.start.shape[1] - 1
        return int((self.start[:, (last + 1) & mask] - self.start[:, first & mask]).max())

    # --- more room ---

    def grow_slots(self, slots: int) -> None:
        """Add empty slots to each shard; the lowest is used first."""
        old, counts, waiting = self.slots, self.regs[:, k.FREE], [self.waiting(s) for s in range(self.number)]
        for name, width in (("slot_row", 1), ("slot_use", 2)):
            array = getattr(self, name)
            new = np.full((self.number, (slots + 1) * width), -1, array.dtype)
            new[:, : array.shape[1]] = array
            setattr(self, name, new)
        free = np.empty((self.number, slots), np.int32)
        free[:, : slots - old] = np.arange(slots, old, -1)
        for s in range(self.number):
            free[s, slots - old : slots - old + counts[s]] = self.free[s, : counts[s]]
        self.free = free
        self.fifo = np.zeros((self.number, slots + slots // 2 + 65), np.int32)
        for s in range(self.number):
            self._queue(s, waiting[s])
        self.regs[:, k.FREE] += slots - old

    def grow_rings(self) -> None:
        """Room for more entries in each shard that may need it."""
        mask = self.start.shape[1] - 1
        tails = [int(self.start[s, int(self.regs[s, k.RELEASED]) & mask]) for s in range(self.number)]
        live = [self.places(s, tail, int(self.regs[s, k.HEAD])) for s, tail in enumerate(tails)]
        # Not all as large as the largest: ids may happen, or be made, to fall into few shards.
        needed = [n.size + n.size // 5 + 2 * k.BLOCK for n in live]
        kept = [max(self._ring_size(s), size) for s, size in enumerate(needed)]
        # And into others later: rings shrink where kept ones would take more than 16 bytes an entry, and a constant.
        enough = 4 * sum(n.size for n in live) // 3 + self.number * KEPT
        sizes = kept if sum(kept) <= enough else needed
        ends = np.cumsum([size + 1 for size in sizes])
        starts = ends - sizes - 1
        for name in ("ring", "link"):
            old = getattr(self, name)
            new = np.zeros(int(ends[-1]), old.dtype)
            for s, places in enumerate(live):
                new[starts[s] : starts[s] + places.size] = old[self.regs[s, k.RING] :][places]
            setattr(self, name, new)
        self.regs[:, k.RING], self.regs[:, k.RING_END], self.regs[:, k.ORIGIN] = starts, ends, tails

    def make_room(self) -> None:
        """Room for one more batch beside those that are scanned and not released; `scan_batch` tells when to."""
        oldest, scanned = int(self.regs[:, k.RELEASED].min()), int(self.regs[0, k.SCANNED])
        for s in np.flatnonzero(self.regs[:, k.HEAD] - self.regs[:, k.SWEPT] >= k.UNSEEN).tolist():
            regs = self.regs[s]
            live = regs[k.HEAD] - self.start[s, int(regs[k.RELEASED]) & (self.start.shape[1] - 1)]
            k.sweep(s, self.number, live, self.meta, regs)
        batches = scanned - oldest + 3
        if batches > self.start.shape[1]:
            size = 1 << batches.bit_length()
            live = np.arange(oldest, scanned + 1)
            for name in ("start", "listed"):
                old = getattr(self, name)
                new = np.zeros((self.number, size), np.int64)
                new[:, live & (size - 1)] = old[:, live & (old.shape[1] - 1)]
                setattr(self, name, new)

    # --- one shard ---

    def waiting(self, s: int) -> np.ndarray:
        """Slots of the FIFO, in its order."""
        size = self.fifo.shape[1] - 1
        places = self.regs[s, k.FIFO_HEAD] + np.arange(self.regs[s, k.FIFO_SIZE])
        slots = self.fifo[s, places % max(size, 1)]
        return slots[slots > 0]

    def _queue(self, s: int, slots: np.ndarray) -> None:
        """Let the FIFO hold `slots int [n]` in this order."""
        self.fifo[s, : slots.size] = slots
        self.slot_use[s, 2 * slots] = -2 - np.arange(slots.size)
        self.regs[s, k.FIFO_HEAD], self.regs[s, k.FIFO_SIZE] = 0, slots.size

    def places(self, s: int, lo: int, hi: int) -> np.ndarray:
        """Where the entries [lo, hi) live in its part of the rings."""
        at = np.arange(lo, hi) - int(self.regs[s, k.ORIGIN])
        return np.where(at < 0, at + self._ring_size(s), at)

    def _ring_size(self, s: int) -> int:
        return int(self.regs[s, k.RING_END] - self.regs[s, k.RING] - 1)

    def reset(self, s: int, rows: np.ndarray) -> None:
        """Forget the window; from now on the slots hold `rows int64 [slots]` (-1: empty)."""
        before, use, regs = self.slot_row[s, 1:], self.slot_use[s], self.regs[s]
        self.meta[2 * before[before >= 0]] = 0
        used = np.flatnonzero(rows >= 0)
        last = np.where(before[used] == rows[used], use[2 * used + 3], -1)
        order = used[np.argsort(last, kind="stable")] + 1
        before[:] = rows
        use[::2] = -1
        use[2 * used + 3] = last
        self.meta[2 * rows[used]] = used + 1
        empty = np.flatnonzero(rows < 0)[::-1] + 1
        self.free[s, : empty.size] = empty
        regs[k.FREE], regs[k.HELD], regs[k.DISTINCT] = empty.size, 0, 0
        self._queue(s, order)
        batch = int(regs[k.SCANNED])
        regs[k.PLANNED] = regs[k.RELEASED] = batch
        self.start[s, batch & (self.start.shape[1] - 1)] = regs[k.HEAD]
        self.listed[s, batch & (self.start.shape[1] - 1)] = 0

    def check(self, s: int) -> None:
        """Verify the structure: raises AssertionError naming what is broken (for tests)."""
        regs, rows, use = self.regs[s], self.slot_row[s, 1:], self.slot_use[s, 2:].reshape(-1, 2)
        used = np.flatnonzero(rows >= 0)
        name = f"shard {s}"
        _require(np.unique(rows[used]).size == used.size, f"rule 6: a row has two slots in {name}")
        _require(np.array_equal(self.meta[2 * rows[used]], used + 1), f"rule 1: row and slot disagree in {name}")
        _require(not used.size or 2 * rows[used].max() < self.meta.size, f"{name}: a slot holds a row beyond the group")
        free = np.sort(self.free[s, : regs[k.FREE]])
        _require(np.array_equal(free, np.flatnonzero(rows < 0) + 1), f"{name}: the free slots are not the empty ones")
        planned, scanned, released = (int(regs[i]) for i in (k.PLANNED, k.SCANNED, k.RELEASED))
        _require(released <= planned <= scanned, f"{name}: released, planned, scanned are out of order")
        following, last = use[used, 0], use[used, 1]
        known = following >= 0
        _require(
            not (known & ((following < planned) | (following >= scanned))).any(),
            f"{name}: a next use lies outside the window",
        )
        _require(not (following[last >= released] < -1).any(), f"{name}: a held slot waits in the FIFO")
        candidates = used[last < released] + 1
        _require(used.size - candidates.size == regs[k.HELD], f"{name}: the number of held slots is wrong")
        listed: list[int] = []
        for b in range(planned, scanned):
            w = b & (self.start.shape[1] - 1)
            first = int(self.start[s, w])
            stack = k.part(self.link, regs)[self.places(s, first, first + int(self.listed[s, w]))]
            _require((use[stack - 1, 0] == b).all(), f"{name}: a slot is listed for batch {b} but is used elsewhere")
            listed += stack.tolist()
        waiting = self.waiting(s)
        places = -2 - use[waiting - 1, 0]
        _require(np.array_equal(self.fifo[s, places], waiting), f"{name}: a slot does not know its place in the FIFO")
        listed += waiting.tolist()
        _require(
            sorted(listed) == sorted(candidates.tolist()),
            f"rule 3: {name}: the victims are not exactly the released slots",
        )


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
