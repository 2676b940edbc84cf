"""The CUDA backend: torch's context, streams, events and memory; CuPy's launches and copies.

Memory on the device comes from torch's caching allocator, so torch and this library never hold the same
bytes twice.  Kernels are compiled by NVRTC when they are first launched (`cubin`), host memory is pinned by
`pinned`.  Nothing here waits for the device except `synchronize`.

CUDA reports a failed kernel or copy at some later call.  So each stream remembers what was issued last, and an
error names it.  Some errors are sticky: the device does nothing more in this process.

Threads that call know nothing of devices, so every call enters its own.
"""

from __future__ import annotations

import bisect
import importlib
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import DeviceError, DeviceMemoryError, PinError
from . import signatures
from .backend import Backend, DeviceBuffer, Gauge, PinnedBuffer, Traffic
from .cubin import load_code
from .pinned import CupyPinCalls, PinCalls, Pinned, host_memory, pin
from .sources import source

log = logging.getLogger("cdlrm")

MAX_GRID = 2**31 - 1
STICKY = {
    214: "an uncorrectable memory error",
    220: "an uncorrectable error of NVLink",
    226: "a contained hardware error",
    700: "an illegal memory access",
    702: "a launch timeout",
    710: "a device-side assert",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an invalid address space",
    718: "an invalid program counter",
    719: "an unspecified launch failure",
}
"""CUDA's error codes after which the context is lost, the same in its runtime and its driver API."""
_STICKY_WORDS = (
    "uncorrectable", "illegal memory access", "launch timed out", "device-side assert", "hardware stack error",
    "illegal instruction", "misaligned address", "not allowed on the address space", "invalid program counter",
    "unspecified launch failure",
)  # fmt: skip
"""The same in CUDA's words, for errors that carry no code."""


class TorchBuffer(DeviceBuffer):
    """A block of torch's caching allocator."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()


class PinnedMemory(PinnedBuffer):
    """Pinned memory of its own; unpinned when it is dropped."""

    def __init__(self, array: np.ndarray, pinned: Pinned, calls: PinCalls, gauge: Gauge) -> None:
        self.array = array
        self.address = pinned.address
        gauge.add(pinned.nbytes)
        self.release = weakref.finalize(self, _release_quietly, pinned, calls, gauge)


def _release_quietly(pinned: Pinned, calls: PinCalls, gauge: Gauge) -> None:
    """Nobody is there to handle the error of a destructor.  After a sticky error nothing can be unpinned."""
    gauge.give_back(pinned.nbytes)
    try:
        pinned.release(calls)
    except PinError as error:
        log.log(logging.DEBUG if error.__cause__ and is_sticky(error.__cause__) else logging.WARNING, "%s", error)


def is_sticky(error: BaseException) -> bool:
    """Whether an error of CuPy or torch tells that the device does nothing more in this process."""
    code = getattr(error, "status", getattr(error, "error_code", None))
    return code in STICKY or any(word in str(error) for word in _STICKY_WORDS)


@dataclass(frozen=True)
class CudaEvent:
    """torch's event, and what had been issued last before it."""

    event: Any
    last: str


class CudaBackend(Backend):
    """GPU `index` of this process.  `cupy`: the module (tests pass their own)."""

    name = "cuda"

    def __init__(self, index: int = 0, cupy: Any = None) -> None:
        if cupy is None:
            cupy = importlib.import_module("cupy")
        self._cupy, self._runtime, self._index = cupy, cupy.cuda.runtime, index
        self.device = torch.device("cuda", index)
        self.traffic = Traffic()
        self.calls: PinCalls = CupyPinCalls(cupy, index)
        self._capability = int("{}{}".format(*torch.cuda.get_device_capability(self.device)))
        self._compiling = threading.Lock()  # compiling takes long: no other thread waits for it with a copy
        self._lock = threading.Lock()  # of what is below; several threads issue work
        self._kernels: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self._streams: dict[int, Any] = {}
        self._last: dict[int, str] = {}
        self._registered: dict[int, Pinned] = {}  # by host address
        self._borders: list[int] = []
        self._gauge = Gauge()  # of pinned memory
        self._pinned: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()

    def _entered(self) -> Any:
        """Around every call of CUDA: any thread may make it, and the device that a thread begins with is GPU 0.

        torch's way back to the thread's own device makes no context there (CuPy's does, since CUDA 12's
        cudaSetDevice makes one, which takes hundreds of megabytes of a GPU that nobody asked for).
        """
        return torch.cuda.device(self._index)

    # --- streams and events ---

    def compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        """One of torch's pool, which does not block on the legacy default stream."""
        return torch.cuda.Stream(self.device)

    def record(self, stream: torch.cuda.Stream) -> CudaEvent:
        return self._record(stream, timed=False)

    def record_timed(self, stream: torch.cuda.Stream) -> CudaEvent:
        return self._record(stream, timed=True)

    def _record(self, stream: torch.cuda.Stream, timed: bool) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timed)
        last = self._last.get(stream.cuda_stream, "nothing of cdlrm's")
        try:
            with self._entered():
                event.record(stream)
        except RuntimeError as error:
            raise self._failed("recording an event", error, last) from error
        return CudaEvent(event, last)

    def wait(self, stream: torch.cuda.Stream, event: CudaEvent) -> None:
        try:
            with self._entered():
                stream.wait_event(event.event)
        except RuntimeError as error:
            raise self._failed("ordering two streams", error, event.last) from error

    def is_done(self, event: CudaEvent) -> bool:
        try:
            with self._entered():
                return bool(event.event.query())
        except RuntimeError as error:
            raise self._failed("asking for an event", error, event.last) from error

    def synchronize(self, event: CudaEvent, reason: str) -> None:
        with self._lock:
            self.traffic.synchronizations[reason] += 1
        try:
            with self._entered():
                event.event.synchronize()
        except RuntimeError as error:
            raise self._failed(f"waiting for the device ({reason})", error, event.last) from error

    def elapsed_ms(self, first: CudaEvent, last: CudaEvent) -> float:
        with self._entered():
            return float(first.event.elapsed_time(last.event))

    def hand_over(self, stream: torch.cuda.Stream) -> None:
        pass  # torch's own stream orders it

    # --- memory ---

    def alloc(self, nbytes: int) -> TorchBuffer:
        return TorchBuffer(self._empty((nbytes,), torch.uint8, nbytes))

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._empty(shape, dtype, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        try:
            with self._entered():
                return torch.empty(shape, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{self.device} has no room for {nbytes:,} bytes more: {self.free_bytes():,} bytes are free; use a "
                f"smaller cache (cache_rows, cache_ratio), a smaller batch, or free device memory of this process."
            ) from error
        except RuntimeError as error:
            raise self._failed(f"allocating {nbytes:,} bytes", error) from error

    def free_bytes(self) -> int:
        """What CUDA has free, and what torch's allocator holds unused."""
        try:
            with self._entered():
                free, _ = torch.cuda.mem_get_info(self.device)
        except RuntimeError as error:
            raise self._failed("asking for the free memory", error) from error
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def most_bytes(self) -> tuple[int, int]:
        with self._entered():
            return torch.cuda.max_memory_allocated(self.device), self._gauge.most

    def pinned(self, nbytes: int) -> PinnedMemory:
        array = host_memory(nbytes)
        memory = PinnedMemory(array, pin(array, self.calls), self.calls, self._gauge)
        self._pinned.add(memory)
        return memory

    def register(self, array: np.ndarray, progress: Any = None) -> int:
        pinned = pin(array, self.calls, progress)
        self._gauge.add(pinned.nbytes)
        if pinned.pieces:
            with self._lock:
                self._registered[array.ctypes.data] = pinned
                self._borders = sorted(border for each in self._registered.values() for border in each.borders())
        return pinned.address

    def unregister(self, array: np.ndarray) -> None:
        if array.nbytes == 0:
            return
        with self._lock:
            pinned = self._registered.pop(array.ctypes.data, None)
            self._borders = sorted(border for each in self._registered.values() for border in each.borders())
        if pinned is not None:  # else `close` was first
            self._gauge.give_back(pinned.nbytes)
            pinned.release(self.calls)

    def address(self, tensor: torch.Tensor) -> int:
        if tensor.device != self.device or not tensor.is_contiguous():
            raise ValueError(f"a contiguous tensor on {self.device} is needed, got one on {tensor.device}")
        return tensor.data_ptr()

    # --- work ---

    def copy(self, target: int, source: int, nbytes: int, kind: str, stream: torch.cuda.Stream) -> None:
        if nbytes == 0:
            return
        what = f"a copy ({kind}, {nbytes:,} bytes)"
        try:
            with self._entered():
                for at, size in self._parts(source if kind == "h2d" else target, nbytes):
                    self._runtime.memcpyAsync(
                        target + at, source + at, size, self._runtime.memcpyDefault, stream.cuda_stream
                    )
        except RuntimeError as error:
            raise self._failed(f"issuing {what}", error, self._last.get(stream.cuda_stream)) from error
        with self._lock:
            self._last[stream.cuda_stream] = what
            self.traffic.copies[kind] += 1
            self.traffic.copied_bytes[kind] += nbytes

    def _parts(self, host: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the parts between borders of pieces: CUDA refuses a copy across two registrations."""
        borders = self._borders
        cuts = borders[bisect.bisect_right(borders, host) : bisect.bisect_left(borders, host + nbytes)]
        for start, stop in zip([host, *cuts], [*cuts, host + nbytes], strict=True):
            yield start - host, stop - start

    def clear(self, target: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        if nbytes == 0:
            return
        what = f"a clear ({nbytes:,} bytes)"
        try:
            with self._entered():
                self._runtime.memsetAsync(target, 0, nbytes, stream.cuda_stream)
        except RuntimeError as error:
            raise self._failed(f"issuing {what}", error, self._last.get(stream.cuda_stream)) from error
        self._last[stream.cuda_stream] = what

    def launch(
        self, kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...], stream: torch.cuda.Stream
    ) -> None:
        if grid == 0:
            return
        if not 0 < grid <= MAX_GRID:
            raise DeviceError(f"kernel {kernel}: a grid of {grid:,} blocks is more than CUDA's {MAX_GRID:,}.")
        what = f"kernel {signatures.expression(kernel, variant)}"
        try:
            with self._entered():
                function = self._kernels.get((kernel, variant)) or self._load(kernel, variant)
                function((grid,), (signatures.BLOCK_THREADS,), args, stream=self._cupy_stream(stream.cuda_stream))
        except RuntimeError as error:
            if isinstance(error, DeviceError):  # it did not compile
                raise
            raise self._failed(f"launching {what}", error, self._last.get(stream.cuda_stream)) from error
        with self._lock:
            self._last[stream.cuda_stream] = what
            self.traffic.launches[kernel] += 1

    def _load(self, kernel: str, variant: tuple[Any, ...]) -> Any:
        """The kernel as CuPy launches it, compiled and loaded when it is first used."""
        with self._compiling:
            if (kernel, variant) not in self._kernels:
                file, expression = signatures.KERNELS[kernel].file, signatures.expression(kernel, variant)
                code = load_code(self._cupy.cuda.nvrtc, source(file), file, expression, self._capability)
                module = self._cupy.cuda.Module()
                module.load(code.image)
                self._kernels[kernel, variant] = module.get_function(code.symbol)
            return self._kernels[kernel, variant]

    def _cupy_stream(self, pointer: int) -> Any:
        found = self._streams.get(pointer)
        if found is None:
            found = self._streams[pointer] = self._cupy.cuda.ExternalStream(pointer, self._index)
        return found

    def _failed(self, what: str, error: RuntimeError, last: str | None = None) -> DeviceError:
        """CUDA's error at `what` in one sentence; a sticky one is that of work issued before, `last` the newest."""
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not is_sticky(error):
            return DeviceError(f"{what} on {self.device}: {said}.")
        return DeviceError(
            f"{self.device} failed while running earlier work (last issued on this stream: {last or 'unknown'}), found "
            f"when {what}: {said}; it does nothing more in this process, so save what host memory holds and restart.",
            sticky=True,
        )

    def close(self) -> None:
        """Unpin what is still pinned; device memory goes back to torch with its buffers."""
        with self._lock:
            registered, self._registered, self._borders = list(self._registered.values()), {}, []
            self._kernels.clear()
        for memory in list(self._pinned):
            memory.release()
        for pinned in registered:
            _release_quietly(pinned, self.calls, self._gauge)
