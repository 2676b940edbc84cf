"""Scan + plan + segments per lookup on one thread and on two, against a bare stamp-array dedupe on one.

All see the same ids, batch by batch, in one run, warmed up (the cache is full and evicting).
Run `python bench/planning.py`; one JSON line a case is appended to bench/results/planning.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numba as nb
import numpy as np
import torch

from cdlrm.plan import Planner, shards_for
from cdlrm.plan.claims import finish, wait
from cdlrm.plan.team import Team

TABLES = 26
ROWS = 1_000_000
SETTLE = 40  # batches after the warm-up: so long it takes a virtual machine to find pages for what was allocated
KAGGLE = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
TERABYTE = [
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
]  # fmt: skip
SHAPES: list[tuple[str, int, int, list[int], list[int], list[int]]] = [  # as in DLRM's run scripts
    ("kaggle", 128, 16, [13, 512, 256, 64, 16], [512, 256, 1], KAGGLE),
    ("kaggle", 2048, 16, [13, 512, 256, 64, 16], [512, 256, 1], KAGGLE),
    ("terabyte", 2048, 64, [13, 512, 256, 64], [512, 512, 256, 1], TERABYTE),
]
RESULTS = Path(__file__).resolve().parent / "results" / "planning.jsonl"


@nb.njit(nogil=True, cache=True)
def dedupe(rows, batch, stamp, unique):
    """The rival: one pass, one 4-byte stamp a row; distinct rows in order of first occurrence."""
    n = 0
    for i in range(rows.size):
        row = rows[i]
        if stamp[row] != batch:
            stamp[row] = batch
            unique[n] = row
            n += 1
    return n


@nb.njit(nogil=True, cache=True)
def ping(worker, claims, begin, end):
    """Two threads write the same cache line in turn, in rounds."""
    for i in range(begin, end):
        wait(claims, 0, 2 * i + worker)
        finish(claims, 0)


def core_to_core_ns(team: Team, rounds: int = 1000) -> float:
    """From one core's write of a cache line to the other's.  Where virtual processors wander, they are neighbours at
    times and far from each other at others, which two threads feel and one does not."""
    took: list[int] = []

    def kernel(worker: int, workers: int, claims: np.ndarray) -> None:
        ping(worker, claims, 0, 50)  # then both are awake
        begun = time.perf_counter_ns()
        ping(worker, claims, 50, 50 + rounds)
        took.append(time.perf_counter_ns() - begun)

    team.run(kernel, 2, 2)
    return min(took) / (2 * rounds)


def at_once_ns(team: Team, rows: np.ndarray, batch: int, stamps: np.ndarray, uniques: np.ndarray) -> int:
    """Of two dedupes at the same time that share nothing but `rows`, the slower: no two threads can gain more than such
    ones do.  Two virtual processors may be one core's hyperthreads at times."""
    took = [0, 0]

    def kernel(worker: int, workers: int, claims: np.ndarray) -> None:
        ping(worker, claims, 0, 50)
        begun = time.perf_counter_ns()
        dedupe(rows, batch, stamps[worker], uniques[worker])
        took[worker] = time.perf_counter_ns() - begun
        finish(claims, 1)
        wait(claims, 1, 2)

    team.run(kernel, 2, 2, 2)
    return max(took)


def zipf_ids(rng: np.random.Generator, samples: int, zipf: float) -> np.ndarray:
    """Group rows int64 [TABLES * samples], feature-major; popular ids scattered over each table."""
    ranks = np.arange(1, ROWS + 1, dtype=np.float64)
    cdf = np.cumsum(ranks**-zipf)
    cdf /= cdf[-1]
    parts = []
    for t in range(TABLES):
        rank = np.searchsorted(cdf, rng.random(samples)).astype(np.int64)
        parts.append((rank * 387_420_489 + 7 * t) % ROWS + t * ROWS)  # a multiplier coprime to ROWS permutes
    return np.concatenate(parts)


def run(samples: int, zipf: float, cache_rows: int, horizon: int, timed: int, both: bool) -> dict[str, object]:
    """The rival and a planner on one thread in turn; `both`: and another planner on two threads (which leaves
    less of the shared cache to each)."""
    rng = np.random.default_rng(0)
    planners = [Planner(TABLES * ROWS, cache_rows, prefetch_depth=1, threads=threads) for threads in (1, 2)[: 1 + both]]
    team = Team(2)
    stamps = np.full((3 if both else 1, TABLES * ROWS), -1, np.int32)
    uniques = np.empty((3, TABLES * samples), np.int64)
    number = 0

    def step() -> tuple[float, ...]:
        """Wall time of the rival, CPU time of it, those of one thread, its scan alone, wall time of two, of two rivals
        at once; from core to core; counts."""
        nonlocal number
        rows = zipf_ids(rng, samples, zipf)
        apart = core_to_core_ns(team) if both else 0
        begun = clock()
        distinct = dedupe(rows, number, stamps[0], uniques[0])
        rival = clock() - begun
        at_once = at_once_ns(team, rows, number, stamps[1:], uniques[1:]) if both else 0
        times = []
        for planner in planners:  # as the pipeline: scan, ask whether a victim is needed, plan
            begun = clock()
            planner.scan(rows)
            scanned = clock()
            evicts = 0
            if planner.window > horizon:
                evicts = planner.plan().evict_rows.size
                planner.needs_victim()
            times.append((clock() - begun, scanned - begun))
        number += 1
        if both:
            apart = max(apart, core_to_core_ns(team))
        return (*rival, *times[0][0], times[0][1][0], times[-1][0][0], at_once, apart, distinct, evicts)

    for warm in range(1, 4000):
        if step()[-1] > 0 and warm > horizon + 8:
            break
    for _ in range(SETTLE):
        step()
    lookups = TABLES * samples
    steps = np.array([step() for _ in range(timed)], np.float64)
    names = ("dedupe", "dedupe_cpu", "ours", "ours_cpu", "scan", "two_threads", "two_dedupes")[: 5 + 2 * both]
    ns = {name: steps[:, i] / lookups for i, name in enumerate(names)}
    for planner in planners:
        planner.check()
        planner.close()
    result: dict[str, object] = {
        "bench": "planning_two_threads" if both else "planning",
        "lookups": lookups,
        "rows": TABLES * ROWS,
        "zipf": zipf,
        "cache_rows": planners[0].cache_rows,
        "shards": planners[0].shards,
        "horizon": horizon,
        "distinct_per_lookup": round(float(steps[:, -2].mean() / lookups), 3),
        "evicts_per_distinct": round(float((steps[:, -1] / steps[:, -2]).mean()), 3),
        "warm_batches": warm,
        "timed_batches": timed,
        "load": round(os.getloadavg()[0], 1),
    }
    for name, values in ns.items():
        result |= {
            f"{name}_ns_median": round(float(np.median(values)), 2),
            f"{name}_ns_min": round(float(values.min()), 2),
        }
    for how, of in (("median", np.median), ("min", np.min)):
        result[f"ratio_{how}"] = round(float(of(ns["ours"]) / of(ns["dedupe"])), 2)
        result[f"cpu_ratio_{how}"] = round(float(of(ns["ours_cpu"]) / of(ns["dedupe_cpu"])), 2)
        if both:
            result[f"two_threads_gain_{how}"] = round(float(of(ns["ours"]) / of(ns["two_threads"])), 2)
    if both:
        apart, possible = steps[:, -3], 2 * ns["dedupe"] / ns["two_dedupes"]
        gain, free = ns["ours"] / ns["two_threads"], possible >= 1.9
        result |= {
            "core_to_core_ns_min": round(float(apart.min())), "core_to_core_ns_median": round(float(np.median(apart))),
            "two_dedupes_gain_median": round(float(np.median(possible)), 2),
            "two_threads_share_of_it": round(float(np.median(gain / possible)), 2),
            # of the batches in which the machine had two processors to give
            "free_batches": int(free.sum()),
            "two_threads_gain_free": round(float(np.median(gain[free])), 2) if free.any() else None,
        }  # fmt: skip
    team.close()
    return result


def shape(name: str, samples: int, dim: int, bottom: list[int], top: list[int], rows: list[int]) -> dict[str, object]:
    """Planning a batch of DLRM's published shapes against its dense part alone (forward, backward) on all cores."""
    rng = np.random.default_rng(0)
    bases = np.concatenate([[0], np.cumsum(rows)])[:-1, None]
    number = np.array(rows)[:, None]

    def ids() -> np.ndarray:
        """Zipf 1.05 (the continuous law, cut), popular ids scattered."""
        rank = (((number**-0.05 - 1) * rng.random((len(rows), samples)) + 1) ** -20).astype(np.int64)
        return (np.minimum(rank, number - 1) * 387_420_489 % number + bases).ravel()

    distinct = np.unique(ids()).size
    planner = Planner(sum(rows), 8 * distinct)
    times: list[np.ndarray] = []
    while len(times) < 60:
        batch = ids()
        begun = clock()
        planner.scan(batch)
        if planner.window > 96:
            plan = planner.plan()
            planner.needs_victim()
            if plan.evict_rows.size:
                times.append(clock() - begun)
    planner.close()
    ms = np.array(times) / 1e6
    dense = 1e3 * np.array(dense_seconds(samples, dim, bottom, top, len(rows)))
    return {
        "bench": "planning_shape", "shape": name, "samples": samples, "lookups": samples * len(rows), "rows": sum(rows),
        "distinct": distinct, "cache_rows": planner.cache_rows, "horizon": 96, "load": round(os.getloadavg()[0], 1),
        "plan_ms_min": round(float(ms[:, 0].min()), 3), "plan_ms_median": round(float(np.median(ms[:, 0])), 3),
        "plan_cpu_ms_median": round(float(np.median(ms[:, 1])), 3),
        "dense_ms_min": round(float(dense.min()), 3), "dense_ms_median": round(float(np.median(dense)), 3),
        "plan_over_dense_min": round(float(ms[:, 0].min() / dense.min()), 3),
    }  # fmt: skip


def dense_seconds(samples: int, dim: int, bottom: list[int], top: list[int], features: int) -> list[float]:
    """Seconds of steps of a DLRM without its tables: MLPs and dot interaction, forward and backward."""

    def mlp(sizes: list[int]) -> torch.nn.Sequential:
        layers = [(torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        return torch.nn.Sequential(*(part for layer in layers for part in layer))

    below, above = mlp(bottom), mlp([dim + features * (features + 1) // 2, *top])
    left, right = torch.tril_indices(features + 1, features + 1, -1)
    numbers, rows = torch.rand(samples, bottom[0]), torch.rand(samples, features, dim, requires_grad=True)
    seconds = []
    for _ in range(32):
        begun = time.perf_counter()
        x = below(numbers)
        together = torch.cat([x[:, None], rows], 1)
        pairs = (together @ together.transpose(1, 2))[:, left, right]
        above(torch.cat([x, pairs], 1)).mean().backward()
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


def clock() -> np.ndarray:
    """Wall time and this thread's CPU time, ns (a busy machine takes the CPU away, not the CPU time)."""
    return np.array([time.perf_counter_ns(), time.thread_time_ns()])


def machine() -> dict[str, object]:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = f"{names[0]} x{len(names)}" if names else cpu
    return {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timed", type=int, default=80, help="timed batches a case")
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="only the small caches (no long warm-up)")
    parser.add_argument("--shapes", action="store_true", help="instead: DLRM's shapes against their dense part")
    args = parser.parse_args()
    if args.timed < 1:
        parser.error(f"--timed {args.timed}: must be 1 or more.")
    # Exponents that give 0.38-0.5 distinct rows a lookup at each batch size.
    cases = [(2048, 1.15, 100_000), (16_384, 1.05, 800_000)]
    if not args.quick:
        cases += [(16_384, 1.05, TABLES * ROWS // 10), (2048, 1.15, TABLES * ROWS // 10)]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    about = machine()
    runs = [(case, False) for case in cases] + [(case, True) for case in cases if shards_for(case[2]) > 1]
    # A process each: what a case has freed lies in small pages, in which the next would find its arrays.
    alone = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    results = (alone.submit(run, *case, args.horizon, args.timed, both).result() for case, both in runs)
    for result in (shape(*one) for one in SHAPES) if args.shapes else results:
        line = json.dumps(about | result)
        print(line)
        with RESULTS.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
