"""From raw ids to row numbers: `row = mix64(id) mod rows`, in unsigned 64-bit integers only.

No Python `hash` is involved, so the mapping is the same on every machine, in every process and for every
PYTHONHASHSEED.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["MISSING_ID", "MISSING_ROW", "hash_rows", "mix64", "mix64_array", "permutation", "to_row"]

MISSING_ID = -1
"""The raw id that stands for a missing value where ids are hashed (as unsigned 64 bit: 2**64 - 1)."""
MISSING_ROW = 0
"""The row that stands for a missing value where ids are row numbers already."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(cache=True, nogil=True, inline="always")
def mix64(x: np.uint64) -> np.uint64:
    """A bijection of the 64-bit words whose output bits all depend on all input bits.

    One step of SplitMix64 from state `x`: add the golden gamma, then Stafford's variant 13 of the finaliser (G. L.
    Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    z = np.uint64(x) + _GOLDEN
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@njit(cache=True, nogil=True, inline="always")
def to_row(raw: np.int64, rows: np.uint64, mask: np.uint64) -> np.int64:
    """mix64(raw) mod rows. `mask` is rows - 1 where rows is a power of two (the division saved), else 0."""
    mixed = mix64(np.uint64(raw))
    if mask:
        return np.int64(mixed & mask)
    return np.int64(mixed % rows)


def row_mask(rows: int) -> np.uint64:
    """The `mask` argument of `to_row`."""
    return np.uint64(rows - 1 if rows and rows & (rows - 1) == 0 else 0)


@njit(cache=True, nogil=True)
def _hash_rows(ids: np.ndarray, rows: np.uint64, mask: np.uint64, out: np.ndarray) -> None:
    for i in range(len(ids)):
        out[i] = to_row(ids[i], rows, mask)


def hash_rows(ids: np.ndarray, rows: int, out: np.ndarray | None = None) -> np.ndarray:
    """Row numbers of raw ids. ids: int64 (any 64-bit pattern) [L]; returns int64 [L] in [0, rows)."""
    ids = np.ascontiguousarray(ids).view(np.int64)
    out = np.empty(len(ids), np.int64) if out is None else out
    _hash_rows(ids, np.uint64(rows), row_mask(rows), out)
    return out


@njit(cache=True, nogil=True)
def mix64_array(words: np.ndarray) -> np.ndarray:
    """mix64 of every element. uint64 [L] -> uint64 [L]."""
    out = np.empty(len(words), np.uint64)
    for i in range(len(words)):
        out[i] = mix64(words[i])
    return out


@njit(cache=True, nogil=True)
def _permutation(key: np.uint64, out: np.ndarray) -> None:
    for i in range(len(out)):
        out[i] = i
    for i in range(len(out) - 1, 0, -1):
        # The bias of the modulo is below 2**-40 for any block that fits memory.
        j = np.int64(mix64(key ^ np.uint64(i)) % np.uint64(i + 1))
        out[i], out[j] = out[j], out[i]


def permutation(length: int, *keys: int) -> np.ndarray:
    """A permutation of range(length), int64, that is a function of the integers `keys` alone (Fisher-Yates on
    mix64)."""
    key = np.zeros(1, np.uint64)
    for word in keys:
        key = mix64_array(key ^ np.uint64(int(word) % 2**64))
    out = np.empty(length, np.int64)
    _permutation(key[0], out)
    return out
