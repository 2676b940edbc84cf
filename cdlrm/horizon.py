"""`HorizonChooser`: `horizon="auto"`, from the cache's size, what batches need, and a limit in bytes.

A longer horizon stops helping when the planner sees as far as a row can stay in the cache: 24 batches for each time
that the cache holds a batch's distinct rows.  Fills of LRU beyond the horizon, over MIN(1), by that factor, at the
worst of the caches of 4, 8, 16, 24 and 32 times a batch's distinct rows (bench/policies.py --enough --batches 1200):

    trace                                     batches      12      16      20      24
    Zipf 0.8, 1.05                              1,200   1.000   1.000   1.000   1.000
    Zipf 1.2                                    1,200   1.017   1.000   1.000   1.000
    a real click log                              625   1.014   1.000   1.000   1.000
    Zipf 1.05, 40 % redrawn from 16 batches     1,200   1.039   1.003   1.000   1.000
    the same                                    2,500   1.056   1.004   1.000   1.000
    the same, popularity drifting               1,200   1.043   1.023   1.009   1.000

The excess comes late, so a shorter trace shows less of it.  Each batch is scanned once whatever the horizon: planning
took 0.146, 0.157 and 0.156 ms a batch of 3,328 lookups with horizons of 192, 384 and 768 (CPU time, one core).

Rule 2: what is chosen depends on the batches' ids and sizes and on settings alone, and changes at fixed batches:
after the first, and after every PERIOD batches by the mean of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from .report import size

BATCHES_PER_SHARE = 24
LARGEST_HORIZON = 4096
LEAST_HORIZON = 8  # so that a loader may be late now and then
PERIOD = 64


def horizon_for(cache_rows: float, distinct: float) -> int:
    """Batches to look ahead with a cache of `cache_rows`, where a batch has `distinct` distinct rows."""
    return min(LARGEST_HORIZON, math.ceil(BATCHES_PER_SHARE * cache_rows / max(distinct, 1)))


class Scanner(Protocol):
    """What is asked of a `Planner`."""

    num_rows: int

    @property
    def cache_rows(self) -> int: ...

    @property
    def newest_distinct(self) -> int: ...


class HorizonChooser:
    """Counts scanned batches and says what horizon suits them; `why` is a sentence about the newest choice.

    `window_bytes`: host memory that the batches of a window may take.
    """

    def __init__(self, planners: Sequence[Scanner], prefetch_depth: int, window_bytes: int) -> None:
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
            self.why += f", limited from {wanted} by the {size(self.window_bytes)} for batches read ahead"
        self.why += "."
        return horizon
