"""Around every call of the backend: one lock, and the first error of the program stays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .memory import EmulatorError

if TYPE_CHECKING:
    from .backend import EmulatedBackend


class Entered:
    def __init__(self, backend: EmulatedBackend) -> None:
        self._backend, self._lock = backend, threading.RLock()

    def __enter__(self) -> None:
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
