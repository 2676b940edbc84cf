"""The look-ahead pipeline: reader, planner and transfer run ahead of the trainer.

    loader --Reader--> Work --Planner--> plans --Transfer--> ready --trainer--> ended

Each stage is a machine with one method `step()` that does a bounded piece of work and says whether
it did any; a thread is only a loop around it, so a test can run all stages in one thread in any
order.  All stages share one condition variable: whoever changes something tells everybody.

Plans depend on ids and settings alone: after every scanned batch the planner plans all batches that
need no victim or whose window is full (`horizon` batches, or `window_bytes`), whatever the threads'
timing; a horizon that is chosen by the batches (`horizon.py`) changes at fixed ones.  The one
exception: when the trainer waits and the loader does not yield, a batch is planned with the window as
it is (`short_windows` counts them); that changes which rows move, no result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import CdlrmError, PipelineError, UsageError, retold
from .group import Group
from .horizon import HorizonChooser
from .interrupt import interrupt_later
from .lookups import Lookups
from .machine import give_way
from .plan import Plan, Planner

log = logging.getLogger("cdlrm")

WAIT_SECONDS = 0.5  # bound of every wait of ours; a loop around it re-checks
PATIENCE_SECONDS = 0.25  # how long the trainer waits for a loader before a shorter window is used
LEAST_PATIENCE = 0.002
JOIN_SECONDS = 3.0  # how long `close` waits for a thread that is inside the user's loader

Announce = Callable[[Any], dict[Group, list[Lookups]]]


@dataclass(eq=False)
class Work:
    """One batch on its way."""

    index: int
    batch: Any
    lookups: dict[Group, list[Lookups]]  # of each of its calls
    state: Any  # of the loader after this batch
    nbytes: int
    plans: dict[Group, Plan] = field(default_factory=dict)
    executed: int = 0  # groups whose plan was executed


class Stage(Protocol):
    name: str

    def step(self) -> bool:
        """Do a piece of work; False when there is nothing to do now."""

    def at(self) -> int:
        """Index of the batch in hand, for messages."""


class Reader:
    """Reads the loader's next batch and announces what each module will look up."""

    name = "reader"

    def __init__(self, line: Pipeline, loader: Any, announce: Announce) -> None:
        self.line, self.loader, self.announce = line, loader, announce
        self.iterator: Iterator[Any] | None = None

    def at(self) -> int:
        return self.line.read

    def step(self) -> bool:
        line = self.line
        if line.ended or not line.may_read():
            return False
        started = time.perf_counter()
        try:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            batch = next(self.iterator)
        except StopIteration:
            line.ended = True
            return True
        finally:
            line.seconds_read += time.perf_counter() - started
        state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
        lookups = self.announce(batch)
        size = int(getattr(batch, "nbytes", 0)) + sum(one.nbytes for each in lookups.values() for one in each)
        with line.lock:
            line.to_scan.append(Work(line.read, batch, lookups, state, size))
            line.bytes_in_flight += size
            line.read += 1
        return True


class PlannerStage:
    """Scans what was read and plans what may be planned, in batch order."""

    name = "planner"

    def __init__(self, line: Pipeline) -> None:
        self.line = line
        self.window_bytes = 0  # of the batches that are scanned and not planned

    def at(self) -> int:
        waiting = self.line.to_plan or self.line.to_scan
        return waiting[0].index if waiting else self.line.read

    def step(self) -> bool:
        line = self.line
        if line.to_plan:
            full = len(line.to_plan) > line.horizon or self.window_bytes >= line.window_bytes
            if full or not any(g.planner.needs_victim() for g in line.groups):
                return self._plan(short=False)
        if line.to_scan:
            return self._scan()
        if line.to_plan:
            if line.ended:
                return self._plan(short=False)
            if line.starved():
                line.patience = max(line.patience / 2, LEAST_PATIENCE)
                return self._plan(short=True)
        return False

    def _scan(self) -> bool:
        work = self.line.to_scan[0]
        for group in self.line.groups:
            group.announce(work.lookups.get(group, []))
        if self.line.chooser is not None:
            self.line.look_as_far_as(self.line.chooser.scanned(work.nbytes))
        with self.line.lock:
            self.line.to_scan.popleft()
            self.line.to_plan.append(work)
        self.window_bytes += work.nbytes
        return True

    def _plan(self, short: bool) -> bool:
        line = self.line
        work = line.to_plan[0]
        for group in line.groups:
            if group not in work.plans:
                work.plans[group] = group.plan_next(short)
        line.short_windows += short
        if not short and len(line.to_plan) > line.horizon:
            line.patience = PATIENCE_SECONDS
        with line.lock:
            line.to_plan.popleft()
            line.to_transfer.append(work)
        self.window_bytes -= work.nbytes
        return True


class Transfer:
    """Executes plans in batch order, as soon as the batches that they wait for have ended."""

    name = "transfer"

    def __init__(self, line: Pipeline) -> None:
        self.line = line

    def at(self) -> int:
        return self.line.to_transfer[0].index if self.line.to_transfer else self.line.read

    def step(self) -> bool:
        line = self.line
        if not line.to_transfer:
            return False
        work = line.to_transfer[0]
        while work.executed < len(line.groups):
            group = line.groups[work.executed]
            if not group.try_execute(work.plans[group]):
                return False
            work.executed += 1
        with line.lock:
            line.to_transfer.popleft()
            line.ready.append(work)
        return True


class Pipeline:
    """All stages of one pass over a loader, and the trainer's side: `advance` and `close`."""

    def __init__(
        self,
        groups: Sequence[Group],
        loader: Any,
        announce: Announce,
        *,
        horizon: int,
        prefetch_depth: int,
        window_bytes: int,
        threads: bool = True,
        auto_horizon: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.horizon, self.prefetch_depth = max(horizon, prefetch_depth), prefetch_depth
        self.window_bytes = window_bytes
        planners = [group.planner for group in self.groups if isinstance(group.planner, Planner)]
        self.chooser = HorizonChooser(planners, prefetch_depth, window_bytes) if auto_horizon else None
        # Locked by `with self.lock`: entering a Condition is Python code, and Ctrl-C inside it would keep the lock.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.version = 0
        self.to_scan: deque[Work] = deque()
        self.to_plan: deque[Work] = deque()
        self.to_transfer: deque[Work] = deque()
        self.ready: deque[Work] = deque()
        self.current: Work | None = None
        self.read = self.trained = self.bytes_in_flight = self.short_windows = 0
        self.ended = self.stopped = self.closed = False
        self.failure: tuple[str, int, BaseException] | None = None
        self.waiting_since: float | None = None
        self.patience = PATIENCE_SECONDS
        self.seconds_read = self.seconds_stall = 0.0
        self.reader = Reader(self, loader, announce)
        self.stages: list[Stage] = [self.reader, PlannerStage(self), Transfer(self)]
        self.threads: list[threading.Thread] = []
        for group in self.groups:
            group.attached = self
            group.cache.resumed = self.notify
            group.set_depth(prefetch_depth)
            group.horizon = self.horizon
        if threads:
            try:
                self._start_threads()
            except BaseException:
                self.close()
                raise

    def _start_threads(self) -> None:
        with interrupt_later():
            for stage in self.stages:
                thread = threading.Thread(target=self._loop, args=(stage,), name=f"cdlrm-{stage.name}", daemon=True)
                self.threads.append(thread)
                thread.start()

    def look_as_far_as(self, horizon: int | None) -> None:
        """Change the horizon from now on (None: leave it)."""
        if horizon is None:
            return
        self.horizon = horizon
        for group in self.groups:
            group.horizon = horizon

    # --- what the stages ask ---

    def may_read(self) -> bool:
        """Whether one more batch fits: by number, and (beyond the few that must fit) by bytes."""
        in_flight = self.read - self.trained
        least = self.prefetch_depth + 2
        if in_flight >= self.horizon + self.prefetch_depth + 2:
            return False
        return in_flight <= least or self.bytes_in_flight <= 2 * self.window_bytes

    def starved(self) -> bool:
        """Whether the trainer has waited long enough for a loader that does not yield."""
        since = self.waiting_since
        if since is None or self.to_transfer or self.to_scan:
            return False
        return time.monotonic() - since >= self.patience

    # --- threads ---

    def notify(self) -> None:
        with self.lock:
            self.version += 1
            self.condition.notify_all()

    def _loop(self, stage: Stage) -> None:
        if stage is not self.reader and all(group.driver.device.type == "cpu" for group in self.groups):
            give_way()  # to the trainer, which computes on the same cores; the loader is the user's
        while not self.stopped:
            seen = self.version
            try:
                progress = stage.step()
            except BaseException as error:  # reaches the trainer, with its traceback
                self._fail(stage, error)
                return
            if progress:
                self.notify()
            else:
                self._wait(seen, WAIT_SECONDS)

    def _wait(self, seen: int, seconds: float) -> None:
        """Until something changed after version `seen`, at most `seconds`."""
        since = self.waiting_since
        if since is not None:
            seconds = min(seconds, max(since + self.patience - time.monotonic(), 0.001))
        with self.lock:
            if self.version == seen and not self.stopped:
                self.condition.wait(seconds)

    def _fail(self, stage: Stage, error: BaseException) -> None:
        with self.lock:
            if self.failure is None and not self.stopped:
                self.failure = (stage.name, stage.at(), error)
        self.notify()

    # --- the trainer ---

    def advance(self) -> Work | None:
        """End the current batch; the next one, once its rows are on the device (None: the end)."""
        self.finish_batch()
        started = time.monotonic()
        self.waiting_since = started
        try:
            while True:
                seen = self.version
                self._raise_failure()
                if self.stopped:
                    raise UsageError(
                        "this look-ahead was closed: its module was closed, or another look-ahead started on it; "
                        "start a new one."
                    )
                if self.ready:
                    break
                if self.ended and self.read == self.trained:
                    return None
                if self.threads:
                    # Ctrl-C just when the wait has let go of the lock would end in a lock that nobody holds, released.
                    with interrupt_later():
                        self._wait(seen, WAIT_SECONDS)
                else:
                    self.run_stages()
        finally:
            self.waiting_since = None
            self.seconds_stall += time.monotonic() - started
        with self.lock:
            work = self.current = self.ready.popleft()
        for group in self.groups:
            group.begin(work.plans[group], work.lookups.get(group, []))
        return work

    def finish_batch(self) -> None:
        """The trainer is done with the current batch."""
        work, self.current = self.current, None
        if work is None:
            return
        if not self.stopped:  # `close` ended it
            for group in self.groups:
                group.end()
        with self.lock:
            self.trained += 1
            self.bytes_in_flight -= work.nbytes
        self.notify()

    def run_stages(self) -> None:
        """Without threads: one round over the stages, in their order; tests choose other orders."""
        if not any([stage.step() for stage in self.stages]):
            self.patience = 0.0  # nothing else can run: the loader waits for the trainer

    def _raise_failure(self) -> None:
        if self.failure is None:
            return
        stage, index, error = self.failure
        where = f"{stage}, batch {index}"
        if isinstance(error, CdlrmError):
            raise retold(error, f"{where}: {error}") from error
        raise PipelineError(f"{where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop the threads, end the current batch, forget what was only planned.  May be called twice."""
        if self.closed:
            return
        self.stopped = True
        self.notify()
        for thread in self.threads:
            if thread.ident is not None and thread is not threading.current_thread():  # was started
                thread.join(JOIN_SECONDS)
                while thread.is_alive() and not thread.name.endswith(self.reader.name):
                    thread.join(WAIT_SECONDS)  # in a long copy; nothing of the user's can hold it up
                if thread.is_alive():
                    log.warning(
                        "the look-ahead was closed while the loader had not returned for %.0f s; its thread %s ends "
                        "when the loader does", JOIN_SECONDS, thread.name,
                    )  # fmt: skip
        self.current = None
        for group in self.groups:
            if group.attached is self:
                group.abandon()
                group.attached = None
                group.cache.resumed = _nothing
        for queue in (self.to_scan, self.to_plan, self.to_transfer, self.ready):
            queue.clear()
        self.closed = True  # at last: where Ctrl-C comes before, the next one who closes goes on


def _nothing() -> None:
    """Nobody waits for a cache that no look-ahead feeds."""
