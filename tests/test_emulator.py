"""The emulated backend: what it allows has one result whatever the order; what it must find, it finds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulator.backend import EmulatedBackend
from emulator.memory import AccessError, UndeclaredWriteError
from emulator.programs import WORDS, Program, backend, bytes_at, run_on_host, stream_copy
from emulator.streams import STYLES
from emulator.watch import RaceError

from cdlrm.driver import signatures

SEEDS = 2000


@pytest.mark.parametrize("mistakes", [0.0, 0.1])
def test_races_are_found_exactly_where_nothing_orders_them_and_else_results_are_those_of_the_program(
    mistakes: float,
) -> None:
    found, styles = 0, set()
    for seed in range(SEEDS):
        program = Program(seed, mistakes)
        styles.add(program.device.style)
        try:
            program.run(12)
        except RaceError:
            assert program.race, seed
            found += 1
            continue
        assert not program.race, seed
        for buffer, model in zip(program.held, program.model, strict=True):
            assert (bytes_at(program.device, buffer.address, 4 * WORDS).view(np.int32) == model).all(), seed
        program.device.close()
    assert styles == set(STYLES)
    assert found == 0 if mistakes == 0.0 else SEEDS // 20 < found < SEEDS


# --- what is planted is caught, in whatever order the operations ran ---


@pytest.mark.parametrize("style", STYLES)
def test_a_missing_event_wait_is_caught_and_both_sides_are_named(style: str) -> None:
    for forgotten in (False, True):
        device = backend(style=style)
        compute, transfer = device.compute_stream(), device.new_stream()
        cache, out, staging = device.alloc(64), device.alloc(64), device.pinned(64)
        staging.array[:] = 7
        device.wait(transfer, device.record(compute))  # it is new memory
        device.copy(cache.address, staging.address, 64, "h2d", transfer)
        event = device.record(transfer)
        if not forgotten:
            device.wait(compute, event)
            stream_copy(device, out.address, cache.address, 4, compute)
            device.synchronize(device.record(compute), "test")
            assert (bytes_at(device, out.address, 64) == 7).all()
            continue
        with pytest.raises(RaceError) as error:
            stream_copy(device, out.address, cache.address, 4, compute)
            device.synchronize(device.record(compute), "test")
            device.synchronize(event, "test")
        for part in ("h2d copy", "parameter target", "stream_copy", "parameter source", "stream compute", "[0, 64)"):
            assert part in str(error.value)
        with pytest.raises(RaceError, match="h2d copy"):  # it stays
            device.alloc(4)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("hand_over", [False, True])
def test_a_reused_slot_of_pinned_memory_is_caught(style: str, hand_over: bool) -> None:
    """Also after `hand_over`, which on a device waits for nothing."""
    device = backend(style=style)
    compute, cache, ring = device.compute_stream(), device.alloc(64), device.pinned(64)
    device.host_writes(ring.address, 64)
    device.copy(cache.address, ring.address, 64, "h2d", compute)
    event = device.record(compute)
    if hand_over:
        device.hand_over(compute)
    with pytest.raises(RaceError, match="host.*h2d copy|h2d copy.*host"):
        device.host_writes(ring.address + 60, 4)
        device.synchronize(event, "test")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by", ["copy", "kernel"])
def test_host_memory_that_the_host_reads_before_the_device_wrote_it_is_caught(style: str, by: str) -> None:
    """Pinned memory by a copy; a host table by a kernel (zero copy)."""
    device = backend(style=style)
    compute, cache, ring, table = device.compute_stream(), device.alloc(64), device.pinned(64), np.zeros(16, np.int32)
    home = device.register(table)
    device.clear(cache.address, 64, compute)
    if by == "copy":
        device.copy(ring.address, cache.address, 64, "d2h", compute)
    else:
        stream_copy(device, home, cache.address, 4, compute)
    event = device.record(compute)
    with pytest.raises(RaceError, match="the host reads"):
        device.host_reads(ring.address if by == "copy" else home, 4)
        device.synchronize(event, "test")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({1: 3}, "'first_number' is i32.*int 3 as int64"),
        ({0: np.int32(1)}, "'first' is ptr"),
        ({5: np.float32(1)}, "'number' is i32"),
        ({5: True}, "'number' is i32"),
    ],
)
def test_an_argument_of_the_wrong_type_is_caught(change: dict[int, Any], named: str) -> None:
    device = backend()
    flags = device.alloc(12)
    where = {"first": flags.address, "second": flags.address + 4, "flag": flags.address + 8}
    args = list(signatures.pack("combine", {**where, "first_number": 1, "second_number": 1, "number": 1}))
    device.launch("combine", (), 1, tuple(args), device.compute_stream())
    for at, value in change.items():
        args[at] = value
    with pytest.raises(TypeError, match=named):
        device.launch("combine", (), 1, tuple(args), device.compute_stream())


def test_use_after_free_is_caught_and_freed_memory_is_poisoned() -> None:
    device = backend(style="early")
    buffer, other, compute = device.alloc(64), device.alloc(64), device.compute_stream()
    device.clear(buffer.address, 64, compute)
    device.synchronize(device.record(compute), "test")
    region = device.memory.at(buffer.address)
    assert region is not None and (region.data == 0).all()
    del buffer
    device.hand_over(compute)
    assert (region.data == 0xFF).all()
    with pytest.raises(AccessError, match="after it was freed"):
        stream_copy(device, other.address, region.start, 1, compute)


def test_accesses_outside_of_memory_are_caught() -> None:
    def fails(what: str, act: Callable[[EmulatedBackend, Any, Any, Any], Any]) -> None:
        device = backend(style="early")
        buffer, other = device.alloc(64), device.alloc(64)
        device.clear(other.address, 64, device.compute_stream())
        with pytest.raises(AccessError, match=what):
            act(device, buffer, other, device.compute_stream())

    array = np.zeros(16, np.float32)

    def unregistered(device: EmulatedBackend, buffer: Any, other: Any, stream: Any) -> None:
        address = device.register(array)
        assert address == array.ctypes.data
        stream_copy(device, other.address, address, 4, stream)
        device.synchronize(device.record(stream), "test")
        device.unregister(array)
        stream_copy(device, other.address, address, 4, stream)

    fails("no memory of the device", unregistered)
    fails("no memory of the device", lambda d, a, b, s: stream_copy(d, a.address, 0x1000, 1, s))
    fails(r"bytes \[16, 80\) of device", lambda d, a, b, s: stream_copy(d, a.address + 16, b.address, 4, s))
    fails("pass the end", lambda d, a, b, s: d.copy(a.address, b.address, 68, "d2d", s))
    fails("h2d copy: its source is device", lambda d, a, b, s: d.copy(a.address, b.address, 4, "h2d", s))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("waits", [True, False])
def test_device_memory_ends_in_the_order_of_the_compute_stream(style: str, waits: bool) -> None:
    """As torch's allocator has it: the work of another stream on it must come before, by an event."""
    device = backend(style=style)
    compute, transfer = device.compute_stream(), device.new_stream()
    buffer = device.alloc(64)
    device.clear(buffer.address, 64, compute)
    device.wait(transfer, device.record(compute))
    device.clear(buffer.address, 64, transfer)
    event = device.record(transfer)
    if waits:
        device.wait(compute, event)
    before = device.free_bytes()
    del buffer
    if waits:
        assert device.free_bytes() == before + 64
        device.hand_over(compute)
        device.synchronize(device.record(compute), "test")
        assert not device.memory.live("device")
        return
    with pytest.raises((RaceError, AccessError), match="the end of memory.*clear|clear.*after it was freed"):
        device.synchronize(device.record(compute), "test")
        device.synchronize(event, "test")


def test_new_device_memory_may_still_be_used_by_the_compute_stream() -> None:
    device = backend(style="early")
    with pytest.raises(RaceError, match="clear"):
        device.clear(device.alloc(64).address, 64, device.new_stream())


@pytest.mark.parametrize("style", STYLES)
def test_pinned_memory_dropped_with_work_pending_on_it_is_caught(style: str) -> None:
    device = backend(style=style)
    buffer, ring, compute = device.alloc(64), device.pinned(64), device.compute_stream()
    device.copy(buffer.address, ring.address, 64, "h2d", compute)
    event = device.record(compute)
    del ring
    with pytest.raises((RaceError, AccessError), match="the end of memory.*h2d copy|h2d copy.*after it was freed"):
        device.synchronize(event, "test")


@pytest.mark.parametrize("room", [32, 16])
def test_a_write_that_is_not_declared_is_caught(room: int) -> None:
    """In the allocation, and right after it."""

    def wrong(kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> None:
        run_on_host(kernel, variant, grid, args)
        ctypes.memset(int(args[0]) + 16, 1, 1)

    device = backend(run=wrong, style="early")
    source, target = device.alloc(16), device.alloc(room)
    with pytest.raises(UndeclaredWriteError, match="stream_copy.*changed 1 bytes.*first at byte 16"):
        stream_copy(device, target.address, source.address, 1, device.compute_stream())


def test_a_write_through_a_tensor_of_torchs_own_is_caught() -> None:
    device = backend(style="early")
    tensor = torch.zeros(4)
    with pytest.raises(AccessError, match=r"use output\(\)"):
        stream_copy(device, device.address(tensor), device.address(tensor), 1, device.compute_stream())
