"""`CpuRecords`: the records of a group in host memory, in a cache or in the store's own arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..lookups import Lookups
from ..optim import Adam
from ..plan.tables import tables_of
from .base import Records, Update, merged_rows, merged_weights, used_tables
from .cpu import CpuDriver, stacked

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import Call
    from ..store import Store


class CpuRecords(Records):
    """`weight` float32 [C, D] and `state` float32 [C, S]."""

    def __init__(self, driver: CpuDriver, store: Store, bases: np.ndarray, in_place: bool) -> None:
        self.driver, self.store, self.bases = driver, store, bases
        self._steps = np.zeros(len(bases) - 1, np.int64)
        self.rows = 0
        if in_place:
            self.rows, self.weight, self.state = store.num_rows, store.weight, store.state  # type: ignore[attr-defined]
        else:
            self.weight, self.state = self._arrays(0)

    def _arrays(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        empty = self.driver.empty
        return empty((rows, self.store.dim), np.float32), empty((rows, self.store.state_width), np.float32)

    def resize(self, rows: int, spans: Sequence[tuple[int, int, int]]) -> None:
        weight, state = self._arrays(rows)
        for to, start, count in spans:
            weight[to : to + count] = self.weight[start : start + count]
            state[to : to + count] = self.state[start : start + count]
        self.rows, self.weight, self.state = rows, weight, state

    def write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> None:
        self.store.write(rows, self.weight, self.state, slots)

    def read(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> int:
        return self.store.read(rows, self.weight, self.state, slots)

    # --- kernels ---

    def lookup(self, slots: np.ndarray, lookups: Lookups, out: Tensor, call: Call | None = None) -> None:
        if out.dtype == torch.float32:
            self.driver.lookup(self.weight, slots, lookups, lookups.weights, out.numpy())
            return
        exact = torch.from_numpy(self.driver.empty(tuple(out.shape), np.float32))
        self.driver.lookup(self.weight, slots, lookups, lookups.weights, exact.numpy())
        rows = torch.from_numpy(lookups.out_row).to(torch.int64)
        out[rows] = exact[rows].to(out.dtype)

    def weight_grad(self, call: Call, grad: Tensor) -> Tensor:
        out = np.empty(call.lookups.rows.size, np.float32)
        scaled = self.driver.scale_mean(call.lookups, grad.numpy())
        self.driver.weight_grad(self.weight, call.slots, call.lookups, scaled, out)
        return torch.from_numpy(out)

    def take_gradient(self, call: Call, grad: Tensor, keep: bool) -> None:
        matrix = grad.numpy()
        scaled = self.driver.scale_mean(call.lookups, matrix)
        if keep and scaled is matrix:
            scaled = scaled.copy()  # autograd may use the memory again
        call.grad, call.divided = torch.from_numpy(scaled), True

    def update(self, update: Update) -> None:
        lookups = [call.lookups for call in update.calls]
        weights = merged_weights(lookups)
        segments, step_sizes = update.segments, None
        if isinstance(update.optimizer, Adam):
            assert segments.seg_row is not None
            self._steps[used_tables(lookups, self.bases)] += 1
            sizes = [update.optimizer.step_size(update.lr, max(int(t), 1)) for t in self._steps]
            step_sizes = np.array(sizes, np.float32)
            segments.seg_table = np.empty(segments.seg_slot.size, np.int32)
            tables_of(segments.seg_row, self.bases, segments.seg_table, np.zeros(len(self.bases) - 1, np.int64))
        self.driver.update(
            update.optimizer, update.lr, self.weight, self.state, segments, merged_rows(lookups), stacked(update.calls),
            weights, step_sizes,
        )  # fmt: skip

    @property
    def table_steps(self) -> np.ndarray:
        return self._steps.copy()

    def set_table_steps(self, steps: np.ndarray) -> None:
        self._steps[:] = steps
