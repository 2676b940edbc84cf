"""Synthetic click logs with a known answer: Zipf-distributed rows, dense features like log counts, labels of a hidden
model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cdlrm.data import zipf
from cdlrm.data.columns import Bags, Columns
from cdlrm.data.hashing import mix64_array
from cdlrm.data.source import Progress, Source
from cdlrm.errors import ConfigError

__all__ = ["CARDINALITIES", "CLICK_RATE", "EXPONENTS", "MISSING", "SyntheticSource"]

# Figures of 80,000 rows of the Criteo 1TB click logs (distinct ids, exponent of the bounded power law that fits their
# cumulative shares best, share of missing values; dense: median and spread of log(1+x), share missing). Measured by
# us on the sample that RecIS's examples publish; only these rounded figures are here, no data.
CARDINALITIES = [
    24777, 6440, 8356, 2567, 6273, 3, 4789, 922, 23, 21397, 9325, 13755, 9,
    1084, 3270, 48, 3, 424, 14, 26716, 16156, 23486, 7889, 5773, 38, 32,
]  # fmt: skip
EXPONENTS = [
    1.05, 0.9, 0.8, 1.45, 1.3, 3.45, 0.85, 1.05, 1.85, 1.05, 1.2, 0.95, 1.2,
    1.8, 0.95, 2.1, 1.5, 2.0, 2.05, 1.05, 1.1, 1.05, 1.15, 0.85, 2.0, 1.8,
]  # fmt: skip
MISSING = [0.04, 0, 0, 0, 0, 0, 0, 0, 0, 0.04, 0.04, 0, 0, 0.42, 0, 0.42, 0.42, 0, 0, 0.04, 0.04, 0.04, 0.42, 0, 0, 0]
DENSE_CENTRE = [2.1, 5.4, 1.6, 3.6, 1.9, 0.4, 0.1, 1.6, 1.9, 0.4, 1.1, 8.0, 1.6]
DENSE_SPREAD = [1.2, 1.6, 0.8, 1.7, 1.2, 0.7, 0.3, 2.0, 1.2, 0.4, 0.7, 2.4, 0.9]
DENSE_MISSING = [0.2, 0.1, 0.23, 0.26, 0.41, 0.07, 0.02, 0, 0, 0.07, 0.41, 0.01, 0.23]
CLICK_RATE = 0.25
"""Click rate of the generator: about that of Criteo Kaggle (0.256); the 1TB logs have 0.032, which learns more
slowly."""

_BLOCK_ROWS = 16384
_CALIBRATION_ROWS = 16384
_MOST_ROWS = 2**31
_TINY_ROWS = 100
_PAIRS = 4
_NO_OFFSETS = np.zeros(0, np.int64)
_HEAD = 20
_SHARES = (0.1, 0.85, 0.05)  # of the hidden logit's variance: dense features, rows, pairs of rows


class SyntheticSource(Source):
    """An endless-looking but finite data set of `num_rows` samples; every epoch repeats it (in another order if
    shuffled).

    cardinalities: rows of each feature's table. exponents: Zipf exponent >= 0, one or one a feature (0: uniform).
    missing: share of samples whose id is missing (row 0). lengths: ids a sample, one or one a feature; 0 gives empty
    bags, a feature with length 1 has no offsets. vary_lengths: geometric lengths with these means. num_dense: dense
    features. click_rate and strength (standard deviation of the hidden logit) shape the labels. Sizes: `num_rows`, or
    `num_batches` (default 512) of `batch_size`.

    Every value depends on (seed, row number, column) alone, so row ranges, epochs and positions are free.
    """

    format = "synthetic"

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        num_batches: int | None = None,
        num_rows: int | None = None,
        cardinalities: Sequence[int] = CARDINALITIES,
        exponents: float | Sequence[float] | None = None,
        missing: float | Sequence[float] | None = None,
        lengths: float | Sequence[float] = 1,
        vary_lengths: bool = False,
        num_dense: int = 13,
        click_rate: float = CLICK_RATE,
        strength: float = 2.0,
        seed: int = 0,
        shuffle: bool = False,
        row_range: tuple[int, int | None] | None = None,
        limit_batches: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            row_range=row_range,
            limit_batches=limit_batches,
            progress=progress,
        )
        count = len(cardinalities)
        like_sample = list(cardinalities) == CARDINALITIES
        self.table_rows = [_whole("cardinality", f, n, 1, _MOST_ROWS) for f, n in enumerate(cardinalities)]
        self.features = [f"c{f + 1}" for f in range(count)]
        self.exponents = _each(
            "exponent", EXPONENTS if like_sample and exponents is None else exponents, 1.05, count, 0, 20
        )
        self.missing = _each("missing rate", MISSING if like_sample and missing is None else missing, 0.0, count, 0, 1)
        self.lengths = _each("length", lengths, 1, count, 0, 1e6)
        self.vary_lengths = vary_lengths
        if not vary_lengths and any(length != int(length) for length in self.lengths):
            raise ConfigError(
                f"lengths are {self.lengths} where whole numbers are needed; pass vary_lengths=True for means"
            )
        self.num_dense = _whole("num_dense", None, num_dense, 0, 10**6)
        self.click_rate = _each("click rate", click_rate, CLICK_RATE, 1, 0.001, 0.999)[0]
        self.strength = _each("strength", strength, 2.0, 1, 0, 20)[0]
        if num_rows is None:
            num_rows = (512 if num_batches is None else num_batches) * batch_size
        elif num_batches is not None:
            raise ConfigError(f"num_rows={num_rows} and num_batches={num_batches} are both given; give one of them")
        self.num_rows = _whole("num_rows", None, num_rows, 0, 2**62)
        self._prepare()

    def _prepare(self) -> None:
        """Keys of the columns, parameters of the distributions, weights and bias of the hidden model."""
        count, n = len(self.table_rows), self.num_dense
        keys = mix64_array(
            mix64_array(np.array([self.seed % 2**64], np.uint64)) + np.arange(4 * count + n + 1, dtype=np.uint64)
        )
        self._row_keys, self._length_keys, self._effect_keys, self._pair_keys = (
            keys[i * count : (i + 1) * count] for i in range(4)
        )
        self._dense_keys, self._label_key = keys[4 * count : 4 * count + n], keys[-1]
        self._centre, self._spread, self._dense_missing = (
            np.resize(np.array(figures), n) for figures in (DENSE_CENTRE, DENSE_SPREAD, DENSE_MISSING)
        )
        self._power = [1.0 - a if abs(1.0 - a) > 1e-9 else 0.0 for a in self.exponents]
        self._span = [
            math.log(rows + 1.0) if p == 0.0 else (rows + 1.0) ** p - 1.0
            for rows, p in zip(self.table_rows, self._power, strict=True)
        ]
        # Rows seen often can be learned in few batches: a feature counts as much as its few most popular rows are seen.
        self._weight = [
            min(1.0, (math.log(h) if p == 0.0 else h**p - 1.0) / span) if span else 1.0
            for h, p, span in zip([_HEAD + 1.0] * count, self._power, self._span, strict=True)
        ]
        self._stride = [_coprime_stride(rows) for rows in self.table_rows]
        self._calibrate()

    def _calibrate(self) -> None:
        """Scale the parts of the hidden logit to their shares of `strength`, and find the bias of the click rate.

        A network of random weights is nearly a smooth function of the dense features and of the few rows of tiny
        tables (they start large). The hidden model avoids both, so that an untrained network scores by chance: a
        parabola is fitted to the dense part and taken away, and tables below `_TINY_ROWS` rows have no effect where
        others are there.
        """
        columns = self._draw(0, _CALIBRATION_ROWS)
        self._smooth = np.zeros((2, self.num_dense))
        dense = self._parts(columns)[0]
        x = columns.dense.astype(np.float64)
        fit = np.linalg.lstsq(np.concatenate([x, x * x, np.ones((len(x), 1))], axis=1), dense, rcond=None)[0]
        self._smooth = np.ascontiguousarray(fit[:-1].reshape(2, self.num_dense))
        parts = self._parts(columns)
        stds = [part.std() for part in parts]
        self._scales = [
            self.strength * math.sqrt(share) / std if std > 1e-12 else 0.0
            for share, std in zip(_SHARES, stds, strict=True)
        ]
        logits = sum(scale * part for scale, part in zip(self._scales, parts, strict=True))
        low, high = -60.0, 60.0
        for _ in range(60):
            bias = (low + high) / 2
            low, high = (bias, high) if (1 / (1 + np.exp(-(logits + bias)))).mean() < self.click_rate else (low, bias)
        self._bias = (low + high) / 2

    def _parts(self, columns: Columns) -> list[np.ndarray]:
        """The dense, the row and the pair part of the hidden logit, unscaled, float64 [R] each."""
        dense, rows, pairs = (np.zeros(columns.rows) for _ in range(3))
        zipf.dense_logits(columns.dense, self._centre, self._spread, self._smooth, dense)
        large = [f for f, n in enumerate(self.table_rows) if n >= _TINY_ROWS] or range(len(self.table_rows))
        for f in large:
            zipf.row_logits(self._effect_keys[f], self._weight[f], *_values(columns, f), rows)
        for left, right in zip(large[: 2 * _PAIRS : 2], large[1 : 2 * _PAIRS : 2], strict=False):
            sides = np.zeros((2, columns.rows))
            for f, side in zip((left, right), sides, strict=True):
                zipf.row_logits(self._pair_keys[f], 1.0, *_values(columns, f), side)
            zipf.pair_logits(sides[0], sides[1], 1.0, pairs)
        return [dense, rows, pairs]

    def _draw(self, first: int, rows: int) -> Columns:
        dense = np.empty((rows, self.num_dense), np.float32)
        zipf.draw_dense(first, self._dense_keys, self._centre, self._spread, self._dense_missing, dense)
        ids = np.empty((len(self.features), rows), np.int64)
        bags = {
            f: lists for f in range(len(self.features)) if (lists := self._draw_column(f, first, ids[f])) is not None
        }
        return Columns(dense, np.empty(rows, np.float32), ids, bags)

    def _draw_column(self, f: int, first: int, out: np.ndarray) -> Bags | None:
        """The ids of feature f from sample `first` on: in `out` where there is one a sample, else as bags."""
        how = (
            first,
            self._row_keys[f],
            self.table_rows[f],
            self._power[f],
            self._span[f],
            self.missing[f],
            self._stride[f],
        )
        if self.lengths[f] == 1 and not self.vary_lengths:
            zipf.draw_rows(*how, _NO_OFFSETS, out)
            return None
        lengths = np.empty(len(out), np.int64)
        zipf.draw_lengths(first, self._length_keys[f], self.lengths[f], not self.vary_lengths, lengths)
        offsets = np.zeros(len(out) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        values = np.empty(offsets[-1], np.int64)
        zipf.draw_rows(*how, offsets, values)
        return Bags(values, offsets)

    def logits(self, columns: Columns) -> np.ndarray:
        """The hidden model's logit of every sample, float64 [R]; the best any model can do."""
        return sum(
            (s * p for s, p in zip(self._scales, self._parts(columns), strict=True)), np.full(columns.rows, self._bias)
        )

    # The source.

    def num_blocks(self) -> int:
        return -(-self.num_rows // _BLOCK_ROWS)

    def block_rows(self, block: int) -> int:
        return min(_BLOCK_ROWS, self.num_rows - block * _BLOCK_ROWS)

    def read_block(self, block: int, lo: int, hi: int | None, started: Any = None) -> tuple[Columns, int]:
        first = block * _BLOCK_ROWS + lo
        columns = self._draw(first, (self.block_rows(block) if hi is None else hi) - lo)
        zipf.draw_labels(first, self._label_key, self.logits(columns), 0.0, columns.labels)
        return columns, 0

    def _known_rows(self) -> int:
        return self.num_rows

    def settings(self) -> dict[str, Any]:
        names = (
            "seed",
            "num_rows",
            "exponents",
            "missing",
            "lengths",
            "vary_lengths",
            "num_dense",
            "click_rate",
            "strength",
        )
        return {**super().settings(), **{name: getattr(self, name) for name in names}}


def _values(columns: Columns, f: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets (none where there is one id a sample) of feature f."""
    bags = columns.bags.get(f)
    return (columns.ids[f], _NO_OFFSETS) if bags is None else (bags.values, bags.offsets)


def _coprime_stride(rows: int) -> int:
    """About the golden section of `rows`, coprime to it, so that rank -> rank * stride mod rows is a bijection."""
    stride = max(1, int(rows * 0.6180339887498949))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride


def _whole(name: str, feature: int | None, value: int, low: int, high: int) -> int:
    if int(value) != value or not low <= value <= high:
        where = "" if feature is None else f" of feature {feature}"
        raise ConfigError(f"the {name}{where} is {value} where a whole number in [{low}, {high}] is needed; change it")
    return int(value)


def _each(
    name: str, value: float | Sequence[float] | None, default: float, count: int, low: float, high: float
) -> list[float]:
    value = default if value is None else value
    values = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count:
        raise ConfigError(f"{len(values)} values are given as {name} for {count} features; give one, or one a feature")
    for feature, v in enumerate(values):
        if not low <= v <= high:
            raise ConfigError(f"the {name} of feature {feature} is {v}, outside [{low}, {high}]; change it")
    return values
