"""Ctrl-C: the step that runs is finished, then the run ends in good order; threads start undisturbed."""

from __future__ import annotations

import _signal  # `signal` makes an enum of each handler, by way of an exception: 10 us at every kernel
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupt:
    """A context in which the first SIGINT during a step only sets `asked`.

    Outside of a step (waiting for data, evaluating), and the second time, it raises
    KeyboardInterrupt at once.  In other threads than the main one, signals are left alone.
    """

    def __init__(self) -> None:
        self.asked = False
        self._in_step = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the first SIGINT waits."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or not self._in_step:
            raise KeyboardInterrupt


class interrupt_later:
    """A context in which SIGINT waits; it is delivered at the end.  For the main thread; others get none anyway.

    An interrupt in the middle of `Thread.start` would leave a thread that can be neither used nor joined.
    """

    __slots__ = ("_came", "_previous")

    def __enter__(self) -> None:
        self._came, self._previous = False, None
        if threading.current_thread() is threading.main_thread():
            self._previous = _signal.getsignal(signal.SIGINT)
            if self._previous is not None:
                _signal.signal(signal.SIGINT, self._wait)

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            _signal.signal(signal.SIGINT, self._previous)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._came = True
