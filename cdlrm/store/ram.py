"""`RamStore`: all records of a group in host memory.

A row's weights and optimizer state are two rows of two arrays and always move together.  A row that
was never trained is not stored anywhere: its value is the initial one, a function of (seed, table,
row, column) alone, and is generated where it is needed.  The arrays are allocated without being
touched, so memory is used only by rows that were written.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from ..driver.base import Driver
from ..driver.pinned import host_memory
from ..errors import PinError
from ..initial import Initializer
from . import bits

PIECE_ROWS = 1 << 16


class _Lazy:
    """A float32 array in memory of its own that is used page by page as it is written.

    NumPy asks for huge pages for large arrays, and then one scattered row costs 2 MiB.  `pinned`: a device will
    pin it, all at once.
    """

    def __init__(self, shape: tuple[int, int], pinned: bool) -> None:
        count = shape[0] * shape[1]
        if pinned:
            try:
                self.array = host_memory(4 * count).view(np.float32).reshape(shape)
            except PinError as error:
                raise MemoryError(str(error)) from error
            return
        try:
            self._map = mmap.mmap(-1, max(4 * count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{4 * count} bytes of memory: {error}") from error
        self.array = np.frombuffer(self._map, np.float32, count).reshape(shape)

    def use_huge_pages(self) -> None:
        """All of it is about to be written."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them; only speed is lost
                self._map.madvise(mmap.MADV_HUGEPAGE)


class RamStore:
    """Home of the records of `num_rows` rows: weights float32 [N, D] and state float32 [N, S], as two arrays or
    (where the driver wants it) as two views of one whose rows are padded records.

    `trained` and `changed` are one bit a row: ever written by training (or loading), and written since
    `clear_changed`.  `changed` is set before a record is written, so that an interrupt leaves none unmarked.
    """

    kind = "ram"

    def __init__(
        self, num_rows: int, dim: int, state_width: int, initial_state: float, initializer: Initializer, driver: Driver
    ) -> None:
        self.num_rows, self.dim, self.state_width = num_rows, dim, state_width
        self.initial_state = np.float32(initial_state)
        self.initializer = initializer
        self.driver = driver
        width = driver.padded_width(dim, state_width)
        widths = [width] if width else [dim, state_width]
        self._memory = [_Lazy((num_rows, each), driver.pins_tables) for each in widths]
        if width:
            records = self._memory[0].array
            self.weight, self.state = records[:, :dim], records[:, dim : dim + state_width]
        else:
            self.weight, self.state = (memory.array for memory in self._memory)
        self.trained = np.zeros(-(-num_rows // 8), np.uint8)
        self.changed = np.zeros(-(-num_rows // 8), np.uint8)
        self.writes = 0
        self.saved: dict[str, Any] = {}
        self._complete = False

    @property
    def record_bytes(self) -> int:
        return 4 * (self.dim + self.state_width)

    def memory(self) -> list[np.ndarray]:
        """The arrays that hold everything, float32: weights and state, or (padded records) one."""
        return [memory.array for memory in self._memory]

    def read(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> int:
        """Copy the records of `rows int64 [n]` to `weight[index]`, `state[index]`; returns how many
        were stored (the others were generated)."""
        if self._complete:
            stored, fresh = np.arange(rows.size), np.empty(0, np.int64)
        else:
            stored, fresh = bits.positions(self.trained, rows)
        if stored.size:
            self.driver.host.copy_rows(weight, index[stored], self.weight, rows[stored])
            if self.state_width:
                self.driver.host.copy_rows(state, index[stored], self.state, rows[stored])
        if fresh.size:
            self.initializer.rows(weight, index[fresh], rows[fresh])
            if self.state_width:
                state[index[fresh]] = self.initial_state
        return int(stored.size)

    def write(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> None:
        """Store `weight[index]`, `state[index]` as the records of the distinct `rows int64 [n]`."""
        self._mark_changed(rows)
        self.driver.host.copy_rows(self.weight, rows, weight, index)
        if self.state_width:
            self.driver.host.copy_rows(self.state, rows, state, index)
        bits.mark(self.trained, rows)

    def mark(self, rows: np.ndarray) -> None:
        """The records of `rows` are written in place."""
        self._mark_changed(rows)
        bits.mark(self.trained, rows)

    def _mark_changed(self, rows: np.ndarray) -> None:
        self.writes += 1
        bits.mark(self.changed, rows)

    def make_resident(self) -> None:
        """Generate every row that was never trained, so that `weight` and `state` hold the whole table."""
        if self._complete:
            return
        for memory in self._memory:
            memory.use_huge_pages()
        for lo in range(0, self.num_rows, PIECE_ROWS):
            self._complete_range(lo, min(lo + PIECE_ROWS, self.num_rows))
        self._complete = True

    def _complete_range(self, lo: int, hi: int) -> None:
        fresh = bits.clear_rows(self.trained, lo, hi)
        self.initializer.rows(self.weight, fresh, fresh)
        if self.state_width:
            self.state[fresh] = self.initial_state

    def get(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of weights [hi-lo, D] and state [hi-lo, S] of the rows [lo, hi)."""
        weight = np.empty((hi - lo, self.dim), np.float32)
        state = np.empty((hi - lo, self.state_width), np.float32)
        for at in range(lo, hi, PIECE_ROWS):
            stop = min(at + PIECE_ROWS, hi)
            rows = np.arange(at, stop, dtype=np.int64)
            self.read(rows, weight, state, (rows - lo).astype(np.int32))
        return weight, state

    def put(self, lo: int, weight: np.ndarray | None, state: np.ndarray | None) -> None:
        """Replace weights and/or state of the rows from `lo` on (float32, as `get` returns them)."""
        given = weight if weight is not None else state
        if given is None or not given.shape[0]:
            return
        hi = lo + given.shape[0]
        for at in range(lo, hi, PIECE_ROWS):
            stop = min(at + PIECE_ROWS, hi)
            if not self._complete:
                self._complete_range(at, stop)
            self.mark(np.arange(at, stop, dtype=np.int64))
            if weight is not None:
                self.weight[at:stop] = weight[at - lo : stop - lo]
            if state is not None and self.state_width:
                self.state[at:stop] = state[at - lo : stop - lo]

    def remember(self, key: str, value: object) -> None:
        """Nothing outlives the process."""

    def clear_changed(self, base: Any) -> None:
        """The checkpoint `base` (None: no known one) has every record as it is now."""
        self.saved.pop("base", None)  # whatever interrupts this, bits are never relative to another checkpoint
        self.changed[:] = 0
        self.saved["base"] = base

    def flush(self) -> None:
        """Memory is as durable as it gets."""

    def close(self) -> None:
        """Nothing to release before the arrays themselves."""
