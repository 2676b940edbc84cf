"""`Batch`: what a source yields, what the planner scans and what the trainer computes on (one and the same object)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cdlrm.errors import InputError

if TYPE_CHECKING:  # torch is loaded with the first batch: converting needs none, and it takes 190 MB
    from torch import Tensor

__all__ = ["Batch", "Jagged", "check_batch", "check_dense", "check_labels", "check_jagged"]


class Jagged(NamedTuple):
    """The lookups of one feature for the B samples of a batch.

    values: int64 [L], ids (row numbers of the feature's table). offsets: int64 [B+1], sample b owns
    values[offsets[b]:offsets[b+1]]; None means exactly one id a sample, so L == B. weights: float32 [L], None means 1.
    """

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None


@dataclass
class Batch:
    """B samples. dense: float32 [B, n], labels: float32 [B] (0 or 1), sparse: feature -> `Jagged`, index: its number
    in the epoch.

    Tensors are on the CPU and may be views into a larger block that the source read; nobody may write to them.
    """

    dense: Tensor
    labels: Tensor
    sparse: dict[str, Jagged] = field(default_factory=dict)
    index: int = 0

    @property
    def size(self) -> int:
        """Number of samples B."""
        return int(self.labels.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the batch."""
        tensors = [self.dense, self.labels]
        for jagged in self.sparse.values():
            tensors.extend(t for t in jagged if t is not None)
        return sum(t.numel() * t.element_size() for t in tensors)


def check_batch(batch: Batch, rows: Mapping[str, int] | None = None) -> None:
    """Raise `InputError` unless dtypes, shapes, offsets and finiteness are as `Batch` says.

    `rows` (feature -> number of rows of its table), where given, bounds the ids as well.
    """
    check_labels(batch.labels)
    check_dense(batch.dense, batch.size)
    for name, jagged in batch.sparse.items():
        check_jagged(name, jagged, batch.size, None if rows is None else rows[name])


def check_dense(dense: Tensor, size: int) -> None:
    """Dense features must be a finite float32 CPU tensor [size, n]; raises `InputError` otherwise."""
    _check_tensor("dense features", dense, "float32", 2)
    if dense.shape[0] != size:
        raise InputError(
            f"the dense features have {dense.shape[0]} rows where the batch has {size} labels; give one row a sample"
        )
    values = dense.numpy()
    if not np.isfinite(values).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise InputError(
            f"dense feature {column} of sample {row} is {values[row, column]}, which is not finite; "
            "clean the dense features before the batch is made"
        )


def check_labels(labels: Tensor) -> None:
    """Labels must be a float32 CPU tensor [B] of numbers in [0, 1]; raises `InputError` otherwise."""
    _check_tensor("labels", labels, "float32", 1)
    values = labels.numpy()
    good = (values >= 0) & (values <= 1)  # NaN compares false
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InputError(
            f"the label of sample {row} is {values[row]}, outside [0, 1]; give 0 for no click and 1 for a click"
        )


def check_jagged(name: str, jagged: Jagged, size: int, rows: int | None = None) -> None:
    """Ids int64 [L], offsets int64 [size+1] from 0 to L without decrease, weights finite float32 [L], ids in [0,
    rows)."""
    _check_tensor(f"values of feature '{name}'", jagged.values, "int64", 1)
    values = jagged.values.numpy()
    if jagged.offsets is None:
        if len(values) != size:
            raise InputError(
                f"feature '{name}' has {len(values)} values and no offsets for {size} samples; "
                "give exactly one id a sample or add offsets"
            )
    else:
        _check_tensor(f"offsets of feature '{name}'", jagged.offsets, "int64", 1)
        _check_offsets(name, jagged.offsets.numpy(), len(values), size)
    if jagged.weights is not None:
        _check_weights(name, jagged.weights, len(values))
    if rows is not None and len(values) and (values.min() < 0 or values.max() >= rows):
        at = int(np.flatnonzero((values < 0) | (values >= rows))[0])
        raise InputError(
            f"feature '{name}' has id {values[at]} at position {at}, outside [0, {rows}); "
            "map the ids into the table or give the table more rows"
        )


def _check_offsets(name: str, offsets: np.ndarray, length: int, size: int) -> None:
    if len(offsets) != size + 1:
        raise InputError(
            f"feature '{name}' has {len(offsets)} offsets for {size} samples; give "
            f"{size + 1}, from 0 to the number of values"
        )
    if offsets[0] != 0 or offsets[-1] != length:
        at, bound = (0, 0) if offsets[0] != 0 else (size, length)
        raise InputError(
            f"offset {at} of feature '{name}' is {offsets[at]} where {bound} is needed; "
            "offsets go from 0 to the number of values"
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        raise InputError(
            f"offset {at} of feature '{name}' is {offsets[at]}, less than {offsets[at - 1]} before it; "
            "offsets must not decrease"
        )


def _check_weights(name: str, weights: Tensor, length: int) -> None:
    _check_tensor(f"weights of feature '{name}'", weights, "float32", 1)
    if len(weights) != length:
        raise InputError(f"feature '{name}' has {len(weights)} weights for {length} values; give one weight a value")
    bad = np.flatnonzero(~np.isfinite(weights.detach().numpy()))
    if len(bad):
        raise InputError(
            f"weight {bad[0]} of feature '{name}' is {float(weights[bad[0]])}, which is not finite; clean the weights"
        )


def _check_tensor(what: str, tensor: Tensor, dtype_name: str, dims: int) -> None:
    import torch

    dtype = getattr(torch, dtype_name)
    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"the {what} are a {type(tensor).__name__} where a {dtype} tensor is needed; use torch.as_tensor"
        )
    if tensor.dtype != dtype:
        raise InputError(
            f"the {what} have dtype {tensor.dtype} where {dtype} is needed; convert them with .to({dtype})"
        )
    if tensor.device.type != "cpu":
        raise InputError(f"the {what} are on {tensor.device} where the CPU is needed; move them with .cpu()")
    if tensor.dim() != dims:
        raise InputError(
            f"the {what} have shape {list(tensor.shape)} where {dims} dimension(s) are needed; reshape them"
        )
