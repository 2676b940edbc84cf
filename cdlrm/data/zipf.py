"""numba kernels of the synthetic generator: every value is a function of (seed, row of the data set, column) alone.

A word of randomness is `mix64(key of the column ^ row)`, so any row can be made without the rows before it. Ranks
follow a bounded power law by inverting its continuous distribution function (G(x) = (x^(1-a) - 1) / ((n+1)^(1-a) - 1)
for 1 <= x < n+1, rank = floor(x) - 1), which needs no table and is a Zipf law up to the rounding of the first few
ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from cdlrm.data.hashing import mix64

__all__ = ["draw_dense", "draw_labels", "draw_lengths", "draw_rows", "dense_logits", "pair_logits", "row_logits"]

_UNIT = 2.0**-53
_ELEVEN = np.uint64(11)


@njit(cache=True, nogil=True, inline="always")
def _uniform(word: np.uint64) -> float:
    """[0, 1) with 53 bits."""
    return np.float64(word >> _ELEVEN) * _UNIT


@njit(cache=True, nogil=True, inline="always")
def _normal(word: np.uint64) -> float:
    """About normal, mean 0, variance 1, within +-3.5: the sum of four 16-bit uniforms (Irwin-Hall)."""
    low = np.uint64(0xFFFF)
    total = (
        np.int64(word & low)
        + np.int64((word >> np.uint64(16)) & low)
        + np.int64((word >> np.uint64(32)) & low)
        + np.int64(word >> np.uint64(48))
    )
    return (np.float64(total) / 65535.0 - 2.0) * 1.7320508075688772


@njit(cache=True, nogil=True, inline="always")
def _rank(u: float, power: float, span: float) -> float:
    """Inverse distribution function, as a float >= 1. power = 1 - exponent, span = (n+1)^power - 1 or log(n+1)."""
    if power == 0.0:
        return math.exp(u * span)
    return math.exp(math.log(1.0 + u * span) / power)


@njit(cache=True, nogil=True)
def draw_lengths(first: int, key: np.uint64, mean: float, fixed: bool, out: np.ndarray) -> None:
    """Ids a bag, int64 [R]: `mean` itself, or geometric with that mean (0 included)."""
    for i in range(len(out)):
        if fixed:
            out[i] = np.int64(mean)
        elif mean > 0:
            u = _uniform(mix64(key ^ np.uint64(first + i)))
            out[i] = np.int64(math.log(1.0 - u) / math.log(mean / (1.0 + mean)))
        else:
            out[i] = 0


@njit(cache=True, nogil=True)
def draw_rows(
    first: int,
    key: np.uint64,
    rows: int,
    power: float,
    span: float,
    missing: float,
    stride: int,
    offsets: np.ndarray,
    out: np.ndarray,
) -> None:
    """Row numbers int64 [L] of samples first, first+1, …; offsets int64 [R+1], or empty for one id a sample.

    Popular ranks are scattered over the table by row = (rank * stride + stride // 2) mod rows, stride coprime to rows.
    """
    scatter, shift, modulus = np.uint64(stride), np.uint64(stride // 2), np.uint64(rows)
    one_hot = len(offsets) == 0
    samples = len(out) if one_hot else len(offsets) - 1
    for i in range(samples):
        word = mix64(key ^ np.uint64(first + i))
        lo = i if one_hot else offsets[i]
        hi = i + 1 if one_hot else offsets[i + 1]
        for at in range(lo, hi):
            if at > lo:
                word = mix64(word)
            u = _uniform(word)
            if u < missing:
                out[at] = 0
            else:
                if missing > 0.0:
                    u = (u - missing) / (1.0 - missing)
                rank = int(_rank(u, power, span)) - 1
                rank = rank if rank < rows else rows - 1  # rounding at u close to 1
                out[at] = np.int64((np.uint64(rank) * scatter + shift) % modulus)


@njit(cache=True, nogil=True)
def draw_dense(
    first: int, keys: np.ndarray, centre: np.ndarray, spread: np.ndarray, missing: np.ndarray, out: np.ndarray
) -> None:
    """float32 [R, n] that look like log(1 + count): max(0, centre + spread * normal), and 0 where missing."""
    for i in range(out.shape[0]):
        for d in range(out.shape[1]):
            word = mix64(keys[d] ^ np.uint64(first + i))
            if _uniform(mix64(word)) < missing[d]:
                out[i, d] = 0.0
            else:
                out[i, d] = max(0.0, centre[d] + spread[d] * _normal(word))


@njit(cache=True, nogil=True)
def dense_logits(
    dense: np.ndarray, centre: np.ndarray, spread: np.ndarray, smooth: np.ndarray, out: np.ndarray
) -> None:
    """out[i] += sum over d of +-min(|z|, 2), z the standardised feature d, less the parabola smooth[:, d] (of x and
    x^2)."""
    for i in range(dense.shape[0]):
        total = 0.0
        for d in range(dense.shape[1]):
            x = np.float64(dense[i, d])
            bend = min(abs(x - centre[d]) / spread[d], 2.0)
            total += (bend if d % 2 == 0 else -bend) - (smooth[0, d] + smooth[1, d] * x) * x
        out[i] += total


@njit(cache=True, nogil=True)
def row_logits(key: np.uint64, weight: float, values: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """out[i] += weight * the mean hidden effect of the rows in bag i (0 for an empty bag)."""
    one_hot = len(offsets) == 0
    for i in range(len(out)):
        if one_hot:
            out[i] += weight * _normal(mix64(key ^ np.uint64(values[i])))
        elif offsets[i + 1] > offsets[i]:
            total = 0.0
            for at in range(offsets[i], offsets[i + 1]):
                total += _normal(mix64(key ^ np.uint64(values[at])))
            out[i] += weight * total / (offsets[i + 1] - offsets[i])


@njit(cache=True, nogil=True)
def pair_logits(left: np.ndarray, right: np.ndarray, weight: float, out: np.ndarray) -> None:
    """out[i] += weight * left[i] * right[i]: an interaction of two features."""
    for i in range(len(out)):
        out[i] += weight * left[i] * right[i]


@njit(cache=True, nogil=True)
def draw_labels(first: int, key: np.uint64, logits: np.ndarray, bias: float, out: np.ndarray) -> None:
    """float32 [R]: 1 with probability sigmoid(logits + bias)."""
    for i in range(len(out)):
        chance = 1.0 / (1.0 + math.exp(-(logits[i] + bias)))
        out[i] = 1.0 if _uniform(mix64(key ^ np.uint64(first + i))) < chance else 0.0
