"""`Counts`: what a group did, on the batches that were trained.  What its cache moved besides is in `Cache.moves`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .plan import Plan


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
