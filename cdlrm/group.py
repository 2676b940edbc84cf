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

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .cache import Cache
from .counts import Counts, Tally
from .deferred import Deferred
from .driver.base import Driver, Verdict
from .errors import CacheTooSmallError, DeviceError, NonFiniteGradientError, UsageError
from .gradient import tell_scaler
from .growth import Growth, refused
from .loans import Loans
from .lookups import Lookups
from .optim import Optimizer
from .plan import MinCounter, Plan, Planner
from .plan.resident import ResidentPlanner
from .step import Call, Step
from .store import RamStore, Store
from .table import Table
from .updates import Updates

log = logging.getLogger("cdlrm")
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Group:
    """`tables` with `optimizer`; their records live in `store`, `cache_rows` of them on the device.

    `resident`: every row is on the device, slot = row, and nothing moves (`in_place`: the device is where
    the store keeps them).
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
        self.in_place = resident and driver.in_place and isinstance(store, RamStore)
        self.deferred = Deferred(self) if deferred else None  # updates wait for the optimizer's step
        self.hyper: dict[str, Any] = {"lr": optimizer.lr}  # a param_group of torch: `lr` may change
        self.counts = Counts(
            distinct_by_table=np.zeros(len(tables), np.int64), fills_by_table=np.zeros(len(tables), np.int64)
        )
        self.planner: Planner | ResidentPlanner
        if resident:
            self.planner = ResidentPlanner(self.num_rows, driver)
        else:
            self.planner = Planner(self.num_rows, cache_rows, 1, shards, strict)
        if self.in_place:
            assert isinstance(store, RamStore)
            store.make_resident()
        self.records = driver.records(store, self.bases, optimizer, in_place=self.in_place)
        self.cache = Cache(0 if self.in_place else self.planner.cache_rows, self.records)
        if resident:
            self.cache.fill_all()
        minimum = None if resident else MinCounter(self.num_rows, self.cache.rows, 0, 1)
        self.tally = Tally(self.counts, self.bases, minimum)
        self.updates = Updates(
            optimizer, driver, self.cache, store, self.counts, resident=resident, in_place=self.in_place
        )
        if "table_steps" in store.saved:
            self.records.set_table_steps(np.array(store.saved["table_steps"], np.int64))
        self.scaler_known = False  # the module of the newest gradient was given its GradScaler
        self.closed = False
        self.horizon = 0  # of the newest look-ahead
        self.attached: Any = None  # the look-ahead that feeds this group
        self.step: Step | None = None
        self.completed = -1  # newest batch that ended
        self.pending: deque[Plan] = deque()
        self._announced: deque[list[Lookups]] = deque()  # calls of the batches that are scanned, but not planned
        self.share = share  # of the module's cache_rows
        self._growth = Growth(self.planner.cache_rows, store.record_bytes)
        self._planning = threading.Lock()
        self.loans = Loans(self.cache, self.planner, self.pending, self._planning)
        self._told_unannounced = False
        self._agreed = True  # planner, announced lookups and pending plans tell the same

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
        self.records.set_depth(depth)
        fresh = MinCounter(self.num_rows, self.cache.rows, 0, depth)
        if self.tally.minimum is not None:
            fresh.continue_from(self.tally.minimum)
        self.tally.minimum = fresh

    def announce(self, lookups: Sequence[Lookups]) -> int:
        """Scan a batch that will come: the lookups of each of its calls.  Returns its number."""
        rows, cuts = _together(lookups)
        started = time.perf_counter()
        with self._planning:
            self._agreed = False
            batch = self.planner.scan(rows, cuts)
            self._announced.append(list(lookups))
            self._agreed = True
        self.counts.seconds_plan += time.perf_counter() - started
        return batch

    def plan_next(self, short: bool = False) -> Plan:
        """Plan the next announced batch; it is pending until its transfer was executed."""
        started = time.perf_counter()
        self.tally.count()
        plan = self._plan()
        plan.short = short
        self.counts.seconds_plan += time.perf_counter() - started
        return plan

    def _plan(self, hold: int = 0) -> Plan:
        """The next plan, pending from now on."""
        with self._planning:
            self._agreed = False
            try:
                plan = self.planner.plan(hold)
            except CacheTooSmallError as error:
                self._agreed = True  # refused before any change
                raise refused(error, self.tables, self.share) from None
            plan.calls = self._announced.popleft()
            self.pending.append(plan)
            self._agreed = True
        self._growth.tell(plan)
        return plan

    # --- the transfer's thread ---

    def try_execute(self, plan: Plan, at_once: bool = False) -> bool:
        """Execute the oldest pending plan unless its batches to wait for, or a pause, forbid it, or (not `at_once`)
        the device has its hands full."""
        if plan.wait_for > self.completed or not (at_once or self.records.may_begin()):
            return False
        started = time.perf_counter()
        if self.in_place:
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
        if step is None:
            self.loans.release()  # what Ctrl-C has left of them
        else:
            try:
                if self.driver.dead:
                    step.take()  # whoever has heard of it ends the step now
                elif self.deferred is not None:
                    self.deferred.earlier += step.take()
                else:
                    self._apply(step)
            finally:
                step.ended = True
                self.counts.steps += 1
                for plan in step.plans:
                    self.records.batch_ended(plan)
                if step.plan is not None:
                    self.completed = step.plan.batch
                    if not step.counted:
                        self.tally.add(step.plan)
                self.loans.release()
            self.updates.decide()

    def count_skipped(self) -> None:
        """Count all updates that the device skipped until now; waits for it if it has not told yet."""
        if not self.driver.dead:
            self.updates.wait()
        self.updates.decide()

    def _hear(self, wait: bool = False) -> None:
        """Raise what the device has told about earlier batches; on the trainer's thread, which then goes on or not."""
        if self.driver.dead:
            return
        try:
            if wait:
                self.driver.finish()
            else:
                self.driver.poll()
        except NonFiniteGradientError:
            self.driver.resume()
            raise

    def settle(self, force: bool = False) -> None:
        """Apply gradients that wait for calls which died (`force`: for any call)."""
        if self.deferred is None and self.step is not None and self.step.graded and (force or not self.step.waiting()):
            self._apply(self.step)

    def settle_for_reading(self) -> None:
        """Apply what has come, since rows are read now.  An output that is merely kept alive must not hide
        the update; a backward through it would make a second one, so it is refused from now on."""
        if self.deferred is None and self.step is not None and self.step.graded:
            self.step.seal()
            self._apply(self.step)

    def abandon(self) -> None:
        """End the look-ahead now: plans that were not executed never happened."""
        self.end()
        with self._planning:
            if self.pending or self.planner.window or not self._agreed:
                self._agreed = False
                self.planner.reset(self._slots_to_be())
                self.pending.clear()
                self._announced.clear()
                self._agreed = True
            self.records.forget_plans()
            self.driver.resume()
            self.completed = self.planner.scanned - 1

    def mend(self) -> None:
        """Before rows are looked up: finish what Ctrl-C has interrupted, the end of a look-ahead or a forward call."""
        if self.attached is not None:
            if self.attached.stopped:
                self.attached.close()
        elif self.pending or not self._agreed:
            self.abandon()

    def _slots_to_be(self) -> np.ndarray:
        """Row in each slot that the planner knows of; slots that the device has no room for are empty, and the next
        plan asks for them again."""
        slots = self.planner.cache_rows
        if self.resident:
            return self.cache.planned_rows()
        with contextlib.suppress(DeviceError):
            self.cache.grow(slots)
        missing = np.full(slots - self.cache.rows, -1, np.int64)
        return np.concatenate([self.cache.planned_rows(), missing]) if missing.size else self.cache.planned_rows()

    def training_slots(self, lookups: Lookups) -> Call:
        """The slots of a forward call that may be followed by a backward, brought in if need be."""
        self.mend()
        self.settle()
        self._hear()
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
        self.loans.release()
        try:
            self.announce([lookups])
            plan = self._plan(hold)
            plan.wait_for = -1  # this thread is the trainer
            self.records.fence()
            if not self.try_execute(plan, at_once=True):
                raise UsageError("a forward call came while the cache is paused by another thread.")
            self.tally.add(plan)  # counted now: a step on demand may have several plans
            self.tally.count()
        except BaseException:
            self.step = step
            self.abandon()
            raise
        if step is None:
            step = self.step = Step(plan.batch, plan, [lookups], counted=True)
            return step.open_call(lookups, plan.slots, 0)
        step.batches += 1
        step.go_on(plan)
        return step.open_call(lookups, plan.slots, -1)

    def receive(self, call: Call, verdict: Verdict, learns: bool = True) -> None:
        """The gradient of a call's output came (`Records.take_gradient`), and whether it is finite.

        `learns=False`: the rows are frozen, only the per-sample weights learn.
        """
        step = call.step
        step.receive(call, verdict, learns)
        tell_scaler(self)
        if self.deferred is None and not step.waiting():
            self._apply(step)

    def _apply(self, step: Step) -> None:
        """One update with all gradients that have come."""
        calls = step.take()
        if not calls:
            return
        if step.known_skip():
            step.verdicts.clear()
            self.counts.skipped_steps += 1
            return
        verdicts, step.verdicts = step.verdicts, []
        self.updates.run(calls, self.lr, step.plan_of(calls), verdicts=verdicts)

    # --- records home ---

    def flush(self) -> None:
        """Bring every record home: afterwards the store holds the newest values."""
        self._bring_home()
        self._hear(wait=True)
        self.updates.decide()

    def _bring_home(self) -> None:
        self.settle_for_reading()
        if not self.in_place:
            with self.cache.pause():
                self.cache.flush()
                if not self.driver.dead:
                    self.store.remember("table_steps", self.records.table_steps.tolist())
                self.store.flush()

    @property
    def table_steps(self) -> np.ndarray:
        """int64 [tables]: updates of each table so far, for optimizers that count them."""
        return self.records.table_steps

    def set_table_steps(self, number: int, steps: int) -> None:
        """Replace the step count of table `number` of the group."""
        every = self.records.table_steps
        every[number] = steps
        self.records.set_table_steps(every)

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
        try:
            self._bring_home()
        except DeviceError as error:
            if not error.sticky:
                raise
            log.error("%s", error)
        self.closed = True
        self.records.close()
        self.store.close()
        self.planner.close()
        try:
            if not self.driver.dead:
                self.driver.finish()
        finally:
            self.driver.close()


def _together(lookups: Sequence[Lookups]) -> tuple[np.ndarray, Sequence[int]]:
    """Rows of all calls, and (for a single call) where one table's lookups end and the next's begin."""
    if len(lookups) != 1:
        rows = [each.rows for each in lookups]
        return (np.concatenate(rows) if rows else np.empty(0, np.int64)), ()
    only = lookups[0]
    changes = np.flatnonzero(np.diff(only.bases)) + 1
    return only.rows, only.feature_starts[changes].tolist()
