"""`Deferred`: gradients that wait for the optimizer's step (`update="step"`), over any number of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .step import Call

if TYPE_CHECKING:
    from .group import Group


class Deferred:
    """The gradients of one group that wait: those of ended batches here, those of the current one in its step."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.earlier: list[Call] = []

    def calls(self) -> list[Call]:
        """The calls whose gradients wait, in order."""
        step = self.group.step
        return self.earlier + ([] if step is None else sorted(step.graded, key=lambda c: c.number))

    def forget(self) -> None:
        """Drop the gradients that wait."""
        self.rescale(lambda call: None)

    def rescale(self, scales: Callable[[Call], float | None]) -> None:
        """Each waiting call's gradient times its scale (None: dropped)."""
        calls, dropped = self.calls(), False
        for call in calls:
            scale = scales(call)
            if scale is None:
                call.grad, dropped = None, True
            elif scale != 1.0 and call.grad is not None:
                call.grad = call.grad * float(np.float32(scale))
        if not dropped:
            return
        group = self.group
        group.counts.skipped_steps += any(call.step.skip for call in calls)  # a GradScaler did not call `step`
        for call in calls:
            call.step.verdicts.clear()
        self.earlier = [call for call in self.earlier if call.grad is not None]
        if group.step is not None:
            group.step.graded = [call for call in group.step.graded if call.grad is not None]

    def step_now(self, scales: Callable[[Call], float | None]) -> None:
        """One update with all gradients since the last; each call's times its scale (None: dropped)."""
        self.group.mend()
        group, step = self.group, self.group.step
        skip = any([call.step.skip for call in self.calls()])  # a device is waited for
        group.driver.poll()
        if skip:
            self.forget()
            return
        self.rescale(scales)
        earlier, self.earlier = self.earlier, []
        calls = earlier + ([] if step is None else step.take())
        if not calls:
            return
        if not earlier and step is not None:
            group.updates.run(calls, group.lr, step.plan_of(calls))
            return
        already = group.loans.holding
        try:  # rows of ended batches may be anywhere
            slots = group.loans.for_training(np.concatenate([call.lookups.rows for call in calls]))
            group.updates.run(calls, group.lr, None, slots)
        finally:
            if not already:
                group.loans.release()
