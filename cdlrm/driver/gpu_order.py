"""`Order`: what waits for what on a GPU.

Transfers (upload of plan and inputs, evict, fill) are issued on a stream of their own, kernels of the training on
torch's current stream; events order them:

* a plan's transfers come after the end of the batch that it waits for (`batch_ended`) and after every `fence`;
* a kernel comes after the transfers of its plan (`Tray.ready`), or, for rows that no plan knows of, after all.

In a steady step the host waits only for a tray of the ring whose batch has not run, or for staged rows to land.
Growth, trays that are made or become larger (see `staging`), moves outside of plans and `update="step"` wait too;
`traffic.synchronizations` counts each by its reason.
"""

from __future__ import annotations

from collections import deque

from .backend import Backend, Event, Stream


class Order:
    """The events of one group's records, between `transfer` and whichever streams are torch's current ones."""

    def __init__(self, backend: Backend, transfer: Stream) -> None:
        self.backend, self.transfer = backend, transfer
        self.uses: dict[Stream, Event] = {}  # the last work on records of each stream that was torch's current one
        self._moved: Event = None  # all transfers so far
        self._ended: deque[tuple[int, Event]] = deque(maxlen=64)
        self._fence: Event = None

    # --- work on records ---

    def stream(self) -> Stream:
        """torch's current stream: what is issued on it comes after all that was computed on others."""
        stream = self.backend.compute_stream()
        for other, event in list(self.uses.items()):
            if other != stream:
                self.backend.wait(stream, event)
        return stream

    def used(self, stream: Stream) -> None:
        """Work on records was issued on torch's current stream."""
        self.uses[stream] = self.backend.record(stream)

    def computed(self) -> Event:
        """An event after all that was computed."""
        return self.backend.record(self.stream())

    def after_moves(self, stream: Stream) -> None:
        """What is issued on `stream` from now on comes after all transfers so far."""
        if self._moved is not None:
            self.backend.wait(stream, self._moved)

    # --- transfers ---

    def before_transfer(self, wait_for: int) -> None:
        """The transfers of a plan that waits for that batch come next."""
        fence, self._fence = self._fence, None
        if fence is not None:
            self.backend.wait(self.transfer, fence)
        for batch, event in list(self._ended):
            if batch >= wait_for >= 0:
                self.backend.wait(self.transfer, event)
                break

    def moved(self) -> Event:
        """Transfers were issued; an event after all of them."""
        self._moved = self.backend.record(self.transfer)
        return self._moved

    def batch_ended(self, batch: int) -> Event:
        """All work on `batch` was issued; an event after it."""
        event = self.computed()
        self._ended.append((batch, event))
        return event

    def fence(self) -> None:
        """What was issued until now on any rows comes before any later transfer."""
        self._fence = self.computed()
