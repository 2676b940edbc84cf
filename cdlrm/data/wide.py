"""numba kernels over many columns at once: one call a block, in which the lock is free.

A call a column costs as much as the column: Python around it, and the lock that the threads take from each other
before and after. So the columns come as a table of addresses (`pointers`), and a kernel goes through them in tiles
that stay in the first-level cache. Masks and results are as in `cdlrm.data.kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from cdlrm.data.hashing import to_row

__all__ = ["dense_columns", "map_columns", "pointers"]

_TILE = 512


def pointers(columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]]) -> np.ndarray:
    """int64 [n, 5] of columns (values, there, offsets int32 or None, row_there): the addresses, 0 for what is not
    there, and the number of values. Whoever calls keeps the arrays alive."""
    table = np.zeros((len(columns), 5), np.int64)
    for line, (values, there, offsets, row_there) in zip(table, columns, strict=True):
        line[0], line[4] = _address(values), len(values)
        for i, array in ((1, there), (2, offsets), (3, row_there)):
            if array is not None and len(array):
                line[i] = _address(array)
    return table


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("a column must be contiguous")
    return int(array.__array_interface__["data"][0])


def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


_at: Any = intrinsic(_pointer)


@njit(cache=True, nogil=True)
def _rows(
    column: np.ndarray, low: int, rows: int, own: np.ndarray, own_mask: np.ndarray, ones: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows low.. of a column of `pointers`, as many as `own` has, and where they are there: in place, or, for lists,
    the first element of each in `own` and `own_mask`."""
    count = len(own)
    values = carray(_at(column[0]), (column[4],), own.dtype)
    there = carray(_at(column[1]), (column[4],), np.uint8)
    if column[4] == 0:
        own[:] = 0
        own_mask[:] = 0
        return own, own_mask
    if column[2] == 0:
        return values[low : low + count], there[low : low + count] if column[1] else ones[:count]
    offsets = carray(_at(column[2]), (rows + 1,), np.int32)[low : low + count + 1]
    last = np.uint64(column[4] - 1)  # unsigned: no check for negative positions in the loop
    for j in range(count):
        own[j] = values[min(np.uint64(offsets[j]), last)]
        own_mask[j] = offsets[j + 1] > offsets[j]
    if column[1]:
        for j in range(count):
            own_mask[j] &= there[min(np.uint64(offsets[j]), last)]
    if column[3]:
        row_there = carray(_at(column[3]), (rows,), np.uint8)[low : low + count]
        for j in range(count):
            own_mask[j] &= row_there[j]
    return own, own_mask


@njit(cache=True, nogil=True)
def map_columns(
    columns: np.ndarray,
    hashed: np.ndarray,
    tables: np.ndarray,
    masks: np.ndarray,
    missing: np.ndarray,
    where: np.ndarray,
    out: np.ndarray,
    bad: np.ndarray,
    firsts: np.ndarray,
) -> None:
    """Row numbers of columns with at most one id a row. columns: `pointers` to int64 [n]; hashed uint8, tables uint64
    (rows of the table), masks uint64, missing int64 [n]: as `to_row` takes them; out int64 [F, R], whose line
    where[k] is column k's; firsts int64 [n]: each one's first bad row, or -1."""
    rows = out.shape[1]
    values, there, ones = np.empty(_TILE, np.int64), np.empty(_TILE, np.uint8), np.ones(_TILE, np.uint8)
    for k in range(len(columns)):
        firsts[k], absent, table, power = -1, missing[k], tables[k], masks[k]
        line = out[where[k]]
        for low in range(0, rows, _TILE):
            count = min(_TILE, rows - low)
            to = line[low : low + count]
            tile, mask = _rows(columns[k], low, rows, values[:count], there[:count], ones)
            if hashed[k] and power:
                for j in range(count):
                    row = to_row(tile[j], table, power)
                    to[j] = row if mask[j] else absent
            elif hashed[k]:
                for j in range(count):
                    row = to_row(tile[j], table, power)
                    to[j] = row if mask[j] else absent
            else:
                wrong = _check(tile, mask, table, absent, to, bad[low : low + count])
                if wrong >= 0 and firsts[k] < 0:
                    firsts[k] = low + wrong


@njit(cache=True, nogil=True)
def _check(
    tile: np.ndarray, mask: np.ndarray, table: np.uint64, absent: np.int64, to: np.ndarray, bad: np.ndarray
) -> int:
    """Ids that are row numbers; a bad one becomes 0."""
    first = -1
    for j in range(len(tile)):
        row = np.int64(tile[j] if mask[j] else absent)
        if np.uint64(row) > table - np.uint64(1):  # 0 rows mean no bound; a negative id is a large unsigned one
            row = np.int64(0)
            bad[j] = 1
            first = j if first < 0 else first
        to[j] = row
    return first


@njit(cache=True, nogil=True)
def dense_columns(
    columns: np.ndarray,
    kind: np.ndarray,
    logarithms: np.ndarray,
    missing: float,
    where: np.ndarray,
    out: np.ndarray,
    bad: np.ndarray,
    firsts: np.ndarray,
) -> None:
    """out[i, where[k]] = log(1 + max(x, 0)) of column k, rounded to float32 once, 0 where missing; without
    `logarithms` (see `LOG1P`) x itself, `missing` where missing. NaN and infinity are bad. columns: `pointers` to
    values of kind's dtype; out float [R, D]; firsts int64 [n]: each one's first bad row, or -1."""
    rows = len(out)
    values, there, ones = np.empty(_TILE, kind.dtype), np.empty(_TILE, np.uint8), np.ones(_TILE, np.uint8)
    index = np.empty(_TILE, np.uint16)
    for k in range(len(columns)):
        firsts[k] = -1
    for low in range(0, rows, _TILE):  # all columns of a few rows: each line of `out` is written while it is near
        count = min(_TILE, rows - low)
        to, marks = out[low : low + count], bad[low : low + count]
        for k in range(len(columns)):
            tile, mask = _rows(columns[k], low, rows, values[:count], there[:count], ones)
            if len(logarithms):
                wrong = _log_tile(tile, mask, index, logarithms, where[k], to, marks)
            else:
                wrong = _plain_tile(tile, mask, missing, where[k], to, marks)
            if wrong >= 0 and firsts[k] < 0:
                firsts[k] = low + wrong


@njit(cache=True, nogil=True)
def _log_tile(
    tile: np.ndarray,
    mask: np.ndarray,
    index: np.ndarray,
    logarithms: np.ndarray,
    column: int,
    to: np.ndarray,
    bad: np.ndarray,
) -> int:
    """Small whole numbers by the table, all at once; where there are others, those once more one by one."""
    others = 0
    for j in range(len(tile)):
        x = np.float64(tile[j]) if mask[j] else 0.0
        z = 0.0 if x < 0.0 else x
        whole = np.uint16(np.int32(min(z, 65535.0) if z == z else 0.0))
        index[j] = whole
        others += (np.float64(whole) != z) | (x - x != 0.0)
    for j in range(len(tile)):
        to[j, column] = logarithms[index[j]]
    first = -1
    if others:
        for j in range(len(tile)):
            x = np.float64(tile[j])
            if not mask[j]:
                continue
            if not math.isfinite(x):
                bad[j] = 1
                first = j if first < 0 else first
            elif x > 0.0 and np.float64(index[j]) != x:
                to[j, column] = math.log1p(x)
    return first


@njit(cache=True, nogil=True)
def _plain_tile(
    tile: np.ndarray, mask: np.ndarray, missing: float, column: int, to: np.ndarray, bad: np.ndarray
) -> int:
    first = -1
    for j in range(len(tile)):
        to[j, column] = tile[j] if mask[j] else missing
        if mask[j] and not math.isfinite(np.float64(tile[j])):
            bad[j] = 1
            first = j if first < 0 else first
    return first
