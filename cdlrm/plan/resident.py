"""`ResidentPlanner`: plans for a group whose rows are all on the device: slot = row, nothing moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ..driver.base import Driver
from .plan import Plan

_NO_ROWS = np.empty(0, np.int64)
_NO_SLOTS = np.empty(0, np.int32)


class ResidentPlanner:
    """Same calls as `Planner`; only the segments are left to make."""

    def __init__(self, num_rows: int, driver: Driver) -> None:
        self.num_rows = self.cache_rows = num_rows
        self.prefetch_depth = 0
        self.planned = 0
        self._driver = driver
        self._stamps: np.ndarray | None = None
        self._waiting: deque[tuple[np.ndarray, Sequence[int]]] = deque()

    @property
    def scanned(self) -> int:
        return self.planned + len(self._waiting)

    @property
    def window(self) -> int:
        return len(self._waiting)

    @property
    def metadata_bytes(self) -> int:
        return 0 if self._stamps is None else int(self._stamps.nbytes)

    def scan(self, rows: np.ndarray, cuts: Sequence[int] = ()) -> int:
        """`cuts`: lookup numbers at which no row on the left occurs on the right."""
        self._waiting.append((rows, cuts))
        return self.scanned - 1

    def needs_victim(self) -> bool:
        return False

    def plan(self, hold: int = 0) -> Plan:
        del hold
        rows, cuts = self._waiting.popleft()
        if self._stamps is None:
            self._stamps = self._driver.host.new_stamps(self.num_rows)
        segments = self._driver.host.build_segments(rows, self._stamps, cuts)
        batch, self.planned = self.planned, self.planned + 1
        return Plan(
            batch, rows, segments.seg_slot, segments.seg_slot, segments.seg_start, segments.seg_lookup,
            _NO_ROWS, _NO_SLOTS, _NO_ROWS, _NO_SLOTS,
            wait_for=-1, cache_rows=self.num_rows, window=len(self._waiting),
        )  # fmt: skip

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def slot_rows(self) -> np.ndarray:
        return np.arange(self.num_rows)

    def reset(self, slot_rows: np.ndarray) -> None:
        del slot_rows
        self.planned = self.scanned
        self._waiting.clear()

    def check(self) -> None:
        """Nothing can be wrong: slot = row."""

    def close(self) -> None:
        """No thread to end."""
