"""Random programs for the emulated backend, and two kernels that need no compiler."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

from cdlrm.driver import signatures

from .backend import EmulatedBackend

WORDS = 16  # of each buffer

Touched = tuple[int, int, int, bool]  # buffer, first word, words, whether it is written


def run_on_host(kernel: str, variant: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> None:
    """The two kernels that need no compiler here."""
    if kernel == "stream_copy":
        ctypes.memmove(int(args[0]), int(args[1]), 16 * int(args[2]))
    else:
        first, first_number, second, second_number, flag, number = map(int, args)
        if _int(first).value == first_number or _int(second).value == second_number:
            _int(flag).value = number


def _int(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def backend(seed: int = 0, **options: Any) -> EmulatedBackend:
    return EmulatedBackend(seed, **{"run": run_on_host, **options})


def stream_copy(device: EmulatedBackend, target: int, source: int, vectors: int, stream: Any) -> None:
    args = signatures.pack("stream_copy", {"target": target, "source": source, "vectors": vectors})
    device.launch("stream_copy", (), 1, args, stream)


def bytes_at(device: EmulatedBackend, address: int, nbytes: int) -> np.ndarray:
    return device.memory.view(address, np.uint8, nbytes, "a test")


class Program:
    """A random program on three streams and the host, run on the backend and, in order of issue, on a model.

    Operations are bits: `reached[s]` are those before the next one of stream s (3: the host).  A race is a pair that
    touches a word of one buffer, one of them writing, of which the first is not before the second.  Waits are added
    where they are needed, but forgotten with the probability `mistakes`.
    """

    def __init__(self, seed: int, mistakes: float) -> None:
        self.random = random.Random(seed)
        self.device = backend(seed, compare=4)
        self.mistakes = mistakes
        self.streams = [self.device.compute_stream(), self.device.new_stream(), self.device.new_stream()]
        self.held = [self.device.alloc(4 * WORDS), self.device.alloc(4 * WORDS), self.device.pinned(4 * WORDS)]
        for stream in self.streams[1:]:  # which the memory is new to
            self.device.wait(stream, self.device.record(self.streams[0]))
        self.model = [np.full(WORDS, -1, np.int32) for _ in self.held]
        self.touched: list[list[Touched]] = []
        self.reached = [0, 0, 0, 0]
        self.race = False

    def run(self, length: int) -> None:
        for _ in range(length):
            self.random.choice([self.copy, self.copy, self.kernel, self.clear, self.host, self.host])()
        for stream in range(3):
            self.device.synchronize(self.device.record(self.streams[stream]), "end")

    def order(self, stream: int, touched: list[Touched]) -> None:
        """Add an operation, ordered (by events, save for mistakes) after what it conflicts with."""
        if stream < 3:
            self.reached[stream] |= self.reached[3]
        for other in range(len(self.touched)):
            if not self.conflict(touched, self.touched[other]) or self.reached[stream] >> other & 1:
                continue
            if self.random.random() < self.mistakes:
                continue
            self.join(stream, next(s for s in range(3) if self.reached[s] >> other & 1))
        number = len(self.touched)
        self.race |= any(
            self.conflict(touched, self.touched[other]) and not self.reached[stream] >> other & 1
            for other in range(number)
        )
        self.touched.append(touched)
        self.reached[stream] |= 1 << number

    def join(self, stream: int, source: int) -> None:
        event = self.device.record(self.streams[source])
        self.reached[stream] |= self.reached[source]
        if stream < 3:
            self.device.wait(self.streams[stream], event)
        elif self.random.random() < 0.5:
            self.device.synchronize(event, "test")
        else:
            while not self.device.is_done(event):
                pass

    @staticmethod
    def conflict(mine: list[Touched], other: list[Touched]) -> bool:
        return any(
            a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2] and (a[3] or b[3]) for a in mine for b in other
        )

    def range(self, buffers: tuple[int, ...], multiple: int = 1) -> tuple[int, int, int]:
        first = self.random.randrange(0, WORDS, multiple)
        return self.random.choice(buffers), first, self.random.randrange(multiple, WORDS - first + 1, multiple)

    def address(self, buffer: int, word: int) -> int:
        return self.held[buffer].address + 4 * word

    def move(self, multiple: int, pairs: list[tuple[int, int]]) -> tuple[int, int, int, int, int, int]:
        target, source = self.random.choice(pairs)
        words = self.random.randrange(multiple, WORDS // 2 + 1, multiple)
        to, at = (self.random.randrange(0, WORDS - words + 1, multiple) for _ in range(2))
        if target == source:
            to, at = 0, WORDS // 2
        stream = self.random.randrange(3)
        self.order(stream, [(source, at, words, False), (target, to, words, True)])
        self.model[target][to : to + words] = self.model[source][at : at + words].copy()
        return target, to, source, at, words, stream

    def copy(self) -> None:
        target, to, source, at, words, stream = self.move(1, [(0, 1), (1, 0), (0, 2), (1, 2), (2, 0), (2, 1)])
        kind = "h2d" if source == 2 else "d2h" if target == 2 else "d2d"
        stream_of = self.streams[stream]
        self.device.copy(self.address(target, to), self.address(source, at), 4 * words, kind, stream_of)

    def kernel(self) -> None:
        target, to, source, at, words, stream = self.move(4, [(0, 1), (1, 0), (0, 0), (2, 0), (0, 2)])
        stream_copy(self.device, self.address(target, to), self.address(source, at), words // 4, self.streams[stream])

    def clear(self) -> None:
        buffer, first, words = self.range((0, 1))
        stream = self.random.randrange(3)
        self.order(stream, [(buffer, first, words, True)])
        self.model[buffer][first : first + words] = 0
        self.device.clear(self.address(buffer, first), 4 * words, self.streams[stream])

    def host(self) -> None:
        _, first, words = self.range((2,))
        writes = self.random.random() < 0.6
        self.order(3, [(2, first, words, writes)])
        address, array = self.address(2, first), self.held[2].array.view(np.int32)[first : first + words]
        if writes:
            self.device.host_writes(address, 4 * words)
            array[:] = self.random.randrange(1 << 30)
            self.model[2][first : first + words] = array
        else:
            self.device.host_reads(address, 4 * words)
            assert self.race or (array == self.model[2][first : first + words]).all()
