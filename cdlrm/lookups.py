"""From a batch to one flat list of lookups per group: checked, copied, in one order.

A *group* merges tables of equal dim and optimizer into one row space.  `flatten` turns what the
user passes for each feature into one `Lookups`: feature after feature (feature-major), each with
its bags in sample order.  Every id, offset and weight is read once, checked and copied in the
same pass, so nothing unchecked reaches a kernel and nothing aliases the user's memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numba import njit

from .errors import InputError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class FeatureSlot:
    """One feature of a group: which table it reads and which output column it writes.

    `base` is the first group row of the table, `num_embeddings` its number of rows, `column` the
    feature's column of the output [B, width, dim], `mean` whether its bags are averaged.
    """

    feature: str
    table: str
    base: int
    num_embeddings: int
    column: int
    mean: bool


@dataclass
class Lookups:
    """Everything that one forward call asks of one group (NumPy arrays, feature-major).

    L lookups, F features, B samples, Q = F * B bags; bag `q = f * B + b`.

    rows            int64 [L]: group row of each lookup (`base + id`).
    starts          int64 [Q+1]: bag q has the lookups [starts[q], starts[q+1]); None when every bag has
                    exactly one lookup (then L == Q).
    out_row         int32 [Q]: row of the output matrix [B * width, dim] that bag q writes.
    lookup_row      int32 [L]: out_row of the bag of each lookup (out_row itself when starts is None).
    mean            uint8 [F]: 1 where a feature's bags are averaged.
    batch_size      B;  width: features of the output matrix (columns).
    weights         float32 [L] or None: per-sample weights (1.0 for features that have none).
    feature_starts  int64 [F+1]: feature f has the lookups [feature_starts[f], feature_starts[f+1]).
    bases           int64 [F]: first group row of the table of each feature.
    columns         int32 [F]: column of the output that each feature writes.

    `out_row` and `lookup_row` may be shared between calls of the same shape: read only.
    """

    rows: np.ndarray
    starts: np.ndarray | None
    out_row: np.ndarray
    lookup_row: np.ndarray
    mean: np.ndarray
    batch_size: int
    width: int
    weights: np.ndarray | None
    feature_starts: np.ndarray
    bases: np.ndarray
    columns: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this object keeps alive."""
        total = self.rows.nbytes + self.out_row.nbytes + self.mean.nbytes + self.feature_starts.nbytes
        if self.starts is not None:
            total += self.starts.nbytes + self.lookup_row.nbytes
        return total + (0 if self.weights is None else self.weights.nbytes)

    def same_ids(self, other: Lookups) -> bool:
        """Whether `other` asks for the same rows in the same bags (weights are not compared)."""
        if self.batch_size != other.batch_size or (self.starts is None) != (other.starts is None):
            return False
        if len(self.rows) != len(other.rows) or len(self.out_row) != len(other.out_row):
            return False
        if self.starts is not None and not _equal(self.starts, other.starts):
            return False
        return bool(_equal(self.rows, other.rows))


def flatten(
    slots: Sequence[FeatureSlot], width: int, inputs: Mapping[str, Any], batch_size: int | None = None
) -> Lookups:
    """Check and copy the inputs of one group.

    `inputs[feature]` is `(values, offsets | None, weights | None)` (a `Jagged`, or a tuple of length
    1 to 3) or bare `values`: torch tensors or NumPy arrays, `values` int32 or int64 [L_f], `offsets` int32
    or int64 [B+1] (None: exactly one id per sample), `weights` float32 [L_f].  `batch_size` is B where the
    caller knows it; otherwise the first feature tells.  The inputs are never modified or kept.

    Raises InputError (one sentence: table, feature, position, value, bound, remedy) for a missing
    feature, a wrong type, dtype or shape, ids outside [0, num_embeddings), offsets that do not run from 0 to
    L_f without decreasing, weights that are not finite, and batch sizes that differ.
    """
    parts = [_arrays(slot, inputs) for slot in slots]
    size = _common_batch_size(slots, parts, batch_size)
    features = len(slots)
    if size * width > _INT32_MAX:
        raise InputError(
            f"batch size {size} times {width} output columns exceeds the bound {_INT32_MAX}; use a smaller batch."
        )
    feature_starts = np.zeros(features + 1, np.int64)
    np.cumsum([len(part[0]) for part in parts], out=feature_starts[1:])
    rows = np.empty(int(feature_starts[-1]), np.int64)
    mean = np.array([slot.mean for slot in slots], np.uint8)
    at = 0
    for slot, (values, _, _) in zip(slots, parts, strict=True):
        stop = at + len(values)
        bad = _copy_ids(values, rows[at:stop], slot.base, slot.num_embeddings)
        if bad >= 0:
            _refuse_id(slot, values, bad)
        at = stop
    starts = _starts(slots, parts, size, feature_starts)
    out_row = _out_rows(tuple(slot.column for slot in slots), width, size)
    lookup_row = out_row
    if starts is not None:
        lookup_row = np.empty(len(rows), np.int32)
        _repeat_rows(starts, out_row, lookup_row)
    weights = _weights(slots, parts, feature_starts)
    bases = np.array([slot.base for slot in slots], np.int64)
    columns = np.array([slot.column for slot in slots], np.int32)
    return Lookups(rows, starts, out_row, lookup_row, mean, size, width, weights, feature_starts, bases, columns)


# --- what a feature's entry may look like ---------------------------------------------------------


def _where(slot: FeatureSlot) -> str:
    return f"table {slot.table!r}, feature {slot.feature!r}"


def _arrays(slot: FeatureSlot, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Values, offsets and weights of one feature as 1-D contiguous arrays of a right dtype."""
    try:
        entry = inputs[slot.feature]
    except KeyError:
        present = ", ".join(repr(name) for name in list(inputs)[:40]) or "none"
        raise InputError(
            f"{_where(slot)}: the batch has no such feature; it has {present}; add the feature or rename it."
        ) from None
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        entry = (entry,)
    elif not isinstance(entry, (tuple, list)) or not 1 <= len(entry) <= 3:
        raise InputError(
            f"{_where(slot)}: the entry is a {type(entry).__name__}, not (values, offsets, weights) with 1 to 3 items; "
            "pass such a tuple or one tensor of ids."
        )
    values = _array(slot, "values", entry[0])
    offsets = entry[1] if len(entry) > 1 else None
    weights = entry[2] if len(entry) > 2 else None
    if offsets is not None:
        offsets = _array(slot, "offsets", offsets)
        if len(offsets) == 0:
            raise InputError(f"{_where(slot)}: offsets has length 0, below the bound 1; pass batch size + 1 offsets.")
    if weights is not None:
        weights = _array(slot, "weights", weights)
        if len(weights) != len(values):
            raise InputError(
                f"{_where(slot)}: weights has {len(weights)} items but values has {len(values)}; "
                "pass one weight per id."
            )
    return values, offsets, weights


_INT64, _INT32, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


def _array(slot: FeatureSlot, what: str, given: Any) -> np.ndarray:
    """`given` as a 1-D C-contiguous array of a right dtype (on the user's memory where that is possible)."""
    names = "float32" if what == "weights" else "int64 or int32"
    if isinstance(given, torch.Tensor):
        array = _tensor_array(slot, what, given, names)
    elif isinstance(given, np.ndarray):
        array = given
    else:
        raise InputError(
            f"{_where(slot)}: {what} is a {type(given).__name__}; pass a 1-D torch tensor or NumPy array of {names}."
        )
    dtype = array.dtype
    if dtype != _FLOAT32 if what == "weights" else (dtype != _INT64 and dtype != _INT32):
        raise InputError(f"{_where(slot)}: {what} has dtype {dtype}; convert it to {names}.")
    if array.ndim != 1:
        raise InputError(f"{_where(slot)}: {what} has shape {array.shape}, not 1 dimension; flatten it.")
    return array if array.flags.carray else np.require(array, requirements=("C", "A", "W"))


class _Copies(threading.local):
    count = 0


_copies = _Copies()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU.  A copy from a device makes the host wait, and is counted for `take_copies`."""
    _copies.count += tensor.device.type != "cpu"
    return tensor.cpu()


def take_copies() -> int:
    """Copies that `to_host` made in this thread since the last call."""
    count, _copies.count = _copies.count, 0
    return count


def _tensor_array(slot: FeatureSlot, what: str, given: torch.Tensor, names: str) -> np.ndarray:
    try:
        return given.numpy()  # the usual case: asking for device and requires_grad first costs more than this
    except (TypeError, RuntimeError, NotImplementedError):
        pass
    try:
        return to_host(given.detach()).numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:
        if given.is_meta:
            raise InputError(
                f"{_where(slot)}: {what} is on the device 'meta', which has shapes but no data; pass a dense {names} "
                f"tensor on the CPU."
            ) from error
        raise InputError(
            f"{_where(slot)}: {what} is a tensor ({given.dtype}, {given.layout}, {given.device}) that cannot be "
            f"read on the CPU; pass a dense {names} tensor."
        ) from error


def _common_batch_size(slots: Sequence[FeatureSlot], parts: Sequence[tuple], batch_size: int | None) -> int:
    """B that all features agree on."""
    first = "the batch"
    for slot, (values, offsets, _) in zip(slots, parts, strict=True):
        own = len(values) if offsets is None else len(offsets) - 1
        if batch_size is None:
            batch_size, first = own, f"feature {slot.feature!r}"
        elif own != batch_size:
            kind = f"{len(values)} ids and no offsets" if offsets is None else f"{len(offsets)} offsets"
            raise InputError(
                f"{_where(slot)}: {kind} mean {own} samples but {first} has {batch_size}; "
                f"pass {'one id' if offsets is None else 'one bag'} per sample."
            )
    return 0 if batch_size is None else batch_size


def _starts(
    slots: Sequence[FeatureSlot], parts: Sequence[tuple], size: int, feature_starts: np.ndarray
) -> np.ndarray | None:
    """Start of every bag, or None when every bag has exactly one lookup."""
    if all(offsets is None for _, offsets, _ in parts):
        return None
    starts = np.empty(len(slots) * size + 1, np.int64)
    starts[-1] = feature_starts[-1]
    single = True
    for f, (slot, (values, offsets, _)) in enumerate(zip(slots, parts, strict=True)):
        begin = int(feature_starts[f])
        own = starts[f * size : (f + 1) * size]
        if offsets is None:
            own[:] = np.arange(begin, begin + size)
            continue
        bad = _copy_offsets(offsets, own, begin, len(values))
        if bad >= 0:
            _refuse_offset(slot, offsets, bad, len(values))
        single = single and bad == -2
    return None if single else starts


def _weights(slots: Sequence[FeatureSlot], parts: Sequence[tuple], feature_starts: np.ndarray) -> np.ndarray | None:
    if all(weights is None for _, _, weights in parts):
        return None
    out = np.empty(int(feature_starts[-1]), np.float32)
    for f, (slot, (_, _, weights)) in enumerate(zip(slots, parts, strict=True)):
        own = out[feature_starts[f] : feature_starts[f + 1]]
        if weights is None:
            own[:] = 1.0
            continue
        bad = _copy_weights(weights, own)
        if bad >= 0:
            raise InputError(
                f"{_where(slot)}: weight {weights[bad]} at position {bad} is not finite; pass finite weights."
            )
    return out


def _refuse_id(slot: FeatureSlot, values: np.ndarray, position: int) -> NoReturn:
    raise InputError(
        f"{_where(slot)}: id {int(values[position])} at position {position} is outside [0, {slot.num_embeddings}); "
        f"map the ids into this range or give the table more rows."
    )


def _refuse_offset(slot: FeatureSlot, offsets: np.ndarray, position: int, count: int) -> NoReturn:
    beyond = np.flatnonzero(offsets[:position] > count)
    if position and len(beyond):  # a later one is below it only because of that
        position = int(beyond[0])
    value = int(offsets[position])
    if position == 0:
        rule, remedy = "must be 0", "start offsets at 0"
    elif len(beyond):
        rule, remedy = f"is beyond the number of ids, {count}", "pass offsets that are at most the number of ids"
    elif value < int(offsets[position - 1]):
        rule, remedy = f"is below the one before it, {int(offsets[position - 1])}", "pass offsets that never decrease"
    else:
        rule, remedy = f"must be the number of ids, {count}", "end offsets with the number of ids"
    raise InputError(f"{_where(slot)}: offset {value} at position {position} {rule}; {remedy}.")


# --- kernels: one pass each -----------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _out_rows(columns: tuple[int, ...], width: int, size: int) -> np.ndarray:
    """int32 [F * B]: `b * width + column_f`.  Kept, since most batches have the same shape."""
    samples = np.arange(size, dtype=np.int64) * width
    return (np.array(columns, np.int64)[:, None] + samples[None, :]).astype(np.int32).reshape(-1)


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_ids(values, rows, base, bound):
    """rows = base + values; the first position whose id is outside [0, bound), or -1."""
    signs = np.int64(0)  # negative as soon as one id, or its distance to the largest, is; this form vectorises
    for i in range(len(values)):
        value = np.int64(values[i])
        signs |= value | (bound - 1 - value)
        rows[i] = base + value
    if signs < 0:
        for i in range(len(values)):
            value = rows[i] - base
            if value < 0 or value >= bound:
                return i
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_offsets(offsets, starts, begin, count):
    """starts = begin + offsets[:-1]; the first bad position, -2 if every bag has one lookup, else -1."""
    last = np.int64(0)
    single = True
    for b in range(len(offsets)):
        value = np.int64(offsets[b])
        if value < last or (b == 0 and value != 0):
            return b
        single &= value == b
        if b < len(starts):
            starts[b] = begin + value
        last = value
    if last != count:
        return len(offsets) - 1
    return -2 if single else -1


@njit(nogil=True, cache=True, error_model="numpy")
def _copy_weights(weights, out):
    """Copy; the first position that is not finite, or -1."""
    for i in range(len(weights)):
        value = weights[i]
        if not np.isfinite(value):
            return i
        out[i] = value
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _repeat_rows(starts, out_row, lookup_row):
    for q in range(len(out_row)):
        row = out_row[q]
        for i in range(starts[q], starts[q + 1]):
            lookup_row[i] = row


@njit(nogil=True, cache=True, error_model="numpy")
def _equal(a, b):
    """Whether two int64 arrays of one length are equal; blocks, so that it vectorises and still ends early."""
    n = len(a)
    if len(b) != n:
        return False
    for begin in range(0, n, 1024):
        differ = np.int64(0)
        for i in range(begin, min(begin + 1024, n)):
            differ |= a[i] ^ b[i]
        if differ != 0:
            return False
    return True
