"""What a GPU must offer to `GpuDriver`: memory, copies, launches, streams and events, and nothing else.

Two backends exist: CuPy's (`cdlrm/driver/cuda.py`) and the emulated one of the tests
(`tests/emulator/`), whose streams run in any order that the events allow.  All calls only *issue* work
on a stream and return at once, except `synchronize`.  Addresses are plain integers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Stream = Any  # a backend's own handle
Event = Any


@dataclass
class Traffic:
    """What was issued since the backend was made (tests assert these; `device_check` prints them)."""

    launches: Counter[str] = field(default_factory=Counter)  # by kernel name
    copies: Counter[str] = field(default_factory=Counter)  # by kind: h2d, d2h, d2d
    copied_bytes: Counter[str] = field(default_factory=Counter)  # by kind
    synchronizations: Counter[str] = field(default_factory=Counter)  # by reason


class Gauge:
    """Bytes that are in use, and the most (`most`) that were at once; called by any thread."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._given_back: deque[int] = deque()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._settle()
            self._now += nbytes
            self.most = max(self.most, self._now)

    def give_back(self, nbytes: int) -> None:
        """Takes no lock: a finalizer may run in the middle of anything."""
        self._given_back.append(nbytes)

    def now(self) -> int:
        with self._lock:
            self._settle()
            return self._now

    def _settle(self) -> None:
        while self._given_back:
            self._now -= self._given_back.popleft()


class DeviceBuffer(ABC):
    """Device memory; freed when it is dropped (the owner makes sure that no work on it is pending)."""

    address: int
    nbytes: int


class PinnedBuffer(ABC):
    """Host memory that the device reads and writes: `array` uint8 [nbytes], at `address` for kernels."""

    array: np.ndarray
    address: int


class Backend(ABC):
    """One device."""

    name: str
    device: torch.device  # of outputs and gradients
    traffic: Traffic

    # --- streams and events ---

    @abstractmethod
    def compute_stream(self) -> Stream:
        """torch's current stream of the calling thread."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that orders nothing by itself against others."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event after everything issued on `stream` until now."""

    def record_timed(self, stream: Stream) -> Event:
        """Like `record`, an event that `elapsed_ms` takes (an event with a time costs more)."""
        return self.record(stream)

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is issued on `stream` from now on runs after `event`."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether everything before `event` has run; never waits.  Raises DeviceError if that failed."""

    @abstractmethod
    def synchronize(self, event: Event, reason: str) -> None:
        """The calling thread waits for `event`; counted in `traffic` by `reason`.  Raises DeviceError."""

    @abstractmethod
    def elapsed_ms(self, first: Event, last: Event) -> float:
        """Milliseconds between two events of `record_timed` that are done."""

    @abstractmethod
    def hand_over(self, stream: Stream) -> None:
        """torch is about to use what was issued on `stream`, its current one: nothing to do on a device."""

    # --- memory ---

    @abstractmethod
    def alloc(self, nbytes: int) -> DeviceBuffer:
        """Uninitialised device memory, 256-byte aligned, from torch's allocator; nbytes may be 0.
        It may be memory that torch's current stream still works on: another stream waits for that one before it
        uses it, and it is dropped only when the current stream waits for what other streams did with it.
        Raises DeviceMemoryError."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that may still be allocated."""

    @abstractmethod
    def most_bytes(self) -> tuple[int, int]:
        """The most bytes of device memory, and of pinned host memory, that were in use at once.  On a device that
        torch uses too, its memory counts."""

    @abstractmethod
    def pinned(self, nbytes: int) -> PinnedBuffer:
        """Uninitialised pinned memory of exactly `nbytes` (page-rounded).  Raises PinError."""

    @abstractmethod
    def register(self, array: np.ndarray, progress: Any = None) -> int:
        """Pin the memory of a host array (any size, 0 included) in pieces; its address for kernels.
        Raises PinError, with nothing left pinned.  `progress(done_bytes, total_bytes)` is called on the way."""

    @abstractmethod
    def unregister(self, array: np.ndarray) -> None:
        """Undo `register`; no work on the memory may be pending."""

    @abstractmethod
    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device, for use on torch's current stream."""

    @abstractmethod
    def address(self, tensor: torch.Tensor) -> int:
        """Where the data of a contiguous tensor of this device is, for a launch on torch's current stream."""

    def host_reads(self, address: int, nbytes: int) -> None:  # noqa: B027 - only the emulated one looks
        """The host reads pinned memory now (lets the emulator find a missing wait)."""

    def host_writes(self, address: int, nbytes: int) -> None:  # noqa: B027
        """The host writes pinned memory now."""

    def host_reuse(self, address: int, nbytes: int) -> None:  # noqa: B027
        """Before the host fills pinned memory anew: what it held is lost (the emulator poisons it)."""

    # --- work ---

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, kind: str, stream: Stream) -> None:
        """Copy between addresses; `kind` is "h2d" (from pinned), "d2h" (to pinned) or "d2d"."""

    @abstractmethod
    def clear(self, target: int, nbytes: int, stream: Stream) -> None:
        """Set device memory to zero bytes."""

    @abstractmethod
    def launch(self, kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...], stream: Stream) -> None:
        """Launch `kernel` of `signatures.KERNELS` with `grid` blocks (0: nothing to do) of BLOCK_THREADS threads.

        `args` exactly as CuPy takes them: NumPy scalars of the parameter's type, pointers as np.uint64."""

    def close(self) -> None:  # noqa: B027
        """Release what is held.  May be called twice."""
