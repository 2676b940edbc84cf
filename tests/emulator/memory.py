"""Memory of the emulated device: host memory that is poisoned, bounded by guards, and watched by a shadow.

Every live range is a `Region`.  Freed memory is poisoned and kept for a while, so that a use after free is named
instead of reading another allocation.  The shadow (see clocks.py) is made when a region is first accessed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import Any

import numpy as np

from cdlrm.driver.backend import DeviceBuffer, Gauge, PinnedBuffer

from .clocks import MAX_STREAMS

ALIGNMENT = 256
GUARD = 256  # bytes before and after every allocation
GUARD_BYTE = 0xA5
POISON = 0xFF  # float32: NaN; int32: -1
KEPT_BYTES = 32 << 20  # of freed memory


class EmulatorError(AssertionError):
    """The program would be wrong on a device (not an error that a device reports)."""


class AccessError(EmulatorError):
    """Device work touches memory that is not allocated, registered or large enough."""


class UndeclaredWriteError(EmulatorError):
    """A kernel changed a byte that it does not declare to write (access.py)."""


class Region:
    """[start, end) of memory: kind is device, pinned, registered, output or tensor."""

    def __init__(self, kind: str, number: int, nbytes: int, array: np.ndarray | None = None) -> None:
        self.kind, self.number, self.nbytes = kind, number, nbytes
        if array is None:
            self.raw = np.full(nbytes + 2 * GUARD + ALIGNMENT, GUARD_BYTE, np.uint8)
            self.offset = GUARD + -(self.raw.ctypes.data + GUARD) % ALIGNMENT
            self.data = self.raw[self.offset : self.offset + nbytes]
            self.data.fill(POISON)
        else:
            self.raw = self.data = array.reshape(-1).view(np.uint8)
            self.offset = 0
        self.start = self.raw.ctypes.data + self.offset
        self.end = self.start + nbytes
        self.live = True
        self.handle: Any = None  # what tells that torch dropped it
        self.stream: Any = None  # torch's current one when the memory was asked for
        self.born = 0  # number of the operation that may be taken for the first writer
        self.writer: Any = None  # uint32 [words], number of the operation that wrote last
        self.readers: Any = None  # uint32 [streams, words], number of each stream's last reader

    def __str__(self) -> str:
        return f"{self.kind} #{self.number} of {self.nbytes} bytes{'' if self.live else ' (freed)'}"

    def watch(self, streams: int) -> None:
        """Make the shadow, with room for the readers of `streams` streams."""
        words = (self.nbytes + 3) // 4
        if self.writer is None:
            self.writer = np.zeros(words, np.uint32)
            if self.born:
                self.writer.fill(self.born)
        if self.readers is None or len(self.readers) < streams:
            readers = np.zeros((min(MAX_STREAMS, max(4, 2 * streams)), words), np.uint32)
            if self.readers is not None:
                readers[: len(self.readers)] = self.readers
            self.readers = readers

    def check_guards(self) -> None:
        before, after = self.raw[: self.offset], self.raw[self.offset + self.nbytes :]
        if (before != GUARD_BYTE).any() or (after != GUARD_BYTE).any():
            raise UndeclaredWriteError(f"the guard bytes around {self} changed: something wrote outside of it")


class Memory:
    """All regions, found by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self._kept: deque[Region] = deque()
        self._kept_bytes = 0
        self._made = 0
        self.device, self.pinned = Gauge(), Gauge()  # bytes, as their allocators count them

    def allocate(self, kind: str, nbytes: int) -> Region:
        self._made += 1
        return self._add(Region(kind, self._made, nbytes))

    def adopt(self, array: np.ndarray) -> Region:
        """A region of the memory of a host array, which has its own owner."""
        self._made += 1
        return self._add(Region("registered", self._made, array.nbytes, array))

    def _add(self, region: Region) -> Region:
        insort(self._starts, region.start)
        self._regions[region.start] = region
        return region

    def release(self, region: Region) -> None:
        """Poison the region; it stays known as freed for a while (a registered one is left alone and forgotten)."""
        region.live = False
        region.writer = region.readers = None
        if region.kind == "registered":
            self._forget(region)
            return
        region.check_guards()
        region.data.fill(POISON)
        self._kept.append(region)
        self._kept_bytes += region.nbytes
        while self._kept_bytes > KEPT_BYTES:
            oldest = self._kept.popleft()
            self._kept_bytes -= oldest.nbytes
            self._forget(oldest)

    def _forget(self, region: Region) -> None:
        del self._starts[bisect_right(self._starts, region.start) - 1]
        del self._regions[region.start]

    def at(self, address: int) -> Region | None:
        """The region, live or freed, that holds `address`."""
        at = bisect_right(self._starts, address)
        if at == 0:
            return None
        region = self._regions[self._starts[at - 1]]
        return region if address < region.end else None

    def overlaps(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, end - 1)
        return at > 0 and self._regions[self._starts[at - 1]].end > start

    def find(self, address: int, nbytes: int, what: str) -> Region:
        """The live region that holds [address, address + nbytes)."""
        region = self.at(address)
        if region is None:
            raise AccessError(f"{what}: {address:#x} (+{nbytes} bytes) is no memory of the device and not registered")
        if not region.live:
            raise AccessError(f"{what}: use of {region} after it was freed, at byte {address - region.start}")
        if address + nbytes > region.end:
            raise AccessError(f"{what}: {nbytes} bytes from byte {address - region.start} pass the end of {region}")
        return region

    def view(self, address: int, dtype: Any, count: int, what: str) -> np.ndarray:
        """`count` values at `address`, as they are now."""
        size = count * np.dtype(dtype).itemsize
        if size == 0:
            return np.empty(0, dtype)
        if size < 0:
            raise AccessError(f"{what}: {count} items")
        region = self.find(address, size, what)
        at = address - region.start
        return region.data[at : at + size].view(dtype)

    def live(self, kind: str) -> list[Region]:
        return [region for region in list(self._regions.values()) if region.live and region.kind == kind]


class EmulatedBuffer(DeviceBuffer):
    def __init__(self, region: Region, freed: deque[Region]) -> None:
        self.address, self.nbytes = region.start, region.nbytes
        self._region, self._freed = region, freed

    def __del__(self) -> None:
        self._freed.append(self._region)


class EmulatedPinned(PinnedBuffer):
    def __init__(self, region: Region, freed: deque[Region]) -> None:
        self.array, self.address = region.data, region.start
        self._region, self._freed = region, freed

    def __del__(self) -> None:
        self._freed.append(self._region)
