"""The library on the emulated GPU: `use()` makes every module of a test one on a `GpuDriver` whose streams run in an
order of its own.  No test in here.

Each module draws the next seed, and with it an order of the streams, whether its rows are reached by zero copy or
staged, and whether a record's weights and state lie together.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from cdlrm import placement
from cdlrm.driver.choose import Chosen
from cdlrm.driver.gpu import GpuDriver


class Emulated:
    """Drivers of the emulated GPU, one a module; `seeds` tells how many there were."""

    def __init__(self, first: int = 0, **settings: Any) -> None:
        self.seeds = itertools.count(first)
        self.settings = settings
        self.drivers: list[GpuDriver] = []
        self.made = 0

    def driver(self, chosen: Chosen) -> GpuDriver:
        from emulator.backend import EmulatedBackend

        seed = next(self.seeds)
        rng = np.random.default_rng(seed)
        backend = EmulatedBackend(seed, **self.settings)
        made = GpuDriver(backend, zero_copy=bool(rng.random() < 0.6), padded=bool(rng.random() < 0.5))
        self.made += 1
        self.drivers = [*self.drivers[-7:], made]
        return made


def use(monkeypatch: Any, first: int = 0, **settings: Any) -> Emulated:
    """From now on device "cpu" and "auto" are the emulated GPU."""
    emulated = Emulated(first, **settings)
    monkeypatch.setitem(placement.DRIVERS, "cpu", emulated.driver)
    return emulated
