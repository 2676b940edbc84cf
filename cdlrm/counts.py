"""`Counts`: what a group did, on the batches that were trained.  What its cache moved besides is in `Cache.moves`."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .plan import MinCounter, Plan
from .plan.tables import tables_of

NO_TABLES = np.empty(0, np.int32)


class Ended(NamedTuple):
    """What is counted of a batch once it has ended; `seg_row`, `fill_rows`: its distinct and missing rows."""

    lookups: int
    seg_row: np.ndarray
    fill_rows: np.ndarray
    copied: int
    evicts: int
    written: int
    short: bool
    cache_rows: int


def ended(plan: Plan) -> Ended:
    """What is counted of an executed plan."""
    return Ended(
        plan.lookups, plan.seg_row, plan.fill_rows, plan.copied, int(plan.evict_rows.size), plan.written, plan.short,
        plan.cache_rows,
    )  # fmt: skip


@dataclass
class Counts:
    """Counters of one group since it was made; seconds are wall time of the stage that did the work."""

    steps: int = 0
    lookups: int = 0
    distinct: int = 0
    hits: int = 0
    fills: int = 0
    fills_copied: int = 0
    evicts: int = 0
    evicts_written: int = 0
    short_windows: int = 0
    unannounced: int = 0
    skipped_steps: int = 0
    seconds_plan: float = 0.0
    seconds_transfer: float = 0.0
    seconds_lookup: float = 0.0
    seconds_update: float = 0.0
    distinct_by_table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    fills_by_table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, batch: Ended) -> None:
        distinct, fills = int(batch.seg_row.size), int(batch.fill_rows.size)
        self.lookups += batch.lookups
        self.distinct += distinct
        self.hits += distinct - fills
        self.fills += fills
        self.fills_copied += batch.copied
        self.evicts += batch.evicts
        self.evicts_written += batch.written
        self.short_windows += batch.short


class Tally:
    """Counts a group's batches once they have ended, also by table, and what `minimum` would have filled for them
    (None: nothing moves).  Called by any thread."""

    def __init__(self, counts: Counts, bases: np.ndarray, minimum: MinCounter | None) -> None:
        self.counts, self.bases, self.minimum = counts, bases, minimum
        self._ended: deque[Ended] = deque()
        self._counting = threading.Lock()

    def add(self, plan: Plan) -> None:
        """The batch of an executed plan has ended; `count` takes the time."""
        self._ended.append(ended(plan))

    def count(self) -> None:
        """Count the batches that have ended."""
        with self._counting:
            while self._ended:
                batch = self._ended.popleft()
                self.counts.add(batch)
                self.counts.distinct_by_table += rows_by_table(batch.seg_row, self.bases)
                self.counts.fills_by_table += rows_by_table(batch.fill_rows, self.bases)
                if self.minimum is not None:
                    self.minimum.resize(batch.cache_rows)
                    self.minimum.add(batch.seg_row)


def rows_by_table(rows: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """How many of the group rows `rows int [n]` each table has, int64 [tables]; `bases` of the group."""
    counts = np.zeros(len(bases) - 1, np.int64)
    tables_of(rows, bases, NO_TABLES, counts)
    return counts
