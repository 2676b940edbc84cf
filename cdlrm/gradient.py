"""What torch sees of row gradients: a norm while they wait, a refusal once they have been applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .driver.base import Driver, Segments
from .errors import UsageError
from .optim import SGD
from .step import Call, merge


def squared_norm(driver: Driver, calls: list[Call], dim: int) -> float:
    """Sum of squares of the summed gradients of all rows of `calls`, in float64.

    The sums are made by the update kernel itself: one step of SGD with lr -1 on rows of zeros.
    """
    calls = [call for call in calls if call.grad is not None]
    if not calls:
        return 0.0
    rows, inverse = np.unique(np.concatenate([call.lookups.rows for call in calls]), return_inverse=True)
    segments: Segments = driver.build_segments(inverse.astype(np.int32), driver.new_stamps(len(rows)))
    lookup_row, grad, weights = merge(calls)
    sums = np.zeros((len(rows), dim), np.float32)
    driver.update(SGD(lr=0.0), -1.0, sums, np.empty((len(rows), 0), np.float32), segments, lookup_row, grad, weights)
    return float(np.einsum("ij,ij->", sums, sums, dtype=np.float64))


class AppliedGradient(Tensor):
    """The anchor's gradient after an update in the backward pass: 0 for optimizers, but it has no norm,
    since clipping gradients that have been applied already would silently clip nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in getattr(func, "__name__", ""):
            raise UsageError(
                "the rows of cdlrm tables were updated in the backward pass, so their gradients cannot be clipped any "
                'more; make the module with update="step" and call its optimizer.step() after clipping, or clip the '
                "dense parameters only."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def applied_gradient() -> AppliedGradient:
    return torch.Tensor._make_subclass(AppliedGradient, torch.zeros(()))
