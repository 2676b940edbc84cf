"""ColossalAI, `EvictionStrategy.DATASET`: rows are ordered once by their frequency; the rarest cached row goes first.

Source: hpcaitech/ColossalAI, cache_mgr.py (`reorder`, `_find_evict_gpu_idxs`); Fang et al., "A Frequency-aware
Software Cache for Large Recommendation System Embeddings", arXiv 2208.05321.  The frequencies are those of the whole
trace, known before it begins: more than it can know of new data.  Its preload is left out, as in colossal_lfu.py.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Ranked, Uses, run


class StaticFrequency(Ranked):
    def __init__(self, uses: Uses, slots: int) -> None:
        super().__init__(uses, slots)
        count = np.zeros(uses.rows, np.int64)
        for rows, times in zip(uses.batches, uses.counts, strict=True):
            count[rows] += times
        self.place = np.empty(uses.rows, np.int64)
        self.place[np.argsort(-count, kind="stable")] = np.arange(uses.rows)

    def rank(self, rows: np.ndarray, batch: int) -> np.ndarray:
        return -self.place[rows]


def moved(uses: Uses, slots: int) -> Moved:
    return run(StaticFrequency(uses, slots))
