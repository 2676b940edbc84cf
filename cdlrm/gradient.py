"""What torch sees of row gradients: a norm while they wait, a refusal once they have been applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .driver.base import Verdict
from .errors import UsageError
from .scaling import has_unscaled

if TYPE_CHECKING:
    from .group import Group

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_APPLIED = (
    "the rows of cdlrm tables were updated in the backward pass, so their gradients cannot be clipped or changed any "
    'more; make the module with update="step" and call its optimizer.step() after clipping, or clip the dense '
    "parameters only."
)
_NO_ROWS = (
    "the parameters of a cdlrm optimizer are no rows, so there is nothing to clip or change in them; clip "
    'model.parameters() of a model whose modules were made with update="step".'
)


class AppliedGradient(Tensor):
    """Stands for row gradients that torch's tools cannot change: 0 for optimizers, infinity after a step
    that a GradScaler shall see as skipped.  It has no norm, since clipping it would silently clip nothing.

    `scaler_known`: whether the module was given its GradScaler, and so has divided by the scale.
    """

    sentence = _APPLIED
    scaler_known = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        mine = _among(args, AppliedGradient)
        changed = _in_place(name) and name not in _NO_CHANGE  # no optimizer of torch's does
        if (mine and changed) or _written(kwargs, cls) or any(word in name for word in ("norm", "clamp", "clip")):
            raise UsageError(mine[0].sentence if mine else _APPLIED)
        if name == _UNSCALE and not all(gradient.scaler_known for gradient in mine):
            raise UsageError(
                "a GradScaler is in use, but a cdlrm module was not given it, so its rows have seen scaled gradients; "
                "set module.grad_scaler = scaler before the first step."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return _as_theirs(func(*args, **kwargs), mine)


def _as_theirs(out: Any, mine: list[Any]) -> Any:
    """`out`, of the class of the gradient whose memory it shows: `grad.data.clamp_()` is as `grad.clamp_()`."""
    if mine and type(out) is Tensor and out.layout == torch.strided and out.numel():
        if out.untyped_storage().data_ptr() == mine[0].untyped_storage().data_ptr():
            return _like(out, mine[0])
    return out


def _like(out: Tensor, mine: Any) -> Any:
    view = torch.Tensor._make_subclass(type(mine), out)
    view.__dict__.update(mine.__dict__)
    return view


def _among(args: Any, kind: type) -> list[Any]:
    """The tensors of a class in a function's first argument, which may be a list."""
    first = args[0] if args else None
    return [item for item in (first if isinstance(first, (list, tuple)) else (first,)) if isinstance(item, kind)]


def _written(kwargs: dict[str, Any], kind: type) -> bool:
    """Whether a tensor of the class is given as `out=`."""
    return bool(_among((kwargs.get("out"),), kind))


def applied_gradient(verdict: Verdict | None, scaler_known: bool, like: Tensor, of_optimizer: bool = False) -> Tensor:
    """For an anchor, or (`of_optimizer`) for the parameters of a FusedOptimizer.  `verdict`: whether the gradients
    were finite, None: a GradScaler need not know."""
    value = torch.zeros_like(like, requires_grad=False) if verdict is None else verdict.stand_in().to(like.device)
    out = torch.Tensor._make_subclass(AppliedGradient, value)
    out.scaler_known = scaler_known
    if of_optimizer:
        out.sentence = _NO_ROWS
    return out


def refuse_replaced(anchor: Tensor, held: bool) -> None:
    """At an optimizer's step after an update in the backward pass: UsageError if `p.grad = p.grad / 2`, or `p.grad =
    None` where the optimizer has `held` the anchor, was done with the anchor's gradient: the rows have not seen it."""
    if not isinstance(anchor.grad, AppliedGradient) and (held or anchor.grad is not None):
        raise UsageError(f"the gradient of a cdlrm module's anchor was replaced or dropped, but {_APPLIED}")


def tell_scaler(group: Group) -> None:
    """Let a GradScaler that steps the module's optimizer see whether the gradients of `group` were finite."""
    steps = [] if group.step is None else [group.step]
    if group.deferred is not None:
        steps += [call.step for call in group.deferred.calls()]
    verdicts = [verdict for step in steps for verdict in step.verdicts]
    worst = next((v for v in verdicts if v.known is False), verdicts[-1] if verdicts else None)
    if worst is not None and worst.known is None and not group.scaler_known:
        worst = None  # nobody asks, and a device would have to make the answer
    for parameter in group.hyper.get("params", ()):
        parameter.grad = applied_gradient(worst, group.scaler_known, parameter, of_optimizer=True)


class WaitingGradient(Tensor):
    """The anchor's gradient while row gradients wait for the optimizer's step: their norm.

    What scales it (torch's clip_grad_norm_, `p.grad = p.grad / 2`) scales the rows' gradients too; what could not be
    passed on to them is refused.  `scaler`: the module's GradScaler, by whose scale the module has divided, so that an
    optimizer which holds the anchor as well must not do it again.
    """

    scaler: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        mine = _among(args, WaitingGradient)
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        norm = bool(mine) and "norm" in name
        not_passed_on = (mine and _not_passed_on(name)) or _written(kwargs, cls)
        if not_passed_on or (norm and order not in (2, 2.0, None, "fro")):
            raise UsageError(f"{name}: {_ONE_NUMBER}")
        if norm and any(g.scaler is not None and not has_unscaled(g.scaler) for g in mine):
            raise UsageError(
                f"{name}: gradients are clipped, or their norm is taken, while a GradScaler's scale is still in those "
                f"of torch's parameters (those of cdlrm rows are without it); call scaler.unscale_(optimizer) before."
            )
        with torch._C.DisableTorchFunctionSubclass():
            kept = [(g, g.clone()) for g in mine if g.scaler is not None and name == _UNSCALE]
            out = func(*args, **kwargs)
            for gradient, value in kept:
                gradient.copy_(value)
            whose = _multiplied(name, args)
            return _as_theirs(out, mine) if whose is None else _like(out, whose)


_ONE_NUMBER = (
    "the gradients of cdlrm rows wait as one number, their 2-norm, which may only be scaled; use "
    "torch.nn.utils.clip_grad_norm_ with norm_type=2, or change the dense parameters' gradients only."
)
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")


def _multiplied(name: str, args: Any) -> Any:
    """The gradient that a function (not in place) only multiplies by a number, or copies; None for other functions."""
    if name == "clone" and isinstance(args[0], WaitingGradient):
        return args[0]
    for mine, other in (args[:2], args[1::-1]) if len(args) == 2 and name in _PRODUCTS + _QUOTIENTS else ():
        number = isinstance(other, (int, float)) or (type(other) is Tensor and other.numel() == 1)
        if isinstance(mine, WaitingGradient) and number and (name in _PRODUCTS or mine is args[0]):
            return mine
    return None


def require_one_number(anchor: Tensor) -> None:
    """Before rows are updated with gradients that waited: UsageError if the anchor's was replaced by something else
    than a multiple of it, which cannot be passed on to them."""
    if anchor.grad is not None and not isinstance(anchor.grad, WaitingGradient):
        raise UsageError(f"the gradient of a cdlrm module's anchor was replaced, but {_ONE_NUMBER}")


_NO_CHANGE = ("zero_", "_foreach_zero_", "requires_grad_", "detach_", _UNSCALE)
_SCALING = ("mul_", "div_", "_foreach_mul_", "_foreach_div_", "__imul__", "__itruediv__", *_NO_CHANGE)


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem"))


def _not_passed_on(name: str) -> bool:
    return _in_place(name) and name not in _SCALING


def waiting_gradient(norm: float, scaler: Any, like: Tensor) -> WaitingGradient:
    """For an anchor; `norm` of the row gradients that wait; `scaler`: see `WaitingGradient`."""
    value = torch.full((), norm, device=like.device)  # made there: no device is waited for
    out = torch.Tensor._make_subclass(WaitingGradient, value)
    out.scaler = scaler
    return out
