"""CuPy and torch.cuda faked as far as their documented behaviour goes, for the tests of the CUDA backend."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


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


class Devices(threading.local):
    """The GPU that each thread has entered; without one, whatever is called makes a context on GPU 0."""

    def __init__(self) -> None:
        self.entered: list[int] = []

    def check(self) -> None:
        assert self.entered, "a call outside of the device"


DEVICES = Devices()


class FakeDevice:
    """torch.cuda.device."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        DEVICES.entered.append(self.index)

    def __exit__(self, *error: object) -> None:
        DEVICES.entered.pop()


class FakeCuda:
    """CuPy's calls, recorded; `error` is raised by the next one."""

    memcpyDefault = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: RuntimeError | None = None
        self.live: dict[int, int] = {}
        self.nvrtc = FakeNvrtc()
        self.runtime = self
        self.devices: set[int] = set()  # on which calls were made

    def _do(self, *call: Any) -> None:
        DEVICES.check()
        self.devices.add(DEVICES.entered[-1])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(call)

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
        DEVICES.check()
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
        DEVICES.check()
        assert self.timed and other.timed
        return 1.5


class FakeStream:
    def __init__(self, device: Any = None, pointer: int = 77) -> None:
        self.cuda_stream, self.waited = pointer, []

    def wait_event(self, event: FakeEvent) -> None:
        event._do()
        self.waited.append(event)


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """Put the fakes in torch.cuda's place; returns `cupy.cuda`'s."""
    current = FakeStream(pointer=0)
    for name, value in {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "device": FakeDevice,
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
