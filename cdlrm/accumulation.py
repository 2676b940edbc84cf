"""Notice what a module cannot see by itself: gradient accumulation, and a GradScaler that it was not given.

With `update="backward"` every backward pass is an update, and a loop that accumulates k micro-batches before its
optimizer's step would get k updates instead of one.  torch tells when any optimizer steps, so this is known about a
forward call: since the last step the module has been updated, and parameters of optimizers that have stepped hold
gradients that are not zero.  If the backward of that call then finds that it has just added to one of them, it is
accumulation, and it is refused before it updates anything.  Loops that only leave out a step (zero_grad comes between)
or have no optimizer beside ours do not add to such a gradient.

Before any optimizer has stepped nothing is known, so the first round of an accumulating loop goes through: its step is
told in the log, and the second round is refused.

A GradScaler is found on the stack when it steps an optimizer.  It concerns the modules of the newest backward pass,
unless optimizers have stepped after theirs without one, or no loss of theirs was multiplied by a constant, as a
GradScaler does.  A module that is trained without any optimizer, by such a loss (or on a GPU, where that is not seen),
beside another model that has a GradScaler, can be given one that is disabled; the refusal says so.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import UsageError

log = logging.getLogger("cdlrm")

Earlier = list[tuple["weakref.ref[Tensor]", Tensor, int]]
"""Parameters with the gradients that they held at a forward call, and the versions of those."""

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooked: list[Any] = []
_newest = [-1]  # the newest backward pass that came to a module
_FRAMES = 8  # so far up GradScaler.step and torch.autograd.backward are looked for


def watch(module: Any) -> None:
    """Compare the updates of `module` (`updates_made()`) with the steps of torch's optimizers from now on."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))
    _watched.add(module)


def earlier_gradients(module: Any) -> Earlier:
    """At a training forward: the gradients that its backward must not add to; mostly there are none."""
    known = module.updates_known
    if known is None or module.several_updates_a_step or module.updates_made() == known:
        return []
    found: Earlier = []
    for optimizer in list(_stepped):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad = parameter.grad
            if type(grad) is Tensor and grad.layout == torch.strided:
                module.groups[0].driver.waited("accumulation", 1)
                if bool(grad.any()):
                    found.append((weakref.ref(parameter), grad, grad._version))
    return found


def refuse_accumulation(module: Any, earlier: Earlier) -> None:
    """In the backward of that forward, before rows are updated: UsageError if it adds to what was there."""
    module.backward_pass = _newest[0] = torch._C._current_graph_task_id()
    if module.grad_scaler is None and not (module.stepped_without_scaler or module.loss_may_be_scaled):
        module.loss_may_be_scaled = not _surely_unscaled()
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
    scaler = _scaler_of_step()
    for module in list(_watched):
        made, known = module.updates_made(), module.updates_known
        module.updates_known = made
        fresh = made - (known or 0)
        if fresh or module.gradients_wait():
            if scaler is None:
                module.stepped_without_scaler = True
            elif module.backward_pass == _newest[0] and _unaware(module):
                raise UsageError(
                    f"a GradScaler is in use, but {type(module).__name__} was not given it, so its rows have seen "
                    f"scaled gradients, unless it scales the loss of another model only, which cannot be told apart "
                    f"here; set module.grad_scaler = scaler before the first step, or, if this module's loss is not "
                    f"scaled, module.grad_scaler = torch.amp.GradScaler(enabled=False)."
                )
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


def _scaler_of_step() -> Any:
    """The GradScaler whose `step` has called the optimizer's, if there is one and it scales."""
    frame, left = sys._getframe(2), _FRAMES
    while frame is not None and left:
        if frame.f_code.co_name in ("step", "_maybe_opt_step"):
            found = frame.f_locals.get("self")
            if isinstance(found, torch.amp.GradScaler):
                return found if found.is_enabled() and found.get_scale() != 1.0 else None
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]
    return None


def _surely_unscaled() -> bool:
    """In a module's backward: whether nothing in the graph of the running pass multiplies by a constant, as
    `GradScaler.scale` does.  False also where that is not seen: on a thread of autograd's own, in compiled code."""
    frame, left = sys._getframe(2), 2 * _FRAMES
    while frame is not None and left:
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == "torch.autograd":
            break
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]
    else:
        return False
    if frame.f_locals["grad_tensors"] not in (None, (None,)):
        return False
    waiting = [getattr(root, "grad_fn", None) for root in frame.f_locals["tensors"]]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None or node.name().startswith("Compiled"):
            return False
        after = [each for each, _ in node.next_functions]
        if None in after and node.name().startswith("Mul"):
            return False
        fresh = {each for each in after if each is not None} - seen
        seen |= fresh
        waiting += fresh
    return True


def _unaware(module: Any) -> bool:
    if module.grad_scaler is not None or module.stepped_without_scaler or not module.loss_may_be_scaled:
        return False
    return (
        not module.gradients_wait() or module.gradient_scale() == 1.0
    )  # else the anchor was unscaled, and so are they
