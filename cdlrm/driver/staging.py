"""What travels to a GPU with a plan: one piece of pinned memory, one copy, and where each array lies on the device.

A `Tray` is a pinned buffer and a device buffer of one layout.  The trays of a group form a ring: a tray is used
again only after the event that its batch ended with, so that the host never runs further ahead of the device than
the ring is long.

What does not fit its tray gets a larger one, a quarter larger than is needed.  Pinning memory, and giving it back, can
wait for all that the device has to do, so each time is counted as a wait, of reason "trays".  It is rare: a tray is
made once, and grows at most log(most bytes / first bytes) / log(1.25) times.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .backend import Backend, DeviceBuffer, Event, PinnedBuffer, Stream

ALIGNMENT = 256  # bytes; rows of staged records begin at multiples of 16
LEAST_BYTES = 1 << 14


class Layout:
    """Where named arrays lie in a buffer: first those that are uploaded, then room that kernels write."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.arrays: list[tuple[int, np.ndarray, np.dtype]] = []
        self.uploaded = self.nbytes = 0

    def add(self, name: str, array: np.ndarray, dtype: Any) -> None:
        """An array that is uploaded, as `dtype`."""
        offset = self._place(name, int(array.size) * np.dtype(dtype).itemsize)
        self.arrays.append((offset, array, np.dtype(dtype)))
        self.uploaded = self.nbytes

    def add_room(self, name: str, nbytes: int, uploaded: bool) -> None:
        """`nbytes` that somebody else writes: the host before the upload, or the device.  `uploaded` room comes
        before room that is not."""
        self._place(name, nbytes)
        if uploaded:
            self.uploaded = self.nbytes

    def _place(self, name: str, nbytes: int) -> int:
        self.offsets[name] = offset = self.nbytes
        self.nbytes = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        return offset


class Tray:
    """One place of the ring; see `Ring.take`."""

    def __init__(self) -> None:
        self.pinned: PinnedBuffer | None = None
        self.device: DeviceBuffer | None = None
        self.layout = Layout()
        self.event: Event = None  # after which it may be used again
        self.landing: Callable[[], None] | None = None  # what the host must still take out of it
        self.verdict = 0  # the newest that was asked for when its batch ended
        self.ready: Event = None  # the upload and the moves of its plan are done

    def at(self, name: str) -> int:
        """Device address of an array; 0 if it was not added."""
        offset = self.layout.offsets.get(name)
        return 0 if offset is None else self.device.address + offset  # type: ignore[union-attr]

    def host_at(self, name: str) -> int:
        """Address of its pinned twin."""
        return self.pinned.address + self.layout.offsets[name]  # type: ignore[union-attr]

    def view(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The pinned twin as an array."""
        count = int(np.prod(shape, dtype=np.int64))
        offset = self.layout.offsets[name]
        nbytes = count * np.dtype(dtype).itemsize
        return self.pinned.array[offset : offset + nbytes].view(dtype).reshape(shape)  # type: ignore[union-attr]


@dataclass
class Ring:
    """The trays of one group."""

    backend: Backend
    transfer: Stream
    limit: int = 3  # trays; more exist only while more are in use at once
    trays: list[Tray] = field(default_factory=list)
    free: deque[Tray] = field(default_factory=deque)
    lock: Any = field(default_factory=threading.Lock)

    def take(self, layout: Layout) -> Tray:
        """A tray that nobody uses, large enough; its arrays are in the pinned memory, not yet on the device."""
        with self.lock:
            fresh = not self.free or (len(self.trays) < self.limit and self.free[0].event is not None)
            tray = Tray() if fresh else self.free.popleft()
            if fresh:
                self.trays.append(tray)
        self.settle(tray)
        backend = self.backend
        if tray.pinned is None or tray.pinned.array.nbytes < layout.nbytes:
            size = max(LEAST_BYTES, layout.nbytes + layout.nbytes // 4)
            backend.traffic.synchronizations["trays"] += 1
            tray.pinned = tray.device = None
            tray.pinned, tray.device = backend.pinned(size), backend.alloc(size)
            # torch may have freed this memory a moment ago, with work on it still to come on its own stream
            backend.wait(self.transfer, backend.record(backend.compute_stream()))
        assert tray.pinned is not None
        backend.host_reuse(tray.pinned.address, tray.pinned.array.nbytes)
        backend.host_writes(tray.pinned.address, layout.uploaded)
        tray.layout = layout
        for offset, array, dtype in layout.arrays:
            nbytes = array.size * dtype.itemsize
            tray.pinned.array[offset : offset + nbytes].view(dtype)[:] = array.reshape(-1)
        return tray

    def settle(self, tray: Tray) -> None:
        """Until the tray is not in use by the device any more."""
        event, tray.event = tray.event, None
        if event is not None and not self.backend.is_done(event):
            self.backend.synchronize(event, "ring")
        self.land(tray)

    def land(self, tray: Tray) -> None:
        landing, tray.landing = tray.landing, None
        if landing is not None:
            landing()

    def upload(self, tray: Tray, stream: Stream) -> None:
        """The one copy to the device."""
        assert tray.pinned is not None and tray.device is not None
        if tray.layout.uploaded:
            self.backend.copy(tray.device.address, tray.pinned.address, tray.layout.uploaded, "h2d", stream)

    def give_back(self, tray: Tray, event: Event) -> None:
        """The tray may be used again after `event`."""
        tray.event = event
        with self.lock:
            self.free.append(tray)

    def land_all(self) -> None:
        """Take out of every tray what the host must still take."""
        for tray in list(self.trays):
            self.land(tray)

    def close(self) -> None:
        """Wait for all that is in use, and free it."""
        for tray in self.trays:
            self.settle(tray)
        self.trays, self.free = [], deque()
