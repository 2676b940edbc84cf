"""What the update kernels are told of an optimizer: its numbers, and the tables' counts of steps on the device."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..optim import Adam, Optimizer
from . import signatures
from .backend import Backend
from .staging import Layout, Ring, Tray

LEAST_FACTORS = 4096


class Formula:
    """The scalars of one optimizer, each rounded once to float32."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.number = signatures.OPTIMIZERS[optimizer.name]

    def values(self, optimizer: Optimizer, lr: float) -> dict[str, Any]:
        betas = optimizer.betas if isinstance(optimizer, Adam) else (1.0, 1.0)
        rates = [np.float32(1.0 - beta) for beta in betas]
        return {"lr": np.float32(lr), "decay": np.float32(optimizer.weight_decay),
                "eps": np.float32(getattr(optimizer, "eps", 0.0)), "rate1": rates[0], "rate2": rates[1],
                "lr64": float(lr)}  # fmt: skip


@functools.lru_cache(8)
def _factors(betas: tuple[float, float], count: int) -> np.ndarray:
    """What turns a learning rate into Adam's step size of steps 1 … count - 1, float64 [count]."""
    adam = Adam(lr=1.0, betas=betas)
    return np.array([math.nan, *(adam.step_size(1.0, t) for t in range(1, count))])


class StepCounts:
    """How often each table was updated, int64 [T] on the device, where a suppressed update does not count.

    Two arrays take turns: an update reads one and writes the other.  `factors[t]` float64 turns a learning rate
    into Adam's step size of step t; it is made longer before the largest count can reach its end.
    """

    def __init__(self, backend: Backend, optimizer: Optimizer, tables: int) -> None:
        assert isinstance(optimizer, Adam)
        self.backend, self.optimizer, self.tables = backend, optimizer, tables
        self.buffers = [backend.alloc(8 * tables) for _ in range(2)]
        self.newest = 0
        self.most = 0  # no table has more steps
        self.pinned = backend.pinned(8 * max(tables, 1))
        self.tray = self._outgrown = Tray()
        self._set_factors(LEAST_FACTORS)
        self.set(np.zeros(tables, np.int64))

    def _set_factors(self, count: int) -> None:
        backend, stream = self.backend, self.backend.compute_stream()
        layout = Layout()
        layout.add("factors", _factors(tuple(self.optimizer.betas), count), np.float64)
        ring = Ring(backend, stream)
        self._outgrown, self.tray = self.tray, ring.take(layout)  # work that was issued may still use the old one
        ring.upload(self.tray, stream)
        self.factors, self.count = self.tray.at("factors"), count

    def next(self, tray: Tray) -> dict[str, Any]:
        """Parameters of the next update; `tray` has each row's table and the tables in use."""
        self.most += 1
        if self.most >= self.count:
            self._set_factors(2 * self.count)
        old, self.newest = self.newest, 1 - self.newest
        return {"seg_table": tray.at("seg_table"), "factors": self.factors, "steps": self.buffers[old].address,
                "next_steps": self.buffers[self.newest].address, "used": tray.at("used"),
                "tables": self.tables}  # fmt: skip

    def get(self) -> np.ndarray:
        """int64 [T]; waits for the device."""
        backend, stream = self.backend, self.backend.compute_stream()
        backend.copy(self.pinned.address, self.buffers[self.newest].address, 8 * self.tables, "d2h", stream)
        backend.synchronize(backend.record(stream), "steps")
        backend.host_reads(self.pinned.address, 8 * self.tables)
        return self.pinned.array[: 8 * self.tables].view(np.int64).copy()

    def set(self, steps: np.ndarray) -> None:
        backend, stream = self.backend, self.backend.compute_stream()
        backend.synchronize(backend.record(stream), "steps")
        backend.host_writes(self.pinned.address, 8 * self.tables)
        self.pinned.array[: 8 * self.tables].view(np.int64)[:] = steps
        backend.copy(self.buffers[self.newest].address, self.pinned.address, 8 * self.tables, "h2d", stream)
        backend.synchronize(backend.record(stream), "steps")
        self.most = int(max(steps, default=0))
        while self.most + 1 >= self.count:
            self._set_factors(2 * self.count)
