"""The bridge to autograd: pooled lookups whose backward pass applies the update.

Rows are no parameters: their gradient never exists as a tensor.  A scalar anchor parameter makes
autograd call the backward; its own gradient is a stand-in (see `gradient.py`).  Per-sample weights get a true gradient.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulation import earlier_gradients, refuse_accumulation
from .errors import NonFiniteGradientError, UsageError
from .group import Group
from .lookups import Lookups
from .step import Call


@dataclass(eq=False)
class GroupCall:
    """One forward call's share of a group."""

    group: Group
    lookups: Lookups
    call: Call | None = None  # None: for reading only


def pooled_lookup(module: Any, calls: list[GroupCall], anchor: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """One output [B, features of that dim, dim] for every dim, ascending."""
    if torch.is_grad_enabled() and (anchor.requires_grad or weights):
        return list(_PooledLookup.apply(module, calls, list(weights), anchor, *weights.values()))
    with torch.no_grad():
        return [torch.from_numpy(out) for out in _forward(calls, training=False)]


def _forward(calls: list[GroupCall], training: bool) -> list[np.ndarray]:
    outputs: dict[int, np.ndarray] = {}
    for each in calls:
        group, lookups = each.group, each.lookups
        shape = (lookups.batch_size, lookups.width, group.dim)
        if group.dim not in outputs:
            outputs[group.dim] = group.driver.empty(shape, np.float32)
        matrix = outputs[group.dim].reshape(-1, group.dim)
        if training:
            each.call = group.training_slots(lookups)
            started = time.perf_counter()
            group.driver.lookup(group.weight, each.call.slots, lookups, lookups.weights, matrix)
            group.counts.seconds_lookup += time.perf_counter() - started
        else:
            group.settle_for_reading()
            with group.cache.pause():
                slots, keep = group.loans.for_reading(lookups, group.step)
                try:
                    group.driver.lookup(group.weight, slots, lookups, lookups.weights, matrix)
                finally:
                    group.cache.give_back(keep)
    return [outputs[dim] for dim in sorted(outputs)]


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: Any, calls: list[GroupCall], features: list[str], anchor: Tensor, *weights: Tensor
    ) -> Any:
        ctx.module, ctx.calls, ctx.features = module, calls, features
        ctx.learns = anchor.requires_grad
        ctx.earlier = earlier_gradients(module)
        ctx.set_materialize_grads(False)
        return tuple(torch.from_numpy(out) for out in _forward(calls, training=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_accumulation(ctx.module, ctx.earlier)
        dims = sorted({each.group.dim for each in ctx.calls})
        by_dim = dict(zip(dims, grads, strict=True))
        received: list[tuple[GroupCall, np.ndarray]] = []
        for each in ctx.calls:
            assert each.call is not None
            each.call.accept()
            grad = by_dim[each.group.dim]
            lookups = each.lookups
            if grad is None:
                matrix = np.zeros((lookups.batch_size * lookups.width, each.group.dim), np.float32)
            else:
                matrix = grad.detach().to(torch.float32).contiguous().numpy().reshape(-1, each.group.dim)
            received.append((each, matrix))
        finite = _finite(ctx.module, received)
        weight_grads = _weight_grads(ctx, received)
        if ctx.learns:
            if not _asked_for_rows(ctx):
                return (None, None, None, None, *weight_grads)
            ctx.module.gradients_come()
        for each, matrix in _unscaled(ctx.module, received):
            assert each.call is not None
            each.group.scaler_known = ctx.module.grad_scaler is not None
            scaled = each.group.driver.scale_mean(each.lookups, matrix)
            if each.group.deferred:
                each.call.owner = ctx.module
                scaled = scaled.copy() if scaled is matrix else scaled  # autograd may use the memory again
            each.group.receive(each.call, scaled, each.lookups.weights, finite, ctx.learns)
        if ctx.learns:
            ctx.module.gradients_came(finite)
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


def _finite(module: Any, received: list[tuple[GroupCall, np.ndarray]]) -> bool:
    """Whether all gradients are finite; raises NonFiniteGradientError unless the module skips such steps."""
    for dim in {each.group.dim for each, _ in received}:
        each, matrix = next((e, m) for e, m in received if e.group.dim == dim)
        if not each.group.driver.all_finite(matrix):
            if module.nonfinite == "skip" or module.grad_scaler is not None:
                return False
            assert each.call is not None
            row, column = (int(i) for i in np.argwhere(~np.isfinite(matrix))[0])
            sample, feature = divmod(row, each.lookups.width)
            raise NonFiniteGradientError(
                f"batch {each.call.step.batch}: the gradient of sample {sample}, feature column {feature}, element "
                f"{column} is {matrix[row, column]}; nothing was updated; lower the learning rate, or use "
                f'nonfinite="skip".'
            )
    return True


def _weight_grads(ctx: Any, received: list[tuple[GroupCall, np.ndarray]]) -> list[Tensor | None]:
    """Gradient of the per-sample weights of each feature in ctx.features, by the rows before the update."""
    found: dict[str, Tensor] = {}
    for each, matrix in received:
        slots = ctx.module.feature_order(each.group)
        if not any(name in ctx.features for name in slots):
            continue
        assert each.call is not None
        out = np.empty(each.lookups.rows.size, np.float32)
        scaled = each.group.driver.scale_mean(each.lookups, matrix)
        each.group.driver.weight_grad(each.group.weight, each.call.slots, each.lookups, scaled, out)
        starts = each.lookups.feature_starts
        for f, name in enumerate(slots):
            found[name] = torch.from_numpy(out[starts[f] : starts[f + 1]])
    return [found[name] for name in ctx.features]


def _unscaled(module: Any, received: list[tuple[GroupCall, np.ndarray]]) -> list[tuple[GroupCall, np.ndarray]]:
    """Divide by the module's GradScaler's scale, as `scaler.unscale_` does for torch's optimizers."""
    scaler = module.grad_scaler
    if scaler is None or not scaler.is_enabled():
        return received
    inverse = np.float32(1.0 / scaler.get_scale())
    return [(each, matrix * inverse) for each, matrix in received]
