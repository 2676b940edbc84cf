"""Errors of the library: one class per kind of mistake, one sentence per message.

A message names the value that is wrong, the bound it breaks and the remedy.
"""

from __future__ import annotations

from typing import TypeVar


class CdlrmError(Exception):
    """Base of every error that this library raises on purpose."""


class InputError(CdlrmError, ValueError):
    """Ids, offsets, weights, dense features, labels or gradients that no kernel may see."""


class ConfigError(CdlrmError, ValueError):
    """A setting, flag or table description that cannot work."""


class DataError(CdlrmError, ValueError):
    """A file that is missing, empty, truncated, or has other columns than expected."""


class CacheTooSmallError(CdlrmError, RuntimeError):
    """`strict=True` and a batch has more distinct rows than the cache has slots.

    `batch`, its `distinct` rows, the slots that it would `need` and that there are (`have`).
    """

    def __init__(self, message: str, *, batch: int = -1, distinct: int = 0, need: int = 0, have: int = 0) -> None:
        super().__init__(message)
        self.batch, self.distinct, self.need, self.have = batch, distinct, need, have


class NonFiniteGradientError(CdlrmError, RuntimeError):
    """A gradient holds NaN or infinity; the step that produced it was not applied.

    `where`: the batch, for an error that is heard of after it.
    """

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class UsageError(CdlrmError, RuntimeError):
    """A call at a moment when it cannot be right (second backward, closed module, …)."""


class PipelineError(CdlrmError, RuntimeError):
    """A thread of the look-ahead failed; names thread and batch, `__cause__` is the error."""


class DeviceError(CdlrmError, RuntimeError):
    """The device reported an error: a launch, or a copy or kernel issued earlier.

    `sticky`: work that ran has failed, and the device does nothing more in this process; host tables stay readable.
    """

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class DeviceMemoryError(DeviceError):
    """The device has no room for an allocation; what was allocated before stays as it was."""


class PinError(DeviceError):
    """Host memory could not be pinned (not allowed, too much, already pinned); nothing stays pinned."""


class CompileError(DeviceError):
    """A kernel did not compile for this device; `log` is what the compiler said."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


Told = TypeVar("Told", bound=CdlrmError)


def retold(error: Told, sentence: str) -> Told:
    """`error` with another sentence, to be raised from it."""
    told = type(error)(sentence)
    told.__dict__.update(error.__dict__)
    return told
