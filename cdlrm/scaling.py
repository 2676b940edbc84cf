"""Notice a GradScaler that a module was not given.

Its rows would be trained with gradients that are scaled.  Autograd does not tell a backward function by what its loss
was multiplied, so `GradScaler.scale` leaves a mark: a hook on the node it has made, which tells when a backward pass
that goes through it begins and ends.  A module's backward in such a pass is refused before anything is updated.

A loss that is scaled without `scale` (by `get_scale()` by hand, in compiled code, in a subclass that has its own)
carries no mark.  A GradScaler that steps an optimizer without ever having marked a pass is therefore refused beside
modules that were trained since its last step and that do not know it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .errors import UsageError

_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_running: dict[int, weakref.ref[GradScaler]] = {}  # backward passes that are running and whose loss one has scaled
_marked: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # whose losses carry marks
_stepped: weakref.WeakKeyDictionary[GradScaler, int] = weakref.WeakKeyDictionary()  # at which pass of a module
_passes = itertools.count(1)
_installed: list[bool] = []


def watch(module: Any) -> None:
    """Refuse that `module` is trained with a GradScaler that it was not given, from now on."""
    if not _installed:
        _installed.append(True)
        _wrap("scale", _mark_after)
        _wrap("step", _refuse_before)
    _modules.add(module)


def refuse_unknown_scaler(module: Any) -> None:
    """In the backward of `module`, before rows are updated: UsageError if its loss was scaled and it does not know."""
    module.newest_pass = next(_passes)
    known = module.grad_scaler
    if not _running or (known is not None and not known.is_enabled()):
        return
    scalers = [scaler for reference in _running.values() if (scaler := reference()) is not None]
    if scalers and not any(scaler is known for scaler in scalers):
        _running.clear()  # the pass ends here, without its end being told
        raise UsageError(
            f"a GradScaler has scaled this loss, but {type(module).__name__} was "
            + ("not given it" if known is None else "given another one")
            + ", so its rows would see scaled gradients; nothing was updated; set module.grad_scaler = scaler, or, if "
            "only another part of the loss is scaled, module.grad_scaler = torch.amp.GradScaler(enabled=False)."
        )


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """`around(original, scaler, ...)` in place of a method of GradScaler."""
    original = getattr(GradScaler, name)

    @functools.wraps(original)
    def method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(GradScaler, name, method)


def _mark_after(original: Any, scaler: GradScaler, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    return scaled if torch.compiler.is_compiling() or not scaler.is_enabled() else _mark(scaler, scaled)


def _mark(scaler: GradScaler, scaled: Any) -> Any:
    """Mark what `scale` has returned: a tensor, or an iterable of them, which may be lazy."""
    if isinstance(scaled, Tensor):
        if scaled.grad_fn is not None:
            scaled.grad_fn.register_prehook(functools.partial(_pass_begins, weakref.ref(scaler)))
    elif isinstance(scaled, (list, tuple)):
        for each in scaled:
            _mark(scaler, each)
    elif isinstance(scaled, Iterable):
        return (_mark(scaler, each) for each in scaled)
    return scaled


def _pass_begins(reference: weakref.ref[GradScaler], grads: Any) -> None:
    scaler = reference()
    if scaler is not None:
        _marked.add(scaler)
        number = torch._C._current_graph_task_id()
        _running[number] = reference
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
