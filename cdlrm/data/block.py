"""A block of a columnar file on its way to columns: a few columns at a time, by several threads.

A few columns are decoded by Arrow in one thread and converted by the same thread at once, while they are in its cache,
and only they are in memory twice. To let Arrow's own threads decode the whole block and convert it then is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from cdlrm.data import arrow
from cdlrm.data.columns import Columns
from cdlrm.data.pool import pooled

if TYPE_CHECKING:
    from cdlrm.data.columnar import ColumnarSource

__all__ = ["Block", "Readers"]


class Readers:
    """Opened files. A reader is used by one thread at a time, so a file may be open several times; a few stay open, so
    that footers are not read for every block. How to open one comes with each call: what belongs to the source and
    knew it would keep its files open until Python looks for cycles."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[tuple[str, Any]] = []  # used last: at the end
        self._lock = Lock()

    @contextmanager
    def of(self, file: str, open_file: Callable[[str], Any]) -> Iterator[Any]:
        with self._lock:
            at = next((i for i, (name, _) in enumerate(self._idle) if name == file), None)
            reader = None if at is None else self._idle.pop(at)[1]
        if reader is None:
            reader = open_file(file)
        yield reader  # an error: it is closed, not used again
        with self._lock:
            self._idle.append((file, reader))
            if len(self._idle) > self._most:
                del self._idle[0]


class Block:
    """Rows lo..hi-1 of a block, on the way from the file to columns. `convert` is to be called with each of the
    source's `parts`, in any order and thread; then everything is there. firsts: the first bad row, or -1, of label,
    dense and categorical columns."""

    def __init__(self, source: ColumnarSource, block: int, lo: int, hi: int | None) -> None:
        self._source, self._block, self._lo, self._hi = source, block, lo, hi
        self._lock = Lock()
        self._columns: Columns | None = None
        self.bad = np.zeros(0, np.uint8)
        self.firsts = [-1] * (1 + source.num_dense + len(source.sparse))

    @property
    def columns(self) -> Columns:
        assert self._columns is not None
        return self._columns

    def _room(self, rows: int) -> Columns:
        """Columns of so many rows, made by the first part that knows."""
        source = self._source
        with self._lock:
            if self._columns is None:
                self.bad = np.zeros(rows, np.uint8)
                dense = pooled((rows, source.num_dense), np.float64 if source.raw else np.float32)
                ids = pooled((len(source.sparse), rows), np.int64)
                self._columns = Columns(dense, np.empty(rows, np.float32), ids)
            return self._columns

    def convert(self, numbers: bool, first: int, last: int) -> None:
        """Labels and dense features, or not, and categorical features first..last-1."""
        source = self._source
        names = source.sparse[first:last]
        table = source.fetch(self._block, [source.label, *source.dense, *names] if numbers else names)
        if self._lo or self._hi is not None:
            table = table.slice(self._lo, None if self._hi is None else self._hi - self._lo)
        to = self._room(table.num_rows)
        if numbers:
            label = arrow.buffers_of(table.column(source.label), ids=False)
            self.firsts[0] = arrow.label_values(label, to.labels, self.bad)
            dense = [arrow.buffers_of(table.column(name), ids=False) for name in source.dense]
            missing = np.nan if source.raw else 0.0 if source.prepared and source.prepared.dense_ready else None
            self.firsts[1 : 1 + len(dense)] = arrow.dense_values(dense, to.dense, self.bad, missing)
        if names:
            ids = [arrow.buffers_of(table.column(name), ids=True, padding=source.padding) for name in names]
            bags, firsts = arrow.mapped_values(ids, source.id_maps[first:last], to.ids[first:last], self.bad)
            to.bags.update({first + f: bag for f, bag in bags.items()})
            at = 1 + len(source.dense)
            self.firsts[at + first : at + last] = firsts
