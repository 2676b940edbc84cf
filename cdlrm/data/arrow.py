"""Arrow arrays -> columns: finds the buffers, checks the types and calls the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cdlrm.data import kernels
from cdlrm.data.columns import Bags
from cdlrm.data.hashing import MISSING_ID, MISSING_ROW, hash_rows, row_mask
from cdlrm.errors import DataError

__all__ = [
    "IDENTITY",
    "Buffers",
    "IdMap",
    "bad_value",
    "buffers_of",
    "check_type",
    "dense_values",
    "inner_type",
    "label_values",
    "mapped_values",
    "number_type",
    "pooled",
]

_ALL = np.zeros(0, np.uint8)  # no mask: everything is there
_KERNEL_DTYPES = (pa.int32(), pa.int64(), pa.float32(), pa.float64())


@dataclass
class IdMap:
    """How the ids of one feature become rows: hashed into `rows` rows, or taken as they are and checked; rows = 0 is
    the identity, without a check."""

    rows: int
    hashed: bool

    @cached_property
    def missing(self) -> int:
        """The row of a missing value."""
        if not self.rows:
            return MISSING_ID
        return int(hash_rows(np.array([MISSING_ID]), self.rows)[0]) if self.hashed else MISSING_ROW


IDENTITY = IdMap(0, False)


class Buffers(NamedTuple):
    """A column in memory: values [N] and a mask uint8 [N] of what is there (or []). Lists with several elements keep
    their offsets [R+1] into values and a mask of the lists [R] (or []); otherwise offsets is None and N = R."""

    values: np.ndarray
    there: np.ndarray
    offsets: np.ndarray | None = None
    row_there: np.ndarray = _ALL

    def flat(self) -> Buffers:
        """The first element of every list."""
        if self.offsets is None:
            return self
        rows = len(self.offsets) - 1
        out = Buffers(np.empty(rows, self.values.dtype), np.empty(rows, np.uint8))
        kernels.one_each(self.values, self.there, self.offsets, self.row_there, *out[:2])
        return out


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def inner_type(kind: pa.DataType) -> pa.DataType:
    """The type of a list's or dictionary's values, or the type itself."""
    return kind.value_type if _is_list(kind) or pa.types.is_dictionary(kind) else kind


def number_type(kind: pa.DataType) -> pa.DataType:
    """The type in which numbers of this type are written: int64, float32 or float64."""
    if pa.types.is_uint64(kind) or pa.types.is_float64(kind):
        return pa.float64()
    return pa.float32() if pa.types.is_floating(kind) else pa.int64()


def check_type(where: str, name: str, kind: pa.DataType, ids: bool) -> None:
    """`DataError` unless a column of this Arrow type can be read as ids or as numbers."""
    inner = inner_type(kind)
    good = pa.types.is_integer(inner) or pa.types.is_null(inner)
    if not ids:
        good = good or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
    if not good:
        wanted = "integers" if ids else "numbers"
        raise DataError(
            f"{where}: column '{name}' is of type {kind} where {wanted}, or lists of them, are needed; convert it"
        )


def buffers_of(column: pa.Array | pa.ChunkedArray, ids: bool, padding: int | None = None) -> Buffers:
    """The buffers of a column; values are int64 for ids, else int32, int64, float32 or float64. Copies only to
    convert. Elements of lists that equal `padding` are dropped."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not _is_list(column.type):
        return Buffers(*_flat(column, ids))
    values, there = _flat(column.values, ids)
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    if padding is not None:
        values, there, offsets = kernels.without(values, there, offsets, padding)
    lists = Buffers(values, there, offsets, _mask(column))
    most, rows = int(kernels.longest(offsets)), len(column)
    if most == 1 and not len(lists.row_there) and offsets[-1] - offsets[0] == rows:  # exactly one each
        start = int(offsets[0])
        return Buffers(values[start : start + rows], there[start : start + rows])
    return lists.flat() if most <= 1 else lists


def _mask(array: pa.Array) -> np.ndarray:
    """uint8 [len]: 1 where there is a value; [] when nothing is missing."""
    if array.null_count == 0:
        return _ALL
    bits = np.frombuffer(array.buffers()[0], np.uint8)[array.offset >> 3 : (array.offset + len(array) + 7) >> 3]
    shift = array.offset & 7
    return np.unpackbits(bits, bitorder="little")[shift : shift + len(array)]


def _flat(array: pa.Array, ids: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values and mask of an array without lists."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), np.zeros(len(array), np.uint8)
    kind = array.type
    if ids and kind != pa.int64():
        if pa.types.is_uint64(kind):
            array = array.view(pa.int64())  # the bits are what is hashed
        else:
            array = array.cast(pa.int64())
    elif not ids and kind not in _KERNEL_DTYPES:
        wide = pa.types.is_floating(kind) or pa.types.is_uint64(kind)
        array = array.cast(pa.float64() if wide else pa.int64(), safe=False)
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    if data is None or len(array) == 0:
        return np.zeros(len(array), dtype), _mask(array)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize), _mask(array)


def pooled(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """np.empty from Arrow's memory pool, which keeps freed memory: fresh pages for every block cost as much as the
    kernels."""
    count = math.prod(shape)
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(dtype).itemsize), dtype, count).reshape(shape)


def dense_values(buffers: Buffers, out: np.ndarray, bad: np.ndarray, missing: float | None = None) -> int:
    """Fill float32 [R] with log(1 + x), or, where `missing` is given, out with x or `missing`; returns the first bad
    row or -1."""
    several = _several(buffers, bad)
    if missing is not None:
        return _earliest(kernels.plain_column(*buffers.flat()[:2], missing, out, bad), several)
    return _earliest(kernels.dense_column(*buffers.flat()[:2], kernels.LOG1P, out, bad), several)


def label_values(buffers: Buffers, out: np.ndarray, bad: np.ndarray) -> int:
    """Fill float32 [R] with 0 and 1; returns the first bad row or -1."""
    several = _several(buffers, bad)
    return _earliest(kernels.label_column(*buffers.flat()[:2], out, bad), several)


def mapped_values(buffers: Buffers, ids: IdMap, out: np.ndarray, bad: np.ndarray) -> tuple[Bags | None, int]:
    """The column as rows: in `out`, int64 [R], where every row has at most one id, else as bags; and the first bad
    row or -1."""
    how = (ids.hashed, np.uint64(ids.rows), row_mask(ids.rows), np.int64(ids.missing))
    if buffers.offsets is None:
        return None, kernels.map_column(buffers.values, buffers.there, *how, out, bad)
    offsets = pooled((len(buffers.offsets),), np.int64)
    kernels.bag_offsets(buffers.offsets, buffers.row_there, offsets)
    values = pooled((int(offsets[-1]),), np.int64)
    return Bags(values, offsets), kernels.bags(
        buffers.values, buffers.there, buffers.offsets, buffers.row_there, offsets, *how, values, bad
    )


def _several(buffers: Buffers, bad: np.ndarray) -> int:
    """Marks the rows whose list has more than one element, which a number cannot have."""
    if buffers.offsets is None:
        return -1
    rows = np.flatnonzero(np.diff(buffers.offsets) > 1)
    bad[rows] = 1
    return int(rows[0])


def _earliest(first: int, second: int) -> int:
    return max(first, second) if first < 0 or second < 0 else min(first, second)


def bad_value(column: pa.Array | pa.ChunkedArray, row: int, role: str, ids: IdMap | None) -> tuple[str, str]:
    """What is wrong with a row that a kernel refused, and the remedy; role is "label", "dense" or "ids"."""
    value = column[row].as_py()
    inner = value if isinstance(value, list) else [value]
    if ids is not None:
        wrong = next(v for v in inner if v is not None and not 0 <= v < ids.rows)
        return (
            f"is {wrong}, outside [0, {ids.rows})",
            "give the table more rows (table_rows), hash the ids (ids='hash'), or convert the files with cdlrm convert "
            "--use-vocabulary if these are not row numbers",
        )
    if len(inner) > 1:
        return f"is a list of {len(inner)} where one number is needed", "give one number a row"
    if role == "dense":
        return f"is {inner[0]}, which is not finite", "clean the column"
    shown = inner[0] if inner else None
    return f"is {'missing' if shown is None else shown} where 0 or 1 is needed", "give 0 for no click and 1 for a click"
