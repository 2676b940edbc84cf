"""`planned_moves`: which rows the batches of a run move, planned as the run will plan them: for `--dry-run`.

On a GPU whose kernels do not reach the tables rows travel in the trays of the plans, and how many do depends on what
was trained and evicted before.  So the run is gone through with its own planner: batches begin as far ahead as the
device takes them, are trained, evaluated and saved in turn; but only the ids are looked at.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from .datasets import Datasets
from .driver.gpu_transfers import PIECE_ROWS
from .driver.signatures import LONG_ROW
from .driver.tray_sizes import Carried, Moves
from .memory_use import COUNTED_BATCHES, TEST_BATCHES, group_rows
from .plan import Plan, Planner
from .store import bits


def planned_moves(
    data: Datasets, rows: list[int], slots: int, *, horizon: int, depth: int, epochs: int = 1,
    saves_every: int | None = None, evaluates: bool = False, evaluates_every: int | None = None,
) -> tuple[Moves, bool]:  # fmt: skip
    """The moves of a run over `epochs` of `data`, whose tables have `rows` and whose cache has `slots`; and whether
    these are all (False: only the first COUNTED_BATCHES batches were planned)."""
    bases = dict(zip(data.features, np.cumsum([0, *rows[:-1]]), strict=True))
    run = _Run(sum(rows), slots, depth)
    run.saves_every = saves_every
    if evaluates and data.test is not None:
        run.evaluates_every = evaluates_every
        for number, batch in enumerate(data.test):
            if number == TEST_BATCHES:
                break
            run.tests.append((group_rows(batch, bases), batch.size * len(bases)))
        run.evaluate()
    complete = True
    for epoch in range(epochs):
        if not complete:
            break
        data.train.set_epoch(epoch)
        for batch in data.train:
            if run.planner.scanned == COUNTED_BATCHES:
                complete = False
                break
            run.planner.scan(group_rows(batch, bases))
            run.bags.append(batch.size * len(bases))
            if run.planner.window > max(horizon, depth):
                run.begin()
        while run.planner.window:
            run.begin()
        while run.in_use:
            run.end()
    run.evaluate()
    run.save()
    run.moves.slots = run.planner.cache_rows
    run.planner.close()
    return run.moves, complete


class _Run:
    """What is in the cache and in the store while the batches of a run come; `moves`: what they moved."""

    def __init__(self, rows: int, slots: int, depth: int) -> None:
        self.planner = Planner(rows, slots, depth)
        self.depth = depth
        self.saves_every: int | None = None
        self.evaluates_every: int | None = None
        self.bags: deque[int] = deque()  # of each batch in the window
        self.tests: list[tuple[np.ndarray, int]] = []  # rows of each test batch, and its bags
        self.moves = Moves()
        self.in_use: deque[Plan] = deque()
        self.steps = 0
        self._evaluated_at = -1
        self._stored = np.zeros(-(-rows // 8), np.uint8)  # rows that were written home, a bit each
        self._slot_row = np.empty(0, np.int64)
        self._dirty = np.empty(0, bool)

    def begin(self) -> None:
        """The transfer of the next plan, once the device has room for it and the batches it waits for have ended."""
        while len(self.in_use) > self.depth:
            self.end()
        plan = self.planner.plan()
        while self.in_use and self.in_use[0].batch <= plan.wait_for:
            self.end()
        missing = plan.cache_rows - self._dirty.size
        if missing:
            kept = self._dirty.size if (self._slot_row >= 0).any() else 0
            self.moves.grown.append((len(self.moves.carried), kept + plan.cache_rows))
            self._slot_row = np.concatenate([self._slot_row, np.full(missing, -1, np.int64)])
            self._dirty = np.concatenate([self._dirty, np.zeros(missing, bool)])
        evicts = self._write(plan.evict_slots)
        copied = bits.positions(self._stored, plan.fill_rows)[0].size
        self._slot_row[plan.fill_slots] = plan.fill_rows
        sizes = np.diff(plan.seg_start)
        long = sizes[sizes > LONG_ROW]
        self.moves.carried.append(Carried(
            plan.lookups, self.bags.popleft(), plan.distinct, int(long.size), int((-(-long // LONG_ROW)).sum()),
            int(plan.fill_rows.size), int(copied), evicts,
        ))  # fmt: skip
        self.in_use.append(plan)

    def end(self) -> None:
        """The oldest batch that was begun is trained, and ends."""
        self.moves.trained, self.moves.evaluated_before = len(self.moves.carried), len(self.moves.evaluated)
        self._dirty[self.in_use[0].seg_slot] = True
        self.steps += 1
        if self.evaluates_every and self.steps % self.evaluates_every == 0:
            self.evaluate()
        if self.saves_every and self.steps % self.saves_every == 0:
            self.save()
        self.in_use.popleft()
        self.moves.carried.append(None)

    def evaluate(self) -> None:
        if self._evaluated_at == self.steps:
            return
        self._evaluated_at, self.moves.read = self.steps, len(self.moves.carried)
        for rows, bags in self.tests:
            distinct = np.unique(rows)
            missing = distinct[self.planner.slots_of(distinct) < 0]
            copied = bits.positions(self._stored, missing)[0].size
            read = int(distinct.size) if missing.size else 0
            self.moves.evaluated.append(Carried(int(rows.size), bags, read, copied=int(copied)))

    def save(self) -> None:
        """Write all changed rows home."""
        rows = self._write(np.flatnonzero(self._dirty))
        for lo in range(0, rows, PIECE_ROWS):
            self.moves.carried.append(Carried(evicts=min(rows - lo, PIECE_ROWS)))

    def _write(self, slots: np.ndarray) -> int:
        """Write those of `slots` home that were changed; how many they are."""
        changed = slots[self._dirty[slots]]
        bits.mark(self._stored, self._slot_row[changed])
        self._dirty[changed] = False
        return int(changed.size)
