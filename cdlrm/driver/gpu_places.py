"""`Places`: the device memory of a group's records, and how it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DeviceMemoryError
from .backend import DeviceBuffer
from .gpu_order import Order


class Places:
    """`weight` float32 [rows, dim] and `state` float32 [rows, state_width].  `things` of a `Held` keep them."""

    def __init__(self, order: Order, dim: int, state_width: int, things: dict[str, Any]) -> None:
        self.order, self.backend, self.things = order, order.backend, things
        self.dim, self.state_width = dim, state_width
        self.rows = 0
        self.weight = self.state = self.backend.alloc(0)

    def addresses(self) -> dict[str, int]:
        """Where they are, with strides in floats, for a kernel."""
        return {"weight": self.weight.address, "weight_stride": self.dim, "state": self.state.address,
                "state_stride": max(self.state_width, 1)}  # fmt: skip

    def resize(self, rows: int, spans: Sequence[tuple[int, int, int]]) -> None:
        """As `Records.resize`.  Waits for the device: nothing may use the memory that is left."""
        backend, stream = self.backend, self.order.transfer
        if self.rows and not spans:
            self._replace(rows)
            return
        weight, state = self._alloc(rows)
        backend.wait(stream, self.order.computed())
        for to, start, count in spans:
            for new, old, width in ((weight, self.weight, self.dim), (state, self.state, self.state_width)):
                size = 4 * width
                if count and width:
                    backend.copy(new.address + to * size, old.address + start * size, count * size, "d2d", stream)
        backend.synchronize(self.order.moved(), "growth")
        self.rows, self.weight, self.state = rows, weight, state
        self.things["records"] = weight, state

    def _alloc(self, rows: int) -> tuple[DeviceBuffer, DeviceBuffer]:
        return self.backend.alloc(4 * rows * self.dim), self.backend.alloc(4 * rows * self.state_width)

    def _replace(self, rows: int) -> None:
        """`rows` places where nothing is kept of the old ones: their memory is given back first."""
        backend, transfer, before = self.backend, self.order.transfer, self.rows
        backend.wait(transfer, self.order.computed())
        backend.synchronize(backend.record(transfer), "growth")
        self.things.pop("records", None)
        self.weight = self.state = backend.alloc(0)
        try:
            self.weight, self.state = self._alloc(rows)
        except DeviceMemoryError:
            self.weight, self.state = self._alloc(before)
            raise
        finally:
            self.things["records"] = self.weight, self.state
            # torch may have freed this memory a moment ago, with work on it still to come on its own stream
            backend.wait(transfer, backend.record(backend.compute_stream()))
        self.rows = rows
