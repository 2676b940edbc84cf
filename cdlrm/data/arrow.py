"""Arrow arrays -> columns: finds the buffers, checks the types and calls the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cdlrm.data import kernels, wide
from cdlrm.data.columns import Bags
from cdlrm.data.hashing import MISSING_ID, MISSING_ROW, hash_rows, row_mask
from cdlrm.data.pool import pooled
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
]

_ALL = np.zeros(0, np.uint8)  # no mask: everything is there
_IDS = {pa.int64().id: np.dtype(np.int64)}
_NUMBERS = {kind.id: np.dtype(kind.to_pandas_dtype()) for kind in (pa.int32(), pa.int64(), pa.float32(), pa.float64())}
"""What the kernels take, by the number of Arrow's type, which is found faster than types are compared."""


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
    most: int = 1  # length of the longest list

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
    if column.type.id in (_IDS if ids else _NUMBERS):
        return Buffers(*_flat(column, ids))
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not _is_list(column.type):
        return Buffers(*_flat(column, ids))
    values, there = _flat(column.values, ids)
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    if padding is not None:
        values, there, offsets = kernels.without(values, there, offsets, padding)
    lists = Buffers(values, there, offsets, _mask(column), int(kernels.longest(offsets)))
    rows = len(column)
    if lists.most == 1 and not len(lists.row_there) and offsets[-1] - offsets[0] == rows:  # exactly one each
        start = int(offsets[0])
        return Buffers(values[start : start + rows], there[start : start + rows])
    return lists


def _mask(array: pa.Array) -> np.ndarray:
    """uint8 [len]: 1 where there is a value; [] when nothing is missing."""
    if array.null_count == 0:
        return _ALL
    bits = np.frombuffer(array.buffers()[0], np.uint8)[array.offset >> 3 : (array.offset + len(array) + 7) >> 3]
    shift = array.offset & 7
    return np.unpackbits(bits, bitorder="little")[shift : shift + len(array)]


def _flat(array: pa.Array, ids: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values and mask of an array without lists."""
    known = _IDS if ids else _NUMBERS
    if array.type.id not in known:
        if pa.types.is_null(array.type):
            return np.zeros(len(array), np.int64), np.zeros(len(array), np.uint8)
        array = _as_known(array.dictionary_decode() if pa.types.is_dictionary(array.type) else array, ids)
    dtype = known[array.type.id]
    data = array.buffers()[1]
    if data is None or len(array) == 0:
        return np.zeros(len(array), dtype), _mask(array)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize), _mask(array)


def _as_known(array: pa.Array, ids: bool) -> pa.Array:
    """The same numbers in a type that the kernels take."""
    kind = array.type
    if ids:
        # The bits of unsigned ids are what is hashed.
        return array.view(pa.int64()) if pa.types.is_uint64(kind) else array.cast(pa.int64())
    if kind.id in _NUMBERS:
        return array
    wide = pa.types.is_floating(kind) or pa.types.is_uint64(kind)
    return array.cast(pa.float64() if wide else pa.int64(), safe=False)


def dense_values(columns: Sequence[Buffers], out: np.ndarray, bad: np.ndarray, missing: float | None) -> list[int]:
    """Fill float [R, n], a column of it from each of `columns`, with log(1 + x), or, where `missing` is given, with x
    or `missing`; returns every column's first bad row or -1."""
    firsts = [_several(column, bad) for column in columns]
    for kind in {column.values.dtype for column in columns}:
        where = np.array([d for d, column in enumerate(columns) if column.values.dtype == kind])
        chosen = [_short(columns[d]) for d in where]
        found = np.empty(len(where), np.int64)
        logarithms = kernels.LOG1P if missing is None else kernels.LOG1P[:0]
        wide.dense_columns(
            wide.pointers([column[:4] for column in chosen]),
            np.empty(0, kind), logarithms, missing or 0.0, where, out, bad, found,
        )  # fmt: skip
        for d, first in zip(where, found, strict=True):
            firsts[d] = _earliest(firsts[d], int(first))
    return firsts


def label_values(buffers: Buffers, out: np.ndarray, bad: np.ndarray) -> int:
    """Fill float32 [R] with 0 and 1; returns the first bad row or -1."""
    several = _several(buffers, bad)
    return _earliest(kernels.label_column(*buffers.flat()[:2], out, bad), several)


def mapped_values(
    columns: Sequence[Buffers], maps: Sequence[IdMap], out: np.ndarray, bad: np.ndarray
) -> tuple[dict[int, Bags], list[int]]:
    """The columns as rows: a line of `out`, int64 [F, R], where every row has at most one id, else as bags; and every
    column's first bad row or -1."""
    where = np.array([f for f, column in enumerate(columns) if column.most <= 1], np.int64)
    chosen = [_short(columns[f]) for f in where]
    ids = [maps[f] for f in where]
    firsts = np.empty(len(columns), np.int64)
    found = np.empty(len(where), np.int64)
    wide.map_columns(
        wide.pointers([column[:4] for column in chosen]),
        np.array([m.hashed for m in ids], np.uint8),
        np.array([m.rows for m in ids], np.uint64),
        np.array([row_mask(m.rows) for m in ids], np.uint64),
        np.array([m.missing for m in ids], np.int64),
        where, out, bad, found,
    )  # fmt: skip
    firsts[where] = found
    bags = {}
    for f, column in enumerate(columns):
        if column.most > 1:
            bags[f], firsts[f] = _bags(column, maps[f], bad)
    return bags, firsts.tolist()


def _bags(buffers: Buffers, ids: IdMap, bad: np.ndarray) -> tuple[Bags, int]:
    assert buffers.offsets is not None
    how = (ids.hashed, np.uint64(ids.rows), row_mask(ids.rows), np.int64(ids.missing))
    offsets = pooled((len(buffers.offsets),), np.int64)
    kernels.bag_offsets(buffers.offsets, buffers.row_there, offsets)
    values = pooled((int(offsets[-1]),), np.int64)
    return Bags(values, offsets), kernels.bags(
        buffers.values, buffers.there, buffers.offsets, buffers.row_there, offsets, *how, values, bad
    )


def _short(buffers: Buffers) -> Buffers:
    """As the kernels over many columns take it: large lists have offsets of 64 bits."""
    return buffers if buffers.offsets is None or buffers.offsets.dtype == np.int32 else buffers.flat()


def _several(buffers: Buffers, bad: np.ndarray) -> int:
    """Marks the rows whose list has more than one element, which a number cannot have."""
    if buffers.offsets is None or buffers.most <= 1:
        return -1
    rows = np.flatnonzero(np.diff(buffers.offsets) > 1)
    bad[rows] = 1
    return int(rows[0])


def _earliest(first: int, second: int) -> int:
    return max(first, second) if first < 0 or second < 0 else min(first, second)


def bad_value(
    column: pa.Array | pa.ChunkedArray, row: int, role: str, ids: IdMap | None, padding: int | None = None
) -> tuple[str, str]:
    """What is wrong with a row that a kernel refused, and the remedy; role is "label", "dense" or "ids". Elements of
    lists that equal `padding` were dropped."""
    value = column[row].as_py()
    inner = value if isinstance(value, list) else [value]
    if ids is not None:
        dropped = padding if isinstance(value, list) else None
        wrong = next(v for v in inner if v is not None and v != dropped and not 0 <= v < ids.rows)
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
