"""Around every call of the backend: one lock, no Ctrl-C in its middle, and the first error of the program stays.

A device goes on when the host is interrupted.  Here the host runs the work, so an interrupt waits for the end of the
call: no operation is lost, and none runs half.
"""

from __future__ import annotations

import signal
import threading
from _signal import signal as set_handler  # signal.signal without its enums, which cost more than a call here
from threading import get_ident
from typing import TYPE_CHECKING, Any

from .memory import EmulatorError

if TYPE_CHECKING:
    from .backend import EmulatedBackend

_MAIN = threading.main_thread().ident


class Entered:
    def __init__(self, backend: EmulatedBackend) -> None:
        self._backend, self._lock = backend, threading.RLock()
        self._handler: Any = None
        self._depth = 0  # of the main thread: a finalizer may call in the middle of a call
        self._interrupted = False

    def __enter__(self) -> None:
        if get_ident() == _MAIN:  # the one thread in which handlers run
            if self._depth == 0:
                self._handler = set_handler(signal.SIGINT, self._interrupt)
            self._depth += 1
        self._lock.acquire()
        try:
            if self._backend.error is not None:
                raise type(self._backend.error)(str(self._backend.error))
            self._backend.free_dropped()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, EmulatorError):
            self._backend.error = error
        self._lock.release()
        if get_ident() == _MAIN:
            self._depth -= 1
            if self._depth == 0:
                set_handler(signal.SIGINT, self._handler)
                if self._interrupted:
                    self._interrupted = False
                    signal.raise_signal(signal.SIGINT)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._interrupted = True
