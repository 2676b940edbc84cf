"""The CUDA backend without a GPU: what it asks of CuPy and torch, what errors become, how kernels are kept.

CuPy and torch.cuda are faked only as far as their documented behaviour goes.  What needs a GPU is in the tests
marked `gpu`, at the end.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cdlrm.driver import cubin, pinned, signatures
from cdlrm.driver.cuda import STICKY, CudaBackend
from cdlrm.errors import CompileError, DeviceError, DeviceMemoryError, PinError

ROOT = Path(__file__).resolve().parent.parent


class CudaError(RuntimeError):
    """As CuPy's: the name and the text of the error, its number in `status`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


ILLEGAL = CudaError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
INVALID = CudaError(1, "cudaErrorInvalidValue: invalid argument")


class FakeNvrtc:
    """NVRTC for three architectures that counts what it compiles."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str, tuple[str, ...]]] = []
        self.programs: dict[int, list[str]] = {}
        self.log = ""
        self.version = (13, 0)

    def getVersion(self) -> tuple[int, int]:
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (75, 90, 120)

    def createProgram(self, text: str, file: str, headers: tuple[()], names: tuple[()]) -> int:
        self.programs[len(self.programs) + 1] = [text, file]
        return len(self.programs)

    def addNameExpression(self, program: int, expression: str) -> None:
        self.programs[program].append(expression)

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        if self.log:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        text, file, expression = self.programs[program]
        self.compiled.append((file, expression, options))

    def getCUBIN(self, program: int) -> bytes:
        return b"\0cubin\n" + self.programs[program][2].encode()

    def getPTX(self, program: int) -> bytes:
        return b"ptx " + self.programs[program][2].encode()

    def getLoweredName(self, program: int, expression: str) -> str:
        return "_Z" + expression

    def getProgramLog(self, program: int) -> str:
        return self.log

    def destroyProgram(self, program: int) -> None:
        self.programs[program] = []


class FakeCuda:
    """CuPy's calls, recorded; `error` is raised by the next one."""

    memcpyDefault = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: RuntimeError | None = None
        self.live: dict[int, int] = {}
        self.nvrtc = FakeNvrtc()
        self.runtime = self
        self.devices: list[int] = []

    def _do(self, *call: Any) -> None:
        assert self.devices, "a call outside of the device"
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(call)

    def Device(self, index: int) -> Any:
        cuda = self

        class Device:
            def __enter__(self) -> None:
                cuda.devices.append(index)

            def __exit__(self, *error: object) -> None:
                cuda.devices.pop()

        return Device()

    def ExternalStream(self, pointer: int, index: int) -> Any:
        return SimpleNamespace(ptr=pointer, device_id=index)

    def Module(self) -> Any:
        loaded: list[bytes] = []

        def get_function(symbol: str) -> Any:
            def launch(grid: tuple[int], block: tuple[int], args: tuple[Any, ...], stream: Any) -> None:
                self._do("launch", symbol, grid, block, args, stream.ptr)

            launch.image = loaded[0]  # type: ignore[attr-defined]
            return launch

        return SimpleNamespace(load=loaded.append, get_function=get_function)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self._do("copy", target, source, size, kind, stream)

    def memsetAsync(self, target: int, value: int, size: int, stream: int) -> None:
        self._do("set", target, value, size, stream)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self._do("register", address, size, flags)
        self.live[address] = size

    def hostUnregister(self, address: int) -> None:
        self._do("unregister", address)
        del self.live[address]

    def pointerGetAttributes(self, address: int) -> Any:
        return SimpleNamespace(devicePointer=address)


class FakeEvent:
    """torch.cuda.Event; `error` is raised by whatever is called next on any."""

    error: RuntimeError | None = None

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.stream = enable_timing, None

    def _do(self) -> None:
        if FakeEvent.error is not None:
            error, FakeEvent.error = FakeEvent.error, None
            raise error

    def record(self, stream: Any) -> None:
        self._do()
        self.stream = stream

    def query(self) -> bool:
        self._do()
        return True

    def synchronize(self) -> None:
        self._do()

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed and other.timed
        return 1.5


class FakeStream:
    def __init__(self, device: Any = None, pointer: int = 77) -> None:
        self.cuda_stream, self.waited = pointer, []

    def wait_event(self, event: FakeEvent) -> None:
        event._do()
        self.waited.append(event)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    current = FakeStream(pointer=0)
    for name, value in {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "current_stream": lambda device: current,
        "get_device_capability": lambda device: (9, 0),
        "mem_get_info": lambda device: (1000, 5000),
        "memory_reserved": lambda device: 700,
        "memory_allocated": lambda device: 200,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setenv("CDLRM_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(FakeEvent, "error", None)
    return FakeCuda()


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


# --- compiling and keeping ---


def test_a_kernel_that_does_not_compile_shows_the_log(backend: CudaBackend, cuda: FakeCuda) -> None:
    cuda.nvrtc.log = 'fill.cu(12): error: identifier "oops" is undefined\n1 error detected\n'
    with pytest.raises(CompileError) as caught:
        backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())
    assert caught.value.log == cuda.nvrtc.log.strip() and str(caught.value).endswith(caught.value.log)
    assert "kernel fill<4> of fill.cu" in str(caught.value) and "compute capability 9.0" in str(caught.value)
    cuda.nvrtc.log = ""
    backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())  # nothing half-made was kept


def test_kernels_are_kept_and_compiled_anew_when_anything_changes(cuda: FakeCuda) -> None:
    nvrtc = cuda.nvrtc
    first = cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90)
    assert first == ("_Zk<1>", b"\0cubin\nk<1>")
    assert cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90) == first and len(nvrtc.compiled) == 1
    assert len(list(cubin.cache_dir().iterdir())) == 1
    cubin.load_code(nvrtc, "other text", "x.cu", "k<1>", 90)
    cubin.load_code(nvrtc, "text", "x.cu", "k<2>", 90)
    cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 75)
    nvrtc.version = (13, 1)
    cubin.load_code(nvrtc, "text", "x.cu", "k<1>", 90)
    assert len(nvrtc.compiled) == 5 and len(list(cubin.cache_dir().iterdir())) == 5


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:70] + b"?" + data[71:]]
)
def test_a_damaged_file_is_compiled_anew(cuda: FakeCuda, damage: Any) -> None:
    first = cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90)
    (file,) = cubin.cache_dir().iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90) == first
    assert len(cuda.nvrtc.compiled) == 2 and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_time_only(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CDLRM_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with caplog.at_level(logging.WARNING, "cdlrm"):
        assert cubin.load_code(cuda.nvrtc, "text", "x.cu", "k<1>", 90).symbol == "_Zk<1>"
    assert "CDLRM_CACHE_DIR" in caplog.text


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDLRM_CACHE_DIR", "/a")
    assert cubin.cache_dir() == Path("/a")
    monkeypatch.delenv("CDLRM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cubin.cache_dir() == Path("/b/cdlrm/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cubin.cache_dir() == Path.home() / ".cache/cdlrm/kernels"


def test_architectures(cuda: FakeCuda) -> None:
    nvrtc = cuda.nvrtc
    assert cubin.architecture(nvrtc, 90) == ("--gpu-architecture=sm_90", True)
    assert cubin.architecture(nvrtc, 103) == ("--gpu-architecture=compute_90", False)
    assert cubin.compile_code(nvrtc, "text", "x.cu", "k<1>", 121).image == b"ptx k<1>"
    with pytest.raises(CompileError) as caught:
        cubin.architecture(nvrtc, 70)
    text = one_sentence(caught.value)
    assert "NVRTC 13.0" in text and "7.5 and higher" in text and "has 7.0" in text and "cuda12" in text


def test_no_nvrtc(backend: CudaBackend, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError('Failure finding "libnvrtc.so.13":\n No such file')

    monkeypatch.setattr(cuda.nvrtc, "getVersion", missing)
    with pytest.raises(CompileError) as caught:
        backend.launch("fill", (4,), 1, some_args("fill"), backend.compute_stream())
    assert "cdlrm[cuda13]" in one_sentence(caught.value) and "libnvrtc.so.13" in str(caught.value)


def real_nvrtc() -> Any:
    """CuPy's binding, which needs no GPU."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    return cupy.cuda.nvrtc


def test_cupys_nvrtc_compiles_every_kernel_without_a_gpu() -> None:
    from cdlrm.driver.sources import source

    nvrtc = real_nvrtc()
    for name, kernel in signatures.KERNELS.items():
        expression = signatures.expression(name, kernel.variants[0])
        code = cubin.compile_code(nvrtc, source(kernel.file), kernel.file, expression, 90)
        assert kernel.function in code.symbol and code.image.startswith(b"\x7fELF")


def test_options_keep_subnormal_numbers_and_contract_nothing() -> None:
    nvrtc = real_nvrtc()
    text = "__global__ void k(float* a, float b, float c) { a[0] = a[0] * b + c; a[1] = a[1] / b; a[2] = sqrtf(a[2]); }"
    newest = max(int(arch) for arch in nvrtc.getSupportedArchs())
    ptx = cubin.compile_code(nvrtc, text, "k.cu", "k", newest + 1).image.decode()
    assert ".ftz" not in ptx and "fma" not in ptx and ".approx" not in ptx
    for instruction in ("mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"):
        assert instruction in ptx
    with pytest.raises(CompileError, match="oops"):
        cubin.compile_code(nvrtc, "__global__ void k() { oops; }", "k.cu", "k", 90)


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
