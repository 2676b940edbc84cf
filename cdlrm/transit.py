"""Tensors between the host and the device of the MLPs, without the host waiting for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .driver.cuda import is_sticky
from .errors import DeviceError, NonFiniteGradientError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, of any shape and dtype, on `device`: the same object on the CPU; to a GPU through pinned
    memory, in the order of torch's current stream."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class LateCheck:
    """Scalars of the steps on a GPU that must be finite.

    The scalars of a step travel home in one copy, and are read when they have arrived: as a rule a step later.  The
    host waits only where more than `most` steps are unread, which `waited` is told.
    """

    def __init__(self, most: int, waited: Callable[[], None] = lambda: None) -> None:
        self.most, self.waited = most, waited
        self._waiting: deque[tuple[str, list[str], Tensor, Any]] = deque()

    def watch(self, step: str, scalars: Mapping[str, Tensor]) -> None:
        """After the work of `step` was issued.  Raises NonFiniteGradientError for an earlier step, whose name is in
        the error's `where`, and DeviceError where its work failed."""
        home, event = send_home(torch.stack([scalar.float() for scalar in scalars.values()]))
        self._waiting.append((step, list(scalars), home, event))
        self._read(self.most)

    def finish(self) -> None:
        """Wait for all steps; raises as `watch` does."""
        self._read(0)

    def _read(self, most: int) -> None:
        """All that have arrived, and those beyond `most`."""
        while self._waiting:
            step, names, home, event = self._waiting[0]
            try:
                if not event.query():
                    if len(self._waiting) <= most:
                        return
                    self.waited()
                    event.synchronize()
            except RuntimeError as error:
                self._waiting.clear()
                raise _failed(step, error) from error
            self._waiting.popleft()
            for name, value in zip(names, home.tolist(), strict=True):
                if not math.isfinite(value):
                    self._waiting.clear()
                    raise NonFiniteGradientError(not_finite(name, value), where=step)


def wait_for(device: torch.device) -> None:
    """Until everything that torch's current stream was given has run.  Raises DeviceError where it failed."""
    if device.type == "cpu":
        return
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        raise _failed("earlier work", error) from error


def _failed(what: str, error: RuntimeError) -> DeviceError:
    said = str(error).strip().partition("\n")[0]
    return DeviceError(f"{what} failed on the device: {said}.", sticky=is_sticky(error))


def not_finite(what: str, value: float) -> str:
    """The sentence about a step whose `what` is NaN or infinite."""
    return f"the {what} is {value}; lower --learning-rate, or use --nonfinite skip to leave such steps out."


def send_home(values: Tensor) -> tuple[Tensor, Any]:
    """A copy of a GPU's tensor in pinned memory, and the event after which it is there."""
    home = values.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return home, event
