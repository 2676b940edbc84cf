"""Virtual streams: queues of issued operations, which a seeded scheduler runs in any order that events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .clocks import MAX_STREAMS

# early: everything at once; late: nothing before it must; random: a few, of any stream; burst: now and then everything;
# starve: everything but one stream, which gets its turn when it must.
STYLES = ("early", "late", "random", "burst", "starve")


class Operation:
    """Work, the recording of an event, or the wait for one."""

    __slots__ = ("number", "clock", "stream", "what", "body", "records", "awaits", "issued_ms")

    def __init__(self, number: int, clock: np.ndarray, stream: VirtualStream, what: str, issued_ms: float) -> None:
        self.number, self.clock, self.stream, self.what, self.issued_ms = number, clock, stream, what, issued_ms
        self.body: Callable[[Operation], float] | None = None  # does the work; milliseconds that it would take
        self.records: VirtualEvent | None = None
        self.awaits: VirtualEvent | None = None

    def __str__(self) -> str:
        return f"{self.what} (operation {self.number // MAX_STREAMS}) on {self.stream}"


class VirtualStream:
    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.queue: deque[Operation] = deque()
        self.issued = 0  # operations
        self.ms = 0.0  # when what ran is over

    def __str__(self) -> str:
        return f"stream {self.name}"


class VirtualEvent:
    def __init__(self, stream: VirtualStream, clock: np.ndarray, patience: int) -> None:
        self.stream, self.clock, self.patience = stream, clock, patience
        self.done = False
        self.ms = 0.0
        self.timed = False


class Scheduler:
    """Runs pending operations; `style` is drawn from the seed unless it is given."""

    def __init__(self, seed: int, style: str | None, patience: int) -> None:
        self.random = random.Random(seed)
        self.style = style or self.random.choice(STYLES)
        self.streams: list[VirtualStream] = []
        self._starved = self.random.randrange(3)
        self._patience = patience
        self.stopped = False  # by an error of the device: what is pending never runs

    def add(self, stream: VirtualStream) -> VirtualStream:
        self.streams.append(stream)
        return stream

    def event(self, stream: VirtualStream, clock: np.ndarray) -> VirtualEvent:
        return VirtualEvent(stream, clock, 0 if self.style == "early" else self.random.randrange(self._patience))

    def enqueue(self, operation: Operation) -> None:
        operation.stream.queue.append(operation)

    def issue(self, operation: Operation) -> None:
        self.enqueue(operation)
        operation.stream.issued += 1
        self.some()

    def some(self) -> None:
        """Run as many pending operations as the style has it."""
        style = self.style
        if style == "late":
            return
        if style == "random":
            while self.random.random() < 0.6 and self._one(None):
                pass
        elif style == "starve":
            starved = self.streams[self._starved % len(self.streams)]
            while self._one(starved):
                pass
        elif style == "early" or self.random.random() < 0.1:
            while self._one(None):
                pass

    def finish(self, event: VirtualEvent) -> None:
        """Run what `event` needs."""
        needed = [event]
        while needed and not self.stopped:
            last = needed[-1]
            if last.done:
                needed.pop()
                continue
            head = last.stream.queue[0]
            if head.awaits is not None and not head.awaits.done:
                needed.append(head.awaits)
            else:
                self._run(last.stream)

    def drain(self, stream: VirtualStream) -> None:
        """Run everything of `stream`."""
        while stream.queue and not self.stopped:
            head = stream.queue[0]
            if head.awaits is not None and not head.awaits.done:
                self.finish(head.awaits)
            else:
                self._run(stream)

    def drain_all(self) -> None:
        while self._one(None):
            pass

    def stop(self) -> None:
        self.stopped = True
        for stream in self.streams:
            stream.queue.clear()

    def _one(self, starved: VirtualStream | None) -> bool:
        """Run the next operation of any stream that has one to run; whether there was one."""
        ready = [stream for stream in self.streams if stream.queue and stream is not starved and _may_run(stream)]
        if not ready:
            return False
        self._run(ready[0] if len(ready) == 1 else self.random.choice(ready))
        return True

    def _run(self, stream: VirtualStream) -> None:
        operation = stream.queue.popleft()
        if operation.records is not None:
            operation.records.done, operation.records.ms = True, stream.ms
        elif operation.awaits is not None:
            stream.ms = max(stream.ms, operation.awaits.ms)
        elif operation.body is not None:
            stream.ms = max(stream.ms, operation.issued_ms) + operation.body(operation)


def _may_run(stream: VirtualStream) -> bool:
    awaits: Any = stream.queue[0].awaits
    return awaits is None or awaits.done
