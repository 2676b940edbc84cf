"""`Uses`: the distinct rows of every batch, with their previous and next uses, shared by all simulated caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import kernels as k
from .auto import AutoWindow
from .trace import BatchRows

FAR_FUTURE = 2**62


def grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    """`array` with at least `size` elements along its first axis, new ones = `fill`; at least doubled."""
    if array.shape[0] >= size:
        return array
    out = np.full((max(size, 2 * array.shape[0]), *array.shape[1:]), fill, array.dtype)
    out[: array.shape[0]] = array
    return out


@dataclass
class Split:
    """The entries of a stretch ordered by shard: those of batch b of shard s are `lo[s, b] .. hi[s, b]`."""

    lo: np.ndarray
    hi: np.ndarray
    row: np.ndarray
    following: np.ndarray
    need: np.ndarray  # int64 [B]: slots a shard that the batches up to each have needed


@dataclass
class Stretch:
    """Batches `begin .. end - 1`, to be simulated now.  Arrays by batch start at `first_batch`."""

    begin: int
    end: int
    first_batch: int
    start: np.ndarray  # int64 [B + 1]
    row: np.ndarray  # int32 [E]
    following: np.ndarray  # int32 [E]
    before: list[np.ndarray]  # int32 [U] of each batch
    first: np.ndarray  # int32 [rows]
    last_seen: np.ndarray  # int64 [B]
    rows: int  # that were used so far
    table: np.ndarray  # int32 [rows]
    splits: dict[int, Split] = field(default_factory=dict)


@dataclass
class _Batch:
    row: np.ndarray
    before: np.ndarray
    epoch: int


class Uses:
    """Takes batches (`add`) and gives out stretches (`take`) of which all next uses within `horizon`, and within each
    of `windows`, are known.

    Memory: 8 bytes a table row, 16 a row that was used, 12 a distinct row of the batches in hand.
    """

    def __init__(
        self, table_rows: list[int], horizon: int, depth: int, shards: set[int], windows: Sequence[AutoWindow] = ()
    ) -> None:
        self.horizon, self.depth, self.windows = horizon, depth, windows
        self.bases = np.cumsum(table_rows)
        self.lookups = self.distinct = self.scanned = 0
        self.known = 0  # rows that were used
        self.distinct_by_table = np.zeros(len(table_rows), np.int64)
        self._meta = np.zeros((int(self.bases[-1]), 2), np.int32)
        self._row_of = np.zeros(1024, np.int64)
        self._table = np.zeros(1024, np.int32)
        self._first = np.full(1024, -1, np.int32)
        self._shard = {s: np.zeros(1024, np.uint8) for s in shards}
        self._need = dict.fromkeys(shards | {1}, 0)
        self._numbered = 0  # rows whose table and shard are known
        self._batches: deque[_Batch] = deque()
        self._first_batch = 0  # of `_batches`
        self._taken = 0
        self.newest_lookups = 0  # since the last stretch

    def add(self, batch: BatchRows) -> None:
        """Deduplicate one more batch."""
        rows = batch.rows
        self._row_of = grown(self._row_of, self.known + rows.size, 0)
        row, before = np.empty(rows.size, np.int32), np.empty(rows.size, np.int32)
        u, self.known = k.first_uses(rows, self.scanned, self._meta, self.known, self._row_of, row, before)
        self._batches.append(_Batch(row[:u].copy(), before[:u].copy(), batch.epoch))
        self.scanned += 1
        self.lookups += int(rows.size)
        self.newest_lookups += int(rows.size)
        self.distinct += u
        for window in self.windows:
            window.add(u, batch.nbytes, batch.epoch)

    @property
    def untaken(self) -> int:
        """Batches that could be simulated now while the trace goes on."""
        return max(0, self._known - self._taken)

    @property
    def _known(self) -> int:
        """Batches of which all that a window shows is known."""
        return min([self.scanned - self.horizon, *(window.known for window in self.windows)])

    def take(self, ended: bool) -> Stretch | None:
        """The batches that can be simulated now (`ended`: all that are left); None: there are none."""
        for window in self.windows if ended else ():
            window.end()
        begin, end = self._taken, self.scanned if ended else max(self._taken, self._known)
        if begin == end:
            return None
        while self._first_batch < begin - self.depth - 1:
            self._batches.popleft()
            self._first_batch += 1
        self._taken = end
        self.newest_lookups = 0
        self._number_rows()
        start = np.concatenate([[0], np.cumsum([b.row.size for b in self._batches])]).astype(np.int64)
        row = np.concatenate([b.row for b in self._batches])
        following = np.empty(row.size, np.int32)
        self._first = grown(self._first, self.known, -1)
        k.link(self._first_batch, begin, start, row, following, self._first)
        before = [self._batches[b - self._first_batch].before for b in range(begin, end)]
        lo, hi = start[begin - self._first_batch], start[end - self._first_batch]
        self.distinct_by_table += np.bincount(self._table[row[lo:hi]], minlength=self.distinct_by_table.size)
        stretch = Stretch(
            begin, end, self._first_batch, start, row, following, before, self._first, self._last_seen(), self.known,
            self._table,
        )  # fmt: skip
        for shards in self._need:
            stretch.splits[shards] = self._split(shards, stretch)
        return stretch

    def touched_by_table(self) -> np.ndarray:
        """Rows of each table that were used in what was taken, int64 [tables]."""
        return np.bincount(self._table[: self._numbered], minlength=self.distinct_by_table.size)

    def _number_rows(self) -> None:
        """Table and shard of the rows that are new."""
        lo, hi = self._numbered, self.known
        new = self._row_of[lo:hi]
        self._table = grown(self._table, hi, 0)
        self._table[lo:hi] = np.searchsorted(self.bases, new, side="right")
        for shards in self._shard:
            self._shard[shards] = grown(self._shard[shards], hi, 0)
            self._shard[shards][lo:hi] = _shard_numbers(new, shards)
        self._numbered = hi

    def _last_seen(self) -> np.ndarray:
        """Per batch the end of its epoch, as far as it is known."""
        epochs = np.array([b.epoch for b in self._batches])
        ends = np.flatnonzero(np.diff(epochs)) + self._first_batch
        position = np.searchsorted(ends, np.arange(self._first_batch, self._first_batch + epochs.size))
        return np.append(ends, FAR_FUTURE)[position].astype(np.int64)

    def _split(self, shards: int, stretch: Stretch) -> Split:
        batches = stretch.start.size - 1
        if shards == 1:
            lo, hi = stretch.start[None, :-1], stretch.start[None, 1:]
            row, following = stretch.row, stretch.following
        else:
            lo, hi = np.empty((shards, batches), np.int64), np.empty((shards, batches), np.int64)
            row, following = np.empty_like(stretch.row), np.empty_like(stretch.following)
            k.split(
                shards, stretch.start, stretch.row, stretch.following, self._shard[shards], row, following, lo, hi
            )  # fmt: skip
        need = (hi - lo).max(axis=0)
        at = slice(stretch.begin - stretch.first_batch, stretch.end - stretch.first_batch)
        need[at] = np.maximum.accumulate(np.maximum(need[at], self._need[shards]))
        self._need[shards] = int(need[at][-1])
        return Split(lo, hi, row, following, need)


def _shard_numbers(rows: np.ndarray, shards: int) -> np.ndarray:
    """`cdlrm.plan.kernels.shard_of` of each row, uint8."""
    if shards == 1:
        return np.zeros(rows.size, np.uint8)
    x = (rows >> 3).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (((x >> np.uint64(40)) * np.uint64(shards)) >> np.uint64(24)).astype(np.uint8)
