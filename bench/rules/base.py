"""What all rules work on, and the engine of the rules that rank rows by a number (the lowest goes first)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NEVER = np.iinfo(np.int64).max


@dataclass
class Uses:
    """A trace's distinct rows.  `batches`: of each batch, int64 in order of first lookup, numbered 0 .. `rows` - 1.
    `counts`: how often the batch looks each of them up."""

    batches: list[np.ndarray]
    counts: list[np.ndarray]
    rows: int

    @classmethod
    def of(cls, trace: Iterable[Sequence[int]]) -> Uses:
        """From the lookups of every batch, duplicates included."""
        numbers: dict[int, int] = {}
        batches, counts = [], []
        for lookups in trace:
            row, first, count = np.unique(np.asarray(lookups, np.int64), return_index=True, return_counts=True)
            order = np.argsort(first)
            found = [numbers.setdefault(int(r), len(numbers)) for r in row[order]]
            batches.append(np.array(found, np.int64))
            counts.append(count[order])
        return cls(batches, counts, len(numbers))

    def following(self) -> list[np.ndarray]:
        """Batch of the next use of each row of each batch (NEVER: none)."""
        newest = np.full(self.rows, NEVER)
        out = []
        for j in range(len(self.batches) - 1, -1, -1):
            out.append(newest[self.batches[j]])
            newest[self.batches[j]] = j
        return out[::-1]

    @property
    def largest(self) -> int:
        """Distinct rows of the largest batch: the smallest cache that works."""
        return max(rows.size for rows in self.batches)


@dataclass
class Moved:
    """Rows copied into the cache (`fills`) and back (`evicts`, before the trace ended); `said`: more to know."""

    fills: int
    evicts: int
    said: dict[str, object] = field(default_factory=dict)


class Ranked:
    """A rule that evicts the rows of the lowest `rank`, never those of the batch.  Derive and fill in."""

    def __init__(self, uses: Uses, slots: int) -> None:
        self.uses, self.slots = uses, slots

    def rank(self, rows: np.ndarray, batch: int) -> np.ndarray:
        """A number for each of the cached `rows` (none is of the batch); no two are equal."""
        raise NotImplementedError

    def victims(self, count: int) -> None:
        """So many of the rows ranked just now are evicted."""

    def used(self, batch: int, missing: np.ndarray) -> None:
        """The rows of the batch are in the cache; `missing bool` tells which were filled."""

    def said(self) -> dict[str, object]:
        return {}


def run(rule: Ranked) -> Moved:
    """All batches through one cache of `rule.slots` rows."""
    uses = rule.uses
    if rule.slots < uses.largest:
        raise ValueError(f"a cache of {rule.slots} rows does not hold a batch of {uses.largest}")
    cached = np.zeros(uses.rows, bool)
    fills = evicts = held = 0
    for batch, rows in enumerate(uses.batches):
        missing = ~cached[rows]
        new = int(missing.sum())
        excess = held + new - rule.slots
        if excess > 0:
            cached[rows] = False  # not to be chosen
            free = np.flatnonzero(cached)
            victims = free[np.argpartition(rule.rank(free, batch), excess - 1)[:excess]]
            cached[victims] = False
            rule.victims(excess)
            evicts += excess
            held -= excess
        cached[rows] = True
        held += new
        fills += new
        rule.used(batch, missing)
    return Moved(fills, evicts, rule.said())
