"""Parts (c) and (d) of `device_check.py`: how fast records move over the link, and lookup and update in memory.

(c) Fill and evict by record size, zero copy (the kernel reads and writes pinned host memory) and staged (one DMA and a
kernel that scatters or gathers on the device; the host's own gather beside it), against a sequential kernel copy and
the copy engine; each direction and both at once.  GB/s are those of records moved (both directions: their sum).
(d) MBU: bytes that must be read or written / time, as a share of what a device-to-device copy reaches.
Rows and slots are random and distinct, so that no cache helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from device_common import Setup, device_ms, wall_ms, work_streams

from cdlrm.driver.backend import Backend, DeviceBuffer, PinnedBuffer, Stream
from cdlrm.driver.cpu import CpuDriver
from cdlrm.driver.signatures import OPTIMIZERS, blocks, pack, steps_held

RECORD_BYTES = (64, 128, 256, 512, 1024, 2048)
VEC = 4
COPY_TARGET, COPY_TARGET_FROM, MBU_TARGET = 0.9, 256, 0.75
COPY_GRID = 1024  # blocks of a sequential copy: more than any device runs at once
Issue = Callable[[Stream], None]


def upload(backend: Backend, array: np.ndarray) -> DeviceBuffer:
    """An array on the device, through pinned memory."""
    stream, pinned, buffer = work_streams(backend)[0], backend.pinned(max(array.nbytes, 1)), backend.alloc(array.nbytes)
    backend.host_writes(pinned.address, array.nbytes)
    pinned.array[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    backend.copy(buffer.address, pinned.address, array.nbytes, "h2d", stream)
    backend.synchronize(backend.record(stream), "device_check")
    return buffer


def zeros(backend: Backend, nbytes: int) -> DeviceBuffer:
    """Device memory of zeros."""
    stream, buffer = work_streams(backend)[0], backend.alloc(nbytes)
    backend.clear(buffer.address, nbytes, stream)
    backend.synchronize(backend.record(stream), "device_check")
    return buffer


def both_at_once(backend: Backend, one: Issue, other: Issue) -> Issue:
    """Issues `one` on the stream given and `other` on the second, between the same two events."""
    second = work_streams(backend)[1]

    def issue(stream: Stream) -> None:
        backend.wait(second, backend.record(stream))
        one(stream)
        other(second)
        backend.wait(stream, backend.record(second))

    return issue


class Link:
    """Pinned host memory, device memory, and random places in both, for records of one size."""

    def __init__(
        self, backend: Backend, host: PinnedBuffer, home: PinnedBuffer, device: DeviceBuffer, size: int
    ) -> None:
        """`host`: read by fills; `home`: written by evicts; half of each record's places are used."""
        self.backend, self.host, self.home, self.device = backend, host, home, device
        self.floats, self.places = size // 4, host.array.size // size
        self.count = self.places // 2
        self.nbytes = self.count * size
        rng = np.random.default_rng(size)
        self.host_rows = rng.permutation(self.places)[: self.count]
        self.rows = upload(backend, self.host_rows.astype(np.int64))
        slots = rng.permutation(self.places).astype(np.int32)
        self.slots = {"fill": upload(backend, slots[: self.count]), "evict": upload(backend, slots[self.count :])}
        self.staged = {kernel: zeros(backend, self.nbytes) for kernel in self.slots}
        self.staging = {kernel: backend.pinned(self.nbytes) for kernel in self.slots}
        for staging in self.staging.values():
            backend.host_writes(staging.address, self.nbytes)
            staging.array[:] = 0

    def _launch(self, kernel: str, home: int, staged: int, stream: Stream) -> None:
        values: dict[str, Any] = {
            "weight": self.device.address, "weight_stride": self.floats, "state_stride": 0, "home_weight": home,
            "home_weight_stride": self.floats, "home_state_stride": 0, "rows": self.rows.address,
            "slots": self.slots[kernel].address, "count": self.count, "staged": staged, "dim": self.floats,
            "state_width": 0,
        }  # fmt: skip
        if kernel == "fill":
            values |= {"copied": self.count, "tables": 0, "initial_state": 0.0}
        self.backend.launch(kernel, (VEC,), blocks(VEC, self.count), pack(kernel, values), stream)

    def fill(self, stream: Stream) -> None:
        self._launch("fill", self.host.address, 0, stream)

    def evict(self, stream: Stream) -> None:
        self._launch("evict", self.home.address, 0, stream)

    def staged_fill(self, stream: Stream) -> None:
        staged = self.staged["fill"].address
        self.backend.copy(staged, self.staging["fill"].address, self.nbytes, "h2d", stream)
        self._launch("fill", staged, 1, stream)

    def staged_evict(self, stream: Stream) -> None:
        staged = self.staged["evict"].address
        self._launch("evict", staged, 1, stream)
        self.backend.copy(self.staging["evict"].address, staged, self.nbytes, "d2h", stream)

    def host_gather(self, driver: CpuDriver) -> None:
        source = self.host.array[: self.places * self.floats * 4].view(np.float32).reshape(self.places, self.floats)
        staging = self.staging["fill"]
        self.backend.host_writes(staging.address, self.nbytes)
        driver.copy_rows(staging.array.view(np.float32).reshape(-1, self.floats), None, source, self.host_rows)


def check_link(setup: Setup) -> None:
    """Part (c)."""
    backend, report = setup.backend, setup.report
    if backend is None:
        return report.left_out("c", "fill and evict", f"device {setup.device!r} has no link")
    nbytes = 1 << 30 if setup.full else 1 << 14
    nbytes = min(nbytes, setup.free_bytes()[0] // 6 // 4096 * 4096, setup.free_bytes()[1] // 8 // 4096 * 4096)
    host, home, device = backend.pinned(nbytes), backend.pinned(nbytes), zeros(backend, nbytes)
    for buffer in (host, home):
        backend.host_writes(buffer.address, nbytes)
        buffer.array[:] = 1

    def measure(name: str, one: Issue, other: Issue, moved: int, **at: Any) -> dict[str, float]:
        rates = {
            "to the device": moved / device_ms(backend, one) / 1e6,
            "to the host": moved / device_ms(backend, other) / 1e6,
            "both": 2 * moved / device_ms(backend, both_at_once(backend, one, other)) / 1e6,
        }
        for direction, rate in rates.items():
            report.figure("c", name, rate, "GB/s", direction=direction, **at)
        return rates

    def kernel_copy(target: int, source: int) -> Issue:
        args = pack("stream_copy", {"target": target, "source": source, "vectors": half // 16})
        return lambda stream: backend.launch("stream_copy", (), COPY_GRID if setup.full else 4, args, stream)

    half = nbytes // 2  # the other half of the device is written at the same time
    behind = device.address + half
    measure("copy engine", lambda s: backend.copy(device.address, host.address, half, "h2d", s),
            lambda s: backend.copy(home.address, behind, half, "d2h", s), half)  # fmt: skip
    sequential = measure("sequential kernel copy", kernel_copy(device.address, host.address),
                         kernel_copy(home.address, behind), half)  # fmt: skip
    driver = CpuDriver()
    for size in RECORD_BYTES if setup.full else RECORD_BYTES[::3]:
        if setup.out_of_time("c", "fill and evict", 4 if setup.full else 0, record_bytes=size):
            continue
        link = Link(backend, host, home, device, size)
        zero_copy = measure("zero copy", link.fill, link.evict, link.nbytes, record_bytes=size)
        for direction in ("to the device", "to the host"):
            least = COPY_TARGET if size >= COPY_TARGET_FROM and direction == "to the device" else None
            share = zero_copy[direction] / sequential[direction]
            report.figure("c", "zero copy / sequential kernel copy", share, "share", least=least, direction=direction,
                          record_bytes=size)  # fmt: skip
        measure("staged, on the device", link.staged_fill, link.staged_evict, link.nbytes, record_bytes=size)
        gathered = link.nbytes / wall_ms(lambda: link.host_gather(driver), 3) / 1e6  # noqa: B023 - called at once
        report.figure("c", "staged, gather on the host", gathered, "GB/s", record_bytes=size)
    driver.close()


def check_memory(setup: Setup) -> None:
    """Part (d)."""
    backend, report = setup.backend, setup.report
    if backend is None:
        return report.left_out("d", "lookup and update", f"device {setup.device!r} has no kernels")
    nbytes = min(1 << 30 if setup.full else 1 << 14, setup.free_bytes()[0] // 8 // 4096 * 4096)
    table = zeros(backend, nbytes)
    rate = _copy_rate(backend, table, nbytes)
    report.figure("d", "device copy, read and written", rate, "GB/s")
    for dim in (32, 64, 128) if setup.full else (32,):
        for per_bag in (1, 10):
            at: dict[str, Any] = {"dim": dim, "ids_per_bag": per_bag}
            for optimizer in (None, "SGD", "RowWiseAdagrad"):
                name = "lookup" if optimizer is None else f"update {optimizer}"
                if setup.out_of_time("d", name, 2 if setup.full else 0, **at):
                    continue
                work = _lookup if optimizer is None else _update
                moved, issue, kept = work(backend, table, nbytes, dim, per_bag, optimizer)
                ms = device_ms(backend, issue)
                report.figure("d", f"{name}, MBU", moved / ms / 1e6 / rate, "share", least=MBU_TARGET, ms=ms, **at)
                del kept


def _copy_rate(backend: Backend, source: DeviceBuffer, nbytes: int) -> float:
    """GB/s, read and written together, of a copy within the device."""
    target = zeros(backend, nbytes)
    ms = device_ms(backend, lambda stream: backend.copy(target.address, source.address, nbytes, "d2d", stream))
    return 2 * nbytes / ms / 1e6


Work = tuple[int, Issue, list[DeviceBuffer]]  # bytes that must move, what to time, buffers to keep until then


def _lookup(backend: Backend, table: DeviceBuffer, nbytes: int, dim: int, per_bag: int, _: str | None) -> Work:
    """Half of the table's rows, each once, summed in bags."""
    rows = nbytes // (4 * dim)
    bags = rows // 2 // per_bag
    lookups = bags * per_bag
    slots = upload(backend, np.random.default_rng(dim).permutation(rows)[:lookups].astype(np.int32))
    starts = upload(backend, np.arange(0, lookups + 1, per_bag, dtype=np.int32))
    columns, mean, out = zeros(backend, 4), zeros(backend, 1), zeros(backend, 4 * dim * bags)
    args = pack("lookup", {
        "weight": table.address, "weight_stride": dim, "slots": slots.address,
        "starts": starts.address if per_bag > 1 else 0, "columns": columns.address, "mean": mean.address,
        "out": out.address, "dim": dim, "batch": bags, "features": 1, "width": 1,
    })  # fmt: skip
    moved = lookups * (4 * dim + 4) + bags * 4 * dim + (starts.nbytes if per_bag > 1 else 0)
    variant, kept = (VEC, steps_held(dim), "float"), [slots, starts, columns, mean, out]
    return moved, lambda stream: backend.launch("lookup", variant, blocks(VEC, bags), args, stream), kept


def _update(backend: Backend, table: DeviceBuffer, nbytes: int, dim: int, per_row: int, optimizer: str | None) -> Work:
    """`per_row` gradients for each of some distinct rows, summed and applied."""
    assert optimizer is not None
    rows = nbytes // (4 * dim)
    distinct = rows // 2 // per_row
    lookups, rng = distinct * per_row, np.random.default_rng(dim)
    state_width = int(optimizer != "SGD")
    buffers = {
        "state": zeros(backend, 4 * rows * state_width),
        "seg_slot": upload(backend, rng.permutation(rows)[:distinct].astype(np.int32)),
        "seg_start": upload(backend, np.arange(0, lookups + 1, per_row, dtype=np.int32)),
        "seg_lookup": upload(backend, rng.permutation(lookups).astype(np.int32)),
        "columns": zeros(backend, 4),
        "grad": zeros(backend, 4 * dim * lookups),
    }  # fmt: skip
    args = pack("update_short", {
        "weight": table.address, "weight_stride": dim, "state_stride": state_width, "distinct": distinct,
        "batch": lookups, "width": 1, "dim": dim, "lr": 0.1, "decay": 0.0, "eps": 1e-8, "rate1": 0.0, "rate2": 0.0,
        "lr64": 0.1, "tables": 0, "number": 0, **{name: buffer.address for name, buffer in buffers.items()},
    })  # fmt: skip
    moved = lookups * (4 * dim + 4) + distinct * (2 * 4 * (dim + state_width) + 4) + 4 * (distinct + 1)
    variant, kept = (OPTIMIZERS[optimizer], VEC, steps_held(dim)), list(buffers.values())
    return moved, lambda stream: backend.launch("update_short", variant, blocks(VEC, distinct), args, stream), kept
