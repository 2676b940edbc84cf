"""Notice what a module that updates in the backward pass cannot see by itself: gradient accumulation.

With `update="backward"` every backward pass is an update, and a loop that accumulates k micro-batches before its
optimizer's step would get k updates instead of one.  torch tells when any optimizer steps, so this is known about a
forward call: since an optimizer's last step the module has been updated, and parameters of that optimizer hold
gradients that are not zero.  If the backward of that call then finds that it has just added to one of them, it is
accumulation, and it is refused before it updates anything.  Loops that only leave out a step (zero_grad comes between)
or have no optimizer beside ours do not add to such a gradient.

Before any optimizer has stepped nothing is known, so the first round of an accumulating loop goes through: its step is
told in the log, and the second round is refused.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import UsageError
from .gradient import refuse_replaced

log = logging.getLogger("cdlrm")

Earlier = list[tuple["weakref.ref[Tensor]", Tensor, int]]
"""Parameters with the gradients that they held at a forward call, and the versions of those."""

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooked: list[Any] = []


def watch(module: Any) -> None:
    """Compare the updates of `module` (`updates_made()`) with the steps of torch's optimizers from now on."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))
    _watched.add(module)


def earlier_gradients(module: Any) -> Earlier:
    """At a training forward: the gradients that its backward must not add to; mostly there are none."""
    if module.several_updates_a_step:
        return []
    made, known = module.updates_made(), module.updates_known
    found: Earlier = []
    for optimizer in [each for each in _stepped if known.get(each, made) != made]:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad = parameter.grad
            if type(grad) is Tensor and grad.layout == torch.strided:
                module.groups[0].driver.waited("accumulation", 1)
                if bool(grad.any()):
                    found.append((weakref.ref(parameter), grad, grad._version))
    return found


def refuse_accumulation(module: Any, earlier: Earlier) -> None:
    """In the backward of that forward, before rows are updated: UsageError if it adds to what was there."""
    for reference, grad, version in earlier:
        parameter = reference()
        # More than one change: it was zeroed in place in between.
        if parameter is not None and parameter.grad is grad and grad._version == version + 1:
            raise UsageError(
                f"gradients are accumulated over several backward passes, but each of them updates the rows of "
                f'{type(module).__name__} at once; make the module with update="step", call its optimizer.step(), and '
                f"start the training again, since the first step has had such updates already (or set "
                f"module.several_updates_a_step = True if that is what you want)."
            )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer steps: each module should have made one update since the last time."""
    if getattr(optimizer, "of_tables", False):
        return
    _stepped.add(optimizer)
    for module in list(_watched):
        made = module.updates_made()
        fresh = made - module.updates_known.get(optimizer, max(module.updates_known.values(), default=0))
        module.updates_known[optimizer] = made
        if fresh and any(p is module.anchor for group in optimizer.param_groups for p in group["params"]):
            refuse_replaced(module.anchor)
        if fresh > 1 and not (module.told_accumulation or module.several_updates_a_step) and _added(optimizer, fresh):
            module.told_accumulation = True
            log.warning(
                "gradients are accumulated, it seems: the rows of %s were updated in each of %d backward passes before "
                'one step of %s, which differs from one update of all; make the module with update="step" and call '
                "its optimizer.step(), or step after each backward (said once)",
                type(module).__name__, fresh, type(optimizer).__name__,
            )  # fmt: skip


def _added(optimizer: torch.optim.Optimizer, times: int) -> bool:
    """Whether a gradient of the optimizer was changed in place as often as that many backward passes do."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None and p.grad._version >= times - 1 for p in parameters)
