"""Notice a GradScaler that a module was not given, and a loss that the module's GradScaler did not scale.

Rows would be trained with gradients that are scaled, or divided by a scale that they do not have.  Autograd does not
tell a backward function by what its loss was multiplied, so `GradScaler.scale` leaves a mark: a hook on the node it has
made, which tells when a backward pass that goes through it begins and ends.  A module's backward in a pass with the
wrong marks is refused before anything is updated.

A loss that is scaled without `scale` (by `get_scale()` by hand, in compiled code, in a subclass that has its own)
carries no mark.  A GradScaler that steps an optimizer without ever having marked a pass is therefore refused beside
modules that were trained since its last step and that do not know it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .errors import UsageError

_modules: weakref.WeakSet[Any] = weakref.WeakSet()
# Backward passes that are running and whose loss a GradScaler has scaled: which, the thread that asked it to, and the
# thread that runs the pass (another one where the loss is on a GPU).
_running: dict[int, tuple[weakref.ref[GradScaler], int, int]] = {}
_marked: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # whose losses carry marks
_stepped: weakref.WeakKeyDictionary[GradScaler, int] = weakref.WeakKeyDictionary()  # at which pass of a module
_unscaled: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # those that have unscaled an optimizer since their `update`
_passes = itertools.count(1)
_installed: list[bool] = []


def watch(module: Any) -> None:
    """Refuse that `module` is trained with a GradScaler that it was not given, from now on."""
    if not _installed:
        _installed.append(True)
        _wrap("scale", _mark_after)
        _wrap("step", _refuse_before)
        _wrap("unscale_", _note_unscaled)
        _wrap("update", _note_updated)
    _modules.add(module)


def pass_may_begin() -> None:
    """At a forward or at `scale`: no pass is running that this thread has begun, so one whose end was not told has
    failed."""
    if _running and torch._C._current_graph_task_id() == -1:
        here = threading.get_ident()
        for number in [number for number, (_, thread, _) in list(_running.items()) if thread == here]:
            _running.pop(number, None)


def refuse_wrong_scaler(module: Any, deferred: bool) -> None:
    """In the backward of `module`, before rows are updated or (`deferred`) their gradients kept: UsageError if its loss
    was scaled and it does not know, or the other way round.  Gradients that are kept may be another scaler's: they are
    divided by the scale of the module's, as that would unscale them in torch."""
    module.newest_pass = next(_passes)
    known = module.grad_scaler
    if known is not None and not known.is_enabled():
        return
    here = threading.get_ident()
    scalers = [s for reference, _, runs in list(_running.values()) if runs == here and (s := reference()) is not None]
    name = type(module).__name__
    if known is not None and not scalers and known.get_scale() != 1.0:
        raise UsageError(
            f"{name} was given a GradScaler, but this loss was not scaled by its scale(), so the gradients of its rows "
            f"would be divided by a scale that they do not have; nothing was updated; scale the loss, or set "
            f"module.grad_scaler = None while losses are not scaled."
        )
    if scalers and not any(scaler is known for scaler in scalers) and (known is None or not deferred):
        raise UsageError(
            f"a GradScaler has scaled this loss, but {name} was "
            + ("not given it" if known is None else "given another one")
            + ", so its rows would see scaled gradients; nothing was updated; set module.grad_scaler = scaler, or, if "
            "only another part of the loss is scaled, module.grad_scaler = torch.amp.GradScaler(enabled=False)."
        )


def has_unscaled(scaler: GradScaler) -> bool:
    """Whether it has unscaled the gradients of an optimizer since its last `update`."""
    return scaler in _unscaled


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """`around(original, scaler, ...)` in place of a method of GradScaler."""
    original = getattr(GradScaler, name)

    @functools.wraps(original)
    def method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(GradScaler, name, method)


def _mark_after(original: Any, scaler: GradScaler, outputs: Any) -> Any:
    pass_may_begin()
    scaled = original(scaler, outputs)
    return scaled if torch.compiler.is_compiling() or not scaler.is_enabled() else _mark(scaler, scaled)


def _mark(scaler: GradScaler, scaled: Any) -> Any:
    """Mark what `scale` has returned: a tensor, or an iterable of them, which may be lazy."""
    if isinstance(scaled, Tensor):
        if scaled.grad_fn is not None:
            scaled.grad_fn.register_prehook(functools.partial(_pass_begins, weakref.ref(scaler), threading.get_ident()))
    elif isinstance(scaled, (list, tuple)):
        for each in scaled:
            _mark(scaler, each)
    elif isinstance(scaled, Iterable):
        return (_mark(scaler, each) for each in scaled)
    return scaled


def _pass_begins(reference: weakref.ref[GradScaler], thread: int, grads: Any) -> None:
    scaler = reference()
    if scaler is not None:
        _marked.add(scaler)
        number = torch._C._current_graph_task_id()
        _running[number] = reference, thread, threading.get_ident()
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_pass_ends, number))


def _pass_ends(number: int) -> None:
    _running.pop(number, None)


def _refuse_before(original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and scaler.is_enabled():
        since = _stepped.get(scaler, 0)
        _stepped[scaler] = next(_passes)
        if scaler not in _marked:
            for module in list(_modules):
                if module.newest_pass > since and module.grad_scaler is None and scaler.get_scale() != 1.0:
                    raise UsageError(
                        f"a GradScaler is in use, but {type(module).__name__} was not given it, so its rows have seen "
                        f"scaled gradients, unless it scales the loss of another model only, which cannot be told "
                        f"apart where losses are not scaled by its scale(); set module.grad_scaler = scaler before the "
                        f"first step, or, if this module's loss is not scaled, module.grad_scaler = "
                        f"torch.amp.GradScaler(enabled=False)."
                    )
    return original(scaler, *args, **kwargs)


def _note_unscaled(original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    _unscaled.add(scaler)
    return original(scaler, *args, **kwargs)


def _note_updated(original: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    _unscaled.discard(scaler)
    return original(scaler, *args, **kwargs)
