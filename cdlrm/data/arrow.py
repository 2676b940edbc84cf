"""Arrow arrays -> columns: finds the buffers, checks the types and calls the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cdlrm.data import kernels
from cdlrm.data.columns import Column
from cdlrm.data.hashing import MISSING_ID, MISSING_ROW, hash_rows, row_mask
from cdlrm.errors import DataError

__all__ = ["Buffers", "IdMap", "bad_value", "buffers_of", "check_type", "dense_values", "label_values", "mapped_values"]

_NO_BITS = np.zeros(0, np.uint8)
_NO_OFFSETS = np.zeros(0, np.int32)
_KERNEL_DTYPES = (pa.int32(), pa.int64(), pa.float32(), pa.float64())


@dataclass(frozen=True)
class IdMap:
    """How the ids of one feature become rows: hashed into `rows` rows, or taken as they are and checked."""

    rows: int
    hashed: bool

    @property
    def missing(self) -> int:
        """The row of a missing value."""
        return int(hash_rows(np.array([MISSING_ID]), self.rows)[0]) if self.hashed else MISSING_ROW


class Buffers(NamedTuple):
    """A column in memory. values [N] with validity bits from `shift` on; offsets [R+1] into values and the validity bits of
    the lists for list columns, of length 0 for flat ones (then N = R)."""

    values: np.ndarray
    bits: np.ndarray
    shift: int
    offsets: np.ndarray
    row_bits: np.ndarray
    row_shift: int


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def check_type(where: str, name: str, kind: pa.DataType, ids: bool) -> None:
    """`DataError` unless a column of this Arrow type can be read as ids or as numbers."""
    inner = kind.value_type if _is_list(kind) or pa.types.is_dictionary(kind) else kind
    good = pa.types.is_integer(inner) or pa.types.is_null(inner)
    if not ids:
        good = good or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
    if not good:
        wanted = "integers" if ids else "numbers"
        raise DataError(f"{where}: column '{name}' is of type {kind} where {wanted}, or lists of them, are needed; convert it")


def buffers_of(column: pa.Array | pa.ChunkedArray, ids: bool) -> Buffers:
    """The buffers of a column; values are int64 for ids, else int32, int64, float32 or float64. Copies only to convert."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not _is_list(column.type):
        values, bits, shift = _flat(column, ids)
        return Buffers(values, bits, shift, _NO_OFFSETS, _NO_BITS, 0)
    row_bits, row_shift = _validity(column)
    values, bits, shift = _flat(column.values, ids)
    return Buffers(values, bits, shift, column.offsets.to_numpy(zero_copy_only=True), row_bits, row_shift)


def _validity(array: pa.Array) -> tuple[np.ndarray, int]:
    if array.null_count == 0:
        return _NO_BITS, 0
    return np.frombuffer(array.buffers()[0], np.uint8), array.offset


def _flat(array: pa.Array, ids: bool) -> tuple[np.ndarray, np.ndarray, int]:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), np.zeros((len(array) + 7) // 8 or 1, np.uint8), 0
    kind = array.type
    if ids and kind != pa.int64():
        if pa.types.is_uint64(kind):
            array = array.view(pa.int64())  # the bits are what is hashed
        else:
            array = array.cast(pa.int64())
    elif not ids and kind not in _KERNEL_DTYPES:
        array = array.cast(pa.float64() if pa.types.is_floating(kind) or pa.types.is_uint64(kind) else pa.int64(), safe=False)
    bits, shift = _validity(array)
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    values = np.zeros(0, dtype) if data is None else np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return values, bits, shift


def dense_values(buffers: Buffers, out: np.ndarray, bad: np.ndarray) -> int:
    """Fill float32 [R] (may be strided); returns the first bad row or -1."""
    first = kernels.dense_column(*buffers, kernels.LOG1P, out, bad)
    return _earliest(first, _several(buffers, bad))


def label_values(buffers: Buffers, out: np.ndarray, bad: np.ndarray) -> int:
    """Fill float32 [R] with 0 and 1; returns the first bad row or -1."""
    first = kernels.label_column(*buffers, out, bad)
    return _earliest(first, _several(buffers, bad))


def mapped_values(buffers: Buffers, ids: IdMap, out: np.ndarray, bad: np.ndarray) -> tuple[Column, int]:
    """The column as rows (in `out`, int64 [R], where every row has at most one id), and the first bad row or -1."""
    how = (ids.hashed, np.uint64(ids.rows), row_mask(ids.rows), ids.missing)
    if len(buffers.offsets) == 0 or kernels.longest(buffers.offsets) <= 1:
        return Column(out), kernels.map_column(*buffers, *how, out, bad)
    offsets = np.empty(len(buffers.offsets), np.int64)
    kernels.bag_lengths(buffers.offsets, buffers.row_bits, buffers.row_shift, offsets)
    values = np.empty(offsets[-1], np.int64)
    return Column(values, offsets), kernels.bags(*buffers, offsets, *how, values, bad)


def _several(buffers: Buffers, bad: np.ndarray) -> int:
    """Marks the rows whose list has more than one element, which a number cannot have."""
    if len(buffers.offsets) == 0 or kernels.longest(buffers.offsets) <= 1:
        return -1
    rows = np.flatnonzero(np.diff(buffers.offsets) > 1)
    bad[rows] = 1
    return int(rows[0])


def _earliest(first: int, second: int) -> int:
    return max(first, second) if first < 0 or second < 0 else min(first, second)


def bad_value(column: pa.Array | pa.ChunkedArray, row: int, role: str, ids: IdMap) -> tuple[str, str]:
    """What is wrong with a row that a kernel refused, and the remedy; role is "label", "dense" or "ids"."""
    value = column[row].as_py()
    inner = value if isinstance(value, list) else [value]
    if role == "ids":
        wrong = next(v for v in inner if v is not None and not 0 <= v < ids.rows)
        return f"is {wrong}, outside [0, {ids.rows})", "give the table more rows (table_rows), or hash the ids (ids='hash')"
    if len(inner) > 1:
        return f"is a list of {len(inner)} where one number is needed", "give one number a row"
    if role == "dense":
        return f"is {inner[0]}, which is not finite", "clean the column"
    shown = inner[0] if inner else None
    return f"is {'missing' if shown is None else shown} where 0 or 1 is needed", "give 0 for no click and 1 for a click"
