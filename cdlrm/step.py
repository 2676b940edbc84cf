"""`Step` and `Call`: the life of one batch in one group, from its forward calls to its one update.

A step may hear several forward calls; it makes one update, when the gradients of all calls that are
still alive have come (as torch's optimizers would at the end of the step), and it makes none when no
gradient comes.  A call dies when autograd frees the graph that could still reach it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from .driver.base import Verdict
from .errors import UsageError
from .lookups import Lookups
from .plan import Plan


@dataclass(eq=False)
class Call:
    """One forward call whose gradient may come.  `slots` of its lookups; `grad` once it is there."""

    step: Step
    lookups: Lookups
    slots: np.ndarray
    number: int  # order of the calls of the step
    announced: int  # which announced call this is; -1: none
    grad: Tensor | None = None  # float32 [R, D] on the device
    divided: bool = False  # whether the gradients of mean bags are divided by their length already
    plan: Plan | None = None  # whose slots these are
    owner: Any = None  # deferred updates: the module whose call it is

    def accept(self) -> None:
        """Raise UsageError unless a gradient may come now."""
        if self.number in self.step.used:
            raise UsageError(
                "second backward through the same embedding lookup: its gradient has been taken in the first one; "
                "run the forward again, or add the losses and call backward once."
            )
        if self.number < self.step.sealed:
            raise UsageError(
                "backward through an embedding lookup whose step has been updated: rows were read, or another forward "
                "came, between the backward passes of that step; call them right after each other, or add the losses "
                "and call backward once."
            )
        if self.step.ended:
            raise UsageError(
                f"backward after the end of its batch (batch {self.step.batch}): its rows may have left the cache; "
                f"call backward before the loop asks for the next batch."
            )


@dataclass(eq=False)
class Step:
    """Batch `batch` of a group: its plan (None: no plan, rows are borrowed), its calls, its update."""

    batch: int
    plan: Plan | None = None
    announced: list[Lookups] = field(default_factory=list)
    batches: int = 1  # planned batches that make up this step (on demand: one a forward call)
    counted: bool = False  # its plans are in the statistics already
    ended: bool = False
    verdicts: list[Verdict] = field(default_factory=list)  # whether the gradients that came were finite
    used: set[int] = field(default_factory=set)  # numbers of the calls whose gradient came
    graded: list[Call] = field(default_factory=list)
    sealed: int = 0  # calls before this number get no gradient any more
    plans: list[Plan] = field(default_factory=list)  # all that were executed for this step
    _waiting: list[weakref.ref[Call]] = field(default_factory=list)
    _calls: int = 0

    def __post_init__(self) -> None:
        self.plans = [] if self.plan is None else [self.plan]

    def go_on(self, plan: Plan) -> None:
        """Another plan belongs to this step (on demand: one a forward call)."""
        self.plan = plan
        self.plans.append(plan)

    def open_call(self, lookups: Lookups, slots: np.ndarray, announced: int) -> Call:
        call = Call(self, lookups, slots, self._calls, announced, plan=self.plan if announced >= 0 else None)
        self._calls += 1
        self._waiting.append(weakref.ref(call))
        return call

    def waiting(self) -> bool:
        """Whether a gradient may still come."""
        self._waiting = [ref for ref in self._waiting if (call := ref()) is not None and call.number not in self.used]
        return bool(self._waiting)

    @property
    def skip(self) -> bool:
        """Whether a gradient is not finite, so that there is no update; waits for a device that does not know yet."""
        return not all(self.verdicts)

    def known_skip(self) -> bool:
        """Like `skip`, but what is not known yet counts as finite."""
        return any(verdict.known is False for verdict in self.verdicts)

    def receive(self, call: Call, verdict: Verdict, learns: bool) -> None:
        """A call's gradient came; it takes part in the update if its rows learn."""
        self.used.add(call.number)
        if verdict not in self.verdicts:
            self.verdicts.append(verdict)
        if learns:
            self.graded.append(call)

    def seal(self) -> None:
        """The calls until now that have no gradient yet get none."""
        self.sealed = self._calls

    def take(self) -> list[Call]:
        """The calls with a gradient, in the order of their forwards; they are updated now."""
        calls, self.graded = sorted(self.graded, key=lambda call: call.number), []
        return calls

    def announced_slots(self, i: int) -> np.ndarray:
        """Slots of the lookups of announced call `i`, int [L_i]."""
        assert self.plan is not None
        start = sum(int(lookups.rows.size) for lookups in self.announced[:i])
        return self.plan.slots[start : start + int(self.announced[i].rows.size)]

    def plan_of(self, calls: list[Call]) -> Plan | None:
        """The plan, if it was made for exactly `calls`."""
        if self.batches != 1 or [call.announced for call in calls] != list(range(len(self.announced))):
            return None
        return self.plan
