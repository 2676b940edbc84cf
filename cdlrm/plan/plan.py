"""`Plan`: everything the device must do for one batch of one group, decided ahead."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..lookups import Lookups


@dataclass(eq=False)
class Plan:
    """What one batch moves and where each of its lookups reads.

    Arrays (U distinct rows, L lookups, n fills, m evicts):

    * `slots int32 [L]`       slot of every lookup, in lookup order;
    * `seg_slot int32 [U]`, `seg_row int64 [U]`   slot and group row of every distinct row;
    * `seg_start int32 [U+1]`, `seg_lookup int32 [L]`   its lookups, in lookup order: the backward pass;
    * `fill_rows int64 [n]`, `fill_slots int32 [n]`     store -> cache, after the evicts;
    * `evict_rows int64 [m]`, `evict_slots int32 [m]`   cache -> store, when dirty.

    `wait_for` is the last batch that must have finished before the plan may be executed (-1: none);
    `cache_rows` the slots after growth, `grows` whether this plan makes the cache larger; `window`
    how many later batches had been scanned; `short` whether that was fewer than the horizon although
    a victim was needed and more batches were to come.  `copied` fills came from the store (the others
    were generated) and `written` evicts were dirty: known once the plan was executed.  `calls`: the lookups
    of the batch's calls, in order.
    """

    batch: int
    slots: np.ndarray
    seg_slot: np.ndarray
    seg_row: np.ndarray
    seg_start: np.ndarray
    seg_lookup: np.ndarray
    fill_rows: np.ndarray
    fill_slots: np.ndarray
    evict_rows: np.ndarray
    evict_slots: np.ndarray
    wait_for: int
    cache_rows: int
    grows: bool = False
    window: int = 0
    short: bool = False
    copied: int = 0
    written: int = 0
    calls: list[Lookups] = field(default_factory=list)

    @property
    def lookups(self) -> int:
        return int(self.slots.size)

    @property
    def distinct(self) -> int:
        return int(self.seg_slot.size)

    @property
    def hits(self) -> int:
        """Distinct rows that were in the cache already."""
        return self.distinct - int(self.fill_rows.size)

    @property
    def nbytes(self) -> int:
        arrays = (self.slots, self.seg_slot, self.seg_row, self.seg_start, self.seg_lookup)
        moves = (self.fill_rows, self.fill_slots, self.evict_rows, self.evict_slots)
        return sum(int(a.nbytes) for a in arrays + moves)

    def __str__(self) -> str:
        text = (
            f"plan of batch {self.batch}: {self.lookups} lookups of {self.distinct} distinct rows, "
            f"{self.hits} cached, {self.fill_rows.size} fills, {self.evict_rows.size} evicts, "
            f"window of {self.window} batches, "
        )
        text += "waits for no batch" if self.wait_for < 0 else f"waits for batch {self.wait_for}"
        return text + (f", cache grows to {self.cache_rows} rows" if self.grows else "")


def check_plan(plan: Plan, rows: np.ndarray, slot_row: np.ndarray) -> np.ndarray:
    """Verify the rules (see `cdlrm.plan`) that one plan can break; returns the map after it.

    `rows int64 [L]` are the lookups of the batch, `slot_row int64 [>= cache rows before]` the cached
    row of each slot (-1: empty) before the plan.  Raises AssertionError naming the rule.
    """
    after = np.full(max(plan.cache_rows, slot_row.size), -1, np.int64)
    after[: slot_row.size] = slot_row
    _unique(plan.evict_slots, "rule 6: one slot is evicted twice")
    _unique(plan.fill_slots, "rule 6: one slot is filled twice")
    _unique(plan.fill_rows, "rule 6: one row is filled twice")
    _unique(plan.seg_row, "rule 6: one row has two segments")
    if plan.cache_rows < slot_row.size:
        raise AssertionError("rule 7: the cache shrinks in a plan")
    if not np.array_equal(after[plan.evict_slots], plan.evict_rows):
        raise AssertionError("rule 3: an evicted slot holds another row")
    after[plan.evict_slots] = -1
    if np.isin(plan.fill_rows, after[after >= 0]).any():
        raise AssertionError("rule 1: a row is filled that is cached already")
    if (after[plan.fill_slots] != -1).any():
        raise AssertionError("rule 4: a slot is filled before its old row was evicted")
    after[plan.fill_slots] = plan.fill_rows
    if not np.array_equal(after[plan.slots], rows):
        raise AssertionError("promise 2: a lookup's slot does not hold its row")
    if not np.array_equal(after[plan.seg_slot], plan.seg_row):
        raise AssertionError("rule 6: a segment's slot does not hold its row")
    sizes = np.diff(plan.seg_start)
    if plan.seg_start[0] != 0 or plan.seg_start[-1] != rows.size or (sizes < 1).any():
        raise AssertionError("rule 9: the segments do not cover the lookups")
    if not np.array_equal(rows[plan.seg_lookup], np.repeat(plan.seg_row, sizes)):
        raise AssertionError("rule 9: a segment holds a lookup of another row")
    inside = np.ones(rows.size, bool)
    inside[plan.seg_start[:-1][sizes > 0]] = False
    if (np.diff(plan.seg_lookup)[inside[1:]] <= 0).any():
        raise AssertionError("rule 9: a segment's lookups are not in lookup order")
    if plan.wait_for >= plan.batch:
        raise AssertionError("rule 5: a plan waits for a batch that is not before its own")
    return after


def _unique(values: np.ndarray, message: str) -> None:
    if np.unique(values).size != values.size:
        raise AssertionError(message)
