"""Initial values of rows: a function of (seed, table, row, column) alone.

The default is uniform(-b, b), b = sqrt(1 / rows), from the counter-based generator Philox4x32-10 (Salmon,
Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3").  No generator state exists, so a
row has the same bits whenever, wherever and by whichever device it is first made:

    key = (seed low, seed high), counter = (column // 4, row low, row high, table), x = word column % 4
    value = float32(int32(x >> 8) - 2^23) * float32(b * 2^-23)        (one rounding)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from .errors import ConfigError

Init = Callable[[np.ndarray, int], Any]  # (rows int64 [K], dim) -> float32 [K, dim]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # round multipliers
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # key increments
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MANTISSA_SHIFT = np.uint64(8)
_CENTRE = np.int64(1 << 23)
_BLOCK_ROWS = 65536  # rows that a callable is asked for at once


@njit(nogil=True, cache=True, error_model="numpy")
def philox(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit words (held in uint64) of counter (c0..c3) and key (k0, k1): ten rounds."""
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@njit(nogil=True, cache=True, error_model="numpy")
def _value(word, scale):
    return np.float32(np.int64(word >> _MANTISSA_SHIFT) - _CENTRE) * scale


@njit(nogil=True, cache=True, error_model="numpy")
def fill_row(out, k, row, table, key0, key1, scale):
    """out[k] = the initial values of `row` of table number `table`."""
    dim = out.shape[1]
    low, high = np.uint64(row) & _LOW, np.uint64(row) >> _HALF
    for block in range(dim // 4):
        x0, x1, x2, x3 = philox(np.uint64(block), low, high, np.uint64(table), key0, key1)
        out[k, 4 * block] = _value(x0, scale)
        out[k, 4 * block + 1] = _value(x1, scale)
        out[k, 4 * block + 2] = _value(x2, scale)
        out[k, 4 * block + 3] = _value(x3, scale)
    if dim % 4:
        words = philox(np.uint64(dim // 4), low, high, np.uint64(table), key0, key1)
        for c in range(dim % 4):
            out[k, dim - dim % 4 + c] = _value(words[c], scale)


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_mixed(out, out_index, indexed, group_rows, bases, scales, tables, uniform, key0, key1):
    """Uniform rows of any tables of a group; rows of tables with a callable are left alone."""
    for i in range(len(group_rows)):
        t = np.searchsorted(bases, group_rows[i], side="right") - 1
        if uniform[t]:
            k = np.int64(out_index[i]) if indexed else i
            fill_row(out, k, group_rows[i] - bases[t], tables[t], key0, key1, scales[t])


@njit(nogil=True, cache=True, error_model="numpy")
def _fill_range(out, lo, hi, table, key0, key1, scale):
    """out[0 : hi - lo] = rows [lo, hi) of one table."""
    for row in range(lo, hi):
        fill_row(out, row - lo, row, table, key0, key1, scale)


class Initializer:
    """Initial weights of the rows of one group.

    bases          int64 [T+1]: first group row of each table, then the number of rows of the group.
    inits          per table None (uniform +-sqrt(1 / rows)) or a callable `init(rows, dim)`: int64 [K] row ids
                   of the table -> float32 [K, dim], a function of the row ids alone.
    seed           any integer in [0, 2^64).
    table_indices  per table its position in the collection (so that groups do not repeat each other).
    names          per table its name, for messages.

    Raises ConfigError for a wrong seed, and when a callable returns another shape or dtype, or NaN or infinity.
    """

    def __init__(
        self,
        bases: np.ndarray,
        inits: Sequence[Init | None],
        seed: int,
        dim: int,
        table_indices: Sequence[int],
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise ConfigError(f"seed={seed!r}: must be an integer within [0, 2^64).")
        self.dim = dim
        self._bases = np.array(bases, np.int64)
        self._inits = list(inits)
        self._uniform = np.array([init is None for init in inits], np.bool_)
        self._tables = np.array(table_indices, np.int64)
        self._names = list(names) if names is not None else [str(index) for index in table_indices]
        self._key = np.uint64(seed & 0xFFFFFFFF), np.uint64(int(seed) >> 32)
        rows = np.diff(self._bases).tolist()
        self._scales = np.array([math.sqrt(1.0 / n) * 2.0**-23 if n else 0.0 for n in rows], np.float32)

    def rows(self, out: np.ndarray, out_index: np.ndarray | None, group_rows: np.ndarray) -> None:
        """out[out_index[k]] = initial values of group_rows[k] (None: out[k]).

        out float32 [., dim] C order; out_index int32 or int64 [K]; group_rows int64 [K], tables mixed.
        """
        index = group_rows if out_index is None else out_index
        _fill_mixed(
            out, index, out_index is not None, group_rows, self._bases, self._scales, self._tables, self._uniform,
            *self._key,
        )  # fmt: skip
        if self._uniform.all() or len(group_rows) == 0:
            return
        table = np.searchsorted(self._bases, group_rows, side="right") - 1
        for t in np.unique(table[~self._uniform[table]]).tolist():
            at = np.flatnonzero(table == t)
            values = self._call(t, group_rows[at] - self._bases[t])
            out[at if out_index is None else out_index[at]] = values

    def fill(self, out: np.ndarray, lo: int, hi: int) -> None:
        """out[0 : hi - lo] = initial values of group rows [lo, hi), in place.  Releases the GIL (uniform tables)."""
        for t in range(len(self._inits)):
            first, last = max(lo, int(self._bases[t])), min(hi, int(self._bases[t + 1]))
            if first >= last:
                continue
            base = int(self._bases[t])
            if self._inits[t] is None:
                target = out[first - lo : last - lo]
                _fill_range(target, first - base, last - base, self._tables[t], *self._key, self._scales[t])
                continue
            for begin in range(first, last, _BLOCK_ROWS):
                end = min(begin + _BLOCK_ROWS, last)
                out[begin - lo : end - lo] = self._call(t, np.arange(begin - base, end - base, dtype=np.int64))

    def for_device(self) -> dict[str, np.ndarray]:
        """What a device's fill kernel needs (cuda/fill.cu): bases int64 [T+1]; kinds int32 [T], 0 uniform, 1 normal,
        -1 a callable that only the host can ask; numbers int32 [T], keys uint32 [2 T], scales float32 [T]."""
        from .normal import Normal

        kinds = [0 if init is None else 1 if isinstance(init, Normal) else -1 for init in self._inits]
        low, high = (int(part) for part in self._key)
        numbers, keys = self._tables.copy(), []
        for t, init in enumerate(self._inits):
            seed = init.seed if isinstance(init, Normal) else (high << 32) | low
            keys += [seed & 0xFFFFFFFF, seed >> 32]
            numbers[t] = init.table if isinstance(init, Normal) else numbers[t]
        return {"bases": self._bases, "kinds": np.array(kinds, np.int32), "numbers": numbers.astype(np.int32),
                "keys": np.array(keys, np.uint32), "scales": self._scales}  # fmt: skip

    def _call(self, t: int, rows: np.ndarray) -> np.ndarray:
        """Values of rows of table t by the user's callable, checked."""
        init = self._inits[t]
        assert init is not None
        values = np.asarray(init(rows, self.dim))
        wanted = (len(rows), self.dim)
        if values.shape != wanted or values.dtype != np.float32:
            raise ConfigError(
                f"table {self._names[t]!r}: init returned {values.dtype} {list(values.shape)} for {len(rows)} rows; "
                f"return float32 {list(wanted)}."
            )
        if not np.isfinite(values).all():
            k, column = np.argwhere(~np.isfinite(values))[0].tolist()
            raise ConfigError(
                f"table {self._names[t]!r}: init returned {values[k, column]} for row {int(rows[k])}, column {column}; "
                "return finite values."
            )
        return values
