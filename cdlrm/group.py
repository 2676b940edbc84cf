"""`Group`: tables of equal dim and optimizer, merged into one row space with one cache and one plan.

A group's batches are numbered by its planner.  There are three ways to a batch:

* a look-ahead announces it (`announce`, `plan_next`, then `begin` … `end` around its training);
* on demand: a forward call without a look-ahead scans, plans and executes at once;
* borrowed: ids that no plan knows of inside a look-ahead, and evaluation: rows are read where they
  are, or from the store into lent places, while transfers wait.

Which thread: `announce` and `plan_next` the planner's, `Cache.try_execute` the transfer's, all else
the trainer's.  `_planning` guards the planner and `pending` (plans that are not executed yet).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cache import Cache
from .counts import Counts, Ended, ended
from .driver.base import Driver, Segments
from .errors import CacheTooSmallError, UsageError
from .gradient import applied_gradient
from .loans import Loans
from .lookups import FeatureSlot, Lookups
from .optim import Adam, Optimizer
from .plan import MinCounter, Plan, Planner
from .plan.kernels import tables_of
from .plan.resident import ResidentPlanner
from .step import Call, Step, merge
from .store import RamStore, Store
from .table import Table

log = logging.getLogger("cdlrm")
NO_TABLES = np.empty(0, np.int32)
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Group:
    """`tables` with `optimizer`; their records live in `store`, `cache_rows` of them on the device.

    `resident`: every row is on the device, slot = row, and nothing moves.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        driver: Driver,
        store: Store,
        *,
        cache_rows: int,
        resident: bool,
        strict: bool,
        shards: int | None,
        deferred: bool = False,
        share: float = 1.0,
    ) -> None:
        self.tables, self.optimizer, self.driver, self.store = list(tables), optimizer, driver, store
        self.dim = tables[0].embedding_dim
        self.bases = np.concatenate([[0], np.cumsum([t.num_embeddings for t in tables])]).astype(np.int64)
        self.num_rows = int(self.bases[-1])
        self.resident = resident
        self.deferred = deferred  # updates wait for `step_now` (the optimizer's step), over any number of batches
        self.accumulated: list[Call] = []  # calls of ended batches whose gradients wait for it
        self.hyper: dict[str, Any] = {"lr": optimizer.lr}  # a param_group of torch: `lr` may change
        self.table_steps = np.array(store.saved.get("table_steps", [0] * len(tables)), np.int64)
        self.counts = Counts(
            distinct_by_table=np.zeros(len(tables), np.int64), fills_by_table=np.zeros(len(tables), np.int64)
        )
        self.planner: Planner | ResidentPlanner
        if resident:
            assert isinstance(store, RamStore)
            store.make_resident()
            self.planner = ResidentPlanner(self.num_rows, driver)
            self.cache = Cache(0, self.store, driver)
            self.minimum: MinCounter | None = None
        else:
            self.planner = Planner(self.num_rows, cache_rows, 1, shards, strict)
            self.cache = Cache(self.planner.cache_rows, self.store, driver)
            self.minimum = MinCounter(self.num_rows, self.cache.rows, 0, 1)
        self.scaler_known = False  # the module of the newest gradient was given its GradScaler
        self.updates = 0
        self.closed = False
        self.horizon = 0  # of the newest look-ahead
        self.attached: Any = None  # the look-ahead that feeds this group
        self.step: Step | None = None
        self.completed = -1  # newest batch that ended
        self.pending: deque[Plan] = deque()
        self.ended: deque[Ended] = deque()  # batches that are not counted yet
        self.share = share  # of the module's cache_rows
        self._counting = threading.Lock()
        self._told_growth = 0.0
        self._planning = threading.Lock()
        self.loans = Loans(self.cache, self.planner, self.pending, self._planning)
        self._stamps: np.ndarray | None = None
        self._told_unannounced = False

    # --- the device's arrays ---

    @property
    def weight(self) -> np.ndarray:
        return self.store.weight if isinstance(self.store, RamStore) and self.resident else self.cache.weight

    @property
    def state(self) -> np.ndarray:
        return self.store.state if isinstance(self.store, RamStore) and self.resident else self.cache.state

    @property
    def lr(self) -> float:
        lr = float(self.hyper["lr"])
        if not abs(lr) <= FLOAT32_MAX:
            raise UsageError(f"the learning rate of the tables is {lr}; set a finite number in optimizer.param_groups.")
        return lr

    # --- the planner's thread ---

    def set_depth(self, depth: int) -> None:
        """Prefetch depth of the look-ahead to come; the MIN count starts again if it changes."""
        if self.resident or self.planner.prefetch_depth == depth:
            return
        self.planner.prefetch_depth = depth
        fresh = MinCounter(self.num_rows, self.cache.rows, 0, depth)
        if self.minimum is not None:
            fresh.continue_from(self.minimum)
        self.minimum = fresh

    def announce(self, calls: Sequence[Lookups]) -> int:
        """Scan a batch that will come: the lookups of each of its calls.  Returns its number."""
        rows, cuts = _together(calls)
        started = time.perf_counter()
        with self._planning:
            batch = self.planner.scan(rows, cuts)
        self.counts.seconds_plan += time.perf_counter() - started
        return batch

    def plan_next(self, short: bool = False) -> Plan:
        """Plan the next announced batch; it is pending until its transfer was executed."""
        started = time.perf_counter()
        self.count_ended()
        plan = self._plan()
        plan.short = short
        self.counts.seconds_plan += time.perf_counter() - started
        return plan

    def count_ended(self) -> None:
        """Count the batches that have ended; on the planner's thread, or when somebody asks."""
        with self._counting:
            while self.ended:
                batch = self.ended.popleft()
                self.counts.add(batch)
                self.counts.distinct_by_table += self.rows_by_table(batch.seg_row)
                self.counts.fills_by_table += self.rows_by_table(batch.fill_rows)
                if self.minimum is not None:
                    self.minimum.resize(batch.cache_rows)
                    self.minimum.add(batch.seg_row)

    def _tell_growth(self, plan: Plan) -> None:
        """Say that the cache grows, the first time and when it has grown by a quarter since."""
        if plan.grows and plan.cache_rows >= 1.25 * self._told_growth:
            self._told_growth = plan.cache_rows
            log.warning(
                "batch %d needs %d rows at once: the cache grows to %d rows (%.1f MiB; said again when it has grown by "
                "a quarter); raise cache_rows (--cache-rows, --cache-ratio), or use strict=True (--strict) to refuse "
                "such batches",
                plan.batch, plan.distinct, plan.cache_rows, plan.cache_rows * self.store.record_bytes / 2**20,
            )  # fmt: skip

    def _plan(self, hold: int = 0) -> Plan:
        """The next plan, pending from now on."""
        with self._planning:
            try:
                plan = self.planner.plan(hold)
            except CacheTooSmallError as error:
                raise CacheTooSmallError(self._too_small(error)) from None
            self.pending.append(plan)
        self._tell_growth(plan)
        return plan

    def _too_small(self, error: CacheTooSmallError) -> str:
        """The sentence about a batch that `strict` refuses, with the cache_rows of the whole module."""
        tables = ", ".join(repr(table.name) for table in self.tables[:3]) + (", …" if len(self.tables) > 3 else "")
        total = math.ceil(error.need / self.share)
        return (
            f"batch {error.batch} has {error.distinct} distinct rows of dim {self.dim} (tables {tables}) and needs "
            f"cache_rows={total} in all ({error.need} for these tables, which have {error.have} now); raise cache_rows "
            f"(--cache-rows) or cache_ratio (--cache-ratio), use a smaller batch, or allow growth (strict=False, no "
            f"--strict)."
        )

    # --- the transfer's thread ---

    def try_execute(self, plan: Plan) -> bool:
        """Execute the oldest pending plan unless its batches to wait for, or a pause, forbid it."""
        if plan.wait_for > self.completed:
            return False
        started = time.perf_counter()
        if self.resident:
            self._no_more_pending()
        elif not self.cache.try_execute(plan, self._no_more_pending):
            return False
        self.counts.seconds_transfer += time.perf_counter() - started
        return True

    def _no_more_pending(self) -> None:
        with self._planning:
            self.pending.popleft()

    # --- the trainer's thread: a step ---

    def begin(self, plan: Plan, announced: list[Lookups]) -> None:
        """A planned batch is trained from now on."""
        self.step = Step(plan.batch, plan, announced)

    def end(self) -> None:
        """End the current step: apply what has come, give borrowed rows back."""
        step, self.step = self.step, None
        if step is not None:
            try:
                if self.deferred:
                    self.accumulated += step.take()
                else:
                    self._apply(step)
            finally:
                step.ended = True
                self.counts.steps += 1
                if step.plan is not None:
                    self.completed = step.plan.batch
                    if not step.counted:
                        self.ended.append(ended(step.plan))
                self.loans.release()

    def settle(self, force: bool = False) -> None:
        """Apply gradients that wait for calls which died (`force`: for any call)."""
        if not self.deferred and self.step is not None and self.step.graded and (force or not self.step.waiting()):
            self._apply(self.step)

    def settle_for_reading(self) -> None:
        """Apply what has come, since rows are read now.  An output that is merely kept alive must not hide
        the update; a backward through it would make a second one, so it is refused from now on."""
        if not self.deferred and self.step is not None and self.step.graded:
            self.step.seal()
            self._apply(self.step)

    def abandon(self) -> None:
        """End the look-ahead now: plans that were not executed never happened."""
        self.end()
        with self._planning:
            if self.pending or self.planner.window:
                self.cache.grow(0 if self.resident else self.planner.cache_rows)
                self.planner.reset(self.cache.planned_rows())
                self.pending.clear()
            self.completed = self.planner.scanned - 1

    def training_slots(self, lookups: Lookups) -> Call:
        """The slots of a forward call that may be followed by a backward, brought in if need be."""
        self.settle()
        if self.attached is None:
            return self._on_demand(lookups)
        if self.step is None:
            self.step = Step(self.completed)
        for i, announced in enumerate(self.step.announced):
            if announced.same_ids(lookups):
                return self.step.open_call(lookups, self.step.announced_slots(i), i)
        self.counts.unannounced += 1
        if not self._told_unannounced:
            self._told_unannounced = True
            log.warning(
                "batch %d: the ids at forward are not those announced to the look-ahead; they are fetched on demand, "
                "exactly but slowly (said once; counted as `unannounced`). Check the `ids=` function.",
                self.step.batch,
            )
        return self.step.open_call(lookups, self.loans.for_training(lookups.rows), -1)

    def _on_demand(self, lookups: Lookups) -> Call:
        step = self.step
        if step is not None and (step.used or not step.waiting()):  # a forward after a backward: another step
            step.seal()
            self.end()
            step = None
        hold = 0 if step is None else step.batches
        try:
            self.announce([lookups])
            plan = self._plan(hold)
            plan.wait_for = -1  # this thread is the trainer
            if not self.try_execute(plan):
                raise UsageError("a forward call came while the cache is paused by another thread.")
            self.ended.append(ended(plan))  # counted now: a step on demand may have several plans
            self.count_ended()
        except BaseException:
            self.step = step
            self.abandon()
            raise
        if step is None:
            step = self.step = Step(plan.batch, plan, [lookups], counted=True)
            return step.open_call(lookups, plan.slots, 0)
        step.batches += 1
        step.plan = plan
        return step.open_call(lookups, plan.slots, -1)

    def receive(
        self, call: Call, grad: np.ndarray, weights: np.ndarray | None, finite: bool = True, learns: bool = True
    ) -> None:
        """The gradient of a call's output, float32 [R, D] with mean bags divided already.

        `learns=False`: the rows are frozen, only the per-sample weights learn.
        """
        step = call.step
        step.receive(call, grad, weights, learns)
        step.skip = step.skip or not finite
        self.tell_scaler()
        if not self.deferred and not step.waiting():
            self._apply(step)

    def waiting_calls(self) -> list[Call]:
        """Deferred: the calls whose gradients wait for the optimizer's step, in order."""
        return self.accumulated + ([] if self.step is None else sorted(self.step.graded, key=lambda c: c.number))

    def forget_gradients(self) -> None:
        """Deferred: drop the gradients that wait for the optimizer's step."""
        self.rescale_gradients(lambda call: None)

    def rescale_gradients(self, scales: Callable[[Call], float | None]) -> None:
        """Deferred: each waiting call's gradient times its scale (None: dropped)."""
        calls, dropped = self.waiting_calls(), False
        for call in calls:
            scale = scales(call)
            if scale is None:
                call.grad, dropped = None, True
            elif scale != 1.0 and call.grad is not None:
                call.grad = call.grad * np.float32(scale)
        if not dropped:
            return
        self.counts.skipped_steps += any(call.step.skip for call in calls)  # a GradScaler did not call `step`
        for call in calls:
            call.step.skip = False
        self.accumulated = [call for call in self.accumulated if call.grad is not None]
        if self.step is not None:
            self.step.graded = [call for call in self.step.graded if call.grad is not None]

    def step_now(self, scales: Callable[[Call], float | None]) -> None:
        """Deferred: one update with all gradients since the last; each call's times its scale (None: dropped)."""
        if any(call.step.skip for call in self.waiting_calls()):
            self.forget_gradients()
            return
        self.rescale_gradients(scales)
        earlier, self.accumulated = self.accumulated, []
        step = self.step
        calls = earlier + ([] if step is None else step.take())
        if not calls:
            return
        segments = None if earlier or step is None else step.planned_segments(calls)
        held = self.loans.holding
        try:
            if earlier:  # rows of ended batches may be anywhere
                slots = self.loans.for_training(np.concatenate([call.lookups.rows for call in calls]))
                segments = self.driver.build_segments(slots, self._scratch())
            self._update(calls, segments)
        finally:
            if not held:
                self.loans.release()

    def tell_scaler(self) -> None:
        """Let a GradScaler that steps the module's optimizer see whether the gradients were finite."""
        skip = (self.step is not None and self.step.skip) or any(call.step.skip for call in self.waiting_calls())
        for parameter in self.hyper.get("params", ()):
            parameter.grad = applied_gradient(not skip, self.scaler_known, of_optimizer=True)

    def _apply(self, step: Step) -> None:
        """One update with all gradients that have come."""
        calls = step.take()
        if not calls:
            return
        if step.skip:
            step.skip = False
            self.counts.skipped_steps += 1
            return
        self._update(calls, step.planned_segments(calls))

    def _update(self, calls: list[Call], segments: Segments | None) -> None:
        """The optimizer's formula on every row of `calls`, in place."""
        started = time.perf_counter()
        lookup_row, grad, weights = merge(calls)
        if segments is None:
            slots = calls[0].slots if len(calls) == 1 else np.concatenate([call.slots for call in calls])
            segments = self.driver.build_segments(slots, self._scratch())
        step_sizes = None
        if isinstance(self.optimizer, Adam):
            self.table_steps[self._tables_of(calls)] += 1
            sizes = [self.optimizer.step_size(self.lr, max(int(t), 1)) for t in self.table_steps]
            step_sizes = np.array(sizes, np.float32)
            rows = segments.seg_slot if self.resident else self.cache.slot_row[segments.seg_slot]
            segments.seg_table = np.empty(rows.size, np.int32)
            tables_of(rows, self.bases, segments.seg_table, np.zeros(len(self.tables), np.int64))
        self.updates += 1
        self.driver.update(
            self.optimizer, self.lr, self.weight, self.state, segments, lookup_row, grad, weights, step_sizes
        )
        if self.resident:
            assert isinstance(self.store, RamStore)
            self.store.mark(segments.seg_slot)
        else:
            self.cache.mark_dirty(segments.seg_slot)
        self.counts.seconds_update += time.perf_counter() - started

    def _tables_of(self, calls: Sequence[Call]) -> np.ndarray:
        """Numbers (in the group) of the tables that the calls use, also where all bags are empty."""
        bases = np.concatenate([call.lookups.bases for call in calls])
        return np.unique(np.searchsorted(self.bases, bases, side="right") - 1)

    def _scratch(self) -> np.ndarray:
        slots = self.num_rows if self.resident else int(self.cache.slot_row.size)
        if self._stamps is None or self._stamps.size < slots + 1:
            self._stamps = self.driver.new_stamps(slots)
        return self._stamps

    # --- whole tables ---

    def flush(self) -> None:
        """Bring every record home: afterwards the store holds the newest values."""
        self.settle_for_reading()
        if not self.resident:
            with self.cache.pause():
                self.cache.flush()
                self.store.remember("table_steps", self.table_steps.tolist())
                self.store.flush()

    def table_values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a table's newest weights [rows, D] and state [rows, S]."""
        lo, hi = self.span(name)
        self.flush()
        with self.cache.pause():
            return self.store.get(lo, hi)

    def set_table(self, name: str, weight: np.ndarray | None, state: np.ndarray | None) -> None:
        """Replace a table's weights and/or state; cached rows follow."""
        lo, _ = self.span(name)
        self.flush()
        with self.cache.pause():
            self.store.put(lo, weight, state)
            if not self.resident:
                self.cache.refresh()

    def set_rows(self, lo: int, weight: np.ndarray) -> None:
        """Replace the weights of the group rows from `lo` on; cached rows follow."""
        self.flush()
        with self.cache.pause():
            self.store.put(lo, weight, None)
            if not self.resident:
                self.cache.refresh()

    def span(self, name: str) -> tuple[int, int]:
        """Group rows [lo, hi) of a table."""
        t = [table.name for table in self.tables].index(name)
        return int(self.bases[t]), int(self.bases[t + 1])

    def rows_by_table(self, rows: np.ndarray) -> np.ndarray:
        """How many of the group rows `rows int [n]` each table has, int64 [tables]."""
        counts = np.zeros(len(self.tables), np.int64)
        tables_of(rows, self.bases, NO_TABLES, counts)
        return counts

    def check(self) -> None:
        """Raise AssertionError naming a broken rule (tests call it after every public call)."""
        if self.resident:
            return
        with self.cache.pause(), self._planning:
            self.cache.check()
            self.planner.check()
            expected = np.full(self.planner.cache_rows, -1, np.int64)
            expected[: self.cache.rows] = self.cache.planned_rows()
            for plan in self.pending:
                expected[plan.evict_slots] = -1
                expected[plan.fill_slots] = plan.fill_rows
            if not np.array_equal(expected, self.planner.slot_rows()):
                raise AssertionError("rule 1: cache plus pending plans is not what the planner believes")

    def close(self) -> None:
        """End the step, bring all rows home, stop threads.  Tables in memory stay readable."""
        if self.closed:
            return
        self.abandon()
        self.flush()
        self.closed = True
        self.store.close()
        self.planner.close()
        self.driver.close()


def _together(calls: Sequence[Lookups]) -> tuple[np.ndarray, Sequence[int]]:
    """Rows of all calls, and (for a single call) where one table's lookups end and the next's begin."""
    if len(calls) != 1:
        rows = [call.rows for call in calls]
        return (np.concatenate(rows) if rows else np.empty(0, np.int64)), ()
    call = calls[0]
    changes = np.flatnonzero(np.diff(call.bases)) + 1
    return call.rows, call.feature_starts[changes].tolist()


def feature_slots(tables: Sequence[Table], bases: np.ndarray, columns: dict[str, int]) -> list[FeatureSlot]:
    """The features of a group in the order of its tables."""
    return [
        FeatureSlot(feature, table.name, int(bases[t]), table.num_embeddings, columns[feature], table.pooling == "mean")
        for t, table in enumerate(tables)
        for feature in table.feature_names
    ]
