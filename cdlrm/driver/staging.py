"""What travels to a GPU with a plan: one piece of pinned memory, one copy, and where each array lies on the device.

A `Slot` is a pinned buffer and a device buffer of one layout.  The slots of a group form a ring: a slot is used
again only after the event that its batch ended with, so that the host never runs further ahead of the device than
the ring is long.
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


class Slot:
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
    """The slots of one group."""

    backend: Backend
    transfer: Stream
    limit: int = 3  # slots; more exist only while more are in use at once
    slots: list[Slot] = field(default_factory=list)
    free: deque[Slot] = field(default_factory=deque)
    lock: Any = field(default_factory=threading.Lock)

    def take(self, layout: Layout) -> Slot:
        """A slot that nobody uses, large enough; its arrays are in the pinned memory, not yet on the device."""
        with self.lock:
            fresh = not self.free or (len(self.slots) < self.limit and self.free[0].event is not None)
            slot = Slot() if fresh else self.free.popleft()
            if fresh:
                self.slots.append(slot)
        self.settle(slot)
        backend = self.backend
        if slot.pinned is None or slot.pinned.array.nbytes < layout.nbytes:
            size = max(LEAST_BYTES, layout.nbytes + layout.nbytes // 4)
            slot.pinned = slot.device = None
            slot.pinned, slot.device = backend.pinned(size), backend.alloc(size)
            # torch may have freed this memory a moment ago, with work on it still to come on its own stream
            backend.wait(self.transfer, backend.record(backend.compute_stream()))
        assert slot.pinned is not None
        backend.host_reuse(slot.pinned.address, slot.pinned.array.nbytes)
        backend.host_writes(slot.pinned.address, layout.uploaded)
        slot.layout = layout
        for offset, array, dtype in layout.arrays:
            nbytes = array.size * dtype.itemsize
            slot.pinned.array[offset : offset + nbytes].view(dtype)[:] = array.reshape(-1)
        return slot

    def settle(self, slot: Slot) -> None:
        """Until the slot is not in use by the device any more."""
        event, slot.event = slot.event, None
        if event is not None and not self.backend.is_done(event):
            self.backend.synchronize(event, "ring")
        self.land(slot)

    def land(self, slot: Slot) -> None:
        landing, slot.landing = slot.landing, None
        if landing is not None:
            landing()

    def upload(self, slot: Slot, stream: Stream) -> None:
        """The one copy to the device."""
        assert slot.pinned is not None and slot.device is not None
        if slot.layout.uploaded:
            self.backend.copy(slot.device.address, slot.pinned.address, slot.layout.uploaded, "h2d", stream)

    def give_back(self, slot: Slot, event: Event) -> None:
        """The slot may be used again after `event`."""
        slot.event = event
        with self.lock:
            self.free.append(slot)

    def land_all(self) -> None:
        """Take out of every slot what the host must still take."""
        for slot in list(self.slots):
            self.land(slot)

    def close(self) -> None:
        """Wait for all that is in use, and free it."""
        for slot in self.slots:
            self.settle(slot)
        self.slots, self.free = [], deque()
