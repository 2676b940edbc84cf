"""Columns of samples in memory, between a file's block and the batches cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cdlrm.data.batch import Batch, Jagged
from cdlrm.data.pool import pooled

__all__ = ["Bags", "Columns"]


@dataclass
class Bags:
    """One categorical feature with any number of ids a row: values int64 [L], offsets int64 [R+1] from 0 to L."""

    values: np.ndarray
    offsets: np.ndarray

    def take(self, rows: np.ndarray) -> Bags:
        lengths = np.diff(self.offsets)[rows]
        offsets = _offsets(lengths)
        # Position p of the output lies in some bag b and comes from starts[b] + (p - offsets[b]).
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Bags(self.values[source], offsets)


@dataclass
class Columns:
    """R samples. dense: float32 [R, n] (C order), labels: float32 [R], ids: int64 [F, R], one id a feature and row.

    bags: feature number -> `Bags` for features that have lists; their line of `ids` is unused.
    """

    dense: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    bags: dict[int, Bags] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.labels)

    def bag(self, feature: int) -> Bags:
        """Any feature as bags."""
        return self.bags.get(feature) or Bags(self.ids[feature], np.arange(self.rows + 1))

    def slice(self, lo: int, hi: int) -> Columns:
        """Rows lo..hi-1, as views but for the offsets of bags."""
        bags = {}
        if self.bags:  # all offsets at once: a few calls for each feature would cost more than the values
            offsets = np.concatenate([b.offsets[lo : hi + 1] for b in self.bags.values()]).reshape(len(self.bags), -1)
            first, last = offsets[:, 0].copy(), offsets[:, -1].tolist()
            offsets -= first[:, None]
            for (f, b), start, end, mine in zip(self.bags.items(), first.tolist(), last, offsets, strict=True):
                bags[f] = Bags(b.values[start:end], mine)
        return Columns(self.dense[lo:hi], self.labels[lo:hi], self.ids[:, lo:hi], bags)

    def take(self, rows: np.ndarray) -> Columns:
        """Copies of the given rows, in that order."""
        bags = {f: b.take(rows) for f, b in self.bags.items()}
        ids = np.empty((len(self.ids), len(rows)), np.int64)
        for f in range(len(ids)):
            if f not in bags:
                np.take(self.ids[f], rows, out=ids[f])
        return Columns(self.dense[rows], self.labels[rows], ids, bags)

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        if len(parts) == 1:
            return parts[0]
        bags = {}
        for f in sorted({f for part in parts for f in part.bags}):
            several = [part.bag(f) for part in parts]
            ends, length = [several[0].offsets], len(several[0].values)
            for b in several[1:]:
                ends.append(b.offsets[1:] + length)
                length += len(b.values)
            values, offsets = pooled((length,), np.int64), pooled((sum(map(len, ends)),), np.int64)
            np.concatenate([b.values for b in several], out=values)
            bags[f] = Bags(values, np.concatenate(ends, out=offsets))
        ids = pooled((len(parts[0].ids), sum(part.rows for part in parts)), np.int64)
        for f in range(len(ids)):
            if f not in bags:
                np.concatenate([part.ids[f] for part in parts], out=ids[f])
        return Columns(
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.labels for part in parts]),
            ids,
            bags,
        )

    def to_batch(self, features: Sequence[str], index: int) -> Batch:
        """The batch whose tensors are views of these columns."""
        import torch  # here, because converting needs none

        sparse = dict(zip(features, map(Jagged, torch.from_numpy(self.ids).unbind(0)), strict=True))
        for f, bags in self.bags.items():
            sparse[features[f]] = Jagged(torch.from_numpy(bags.values), torch.from_numpy(bags.offsets))
        return Batch(torch.from_numpy(self.dense), torch.from_numpy(self.labels), sparse, index)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
