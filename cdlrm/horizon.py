"""`HorizonChooser`: `horizon="auto"`, from the cache's size, what batches need, and a limit in bytes.

A longer horizon stops helping when the planner sees as far as a row can stay in the cache.  12 batches for each
time that the cache holds a batch's distinct rows keep fills within 2 % of MIN(1) on Zipf 0.8-1.2, a real click log
and a trace with temporal reuse (bench/policies.py), whatever rule decides beyond the horizon.

Rule 2: what is chosen depends on the batches' ids and sizes and on settings alone, and changes at fixed batches:
after the first, and after every PERIOD batches by the mean of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .plan import Planner

BATCHES_PER_SHARE = 12
LARGEST_HORIZON = 512
LEAST_HORIZON = 8  # so that a loader may be late now and then
PERIOD = 64


def horizon_for(cache_rows: float, distinct: float) -> int:
    """Batches to look ahead with a cache of `cache_rows`, where a batch has `distinct` distinct rows."""
    return min(LARGEST_HORIZON, math.ceil(BATCHES_PER_SHARE * cache_rows / max(distinct, 1)))


class HorizonChooser:
    """Counts scanned batches and says what horizon suits them; `why` is a sentence about the newest choice.

    `window_bytes`: host memory that the batches of a window may take.
    """

    def __init__(self, planners: Sequence[Planner], prefetch_depth: int, window_bytes: int) -> None:
        self.planners, self.prefetch_depth, self.window_bytes = list(planners), prefetch_depth, window_bytes
        self.why = ""
        self.batches = self._counted = self._nbytes = 0
        self._distinct = [0] * len(self.planners)

    def scanned(self, nbytes: int) -> int | None:
        """Count the batch that was scanned last, of `nbytes`; a horizon when it is time to choose."""
        self.batches += 1
        self._counted += 1
        self._nbytes += nbytes
        self._distinct = [n + p.newest_distinct for n, p in zip(self._distinct, self.planners, strict=True)]
        if self.batches != 1 and self.batches % PERIOD != 0:
            return None
        horizon = self._choose()
        self._counted = self._nbytes = 0
        self._distinct = [0] * len(self.planners)
        return horizon

    def _choose(self) -> int:
        needs = [
            (horizon_for(p.cache_rows, n / self._counted), p.cache_rows, n / self._counted)
            for p, n in zip(self.planners, self._distinct, strict=True)
            if p.cache_rows < p.num_rows  # the others never evict
        ]
        wanted, rows, distinct = max(needs, default=(0, 0, 0.0))
        fitting = self.window_bytes * self._counted // max(self._nbytes, 1)
        horizon = max(min(max(wanted, LEAST_HORIZON), fitting), self.prefetch_depth)
        if not needs:
            self.why = f"horizon: {horizon} batches, because all rows fit the cache."
            return horizon
        self.why = (
            f"horizon: {horizon} batches, {BATCHES_PER_SHARE} (at most {LARGEST_HORIZON} in all) for each time that "
            f"the cache of {rows:,} rows holds the {distinct:,.0f} distinct rows of a batch"
        )
        if fitting < wanted:
            self.why += f", limited from {wanted} by the {self.window_bytes / 2**20:,.0f} MiB for batches read ahead"
        self.why += "."
        return horizon
