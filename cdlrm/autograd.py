"""The bridge to autograd: pooled lookups whose backward pass applies the update.

Rows are no parameters: their gradient never exists as a tensor.  A scalar anchor parameter makes
autograd call the backward; its own gradient is a stand-in (see `gradient.py`).  Per-sample weights get a true gradient.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulation import earlier_gradients, refuse_accumulation
from .driver.base import Verdict
from .errors import NonFiniteGradientError, UsageError
from .group import Group
from .lookups import Lookups
from .scaling import pass_may_begin, refuse_wrong_scaler
from .step import Call


@dataclass(eq=False)
class GroupCall:
    """One forward call's share of a group."""

    group: Group
    lookups: Lookups
    call: Call | None = None  # None: for reading only


def pooled_lookup(module: Any, parts: list[GroupCall], anchor: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """One output [B, features of that dim, dim] for every dim, ascending."""
    if torch.is_grad_enabled() and (anchor.requires_grad or weights):
        return list(_PooledLookup.apply(module, parts, list(weights), anchor, *weights.values()))
    with torch.no_grad():
        return _forward(parts, module.output_dtype, training=False)


def _forward(parts: list[GroupCall], dtype: torch.dtype, training: bool) -> list[Tensor]:
    outputs: dict[int, Tensor] = {}
    for each in parts:
        group, lookups = each.group, each.lookups
        shape = (lookups.batch_size, lookups.width, group.dim)
        if group.dim not in outputs:
            outputs[group.dim] = group.driver.output(shape, dtype)
        matrix = outputs[group.dim].view(-1, group.dim)
        if training:
            each.call = group.training_slots(lookups)
            started = time.perf_counter()
            group.records.lookup(each.call.slots, lookups, matrix, each.call)
            group.counts.seconds_lookup += time.perf_counter() - started
        else:
            group.mend()
            group.settle_for_reading()
            with group.cache.pause():
                _read(group, lookups, matrix)
    parts[0].group.driver.hand_over()
    return [outputs[dim] for dim in sorted(outputs)]


def _read(group: Group, lookups: Lookups, matrix: Tensor) -> None:
    """Pooled lookup of the newest values, which changes nothing.  The cache is paused."""
    if group.records.reads_apart:
        slots = group.loans.where(lookups, group.step)
        everything_there = slots.min(initial=0) >= 0
        read = group.records.lookup if everything_there else group.records.lookup_apart
        read(slots, lookups, matrix)
        group.records.fence()
        return
    slots, keep = group.loans.for_reading(lookups, group.step)
    try:
        group.records.lookup(slots, lookups, matrix)
    finally:
        group.cache.give_back(keep)


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: Any, parts: list[GroupCall], features: list[str], anchor: Tensor, *weights: Tensor
    ) -> Any:
        ctx.module, ctx.parts, ctx.features = module, parts, features
        ctx.learns = anchor.requires_grad
        ctx.devices = [each.device for each in weights]
        pass_may_begin()
        ctx.earlier = earlier_gradients(module)
        ctx.set_materialize_grads(False)
        return tuple(_forward(parts, module.output_dtype, training=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        trains = ctx.learns and _asked_for_rows(ctx)
        if trains:
            refuse_wrong_scaler(ctx.module, ctx.parts[0].group.deferred is not None)
            refuse_accumulation(ctx.module, ctx.earlier)
        dims = sorted({each.group.dim for each in ctx.parts})
        by_dim = dict(zip(dims, grads, strict=True))
        received: list[tuple[GroupCall, Tensor]] = []
        for each in ctx.parts:
            assert each.call is not None
            each.call.accept()
            grad = by_dim[each.group.dim]
            rows, dim = each.lookups.batch_size * each.lookups.width, each.group.dim
            if grad is None:
                matrix = torch.zeros((rows, dim), device=each.group.driver.device)
            else:
                matrix = grad.detach().to(torch.float32).contiguous().view(rows, dim)
            received.append((each, matrix))
        verdict = _finite(ctx.module, received)
        weight_grads = _weight_grads(ctx, received)
        if ctx.learns and not trains:
            return (None, None, None, None, *weight_grads)
        if trains:
            ctx.module.gradients_come()
        for each, matrix in _unscaled(ctx.module, received):
            assert each.call is not None
            group = each.group
            group.scaler_known = ctx.module.grad_scaler is not None
            each.call.owner = ctx.module
            group.records.take_gradient(each.call, matrix, keep=group.deferred is not None)
            group.receive(each.call, verdict, ctx.learns)
        if ctx.learns:
            ctx.module.gradients_came(verdict)
        return (None, None, None, None, *weight_grads)


def _asked_for_rows(ctx: Any) -> bool:
    """Whether this backward pass is to train: `torch.autograd.grad` for per-sample weights must not."""
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))
    except RuntimeError as error:
        raise UsageError(
            "torch.autograd.grad was asked for the gradient of a cdlrm module's anchor, but the gradient of its rows "
            "is never a tensor; call backward(), or ask for the gradients of other parameters only."
        ) from error


def _finite(module: Any, received: list[tuple[GroupCall, Tensor]]) -> Verdict:
    """Whether all gradients are finite; raises NonFiniteGradientError unless the module skips such steps."""
    by_dim = {each.group.dim: (each, matrix) for each, matrix in reversed(received)}
    first = received[0][0]
    assert first.call is not None
    raising = module.nonfinite == "raise" and module.grad_scaler is None
    matrices = [matrix for _, matrix in by_dim.values()]
    verdict = first.group.driver.finite(matrices, raising, f"batch {first.call.step.batch}")
    if raising and verdict.known is False:
        for each, _ in received:
            if each.group.deferred is None and each.call is not None:
                each.call.step.take()  # what came before in this step is not applied either, as on a GPU
        each, matrix = next((e, m) for e, m in by_dim.values() if not torch.isfinite(m).all())
        assert each.call is not None
        row, column = torch.nonzero(~torch.isfinite(matrix))[0].tolist()
        sample, feature = divmod(row, each.lookups.width)
        raise NonFiniteGradientError(
            f"batch {each.call.step.batch}: the gradient of sample {sample}, feature column {feature}, element "
            f"{column} is {float(matrix[row, column])}; nothing was updated; lower the learning rate, or use "
            f'nonfinite="skip".'
        )
    return verdict


def _weight_grads(ctx: Any, received: list[tuple[GroupCall, Tensor]]) -> list[Tensor | None]:
    """Gradient of the per-sample weights of each feature in ctx.features, by the rows before the update."""
    found: dict[str, Tensor] = {}
    for each, matrix in received:
        names = ctx.module.feature_order(each.group)
        if not any(name in ctx.features for name in names):
            continue
        assert each.call is not None
        out = each.group.records.weight_grad(each.call, matrix)
        each.group.driver.waited("gradients of weights", sum(device != out.device for device in ctx.devices))
        starts = each.lookups.feature_starts
        for f, name in enumerate(names):
            found[name] = out[starts[f] : starts[f + 1]]
    return [found[name].to(device) for name, device in zip(ctx.features, ctx.devices, strict=True)]


def _unscaled(module: Any, received: list[tuple[GroupCall, Tensor]]) -> list[tuple[GroupCall, Tensor]]:
    """Divide by the module's GradScaler's scale, as `scaler.unscale_` does for torch's optimizers."""
    scaler = module.grad_scaler
    if scaler is None or not scaler.is_enabled():
        return received
    module.groups[0].driver.waited("scale", 1)
    inverse = 1.0 / scaler.get_scale()  # a power of two
    return [(each, matrix * inverse) for each, matrix in received]
