"""ScratchPipe: LRU where the rows of the 3 batches before and the 2 after the planned one are pinned.

Source: Kwon and Rhu, "Training Personalized Recommendation Systems from (GPU) Scratch: Look Forward not Backwards",
ISCA 2022, arXiv 2205.04702: six stages (load, plan, collect, exchange, insert, train) work on six batches at a time,
and the plan stage may not evict what one of them uses.  (Only the abstract could be looked up for this file; that
the six are 3 before, the planned one and 2 after was not.)  A cache that does not hold six batches is too small for
it; here the pins then give way, batches before first, and `pins_broken` counts how many rows lost theirs.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Uses, run
from .lru import Lru

BEFORE, AFTER = 3, 2


class ScratchPipe(Lru):
    def __init__(self, uses: Uses, slots: int) -> None:
        super().__init__(uses, slots)
        self.all_uses = sum(rows.size for rows in uses.batches)
        self.last_batch = np.full(uses.rows, -1 - BEFORE, np.int64)
        self.broken = 0

    def rank(self, rows: np.ndarray, batch: int) -> np.ndarray:
        pinned = (self.last_batch[rows] >= batch - BEFORE).astype(np.int64)
        coming = np.zeros(self.uses.rows, bool)
        for later in self.uses.batches[batch + 1 : batch + 1 + AFTER]:
            coming[later] = True
        pinned[coming[rows]] = 2
        self._free = int((pinned == 0).sum())
        return pinned * self.all_uses + self.last[rows]

    def victims(self, count: int) -> None:
        self.broken += max(0, count - self._free)

    def used(self, batch: int, missing: np.ndarray) -> None:
        self.last_batch[self.uses.batches[batch]] = batch
        super().used(batch, missing)

    def said(self) -> dict[str, object]:
        return {"pins_broken": self.broken}


def moved(uses: Uses, slots: int) -> Moved:
    return run(ScratchPipe(uses, slots))
