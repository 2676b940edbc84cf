"""`Shard`: the arrays of one shard of a planner, see `kernels.py`; owner of the rows that hash to it."""

from __future__ import annotations

import numpy as np

from . import kernels as k


class Shard:
    """Slots are numbered from 1 inside a shard; `meta int32 [2 * rows]` is shared, by whole cache lines."""

    def __init__(self, number: int, shards: int, meta: np.ndarray, slots: int) -> None:
        self.number, self.shards, self.meta = number, shards, meta
        self.ring = np.zeros(1, np.int64)
        self.link = np.zeros(1, np.int32)
        self.start = np.full(64, k.UNSEEN, np.int64)
        self.listed = np.zeros(64, np.int64)
        self.regs = np.zeros(k.REGISTERS, np.int64)
        self.regs[[k.HEAD, k.ORIGIN, k.SWEPT]] = k.UNSEEN  # rows that were never seen have entry 0
        self.slot_row = np.full(1, -1, np.int64)
        self.slot_use = np.full(2, -1, np.int32)
        self.fifo = np.zeros(1, np.int32)
        self.free = np.empty(0, np.int32)
        self.grow(slots)

    @property
    def slots(self) -> int:
        return int(self.slot_row.size - 1)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The shard's own arrays, in the order in which the kernels of a plan take them."""
        window = (self.ring, self.link, self.slot_row, self.slot_use, self.fifo, self.free)
        return (*window, self.start, self.listed, self.regs)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)

    def distinct(self, batch: int) -> int:
        mask = self.start.size - 1
        return int(self.start[(batch + 1) & mask] - self.start[batch & mask])

    def free_slots(self) -> int:
        return int(self.regs[k.FREE])

    def lacks(self, limit: int) -> bool:
        """Whether more than `limit` distinct rows of the next batch to plan are not cached."""
        return bool(k.lacks(limit, self.meta, self.ring, self.start, self.regs))

    def grow(self, slots: int) -> None:
        """Add empty slots; the lowest is used first."""
        old, count = self.slots, self.free_slots()
        for name, width in (("slot_row", 1), ("slot_use", 2)):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.full((slots - old) * width, -1, array.dtype)]))
        waiting = self._waiting()
        self.fifo = np.zeros(slots + slots // 2 + 65, np.int32)
        self._queue(waiting)
        free = np.empty(slots, np.int32)
        free[: slots - old] = np.arange(slots, old, -1)
        free[slots - old : slots - old + count] = self.free[:count]
        self.free = free
        self.regs[k.FREE] = slots - old + count

    def _waiting(self) -> np.ndarray:
        """Slots of the FIFO, in its order."""
        size = self.fifo.size - 1
        places = self.regs[k.FIFO_HEAD] + np.arange(self.regs[k.FIFO_SIZE])
        slots = self.fifo[places % max(size, 1)]
        return slots[slots > 0]

    def _queue(self, slots: np.ndarray) -> None:
        """Let the FIFO hold `slots int [n]` in this order."""
        self.fifo[: slots.size] = slots
        self.slot_use[2 * slots] = -2 - np.arange(slots.size)
        self.regs[k.FIFO_HEAD], self.regs[k.FIFO_SIZE] = 0, slots.size

    def scan(self, rows: np.ndarray, entry: np.ndarray) -> None:
        self._make_room()
        begin = -1
        while begin < rows.size:
            begin = k.scan(
                max(begin, 0), rows, entry, self.meta, self.ring, self.link, self.slot_use, self.fifo, self.start,
                self.listed, self.regs,
            )  # fmt: skip
            if begin < rows.size:
                self._grow_ring()

    def _make_room(self) -> None:
        """Room for one more batch beside those that are scanned and not released."""
        oldest, scanned = int(self.regs[k.RELEASED]), int(self.regs[k.SCANNED])
        if self.regs[k.HEAD] - self.regs[k.SWEPT] >= k.UNSEEN:
            live = self.regs[k.HEAD] - self.start[oldest & (self.start.size - 1)]
            k.sweep(self.number, self.shards, live, self.meta, self.regs)
        batches = scanned - oldest + 3
        if batches > self.start.size:
            size = 1 << batches.bit_length()
            live = np.arange(oldest, scanned + 1)
            for name in ("start", "listed"):
                old = getattr(self, name)
                new = np.zeros(size, np.int64)
                new[live & (size - 1)] = old[live & (old.size - 1)]
                setattr(self, name, new)

    def places(self, lo: int, hi: int) -> np.ndarray:
        """Where the entries [lo, hi) live."""
        at = np.arange(lo, hi) - int(self.regs[k.ORIGIN])
        return np.where(at < 0, at + self.ring.size - 1, at)

    def _grow_ring(self) -> None:
        tail = int(self.start[int(self.regs[k.RELEASED]) & (self.start.size - 1)])
        live = self.places(tail, int(self.regs[k.HEAD]))
        size = live.size + live.size // 4 + 2 * k.BLOCK
        for name in ("ring", "link"):
            old = getattr(self, name)
            new = np.zeros(size + 1, old.dtype)
            new[: live.size] = old[live]
            setattr(self, name, new)
        self.regs[k.ORIGIN] = tail

    def reset(self, rows: np.ndarray) -> None:
        """Forget the window; from now on the slots hold `rows int64 [slots]` (-1: empty)."""
        before = self.slot_row[1:]
        self.meta[2 * before[before >= 0]] = 0
        used = np.flatnonzero(rows >= 0)
        last = np.where(before[used] == rows[used], self.slot_use[2 * used + 3], -1)
        order = used[np.argsort(last, kind="stable")] + 1
        self.slot_row[1:] = rows
        self.slot_use[::2] = -1
        self.slot_use[2 * used + 3] = last
        self.meta[2 * rows[used]] = used + 1
        empty = np.flatnonzero(rows < 0)[::-1] + 1
        self.free[: empty.size] = empty
        regs = self.regs
        regs[k.FREE], regs[k.HELD], regs[k.DISTINCT] = empty.size, 0, 0
        self._queue(order)
        batch = int(regs[k.SCANNED])
        regs[k.PLANNED] = regs[k.RELEASED] = batch
        self.start[batch & (self.start.size - 1)] = regs[k.HEAD]
        self.listed[batch & (self.start.size - 1)] = 0

    def check(self) -> None:
        """Verify the structure: raises AssertionError naming what is broken (for tests)."""
        regs, rows, use = self.regs, self.slot_row[1:], self.slot_use[2:].reshape(-1, 2)
        used = np.flatnonzero(rows >= 0)
        name = f"shard {self.number}"
        _require(np.unique(rows[used]).size == used.size, f"rule 6: a row has two slots in {name}")
        _require(np.array_equal(self.meta[2 * rows[used]], used + 1), f"rule 1: row and slot disagree in {name}")
        _require(not used.size or 2 * rows[used].max() < self.meta.size, f"{name}: a slot holds a row beyond the group")
        free = np.sort(self.free[: regs[k.FREE]])
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
            w = b & (self.start.size - 1)
            stack = self.link[self.places(int(self.start[w]), int(self.start[w] + self.listed[w]))]
            _require((use[stack - 1, 0] == b).all(), f"{name}: a slot is listed for batch {b} but is used elsewhere")
            listed += stack.tolist()
        waiting = self._waiting()
        places = -2 - use[waiting - 1, 0]
        _require(np.array_equal(self.fifo[places], waiting), f"{name}: a slot does not know its place in the FIFO")
        listed += waiting.tolist()
        _require(
            sorted(listed) == sorted(candidates.tolist()),
            f"rule 3: {name}: the victims are not exactly the released slots",
        )


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
