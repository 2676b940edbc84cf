"""`AutoWindow`: how far the planner sees at every batch with `horizon="auto"`."""

from __future__ import annotations

from collections import deque

from ..ahead import WINDOW_BYTES
from ..horizon import HorizonChooser
from ..plan import shards_for


class AutoWindow:
    """Chooses horizons as `cdlrm.runtime` does with its default `window_bytes`, for one cache of `cache_rows`.

    `far`: for each batch that could be planned and was not taken yet, the newest batch that was scanned then;
    `known`: how many there were in all.  A loop over the data is an epoch: windows end with it and choices start
    again.  A cache that grows is looked ahead for as if it had not grown.
    """

    def __init__(self, num_rows: int, cache_rows: int, depth: int) -> None:
        shards = shards_for(cache_rows)
        self.num_rows, self.cache_rows, self.depth = num_rows, -(-cache_rows // shards) * shards, depth
        self.newest_distinct = 0
        self.horizon = depth
        self.far: deque[int] = deque()
        self.scanned = self.known = 0
        self._sizes: deque[int] = deque()  # of the batches that are scanned and not planned
        self._bytes = 0
        self._epoch: int | None = None

    def add(self, distinct: int, nbytes: int, epoch: int) -> None:
        """One more batch, of `distinct` rows and `nbytes` of host memory."""
        if epoch != self._epoch:
            self.end()
            self._epoch = epoch
            self._chooser = HorizonChooser([self], self.depth, WINDOW_BYTES)
        self.newest_distinct = distinct
        horizon = self._chooser.scanned(nbytes)
        if horizon is not None:
            self.horizon = horizon
        self._sizes.append(nbytes)
        self._bytes += nbytes
        self.scanned += 1
        while len(self._sizes) > self.horizon or (self._sizes and self._bytes >= WINDOW_BYTES):
            self._plan()

    def end(self) -> None:
        """No more batches come in this epoch."""
        while self._sizes:
            self._plan()

    def _plan(self) -> None:
        self._bytes -= self._sizes.popleft()
        self.far.append(self.scanned - 1)
        self.known += 1
