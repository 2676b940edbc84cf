"""This library: `cdlrm.plan.Planner` itself, as the pipeline drives it (prefetch depth 1)."""

from __future__ import annotations

import math

from cdlrm.plan import Planner

from .base import Moved, Uses

BATCHES_PER_SHARE, LARGEST_HORIZON = 24, 1024


def auto_horizon(uses: Uses, slots: int) -> int:
    """What `lookahead(horizon="auto")` begins with: 24 batches for each time that the cache holds the first one."""
    return min(LARGEST_HORIZON, max(1, math.ceil(BATCHES_PER_SHARE * slots / uses.batches[0].size)))


def moved(uses: Uses, slots: int, horizon: int, depth: int = 1) -> Moved:
    planner = Planner(uses.rows, slots, depth)
    fills = evicts = read = 0
    for _ in uses.batches:
        while read < len(uses.batches) and planner.window <= max(horizon, depth):
            planner.scan(uses.batches[read])
            read += 1
        plan = planner.plan()
        fills += plan.fill_rows.size
        evicts += plan.evict_rows.size
    said: dict[str, object] = {"horizon": horizon}
    if planner.cache_rows != slots:
        said["grown_to_rows"] = planner.cache_rows
    return Moved(int(fills), int(evicts), said)
