"""Notice gradient accumulation over updates that are made in the backward pass.

With `update="backward"` every backward pass is an update, and a loop that accumulates k micro-batches
before its optimizer's step would get k updates instead of one.  A module cannot see that by itself; torch
tells when any optimizer steps.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

log = logging.getLogger("cdlrm")

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked: list[Any] = []


def watch(module: Any) -> None:
    """Compare the updates of `module` (`updates_made()`) with the steps of torch's optimizers from now on."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))
    _watched.add(module)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer steps: each module should have made one update since the last time (told in the second round)."""
    if getattr(optimizer, "of_tables", False):
        return
    for module in list(_watched):
        made, known = module.updates_made(), module.updates_known
        module.updates_known = made
        # What came before the first step may have had another loop, or none with an optimizer.
        if known is not None and made - known > 1 and not module.told_accumulation:
            module.told_accumulation = True
            log.warning(
                "gradients are accumulated: the rows of %s were updated in each of %d backward passes before one step "
                'of %s, which differs from one update of all; make the module with update="step" and call its '
                "optimizer.step(), or step after each backward (said once)",
                type(module).__name__, made - known, type(optimizer).__name__,
            )  # fmt: skip
