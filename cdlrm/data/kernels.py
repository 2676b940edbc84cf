"""numba kernels from the buffers of Arrow arrays to columns: one pass, no intermediate arrays, the lock released.

Validity bitmaps are Arrow's (bit `shift + i` of little-endian bytes says that element i is there); an array of length 0 means that
all are there. `bad` (uint8 [R]) is set to 1 at rows that may not be used; a kernel returns the first row it marked, or -1.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from cdlrm.data.hashing import to_row

__all__ = ["LOG1P", "bag_lengths", "bags", "dense_column", "label_column", "log_count", "longest", "map_column"]

LOG1P = np.log1p(np.arange(65536, dtype=np.float64)).astype(np.float32)
"""log(1 + n) of small whole numbers, which nearly all dense features are: a look-up costs a fifth of a logarithm."""


@njit(cache=True, nogil=True, inline="always")
def _there(bits: np.ndarray, at: int) -> bool:
    return (bits[at >> 3] >> (at & 7)) & 1 != 0


@njit(cache=True, nogil=True, inline="always")
def log_count(x: float, table: np.ndarray) -> np.float32:
    """log(1 + max(x, 0)), rounded to float32 once."""
    if x <= 0.0:
        return np.float32(0.0)
    if x < 65536.0:
        whole = np.int64(x)
        if np.float64(whole) == x:
            return table[whole]
    return np.float32(math.log1p(x))


@njit(cache=True, nogil=True)
def longest(offsets: np.ndarray) -> int:
    """Length of the longest list; offsets [R+1]."""
    most = 0
    for i in range(len(offsets) - 1):
        most = max(most, offsets[i + 1] - offsets[i])
    return most


@njit(cache=True, nogil=True)
def dense_column(
    values: np.ndarray,
    bits: np.ndarray,
    shift: int,
    offsets: np.ndarray,
    row_bits: np.ndarray,
    row_shift: int,
    table: np.ndarray,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """out[i] = log(1 + max(x, 0)), 0 where missing; NaN and infinity are bad. offsets [R+1], or empty for flat columns."""
    first = -1
    flat = len(offsets) == 0
    for i in range(len(out)):
        at = i if flat else offsets[i]
        there = flat or offsets[i + 1] > at
        if there and len(row_bits):
            there = _there(row_bits, row_shift + i)
        if there and len(bits):
            there = _there(bits, shift + at)
        if not there:
            out[i] = 0.0
            continue
        x = np.float64(values[at])
        if not math.isfinite(x):
            bad[i] = 1
            first = i if first < 0 else first
        out[i] = log_count(x, table)
    return first


@njit(cache=True, nogil=True)
def label_column(
    values: np.ndarray,
    bits: np.ndarray,
    shift: int,
    offsets: np.ndarray,
    row_bits: np.ndarray,
    row_shift: int,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """out[i] = 0 or 1; anything else, and a missing label, is bad."""
    first = -1
    flat = len(offsets) == 0
    for i in range(len(out)):
        at = i if flat else offsets[i]
        there = flat or offsets[i + 1] > at
        if there and len(row_bits):
            there = _there(row_bits, row_shift + i)
        if there and len(bits):
            there = _there(bits, shift + at)
        out[i] = 0.0
        if there:
            x = np.float64(values[at])
            there = x == 0.0 or x == 1.0
            out[i] = 1.0 if x == 1.0 else 0.0
        if not there:
            bad[i] = 1
            first = i if first < 0 else first
    return first


@njit(cache=True, nogil=True)
def bag_lengths(offsets: np.ndarray, row_bits: np.ndarray, row_shift: int, out: np.ndarray) -> None:
    """out int64 [R+1]: offsets of the lookups, an empty or missing list counting as one (missing) id."""
    out[0] = 0
    for i in range(len(out) - 1):
        length = offsets[i + 1] - offsets[i]
        if len(row_bits) and not _there(row_bits, row_shift + i):
            length = 0
        out[i + 1] = out[i] + max(length, 1)


@njit(cache=True, nogil=True)
def map_column(
    values: np.ndarray,
    bits: np.ndarray,
    shift: int,
    offsets: np.ndarray,
    row_bits: np.ndarray,
    row_shift: int,
    hashed: bool,
    rows: np.uint64,
    mask: np.uint64,
    missing: np.int64,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """Row numbers of a column with at most one id a row (int64 in, int64 out)."""
    if hashed and len(offsets) == 0 and len(bits) == 0:
        for i in range(len(out)):
            out[i] = to_row(values[i], rows, mask)
        return -1
    first = -1
    flat = len(offsets) == 0
    for i in range(len(out)):
        at = i if flat else offsets[i]
        there = flat or offsets[i + 1] > at
        if there and len(row_bits):
            there = _there(row_bits, row_shift + i)
        if there and len(bits):
            there = _there(bits, shift + at)
        if not there:
            out[i] = missing
        elif hashed:
            out[i] = to_row(values[at], rows, mask)
        else:
            out[i] = values[at]
            if np.uint64(values[at]) >= rows:  # a negative id is a large unsigned one
                out[i] = 0
                bad[i] = 1
                first = i if first < 0 else first
    return first


@njit(cache=True, nogil=True)
def bags(
    values: np.ndarray,
    bits: np.ndarray,
    shift: int,
    offsets: np.ndarray,
    row_bits: np.ndarray,
    row_shift: int,
    out_offsets: np.ndarray,
    hashed: bool,
    rows: np.uint64,
    mask: np.uint64,
    missing: np.int64,
    out: np.ndarray,
    bad: np.ndarray,
) -> int:
    """Row numbers of a column of lists; out_offsets int64 [R+1] as `bag_lengths` made them."""
    first = -1
    for i in range(len(out_offsets) - 1):
        listed = len(row_bits) == 0 or _there(row_bits, row_shift + i)
        for k in range(out_offsets[i + 1] - out_offsets[i]):
            to, at = out_offsets[i] + k, offsets[i] + k
            if not listed or at >= offsets[i + 1] or (len(bits) and not _there(bits, shift + at)):
                out[to] = missing
            elif hashed:
                out[to] = to_row(values[at], rows, mask)
            else:
                out[to] = values[at]
                if np.uint64(values[at]) >= rows:
                    out[to] = 0
                    bad[i] = 1
                    first = i if first < 0 else first
    return first
