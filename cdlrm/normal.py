"""`Normal`: initial values from N(0, 1) as a function of (seed, table, row, column) alone.

A Philox word pair gives a 52-bit uniform number; its normal quantile is computed in float64 with
additions, multiplications, divisions and square roots only (each correctly rounded on every device,
no library function), and rounded once to float32.  So every device can produce the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np

from .initial import philox

_jit = nb.njit(nogil=True, cache=True, error_model="numpy")

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476

# Wichura 1988, "Algorithm AS 241: The percentage points of the normal distribution", PPND16:
# numerator and denominator, highest power first, of the centre, the tails and the far tails.
_CENTRE_N = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
             13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080)  # fmt: skip
_CENTRE_D = (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
             5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0)  # fmt: skip
_TAIL_N = (7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
           3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734)  # fmt: skip
_TAIL_D = (1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
           0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0)  # fmt: skip
_FAR_N = (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.00124266094738807843860, 0.0265321895265761230930,
          0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720)  # fmt: skip
_FAR_D = (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
          0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0)  # fmt: skip


@_jit
def _horner(coefficients, x):
    y = coefficients[0]
    for i in range(1, len(coefficients)):
        y = y * x + coefficients[i]
    return y


@_jit
def _log(x):
    """Natural logarithm of x in (0, 1] by its exponent and an atanh series (relative error about 1e-16)."""
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m *= 2.0
        e -= 1
    z = (m - 1.0) / (m + 1.0)
    z2 = z * z
    series = 0.0
    for k in range(12, -1, -1):
        series = series * z2 + 1.0 / (2 * k + 1)
    return e * LN2 + 2.0 * z * series


@_jit
def quantile(p):
    """Normal quantile of p in (0, 1), float64."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _horner(_CENTRE_N, r) / _horner(_CENTRE_D, r)
    r = math.sqrt(-_log(p if q < 0.0 else 1.0 - p))
    if r <= 5.0:
        value = _horner(_TAIL_N, r - 1.6) / _horner(_TAIL_D, r - 1.6)
    else:
        value = _horner(_FAR_N, r - 5.0) / _horner(_FAR_D, r - 5.0)
    return -value if q < 0.0 else value


@_jit
def _fill(out, rows, table, key0, key1):
    for k in range(out.shape[0]):
        r = np.uint64(rows[k])
        for pair in range((out.shape[1] + 1) // 2):
            words = philox(np.uint64(pair), r & np.uint64(0xFFFFFFFF), r >> np.uint64(32), np.uint64(table), key0, key1)
            for half in range(2):
                column = 2 * pair + half
                if column < out.shape[1]:
                    high, low = np.uint64(words[2 * half]), np.uint64(words[2 * half + 1])
                    bits = (high << np.uint64(20)) | (low >> np.uint64(12))  # 52 of them, so that + 0.5 is exact
                    out[k, column] = np.float32(quantile((np.float64(bits) + 0.5) * 2.0**-52))


@dataclass(frozen=True)
class Normal:
    """A table's `init`: `Normal(seed, table)(rows int64 [K], dim) -> float32 [K, dim]` from N(0, 1)."""

    seed: int = 0
    table: int = 0

    def __call__(self, rows: np.ndarray, dim: int) -> np.ndarray:
        out = np.empty((len(rows), dim), np.float32)
        _fill(out, rows, self.table, np.uint64(self.seed & 0xFFFFFFFF), np.uint64(self.seed >> 32))
        return out
