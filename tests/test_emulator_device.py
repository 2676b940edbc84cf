"""The emulated backend as a device: its memory, torch's tensors, faults, counters and times."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from emulator.backend import EmulatedBackend
from emulator.costs import Costs
from emulator.programs import backend, bytes_at, run_on_host, stream_copy
from emulator.streams import STYLES
from emulator.watch import RaceError

from cdlrm.driver import signatures
from cdlrm.errors import CompileError, DeviceError, DeviceMemoryError, PinError

# --- memory ---


def test_memory_is_poisoned_when_made_after_reuse_and_when_dropped() -> None:
    device = backend()
    compute = device.compute_stream()
    cache, ring = device.alloc(64), device.pinned(64)
    assert cache.address % 256 == 0 and cache.nbytes == 64
    assert np.isnan(ring.array.view(np.float32)).all()
    ring.array[:] = 0
    device.copy(ring.address, cache.address, 64, "d2h", compute)  # a copy of what nobody wrote
    device.synchronize(device.record(compute), "test")
    device.host_reads(ring.address, 64)
    assert np.isnan(ring.array.view(np.float32)).all()
    ring.array[:] = 0
    device.host_reuse(ring.address + 16, 32)
    assert (ring.array[16:48] == 0xFF).all() and (ring.array[:16] == 0).all() and (ring.array[48:] == 0).all()


def test_outputs_are_torchs_and_live_as_long_as_torch_holds_them() -> None:
    device = backend(style="late")
    compute = device.compute_stream()
    before = device.free_bytes()
    out = device.output((3, 4), torch.float32)
    assert out.shape == (3, 4) and torch.isnan(out).all() and not out._is_view()
    assert device.address(out) == out.data_ptr() and device.free_bytes() == before - 48
    region = device.memory.at(out.data_ptr())
    assert region is not None
    row = out[1]
    device.clear(device.address(out), 48, compute)
    assert torch.isnan(row).all()  # nothing has run yet
    device.hand_over(compute)
    assert (row == 0).all()
    device.clear(device.address(out), 48, compute)
    del out
    gc.collect()
    device.free_bytes()
    assert (row == 0).all() and region.live
    del row
    gc.collect()
    device.free_bytes()
    assert region.live and not np.isnan(region.data.view(np.float32)).any()  # work on it is pending: stream order
    device.hand_over(compute)
    assert device.free_bytes() == before and not region.live and (region.data == 0xFF).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert device.output((2, 3), dtype).dtype == dtype
    assert device.output((0, 4), torch.float32).shape == (0, 4)
    device.close()
    device.close()


def test_a_tensor_is_read_as_it_was_when_its_address_was_taken() -> None:
    """Torch goes on at once, as it may: on a device its next work is in stream order."""
    device = backend(style="late")
    compute, out = device.compute_stream(), device.output((4,), torch.float32)
    for number in range(100):
        tensor = torch.full((4,), float(number))
        stream_copy(device, device.address(out), device.address(tensor), 1, compute)
        tensor.zero_()
        del tensor
    device.hand_over(compute)
    assert (out == 99).all()
    assert device.memory.live("tensor")
    device.hand_over(compute)
    assert not device.memory.live("tensor")


def test_torchs_tensors_are_of_the_compute_stream() -> None:
    device = backend()
    transfer, out = device.new_stream(), device.output((4,), torch.float32)
    with pytest.raises(RaceError, match="torch's own before"):
        device.clear(device.address(out), 16, transfer)
        device.hand_over(transfer)


def test_device_memory_has_an_end_and_host_arrays_are_pinned_once() -> None:
    device = backend(device_bytes=100)
    held = device.alloc(60)
    with pytest.raises(DeviceMemoryError, match="50 bytes.*40 are free"):
        device.alloc(50)
    assert device.alloc(0).nbytes == 0
    del held
    device.alloc(90)
    array, empty = np.zeros((5, 4), np.float32), np.zeros((0, 4), np.float32)
    seen: list[tuple[int, int]] = []
    device.register(array, lambda *progress: seen.append(progress))
    assert seen[-1] == (80, 80)
    with pytest.raises(PinError, match="already"):
        device.register(array[1:3])
    device.unregister(array)
    device.register(array[1:3])
    device.register(empty)
    device.unregister(empty)


# --- faults, counters, costs, threads ---


def work(device: EmulatedBackend) -> Any:
    """One of everything; the event after it."""
    compute, array = device.compute_stream(), np.zeros(16, np.float32)
    cache, ring = device.alloc(64), device.pinned(64)
    device.register(array)
    device.host_writes(ring.address, 64)
    ring.array[:] = 1
    device.copy(cache.address, ring.address, 64, "h2d", compute)
    stream_copy(device, array.ctypes.data, cache.address, 4, compute)
    device.held = cache, ring, array  # type: ignore[attr-defined]
    return device.record(compute)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("alloc", DeviceMemoryError),
        ("pinned", PinError),
        ("register", PinError),
        ("launch", DeviceError),
        ("launch:stream_copy", DeviceError),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_the_nth_call_fails_once(what: str, kind: type[DeviceError], n: int) -> None:
    device = backend()
    device.fail_at(what, n)
    for _ in range(n - 1):
        device.synchronize(work(device), "test")
    with pytest.raises(kind) as error:
        work(device)
    assert type(error.value) is kind
    device.synchronize(work(device), "test")
    assert (device.held[2].view(np.uint8) == 1).all()  # type: ignore[attr-defined]


def test_a_kernel_that_does_not_compile_shows_the_log() -> None:
    device = backend()
    device.fail_at("compile", 1)
    with pytest.raises(CompileError) as error:
        work(device)
    assert "stream_copy.cu" in error.value.log and error.value.log in str(error.value)
    device.synchronize(work(device), "test")


@pytest.mark.parametrize("what", ["copy", "copy:h2d", "kernel", "kernel:stream_copy"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ask", ["is_done", "synchronize", "hand_over"])
def test_work_that_fails_is_reported_later_and_for_ever(what: str, style: str, ask: str) -> None:
    device = backend(style=style)
    device.fail_at(what, 1)
    try:
        event = work(device)  # the call itself does not tell
    except DeviceError:
        event = None
        assert style != "late"  # a later call did
    if event is not None:
        with pytest.raises(DeviceError, match="failed"):
            while ask == "is_done" and not device.is_done(event):
                pass
            device.hand_over(device.compute_stream()) if ask == "hand_over" else device.synchronize(event, "test")
    for call in (
        lambda: device.alloc(4),
        lambda: device.record(device.compute_stream()),
        lambda: device.synchronize(event, "test"),
    ):
        with pytest.raises(DeviceError, match="issued earlier"):
            call()
    device.close()


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="no such fault"):
        backend().fail_at("alloca", 1)
    with pytest.raises(ValueError, match="number 1"):
        backend().fail_at("alloc", 0)


def test_work_is_counted() -> None:
    device = backend()
    device.synchronize(work(device), "logging")
    device.copy(0, 0, 0, "h2d", device.compute_stream())  # nothing to do
    device.launch("combine", (), 0, signatures.pack("combine", dict.fromkeys(_NUMBERS, 0)), device.compute_stream())
    assert device.traffic.launches == {"stream_copy": 1}
    assert device.traffic.copies == {"h2d": 1} and device.traffic.copied_bytes == {"h2d": 64}
    assert device.traffic.synchronizations == {"logging": 1}


_NUMBERS = ("first_number", "second_number", "number")


def test_events_tell_the_time_of_the_cost_model() -> None:
    rates = {"h2d": 10.0, "d2h": 10.0, "d2d": 100.0, "device": 100.0, "host_read": 8.0, "host_write": 4.0}
    device = backend(costs=Costs(launch_ms=0.5, gigabytes_per_s=rates))
    compute, transfer = device.compute_stream(), device.new_stream()
    size = 1 << 20
    cache, ring = device.alloc(size), device.pinned(size)
    events = [device.record_timed(compute)]
    for act in (
        lambda: device.copy(cache.address, ring.address, size, "h2d", compute),
        lambda: stream_copy(device, cache.address, ring.address, size // 16, compute),
        lambda: stream_copy(device, ring.address, cache.address, size // 16, compute),
        lambda: device.clear(cache.address, size, compute),
    ):
        act()
        events.append(device.record_timed(compute))
    device.wait(transfer, events[-1])
    events.append(device.record_timed(transfer))
    with pytest.raises(DeviceError, match="wait for them"):
        backend_late = backend(style="late")
        event = backend_late.record_timed(backend_late.compute_stream())
        backend_late.elapsed_ms(event, event)
    device.synchronize(events[-1], "test")
    taken = [device.elapsed_ms(a, b) for a, b in zip(events, events[1:], strict=False)]
    assert taken == pytest.approx([0.5 + size / 1e7, 0.5 + size / 8e6, 0.5 + size / 4e6, 0.5 + size / 1e8, 0.0])


def test_an_unordered_program_has_several_results() -> None:
    """The scheduler does choose: without checks, seeds differ in what a race leaves behind."""
    results = set()
    for seed in range(40):
        device = backend(seed, check=False)
        compute, transfer = device.compute_stream(), device.new_stream()
        cache, ring = device.alloc(16), device.pinned(32)
        ring.array[:16], ring.array[16:] = 1, 2
        device.copy(cache.address, ring.address, 16, "h2d", compute)
        device.copy(cache.address, ring.address + 16, 16, "h2d", transfer)
        for stream in (transfer, compute) if seed % 2 else (compute, transfer):
            device.synchronize(device.record(stream), "test")
        results.add(bytes(bytes_at(device, cache.address, 16)))
    assert results == {b"\1" * 16, b"\2" * 16}


def test_ctrl_c_loses_no_work_and_runs_none_twice() -> None:
    ran = []

    def interrupted(kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> None:
        signal.raise_signal(signal.SIGINT)
        ran.append(int(args[2]))
        run_on_host(kernel, variant, grid, args)

    before = signal.getsignal(signal.SIGINT)
    device = backend(style="late", run=interrupted)
    cache, compute = device.alloc(64), device.compute_stream()
    for vectors in (1, 2):
        stream_copy(device, cache.address, cache.address + 32, vectors, compute)
    event = device.record(compute)
    with pytest.raises(KeyboardInterrupt):
        device.synchronize(event, "test")
    assert ran == [1, 2] and device.is_done(event) and signal.getsignal(signal.SIGINT) is before


def test_an_event_is_told_as_not_done_only_so_often() -> None:
    most = 0
    for seed in range(100):
        device = backend(seed, patience=4)
        buffer = device.alloc(16)
        device.clear(buffer.address, 16, device.compute_stream())
        event, asked = device.record(device.compute_stream()), 0
        device.hand_over(device.compute_stream())
        while not device.is_done(event):
            asked += 1
        most = max(most, asked)
    assert most == 3


def test_threads_may_issue_at_once() -> None:
    device = backend(3, style="random")
    rounds, cells = 200, [device.alloc(16) for _ in range(4)]
    ready: list[threading.Event] = [threading.Event() for _ in range(rounds)]
    events: list[Any] = [None] * rounds
    rings = [device.pinned(16) for _ in range(rounds)]

    def transfer() -> None:
        stream = device.new_stream()
        for number in range(rounds):
            rings[number].array[:] = number
            device.wait(stream, device.record(device.compute_stream()))
            device.copy(cells[number % 4].address, rings[number].address, 16, "h2d", stream)
            events[number] = device.record(stream)
            ready[number].set()

    thread = threading.Thread(target=transfer)
    thread.start()
    for number in range(rounds):
        assert ready[number].wait(60)
        device.wait(device.compute_stream(), events[number])
    thread.join(60)
    device.synchronize(device.record(device.compute_stream()), "test")
    results = [int(bytes_at(device, cell.address, 1)[0]) for cell in cells]
    assert results == [rounds - 4 + k for k in range(4)]
