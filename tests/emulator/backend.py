"""A GPU that is not there: the backend of the tests, which runs every launch on the host in any order that is allowed.

What a device would do silently wrong is raised here: unordered accesses to the same bytes (`RaceError`), accesses
outside of live memory (`AccessError`), bytes written that a kernel does not declare (`UndeclaredWriteError`),
arguments of the wrong type (TypeError).  The first such error is raised again by every later call.
`hand_over` runs what torch is about to read, but orders nothing for the host: a device would not either.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cdlrm.driver import signatures
from cdlrm.driver.backend import Backend, Traffic
from cdlrm.errors import CompileError, DeviceError, DeviceMemoryError, PinError

from .access import Access, accesses, one_range
from .arguments import SCALARS
from .clocks import Clocks
from .costs import Costs
from .entered import Entered
from .faults import Faults
from .library import Calls
from .memory import POISON, AccessError, EmulatedBuffer, EmulatedPinned, EmulatorError, Memory, Region
from .streams import Operation, Scheduler, VirtualEvent, VirtualStream
from .watch import RaceError, Watch

LENT = 64  # copies of torch's tensors kept at least

Runner = Callable[[str, tuple[Any, ...], int, tuple[Any, ...]], None]


class EmulatedBackend(Backend):
    """seed: the order of the streams (style: one of streams.STYLES, else drawn).  check: follow every access;
    without it only argument types are checked and memory is poisoned.  compare: one launch in so many is held to
    the writes that it declares (and the first of each variant; 0: none).  device_bytes: memory that there is.
    patience: is_done says no of an event fewer times than this.
    costs: how long work takes (bytes of kernels are counted if check is set or costs is given).
    run: what runs a launch (default: the compiled kernels)."""

    name = "emulated"
    device = torch.device("cpu")

    def __init__(
        self,
        seed: int = 0,
        *,
        style: str | None = None,
        check: bool = True,
        compare: int = 16,
        device_bytes: int = 1 << 30,
        patience: int = 8,
        costs: Costs | None = None,
        run: Runner | None = None,
    ) -> None:
        self.traffic = Traffic()
        self.faults = Faults()
        self.memory = Memory()
        self.checks, self.compare, self.device_bytes, self.costs = check, compare, device_bytes, costs or Costs()
        self._counts_bytes = check or costs is not None
        self.error: EmulatorError | None = None
        self._clocks = Clocks()
        self._watch = Watch(self.memory, self._clocks)
        self._scheduler = Scheduler(seed, style, patience)
        self._host = VirtualStream(0, "of the host")
        self._current = threading.local()
        self._compute = self.new_stream_named("compute")
        self._entered = Entered(self)
        self._freed: deque[Region] = deque()  # dropped, perhaps in the middle of a call
        self._lent: deque[tuple[int, Region]] = deque()  # copies of torch's tensors
        self._host_ms = 0.0
        self._broken = ""  # the sticky error
        self._seen: set[tuple[str, tuple[Any, ...]]] = set()
        self._compiled: set[tuple[str, tuple[Any, ...]]] = set()
        self._run_kernel = run or Calls()

    @property
    def style(self) -> str:
        return self._scheduler.style

    def fail_at(self, what: str, n: int) -> None:
        """The n-th call of `what` (faults.KINDS) from now on fails (1: the next one)."""
        self.faults.fail_at(what, n)

    # --- streams and events ---

    def new_stream_named(self, name: str) -> VirtualStream:
        return self._scheduler.add(VirtualStream(self._clocks.new_stream(), name))

    def compute_stream(self) -> VirtualStream:
        """One for all threads, but where `current` says otherwise."""
        return getattr(self._current, "stream", self._compute)

    @contextlib.contextmanager
    def current(self, stream: VirtualStream) -> Iterator[None]:
        """torch.cuda.stream(stream): this thread's current stream inside the `with` block."""
        before = self.compute_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def new_stream(self) -> VirtualStream:
        with self._entered:
            return self.new_stream_named(str(self._clocks.streams))

    def record(self, stream: VirtualStream) -> VirtualEvent:
        with self._entered:
            self._alive()
            clock = self._clocks.of(stream.index)
            event = self._scheduler.event(stream, clock)
            operation = Operation(0, clock, stream, "record", self._host_ms)
            operation.records = event
            self._scheduler.issue(operation)
            return event

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        with self._entered:
            self._alive()
            self._clocks.join(stream.index, event.clock)
            operation = Operation(0, event.clock, stream, "wait", self._host_ms)
            operation.awaits = event
            self._scheduler.issue(operation)

    def is_done(self, event: VirtualEvent) -> bool:
        """May say no of what has run: a device might be slower.  Who asks again and again sees it done in the end."""
        with self._entered:
            self._alive()
            self._scheduler.some()
            if not self._clocks.covers(0, event.clock):
                event.patience -= 1
                if event.patience >= 0:
                    return False
            self._scheduler.finish(event)
            self._alive()
            self._clocks.join(0, event.clock)
            return True

    def synchronize(self, event: VirtualEvent, reason: str) -> None:
        with self._entered:
            self._alive()
            self.traffic.synchronizations[reason] += 1
            self._scheduler.finish(event)
            self._alive()
            self._clocks.join(0, event.clock)
            self._host_ms = max(self._host_ms, event.ms)
            self._scheduler.some()

    def record_timed(self, stream: VirtualStream) -> VirtualEvent:
        event = self.record(stream)
        event.timed = True
        return event

    def elapsed_ms(self, first: VirtualEvent, last: VirtualEvent) -> float:
        with self._entered:
            self._alive()
            if not (first.timed and last.timed):
                raise DeviceError("the time between two events was asked for, but record_timed did not make both.")
            if not (first.done and last.done):
                raise DeviceError("the time between two events was asked for before both were done; wait for them.")
            return last.ms - first.ms

    def hand_over(self, stream: VirtualStream) -> None:
        with self._entered:
            self._scheduler.drain(stream)
            self._alive()
            self._scheduler.some()
            while self._lent and self._lent[0][0] < self._compute.issued:
                self._free_in_order(self._lent.popleft()[1])

    # --- memory ---

    def alloc(self, nbytes: int) -> EmulatedBuffer:
        with self._entered:
            self._alive()
            return EmulatedBuffer(self._allocate("device", nbytes), self._freed)

    def _allocate(self, kind: str, nbytes: int) -> Region:
        """Memory of torch's allocator: its last user, as its next one, is the compute stream."""
        free = self.device_bytes - self.memory.device.now()
        if self.faults.hit("alloc") or nbytes > free:
            raise DeviceMemoryError(f"no room for {nbytes} bytes on the device, of which {free} are free.")
        self.memory.device.add(nbytes)
        region = self.memory.allocate(kind, nbytes)
        region.stream = self.compute_stream()
        region.born, _ = self._clocks.next(region.stream.index)
        return region

    def free_bytes(self) -> int:
        with self._entered:
            return self.device_bytes - self.memory.device.now()

    def pinned(self, nbytes: int) -> EmulatedPinned:
        with self._entered:
            if self.faults.hit("pinned"):
                raise PinError(f"{nbytes} bytes of host memory could not be pinned.")
            self.memory.pinned.add(nbytes)
            return EmulatedPinned(self.memory.allocate("pinned", nbytes), self._freed)

    def most_bytes(self) -> tuple[int, int]:
        return self.memory.device.most, self.memory.pinned.most

    def register(self, array: np.ndarray, progress: Callable[[int, int], None] | None = None) -> int:
        with self._entered:
            address = array.ctypes.data
            if self.faults.hit("register") or not array.flags.c_contiguous:
                raise PinError(f"a host array of {array.nbytes} bytes could not be pinned.")
            if array.nbytes:
                if self.memory.overlaps(address, address + array.nbytes):
                    raise PinError(f"a host array of {array.nbytes} bytes is pinned already.")
                self.memory.adopt(array)
                self.memory.pinned.add(array.nbytes)
        if progress is not None:
            progress(array.nbytes, array.nbytes)
        return address

    def unregister(self, array: np.ndarray) -> None:
        with self._entered:
            if array.nbytes:
                region = self.memory.find(array.ctypes.data, array.nbytes, "unregister")
                if region.kind != "registered" or region.nbytes != array.nbytes:
                    raise AccessError(f"unregister: {region} was not registered as this array")
                self.memory.pinned.give_back(region.nbytes)
                self._release(region, self._end(self._host))

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * tensor.element_size()
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        with self._entered:
            self._alive()
            region = self._allocate("output", nbytes)
            held, freed = region.data[:], self._freed  # torch holds `held` as long as any view of the tensor lives
            region.handle = weakref.ref(held, lambda _: freed.append(region))
        return tensor.set_(torch.from_numpy(held).untyped_storage(), 0, shape)  # type: ignore[call-overload]

    def address(self, tensor: torch.Tensor) -> int:
        """An output's own; any other tensor is copied now, as work in stream order would find it, and read-only."""
        if tensor.device != self.device or not tensor.is_contiguous():
            raise AccessError(f"address of a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}")
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return address
        with self._entered:
            region = self.memory.at(address)
            if region is not None and region.kind == "output":
                return address
            region = self.memory.allocate("tensor", nbytes)
            ctypes.memmove(region.start, address, nbytes)
            region.stream = self.compute_stream()
            region.born, _ = self._clocks.next(region.stream.index)
            self._lent.append((self._compute.issued, region))
            if len(self._lent) > LENT and self._lent[0][0] < self._compute.issued:
                self._free_in_order(self._lent.popleft()[1])
            return region.start

    def host_reads(self, address: int, nbytes: int) -> None:
        self._host_access(address, nbytes, "reads")

    def host_writes(self, address: int, nbytes: int) -> None:
        self._host_access(address, nbytes, "writes")

    def host_reuse(self, address: int, nbytes: int) -> None:
        self._host_access(address, nbytes, "reuses")
        if nbytes:
            self.memory.view(address, np.uint8, nbytes, "host_reuse").fill(POISON)

    def _host_access(self, address: int, nbytes: int, verb: str) -> None:
        with self._entered:
            if self.checks and nbytes and not self._broken:
                operation = Operation(*self._clocks.next(0), self._host, f"the host {verb}", self._host_ms)
                self._watch.touch(operation, [one_range("memory", address, nbytes, writes=verb != "reads")])

    # --- work ---

    def copy(self, target: int, source: int, nbytes: int, kind: str, stream: VirtualStream) -> None:
        with self._entered:
            self._alive()
            if nbytes == 0:
                return
            self._check_kind(target, source, nbytes, kind)
            self.traffic.copies[kind] += 1
            self.traffic.copied_bytes[kind] += nbytes
            fails = self.faults.hit("copy", kind)

            def body(operation: Operation) -> float:
                if fails:
                    return self._break(f"{operation} failed")
                self._touch(
                    operation, [one_range("source", source, nbytes), one_range("target", target, nbytes, writes=True)]
                )
                ctypes.memmove(target, source, nbytes)
                return self.costs.copy_ms(kind, nbytes)

            self._issue(stream, f"{kind} copy", body)

    def _check_kind(self, target: int, source: int, nbytes: int, kind: str) -> None:
        for address, host, what in ((source, kind == "h2d", "source"), (target, kind == "d2h", "target")):
            region = self.memory.find(address, nbytes, f"{kind} copy's {what}")
            if (region.kind in ("pinned", "registered")) != host:
                raise AccessError(f"{kind} copy: its {what} is {region}")

    def clear(self, target: int, nbytes: int, stream: VirtualStream) -> None:
        with self._entered:
            self._alive()
            if nbytes == 0:
                return

            def body(operation: Operation) -> float:
                self._touch(operation, [one_range("target", target, nbytes, writes=True)])
                ctypes.memset(target, 0, nbytes)
                return self.costs.clear_ms(nbytes)

            self._issue(stream, "clear", body)

    def launch(
        self, kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...], stream: VirtualStream
    ) -> None:
        if list(map(type, args)) != SCALARS.get(kernel):  # the common case is quick
            signatures.check(kernel, args)
        with self._entered:
            self._alive()
            if grid == 0:
                return
            self._compile(kernel, variant)
            if self.faults.hit("launch", kernel):
                raise DeviceError(f"the launch of {kernel!r} failed: too many resources requested for launch.")
            self.traffic.launches[kernel] += 1
            fails = self.faults.hit("kernel", kernel)

            def body(operation: Operation) -> float:
                if fails:
                    return self._break(f"{operation} failed")
                return self._run(operation, kernel, variant, grid, args)

            self._issue(stream, kernel, body)

    def _compile(self, kernel: str, variant: tuple[Any, ...]) -> None:
        """A variant's first use."""
        if (kernel, variant) not in self._compiled:
            name = signatures.expression(kernel, variant)
            if self.faults.hit("compile", kernel):
                log = f"{signatures.KERNELS[kernel].file}(1): error: injected, in {name}"
                raise CompileError(f"the kernel {name!r} did not compile:\n{log}", log=log)
            self._compiled.add((kernel, variant))

    def _issue(self, stream: VirtualStream, what: str, body: Callable[[Operation], float]) -> None:
        operation = Operation(*self._clocks.next(stream.index), stream, what, self._host_ms)
        operation.body = body
        self._scheduler.issue(operation)

    def _run(
        self, operation: Operation, kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...]
    ) -> float:
        if not self._counts_bytes:
            self._run_kernel(kernel, variant, grid, args)
            return self.costs.launch_ms
        touched = accesses(kernel, variant, args, self.memory.view)
        self._touch(operation, touched)
        if self._is_compared(kernel, variant):
            copies = self._watch.before(touched)
            self._run_kernel(kernel, variant, grid, args)
            self._watch.after(operation, touched, copies)
        else:
            self._run_kernel(kernel, variant, grid, args)
        return self.costs.kernel_ms(touched, self.memory)

    def _is_compared(self, kernel: str, variant: tuple[Any, ...]) -> bool:
        if not (self.checks and self.compare):
            return False
        if (kernel, variant) not in self._seen:
            self._seen.add((kernel, variant))
            return True
        return self._scheduler.random.random() * self.compare < 1.0

    def _touch(self, operation: Operation, touched: list[Access]) -> None:
        if self.checks:
            self._watch.touch(operation, touched)

    # --- errors and the end of memory ---

    def _break(self, message: str) -> float:
        """An error that stays: nothing runs any more."""
        self._broken = message
        self._scheduler.stop()
        return 0.0

    def _alive(self) -> None:
        if self._broken:
            raise DeviceError(f"an error of work that was issued earlier: {self._broken}.", sticky=True)

    def free_dropped(self) -> None:
        """Release what was dropped since the last call (dropping can happen anywhere, also inside a call)."""
        while self._freed:
            region = self._freed.popleft()
            if region.kind != "pinned":
                self.memory.device.give_back(region.nbytes)
                self._free_in_order(region)
            else:
                self.memory.pinned.give_back(region.nbytes)
                self._release(region, self._end(self._host))

    def _end(self, stream: VirtualStream) -> Operation:
        return Operation(*self._clocks.next(stream.index), stream, "the end of memory", self._host_ms)

    def _free_in_order(self, region: Region) -> None:
        """Torch's allocator gives memory on in the order of the stream that it was asked on."""

        def body(operation: Operation) -> float:
            self._release(region, operation)
            return 0.0

        operation = self._end(region.stream or self._compute)
        if self._broken:
            body(operation)
            return
        operation.body = body
        self._scheduler.enqueue(operation)

    def _release(self, region: Region, operation: Operation) -> None:
        if self.checks and region.writer is not None and region.live and not self._broken:
            whole = one_range("memory", region.start, region.nbytes, writes=region.kind != "tensor")
            self._watch.touch(operation, [whole])
        self.memory.release(region)

    def close(self) -> None:
        with self._entered:
            self._scheduler.drain_all()
            for kind in ("device", "pinned", "output"):
                for region in self.memory.live(kind):
                    region.check_guards()


__all__ = ["AccessError", "EmulatedBackend", "EmulatorError", "RaceError"]
