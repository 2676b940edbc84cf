"""`FusedOptimizer`: the learning rates of an embedding module as a `torch.optim.Optimizer`.

The update itself runs inside the backward pass, with the `lr` that this object holds at that moment,
so that torch's schedulers work.  There is one param_group a group of tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .group import Group


class FusedOptimizer(torch.optim.Optimizer):
    """`param_groups[i]["lr"]` is the learning rate of `groups[i]` for its next update.

    `step()` applies gradients that still wait for another backward of the same step; `zero_grad()`
    does nothing.  The rows' optimizer state moves with the rows: see the module's `table_state`.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        params = [
            {
                "params": [nn.Parameter(torch.zeros(()), requires_grad=False)],
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

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply gradients that wait for calls which have not had their backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.groups:
            group.settle(force=True)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients of rows are used up by the backward pass."""

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
