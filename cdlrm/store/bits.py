"""One bit a row, packed in bytes: marking, counting, and splitting row lists by it (numba, nogil)."""

from __future__ import annotations

import numba as nb
import numpy as np

_jit = nb.njit(nogil=True, cache=True, error_model="numpy")


@_jit
def mark(bits, rows):
    """Set the bit of every row of `rows int [n]` in `bits uint8 [ceil(N/8)]`."""
    for i in range(rows.size):
        r = np.int64(rows[i])
        bits[r >> 3] |= np.uint8(1 << (r & 7))


@_jit
def split(bits, rows, set_at, clear_at):
    """Positions in `rows` whose bit is set / clear; returns how many are set."""
    n_set = 0
    n_clear = 0
    for i in range(rows.size):
        r = rows[i]
        if (bits[r >> 3] >> (r & 7)) & 1:
            set_at[n_set] = i
            n_set += 1
        else:
            clear_at[n_clear] = i
            n_clear += 1
    return n_set


@_jit
def clear_rows(bits, lo, hi):
    """Rows of [lo, hi) whose bit is clear, int64."""
    count = 0
    for r in range(lo, hi):
        count += 1 - ((bits[r >> 3] >> (r & 7)) & 1)
    out = np.empty(count, np.int64)
    at = 0
    for r in range(lo, hi):
        if not (bits[r >> 3] >> (r & 7)) & 1:
            out[at] = r
            at += 1
    return out


def positions(bits: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions (int64) in `rows` of set and of clear bits, each ascending."""
    set_at, clear_at = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    count = split(bits, rows, set_at, clear_at)
    return set_at[:count], clear_at[: rows.size - count]
