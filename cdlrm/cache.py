"""`Cache`: the records that are on the device, and the only code that moves records.

It executes plans (evict, then fill), lends places outside the planned slots to calls that no plan
knows of (`borrow`), and brings records home (`flush`).  It knows what *is* on the device
(`slot_row`); what *will be* there is the planner's knowledge.

Who may touch what: `execute` runs on the transfer thread; everything else on the trainer's, while
the cache is paused (`pause` waits until no plan is being executed and holds back the next).  The
trainer's kernels need no pause: a plan never touches a slot that the current batch reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .driver.base import Records
from .errors import DeviceError, retold
from .interrupt import interrupt_later
from .plan import Plan

PIECE_ROWS = 1 << 20  # moved at once where all are
WAIT_SECONDS = 1.0  # bound of every wait; a loop around it re-checks


@dataclass
class Moves:
    """Counters of what a cache moved, for whatever reason: evicts, flushes and loans."""

    rows_written: int = 0
    bytes_written: int = 0
    grows: int = 0


class Cache:
    """`rows` slots of records of one group on one device, in front of a store.

    `records`: C planned slots, then X lent places; `slot_row` int64 [C + X] (-1: empty) and `dirty`
    uint8 [C + X] describe them.
    """

    def __init__(self, rows: int, records: Records) -> None:
        self.records = records
        self.rows = 0
        self.moves = Moves()
        self.lost = False  # the device died with changed rows
        self.slot_row = np.empty(0, np.int64)
        self.dirty = np.empty(0, np.uint8)
        self.lent = 0
        self.resumed: Callable[[], None] = lambda: None  # told when a pause ends
        self._lock = threading.RLock()  # see Pipeline.lock
        self._gate = threading.Condition(self._lock)
        self._pauses: dict[Hashable, int] = {}  # by who asked for them: a thread, or the loans
        self._busy = False
        if rows:
            self._resize(rows, 0)

    # --- the transfer thread ---

    def try_execute(self, plan: Plan, executed: Callable[[], None]) -> bool:
        """Execute `plan` unless the cache is paused; whether it was executed.

        `executed` is called before a pause can begin, so that whoever pauses sees both or neither.
        """
        try:  # from here on: Ctrl-C behind the `with` would leave it busy for ever
            with self._lock:
                if self._pauses:
                    return False
                self._busy = True
            self._execute(plan)
            executed()
        finally:
            with self._lock:
                self._busy = False
                self._gate.notify_all()
        return True

    def _execute(self, plan: Plan) -> None:
        """Evict, then fill.  When a copy fails, `slot_row` still says what is where."""
        if plan.cache_rows > self.rows:
            self._resize(plan.cache_rows, self.lent)
            self.moves.grows += 1
        dirty = self.dirty[plan.evict_slots] != 0
        rows, slots = plan.evict_rows[dirty], plan.evict_slots[dirty]
        self.records.begin(plan, rows, slots)
        self._write(rows, slots, plan)
        plan.written = int(rows.size)
        self.slot_row[plan.evict_slots] = -1
        if plan.fill_slots.size:
            plan.copied = self.records.read(plan.fill_rows, plan.fill_slots, plan)
            self.slot_row[plan.fill_slots] = plan.fill_rows
        self.records.executed(plan)

    def _write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> None:
        if rows.size:
            self.records.write(rows, slots, plan)
            self.dirty[slots] = 0
            self.moves.rows_written += int(rows.size)
            self.moves.bytes_written += int(rows.size) * self.records.store.record_bytes

    # --- the trainer's thread ---

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No plan is executed inside the `with` block."""
        me = threading.get_ident()
        self.hold(me)
        try:
            yield
        finally:
            self._let_go(me)

    def hold(self, who: Hashable) -> None:
        """Like entering `pause`; ends with `let_go_all`."""
        with interrupt_later(), self._lock:  # Ctrl-C inside the wait would leave the lock in disorder
            self._pauses[who] = self._pauses.get(who, 0) + 1
            while self._busy:
                self._gate.wait(WAIT_SECONDS)

    def _let_go(self, who: Hashable) -> None:
        with self._lock:
            left = self._pauses.pop(who, 1) - 1  # none, after `let_go_all`
            if left:
                self._pauses[who] = left
        self.resumed()

    def let_go_all(self, who: Hashable) -> None:
        """End what `who` holds, and the pauses of this thread that Ctrl-C has left: it may come between `hold` and what
        ends it.  Outside of every pause only."""
        me = threading.get_ident()
        if who in self._pauses or me in self._pauses:
            with self._lock:
                self._pauses.pop(who, None)
                self._pauses.pop(me, None)
            self.resumed()

    def mark_dirty(self, slots: np.ndarray) -> None:
        """An update of the records in `slots` was launched (rule 7)."""
        self.dirty[slots] = 1

    def borrow(self, rows: np.ndarray) -> np.ndarray:
        """Bring `rows int64 [n]`, which are on no slot, to lent places; int32 [n] slots.  Paused only.

        With duplicates in `rows` the places are for reading only.
        """
        first = self.rows + self.lent
        if first + rows.size > self.slot_row.size:
            self._resize(self.rows, max(self.lent + int(rows.size), 2 * self.lent))
        slots = np.arange(first, first + rows.size, dtype=np.int32)
        self.records.read(rows, slots)
        self.lent += int(rows.size)
        self.slot_row[slots] = rows
        return slots

    def find_lent(self, rows: np.ndarray) -> np.ndarray:
        """Lent place of each of `rows`, int32; -1 = none."""
        found = np.full(rows.size, -1, np.int32)
        lent = self.slot_row[self.rows : self.rows + self.lent]
        if lent.size and rows.size:
            order = np.argsort(lent, kind="stable")
            at = np.minimum(np.searchsorted(lent[order], rows), lent.size - 1)
            hit = lent[order[at]] == rows
            found[hit] = self.rows + order[at[hit]]
        return found

    def give_back(self, keep: int = 0) -> None:
        """Write dirty lent records home and end all but the first `keep` loans.  Paused only."""
        slots = np.arange(self.rows + keep, self.rows + self.lent, dtype=np.int32)
        dirty = self.dirty[slots] != 0
        try:
            self._write(self.slot_row[slots[dirty]], slots[dirty])
        finally:
            self.slot_row[slots], self.dirty[slots] = -1, 0
            self.lent = keep

    def flush(self) -> None:
        """Write every dirty record home; the records stay cached, clean.  Paused only.

        When the device is dead this raises once, saying what is lost; what was written home before stays readable.
        """
        if self.lost:
            return
        slots = np.flatnonzero(self.dirty).astype(np.int32)
        try:
            if slots.size:
                self._write(self.slot_row[slots], slots)
            else:  # rows that a plan evicted may still be on their way home
                self.records.write(self.slot_row[slots], slots)
        except DeviceError as error:
            self.lost = error.sticky
            if not error.sticky:
                raise
            raise retold(
                error,
                f"{slots.size:,} changed rows of the cache could not be brought home, since the device is lost; the "
                f"tables in host memory hold what was written back before, and can be read and saved: {error}",
            ) from error

    def refresh(self) -> None:
        """Read every cached record again, after the store was changed from outside.  Paused only."""
        slots = np.flatnonzero(self.slot_row >= 0).astype(np.int32)
        self.records.read(self.slot_row[slots], slots)
        self.dirty[slots] = 0

    def planned_rows(self) -> np.ndarray:
        """Row in each planned slot, int64 [C]; -1 = empty."""
        return self.slot_row[: self.rows]

    def grow(self, rows: int) -> None:
        """At least `rows` planned slots.  Paused or idle only."""
        if rows > self.rows:
            self._resize(rows, self.lent)

    def _resize(self, rows: int, places: int) -> None:
        """`rows` planned slots and `places` places to lend; contents are kept."""
        size = rows + places
        slot_row, dirty = np.full(size, -1, np.int64), np.zeros(size, np.uint8)
        spans: Sequence[tuple[int, int, int]] = ((0, 0, self.rows), (rows, self.rows, self.lent))
        if not (self.slot_row >= 0).any():
            spans = ()  # nothing is cached
        for to, start, count in spans:
            for new, old in ((slot_row, self.slot_row), (dirty, self.dirty)):
                new[to : to + count] = old[start : start + count]
        self.records.resize(size, spans)
        self.slot_row, self.dirty, self.rows = slot_row, dirty, rows

    def fill_all(self) -> None:
        """Every row to its own place, slot = row.  Before anything else only."""
        for lo in range(0, self.rows, PIECE_ROWS):
            rows = np.arange(lo, min(lo + PIECE_ROWS, self.rows), dtype=np.int64)
            self.records.read(rows, rows.astype(np.int32))
            self.slot_row[rows] = rows

    def check(self) -> None:
        """Raise AssertionError naming a broken rule (for tests; paused or idle)."""
        used = self.slot_row[self.slot_row >= 0]
        if np.unique(used).size != used.size:
            raise AssertionError("rule 1: a row is on the device twice")
        if (self.dirty[self.slot_row < 0] != 0).any():
            raise AssertionError("rule 7: an empty slot is dirty")
        if (self.slot_row[self.rows + self.lent :] >= 0).any():
            raise AssertionError("rule 1: a place that was given back still holds a row")
