"""Measures this machine: what every stage of a training step costs here, in about a minute.

* Memory: sequential copies, and copies of records from random places by their size.
* The stages of the tables, by our own code on small tables: reader, planner, transfer and trainer take turns in one
  thread, so that nothing overlaps, over several dims, batch sizes, caches, skews and optimizers.
* The MLPs and the interaction, forward and backward, for several shapes.
* Whole steps, with threads, of a few configurations: what working at the same time costs beyond the sum of the parts.

Each is repeated in turn with the others and its least time is kept, since what else runs on the machine only adds.
Then the costs of the units of work (`work`) are fitted, once to wall time and once to the core time used: their ratio
says how much of a stage runs on several cores.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine import cores, describe
from .fit import fit_costs
from .measure import Case, Dense, Memory, Tables, Whole
from .profiles import Profile
from .work import (
    Counts,
    Moves,
    dense_counts,
    fill_counts,
    lookup_counts,
    plan_counts,
    resident_counts,
    update_counts,
    write_counts,
)

Tell = Callable[[float], Any]
"""Called with the share of the work that is done, from 0 to 1."""

CASES = (
    Case(2048, 16, "sgd", 1.05, 0.1),
    Case(2048, 64, "rowwise-adagrad", 1.05, 0.1),
    Case(512, 32, "rowwise-adagrad", 0.6, 0.2),
    Case(4096, 8, "rowwise-adagrad", 1.3, 0.3),
    Case(1024, 128, "sgd", 1.2, 0.05),
    Case(1024, 32, "adagrad", 1.05, 0.1),
    Case(2048, 64, "adagrad", 0.8, 0.4),
    Case(1024, 16, "adam", 0.9, 0.1),
    Case(2048, 48, "adam", 1.2, 0.2),
    Case(512, 24, "rowwise-adagrad", 1.05, 0.3, ids=4),
    Case(2048, 16, "sgd", 1.05, 1.0),  # resident
    Case(512, 32, "rowwise-adagrad", 0.6, 1.0),
)
DENSE_CASES: tuple[tuple[int, int, int, tuple[int, ...], tuple[int, ...]], ...] = (
    # batch size, features, dim, hidden layers of the bottom MLP, layers of the top MLP
    (2048, 26, 16, (128, 64), (128, 64, 1)),
    (512, 26, 16, (128, 64), (128, 64, 1)),
    (4096, 26, 16, (64,), (64, 1)),
    (2048, 26, 64, (128, 64), (128, 64, 1)),
    (1024, 26, 128, (256,), (256, 1)),
    (2048, 26, 32, (512, 256), (512, 256, 1)),
    (512, 8, 32, (512, 256, 64), (1024, 512, 1)),
    (4096, 8, 16, (64,), (32, 1)),
    (1024, 50, 16, (64,), (128, 1)),
    (256, 26, 32, (128, 64), (128, 64, 1)),
)
WHOLE_CASES = (
    Case(2048, 16, "rowwise-adagrad", 0.9, 0.1),
    Case(1024, 64, "adagrad", 0.6, 0.2),
    Case(512, 16, "sgd", 0.8, 0.3),
)


def calibrate(tell: Tell = lambda share: None, seconds: float = 25.0) -> Profile:
    """The profile of this machine.  `seconds` bounds the part that is repeated (twice at least); about 20 more are
    spent once, and both are more on a busy machine."""
    memory = Memory()
    tell(0.02)
    dense = [Dense(*case) for case in DENSE_CASES]
    tables: list[Tables] = []
    for number, case in enumerate(CASES):
        tables.append(Tables(case))
        tell(0.02 + 0.4 * (number + 1) / len(CASES))
    whole = [Whole(case) for case in WHOLE_CASES]
    measured: list[Dense | Tables | Whole] = [*dense, *tables, *whole]
    started, rounds = time.perf_counter(), 0
    try:
        while rounds < 2 or time.perf_counter() - started < seconds:
            memory.measure()
            for each in measured:
                each.measure()
            rounds += 1
            tell(0.42 + 0.58 * min((time.perf_counter() - started) / max(seconds, 1e-9), 1.0))
    finally:
        for each in measured:
            each.close()
    profile = _profile(memory, dense, tables, rounds)
    return dataclasses.replace(profile, background_cost=max(0.0, statistics.median(w.excess(profile) for w in whole)))


# --- the profile ---


def _profile(memory: Memory, dense: list[Dense], tables: list[Tables], rounds: int) -> Profile:
    costs: dict[str, dict[str, dict[str, float]]] = {
        "dense": _fit([dense_counts(d.shape) for d in dense], [(d.least.wall, d.least.cores) for d in dense])
    }
    cached = [t for t in tables if t.case.cache_ratio < 1]
    resident = [t for t in tables if t.case.cache_ratio == 1]
    counted: dict[str, Callable[[Tables, Moves], Counts]] = {
        "plan": lambda t, m: plan_counts(m),
        "resident": lambda t, m: resident_counts(m),
        "transfer": lambda t, m: {**fill_counts(t.shape, m), **write_counts(t.shape, m)},
        "lookup": lambda t, m: lookup_counts(t.shape, m),
        "update": lambda t, m: update_counts(t.shape, m),
    }
    of = {"plan": cached, "resident": resident, "transfer": cached, "lookup": tables, "update": tables}
    for stage, counts in counted.items():
        measured = [t.typical("plan" if stage == "resident" else stage) for t in of[stage]]
        costs[stage] = _fit([counts(t, t.mean_moves()) for t in of[stage]], measured)
    facts = describe()
    rates = [np.mean([t.mean_moves().lookups / t.typical("plan")[0] for t in some]) for some in (cached, resident)]
    flops = max(d.shape.dense_flops / d.least.wall for d in dense)
    source = f"measured by `cdlrm calibrate`, {rounds} rounds, on {facts['processor']}"
    return Profile(
        name=f"this machine ({facts['processor']})", kind="cpu", cores=cores(),
        host_memory_bytes=int(facts["memory_bytes"] or 0), host_gb_per_s=memory.gb_per_s(),
        host_record_gb_per_s=memory.record_gb_per_s(), planner_lookups_per_s=float(rates[0]),
        segment_lookups_per_s=float(rates[1]),
        device_memory_bytes=int(facts["memory_bytes"] or 0), device_gb_per_s=memory.gb_per_s(),
        fp32_tflops=float(flops) / 1e12, costs=costs,
        spread=float(np.median([each.spread for each in (memory.sequential, *(d.least for d in dense))])),
        sources=dict.fromkeys(("host", "device", "costs", "planner_lookups_per_s"), source),
    )  # fmt: skip


def _fit(counts: list[Counts], seconds: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {
        "wall": fit_costs(counts, [wall for wall, _ in seconds]),
        "core": fit_costs(counts, [core for _, core in seconds]),
    }
