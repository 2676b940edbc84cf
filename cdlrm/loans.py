"""`Loans`: the slots of rows that no plan knows of: unannounced ids inside a look-ahead, and reading.

Rows are used where they are on the device now, or lent a place beside the planned slots, filled from
the store.  Meanwhile transfers wait.  All of it runs on the trainer's thread.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from .cache import Cache
from .interrupt import interrupt_later
from .lookups import Lookups
from .plan import Plan, Planner
from .plan.resident import ResidentPlanner
from .step import Step


class Loans:
    """Finds and lends slots of one group.  `pending` are its plans that were not executed yet, `planning`
    the lock that guards them and the planner."""

    def __init__(
        self, cache: Cache, planner: Planner | ResidentPlanner, pending: deque[Plan], planning: threading.Lock
    ) -> None:
        self.cache, self.planner, self.pending, self._planning = cache, planner, pending, planning
        self.resident = isinstance(planner, ResidentPlanner)
        self.holding = False  # rows are lent for training: the cache is held

    def for_training(self, rows: np.ndarray) -> np.ndarray:
        """Slots of `rows int64 [n]` for training; transfers wait until `release`."""
        if self.resident:
            return rows
        if not self.holding:
            self.release()
            self.cache.hold(self)  # not this thread's: the step may end in another one
            self.holding = True
        distinct, inverse = np.unique(rows, return_inverse=True)
        slots = self._find(distinct)
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            slots[missing] = self.cache.borrow(distinct[missing])
        return slots[inverse.reshape(-1)]

    def for_reading(self, lookups: Lookups, step: Step | None) -> tuple[np.ndarray, int]:
        """Slots with the newest values of the lookups' rows, and how many places are lent otherwise.

        The cache must be paused; afterwards `cache.give_back(keep)` with the second value.
        """
        slots, keep = self.where(lookups, step), self.cache.lent
        missing = np.flatnonzero(slots < 0)
        if missing.size:  # places are for reading only, so duplicates may have one each
            slots[missing] = self.cache.borrow(lookups.rows[missing])
        return slots, keep

    def where(self, lookups: Lookups, step: Step | None) -> np.ndarray:
        """Slots with the newest values of the lookups' rows; -1: only in the store.  Paused only."""
        if self.resident:
            return lookups.rows
        if step is not None and step.batches == 1:
            for i, announced in enumerate(step.announced):
                if announced.same_ids(lookups):
                    return step.announced_slots(i)
        return self._find(lookups.rows)

    def release(self) -> None:
        """End the loans for training: dirty rows go home, transfers go on.  And whatever else Ctrl-C has left lent or
        paused.  Outside of every pause only."""
        if self.holding or self.cache.lent:
            with interrupt_later():  # halfway, updates of lent rows would be lost
                try:
                    with self.cache.pause():
                        self.cache.records.fence()
                        self.cache.give_back()
                finally:
                    self.holding = False
        self.cache.let_go_all(self)

    def _find(self, rows: np.ndarray) -> np.ndarray:
        """Where `rows` are on the device now, int32; -1: only in the store.  Paused only.

        The planner's map is ahead by the pending plans, so they are undone, newest first.
        """
        with self._planning:
            slots = self.planner.slots_of(rows).astype(np.int32)
            for plan in reversed(self.pending):
                slots[np.isin(rows, plan.fill_rows)] = -1
                if plan.evict_rows.size:
                    order = np.argsort(plan.evict_rows)
                    at = np.minimum(np.searchsorted(plan.evict_rows[order], rows), order.size - 1)
                    hit = plan.evict_rows[order[at]] == rows
                    slots[hit] = plan.evict_slots[order[at[hit]]]
        lost = np.flatnonzero(slots < 0)
        if lost.size and self.holding:
            slots[lost] = self.cache.find_lent(rows[lost])
        return slots
