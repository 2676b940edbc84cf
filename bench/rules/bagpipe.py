"""BagPipe: a row stays in the cache until its time to live ends, the last batch of the look-ahead that uses it.

Source: Agarwal et al., "Bagpipe: Accelerating Deep Recommendation Model Training", SOSP 2023, arXiv 2202.12429, and
uw-mad-dash/bagpipe, BagPipe/oraclecacher.py: a row of batch j that one of the next L batches uses is kept, every
other one is written back after batch j.  No victim is ever chosen: L alone decides how many rows the cache must
hold.  Here L is the longest (up to 512) whose rows fit the cache at every batch, found with the whole trace known:
more than a run can know.  `depth` 1: the rows that the next batch lacks must fit, too, as BagPipe fetches them while
the batch computes (where even L = 0 does not fit so, `holds_broken`); 0: nothing overlaps.
"""

from __future__ import annotations

import numpy as np

from .base import NEVER, Moved, Uses

LONGEST = 512


def held(uses: Uses, following: list[np.ndarray], window: int, depth: int = 0) -> np.ndarray:
    """Rows in the cache at each batch, int64 [B], when rows stay that are used again within `window` batches."""
    batches = len(uses.batches)
    change, arrived = np.zeros(batches + 1, np.int64), np.zeros(batches, np.int64)
    for j, (rows, nxt) in enumerate(zip(uses.batches, following, strict=True)):
        kept = nxt[(nxt != NEVER) & (nxt - j <= window)]
        change[j] += rows.size  # the batch's own rows ...
        change[j + 1] += kept.size - rows.size  # ... of which those stay ...
        again = np.bincount(kept, minlength=batches)
        change[:batches] -= again  # ... until they are a batch's own again
        arrived += again
    content = np.cumsum(change[:batches])
    if depth:
        own = np.array([rows.size for rows in uses.batches])
        content[:-1] += own[1:] - arrived[1:]  # what the next batch lacks
    return content


def with_window(uses: Uses, following: list[np.ndarray], window: int) -> Moved:
    """At the end, only the last batch's rows are cached."""
    total = sum(rows.size for rows in uses.batches)
    hits = sum(int(((n != NEVER) & (n - j <= window)).sum()) for j, n in enumerate(following))
    fills = total - hits
    return Moved(fills, fills - uses.batches[-1].size, {"window": window})


def moved(uses: Uses, slots: int, depth: int = 1) -> Moved:
    following = uses.following()
    low, high = 0, min(LONGEST, len(uses.batches))  # 0: batches one by one
    while low < high:  # more rows stay with every batch more
        middle = (low + high + 1) // 2
        if int(held(uses, following, middle, depth).max()) <= slots:
            low = middle
        else:
            high = middle - 1
    found = with_window(uses, following, low)
    if int(held(uses, following, low, depth).max()) > slots:
        found.said["holds_broken"] = True
    return found
