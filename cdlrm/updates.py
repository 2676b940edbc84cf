"""`Updates`: the optimizer's formula on rows of a group, and how often the device skipped it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from .cache import Cache
from .counts import Counts
from .driver.base import Driver, Segments, Update, Verdict
from .optim import Optimizer
from .plan import Plan
from .step import Call
from .store import RamStore, Store

if TYPE_CHECKING:
    from .driver.cpu import CpuDriver


class Updates:
    """Of the records in `cache`, or, where it has no slots (they are `in_place`), in `store`."""

    def __init__(
        self, optimizer: Optimizer, driver: Driver, cache: Cache, store: Store, counts: Counts, *, resident: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        self.optimizer, self.cache, self.store, self.counts = optimizer, cache, store, counts
        self.resident, self.in_place = resident, in_place
        self.host: CpuDriver = driver.host
        self._made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by the module whose calls took part
        # By update, what the device has not told yet, and whose calls took part.
        self._undecided: list[tuple[list[Verdict], WeakSet[Any]]] = []
        self._stamps: np.ndarray | None = None

    def run(
        self, calls: list[Call], lr: float, plan: Plan | None, slots: np.ndarray | None = None,
        verdicts: Sequence[Verdict] = (),
    ) -> None:  # fmt: skip
        """One update of every row of `calls`, in place.

        `plan`: the plan of exactly these calls; otherwise the rows are at `slots` (None: where the calls say).
        """
        owners = {call.owner for call in calls if call.owner is not None}
        for owner in owners:
            self._made[owner] = self.made(owner) + 1
        waiting = [verdict for verdict in verdicts if verdict.known is None and not verdict.raising]
        if waiting:
            self._undecided.append((waiting, WeakSet(owners)))
        started = time.perf_counter()
        if plan is not None:
            segments = Segments(plan.seg_slot, plan.seg_start, plan.seg_lookup, plan.seg_row)
        else:
            if slots is None:
                slots = calls[0].slots if len(calls) == 1 else np.concatenate([call.slots for call in calls])
            segments = self.host.build_segments(slots, self._scratch())
            segments.seg_row = segments.seg_slot if self.resident else self.cache.slot_row[segments.seg_slot]
        if self.in_place:  # before: an interrupt behind the update must not leave rows unmarked
            assert isinstance(self.store, RamStore)
            self.store.mark(segments.seg_slot)
        else:
            self.cache.mark_dirty(segments.seg_slot)
        self.cache.records.update(Update(self.optimizer, lr, calls, segments, plan, list(verdicts)))
        self.counts.seconds_update += time.perf_counter() - started

    def made(self, module: Any) -> int:
        """Updates so far in which calls of `module` took part, without those of which the device has told that it
        skipped them."""
        return self._made.get(module, 0)

    def _scratch(self) -> np.ndarray:
        slots = self.store.num_rows if self.in_place else int(self.cache.slot_row.size)
        if self._stamps is None or self._stamps.size < slots + 1:
            self._stamps = self.host.new_stamps(slots)
        return self._stamps

    # --- what the device skipped ---

    def decide(self) -> None:
        """Count the updates that the device skipped, once it has told."""
        updates, self._undecided = self._undecided, []
        for verdicts, owners in updates:
            if any(verdict.known is None for verdict in verdicts):
                self._undecided.append((verdicts, owners))
            elif any(verdict.known is False for verdict in verdicts):
                self.counts.skipped_steps += 1
                for owner in owners:
                    self._made[owner] -= 1

    def wait(self) -> None:
        """Until the device has told of all updates until now."""
        for verdict in [verdict for verdicts, _ in self._undecided for verdict in verdicts]:
            bool(verdict)
