"""LFU: the row that was looked up least often goes first, counted since the beginning, also while it is not cached.

FBGEMM's `CacheAlgorithm.LFU` keeps such counters for all rows.  Of two rows with equal counts, the one not used for
longer goes.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Uses, run
from .lru import Lru


class Lfu(Lru):
    def __init__(self, uses: Uses, slots: int) -> None:
        super().__init__(uses, slots)
        self.count = np.zeros(uses.rows, np.int64)
        self.all_uses = sum(rows.size for rows in uses.batches)

    def rank(self, rows: np.ndarray, batch: int) -> np.ndarray:
        return self.count[rows] * self.all_uses + self.last[rows]

    def used(self, batch: int, missing: np.ndarray) -> None:
        self.count[self.uses.batches[batch]] += self.uses.counts[batch]
        super().used(batch, missing)


def moved(uses: Uses, slots: int) -> Moved:
    return run(Lfu(uses, slots))
