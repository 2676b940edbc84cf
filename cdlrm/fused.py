"""`FusedOptimizer`: the learning rates of an embedding module as a `torch.optim.Optimizer`.

The update itself runs inside the backward pass, with the `lr` that this object holds at that moment,
so that torch's schedulers work.  There is one param_group a group of tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .group import Group
from .step import Call


class FusedOptimizer(torch.optim.Optimizer):
    """`param_groups[i]["lr"]` is the learning rate of `groups[i]` for its next update.

    `step()` applies gradients that still wait for another backward of the same step; `zero_grad()`
    does nothing.  With `update="step"` it is as in torch: gradients wait for `step()`, over any number
    of backward passes, and `zero_grad()` drops them.  The rows' optimizer state moves with the rows:
    see the module's `table_state`.
    """

    of_tables = True

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        params = [
            {
                "params": [nn.Parameter(torch.zeros((), device=group.driver.device), requires_grad=False)],
                "lr": group.optimizer.lr,
                "tables": [t.name for t in group.tables],
            }
            for group in groups
        ]
        super().__init__(params, {})
        self._hand_out()

    def _hand_out(self) -> None:
        for group, hyper in zip(self.groups, self.param_groups, strict=True):
            group.hyper = hyper

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by torch's constructor for each group of tables; later there are none to add."""
        if len(self.param_groups) == len(self.groups):
            raise UsageError(
                "the optimizer of cdlrm tables updates their rows only, and would never step other parameters; give "
                "those to an optimizer of torch of their own."
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply the gradients that wait: for other backward passes of the same step, or (`update="step"`) all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.groups:
            if group.deferred is not None:
                group.deferred.step_now(_scale)
            else:
                group.settle(force=True)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that wait for `step` (`update="step"`); else they are used up by the backward pass."""
        for group in self.groups:
            if group.deferred is not None:
                group.deferred.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._hand_out()

    @property
    def _opt_called(self) -> bool:
        """torch's schedulers warn unless `step` was called; here the backward pass is the step."""
        return True

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        """Set by torch's schedulers; the answer stays the same."""


def _scale(call: Call) -> float | None:
    """By what the gradient of a call was scaled since it came (None: dropped)."""
    scale: float | None = call.owner.gradient_scale()
    return scale
