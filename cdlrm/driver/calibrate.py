"""A short measurement at the start: how records travel best between host memory and this device.

Zero copy: kernels read and write pinned host rows through the link.  Staged: the host gathers rows into a
pinned buffer, one copy brings it to the device, a kernel scatters it there; and the reverse.  A record is either
padded to whole 32 bytes with its optimizer state behind its weights, or weights and state are two arrays (a
state of 4 bytes then costs a 32-byte piece of its own).  Which is faster depends on link, processor and width.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import signatures
from .backend import Backend
from .cpu import CpuDriver

TABLE_BYTES = 64 << 20
MOVED_BYTES = 4 << 20  # of a fill or an evict
SECONDS = 0.5  # for the rounds; pinning and the first launches take about as long again
LEAST_ROUNDS, MOST_ROUNDS = 3, 15

Key = tuple[bool, bool]  # (zero copy, joined)


@dataclass(frozen=True)
class Choice:
    """What was chosen; `figures`: GB/s of weights and state by way, direction and width; `sentence` for the report."""

    zero_copy: bool
    joined_records: bool
    figures: dict[str, float] = field(default_factory=dict)
    sentence: str = ""


def measure(
    backend: Backend,
    record_widths: Sequence[tuple[int, int]],
    *,
    table_bytes: int = TABLE_BYTES,
    moved_bytes: int = MOVED_BYTES,
    seconds: float = SECONDS,
) -> Choice:
    """Move random records of each (dim, state_width) both ways and choose by the sum of the medians.

    A staged move counts the host's gather or scatter as well as the device's work: nothing overlaps here.
    Host time is the clock's, the device's is events'.  Raises PinError and DeviceMemoryError.
    """
    widths = sorted(set(record_widths))
    if not widths:
        raise ValueError("measure needs at least one (dim, state_width)")
    bench = _Bench(backend, table_bytes, moved_bytes)
    times: dict[tuple[tuple[int, int], Key, str], list[float]] = defaultdict(list)
    deadline = 0.0
    for turn in range(MOST_ROUNDS + 1):
        for width in widths:
            for key in _keys(width[1]):
                for direction, ms in zip(("fill", "evict"), bench.move(width, key), strict=True):
                    if turn:  # the first compiles kernels and touches memory
                        times[width, key, direction].append(ms)
        if turn == 0:
            deadline = time.perf_counter() + seconds
        elif turn >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
    return decide({key: statistics.median(values) for key, values in times.items()}, bench.moved_bytes)


def _keys(state_width: int) -> list[Key]:
    layouts = (False, True) if state_width else (False,)
    return [(zero_copy, joined) for zero_copy in (True, False) for joined in layouts]


def decide(ms: dict[tuple[tuple[int, int], Key, str], float], moved_bytes: dict[tuple[int, int], int]) -> Choice:
    """The choice by median milliseconds of each (width, (zero copy, joined), direction); on a tie two arrays."""
    figures, total = {}, dict.fromkeys(((z, j) for z in (True, False) for j in (False, True)), 0.0)
    for (width, (zero_copy, joined), direction), each in ms.items():
        way = f"{'zero-copy' if zero_copy else 'staged'} {direction}, {'one record' if joined else 'two arrays'}"
        figures[f"{way}, {width[0]}+{width[1]} floats"] = moved_bytes[width] / max(each, 1e-9) / 1e6
        total[zero_copy, joined] += each
        if width[1] == 0:  # without state the two layouts are one
            total[zero_copy, True] += each
    zero_copy = min(total[True, False], total[True, True]) <= min(total[False, False], total[False, True])
    joined = total[zero_copy, True] < total[zero_copy, False]
    best = {way: min(total[way, False], total[way, True]) for way in (True, False)}
    ways, layouts = {True: "zero copy", False: "staged"}, {True: "one padded record", False: "two arrays"}
    sentence = (
        f"records: {ways[zero_copy]} (filling and evicting {_widths(ms)}: {best[zero_copy]:.2f} ms, "
        f"{ways[not zero_copy]} {best[not zero_copy]:.2f} ms)"
    )
    if any(width[1] for width, _, _ in ms):
        sentence += (
            f"; weights and state in {layouts[joined]} ({total[zero_copy, joined]:.2f} ms, {layouts[not joined]} "
            f"{total[zero_copy, not joined]:.2f} ms)"
        )
    return Choice(zero_copy, joined, figures, sentence + ".")


def _widths(ms: dict[tuple[tuple[int, int], Key, str], float]) -> str:
    widths = sorted({width for width, _, _ in ms})
    return "random records of " + ", ".join(f"{dim}+{state}" for dim, state in widths) + " floats"


class _Records:
    """Where weights and state of `rows` records are in memory that begins at `address` (strides in floats)."""

    def __init__(self, width: tuple[int, int], joined: bool, rows: int, address: int) -> None:
        dim, state_width = width
        self.weight, self.weight_stride = address, padded(width) if joined else dim
        self.state = address + 4 * (dim if joined else rows * dim)
        self.state_stride = self.weight_stride if joined else state_width

    def named(self, prefix: str = "") -> dict[str, int]:
        names = ("weight", "weight_stride", "state", "state_stride")
        return {prefix + name: getattr(self, name) for name in names}


def padded(width: tuple[int, int]) -> int:
    """Floats of a padded record: whole 32 bytes."""
    return -(-sum(width) // 8) * 8


def _matrices(memory: np.ndarray, width: tuple[int, int], joined: bool, rows: int) -> list[np.ndarray]:
    """The records of host memory as float32 matrices: one of padded records, or weights and state."""
    floats = memory[: memory.nbytes // 4 * 4].view(np.float32)
    if joined:
        return [floats[: rows * padded(width)].reshape(rows, -1)]
    ends = np.cumsum([0, *(rows * each for each in width)])
    return [floats[start:stop].reshape(rows, -1) for start, stop in zip(ends, ends[1:], strict=False) if stop > start]


class _Bench:
    """A pinned table, a cache and staging buffers, used by every width and layout in turn."""

    def __init__(self, backend: Backend, table_bytes: int, moved_bytes: int) -> None:
        self.backend, self._limit = backend, moved_bytes
        self.moved_bytes: dict[tuple[int, int], int] = {}
        self._chosen: dict[tuple[int, int], np.ndarray] = {}
        self.host = CpuDriver()
        self.table, self.host_staging = backend.pinned(table_bytes), backend.pinned(moved_bytes)
        self.index = backend.pinned(12 * (moved_bytes // 32))  # row int64 and slot int32 of records of 32 bytes or more
        self.device_index = backend.alloc(self.index.array.nbytes)
        self.cache, self.staging = backend.alloc(moved_bytes), backend.alloc(moved_bytes)
        backend.host_writes(self.table.address, table_bytes)
        self.table.array[:] = 0
        self.stream = backend.new_stream()
        # torch's own work may still be running on memory that it gave back
        backend.wait(self.stream, backend.record(backend.compute_stream()))

    def move(self, width: tuple[int, int], key: Key) -> tuple[float, float]:
        """Milliseconds of a fill and of an evict of the same random records."""
        zero_copy, joined = key
        record_bytes = 4 * padded(width)
        rows = self.table.array.nbytes // record_bytes
        count = min(rows, self._limit // record_bytes)
        if width not in self._chosen:
            self._chosen[width] = np.random.default_rng(rows).permutation(rows)[:count]
            self.moved_bytes[width] = 4 * sum(width) * count
        chosen = self._chosen[width]
        self._send(chosen)
        table = _Records(width, joined, rows, self.table.address)
        values = {
            **_Records(width, joined, count, self.cache.address).named(),
            "rows": self.device_index.address, "slots": self.device_index.address + 8 * count,
            "count": count, "staged": int(not zero_copy), "dim": width[0], "state_width": width[1],
        }  # fmt: skip
        if zero_copy:
            return self._zero_copy(values | table.named("home_"))
        table_arrays, staging_arrays = (
            _matrices(memory.array, width, joined, number)
            for memory, number in ((self.table, rows), (self.host_staging, count))
        )
        nbytes = 4 * count * (padded(width) if joined else sum(width))
        values |= _Records(width, joined, count, self.staging.address).named("home_")
        return self._staged(values, table_arrays, staging_arrays, chosen, nbytes)

    def _send(self, chosen: np.ndarray) -> None:
        """Rows and (shuffled) slots of the records, to the device."""
        count, backend = chosen.size, self.backend
        backend.host_writes(self.index.address, 12 * count)
        self.index.array[: 8 * count].view(np.int64)[:] = chosen
        self.index.array[8 * count : 12 * count].view(np.int32)[:] = np.random.default_rng(1).permutation(count)
        backend.copy(self.device_index.address, self.index.address, 12 * count, "h2d", self.stream)
        backend.synchronize(backend.record(self.stream), "calibration")

    def _zero_copy(self, values: dict[str, int]) -> tuple[float, float]:
        marks = [self.backend.record_timed(self.stream)]
        for kernel in ("fill", "evict"):
            self._launch(kernel, values)
            marks.append(self.backend.record_timed(self.stream))
        self.backend.synchronize(marks[2], "calibration")
        return self.backend.elapsed_ms(marks[0], marks[1]), self.backend.elapsed_ms(marks[1], marks[2])

    def _staged(
        self,
        values: dict[str, int],
        table: list[np.ndarray],
        staging: list[np.ndarray],
        chosen: np.ndarray,
        nbytes: int,
    ) -> tuple[float, float]:
        backend, stream, ring, device = self.backend, self.stream, self.host_staging, self.staging.address

        start = time.perf_counter()
        backend.host_writes(ring.address, nbytes)
        for to, of in zip(staging, table, strict=True):
            self.host.copy_rows(to, None, of, chosen)
        gathered = time.perf_counter() - start

        marks = [backend.record_timed(stream)]
        backend.copy(device, ring.address, nbytes, "h2d", stream)
        self._launch("fill", values)
        marks.append(backend.record_timed(stream))
        self._launch("evict", values)
        backend.copy(ring.address, device, nbytes, "d2h", stream)
        marks.append(backend.record_timed(stream))
        backend.synchronize(marks[2], "calibration")

        start = time.perf_counter()
        backend.host_reads(ring.address, nbytes)
        for to, of in zip(table, staging, strict=True):
            self.host.copy_rows(to, chosen, of, None)
        scattered = time.perf_counter() - start
        fill, evict = backend.elapsed_ms(marks[0], marks[1]), backend.elapsed_ms(marks[1], marks[2])
        return 1e3 * gathered + fill, evict + 1e3 * scattered

    def _launch(self, kernel: str, values: dict[str, int]) -> None:
        vec = 4 if values["dim"] % 4 == 0 else 1
        if kernel == "fill":
            values = values | {"copied": values["count"], "tables": 0, "initial_state": 0}
        grid = signatures.blocks(vec, values["count"])
        self.backend.launch(kernel, (vec,), grid, signatures.pack(kernel, values), self.stream)
