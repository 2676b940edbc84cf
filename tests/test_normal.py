"""Initial values N(0, 1) as a function of (seed, table, row, column): right values, right distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from oracle import philox4x32

import cdlrm
from cdlrm.normal import Normal, _log, quantile


def test_the_quantile_is_the_inverse_of_the_distribution() -> None:
    exact = NormalDist().inv_cdf
    grid = [0.5, 0.075, 0.925, 0.0750001, 0.9249999, 0.3, 0.425, 1e-3, 1e-10, 1e-12, 2.0**-53, 1 - 2.0**-53, 1e-16]
    for p in [*grid, *np.random.default_rng(0).random(2000).tolist()]:
        assert quantile(p) == pytest.approx(exact(p), rel=1e-13, abs=1e-15), p


def test_the_logarithm() -> None:
    for x in [1.0, 0.5, 2.0**-53, 0.7071, 0.70711, 1e-300, *np.random.default_rng(1).random(1000).tolist()]:
        assert _log(x) == pytest.approx(math.log(x), rel=2e-15, abs=1e-15)


def reference(seed: int, table: int, rows: np.ndarray, dim: int) -> np.ndarray:
    """From the text of `Normal` alone, by the oracle's Philox and Python's quantile."""
    pairs = np.arange((dim + 1) // 2, dtype=np.uint64)[None, :]
    r = rows.astype(np.uint64)[:, None]
    pairs, r = np.broadcast_arrays(pairs, r)
    words = philox4x32([pairs, r & np.uint64(2**32 - 1), r >> np.uint64(32), np.full(r.shape, table, np.uint64)],
                       (seed & 0xFFFFFFFF, seed >> 32))  # fmt: skip
    out = np.empty((len(rows), 2 * pairs.shape[1]))
    for half in range(2):
        bits = (words[2 * half] << np.uint64(20)) | (words[2 * half + 1] >> np.uint64(12))
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
        out[:, half::2] = np.vectorize(NormalDist().inv_cdf)(uniform)
    return out[:, :dim]


@pytest.mark.parametrize(("seed", "table", "dim"), [(0, 0, 4), (7, 2, 3), (2**40 + 5, 0, 1)])
def test_values_follow_the_specification(seed: int, table: int, dim: int) -> None:
    rows = np.array([0, 1, 5, 2**33 + 1, 2**32 - 1], np.int64)
    mine = Normal(seed, table)(rows, dim)
    assert mine.dtype == np.float32 and mine.shape == (5, dim)
    np.testing.assert_allclose(mine, reference(seed, table, rows, dim), rtol=2e-7, atol=0)


def test_values_depend_on_seed_table_row_and_column_alone() -> None:
    rows = np.arange(50)
    whole = Normal(3)(rows, 6)
    assert np.array_equal(Normal(3)(rows[::-1].copy(), 6)[::-1], whole)
    assert np.array_equal(Normal(3)(rows[7:9], 6), whole[7:9])
    assert np.array_equal(Normal(3)(rows, 3), whole[:, :3])
    for other in (Normal(4), Normal(3, 1), Normal(3 + 2**32)):
        assert (other(rows, 6) != whole).all()
    assert len(np.unique(whole)) == whole.size


def test_the_distribution() -> None:
    values = Normal(11)(np.arange(20000), 8).astype(np.float64).reshape(-1)
    n = values.size
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    ordered = np.sort(values)  # Kolmogorov and Smirnov
    cdf = np.vectorize(NormalDist().cdf)(ordered[::16])
    assert np.abs(cdf - np.arange(0, n, 16) / n).max() < 1.95 / math.sqrt(n)
    table = values.reshape(-1, 8)
    assert np.abs(np.corrcoef(table.T) - np.eye(8)).max() < 5 / math.sqrt(len(table))


@pytest.mark.parametrize("cache_rows", ["auto", 6])
def test_rows_start_the_same_in_every_cache(cache_rows: int | str) -> None:
    module = cdlrm.Embedding(20, 5, seed=9, cache_rows=cache_rows)
    assert np.array_equal(module.weight.numpy(), Normal(9)(np.arange(20), 5))
