"""`Held`: memory that the device may still be using when nobody refers to its owner any more."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from ..errors import DeviceError
from .backend import Backend, Stream

log = logging.getLogger("cdlrm")


class Held:
    """`things` (buffers, or what has them) of `owner`, kept until the device has done all that was issued, also when
    a module is dropped without `close`.  `streams`: those that use them, besides torch's current one."""

    def __init__(self, owner: Any, backend: Backend, *streams: Stream) -> None:
        self.things: dict[str, Any] = {}
        self.release = weakref.finalize(owner, _let_go, backend, streams, self.things)
        self.release.atexit = False  # what ends with the process needs no order


def _let_go(backend: Backend, streams: tuple[Stream, ...], things: dict[str, Any]) -> None:
    try:
        for stream in (backend.compute_stream(), *streams):
            backend.synchronize(backend.record(stream), "close")
        for event in things.get("uses", {}).values():  # streams that were torch's current ones once
            backend.synchronize(event, "close")
    except DeviceError as error:  # a lost device uses nothing any more
        log.debug("%s", error)
    things.clear()
