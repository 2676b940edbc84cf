"""Columns of samples in memory, between a file's block and the batches cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cdlrm.data.batch import Batch, Jagged

__all__ = ["Column", "Columns"]


@dataclass(frozen=True)
class Column:
    """One categorical feature: values int64 [L], offsets int64 [R+1] from offsets[0] on, or None for one id a row."""

    values: np.ndarray
    offsets: np.ndarray | None = None

    def slice(self, lo: int, hi: int) -> Column:
        if self.offsets is None:
            return Column(self.values[lo:hi])
        offsets = self.offsets[lo : hi + 1]
        return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: np.ndarray) -> Column:
        if self.offsets is None:
            return Column(self.values[rows])
        lengths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Position p of the output lies in bag b = its row and comes from starts[b] + (p - offsets[b]).
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Column(self.values[source], offsets)

    @staticmethod
    def concat(parts: Sequence[Column]) -> Column:
        values = np.concatenate([part.values for part in parts])
        if all(part.offsets is None for part in parts):
            return Column(values)
        lengths = [np.ones(len(p.values), np.int64) if p.offsets is None else np.diff(p.offsets) for p in parts]
        joined = np.concatenate(lengths)
        offsets = np.zeros(len(joined) + 1, np.int64)
        np.cumsum(joined, out=offsets[1:])
        return Column(values, offsets)


@dataclass(frozen=True)
class Columns:
    """R samples. dense: float32 [R, n] (C order), labels: float32 [R], sparse: one `Column` a feature."""

    dense: np.ndarray
    labels: np.ndarray
    sparse: list[Column]

    @property
    def rows(self) -> int:
        return len(self.labels)

    def slice(self, lo: int, hi: int) -> Columns:
        """Rows lo..hi-1 as views."""
        return Columns(self.dense[lo:hi], self.labels[lo:hi], [c.slice(lo, hi) for c in self.sparse])

    def take(self, rows: np.ndarray) -> Columns:
        """Copies of the given rows, in that order."""
        return Columns(self.dense[rows], self.labels[rows], [c.take(rows) for c in self.sparse])

    @staticmethod
    def concat(parts: Sequence[Columns]) -> Columns:
        if len(parts) == 1:
            return parts[0]
        return Columns(
            np.concatenate([p.dense for p in parts]),
            np.concatenate([p.labels for p in parts]),
            [Column.concat([p.sparse[f] for p in parts]) for f in range(len(parts[0].sparse))],
        )

    def to_batch(self, features: Sequence[str], index: int) -> Batch:
        sparse = {
            name: Jagged(torch.from_numpy(c.values), None if c.offsets is None else torch.from_numpy(c.offsets))
            for name, c in zip(features, self.sparse, strict=True)
        }
        return Batch(torch.from_numpy(self.dense), torch.from_numpy(self.labels), sparse, index)
