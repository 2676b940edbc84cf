"""Notice what a module that updates in the backward pass cannot see by itself: gradient accumulation.

With `update="backward"` every backward pass is an update, and a loop that accumulates k micro-batches before its
optimizer's step would get k updates instead of one.  torch tells when any optimizer steps, so this is known about a
forward call: since an optimizer's last step the module has been updated, and parameters of that optimizer hold
gradients that are not zero.  If the backward pass of that call adds to one of them, and to no parameter of an optimizer
that did step after the update, it is accumulation: where it is known in time it is refused before anything is updated,
else at the end of the pass.  Loops that only leave out a step (zero_grad comes between), two networks that are stepped
in turn, or no optimizer beside ours are not taken for it.

An optimizer that holds the module's own parameters (its anchor, or its `optimizer`) should step once an update.

Before any optimizer has stepped nothing is known, so the first round of an accumulating loop goes through: its step is
told in the log, and the second round is refused.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import UsageError
from .gradient import WaitingGradient, refuse_replaced

log = logging.getLogger("cdlrm")

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooked: list[Any] = []


def watch(module: Any) -> None:
    """Compare the updates of `module` (`updates_made()`) with the steps of torch's optimizers from now on."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_before_step))
    _watched.add(module)


class Stepping:
    """What a module knows of the optimizers that step: `known`, how many updates it had made at the last step of each;
    `seen`, at the last one of any; `own`, at the last one of an optimizer of its own."""

    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.seen = self.own = 0
        self.without_rows = 0  # steps in a row, with `update="step"`, that left the rows' gradients out
        self.told = False  # of accumulation


class Earlier:
    """Gradients at a forward call: `theirs`, which its backward pass must not add to (mostly there are none), unless it
    adds to `stepped`, those of optimizers that have stepped since the last update."""

    def __init__(self) -> None:
        self.theirs: list[_Seen] = []
        self.stepped: list[_Seen] = []

    def refuse(self, module: Any, ended: bool) -> None:
        """In the backward pass of that call before rows are updated, or when it has `ended`: UsageError if it has added
        to them."""
        if self.stepped and not ended:
            return
        added = any(seen.changes() == 1 for seen in self.theirs)  # by more it was zeroed in place in between
        if added and not any(seen.changes() for seen in self.stepped):
            raise UsageError(_refusal(module))


class _Seen:
    """A parameter, and its gradient as it was."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.grad, self.version = parameter.grad, 0 if parameter.grad is None else parameter.grad._version

    def changes(self) -> int:
        """How often it was changed since; 2 if it is another one."""
        parameter = self.parameter()
        now = None if parameter is None else parameter.grad
        if now is None or now is not self.grad:
            return 0 if now is None else 2
        return now._version - self.version


def earlier_gradients(module: Any) -> Earlier | None:
    """At a training forward; None: there is nothing that its backward could accumulate."""
    if module.several_updates_a_step:
        return None
    made, known = module.updates_made(), module.stepping.known
    late = [each for each in _stepped if known.get(each, made) != made]
    found = Earlier()
    for parameter in (p for optimizer in late for p in _parameters(optimizer)):
        grad = parameter.grad
        if type(grad) is Tensor and grad.layout == torch.strided:
            module.groups[0].driver.waited("accumulation", 1)
            if bool(grad.any()):
                found.theirs.append(_Seen(parameter))
    if not found.theirs:
        return None
    others = [each for each in _stepped if known.get(each) == made]
    found.stepped = [_Seen(p) for optimizer in others for p in _parameters(optimizer) if p.requires_grad]
    return found


def refuse_accumulation(module: Any, earlier: Earlier | None) -> None:
    """In the backward of that forward, before rows are updated."""
    if earlier is not None:
        earlier.refuse(module, ended=False)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: earlier.refuse(module, ended=True))


def _refusal(module: Any) -> str:
    return (
        f"gradients are accumulated over several backward passes before a step, but each of them updates the rows of "
        f'{type(module).__name__} at once; make the module with update="step", call its optimizer.step(), and start '
        f"the training again, since the first step has had such updates already (or set "
        f"module.several_updates_a_step = True if that is what you want)."
    )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer steps: each module should have made one update since the last time."""
    tables = getattr(optimizer, "of_tables", False)
    if not tables:
        _stepped.add(optimizer)
    held = {id(parameter) for parameter in _parameters(optimizer)}
    for module in list(_watched):
        own = module.optimizer is optimizer or id(module.anchor) in held
        if module.groups[0].deferred is not None:
            if own:
                _expect_step(module, optimizer)
            continue
        if tables and not own:
            continue
        made, fresh = _fresh(module, optimizer, own)
        if fresh > 1 and own:
            for group in module.groups:
                group.count_skipped()  # what the device has skipped was no update
            made, fresh = _fresh(module, optimizer, own)
        module.stepping.known[optimizer] = module.stepping.seen = made
        if own:
            module.stepping.own = made
        if fresh:
            refuse_replaced(module.anchor, held=own and not tables)
        if fresh <= 1 or module.several_updates_a_step:
            continue
        if not module.stepping.told and (own or _added(optimizer, fresh)):
            module.stepping.told = True
            log.warning(
                "gradients are accumulated, it seems: the rows of %s were updated in each of %d backward passes before "
                'one step of %s, which differs from one update of all; make the module with update="step" and call '
                "its optimizer.step(), or step after each backward (said once)",
                type(module).__name__, fresh, type(optimizer).__name__,
            )  # fmt: skip
        elif own:
            raise UsageError(_refusal(module))


def _expect_step(module: Any, optimizer: torch.optim.Optimizer) -> None:
    """With `update="step"`, at a step of the module's optimizer or of one that holds its anchor: say it when the rows'
    gradients never come to their step, since only torch's is made, or since zero_grad comes first."""
    grad = module.anchor.grad
    if optimizer is module.optimizer:
        late = grad is None and module.waits()
        module.stepping.without_rows = module.stepping.without_rows + 1 if late else 0
    elif isinstance(grad, WaitingGradient):
        module.stepping.without_rows += 1
    else:
        return
    if module.stepping.without_rows == 5:
        log.warning(
            "the rows of %s are not trained: their gradients waited, but were dropped, or torch's optimizers alone "
            "were stepped, in five steps; call module.optimizer.step() too, before any zero_grad (said once)",
            type(module).__name__,
        )  # fmt: skip


def _fresh(module: Any, optimizer: torch.optim.Optimizer, own: bool) -> tuple[int, int]:
    """Updates that the module has made, and those of them since the optimizer's last step; where it is its `own`, since
    the last one of any such; of one that is new, since any one's."""
    made, known = module.updates_made(), module.stepping.known
    return made, made - (module.stepping.own if own else known.get(optimizer, module.stepping.seen))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _added(optimizer: torch.optim.Optimizer, times: int) -> bool:
    """Whether a gradient of the optimizer was changed in place as often as that many backward passes do."""
    return any(p.grad is not None and p.grad._version >= times - 1 for p in _parameters(optimizer))
