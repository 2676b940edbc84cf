"""numba kernels from the buffers of Arrow arrays to columns; they release the lock.

`there` (uint8, one an element) is 0 where the element is missing; length 0 means that all are there. `bad` (uint8
[R]) is set to 1 at rows that may not be used; a kernel returns the first row that it marked, or -1. Loops are written
without branches where it matters, so that the compiler can use vector instructions.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from cdlrm.data.hashing import to_row

__all__ = [
    "LOG1P",
    "bag_offsets",
    "bags",
    "dense_column",
    "label_column",
    "longest",
    "map_column",
    "one_each",
    "plain_column",
    "turn",
    "without",
]

LOG1P = np.log1p(np.arange(65536, dtype=np.float64)).astype(np.float32)
"""log(1 + n) of small whole numbers, which nearly all dense features are: looked up ten times faster than computed."""
_LAST = 65535
_TILE = 1024


@njit(cache=True, nogil=True)
def longest(offsets: np.ndarray) -> int:
    """Length of the longest list; offsets [R+1]."""
    most = 0
    for i in range(len(offsets) - 1):
        most = max(most, offsets[i + 1] - offsets[i])
    return most


@njit(cache=True, nogil=True)
def one_each(
    values: np.ndarray,
    there: np.ndarray,
    offsets: np.ndarray,
    row_there: np.ndarray,
    out: np.ndarray,
    out_there: np.ndarray,
) -> None:
    """The first element of every list in out [R], and in out_there [R] whether there is one."""
    if len(values) == 0:
        out[:] = 0
        out_there[:] = 0
        return
    last = np.uint64(len(values) - 1)  # unsigned: no check for negative positions in the loop
    for i in range(len(out)):
        out[i] = values[min(np.uint64(offsets[i]), last)]
        out_there[i] = offsets[i + 1] > offsets[i]
    for i in range(len(row_there)):
        out_there[i] &= row_there[i]
    if len(there):
        for i in range(len(out)):
            out_there[i] &= there[min(np.uint64(offsets[i]), last)]


@njit(cache=True, nogil=True)
def dense_column(values: np.ndarray, there: np.ndarray, table: np.ndarray, out: np.ndarray, bad: np.ndarray) -> int:
    """out[i] = log(1 + max(x, 0)) rounded to float32 once, 0 where missing; NaN and infinity are bad."""
    first = -1
    index = np.empty(_TILE, np.uint16)
    for low in range(0, len(out), _TILE):
        count = min(_TILE, len(out) - low)
        tile, sum_up = values[low : low + count], 0
        if len(there):
            mask = there[low : low + count]
            for j in range(count):
                x = np.float64(tile[j]) if mask[j] else 0.0
                z = 0.0 if x < 0.0 else x
                whole = np.uint16(np.int32(min(z, 65535.0) if z == z else 0.0))
                index[j] = whole
                sum_up += (np.float64(whole) != z) | (x - x != 0.0)
        else:
            for j in range(count):
                x = np.float64(tile[j])
                z = 0.0 if x < 0.0 else x
                whole = np.uint16(np.int32(min(z, 65535.0) if z == z else 0.0))
                index[j] = whole
                sum_up += (np.float64(whole) != z) | (x - x != 0.0)
        to = out[low : low + count]
        for j in range(count):
            to[j] = table[index[j]]
        if sum_up:  # fractions, large or negative infinite numbers, NaN
            wrong = _slow_tile(values, there, index, low, out, bad, count)
            first = wrong if first < 0 else first
    return first


@njit(cache=True, nogil=True)
def _slow_tile(
    values: np.ndarray, there: np.ndarray, index: np.ndarray, low: int, out: np.ndarray, bad: np.ndarray, count: int
) -> int:
    first = -1
    for i in range(low, low + count):
        if len(there) and not there[i]:
            continue
        x = np.float64(values[i])
        if not math.isfinite(x):
            bad[i] = 1
            first = i if first < 0 else first
        elif x > 0.0 and np.float64(index[i - low]) != x:
            out[i] = math.log1p(x)
    return first


@njit(cache=True, nogil=True)
def plain_column(values: np.ndarray, there: np.ndarray, missing: float, out: np.ndarray, bad: np.ndarray) -> int:
    """out[i] = x, `missing` where there is none; NaN and infinity are bad."""
    first = -1
    for i in range(len(out)):
        if len(there) and not there[i]:
            out[i] = missing
            continue
        out[i] = values[i]
        if not math.isfinite(np.float64(values[i])):
            bad[i] = 1
            first = i if first < 0 else first
    return first


@njit(cache=True, nogil=True)
def without(
    values: np.ndarray, there: np.ndarray, offsets: np.ndarray, padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists without the elements that equal `padding`: values, mask and offsets anew."""
    count, rows = 0, len(offsets) - 1
    out, out_offsets = np.empty(offsets[rows] - offsets[0], values.dtype), np.zeros(rows + 1, offsets.dtype)
    out_there = np.empty(len(out) if len(there) else 0, np.uint8)
    for i in range(rows):
        for at in range(offsets[i], offsets[i + 1]):
            if values[at] != padding or (len(there) and not there[at]):
                out[count] = values[at]
                if len(there):
                    out_there[count] = there[at]
                count += 1
        out_offsets[i + 1] = count
    return out[:count], out_there[:count], out_offsets


@njit(cache=True, nogil=True)
def turn(across: np.ndarray, out: np.ndarray) -> None:
    """out [R, n] = across [n, R] transposed."""
    for i in range(out.shape[0]):
        for d in range(out.shape[1]):
            out[i, d] = across[d, i]


@njit(cache=True, nogil=True)
def label_column(values: np.ndarray, there: np.ndarray, out: np.ndarray, bad: np.ndarray) -> int:
    """out[i] = 0 or 1; anything else, and a missing label, is bad."""
    wrong = 0
    for i in range(len(out)):
        out[i] = values[i] == 1
        wrong += (values[i] != 0) & (values[i] != 1)
    first = -1
    if wrong or len(there):
        for i in range(len(out)):
            if (values[i] != 0 and values[i] != 1) or (len(there) and not there[i]):
                bad[i] = 1
                first = i if first < 0 else first
    return first


@njit(cache=True, nogil=True)
def map_column(
    values: np.ndarray,
    there: np.ndarray,
    hashed: bool,
    rows: np.uint64,
    mask: np.uint64,
    missing: np.int64,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """Row numbers of a column with one id a row (int64 in, int64 out)."""
    first = -1
    if hashed:
        if len(there):
            for i in range(len(out)):
                row = to_row(values[i], rows, mask)
                out[i] = row if there[i] else missing
        else:
            for i in range(len(out)):
                out[i] = to_row(values[i], rows, mask)
        return first
    for i in range(len(out)):
        row = np.int64(missing if len(there) and not there[i] else values[i])
        if np.uint64(row) > rows - np.uint64(1):  # rows = 0 means no bound; a negative id is a large unsigned one
            row = np.int64(0)
            bad[i] = 1
            first = i if first < 0 else first
        out[i] = row
    return first


@njit(cache=True, nogil=True)
def bag_offsets(offsets: np.ndarray, row_there: np.ndarray, out: np.ndarray) -> None:
    """out int64 [R+1]: offsets of the lookups, an empty or missing list counting as one (missing) id."""
    out[0] = 0
    for i in range(len(out) - 1):
        length = offsets[i + 1] - offsets[i]
        if len(row_there) and not row_there[i]:
            length = 0
        out[i + 1] = out[i] + max(length, 1)


@njit(cache=True, nogil=True)
def bags(
    values: np.ndarray,
    there: np.ndarray,
    offsets: np.ndarray,
    row_there: np.ndarray,
    out_offsets: np.ndarray,
    hashed: bool,
    rows: np.uint64,
    mask: np.uint64,
    missing: np.int64,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """Row numbers of a column of lists; out_offsets int64 [R+1] as `bag_offsets` made them."""
    first = -1
    masked = len(there) > 0
    one = np.uint64(1)
    for i in range(len(out_offsets) - 1):
        # Unsigned, so that no position is checked for being negative.
        to, at, end = np.uint64(out_offsets[i]), np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        if at == end or (len(row_there) > 0 and not row_there[i]):
            out[to] = missing
        elif hashed and not masked:
            while at < end:
                out[to] = to_row(values[at], rows, mask)
                to, at = to + one, at + one
        elif hashed:
            while at < end:
                row = to_row(values[at], rows, mask)
                out[to] = row if there[at] else missing
                to, at = to + one, at + one
        else:
            while at < end:
                row = missing if masked and not there[at] else values[at]
                if np.uint64(row) > rows - one:
                    row = np.int64(0)
                    bad[i] = 1
                    first = i if first < 0 else first
                out[to] = row
                to, at = to + one, at + one
    return first
