"""The CUDA backend without a GPU: what it asks of CuPy and torch, and what errors become.

What needs a GPU is in test_gpu.py.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import DEVICES, ILLEGAL, INVALID, CudaError, FakeCuda, FakeEvent, FakeStream, pretend_cuda

from cdlrm.driver import pinned, signatures
from cdlrm.driver.cuda import STICKY, CudaBackend
from cdlrm.errors import CompileError, DeviceError, DeviceMemoryError, PinError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    return pretend_cuda(monkeypatch, tmp_path)


@pytest.fixture
def backend(cuda: FakeCuda) -> Iterator[CudaBackend]:
    made = CudaBackend(1, SimpleNamespace(cuda=cuda))
    yield made
    made.close()


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and text.endswith(".") and ".." not in text
    return text


# --- launches ---


def some_args(kernel: str) -> tuple[Any, ...]:
    return signatures.pack(
        kernel, {name: 0 if kind == "ptr" else 1 for name, kind in signatures.KERNELS[kernel].parameters}
    )


@pytest.mark.parametrize("kernel", list(signatures.KERNELS))
def test_launch_passes_what_it_was_given(backend: CudaBackend, cuda: FakeCuda, kernel: str) -> None:
    variant, args, stream = signatures.KERNELS[kernel].variants[-1], some_args(kernel), backend.new_stream()
    backend.launch(kernel, variant, 12345, args, stream)
    symbol = "_Z" + signatures.expression(kernel, variant)
    (call,) = cuda.calls
    assert call == ("launch", symbol, (12345,), (signatures.BLOCK_THREADS,), args, 77)
    assert call[4] is args
    signatures.check(kernel, call[4])
    assert backend.traffic.launches == {kernel: 1}


def test_a_variant_is_compiled_once_and_only_when_it_is_launched(backend: CudaBackend, cuda: FakeCuda) -> None:
    stream = backend.compute_stream()
    for variant in ((4,), (1,), (4,), (4,)):
        backend.launch("fill", variant, 1, some_args("fill"), stream)
    assert [expression for _, expression, _ in cuda.nvrtc.compiled] == ["fill<4>", "fill<1>"]
    for _, _, options in cuda.nvrtc.compiled:
        assert {"--fmad=false", "--ftz=false", "--gpu-architecture=sm_90"} <= set(options)
    assert backend.traffic.launches == {"fill": 4}


def test_a_launch_of_no_blocks_is_nothing_and_too_many_are_refused(backend: CudaBackend, cuda: FakeCuda) -> None:
    backend.launch("fill", (4,), 0, some_args("fill"), backend.compute_stream())
    assert not cuda.calls and not cuda.nvrtc.compiled and not backend.traffic.launches
    with pytest.raises(DeviceError, match="2,147,483,648 blocks"):
        backend.launch("fill", (4,), 2**31, some_args("fill"), backend.compute_stream())


# --- streams, events, copies ---


def test_streams_and_events_are_torchs(backend: CudaBackend) -> None:
    assert backend.compute_stream() is torch.cuda.current_stream(backend.device)
    stream = backend.new_stream()
    event = backend.record(stream)
    assert not event.event.timed and event.event.stream is stream
    backend.wait(backend.compute_stream(), event)
    assert backend.compute_stream().waited == [event.event]
    assert backend.is_done(event)
    backend.synchronize(event, "test")
    assert backend.traffic.synchronizations == {"test": 1}
    first, last = backend.record_timed(stream), backend.record_timed(stream)
    assert backend.elapsed_ms(first, last) == 1.5


def test_copies_and_clears(backend: CudaBackend, cuda: FakeCuda) -> None:
    stream = backend.new_stream()
    backend.copy(1000, 2000, 64, "h2d", stream)
    backend.copy(1000, 2000, 32, "d2h", stream)
    backend.copy(1000, 2000, 0, "d2d", stream)
    backend.clear(500, 16, stream)
    backend.clear(500, 0, stream)
    assert cuda.calls == [("copy", 1000, 2000, 64, 4, 77), ("copy", 1000, 2000, 32, 4, 77), ("set", 500, 0, 16, 77)]
    assert backend.traffic.copies == {"h2d": 1, "d2h": 1}
    assert backend.traffic.copied_bytes == {"h2d": 64, "d2h": 32}


def test_a_copy_does_not_cross_pieces_that_were_registered_apart(
    backend: CudaBackend, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = pinned.mmap.PAGESIZE
    table = pinned.host_memory(10 * page)
    monkeypatch.setattr("cdlrm.driver.cuda.pin", lambda *args: pinned.pin(*args, piece_bytes=4 * page))
    host = backend.register(table)
    assert host == table.ctypes.data and list(cuda.live.values()) == [4 * page, 4 * page, 2 * page]
    for kind, offset, size, parts in (
        ("h2d", 0, 10 * page, [(0, 4 * page), (4 * page, 4 * page), (8 * page, 2 * page)]),
        ("d2h", 4 * page - 8, 16, [(0, 8), (8, 8)]),
        ("h2d", 4 * page, 4 * page, [(0, 4 * page)]),
        ("d2h", 100, 50, [(0, 50)]),
    ):
        cuda.calls.clear()
        target, source = (9_000_000, host + offset) if kind == "h2d" else (host + offset, 9_000_000)
        backend.copy(target, source, size, kind, backend.new_stream())
        assert [call[1:4] for call in cuda.calls] == [(target + at, source + at, part) for at, part in parts]
    assert backend.traffic.copies == {"h2d": 2, "d2h": 2}
    backend.unregister(table)
    assert not cuda.live and not backend._borders


@pytest.mark.parametrize("index", [0, 3])
def test_every_call_enters_the_device_in_any_thread(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """A thread begins on GPU 0, and nothing of ours tells it otherwise (the fakes refuse calls outside)."""
    empty = torch.empty

    def on_cpu(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        DEVICES.check()
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_cpu)
    backend = CudaBackend(index, SimpleNamespace(cuda=cuda))
    first, last, table = FakeStream(pointer=1), FakeStream(pointer=2), pinned.host_memory(5000)

    def work() -> None:
        backend.launch("evict", (4,), 1, some_args("evict"), first)
        begin, event = backend.record_timed(first), backend.record_timed(first)
        backend.wait(last, event)
        backend.copy(1, 2, 64, "h2d", last)
        backend.clear(1, 64, last)
        assert backend.is_done(event) and backend.elapsed_ms(begin, event) == 1.5
        backend.synchronize(event, "test")
        backend.alloc(10)
        backend.output((3,), torch.float32)
        backend.free_bytes()
        backend.pinned(100)
        backend.register(table)
        backend.unregister(table)
        gc.collect()

    failures: list[BaseException] = []

    def thread() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=thread)
    helper.start()
    helper.join()
    assert not failures and cuda.devices == {index} and not DEVICES.entered
    backend.close()


# --- memory ---


def test_pinned_memory_is_unpinned_when_it_is_dropped_or_the_backend_closes(
    backend: CudaBackend, cuda: FakeCuda
) -> None:
    first, second, table = backend.pinned(100), backend.pinned(5000), np.zeros(5000, np.uint8)
    assert first.array.nbytes == 100 and first.address == first.array.ctypes.data
    assert [call[3] for call in cuda.calls] == [pinned.PORTABLE_MAPPED] * 2
    backend.register(table)
    assert len(cuda.live) == 3
    del first
    gc.collect()
    assert sorted(cuda.live.values()) == [5000, 5000]
    backend.close()
    backend.close()
    assert not cuda.live
    assert second.array.nbytes == 5000  # still readable


def test_nothing_is_pinned_for_no_bytes(backend: CudaBackend, cuda: FakeCuda) -> None:
    assert backend.pinned(0).array.nbytes == 0
    empty = np.empty((0, 8), np.float32)
    assert backend.register(empty) == 0
    backend.unregister(empty)
    assert not cuda.calls


def test_a_refused_pin_tells_the_bytes_and_the_remedy(backend: CudaBackend, cuda: FakeCuda) -> None:
    cuda.error = CudaError(2, "cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(PinError) as caught:
        backend.pinned(4096)
    assert "4,096 bytes" in one_sentence(caught.value) and "ulimit -l" in str(caught.value)
    assert not caught.value.sticky and not cuda.live


def test_unpinning_that_fails_while_memory_is_dropped_is_told(
    backend: CudaBackend, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    memory = backend.pinned(100)
    cuda.error = CudaError(713, "cudaErrorHostMemoryNotRegistered: not registered")
    with caplog.at_level(logging.WARNING, "cdlrm"):
        del memory
        gc.collect()
    assert "cudaErrorHostMemoryNotRegistered" in caplog.text and "could not be unpinned" in caplog.text
    caplog.clear()
    lost = backend.pinned(200)
    cuda.error = ILLEGAL  # nothing can be done about it, and it was told before
    with caplog.at_level(logging.INFO, "cdlrm"):
        del lost
        gc.collect()
    assert not caplog.text and cuda.error is None
    cuda.live.clear()


def test_device_memory_is_torchs(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    empty = torch.empty

    def on_cpu(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((shape, dtype, device))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_cpu)
    buffer = backend.alloc(1000)
    assert buffer.nbytes == 1000 and buffer.address != 0 and backend.alloc(0).nbytes == 0
    assert backend.output((3, 4), torch.bfloat16).shape == (3, 4)
    gpu = torch.device("cuda", 1)
    assert asked == [((1000,), torch.uint8, gpu), ((0,), torch.uint8, gpu), ((3, 4), torch.bfloat16, gpu)]
    assert backend.free_bytes() == 1000 + 700 - 200
    with pytest.raises(ValueError, match="cpu"):
        backend.address(empty(3))


def test_no_room_on_the_device(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch, "empty", full)
    for ask in (lambda: backend.alloc(2**31), lambda: backend.output((2**20, 512), torch.float32)):
        with pytest.raises(DeviceMemoryError) as caught:
            ask()
        text = one_sentence(caught.value)
        assert "2,147,483,648 bytes" in text and "1,500 bytes are free" in text and "cache_rows" in text
        assert not caught.value.sticky


# --- errors of the device ---


def test_a_refused_call_is_named_and_not_sticky(backend: CudaBackend, cuda: FakeCuda) -> None:
    stream, args = backend.new_stream(), some_args("evict")
    for words, call in {
        "launching kernel evict<4>": lambda: backend.launch("evict", (4,), 1, args, stream),
        "issuing a copy (h2d, 64 bytes)": lambda: backend.copy(1, 2, 64, "h2d", stream),
        "issuing a clear (64 bytes)": lambda: backend.clear(1, 64, stream),
    }.items():
        cuda.error = INVALID
        with pytest.raises(DeviceError) as caught:
            call()
        assert words in one_sentence(caught.value) and "cudaErrorInvalidValue" in str(caught.value)
        assert not caught.value.sticky and "cuda:1" in str(caught.value)
    assert not backend.traffic.launches and not backend.traffic.copies


def test_failed_work_is_found_later_and_names_what_was_issued_last(backend: CudaBackend, cuda: FakeCuda) -> None:
    stream, other = backend.new_stream(), FakeStream(pointer=88)
    backend.launch("evict", (4,), 1, some_args("evict"), stream)
    event = backend.record(stream)
    backend.copy(1, 2, 64, "h2d", stream)
    text = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported at other calls"
    for last, call in (
        ("kernel evict<4>", lambda: backend.is_done(event)),
        ("kernel evict<4>", lambda: backend.synchronize(event, "checkpoint")),
        ("kernel evict<4>", lambda: backend.wait(other, event)),
        ("a copy (h2d, 64 bytes)", lambda: backend.record(stream)),
    ):
        FakeEvent.error = torch.AcceleratorError(text)
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.sticky and f"last issued on this stream: {last}" in one_sentence(caught.value)
        assert "illegal memory access" in str(caught.value) and "restart" in str(caught.value)
    cuda.error = ILLEGAL
    with pytest.raises(DeviceError) as caught:
        backend.launch("fill", (4,), 1, some_args("fill"), other)
    assert caught.value.sticky and "last issued on this stream: unknown" in str(caught.value)


@pytest.mark.parametrize("code", sorted(STICKY))
def test_sticky_errors_are_known_by_their_number(backend: CudaBackend, code: int) -> None:
    named = torch.AcceleratorError("CUDA error: told in other words")
    named.error_code = code  # type: ignore[attr-defined]
    FakeEvent.error = named
    with pytest.raises(DeviceError) as caught:
        backend.record(backend.new_stream())
    assert caught.value.sticky
    named.error_code = 2  # type: ignore[attr-defined]
    FakeEvent.error = named
    with pytest.raises(DeviceError) as caught:
        backend.record(backend.new_stream())
    assert not caught.value.sticky


def test_a_kernel_that_does_not_compile_shows_the_log(backend: CudaBackend, cuda: FakeCuda) -> None:
    cuda.nvrtc.log = 'fill.cu(12): error: identifier "oops" is undefined\n1 error detected\n'
    with pytest.raises(CompileError) as caught:
        backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())
    assert caught.value.log == cuda.nvrtc.log.strip() and str(caught.value).endswith(caught.value.log)
    assert "kernel fill<4> of fill.cu" in str(caught.value) and "compute capability 9.0" in str(caught.value)
    cuda.nvrtc.log = ""
    backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())  # nothing half-made was kept


def test_no_nvrtc(backend: CudaBackend, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError('Failure finding "libnvrtc.so.13":\n No such file')

    monkeypatch.setattr(cuda.nvrtc, "getVersion", missing)
    with pytest.raises(CompileError) as caught:
        backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())
    assert "cdlrm[cuda13]" in one_sentence(caught.value) and "libnvrtc.so.13" in str(caught.value)


def test_nothing_but_the_backend_imports_cupy() -> None:
    """`import cdlrm` and choosing a device must work with neither CuPy nor a GPU."""
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import cdlrm, cdlrm.driver.cuda, cdlrm.driver.calibrate\n"
        "from cdlrm.driver.choose import choose\n"
        "assert choose('auto').reason.endswith('.')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
