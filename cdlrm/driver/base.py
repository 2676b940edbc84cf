"""The seam between the library and a device: everything above it is the same code.

A driver owns no rows and decides nothing.  It is handed arrays (`weight`: the records' weights by
cache slot, `state`: their optimizer state) and plans, and does the arithmetic of rule 9: float32,
every multiply and add rounded once, no contraction, fixed order, one owner per output.  So two
drivers, and any number of threads, give the same bits.

Shapes used below: C slots, D dim, S floats of optimizer state a row, L lookups, Q bags,
U distinct rows of the batch, R rows of the output matrix (B * width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..lookups import Lookups
from ..optim import Optimizer


@dataclass
class Segments:
    """The lookups of a batch grouped by row, for the backward pass.

    seg_slot    int32 [U]: cache slot of each distinct row.
    seg_start   int32 or int64 [U+1]: row u has the entries [seg_start[u], seg_start[u+1]) of seg_lookup.
    seg_lookup  int32 [L]: lookup numbers grouped by row, ascending inside a row.
    seg_table   int32 [U] or None: index into `step_sizes` (optimizers that count steps only).

    The order of the rows has no effect on results.
    """

    seg_slot: np.ndarray
    seg_start: np.ndarray
    seg_lookup: np.ndarray
    seg_table: np.ndarray | None = None


class Driver(ABC):
    """Allocation, copies and kernels of one device.  Calls return when the work is done."""

    name: str

    @abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Uninitialised array, at least 64-byte aligned."""

    @abstractmethod
    def lookup(
        self, weight: np.ndarray, slots: np.ndarray, call: Lookups, weights: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Pooled lookup: writes exactly the rows `call.out_row` of out (float32 [R, D]).

        weight float32 [C, D]; slots int32 (or int64) [L]; weights float32 [L] or None (per sample).
        A bag is +0.0 plus its rows in order, each `weights[l] * row` if weighted; mean bags are then
        divided by their length; an empty bag is 0.
        """

    @abstractmethod
    def scale_mean(self, call: Lookups, grad: np.ndarray) -> np.ndarray:
        """grad float32 [R, D] with mean bags divided by their length: a copy, or grad itself if nothing changes."""

    @abstractmethod
    def all_finite(self, array: np.ndarray) -> bool:
        """Whether a float32 array (any shape, C order) has neither NaN nor infinity."""

    @abstractmethod
    def weight_grad(
        self, weight: np.ndarray, slots: np.ndarray, call: Lookups, grad: np.ndarray, out: np.ndarray
    ) -> None:
        """out float32 [L] = lane sum of `grad[bag] * row` (grad as returned by scale_mean, rows before the update)."""

    @abstractmethod
    def update(
        self,
        optimizer: Optimizer,
        lr: float,
        weight: np.ndarray,
        state: np.ndarray,
        segments: Segments,
        lookup_row: np.ndarray,
        grad: np.ndarray,
        per_sample: np.ndarray | None = None,
        step_sizes: np.ndarray | None = None,
    ) -> None:
        """Sum every distinct row's gradients and apply `optimizer` to it, in place.

        weight float32 [C, D], state float32 [C, S], lookup_row int32 [L] (row of grad of each lookup,
        `Lookups.lookup_row`), grad float32 [R, D] (as returned by scale_mean), per_sample float32 [L] or None,
        step_sizes float32 [T] or None (Adam: step size of each table, indexed by segments.seg_table).
        `lr` is rounded once to float32.
        """

    @abstractmethod
    def copy_rows(
        self,
        dst: np.ndarray,
        dst_index: np.ndarray | None,
        src: np.ndarray,
        src_index: np.ndarray | None,
    ) -> None:
        """dst[dst_index[k]] = src[src_index[k]] for all k (None: k itself); float32 [., D]; dst_index is unique."""

    @abstractmethod
    def new_stamps(self, slots: int) -> np.ndarray:
        """Scratch for `build_segments` over a cache of `slots` slots; keep one per cache."""

    @abstractmethod
    def build_segments(self, slots: np.ndarray, stamps: np.ndarray, cuts: Sequence[int] = ()) -> Segments:
        """Group lookups by slot without a sort.  slots int32 (or int64) [L], all in [0, C).

        cuts: ascending lookup numbers at which no slot on the left occurs on the right (starts of tables, from
        `Lookups.feature_starts`): the work may be split there.  Rows come in order of first use.
        """

    def close(self) -> None:  # noqa: B027 - a device without resources has nothing to do
        """Release threads and memory.  May be called twice."""
