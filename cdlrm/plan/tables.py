"""Which table the rows of a group belong to."""

from __future__ import annotations

import numpy as np

from .kernels import U, jit


@jit
def tables_of(rows, bases, table, counts):
    """Table of each group row (`bases int64 [T+1]`): into `table int32 [n]`, unless it is empty, and
    counted in `counts int64 [T]`.  Rows mostly come table after table, so the last one is tried first."""
    t = 0
    keep = table.size == rows.size
    for i in range(rows.size):
        r = rows[U(i)]
        if r < bases[t] or r >= bases[t + 1]:
            t = np.searchsorted(bases, r, side="right") - 1
        counts[t] += 1
        if keep:
            table[i] = t
