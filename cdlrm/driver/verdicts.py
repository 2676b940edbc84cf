"""`Verdicts`: whether gradients are finite, decided on the device, told to the host without a wait.

A check writes its number where it finds NaN or infinity: into a flag on the device, which updates look at,
and into a twin in pinned memory, which the host reads once the event behind the check is done.  With
`nonfinite="raise"` it also sets the *sticky* flag, so that no later update runs until the host has raised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import NonFiniteGradientError
from . import signatures
from .backend import Backend, Event, Stream
from .base import Verdict
from .held import Held

FLAGS = 4096  # verdicts that may be undecided at once
BLOCKS = 256
VALUES_PER_BLOCK = 4 * signatures.BLOCK_THREADS


class DeviceVerdict(Verdict):
    """A verdict that the device has, and the host gets."""

    def __init__(self, of: Verdicts, number: int, raising: bool, where: str) -> None:
        self.known: bool | None = None
        self.of, self.number, self.raising, self.where = of, number, raising, where
        self.stream: Stream = None  # that the check was issued on, after what made the gradients
        self.event: Event = None

    @property
    def flag(self) -> int:
        """Device address of the flag, which equals `number` where a value was not finite."""
        return self.of.flag_address + 4 * (self.number % FLAGS)

    def __bool__(self) -> bool:
        if self.known is None:
            self.of.backend.synchronize(self.event, "verdict")
            self.of.decide(self)
        return bool(self.known)

    def stand_in(self) -> Tensor:
        if self.known is not None:
            return torch.full((), 0.0 if self.known else float("inf"), device=self.of.backend.device)
        self.of.order(self.of.backend.compute_stream(), self)
        self.of.backend.hand_over(self.of.backend.compute_stream())
        bad = self.of.flags[self.number % FLAGS] == self.number
        return torch.where(bad, float("inf"), 0.0)


class Verdicts:
    """The flags of one driver."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.flags = backend.output((FLAGS + 1,), torch.int32)  # the last is the sticky one
        self.flag_address = backend.address(self.flags)
        self.sticky = self.flag_address + 4 * FLAGS
        self.host = backend.pinned(4 * FLAGS)
        backend.host_writes(self.host.address, 4 * FLAGS)
        self.host.array[:] = 0
        self.told = self.host.array.view(np.int32)
        Held(self, backend).things["flags"] = self.host, self.flags
        backend.clear(self.flag_address, 4 * (FLAGS + 1), backend.compute_stream())
        self.number = 0
        self.waiting: deque[DeviceVerdict] = deque()
        self._checked: tuple[Stream, Event] | None = None  # the newest check
        self._cleared = True  # False: the sticky flag is set no longer than until the next check
        self._lock = threading.Lock()

    def check(self, grads: Sequence[Tensor], raising: bool, where: str) -> DeviceVerdict:
        """One launch a tensor (float32, contiguous)."""
        backend = self.backend
        stream = backend.compute_stream()
        verdict = self._next(raising, where)
        if self._checked is not None and self._checked[0] != stream:  # all checks write the sticky flag
            backend.wait(stream, self._checked[1])
        if not self._cleared:
            self._cleared = True
            backend.clear(self.sticky, 4, stream)
        for grad in grads:
            grid = min(-(-grad.numel() // VALUES_PER_BLOCK), BLOCKS)
            values = {
                "grad": backend.address(grad), "count": grad.numel(), "number": verdict.number, "flag": verdict.flag,
                "sticky": self.sticky if raising else 0,
                "host_flag": self.host.address + 4 * (verdict.number % FLAGS),
            }  # fmt: skip
            backend.launch("finite", (), grid, signatures.pack("finite", values), stream)
        return self._await(verdict, stream)

    def order(self, stream: Stream, verdict: DeviceVerdict) -> None:
        """What is issued on `stream` from now on comes after that check, and so after what made its gradients."""
        if verdict.stream != stream:
            self.backend.wait(stream, verdict.event)

    def either(self, verdicts: Sequence[DeviceVerdict]) -> DeviceVerdict:
        """One that is not finite where any of `verdicts` is."""
        out = verdicts[0]
        for other in verdicts[1:]:
            both = self._next(False, out.where)
            values = {"first": out.flag, "first_number": out.number, "second": other.flag,
                      "second_number": other.number, "flag": both.flag, "number": both.number}  # fmt: skip
            self.backend.launch("combine", (), 1, signatures.pack("combine", values), self.backend.compute_stream())
            out = both
        return out

    def _next(self, raising: bool, where: str) -> DeviceVerdict:
        with self._lock:
            self.number = self.number % (2**31 - 2) + 1  # never 0, which means none
            return DeviceVerdict(self, self.number, raising, where)

    def _await(self, verdict: DeviceVerdict, stream: Stream) -> DeviceVerdict:
        verdict.stream, verdict.event = self._checked = stream, self.backend.record(stream)
        with self._lock:
            self.waiting.append(verdict)
            late = self.waiting[0] if len(self.waiting) > FLAGS // 2 else None
        if late is not None:
            bool(late)
        return verdict

    def decide(self, verdict: DeviceVerdict) -> None:
        """Its event is done: what did the check find?"""
        if verdict.known is None:
            place = verdict.number % FLAGS
            self.backend.host_reads(self.host.address + 4 * place, 4)
            verdict.known = int(self.told[place]) != verdict.number

    def poll(self) -> None:
        """Decide what is done, oldest first; raises NonFiniteGradientError for the first that is not finite."""
        while True:
            with self._lock:
                if not self.waiting:
                    return
                verdict = self.waiting[0]
                if verdict.known is None and not self.backend.is_done(verdict.event):
                    return
                self.waiting.popleft()
            self.decide(verdict)
            if verdict.raising and not verdict.known:
                raise NonFiniteGradientError(
                    f"{verdict.where}: a gradient of the tables' output is not finite; nothing was updated by it or by "
                    f'a later batch; lower the learning rate, or use nonfinite="skip".',
                    where=verdict.where,
                )

    def resume(self) -> None:
        """Whoever trains has heard of the error: updates run again from the next check on."""
        self._cleared = False

    def finish(self, last: int | None = None, reason: str = "verdict") -> None:
        """Like `poll`, but waits for those that are not done: for all, or up to number `last`."""
        for verdict in list(self.waiting):
            if last is not None and verdict.number > last:
                break
            if verdict.known is None:
                if not self.backend.is_done(verdict.event):
                    self.backend.synchronize(verdict.event, reason)
                self.decide(verdict)
        self.poll()
