"""`Counts`: what a group did.  Rows and bytes that its cache moved are in `Cache.moves`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Counts:
    """Counters of one group since it was made; seconds are wall time of the stage that did the work."""

    steps: int = 0
    lookups: int = 0
    distinct: int = 0
    hits: int = 0
    short_windows: int = 0
    unannounced: int = 0
    skipped_steps: int = 0
    seconds_plan: float = 0.0
    seconds_transfer: float = 0.0
    seconds_lookup: float = 0.0
    seconds_update: float = 0.0
    distinct_by_table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    fills_by_table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
