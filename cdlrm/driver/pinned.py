"""Host memory that the device reads and writes: exact size, pinned in pieces.

torch's and CuPy's pools of pinned memory round up to a power of two (20 GiB become 32).  So memory comes
from mmap and is pinned by cudaHostRegister.  A registration of 512 GiB or more fails on recent drivers, and nothing
can be told while one runs, hence pieces of a few GiB; 0 bytes cannot be registered at all.  First touching the pages
from several threads is what makes it quick, and one piece is pinned while the pages of the next are touched.
"""

from __future__ import annotations

import logging
import mmap
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import PinError
from ..machine import cores

log = logging.getLogger("cdlrm")

PIECE_BYTES = 4 << 30
BAR_SECONDS = 2.0  # what takes no longer shows no bar
TOUCH_BYTES = 128 << 20  # what a thread touches before it takes the next part
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)


class PinCalls(Protocol):
    """The three calls of CUDA; each raises RuntimeError with CUDA's error where it fails."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def device_pointer(self, address: int) -> int: ...


class CupyPinCalls:
    """CuPy's, on device `index`.  CuPy checks each return code and clears the error for later calls."""

    def __init__(self, cupy: Any, index: int) -> None:
        self._cuda, self._index = cupy.cuda, index

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._index):
            self._cuda.runtime.hostRegister(address, nbytes, PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._index):
            self._cuda.runtime.hostUnregister(address)

    def device_pointer(self, address: int) -> int:
        """Where kernels find registered memory (the host's own address, except on a few platforms)."""
        with torch.cuda.device(self._index):
            return int(self._cuda.runtime.pointerGetAttributes(address).devicePointer)


@dataclass(frozen=True)
class Pinned:
    """Memory that is pinned: `address` for kernels, and the pieces as (host address, bytes)."""

    address: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]

    def borders(self) -> list[int]:
        """Addresses for kernels where one piece ends and another starts (a copy must not cross them)."""
        return [self.address + start - self.pieces[0][0] for start, _ in self.pieces[1:]]

    def release(self, calls: PinCalls) -> None:
        """Unpin every piece, also after one that fails.  Raises PinError with the first error."""
        failures = [error for start, _ in reversed(self.pieces) if (error := _unpin(calls, start))]
        if failures:
            raise PinError(
                f"{len(failures)} of {len(self.pieces)} pieces of {self.nbytes:,} bytes could not be unpinned "
                f"({failures[0]}); they stay pinned until the process ends."
            ) from failures[0]


def host_memory(nbytes: int) -> np.ndarray:
    """Zeroed memory of exactly `nbytes` (rounded up to pages) as uint8, page-aligned, nothing touched yet.

    It is shared memory: a fork (of a DataLoader's workers) leaves the pages where the device knows them.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise PinError(
            f"{nbytes:,} bytes of host memory are not to be had ({error}); use fewer rows, a smaller dim, or "
            f'store="file:DIR".'
        ) from error
    if nbytes >= TOUCH_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("this kernel has no transparent huge pages; first touch and pinning take longer")
    return np.frombuffer(memory, np.uint8)


def pin(array: np.ndarray, calls: PinCalls, progress: Progress | None = None, piece_bytes: int = PIECE_BYTES) -> Pinned:
    """Pin the memory of a C-contiguous array (any dtype, 0 bytes too), keeping its contents.

    The array must own its pages (`host_memory`): no page can be pinned twice.  `progress(done, total)` is
    called after each piece.  Raises PinError, or what `progress` or Ctrl-C raises, with nothing left pinned.
    """
    total = array.nbytes
    if total == 0:
        return Pinned(0, 0, ())
    data = array.reshape(-1).view(np.uint8)
    base = data.ctypes.data
    page_base = base - base % mmap.PAGESIZE
    cuts = [base, *range(page_base + piece_bytes, base + total, piece_bytes), base + total]
    pinned: list[tuple[int, int]] = []
    with ThreadPoolExecutor(_threads(total), thread_name_prefix="cdlrm-touch") as pool:
        pieces = list(zip(cuts, cuts[1:], strict=False))
        touched = [_touch(pool, data[start - base : stop - base]) for start, stop in pieces]
        try:
            for (start, stop), parts in zip(pieces, touched, strict=True):
                for part in parts:
                    part.result()
                try:
                    calls.register(start, stop - start)
                except RuntimeError as error:
                    raise _refused(total, start - base, error) from error
                pinned.append((start, stop - start))
                if progress is not None:
                    progress(stop - base, total)
            return Pinned(_device_address(calls, pinned), total, tuple(pinned))
        except BaseException:
            for part in (part for parts in touched for part in parts):
                part.cancel()
            for start, _ in reversed(pinned):
                if stuck := _unpin(calls, start):
                    log.warning("unpinning after a failure failed too: %s", stuck)
            raise


class PinBar:
    """How far pinning `total` bytes is, as a bar on standard error once it has taken BAR_SECONDS (never, unless
    `shown`)."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.shown = total, shown
        self._before = self._done = 0  # bytes of earlier arrays, and of all
        self._started = time.monotonic()
        self._bar: Any = None

    def told(self, done: int, total: int) -> None:
        """`done` bytes of the current array are pinned."""
        del total
        self._done = self._before + done
        if self._bar is None and self.shown and time.monotonic() - self._started >= BAR_SECONDS:
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, desc="pinning the tables", unit="B", unit_scale=True, file=sys.stderr)
        if self._bar is not None:
            self._bar.update(self._done - self._bar.n)

    def next(self) -> None:
        """The next array comes."""
        self._before = self._done

    def __enter__(self) -> PinBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _threads(total: int) -> int:
    return max(1, min(16, cores(), -(-total // TOUCH_BYTES)))


def _touch(pool: ThreadPoolExecutor, data: np.ndarray) -> list[Future[None]]:
    """Make every page of `data` exist, writing back what it holds."""

    def work(part: np.ndarray) -> None:
        one_of_each_page = part[:: mmap.PAGESIZE]
        np.bitwise_or(one_of_each_page, 0, out=one_of_each_page)  # releases the GIL

    return [pool.submit(work, data[at : at + TOUCH_BYTES]) for at in range(0, data.size, TOUCH_BYTES)]


def _device_address(calls: PinCalls, pieces: list[tuple[int, int]]) -> int:
    """The address of the first piece for kernels.  Raises PinError where the pieces do not follow each other."""
    try:
        found = [calls.device_pointer(start) for start, _ in pieces]
    except RuntimeError as error:
        raise PinError(f"CUDA does not tell where the device sees pinned memory ({error}); is the GPU lost?") from error
    first = found[0]
    for seen, (start, _) in zip(found, pieces, strict=True):
        if seen == 0 or seen - first != start - pieces[0][0]:
            raise PinError(
                f"the device sees pinned memory in {len(pieces)} pieces that do not follow each other (0x{first:x}, "
                f'0x{seen:x}), which kernels cannot use; use smaller tables or store="file:DIR".'
            )
    return first


def _unpin(calls: PinCalls, address: int) -> RuntimeError | None:
    try:
        calls.unregister(address)
    except RuntimeError as error:
        return error
    return None


def locked_memory_limit() -> str:
    """RLIMIT_MEMLOCK in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"


def _refused(total: int, done: int, error: RuntimeError) -> PinError:
    return PinError(
        f"{total:,} bytes of host memory could not be pinned: CUDA reported {error} after {done:,} bytes, and the "
        f"limit of locked memory (ulimit -l) is {locked_memory_limit()}; raise it (ulimit -l unlimited, docker run "
        f'--ulimit memlock=-1), leave more memory free, or use store="file:DIR".'
    )
