"""MIN(d), the fewest fills that a cache of this size can make, by `cdlrm.plan.MinCounter` (Belady 1966).

With d = 0 nothing overlaps: rows of a batch are copied after the batch before it.  With d = 1 they are copied while
that one computes, so its rows must stay, too.
"""

from __future__ import annotations

from cdlrm.plan import MinCounter

from .base import Moved, Uses


def moved(uses: Uses, slots: int, depth: int) -> Moved:
    counter = MinCounter(uses.rows, slots, depth, double=False)
    for rows in uses.batches:
        counter.add(rows)
    return Moved(counter.fills, counter.fills - min(slots, uses.rows))  # what is full stays full
