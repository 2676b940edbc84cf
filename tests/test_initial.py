"""Initial values: Philox known answers, an independent NumPy generator, callables, tables mixed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cdlrm.errors import ConfigError
from cdlrm.initial import Initializer, philox


def reference_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, from the paper's description."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def reference_row(seed: int, table: int, row: int, dim: int, rows: int) -> np.ndarray:
    scale = np.float32(math.sqrt(1.0 / rows) * 2.0**-23)
    out = np.empty(dim, np.float32)
    for c in range(dim):
        counter = [c // 4, row % 2**32, row >> 32, table]
        x = reference_words(counter, [seed % 2**32, seed >> 32])[c % 4]
        out[c] = np.float32((x >> 8) - 2**23) * scale
    return out


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        (0xFFFFFFFF, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
    ],
)
def test_known_answers_of_random123(word: int, expected: list[str]) -> None:
    assert [f"{int(x):08x}" for x in philox(*[np.uint64(word)] * 6)] == expected
    assert [f"{x:08x}" for x in reference_words([word] * 4, [word] * 2)] == expected


@pytest.mark.parametrize("dim", [1, 3, 4, 17, 64])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_rows_equal_the_reference_bit_for_bit(dim: int, seed: int) -> None:
    bases = np.array([0, 5, 5, 12, 2**33 + 12])
    initializer = Initializer(bases, [None] * 4, seed, dim, [3, 0, 2, 9])
    asked = np.array([11, 0, 4, 5, 12, 2**33 + 11, 2**32 + 50])
    where = np.array([6, 0, 5, 1, 4, 2, 3], np.int32)
    out = np.full((8, dim), np.nan, np.float32)
    initializer.rows(out, where, asked)
    for target, row in zip(where, asked, strict=True):
        t = int(np.searchsorted(bases, row, side="right")) - 1
        number = [3, 0, 2, 9][t]
        expected = reference_row(seed, number, int(row - bases[t]), dim, int(bases[t + 1] - bases[t]))
        assert out[target].tobytes() == expected.tobytes()
    assert np.isnan(out[7]).all()
    plain = np.empty((7, dim), np.float32)
    initializer.rows(plain, None, asked)
    assert plain.tobytes() == out[where].tobytes()


def test_ranges_equal_rows_and_stay_inside_the_bound() -> None:
    bases = np.array([0, 100, 100, 400])

    def steps(rows: np.ndarray, dim: int) -> np.ndarray:
        return np.repeat(rows[:, None], dim, axis=1).astype(np.float32)

    initializer = Initializer(bases, [None, None, steps], 1, 5, [0, 1, 2])
    whole, single, part = (np.empty((n, 5), np.float32) for n in (400, 400, 150))
    initializer.fill(whole, 0, 400)
    initializer.rows(single, None, np.arange(400))
    initializer.fill(part, 50, 200)
    assert whole.tobytes() == single.tobytes()
    assert part.tobytes() == whole[50:200].tobytes()
    assert (np.abs(whole[:100]) <= math.sqrt(1 / 100)).all() and np.abs(whole[:100]).max() > 0.099
    assert (whole[100:, 0] == np.arange(300)).all()
    initializer.rows(single, None, np.empty(0, np.int64))


def test_values_look_uniform() -> None:
    out = np.empty((4096, 16), np.float32)
    Initializer(np.array([0, 4096]), [None], 5, 16, [0]).fill(out, 0, 4096)
    unit = out / math.sqrt(1 / 4096)
    assert abs(unit.mean()) < 0.01 and abs(unit.var() - 1 / 3) < 0.005
    assert len(np.unique(out)) > 0.99 * out.size


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda rows, dim: np.zeros((len(rows), dim + 1), np.float32), r"table 'ads': init returned float32 \[3, 5\]"),
        (lambda rows, dim: np.zeros((len(rows), dim)), r"float64 \[3, 4\] for 3 rows; return float32 \[3, 4\]"),
        (lambda rows, dim: np.full((len(rows), dim), np.nan, np.float32), r"returned nan for row 1, column 0"),
    ],
)
def test_callables_are_checked(init, message: str) -> None:
    initializer = Initializer(np.array([0, 10]), [init], 0, 4, [0], ["ads"])
    with pytest.raises(ConfigError, match=message):
        initializer.rows(np.empty((3, 4), np.float32), None, np.array([1, 2, 3]))


def test_a_callable_may_return_a_tensor() -> None:
    initializer = Initializer(np.array([0, 10]), [lambda rows, dim: torch.ones(len(rows), dim)], 0, 4, [0])
    out = np.empty((3, 4), np.float32)
    initializer.rows(out, None, np.array([1, 2, 3]))
    assert (out == 1).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, True, "x"])
def test_wrong_seeds_are_refused(seed) -> None:
    with pytest.raises(ConfigError, match=r"within \[0, 2"):
        Initializer(np.array([0, 1]), [None], seed, 4, [0])
