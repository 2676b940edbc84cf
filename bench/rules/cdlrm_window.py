"""cDLRM's published code: the distinct rows of a whole window are loaded at once; victims are random.

Source: lkp411/cDLRM, cache_manager.py (`process_batch_slice`) and main_no_ddp.py (`CacheEmbeddings`), for
Balasubramanian et al., RecSys 2021.  Before each window of W batches the window's rows that are not cached replace
random rows that the window does not use.  Window rows without a place are fetched for each batch that uses them
(the code's auxiliary table, room beside the cache) and written back after it: the code's flag
`--evict-victim-cache`; without it their updates are lost.  The code's 4-way sets are left out here, in its favour,
and of several W the one that moves the fewest rows is taken.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Uses

WINDOWS = (1, 2, 4, 8, 16, 32)


def with_window(uses: Uses, slots: int, window: int, seed: int = 0) -> Moved:
    rng = np.random.default_rng(seed)
    cached = np.zeros(uses.rows, bool)
    held = fills = evicts = 0
    for begin in range(0, len(uses.batches), window):
        mine = uses.batches[begin : begin + window]
        wanted = np.unique(np.concatenate(mine))
        missing = wanted[~cached[wanted]]
        cached[wanted] = False  # for a moment: what is left are the possible victims
        others = np.flatnonzero(cached)
        kept = wanted.size - missing.size
        loaded = rng.permutation(missing)[: slots - kept]
        excess = max(0, held + loaded.size - slots)
        cached[rng.permutation(others)[:excess]] = False
        cached[np.setdiff1d(wanted, missing, assume_unique=True)] = True
        cached[loaded] = True
        held += loaded.size - excess
        fills += loaded.size
        evicts += excess
        beside = sum(int((~cached[rows]).sum()) for rows in mine)
        fills += beside
        evicts += beside
    return Moved(fills, evicts, {"window": window})


def moved(uses: Uses, slots: int) -> Moved:
    return min((with_window(uses, slots, window) for window in WINDOWS), key=lambda found: found.fills)
