"""Step times for `rivals.py --steps`: look-ahead against fetching on demand (LRU), in the same module and kernels.

The whole DLRM step of `dlrm_step.py` (Criteo Kaggle's tables, dim 16, Zipf 1.05 ids, batch 2048), contestants in turns.
"LRU on demand" is this library's module without `lookahead`: the victim is the row not used for longest, and the
batch waits for its rows.  "MIN ahead" is `lookahead(horizon="auto")`.  Both do the same arithmetic; they differ in
which rows move and in whether the step waits for them.

`cpu_ms` is the CPU time of all threads for a step, which other load on the machine changes least; `min_ms` and
`median_ms` are wall-clock and mean something on a quiet machine only (`load_average`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from dlrm_step import BATCH, KAGGLE, REST_SECONDS, Contestant

from cdlrm.data import Batch
from cdlrm.data.synthetic import SyntheticSource

TIMES = (2, 8)
STEPS = 12


def distinct_rows(batch: Batch) -> int:
    return sum(int(np.unique(np.asarray(jagged.values)).size) for jagged in batch.sparse.values())


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """A JSON line for each cache size."""
    made: dict[str, Any] = {"cardinalities": KAGGLE, "exponents": 1.05, "missing": 0.0, "seed": 1}
    batches = list(SyntheticSource(batch_size=BATCH, num_batches=rounds * STEPS + 256, **made))
    distinct = int(statistics.mean(distinct_rows(batch) for batch in batches[:16]))
    for times in TIMES:
        ratio = times * distinct / sum(KAGGLE)
        contestants = {
            "MIN ahead": Contestant(batches, cache_ratio=ratio, ahead=True, horizon="auto"),
            "LRU on demand": Contestant(batches, cache_ratio=ratio, ahead=False),
            "all resident": Contestant(batches, cache_ratio=1.0, ahead=False),
        }
        cpu: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds):
            order = list(contestants)
            for name in order[number % 3 :] + order[: number % 3]:
                started = time.process_time()
                contestants[name].block(STEPS)
                time.sleep(REST_SECONDS)  # what its threads do now is for its next block
                cpu[name].append(1e3 * (time.process_time() - started) / STEPS)
            if number == 0:  # the warm-up round
                for name in order:
                    contestants[name].seconds.clear()
                    cpu[name].clear()
        yield {
            "bench": "rivals_steps", "load_average": round(os.getloadavg()[0], 1),
            "times_distinct": times, "distinct": distinct, "batch": BATCH, "rounds": rounds,
            "steps": {
                name: {"cpu_ms": round(statistics.median(cpu[name]), 2), "min_ms": round(1e3 * min(c.seconds), 2),
                       "median_ms": round(1e3 * statistics.median(c.seconds), 2),
                       **{key: round(value, 4) for key, value in c.moved().items()}}
                for name, c in contestants.items()
            },
        }  # fmt: skip
        for contestant in contestants.values():
            contestant.close()
