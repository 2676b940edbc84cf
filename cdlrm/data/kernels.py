"""numba kernels from the buffers of Arrow arrays to columns; they release the lock.

`there` (uint8, one an element) is 0 where the element is missing; length 0 means that all are there. `bad` (uint8
[R]) is set to 1 at rows that may not be used; a kernel returns the first row that it marked, or -1. Loops are written
without branches where it matters, so that the compiler can use vector instructions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cdlrm.data.hashing import to_row

__all__ = ["LOG1P", "bag_offsets", "bags", "label_column", "longest", "one_each", "without"]

LOG1P = np.log1p(np.arange(65536, dtype=np.float64)).astype(np.float32)
"""log(1 + n) of small whole numbers, which nearly all dense features are: looked up ten times faster than computed."""


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
def bag_offsets(offsets: np.ndarray, row_there: np.ndarray, out: np.ndarray) -> None:
    """out int64 [R+1]: offsets of the lookups, an empty or missing list counting as one (missing) id."""
    out[0] = 0
    for i in range(len(out) - 1):
        length = offsets[i + 1] - offsets[i]
        if len(row_there) and not row_there[i]:
            length = 0
        out[i + 1] = out[i] + max(length, 1)


@njit(cache=True, nogil=True)
def _hash_run(
    values: np.ndarray, at: np.uint64, rows: np.uint64, mask: np.uint64, out: np.ndarray, to: np.uint64, end: np.uint64
) -> None:
    """out[to..end-1] from values[at..]. A loop for each way of dividing, so that both become vector instructions;
    positions are unsigned, so that none is checked for being negative, and no slices, which would be counted."""
    if mask:
        for j in range(end - to):
            out[to + j] = to_row(values[at + j], rows, mask)
    else:
        for j in range(end - to):
            out[to + j] = to_row(values[at + j], rows, np.uint64(0))


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
    first, row, count = -1, 0, len(out_offsets) - 1
    while row < count:
        begin = row
        while row < count and offsets[row] < offsets[row + 1] and (len(row_there) == 0 or row_there[row]):
            row += 1
        # Rows begin..row-1 have ids, which lie together here and there.
        at, to, end = np.uint64(offsets[begin]), np.uint64(out_offsets[begin]), np.uint64(out_offsets[row])
        if hashed:
            _hash_run(values, at, rows, mask, out, to, end)
        else:
            for j in range(end - to):
                out[to + j] = values[at + j]
        if len(there) > 0:
            for j in range(end - to):
                out[to + j] = out[to + j] if there[at + j] else missing
        if not hashed:
            for i in range(begin, row):
                for j in range(np.uint64(out_offsets[i]), np.uint64(out_offsets[i + 1])):
                    # 0 rows mean no bound, a negative id is a large unsigned one.
                    if np.uint64(out[j]) > rows - np.uint64(1):
                        out[j] = 0
                        bad[i] = 1
                        first = i if first < 0 else first
        while row < count and not (offsets[row] < offsets[row + 1] and (len(row_there) == 0 or row_there[row])):
            out[out_offsets[row]] = missing
            row += 1
    return first
