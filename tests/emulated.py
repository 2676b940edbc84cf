"""The library on the emulated GPU: `use()` makes every module of a test one on a `GpuDriver` whose streams run in an
order of its own.  No test in here.

Each module draws the next seed, and with it an order of the streams, whether its rows are reached by zero copy or
staged, and whether a record's weights and state lie together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cdlrm import placement
from cdlrm.driver.choose import Chosen
from cdlrm.driver.gpu import GpuDriver

drivers_made = 0  # in this process


class Emulated:
    """Drivers of the emulated GPU, one a module."""

    def __init__(self, first: int = 0, **settings: Any) -> None:
        self.first, self.settings = first, settings
        self.made = 0  # drivers, each with a seed of its own
        self.prepare: Callable[[Any], None] = lambda backend: None  # called with each backend before it is used

    def driver(self, chosen: Chosen) -> GpuDriver:
        rng = np.random.default_rng(self.first + self.made)
        return self._make(zero_copy=bool(rng.random() < 0.6), padded=bool(rng.random() < 0.5))

    def zero_copy_driver(self, chosen: Chosen) -> GpuDriver:
        return self._make(zero_copy=True, padded=False)

    def staged_driver(self, chosen: Chosen) -> GpuDriver:
        return self._make(zero_copy=False, padded=False)

    def _make(self, **how: bool) -> GpuDriver:
        from emulator.backend import EmulatedBackend

        backend = EmulatedBackend(self.first + self.made, **self.settings)
        global drivers_made
        drivers_made += 1
        self.made += 1
        self.prepare(backend)
        return GpuDriver(backend, **how)


def use(monkeypatch: Any, first: int = 0, **settings: Any) -> Emulated:
    """From now on device "cpu" and "auto" are the emulated GPU."""
    emulated = Emulated(first, **settings)
    monkeypatch.setitem(placement.DRIVERS, "cpu", lambda chosen: emulated.driver(chosen))
    return emulated
