"""LRU: the row that was not used for the longest time goes first.

The rule of FBGEMM's and TorchRec's caches in host-managed memory (`CacheAlgorithm.LRU`), there by sets of 32 ways;
here over the whole cache, which can only help it.  Among rows of one batch, the one looked up first goes first.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Ranked, Uses, run


class Lru(Ranked):
    def __init__(self, uses: Uses, slots: int) -> None:
        super().__init__(uses, slots)
        self.time = 0
        self.last = np.zeros(uses.rows, np.int64)

    def rank(self, rows: np.ndarray, batch: int) -> np.ndarray:
        return self.last[rows]

    def used(self, batch: int, missing: np.ndarray) -> None:
        rows = self.uses.batches[batch]
        self.last[rows] = np.arange(self.time, self.time + rows.size)
        self.time += rows.size


def moved(uses: Uses, slots: int) -> Moved:
    return run(Lru(uses, slots))
