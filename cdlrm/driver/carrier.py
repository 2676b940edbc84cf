"""How records travel between a store and a GPU: zero copy, or through staging.

Zero copy: the store's arrays are pinned and the kernels read and write them in place.  Staged: the host
gathers records into the tray that carries the plan (see `staging`), one copy brings both, and a kernel scatters
them; the reverse for evicts, which *land* in the store once the copy is done, at the latest when their row
is needed again or the tray is.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DeviceError
from ..store import bits
from ..store.ram import RamStore
from .backend import Backend, Stream
from .pinned import PinBar
from .staging import Layout, Ring, Tray

if TYPE_CHECKING:
    from ..store import Store

log = logging.getLogger("cdlrm")


class ZeroCopy:
    """Kernels reach the store's arrays.  Raises PinError where they cannot be pinned.

    `progress`: show how far pinning is, if it takes seconds.  `sentence`: what was pinned and how fast.
    """

    def __init__(self, backend: Backend, store: RamStore, transfer: Stream, progress: bool = True) -> None:
        self.backend, self.store = backend, store
        self._arrays = store.memory()
        self._addresses: list[int] = []
        nbytes, started = sum(array.nbytes for array in self._arrays), time.perf_counter()
        try:
            with PinBar(nbytes, progress) as bar:
                for array in self._arrays:
                    self._addresses.append(backend.register(array, bar.told))
                    bar.next()
        except BaseException:
            for array, _ in zip(self._arrays, self._addresses, strict=False):
                backend.unregister(array)
            raise
        # Memory must not be freed while it is pinned, also when a module is dropped without `close`.
        self._release = weakref.finalize(self, _unpin, backend, transfer, self._arrays)
        seconds = max(time.perf_counter() - started, 1e-9)
        self.sentence = (
            f"tables: {nbytes / 2**30:.2f} GiB of host memory were pinned in {seconds:.1f} s, "
            f"{nbytes / 1e9 / seconds:.1f} GB/s."
        )
        self.weight = self._addresses[0]
        self.state = self._addresses[-1] + (4 * store.dim if len(self._arrays) == 1 else 0)

    def fill_room(self, layout: Layout, count: int) -> None:
        """Nothing travels with the plan."""

    evict_room = fill_room

    def gather(self, tray: Tray, rows: np.ndarray) -> None:
        """The kernel reads the rows itself; those that only the host can make are made in their own places."""
        fresh = rows[bits.positions(self.store.trained, rows)[1]]
        if fresh.size:
            for array, address in zip(self._arrays, self._addresses, strict=True):
                size = 4 * array.shape[1]
                for row in fresh.tolist() if size else ():
                    self.backend.host_writes(address + row * size, size)
            self.store.initializer.rows(self.store.weight, fresh, fresh)
            self.store.state[fresh] = self.store.initial_state

    def home(self, tray: Tray, what: str) -> dict[str, int]:
        """Addresses and strides (in floats) of the records' home for a kernel; `what`: fill or evict."""
        strides = [max(self.store.weight.strides[0] // 4, 1), max(self.store.state.strides[0] // 4, 1)]
        return {"home_weight": self.weight, "home_weight_stride": strides[0], "home_state": self.state,
                "home_state_stride": strides[1], "staged": 0}  # fmt: skip

    def bring_home(self, tray: Tray, rows: np.ndarray, stream: object) -> None:
        """An evict of `rows` was launched."""
        self.store.mark(rows)

    def before_read(self, rows: np.ndarray) -> None:
        """The stream orders a fill after an earlier evict of its row."""

    def close(self) -> None:
        self._release()


def _unpin(backend: Backend, transfer: Stream, arrays: list[np.ndarray]) -> None:
    """Once nothing that was issued needs them: an evaluation reads rows on torch's current stream."""
    try:
        for stream in (backend.compute_stream(), transfer):
            backend.synchronize(backend.record(stream), "close")
        for array in arrays:
            backend.unregister(array)
    except DeviceError as error:  # a lost device; the process gives the memory back
        log.debug("%s", error)


class Staged:
    """Records pass through the trays of `ring`."""

    def __init__(self, backend: Backend, store: Store, ring: Ring) -> None:
        self.backend, self.store, self.ring = backend, store, ring
        self._away: dict[int, np.ndarray] = {}  # rows that are in a tray, not in the store yet, by tray

    def fill_room(self, layout: Layout, count: int) -> None:
        layout.add_room("fill_weight", 4 * count * self.store.dim, uploaded=True)
        layout.add_room("fill_state", 4 * count * self.store.state_width, uploaded=True)

    def evict_room(self, layout: Layout, count: int) -> None:
        layout.add_room("evict_weight", 4 * count * self.store.dim, uploaded=False)
        layout.add_room("evict_state", 4 * count * self.store.state_width, uploaded=False)

    def gather(self, tray: Tray, rows: np.ndarray) -> None:
        weight, state = self._views(tray, "fill", rows.size)
        self.store.read(rows, weight, state, np.arange(rows.size, dtype=np.int32))

    def home(self, tray: Tray, what: str) -> dict[str, int]:
        return {"home_weight": tray.at(f"{what}_weight"), "home_weight_stride": max(self.store.dim, 1),
                "home_state": tray.at(f"{what}_state"), "home_state_stride": max(self.store.state_width, 1),
                "staged": 1}  # fmt: skip

    def bring_home(self, tray: Tray, rows: np.ndarray, stream: object) -> None:
        sizes = {"evict_weight": 4 * rows.size * self.store.dim, "evict_state": 4 * rows.size * self.store.state_width}
        for name, nbytes in sizes.items():
            if nbytes:
                self.backend.copy(tray.host_at(name), tray.at(name), nbytes, "d2h", stream)
        event = self.backend.record(stream)
        self._away[id(tray)] = rows

        def land() -> None:
            if not self.backend.is_done(event):
                self.backend.synchronize(event, "landing")
            for name, nbytes in sizes.items():
                self.backend.host_reads(tray.host_at(name), nbytes)
            weight, state = self._views(tray, "evict", rows.size)
            self.store.write(rows, weight, state, np.arange(rows.size, dtype=np.int32))
            del self._away[id(tray)]

        tray.landing = land

    def _views(self, tray: Tray, what: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        shapes = ((count, self.store.dim), (count, self.store.state_width))
        names = (f"{what}_weight", f"{what}_state")
        weight, state = (tray.view(name, shape, np.float32) for name, shape in zip(names, shapes, strict=True))
        return weight, state

    def before_read(self, rows: np.ndarray) -> None:
        """Rows that are on their way home must land before they are read again."""
        if any(np.isin(rows, away).any() for away in self._away.values()):
            self.ring.land_all()

    def close(self) -> None:
        """The ring lands what is on its way."""
